/* shared_memory.h: memory that processes share: a file without a name, which who is given its descriptor can map.
 *
 * Its size is fixed when it is made, so that nobody who has the descriptor can cut it under somebody else's feet, and
 * mp_shm_freeze makes its content fixed too. Linux; elsewhere everything is UNSUPPORTED. */
#ifndef MP_BASE_SHARED_MEMORY_H
#define MP_BASE_SHARED_MEMORY_H

#include "base/alloc.h"

typedef struct mp_shm {
    void *data;   /* on a page; NULL = there is none */
    size_t bytes; /* as asked for */
    int fd;       /* close-on-exec */
    mp_tag tag;
    bool counted; /* by mp_alloc_bytes: of the process that made it */
} mp_shm;

/* Zeroed and writable, every page of it there. MEMORY_EXHAUSTED. name: for /proc/<pid>/maps. */
mp_status mp_shm_create(mp_shm *shm, size_t bytes, mp_tag tag, const char *name, mp_error *error);
/* The same in two steps, because making many pages takes long: several threads may fill parts, and whoever makes a page
 * has it on its memory node. A page that nobody filled is made on first use, which kills the process when there is no
 * memory. False: there is none. */
mp_status mp_shm_create_empty(mp_shm *shm, size_t bytes, mp_tag tag, const char *name, mp_error *error);
bool mp_shm_fill(const mp_shm *shm, size_t from, size_t bytes);
/* Map what another process made. Takes the descriptor, also on failure. INTEGRITY when the object is smaller than that,
 * or could be made so. */
mp_status mp_shm_map(mp_shm *shm, int fd, size_t bytes, bool writable, mp_error *error);
/* From now on nobody can write to it, this process included, where the kernel can seal it (Linux 5.1); elsewhere those
 * who mapped it so far cannot. The address stays. */
mp_status mp_shm_freeze(mp_shm *shm, mp_error *error);
/* A forked child does not get the mapping; one that is freed there must not be unmapped, but forgotten. */
void mp_shm_keep_from_forks(mp_shm *shm);
void mp_shm_forget(mp_shm *shm); /* in the child */
void mp_shm_free(mp_shm *shm); /* legal on one that is zeroed, or that was freed */

/* Parking on a word in memory that processes share: wait at most timeout_ns (0: without end) while it is `expected`. */
void mp_shm_park(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns);
void mp_shm_wake(_Atomic uint32_t *word);

#endif
