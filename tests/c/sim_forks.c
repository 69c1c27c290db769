/* sim_forks.c: the world `forks`. A thread forks the process while callers, workers, loads and removals are in any
 * state. The child has this thread alone. It must find no trace of the parent's threads: nothing queued or leased, no
 * lock held, the parent's unfinished requests cancelled. It then serves requests, removes, loads and evicts models, and
 * closes. The parent must not notice. See sim_state.h. */
#include "sim_state.h"

#ifdef MP_SIM

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "registry/audit.h"

static const uint64_t MS = 1000 * 1000, SECOND = 1000ull * 1000 * 1000;
/* Requests of the forking thread. Each is larger than all requests of the callers together. */
enum { OWN = 4, OWN_BYTES = 1000 * 1000, LIMIT = 8 * OWN_BYTES };

static struct {
    mp_thread thread;
    mp_ticket *own[OWN];
    bool done[OWN]; /* had ended before the fork */
    int count;
    mp_notifier *notifier;
    sim_model *replacement, *staged; /* added under OWN_KEY, which callers do not use; NULL: none */
} forks;
static const char OWN_KEY[] = "e", BIG_KEY[] = "big";
enum { REVISION = 7 };

static void forks_tune(mp_registry_config *config) {
    config->keep_alive_ns = 20 * MS;
    config->max_workers = 1 + of(3);
    config->memory_limit = LIMIT;
    w.capacity = config->queue_capacity[MP_TEXT_EMBEDDING][MP_SERVICE_INTERACTIVE] =
        config->queue_capacity[MP_TEXT_EMBEDDING][MP_SERVICE_BULK] = 4;
}

static void forks_script(sim_model *model) {
    model->model_bytes = 20000;
    model->engine_bytes = 1000;
    model->load_failures = model->engine_failures = model->memory = 0;
    model->unhealthy = model->uneven = false;
    model->step_ns = MS * (1 + sim_below(20));
    model->step_units = 1 + (uint32_t)of(2);
    model->load_ns = MS * sim_below(20);
    model->stall_ns = 0;
    model->threads = 1 + of(3);
}

/* --- the child --- */

static void expect_ok(mp_status status, const mp_error *error, const char *what) {
    if (status != MP_OK)
        sim_fail("in the child, %s ended in %s: %s", what, mp_status_find(status)->name, error->message);
}


static void check_nothing_runs(void *arg, const mp_entry_info *info) {
    (void)arg;
    SIM_CHECK(info->queued == 0 && info->waiting[0] == 0 && info->waiting[1] == 0 && info->running == 0);
    SIM_CHECK(info->workers == 0 && info->worker_count == 0 && info->busy == 0 && info->dead == 0);
    SIM_CHECK(strcmp(info->state, "cold") == 0 && strcmp(info->breaker, "closed") == 0);
}

static void check_own_requests(void) {
    uint64_t ids[OWN], eta_ns;
    mp_error error;
    for (int i = 0; i < forks.count; i++) {
        mp_ticket *ticket = forks.own[i];
        uint64_t progress = 0;
        SIM_CHECK(mp_ticket_done(ticket) && mp_ticket_wait(ticket, UINT64_MAX, 0, &progress) && progress == UINT64_MAX);
        SIM_CHECK(!mp_ticket_cancel(ticket) && mp_ticket_position(ticket, &eta_ns) == -1 && eta_ns == 0);
        mp_ticket_wake(ticket);
        SIM_CHECK(mp_ticket_bind(ticket, forks.notifier, 1));
        mp_status status = mp_ticket_status(ticket, &error);
        if (!forks.done[i]) /* it may have ended between the look and the fork */
            SIM_CHECK(status == MP_OK || status == MP_CANCELLED);
        else
            SIM_CHECK(status == MP_OK);
    }
    SIM_CHECK(mp_notifier_take(forks.notifier, ids, OWN) == 0);
}

/* A model that needs all memory: the registry evicts the idle models for it. Nothing that the parent's threads had
 * reserved, queued or held keeps it from loading. */
static void check_big_model(const bool *known) {
    mp_registry_stats stats;
    mp_error error;
    for (int i = 0; i < KEYS; i++) /* afterwards no model is pinned */
        if (known[i])
            expect_ok(mp_registry_evict(w.registry, sim_keys[i], sim_now() + SECOND, &error), &error, "an eviction");
    mp_registry_get_stats(w.registry, &stats);
    uint64_t left = stats.memory_used;
    for (int i = 0; i < KEYS; i++) /* half of the models were used; the registry evicts the others too */
        if (known[i] && i % 2)
            expect_ok(sim_call_once(sim_keys[i], &error), &error, "a request");
        else if (known[i])
            expect_ok(mp_registry_load(w.registry, sim_keys[i], false, sim_now() + SECOND, &error), &error, "a load");
    sim_model *big = sim_fakes_model();
    big->model_bytes = LIMIT - left - OWN_BYTES / 4;
    mp_loader loader = sim_fakes_loader(big);
    expect_ok(mp_registry_add(w.registry, BIG_KEY, &loader, MP_ADD_NEW, &error), &error, "adding a model");
    expect_ok(mp_registry_load(w.registry, BIG_KEY, true, sim_now() + 10 * SECOND, &error), &error, "a large load");
    mp_registry_get_stats(w.registry, &stats);
    SIM_CHECK(stats.memory_limit == LIMIT && stats.memory_used >= big->model_bytes);
    expect_ok(mp_registry_remove(w.registry, BIG_KEY, sim_now() + SECOND, &error), &error, "a removal");
}

