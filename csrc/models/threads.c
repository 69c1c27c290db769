/* threads.c: see threads.h. */
#include "models/threads.h"

#include <math.h>
#include <stdatomic.h>

#include "base/alloc.h"
#include "base/topology.h"

enum {
    PLANS = 64,       /* plans after which a round is given up: its passes differ too much */
    PAUSE = 64,       /* passes until the next round, once neither direction is faster */
    MAX_PAUSE = 4096, /* longest pause: each one is four times as long as the one before */
    LONG_ROWS = 64    /* passes with fewer rows may saturate the memory */
};

/* A trial is faster if its time is below this share of the base's time. A smaller gain is noise. */
static const double FASTER = 0.98;

static int bounded(double threads, int least) {
    return threads >= MP_THREADS_MAX ? MP_THREADS_MAX : threads >= least ? (int)threads : least;
}

int mp_threads_worth(const mp_model_facts *facts, int64_t rows, int barriers) {
    /* Assumed rates of one thread: bytes read per nanosecond and operations per nanosecond. BARRIER_NS is the time that
     * each additional thread adds to a barrier. Two threads were measured at half of it on one die, and at three times
     * as much on two dies. */
    const double BYTES = 20, OPERATIONS = 100, BARRIER_NS = 100;
    double reading = (double)facts->weight_bytes / BYTES;
    double computing = 2.0 * (double)facts->parameters * (double)rows / OPERATIONS;
    /* work / n + barriers * BARRIER_NS * n is smallest where both terms are equal */
    return bounded(sqrt((reading > computing ? reading : computing) / (BARRIER_NS * barriers)), 1);
}

/* ---- numbers that tuners share ----------------------------------------------------------------------------------- */

static _Atomic int learned[MP_LEARNED_CLASSES];

int mp_threads_learned(int class) {
    return class < MP_LEARNED_CLASSES ? atomic_load_explicit(&learned[class], memory_order_relaxed) : 0;
}

void mp_threads_set_learned(int class, int threads) {
    if (class < MP_LEARNED_CLASSES)
        atomic_store_explicit(&learned[class], bounded(threads, 0), memory_order_relaxed);
}

/* ---- fast cores -------------------------------------------------------------------------------------------------- */

static _Atomic int fast_cores = -1; /* -1: not read yet */

void mp_threads_set_fast(int cores) { atomic_store_explicit(&fast_cores, cores, memory_order_relaxed); }

/* Returns the number of cores of the fastest class; 0: all cores are of one class, or not known. */
static int fast_threads(void) {
    int cores = atomic_load_explicit(&fast_cores, memory_order_relaxed);
    if (cores >= 0)
        return cores;
    mp_topology *topology = mp_alloc(sizeof *topology, MP_TAG_POOL);
    mp_error error;
    cores = topology && mp_topology_read(topology, &error) == MP_OK && topology->cores.class_count > 1
                ? topology->cores.classes[0].core_count
                : 0;
    mp_free(topology);
    mp_threads_set_fast(cores);
    return cores;
}

/* ---- the tuner --------------------------------------------------------------------------------------------------- */

static mp_tuned *class_of(mp_thread_tuner *tuner, int64_t rows) {
    int class = 0;
    for (; rows > 1 && class < MP_TUNER_CLASSES - 1; rows /= 2)
        class++;
    return &tuner->classes[class];
}

static void begin_round(mp_tuned *tuned) { tuned->base = tuned->plans = tuned->count = 0; }

/* Ends a round that found no faster number of threads: tries the other direction, or pauses after both. */
static void fail_round(mp_tuned *tuned) {
    begin_round(tuned);
    tuned->up = !tuned->up;
    if (tuned->failed) {
        tuned->pause = tuned->pause == 0 ? PAUSE : tuned->pause < MAX_PAUSE ? 4 * tuned->pause : MAX_PAUSE;
        tuned->wait = tuned->pause;
    }
    tuned->failed = !tuned->failed;
}

