/* Packed copies of experts: the bits are the same whichever panels are kept; the copies are charged and given back. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/options.h"
#include "files/file_map.h"
#include "model_fixture.h"
#include "models/decoder/decoder.h"

static const mp_dtype types[] = {MP_Q8_0, MP_Q4_K, MP_Q5_K, MP_Q6_K, MP_Q4_0};
enum { TYPES = sizeof types / sizeof *types, JOBS = 4, ANSWER = 6, EXPERTS = 6, MUCH = 1000000 };

static const tiny_kind kinds[] = {
    {.arch = "qwen3moe", .experts = EXPERTS},
    {.arch = "gpt_oss", .window = 80, .experts = EXPERTS, .biased = true},
};

static mp_weight_store *store_of(const tiny_model *tiny) { return &((mp_decoder *)tiny->model)->store; }

static void load(tiny_model *tiny, const tiny_kind *kind, int threads) {
    mp_error error;
    setenv("MPOOL_SPECULATION", "0", 1); /* draft tokens would give experts more rows, depending on time */
    MP_CHECK_OK(mp_options_init(&error), &error);
    tiny_load(tiny, tiny_decoder_spec_as(kind, types, TYPES, 5, -1), MP_COMPUTE_AUTO, threads);
    MP_CHECK(store_of(tiny)->experts != NULL);
    store_of(tiny)->pack_share = 0;
}

static uint64_t run(tiny_model *tiny, int index) {
    static const int lengths[JOBS] = {1, 70, 5, 33}; /* experts get one row, many rows, and few rows */
    mp_test_random random = {100 + (uint64_t)index};
    int32_t prompt[128];
    for (int i = 0; i < lengths[index]; i++)
        prompt[i] = (int32_t)(mp_test_random_u64(&random) % (TINY_VOCAB - 1));
    mp_text_args args = {.n_prompt = lengths[index], .prompt = prompt, .n_choices = 1, .want_prompt_logits = true,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = ANSWER, .logprobs = 4,
                                      .ignore_eos = true}};
    tiny_job job;
    tiny_job_make(tiny, &job, &args, 0);
    tiny_job_admit(tiny, &job);
    tiny_job_finish(tiny, &job);
    uint64_t hash = tiny_job_hash(&job);
    mp_request_destroy(&job.call->base);
    return hash;
}

static void run_all(tiny_model *tiny, uint64_t *hashes) {
    for (int i = 0; i < JOBS; i++)
        hashes[i] = run(tiny, i);
}

static int panels_in(const tiny_model *tiny, mp_panel_state state) {
    int found = 0;
    for (mp_panels *matrix = store_of(tiny)->experts; matrix; matrix = matrix->next)
        for (int i = 0; i < matrix->count * matrix->panels; i++)
            found += atomic_load(&matrix->state[i]) == state;
    return found;
}

/* The bytes of the panels that count as kept. */
static uint64_t kept_bytes(const tiny_model *tiny) {
    uint64_t bytes = 0;
    for (mp_panels *matrix = store_of(tiny)->experts; matrix; matrix = matrix->next)
        for (int i = 0; i < matrix->count * matrix->panels; i++)
            bytes += atomic_load(&matrix->state[i]) == MP_PANEL_PACKED ? matrix->panel_bytes : 0;
    return bytes;
}

/* Runs the jobs on a model that keeps nothing. */
static void expect(const tiny_kind *kind, uint64_t *expected) {
    tiny_model tiny;
    load(&tiny, kind, 1);
    mp_weight_store_drop(store_of(&tiny));
    tiny.budget.limit = UINT64_MAX - 1; /* a limit whose first two thirds are in use */
    const uint64_t fill = UINT64_MAX / 3 * 2 - atomic_load(&tiny.budget.used);
    MP_CHECK(mp_budget_take(&tiny.budget, fill));
    run_all(&tiny, expected);
    MP_CHECK_INT(panels_in(&tiny, MP_PANEL_PACKED), 0);
    mp_budget_give(&tiny.budget, fill);
    tiny_unload(&tiny);
}

