/* test_base_cpu.c: base/cpu.h, base/cgroup.h and base/options.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <float.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/cgroup.h"
#include "base/cpu.h"
#include "base/options.h"
#include "base/platform.h"
#include "mp_test.h"

static const char *const level_names[] = {"ref", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx",
                                          "neon", "dotprod", "i8mm", "bf16"};
enum { LEVELS = sizeof(level_names) / sizeof(level_names[0]) };

MP_TEST(base_cpu_mask_lowers_and_never_raises) {
    mp_error error;
    MP_CHECK_OK(mp_cpu_init(NULL, &error), &error);
    uint32_t all = mp_cpu_features();
    char own[32];
    snprintf(own, sizeof(own), "%s", mp_cpu_level());
    int accepted = 0;
    for (int i = 0; i < LEVELS; i++) {
        mp_status status = mp_cpu_init(level_names[i], &error);
        if (status == MP_OK) {
            accepted++;
            MP_CHECK_STR(mp_cpu_level(), level_names[i]);
            MP_CHECK_INT(mp_cpu_features() & ~all & ~MP_CPU_AVX_VNNI, 0); /* AVX-VNNI is outside the chain of levels */
        } else {
            MP_CHECK(status == MP_UNSUPPORTED || status == MP_INVALID_ARGUMENT);
            MP_CHECK_HAS(error.message, level_names[i]);
            MP_CHECK_HAS(error.message, "one of ref");
        }
    }
    MP_CHECK(accepted >= 1);
    MP_CHECK_OK(mp_cpu_init("ref", &error), &error);
    MP_CHECK_INT(mp_cpu_features(), 0);
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    MP_CHECK_STR(mp_cpu_level(), own);
    MP_CHECK_INT(mp_cpu_features(), all);
}

MP_TEST(base_cpu_levels_agree_with_the_kernel) {
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (!file)
        MP_SKIP("no /proc/cpuinfo");
    static char text[1 << 16];
    size_t length = fread(text, 1, sizeof(text) - 1, file);
    text[length] = 0;
    fclose(file);
#if defined(__aarch64__)
    char *flags = strstr(text, "Features\t:");
#else
    char *flags = strstr(text, "flags\t");
#endif
    if (!flags)
        MP_SKIP("no features in /proc/cpuinfo (an emulator shows its host's)");
    *strchrnul(flags, '\n') = 0;
    strcat(flags, " ");
    static const struct {
        uint32_t bit;
        const char *words[4];
    } rows[] = {
#if defined(__aarch64__)
        {MP_CPU_NEON, {" asimd ", NULL, NULL, NULL}},
        {MP_CPU_DOTPROD, {" asimddp ", NULL, NULL, NULL}},
        {MP_CPU_I8MM, {" i8mm ", NULL, NULL, NULL}},
        {MP_CPU_ARM_BF16, {" bf16 ", NULL, NULL, NULL}},
#else
        {MP_CPU_AVX2, {" avx2 ", " fma ", " f16c ", NULL}},
        {MP_CPU_AVX512, {" avx512f ", " avx512bw ", " avx512vl ", " avx512dq "}},
        {MP_CPU_AVX512_VNNI, {" avx512_vnni ", NULL, NULL, NULL}},
        {MP_CPU_AVX512_BF16, {" avx512_bf16 ", NULL, NULL, NULL}},
        {MP_CPU_AMX, {" amx_tile ", " amx_bf16 ", " amx_int8 ", NULL}},
#endif
    };
    MP_CHECK_INT(mp_cpu_init(NULL, NULL), MP_OK);
    bool below = true; /* levels form a chain: after the first missing level, all are missing */
    for (int i = 0; i < (int)(sizeof(rows) / sizeof(rows[0])); i++) {
        for (int k = 0; k < 4 && rows[i].words[k]; k++)
            below &= strstr(flags, rows[i].words[k]) != NULL;
#if defined(__x86_64__)
        if (rows[i].bit == MP_CPU_AMX) { /* a sandbox may refuse the tiles that mp_cpu_init requests */
            enum { ARCH_GET_XCOMP_PERM = 0x1022, TILE_DATA = 1 << 18 };
            uint64_t granted = 0;
            syscall(SYS_arch_prctl, ARCH_GET_XCOMP_PERM, &granted);
            below &= (granted & TILE_DATA) != 0;
        }
#endif
        MP_CHECK_INT((mp_cpu_features() & rows[i].bit) != 0, below);
    }
#if defined(__x86_64__)
    MP_CHECK_INT(mp_cpu_reads_ahead(), strstr(text, "AuthenticAMD") && strstr(flags, " avx512f "));
    mp_error error;
    if (strstr(flags, " avx_vnni ")) { /* older kernels do not list AVX-VNNI */
        MP_CHECK_OK(mp_cpu_init("avxvnni", &error), &error);
        MP_CHECK_INT(mp_cpu_features(), MP_CPU_AVX2 | MP_CPU_AVX_VNNI);
    }
#endif
    MP_CHECK(mp_cpu_name()[0]);
}

