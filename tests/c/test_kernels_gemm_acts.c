/* Products whose outputs become the inputs of the next product. The expected results come from mp_gemm, `gated` and
 * mp_acts_fill in sequence. */
#include "kernel_test.h"

enum { ROWS = 200, N = 160, K = 96 }; /* an odd number of panels */

typedef struct operands {
    mp_wmat w[2];
    mp_acts x, want, got;
    void *memory[5];
} operands;

static void *keep(operands *o, int i, size_t bytes) { return o->memory[i] = kt_alloc(bytes); }

static operands make(mp_wkind kind, const float *rows, int M, int lead, mp_test_random *random) {
    operands o = {0};
    const mp_akind acts = mp_wmat_acts(kind);
    float *w = kt_alloc(sizeof(float) * N * K);
    for (int i = 0; i < 2; i++) {
        kt_random(random, w, N * K);
        mp_wmat_init(&o.w[i], kind, N, K);
        o.w[i].data = keep(&o, i, mp_wmat_bytes(&o.w[i]) + MP_WMAT_SLACK);
        uint8_t *stored = kt_alloc((size_t)N * K * 34 / 32); /* Q8_0 blocks: a scale of 2^-7, then 32 bytes */
        for (int b = 0; b < N * K / 32; b++) {
            memcpy(stored + b * 34, &(uint16_t){0x2000}, 2);
            for (int k = 0; k < 32; k++)
                stored[b * 34 + 2 + k] = (uint8_t)(int8_t)(w[b * 32 + k] * 127);
        }
        const mp_tensor src = {.dtype = kind == MP_W_BF16 ? MP_F32 : MP_Q8_0,
                               .ndim = 2,
                               .shape = {N, K},
                               .data = kind == MP_W_BF16 ? (const uint8_t *)w : stored,
                               .nbytes = kind == MP_W_BF16 ? sizeof(float) * N * K : (size_t)N * K * 34 / 32};
        mp_wmat_pack(&o.w[i], &src, 0, o.w[i].panels);
        kt_free(stored);
    }
    kt_free(w);
    mp_acts_init(&o.x, acts, M, K, keep(&o, 2, mp_acts_bytes(acts, M, K)));
    mp_acts_fill(&o.x, rows, K, 0, M);
    mp_acts_init(&o.want, acts, M, lead + N, keep(&o, 3, mp_acts_bytes(acts, M, lead + N)));
    mp_acts_init(&o.got, acts, M, lead + N, keep(&o, 4, mp_acts_bytes(acts, M, lead + N)));
    return o;
}

static void same(const kt_set *set, const operands *o, const char *what) {
    const size_t n = (size_t)o->want.M;
    const int K_next = o->want.K;
    for (size_t m = 0; m < n && o->want.kind == MP_A_BF16; m++)
        for (int i = 0; i < K_next; i++) {
            const uint16_t want = o->want.bf16[m * (size_t)o->want.ldq + (size_t)i];
            const uint16_t got = o->got.bf16[m * (size_t)o->got.ldq + (size_t)i];
            const bool nan = (want & 0x7fff) > 0x7f80 && (got & 0x7fff) > 0x7f80;
            const bool flushed = !(want & 0x7f80) && !(got & 0x7fff);
            if (want != got && !nan && !flushed)
                MP_FAIL("%s under %s, %s: [%zu, %d] is %04x, expected %04x", set->variant, set->mask, what, m, i, got,
                        want);
        }
    if (o->want.kind == MP_A_BF16)
        return;
    for (size_t m = 0; m < n; m++)
        kt_same_bytes(set, o->want.q + m * (size_t)o->want.ldq, o->got.q + m * (size_t)o->got.ldq,
                      ((size_t)K_next + 63) / 64 * 64, "%s, row %zu", what, m);
    const int64_t blocks = (int64_t)n * (K_next / 32);
    kt_same(set, o->want.scale, o->got.scale, blocks, "%s, scales", what);
    kt_same_bytes(set, o->want.sum, o->got.sum, n * (size_t)(K_next / 16) * sizeof(int32_t), "%s, sums", what);
    kt_same(set, o->want.low, o->got.low, blocks, "%s, factors of minima", what);
}

