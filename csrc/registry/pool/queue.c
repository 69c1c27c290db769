/* queue.c: see queue.h. */
#include "registry/pool/queue.h"

#include <assert.h>
#include <stddef.h>

#include "base/alloc.h"
#include "base/sys.h"

mp_status mp_queue_create(mp_queue *queue, const int capacity[MP_QUEUE_KINDS], mp_error *error) {
    *queue = (mp_queue){.count = 0};
    int flows = MP_QUEUE_SPARE_FLOWS;
    for (int i = 0; i < MP_QUEUE_KINDS; i++) {
        queue->capacity[i] = capacity[i];
        flows = capacity[i] < MP_QUEUE_FLOWS_MAX - flows ? flows + capacity[i] : MP_QUEUE_FLOWS_MAX;
    }
    MP_TRY(mp_flows_create(&queue->flows, flows, MP_QUEUE_PRIORITIES * MP_QUEUE_KINDS, error));
    size_t slots = (size_t)mp_flows_slots(&queue->flows);
    queue->flow = mp_alloc_array(slots, sizeof(mp_queue_flow), MP_TAG_POOL);
    if (queue->flow)
        return MP_OK;
    mp_queue_destroy(queue);
    return mp_fail_memory(error, slots * sizeof(mp_queue_flow), "a queue");
}

void mp_queue_destroy(mp_queue *queue) {
    mp_flows_destroy(&queue->flows);
    mp_free(queue->flow);
    queue->flow = NULL;
}

void mp_queue_node_init(mp_queue_node *node, int priority, int kind, uint64_t tenant, uint64_t since_ns) {
    int last = MP_QUEUE_PRIORITIES - 1;
    *node = (mp_queue_node){
        .priority = (uint8_t)(priority < 0 ? 0 : priority > last ? last : priority),
        .kind = kind > 0,
        .tenant = tenant,
        .since_ns = since_ns,
    };
}

/* --- lists --- */

static void insert_in_flow(mp_queue_flow *flow, mp_queue_node *node, bool front) {
    node->prev = front ? NULL : flow->last;
    node->next = front ? flow->first : NULL;
    *(node->prev ? &node->prev->next : &flow->first) = node;
    *(node->next ? &node->next->prev : &flow->last) = node;
}

static void insert_in_level(mp_queue_level *level, mp_queue_node *node, bool front) {
    node->before = front ? NULL : level->last;
    node->after = front ? level->first : NULL;
    *(node->before ? &node->before->after : &level->first) = node;
    *(node->after ? &node->after->before : &level->last) = node;
}

static void insert(mp_queue *queue, mp_queue_node *node, bool front) {
    assert(!mp_queue_holds(node) && "already queued");
    mp_queue_level *level = &queue->levels[node->priority];
    int group = node->priority * MP_QUEUE_KINDS + node->kind;
    bool fresh;
    node->flow = mp_flows_enter(&queue->flows, node->tenant, group, &fresh);
    mp_queue_flow *flow = &queue->flow[node->flow];
    if (fresh)
        *flow = (mp_queue_flow){.start = level->now};
    if (!flow->first) { /* the flow has no claim on service from the time in which it was empty */
        if (flow->start < level->now)
            flow->start = level->now;
        mp_heap_insert(&level->by_start, &flow->by_start, flow->start);
        level->waiting++;
    }
    insert_in_flow(flow, node, front);
    insert_in_level(level, node, front);
    mp_heap_insert(&level->by_age, &node->by_age, node->since_ns);
    queue->count++;
    if (++queue->counts[node->kind] == queue->capacity[node->kind])
        queue->full_since_ns[node->kind] = mp_sys_now_ns();
    queue->cost += node->cost;
}

mp_queue_result mp_queue_push(mp_queue *queue, mp_queue_node *node) {
    if (mp_queue_full(queue, node->kind))
        return MP_QUEUE_FULL;
    insert(queue, node, false);
    return MP_QUEUE_TAKEN;
}

uint64_t mp_queue_full_ns(const mp_queue *queue, int kind, uint64_t now_ns) {
    uint64_t since = queue->full_since_ns[kind];
    return queue->full_ns[kind] + (since && now_ns > since ? now_ns - since : 0);
}

