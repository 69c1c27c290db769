/* tile_model.c: see tile_model.h. */
#define MP_TILE_MODEL_ITSELF
#include "tile_model.h"

#include "mp_test.h"

enum { TILES = 8, ROWS = 16, BYTES = 64 }; /* palette 1 */

typedef struct tile {
    int rows, bytes; /* 0: not in this configuration */
    _Alignas(64) uint8_t data[ROWS][BYTES]; /* zero beyond `rows` and `bytes` */
} tile;

static _Thread_local struct {
    bool configured;
    tile tiles[TILES];
} unit;

/* ---- configuration ---------------------------------------------------------------------------------------------- */

void tile_model_configure(const void *config, const char *file, int line) {
    uint8_t c[64];
    memcpy(c, config, sizeof c);
    if (c[0] == 0) { /* the initial state, whatever follows */
        tile_model_release();
        return;
    }
    if (c[0] != 1)
        mp_test_fail(file, line, "ldtilecfg: palette %d does not exist; 1 is the only one", c[0]);
    if (c[1] != 0)
        mp_test_fail(file, line, "ldtilecfg: start_row is %d; no load was interrupted", c[1]);
    for (int i = 2; i < 64; i++) {
        const bool reserved = i < 16 || (i >= 16 + 2 * TILES && i < 48) || i >= 48 + TILES;
        if (reserved && c[i])
            mp_test_fail(file, line, "ldtilecfg: reserved byte %d is %d", i, c[i]);
    }
    for (int t = 0; t < TILES; t++) {
        const int bytes = c[16 + 2 * t] | c[17 + 2 * t] << 8, rows = c[48 + t];
        if (bytes > BYTES || rows > ROWS)
            mp_test_fail(file, line, "ldtilecfg: tile %d has %d rows of %d bytes, at most %d of %d are possible", t,
                         rows, bytes, ROWS, BYTES);
        if (!bytes != !rows)
            mp_test_fail(file, line, "ldtilecfg: tile %d has %d rows of %d bytes; both must be 0, or neither", t, rows,
                         bytes);
    }
    memset(unit.tiles, 0, sizeof unit.tiles);
    for (int t = 0; t < TILES; t++) {
        unit.tiles[t].bytes = c[16 + 2 * t];
        unit.tiles[t].rows = c[48 + t];
    }
    unit.configured = true;
}

void tile_model_release(void) {
    unit.configured = false;
    memset(unit.tiles, 0, sizeof unit.tiles);
}

static tile *tile_at(int t, const char *what, const char *file, int line) {
    if (t < 0 || t >= TILES)
        mp_test_fail(file, line, "%s: tile %d does not exist; there are %d", what, t, TILES);
    if (!unit.configured)
        mp_test_fail(file, line, "%s: tile %d is used, but this thread has no tile configuration", what, t);
    if (!unit.tiles[t].rows)
        mp_test_fail(file, line, "%s: tile %d has no rows in this configuration", what, t);
    return &unit.tiles[t];
}

/* ---- moves ------------------------------------------------------------------------------------------------------ */

void tile_model_zero(int t, const char *file, int line) {
    tile *to = tile_at(t, "tilezero", file, line);
    memset(to->data, 0, sizeof to->data);
}

void tile_model_load(int t, const void *base, int64_t stride, bool streamed, const char *file, int line) {
    tile *to = tile_at(t, streamed ? "tileloaddt1" : "tileloadd", file, line);
    memset(to->data, 0, sizeof to->data);
    for (int r = 0; r < to->rows; r++)
        memcpy(to->data[r], (const uint8_t *)base + r * stride, (size_t)to->bytes);
}

