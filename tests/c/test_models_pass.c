/* test_models_pass.c: how a decoder's pass divides its attention among threads, and the memory that it takes. */
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

/* Every unit belongs to one thread, units cover every row of every KV head (in split mode: every KV block), and no
 * thread has more than its share and one unit. */
static void check_shares(const mp_decoder_pass *pass, int threads) {
    const bool split = pass->mode == MP_ATTEND_SPLIT;
    int64_t covered[SEQUENCES][TINY_KV_HEADS] = {{0}};
    int unit = 0;
    for (int b = 0; b < pass->block_count; b++) {
        const int *border = pass->thread_units + (ptrdiff_t)b * (threads + 1);
        int64_t total = 0, largest = 0, own[MAX_THREADS] = {0};
        for (int t = 0; t < threads; t++) {
            MP_CHECK_INT(border[t], unit);
            for (; unit < border[t + 1]; unit++) {
                const mp_attention_unit *u = &pass->units[unit];
                const int64_t cost = (int64_t)u->rows * (u->block1 - u->block0);
                MP_CHECK(cost > 0);
                own[t] += cost;
                total += cost;
                largest = cost > largest ? cost : largest;
                covered[u->seq][u->head] += split ? cost : u->rows;
            }
        }
        MP_CHECK_INT(border[threads], unit);
        for (int t = 0; t < threads; t++)
            if (own[t] * threads > total + (split ? threads - 1 : threads * largest))
                MP_FAIL("thread %d of %d has %d of %d blocks", t, threads, (int)own[t], (int)total);
    }
    MP_CHECK_INT(unit, pass->unit_count);
    for (int s = 0; s < pass->rows.n_seq; s++)
        for (int head = 0; head < TINY_KV_HEADS; head++) {
            const mp_row_seq *seq = &pass->rows.seq[s];
            MP_CHECK_INT(covered[s][head], split ? mp_decoder_blocks(seq->past + 1) : seq->rows);
        }
}

/* mp_arena_take aborts if the pass takes more than was predicted. */
MP_TEST(models_pass_shares_and_memory) {
    static const mp_dtype types[] = {MP_Q8_0};
    tiny_model tiny;
    mp_error error;
    int modes[3] = {0};
    tiny_load(&tiny, tiny_decoder_spec(types, 1, 48), MP_COMPUTE_AUTO, 1);
    const mp_decoder *model = (const mp_decoder *)tiny.model;
    MP_CHECK_INT(model->groups, TINY_KV_HEADS);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int threads = 1; threads <= MAX_THREADS; threads++) {
            mp_row_seq seq[SEQUENCES] = {{0}};
            mp_rows rows = {.n_seq = shapes[i].n, .seq = seq};
            mp_lease lease = {.threads = threads};
            mp_arena arena = {0};
            mp_decoder_pass pass;
            for (int s = 0; s < rows.n_seq; s++) {
                seq[s] = (mp_row_seq){.row0 = rows.M, .rows = shapes[i].seq[s].rows, .past = shapes[i].seq[s].past};
                rows.M += seq[s].rows;
            }
            const size_t bytes = mp_decoder_pass_bytes(model, &rows, threads);
            MP_CHECK_OK(mp_arena_reserve(&arena, bytes, &error), &error);
            mp_decoder_plan_pass(&pass, model, NULL, &rows, &lease, &arena);
            MP_CHECK(arena.used <= bytes);
            check_shares(&pass, threads);
            modes[pass.mode]++;
            mp_arena_deinit(&arena);
        }
    MP_CHECK(modes[MP_ATTEND_FUSED] > 0 && modes[MP_ATTEND_TILES] > 0 && modes[MP_ATTEND_SPLIT] > 0);
    tiny_unload(&tiny);
}

/* The memory of a model, of an engine and of passes over each of the shapes, as recorded. */
MP_TEST(models_pass_sizes_recorded) {
    enum { SHAPES = sizeof shapes / sizeof *shapes, OTHERS = 7, COUNT = OTHERS + SHAPES };
    static const mp_dtype floats[] = {MP_F32}, quantised[] = {MP_Q8_0, MP_Q4_0, MP_Q6_K};
    static const struct {
        tiny_kind kind;
        uint64_t recorded[2][COUNT];
    } kinds[] = {
        {{.arch = "llama"},
         {{7061504, 6050624, 7068672, 5376, 1536, 39552, 1758208, 125056, 131008, 152832, 171264, 1337536, 1431360,
           337536},
          {1474304, 6050624, 1481472, 5376, 816, 42368, 1758208, 134208, 140160, 163392, 183232, 1481152, 1574976,
           369216}}},
        {{.arch = "qwen3", .head_norms = true},
         {{7061504, 6050624, 7069440, 5376, 1536, 39552, 1758400, 125056, 131008, 152832, 171264, 1337536, 1431360,
           337536},
          {1474304, 6050624, 1482240, 5376, 816, 42368, 1758400, 134208, 140160, 163392, 183232, 1481152, 1574976,
           369216}}},
        {{.arch = "gemma3", .window = 80, .head_norms = true, .output_norms = true, .scaled = true},
         {{7061504, 6050624, 7075584, 5376, 1536, 39552, 1759936, 125184, 131136, 153216, 171904, 1363136, 1465664,
           341760},
          {1474304, 6050624, 1488384, 5376, 816, 42368, 1759936, 134336, 140288, 163776, 183872, 1506752, 1609280,
           373440}}},
        {{.arch = "qwen3moe", .head_norms = true, .experts = 6},
         {{2441216, 6050624, 2449152, 5376, 1536, 53248, 4122304, 169344, 175104, 201152, 223680, 1845952, 2432640,
           449728},
          {611072, 6050624, 619008, 5376, 816, 40960, 4122304, 133376, 139328, 167488, 192128, 2020096, 2678784,
           447744}}},
        {{.arch = "gpt_oss", .window = 80, .experts = 5, .biased = true},
         {{2441216, 6050624, 2456448, 5376, 1536, 53248, 3533479, 169280, 175040, 200960, 223616, 1844352, 2430400,
           449408},
          {611072, 6050624, 626304, 5376, 816, 40960, 3533479, 133312, 139264, 167296, 192064, 2018496, 2676544,
           447424}}},
        {{.arch = "deepseek2", .experts = 6, .latents = true},
         {{8437760, 6050624, 8451264, 5376, 6528, 153216, 5622802, 485696, 527168, 645248, 738496, 5690240, 7564928,
           1400000},
          {3085376, 6050624, 3098880, 5376, 3288, 154624, 5622802, 490304, 531776, 650560, 744512, 5764864, 7663488,
           1415872}}},
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
