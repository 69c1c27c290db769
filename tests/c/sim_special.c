/* sim_special.c: the hooks of single worlds. See sim_state.h. */
#include "sim_state.h"

#ifdef MP_SIM

#include <string.h>

static const uint64_t MS = 1000 * 1000, SECOND = 1000ull * 1000 * 1000;

void sim_pause(uint64_t ns) {
    sim_clock_jump(ns);
    fakes.jumped_ns = sim_now();
    fakes.paused_ns += ns;
}

/* Sends one request from the thread that runs the world, and waits for its end. */
mp_status sim_call_once(const char *key, mp_error *error) {
    mp_ticket *ticket;
    sim_call *call = sim_fakes_call(1);
    SIM_CHECK(call != NULL);
    call->innocent = true;
    mp_submit_options options = {.priority = 2};
    mp_error_clear(error);
    mp_status status = mp_registry_submit(w.registry, key, &call->base, &options, &ticket, error);
    if (status != MP_OK)
        return status;
    SIM_CHECK(mp_ticket_wait(ticket, UINT64_MAX, 0, NULL));
    status = mp_ticket_status(ticket, error);
    SIM_CHECK(status != MP_OK || call->finished == 1);
    mp_ticket_release(ticket);
    return status;
}

/* --- cold: requests for models that are not loaded, under every policy: each model is loaded once --- */

static void cold_tune(mp_registry_config *config) {
    config->keep_alive_ns = MP_FOREVER;
    config->max_workers = 1 + of(4);
    fakes.backoff_ns = 99 * MS;
}

static void cold_script(sim_model *model) {
    if (percent(20)) /* every load fails: callers get the error, and a load is tried again after a backoff */
        model->load_failures = 1000;
    w.load_fails |= model->load_failures != 0;
}

static void cold_call(record *r, mp_submit_options *options) {
    (void)r;
    options->keep_alive_ns = 0;
}

static void cold_finish(void) {
    for (int i = 0; i < fakes.count; i++)
        if (fakes.models[i].loads > 1 && !fakes.models[i].failed_ns)
            sim_fail("%s was loaded %d times", sim_keys[i], fakes.models[i].loads);
}

const sim_special sim_cold = {.tune = cold_tune, .script = cold_script, .call = cold_call, .finish = cold_finish};

/* --- evictions: idle workers end after at most 20 ms; the model of the first key is pinned --- */

static void evictions_tune(mp_registry_config *config) {
    static const uint64_t lives[] = {1, 1, 1000 * 1000, 20 * 1000 * 1000};
    config->keep_alive_ns = lives[of(4)];
    config->max_workers = 1 + of(3);
}

static void evictions_script(sim_model *model) { model->load_ns = MS * (uint64_t)of(6); }

static void evictions_begin(void) {
    mp_error error;
    w.safe = 1;
    SIM_CHECK(mp_registry_load(w.registry, sim_keys[0], true, 0, &error) == MP_OK);
}

static void must_be_unloaded(void *arg, const mp_entry_info *info) {
    (void)arg;
    const bool failed = sim_loads_are_late() && strcmp(info->state, "failed") == 0;
    if (!info->pinned && (info->workers || info->model || (!failed && strcmp(info->state, "cold") != 0)))
        sim_fail("%s has had no work for a second and is still %s, with %d workers", info->key, info->state,
                 info->workers);
}

static void evictions_finish(void) {
    mp_sys_sleep_ns(SECOND);
    sim_visit(must_be_unloaded, NULL);
    if (fakes.models[0].loads != 1 || fakes.models[0].models != 1)
        sim_fail("a pinned model was loaded %d times, and %d copies exist", fakes.models[0].loads,
                 fakes.models[0].models);
}

const sim_special sim_evictions = {
    .tune = evictions_tune, .script = evictions_script, .begin = evictions_begin, .finish = evictions_finish};

/* --- reclaim: models that do not fit into memory together; only demand for memory evicts them --- */

