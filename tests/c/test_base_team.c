/* test_base_team.c: base/team.h. */
#include <float.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/cpu.h"
#include "base/options.h"
#include "base/team.h"
#include "mp_test.h"

enum { MAX = 4, APART = 16 };

static mp_team *make_team(int helpers, const char *spin_us) {
    mp_error error;
    setenv("MPOOL_SPIN_US", spin_us, 1);
    MP_CHECK_OK(mp_options_init(&error), &error);
    mp_team *team;
    MP_CHECK_OK(mp_team_create(helpers, &team, &error), &error);
    MP_CHECK_INT(mp_team_size(team), helpers + 1);
    return team;
}

typedef struct rounds {
    int count;
    int64_t cells[MAX * APART];
    _Atomic int wrong;
} rounds;

/* Round i. The cells are plain and unsynchronised: only the barrier orders the writes of one thread before the reads of
 * the others. */
static void meet(const mp_team_thread *thread, int i, int64_t *cells, _Atomic int *wrong) {
    cells[thread->index * APART] = i;
    mp_team_barrier(thread);
    for (int k = 0; k < thread->count; k++)
        if (cells[k * APART] != i)
            atomic_fetch_add(wrong, 1);
    mp_team_barrier(thread);
}

static void step_together(const mp_team_thread *thread, void *arg) {
    rounds *r = arg;
    for (int i = 1; i <= r->count; i++)
        meet(thread, i, r->cells, &r->wrong);
}

static void check_barrier(int threads, const char *spin_us, int count, int runs) {
    mp_team *team = make_team(threads - 1, spin_us);
    mp_lease lease;
    mp_team_lease(team, 99, &lease);
    MP_CHECK_INT(lease.threads, threads);
    rounds r = {.count = count};
    for (int run = 0; run < runs; run++) {
        memset(r.cells, 0, sizeof(r.cells));
        mp_lease_run(&lease, step_together, &r);
        MP_CHECK_INT(atomic_load(&r.wrong), 0);
        for (int k = 0; k < threads; k++)
            MP_CHECK_INT(r.cells[k * APART], count);
    }
    mp_team_return(&lease);
    mp_team_destroy(team);
    uint64_t created, joined;
    mp_thread_counts(&created, &joined);
    MP_CHECK_INT(created, joined);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_POOL), 0);
}

MP_TEST(base_team_barrier_1_thread) { check_barrier(1, "100", 1000, 10); }
MP_TEST(base_team_barrier_2_threads) { check_barrier(2, "100", 5000, 4); }
MP_TEST(base_team_barrier_3_threads) { check_barrier(3, "20", 500, 4); }
MP_TEST(base_team_barrier_4_threads) { check_barrier(4, "20", 500, 4); }
/* Spin 0: every wait goes through the futex. */
MP_TEST(base_team_barrier_2_threads_parked) { check_barrier(2, "0", 2000, 4); }
MP_TEST(base_team_barrier_4_threads_parked) { check_barrier(4, "0", 500, 4); }

/* ---- barriers with delays ---------------------------------------------------------------------------------------- */

enum { CROWD = 40, DELAYED_ROUNDS = 40 };

typedef struct delayed_rounds {
    uint64_t seed;
    int64_t cells[CROWD * APART];
    _Atomic int wrong;
} delayed_rounds;

/* As step_together, but before each barrier a thread may be late: for less or for more than the spin, or by a sleep. A
 * thread that passes a barrier too early reads a cell of an earlier round. A thread that does not notice the end of a
 * barrier waits forever. */
static void step_with_delays(const mp_team_thread *thread, void *arg) {
    delayed_rounds *r = arg;
    mp_test_random random = {r->seed + (uint64_t)thread->index};
    for (int i = 1; i <= DELAYED_ROUNDS; i++) {
        const uint64_t kind = mp_test_random_u64(&random) % 16, until = mp_sys_now_ns() + (kind < 4 ? 3000 : 30000);
        if (kind == 15)
            mp_sys_sleep_ns(20 * 1000);
        else
            while (kind < 6 && mp_sys_now_ns() < until)
                mp_cpu_relax();
        meet(thread, i, r->cells, &r->wrong);
    }
}

