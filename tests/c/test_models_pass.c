/* test_models_pass.c: how a decoder's pass divides its attention among threads, and the memory that it takes. */
#include "base/arena.h"
#include "model_fixture.h"
#include "models/decoder/pass.h"

enum { SEQUENCES = 5, MOST_THREADS = 8 };

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
        int64_t total = 0, largest = 0, own[MOST_THREADS] = {0};
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
        for (int threads = 1; threads <= MOST_THREADS; threads++) {
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
