/* test_models_threads.c: models/threads.h: threads of a pass by assumed rates, and a tuner on simulated machines. */
#include <math.h>

#include "mp_test.h"
#include "models/threads.h"

static const mp_model_facts small = {.weight_bytes = 98 * 1000 * 1000, .parameters = 134 * 1000 * 1000};
static const mp_model_facts large = {.weight_bytes = 4700ll * 1000 * 1000, .parameters = 8000ll * 1000 * 1000};
static const mp_model_facts tiny = {.weight_bytes = 100 * 1000, .parameters = 100 * 1000};
static const mp_model_facts middle = {.weight_bytes = 1100ll * 1000 * 1000, .parameters = 1700ll * 1000 * 1000};
enum { BARRIERS = 150 };

MP_TEST(models_threads_follow_the_work) {
    MP_CHECK_INT(mp_threads_worth(&small, 1, 156), 17); /* sqrt of 98e6 / 20 / (100 * 156) */
    MP_CHECK_INT(mp_threads_worth(&small, 128, 156), 148);
    MP_CHECK(mp_threads_worth(&large, 1, 186) > 100);
    MP_CHECK_INT(mp_threads_worth(&large, 512, 186), 256);
    MP_CHECK_INT(mp_threads_worth(&tiny, 1, 16), 1);
    MP_CHECK_INT(mp_threads_worth(&(mp_model_facts){0}, 0, 1), 1);
}

/* ---- simulated machines ------------------------------------------------------------------------------------------ */

/* A machine, its rates per nanosecond, and a model on it. */
typedef struct machine {
    int cpus;
    double read_one, read_all, operations, barrier_ns;
    double alone;           /* part of a pass of one thread that only one thread can do */
    const mp_model_facts *facts;
    double noise, glitches; /* largest relative error of a time, and share of times that are wrong by far */
    int taken;              /* CPUs of which other programs take half. All threads wait for those on them */
} machine;

static double pass_ns(const machine *m, int threads, int64_t rows) {
    const double bytes = (double)m->facts->weight_bytes;
    const double arithmetic = 2.0 * (double)m->facts->parameters * (double)rows / m->operations;
    const double all = arithmetic + bytes / m->read_one, shared = 1 - m->alone;
    const double ns = m->alone * all + shared * arithmetic / threads +
                      shared * fmax(bytes / m->read_one / threads, bytes / m->read_all) +
                      BARRIERS * m->barrier_ns * threads;
    return threads > m->cpus - m->taken ? 2.2 * ns : ns;
}

static int best_threads(const machine *m, int64_t rows) {
    int best = 1;
    for (int n = 1; n <= m->cpus; n++)
        if (pass_ns(m, n, rows) < pass_ns(m, best, rows))
            best = n;
    return best;
}

static uint64_t measured_ns(const machine *m, mp_test_random *random, int threads, int64_t rows) {
    static const double wrong[] = {0, 1, 1e3, 1e12, 1.8e19};
    if ((double)(mp_test_random_u64(random) % 1000) < 1000 * m->glitches)
        return (uint64_t)wrong[mp_test_random_u64(random) % 5];
    const double longer = m->noise * (double)(mp_test_random_u64(random) % 1000) / 1000;
    return (uint64_t)(pass_ns(m, threads, rows) * (1 + longer));
}

/* The passes of one model, one after the other. */
typedef struct run {
    mp_thread_tuner tuner;
    mp_test_random random;
    int64_t rows;
    uint64_t now_ns;
    /* since the last run_passes began */
    int passes, trials; /* trials: with another number of threads than the one in use */
    double ns;          /* the sum of their times */
} run;

static int in_use(const run *r, const machine *m) {
    const mp_tuned *tuned = &r->tuner.classes[0];
    for (int64_t rows = r->rows; rows > 1 && tuned < &r->tuner.classes[MP_TUNER_CLASSES - 1]; rows /= 2)
        tuned++;
    const int threads = tuned->threads ? tuned->threads : mp_threads_worth(m->facts, r->rows, BARRIERS);
    return threads < m->cpus ? threads : m->cpus;
}

