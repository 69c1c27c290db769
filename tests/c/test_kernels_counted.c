/* test_kernels_counted.c: how much attention and row maxima compute, and which lines they prefetch. The templates are
 * compiled over vectors in plain C whose operations are counted. None of this changes a result, so only counts show
 * it. */
#include "kernel_test.h"
#include "kernels/attention_scratch.h"
#include "prefetch_watch.h"

#include "kernels/simd/vec_plain.h"

/* included before the macros below: their operations are not counted */
#include "kernels/simd/attention_kv_tmpl.h"
#include "kernels/simd/vmath_tmpl.h"

/* Calls since begin_count. Most operations take 16 floats; a transposition takes 8 x 8 floats, a product of integers 16
 * pairs, and an integer exponential the scores of 16 keys. */
typedef struct counts {
    int64_t fmas, sets, exps, selects, caps, tops, transposes;
    int64_t dots, spreads, integer_exps;
    int64_t reduced; /* rows whose 16 lanes are summed */
    int64_t partial_loads, partial_stores;
} counts;
static counts done;

static void begin_count(const void *base) {
    watch(base);
    done = (counts){0};
}

static void counted(int64_t *count) { ++*count; }

static int64_t dots_before[MAX_LINES]; /* dots computed before a line is prefetched to L2 */

static void note_share(const void *address) {
    dots_before[((const uint8_t *)address - watched) / 64] = done.dots;
    note_prefetch(address);
}

#define vec_fma(...)            (counted(&done.fmas), vec_fma(__VA_ARGS__))
#define vec_set(...)            (counted(&done.sets), vec_set(__VA_ARGS__))
#define vec_exp(...)            (counted(&done.exps), vec_exp(__VA_ARGS__))
#define vec_select(...)         (counted(&done.selects), vec_select(__VA_ARGS__))
#define vec_top(...)            (counted(&done.tops), vec_top(__VA_ARGS__))
#define vec_load_n(...)         (counted(&done.partial_loads), vec_load_n(__VA_ARGS__))
#define vec_store_n(...)        (counted(&done.partial_stores), vec_store_n(__VA_ARGS__))
#define vec_transpose8(...)     (counted(&done.transposes), vec_transpose8(__VA_ARGS__))
#define veci_dot(...)           (counted(&done.dots), veci_dot(__VA_ARGS__))
#define veci_spread(...)        (counted(&done.spreads), veci_spread(__VA_ARGS__))
#define vec_scale_exponent(...) (counted(&done.integer_exps), vec_scale_exponent(__VA_ARGS__))
#define vec_softcap(...)        (counted(&done.caps), vec_softcap(__VA_ARGS__))
#define vec_each_sum(N, p)      (done.reduced += (N), vec_each_sum(N, p))
#define vec_prefetch(p)         note_prefetch(p)
#define vec_prefetch_far(p)     note_share(p)
#define __builtin_prefetch(address, ...) note_prefetch(address)

#include "kernels/simd/attention_i16_tmpl.h"
#include "kernels/simd/attention_tmpl.h"
#include "kernels/simd/rows_tmpl.h"

/* ---- the paged cache ---- */

enum { BLOCKS = 6, DIM = 32, V_DIM = 64, MAX_BYTES = MP_KV_BLOCK * V_DIM * 4 };

typedef struct kv {
    mp_attn_kv a;
    mp_dtype type;
    mp_kernels call;
    uint8_t *memory; /* [2 BLOCKS][MAX_BYTES]: blocks of keys, then of values */
    void *k[BLOCKS], *v[BLOCKS], *scratch;
    float *q;
    mp_attn_partial state;
} kv;

