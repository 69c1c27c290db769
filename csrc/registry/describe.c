/* describe.c: the state and the figures of an entry for display, and the models that hold memory for messages. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "registry/upkeep.h"

/* --- one entry --- */

/* Must hold the lock. Returns the value for mp_entry_info.state. */
static const char *state_of(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    bool serves = false, busy = false, loading = entry->starting > 0;
    bool leaving = false;
    for (int i = 0; i < entry->worker_count; i++) {
        mp_worker_state state = entry->workers[i]->state;
        /* count requests: `state` changes only some time after the last request ended */
        busy |= entry->workers[i]->active_count > 0;
        serves |= mp_worker_serves(entry->workers[i]) && !entry->workers[i]->leave;
        loading |= state == MP_WORKER_SPAWNING || state == MP_WORKER_LOADING;
        leaving |= state == MP_WORKER_EVICTING || (entry->resident && mp_worker_is_leaving(entry->workers[i]));
    }
    if (serves && mp_entry_must_unload(entry))
        return "evicting"; /* a caller of mp_entry_load waits for the next load */
    if (serves)
        return busy ? "busy" : "ready";
    if (loading)
        return "loading";
    if (entry->unload == MP_UNLOAD_RUNNING)
        return "evicting";
    if (entry->faults.health != MP_HEALTH_SOUND) /* also while the worker whose load failed is leaving */
        return "failed";
    return leaving ? "evicting" : "cold";
}

const char *mp_reason_name(mp_reason reason) {
    static const char *const names[MP_REASON_COUNT] = {"killed", "crashed", "stalled",    "internal", "changed_files",
                                                       "model",  "memory",  "keep_alive", "call",     "fault"};
    return names[reason];
}

void mp_entry_describe(mp_entry *entry, mp_entry_info *info) {
    mp_assert_not_held(&entry->lock);
    *info = (mp_entry_info){.capability = entry->capability, .policy = entry->policy};
    memcpy(info->key, entry->key, sizeof(info->key));
    mp_mutex_lock(&entry->lock);
    uint64_t now = mp_sys_now_ns(), newest_ns = 0;
    info->state = state_of(entry);
    info->breaker = mp_faults_breaker_name(entry);
    info->dead = entry->abandoned;
    info->queued = entry->queue.count;
    memcpy(info->waiting, entry->queue.counts, sizeof(info->waiting));
    memcpy(info->capacity, entry->queue.capacity, sizeof(info->capacity));
    for (int kind = 0; kind < MP_SERVICE_COUNT; kind++)
        info->full_ns[kind] = mp_queue_full_ns(&entry->queue, kind, now);
    info->running = mp_entry_running(entry);
    info->pinned = entry->pinned;
    info->accepted = entry->accepted;
    info->keep_alive_ns = entry->keep_alive_ns;
    info->latency = entry->latency;
    info->units_in = entry->units_in;
    info->units_out = entry->units_out;
    info->rows = atomic_load_explicit(&entry->rows, memory_order_relaxed);
    info->reasons = entry->reasons;
    info->last_error = entry->last_error;
    for (int i = 0; i < entry->worker_count; i++) {
        const mp_worker *worker = entry->workers[i];
        bool serves = mp_worker_serves(worker) || worker->state == MP_WORKER_EVICTING;
        info->worker[info->worker_count++] = (mp_worker_info){
            .id = worker->id,
            .node = mp_cpu_allocator_node_number(entry->services->allocator_pinned, worker->home),
            .state = mp_worker_state_name(worker->state),
            .running = worker->active_count,
            .served = worker->served,
            .busy_ns = worker->step_ns,
            .idle_ns = mp_worker_idles(worker) ? now - worker->idle_since_ns : 0,
            .engine_bytes = serves ? worker->held_bytes : 0,
            .predicted_bytes = worker->engine_bytes,
            .process = serves ? worker->process : 0,
        };
        info->workers += serves;
        info->busy += worker->active_count > 0;
        info->engine_bytes += serves ? worker->held_bytes : 0;
        info->states.state_bytes += serves ? worker->states.state_bytes : 0;
        info->states.snapshot_bytes += serves ? worker->states.snapshot_bytes : 0;
        info->states.snapshots += serves ? worker->states.snapshots : 0;
        if (worker->idle_since_ns > newest_ns)
            newest_ns = worker->idle_since_ns;
    }
    if (entry->services->predictive_scaling)
        info->arrivals = mp_forecast_rate(&entry->forecast, now);
    info->predicted = mp_dispatch_predicted(entry, now);
    info->idle_ns = info->workers && !info->busy ? now - newest_ns : 0;
    mp_resident *resident = entry->resident ? mp_entry_borrow(entry) : NULL;
    mp_mutex_unlock(&entry->lock);
    info->errors = atomic_load_explicit(&entry->errors, memory_order_relaxed);
    info->model = resident ? resident->model : NULL;
    info->model_bytes = resident ? resident->model->ops->bytes(resident->model) : 0;
    info->predicted_bytes = resident ? resident->predicted_bytes : 0;
    info->load_ns = resident ? resident->load_ns : 0;
}

/* --- the models that hold memory --- */

/* Must hold the lock. Returns what keeps the model in memory. */
static const char *hold_of(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    bool loads = entry->starting > 0, used = entry->queue.count || mp_entry_running(entry);
    for (int i = 0; i < entry->worker_count; i++)
        loads |= entry->workers[i]->state == MP_WORKER_SPAWNING || entry->workers[i]->state == MP_WORKER_LOADING;
    if (entry->unload != MP_UNLOAD_NONE || entry->removal != MP_REMOVAL_NONE)
        return "being unloaded";
    if (loads && !entry->resident)
        return "loading";
    if (used)
        return entry->pinned ? "in use, pinned" : "in use";
    if (entry->pinned)
        return "pinned";
    return entry->abandoned ? "not responding" : entry->held ? "being replaced" : "idle";
}

typedef struct holder {
    const mp_entry *entry;
    uint64_t bytes;
    const char *hold;
} holder;

size_t mp_upkeep_holders(mp_entry **entries, int count, char *text, size_t size) {
    enum { MOST = 8 };
    holder holders[MOST + 1];
    int found = 0;
    size_t length = 0;
    for (int i = 0; i < count; i++) { /* the largest ones, by insertion */
        mp_entry *entry = entries[i];
        mp_mutex_lock(&entry->lock);
        holder next = {entry, atomic_load(&entry->account.used) + atomic_load(&entry->account.reserved) +
                       atomic_load(&entry->charged), hold_of(entry)};
        mp_mutex_unlock(&entry->lock);
        int at = next.bytes ? found : MOST;
        for (; at > 0 && at <= found && holders[at - 1].bytes < next.bytes; at--)
            holders[at] = holders[at - 1];
        if (at >= MOST)
            continue;
        holders[at] = next;
        found += found < MOST;
    }
    for (int i = 0; i < found; i++) {
        char bytes[MP_SIZE_TEXT];
        int more = snprintf(text + length, size - length, "%s%s %s (%s)", i ? ", " : "",
                            mp_entry_key(holders[i].entry), mp_size_text(bytes, holders[i].bytes), holders[i].hold);
        if (more < 0 || (size_t)more >= size - length) { /* name no model in part */
            text[length] = 0;
            break;
        }
        length += (size_t)more;
    }
    return length;
}