static void check_delays(int threads, const char *spin_us) {
    mp_team *team = make_team(threads - 1, spin_us);
    static delayed_rounds r;
    for (int run = 0; run < 2; run++) {
        mp_lease lease;
        mp_team_lease(team, threads, &lease); /* a lease of its own: regions begin with counters at zero */
        memset(&r, 0, sizeof r);
        r.seed = (uint64_t)(1000 * threads + 100 * run);
        mp_lease_run(&lease, step_with_delays, &r);
        MP_CHECK_INT(atomic_load(&r.wrong), 0);
        for (int k = 0; k < threads; k++)
            MP_CHECK_INT(r.cells[k * APART], DELAYED_ROUNDS);
        mp_team_return(&lease);
    }
    mp_team_destroy(team);
}

static void check_all_delays(const char *spin_us) {
    static const int more[] = {17, 23, 24, 25, 31, 32, 33, CROWD};
    for (int threads = 1; threads <= 16; threads++)
        check_delays(threads, spin_us);
    for (size_t i = 0; i < sizeof more / sizeof *more; i++)
        check_delays(more[i], spin_us);
}

MP_TEST_SECONDS(base_team_barriers_with_delays, 60) { check_all_delays("50"); }
MP_TEST_SECONDS(base_team_barriers_with_delays_parked, 60) { check_all_delays("0"); }

typedef struct delayed_worker {
    mp_thread thread;
    mp_team *team;
    delayed_rounds rounds;
    int threads;
} delayed_worker;

static void run_delayed(void *arg) {
    delayed_worker *w = arg;
    mp_lease lease;
    mp_team_lease(w->team, 17, &lease);
    w->threads = lease.threads;
    mp_lease_run(&lease, step_with_delays, &w->rounds);
    mp_team_return(&lease);
}

/* Leases of one team share no counter. */
MP_TEST_SECONDS(base_team_barriers_of_two_leases, 60) {
    mp_team *team = make_team(32, "20");
    static delayed_worker workers[2];
    for (int i = 0; i < 2; i++) {
        workers[i] = (delayed_worker){.team = team, .rounds.seed = (uint64_t)i};
        mp_error error;
        MP_CHECK_OK(mp_thread_start(&workers[i].thread, "worker", run_delayed, &workers[i], &error), &error);
    }
    for (int i = 0; i < 2; i++) {
        mp_thread_join(&workers[i].thread);
        MP_CHECK_INT(workers[i].threads, 17);
        MP_CHECK_INT(atomic_load(&workers[i].rounds.wrong), 0);
    }
    mp_team_destroy(team);
}

static void add_index(const mp_team_thread *thread, void *arg) {
    atomic_fetch_add((_Atomic int *)arg, 1 << (8 * thread->index));
}

MP_TEST(base_team_lease_gets_the_free_threads) {
    mp_team *team = make_team(3, "10");
    mp_lease first, second, third, fourth;
    mp_team_lease(team, 2, &first);
    MP_CHECK_INT(first.threads, 2);
    mp_team_lease(team, 2, &second);
    MP_CHECK_INT(second.threads, 2);
    mp_team_lease(team, 9, &third);
    MP_CHECK_INT(third.threads, 2);
    mp_team_lease(team, 9, &fourth);
    MP_CHECK_INT(fourth.threads, 1);
    mp_lease *leases[] = {&first, &second, &third, &fourth};
    for (int i = 0; i < 4; i++) {
        _Atomic int sum = 0;
        mp_lease_run(leases[i], add_index, &sum);
        MP_CHECK_INT(atomic_load(&sum), leases[i]->threads == 2 ? 0x101 : 1);
    }
    mp_team_return(&second);
    MP_CHECK_INT(second.threads, 1);
    mp_team_lease(team, 9, &fourth);
    MP_CHECK_INT(fourth.threads, 2);
    _Atomic int sum = 0;
    mp_lease_run(&fourth, add_index, &sum);
    MP_CHECK_INT(atomic_load(&sum), 0x101);
    mp_team_return(&first);
    mp_team_return(&third);
    mp_team_return(&fourth);
    mp_team_lease(team, 9, &first);
    MP_CHECK_INT(first.threads, 4);
    mp_team_return(&first);
    mp_team_lease(team, 1, &first);
    MP_CHECK_INT(first.threads, 1);
    mp_team_return(&first);
    mp_team_destroy(team);
    mp_team_destroy(NULL);
}

