/* pool.c: see pool.h. */
#include "registry/pool/pool.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"

struct mp_pool {
    char name[16];
    int max_threads;
    bool background;
    _Atomic int references; /* the owner's, and one per disowned thread */
    mp_mutex lock;
    /* guarded by: lock */
    mp_pool_thread *all, *idle;
    int threads; /* length of the list `all`, including a thread that is being started */
    int busy;    /* threads with a job */
};

mp_status mp_pool_create(const char *name, int max_threads, bool background, mp_pool **pool_out, mp_error *error) {
    *pool_out = NULL;
    mp_pool *pool = mp_alloc_zeroed(sizeof(*pool), MP_TAG_POOL);
    if (!pool)
        return mp_fail_memory(error, sizeof(*pool), "a thread pool");
    strncpy(pool->name, name, sizeof(pool->name) - 1);
    pool->max_threads = max_threads;
    pool->background = background;
    atomic_init(&pool->references, 1);
    mp_mutex_init(&pool->lock);
    *pool_out = pool;
    return MP_OK;
}

static void pool_unpin(mp_pool *pool) {
    if (atomic_fetch_sub_explicit(&pool->references, 1, memory_order_acq_rel) != 1)
        return;
    mp_mutex_deinit(&pool->lock);
    mp_free(pool);
}

static void became_idle(void *arg, mp_pool_thread *thread) {
    mp_pool *pool = arg;
    thread->next_idle = pool->idle; /* last in, first out: the stack and caches of this thread are the warmest */
    pool->idle = thread;
    pool->busy--;
}

static void is_gone(void *arg, mp_pool_thread *thread) {
    mp_free(thread);
    pool_unpin(arg);
}

/* Take the thread off the list. Must hold the lock. */
static void pool_forget(mp_pool *pool, mp_pool_thread *thread) {
    mp_assert_held(&pool->lock);
    mp_pool_thread **link = &pool->all;
    while (*link != thread)
        link = &(*link)->next;
    *link = thread->next;
    pool->threads--;
    pool->busy--;
}

mp_status mp_pool_run(mp_pool *pool, mp_job job, mp_error *error) {
    mp_mutex_lock(&pool->lock);
    mp_pool_thread *thread = pool->idle;
    if (thread) {
        pool->idle = thread->next_idle;
        pool->busy++;
        mp_pool_thread_give(thread, job);
        mp_mutex_unlock(&pool->lock);
        return MP_OK;
    }
    if (pool->threads >= pool->max_threads) {
        int threads = pool->threads;
        mp_mutex_unlock(&pool->lock);
        return mp_fail(error, MP_SPAWN_FAILED, "all %d threads of the pool are busy", threads);
    }
    /* List the thread before it exists: its job may be disowned at once. */
    thread = mp_alloc_zeroed(sizeof(*thread), MP_TAG_POOL);
    if (!thread) {
        mp_mutex_unlock(&pool->lock);
        return mp_fail_memory(error, sizeof(*thread), "a thread of the pool");
    }
    thread->job = job;
    thread->lock = &pool->lock;
    thread->idle = became_idle;
    thread->gone = is_gone;
    thread->pool = pool;
    thread->next = pool->all;
    pool->all = thread;
    pool->threads++;
    pool->busy++;
    /* Hold the lock while the thread starts: the thread must not end or be disowned before its handle is written. */
    bool before = mp_thread_start_in_background(pool->background);
    mp_status status = mp_pool_thread_start(thread, pool->name, error);
    mp_thread_start_in_background(before);
    if (status != MP_OK) {
        pool_forget(pool, thread);
        mp_free(thread);
    }
    mp_mutex_unlock(&pool->lock);
    return status;
}

void mp_pool_disown(mp_pool *pool, const void *arg) {
    mp_mutex_lock(&pool->lock);
    mp_pool_thread *thread = pool->all;
    while (thread && !(thread->job.run && thread->job.arg == arg))
        thread = thread->next;
    if (thread) {
        pool_forget(pool, thread);
        thread->disowned = true;
        mp_thread_detach(&thread->os);
        atomic_fetch_add_explicit(&pool->references, 1, memory_order_relaxed);
    }
    mp_mutex_unlock(&pool->lock);
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
    mp_pool_thread *threads = pool->all;
    for (mp_pool_thread *thread = threads; thread; thread = thread->next)
        mp_pool_thread_quit(thread);
    mp_mutex_unlock(&pool->lock);
    while (threads) {
        mp_pool_thread *next = threads->next;
        mp_pool_thread_destroy(threads);
        threads = next;
    }
    assert(pool->busy == 0);
    pool_unpin(pool);
}

void mp_pool_fork_before(mp_pool *pool) { mp_mutex_lock(&pool->lock); }

void mp_pool_fork_parent(mp_pool *pool) { mp_mutex_unlock(&pool->lock); }

void mp_pool_fork_child(mp_pool *pool) {
    mp_mutex_init(&pool->lock);
    pool->all = pool->idle = NULL;
    pool->threads = pool->busy = 0;
    atomic_store_explicit(&pool->references, 1, memory_order_relaxed);
}
