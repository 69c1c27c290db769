/* simd/unpacked_quant.h: products of quantised weights with many rows, by sdot or smmla.
 *
 * Include it inside a target region, after quant_neon.h and quant_kinds.h. The includer defines MM_SMMLA: 1 to multiply
 * by smmla, 0 by sdot.
 *
 * CHUNK blocks of a panel are unpacked to signed bytes in L1 and serve all rows of a pass. The tiles are therefore the
 * same for all kinds, and sums start at zero, because signed weights need no offset. A tile is 6 rows by 8 outputs: 12
 * integer and 12 float accumulators in 32 registers. With smmla, an accumulator holds two outputs of two rows, as in
 * simd/pair_tile.h: [o r] [o r + 1] [o + 1 r] [o + 1 r + 1]. Sums of blocks, floats and scales have this order; rows
 * are separated once, at the end.
 *
 * Vector instructions for 32 inputs of 8 outputs by two rows, without minima (p: pairs of rows in the pass):
 *
 *     smmla          16 smmla + 4 to float + 4 scales + 4 FMA + 2 to arrange rows + 62 / p (unpack Q4_0)   31
 *     sdot           32 sdot  + 4 to float + 4 scales + 4 FMA + 2                 + 38 / p                  46
 *     quant_tmpl.h   32 sdot  + 4 to float + 4 scales + 4 FMA + 26 / 3 (unpack for the 6 rows of a tile)    55
 *
 * The bits are those of all other variants. */
#include <assert.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/arm/dot.h"
#include "kernels/epilogue.h"
#include "kernels/variants.h"

enum {
    CHUNK = 8,           /* blocks that are unpacked at a time: a superblock */
    EIGHTS = 4,          /* groups of 8 outputs in a panel, or of 8 inputs in a block */
    PAIRS = 3,           /* maximum pairs of rows of a tile */
    PASS = 192,          /* maximum rows of a pass over the panels: 24 KiB of accumulators */
    PASS_LEAST = 64,     /* the same for large K */
    ACTS_BYTES = 393216, /* bytes of activations that stay in L2 during a pass */
    MIN_ROWS = 9,        /* fewer rows form one tile of quant_tmpl.h, which multiplies while it reads the panel */
};

/* For 8 outputs and each block: four registers per 8 inputs, and a scale per output, two for kinds with groups of 16.
 * smmla: a register is 8 inputs of two outputs, and scales of outputs are stored twice. sdot: a register is 4 inputs of
 * four outputs; first inputs 0-3 of outputs 0-3 and of outputs 4-7, then inputs 4-7 of both. */
typedef struct mm_weights {
    int8_t q[EIGHTS][CHUNK][EIGHTS][4][16]; /* [8 outputs][block][8 inputs] */
    float d[EIGHTS][2 * CHUNK][MM_SMMLA ? 4 : 2][4];
    float low[EIGHTS][2 * CHUNK][MM_SMMLA ? 4 : 2][4]; /* minima that are added */
} mm_weights;

typedef struct mm_rows {
    int8_t q[CHUNK][EIGHTS][PAIRS][16]; /* 8 inputs of two rows */
    float scale[CHUNK][PAIRS][2];
    float low[2 * CHUNK][PAIRS][2]; /* factors of the minima */
} mm_rows;

/* Float accumulators of a tile: for 8 outputs four registers per pair of rows. sdot: outputs 0-3 and 4-7 of a row, then
 * of the other. */
typedef float mm_sums[EIGHTS][PAIRS][4][4];

typedef struct mm_kind {
    bool halved, mins;
    void (*unpack)(const uint8_t *panel, int chunk, int blocks, mm_weights *to);
} mm_kind;

/* ---- weights ----------------------------------------------------------------------------------------------------- */

static MP_INLINE void mm_store_scales(qf x, float (*to)[4]) {
#if MM_SMMLA
    vst1q_f32(to[0], vzip1q_f32(x.lo, x.lo));
    vst1q_f32(to[1], vzip2q_f32(x.lo, x.lo));
    vst1q_f32(to[2], vzip1q_f32(x.hi, x.hi));
    vst1q_f32(to[3], vzip2q_f32(x.hi, x.hi));
#else
    vst1q_f32(to[0], x.lo);
    vst1q_f32(to[1], x.hi);
#endif
}

