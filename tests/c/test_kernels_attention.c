/* Attention kernels: every variant has the bits of ref/, and ref/ is close to double precision. Splitting rows and
 * blocks changes no bit, and invisible keys do not affect a row. */
#include "kernel_edge.h"
#include "kernel_test.h"
#include "kernels/math_const.h"
#include "kernels/pack_dense.h"
#include "kernels/ref/math.h"

/* the templates for kt_next_or_plain */
#include "kernels/simd/vec_plain.h"

#include "kernels/simd/attention_tmpl.h"

static bool next_variant(kt_set *set, int slot) { return kt_next_or_plain(set, slot, attention_fill); }

typedef struct full_case {
    mp_attn_full a;
    float *qkv, *bias, *want, *got;
    void *scratch;
    int64_t qkv_floats, out_floats;
} full_case;

enum { FULL_PAD = 5 }; /* output columns that belong to other heads */

static full_case full_make(mp_test_random *random, int T, int D, float size) {
    full_case c = {0};
    const int64_t ld = 3 * D + kt_pick(random, 0, 3);
    c.qkv_floats = (T - 1) * ld + 3 * D; /* the last row has no padding */
    c.qkv = kt_edge(c.qkv_floats);
    c.bias = kt_edge((int64_t)T * T);
    c.out_floats = (int64_t)T * (D + FULL_PAD);
    c.want = kt_alloc(sizeof(float) * (size_t)c.out_floats);
    c.got = kt_alloc(sizeof(float) * (size_t)c.out_floats);
    const size_t any = mp_attn_full_scratch(T, D), i16 = mp_attn_full_i16_plan(T, D).bytes;
    const size_t bytes = any > i16 ? any : i16; /* the tests use mp_attn_full_i16 with few keys, too */
    c.scratch = kt_alloc(bytes);
    for (size_t i = 0; i < bytes / sizeof(float); i++) /* scratch may contain data of an earlier call */
        ((float *)c.scratch)[i] = NAN;
    kt_random(random, c.qkv, c.qkv_floats);
    for (int64_t i = 0; i < c.qkv_floats; i++)
        c.qkv[i] *= size;
    for (int64_t i = 0; i < c.out_floats; i++)
        c.want[i] = c.got[i] = -77.0f;
    c.a = (mp_attn_full){.q = c.qkv,
                         .k = c.qkv + D,
                         .v = c.qkv + 2 * D,
                         .ld = ld,
                         .ld_out = D + FULL_PAD,
                         .T = T,
                         .D = D,
                         .scale = 1.0f / sqrtf((float)D)};
    return c;
}

static void full_free(full_case *c) {
    kt_edge_free(c->qkv, c->qkv_floats);
    kt_edge_free(c->bias, (int64_t)c->a.T * c->a.T);
    kt_free(c->want);
    kt_free(c->got);
    kt_free(c->scratch);
}

/* Set the masks and bias that the bits of `option` select. */
static void full_options(full_case *c, int option, mp_test_random *random) {
    c->a.causal = option & 1;
    c->a.window = option & 2 ? kt_pick(random, 1, c->a.T + 3) : 0;
    c->a.ld_bias = kt_pick(random, 0, 1) ? c->a.T : -1;
    if (option & 4)
        kt_random(random, c->bias, (int64_t)c->a.T * c->a.T);
    c->a.bias = option & 4 ? c->bias + (c->a.ld_bias < 0 ? c->a.T * c->a.T - c->a.T : 0) : NULL;
}

/* Compare rows [row0, row1) of every variant with those of ref. Returns the number of variants. */
static int full_compare(full_case *c, int row0, int row1, const char *what) {
    mp_attn_full a = c->a;
    int variants = 0;
    a.out = c->want;
    kt_ref().call.attn_full(&a, row0, row1, c->scratch);
    a.out = c->got;
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_attn_full); variants++) {
        for (int64_t i = 0; i < c->out_floats; i++)
            c->got[i] = -77.0f;
        v.call.attn_full(&a, row0, row1, c->scratch);
        kt_same(&v, c->want, c->got, c->out_floats, "attn_full %s T=%d D=%d causal=%d window=%d bias=%d", what, a.T,
                a.D, a.causal, a.window, a.bias != NULL);
    }
    return variants;
}

