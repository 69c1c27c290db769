/* pack.c: packs stored quantised rows into interleaved panels, and reads packed values one at a time. pack.h describes
 * the layouts.
 *
 * Packing moves bits and computes no values, except the scales of the table kinds. It works on four outputs at once in
 * 128-bit vectors of the compiler's vector extension, which every supported CPU has: one 4x4 transposition turns 16
 * bytes of four rows into a quarter of four lines. Memory is slower than that, so packing needs no variants per
 * instruction set. The 32 rows of a panel are more streams than a hardware prefetcher follows. Therefore `fetch` first
 * brings them into cache, one row after another. */
#include "kernels/pack.h"

#include <assert.h>
#include <string.h>

#include "kernels/dequantize.h"
#include "kernels/half.h"
#include "kernels/pack_dense.h"

/* ---- sizes ------------------------------------------------------------------------------------------------------- */

enum {
    BLOCK_Q2 = MP_PACK_TWOS,
    BLOCK_Q3 = MP_PACK_THREES,
    BLOCK_Q4 = MP_PACK_NIBBLES,
    BLOCK_Q5 = MP_PACK_BITS + MP_PACK_NIBBLES,
    PAIRS_1 = MP_PACK_PAIRS + MP_PACK_NIBBLES, /* offset of pairs 1 in a block of Q6_K */
    BLOCK_Q6 = MP_PACK_PAIRS + MP_PACK_NIBBLES + MP_PACK_PAIRS,
    HEAD_IQ = MP_PACK_HALVES + 8 * MP_PACK_SMALL,
};

/* Where a kind keeps its scales. */
typedef enum scales {
    SCALES_OTHER,
    SCALES_MIXED,   /* after each block: a `small` for inputs 0-15, one for 16-31: scale + 16 * minimum (Q2_K) */
    SCALES_SIGNED,  /* at the same places: signed scale (Q3_K) */
    SCALES_NONE,    /* only d (TQ) */
    SCALES_EIGHTHS, /* in the head: a `small` for each block: 8 * factor (IQ2_XXS, IQ3) */
    SCALES_NIBBLES, /* in the head: a `small` for each block: two nibbles (IQ2_XS) */
    SCALES_BYTES,   /* in the head: a `small` for each block: signed scale (IQ4_XS) */
    SCALES_HALVES,  /* after each block: `halves` for each group */
    SCALES_BF16,    /* as SCALES_HALVES, in bf16 (MXFP4) */
} scales;

/* Sizes of a kind. A panel of K inputs is `start` bytes, then K / 32 blocks with a head before each `per_head` blocks.
 */
typedef struct pack_layout {
    int32_t inputs;   /* K must be a multiple of it */
    int32_t block;    /* bytes of a block of 32 inputs, without its head */
    int32_t per_head; /* blocks per head; 0: no heads */
    int32_t head;     /* bytes of a head: d, and dmin if any */
    int32_t start;    /* bytes before the first block or head of a panel */
    int32_t bits;     /* bits of a code, for kinds that pack_codes packs */
    scales scales;
} pack_layout;

static const pack_layout layouts[MP_W_KIND_COUNT] = {
    [MP_W_Q4_0] = {32, BLOCK_Q4 + MP_PACK_HALVES, 0, 0, 0, 0, SCALES_OTHER},
    [MP_W_Q4_1] = {32, BLOCK_Q4 + 2 * MP_PACK_HALVES, 0, 0, 0, 0, SCALES_OTHER},
    [MP_W_Q5_0] = {32, BLOCK_Q5 + MP_PACK_HALVES, 0, 0, 0, 0, SCALES_OTHER},
    [MP_W_Q5_1] = {32, BLOCK_Q5 + 2 * MP_PACK_HALVES, 0, 0, 0, 0, SCALES_OTHER},
    [MP_W_Q8_0] = {32, MP_PACK_BYTES + MP_PACK_HALVES, 0, 0, 0, 0, SCALES_OTHER},
    [MP_W_Q4_K] = {256, BLOCK_Q4 + 2 * MP_PACK_SMALL, 8, 2 * MP_PACK_HALVES, 0, 0, SCALES_OTHER},
    [MP_W_Q5_K] = {256, BLOCK_Q5 + 2 * MP_PACK_SMALL, 8, 2 * MP_PACK_HALVES, 0, 0, SCALES_OTHER},
    [MP_W_Q6_K] = {256, BLOCK_Q6 + 2 * MP_PACK_SMALL, 8, MP_PACK_HALVES, 0, 0, SCALES_OTHER},
    [MP_W_Q2_K] = {256, BLOCK_Q2 + 2 * MP_PACK_SMALL, 8, 2 * MP_PACK_HALVES, 0, 2, SCALES_MIXED},
    [MP_W_Q3_K] = {256, BLOCK_Q3 + 2 * MP_PACK_SMALL, 8, MP_PACK_HALVES, 0, 3, SCALES_SIGNED},
    [MP_W_TQ] = {256, BLOCK_Q2, 8, MP_PACK_HALVES, 0, 2, SCALES_NONE},
    [MP_W_IQ2_XXS] = {256, BLOCK_Q3, 8, HEAD_IQ, MP_PACK_LINE, 3, SCALES_EIGHTHS},
    [MP_W_IQ2_XS] = {256, BLOCK_Q3, 8, HEAD_IQ, MP_PACK_LINE, 3, SCALES_NIBBLES},
    [MP_W_IQ3] = {256, BLOCK_Q4, 8, HEAD_IQ, MP_PACK_LINE, 4, SCALES_EIGHTHS},
    [MP_W_IQ4_NL] = {32, BLOCK_Q4 + MP_PACK_HALVES, 0, 0, MP_PACK_LINE, 4, SCALES_HALVES},
    [MP_W_IQ4_XS] = {256, BLOCK_Q4, 8, HEAD_IQ, MP_PACK_LINE, 4, SCALES_BYTES},
    [MP_W_MXFP4] = {32, BLOCK_Q4 + MP_PACK_HALVES, 0, 0, MP_PACK_LINE, 4, SCALES_BF16},
    [MP_W_NVFP4] = {32, BLOCK_Q4 + 2 * MP_PACK_HALVES, 0, 0, MP_PACK_LINE, 4, SCALES_HALVES},
};

