/* test_models_diffusion_sizes.c: a load refuses pipelines of image generation whose networks or sizes do not fit each
 * other. The error names the network or the key. */
#include "image_generation_fixture.h"
#include "ranges_fixture.h"

typedef struct unfit {
    bool flux, large_clip;   /* the pipeline; large_clip: with clip_g */
    const char *key;         /* its value is replaced */
    int64_t values[3];       /* [count] */
    int count;               /* 0: the key is removed */
    const char *field, *allowed; /* in the error */
} unfit;

static mp_spec *changed(const unfit *row) {
    const mp_value list = {.type = MP_VALUE_INTS, .gguf_type = -1, .count = (uint64_t)row->count,
                           .as.integers = row->values};
    const mp_value one = {.type = MP_VALUE_INT, .gguf_type = -1, .count = 1, .as.integer = row->values[0]};
    mp_spec *base = pipeline_with(row->flux, row->large_clip);
    mp_spec *spec = spec_with(base, row->key, row->count == 0 ? NULL : row->count == 1 ? &one : &list);
    mp_spec_unpin(base);
    return spec;
}

static void check_unfit(const unfit *row) {
    mp_error error;
    MP_CHECK_STATUS(load_only(changed(row), MP_COMPUTE_AUTO, &error), MP_FORMAT, &error);
    if (strcmp(error.field, row->field) != 0)
        MP_FAIL("%s = %lld: the error names %s: %s", row->key, (long long)row->values[0], error.field, error.message);
    MP_CHECK_STR(error.allowed, row->allowed);
}

static void begin(void) {
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
}

MP_TEST(models_diffusion_sizes_of_a_network) {
    static const char eight[] = "a multiple of 8";
    static const char wide[] = "heads of at most 65,536 components together";
    static const char sum[] = "numbers that add up to head_length";
    static const char divisor[] = "a divisor of every number in vae.channels";
    static const unfit rows[] = {
        {false, true, "clip_l.head_length", {12}, 1, "clip_l.head_length", eight},
        {false, true, "clip_l.head_count", {3}, 1, "clip_l.head_count",
         "heads of embedding_length components together"},
        {true, false, "t5.head_length", {12}, 1, "t5.head_length", eight},
        {true, false, "t5.head_count", {8193}, 1, "t5.head_count", wide},
        {true, false, "t5.relative_buckets", {6}, 1, "t5.relative_buckets", "a multiple of 4"},
        {false, true, "transformer.head_length", {12}, 1, "transformer.head_length", eight},
        {true, false, "transformer.head_count", {4097}, 1, "transformer.head_count", wide},
        {true, false, "transformer.axes", {3, 5, 8}, 3, "transformer.axes", "even numbers"},
        {true, false, "transformer.axes", {4, 5, 7}, 3, "transformer.axes", "even numbers"},
        {true, false, "transformer.axes", {4, 4, 6}, 3, "transformer.axes", sum},
        {true, false, "transformer.axes", {4, 4, 10}, 3, "transformer.axes", sum},
        {false, true, "transformer.single_block_count", {1}, 1, "transformer",
         "neither single blocks nor guidance, except for FLUX"},
        {true, false, "vae.channels", {0}, 0, "vae.channels", "an array of 1 to 8 integers"},
        {true, false, "vae.groups", {3}, 1, "vae.groups", divisor},
        {true, false, "vae.groups", {16}, 1, "vae.groups", divisor},
        {true, false, "vae.channels", {8, 12}, 2, "vae.channels",
         "a multiple of 8 as the last number, because vae.attention is true"},
    };
    begin();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        check_unfit(&rows[i]);
}

