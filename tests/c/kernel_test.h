/* kernel_test.h: helpers of the kernel tests: iteration over the variants of a slot, extreme inputs, bit comparison.
 *
 * The masks with "model" run kernels on models of instructions (modelled.h).
 *
 *   MP_TEST(kernels_add_variants) {
 *       kt_set ref = kt_ref();
 *       for (kt_set v = {0}; kt_next(&v, MP_SLOT_add);) {     avx2, avx512, ... as far as this machine has them
 *           ... ref.call.add(x, n, expected); v.call.add(x, n, got);
 *           kt_same(&v, expected, got, n, "add n=%d", n);
 *       }
 *   }
 *
 * kt_next leaves the process at the CPU mask of its set, so that functions that call mp_kernels_get (mp_gemm,
 * mp_acts_fill, epilogues) use that set too. After the last set, kt_next restores the machine's own mask. */
#ifndef MP_KERNEL_TEST_H
#define MP_KERNEL_TEST_H

#include <stdarg.h>
#include <stdlib.h>

#include "base/cpu.h"
#include "kernels/variants.h"
#include "mp_test.h"

typedef struct kt_set {
    const char *mask;    /* value of MPOOL_CPU */
    const char *variant; /* variant of the requested slot */
    mp_kernels call;
    int next;
} kt_set;

static const char *const kt_masks[] = {"ref", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx",
                                       "neon", "dotprod", "i8mm", "bf16", "amx model", "avxvnni model"};
enum { KT_MASKS = sizeof kt_masks / sizeof *kt_masks };

/* Set the CPU mask of the process. Returns false if this machine lacks the mask's instruction sets. */
static inline bool kt_use(const char *mask) {
    mp_error error;
    if (mp_cpu_init(mask, &error) != MP_OK)
        return false;
    mp_kernels_init();
    return true;
}

static inline kt_set kt_ref(void) {
    if (!kt_use("ref"))
        MP_FAIL("the mask `ref` was refused");
    return (kt_set){.mask = "ref", .variant = "ref", .call = *mp_kernels_get()};
}

/* Advance to the next set whose variant of the slot differs from ref and from the last set's. */
static inline bool kt_next(kt_set *set, int slot) {
    const char *last = set->next ? set->variant : "ref";
    int i = set->next ? set->next : 1;
    for (; i < KT_MASKS; i++) {
        if (!kt_use(kt_masks[i]))
            continue;
        const char *variant = mp_kernels_variant(slot);
        if (strcmp(variant, last) == 0 || strcmp(variant, "ref") == 0)
            continue;
        if (strstr(kt_masks[i], "model") && !strstr(variant, "model"))
            continue; /* the slot has no kernel of this set: another mask has run it */
        *set = (kt_set){.mask = kt_masks[i], .variant = variant, .call = *mp_kernels_get(), .next = i + 1};
        return true;
    }
    kt_use("");
    return false;
}

/* As kt_next, with one more set at the end, "plain": the table that `fill` builds from a template over vec_plain.h, for
 * machines without SIMD variants. */
static inline bool kt_next_or_plain(kt_set *set, int slot, void (*fill)(mp_kernel_table *table, const char *name)) {
    if (set->variant && strcmp(set->variant, "plain") == 0)
        return false;
    if (kt_next(set, slot))
        return true;
    mp_kernel_table table = {0};
    fill(&table, "plain");
    *set = (kt_set){.mask = "any", .variant = "plain", .call = table.call};
    return true;
}

/* ---- memory: 64-byte aligned, with guard bytes after it ---- */

enum { KT_GUARD = 64 };

/* Allocate `bytes` zeroed bytes. kt_free checks that nothing was written past their end. */
static inline void *kt_alloc(size_t bytes) {
    const size_t whole = (bytes + KT_GUARD + 64 + 63) / 64 * 64;
    uint8_t *memory = aligned_alloc(64, whole);
    if (!memory)
        MP_FAIL("cannot allocate %zu bytes for the test", bytes);
    memcpy(memory, &bytes, sizeof bytes);
    memset(memory + 64, 0, bytes);
    memset(memory + 64 + bytes, 0xa5, whole - 64 - bytes);
    return memory + 64;
}

static inline void kt_free(void *memory) {
    if (!memory)
        return;
    uint8_t *start = (uint8_t *)memory - 64, *end;
    size_t bytes;
    memcpy(&bytes, start, sizeof bytes);
    end = start + 64 + bytes;
    for (int i = 0; i < KT_GUARD; i++)
        if (end[i] != 0xa5)
            MP_FAIL("byte %d after a buffer of %zu bytes was written", i, bytes);
    free(start);
}