/* Runs passes for `seconds`, or at least `least` of them. Returns the number of threads in use afterwards. */
static int run_passes(run *r, const machine *m, double seconds, int least) {
    const int worth = mp_threads_worth(m->facts, r->rows, BARRIERS);
    const uint64_t until_ns = r->now_ns + (uint64_t)(seconds * 1e9);
    r->passes = r->trials = 0;
    r->ns = 0;
    for (; r->passes < least || r->now_ns < until_ns; r->passes++) {
        const int planned = mp_tuner_plan(&r->tuner, worth, r->rows), threads = planned < m->cpus ? planned : m->cpus;
        const uint64_t ns = measured_ns(m, &r->random, threads, r->rows);
        const bool waits = threads > m->cpus - m->taken; /* one of them, for a CPU */
        MP_CHECK(planned >= 1 && planned <= MP_THREADS_MAX);
        r->trials += threads != in_use(r, m);
        r->now_ns += ns < 1000000000000 ? ns : 0;
        r->ns += (double)ns;
        mp_tuner_note(&r->tuner, &(mp_pass_time){.threads = threads, .rows = r->rows, .ns = ns, .ended_ns = r->now_ns,
                                                 .watched_ns = ns, .lost_ns = waits ? ns / 2 : 0});
    }
    return in_use(r, m);
}

static run new_run(int64_t rows) {
    for (int i = 0; i < MP_LEARNED_CLASSES; i++)
        mp_threads_set_learned(i, 0);
    return (run){.random = {7}, .rows = rows, .now_ns = 1};
}

/* For each machine, the tuned number of threads is within 6 % of the best time, where the assumed one may be far off.
 * Rates: laptops and servers of 4 to 192 cores as they are assumed, and others far from the assumed rates. */
MP_TEST(models_threads_tuner_finds_the_rates_of_a_machine) {
    static const int cpus[] = {4, 6, 9, 16, 32, 64, 96, 192, 256};
    static const struct {
        double read_one, read_all, operations, barrier_ns, alone;
    } rates[] = {
        {35, 460, 425, 60, 0},     {35, 460, 425, 60, 0.01}, {14, 80, 425, 60, 0.005},   {35, 4600, 425, 60, 0},
        {2, 20, 20, 60, 0},        {35, 460, 425, 400, 0},   {35, 460, 425, 2, 0},       {500, 500, 4000, 60, 0},
        {35, 40, 100, 1000, 0.05}, {1, 1000, 1, 1, 0},       {35, 460, 425, 1e5, 0.001}, {1e6, 1e9, 1e9, 60, 0},
    };
    const mp_model_facts *models[] = {&small, &middle, &large, &tiny};
    for (size_t r = 0; r < sizeof rates / sizeof *rates; r++)
        for (int f = 0; f < 4; f++)
            for (size_t c = 0; c < sizeof cpus / sizeof *cpus; c++)
                for (int rows = 1; rows <= 512; rows *= 8) {
                    const machine m = {.cpus = cpus[c], .read_one = rates[r].read_one, .read_all = rates[r].read_all,
                                       .operations = rates[r].operations, .barrier_ns = rates[r].barrier_ns,
                                       .alone = rates[r].alone, .facts = models[f], .noise = 0.01};
                    run passes = new_run(rows);
                    const int used = run_passes(&passes, &m, 0, 1500);
                    const int worth = mp_threads_worth(m.facts, rows, BARRIERS);
                    const int start = worth < m.cpus ? worth : m.cpus;
                    int best = best_threads(&m, rows);
                    if (rows >= 64) /* passes with many rows keep up to 8 threads, unless these lose CPU time */
                        best = best < 8 ? (start < 8 ? start : 8) : best;
                    if (start < MP_THREADS_SATURATING) {
                        MP_CHECK_INT(used, start);
                        continue;
                    }
                    if (worth > MP_THREADS_FEW && pass_ns(&m, used, rows) > 1.06 * pass_ns(&m, best, rows))
                        MP_FAIL("rates %zu, model %d, %d CPUs, %d rows: %d threads, best %d, assumed %d, %+.1f %%", r,
                                f, m.cpus, rows, used, best, worth,
                                100 * (pass_ns(&m, used, rows) / pass_ns(&m, best, rows) - 1));
                }
}

static const machine server = {.cpus = 96, .read_one = 35, .read_all = 460, .operations = 425, .barrier_ns = 60,
                               .facts = &middle, .noise = 0.02};
