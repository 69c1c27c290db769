/* x86/amx_dense.c: products of BF16 and I8 by the tile registers of AMX.
 *
 * A tile is 16 rows of 64 bytes. The panels of pack_dense.h are as the instructions want them: 16 steps of a panel, 64
 * bytes of each, are one tile of 16 outputs; 16 rows of activations, 64 bytes of each, are the other. A step of the
 * loops takes 32 inputs of BF16, 64 of I8, and multiplies two tiles of rows by the two of a panel.
 *
 * BF16: an instruction adds up 32 inputs by themselves, the even slots and the odd ones each in a chain, then the two
 * sums, and adds that to the accumulator; denormals count as zero. So outputs have bits of their own, and every product
 * of the class has to come from here, one row as well as a thousand. I8 is exact, with the bits of all other variants.
 *
 * Inputs beyond K: rows of activations are zero up to 64 bytes, the panels of BF16 too (pack_dense.c); of I8 the tile
 * then holds what lies behind the panel, times zero. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "kernels/simd/target.h"
#include "kernels/variants.h"

#if defined(MP_TARGET_AMX_BEGIN)

enum {
    TILE = 16,             /* rows of a tile, of 64 bytes each */
    ROWS = 2 * TILE,       /* of a block: two tiles */
    STEP = MP_PANEL_N * 4, /* bytes of one step of a panel */
    BLOCK = 256,           /* rows that go by a panel before the next: they and the panel stay in the second cache */
};

/* What ldtilecfg reads. */
typedef struct tile_config {
    uint8_t palette, start_row, unused[14];
    uint16_t bytes[16]; /* of a row of tile i */
    uint8_t rows[16];
} tile_config;

/* One block of at most ROWS rows times one panel. */
typedef struct amx_block {
    const uint8_t *w;   /* [steps][STEP] */
    const uint8_t *a;   /* [rows][stride] */
    int64_t stride;
    int tiles;          /* along the inputs */
    const uint8_t *next; /* of the panel after this: fetched meanwhile, so many lines of 64 bytes a step */
    int lines;
    int rows, cols;     /* that are stored */
    const float *bias;  /* at the first column; or NULL */
    mp_act act;
    const float *residual; /* at the first row and column; or NULL */
    int64_t ld_residual;
    float *y;           /* at the first row and column; or NULL: words, in pairs as acts_bf16 leaves them */
    uint16_t *words;
    int64_t ldy;
    const float *sw;    /* I8: scales of the outputs [32], of the rows, and the rows' sums */
    const float *sa;
    const int32_t *sum;
} amx_block;

MP_TARGET_AMX_BEGIN
/* Tiles 0, 1: the first 16 rows by the panel's halves, 2, 3: the other rows; 4, 5: activations; 6, 7: weights. */
static MP_INLINE void configure(int rows) {
    const int first = rows < TILE ? rows : TILE, second = rows > TILE ? rows - TILE : 0;
    tile_config c = {.palette = 1};
    const int height[8] = {first, first, second, second, first, second, TILE, TILE};
    for (int i = 0; i < 8; i++) {
        c.bytes[i] = (uint16_t)(height[i] ? 64 : 0);
        c.rows[i] = (uint8_t)height[i];
    }
    _tile_loadconfig(&c);
}

/* A finished block, which is stored while the next is computed: a tile product takes 16 cycles in which little else has
 * to be done. */
typedef struct amx_pending {
    amx_block b;
    _Alignas(64) float acc[ROWS * MP_PANEL_N]; /* of floats, or of int32 for I8 */
    int next, rows;                            /* rows [next, rows) are not stored yet */
} amx_pending;

