/* attention_tmpl.h: attention in vectors of 16 lanes. Template: include after a vec_*.h. kernels.h defines the results.
 *
 * Both halves of attention are the same small product, "rows of numbers times rows of vectors":
 *
 *     sum[r][lanes] = chain over k ascending of a[r][k] * b[k][lanes]
 *
 * Scores: a = queries, k = components, lanes = keys, so K must be stored by columns (the components of a key are a
 * column). Output: a = probabilities, k = keys, lanes = components, so V is used as stored. A tile of R rows x V vecs
 * keeps its sums in registers. R and V become constants where `chain` is inlined; they change no bit. */
#ifndef MP_KERNELS_SIMD_ATTENTION_TMPL_H
#define MP_KERNELS_SIMD_ATTENTION_TMPL_H

#include <assert.h>
#include <math.h>
#include <string.h>

#include "kernels/attention_scratch.h"
#include "kernels/simd/attention_kv_tmpl.h"
#include "kernels/simd/vmath_tmpl.h"
#include "kernels/variants.h"

/* The right operand b of a product. */
typedef struct attn_source {
    const float *data;
    int64_t ld;
    const float *next; /* the same rows of the following block, to be prefetched; or NULL */
} attn_source;

/* Continue the chains of `sum` with elements [from, to). */
static VEC_INLINE void chain(const int R, const int V, const float *const *a, const attn_source *b, int column,
                             int from, int to, vec *sum) {
    const float *at = b->data + from * b->ld + column;
    const float *next = b->next ? b->next + from * b->ld + column : NULL;
    const float *row[VEC_TILE_ROWS];
    VEC_UNROLL
    for (int r = 0; r < R; r++)
        row[r] = a[r];
    for (int k = from; k < to; k++, at += b->ld) {
        vec x[4];
        VEC_UNROLL
        for (int v = 0; v < V; v++)
            x[v] = vec_load(at + v * VEC_N);
        if (next) {
            VEC_UNROLL
            for (int v = 0; v < V; v++)
                vec_prefetch(next + v * VEC_N);
            next += b->ld;
        }
        VEC_UNROLL
        for (int r = 0; r < R; r++) {
            const vec s = vec_set(row[r][k]);
            VEC_UNROLL
            for (int v = 0; v < V; v++)
                sum[r * V + v] = vec_fma(x[v], s, sum[r * V + v]);
        }
    }
}

static VEC_INLINE void zero(const int R, const int V, vec *sum) {
    VEC_UNROLL
    for (int i = 0; i < R * V; i++)
        sum[i] = vec_zero();
}

/* Rows of the next tile when `rows` remain: as few tiles as possible, of nearly equal height. */
static VEC_INLINE int tile_rows(int rows) {
    const int tiles = (rows + VEC_TILE_ROWS - 1) / VEC_TILE_ROWS;
    return (rows + tiles - 1) / tiles;
}

#if defined(VEC_WIDE_TILES)
#define TILE_CASES_7_8(run) \
    case 7:                 \
        run(7);             \
        break;              \
    case 8:                 \
        run(8);             \
        break;
#else
#define TILE_CASES_7_8(run)
#endif
#define TILE_EACH(rows, run) \
    switch (rows) {          \
    case 1:                  \
        run(1);              \
        break;               \
    case 2:                  \
        run(2);              \
        break;               \
    case 3:                  \
        run(3);              \
        break;               \
    case 4:                  \
        run(4);              \
        break;               \
    case 5:                  \
        run(5);              \
        break;               \
    case 6:                  \
        run(6);              \
        break;               \
        TILE_CASES_7_8(run)  \
    default:                 \
        assert(false);       \
    }

/* ---- scores ---- */

/* s[r * ld + t] = scale * (a[r] . column t of b), t in [0, 16 * vecs). Computes V vecs per step, from v on, while V
 * vecs remain. Returns the first vec not computed. */