/* Store inputs 0-3 and 4-7 of 8 outputs. */
static MP_INLINE void mm_store_eight(qi first, qi second, int8_t (*to)[16]) {
#if MM_SMMLA
    vst1q_s8(to[0], Q_BYTES(vzip1q_s32(first.lo, second.lo)));
    vst1q_s8(to[1], Q_BYTES(vzip2q_s32(first.lo, second.lo)));
    vst1q_s8(to[2], Q_BYTES(vzip1q_s32(first.hi, second.hi)));
    vst1q_s8(to[3], Q_BYTES(vzip2q_s32(first.hi, second.hi)));
#else
    vst1q_s8(to[0], Q_BYTES(first.lo));
    vst1q_s8(to[1], Q_BYTES(first.hi));
    vst1q_s8(to[2], Q_BYTES(second.lo));
    vst1q_s8(to[3], Q_BYTES(second.hi));
#endif
}

/* Unpack blocks CHUNK * chunk ... of a panel, and prefetch those of the next chunk. */
static MP_INLINE void mm_unpack(int kind, const uint8_t *panel, int chunk, int blocks, mm_weights *to) {
    const int bytes = q_block_bytes(kind), head_bytes = q_head_bytes(kind), chunk_bytes = head_bytes + CHUNK * bytes;
    const int parts = q_is_halved(kind) ? 2 : 1;
    const uint8_t *head = panel + (q_has_table(kind) ? MP_PACK_LINE : 0) + (size_t)chunk * (size_t)chunk_bytes;
    const uint8_t *block = head + head_bytes;
    const int8x16_t offset = vdupq_n_s8((int8_t)(kind == MP_W_Q8_0 || q_is_iq4(kind) ? 128 : q_offset(kind)));
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
            for (int k = 0; k < EIGHTS; k++)
                mm_store_eight(w[2 * k], w[2 * k + 1], to->q[u][b][k]);
            MP_UNROLL
            for (int h = 0; h < parts; h++) {
                qf d, low;
                q_scales(kind, h, 1, head, block, small, u, NULL, NULL, &d, &low);
                mm_store_scales(d, to->d[u][b * parts + h]);
                if (q_has_mins(kind))
                    mm_store_scales(head_bytes ? (qf){vnegq_f32(low.lo), vnegq_f32(low.hi)} : low,
                                   to->low[u][b * parts + h]);
            }
        }
    }
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Interleave rows m and m + 1 as pair p of a tile; if `alone`, row m with itself. */
static void mm_arrange(const mm_kind *kind, const mp_acts *x, int64_t m, bool alone, int chunk, int blocks, int p,
                       mm_rows *to) {
    const int other = alone ? 0 : 1, ld = x->K / 32, b0 = chunk * CHUNK;
    const int8_t *q = x->q + m * x->ldq + b0 * 32, *q1 = q + other * x->ldq;
    const float *scale = x->scale + m * ld + b0, *scale1 = scale + other * ld;
    for (int b = 0; b < blocks; b++) {
        MP_UNROLL
        for (int h = 0; h < 2; h++) {
            const int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(q + 32 * b + 16 * h));
            const int64x2_t a1 = vreinterpretq_s64_s8(vld1q_s8(q1 + 32 * b + 16 * h));
            vst1q_s8(to->q[b][2 * h][p], vreinterpretq_s8_s64(vzip1q_s64(a, a1)));
            vst1q_s8(to->q[b][2 * h + 1][p], vreinterpretq_s8_s64(vzip2q_s64(a, a1)));
        }
        to->scale[b][p][0] = scale[b];
        to->scale[b][p][1] = scale1[b];
    }
    if (kind->mins && kind->halved) {
        const int32_t *sum = x->sum + 2 * (m * ld + b0), *sum1 = sum + 2 * other * ld;
        for (int b = 0; b < 2 * blocks; b++) {
            to->low[b][p][0] = scale[b / 2] * (float)sum[b];
            to->low[b][p][1] = scale1[b / 2] * (float)sum1[b];
        }
    } else if (kind->mins) {
        const float *low = x->low + m * ld + b0, *low1 = low + other * ld;
        for (int b = 0; b < blocks; b++) {
            to->low[b][p][0] = low[b];
            to->low[b][p][1] = low1[b];
        }
    }
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* The factors of two rows for accumulator v of their pair. */
static MP_INLINE float32x4_t mm_factor(const float *two, int v) {
#if MM_SMMLA
    (void)v;
    const float32x2_t both = vld1_f32(two);
    return vcombine_f32(both, both);
#else
    return vld1q_dup_f32(two + v / 2);
#endif
}