void tile_model_store(int t, void *base, int64_t stride, const char *file, int line) {
    const tile *from = tile_at(t, "tilestored", file, line);
    for (int r = 0; r < from->rows; r++)
        memcpy((uint8_t *)base + r * stride, from->data[r], (size_t)from->bytes);
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* The operands of a product [m, n] += [m, k] [k, n]; k and n count words of 4 bytes. */
typedef struct product {
    tile *to;
    const tile *a, *b;
} product;

static product product_of(int to, int a, int b, const char *what, const char *file, int line) {
    if (to == a || to == b || a == b)
        mp_test_fail(file, line, "%s: tiles %d, %d, %d must be different", what, to, a, b);
    const product p = {tile_at(to, what, file, line), tile_at(a, what, file, line), tile_at(b, what, file, line)};
    if (p.to->bytes % 4 || p.a->bytes % 4 || p.b->bytes % 4)
        mp_test_fail(file, line, "%s: rows of %d, %d and %d bytes must be multiples of 4", what, p.to->bytes,
                     p.a->bytes, p.b->bytes);
    if (p.to->rows != p.a->rows || p.to->bytes != p.b->bytes || p.a->bytes / 4 != p.b->rows)
        mp_test_fail(file, line, "%s: shapes [%d, %d] += [%d, %d] [%d, %d], in rows and words, do not fit", what,
                     p.to->rows, p.to->bytes / 4, p.a->rows, p.a->bytes / 4, p.b->rows, p.b->bytes / 4);
    return p;
}

/* The arithmetic reads and writes nothing but tiles and variables of this file: product_of has checked the operands.
 * With the checks of sanitizers the compiler could not vectorise it. Loads and stores of tiles are checked. */
#define UNCHECKED __attribute__((no_sanitize("address", "undefined")))

/* The model must be fast enough for all kernel tests, also in builds with -O1. */
#if defined(__x86_64__) && !defined(__clang__)
#define FAST UNCHECKED __attribute__((target("avx2,fma"), optimize("O3")))
#else
#define FAST UNCHECKED
#endif

/* Denormals count as zeros of their sign; a result counts as denormal after rounding. */
UNCHECKED static inline float flushed(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    u = u & 0x7f800000 ? u : u & 0x80000000;
    memcpy(&x, &u, sizeof u);
    return x;
}

UNCHECKED static inline float widened(uint16_t x) {
    const uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return flushed(f);
}

/* TDPBF16PS: for each output, one chain of fused multiply-adds over the even slots of all pairs and one over the odd
 * slots, both from zero; then even + odd; then the accumulator plus that sum. Each operation rounds to nearest even and
 * flushes denormal inputs and outputs. MXCSR has no effect. Computes all 16 columns: those beyond a tile's bytes are
 * zero, and are cut off. */
FAST void tile_model_dpbf16ps(int to, int a, int b, const char *file, int line) {
    const product p = product_of(to, a, b, "tdpbf16ps", file, line);
    static _Thread_local float weights[2][ROWS][BYTES / 4];
    const int depth = p.a->bytes / 4;
    for (int k = 0; k < depth; k++) {
        uint16_t words[BYTES / 2];
        memcpy(words, p.b->data[k], BYTES);
        for (int n = 0; n < BYTES / 4; n++) {
            weights[0][k][n] = widened(words[2 * n]);
            weights[1][k][n] = widened(words[2 * n + 1]);
        }
    }
    for (int m = 0; m < p.to->rows; m++) {
        uint16_t words[BYTES / 2];
        float even[BYTES / 4] = {0}, odd[BYTES / 4] = {0}, sum[BYTES / 4];
        memcpy(words, p.a->data[m], BYTES);
        for (int k = 0; k < depth; k++) {
            const float first = widened(words[2 * k]), second = widened(words[2 * k + 1]);
            for (int n = 0; n < BYTES / 4; n++) {
                even[n] = flushed(__builtin_fmaf(first, weights[0][k][n], even[n]));
                odd[n] = flushed(__builtin_fmaf(second, weights[1][k][n], odd[n]));
            }
        }
        memcpy(sum, p.to->data[m], BYTES);
        for (int n = 0; n < BYTES / 4; n++)
            sum[n] = flushed(flushed(sum[n]) + flushed(even[n] + odd[n]));
        memcpy(p.to->data[m], sum, (size_t)p.to->bytes);
    }
}

/* Signed bytes of `p->a` times bytes of `p->b`, four products a word, added modulo 2^32. */
FAST static void dot_bytes(const product *operands, bool is_signed) {
    const product p = *operands;
    static _Thread_local int32_t weights[BYTES][BYTES / 4];
    const int depth = p.a->bytes;
    for (int k = 0; k < depth; k++)
        for (int n = 0; n < BYTES / 4; n++) {
            const uint8_t byte = p.b->data[k / 4][4 * n + k % 4];
            weights[k][n] = is_signed ? (int8_t)byte : byte;
        }
    for (int m = 0; m < p.to->rows; m++) {
        uint32_t sum[BYTES / 4];
        memcpy(sum, p.to->data[m], BYTES);
        for (int k = 0; k < depth; k++) {
            const int32_t x = (int8_t)p.a->data[m][k];
            for (int n = 0; n < BYTES / 4; n++)
                sum[n] += (uint32_t)(x * weights[k][n]);
        }
        memcpy(p.to->data[m], sum, (size_t)p.to->bytes);
    }
}

/* TDPBSUD: signed bytes of `a`, unsigned bytes of `b`. */
void tile_model_dpbsud(int to, int a, int b, const char *file, int line) {
    const product p = product_of(to, a, b, "tdpbsud", file, line);
    dot_bytes(&p, false);
}

/* TDPBSSD: signed bytes of both. */
void tile_model_dpbssd(int to, int a, int b, const char *file, int line) {
    const product p = product_of(to, a, b, "tdpbssd", file, line);
    dot_bytes(&p, true);
}
