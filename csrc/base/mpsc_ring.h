/* mpsc_ring.h: a bounded ring buffer with many producers and one consumer.
 *
 * A producer claims a slot, fills it and publishes it. A full ring refuses the item and counts it as dropped. No
 * function blocks, allocates or takes a lock, so an item can be posted while any lock is held.
 *
 *   static struct { MP_MPSC_SLOT(mp_event) slots[1024]; } storage;
 *   static mp_mpsc_ring ring = MP_MPSC_RING(storage.slots);
 *
 * The consumer stops at the first slot that is claimed but not published. A forked child has only one thread, so a slot
 * that another thread of the parent had claimed is never published in the child: call mp_mpsc_reset there. */
#ifndef MP_BASE_MPSC_RING_H
#define MP_BASE_MPSC_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Positions number all claims: the item at a position uses slot position % count. The turn of a slot is position + 1
 * once the item at `position` is published, and position + count once that item is consumed. `turn` stores this number
 * minus the slot's index, so that zeroed storage is an empty ring. */
#define MP_MPSC_SLOT(type)                  \
    struct {                                \
        _Alignas(64) _Atomic uint64_t turn; \
        type item;                          \
    }

typedef struct mp_mpsc_ring {
    void *slots; /* MP_MPSC_SLOT [count] */
    uint32_t count, slot_bytes, item_offset, item_bytes; /* count: a power of two */
    _Alignas(128) _Atomic uint64_t write_at;             /* the next position to claim */
    _Alignas(128) uint64_t read_at;                      /* next position to take; for the consumer only */
    _Alignas(128) _Atomic uint64_t dropped;
} mp_mpsc_ring;

#define MP_MPSC_RING(array)                                                                                        \
    {                                                                                                              \
        .slots = (array), .count = sizeof(array) / sizeof((array)[0]), .slot_bytes = sizeof((array)[0]),           \
        .item_offset = (uint32_t)((char *)&(array)[0].item - (char *)&(array)[0]),                                 \
        .item_bytes = sizeof((array)[0].item)                                                                      \
    }

/* Claim the next slot. Returns its uninitialised item and sets *position, which mp_mpsc_publish needs. If the ring is
 * full, returns NULL and counts the item as dropped. Thread-safe. */
void *mp_mpsc_claim(mp_mpsc_ring *ring, uint64_t *position);
/* Hand a claimed slot to the consumer. Thread-safe. */
void mp_mpsc_publish(mp_mpsc_ring *ring, uint64_t position);
/* Copy the oldest item out and free its slot. Returns false when no item is published. Must be called by one thread at
 * a time. */
bool mp_mpsc_take(mp_mpsc_ring *ring, void *item);
/* Items refused because the ring was full. */
uint64_t mp_mpsc_dropped(const mp_mpsc_ring *ring);
/* Empty the ring, including slots that were claimed but never published. Call in a forked child; no other thread may
 * use the ring. Does not reset the count of dropped items. */
void mp_mpsc_reset(mp_mpsc_ring *ring);

#endif
