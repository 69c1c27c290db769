/* threads.c: see threads.h. */
#include "models/threads.h"

#include <math.h>
#include <stdatomic.h>

#include "base/intervals.h"

enum {
    FEW_ROWS_CLASS = 5, /* last class of passes that the memory may limit: 32 to 63 rows */
    MOST_PASSES = 32,   /* passes of a block */
    ODD_PASSES = 64,    /* passes with other rows after which a round is given up */
    SURE = 3,           /* pairs from which on their spread is known */
};

/* A trial is faster if it takes less than the base by this share. A smaller gain is noise. */
static const double GAIN = 0.01;
/* Threads lose much if the most delayed one loses this share of its time, times their number, and little below half of
 * it. At n threads that divide all work, leaving one out pays from a share of about 1 / n on; earlier if the memory
 * limits them, which is assumed of passes with few rows. */
static const double LOSES_MUCH = 0.5, LOSES_MUCH_FEW_ROWS = 0.3;

/* A block is this long, because the system takes a while to move threads to CPUs that are free; passes longer than
 * LONG_NS include that while. Fewer threads that lose CPU time get MOVING_NS more in each round. */
static const uint64_t BLOCK_NS = 60 * MP_MS, MOVING_NS = 100 * MP_MS, LONG_NS = 250 * MP_MS;
/* The first pause and the longest: while other programs take CPUs, or threads were given up for them; and else. */
static const uint64_t SOON_FIRST_NS = 250 * MP_MS, SOON_NS = 4000 * MP_MS;
static const uint64_t LATE_FIRST_NS = 1000 * MP_MS, LATE_NS = 60000 * MP_MS;

/* Time over which loss is judged: another program that runs for some tens of milliseconds is no reason for a round. */
static const uint64_t WINDOW_NS = 400 * MP_MS;

static int bounded(double threads) {
    return threads >= MP_THREADS_MAX ? MP_THREADS_MAX : threads >= 1 ? (int)threads : 1;
}

int mp_threads_worth(const mp_model_facts *facts, int64_t rows, int barriers) {
    /* Assumed rates of one thread: bytes read per nanosecond and operations per nanosecond. BARRIER_NS is the time that
     * each additional thread adds to a barrier. Two threads were measured at half of it on one die, and at three times
     * as much on two dies. */
    const double BYTES = 20, OPERATIONS = 100, BARRIER_NS = 100;
    double reading = (double)facts->weight_bytes / BYTES;
    double computing = 2.0 * (double)facts->parameters * (double)rows / OPERATIONS;
    /* work / n + barriers * BARRIER_NS * n is smallest where both terms are equal */
    return bounded(sqrt((reading > computing ? reading : computing) / (BARRIER_NS * barriers)));
}

/* ---- numbers that tuners share ----------------------------------------------------------------------------------- */

static _Atomic int learned[MP_LEARNED_CLASSES];

int mp_threads_learned(int class) {
    return class < MP_LEARNED_CLASSES ? atomic_load_explicit(&learned[class], memory_order_relaxed) : 0;
}

void mp_threads_set_learned(int class, int threads) {
    if (class < MP_LEARNED_CLASSES)
        atomic_store_explicit(&learned[class], threads > 0 ? bounded(threads) : 0, memory_order_relaxed);
}

/* ---- the tuner --------------------------------------------------------------------------------------------------- */

static int class_of(int64_t rows) {
    int class = 0;
    for (; rows > 1 && class < MP_TUNER_CLASSES - 1; rows /= 2)
        class++;
    return class;
}

/* ---- numbers to try ---------------------------------------------------------------------------------------------- */

/* Numbers of a search, by the order in which it tries them; with `up`, the last two come first. If other programs take
 * several CPUs, or half of the threads saturate the memory, only a much smaller number is clearly faster. */
enum candidate { LESS, QUARTER_LESS, HALF, BEFORE, MORE, CANDIDATES };
enum { DOWNWARDS = BEFORE, UPWARDS = CANDIDATES - BEFORE }; /* numbers of candidates in one direction */

/* Returns the next power of two, or 1.5 times one, that differs by at least a fifth: matrices can be split evenly into
 * that number of parts. Up to MP_THREADS_FEW, returns the next number. */
static int neighbour(int threads, bool up) {
    int found = MP_THREADS_FEW;
    if (threads < MP_THREADS_FEW || (threads == MP_THREADS_FEW && !up))
        return up ? threads + 1 : threads - 1;
    for (int n = MP_THREADS_FEW; n <= MP_THREADS_MAX; n = n & (n - 1) ? n / 3 * 4 : n / 2 * 3) {
        if (up && 4 * n >= 5 * threads)
            return n;
        if (5 * n <= 4 * threads)
            found = n;
    }
    return up ? MP_THREADS_MAX : found;
}

