/* variants.h: the functions that fill the kernel table. dispatch.c calls them from the lowest instruction set to the
 * highest, so that the best supported variant of a slot wins. Each sets only the slots that it implements, through
 * MP_SET, which also records the name of the variant. */
#ifndef MP_KERNELS_VARIANTS_H
#define MP_KERNELS_VARIANTS_H

#include "kernels/kernels.h"
#include "kernels/simd/target.h"

/* Slot indices in the order of kernels.def. */
enum {
#define MP_KERNEL(slot, ret, params) MP_SLOT_##slot,
#include "kernels/kernels.def"
#undef MP_KERNEL
    MP_SLOT_COUNT
};

/* The slots stored_*, but for stored_f32_rows: multiply row m of x by n weight rows (see mp_stored_multiply). */
typedef void mp_stored_product(const uint8_t *rows, size_t stride, int n, const mp_acts *x, int m, float *y);

typedef struct mp_kernel_table {
    mp_kernels call;
    const char *variant[MP_SLOT_COUNT];
} mp_kernel_table;

#define MP_SET(table, slot_name, function, variant_name) \
    ((table)->call.slot_name = (function), (table)->variant[MP_SLOT_##slot_name] = (variant_name))

/* True if the slot's function in use is that of ref/. */
bool mp_kernels_is_ref(int slot);

void mp_ref_dense(mp_kernel_table *table);
void mp_ref_quant(mp_kernel_table *table);
void mp_ref_rows(mp_kernel_table *table);
void mp_ref_attention(mp_kernel_table *table);

#if defined(__x86_64__)
void mp_avx2_dense(mp_kernel_table *table);
void mp_avx2_quant(mp_kernel_table *table);
void mp_avx2_rows(mp_kernel_table *table);
void mp_avx2_attention(mp_kernel_table *table);
#if defined(MP_TARGET_AVXVNNI_BEGIN)
void mp_avxvnni_dense(mp_kernel_table *table);
void mp_avxvnni_quant(mp_kernel_table *table);
void mp_avxvnni_rows(mp_kernel_table *table);
void mp_avxvnni_attention(mp_kernel_table *table);
#endif
/* the avx512 functions check `features` (bits of base/cpu.h) for VNNI and BF16 */
void mp_avx512_dense(mp_kernel_table *table, uint32_t features);
void mp_avx512_quant(mp_kernel_table *table, uint32_t features);
void mp_avx512_rows(mp_kernel_table *table, uint32_t features);
void mp_avx512_attention(mp_kernel_table *table, uint32_t features);
#if defined(MP_TARGET_AMX_BEGIN)
void mp_amx_dense(mp_kernel_table *table);
void mp_amx_quant(mp_kernel_table *table); /* keeps the table's variants for few rows */
void mp_amx_rows(mp_kernel_table *table);
void mp_amx_attention(mp_kernel_table *table);
#endif
void mp_avx512vnni_rows(mp_kernel_table *table);      /* called by mp_avx512_rows */
void mp_avx512vnni_attention(mp_kernel_table *table); /* these are called by mp_avx512_attention */
void mp_avx512bf16_attention(mp_kernel_table *table);
#elif defined(__aarch64__)
void mp_neon_dense(mp_kernel_table *table, uint32_t features); /* `features`: bits of base/cpu.h */
void mp_neon_quant(mp_kernel_table *table);
void mp_neon_rows(mp_kernel_table *table);
void mp_neon_attention(mp_kernel_table *table);
void mp_dotprod_quant(mp_kernel_table *table);
void mp_dotprod_rows(mp_kernel_table *table);
void mp_i8mm_quant(mp_kernel_table *table); /* keeps the table's variants for few rows */
#endif

#endif
