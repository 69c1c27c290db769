/* test_registry_fake.c: fake models with scripted costs, failures and waits. See test_registry_fake.h. */
#include "test_registry_fake.h"

#include <sys/wait.h>

#include "base/sys.h"
#include "mp_test.h"

_Atomic int fake_threads_in_steps, fake_calls;
/* Fakes that have loaders; fake_destroy checks that all their objects were freed. */
static fake *known[64];
static _Atomic int known_count;

typedef struct fake_model {
    mp_model base;
    fake *fake;
    mp_budget *budget;
} fake_model;

typedef struct fake_engine {
    mp_engine base;
    fake *fake;
    mp_budget *budget;
    int used; /* total memory of the admitted items */
    int admitted;
    _Atomic int inside; /* threads inside the engine: at most 1 */
    mp_error lost;
} fake_engine;

typedef struct fake_state { /* state of an item from admit to retire */
    int memory;
    uint64_t charged; /* to the budget */
} fake_state;

/* --- engine --- */

static void enter(fake_engine *engine) { MP_CHECK(atomic_fetch_add(&engine->inside, 1) == 0); }

static void leave(fake_engine *engine) { MP_CHECK(atomic_fetch_sub(&engine->inside, 1) == 1); }

static bool take(fake_engine *engine, int memory) {
    int limit = atomic_load(&engine->fake->memory);
    if (limit && engine->used + memory > limit)
        return false;
    engine->used += memory;
    return true;
}

/* Takes the growth of a step. */
static bool grow(fake_engine *engine, fake_state *state, int memory) {
    mp_guard *other_load = engine->fake->other_load;
    if (!other_load) {
        if (!take(engine, memory))
            return false;
        state->memory += memory;
        return true;
    }
    if (!mp_budget_take(engine->budget, (uint64_t)memory)) {
        mp_guard_release(other_load);
        return false;
    }
    state->charged += (uint64_t)memory;
    return true;
}

static mp_status engine_admit(mp_engine *base, mp_item *item, mp_error *error) {
    fake_engine *engine = (fake_engine *)base;
    fake_call *call = (fake_call *)item->request;
    enter(engine);
    mp_status status = MP_OK;
    MP_CHECK(!item->state);
    if (atomic_load(&call->losses_at_admit)) {
        atomic_fetch_sub(&call->losses_at_admit, 1);
        status = mp_fail(&engine->lost, MP_RECV, "the process ended while it received a request");
        *error = engine->lost;
    } else if (call->refused) {
        status = mp_fail(error, MP_UNSUPPORTED, "refused");
    } else if (!take(engine, call->memory)) {
        status = mp_fail(error, MP_MEMORY_EXHAUSTED, "no memory for %d", call->memory);
    } else {
        fake_state *state = mp_alloc_zeroed(sizeof(*state), MP_TAG_KV);
        if (state) {
            state->memory = call->memory;
            item->state = state;
            engine->admitted++;
            atomic_fetch_add(&engine->fake->admitted, 1);
            atomic_fetch_add(&call->starts, 1);
        } else {
            engine->used -= call->memory;
            status = mp_fail_memory(error, sizeof(*state), "a fake");
        }
    }
    leave(engine);
    return status;
}

/* Waits while `hold` is set, and counts the threads that do. */
static void stay(_Atomic int *inside, _Atomic bool *hold) {
    atomic_fetch_add(inside, 1);
    while (atomic_load(hold))
        mp_sys_sleep_ns(FAKE_MS(1) / 4);
    atomic_fetch_sub(inside, 1);
}

static const mp_error *engine_lost(mp_engine *base) {
    fake_engine *engine = (fake_engine *)base;
    if (atomic_load(&engine->fake->retired))
        stay(&engine->fake->in_leave, &engine->fake->leave_hold);
    return engine->lost.code == MP_OK ? NULL : &engine->lost;
}

static void forget(fake_engine *engine, mp_item *item) {
    fake_state *state = item->state;
    if (!state)
        return;
    engine->used -= state->memory;
    MP_CHECK(engine->used >= 0);
    mp_budget_give(engine->budget, state->charged);
    mp_free(state);
    item->state = NULL;
    engine->admitted--;
}

