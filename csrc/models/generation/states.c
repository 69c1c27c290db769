#include "models/generation/states.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

void mp_states_init(mp_states *states, size_t bytes, size_t log_bytes, mp_budget *budget, uint32_t percent,
                    mp_prefix_counters *counters) {
    *states = (mp_states){.percent = percent, .counters = counters};
    mp_kv_arena_init(&states->states, bytes, budget);
    mp_kv_arena_init(&states->logs, log_bytes, budget);
}

void mp_states_deinit(mp_states *states) {
    uint64_t bytes = 0;
    while (mp_snapshot_evict(states, &bytes))
        ;
    mp_states_trim(states);
    *states = (mp_states){0};
}

void mp_states_trim(mp_states *states) {
    assert(states->count == 0);
    mp_free(states->snapshots);
    mp_free(states->of_block);
    states->snapshots = NULL;
    states->of_block = NULL;
    states->capacity = states->blocks = 0;
    if (states->states.bytes == 0)
        mp_kv_arena_deinit(&states->states);
    if (states->logs.bytes == 0)
        mp_kv_arena_deinit(&states->logs);
}

uint64_t mp_states_bytes(const mp_states *states) { return states->states.bytes + states->logs.bytes; }

/* Call after every change: updates the statistics. */
static void note_use(const mp_states *states) {
    const uint64_t snapshots = (uint64_t)states->count * states->states.slot_bytes;
    atomic_store_explicit(&states->counters->state_bytes, mp_states_bytes(states) - snapshots, memory_order_relaxed);
    atomic_store_explicit(&states->counters->snapshot_bytes, snapshots, memory_order_relaxed);
    atomic_store_explicit(&states->counters->snapshots, states->count, memory_order_relaxed);
}

/* ---- states ------------------------------------------------------------------------------------------------------ */

/* Takes memory for a state: zeroed, or a copy of `from`. */
static mp_status take_memory(mp_states *states, const void *from, void **memory, mp_error *error) {
    const size_t bytes = states->states.slot_bytes;
    bool zero;
    MP_TRY(mp_kv_arena_take(&states->states, memory, &zero, error));
    if (from)
        memcpy(*memory, from, bytes);
    else if (!zero)
        memset(*memory, 0, bytes);
    return MP_OK;
}

mp_status mp_state_create(mp_states *states, const void *from, mp_state **out, mp_error *error) {
    mp_state *state = mp_alloc_zeroed(sizeof *state, MP_TAG_KV);
    void *memory;
    if (!state)
        return mp_fail_memory(error, sizeof *state, "the state of a sequence");
    const mp_status status = take_memory(states, from, &memory, error);
    if (status != MP_OK) {
        mp_free(state);
        return status;
    }
    state->memory = memory;
    state->references = 1;
    *out = state;
    note_use(states);
    return MP_OK;
}

void mp_state_drop(mp_states *states, mp_state *state) {
    assert(state->references > 0);
    if (--state->references > 0)
        return;
    mp_kv_arena_give(&states->states, state->memory);
    if (state->log)
        mp_kv_arena_give(&states->logs, state->log);
    mp_free(state);
    note_use(states);
}

mp_status mp_state_take_log(mp_states *states, mp_state *state, mp_error *error) {
    void *log;
    bool zero;
    if (state->log)
        return MP_OK;
    MP_TRY(mp_kv_arena_take(&states->logs, &log, &zero, error));
    state->log = log;
    note_use(states);
    return MP_OK;
}

/* ---- snapshots --------------------------------------------------------------------------------------------------- */

static uint64_t share_bytes(const mp_states *states) {
    const uint64_t limit =
        atomic_load_explicit(&mp_budget_top(states->states.budget)->limit, memory_order_relaxed);
    return limit / 100 * states->percent;
}

/* Grows the tables, so that one more snapshot fits, of block `id`. Returns false if memory is exhausted. */
static bool snapshots_grow(mp_states *states, uint32_t id) {
    if (states->count == states->capacity) {
        const uint32_t capacity = states->capacity ? 2 * states->capacity : 16;
        mp_snapshot *grown = mp_realloc(states->snapshots, capacity * sizeof *grown, MP_TAG_KV);
        if (!grown)
            return false;
        states->snapshots = grown;
        states->capacity = capacity;
    }
    if (id >= states->blocks) {
        const uint32_t blocks = id + id / 2 + 64;
        uint32_t *grown = mp_realloc(states->of_block, blocks * sizeof *grown, MP_TAG_KV);
        if (!grown)
            return false;
        memset(grown + states->blocks, 0, (blocks - states->blocks) * sizeof *grown);
        states->of_block = grown;
        states->blocks = blocks;
    }
    return true;
}

static uint32_t least_worth(const mp_states *states) {
    uint32_t least = 0;
    for (uint32_t i = 1; i < states->count; i++)
        if (states->snapshots[i].worth < states->snapshots[least].worth)
            least = i;
    return least;
}

/* Removes a snapshot. Returns bytes given back to the budget. */
static size_t snapshot_remove(mp_states *states, uint32_t index) {
    const size_t given = mp_kv_arena_give(&states->states, states->snapshots[index].memory);
    states->of_block[states->snapshots[index].id] = 0;
    states->snapshots[index] = states->snapshots[--states->count];
    if (index < states->count)
        states->of_block[states->snapshots[index].id] = index + 1;
    note_use(states);
    return given;
}

void mp_snapshot_keep(mp_states *states, uint32_t id, uint32_t gap, const mp_state *state) {
    const size_t bytes = states->states.slot_bytes;
    const uint64_t share = share_bytes(states), worth = states->evicted + gap;
    uint64_t released = 0;
    void *memory;
    mp_error error;
    if (bytes > share || !snapshots_grow(states, id))
        return;
    while ((states->count + 1) * (uint64_t)bytes > share) {
        if (states->snapshots[least_worth(states)].worth > worth)
            return;
        mp_snapshot_evict(states, &released);
    }
    if (take_memory(states, state->memory, &memory, &error) != MP_OK)
        return;
    states->snapshots[states->count] = (mp_snapshot){memory, id, gap, states->evicted + gap};
    states->of_block[id] = ++states->count;
    note_use(states);
}

const void *mp_snapshot_use(mp_states *states, uint32_t id) {
    assert(mp_snapshot_exists(states, id));
    mp_snapshot *snapshot = &states->snapshots[states->of_block[id] - 1];
    snapshot->worth = states->evicted + snapshot->gap;
    return snapshot->memory;
}

size_t mp_snapshot_forget(mp_states *states, uint32_t id) {
    if (!mp_snapshot_exists(states, id))
        return 0;
    return snapshot_remove(states, states->of_block[id] - 1);
}

bool mp_snapshot_evict(mp_states *states, uint64_t *bytes) {
    if (states->count == 0)
        return false;
    const uint32_t least = least_worth(states);
    states->evicted = states->snapshots[least].worth;
    *bytes += snapshot_remove(states, least);
    return true;
}