static void reclaim_tune(mp_registry_config *config) {
    config->memory_limit = 60000;
    config->keep_alive_ns = MP_FOREVER;
}

static void reclaim_script(sim_model *model) {
    model->load_ns = 5 * MS * (uint64_t)of(4);
    model->model_bytes = 20000 + 5000 * (uint64_t)of(7);
    model->engine_bytes = 1000;
    model->memory = 0;
}

/* A single caller gets every model, whatever was loaded before. */
static void reclaim_begin(void) {
    w.plain = w.caller_count == 1;
    w.tight = !w.plain;
}

static void reclaim_call(record *r, mp_submit_options *options) {
    options->keep_alive_ns = 0;
    r->call->memory = r->call->memory_a_step = 0;
    r->call->outputs = 0;
}

const sim_special sim_reclaim = {
    .tune = reclaim_tune, .script = reclaim_script, .begin = reclaim_begin, .call = reclaim_call};

/* --- deadlines: nearly all requests have a deadline or patience; some are submitted after their deadline --- */

static void deadlines_call(record *r, mp_submit_options *options) {
    r->deadline_ns = options->deadline_ns = 0;
    r->patience_ns = options->patience_ns = 0;
    if (percent(10)) {
        r->past = true;
        r->deadline_ns = options->deadline_ns = sim_now() - sim_below(MS);
    } else if (percent(80)) {
        r->deadline_ns = options->deadline_ns = sim_now() + 1 + sim_below((percent(50) ? 5 : 100) * MS);
    }
    if (percent(50))
        r->patience_ns = options->patience_ns = MS + sim_below(100 * MS);
}

static void deadlines_tune(mp_registry_config *config) {
    if (percent(50)) /* a load occupies the only CPU */
        fakes.threads = config->threads = 1;
}

static void deadlines_script(sim_model *model) {
    model->threads = 1;
    if (percent(30))
        model->load_ns = 300 * MS;
}

const sim_special sim_deadlines = {.tune = deadlines_tune, .script = deadlines_script, .call = deadlines_call};

/* --- flapping: every other request makes the model fail; the breaker opens, half-opens, and opens again --- */

static const uint64_t FLAPPING_BACKOFF_MAX = 20ull * 1000 * 1000;

static void flapping_tune(mp_registry_config *config) {
    config->breaker_threshold = 1 + of(3);
    config->breaker_window_ns = SECOND;
    config->breaker_backoff_ns = MS + sim_below(FLAPPING_BACKOFF_MAX - MS);
    w.capacity = config->queue_capacity[MP_TEXT_EMBEDDING][MP_SERVICE_INTERACTIVE] =
        config->queue_capacity[MP_TEXT_EMBEDDING][MP_SERVICE_BULK] = 8;
}

static void flapping_script(sim_model *model) { /* slow steps: several probes run at once, some end late */
    model->load_ns = 0;
    model->step_ns = 20 * MS;
    model->uneven = false;
    model->step_units = 1;
    model->plan_items = 1;
}

static void flapping_call(record *r, mp_submit_options *options) {
    (void)options;
    r->call->numeric = percent(50);
    r->call->units = 1 + (uint32_t)of(3);
    w.numeric = true;
    if (percent(50)) /* the backoff may end meanwhile */
        mp_sys_sleep_ns(sim_below(20 * MS));
}

/* Probes of a half-open breaker: never more at once than the rule allows, also while earlier probes run. */
enum { TRIES = 3, BURST = 5, ROUNDS = 4, TRIED = 40 };

static mp_ticket *submit_now(bool numeric) {
    mp_ticket *ticket = NULL;
    mp_error error;
    sim_call *call = sim_fakes_call(1);
    SIM_CHECK(call != NULL);
    call->numeric = numeric;
    mp_submit_options options = {.priority = 2, .fail_fast = true};
    mp_registry_submit(w.registry, sim_keys[0], &call->base, &options, &ticket, &error);
    return ticket;
}

static void read_breaker(void *arg, const mp_entry_info *info) { *(const char **)arg = info->breaker; }

