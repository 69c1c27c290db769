/* breaker.h: rest for a model whose workers fail again and again.
 *
 *           `threshold` faults within the window          a probe fails
 *   closed -------------------------------------> open <------------------ half-open
 *      ^                                            |     `rest` has passed      ^
 *      |                                            +----------------------------+
 *      +------------------------------ `successes` probes in a row ---------------+
 *
 * Only faults of workers count, never a caller's mistake. Caller's storage; every function is called with its owner's
 * lock held. */
#ifndef MP_REGISTRY_BREAKER_H
#define MP_REGISTRY_BREAKER_H

#include "base/error.h"

enum { MP_BREAKER_FAULTS_MAX = 64 };

typedef enum mp_breaker_state { MP_BREAKER_CLOSED, MP_BREAKER_OPEN, MP_BREAKER_HALF_OPEN } mp_breaker_state;

typedef struct mp_breaker_rule {
    int threshold; /* faults, 1..MP_BREAKER_FAULTS_MAX; 0 = never opens */
    int probes;    /* calls in flight at most while half-open */
    int successes; /* that close it */
    uint64_t window_ns, rest_ns;
} mp_breaker_rule;

typedef struct mp_breaker {
    mp_breaker_state state;
    uint64_t faults_ns[MP_BREAKER_FAULTS_MAX]; /* times of the last ones, a ring */
    int fault_count;                           /* so far, of which the ring keeps the last */
    uint64_t open_until_ns;
    int probing, succeeded; /* while half-open */
    uint32_t epoch;         /* counts openings; a probe of an earlier one says nothing */
} mp_breaker;

/* May a call come in? *probe: what its end is to be told with, 0 = it is none. False: *left_ns until it may be tried
 * again, 0 when probes are under way. */
bool mp_breaker_ask(mp_breaker *breaker, const mp_breaker_rule *rule, uint64_t now_ns, uint32_t *probe,
                    uint64_t *left_ns);
/* A worker had a fault. Returns true when that opened it. */
bool mp_breaker_fault(mp_breaker *breaker, const mp_breaker_rule *rule, uint64_t now_ns);
/* A probe ended: without fault (success), or in another way that says nothing about the workers. Legal with probe 0. */
void mp_breaker_end(mp_breaker *breaker, const mp_breaker_rule *rule, uint32_t probe, bool success);
const char *mp_breaker_name(const mp_breaker *breaker);

#endif
