#include "models/layers/rope.h"

#include <math.h>
#include <string.h>

#include "base/alloc.h"

mp_status mp_rope_init(mp_rope *rope, const mp_spec *spec, int head_dim, bool neox, mp_error *error) {
    int64_t dim, dim_default = head_dim;
    double base, base_default = 10000;
    const char *scaling;
    *rope = (mp_rope){.neox = neox, .attention_scale = 1};
    MP_TRY(mp_spec_int(spec, "{arch}.rope.dimension_count", 2, head_dim, &dim_default, &dim, error));
    MP_TRY(mp_spec_float(spec, "{arch}.rope.freq_base", 1, 1e12, &base_default, &base, error));
    MP_TRY(mp_spec_string(spec, "{arch}.rope.scaling.type", "none", &scaling, error));
    if (dim % 2)
        return mp_fail_file(error, MP_FORMAT, mp_spec_file_count(spec) ? mp_spec_file(spec, 0) : "", -1,
                            "rope.dimension_count", "an even number", "%lld", (long long)dim);
    rope->dim = (int)dim;
    rope->inverse = mp_alloc((size_t)dim / 2 * sizeof(double), MP_TAG_WEIGHTS);
    if (!rope->inverse)
        return mp_fail_memory(error, (uint64_t)dim * 4, "the rotary table");
    for (int i = 0; i < dim / 2; i++)
        rope->inverse[i] = pow(base, -2.0 * i / (double)dim);
    if (strcmp(scaling, "none") == 0)
        return MP_OK;
    double factor, one = 1;
    MP_TRY(mp_spec_float(spec, "{arch}.rope.scaling.factor", 1, 1e6, &one, &factor, error));
    if (strcmp(scaling, "linear") == 0) {
        for (int i = 0; i < dim / 2; i++)
            rope->inverse[i] /= factor;
        return MP_OK;
    }
    if (strcmp(scaling, "llama3") == 0) {
        double low, high, original;
        MP_TRY(mp_spec_float(spec, "{arch}.rope.scaling.low_freq_factor", 1e-3, 1e6, NULL, &low, error));
        MP_TRY(mp_spec_float(spec, "{arch}.rope.scaling.high_freq_factor", 1e-3, 1e6, NULL, &high, error));
        MP_TRY(mp_spec_float(spec, "{arch}.rope.scaling.original_context_length", 1, 1e9, NULL, &original, error));
        if (high <= low)
            return mp_fail_file(error, MP_FORMAT, mp_spec_file_count(spec) ? mp_spec_file(spec, 0) : "", -1,
                                "rope.scaling.high_freq_factor", "a number above low_freq_factor", "%g", high);
        for (int i = 0; i < dim / 2; i++) {
            double wavelength = 2 * 3.14159265358979323846 / rope->inverse[i];
            double smooth = (original / wavelength - low) / (high - low);
            smooth = smooth < 0 ? 0 : smooth > 1 ? 1 : smooth;
            rope->inverse[i] *= (1 - smooth) / factor + smooth;
        }
        return MP_OK;
    }
    return mp_fail_file(error, MP_FORMAT, mp_spec_file_count(spec) ? mp_spec_file(spec, 0) : "", -1,
                        "rope.scaling.type", "none, linear, llama3", "%s", scaling);
}

void mp_rope_deinit(mp_rope *rope) {
    mp_free(rope->inverse);
    rope->inverse = NULL;
}

void mp_rope_row(const mp_rope *rope, int64_t position, float *out) {
    for (int i = 0; i < rope->dim / 2; i++) {
        double angle = (double)position * rope->inverse[i];
        out[2 * i] = (float)cos(angle) * rope->attention_scale;
        out[2 * i + 1] = (float)sin(angle) * rope->attention_scale;
    }
}
