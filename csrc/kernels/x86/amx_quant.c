/* x86/amx_quant.c: products of quantised weights with the tile registers of AMX, for many rows.
 *
 * The contract adds each block's exact sum to a float accumulator by one FMA, so the int32 sums leave the tiles after
 * every unit: 32 inputs, or 16 where 16 inputs share a scale. A job is 16 rows by a panel's 32 outputs by up to UNITS
 * units. The sums of one job are stored to L1 while the vector units scale and accumulate those of the job before it:
 * tile products and stores take about as long as the float arithmetic, and both run at the same time.
 *
 * The panel's weights are unpacked to signed bytes, UNITS units at a time, and serve all rows of a pass. Signed weights
 * need no offset, so the sums start at zero. Scales of rows and factors of minima are transposed once per pass, so that
 * a job reads whole lines. The bits are those of all other variants.
 *
 * Unpacking does not pay off for few rows: these use the variant that the table had before (gemm_before). */
#if defined(__x86_64__)
#include <assert.h>
#include <immintrin.h>
#include <string.h>

#include "kernels/epilogue.h"
#include "kernels/pack.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"
#include "kernels/x86/tile_config.h"

#if defined(MP_TARGET_AMX_BEGIN)

enum {
    TILE = 16,       /* rows of a job */
    UNITS = 4,       /* units of a job: 16 KiB of sums of two jobs, which stay in L1 */
    LD_SUMS = UNITS * MP_PANEL_N,
    PASS = 192,      /* maximum rows of a pass over the weights */
    ACTS_BYTES = 393216, /* bytes of activations that stay in L2 during a pass over the panels */
    ENTRIES = 49152, /* maximum rows times units of a pass: 384 KiB of stack with both arrays */
    MIN_ROWS = 24,   /* with fewer rows, unpacking costs more than the tiles save */
};

/* Scales and minima of the units of a job. */
typedef struct amx_scales {
    _Alignas(64) float d[UNITS * MP_PANEL_N];   /* scales */
    _Alignas(64) float low[UNITS * MP_PANEL_N]; /* signed minima */
} amx_scales;

typedef struct amx_job {
    int units;           /* 0: no job */
    const int8_t *a;     /* 16 rows of activations, at the first unit */
    const int32_t *sums; /* [TILE][UNITS][MP_PANEL_N] */
    const amx_scales *scales;
    const float *sa, *factor; /* [units][TILE]: scales of the rows, factors of the minima */
    float *acc;               /* [TILE][MP_PANEL_N] */
    bool first, last;         /* the first units of K: acc starts at zero; the last ones: y is written */
    int m, skip;              /* first row of the job; rows m ... m + skip - 1 belong to another job */
} amx_job;

typedef struct amx_product {
    const mp_wmat *w;
    const mp_acts *x;
    const mp_epilogue *ep;
    float *y;
    int64_t ldy;
    int panel, unit; /* current panel; inputs of a unit */
    bool mins;
    const uint8_t *weights; /* [UNITS][2 halves][unit / 4][64] */
} amx_product;

typedef void gemm_function(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                           const mp_epilogue *ep, float *y, int64_t ldy);
static gemm_function *gemm_before[MP_W_KIND_COUNT];

MP_TARGET_AMX_BEGIN

/* Tiles 0 ... 3: sums; 4, 5: 16 rows of a unit; 6, 7: the unit's weights for both halves of the panel. */
static MP_INLINE void configure(int unit) {
    tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.bytes[i] = (uint16_t)(i == 4 || i == 5 ? unit : 64);
        c.rows[i] = (uint8_t)(i < 6 ? TILE : unit / 4);
    }
    __asm__ volatile("" : : "r"(&c) : "memory"); /* gcc 12 takes only the first 8 bytes for an operand of ldtilecfg */
    _tile_loadconfig(&c);
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

static MP_INLINE __m512i load(const uint8_t *from) { return _mm512_loadu_si512(from); }
static MP_INLINE __m512 halves(const uint8_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)from));
}
static MP_INLINE __m512i bytes16(const uint8_t *from, bool is_signed) {
    const __m128i x = _mm_loadu_si128((const __m128i *)(const void *)from);
    return is_signed ? _mm512_cvtepi8_epi32(x) : _mm512_cvtepu8_epi32(x);
}

