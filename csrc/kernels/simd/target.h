/* target.h: compile part of a file for an instruction set, without per-file compiler flags.
 *
 *     #include <immintrin.h>                 include every system header first, outside the region
 *     #include "kernels/simd/target.h"
 *     MP_TARGET_AVX512_BEGIN
 *     static MP_INLINE __m512 helper(...) {...}
 *     MP_TARGET_END
 *
 * Functions between BEGIN and END may use the intrinsics of that set. Code outside must call them only through the
 * table. Regions do not nest. The macros __AVX2__, __AVX512F__ ... are unreliable inside (gcc defines them, clang does
 * not): templates use macros of their own. A function must be in the same kind of region as the MP_INLINE helpers that
 * it calls, or the compiler refuses to inline them. */
#ifndef MP_KERNELS_SIMD_TARGET_H
#define MP_KERNELS_SIMD_TARGET_H

#define MP_TARGET_PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
#define MP_TARGET_BEGIN(features) \
    MP_TARGET_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define MP_TARGET_END MP_TARGET_PRAGMA(clang attribute pop)
#else
#define MP_TARGET_BEGIN(features) MP_TARGET_PRAGMA(GCC push_options) MP_TARGET_PRAGMA(GCC target(features))
#define MP_TARGET_END             MP_TARGET_PRAGMA(GCC pop_options)
#endif

/* Compiler names of the sets of base/cpu.h: MP_CPU_AVX2; MP_CPU_AVX512; with VNNI; with VNNI and BF16. */
#define MP_TARGET_AVX2_BEGIN        MP_TARGET_BEGIN("avx2,fma,f16c")
#define MP_TARGET_AVX512_BEGIN      MP_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#define MP_TARGET_AVX512_VNNI_BEGIN MP_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#define MP_TARGET_AVX512_BF16_BEGIN \
    MP_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")

/* MP_CPU_AVX_VNNI, if the compiler and its assembler support it */
#if (defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11)
#define MP_TARGET_AVXVNNI_BEGIN MP_TARGET_BEGIN("avx2,fma,f16c,avxvnni")
#endif

/* MP_CPU_AMX, with the AVX-512 sets that its kernels use */
#if (defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11)
#define MP_TARGET_AMX_BEGIN                                                                                         \
    MP_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,amx-bf16," \
                    "amx-int8")
#endif

/* 64-bit ARM. NEON needs no region. gcc requires the architecture version of an extension, clang only its name. */
#if defined(__clang__)
#define MP_TARGET_DOTPROD_BEGIN MP_TARGET_BEGIN("dotprod")
#define MP_TARGET_I8MM_BEGIN    MP_TARGET_BEGIN("dotprod,i8mm")
#define MP_TARGET_BF16_BEGIN    MP_TARGET_BEGIN("bf16")
#else
#define MP_TARGET_DOTPROD_BEGIN MP_TARGET_BEGIN("arch=armv8.2-a+dotprod")
#define MP_TARGET_I8MM_BEGIN    MP_TARGET_BEGIN("arch=armv8.2-a+dotprod+i8mm")
#define MP_TARGET_BF16_BEGIN    MP_TARGET_BEGIN("arch=armv8.2-a+bf16")
#endif

/* Put MP_KEEP_ORDER on a line of its own before the kernels of a file for ARM. On ARM, gcc schedules instructions
 * before it allocates registers. It moves so many loads ahead that the accumulators of a tile no longer fit: 20 % of
 * the instructions were spills. */
#if defined(__clang__)
#define MP_KEEP_ORDER
#else
#define MP_KEEP_ORDER MP_TARGET_PRAGMA(GCC optimize("no-schedule-insns"))
#endif

/* MP_INLINE: bodies that must be inlined, so that tile sizes become constants. */
#define MP_INLINE   inline __attribute__((always_inline))
#define MP_NOINLINE __attribute__((noinline))

/* Before a loop with a constant count: unroll it fully, so that arrays of vectors become registers. */
#if defined(__clang__)
#define MP_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MP_UNROLL _Pragma("GCC unroll 64")
#endif

#endif