MP_TEST(base_cpu_threads_follow_affinity) {
    int all = mp_cpu_threads();
    MP_CHECK(all >= 1);
    if (!MP_LINUX)
        MP_SKIP("the system does not report which CPUs a thread may use");
    cpu_set_t before, one;
    MP_CHECK_INT(sched_getaffinity(0, sizeof(before), &before), 0);
    MP_CHECK(all <= CPU_COUNT(&before));
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &before))
            continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        MP_CHECK_INT(sched_setaffinity(0, sizeof(one), &one), 0);
        MP_CHECK_INT(mp_cpu_threads(), 1);
        break;
    }
    MP_CHECK(mp_cpu_memory_bytes() > 64u << 20);
}

MP_TEST(base_cpu_denormals_are_flushed_and_restored) {
#if !defined(__x86_64__) && !defined(__aarch64__)
    MP_SKIP("no control of denormals here");
#endif
    volatile float tiny = FLT_MIN, denormal = FLT_MIN / 4, big = 4;
    MP_CHECK(tiny / 2 > 0);
    uint32_t control = mp_cpu_flush_denormals();
    volatile float quotient = tiny / 2, product = denormal * big; /* stored before the restore; clang moves the rest */
    mp_cpu_restore_float(control);
    MP_CHECK(quotient == 0);
    MP_CHECK(product == 0);
    MP_CHECK(tiny / 2 > 0 && denormal * big > 0);
}

/* --- control groups, on fake trees --- */

static void make_parents(char *path) {
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
}

static void put(const char *root, const char *name, const char *text) {
    char path[1024];
    snprintf(path, sizeof(path), "%s%s", root, name);
    make_parents(path);
    mp_test_write_file(path, text, strlen(text));
}

static const char *fresh_root(void) {
    static char root[512];
    static int count;
    snprintf(root, sizeof(root), "%s/tree%d", mp_test_directory(), count++);
    mkdir(root, 0700);
    return root;
}

MP_TEST(base_cgroup_v2_uses_the_lowest_limit_of_all_ancestors) {
    const char *root = fresh_root();
    put(root, "/proc/self/cgroup", "0::/slice/service\n");
    put(root, "/proc/self/mountinfo",
        "25 30 0:23 / /proc rw - proc proc rw\n"
        "31 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 master:2 - cgroup2 cgroup2 rw,nsdelegate\n");
    put(root, "/sys/fs/cgroup/slice/cpu.max", "150000 100000\n");
    put(root, "/sys/fs/cgroup/slice/memory.max", "max\n");
    put(root, "/sys/fs/cgroup/slice/service/cpu.max", "max 100000\n");
    put(root, "/sys/fs/cgroup/slice/service/memory.max", "1073741824\n");
    mp_cgroup limits = mp_cgroup_read(root);
    MP_CHECK_NEAR(limits.cpus, 1.5, 0);
    MP_CHECK_INT(limits.memory_bytes, 1073741824);
    put(root, "/sys/fs/cgroup/memory.max", "1000\n");
    put(root, "/sys/fs/cgroup/slice/service/cpu.max", "20000 100000\n");
    limits = mp_cgroup_read(root);
    MP_CHECK_NEAR(limits.cpus, 0.2, 1e-12);
    MP_CHECK_INT(limits.memory_bytes, 1000);
}

