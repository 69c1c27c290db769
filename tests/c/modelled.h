/* modelled.h: kernels for instruction sets that this machine need not have, on models of their instructions.
 *
 * A file includes a kernel file of csrc, with the function that fills the kernel table under another name
 * (modelled_...) and with the instructions that other machines lack replaced. test_kernels_modelled.c puts these
 * kernels into the table for the masks "avxvnni model" (a CPU with AVX2, but without AVX-VNNI: build.py) and
 * "amx model" (with AVX-512, with or without AMX), which mp_cpu_init accepts in the test runner. Kernel tests that
 * visit all masks (kernel_test.h) thus run them; on a machine with AMX, they run the kernels of the product as well. */
#ifndef MP_TEST_MODELLED_H
#define MP_TEST_MODELLED_H

#include "kernels/variants.h"

void modelled_amx_dense(mp_kernel_table *table);
void modelled_amx_quant(mp_kernel_table *table);
void modelled_amx_rows(mp_kernel_table *table);
void modelled_amx_attention(mp_kernel_table *table);
void modelled_avxvnni_dense(mp_kernel_table *table);
void modelled_avxvnni_quant(mp_kernel_table *table);
void modelled_avxvnni_rows(mp_kernel_table *table);
void modelled_avxvnni_attention(mp_kernel_table *table);

#endif