static VEC_INLINE int scores_step(const int R, const int V, const float *const *a, const attn_source *b, int depth,
                                  int v, int vecs, float scale, float *s, int64_t ld) {
    const vec by = vec_set(scale);
    vec sum[VEC_ACCUMULATORS];
    for (const int last = vecs - V; v <= last; v += V) {
        zero(R, V, sum);
        chain(R, V, a, b, v * VEC_N, 0, depth, sum);
        VEC_UNROLL
        for (int i = 0; i < R * V; i++)
            vec_store(s + i / V * ld + (v + i % V) * VEC_N, vec_mul(sum[i], by));
    }
    return v;
}

static VEC_INLINE void scores_of(const int R, const float *const *a, const attn_source *b, int depth, int vecs,
                                 float scale, float *s, int64_t ld) {
    int v = 0;
    if (R * 4 <= VEC_ACCUMULATORS)
        v = scores_step(R, 4, a, b, depth, v, vecs, scale, s, ld);
    if (R * 2 <= VEC_ACCUMULATORS)
        v = scores_step(R, 2, a, b, depth, v, vecs, scale, s, ld);
    scores_step(R, 1, a, b, depth, v, vecs, scale, s, ld);
}

static MP_NOINLINE void scores(int rows, const float *const *a, const attn_source *b, int depth, int vecs, float scale,
                               float *s, int64_t ld) {
#define TILE_RUN(R) scores_of(R, a, b, depth, vecs, scale, s, ld)
    TILE_EACH(rows, TILE_RUN)
#undef TILE_RUN
}

/* ---- softmax ---- */

/* Rows of scores s [rows, ld], n columns (a multiple of 16) of which row r sees [from[r], to[r]). */
typedef struct attn_scores {
    float *s;
    int64_t ld;
    int rows, n;
    int from[VEC_TILE_ROWS], to[VEC_TILE_ROWS];
    const float *bias[VEC_TILE_ROWS]; /* added to the scores of visible keys; or NULL for all rows */
    float max[VEC_TILE_ROWS], sum[VEC_TILE_ROWS];
} attn_scores;

/* The lanes of the vec at column t that row r sees. */
static VEC_INLINE vmask visible_at(const attn_scores *x, int r, int t) {
    return vec_lanes(x->from[r] - t, x->to[r] - t);
}

/* Softmax of rows of 16 V columns, without bias. The maxima of all rows are computed before the first exp, so that the
 * CPU overlaps the steps of different rows. */
static VEC_INLINE void softmax_short(const int V, attn_scores *x) {
    const vec lowest = vec_set(-INFINITY);
    for (int r = 0; r < x->rows; r++) {
        vec top = lowest;
        VEC_UNROLL
        for (int v = 0; v < V; v++) {
            const vec s = vec_load(x->s + r * x->ld + v * VEC_N);
            top = vec_max(vec_select(visible_at(x, r, v * VEC_N), s, lowest), top);
        }
        x->max[r] = vec_top(top);
    }
    for (int r = 0; r < x->rows; r++) {
        const vec max = vec_set(x->max[r]);
        vec sum = vec_zero();
        VEC_UNROLL
        for (int v = 0; v < V; v++) {
            float *at = x->s + r * x->ld + v * VEC_N;
            const vec e = vec_select(visible_at(x, r, v * VEC_N), vec_exp(vec_sub(vec_load(at), max)), vec_zero());
            vec_store(at, e);
            sum = vec_add(sum, e);
        }
        x->sum[r] = vec_sum(sum);
    }
}