/* Rates of a model of 400 MB on two CPUs of a Zen 5, and those of a laptop whose memory four threads saturate. */
static const mp_model_facts chat = {.weight_bytes = 400 * 1000 * 1000, .parameters = 500 * 1000 * 1000};
static const machine pair = {.cpus = 2, .read_one = 34, .read_all = 44, .operations = 850, .barrier_ns = 60,
                             .facts = &chat, .noise = 0.05};
static const machine laptop = {.cpus = 8, .read_one = 14, .read_all = 50, .operations = 3000, .barrier_ns = 1000,
                               .facts = &chat, .noise = 0.05};

/* The mean time of a run's passes, as a multiple of that of passes with `threads` threads. */
static double cost(const run *r, const machine *m, int threads) {
    return r->ns / r->passes / (pass_ns(m, threads, r->rows) * (1 + m->noise / 2));
}

/* Rounds become rare while nothing changes: they take less than 0.5 % of the time. When the machine changes, the next
 * round notices. */
MP_TEST(models_threads_tuner_pauses_and_follows_changes) {
    machine m = server;
    run passes = new_run(1);
    const int before = run_passes(&passes, &m, 2, 0);
    run_passes(&passes, &m, 120, 0);
    MP_CHECK(passes.trials > 0 && cost(&passes, &m, before) < 1.005);
    m.read_all = 4600; /* the weights are in caches now, and barriers are shorter */
    m.barrier_ns = 20;
    const int after = run_passes(&passes, &m, 70, 0);
    MP_CHECK(after > before);
    MP_CHECK(pass_ns(&m, after, 1) < 1.04 * pass_ns(&m, best_threads(&m, 1), 1));
}

/* On a quiet machine with two CPUs, no pass is tried with one thread; on one with eight, prompts keep all. */
MP_TEST(models_threads_tuner_leaves_quiet_passes_alone) {
    static const int rows[] = {1, 8, 64, 512};
    for (int i = 0; i < 4; i++) {
        run passes = new_run(rows[i]);
        MP_CHECK_INT(run_passes(&passes, &pair, 100, 0), 2);
        MP_CHECK_INT(passes.trials, 0);
    }
    run passes = new_run(512);
    MP_CHECK_INT(run_passes(&passes, &laptop, 100, 0), 8);
    MP_CHECK_INT(passes.trials, 0);
}

/* On eight CPUs whose memory four threads saturate, decoding finds a number within 2 % of the best in three seconds,
 * and keeps it: later rounds and it take less than 1 % more than the best. */
MP_TEST(models_threads_tuner_finds_what_saturates_memory) {
    run passes = new_run(1);
    const int used = run_passes(&passes, &laptop, 3, 0);
    MP_CHECK(used >= 3 && used <= 5);
    MP_CHECK(pass_ns(&laptop, used, 1) < 1.02 * pass_ns(&laptop, best_threads(&laptop, 1), 1));
    run_passes(&passes, &laptop, 120, 0);
    MP_CHECK(cost(&passes, &laptop, best_threads(&laptop, 1)) < 1.01);
}

/* A program occupies a CPU. Decoding, batches and prompts leave it within two seconds, or eight passes, try it again
 * without losing 0.6 % (1.5 % if passes are long), and are back within five seconds of its end, or a dozen passes. */
MP_TEST(models_threads_tuner_leaves_busy_cpus_and_comes_back) {
    static const int rows[] = {1, 8, 64, 512};
    for (int i = 0; i < 4; i++) {
        machine m = pair;
        run passes = new_run(rows[i]);
        MP_CHECK_INT(run_passes(&passes, &m, 10, 0), 2);
        m.taken = 1;
        MP_CHECK_INT(run_passes(&passes, &m, 2, 8), 1);
        run_passes(&passes, &m, 60, 0);
        MP_CHECK(passes.trials > 0 && cost(&passes, &m, 1) < (rows[i] < 512 ? 1.006 : 1.015));
        m.taken = 0;
        MP_CHECK_INT(run_passes(&passes, &m, 5, 12), 2);
    }
}

/* All classes of passes give up the threads that one class gave up for other programs: passes of 8 rows begin with the
 * one thread that decoding has kept, and try two again once decoding has both back. Prompts that are faster with both
 * return to them. */
