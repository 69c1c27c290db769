/* dispatch.c: fills the table of kernels. Variants are set from the lowest instruction set to the highest, so the best
 * supported variant of each slot wins. */
#include <assert.h>
#include <string.h>

#include "base/cpu.h"
#include "kernels/variants.h"

static mp_kernel_table g_table;

static const char *const g_slots[MP_SLOT_COUNT] = {
#define MP_KERNEL(slot, ret, params) #slot,
#include "kernels/kernels.def"
#undef MP_KERNEL
};

void mp_kernels_init(void) {
    mp_kernel_table t = {0};
    mp_ref_dense(&t);
    mp_ref_quant(&t);
    mp_ref_rows(&t);
    mp_ref_attention(&t);
#if defined(__x86_64__)
    const uint32_t features = mp_cpu_features();
    if (features & MP_CPU_AVX2) {
        mp_avx2_dense(&t);
        mp_avx2_quant(&t);
        mp_avx2_rows(&t);
        mp_avx2_attention(&t);
    }
#if defined(MP_TARGET_AVXVNNI_BEGIN)
    if (features & MP_CPU_AVX_VNNI) {
        mp_avxvnni_dense(&t);
        mp_avxvnni_quant(&t);
        mp_avxvnni_rows(&t);
        mp_avxvnni_attention(&t);
    }
#endif
    if (features & MP_CPU_AVX512) {
        mp_avx512_dense(&t, features);
        mp_avx512_quant(&t, features);
        mp_avx512_rows(&t, features);
        mp_avx512_attention(&t, features);
    }
#if defined(MP_TARGET_AMX_BEGIN)
    if (features & MP_CPU_AMX) {
        mp_amx_dense(&t);
        mp_amx_quant(&t); /* after the other quantised variants: small products stay with them */
        mp_amx_rows(&t);
        mp_amx_attention(&t);
    }
#endif
#elif defined(__aarch64__)
    const uint32_t features = mp_cpu_features();
    if (features & MP_CPU_NEON) {
        mp_neon_dense(&t, features);
        mp_neon_quant(&t);
        mp_neon_rows(&t);
        mp_neon_attention(&t);
    }
    if (features & MP_CPU_DOTPROD) {
        mp_dotprod_quant(&t);
        mp_dotprod_rows(&t);
    }
    if (features & MP_CPU_I8MM)
        mp_i8mm_quant(&t);
#endif
    for (int i = 0; i < MP_SLOT_COUNT; i++)
        assert(t.variant[i] && "ref/ must implement every slot");
    g_table = t;
}

const mp_kernels *mp_kernels_get(void) {
    assert(g_table.variant[0] && "call mp_kernels_init first");
    return &g_table.call;
}

bool mp_kernels_is_ref(int slot) { return strcmp(g_table.variant[slot], "ref") == 0; }

int mp_kernels_count(void) { return MP_SLOT_COUNT; }

const char *mp_kernels_slot(int index) {
    assert(0 <= index && index < MP_SLOT_COUNT);
    return g_slots[index];
}

const char *mp_kernels_variant(int index) {
    assert(0 <= index && index < MP_SLOT_COUNT);
    return g_table.variant[index];
}
