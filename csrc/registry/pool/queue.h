/* queue.h: a bounded priority queue with fair shares.
 *
 * Order: the most urgent priority first. A waiting node gains one level of priority per MP_QUEUE_AGEING_NS, so none
 * starves. Within a priority each flow (the work of one kind of one tenant) gets an equal share of predicted cost
 * (start-time fair queueing); a flow is first in, first out. From a level that is served early because of its age, the
 * oldest node is taken.
 *
 * Capacity is per kind: nodes of one kind never use the capacity of another.
 *
 * Intrusive: the queued object contains its node, so pushing never allocates and removing from the middle is O(1).
 * Every function must be called with the owner's lock held. */
#ifndef MP_REGISTRY_POOL_QUEUE_H
#define MP_REGISTRY_POOL_QUEUE_H

#include "base/error.h"

enum {
    MP_QUEUE_PRIORITIES = 5, /* 0 = most urgent */
    MP_QUEUE_KINDS = 2,
    MP_QUEUE_TENANTS = 16 /* flows per kind; a tenant uses flow tenant % 16 */
};
#define MP_QUEUE_FLOWS (MP_QUEUE_KINDS * MP_QUEUE_TENANTS)
#define MP_QUEUE_AGEING_NS (2000ull * 1000 * 1000)

typedef struct mp_queue_node { /* prev and next are NULL when in no queue */
    struct mp_queue_node *prev, *next;
    uint64_t since_ns; /* time of its first arrival */
    uint64_t cost;     /* predicted, in any unit */
    uint8_t priority, kind, flow;
} mp_queue_node;

typedef struct mp_queue_level {
    mp_queue_node ends[MP_QUEUE_FLOWS]; /* sentinel of each flow's circular list */
    uint64_t start[MP_QUEUE_FLOWS];     /* virtual time at which the flow's next node starts */
    uint64_t now;                       /* virtual time: start of the last node taken */
    uint32_t waiting;                   /* one bit per flow that is not empty */
} mp_queue_level;

typedef struct mp_queue {
    mp_queue_level levels[MP_QUEUE_PRIORITIES];
    int count, counts[MP_QUEUE_KINDS], capacity[MP_QUEUE_KINDS];
    uint64_t cost; /* sum over all queued nodes */
    bool closed;
} mp_queue;

typedef enum mp_queue_result { MP_QUEUE_TAKEN, MP_QUEUE_FULL, MP_QUEUE_CLOSED } mp_queue_result;

void mp_queue_init(mp_queue *queue, const int capacity[MP_QUEUE_KINDS]);
/* Initialise a node that is in no queue. `priority` is clamped to 0 to MP_QUEUE_PRIORITIES - 1; a positive kind is
 * 1. */
void mp_queue_node_init(mp_queue_node *node, int priority, int kind, uint32_t tenant, uint64_t since_ns);
/* Append the node to its flow. node->cost must be set. Returns MP_QUEUE_FULL when the node's kind is full,
 * MP_QUEUE_CLOSED when the queue is closed. */
mp_queue_result mp_queue_push(mp_queue *queue, mp_queue_node *node);
/* Put the node before all others of its flow. Never refused: for a node that was accepted before and must wait
 * again. */
void mp_queue_push_front(mp_queue *queue, mp_queue_node *node);
/* Return the node to serve next, without removing it; NULL when the queue is empty. Works on a closed queue: closing
 * stops arrivals only. */
mp_queue_node *mp_queue_best(const mp_queue *queue, uint64_t now_ns);
/* Remove a node to serve it, and charge its cost to its flow. */
void mp_queue_take(mp_queue *queue, mp_queue_node *node);
/* Remove a node without charging its flow. Asserts that the node is queued. */
void mp_queue_remove(mp_queue *queue, mp_queue_node *node);
/* Iterate over all nodes, by priority, then by flow; NULL at the end. */
mp_queue_node *mp_queue_first(const mp_queue *queue);
mp_queue_node *mp_queue_next(const mp_queue *queue, const mp_queue_node *node);
static inline bool mp_queue_holds(const mp_queue_node *node) { return node->next != NULL; }
static inline bool mp_queue_full(const mp_queue *queue, int kind) {
    return queue->counts[kind] >= queue->capacity[kind];
}
/* Return the number of nodes that have a more urgent priority, or the same priority and arrived earlier. *cost receives
 * the sum of their costs. O(count). */
int mp_queue_position(const mp_queue *queue, const mp_queue_node *node, uint64_t *cost);
void mp_queue_close(mp_queue *queue);

#endif
