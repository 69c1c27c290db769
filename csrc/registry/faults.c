/* faults.c: the fault record of an entry. See faults.h. */
#include "registry/faults.h"

#include <assert.h>

#include "base/intervals.h"
#include "base/log.h"
#include "registry/entry.h"

/* The model is broken if as many workers as `death_ns` holds died within this time. */
static const uint64_t DEATHS_WITHIN_MS = 60000;
enum { DEATHS_MAX = sizeof(((mp_faults *)NULL)->death_ns) / sizeof(uint64_t) };
static const uint64_t FORGET_NS = 600ull * 1000 * 1000 * 1000; /* a fingerprint without a further loss */

/* --- states --- */

#define TO(state) (1u << MP_HEALTH_##state)
static const char *const health_names[MP_HEALTH_STATES] = {
    [MP_HEALTH_SOUND] = "sound",
    [MP_HEALTH_FAILED] = "failed",
    [MP_HEALTH_BROKEN] = "broken",
};
static const uint16_t health_legal[MP_HEALTH_STATES] = {
    [MP_HEALTH_SOUND] = TO(FAILED) | TO(BROKEN),
    [MP_HEALTH_FAILED] = TO(FAILED) | TO(SOUND) | TO(BROKEN),
    [MP_HEALTH_BROKEN] = TO(FAILED) | TO(SOUND),
};
#undef TO
const mp_state_machine mp_health_machine = {"health", MP_HEALTH_STATES, health_names, health_legal};

#define TO(state) (1u << MP_RETRY_##state)
static const char *const retry_names[MP_RETRY_STATES] = {
    [MP_RETRY_UNUSED] = "unused",
    [MP_RETRY_SPARED] = "spared",
    [MP_RETRY_USED] = "used",
    [MP_RETRY_EXHAUSTED] = "exhausted",
};
static const uint16_t retry_legal[MP_RETRY_STATES] = {
    [MP_RETRY_UNUSED] = TO(SPARED) | TO(USED),
    [MP_RETRY_SPARED] = TO(EXHAUSTED),
    [MP_RETRY_USED] = TO(EXHAUSTED),
    [MP_RETRY_EXHAUSTED] = 0,
};
#undef TO
const mp_state_machine mp_ticket_retry_machine = {"retry", MP_RETRY_STATES, retry_names, retry_legal};

void mp_entry_set_health(mp_entry *entry, mp_entry_health health) {
    mp_assert_held(&entry->lock);
    if (mp_state_may_enter(&mp_health_machine, entry->services, entry->key, 0, (int)entry->faults.health, (int)health))
        entry->faults.health = health;
}

void mp_ticket_set_retry(mp_ticket *ticket, mp_ticket_retry *retry, mp_ticket_retry next) {
    if (mp_state_may_enter(&mp_ticket_retry_machine, ticket->entry->services, ticket->entry->key, 0, (int)*retry,
                           (int)next))
        *retry = next;
}

/* Returns the state that follows `retry` after a fault, or after an external kill. If it equals `retry`, no retry is
 * left and the fault ends the request. */
static mp_ticket_retry next_retry(mp_ticket_retry retry, bool kill) {
    static const mp_ticket_retry next[MP_RETRY_STATES][2] = {
        /*                       a fault             an external kill */
        [MP_RETRY_UNUSED] =    {MP_RETRY_USED,      MP_RETRY_SPARED},
        [MP_RETRY_SPARED] =    {MP_RETRY_EXHAUSTED, MP_RETRY_EXHAUSTED},
        [MP_RETRY_USED] =      {MP_RETRY_USED,      MP_RETRY_EXHAUSTED},
        [MP_RETRY_EXHAUSTED] = {MP_RETRY_EXHAUSTED, MP_RETRY_EXHAUSTED},
    };
    return next[retry][kill];
}

/* --- the circuit breaker --- */