static int table_offset(mp_wkind kind) {
    if (kind == MP_W_IQ4_NL || kind == MP_W_IQ4_XS)
        return MP_PACK_IQ4_OFFSET;
    return kind == MP_W_MXFP4 || kind == MP_W_NVFP4 ? MP_PACK_FP4_OFFSET : MP_PACK_IQ_OFFSET;
}

static const pack_layout *layout_of(mp_wkind kind) {
    assert(kind < MP_W_KIND_COUNT && layouts[kind].inputs != 0);
    return &layouts[kind];
}

size_t mp_pack_panel_bytes(mp_wkind kind, int32_t K) {
    const pack_layout *layout = layout_of(kind);
    assert(K % layout->inputs == 0);
    size_t blocks = (size_t)K / 32;
    size_t heads = layout->per_head ? blocks / (size_t)layout->per_head * (size_t)layout->head : 0;
    return (size_t)layout->start + heads + blocks * (size_t)layout->block;
}

/* Offset of block b in a panel, after its head. */
static size_t block_at(mp_wkind kind, int b) {
    const pack_layout *layout = layout_of(kind);
    size_t heads = layout->per_head ? (size_t)(b / layout->per_head + 1) * (size_t)layout->head : 0;
    return (size_t)layout->start + heads + (size_t)b * (size_t)layout->block;
}

/* ---- four outputs at a time -------------------------------------------------------------------------------------- */

typedef uint32_t v4 __attribute__((vector_size(16)));

#if defined(__clang__)
#define SHUFFLE(a, b, i0, i1, i2, i3) __builtin_shufflevector(a, b, i0, i1, i2, i3)
#else
#define SHUFFLE(a, b, i0, i1, i2, i3) __builtin_shuffle(a, b, (v4){i0, i1, i2, i3})
#endif

