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

static mp_weight_store *store_of(const tiny_model *tiny) { return &((mp_decoder *)tiny->model)->store; }

static void load(tiny_model *tiny, const char *mb, int threads, int32_t infinite) {
    pack_on_use(mb);
    tiny_load(tiny, tiny_decoder_spec_with(types, TYPES, 5, infinite), MP_COMPUTE_AUTO, threads);
    tiny_wait_until_fetched(store_of(tiny)); /* passes are not measured before */
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
    MP_CHECK(!store_of(&tiny)->linears);
    charged = tiny.model->ops->bytes(tiny.model);
    for (int i = 0; i < JOBS; i++)
        expected[i] = run(&tiny, i);
    tiny_unload(&tiny);
    for (size_t k = 0; k < sizeof keeps / sizeof *keeps; k++)
        for (int threads = 1; threads <= 3; threads++) {
            if (MP_SANITIZED && threads != 1 + (int)k)
                continue;
            load(&tiny, "0", threads, infinite);
            mp_weight_store *store = store_of(&tiny);
            MP_CHECK(mp_weight_store_unpacked(store));
            MP_CHECK_INT(tiny.model->ops->bytes(tiny.model), charged);
            MP_CHECK_INT(tiny.budget.used, charged);
            store->keep_ns = keeps[k];
            store->keep_row_ns = 0;
            for (int i = 0; i < JOBS; i++)
                if (run(&tiny, i) != expected[i])
                    MP_FAIL("job %d differs with %d threads, keep_ns %d", i, threads, (int)k);
            MP_CHECK(k == 1 || mp_weight_store_unpacked(store) == (k == 0));
            store->keep_ns = UINT64_MAX / 4;
            for (int i = 0; i < JOBS; i++)
                MP_CHECK(run(&tiny, i) == expected[i]);
            MP_CHECK(!mp_weight_store_unpacked(store));
            MP_CHECK_INT(tiny.model->ops->bytes(tiny.model), charged);
            tiny_unload(&tiny);
        }
}

MP_TEST_SECONDS(models_stored_weights_give_the_same_bits, 120) { check_bits(-1); }

MP_TEST_SECONDS(models_stored_weights_give_the_same_bits_with_an_output_matrix, 120) { check_bits(UNTIED); }

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
    store_of(&tiny)->keep_ns = 30000;
    store_of(&tiny)->keep_row_ns = 0;
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

/* A forked child continues with the weights that the parent has packed so far; the parent is unaffected. */
MP_TEST_SECONDS(models_stored_weights_after_a_fork, 60) {
    tiny_model tiny;
    load(&tiny, "0", 1, -1);
    store_of(&tiny)->keep_ns = 15000;
    store_of(&tiny)->keep_row_ns = 0;
    uint64_t expected = run(&tiny, 1);
    pid_t child = fork();
    if (child == 0) {
        mp_error error;
        store_of(&tiny)->keep_ns = UINT64_MAX / 4;
        bool same = mp_team_create(0, &tiny.team, &error) == MP_OK;
        mp_team_lease(tiny.team, 1, &tiny.lease);
        same &= run(&tiny, 1) == expected && !mp_weight_store_unpacked(store_of(&tiny));
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
    store_of(&tiny)->keep_ns = 0;
    store_of(&tiny)->keep_row_ns = 0;
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

/* Once all weights are packed, the file is no longer read. */
MP_TEST(models_stored_weights_that_are_packed_need_no_file) {
    tiny_model tiny;
    load(&tiny, "0", 1, -1);
    store_of(&tiny)->keep_ns = UINT64_MAX / 4;
    uint64_t first = run(&tiny, 1);
    MP_CHECK(!mp_weight_store_unpacked(store_of(&tiny)));
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
