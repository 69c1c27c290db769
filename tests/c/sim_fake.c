/* sim_fake.c: fake models with virtual costs. See sim_fake.h. */
#include "sim_fake.h"

#ifdef MP_SIM

#include <stddef.h>
#include <string.h>

#include "registry/worker.h"
#include "sim_states.h"

static const uint64_t MS = 1000 * 1000;
/* A request may be admitted this long after its deadline: the registry may have checked just before the deadline. */
static const uint64_t LATE_NS = 2 * 1000 * 1000;

static const uint64_t UNWANTED_NS = 100ull * 1000 * 1000;

sim_fakes fakes;

typedef struct fake_engine {
    mp_engine base;
    sim_model *model;
    mp_budget *budget;
    int used, admitted, inside;
    uint64_t caches;
    mp_budget own; /* memory of `parts`: enough for one request, not for all */
    mp_prefix_cache parts; /* if model->states */
    bool gone, parked; /* parked: plan() found nothing to do */
    mp_error lost;
    mp_item *offered[MP_PLAN_MAX]; /* items passed to the current plan() or admit() */
    int offers;
} fake_engine;

typedef struct fake_model {
    mp_model base;
    sim_model *model;
    mp_budget *budget;
    int engines;
} fake_model;

typedef struct fake_state { /* state of an item from admit to retire, also while it is preempted */
    int memory;
    sim_sequence *sequence; /* NULL: not begun yet */
} fake_state;

static void free_state(fake_state *state) {
    sim_sequence_destroy(state->sequence);
    mp_free(state);
}

/* --- engine --- */

static void enter(fake_engine *engine) {
    SIM_CHECK(engine->inside == 0 && "one thread at a time uses an engine");
    engine->inside++;
    sim_yield();
}

static void leave(fake_engine *engine) { engine->inside--; }

/* Sometimes cancels the request at the end of a call of the engine, as another thread might. The registry looks at
 * cancellations before and after such calls, and must not lose a request in between. */
static void maybe_cancel(mp_item *item) {
    sim_call *call = (sim_call *)item->request;
    if (!fakes.cancels || sim_below(100) >= (uint64_t)fakes.cancels)
        return;
    call->cancelled_inside = true;
    if (!call->unwanted_ns)
        call->unwanted_ns = sim_now();
    call->taken_back |= mp_ticket_cancel(item->ticket);
}

/* --- engines that are processes --- */

static void lose(fake_engine *engine, bool external_kill) {
    engine->gone = true;
    engine->base.external_kill = external_kill;
    mp_fail(&engine->lost, MP_RECV, "the process is gone");
}

/* Returns true if the engine is lost, before or during this call. */
static bool is_gone(fake_engine *engine) {
    sim_model *model = engine->model;
    if (!engine->gone && model->kills > 0 && sim_below(100) < (uint64_t)model->loses) {
        model->kills--;
        lose(engine, true);
    }
    return engine->gone;
}

static const mp_error *engine_lost(mp_engine *base) {
    fake_engine *engine = (fake_engine *)base;
    enter(engine);
    bool gone = engine->gone || (sim_below(4) == 0 && is_gone(engine));
    for (int i = 0; gone && i < engine->offers; i++) {
        sim_call *call = (sim_call *)engine->offered[i]->request;
        call->lost_worker++;
        call->killed_worker |= engine->base.external_kill;
    }
    engine->offers = 0;
    leave(engine);
    return gone ? &engine->lost : NULL;
}

static bool take(fake_engine *engine, int memory) {
    if (engine->model->memory && engine->used + memory > engine->model->memory)
        return false;
    engine->used += memory;
    return true;
}

static void abandon(mp_item *item) {
    sim_call *call = (sim_call *)item->request;
    SIM_CHECK(call->saved == 1 && !call->admitted);
    call->saved = 0;
    free_state(item->state);
    item->state = NULL;
}

