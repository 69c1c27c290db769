/* breaker.c: see breaker.h. */
#include "registry/breaker.h"

#include <assert.h>

#include "base/sys.h"

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

static void open_it(mp_breaker *breaker, const mp_breaker_rule *rule, uint64_t now_ns) {
    breaker->state = MP_BREAKER_OPEN;
    breaker->open_until_ns = mp_sys_after(now_ns, rule->backoff_ns);
    breaker->fault_count = 0;
    breaker->epoch++;
}

bool mp_breaker_fault(mp_breaker *breaker, const mp_breaker_rule *rule, uint64_t now_ns) {
    if (rule->threshold <= 0 || breaker->state == MP_BREAKER_OPEN)
        return false;
    if (breaker->state == MP_BREAKER_HALF_OPEN) {
        open_it(breaker, rule, now_ns);
        return true;
    }
    breaker->faults_ns[breaker->fault_count++ % MP_BREAKER_FAULTS_MAX] = now_ns;
    if (breaker->fault_count < rule->threshold)
        return false;
    uint64_t oldest = breaker->faults_ns[(breaker->fault_count - rule->threshold) % MP_BREAKER_FAULTS_MAX];
    if (now_ns - oldest > rule->window_ns)
        return false;
    open_it(breaker, rule, now_ns);
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