static VEC_INLINE void softmax_long(attn_scores *x) {
    const vec lowest = vec_set(-INFINITY);
    for (int r = 0; r < x->rows; r++) {
        const int from = x->from[r], to = x->to[r];
        const float *bias = x->bias[r];
        float *s = x->s + r * x->ld;
        vec top = lowest;
        for (int t = from / VEC_N * VEC_N; t < to; t += VEC_N) {
            const bool whole = t >= from && t + VEC_N <= to;
            vec v = vec_load(s + t);
            if (bias) {
                float part[VEC_N] = {0};
                const int begin = from > t ? from : t, end = to < t + VEC_N ? to : t + VEC_N;
                if (!whole)
                    memcpy(part + begin - t, bias + begin, sizeof(float) * (size_t)(end - begin));
                v = vec_add(v, vec_load(whole ? bias + t : part));
                vec_store(s + t, v);
            }
            top = vec_max(whole ? v : vec_select(visible_at(x, r, t), v, lowest), top);
        }
        x->max[r] = vec_top(top);
    }
    for (int r = 0; r < x->rows; r++) {
        const int from = x->from[r], to = x->to[r];
        float *s = x->s + r * x->ld;
        const vec max = vec_set(x->max[r]);
        vec sum = vec_zero();
        for (int t = 0; t < x->n; t += VEC_N) {
            vec e = vec_zero();
            if (t >= from && t + VEC_N <= to)
                e = vec_exp(vec_sub(vec_load(s + t), max));
            else if (t < to && t + VEC_N > from)
                e = vec_select(visible_at(x, r, t), vec_exp(vec_sub(vec_load(s + t), max)), e);
            sum = vec_add(sum, e);
            vec_store(s + t, e);
        }
        x->sum[r] = vec_sum(sum);
    }
}

/* Replace s by exp(s + bias - max), and by 0 where it is not visible. Sets the maxima and sums; -inf and 0 for a row
 * that sees no key. */
static void softmax_rows(attn_scores *x) {
    switch (x->bias[0] ? 0 : x->n / VEC_N) {
    case 1:
        softmax_short(1, x);
        break;
    case 2:
        softmax_short(2, x);
        break;
    case 3:
        softmax_short(3, x);
        break;
    case 4:
        softmax_short(4, x);
        break;
    default:
        softmax_long(x);
        break;
    }
}

/* ---- output ---- */

/* Destination of a tile of outputs: out = sum * by (attn_full), or a merge into a state as kernels.h defines. */
typedef struct attn_output {
    float *out;
    int64_t ld;
    int columns;
    const float *by;    /* [rows] or NULL: store the sum unscaled */
    const float *a, *b; /* [rows] factors of the state (a) and of the new partial (b); NULL: overwrite out */
    const float *action;  /* [rows] ATTN_ action of each row; read only if a and b are set */
    const struct attn_sums *part; /* NULL: all keys */
} attn_output;

/* State of an output whose keys are multiplied in parts, one part at a time. */
typedef struct attn_sums {
    float *sums; /* [rows, ld] sums over the earlier keys; unless `last`, those that include these keys replace them */
    int64_t ld;
    bool first, last; /* true for the part with the first keys, with the last keys */
} attn_sums;

/* Store rows x vecs sums of tile [rows, 16 * vecs] to the columns from `column` on. Not inlined, because its callers
 * are compiled once for every R and V. */
static MP_NOINLINE void put(const attn_output *o, int rows, int vecs, int column, const float *tile) {
    for (int i = 0; i < rows * vecs; i++) {
        const int r = i / vecs, at = column + i % vecs * VEC_N, left = o->columns - at;
        float *to = o->out + r * o->ld + at;
        vec sum = vec_add(vec_load(tile + i * VEC_N), vec_zero()); /* -0 becomes +0 */
        if (o->a) {
            if (o->action[r] == ATTN_SKIP)
                continue;
            if (o->action[r] == ATTN_MERGE)
                sum = vec_add(vec_mul(vec_load(to), vec_set(o->a[r])), vec_mul(sum, vec_set(o->b[r])));
        } else if (o->by) {
            sum = vec_mul(sum, vec_set(o->by[r]));
        }
        if (left >= VEC_N)
            vec_store(to, sum);
        else
            vec_store_n(to, sum, left);
    }
}

