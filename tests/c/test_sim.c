/* The simulator itself: it finds each kind of bug that it checks for, repeats runs, and visits all schedules. */
#include "sim.h"

#ifdef MP_SIM

#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "mp_test.h"
#include "sim_world.h"

typedef struct pair {
    mp_mutex a, b;
    mp_cond cond;
    _Atomic int word;
    int flag, plain;
    void (*other)(struct pair *pair);
} pair;

static void init(pair *p) {
    memset(p, 0, sizeof(*p));
    mp_mutex_init(&p->a);
    mp_mutex_init(&p->b);
    mp_cond_init(&p->cond);
}

static void other_main(void *arg) {
    pair *p = arg;
    p->other(p);
}

static void deinit(pair *p) {
    mp_cond_deinit(&p->cond);
    mp_mutex_deinit(&p->b);
    mp_mutex_deinit(&p->a);
}

/* Runs `other` in parallel with `mine`, and destroys the locks. */
static void beside(pair *p, void (*other)(pair *p), void (*mine)(pair *p)) {
    mp_thread thread;
    mp_error error;
    p->other = other;
    MP_CHECK_OK(mp_thread_start(&thread, "other", other_main, p, &error), &error);
    mine(p);
    mp_thread_join(&thread);
    deinit(p);
}

static void ab(pair *p) {
    mp_mutex_lock(&p->a);
    mp_mutex_lock(&p->b);
    mp_mutex_unlock(&p->b);
    mp_mutex_unlock(&p->a);
}
static void ba(pair *p) {
    mp_mutex_lock(&p->b);
    mp_mutex_lock(&p->a);
    mp_mutex_unlock(&p->a);
    mp_mutex_unlock(&p->b);
}
static void both_orders(void *arg) {
    pair p;
    (void)arg;
    init(&p);
    beside(&p, ab, ba);
}

static void wait_for_flag(pair *p) {
    mp_mutex_lock(&p->a);
    while (!p->flag)
        mp_cond_wait(&p->cond, &p->a, 0);
    mp_mutex_unlock(&p->a);
}
static void set_flag(pair *p) {
    mp_mutex_lock(&p->a);
    p->flag = 1;
    mp_mutex_unlock(&p->a);
    mp_cond_broadcast(&p->cond);
}
static void set_flag_silently(pair *p) {
    mp_mutex_lock(&p->a);
    p->flag = 1;
    mp_mutex_unlock(&p->a);
}
static void wakes(void *arg) {
    pair p;
    (void)arg;
    init(&p);
    beside(&p, wait_for_flag, set_flag);
}
static void forgets_to_wake(void *arg) {
    pair p;
    (void)arg;
    init(&p);
    beside(&p, wait_for_flag, set_flag_silently);
}
static void wait_without_loop(pair *p) {
    mp_mutex_lock(&p->a);
    if (!p->flag)
        mp_cond_wait(&p->cond, &p->a, 0);
    SIM_CHECK(p->flag);
    mp_mutex_unlock(&p->a);
}
static void trusts_wakes(void *arg) {
    pair p;
    (void)arg;
    init(&p);
    beside(&p, wait_without_loop, set_flag);
}
static void unlock_twice(void *arg) {
    pair p;
    (void)arg;
    init(&p);
    mp_mutex_lock(&p.a);
    mp_mutex_unlock(&p.a);
    mp_mutex_unlock(&p.a);
}
static void unlock_a(pair *p) { mp_mutex_unlock(&p->a); }
static void just_wait(pair *p) {
    (void)p;
    mp_sys_sleep_ns(1000000);
}
static void unlock_others(void *arg) {
    pair p;
    (void)arg;
    init(&p);
    mp_mutex_lock(&p.a);
    beside(&p, unlock_a, just_wait);
}
static void lock_twice(void *arg) {
    pair p;
    (void)arg;
    init(&p);
    mp_mutex_lock(&p.a);
    mp_mutex_lock(&p.a);
}
static void wait_unlocked(void *arg) {
    pair p;
    (void)arg;
    init(&p);
    mp_cond_wait(&p.cond, &p.a, 0);
}
static void destroy_held(void *arg) {
    pair p;
    (void)arg;
    init(&p);
    mp_mutex_lock(&p.a);
    mp_mutex_deinit(&p.a);
}
static void destroy_cond(pair *p) {
    mp_sys_sleep_ns(1000000);
    mp_cond_deinit(&p->cond);
}
static void destroy_waited(void *arg) {
    pair p;
    (void)arg;
    init(&p);
    beside(&p, wait_for_flag, destroy_cond);
}
static void leak(void *arg) {
    (void)arg;
    void *volatile block = mp_alloc(100, MP_TAG_MISC);
    (void)block;
}
static void keep_mutex(void *arg) {
    pair p;
    (void)arg;
    init(&p);
    mp_cond_deinit(&p.cond);
    mp_mutex_deinit(&p.a);
}
static void keep_cond(void *arg) {
    pair p;
    (void)arg;
    init(&p);
    mp_mutex_deinit(&p.b);
    mp_mutex_deinit(&p.a);
}
static void write_after_free(void *arg) {
    (void)arg;
    char *volatile block = mp_alloc(100, MP_TAG_MISC);
    mp_free((void *)block);
    block[50] = 1;
}
static void nothing(void *arg) { (void)arg; }
static void never_join(void *arg) {
    (void)arg;
    mp_thread thread;
    mp_error error;
    MP_CHECK_OK(mp_thread_start(&thread, "lonely", nothing, NULL, &error), &error);
    mp_sys_sleep_ns(1000);
}
static void spin_for_ever(void *arg) {
    (void)arg;
    while (mp_sys_now_ns())
        ;
}
static void sleep_for_ever(void *arg) {
    (void)arg;
    for (;;)
        mp_sys_sleep_ns(1000000000);
}
/* An increment that is lost only if the other thread runs exactly between its halves. */
static void tear(pair *p) {
    sim_yield();
    int seen = p->plain;
    sim_yield();
    p->plain = seen + 1;
}
static void torn(void *arg) {
    pair p;
    (void)arg;
    init(&p);
    beside(&p, tear, tear);
    SIM_CHECK(p.plain == 2);
}
static void good_order(void *arg) {
    pair p;
    (void)arg;
    init(&p);
    beside(&p, ab, ab);
}

