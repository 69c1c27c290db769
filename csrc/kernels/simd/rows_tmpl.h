/* rows_tmpl.h: the row kernels in vectors of 16 lanes. Template: include after a vec_*.h. kernels.h defines the
 * results.
 *
 * A row whose length is not a multiple of 16 ends in a vec with zeros in the missing lanes. A zero adds nothing to a
 * sum that started at +0 (such a sum is never -0), so the fixed tree holds for every length. */
#ifndef MP_KERNELS_SIMD_ROWS_TMPL_H
#define MP_KERNELS_SIMD_ROWS_TMPL_H

#include <assert.h>
#include <math.h>

#include "kernels/simd/maxima_tmpl.h"
#include "kernels/simd/vmath_tmpl.h"
#include "kernels/variants.h"

/* Load and store the 16 floats from index i on of a row of n floats; lanes beyond n are 0 and are not stored. */
static VEC_INLINE vec row_load(const float *x, int64_t i, int64_t n) {
    return n - i >= VEC_N ? vec_load(x + i) : vec_load_n(x + i, (int)(n - i));
}

static VEC_INLINE void row_store(float *y, int64_t i, int64_t n, vec v) {
    if (n - i >= VEC_N)
        vec_store(y + i, v);
    else
        vec_store_n(y + i, v, (int)(n - i));
}

/* Keep the lanes of x[i ...] that belong to the row; set the others to `rest`. */
static VEC_INLINE vec row_keep(vec v, int64_t i, int64_t n, vec rest) {
    return n - i >= VEC_N ? v : vec_select(vec_lanes(0, (int)(n - i)), v, rest);
}

static void rows_rms_norm(const float *x, const float *weight, float eps, int n, float *y) {
    assert(n > 0);
    vec sum = vec_zero();
    for (int i = 0; i < n; i += VEC_N) {
        vec v = row_load(x, i, n);
        sum = vec_fma(v, v, sum);
    }
    const vec scale = vec_set(1.0f / sqrtf(vec_sum(sum) / (float)n + eps));
    for (int i = 0; i < n; i += VEC_N)
        row_store(y, i, n, vec_mul(vec_mul(row_load(x, i, n), scale), row_load(weight, i, n)));
}

static void rows_layer_norm(const float *x, const float *weight, const float *bias, float eps, int n, float *y) {
    assert(n > 0);
    vec sum = vec_zero();
    for (int i = 0; i < n; i += VEC_N)
        sum = vec_add(sum, row_load(x, i, n));
    const vec mean = vec_set(vec_sum(sum) / (float)n);
    sum = vec_zero();
    for (int i = 0; i < n; i += VEC_N) {
        vec d = row_keep(vec_sub(row_load(x, i, n), mean), i, n, vec_zero());
        sum = vec_fma(d, d, sum);
    }
    const vec scale = vec_set(1.0f / sqrtf(vec_sum(sum) / (float)n + eps));
    for (int i = 0; i < n; i += VEC_N) {
        vec d = vec_mul(vec_sub(row_load(x, i, n), mean), scale), w = row_load(weight, i, n);
        row_store(y, i, n, bias ? vec_fma(d, w, row_load(bias, i, n)) : vec_mul(d, w));
    }
}

static void rows_add(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i += VEC_N)
        row_store(y, i, n, vec_add(row_load(y, i, n), row_load(x, i, n)));
}

static void rows_mul_add(const float *a, const float *b, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i += VEC_N)
        row_store(y, i, n, vec_fma(row_load(a, i, n), row_load(b, i, n), row_load(y, i, n)));
}

static void rows_column_sums(const float *x, int64_t ld, int rows, int n, const float *centre, float *out) {
    for (int i = 0; i < n; i += VEC_N) {
        vec sum = vec_zero();
        if (centre) {
            const vec mean = row_load(centre, i, n);
            for (int r = 0; r < rows; r++) {
                vec d = vec_sub(row_load(x + r * ld, i, n), mean);
                sum = vec_fma(d, d, sum);
            }
        } else {
            for (int r = 0; r < rows; r++)
                sum = vec_add(sum, row_load(x + r * ld, i, n));
        }
        row_store(out, i, n, sum);
    }
}

