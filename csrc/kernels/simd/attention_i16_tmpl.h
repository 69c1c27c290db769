/* attention_i16_tmpl.h: attention over a cache of I16 or I8 blocks. Template: include after a vec_*.h. kernels.h
 * defines the results.
 *
 * As in attention_tmpl.h, both halves are "rows of numbers times rows of vectors", here with pairs of 16-bit integers:
 *
 *     sum[r][lanes] = over pairs k of a[r][k][0] * b[k][lanes][0] + a[r][k][1] * b[k][lanes][1]
 *
 * Scores: pairs of components, lanes = keys. Output: pairs of tokens, lanes = components. The sums are exact, so their
 * order is free and one function (i16_step) computes both. Only the softmax between them (i16_softmax) must sum in a
 * fixed order.
 *
 * I8 blocks differ in one place: i16_step widens their bytes to 16 bits and multiplies them by the multipliers of their
 * groups. A row of keys has its pairs of a group one after the other, so the multipliers of 16 keys stay in a register
 * for 16 pairs. A row of values has the same multiplier in all lanes of two vectors. */
#ifndef MP_KERNELS_SIMD_ATTENTION_I16_TMPL_H
#define MP_KERNELS_SIMD_ATTENTION_I16_TMPL_H

#include <assert.h>
#include <math.h>
#include <string.h>

#include "kernels/attention_scratch.h"
#include "kernels/simd/attention_kv_tmpl.h"
#include "kernels/simd/vmath_tmpl.h"
#include "kernels/variants.h"

/* ---- products ---- */

enum { I16_ROWS = 6 }; /* rows of a tile */

typedef enum i16_kind {
    I16_WORDS,       /* I16 */
    I16_NEAR_WORDS,  /* I16 whose blocks need no prefetch, with rows `a` at equal distances */
    I16_KEY_BYTES,   /* keys of I8 */
    I16_VALUE_BYTES, /* values of I8 */
} i16_kind;

/* A tile's share of the next block: the part that this tile prefetches while other tiles prefetch the rest. The tile
 * spreads the prefetches evenly over its pairs, because faster prefetching would make it wait for memory. The lines go
 * to L2, because this block and the scores fill L1. */
typedef struct i16_share {
    const int8_t *at, *end;
    int64_t step; /* bytes for every two pairs */
} i16_share;

static VEC_INLINE const int8_t *i16_prefetch(const i16_share *share, const int8_t *at) {
    const int8_t *end = share->end - at < share->step ? share->end : at + share->step;
    for (; at < end; at += 64)
        vec_prefetch_far(at);
    return at;
}

typedef struct i16_source {
    const int8_t *data;
    int64_t ld;                /* pairs between rows */
    const int8_t *next;        /* the same rows of the following block, to prefetch; or NULL */
    const int8_t *multipliers; /* I8: those of the block (kernels.h) */
    i16_share *share;          /* or NULL */
} i16_source;

/* Compute columns of vecs [v, vecs) in steps of V vecs, while V vecs remain. Returns the first vec not computed. */
static VEC_INLINE int i16_step(const i16_kind kind, const int R, const int V, const int16_t *const *a,
                               const i16_source *b, int from, int to, int v, int vecs, bool add, float *out,
                               int64_t ld) {
    enum { GROUP_PAIRS = MP_I8_GROUP / 2, GROUP_VECS = MP_I8_GROUP / VEC_N };
    const bool words = kind == I16_WORDS || kind == I16_NEAR_WORDS, far = kind != I16_NEAR_WORDS;
    const int64_t between = !far && R > 1 ? a[1] - a[0] : 0;
    const int pair = words ? 4 : 2, vec_bytes = pair * VEC_N; /* bytes */
    for (; v + V <= vecs; v += V) {
        const int8_t *at = b->data + pair * (from * b->ld + v * VEC_N);
        const int8_t *next = far && b->next ? b->next + pair * (from * b->ld + v * VEC_N) : NULL;
        const int8_t *ahead = far && b->share ? b->share->at : NULL;
        const int16_t *row[I16_ROWS];
        veci sum[I16_ROWS * 4], multiplier[4];
        VEC_UNROLL
        for (int r = 0; r < R; r++)
            row[r] = far ? a[r] : a[0] + r * between; /* fewer registers than R pointers */
        VEC_UNROLL
        for (int i = 0; i < R * V; i++)
            sum[i] = veci_zero();
        for (int k = from, end; k < to;) {
            end = to;
            if (kind == I16_KEY_BYTES) {
                const int group = k / GROUP_PAIRS;
                end = to < (group + 1) * GROUP_PAIRS ? to : (group + 1) * GROUP_PAIRS;
                VEC_UNROLL
                for (int i = 0; i < V; i++)
                    multiplier[i] = veci_twice_8(b->multipliers + group * MP_KV_BLOCK + (v + i) * VEC_N);
            }
            for (; k < end; k++, at += pair * b->ld) {
                veci x[4];
                VEC_UNROLL
                for (int i = 0; kind == I16_VALUE_BYTES && i < V; i++)
                    multiplier[i] = i % GROUP_VECS
                                    ? multiplier[i - 1] /* with V > 1, v is a multiple of GROUP_VECS */
                                    : veci_spread_8(b->multipliers + (v + i) / GROUP_VECS * MP_KV_BLOCK + 2 * k);
                VEC_UNROLL
                for (int i = 0; i < V; i++)
                    x[i] = words ? veci_load((const int16_t *)(const void *)(at + i * vec_bytes))
                                 : veci_times_16(veci_load_8(at + i * vec_bytes), multiplier[i]);
                if (next) {
                    VEC_UNROLL
                    for (int i = 0; i < V; i += 64 / vec_bytes) /* once per cache line */
                        vec_prefetch(next + i * vec_bytes);
                    next += pair * b->ld;
                } else if (ahead && (k - from) % 2 == 0) {
                    ahead = i16_prefetch(b->share, ahead);
                }
                VEC_UNROLL
                for (int r = 0; r < R; r++) {
                    const veci y = veci_spread(row[r] + 2 * k);
                    VEC_UNROLL
                    for (int i = 0; i < V; i++)
                        sum[r * V + i] = veci_dot(sum[r * V + i], x[i], y);
                }
            }
        }
        if (ahead)
            b->share->at = ahead;
        VEC_UNROLL
        for (int i = 0; i < R * V; i++) {
            float *to_sum = out + i / V * ld + (v + i % V) * VEC_N;
            const vec f = veci_to_float(sum[i]);
            vec_store(to_sum, add ? vec_add(vec_load(to_sum), f) : f);
        }
    }
    return v;
}