/* Bits of a code, for kinds whose codes index a table or are the values after an offset; else 0. */
static MP_INLINE int code_bits(int kind) {
    switch (kind) {
    case MP_W_TQ:
    case MP_W_Q2_K: return 2;
    case MP_W_Q3_K:
    case MP_W_IQ2_XXS:
    case MP_W_IQ2_XS: return 3;
    case MP_W_IQ3:
    case MP_W_MXFP4: return 4;
    default: return 0;
    }
}

static MP_INLINE bool is_iq(int kind) { return kind == MP_W_IQ2_XXS || kind == MP_W_IQ2_XS || kind == MP_W_IQ3; }
static MP_INLINE bool has_table(int kind) { return is_iq(kind) || kind == MP_W_MXFP4; }
static MP_INLINE bool has_mins(int kind) { return kind == MP_W_Q4_1 || kind == MP_W_Q4_K || kind == MP_W_Q2_K; }

/* Inputs that share a scale. */
static MP_INLINE int unit_of(int kind) {
    return kind == MP_W_Q6_K || kind == MP_W_Q2_K || kind == MP_W_Q3_K || kind == MP_W_IQ2_XS ? 16 : 32;
}

static MP_INLINE int head_bytes(int kind) {
    if (is_iq(kind))
        return MP_PACK_HALVES + 8 * MP_PACK_SMALL;
    if (kind == MP_W_Q4_K || kind == MP_W_Q2_K)
        return 2 * MP_PACK_HALVES;
    return kind == MP_W_Q6_K || kind == MP_W_Q3_K || kind == MP_W_TQ ? MP_PACK_HALVES : 0;
}

/* Bytes of a block's integers; its scales follow them. */
static MP_INLINE int integer_bytes(int kind) {
    if (kind == MP_W_Q6_K)
        return 2 * MP_PACK_PAIRS + MP_PACK_NIBBLES;
    return kind == MP_W_Q8_0 ? MP_PACK_BYTES : code_bits(kind) ? code_bits(kind) * MP_PACK_STEP : MP_PACK_NIBBLES;
}

static MP_INLINE int block_bytes(int kind) {
    const int scales = is_iq(kind) || kind == MP_W_TQ ? 0 : kind == MP_W_Q4_1 ? 2 * MP_PACK_HALVES : MP_PACK_HALVES;
    return integer_bytes(kind) + scales; /* kinds with two small parts: these have the size of the halves */
}

/* Store group g of a block: to a tile of 8 lines, or to two tiles of 4 lines, 2 * 4 lines apart. */
static MP_INLINE void store_group(int kind, uint8_t *to, int g, __m512i q) {
    _mm512_storeu_si512(to + 64 * (unit_of(kind) == 16 ? g / 4 * 8 + g % 4 : g), q);
}

static MP_INLINE void unpack_sixes(int kind, const uint8_t *from, uint8_t *to) {
    const __m512i low4 = _mm512_set1_epi8(15), bits45 = _mm512_set1_epi8(0x30), offset = _mm512_set1_epi8(32);
    for (int h = 0; h < 2; h++) {
        const __m512i pairs = load(from + (h ? MP_PACK_PAIRS + MP_PACK_NIBBLES : 0));
        const __m512i at[4] = {_mm512_slli_epi16(pairs, 4), _mm512_slli_epi16(pairs, 2), pairs,
                               _mm512_srli_epi16(pairs, 2)};
        for (int t = 0; t < 4; t++) {
            const __m512i x = load(from + MP_PACK_PAIRS + t * MP_PACK_STEP);
            const __m512i q = _mm512_and_si512(h ? _mm512_srli_epi16(x, 4) : x, low4);
            const __m512i all = _mm512_ternarylogic_epi32(q, at[t], bits45, 0xf8); /* q | (at & bits45) */
            store_group(kind, to, 4 * h + t, _mm512_sub_epi8(all, offset));
        }
    }
}