/* Run a function with `act` as a compile-time constant: the switch then runs once per call, not per element. */
#define ROWS_EACH_ACT(run)      \
    switch (act) {              \
    case MP_ACT_NONE:           \
        run(MP_ACT_NONE);       \
        break;                  \
    case MP_ACT_GELU:           \
        run(MP_ACT_GELU);       \
        break;                  \
    case MP_ACT_GELU_TANH:      \
        run(MP_ACT_GELU_TANH);  \
        break;                  \
    case MP_ACT_RELU:           \
        run(MP_ACT_RELU);       \
        break;                  \
    case MP_ACT_SILU:           \
        run(MP_ACT_SILU);       \
        break;                  \
    case MP_ACT_TANH:           \
        run(MP_ACT_TANH);       \
        break;                  \
    case MP_ACT_SIGMOID:        \
        run(MP_ACT_SIGMOID);    \
        break;                  \
    case MP_ACT_QUICK_GELU:     \
        run(MP_ACT_QUICK_GELU); \
        break;                  \
    case MP_ACT_RELU2:          \
        run(MP_ACT_RELU2);      \
        break;                  \
    }

static VEC_INLINE void rows_gated_as(const mp_act act, const float *gate, const float *up, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i += VEC_N)
        row_store(y, i, n, vec_mul(vec_activate(act, row_load(gate, i, n)), row_load(up, i, n)));
}

static void rows_gated(mp_act act, const float *gate, const float *up, int64_t n, float *y) {
#define ROWS_RUN(constant) rows_gated_as(constant, gate, up, n, y)
    ROWS_EACH_ACT(ROWS_RUN)
#undef ROWS_RUN
}

static VEC_INLINE void rows_activate_as(const mp_act act, int64_t n, float *x) {
    for (int64_t i = 0; i < n; i += VEC_N)
        row_store(x, i, n, vec_activate(act, row_load(x, i, n)));
}

static void rows_activate(mp_act act, int64_t n, float *x) {
#define ROWS_RUN(constant) rows_activate_as(constant, n, x)
    ROWS_EACH_ACT(ROWS_RUN)
#undef ROWS_RUN
}

static void rows_softcap(float cap, int64_t n, float *x) {
    for (int64_t i = 0; i < n; i += VEC_N)
        row_store(x, i, n, vec_softcap(vec_set(cap), row_load(x, i, n)));
}

static VEC_INLINE void rows_affine_as(const mp_act act, const float *x, const float *centre, const float *scale,
                                      const float *shift, int n, float *y) {
    for (int i = 0; i < n; i += VEC_N) {
        vec d = vec_sub(row_load(x, i, n), row_load(centre, i, n));
        row_store(y, i, n, vec_activate(act, vec_fma(d, row_load(scale, i, n), row_load(shift, i, n))));
    }
}

static void rows_affine(const float *x, const float *centre, const float *scale, const float *shift, mp_act act, int n,
                        float *y) {
#define ROWS_RUN(constant) rows_affine_as(constant, x, centre, scale, shift, n, y)
    ROWS_EACH_ACT(ROWS_RUN)
#undef ROWS_RUN
}

static float rows_max(const float *x, int64_t n) {
    const vec lowest = vec_set(-INFINITY);
    vec top = lowest;
    for (int64_t i = 0; i < n; i += VEC_N)
        top = vec_max(row_keep(row_load(x, i, n), i, n, lowest), top);
    return vec_top(top);
}

static float rows_exp_sum(const float *x, int64_t n, float max, float *out) {
    const vec top = vec_set(max);
    vec sum = vec_zero();
    for (int64_t i = 0; i < n; i += VEC_N) {
        vec e = row_keep(vec_exp(vec_sub(row_load(x, i, n), top)), i, n, vec_zero());
        sum = vec_add(sum, e);
        if (out)
            row_store(out, i, n, e);
    }
    return vec_sum(sum);
}

static float rows_softmax(float *x, int n) {
    assert(n > 0);
    return rows_exp_sum(x, n, rows_max(x, n), x);
}

/* Find the first chunk that contains the maximum, then search only that chunk: the row is read from memory only once.
 */
static int64_t rows_argmax(const float *x, int64_t n) {
    enum { CHUNK = 4096 };
    float best = -INFINITY;
    int64_t chunk = 0;
    for (int64_t i = 0; i < n; i += CHUNK) {
        float top = rows_max(x + i, n - i < CHUNK ? n - i : CHUNK);
        if (top > best) {
            best = top;
            chunk = i;
        }
    }
    for (int64_t i = chunk; i < n; i++)
        if (x[i] == best)
            return i;
    return 0;
}

static float rows_dot(const float *a, const float *b, int64_t n) {
    vec sum = vec_zero();
    for (int64_t i = 0; i < n; i += VEC_N)
        sum = vec_fma(row_load(a, i, n), row_load(b, i, n), sum);
    return vec_sum(sum);
}