static VEC_INLINE void i16_tile(const i16_kind kind, const int R, const int16_t *const *a, const i16_source *b,
                                int from, int to, int v, int vecs, bool add, float *out, int64_t ld) {
    if (R * 4 <= VEC_ACCUMULATORS)
        v = i16_step(kind, R, 4, a, b, from, to, v, vecs, add, out, ld);
    if (R * 2 <= VEC_ACCUMULATORS)
        v = i16_step(kind, R, 2, a, b, from, to, v, vecs, add, out, ld);
    i16_step(kind, R, 1, a, b, from, to, v, vecs, add, out, ld);
}

/* Set out[r * ld + c] to the sum over pairs [from, to), as a float, for the columns c of vecs [v, vecs). If `add`, add
 * the sum to out instead. */
typedef void i16_products(int rows, const int16_t *const *a, const i16_source *b, int from, int to, int v, int vecs,
                          bool add, float *out, int64_t ld);

static VEC_INLINE void i16_tiles(const i16_kind kind, int rows, const int16_t *const *a, const i16_source *b, int from,
                                 int to, int v, int vecs, bool add, float *out, int64_t ld) {
#define I16_RUN(R)                                                \
    case R:                                                       \
        i16_tile(kind, R, a, b, from, to, v, vecs, add, out, ld); \
        break;
    switch (rows) {
        I16_RUN(1)
        I16_RUN(2)
        I16_RUN(3)
        I16_RUN(4)
        I16_RUN(5)
        I16_RUN(6)
    default:
        assert(false);
    }
#undef I16_RUN
}

#define I16_PRODUCTS(name, kind)                                                                                  \
    static MP_NOINLINE void name(int rows, const int16_t *const *a, const i16_source *b, int from, int to, int v, \
                                 int vecs, bool add, float *out, int64_t ld) {                                    \
        i16_tiles(kind, rows, a, b, from, to, v, vecs, add, out, ld);                                             \
    }
I16_PRODUCTS(i16_word_products, I16_WORDS)
I16_PRODUCTS(i16_near_products, I16_NEAR_WORDS)
I16_PRODUCTS(i16_key_products, I16_KEY_BYTES)
I16_PRODUCTS(i16_value_products, I16_VALUE_BYTES)
#undef I16_PRODUCTS

/* Rows of the next tile when `rows` remain: as few tiles as possible, of nearly equal height. */
static VEC_INLINE int i16_tile_rows(int rows) {
    const int tiles = (rows + I16_ROWS - 1) / I16_ROWS;
    return (rows + tiles - 1) / tiles;
}

/* ---- storing ---- */

/* Returns the greatest magnitude of a row; NaN if a component is NaN. */
static VEC_INLINE float i16_greatest(const float *x, int n) {
    vec top = vec_zero();
    int i = 0;
    for (; i + VEC_N <= n; i += VEC_N)
        top = vec_max_bits(vec_abs(vec_load(x + i)), top);
    if (i < n)
        top = vec_max_bits(vec_abs(vec_load_n(x + i, n - i)), top);
    return vec_top_bits(top);
}

