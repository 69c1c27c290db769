/* test_kernels_unseen.c: attention reads no memory that no row of the call needs. Such memory is inaccessible here, so
 * that a read crashes. */
#include "kernel_edge.h"
#include "kernel_test.h"

/* the templates for kt_next_or_plain */
#include "kernels/simd/vec_plain.h"

#include "kernels/simd/attention_i16_tmpl.h"
#include "kernels/simd/attention_tmpl.h"

static void fill_both(mp_kernel_table *table, const char *name) {
    attention_fill(table, name);
    attention_i16_fill(table, name);
}

/* As kt_next_or_plain, with ref first. */
static bool next_variant(kt_set *set, int slot) {
    if (!set->variant) {
        *set = kt_ref();
        return true;
    }
    return kt_next_or_plain(set, slot, fill_both);
}

/* ---- the paged cache ---- */

enum { BLOCKS = 6, DIM = 48, MAX_ROWS = 8 };

/* The call may name blocks before the window of its first row and after its last row. They need not exist. */
MP_TEST(kernels_unseen_blocks) {
    static const struct { int rows, group, pos0, window; } cases[] = {
        {1, 1, 0, 0},    {1, 4, 63, 0},    {1, 3, 64, 0},    {1, 2, 128, 1},   {1, 1, 191, 64},
        {1, 1, 191, 65}, {8, 2, 300, 20},  {5, 1, 125, 0},   {4, 3, 188, 10},  {3, 1, 192, 64}, {3, 1, 192, 65},
    };
    static const mp_dtype types[] = {MP_F32, MP_I16, MP_I8};
    float *nothing = kt_edge(1);
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_attn_kv_i16);)
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
            for (int type = 0; type < 3; type++) {
                const int rows = cases[i].rows, n = rows * cases[i].group;
                const int64_t pos0 = cases[i].pos0, oldest = cases[i].window ? pos0 - cases[i].window + 1 : 0;
                void *k[BLOCKS], *x[BLOCKS], *scratch = kt_alloc(mp_attn_kv_scratch(DIM));
                float q[MAX_ROWS * 4 * (DIM + 2)];
                float *m = kt_alloc(sizeof(float) * (size_t)n), *l = kt_alloc(sizeof(float) * (size_t)n);
                float *o = kt_alloc(sizeof(float) * (size_t)(n * DIM));
                for (int j = 0; j < n * (DIM + 2); j++)
                    q[j] = 1.0f;
                for (int j = 0; j < n && type > 0; j++)
                    v.call.attn_query_i16(q + j * (DIM + 2), DIM);
                for (int b = 0; b < BLOCKS; b++) {
                    const bool is_seen = b * MP_KV_BLOCK < pos0 + rows && (b + 1) * MP_KV_BLOCK > oldest;
                    k[b] = is_seen ? kt_alloc(mp_kv_bytes(types[type], DIM)) : (void *)(nothing + 1);
                    x[b] = is_seen ? kt_alloc(mp_kv_bytes(types[type], DIM)) : (void *)(nothing + 1);
                }
                const mp_attn_kv a = {.q = q, .ldq = cases[i].group * (DIM + 2), .ldq_group = DIM + 2,
                                      .group = cases[i].group, .k_dim = DIM, .v_dim = DIM, .scale = 1.0f,
                                      .pos0 = pos0, .window = cases[i].window, .k_blocks = k, .v_blocks = x};
                mp_attn_partial state = {m, l, o};
                mp_attn_begin(n, DIM, &state);
                (type == 0   ? v.call.attn_kv
                 : type == 1 ? v.call.attn_kv_i16
                             : v.call.attn_kv_i8)(&a, rows, 0, BLOCKS, &state, scratch);
                for (int j = 0; j < n; j++) { /* all scores are 0, so the sum counts the keys that the row sees */
                    const int own = (int)pos0 + j / cases[i].group;
                    const int count = a.window && a.window <= own ? a.window : own + 1;
                    MP_CHECK(m[j] == 0.0f && l[j] == (float)count);
                }
                for (int b = 0; b < BLOCKS; b++)
                    if (k[b] != nothing + 1)
                        kt_free(k[b]), kt_free(x[b]);
                kt_free(scratch), kt_free(m), kt_free(l), kt_free(o);
            }
    kt_edge_free(nothing, 1);
}