typedef struct worker {
    mp_thread thread;
    mp_team *team;
    uint64_t seed;
    _Atomic int *running, *most;
    int wrong, threads_seen;
} worker;

static void divide_small(const mp_team_thread *thread, void *arg) {
    volatile float tiny = FLT_MIN;
    ((float *)arg)[thread->index] = tiny / 2;
}

MP_TEST(base_team_flushes_denormals_inside_regions_only) {
#if !defined(__x86_64__) && !defined(__aarch64__)
    MP_SKIP("no control of denormals here");
#endif
    volatile float tiny = FLT_MIN;
    mp_team *team = make_team(1, "10");
    for (int threads = 1; threads <= 2; threads++) {
        mp_lease lease;
        mp_team_lease(team, threads, &lease);
        float results[2] = {1, 1};
        mp_lease_run(&lease, divide_small, results);
        for (int i = 0; i < threads; i++)
            MP_CHECK(results[i] == 0);
        mp_team_return(&lease);
        MP_CHECK(tiny / 2 > 0); /* the caller's own floating-point mode is restored */
    }
    mp_team_destroy(team);
}

MP_TEST(base_team_poll_updates_the_heartbeat_and_sees_cancellation) {
    mp_team *team = make_team(0, "10");
    mp_lease lease;
    mp_team_lease(team, 1, &lease);
    uint64_t started = atomic_load(&lease.heartbeat);
    MP_CHECK(started > 0);
    mp_sys_sleep_ns(1000000);
    MP_CHECK(!mp_lease_poll(&lease));
    MP_CHECK(atomic_load(&lease.heartbeat) >= started + 1000000);
    _Atomic int cancelled = 0;
    lease.cancelled = &cancelled;
    MP_CHECK(!mp_lease_poll(&lease));
    atomic_store(&cancelled, 1);
    MP_CHECK(mp_lease_poll(&lease));
    mp_team_return(&lease);
    mp_team_destroy(team);
}

MP_TEST(base_team_split_covers_once_on_grain) {
    static const int64_t sizes[] = {0, 1, 7, 8, 31, 32, 33, 1000, 4097};
    static const int64_t grains[] = {1, 8, 16, 64};
    for (int s = 0; s < 9; s++)
        for (int g = 0; g < 4; g++)
            for (int count = 1; count <= 7; count++) {
                int64_t next = 0, least = INT64_MAX, most = 0;
                for (int index = 0; index < count; index++) {
                    mp_team_thread thread = {index, count, NULL, NULL};
                    int64_t begin, end;
                    mp_team_split(&thread, sizes[s], grains[g], &begin, &end);
                    MP_CHECK_INT(begin, next);
                    MP_CHECK(end >= begin && end <= sizes[s]);
                    if (end < sizes[s])
                        MP_CHECK_INT(end % grains[g], 0);
                    int64_t units = (end - begin + grains[g] - 1) / grains[g];
                    least = units < least ? units : least;
                    most = units > most ? units : most;
                    next = end;
                }
                MP_CHECK_INT(next, sizes[s]);
                MP_CHECK(most - least <= 1);
            }
    mp_team_thread huge = {1, 3, NULL, NULL};
    int64_t begin, end;
    mp_team_split(&huge, INT64_MAX / 2, 64, &begin, &end);
    MP_CHECK(begin > 0 && end > begin && begin % 64 == 0);
}

