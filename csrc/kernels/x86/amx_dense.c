/* x86/amx_dense.c: products of BF16 and I8 with the tile registers of AMX.
 *
 * A tile is 16 rows of 64 bytes. A weight tile is 16 steps of a panel, 64 bytes of each: 16 outputs. The panels of
 * pack_dense.h have the layout that the instructions need. An activation tile is 16 rows of activations, 64 bytes of
 * each. A step of the loops covers 32 inputs of BF16 or 64 of I8, and multiplies two activation tiles by the two weight
 * tiles of a panel.
 *
 * BF16: an instruction first sums 32 inputs without the accumulator: one chain over the even slots, one over the odd
 * slots, then the sum of both chains. It adds this sum to the accumulator. Denormals count as zero. The bits of the
 * outputs therefore differ from those of all other variants, so this file must compute every BF16 product, whatever the
 * number of rows. I8 is exact and has the bits of all other variants.
 *
 * Inputs beyond K: rows of activations are padded with zeros to a multiple of 64 bytes, and panels of BF16 to 32 inputs
 * (pack_dense.c). The last weight tile of I8 may extend into the bytes after the panel's weights, which are multiplied
 * by zero. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "kernels/simd/target.h"
#include "kernels/variants.h"
#include "kernels/x86/tile_config.h"

#if defined(MP_TARGET_AMX_BEGIN)

enum {
    TILE = 16,             /* rows of a tile, of 64 bytes each */
    ROWS = 2 * TILE,       /* rows of a block: two tiles */
    STEP = MP_PANEL_N * 4, /* bytes of one step of a panel */
    BLOCK = 512,           /* maximum rows multiplied by a panel before the next panel is loaded */
    NEAR = 3 << 19,        /* bytes of panels that stay in L2 */
    PASS = 3 * ROWS,       /* minimum rows for which keeping a panel in L1 pays off */
    CHUNK = 16,            /* maximum steps before the next panel: 32 KiB of a panel stay in L1 */
    GROUP = 8,             /* maximum panels before the next chunk; their sums are kept, 64 KiB per panel */
};

/* One block of at most ROWS rows times one panel. */
typedef struct amx_block {
    const uint8_t *w;   /* [steps][STEP] */
    const uint8_t *a;   /* [rows][stride] */
    int64_t stride;
    int tiles;          /* weight tiles along the inputs, for one half of the panel */
    bool streams_rows;  /* the panel stays in L1 and rows are streamed, not the reverse */
    const float *start; /* `partial` of the preceding inputs, to continue from; or NULL */
    float *partial;     /* [ROWS][MP_PANEL_N] sums, if more inputs follow; or NULL: apply the epilogue */
    const uint8_t *next; /* the following panel, of which `lines` lines of 64 bytes are prefetched per step */
    int lines;
    int skip, rows;     /* rows [skip, rows) and `cols` columns are stored */
    int cols;
    const float *bias;  /* at the first column; or NULL */
    mp_act act;
    const float *residual; /* at the first row and column; or NULL */
    int64_t ld_residual;
    float *y;           /* at the first row and column; or NULL: store bf16 words, in pairs as acts_bf16 does */
    uint16_t *words;
    int64_t ldy;
    const float *sw;    /* I8: scales of the outputs [32], scales of the rows, and the rows' sums */
    const float *sa;
    const int32_t *sum;
} amx_block;

MP_TARGET_AMX_BEGIN
/* Tiles 0, 1: the first 16 rows by the two halves of the panel; 2, 3: the other rows; 4, 5: activations; 6, 7: weights.
 */
static MP_INLINE void configure(int rows) {
    const int first = rows < TILE ? rows : TILE, second = rows > TILE ? rows - TILE : 0;
    tile_config c = {.palette = 1};
    const int height[8] = {first, first, second, second, first, second, TILE, TILE};
    for (int i = 0; i < 8; i++) {
        c.bytes[i] = (uint16_t)(height[i] ? 64 : 0);
        c.rows[i] = (uint8_t)height[i];
    }
    __asm__ volatile("" : : "r"(&c) : "memory"); /* gcc 12 takes only the first 8 bytes for an operand of ldtilecfg */
    _tile_loadconfig(&c);
}

/* A finished block. It is stored while the next block is computed: a tile product takes 16 cycles and leaves most of
 * the core idle. */
typedef struct amx_pending {
    amx_block b;
    _Alignas(64) float acc[ROWS * MP_PANEL_N]; /* floats, or int32 for I8 */
    int next, rows;                            /* rows [next, rows) are not stored yet */
} amx_pending;