bool mp_breaker_ask(mp_breaker *breaker, const mp_breaker_rule *rule, uint64_t now_ns, uint32_t *probe,
                    uint64_t *left_ns) {
    *left_ns = *probe = 0;
    if (breaker->state == MP_BREAKER_CLOSED)
        return true;
    if (breaker->state == MP_BREAKER_OPEN) {
        if (now_ns < breaker->open_until_ns) {
            *left_ns = breaker->open_until_ns - now_ns;
            return false;
        }
        breaker->state = MP_BREAKER_HALF_OPEN;
        breaker->probing = breaker->succeeded = 0;
    }
    if (breaker->probing >= rule->probes)
        return false;
    breaker->probing++;
    *probe = breaker->epoch;
    return true;
}

static void breaker_open(mp_breaker *breaker, const mp_breaker_rule *rule, uint64_t now_ns) {
    breaker->state = MP_BREAKER_OPEN;
    breaker->open_until_ns = mp_sys_after(now_ns, rule->backoff_ns);
    breaker->fault_count = 0;
    breaker->epoch++;
}

bool mp_breaker_fault(mp_breaker *breaker, const mp_breaker_rule *rule, uint64_t now_ns) {
    if (rule->threshold <= 0 || breaker->state == MP_BREAKER_OPEN)
        return false;
    if (breaker->state == MP_BREAKER_HALF_OPEN) {
        breaker_open(breaker, rule, now_ns);
        return true;
    }
    breaker->faults_ns[breaker->fault_count++ % MP_BREAKER_FAULTS_MAX] = now_ns;
    if (breaker->fault_count < rule->threshold)
        return false;
    uint64_t oldest = breaker->faults_ns[(breaker->fault_count - rule->threshold) % MP_BREAKER_FAULTS_MAX];
    if (now_ns - oldest > rule->window_ns)
        return false;
    breaker_open(breaker, rule, now_ns);
    return true;
}

void mp_breaker_end(mp_breaker *breaker, const mp_breaker_rule *rule, uint32_t probe, bool success) {
    if (!probe || probe != breaker->epoch || breaker->state != MP_BREAKER_HALF_OPEN)
        return;
    assert(breaker->probing > 0);
    breaker->probing--;
    if (success && ++breaker->succeeded >= rule->successes)
        breaker->state = MP_BREAKER_CLOSED;
}

const char *mp_breaker_name(const mp_breaker *breaker) {
    static const char *const names[] = {"closed", "open", "half-open"};
    return names[breaker->state];
}

/* --- fingerprints --- */

static int quarantine_count(const mp_quarantine *quarantine) {
    return atomic_load_explicit(&quarantine->used, memory_order_relaxed);
}

static void quarantine_set_count(mp_quarantine *quarantine, int used) {
    atomic_store_explicit(&quarantine->used, used, memory_order_release);
}

/* Returns the verdict on the row's request: see mp_quarantine_check. */
static int quarantine_verdict(const mp_quarantine_row *row) {
    int losses = row->alone + row->in_company;
    if (!row->alone || losses < MP_QUARANTINE_FAULTS)
        return losses > 0;
    return MP_QUARANTINE_FAULTS;
}

static void quarantine_remove_row(mp_quarantine *quarantine, mp_quarantine_row *row) {
    int last = quarantine_count(quarantine) - 1;
    *row = quarantine->rows[last];
    quarantine_set_count(quarantine, last);
}

/* Returns the row of a request, or NULL. Clears rows that have expired. */
static mp_quarantine_row *quarantine_find(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns) {
    mp_quarantine_row *found = NULL;
    for (int i = quarantine_count(quarantine) - 1; i >= 0; i--)
        if (now_ns >= mp_sys_after(quarantine->rows[i].last_ns, FORGET_NS))
            quarantine_remove_row(quarantine, &quarantine->rows[i]);
    for (int i = 0; i < quarantine_count(quarantine) && !found; i++)
        if (quarantine->rows[i].fingerprint == fingerprint)
            found = &quarantine->rows[i];
    return found;
}