static void kv_make(kv *c, mp_dtype type, int rows, int group, int64_t pos0, int window, float softcap) {
    mp_kernel_table table = {0};
    mp_test_random random = {31};
    attention_fill(&table, "counted");
    attention_i16_fill(&table, "counted");
    *c = (kv){.type = type, .call = table.call};
    c->memory = kt_alloc(2 * BLOCKS * (size_t)MAX_BYTES);
    for (int b = 0; b < BLOCKS; b++) {
        c->k[b] = c->memory + (size_t)b * MAX_BYTES;
        c->v[b] = c->memory + (size_t)(BLOCKS + b) * MAX_BYTES;
    }
    c->q = kt_alloc(sizeof(float) * (size_t)(rows * group * (DIM + 2)));
    kt_random(&random, c->q, rows * group * (DIM + 2));
    for (int i = 0; i < rows * group && type != MP_F32; i++)
        table.call.attn_query_i16(c->q + i * (DIM + 2), DIM);
    c->scratch = kt_alloc(mp_attn_kv_scratch(V_DIM));
    c->state = (mp_attn_partial){kt_alloc(sizeof(float) * (size_t)(rows * group)),
                                 kt_alloc(sizeof(float) * (size_t)(rows * group)),
                                 kt_alloc(sizeof(float) * (size_t)(rows * group * V_DIM))};
    mp_attn_begin(rows * group, V_DIM, &c->state);
    c->a = (mp_attn_kv){.q = c->q, .ldq = group * (DIM + 2), .ldq_group = DIM + 2, .group = group, .k_dim = DIM,
                        .v_dim = V_DIM, .scale = 0.25f, .pos0 = pos0, .window = window, .softcap = softcap,
                        .k_blocks = c->k, .v_blocks = c->v};
}

static void kv_free(kv *c) {
    kt_free(c->memory), kt_free(c->q), kt_free(c->scratch);
    kt_free(c->state.m), kt_free(c->state.l), kt_free(c->state.o);
}

static void attend(kv *c, int rows, int block0, int block1) {
    begin_count(c->memory);
    (c->type == MP_F32   ? c->call.attn_kv
     : c->type == MP_I16 ? c->call.attn_kv_i16
                         : c->call.attn_kv_i8)(&c->a, rows, block0, block1, &c->state, c->scratch);
}

static void one_block(kv *c, int rows, int block) {
    begin_count(c->memory);
    (c->type == MP_F32   ? c->call.attn_block
     : c->type == MP_I16 ? c->call.attn_block_i16
                         : c->call.attn_block_i8)(&c->a, rows, block, &c->state);
}

/* Slots [*from, *to) of a block that any of the rows [row, last] sees. Returns false if there are none. */
static bool seen(const mp_attn_kv *a, int row, int last, int block, int *from, int *to) {
    *from = MP_KV_BLOCK;
    *to = 0;
    for (int r = row; r <= last; r++)
        for (int slot = 0; slot < MP_KV_BLOCK; slot++) {
            const int64_t at = (int64_t)block * MP_KV_BLOCK + slot, own = a->pos0 + r;
            if (at > own || (a->window && at <= own - a->window))
                continue;
            *from = slot < *from ? slot : *from;
            *to = slot + 1 > *to ? slot + 1 : *to;
        }
    return *from < *to;
}

static int vecs_of(int from, int to) { return from < to ? (to + 15) / 16 - from / 16 : 0; }

/* Products of R rows by `vecs` vectors: the number of steps that a row's number is spread for. A step has 4, 2 or 1
 * vectors: as many as keep the sums of its rows in 6 registers. */
static int steps_of(int R, int vecs) {
    const int wide = R == 1 ? vecs / 4 : 0, both = R <= 3 ? (vecs - 4 * wide) / 2 : 0;
    return wide + both + vecs - 4 * wide - 2 * both;
}

/* Rows of the tile at row i of n: as few tiles of at most 6 rows as possible, of nearly equal height. */
static int height_of(int left) { return (left + (left + 5) / 6 - 1) / ((left + 5) / 6); }