/* Returns the factor that converts a row to integers (0: the integers are 0), and sets the row's *scale. */
static VEC_INLINE float i16_factor(const float *x, int n, int most, float *scale) {
    const float max = i16_greatest(x, n);
    *scale = max < INFINITY ? max < MP_I16_MIN ? 0.0f : max / (float)most : NAN;
    return max < INFINITY && max >= MP_I16_MIN ? (float)most / max : 0.0f;
}

/* Returns x * factor, rounded to integers in the low bits of each lane; zeros if factor is 0, even for NaN. */
static VEC_INLINE vec i16_round(vec x, float factor) {
    const vec magic = vec_set(MP_ROUND_MAGIC);
    return factor == 0.0f ? magic : vec_fma(x, vec_set(factor), magic);
}

static void attn_attn_query_i16(float *q, int k_dim) {
    assert(k_dim % 2 == 0);
    float scale;
    const float factor = i16_factor(q, k_dim, MP_I16_KEY, &scale);
    int16_t *to = (int16_t *)(void *)q;
    int d = 0;
    for (; d + VEC_N <= k_dim; d += VEC_N) /* in place: a write never reaches unread input */
        vec_store_low16(to + d, i16_round(vec_load(q + d), factor));
    if (d < k_dim) {
        int16_t part[VEC_N];
        vec_store_low16(part, i16_round(vec_load_n(q + d, k_dim - d), factor));
        memcpy(to + d, part, sizeof *part * (size_t)(k_dim - d));
    }
    memcpy(to + k_dim, &scale, sizeof scale);
}

static VEC_INLINE float *i16_scales(void *block, int dim, int width) { /* width: bytes of an integer */
    return (float *)(void *)((int8_t *)block + MP_KV_BLOCK * dim * width);
}

static VEC_INLINE int8_t *i8_multipliers(void *block, int dim) {
    return (int8_t *)block + MP_KV_BLOCK * (dim + (int)sizeof(float));
}

static void attn_kv_store_i16(const float *k, const float *v, int k_dim, int v_dim, int slot, void *k_block,
                              void *v_block) {
    assert(0 <= slot && slot < MP_KV_BLOCK && k_dim % 2 == 0 && v_dim % VEC_N == 0);
    float factor = i16_factor(k, k_dim, MP_I16_KEY, i16_scales(k_block, k_dim, 2) + slot);
    int16_t *column = (int16_t *)k_block + 2 * slot;
    int16_t part[VEC_N];
    int d = 0;
    for (; d + VEC_N <= k_dim; d += VEC_N, column += VEC_N * MP_KV_BLOCK) {
        vec_store_low16(part, i16_round(vec_load(k + d), factor));
        VEC_UNROLL
        for (int i = 0; i < VEC_N / 2; i++)
            memcpy(column + 2 * i * MP_KV_BLOCK, part + 2 * i, 2 * sizeof *part);
    }
    if (d < k_dim)
        vec_store_low16(part, i16_round(vec_load_n(k + d, k_dim - d), factor));
    for (int i = 0; i < (k_dim - d) / 2; i++)
        memcpy(column + 2 * i * MP_KV_BLOCK, part + 2 * i, 2 * sizeof *part);
    factor = i16_factor(v, v_dim, MP_I16_VALUE, i16_scales(v_block, v_dim, 2) + slot);
    int16_t *row = (int16_t *)v_block + slot / 2 * 2 * v_dim + slot % 2;
    for (d = 0; d < v_dim; d += VEC_N)
        vec_store_low16_strided(row + 2 * d, i16_round(vec_load(v + d), factor));
}

/* Prefetch rows [from, to) of `dim` floats. */
static VEC_INLINE void i16_fetch(const float *x, int64_t ld, int dim, int from, int to) {
    for (int t = from; t < to; t++)
        for (int d = 0; d < dim; d += VEC_N)
            vec_prefetch(x + t * ld + d);
}

/* Convert n floats from x on, at most VEC_N of which exist, to integers in the low bits of each lane. */
static VEC_INLINE vec i16_round_n(const float *x, int n, float factor) {
    return i16_round(n >= VEC_N ? vec_load(x) : vec_load_n(x, n), factor);
}

/* Fill the keys of a block: 8 tokens at a time, whose pairs are transposed like floats. The rows of the next 8 keys and
 * of the values are prefetched meanwhile, because they are far apart. */
