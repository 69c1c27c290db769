/* models/threads.h: the number of compute threads with which a pass is fastest.
 *
 * Each additional thread divides the work of a pass further and lengthens each of its barriers. Sizes of the model and
 * assumed rates give a first number. It ignores that memory saturates, and that one thread computes some parts of a
 * pass alone. A tuner corrects it by the measured rates of passes, in rounds: passes that run anyway alternate between
 * the number in use and the next one below or above, and the faster one remains in use. Results do not depend on the
 * number of threads.
 *
 * A round needs a lease of more than MP_THREADS_MIN threads, and never plans fewer; for passes with many rows, which
 * need all cores, of more than MP_THREADS_MIN_LONG. The tuner therefore changes nothing on machines with fewer CPUs.
 *
 * With one row or a few, the number that saturates the memory is a fact of the machine. Tuners share it: new ones begin
 * with it (mp_threads_learned). */
#ifndef MP_MODELS_THREADS_H
#define MP_MODELS_THREADS_H

#include "models/model.h"

enum {
    MP_THREADS_MIN = 3,      /* fewer threads are assumed not to saturate memory */
    MP_THREADS_MIN_LONG = 8, /* the same for passes of 64 rows and more */
    MP_THREADS_MAX = 256,
    MP_TUNER_PAIRS = 5,    /* pairs of passes in a round */
    MP_TUNER_CLASSES = 10, /* classes of passes: 1 row, 2 to 3 rows, 4 to 7 rows, ..., 512 and more */
    MP_LEARNED_CLASSES = 3 /* the first classes, whose numbers tuners share */
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

/* Sets the number of fast cores, if there are slower ones, which a tuner tries first; 0: all cores are equal. Without a
 * call, the first tuner that needs it reads it (base/cores.h). Thread-safe. */
void mp_threads_set_fast(int cores);

typedef struct mp_tuned { /* the measurements of one class of passes */
    double factor;        /* threads in use / mp_threads_worth; 0: none planned yet */
    bool up, failed;      /* direction of the current round; true if the other direction was not faster */
    uint32_t wait;        /* passes until the next round */
    uint32_t pause;       /* length of the last pause, in passes; 0: none since the last change */
    int base, trial;      /* threads of the round; base 0: none has begun */
    bool cut;             /* the last pass with fewer threads than planned left CPUs to other workers or programs */
    int plans, count;     /* plans and measured passes of the round */
    int64_t rows;         /* rows of its first pass; the others may differ by an eighth */
    double ns[2][MP_TUNER_PAIRS]; /* times per row: with `base` threads, with `trial` threads */
} mp_tuned;

typedef struct mp_thread_tuner { /* belongs to one engine. Zeroed: ready for use */
    mp_tuned classes[MP_TUNER_CLASSES];
    mp_tuned *planned; /* class of the last plan, or NULL */
    int threads;       /* number planned */
    int worth, least;  /* mp_threads_worth of the last plan, and its least number of threads */
} mp_thread_tuner;

/* Returns the number of threads for the next pass of `rows` rows. `worth`: the result of mp_threads_worth for it. Never
 * fewer than the smaller one of `worth` and MP_THREADS_MIN (MP_THREADS_MIN_LONG from 64 rows on). */
int mp_tuner_plan(mp_thread_tuner *tuner, int worth, int64_t rows);
/* Learns from the pass that was planned last: it had `rows` rows and took `ns` with `threads` threads. `most`: the
 * number that it could have while no other worker or program takes CPUs. */
void mp_tuner_note(mp_thread_tuner *tuner, int threads, int most, int64_t rows, uint64_t ns);

#endif