static void engine_plan(mp_engine *base, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan) {
    fake_engine *engine = (fake_engine *)base;
    enter(engine);
    MP_CHECK(n > 0 && budget_ns > 0);
    atomic_fetch_add(&engine->fake->alone, plan->alone_threads > 0);
    int most = atomic_load(&engine->fake->plan_items);
    uint32_t units = atomic_load(&engine->fake->step_units);
    for (int i = 0; i < n && (most == 0 || plan->count < most); i++) {
        fake_call *call = (fake_call *)items[i]->request;
        MP_CHECK(items[i]->state != NULL);
        uint32_t masks = atomic_load(&call->masks);
        if (call->waits && masks == atomic_load(&call->done)) {
            plan->masks = true;
            continue;
        }
        if (atomic_load(&call->losses_at_plan)) {
            atomic_fetch_sub(&call->losses_at_plan, 1);
            mp_fail(&engine->lost, MP_RECV, "the process ended while it planned");
        }
        uint32_t left = masks ? 1 : call->units - atomic_load(&call->done);
        plan->items[plan->count] = items[i];
        plan->amount[plan->count++] = units && units < left ? units : left;
        plan->cost_ns += plan->amount[plan->count - 1] * FAKE_MS(1);
    }
    plan->threads = engine->fake->threads ? engine->fake->threads : 1;
    leave(engine);
}

static void engine_step(mp_engine *base, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    fake_engine *engine = (fake_engine *)base;
    fake *fake = engine->fake;
    enter(engine);
    atomic_fetch_add(&fake->in_steps, 1);
    int threads = atomic_fetch_add(&fake_threads_in_steps, lease->threads) + lease->threads;
    MP_CHECK(!fake->thread_limit || threads <= fake->thread_limit);
    MP_CHECK(!fake->process || (!lease->team && lease->threads == fake->threads)); /* lent to the process */
    uint64_t end = mp_sys_now_ns() + atomic_load(&fake->step_ns);
    bool stopped = false;
    while (atomic_load(&fake->step_stalls))
        mp_sys_sleep_ns(FAKE_MS(1) / 4);
    while (!stopped && (mp_sys_now_ns() < end || atomic_load(&fake->hold)) &&
           !(atomic_load(&fake->yields) && mp_lease_wanted(lease))) {
        stopped = mp_lease_poll(lease);
        if (!stopped)
            mp_sys_sleep_ns(FAKE_MS(1) / 4);
    }
    const fake_call *guilty = NULL;
    for (int i = 0; i < plan->count && fake->whole && !stopped; i++) {
        fake_call *call = (fake_call *)plan->items[i]->request;
        if (atomic_load(&call->faults) > 0 && atomic_load(&call->done) >= call->fault_from)
            guilty = call;
    }
    for (int i = 0; i < plan->count; i++) {
        mp_item *item = plan->items[i];
        fake_call *call = (fake_call *)item->request;
        fake_state *state = item->state;
        outcomes[i] = MP_OUTCOME_MORE;
        if (stopped)
            continue;
        if (atomic_load(&call->faults) > 0 && atomic_load(&call->done) >= call->fault_from) {
            atomic_fetch_sub(&call->faults, 1);
            mp_fail(&item->error, call->fault, "an injected fault");
            outcomes[i] = MP_OUTCOME_FAILED;
            continue;
        }
        if (guilty) {
            mp_fail(&item->error, guilty->fault, "another request's fault");
            outcomes[i] = MP_OUTCOME_FAILED;
            continue;
        }
        if (call->numeric) {
            mp_fail(&item->error, MP_NUMERIC, "NaN in the pooled output");
            outcomes[i] = MP_OUTCOME_FAILED;
            continue;
        }
        if (call->memory_a_step && !grow(engine, state, call->memory_a_step)) {
            outcomes[i] = MP_OUTCOME_WAIT_MEMORY;
            continue;
        }
        call->waits = atomic_load(&call->masks) && atomic_load(&call->masks) == atomic_load(&call->done);
        if (call->waits) {
            outcomes[i] = MP_OUTCOME_WAIT_MASK;
            continue;
        }
        uint32_t done = atomic_fetch_add(&call->done, plan->amount[i]) + plan->amount[i];
        MP_CHECK(done <= call->units);
        if (done == call->units) {
            atomic_store(&call->version, fake->version);
            atomic_store(&call->finished_step, atomic_load(&fake->steps));
            atomic_fetch_add(&call->finished, 1);
            outcomes[i] = MP_OUTCOME_DONE;
        }
    }
    mp_step_work *work = &engine->base.work;
    work->passes += fake->work.passes;
    work->rows += fake->work.rows;
    work->prefix_tokens += fake->work.prefix_tokens;
    work->draft_tokens += fake->work.draft_tokens;
    work->accepted_draft_tokens += fake->work.accepted_draft_tokens;
    atomic_fetch_sub(&fake_threads_in_steps, lease->threads);
    atomic_fetch_add(&fake->steps, 1);
    atomic_fetch_sub(&fake->in_steps, 1);
    leave(engine);
}

