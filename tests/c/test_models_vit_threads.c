/* test_models_vit_threads.c: late threads of image transformers change no bit, and steps learn the time that plans rely
 * on. */
#include "estimate_fixture.h"
#include "ranges_fixture.h"
#include "vit_fixture.h"
#include "models/threads.h"

/* Images computed at once, and in parts of layers, one in each step. */
MP_TEST(models_vit_late_threads) {
    static const family families[] = {{"dinov2", true}, {"dinov2_with_registers", false}, {"siglip", false}};
    static test_images all;
    for (int f = 0; f < 3; f++) {
        make_images(&all, f < 2);
        for (int c = 0; c < 2; c++)
            check_late_threads(&(grouped){IMAGES, WIDTH, c ? MP_COMPUTE_I8 : MP_COMPUTE_F32, make_family, &families[f],
                                          &all, run, c ? cut : compute_all},
                               1, 2, c ? 1 : UINT64_MAX);
    }
}

/* Heads of 8 outputs: threads that attend need queries that other threads have computed. */
static mp_spec *make_small_heads(const void *arg) {
    mp_spec *base = make_family(arg);
    const mp_value heads = {.type = MP_VALUE_INT, .gguf_type = -1, .count = 1, .as.integer = 6};
    mp_spec *spec = spec_with(base, "siglip.vision.attention.head_count", &heads);
    mp_spec_unpin(base);
    return spec;
}

MP_TEST(models_vit_late_threads_that_pool) {
    static const family pools = {"siglip", false};
    static test_images all;
    make_images(&all, false);
    for (int c = 0; c < 2; c++)
        check_late_threads(&(grouped){IMAGES, WIDTH, MP_COMPUTE_F32, make_small_heads, &pools, &all, run,
                                      c ? cut : compute_all},
                           1, 2, c ? 1 : UINT64_MAX);
}

/* 3 million operations in 6,000 ns are 2,000 ns per million. No operations change nothing, and the time has an upper
 * bound. */
MP_TEST(models_vit_learns_the_exact_time) {
    enum { SLOWEST = 100000000 };
    mp_vit model = {.mega_ns = 1000};
    mp_vit_learn(&model, 3000000, 6000);
    MP_CHECK_INT(model.mega_ns, (3 * 1000 + 2000) / 4 + 1);
    mp_vit_learn(&model, 0, 6000);
    MP_CHECK_INT(model.mega_ns, 1251);
    mp_vit_learn(&model, 1, UINT64_MAX / 2);
    MP_CHECK_INT(model.mega_ns, (3 * 1251 + (uint64_t)SLOWEST) / 4 + 1);
    model.mega_ns = 1000;
    mp_vit_learn(&model, 1000, 100500); /* just above the bound */
    MP_CHECK_INT(model.mega_ns, (3 * 1000 + (uint64_t)SLOWEST) / 4 + 1);
    model.mega_ns = 1000;
    mp_vit_learn(&model, 1000, 99999); /* just below it */
    MP_CHECK_INT(model.mega_ns, (3 * 1000 + 99999000) / 4 + 1);
}