/* 0 * x is NaN only for NaN and inf, and a sum with a NaN in it is NaN. */
static bool rows_all_finite(const float *x, int64_t n) {
    vec sum = vec_zero();
    for (int64_t i = 0; i < n; i += VEC_N)
        sum = vec_fma(row_load(x, i, n), vec_zero(), sum);
    return vec_sum(sum) == 0.0f;
}

static VEC_INLINE void rope_rotate(vec *a, vec *b, vec c, vec s) {
    vec turned = vec_fma(*a, c, vec_neg(vec_mul(*b, s)));
    *b = vec_fma(*a, s, vec_mul(*b, c));
    *a = turned;
}

static void rows_rope(float *x, const float *cos_sin, int dim, bool neox) {
    assert(dim % 2 == 0);
    const int half = dim / 2;
    for (int i = 0; i < half; i += VEC_N) {
        const int n = half - i < VEC_N ? half - i : VEC_N;
        float angles[2 * VEC_N], pairs[2 * VEC_N]; /* the last pairs, padded: vec_load_pairs reads 16 pairs */
        const float *from = cos_sin + 2 * i;
        vec a, b, c, s;
        if (n < VEC_N) {
            memset(angles, 0, sizeof angles);
            memcpy(angles, from, sizeof(float) * 2 * (size_t)n);
            from = angles;
        }
        vec_load_pairs(from, &c, &s);
        if (neox) {
            a = row_load(x, i, half);
            b = row_load(x + half, i, half);
            rope_rotate(&a, &b, c, s);
            row_store(x, i, half, a);
            row_store(x + half, i, half, b);
        } else if (n == VEC_N) {
            vec_load_pairs(x + 2 * i, &a, &b);
            rope_rotate(&a, &b, c, s);
            vec_store_pairs(x + 2 * i, a, b);
        } else {
            memset(pairs, 0, sizeof pairs);
            memcpy(pairs, x + 2 * i, sizeof(float) * 2 * (size_t)n);
            vec_load_pairs(pairs, &a, &b);
            rope_rotate(&a, &b, c, s);
            vec_store_pairs(pairs, a, b);
            memcpy(x + 2 * i, pairs, sizeof(float) * 2 * (size_t)n);
        }
    }
}

static void rows_widen_i8(const int8_t *x, int64_t n, float *y) {
    int64_t i = 0;
    for (; n - i >= VEC_N; i += VEC_N)
        vec_store(y + i, vec_load_i8(x + i));
    for (; i < n; i++)
        y[i] = (float)x[i];
}

static void rows_causal_conv(const float *const *x, int64_t at, const float *kernel, int64_t ld, const float *bias,
                             int taps, int rows, int n, float *y, int64_t ldy) {
    enum { TILE = 256 }; /* channels: part of a row long enough for the prefetcher; its kernel stays in L1 */
    for (int c0 = 0; c0 < n; c0 += TILE)
        for (int r = 0; r < rows; r++)
            for (int c = c0; c < n && c < c0 + TILE; c += VEC_N) {
                vec sum = bias ? row_load(bias, c, n) : vec_zero();
                for (int j = 0; j < taps; j++)
                    sum = vec_fma(row_load(kernel + j * ld, c, n), row_load(x[r + j] + at, c, n), sum);
                row_store(y + r * ldy, c, n, sum);
            }
}

/* The numbers of a row that a pass over a block of columns reads. */
typedef struct scan_row {
    const float *k, *q, *next; /* next: the keys of the row after it */
    vec u, decay;
} scan_row;

typedef struct scan_sum { /* one of the sums of mp_state_scan, for each column */
    vec part[4];
} scan_sum;

/* Registers hold the partial sums of two products: those of S^T k for the next row are computed while S is loaded. */
enum { SCAN_AHEAD = VEC_ACCUMULATORS >= 8 };

static VEC_INLINE vec scan_total(const scan_sum *sum) {
    return vec_add(vec_add(sum->part[0], sum->part[1]), vec_add(sum->part[2], sum->part[3]));
}