MP_TEST_SECONDS(kernels_attention_full_matches_ref, 100) {
    static const int heads[] = {8, 16, 24, 32, 40, 64, 128, 256, 1, 7, 12, 26, 100};
    static const int longer[] = {96, 127, 129, 200, 333};
    mp_test_random random = {11};
    uint32_t asked = 0;
    for (int T = 1; T <= 70; T++)
        for (int option = 0; option < 8; option++) {
            if (!mp_test_take(&asked))
                continue;
            full_case c = full_make(&random, T, heads[(T + option) % 13], option == 5 ? 30.0f : 3.0f);
            full_options(&c, option, &random);
            MP_CHECK(full_compare(&c, 0, T, "ordinary") >= 1);
            full_free(&c);
        }
    for (size_t i = 0; i < sizeof longer / sizeof *longer; i++)
        for (int option = 0; option < 8; option++) {
            if (!mp_test_take(&asked))
                continue;
            full_case c = full_make(&random, longer[i], heads[(5 * i + (size_t)option) % 13], 3.0f);
            full_options(&c, option, &random);
            full_compare(&c, 0, longer[i], "longer");
            full_free(&c);
        }
}

/* Values that exceed L2 are multiplied in parts. Their last part may have any number of keys, and with a window, some
 * rows see nothing of a part. Computes only some of the rows: more than one block, and an incomplete tile. */
MP_TEST_SECONDS(kernels_attention_full_values_in_parts, 90) {
    static const struct { int T, D; } shapes[] = {{129, 512}, {143, 500}, {353, 200}, {1100, 64}, {4200, 8}};
    mp_test_random random = {12};
    uint32_t asked = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int option = 0; option < 8; option++) {
            const int T = shapes[i].T, D = shapes[i].D, first = T / 2 - 3;
            if (option & 4 && T > 2000)
                continue; /* the biases of all pairs would take 70 MB */
            if (!mp_test_take(&asked))
                continue;
            full_case c = full_make(&random, T, D, 3.0f);
            const mp_attn_full_layout plan = mp_attn_full_plan(T, D);
            MP_CHECK(plan.values < T);
            full_options(&c, option, &random);
            full_compare(&c, first, first + 61 < T ? first + 61 : T, "in parts");
            full_free(&c);
        }
}

/* In bfloat16, variants add in different orders. Each variant must be close to the reference, within the effect of one
 * weight rounded the other way, and the reference must be close to attention without rounding. */
MP_TEST_SECONDS(kernels_attention_bf16_near_ref, 100) {
    static const int heads[] = {8, 24, 32, 40, 64, 80, 128, 256, 512};
    mp_test_random random = {21};
    kt_set ref = kt_ref(), v = {0};
    bool more = true;
    while (more) {
        more = kt_next(&v, MP_SLOT_attn_full_bf16);
        for (int round = 0; round < mp_test_rounds(45); round++) {
            full_case c = full_make(&random, kt_pick(&random, 1, 120), heads[round % 9], 1.0f);
            full_options(&c, round % 8, &random);
            mp_attn_full a = c.a;
            a.out = c.want;
            (more ? ref.call.attn_full_bf16 : ref.call.attn_full)(&a, 0, a.T, c.scratch);
            a.out = c.got;
            (more ? v.call.attn_full_bf16 : ref.call.attn_full_bf16)(&a, 0, a.T, c.scratch);
            float most = 0;
            for (int t = 0; t < a.T; t++)
                for (int d = 0; d < a.D; d++)
                    most = fmaxf(most, fabsf(a.v[t * a.ld + d]));
            for (int64_t i = 0; i < c.out_floats; i++)
                if (!(fabsf(c.got[i] - c.want[i]) <= 0.02f * most))
                    MP_FAIL("%s: T=%d D=%d option %d: %g, not %g", more ? v.mask : "ref", a.T, a.D, round % 8,
                            (double)c.got[i], (double)c.want[i]);
            full_free(&c);
        }
    }
}

/* ---- model of attention in bfloat16 ------------------------------------------------------------------------------
 *
 * Queries (scaled), keys, values and weights are rounded to bfloat16. Products sum as in test_kernels_dense.c: tiles
 * sum 32 inputs at a time, vdpbf16ps one after another. Weights are exp(s - max), by exp2 of degree 4. The model does
 * not define the order in which the weights are summed. */

