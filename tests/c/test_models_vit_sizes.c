/* test_models_vit_sizes.c: sizes, counts, defaults and normalised pixels of image transformers. */
#include "defaults_fixture.h"
#include "late_threads.h"
#include "sizes_fixture.h"
#include "vit_fixture.h"

/* Scratch, predicted memory, operations and parts of every network, as recorded. */
MP_TEST(models_vit_sizes_recorded) {
    enum { DOWN = 5, ACROSS = 9, ROWS = 50, PART_ROWS = 20, LARGE = 70, COUNT = 19 };
    static const family families[] = {
        {"dinov2", false}, {"dinov2", true}, {"dinov2_with_registers", false}, {"siglip", false}, {"siglip", true}};
    static const mp_compute classes[] = {MP_COMPUTE_F32, MP_COMPUTE_BF16, MP_COMPUTE_I8};
    static const uint64_t recorded[sizeof families / sizeof *families][3][COUNT] = {
        {{255232, 1215598, 255232, 48000, 11840, 12096, 38912, 132, 9216, 4608, 23040, 64000, 4839072, 3197472, 572,
         987649, 1250000000, 4320, 288},
         {168448, 1223918, 168448, 48000, 18240, 18496, 38912, 132, 9216, 4608, 23040, 64000, 4839072, 3197472, 572,
          987649, 1250000000, 4320, 288},
         {96000, 1223918, 96000, 48000, 15936, 16192, 38912, 132, 9216, 4608, 23040, 64000, 4839072, 3197472, 572,
          987649, 1250000000, 4320, 288}},
        {{292864, 1220270, 292864, 48000, 15424, 15680, 38912, 132, 9216, 4608, 32256, 64000, 5686944, 3630624, 572,
         987649, 1250000000, 3072, 288},
         {193792, 1228590, 193792, 48000, 21824, 22080, 38912, 132, 9216, 4608, 32256, 64000, 5686944, 3630624, 572,
          987649, 1250000000, 3072, 288},
         {107520, 1228590, 107520, 48000, 19520, 19776, 38912, 132, 9216, 4608, 32256, 64000, 5686944, 3630624, 572,
          987649, 1250000000, 3072, 288}},
        {{251712, 1220711, 251712, 48000, 11840, 12096, 38912, 132, 9216, 4608, 21504, 64000, 5019168, 3314208, 572,
         987649, 1250000000, 4608, 288},
         {169024, 1229991, 169024, 48000, 18240, 18496, 38912, 132, 9216, 4608, 21504, 64000, 5019168, 3314208, 572,
          987649, 1250000000, 4608, 288},
         {95552, 1229991, 95552, 48000, 15936, 16192, 38912, 132, 9216, 4608, 21504, 64000, 5019168, 3314208, 572,
          987649, 1250000000, 4608, 288}},
        {{348160, 1213915, 348160, 48000, 11840, 12096, 38912, 132, 9216, 4608, 23040, 64000, 4730400, 3133728, 624,
         987649, 1250000000, 4320, 288},
         {226560, 1221915, 226560, 48000, 18240, 18496, 38912, 132, 9216, 4608, 23040, 64000, 4730400, 3133728, 624,
          987649, 1250000000, 4320, 288},
         {123136, 1221915, 123136, 48000, 15936, 16192, 38912, 132, 9216, 4608, 23040, 64000, 4730400, 3133728, 624,
          987649, 1250000000, 4320, 288}},
        {{385792, 1218395, 385792, 48000, 15424, 15680, 38912, 132, 9216, 4608, 32256, 64000, 5559840, 3557664, 624,
         987649, 1250000000, 3072, 288},
         {251904, 1226395, 251904, 48000, 21824, 22080, 38912, 132, 9216, 4608, 32256, 64000, 5559840, 3557664, 624,
          987649, 1250000000, 3072, 288},
         {134656, 1226395, 134656, 48000, 19520, 19776, 38912, 132, 9216, 4608, 32256, 64000, 5559840, 3557664, 624,
          987649, 1250000000, 3072, 288}},
    };
    int wrong = 0;
    for (size_t i = 0; i < 3 * sizeof families / sizeof *families; i++) {
        tiny_model tiny;
        uint64_t got[COUNT];
        char what[64];
        tiny_load(&tiny, make_family(&families[i / 3]), classes[i % 3], 1);
        const mp_vit *model = (const mp_vit *)tiny.model;
        tiny.loader.ops->footprint(tiny.loader.self, &got[0], &got[1]);
        got[2] = tiny.model->ops->bytes(tiny.model);
        got[3] = mp_vit_state_bytes(model, ROWS);
        got[4] = mp_vit_part_bytes(model, PART_ROWS, 1);
        got[5] = mp_vit_part_bytes(model, 1, PART_ROWS);
        got[6] = mp_vit_thread_scratch(model, ROWS);
        got[7] = mp_vit_position_scratch(model);
        got[8] = mp_vit_keys_ops(model);
        got[9] = mp_vit_queries_ops(model);
        got[10] = mp_vit_after_ops(model);
        got[11] = mp_vit_attention_ops(model, PART_ROWS, ROWS);
        got[12] = mp_vit_image_ops(model, DOWN, ACROSS, false);
        got[13] = mp_vit_image_ops(model, DOWN, ACROSS, true);
        got[14] = mp_vit_image_parts(model, LARGE, LARGE);
        got[15] = mp_vit_ns(model, 123456789);
        got[16] = mp_vit_part_ops(model);
        got[17] = (uint64_t)mp_vit_part_rows(model, 10000, 100000000);
        got[18] = (uint64_t)mp_vit_next_rows(model, 1000, 300);
        snprintf(what, sizeof what, "%s, gated %d, compute type %d", families[i / 3].arch, families[i / 3].gated,
                 (int)classes[i % 3]);
        wrong += !sizes_are(what, got, recorded[i / 3][i % 3], COUNT);
        tiny_unload(&tiny);
    }
    MP_CHECK_INT(wrong, 0);
}