/* Processes component i of each column; j = i mod 4. */
static VEC_INLINE void scan_component(const bool update, const bool out, const bool ahead, const int j, float *state,
                                      const scan_row *row, int i, scan_sum *o, scan_sum *a) {
    vec s = vec_load(state + (ptrdiff_t)i * VEC_N);
    if (update) {
        s = vec_fma(vec_set(row->k[i]), row->u, vec_mul(row->decay, s));
        vec_store(state + (ptrdiff_t)i * VEC_N, s);
    }
    if (out)
        o->part[j] = vec_fma(s, vec_set(row->q[i]), o->part[j]);
    if (ahead)
        a->part[j] = vec_fma(s, vec_set(row->next[i]), a->part[j]);
}

/* Add the row to the state (update); then set *o to S^T q (out) and *a to S^T next (ahead). The flags and j are
 * constants, so that the sums are registers. */
static VEC_INLINE void scan_pass(const bool update, const bool out, const bool ahead, float *state, int dk,
                                 const scan_row *row, vec *o, vec *a) {
    const scan_sum zero = {{vec_zero(), vec_zero(), vec_zero(), vec_zero()}};
    scan_sum o_sum = zero, a_sum = zero;
    int i = 0;
    for (; i + 4 <= dk; i += 4) {
        VEC_UNROLL
        for (int j = 0; j < 4; j++)
            scan_component(update, out, ahead, j, state, row, i + j, &o_sum, &a_sum);
    }
    VEC_UNROLL
    for (int j = 0; j < 3; j++)
        if (i + j < dk)
            scan_component(update, out, ahead, j, state, row, i + j, &o_sum, &a_sum);
    if (out)
        *o = scan_total(&o_sum);
    if (ahead)
        *a = scan_total(&a_sum);
}

static void rows_state_scan(const mp_state_scan *scan, int block0, int block1) {
    const int dk = scan->dk;
    for (int b = block0; b < block1; b++) {
        float *const state = scan->state + (ptrdiff_t)b * dk * VEC_N;
        const int64_t at = (int64_t)b * VEC_N;
        vec o = vec_zero(), a = vec_zero();
        for (int r = 0; r < scan->rows; r++) {
            const float *const k = scan->k + r * scan->ldk;
            const bool ahead = SCAN_AHEAD && scan->beta && r + 1 < scan->rows;
            scan_row row = {k, scan->q ? scan->q + r * scan->ldq : NULL, k,
                            row_load(scan->v + r * scan->ldv, at, scan->dv), vec_set(scan->decay[r * scan->ld_gates])};
            if (scan->beta) {
                if (r == 0 || !SCAN_AHEAD)
                    scan_pass(false, false, true, state, dk, &row, &o, &a);
                row.u = vec_mul(vec_set(scan->beta[r * scan->ld_gates]), vec_sub(row.u, vec_mul(row.decay, a)));
            }
            if (scan->u)
                row_store(scan->u + r * scan->ldu, at, scan->dv, row.u);
            row.next = ahead ? k + scan->ldk : NULL;
            if (scan->q && ahead)
                scan_pass(true, true, true, state, dk, &row, &o, &a);
            else if (scan->q)
                scan_pass(true, true, false, state, dk, &row, &o, &a);
            else if (ahead)
                scan_pass(true, false, true, state, dk, &row, &o, &a);
            else
                scan_pass(true, false, false, state, dk, &row, &o, &a);
            if (scan->q)
                row_store(scan->o + r * scan->ldo, at, scan->dv, o);
        }
    }
}

static void rows_fill(mp_kernel_table *table, const char *variant) {
    MP_SET(table, rms_norm, rows_rms_norm, variant);
    MP_SET(table, layer_norm, rows_layer_norm, variant);
    MP_SET(table, add, rows_add, variant);
    MP_SET(table, mul_add, rows_mul_add, variant);
    MP_SET(table, column_sums, rows_column_sums, variant);
    MP_SET(table, causal_conv, rows_causal_conv, variant);
    MP_SET(table, state_scan, rows_state_scan, variant);
    MP_SET(table, affine, rows_affine, variant);
    MP_SET(table, gated, rows_gated, variant);
    MP_SET(table, activate, rows_activate, variant);
    MP_SET(table, softcap, rows_softcap, variant);
    MP_SET(table, softmax, rows_softmax, variant);
    MP_SET(table, max, rows_max, variant);
    MP_SET(table, argmax, rows_argmax, variant);
    MP_SET(table, exp_sum, rows_exp_sum, variant);
    MP_SET(table, dot, rows_dot, variant);
    MP_SET(table, all_finite, rows_all_finite, variant);
    MP_SET(table, rope, rows_rope, variant);
    MP_SET(table, widen_i8, rows_widen_i8, variant);
    MP_SET(table, row_maxima, maxima_rows, variant);
}

#endif
