/* arm/i8mm_quant.c: products of quantised weights by smmla, for many rows.
 *
 * An accumulator holds two outputs of two rows, as in simd/pair_tile.h: [o r] [o r + 1] [o + 1 r] [o + 1 r + 1]. Sums of
 * blocks, float accumulators, scales of outputs and scales of rows all have this order; rows are separated once, at the
 * end. A tile is 3 pairs of rows by 8 outputs: 12 integer and 12 float accumulators in 32 registers.
 *
 * CHUNK blocks of a panel are unpacked to signed bytes in L1 and serve all rows of a pass, so one tile serves all kinds.
 * Signed weights need no offset: sums start at zero.
 *
 * Vector instructions for 32 inputs of 8 outputs by two rows (a block without minima; / p: shared by p pairs):
 *
 *     this tile   16 smmla + 4 zero + 4 convert + 4 multiply + 4 FMA                                = 32 + 84 / p
 *     sdot        32 sdot + 4 start + 4 convert + 4 multiply + 4 FMA + 26 / 3 to unpack (Q4_0)      = 57
 *
 * so many rows need 0.56 times as many vector instructions. Groups of 16 scale twice: 48 to 88. The bits are those of
 * all other variants. Fewer than MIN_ROWS rows use the variant that the table had before. */
#if defined(__aarch64__)
#include <assert.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/arm/dot.h"
#include "kernels/epilogue.h"
#include "kernels/simd/quant_neon.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

MP_KEEP_ORDER
MP_TARGET_I8MM_BEGIN

enum { Q_BYTES_OFFSET = 128 };
#include "kernels/simd/quant_kinds.h"

enum {
    CHUNK = 8,       /* blocks that are unpacked at a time: a superblock */
    EIGHTS = 4,      /* groups of 8 outputs in a panel, or of 8 inputs in a block */
    PAIRS = 3,       /* maximum pairs of rows of a tile */
    PASS = 192,      /* maximum rows of a pass over the panels: 24 KiB of accumulators */
    PASS_LEAST = 64, /* and rows of a pass of large K */
    ACTS_BYTES = 393216, /* bytes of activations that stay in L2 during a pass */
    MIN_ROWS = 12,   /* with fewer rows, unpacking to memory costs as much as smmla saves */
};

/* One or two scales of each block for each output or row: two for kinds with groups of 16. */
typedef struct mm_weights {
    int8_t q[EIGHTS][CHUNK][EIGHTS][4][16]; /* [8 outputs][block][8 inputs][2 outputs] */
    float d[EIGHTS][2 * CHUNK][4][4];       /* each output's scale twice */
    float low[EIGHTS][2 * CHUNK][4][4];     /* minima that are added */
} mm_weights;

typedef struct mm_rows {
    int8_t q[CHUNK][EIGHTS][PAIRS][16];
    float scale[2 * CHUNK][PAIRS][2];
    float low[2 * CHUNK][PAIRS][2]; /* factors of the minima */
} mm_rows;

typedef float mm_sums[EIGHTS][4][PAIRS][4]; /* float accumulators of a tile */

typedef struct mm_kind {
    bool halved, mins;
    void (*unpack)(const uint8_t *panel, int chunk, int blocks, mm_weights *to);
} mm_kind;

/* ---- weights ----------------------------------------------------------------------------------------------------- */

static MP_INLINE void mm_store_twice(qf x, float (*to)[4]) {
    vst1q_f32(to[0], vzip1q_f32(x.lo, x.lo));
    vst1q_f32(to[1], vzip2q_f32(x.lo, x.lo));
    vst1q_f32(to[2], vzip1q_f32(x.hi, x.hi));
    vst1q_f32(to[3], vzip2q_f32(x.hi, x.hi));
}

