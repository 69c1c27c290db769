/* x86/avx2_dense.c: dense gemm and activations in 256-bit vectors. A tile is half a panel wide: 6 rows times 2 vectors
 * use 12 of the 16 registers as accumulators. Kernels whose step needs more registers use 4 rows. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "kernels/epilogue.h"
#include "kernels/simd/i8_scale.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

typedef int32_t any_word __attribute__((may_alias, aligned(1)));

#define D_LANES  8
#define D_HALVES 2
#define v_float  __m256
#define v_load   _mm256_loadu_ps
#define v_store  _mm256_storeu_ps
#define v_add    _mm256_add_ps

MP_TARGET_AVX2_BEGIN
/* ---- F32 --------------------------------------------------------------------------------------------------------- */
#define D(name)         f32_##name
#define D_W             __m256
#define D_A             __m256
#define D_ACC           __m256
#define D_CLASS         D_F32
#define D_MAX_ROWS      6
#define D_PANELS(R)     1
static MP_INLINE __m256 f32_start(int32_t sum) {
    (void)sum;
    return _mm256_setzero_ps();
}
static MP_INLINE __m256 f32_load(const uint8_t *w) { return _mm256_load_ps((const float *)(const void *)w); }
static MP_INLINE __m256 f32_splat(const uint8_t *a) { return _mm256_broadcast_ss((const float *)(const void *)a); }
static MP_INLINE __m256 f32_dot(__m256 acc, __m256 w, __m256 a) { return _mm256_fmadd_ps(a, w, acc); }
static MP_INLINE __m256 f32_result(__m256 acc, const float *sw, float sa) {
    (void)sw, (void)sa;
    return acc;
}
#include "kernels/simd/dense_gemm.h"

/* ---- rows that are widened before they are multiplied ------------------------------------------------------------ */

typedef void dense_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                        const mp_epilogue *ep, float *y, int64_t ldy);
enum { WIDE_ROWS = 96, WIDE_BYTES = 256 * 1024 }; /* maxima of a group of rows */

typedef struct wide_rows {
    int K;      /* inputs of a row, rounded up to 32 */
    int stride; /* bytes of a widened row, and 64: rows at multiples of 2 KiB would share few sets of the L1 */
    int tall;   /* rows of the tallest tile */
    int32_t (*widen)(const mp_acts *x, int row, int K, uint8_t *out); /* returns the start of the row's sums */
    dense_gemm *gemm; /* reads rows and starts from q, ldq and sum */
} wide_rows;

/* Multiply rows in groups of whole tiles: widen the rows of a group, then multiply them by all panels. */
static void gemm_of_wide(const wide_rows *wide, const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0,
                         int panel1, const mp_epilogue *ep, float *y, int64_t ldy) {
    _Alignas(64) uint8_t memory[WIDE_BYTES];
    int32_t start[WIDE_ROWS];
    const int rows = m1 - m0, most = WIDE_BYTES / wide->stride < WIDE_ROWS ? WIDE_BYTES / wide->stride : WIDE_ROWS;
    const int tall = most < wide->tall ? most : wide->tall, tiles = (rows + tall - 1) / tall;
    for (int t = 0, next; t < tiles; t = next) {
        next = tiles - t < most / tall ? tiles : t + most / tall;
        const int r0 = m0 + (int)((int64_t)rows * t / tiles), r1 = m0 + (int)((int64_t)rows * next / tiles);
        for (int r = r0; r < r1; r++)
            start[r - r0] = wide->widen(x, r, wide->K, memory + (r - r0) * wide->stride);
        mp_acts group = *x;
        group.q = (int8_t *)memory - (int64_t)r0 * wide->stride; /* row r0 is the first in memory */
        group.ldq = wide->stride;
        group.sum = start - r0;
        wide->gemm(w, &group, r0, r1, panel0, panel1, ep, y, ldy);
    }
}

/* ---- BF16 by fp32 FMAs: the same bits as ref --------------------------------------------------------------------- */
typedef struct bf16_pair {
    __m256 first, second; /* inputs k and k + 1 as fp32 */
} bf16_pair;