/* The work of one block for all queries. */
static counts work_of(const kv *c, int rows, int block) {
    counts w = {0};
    const int group = c->a.group, n = rows * group;
    int from, to;
    if (!seen(&c->a, 0, rows - 1, block, &from, &to))
        return w;
    bool whole = true;
    for (int r = 0; r < rows; r++)
        whole = whole && seen(&c->a, r, r, block, &from, &to) && from == 0 && to == MP_KV_BLOCK;
    for (int i = 0, R; i < n; i += R) {
        R = height_of(n - i);
        const bool any = seen(&c->a, i / group, (i + R - 1) / group, block, &from, &to);
        if (c->type == MP_F32) {
            w.sets += 1 + (R <= 3) + (R == 1) + R * steps_of(R, 4) * DIM; /* the scale, for each width of steps */
            w.sets += any ? R * steps_of(R, V_DIM / 16) * (to - from) : 0;
            w.fmas += R * 4 * DIM + (any ? R * V_DIM / 16 * (to - from) : 0);
        } else if (any) {
            const int keys = vecs_of(from, to), pairs = (to + 1) / 2 - from / 2;
            w.dots += R * keys * DIM / 2 + R * V_DIM / 16 * pairs;
            w.spreads += R * steps_of(R, keys) * DIM / 2 + R * steps_of(R, V_DIM / 16) * pairs;
        }
    }
    for (int i = 0; i < n; i++) {
        seen(&c->a, i / group, i / group, block, &from, &to);
        w.exps += c->type == MP_F32 ? 4 : 0;
        w.selects += c->type == MP_F32 ? 8 : whole ? 0 : 3 * vecs_of(from, to);
        w.integer_exps += c->type == MP_F32 ? 0 : vecs_of(from, to);
        w.caps += c->a.softcap == 0.0f ? 0 : c->type == MP_F32 ? 4 : vecs_of(from, to);
    }
    w.sets += (n + 5) / 6 + n + w.caps; /* the lowest number for each 6 rows, the maxima, the cap; F32 only */
    for (int i = 0; i < n && c->type != MP_F32; i += 16) {
        w.reduced += whole && n - i <= 4 ? 4 : 16;
        w.selects += 4; /* tiny weights and those that are not finite */
    }
    return w;
}

static void check_work(const counts *want, const kv *c, const char *what, int rows, int block) {
#define SAME(field)                                                                                                 \
    if (done.field != want->field)                                                                                  \
        MP_FAIL("%s, %s, %d rows of %d from %lld on, window %d, block %d: " #field " is %lld, not %lld", what,      \
                mp_dtype_get(c->type)->name, rows, c->a.group, (long long)c->a.pos0, c->a.window, block,            \
                (long long)done.field, (long long)want->field)
    if (c->type == MP_F32)
        SAME(fmas); /* those of integers round weights */
    SAME(exps);
    SAME(selects);
    SAME(dots);
    SAME(spreads);
    SAME(integer_exps);
    SAME(caps);
    SAME(reduced);
#undef SAME
}

static const struct { int rows, group, pos0, window; float softcap; } kv_cases[] = {
    {1, 1, 0, 0, 0},     {1, 1, 63, 0, 0},     {1, 1, 64, 0, 0},    {1, 2, 200, 0, 0},  {1, 3, 383, 0, 0},
    {1, 4, 191, 64, 0},  {1, 5, 191, 65, 0},   {1, 6, 192, 64, 2},  {1, 16, 255, 1, 0}, {1, 17, 127, 0, 0},
    {7, 1, 61, 0, 2},    {8, 2, 300, 20, 0},   {64, 1, 320, 0, 0},  {64, 1, 64, 100, 0}, {30, 2, 130, 7, 1},
    {5, 3, 190, 128, 0}, {2, 32, 254, 130, 0}, {13, 4, 186, 58, 2}, {4, 1, 256, 0, 0},  {5, 1, 256, 0, 0},
};
static const mp_dtype kv_types[] = {MP_F32, MP_I16, MP_I8};

