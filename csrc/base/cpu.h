/* cpu.h: instruction sets, CPUs and memory of this machine, detected once.
 *
 * A feature counts only when the operating system saves its registers (XGETBV, on x86-64) or reports it (HWCAP, on
 * ARM). Linux saves the tile registers of AMX only for processes that request them, and detection does request them.
 * Signal frames are larger from then on, and the system refuses an alternate signal stack below AT_MINSIGSTKSZ.
 *
 * The option MPOOL_CPU lowers the level for tests and for reproducing another machine's bits: "ref"; on x86-64 "avx2",
 * "avxvnni", "avx512" (F BW VL DQ), "avx512vnni", "avx512bf16", "amx"; on 64-bit ARM "neon", "dotprod", "i8mm", "bf16".
 * A level that the machine does not have is an error. */
#ifndef MP_BASE_CPU_H
#define MP_BASE_CPU_H

#include "base/error.h"

enum { /* bits of mp_cpu_features */
    MP_CPU_AVX2 = 1 << 0,        /* AVX2 + FMA + F16C */
    MP_CPU_AVX512 = 1 << 1,      /* F BW VL DQ */
    MP_CPU_AVX512_VNNI = 1 << 2,
    MP_CPU_AVX512_BF16 = 1 << 3,
    MP_CPU_NEON = 1 << 4,        /* every 64-bit ARM */
    MP_CPU_DOTPROD = 1 << 5,     /* sdot, udot */
    MP_CPU_I8MM = 1 << 6,        /* usdot, smmla, usmmla */
    MP_CPU_ARM_BF16 = 1 << 7,    /* bfdot, bfmmla */
    MP_CPU_AVX_VNNI = 1 << 8,    /* vpdpbusd of 256 bits */
    MP_CPU_AMX = 1 << 9,         /* tiles of int8 and bf16, granted by the system */
};

/* Features in use: those of the machine, limited by MPOOL_CPU. */
uint32_t mp_cpu_features(void);
/* True when the CPU has bfloat16 dot products: compute type "auto" may then choose bfloat16. */
static inline bool mp_cpu_has_bf16(void) { return mp_cpu_features() & (MP_CPU_AVX512_BF16 | MP_CPU_ARM_BF16); }
/* True if the CPU itself reads one stream of memory ahead, faster than with software prefetches: AMD with AVX-512. */
bool mp_cpu_reads_ahead(void);
/* Check `mask`, the value of MPOOL_CPU, and apply it (NULL or "": the machine's own level). UNSUPPORTED for a level
 * that the machine does not have, INVALID_ARGUMENT for an unknown level. Call once when the module loads; tests call it
 * again with other masks. */
mp_status mp_cpu_init(const char *mask, mp_error *error);
const char *mp_cpu_name(void);    /* model name from CPUID; never NULL */
const char *mp_cpu_level(void);   /* level in use, as in MPOOL_CPU: "avx512bf16", ... */
/* Number of CPUs that this process may use: affinity mask and cgroup quota (v1, v2), at least 1. */
int mp_cpu_threads(void);
/* Bytes of physical memory that this process may use: the machine's memory or the cgroup limit, whichever is
 * smaller. */
uint64_t mp_cpu_memory_bytes(void);
/* Set flush-to-zero and denormals-are-zero on this thread. Returns the old control word for mp_cpu_restore_float. */
uint32_t mp_cpu_flush_denormals(void);
void mp_cpu_restore_float(uint32_t control);
static inline void mp_cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