/* Codes of 3 bits, one per byte: all eight groups of a block. */
static MP_INLINE void read_threes(const uint8_t *from, __m512i *codes) {
    const __m512i mask = _mm512_set1_epi8(7);
    const __m512i x[3] = {load(from), load(from + MP_PACK_STEP), load(from + 2 * MP_PACK_STEP)};
    __m512i both = _mm512_and_si512(_mm512_srli_epi16(x[0], 3), _mm512_set1_epi8(0x11));
    both = _mm512_ternarylogic_epi32(both, _mm512_srli_epi16(x[1], 2), _mm512_set1_epi8(0x22), 0xf8);
    both = _mm512_ternarylogic_epi32(both, _mm512_srli_epi16(x[2], 1), _mm512_set1_epi8(0x44), 0xf8);
    for (int g = 0; g < 8; g++) {
        const __m512i line = g < 6 ? x[g / 2] : both;
        codes[g] = _mm512_and_si512(g % 2 ? _mm512_srli_epi16(line, 4) : line, mask);
    }
}

/* Unpack half v of a block of 32 inputs to signed bytes. */
static MP_INLINE void unpack_half(int kind, const uint8_t *block, int v, __m512i table, uint8_t *to) {
    const int offset = kind == MP_W_Q4_0 ? 8 : kind == MP_W_Q3_K ? 4 : kind == MP_W_TQ;
    const uint8_t *from = block + v * MP_PACK_LINE;
    __m512i q[8];
    if (kind == MP_W_Q6_K) {
        unpack_sixes(kind, from, to);
        return;
    }
    if (kind == MP_W_Q8_0) {
        for (int g = 0; g < 8; g++)
            q[g] = _mm512_xor_si512(load(from + g * MP_PACK_STEP), _mm512_set1_epi8(-128));
    } else if (code_bits(kind) == 3) {
        read_threes(from, q);
    } else if (code_bits(kind) == 2) {
        for (int g = 0; g < 8; g++)
            q[g] = _mm512_and_si512(_mm512_srli_epi16(load(from + g / 4 * MP_PACK_STEP), 2 * (unsigned)(g % 4)),
                                    _mm512_set1_epi8(3));
    } else {
        for (int g = 0; g < 8; g++)
            q[g] = _mm512_and_si512(_mm512_srli_epi16(load(from + g % 4 * MP_PACK_STEP), 4 * (unsigned)(g / 4)),
                                    _mm512_set1_epi8(15));
    }
    for (int g = 0; g < 8; g++) {
        if (has_table(kind))
            q[g] = _mm512_shuffle_epi8(table, q[g]);
        else if (offset)
            q[g] = _mm512_sub_epi8(q[g], _mm512_set1_epi8((char)offset));
        store_group(kind, to, g, q[g]);
    }
}

/* Unpack the scales of a block for half v, from output o = 16 v on: for each unit of the block, MP_PANEL_N apart.
 * `head`: of the block's superblock; `small`: scales of the block in its head, for kinds that keep them there. */