void mp_queue_push_front(mp_queue *queue, mp_queue_node *node) { insert(queue, node, true); }

void mp_queue_remove(mp_queue *queue, mp_queue_node *node) {
    assert(mp_queue_holds(node) && queue->count > 0);
    mp_queue_level *level = &queue->levels[node->priority];
    mp_queue_flow *flow = &queue->flow[node->flow];
    *(node->prev ? &node->prev->next : &flow->first) = node->next;
    *(node->next ? &node->next->prev : &flow->last) = node->prev;
    *(node->before ? &node->before->after : &level->first) = node->after;
    *(node->after ? &node->after->before : &level->last) = node->before;
    mp_heap_remove(&level->by_age, &node->by_age);
    if (!flow->first) {
        mp_heap_remove(&level->by_start, &flow->by_start);
        level->waiting--;
    }
    mp_flows_leave(&queue->flows, node->flow);
    queue->count--;
    if (queue->counts[node->kind]-- == queue->capacity[node->kind]) {
        queue->full_ns[node->kind] = mp_queue_full_ns(queue, node->kind, mp_sys_now_ns());
        queue->full_since_ns[node->kind] = 0;
    }
    queue->cost -= node->cost;
}

void mp_queue_take(mp_queue *queue, mp_queue_node *node) {
    mp_queue_level *level = &queue->levels[node->priority];
    mp_queue_flow *flow = &queue->flow[node->flow];
    uint64_t cost = node->cost + 1; /* + 1: flows whose nodes have cost 0 (unknown) take turns too */
    level->rest += cost;
    level->now += level->rest / (uint64_t)level->waiting;
    level->rest %= (uint64_t)level->waiting;
    mp_queue_remove(queue, node);
    flow->start += cost;
    if (flow->first) {
        mp_heap_remove(&level->by_start, &flow->by_start);
        mp_heap_insert(&level->by_start, &flow->by_start, flow->start);
    }
    /* Virtual time must not stay behind the earliest start of all waiting flows: a new flow starts at virtual time, and
     * would be served before flows that have waited. It falls behind when a flow takes much at once and then stops. */
    if (level->by_start.top && level->now < level->by_start.top->key)
        level->now = level->by_start.top->key;
}

/* --- order --- */

static mp_queue_flow *flow_of(mp_heap_node *by_start) {
    return (mp_queue_flow *)(void *)((char *)by_start - offsetof(mp_queue_flow, by_start));
}

mp_queue_node *mp_queue_best(const mp_queue *queue, uint64_t now_ns) {
    mp_queue_node *best = NULL;
    uint64_t best_age = 0; /* levels of priority gained */
    for (int i = 0; i < MP_QUEUE_PRIORITIES; i++) {
        const mp_queue_level *level = &queue->levels[i];
        if (!level->waiting)
            continue;
        uint64_t oldest_ns = level->by_age.top->key;
        uint64_t age = now_ns > oldest_ns ? (now_ns - oldest_ns) / MP_QUEUE_AGEING_NS : 0;
        if (best && age <= best_age + (uint64_t)(i - best->priority))
            continue;
        /* Serve the level's flows in turn here too: if it served its oldest nodes, a tenant with many old nodes would
         * get more than its share. The level keeps its age until the oldest node had its turn. */
        best = flow_of(level->by_start.top)->first;
        best_age = age;
    }
    return best;
}

bool mp_queue_precedes(const mp_queue *queue, const mp_queue_node *a, const mp_queue_node *b) {
    if (a->priority != b->priority)
        return a->priority < b->priority;
    return mp_heap_before(&queue->flow[a->flow].by_start, &queue->flow[b->flow].by_start);
}

/* Returns the first node of `level`, or of the first later level that has one; NULL if there is none. */
static mp_queue_node *first_from(const mp_queue *queue, int level) {
    while (level < MP_QUEUE_PRIORITIES && !queue->levels[level].first)
        level++;
    return level < MP_QUEUE_PRIORITIES ? queue->levels[level].first : NULL;
}

mp_queue_node *mp_queue_first(const mp_queue *queue) { return first_from(queue, 0); }

mp_queue_node *mp_queue_next(const mp_queue *queue, const mp_queue_node *node) {
    return node->after ? node->after : first_from(queue, node->priority + 1);
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