static VEC_INLINE void i16_fill_keys(const float *k, const float *v, int64_t ld, int dim, int n, void *block) {
    i16_fetch(k, ld, dim, 0, n < 8 ? n : 8);
    const int k_dim = (dim + 1) / 2 * 2;
    float *scale = i16_scales(block, k_dim, 2);
    for (int t = 0; t < n; t += 8) {
        const int rows = n - t < 8 ? n - t : 8;
        float factor[8];
        _Alignas(64) float pairs[8][8] = {{0}}; /* gcc 12 under ASan would assume this alignment without giving it */
        i16_fetch(k, ld, dim, t + 8, n < t + 16 ? n : t + 16);
        i16_fetch(v, ld, dim, t, t + rows);
        for (int r = 0; r < rows; r++)
            factor[r] = i16_factor(k + (t + r) * ld, dim, MP_I16_KEY, scale + t + r);
        for (int d = 0; d < k_dim; d += VEC_N) {
            for (int r = 0; r < rows; r++) {
                int16_t part[VEC_N];
                vec_store_low16(part, i16_round_n(k + (t + r) * ld + d, dim - d, factor[r]));
                memcpy(pairs[r], part, sizeof part);
            }
            float *to = (float *)block + d / 2 * MP_KV_BLOCK + t;
            if (k_dim - d >= VEC_N)
                vec_transpose8(pairs[0], 8, 8, to, MP_KV_BLOCK);
            else
                for (int i = 0; i < (k_dim - d) / 2; i++)
                    for (int r = 0; r < 8; r++)
                        to[i * MP_KV_BLOCK + r] = pairs[r][i];
        }
    }
}

static void attn_kv_fill_i16(const float *k, const float *v, int64_t ld, int dim, int n, void *k_block, void *v_block) {
    assert(0 < n && n <= MP_KV_BLOCK && dim > 0);
    const int v_dim = mp_kv_width(dim);
    if (n < MP_KV_BLOCK) {
        memset(k_block, 0, mp_kv_bytes(MP_I16, (dim + 1) / 2 * 2));
        memset(v_block, 0, mp_kv_bytes(MP_I16, v_dim));
    }
    i16_fill_keys(k, v, ld, dim, n, k_block);
    float *scale = i16_scales(v_block, v_dim, 2);
    for (int t = 0; t < n; t += 2, v += 2 * ld) {
        const bool pair = t + 1 < n;
        const float even = i16_factor(v, dim, MP_I16_VALUE, scale + t);
        const float odd = pair ? i16_factor(v + ld, dim, MP_I16_VALUE, scale + t + 1) : 0.0f;
        int16_t *to = (int16_t *)v_block + t * v_dim;
        for (int d = 0; d < v_dim; d += VEC_N) {
            const vec second = pair ? i16_round_n(v + ld + d, dim - d, odd) : vec_zero();
            vec_store_low16_pairs(to + 2 * d, i16_round_n(v + d, dim - d, even), second);
        }
    }
}

/* Store a row of n floats in a slot of an I8 block: pairs of bytes `pair_step` apart, the bytes of a pair `byte_step`
 * apart. `to` is the first byte. */
static VEC_INLINE void i8_store(const float *x, int n, int most, int slot, void *block, int8_t *to, int64_t pair_step,
                                int64_t byte_step) {
    const float factor = i16_factor(x, n, MP_I8_MAX * most, i16_scales(block, n, 1) + slot);
    int8_t *by = i8_multipliers(block, n) + slot;
    for (int d = 0; d < n; d += MP_I8_GROUP, by += MP_KV_BLOCK) {
        const int count = n - d < MP_I8_GROUP ? n - d : MP_I8_GROUP;
        int16_t part[MP_I8_GROUP];
        *by = (int8_t)mp_i8_multiplier(i16_greatest(x + d, count), factor, most);
        for (int i = 0; i < count; i += VEC_N) {
            const int left = count - i < VEC_N ? count - i : VEC_N;
            vec_store_low16(part + i, i16_round(vec_load_n(x + d + i, left), factor / (float)*by));
        }
        for (int i = 0; i < count; i++)
            to[(d + i) / 2 * pair_step + (d + i) % 2 * byte_step] = (int8_t)part[i];
    }
}

static void attn_kv_store_i8(const float *k, const float *v, int k_dim, int v_dim, int slot, void *k_block,
                             void *v_block) {
    assert(0 <= slot && slot < MP_KV_BLOCK && k_dim % 2 == 0 && v_dim % VEC_N == 0);
    i8_store(k, k_dim, MP_I8_KEY, slot, k_block, (int8_t *)k_block + 2 * slot, 2 * MP_KV_BLOCK, 1);
    i8_store(v, v_dim, MP_I8_VALUE, slot, v_block, (int8_t *)v_block + slot / 2 * 2 * v_dim + slot % 2, 4, 2);
}

/* ---- a block ---- */

/* Per-lane maxima and sums of the scores of 16 rows, one vec per row. */
typedef struct i16_lanes {
    _Alignas(64) float top[VEC_N][VEC_N], sum[VEC_N][VEC_N];
} i16_lanes;