/* A replacement that was loading takes over, without a call that loads it. A staged one is gone. */
static void check_replacements(void) {
    const char *keys[] = {OWN_KEY};
    mp_error error;
    if (forks.replacement) {
        int before = forks.replacement->steps;
        expect_ok(sim_call_once(OWN_KEY, &error), &error, "a request");
        SIM_CHECK(forks.replacement->steps > before);
    }
    if (forks.staged) {
        SIM_CHECK(mp_registry_commit(w.registry, keys, 1, REVISION, &error) == MP_SEND);
        SIM_CHECK(forks.staged->loaders == 0);
    }
}

static void find_key(void *arg, const mp_entry_info *info) {
    bool *known = arg;
    for (int i = 0; i < KEYS; i++)
        known[i] |= strcmp(info->key, sim_keys[i]) == 0;
}

static void check_idle(void *arg, const mp_entry_info *info) {
    (void)arg;
    bool cold = info->workers == 0 && strcmp(info->state, "cold") == 0;
    bool kept = info->pinned && info->workers == 1 && strcmp(info->state, "ready") == 0;
    if (!cold && !kept)
        sim_fail("%s%s is %s and has %d workers, idle for %.3f ms of %.3f ms", info->key,
                 info->pinned ? ", which is pinned," : "", info->state, info->workers, (double)info->idle_ns * 1e-6,
                 (double)info->keep_alive_ns * 1e-6);
}

/* A request that waits behind a long one expires at its deadline, so the child's maintenance thread runs. */
static void check_deadline(const char *key) {
    mp_ticket *tickets[2];
    mp_error error;
    for (int i = 0; i < 2; i++) {
        sim_call *call = sim_fakes_call(i ? 1 : 1000);
        SIM_CHECK(call != NULL);
        call->innocent = true;
        mp_submit_options options = {
            .priority = 2, .policy = MP_POLICY_SEQUENTIAL, .deadline_ns = sim_now() + (i ? 5 : 60) * MS};
        call->deadline_ns = options.deadline_ns;
        expect_ok(mp_registry_submit(w.registry, key, &call->base, &options, &tickets[i], &error), &error, "submit");
    }
    for (int i = 1; i >= 0; i--) {
        uint64_t submitted, started, finished;
        SIM_CHECK(mp_ticket_wait(tickets[i], UINT64_MAX, 0, NULL));
        mp_status status = mp_ticket_status(tickets[i], &error);
        mp_ticket_times(tickets[i], &submitted, &started, &finished);
        SIM_CHECK(status == MP_TIMEOUT || (i && status == MP_OK));
        SIM_CHECK(finished < submitted + (i ? 5 : 60) * MS + SIM_PROMPT_NS);
        mp_ticket_release(tickets[i]);
    }
}

static void check_memory(uint64_t left) {
    mp_registry_stats stats;
    mp_registry_get_stats(w.registry, &stats);
    if (stats.memory_used > left)
        sim_fail("the child charges %llu bytes, of which the parent's engines and loads explain %llu",
                 (unsigned long long)stats.memory_used, (unsigned long long)left);
}