MP_TEST(models_threads_tuner_classes_follow) {
    machine m = pair;
    run passes = new_run(8);
    MP_CHECK_INT(run_passes(&passes, &m, 1, 0), 2);
    m.taken = 1;
    passes.rows = 1;
    MP_CHECK_INT(run_passes(&passes, &m, 5, 0), 1);
    passes.rows = 8;
    MP_CHECK_INT(run_passes(&passes, &m, 0, 1), 1);
    MP_CHECK_INT(passes.trials, 0);
    MP_CHECK_INT(run_passes(&passes, &m, 5, 0), 1);
    m.taken = 0;
    passes.rows = 1;
    MP_CHECK_INT(run_passes(&passes, &m, 5, 0), 2);
    passes.rows = 8;
    MP_CHECK_INT(run_passes(&passes, &m, 0.5, 0), 2);
    passes.rows = 1;
    m.taken = 1;
    MP_CHECK_INT(run_passes(&passes, &m, 5, 0), 1);
    m.taken = 0; /* prompts have the CPU to themselves */
    passes.rows = 512;
    MP_CHECK_INT(run_passes(&passes, &m, 2, 8), 2);
}

/* Programs occupy three of eight CPUs, so that six and seven threads are as slow as eight. */
MP_TEST(models_threads_tuner_leaves_several_cpus) {
    machine m = laptop;
    m.taken = 3;
    run passes = new_run(512);
    MP_CHECK_INT(run_passes(&passes, &m, 20, 0), 5);
    m.taken = 0;
    MP_CHECK_INT(run_passes(&passes, &m, 8, 0), 8);
}

/* Threads that lose time without making a pass slower stay, and rounds that find so take less than 1 % of the time. */
MP_TEST(models_threads_tuner_stays_if_fewer_are_slower) {
    run passes = new_run(8);
    const int worth = mp_threads_worth(&chat, 8, BARRIERS);
    for (int i = 0; i < 10000; i++) {
        const int threads = mp_tuner_plan(&passes.tuner, worth, 8) == 1 ? 1 : 2;
        const uint64_t ns = measured_ns(&pair, &passes.random, threads, 8);
        passes.now_ns += ns;
        passes.ns += (double)ns;
        passes.passes++;
        mp_tuner_note(&passes.tuner, &(mp_pass_time){.threads = threads, .rows = 8, .ns = ns, .watched_ns = ns,
                                                     .lost_ns = ns * 3 / 20 * (uint64_t)(threads - 1),
                                                     .ended_ns = passes.now_ns});
    }
    MP_CHECK_INT(in_use(&passes, &pair), 2);
    MP_CHECK(passes.passes > 0 && cost(&passes, &pair, 2) < 1.01);
}

/* Times that are wrong by far end rounds without a result. */
MP_TEST(models_threads_tuner_survives_wrong_times) {
    machine m = laptop;
    m.glitches = 0.2;
    for (int rows = 1; rows <= 512; rows *= 8) {
        run passes = new_run(rows);
        const int used = run_passes(&passes, &m, 0, 5000);
        MP_CHECK(used >= 1 && used <= 8);
    }
}

/* A number that one tuner has measured is the first of the next one, for the same rows, if its model has the work.
 * Numbers that other programs caused are not shared, nor those of passes with little work per barrier. */
MP_TEST(models_threads_tuners_share_numbers) {
    run passes = new_run(1);
    const int used = run_passes(&passes, &laptop, 10, 0), worth = mp_threads_worth(&chat, 1, BARRIERS);
    MP_CHECK_INT(mp_threads_learned(0), used);
    MP_CHECK_INT(mp_threads_learned(1), 0);
    MP_CHECK_INT(mp_tuner_plan(&(mp_thread_tuner){0}, worth, 1), used);
    MP_CHECK_INT(mp_tuner_plan(&(mp_thread_tuner){0}, worth, 2), worth);
    MP_CHECK_INT(mp_tuner_plan(&(mp_thread_tuner){0}, 2, 1), 2);
    run second = {.random = {7}, .rows = 1, .now_ns = 1};
    MP_CHECK_INT(run_passes(&second, &laptop, 2, 0), used);
    mp_threads_set_learned(0, 1); /* a wrong number */
    run third = {.random = {7}, .rows = 1, .now_ns = 1};
    run_passes(&third, &laptop, 3, 0);
    MP_CHECK(in_use(&third, &laptop) >= 3);
    run beside = new_run(1);
    machine m = pair;
    m.taken = 1;
    MP_CHECK_INT(run_passes(&beside, &m, 5, 0), 1);
    MP_CHECK_INT(mp_threads_learned(0), 0);
    machine far = server; /* barriers are longer than assumed */
    far.barrier_ns = 200;
    far.facts = &small;
    run short_work = new_run(1);
    MP_CHECK(run_passes(&short_work, &far, 5, 0) < mp_threads_worth(&small, 1, BARRIERS));
    MP_CHECK_INT(mp_threads_learned(0), 0);
    mp_threads_set_learned(0, 1000);
    MP_CHECK_INT(mp_threads_learned(0), MP_THREADS_MAX);
    mp_threads_set_learned(0, -1);
    mp_threads_set_learned(MP_LEARNED_CLASSES, 5); /* ignored */
    MP_CHECK(mp_threads_learned(0) == 0 && mp_threads_learned(MP_LEARNED_CLASSES) == 0);
}