/* Text encoders that are missing, or whose widths do not fit the transformer. */
MP_TEST(models_diffusion_sizes_of_text_encoders) {
    static const char all[] = "text encoders", t5[] = "t5.embedding_length";
    static const char of_flux[] = "clip_l and t5", of_sd3[] = "clip_l and clip_g, with or without t5";
    static const char sum[] = "projections of clip_l and clip_g that add up to transformer.pooled_length";
    static const unfit rows[] = {
        {true, false, "clip_l.block_count", {0}, 0, all, of_flux},
        {true, false, "t5.block_count", {0}, 0, all, of_flux},
        {true, true, "mpool.none", {1}, 1, all, of_flux}, /* Flux has no clip_g */
        {true, false, "transformer.text_length", {48}, 1, t5, "48 (transformer.text_length)"},
        {true, false, "transformer.pooled_length", {24}, 1, "clip_l.embedding_length",
         "24 (transformer.pooled_length)"},
        {false, true, "clip_l.block_count", {0}, 0, all, of_sd3},
        {false, false, "mpool.none", {1}, 1, all, of_sd3},
        {false, true, "clip_l.projection_length", {0}, 1, all, sum},
        {false, true, "clip_g.projection_length", {0}, 1, all, sum},
        {false, true, "transformer.text_length", {41}, 1, t5, "41 (transformer.text_length)"},
        {false, true, "transformer.pooled_length", {31}, 1, all, sum},
        {false, true, "transformer.pooled_length", {33}, 1, all, sum},
    };
    mp_error error;
    begin();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        check_unfit(&rows[i]);
    /* SD3 without T5: the texts of both CLIP encoders are side by side, and may be narrower than the transformer's */
    const mp_value narrow = {.type = MP_VALUE_INT, .gguf_type = -1, .count = 1, .as.integer = 39};
    mp_spec *base = pipeline(false), *without = spec_with(base, "t5.block_count", NULL);
    MP_CHECK_OK(load_only(mp_spec_pin(without), MP_COMPUTE_AUTO, &error), &error);
    MP_CHECK_STATUS(load_only(spec_with(without, "transformer.text_length", &narrow), MP_COMPUTE_AUTO, &error),
                    MP_FORMAT, &error);
    MP_CHECK_STR(error.field, "clip_g.embedding_length");
    MP_CHECK_STR(error.allowed, "at most 39 (transformer.text_length) with that of clip_l");
    mp_spec_unpin(without);
    mp_spec_unpin(base);
    clip_g_positions = CLIP_TOKENS - 1; /* texts of two lengths */
    MP_CHECK_STATUS(load_only(pipeline(false), MP_COMPUTE_AUTO, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.field, "clip_g.context_length");
    MP_CHECK_STR(error.allowed, "9, as clip_l");
}

MP_TEST(models_diffusion_refuses_int8) {
    mp_error error;
    begin();
    for (int flux = 0; flux < 2; flux++) {
        MP_CHECK_STATUS(load_only(pipeline(flux), MP_COMPUTE_I8, &error), MP_UNSUPPORTED, &error);
        MP_CHECK_HAS(error.message, "`compute` must be auto, float32 or bfloat16 for image generation, got int8");
    }
}

/* Each text encoder has the activation that its key names. */
MP_TEST(models_diffusion_activations_of_text_encoders) {
    static const struct { const char *name; mp_act act; } acts[] = {
        {"gelu", MP_ACT_GELU}, {"gelu_tanh", MP_ACT_GELU_TANH}, {"quick_gelu", MP_ACT_QUICK_GELU},
        {"relu", MP_ACT_RELU}, {"silu", MP_ACT_SILU}};
    static const char *const keys[MP_DIFF_ENCODERS] = {
        [MP_DIFF_CLIP_L] = "clip_l.activation", [MP_DIFF_CLIP_G] = "clip_g.activation", [MP_DIFF_T5] = "t5.activation"};
    const mp_value wrong = {.type = MP_VALUE_STRING, .gguf_type = -1, .count = 4, .as.string = "tanh"};
    mp_error error;
    begin();
    mp_spec *base = pipeline(false);
    for (int e = 0; e < MP_DIFF_ENCODERS; e++) {
        for (size_t i = 0; i < sizeof acts / sizeof *acts; i++) {
            const mp_value value = {.type = MP_VALUE_STRING, .gguf_type = -1, .count = strlen(acts[i].name),
                                    .as.string = acts[i].name};
            tiny_model tiny;
            tiny_load(&tiny, spec_with(base, keys[e], &value), MP_COMPUTE_F32, 1);
            MP_CHECK_INT(((const mp_diffusion *)tiny.model)->encoder[e].act, acts[i].act);
            tiny_unload(&tiny);
        }
        MP_CHECK_STATUS(load_only(spec_with(base, keys[e], &wrong), MP_COMPUTE_AUTO, &error), MP_FORMAT, &error);
        MP_CHECK_STR(error.field, keys[e]);
        MP_CHECK_STR(error.allowed, "gelu, gelu_tanh, quick_gelu, relu, relu2, silu");
    }
    mp_spec_unpin(base);
}
