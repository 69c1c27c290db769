/* thread.c: see thread.h. */
#include "registry/pool/thread.h"

#include <assert.h>

#include "base/alloc.h"

static void thread_main(void *arg) {
    mp_pool_thread *self = arg;
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
        if (self->disowned)
            break;
        self->idle(self->pool, self);
    }
    bool disowned = self->disowned;
    mp_mutex_unlock(self->lock);
    if (disowned)
        self->gone(self->pool, self);
}

mp_status mp_pool_thread_start(mp_pool_thread *thread, const char *name, mp_error *error) {
    mp_bell_init(&thread->bell);
    mp_status status = mp_thread_start(&thread->os, name, thread_main, thread, error);
    if (status != MP_OK)
        mp_bell_deinit(&thread->bell);
    return status;
}

bool mp_pool_thread_give(mp_pool_thread *thread, mp_job job) {
    assert(!thread->job.run && "the thread has a job");
    thread->job = job;
    return mp_bell_ring(&thread->bell);
}

bool mp_pool_thread_quit(mp_pool_thread *thread) {
    thread->quit = true;
    return mp_bell_ring(&thread->bell);
}

void mp_pool_thread_destroy(mp_pool_thread *thread) {
    mp_thread_join(&thread->os);
    mp_bell_deinit(&thread->bell);
    mp_free(thread);
}