/* A block costs what its visible slots need, and nothing if no row sees any of them. */
MP_TEST(kernels_counted_blocks) {
    for (size_t i = 0; i < sizeof kv_cases / sizeof *kv_cases; i++)
        for (int type = 0; type < 3; type++) {
            kv c;
            const int rows = kv_cases[i].rows;
            counts all = {0};
            kv_make(&c, kv_types[type], rows, kv_cases[i].group, kv_cases[i].pos0, kv_cases[i].window,
                    kv_cases[i].softcap);
            for (int b = 0; b < BLOCKS; b++) {
                const counts want = work_of(&c, rows, b);
                attend(&c, rows, b, b + 1);
                check_work(&want, &c, "attn_kv of a block", rows, b);
                MP_CHECK_INT(prefetched, 0);
                all.fmas += want.fmas, all.exps += want.exps, all.dots += want.dots, all.spreads += want.spreads;
                all.integer_exps += want.integer_exps, all.caps += want.caps, all.reduced += want.reduced;
                all.selects += want.selects;
            }
            attend(&c, rows, 0, BLOCKS);
            check_work(&all, &c, "attn_kv", rows, -1);
            kv_free(&c);
        }
}

/* attn_block is called for blocks that at least one row sees. */
MP_TEST(kernels_counted_single_blocks) {
    for (size_t i = 0; i < sizeof kv_cases / sizeof *kv_cases; i++)
        for (int type = 0; type < 3; type++) {
            kv c;
            const int rows = kv_cases[i].rows;
            kv_make(&c, kv_types[type], rows, kv_cases[i].group, kv_cases[i].pos0, kv_cases[i].window,
                    kv_cases[i].softcap);
            for (int b = 0; b < BLOCKS; b++) {
                int from, to;
                const counts want = work_of(&c, rows, b);
                if (!seen(&c.a, 0, rows - 1, b, &from, &to))
                    continue;
                one_block(&c, rows, b);
                check_work(&want, &c, "attn_block", rows, b);
                if (c.type == MP_F32) /* attn_kv also merges */
                    MP_CHECK_INT(done.sets, want.sets);
            }
            kv_free(&c);
        }
}

/* Check that lines [from, to) of a block are prefetched, each at most `most` times, and no other line of it. */
static void check_lines(const kv *c, const void *next, int64_t from, int64_t to, int most, const char *what) {
    const int64_t first = ((const uint8_t *)next - c->memory) / 64;
    for (int64_t line = 0; line < MAX_BYTES / 64; line++) {
        const bool inside = from <= line && line < to;
        if (hits[first + line] < inside || hits[first + line] > (inside ? most : 0))
            MP_FAIL("%s of %s, %d queries: line %lld is prefetched %d times", what, mp_dtype_get(c->type)->name,
                    c->a.group, (long long)line, hits[first + line]);
    }
}

/* Check that each tile prefetches its share of a block, in order, evenly over the `all` dots of the tiles. They begin
 * after `dots` dots. */
static void check_shares(const void *next, int lines, int64_t dots, int64_t all, int rows) {
    const int64_t first = ((const uint8_t *)next - watched) / 64;
    for (int row = 0, R; row < rows; row += R) {
        R = height_of(rows - row);
        const int64_t tile = all / rows * R, step = 2 * R * (R == 1 ? 4 : R <= 3 ? 2 : 1); /* dots of two pairs */
        const int64_t from = lines * row / rows, to = lines * (row + R) / rows, steps = tile / step;
        const int64_t each = (to - from + steps - 1) / steps;
        for (int64_t line = from; line < to; line++) {
            const int64_t now = dots_before[first + line] - dots - all / rows * row;
            if (now != (line - from) / each * step)
                MP_FAIL("line %lld of %lld to %lld is prefetched at dot %lld of %lld of its tile", (long long)line,
                        (long long)from, (long long)to, (long long)now, (long long)tile);
        }
    }
}

