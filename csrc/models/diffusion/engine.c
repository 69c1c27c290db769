/* engine.c: the step interface over a pipeline. A step computes consecutive blocks of one request: of a text encoder,
 * of the transformer in one denoising step, or of the decoder. Requests run one after the other, so that each stage is
 * loaded at most once per request. */
#include <stdatomic.h>

#include "models/diffusion/schedule.h"
#include "models/threads.h"

static void free_state(mp_diffusion_engine *engine, mp_item *item) {
    mp_diff_state *state = item->state;
    if (engine->current == item)
        engine->current = NULL;
    if (!state)
        return;
    mp_diff_let_go(engine, &state->encoding);
    mp_diff_let_go(engine, &state->denoising);
    mp_diff_let_go(engine, &state->decoding);
    for (int t = 0; t < MP_T2I_TEXTS; t++)
        mp_diff_texts_release(&engine->cache, state->texts[t]);
    mp_free(state);
    item->state = NULL;
}

static mp_status engine_admit(mp_engine *base, mp_item *item, mp_error *error) {
    mp_diffusion_engine *engine = (mp_diffusion_engine *)base;
    const mp_image_generation_request *request = mp_diff_request(item);
    mp_diff_state *state = mp_alloc_zeroed(sizeof *state, MP_TAG_SCRATCH);
    if (!state)
        return mp_fail_memory(error, sizeof *state, "the state of an image request");
    item->state = state;
    state->at = mp_diff_place(request, item->cursor);
    if (state->at.phase == MP_DIFF_DECODE) /* decoding needs no texts */
        return MP_OK;
    for (int t = 0; t < request->n_texts; t++) {
        mp_status status = mp_diff_texts_get(&engine->cache, item, t, &state->texts[t], &state->known[t], error);
        if (status != MP_OK) {
            free_state(engine, item);
            return status;
        }
    }
    return MP_OK;
}

/* Continue the current request unless a more urgent one waits, because loading stages takes long. */
static void engine_plan(mp_engine *base, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan) {
    mp_diffusion_engine *engine = (mp_diffusion_engine *)base;
    mp_item *chosen = items[0];
    for (int i = 0; i < n; i++)
        if (items[i] == engine->current && items[i]->priority <= chosen->priority)
            chosen = items[i];
    engine->current = chosen;
    engine->budget_ns = budget_ns;
    plan->count = 1;
    plan->items[0] = chosen;
    plan->amount[0] = 1;
    plan->barrier_bound = engine->model->hidden < 1024;
    plan->threads = mp_threads_worth(&engine->model->base.facts, 1024, 64);
    const uint64_t left = chosen->total > chosen->cursor ? chosen->total - chosen->cursor : 1;
    const uint64_t cost = chosen->cost_ns / chosen->total * left;
    plan->cost_ns = cost < budget_ns ? cost + 1 : budget_ns;
}

static void engine_step(mp_engine *base, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    mp_diffusion_engine *engine = (mp_diffusion_engine *)base;
    mp_item *item = plan->items[0];
    const uint64_t start = mp_sys_now_ns();
    mp_error error;
    mp_error_clear(&error);
    outcomes[0] = MP_OUTCOME_MORE;
    do {
        bool done = true;
        mp_status status = mp_diff_advance(engine, item, lease, &done, &error);
        if (status == MP_MEMORY_EXHAUSTED) {
            item->error = error;
            outcomes[0] = MP_OUTCOME_WAIT_MEMORY;
            return;
        }
        if (status != MP_OK) {
            item->error = error;
            outcomes[0] = MP_OUTCOME_FAILED;
            return;
        }
        if (!done || atomic_load_explicit(&item->cancelled, memory_order_relaxed))
            return;
        if (((mp_diff_state *)item->state)->at.phase == MP_DIFF_FINISHED) {
            outcomes[0] = MP_OUTCOME_DONE;
            engine->current = NULL;
            return;
        }
    } while (mp_sys_now_ns() - start < engine->budget_ns);
}

static void engine_retire(mp_engine *base, mp_item *item) { free_state((mp_diffusion_engine *)base, item); }

static uint64_t diffusion_trim(mp_diffusion_engine *engine) {
    uint64_t before = engine->charged + engine->weights + engine->cache.charged;
    mp_diff_drop_others(engine, -1);
    mp_diff_cache_trim(&engine->cache);
    mp_engine_release(&engine->arena, engine->budget, &engine->charged);
    return before - engine->weights - engine->cache.charged;
}

/* The registry calls engine_trim between steps, when no weights are in use. */
static uint64_t engine_trim(mp_engine *base) { return diffusion_trim((mp_diffusion_engine *)base); }

static void engine_destroy(mp_engine *base) {
    mp_diffusion_engine *engine = (mp_diffusion_engine *)base;
    diffusion_trim(engine);
    for (int s = 0; s < MP_DIFF_STAGES; s++)
        mp_free(engine->blocks[s]);
    mp_free(engine);
}

static uint64_t engine_bytes(const mp_engine *base) {
    const mp_diffusion_engine *engine = (const mp_diffusion_engine *)base;
    return engine->charged + engine->weights + engine->items + engine->cache.charged;
}

static const mp_engine_ops diff_engine_ops = {
    .admit = engine_admit,
    .plan = engine_plan,
    .step = engine_step,
    .preempt = engine_retire,
    .retire = engine_retire,
    .trim = engine_trim,
    .destroy = engine_destroy,
    .bytes = engine_bytes,
};

mp_status mp_diff_engine(mp_model *base, mp_budget *budget, mp_engine **out, mp_error *error) {
    mp_diffusion *model = (mp_diffusion *)base;
    mp_diffusion_engine *engine = mp_alloc_zeroed(sizeof *engine, MP_TAG_SCRATCH);
    if (!engine)
        return mp_fail_memory(error, sizeof *engine, "an engine");
    engine->base.ops = &diff_engine_ops;
    engine->model = model;
    engine->budget = budget;
    mp_diff_cache_init(&engine->cache, budget);
    for (int s = 0; s < MP_DIFF_STAGES; s++) {
        const size_t count = (size_t)model->block_count[s];
        if (count && !(engine->blocks[s] = mp_alloc_array(count, sizeof *engine->blocks[s], MP_TAG_SCRATCH))) {
            engine_destroy(&engine->base);
            return mp_fail_memory(error, count * sizeof *engine->blocks[s], "an engine");
        }
    }
    *out = &engine->base;
    return MP_OK;
}
