/* test_kernels_tile_model.c: the model of the tile unit (tile_model.h) computes what Intel's definition says. */
#include <float.h>

#include "kernel_test.h"
#include "tile_model.h"

#define HERE __FILE__, __LINE__

/* Rows and bytes per row of the tiles in these tests: 0, 1, 2 and 3, 4, 5 are operands of products; 7 is unused. */
static const uint8_t shapes[8][2] = {{3, 20}, {3, 12}, {3, 20}, {16, 64}, {16, 64}, {16, 64}, {3, 10}, {0, 0}};

static void configure(void) {
    uint8_t c[64] = {1};
    for (int t = 0; t < 8; t++) {
        c[48 + t] = shapes[t][0];
        c[16 + 2 * t] = shapes[t][1];
    }
    tile_model_configure(c, HERE);
}

/* One output of a bfloat16 product of two pairs, from the accumulator `start`. x and w: slots of two pairs. */
static float product_of_two_pairs(const float x[4], const float w[4], float start) {
    uint16_t a[4], b[2][2];
    float y = start;
    uint8_t c[64] = {[0] = 1, [48] = 1, [16] = 4, [49] = 1, [18] = 8, [50] = 2, [20] = 4};
    for (int i = 0; i < 4; i++) { /* exact: the numbers of these tests are bfloat16 */
        a[i] = (uint16_t)(kt_bits(x[i]) >> 16);
        b[i / 2][i % 2] = (uint16_t)(kt_bits(w[i]) >> 16);
        MP_CHECK(!(kt_bits(x[i]) & 0xffff) && !(kt_bits(w[i]) & 0xffff));
    }
    tile_model_configure(c, HERE);
    tile_model_load(0, &y, 4, false, HERE);
    tile_model_load(1, a, 8, false, HERE);
    tile_model_load(2, b, 4, false, HERE);
    tile_model_dpbf16ps(0, 1, 2, HERE);
    tile_model_store(0, &y, 4, HERE);
    tile_model_release();
    return y;
}

static void check_pairs(int line, float x0, float x1, float x2, float x3, float w0, float w1, float w2, float w3,
                        float start, float expected) {
    const float x[4] = {x0, x1, x2, x3}, w[4] = {w0, w1, w2, w3}, got = product_of_two_pairs(x, w, start);
    if (!kt_equal(got, expected))
        mp_test_fail(__FILE__, line, "got %a, expected %a", (double)got, (double)expected);
}
#define CHECK_PAIRS(...) check_pairs(__LINE__, __VA_ARGS__)

