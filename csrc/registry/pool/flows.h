/* flows.h: a bounded table of flows. A flow is the work of one key of one group, such as one tenant at one priority,
 * that shares a resource with other flows.
 *
 * A flow that is in use has a slot of its own. A flow without users keeps its slot, and with it its owner's record of
 * past service, until another flow needs the slot; the slot that has been idle for longest is reused first. If every
 * slot is in use, the further flows of a group share MP_FLOWS_SHARED slots. A random number of the table decides which
 * flows share one, so no caller can choose a key that shares a slot with a given other key.
 *
 * All operations are O(1). Only mp_flows_create allocates. Must hold the owner's lock in every function. */
#ifndef MP_REGISTRY_POOL_FLOWS_H
#define MP_REGISTRY_POOL_FLOWS_H

#include "base/error.h"

enum { MP_FLOWS_SHARED = 16 };

typedef struct mp_flow {
    uint64_t key;
    int group, users;
    int chain;        /* next slot of the same bucket; -1: none */
    int newer, older; /* links the slots without users; -1: none */
} mp_flow;

typedef struct mp_flows {
    mp_flow *slots; /* `count` slots for one flow each, then MP_FLOWS_SHARED shared slots per group */
    int *buckets;
    int count, groups, used, newest, oldest;
    uint32_t mask; /* number of buckets - 1 */
    uint64_t seed;
} mp_flows;

/* `count` >= 1: number of flows that can have a slot of their own. Flows of different groups never share a slot. Slot
 * numbers are below mp_flows_slots. */
mp_status mp_flows_create(mp_flows *flows, int count, int groups, mp_error *error);
void mp_flows_destroy(mp_flows *flows); /* zeroed = legal */
static inline int mp_flows_slots(const mp_flows *flows) {
    return flows->count + flows->groups * MP_FLOWS_SHARED;
}
/* Add a user to the flow with this key and group. Returns the flow's slot. Sets *fresh if
 * the flow has just got this slot: the owner must then reset its record of past service, which describes the slot's
 * previous flow. A shared slot is never fresh. */
int mp_flows_enter(mp_flows *flows, uint64_t key, int group, bool *fresh);
/* Remove a user from the flow that has this slot. */
void mp_flows_leave(mp_flows *flows, int slot);

#endif