typedef struct i16_rows { /* the query rows of a call and their intermediate results in one block */
    const mp_attn_kv *a;
    int width; /* bytes of an integer of a block: 2 (I16) or 1 (I8) */
    i16_products *key_products, *value_products;
    int n;
    const int16_t *q[MP_ATTN_ROWS];
    int token[MP_ATTN_ROWS];                 /* row of the call that a query belongs to */
    float f[MP_ATTN_ROWS], f2[MP_ATTN_ROWS]; /* factors of a query's scores: for m, and for exp2 */
    float capped[MP_ATTN_ROWS];              /* with a softcap: f before the cap */
    float *s;                                /* [n, MP_KV_BLOCK] scores, then weights */
    int16_t *p;                              /* [n, MP_KV_BLOCK] integer weights */
    float *m, *l, *by;                       /* [n up to 16] */
    bool whole;                              /* every row sees the whole block */
    i16_lanes lanes;
} i16_rows;

static VEC_INLINE void i16_begin(const mp_attn_kv *a, int width, int rows, i16_rows *x) {
    x->a = a;
    x->width = width;
    i16_products *const words = a->near ? i16_near_products : i16_word_products;
    x->key_products = width == 1 ? i16_key_products : words;
    x->value_products = width == 1 ? i16_value_products : words;
    x->n = rows * a->group;
    for (int r = 0, i = 0; r < rows; r++)
        for (int g = 0; g < a->group; g++, i++) {
            float scale;
            x->token[i] = r;
            x->q[i] = (const int16_t *)(const void *)(a->q + r * a->ldq + g * a->ldq_group);
            memcpy(&scale, x->q[i] + a->k_dim, sizeof scale);
            x->f[i] = scale * a->scale;
            if (a->softcap > 0.0f) {
                x->capped[i] = x->f[i];
                x->f[i] = 1.0f;
            }
            x->f2[i] = x->f[i] * MP_LOG2E;
        }
    for (int i = x->n; i % VEC_N > 0; i++)
        x->f[i] = x->f2[i] = 0.0f;
    for (int r = x->n; r < VEC_N; r++) { /* no query fills these rows, but reductions of 16 rows read them */
        vec_store(x->lanes.top[r], vec_zero());
        vec_store(x->lanes.sum[r], vec_zero());
    }
}

/* Slots that any of the `rows` rows from i on sees. The first row sees the oldest slot, the last row the newest. */
static VEC_INLINE void i16_visible(const i16_rows *x, int i, int rows, int block, int *from, int *to) {
    int unused;
    *from = 0;
    *to = MP_KV_BLOCK;
    if (!x->whole) {
        kv_visible(x->a, x->token[i], block, from, &unused);
        kv_visible(x->a, x->token[i + rows - 1], block, &unused, to);
    }
}

/* Set x->whole for a block. Returns false if no row sees any slot of the block. */
static VEC_INLINE bool i16_set_block(i16_rows *x, int block) {
    int oldest, newest, from, to;
    kv_visible(x->a, 0, block, &oldest, &to);
    kv_visible(x->a, x->token[x->n - 1], block, &from, &newest);
    x->whole = from == 0 && to == MP_KV_BLOCK;
    return oldest < newest;
}

/* next: the only tile of a block is to prefetch the next block, which exists; several tiles prefetch shares of it */
static VEC_INLINE i16_source i16_from(void *const *blocks, int block, int dim, int64_t ld, bool next) {
    return (i16_source){blocks[block], ld, next ? blocks[block + 1] : NULL, i8_multipliers(blocks[block], dim), NULL};
}

/* Returns the share of rows [i, i + rows) of n in the next block of `bytes` bytes, for a tile of 2 * steps pairs. */
static VEC_INLINE i16_share i16_share_of(const int8_t *next, int64_t bytes, int i, int rows, int n, int64_t steps) {
    const int64_t from = bytes / 64 * i / n, to = bytes / 64 * (i + rows) / n;
    return (i16_share){next + 64 * from, next + 64 * to, 64 * ((to - from + steps - 1) / steps)};
}

/* Returns how often a tile of `rows` rows walks through its pairs to compute `vecs` vecs. */
static VEC_INLINE int i16_walks(int rows, int vecs) {
    const int most = rows * 4 <= VEC_ACCUMULATORS ? 4 : rows * 2 <= VEC_ACCUMULATORS ? 2 : 1;
    return (vecs + most - 1) / most;
}