static void engine_preempt(mp_engine *base, mp_item *item) {
    fake_engine *engine = (fake_engine *)base;
    enter(engine);
    MP_CHECK(item->state != NULL);
    forget(engine, item);
    atomic_fetch_add(&engine->fake->preempted, 1);
    leave(engine);
}

static void engine_retire(mp_engine *base, mp_item *item) {
    fake_engine *engine = (fake_engine *)base;
    stay(&engine->fake->in_retire, &engine->fake->retire_hold);
    enter(engine);
    forget(engine, item);
    leave(engine);
    atomic_fetch_add(&engine->fake->retired, 1);
}

static uint64_t engine_trim(mp_engine *base) {
    fake *fake = ((fake_engine *)base)->fake;
    atomic_fetch_add(&fake->trims, 1);
    atomic_store(&fake->held_bytes, atomic_load(&fake->held_bytes) / 2);
    return 0;
}

static bool engine_improve(mp_engine *base, mp_lease *lease) {
    fake_engine *engine = (fake_engine *)base;
    fake *fake = engine->fake;
    if (lease) {
        MP_CHECK(engine->admitted == 0 && lease->threads == 1 && atomic_load(&fake->slices) > 0);
        stay(&fake->in_improve, &fake->improve_hold);
        atomic_fetch_add(&fake->improved, 1);
        atomic_fetch_sub(&fake->slices, 1);
    }
    return atomic_load(&fake->slices) > 0;
}

static uint64_t engine_bytes(const mp_engine *base) {
    const fake *fake = ((const fake_engine *)base)->fake;
    uint64_t held = atomic_load(&fake->held_bytes);
    return held ? held : fake->engine_bytes;
}

static void engine_destroy(mp_engine *base) {
    fake_engine *engine = (fake_engine *)base;
    MP_CHECK(engine->admitted == 0 && engine->used == 0);
    stay(&engine->fake->in_destroy, &engine->fake->destroy_hold);
    mp_budget_give(engine->budget, engine->fake->engine_bytes);
    atomic_fetch_sub(&engine->fake->engines, 1);
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
    fake_model *model = (fake_model *)base;
    if (atomic_load(&model->fake->one_engine) && atomic_load(&model->fake->engines) > 0) {
        atomic_fetch_add(&model->fake->engines_refused, 1);
        return mp_fail(error, MP_IO, "no second engine");
    }
    fake_engine *engine = mp_alloc_zeroed(sizeof(*engine), MP_TAG_SCRATCH);
    if (!engine)
        return mp_fail_memory(error, sizeof(*engine), "a fake engine");
    if (!mp_budget_take(budget, model->fake->engine_bytes)) {
        mp_free(engine);
        return mp_fail_memory(error, model->fake->engine_bytes, "a fake engine");
    }
    engine->base.ops = &ops;
    engine->base.lost = model->fake->never_lost ? NULL : engine_lost;
    engine->base.external_kill = model->fake->external_kill;
    engine->base.process = model->fake->process;
    engine->fake = model->fake;
    engine->budget = budget;
    /* In a forked child, an entry may have `most` engines inherited from the parent besides `most` of its own. */
    int most = model->fake->workers ? model->fake->workers : 1;
    MP_CHECK(atomic_fetch_add(&model->fake->engines, 1) < 2 * most);
    *out = &engine->base;
    return MP_OK;
}

static mp_status model_check(const mp_model *base, mp_request *call, uint64_t *cost_ns, uint32_t *total,
                             mp_error *error) {
    fake *fake = ((const fake_model *)base)->fake;
    atomic_fetch_add(&fake->checks, 1);
    if (((fake_call *)call)->bad_argument)
        return mp_fail(error, MP_INVALID_ARGUMENT, "a bad argument");
    call->bytes += ((fake_call *)call)->outputs;
    call->output_bytes += ((fake_call *)call)->outputs;
    ((fake_call *)call)->outputs = 0; /* counted once, even if another engine checks it again */
    *total = ((fake_call *)call)->units;
    *cost_ns = *total * FAKE_MS(1);
    return MP_OK;
}

