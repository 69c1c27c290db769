/* models/threads.h: the number of compute threads with which a pass is fastest.
 *
 * Each additional thread divides the work of a pass further and lengthens each of its barriers. Sizes of the model and
 * assumed rates give a first number. It ignores that memory saturates, that one thread computes some parts of a pass
 * alone, and that other programs take CPUs: all threads wait for the one without a CPU. A tuner corrects it by the
 * measured times of passes, in rounds: blocks of passes, which run anyway, alternate between the number in use and
 * another one, and the faster one remains in use. Results do not depend on the number of threads.
 *
 * A round begins with a reason, because passes with fewer threads may take much longer:
 *
 *   fewer threads, if     the threads in use lose CPU time to other programs (mp_lease.lost_ns); or there are more than
 *                         MP_THREADS_FEW; or at least MP_THREADS_SATURATING, and the pass has so few rows that the
 *                         memory may limit it
 *   more threads, if      fewer than the assumed number are in use
 *
 * Rounds that find nothing are followed by pauses. While other programs take CPUs, and once threads were given up for
 * them, a pause is at most 4 s long. A change of the lost time ends it early.
 *
 * With one row or a few, the number that saturates the memory is a fact of the machine. Tuners share it: new ones begin
 * with it (mp_threads_learned). */
#ifndef MP_MODELS_THREADS_H
#define MP_MODELS_THREADS_H

#include "models/model.h"

enum {
    MP_THREADS_MAX = 256,
    MP_THREADS_FEW = 8,        /* up to this number, rounds change it by one thread */
    MP_THREADS_SATURATING = 4, /* fewer threads are assumed not to saturate memory */
    MP_TUNER_PAIRS = 24,       /* most pairs of blocks in a round; it ends once the difference is clear */
    MP_TUNER_CLASSES = 10,     /* classes of passes: 1 row, 2 to 3 rows, 4 to 7 rows, ..., 512 and more */
    MP_LEARNED_CLASSES = 3,    /* the first classes, whose numbers tuners share */
};

/* Returns the number of threads, 1 to MP_THREADS_MAX, with which a pass of `rows` rows and `barriers` barriers is
 * fastest at the assumed rates. The result is a limit only for machines with very many CPUs, or for passes with very
 * little work. */
int mp_threads_worth(const mp_model_facts *facts, int64_t rows, int barriers);

/* Returns the number of threads that saturates the memory in passes of a class, as a tuner of this process last
 * measured it or mp_threads_set_learned set it; 0: not known. Thread-safe. */
int mp_threads_learned(int class);
/* Sets that number; 0: not known. Tuners that have begun ignore it. Thread-safe. */
void mp_threads_set_learned(int class, int threads);

typedef struct mp_tuned { /* the measurements of one class of passes */
    int threads;         /* number in use; 0: mp_threads_worth */
    int before;          /* number before threads were given up for other programs; 0: none were */
    bool begun;
    bool crowded; /* the threads in use lose much time to other programs */
    bool judged;  /* since the number in use changed, their loss was judged */
    bool changed; /* `crowded` changed, or another class uses its threads again: a reason to end the pause */
    int followed; /* mp_thread_tuner.departures when this class last gave up threads, or kept them */
    /* time of which `lost_ns` was lost, not judged yet */
    uint64_t watched_ns, lost_ns;
    uint64_t recent_ns; /* duration of the last pass outside a round */
    uint64_t paused_ns, pause_ns; /* begin and length of the pause */
    uint32_t pause_passes;        /* passes until it may end */
    /* a search tries several numbers, one in each round, and ends with a pause */
    bool searching, up;  /* up: begins with more threads */
    int tried, limit;    /* candidates tried, and to be tried */
    int base, trial;     /* threads of the round; trial 0: none has begun */
    int length, blocks;  /* passes of a block, and complete blocks; they begin with `base` threads */
    int count, odd;      /* passes of the present block, and passes whose number of rows differs too much */
    uint64_t moving_ns;  /* time for which the system could move threads that lost CPU time */
    int64_t rows;        /* rows of the first pass; those of the others differ by at most an eighth */
    double shortest;     /* shortest time of a pass. Times are nanoseconds per row */
    double block, last;  /* sum of times of the present block, and mean time of the last one with `base` threads */
    double sum;          /* sum of these means over pairs of blocks */
    double less, spread; /* mean of what the trial took less, and the sum of its squared deviations */
} mp_tuned;

typedef struct mp_thread_tuner { /* belongs to one engine. Zeroed: ready for use */
    mp_tuned classes[MP_TUNER_CLASSES];
    mp_tuned *planned; /* class of the last plan, or NULL */
    int threads;       /* number planned */
    int most;          /* largest number of threads of a pass */
    int worth;         /* mp_threads_worth of the last plan */
    /* the last time that a class gave up threads for other programs: the other classes follow it */
    int departures, left;  /* number of these times, and threads that remained in use; 0: that class uses them again */
    uint64_t left_ns;
} mp_thread_tuner;

/* Returns the number of threads for the next pass of `rows` rows, at least 1. `worth`: the result of mp_threads_worth
 * for it. */
int mp_tuner_plan(mp_thread_tuner *tuner, int worth, int64_t rows);

typedef struct mp_pass_time {
    int threads; /* number that computed the pass */
    int64_t rows;
    uint64_t ns, ended_ns;        /* duration, and end by mp_sys_now_ns */
    uint64_t watched_ns, lost_ns; /* as in mp_lease, of this pass */
} mp_pass_time;
/* Learns from the pass that was planned last. */
void mp_tuner_note(mp_thread_tuner *tuner, const mp_pass_time *pass);

#endif