static bool has_few_rows(const mp_thread_tuner *tuner, const mp_tuned *tuned) {
    return tuned - tuner->classes <= FEW_ROWS_CLASS;
}

/* Returns a number to try in place of `threads`, or 0. `limited`: there are no more threads. */
static int candidate(const mp_thread_tuner *tuner, const mp_tuned *tuned, int which, int threads, bool limited) {
    const bool fell = tuned->limit == DOWNWARDS;
    const bool may_saturate = has_few_rows(tuner, tuned) && (fell || threads >= MP_THREADS_SATURATING);
    const bool far = tuned->crowded || (may_saturate && threads <= MP_THREADS_FEW);
    const int quarter = threads - threads / 4;
    switch ((enum candidate)which) {
    case LESS:
        return tuned->crowded                                  ? threads - 1
               : may_saturate || threads > MP_THREADS_FEW ? neighbour(threads, false)
                                                               : 0;
    case QUARTER_LESS:
        return far && quarter < threads - 1 ? quarter : 0;
    case HALF:
        return far && threads / 2 < threads - 1 && threads / 2 < quarter ? threads / 2 : 0;
    case BEFORE:
        return tuned->before > threads && !limited ? tuned->before : 0;
    case MORE:
        if (limited || (tuner->worth <= MP_THREADS_FEW && threads >= tuner->worth))
            return 0;
        return tuned->before != neighbour(threads, true) ? neighbour(threads, true) : 0;
    default:
        return 0;
    }
}

static void begin_pause(mp_tuned *tuned, uint64_t pause_ns, uint64_t now_ns) {
    tuned->pause_ns = pause_ns;
    tuned->paused_ns = now_ns;
    tuned->pause_passes = 0;
}

static void begin_search(mp_tuned *tuned, bool up, int limit) {
    tuned->searching = true;
    tuned->changed = false;
    tuned->up = up;
    tuned->tried = 0;
    tuned->limit = limit;
    tuned->watched_ns = tuned->lost_ns = 0;
}

/* Other programs that take CPUs from one class take them from all: gives up the threads that another class gave up. The
 * next round tries them again. */
static void follow(const mp_thread_tuner *tuner, mp_tuned *tuned, int threads) {
    const int before = threads < tuner->most ? threads : tuner->most;
    tuned->followed = tuner->departures;
    if (tuned->before > 0 || before <= tuner->left)
        return;
    tuned->before = before;
    tuned->threads = tuner->left;
    tuned->searching = tuned->judged = tuned->crowded = tuned->changed = false;
    tuned->watched_ns = tuned->lost_ns = 0;
    begin_pause(tuned, SOON_FIRST_NS, tuner->left_ns);
}

int mp_tuner_plan(mp_thread_tuner *tuner, int worth, int64_t rows) {
    const int class = class_of(rows);
    mp_tuned *tuned = &tuner->classes[class];
    if (!tuned->begun) {
        const int known = mp_threads_learned(class);
        tuned->threads = known < worth ? known : 0;
        begin_search(tuned, tuned->threads > 0, CANDIDATES);
        tuned->begun = true;
    }
    tuner->planned = tuned;
    tuner->worth = worth;
    if (tuner->left > 0 && tuned->followed != tuner->departures && !tuned->trial)
        follow(tuner, tuned, tuned->threads ? tuned->threads : worth);
    tuner->threads = tuned->threads ? tuned->threads : worth;
    if (tuned->trial)
        tuner->threads = tuned->blocks % 2 ? tuned->trial : tuned->base;
    return tuner->threads;
}

/* ---- rounds ------------------------------------------------------------------------------------------------------ */

static double much_loss(const mp_thread_tuner *tuner, const mp_tuned *tuned) {
    return has_few_rows(tuner, tuned) ? LOSES_MUCH_FEW_ROWS : LOSES_MUCH;
}

static double time_of(const mp_pass_time *pass) { return (double)pass->ns / (double)pass->rows; }

/* Adds a pass to the present block. Returns true if it is the last one of the block; *time is then the mean time per
 * row, otherwise that of the pass. The first pass does not count, unless it is the only one. */
static bool add_pass(mp_tuned *tuned, const mp_pass_time *pass, double *time) {
    enum { LONGEST = 4 }; /* more than this multiple of the shortest time says nothing about the number of threads */
    *time = time_of(pass);
    tuned->shortest = fmin(tuned->shortest, *time);
    *time = fmin(*time, LONGEST * tuned->shortest);
    tuned->block = tuned->count == 0 ? 0 : tuned->block + *time;
    if (++tuned->count < tuned->length)
        return false;
    *time = tuned->length > 1 ? tuned->block / (tuned->length - 1) : *time;
    tuned->count = 0;
    tuned->blocks++;
    return true;
}

