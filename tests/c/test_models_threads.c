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
} machine;

static double pass_ns(const machine *m, int threads, int64_t rows) {
    const double bytes = (double)m->facts->weight_bytes;
    const double arithmetic = 2.0 * (double)m->facts->parameters * (double)rows / m->operations;
    const double all = arithmetic + bytes / m->read_one, shared = 1 - m->alone;
    return m->alone * all + shared * arithmetic / threads +
           shared * fmax(bytes / m->read_one / threads, bytes / m->read_all) + BARRIERS * m->barrier_ns * threads;
}

static int best_threads(const machine *m, int64_t rows) {
    int best = 1;
    for (int n = 1; n <= m->cpus; n++)
        if (pass_ns(m, n, rows) < pass_ns(m, best, rows))
            best = n;
    return best;
}

static mp_thread_tuner new_tuner(void) {
    mp_threads_set_fast(0);
    for (int i = 0; i < MP_LEARNED_CLASSES; i++)
        mp_threads_set_learned(i, 0);
    return (mp_thread_tuner){0};
}

static uint64_t measured_ns(const machine *m, mp_test_random *random, int threads, int64_t rows) {
    static const double wrong[] = {0, 1, 1e3, 1e12, 1.8e19};
    if ((double)(mp_test_random_u64(random) % 1000) < 1000 * m->glitches)
        return (uint64_t)wrong[mp_test_random_u64(random) % 5];
    const double longer = m->noise * (double)(mp_test_random_u64(random) % 1000) / 1000;
    return (uint64_t)(pass_ns(m, threads, rows) * (1 + longer));
}

/* Runs passes of `rows` rows. Returns the number of threads of the last one that was planned outside a round. */
static int run_passes(mp_thread_tuner *tuner, const machine *m, mp_test_random *random, int passes, int64_t rows) {
    const int worth = mp_threads_worth(m->facts, rows, BARRIERS), least = rows < 64 ? 3 : 8;
    int used = 0;
    for (int i = 0; i < passes; i++) {
        const int planned = mp_tuner_plan(tuner, worth, rows), threads = planned < m->cpus ? planned : m->cpus;
        MP_CHECK(planned >= (worth < least ? worth : least) && planned <= MP_THREADS_MAX);
        if (tuner->planned->wait > 0)
            used = threads;
        mp_tuner_note(tuner, threads, m->cpus, rows, measured_ns(m, random, threads, rows));
    }
    return used;
}

/* For each machine, the tuned number of threads is within 6 % of the best time, where the assumed one may be far off.
 * Rates: laptops and servers of 4 to 256 CPUs as they are assumed, and others far from the assumed rates. */
MP_TEST(models_threads_tuner_finds_the_rates_of_a_machine) {
    static const int cpus[] = {4, 6, 8, 9, 16, 32, 64, 96, 192, 256};
    static const struct {
        double read_one, read_all, operations, barrier_ns, alone;
    } rates[] = {
        {35, 460, 425, 60, 0},     {35, 460, 425, 60, 0.01}, {14, 80, 425, 60, 0.005},   {35, 4600, 425, 60, 0},
        {2, 20, 20, 60, 0},        {35, 460, 425, 400, 0},   {35, 460, 425, 2, 0},       {500, 500, 4000, 60, 0},
        {35, 40, 100, 1000, 0.05}, {1, 1000, 1, 1, 0},       {35, 460, 425, 1e5, 0.001}, {1e6, 1e9, 1e9, 60, 0},
    };
    const mp_model_facts *models[] = {&small, &middle, &large, &tiny};
    mp_test_random random = {7};
    for (size_t r = 0; r < sizeof rates / sizeof *rates; r++)
        for (int f = 0; f < 4; f++)
            for (size_t c = 0; c < sizeof cpus / sizeof *cpus; c++)
                for (int rows = 1; rows <= 512; rows *= 8) {
                    const machine m = {.cpus = cpus[c], .read_one = rates[r].read_one, .read_all = rates[r].read_all,
                                       .operations = rates[r].operations, .barrier_ns = rates[r].barrier_ns,
                                       .alone = rates[r].alone, .facts = models[f]};
                    mp_thread_tuner tuner = new_tuner();
                    int used = run_passes(&tuner, &m, &random, 400, rows), best = best_threads(&m, rows);
                    const int worth = mp_threads_worth(m.facts, rows, BARRIERS);
                    const int least = rows < 64 ? 3 : 8; /* fewer are never planned */
                    best = best < least ? least : best;
                    if (worth <= least || m.cpus <= least) { /* no round */
                        MP_CHECK_INT(used, worth < m.cpus ? worth : m.cpus);
                        continue;
                    }
                    if (pass_ns(&m, used, rows) > 1.06 * pass_ns(&m, best, rows))
                        MP_FAIL("rates %zu, model %d, %d CPUs, %d rows: %d threads, best %d, assumed %d, %+.1f %%", r,
                                f, m.cpus, rows, used, best, worth,
                                100 * (pass_ns(&m, used, rows) / pass_ns(&m, best, rows) - 1));
                }
}