static MP_INLINE const float *mm_scale(const float (*scales)[4], int v) { return scales[MM_SMMLA ? v : v % 2]; }

/* Add 8 inputs of 8 outputs by two rows to the four accumulators of the pair. */
static MP_INLINE void mm_dot(int32x4_t *sum, const int8x16_t *w, int8x16_t rows) {
#if MM_SMMLA
    MP_UNROLL
    for (int v = 0; v < 4; v++)
        sum[v] = arm_smmla(sum[v], vreinterpretq_s32_s8(w[v]), vreinterpretq_s32_s8(rows));
#else
    sum[0] = arm_sdot(sum[0], w[0], rows);
    sum[1] = arm_sdot(sum[1], w[1], rows);
    sum[2] = arm_sdot2(sum[2], w[0], rows);
    sum[3] = arm_sdot2(sum[3], w[1], rows);
    sum[0] = arm_sdot1(sum[0], w[2], rows);
    sum[1] = arm_sdot1(sum[1], w[3], rows);
    sum[2] = arm_sdot3(sum[2], w[2], rows);
    sum[3] = arm_sdot3(sum[3], w[3], rows);
#endif
}

/* Add `blocks` blocks to the float accumulators of P pairs of rows by 8 outputs. */
static MP_INLINE void mm_multiply(bool halved, bool mins, int P, const mm_weights *w, int u, const mm_rows *a,
                                  int blocks, float (*acc)[4][4]) {
    const int parts = halved ? 2 : 1;
    float32x4_t f[4 * PAIRS];
    MP_UNROLL
    for (int i = 0; i < 4 * P; i++)
        f[i] = vld1q_f32(acc[i / 4][i % 4]);
    for (int b = 0; b < blocks; b++) {
        MP_UNROLL
        for (int h = 0; h < parts; h++) {
            const int at = b * parts + h;
            int32x4_t sum[4 * PAIRS];
            MP_UNROLL
            for (int i = 0; i < 4 * P; i++)
                sum[i] = vdupq_n_s32(0);
            MP_UNROLL
            for (int i = 0; i < EIGHTS / parts; i++) {
                const int k = h * EIGHTS / 2 + i;
                int8x16_t eight[4];
                MP_UNROLL
                for (int v = 0; v < 4; v++)
                    eight[v] = vld1q_s8(w->q[u][b][k][v]);
                MP_UNROLL
                for (int p = 0; p < P; p++)
                    mm_dot(sum + 4 * p, eight, vld1q_s8(a->q[b][k][p]));
            }
            MP_UNROLL
            for (int i = 0; i < 4 * P; i++) {
                const int v = i % 4;
                const float32x4_t factor = mm_factor(a->scale[b][i / 4], v);
                f[i] = vfmaq_f32(f[i], vcvtq_f32_s32(sum[i]), vmulq_f32(vld1q_f32(mm_scale(w->d[u][at], v)), factor));
                if (mins)
                    f[i] = vfmaq_f32(f[i], vld1q_f32(mm_scale(w->low[u][at], v)), mm_factor(a->low[at][i / 4], v));
            }
        }
    }
    MP_UNROLL
    for (int i = 0; i < 4 * P; i++)
        vst1q_f32(acc[i / 4][i % 4], f[i]);
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
    for (int i = 0; i < (rows + 1) / 2 * EIGHTS; i++) {
        const int r = i / EIGHTS * 2, u = i % EIGHTS;
        float32x4_t f[4]; /* two registers of the first row, two of the second */
        for (int v = 0; v < 4; v++)
            f[v] = vld1q_f32(acc[u][r / 2][v]);
#if MM_SMMLA
        const float32x4_t g[4] = {f[0], f[1], f[2], f[3]};
        f[0] = vuzp1q_f32(g[0], g[1]), f[1] = vuzp1q_f32(g[2], g[3]);
        f[2] = vuzp2q_f32(g[0], g[1]), f[3] = vuzp2q_f32(g[2], g[3]);
#endif
        for (int v = 0; v < 4; v++)
            vst1q_f32(&tile[r + v / 2][8 * u + v % 2 * 4], f[v]);
    }
    mp_epilogue_apply(ep, m, m + rows, n0, n1, tile[0], MP_PANEL_N);
    for (int r = 0; r < rows; r++)
        memcpy(y + (m + r) * ldy + n0, tile[r], (size_t)(n1 - n0) * sizeof *y);
}