/* Begins a round with a pass that had the number in use. */
static void begin_round(mp_tuned *tuned, int trial, const mp_pass_time *pass) {
    const bool by_chance = tuned->recent_ns > 0 && tuned->recent_ns < pass->ns; /* is this pass so long */
    const uint64_t ns = by_chance ? tuned->recent_ns : pass->ns;
    const uint64_t passes = ns > LONG_NS ? 1 : 2 + BLOCK_NS / (ns + 1);
    tuned->base = pass->threads;
    tuned->trial = trial;
    tuned->length = passes < MOST_PASSES ? (int)passes : MOST_PASSES;
    tuned->blocks = tuned->odd = tuned->count = 0;
    tuned->sum = tuned->less = tuned->spread = 0;
    tuned->moving_ns = 0;
    tuned->shortest = time_of(pass);
    tuned->rows = pass->rows;
    double time;
    if (add_pass(tuned, pass, &time))
        tuned->last = time;
}

typedef enum verdict { UNCLEAR, FASTER, NOT_FASTER } verdict;

/* Judges a round after each pair of blocks. */
static verdict judge(const mp_tuned *tuned) {
    const int pairs = tuned->blocks / 2;
    const double base = tuned->sum / pairs, gain = tuned->less / base;
    const double assumed = (pairs < SURE ? 0.03 : 0.01) * base, spread = pairs > 1 ? tuned->spread / (pairs - 1) : 0;
    const double doubt = 3 * sqrt((spread > assumed * assumed ? spread : assumed * assumed) / pairs) / base;
    if (gain > GAIN && (gain > doubt || pairs == MP_TUNER_PAIRS))
        return FASTER;
    const bool known = doubt < 2 * GAIN || gain + doubt < GAIN || pairs == MP_TUNER_PAIRS;
    return gain < GAIN && known ? NOT_FASTER : UNCLEAR;
}

/* ---- searches and pauses ----------------------------------------------------------------------------------------- */

/* Tries the next number, or pauses after the last one. */
static void go_on(const mp_thread_tuner *tuner, mp_tuned *tuned, const mp_pass_time *pass) {
    const bool limited = pass->threads < tuner->threads;
    tuned->trial = 0;
    for (; tuned->tried < tuned->limit; tuned->tried++) {
        const int which = (tuned->tried + (tuned->up ? DOWNWARDS : 0)) % CANDIDATES;
        const int threads = candidate(tuner, tuned, which, pass->threads, limited);
        if (threads > 0) {
            tuned->tried++;
            begin_round(tuned, threads, pass);
            return;
        }
    }
    tuned->searching = false;
    tuned->followed = tuner->departures;
    const bool soon = tuned->crowded || tuned->before > 0;
    const uint64_t first = soon ? SOON_FIRST_NS : LATE_FIRST_NS, longest = soon ? SOON_NS : LATE_NS;
    const uint64_t longer = tuned->pause_ns * (soon ? 2 : 4);
    begin_pause(tuned, longer < first ? first : longer < longest ? longer : longest, pass->ended_ns);
    tuned->pause_passes = soon ? 8 : 64;
}

/* Judges the time that the threads in use have lost. A change ends the pause. */
static void judge_loss(const mp_thread_tuner *tuner, mp_tuned *tuned, const mp_pass_time *pass) {
    tuned->watched_ns += pass->watched_ns;
    tuned->lost_ns += pass->lost_ns;
    if (tuned->watched_ns < WINDOW_NS)
        return;
    const double loses = (double)tuned->lost_ns / (double)tuned->watched_ns * pass->threads;
    const bool was = tuned->crowded;
    tuned->watched_ns = tuned->lost_ns = 0;
    tuned->crowded = loses > (was ? much_loss(tuner, tuned) / 2 : much_loss(tuner, tuned));
    if (tuned->crowded != was) /* that fewer threads lose less than those before is no change */
        tuned->changed = was ? tuned->before > 0 && tuned->judged : pass->threads > 1;
    tuned->judged = true;
}

static void wait(const mp_thread_tuner *tuner, mp_tuned *tuned, const mp_pass_time *pass) {
    const uint64_t paused_ns = pass->ended_ns - tuned->paused_ns;
    const uint64_t least_ns = tuned->pause_ns < SOON_NS ? tuned->pause_ns / 4 : SOON_NS / 4;
    tuned->pause_passes -= tuned->pause_passes > 0;
    if (tuned->changed && paused_ns >= least_ns)
        begin_search(tuned, !tuned->crowded, CANDIDATES);
    else if (paused_ns >= tuned->pause_ns && tuned->pause_passes == 0)
        begin_search(tuned, tuned->before > 0, CANDIDATES);
    else
        return;
    go_on(tuner, tuned, pass);
}

