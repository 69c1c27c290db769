/* maxima_i8_tmpl.h: slot row_maxima_i8. Template: include after a vec_*.h; kernels.h defines the result.
 *
 * The template has two parts. digits_begin, digits_fold and digits_end multiply the values of rows by unit and scale,
 * and fold these scores into the maxima. maxima_i8 computes the values with the integer products of the including file,
 * which defines DIGITS_TILE and:
 *
 *   enum { DIGITS_LANES = columns of a vector, DIGITS_ROWS = rows of a tile: 2, 4 or 8 }
 *   digits_item                             a component of a copied row
 *   digits_sums                             the exact sums of a row for one vector of columns
 *   digits_copy(row, n, to)                 copies n components of a row, then any values up to a multiple of 4
 *   digits_expand(digits, steps, memory)    the weights in the form that digits_load reads: `digits` itself, or
 *                                           `memory` [steps * DIGITS_EXPANDED] after filling it
 *   digits_start(offsets)                   empty sums; offsets [3][32] of digits.h, at the first column
 *   digits_load(weights, step, column)      the weights of 4 inputs, a digits_weights
 *   digits_step(sums, weights, four)        adds their products with 4 components
 *   digits_value(sums)                      fma((float)high, 256, (float)low), DIGITS_LANES floats in a digits_floats
 *   digits_store(to, x), digits_add(from, x)  stores them; adds them to those at `from` */
#ifndef MP_KERNELS_SIMD_MAXIMA_I8_TMPL_H
#define MP_KERNELS_SIMD_MAXIMA_I8_TMPL_H

#include <assert.h>

#include "kernels/digits.h"

typedef struct digits_maxima {
    vec unit[2], most[2]; /* columns 0 to 15 and 16 to 31 */
    vec poison;           /* NaN in a lane that saw a score which is not finite */
} digits_maxima;

static VEC_INLINE digits_maxima digits_begin(const uint8_t *panel, const float *maxima) {
    const float *units = mp_digits_units(panel);
    return (digits_maxima){{vec_load(units), vec_load(units + VEC_N)}, {vec_load(maxima), vec_load(maxima + VEC_N)},
                           vec_zero()};
}

/* Fold the values of row r for half of the columns. scales: NULL, or the factors of the rows. */
static VEC_INLINE void digits_fold(digits_maxima *m, int half, vec value, const float *scales, int r) {
    vec score = vec_mul(value, m->unit[half]);
    if (scales)
        score = vec_mul(score, vec_set(scales[r]));
    m->most[half] = vec_max(m->most[half], score);
    m->poison = vec_fma(score, vec_zero(), m->poison);
}

/* Store the maxima. Returns false if a score was not finite. */
static VEC_INLINE bool digits_end(const digits_maxima *m, float *maxima) {
    vec_store(maxima, m->most[0]);
    vec_store(maxima + VEC_N, m->most[1]);
    return vec_sum(m->poison) == 0.0f;
}

#ifdef DIGITS_TILE
/* Compute the values of R rows for one k-chunk, or add them to those of the chunks before. */
static VEC_INLINE void maxima_values(const int R, const digits_item (*rows)[MP_K_CHUNK], const int32_t *offsets,
                                     const void *weights, int steps, int columns, bool first, float *values) {
    for (int c = 0; c < (columns + VEC_N - 1) / VEC_N * VEC_N; c += DIGITS_LANES) {
        digits_sums sums[DIGITS_ROWS];
        VEC_UNROLL
        for (int r = 0; r < R; r++)
            sums[r] = digits_start(offsets + c);
        for (int s = 0; s < steps; s++) {
            const digits_weights w = digits_load(weights, s, c);
            VEC_UNROLL
            for (int r = 0; r < R; r++)
                digits_step(&sums[r], w, rows[r] + 4 * s);
        }
        VEC_UNROLL
        for (int r = 0; r < R; r++) {
            float *to = values + r * MP_PANEL_N + c;
            const digits_floats x = digits_value(sums[r]);
            digits_store(to, first ? x : digits_add(to, x));
        }
    }
}

/* Call maxima_values with a constant height, so that sums stay in registers. height: a power of two, at most
 * DIGITS_ROWS. */
static VEC_INLINE void maxima_heights(int height, const digits_item (*rows)[MP_K_CHUNK], const int32_t *offsets,
                                      const void *weights, int steps, int columns, bool first, float *values) {
    if (height == DIGITS_ROWS)
        maxima_values(DIGITS_ROWS, rows, offsets, weights, steps, columns, first, values);
    else if (DIGITS_ROWS > 4 && height == 4)
        maxima_values(DIGITS_ROWS > 4 ? 4 : 1, rows, offsets, weights, steps, columns, first, values);
    else if (DIGITS_ROWS > 2 && height == 2)
        maxima_values(DIGITS_ROWS > 2 ? 2 : 1, rows, offsets, weights, steps, columns, first, values);
    else
        maxima_values(1, rows, offsets, weights, steps, columns, first, values);
}

static bool maxima_i8(const uint8_t *panel, int columns, int K, const int8_t *rows, int64_t ld, int n,
                      const float *scales, float *maxima) {
    enum { BLOCK = 64 }; /* rows that share expanded weights; their values stay in L1 */
    _Alignas(64) digits_item copy[DIGITS_ROWS][MP_K_CHUNK];
    _Alignas(64) float values[BLOCK * MP_PANEL_N];
    _Alignas(64) uint8_t memory[DIGITS_EXPANDED * (MP_K_CHUNK / 4) + 1];
    assert(n > 0 && K > 0 && 0 < columns && columns <= MP_PANEL_N);
    digits_maxima m = digits_begin(panel, maxima);
    for (int block = 0; block < n; block += BLOCK) {
        const int count = n - block < BLOCK ? n - block : BLOCK;
        for (int k = 0; k < K; k += MP_K_CHUNK) {
            const int inputs = K - k < MP_K_CHUNK ? K - k : MP_K_CHUNK, steps = (inputs + 3) / 4;
            const int32_t *offsets = (const int32_t *)(const void *)(panel + mp_digits_chunk(k));
            const void *weights = digits_expand(panel + mp_digits_chunk(k) + MP_DIGITS_OFFSETS, steps, memory);
            for (int r = 0, height; r < count; r += height) {
                for (height = DIGITS_ROWS; height > count - r;)
                    height /= 2;
                for (int i = 0; i < height; i++)
                    digits_copy(rows + (block + r + i) * ld + k, inputs, copy[i]);
                maxima_heights(height, copy, offsets, weights, steps, columns, k == 0, values + r * MP_PANEL_N);
            }
        }
        for (int half = 0; half < (columns > VEC_N ? 2 : 1); half++)
            for (int r = 0; r < count; r++)
                digits_fold(&m, half, vec_load(values + r * MP_PANEL_N + half * VEC_N), scales ? scales + block : NULL,
                            r);
    }
    return digits_end(&m, maxima);
}
#endif

#endif
