/* test_models_rope.c: frequencies of every rope scaling against their formulas, and settings that are refused. */
#include "mp_test.h"
#include "models/nn/rope.h"

static mp_spec *spec_with(const char *scaling, double factor) {
    mp_error error;
    mp_spec *spec = mp_spec_create();
    MP_CHECK_OK(mp_spec_set_architecture(spec, "llama", &error), &error);
    mp_value type = {.type = MP_VALUE_STRING, .gguf_type = -1, .count = strlen(scaling), .as.string = scaling};
    MP_CHECK_OK(mp_spec_set(spec, "llama.rope.scaling.type", &type, &error), &error);
    if (factor != 0) {
        mp_value value = {.type = MP_VALUE_FLOAT, .gguf_type = -1, .count = 1, .as.real = factor};
        MP_CHECK_OK(mp_spec_set(spec, "llama.rope.scaling.factor", &value, &error), &error);
    }
    return spec;
}

static void set_real(mp_spec *spec, const char *key, double value) {
    mp_error error;
    mp_value v = {.type = MP_VALUE_FLOAT, .gguf_type = -1, .count = 1, .as.real = value};
    MP_CHECK_OK(mp_spec_set(spec, key, &v, &error), &error);
}

/* YaRN's ramp runs from the pair that turns `fast` times within the original context to the pair that turns `slow`
 * times; in the first case, from 0.5 to 2. The ramp is limited to pairs that exist. Truncation rounds both ends
 * outwards. */
MP_TEST(models_rope_yarn_without_truncation) {
    static const struct {
        double original, factor;
        int truncate; /* -1: default */
        double fast;  /* 0: default, 32 */
    } cases[] = {{636, 4, 0, 0}, {636, 4, 1, 0}, {636, 4, -1, 0}, {60, 2, 0, 0}, {3e8, 8, 0, 1e5}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        enum { PAIRS = 4 };
        const double turn = cases[i].original / (2 * 3.14159265358979323846);
        double high = 2 * PAIRS * log(turn) / (2 * log(10000));
        double low = 2 * PAIRS * log(turn / (cases[i].fast > 0 ? cases[i].fast : 32)) / (2 * log(10000));
        mp_error error;
        mp_rope rope;
        mp_spec *spec = spec_with("yarn", cases[i].factor);
        set_real(spec, "llama.rope.scaling.original_context_length", cases[i].original);
        if (cases[i].fast > 0)
            set_real(spec, "llama.rope.scaling.yarn_beta_fast", cases[i].fast);
        if (cases[i].truncate >= 0) {
            mp_value yes = {.type = MP_VALUE_BOOL, .gguf_type = -1, .count = 1, .as.integer = cases[i].truncate};
            MP_CHECK_OK(mp_spec_set(spec, "mpool.rope_yarn_truncate", &yes, &error), &error);
        }
        MP_CHECK_OK(mp_rope_init(&rope, spec, 2 * PAIRS, true, &error), &error);
        if (cases[i].truncate != 0) {
            low = floor(low);
            high = ceil(high);
        }
        low = fmax(low, 0);
        high = fmin(high, 2 * PAIRS - 1);
        for (int pair = 0; pair < PAIRS; pair++) {
            const double ramp = fmin(fmax((pair - low) / (high - low), 0), 1);
            MP_CHECK_NEAR(rope.inverse[pair], pow(10000, -pair / 4.0) * (1 - ramp + ramp / cases[i].factor), 1e-12);
        }
        mp_rope_deinit(&rope);
        mp_spec_unpin(spec);
    }
}

/* Llama 3's ramp must have a length. */
MP_TEST(models_rope_llama3_refuses_an_empty_ramp) {
    mp_error error;
    mp_rope rope;
    for (int low = 3; low <= 5; low++) {
        mp_spec *spec = spec_with("llama3", 8);
        set_real(spec, "llama.rope.scaling.low_freq_factor", low);
        set_real(spec, "llama.rope.scaling.high_freq_factor", 4);
        set_real(spec, "llama.rope.scaling.original_context_length", 8192);
        MP_CHECK_STATUS(mp_rope_init(&rope, spec, 8, true, &error), low < 4 ? MP_OK : MP_FORMAT, &error);
        if (low >= 4)
            MP_CHECK_HAS(error.message, "high_freq_factor");
        mp_rope_deinit(&rope);
        mp_spec_unpin(spec);
    }
}

/* Three axes: each pair turns by the position of its section. Interleaved sections take turns until each has its pairs;
 * the first one has the rest. */
MP_TEST(models_rope_axes) {
    static const struct {
        mp_rope_sections sections;
        int axis_of[8];
    } ways[] = {{{{1, 2, 5}, false}, {0, 1, 1, 2, 2, 2, 2, 2}},
                {{{3, 3, 2}, true}, {0, 1, 2, 0, 1, 2, 0, 1}},
                {{{5, 2, 1}, true}, {0, 1, 2, 0, 1, 0, 0, 0}}};
    static const int32_t positions[3] = {3, 5, 11};
    mp_error error;
    mp_rope rope;
    float row[16];
    mp_spec *spec = spec_with("linear", 2);
    MP_CHECK_OK(mp_rope_init(&rope, spec, 16, true, &error), &error);
    for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
        mp_rope_axes(&rope, &ways[w].sections, positions, row);
        for (int i = 0; i < 8; i++) {
            const double angle = positions[ways[w].axis_of[i]] * pow(10000, -2.0 * i / 16) / 2;
            MP_CHECK_NEAR(row[2 * i], cos(angle), 1e-6);
            MP_CHECK_NEAR(row[2 * i + 1], sin(angle), 1e-6);
        }
    }
    mp_rope_deinit(&rope);
    mp_spec_unpin(spec);
}
