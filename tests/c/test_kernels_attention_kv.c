/* Attention over the paged cache: every variant has the bits of ref/, and ref/ is close to double precision. Splitting
 * rows and blocks changes no bit, and invisible keys do not affect a row. */
#include "kernel_edge.h"
#include "kernel_test.h"

/* the templates for kt_next_or_plain */
#include "kernels/simd/vec_plain.h"

#include "kernels/simd/attention_i16_tmpl.h"
#include "kernels/simd/attention_tmpl.h"

static void fill_both(mp_kernel_table *table, const char *name) {
    attention_fill(table, name);
    attention_i16_fill(table, name);
}

static bool next_variant(kt_set *set, int slot) { return kt_next_or_plain(set, slot, fill_both); }

enum { KV_MAX_BLOCKS = 12 };

typedef struct kv_case {
    mp_attn_kv a;
    mp_dtype dtype;
    int tokens, blocks;
    size_t k_bytes, v_bytes;  /* bytes of one block */
    float *q, *keys, *values; /* [tokens, k_dim] ... */
    void *k[KV_MAX_BLOCKS], *v[KV_MAX_BLOCKS], *scratch;
} kv_case;

static void kv_put(const kt_set *set, mp_dtype dtype, const float *k, const float *v, int k_dim, int v_dim, int slot,
                   void *k_block, void *v_block) {
    (dtype == MP_F32 ? set->call.kv_store : dtype == MP_I16 ? set->call.kv_store_i16 : set->call.kv_store_i8)(
        k, v, k_dim, v_dim, slot, k_block, v_block);
}

static void kv_block(const kt_set *set, const kv_case *c, const mp_attn_kv *a, int rows, int block,
                     mp_attn_partial *out) {
    (c->dtype == MP_F32   ? set->call.attn_block
     : c->dtype == MP_I16 ? set->call.attn_block_i16
                          : set->call.attn_block_i8)(a, rows, block, out);
}

static void kv_attend(const kt_set *set, const kv_case *c, const mp_attn_kv *a, int rows, int block0, int block1,
                      mp_attn_partial *state) {
    (c->dtype == MP_F32   ? set->call.attn_kv
     : c->dtype == MP_I16 ? set->call.attn_kv_i16
                          : set->call.attn_kv_i8)(a, rows, block0, block1, state, c->scratch);
}

/* Store `tokens` tokens with ref's kv_store, and make queries for the last `rows` of them. */
static kv_case kv_make(const kt_set *ref, mp_test_random *random, int tokens, int rows, int group, int k_dim, int v_dim,
                       mp_dtype dtype, int window, float size) {
    kv_case c = {.dtype = dtype, .tokens = tokens, .blocks = (tokens + MP_KV_BLOCK - 1) / MP_KV_BLOCK};
    MP_CHECK(c.blocks <= KV_MAX_BLOCKS && rows <= tokens);
    c.k_bytes = mp_kv_bytes(dtype, k_dim);
    c.v_bytes = mp_kv_bytes(dtype, v_dim);
    for (int b = 0; b < c.blocks; b++) {
        c.k[b] = kt_alloc(c.k_bytes);
        c.v[b] = kt_alloc(c.v_bytes);
    }
    c.keys = malloc(sizeof(float) * (size_t)(tokens * k_dim));
    c.values = malloc(sizeof(float) * (size_t)(tokens * v_dim));
    kt_random(random, c.keys, (int64_t)tokens * k_dim);
    kt_random(random, c.values, (int64_t)tokens * v_dim);
    for (int64_t i = 0; i < (int64_t)tokens * k_dim; i++)
        c.keys[i] *= size;
    for (int t = 0; t < tokens; t++)
        kv_put(ref, dtype, c.keys + t * k_dim, c.values + t * v_dim, k_dim, v_dim, t % MP_KV_BLOCK,
               c.k[t / MP_KV_BLOCK], c.v[t / MP_KV_BLOCK]);
    const int64_t ldq_group = k_dim + kt_pick(random, 0, 2), ldq = group * ldq_group + kt_pick(random, 0, 2);
    c.q = malloc(sizeof(float) * (size_t)(rows * ldq));
    kt_random(random, c.q, rows * ldq);
    for (int64_t i = 0; i < rows * ldq; i++)
        c.q[i] *= size;
    for (int i = 0; i < rows * group && dtype != MP_F32; i++)
        ref->call.attn_query_i16(c.q + i / group * ldq + i % group * ldq_group, k_dim);
    c.scratch = kt_alloc(mp_attn_kv_scratch(v_dim));
    c.a = (mp_attn_kv){.q = c.q,
                       .ldq = ldq,
                       .ldq_group = ldq_group,
                       .group = group,
                       .k_dim = k_dim,
                       .v_dim = v_dim,
                       .scale = 1.0f / sqrtf((float)k_dim),
                       .pos0 = tokens - rows,
                       .window = window,
                       .k_blocks = NULL,
                       .v_blocks = NULL};
    return c;
}

