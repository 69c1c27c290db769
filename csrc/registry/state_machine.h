/* state_machine.h: transition tables, and the check that a transition is legal.
 *
 * The registry has seven state machines; .retry and .retry_between of a request are two states of one machine. Each
 * machine has a diagram in the header of the struct with the state. The table of its transitions is in the file of the
 * one function that changes that state:
 *
 *   mp_entry.shutdown, .removal, .unload              entry.h, entry.c
 *   mp_faults.health, mp_ticket_faults.retry          faults.h, faults.c
 *   mp_ticket.state                                   request.h, request.c
 *   mp_worker.state                                   worker.h, worker.c
 *
 * A setter asks mp_state_may_enter first and writes the new state only if that returned true. An illegal transition is
 * a bug in the caller of the setter. A build with assertions stops there. A release build counts it in the metric
 * `illegal_transitions`, writes one log record at level ERROR, and keeps the old state: the old state was correct until
 * now, so requests, memory and references stay accounted for, and the process continues.
 *
 * A state never follows itself unless its table says so. Calls that may be repeated (close, remove) check the state
 * first. */
#ifndef MP_REGISTRY_STATE_MACHINE_H
#define MP_REGISTRY_STATE_MACHINE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct mp_services mp_services;

typedef struct mp_state_machine {
    const char *name;          /* names the state in log records: "worker" */
    int count;                 /* number of states, at most 16 */
    const char *const *states; /* [count] their names */
    const uint16_t *legal;     /* [count] bit `to` of legal[from]: `from` may become `to` */
} mp_state_machine;

/* Looks the transition up and does nothing else. */
static inline bool mp_state_is_legal(const mp_state_machine *machine, int from, int to) {
    return machine->legal[from] >> to & 1;
}

/* Returns true if the transition is legal. Otherwise asserts; without assertions counts and logs the refusal with `key`
 * (of the entry) and `id` (of the worker, or 0), and returns false. Takes no lock of the registry. */
bool mp_state_may_enter(const mp_state_machine *machine, mp_services *services, const char *key, uint32_t id, int from,
                        int to);

#endif
