/* fuzz_model.c: any bytes as a valid tiny model with changed hyper-parameters and weights (tests/c/hostile_fixture.h).
 * A model that loads computes a request: the result is finite, or the error is typed. */
#include "require.h"

#include <stdarg.h>
#include <unistd.h>

#include "../c/hostile_fixture.h"

/* ---- the part of the test runner that the fixture uses ---- */

void mp_test_fail(const char *file, int line, const char *format, ...) {
    va_list arguments;
    fprintf(stderr, "%s:%d: ", file, line);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    __builtin_trap();
}

static char directory[64];

static void remove_directory(void) {
    char path[128];
    static const char *const names[] = {"hostile.bin", "encoder1.bin"};
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", directory, names[i]);
        unlink(path);
    }
    for (int seed = 900; seed < 900 + HOSTILE_KINDS; seed++) {
        snprintf(path, sizeof path, "%s/tiny-%d.bin", directory, seed);
        unlink(path);
    }
    rmdir(directory);
}

const char *mp_test_directory(void) {
    if (!directory[0]) {
        strcpy(directory, "/tmp/fuzz-model-XXXXXX");
        REQUIRE(mkdtemp(directory));
        atexit(remove_directory);
    }
    return directory;
}

void mp_test_write_file(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "wb");
    REQUIRE(file && fwrite(data, 1, bytes, file) == bytes && fclose(file) == 0);
}

uint64_t mp_test_random_u64(mp_test_random *random) { /* splitmix64 */
    uint64_t x = random->state += 0x9E3779B97F4A7C15;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

float mp_test_random_float(mp_test_random *random, float low, float high) {
    return low + (high - low) * (float)(mp_test_random_u64(random) >> 40) / (float)(1 << 24);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    mp_error error;
    static bool ready;
    if (!ready) {
        REQUIRE(mp_cpu_init("", &error) == MP_OK);
        mp_kernels_init();
        ready = true;
    }
    (void)hostile_run(data, size, &error);
    return 0;
}
