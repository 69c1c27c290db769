/* services.c: checks and applies a registry's configuration, and counts metrics. See services.h. */
#include "registry/services.h"

#include <string.h>

#include "base/alloc.h"
#include "base/intervals.h"
#include "base/options.h"
#include "registry/chaos.h"

/* --- configuration --- */

static const char *const policy_names[MP_POLICY_COUNT] = {"default", "shared", "pack", "p2c", "sequential"};

bool mp_policy_from_name(const char *name, mp_policy *policy) {
    for (int i = 1; i < MP_POLICY_COUNT; i++)
        if (strcmp(policy_names[i], name) == 0) {
            *policy = (mp_policy)i;
            return true;
        }
    return false;
}

const char *mp_policy_name(mp_policy policy) { return policy_names[policy]; }

mp_status mp_services_check(const mp_registry_config *config, mp_error *error) {
    for (int i = 0; i < MP_CAPABILITY_COUNT; i++) {
        const mp_capability_row *row = mp_capability_get((mp_capability)i);
        for (int j = 0; j < MP_SERVICE_COUNT; j++)
            if (config->queue_capacity[i][j] < 0)
                return mp_fail(error, MP_INVALID_ARGUMENT,
                               "the queue capacity of %s must be at least 1, or 0 for the default of %d, got %d",
                               row->name, row->queue_capacity[j], config->queue_capacity[i][j]);
        if (config->policy[i] < 0 || config->policy[i] >= MP_POLICY_COUNT)
            return mp_fail(error, MP_INVALID_ARGUMENT, "the policy of %s must be 0 to %d, got %d", row->name,
                           MP_POLICY_COUNT - 1, (int)config->policy[i]);
    }
    if (config->max_workers < 0 || config->max_workers > MP_WORKERS_MAX)
        return mp_fail(error, MP_INVALID_ARGUMENT, "`max_workers` must be 1 to %d, or 0 for the default of 4, got %d",
                       MP_WORKERS_MAX, config->max_workers);
    if (config->batch_wait_ns > MP_BATCH_WAIT_MAX_NS)
        return mp_fail(error, MP_INVALID_ARGUMENT, "`batch_wait` must be at most %.0f ms, got %.3f ms",
                       (double)MP_BATCH_WAIT_MAX_NS * 1e-6, (double)config->batch_wait_ns * 1e-6);
    if (config->breaker_threshold < -1 || config->breaker_threshold > MP_BREAKER_FAULTS_MAX)
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "`breaker_threshold` must be 1 to %d, -1 (never open) or 0 for the default of 5, got %d",
                       MP_BREAKER_FAULTS_MAX, config->breaker_threshold);
    return mp_chaos_check(&config->chaos, error);
}

mp_status mp_chaos_check(const mp_chaos_rule *rule, mp_error *error) {
    const struct {
        const char *name;
        double chance;
    } given[] = {{"fail", rule->fail},
                 {"stall", rule->stall},
                 {"die", rule->die},
                 {"slow", rule->slow},
                 {"memory", rule->memory}};
    double sum = 0;
    for (size_t i = 0; i < sizeof(given) / sizeof(given[0]); i++) {
        if (!(given[i].chance >= 0 && given[i].chance <= 1))
            return mp_fail(error, MP_INVALID_ARGUMENT, "the chaos chance `%s` must be 0 to 1, got %g",
                           given[i].name, given[i].chance);
        sum += given[i].chance;
    }
    if (sum > 1 + 1e-9)
        return mp_fail(error, MP_INVALID_ARGUMENT, "the sum of all chaos chances must be at most 1, got %g", sum);
    return MP_OK;
}