/* Point the arguments at the case's own block lists. Call once the struct no longer moves. */
static const mp_attn_kv *kv_of(kv_case *c) {
    c->a.k_blocks = c->k;
    c->a.v_blocks = c->v;
    return &c->a;
}

static void kv_free(kv_case *c) {
    for (int b = 0; b < c->blocks; b++) {
        kt_free(c->k[b]);
        kt_free(c->v[b]);
    }
    free(c->q);
    free(c->keys);
    free(c->values);
    kt_free(c->scratch);
}

static mp_attn_partial partial_make(int n, int v_dim) {
    mp_attn_partial p = {kt_alloc(sizeof(float) * (size_t)n), kt_alloc(sizeof(float) * (size_t)n),
                         kt_alloc(sizeof(float) * (size_t)(n * v_dim))};
    mp_attn_begin(n, v_dim, &p);
    return p;
}

static void partial_free(mp_attn_partial *p) {
    kt_free(p->m);
    kt_free(p->l);
    kt_free(p->o);
}

static void partial_same(const kt_set *set, const mp_attn_partial *want, const mp_attn_partial *got, int n, int v_dim,
                         const char *what, const kv_case *c) {
    char text[160];
    snprintf(text, sizeof text, "%s: tokens=%d rows=%d group=%d k=%d v=%d %s window=%d", what, c->tokens,
             n / c->a.group, c->a.group, c->a.k_dim, c->a.v_dim, mp_dtype_get(c->dtype)->name, c->a.window);
    kt_same(set, want->m, got->m, n, "m of %s", text);
    kt_same(set, want->l, got->l, n, "l of %s", text);
    kt_same_matrix(set, want->o, got->o, n, v_dim, v_dim, "o of %s", text);
}

/* Make a case of random shape, including shapes that no model has. */
static kv_case kv_any(const kt_set *ref, mp_test_random *random, float size) {
    static const int groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16};
    static const int dims[] = {16, 32, 48, 64, 80, 128, 144, 192, 256, 2, 12, 26, 100, 120};
    const int group = groups[kt_pick(random, 0, 9)], tokens = kt_pick(random, 1, 300);
    int rows = kt_pick(random, 0, 2) ? kt_pick(random, 1, MP_ATTN_ROWS / group) : 1;
    rows = rows < tokens ? rows : tokens;
    const int k_dim = dims[kt_pick(random, 0, 13)], other = dims[kt_pick(random, 0, 13)];
    const int v_dim = mp_kv_width(kt_pick(random, 0, 3) ? k_dim : other);
    const int window = kt_pick(random, 0, 2) ? 0 : kt_pick(random, 1, 200);
    static const mp_dtype types[] = {MP_F32, MP_I16, MP_I16, MP_I8, MP_I8};
    kv_case c = kv_make(ref, random, tokens, rows, group, k_dim, v_dim, types[kt_pick(random, 0, 4)], window, size);
    c.a.softcap = kt_pick(random, 0, 2) ? 0 : 1.5f;
    return c;
}

static int kv_rows(const kv_case *c) { return c->tokens - (int)c->a.pos0; }

