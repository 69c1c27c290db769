/* maxima_tmpl.h: slot row_maxima in vectors of 16 lanes. Template: include after a vec_*.h. kernels.h defines the
 * result.
 *
 * A tile is R rows times one or both vecs of the panel. Its sums stay in registers over a k-chunk, then fold into the
 * maxima of the columns, so that no score is written to memory. */
#ifndef MP_KERNELS_SIMD_MAXIMA_TMPL_H
#define MP_KERNELS_SIMD_MAXIMA_TMPL_H

#include "kernels/kernels.h"

enum { MAXIMA_ROWS = VEC_ACCUMULATORS >= 24 ? 12 : 6, MAXIMA_SUMS = 24, MAXIMA_LINE = 16 };

typedef struct maxima_args {
    const float *panel, *rows, *scales;
    int64_t ld;
    int K, columns;
    float *maxima;
    vec poison; /* NaN in a lane that saw a score which is not finite */
} maxima_args;

/* Add input `at` of R rows to the sums. */
static VEC_INLINE void maxima_step(const int R, const int V, const float *const *base, int64_t ld, int at,
                                   const float *panel, vec *acc) {
    vec w[2];
    VEC_UNROLL
    for (int v = 0; v < V; v++)
        w[v] = vec_load(panel + v * VEC_N);
    VEC_UNROLL
    for (int r = 0; r < R; r++) {
        const vec x = vec_set(base[r / 3][r % 3 * ld + at]);
        VEC_UNROLL
        for (int v = 0; v < V; v++)
            acc[r * V + v] = vec_fma(x, w[v], acc[r * V + v]);
    }
}

/* Compute the sums of inputs [k, end): acc[r * V + v] is vec v of row r. Row r is at base[r / 3] + r % 3 * ld, because
 * x86 instructions can address base, base + stride and base + 2 * stride. */
static VEC_INLINE void maxima_chunk(const int R, const int V, const maxima_args *m, const float *const *base, int v0,
                                    int k, int end, vec *acc) {
    const int64_t ld = m->ld;
    VEC_UNROLL
    for (int i = 0; i < R * V; i++)
        acc[i] = vec_zero();
    const float *panel = m->panel + (int64_t)k * MP_PANEL_N + v0 * VEC_N;
    for (int i = k; i < end; i += MAXIMA_LINE) {
        const int stop = end - i < MAXIMA_LINE ? end : i + MAXIMA_LINE;
        /* Rows come from memory. Prefetch those of the next tile line by line while this tile is multiplied: hardware
         * prefetchers do not follow so many short rows, and without this the time doubles. */
        VEC_UNROLL
        for (int r = 0; r < R && v0 == 0; r++)
            __builtin_prefetch(base[r / 3] + r % 3 * ld + R * ld + i, 0, 3);
        for (int at = i; at < stop; at++, panel += MP_PANEL_N)
            maxima_step(R, V, base, ld, at, panel, acc);
    }
}

/* Fold R rows from `row` on into vecs [v0, v0 + V) of the maxima. */
static VEC_INLINE void maxima_tile(const int R, const int V, maxima_args *m, int row, int v0) {
    vec sum[MAXIMA_SUMS];
    const float *base[MAXIMA_ROWS / 3];
    VEC_UNROLL
    for (int b = 0; b < (R + 2) / 3; b++)
        base[b] = m->rows + (row + 3 * b) * m->ld;
    maxima_chunk(R, V, m, base, v0, 0, m->K < MP_K_CHUNK ? m->K : MP_K_CHUNK, sum);
    for (int k = MP_K_CHUNK; k < m->K; k += MP_K_CHUNK) {
        vec acc[MAXIMA_SUMS];
        maxima_chunk(R, V, m, base, v0, k, m->K - k < MP_K_CHUNK ? m->K : k + MP_K_CHUNK, acc);
        VEC_UNROLL
        for (int i = 0; i < R * V; i++)
            sum[i] = vec_add(sum[i], acc[i]);
    }
    VEC_UNROLL
    for (int v = 0; v < V; v++) {
        float *to = m->maxima + (v0 + v) * VEC_N;
        vec most = vec_load(to);
        VEC_UNROLL
        for (int r = 0; r < R; r++) {
            const vec score = m->scales ? vec_mul(sum[r * V + v], vec_set(m->scales[row + r])) : sum[r * V + v];
            most = vec_max(most, score);
            m->poison = vec_fma(score, vec_zero(), m->poison);
        }
        vec_store(to, most);
    }
}

/* For few rows, compute both vecs at once: the sums of one vec alone are too few to hide the latency of an FMA. */
static VEC_INLINE void maxima_block(const int R, maxima_args *m, int row) {
    if (2 * R <= VEC_ACCUMULATORS) {
        maxima_tile(R, 2, m, row, 0);
        return;
    }
    maxima_tile(R, 1, m, row, 0);
    if (m->columns > VEC_N)
        maxima_tile(R, 1, m, row, 1);
}

static bool maxima_rows(const float *panel, int columns, int K, const float *rows, int64_t ld, int n,
                        const float *scales, float *maxima) {
    maxima_args m = {panel, rows, scales, ld, K, columns, maxima, vec_zero()};
    int row = 0;
    for (; n - row >= MAXIMA_ROWS; row += MAXIMA_ROWS)
        maxima_block(MAXIMA_ROWS, &m, row);
    for (; MAXIMA_ROWS > 6 && n - row >= 6; row += 6)
        maxima_block(6, &m, row);
    switch (n - row) {
    case 5: maxima_block(5, &m, row); break;
    case 4: maxima_block(4, &m, row); break;
    case 3: maxima_block(3, &m, row); break;
    case 2: maxima_block(2, &m, row); break;
    case 1: maxima_block(1, &m, row); break;
    default: break;
    }
    return vec_sum(m.poison) == 0.0f;
}

#endif