static void check(const kt_set *set, operands *o, int count, mp_act act, const float *const bias[2],
                  mp_test_random *random, const char *what) {
    const int M = o->x.M, lead = o->want.K - N;
    float *y[2], *whole = kt_alloc(sizeof(float) * (size_t)M * (size_t)(lead + N));
    mp_gemm_part parts[2];
    for (int i = 0; i < 2; i++) {
        const mp_epilogue ep = {.bias = bias[i], .act = count == 1 ? act : MP_ACT_NONE};
        y[i] = kt_alloc(sizeof(float) * (size_t)M * N);
        mp_gemm(&o->w[i], &o->x, 0, M, 0, o->w[i].panels, &ep, y[i], N);
        parts[i] = (mp_gemm_part){.w = &o->w[i], .x = &o->x, .bias = bias[i]};
    }
    if (count == 2)
        mp_kernels_get()->gated(act, y[0], y[1], (int64_t)M * N, y[0]);
    for (int m = 0; m < M; m++) {
        memcpy(whole + m * (lead + N), y[1] + m * N, sizeof(float) * (size_t)lead);
        memcpy(whole + m * (lead + N) + lead, y[0] + m * N, sizeof(float) * N);
    }
    mp_acts_fill(&o->want, whole, lead + N, 0, M);
    memset(o->memory[4], 0xee, mp_acts_bytes(o->got.kind, M, lead + N));
    if (lead)
        mp_acts_fill_first(&o->got, y[1], N, lead, 0, M);
    for (int m = 0, end; m < M; m = end) { /* random splits of rows and panels */
        end = m + 1 + (int)(mp_test_random_u64(random) % ROWS);
        end = end < M ? end : M;
        for (int p = 0, panels; p < N / MP_PANEL_N; p += panels) {
            panels = 1 + (int)(mp_test_random_u64(random) % (uint64_t)(N / MP_PANEL_N - p));
            mp_gemm_acts(parts, count, act, m, end, p, p + panels, &o->got);
        }
    }
    same(set, o, what);
    kt_free(y[0]);
    kt_free(y[1]);
    kt_free(whole);
}

static void check_kind(mp_wkind kind, int slot) {
    mp_test_random random = {31};
    const int Ms[] = {1, 15, 32, 33, 96, 97, ROWS};
    float *rows = kt_alloc(sizeof(float) * ROWS * K), bias[2][N];
    for (kt_set v = {0}; kt_next(&v, slot);)
        for (size_t i = 0; i < sizeof Ms / sizeof *Ms; i++)
            for (int extreme = -1; extreme < KT_EXTREMES; extreme++) {
                char what[80];
                if (extreme < 0)
                    kt_random(&random, rows, Ms[i] * K);
                else
                    kt_extreme(&random, (enum kt_extreme)extreme, rows, Ms[i] * K);
                kt_random(&random, bias[0], N);
                kt_random(&random, bias[1], N);
                operands o = make(kind, rows, Ms[i], Ms[i] % 2 ? 64 : 0, &random);
                for (int turn = 0; turn < 4; turn++) {
                    const float *const with[2] = {bias[0], turn == 1 ? NULL : bias[1]}, *const none[2] = {0};
                    snprintf(what, sizeof what, "M=%d, %s, turn %d", Ms[i],
                             extreme < 0 ? "random" : kt_extreme_names[extreme], turn);
                    check(&v, &o, 1 + turn % 2, turn < 2 ? MP_ACT_GELU : MP_ACT_NONE, turn == 3 ? none : with, &random,
                          what);
                }
                for (int m = 0; m < 5; m++)
                    kt_free(o.memory[m]);
            }
    kt_free(rows);
}

MP_TEST_SECONDS(kernels_gemm_acts_bf16, 100) { check_kind(MP_W_BF16, MP_SLOT_gemm_bf16); }
MP_TEST_SECONDS(kernels_gemm_acts_q8, 100) { check_kind(MP_W_Q8_0, MP_SLOT_gemm_q8_0); }

/* The reference slot's output equals that of the reference product, rounded. */
MP_TEST(kernels_gemm_acts_ref) {
    mp_test_random random = {32};
    float *rows = kt_alloc(sizeof(float) * ROWS * K), *y = kt_alloc(sizeof(float) * 40 * N), bias[N];
    kt_random(&random, rows, 40 * K);
    kt_random(&random, bias, N);
    const kt_set ref = kt_ref();
    operands o = make(MP_W_BF16, rows, 40, 0, &random);
    const mp_epilogue ep = {.bias = bias, .act = MP_ACT_SILU};
    ref.call.gemm_bf16(&o.w[0], &o.x, 0, 40, 0, N / MP_PANEL_N, &ep, y, N);
    mp_acts_fill(&o.want, y, N, 0, 40);
    ref.call.gemm_bf16_acts(&o.w[0], &o.x, 0, 40, 0, N / MP_PANEL_N, &ep, o.got.bf16, o.got.ldq);
    same(&ref, &o, "ref");
    for (int m = 0; m < 5; m++)
        kt_free(o.memory[m]);
    kt_free(rows);
    kt_free(y);
}