int mp_tuner_plan(mp_thread_tuner *tuner, int worth, int64_t rows) {
    mp_tuned *tuned = class_of(tuner, rows);
    const int least = rows < LONG_ROWS ? MP_THREADS_MIN : MP_THREADS_MIN_LONG;
    if (tuned->factor == 0) {
        const int known = mp_threads_learned((int)(tuned - tuner->classes));
        tuned->factor = known > 0 && known < worth ? (double)known / worth : 1;
    }
    tuner->planned = tuned;
    tuner->worth = worth;
    tuner->least = worth < least ? worth : least;
    tuner->threads = bounded(worth * tuned->factor + 0.5, tuner->least);
    if (tuned->wait == 0 && ++tuned->plans > PLANS) {
        tuned->failed = true;
        fail_round(tuned);
    }
    if (tuned->wait == 0 && tuned->base > 0)
        tuner->threads = tuned->count % 2 ? tuned->trial : tuned->base;
    return tuner->threads;
}

/* Returns the number to compare with `threads`: the next power of two, or 1.5 times one, that differs by at least a
 * fifth. Matrices can be split evenly into that number of parts, and smaller steps seem to gain nothing. On the way
 * down, the number of fast cores comes before these: they wait for a slower one, even if there is only one. */
static int neighbour(int threads, bool up, int least) {
    int found = least;
    const int fast = up ? 0 : fast_threads();
    if (fast >= least && threads > fast)
        return fast;
    for (int n = 2; n <= MP_THREADS_MAX; n = n & (n - 1) ? n / 3 * 4 : n / 2 * 3) {
        if (up && 4 * n >= 5 * threads)
            return n;
        if (5 * n <= 4 * threads && n > least)
            found = n;
    }
    return up ? MP_THREADS_MAX : found;
}

/* Chooses the numbers of threads of a round after its first pass. Returns false if there is no other number to try. */
static bool choose(const mp_thread_tuner *tuner, mp_tuned *tuned, int threads) {
    tuned->base = threads;
    tuned->trial = neighbour(threads, tuned->up, tuner->least);
    const bool limited = threads < tuner->threads; /* there are no more threads */
    return tuned->up ? !limited && tuned->trial != threads && (threads > tuner->least || threads < tuner->worth)
                     : threads > tuner->least;
}

static double median(const double *values) {
    double sorted[MP_TUNER_PAIRS];
    for (int i = 0; i < MP_TUNER_PAIRS; i++) {
        int k = i;
        for (; k > 0 && sorted[k - 1] > values[i]; k--)
            sorted[k] = sorted[k - 1];
        sorted[k] = values[i];
    }
    return sorted[MP_TUNER_PAIRS / 2];
}

void mp_tuner_note(mp_thread_tuner *tuner, int threads, int most, int64_t rows, uint64_t ns) {
    mp_tuned *tuned = tuner->planned;
    tuner->planned = NULL;
    if (!tuned || rows < 1 || threads > tuner->threads)
        return;
    if (threads < tuner->threads)
        tuned->cut = threads < most;
    if (tuned->wait > 0) {
        tuned->wait--;
        return;
    }
    if (tuned->base == 0) { /* the first pass only shows how many threads the lease has */
        tuned->rows = rows;
        if (!choose(tuner, tuned, threads))
            fail_round(tuned);
        return;
    }
    if (tuned->count == 1 && threads > tuned->base)
        tuned->trial = threads; /* may be fewer than planned: all that there are */
    else if (threads != tuner->threads) {
        fail_round(tuned); /* another worker, or another program, got CPUs */
        return;
    }
    const int64_t other = rows > tuned->rows ? rows - tuned->rows : tuned->rows - rows;
    if (other > tuned->rows / 8) {
        tuned->count = 0;
        tuned->rows = rows;
        return;
    }
    tuned->ns[tuned->count % 2][tuned->count / 2] = (double)ns / (double)rows;
    if (++tuned->count < 2 * MP_TUNER_PAIRS)
        return;
    if (!(median(tuned->ns[1]) < FASTER * median(tuned->ns[0]))) {
        fail_round(tuned);
        return;
    }
    tuned->factor = (double)tuned->trial / tuner->worth;
    if (!tuned->cut && tuner->worth >= 2 * tuned->trial) /* less work per barrier may be a reason for fewer threads */
        mp_threads_set_learned((int)(tuned - tuner->classes), tuned->trial);
    tuned->failed = true; /* the other direction leads back to the slower number */
    tuned->pause = 0;
    begin_round(tuned);
}