static bool model_healthy(const mp_model *base) { return !atomic_load(&((const fake_model *)base)->fake->unhealthy); }

static uint64_t model_bytes(const mp_model *base) {
    fake *fake = ((const fake_model *)base)->fake;
    atomic_fetch_add(&fake->in_bytes, 1);
    while (atomic_load(&fake->bytes_hold))
        mp_sys_sleep_ns(FAKE_MS(1) / 4);
    atomic_fetch_sub(&fake->in_bytes, 1);
    return fake->model_bytes;
}

static void model_destroy(mp_model *base) {
    fake_model *model = (fake_model *)base;
    stay(&model->fake->in_destroy, &model->fake->destroy_hold);
    mp_budget_give(model->budget, model->fake->model_bytes);
    atomic_fetch_sub(&model->fake->models, 1);
    mp_free(model);
}

/* --- loader --- */

static mp_status loader_load(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_model **out,
                             mp_error *error) {
    static const mp_model_ops ops = {model_engine, model_check, model_healthy, model_bytes, model_destroy};
    fake *fake = self;
    if (!fake->load_silent)
        mp_progress_set(progress, "packing", 10); /* first: a test that sees the load counted sees this stage too */
    atomic_store(&fake->load_threads, lease->threads);
    atomic_fetch_add(&fake->loads, 1);
    uint64_t end = mp_sys_now_ns() + atomic_load(&fake->load_ns);
    while (mp_sys_now_ns() < end || atomic_load(&fake->load_stalls)) {
        mp_sys_sleep_ns(FAKE_MS(1) / 4);
        if (atomic_load(&fake->load_stalls))
            continue;
        if (!fake->load_silent)
            mp_progress_set(progress, "packing", 50);
        if (mp_lease_poll(lease))
            break;
    }
    if (mp_lease_poll(lease))
        return mp_fail(error, MP_CANCELLED, "the load was cancelled");
    int failures = atomic_load(&fake->load_failures);
    while (failures > 0 && !atomic_compare_exchange_weak(&fake->load_failures, &failures, failures - 1)) {
    }
    if (failures > 0)
        return mp_fail(error, MP_IO, "the file is gone");
    fake_model *model = mp_alloc_zeroed(sizeof(*model), MP_TAG_WEIGHTS);
    if (!model)
        return mp_fail_memory(error, sizeof(*model), "a fake");
    if (!mp_budget_take(budget, fake->model_bytes)) {
        mp_free(model);
        return mp_fail_memory(error, fake->model_bytes, "a fake");
    }
    model->base.ops = &ops;
    model->fake = fake;
    model->budget = budget;
    atomic_fetch_add(&fake->models, 1);
    *out = &model->base;
    return MP_OK;
}

static void loader_footprint(void *self, uint64_t *bytes, uint64_t *engine) {
    *bytes = ((fake *)self)->model_bytes;
    *engine = ((fake *)self)->engine_bytes;
}

static void loader_destroy(void *self) { atomic_fetch_sub(&((fake *)self)->loaders, 1); }

#ifdef MP_SEAM
static uint64_t no_thread(void) { return 0; }
#endif

void fake_hold_no_locks(void) {
#ifdef MP_SEAM
    mp_sys_table.self = no_thread;
#endif
}

void fake_init(fake *fake) {
    memset(fake, 0, sizeof(*fake));
    fake->model_bytes = 1000;
    fake->engine_bytes = 100;
}

mp_loader fake_loader(fake *fake) {
    static const mp_loader_ops ops = {loader_load, loader_footprint, loader_destroy};
    atomic_fetch_add(&fake->loaders, 1);
    int at = atomic_fetch_add(&known_count, 1);
    MP_CHECK(at < 64);
    known[at] = fake;
    return (mp_loader){.ops = &ops, .self = fake, .capability = fake->capability};
}

/* --- requests --- */

static void call_destroy(mp_request *call) {
    atomic_fetch_sub(&fake_calls, 1);
    mp_free(call);
}

static bool call_seen(const mp_request *base) {
    const fake_call *call = (const fake_call *)base;
    return call->streams && atomic_load(&call->done) > 0;
}

static uint64_t call_fingerprint(const mp_request *call) { return ((const fake_call *)call)->fingerprint; }