/* Uses the faster number, and tries the next one in the same direction: the other one leads back. */
static void adopt(mp_thread_tuner *tuner, mp_tuned *tuned, uint64_t now_ns) {
    const bool up = tuned->trial > tuned->base;
    if (tuned->crowded && !up) {
        tuned->before = tuned->before ? tuned->before : tuned->base;
        tuned->followed = ++tuner->departures;
        tuner->left = tuned->trial;
        tuner->left_ns = now_ns;
    } else if (tuned->before > 0 && tuned->trial >= tuned->before) {
        tuned->before = tuner->left = 0;
        for (int class = 0; class < MP_TUNER_CLASSES; class++)
            tuner->classes[class].changed |= tuner->classes[class].before > 0;
    }
    /* Without other programs, and with work for twice as many threads, only the memory makes fewer as fast. */
    if (!tuned->crowded && tuned->before == 0 && tuner->worth >= 2 * tuned->trial)
        mp_threads_set_learned((int)(tuned - tuner->classes), tuned->trial);
    tuned->threads = tuned->trial;
    tuned->crowded = tuned->crowded && !up;
    tuned->judged = false;
    tuned->pause_ns = 0;
    tuned->trial = 0;
    begin_search(tuned, up, up ? UPWARDS : DOWNWARDS);
}

/* Adds a pass to the round, and ends the round if it found nothing. */
static verdict measure(const mp_thread_tuner *tuner, mp_tuned *tuned, const mp_pass_time *pass) {
    const bool trial = tuned->blocks % 2, more = tuned->trial > tuned->base;
    const int passes = tuned->count; /* those that count, with this one */
    const bool loses = (double)pass->lost_ns * pass->threads > much_loss(tuner, tuned) * (double)pass->watched_ns;
    double time;
    if (trial && !more && loses && tuned->moving_ns < MOVING_NS) { /* the system may still move them */
        tuned->moving_ns += pass->ns;
        tuned->count = 0;
        return UNCLEAR;
    }
    const bool complete = add_pass(tuned, pass, &time);
    if (!trial) {
        tuned->last = complete ? time : tuned->last;
        return UNCLEAR;
    }
    /* The trial is not worth another pass if it is much slower, or if its additional threads have no CPU. A first pass
     * may be slow because threads wake up. */
    const bool lacks_cpus = more && loses && time > 1.1 * tuned->last;
    const bool is_slow = passes > 1 && !loses && !complete && tuned->block > 1.2 * passes * tuned->last;
    verdict found = lacks_cpus || is_slow ? NOT_FASTER : UNCLEAR;
    if (complete && found == UNCLEAR) {
        const double less = tuned->last - time, from = less - tuned->less;
        tuned->sum += tuned->last;
        tuned->less += from / (tuned->blocks / 2);
        tuned->spread += from * (less - tuned->less);
        found = judge(tuned);
    }
    if (found == NOT_FASTER)
        tuned->trial = 0;
    return found;
}

/* True if the lease had fewer threads than planned, because other workers hold some. */
static bool is_cut(mp_thread_tuner *tuner, const mp_pass_time *pass) {
    tuner->most = pass->threads > tuner->most ? pass->threads : tuner->most;
    return pass->threads < tuner->threads && pass->threads < tuner->most;
}

void mp_tuner_note(mp_thread_tuner *tuner, const mp_pass_time *pass) {
    mp_tuned *tuned = tuner->planned;
    tuner->planned = NULL;
    if (!tuned || pass->rows < 1 || pass->threads > tuner->threads || is_cut(tuner, pass))
        return;
    if (!tuned->trial) {
        judge_loss(tuner, tuned, pass);
        (tuned->searching ? go_on : wait)(tuner, tuned, pass);
        tuned->recent_ns = pass->ns;
        return;
    }
    const bool trial = tuned->blocks % 2;
    if (pass->threads < tuner->threads) {
        if (!trial || pass->threads <= tuned->base) { /* the round began with more threads than there are now */
            tuned->trial = 0;
            return;
        }
        tuned->trial = pass->threads; /* all that there are */
    }
    const int64_t other = pass->rows > tuned->rows ? pass->rows - tuned->rows : tuned->rows - pass->rows;
    if (other > tuned->rows / 8)
        tuned->trial = ++tuned->odd > ODD_PASSES ? 0 : tuned->trial;
    else if (measure(tuner, tuned, pass) == FASTER)
        adopt(tuner, tuned, pass->ended_ns);
}