MP_TEST_SECONDS(kernels_attention_kv_matches_ref, 60) {
    mp_test_random random = {21};
    kt_set ref = kt_ref();
    int variants = 0;
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_attn_kv_i16); variants++)
        for (int round = 0; round < mp_test_rounds(80); round++) {
            static const float sizes[] = {2.0f, 2.0f, 2e4f, 1e10f, 1e20f}; /* 1e20: scores overflow fp32 */
            kv_case c = kv_any(&ref, &random, sizes[round % 5]);
            const mp_attn_kv *a = kv_of(&c);
            const int rows = kv_rows(&c), n = rows * a->group;
            mp_attn_partial want = partial_make(n, a->v_dim), got = partial_make(n, a->v_dim);
            mp_attn_partial part = partial_make(n, a->v_dim), part_got = partial_make(n, a->v_dim);
            mp_attn_partial merged = partial_make(n, a->v_dim);
            for (int b = 0; b < c.blocks; b++) {
                kv_block(&ref, &c, a, rows, b, &part);
                kv_block(&v, &c, a, rows, b, &part_got);
                partial_same(&v, &part, &part_got, n, a->v_dim, "attn_block", &c);
                ref.call.attn_merge(n, a->v_dim, &part, &want);
                v.call.attn_merge(n, a->v_dim, &part, &merged);
                partial_same(&v, &want, &merged, n, a->v_dim, "attn_merge", &c);
            }
            kv_attend(&v, &c, a, rows, 0, c.blocks, &got);
            partial_same(&v, &want, &got, n, a->v_dim, "attn_kv", &c);
            mp_attn_begin(n, a->v_dim, &got);
            kv_attend(&ref, &c, a, rows, 0, c.blocks, &got);
            partial_same(&ref, &want, &got, n, a->v_dim, "attn_kv", &c);
            partial_free(&want);
            partial_free(&got);
            partial_free(&part);
            partial_free(&part_got);
            partial_free(&merged);
            kv_free(&c);
        }
    MP_CHECK(variants >= 1);
}

/* Compute rows alone, in chunks of any size, in any ranges of blocks, or block by block with merges: the bits must be
 * equal. */
MP_TEST(kernels_attention_kv_any_split) {
    mp_test_random random = {23};
    kt_set ref = kt_ref();
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_attn_kv_i16);)
        for (int round = 0; round < mp_test_rounds(60); round++) {
            kv_case c = kv_any(&ref, &random, 2.0f);
            const mp_attn_kv *a = kv_of(&c);
            const int rows = kv_rows(&c), n = rows * a->group;
            mp_attn_partial want = partial_make(n, a->v_dim), got = partial_make(n, a->v_dim);
            mp_attn_partial part = partial_make(n, a->v_dim);
            kv_attend(&v, &c, a, rows, 0, c.blocks, &want);
            for (int r = 0, next; r < rows; r = next) {
                mp_attn_kv some = *a;
                next = r + kt_pick(&random, 1, rows);
                next = next < rows ? next : rows;
                some.q = a->q + r * a->ldq;
                some.pos0 = a->pos0 + r;
                mp_attn_partial state = {got.m + r * a->group, got.l + r * a->group,
                                         got.o + (int64_t)r * a->group * a->v_dim};
                for (int b = 0, end; b < c.blocks; b = end) {
                    end = b + kt_pick(&random, 1, 3);
                    end = end < c.blocks ? end : c.blocks;
                    if (kt_pick(&random, 0, 1)) {
                        kv_attend(&v, &c, &some, next - r, b, end, &state);
                        continue;
                    }
                    for (int i = b; i < end; i++) {
                        kv_block(&v, &c, &some, next - r, i, &part);
                        v.call.attn_merge((next - r) * a->group, a->v_dim, &part, &state);
                    }
                }
            }
            partial_same(&v, &want, &got, n, a->v_dim, "split", &c);
            partial_free(&want);
            partial_free(&got);
            partial_free(&part);
            kv_free(&c);
        }
}

/* A NaN or Inf in the newest key or value (alone in its block) or in a query reaches the output. The result must differ
 * from that of a row that sees no key. */
