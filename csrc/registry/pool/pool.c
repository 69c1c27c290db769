/* pool.c: see pool.h. */
#include "registry/pool/pool.h"

#include <assert.h>
#include <string.h>

#include "base/alloc.h"

struct mp_pool {
    char name[16];
    int max_threads;
    mp_mutex lock;
    /* guarded by: lock */
    mp_worker *workers, *idle;
    int threads; /* workers, and those being started */
    int busy;    /* of these, with a job */
};

mp_status mp_pool_create(const char *name, int max_threads, mp_pool **pool_out, mp_error *error) {
    *pool_out = NULL;
    mp_pool *pool = mp_alloc_zeroed(sizeof(*pool), MP_TAG_POOL);
    if (!pool)
        return mp_fail_memory(error, sizeof(*pool), "a pool of threads");
    strncpy(pool->name, name, sizeof(pool->name) - 1);
    pool->max_threads = max_threads;
    mp_mutex_init(&pool->lock);
    *pool_out = pool;
    return MP_OK;
}

static void became_idle(void *arg, mp_worker *worker) {
    mp_pool *pool = arg;
    worker->next_idle = pool->idle; /* last in, first out: the warmest stack and cache */
    pool->idle = worker;
    pool->busy--;
}

mp_status mp_pool_run(mp_pool *pool, mp_job job, mp_error *error) {
    mp_mutex_lock(&pool->lock);
    mp_worker *worker = pool->idle;
    if (worker) {
        pool->idle = worker->next_idle;
        pool->busy++;
        bool wake = mp_worker_give(worker, job);
        mp_mutex_unlock(&pool->lock);
        if (wake)
            mp_bell_wake(&worker->bell); /* only destroy ends a worker, and that may not run beside this call */
        return MP_OK;
    }
    if (pool->threads >= pool->max_threads) {
        int threads = pool->threads;
        mp_mutex_unlock(&pool->lock);
        return mp_fail(error, MP_SPAWN_FAILED, "all %d threads of the pool are taken", threads);
    }
    /* Counted before the thread exists, so that the limit holds while the lock is open. */
    pool->threads++;
    pool->busy++;
    mp_mutex_unlock(&pool->lock);

    mp_status status = mp_worker_create(&pool->lock, job, pool->name, became_idle, pool, &worker, error);

    mp_mutex_lock(&pool->lock);
    if (status == MP_OK) {
        worker->next = pool->workers;
        pool->workers = worker;
    } else {
        pool->threads--;
        pool->busy--;
    }
    mp_mutex_unlock(&pool->lock);
    return status;
}

void mp_pool_counts(mp_pool *pool, int *threads, int *busy) {
    mp_mutex_lock(&pool->lock);
    *threads = pool->threads;
    *busy = pool->busy;
    mp_mutex_unlock(&pool->lock);
}

void mp_pool_destroy(mp_pool *pool) {
    if (!pool)
        return;
    mp_mutex_lock(&pool->lock);
    mp_worker *workers = pool->workers;
    for (mp_worker *worker = workers; worker; worker = worker->next)
        if (mp_worker_quit(worker))
            mp_bell_wake(&worker->bell);
    mp_mutex_unlock(&pool->lock);
    while (workers) {
        mp_worker *next = workers->next;
        mp_worker_destroy(workers);
        workers = next;
    }
    assert(pool->busy == 0);
    mp_mutex_deinit(&pool->lock);
    mp_free(pool);
}

void mp_pool_fork_before(mp_pool *pool) { mp_mutex_lock(&pool->lock); }

void mp_pool_fork_parent(mp_pool *pool) { mp_mutex_unlock(&pool->lock); }

void mp_pool_fork_child(mp_pool *pool) {
    mp_mutex_init(&pool->lock);
    pool->workers = pool->idle = NULL;
    pool->threads = pool->busy = 0;
}
