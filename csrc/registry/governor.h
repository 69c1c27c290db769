/* governor.h: the memory budget for models, caches and queues of the process.
 *
 *   offered = what machine and cgroup leave to the process      reserve = min(2 GiB, offered / 4)
 *   limit   = 80 % of (offered - reserve), unless configured. For a model that needs more, but fits into
 *             offered - reserve, the governor first evicts all other models, then raises the limit and logs it
 *   budget.used + reserved <= limit when a load is admitted
 *
 * A load reserves its bytes, charges the budget while it allocates, and then releases the reservation. If a load needs
 * more than is free, the governor asks the reclaimers (the registries) to free idle memory.
 *
 * Process-wide unless a registry configures a limit of its own. Thread-safe. */
#ifndef MP_REGISTRY_GOVERNOR_H
#define MP_REGISTRY_GOVERNOR_H

#include "base/alloc.h"
#include "base/sys.h"
#include "registry/shared.h"

typedef struct mp_governor mp_governor;

enum { MP_SIZE_TEXT = 32 }; /* bytes of a text of mp_size_text, with the NUL */

/* Returns the limit of the rule above. *most: offered - reserve. */
uint64_t mp_governor_limit_of(uint64_t offered, uint64_t *most);
/* limit > 0: opens a private governor with this limit in bytes. limit 0: opens the governor of the process, with
 * MPOOL_MEMORY_MB or the rule above. Each call needs one mp_governor_close. */
mp_status mp_governor_open(uint64_t limit, mp_governor **governor, mp_error *error);
void mp_governor_close(mp_governor *governor); /* NULL is legal */
/* Returns the budget that loaders and engines charge. The budget lives as long as the governor. */
mp_budget *mp_governor_budget(mp_governor *governor);

/* --- guards --- */

/* Reserved bytes; zeroed = none. Plain data with one owner, which may hand over a part with mp_guard_split and must
 * release the guard once. */
typedef struct mp_guard {
    mp_governor *governor;
    uint64_t bytes;
    mp_budget *account; /* the model that takes the bytes; NULL: none takes them yet */
} mp_guard;

/* Say in `to` what a need of `bytes` exceeds: the bytes that are free, or the limit if it exceeds all of it. */
enum { MP_SHORTAGE_TEXT = 2 * MP_SIZE_TEXT + 32 };
const char *mp_shortage_text(char to[MP_SHORTAGE_TEXT], uint64_t bytes, uint64_t left, uint64_t limit);
/* Reserves `wanted` bytes if they are free, else `needed` (<= wanted). Waits while other loads hold reservations,
 * reclaimers free memory, or models in use could free enough once their requests have ended; until give_up(arg) returns
 * true (called every 20 ms without a lock; NULL: never). Callers get memory in the order of their calls. `urgent`: the
 * caller does not wait for its turn, because it holds memory that other callers may wait for. MEMORY_EXHAUSTED names
 * the model and the bytes needed and free. CANCELLED if give_up returned true. Release the guard once the load has
 * charged the budget itself, or has failed. */
mp_status mp_governor_reserve(mp_governor *governor, const char *key, uint64_t needed, uint64_t wanted, bool urgent,
                              bool (*give_up)(void *arg), void *arg, mp_guard *guard, mp_error *error);
/* True while the next caller of mp_governor_reserve would wait, at least MP_POLL_NS, for loads or requests to end. */
bool mp_governor_stuck(mp_governor *governor);
/* Reserves `bytes` if they are free now and no other caller waits for memory. Never waits, never reclaims. */
bool mp_governor_try_reserve(mp_governor *governor, uint64_t bytes, mp_guard *guard);
/* Moves `bytes` of the reservation, or all of it if it is smaller, to a new guard. Legal before mp_guard_lend. */
mp_guard mp_guard_split(mp_guard *guard, uint64_t bytes);
/* Lets the load take the reserved bytes through the account of its model. Others cannot take them, not even for
 * requests and caches. */
void mp_guard_lend(mp_guard *guard, mp_budget *account);
/* Releases the reserved bytes that the load has not taken. The guard still counts as a running load, so callers that
 * wait for memory wait until mp_guard_release. */
void mp_guard_give(mp_guard *guard);
void mp_guard_release(mp_guard *guard); /* legal for an empty guard */

