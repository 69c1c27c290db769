/* test_models_load_progress.c: the stages and percentages that a load reports, in order. Waiting threads read them, and
 * the registry takes a load without reports for one that hangs. */
#include "image_generation_fixture.h"
#include "missing_fixture.h"
#include "parts_fixture.h"

#ifdef MP_SEAM
enum { REPORTS = 64, STAGE = 24 };
static mp_progress progress;
static struct { char stage[STAGE]; uint32_t percent; } reports[REPORTS];
static int count;

/* mp_progress_set reads the clock after it has stored the stage and the percentage. */
static uint64_t watch_progress(void) {
    const char *stage = atomic_load(&progress.stage);
    const uint32_t percent = atomic_load(&progress.percent);
    const bool same = count > 0 && strcmp(reports[count - 1].stage, stage ? stage : "") == 0 &&
                      reports[count - 1].percent == percent;
    if (stage && !same) {
        MP_CHECK(count < REPORTS && percent <= 100);
        snprintf(reports[count].stage, STAGE, "%s", stage);
        reports[count++].percent = percent;
    }
    return mp_sys_real.now_ns();
}

static void load_watched(mp_spec *spec) {
    mp_error error;
    mp_team *team;
    mp_lease lease;
    mp_loader loader = {0};
    mp_model *model = NULL;
    mp_budget budget = {.limit = UINT64_MAX};
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    MP_CHECK_OK(mp_team_create(0, &team, &error), &error);
    mp_team_lease(team, 1, &lease);
    MP_CHECK_OK(mp_model_loader(spec, MP_COMPUTE_F32, &loader, &error), &error);
    atomic_store(&progress.stage, NULL);
    count = 0;
    mp_sys_table.now_ns = watch_progress;
    MP_CHECK_OK(loader.ops->load(loader.self, &lease, &budget, &progress, &model, &error), &error);
    mp_sys_table = mp_sys_real;
    MP_CHECK(atomic_load(&progress.beat_ns) > 0);
    model->ops->destroy(model);
    loader.ops->destroy(loader.self);
    mp_team_return(&lease);
    mp_team_destroy(team);
    mp_spec_unpin(spec);
}

/* Write "mapping 0 50 100, packing 0": the percentages of each stage; those of packing only up to the first. */
static const char *stages(void) {
    static char text[256];
    size_t at = 0;
    for (int i = 0; i < count; i++) {
        const bool same = i > 0 && strcmp(reports[i].stage, reports[i - 1].stage) == 0;
        MP_CHECK(!same || reports[i].percent > reports[i - 1].percent);
        if (!same)
            at += (size_t)snprintf(text + at, sizeof text - at, "%s%s", i ? ", " : "", reports[i].stage);
        if (!same || strcmp(reports[i].stage, "packing") != 0)
            at += (size_t)snprintf(text + at, sizeof text - at, " %u", (unsigned)reports[i].percent);
    }
    return text;
}

static void check_packing(void) { /* the last matrix or vector is reported */
    MP_CHECK_STR(reports[count - 1].stage, "packing");
    MP_CHECK(reports[count - 1].percent > 50);
}
#endif

MP_TEST(models_loads_report_their_progress) {
#ifdef MP_SEAM
    static const mp_dtype types[] = {MP_F32};
    load_watched(tiny_decoder_spec(types, 1, 31));
    MP_CHECK_STR(stages(), "mapping 0 33 66 100, packing 0"); /* three layers */
    check_packing();
    load_watched(tiny_encoder_spec(false));
    MP_CHECK_STR(stages(), "mapping 0, packing 0");
    check_packing();
    for (int flux = 0; flux < 2; flux++) {
        load_watched(pipeline(flux));
        MP_CHECK_STR(stages(), "mapping 0, checking 50");
    }
#else
    MP_SKIP("needs the seam build");
#endif
}

/* --- memory while a load packs --- */

static uint64_t peak;

static bool note_peak(mp_budget *budget, uint64_t used) {
    (void)budget;
    peak = used > peak ? used : peak;
    return true;
}

/* A matrix that a family makes of tensors counts in the budget beside its packed copy. */
MP_TEST(models_load_charges_matrices_that_it_makes) {
    enum { N = 64, K = 48 };
    tiny_parts parts;
    mp_linear linear = {0};
    mp_error error;
    peak = 0;
    tiny_parts_begin(&parts, "made.bin", 3);
    tiny_tensor(&parts.file, "other", MP_F32, N, K, 1, 0);
    tiny_parts_open(&parts, MP_COMPUTE_F32, 1);
    parts.budget.cover = note_peak;
    float *const matrix = mp_alloc_array(N * K, sizeof *matrix, MP_TAG_WEIGHTS);
    memset(matrix, 0, N * K * sizeof *matrix);
    MP_CHECK_OK(mp_builder_linear_taken(&parts.builder, &linear, "other", NULL, matrix, N, K, &error), &error);
    tiny_parts_finish(&parts);
    MP_CHECK(peak >= parts.budget.used + N * K * sizeof *matrix);
    tiny_parts_close(&parts);
}