static inline v4 load4(const uint8_t *from) {
    v4 value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void store4(uint8_t *to, v4 value) { memcpy(to, &value, sizeof value); }

/* lanes[i][j] -> lanes[j][i] */
static inline void transpose4(v4 *lanes) {
    v4 a = SHUFFLE(lanes[0], lanes[1], 0, 4, 1, 5), b = SHUFFLE(lanes[0], lanes[1], 2, 6, 3, 7);
    v4 c = SHUFFLE(lanes[2], lanes[3], 0, 4, 1, 5), d = SHUFFLE(lanes[2], lanes[3], 2, 6, 3, 7);
    lanes[0] = SHUFFLE(a, c, 0, 1, 4, 5);
    lanes[1] = SHUFFLE(a, c, 2, 3, 6, 7);
    lanes[2] = SHUFFLE(b, d, 0, 1, 4, 5);
    lanes[3] = SHUFFLE(b, d, 2, 3, 6, 7);
}

/* Store four lanes of each of four outputs. `lines` points at the first lane of the first output. */
static inline void store_lines(v4 *lanes, uint8_t *lines) {
    transpose4(lanes);
    for (int j = 0; j < 4; j++)
        store4(lines + j * MP_PACK_STEP, lanes[j]);
}

/* Exchange the bits of x that `mask` selects with the bits `shift` positions above them. */
static inline v4 swap_bits(v4 x, int shift, uint32_t mask) {
    v4 t = ((x >> shift) ^ x) & mask;
    return x ^ t ^ (t << shift);
}

/* Exchange the bits of b that `mask` selects with the bits of a that are `shift` positions higher: one step of
 * transposing a bit matrix held in several words. */
static inline void swap_across(v4 *a, v4 *b, int shift, uint32_t mask) {
    v4 t = ((*a >> shift) ^ *b) & mask;
    *b ^= t;
    *a ^= t << shift;
}

/* Offset of the first lane of output o in a part. Its next lane is MP_PACK_STEP further. */
static inline size_t lane_at(int o) {
    return (size_t)o * 4;
}

/* The 32 rows of a panel. Rows beyond the last output read one block of zeros repeatedly. */
typedef struct rows {
    const uint8_t *at[MP_PANEL_N];
    size_t step[MP_PANEL_N]; /* bytes to the next stored block; 0 for rows beyond the last output */
    mp_dtype dtype;
    const pack_layout *layout;
} rows;

static inline const uint8_t *block_of(const rows *rows, int o, int b) {
    return rows->at[o] + (size_t)b * rows->step[o];
}

static inline void copy_halves(const rows *rows, int b, int offset, uint8_t *to) {
    for (int o = 0; o < MP_PANEL_N; o++)
        memcpy(to + 2 * o, block_of(rows, o, b) + offset, 2);
}

/* ---- blocks of 32 ------------------------------------------------------------------------------------------------ */

static inline void pack_nibbles(const rows *rows, int b, int offset, uint8_t *to) {
    for (int o = 0; o < MP_PANEL_N; o += 4) {
        v4 lanes[4];
        for (int i = 0; i < 4; i++)
            lanes[i] = load4(block_of(rows, o + i, b) + offset);
        store_lines(lanes, to + lane_at(o));
    }
}

/* Move bit 4 g + i of each word to bit g of its byte i. The index of a bit is (g2 g1 g0 i1 i0) and becomes (i1 i0 g2 g1
 * g0), in four exchanges of two index bits. */
static inline v4 spread_bits(v4 x) {
    x = swap_bits(x, 14, 0x0000ccccu);
    x = swap_bits(x, 7, 0x00aa00aau);
    x = swap_bits(x, 2, 0x0c0c0c0cu);
    return swap_bits(x, 1, 0x22222222u);
}

static inline void pack_bits(const rows *rows, int b, int offset, uint8_t *to) {
    for (int o = 0; o < MP_PANEL_N; o += 4) {
        uint32_t bits[4];
        for (int i = 0; i < 4; i++)
            memcpy(&bits[i], block_of(rows, o + i, b) + offset, 4);
        store4(to + lane_at(o), spread_bits((v4){bits[0], bits[1], bits[2], bits[3]}));
    }
}

static void pack_q4_0(const rows *rows, int b, uint8_t *to) {
    pack_nibbles(rows, b, 2, to);
    copy_halves(rows, b, 0, to + BLOCK_Q4);
}

static void pack_q4_1(const rows *rows, int b, uint8_t *to) {
    pack_nibbles(rows, b, 4, to);
    copy_halves(rows, b, 0, to + BLOCK_Q4);
    copy_halves(rows, b, 2, to + BLOCK_Q4 + MP_PACK_HALVES);
}

static void pack_q5_0(const rows *rows, int b, uint8_t *to) {
    pack_bits(rows, b, 2, to);
    pack_nibbles(rows, b, 6, to + MP_PACK_BITS);
    copy_halves(rows, b, 0, to + BLOCK_Q5);
}

static void pack_q5_1(const rows *rows, int b, uint8_t *to) {
    pack_bits(rows, b, 4, to);
    pack_nibbles(rows, b, 8, to + MP_PACK_BITS);
    copy_halves(rows, b, 0, to + BLOCK_Q5);
    copy_halves(rows, b, 2, to + BLOCK_Q5 + MP_PACK_HALVES);
}

static void pack_q8_0(const rows *rows, int b, uint8_t *to) {
    for (int o = 0; o < MP_PANEL_N; o += 4)
        for (int half = 0; half < 2; half++) {
            v4 lanes[4];
            for (int i = 0; i < 4; i++)
                lanes[i] = load4(block_of(rows, o + i, b) + 2 + 16 * half) ^ 0x80808080u;
            store_lines(lanes, to + lane_at(o) + (size_t)half * 4 * MP_PACK_STEP);
        }
    copy_halves(rows, b, 0, to + MP_PACK_BYTES);
}

/* ---- superblocks: `to` is the head ------------------------------------------------------------------------------- */

typedef uint8_t v16 __attribute__((vector_size(16)));

#if defined(__clang__)
#define INTERLEAVE(a, b) \
    __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#else
#define INTERLEAVE(a, b) \
    __builtin_shuffle(a, b, (v16){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23})
#endif

/* Byte j of lane i -> byte i of lane j. */
static inline v4 transpose_bytes(v4 x) {
    v16 once = INTERLEAVE((v16)x, (v16)SHUFFLE(x, x, 2, 3, 2, 3));
    return (v4)INTERLEAVE(once, (v16)SHUFFLE((v4)once, (v4)once, 2, 3, 2, 3));
}

/* Store four small numbers of each of 16 outputs. of[i]: one word per output 4 i ... 4 i + 3, byte s for block s.
 * `small` points at the number of the first output in the first block. */
static inline void store_small(v4 *of, uint8_t *small, size_t block) {
    for (int i = 0; i < 4; i++)
        of[i] = transpose_bytes(of[i]);
    transpose4(of);
    for (int s = 0; s < 4; s++)
        store4(small + (size_t)s * block, of[s]);
}

/* Q4_K and Q5_K: unpack the 12 bytes of 6-bit numbers, four per word, as the format lays them out. */
static inline void pack_k_scales(const rows *rows, int b, uint8_t *to, size_t block, size_t at) {
    uint8_t *small = to + 2 * MP_PACK_HALVES + at;
    for (int o = 0; o < MP_PANEL_N; o += 16, small += 16) {
        v4 sc[2][4], mn[2][4];
        for (int i = 0; i < 4; i++) {
            v4 words[4]; /* the fourth belongs to the quants */
            for (int r = 0; r < 4; r++)
                words[r] = load4(block_of(rows, o + 4 * i + r, b) + 4);
            transpose4(words);
            sc[0][i] = words[0] & 0x3f3f3f3fu;
            mn[0][i] = words[1] & 0x3f3f3f3fu;
            sc[1][i] = (words[2] & 0x0f0f0f0fu) | (words[0] >> 2 & 0x30303030u);
            mn[1][i] = (words[2] >> 4 & 0x0f0f0f0fu) | (words[1] >> 2 & 0x30303030u);
        }
        for (int half = 0; half < 2; half++) {
            store_small(sc[half], small + (size_t)(4 * half) * block, block);
            store_small(mn[half], small + (size_t)(4 * half) * block + MP_PACK_SMALL, block);
        }
    }
}

/* A stored run of 32 bytes holds two blocks: *low gets the one in the low nibbles, *high the one in the high nibbles. A
 * byte of a packed block holds inputs k and k + 16 of that block. */
static inline void regroup_nibbles(v4 first, v4 second, v4 *low, v4 *high) {
    *low = (first & 0x0f0f0f0fu) | (second << 4 & 0xf0f0f0f0u);
    *high = (first >> 4 & 0x0f0f0f0fu) | (second & 0xf0f0f0f0u);
}

static inline void pack_k_nibbles(const rows *rows, int b, int offset, uint8_t *blocks, size_t block) {
    for (int pair = 0; pair < 4; pair++)
        for (int o = 0; o < MP_PANEL_N; o += 4) {
            v4 low[4], high[4];
            for (int i = 0; i < 4; i++) {
                const uint8_t *from = block_of(rows, o + i, b) + offset + pair * 32;
                regroup_nibbles(load4(from), load4(from + 16), &low[i], &high[i]);
            }
            uint8_t *to = blocks + (size_t)(2 * pair) * block + lane_at(o);
            store_lines(low, to);
            store_lines(high, to + block);
        }
}

static void pack_q4_k(const rows *rows, int b, uint8_t *to) {
    const size_t block = BLOCK_Q4 + 2 * MP_PACK_SMALL;
    copy_halves(rows, b, 0, to);
    copy_halves(rows, b, 2, to + MP_PACK_HALVES);
    pack_k_nibbles(rows, b, 16, to + 2 * MP_PACK_HALVES, block);
    pack_k_scales(rows, b, to, block, BLOCK_Q4);
}

static void pack_q5_k(const rows *rows, int b, uint8_t *to) {
    const size_t block = BLOCK_Q5 + 2 * MP_PACK_SMALL;
    uint8_t *blocks = to + 2 * MP_PACK_HALVES;
    copy_halves(rows, b, 0, to);
    copy_halves(rows, b, 2, to + MP_PACK_HALVES);
    pack_k_nibbles(rows, b, 48, blocks + MP_PACK_BITS, block);
    pack_k_scales(rows, b, to, block, BLOCK_Q5);
    for (int o = 0; o < MP_PANEL_N; o += 4) {
        /* word[g], byte i, bit s: bit 4 of input 4 g + i of block s. Transposed: word[s], byte i, bit g. */
        v4 word[8];
        for (int i = 0; i < 4; i++) {
            const uint8_t *from = block_of(rows, o + i, b) + 16;
            word[i] = load4(from);
            word[4 + i] = load4(from + 16);
        }
        transpose4(word);
        transpose4(word + 4);
        for (int g = 0; g < 4; g++)
            swap_across(&word[g], &word[g + 4], 4, 0x0f0f0f0fu);
        for (int g = 0; g < 8; g++)
            if (!(g & 2))
                swap_across(&word[g], &word[g + 2], 2, 0x33333333u);
        for (int g = 0; g < 8; g += 2)
            swap_across(&word[g], &word[g + 1], 1, 0x55555555u);
        for (int s = 0; s < 8; s++)
            store4(blocks + (size_t)s * block + lane_at(o), word[s]);
    }
}

/* Pack 64 stored bytes whose bits 2 r, 2 r + 1 belong to block r (byte 0-31) or 4 + r (byte 32-63) of a superblock.
 * `to`: pairs 0 of its first block; pairs 1 are `second` bytes further. */
static inline void pack_pairs(const rows *rows, int b, int offset, uint8_t *to, size_t block, size_t second) {
    for (int half = 0; half < 2; half++)
        for (int o = 0; o < MP_PANEL_N; o += 4)
            for (int h = 0; h < 2; h++) {
                v4 word[4]; /* word[t], byte i, pair r: input 4 t + i of block r of the half */
                for (int i = 0; i < 4; i++)
                    word[i] = load4(block_of(rows, o + i, b) + offset + half * 32 + h * 16);
                transpose4(word);
                swap_across(&word[0], &word[2], 4, 0x0f0f0f0fu); /* word[r], byte i, pair t */
                swap_across(&word[1], &word[3], 4, 0x0f0f0f0fu);
                swap_across(&word[0], &word[1], 2, 0x33333333u);
                swap_across(&word[2], &word[3], 2, 0x33333333u);
                for (int r = 0; r < 4; r++)
                    store4(to + (size_t)(half * 4 + r) * block + (size_t)h * second + lane_at(o), word[r]);
            }
}

/* Pack the 16 scales, one byte each, of a superblock. Word w of a row holds the scales of blocks 2 w and 2 w + 1, low
 * inputs first. `expand` converts 16 stored bytes to these words; NULL: the file stores the words themselves. `small`:
 * where to store the scales of inputs 0-15 of the first block. */
static inline void pack_scales16(const rows *rows, int b, int offset, void (*expand)(v4 *words), uint8_t *small,
                                 size_t block) {
    for (int o = 0; o < MP_PANEL_N; o += 16) {
        v4 words[4][4];
        for (int i = 0; i < 4; i++) {
            v4 lanes[4];
            for (int r = 0; r < 4; r++)
                lanes[r] = load4(block_of(rows, o + 4 * i + r, b) + offset);
            transpose4(lanes);
            if (expand)
                expand(lanes);
            for (int w = 0; w < 4; w++)
                words[w][i] = lanes[w];
        }
        for (int w = 0; w < 4; w++) {
            uint8_t *at = small + (size_t)(2 * w) * block + o;
            for (int i = 0; i < 4; i++)
                words[w][i] = transpose_bytes(words[w][i]);
            transpose4(words[w]);
            store4(at, words[w][0]);
            store4(at + MP_PACK_SMALL, words[w][1]);
            store4(at + block, words[w][2]);
            store4(at + block + MP_PACK_SMALL, words[w][3]);
        }
    }
}

static void pack_q6_k(const rows *rows, int b, uint8_t *to) {
    const size_t block = BLOCK_Q6 + 2 * MP_PACK_SMALL;
    uint8_t *blocks = to + MP_PACK_HALVES;
    copy_halves(rows, b, 208, to);
    for (int half = 0; half < 2; half++)
        for (int o = 0; o < MP_PANEL_N; o += 4) {
            /* bytes 0-31 of the half: low nibbles are its block 0, high nibbles its block 2; bytes 32-63: blocks 1 and
             * 3 */
            for (int part = 0; part < 2; part++) {
                v4 low[4], high[4];
                for (int i = 0; i < 4; i++) {
                    const uint8_t *from = block_of(rows, o + i, b) + half * 64 + part * 32;
                    regroup_nibbles(load4(from), load4(from + 16), &low[i], &high[i]);
                }
                uint8_t *at = blocks + (size_t)(half * 4 + part) * block + MP_PACK_PAIRS + lane_at(o);
                store_lines(low, at);
                store_lines(high, at + 2 * block);
            }
        }
    pack_pairs(rows, b, 128, blocks, block, PAIRS_1);
    pack_scales16(rows, b, 192, NULL, blocks + BLOCK_Q6, block);
}

/* ---- codes ------------------------------------------------------------------------------------------------------- */

void mp_mxfp4_join(const uint8_t *scales, const uint8_t *codes, int64_t blocks, uint8_t *to) {
    typedef uint8_t bytes __attribute__((vector_size(8)));
    typedef uint16_t pairs __attribute__((vector_size(16)));
    for (int64_t b = 0; b < blocks; b++, codes += 16, to += 17) {
        bytes first, second;
        memcpy(&first, codes, 8);
        memcpy(&second, codes + 8, 8);
        const pairs a = __builtin_convertvector(first, pairs), z = __builtin_convertvector(second, pairs);
        const pairs joined = (a & 15) | ((z & 15) << 4) | ((a & 0xf0) << 4) | ((z & 0xf0) << 8);
        to[0] = scales[b];
        memcpy(to + 1, &joined, 16);
    }
}

static inline void put_half(uint8_t *halves, int o, uint16_t value) { memcpy(halves + 2 * o, &value, sizeof value); }

/* Types whose codes are laid out as those of Q4_0: move their bits without decoding. MoE experts are packed on every
 * use, so packing must be fast. */
static void pack_iq4_nl(const rows *rows, int b, uint8_t *to) {
    pack_nibbles(rows, b, 2, to);
    copy_halves(rows, b, 0, to + BLOCK_Q4);
}

static void pack_mxfp4(const rows *rows, int b, uint8_t *to) {
    pack_nibbles(rows, b, 1, to);
    for (int o = 0; o < MP_PANEL_N; o++)
        put_half(to + BLOCK_Q4, o, mp_bf16_from_f32(mp_mxfp4_scale(block_of(rows, o, b)[0])));
}

static void pack_iq4_xs(const rows *rows, int b, uint8_t *to) {
    copy_halves(rows, b, 0, to);
    for (int g = 0; g < 8; g++) {
        pack_nibbles(rows, b, 8 + 16 * g, to + HEAD_IQ + g * BLOCK_Q4);
        for (int o = 0; o < MP_PANEL_N; o++)
            to[MP_PACK_HALVES + g * MP_PACK_SMALL + o] = (uint8_t)(int8_t)mp_iq4_xs_factor(block_of(rows, o, b), g);
    }
}

/* Store the codes of a block of four outputs. codes[g]: one byte per code of group g. */
static inline void store_codes(int bits, const v4 *codes, uint8_t *to) {
    for (int j = 0; j < bits; j++) {
        v4 line;
        if (bits == 2)
            line = codes[4 * j] | codes[4 * j + 1] << 2 | codes[4 * j + 2] << 4 | codes[4 * j + 3] << 6;
        else if (bits == 3)
            line = codes[2 * j] | codes[2 * j + 1] << 4 | (codes[6] >> j & 0x01010101u) << 3 |
                   (codes[7] >> j & 0x01010101u) << 7;
        else
            line = codes[j] | codes[4 + j] << 4;
        store4(to + j * MP_PACK_STEP, line);
    }
}

/* Store the scales of output o of a superblock, whose head is `head`. */
static void put_scales(const pack_layout *layout, const mp_stored_block *stored, int o, uint8_t *head) {
    put_half(head, o, stored->d);
    for (int b = 0; b < 8; b++) {
        const float *factor = stored->factor + (layout->scales == SCALES_EIGHTHS ? b : 2 * b);
        uint8_t *small = head + MP_PACK_HALVES + b * MP_PACK_SMALL + o;
        if (layout->scales == SCALES_EIGHTHS)
            *small = (uint8_t)(8 * factor[0]);
        else if (layout->scales == SCALES_NIBBLES)
            *small = (uint8_t)((int)(4 * factor[0]) | (int)(4 * factor[1]) << 4);
    }
}

/* The f16 of a number that is zero or a positive normal f16. */
static uint16_t exact_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits ? (uint16_t)((bits >> 13) - ((127 - 15) << 10)) : 0;
}

