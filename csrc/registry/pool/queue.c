/* queue.c: see queue.h. */
#include "registry/pool/queue.h"

#include <assert.h>

void mp_queue_init(mp_queue *queue, int capacity) {
    *queue = (mp_queue){.capacity = capacity};
    for (int i = 0; i < MP_QUEUE_PRIORITIES; i++)
        queue->ends[i].prev = queue->ends[i].next = &queue->ends[i];
}

static int level_of(int priority) {
    if (priority < 0)
        return 0;
    return priority < MP_QUEUE_PRIORITIES ? priority : MP_QUEUE_PRIORITIES - 1;
}

/* Between `before` and the one behind it. */
static void insert(mp_queue *queue, mp_queue_node *node, mp_queue_node *before, int level) {
    assert(!mp_queue_holds(node) && "already waiting");
    node->priority = (uint8_t)level;
    node->prev = before;
    node->next = before->next;
    before->next->prev = node;
    before->next = node;
    queue->count++;
}

mp_queue_answer mp_queue_push(mp_queue *queue, mp_queue_node *node, int priority) {
    if (queue->closed)
        return MP_QUEUE_CLOSED;
    if (mp_queue_full(queue))
        return MP_QUEUE_FULL;
    int level = level_of(priority);
    insert(queue, node, queue->ends[level].prev, level);
    return MP_QUEUE_TAKEN;
}

void mp_queue_push_front(mp_queue *queue, mp_queue_node *node, int priority) {
    int level = level_of(priority);
    insert(queue, node, &queue->ends[level], level);
}

void mp_queue_remove(mp_queue *queue, mp_queue_node *node) {
    assert(mp_queue_holds(node) && queue->count > 0);
    node->prev->next = node->next;
    node->next->prev = node->prev;
    node->prev = node->next = NULL;
    queue->count--;
}

mp_queue_node *mp_queue_first(const mp_queue *queue) {
    for (int i = 0; i < MP_QUEUE_PRIORITIES; i++)
        if (queue->ends[i].next != &queue->ends[i])
            return queue->ends[i].next;
    return NULL;
}

mp_queue_node *mp_queue_next(const mp_queue *queue, const mp_queue_node *node) {
    if (node->next != &queue->ends[node->priority])
        return node->next;
    for (int i = node->priority + 1; i < MP_QUEUE_PRIORITIES; i++)
        if (queue->ends[i].next != &queue->ends[i])
            return queue->ends[i].next;
    return NULL;
}

mp_queue_node *mp_queue_pop(mp_queue *queue) {
    mp_queue_node *node = mp_queue_first(queue);
    if (node)
        mp_queue_remove(queue, node);
    return node;
}

int mp_queue_position(const mp_queue *queue, const mp_queue_node *node) {
    int position = 0;
    for (const mp_queue_node *at = mp_queue_first(queue); at && at != node; at = mp_queue_next(queue, at))
        position++;
    return position;
}

void mp_queue_close(mp_queue *queue) { queue->closed = true; }
