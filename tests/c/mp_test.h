/* mp_test.h: the C test runner.
 *
 *     #include "mp_test.h"
 *     MP_TEST(queue_refuses_when_full) { ...; MP_CHECK(refused); }
 *
 * MP_TEST registers a test. Each test runs in its own process with a timeout of 20 s (MP_TEST_SECONDS sets another
 * timeout). A failed check prints file:line and ends the test. A test fails if memory of mp_alloc remains after it; in
 * the sanitizer build, any leak fails it. The name of a test starts with its folder ("base_", "kernels_", "files_",
 * "pool_", ...), because `--only` and the thread-sanitizer run select tests by prefix. */
#ifndef MP_TEST_H
#define MP_TEST_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"

typedef struct mp_test {
    const char *name, *file;
    void (*body)(void);
    double seconds; /* timeout */
    struct mp_test *next;
} mp_test;

void mp_test_add(mp_test *test);

#define MP_TEST_SECONDS(test_name, timeout_seconds)                                      \
    static void mp_test_body_##test_name(void);                                          \
    __attribute__((constructor)) static void mp_test_add_##test_name(void) {             \
        static mp_test test = {.name = #test_name,                                       \
                               .file = __FILE__,                                         \
                               .body = mp_test_body_##test_name,                         \
                               .seconds = timeout_seconds};                              \
        mp_test_add(&test);                                                              \
    }                                                                                    \
    static void mp_test_body_##test_name(void)
#define MP_TEST(test_name) MP_TEST_SECONDS(test_name, 20)

/* End the running test as failed, or as skipped with a reason. Any thread of the test may call these. */
_Noreturn void mp_test_fail(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));
_Noreturn void mp_test_skip(const char *file, int line, const char *reason);