/* Returns a row for a request that has none. In a full table, replaces the row with the lowest `alone`, among equals
 * the row whose last loss is oldest. Returns NULL if `alone` of every row is greater than that of the new row. */
static mp_quarantine_row *quarantine_make_row(mp_quarantine *quarantine, bool alone) {
    int used = quarantine_count(quarantine);
    if (used < MP_QUARANTINE_ROWS) {
        quarantine_set_count(quarantine, used + 1);
        return &quarantine->rows[used];
    }
    mp_quarantine_row *least = &quarantine->rows[0];
    for (int i = 1; i < used; i++) {
        mp_quarantine_row *row = &quarantine->rows[i];
        if (row->alone < least->alone || (row->alone == least->alone && row->last_ns < least->last_ns))
            least = row;
    }
    return least->alone > alone ? NULL : least;
}

int mp_quarantine_add(mp_quarantine *quarantine, uint64_t fingerprint, bool alone, uint64_t now_ns) {
    int known = 1;
    mp_quarantine_row *row = quarantine_find(quarantine, fingerprint, now_ns);
    if (!row && (row = quarantine_make_row(quarantine, alone)))
        *row = (mp_quarantine_row){.fingerprint = fingerprint};
    if (row) {
        row->last_ns = now_ns;
        row->in_company |= !alone;
        row->alone += alone;
        known = quarantine_verdict(row);
    }
    return known;
}

int mp_quarantine_check(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns) {
    const mp_quarantine_row *row = quarantine_find(quarantine, fingerprint, now_ns);
    int known = row ? quarantine_verdict(row) : 0;
    return known;
}

void mp_quarantine_clear(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns) {
    mp_quarantine_row *row = quarantine_find(quarantine, fingerprint, now_ns);
    if (row) {
        row->in_company = false;
        row->alone -= row->alone > 0;
        if (!row->alone)
            quarantine_remove_row(quarantine, row);
    }
}

bool mp_quarantine_is_empty(const mp_quarantine *quarantine) {
    return atomic_load_explicit(&quarantine->used, memory_order_acquire) == 0;
}

/* --- may it start, may it run? --- */

bool mp_faults_may_start(const mp_entry *entry, uint64_t now_ns) {
    mp_assert_held(&entry->lock);
    return entry->faults.health != MP_HEALTH_BROKEN && now_ns >= entry->faults.spawn_ns;
}

mp_status mp_faults_refusal(mp_entry *entry, mp_ticket *ticket, mp_error *error) {
    mp_assert_held(&entry->lock);
    mp_services *services = entry->services;
    mp_faults *faults = &entry->faults;
    uint64_t now = mp_sys_now_ns(), left_ns;
    if (faults->health == MP_HEALTH_BROKEN || now < faults->retry_ns) {
        *error = faults->failure;
        return error->code;
    }
    if (ticket->faults.probe ||
        mp_breaker_ask(&faults->breaker, &services->breaker, now, &ticket->faults.probe, &left_ns))
        return MP_OK;
    mp_count(services, MP_METRIC_circuit_rejections, 1);
    if (left_ns == 0)
        return mp_fail(error, MP_CIRCUIT_OPEN, "%s: the circuit breaker is half-open after repeated worker faults; "
                       "try again when its %d probe requests have ended", entry->key, services->breaker.probes);
    return mp_fail(error, MP_CIRCUIT_OPEN,
                   "%s: the circuit breaker is open after repeated worker faults; try again in %.1f s", entry->key,
                   (double)left_ns * 1e-9);
}