/* The next block is prefetched: by the rows that the only tile reads of its own, or in shares, each line once. */
static void check_prefetch(const kv *c, int rows, int block, bool more) {
    static const uint8_t none[MAX_LINES];
    int from, to, R = height_of(rows * c->a.group);
    if (!more) {
        MP_CHECK_INT(prefetched, 0);
        MP_CHECK(memcmp(hits, none, sizeof none) == 0);
        return;
    }
    seen(&c->a, 0, (R - 1) / c->a.group, block, &from, &to);
    const int width = c->type == MP_F32 ? 4 : c->type == MP_I16 ? 2 : 1;
    const bool shares = c->type != MP_F32 && R < rows * c->a.group;
    const int most = c->type == MP_I8 && R > 3 && !shares ? 2 : 1; /* steps of one vector of bytes, half a line */
    const int pair = c->type == MP_F32 ? 1 : 2, value_lines = V_DIM * width * pair / 64;
    MP_CHECK(from == 0 && to == MP_KV_BLOCK);
    check_lines(c, c->k[block + 1], 0, MP_KV_BLOCK * DIM * width / 64, most, "keys");
    check_lines(c, c->v[block + 1], 0, MP_KV_BLOCK / pair * value_lines, most, "values");
    MP_CHECK_INT(prefetched, most * (MP_KV_BLOCK * DIM + MP_KV_BLOCK * V_DIM) * width / 64);
    if (shares) {
        const int n = rows * c->a.group, keys = n * MP_KV_BLOCK / 16 * DIM / 2;
        check_shares(c->k[block + 1], MP_KV_BLOCK * DIM * width / 64, 0, keys, n);
        check_shares(c->v[block + 1], MP_KV_BLOCK * V_DIM * width / 64, keys, n * V_DIM / 16 * MP_KV_BLOCK / 2, n);
    }
}

MP_TEST(kernels_counted_prefetches) {
    static const int groups[] = {1, 2, 3, 4, 7, 13, 64};
    for (int i = 0; i < 7; i++)
        for (int type = 0; type < 3; type++) {
            kv c;
            kv_make(&c, kv_types[type], 1, groups[i], 2 * MP_KV_BLOCK, 0, 0);
            attend(&c, 1, 0, 1); /* the range ends */
            check_prefetch(&c, 1, 0, false);
            attend(&c, 1, 0, 2);
            check_prefetch(&c, 1, 0, true);
            one_block(&c, 1, 1); /* the row is in the next block */
            check_prefetch(&c, 1, 1, true);
            c.a.pos0--; /* the row is in this block */
            one_block(&c, 1, 1);
            check_prefetch(&c, 1, 1, false);
            kv_free(&c);
        }
}

/* ---- a whole sequence ---- */

/* Keys [*from, *to) that row r sees. */
static void full_seen(const mp_attn_full *a, int r, int *from, int *to) {
    *from = a->T;
    *to = 0;
    for (int t = 0; t < a->T; t++) {
        const bool is_near = a->window == 0 || (a->causal ? r - t < a->window : abs(r - t) <= a->window / 2);
        if (!is_near || (a->causal && t > r))
            continue;
        *from = t < *from ? t : *from;
        *to = t + 1;
    }
}

/* The keys that rows see are copied, from a multiple of 32 on. The scores of at most 48 rows are kept at a time, and 24
 * with a window. */
