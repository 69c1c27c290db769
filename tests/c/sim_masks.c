/* sim_masks.c: worlds of requests that wait for grammar masks. One thread provides the masks of all requests: late,
 * in any order, sometimes with a wake-up without a mask, never for some requests, and also for requests that have
 * ended. In the world `lost`, the workers are processes, which are killed or fail while they serve requests of all
 * kinds. See sim_state.h. */
#include "sim_state.h"

#ifdef MP_SIM

static const uint64_t MS = 1000 * 1000;

typedef struct masked {
    mp_ticket *ticket; /* pinned by masks_submitted */
    sim_call *call;
    bool never;
} masked;

static struct {
    masked calls[RECORDS];
    int count, pace;
    uint64_t pause_ns;
    bool over;
    mp_thread thread;
} masks;

/* Returns false if the request has ended. */
static bool provide(const masked *m) {
    if (mp_ticket_done(m->ticket)) {
        if (percent(50))
            mp_ticket_wake(m->ticket);
        return false;
    }
    if (!m->never && m->call->masks == m->call->done && percent(masks.pace))
        m->call->masks++;
    else if (!percent(10))
        return true;
    sim_yield();
    mp_ticket_wake(m->ticket);
    return true;
}

static void provide_masks(void *arg) {
    (void)arg;
    while (!masks.over || masks.count) {
        mp_sys_sleep_ns(1 + sim_below(masks.pause_ns));
        for (int left = masks.count; left; left--) {
            int at = of(masks.count);
            masked m = masks.calls[at];
            if (provide(&m))
                continue;
            masks.calls[at] = masks.calls[--masks.count];
            mp_ticket_release(m.ticket);
            if (!masks.count)
                break;
        }
    }
}

static void masks_begin(void) {
    mp_error error;
    masks.count = 0;
    masks.over = false;
    masks.pace = 20 + of(80);
    masks.pause_ns = percent(50) ? MS / 4 : 4 * MS;
    SIM_CHECK(mp_thread_start(&masks.thread, "masks", provide_masks, NULL, &error) == MP_OK);
}

static void masks_script(sim_model *model) {
    model->load_ns /= 4;
    if (percent(50))
        model->step_ns = 0;
}

static void masks_call(record *r, mp_submit_options *options) {
    if (r->endless || percent(25))
        return;
    r->call->masked = true;
    r->call->masks = 1; /* the first mask comes with the request */
    if (!percent(15))
        return;
    r->endless = true; /* must end by its deadline: another thread may wait for a request behind it */
    r->deadline_ns = options->deadline_ns = sim_now() + 1 + sim_below(30 * MS);
}

static void masks_submitted(record *r) {
    if (!r->call->masked)
        return;
    SIM_CHECK(masks.count < RECORDS);
    masks.calls[masks.count++] = (masked){.ticket = mp_ticket_pin(r->ticket), .call = r->call, .never = r->endless};
}

/* Checked while all threads wait, because the deadline check every 50 ms would hide a lost wake-up. */
static void masks_rest(void) {
    for (int i = 0; i < masks.count; i++) {
        const sim_call *call = masks.calls[i].call;
        if (call->waits && *call->parked && call->masks > call->done)
            sim_fail("a mask was provided, and the worker that waits for it sleeps");
    }
}

static void masks_finish(void) {
    masks.over = true;
    mp_thread_join(&masks.thread);
}

const sim_special sim_masks = {.script = masks_script,
                               .begin = masks_begin,
                               .call = masks_call,
                               .submitted = masks_submitted,
                               .rest = masks_rest,
                               .finish = masks_finish};

/* --- lost --- */

static void lost_tune(mp_registry_config *config) {
    config->breaker_threshold = percent(50) ? -1 : 5 + of(20);
    config->breaker_window_ns = 1000 * MS;
    config->breaker_backoff_ns = MS + sim_below(50 * MS);
    config->max_workers = 1 + of(3);
    config->keep_alive_ns = MP_FOREVER;
    fakes.processes = fakes.whole = true;
    w.files_change = percent(50);
}

static void lost_script(sim_model *model) {
    masks_script(model);
    model->loses = percent(70) ? of(12) : 0;
    model->kills = 4;
    model->step_units = 1;
}

static void lost_begin(void) {
    w.crashes = true;
    masks_begin();
}

static void lost_call(record *r, mp_submit_options *options) {
    sim_call *call = r->call;
    options->keep_alive_ns = 0;
    masks_call(r, options);
    call->keeps_state = percent(50);
    call->internal = percent(10) ? 1 + of(2) : 0;
    call->internal_from = percent(50) ? (uint32_t)of((int)call->units) : 0;
    call->numeric = false;
    call->streams = call->masked || percent(50);
    call->base.resumable = call->masked || (call->streams && percent(80));
    call->spoils = w.files_change && percent(30);
    call->innocent = !call->internal;
}

/* Compares the counts of retries and preemptions with those of the fakes. They may differ by requests that ended before
 * an engine admitted them again. */
static void lost_finish(void) {
    mp_registry_stats stats;
    masks_finish();
    mp_registry_get_stats(w.registry, &stats);
    if (stats.retries < (uint64_t)fakes.again)
        sim_fail("%llu retries were counted, there were %d", (unsigned long long)stats.retries, fakes.again);
    if (stats.preemptions > (uint64_t)fakes.given_way)
        sim_fail("%llu preemptions were counted, there were %d", (unsigned long long)stats.preemptions,
                 fakes.given_way);
}

const sim_special sim_lost = {.tune = lost_tune,
                              .script = lost_script,
                              .begin = lost_begin,
                              .call = lost_call,
                              .submitted = masks_submitted,
                              .rest = masks_rest,
                              .finish = lost_finish};

#endif
