/* shared_memory.h: memory shared between processes: an unnamed file, mapped by each process that has its descriptor.
 *
 * The size is sealed at creation, so no process with the descriptor can truncate it while others use it. mp_shm_freeze
 * seals the content too. Linux only; elsewhere every function fails with UNSUPPORTED. */
#ifndef MP_BASE_SHARED_MEMORY_H
#define MP_BASE_SHARED_MEMORY_H

#include "base/alloc.h"

typedef struct mp_shm {
    void *data;   /* page-aligned; NULL = none */
    size_t bytes; /* as requested */
    int fd;       /* close-on-exec */
    mp_tag tag;
    bool counted; /* by mp_alloc_bytes of the process that created it */
} mp_shm;

/* Create zeroed, writable memory with every page allocated. `name` is shown in /proc/<pid>/maps. MEMORY_EXHAUSTED. */
mp_status mp_shm_create(mp_shm *shm, size_t bytes, mp_tag tag, const char *name, mp_error *error);
/* The same in two steps, because allocating many pages takes long: several threads may fill parts, and each page lies
 * on the memory node of the thread that fills it. A page that was never filled is allocated on first use, which kills
 * the process when there is no memory. mp_shm_fill returns false when there is none. */
mp_status mp_shm_create_empty(mp_shm *shm, size_t bytes, mp_tag tag, const char *name, mp_error *error);
bool mp_shm_fill(const mp_shm *shm, size_t from, size_t bytes);
/* Map memory that another process created. Takes ownership of the descriptor, also on failure. INTEGRITY when it is
 * smaller than `bytes` or could be truncated. */
mp_status mp_shm_map(mp_shm *shm, int fd, size_t bytes, bool writable, mp_error *error);
/* Make the memory read-only for every process, this one included, where the kernel can seal it (Linux 5.1); on older
 * kernels for the processes that have mapped it so far. The address stays. */
mp_status mp_shm_freeze(mp_shm *shm, mp_error *error);
/* Keep the mapping out of forked children, which must call mp_shm_forget instead of mp_shm_free. */
void mp_shm_keep_from_forks(mp_shm *shm);
void mp_shm_forget(mp_shm *shm); /* in a forked child */
void mp_shm_free(mp_shm *shm); /* legal on one that is zeroed or already freed */

/* Park on a word in shared memory: wait at most timeout_ns (0 = no limit) while it is `expected`. Used by
 * base/event_count.h. */
void mp_shm_park(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns);
void mp_shm_wake(_Atomic uint32_t *word);

#endif
