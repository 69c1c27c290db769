/* late_threads.c: see late_threads.h. The linker sends the core's calls of mp_team_barrier, mp_team_next, mp_team_rows,
 * mp_lease_run and mp_lease_poll to the functions __wrap_... below (build.py). */
#include "late_threads.h"

#ifndef MP_SIM /* the simulator has no teams */
#include <stdatomic.h>
#include <unistd.h>

#include "mp_test.h"
#include "base/team.h"

typedef void region_body(const mp_team_thread *thread, void *arg);

void __real_mp_team_barrier(const mp_team_thread *thread);
void __wrap_mp_team_barrier(const mp_team_thread *thread);
bool __real_mp_team_next(const mp_team_thread *thread, mp_team_loop *loop);
bool __wrap_mp_team_next(const mp_team_thread *thread, mp_team_loop *loop);
mp_team_loop __real_mp_team_rows(const mp_team_thread *thread, int64_t rows, int64_t floats);
mp_team_loop __wrap_mp_team_rows(const mp_team_thread *thread, int64_t rows, int64_t floats);
void __real_mp_lease_run(mp_lease *lease, region_body *body, void *arg);
void __wrap_mp_lease_run(mp_lease *lease, region_body *body, void *arg);
bool __real_mp_lease_poll(mp_lease *lease);
bool __wrap_mp_lease_poll(mp_lease *lease);

enum { MAX_THREADS = 8, PAUSE_US = 10, MAX_PAUSES = 100000 };

static _Atomic int late = -1, met, polls;
static _Atomic uint32_t regions; /* regions with a late thread */
static int loops[MAX_THREADS]; /* that each thread has begun in the region */
static _Atomic uint32_t reached[MAX_THREADS]; /* barriers that each thread has reached; UINT32_MAX after its end */

typedef struct region {
    region_body *body;
    void *arg;
} region;

void late_thread(int index) { atomic_store(&late, index); }

int late_thread_barriers(void) { return atomic_exchange(&met, 0); }

int lease_polls(void) { return atomic_exchange(&polls, 0); }

bool __wrap_mp_lease_poll(mp_lease *lease) {
    atomic_fetch_add_explicit(&polls, 1, memory_order_relaxed);
    return __real_mp_lease_poll(lease);
}

/* The number of pauses is bounded: a thread that waits for the late one elsewhere than at a barrier ends the lateness,
 * not the test. */
static void let_others_go_first(const mp_team_thread *thread) {
    const uint32_t own = atomic_load(&reached[thread->index]);
    if (thread->index != atomic_load(&late))
        return;
    for (int other = 0; other < thread->count; other++)
        for (int pauses = 0; other != thread->index && atomic_load(&reached[other]) <= own; pauses++) {
            if (pauses == MAX_PAUSES)
                return;
            usleep(PAUSE_US);
        }
}

void __wrap_mp_team_barrier(const mp_team_thread *thread) {
    if (thread->count == 1 || atomic_load_explicit(&late, memory_order_relaxed) < 0) {
        __real_mp_team_barrier(thread);
        return;
    }
    atomic_fetch_add(&reached[thread->index], 1);
    atomic_fetch_add(&met, thread->index == atomic_load(&late));
    __real_mp_team_barrier(thread);
    let_others_go_first(thread);
}

static int64_t first_of(const mp_team_thread *thread, const mp_team_loop *loop, int index) {
    return loop->starts ? loop->starts[index] : loop->n * index / thread->count;
}

/* In every second region, each thread computes one whole share, and another one in the next loop: the late thread would
 * otherwise find no unit left, or only units that no other thread has written, and a missing barrier between two loops
 * would change nothing. In the other regions, threads take the units of the late one. */
bool __wrap_mp_team_next(const mp_team_thread *thread, mp_team_loop *loop) {
    if (thread->count == 1 || atomic_load_explicit(&late, memory_order_relaxed) < 0 || atomic_load(&regions) % 2)
        return __real_mp_team_next(thread, loop);
    if (loop->number)
        return false;
    loop->number = 1;
    const int share = (thread->index + loops[thread->index]++) % thread->count;
    loop->begin = first_of(thread, loop, share);
    loop->end = first_of(thread, loop, share + 1);
    return loop->begin < loop->end;
}

/* Rows of small models are taken one by one, although they take less than 20 us. */
mp_team_loop __wrap_mp_team_rows(const mp_team_thread *thread, int64_t rows, int64_t floats) {
    return atomic_load_explicit(&late, memory_order_relaxed) < 0 ? __real_mp_team_rows(thread, rows, floats)
                                                                : mp_team_shared(rows, 1);
}

static void run_late(const mp_team_thread *thread, void *arg) {
    const region *inner = arg;
    let_others_go_first(thread);
    inner->body(thread, inner->arg);
    atomic_store(&reached[thread->index], UINT32_MAX);
}

void __wrap_mp_lease_run(mp_lease *lease, region_body *body, void *arg) {
    if (lease->threads == 1 || atomic_load_explicit(&late, memory_order_relaxed) < 0) {
        __real_mp_lease_run(lease, body, arg);
        return;
    }
    MP_CHECK(lease->threads <= MAX_THREADS);
    atomic_fetch_add(&regions, 1);
    for (int i = 0; i < MAX_THREADS; i++) {
        atomic_store(&reached[i], 0);
        loops[i] = 0;
    }
    __real_mp_lease_run(lease, run_late, &(region){body, arg});
}
#endif