mp_status mp_faults_screen(mp_entry *entry, mp_ticket *ticket, mp_error *error) {
    mp_assert_not_held(&entry->lock);
    mp_quarantine *quarantine = &entry->faults.quarantine;
    const mp_request *request = ticket->item.request;
    int known = 0;
    if (!mp_quarantine_is_empty(quarantine) && request->fingerprint) {
        uint64_t fingerprint = request->fingerprint(request);
        mp_mutex_lock(&entry->lock);
        known = mp_quarantine_check(quarantine, fingerprint, mp_sys_now_ns());
        mp_mutex_unlock(&entry->lock);
    }
    ticket->faults.quarantined = known > 0;
    if (known < MP_QUARANTINE_FAULTS)
        return MP_OK;
    return mp_fail(error, MP_MODEL,
                   "%s: this request made workers fail %d times and is refused until 10 minutes after the last time; "
                   "change the request, or try again then", entry->key, MP_QUARANTINE_FAULTS);
}

/* --- a step failed --- */

/* True for faults of a worker; false for mistakes of a caller and for lack of memory. */
static bool is_fault(mp_status status) {
    return status == MP_NUMERIC || status == MP_INTERNAL || status == MP_INTEGRITY || status == MP_MODEL ||
           status == MP_RECV;
}

mp_reason mp_faults_reason(mp_status status, const mp_engine *engine) {
    switch (status) {
    case MP_RECV:
        return engine->external_kill ? MP_REASON_KILLED : engine->stalled ? MP_REASON_STALLED : MP_REASON_CRASHED;
    case MP_INTEGRITY:
        return MP_REASON_FILES;
    case MP_MODEL:
        return MP_REASON_MODEL;
    case MP_MEMORY_EXHAUSTED:
        return MP_REASON_MEMORY;
    default:
        return MP_REASON_INTERNAL;
    }
}

static void count_in_breaker(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    const mp_breaker_rule *rule = &entry->services->breaker;
    if (mp_breaker_fault(&entry->faults.breaker, rule, mp_sys_now_ns()))
        mp_log(MP_LOG_WARNING, "%s: the circuit breaker opens for %.0f s after repeated worker faults", entry->key,
               (double)rule->backoff_ns * 1e-9);
}

/* Returns true if the results of a retry can follow the results that the caller may have seen. After a model file
 * changed they cannot: old and new results may come from different files. */
static bool may_follow(const mp_request *request, mp_status status) {
    return (request->resumable && status != MP_INTEGRITY) || !request->seen || !request->seen(request);
}

/* Must hold the lock. Returns true if a request that failed in a step may be tried again, whatever retries it had. */
static bool may_try_again(const mp_entry *entry, const mp_ticket *ticket, mp_status status) {
    mp_assert_held(&entry->lock);
    return entry->shutdown != MP_SHUTDOWN_QUITTING && may_follow(ticket->item.request, status) &&
           !atomic_load_explicit(&ticket->cause, memory_order_relaxed);
}

bool mp_faults_shortage(mp_entry *entry, mp_ticket *ticket) {
    mp_assert_held(&entry->lock);
    if (ticket->faults.had_shortage || !may_try_again(entry, ticket, MP_MEMORY_EXHAUSTED))
        return false;
    ticket->faults.had_shortage = true;
    return true;
}

bool mp_faults_step(mp_entry *entry, mp_ticket *ticket, mp_status status, bool alone, bool external_kill,
                    mp_step_fault *step) {
    mp_assert_held(&entry->lock);
    const mp_request *request = ticket->item.request;
    mp_ticket_faults *faults = &ticket->faults;
    if (!is_fault(status) || (status == MP_NUMERIC && request->tolerant))
        return false;
    /* With these statuses the worker is lost. (For a worker that stalled, mp_worker_abandon notes the loss.) */
    bool lost = (status == MP_INTERNAL || status == MP_RECV) && !external_kill;
    bool refused = lost && mp_faults_lost(entry, ticket, alone);
    mp_count(entry->services, MP_METRIC_worker_faults, !step->counted);
    step->counted = true;
    /* A request that fails again on its retry counts once for the breaker. */
    if (!external_kill && !faults->had_fault && !step->in_breaker) {
        step->in_breaker = true;
        count_in_breaker(entry);
    }
    faults->had_fault |= !external_kill;
    mp_ticket_retry next = next_retry(faults->retry, external_kill && request->resumable);
    /* A retry after NaN is useless: by the numeric contract a retry computes the same bits. */
    bool again = status != MP_NUMERIC && next != faults->retry && !refused && may_try_again(entry, ticket, status);
    if (again)
        mp_ticket_set_retry(ticket, &faults->retry, next);
    return again;
}

