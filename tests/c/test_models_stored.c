/* Weights that are packed during use: the bits and the charge are the same at every stage of packing, and a change of
 * the file before packing ends fails the requests. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/options.h"
#include "base/sanitize.h"
#include "model_fixture.h"
#include "models/decoder/decoder.h"

static const mp_dtype types[] = {MP_Q8_0, MP_Q4_1, MP_Q4_0, MP_Q5_0, MP_Q4_K, MP_Q6_K, MP_Q5_1, MP_Q5_K,
                                 MP_Q2_K, MP_Q3_K, MP_IQ4_XS, MP_IQ2_XS};
enum { TYPES = sizeof types / sizeof *types, JOBS = 5, ANSWER = 8, UNTIED = 332 };

static void pack_on_use(const char *mb) {
    mp_error error;
    setenv("MPOOL_PACK_ON_USE_MB", mb, 1);
    MP_CHECK_OK(mp_options_init(&error), &error);
}

static mp_stored *stored_of(const tiny_model *tiny) { return ((mp_decoder *)tiny->model)->stored; }

static void load(tiny_model *tiny, const char *mb, int threads, int32_t infinite) {
    pack_on_use(mb);
    tiny_load(tiny, tiny_decoder_spec_with(types, TYPES, 5, infinite), MP_COMPUTE_AUTO, threads);
    tiny_wait_until_fetched(stored_of(tiny)); /* passes are not measured before */
}

static void make_job(const tiny_model *tiny, tiny_job *job, int index) {
    static const int lengths[JOBS] = {1, 70, 5, 150, 33};
    mp_test_random random = {100 + (uint64_t)index};
    int32_t prompt[256];
    for (int i = 0; i < lengths[index]; i++)
        prompt[i] = (int32_t)(mp_test_random_u64(&random) % (TINY_VOCAB - 1));
    mp_text_args args = {
        .n_prompt = lengths[index],
        .prompt = prompt,
        .n_choices = 1,
        .want_prompt_logits = true,
        .sampling = {.temperature = index % 2 ? 0.9f : 0,
                     .top_p = 1,
                     .repetition_penalty = 1,
                     .seed = 7,
                     .max_tokens = ANSWER,
                     .logprobs = 4,
                     .ignore_eos = true},
    };
    tiny_job_make(tiny, job, &args, 0);
}

static uint64_t run(tiny_model *tiny, int index) {
    tiny_job job;
    make_job(tiny, &job, index);
    tiny_job_admit(tiny, &job);
    tiny_job_finish(tiny, &job);
    uint64_t hash = tiny_job_hash(&job);
    mp_request_destroy(&job.call->base);
    return hash;
}

/* Time budgets of a pass for keeping packed panels: none, some of the panels, all panels. */
static const uint64_t keeps[] = {0, 15000, UINT64_MAX / 4};

/* A sanitizer build takes each time budget with one number of threads. */
static void check_bits(int32_t infinite) {
    uint64_t expected[JOBS], charged;
    tiny_model tiny;
    load(&tiny, "1048576", 1, infinite);
    MP_CHECK(!stored_of(&tiny));
    charged = tiny.model->ops->bytes(tiny.model);
    for (int i = 0; i < JOBS; i++)
        expected[i] = run(&tiny, i);
    tiny_unload(&tiny);
    for (size_t k = 0; k < sizeof keeps / sizeof *keeps; k++)
        for (int threads = 1; threads <= 3; threads++) {
            if (MP_SANITIZED && threads != 1 + (int)k)
                continue;
            load(&tiny, "0", threads, infinite);
            mp_stored *stored = stored_of(&tiny);
            MP_CHECK(mp_stored_left(stored));
            MP_CHECK_INT(tiny.model->ops->bytes(tiny.model), charged);
            MP_CHECK_INT(tiny.budget.used, charged);
            stored->keep_ns = keeps[k];
            stored->keep_row_ns = 0;
            for (int i = 0; i < JOBS; i++)
                if (run(&tiny, i) != expected[i])
                    MP_FAIL("job %d differs with %d threads, keep_ns %d", i, threads, (int)k);
            MP_CHECK(k == 1 || mp_stored_left(stored) == (k == 0));
            stored->keep_ns = UINT64_MAX / 4;
            for (int i = 0; i < JOBS; i++)
                MP_CHECK(run(&tiny, i) == expected[i]);
            MP_CHECK(!mp_stored_left(stored));
            MP_CHECK_INT(tiny.model->ops->bytes(tiny.model), charged);
            tiny_unload(&tiny);
        }
}