static bool is_half_open(void) {
    const char *state;
    sim_visit(read_breaker, &state);
    return strcmp(state, "half-open") == 0;
}

static void check_probes(mp_ticket *const *tickets, int count) {
    int n = 0;
    mp_sys_sleep_ns(MS / 10); /* long enough for requests that are about to end */
    for (int i = 0; i < count; i++)
        n += !mp_ticket_done(tickets[i]);
    if (is_half_open() && n > TRIES)
        sim_fail("%d probes run at once in a half-open breaker", n);
}

static void flapping_bursts(void) {
    mp_ticket *tickets[TRIED], *ticket;
    const char *state;
    int count = 0;
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < 20; i++) {
            sim_visit(read_breaker, &state);
            if (strcmp(state, "open") == 0)
                break;
            if ((ticket = submit_now(true)))
                mp_ticket_wait(ticket, UINT64_MAX, 0, NULL);
            else
                mp_sys_sleep_ns(10 * MS);
            mp_ticket_release(ticket);
        }
        if (strcmp(state, "open") != 0)
            continue;
        mp_sys_sleep_ns(FLAPPING_BACKOFF_MAX);
        int first = count;
        for (int i = 0; i < BURST; i++)
            if ((ticket = submit_now(percent(40))))
                tickets[count++] = ticket;
        check_probes(&tickets[first], count - first);
        mp_sys_sleep_ns(1 + sim_below(60 * MS));
        if (!is_half_open())
            continue;
        for (int i = 0; i < BURST; i++)
            if ((ticket = submit_now(false)))
                tickets[count++] = ticket;
        check_probes(&tickets[first], count - first);
    }
    for (int i = 0; i < count; i++) {
        mp_ticket_wait(tickets[i], UINT64_MAX, 0, NULL);
        mp_ticket_release(tickets[i]);
    }
}

static void must_be_closed(void *arg, const mp_entry_info *info) { *(bool *)arg &= !strcmp(info->breaker, "closed"); }

/* After the faults have stopped, the breaker must close. */
static void flapping_finish(void) {
    mp_error error;
    flapping_bursts();
    for (int tries = 0; tries < 20; tries++) {
        bool closed = true;
        mp_sys_sleep_ns(30 * MS);
        mp_status status = sim_call_once(sim_keys[0], &error);
        if (status != MP_OK && status != MP_CIRCUIT_OPEN)
            sim_fail("a request without fault ended in %s: %s", mp_status_find(status)->name, error.message);
        sim_visit(must_be_closed, &closed);
        if (closed)
            return;
    }
    sim_fail("the breaker is not closed after 20 requests without fault");
}

const sim_special sim_flapping = {
    .tune = flapping_tune, .script = flapping_script, .call = flapping_call, .finish = flapping_finish};

/* --- crashes: requests kill their workers by internal errors, some requests once, others twice --- */

static void crashes_tune(mp_registry_config *config) {
    config->breaker_threshold = percent(50) ? -1 : 1 + of(5);
    config->breaker_window_ns = SECOND;
    config->breaker_backoff_ns = MS + sim_below(50 * MS);
    config->keep_alive_ns = MP_FOREVER;
    config->max_workers = 1 + of(3);
    fakes.crashes_most = 1;
    fakes.whole = percent(70);
}

static void crashes_begin(void) { w.crashes = true; }

static void crashes_call(record *r, mp_submit_options *options) {
    options->keep_alive_ns = 0;
    r->call->internal = percent(40) ? 1 + of(2) : 0;
    r->call->internal_from = percent(15) ? (uint32_t)of((int)r->call->units) : 0;
    r->call->streams = percent(50);
    r->call->numeric = r->call->numeric && !r->call->internal;
    r->call->innocent = !r->call->internal;
    if (percent(30))
        mp_sys_sleep_ns(sim_below(300 * MS));
}