static MP_INLINE bf16_pair bf16_split(__m256i pairs) {
    const __m256i odd = _mm256_set1_epi32((int)0xffff0000u);
    return (bf16_pair){_mm256_castsi256_ps(_mm256_and_si256(pairs, odd)),
                       _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))};
}
/* For rows that are too long for wide_rows: a step widens its words of rows, too. */
#define D(name)         bf16_long_##name
#define D_W             bf16_pair
#define D_A             bf16_pair
#define D_ACC           __m256
#define D_CLASS         D_BF16
#define D_MAX_ROWS      4
#define D_PANELS(R)     1
#define bf16_long_start  f32_start
#define bf16_long_result f32_result
static MP_INLINE bf16_pair bf16_long_load(const uint8_t *w) {
    return bf16_split(_mm256_load_si256((const __m256i *)(const void *)w));
}
static MP_INLINE bf16_pair bf16_long_splat(const uint8_t *a) {
    return bf16_split(_mm256_set1_epi32(*(const any_word *)a));
}
static MP_INLINE __m256 bf16_long_dot(__m256 acc, bf16_pair w, bf16_pair a) {
    return _mm256_fmadd_ps(a.second, w.second, _mm256_fmadd_ps(a.first, w.first, acc));
}
#include "kernels/simd/dense_gemm.h"

/* The parts of a step are its two inputs. A row is widened to the fp32 numbers of its inputs. */
#define D(name)         bf16_wide_##name
#define D_W             __m256
#define D_A             __m256
#define D_ACC           __m256
#define D_CLASS         D_BF16
#define D_ROWS_WIDE
#define D_MAX_ROWS      6
#define D_PANELS(R)     1
#define D_PARTS         2
#define bf16_wide_start  f32_start
#define bf16_wide_result f32_result
#define bf16_wide_splat  f32_splat
#define bf16_wide_dot    f32_dot
static MP_INLINE __m256 bf16_wide_load(const uint8_t *w, int part) {
    const bf16_pair x = bf16_split(_mm256_load_si256((const __m256i *)(const void *)w));
    return part == 0 ? x.first : x.second;
}
#include "kernels/simd/dense_gemm.h"

static int32_t bf16_widen(const mp_acts *x, int row, int K, uint8_t *out) {
    const uint16_t *from = x->bf16 + row * x->ldq;
    for (int k = 0; k < K; k += 8, out += 32) { /* the word of the earlier input is the upper one of a pair */
        const __m256i pairs = _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(const void *)(from + k)));
        const __m256i first = _mm256_and_si256(pairs, _mm256_set1_epi64x(0xffff0000));
        _mm256_store_si256((__m256i *)(void *)out, _mm256_or_si256(first, _mm256_slli_epi64(pairs, 48)));
    }
    return 0;
}

static void bf16_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                      const mp_epilogue *ep, float *y, int64_t ldy) {
    const int K = (w->K + 31) / 32 * 32;
    const wide_rows wide = {K, 4 * K + 64, 6, bf16_widen, bf16_wide_gemm};
    if (WIDE_BYTES / 6 / 4 - 16 < K)
        bf16_long_gemm(w, x, m0, m1, panel0, panel1, ep, y, ldy);
    else
        gemm_of_wide(&wide, w, x, m0, m1, panel0, panel1, ep, y, ldy);
}

/* ---- I8 ---------------------------------------------------------------------------------------------------------- */
/* With 16-bit numbers w and a,
 *     (w0 + a1) (w1 + a0) = w0 a0 + w1 a1 + w0 w1 + a0 a1
 * so one vpmaddwd computes four products in a lane, after two additions (S. Winograd, 1968). All other exact ways need
 * two multiplications, and Zen has half as many ports for these as for additions: vpmaddubsw saturates for u8 = q +
 * 128, or needs signs that vpsignb moves onto the activations. The sums of w0 w1 follow the scales of a panel, those
 * of a0 a1 are computed by i8_widen. */
