/* queue.c: see queue.h. */
#include "registry/pool/queue.h"

#include <assert.h>

_Static_assert(MP_QUEUE_FLOWS <= 32, "one bit per flow");

void mp_queue_init(mp_queue *queue, const int capacity[MP_QUEUE_KINDS]) {
    *queue = (mp_queue){.count = 0};
    for (int i = 0; i < MP_QUEUE_KINDS; i++)
        queue->capacity[i] = capacity[i];
    for (int i = 0; i < MP_QUEUE_PRIORITIES; i++)
        for (int j = 0; j < MP_QUEUE_FLOWS; j++) {
            mp_queue_node *end = &queue->levels[i].ends[j];
            *end = (mp_queue_node){.prev = end, .next = end, .priority = (uint8_t)i, .flow = (uint8_t)j};
        }
}

void mp_queue_node_init(mp_queue_node *node, int priority, int kind, uint32_t tenant, uint64_t since_ns) {
    int last = MP_QUEUE_PRIORITIES - 1;
    *node = (mp_queue_node){
        .priority = (uint8_t)(priority < 0 ? 0 : priority > last ? last : priority),
        .kind = kind > 0,
        .since_ns = since_ns,
    };
    node->flow = (uint8_t)(node->kind * MP_QUEUE_TENANTS + tenant % MP_QUEUE_TENANTS);
}

/* Insert `node` after `before`. */
static void insert(mp_queue *queue, mp_queue_node *node, mp_queue_node *before) {
    assert(!mp_queue_holds(node) && "already queued");
    mp_queue_level *level = &queue->levels[node->priority];
    uint32_t bit = 1u << node->flow;
    /* A flow that was empty has no claim on service from that time. */
    if (!(level->waiting & bit) && level->start[node->flow] < level->now)
        level->start[node->flow] = level->now;
    level->waiting |= bit;
    node->prev = before;
    node->next = before->next;
    before->next->prev = node;
    before->next = node;
    queue->count++;
    queue->counts[node->kind]++;
    queue->cost += node->cost;
}

mp_queue_result mp_queue_push(mp_queue *queue, mp_queue_node *node) {
    if (queue->closed)
        return MP_QUEUE_CLOSED;
    if (mp_queue_full(queue, node->kind))
        return MP_QUEUE_FULL;
    insert(queue, node, queue->levels[node->priority].ends[node->flow].prev);
    return MP_QUEUE_TAKEN;
}

void mp_queue_push_front(mp_queue *queue, mp_queue_node *node) {
    insert(queue, node, &queue->levels[node->priority].ends[node->flow]);
}

void mp_queue_remove(mp_queue *queue, mp_queue_node *node) {
    assert(mp_queue_holds(node) && queue->count > 0);
    node->prev->next = node->next;
    node->next->prev = node->prev;
    if (node->next == node->prev && node->next == &queue->levels[node->priority].ends[node->flow])
        queue->levels[node->priority].waiting &= ~(1u << node->flow);
    node->prev = node->next = NULL;
    queue->count--;
    queue->counts[node->kind]--;
    queue->cost -= node->cost;
}

void mp_queue_take(mp_queue *queue, mp_queue_node *node) {
    mp_queue_level *level = &queue->levels[node->priority];
    mp_queue_remove(queue, node);
    if (level->start[node->flow] > level->now) /* virtual time never runs backwards */
        level->now = level->start[node->flow];
    level->start[node->flow] += node->cost + 1; /* + 1: flows whose nodes have cost 0 (unknown) take turns too */
}

/* Returns the first node of the flow whose turn it is in a level that is not empty. *oldest receives the oldest
 * node. */
static mp_queue_node *of_level(const mp_queue_level *level, mp_queue_node **oldest) {
    mp_queue_node *fair = NULL;
    *oldest = NULL;
    for (uint32_t left = level->waiting; left; left &= left - 1) {
        int flow = __builtin_ctz(left);
        mp_queue_node *node = level->ends[flow].next;
        if (!fair || level->start[flow] < level->start[fair->flow])
            fair = node;
        if (!*oldest || node->since_ns < (*oldest)->since_ns)
            *oldest = node;
    }
    return fair;
}

mp_queue_node *mp_queue_best(const mp_queue *queue, uint64_t now_ns) {
    mp_queue_node *best = NULL;
    uint64_t best_age = 0; /* levels of priority gained */
    for (int i = 0; i < MP_QUEUE_PRIORITIES; i++) {
        mp_queue_node *oldest;
        if (!queue->levels[i].waiting)
            continue;
        mp_queue_node *fair = of_level(&queue->levels[i], &oldest);
        uint64_t age = now_ns > oldest->since_ns ? (now_ns - oldest->since_ns) / MP_QUEUE_AGEING_NS : 0;
        if (!best) {
            best = fair;
            best_age = age;
        } else if (age > best_age + (uint64_t)(i - best->priority)) {
            best = oldest;
            best_age = age;
        }
    }
    return best;
}

/* Returns the first node from flow `flow` of `level` on, continuing in the later levels; NULL if there is none. */
static mp_queue_node *first_from(const mp_queue *queue, int level, int flow) {
    for (; level < MP_QUEUE_PRIORITIES; level++, flow = 0) {
        uint32_t left = flow < 32 ? queue->levels[level].waiting >> flow << flow : 0;
        if (left)
            return queue->levels[level].ends[__builtin_ctz(left)].next;
    }
    return NULL;
}

mp_queue_node *mp_queue_first(const mp_queue *queue) { return first_from(queue, 0, 0); }

mp_queue_node *mp_queue_next(const mp_queue *queue, const mp_queue_node *node) {
    if (node->next != &queue->levels[node->priority].ends[node->flow])
        return node->next;
    return first_from(queue, node->priority, node->flow + 1);
}

int mp_queue_position(const mp_queue *queue, const mp_queue_node *node, uint64_t *cost) {
    int position = 0;
    *cost = 0;
    for (const mp_queue_node *at = mp_queue_first(queue); at; at = mp_queue_next(queue, at)) {
        if (at->priority > node->priority || (at->priority == node->priority && at->since_ns >= node->since_ns))
            continue;
        position++;
        *cost += at->cost;
    }
    return position;
}

void mp_queue_close(mp_queue *queue) { queue->closed = true; }
