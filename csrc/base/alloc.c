/* alloc.c: see alloc.h.
 *
 *   | header, 64 bytes: size, tag, mark | the caller's block, 64-byte aligned ... |
 */
#include "base/alloc.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/sanitize.h"
#include "base/sys.h"

enum { ALIGNMENT = 64, HEADER = 64 };
static const uint32_t LIVE = 0x6D706F6Fu, DEAD = 0xDEADB10Cu;

typedef struct header {
    size_t bytes;
    uint32_t tag, mark;
} header;
_Static_assert(sizeof(header) <= HEADER, "the header fits before the block");

/* Each counter has its own pair of cache lines, so threads that allocate with different tags do not contend. */
static struct {
    _Alignas(128) _Atomic uint64_t bytes;
} live[MP_TAG_COUNT];

static _Thread_local int preferred_node = -1;

static const char *const tag_names[MP_TAG_COUNT] = {
    [MP_TAG_MISC] = "misc",       [MP_TAG_SPEC] = "spec",       [MP_TAG_WEIGHTS] = "weights", [MP_TAG_KV] = "kv",
    [MP_TAG_SCRATCH] = "scratch", [MP_TAG_REQUEST] = "request", [MP_TAG_POOL] = "pool",
};

const char *mp_tag_name(mp_tag tag) { return (unsigned)tag < MP_TAG_COUNT ? tag_names[tag] : "unknown"; }

uint64_t mp_alloc_bytes(mp_tag tag) {
    assert((unsigned)tag < MP_TAG_COUNT);
    return atomic_load_explicit(&live[tag].bytes, memory_order_relaxed);
}

void mp_alloc_count(mp_tag tag, int64_t bytes) {
    atomic_fetch_add_explicit(&live[tag].bytes, (uint64_t)bytes, memory_order_relaxed);
}

static header *header_of(void *memory) {
    header *head = (header *)((uint8_t *)memory - HEADER);
    MP_UNGUARD(head, HEADER);
    assert(head->mark == LIVE && "not a live block of mp_alloc");
    return head;
}

void mp_alloc_prefer_node(int node) { preferred_node = node; }

/* Must precede the first write to a page. */
static void prefer(void *memory, size_t bytes, mp_tag tag) {
    if (preferred_node >= 0 && (tag == MP_TAG_KV || tag == MP_TAG_SCRATCH))
        mp_sys_prefer_node(memory, bytes, preferred_node);
}

void *mp_alloc(size_t bytes, mp_tag tag) {
    assert((unsigned)tag < MP_TAG_COUNT);
    size_t total;
    if (__builtin_add_overflow(bytes, (size_t)HEADER, &total) || total > PTRDIFF_MAX)
        return NULL;
    header *head = mp_sys_alloc(total, ALIGNMENT);
    if (!head)
        return NULL;
    prefer(head, total, tag);
    *head = (header){.bytes = bytes, .tag = (uint32_t)tag, .mark = LIVE};
    MP_GUARD(head, HEADER);
    atomic_fetch_add_explicit(&live[tag].bytes, bytes, memory_order_relaxed);
    return (uint8_t *)head + HEADER;
}

void *mp_alloc_zeroed(size_t bytes, mp_tag tag) {
    void *memory = mp_alloc(bytes, tag);
    if (memory && !mp_sys_alloc_is_zero(bytes + HEADER))
        memset(memory, 0, bytes);
    return memory;
}

void *mp_alloc_array(size_t count, size_t size, mp_tag tag) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes))
        return NULL;
    return mp_alloc_zeroed(bytes, tag);
}

void *mp_realloc(void *memory, size_t bytes, mp_tag tag) {
    if (!memory)
        return mp_alloc(bytes, tag);
    header *head = header_of(memory);
    size_t old = head->bytes;
    MP_GUARD(head, HEADER);
    void *moved = mp_alloc(bytes, tag);
    if (!moved)
        return NULL;
    memcpy(moved, memory, old < bytes ? old : bytes);
    mp_free(memory);
    return moved;
}

void *mp_region_alloc(size_t bytes, mp_tag tag) {
    assert((unsigned)tag < MP_TAG_COUNT && bytes > 0 && bytes % MP_HUGE_PAGE == 0);
    void *region = mp_sys_alloc(bytes, MP_HUGE_PAGE);
    if (!region)
        return NULL;
    prefer(region, bytes, tag);
    mp_sys_advise(region, bytes, MP_ADVISE_HUGE);
    mp_alloc_count(tag, (int64_t)bytes);
    return region;
}

void mp_region_free(void *region, size_t bytes, mp_tag tag) {
    MP_UNGUARD(region, bytes);
    mp_alloc_count(tag, -(int64_t)bytes);
    mp_sys_free(region, bytes);
}

char *mp_strdup(const char *text, mp_tag tag) {
    size_t bytes = strlen(text) + 1;
    char *copy = mp_alloc(bytes, tag);
    if (copy)
        memcpy(copy, text, bytes);
    return copy;
}

void mp_free(void *memory) {
    if (!memory)
        return;
    header *head = header_of(memory);
    atomic_fetch_sub_explicit(&live[head->tag].bytes, head->bytes, memory_order_relaxed);
    head->mark = DEAD;
    mp_sys_free(head, head->bytes + HEADER);
}

mp_status mp_fail_memory(mp_error *error, uint64_t bytes, const char *what) {
    if (bytes < 1000000)
        return mp_fail(error, MP_MEMORY_EXHAUSTED, "not enough memory: %llu bytes for %s",
                       (unsigned long long)bytes, what);
    return mp_fail(error, MP_MEMORY_EXHAUSTED, "not enough memory: %.1f MB for %s", (double)bytes / 1e6, what);
}