/* Unpack blocks CHUNK * chunk ... of a panel, and prefetch those of the next chunk. */
static MP_INLINE void mm_unpack(int kind, const uint8_t *panel, int chunk, int blocks, mm_weights *to) {
    const int bytes = q_block_bytes(kind), head_bytes = q_head_bytes(kind), chunk_bytes = head_bytes + CHUNK * bytes;
    const int parts = q_is_halved(kind) ? 2 : 1;
    const uint8_t *head = panel + (q_has_table(kind) ? MP_PACK_LINE : 0) + (size_t)chunk * (size_t)chunk_bytes;
    const uint8_t *block = head + head_bytes;
    const int8x16_t offset = vdupq_n_s8((int8_t)q_offset(kind));
    const qi table = q_has_table(kind) ? q_table(panel) : q_zero();
    for (int b = 0; b < blocks; b++, block += bytes) {
        const uint8_t *small = head + MP_PACK_HALVES + b * MP_PACK_SMALL;
        for (int i = 0; i < bytes; i += MP_PACK_LINE)
            __builtin_prefetch(block + i + chunk_bytes, 0, Q_NEAR);
        for (int u = 0; u < EIGHTS; u++) {
            qi w[8];
            MP_UNROLL
            for (int g = 0; g < 8; g++) {
                w[g] = q_weights(kind, g, block, u, table, 0, 0);
                w[g].lo = vreinterpretq_s32_s8(vsubq_s8(Q_BYTES(w[g].lo), offset));
                w[g].hi = vreinterpretq_s32_s8(vsubq_s8(Q_BYTES(w[g].hi), offset));
            }
            MP_UNROLL
            for (int k = 0; k < EIGHTS; k++) {
                int8_t(*at)[16] = to->q[u][b][k];
                vst1q_s8(at[0], Q_BYTES(vzip1q_s32(w[2 * k].lo, w[2 * k + 1].lo)));
                vst1q_s8(at[1], Q_BYTES(vzip2q_s32(w[2 * k].lo, w[2 * k + 1].lo)));
                vst1q_s8(at[2], Q_BYTES(vzip1q_s32(w[2 * k].hi, w[2 * k + 1].hi)));
                vst1q_s8(at[3], Q_BYTES(vzip2q_s32(w[2 * k].hi, w[2 * k + 1].hi)));
            }
            MP_UNROLL
            for (int h = 0; h < parts; h++) {
                qf d, low;
                q_scales(kind, h, 1, head, block, small, u, NULL, NULL, &d, &low);
                mm_store_twice(d, to->d[u][b * parts + h]);
                if (q_has_mins(kind))
                    mm_store_twice(head_bytes ? (qf){vnegq_f32(low.lo), vnegq_f32(low.hi)} : low,
                                   to->low[u][b * parts + h]);
            }
        }
    }
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Interleave the rows of a tile in pairs. An odd last row is its own partner. */
static void mm_arrange(const mm_kind *kind, const mp_acts *x, int m, int rows, int chunk, int blocks, mm_rows *to) {
    for (int r = 0; r < rows + rows % 2; r++) {
        const int64_t row = m + (r < rows ? r : rows - 1), other = m + (r + 1 < rows ? r + 1 : rows - 1);
        const int8_t *q = x->q + row * x->ldq + chunk * CHUNK * 32, *next = x->q + other * x->ldq + chunk * CHUNK * 32;
        const float *scale = x->scale + row * (x->K / 32) + chunk * CHUNK;
        const float *low = x->low + row * (x->K / 32) + chunk * CHUNK;
        const int32_t *sum = x->sum + row * (x->K / 16) + chunk * CHUNK * 2;
        for (int i = 0; r % 2 == 0 && i < 2 * blocks; i++) {
            const int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(q + 16 * i));
            const int64x2_t b = vreinterpretq_s64_s8(vld1q_s8(next + 16 * i));
            vst1q_s8(to->q[i / 2][i % 2 * 2][r / 2], vreinterpretq_s8_s64(vzip1q_s64(a, b)));
            vst1q_s8(to->q[i / 2][i % 2 * 2 + 1][r / 2], vreinterpretq_s8_s64(vzip2q_s64(a, b)));
        }
        for (int b = 0; b < blocks; b++) {
            if (!kind->halved) {
                to->scale[b][r / 2][r % 2] = scale[b];
                to->low[b][r / 2][r % 2] = low[b];
                continue;
            }
            for (int h = 2 * b; h < 2 * b + 2; h++) {
                to->scale[h][r / 2][r % 2] = scale[b];
                to->low[h][r / 2][r % 2] = kind->mins ? scale[b] * (float)sum[h] : 0;
            }
        }
    }
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

static MP_INLINE float32x4_t mm_pair_of(const float *two) {
    return vreinterpretq_f32_f64(vld1q_dup_f64((const double *)(const void *)two));
}

/* Add `blocks` blocks to the float accumulators of P pairs of rows by 8 outputs. */
static MP_INLINE void mm_multiply(bool halved, bool mins, int P, const mm_weights *w, int u, const mm_rows *a,
                                  int blocks, float (*acc)[PAIRS][4]) {
    const int parts = halved ? 2 : 1;
    float32x4_t f[4 * PAIRS];
    MP_UNROLL
    for (int i = 0; i < 4 * P; i++)
        f[i] = vld1q_f32(acc[i / P][i % P]);
    for (int b = 0; b < blocks; b++) {
        MP_UNROLL
        for (int h = 0; h < parts; h++) {
            int32x4_t sum[4 * PAIRS];
            MP_UNROLL
            for (int i = 0; i < 4 * P; i++)
                sum[i] = vdupq_n_s32(0);
            MP_UNROLL
            for (int i = 0; i < EIGHTS / parts; i++) {
                const int k = 2 * h + i;
                int32x4_t two[4];
                MP_UNROLL
                for (int v = 0; v < 4; v++)
                    two[v] = vreinterpretq_s32_s8(vld1q_s8(w->q[u][b][k][v]));
                MP_UNROLL
                for (int p = 0; p < P; p++) {
                    const int32x4_t rows = vreinterpretq_s32_s8(vld1q_s8(a->q[b][k][p]));
                    MP_UNROLL
                    for (int v = 0; v < 4; v++)
                        sum[v * P + p] = arm_smmla(sum[v * P + p], two[v], rows);
                }
            }
            const int at = b * parts + h;
            MP_UNROLL
            for (int i = 0; i < 4 * P; i++) {
                const int v = i / P, p = i % P;
                const float32x4_t scale = vmulq_f32(vld1q_f32(w->d[u][at][v]), mm_pair_of(a->scale[at][p]));
                f[i] = vfmaq_f32(f[i], vcvtq_f32_s32(sum[i]), scale);
                if (mins)
                    f[i] = vfmaq_f32(f[i], vld1q_f32(w->low[u][at][v]), mm_pair_of(a->low[at][p]));
            }
        }
    }
    MP_UNROLL
    for (int i = 0; i < 4 * P; i++)
        vst1q_f32(acc[i / P][i % P], f[i]);
}

typedef void mm_tile(const mm_weights *w, const mm_rows *a, int blocks, mm_sums acc);

#define MM_TILE(halved, mins, P)                                                                                  \
    static MP_NOINLINE void mm_tile_##halved##mins##P(const mm_weights *w, const mm_rows *a, int blocks,          \
                                                      mm_sums acc) {                                              \
        for (int u = 0; u < EIGHTS; u++)                                                                          \
            mm_multiply(halved, mins, P, w, u, a, blocks, acc[u]);                                                \
    }
