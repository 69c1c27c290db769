/* trace.c: records the work between the barriers of one compute thread, or slows a thread. `python -m benchmarks
 * replay` links it into a copy of the extension: the linker's option --wrap sends the core's calls of the functions
 * below to this file.
 *
 * MPOOL_TRACE=FILE: the events of all regions of one thread go to this file when the process exits.
 * MPOOL_SLOW=F: thread 1 of each region waits after each range of a loop F times as long as the range took. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "base/team.h"
#include "kernels/kernels.h"

enum { EVENTS = 1 << 22 };

typedef enum kind { BEGIN, LOOP, DONE, SPLIT, ARRIVE, LEAVE, END } kind; /* replay.py has the same numbers */

typedef struct event {
    int64_t ns, units, least; /* LOOP, SPLIT: number of units; LOOP: units of the smallest range; DONE: rows and panels of
                               * weights, if the loop was a product */
    int64_t kind;
} event;

typedef void region_body(const mp_team_thread *thread, void *arg);

void __real_mp_lease_run(mp_lease *lease, region_body *body, void *arg);
void __wrap_mp_lease_run(mp_lease *lease, region_body *body, void *arg);
void __real_mp_team_barrier(const mp_team_thread *thread);
void __wrap_mp_team_barrier(const mp_team_thread *thread);
void __real_mp_team_split(const mp_team_thread *thread, int64_t n, int64_t grain, int64_t *begin, int64_t *end);
void __wrap_mp_team_split(const mp_team_thread *thread, int64_t n, int64_t grain, int64_t *begin, int64_t *end);
void __real_mp_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                    float *y, int64_t ldy);
void __wrap_mp_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                    float *y, int64_t ldy);
bool __real_mp_team_next(const mp_team_thread *thread, mp_team_loop *loop);
bool __wrap_mp_team_next(const mp_team_thread *thread, mp_team_loop *loop);

static event *events;
static int count;
static double slow;
static _Thread_local bool recording;
static region_body *traced_body;
static const mp_team_thread *region_thread; /* other threads of one are for work that each thread does */
static _Thread_local int64_t rows, panels; /* sizes of the products of the present loop */
static _Thread_local int64_t began_ns; /* the present range of a slowed thread; 0: none */

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

__attribute__((constructor)) static void start(void) {
    const char *factor = getenv("MPOOL_SLOW");
    slow = factor ? strtod(factor, NULL) : 0;
    void *memory = getenv("MPOOL_TRACE") ? mmap(NULL, sizeof(event) * EVENTS, PROT_READ | PROT_WRITE,
                                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                                         : MAP_FAILED;
    events = memory == MAP_FAILED ? NULL : memory;
}

__attribute__((destructor)) static void write_events(void) {
    FILE *file = events ? fopen(getenv("MPOOL_TRACE"), "wb") : NULL;
    if (file) {
        fwrite(events, sizeof(event), (size_t)count, file);
        fclose(file);
    }
}

static void note(kind kind, int64_t units, int64_t least) {
    if (recording && count < EVENTS)
        events[count++] = (event){now(), units, least, kind};
}

static void run_traced(const mp_team_thread *thread, void *arg) {
    region_thread = thread;
    traced_body(thread, arg);
}

/* Regions of a pool with one worker run one at a time. */
void __wrap_mp_lease_run(mp_lease *lease, region_body *body, void *arg) {
    recording = events && lease->threads == 1;
    note(BEGIN, 0, 0);
    traced_body = body;
    __real_mp_lease_run(lease, recording ? run_traced : body, arg);
    note(END, 0, 0);
    recording = false;
}

void __wrap_mp_team_barrier(const mp_team_thread *thread) {
    note(ARRIVE, 0, 0);
    __real_mp_team_barrier(thread);
    note(LEAVE, 0, 0);
}

void __wrap_mp_team_split(const mp_team_thread *thread, int64_t n, int64_t grain, int64_t *begin, int64_t *end) {
    note(SPLIT, n / grain + (n % grain != 0), 0);
    __real_mp_team_split(thread, n, grain, begin, end);
}

bool __wrap_mp_team_next(const mp_team_thread *thread, mp_team_loop *loop) {
    if (recording && thread != region_thread)
        return __real_mp_team_next(thread, loop);
    if (recording) {
        note(loop->number ? DONE : LOOP, loop->number ? rows : loop->n, loop->number ? panels : loop->least);
        rows = panels = 0;
        return __real_mp_team_next(thread, loop);
    }
    if (slow > 0 && thread->index == 1 && began_ns) {
        const int64_t until = now() + (int64_t)(slow * (double)(now() - began_ns));
        while (now() < until) {
        }
    }
    const bool taken = __real_mp_team_next(thread, loop);
    began_ns = slow > 0 && taken ? now() : 0;
    return taken;
}

void __wrap_mp_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                    float *y, int64_t ldy) {
    rows = m1 > rows ? m1 : rows;
    panels += panel1 - panel0;
    __real_mp_gemm(w, x, m0, m1, panel0, panel1, ep, y, ldy);
}