/* Takes bytes that no account has reserved. *now_used receives the bytes then in use. Concurrent calls of
 * mp_budget_reserve and this one may both fail, but never both succeed beyond the limit: each changes its counter first
 * and then checks the sum. */
static bool take_free(mp_budget *budget, uint64_t bytes, uint64_t *now_used) {
    uint64_t used = atomic_load(&budget->used);
    do {
        uint64_t limit = atomic_load(&budget->limit), reserved = atomic_load(&budget->reserved);
        uint64_t most = reserved < limit ? limit - reserved : 0;
        if (used > most || bytes > most - used)
            return false;
    } while (!atomic_compare_exchange_weak(&budget->used, &used, used + bytes));
    *now_used = used + bytes;
    uint64_t reserved = atomic_load(&budget->reserved);
    if (!reserved || used + bytes + reserved <= atomic_load(&budget->limit))
        return true;
    atomic_fetch_sub(&budget->used, bytes);
    return false;
}

static bool is_within(mp_budget *budget, uint64_t reserved) {
    uint64_t limit = atomic_load(&budget->limit);
    return reserved <= limit && atomic_load(&budget->used) <= limit - reserved;
}

bool mp_budget_reserve(mp_budget *budget, uint64_t bytes) {
    /* A load that waits asks repeatedly: a refusal must not count the bytes, even for an instant, or a take at that
     * instant would fail without need. */
    uint64_t reserved = atomic_load(&budget->reserved);
    if (bytes > UINT64_MAX - reserved || !is_within(budget, reserved + bytes))
        return false;
    reserved = atomic_fetch_add(&budget->reserved, bytes) + bytes;
    if (is_within(budget, reserved))
        return true;
    mp_budget_unreserve(budget, bytes);
    return false;
}

void mp_budget_unreserve(mp_budget *budget, uint64_t bytes) { atomic_fetch_sub(&budget->reserved, bytes); }

/* Subtracts up to `bytes` from the account's reservation. Returns the number subtracted. */
static uint64_t take_off(mp_budget *account, uint64_t bytes) {
    uint64_t left = atomic_load(&account->reserved), taken;
    do
        taken = left < bytes ? left : bytes;
    while (taken && !atomic_compare_exchange_weak(&account->reserved, &left, left - taken));
    return taken;
}

/* Moves up to `bytes` from the account's reservation to the used bytes of the budget above. Returns their number. */
static uint64_t take_own(mp_budget *account, uint64_t bytes) {
    uint64_t own = take_off(account, bytes);
    if (own) { /* in this order: others must not see the bytes as free in between */
        atomic_fetch_add(&account->above->used, own);
        atomic_fetch_sub(&account->above->reserved, own);
    }
    return own;
}

static void refill(mp_budget *account, uint64_t bytes) {
    atomic_fetch_add(&account->above->reserved, bytes);
    atomic_fetch_sub(&account->above->used, bytes);
    atomic_fetch_add(&account->reserved, bytes);
    if (!atomic_load(&account->filling)) /* the load ended meanwhile */
        mp_budget_unreserve(account->above, take_off(account, bytes));
}

/* Returns the bytes of the budget above that are neither free nor the account's. */
static uint64_t held_by_others(const mp_budget *account) {
    uint64_t all = atomic_load(&account->above->used) + atomic_load(&account->above->reserved);
    uint64_t own = atomic_load(&account->used) + atomic_load(&account->reserved);
    return all > own ? all - own : 0;
}

bool mp_budget_take_beside(mp_budget *account, uint64_t bytes) {
    uint64_t now_used;
    if (take_free(account->above, bytes, &now_used))
        return true;
    /* read before the attempt that decides, so that a later return of bytes shows */
    atomic_store(&account->beside, held_by_others(account));
    return take_free(account->above, bytes, &now_used);
}

bool mp_budget_gained(const mp_budget *account) { return held_by_others(account) < atomic_load(&account->beside); }

static bool take_above(mp_budget *account, uint64_t bytes) {
    uint64_t own = take_own(account, bytes);
    if (own < bytes && !mp_budget_take_beside(account, bytes - own)) {
        refill(account, own);
        return false;
    }
    atomic_fetch_add(&account->used, bytes);
    return true;
}

bool mp_budget_take(mp_budget *budget, uint64_t bytes) {
    if (budget->above)
        return take_above(budget, bytes);
    uint64_t now_used;
    if (!take_free(budget, bytes, &now_used))
        return false;
    if (!budget->cover || budget->cover(budget, now_used))
        return true;
    mp_budget_give(budget, bytes);
    return false;
}

void mp_budget_give(mp_budget *budget, uint64_t bytes) {
    uint64_t before = atomic_fetch_sub_explicit(&budget->used, bytes, memory_order_acq_rel);
    assert(before >= bytes && "more bytes returned than reserved");
    (void)before;
    if (budget->above && atomic_load(&budget->filling))
        refill(budget, bytes);
    else if (budget->above)
        mp_budget_give(budget->above, bytes);
}

void mp_budget_begin_load(mp_budget *account, uint64_t bytes) {
    atomic_fetch_add(&account->filling, 1);
    atomic_fetch_add(&account->reserved, bytes);
}

void mp_budget_end_load(mp_budget *account) {
    if (atomic_fetch_sub(&account->filling, 1) == 1)
        mp_budget_unreserve(account->above, atomic_exchange(&account->reserved, 0));
}