MP_TEST_SECONDS(models_stored_weights_give_the_same_bits, 120) { check_bits(-1); }

MP_TEST_SECONDS(models_stored_weights_give_the_same_bits_with_an_output_matrix, 120) { check_bits(UNTIED); }

/* `mapped` packs nothing, whatever the time budget and the minimum size; `packed` leaves nothing unpacked. */
MP_TEST_SECONDS(models_stored_weights_that_are_never_packed_give_the_same_bits, 60) {
    uint64_t expected[JOBS];
    tiny_model tiny;
    tiny_weights = "packed";
    load(&tiny, "0", 1, -1);
    MP_CHECK(!stored_of(&tiny));
    for (int i = 0; i < JOBS; i++)
        expected[i] = run(&tiny, i);
    tiny_unload(&tiny);
    tiny_weights = "mapped";
    for (int threads = 1; threads <= 2; threads++) {
        load(&tiny, "1048576", threads, -1);
        mp_stored *stored = stored_of(&tiny);
        const int left = atomic_load(&stored->left);
        const uint64_t decode_ns = atomic_load(&((mp_decoder *)tiny.model)->decode_ns);
        stored->keep_ns = UINT64_MAX / 4;
        for (int i = 0; i < JOBS; i++)
            MP_CHECK(run(&tiny, i) == expected[i]);
        MP_CHECK_INT(atomic_load(&stored->left), left);
        MP_CHECK(atomic_load(&((mp_decoder *)tiny.model)->decode_ns) != decode_ns); /* steps are measured */
        tiny_unload(&tiny);
    }
    tiny_weights = NULL;
}

/* Rows of a prompt of 150 tokens that a step without a time budget computes. */
static int planned_rows(tiny_model *tiny, uint64_t row_ns) {
    tiny_job job;
    mp_error error;
    mp_plan plan;
    make_job(tiny, &job, 3);
    MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &job.item, &error), &error);
    atomic_store(&((mp_decoder *)tiny->model)->row_ns, row_ns);
    atomic_store(&((mp_decoder *)tiny->model)->decode_ns, 1);
    mp_item *items[1] = {&job.item};
    tiny->engine->ops->plan(tiny->engine, items, 1, 1, &plan);
    MP_CHECK_INT(plan.count, 1);
    tiny->engine->ops->retire(tiny->engine, &job.item);
    mp_request_destroy(&job.call->base);
    return (int)plan.amount[0];
}

/* Each pass packs all panels that it needs: while some are unpacked, a step may have 256 rows of prompts, but at most
 * as many as take 1.5 s. Where other requests are being decoded, its time is limited as usual. */
MP_TEST(models_stored_weights_make_longer_steps) {
    enum { ALL = 150, USUAL = 16, MS = 1000000 };
    tiny_model tiny;
    tiny_weights = "packed";
    load(&tiny, "0", 1, -1);
    MP_CHECK_INT(planned_rows(&tiny, MS), USUAL);
    tiny_unload(&tiny);
    tiny_weights = "mapped";
    load(&tiny, "0", 1, -1);
    MP_CHECK_INT(planned_rows(&tiny, MS), ALL);
    MP_CHECK_INT(planned_rows(&tiny, 10 * MS - 1), ALL);
    MP_CHECK_INT(planned_rows(&tiny, 20 * MS - 1), 75);
    MP_CHECK_INT(planned_rows(&tiny, 1000 * MS), USUAL);
    tiny_job decoding;
    make_job(&tiny, &decoding, 0);
    mp_error error;
    MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &decoding.item, &error), &error);
    tiny_job late;
    make_job(&tiny, &late, 3);
    MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &late.item, &error), &error);
    mp_item *items[2] = {&decoding.item, &late.item};
    mp_plan plan;
    tiny.engine->ops->plan(tiny.engine, items, 2, 1, &plan);
    MP_CHECK_INT(plan.count, 2);
    MP_CHECK_INT(plan.amount[1], USUAL);
    for (int i = 0; i < 2; i++)
        tiny.engine->ops->retire(tiny.engine, items[i]);
    mp_request_destroy(&decoding.call->base);
    mp_request_destroy(&late.call->base);
    tiny_unload(&tiny);
    tiny_weights = NULL;
}