static const machine server = {.cpus = 96, .read_one = 35, .read_all = 460, .operations = 425, .barrier_ns = 60,
                               .facts = &middle};

/* Rounds become rare while nothing changes: of 20,000 passes, fewer than one in a hundred has a trial's threads. When
 * the machine changes, the next round notices. */
MP_TEST(models_threads_tuner_pauses_and_follows_changes) {
    machine m = server;
    mp_thread_tuner tuner = new_tuner();
    mp_test_random random = {1};
    const int before = run_passes(&tuner, &m, &random, 200, 1);
    int trials = 0;
    for (int i = 0; i < 20000; i++) {
        const int planned = mp_tuner_plan(&tuner, mp_threads_worth(&middle, 1, BARRIERS), 1);
        trials += planned != before;
        mp_tuner_note(&tuner, planned, m.cpus, 1, measured_ns(&m, &random, planned, 1));
    }
    MP_CHECK(trials > 0 && trials < 100);
    m.read_all = 4600; /* the weights are in caches now, and barriers are shorter */
    m.barrier_ns = 20;
    const int after = run_passes(&tuner, &m, &random, 6000, 1);
    MP_CHECK(after > before);
    MP_CHECK(pass_ns(&m, after, 1) < 1.04 * pass_ns(&m, best_threads(&m, 1), 1));
}

/* Each class of passes has its own number. Passes of a round with other rows do not count. */
MP_TEST(models_threads_tuner_separates_rows) {
    mp_thread_tuner tuner = new_tuner();
    mp_test_random random = {1};
    const int one = run_passes(&tuner, &server, &random, 200, 1), many = run_passes(&tuner, &server, &random, 200, 512);
    MP_CHECK(one < 50 && many == 96);
    MP_CHECK_INT(run_passes(&tuner, &server, &random, 1, 1), one);
    mp_thread_tuner mixed = new_tuner();
    for (int i = 0; i < 63; i++) { /* 5 and 7 rows are of one class; passes of 7 rows seem slow */
        mp_tuner_plan(&mixed, 60, 5);
        mp_tuner_note(&mixed, mixed.threads, 96, i % 2 ? 7 : 5, i % 2 ? 1000 : 100);
        MP_CHECK(mixed.classes[2].factor == 1);
    }
    mp_tuner_plan(&mixed, 60, 5);
    mp_tuner_plan(&mixed, 60, 5);
    MP_CHECK(mixed.classes[2].wait > 0); /* given up */
}

/* A laptop whose memory three threads saturate. */
static const mp_model_facts chat = {.weight_bytes = 400 * 1000 * 1000, .parameters = 500 * 1000 * 1000};
static const machine laptop = {.cpus = 8, .read_one = 14, .read_all = 40, .operations = 3000, .barrier_ns = 3000,
                               .facts = &chat, .noise = 0.02};

/* With 4 to 8 CPUs, decoding finds a number within 2 % of the best one in 60 passes, also if each further thread costs
 * only 2 %. Prompts keep all CPUs. */
MP_TEST(models_threads_tuner_finds_what_saturates_memory) {
    mp_test_random random = {1};
    for (int i = 0; i < 10; i++) {
        machine m = laptop;
        m.cpus = 4 + i / 2;
        m.read_all = i % 2 ? 50 : 40;
        m.barrier_ns = i % 2 ? 1000 : 3000;
        mp_thread_tuner tuner = new_tuner();
        run_passes(&tuner, &m, &random, 60, 1);
        const int used = run_passes(&tuner, &m, &random, 20, 1);
        MP_CHECK(pass_ns(&m, used, 1) < 1.02 * pass_ns(&m, best_threads(&m, 1), 1));
        MP_CHECK_INT(run_passes(&tuner, &m, &random, 80, 64), m.cpus);
    }
}

/* Six fast cores and eight slow ones, as `python -m benchmarks replay` gives them: one slow core costs more than each
 * further one gains, so neither 14 nor 12 threads show that six are fastest. */
MP_TEST(models_threads_tuner_tries_the_fast_cores_alone) {
    static const int rates[] = {0, 52, 101, 146, 170, 180, 192, 139, 141, 148, 148, 150, 155, 157, 172};
    for (int fast = 0; fast <= 6; fast += 6) {
        mp_thread_tuner tuner = new_tuner();
        int used = 0;
        mp_threads_set_fast(fast);
        for (int i = 0; i < 200; i++) {
            const int planned = mp_tuner_plan(&tuner, 40, 1), threads = planned < 14 ? planned : 14;
            mp_tuner_note(&tuner, threads, 14, 1, 1000000000u / (uint64_t)rates[threads]);
            used = tuner.classes[0].wait > 0 ? threads : used;
        }
        MP_CHECK_INT(used, fast ? 6 : 14);
    }
    mp_threads_set_fast(0);
}