/* Multiply rows of probabilities p by rows [from, to) of b, `vecs` wide, in steps as in scores_step. */
static VEC_INLINE int output_step(const int R, const int V, const float *const *p, const attn_source *b, int from,
                                  int to, int v, int vecs, const attn_output *o) {
    vec sum[VEC_ACCUMULATORS];
    for (; v + V <= vecs; v += V) {
        const attn_sums *part = o->part;
        if (part && !part->first) {
            VEC_UNROLL
            for (int i = 0; i < R * V; i++)
                sum[i] = vec_load(part->sums + i / V * part->ld + (v + i % V) * VEC_N);
        } else {
            zero(R, V, sum);
        }
        chain(R, V, p, b, v * VEC_N, from, to, sum);
        if (part && !part->last) {
            VEC_UNROLL
            for (int i = 0; i < R * V; i++)
                vec_store(part->sums + i / V * part->ld + (v + i % V) * VEC_N, sum[i]);
            continue;
        }
        _Alignas(64) float tile[VEC_ACCUMULATORS * VEC_N];
        VEC_UNROLL
        for (int i = 0; i < R * V; i++)
            vec_store(tile + i * VEC_N, sum[i]);
        put(o, R, V, v * VEC_N, tile);
    }
    return v;
}

static VEC_INLINE void output_of(const int R, const float *const *p, const attn_source *b, int from, int to, int vecs,
                                 const attn_output *o) {
    int v = 0;
    if (R * 4 <= VEC_ACCUMULATORS)
        v = output_step(R, 4, p, b, from, to, v, vecs, o);
    if (R * 2 <= VEC_ACCUMULATORS)
        v = output_step(R, 2, p, b, from, to, v, vecs, o);
    output_step(R, 1, p, b, from, to, v, vecs, o);
}

static MP_NOINLINE void outputs(int rows, const float *const *p, const attn_source *b, int from, int to, int vecs,
                                const attn_output *o) {
#define TILE_RUN(R) output_of(R, p, b, from, to, vecs, o)
    TILE_EACH(rows, TILE_RUN)
#undef TILE_RUN
}

/* ---- attn_full ---- */

static void full_visible(const mp_attn_full *a, int row, int *from, int *to) {
    const int before = a->window == 0 ? a->T : a->causal ? a->window - 1 : a->window / 2;
    *from = row > before ? row - before : 0;
    *to = a->causal ? row + 1 : before < a->T - row - 1 ? row + before + 1 : a->T;
}

/* Copy keys [key0, key0 + keys) by columns in panels of 32, and their values row by row, with zeros beyond D. */
static void full_copy(const mp_attn_full *a, int key0, int keys, const mp_attn_full_layout *plan, float *k, float *v) {
    for (int t = 0; t < keys; t += 8) {
        const int rows = keys - t < 8 ? keys - t : 8;
        float *panel = k + (int64_t)(t / MP_ATTN_PANEL) * a->D * MP_ATTN_PANEL + t % MP_ATTN_PANEL;
        int d = 0;
        for (; d + 8 <= a->D; d += 8)
            vec_transpose8(a->k + (key0 + t) * a->ld + d, a->ld, rows, panel + d * MP_ATTN_PANEL, MP_ATTN_PANEL);
        for (; d < a->D; d++) { /* reads nothing beyond the head */
            for (int i = 0; i < 8; i++)
                panel[d * MP_ATTN_PANEL + i] = i < rows ? a->k[(key0 + t + i) * a->ld + d] : 0;
        }
    }
    for (int t = 0; t < keys; t++) {
        const float *from = a->v + (key0 + t) * a->ld;
        float *to = v + (int64_t)t * plan->v_ld;
        int d = 0;
        for (; d + VEC_N <= a->D; d += VEC_N)
            vec_store(to + d, vec_load(from + d));
        if (d < a->D)
            vec_store(to + d, vec_load_n(from + d, a->D - d));
    }
    if (keys % VEC_N > 0 && keys % VEC_N <= 8) /* clear the upper half of the last vec: it is scored, then masked */
        for (int d = 0; d < a->D; d++)
            memset(k + (int64_t)(keys / MP_ATTN_PANEL) * a->D * MP_ATTN_PANEL + d * MP_ATTN_PANEL +
                       mp_round_up(keys % MP_ATTN_PANEL, 8),
                   0, sizeof(float) * 8);
}

/* Up to MP_ATTN_FULL_ROWS rows of attn_full, from `row0` on. */
typedef struct full_block {
    const mp_attn_full *a;
    const mp_attn_full_layout *plan;
    int row0;
    int base;                         /* key of the first column of the scores */
    const float *v;                   /* values from key `base` on */
    float *s, *sums;                  /* scores, then probabilities [rows, plan->keys]; sums [rows, plan->v_ld] */
    float inverse[MP_ATTN_FULL_ROWS]; /* 1 / sum of the probabilities of each row */
} full_block;