MP_TEST(kernels_attention_kv_nan) {
    mp_test_random random = {25};
    kt_set ref = kt_ref();
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_attn_kv_i16);)
        for (int round = 0; round < 18; round++) {
            const int what = round < 10 ? round : round - 8;
            const mp_dtype dtype = what < 2 ? MP_F32 : round < 10 ? MP_I16 : MP_I8;
            const float bad = what % 2 ? NAN : INFINITY;
            kv_case c = kv_make(&ref, &random, 129, 1, 3, 64, 64, dtype, 0, 1.0f);
            const mp_attn_kv *a = kv_of(&c);
            if (what == 0) /* NaN: for an infinite key, the result would depend on the signs of the query */
                c.keys[128 * 64 + 5] = NAN;
            else if (what < 4)
                c.keys[128 * 64 + 5] = bad;
            else if (what < 6)
                c.values[128 * 64 + 63] = bad;
            else if (what < 8)
                for (int i = 0; i < 3; i++) {
                    float q[64] = {[17] = bad};
                    v.call.attn_query_i16(q, 64);
                    memcpy(c.q + i * a->ldq_group, q, sizeof q);
                }
            else
                for (int d = 0; d < 64; d++) /* all keys of a block */
                    for (int t = 64; t < 128; t++)
                        c.keys[t * 64 + d] = bad;
            for (int t = 0; t < 129; t++)
                kv_put(&v, dtype, c.keys + t * 64, c.values + t * 64, 64, 64, t % MP_KV_BLOCK, c.k[t / MP_KV_BLOCK],
                       c.v[t / MP_KV_BLOCK]);
            mp_attn_partial want = partial_make(3, 64), got = partial_make(3, 64), parts = partial_make(3, 64);
            mp_attn_partial part = partial_make(3, 64);
            kv_attend(&ref, &c, a, 1, 0, 3, &want);
            kv_attend(&v, &c, a, 1, 0, 3, &got);
            partial_same(&v, &want, &got, 3, 64, "nan", &c);
            for (int b = 0; b < 3; b++) {
                kv_block(&v, &c, a, 1, b, &part);
                v.call.attn_merge(3, 64, &part, &parts);
            }
            for (int i = 0; i < 3; i++) {
                MP_CHECK(isnan(got.o[i * 64 + 63]) && isnan(parts.o[i * 64 + 63]));
                MP_CHECK(isnan(got.l[i]) == isnan(parts.l[i]) && (isnan(got.l[i]) || what == 4 || what == 5));
            }
            partial_free(&want);
            partial_free(&got);
            partial_free(&parts);
            partial_free(&part);
            kv_free(&c);
        }
}

/* The number that component d of a token encodes in a block of integers, at `index`. Sets *step to its least unit. */
static double from_integer(const kv_case *c, const void *block, int dim, int d, int slot, int64_t index,
                           double *step) {
    const int8_t *bytes = block;
    const bool wide = c->dtype == MP_I16;
    const float *scales = (const float *)(const void *)(bytes + MP_KV_BLOCK * dim * (wide ? 2 : 1));
    const int by = wide ? 1 : ((const int8_t *)(scales + MP_KV_BLOCK))[d / 32 * MP_KV_BLOCK + slot];
    *step = (double)scales[slot] * by;
    return *step * (wide ? ((const int16_t *)block)[index] : bytes[index]);
}

/* The greatest unit that component d of a row may have. I16: the row's maximum / `limit`. I8: the maximum of the group
 * of 32 / 127, and at most one of `multipliers` steps of the row's unit more. */
static double most_step(const kv_case *c, const float *x, int n, int d, int limit, int multipliers) {
    double top = 0, of_group = 0;
    for (int i = 0; i < n; i++) {
        top = fmax(top, fabs((double)x[i]));
        of_group = i / 32 == d / 32 ? fmax(of_group, fabs((double)x[i])) : of_group;
    }
    return c->dtype == MP_I16 ? top / limit : (of_group + top / multipliers) / 127;
}

/* Compare with attention over the stored values in double precision. The remaining error comes from fp32 rounding and
 * integer weights. */