/* --- a worker or a load failed --- */

bool mp_faults_lost(mp_entry *entry, const mp_ticket *ticket, bool alone) {
    mp_assert_held(&entry->lock);
    const mp_request *request = ticket->item.request;
    if (!request->fingerprint || mp_quarantine_add(&entry->faults.quarantine, request->fingerprint(request), alone,
                                                   mp_sys_now_ns()) < MP_QUARANTINE_FAULTS)
        return false;
    mp_log(MP_LOG_WARNING,
           "%s: workers failed repeatedly while they computed one request; equal requests are refused for 10 minutes",
           entry->key);
    return true;
}

bool mp_faults_between_steps(mp_entry *entry, mp_ticket *ticket, bool alone, bool external_kill) {
    mp_assert_held(&entry->lock);
    mp_ticket_retry *retry = &ticket->faults.retry_between, next = next_retry(*retry, external_kill);
    if (next != *retry) {
        mp_ticket_set_retry(ticket, retry, next);
        return true;
    }
    if (!external_kill)
        mp_faults_lost(entry, ticket, alone);
    return false;
}

static void double_backoff(uint64_t *backoff_ns) {
    *backoff_ns = *backoff_ns ? *backoff_ns * 2 : MP_BACKOFF_FIRST_NS;
    if (*backoff_ns > MP_BACKOFF_MAX_NS)
        *backoff_ns = MP_BACKOFF_MAX_NS;
}

void mp_faults_load_failed(mp_entry *entry, const mp_error *error) {
    mp_assert_held(&entry->lock);
    mp_faults *faults = &entry->faults;
    faults->load_failure = *error;
    if (faults->health != MP_HEALTH_BROKEN) {
        faults->failure = *error;
        mp_entry_set_health(entry, MP_HEALTH_FAILED);
    }
    double_backoff(&faults->backoff_ns);
    faults->retry_ns = mp_sys_now_ns() + faults->backoff_ns;
    mp_cond_broadcast(&entry->changed);
}

/* A program that kills worker processes, such as the system's OOM killer, is not a fault of the model: the model stays
 * up, and its workers return after a backoff, which leaves the machine time to recover. */
static void note_external_kill(mp_faults *faults, uint64_t now_ns) {
    if (now_ns - faults->killed_ns >= DEATHS_WITHIN_MS * MP_MS)
        faults->kill_backoff_ns = 0;
    double_backoff(&faults->kill_backoff_ns);
    faults->killed_ns = now_ns;
    faults->spawn_ns = now_ns + faults->kill_backoff_ns;
}

void mp_faults_note_death(mp_entry *entry, bool external_kill, const mp_error *error) {
    mp_assert_held(&entry->lock);
    mp_faults *faults = &entry->faults;
    uint64_t now = mp_sys_now_ns(), backoff_ns = 0;
    int lately = 0;
    if (external_kill) {
        note_external_kill(faults, now);
        return;
    }
    faults->death_ns[faults->deaths++ % DEATHS_MAX] = now;
    for (int i = 0; i < DEATHS_MAX && i < faults->deaths; i++)
        lately += now - faults->death_ns[i] < DEATHS_WITHIN_MS * MP_MS;
    for (int i = 0; i < lately; i++)
        double_backoff(&backoff_ns);
    faults->spawn_ns = now + backoff_ns;
    if (lately < DEATHS_MAX || faults->health == MP_HEALTH_BROKEN)
        return;
    mp_entry_set_health(entry, MP_HEALTH_BROKEN);
    mp_fail(&faults->failure, MP_NO_WORKERS, "%s: %d workers failed within %.0f s; no more are started until the model "
            "is loaded again. Last failure: %s", entry->key, lately, (double)DEATHS_WITHIN_MS * 1e-3, error->message);
    mp_log(MP_LOG_ERROR, "%s", faults->failure.message);
}