/* Multiply the probabilities of rows [r, r + R) of the block by the values of columns [c0, c1). first, last: these are
 * the first columns, the last ones. */
static void full_outputs(const full_block *b, int r, int R, int c0, int c1, bool first, bool last) {
    const mp_attn_full *a = b->a;
    const float *p[VEC_TILE_ROWS];
    int from, to, none;
    for (int i = 0; i < R; i++)
        p[i] = b->s + (int64_t)(r + i) * b->plan->keys;
    /* the first row sees the oldest key of the tile, the last row the newest */
    full_visible(a, b->row0 + r, &from, &none);
    full_visible(a, b->row0 + r + R - 1, &none, &to);
    from = from - b->base > c0 ? from - b->base : c0;
    to = to - b->base < c1 ? to - b->base : c1;
    const attn_source values = {b->v, b->plan->v_ld, NULL};
    const attn_sums part = {b->sums + (int64_t)r * b->plan->v_ld, b->plan->v_ld, first, last};
    const attn_output o = {a->out + (b->row0 + r) * a->ld_out, a->ld_out, a->D, b->inverse + r, NULL, NULL, NULL,
                           first && last ? NULL : &part};
    outputs(R, p, &values, from, to, b->plan->v_ld / VEC_N, &o);
}

static void attn_attn_full(const mp_attn_full *a, int row0, int row1, void *scratch) {
    assert(0 <= row0 && row0 <= row1 && row1 <= a->T && a->D > 0);
    if (row0 == row1)
        return;
    const mp_attn_full_layout plan = mp_attn_full_plan(a->T, a->D);
    float *k = scratch, *v = (float *)((uint8_t *)scratch + plan.v), *s = (float *)((uint8_t *)scratch + plan.scores);
    float *sums = (float *)((uint8_t *)scratch + plan.sums);
    int key0, key1, from, to;
    full_visible(a, row0, &key0, &to);
    full_visible(a, row1 - 1, &from, &key1);
    key0 = key0 / MP_ATTN_PANEL * MP_ATTN_PANEL; /* keep lane = t mod 16 true in the copy, too */
    full_copy(a, key0, key1 - key0, &plan, k, v);

    /* With a window, rows far apart see different keys, and a block computes scores of all keys that one row sees. */
    const int most = a->window ? MP_ATTN_FULL_ROWS / 2 : MP_ATTN_FULL_ROWS;
    for (int block = row0, rows; block < row1; block += rows) {
        rows = row1 - block < most ? row1 - block : most;
        full_visible(a, block, &from, &to);
        const int panel0 = (from - key0) / MP_ATTN_PANEL;
        full_visible(a, block + rows - 1, &from, &to);
        const int base = key0 + panel0 * MP_ATTN_PANEL; /* key of the first column of the scores */
        const int columns = mp_round_up(to - base, VEC_N);
        for (int c = 0; c < columns; c += MP_ATTN_PANEL) {
            const int vecs = (columns - c < MP_ATTN_PANEL ? columns - c : MP_ATTN_PANEL) / VEC_N;
            const int64_t panel = panel0 + c / MP_ATTN_PANEL;
            const attn_source keys = {k + panel * a->D * MP_ATTN_PANEL, MP_ATTN_PANEL, NULL};
            for (int r = 0, R; r < rows; r += R) {
                const float *q[VEC_TILE_ROWS];
                R = tile_rows(rows - r);
                for (int i = 0; i < R; i++)
                    q[i] = a->q + (block + r + i) * a->ld;
                scores(R, q, &keys, a->D, vecs, a->scale, s + (int64_t)r * plan.keys + c, plan.keys);
            }
        }
        full_block b = {.a = a, .plan = &plan, .row0 = block, .base = base, .s = s, .sums = sums,
                        .v = v + (int64_t)(base - key0) * plan.v_ld};
        const int each = plan.values < columns ? plan.values : columns;
        for (int r = 0, R; r < rows; r += R) {
            attn_scores x = {.s = s + (int64_t)r * plan.keys, .ld = plan.keys, .n = columns};
            R = x.rows = tile_rows(rows - r);
            for (int i = 0; i < R; i++) {
                const int row = block + r + i;
                full_visible(a, row, &from, &to);
                x.from[i] = from - base;
                x.to[i] = to - base;
                x.bias[i] = a->bias ? a->bias + row * a->ld_bias + base : NULL;
            }
            softmax_rows(&x);
            for (int i = 0; i < R; i++)
                b.inverse[r + i] = 1.0f / x.sum[i];
            if (each == columns) /* the probabilities are still in L1 */
                full_outputs(&b, r, R, 0, columns, true, true);
        }
        for (int c = 0; each < columns && c < columns; c += each)
            for (int r = 0, R; r < rows; r += R) {
                R = tile_rows(rows - r);
                full_outputs(&b, r, R, c, c + each, c == 0, c + each >= columns);
            }
    }
}