static void crashes_finish(void) {
    mp_error error;
    mp_status status;
    for (int i = 0; i < w.key_count; i++) {
        SIM_CHECK(mp_registry_load(w.registry, sim_keys[i], false, 0, &error) == MP_OK);
        for (int tries = 0; (status = sim_call_once(sim_keys[i], &error)) != MP_OK; tries++) {
            if (tries > 20 || (status != MP_CIRCUIT_OPEN && status != MP_NO_WORKERS))
                sim_fail("a request without fault ended in %s: %s", mp_status_find(status)->name, error.message);
            mp_sys_sleep_ns(60 * MS);
            if (status == MP_NO_WORKERS) /* an abandoned request may have caused the last death */
                SIM_CHECK(mp_registry_load(w.registry, sim_keys[i], false, 0, &error) == MP_OK);
        }
    }
}

const sim_special sim_crashes = {
    .tune = crashes_tune, .begin = crashes_begin, .call = crashes_call, .finish = crashes_finish};

/* --- replaced: after a load, requests go to the model that was loaded, not to the one that it replaces --- */

static void replaced_script(sim_model *model) { model->load_ns = MS * (uint64_t)of(6); }

static void replaced_begin(void) {
    mp_error error;
    SIM_CHECK(mp_registry_load(w.registry, sim_keys[0], false, 0, &error) == MP_OK);
    for (int i = 0; i < 3; i++) {
        record r = {0};
        sim_add(sim_keys[0], true, &r);
        SIM_CHECK(mp_registry_load(w.registry, sim_keys[0], false, 0, &error) == MP_OK);
        SIM_CHECK(sim_call_once(sim_keys[0], &error) == MP_OK);
        if (fakes.models[fakes.count - 1].steps == 0)
            sim_fail("a request after the load of %s went to the model that was replaced", sim_keys[0]);
    }
}

const sim_special sim_replaced = {.script = replaced_script, .begin = replaced_begin};

/* --- cancels: requests are cancelled during calls of their engines, which also fail and lack memory --- */

static void cancels_tune(mp_registry_config *config) {
    crashes_tune(config);
    config->breaker_threshold = -1;
    fakes.cancels = 1 + of(15);
    fakes.crashes_most = 0;
    w.tight = w.numeric = true;
}

static void cancels_script(sim_model *model) {
    model->memory = percent(50) ? 6 + of(12) : 0;
    model->load_ns = 0;
}

static void cancels_call(record *r, mp_submit_options *options) {
    options->keep_alive_ns = 0;
    r->call->internal = percent(40) ? 1 + of(2) : 0;
    r->call->numeric = r->call->numeric && !r->call->internal;
    r->call->base.resumable = percent(50);
    r->call->keeps_state = percent(50);
    r->call->memory = 1 + of(4);
    r->call->memory_a_step = of(3);
}

static void cancels_finish(void) { fakes.cancels = 0; }

const sim_special sim_cancels = {.tune = cancels_tune,
                                 .script = cancels_script,
                                 .begin = crashes_begin,
                                 .call = cancels_call,
                                 .finish = cancels_finish};

/* --- chaos: injected faults (registry/chaos.h) of every kind --- */

static void chaos_tune(mp_registry_config *config) {
    config->chaos = (mp_chaos_rule){.seed = sim_below(1000),
                                    .fail = 0.01 * of(20),
                                    .stall = 0.01 * of(5),
                                    .die = 0.01 * of(10),
                                    .slow = 0.01 * of(20),
                                    .memory = 0.02 * of(24)};
    config->stall_timeout_ns = 5 * SECOND; /* above every simulated delay: only chaos stalls a worker */
    config->breaker_threshold = percent(50) ? -1 : 1 + of(5);
    config->breaker_window_ns = SECOND;
    config->breaker_backoff_ns = MS + sim_below(50 * MS);
    w.stalls = w.crashes = w.tight = true;
    fakes.on_time = false;
}

const sim_special sim_chaos = {.tune = chaos_tune};

/* --- ahead: requests keep two workers busy most of the time, and a third starts for them --- */

static void balance_script(sim_model *model);

