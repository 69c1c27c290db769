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
