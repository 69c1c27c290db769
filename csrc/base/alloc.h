/* alloc.h: heap memory, aligned to 64 bytes, counted by purpose; and the byte budget that large consumers (weights, KV
 * blocks, scratch, queued requests) charge before they allocate. Thread-safe. */
#ifndef MP_BASE_ALLOC_H
#define MP_BASE_ALLOC_H

#include "base/error.h"

typedef enum mp_tag { /* purpose of memory; mp_alloc_bytes reports each */
    MP_TAG_MISC,
    MP_TAG_SPEC,
    MP_TAG_WEIGHTS,
    MP_TAG_KV,
    MP_TAG_SCRATCH,
    MP_TAG_REQUEST,
    MP_TAG_POOL,
    MP_TAG_COUNT
} mp_tag;

/* Returns NULL when refused. 0 bytes give a valid pointer. A header before the block keeps its size. */
void *mp_alloc(size_t bytes, mp_tag tag);
void *mp_alloc_zeroed(size_t bytes, mp_tag tag);
/* Zeroed memory of count * size bytes; returns NULL when the product overflows. */
void *mp_alloc_array(size_t count, size_t size, mp_tag tag);
/* Grow or shrink a block; keeps the smaller of both contents. On failure returns NULL and the old block stays valid. */
void *mp_realloc(void *memory, size_t bytes, mp_tag tag);
char *mp_strdup(const char *text, mp_tag tag);
void mp_free(void *memory); /* NULL is legal */
/* Live bytes with a tag, headers excluded. */
uint64_t mp_alloc_bytes(mp_tag tag);
/* Count memory of another source too: `bytes` more, or fewer when negative. */
void mp_alloc_count(mp_tag tag, int64_t bytes);
const char *mp_tag_name(mp_tag tag);

/* Place large blocks of KV and scratch that the calling thread allocates on this memory node (base/sys.h) from now on.
 * -1: on the node of the thread that touches a page first. */
void mp_alloc_prefer_node(int node);

/* Fail with MEMORY_EXHAUSTED: `what` needs `bytes`. */
mp_status mp_fail_memory(mp_error *error, uint64_t bytes, const char *what);

/* A budget: bytes in use and a limit. The registry's governor owns the budget of the process; engines take from it
 * before they allocate and give back after they free. Lock-free. */
typedef struct mp_budget {
    _Atomic uint64_t used;
    _Atomic uint64_t limit; /* UINT64_MAX = none */
} mp_budget;
bool mp_budget_take(mp_budget *budget, uint64_t bytes); /* returns false when refused: nothing taken */
void mp_budget_give(mp_budget *budget, uint64_t bytes);

#endif