MP_TEST(kernels_attention_kv_ref_in_double) {
    mp_test_random random = {26};
    kt_set ref = kt_ref();
    for (int round = 0; round < 60; round++) {
        kv_case c = kv_any(&ref, &random, 1.5f);
        const mp_attn_kv *a = kv_of(&c);
        const int rows = kv_rows(&c), n = rows * a->group;
        const int ahead = round % 3 ? 0 : rows - 1; /* all rows see the last token: they are placed further on */
        const int64_t first = a->pos0;
        c.a.pos0 += ahead;
        c.a.window += c.a.window > 0 ? ahead : 0;
        c.a.end = ahead > 0 ? c.tokens : 0;
        const bool integers = c.dtype != MP_F32;
        double *keys = malloc(sizeof(double) * (size_t)(c.tokens * a->k_dim));
        double *values = malloc(sizeof(double) * (size_t)(c.tokens * a->v_dim));
        for (int t = 0; t < c.tokens; t++) {
            const int slot = t % MP_KV_BLOCK;
            const void *k_block = c.k[t / MP_KV_BLOCK], *v_block = c.v[t / MP_KV_BLOCK];
            const float *k = c.keys + t * a->k_dim, *v = c.values + t * a->v_dim;
            for (int d = 0; d < a->k_dim; d++) {
                double step, *to = keys + t * a->k_dim + d;
                *to = k[d];
                if (!integers)
                    continue;
                *to = from_integer(&c, k_block, a->k_dim, d, slot, (d / 2 * MP_KV_BLOCK + slot) * 2 + d % 2, &step);
                MP_CHECK_NEAR(*to, k[d], 0.501 * step);
                MP_CHECK(step <= 1.0001 * most_step(&c, k, a->k_dim, d, 4095, 32));
            }
            for (int d = 0; d < a->v_dim; d++) {
                double step, *to = values + t * a->v_dim + d;
                *to = v[d];
                if (!integers)
                    continue;
                *to = from_integer(&c, v_block, a->v_dim, d, slot, (slot / 2 * a->v_dim + d) * 2 + slot % 2, &step);
                MP_CHECK_NEAR(*to, v[d], 0.501 * step);
                MP_CHECK(step <= 1.0001 * most_step(&c, v, a->v_dim, d, 2047, 16));
            }
        }
        mp_attn_partial got = partial_make(n, a->v_dim);
        kv_attend(&ref, &c, a, rows, 0, c.blocks, &got);
        for (int i = 0; i < n; i++) {
            const float *q = a->q + i / a->group * a->ldq + i % a->group * a->ldq_group;
            const int64_t at = first + i / a->group;
            double sum = 0.0, out[256] = {0}, query[256], best = -INFINITY, score[300];
            float scale;
            memcpy(&scale, (const int16_t *)(const void *)q + a->k_dim, sizeof scale);
            for (int d = 0; d < a->k_dim; d++)
                query[d] = integers ? (double)((const int16_t *)(const void *)q)[d] * (double)scale : (double)q[d];
            int seen = 0;
            for (int t = 0; t < c.tokens; t++) {
                score[t] = -INFINITY;
                if ((ahead == 0 && t > at) || (a->window && t <= at - (a->window - ahead)))
                    continue;
                score[t] = 0.0;
                for (int d = 0; d < a->k_dim; d++)
                    score[t] += query[d] * keys[t * a->k_dim + d];
                score[t] *= (double)a->scale;
                if (a->softcap > 0)
                    score[t] = (double)a->softcap * tanh(score[t] / (double)a->softcap);
                best = fmax(best, score[t]);
                seen++;
            }
            for (int t = 0; t < c.tokens; t++) {
                const double p = exp(score[t] - best);
                sum += p;
                for (int d = 0; d < a->v_dim; d++)
                    out[d] += p * values[t * a->v_dim + d];
            }
            /* integer weights are off by at most half a step of 1 / 16383 of their block's maximum, which is at most 1;
             * values are below 1 */
            const double error = integers ? 2e-5 + (double)seen * 0.5 / MP_I16_WEIGHT / sum : 5e-6;
            MP_CHECK_NEAR(got.m[i], best, 1e-5 + fabs(best) * 1e-5);
            MP_CHECK_NEAR(got.l[i], sum, sum * 3e-5);
            for (int d = 0; d < a->v_dim; d++)
                MP_CHECK_NEAR(got.o[i * a->v_dim + d] * (1.0f / got.l[i]), out[d] / sum, error);
        }
        free(keys);
        free(values);
        partial_free(&got);
        kv_free(&c);
    }
}

/* At the limits of the contract, with the largest integers all of one sign, no sum overflows. */
MP_TEST(kernels_attention_kv_largest) {
    mp_test_random random = {29};
    kt_set ref = kt_ref();
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_attn_kv_i16);)
        for (int i = 0; i < 4; i++) {
            const int sign = i % 2 ? 1 : -1;
            kv_case c = kv_make(&ref, &random, 128, 1, 2, 256, 64, i < 2 ? MP_I16 : MP_I8, 0, 1.0f);
            const mp_attn_kv *a = kv_of(&c);
            for (int t = 0; t < 128; t++) {
                for (int d = 0; d < 256; d++)
                    c.keys[t * 256 + d] = 0.03f;
                for (int d = 0; d < 64; d++)
                    c.values[t * 64 + d] = (float)sign;
                kv_put(&v, c.dtype, c.keys + t * 256, c.values + t * 64, 256, 64, t % MP_KV_BLOCK,
                       c.k[t / MP_KV_BLOCK], c.v[t / MP_KV_BLOCK]);
            }
            for (int i = 0; i < 2; i++) {
                float *q = c.q + i * a->ldq_group;
                for (int d = 0; d < 256; d++)
                    q[d] = -(float)sign;
                v.call.attn_query_i16(q, 256);
            }
            mp_attn_partial got = partial_make(2, 64);
            kv_attend(&v, &c, a, 1, 0, 2, &got);
            for (int i = 0; i < 2; i++) {
                MP_CHECK_NEAR(got.m[i], -sign * 256 * 0.03f / 16, 1e-6);
                MP_CHECK_NEAR(got.l[i], 128.0, 1e-4);
                for (int d = 0; d < 64; d++)
                    MP_CHECK_NEAR(got.o[i * 64 + d], 128.0 * sign, 1e-3);
            }
            partial_free(&got);
            kv_free(&c);
        }
}