static bool call_drop_outputs(mp_request *call, bool begun) {
    if (begun)
        return false;
    ((fake_call *)call)->outputs = call->output_bytes;
    call->bytes -= call->output_bytes;
    call->output_bytes = 0;
    return true;
}

fake_call *fake_call_create(uint32_t units) {
    fake_call *call = mp_alloc_zeroed(sizeof(*call), MP_TAG_REQUEST);
    if (!call)
        return NULL;
    atomic_fetch_add(&fake_calls, 1);
    call->base = (mp_request){.capability = MP_TEXT_EMBEDDING, .destroy = call_destroy, .bytes = sizeof(*call)};
    call->base.fingerprint = call_fingerprint;
    call->base.seen = call_seen;
    call->base.drop_outputs = call_drop_outputs;
    static _Atomic uint64_t number;
    call->fingerprint = atomic_fetch_add(&number, 1) + 1;
    call->units = units;
    return call;
}

fake_call *fake_call_faulty(mp_status fault, int times) {
    fake_call *call = fake_call_create(1);
    call->fault = fault;
    call->faults = times;
    return call;
}

/* --- use --- */

mp_registry *fake_registry_of(mp_registry_config config) {
    mp_registry *registry;
    mp_error error;
    if (!config.memory_limit)
        config.memory_limit = 1000 * 1000 * 1000;
    if (!config.spin_ns)
        config.spin_ns = 1;
    if (!config.queue_capacity[MP_TEXT_EMBEDDING][MP_SERVICE_INTERACTIVE])
        config.queue_capacity[MP_TEXT_EMBEDDING][MP_SERVICE_INTERACTIVE] = 4;
    MP_CHECK_OK(mp_registry_create(&config, &registry, &error), &error);
    return registry;
}

mp_registry *fake_registry(int threads, uint64_t memory) {
    return fake_registry_of((mp_registry_config){.threads = threads, .memory_limit = memory, .max_workers = 1});
}

mp_registry *fake_begin(fake *fake, int threads, mp_ticket **stepping) {
    fake_init(fake);
    mp_registry *registry = fake_registry(threads, 0);
    fake_add(registry, "a", fake, false);
    if (stepping) {
        atomic_store(&fake->hold, true);
        *stepping = fake_submit(registry, "a", fake_call_create(1), NULL);
        fake_until(&fake->in_steps, 1);
    }
    return registry;
}

mp_ticket *fake_submit(mp_registry *registry, const char *key, fake_call *call, mp_status *status) {
    mp_submit_options options = {.priority = 2};
    mp_ticket *ticket = (mp_ticket *)(void *)call; /* a refused call must set it to NULL */
    mp_error error;
    mp_status got = mp_registry_submit(registry, key, &call->base, &options, &ticket, &error);
    MP_CHECK(got == MP_OK || !ticket);
    if (status)
        *status = got;
    else
        MP_CHECK_STATUS(got, MP_OK, &error);
    return ticket;
}

mp_status fake_wait(mp_ticket *ticket, mp_error *error) {
    uint64_t progress;
    MP_CHECK(mp_ticket_wait(ticket, UINT64_MAX, fake_in_ms(10000), &progress));
    MP_CHECK(progress == UINT64_MAX && mp_ticket_done(ticket));
    return mp_ticket_status(ticket, error);
}

mp_status fake_finish(mp_ticket *ticket) {
    mp_status status = fake_wait(ticket, NULL);
    mp_ticket_release(ticket);
    return status;
}

void fake_until(_Atomic int *value, int least) {
    uint64_t end = fake_in_ms(10000);
    while (atomic_load(value) < least) {
        MP_CHECK(mp_sys_now_ns() < end);
        mp_sys_sleep_ns(FAKE_MS(1) / 4);
    }
}

#ifdef MP_SEAM

static pthread_cond_t *counted_cond;
static _Atomic int waits_begun;

/* The caller holds the lock of `cond` until the wait releases it. */
static int count_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t deadline_ns) {
    if (cond == counted_cond)
        atomic_fetch_add(&waits_begun, 1);
    return mp_sys_real.cond_wait(cond, mutex, deadline_ns);
}

void fake_count_waits(mp_cond *cond) {
    counted_cond = &cond->os;
    atomic_store(&waits_begun, 0);
    mp_sys_table.cond_wait = count_wait;
}

void fake_until_waits(int least) { fake_until(&waits_begun, least); }

#else