MP_TEST(kernels_counted_full) {
    static const struct { int T, D, row0, row1, causal, window, bias; } cases[] = {
        {1, 16, 0, 1, 0, 0, 0},       {64, 16, 0, 64, 0, 0, 0},     {65, 24, 0, 65, 1, 0, 0},
        {100, 8, 7, 93, 1, 0, 1},     {200, 16, 90, 200, 1, 33, 0}, {200, 40, 10, 120, 0, 40, 0},
        {300, 16, 100, 101, 0, 9, 1}, {300, 16, 148, 244, 1, 1, 0}, {1024, 8, 500, 597, 0, 70, 0},
        {1025, 8, 500, 597, 0, 0, 0}, {150, 8, 0, 150, 0, 0, 1},    {97, 8, 0, 97, 1, 64, 0},
        {4200, 8, 4000, 4097, 0, 0, 0}, {1100, 64, 0, 49, 0, 0, 0}, {1100, 64, 900, 997, 1, 0, 0},
    };
    mp_kernel_table table = {0};
    attention_fill(&table, "counted");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int T = cases[i].T, D = cases[i].D, row0 = cases[i].row0, row1 = cases[i].row1;
        const size_t floats = (size_t)T * (size_t)D;
        float *q = kt_alloc(sizeof(float) * floats), *k = kt_alloc(sizeof(float) * floats);
        float *v = kt_alloc(sizeof(float) * floats), *out = kt_alloc(sizeof(float) * floats);
        float *bias = kt_alloc(sizeof(float) * (size_t)(2 * T - 1));
        void *scratch = kt_alloc(mp_attn_full_scratch(T, D));
        const mp_attn_full a = {.q = q, .k = k, .v = v, .ld = D, .out = out, .ld_out = D, .T = T, .D = D, .scale = 1,
                                .causal = cases[i].causal, .window = cases[i].window,
                                .bias = cases[i].bias ? bias + T - 1 : NULL, .ld_bias = -1};
        begin_count(NULL);
        table.call.attn_full(&a, row0, row1, scratch);
        counts want = {0};
        int from, to, unused, key0;
        full_seen(&a, row0, &key0, &unused);
        full_seen(&a, row1 - 1, &unused, &to);
        want.transposes = (to - key0 / 32 * 32 + 7) / 8 * (D / 8);
        for (int block = row0, rows; block < row1; block += rows) {
            const int most = a.window ? 24 : 48;
            rows = row1 - block < most ? row1 - block : most;
            full_seen(&a, block, &from, &unused);
            full_seen(&a, block + rows - 1, &unused, &to);
            const int vecs = vecs_of(from / 32 * 32, to);
            for (int r = block, R; r < block + rows; r += R) {
                R = height_of(block + rows - r);
                full_seen(&a, r, &from, &unused);
                full_seen(&a, r + R - 1, &unused, &to);
                want.fmas += R * vecs * D + R * ((D + 15) / 16) * (to - from);
                for (int j = r; j < r + R; j++) {
                    full_seen(&a, j, &from, &to);
                    const bool brief = vecs <= 4 && !a.bias;
                    const int inner = to / 16 - (from + 15) / 16; /* vectors that are visible as a whole */
                    want.exps += brief ? vecs : vecs_of(from, to);
                    want.selects += 2 * (brief ? vecs : vecs_of(from, to) - (inner > 0 ? inner : 0));
                }
            }
        }
        MP_CHECK_INT(done.transposes, want.transposes);
        MP_CHECK_INT(done.fmas, want.fmas);
        MP_CHECK_INT(done.exps, want.exps);
        MP_CHECK_INT(done.selects, want.selects);
        MP_CHECK_INT(prefetched, 0);
        kt_free(q), kt_free(k), kt_free(v), kt_free(out), kt_free(bias), kt_free(scratch);
    }
}

/* ---- row maxima ---- */

/* Tiles have at most 6 rows. Up to 3 rows are multiplied by both halves of the panel at once, more rows by those that
 * have columns. While a tile is multiplied by the first half, each line of the next tile's rows is prefetched once. */