/* Any type with codes: decode four outputs to one code per byte, then pack. */
static void pack_codes(const rows *rows, int b, uint8_t *to) {
    const pack_layout *layout = rows->layout;
    bool mins;
    const int items = mp_dtype_get(rows->dtype)->items, parts = 32 / mp_stored_block_group(rows->dtype, &mins);
    for (int o = 0; o < MP_PANEL_N; o += 4) {
        mp_stored_block stored[4];
        for (int i = 0; i < 4; i++) {
            mp_stored_block_read(rows->dtype, block_of(rows, o + i, b), &stored[i]);
            if (layout->head)
                put_scales(layout, &stored[i], o + i, to);
        }
        for (int part = 0; part < items / 32; part++) {
            uint8_t *block = to + layout->head + part * layout->block;
            v4 codes[8];
            for (int g = 0; g < 8; g++)
                for (int i = 0; i < 4; i++) {
                    uint32_t group;
                    memcpy(&group, stored[i].q + 32 * part + 4 * g, 4);
                    codes[g][i] = group;
                }
            store_codes(layout->bits, codes, block + lane_at(o));
            for (int i = 0; layout->scales == SCALES_HALVES && i < 4; i++)
                for (int h = 0; h < parts; h++)
                    put_half(block + BLOCK_Q4 + h * MP_PACK_HALVES, o + i,
                             exact_half(stored[i].scale[part * parts + h]));
        }
    }
}