static MP_INLINE void unpack_scales(int kind, const uint8_t *head, const uint8_t *small, const uint8_t *block, int o,
                                    float *d, float *low) {
    const uint8_t *scales = block + integer_bytes(kind);
    const __m512i sign = _mm512_set1_epi32(INT32_MIN), low4 = _mm512_set1_epi32(15);
    for (int h = 0; h < 32 / unit_of(kind); h++, d += MP_PANEL_N, low += MP_PANEL_N) {
        const uint8_t *at = scales + h * MP_PACK_SMALL + o;
        __m512 minimum = _mm512_setzero_ps();
        if (kind == MP_W_MXFP4) {
            const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(scales + 2 * o));
            _mm512_storeu_si512(d, _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
        } else if (is_iq(kind)) {
            const __m512i sc = bytes16(small + o, false), n = h ? _mm512_srli_epi32(sc, 4) : _mm512_and_si512(sc, low4);
            const bool nibbles = kind == MP_W_IQ2_XS;
            const __m512 unit = _mm512_mul_ps(halves(head + 2 * o), _mm512_set1_ps(nibbles ? 0.25f : 0.125f));
            const __m512 factor = nibbles ? _mm512_add_ps(_mm512_cvtepi32_ps(n), _mm512_set1_ps(0.5f))
                                          : _mm512_cvtepi32_ps(sc);
            _mm512_storeu_ps(d, _mm512_mul_ps(unit, factor));
        } else if (kind == MP_W_Q4_K || kind == MP_W_Q2_K) {
            __m512i sc = bytes16(at, false), mn = bytes16(scales + MP_PACK_SMALL + o, false);
            if (kind == MP_W_Q2_K) {
                mn = _mm512_srli_epi32(sc, 4);
                sc = _mm512_and_si512(sc, low4);
            }
            _mm512_storeu_ps(d, _mm512_mul_ps(halves(head + 2 * o), _mm512_cvtepi32_ps(sc)));
            minimum = _mm512_mul_ps(halves(head + MP_PACK_HALVES + 2 * o), _mm512_cvtepi32_ps(mn));
            minimum = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(minimum), sign));
        } else if (kind == MP_W_Q6_K || kind == MP_W_Q3_K) {
            _mm512_storeu_ps(d, _mm512_mul_ps(halves(head + 2 * o), _mm512_cvtepi32_ps(bytes16(at, true))));
        } else {
            _mm512_storeu_ps(d, halves((kind == MP_W_TQ ? head : scales) + 2 * o));
            if (kind == MP_W_Q4_1)
                minimum = halves(scales + MP_PACK_HALVES + 2 * o);
        }
        if (has_mins(kind))
            _mm512_storeu_ps(low, minimum);
    }
}

/* Unpack blocks [b0, b0 + count) of a panel, and prefetch as many bytes after the next blocks. */
static MP_INLINE void unpack(int kind, const uint8_t *panel, int b0, int count, uint8_t *weights, amx_scales *scales) {
    const int head = head_bytes(kind), bytes = block_bytes(kind), units = 32 / unit_of(kind);
    __m512i table = _mm512_setzero_si512();
    if (has_table(kind)) {
        table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)panel));
        table = _mm512_sub_epi8(table, _mm512_set1_epi8(is_iq(kind) ? MP_PACK_IQ_OFFSET : MP_PACK_FP4_OFFSET));
        panel += MP_PACK_LINE;
    }
    for (int b = b0; b < b0 + count; b++) {
        const uint8_t *super = panel + (size_t)(b / 8) * (size_t)(head + 8 * bytes);
        const uint8_t *block = head ? super + head + b % 8 * bytes : panel + (size_t)b * (size_t)bytes;
        const uint8_t *small = is_iq(kind) ? super + MP_PACK_HALVES + b % 8 * MP_PACK_SMALL : NULL;
        for (int i = 0; i < bytes; i += 64)
            _mm_prefetch((const char *)block + 2 * UNITS * bytes + i, _MM_HINT_T1);
        const int u = (b - b0) * units;
        for (int v = 0; v < 2; v++) {
            const int o = u * MP_PANEL_N + v * 16;
            unpack_half(kind, block, v, table, weights + (b - b0) * 16 * 64 + v * (8 / units) * 64);
            unpack_scales(kind, head ? super : NULL, small, block, v * 16, scales->d + o, scales->low + o);
        }
    }
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Transpose a matrix of 16 x 16 floats. */
static MP_INLINE void transpose(const __m512 *in, float *out) {
    __m512 a[16], b[16];
    MP_UNROLL
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps(in[i], in[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(in[i], in[i + 1]);
    }
    MP_UNROLL
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    MP_UNROLL
    for (int i = 0; i < 4; i++) { /* b[i + 4 j]: columns i, i + 4, i + 8, i + 12 of rows 4 j ... 4 j + 3 */
        const __m512 x0 = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), x1 = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
        const __m512 y0 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
        const __m512 y1 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
        _mm512_store_ps(out + 16 * i, _mm512_shuffle_f32x4(x0, y0, 0x88));
        _mm512_store_ps(out + 16 * (i + 4), _mm512_shuffle_f32x4(x1, y1, 0x88));
        _mm512_store_ps(out + 16 * (i + 8), _mm512_shuffle_f32x4(x0, y0, 0xdd));
        _mm512_store_ps(out + 16 * (i + 12), _mm512_shuffle_f32x4(x1, y1, 0xdd));
    }
}

