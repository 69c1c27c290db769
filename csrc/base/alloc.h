/* alloc.h: heap memory, aligned to 64 bytes, tagged by purpose and counted; and the byte budget that big consumers
 * (weights, KV blocks, scratch, queued requests) charge before they allocate. */
#ifndef MP_BASE_ALLOC_H
#define MP_BASE_ALLOC_H

#include "base/error.h"

typedef enum mp_tag { /* what memory is for; mp_alloc_bytes() reports each */
    MP_TAG_MISC,
    MP_TAG_SPEC,
    MP_TAG_WEIGHTS,
    MP_TAG_KV,
    MP_TAG_SCRATCH,
    MP_TAG_REQUEST,
    MP_TAG_POOL,
    MP_TAG_COUNT
} mp_tag;

/* NULL when refused. bytes 0 gives a valid pointer. The size is kept in a header before the block: free needs none. */
void *mp_alloc(size_t bytes, mp_tag tag);
void *mp_alloc_zeroed(size_t bytes, mp_tag tag);
/* count * size with overflow check; zeroed. */
void *mp_alloc_array(size_t count, size_t size, mp_tag tag);
/* Grows or shrinks, keeping the smaller of both contents. On failure returns NULL and the old block stays. */
void *mp_realloc(void *memory, size_t bytes, mp_tag tag);
char *mp_strdup(const char *text, mp_tag tag);
void mp_free(void *memory); /* NULL is legal */
/* Live bytes of a tag, headers excluded. */
uint64_t mp_alloc_bytes(mp_tag tag);
/* Memory that did not come from here counts too: so many bytes more, or fewer. */
void mp_alloc_count(mp_tag tag, int64_t bytes);
const char *mp_tag_name(mp_tag tag);

/* Large blocks of KV and scratch that the calling thread allocates lie on this memory node (base/sys.h) from now on,
 * whoever touches them first; -1: where they are touched. */
void mp_alloc_prefer_node(int node);

/* MP_MEMORY_EXHAUSTED for `bytes` of `what`. */
mp_status mp_fail_memory(mp_error *error, uint64_t bytes, const char *what);

/* A budget: bytes in use and a limit. The registry's governor owns the process's; engines take from it before they
 * allocate and give back after they free. Lock-free. */
typedef struct mp_budget {
    _Atomic uint64_t used;
    _Atomic uint64_t limit; /* UINT64_MAX = none */
} mp_budget;
bool mp_budget_take(mp_budget *budget, uint64_t bytes); /* false: refused, nothing taken */
void mp_budget_give(mp_budget *budget, uint64_t bytes);

#endif