static const uint64_t AHEAD_STEP_NS = 150 * 1000 * 1000, AHEAD_EVERY_NS = 100 * 1000 * 1000;

static void ahead_tune(mp_registry_config *config) {
    sim_fakes_begin(4);
    config->threads = config->max_workers = 4;
    config->predictive_scaling = true;
    config->keep_alive_ns = 500 * MS;
    config->maintenance_every_ns = 0;
    for (int i = 0; i < MP_CAPABILITY_COUNT; i++)
        config->policy[i] = percent(50) ? MP_POLICY_SEQUENTIAL : MP_POLICY_SHARED;
    w.plain = true;
}

static void ahead_script(sim_model *model) {
    balance_script(model);
    model->step_ns = AHEAD_STEP_NS;
}

static void read_forecast(void *arg, const mp_entry_info *info) { *(mp_entry_info *)arg = *info; }

static void ahead_begin(void) {
    enum { AHEAD = 24, STREAM = 18 };
    mp_error error;
    mp_ticket *tickets[AHEAD];
    mp_entry_info info;
    SIM_CHECK(mp_registry_load(w.registry, sim_keys[0], false, 0, &error) == MP_OK);
    mp_sys_sleep_ns(10 * MS);
    for (int i = 0; i < AHEAD; i++) {
        sim_call *call = sim_fakes_call(1);
        mp_submit_options options = {.priority = 2};
        SIM_CHECK(mp_registry_submit(w.registry, sim_keys[0], &call->base, &options, &tickets[i], &error) == MP_OK);
        mp_sys_sleep_ns(AHEAD_EVERY_NS);
        if (i < STREAM)
            continue;
        sim_visit(read_forecast, &info);
        if (sim_get_setup()->late == 0 && (info.predicted < 2 || info.workers < info.predicted))
            sim_fail("%.1f requests per second need %d workers, and %d exist", info.arrivals, info.predicted,
                     info.workers);
    }
    for (int i = 0; i < AHEAD; i++) {
        mp_ticket_wait(tickets[i], UINT64_MAX, 0, NULL);
        SIM_CHECK(mp_ticket_status(tickets[i], &error) == MP_OK);
        mp_ticket_release(tickets[i]);
    }
}

/* All workers end when no more requests arrive. */
static void ahead_finish(void) {
    mp_entry_info info;
    mp_sys_sleep_ns(40 * SECOND);
    sim_visit(read_forecast, &info);
    if (info.workers)
        sim_fail("%d workers still wait 40 s after the last request", info.workers);
}

const sim_special sim_ahead = {
    .tune = ahead_tune, .script = ahead_script, .begin = ahead_begin, .finish = ahead_finish};

/* --- balance: many requests at once, each goes to the less loaded of two random workers --- */

enum { BALANCED = 48 };

static void balance_tune(mp_registry_config *config) {
    sim_fakes_begin(4);
    config->threads = 4;
    config->max_workers = 4;
    config->keep_alive_ns = MP_FOREVER;
    w.capacity = config->queue_capacity[MP_TEXT_EMBEDDING][MP_SERVICE_INTERACTIVE] =
        config->queue_capacity[MP_TEXT_EMBEDDING][MP_SERVICE_BULK] = BALANCED;
}

static void balance_script(sim_model *model) {
    model->load_ns = 0;
    model->step_ns = MS;
    model->uneven = false;
    model->step_units = 1;
    model->plan_items = 1;
    model->threads = 1;
}

static void must_be_even(void *arg, const mp_entry_info *info) {
    (void)arg;
    uint64_t all = 0, most = 0;
    for (int i = 0; i < info->worker_count; i++) {
        all += info->worker[i].served;
        if (info->worker[i].served > most)
            most = info->worker[i].served;
    }
    SIM_CHECK(info->worker_count == 4 && all == BALANCED);
    if (most > BALANCED / 2)
        sim_fail("of %d requests one worker of four had %d", BALANCED, (int)most);
}

