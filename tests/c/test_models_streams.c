/* Many streams: one pass over the weights serves all running requests, prompts are prefilled in the same passes, and a
 * request that arrives during a step joins the next step. The tests record each step of a decoder behind a registry. */
#include <stdatomic.h>

#include "base/sys.h"
#include "model_fixture.h"
#include "registry/registry.h"

enum { STREAMS = 8, STEPS = 4096, ANSWER = 80, HELD = 12 };

typedef struct step_note {
    int items;
    uint64_t passes, rows; /* passes over the weights and rows in this step */
    const mp_request *call[STREAMS + 1];
} step_note;

static struct {
    mp_loader inner;
    mp_model_ops model;
    mp_engine_ops engine;
    const mp_model_ops *model_ops;
    const mp_engine_ops *engine_ops;
    step_note note[STEPS];
    _Atomic int begun; /* number of started steps */
    _Atomic int go;    /* the first step that must wait: 0, then HELD, then none */
} seen;

static void watched_step(mp_engine *engine, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    int at = atomic_load(&seen.begun);
    MP_CHECK(at < STEPS && plan->count <= STREAMS + 1);
    step_note *note = &seen.note[at];
    *note = (step_note){.items = plan->count, .passes = engine->work.passes, .rows = engine->work.rows};
    for (int i = 0; i < plan->count; i++)
        note->call[i] = plan->items[i]->request;
    atomic_store(&seen.begun, at + 1);
    seen.engine_ops->step(engine, lease, plan, outcomes);
    note->passes = engine->work.passes - note->passes;
    note->rows = engine->work.rows - note->rows;
    while (at >= atomic_load(&seen.go))
        mp_sys_sleep_ns(100 * 1000);
}

static mp_status watched_engine(mp_model *model, mp_budget *budget, mp_engine **engine, mp_error *error) {
    mp_status status = seen.model_ops->engine(model, budget, engine, error);
    if (status != MP_OK)
        return status;
    seen.engine_ops = (*engine)->ops;
    seen.engine = *seen.engine_ops;
    seen.engine.step = watched_step;
    (*engine)->ops = &seen.engine;
    return MP_OK;
}

static mp_status watched_load(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_model **model,
                              mp_error *error) {
    mp_status status = seen.inner.ops->load(self, lease, budget, progress, model, error);
    if (status != MP_OK)
        return status;
    seen.model_ops = (*model)->ops;
    seen.model = *seen.model_ops;
    seen.model.engine = watched_engine;
    (*model)->ops = &seen.model;
    return MP_OK;
}

static mp_ticket *chat(mp_registry *registry, int number, int length) {
    mp_test_random random = {(uint64_t)number};
    int32_t prompt[512];
    mp_error error;
    for (int i = 0; i < length; i++)
        prompt[i] = (int32_t)(mp_test_random_u64(&random) % TINY_VOCAB);
    mp_text_args args = {.n_prompt = length, .prompt = prompt, .n_choices = 1};
    args.sampling = (mp_sampling){.temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 4,
                                  .max_tokens = ANSWER, .logprobs = -1, .ignore_eos = true};
    mp_text_request *call;
    MP_CHECK_OK(mp_text_request_create(&args, &call, &error), &error);
    mp_submit_options options = {.priority = 2};
    mp_ticket *ticket;
    MP_CHECK_OK(mp_registry_submit(registry, "a", &call->base, &options, &ticket, &error), &error);
    return ticket;
}

static bool takes_part(const step_note *note, const mp_request *call) {
    for (int i = 0; i < note->items; i++)
        if (note->call[i] == call)
            return true;
    return false;
}

static void until_begun(int steps) {
    for (int ms = 0; atomic_load(&seen.begun) < steps; ms++) {
        MP_CHECK(ms < 30 * 1000);
        mp_sys_sleep_ns(1000 * 1000);
    }
}

MP_TEST_SECONDS(models_streams_share_passes_and_join_at_once, 60) {
    static const mp_dtype types[] = {MP_Q8_0};
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    mp_spec *spec = tiny_decoder_spec(types, 1, 61);
    mp_loader loader;
    MP_CHECK_OK(mp_model_loader(spec, MP_COMPUTE_AUTO, &loader, &error), &error);
    seen.inner = loader;
    mp_loader_ops ops = *loader.ops;
    ops.load = watched_load;
    loader.ops = &ops;
    mp_registry *registry;
    mp_registry_config config = {.threads = 2, .memory_limit = 1000 * 1000 * 1000, .spin_ns = 1, .max_workers = 1};
    MP_CHECK_OK(mp_registry_create(&config, &registry, &error), &error);
    MP_CHECK_OK(mp_registry_add(registry, "a", &loader, MP_ADD_NEW, &error), &error);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, MP_FOREVER, &error), &error);

    mp_ticket *tickets[STREAMS + 1];
    for (int i = 0; i < STREAMS; i++) /* hold the first step until all requests have arrived */
        tickets[i] = chat(registry, i, 10 + 11 * i);
    atomic_store(&seen.go, HELD);
    until_begun(HELD + 1);
    tickets[STREAMS] = chat(registry, STREAMS, 150);
    const mp_request *late = mp_ticket_request(tickets[STREAMS]);
    atomic_store(&seen.go, STEPS);

    uint64_t tokens = 0;
    for (int i = 0; i <= STREAMS; i++) {
        MP_CHECK(mp_ticket_wait(tickets[i], UINT64_MAX - 1, mp_sys_now_ns() + 30ull * 1000 * 1000 * 1000, NULL));
        MP_CHECK_STATUS(mp_ticket_status(tickets[i], &error), MP_OK, &error);
        const mp_text_request *call = (const mp_text_request *)mp_ticket_request(tickets[i]);
        tokens += call->choices[0].token_count;
    }
    MP_CHECK_INT(tokens, (STREAMS + 1) * ANSWER);

    /* a request that arrives during a step is in the next step, together with all other requests, and its prompt is
     * prefilled in the same pass */
    const step_note *held = &seen.note[HELD], *next = held + 1;
    MP_CHECK(!takes_part(held, late) && takes_part(next, late));
    MP_CHECK_INT(held->items, STREAMS);
    MP_CHECK_INT(next->items, STREAMS + 1);
    MP_CHECK_INT(next->passes, 1);
    MP_CHECK(next->rows >= STREAMS + 16);

    /* every step makes one pass, whatever its items, and has at least one item */
    int steps = atomic_load(&seen.begun), shared = 0;
    uint64_t rows = 0;
    for (int s = 0; s < steps; s++) {
        MP_CHECK_INT(seen.note[s].passes, 1);
        MP_CHECK(seen.note[s].rows >= (uint64_t)seen.note[s].items);
        rows += seen.note[s].rows;
        shared += seen.note[s].items == STREAMS || seen.note[s].items == STREAMS + 1;
    }
    MP_CHECK(steps <= 2 * ANSWER && shared >= ANSWER / 2);
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.passes, steps);
    MP_CHECK_INT(stats.steps, steps);
    MP_CHECK_INT(stats.rows, rows);
    for (int i = 0; i <= STREAMS; i++)
        mp_ticket_release(tickets[i]);
    mp_registry_destroy(registry);
    mp_spec_unpin(spec);
}