static void pack_tq2_0(const rows *rows, int b, uint8_t *to) {
    copy_halves(rows, b, 64, to);
    pack_pairs(rows, b, 0, to + MP_PACK_HALVES, BLOCK_Q2, MP_PACK_STEP);
}

static void pack_q2_k(const rows *rows, int b, uint8_t *to) {
    const size_t block = BLOCK_Q2 + 2 * MP_PACK_SMALL;
    uint8_t *blocks = to + 2 * MP_PACK_HALVES;
    copy_halves(rows, b, 80, to);
    copy_halves(rows, b, 82, to + MP_PACK_HALVES);
    pack_pairs(rows, b, 16, blocks, block, MP_PACK_STEP);
    pack_scales16(rows, b, 0, NULL, blocks + BLOCK_Q2, block);
}

/* Words 1 to 3 hold 16 scales of 6 bits as the format lays them out, each + 32; word 0 belongs to the quants. */
static void expand_q3_k(v4 *words) {
    const v4 low = words[1], high = words[2], two = words[3];
    for (int w = 0; w < 4; w++) {
        const v4 four = (w & 1 ? high : low) >> (w < 2 ? 0 : 4) & 0x0f0f0f0fu;
        words[w] = (v4)((v16)(four | (two >> (2 * w) & 0x03030303u) << 4) - 32);
    }
}