void mp_faults_worker_ended(mp_entry *entry, const mp_error *fault, bool counted, bool external_kill) {
    mp_assert_held(&entry->lock);
    if (fault->code == MP_INTEGRITY) { /* a model file was changed: the fault of a load, and no death */
        mp_count(entry->services, MP_METRIC_worker_faults, 1);
        count_in_breaker(entry);
        mp_faults_load_failed(entry, fault);
        return;
    }
    /* A fault between steps fails no request, so it is counted here. The breaker counts only faults of requests. */
    mp_count(entry->services, MP_METRIC_worker_faults, !counted);
    mp_faults_note_death(entry, external_kill, fault);
}

/* Returns true if the worker's step has a request that had no fault before: only such a step counts for the breaker, as
 * in mp_faults_step. */
static bool has_first_fault(const mp_worker *worker) {
    for (int i = 0; i < worker->active_count; i++)
        if (worker->active[i]->state == MP_TICKET_STEPPING && !worker->active[i]->faults.had_fault)
            return true;
    return false;
}

void mp_faults_worker_stuck(mp_entry *entry, const mp_worker *worker, bool loading, const mp_error *error) {
    mp_assert_held(&entry->lock);
    if (loading)
        mp_faults_load_failed(entry, error);
    if (worker->in_step) {
        mp_count(entry->services, MP_METRIC_worker_faults, 1);
        if (has_first_fault(worker))
            count_in_breaker(entry);
    }
    mp_faults_note_death(entry, false, error);
}

/* --- recovered --- */

void mp_faults_request_ended(mp_entry *entry, const mp_ticket *ticket, mp_status status) {
    mp_assert_held(&entry->lock);
    const mp_request *request = ticket->item.request;
    mp_quarantine *quarantine = &entry->faults.quarantine;
    mp_breaker_end(&entry->faults.breaker, &entry->services->breaker, ticket->faults.probe, status == MP_OK);
    if (status == MP_OK && !mp_quarantine_is_empty(quarantine) && request->fingerprint)
        mp_quarantine_clear(quarantine, request->fingerprint(request), mp_sys_now_ns());
}

void mp_faults_drop_probe(mp_entry *entry, mp_ticket *ticket) {
    mp_assert_held(&entry->lock);
    mp_breaker_end(&entry->faults.breaker, &entry->services->breaker, ticket->faults.probe, false);
    ticket->faults.probe = 0;
}

void mp_faults_forget_load(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    entry->faults.retry_ns = 0;
    if (entry->faults.health == MP_HEALTH_FAILED)
        mp_entry_set_health(entry, MP_HEALTH_SOUND);
}

void mp_faults_loaded(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    entry->faults.backoff_ns = 0;
    mp_faults_forget_load(entry);
}

void mp_faults_forget_deaths(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    mp_faults *faults = &entry->faults;
    if (faults->health == MP_HEALTH_BROKEN) {
        if (faults->retry_ns)
            faults->failure = faults->load_failure;
        mp_entry_set_health(entry, faults->retry_ns ? MP_HEALTH_FAILED : MP_HEALTH_SOUND);
    }
    faults->spawn_ns = faults->kill_backoff_ns = 0;
    faults->deaths = 0;
}

void mp_faults_fork_child(mp_entry *entry) { entry->faults.breaker = (mp_breaker){.state = MP_BREAKER_CLOSED}; }

/* --- describe --- */

const char *mp_faults_breaker_name(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    return mp_breaker_name(&entry->faults.breaker);
}
