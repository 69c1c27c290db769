/* cpu.c: see cpu.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/cpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h> /* snprintf only */
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/cgroup.h"
#include "base/platform.h"

#if MP_LINUX
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

/* One row per level, lowest first. A machine's level is the last row of which it has all features. Each level includes
 * the levels below it, but the AVX-512 levels do not include avxvnni: CPUs with AVX-512 may lack AVX-VNNI, and use
 * AVX512-VNNI instead. */
static const struct level {
    const char *name;
    uint32_t features;
} levels[] = {
    {"ref", 0},
#if defined(__x86_64__)
    {"avx2", MP_CPU_AVX2},
    {"avxvnni", MP_CPU_AVX2 | MP_CPU_AVX_VNNI},
    {"avx512", MP_CPU_AVX2 | MP_CPU_AVX512},
    {"avx512vnni", MP_CPU_AVX2 | MP_CPU_AVX512 | MP_CPU_AVX512_VNNI},
    {"avx512bf16", MP_CPU_AVX2 | MP_CPU_AVX512 | MP_CPU_AVX512_VNNI | MP_CPU_AVX512_BF16},
    {"amx", MP_CPU_AVX2 | MP_CPU_AVX512 | MP_CPU_AVX512_VNNI | MP_CPU_AVX512_BF16 | MP_CPU_AMX},
#elif defined(__aarch64__)
    {"neon", MP_CPU_NEON},
    {"dotprod", MP_CPU_NEON | MP_CPU_DOTPROD},
    {"i8mm", MP_CPU_NEON | MP_CPU_DOTPROD | MP_CPU_I8MM},
    {"bf16", MP_CPU_NEON | MP_CPU_DOTPROD | MP_CPU_I8MM | MP_CPU_ARM_BF16},
#endif
};

enum { LEVEL_COUNT = sizeof(levels) / sizeof(levels[0]) };

static pthread_once_t detected = PTHREAD_ONCE_INIT;
/* written once, by detect(); machine_has: bits of mp_cpu_features */
static int machine_level;
static uint32_t machine_has;
static char machine_name[64];
static bool reads_ahead;
/* index into levels; -1 = no mask: the machine's own level */
static _Atomic int masked_level = -1;

#if defined(__x86_64__)
static uint64_t xgetbv0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* Request permission to use AMX tiles for this process, its threads and its children. Returns true when the system
 * grants them. */
static bool tiles_are_granted(void) {
#if defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 }; /* Linux, Documentation/arch/x86/xstate.rst */
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

static uint32_t machine_features(void) {
    enum {
        XMM_YMM = 0x06,     /* bits of XCR0: the system saves these registers */
        TILES = 0x60000,    /* tile configuration and data */
        ZMM = 0xE0,         /* opmask, upper halves of ZMM0-15, ZMM16-31 */
        OSXSAVE = 1 << 27,  /* leaf 1 ecx */
        AVX = 1 << 28,
        FMA = 1 << 12,
        F16C = 1 << 29,
        AVX2 = 1 << 5,      /* leaf 7 ebx */
        F = 1 << 16,
        DQ = 1 << 17,
        BW = 1 << 30,
        VNNI = 1 << 11,     /* leaf 7 ecx */
        AVX_VNNI = 1 << 4,  /* leaf 7.1 eax */
        BF16 = 1 << 5,
        AMX = 1 << 22 | 1 << 24 | 1 << 25, /* leaf 7 edx: bf16, tiles, int8 */
    };
    const uint32_t VL = 1u << 31; /* leaf 7 ebx; not in the enum, because bit 31 does not fit into an int */
    uint32_t a, b, c, d, features = 0, more = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE))
        return 0;
    uint64_t saved = xgetbv0();
    if ((c & (AVX | FMA | F16C)) != (AVX | FMA | F16C) || (saved & XMM_YMM) != XMM_YMM ||
        !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & AVX2))
        return 0;
    features |= MP_CPU_AVX2;
    uint32_t unused[3];
    const uint32_t tiles = d;
    if (a >= 1)
        __get_cpuid_count(7, 1, &more, &unused[0], &unused[1], &unused[2]);
    if (more & AVX_VNNI)
        features |= MP_CPU_AVX_VNNI;
    const uint32_t avx512 = F | DQ | BW | VL;
    if ((saved & ZMM) != ZMM || (b & avx512) != avx512)
        return features;
    features |= MP_CPU_AVX512;
    if (c & VNNI)
        features |= MP_CPU_AVX512_VNNI;
    if (more & BF16)
        features |= MP_CPU_AVX512_BF16;
    if ((tiles & AMX) == AMX && (saved & TILES) == TILES && tiles_are_granted())
        features |= MP_CPU_AMX;
    return features;
}

static bool is_amd(void) {
    uint32_t a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx &&
           d == signature_AMD_edx;
}