static mp_status engine_admit(mp_engine *base, mp_item *item, mp_error *error) {
    fake_engine *engine = (fake_engine *)base;
    sim_call *call = (sim_call *)item->request;
    enter(engine);
    mp_status status = MP_OK;
    SIM_CHECK(!call->admitted && !call->finished && call->failed < 2 + call->spared); /* one retry, two if spared */
    SIM_CHECK(!call->numeric || !call->failed);                        /* no retry after NaN */
    SIM_CHECK(!call->failed_late);                                     /* no retry after the caller saw a unit */
    SIM_CHECK(call->lost_worker < 2 + call->killed_worker);
    SIM_CHECK(call->base.resumable ? call->done == call->shown : item->cursor == call->done);
    SIM_CHECK(item->deadline_ns == call->deadline_ns);
    SIM_CHECK(call->base.output_bytes == call->outputs);
    if (fakes.no_late && item->deadline_ns && sim_now() > item->deadline_ns + LATE_NS &&
        sim_now() > fakes.jumped_ns + LATE_NS && sim_now() > item->deadline_ns + fakes.paused_ns + LATE_NS)
        sim_fail("a request starts %.3f ms after its deadline", (double)(sim_now() - item->deadline_ns) * 1e-6);
    if (is_gone(engine)) {
        *error = engine->lost;
        status = error->code;
        call->moved = true;
        engine->offered[engine->offers++] = item;
    } else if (call->refused) {
        status = mp_fail(error, MP_UNSUPPORTED, "refused");
        engine->offered[engine->offers++] = item;
    } else if (!take(engine, call->memory)) {
        status = mp_fail(error, MP_MEMORY_EXHAUSTED, "no memory for %d units", call->memory);
    } else {
        fake_state *state = item->state;
        SIM_CHECK((state != NULL) == (call->saved == 1));
        if (!state)
            state = mp_alloc_zeroed(sizeof(*state), MP_TAG_KV);
        if (state) {
            state->memory = call->memory;
            item->state = state;
            item->abandon = NULL;
            call->saved = 0;
            call->admitted = 1;
            fakes.again += call->moved;
            call->moved = false;
            call->parked = &engine->parked;
            engine->parked = false;
            engine->admitted++;
        } else {
            engine->used -= call->memory;
            status = mp_fail_memory(error, sizeof(*state), "a fake");
        }
    }
    leave(engine);
    maybe_cancel(item);
    return status;
}

static void forget(fake_engine *engine, mp_item *item, bool keep) {
    fake_state *state = item->state;
    sim_call *call = (sim_call *)item->request;
    if (!state || !call->admitted)
        return;
    engine->used -= state->memory;
    engine->admitted--;
    if (state->sequence)
        mp_cached_drop(&state->sequence->cached, &engine->parts);
    SIM_CHECK(engine->used >= 0 && engine->admitted >= 0);
    call->admitted = 0;
    call->waits = engine->parked = false;
    call->moved |= engine->gone;
    if (keep) {
        call->saved = 1;
        item->abandon = abandon;
        return;
    }
    free_state(state);
    item->state = NULL;
    if (!call->finished)
        call->done = 0;
}

/* A preempted request keeps its progress, also if its state is freed. */
static void give_way(fake_engine *engine, mp_item *item) {
    sim_call *call = (sim_call *)item->request;
    uint32_t done = call->done;
    bool moves = engine->gone || call->moved;
    forget(engine, item, call->keeps_state);
    call->done = done;
    call->moved = moves;
    engine->model->preempted++;
    fakes.given_way += !moves;
}

static void engine_plan(mp_engine *base, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan) {
    fake_engine *engine = (fake_engine *)base;
    sim_model *model = engine->model;
    enter(engine);
    SIM_CHECK(n > 0 && n <= engine->admitted && budget_ns > 0);
    SIM_CHECK(budget_ns == SIM_BUDGET_NS || budget_ns == 4 * SIM_BUDGET_NS);
    SIM_CHECK(!fakes.alone || budget_ns == 4 * SIM_BUDGET_NS); /* a request that is alone gets longer steps */
    engine->offers = 0;
    memcpy(engine->offered, items, (size_t)n * sizeof(*items));
    engine->offers = n;
    if (is_gone(engine)) {
        plan->items[plan->count] = items[0];
        plan->amount[plan->count++] = 1;
        plan->threads = 1;
        leave(engine);
        return;
    }
    for (int i = 0; i < n && (model->plan_items == 0 || plan->count < model->plan_items); i++) {
        sim_call *call = (sim_call *)items[i]->request;
        SIM_CHECK(call->admitted && !call->finished && call->failed < 2 + call->spared);
        if (call->waits && call->masks == call->done) {
            plan->masks = true;
            continue;
        }
        uint32_t left = call->masked ? 1 : call->units - call->done;
        plan->items[plan->count] = items[i];
        plan->amount[plan->count++] = model->step_units && model->step_units < left ? model->step_units : left;
    }
    plan->threads = model->threads;
    engine->parked = plan->count == 0;
    leave(engine);
    for (int i = 0; i < n; i++)
        maybe_cancel(items[i]);
}