/* ---- inputs ---- */

static inline int kt_pick(mp_test_random *random, int low, int high) {
    return low + (int)(mp_test_random_u64(random) % (uint64_t)(high - low + 1));
}

/* Fill x with uniform numbers in [-1, 1], whose mantissas have all bits, and occasional zeros of both signs. */
static inline void kt_random(mp_test_random *random, float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const uint64_t pick = mp_test_random_u64(random) % 64;
        x[i] = pick == 0 ? 0.0f : pick == 1 ? -0.0f : (float)(int64_t)mp_test_random_u64(random) * 0x1p-63f;
    }
}

enum kt_extreme { KT_DENORMAL, KT_HUGE, KT_TINY, KT_INF, KT_NAN, KT_WIDE, KT_ZERO, KT_EXTREMES };
static const char *const kt_extreme_names[KT_EXTREMES] = {"denormal", "huge", "tiny", "inf", "nan", "wide", "zero"};

/* Fill x with ordinary numbers and some extreme ones (WIDE: exponents from 2^-40 to 2^40; ZERO: zeros only). */
static inline void kt_extreme(mp_test_random *random, enum kt_extreme kind, float *x, int64_t n) {
    kt_random(random, x, n);
    for (int64_t i = 0; i < n; i++) {
        const uint64_t u = mp_test_random_u64(random);
        const float sign = u & 1 ? -1.0f : 1.0f;
        switch (kind) {
        case KT_DENORMAL:
            x[i] *= u % 3 ? 0x1p-130f : 0x1p-70f;
            break;
        case KT_HUGE:
            x[i] *= u % 5 ? 1.0f : 0x1p120f;
            break;
        case KT_TINY:
            x[i] *= 0x1p-100f;
            break;
        case KT_INF:
            x[i] = u % 97 ? x[i] : sign * INFINITY;
            break;
        case KT_NAN:
            if (u % 97 == 0) /* quiet and signalling, with payloads in high and low bits */
                memcpy(&x[i], &(uint32_t){(u & 1 ? 0xff800000u : 0x7f800000u) | 1u << (u >> 8) % 23}, sizeof x[i]);
            break;
        case KT_WIDE:
            x[i] = ldexpf(x[i], (int)(u >> 8 & 127) % 81 - 40);
            break;
        default:
            x[i] = sign * 0.0f;
            break;
        }
    }
}

/* ---- comparison ---- */

static inline uint32_t kt_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

/* True for the same bits, and for two NaNs: the contract does not define NaN payloads. */
static inline bool kt_equal(float a, float b) { return kt_bits(a) == kt_bits(b) || (a != a && b != b); }

/* Fail with a report unless `got` and `expected`, both [rows, ld], are equal in columns [0, cols). */
__attribute__((format(printf, 7, 8))) static inline void kt_same_matrix(const kt_set *set, const float *expected,
                                                                        const float *got, int rows, int cols,
                                                                        int64_t ld, const char *format, ...) {
    int64_t bad = 0, at = -1;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++)
            if (!kt_equal(expected[r * ld + c], got[r * ld + c])) {
                bad++;
                at = at < 0 ? r * ld + c : at;
            }
    if (bad == 0)
        return;
    char what[256];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    MP_FAIL("%s under %s, %s: %lld of %lld differ, the first at [%lld, %lld]: got %.9g (%08x), expected %.9g (%08x)",
            set->variant, set->mask, what, (long long)bad, (long long)rows * cols, (long long)(at / ld),
            (long long)(at % ld), (double)got[at], kt_bits(got[at]), (double)expected[at], kt_bits(expected[at]));
}

#define kt_same(set, expected, got, n, ...) kt_same_matrix(set, expected, got, 1, (int)(n), (n) ? (n) : 1, __VA_ARGS__)

/* As kt_same, for bytes (packed data, int8, bf16). */
__attribute__((format(printf, 5, 6))) static inline void
kt_same_bytes(const kt_set *set, const void *expected, const void *got, size_t bytes, const char *format, ...) {
    const uint8_t *e = expected, *g = got;
    size_t at = 0;
    while (at < bytes && e[at] == g[at])
        at++;
    if (at == bytes)
        return;
    char what[256];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    MP_FAIL("%s under %s, %s: byte %zu of %zu is %u, expected %u", set->variant, set->mask, what, at, bytes, g[at],
            e[at]);
}

#endif