/* For any scores, weights are from 0 to 1 and the largest is 1. Scores beyond fp32 yield NaN, even in one block. */
MP_TEST(kernels_attention_kv_huge_scores) {
    mp_test_random random = {30};
    kt_set ref = kt_ref();
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_attn_kv_i16);)
        for (int round = 0; round < 60; round++) {
            static const float sizes[] = {1e2f, 2e3f, 2e4f, 1e6f, 1e10f, 1e15f, 1e20f};
            const float size = sizes[round % 7];
            const int tokens = round % 2 ? 40 : 130;
            kv_case c = kv_make(&ref, &random, tokens, 3, 2, 128, 16, round / 7 % 2 ? MP_I8 : MP_I16, 0, size);
            const mp_attn_kv *a = kv_of(&c);
            mp_attn_partial got = partial_make(6, 16);
            kv_attend(&v, &c, a, 3, 0, c.blocks, &got);
            for (int i = 0; i < 6; i++) {
                if (size == 1e20f) {
                    MP_CHECK(isnan(got.l[i]));
                    continue;
                }
                MP_CHECK(got.l[i] >= 1.0f && got.l[i] <= (float)tokens);
                for (int d = 0; d < 16; d++) {
                    float low = INFINITY, high = -INFINITY;
                    for (int t = 0; t < tokens; t++) {
                        low = fminf(low, c.values[t * 16 + d]);
                        high = fmaxf(high, c.values[t * 16 + d]);
                    }
                    const float mean = got.o[i * 16 + d] / got.l[i], off = 1e-2f * fmaxf(fabsf(low), fabsf(high));
                    MP_CHECK(mean >= low - off && mean <= high + off);
                }
            }
            partial_free(&got);
            kv_free(&c);
        }
}

/* A row at or after `end` sees what a row at end - 1 sees, from the oldest position of its own window on. `near`
 * changes no bit. */
MP_TEST(kernels_attention_kv_end_and_near) {
    static const mp_dtype types[] = {MP_F32, MP_I16, MP_I8};
    mp_test_random random = {52};
    kt_set ref = kt_ref();
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_attn_kv_i16);)
        for (int round = 0; round < 90; round++) {
            const int tokens = kt_pick(&random, 2, 200), window = round % 2 ? kt_pick(&random, 2, 90) : 0;
            const bool one = round / 3 % 2; /* one row of several heads, or several rows of one */
            const int rows = one ? 1 : kt_pick(&random, 1, tokens < 40 ? tokens : 40), group = one ? 7 : 1;
            kv_case c = kv_make(&ref, &random, tokens, rows, group, 32, 32, types[round % 3], window, 3.0f);
            mp_attn_kv a = *kv_of(&c);
            mp_attn_partial want = partial_make(rows * group, 32), got = partial_make(rows * group, 32);
            const int past = kt_pick(&random, 0, 30); /* positions of the rows beyond their own */
            for (int r = 0; r < rows; r++) {           /* each row alone, at the last position that exists */
                const int64_t own = a.pos0 + r + past, last = own < tokens - 1 ? own : tokens - 1;
                mp_attn_kv one_row = a;
                one_row.q += r * a.ldq;
                one_row.pos0 = last;
                one_row.window = window ? window - (int)(own - last) : 0;
                mp_attn_partial part = {want.m + r * group, want.l + r * group, want.o + r * group * 32};
                if (window == 0 || one_row.window > 0)
                    kv_attend(&ref, &c, &one_row, 1, 0, c.blocks, &part);
            }
            a.pos0 += past;
            a.end = tokens;
            for (int near = 0; near < 2; near++) {
                a.near = near;
                mp_attn_begin(rows * group, 32, &got);
                kv_attend(&v, &c, &a, rows, 0, c.blocks, &got);
                partial_same(&v, &want, &got, rows * group, 32, near ? "near" : "end", &c);
            }
            mp_attn_begin(rows * group, 32, &got);
            kv_attend(&ref, &c, &a, rows, 0, c.blocks, &got);
            partial_same(&ref, &want, &got, rows * group, 32, "end", &c);
            partial_free(&want);
            partial_free(&got);
            kv_free(&c);
        }
}
