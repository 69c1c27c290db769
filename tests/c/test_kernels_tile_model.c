/* test_kernels_tile_model.c: the model of the tile unit (tile_model.h) computes what Intel's definition says, and ends
 * a test that uses it wrongly. */
#include <float.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernel_test.h"
#include "tile_model.h"

#define HERE __FILE__, __LINE__

/* Rows and bytes per row of the tiles in these tests: 0, 1, 2 and 3, 4, 5 are operands of products; 7 is unused. */
static const uint8_t shapes[8][2] = {{3, 20}, {3, 12}, {3, 20}, {16, 64}, {16, 64}, {16, 64}, {3, 10}, {0, 0}};

/* Load a configuration with these shapes, in which byte `at` has another value (-1: none). */
static void configure(int at, int value) {
    uint8_t c[64] = {1};
    for (int t = 0; t < 8; t++) {
        c[48 + t] = shapes[t][0];
        c[16 + 2 * t] = shapes[t][1];
    }
    if (at >= 0)
        c[at] = (uint8_t)value;
    tile_model_configure(c, HERE);
}

/* Run `body` in a child process, which must end as a failed test does, with a message that has `part`. */
static void check_ends(void (*body)(int), int argument, const char *part) {
    int ends[2], code = 0;
    char text[1024];
    size_t length = 0;
    MP_CHECK_INT(pipe(ends), 0);
    const pid_t child = fork();
    MP_CHECK(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        configure(-1, 0);
        body(argument);
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t got; (got = read(ends[0], text + length, sizeof text - 1 - length)) > 0;)
        length += (size_t)got;
    text[length] = 0;
    close(ends[0]);
    MP_CHECK_INT(waitpid(child, &code, 0), child);
    if (!WIFEXITED(code) || WEXITSTATUS(code) != 1 || !strstr(text, part))
        MP_FAIL("case %d, expected \"%s\": status %d, \"%s\"", argument, part, code, text);
}

static const struct {
    int at, value;
    const char *part;
} configurations[] = {
    {0, 2, "palette 2 does not exist"},
    {1, 1, "start_row is 1"},
    {2, 1, "reserved byte 2 is 1"},
    {15, 1, "reserved byte 15 is 1"},
    {32, 64, "reserved byte 32 is 64"}, /* a ninth tile */
    {47, 1, "reserved byte 47 is 1"},
    {56, 16, "reserved byte 56 is 16"},
    {63, 1, "reserved byte 63 is 1"},
    {16, 65, "tile 0 has 3 rows of 65 bytes"},
    {17, 1, "tile 0 has 3 rows of 276 bytes"},
    {51, 17, "tile 3 has 17 rows of 64 bytes"},
    {55, 4, "tile 7 has 4 rows of 0 bytes"},
    {30, 4, "tile 7 has 0 rows of 4 bytes"},
};

static void configure_wrongly(int i) { configure(configurations[i].at, configurations[i].value); }

static void *zero_a_tile(void *unused) {
    tile_model_zero(0, HERE);
    return unused;
}

static const char *const misuses[] = {
    "tile 0 is used, but this thread has no tile configuration", /* after a release */
    "tile 3 is used, but this thread has no tile configuration", /* after palette 0 */
    "tile 0 is used, but this thread has no tile configuration", /* on another thread */
    "tile 8 does not exist",
    "tile -1 does not exist",
    "tileloadd: tile 7 has no rows",
    "tileloaddt1: tile 7 has no rows",
    "tilestored: tile 7 has no rows",
    "tdpbf16ps: tile 7 has no rows",
    "tiles 3, 4, 3 must be different",
    "tiles 3, 3, 4 must be different",
    "tdpbsud: tiles 3, 4, 4 must be different",
    "[3, 5] += [16, 16] [3, 5]",   /* rows */
    "[3, 5] += [3, 5] [3, 5]",     /* depth; tile 2 as rows */
    "[16, 16] += [16, 16] [3, 5]", /* columns */
    "rows of 10, 12 and 20 bytes must be multiples of 4",
};