/* For audits, while no other thread runs. Takes no lock. Returns the bytes that guards hold, and sets *loads to the
 * number of guards. */
uint64_t mp_governor_reserved(mp_governor *governor, int *loads);

/* --- pressure --- */

typedef enum mp_pressure { MP_PRESSURE_LOW, MP_PRESSURE_NORMAL, MP_PRESSURE_HIGH, MP_PRESSURE_CRITICAL } mp_pressure;
/* Share of the limit in use: low below 50 %, normal below 70 %, high below 85 %, critical above. */
mp_pressure mp_governor_pressure(mp_governor *governor);
const char *mp_pressure_name(mp_pressure pressure);

/* Memory that a caller lacks. */
typedef struct mp_shortage {
    mp_governor *governor;
    uint64_t bytes, free; /* `bytes` were lacking when `free` bytes were free; UINT64_MAX: whatever is free */
    const void *asker;    /* a reclaimer does not count what this one of its holders could free; NULL: counts all */
} mp_shortage;

/* Returns the bytes that are still lacking: fewer than before if memory has become free. Must not hold a lock. Call
 * this only after counting the bytes that are being freed already. In the other order, bytes that become free between
 * the two calls would be in neither count, and one model too many would be evicted. */
uint64_t mp_shortage_left(const mp_shortage *shortage);

/* Frees memory on request. Must stay valid while registered. */
typedef struct mp_reclaimer {
    /* Starts to free at least the lacking bytes of idle memory, the cheapest first; never blocks. `whole`: frees
     * nothing unless it can free all of them. Returns how many bytes are being freed, including those of earlier calls;
     * 0 = nothing can be freed. Called without a lock of the governor. */
    uint64_t (*reclaim)(void *arg, const mp_shortage *shortage, bool whole);
    /* Returns how many bytes the reclaimer could free, including bytes being freed, without what `asker` holds (NULL:
     * with all). Called without a lock of the governor. */
    uint64_t (*possible)(void *arg, const void *asker);
    /* As `possible`, including what could be freed once the requests of models in use have ended. Called without a lock
     * of the governor. */
    uint64_t (*later)(void *arg, const void *asker);
    /* Writes what holds how much memory, for messages. Returns the length of the text. Called without a lock of the
     * governor. NULL: nothing to say. */
    size_t (*holders)(void *arg, char *text, size_t size);
    void *arg;
    struct mp_reclaimer *next; /* guarded by: the governor's lock */
    /* Threads inside a function of the reclaimer; must be 0 when it is added. Guarded by: the governor's lock. */
    int callers;
} mp_reclaimer;
void mp_governor_add_reclaimer(mp_governor *governor, mp_reclaimer *reclaimer);
/* Returns when no thread is inside the reclaimer. Legal for a reclaimer that was never added. */
void mp_governor_remove_reclaimer(mp_governor *governor, mp_reclaimer *reclaimer);
/* Asks the reclaimers, one after the other, until `bytes` are being freed. Returns how many bytes are being freed.
 * `whole`: a single reclaimer frees all of `bytes` if one can, else several do if together they can. */
uint64_t mp_governor_reclaim(mp_governor *governor, uint64_t bytes, bool whole);
/* True if `bytes` are free, or may become free: loads and evictions end, and models in use become idle. */
bool mp_governor_may_free(mp_governor *governor, uint64_t bytes);

/* Appends the holders of memory to the message of a MEMORY_EXHAUSTED error, as far as it has room. Must not hold a
 * lock. */
void mp_governor_name_holders(mp_governor *governor, mp_error *error);

/* True if loads run, or a holder other than `asker` may free memory, now or once its requests have ended. Must not hold
 * a lock. */
bool mp_governor_may_gain(mp_governor *governor, const void *asker);

/* Writes a number of bytes for a message, in MB, or in B if it would be "0.0 MB". Returns `text`. */
const char *mp_size_text(char text[MP_SIZE_TEXT], uint64_t bytes);
/* Call after memory was freed: waiting loads check again. */
void mp_governor_notify(mp_governor *governor);

/* Returns the slot (shared.h) of the process-wide governor. */
mp_shared_slot *mp_governor_slot(void);
/* See registry/fork.h. A second call of the same kind does nothing. */
void mp_governor_fork_before(mp_governor *governor);
void mp_governor_fork_parent(mp_governor *governor);
void mp_governor_fork_child(mp_governor *governor);

#endif
