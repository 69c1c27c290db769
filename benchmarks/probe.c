/* probe.c: measure the state of the machine in half a second, and print it as one line of JSON.
 *
 *   probe CPU CPU
 *
 * round_trip_ns: two threads answer each other through two cache lines. On machines whose virtual CPUs move between
 * parts of a chip, it distinguishes the near state from the far one. read_1, read_2: GB/s read from memory by one and
 * by two threads, 256 MB per pass, the better of with and without prefetches. fp32, bf16, int8: additions and
 * multiplications per second, in G, of one thread with the widest instruction of the kind; 0 if the CPU lacks it. All
 * are the best of several tries, because other processes can only worsen a result. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { ROUNDS = 200000, BATCH = 1000, BYTES = 256 << 20 };

static _Alignas(128) atomic_int ping;
static _Alignas(128) atomic_int pong;
static _Alignas(128) atomic_int ready;
static int cpus[2];
static uint64_t *memory;
static _Atomic uint64_t sink;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void pin(int which) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[which], &set);
    (void)sched_setaffinity(0, sizeof set, &set); /* if pinning is not allowed, measure the current CPU */
}

static void *answer(void *unused) {
    (void)unused;
    pin(1);
    for (int i = 1; i <= ROUNDS; i++) {
        while (atomic_load_explicit(&ping, memory_order_acquire) < i) {}
        atomic_store_explicit(&pong, i, memory_order_release);
    }
    return NULL;
}

static double round_trip(void) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, answer, NULL) != 0)
        return -1;
    pin(0);
    double best = 1;
    for (int i = 1; i <= ROUNDS;) {
        double start = now();
        for (int end = i + BATCH; i < end; i++) {
            atomic_store_explicit(&ping, i, memory_order_release);
            while (atomic_load_explicit(&pong, memory_order_acquire) < i) {}
        }
        double seconds = (now() - start) / BATCH;
        best = seconds < best ? seconds : best;
    }
    pthread_join(thread, NULL);
    return best * 1e9;
}

typedef uint64_t line __attribute__((vector_size(64)));
static int prefetches; /* some CPUs read faster with prefetches, others without them */

static void read_part(size_t part, size_t parts) {
    const line *at = (const line *)memory + BYTES / sizeof(line) / parts * part;
    const line *end = at + BYTES / sizeof(line) / parts;
    line a = {0}, b = a, c = a, d = a; /* whole lines: one word of each reads a fifth less on Zen 4 */
    for (; at < end; at += 4) {
        a ^= at[0], b ^= at[1], c ^= at[2], d ^= at[3];
        if (prefetches) {
            __builtin_prefetch(at + 64), __builtin_prefetch(at + 65);
            __builtin_prefetch(at + 66), __builtin_prefetch(at + 67);
        }
    }
    a ^= b ^ c ^ d;
    atomic_fetch_xor(&sink, a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7]);
}

static void *read_half(void *unused) {
    (void)unused;
    pin(1);
    atomic_store(&ready, 1);
    while (atomic_load(&ready) != 2) {}
    read_part(1, 2);
    return NULL;
}

static double read_rate(int threads) {
    double best = 0;
    for (int pass = 0; pass < 6; pass++) {
        prefetches = pass % 2;
        pthread_t thread;
        atomic_store(&ready, 0);
        if (threads == 2 && pthread_create(&thread, NULL, read_half, NULL) != 0)
            return -1;
        while (threads == 2 && atomic_load(&ready) != 1) {}
        double start = now();
        atomic_store(&ready, 2);
        read_part(0, (size_t)threads);
        if (threads == 2)
            pthread_join(thread, NULL);
        double rate = BYTES / (now() - start) / 1e9;
        best = rate > best ? rate : best;
    }
    return best;
}

/* --- arithmetic: twelve chains of one instruction, enough to hide its latency --- */

enum { TURNS = 20000, CHAINS = 12 };

#if defined(__x86_64__) && defined(__GNUC__)
#define CHAIN(registers, code)                                                                                    \
    for (int i = 0; i < TURNS; i++)                                                                               \
    __asm__ volatile(code(0) code(1) code(2) code(3) code(4) code(5) code(6) code(7) code(8) code(9) code(10)     \
                         code(11)::                                                                               \
                         : registers)
#define ZMM "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11"
#define FMA512(n) "vfmadd231ps %%zmm14, %%zmm15, %%zmm" #n "\n\t"
#define FMA256(n) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #n "\n\t"
#define BF16(n) "vdpbf16ps %%zmm14, %%zmm15, %%zmm" #n "\n\t"
#define INT8(n) "vpdpbusd %%zmm14, %%zmm15, %%zmm" #n "\n\t"

static void fma512(void) { CHAIN(ZMM, FMA512); }
static void fma256(void) { CHAIN(ZMM, FMA256); }
static void bf16(void) { CHAIN(ZMM, BF16); }
static void int8(void) { CHAIN(ZMM, INT8); }

/* Set the registers to zero, so that no chain meets a denormal or an infinity. */
static void clear(void) { __asm__ volatile("vzeroall" ::: ZMM, "xmm12", "xmm13", "xmm14", "xmm15"); }

static double rate(void (*run)(void), double operations) {
    double best = 0;
    for (int i = 0; i < 20; i++) {
        clear();
        const double start = now();
        run();
        const double found = operations * CHAINS * TURNS / (now() - start) / 1e9;
        best = found > best ? found : best;
    }
    return best;
}

static void arithmetic(double *found) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        found[0] = rate(fma512, 32);
    else if (__builtin_cpu_supports("fma"))
        found[0] = rate(fma256, 16);
    if (__builtin_cpu_supports("avx512bf16"))
        found[1] = rate(bf16, 64);
    if (__builtin_cpu_supports("avx512vnni"))
        found[2] = rate(int8, 128);
}
#else
static void arithmetic(double *found) { (void)found; }
#endif

int main(int count, char **arguments) {
    if (count != 3)
        return 2;
    cpus[0] = atoi(arguments[1]), cpus[1] = atoi(arguments[2]);
    memory = aligned_alloc(1 << 21, BYTES);
    if (!memory)
        return 1;
    madvise(memory, BYTES, MADV_HUGEPAGE); /* in pages of 4 KiB, less is read */
    memset(memory, 1, BYTES);
    const int two = cpus[0] != cpus[1];
    const double trip = two ? round_trip() : -1;
    pin(0);
    const double one = read_rate(1);
    double limits[3] = {0};
    arithmetic(limits);
    printf("{\"round_trip_ns\": %.1f, \"read_1\": %.1f, \"read_2\": %.1f, ", trip, one, two ? read_rate(2) : one);
    printf("\"fp32\": %.0f, \"bf16\": %.0f, \"int8\": %.0f}\n", limits[0], limits[1], limits[2]);
    free(memory);
    return 0;
}