static void misuse(int i) {
    uint8_t bytes[64] = {0};
    pthread_t thread;
    switch (i) {
    case 0:
        tile_model_release();
        tile_model_zero(0, HERE);
        break;
    case 1:
        tile_model_configure(bytes, HERE);
        tile_model_load(3, bytes, 0, false, HERE);
        break;
    case 2:
        if (pthread_create(&thread, NULL, zero_a_tile, NULL) == 0)
            pthread_join(thread, NULL);
        break;
    case 3:
    case 4:
        tile_model_zero(i == 3 ? 8 : -1, HERE);
        break;
    case 5:
    case 6:
        tile_model_load(7, bytes, 0, i == 6, HERE);
        break;
    case 7:
        tile_model_store(7, bytes, 0, HERE);
        break;
    case 8:
        tile_model_dpbf16ps(3, 4, 7, HERE);
        break;
    case 9:
        tile_model_dpbf16ps(3, 4, 3, HERE);
        break;
    case 10:
        tile_model_dpbf16ps(3, 3, 4, HERE);
        break;
    case 11:
        tile_model_dpbsud(3, 4, 4, HERE);
        break;
    case 12:
        tile_model_dpbf16ps(0, 3, 2, HERE);
        break;
    case 13: /* tile 0 is [3, 5], as tile 2 */
        configure(18, 20);
        tile_model_dpbsud(0, 1, 2, HERE);
        break;
    case 14:
        tile_model_dpbf16ps(3, 4, 2, HERE);
        break;
    default:
        tile_model_dpbsud(6, 1, 2, HERE);
        break;
    }
}

MP_TEST(kernels_tile_model_refuses) {
    for (int i = 0; i < (int)(sizeof configurations / sizeof *configurations); i++)
        check_ends(configure_wrongly, i, configurations[i].part);
    for (int i = 0; i < (int)(sizeof misuses / sizeof *misuses); i++)
        check_ends(misuse, i, misuses[i]);
}

/* A tile has its configured shape: loads and stores touch nothing else, and the rest of the tile is zero. */
MP_TEST(kernels_tile_model_shapes) {
    enum { STRIDE = 70 };
    uint8_t from[16 * STRIDE], to[16 * STRIDE], whole[16 * STRIDE];
    for (int i = 0; i < 16 * STRIDE; i++)
        from[i] = (uint8_t)(i % 251 + 1);
    tile_model_reset();
    for (int streamed = 0; streamed < 2; streamed++) {
        configure(-1, 0);
        memset(to, 0, sizeof to);
        tile_model_load(0, from, STRIDE, streamed, HERE);
        tile_model_store(0, to, STRIDE, HERE);
        for (int r = 0; r < 16; r++)
            for (int i = 0; i < STRIDE; i++)
                MP_CHECK_INT(to[r * STRIDE + i], r < 3 && i < 20 ? from[r * STRIDE + i] : 0);
        tile_model_load(3, from, 0, streamed, HERE); /* all rows from one place */
        tile_model_store(3, whole, STRIDE, HERE);
        for (int r = 0; r < 16; r++)
            MP_CHECK(memcmp(whole + r * STRIDE, from, 64) == 0);
        tile_model_zero(3, HERE);
        tile_model_store(3, whole, STRIDE, HERE);
        for (int r = 0; r < 16; r++)
            for (int i = 0; i < 64; i++)
                MP_CHECK_INT(whole[r * STRIDE + i], 0);
        tile_model_load(3, from, 64, streamed, HERE);
        configure(-1, 0); /* zeroes all tiles */
        tile_model_store(3, whole, STRIDE, HERE);
        MP_CHECK_INT(whole[0], 0);
    }
    const tile_model_counts c = tile_model_counted();
    MP_CHECK(c.configurations == 4 && c.loads == 3 && c.streamed == 3 && c.zeros == 2 && c.stores == 8);
    tile_model_release();
    MP_CHECK(!tile_model_is_configured() && tile_model_counted().releases == 1);
    tile_model_reset();
    MP_CHECK_INT(tile_model_counted().stores, 0);
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
            configure(-1, 0);
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
