/* sim_pressure.c: worlds in which the machine takes memory, processes or time away. See sim_state.h. */
#include "sim_state.h"

#ifdef MP_SIM

static const uint64_t MS = 1000 * 1000, SECOND = 1000ull * 1000 * 1000;

/* --- kills: another program kills worker processes, often; the model stays up --- */

static const uint64_t KILLS_BACKOFF_MAX = 10ull * 1000 * 1000 * 1000;

static void kills_tune(mp_registry_config *config) {
    config->breaker_threshold = 1 + of(3);
    config->breaker_window_ns = 100 * SECOND;
    config->breaker_backoff_ns = 1000 * SECOND;
    config->max_workers = 1 + of(2);
    config->keep_alive_ns = MP_FOREVER;
    fakes.processes = fakes.whole = true;
    w.killed = true;
}

static void kills_script(sim_model *model) {
    model->loses = 2 + of(50);
    model->kills = 6;
    model->load_ns = 0;
    model->states = percent(50);
}

static void kills_call(record *r, mp_submit_options *options) {
    sim_call *call = r->call;
    *options = (mp_submit_options){.priority = 2};
    r->deadline_ns = r->patience_ns = 0;
    call->numeric = call->refused = call->bad_argument = call->alone = false;
    call->innocent = true;
    call->units = r->endless ? 8 : call->units;
    call->streams = percent(50);
    call->base.resumable = call->streams;
}

/* The kills end. The backoff has a limit, so requests are served soon after, however many kills there were. */
static void kills_finish(void) {
    for (int i = 0; i < fakes.count; i++)
        fakes.models[i].kills = 0;
    mp_error error;
    for (int i = 0; i < w.key_count; i++) {
        mp_status status = MP_RECV; /* a worker that was killed already may take the first request */
        uint64_t began = sim_now();
        for (int tries = 0; tries < 3 && status == MP_RECV; tries++)
            status = sim_call_once(sim_keys[i], &error);
        if (status != MP_OK)
            sim_fail("a request after the kills ended in %s: %s", mp_status_find(status)->name, error.message);
        if (sim_now() - began > 2 * KILLS_BACKOFF_MAX)
            sim_fail("a request waited %.0f s after the last kill", (double)(sim_now() - began) * 1e-9);
    }
}

const sim_special sim_kills = {
    .tune = kills_tune, .script = kills_script, .call = kills_call, .finish = kills_finish};

/* --- thrash: three models of which at most two fit into memory, and requests of batch priority for all of them. No
 * request is refused because memory is busy, and none outlives its limits --- */

enum { THRASH_LOAD_MS = 60, THRASH_PATIENCE_MS = 300 };

static void thrash_tune(mp_registry_config *config) {
    config->memory_limit = 60000;
    config->keep_alive_ns = MP_FOREVER;
    config->max_workers = 1 + of(2);
    fakes.on_time = false;
}

static void thrash_script(sim_model *model) {
    model->load_ns = of(THRASH_LOAD_MS) * MS;
    model->model_bytes = percent(50) ? 25000 : 45000;
    model->engine_bytes = 2000;
    model->cache_bytes = percent(50) ? 3000 : 0;
    model->states = percent(50);
    model->memory = 0;
    model->step_ns = 5 * MS;
}

static void thrash_begin(void) {
    w.tight = false;
    w.unpinned = true;
}

static void thrash_call(record *r, mp_submit_options *options) {
    sim_call *call = r->call;
    *options = (mp_submit_options){.priority = 4};
    r->deadline_ns = r->patience_ns = 0;
    call->numeric = call->refused = call->bad_argument = call->alone = false;
    call->memory = call->memory_a_step = 0;
    call->outputs = 0;
    if (r->endless || percent(15))
        call->units = 100 + (uint32_t)of(300);
    r->endless = false;
    call->innocent = true;
    if (percent(50))
        r->patience_ns = options->patience_ns = THRASH_PATIENCE_MS * MS;
    else if (percent(50))
        r->deadline_ns = options->deadline_ns = sim_now() + 1 + sim_below(500 * MS);
}

/* A request that expired did so in time: its patience starts again after the progress of the first load that it waited
 * for, but not after each load, nor while loads wait for memory. */
static void thrash_ended(const record *r) {
    uint64_t submitted, started, finished;
    mp_error error;
    mp_ticket_times(r->ticket, &submitted, &started, &finished);
    if (mp_ticket_status(r->ticket, &error) != MP_TIMEOUT || started || !r->patience_ns || sim_get_setup()->late)
        return;
    uint64_t most = submitted + 2 * r->patience_ns + THRASH_LOAD_MS * MS + SIM_PROMPT_NS;
    if (finished > most)
        sim_fail("a request with a patience of %d ms expired after %.0f ms", THRASH_PATIENCE_MS,
                 (double)(finished - submitted) * 1e-6);
}

const sim_special sim_thrash = {.tune = thrash_tune,
                                .script = thrash_script,
                                .begin = thrash_begin,
                                .call = thrash_call,
                                .ended = thrash_ended};

#endif