static float bf16_of(float x) {
    const float y = mp_bf16_to_f32(mp_bf16_from_f32(x));
    return fabsf(y) < 0x1p-126f ? copysignf(0.0f, y) : y;
}

/* Product of x and y with n elements; y has the stride `step`. */
static float product_of(bool tiles, const float *x, const float *y, int64_t step, int n) {
    float sum = 0;
    for (int k = 0; !tiles && k < n; k++)
        sum = fmaf(x[k], y[k * step], sum);
    if (!tiles)
        return sum;
    for (int i = 0; i < n; i += 32) {
        float chains[2] = {0, 0};
        for (int k = i; k < n && k < i + 32; k++)
            chains[k % 2] = fmaf(x[k], y[k * step], chains[k % 2]);
        sum += chains[0] + chains[1];
    }
    return sum;
}

static float weight(float s, float max) {
    const float y = (s - max) * MP_LOG2E, whole = rintf(y), r = y - whole;
    if (y < MP_EXP2_LO)
        return 0.0f;
    const float f = fmaf(r, fmaf(r, fmaf(r, MP_EXP2_D4, MP_EXP2_D3), MP_EXP2_D2), MP_EXP2_D1);
    return ldexpf(fmaf(r, f, 1.0f), (int)whole);
}

/* out: [D] of row r. k and v: [T, D], rounded. */
static void bf16_attention(bool tiles, const mp_attn_full *a, int r, const float *k, const float *v, float *out) {
    float q[512], p[160], max = -INFINITY;
    double sum = 0;
    for (int d = 0; d < a->D; d++)
        q[d] = bf16_of(a->q[r * a->ld + d] * a->scale);
    for (int t = 0; t < a->T; t++) {
        const bool seen = a->window == 0 ? !a->causal || t <= r
                          : a->causal    ? t <= r && r - t < a->window
                                         : abs(r - t) <= a->window / 2;
        p[t] = seen ? product_of(tiles, q, k + t * a->D, 1, a->D) + (a->bias ? a->bias[r * a->ld_bias + t] : 0.0f)
                    : -INFINITY;
        max = fmaxf(max, p[t]);
    }
    for (int t = 0; t < a->T; t++) {
        p[t] = weight(p[t], max);
        sum += p[t];
        p[t] = bf16_of(p[t]);
    }
    for (int d = 0; d < a->D; d++)
        out[d] = product_of(tiles, p, v + d, a->D, a->T) / (float)sum;
}

/* Each call computes a part of the rows, with scratch full of NaN, and writes no other row. */
MP_TEST_SECONDS(kernels_attention_bf16_model, 60) {
    static const int heads[] = {8, 24, 32, 40, 64, 80, 128, 512};
    mp_test_random random = {23};
    for (kt_set v = {0}; kt_next(&v, MP_SLOT_attn_full_bf16);)
        for (int round = 0; round < mp_test_rounds(48); round++) {
            const bool tiles = strncmp(v.mask, "amx", 3) == 0;
            full_case c = full_make(&random, kt_pick(&random, 1, 150), heads[round % 8], round % 3 ? 1.0f : 12.0f);
            full_options(&c, round / 2 % 8, &random);
            mp_attn_full a = c.a;
            for (int64_t i = 0; i < c.qkv_floats; i += 7) { /* exactly between two numbers of bfloat16 */
                uint32_t bits = (kt_bits(c.qkv[i]) & 0xffff0000) | 0x8000;
                memcpy(&c.qkv[i], &bits, sizeof bits);
            }
            float *keys = kt_alloc(sizeof(float) * (size_t)(a.T * a.D)), row[512], most = 0;
            float *values = kt_alloc(sizeof(float) * (size_t)(a.T * a.D));
            for (int t = 0; t < a.T; t++)
                for (int d = 0; d < a.D; d++) {
                    keys[t * a.D + d] = bf16_of(a.k[t * a.ld + d]);
                    values[t * a.D + d] = bf16_of(a.v[t * a.ld + d]);
                    most = fmaxf(most, fabsf(values[t * a.D + d]));
                }
            const int row0 = kt_pick(&random, 0, a.T - 1), row1 = kt_pick(&random, row0, a.T);
            a.out = c.got;
            v.call.attn_full_bf16(&a, row0, row1, c.scratch);
            for (int r = 0; r < a.T; r++) {
                if (row0 <= r && r < row1)
                    bf16_attention(tiles, &a, r, keys, values, row);
                for (int i = 0; i < a.D + FULL_PAD; i++) {
                    const bool inside = row0 <= r && r < row1 && i < a.D;
                    const float got = c.got[r * a.ld_out + i], want = inside ? row[i] : -77.0f;
                    if (!(fabsf(got - want) <= (inside ? 3e-6f * most : 0.0f))) /* 2^-24 for each of 6 additions */
                        MP_FAIL("%s: T=%d D=%d option %d rows %d-%d: [%d, %d] is %.9g, expected %.9g", v.mask, a.T,
                                a.D, round / 2 % 8, row0, row1, r, i, (double)got, (double)want);
                }
            }
            kt_free(keys);
            kt_free(values);
            full_free(&c);
        }
}

