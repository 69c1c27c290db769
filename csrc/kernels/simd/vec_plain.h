/* vec_plain.h: the vector layer in plain C. Read this file first.
 *
 * A `vec` is 16 floats and a `vmask` 16 booleans, on every machine. The templates (rows_tmpl.h, attention_tmpl.h,
 * vmath_tmpl.h) are written once over these names and compiled after one of
 *
 *     vec_plain.h     arrays of 16: defines each operation; for tests and for machines without their own header
 *     vec_avx2.h      two registers of 8
 *     vec_avx512.h    one register
 *     vec_neon.h      four registers of 4
 *
 * Each operation is one IEEE operation in each lane (or none: loads, masks), so a template gives the same bits with
 * every header. A new instruction set is one more header with these names. Meanings that are not obvious are stated
 * here only.
 *
 * The templates have internal linkage. A file includes one vec_*.h, then the templates that it needs. On x86 they must
 * be inside a target region (target.h), and the headers that they include must be included before the region. */
#ifndef MP_KERNELS_SIMD_VEC_PLAIN_H
#define MP_KERNELS_SIMD_VEC_PLAIN_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/simd/target.h"

/* Inlining and unrolling hooks of the templates: trivial here, because arrays do not benefit. */
#define VEC_INLINE inline
#define VEC_UNROLL

enum {
    VEC_N = 16,
    VEC_TILE_ROWS = 6,    /* maximum rows of a tile of sums; to use 8, define VEC_WIDE_TILES */
    VEC_ACCUMULATORS = 6, /* maximum rows x vecs of a tile, whose sums must fit the registers */
};

typedef struct vec {
    float lane[16];
} vec;

typedef struct vmask {
    uint8_t lane[16];
} vmask;

#define VEC_EACH(l) for (int l = 0; l < VEC_N; l++)

static VEC_INLINE uint32_t vec_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static VEC_INLINE float vec_from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* ---- memory: no pointer needs alignment ---- */

static VEC_INLINE vec vec_set(float x) {
    vec y;
    VEC_EACH(l) y.lane[l] = x;
    return y;
}

static VEC_INLINE vec vec_zero(void) { return vec_set(0.0f); }

static VEC_INLINE vec vec_load(const float *p) {
    vec y;
    memcpy(&y, p, sizeof y);
    return y;
}

/* Load n floats (0 <= n <= 16) into the first n lanes; the other lanes are 0. Reads no memory beyond the n floats. */
static VEC_INLINE vec vec_load_n(const float *p, int n) {
    vec y;
    VEC_EACH(l) y.lane[l] = l < n ? p[l] : 0.0f;
    return y;
}

/* 16 integers as floats. */
static VEC_INLINE vec vec_load_i8(const int8_t *p) {
    vec y;
    VEC_EACH(l) y.lane[l] = (float)p[l];
    return y;
}

static VEC_INLINE void vec_store(float *p, vec x) { memcpy(p, &x, sizeof x); }

static VEC_INLINE void vec_store_n(float *p, vec x, int n) { VEC_EACH(l) if (l < n) p[l] = x.lane[l]; }

/* even: p[0], p[2], ... p[30]; odd: p[1], p[3], ... p[31]. vec_store_pairs is the inverse. */
static VEC_INLINE void vec_load_pairs(const float *p, vec *even, vec *odd) {
    VEC_EACH(l) {
        even->lane[l] = p[2 * l];
        odd->lane[l] = p[2 * l + 1];
    }
}

static VEC_INLINE void vec_store_pairs(float *p, vec even, vec odd) {
    VEC_EACH(l) {
        p[2 * l] = even.lane[l];
        p[2 * l + 1] = odd.lane[l];
    }
}

/* Transpose an 8 x 8 tile: dst[c * dst_ld + r] = src[r * src_ld + c]. Reads only `rows` rows (1 to 8) of src; the last
 * of them replaces the missing ones. */
static VEC_INLINE void vec_transpose8(const float *src, int64_t src_ld, int rows, float *dst, int64_t dst_ld) {
    for (int r = 0; r < 8; r++)
        for (int c = 0; c < 8; c++)
            dst[c * dst_ld + r] = src[(r < rows ? r : rows - 1) * src_ld + c];
}

/* ---- arithmetic ---- */

#define VEC_PLAIN_2(name, expression)          \
    static VEC_INLINE vec name(vec a, vec b) { \
        vec y;                                 \
        VEC_EACH(l) y.lane[l] = (expression);  \
        return y;                              \
    }

