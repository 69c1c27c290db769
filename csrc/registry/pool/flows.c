/* flows.c: a hash table with chains over an array of slots. See flows.h. */
#include "registry/pool/flows.h"

#include <assert.h>

#include "base/alloc.h"
#include "base/mix.h"
#include "base/sys.h"

mp_status mp_flows_create(mp_flows *flows, int count, int groups, mp_error *error) {
    assert(count >= 1);
    int buckets = 16;
    while (buckets < count)
        buckets *= 2;
    *flows = (mp_flows){.count = count, .groups = groups, .newest = -1, .oldest = -1};
    flows->mask = (uint32_t)buckets - 1;
    flows->seed = mp_sys_random();
    const size_t slots = (size_t)mp_flows_slots(flows);
    flows->slots = mp_alloc_array(slots, sizeof(mp_flow), MP_TAG_POOL);
    flows->buckets = mp_alloc_array((size_t)buckets, sizeof(int), MP_TAG_POOL);
    if (!flows->slots || !flows->buckets) {
        mp_flows_destroy(flows);
        return mp_fail_memory(error, slots * sizeof(mp_flow) + (size_t)buckets * sizeof(int), "a table of flows");
    }
    for (int i = 0; i < buckets; i++)
        flows->buckets[i] = -1;
    return MP_OK;
}

void mp_flows_destroy(mp_flows *flows) {
    mp_free(flows->slots);
    mp_free(flows->buckets);
    *flows = (mp_flows){0};
}

static int *flows_bucket_of(mp_flows *flows, uint64_t key, int group) {
    return &flows->buckets[(uint32_t)mp_mix(mp_mix(key ^ flows->seed) + (uint64_t)group) & flows->mask];
}

static void unlink_idle(mp_flows *flows, int slot) {
    const mp_flow *flow = &flows->slots[slot];
    *(flow->newer < 0 ? &flows->newest : &flows->slots[flow->newer].older) = flow->older;
    *(flow->older < 0 ? &flows->oldest : &flows->slots[flow->older].newer) = flow->newer;
}

/* Returns a slot that no flow uses and that is in no bucket; -1 if there is none. */
static int free_slot(mp_flows *flows) {
    if (flows->used < flows->count)
        return flows->used++;
    int slot = flows->oldest;
    if (slot < 0)
        return -1;
    unlink_idle(flows, slot);
    int *link = flows_bucket_of(flows, flows->slots[slot].key, flows->slots[slot].group);
    while (*link != slot)
        link = &flows->slots[*link].chain;
    *link = flows->slots[slot].chain;
    return slot;
}

int mp_flows_enter(mp_flows *flows, uint64_t key, int group, bool *fresh) {
    int *bucket = flows_bucket_of(flows, key, group), slot = *bucket;
    while (slot >= 0 && (flows->slots[slot].key != key || flows->slots[slot].group != group))
        slot = flows->slots[slot].chain;
    *fresh = slot < 0;
    if (slot >= 0) {
        if (flows->slots[slot].users++ == 0)
            unlink_idle(flows, slot);
        return slot;
    }
    slot = free_slot(flows);
    if (slot < 0) {
        slot = flows->count + group * MP_FLOWS_SHARED + (int)(mp_mix(mp_mix(key) ^ flows->seed) % MP_FLOWS_SHARED);
        flows->slots[slot].users++;
        *fresh = false;
        return slot;
    }
    flows->slots[slot] = (mp_flow){.key = key, .group = group, .users = 1, .chain = *bucket, .newer = -1, .older = -1};
    *bucket = slot;
    return slot;
}

void mp_flows_leave(mp_flows *flows, int slot) {
    mp_flow *flow = &flows->slots[slot];
    assert(flow->users > 0);
    if (--flow->users || slot >= flows->count)
        return;
    flow->newer = -1;
    flow->older = flows->newest;
    *(flows->newest < 0 ? &flows->oldest : &flows->slots[flows->newest].newer) = slot;
    flows->newest = slot;
}
