/* breaker.h: a circuit breaker that refuses requests to a model whose workers fail repeatedly.
 *
 *            `threshold` faults within the window          a fault
 *   CLOSED -------------------------------------> OPEN <------------------ HALF-OPEN
 *      ^                                            |   `backoff_ns` has passed    ^
 *      |                                            +---------------------------+
 *      +------------------------------ `successes` successful probes ------------+
 *
 * Only faults of workers count, never mistakes of callers, and each request counts once: its retry does not count
 * again. Caller's storage. Must hold the owner's lock in every function. */
#ifndef MP_REGISTRY_BREAKER_H
#define MP_REGISTRY_BREAKER_H

#include "base/error.h"

enum { MP_BREAKER_FAULTS_MAX = 64 };

typedef enum mp_breaker_state { MP_BREAKER_CLOSED, MP_BREAKER_OPEN, MP_BREAKER_HALF_OPEN } mp_breaker_state;

typedef struct mp_breaker_rule {
    int threshold; /* faults, 1 to MP_BREAKER_FAULTS_MAX; 0 = never opens */
    int probes;    /* maximum number of requests in flight while half-open */
    int successes; /* successful probes that close the breaker */
    uint64_t window_ns, backoff_ns;
} mp_breaker_rule;

typedef struct mp_breaker {
    mp_breaker_state state;
    uint64_t faults_ns[MP_BREAKER_FAULTS_MAX]; /* ring buffer: times of the last faults */
    int fault_count;                           /* faults since the last opening; `faults_ns` has the last of them */
    uint64_t open_until_ns;
    int probing, succeeded; /* used while half-open */
    uint32_t epoch;         /* counts openings: a probe of an earlier epoch is ignored */
} mp_breaker;

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
/* Returns the name of the state: "closed", "open" or "half-open". */
const char *mp_breaker_name(const mp_breaker *breaker);

#endif