/* Computes the rows of a request up to its first `units` units. */
static bool compute_parts(fake_engine *engine, mp_item *item, uint32_t units) {
    fake_state *state = item->state;
    const sim_call *call = (const sim_call *)item->request;
    if (!state->sequence)
        state->sequence = sim_sequence_create(&engine->parts, item, call->units);
    return state->sequence && sim_sequence_compute(&engine->parts, state->sequence, units);
}

/* Call when a worker begins to compute. An abandoned worker counts no more: its CPUs are free for others, although it
 * may compute until its next poll. */
static void begin_step(sim_step *step, mp_lease *lease) {
    int threads = 0;
    *step = (sim_step){fakes.steps, (mp_worker *)((char *)lease - offsetof(mp_worker, lease))};
    fakes.steps = step;
    for (const sim_step *at = fakes.steps; at; at = at->next)
        threads += at->worker->threads;
    SIM_CHECK(lease->threads >= 1 && threads <= fakes.threads);
}

static void end_step(const sim_step *step) {
    sim_step **link = &fakes.steps;
    while (*link != step)
        link = &(*link)->next;
    *link = step->next;
}

static bool compute(mp_lease *lease, uint64_t ns) {
    for (uint64_t done = 0; done < ns; done += MS) {
        if (mp_lease_poll(lease))
            return false;
        mp_sys_sleep_ns(ns - done < MS ? ns - done : MS);
    }
    return !mp_lease_poll(lease);
}

static bool breaks_down(const sim_call *call) { return call->internal > 0 && call->done >= call->internal_from; }

/* A model whose workers die repeatedly must get a backoff, and then be broken. */
static void crash(sim_model *model) {
    enum { RING = sizeof(model->crash_ns) / sizeof(model->crash_ns[0]) };
    uint64_t now = sim_now(), first = model->crash_ns[model->crashes % RING];
    if (fakes.crashes_most && model->crashes >= RING && now - first < 50000 * MS)
        sim_fail("a model failed %d times within %.3f s", RING + 1, (double)(now - first) * 1e-6 / 1000);
    model->crash_ns[model->crashes++ % RING] = now;
}

