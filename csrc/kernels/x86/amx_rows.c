/* x86/amx_rows.c: slot row_maxima_i8 with the tile registers of AMX.
 *
 * A job is up to 16 rows by half of the panel, 16 columns, by one k-chunk: a tile of sums for each digit. Rows are read
 * where they are. Two sets of tiles alternate. While the products of a job are computed, the sums of the job before are
 * stored to L1, and those of the job before that are folded into the maxima. */
#include "kernels/simd/target.h"
#if defined(__x86_64__) && defined(MP_TARGET_AMX_BEGIN)
#include <assert.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/digits.h"
#include "kernels/math_const.h"
#include "kernels/variants.h"
#include "kernels/x86/tile_config.h"

enum { TILE = 16, DEPTH = 64, SUMS = MP_DIGITS * TILE }; /* rows and inputs of a tile; sums of a row and a job */

typedef struct maxima_job {
    int rows;              /* 0: no job */
    int k, end, half;      /* inputs; columns 16 * half to 16 * half + 15 */
    const int8_t *a;       /* the first row */
    const float *scales;   /* NULL, or the factors of the rows */
    bool first, last;      /* true for the first k-chunk of the rows, for the last one */
} maxima_job;

MP_TARGET_AMX_BEGIN
#include "kernels/simd/vec_avx512.h"

#include "kernels/simd/maxima_i8_tmpl.h"

typedef struct maxima_call {
    const uint8_t *panel;
    int64_t ld;
    int ahead; /* lines to prefetch with each tile product: the jobs of 16 rows prefetch the 16 rows after them */
    digits_maxima maxima;
    float *values; /* [TILE][MP_PANEL_N]: of the chunks before */
} maxima_call;

/* Tiles 0 to 2 and 3 to 5: sums; 6: rows; 7: digits. */
static MP_INLINE void configure(int rows) {
    tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.bytes[i] = 64;
        c.rows[i] = (uint8_t)(i < 7 ? rows : DEPTH / 4);
    }
    __asm__ volatile("" : : "r"(&c) : "memory"); /* gcc 12 takes only the first 8 bytes for an operand of ldtilecfg */
    _tile_loadconfig(&c);
}

/* Copy inputs [k, end) of the rows of a job, fewer than DEPTH, and zeros after them. */
static MP_INLINE void copy_tail(const maxima_job *job, int64_t ld, int k, int8_t *to) {
    const __mmask64 here = UINT64_MAX >> (DEPTH - (job->end - k));
    for (int r = 0; r < job->rows; r++)
        _mm512_store_si512(to + r * DEPTH, _mm512_maskz_loadu_epi8(here, job->a + r * ld + k));
}

/* Fold rows [row, row + count) of a job with these sums, or keep their values for the next chunk. Returns the row
 * after them. */
static MP_INLINE int fold(maxima_call *m, const maxima_job *job, const int32_t *sums, int row, int count) {
    const int stop = job->rows - row < count ? job->rows : row + count;
    for (; row < stop; row++) {
        const __m512i low = _mm512_load_si512(sums + row * SUMS), middle = _mm512_load_si512(sums + row * SUMS + 16);
        const __m512i high = _mm512_slli_epi32(_mm512_load_si512(sums + row * SUMS + 32), 8);
        const vec upper = _mm512_cvtepi32_ps(_mm512_add_epi32(high, middle));
        float *value = m->values + row * MP_PANEL_N + job->half * TILE;
        vec x = vec_fma(upper, vec_set(256.0f), _mm512_cvtepi32_ps(low));
        if (!job->first)
            x = vec_add(vec_load(value), x);
        if (!job->last)
            vec_store(value, x);
        else if (job->half)
            digits_fold(&m->maxima, 1, x, job->scales, row);
        else
            digits_fold(&m->maxima, 0, x, job->scales, row);
    }
    return row;
}

/* Add the products with a digit to tile c, and prefetch rows of the next jobs. After the first products, store tile d
 * of the job before. Then fold rows of the job before that: small steps alternate, because a core overlaps only
 * instructions that are close together. A macro, because the instructions take tile numbers as literals. */
#define AMX_STEP(c, d, digit)                                                      \
    _tile_loadd(7, weights + (digit) * MP_DIGITS_LINE, MP_DIGITS_STEP);            \
    _tile_dpbssd(c, 6, 7);                                                         \
    for (int i = 0; i < m->ahead; i++, line += m->ld)                              \
        _mm_prefetch((const char *)line, _MM_HINT_T0);                             \
    if (k == next->k)                                                              \
        _tile_stored(d, sums[turn] + (digit) * TILE, SUMS * sizeof sums[turn][0]); \
    row = fold(m, folded, sums[1 - turn], row, share);