static void balance_begin(void) {
    mp_error error;
    mp_ticket *tickets[BALANCED];
    for (int i = 0; i < BALANCED; i++) {
        sim_call *call = sim_fakes_call(1 + (uint32_t)of(8));
        mp_submit_options options = {.priority = 2, .policy = MP_POLICY_P2C};
        SIM_CHECK(mp_registry_submit(w.registry, sim_keys[0], &call->base, &options, &tickets[i], &error) == MP_OK);
        if (percent(50))
            mp_sys_sleep_ns(sim_below(2 * MS));
    }
    for (int i = 0; i < BALANCED; i++) {
        SIM_CHECK(mp_ticket_wait(tickets[i], UINT64_MAX, 0, NULL) && mp_ticket_status(tickets[i], &error) == MP_OK);
        mp_ticket_release(tickets[i]);
    }
    sim_visit(must_be_even, NULL);
}

static void balance_call(record *r, mp_submit_options *options) {
    r->call->units = 1;
    r->call->alone = false;
    options->policy = MP_POLICY_P2C;
}

const sim_special sim_balance = {
    .tune = balance_tune, .script = balance_script, .begin = balance_begin, .call = balance_call};

/* --- jumps: the process is paused for ten minutes once: no request expires because of that, and no worker is
 * abandoned; steps and loads exceed their timeouts, but make progress --- */

static void jumps_tune(mp_registry_config *config) {
    config->stall_timeout_ns = config->load_timeout_ns = 100 * MS;
    config->load_ceiling_ns = 3600 * SECOND;
    fakes.on_time = false;
}

static void jumps_script(sim_model *model) {
    model->load_ns = 300 * MS * (uint64_t)of(2);
    model->step_ns = 150 * MS * (uint64_t)of(2);
}

/* A pauser thread stops the clock for all others while requests run. */
static void jumps_main(void *arg) {
    (void)arg;
    mp_sys_sleep_ns(1 + sim_below(800 * MS));
    sim_pause(600 * SECOND);
}

static mp_thread jumps_thread;

static void jumps_begin(void) {
    mp_error error;
    SIM_CHECK(mp_thread_start(&jumps_thread, "pauser", jumps_main, NULL, &error) == MP_OK);
}

static void jumps_finish(void) { mp_thread_join(&jumps_thread); }

/* Half of the requests have limits that are longer than all their work, so that only the pause could exceed them. */
static void jumps_call(record *r, mp_submit_options *options) {
    if (r->endless)
        r->call->units = 8;
    if (r->endless || percent(50))
        return;
    r->ample = true;
    options->deadline_ns = options->patience_ns = r->deadline_ns = r->patience_ns = 0;
    options->fail_fast = true;
    if (percent(50))
        r->deadline_ns = options->deadline_ns = sim_now() + 100 * SECOND;
    else
        r->patience_ns = options->patience_ns = 100 * SECOND;
}

const sim_special sim_jumps = {
    .tune = jumps_tune, .script = jumps_script, .begin = jumps_begin, .call = jumps_call, .finish = jumps_finish};

/* --- cut: the registry closes without a grace period while loads and steps wait for CPUs or return them --- */

static void cut_tune(mp_registry_config *config) {
    config->shutdown_grace_ns = 1;
    config->spin_ns = 1;
    fakes.on_time = false;
}

static void cut_begin(void) { w.stalls = true; }

static void cut_script(sim_model *model) {
    model->load_ns = MS * (uint64_t)of(2);
    model->step_ns = MS * (uint64_t)of(2);
    model->threads = fakes.threads;
}

static void cut_call(record *r, mp_submit_options *options) {
    (void)options;
    if (r->endless)
        r->call->units = 8;
    if (w.shutting_down || percent(20)) {
        mp_sys_sleep_ns(1 + sim_below(2 * MS));
        sim_pause(3 * SECOND);
    }
}

const sim_special sim_cut = {.tune = cut_tune, .begin = cut_begin, .script = cut_script, .call = cut_call};

#endif