#define MP_FAIL(...) mp_test_fail(__FILE__, __LINE__, __VA_ARGS__)
#define MP_SKIP(reason) mp_test_skip(__FILE__, __LINE__, reason)
#define MP_CHECK(condition)                   \
    do {                                      \
        if (!(condition))                     \
            MP_FAIL("%s is false", #condition); \
    } while (0)
#define MP_CHECK_INT(got, expected)                                                                              \
    do {                                                                                                         \
        long long mp_got = (long long)(got), mp_expected = (long long)(expected);                                \
        if (mp_got != mp_expected)                                                                               \
            MP_FAIL("%s is %lld, expected %s = %lld", #got, mp_got, #expected, mp_expected);                     \
    } while (0)
#define MP_CHECK_STR(got, expected)                                                              \
    do {                                                                                         \
        const char *mp_got = (got), *mp_expected = (expected);                                   \
        if (strcmp(mp_got, mp_expected) != 0)                                                    \
            MP_FAIL("%s is \"%s\", expected \"%s\"", #got, mp_got, mp_expected);                 \
    } while (0)
#define MP_CHECK_HAS(text, part)                                                                 \
    do {                                                                                         \
        const char *mp_text = (text), *mp_part = (part);                                         \
        if (!strstr(mp_text, mp_part))                                                           \
            MP_FAIL("%s is \"%s\", which does not contain \"%s\"", #text, mp_text, mp_part);  \
    } while (0)
/* Check that |got - expected| is at most `tolerance`; NaN fails. */
#define MP_CHECK_NEAR(got, expected, tolerance)                                                          \
    do {                                                                                                 \
        double mp_got = (double)(got), mp_expected = (double)(expected);                                 \
        if (!(fabs(mp_got - mp_expected) <= (double)(tolerance)))                                        \
            MP_FAIL("%s is %.9g, expected %.9g within %.3g", #got, mp_got, mp_expected, (double)(tolerance)); \
    } while (0)
/* Check that a call which fills `error` returns `expected`; a mismatch prints the error's message. */
#define MP_CHECK_STATUS(call, expected, error)                                                             \
    do {                                                                                                   \
        mp_status mp_got = (call);                                                                         \
        if (mp_got != (expected))                                                                          \
            MP_FAIL("%s gave %s (%s), expected %s", #call, mp_status_find(mp_got)->name,                   \
                    mp_got == MP_OK ? "" : (error)->message, mp_status_find(expected)->name);              \
    } while (0)
#define MP_CHECK_OK(call, error) MP_CHECK_STATUS(call, MP_OK, error)

/* Temporary directory of the running test, removed when the test ends. */
const char *mp_test_directory(void);
/* The repository's tests/ directory (corpus, goldens). */
const char *mp_test_root(void);
/* Write or replace a file, for tests of readers. */
void mp_test_write_file(const char *path, const void *data, size_t bytes);
/* Deterministic random numbers: a seed gives the same sequence in every run. Any number is a valid seed. */
typedef struct mp_test_random {
    uint64_t state;
} mp_test_random;
uint64_t mp_test_random_u64(mp_test_random *random);
float mp_test_random_float(mp_test_random *random, float low, float high);

/* --- sampling of test cases: a sanitizer makes a test 5 to 50 times slower, and checks memory and threads, not result
 * bits. Where a test loops over many seeds, or over all combinations of shapes and options, the release build runs all
 * iterations and a sanitizer build runs the sample chosen here. Injected system failures are never sampled. Edge shapes
 * (tails, one, primes) are not sampled either, but run with fewer options. --- */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { MP_TEST_SHARE = 5 };
#else
enum { MP_TEST_SHARE = 1 };
#endif

/* Skip a test in a sanitizer build. For tests that compare results, and whose code other tests run as well. */
#define MP_RESULTS_ONLY()                                                  \
    do {                                                                   \
        if (MP_TEST_SHARE > 1)                                             \
            MP_SKIP("compares results only: not under sanitizers");        \
    } while (0)

/* Number of interchangeable rounds to run: `rounds`, or in a sanitizer build a fifth of it, rounded up. */
static inline int mp_test_rounds(int rounds) { return (rounds + MP_TEST_SHARE - 1) / MP_TEST_SHARE; }

/* Returns true if the next combination of nested loops is to run; `*asked` counts combinations from 0. In a sanitizer
 * build the golden ratio selects a fifth of all combinations, including the first and at least one of any eight in a
 * row. A loop over edge shapes therefore needs at least eight options inside it, so that each shape runs. The selection
 * mixes the values of inner and outer loops, whatever the lengths of the loops. */
static inline bool mp_test_take(uint32_t *asked) {
    return (*asked)++ * UINT32_C(2654435769) <= UINT32_MAX / MP_TEST_SHARE;
}

/* --- failure injection: in the seam builds (build.py: seam, asan); other builds skip these tests --- */

enum { MP_TEST_HEADER = 64 }; /* bytes that mp_alloc adds to each block */

enum mp_test_fault { /* the system call that fails */
                     MP_FAULT_ALLOC,
                     MP_FAULT_THREAD,
                     MP_FAULT_OPEN,
                     MP_FAULT_READ,
                     MP_FAULT_MAP,
                     MP_FAULT_PAGES,
                     MP_FAULT_ADVISE,
};
/* Body of a sweep: set up, use and tear down the code under test, and return the status. */
typedef mp_status (*mp_test_sweep_body)(void *arg, mp_error *error);
/* Run `body` once to count its calls of `fault`. Then, for every n, run it twice: with call n failing, and with all
 * calls from n on failing. Each run must return MP_OK or a typed error with a message, leave no byte of mp_alloc
 * allocated, and leave no thread unjoined. A last run without faults must return MP_OK. Returns the number of calls; if
 * it is 0, the sweep checked nothing. */
int mp_test_fault_sweep(enum mp_test_fault fault, mp_test_sweep_body body, void *arg);
/* Sweep allocations as mp_test_fault_sweep does. A body without allocations fails the test. */
void mp_test_alloc_sweep(mp_test_sweep_body body, void *arg);

#endif
