/* faults.h: the fault record of an entry: every failure of a worker, of a load and of a request's step, and what
 * follows from it. Only faults.c changes the record.
 *
 * Only faults of workers count, never mistakes of callers, lack of memory or cancellations.
 *
 *   fault                           recorded                         what follows
 *   a step fails for a request:     metric worker_faults, once per   the request is tried once more, if its results can
 *   NUMERIC, INTERNAL, INTEGRITY,   step; the breaker, if it is the  follow those that the caller has seen; never after
 *   MODEL, RECV                     first fault of one of the        NUMERIC. At `breaker_threshold` faults within the
 *                                   step's requests                  window, the breaker opens: CIRCUIT_OPEN
 *   the worker is lost in a step    also the request's fingerprint,  a suspect takes its steps alone. Two losses, one
 *   (INTERNAL, RECV)                for 10 minutes                   of them alone: equal requests get MODEL
 *   a worker is lost between steps  retry_between of the request     the request is tried once more; then as above
 *   a worker dies                   death_ns                         no worker starts for 0.1 s, doubling up to 10 s.
 *                                                                    At five deaths within 60 s: BROKEN, NO_WORKERS
 *   another program kills the       killed_ns                        a backoff of its own; never the breaker, a
 *   worker's process                                                 fingerprint or BROKEN; one more try for a request
 *                                                                    that can continue where it was
 *   a load fails, or a model file   failure, retry_ns, backoff_ns    FAILED: requests get the failure for 0.1 s,
 *   was changed                                                      doubling up to 10 s; then one starts the next load
 *   a step finds no memory          the request's retry, if no       the request is tried again
 *                                   memory is coming
 *
 *   recovery                                  forgets
 *   a request completes                       one loss of its fingerprint; three probes close the breaker
 *   a load succeeds                           FAILED and its backoff
 *   an eviction                               FAILED
 *   a caller asks for a load                  BROKEN and the backoff after deaths, not the failure of an earlier load
 *   10 minutes without a further loss         a fingerprint
 *
 * Must hold the entry's lock in every function that takes an entry, except mp_faults_screen. */
#ifndef MP_REGISTRY_FAULTS_H
#define MP_REGISTRY_FAULTS_H

#include <stdatomic.h>

#include "registry/services.h"
#include "registry/state_machine.h"

typedef struct mp_worker mp_worker;

/* --- the records of an entry --- */

/* health: earlier failures, because of which requests are refused.
 *
 *              +--+
 *              |  v
 *   SOUND <-> FAILED <--> BROKEN
 *     ^                     ^
 *     +---------------------+
 *
 *   FAILED  The last load failed, or a file of the loaded model changed. Requests are refused with `failure` until
 *           `retry_ns`; the first request after that starts a load. Becomes SOUND when a load succeeds or the model is
 *           evicted.
 *   BROKEN  Workers died too often. Requests are refused with `failure` (NO_WORKERS) and no worker starts, until a
 *           caller asks for a load. That call does not clear the failure of an earlier load: BROKEN becomes FAILED if
 *           `retry_ns` is set, else SOUND.
 *
 * Health is independent of `resident`: a loaded model may be FAILED (its last worker could not create an engine) or
 * BROKEN (other workers still serve). */
typedef enum mp_entry_health {
    MP_HEALTH_SOUND,
    MP_HEALTH_FAILED,
    MP_HEALTH_BROKEN,
    MP_HEALTH_STATES
} mp_entry_health;
extern const mp_state_machine mp_health_machine;

/* The circuit breaker.
 *
 *            `threshold` faults within the window          a fault
 *   CLOSED -------------------------------------> OPEN <------------------ HALF-OPEN
 *      ^                                            |   `backoff_ns` has passed    ^
 *      |                                            +---------------------------+
 *      +------------------------------ `successes` successful probes ------------+
 *
 * Each request counts once: its retry does not count again. */
typedef enum mp_breaker_state { MP_BREAKER_CLOSED, MP_BREAKER_OPEN, MP_BREAKER_HALF_OPEN } mp_breaker_state;

typedef struct mp_breaker {
    mp_breaker_state state;
    uint64_t faults_ns[MP_BREAKER_FAULTS_MAX]; /* ring buffer: times of the last faults */
    int fault_count;                           /* faults since the last opening; `faults_ns` has the last of them */
    uint64_t open_until_ns;
    int probing, succeeded; /* used while half-open */
    uint32_t epoch;         /* counts openings: a probe of an earlier epoch is ignored */
} mp_breaker;

