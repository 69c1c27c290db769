/* test_base_event_count.c: base/event_count.h and base/crowding.h. */
#include "base/crowding.h"
#include "base/event_count.h"
#include "mp_test.h"

static bool always(void *arg) {
    (void)arg;
    return true;
}

static bool never(void *arg) {
    (void)arg;
    return false;
}

static void nothing(void *arg) { (void)arg; }

typedef struct exchange { /* one thread produces work, another consumes it */
    mp_mutex lock;
    mp_event_count arrived;
    int work, taken;
    bool over;
    mp_spin_rule rule;
} exchange;

static void consume(void *arg) {
    exchange *exchange = arg;
    mp_mutex_lock(&exchange->lock);
    while (!exchange->over || exchange->work) {
        if (exchange->work) {
            exchange->work--;
            exchange->taken++;
        } else {
            mp_event_count_wait(&exchange->arrived, &exchange->lock, &exchange->rule, 0);
        }
    }
    mp_mutex_unlock(&exchange->lock);
}

static void notify_many(uint64_t spin_ns) {
    enum { NOTIFICATIONS = 20000 };
    exchange exchange = {.rule = {always, always, nothing, NULL, spin_ns}};
    mp_mutex_init(&exchange.lock);
    mp_thread thread;
    mp_error error;
    MP_CHECK_OK(mp_thread_start(&thread, "consumer", consume, &exchange, &error), &error);
    for (int i = 0; i <= NOTIFICATIONS; i++) {
        mp_mutex_lock(&exchange.lock);
        if (i < NOTIFICATIONS)
            exchange.work++;
        else
            exchange.over = true;
        mp_event_count_notify(&exchange.arrived);
        mp_mutex_unlock(&exchange.lock);
        if (i % 64 == 0) /* long enough for the consumer to park */
            mp_sys_sleep_ns(200 * 1000);
    }
    mp_thread_join(&thread);
    MP_CHECK_INT(exchange.taken, NOTIFICATIONS);
    MP_CHECK_INT(atomic_load(&exchange.arrived.sleepers), 0);
    mp_mutex_deinit(&exchange.lock);
}

MP_TEST(base_event_count_loses_no_notification_parked) { notify_many(0); }

MP_TEST(base_event_count_loses_no_notification_spinning) { notify_many(50 * 1000); }

MP_TEST(base_event_count_keeps_its_deadline) {
    mp_mutex lock;
    mp_event_count arrived = {0};
    mp_mutex_init(&lock);
    mp_mutex_lock(&lock);
    uint64_t deadline = mp_sys_now_ns() + 20 * 1000 * 1000;
    while (mp_sys_now_ns() < deadline)
        mp_event_count_wait(&arrived, &lock, NULL, deadline);
    MP_CHECK_INT(atomic_load(&arrived.sleepers), 0);
    mp_event_count_wait(&arrived, &lock, NULL, 1); /* a deadline that has passed */
    mp_mutex_unlock(&lock);
    mp_mutex_deinit(&lock);
}

static bool count_down(void *arg) { return --*(int *)arg == 0; }

MP_TEST(base_spin_needs_permission_and_ends_in_time) {
    int left = 100;
    MP_CHECK(mp_spin_until(count_down, &left, &(mp_spin_rule){always, always, nothing, NULL, UINT64_MAX}));
    MP_CHECK_INT(left, 0);
    left = 2;
    MP_CHECK(!mp_spin_until(count_down, &left, &(mp_spin_rule){never, always, nothing, NULL, UINT64_MAX}));
    MP_CHECK_INT(left, 1); /* without permission to spin, the condition is checked once */
    uint64_t before = mp_sys_now_ns();
    MP_CHECK(!mp_spin_until(never, NULL, &(mp_spin_rule){always, never, nothing, NULL, UINT64_MAX}));
    MP_CHECK(!mp_spin_until(never, NULL, &(mp_spin_rule){always, always, nothing, NULL, 1000 * 1000}));
    MP_CHECK(mp_sys_now_ns() - before >= 1000 * 1000);
}

static void notify_shared(void *arg) {
    mp_sys_sleep_ns(5 * 1000 * 1000);
    mp_event_count_notify_shared(arg);
}

MP_TEST(base_event_count_shared_wakes_and_times_out) {
    mp_event_count events = {0};
    mp_thread thread;
    mp_error error;
    mp_event_count_park_shared(&events, 1, 0); /* the count is 0, not 1: returns at once */
    mp_event_count_park_shared(&events, 0, 1000 * 1000);
    MP_CHECK_INT(mp_event_count_read(&events), 0);
    MP_CHECK_OK(mp_thread_start(&thread, "notifier", notify_shared, &events, &error), &error);
    while (mp_event_count_read(&events) == 0)
        mp_event_count_park_shared(&events, 0, 0);
    mp_thread_join(&thread);
    MP_CHECK_INT(atomic_load(&events.sleepers), 0);
}

MP_TEST(base_crowding_is_measured_after_10_ms) {
    MP_CHECK(mp_crowding_rate() < 0);
    MP_CHECK(mp_crowding_rate() < 0);
    mp_sys_sleep_ns(11 * 1000 * 1000);
    MP_CHECK(mp_crowding_rate() >= 0);
}