VEC_PLAIN_2(vec_add, a.lane[l] + b.lane[l])
VEC_PLAIN_2(vec_sub, a.lane[l] - b.lane[l])
VEC_PLAIN_2(vec_mul, a.lane[l] * b.lane[l])
VEC_PLAIN_2(vec_div, a.lane[l] / b.lane[l])
/* vec_max and vec_min return b if either is NaN or if both are zeros, so that vec_max(x, top) keeps `top`. */
VEC_PLAIN_2(vec_max, a.lane[l] > b.lane[l] ? a.lane[l] : b.lane[l])
VEC_PLAIN_2(vec_min, a.lane[l] < b.lane[l] ? a.lane[l] : b.lane[l])
/* the magnitude of a with the sign of b */
VEC_PLAIN_2(vec_copysign, copysignf(a.lane[l], b.lane[l]))
/* the bits of a + (the bits of b << 23): a * 2^n if b is n + 1.5 * 2^23 and the product is a normal float */
VEC_PLAIN_2(vec_scale_exponent, vec_from_bits(vec_bits(a.lane[l]) + (vec_bits(b.lane[l]) << 23)))

/* Look up table[k] per lane: 16 entries, 64-byte aligned; k is the low four bits of the lane of `at`. */
static VEC_INLINE vec vec_pick(const float *table, vec at) {
    VEC_EACH(l) at.lane[l] = table[vec_bits(at.lane[l]) & 15];
    return at;
}

/* a * b + c, rounded once */
static VEC_INLINE vec vec_fma(vec a, vec b, vec c) {
    vec y;
    VEC_EACH(l) y.lane[l] = fmaf(a.lane[l], b.lane[l], c.lane[l]);
    return y;
}

static VEC_INLINE vec vec_abs(vec x) {
    VEC_EACH(l) x.lane[l] = fabsf(x.lane[l]);
    return x;
}

static VEC_INLINE vec vec_neg(vec x) {
    VEC_EACH(l) x.lane[l] = -x.lane[l];
    return x;
}

/* ---- masks ---- */

/* a < b, a <= b: false if either is NaN */
static VEC_INLINE vmask vec_less(vec a, vec b) {
    vmask m;
    VEC_EACH(l) m.lane[l] = a.lane[l] < b.lane[l];
    return m;
}

static VEC_INLINE vmask vec_less_equal(vec a, vec b) {
    vmask m;
    VEC_EACH(l) m.lane[l] = a.lane[l] <= b.lane[l];
    return m;
}

/* lanes from <= l < to, for any from and to */
static VEC_INLINE vmask vec_lanes(int from, int to) {
    vmask m;
    VEC_EACH(l) m.lane[l] = from <= l && l < to;
    return m;
}

/* a where the mask is set, b elsewhere */
static VEC_INLINE vec vec_select(vmask m, vec a, vec b) {
    VEC_EACH(l) a.lane[l] = m.lane[l] ? a.lane[l] : b.lane[l];
    return a;
}

/* ---- pairs of 16-bit integers ---- */

typedef struct veci { /* 16 pairs, or 16 sums */
    int32_t lane[16];
} veci;

static VEC_INLINE veci veci_zero(void) {
    veci y;
    VEC_EACH(l) y.lane[l] = 0;
    return y;
}

/* veci_load: 16 consecutive pairs; veci_spread: one pair in all lanes */
static VEC_INLINE veci veci_load(const int16_t *p) {
    veci y;
    memcpy(&y, p, sizeof y);
    return y;
}

static VEC_INLINE veci veci_spread(const int16_t *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    veci y;
    VEC_EACH(l) y.lane[l] = pair;
    return y;
}

static VEC_INLINE int32_t vec_plain_pair(int a, int b) {
    const int16_t x[2] = {(int16_t)a, (int16_t)b};
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return pair;
}

/* Pairs of bytes as pairs of 16-bit integers. veci_load_8: 16 consecutive pairs; veci_twice_8: lane l has p[l] twice;
 * veci_spread_8: one pair in all lanes */
static VEC_INLINE veci veci_load_8(const int8_t *p) {
    veci y;
    VEC_EACH(l) y.lane[l] = vec_plain_pair(p[2 * l], p[2 * l + 1]);
    return y;
}

static VEC_INLINE veci veci_twice_8(const int8_t *p) {
    veci y;
    VEC_EACH(l) y.lane[l] = vec_plain_pair(p[l], p[l]);
    return y;
}