/* Rows [p->next, end) through the epilogue to the output. */
static MP_INLINE void finish(amx_pending *p, int end, bool scaled, const mp_kernels *k) {
    const amx_block *b = &p->b;
    if (p->next >= end)
        return;
    const __mmask16 m0 = (__mmask16)(b->cols >= 16 ? 0xffff : (1u << b->cols) - 1);
    const __mmask16 m1 = (__mmask16)(b->cols >= 32 ? 0xffff : b->cols > 16 ? (1u << (b->cols - 16)) - 1 : 0);
    for (int r = p->next; r < end; r++) {
        float *from = p->acc + r * MP_PANEL_N;
        __m512 f0 = _mm512_load_ps(from), f1 = _mm512_load_ps(from + 16);
        if (scaled) {
            const __m512i start = _mm512_set1_epi32(-128 * b->sum[r]);
            const __m512 sa = _mm512_set1_ps(b->sa[r]);
            f0 = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_castps_si512(f0), start));
            f1 = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_castps_si512(f1), start));
            f0 = _mm512_mul_ps(f0, _mm512_mul_ps(_mm512_loadu_ps(b->sw), sa));
            f1 = _mm512_mul_ps(f1, _mm512_mul_ps(_mm512_loadu_ps(b->sw + 16), sa));
        }
        if (b->bias) {
            f0 = _mm512_add_ps(f0, _mm512_maskz_loadu_ps(m0, b->bias));
            f1 = _mm512_add_ps(f1, _mm512_maskz_loadu_ps(m1, b->bias + 16));
        }
        if (b->act != MP_ACT_NONE) {
            _mm512_store_ps(from, f0);
            _mm512_store_ps(from + 16, f1);
            k->activate(b->act, MP_PANEL_N, from);
            f0 = _mm512_load_ps(from);
            f1 = _mm512_load_ps(from + 16);
        }
        if (b->residual) {
            f0 = _mm512_add_ps(f0, _mm512_maskz_loadu_ps(m0, b->residual + r * b->ld_residual));
            f1 = _mm512_add_ps(f1, _mm512_maskz_loadu_ps(m1, b->residual + r * b->ld_residual + 16));
        }
        if (!b->y) { /* denormals become zeros, for which the products take them anyway */
            const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(f1, f0);
            _mm512_storeu_si512(b->words + r * b->ldy, _mm512_rol_epi32(pairs, 16));
            continue;
        }
        _mm512_mask_storeu_ps(b->y + r * b->ldy, m0, f0);
        _mm512_mask_storeu_ps(b->y + r * b->ldy + 16, m1, f1);
    }
    p->next = end;
}

static MP_INLINE const uint8_t *fetch(const uint8_t *next, int lines) {
    for (int i = 0; i < lines; i++, next += 64)
        _mm_prefetch((const char *)next, _MM_HINT_T1);
    return next;
}

/* One block into `out`, while the one before is stored. Instructions name their tiles by number, so this is text. */
#define AMX_BLOCK(name, dot, scaled)                                                                        \
    static void name(const amx_block *b, amx_pending *before, amx_pending *out) {                           \
        const mp_kernels *k = mp_kernels_get();                                                             \
        const uint8_t *w = b->w, *a = b->a, *a1 = b->a + TILE * b->stride;                                  \
        const uint8_t *next = b->next;                                                                      \
        const int each = (before->rows - before->next + b->tiles - 1) / b->tiles;                           \
        _tile_zero(0);                                                                                      \
        _tile_zero(1);                                                                                      \
        if (b->rows > TILE) {                                                                               \
            _tile_zero(2);                                                                                  \
            _tile_zero(3);                                                                                  \
            for (int i = 0; i < b->tiles; i++, w += TILE * STEP, a += 64, a1 += 64) {                       \
                _tile_loadd(4, a, b->stride);                                                               \
                _tile_loadd(6, w, STEP);                                                                    \
                dot(0, 4, 6);                                                                               \
                _tile_loadd(7, w + 64, STEP);                                                               \
                dot(1, 4, 7);                                                                               \
                _tile_loadd(5, a1, b->stride);                                                              \
                dot(2, 5, 6);                                                                               \
                dot(3, 5, 7);                                                                               \
                next = fetch(next, b->lines);                                                               \
                const int end = before->next + each;                                                        \
                finish(before, end < before->rows ? end : before->rows, scaled, k);                         \
            }                                                                                               \
            _tile_stored(2, out->acc + TILE * MP_PANEL_N, MP_PANEL_N * 4);                                  \
            _tile_stored(3, out->acc + TILE * MP_PANEL_N + 16, MP_PANEL_N * 4);                             \
        } else {                                                                                            \
            for (int i = 0; i < b->tiles; i++, w += TILE * STEP, a += 64) {                                 \
                _tile_loadd(4, a, b->stride);                                                               \
                _tile_loadd(6, w, STEP);                                                                    \
                dot(0, 4, 6);                                                                               \
                _tile_loadd(7, w + 64, STEP);                                                               \
                dot(1, 4, 7);                                                                               \
                const int end = before->next + each;                                                        \
                finish(before, end < before->rows ? end : before->rows, scaled, k);                         \
            }                                                                                               \
        }                                                                                                   \
        _tile_stored(0, out->acc, MP_PANEL_N * 4);                                                          \
        _tile_stored(1, out->acc + 16, MP_PANEL_N * 4);                                                     \
        out->b = *b;                                                                                        \
        out->next = 0;                                                                                      \
        out->rows = b->rows;                                                                                \
    }