typedef struct known_bug {
    const char *name, *message;
    void (*body)(void *arg);
    uint32_t spurious;
} known_bug;
static const known_bug bugs[] = {
    {"both orders", "locks in both orders", both_orders, 0},
    {"no wake-up", "deadlock", forgets_to_wake, 0},
    {"spurious wake-up", "p->flag is false", trusts_wakes, 30000},
    {"unlocked twice", "no thread holds", unlock_twice, 0},
    {"unlocked another thread's", "that thread 0 holds", unlock_others, 0},
    {"locked twice", "locked twice", lock_twice, 0},
    {"waits without the lock", "no thread holds", wait_unlocked, 0},
    {"held lock destroyed", "destroyed while thread 0 holds", destroy_held, 0},
    {"awaited condition destroyed", "destroyed while 1 wait", destroy_waited, 0},
    {"leak", "1 blocks were not freed", leak, 0},
    {"mutex not destroyed", "of the locks that &p->b", keep_mutex, 0},
    {"condition not destroyed", "of the locks that &p->cond", keep_cond, 0},
    {"written after free", "was written after thread 0 freed it", write_after_free, 0},
    {"not joined", "was never joined", never_join, 0},
    {"spins forever", "no end after", spin_for_ever, 0},
    {"sleeps forever", "the run hangs", sleep_for_ever, 0},
    {"torn increment", "p.plain == 2 is false", torn, 0},
};

MP_TEST(sim_finds_every_kind_of_bug) {
    for (size_t i = 0; i < sizeof(bugs) / sizeof(bugs[0]); i++)
        for (int scheduler = SIM_RANDOM; scheduler <= SIM_PCT; scheduler++) {
            char said[4096];
            const known_bug *bug = &bugs[i];
            sim_setup setup = {.world = "self", .scheduler = (sim_scheduler)scheduler, .depth = 3};
            setup.spurious = bug->spurious;
            setup.step_limit = 5000;
            bool found = sim_world_in_child(&setup, 300, bug->body, NULL, said, sizeof(said));
            if (!found)
                MP_FAIL("%s: not found", bug->name);
            if (!strstr(said, bug->message))
                MP_FAIL("%s: expected \"%s\", said: %s", bug->name, bug->message, said);
        }
}

MP_TEST(sim_accepts_correct_programs) {
    sim_setup setup = {.world = "self", .spurious = 2000, .depth = 3};
    for (setup.seed = 0; setup.seed < 500; setup.seed++) {
        setup.scheduler = (sim_scheduler)(setup.seed & 1);
        sim_run(&setup, wakes, NULL, NULL);
        sim_run(&setup, good_order, NULL, NULL);
    }
}

MP_TEST(sim_visits_all_schedules) {
    /* Two threads have two scheduling points each, and the first starts the second. With enough preemptions, all
     * schedules occur. */
    int counts[4] = {0};
    for (int depth = 0; depth < 4; depth++) {
        sim_setup setup = {.world = "self", .scheduler = SIM_EXHAUSTIVE, .depth = depth, .coarse = true};
        sim_first();
        do {
            sim_run(&setup, good_order, NULL, NULL);
            counts[depth]++;
            MP_CHECK(counts[depth] < 100000);
        } while (sim_next());
    }
    MP_CHECK(counts[0] < counts[1] && counts[1] < counts[2] && counts[2] < counts[3]);
    char said[4096];
    sim_setup setup = {.world = "self", .scheduler = SIM_EXHAUSTIVE, .depth = 0, .coarse = true};
    MP_CHECK(!sim_world_in_child(&setup, 1000, torn, NULL, said, sizeof(said)));
    setup.depth = 1;
    MP_CHECK(sim_world_in_child(&setup, 1000, torn, NULL, said, sizeof(said)));
    /* The printed command repeats the failure at once. */
    char *choices = strstr(said, "MPOOL_SIM_CHOICES=");
    MP_CHECK(choices != NULL);
    choices += strlen("MPOOL_SIM_CHOICES=");
    choices[strcspn(choices, " ")] = 0;
    setenv("MPOOL_SIM_CHOICES", choices, 1);
    MP_CHECK(sim_world_in_child(&setup, 1, torn, NULL, said, sizeof(said)));
    unsetenv("MPOOL_SIM_CHOICES");
    MP_CHECK(!sim_world_in_child(&setup, 1, torn, NULL, said, sizeof(said)));
}

#endif