/* Write the scales of rows m ... m + 15 to sa, and the factors of the minima, [units rounded up to 16][TILE] each. */
static MP_INLINE void amx_prepare(const amx_product *g, int m, int units, float *sa, float *factor) {
    const int blocks = g->x->K / 32;
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    for (int u = 0; u < units; u += 16) {
        __m512 scale[16], low[16];
        for (int r = 0; r < TILE; r++) {
            const int per = g->unit == 16 ? 8 : 16, b = u * g->unit / 32, left = blocks - b < per ? blocks - b : per;
            const __mmask16 mask = (__mmask16)((1u << left) - 1);
            scale[r] = _mm512_maskz_loadu_ps(mask, g->x->scale + (int64_t)(m + r) * blocks + b);
            if (g->unit == 16)
                scale[r] = _mm512_permutexvar_ps(twice, scale[r]);
            if (g->mins && g->unit == 16) {
                const __mmask16 m0 = (__mmask16)(left >= 8 ? 0xffff : (1u << 2 * left) - 1);
                const __m512i sum = _mm512_maskz_loadu_epi32(m0, g->x->sum + (int64_t)(m + r) * blocks * 2 + 2 * b);
                low[r] = _mm512_mul_ps(scale[r], _mm512_cvtepi32_ps(sum));
            } else if (g->mins) {
                const int32_t *sum = g->x->sum + (int64_t)(m + r) * blocks * 2 + 2 * b;
                const __mmask16 m0 = (__mmask16)(left >= 8 ? 0xffff : (1u << 2 * left) - 1);
                const __mmask16 m1 = (__mmask16)(left >= 8 ? (1u << (2 * left - 16)) - 1 : 0);
                const __m512i s0 = _mm512_maskz_loadu_epi32(m0, sum), s1 = _mm512_maskz_loadu_epi32(m1, sum + 16);
                const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
                const __m512i both = _mm512_add_epi32(_mm512_permutex2var_epi32(s0, even, s1),
                                                      _mm512_permutex2var_epi32(s0, odd, s1));
                low[r] = _mm512_mul_ps(scale[r], _mm512_cvtepi32_ps(both));
            }
        }
        transpose(scale, sa + u * TILE);
        if (g->mins)
            transpose(low, factor + u * TILE);
    }
}

/* ---- jobs -------------------------------------------------------------------------------------------------------- */

/* Add the sums of row r and unit u to the accumulators f. */
static MP_INLINE void add_unit(const amx_job *j, int r, int u, bool mins, __m512 *f) {
    const int32_t *sums = j->sums + r * LD_SUMS + u * MP_PANEL_N;
    const float *d = j->scales->d + u * MP_PANEL_N, *low = j->scales->low + u * MP_PANEL_N;
    const __m512 sa = _mm512_set1_ps(j->sa[u * TILE + r]);
    const __m512 s0 = _mm512_cvtepi32_ps(_mm512_load_si512(sums));
    const __m512 s1 = _mm512_cvtepi32_ps(_mm512_load_si512(sums + 16));
    f[0] = _mm512_fmadd_ps(s0, _mm512_mul_ps(_mm512_load_ps(d), sa), f[0]);
    f[1] = _mm512_fmadd_ps(s1, _mm512_mul_ps(_mm512_load_ps(d + 16), sa), f[1]);
    if (mins) {
        const __m512 factor = _mm512_set1_ps(j->factor[u * TILE + r]);
        f[0] = _mm512_fmadd_ps(_mm512_load_ps(low), factor, f[0]);
        f[1] = _mm512_fmadd_ps(_mm512_load_ps(low + 16), factor, f[1]);
    }
}