#define AMX_JOB(c0, c1, c2, d0, d1, d2)                                                       \
    _tile_zero(c0);                                                                           \
    _tile_zero(c1);                                                                           \
    _tile_zero(c2);                                                                           \
    for (int k = next->k; k < next->end; k += DEPTH, weights += DEPTH / 4 * MP_DIGITS_STEP) { \
        const int8_t *line = next->a + (TILE + next->half * (TILE / 2)) * m->ld + k;          \
        if (next->end - k >= DEPTH) {                                                         \
            _tile_loadd(6, next->a + k, m->ld);                                               \
        } else {                                                                              \
            copy_tail(next, m->ld, k, tail);                                                  \
            _tile_loadd(6, tail, DEPTH);                                                      \
        }                                                                                     \
        AMX_STEP(c0, d0, 0)                                                                   \
        AMX_STEP(c1, d1, 1)                                                                   \
        AMX_STEP(c2, d2, 2)                                                                   \
    }

/* Compute the products of `next` into the tiles 3 * turn to 3 * turn + 2. Store the sums of the job before, which are
 * in the other tiles, to sums[turn]. Fold the job before that, `folded`, from sums[1 - turn]. */
static MP_INLINE void advance(maxima_call *m, const maxima_job *next, const maxima_job *folded,
                              int32_t (*sums)[TILE * SUMS], int turn) {
    _Alignas(64) int8_t tail[TILE * DEPTH];
    const uint8_t *weights = m->panel + mp_digits_chunk(next->k) + MP_DIGITS_OFFSETS + next->half * DEPTH;
    const int steps = MP_DIGITS * ((next->end - next->k + DEPTH - 1) / DEPTH), share = (TILE + steps - 1) / steps;
    int row = 0;
    if (turn == 0) {
        AMX_JOB(0, 1, 2, 3, 4, 5)
    } else {
        AMX_JOB(3, 4, 5, 0, 1, 2)
    }
}

/* Store the sums of the last job, in the tiles that `turn` would not use for the next one. */
static MP_INLINE void store_last(int32_t *sums, int turn) {
    if (turn == 0) {
        _tile_stored(3, sums, SUMS * sizeof *sums);
        _tile_stored(4, sums + TILE, SUMS * sizeof *sums);
        _tile_stored(5, sums + 2 * TILE, SUMS * sizeof *sums);
    } else {
        _tile_stored(0, sums, SUMS * sizeof *sums);
        _tile_stored(1, sums + TILE, SUMS * sizeof *sums);
        _tile_stored(2, sums + 2 * TILE, SUMS * sizeof *sums);
    }
}

static bool maxima_tiles(const uint8_t *panel, int columns, int K, const int8_t *rows, int64_t ld, int n,
                         const float *scales, float *maxima) {
    _Alignas(64) int32_t sums[2][TILE * SUMS];
    _Alignas(64) float values[TILE * MP_PANEL_N];
    const int height = n < TILE ? n : TILE, halves = columns > TILE ? 2 : 1;
    assert(n > 0 && K > 0 && 0 < columns && columns <= MP_PANEL_N);
    maxima_call m = {panel, ld, halves == 2 ? 3 : 6, digits_begin(panel, maxima), values};
    maxima_job before = {.rows = 0}, folded = before; /* the last job, and the one before it */
    int turn = 0;
    configure(height);
    for (int row = 0; row < n; row += height) {
        const int first = n - row < height ? n - height : row; /* a row that is folded twice changes no maximum */
        for (int k = 0; k < K; k += MP_K_CHUNK)
            for (int half = 0; half < halves; half++, turn = 1 - turn) {
                const int end = K - k < MP_K_CHUNK ? K : k + MP_K_CHUNK;
                const maxima_job next = {height, k, end, half, rows + first * ld, scales ? scales + first : NULL,
                                         k == 0, end == K};
                advance(&m, &next, &folded, sums, turn);
                folded = before;
                before = next;
            }
    }
    fold(&m, &folded, sums[1 - turn], 0, TILE);
    store_last(sums[turn], turn);
    fold(&m, &before, sums[turn], 0, TILE);
    _tile_release(); /* context switches and signals are cheaper without active tiles */
    return digits_end(&m.maxima, maxima);
}
MP_TARGET_END

void mp_amx_rows(mp_kernel_table *table) { MP_SET(table, row_maxima_i8, maxima_tiles, "amx"); }
#endif