#define D(name)         i8_wide_##name
#define D_W             i8_pair
#define D_A             i8_pair
#define D_ACC           __m256i
#define D_CLASS         D_I8
#define D_ROWS_WIDE
#define D_MAX_ROWS      4
#define D_PANELS(R)     1
#define D_WORD          8
#define D_WIDEN         512
typedef struct i8_pair {
    __m256i even, odd; /* weights: inputs 0 and 2, inputs 1 and 3; rows: what is added to these */
} i8_pair;
static MP_INLINE __m256i i8_wide_start(int32_t start) { return _mm256_set1_epi32(start); }
static MP_INLINE i8_pair i8_wide_load(const uint8_t *w) {
    const __m256i u = _mm256_load_si256((const __m256i *)(const void *)w);
    return (i8_pair){_mm256_and_si256(u, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(u, 8)};
}
static MP_INLINE i8_pair i8_wide_load_widened(const uint8_t *w) {
    const __m256i *from = (const __m256i *)(const void *)w;
    return (i8_pair){_mm256_load_si256(from), _mm256_load_si256(from + 1)};
}
static void i8_wide_widen(const uint8_t *w, int steps, uint8_t *out) {
    for (int s = 0; s < steps; s++, w += 128, out += 128)
        for (int v = 0; v < 2; v++) {
            const i8_pair x = i8_wide_load(w + 32 * v);
            _mm256_store_si256((__m256i *)(void *)(out + 64 * v), x.even);
            _mm256_store_si256((__m256i *)(void *)(out + 64 * v + 32), x.odd);
        }
    memcpy(out, w, 192);
}
static MP_INLINE i8_pair i8_wide_splat(const uint8_t *a) {
    return (i8_pair){_mm256_set1_epi32(*(const any_word *)a), _mm256_set1_epi32(*(const any_word *)(a + 4))};
}
static MP_INLINE __m256i i8_wide_dot(__m256i acc, i8_pair w, i8_pair a) {
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_add_epi16(w.even, a.even), _mm256_add_epi16(w.odd, a.odd)));
    __asm__("" : "+x"(acc)); /* else gcc adds the products of several steps first, and spills them */
    return acc;
}
static MP_INLINE __m256 i8_wide_result(__m256i acc, const float *sw, float sa) {
    const __m256i pairs = _mm256_load_si256((const __m256i *)(const void *)(sw + MP_PANEL_N));
    const __m256 f = _mm256_cvtepi32_ps(_mm256_sub_epi32(acc, pairs));
    return _mm256_mul_ps(f, _mm256_mul_ps(_mm256_loadu_ps(sw), _mm256_set1_ps(sa)));
}
#include "kernels/simd/dense_gemm.h"

/* Widen the bytes of a row: of each four, the second and the fourth, then the first and the third. The sums of the row
 * start below zero by the products of its neighbours, and by the offset of the weights. */
static int32_t i8_widen(const mp_acts *x, int row, int K, uint8_t *out) {
    __m256i sum = _mm256_setzero_si256();
    for (int k = 0; k < K; k += 32, out += 64) {
        const __m256i q = _mm256_loadu_si256((const __m256i *)(const void *)(x->q + row * x->ldq + k));
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8), odd = _mm256_srai_epi16(q, 8);
        const __m256i low = _mm256_unpacklo_epi32(odd, even), high = _mm256_unpackhi_epi32(odd, even);
        _mm256_store_si256((__m256i *)(void *)out, _mm256_permute2x128_si256(low, high, 0x20));
        _mm256_store_si256((__m256i *)(void *)(out + 32), _mm256_permute2x128_si256(low, high, 0x31));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, odd));
    }
    int32_t lanes[8], start = -128 * x->sum[row];
    _mm256_storeu_si256((__m256i *)(void *)lanes, sum);
    for (int i = 0; i < 8; i++)
        start -= lanes[i];
    return start;
}

static void i8_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                    float *y, int64_t ldy) {
    const int K = (w->K + 31) / 32 * 32;
    const wide_rows wide = {K, 2 * K + 64, 4, i8_widen, i8_wide_gemm};
    gemm_of_wide(&wide, w, x, m0, m1, panel0, panel1, ep, y, ldy);
}

MP_TARGET_END

/* ---- I8 by the 256-bit vpdpbusd ---------------------------------------------------------------------------------- */
#if defined(MP_TARGET_AVXVNNI_BEGIN)
MP_TARGET_AVXVNNI_BEGIN
#include "kernels/simd/vpdpbusd.h"

#define D(name)         i8_vnni_##name
#define D_W             __m256i
#define D_A             __m256i
#define D_ACC           __m256i
#define D_CLASS         D_I8
#define D_MAX_ROWS      6
#define D_PANELS(R)     1
static MP_INLINE __m256i i8_vnni_start(int32_t sum) { return _mm256_set1_epi32(-128 * sum); }
static MP_INLINE __m256i i8_vnni_load(const uint8_t *w) { return _mm256_load_si256((const __m256i *)(const void *)w); }
static MP_INLINE __m256i i8_vnni_splat(const uint8_t *a) { return _mm256_set1_epi32(*(const any_word *)a); }
static MP_INLINE __m256i i8_vnni_dot(__m256i acc, __m256i w, __m256i a) { return vex_dpbusd(acc, w, a); }
static MP_INLINE __m256 i8_vnni_result(__m256i acc, const float *sw, float sa) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(acc), _mm256_mul_ps(_mm256_loadu_ps(sw), _mm256_set1_ps(sa)));
}
#include "kernels/simd/dense_gemm.h"
MP_TARGET_END