/* Compute the outputs of row r up to the activation function. */
static MP_INLINE void lead_in(const amx_block *b, int r, __mmask16 m0, __mmask16 m1, bool scaled, __m512 *f) {
    if (scaled) {
        const __m512i start = _mm512_set1_epi32(-128 * b->sum[r]);
        const __m512 sa = _mm512_set1_ps(b->sa[r]);
        f[0] = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_castps_si512(f[0]), start));
        f[1] = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_castps_si512(f[1]), start));
        f[0] = _mm512_mul_ps(f[0], _mm512_mul_ps(_mm512_loadu_ps(b->sw), sa));
        f[1] = _mm512_mul_ps(f[1], _mm512_mul_ps(_mm512_loadu_ps(b->sw + 16), sa));
    }
    if (b->bias) {
        f[0] = _mm512_add_ps(f[0], _mm512_maskz_loadu_ps(m0, b->bias));
        f[1] = _mm512_add_ps(f[1], _mm512_maskz_loadu_ps(m1, b->bias + 16));
    }
}

/* Finish rows [p->next, end): apply the epilogue and store. */
static MP_INLINE void finish(amx_pending *p, int end, bool scaled, const mp_kernels *k) {
    const amx_block *b = &p->b;
    if (p->next >= end)
        return;
    const __mmask16 m0 = (__mmask16)(b->cols >= 16 ? 0xffff : (1u << b->cols) - 1);
    const __mmask16 m1 = (__mmask16)(b->cols >= 32 ? 0xffff : b->cols > 16 ? (1u << (b->cols - 16)) - 1 : 0);
    const bool act = b->act != MP_ACT_NONE;
    for (int r = p->next; act && r < end; r++) {
        float *from = p->acc + r * MP_PANEL_N;
        __m512 f[2] = {_mm512_load_ps(from), _mm512_load_ps(from + 16)};
        lead_in(b, r, m0, m1, scaled, f);
        _mm512_store_ps(from, f[0]);
        _mm512_store_ps(from + 16, f[1]);
    }
    if (act)
        k->activate(b->act, (int64_t)(end - p->next) * MP_PANEL_N, p->acc + p->next * MP_PANEL_N);
    for (int r = p->next; r < end; r++) {
        const float *from = p->acc + r * MP_PANEL_N;
        __m512 f[2] = {_mm512_load_ps(from), _mm512_load_ps(from + 16)};
        if (!act)
            lead_in(b, r, m0, m1, scaled, f);
        if (b->residual) {
            f[0] = _mm512_add_ps(f[0], _mm512_maskz_loadu_ps(m0, b->residual + r * b->ld_residual));
            f[1] = _mm512_add_ps(f[1], _mm512_maskz_loadu_ps(m1, b->residual + r * b->ld_residual + 16));
        }
        if (!b->y) { /* denormals become zeros; the products treat them as zeros anyway */
            const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(f[1], f[0]);
            _mm512_storeu_si512(b->words + r * b->ldy, _mm512_rol_epi32(pairs, 16));
            continue;
        }
        _mm512_mask_storeu_ps(b->y + r * b->ldy, m0, f[0]);
        _mm512_mask_storeu_ps(b->y + r * b->ldy + 16, m1, f[1]);
    }
    p->next = end;
}

/* Rows of a pending block to finish in each of `steps` steps. Plain copies (no scales, no activation) wait for the
 * cache lines that they write, so all of them start in the first step, unless panels are streamed. */
static MP_INLINE int rows_per_step(const amx_pending *p, int steps, bool scaled) {
    const int left = p->rows - p->next;
    if (!left) /* nothing is pending, as before the first block */
        return 0;
    return scaled || p->b.act != MP_ACT_NONE || !p->b.streams_rows ? (left + steps - 1) / steps : left;
}

static MP_INLINE const uint8_t *fetch(const uint8_t *next, int lines) {
    for (int i = 0; i < lines; i++, next += 64)
        _mm_prefetch((const char *)next, _MM_HINT_T1);
    return next;
}

/* Multiply two tiles of rows by a panel. For streamed rows, load_rows is _tile_stream_loadd, whose hint keeps them out
 * of L1, where the panel stays. */
#define AMX_STEPS(load_rows, dot, scaled)                                                                   \
    for (int i = 0; i < b->tiles; i++, w += TILE * STEP, a += 64, a1 += 64) {                               \
        load_rows(4, a, b->stride);                                                                         \
        _tile_loadd(6, w, STEP);                                                                            \
        dot(0, 4, 6);                                                                                       \
        _tile_loadd(7, w + 64, STEP);                                                                       \
        dot(1, 4, 7);                                                                                       \
        load_rows(5, a1, b->stride);                                                                        \
        dot(2, 5, 6);                                                                                       \
        dot(3, 5, 7);                                                                                       \
        next = fetch(next, b->lines);                                                                       \
        const int end = before->next + each;                                                                \
        finish(before, end < before->rows ? end : before->rows, scaled, k);                                 \
    }

