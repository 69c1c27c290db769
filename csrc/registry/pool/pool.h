/* pool.h: a thread pool. A job is a function and its argument.
 *
 * Each job starts at once on a thread of its own: an idle thread, or a new one while there are fewer than the limit. A
 * thread whose job has returned waits for the next job until the pool is destroyed. Thread-safe. */
#ifndef MP_REGISTRY_POOL_POOL_H
#define MP_REGISTRY_POOL_POOL_H

#include "registry/pool/thread.h"

typedef struct mp_pool mp_pool;

/* `name` names the threads: at most 15 characters. `background`: mp_thread_start_in_background. Starts no thread. */
mp_status mp_pool_create(const char *name, int max_threads, bool background, mp_pool **pool, mp_error *error);
/* Wait for the running jobs, except the disowned ones, and join every thread. No thread may be inside mp_pool_run. NULL
 * is legal. */
void mp_pool_destroy(mp_pool *pool);
/* Start job.run(job.arg) on a thread of its own. On SPAWN_FAILED (limit reached, or the system refused a thread) and on
 * MEMORY_EXHAUSTED the job never runs. */
mp_status mp_pool_run(mp_pool *pool, mp_job job, mp_error *error);
/* Disown the running job with this arg, which may never return: its thread no longer counts, and mp_pool_destroy does
 * not wait for it. The thread ends when the job returns. From now on the job must not use anything that is freed with
 * the pool's owner. */
void mp_pool_disown(mp_pool *pool, const void *arg);
/* For tests. Returns the number of threads and the number of threads with a job, without disowned threads. */
void mp_pool_counts(mp_pool *pool, int *threads, int *busy);

/* Fork handlers (base/forked.h). The child forgets the threads, which exist in the parent only, and leaks their memory;
 * it starts new threads as jobs come. */
void mp_pool_fork_before(mp_pool *pool);
void mp_pool_fork_parent(mp_pool *pool);
void mp_pool_fork_child(mp_pool *pool);

#endif
