/* alloc.h: heap memory, aligned to 64 bytes and counted by purpose, and the byte budget that large consumers (weights,
 * KV blocks, scratch, queued requests) reserve from before they allocate. Thread-safe. */
#ifndef MP_BASE_ALLOC_H
#define MP_BASE_ALLOC_H

#include "base/error.h"

typedef enum mp_tag { /* purpose of a block; mp_alloc_bytes reports the bytes of each */
    MP_TAG_MISC,
    MP_TAG_SPEC,
    MP_TAG_WEIGHTS,
    MP_TAG_KV,
    MP_TAG_SCRATCH,
    MP_TAG_REQUEST,
    MP_TAG_POOL,
    MP_TAG_COUNT
} mp_tag;

/* Allocate a block, to be freed with mp_free. Returns NULL when the system refuses the memory, and a valid pointer for
 * 0 bytes. A header before the block stores its size. */
void *mp_alloc(size_t bytes, mp_tag tag);
void *mp_alloc_zeroed(size_t bytes, mp_tag tag);
/* Zeroed memory of count * size bytes; returns NULL when the product overflows. */
void *mp_alloc_array(size_t count, size_t size, mp_tag tag);
/* Grow or shrink a block (NULL: allocate one), copying as many bytes as fit into both sizes. On failure returns NULL,
 * and the old block stays valid. */
void *mp_realloc(void *memory, size_t bytes, mp_tag tag);
char *mp_strdup(const char *text, mp_tag tag);
void mp_free(void *memory); /* NULL is legal */
/* Allocate a region, aligned to MP_HUGE_PAGE, and ask the system to back it by huge pages. `bytes`: a multiple of
 * MP_HUGE_PAGE. Returns NULL when the system refuses. Free it with mp_region_free, with the same size and tag: a region
 * has no header. */
void *mp_region_alloc(size_t bytes, mp_tag tag);
void mp_region_free(void *region, size_t bytes, mp_tag tag);
/* Live bytes of a tag, without headers. */
uint64_t mp_alloc_bytes(mp_tag tag);
/* Add `bytes` (may be negative) to the live bytes of a tag, for memory that mp_alloc did not allocate. */
void mp_alloc_count(mp_tag tag, int64_t bytes);
const char *mp_tag_name(mp_tag tag);

/* From now on, place large KV and SCRATCH blocks that the calling thread allocates on memory node `node`
 * (mp_sys_prefer_node). -1: place each page on the node of the thread that touches it first. */
void mp_alloc_prefer_node(int node);

/* Fail with MEMORY_EXHAUSTED and a message that `what` needs `bytes` bytes. */
mp_status mp_fail_memory(mp_error *error, uint64_t bytes, const char *what);

/* A budget: bytes in use and a limit. The registry's governor owns the budget of the process; engines reserve bytes
 * from it before they allocate and return them after they free. Lock-free.
 *
 * An account is a budget of one model below that of the process (`above`). Bytes that a load has reserved can be taken
 * through the model's account only. */
typedef struct mp_budget {
    _Atomic uint64_t used;     /* an account: the bytes that its model has taken */
    _Atomic uint64_t limit;    /* UINT64_MAX = none, as in every account */
    _Atomic uint64_t reserved; /* not used yet; only accounts may take them. An account: its own part of them */
    _Atomic int filling;       /* an account: loads that hold reservations; bytes given back are reserved again */
    _Atomic uint64_t beside;   /* an account: what others held at the latest refused take; its owner resets it to 0 */
    struct mp_budget *above;   /* NULL: none */
    /* Called after each take, with the bytes then in use: charges them to the budget above this one. Returns false if
     * that refuses. Must be thread-safe. NULL: there is no budget above. */
    bool (*cover)(struct mp_budget *budget, uint64_t used);
} mp_budget;
/* false: over the limit, or the budget above refuses; nothing is taken. */
bool mp_budget_take(mp_budget *budget, uint64_t bytes);
void mp_budget_give(mp_budget *budget, uint64_t bytes);
/* Sets `bytes` aside. Returns false, and does nothing, if they are not free. */
bool mp_budget_reserve(mp_budget *budget, uint64_t bytes);
void mp_budget_unreserve(mp_budget *budget, uint64_t bytes);
/* A load begins to take bytes that were reserved in `account->above`, or ends. mp_budget_end_load gives back what the
 * account has left, unless another load of the model still runs. */
void mp_budget_begin_load(mp_budget *account, uint64_t bytes);
void mp_budget_end_load(mp_budget *account);
/* Takes bytes from the budget above the account, outside the account. Otherwise as mp_budget_take. */
bool mp_budget_take_beside(mp_budget *account, uint64_t bytes);
/* True if others have given bytes back since the latest take for the account was refused. */
bool mp_budget_gained(const mp_budget *account);
/* The budget whose limit applies: that above an account. */
static inline mp_budget *mp_budget_top(mp_budget *budget) { return budget->above ? budget->above : budget; }

#endif