/* A NaN whose payload is in bits that bfloat16 lacks stays NaN. */
MP_TEST(kernels_attention_bf16_nan) {
    static const uint32_t nans[] = {0x7f800001, 0xff800001, 0x7fffffff};
    mp_test_random random = {24};
    for (kt_set v = {0}; kt_next(&v, MP_SLOT_attn_full_bf16);)
        for (int part = 0; part < 3; part++) /* query, key, value */
            for (int i = 0; i < 3; i++) {
                full_case c = full_make(&random, 50, 40, 1.0f);
                memcpy(&c.qkv[7 * c.a.ld + part * 40 + 3], &nans[i], sizeof nans[i]);
                c.a.out = c.got;
                v.call.attn_full_bf16(&c.a, 0, 50, c.scratch);
                for (int r = 0; r < 50; r++)
                    for (int d = 0; d < 40; d++)
                        MP_CHECK_INT(isnan(c.got[r * c.a.ld_out + d]), part == 0 ? r == 7 : part == 1 || d == 3);
                full_free(&c);
            }
}

/* Split the rows into parts of at most `most` rows. Each part uses the scratch that the previous part wrote. The bits
 * must not change. */
static void any_split(const kt_set *v, mp_attn_full_function full, const char *slot, int rounds, int most,
                      mp_test_random *random) {
    for (int round = 0; round < rounds; round++) {
        full_case c = full_make(random, kt_pick(random, 1, 150), 8 * kt_pick(random, 1, 8), 3.0f);
        full_options(&c, round % 8, random);
        mp_attn_full a = c.a;
        a.out = c.want;
        full(&a, 0, a.T, c.scratch);
        a.out = c.got;
        for (int r = 0, next; r < a.T; r = next) {
            next = r + kt_pick(random, 0, most);
            next = next < a.T ? next : a.T;
            full(&a, r, next, c.scratch);
        }
        kt_same(v, c.want, c.got, c.out_floats, "%s in parts, T=%d D=%d", slot, a.T, a.D);
        full_free(&c);
    }
}

MP_TEST(kernels_attention_full_any_split) {
    mp_test_random random = {13};
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_attn_full);)
        any_split(&v, v.call.attn_full, "attn_full", mp_test_rounds(60), 20, &random);
}

MP_TEST(kernels_attention_bf16_any_split) {
    mp_test_random random = {22};
    for (kt_set v = {0}; kt_next(&v, MP_SLOT_attn_full_bf16);)
        any_split(&v, v.call.attn_full_bf16, "attn_full_bf16", 80, 40, &random);
}

/* Keys that are masked for a row may have any finite value without effect on the row. */
MP_TEST(kernels_attention_full_masked) {
    mp_test_random random = {14};
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_attn_full);)
        for (int round = 0; round < 40; round++) {
            full_case c = full_make(&random, kt_pick(&random, 2, 120), 32, 3.0f);
            mp_attn_full a = c.a;
            a.causal = true;
            a.window = round % 2 ? kt_pick(&random, 1, 40) : 0;
            const int row = kt_pick(&random, 0, a.T - 2);
            a.out = c.want;
            v.call.attn_full(&a, 0, row + 1, c.scratch);
            for (int t = row + 1; t < a.T; t++)
                for (int d = 0; d < 2 * a.D; d++)
                    c.qkv[t * a.ld + a.D + d] = (d & 1 ? 1e15f : -1e15f) * (float)(d + 1);
            a.out = c.got;
            v.call.attn_full(&a, 0, row + 1, c.scratch);
            kt_same(&v, c.want, c.got, c.out_floats, "rows up to %d of %d", row, a.T);
            full_free(&c);
        }
}