void mp_avxvnni_dense(mp_kernel_table *table) { MP_SET(table, gemm_i8, i8_vnni_gemm, "avxvnni"); }
#endif

MP_TARGET_AVX2_BEGIN
/* ---- activations ------------------------------------------------------------------------------------------------- */

/* Convert 8 floats to bf16: 4 words, each a pair with its order swapped. Rounds in integer arithmetic, as the other
 * variants do. */
static MP_INLINE __m128i bf16_words(__m256 x) {
    const __m256i u = _mm256_castps_si256(x);
    const __m256i even = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i r = _mm256_blendv_epi8(rounded, quiet, nan);
    /* each 64 bits hold x[2p] low, x[2p + 1] high; the result has the high half of x[2p] above that of x[2p + 1] */
    const __m256i first = _mm256_and_si256(r, _mm256_set1_epi64x(0xffff0000));
    const __m256i words = _mm256_or_si256(first, _mm256_srli_epi64(r, 48));
    return _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6)));
}

static void acts_bf16(const float *x, int K, uint16_t *out) {
    int k = 0;
    for (; k + 8 <= K; k += 8)
        _mm_storeu_si128((__m128i *)(void *)(out + k), bf16_words(_mm256_loadu_ps(x + k)));
    if (k < K) {
        float tail[8] = {0};
        uint16_t words[8];
        memcpy(tail, x + k, sizeof(float) * (size_t)(K - k));
        _mm_storeu_si128((__m128i *)(void *)words, bf16_words(_mm256_loadu_ps(tail)));
        memcpy(out + k, words, sizeof(uint32_t) * (size_t)((K - k + 1) / 2));
    }
}

/* Lane i of the mask is set when i < n. */
static MP_INLINE __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* Load the first n of eight floats, zero beyond them. A masked load of all eight costs more than a load. */
static MP_INLINE __m256 load_first(const float *x, int n) {
    return n >= 8 ? _mm256_loadu_ps(x) : _mm256_maskload_ps(x, first_lanes(n));
}

/* Compute the Hadamard stages within eight lanes: those of the distances 1, 2 and 4 that are below `size`. A stage
 * multiplies each lane by 1, or by -1 if the lane is the second of its pair, and adds its partner. An FMA by +-1 rounds
 * once, as a sum or difference does. */
static MP_INLINE __m256 within(__m256 x, int size) {
    const __m256 by1 = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), by2 = _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1);
    const __m256 by4 = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1);
    x = size > 1 ? _mm256_fmadd_ps(x, by1, _mm256_permute_ps(x, 0xb1)) : x;
    x = size > 2 ? _mm256_fmadd_ps(x, by2, _mm256_permute_ps(x, 0x4e)) : x;
    return size > 4 ? _mm256_fmadd_ps(x, by4, _mm256_permute2f128_ps(x, x, 1)) : x;
}

static void hadamard(const float *x, int K, int size, float *y) {
    int k = 0;
    for (; k + 8 <= K; k += 8)
        _mm256_storeu_ps(y + k, within(_mm256_loadu_ps(x + k), size));
    if (k < K) { /* size is at most 4 */
        const __m256i here = first_lanes(K - k);
        _mm256_maskstore_ps(y + k, here, within(_mm256_maskload_ps(x + k, here), size));
    }
    for (int h = 8; h < size; h *= 2)
        for (int block = 0; block < K; block += 2 * h)
            for (float *at = y + block; at < y + block + h; at += 8) {
                const __m256 a = _mm256_loadu_ps(at), b = _mm256_loadu_ps(at + h);
                _mm256_storeu_ps(at, _mm256_add_ps(a, b));
                _mm256_storeu_ps(at + h, _mm256_sub_ps(a, b));
            }
}