/* Add the sums of row r to the accumulators, unless the row belongs to another job. */
static MP_INLINE void add_row(const amx_job *j, int r, bool mins) {
    float *acc = j->acc + r * MP_PANEL_N;
    __m512 f[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (j->units == 0 || r < j->skip)
        return;
    if (!j->first) {
        f[0] = _mm512_load_ps(acc);
        f[1] = _mm512_load_ps(acc + 16);
    }
    if (j->units == UNITS) {
        MP_UNROLL
        for (int u = 0; u < UNITS; u++)
            add_unit(j, r, u, mins, f);
    } else {
        for (int u = 0; u < j->units; u++)
            add_unit(j, r, u, mins, f);
    }
    _mm512_store_ps(acc, f[0]);
    _mm512_store_ps(acc + 16, f[1]);
}

/* Store the finished rows of a job, with the epilogue. */
static MP_NOINLINE void finish(const amx_product *g, const amx_job *j) {
    const int n0 = g->panel * MP_PANEL_N, n1 = g->w->N - n0 < MP_PANEL_N ? g->w->N : n0 + MP_PANEL_N;
    const int m = j->m + j->skip, rows = TILE - j->skip;
    float *tile = j->acc + j->skip * MP_PANEL_N, *out = g->y + (int64_t)m * g->ldy + n0;
    if (n1 - n0 < MP_PANEL_N || (g->ep && g->ep->act != MP_ACT_NONE)) {
        mp_epilogue_apply(g->ep, m, m + rows, n0, n1, tile, MP_PANEL_N);
        for (int r = 0; r < rows; r++)
            memcpy(out + r * g->ldy, tile + r * MP_PANEL_N, (size_t)(n1 - n0) * sizeof *out);
        return;
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < MP_PANEL_N; c += 16) {
            __m512 f = _mm512_load_ps(tile + r * MP_PANEL_N + c);
            if (g->ep && g->ep->bias)
                f = _mm512_add_ps(f, _mm512_loadu_ps(g->ep->bias + n0 + c));
            if (g->ep && g->ep->residual)
                f = _mm512_add_ps(f, _mm512_loadu_ps(g->ep->residual + (m + r) * g->ep->ld_residual + n0 + c));
            _mm512_storeu_ps(out + r * g->ldy + c, f);
        }
}

/* Multiply unit u of the next job into the tiles c0, c1. Store the sums of the unit before, which are in the tiles d0,
 * d1. Add a quarter of the rows of the job before, from row r on. Small steps alternate, because a core overlaps only
 * instructions that are close together, and half as many if two threads share it. A macro, because the instructions
 * take tile numbers as literals. */
#define AMX_UNIT(u, c0, c1, rows, d0, d1, r)                                              \
    {                                                                                     \
        const uint8_t *w = g->weights + (u) * 2 * weight_tile;                            \
        const bool busy = (u) < next->units;                                              \
        if (busy) {                                                                       \
            _tile_zero(c0);                                                               \
            _tile_zero(c1);                                                               \
            _tile_loadd(rows, next->a + (u) * g->unit, g->x->ldq);                        \
            _tile_loadd(6, w, 64);                                                        \
            _tile_dpbssd(c0, rows, 6);                                                    \
        }                                                                                 \
        add_row(before, r, mins);                                                         \
        if (busy) {                                                                       \
            _tile_loadd(7, w + weight_tile, 64);                                          \
            _tile_dpbssd(c1, rows, 7);                                                    \
        }                                                                                 \
        add_row(before, (r) + 1, mins);                                                   \
        if ((u) > 0 && (u) <= next->units)                                                \
            _tile_stored(d0, sums + ((u) - 1) * MP_PANEL_N, LD_SUMS * sizeof *sums);      \
        add_row(before, (r) + 2, mins);                                                   \
        if ((u) > 0 && (u) <= next->units)                                                \
            _tile_stored(d1, sums + ((u) - 1) * MP_PANEL_N + 16, LD_SUMS * sizeof *sums); \
        add_row(before, (r) + 3, mins);                                                   \
    }

/* Compute the sums of `next`, while those of `before` are scaled and accumulated. */
static MP_INLINE void job(const amx_product *g, const amx_job *before, const amx_job *next, int32_t *sums, bool mins) {
    const int weight_tile = g->unit / 4 * 64;
    AMX_UNIT(0, 0, 1, 4, 2, 3, 0)
    AMX_UNIT(1, 2, 3, 5, 0, 1, 4)
    AMX_UNIT(2, 0, 1, 4, 2, 3, 8)
    AMX_UNIT(3, 2, 3, 5, 0, 1, 12)
    if (next->units == UNITS) {
        _tile_stored(2, sums + 3 * MP_PANEL_N, LD_SUMS * sizeof *sums);
        _tile_stored(3, sums + 3 * MP_PANEL_N + 16, LD_SUMS * sizeof *sums);
    }
    if (before->last)
        finish(g, before);
}

static MP_NOINLINE void job_plain(const amx_product *g, const amx_job *before, const amx_job *next, int32_t *sums) {
    job(g, before, next, sums, false);
}
static MP_NOINLINE void job_mins(const amx_product *g, const amx_job *before, const amx_job *next, int32_t *sums) {
    job(g, before, next, sums, true);
}

/* Multiply rows [r0, r1) by the panels. Requires r1 >= TILE. If the rows do not fill the last job, that job begins with
 * rows of the previous one, whose results are not stored again. */
static MP_INLINE void pass(int kind, amx_product *g, int r0, int r1, int panel0, int panel1) {
    _Alignas(64) float sa[ENTRIES], factor[ENTRIES], acc[PASS * MP_PANEL_N];
    _Alignas(64) int32_t sums[2][TILE * LD_SUMS];
    _Alignas(64) uint8_t weights[UNITS * 16 * 64];
    amx_scales scales[2];
    const int units = g->x->K / g->unit, stride = (units + 15) / 16 * 16, groups = (r1 - r0 + TILE - 1) / TILE;
    amx_job jobs[2] = {{.units = 0}, {.units = 0}};
    int turn = 0, side = 0;
    g->weights = weights;
    for (int i = 0; i < groups; i++) {
        const int m = r1 - TILE < r0 + i * TILE ? r1 - TILE : r0 + i * TILE;
        amx_prepare(g, m, units, sa + i * stride * TILE, factor + i * stride * TILE);
    }
    for (int p = panel0; p < panel1; p++) {
        for (int u = 0; u < units; u += UNITS, side = 1 - side) {
            const int count = units - u < UNITS ? units - u : UNITS;
            unpack(kind, g->w->data + (size_t)p * g->w->panel_bytes, u * g->unit / 32, count * g->unit / 32, weights,
                   &scales[side]);
            for (int i = 0; i < groups; i++, turn = 1 - turn) {
                amx_job *next = &jobs[turn];
                next->m = r1 - TILE < r0 + i * TILE ? r1 - TILE : r0 + i * TILE;
                next->skip = r0 + i * TILE - next->m;
                next->units = count;
                next->a = g->x->q + next->m * g->x->ldq + u * g->unit;
                next->sums = sums[turn];
                next->scales = &scales[side];
                next->sa = sa + (i * stride + u) * TILE;
                next->factor = factor + (i * stride + u) * TILE;
                next->acc = acc + i * TILE * MP_PANEL_N;
                next->first = u == 0;
                next->last = u + count == units;
                g->panel = u == 0 && i == 0 ? p - 1 : p; /* the panel of the job before */
                (g->mins ? job_mins : job_plain)(g, &jobs[1 - turn], next, sums[turn]);
            }
        }
    }
    /* The last job has set g->panel to its own panel: it is not the first job of the panel, because a pass of at most
     * UNITS units has at least two groups. */
    assert(g->panel == panel1 - 1);
    jobs[turn].units = 0;
    jobs[turn].last = false;
    (g->mins ? job_mins : job_plain)(g, &jobs[1 - turn], &jobs[turn], sums[turn]);
}

_Static_assert(MIN_ROWS > TILE, "pass: the last job of a panel is not its first");

typedef void pass_function(amx_product *g, int r0, int r1, int panel0, int panel1);

/* Multiply rows [m0, m1) by the panels. */
static MP_INLINE void gemm(mp_wkind kind, pass_function *pass_kind, const mp_wmat *w, const mp_acts *x, int m0, int m1,
                           int panel0, int panel1, const mp_epilogue *ep, float *y, int64_t ldy) {
    const int unit = unit_of(kind), units = (x->K / unit + 15) / 16 * 16;
    const int near = ACTS_BYTES / x->K < 64 ? 64 : ACTS_BYTES / x->K, fits = ENTRIES / units;
    const int rows = fits < near ? fits : near, most = (rows < PASS ? rows : PASS) / TILE * TILE;
    if (m1 - m0 < MIN_ROWS || most < MIN_ROWS) {
        gemm_before[kind](w, x, m0, m1, panel0, panel1, ep, y, ldy);
        return;
    }
    assert(x->kind == MP_A_Q8 && x->K == w->K && m1 <= x->M && panel1 <= w->panels);
    amx_product g = {.w = w, .x = x, .ep = ep, .y = y, .ldy = ldy, .unit = unit,
                     .mins = has_mins(kind)};
    configure(unit);
    for (int r0 = m0, left = (m1 - m0 + most - 1) / most; left > 0; left--) { /* passes of nearly equal height */
        const int height = ((m1 - r0 + left - 1) / left + TILE - 1) / TILE * TILE;
        const int r1 = left == 1 ? m1 : r0 + height;
        pass_kind(&g, r0, r1, panel0, panel1);
        r0 = r1;
    }
    _tile_release(); /* context switches and signals are cheaper without active tiles */
}

/* A pass is a function of its own, so that products of few rows need no stack for its arrays. */
#define AMX_GEMM(name, kind)                                                                                         \
    static MP_NOINLINE void pass_##name(amx_product *g, int r0, int r1, int panel0, int panel1) {                    \
        pass(kind, g, r0, r1, panel0, panel1);                                                                       \
    }                                                                                                                \
    static void gemm_##name(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,              \
                            const mp_epilogue *ep, float *y, int64_t ldy) {                                          \
        gemm(kind, pass_##name, w, x, m0, m1, panel0, panel1, ep, y, ldy);                                           \
    }
AMX_GEMM(q4_0, MP_W_Q4_0)
AMX_GEMM(q4_1, MP_W_Q4_1)
AMX_GEMM(q8_0, MP_W_Q8_0)
AMX_GEMM(q4_k, MP_W_Q4_K)
AMX_GEMM(q6_k, MP_W_Q6_K)
AMX_GEMM(mxfp4, MP_W_MXFP4)
AMX_GEMM(q2_k, MP_W_Q2_K)
AMX_GEMM(q3_k, MP_W_Q3_K)
AMX_GEMM(tq, MP_W_TQ)
AMX_GEMM(iq2_xxs, MP_W_IQ2_XXS)
AMX_GEMM(iq2_xs, MP_W_IQ2_XS)
AMX_GEMM(iq3, MP_W_IQ3)
MP_TARGET_END

#define AMX_SET(name, kind)                        \
    gemm_before[kind] = table->call.gemm_##name;   \
    MP_SET(table, gemm_##name, gemm_##name, "amx")

void mp_amx_quant(mp_kernel_table *table) {
    AMX_SET(q4_0, MP_W_Q4_0);
    AMX_SET(q4_1, MP_W_Q4_1);
    AMX_SET(q8_0, MP_W_Q8_0);
    AMX_SET(q4_k, MP_W_Q4_K);
    AMX_SET(q6_k, MP_W_Q6_K);
    AMX_SET(mxfp4, MP_W_MXFP4);
    AMX_SET(q2_k, MP_W_Q2_K);
    AMX_SET(q3_k, MP_W_Q3_K);
    AMX_SET(tq, MP_W_TQ);
    AMX_SET(iq2_xxs, MP_W_IQ2_XXS);
    AMX_SET(iq2_xs, MP_W_IQ2_XS);
    AMX_SET(iq3, MP_W_IQ3);
}
#endif
#endif