void fake_count_waits(mp_cond *cond) { (void)cond; }

void fake_until_waits(int least) {
    (void)least;
    mp_sys_sleep_ns(FAKE_MS(50));
}

#endif

void fake_until_no_calls(void) {
    for (uint64_t end = fake_in_ms(10000); atomic_load(&fake_calls); mp_sys_sleep_ns(FAKE_MS(1) / 4))
        MP_CHECK(mp_sys_now_ns() < end);
}

uint64_t fake_in_ms(uint64_t ms) { return mp_sys_now_ns() + FAKE_MS(ms); }

typedef struct wanted {
    const char *key;
    mp_entry_info *info;
} wanted;

static void pick(void *arg, const mp_entry_info *info) {
    wanted *wanted = arg;
    if (strcmp(info->key, wanted->key) == 0) {
        *wanted->info = *info;
        wanted->info->model = NULL;
    }
}

void fake_info(mp_registry *registry, const char *key, mp_entry_info *info) {
    *info = (mp_entry_info){.state = ""};
    wanted wanted = {key, info};
    MP_CHECK_INT(mp_registry_visit(registry, pick, &wanted, NULL), MP_OK);
}

mp_registry_stats fake_stats(mp_registry *registry) {
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    return stats;
}

void fake_until_state(mp_registry *registry, const char *key, const char *state) {
    uint64_t end = fake_in_ms(10000);
    for (;;) {
        mp_entry_info info;
        fake_info(registry, key, &info);
        if (strcmp(info.state, state) == 0)
            return;
        MP_CHECK(mp_sys_now_ns() < end);
        mp_sys_sleep_ns(FAKE_MS(1) / 4);
    }
}

void fake_until_freed(fake *fake) {
    for (uint64_t end = fake_in_ms(10000); atomic_load(&fake->engines) + atomic_load(&fake->models);
         mp_sys_sleep_ns(FAKE_MS(1) / 4))
        MP_CHECK(mp_sys_now_ns() < end);
}

void fake_expect_child(pid_t child) {
    int how = 0;
    MP_CHECK(child > 0 && waitpid(child, &how, 0) == child);
    MP_CHECK(WIFEXITED(how));
    MP_CHECK_INT(WEXITSTATUS(how), 0);
}

void fake_close(void *registry) { mp_registry_close(registry, FAKE_MS(1000)); }

void fake_destroy(mp_registry *registry) {
    mp_registry_stats stats;
    mp_registry_close(registry, FAKE_MS(5000));
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.memory_used, 0);
    MP_CHECK_INT(stats.threads_leased, 0);
    MP_CHECK_INT(stats.threads_created, stats.threads_joined);
    MP_CHECK_INT(stats.total_requests,
                 stats.completed + stats.errors + stats.timeouts + stats.cancelled + stats.queue_full_rejections);
    mp_registry_destroy(registry);
    for (int i = 0; i < known_count; i++) {
        MP_CHECK_INT(known[i]->models, 0);
        MP_CHECK_INT(known[i]->engines, 0);
        MP_CHECK_INT(known[i]->loaders, 0);
    }
    known_count = 0;
}

void fake_end(mp_registry *registry) {
    fake_destroy(registry);
    MP_CHECK_INT(fake_calls, 0);
}

void fake_add(mp_registry *registry, const char *key, fake *fake, bool replace) {
    mp_loader loader = fake_loader(fake);
    mp_error error;
    MP_CHECK_OK(mp_registry_add(registry, key, &loader, replace ? MP_ADD_REPLACE : MP_ADD_NEW, &error), &error);
}

void fake_herd_member(void *arg) {
    herd *herd = arg;
    mp_submit_options options = {.priority = 2};
    mp_ticket *ticket;
    mp_error error;
    mp_status status =
        mp_registry_submit(herd->registry, herd->key, &fake_call_create(1)->base, &options, &ticket, &error);
    if (status == MP_OK)
        status = fake_finish(ticket);
    atomic_fetch_add(status == MP_OK ? &herd->ok : status == MP_IO ? &herd->io : &herd->other, 1);
}

void fake_run_herd(herd *herd) {
    mp_thread threads[HERD];
    mp_error error;
    for (int i = 0; i < HERD; i++)
        MP_CHECK_OK(mp_thread_start(&threads[i], "herd", fake_herd_member, herd, &error), &error);
    for (int i = 0; i < HERD; i++)
        mp_thread_join(&threads[i]);
}