MP_TEST_SECONDS(models_packed_experts_give_the_same_bits, 120) {
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        uint64_t expected[JOBS], got[JOBS];
        expect(&kinds[k], expected);
        for (int threads = 1; threads <= 3; threads++) {
            tiny_model tiny;
            load(&tiny, &kinds[k], threads);
            MP_CHECK(run(&tiny, 0) == expected[0]); /* packs nothing for single rows: pack_share is 0 */
            run_all(&tiny, got);
            MP_CHECK(memcmp(got, expected, sizeof got) == 0);
            const int some = panels_in(&tiny, MP_PANEL_PACKED);
            MP_CHECK(some > 0 && panels_in(&tiny, MP_PANEL_MAPPED) > 0);
            run_all(&tiny, got); /* reads kept panels */
            MP_CHECK(memcmp(got, expected, sizeof got) == 0);
            MP_CHECK_INT(panels_in(&tiny, MP_PANEL_PACKED), some);
            MP_CHECK_INT(panels_in(&tiny, MP_PANEL_PACKING), 0);
            const uint64_t kept = kept_bytes(&tiny);
            MP_CHECK_INT(mp_weight_store_drop(store_of(&tiny)), kept);
            run_all(&tiny, got);
            MP_CHECK(memcmp(got, expected, sizeof got) == 0);
            tiny_unload(&tiny);
        }
    }
}

/* Between requests, an engine packs the experts whose stored rows were multiplied, and no others, for as long as there
 * is time. */
MP_TEST(models_packed_experts_are_packed_between_requests) {
    tiny_model tiny;
    load(&tiny, &kinds[0], 1);
    if (!mp_stored_can(MP_Q4_K, MP_A_Q8, 1)) {
        tiny_unload(&tiny);
        MP_SKIP("all panels are packed before use on this CPU");
    }
    mp_weight_store *store = store_of(&tiny);
    const mp_engine_ops *ops = tiny.engine->ops;
    const uint64_t expected = run(&tiny, 0);
    MP_CHECK(!ops->improve(tiny.engine, NULL)); /* pack_share is 0: there is no time */
    MP_CHECK_INT(panels_in(&tiny, MP_PANEL_PACKED), 0);
    int pending = 0, panels = 0, stored = panels_in(&tiny, MP_PANEL_MAPPED);
    for (mp_panels *matrix = store->experts; matrix; matrix = matrix->next)
        for (int e = 0; e < matrix->count; e++)
            if (atomic_load(&matrix->pending[e])) {
                pending++;
                panels += matrix->panels;
            }
    MP_CHECK(pending > 0 && panels < stored);
    MP_CHECK_INT(atomic_load(&store->pending), pending);
    store->pack_share = 1;
    mp_weight_store_begin(store, 1);
    mp_weight_store_note_stored(store, 1000); /* counts in full, also if passes may spend less */
    mp_weight_store_end(store, 0);
    MP_CHECK_INT(atomic_load(&store->idle_time.left_ns), 1000);
    MP_CHECK(ops->improve(tiny.engine, NULL));
    for (int i = 0; i < 1000 && ops->improve(tiny.engine, &tiny.lease); i++) {
    }
    MP_CHECK(atomic_load(&store->idle_time.left_ns) <= 0); /* one matrix takes longer than 1 us */
    MP_CHECK(atomic_load(&store->pending) >= pending - 1); /* none is done if a slice is too short for it */
    mp_pack_budget_set(&store->idle_time, UINT64_C(1) << 40);
    int slices = 1;
    while (slices < 1000 && ops->improve(tiny.engine, &tiny.lease))
        slices++;
    MP_CHECK(slices < 1000 && !ops->improve(tiny.engine, NULL));
    MP_CHECK_INT(atomic_load(&store->pending), 0);
    MP_CHECK_INT(panels_in(&tiny, MP_PANEL_PACKED), panels);
    MP_CHECK_INT(panels_in(&tiny, MP_PANEL_PACKING), 0);
    MP_CHECK_INT(tiny.budget.used, tiny.model->ops->bytes(tiny.model) + tiny.engine->ops->bytes(tiny.engine));
    MP_CHECK(run(&tiny, 0) == expected);
    MP_CHECK_INT(panels_in(&tiny, MP_PANEL_PACKED), panels); /* the same experts: none is left */

    store->pack_share = 0;
    run(&tiny, 2);
    MP_CHECK(mp_weight_store_has_pending(store));
    mp_weight_store_drop(store); /* memory was needed: only later passes give time again */
    MP_CHECK(!mp_weight_store_has_pending(store) && atomic_load(&store->pending) == 0);
    MP_CHECK(atomic_load(&store->idle_time.left_ns) == 0);
    MP_CHECK(run(&tiny, 0) == expected);
    mp_pack_budget_set(&store->idle_time, UINT64_C(1) << 40);
    tiny.budget.limit = tiny.budget.used / 4 * 5; /* room for scratch, none for copies */
    MP_CHECK(mp_weight_store_has_pending(store));
    MP_CHECK(!ops->improve(tiny.engine, &tiny.lease) && !mp_weight_store_has_pending(store));
    MP_CHECK_INT(panels_in(&tiny, MP_PANEL_PACKED), 0);
    tiny_unload(&tiny);
}

