/* entry_state.c: three state machines of an entry. entry.h has their diagrams and the meaning of each state. */
#include "registry/entry.h"

#define TO(state) (1u << MP_SHUTDOWN_##state)
static const char *const shutdown_names[MP_SHUTDOWN_STATES] = {
    [MP_SHUTDOWN_OPEN] = "open",
    [MP_SHUTDOWN_CLOSED] = "closed",
    [MP_SHUTDOWN_QUITTING] = "quitting",
};
static const uint16_t shutdown_legal[MP_SHUTDOWN_STATES] = {
    [MP_SHUTDOWN_OPEN] = TO(CLOSED),
    [MP_SHUTDOWN_CLOSED] = TO(QUITTING),
    [MP_SHUTDOWN_QUITTING] = 0,
};
#undef TO
const mp_state_machine mp_shutdown_machine = {"shutdown", MP_SHUTDOWN_STATES, shutdown_names, shutdown_legal};

#define TO(state) (1u << MP_REMOVAL_##state)
static const char *const removal_names[MP_REMOVAL_STATES] = {
    [MP_REMOVAL_NONE] = "none",
    [MP_REMOVAL_DRAINING] = "draining",
    [MP_REMOVAL_GONE] = "gone",
};
static const uint16_t removal_legal[MP_REMOVAL_STATES] = {
    [MP_REMOVAL_NONE] = TO(DRAINING),
    [MP_REMOVAL_DRAINING] = TO(GONE),
    [MP_REMOVAL_GONE] = 0,
};
#undef TO
const mp_state_machine mp_removal_machine = {"removal", MP_REMOVAL_STATES, removal_names, removal_legal};

#define TO(state) (1u << MP_UNLOAD_##state)
static const char *const unload_names[MP_UNLOAD_STATES] = {
    [MP_UNLOAD_NONE] = "none",
    [MP_UNLOAD_REQUESTED] = "requested",
    [MP_UNLOAD_CALLED] = "called",
    [MP_UNLOAD_RUNNING] = "running",
};
static const uint16_t unload_legal[MP_UNLOAD_STATES] = {
    [MP_UNLOAD_NONE] = TO(REQUESTED) | TO(CALLED) | TO(RUNNING),
    [MP_UNLOAD_REQUESTED] = TO(CALLED) | TO(RUNNING) | TO(NONE),
    [MP_UNLOAD_CALLED] = TO(RUNNING) | TO(NONE),
    [MP_UNLOAD_RUNNING] = TO(NONE),
};
#undef TO
const mp_state_machine mp_unload_machine = {"unload", MP_UNLOAD_STATES, unload_names, unload_legal};

/* --- setters --- */

static bool may_enter(const mp_entry *entry, const mp_state_machine *machine, int from, int to) {
    return mp_state_may_enter(machine, entry->services, entry->key, 0, from, to);
}

void mp_entry_set_shutdown(mp_entry *entry, mp_entry_shutdown shutdown) {
    mp_assert_held(&entry->lock);
    if (may_enter(entry, &mp_shutdown_machine, (int)entry->shutdown, (int)shutdown))
        entry->shutdown = shutdown;
}

void mp_entry_set_removal(mp_entry *entry, mp_entry_removal removal) {
    mp_assert_held(&entry->lock);
    if (may_enter(entry, &mp_removal_machine, (int)entry->removal, (int)removal))
        entry->removal = removal;
}

void mp_entry_set_unload(mp_entry *entry, mp_entry_unload unload) {
    mp_assert_held(&entry->lock);
    if (may_enter(entry, &mp_unload_machine, (int)entry->unload, (int)unload))
        entry->unload = unload;
}