/* Compare ref with a softmax over the visible keys in double precision. */
MP_TEST(kernels_attention_full_ref_in_double) {
    mp_test_random random = {15};
    kt_set ref = kt_ref();
    for (int round = 0; round < 60; round++) {
        full_case c = full_make(&random, kt_pick(&random, 1, 80), 16, 2.0f);
        full_options(&c, round % 8, &random);
        mp_attn_full a = c.a;
        a.out = c.got;
        ref.call.attn_full(&a, 0, a.T, c.scratch);
        for (int r = 0; r < a.T; r++) {
            double sum = 0.0, out[16] = {0};
            for (int t = 0; t < a.T; t++) {
                bool seen = !a.causal || t <= r;
                if (a.window && a.causal)
                    seen = seen && r - t < a.window;
                else if (a.window)
                    seen = seen && abs(r - t) <= a.window / 2;
                if (!seen)
                    continue;
                double s = 0.0;
                for (int d = 0; d < 16; d++)
                    s += (double)a.q[r * a.ld + d] * a.k[t * a.ld + d];
                const double p = exp(s * 0.25 + (a.bias ? a.bias[r * a.ld_bias + t] : 0.0f));
                sum += p;
                for (int d = 0; d < 16; d++)
                    out[d] += p * a.v[t * a.ld + d];
            }
            for (int d = 0; d < 16; d++)
                MP_CHECK_NEAR(a.out[r * a.ld_out + d], out[d] / sum, 3e-6);
        }
        full_free(&c);
    }
}

/* NaN in a query or a visible key propagates. A row whose biases are all -inf yields NaN, not 0. */
MP_TEST(kernels_attention_full_nan) {
    mp_test_random random = {16};
    for (int what = 0; what < 3; what++) {
        full_case c = full_make(&random, 45, 32, 3.0f);
        full_options(&c, what == 2 ? 4 : 0, &random);
        if (what < 2)
            c.qkv[7 * c.a.ld + 32 * what + 3] = NAN;
        for (int t = 0; t < 45 && what == 2; t++)
            c.bias[(c.a.ld_bias < 0 ? 44 - 7 : 7) * 45 + t] = -INFINITY;
        full_compare(&c, 0, 45, "nan");
        MP_CHECK(isnan(c.want[7 * c.a.ld_out]));
        MP_CHECK(what == 1 || !isnan(c.want[8 * c.a.ld_out]));
        full_free(&c);
    }
}

/* A product that underflows leaves -0 in an accumulator, and a masked key that follows in the tile adds +0, which turns
 * -0 into +0. The output must be +0 in either case, so that it does not depend on masked keys. */
