/* mpsc_ring.c: see mpsc_ring.h. */
#include "base/mpsc_ring.h"

#include <string.h>

static char *slot_at(const mp_mpsc_ring *ring, uint64_t position) {
    return (char *)ring->slots + position % ring->count * ring->slot_bytes;
}

static _Atomic uint64_t *turn_at(const mp_mpsc_ring *ring, uint64_t position) {
    return (_Atomic uint64_t *)(void *)slot_at(ring, position);
}

void *mp_mpsc_claim(mp_mpsc_ring *ring, uint64_t *position) {
    uint64_t at = atomic_load_explicit(&ring->write_at, memory_order_relaxed);
    for (;;) {
        uint64_t turn = atomic_load_explicit(turn_at(ring, at), memory_order_acquire) + at % ring->count;
        if (turn < at) { /* full: the consumer has not taken the slot's previous item */
            atomic_fetch_add_explicit(&ring->dropped, 1, memory_order_relaxed);
            return NULL;
        }
        if (turn > at) /* another producer claimed the position */
            at = atomic_load_explicit(&ring->write_at, memory_order_relaxed);
        else if (atomic_compare_exchange_weak_explicit(&ring->write_at, &at, at + 1, memory_order_relaxed,
                                                       memory_order_relaxed))
            break;
    }
    *position = at;
    return slot_at(ring, at) + ring->item_offset;
}

void mp_mpsc_publish(mp_mpsc_ring *ring, uint64_t position) {
    atomic_store_explicit(turn_at(ring, position), position + 1 - position % ring->count, memory_order_release);
}

bool mp_mpsc_take(mp_mpsc_ring *ring, void *item) {
    uint64_t at = ring->read_at, index = at % ring->count;
    if (atomic_load_explicit(turn_at(ring, at), memory_order_acquire) + index != at + 1)
        return false;
    memcpy(item, slot_at(ring, at) + ring->item_offset, ring->item_bytes);
    atomic_store_explicit(turn_at(ring, at), at + ring->count - index, memory_order_release);
    ring->read_at++;
    return true;
}

uint64_t mp_mpsc_dropped(const mp_mpsc_ring *ring) {
    return atomic_load_explicit(&ring->dropped, memory_order_relaxed);
}

void mp_mpsc_reset(mp_mpsc_ring *ring) {
    for (uint32_t i = 0; i < ring->count; i++)
        atomic_store_explicit(turn_at(ring, i), 0, memory_order_relaxed);
    atomic_store_explicit(&ring->write_at, 0, memory_order_relaxed);
    ring->read_at = 0;
}