/* Fingerprints of requests in whose steps workers were lost.
 *
 * A request that was not alone in the step may be innocent. All such losses together count as one and make the request
 * a suspect. A suspect takes its steps alone, so that the next loss identifies the culprit; if the suspect succeeds,
 * the suspicion is withdrawn. Each loss in which the request was alone counts as one; a success cancels one of these. A
 * process that was killed by another program does not count: a system that runs out of memory chooses the process by
 * its size, not by its request.
 *
 * A request that counts two losses, at least one of them alone, is refused until 10 minutes after the last loss: it
 * would otherwise take down every worker that serves it. */
enum { MP_QUARANTINE_ROWS = 256, MP_QUARANTINE_FAULTS = 2 }; /* enough rows for all requests of a step */

typedef struct mp_quarantine_row {
    uint64_t fingerprint, last_ns;
    int alone; /* losses in steps of this request alone */
    bool in_company; /* at least one loss in a step with other requests */
} mp_quarantine_row;

typedef struct mp_quarantine {
    _Atomic int used; /* rows in use; mp_faults_screen reads it without the lock */
    mp_quarantine_row rows[MP_QUARANTINE_ROWS];
} mp_quarantine;

typedef struct mp_faults { /* zeroed: no fault; guarded by: the entry's lock */
    mp_entry_health health;
    uint64_t retry_ns;     /* requests are refused until this time; 0 = the last load did not fail */
    uint64_t backoff_ns;   /* doubles with every load that fails; 0 = the last load succeeded */
    uint64_t spawn_ns;     /* no worker starts before this time: the backoff after worker deaths */
    uint64_t death_ns[5];  /* ring buffer: when the last workers died, except by external kills */
    int deaths;
    uint64_t killed_ns, kill_backoff_ns; /* the last death by an external kill, and the backoff after it */
    mp_breaker breaker;
    mp_error failure;      /* why `health` is not MP_HEALTH_SOUND */
    mp_error load_failure; /* the last failed load or changed file, also while `health` is BROKEN */
    mp_quarantine quarantine;
} mp_faults;

/* --- the records of a request --- */

/* mp_ticket_faults.retry says which faults of its steps the request may still survive, and .retry_between says which
 * losses of a worker between steps:
 *
 *           fault
 *   UNUSED -------> USED
 *     |              |
 *     | kill         | kill
 *     v    either    v
 *   SPARED -----> EXHAUSTED
 *
 *   fault  a step failed for a reason that a retry may avoid, or a worker was lost between steps. In USED it ends the
 *          request.
 *   kill   another program killed the worker process (mp_engine.external_kill). A kill in a step is a fault if the
 *          request cannot continue where it was (mp_request.resumable).
 *
 *   In EXHAUSTED both end the request. */
typedef enum mp_ticket_retry {
    MP_RETRY_UNUSED,
    MP_RETRY_SPARED,
    MP_RETRY_USED,
    MP_RETRY_EXHAUSTED,
    MP_RETRY_STATES
} mp_ticket_retry;
extern const mp_state_machine mp_ticket_retry_machine;

typedef struct mp_ticket_faults { /* part of mp_ticket; used by the thread that holds the ticket */
    mp_ticket_retry retry, retry_between;
    uint32_t probe;   /* breaker epoch of a probe request; 0 = not a probe */
    bool had_fault;   /* a worker had a fault in a step with it, not because of an external kill */
    bool quarantined; /* a worker was lost in a step with a request of this fingerprint */
    bool had_shortage; /* it was tried again after it found no memory, and none was to come */
} mp_ticket_faults;

/* True for a suspect: this request, or one with its fingerprint, may have made a worker fail. A suspect takes its steps
 * alone. */
static inline bool mp_faults_suspected(const mp_ticket_faults *faults) {
    return faults->quarantined || faults->retry != MP_RETRY_UNUSED;
}

/* --- may this entry start a worker, may this request run? --- */

/* True unless the entry is BROKEN or the backoff after a death has not ended. */
bool mp_faults_may_start(const mp_entry *entry, uint64_t now_ns);
/* Returns why a request is refused now: the failure of the last load, BROKEN, or CIRCUIT_OPEN. On success the request
 * may have become a probe of the breaker: end it with mp_faults_request_ended or mp_faults_drop_probe. */
mp_status mp_faults_refusal(mp_entry *entry, mp_ticket *ticket, mp_error *error);
/* Must not hold the lock; only the thread that holds the ticket may call it. Returns MP_MODEL if equal requests are
 * refused. Otherwise records whether the request is a suspect. */
mp_status mp_faults_screen(mp_entry *entry, mp_ticket *ticket, mp_error *error);

/* --- a worker failed --- */

/* Returns the reason of a worker's death or of a retry: `status` of the step or of the worker, and its engine. */
mp_reason mp_faults_reason(mp_status status, const mp_engine *engine);
typedef struct mp_step_fault { bool counted, in_breaker; } mp_step_fault; /* {0} before the first failed request */
/* A step failed for this request. `alone`: no other request was in the step. `external_kill`: another program killed
 * the worker's process. Returns true if the request is to be tried again. A step that fails for several requests counts
 * as one fault. */