static void read_name(char *name, size_t size) {
    uint32_t words[12];
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t *w = words + 4 * i;
        if (!__get_cpuid(0x80000002u + i, &w[0], &w[1], &w[2], &w[3]))
            return;
    }
    char text[sizeof(words) + 1];
    memcpy(text, words, sizeof(words));
    text[sizeof(words)] = 0;
    char *begin = text + strspn(text, " ");
    size_t length = strlen(begin);
    while (length && begin[length - 1] == ' ')
        begin[--length] = 0;
    if (length)
        snprintf(name, size, "%s", begin);
}
#elif defined(__aarch64__)
#if defined(__APPLE__)
static bool has_feature(const char *name) {
    int found = 0;
    size_t size = sizeof(found);
    return sysctlbyname(name, &found, &size, NULL, 0) == 0 && found;
}
#endif
static uint32_t machine_features(void) {
    uint32_t features = MP_CPU_NEON;
#if defined(__linux__)
    enum { ASIMDDP = 1 << 20, I8MM = 1 << 13, BF16 = 1 << 14 }; /* bits of HWCAP, HWCAP2, HWCAP2 */
    const unsigned long one = getauxval(AT_HWCAP), two = getauxval(AT_HWCAP2);
    features |= (one & ASIMDDP ? MP_CPU_DOTPROD : 0) | (two & I8MM ? MP_CPU_I8MM : 0) |
                (two & BF16 ? MP_CPU_ARM_BF16 : 0);
#elif defined(__APPLE__)
    features |= (has_feature("hw.optional.arm.FEAT_DotProd") ? MP_CPU_DOTPROD : 0) |
                (has_feature("hw.optional.arm.FEAT_I8MM") ? MP_CPU_I8MM : 0) |
                (has_feature("hw.optional.arm.FEAT_BF16") ? MP_CPU_ARM_BF16 : 0);
#endif
    return features;
}
static void read_name(char *name, size_t size) {
#if defined(__APPLE__)
    if (sysctlbyname("machdep.cpu.brand_string", name, &size, NULL, 0) == 0)
        return;
#endif
    snprintf(name, size, "aarch64");
}
#else
static uint32_t machine_features(void) { return 0; }
static void read_name(char *name, size_t size) { (void)name, (void)size; }
#endif

static bool machine_supports(const struct level *level) { return (level->features & ~machine_has) == 0; }

static void detect(void) {
    machine_has = machine_features();
    for (int i = 0; i < LEVEL_COUNT; i++)
        if (machine_supports(&levels[i]))
            machine_level = i;
#if defined(__x86_64__)
    reads_ahead = is_amd() && (machine_has & MP_CPU_AVX512);
#endif
    snprintf(machine_name, sizeof(machine_name), "unknown CPU");
    read_name(machine_name, sizeof(machine_name));
}

static const struct level *level_in_use(void) {
    pthread_once(&detected, detect);
    int masked = atomic_load_explicit(&masked_level, memory_order_relaxed);
    return &levels[masked >= 0 ? masked : machine_level];
}

mp_status mp_cpu_init(const char *mask, mp_error *error) {
    pthread_once(&detected, detect);
    if (!mask || !*mask) {
        atomic_store_explicit(&masked_level, -1, memory_order_relaxed);
        return MP_OK;
    }
    char allowed[128] = "";
    for (int i = 0; i < LEVEL_COUNT; i++) {
        if (!machine_supports(&levels[i]))
            continue;
        size_t used = strlen(allowed);
        snprintf(allowed + used, sizeof(allowed) - used, "%s%s", i ? ", " : "", levels[i].name);
    }
    for (int i = 0; i < LEVEL_COUNT; i++) {
        if (strcmp(levels[i].name, mask) != 0)
            continue;
        if (!machine_supports(&levels[i]))
            return mp_fail(error, MP_UNSUPPORTED,
                           "the environment variable MPOOL_CPU must be a level that this CPU (%s) has: one of %s, got "
                           "\"%s\"; correct or unset it",
                           machine_name, allowed, mask);
        atomic_store_explicit(&masked_level, i, memory_order_relaxed);
        return MP_OK;
    }
    return mp_fail(error, MP_INVALID_ARGUMENT,
                   "the environment variable MPOOL_CPU must be one of %s, got \"%.32s\"; correct or unset it", allowed,
                   mask);
}

uint32_t mp_cpu_features(void) { return level_in_use()->features; }
const char *mp_cpu_level(void) { return level_in_use()->name; }

bool mp_cpu_reads_ahead(void) {
    pthread_once(&detected, detect);
    return reads_ahead;
}

const char *mp_cpu_name(void) {
    pthread_once(&detected, detect);
    return machine_name;
}

static int affinity_count(void) {
#if MP_LINUX
    /* The kernel refuses a set smaller than its own CPU mask: grow the set until it is accepted. */
    for (int cpus = 1024; cpus <= 1 << 18; cpus *= 4) {
        size_t bytes = CPU_ALLOC_SIZE(cpus);
        cpu_set_t *set = mp_alloc_zeroed(bytes, MP_TAG_MISC);
        if (!set)
            break;
        int count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
        mp_free(set);
        if (count > 0)
            return count;
    }
#endif
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

int mp_cpu_threads(void) {
    int threads = affinity_count();
    mp_cgroup limits = mp_cgroup_read("");
    if (limits.cpus > 0 && limits.cpus < threads)
        threads = (int)limits.cpus; /* rounded down: a thread with half a CPU delays the others at every barrier */
    return threads > 0 ? threads : 1;
}

uint64_t mp_cpu_memory_bytes(void) {
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    uint64_t bytes = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : UINT64_MAX;
    uint64_t limit = mp_cgroup_read("").memory_bytes;
    return limit < bytes ? limit : bytes;
}

uint32_t mp_cpu_flush_denormals(void) {
#if defined(__x86_64__)
    uint32_t control = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(control | 0x8040u); /* FTZ, DAZ */
    return control;
#elif defined(__aarch64__)
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    __asm__ volatile("msr fpcr, %0" : : "r"(control | (1u << 24))); /* FZ */
    return (uint32_t)control;
#else
    return 0;
#endif
}

void mp_cpu_restore_float(uint32_t control) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(control);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)control));
#else
    (void)control;
#endif
}