/* Compute one block into `out`, or its partial sums into `b->partial`, while storing the preceding block. A macro,
 * because the instructions take tile numbers as literals. */
#define AMX_BLOCK(name, dot, scaled)                                                                        \
    static void name(const amx_block *b, amx_pending *before, amx_pending *out) {                           \
        const mp_kernels *k = mp_kernels_get();                                                             \
        const uint8_t *w = b->w, *a = b->a, *a1 = b->a + TILE * b->stride;                                  \
        const uint8_t *next = b->next;                                                                      \
        const int each = rows_per_step(before, b->tiles, scaled);                                           \
        float *acc = b->partial ? b->partial : out->acc;                                                    \
        if (b->start) {                                                                                     \
            _tile_loadd(0, b->start, MP_PANEL_N * 4);                                                       \
            _tile_loadd(1, b->start + 16, MP_PANEL_N * 4);                                                  \
            _tile_loadd(2, b->start + TILE * MP_PANEL_N, MP_PANEL_N * 4);                                   \
            _tile_loadd(3, b->start + TILE * MP_PANEL_N + 16, MP_PANEL_N * 4);                              \
        } else {                                                                                            \
            _tile_zero(0);                                                                                  \
            _tile_zero(1);                                                                                  \
            if (b->rows > TILE) {                                                                           \
                _tile_zero(2);                                                                              \
                _tile_zero(3);                                                                              \
            }                                                                                               \
        }                                                                                                   \
        if (b->streams_rows) {                                                                              \
            AMX_STEPS(_tile_stream_loadd, dot, scaled)                                                      \
        } else if (b->rows > TILE) {                                                                        \
            AMX_STEPS(_tile_loadd, dot, scaled)                                                             \
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
        _tile_stored(0, acc, MP_PANEL_N * 4);                                                               \
        _tile_stored(1, acc + 16, MP_PANEL_N * 4);                                                          \
        if (b->rows > TILE) {                                                                               \
            _tile_stored(2, acc + TILE * MP_PANEL_N, MP_PANEL_N * 4);                                       \
            _tile_stored(3, acc + TILE * MP_PANEL_N + 16, MP_PANEL_N * 4);                                  \
        }                                                                                                   \
        if (b->partial)                                                                                     \
            return;                                                                                         \
        out->b = *b;                                                                                        \
        out->next = b->skip;                                                                                \
        out->rows = b->rows;                                                                                \
    }
AMX_BLOCK(bf16_block, _tile_dpbf16ps, false)
AMX_BLOCK(i8_block, _tile_dpbsud, true)

typedef void block_function(const amx_block *b, amx_pending *before, amx_pending *out);

/* A product: the fields that its blocks share, and the finished blocks that are not stored yet. */
typedef struct amx_product {
    const mp_wmat *w;
    const mp_acts *x;
    const mp_epilogue *ep;
    const uint8_t *a; /* rows as bytes */
    float *y;         /* or NULL: store bf16 words */
    uint16_t *words;
    int panel1;
    bool scaled;
    block_function *block;
    amx_block b;
    amx_pending *pending; /* [2] */
    int turn;
} amx_product;

/* Multiply rows [r0, r1) by steps [step, step + tiles) of panel p. sums: the partial sums of the panel, or NULL if
 * these are all steps. */
static MP_INLINE void by_panel(amx_product *g, int r0, int r1, int p, int step, int tiles, const uint8_t *next,
                               float *sums) {
    amx_block *b = &g->b;
    const mp_wmat *w = g->w;
    const int n0 = p * MP_PANEL_N;
    const bool last = step + tiles == (w->K + (g->scaled ? 64 : 32) - 1) / (g->scaled ? 64 : 32);
    b->w = w->data + (size_t)p * w->panel_bytes;
    b->sw = g->scaled ? (const float *)(const void *)(b->w + (size_t)((w->K + 3) / 4) * STEP) : NULL;
    b->w += (size_t)step * TILE * STEP;
    b->tiles = tiles;
    b->cols = w->N - n0 < MP_PANEL_N ? w->N - n0 : MP_PANEL_N;
    b->bias = g->ep && g->ep->bias ? g->ep->bias + n0 : NULL;
    b->streams_rows = r1 - r0 >= PASS;
    const int steps = (r1 - r0 + ROWS - 1) / ROWS * tiles;
    /* with a single block, there is no time to prefetch the next panel */
    b->lines = r1 - r0 > ROWS ? (tiles * TILE * STEP / 64 + steps - 1) / steps : 0;
    b->next = next;
    for (int block = r0; block < r1; block += ROWS, b->next += tiles * b->lines * 64) {
        const int r = r1 - block < b->rows ? r1 - b->rows : block; /* the last block overlaps its predecessor */
        b->skip = block - r;
        b->a = g->a + r * b->stride + step * 64;
        b->y = g->y ? g->y + r * b->ldy + n0 : NULL;
        b->words = g->words ? g->words + r * b->ldy + n0 : NULL;
        b->residual = g->ep && g->ep->residual ? g->ep->residual + r * b->ld_residual + n0 : NULL;
        b->sa = g->scaled ? g->x->scale + r : NULL;
        b->sum = g->scaled ? g->x->sum + r : NULL;
        b->start = step > 0 ? sums : NULL;
        b->partial = last ? NULL : sums;
        g->block(b, &g->pending[g->turn], &g->pending[1 - g->turn]);
        g->turn = last ? 1 - g->turn : g->turn;
        sums = sums ? sums + ROWS * MP_PANEL_N : NULL;
    }
}

/* Multiply rows [r0, r1) by panels that have more steps than CHUNK. */
static MP_NOINLINE void by_chunks(amx_product *g, int r0, int r1, int panel0, int tiles) {
    _Alignas(64) float sums[GROUP][BLOCK * MP_PANEL_N];
    const int chunks = (tiles + CHUNK - 1) / CHUNK, most = (tiles + chunks - 1) / chunks;
    const int group = chunks > 2 ? GROUP : GROUP / 2; /* with more chunks, a larger group rereads the rows less often */
    for (int p0 = panel0, p1; p0 < g->panel1; p0 = p1) {
        p1 = g->panel1 - p0 < group ? g->panel1 : p0 + group;
        for (int step = 0, count; step < tiles; step += count) {
            count = tiles - step < most ? tiles - step : most;
            for (int p = p0; p < p1; p++) {
                const bool end = p + 1 == p1, done = end && step + count == tiles;
                const uint8_t *next = g->w->data + (size_t)(end && !done ? p0 : p + 1) * g->w->panel_bytes;
                next += (size_t)(done ? 0 : end ? step + count : step) * TILE * STEP;
                by_panel(g, r0, r1, p, step, count, next, sums[p - p0]);
            }
        }
    }
}

/* Multiply rows [m0, m1) by the panels, in blocks of nearly equal height. Tiles have fewer rows only if a pass has
 * fewer than ROWS rows. */
static MP_INLINE void gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                           const mp_epilogue *ep, float *y, uint16_t *words, int64_t ldy, bool scaled,
                           block_function *block) {
    const int per_tile = scaled ? 64 : 32, tiles = (w->K + per_tile - 1) / per_tile;
    const int rows = m1 - m0, passes = (rows + BLOCK - 1) / BLOCK;
    if (rows == 0)
        return;
    /* With `separate`, each block has its own pass: the second pass finds the panels in L2, and its tiles can have
     * fewer rows. */
    const bool separate = rows < 2 * ROWS && (size_t)(panel1 - panel0) * w->panel_bytes <= NEAR;
    const int height = separate ? ROWS : ((rows + passes - 1) / passes + ROWS - 1) / ROWS * ROWS;
    amx_pending pending[2];
    pending[0].next = pending[0].rows = 0;
    amx_product g = {.w = w,
                     .x = x,
                     .ep = ep,
                     .a = scaled ? (const uint8_t *)x->q : (const uint8_t *)x->bf16,
                     .y = y,
                     .words = words,
                     .panel1 = panel1,
                     .scaled = scaled,
                     .pending = pending,
                     .block = block,
                     .b = {.stride = scaled ? x->ldq : x->ldq * (int64_t)sizeof(uint16_t),
                           .act = ep ? ep->act : MP_ACT_NONE,
                           .ld_residual = ep ? ep->ld_residual : 0,
                           .ldy = ldy}};
    for (int r0 = m0, r1; r0 < m1; r0 = r1) {
        r1 = m1 - r0 < height ? m1 : r0 + height;
        g.b.rows = r1 - r0 < ROWS ? r1 - r0 : ROWS;
        configure(g.b.rows);
        if (tiles > CHUNK && r1 - r0 >= PASS) {
            by_chunks(&g, r0, r1, panel0, tiles);
            continue;
        }
        for (int p = panel0; p < panel1; p++)
            by_panel(&g, r0, r1, p, 0, tiles, w->data + (size_t)(p + 1) * w->panel_bytes, NULL);
    }
    _tile_release(); /* context switches and signals are cheaper without active tiles */
    finish(&pending[g.turn], pending[g.turn].rows, scaled, mp_kernels_get());
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
