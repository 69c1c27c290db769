/* heap.c: see heap.h. The merge of two heaps makes the root with the larger key the first child of the other root. */
#include "registry/pool/heap.h"

#include <assert.h>

static mp_heap_node *heap_merge(mp_heap_node *a, mp_heap_node *b) {
    if (!a || !b)
        return a ? a : b;
    mp_heap_node *root = mp_heap_before(b, a) ? b : a, *other = root == a ? b : a;
    other->next = root->child;
    if (other->next)
        other->next->link = &other->next;
    other->link = &root->child;
    root->child = other;
    root->next = NULL;
    return root;
}

/* Merges a list of siblings: in pairs from left to right, then all pairs from right to left. */
static mp_heap_node *merge_siblings(mp_heap_node *first) {
    mp_heap_node *pairs = NULL, *merged = NULL;
    while (first) {
        mp_heap_node *a = first, *b = a->next;
        first = b ? b->next : NULL;
        a = heap_merge(a, b);
        a->next = pairs;
        pairs = a;
    }
    while (pairs) {
        mp_heap_node *next = pairs->next;
        pairs->next = NULL;
        merged = heap_merge(merged, pairs);
        pairs = next;
    }
    return merged;
}

static void set_top(mp_heap *heap, mp_heap_node *top) {
    heap->top = top;
    if (top) {
        top->link = &heap->top;
        top->next = NULL;
    }
}

void mp_heap_insert(mp_heap *heap, mp_heap_node *node, uint64_t key) {
    assert(!mp_heap_holds(node));
    *node = (mp_heap_node){.key = key, .order = heap->inserted++};
    set_top(heap, heap_merge(heap->top, node));
}

void mp_heap_remove(mp_heap *heap, mp_heap_node *node) {
    assert(mp_heap_holds(node));
    *node->link = node->next;
    if (node->next)
        node->next->link = node->link;
    mp_heap_node *rest = merge_siblings(node->child);
    set_top(heap, heap_merge(heap->top, rest));
    node->link = NULL;
}