#define MM_TILES(halved, mins) MM_TILE(halved, mins, 1) MM_TILE(halved, mins, 2) MM_TILE(halved, mins, 3)
MM_TILES(0, 0)
MM_TILES(0, 1)
MM_TILES(1, 0)
MM_TILES(1, 1)
#define MM_LIST(halved, mins) {mm_tile_##halved##mins##1, mm_tile_##halved##mins##2, mm_tile_##halved##mins##3}
static mm_tile *const mm_tiles[2][2][PAIRS] = {{MM_LIST(0, 0), MM_LIST(0, 1)}, {MM_LIST(1, 0), MM_LIST(1, 1)}};

/* ---- gemm -------------------------------------------------------------------------------------------------------- */

/* Store the finished tile of rows m ... m + rows - 1. */
static void mm_finish(const mp_wmat *w, int p, int m, int rows, const mp_epilogue *ep, mm_sums acc, float *y,
                      int64_t ldy) {
    _Alignas(64) float tile[2 * PAIRS][MP_PANEL_N];
    const int n0 = p * MP_PANEL_N, n1 = w->N - n0 < MP_PANEL_N ? w->N : n0 + MP_PANEL_N;
    for (int r = 0; r < (rows + 1) / 2; r++)
        for (int u = 0; u < EIGHTS; u++)
            for (int v = 0; v < 4; v += 2) {
                const float32x4_t one = vld1q_f32(acc[u][v][r]), two = vld1q_f32(acc[u][v + 1][r]);
                vst1q_f32(&tile[2 * r][8 * u + 2 * v], vuzp1q_f32(one, two));
                vst1q_f32(&tile[2 * r + 1][8 * u + 2 * v], vuzp2q_f32(one, two));
            }
    mp_epilogue_apply(ep, m, m + rows, n0, n1, tile[0], MP_PANEL_N);
    for (int r = 0; r < rows; r++)
        memcpy(y + (m + r) * ldy + n0, tile[r], (size_t)(n1 - n0) * sizeof *y);
}