AMX_BLOCK(bf16_block, _tile_dpbf16ps, false)
AMX_BLOCK(i8_block, _tile_dpbsud, true)

/* Rows [m0, m1) times the panels: whole blocks first, then what is left, for which the tiles are made lower. */
static MP_INLINE void gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                           const mp_epilogue *ep, float *y, uint16_t *words, int64_t ldy, bool scaled,
                           void (*block)(const amx_block *, amx_pending *, amx_pending *)) {
    const uint8_t *a = scaled ? (const uint8_t *)x->q : (const uint8_t *)x->bf16;
    const int64_t stride = scaled ? x->ldq : x->ldq * (int64_t)sizeof(uint16_t);
    const int per_tile = scaled ? 64 : 32;
    amx_block b = {.stride = stride,
                   .tiles = (w->K + per_tile - 1) / per_tile,
                   .act = ep ? ep->act : MP_ACT_NONE,
                   .ld_residual = ep ? ep->ld_residual : 0,
                   .ldy = ldy};
    amx_pending pending[2];
    int turn = 0;
    pending[0].next = pending[0].rows = 0;
    for (int r0 = m0, r1; r0 < m1; r0 = r1) {
        const int left = m1 - r0;
        r1 = left < ROWS ? m1 : r0 + (left < BLOCK ? left / ROWS * ROWS : BLOCK);
        b.rows = left < ROWS ? left : ROWS;
        configure(b.rows);
        for (int p = panel0; p < panel1; p++) {
            const int n0 = p * MP_PANEL_N;
            b.w = w->data + (size_t)p * w->panel_bytes;
            b.sw = scaled ? (const float *)(const void *)(b.w + (size_t)((w->K + 3) / 4) * STEP) : NULL;
            b.cols = w->N - n0 < MP_PANEL_N ? w->N - n0 : MP_PANEL_N;
            b.bias = ep && ep->bias ? ep->bias + n0 : NULL;
            const int steps = (r1 - r0) / ROWS * b.tiles; /* a single block has no time for it */
            b.lines = r1 - r0 > ROWS ? (int)(w->panel_bytes / 64 + (size_t)steps - 1) / steps : 0;
            b.next = b.w + w->panel_bytes;
            for (int r = r0; r < r1; r += ROWS, b.next += b.tiles * b.lines * 64) {
                b.a = a + r * stride;
                b.y = y ? y + r * ldy + n0 : NULL;
                b.words = words ? words + r * ldy + n0 : NULL;
                b.residual = ep && ep->residual ? ep->residual + r * ep->ld_residual + n0 : NULL;
                b.sa = scaled ? x->scale + r : NULL;
                b.sum = scaled ? x->sum + r : NULL;
                block(&b, &pending[turn], &pending[1 - turn]);
                turn = 1 - turn;
            }
        }
    }
    _tile_release(); /* a thread without tiles in use is cheap to switch from and to signal */
    finish(&pending[turn], pending[turn].rows, scaled, mp_kernels_get());
}

static void bf16_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                      float *y, int64_t ldy) {
    gemm(w, x, m0, m1, panel0, panel1, ep, y, NULL, ldy, false, bf16_block);
}

static void bf16_gemm_acts(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                           const mp_epilogue *ep, uint16_t *y, int64_t ldy) {
    gemm(w, x, m0, m1, panel0, panel1, ep, NULL, y, ldy, false, bf16_block);
}

static void i8_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                    float *y, int64_t ldy) {
    gemm(w, x, m0, m1, panel0, panel1, ep, y, NULL, ldy, true, i8_block);
}
MP_TARGET_END

void mp_amx_dense(mp_kernel_table *table) {
    MP_SET(table, gemm_bf16, bf16_gemm, "amx");
    MP_SET(table, gemm_bf16_acts, bf16_gemm_acts, "amx");
    MP_SET(table, gemm_i8, i8_gemm, "amx");
}
#endif
#endif
