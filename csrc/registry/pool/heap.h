/* heap.h: an intrusive pairing heap. Objects contain their node, so no function allocates. Insertion is O(1), removal
 * of any node O(log n) amortised.
 *
 * A heap orders its nodes by (key, order), the smallest first. Must hold the owner's lock in every function. */
#ifndef MP_REGISTRY_POOL_HEAP_H
#define MP_REGISTRY_POOL_HEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mp_heap_node {
    struct mp_heap_node *child, *next; /* first child; next sibling */
    struct mp_heap_node **link;        /* the pointer that points here; NULL: in no heap */
    uint64_t key, order;
} mp_heap_node;

typedef struct mp_heap { /* zeroed = empty */
    mp_heap_node *top;
    uint64_t inserted; /* number of insertions: ties are broken in the order of insertion */
} mp_heap;

static inline bool mp_heap_holds(const mp_heap_node *node) { return node->link != NULL; }
/* The node must be in no heap. Sets its key. */
void mp_heap_insert(mp_heap *heap, mp_heap_node *node, uint64_t key);
/* The node must be in this heap. */
void mp_heap_remove(mp_heap *heap, mp_heap_node *node);
static inline bool mp_heap_before(const mp_heap_node *a, const mp_heap_node *b) {
    return a->key != b->key ? a->key < b->key : a->order < b->order;
}

#endif