MP_TEST(models_stored_weights_have_a_minimum_size) {
    tiny_model tiny;
    load(&tiny, "1", 1, -1); /* the fixture is larger than the minimum of 1 byte */
    MP_CHECK(mp_stored_left(stored_of(&tiny)));
    tiny_unload(&tiny);
    load(&tiny, "64", 1, -1);
    MP_CHECK(!stored_of(&tiny));
    tiny_unload(&tiny);
    static const mp_dtype floats[] = {MP_F32};
    pack_on_use("0");
    tiny_load(&tiny, tiny_decoder_spec(floats, 1, 6), MP_COMPUTE_BF16, 1); /* packing rounds float32 to bfloat16 */
    MP_CHECK(!stored_of(&tiny));
    tiny_unload(&tiny);
}

MP_TEST(models_stored_floats_give_the_same_bits) {
    static const mp_dtype floats[] = {MP_F32};
    uint64_t bits[2];
    for (int on_use = 0; on_use < 2; on_use++) {
        tiny_model tiny;
        pack_on_use(on_use ? "0" : "64");
        tiny_load(&tiny, tiny_decoder_spec(floats, 1, 6), MP_COMPUTE_AUTO, 1);
        MP_CHECK(mp_stored_left(stored_of(&tiny)) == (on_use > 0));
        bits[on_use] = run(&tiny, 0);
        tiny_unload(&tiny);
    }
    MP_CHECK(bits[0] == bits[1]);
}

/* ---- several engines --------------------------------------------------------------------------------------------- */

typedef struct parallel_run {
    tiny_model tiny;
    uint64_t hashes[JOBS];
} parallel_run;

static void *run_in_parallel(void *arg) {
    parallel_run *one = arg;
    for (int i = 0; i < JOBS; i++)
        one->hashes[i] = run(&one->tiny, i);
    return NULL;
}

MP_TEST_SECONDS(models_stored_weights_are_shared_by_engines, 60) {
    tiny_model tiny;
    uint64_t expected[JOBS];
    load(&tiny, "1048576", 1, -1);
    for (int i = 0; i < JOBS; i++)
        expected[i] = run(&tiny, i);
    tiny_unload(&tiny);
    load(&tiny, "0", 1, -1);
    stored_of(&tiny)->keep_ns = 30000;
    stored_of(&tiny)->keep_row_ns = 0;
    parallel_run others[3];
    pthread_t threads[3];
    mp_error error;
    for (int i = 0; i < 3; i++) {
        others[i].tiny = tiny;
        MP_CHECK_OK(mp_team_create(0, &others[i].tiny.team, &error), &error);
        mp_team_lease(others[i].tiny.team, 1, &others[i].tiny.lease);
        MP_CHECK_OK(tiny.model->ops->engine(tiny.model, &tiny.budget, &others[i].tiny.engine, &error), &error);
    }
    for (int i = 0; i < 3; i++)
        MP_CHECK(pthread_create(&threads[i], NULL, run_in_parallel, &others[i]) == 0);
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        for (int k = 0; k < JOBS; k++)
            MP_CHECK(others[i].hashes[k] == expected[k]);
        others[i].tiny.engine->ops->destroy(others[i].tiny.engine);
        mp_team_return(&others[i].tiny.lease);
        mp_team_destroy(others[i].tiny.team);
    }
    tiny_unload(&tiny);
}

/* The time budget of a pass counts the time of packing alone. However short it is, each pass keeps a panel, so that the
 * weights of all layers are packed in the end. */
MP_TEST_SECONDS(models_stored_weights_of_the_last_layer_are_kept_in_time, 60) {
    tiny_model tiny;
    load(&tiny, "0", 1, -1);
    stored_of(&tiny)->keep_ns = 1; /* one panel per pass */
    stored_of(&tiny)->keep_row_ns = 0;
    for (int i = 0; i < 2000 && mp_stored_left(stored_of(&tiny)); i++)
        run(&tiny, 0);
    MP_CHECK(!mp_stored_left(stored_of(&tiny)));
    tiny_unload(&tiny);
}