static void run_child(void) {
    mp_error error;
    bool known[KEYS] = {false};
    sim_faults(false);
    uint64_t left = OWN_BYTES * 3 / 2; /* requests being submitted; a model or request that a thread was passing on */
    mp_error_clear(&error);
    for (int i = 0; i < fakes.count; i++) {
        sim_model *model = &fakes.models[i];
        left += (uint64_t)model->engines * model->engine_bytes; /* the child does not touch the parent's engines */
        if (model->loading) /* a load may have made a model that no worker has passed on */
            left += model->model_bytes;
        model->loading = 0;
    }
    fakes.steps = NULL;
    w.caller_count = 0;
    expect_ok(mp_registry_audit(w.registry, sim_is_held, &error), &error, "the audit");
    mp_registry_stats stats;
    mp_registry_get_stats(w.registry, &stats);
    SIM_CHECK(stats.threads_leased == 0);
    sim_visit(check_nothing_runs, NULL);
    sim_visit(find_key, known);
    check_own_requests();
    for (int i = 0; i < KEYS; i++) {
        if (!known[i])
            continue;
        expect_ok(sim_call_once(sim_keys[i], &error), &error, "a request");
        mp_sys_sleep_ns(3 * SECOND); /* a sweep may come a second late (SWEEP_AGAIN_NS) */
        sim_visit(check_idle, NULL);
    }
    check_replacements();
    for (int i = 0; i < KEYS; i++) {
        if (!known[i])
            continue;
        expect_ok(mp_registry_keep_alive(w.registry, sim_keys[i], 3 * SECOND, &error), &error, "a keep-alive");
        expect_ok(mp_registry_load(w.registry, sim_keys[i], false, sim_now() + SECOND, &error), &error, "a load");
        mp_sys_sleep_ns(SECOND);
        fakes.alone = true;
        expect_ok(sim_call_once(sim_keys[i], &error), &error, "a request");
        fakes.alone = false;
    }
    check_big_model(known);
    for (int i = 0; i < KEYS; i++) {
        if (!known[i])
            continue;
        check_deadline(sim_keys[i]);
        expect_ok(mp_registry_load(w.registry, sim_keys[i], true, sim_now() + SECOND, &error), &error, "a load");
        expect_ok(mp_registry_evict(w.registry, sim_keys[i], sim_now() + SECOND, &error), &error, "an eviction");
    }
    for (int i = 0; i < KEYS; i++)
        expect_ok(mp_registry_wait_removed(w.registry, sim_keys[i], sim_now() + SECOND, &error), &error, "a removal");
    mp_sys_sleep_ns(SECOND);
    check_memory(left);
    for (int i = 0; i < KEYS; i++)
        if (known[i])
            expect_ok(mp_registry_remove(w.registry, sim_keys[i], sim_now() + SECOND, &error), &error, "a removal");
    mp_registry *registry = w.registry;
    w.registry = NULL;
    mp_registry_destroy(registry);
}

/* --- the parent --- */

static sim_model *add_own(mp_add add) {
    mp_error error;
    sim_model *model = sim_fakes_model();
    forks_script(model);
    model->model_bytes = OWN_BYTES;
    mp_loader loader = sim_fakes_loader(model);
    if (add == MP_ADD_STAGED)
        loader.revision = REVISION;
    SIM_CHECK(mp_registry_add(w.registry, OWN_KEY, &loader, add, &error) == MP_OK);
    return model;
}

static void forker_main(void *arg) {
    (void)arg;
    mp_error error;
    mp_sys_sleep_ns(1 + sim_below(60 * MS));
    add_own(MP_ADD_NEW);
    for (; forks.count < OWN && percent(75); forks.count++) {
        sim_call *call = sim_fakes_call(1 + (uint32_t)of(8));
        SIM_CHECK(call != NULL);
        call->innocent = true;
        call->base.bytes = OWN_BYTES;
        mp_submit_options options = {.priority = 2, .fail_fast = true, .policy = MP_POLICY_SHARED};
        if (mp_registry_submit(w.registry, OWN_KEY, &call->base, &options, &forks.own[forks.count],
                               &error) != MP_OK)
            break;
        SIM_CHECK(mp_ticket_bind(forks.own[forks.count], forks.notifier, 1));
    }
    if (percent(30))
        forks.replacement = add_own(MP_ADD_REPLACE);
    else if (percent(50))
        forks.staged = add_own(MP_ADD_STAGED);
    for (int i = 0, n = of(200); i < n; i++)
        sim_yield();
    if (percent(50))
        mp_sys_sleep_ns(1 + sim_below(20 * MS));
    for (int i = 0; i < forks.count; i++)
        forks.done[i] = mp_ticket_done(forks.own[i]);
    pid_t child = sim_fork();
    if (child == 0) {
        run_child();
        _exit(0);
    }
    int how;
    SIM_CHECK(child > 0 && waitpid(child, &how, 0) == child);
    if (!WIFEXITED(how) || WEXITSTATUS(how) != 0)
        sim_fail("the child of a fork failed");
    for (int i = 0; i < forks.count; i++) {
        mp_ticket_wait(forks.own[i], UINT64_MAX, 0, NULL);
        mp_ticket_release(forks.own[i]);
    }
}

static void forks_begin(void) {
    mp_error error;
    memset(&forks, 0, sizeof(forks));
    SIM_CHECK(mp_notifier_create(&forks.notifier, &error) == MP_OK);
    SIM_CHECK(mp_thread_start(&forks.thread, "forker", forker_main, NULL, &error) == MP_OK);
}

static void forks_finish(void) {
    mp_thread_join(&forks.thread);
    mp_notifier_destroy(forks.notifier);
}

const sim_special sim_forks = {
    .tune = forks_tune, .script = forks_script, .begin = forks_begin, .finish = forks_finish};

#endif