static void acts_i8(const float *x, int K, int8_t *q, float *scale, int32_t *sum) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i top = _mm256_setzero_si256(); /* bits of magnitudes compare as integers; NaN and Inf are greatest */
    for (int k = 0; k < K; k += 8) {
        const __m256 v = load_first(x + k, K - k);
        top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(v), magnitude));
    }
    int32_t lanes[8];
    _mm256_storeu_si256((__m256i *)(void *)lanes, top);
    int32_t bits = 0;
    for (int i = 0; i < 8; i++)
        bits = lanes[i] > bits ? lanes[i] : bits;
    const float inverse = mp_i8_factor((uint32_t)bits, scale);
    if (inverse == 0.0f) { /* x * 0 would be NaN where x is not finite */
        memset(q, 0, (size_t)K);
        *sum = 0;
        return;
    }
    __m256i total = _mm256_setzero_si256();
    for (int k = 0; k < K; k += 8) {
        const __m256 v = _mm256_mul_ps(load_first(x + k, K - k), _mm256_set1_ps(inverse));
        const __m256i i = _mm256_cvtps_epi32(_mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
        int8_t bytes[8];
        _mm_storel_epi64((__m128i *)(void *)bytes, _mm_packs_epi16(words, words));
        if (K - k >= 8)
            memcpy(q + k, bytes, 8);
        else
            memcpy(q + k, bytes, (size_t)(K - k));
        total = _mm256_add_epi32(total, i);
    }
    _mm256_storeu_si256((__m256i *)(void *)lanes, total);
    *sum = 0;
    for (int i = 0; i < 8; i++)
        *sum += lanes[i];
}

/* ---- F32 rows as stored ------------------------------------------------------------------------------------------ */

/* Load inputs [k, k + 8) of eight rows: v[i] has input k + i of every row. */
static MP_INLINE void load_columns(const float *const *row, int k, __m256 *v) {
    __m256 pair[8];
    for (int i = 0; i < 4; i++)
        for (int half = 0; half < 2; half++) {
            const __m128 low = _mm_loadu_ps(row[i] + k + 4 * half), high = _mm_loadu_ps(row[i + 4] + k + 4 * half);
            pair[4 * half + i] = _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
        }
    for (int half = 0; half < 8; half += 4) {
        const __m256 even0 = _mm256_unpacklo_ps(pair[half], pair[half + 1]);
        const __m256 odd0 = _mm256_unpackhi_ps(pair[half], pair[half + 1]);
        const __m256 even1 = _mm256_unpacklo_ps(pair[half + 2], pair[half + 3]);
        const __m256 odd1 = _mm256_unpackhi_ps(pair[half + 2], pair[half + 3]);
        v[half] = _mm256_shuffle_ps(even0, even1, 0x44);
        v[half + 1] = _mm256_shuffle_ps(even0, even1, 0xee);
        v[half + 2] = _mm256_shuffle_ps(odd0, odd1, 0x44);
        v[half + 3] = _mm256_shuffle_ps(odd0, odd1, 0xee);
    }
}

/* Eight outputs at a time, as the lanes of one accumulator: the prefetchers of the measured CPUs follow the eight
 * weight rows that are read at once. Reading 32 rows at once took twice the time. */
static void stored_f32(const uint8_t *rows, size_t stride, int n, const mp_acts *x, int m, float *y) {
    enum { ROWS = 8 };
    const float *a = x->f32 + m * x->ld_f32;
    for (int o = 0; o < n; o += ROWS) {
        const int count = n - o < ROWS ? n - o : ROWS;
        const float *row[ROWS];
        for (int r = 0; r < ROWS; r++) /* rows beyond the last repeat it */
            row[r] = (const float *)(const void *)(rows + (size_t)(o + (r < count ? r : count - 1)) * stride);
        __m256 sum = _mm256_setzero_ps();
        for (int k0 = 0; k0 < x->K; k0 += MP_K_CHUNK) {
            const int k1 = x->K - k0 < MP_K_CHUNK ? x->K : k0 + MP_K_CHUNK;
            __m256 chain = _mm256_setzero_ps(), v[8];
            int k = k0;
            for (; k + 8 <= k1; k += 8) {
                load_columns(row, k, v);
                for (int i = 0; i < 8; i++)
                    chain = _mm256_fmadd_ps(_mm256_broadcast_ss(a + k + i), v[i], chain);
            }
            for (; k < k1; k++) {
                const __m256 last = _mm256_setr_ps(row[0][k], row[1][k], row[2][k], row[3][k], row[4][k], row[5][k],
                                                   row[6][k], row[7][k]);
                chain = _mm256_fmadd_ps(_mm256_broadcast_ss(a + k), last, chain);
            }
            sum = k0 == 0 ? chain : _mm256_add_ps(sum, chain);
        }
        float out[ROWS];
        _mm256_storeu_ps(out, sum);
        memcpy(y + o, out, (size_t)count * sizeof *y);
    }
}

