/* queue.h: a bounded queue of things that wait, by priority, then by arrival.
 *
 * Intrusive: what waits carries a node, so that pushing never allocates and leaving from the middle is O(1). It has no
 * lock of its own; every function is called with the owner's lock held. */
#ifndef MP_REGISTRY_POOL_QUEUE_H
#define MP_REGISTRY_POOL_QUEUE_H

#include "base/error.h"

enum { MP_QUEUE_PRIORITIES = 5 }; /* 0 = most urgent */

typedef struct mp_queue_node { /* zeroed when in no queue */
    struct mp_queue_node *prev, *next;
    uint8_t priority;
} mp_queue_node;

typedef struct mp_queue {
    mp_queue_node ends[MP_QUEUE_PRIORITIES]; /* a ring each, this its sentinel */
    int count, capacity;
    bool closed;
} mp_queue;

typedef enum mp_queue_answer { MP_QUEUE_TAKEN, MP_QUEUE_FULL, MP_QUEUE_CLOSED } mp_queue_answer;

void mp_queue_init(mp_queue *queue, int capacity);
/* Behind all of its priority (a larger number counts as the last). Refused when full or closed. */
mp_queue_answer mp_queue_push(mp_queue *queue, mp_queue_node *node, int priority);
/* Before all of its priority. Never refused: for what was accepted once and has to wait again. */
void mp_queue_push_front(mp_queue *queue, mp_queue_node *node, int priority);
/* The first, taken out; NULL when empty. Also from a closed queue: closing stops arrivals only. */
mp_queue_node *mp_queue_pop(mp_queue *queue);
/* The first, left in; and the one behind `node`. NULL at the end. */
mp_queue_node *mp_queue_first(const mp_queue *queue);
mp_queue_node *mp_queue_next(const mp_queue *queue, const mp_queue_node *node);
void mp_queue_remove(mp_queue *queue, mp_queue_node *node); /* asserts that it waits here */
static inline bool mp_queue_holds(const mp_queue_node *node) { return node->next != NULL; }
static inline bool mp_queue_full(const mp_queue *queue) { return queue->count >= queue->capacity; }
/* How many are before `node`. O(position). */
int mp_queue_position(const mp_queue *queue, const mp_queue_node *node);
void mp_queue_close(mp_queue *queue);

#endif