/* A forked child continues with the weights that the parent has packed so far; the parent is unaffected. */
MP_TEST_SECONDS(models_stored_weights_after_a_fork, 60) {
    tiny_model tiny;
    load(&tiny, "0", 1, -1);
    stored_of(&tiny)->keep_ns = 15000;
    stored_of(&tiny)->keep_row_ns = 0;
    uint64_t expected = run(&tiny, 1);
    pid_t child = fork();
    if (child == 0) {
        mp_error error;
        stored_of(&tiny)->keep_ns = UINT64_MAX / 4;
        bool same = mp_team_create(0, &tiny.team, &error) == MP_OK;
        mp_team_lease(tiny.team, 1, &tiny.lease);
        same &= run(&tiny, 1) == expected && !mp_stored_left(stored_of(&tiny));
        _exit(same ? 0 : 1);
    }
    int status;
    MP_CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    MP_CHECK_INT(WEXITSTATUS(status), 0);
    MP_CHECK(run(&tiny, 1) == expected);
    tiny_unload(&tiny);
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

static void check_corrupted(void (*corrupt)(const char *path), bool before_the_first) {
    tiny_model tiny;
    mp_file_map_init();
    load(&tiny, "0", 1, -1); /* one thread: with more, the fault handler would map a page that another thread reads,
                              * which ThreadSanitizer reports */
    stored_of(&tiny)->keep_ns = 0;
    stored_of(&tiny)->keep_row_ns = 0;
    if (!before_the_first)
        run(&tiny, 2);
    MP_CHECK(tiny.model->ops->healthy(tiny.model));
    const char *path = mp_spec_file(tiny.spec, 0);
    struct stat before;
    MP_CHECK(stat(path, &before) == 0);
    corrupt(path);
    tiny_job job;
    make_job(&tiny, &job, 2);
    tiny_job_admit(&tiny, &job);
    MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), MP_OUTCOME_FAILED);
    MP_CHECK_INT(job.item.error.code, MP_INTEGRITY);
    MP_CHECK_INT(job.call->choices[0].token_count, 0);
    tiny.engine->ops->retire(tiny.engine, &job.item);
    mp_request_destroy(&job.call->base);
    struct timespec times[2] = {before.st_atim, before.st_mtim}; /* weights packed from the corrupted file stay wrong */
    MP_CHECK(truncate(path, before.st_size) == 0 && utimensat(AT_FDCWD, path, times, 0) == 0);
    MP_CHECK(!tiny.model->ops->healthy(tiny.model));
    tiny_unload(&tiny);
}

static void cut(const char *path) { MP_CHECK(truncate(path, 5000) == 0); }

static void overwrite(const char *path) {
    FILE *file = fopen(path, "r+b");
    MP_CHECK(file && fseek(file, 100000, SEEK_SET) == 0 && fwrite("changed", 1, 7, file) == 7 && fclose(file) == 0);
}

MP_TEST(models_stored_weights_of_a_truncated_file_fail) {
    check_corrupted(cut, true);
    check_corrupted(cut, false);
}

MP_TEST(models_stored_weights_of_a_changed_file_fail) {
    check_corrupted(overwrite, true);
    check_corrupted(overwrite, false);
}

/* The file is compared a last time when a part of the weights is packed. Another engine that finds all weights packed
 * asks only whether that comparison failed. */
