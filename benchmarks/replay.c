/* replay.c: one pass of recorded work on threads of unequal speeds, in virtual time, with the core's own rules:
 * mp_team_next, the wavefront, the tuner of threads, and the cores of faked machines. A library for replay.py. */
#include <math.h>
#include <stdlib.h>

#include "base/team.c"                /* its teams without threads */
#include "models/decoder/wavefront.c" /* find_ready */
#include "fake_machines.h"
#include "base/cores.h"
#include "base/cpu_set.h"
#include "models/threads.h"

_Noreturn void mp_test_fail(const char *file, int line, const char *format, ...) { /* for fake_machines.h */
    fprintf(stderr, "%s:%d: %s\n", file, line, format);
    abort();
}

#define EXPORT __attribute__((visibility("default")))

/* ---- rules that the core answers ---- */

/* Writes cores, speed and `used` of each class of a faked machine. Returns the number of classes; 0: no such machine. */
EXPORT int replay_machine(int index, char *name, size_t size, double *classes) {
    static mp_cores cores;
    mp_cpu_set allowed = {0};
    int cpus;
    if (index >= FAKE_MACHINE_COUNT)
        return 0;
    const char *root = fake_make(&FAKE_MACHINES[index], &cpus);
    for (int i = 0; i < cpus; i++)
        mp_cpu_set_add(&allowed, i);
    mp_cores_read(root, &allowed, &cores);
    fake_clear(root);
    snprintf(name, size, "%s", FAKE_MACHINES[index].name);
    for (int i = 0; i < cores.class_count; i++) {
        classes[3 * i] = cores.classes[i].core_count;
        classes[3 * i + 1] = (double)cores.classes[i].speed;
        classes[3 * i + 2] = cores.classes[i].used;
    }
    return cores.class_count;
}

/* Returns the number of threads in use after `passes` passes of one row. fast: cores of the fastest class, if there are
 * others. seconds: [most + 1] time of a pass by number of threads. `noise`: [passes] factors of the times. */
EXPORT int replay_tuned(int worth, int most, int fast, const double *seconds, const double *noise, int passes) {
    mp_thread_tuner *tuner = calloc(1, sizeof *tuner);
    mp_threads_set_fast(fast);
    mp_threads_set_learned(0, 0);
    for (int i = 0; i < passes; i++) {
        int threads = mp_tuner_plan(tuner, worth, 1);
        threads = threads < most ? threads : most;
        mp_tuner_note(tuner, threads, most, 1, (uint64_t)(seconds[threads] * noise[i] * 1e9));
    }
    const int chosen = (int)(worth * tuner->classes[0].factor + 0.5);
    free(tuner);
    return chosen < most ? chosen : most;
}

/* Returns mp_threads_worth of a pass. */
EXPORT int replay_worth(double weights, double parameters, int rows, int barriers) {
    const mp_model_facts facts = {.weight_bytes = (uint64_t)weights, .parameters = (uint64_t)parameters};
    return mp_threads_worth(&facts, rows, barriers);
}

/* ---- virtual time ---- */

typedef enum kind { EACH, SPLIT, LOOP, BARRIER } kind; /* replay.py has the same numbers */

typedef struct segment {
    double seconds, bytes; /* time of one thread of speed 1; weights read from memory */
    int64_t units, least;
    int64_t kind;   /* EACH: every thread does all of it */
    int64_t panels; /* parts of weights: a range of a product has those that begin in it; 0: no product */
} segment;

typedef struct machine {
    int threads, late;   /* late: the thread whose CPU another program takes every second slice; -1: none */
    double slice;        /* seconds */
    double phase;        /* seconds by which the first slice began earlier */
    double memory;       /* bytes per second of all threads together; 0: no limit */
    double barrier, each; /* seconds of a barrier, and in addition for each thread */
    const double *speed; /* [threads]; in loops and splits */
} machine;

typedef struct runner { /* a thread */
    int at;          /* index of the segment, or the block of a wavefront */
    bool in_loop, waits;
    double left, demand; /* seconds of work at speed 1 that are left; bytes per second at speed 1 */
    mp_team_loop loop;
    mp_team_thread thread;
} runner;

static bool is_on(const machine *m, int thread, double now) {
    return thread != m->late || fmod(floor((now + m->phase) / m->slice), 2) == 0;
}

/* Moves the clock to the next event: a thread ends its work, or a slice ends. Returns the time. */
static double advance(const machine *m, runner *runners, double now) {
    double wanted = 0, step = INFINITY, scale = 1;
    for (int t = 0; t < m->threads; t++)
        if (!runners[t].waits && is_on(m, t, now))
            wanted += runners[t].demand * m->speed[t];
    if (m->memory > 0 && wanted > m->memory)
        scale = m->memory / wanted;
    for (int t = 0; t < m->threads; t++)
        if (!runners[t].waits && is_on(m, t, now))
            step = fmin(step, runners[t].left / (m->speed[t] * (runners[t].demand > 0 ? scale : 1)));
    if (m->late >= 0)
        step = fmin(step, m->slice * (1 + 1e-9) - fmod(now + m->phase, m->slice));
    for (int t = 0; t < m->threads; t++)
        if (!runners[t].waits && is_on(m, t, now)) {
            runners[t].left -= step * m->speed[t] * (runners[t].demand > 0 ? scale : 1);
            if (runners[t].left < 1e-12)
                runners[t].left = 0;
        }
    return now + step;
}