MP_TEST(kernels_counted_maxima) {
    enum { K = MP_K_CHUNK + 64, MAX = 18 };
    static const struct { int rows, columns, tile, halves; } cases[] = {
        {1, 5, 1, 2}, {2, 16, 2, 2}, {3, 32, 3, 2}, {4, 16, 4, 1}, {4, 17, 4, 2}, {6, 32, 6, 2}, {12, 16, 6, 1},
        {12, 17, 6, 2},
    };
    static _Alignas(64) float panel[K * MP_PANEL_N], rows[MAX * K], maxima[MP_PANEL_N];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int n = cases[i].rows, tile = cases[i].tile, halves = cases[i].halves;
        begin_count(rows);
        MP_CHECK(maxima_rows(panel, cases[i].columns, K, rows, K, n, NULL, maxima));
        MP_CHECK_INT(done.fmas, n * halves * (K + 1)); /* one finds scores that are not finite */
        MP_CHECK_INT(done.sets, (tile <= 3 ? 1 : halves) * n * K);
        MP_CHECK_INT(prefetched, n * K / 16);
        for (int line = 0; line < MAX * K / 16; line++)
            MP_CHECK_INT(hits[line], line / (K / 16) >= tile && line / (K / 16) < tile + n);
    }
}

/* ---- rows ---- */

/* Loads and stores of fewer than 16 floats, which are slower, occur only at the end of a row. */
MP_TEST(kernels_counted_ends_of_rows) {
    enum { MAX = 64, ROWS = 3 };
    mp_kernel_table table = {0};
    rows_fill(&table, "counted");
    const mp_kernels *k = &table.call;
    static const int lengths[] = {16, 64, 15, 17, 50};
    float x[ROWS * MAX], y[2 * MAX] = {0}, w[MAX];
    for (int i = 0; i < MAX; i++)
        x[i] = x[MAX + i] = x[2 * MAX + i] = y[i] = w[i] = (float)(i + 1);
    for (int i = 0; i < 5; i++) {
        const int n = lengths[i], end = n % 16 != 0;
#define ENDS(loads, stores, call)                                  \
    do {                                                           \
        begin_count(NULL);                                         \
        (void)(call);                                              \
        MP_CHECK_INT(done.partial_loads, end ? (loads) : 0);       \
        MP_CHECK_INT(done.partial_stores, end ? (stores) : 0);     \
    } while (0)
        ENDS(3, 1, (k->rms_norm(x, w, 1e-6f, n, y), 0));
        ENDS(5, 1, (k->layer_norm(x, w, w, 1e-6f, n, y), 0));
        ENDS(2, 1, (k->add(x, n, y), 0));
        ENDS(3, 1, (k->mul_add(x, w, n, y), 0));
        ENDS(ROWS, 1, (k->column_sums(x, MAX, ROWS, n, NULL, y), 0));
        ENDS(ROWS + 1, 1, (k->column_sums(x, MAX, ROWS, n, w, y), 0));
        ENDS(4, 1, (k->affine(x, w, w, w, MP_ACT_RELU, n, y), 0));
        ENDS(2, 1, (k->gated(MP_ACT_SILU, x, w, n, y), 0));
        ENDS(1, 1, (k->activate(MP_ACT_TANH, n, y), 0));
        ENDS(1, 1, (k->softcap(2.0f, n, y), 0));
        ENDS(2, 1, k->softmax(y, n));
        ENDS(1, 0, k->max(x, n));
        ENDS(1, 0, k->exp_sum(x, n, 1.0f, NULL));
        ENDS(2, 0, k->dot(x, w, n));
        ENDS(1, 0, k->all_finite(x, n));
        ENDS(2, 2, (k->rope(y, x, 2 * n, true), 0));
#undef ENDS
    }
}

/* argmax reads a row once, in chunks of 4,096 numbers, and then only the chunk of the maximum. */
MP_TEST(kernels_counted_argmax) {
    static const struct { int n, chunks; bool end; } cases[] = {
        {1, 1, true}, {4096, 1, false}, {4097, 2, true}, {8192, 2, false}, {8200, 3, true}, {12288, 3, false},
    };
    mp_kernel_table table = {0};
    rows_fill(&table, "counted");
    static float x[12288];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin_count(NULL);
        MP_CHECK_INT(table.call.argmax(x, cases[i].n), 0);
        MP_CHECK_INT(done.tops, cases[i].chunks);
        MP_CHECK_INT(done.partial_loads, cases[i].end);
    }
}