static MP_NOINLINE void mm_pass(const mm_kind *kind, const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0,
                                int panel1, const mp_epilogue *ep, float *y, int64_t ldy) {
    _Alignas(64) mm_weights weights;
    _Alignas(64) mm_rows rows;
    _Alignas(64) mm_sums acc[PASS / 2 / PAIRS];
    const int blocks = x->K / 32, chunks = (blocks + CHUNK - 1) / CHUNK;
    const int tiles = ((m1 - m0 + 1) / 2 + PAIRS - 1) / PAIRS;
    for (int p = panel0; p < panel1; p++) {
        memset(acc, 0, (size_t)tiles * sizeof *acc);
        for (int c = 0; c < chunks; c++) {
            const int n = blocks - c * CHUNK < CHUNK ? blocks - c * CHUNK : CHUNK;
            kind->unpack(w->data + (size_t)p * w->panel_bytes, c, n, &weights);
            for (int t = 0, m = m0; t < tiles; t++) {
                const int pairs = ((m1 - m + 1) / 2 + tiles - t - 1) / (tiles - t); /* tiles of nearly equal height */
                const int height = m1 - m < 2 * pairs ? m1 - m : 2 * pairs;
                for (int i = 0; i < pairs; i++)
                    mm_arrange(kind, x, m + 2 * i, 2 * i + 1 == height, c, n, i, &rows);
                mm_tiles[kind->halved][kind->mins][pairs - 1](&weights, &rows, n, acc[t]);
                if (c == chunks - 1)
                    mm_finish(w, p, m, height, ep, acc[t], y, ldy);
                m += height;
            }
        }
    }
}

typedef void mm_product(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                        const mp_epilogue *ep, float *y, int64_t ldy);
static mm_product *mm_before[MP_W_KIND_COUNT];

static void mm_gemm(int which, const mm_kind *kind, const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0,
                    int panel1, const mp_epilogue *ep, float *y, int64_t ldy) {
    if (m1 - m0 < MIN_ROWS) {
        mm_before[which](w, x, m0, m1, panel0, panel1, ep, y, ldy);
        return;
    }
    assert(x->kind == MP_A_Q8 && x->K == w->K && m1 <= x->M && panel1 <= w->panels);
    const int near = ACTS_BYTES / x->K, most = near < PASS_LEAST ? PASS_LEAST : near < PASS ? near / 2 * 2 : PASS;
    for (int passes = (m1 - m0 + most - 1) / most, m = m0; passes > 0; passes--) { /* passes of nearly equal height */
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

#define MM_GEMM(name, kind)                                                                                 \
    static MP_NOINLINE void mm_unpack_##name(const uint8_t *panel, int chunk, int blocks, mm_weights *to) { \
        mm_unpack(kind, panel, chunk, blocks, to);                                                          \
    }                                                                                                       \
    static void mm_gemm_##name(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,  \
                               const mp_epilogue *ep, float *y, int64_t ldy) {                              \
        const mm_kind of = {q_is_halved(kind), q_has_mins(kind), mm_unpack_##name};                         \
        mm_gemm(kind, &of, w, x, m0, m1, panel0, panel1, ep, y, ldy);                                       \
    }
MM_KINDS(MM_GEMM)

#define MM_SET(name, kind)                     \
    mm_before[kind] = table->call.gemm_##name; \
    MP_SET(table, gemm_##name, mm_gemm_##name, variant);

static void mm_set_gemms(mp_kernel_table *table, const char *variant) { MM_KINDS(MM_SET) }