static void pack_q3_k(const rows *rows, int b, uint8_t *to) {
    const size_t block = BLOCK_Q3 + 2 * MP_PACK_SMALL;
    uint8_t *blocks = to + MP_PACK_HALVES;
    copy_halves(rows, b, 108, to);
    pack_scales16(rows, b, 92, expand_q3_k, blocks + BLOCK_Q3, block);
    for (int half = 0; half < 2; half++)
        for (int o = 0; o < MP_PANEL_N; o += 4) {
            v4 pairs[8], bits[8], codes[8]; /* [g]: bits 2 r, 2 r + 1 and bit 4 half + r are those of block r */
            for (int h = 0; h < 2; h++) {
                for (int i = 0; i < 4; i++) {
                    pairs[4 * h + i] = load4(block_of(rows, o + i, b) + 32 + half * 32 + h * 16);
                    bits[4 * h + i] = load4(block_of(rows, o + i, b) + h * 16);
                }
                transpose4(pairs + 4 * h);
                transpose4(bits + 4 * h);
            }
            for (int r = 0; r < 4; r++) {
                for (int g = 0; g < 8; g++)
                    codes[g] = (pairs[g] >> (2 * r) & 0x03030303u) | (bits[g] >> (4 * half + r) & 0x01010101u) << 2;
                store_codes(3, codes, blocks + (size_t)(half * 4 + r) * block + lane_at(o));
            }
        }
}

/* ---- panels ------------------------------------------------------------------------------------------------------ */

static bool pack_takes(mp_wkind kind, mp_dtype dtype) {
    mp_wkind own;
    return mp_wmat_kind_for(dtype, MP_COMPUTE_AUTO, &own) && own == kind;
}

/* Bytes of a panel's rows that `fetch` reads at once; they fit the second-level cache. */
enum { FETCH_BYTES = 192 << 10 };

/* Touch blocks [b0, b1) of each row to bring them into the cache. */
static void fetch(const rows *rows, int b0, int b1) {
    for (int o = 0; o < MP_PANEL_N; o++) {
        const uint8_t *end = block_of(rows, o, b1);
        for (const uint8_t *at = block_of(rows, o, b0); at < end; at += MP_PACK_LINE)
            (void)*(const volatile uint8_t *)at;
    }
}