static uint64_t hash_of_images(mp_spec *spec) {
    static test_images all;
    float out[2 * WIDTH];
    tiny_model tiny;
    make_images(&all, strcmp(mp_spec_architecture(spec), "siglip") != 0);
    tiny_load(&tiny, spec, MP_COMPUTE_F32, 1);
    MP_CHECK_INT(run(&tiny, &all, 0, 2, UINT64_MAX, out), MP_OUTCOME_DONE);
    tiny_unload(&tiny);
    return tiny_hash_bytes(1, out, sizeof out);
}

MP_TEST(models_vit_defaults) {
    MP_RESULTS_ONLY();
    static const optional_key keys[] = {
        {"mpool.image.mean", "0,0,0", "0,0.5,0"},
        {"mpool.image.std", "1,1,1", "1,0.5,1"},
        {"mpool.image.rescale_factor", "0.00392156862745098", "0.01"},
        {"mpool.image.gated", "false", NULL},
        {"mpool.image.channels_last", "false", "true"},
        {"mpool.image.activation", "gelu", "relu"},
        {"mpool.normalize", "true", "false"},
    };
    static const optional_key registers[] = {{"mpool.image.registers", "0", NULL}};
    check_defaults(make_spec("dinov2", false), hash_of_images, KEYS(keys));
    check_defaults(make_spec("siglip", false), hash_of_images, KEYS(keys));
    check_defaults(make_spec("dinov2_with_registers", false), hash_of_images, KEYS(registers));
}

/* A byte becomes its product with the factor, less the mean, divided by the deviation, for each channel. */
MP_TEST(models_vit_normalises_pixels) {
    static const char *const keys[] = {"mpool.image.mean", "mpool.image.std", "mpool.image.rescale_factor"};
    static const char *const texts[] = {"0.25,0.5,0.125", "0.5,0.25,2", "0.01"};
    static const float mean[] = {0.25f, 0.5f, 0.125f}, deviation[] = {0.5f, 0.25f, 2};
    tiny_model tiny;
    mp_spec *spec = make_spec("dinov2", false);
    for (int k = 0; k < 3; k++) {
        double list[VALUES_MAX];
        const mp_value value = value_of(texts[k], list);
        mp_spec *base = spec;
        spec = spec_with(base, keys[k], &value);
        mp_spec_unpin(base);
    }
    tiny_load(&tiny, spec, MP_COMPUTE_F32, 1);
    for (int c = 0; c < 3; c++)
        for (int v = 0; v < 256; v++)
            MP_CHECK(((const mp_vit *)tiny.model)->pixel[c][v] == ((float)(0.01 * v) - mean[c]) / deviation[c]);
    tiny_unload(&tiny);
}

/* The polls of a pass over two images, whole and in parts, as recorded: after each part, and in attention. */
MP_TEST(models_vit_polls_recorded) {
    static const char *const archs[] = {"dinov2", "dinov2_with_registers", "siglip"};
    static const uint64_t recorded[6] = {21, 21, 21, 21, 22, 28};
    static test_images all;
    float out[2 * WIDTH];
    uint64_t got[6];
    for (int i = 0; i < 6; i++) {
        tiny_model tiny;
        make_images(&all, i / 2 < 2);
        tiny_load(&tiny, make_spec(archs[i / 2], false), MP_COMPUTE_F32, 1);
        if (i % 2)
            cut(&tiny);
        (void)lease_polls();
        MP_CHECK_INT(run(&tiny, &all, 0, 2, UINT64_MAX, out), MP_OUTCOME_DONE);
        got[i] = (uint64_t)lease_polls();
        tiny_unload(&tiny);
    }
    MP_CHECK(sizes_are("polls", got, recorded, 6));
}
