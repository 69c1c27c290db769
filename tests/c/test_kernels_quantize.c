/* Quantisers (kernels/quantize.h) and weights with separate scales (kernels/scaled.h). */
#include <math.h>
#include <string.h>

#include "base/siphash.h"
#include "kernel_test.h"
#include "kernels/half.h"
#include "kernels/quantize.h"
#include "kernels/scaled.h"

/* Bytes of every type that mp_quantize_row writes. Those of F16 to Q8_0 are what the gguf package makes of the same
 * values; the others are mpool's own, recorded, because a file must not depend on the machine that quantised it.
 * tests/python/models/test_quantize.py compares their errors with those of ggml. */
MP_TEST(quantize_known_answers) {
    enum { VALUES = 48 * 256, MAX_BYTES = 4 * VALUES };
    static const struct { mp_dtype dtype; uint64_t hash; } cases[] = {
        {MP_F32, 0x1e53605f4fcb77f4}, {MP_F16, 0x7fa91eacf5174d3d}, {MP_BF16, 0x1936bb384401764c},
        {MP_Q4_0, 0x7bf5118949d0545f}, {MP_Q4_1, 0xb084c85f4784c3c5}, {MP_Q5_0, 0x37ebc24136156007},
        {MP_Q5_1, 0x413489e963851401}, {MP_Q8_0, 0x85df303bbb9e97ee}, {MP_Q4_K, 0x0ed0ca7199fc76f3},
        {MP_Q5_K, 0xee342a4a096972f1}, {MP_Q6_K, 0x2cbe9b6ff26d925f},
    };
    static const uint64_t no_key[2];
    static float x[VALUES];
    static uint8_t bytes[MAX_BYTES + 1];
    uint32_t seed = 2026;
    for (int i = 0; i < VALUES; i++) {
        seed = seed * 1664525u + 1013904223u;
        const int block = i / 32, kind = block % 12, exponent = (int)(seed >> 3 & 7) - 8;
        const float value = (float)((int)(seed >> 8) - (1 << 23)) * 0x1p-23f; /* exact, in [-1, 1) */
        x[i] = kind == 0   ? 0.0f                                     /* zeros */
               : kind == 1 ? 0.75f                                    /* one value above zero, and one below */
               : kind == 2 ? -0.75f
               : kind == 3 ? value * 0.25f + 2                        /* all positive, all negative */
               : kind == 4 ? value * 0.25f - 2
               : kind == 5 ? (i % 32 == 9 ? value : 0)                /* one value that is not zero */
               : kind == 6 ? (float)((int)(seed >> 16) % 33 - 16) / 4 /* ties */
                           : ldexpf(value, exponent);
    }
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const mp_dtype_row *row = mp_dtype_get(cases[c].dtype);
        const size_t count = (size_t)(VALUES / row->items) * (size_t)row->bytes;
        memset(bytes, 0xa5, sizeof bytes);
        mp_quantize_row(cases[c].dtype, x, VALUES, bytes);
        MP_CHECK_INT(bytes[count], 0xa5);
        const uint64_t hash = mp_siphash(no_key, bytes, count);
        if (hash != cases[c].hash)
            MP_FAIL("%s: the hash is %016llx", row->name, (unsigned long long)hash);
    }
}

/* ---- weights with separate scales: the definition of scaled.h, value by value ---- */

enum { SCALED_N = 72, SCALED_K = 96 }; /* three panels, the last with 8 outputs */

typedef struct scaled_case {
    mp_dtype dtype, scales;
    int32_t rows, group, zero_offset;
} scaled_case;

static uint32_t next_word(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8 ^ *seed << 20;
}