/* Order of additions, rounding and denormals. Slots 0 and 2 are even, 1 and 3 odd. */
MP_TEST(kernels_tile_model_bf16) {
#if defined(__x86_64__)
    if (!kt_use("avx2"))
        MP_SKIP("the model is compiled for AVX2");
#endif
    CHECK_PAIRS(2, 3, 5, 7, 11, 13, 17, 19, 1, 1 + 22 + 39 + 85 + 133);
    /* the even slots cancel before the odd slots are added; in order of the slots, 1 would be lost */
    CHECK_PAIRS(0x1p30f, 1, -0x1p30f, 0, 1, 1, 1, 0, 0, 1);
    /* within a chain, 1 is lost */
    CHECK_PAIRS(0x1p30f, 0, 1, 0, 1, 0, 1, 0, 0, 0x1p30f);
    /* the accumulator comes last: -2^30 + (2^30 + 1) = 0 */
    CHECK_PAIRS(0x1p30f, 1, 0, 0, 1, 1, 0, 0, -0x1p30f, 0);
    /* and is added to the sum of both chains: 2^24 + (1 + 1), not (2^24 + 1) + 1 */
    CHECK_PAIRS(1, 1, 0, 0, 1, 1, 0, 0, 0x1p24f, 0x1p24f + 2);
    /* to nearest even: 2^24 + 1 and 2^24 + 3 */
    CHECK_PAIRS(1, 0, 0, 0, 1, 0, 0, 0, 0x1p24f, 0x1p24f);
    CHECK_PAIRS(3, 0, 0, 0, 1, 0, 0, 0, 0x1p24f, 0x1p24f + 4);
    CHECK_PAIRS(-3, 0, 0, 0, 1, 0, 0, 0, -0x1p24f, -0x1p24f - 4);
    /* fused: 2^-100 is not lost before the addition of the product, which would overflow alone */
    CHECK_PAIRS(-0x1p127f, 0, 0x1p127f, 0, 1, 0, 2, 0, 0, 0x1p127f);
    CHECK_PAIRS(0x1p127f, 0, 0, 0, 2, 0, 0, 0, 0, INFINITY);
    /* denormal inputs, accumulators and results count as zeros */
    CHECK_PAIRS(0x1p-127f, 0, 0, 0, 0x1p127f, 0, 0, 0, 0, 0);
    CHECK_PAIRS(0x1p127f, 0, 0, 0, 0x1p-127f, 0, 0, 0, 1, 1);
    CHECK_PAIRS(0, 0, 0, 0, 0, 0, 0, 0, 0x1p-127f, 0);
    CHECK_PAIRS(0x1p-64f, 0, 0, 0, 0x1p-63f, 0, 0, 0, 0, 0);
    CHECK_PAIRS(0x1p-64f, 0, 0, 0, 0x1p-62f, 0, 0, 0, 0, 0x1p-126f);
    CHECK_PAIRS(0x1p-64f, 0, 0x1p-64f, 0, 0x1p-63f, 0, 0x1p-63f, 0, 0, 0); /* each is flushed, not only their sum */
    CHECK_PAIRS(0x1.8p-126f, -0x1p-126f, 0, 0, 1, 1, 0, 0, 0, 0); /* the sum of both chains */
    CHECK_PAIRS(0x1p-126f, 0, 0, 0, 1, 0, 0, 0, -0x1.8p-126f, -0.0f);
    CHECK_PAIRS(INFINITY, 0, 0, 0, 0, 0, 0, 0, 0, NAN);
    CHECK_PAIRS(INFINITY, 0, -INFINITY, 0, 1, 0, 1, 0, 0, NAN);
    CHECK_PAIRS(NAN, 0, 0, 0, 0, 0, 0, 0, 0, NAN);
}

/* Signed bytes of the first operand, unsigned or signed bytes of the second, without saturation. */
MP_TEST(kernels_tile_model_bytes) {
#if defined(__x86_64__)
    if (!kt_use("avx2"))
        MP_SKIP("the model is compiled for AVX2");
#endif
    mp_test_random random = {9};
    uint8_t a[16][64], b[16][64];
    int32_t start[16][16], got[16][16];
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 16 * 64; i++) {
            a[i / 64][i % 64] = round == 0 ? 0x80 : round == 1 ? 0x7f : (uint8_t)mp_test_random_u64(&random);
            b[i / 64][i % 64] = round < 2 ? 0xff : (uint8_t)mp_test_random_u64(&random);
        }
        for (int i = 0; i < 256; i++)
            start[i / 16][i % 16] = round == 0   ? INT32_MIN
                                    : round == 1 ? INT32_MAX
                                                 : (int32_t)mp_test_random_u64(&random);
        for (int part = 0; part < 4; part++) {
            const bool is_signed = part / 2;
            const int rows = part % 2 ? 3 : 16, words = part % 2 ? 5 : 16, depth = part % 2 ? 3 : 16;
            configure();
            const int to = part % 2 ? 0 : 3, x = part % 2 ? 1 : 4, w = part % 2 ? 2 : 5;
            tile_model_load(to, start, 64, false, HERE);
            tile_model_load(x, a, 64, false, HERE);
            tile_model_load(w, b, 64, false, HERE);
            if (is_signed)
                tile_model_dpbssd(to, x, w, HERE);
            else
                tile_model_dpbsud(to, x, w, HERE);
            memset(got, 0x11, sizeof got);
            tile_model_store(to, got, 64, HERE);
            for (int m = 0; m < 16; m++)
                for (int n = 0; n < 16; n++) {
                    int64_t sum = start[m][n];
                    for (int k = 0; k < 4 * depth; k++) {
                        const uint8_t byte = b[k / 4][4 * n + k % 4];
                        sum += (int64_t)(int8_t)a[m][k] * (is_signed ? (int8_t)byte : byte);
                    }
                    MP_CHECK_INT(got[m][n], m < rows && n < words ? (int32_t)(uint32_t)(uint64_t)sum : 0x11111111);
                }
        }
    }
    tile_model_release();
}