/* ---- F32 rows as stored, and their squares ----------------------------------------------------------------------- */

/* Adds the halves of the 16 sums of each row, at distances 8, 4, 2, 1 (slot dot), into lane[0]. */
static MP_INLINE void add_lanes(__m256 *lane) {
    for (int distance = 8; distance > 0; distance /= 2)
        for (int i = 0; i < distance; i++)
            lane[i] = _mm256_add_ps(lane[i], lane[i + distance]);
}

/* As stored_f32. Lane r of the sums of squares lane[k % 16] is row r, so they have the order of slot dot. Prefetches
 * into the L2 cache the group of rows that is at least 16 KiB ahead: the prefetchers of the CPU do not follow eight
 * rows, and prefetches into the L1 cache had no effect (Zen 4). 16 rows at a time by AVX-512 were slower. */
static void squared_f32(const float *rows, int64_t ld, int n, int K, const float *x, float *y, float *squares) {
    enum { ROWS = 8, LANES = 16, AHEAD = 16384 / sizeof(float) };
    const int64_t ahead = (AHEAD + ROWS * ld - 1) / (ROWS * ld) * ROWS * ld;
    for (int o = 0; o < n; o += ROWS) {
        const int count = n - o < ROWS ? n - o : ROWS;
        const float *row[ROWS];
        for (int r = 0; r < ROWS; r++) /* rows beyond the last repeat it */
            row[r] = rows + (o + (r < count ? r : count - 1)) * ld;
        __m256 sum = _mm256_setzero_ps(), lane[LANES];
        for (int i = 0; i < LANES; i++)
            lane[i] = _mm256_setzero_ps();
        for (int k0 = 0; k0 < K; k0 += MP_K_CHUNK) {
            const int k1 = K - k0 < MP_K_CHUNK ? K : k0 + MP_K_CHUNK;
            __m256 chain = _mm256_setzero_ps(), v[8];
            int k = k0;
            for (; k + LANES <= k1; k += LANES) {
                for (int r = 0; r < ROWS; r++)
                    _mm_prefetch((const char *)(const void *)(row[r] + ahead + k), _MM_HINT_T1);
                for (int half = 0; half < LANES; half += 8) {
                    load_columns(row, k + half, v);
                    for (int i = 0; i < 8; i++) {
                        chain = _mm256_fmadd_ps(_mm256_broadcast_ss(x + k + half + i), v[i], chain);
                        lane[half + i] = _mm256_fmadd_ps(v[i], v[i], lane[half + i]);
                    }
                }
            }
            for (; k < k1; k++) {
                const __m256 last = _mm256_setr_ps(row[0][k], row[1][k], row[2][k], row[3][k], row[4][k], row[5][k],
                                                   row[6][k], row[7][k]);
                chain = _mm256_fmadd_ps(_mm256_broadcast_ss(x + k), last, chain);
                lane[k % LANES] = _mm256_fmadd_ps(last, last, lane[k % LANES]);
            }
            sum = k0 == 0 ? chain : _mm256_add_ps(sum, chain);
        }
        add_lanes(lane);
        float out[2][ROWS];
        _mm256_storeu_ps(out[0], sum);
        _mm256_storeu_ps(out[1], lane[0]);
        memcpy(y + o, out[0], (size_t)count * sizeof *y);
        memcpy(squares + o, out[1], (size_t)count * sizeof *squares);
    }
}
MP_TARGET_END

void mp_avx2_dense(mp_kernel_table *table) {
    MP_SET(table, gemm_f32, f32_gemm, "avx2");
    MP_SET(table, gemm_bf16, bf16_gemm, "avx2");
    MP_SET(table, gemm_i8, i8_gemm, "avx2");
    MP_SET(table, acts_bf16, acts_bf16, "avx2");
    MP_SET(table, acts_i8, acts_i8, "avx2");
    MP_SET(table, hadamard, hadamard, "avx2");
    MP_SET(table, stored_f32, stored_f32, "avx2");
    MP_SET(table, squared_f32, squared_f32, "avx2");
}
#endif
