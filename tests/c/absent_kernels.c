/* absent_kernels.c: functions of kernel files that a build leaves out (build.py). They fill no slot of the table, so
 * the kernels of a lower instruction set stay in it. Weak: the linker takes the functions of a file that is part of the
 * build instead. */
#if defined(__x86_64__)
#include "kernels/simd/target.h"
#include "modelled.h"

#define ABSENT __attribute__((weak))

ABSENT void mp_avx512_dense(mp_kernel_table *table, uint32_t features) { (void)table, (void)features; }
ABSENT void mp_avx512_quant(mp_kernel_table *table, uint32_t features) { (void)table, (void)features; }
ABSENT void mp_avx512_rows(mp_kernel_table *table, uint32_t features) { (void)table, (void)features; }
ABSENT void mp_avx512_attention(mp_kernel_table *table, uint32_t features) { (void)table, (void)features; }
#if defined(MP_TARGET_AVXVNNI_BEGIN)
ABSENT void mp_avxvnni_quant(mp_kernel_table *table) { (void)table; }
ABSENT void mp_avxvnni_rows(mp_kernel_table *table) { (void)table; }
ABSENT void mp_avxvnni_attention(mp_kernel_table *table) { (void)table; }
#endif
#if defined(MP_TARGET_AMX_BEGIN)
ABSENT void mp_amx_dense(mp_kernel_table *table) { (void)table; }
ABSENT void mp_amx_quant(mp_kernel_table *table) { (void)table; }
ABSENT void mp_amx_rows(mp_kernel_table *table) { (void)table; }
ABSENT void mp_amx_attention(mp_kernel_table *table) { (void)table; }
#endif

ABSENT void modelled_amx_dense(mp_kernel_table *table) { (void)table; }
ABSENT void modelled_amx_quant(mp_kernel_table *table) { (void)table; }
ABSENT void modelled_amx_rows(mp_kernel_table *table) { (void)table; }
ABSENT void modelled_amx_attention(mp_kernel_table *table) { (void)table; }
ABSENT void modelled_avxvnni_dense(mp_kernel_table *table) { (void)table; }
ABSENT void modelled_avxvnni_quant(mp_kernel_table *table) { (void)table; }
ABSENT void modelled_avxvnni_rows(mp_kernel_table *table) { (void)table; }
ABSENT void modelled_avxvnni_attention(mp_kernel_table *table) { (void)table; }
#endif
