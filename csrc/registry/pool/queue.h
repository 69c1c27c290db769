/* queue.h: a bounded queue of things that wait.
 *
 * Who is next: the most urgent priority, where waiting makes urgent: one level for every MP_QUEUE_AGEING_NS, so that
 * nothing starves. Within a priority each flow (a tenant's work of one kind) gets an equal share in predicted cost
 * (start-time fair queueing); within a flow, by arrival. A level that is chosen for its age alone gives its oldest.
 *
 * Bounded per kind: calls of one kind never take the places of another.
 *
 * Intrusive: what waits carries a node, so that pushing never allocates and leaving from the middle is O(1). It has no
 * lock of its own; every function is called with the owner's lock held. */
#ifndef MP_REGISTRY_POOL_QUEUE_H
#define MP_REGISTRY_POOL_QUEUE_H

#include "base/error.h"

enum {
    MP_QUEUE_PRIORITIES = 5, /* 0 = most urgent */
    MP_QUEUE_KINDS = 2,
    MP_QUEUE_TENANTS = 16 /* flows of a kind; tenants share them by their number's remainder */
};
#define MP_QUEUE_FLOWS (MP_QUEUE_KINDS * MP_QUEUE_TENANTS)
#define MP_QUEUE_AGEING_NS (2000ull * 1000 * 1000)

typedef struct mp_queue_node { /* prev and next NULL when in no queue */
    struct mp_queue_node *prev, *next;
    uint64_t since_ns; /* when it came first */
    uint64_t cost;     /* predicted, in any unit */
    uint8_t priority, kind, flow;
} mp_queue_node;

typedef struct mp_queue_level {
    mp_queue_node ends[MP_QUEUE_FLOWS]; /* a ring each, this its sentinel */
    uint64_t start[MP_QUEUE_FLOWS];     /* virtual time at which the flow's next one starts */
    uint64_t now;                       /* virtual time: the start of the last one taken */
    uint32_t waiting;                   /* a bit each flow that is not empty */
} mp_queue_level;

typedef struct mp_queue {
    mp_queue_level levels[MP_QUEUE_PRIORITIES];
    int count, counts[MP_QUEUE_KINDS], capacity[MP_QUEUE_KINDS];
    uint64_t cost; /* of all that wait */
    bool closed;
} mp_queue;

typedef enum mp_queue_answer { MP_QUEUE_TAKEN, MP_QUEUE_FULL, MP_QUEUE_CLOSED } mp_queue_answer;

void mp_queue_init(mp_queue *queue, const int capacity[MP_QUEUE_KINDS]);
/* Which of them the node belongs to. A larger number counts as the last; set while it is in no queue. */
void mp_queue_node_init(mp_queue_node *node, int priority, int kind, uint32_t tenant, uint64_t since_ns);
/* Behind all of its flow. Refused when full or closed. node->cost is set. */
mp_queue_answer mp_queue_push(mp_queue *queue, mp_queue_node *node);
/* Before all of its flow. Never refused: for what was accepted once and has to wait again. */
void mp_queue_push_front(mp_queue *queue, mp_queue_node *node);
/* Who is next, left in; NULL when empty. Also of a closed queue: closing stops arrivals only. */
mp_queue_node *mp_queue_best(const mp_queue *queue, uint64_t now_ns);
/* Take one out to be served: its flow is charged. */
void mp_queue_take(mp_queue *queue, mp_queue_node *node);
/* Take one out that leaves unserved. Asserts that it waits here. */
void mp_queue_remove(mp_queue *queue, mp_queue_node *node);
/* All that wait, by priority, then by flow; NULL at the end. */
mp_queue_node *mp_queue_first(const mp_queue *queue);
mp_queue_node *mp_queue_next(const mp_queue *queue, const mp_queue_node *node);
static inline bool mp_queue_holds(const mp_queue_node *node) { return node->next != NULL; }
static inline bool mp_queue_full(const mp_queue *queue, int kind) {
    return queue->counts[kind] >= queue->capacity[kind];
}
/* How many of those that wait are more urgent, or as urgent and came earlier; and their cost. O(count). */
int mp_queue_position(const mp_queue *queue, const mp_queue_node *node, uint64_t *cost);
void mp_queue_close(mp_queue *queue);

#endif