MP_TEST(kernels_attention_zero_sign) {
    enum { D = 16, T = 3 };
    kt_set ref = kt_ref();
    float q[T * D], k[T * D] = {0}, x[T * D], want[T * D], got[T * D];
    for (int i = 0; i < T * D; i++) {
        q[i] = 1.0f;
        k[i] = i < D ? 1.0f : 0.0f;                          /* key 0 has all the weight */
        x[i] = i < D ? 0.0f : i < 2 * D ? -0x1p-149f : 1.0f; /* value 1 underflows to -0, value 2 is masked */
    }
    mp_attn_full full = {.q = q, .k = k, .v = x, .ld = D, .ld_out = D, .T = T, .D = D, .scale = 0.5f, .causal = true};
    float k_block[D * MP_KV_BLOCK] = {0}, v_block[D * MP_KV_BLOCK] = {0};
    for (int t = 0; t < T; t++)
        ref.call.kv_store(k + t * D, x + t * D, D, D, t, k_block, v_block);
    void *k_blocks[] = {k_block}, *v_blocks[] = {v_block};
    void *scratch = kt_alloc(mp_attn_full_scratch(T, D) + mp_attn_kv_scratch(D));
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_attn_kv);) {
        full.out = want;
        ref.call.attn_full(&full, 0, T, scratch);
        MP_CHECK(!signbit(want[D]));
        full.out = got;
        for (int r = 0; r < T; r++)
            v.call.attn_full(&full, r, r + 1, scratch);
        kt_same(&v, want, got, T * D, "attn_full row by row");
        v.call.attn_full(&full, 0, T, scratch);
        kt_same(&v, want, got, T * D, "attn_full at once");
        for (int rows = 1; rows <= 2; rows++) { /* row 0 is token 1: alone, then with the row of token 2 */
            mp_attn_kv a = {.q = q,
                            .ldq = D,
                            .ldq_group = D,
                            .group = 1,
                            .k_dim = D,
                            .v_dim = D,
                            .scale = 0.5f,
                            .pos0 = 1,
                            .k_blocks = k_blocks,
                            .v_blocks = v_blocks};
            float m[2], l[2], o[2 * D];
            mp_attn_partial state = {m, l, o};
            mp_attn_begin(2, D, &state);
            v.call.attn_kv(&a, rows, 0, 1, &state, scratch);
            for (int d = 0; d < D; d++)
                MP_CHECK(o[d] == 0.0f && !signbit(o[d]));
        }
    }
    kt_free(scratch);
}

/* ---- mp_attn_full_i16 -------------------------------------------------------------------------------------------- */

/* Set the masks that `option` selects; mp_attn_full_i16 takes no bias. */
static void i16_options(full_case *c, int option, mp_test_random *random) {
    full_options(c, option & 3, random);
    if (option == 4) /* a window that reaches from the first row to the last */
        c->a.window = 2 * c->a.T;
}

/* Compute rows [row0, row1) with ref into `want`. */
static void i16_want(full_case *c, int row0, int row1) {
    mp_attn_full a = c->a;
    a.out = c->want;
    for (int64_t i = 0; i < c->out_floats; i++)
        c->want[i] = -77.0f;
    kt_ref();
    mp_attn_full_i16(&a, row0, row1, c->scratch);
}

/* Compare rows [row0, row1) of every variant with those of ref. */
static void i16_compare(full_case *c, int row0, int row1, const char *what) {
    i16_want(c, row0, row1);
    mp_attn_full a = c->a;
    a.out = c->got;
    for (kt_set v = {0}; kt_next(&v, MP_SLOT_attn_kv_i16);) {
        for (int64_t i = 0; i < c->out_floats; i++)
            c->got[i] = -77.0f;
        mp_attn_full_i16(&a, row0, row1, c->scratch);
        kt_same(&v, c->want, c->got, c->out_floats, "full_i16 %s T=%d D=%d causal=%d window=%d", what, a.T, a.D,
                a.causal, a.window);
    }
}

MP_TEST_SECONDS(kernels_attention_full_i16_matches_ref, 100) {
    static const int heads[] = {8, 16, 24, 32, 40, 64, 128, 256, 1, 7, 12, 26, 100, 63, 80};
    static const int longer[] = {96, 127, 128, 129, 192, 200, 333};
    mp_test_random random = {41};
    uint32_t asked = 0;
    for (int T = 1; T <= 77; T++)
        for (int option = 0; option < 5; option++) {
            const int length = T <= 70 ? T : longer[T - 71];
            if (!mp_test_take(&asked))
                continue;
            full_case c = full_make(&random, length, heads[(T + 4 * option) % 15], option == 3 ? 30.0f : 3.0f);
            i16_options(&c, option, &random);
            i16_compare(&c, 0, length, "all rows");
            if (length > 3)
                i16_compare(&c, length / 3, length - 1, "some rows");
            full_free(&c);
        }
}

/* True if row r sees key t. */
static bool full_sees(const mp_attn_full *a, int r, int t) {
    if (a->causal)
        return t <= r && (a->window == 0 || r - t < a->window);
    return a->window == 0 || abs(r - t) <= a->window / 2;
}

/* Compare row r, computed by mp_attn_full_i16, with a softmax in double precision. Keys, queries, values and weights
 * are rounded to 12 to 14 bits: `most` is a multiple of the greatest value. */