/* Gives a thread its next work. Sets `waits` at a barrier and at the end. */
static void next_work(const segment *segments, int count, runner *r) {
    r->left = 0;
    while (r->left <= 0 && r->at < count && segments[r->at].kind != BARRIER) {
        const segment *s = &segments[r->at];
        int64_t begin, end;
        double share = 1;
        if (s->kind == LOOP) {
            if (!r->in_loop)
                r->loop = mp_team_shared(s->units, s->least);
            r->in_loop = mp_team_next(&r->thread, &r->loop);
            share = !r->in_loop ? 0 : (double)(r->loop.end - r->loop.begin) / (double)s->units;
            if (r->in_loop && s->panels)
                share = (ceil((double)s->panels * (double)r->loop.end / (double)s->units) -
                         ceil((double)s->panels * (double)r->loop.begin / (double)s->units)) / (double)s->panels;
        } else if (s->kind == SPLIT) {
            mp_team_split(&r->thread, s->units, 1, &begin, &end);
            share = (double)(end - begin) / (double)(s->units ? s->units : 1);
        }
        r->left = s->seconds * share;
        r->demand = s->seconds > 0 ? s->bytes / s->seconds : 0;
        r->at += !r->in_loop;
    }
    r->waits = r->left <= 0;
}

/* Returns the seconds of a pass whose threads meet at barriers, the one at its end included. */
EXPORT double replay_barriers(const segment *segments, int count, const machine *m) {
    const int n = m->threads;
    mp_team *team = calloc(1, sizeof *team + (size_t)(n + 1) * sizeof *team->helpers);
    mp_lease *lease = calloc(1, sizeof *lease);
    runner *runners = calloc((size_t)n, sizeof *runners);
    mp_region *region = &team->helpers[0].own;
    double now = 0;
    *lease = (mp_lease){.team = team, .threads = n};
    region->lease = lease;
    for (int t = 0; t < n; t++) {
        if (t > 0)
            lease->helpers[t - 1] = t - 1;
        runners[t].thread =
            (mp_team_thread){t, n, region, t ? &team->helpers[t - 1].share : &region->share};
        next_work(segments, count, &runners[t]);
    }
    for (bool over = false; !over;) {
        int waiting = 0;
        for (int t = 0; t < n; t++) {
            if (!runners[t].waits && runners[t].left == 0)
                next_work(segments, count, &runners[t]);
            waiting += runners[t].waits;
        }
        if (waiting < n) {
            now = advance(m, runners, now);
            continue;
        }
        now += n > 1 ? m->barrier + m->each * n : 0;
        for (int t = 0; t < n; t++) {
            over = runners[t].at == count;
            runners[t].at++;
            runners[t].waits = over;
            if (!over)
                next_work(segments, count, &runners[t]);
        }
    }
    free(runners);
    free(lease);
    free(team);
    return now;
}

/* Returns the seconds of a wavefront of `blocks` row blocks and `layers` layers. seconds: of a layer of a block. */
EXPORT double replay_wavefront(int blocks, int layers, double seconds, const machine *m) {
    runner *runners = calloc((size_t)m->threads, sizeof *runners);
    mp_wavefront wave = {.layers = layers, .count = blocks,
                         .blocks = calloc((size_t)blocks, sizeof *wave.blocks)};
    double now = 0;
    for (int t = 0; t < m->threads; t++)
        runners[t].at = -1;
    for (;;) {
        int left = 1, working = 0;
        for (int t = 0; t < m->threads; t++) /* finish first: others may take what follows */
            if (runners[t].at >= 0 && runners[t].left == 0) {
                mp_wave_block *block = &wave.blocks[runners[t].at];
                atomic_store(&block->mixed, atomic_load(&block->taken));
                atomic_store(&block->finished, atomic_load(&block->taken));
                runners[t].at = -1;
            }
        for (int t = 0; t < m->threads; t++) {
            int layer;
            if (runners[t].at < 0 && is_on(m, t, now)) { /* a thread without a CPU takes nothing */
                runners[t].at = find_ready(&wave, m->threads, &layer, &left);
                runners[t].left = seconds;
                if (runners[t].at >= 0)
                    atomic_fetch_add(&wave.blocks[runners[t].at].taken, 1);
            }
            runners[t].waits = runners[t].at < 0;
            working += !runners[t].waits;
        }
        if (working == 0 && left == 0)
            break;
        now = advance(m, runners, now);
    }
    free(wave.blocks);
    free(runners);
    return now;
}