void mp_pack_quant(mp_wmat *w, const mp_tensor *src, int panel0, int panel1) {
    static const uint8_t zeros[256];
    const mp_dtype_row *row = mp_dtype_get(src->dtype);
    const bool fits = pack_takes(w->kind, src->dtype) && row->bytes <= (int)sizeof zeros;
    assert(fits);
    (void)fits;
    void (*pack)(const rows *rows, int b, uint8_t *to) = pack_codes;
    switch (w->kind) {
    case MP_W_Q4_0: pack = pack_q4_0; break;
    case MP_W_Q4_1: pack = pack_q4_1; break;
    case MP_W_Q5_0: pack = pack_q5_0; break;
    case MP_W_Q5_1: pack = pack_q5_1; break;
    case MP_W_Q8_0: pack = pack_q8_0; break;
    case MP_W_Q4_K: pack = pack_q4_k; break;
    case MP_W_Q5_K: pack = pack_q5_k; break;
    case MP_W_Q6_K: pack = pack_q6_k; break;
    case MP_W_Q2_K: pack = pack_q2_k; break;
    case MP_W_Q3_K: pack = pack_q3_k; break;
    default: break;
    }
    const pack_layout *layout = layout_of(w->kind);
    const size_t stride = (size_t)layout->head + (size_t)layout->block * (size_t)(row->items / 32);
    switch (src->dtype) {
    case MP_IQ4_NL: pack = pack_iq4_nl; break;
    case MP_IQ4_XS: pack = pack_iq4_xs; break;
    case MP_MXFP4: pack = pack_mxfp4; break;
    case MP_TQ2_0: pack = pack_tq2_0; break;
    default: break;
    }
    const int8_t *table = mp_stored_table(src->dtype);
    const int above = table_offset(w->kind);
    const int ahead = FETCH_BYTES / (MP_PANEL_N * row->bytes);
    for (int p = panel0; p < panel1; p++) {
        rows rows = {.dtype = src->dtype, .layout = layout};
        for (int o = 0; o < MP_PANEL_N; o++) {
            const int64_t n = (int64_t)p * MP_PANEL_N + o;
            rows.at[o] = n < w->N ? mp_tensor_row(src, n) : zeros;
            rows.step[o] = n < w->N ? (size_t)row->bytes : 0;
        }
        uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
        if (layout->start > 0)
            memset(panel, 0, (size_t)layout->start);
        for (int k = 0; layout->start > 0 && k < 16; k++)
            panel[k] = (uint8_t)(table[k] + above);
        const int blocks = w->K / row->items;
        for (int b = 0; b < blocks; b++) {
            if (b % ahead == 0)
                fetch(&rows, b, b + ahead < blocks ? b + ahead : blocks);
            pack(&rows, b, panel + (size_t)layout->start + (size_t)b * stride);
        }
    }
}

/* ---- reading back ------------------------------------------------------------------------------------------------ */

static bool is_halved(mp_wkind kind) {
    return kind == MP_W_Q2_K || kind == MP_W_Q3_K || kind == MP_W_Q6_K || kind == MP_W_IQ2_XS || kind == MP_W_NVFP4;
}

/* Codes of a block, or nibbles of a kind with more bits. */
static void view_codes(int bits, const uint8_t *block, int o, int32_t *q) {
    const uint8_t *lane = block + lane_at(o);
    for (int k = 0; k < 32; k++) {
        const uint8_t *byte = lane + k % 4;
        const int g = k / 4;
        if (bits == 2) {
            q[k] = byte[g / 4 * MP_PACK_STEP] >> (2 * (g % 4)) & 3;
        } else if (bits == 4) {
            q[k] = byte[g % 4 * MP_PACK_STEP] >> (g < 4 ? 0 : 4) & 15;
        } else if (g < 6) {
            q[k] = byte[g / 2 * MP_PACK_STEP] >> (4 * (g % 2)) & 7;
        } else {
            const int at = g == 6 ? 3 : 7;
            q[k] = (byte[0] >> at & 1) | (byte[MP_PACK_STEP] >> at & 1) << 1 | (byte[2 * MP_PACK_STEP] >> at & 1) << 2;
        }
    }
}

static void view_bits(const uint8_t *bits, int o, int32_t *q) {
    const uint8_t *lane = bits + lane_at(o);
    for (int k = 0; k < 32; k++)
        q[k] |= (lane[k % 4] >> (k / 4) & 1) << 4;
}

static void view_pairs(const uint8_t *pairs, int o, int32_t *q) {
    const uint8_t *lane = pairs + lane_at(o);
    for (int k = 0; k < 32; k++)
        q[k] |= (lane[k / 16 * PAIRS_1 + k % 4] >> (2 * (k / 4 % 4)) & 3) << 4;
}

static void view_bytes(const uint8_t *bytes, int o, int32_t *q) {
    const uint8_t *lane = bytes + lane_at(o);
    for (int k = 0; k < 32; k++)
        q[k] = lane[k / 4 * MP_PACK_STEP + k % 4] - 128;
}

static void subtract(int32_t *q, int offset) {
    for (int k = 0; k < 32; k++)
        q[k] -= offset;
}