static void i16_in_double(const mp_attn_full *a, int r, double most) {
    double sum = 0.0, out[128] = {0}, top = -INFINITY, greatest = 0.0;
    for (int pass = 0; pass < 2; pass++) /* the maximum, then the sums */
        for (int t = 0; t < a->T; t++) {
            if (!full_sees(a, r, t))
                continue;
            double s = 0.0;
            for (int d = 0; d < a->D; d++)
                s += (double)a->q[r * a->ld + d] * a->k[t * a->ld + d];
            s *= a->scale;
            top = pass == 0 && s > top ? s : top;
            for (int d = 0; d < a->D && pass == 1; d++) {
                const double x = a->v[t * a->ld + d];
                out[d] += exp(s - top) * x;
                greatest = fabs(x) > greatest ? fabs(x) : greatest;
            }
            sum += pass == 1 ? exp(s - top) : 0.0;
        }
    for (int d = 0; d < a->D; d++)
        MP_CHECK_NEAR(a->out[r * a->ld_out + d], out[d] / sum, most * greatest);
}

MP_TEST(kernels_attention_full_i16_in_double) {
    static const int heads[] = {32, 64, 16, 63, 128, 1};
    mp_test_random random = {42};
    kt_ref();
    for (int round = 0; round < 60; round++) {
        full_case c = full_make(&random, kt_pick(&random, 1, 150), heads[round % 6], 2.0f);
        i16_options(&c, round % 5, &random);
        mp_attn_full a = c.a;
        a.out = c.got;
        mp_attn_full_i16(&a, 0, a.T, c.scratch);
        for (int r = 0; r < a.T; r++)
            i16_in_double(&a, r, 2e-3);
        full_free(&c);
    }
}

/* Equal keys have equal weights, and equal values are returned as I16 stores them. */
MP_TEST(kernels_attention_full_i16_all_equal) {
    enum { T = 130, D = 32 };
    mp_test_random random = {43};
    full_case c = full_make(&random, T, D, 1.0f);
    for (int i = 0; i < T; i++)
        for (int d = 0; d < 3 * D; d++)
            c.qkv[i * c.a.ld + d] = d % 2 ? 0.75f : -0.75f;
    i16_compare(&c, 0, T, "equal");
    for (int i = 0; i < T; i++)
        for (int d = 0; d < D; d++)
            MP_CHECK_NEAR(c.want[i * c.a.ld_out + d], d % 2 ? 0.75 : -0.75, 1e-6);
    for (int i = 0; i < T; i++) /* zeros: scores 0, and outputs +0 */
        memset(c.qkv + i * c.a.ld, 0, sizeof(float) * 3 * D);
    i16_compare(&c, 0, T, "zeros");
    for (int i = 0; i < T; i++)
        for (int d = 0; d < D; d++)
            MP_CHECK(kt_bits(c.want[i * c.a.ld_out + d]) == 0);
    full_free(&c);
}

MP_TEST(kernels_attention_full_i16_any_split) {
    mp_test_random random = {44};
    for (kt_set v = {0}; kt_next(&v, MP_SLOT_attn_kv_i16);)
        for (int round = 0; round < mp_test_rounds(40); round++) {
            full_case c = full_make(&random, kt_pick(&random, 1, 300), 8 * kt_pick(&random, 1, 8), 3.0f);
            i16_options(&c, round % 5, &random);
            mp_attn_full a = c.a;
            a.out = c.want;
            mp_attn_full_i16(&a, 0, a.T, c.scratch);
            a.out = c.got;
            for (int r = 0, next; r < a.T; r = next) {
                next = r + kt_pick(&random, 0, 90);
                next = next < a.T ? next : a.T;
                mp_attn_full_i16(&a, r, next, c.scratch);
            }
            kt_same(&v, c.want, c.got, c.out_floats, "full_i16 in parts, T=%d D=%d", a.T, a.D);
            full_free(&c);
        }
}