static void engine_step(mp_engine *base, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    fake_engine *engine = (fake_engine *)base;
    sim_model *model = engine->model;
    enter(engine);
    if (engine->gone) { /* the engine was lost after plan(): the step begins no work */
        for (int i = 0; i < plan->count; i++)
            outcomes[i] = MP_OUTCOME_MORE;
        leave(engine);
        return;
    }
    if (model->stuck_steps > 0) {
        model->stuck_steps--;
        mp_sys_sleep_ns(model->stuck_ns);
    }
    const uint64_t grown = model->cache_bytes ? sim_below(model->cache_bytes) : 0;
    if (grown && mp_budget_take(engine->budget, grown))
        engine->caches += grown;
    bool broken = false, whole = !mp_lease_poll(lease); /* an abandoned worker has lost its compute threads */
    if (whole) {
        int most = model->threads < fakes.threads ? model->threads : fakes.threads;
        sim_step step;
        SIM_CHECK(!fakes.alone || lease->threads == (most < 1 ? 1 : most));
        begin_step(&step, lease);
        whole = compute(lease, model->uneven && sim_below(2) ? 0 : model->step_ns);
        end_step(&step);
    }
    bool taken_along = false;
    for (int i = 0; i < plan->count && fakes.whole && whole; i++)
        taken_along |= breaks_down((const sim_call *)plan->items[i]->request) &&
                       !((const sim_call *)plan->items[i]->request)->spoils;
    if (fakes.processes && whole && taken_along)
        lose(engine, false);
    bool killed = whole && !taken_along && is_gone(engine);
    for (int i = 0; i < plan->count; i++) {
        mp_item *item = plan->items[i];
        sim_call *call = (sim_call *)item->request;
        SIM_CHECK(call->admitted && !call->finished && call->failed < 2 + call->spared);
        SIM_CHECK(!call->alone || engine->admitted == 1);
        SIM_CHECK(call->failed == 0 || plan->count == 1); /* a suspect steps alone */
        SIM_CHECK(model->models > 0 && "no engine computes on weights that were freed");
        if (fakes.on_time && call->unwanted_ns && sim_now() > call->unwanted_ns + UNWANTED_NS)
            sim_fail("a request still runs %.3f ms after it was cancelled",
                     (double)(sim_now() - call->unwanted_ns) * 1e-6);
        outcomes[i] = MP_OUTCOME_MORE;
        if (!whole)
            continue;
        if (breaks_down(call) || (taken_along && !call->numeric) || killed) {
            if (call->innocent && call->failed && !fakes.processes)
                sim_fail("an innocent request failed twice because of others");
            bool corrupted = call->spoils && breaks_down(call) && !engine->gone;
            call->internal -= breaks_down(call);
            call->failed_late = call->done && (corrupted || !call->base.resumable) && call->streams;
            if (engine->gone)
                item->error = engine->lost;
            else
                mp_fail(&item->error, corrupted ? MP_INTEGRITY : MP_INTERNAL, "the engine failed");
            outcomes[i] = MP_OUTCOME_FAILED;
            call->failed++;
            call->spared |= engine->gone && engine->base.external_kill && call->base.resumable;
            call->moved = true;
            broken |= !corrupted;
            continue;
        }
        if (call->numeric) {
            mp_fail(&item->error, MP_NUMERIC, "NaN in the pooled output");
            outcomes[i] = MP_OUTCOME_FAILED;
            call->failed++;
            continue;
        }
        if (call->memory_a_step) {
            if (!take(engine, call->memory_a_step)) {
                outcomes[i] = MP_OUTCOME_WAIT_MEMORY;
                continue;
            }
            ((fake_state *)item->state)->memory += call->memory_a_step;
        }
        call->waits = call->masked && call->masks == call->done;
        if (call->waits) {
            outcomes[i] = MP_OUTCOME_WAIT_MASK;
            continue;
        }
        if (model->states && !compute_parts(engine, item, call->done + plan->amount[i])) {
            mp_fail_memory(&item->error, sizeof(uint64_t), "the parts of a fake");
            outcomes[i] = MP_OUTCOME_WAIT_MEMORY;
            continue;
        }
        call->done += plan->amount[i];
        item->cursor = call->done;
        call->shown = call->done;
        SIM_CHECK(call->done <= call->units && (!call->masked || call->done == call->masks));
        if (call->done == call->units) {
            call->finished++;
            if (fakes.ended)
                fakes.ended(call);
            outcomes[i] = MP_OUTCOME_DONE;
        }
    }
    if (broken)
        crash(model);
    model->steps++;
    model->slices += (int)sim_below(3);
    leave(engine);
    for (int i = 0; i < plan->count; i++)
        maybe_cancel(plan->items[i]);
}

static void engine_preempt(mp_engine *base, mp_item *item) {
    fake_engine *engine = (fake_engine *)base;
    enter(engine);
    SIM_CHECK(((sim_call *)item->request)->admitted);
    give_way(engine, item);
    leave(engine);
    maybe_cancel(item);
}

static void engine_retire(mp_engine *base, mp_item *item) {
    fake_engine *engine = (fake_engine *)base;
    enter(engine);
    forget(engine, item, false);
    leave(engine);
    maybe_cancel(item);
}

static bool engine_improve(mp_engine *base, mp_lease *lease) {
    fake_engine *engine = (fake_engine *)base;
    sim_model *model = engine->model;
    if (!lease)
        return model->slices > 0;
    enter(engine);
    SIM_CHECK(engine->admitted == 0 && lease->threads == 1 && model->models > 0);
    sim_step step;
    begin_step(&step, lease);
    fakes.improving++;
    if (model->stuck_steps > 0 && sim_below(4) == 0) {
        model->stuck_steps--;
        mp_sys_sleep_ns(model->stuck_ns);
    }
    compute(lease, 2 * MS);
    fakes.improving--;
    end_step(&step);
    if (model->slices > 0)
        model->slices--;
    leave(engine);
    return model->slices > 0;
}

static uint64_t engine_trim(mp_engine *base) {
    fake_engine *engine = (fake_engine *)base;
    enter(engine);
    uint64_t freed = engine->caches;
    mp_budget_give(engine->budget, freed);
    engine->caches = 0;
    if (engine->model->states)
        mp_prefix_trim(&engine->parts);
    leave(engine);
    return freed;
}

static uint64_t engine_bytes(const mp_engine *base) {
    const fake_engine *engine = (const fake_engine *)base;
    return engine->model->engine_bytes + engine->caches;
}

