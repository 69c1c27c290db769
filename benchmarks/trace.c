/* trace.c: records when compute threads work and when they wait. `python -m benchmarks replay` links it into a copy of
 * the extension. The linker's option --wrap sends calls of mp_lease_run, mp_team_barrier, mp_team_split and mp_gemm
 * from other files to this one.
 *
 * Each thread writes its events to memory of its own. When the process exits, all of them go to the file MPOOL_TRACE:
 * one record per event, ordered by thread and then by time. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "base/team.h"
#include "kernels/kernels.h"

enum { THREADS = 64, EVENTS = 1 << 22 };

typedef enum kind { BEGIN, SPLIT, PRODUCT, ARRIVE, LEAVE, END } kind; /* scaling_model.py has the same numbers */

typedef struct event {
    uint64_t ns;       /* CLOCK_MONOTONIC */
    int64_t units;     /* SPLIT: parts that can go to different threads; PRODUCT: panels of weights */
    uint32_t region;   /* number of the parallel region */
    uint8_t kind, index, count; /* thread of the region, threads of the region */
    uint8_t thread;             /* number of the buffer */
} event;

typedef struct buffer {
    event *events;
    int count;
} buffer;

static buffer g_buffers[THREADS];
static _Atomic int g_used;
static _Atomic uint32_t g_regions;
static _Thread_local int own = -1; /* index of this thread's buffer */
static _Thread_local uint32_t region;
static _Thread_local const mp_team_thread *current;

void __real_mp_lease_run(mp_lease *lease, void (*body)(const mp_team_thread *thread, void *arg), void *arg);
void __real_mp_team_barrier(const mp_team_thread *thread);
void __real_mp_team_split(const mp_team_thread *thread, int64_t n, int64_t grain, int64_t *begin, int64_t *end);

static void note(kind kind, int64_t units) {
    if (own < 0) {
        own = atomic_fetch_add(&g_used, 1);
        if (own < THREADS) {
            void *memory = mmap(NULL, sizeof(event) * EVENTS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                                0);
            g_buffers[own].events = memory == MAP_FAILED ? NULL : memory;
        }
    }
    if (own >= THREADS || !g_buffers[own].events || g_buffers[own].count == EVENTS)
        return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    g_buffers[own].events[g_buffers[own].count++] =
        (event){(uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec, units, region, (uint8_t)kind,
                (uint8_t)(current ? current->index : 0), (uint8_t)(current ? current->count : 1), (uint8_t)own};
}

typedef struct call {
    void (*body)(const mp_team_thread *thread, void *arg);
    void *arg;
    uint32_t region;
} call;

static void traced_body(const mp_team_thread *thread, void *arg) {
    const call *c = arg;
    region = c->region;
    current = thread;
    note(BEGIN, 0);
    c->body(thread, c->arg);
    note(END, 0);
    current = NULL;
}

void __wrap_mp_lease_run(mp_lease *lease, void (*body)(const mp_team_thread *thread, void *arg), void *arg);
void __wrap_mp_lease_run(mp_lease *lease, void (*body)(const mp_team_thread *thread, void *arg), void *arg) {
    call c = {body, arg, atomic_fetch_add(&g_regions, 1)};
    __real_mp_lease_run(lease, traced_body, &c);
}

void __wrap_mp_team_barrier(const mp_team_thread *thread);
void __wrap_mp_team_barrier(const mp_team_thread *thread) {
    note(ARRIVE, 0);
    __real_mp_team_barrier(thread);
    note(LEAVE, 0);
}

void __wrap_mp_team_split(const mp_team_thread *thread, int64_t n, int64_t grain, int64_t *begin, int64_t *end);
void __wrap_mp_team_split(const mp_team_thread *thread, int64_t n, int64_t grain, int64_t *begin, int64_t *end) {
    note(SPLIT, n / grain + (n % grain != 0));
    __real_mp_team_split(thread, n, grain, begin, end);
}

void __real_mp_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                    float *y, int64_t ldy);
void __wrap_mp_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                    float *y, int64_t ldy);
void __wrap_mp_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                    float *y, int64_t ldy) {
    note(PRODUCT, panel1 - panel0);
    __real_mp_gemm(w, x, m0, m1, panel0, panel1, ep, y, ldy);
}

__attribute__((destructor)) static void write_trace(void) {
    const char *path = getenv("MPOOL_TRACE");
    FILE *file = path ? fopen(path, "wb") : NULL;
    for (int i = 0; file && i < atomic_load(&g_used) && i < THREADS; i++)
        if (g_buffers[i].events)
            fwrite(g_buffers[i].events, sizeof(event), (size_t)g_buffers[i].count, file);
    if (file)
        fclose(file);
}
