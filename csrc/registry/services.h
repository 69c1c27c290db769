/* services.h: the parts that all entries of one registry share. Reference-counted: the registry and every entry own
 * a reference, because tickets, and with them entries, may outlive the registry. */
#ifndef MP_REGISTRY_SERVICES_H
#define MP_REGISTRY_SERVICES_H

#include <stdatomic.h>

#include "registry/cpu_allocator.h"
#include "registry/governor.h"
#include "registry/maintenance.h"
#include "registry/registry.h"

typedef struct mp_entry mp_entry;

typedef enum mp_metric {
#define MP_METRIC(name, meaning) MP_METRIC_##name,
#include "registry/metrics.def"
#undef MP_METRIC
    MP_METRIC_COUNT
} mp_metric;

typedef enum mp_entry_event {
    MP_ENTRY_LOADED,      /* a load succeeded */
    MP_ENTRY_LOAD_FAILED, /* a load failed */
    MP_ENTRY_GONE         /* a removed entry has freed everything */
} mp_entry_event;

enum { MP_BREAKER_FAULTS_MAX = 64 };

typedef struct mp_breaker_rule { /* see faults.h */
    int threshold; /* faults, 1 to MP_BREAKER_FAULTS_MAX; 0 = never opens */
    int probes;    /* maximum number of requests in flight while half-open */
    int successes; /* successful probes that close the breaker */
    uint64_t window_ns, backoff_ns;
} mp_breaker_rule;

typedef struct mp_services {
    _Atomic int references;
    uint64_t number; /* the registry's, unique in the process */
    mp_cpu_allocator *allocator; /* used by the registry only, which sets it to NULL and closes it after the pool */
    mp_pool *pool;               /* NULL once the registry is closed: no worker exists then */
    mp_governor *governor;
    mp_cpu_allocator *allocator_pinned; /* separate reference: spin rules need it until the last ticket is gone */
    mp_maintenance maintenance;
    /* configuration; constant */
    uint64_t step_budget_ns, spin_ns, load_timeout_ns, load_ceiling_ns, stall_timeout_ns, keep_alive_ns, batch_wait_ns,
        patience_ns;
    int max_workers;
    mp_policy policy[MP_CAPABILITY_COUNT];
    bool policy_chosen[MP_CAPABILITY_COUNT]; /* set by the configuration: mp_loader.policy is ignored */
    int queue_capacity[MP_CAPABILITY_COUNT][MP_SERVICE_COUNT];
    mp_breaker_rule breaker;
    mp_chaos_rule chaos;
    bool predictive_scaling, scale_timeout;

    _Atomic int active_workers; /* workers that load or serve */
    _Atomic uint64_t shortage_ns; /* last warning about short memory (mp_entry_explain_shortage) */
    _Atomic uint64_t metrics[MP_METRIC_COUNT];
    /* Called without a lock, on the thread of a worker or of a caller. */
    void (*event)(mp_registry *registry, mp_entry *entry, mp_entry_event event);
    mp_registry *registry; /* valid while an entry has workers */
} mp_services;

static inline uint64_t mp_or_default(uint64_t value, uint64_t otherwise) { return value ? value : otherwise; }
/* Returns INVALID_ARGUMENT for a value out of range. */
mp_status mp_services_check(const mp_registry_config *config, mp_error *error);
/* Returns INVALID_ARGUMENT for a chance outside 0 to 1, or a sum above 1. */
mp_status mp_chaos_check(const mp_chaos_rule *rule, mp_error *error);
/* Fills in the configuration, with defaults. */
void mp_services_configure(mp_services *services, const mp_registry_config *config);

mp_services *mp_services_pin(mp_services *services);
void mp_services_unpin(mp_services *services);

static inline void mp_count(mp_services *services, mp_metric metric, uint64_t n) {
    atomic_fetch_add_explicit(&services->metrics[metric], n, memory_order_relaxed);
}

void mp_services_get_stats(mp_services *services, mp_registry_stats *stats);
/* Counts the end of a request in the one metric for its status. */
void mp_count_end(mp_services *services, mp_status status);

#endif