static void engine_destroy(mp_engine *base) {
    fake_engine *engine = (fake_engine *)base;
    enter(engine);
    SIM_CHECK(engine->admitted == 0 && engine->used == 0);
    SIM_CHECK(engine->model->models > 0 && "the model outlives its engines");
    if (engine->model->states) {
        mp_prefix_trim(&engine->parts);
        mp_prefix_deinit(&engine->parts);
        SIM_CHECK(engine->own.used == 0);
    }
    mp_budget_give(engine->budget, engine->model->engine_bytes + engine->caches);
    engine->model->engines--;
    mp_free(engine);
}

/* --- model --- */

static mp_status model_engine(mp_model *base, mp_budget *budget, mp_engine **out, mp_error *error) {
    static const mp_engine_ops ops = {
        .admit = engine_admit,
        .plan = engine_plan,
        .step = engine_step,
        .preempt = engine_preempt,
        .retire = engine_retire,
        .trim = engine_trim,
        .destroy = engine_destroy,
        .bytes = engine_bytes,
        .improve = engine_improve,
    };
    sim_model *model = ((fake_model *)base)->model;
    sim_yield();
    if (model->engine_failures > 0) {
        model->engine_failures--;
        return mp_fail(error, MP_MODEL, "the engine cannot be created");
    }
    fake_engine *engine = mp_alloc_zeroed(sizeof(*engine), MP_TAG_SCRATCH);
    if (!engine)
        return mp_fail_memory(error, sizeof(*engine), "a fake engine");
    if (!mp_budget_take(budget, model->engine_bytes)) {
        mp_free(engine);
        return mp_fail_memory(error, model->engine_bytes, "a fake engine");
    }
    engine->base.ops = &ops;
    engine->model = model;
    engine->budget = budget;
    if (model->states) {
        engine->own.limit = 4000 + sim_below(6000);
        sim_states_init(&engine->parts, &engine->own);
    }
    engine->base.lost = fakes.processes ? engine_lost : NULL;
    mp_error_clear(&engine->lost);
    model->engines++;
    *out = &engine->base;
    return MP_OK;
}

static mp_status model_check(const mp_model *base, mp_request *call, uint64_t *cost_ns, uint32_t *total,
                             mp_error *error) {
    SIM_CHECK(((const fake_model *)base)->model->models > 0);
    sim_yield();
    if (((sim_call *)call)->bad_argument)
        return mp_fail(error, MP_INVALID_ARGUMENT, "a bad argument");
    call->bytes += ((sim_call *)call)->outputs - call->output_bytes;
    call->output_bytes = ((sim_call *)call)->outputs;
    *total = ((sim_call *)call)->units;
    *cost_ns = *total * MS;
    return MP_OK;
}

static uint64_t call_fingerprint(const mp_request *call) {
    return ((const sim_call *)call)->units + (((const sim_call *)call)->innocent ? 5000011 : 1000003);
}

static bool call_seen(const mp_request *base) {
    const sim_call *call = (const sim_call *)base;
    return call->streams && call->done > 0;
}

static bool call_drop_outputs(mp_request *base, bool begun) {
    sim_call *call = (sim_call *)base;
    SIM_CHECK(!call->admitted && (begun || !call->done));
    if (begun)
        return false;
    base->bytes -= base->output_bytes;
    base->output_bytes = 0;
    return true;
}

static bool model_healthy(const mp_model *base) { return !((const fake_model *)base)->model->unhealthy; }
static uint64_t model_bytes(const mp_model *base) { return ((const fake_model *)base)->model->model_bytes; }

static void model_destroy(mp_model *base) {
    fake_model *model = (fake_model *)base;
    sim_yield();
    SIM_CHECK(model->model->models == 1 || model->model->engines == 0 || model->model->models > 1);
    mp_budget_give(model->budget, model->model->model_bytes);
    model->model->models--;
    mp_free(model);
}

/* --- loader --- */

