/* test_kernels_dispatch.c: each instruction set gives every slot the variant that is meant for it. A slot that keeps a
 * lower variant has the same bits, so only these tests notice it. */
#include "kernel_test.h"

#if defined(__x86_64__)

/* One instruction set: slots not named have the variant `rest`. */
typedef struct expected {
    const char *mask, *rest;
    const char *integers; /* products with integer weights */
    const char *bf16;     /* gemm_bf16 */
    const char *i16;      /* attention over 16-bit integers */
    const char *i8;       /* gemm_i8 */
    const char *tiles;    /* slots that have variants only for AMX tiles */
} expected;

static bool is_one_of(int slot, const int *slots, int count) {
    for (int i = 0; i < count; i++)
        if (slots[i] == slot)
            return true;
    return false;
}

static const char *variant_of(const expected *row, int slot) {
    static const int integers[] = {MP_SLOT_gemm_q4_0,    MP_SLOT_gemm_q4_1,    MP_SLOT_gemm_q5_0, MP_SLOT_gemm_q5_1,
                                   MP_SLOT_gemm_q8_0,    MP_SLOT_gemm_q4_k,    MP_SLOT_gemm_q5_k, MP_SLOT_gemm_q6_k,
                                   MP_SLOT_gemm_q2_k,    MP_SLOT_gemm_q3_k,    MP_SLOT_gemm_tq,   MP_SLOT_gemm_iq2_xxs,
                                   MP_SLOT_gemm_iq2_xs,  MP_SLOT_gemm_iq3,     MP_SLOT_gemm_iq4_nl,
                                   MP_SLOT_gemm_iq4_xs,  MP_SLOT_gemm_mxfp4,   MP_SLOT_gemm_nvfp4,
                                   MP_SLOT_stored_q4_0,  MP_SLOT_stored_q8_0,  MP_SLOT_stored_q4_k,
                                   MP_SLOT_stored_q5_k,  MP_SLOT_stored_q6_k,  MP_SLOT_stored_mxfp4};
    static const int by_tiles[] = {MP_SLOT_gemm_q4_0,  MP_SLOT_gemm_q4_1, MP_SLOT_gemm_q8_0, MP_SLOT_gemm_q4_k,
                                   MP_SLOT_gemm_q6_k,  MP_SLOT_gemm_q2_k, MP_SLOT_gemm_q3_k, MP_SLOT_gemm_tq,
                                   MP_SLOT_gemm_iq2_xxs, MP_SLOT_gemm_iq2_xs, MP_SLOT_gemm_iq3,
                                   MP_SLOT_gemm_mxfp4};
    static const int i16[] = {MP_SLOT_kv_store_i16,   MP_SLOT_kv_store_i8,   MP_SLOT_attn_query_i16,
                              MP_SLOT_attn_block_i16, MP_SLOT_attn_block_i8, MP_SLOT_attn_kv_i16,
                              MP_SLOT_attn_kv_i8,     MP_SLOT_kv_fill_i16};
    if (slot == MP_SLOT_gemm_bf16_acts)
        return row->tiles;
    if (slot == MP_SLOT_attn_full_bf16)
        return strncmp(row->bf16, "avx512bf16", 10) == 0 ? row->bf16 : row->tiles;
    if (slot == MP_SLOT_stored_f32_rows)
        return strcmp(row->rest, "avx512") == 0 ? "avx512" : "ref";
    if (slot == MP_SLOT_stored_f32 || slot == MP_SLOT_squared_f32)
        return "avx2"; /* they read eight rows at a time, so 512 bits would not help */
    if (strcmp(row->mask, "amx") == 0 && is_one_of(slot, by_tiles, (int)(sizeof by_tiles / sizeof *by_tiles)))
        return row->tiles;
    if (slot == MP_SLOT_row_maxima_i8 && strcmp(row->mask, "avx512") == 0)
        return "avx512";
    if (slot == MP_SLOT_gemm_i8 || slot == MP_SLOT_row_maxima_i8)
        return row->i8;
    if (slot == MP_SLOT_gemm_bf16)
        return row->bf16;
    if (is_one_of(slot, integers, (int)(sizeof integers / sizeof *integers)))
        return row->integers;
    return is_one_of(slot, i16, (int)(sizeof i16 / sizeof *i16)) ? row->i16 : row->rest;
}

MP_TEST(kernels_dispatch_every_slot) {
    static const expected rows[] = {
        {"avx2", "avx2", "avx2", "avx2", "avx2", "avx2", "ref"},
        {"avxvnni", "avx2", "avxvnni", "avx2", "avxvnni", "avxvnni", "ref"},
        {"avxvnni model", "avx2", "avxvnni model", "avx2", "avxvnni model", "avxvnni model", "ref"},
        {"avx512", "avx512", "avx2", "avx512", "avx512", "avx2", "ref"},
        {"avx512vnni", "avx512", "avx512vnni", "avx512", "avx512vnni", "avx512vnni", "ref"},
        {"avx512bf16", "avx512", "avx512vnni", "avx512bf16", "avx512vnni", "avx512vnni", "ref"},
        {"amx", "avx512", "avx512vnni", "amx", "avx512vnni", "amx", "amx"},
    };
    int checked = 0;
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        if (!kt_use(rows[r].mask))
            continue;
        for (int i = 0; i < mp_kernels_count(); i++) {
            const char *got = mp_kernels_variant(i), *wanted = variant_of(&rows[r], i);
            if (strcmp(got, wanted) != 0)
                MP_FAIL("with %s, %s uses %s, expected %s", rows[r].mask, mp_kernels_slot(i), got, wanted);
        }
        checked++;
    }
    if (!checked)
        MP_SKIP("this CPU has no AVX2");
}

#endif
