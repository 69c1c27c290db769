/* capability.c: look-up of the rows of capabilities.def, and progress reports of a load. */
#include "models/capability.h"

#include <stdatomic.h>
#include <string.h>

#include "models/engine.h"

static const mp_capability_row rows[MP_CAPABILITY_COUNT] = {
#define MP_CAPABILITY(NAME, name, queue, bulk, policy) {name, {queue, bulk}, policy},
#include "models/capabilities.def"
#undef MP_CAPABILITY
};

const mp_capability_row *mp_capability_get(mp_capability capability) { return &rows[capability]; }

bool mp_capability_from_name(const char *name, mp_capability *capability) {
    for (int i = 0; i < MP_CAPABILITY_COUNT; i++)
        if (strcmp(rows[i].name, name) == 0) {
            *capability = (mp_capability)i;
            return true;
        }
    return false;
}

mp_state_use mp_prefix_state_use(const mp_prefix_counters *prefix) {
    if (!prefix)
        return (mp_state_use){0};
    return (mp_state_use){atomic_load_explicit(&prefix->state_bytes, memory_order_relaxed),
                          atomic_load_explicit(&prefix->snapshot_bytes, memory_order_relaxed),
                          atomic_load_explicit(&prefix->snapshots, memory_order_relaxed)};
}

void mp_progress_set(mp_progress *progress, const char *stage, uint32_t percent) {
    if (!progress)
        return;
    atomic_store_explicit(&progress->stage, stage, memory_order_relaxed);
    atomic_store_explicit(&progress->percent, percent, memory_order_relaxed);
    atomic_store_explicit(&progress->beat_ns, mp_sys_now_ns(), memory_order_release);
}

void mp_progress_part(mp_progress *progress, const char *stage, uint64_t done, uint64_t total) {
    mp_progress_set(progress, stage, (uint32_t)(100 * done / total));
}
