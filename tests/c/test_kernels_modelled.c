/* test_kernels_modelled.c: the masks "avxvnni model" and "amx model" (modelled.h).
 *
 * The linker redirects calls of mp_cpu_init, mp_cpu_features and of the functions that fill the table to the functions
 * __wrap_... below (build.py). Calls within one file of csrc are not redirected. */
#include "kernel_test.h"
#include "modelled.h"

static uint32_t modelled; /* bits that mp_cpu_features adds, and whose kernels run on models */

mp_status __real_mp_cpu_init(const char *mask, mp_error *error);
uint32_t __real_mp_cpu_features(void);
mp_status __wrap_mp_cpu_init(const char *mask, mp_error *error);
uint32_t __wrap_mp_cpu_features(void);

/* True if the kernels of AVX-VNNI are not in this build on a model, because the CPU has the instructions (build.py). */
static bool avxvnni_is_absent(void) {
#if defined(__x86_64__)
    mp_kernel_table own = {0};
    modelled_avxvnni_dense(&own);
    return !own.variant[MP_SLOT_gemm_i8];
#else
    return false; /* the core refuses the masks of x86 */
#endif
}

mp_status __wrap_mp_cpu_init(const char *mask, mp_error *error) {
    const bool tiles = mask && strcmp(mask, "amx model") == 0, bytes = mask && strcmp(mask, "avxvnni model") == 0;
    if (bytes && avxvnni_is_absent())
        return mp_fail(error, MP_UNSUPPORTED, "this CPU has AVX-VNNI");
    mp_status status = __real_mp_cpu_init(tiles ? "avx512" : bytes ? "avx2" : mask, error);
    if (status == MP_OK && tiles) /* the machine's own level, of which avx512 is a part */
        status = __real_mp_cpu_init("", error);
    if (status == MP_OK)
        modelled = tiles ? MP_CPU_AMX : bytes ? MP_CPU_AVX_VNNI : 0;
    return status;
}

uint32_t __wrap_mp_cpu_features(void) { return __real_mp_cpu_features() | modelled; }

#if defined(__x86_64__)
typedef void fill_function(mp_kernel_table *table);

/* Fill the table with kernels of the product, or, if `bit` is modelled, with `model`. */
static void fill(mp_kernel_table *table, uint32_t bit, const char *name, fill_function *product, fill_function *model) {
    if (!(modelled & bit)) {
        product(table);
        return;
    }
    mp_kernel_table own = {0};
    model(&own);
    model(table);
    for (int i = 0; i < MP_SLOT_COUNT; i++)
        if (own.variant[i])
            table->variant[i] = name;
}

#define REPLACE(bit, name, set)                           \
    fill_function __real_mp_##set, __wrap_mp_##set;       \
    void __wrap_mp_##set(mp_kernel_table *table) {        \
        fill(table, bit, name, __real_mp_##set, modelled_##set); \
    }
#if defined(MP_TARGET_AVXVNNI_BEGIN)
REPLACE(MP_CPU_AVX_VNNI, "avxvnni model", avxvnni_dense)
REPLACE(MP_CPU_AVX_VNNI, "avxvnni model", avxvnni_quant)
REPLACE(MP_CPU_AVX_VNNI, "avxvnni model", avxvnni_rows)
REPLACE(MP_CPU_AVX_VNNI, "avxvnni model", avxvnni_attention)
#endif
#if defined(MP_TARGET_AMX_BEGIN)
REPLACE(MP_CPU_AMX, "amx model", amx_dense)
REPLACE(MP_CPU_AMX, "amx model", amx_quant)
REPLACE(MP_CPU_AMX, "amx model", amx_rows)
REPLACE(MP_CPU_AMX, "amx model", amx_attention)
#endif

/* Use a mask, or skip the test if the machine or the compiler lacks what its model needs. */
static void use_or_skip(const char *mask) {
    if (!kt_use(mask))
        MP_SKIP("this CPU lacks AVX2 or has AVX-VNNI (avxvnni model), or lacks AVX-512 (amx model)");
    for (int i = 0; i < mp_kernels_count(); i++)
        if (strcmp(mp_kernels_variant(i), mask) == 0)
            return;
    MP_SKIP("this compiler does not know the instruction set");
}

/* Each modelled slot runs on its model, and no other. pytest's summary says that a set was tested if its test passes.
 */
MP_TEST(kernels_modelled_amx_slots) {
    static const int tiles[] = {MP_SLOT_gemm_bf16, MP_SLOT_gemm_bf16_acts, MP_SLOT_gemm_i8, MP_SLOT_attn_full_bf16,
                                MP_SLOT_gemm_q4_0, MP_SLOT_gemm_q4_1, MP_SLOT_gemm_q8_0, MP_SLOT_gemm_q4_k,
                                MP_SLOT_gemm_q6_k, MP_SLOT_gemm_mxfp4, MP_SLOT_gemm_q2_k, MP_SLOT_gemm_q3_k,
                                MP_SLOT_gemm_tq, MP_SLOT_gemm_iq2_xxs, MP_SLOT_gemm_iq2_xs, MP_SLOT_gemm_iq3,
                                MP_SLOT_row_maxima_i8};
    const int count = (int)(sizeof tiles / sizeof *tiles);
    use_or_skip("amx model");
    int seen = 0;
    for (int i = 0; i < mp_kernels_count(); i++)
        seen += strcmp(mp_kernels_variant(i), "amx model") == 0;
    MP_CHECK_INT(seen, count);
    for (int i = 0; i < count; i++)
        MP_CHECK_STR(mp_kernels_variant(tiles[i]), "amx model");
    MP_CHECK(mp_cpu_features() & MP_CPU_AMX);
    MP_CHECK(mp_attn_full_for(MP_COMPUTE_BF16, 200, 64, false) == mp_kernels_get()->attn_full_bf16);
    kt_use("");
    for (int i = 0; i < mp_kernels_count(); i++)
        MP_CHECK(!strstr(mp_kernels_variant(i), "model"));
}

MP_TEST(kernels_modelled_avxvnni_slots) {
    use_or_skip("avxvnni model");
    int seen = 0;
    for (int i = 0; i < mp_kernels_count(); i++)
        seen += strcmp(mp_kernels_variant(i), "avxvnni model") == 0;
    MP_CHECK_INT(seen, 34);
    MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_i8), "avxvnni model");
    MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_q4_k), "avxvnni model");
    MP_CHECK_STR(mp_kernels_variant(MP_SLOT_stored_q4_k), "avxvnni model");
    MP_CHECK_INT(mp_cpu_features(), MP_CPU_AVX2 | MP_CPU_AVX_VNNI);
    kt_use("");
    for (int i = 0; i < mp_kernels_count(); i++)
        MP_CHECK(!strstr(mp_kernels_variant(i), "model"));
}

#endif