static VEC_INLINE void i16_scores(const i16_rows *x, int block, bool more) {
    const mp_attn_kv *a = x->a;
    const int pairs = a->k_dim / 2;
    i16_source k = i16_from(a->k_blocks, block, a->k_dim, MP_KV_BLOCK, more && x->n <= I16_ROWS);
    for (int i = 0, R; i < x->n; i += R) {
        int from, to;
        R = i16_tile_rows(x->n - i);
        i16_visible(x, i, R, block, &from, &to);
        const int first = from / VEC_N, last = (to + VEC_N - 1) / VEC_N;
        i16_share share;
        if (more && R < x->n && from < to) {
            share = i16_share_of(a->k_blocks[block + 1], (int64_t)MP_KV_BLOCK * a->k_dim * x->width, i, R, x->n,
                                 (int64_t)i16_walks(R, last - first) * ((pairs + 1) / 2));
            k.share = &share;
        }
        for (int d = 0; d < pairs && from < to; d += MP_I16_DEPTH / 2) {
            const int end = pairs - d < MP_I16_DEPTH / 2 ? pairs : d + MP_I16_DEPTH / 2;
            x->key_products(R, x->q + i, &k, d, end, first, last, d > 0, x->s + (int64_t)i * MP_KV_BLOCK,
                            MP_KV_BLOCK);
        }
    }
}

/* exp2 for y <= 0. NaN stays NaN. */
static VEC_INLINE vec i16_exp2(vec y) {
    const vec magic = vec_set(MP_ROUND_MAGIC);
    y = vec_max(vec_set(MP_EXP2_LO), y);
    const vec t = vec_add(y, magic), r = vec_sub(y, vec_sub(t, magic));
    vec p = vec_fma(vec_set(MP_EXP2_D4), r, vec_set(MP_EXP2_D3));
    p = vec_fma(p, r, vec_set(MP_EXP2_D2));
    p = vec_fma(p, r, vec_set(MP_EXP2_D1));
    p = vec_fma(p, r, vec_set(1.0f));
    return vec_scale_exponent(p, t); /* the low bits of t are 0 for a NaN */
}

/* Maxima of a row's scores, per lane. whole: all slots are visible. */
static VEC_INLINE void i16_top(const bool whole, const float *s, const float *sk, int from, int to, float *lanes) {
    const vec lowest = vec_set(-INFINITY);
    vec top = lowest;
    VEC_UNROLL
    for (int t = 0; t < MP_KV_BLOCK; t += VEC_N) {
        if (!whole && (t + VEC_N <= from || t >= to))
            continue;
        const vec x = vec_mul(vec_load(s + t), vec_load(sk + t));
        top = vec_max(whole ? x : vec_select(vec_lanes(from - t, to - t), x, lowest), top);
    }
    vec_store(lanes, top);
}

/* Replace scores by weights. Also compute the per-lane sums of the probabilities and maxima of the weights. */
static VEC_INLINE void i16_weights(const bool whole, float *s, const float *sk, const float *sv, int from, int to,
                                   float f2, float center, float *sums, float *tops) {
    const vec by = vec_set(f2), most = vec_set(center);
    vec sum = vec_zero(), top = vec_zero();
    VEC_UNROLL
    for (int t = 0; t < MP_KV_BLOCK; t += VEC_N) {
        if (!whole && (t + VEC_N <= from || t >= to))
            continue;
        const vec x = vec_mul(vec_load(s + t), vec_load(sk + t));
        vec p = i16_exp2(vec_mul(vec_sub(x, most), by)), w = vec_mul(p, vec_load(sv + t));
        if (!whole) {
            const vmask seen = vec_lanes(from - t, to - t);
            p = vec_select(seen, p, vec_zero());
            w = vec_select(seen, w, vec_zero());
        }
        vec_store(s + t, w);
        sum = vec_add(sum, p);
        top = vec_max_bits(w, top);
    }
    vec_store(sums, sum);
    vec_store(tops, top);
}

static VEC_INLINE void i16_integers(const bool whole, const float *w, int from, int to, float inverse, int16_t *p) {
    const vec by = vec_set(inverse), magic = vec_set(MP_ROUND_MAGIC);
    VEC_UNROLL
    for (int t = 0; t < MP_KV_BLOCK; t += VEC_N) {
        const bool seen = whole || (t + VEC_N > from && t < to);
        vec_store_low16(p + t, seen ? vec_fma(vec_load(w + t), by, magic) : vec_zero());
    }
}