static float defined_value(const mp_scaled *from, int n, int k) {
    static const int awq[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    const uint32_t *codes = (const uint32_t *)(const void *)from->codes.data;
    const uint32_t *zeros = (const uint32_t *)(const void *)from->zeros.data;
    const uint32_t *order = (const uint32_t *)(const void *)from->order.data;
    int nibble = n % 8, group = k / from->group, code;
    float scale;
    if (from->codes.dtype == MP_F8_E4M3) {
        mp_dequantize_row(from->scales.dtype, from->scales.data + (n / from->rows * from->groups + group) *
                          mp_dtype_get(from->scales.dtype)->bytes, 1, &scale);
        return mp_e4m3_to_float(from->codes.data[n * from->K + k]) * scale;
    }
    if (from->codes.dtype == MP_AWQ4) {
        for (int i = 0; i < 8; i++)
            nibble = awq[i] == n % 8 ? i : nibble;
        code = codes[k * (from->N / 8) + n / 8] >> 4 * nibble & 15;
    } else {
        code = codes[k / 8 * from->N + n] >> 4 * (k % 8) & 15;
    }
    if (from->codes.dtype == MP_GPTQ4_ORDERED)
        group = (int)order[k];
    const int zero = (int)(zeros[group * (from->N / 8) + n / 8] >> 4 * nibble & 15) + from->zero_offset;
    mp_dequantize_row(from->scales.dtype,
                      from->scales.data + (group * from->N + n) * mp_dtype_get(from->scales.dtype)->bytes, 1, &scale);
    return scale * (float)(code - zero);
}

/* Compare rows [n0, n0 + n) as `type` with the definition. Q4_1 rounds scale and offset to f16, Q8_0 rounds again. */
static void check_scaled_rows(const mp_scaled *from, int n0, int n, mp_dtype type, const float *defined) {
    static uint8_t got[SCALED_N * SCALED_K * 4 + 1], want[SCALED_K * 4];
    const size_t bytes = type == MP_F32 ? sizeof(float) * SCALED_K
                                        : SCALED_K / 32 * (size_t)mp_dtype_get(type)->bytes;
    memset(got, 0xa5, sizeof got);
    mp_scaled_rows(from, n0, n, type, got);
    MP_CHECK_INT(got[(size_t)n * bytes], 0xa5);
    for (int i = 0; i < n; i++) {
        const float *row = defined + (n0 + i) * SCALED_K;
        if (type != MP_Q4_1) {
            mp_quantize_row(type, row, SCALED_K, want);
            if (memcmp(want, got + (size_t)i * bytes, bytes) != 0)
                MP_FAIL("dtype %d as type %d: row %d differs", (int)from->codes.dtype, (int)type, n0 + i);
            continue;
        }
        float back[SCALED_K];
        mp_dequantize_row(MP_Q4_1, got + (size_t)i * bytes, SCALED_K, back);
        for (int k = 0; k < SCALED_K; k++) /* the scales of this test are exact in f16, and so are their products */
            if (back[k] != row[k])
                MP_FAIL("dtype %d as Q4_1: [%d, %d] is %g, expected %g", (int)from->codes.dtype, n0 + i, k,
                        (double)back[k], (double)row[k]);
    }
}

MP_TEST(scaled_rows_and_panels_match_their_definition) {
    static const scaled_case cases[] = {
        {MP_AWQ4, MP_F16, 1, 32, 0},          {MP_AWQ4, MP_F32, 1, 96, 0},   {MP_GPTQ4, MP_F16, 1, 32, 1},
        {MP_GPTQ4, MP_BF16, 1, 96, 0},        {MP_GPTQ4_ORDERED, MP_F16, 1, 32, 1},
        {MP_GPTQ4_ORDERED, MP_F32, 1, 16, 0}, {MP_F8_E4M3, MP_F32, 5, 20, 0}, {MP_F8_E4M3, MP_BF16, 128, 96, 0},
        {MP_F8_E4M3, MP_F16, 1, 32, 0},
    };
    static const mp_wkind kinds[] = {MP_W_F32, MP_W_BF16, MP_W_I8, MP_W_Q4_1, MP_W_Q8_0};
    static uint32_t codes[SCALED_N * SCALED_K / 4], zeros[8 * SCALED_N / 8], order[SCALED_K];
    static uint8_t scales[SCALED_N * 8 * 4];
    static _Alignas(64) uint8_t panels[2][4 * SCALED_K * 4 * MP_PANEL_N + MP_WMAT_SLACK];
    static _Alignas(64) uint8_t scratch[SCALED_K * 4 * MP_PANEL_N];
    static float defined[SCALED_N * SCALED_K];
    uint32_t seed = 16;
    kt_use("");
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const scaled_case *test = &cases[c];
        const bool f8 = test->dtype == MP_F8_E4M3;
        const int groups = (SCALED_K + test->group - 1) / test->group;
        const int count = groups * (f8 ? (SCALED_N + test->rows - 1) / test->rows : SCALED_N);
        for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
            codes[i] = next_word(&seed);
        for (size_t i = 0; f8 && i < sizeof codes; i++) { /* no NaN */
            uint8_t *byte = (uint8_t *)codes + i;
            *byte = (*byte & 0x7f) == 0x7f ? 0x7e : *byte;
        }
        for (size_t i = 0; i < sizeof zeros / sizeof *zeros; i++)
            zeros[i] = next_word(&seed);
        for (int i = 0; i < SCALED_K; i++)
            order[i] = next_word(&seed) % (uint32_t)groups;
        for (int i = 0; i < count; i++) { /* few bits: products with codes are exact in f16 */
            const float scale = (float)(1 + (int)(next_word(&seed) % 31)) / 64;
            mp_quantize_row(test->scales, &scale, 1, scales + i * mp_dtype_get(test->scales)->bytes);
        }
        const mp_scaled from = {.codes = {.dtype = test->dtype, .data = (const uint8_t *)codes},
                                .scales = {.dtype = test->scales, .data = scales},
                                .zeros = {.dtype = MP_I32, .data = (const uint8_t *)zeros},
                                .order = {.dtype = MP_I32, .data = (const uint8_t *)order},
                                .N = SCALED_N, .K = SCALED_K, .rows = test->rows, .group = test->group,
                                .groups = groups, .zero_offset = test->zero_offset};
        for (int n = 0; n < SCALED_N; n++)
            for (int k = 0; k < SCALED_K; k++)
                defined[n * SCALED_K + k] = defined_value(&from, n, k);
        const mp_dtype own = test->dtype == MP_AWQ4 || test->dtype == MP_GPTQ4 ? MP_Q4_1 : MP_Q8_0;
        check_scaled_rows(&from, 0, SCALED_N, MP_F32, defined);
        check_scaled_rows(&from, 13, 21, MP_F32, defined);
        check_scaled_rows(&from, 13, 21, own, defined);
        check_scaled_rows(&from, SCALED_N, 0, MP_F32, defined);
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) { /* as panels of the rows themselves */
            const mp_dtype type = mp_scaled_rows_type(test->dtype, kinds[i]);
            MP_CHECK_INT(type, kinds[i] == MP_W_Q4_1 ? MP_Q4_1 : kinds[i] == MP_W_Q8_0 ? MP_Q8_0 : MP_F32);
            MP_CHECK_INT(mp_scaled_rows_type(MP_Q6_K, kinds[i]), MP_Q6_K);
            MP_CHECK_INT(mp_scaled_scratch(MP_Q6_K, kinds[i], 256), 0);
            if (type != MP_F32 && type != own)
                continue;
            static uint8_t rows[SCALED_N * SCALED_K * 4];
            mp_tensor whole = {.dtype = type, .ndim = 2, .shape = {SCALED_N, SCALED_K}, .data = rows};
            MP_CHECK(mp_scaled_scratch(test->dtype, kinds[i], SCALED_K) <= sizeof scratch);
            mp_scaled_rows(&from, 0, SCALED_N, type, rows);
            mp_wmat wanted, w;
            mp_wmat_init(&wanted, kinds[i], SCALED_N, SCALED_K);
            mp_dtype_row_bytes(type, SCALED_K, &whole.nbytes);
            MP_CHECK_INT(mp_scaled_scratch(test->dtype, kinds[i], SCALED_K), whole.nbytes * MP_PANEL_N);
            whole.nbytes *= SCALED_N;
            w = wanted;
            MP_CHECK(mp_wmat_bytes(&w) <= sizeof panels[0]);
            memset(panels, 0xee, sizeof panels);
            wanted.data = panels[0], w.data = panels[1];
            mp_wmat_pack(&wanted, &whole, 0, wanted.panels);
            mp_scaled_pack(&w, &from, 1, w.panels, scratch); /* two threads */
            mp_scaled_pack(&w, &from, 0, 1, scratch);
            if (memcmp(panels[0], panels[1], sizeof panels[0]) != 0)
                MP_FAIL("case %d, kind %d: panels differ", (int)c, (int)kinds[i]);
        }
    }
}
