#include "models/nn/rope.h"

#include <math.h>
#include <string.h>

#include "base/alloc.h"

static mp_status make_table(mp_rope *rope, double base, mp_error *error) {
    rope->inverse = mp_alloc((size_t)rope->dim / 2 * sizeof(double), MP_TAG_WEIGHTS);
    if (!rope->inverse)
        return mp_fail_memory(error, (uint64_t)rope->dim * 4, "the rotary table");
    for (int i = 0; i < rope->dim / 2; i++)
        rope->inverse[i] = pow(base, -2.0 * i / (double)rope->dim);
    return MP_OK;
}

mp_status mp_rope_init_plain(mp_rope *rope, int dim, bool neox, double base, mp_error *error) {
    *rope = (mp_rope){.dim = dim, .neox = neox, .attention_scale = 1};
    return make_table(rope, base, error);
}

mp_status mp_rope_divide(mp_rope *rope, const double *divisors, const mp_spec *spec, const char *name,
                         mp_error *error) {
    for (int i = 0; i < rope->dim / 2; i++) {
        if (!(divisors[i] > 0 && divisors[i] < 1e31)) /* files of Gemma 4 have 1e30 for pairs that do not turn */
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, name, "numbers above 0 and below 1e31",
                                "%g at %d", divisors[i], i);
        rope->inverse[i] /= divisors[i];
    }
    return MP_OK;
}

/* Returns the (fractional) index of the pair that turns `turns` times within `length` positions. */
static double pair_of(double turns, double length, double base, int dim) {
    return dim * log(length / (turns * 2 * 3.14159265358979323846)) / (2 * log(base));
}

static mp_status scale_yarn(mp_rope *rope, const mp_spec *spec, double base, double factor, mp_error *error) {
    double original, fast, slow, attention, attn, fast_default = 32, slow_default = 1, one = 1;
    bool truncate, yes = true;
    MP_TRY(mp_spec_float(spec, "{arch}.rope.scaling.original_context_length", 1, 1e9, NULL, &original, error));
    MP_TRY(mp_spec_float(spec, "{arch}.rope.scaling.yarn_beta_fast", 1e-3, 1e6, &fast_default, &fast, error));
    MP_TRY(mp_spec_float(spec, "{arch}.rope.scaling.yarn_beta_slow", 1e-3, 1e6, &slow_default, &slow, error));
    MP_TRY(mp_spec_float(spec, "{arch}.rope.scaling.attn_factor", 1e-3, 1e3, &one, &attn, error));
    attn *= 1 + 0.1 * log(factor);
    MP_TRY(mp_spec_float(spec, "mpool.rope_attention_factor", 1e-3, 1e3, &attn, &attention, error));
    MP_TRY(mp_spec_bool(spec, "mpool.rope_yarn_truncate", &yes, &truncate, error));
    if (base <= 1)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "rope.freq_base", "a number above 1", "%g",
                            base);
    double low = pair_of(fast, original, base, rope->dim), high = pair_of(slow, original, base, rope->dim);
    if (truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = low < 0 ? 0 : low;
    high = high > rope->dim - 1 ? rope->dim - 1 : high;
    double length = high - low < 0.001 ? 0.001 : high - low;
    for (int i = 0; i < rope->dim / 2; i++) {
        double ramp = (i - low) / length;
        ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
        rope->inverse[i] *= 1 - ramp + ramp / factor;
    }
    rope->attention_scale = (float)attention;
    return MP_OK;
}

mp_status mp_rope_init(mp_rope *rope, const mp_spec *spec, int head_dim, bool neox, mp_error *error) {
    int64_t dim, dim_default = head_dim;
    double base, base_default = 10000;
    const char *scaling;
    *rope = (mp_rope){.neox = neox, .attention_scale = 1};
    MP_TRY(mp_spec_int(spec, "{arch}.rope.dimension_count", 2, head_dim, &dim_default, &dim, error));
    MP_TRY(mp_spec_float(spec, "{arch}.rope.freq_base", 1, 1e12, &base_default, &base, error));
    MP_TRY(mp_spec_string(spec, "{arch}.rope.scaling.type", "none", &scaling, error));
    if (dim % 2)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1,
                            "rope.dimension_count", "an even number", "%lld", (long long)dim);
    rope->dim = (int)dim;
    MP_TRY(make_table(rope, base, error));
    if (strcmp(scaling, "none") == 0)
        return MP_OK;
    double factor, one = 1;
    MP_TRY(mp_spec_float(spec, "{arch}.rope.scaling.factor", 1, 1e6, &one, &factor, error));
    if (strcmp(scaling, "linear") == 0) {
        for (int i = 0; i < dim / 2; i++)
            rope->inverse[i] /= factor;
        return MP_OK;
    }
    if (strcmp(scaling, "proportional") == 0) {
        int64_t pairs;
        MP_TRY(mp_spec_int(spec, "mpool.rope_pairs", 0, dim / 2, NULL, &pairs, error));
        for (int i = 0; i < dim / 2; i++)
            rope->inverse[i] = i < pairs ? rope->inverse[i] / factor : 0;
        return MP_OK;
    }
    if (strcmp(scaling, "llama3") == 0) {
        double low, high, original;
        MP_TRY(mp_spec_float(spec, "{arch}.rope.scaling.low_freq_factor", 1e-3, 1e6, NULL, &low, error));
        MP_TRY(mp_spec_float(spec, "{arch}.rope.scaling.high_freq_factor", 1e-3, 1e6, NULL, &high, error));
        MP_TRY(mp_spec_float(spec, "{arch}.rope.scaling.original_context_length", 1, 1e9, NULL, &original, error));
        if (high <= low)
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1,
                                "rope.scaling.high_freq_factor", "a number above low_freq_factor", "%g", high);
        for (int i = 0; i < dim / 2; i++) {
            double wavelength = 2 * 3.14159265358979323846 / rope->inverse[i];
            double smooth = (original / wavelength - low) / (high - low);
            smooth = smooth < 0 ? 0 : smooth > 1 ? 1 : smooth;
            rope->inverse[i] *= (1 - smooth) / factor + smooth;
        }
        return MP_OK;
    }
    if (strcmp(scaling, "yarn") == 0)
        return scale_yarn(rope, spec, base, factor, error);
    return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "rope.scaling.type",
                        "none, linear, proportional, llama3, yarn", "%s", scaling);
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

void mp_rope_axes(const mp_rope *rope, const mp_rope_sections *sections, const int32_t positions[3], float *out) {
    for (int i = 0, axis = 0, left = sections->pairs[0]; i < rope->dim / 2; i++, left--) {
        if (sections->interleaved)
            axis = i / 3 < sections->pairs[i % 3] ? i % 3 : 0;
        else
            while (left == 0)
                left = sections->pairs[++axis];
        double angle = (double)positions[axis] * rope->inverse[i];
        out[2 * i] = (float)cos(angle) * rope->attention_scale;
        out[2 * i + 1] = (float)sin(angle) * rope->attention_scale;
    }
}
