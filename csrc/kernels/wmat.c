/* wmat.c: kinds of packed weight matrices: selection by dtype, sizes, packing, and reading a row back. */
#include <assert.h>

#include "base/cpu.h"
#include "kernels/kernels.h"
#include "kernels/pack.h"
#include "kernels/pack_dense.h"

static bool is_dense(mp_wkind kind) { return kind == MP_W_F32 || kind == MP_W_BF16 || kind == MP_W_I8; }

bool mp_wmat_kind_for(mp_dtype stored, mp_compute compute, mp_wkind *kind) {
    mp_wkind as_stored;
    bool is_float = false;
    switch (stored) {
    case MP_F32:
    case MP_F16: as_stored = MP_W_F32; is_float = true; break;
    case MP_BF16: as_stored = mp_cpu_has_bf16() ? MP_W_BF16 : MP_W_F32; is_float = true; break;
    case MP_Q4_0: as_stored = MP_W_Q4_0; break;
    case MP_Q4_1: as_stored = MP_W_Q4_1; break;
    case MP_Q5_0: as_stored = MP_W_Q5_0; break;
    case MP_Q5_1: as_stored = MP_W_Q5_1; break;
    case MP_Q8_0: as_stored = MP_W_Q8_0; break;
    case MP_Q4_K: as_stored = MP_W_Q4_K; break;
    case MP_Q5_K: as_stored = MP_W_Q5_K; break;
    case MP_Q6_K: as_stored = MP_W_Q6_K; break;
    case MP_Q2_K: as_stored = MP_W_Q2_K; break;
    case MP_Q3_K: as_stored = MP_W_Q3_K; break;
    case MP_TQ1_0:
    case MP_TQ2_0: as_stored = MP_W_TQ; break;
    case MP_IQ2_XXS:
    case MP_IQ1_S: as_stored = MP_W_IQ2_XXS; break;
    case MP_IQ2_S:
    case MP_IQ2_XS:
    case MP_IQ1_M: as_stored = MP_W_IQ2_XS; break;
    case MP_IQ3_S:
    case MP_IQ3_XXS: as_stored = MP_W_IQ3; break;
    case MP_IQ4_NL: as_stored = MP_W_IQ4_NL; break;
    case MP_IQ4_XS: as_stored = MP_W_IQ4_XS; break;
    case MP_MXFP4: as_stored = MP_W_MXFP4; break;
    case MP_NVFP4: as_stored = MP_W_NVFP4; break;
    case MP_AWQ4: /* kernels/scaled.h */
    case MP_GPTQ4: as_stored = MP_W_Q4_1; break;
    case MP_GPTQ4_ORDERED:
    case MP_F8_E4M3: as_stored = MP_W_Q8_0; break;
    default: return false; /* integers and F64 cannot be weights */
    }
    switch (compute) {
    case MP_COMPUTE_AUTO: *kind = as_stored; return true;
    case MP_COMPUTE_F32: *kind = MP_W_F32; return true;
    case MP_COMPUTE_BF16: *kind = MP_W_BF16; return true;
    case MP_COMPUTE_I8: *kind = MP_W_I8; return is_float;
    }
    return false;
}

const char *mp_compute_name(mp_compute compute) {
    static const char *const names[] = {"stored", "float32", "bfloat16", "int8"};
    return names[compute];
}

mp_compute mp_resolve_compute(mp_compute asked) {
    if (asked != MP_COMPUTE_AUTO)
        return asked;
    return mp_cpu_has_bf16() ? MP_COMPUTE_BF16 : MP_COMPUTE_F32;
}

mp_akind mp_wmat_acts(mp_wkind kind) {
    assert(kind < MP_W_KIND_COUNT);
    switch (kind) {
    case MP_W_F32: return MP_A_F32;
    case MP_W_BF16: return MP_A_BF16;
    case MP_W_I8: return MP_A_I8;
    default: return MP_A_Q8;
    }
}

void mp_wmat_init(mp_wmat *w, mp_wkind kind, int32_t N, int32_t K) {
    assert(kind < MP_W_KIND_COUNT && N > 0 && K > 0);
    w->kind = kind;
    w->N = N;
    w->K = K;
    w->panels = (int32_t)(((int64_t)N + MP_PANEL_N - 1) / MP_PANEL_N);
    w->panel_bytes = is_dense(kind) ? mp_pack_dense_panel_bytes(kind, K) : mp_pack_panel_bytes(kind, K);
    assert(w->panel_bytes % 64 == 0);
}

size_t mp_wmat_bytes(const mp_wmat *w) { return (size_t)w->panels * w->panel_bytes; }

void mp_wmat_pack(mp_wmat *w, const mp_tensor *src, int panel0, int panel1) {
    assert(0 <= panel0 && panel0 <= panel1 && panel1 <= w->panels);
    assert(src->ndim >= 1 && src->shape[src->ndim - 1] == w->K && mp_tensor_items(src) == (int64_t)w->N * w->K);
    if (is_dense(w->kind))
        mp_pack_dense(w, src, panel0, panel1);
    else
        mp_pack_quant(w, src, panel0, panel1);
}

void mp_wmat_row(const mp_wmat *w, int32_t n, float *out) {
    assert(n >= 0 && n < w->N);
    if (is_dense(w->kind))
        mp_pack_dense_row(w, n, out);
    else
        mp_pack_quant_row(w, n, out);
}