static VEC_INLINE veci veci_spread_8(const int8_t *p) {
    veci y;
    VEC_EACH(l) y.lane[l] = vec_plain_pair(p[0], p[1]);
    return y;
}

/* a[0] * b[0] and a[1] * b[1]; the caller ensures that they fit int16 */
static VEC_INLINE veci veci_times_16(veci a, veci b) {
    VEC_EACH(l) {
        int16_t x[2], y[2];
        memcpy(x, &a.lane[l], sizeof x);
        memcpy(y, &b.lane[l], sizeof y);
        a.lane[l] = vec_plain_pair(x[0] * y[0], x[1] * y[1]);
    }
    return a;
}

/* sum + a[0] * b[0] + a[1] * b[1]; the caller ensures that it fits int32. In templates, b is a veci_spread. */
static VEC_INLINE veci veci_dot(veci sum, veci a, veci b) {
    VEC_EACH(l) {
        int16_t x[2], y[2];
        memcpy(x, &a.lane[l], sizeof x);
        memcpy(y, &b.lane[l], sizeof y);
        sum.lane[l] += x[0] * y[0] + x[1] * y[1];
    }
    return sum;
}

static VEC_INLINE vec veci_to_float(veci x) {
    vec y;
    VEC_EACH(l) y.lane[l] = (float)x.lane[l];
    return y;
}

/* Store the low 16 bits of each lane to p[0 ... 15]; the strided form to p[0], p[2], ... p[30], leaving the elements
 * between unchanged; the form of pairs to p[0], p[2], ... (even) and p[1], p[3], ... p[31] (odd). */
static VEC_INLINE void vec_store_low16(int16_t *p, vec x) { VEC_EACH(l) p[l] = (int16_t)(uint16_t)vec_bits(x.lane[l]); }

static VEC_INLINE void vec_store_low16_strided(int16_t *p, vec x) {
    VEC_EACH(l) p[2 * l] = (int16_t)(uint16_t)vec_bits(x.lane[l]);
}

static VEC_INLINE void vec_store_low16_pairs(int16_t *p, vec even, vec odd) {
    vec_store_low16_strided(p, even);
    vec_store_low16_strided(p + 1, odd);
}

/* The greater of a and b in each lane (vec_max_bits) and the greatest lane of x (vec_top_bits), compared as unsigned
 * integers. This orders magnitudes by value, with NaN above all others. */
static VEC_INLINE vec vec_max_bits(vec a, vec b) {
    VEC_EACH(l) a.lane[l] = vec_bits(a.lane[l]) > vec_bits(b.lane[l]) ? a.lane[l] : b.lane[l];
    return a;
}

static VEC_INLINE float vec_top_bits(vec x) {
    for (int l = 1; l < VEC_N; l++)
        if (vec_bits(x.lane[l]) > vec_bits(x.lane[0]))
            x.lane[0] = x.lane[l];
    return x.lane[0];
}

/* ---- reductions by the fixed tree of kernels.h: lanes at distances 8, 4, 2, 1 ---- */

static VEC_INLINE float vec_sum(vec x) {
    for (int width = VEC_N / 2; width > 0; width /= 2)
        for (int l = 0; l < width; l++)
            x.lane[l] = x.lane[l] + x.lane[l + width];
    return x.lane[0];
}

static VEC_INLINE float vec_top(vec x) {
    for (int width = VEC_N / 2; width > 0; width /= 2)
        for (int l = 0; l < width; l++)
            x.lane[l] = x.lane[l + width] > x.lane[l] ? x.lane[l + width] : x.lane[l];
    return x.lane[0];
}

/* Reduce N rows of 16 (N is 4 or 16) at p [N][16]. Lane r of the result is the reduction of row r. Lanes beyond N are
 * unspecified. */
#define VEC_PLAIN_EACH(name, one)                             \
    static VEC_INLINE vec name(const int N, const float *p) { \
        vec y = vec_zero();                                   \
        for (int r = 0; r < N; r++)                           \
            y.lane[r] = one(vec_load(p + r * VEC_N));         \
        return y;                                             \
    }
VEC_PLAIN_EACH(vec_each_sum, vec_sum)
VEC_PLAIN_EACH(vec_each_top, vec_top)
VEC_PLAIN_EACH(vec_each_top_bits, vec_top_bits)

static VEC_INLINE void vec_prefetch(const void *p) { __builtin_prefetch(p); }
static VEC_INLINE void vec_prefetch_far(const void *p) { __builtin_prefetch(p, 0, 2); } /* to L2, not to L1 */

#endif