/* ---- the paged cache ---- */

static void attn_kv_store(const float *k, const float *v, int k_dim, int v_dim, int slot, void *k_block,
                          void *v_block) {
    assert(0 <= slot && slot < MP_KV_BLOCK && v_dim % VEC_N == 0);
    float *column = (float *)k_block + slot;
    for (int d = 0; d < k_dim; d++)
        column[d * MP_KV_BLOCK] = k[d];
    memcpy((float *)v_block + (int64_t)slot * v_dim, v, sizeof(float) * (size_t)v_dim);
}

/* Compute p, m and l of one block for all n = rows * group queries. */
static VEC_INLINE void kv_softmax(const mp_attn_kv *a, int n, int block, const attn_source *k, float *p, float *m,
                                  float *l) {
    attn_source source = *k;
    for (int i = 0, R; i < n; i += R) {
        const float *q[VEC_TILE_ROWS];
        R = tile_rows(n - i);
        for (int j = 0; j < R; j++)
            q[j] = a->q + (i + j) / a->group * a->ldq + (i + j) % a->group * a->ldq_group;
        scores(R, q, &source, a->k_dim, MP_KV_BLOCK / VEC_N, a->scale, p + (int64_t)i * MP_KV_BLOCK, MP_KV_BLOCK);
        source.next = NULL; /* the first tile has prefetched the next block */
    }
    if (a->softcap > 0.0f)
        for (int i = 0; i < n * MP_KV_BLOCK; i += VEC_N)
            vec_store(p + i, vec_softcap(vec_set(a->softcap), vec_load(p + i)));
    for (int i = 0; i < n; i += VEC_TILE_ROWS) {
        const int rows = n - i < VEC_TILE_ROWS ? n - i : VEC_TILE_ROWS;
        attn_scores x = {.s = p + (int64_t)i * MP_KV_BLOCK, .ld = MP_KV_BLOCK, .rows = rows, .n = MP_KV_BLOCK};
        for (int j = 0; j < rows; j++)
            kv_visible(a, (i + j) / a->group, block, x.from + j, x.to + j);
        softmax_rows(&x);
        memcpy(m + i, x.max, sizeof(float) * (size_t)rows);
        memcpy(l + i, x.sum, sizeof(float) * (size_t)rows);
    }
}

static VEC_INLINE void kv_output(const mp_attn_kv *a, int n, int block, const attn_source *v, const float *p,
                                 const attn_output *out) {
    attn_source source = *v;
    for (int i = 0, R; i < n; i += R) {
        const float *row[VEC_TILE_ROWS];
        int from, to, unused;
        R = tile_rows(n - i);
        for (int j = 0; j < R; j++)
            row[j] = p + (int64_t)(i + j) * MP_KV_BLOCK;
        /* the first row sees the oldest slot, the last one the newest */
        kv_visible(a, i / a->group, block, &from, &unused);
        kv_visible(a, (i + R - 1) / a->group, block, &unused, &to);
        attn_output o = *out;
        o.out += i * o.ld;
        if (o.a) {
            o.a += i;
            o.b += i;
            o.action += i;
        }
        outputs(R, row, &source, from, to, a->v_dim / VEC_N, &o);
        source.next = NULL;
    }
}