static void mm_pass(const mm_kind *kind, const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                    const mp_epilogue *ep, float *y, int64_t ldy) {
    _Alignas(64) mm_weights weights;
    _Alignas(64) mm_rows rows;
    _Alignas(64) mm_sums acc[PASS / 2 / PAIRS];
    const int blocks = x->K / 32, chunks = (blocks + CHUNK - 1) / CHUNK, tiles = ((m1 - m0 + 1) / 2 + PAIRS - 1) / PAIRS;
    for (int p = panel0; p < panel1; p++) {
        memset(acc, 0, (size_t)tiles * sizeof *acc);
        for (int c = 0; c < chunks; c++) {
            const int n = blocks - c * CHUNK < CHUNK ? blocks - c * CHUNK : CHUNK;
            kind->unpack(w->data + (size_t)p * w->panel_bytes, c, n, &weights);
            for (int t = 0, m = m0; t < tiles; t++) {
                const int pairs = ((m1 - m + 1) / 2 + tiles - t - 1) / (tiles - t); /* tiles of nearly equal height */
                const int height = m1 - m < 2 * pairs ? m1 - m : 2 * pairs;
                mm_arrange(kind, x, m, height, c, n, &rows);
                mm_tiles[kind->halved][kind->mins][pairs - 1](&weights, &rows, n, acc[t]);
                if (c == chunks - 1)
                    mm_finish(w, p, m, height, ep, acc[t], y, ldy);
                m += height;
            }
        }
    }
}

typedef void gemm_function(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                           const mp_epilogue *ep, float *y, int64_t ldy);
static gemm_function *gemm_before[MP_W_KIND_COUNT];

static void mm_gemm(int which, const mm_kind *kind, const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0,
                    int panel1, const mp_epilogue *ep, float *y, int64_t ldy) {
    if (m1 - m0 < MIN_ROWS) {
        gemm_before[which](w, x, m0, m1, panel0, panel1, ep, y, ldy);
        return;
    }
    assert(x->kind == MP_A_Q8 && x->K == w->K && m1 <= x->M && panel1 <= w->panels);
    const int near = ACTS_BYTES / x->K, most = near < PASS_LEAST ? PASS_LEAST : near < PASS ? near / 2 * 2 : PASS;
    for (int passes = (m1 - m0 + most - 1) / most, m = m0; passes > 0; passes--) { /* of nearly equal height */
        const int end = passes == 1 ? m1 : m + ((m1 - m) / passes + 1) / 2 * 2;
        mm_pass(kind, w, x, m, end, panel0, panel1, ep, y, ldy);
        m = end;
    }
}

#define MM_KINDS(X)                                                                                       \
    X(q4_0, MP_W_Q4_0) X(q4_1, MP_W_Q4_1) X(q5_0, MP_W_Q5_0) X(q5_1, MP_W_Q5_1) X(q8_0, MP_W_Q8_0)        \
    X(q4_k, MP_W_Q4_K) X(q5_k, MP_W_Q5_K) X(q6_k, MP_W_Q6_K) X(q2_k, MP_W_Q2_K) X(q3_k, MP_W_Q3_K)        \
    X(tq, MP_W_TQ) X(iq2_xxs, MP_W_IQ2_XXS) X(iq2_xs, MP_W_IQ2_XS) X(iq3, MP_W_IQ3) X(iq4_nl, MP_W_IQ4_NL) \
    X(iq4_xs, MP_W_IQ4_XS) X(mxfp4, MP_W_MXFP4) X(nvfp4, MP_W_NVFP4)

#define MM_GEMM(name, kind)                                                                              \
    static MP_NOINLINE void unpack_##name(const uint8_t *panel, int chunk, int blocks, mm_weights *to) { \
        mm_unpack(kind, panel, chunk, blocks, to);                                                       \
    }                                                                                                    \
    static void gemm_##name(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,  \
                            const mp_epilogue *ep, float *y, int64_t ldy) {                              \
        const mm_kind of = {q_is_halved(kind), q_has_mins(kind), unpack_##name};                         \
        mm_gemm(kind, &of, w, x, m0, m1, panel0, panel1, ep, y, ldy);                                    \
    }
MM_KINDS(MM_GEMM)
MP_TARGET_END

#define MM_SET(name, kind)                       \
    gemm_before[kind] = table->call.gemm_##name; \
    MP_SET(table, gemm_##name, gemm_##name, "i8mm");

void mp_i8mm_quant(mp_kernel_table *table) { MM_KINDS(MM_SET) }
#endif