bool mp_faults_step(mp_entry *entry, mp_ticket *ticket, mp_status status, bool alone, bool external_kill,
                    mp_step_fault *step);
/* A step found no memory for this request, which is not a worker fault, and mpool can free none. Returns true if the
 * request is to be tried again: once, because other programs may free some. */
bool mp_faults_shortage(mp_entry *entry, mp_ticket *ticket);
/* A worker was lost between steps, with this request among those it was about to take. Returns true if the request is
 * to be tried again: one request must not take down one worker after the other. */
bool mp_faults_between_steps(mp_entry *entry, mp_ticket *ticket, bool alone, bool external_kill);
/* A worker was lost in a step with this request, except by an external kill. Returns true if equal requests are refused
 * from now on. mp_faults_step and mp_faults_between_steps call this. */
bool mp_faults_lost(mp_entry *entry, const mp_ticket *ticket, bool alone);
/* A worker ends because of `fault`. `counted`: requests failed with it, so mp_faults_step has counted it. */
void mp_faults_worker_ended(mp_entry *entry, const mp_error *fault, bool counted, bool external_kill);
/* A worker makes no progress and is about to be abandoned. `loading`: in the load of the model. */
void mp_faults_worker_stuck(mp_entry *entry, const mp_worker *worker, bool loading, const mp_error *error);
/* A load failed: requests are refused until the end of the backoff. A BROKEN entry stays BROKEN and keeps the failure
 * that broke it: that is the first cause, and says how to start the model again. */
void mp_faults_load_failed(mp_entry *entry, const mp_error *error);

/* --- recovered --- */

/* A request has its terminal status: ends its probe, and withdraws suspicions if it completed. */
void mp_faults_request_ended(mp_entry *entry, const mp_ticket *ticket, mp_status status);
/* A request was refused after it had become a probe: another one may take its place. */
void mp_faults_drop_probe(mp_entry *entry, mp_ticket *ticket);
void mp_faults_loaded(mp_entry *entry);         /* a load, of the model or of a worker's engine, succeeded */
void mp_faults_forget_load(mp_entry *entry);    /* forgets a failed load; a BROKEN entry stays BROKEN */
void mp_faults_forget_deaths(mp_entry *entry);  /* a caller asks for the model in spite of earlier deaths */
void mp_faults_fork_child(mp_entry *entry);     /* a child's breaker is closed; no lock, in the child's only thread */

/* --- describe --- */

const char *mp_faults_breaker_name(const mp_entry *entry); /* "closed", "open" or "half-open" */

/* --- the tables, for faults.c and its tests --- */

void mp_entry_set_health(mp_entry *entry, mp_entry_health health); /* refuses an illegal transition */
void mp_faults_note_death(mp_entry *entry, bool external_kill, const mp_error *error);
/* `retry`: &ticket->faults.retry or .retry_between. Refuses an illegal transition. */
void mp_ticket_set_retry(mp_ticket *ticket, mp_ticket_retry *retry, mp_ticket_retry next);
/* Returns true if a request may enter; *probe then receives the value for mp_breaker_end (0 = not a probe). If it
 * returns false, *left_ns is the time until a request may enter as a probe, or 0 if the maximum number of probes is in
 * flight. */
bool mp_breaker_ask(mp_breaker *breaker, const mp_breaker_rule *rule, uint64_t now_ns, uint32_t *probe,
                    uint64_t *left_ns);
/* Counts a fault of a worker. Returns true if that opened the breaker. */
bool mp_breaker_fault(mp_breaker *breaker, const mp_breaker_rule *rule, uint64_t now_ns);
/* Ends the probe. `success`: its request completed. A probe that ends in another way counts neither for nor against the
 * workers; for a fault of a worker, call mp_breaker_fault too. Does nothing if `probe` is 0 or of an earlier epoch. */
void mp_breaker_end(mp_breaker *breaker, const mp_breaker_rule *rule, uint32_t probe, bool success);
const char *mp_breaker_name(const mp_breaker *breaker);
/* Records a worker that was lost with this request. Returns the verdict, as mp_quarantine_check. */
int mp_quarantine_add(mp_quarantine *quarantine, uint64_t fingerprint, bool alone, uint64_t now_ns);
/* Returns the verdict: 0 = nothing is known; 1 = a suspect; MP_QUARANTINE_FAULTS = refuse it. */
int mp_quarantine_check(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns);
/* Call when a request with this fingerprint succeeded. */
void mp_quarantine_clear(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns);
bool mp_quarantine_is_empty(const mp_quarantine *quarantine);

#endif