static void attn_attn_block(const mp_attn_kv *a, int rows, int block, mp_attn_partial *out) {
    kv_check(a, rows);
    const int n = rows * a->group;
    _Alignas(64) float p[MP_ATTN_ROWS * MP_KV_BLOCK];
    /* prefetch the next block if any row sees it, because callers usually continue with that block */
    const bool more = kv_continues(a, rows, block);
    const attn_source k = {a->k_blocks[block], MP_KV_BLOCK, more ? a->k_blocks[block + 1] : NULL};
    const attn_source v = {a->v_blocks[block], a->v_dim, more ? a->v_blocks[block + 1] : NULL};
    kv_softmax(a, n, block, &k, p, out->m, out->l);
    const attn_output o = {out->o, a->v_dim, a->v_dim, NULL, NULL, NULL, NULL, NULL};
    kv_output(a, n, block, &v, p, &o);
}

static void attn_attn_merge(int rows, int v_dim, const mp_attn_partial *in, mp_attn_partial *state) {
    assert(v_dim % VEC_N == 0);
    for (int i = 0; i < rows; i += VEC_N) {
        const int n = rows - i < VEC_N ? rows - i : VEC_N;
        float a[VEC_N], b[VEC_N], action[VEC_N];
        mp_attn_partial part = {state->m + i, state->l + i, NULL};
        merge_factors(n, in->m + i, in->l + i, &part, a, b, action);
        for (int r = 0; r < n; r++) {
            const float *from = in->o + (int64_t)(i + r) * v_dim;
            float *to = state->o + (int64_t)(i + r) * v_dim;
            if (action[r] == ATTN_TAKE)
                memcpy(to, from, sizeof(float) * (size_t)v_dim);
            else if (action[r] == ATTN_MERGE)
                for (int d = 0; d < v_dim; d += VEC_N)
                    vec_store(to + d, vec_add(vec_mul(vec_load(to + d), vec_set(a[r])),
                                              vec_mul(vec_load(from + d), vec_set(b[r]))));
        }
    }
}

static void attn_attn_kv(const mp_attn_kv *a, int rows, int block0, int block1, mp_attn_partial *state, void *scratch) {
    kv_check(a, rows);
    const mp_attn_kv_layout plan = mp_attn_kv_plan(a->v_dim);
    const int n = rows * a->group;
    uint8_t *base = scratch;
    float action[MP_ATTN_ROWS];
    float *p = (float *)(base + plan.p), *m = (float *)(base + plan.m);
    float *l = (float *)(base + plan.l), *fa = (float *)(base + plan.a), *fb = (float *)(base + plan.b);
    for (int block = block0; block < block1; block++) {
        int from, to, first, unused;
        kv_visible(a, 0, block, &first, &unused);
        kv_visible(a, rows - 1, block, &from, &to);
        if (first >= to) /* no row sees any slot of the block */
            continue;
        const bool more = block + 1 < block1;
        const attn_source k = {a->k_blocks[block], MP_KV_BLOCK, more ? a->k_blocks[block + 1] : NULL};
        const attn_source v = {a->v_blocks[block], a->v_dim, more ? a->v_blocks[block + 1] : NULL};
        kv_softmax(a, n, block, &k, p, m, l);
        merge_factors(n, m, l, state, fa, fb, action);
        const attn_output o = {state->o, a->v_dim, a->v_dim, NULL, fa, fb, action, NULL};
        kv_output(a, n, block, &v, p, &o);
    }
}

static void attention_fill(mp_kernel_table *table, const char *variant) {
    MP_SET(table, attn_full, attn_attn_full, variant);
    MP_SET(table, kv_store, attn_kv_store, variant);
    MP_SET(table, attn_block, attn_attn_block, variant);
    MP_SET(table, attn_merge, attn_attn_merge, variant);
    MP_SET(table, attn_kv, attn_attn_kv, variant);
}

#endif