static mp_status loader_load(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_model **out,
                             mp_error *error) {
    static const mp_model_ops ops = {model_engine, model_check, model_healthy, model_bytes, model_destroy};
    sim_model *model = self;
    SIM_CHECK(model->loaders > 0 && "the loader exists during its load");
    SIM_CHECK((model->loading == 0 || model->stall_ns) && "one load of a model at a time, except abandoned ones");
    if (fakes.backoff_ns && model->failed_ns && sim_now() < model->failed_ns + fakes.backoff_ns)
        sim_fail("a failed load is retried after only %.3f ms", (double)(sim_now() - model->failed_ns) * 1e-6);
    model->loading++;
    model->loads++;
    mp_status status = MP_OK;
    mp_progress_set(progress, "packing", 10);
    if (model->stall_ns)
        mp_sys_sleep_ns(model->stall_ns);
    for (uint64_t done = 0; done < model->load_ns && !mp_lease_poll(lease); done += 5 * MS) {
        mp_sys_sleep_ns(model->load_ns - done < 5 * MS ? model->load_ns - done : 5 * MS);
        mp_progress_set(progress, "packing", 50);
    }
    fake_model *made = NULL;
    if (mp_lease_poll(lease)) {
        status = mp_fail(error, MP_CANCELLED, "the load was cancelled");
    } else if (model->load_failures > 0) {
        model->load_failures--;
        model->failed_ns = sim_now();
        status = mp_fail(error, MP_IO, "the file is gone");
    } else if (!(made = mp_alloc_zeroed(sizeof(*made), MP_TAG_WEIGHTS))) {
        status = mp_fail_memory(error, sizeof(*made), "a fake");
    } else if (!mp_budget_take(budget, model->model_bytes)) {
        mp_free(made);
        status = mp_fail_memory(error, model->model_bytes, "a fake");
    } else {
        made->base.ops = &ops;
        made->model = model;
        made->budget = budget;
        model->models++;
        *out = &made->base;
    }
    model->loading--;
    return status;
}

static void loader_footprint(void *self, uint64_t *bytes, uint64_t *engine) {
    SIM_CHECK(((sim_model *)self)->loaders > 0);
    *bytes = ((sim_model *)self)->model_bytes;
    *engine = ((sim_model *)self)->engine_bytes;
}

static void loader_destroy(void *self) {
    sim_model *model = self;
    SIM_CHECK(model->loaders == 1 && model->loading == 0);
    model->loaders--;
    sim_yield();
}

/* --- use --- */

void sim_fakes_begin(int threads) {
    memset(&fakes, 0, sizeof(fakes));
    fakes.threads = threads;
}

sim_model *sim_fakes_model(void) {
    if (fakes.count == SIM_FAKES)
        sim_fail("more than %d fakes", SIM_FAKES);
    sim_model *model = &fakes.models[fakes.count++];
    *model = (sim_model){.threads = 1, .model_bytes = 1000, .engine_bytes = 100, .step_ns = MS};
    return model;
}

mp_loader sim_fakes_loader(sim_model *model) {
    static const mp_loader_ops ops = {loader_load, loader_footprint, loader_destroy};
    SIM_CHECK(model->loaders == 0);
    model->loaders++;
    return (mp_loader){.ops = &ops, .self = model, .capability = MP_TEXT_EMBEDDING};
}

static void call_destroy(mp_request *base) {
    sim_call *call = (sim_call *)base;
    SIM_CHECK(!call->destroyed_is_error && "the caller holds a reference");
    SIM_CHECK(!call->admitted && !call->saved && "the engine releases a request before the request is freed");
    fakes.calls--;
    mp_free(call);
}

sim_call *sim_fakes_call(uint32_t units) {
    sim_call *call = mp_alloc_zeroed(sizeof(*call), MP_TAG_REQUEST);
    if (!call)
        return NULL;
    call->base = (mp_request){.capability = MP_TEXT_EMBEDDING, .destroy = call_destroy, .bytes = sizeof(*call)};
    call->base.fingerprint = call_fingerprint;
    call->base.seen = call_seen;
    call->base.drop_outputs = call_drop_outputs;
    call->units = units;
    fakes.calls++;
    return call;
}

/* Returns true while threads of abandoned workers have not returned. */
static bool abandoned_work_remains(void) {
    for (int i = 0; i < fakes.count; i++)
        if (fakes.models[i].loading || fakes.models[i].engines || fakes.models[i].loaders)
            return true;
    return false;
}

void sim_fakes_end(void) {
    for (int i = 0; i < 100 && abandoned_work_remains(); i++)
        mp_sys_sleep_ns(100 * MS);
    for (int i = 0; i < fakes.count; i++) {
        const sim_model *model = &fakes.models[i];
        if (model->loaders || model->models || model->engines || model->loading)
            sim_fail("fake %d: %d loaders, %d models, %d engines and %d loads are left", i, model->loaders,
                     model->models, model->engines, model->loading);
    }
    if (fakes.calls)
        sim_fail("%d requests are left", fakes.calls);
    SIM_CHECK(!fakes.steps);
}

#endif