/* ---- a whole sequence ---- */

/* A matrix of which each row is a page. Rows outside [from, to) are inaccessible. */
static float *matrix_of(int rows, int from, int to) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *memory = mmap(NULL, (size_t)rows * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bool ready = memory != MAP_FAILED;
    if (ready && from < to) /* qemu refuses an empty range behind the pages */
        ready = mprotect(memory + (size_t)from * page, (size_t)(to - from) * page, PROT_READ | PROT_WRITE) == 0;
    if (!ready)
        MP_FAIL("cannot allocate %d pages for the test", rows);
    return (float *)(void *)memory;
}

/* Keys [*from, *to) that any of the rows [row0, row1) sees. */
static void seen(const mp_attn_full *a, int row0, int row1, int *from, int *to) {
    *from = a->T;
    *to = 0;
    for (int r = row0; r < row1; r++)
        for (int t = 0; t < a->T; t++) {
            const bool is_near = a->window == 0 || (a->causal ? r - t < a->window : abs(r - t) <= a->window / 2);
            if (!is_near || (a->causal && t > r))
                continue;
            *from = t < *from ? t : *from;
            *to = t + 1 > *to ? t + 1 : *to;
        }
}

/* A call for rows [row0, row1) reads these queries, and the keys and values that these rows see, from a multiple of 32
 * on. In bfloat16, it reads what the blocks of 32 rows see, with values up to a multiple of 32. */
static void check_full(const kt_set *v, mp_attn_full_function full, bool blocks) {
    static const struct { int T, row0, row1, causal, window; } cases[] = {
        {200, 0, 1, 1, 0},     {200, 31, 33, 1, 0},   {200, 100, 140, 1, 20}, {200, 64, 96, 0, 16},
        {200, 199, 200, 1, 1}, {200, 130, 131, 0, 1}, {97, 60, 97, 0, 40},    {200, 5, 5, 0, 0}, {40, 3, 20, 0, 0},
    };
    const int page = (int)sysconf(_SC_PAGESIZE), ld = page / (int)sizeof(float);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int T = cases[i].T, D = 32, row0 = cases[i].row0, row1 = cases[i].row1;
        mp_attn_full a = {.ld = ld, .ld_out = ld, .T = T, .D = D, .scale = 1.0f, .causal = cases[i].causal,
                          .window = cases[i].window};
        int from = 0, to = 0, last = 0;
        if (row0 < row1) {
            const int end = (row1 + 31) / 32 * 32 < T ? (row1 + 31) / 32 * 32 : T;
            seen(&a, blocks ? row0 / 32 * 32 : row0, blocks ? end : row1, &from, &to);
            last = blocks && (to + 31) / 32 * 32 < T ? (to + 31) / 32 * 32 : blocks ? T : to;
        }
        a.q = matrix_of(T, row0, row1);
        a.out = matrix_of(T, row0, row1);
        a.k = matrix_of(T, from / 32 * 32, to);
        a.v = matrix_of(T, from / 32 * 32, last);
        for (int t = from / 32 * 32; t < last; t++)
            ((float *)a.v)[(int64_t)t * ld] = 1.0f;
        void *scratch = kt_alloc(mp_attn_full_scratch(T, D));
        full(&a, row0, row1, scratch);
        for (int r = row0; r < row1; r++)
            if (!(fabsf(a.out[(int64_t)r * ld] - 1.0f) < 1e-2f))
                MP_FAIL("%s, case %zu: row %d is %g", v->variant, i, r, (double)a.out[(int64_t)r * ld]);
        kt_free(scratch);
        munmap((void *)a.q, (size_t)T * (size_t)page);
        munmap((void *)a.k, (size_t)T * (size_t)page);
        munmap((void *)a.v, (size_t)T * (size_t)page);
        munmap(a.out, (size_t)T * (size_t)page);
    }
}

MP_TEST(kernels_unseen_rows) {
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_attn_full);)
        check_full(&v, v.call.attn_full, false);
    kt_set v = kt_ref();
    check_full(&v, v.call.attn_full_bf16, true);
    for (v = (kt_set){0}; kt_next(&v, MP_SLOT_attn_full_bf16);)
        check_full(&v, v.call.attn_full_bf16, true);
}
