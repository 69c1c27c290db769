/* services.c: see services.h. */
#include "registry/services.h"

#include "base/alloc.h"

mp_services *mp_services_pin(mp_services *services) {
    atomic_fetch_add_explicit(&services->references, 1, memory_order_relaxed);
    return services;
}

void mp_services_unpin(mp_services *services) {
    if (atomic_fetch_sub_explicit(&services->references, 1, memory_order_acq_rel) != 1)
        return;
    mp_governor_close(services->governor);
    mp_cores_unpin(services->cores_seen);
    mp_maintenance_deinit(&services->maintenance);
    mp_quarantine_deinit(&services->quarantine);
    mp_free(services);
}

void mp_count_end(mp_services *services, mp_status status) {
    mp_metric metric = status == MP_OK           ? MP_METRIC_completed
                       : status == MP_TIMEOUT    ? MP_METRIC_timeouts
                       : status == MP_CANCELLED  ? MP_METRIC_cancelled
                       : status == MP_OVERLOADED ? MP_METRIC_queue_full_rejections
                                                 : MP_METRIC_errors;
    mp_count(services, metric, 1);
}