/* With 2 or 3 CPUs, no pass has fewer threads. */
MP_TEST(models_threads_tuner_never_tries_few_cpus) {
    static const mp_model_facts *models[] = {&chat, &tiny};
    for (int rows = 1; rows <= 512; rows *= 2)
        for (int i = 0; i < 4; i++) {
            const int cpus = 2 + i / 2, worth = mp_threads_worth(models[i % 2], rows, BARRIERS);
            mp_thread_tuner tuner = new_tuner();
            for (int pass = 0; pass < 500; pass++) {
                const int planned = mp_tuner_plan(&tuner, worth, rows), threads = planned < cpus ? planned : cpus;
                MP_CHECK_INT(threads, worth < cpus ? worth : cpus);
                mp_tuner_note(&tuner, threads, cpus, rows, (uint64_t)(1000000 * threads)); /* fewer were faster */
            }
        }
}

/* A tuner begins with the number that another one has measured for the same rows, if its model has the work, and
 * corrects a wrong one. Shared are only numbers of passes that had all CPUs, and that have much work per barrier. */
MP_TEST(models_threads_tuners_share_numbers) {
    mp_test_random random = {1};
    mp_thread_tuner first = new_tuner();
    const int used = run_passes(&first, &laptop, &random, 80, 1), worth = mp_threads_worth(&chat, 1, BARRIERS);
    MP_CHECK_INT(mp_threads_learned(0), used);
    MP_CHECK_INT(mp_threads_learned(1), 0);
    MP_CHECK_INT(mp_tuner_plan(&(mp_thread_tuner){0}, worth, 1), used);
    MP_CHECK_INT(mp_tuner_plan(&(mp_thread_tuner){0}, worth, 2), worth);
    MP_CHECK_INT(mp_tuner_plan(&(mp_thread_tuner){0}, used - 1, 1), used - 1);
    machine m = laptop;
    m.read_all = 400;
    m.barrier_ns = 60;
    MP_CHECK_INT(run_passes(&(mp_thread_tuner){0}, &m, &random, 80, 1), 8);
    MP_CHECK_INT(mp_threads_learned(0), 8);

    mp_thread_tuner beside = new_tuner();
    m = laptop;
    for (int pass = 0; pass < 200; pass++) { /* others hold two of eight CPUs */
        const int planned = mp_tuner_plan(&beside, worth, 1), threads = planned < 6 ? planned : 6;
        mp_tuner_note(&beside, threads, 8, 1, measured_ns(&m, &random, threads, 1));
    }
    MP_CHECK(beside.classes[0].factor < 1);
    MP_CHECK_INT(mp_threads_learned(0), 0);
    m = server;
    m.facts = &small;
    m.barrier_ns = 200; /* longer than assumed */
    mp_thread_tuner little = new_tuner();
    run_passes(&little, &m, &random, 80, 1);
    MP_CHECK(little.classes[0].factor < 1);
    MP_CHECK_INT(mp_threads_learned(0), 0);

    mp_threads_set_learned(0, 1000);
    MP_CHECK_INT(mp_threads_learned(0), MP_THREADS_MAX);
    mp_threads_set_learned(0, -1);
    mp_threads_set_learned(MP_LEARNED_CLASSES, 5); /* ignored */
    MP_CHECK(mp_threads_learned(0) == 0 && mp_threads_learned(MP_LEARNED_CLASSES) == 0);
}

/* A lease of another size than planned ends the round; one that is larger, for other work of the step, says nothing. */
MP_TEST(models_threads_tuner_ignores_other_leases) {
    mp_thread_tuner tuner = new_tuner();
    mp_tuner_note(&tuner, 4, 72, 1, 1000); /* nothing was planned */
    mp_tuner_plan(&tuner, 60, 1);
    mp_tuner_note(&tuner, 64, 72, 1, 1000);
    MP_CHECK_INT(tuner.classes[0].base, 0);
    mp_tuner_plan(&tuner, 60, 1);
    mp_tuner_note(&tuner, 60, 72, 1, 1000);
    MP_CHECK_INT(tuner.classes[0].base, 60);
    MP_CHECK_INT(tuner.classes[0].trial, 48);
    mp_tuner_plan(&tuner, 60, 1);
    mp_tuner_note(&tuner, 30, 72, 1, 1);
    MP_CHECK_INT(tuner.classes[0].base, 0);
    MP_CHECK(tuner.classes[0].factor == 1 && tuner.classes[0].up);
    mp_tuner_plan(&tuner, 60, 1);
    mp_tuner_note(&tuner, 60, 72, 1, 1000);
    mp_tuner_plan(&tuner, 60, 1);
    mp_tuner_note(&tuner, 60, 72, 1, 1000);
    MP_CHECK_INT(mp_tuner_plan(&tuner, 60, 1), 96);
    mp_tuner_note(&tuner, 72, 72, 1, 1000); /* all CPUs of the machine */
    MP_CHECK_INT(tuner.classes[0].trial, 72);
    mp_tuner_plan(&tuner, 60, 1);
    mp_tuner_note(&tuner, 60, 72, 1, 1000);
    MP_CHECK_INT(mp_tuner_plan(&tuner, 60, 1), 72);
}