void mp_services_configure(mp_services *services, const mp_registry_config *config) {
    const mp_options *options = mp_options_get();
    services->step_budget_ns = mp_or_default(config->step_budget_ns, MP_STEP_BUDGET_NS);
    services->spin_ns = mp_or_default(config->spin_ns, (uint64_t)options->spin_us * 1000);
    if (services->spin_ns == 1)
        services->spin_ns = 0;
    services->load_timeout_ns = mp_or_default(config->load_timeout_ns, 30000 * MP_MS);
    services->load_ceiling_ns = mp_or_default(config->load_ceiling_ns, 600000 * MP_MS);
    services->stall_timeout_ns = mp_or_default(config->stall_timeout_ns, 30000 * MP_MS);
    services->keep_alive_ns = mp_or_default(config->keep_alive_ns, 300000 * MP_MS);
    services->batch_wait_ns = config->batch_wait_ns;
    services->patience_ns = config->patience_ns;
    services->chaos = config->chaos;
    services->predictive_scaling = config->predictive_scaling;
    services->scale_timeout = config->scale_timeout;
    services->max_workers = config->max_workers ? config->max_workers : 4;
    services->breaker = (mp_breaker_rule){
        .threshold = config->breaker_threshold ? config->breaker_threshold : 5,
        .probes = 3,
        .successes = 3,
        .window_ns = mp_or_default(config->breaker_window_ns, 60000 * MP_MS),
        .backoff_ns = mp_or_default(config->breaker_backoff_ns, 60000 * MP_MS),
    };
    for (int i = 0; i < MP_CAPABILITY_COUNT; i++) {
        const mp_capability_row *row = mp_capability_get((mp_capability)i);
        services->policy[i] = config->policy[i];
        services->policy_chosen[i] = config->policy[i] != MP_POLICY_DEFAULT;
        if (services->policy[i] == MP_POLICY_DEFAULT)
            mp_policy_from_name(row->policy, &services->policy[i]);
        for (int j = 0; j < MP_SERVICE_COUNT; j++)
            services->queue_capacity[i][j] =
                config->queue_capacity[i][j] ? config->queue_capacity[i][j] : row->queue_capacity[j];
    }
}

/* --- life --- */

mp_services *mp_services_pin(mp_services *services) {
    atomic_fetch_add_explicit(&services->references, 1, memory_order_relaxed);
    return services;
}

void mp_services_unpin(mp_services *services) {
    if (atomic_fetch_sub_explicit(&services->references, 1, memory_order_acq_rel) != 1)
        return;
    mp_governor_close(services->governor);
    mp_cpu_allocator_unpin(services->allocator_pinned);
    mp_maintenance_deinit(&services->maintenance);
    mp_free(services);
}

/* --- counting --- */

void mp_count_end(mp_services *services, mp_status status) {
    mp_metric metric = status == MP_OK           ? MP_METRIC_completed
                       : status == MP_TIMEOUT    ? MP_METRIC_timeouts
                       : status == MP_CANCELLED  ? MP_METRIC_cancelled
                       : status == MP_OVERLOADED ? MP_METRIC_queue_full_rejections
                                                 : MP_METRIC_errors;
    mp_count(services, metric, 1);
}

void mp_services_get_stats(mp_services *services, mp_registry_stats *stats) {
    mp_budget *budget = mp_governor_budget(services->governor);
    *stats = (mp_registry_stats){
        .memory_limit = atomic_load(&budget->limit),
        .memory_used = atomic_load(&budget->used),
        .threads = mp_cpu_allocator_threads(services->allocator_pinned),
        .threads_leased = mp_cpu_allocator_leased(services->allocator_pinned),
        .pressure = mp_pressure_name(mp_governor_pressure(services->governor)),
    };
    for (int i = 0; i < MP_TAG_COUNT; i++)
        stats->bytes_by_tag[i] = mp_alloc_bytes((mp_tag)i);
#define MP_METRIC(name, meaning) \
    stats->name = atomic_load_explicit(&services->metrics[MP_METRIC_##name], memory_order_relaxed);
#include "registry/metrics.def"
#undef MP_METRIC
    mp_thread_counts(&stats->threads_created, &stats->threads_joined);
}
