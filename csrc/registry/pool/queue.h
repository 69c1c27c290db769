/* queue.h: a bounded priority queue with fair shares.
 *
 * Order: the most urgent priority first. Each level of priority serves its flows (the work of one kind of one tenant)
 * with equal shares of predicted cost, by fair queueing in virtual time. A flow is first in, first out. A waiting node
 * gains one level of priority per MP_QUEUE_AGEING_NS: a level whose oldest node has gained enough is served before a
 * more urgent level, so that none starves.
 *
 * Virtual time of a level advances by the cost of each node that is taken, divided by the number of waiting flows. A
 * flow that begins to wait starts at this time, or where it ended if that is later. So a tenant gains nothing by
 * pausing, by sending one request at a time, or by sending each request under another name.
 *
 * Every flow that waits has a slot of its own (flows.h), whatever numbers the tenants have: up to MP_QUEUE_FLOWS_MAX,
 * there are more slots than the queue has room for nodes. Slots of idle flows are reused, the longest idle first.
 *
 * Capacity is per kind: nodes of one kind never use the capacity of another.
 *
 * Intrusive: the queued object contains its node, so pushing never allocates. Operations on one node are O(log n)
 * unless stated otherwise. Every function must be called with the owner's lock held. */
#ifndef MP_REGISTRY_POOL_QUEUE_H
#define MP_REGISTRY_POOL_QUEUE_H

#include "base/error.h"
#include "registry/pool/flows.h"
#include "registry/pool/heap.h"

enum {
    MP_QUEUE_PRIORITIES = 5, /* 0 = most urgent */
    MP_QUEUE_KINDS = 2,
    /* Slots for flows beyond the capacity: for idle flows, and for nodes that mp_queue_push_front puts back. */
    MP_QUEUE_SPARE_FLOWS = 256,
    MP_QUEUE_FLOWS_MAX = 65536
};
#define MP_QUEUE_AGEING_NS (2000ull * 1000 * 1000)

typedef struct mp_queue_node {
    struct mp_queue_node *prev, *next;    /* while queued: neighbours in the flow; NULL at its ends */
    struct mp_queue_node *before, *after; /* while queued: neighbours in the level; NULL at its ends */
    mp_heap_node by_age;                  /* in mp_queue_level.by_age while queued */
    uint64_t since_ns;                    /* time of its first arrival */
    uint64_t cost;                        /* predicted, in any unit */
    uint64_t tenant;
    int flow; /* its slot while queued */
    uint8_t priority, kind;
} mp_queue_node;

typedef struct mp_queue_flow { /* the flow of one slot */
    mp_heap_node by_start; /* in mp_queue_level.by_start while a node waits; key: `start` */
    uint64_t start;        /* virtual time at which the next node starts, also while no node waits */
    mp_queue_node *first, *last;
} mp_queue_flow;

typedef struct mp_queue_level {
    mp_heap by_start; /* waiting flows */
    mp_heap by_age;   /* nodes, by since_ns */
    mp_queue_node *first, *last;
    uint64_t now, rest; /* virtual time, and the cost that has not advanced it yet */
    int waiting;        /* number of waiting flows */
} mp_queue_level;

typedef struct mp_queue {
    mp_queue_level levels[MP_QUEUE_PRIORITIES];
    mp_flows flows; /* groups: priority and kind; keys: tenants; one user per node */
    mp_queue_flow *flow; /* by slot */
    int count, counts[MP_QUEUE_KINDS], capacity[MP_QUEUE_KINDS];
    uint64_t cost; /* sum over all queued nodes */
    uint64_t full_ns[MP_QUEUE_KINDS], full_since_ns[MP_QUEUE_KINDS]; /* see mp_queue_full_ns; 0 = not full */
} mp_queue;

typedef enum mp_queue_result { MP_QUEUE_TAKEN, MP_QUEUE_FULL } mp_queue_result;

/* The memory of the queue grows with its capacity, up to MP_QUEUE_FLOWS_MAX slots. */
mp_status mp_queue_create(mp_queue *queue, const int capacity[MP_QUEUE_KINDS], mp_error *error);
void mp_queue_destroy(mp_queue *queue); /* zeroed = legal */
/* Initialise a node that is in no queue. `priority` is clamped to 0 to MP_QUEUE_PRIORITIES - 1; a positive kind is
 * 1. */
void mp_queue_node_init(mp_queue_node *node, int priority, int kind, uint64_t tenant, uint64_t since_ns);
/* Append the node to its flow. node->cost must be set. Returns MP_QUEUE_FULL when the node's kind is full. */
mp_queue_result mp_queue_push(mp_queue *queue, mp_queue_node *node);
/* Returns the total time, until now_ns, for which the queue was full of nodes of a kind. */
uint64_t mp_queue_full_ns(const mp_queue *queue, int kind, uint64_t now_ns);
/* Put the node before all others of its flow. Never refused: for a node that was accepted before and must wait
 * again. */
void mp_queue_push_front(mp_queue *queue, mp_queue_node *node);
/* Return the node to serve next, without removing it; NULL when the queue is empty. O(1). */
mp_queue_node *mp_queue_best(const mp_queue *queue, uint64_t now_ns);
/* True if `a` is to be served before `b`, leaving ages aside: its priority is more urgent, or its flow has received
 * less. False for nodes of the same flow. O(1). */
bool mp_queue_precedes(const mp_queue *queue, const mp_queue_node *a, const mp_queue_node *b);
/* Remove a node to serve it, and charge its cost to its flow. */
void mp_queue_take(mp_queue *queue, mp_queue_node *node);
/* Remove a node without charging its flow. Asserts that the node is queued. */
void mp_queue_remove(mp_queue *queue, mp_queue_node *node);
/* Iterate over all nodes, by priority, then by arrival; NULL at the end. */
mp_queue_node *mp_queue_first(const mp_queue *queue);
mp_queue_node *mp_queue_next(const mp_queue *queue, const mp_queue_node *node);
static inline bool mp_queue_holds(const mp_queue_node *node) { return mp_heap_holds(&node->by_age); }
static inline bool mp_queue_full(const mp_queue *queue, int kind) {
    return queue->counts[kind] >= queue->capacity[kind];
}
/* Return the number of nodes that have a more urgent priority, or the same priority and arrived earlier. *cost receives
 * the sum of their costs. O(count). */
int mp_queue_position(const mp_queue *queue, const mp_queue_node *node, uint64_t *cost);

#endif