MP_TEST(models_stored_weights_are_compared_before_the_last_is_packed) {
    enum { ROWS = 3 * MP_PANEL_N, COLUMNS = 64 };
    static float values[ROWS * COLUMNS], x[COLUMNS], y[ROWS];
    static _Alignas(64) uint8_t panels[sizeof values + MP_WMAT_SLACK];
    for (int changed = 0; changed < 2; changed++) {
        mp_error error;
        mp_weights *weights;
        mp_stored *stored;
        mp_stored_part *part;
        mp_tensor tensor;
        mp_wmat w;
        char path[512];
        mp_kernels_init();
        snprintf(path, sizeof path, "%s/compared.bin", mp_test_directory());
        mp_test_write_file(path, values, sizeof values);
        mp_spec *spec = mp_spec_create();
        const mp_tensor_entry entry = {.name = "t", .dtype = MP_F32, .ndim = 2, .shape = {ROWS, COLUMNS},
                                       .nbytes = sizeof values};
        MP_CHECK_OK(mp_spec_add_file(spec, path, &error), &error);
        MP_CHECK_OK(mp_spec_add_tensor(spec, &entry, &error), &error);
        MP_CHECK_OK(mp_weights_open(spec, &weights, &error), &error);
        MP_CHECK_OK(mp_weights_get(weights, "t", 2, (int64_t[]){ROWS, COLUMNS}, &tensor, &error), &error);
        mp_wmat_init(&w, MP_W_F32, ROWS, COLUMNS);
        w.data = panels;
        MP_CHECK_INT(mp_wmat_bytes(&w), sizeof values);
        MP_CHECK_OK(mp_stored_create(weights, 1, false, &stored, &error), &error);
        MP_CHECK_OK(mp_stored_add(stored, &w, &tensor, &part, &error), &error);
        stored->keep_ns = stored->keep_row_ns = UINT64_MAX / 4;
        mp_acts acts;
        mp_acts_init(&acts, MP_A_F32, 1, COLUMNS, NULL);
        mp_acts_fill(&acts, x, COLUMNS, 0, 1);
        mp_stored_begin(stored, 1);
        mp_stored_gemm(part, &w, &acts, 0, 2, NULL, y, ROWS, NULL);
        MP_CHECK(mp_stored_left(stored));
        if (changed)
            MP_CHECK(truncate(path, (off_t)sizeof values + 1) == 0);
        mp_stored_gemm(part, &w, &acts, 0, 3, NULL, y, ROWS, NULL);
        MP_CHECK(!mp_stored_left(stored) && mp_stored_corrupted(stored) == (changed == 1));
        mp_stored_destroy(stored);
        mp_weights_close(weights);
        mp_spec_unpin(spec);
    }
}

/* Once all weights are packed, the file is no longer read. */
MP_TEST(models_stored_weights_that_are_packed_need_no_file) {
    tiny_model tiny;
    load(&tiny, "0", 1, -1);
    stored_of(&tiny)->keep_ns = UINT64_MAX / 4;
    uint64_t first = run(&tiny, 1);
    MP_CHECK(!mp_stored_left(stored_of(&tiny)));
    cut(mp_spec_file(tiny.spec, 0));
    MP_CHECK(run(&tiny, 1) == first);
    tiny_unload(&tiny);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static mp_status make_call(mp_request **call, mp_error *error) {
    static const int32_t prompt[] = {3, 1, 4, 1, 5};
    mp_text_args args = {
        .n_prompt = 5,
        .prompt = prompt,
        .n_choices = 1,
        .sampling = {
            .temperature = 0, .top_p = 1, .repetition_penalty = 1, .max_tokens = 3, .logprobs = 2, .ignore_eos = true}};
    mp_text_request *made;
    MP_TRY(mp_text_request_create(&args, &made, error));
    *call = &made->base;
    return MP_OK;
}

static void compare_calls(const mp_request *first, const mp_request *second) {
    const mp_text_request *a = (const mp_text_request *)first, *b = (const mp_text_request *)second;
    MP_CHECK(memcmp(a->choices[0].tokens, b->choices[0].tokens, 3 * sizeof(mp_token_out)) == 0);
}

MP_TEST_SECONDS(models_stored_allocation_sweep, 120) {
    mp_error error;
    pack_on_use("0");
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    tiny_life life = {.spec = tiny_decoder_spec(types, TYPES, 77), .compute = MP_COMPUTE_AUTO,
                      .make = make_call, .compare = compare_calls};
    mp_test_alloc_sweep(tiny_live, &life);
    mp_spec_unpin(life.spec);
}

/* The scratch for unpacked panels fits the largest matrix, and SLACK more, in any order of the matrices. */
MP_TEST(models_stored_scratch_fits_the_largest_panel) {
    static const size_t panels[] = {640, 704, 64, 768};
    mp_stored_part parts[4] = {{0}}, *part;
    mp_error error;
    mp_stored *stored = mp_alloc(sizeof *stored + sizeof parts, MP_TAG_WEIGHTS);
    MP_CHECK(stored);
    memset(stored, 0, sizeof *stored + sizeof parts);
    stored->capacity = 4;
    size_t most = 0;
    for (int i = 0; i < 4; i++) {
        const mp_wmat w = {.panels = 1, .panel_bytes = panels[i]};
        const mp_tensor tensor = {.dtype = MP_Q8_0};
        most = panels[i] > most ? panels[i] : most;
        MP_CHECK_OK(mp_stored_add(stored, &w, &tensor, &part, &error), &error);
        MP_CHECK_INT(stored->scratch, most + MP_WMAT_SLACK);
        mp_free(part->state);
    }
    mp_free(stored);
}
