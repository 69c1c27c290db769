/* test_models_pass.c: the memory of a decoder's passes, and their blocks of rows. */
#include "base/arena.h"
#include "model_fixture.h"
#include "models/decoder/engine.h"
#include "models/decoder/pass.h"
#include "sizes_fixture.h"

enum { SEQUENCES = 5, MAX_THREADS = 8 };

typedef struct shape {
    int n;
    struct {
        int rows, past;
    } seq[SEQUENCES];
} shape;

static const shape shapes[] = {
    {1, {{1, 0}}},
    {1, {{1, 300}}},                                          /* one long sequence decodes: split mode */
    {3, {{1, 10}, {1, 500}, {1, 200}}},
    {5, {{1, 500}, {1, 63}, {1, 64}, {1, 65}, {1, 300}}},     /* more threads than whole units */
    {1, {{200, 0}}},                                          /* two row blocks */
    {4, {{33, 300}, {1, 400}, {170, 5}, {64, 0}}},            /* a border of a row block within a sequence */
    {2, {{16, 256}, {17, 256}}},
};

/* The memory of a model, of an engine and of passes over each of the shapes, as recorded. */
MP_TEST(models_pass_sizes_recorded) {
    enum { SHAPES = sizeof shapes / sizeof *shapes, OTHERS = 7, COUNT = OTHERS + SHAPES };
    static const mp_dtype floats[] = {MP_F32}, quantised[] = {MP_Q8_0, MP_Q4_0, MP_Q6_K};
    static const struct {
        tiny_kind kind;
        uint64_t recorded[2][COUNT];
    } kinds[] = {
        {{.arch = "llama"},
         {{7061504, 6050624, 7068672, 5376, 1536, 39552, 1758208, 125184, 131136, 153024, 171456, 1337792, 1431680,
           337728},
          {1474304, 6050624, 1481472, 5376, 816, 42624, 1758208, 135168, 141120, 164544, 184512, 1494464, 1588352,
           372288}}},
        {{.arch = "qwen3"},
         {{7061504, 6050624, 7069440, 5376, 1536, 39552, 1758400, 125184, 131136, 153024, 171456, 1337792, 1431680,
           337728},
          {1474304, 6050624, 1482240, 5376, 816, 42624, 1758400, 135168, 141120, 164544, 184512, 1494464, 1588352,
           372288}}},
        {{.arch = "gemma3", .window = 80, .scaled = true},
         {{7061504, 6050624, 7075584, 5376, 1536, 39552, 1759936, 125312, 131264, 153408, 172096, 1363392, 1465984,
           341952},
          {1474304, 6050624, 1488384, 5376, 816, 42624, 1759936, 135296, 141248, 164928, 185152, 1520064, 1622656,
           376512}}},
        {{.arch = "qwen3moe", .experts = 6},
         {{2441216, 6050624, 2449152, 5376, 1536, 53248, 4122304, 169408, 175168, 201280, 223808, 1846144, 2432896,
           449856},
          {611072, 6050624, 619008, 5376, 816, 41088, 4122304, 133952, 139904, 168320, 193152, 2039872, 2705152,
           451456}}},
        {{.arch = "gpt_oss", .window = 80, .experts = 5, .biased = true},
         {{2441216, 6050624, 2456448, 5376, 1536, 53248, 3533479, 169344, 175104, 201088, 223744, 1844544, 2430656,
           449536},
          {611072, 6050624, 626304, 5376, 816, 41088, 3533479, 133888, 139840, 168128, 193088, 2038272, 2702912,
           451136}}},
        {{.arch = "deepseek2", .experts = 6},
         {{8437760, 6050624, 8451264, 5376, 6528, 153216, 5622802, 485824, 527296, 645376, 738688, 5690432, 7565248,
           1400192},
          {3085376, 6050624, 3098880, 5376, 3288, 154752, 5622802, 490880, 532352, 651200, 745280, 5771840, 7672768,
           1417536}}},
    };
    int wrong = 0;
    for (size_t i = 0; i < 2 * sizeof kinds / sizeof *kinds; i++) {
        tiny_model tiny;
        uint64_t got[COUNT];
        char what[64];
        const tiny_kind *kind = &kinds[i / 2].kind;
        tiny_load(&tiny, tiny_decoder_spec_as(kind, i % 2 ? quantised : floats, i % 2 ? 3 : 1, 42, -1),
                  i % 2 ? MP_COMPUTE_AUTO : MP_COMPUTE_F32, 1);
        const mp_decoder *model = (const mp_decoder *)tiny.model;
        tiny.loader.ops->footprint(tiny.loader.self, &got[0], &got[1]);
        got[2] = tiny.model->ops->bytes(tiny.model);
        got[3] = mp_sample_bytes(model);
        got[4] = (uint64_t)mp_kv_token_bytes(&model->kv);
        got[5] = mp_decoder_thread_bytes(model, 5);
        got[6] = (uint64_t)model->base.facts.parameters;
        for (int s = 0; s < SHAPES; s++) {
            mp_row_seq seq[SEQUENCES] = {{0}};
            mp_rows rows = {.n_seq = shapes[s].n, .seq = seq};
            for (int n = 0; n < rows.n_seq; n++) {
                seq[n] = (mp_row_seq){.row0 = rows.M, .rows = shapes[s].seq[n].rows, .past = shapes[s].seq[n].past};
                rows.M += seq[n].rows;
            }
            got[OTHERS + s] = mp_decoder_pass_bytes(model, &rows, 3);
        }
        snprintf(what, sizeof what, "%s, %s", kind->arch, i % 2 ? "quantised" : "float32");
        wrong += !sizes_are(what, got, kinds[i / 2].recorded[i % 2], COUNT);
        tiny_unload(&tiny);
    }
    MP_CHECK_INT(wrong, 0);
}

/* Row blocks have at most MP_DECODER_ROWS rows, whole tiles of them, and differ by less than a tile per block. A model
 * with experts has one block. */
MP_TEST(models_pass_divides_rows_into_blocks) {
    static const mp_decoder dense, experts = {.experts = {.count = 2}};
    for (int M = 1; M <= 5 * MP_DECODER_ROWS; M++) {
        const int rows = mp_decoder_block_rows(&dense, M), blocks = (M + rows - 1) / rows;
        MP_CHECK(rows <= MP_DECODER_ROWS && (rows == M || rows % MP_DECODER_TILE == 0));
        MP_CHECK(blocks <= (M + MP_DECODER_ROWS - 1) / MP_DECODER_ROWS);
        MP_CHECK(M > MP_DECODER_ROWS || rows == M);
        MP_CHECK(M - (blocks - 1) * rows > rows - blocks * MP_DECODER_TILE);
        MP_CHECK_INT(mp_decoder_block_rows(&experts, M), M);
    }
}
