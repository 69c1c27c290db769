/* clock_fixture.h: a made-up clock for tests of the registry. It stands still, except while the only thread waits. So
 * every wait has one exact length, and one nanosecond more or less decides the other way. Needs MP_SEAM. */
#ifndef TESTS_CLOCK_FIXTURE_H
#define TESTS_CLOCK_FIXTURE_H

#include "base/log.h"
#include "base/sys.h"
#include "test_registry_scene.h"

#include <errno.h>
#include <pthread.h>

enum { WAITS = 4096 };
static const uint64_t MS = 1000 * 1000, SECOND = 1000ull * 1000 * 1000;

static uint64_t clock_ns;
static uint64_t waits[WAITS]; /* the lengths of the waits since start_clock or expect_waits */
static int wait_count;
static void (*in_wait)(void); /* called in each wait, without a lock; NULL: nothing happens */

static inline uint64_t read_clock(void) { return clock_ns; }

static inline void pass(uint64_t ns) {
    MP_CHECK(wait_count < WAITS);
    waits[wait_count++] = ns;
    clock_ns += ns;
    if (in_wait)
        in_wait();
}

static inline int wait_on_clock(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t deadline_ns) {
    (void)cond;
    MP_CHECK(deadline_ns == 0 || deadline_ns > clock_ns);
    pthread_mutex_unlock(mutex);
    pass(deadline_ns ? deadline_ns - clock_ns : 0);
    pthread_mutex_lock(mutex);
    return deadline_ns ? ETIMEDOUT : 0;
}

static inline void park_on_clock(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns) {
    (void)word, (void)expected;
    pass(timeout_ns);
}

static inline void start_clock(uint64_t now_ns) {
    clock_ns = now_ns;
    wait_count = 0;
    in_wait = NULL;
    mp_sys_table.now_ns = read_clock;
    mp_sys_table.sleep_ns = pass;
    mp_sys_table.cond_wait = wait_on_clock;
    mp_sys_table.park = park_on_clock;
}

static inline void stop_clock(void) {
    in_wait = NULL;
    mp_sys_table = mp_sys_real;
}

/* Checks the lengths of the waits since the last check, and forgets them. */
static inline void expect_waits(const uint64_t *lengths, int count) {
    MP_CHECK_INT(wait_count, count);
    for (int i = 0; i < count; i++)
        MP_CHECK_INT(waits[i], lengths[i]);
    wait_count = 0;
}
#define EXPECT_WAITS(...) \
    expect_waits((const uint64_t[]){__VA_ARGS__}, (int)(sizeof((uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t)))

static inline void open_scene(scene *scene) {
    scene_open(scene, "a", NULL, 1000 * 1000);
    scene->services->spin_ns = 0; /* a spin on a clock that stands still does not end */
    scene->fake.threads = 1;
    start_clock(1000 * SECOND);
}

static inline void close_scene(scene *scene) {
    stop_clock();
    scene_close(scene);
}

static int asked;        /* calls of give_up_at */
static int give_up_call; /* the number of the call that returns true */

static inline bool give_up_at(void *arg) {
    (void)arg;
    return ++asked == give_up_call;
}

/* --- records of the log --- */

static const char *wanted_record;
static int wanted_records;

static inline void find_record(const mp_log_record *record, void *arg) {
    (void)arg;
    wanted_records += strcmp(record->text, wanted_record) == 0;
}

static inline void expect_record(const char *text) {
    wanted_record = text;
    wanted_records = 0;
    mp_log_drain(find_record, NULL);
    MP_CHECK_INT(wanted_records, 1);
}

#endif
