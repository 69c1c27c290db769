/* nn/weights_use.c: see nn/weights_use.h. */
#include "models/nn/weights_use.h"

#include <string.h>

#include "base/options.h"
#include "files/scaled_weights.h"

/* Returns true if the matrices of the layers are stored as F32. Files use one type for all of them, except routers. */
static bool is_stored_as_f32(const mp_spec *spec) {
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const mp_tensor_entry *entry = mp_spec_tensor_at(spec, i);
        if (entry->ndim == 2 && strncmp(entry->name, "blk.", 4) == 0 && !strstr(entry->name, ".ffn_gate_inp"))
            return entry->dtype == MP_F32;
    }
    return false;
}

mp_status mp_weights_read_fast(const mp_spec *spec, bool *fast, mp_error *error) {
    return mp_spec_bool(spec, "mpool.float32_fast", &(bool){false}, fast, error);
}

mp_status mp_weights_use_read(const mp_spec *spec, mp_weights_use *use, mp_error *error) {
    static const char *const names[] = {
        [MP_WEIGHTS_AUTO] = "auto", [MP_WEIGHTS_MAPPED] = "mapped", [MP_WEIGHTS_PACKED] = "packed"};
    const char *name;
    bool fast;
    MP_TRY(mp_spec_string(spec, "mpool.weights", names[MP_WEIGHTS_AUTO], &name, error));
    MP_TRY(mp_weights_read_fast(spec, &fast, error));
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (strcmp(names[i], name) == 0) {
            *use = (mp_weights_use)i;
            if (fast && *use == MP_WEIGHTS_AUTO && is_stored_as_f32(spec) && mp_blas_differs())
                *use = MP_WEIGHTS_MAPPED;
            return MP_OK;
        }
    return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.weights", "auto, mapped, packed", "%s",
                        name);
}

mp_weights_use mp_weights_use_or_auto(const mp_spec *spec) {
    mp_weights_use use = MP_WEIGHTS_AUTO;
    mp_error error;
    return mp_weights_use_read(spec, &use, &error) == MP_OK ? use : MP_WEIGHTS_AUTO;
}

uint64_t mp_weights_threshold(mp_weights_use use) {
    return use == MP_WEIGHTS_AUTO     ? (uint64_t)mp_options_get()->pack_on_use_mb << 20
           : use == MP_WEIGHTS_MAPPED ? 0
                                      : UINT64_MAX;
}

bool mp_may_stay_unpacked(mp_unpacked unpacked, mp_weights_use use, mp_dtype dtype, mp_wkind kind) {
    if (mp_dtype_is_scaled(dtype))
        return false;
    if (unpacked == MP_UNPACKED_ENCODER)
        return use == MP_WEIGHTS_MAPPED || (kind == MP_W_F32 && dtype == MP_F32);
    return unpacked == MP_UNPACKED_EXACT && (kind == MP_W_BF16 ? dtype == MP_BF16 : kind != MP_W_I8);
}

mp_matrices mp_weights_predict(const mp_spec *spec, mp_compute compute, mp_unpacked unpacked,
                               bool (*may_stay)(const mp_spec *spec, const mp_tensor_entry *entry)) {
    uint64_t bytes = 0;
    int count = 0;
    const mp_weights_use use = mp_weights_use_or_auto(spec);
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const mp_tensor_entry *entry = mp_spec_tensor_at(spec, i);
        mp_wkind kind;
        if (entry->ndim != 2 || mp_is_companion(entry->name) || !may_stay(spec, entry) ||
            !mp_wmat_kind_for(entry->dtype, compute, &kind) || !mp_may_stay_unpacked(unpacked, use, entry->dtype, kind))
            continue;
        bytes += entry->nbytes;
        count++;
    }
    if (count == 0 || bytes < mp_weights_threshold(use))
        return MP_MATRICES_PACKED;
    return use == MP_WEIGHTS_MAPPED ? MP_MATRICES_MAPPED : MP_MATRICES_PACKING;
}
