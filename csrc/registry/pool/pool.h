/* pool.h: threads that run jobs. A job is a function and a pointer; the pool knows no model.
 *
 * Every job gets a thread at once: an idle one, or a new one up to the limit. A thread whose job has returned stays for
 * the next, until the pool goes. Any thread may call. */
#ifndef MP_REGISTRY_POOL_POOL_H
#define MP_REGISTRY_POOL_POOL_H

#include "registry/pool/thread.h"

typedef struct mp_pool mp_pool;

/* name: of its threads, at most 15 characters. Starts none. */
mp_status mp_pool_create(const char *name, int max_threads, mp_pool **pool, mp_error *error);
/* Waits for the jobs that still run, those that were disowned apart, and joins every thread. Nobody may be in
 * mp_pool_run. NULL is legal. */
void mp_pool_destroy(mp_pool *pool);
/* Start job.run(job.arg) on a thread of its own. SPAWN_FAILED (limit reached, or the system refused a thread) and
 * MEMORY_EXHAUSTED: it was not and will not be started. */
mp_status mp_pool_run(mp_pool *pool, mp_job job, mp_error *error);
/* The running job with this arg may never return: its thread no longer counts, and destroy does not wait for it. Once
 * the job has returned, if ever, its thread ends. The job may use nothing that goes with the pool's owner. */
void mp_pool_disown(mp_pool *pool, const void *arg);
/* Threads that exist, and those that have a job; without the disowned. */
void mp_pool_counts(mp_pool *pool, int *threads, int *busy);

/* fork: before takes the lock so that the child finds a consistent pool; parent releases it; child forgets the threads
 * (they exist in the parent only; what they held stays allocated) and starts new ones as jobs come. */
void mp_pool_fork_before(mp_pool *pool);
void mp_pool_fork_parent(mp_pool *pool);
void mp_pool_fork_child(mp_pool *pool);

#endif