/* Softmax of at most N rows from `base` on. Each step runs for all rows before the next step starts. */
static VEC_INLINE void i16_softmax_rows(const int N, const bool whole, i16_rows *x, int base, int block,
                                        const float *sk, const float *sv) {
    const int rows = x->n - base < N ? x->n - base : N;
    int from[VEC_N], to[VEC_N];
    float center[VEC_N], by[VEC_N], inverse[VEC_N];
    float *s = x->s + (int64_t)base * MP_KV_BLOCK, *m = x->m + base, *l = x->l + base;
    i16_lanes *lanes = &x->lanes;
    for (int r = 0; r < rows; r++) {
        if (!whole)
            kv_visible(x->a, x->token[base + r], block, from + r, to + r);
        i16_top(whole, s + r * MP_KV_BLOCK, sk, from[r], to[r], lanes->top[r]);
    }
    const vec top = vec_each_top(N, lanes->top[0]);
    const vec greatest = vec_fma(top, vec_load(x->f + base), vec_zero()); /* adding 0 turns -0 into +0 */
    vec_store(m, greatest);
    vec_store(center, top);
    vec_store(by, vec_add(vec_load(x->f2 + base), vec_sub(greatest, greatest))); /* NaN if `greatest` is infinite */
    for (int r = 0; r < rows; r++)
        i16_weights(whole, s + r * MP_KV_BLOCK, sk, sv, from[r], to[r], by[r], center[r], lanes->sum[r],
                    lanes->top[r]);
    vec_store(l, vec_each_sum(N, lanes->sum[0]));
    const vec most = vec_each_top_bits(N, lanes->top[0]), weight = vec_set((float)MP_I16_WEIGHT), zero = vec_zero();
    const vmask finite = vec_less(most, vec_set(INFINITY)), tiny = vec_less(most, vec_set(MP_I16_MIN));
    vec_store(inverse, vec_select(tiny, zero, vec_select(finite, vec_div(weight, most), zero)));
    vec_store(x->by + base, vec_select(tiny, zero, vec_select(finite, vec_div(most, weight), vec_set(NAN))));
    for (int r = 0; r < rows; r++) {
        if (!whole && from[r] >= to[r])
            m[r] = -INFINITY; /* l and the weights are 0 */
        i16_integers(whole, s + r * MP_KV_BLOCK, from[r], to[r], inverse[r], x->p + (int64_t)(base + r) * MP_KV_BLOCK);
    }
}

/* Multiply scores by the scales of their keys and apply the softcap. */
static MP_NOINLINE void i16_softcap(const i16_rows *x, int block, const float *sk) {
    const vec cap = vec_set(x->a->softcap);
    for (int i = 0; i < x->n; i++) {
        float *s = x->s + (int64_t)i * MP_KV_BLOCK;
        int from, to;
        i16_visible(x, i, 1, block, &from, &to);
        for (int t = from / VEC_N * VEC_N; t < to; t += VEC_N) {
            const vec y = vec_mul(vec_mul(vec_load(s + t), vec_load(sk + t)), vec_set(x->capped[i]));
            vec_store(s + t, vec_softcap(cap, y));
        }
    }
}

static MP_NOINLINE void i16_softmax(i16_rows *x, int block) {
    const float *sk = i16_scales(x->a->k_blocks[block], x->a->k_dim, x->width);
    const float *sv = i16_scales(x->a->v_blocks[block], x->a->v_dim, x->width);
    static const float ones[MP_KV_BLOCK] = {
#define ONES8 1, 1, 1, 1, 1, 1, 1, 1
        ONES8, ONES8, ONES8, ONES8, ONES8, ONES8, ONES8, ONES8,
#undef ONES8
    };
    if (x->a->softcap > 0.0f) {
        i16_softcap(x, block, sk);
        sk = ones;
    }
    for (int i = 0; i < x->n; i += VEC_N) {
        if (x->whole && x->n - i > 4)
            i16_softmax_rows(16, true, x, i, block, sk, sv);
        else if (x->whole)
            i16_softmax_rows(4, true, x, i, block, sk, sv);
        else
            i16_softmax_rows(16, false, x, i, block, sk, sv);
    }
}

/* Multiply the integer weights of `rows` rows from i on by the values of the block: out [rows, v_dim]. */
static VEC_INLINE void i16_output(const i16_rows *x, int i, int rows, int block, bool more, float *out) {
    const mp_attn_kv *a = x->a;
    const int16_t *p[I16_ROWS];
    const int vecs = a->v_dim / VEC_N;
    i16_source v = i16_from(a->v_blocks, block, a->v_dim, a->v_dim, more && x->n <= I16_ROWS);
    i16_share share;
    int from, to;
    for (int r = 0; r < rows; r++)
        p[r] = x->p + (int64_t)(i + r) * MP_KV_BLOCK;
    i16_visible(x, i, rows, block, &from, &to);
    const int first = from / 2, last = (to + 1) / 2;
    if (more && rows < x->n && first < last) {
        share = i16_share_of(a->v_blocks[block + 1], (int64_t)MP_KV_BLOCK * a->v_dim * x->width, i, rows, x->n,
                             (int64_t)i16_walks(rows, vecs) * ((last - first + 1) / 2));
        v.share = &share;
    }
    x->value_products(rows, p, &v, first, last, 0, vecs, false, out, a->v_dim);
}

