/* Quantisers (kernels/quantize.h) and weights with separate scales (kernels/scaled.h). */
#include <math.h>
#include <string.h>

#include "kernels/half.h"
#include "kernels/quantize.h"
#include "kernels/scaled.h"
#include "mp_test.h"

MP_TEST(quantize_half_rounds_to_nearest_even) {
    for (uint32_t bits = 0; bits < 0x7c00; bits++) { /* every finite half, and the midpoint above it */
        const float value = mp_half_to_float((uint16_t)bits), next = mp_half_to_float((uint16_t)(bits + 1));
        MP_CHECK_INT(mp_half_from_float(value), bits);
        MP_CHECK_INT(mp_half_from_float(-value), bits | 0x8000);
        if (bits < 0x7bff) {
            const float middle = (value + next) / 2;
            MP_CHECK_INT(mp_half_from_float(middle), bits + (bits & 1));
            MP_CHECK_INT(mp_half_from_float(nextafterf(middle, 1e9f)), bits + 1);
            MP_CHECK_INT(mp_half_from_float(nextafterf(middle, 0)), bits);
        }
    }
    MP_CHECK_INT(mp_half_from_float(65519.9f), 0x7bff);
    MP_CHECK_INT(mp_half_from_float(65520.0f), 0x7c00);
    MP_CHECK_INT(mp_half_from_float(INFINITY), 0x7c00);
    MP_CHECK(isnan(mp_half_to_float(mp_half_from_float(NAN))));
}

MP_TEST(scaled_e4m3_values) {
    MP_CHECK(mp_e4m3_to_float(0x00) == 0 && mp_e4m3_to_float(0x01) == 0x1p-9f && mp_e4m3_to_float(0x07) == 7 * 0x1p-9f);
    MP_CHECK(mp_e4m3_to_float(0x08) == 0x1p-6f && mp_e4m3_to_float(0x38) == 1 && mp_e4m3_to_float(0x39) == 1.125f);
    MP_CHECK(mp_e4m3_to_float(0x7e) == 448 && mp_e4m3_to_float(0xfe) == -448);
    MP_CHECK(isnan(mp_e4m3_to_float(0x7f)) && isnan(mp_e4m3_to_float(0xff)));
}

/* Codes of constant and extreme blocks stay inside their types, also for NaN and infinities. */
MP_TEST(quantize_takes_any_block) {
    static const mp_dtype types[] = {MP_Q4_0, MP_Q4_1, MP_Q5_0, MP_Q5_1, MP_Q8_0, MP_Q4_K, MP_Q5_K, MP_Q6_K};
    static const float extremes[] = {0, 1, -1, 1e-30f, -1e-42f, 3e4f, INFINITY, -INFINITY, NAN, 3e38f};
    float x[256], back[256];
    uint8_t blocks[512];
    for (size_t t = 0; t < sizeof types / sizeof *types; t++)
        for (int e = 0; e < 10; e++) {
            for (int i = 0; i < 256; i++)
                x[i] = e == 5 && i % 3 ? -extremes[e] : extremes[e];
            mp_quantize_row(types[t], x, 256, blocks);
            mp_dequantize_row(types[t], blocks, 256, back);
            MP_CHECK(mp_all_finite(x, 256) == (e < 6 || e == 9));
            for (int i = 0; i < 256 && e < 6; i++)
                if (fabsf(back[i] - x[i]) > 0.13f * fabsf(extremes[e]) + 1e-7f)
                    MP_FAIL("type %d, block of %g: item %d is %g", (int)types[t], (double)extremes[e], i,
                            (double)back[i]);
        }
}

/* A group number outside the groups reads group 0: the file may change after the check. */
MP_TEST(scaled_order_is_bounded) {
    uint32_t codes[32 / 8 * 8], zeros[1] = {0}, order[32];
    float scales[8], rows[8 * 32];
    memset(codes, 0x11, sizeof codes);
    for (int i = 0; i < 8; i++)
        scales[i] = (float)(i + 1);
    for (int i = 0; i < 32; i++)
        order[i] = i % 2 ? 0xffffffffu : (uint32_t)i * 1000;
    const mp_scaled from = {.codes = {.dtype = MP_GPTQ4_ORDERED, .data = (const uint8_t *)codes},
                            .scales = {.dtype = MP_F32, .data = (const uint8_t *)scales},
                            .zeros = {.dtype = MP_I32, .data = (const uint8_t *)zeros},
                            .order = {.dtype = MP_I32, .data = (const uint8_t *)order},
                            .N = 8, .K = 32, .rows = 1, .group = 32, .groups = 1, .zero_offset = 0};
    mp_scaled_rows(&from, 0, 8, MP_F32, (uint8_t *)rows);
    for (int i = 0; i < 8 * 32; i++)
        MP_CHECK(rows[i] == (float)(i / 32 + 1));
}
