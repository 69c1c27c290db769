/* sim_pressure.c: worlds in which the machine takes memory, processes or time away. See sim_state.h. */
#include "sim_state.h"

#ifdef MP_SIM

static const uint64_t SECOND = 1000ull * 1000 * 1000;

/* --- kills: another program kills worker processes, often; the model stays up --- */

static const uint64_t KILLS_BACKOFF_MOST = 10ull * 1000 * 1000 * 1000;

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
}

static void kills_call(record *r, mp_submit_options *options) {
    sim_call *call = r->call;
    *options = (mp_submit_options){.priority = 2};
    r->deadline_ns = r->patience_ns = 0;
    call->numeric = call->refused = call->bad_argument = call->alone = false;
    call->innocent = true;
    call->units = r->endless ? 8 : call->units;
    call->streams = percent(50);
    call->base.goes_on = call->streams;
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
        if (sim_now() - began > 2 * KILLS_BACKOFF_MOST)
            sim_fail("a request waited %.0f s after the last kill", (double)(sim_now() - began) * 1e-9);
    }
}

const sim_special sim_kills = {
    .tune = kills_tune, .script = kills_script, .call = kills_call, .finish = kills_finish};

#endif