static MP_NOINLINE void i16_attend_block(const mp_attn_kv *a, int width, int rows, int block, mp_attn_partial *out) {
    kv_check(a, rows);
    _Alignas(64) float s[MP_ATTN_ROWS * MP_KV_BLOCK], m[MP_ATTN_ROWS], l[MP_ATTN_ROWS], by[MP_ATTN_ROWS];
    _Alignas(64) int16_t p[MP_ATTN_ROWS * MP_KV_BLOCK];
    i16_rows x;
    i16_begin(a, width, rows, &x);
    x.s = s;
    x.p = p;
    x.m = m;
    x.l = l;
    x.by = by;
    /* prefetch the next block if any row sees it, because callers usually continue with that block */
    const bool more = kv_continues(a, rows, block);
    i16_set_block(&x, block);
    i16_scores(&x, block, more);
    i16_softmax(&x, block);
    for (int i = 0, R; i < x.n; i += R) {
        float *o = out->o + (int64_t)i * a->v_dim;
        R = i16_tile_rows(x.n - i);
        i16_output(&x, i, R, block, more, o);
        for (int r = 0; r < R; r++, o += a->v_dim)
            for (int d = 0; d < a->v_dim; d += VEC_N)
                vec_store(o + d, vec_mul(vec_load(o + d), vec_set(by[i + r])));
    }
    memcpy(out->m, m, sizeof(float) * (size_t)x.n);
    memcpy(out->l, l, sizeof(float) * (size_t)x.n);
}

/* Merge a row of sums, scaled by `by`, into the o of a state, as `action` requires. */
static VEC_INLINE void i16_put(float action, const float *sum, int n, float by, float a, float b, float *o) {
    const vec scale = vec_set(by), old = vec_set(a), new = vec_set(b);
    if (action == ATTN_TAKE)
        for (int d = 0; d < n; d += VEC_N)
            vec_store(o + d, vec_mul(vec_load(sum + d), scale));
    else if (action == ATTN_MERGE)
        for (int d = 0; d < n; d += VEC_N)
            vec_store(o + d, vec_add(vec_mul(vec_load(o + d), old), vec_mul(vec_mul(vec_load(sum + d), scale), new)));
}

static MP_NOINLINE void i16_attend(const mp_attn_kv *a, int width, int rows, int block0, int block1,
                                   mp_attn_partial *state, void *scratch) {
    kv_check(a, rows);
    const mp_attn_i16_layout plan = mp_attn_i16_plan(a->v_dim);
    uint8_t *base = scratch;
    float action[MP_ATTN_ROWS];
    float *tile = (float *)(base + plan.tile), *fa = (float *)(base + plan.a), *fb = (float *)(base + plan.b);
    i16_rows x;
    i16_begin(a, width, rows, &x);
    x.s = scratch;
    x.p = (int16_t *)(void *)(base + plan.p);
    x.m = (float *)(base + plan.m);
    x.l = (float *)(base + plan.l);
    x.by = (float *)(base + plan.by);
    for (int block = block0; block < block1; block++) {
        if (!i16_set_block(&x, block))
            continue;
        const bool more = block + 1 < block1 && !a->near;
        i16_scores(&x, block, more);
        i16_softmax(&x, block);
        merge_factors(x.n, x.m, x.l, state, fa, fb, action);
        for (int i = 0, R; i < x.n; i += R) {
            R = i16_tile_rows(x.n - i);
            i16_output(&x, i, R, block, more, tile);
            for (int r = 0; r < R; r++)
                i16_put(action[i + r], tile + r * a->v_dim, a->v_dim, x.by[i + r], fa[i + r], fb[i + r],
                        state->o + (int64_t)(i + r) * a->v_dim);
        }
    }
}

#define I16_ATTEND(type, width)                                                                                    \
    static void attn_attn_block_##type(const mp_attn_kv *a, int rows, int block, mp_attn_partial *out) {           \
        i16_attend_block(a, width, rows, block, out);                                                              \
    }                                                                                                              \
    static void attn_attn_kv_##type(const mp_attn_kv *a, int rows, int block0, int block1, mp_attn_partial *state, \
                                    void *scratch) {                                                               \
        i16_attend(a, width, rows, block0, block1, state, scratch);                                                \
    }
I16_ATTEND(i16, 2)
I16_ATTEND(i8, 1)
#undef I16_ATTEND

static void attention_i16_fill(mp_kernel_table *table, const char *variant) {
    MP_SET(table, kv_store_i16, attn_kv_store_i16, variant);
    MP_SET(table, kv_fill_i16, attn_kv_fill_i16, variant);
    MP_SET(table, kv_store_i8, attn_kv_store_i8, variant);
    MP_SET(table, attn_block_i8, attn_attn_block_i8, variant);
    MP_SET(table, attn_kv_i8, attn_attn_kv_i8, variant);
    MP_SET(table, attn_query_i16, attn_attn_query_i16, variant);
    MP_SET(table, attn_block_i16, attn_attn_block_i16, variant);
    MP_SET(table, attn_kv_i16, attn_attn_kv_i16, variant);
}

#endif