/* Copies are charged to the budget and counted as weights; a trim gives both back. */
MP_TEST(models_packed_experts_are_charged) {
    tiny_model tiny;
    load(&tiny, &kinds[0], 1);
    const uint64_t model = tiny.model->ops->bytes(tiny.model), weights = mp_alloc_bytes(MP_TAG_WEIGHTS);
    run(&tiny, 1);
    const uint64_t kept = kept_bytes(&tiny);
    MP_CHECK(kept > 0);
    MP_CHECK_INT(tiny.model->ops->bytes(tiny.model), model + kept);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_WEIGHTS), weights + kept);
    MP_CHECK_INT(tiny.budget.used, model + kept + tiny.engine->ops->bytes(tiny.engine));
    mp_error error; /* the end of one engine frees nothing that other engines use */
    mp_engine *second;
    MP_CHECK_OK(tiny.model->ops->engine(tiny.model, &tiny.budget, &second, &error), &error);
    second->ops->destroy(second);
    MP_CHECK_INT(kept_bytes(&tiny), kept);
    MP_CHECK(tiny_trim(&tiny) >= kept);
    MP_CHECK_INT(tiny.model->ops->bytes(tiny.model), model);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_WEIGHTS), weights);
    MP_CHECK_INT(tiny.budget.used, model + tiny.engine->ops->bytes(tiny.engine));
    run(&tiny, 1);
    MP_CHECK_INT(kept_bytes(&tiny), kept);
    tiny_unload(&tiny); /* checks that nothing stays charged */
}

/* ---- several engines --------------------------------------------------------------------------------------------- */

enum { ENGINES = 3, ROUNDS = 4 };

typedef struct parallel_run {
    tiny_model tiny;
    uint64_t hashes[ROUNDS][JOBS];
} parallel_run;

/* A forked child continues with the panels that the parent has kept. A pass or a packing of another thread of the
 * parent does not exist there. */
MP_TEST_SECONDS(models_packed_experts_after_a_fork, 60) {
    tiny_model tiny;
    load(&tiny, &kinds[0], 1);
    const uint64_t expected = run(&tiny, 1);
    mp_weight_store *store = store_of(&tiny);
    mp_panels *matrix = store->experts;
    mp_weight_store_begin(store, 100);
    atomic_store(&matrix->state[0], MP_PANEL_PACKING);
    pid_t child = fork();
    if (child == 0) {
        mp_error error;
        bool same = mp_team_create(0, &tiny.team, &error) == MP_OK && atomic_load(&matrix->state[0]) == MP_PANEL_MAPPED;
        mp_team_lease(tiny.team, 1, &tiny.lease);
        same &= run(&tiny, 1) == expected && mp_weight_store_drop(store) > 0 && run(&tiny, 1) == expected;
        _exit(same ? 0 : 1);
    }
    int status;
    MP_CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    MP_CHECK_INT(WEXITSTATUS(status), 0);
    atomic_store(&matrix->state[0], MP_PANEL_MAPPED);
    mp_weight_store_end(store, 0);
    MP_CHECK(run(&tiny, 1) == expected);
    tiny_unload(&tiny);
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

/* A pass that packs panels of a changed file fails, and so do later passes, even if the file's times are set back. */
MP_TEST(models_packed_experts_of_a_changed_file_fail) {
    tiny_model tiny;
    mp_file_map_init();
    load(&tiny, &kinds[0], 1);
    const char *path = mp_spec_file(tiny.spec, 0);
    MP_CHECK(tiny.model->ops->healthy(tiny.model));
    mp_sys_sleep_ns(20 * 1000 * 1000); /* longer than the resolution of file times */
    FILE *file = fopen(path, "r+b");
    MP_CHECK(file && fseek(file, 100000, SEEK_SET) == 0 && fwrite("changed", 1, 7, file) == 7 && fclose(file) == 0);
    int32_t prompt[40] = {0};
    mp_text_args args = {.n_prompt = 40, .prompt = prompt, .n_choices = 1,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 2, .logprobs = -1}};
    for (int attempt = 0; attempt < 2; attempt++) {
        tiny_job job;
        tiny_job_make(&tiny, &job, &args, 0);
        tiny_job_admit(&tiny, &job);
        MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), MP_OUTCOME_FAILED);
        MP_CHECK_INT(job.item.error.code, MP_INTEGRITY);
        tiny.engine->ops->retire(tiny.engine, &job.item);
        mp_request_destroy(&job.call->base);
        MP_CHECK(!tiny.model->ops->healthy(tiny.model));
    }
    tiny_unload(&tiny);
}