MP_TEST(base_cgroup_v1_reads_each_controller) {
    const char *root = fresh_root();
    put(root, "/proc/self/cgroup", "5:memory:/a/b\n4:cpuset:/z\n3:cpuacct,cpu:/c\n1:name=systemd:/\n0::/\n");
    put(root, "/proc/self/mountinfo",
        "40 31 0:32 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "41 31 0:33 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "42 31 0:34 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n");
    put(root, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
    put(root, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    put(root, "/sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_quota_us", "350000\n");
    put(root, "/sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_period_us", "100000\n");
    put(root, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put(root, "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "2147483648\n");
    mp_cgroup limits = mp_cgroup_read(root);
    MP_CHECK_NEAR(limits.cpus, 3.5, 0);
    MP_CHECK_INT(limits.memory_bytes, 2147483648);
}

MP_TEST(base_cgroup_invalid_values_are_no_limit) {
    static const char *const groups[] = {"", "\n", ":::", "0:", "0::", "x", "5:memory", "0::/a\n0::/b\n"};
    static const char *const mounts[] = {"", "1 2 3", "1 2 3 4 5 6 - cgroup2", "- - - - - - - -",
                                         "31 23 0:26 / /c rw - cgroup2 cgroup2 rw\n"};
    static const char *const values[] = {"", "max", "-5", "abc", "99999999999999999999999", "100000", "1000 0",
                                         "0 1000"};
    for (int g = 0; g < 8; g++)
        for (int m = 0; m < 5; m++) {
            const char *root = fresh_root();
            put(root, "/proc/self/cgroup", groups[g]);
            put(root, "/proc/self/mountinfo", mounts[m]);
            put(root, "/c/cpu.max", values[(g + m) % 8]);
            mp_cgroup limits = mp_cgroup_read(root);
            MP_CHECK(limits.cpus == 0);
            MP_CHECK(limits.memory_bytes == UINT64_MAX);
        }
    mp_cgroup limits = mp_cgroup_read("/nowhere/at/all");
    MP_CHECK(limits.cpus == 0 && limits.memory_bytes == UINT64_MAX);
    /* a value that is longer than any buffer */
    const char *root = fresh_root();
    static char long_text[5000];
    memset(long_text, '1', sizeof(long_text) - 1);
    put(root, "/proc/self/cgroup", "0::/a\n");
    put(root, "/proc/self/mountinfo", "31 23 0:26 / /c rw - cgroup2 cgroup2 rw\n");
    put(root, "/c/a/memory.max", long_text);
    MP_CHECK(mp_cgroup_read(root).memory_bytes == UINT64_MAX);
}

/* --- options --- */

static void clear_options(void) {
    int count;
    const mp_option_row *rows = mp_option_rows(&count);
    for (int i = 0; i < count; i++)
        unsetenv(rows[i].variable);
}

static mp_status set_option(const char *variable, const char *value, mp_error *error) {
    clear_options();
    setenv(variable, value, 1);
    return mp_options_init(error);
}

MP_TEST(base_options_have_defaults_that_can_be_printed) {
    mp_error error;
    clear_options();
    MP_CHECK_OK(mp_options_init(&error), &error);
    int count;
    const mp_option_row *rows = mp_option_rows(&count);
    MP_CHECK(count >= 7);
    for (int i = 0; i < count; i++) {
        char value[300];
        mp_option_value(i, value, sizeof(value));
        MP_CHECK_STR(value, rows[i].def);
        MP_CHECK(strncmp(rows[i].variable, "MPOOL_", 6) == 0 && rows[i].meaning[0]);
        MP_CHECK(rows[i].least <= rows[i].most);
    }
    MP_CHECK_INT(mp_options_get()->spin_us, 100);
}

MP_TEST(base_options_refuse_invalid_values_and_keep_the_old_ones) {
    static const char *const bad[] = {"257", "-1", "two", "1.5", " 1", "1 ", "0x10", "99999999999999999999", "-", "+",
                                      "-9223372036854775809"};
    mp_error error;
    MP_CHECK_OK(set_option("MPOOL_THREADS", "2", &error), &error);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        MP_CHECK_STATUS(set_option("MPOOL_THREADS", bad[i], &error), MP_INVALID_ARGUMENT, &error);
        MP_CHECK_HAS(error.message, "MPOOL_THREADS");
        MP_CHECK_HAS(error.message, bad[i]);
        MP_CHECK_HAS(error.message, "from 0 to 256");
        MP_CHECK_INT(mp_options_get()->threads, 2);
    }
    char path[400];
    memset(path, 'p', sizeof(path));
    path[sizeof(path) - 1] = 0;
    MP_CHECK_STATUS(set_option("MPOOL_BLAS", path, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_HAS(error.message, "got 399");
    path[255] = 0;
    MP_CHECK_OK(set_option("MPOOL_BLAS", path, &error), &error);
    MP_CHECK_INT(strlen(mp_options_get()->blas), 255);
}