/* Each row alone has the bits that it has among all rows: also where its newest key is the first of a block. */
MP_TEST(kernels_attention_full_i16_row_by_row) {
    static const struct { bool causal; int window; } masks[] = {
        {true, 0}, {true, 40}, {false, 0}, {false, 2}, {false, 90}};
    mp_test_random random = {47};
    for (kt_set v = {0}; kt_next(&v, MP_SLOT_attn_kv_i16);)
        for (int i = 0; i < 5; i++) {
            full_case c = full_make(&random, 129 + i / 3 * 20, 16, 3.0f);
            mp_attn_full a = c.a;
            a.causal = masks[i].causal;
            a.window = masks[i].window;
            a.out = c.want;
            mp_attn_full_i16(&a, 0, a.T, c.scratch);
            a.out = c.got;
            for (int r = 0; r < a.T; r++)
                mp_attn_full_i16(&a, r, r + 1, c.scratch);
            kt_same(&v, c.want, c.got, c.out_floats, "row by row, causal=%d window=%d", a.causal, a.window);
            full_free(&c);
        }
}

/* Keys and values that no row sees may be anything, NaN too. A row that sees NaN or Inf is NaN in every component; the
 * other rows keep their bits. */
MP_TEST(kernels_attention_full_i16_masked_and_nan) {
    enum { T = 140, D = 32 };
    mp_test_random random = {45};
    for (int round = 0; round < 48; round++) {
        full_case c = full_make(&random, T, D, 3.0f);
        i16_options(&c, round % 4, &random);
        i16_want(&c, 0, T);
        const int at = kt_pick(&random, 0, T - 1), part = kt_pick(&random, 0, 2); /* query, key or value */
        c.qkv[at * c.a.ld + part * D + kt_pick(&random, 0, D - 1)] = round % 3 == 0   ? NAN
                                                                     : round % 3 == 1 ? INFINITY
                                                                                      : -INFINITY;
        mp_attn_full a = c.a;
        a.out = c.got;
        kt_set v = {.mask = "ref", .variant = "ref"};
        do { /* ref, then the variants */
            for (int64_t i = 0; i < c.out_floats; i++)
                c.got[i] = -77.0f;
            mp_attn_full_i16(&a, 0, T, c.scratch);
            for (int r = 0; r < T; r++) {
                const float *row = c.got + r * a.ld_out;
                const bool spoils = part == 0 ? r == at : full_sees(&a, r, at);
                for (int d = 0; d < D && spoils; d++)
                    if (!isnan(row[d]))
                        MP_FAIL("%s: row %d, component %d is %g in spite of row %d, part %d", v.variant, r, d,
                                (double)row[d], at, part);
                if (!spoils)
                    kt_same(&v, c.want + r * a.ld_out, row, D, "row %d, which does not see row %d", r, at);
            }
        } while (kt_next(&v, MP_SLOT_attn_kv_i16));
        full_free(&c);
    }
}

/* 8,192 keys, and some of their rows. */
MP_TEST_SECONDS(kernels_attention_full_i16_long, 60) {
    enum { T = 8192, D = 64 };
    static const struct { bool causal; int window; } masks[] = {{false, 0}, {true, 0}, {false, 128}, {true, 100}};
    mp_test_random random = {46};
    const int64_t ld = 3 * D;
    float *x = kt_alloc(sizeof(float) * (size_t)(T * ld)), *want = kt_alloc(sizeof(float) * T * D);
    float *got = kt_alloc(sizeof(float) * T * D);
    void *scratch = kt_alloc(mp_attn_full_scratch(T, D));
    kt_random(&random, x, T * ld);
    for (int i = 0; i < 4; i++) {
        const int row0 = i % 2 ? T - 70 : T / 2 - 35, rows = 70;
        mp_attn_full a = {.q = x, .k = x + D, .v = x + 2 * D, .ld = ld, .out = want, .ld_out = D, .T = T, .D = D,
                          .scale = 1.0f, .causal = masks[i].causal, .window = masks[i].window};
        kt_ref();
        mp_attn_full_i16(&a, row0, row0 + rows, scratch);
        for (int r = row0; r < row0 + rows; r += 23)
            i16_in_double(&a, r, 2e-3);
        a.out = got;
        for (kt_set v = {0}; kt_next(&v, MP_SLOT_attn_kv_i16);) {
            mp_attn_full_i16(&a, row0, row0 + rows, scratch);
            kt_same_matrix(&v, want + row0 * D, got + row0 * D, rows, D, D, "8,192 keys, mask %d", i);
        }
    }
    kt_free(x);
    kt_free(want);
    kt_free(got);
    kt_free(scratch);
}
