/* worker.c: see worker.h. */
#include "registry/pool/worker.h"

#include <assert.h>

#include "base/alloc.h"

static void worker_main(void *arg) {
    mp_worker *self = arg;
    mp_mutex_lock(self->lock);
    for (;;) {
        while (!self->job.run && !self->quit)
            mp_bell_wait(&self->bell, self->lock, NULL, 0);
        if (!self->job.run)
            break;
        mp_job job = self->job;
        mp_mutex_unlock(self->lock);
        job.run(job.arg);
        mp_mutex_lock(self->lock);
        self->job = (mp_job){0};
        self->idle(self->pool, self);
    }
    mp_mutex_unlock(self->lock);
}

mp_status mp_worker_create(mp_mutex *lock, mp_job job, const char *name, void (*idle)(void *pool, mp_worker *self),
                           void *pool, mp_worker **worker_out, mp_error *error) {
    *worker_out = NULL;
    mp_worker *worker = mp_alloc_zeroed(sizeof(*worker), MP_TAG_POOL);
    if (!worker)
        return mp_fail_memory(error, sizeof(*worker), "a worker");
    worker->job = job;
    worker->lock = lock;
    worker->idle = idle;
    worker->pool = pool;
    mp_bell_init(&worker->bell);
    mp_status status = mp_thread_start(&worker->thread, name, worker_main, worker, error);
    if (status != MP_OK) {
        mp_bell_deinit(&worker->bell);
        mp_free(worker);
        return status;
    }
    *worker_out = worker;
    return MP_OK;
}

bool mp_worker_give(mp_worker *worker, mp_job job) {
    assert(!worker->job.run && "the worker has a job");
    worker->job = job;
    return mp_bell_ring(&worker->bell);
}

bool mp_worker_quit(mp_worker *worker) {
    worker->quit = true;
    return mp_bell_ring(&worker->bell);
}

void mp_worker_destroy(mp_worker *worker) {
    mp_thread_join(&worker->thread);
    mp_bell_deinit(&worker->bell);
    mp_free(worker);
}