/* Loops of mp_team_next: how often each unit was taken. One thread may be late. */
enum { LOOPS = 5, UNITS = 1000 };
typedef struct taking {
    int64_t n, least;
    const int *starts;
    _Atomic int times[LOOPS][UNITS];
    _Atomic int wrong, ranges;
    int late;               /* a thread that stays at its first range of a loop until all others are taken; -1: none */
    _Atomic int64_t left;   /* units that are not taken yet, in all loops */
} taking;

static void take_units(const mp_team_thread *thread, void *arg) {
    taking *t = arg;
    for (int i = 0; i < LOOPS; i++) {
        mp_team_loop loop = {.n = t->n, .least = t->least, .starts = t->starts};
        while (mp_team_next(thread, &loop)) {
            if (loop.begin < 0 || loop.end <= loop.begin || loop.end > t->n)
                atomic_fetch_add(&t->wrong, 1);
            atomic_fetch_add(&t->ranges, 1);
            for (int64_t u = loop.begin; u < loop.end; u++)
                atomic_fetch_add(&t->times[i][u], 1);
            const int64_t left = atomic_fetch_sub(&t->left, loop.end - loop.begin) - (loop.end - loop.begin);
            if (thread->index == t->late && i == 0 && left > 0)
                while (atomic_load(&t->left) > 0)
                    mp_cpu_relax();
        }
    }
}

/* Runs LOOPS loops and checks that each unit was taken once. Returns the number of ranges. */
static int check_taken(mp_lease *lease, int64_t n, int64_t least, const int *starts, int late) {
    static taking t;
    memset(&t, 0, sizeof t);
    t.n = n;
    t.least = least;
    t.starts = starts;
    t.late = late;
    atomic_store(&t.left, LOOPS * n);
    mp_lease_run(lease, take_units, &t);
    MP_CHECK_INT(atomic_load(&t.wrong), 0);
    for (int i = 0; i < LOOPS; i++)
        for (int64_t u = starts ? starts[0] : 0; u < n; u++)
            MP_CHECK_INT(atomic_load(&t.times[i][u]), 1);
    return atomic_load(&t.ranges);
}

MP_TEST(base_team_next_takes_each_unit_once) {
    static const int64_t sizes[] = {0, 1, 2, 3, 4, 5, 11, 12, 33, UNITS}, leasts[] = {0, 1, 3, 100, 5000};
    for (int threads = 1; threads <= MAX; threads++) {
        mp_team *team = make_team(threads - 1, "20");
        mp_lease lease;
        mp_team_lease(team, 99, &lease);
        for (int s = 0; s < 10; s++)
            for (int l = 0; l < 5; l++)
                for (int turn = 0; turn < 20; turn++) {
                    const int ranges = check_taken(&lease, sizes[s], leasts[l], NULL, -1);
                    if (threads == 1)
                        MP_CHECK_INT(ranges, sizes[s] > 0 ? LOOPS : 0);
                }
        int starts[MAX + 1]; /* the first thread has no share, the last one most */
        for (int i = 0; i <= threads; i++)
            starts[i] = i == threads ? UNITS : 10 * (i > 1 ? i : 1);
        check_taken(&lease, UNITS, 1, starts, -1);
        mp_team_return(&lease);
        mp_team_destroy(team);
    }
}

/* While one thread is at its first range, the others take all other units of this loop and of those that follow. */
MP_TEST(base_team_next_does_not_wait_for_a_late_thread) {
    for (int helpers = 2; helpers <= 19; helpers += 17) { /* a thread looks at the shares of 15 others */
        mp_team *team = make_team(helpers, "20");
        mp_lease lease;
        mp_team_lease(team, 99, &lease);
        for (int late = 0; late <= helpers; late += helpers / 2)
            for (int turn = 0; turn < 20; turn++)
                check_taken(&lease, UNITS, 1, NULL, late);
        mp_team_return(&lease);
        mp_team_destroy(team);
    }
}