/* Block b of a kind that pack_codes packs. head: of its superblock, if any. */
static void view_coded(mp_wkind kind, const uint8_t *panel, const uint8_t *head, const uint8_t *block, int b, int o,
                       mp_pack_view *view) {
    const pack_layout *layout = layout_of(kind);
    const float d = layout->head ? mp_half_load(head + 2 * o) : 0;
    const uint8_t *small = head + MP_PACK_HALVES + b % 8 * MP_PACK_SMALL + o;
    const uint8_t *after = block + layout->block - 2 * MP_PACK_SMALL + o, *halves = block + BLOCK_Q4 + 2 * o;
    view_codes(layout->bits, block, o, view->q);
    for (int k = 0; layout->start && k < 32; k++)
        view->q[k] = panel[view->q[k]];
    switch (kind) {
    case MP_W_Q2_K: break;
    case MP_W_Q3_K: subtract(view->q, 4); break;
    case MP_W_TQ: subtract(view->q, 1); break;
    default: subtract(view->q, table_offset(kind)); break;
    }
    view->mins = layout->scales == SCALES_MIXED;
    for (int h = 0; h < 32 / view->group; h++)
        switch (layout->scales) {
        case SCALES_MIXED:
            view->scale[h] = d * (float)(after[h * MP_PACK_SMALL] & 15);
            view->min[h] = -(mp_half_load(head + MP_PACK_HALVES + 2 * o) * (float)(after[h * MP_PACK_SMALL] >> 4));
            break;
        case SCALES_SIGNED: view->scale[h] = d * (float)(int8_t)after[h * MP_PACK_SMALL]; break;
        case SCALES_EIGHTHS: view->scale[h] = d * 0.125f * (float)*small; break;
        case SCALES_NIBBLES: view->scale[h] = d * (0.125f + 0.25f * (float)(*small >> (4 * h) & 15)); break;
        case SCALES_BYTES: view->scale[h] = d * (float)(int8_t)*small; break;
        case SCALES_HALVES: view->scale[h] = mp_half_load(halves + h * MP_PACK_HALVES); break;
        case SCALES_BF16: view->scale[h] = mp_bf16_to_f32((uint16_t)(halves[0] | halves[1] << 8)); break;
        default: view->scale[h] = d; break;
        }
}

void mp_pack_view_block(mp_wkind kind, const uint8_t *panel, int b, int o, mp_pack_view *view) {
    const pack_layout *layout = layout_of(kind);
    const uint8_t *block = panel + block_at(kind, b);
    const uint8_t *head = layout->per_head
                              ? block - (size_t)(b % layout->per_head) * (size_t)layout->block - layout->head : block;
    view->group = is_halved(kind) ? 16 : 32;
    view->mins = false;
    switch (kind) {
    case MP_W_Q4_0:
        view_codes(4, block, o, view->q);
        subtract(view->q, 8);
        view->scale[0] = mp_half_load(block + BLOCK_Q4 + 2 * o);
        break;
    case MP_W_Q5_0:
        view_codes(4, block + MP_PACK_BITS, o, view->q);
        view_bits(block, o, view->q);
        subtract(view->q, 16);
        view->scale[0] = mp_half_load(block + BLOCK_Q5 + 2 * o);
        break;
    case MP_W_Q8_0:
        view_bytes(block, o, view->q);
        view->scale[0] = mp_half_load(block + MP_PACK_BYTES + 2 * o);
        break;
    case MP_W_Q4_1:
    case MP_W_Q5_1: {
        const uint8_t *halves = block + (kind == MP_W_Q4_1 ? BLOCK_Q4 : BLOCK_Q5);
        view_codes(4, kind == MP_W_Q5_1 ? block + MP_PACK_BITS : block, o, view->q);
        if (kind == MP_W_Q5_1)
            view_bits(block, o, view->q);
        view->mins = true;
        view->scale[0] = mp_half_load(halves + 2 * o);
        view->min[0] = mp_half_load(halves + MP_PACK_HALVES + 2 * o);
        break;
    }
    case MP_W_Q4_K:
    case MP_W_Q5_K: {
        const uint8_t *small = block + (kind == MP_W_Q4_K ? BLOCK_Q4 : BLOCK_Q5);
        view_codes(4, kind == MP_W_Q5_K ? block + MP_PACK_BITS : block, o, view->q);
        if (kind == MP_W_Q5_K)
            view_bits(block, o, view->q);
        view->mins = true;
        view->scale[0] = mp_half_load(head + 2 * o) * (float)small[o];
        view->min[0] = -(mp_half_load(head + MP_PACK_HALVES + 2 * o) * (float)small[MP_PACK_SMALL + o]);
        break;
    }
    case MP_W_Q6_K:
        view_codes(4, block + MP_PACK_PAIRS, o, view->q);
        view_pairs(block, o, view->q);
        subtract(view->q, 32);
        for (int h = 0; h < 2; h++)
            view->scale[h] = mp_half_load(head + 2 * o) * (float)(int8_t)block[BLOCK_Q6 + h * MP_PACK_SMALL + o];
        break;
    default: view_coded(kind, panel, head, block, b, o, view); break;
    }
}

void mp_pack_quant_row(const mp_wmat *w, int32_t n, float *out) {
    const uint8_t *panel = w->data + (size_t)(n / MP_PANEL_N) * w->panel_bytes;
    mp_pack_view view;
    for (int b = 0; b < w->K / 32; b++) {
        mp_pack_view_block(w->kind, panel, b, n % MP_PANEL_N, &view);
        for (int k = 0; k < 32; k++) {
            float scaled = view.scale[k / view.group] * (float)view.q[k];
            out[b * 32 + k] = view.mins ? scaled + view.min[k / view.group] : scaled;
        }
    }
}
