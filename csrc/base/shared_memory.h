/* shared_memory.h: memory shared between processes: an unnamed file (a memfd on Linux, an object of shm_open
 * elsewhere), mapped by each process that has its descriptor.
 *
 * The size is fixed at creation, so no process with the descriptor can truncate it while others use it: by a seal on
 * Linux, by the system on macOS. mp_shm_freeze seals the content too, on Linux only. */
#ifndef MP_BASE_SHARED_MEMORY_H
#define MP_BASE_SHARED_MEMORY_H

#include "base/alloc.h"

typedef struct mp_shm {
    void *data;   /* page-aligned; NULL = none */
    size_t bytes; /* as requested */
    int fd;       /* close-on-exec */
    mp_tag tag;
    bool counted; /* included in mp_alloc_bytes, in the creating process */
} mp_shm;

/* Create zeroed, writable memory with every page allocated. `name` is shown in /proc/<pid>/maps. MEMORY_EXHAUSTED or IO
 * when the system refuses. */
mp_status mp_shm_create(mp_shm *shm, size_t bytes, mp_tag tag, const char *name, mp_error *error);
/* mp_shm_create in two steps: create the memory without pages, then allocate its pages with mp_shm_fill. Several
 * threads may fill different parts, because allocating many pages is slow; each page is placed on the memory node of
 * the thread that fills it. A page that was never filled is allocated on first use, which kills the process if memory
 * is exhausted. mp_shm_fill returns false if memory is exhausted. */
mp_status mp_shm_create_empty(mp_shm *shm, size_t bytes, mp_tag tag, const char *name, mp_error *error);
bool mp_shm_fill(const mp_shm *shm, size_t from, size_t bytes);
/* Map memory that another process created. Takes ownership of the descriptor, also on failure. INTEGRITY when the
 * memory is smaller than `bytes`, or on Linux when its size is not sealed. */
mp_status mp_shm_map(mp_shm *shm, int fd, size_t bytes, bool writable, mp_error *error);
/* Make this process's mapping read-only, at the same address. From Linux 5.1 on, a seal also refuses every new writable
 * mapping, by any process. */
mp_status mp_shm_freeze(mp_shm *shm, mp_error *error);
/* Exclude the mapping from forked children. A child must call mp_shm_forget instead of mp_shm_free. */
void mp_shm_keep_from_forks(mp_shm *shm);
void mp_shm_forget(mp_shm *shm); /* in a forked child: release all but the mapping */
void mp_shm_free(mp_shm *shm); /* legal on an mp_shm that is zeroed or already freed */

/* Park on a word in shared memory: wait at most timeout_ns (0 = no limit) while its value is `expected`. May return
 * spuriously. A futex on Linux; elsewhere it polls, at intervals of up to 1 ms. Used by base/event_count.h. */
void mp_shm_park(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns);
void mp_shm_wake(_Atomic uint32_t *word);

#endif