static void find_largest(const mp_team_thread *thread, void *arg) {
    _Atomic int64_t *largest = arg;
    mp_team_loop loop = mp_team_shared(UNITS, 1);
    while (mp_team_next(thread, &loop))
        for (int64_t at = atomic_load(largest); loop.end - loop.begin > at;)
            if (atomic_compare_exchange_strong(largest, &at, loop.end - loop.begin))
                break;
}

/* No range is more than an eighth of a share: a thread of a third of the others' speed would end its share too late. */
MP_TEST(base_team_next_takes_small_ranges) {
    for (int threads = 2; threads <= MAX; threads++) {
        mp_team *team = make_team(threads - 1, "20");
        mp_lease lease;
        _Atomic int64_t largest = 0;
        mp_team_lease(team, threads, &lease);
        mp_lease_run(&lease, find_largest, &largest);
        MP_CHECK(largest > 0 && largest <= (UNITS / threads + 1) / 8);
        mp_team_return(&lease);
        mp_team_destroy(team);
    }
}

/* Short loops over rows are not divided into ranges, and each thread takes its own share. */
MP_TEST(base_team_rows_are_taken_in_ranges_of_20_us) {
    const mp_team_thread two = {.count = 2}, last = {.index = 1, .count = 2};
    MP_CHECK_INT(mp_team_rows(&two, 100, 1024).least, 33);
    MP_CHECK_INT(mp_team_rows(&two, 66, 1024).least, 0);
    MP_CHECK_INT(mp_team_rows(&two, 3, 100000).least, 1);
    mp_team_loop loop = mp_team_rows(&last, 66, 1024);
    MP_CHECK(mp_team_next(&last, &loop));
    MP_CHECK(loop.begin == 33 && loop.end == 66);
    MP_CHECK(!mp_team_next(&last, &loop));
}

static mp_status team_life(void *arg, mp_error *error) {
    (void)arg;
    mp_team *team;
    MP_TRY(mp_team_create(3, &team, error));
    mp_lease lease;
    mp_team_lease(team, 4, &lease);
    _Atomic int sum = 0;
    mp_lease_run(&lease, add_index, &sum);
    mp_team_return(&lease);
    mp_team_destroy(team);
    return MP_OK;
}

MP_TEST(base_team_survives_refused_threads) {
    MP_CHECK_INT(mp_test_fault_sweep(MP_FAULT_THREAD, team_life, NULL), 3);
}

MP_TEST(base_team_survives_refused_memory) { mp_test_alloc_sweep(team_life, NULL); }

enum { NAP_MS = 30 };

/* The last thread sleeps, as if it had no CPU, while all others wait for it at the barrier. */
static void wait_for_one(const mp_team_thread *thread, void *arg) {
    (void)arg;
    if (thread->index == thread->count - 1)
        mp_sys_sleep_ns(NAP_MS * 1000000u);
    mp_team_barrier(thread);
}

static void check_loss(int threads, const char *spin_us) {
    mp_team *team = make_team(threads - 1, spin_us);
    mp_lease lease;
    mp_team_lease(team, threads, &lease);
    MP_CHECK(lease.watched_ns == 0 && lease.lost_ns == 0);
    mp_sys_sleep_ns(2 * 1000 * 1000); /* the next region is watched: at most one per millisecond is */
    mp_lease_run(&lease, wait_for_one, NULL);
    uint64_t least = NAP_MS * 1000000u;
    MP_CHECK(lease.watched_ns >= least);
    /* lost_ns is the largest loss of one thread; the time in which others wait for that thread is not lost */
    MP_CHECK(lease.lost_ns >= least * 9 / 10 && lease.lost_ns <= lease.watched_ns);
    uint64_t watched = lease.watched_ns;
    mp_lease_run(&lease, wait_for_one, NULL);
    MP_CHECK(lease.watched_ns > watched);
    mp_team_return(&lease);
    mp_team_destroy(team);
}

MP_TEST(base_team_reports_lost_time_of_threads) {
    check_loss(1, "50");
    check_loss(2, "50");
    check_loss(3, "0");
}
