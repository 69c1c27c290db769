/* test_dequantize_known_answers.c: hashes of what the gguf package makes of fixed bytes, for every quantised type, and
 * of its grids. tests/python/core/test_dequantize.py compares values and shows which differ; these hashes need no
 * Python. */
#include "base/siphash.h"
#include "kernel_test.h"
#include "kernels/dequantize.h"
#include "kernels/iq_grids.h"
#include "kernels/scaled.h"

static const uint64_t no_key[2];

/* Bytes of a linear congruential generator whose seed is the number of the type in the GGUF format. Values that are not
 * finite count as 0, because the sign and payload of a NaN are not specified. */
MP_TEST(kernels_dequantize_known_answers) {
    enum { BLOCKS = 64, MAX_ITEMS = 256, MAX_BYTES = 210 };
    static const struct { mp_dtype dtype; uint64_t hash; } cases[] = {
        {MP_Q4_0, 0xaadf9fa144c6e38d}, {MP_Q4_1, 0x262abb7f16392acb}, {MP_Q5_0, 0x35697045375b0d56},
        {MP_Q5_1, 0x491e51c2c720b137}, {MP_Q8_0, 0x3613a0db9c9630f3}, {MP_Q2_K, 0xa233247cecc08894},
        {MP_Q3_K, 0xe7d4bb186b88be92}, {MP_Q4_K, 0x1c49e619b7a4fe36}, {MP_Q5_K, 0x88fcb781a4d49d41},
        {MP_Q6_K, 0xb3dac77173707752}, {MP_IQ2_XXS, 0x661c27560b1f3c7a}, {MP_IQ2_XS, 0x794211e20807e874},
        {MP_IQ3_XXS, 0x70a388d97c09f6de}, {MP_IQ1_S, 0x34d8e2d7610fc84a}, {MP_IQ4_NL, 0x618040527837aea4},
        {MP_IQ3_S, 0x328ac10330943ad7}, {MP_IQ2_S, 0xa4f8d401a2b5bbfd}, {MP_IQ4_XS, 0x62649585ee75e1ad},
        {MP_IQ1_M, 0xa756135cf1485dbb}, {MP_TQ1_0, 0x9e76feed23309ba3}, {MP_TQ2_0, 0x2f45e8375c762b04},
        {MP_MXFP4, 0xdb23ba3008d9d175}, {MP_NVFP4, 0xf7350eecf01cba34},
    };
    static uint8_t bytes[BLOCKS * MAX_BYTES];
    static float values[BLOCKS * MAX_ITEMS];
    int quantised = 0;
    for (int d = 0; d < MP_DTYPE_COUNT; d++)
        quantised += mp_dtype_get((mp_dtype)d)->items > 1 && !mp_dtype_is_scaled((mp_dtype)d);
    MP_CHECK_INT(quantised, sizeof cases / sizeof *cases);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const mp_dtype_row *row = mp_dtype_get(cases[i].dtype);
        const int items = BLOCKS * row->items;
        uint32_t seed = (uint32_t)row->ggml_id;
        for (int b = 0; b < BLOCKS * row->bytes; b++) {
            seed = seed * 1664525u + 1013904223u;
            bytes[b] = (uint8_t)(seed >> 24);
        }
        mp_dequantize_row(cases[i].dtype, bytes, items, values);
        for (int v = 0; v < items; v++)
            if (!isfinite(values[v]) || values[v] == 0)
                values[v] = 0;
        const uint64_t hash = mp_siphash(no_key, values, (size_t)items * sizeof *values);
        if (hash != cases[i].hash)
            MP_FAIL("%s: the hash is %016llx", row->name, (unsigned long long)hash);
    }
}

MP_TEST(kernels_dequantize_grids_known_answers) {
    static const struct { const uint16_t *points; size_t bytes; uint64_t hash; } grids[] = {
        {mp_iq2_xxs_grid, sizeof mp_iq2_xxs_grid, 0x09b78d4659773e81},
        {mp_iq2_xs_grid, sizeof mp_iq2_xs_grid, 0x88197649c91a97bc},
        {mp_iq2_s_grid, sizeof mp_iq2_s_grid, 0x91706d2e1156b164},
        {mp_iq3_xxs_grid, sizeof mp_iq3_xxs_grid, 0x3c59ceb5b0005011},
        {mp_iq3_s_grid, sizeof mp_iq3_s_grid, 0x47bf760eef49dda1},
        {mp_iq1_grid, sizeof mp_iq1_grid, 0x9d8cf64d5c2a512e},
    };
    for (size_t i = 0; i < sizeof grids / sizeof *grids; i++)
        if (mp_siphash(no_key, grids[i].points, grids[i].bytes) != grids[i].hash)
            MP_FAIL("grid %d", (int)i);
}