static void note(mp_thread_tuner *tuner, int threads, int64_t rows, uint64_t ns) {
    mp_tuner_note(tuner, &(mp_pass_time){.threads = threads, .rows = rows, .ns = ns, .ended_ns = 1});
}

/* Each class of passes has its own number. Passes of a round with other rows do not count, and many of them end it. */
MP_TEST(models_threads_tuner_separates_rows) {
    run passes = new_run(1);
    const int one = run_passes(&passes, &server, 2, 0);
    passes.rows = 512;
    const int many = run_passes(&passes, &server, 20, 0);
    passes.rows = 1;
    MP_CHECK(one < 50 && many == 96);
    MP_CHECK_INT(run_passes(&passes, &server, 0, 1), one);
    new_run(1);
    mp_thread_tuner mixed = {0};
    for (int i = 0; i < 140; i++) { /* 5 and 7 rows are of one class; passes of 7 rows seem slow */
        mp_tuner_plan(&mixed, 60, 5);
        note(&mixed, mixed.threads, i % 2 ? 7 : 5, i % 2 ? 1000000000 : 100000000);
        MP_CHECK_INT(mixed.classes[2].threads, 0);
    }
    MP_CHECK(!mixed.classes[2].searching); /* given up */
}

/* A lease with fewer threads than before says nothing, because other workers hold the others; nor does one that is
 * larger, for other work of the step. */
MP_TEST(models_threads_tuner_ignores_other_leases) {
    enum { LONG = 300000000 }; /* longer than a block */
    new_run(1);
    mp_thread_tuner tuner = {0};
    const mp_tuned *tuned = &tuner.classes[0];
    note(&tuner, 4, 1, LONG); /* nothing was planned */
    mp_tuner_plan(&tuner, 60, 1);
    note(&tuner, 64, 1, LONG);
    MP_CHECK_INT(tuned->trial, 0);
    mp_tuner_plan(&tuner, 60, 1);
    note(&tuner, 60, 1, LONG);
    MP_CHECK_INT(tuned->base, 60);
    MP_CHECK_INT(tuned->trial, 48);
    MP_CHECK_INT(mp_tuner_plan(&tuner, 60, 1), 48);
    note(&tuner, 30, 1, 1);
    MP_CHECK_INT(mp_tuner_plan(&tuner, 60, 1), 48);
    note(&tuner, 48, 1, 2 * LONG);
    MP_CHECK_INT(mp_tuner_plan(&tuner, 60, 1), 60);
    note(&tuner, 60, 1, LONG);
    MP_CHECK_INT(mp_tuner_plan(&tuner, 60, 1), 96);
    note(&tuner, 72, 1, LONG); /* all CPUs of the machine */
    MP_CHECK_INT(tuned->trial, 72);
    mp_tuner_plan(&tuner, 60, 1);
    note(&tuner, 60, 1, LONG);
    MP_CHECK_INT(mp_tuner_plan(&tuner, 60, 1), 72);
    mp_thread_tuner other = {.classes[0].recent_ns = 10000000};
    mp_tuner_plan(&other, 60, 1);
    note(&other, 60, 1, LONG); /* a pass that is long by chance makes no blocks of single passes */
    MP_CHECK_INT(other.classes[0].length, 7);
}
