/* thread.c: see thread.h. */
#include "registry/pool/thread.h"

#include <assert.h>

#include "base/alloc.h"

static void pool_thread_main(void *arg) {
    mp_pool_thread *self = arg;
    mp_mutex_lock(self->lock);
    for (;;) {
        while (!self->job.run && !self->quit)
            mp_event_count_wait(&self->wake, self->lock, NULL, 0);
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
    return mp_thread_start(&thread->os, name, pool_thread_main, thread, error);
}

void mp_pool_thread_give(mp_pool_thread *thread, mp_job job) {
    assert(!thread->job.run && "the thread has a job");
    thread->job = job;
    mp_event_count_notify(&thread->wake);
}

void mp_pool_thread_quit(mp_pool_thread *thread) {
    thread->quit = true;
    mp_event_count_notify(&thread->wake);
}

void mp_pool_thread_destroy(mp_pool_thread *thread) {
    mp_thread_join(&thread->os);
    mp_free(thread);
}
