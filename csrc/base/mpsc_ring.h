/* mpsc_ring.h: a bounded ring buffer with many producers and one consumer.
 *
 * A producer claims a slot, fills it and publishes it. A full ring refuses the item and counts it as dropped. No
 * function blocks, allocates or takes a lock, so an item can be posted while any lock is held.
 *
 *   static struct { MP_MPSC_SLOT(mp_event) slots[1024]; } storage;
 *   static mp_mpsc_ring ring = MP_MPSC_RING(storage.slots);
 *
 * The consumer stops at the first slot that is claimed but not published. A forked child has only one thread, so a
 * slot that another thread had claimed is never published there: call mp_mpsc_reset in the child. */
#ifndef MP_BASE_MPSC_RING_H
#define MP_BASE_MPSC_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* `turn` is position + 1 once the item of that position is published, and position + count once it was consumed. The
 * stored value is less the slot's index: zeroed storage is an empty ring. */
#define MP_MPSC_SLOT(type)                  \
    struct {                                \
        _Alignas(64) _Atomic uint64_t turn; \
        type item;                          \
    }

typedef struct mp_mpsc_ring {
    void *slots; /* MP_MPSC_SLOT [count] */
    uint32_t count, slot_bytes, item_offset, item_bytes; /* count: a power of two */
    _Alignas(128) _Atomic uint64_t write_at;             /* the next position to claim */
    _Alignas(128) uint64_t read_at;                      /* the consumer's own */
    _Alignas(128) _Atomic uint64_t dropped;
} mp_mpsc_ring;

#define MP_MPSC_RING(array)                                                                                        \
    {                                                                                                              \
        .slots = (array), .count = sizeof(array) / sizeof((array)[0]), .slot_bytes = sizeof((array)[0]),           \
        .item_offset = (uint32_t)((char *)&(array)[0].item - (char *)&(array)[0]),                                 \
        .item_bytes = sizeof((array)[0].item)                                                                      \
    }

/* Claim the next slot. Returns its item, uninitialised, and *position for mp_mpsc_publish; NULL when the ring is full
 * (counted as dropped). Thread-safe. */
void *mp_mpsc_claim(mp_mpsc_ring *ring, uint64_t *position);
/* Hand a claimed slot to the consumer. Thread-safe. */
void mp_mpsc_publish(mp_mpsc_ring *ring, uint64_t position);
/* Copy the oldest item out and free its slot. Returns false when none is published. One thread at a time. */
bool mp_mpsc_take(mp_mpsc_ring *ring, void *item);
/* Items refused because the ring was full. */
uint64_t mp_mpsc_dropped(const mp_mpsc_ring *ring);
/* Empty the ring, slots that were claimed but never published included. No other thread may use the ring: for the
 * child of a fork. Keeps the count of dropped items. */
void mp_mpsc_reset(mp_mpsc_ring *ring);

#endif
