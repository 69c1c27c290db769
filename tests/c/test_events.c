/* test_events.c: registry/events.h, and the events that a registry posts. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/sys.h"
#include "mp_test.h"
#include "registry/events.h"
#include "registry/fork.h"
#include "test_registry_fake.h"

enum { SLOTS = 1024, MAX_HELD = 8, EVERYTHING = (1 << MP_EVENT_COUNT) - 1 };

static void post(mp_event_kind kind, uint64_t request) {
    mp_events_post(kind, 7, "a", 3, request, MP_OK);
}

MP_TEST(events_arrive_in_order_and_only_if_enabled) {
    mp_event event;
    post(MP_EVENT_SPAWN, 1); /* no kind is enabled */
    MP_CHECK(!mp_events_take(&event));
    mp_events_want(1 << MP_EVENT_READY | 1 << MP_EVENT_REQUEST_FAIL);
    uint64_t before = mp_sys_now_ns();
    post(MP_EVENT_SPAWN, 2);
    post(MP_EVENT_READY, 3);
    mp_events_post(MP_EVENT_REQUEST_FAIL, 8, "b", 0, 1ull << 63, MP_TIMEOUT);
    MP_CHECK(mp_events_take(&event));
    MP_CHECK(event.kind == MP_EVENT_READY && event.request == 3 && event.worker == 3 && event.registry == 7);
    MP_CHECK(event.status == MP_OK && event.time_ns >= before && event.time_ns <= mp_sys_now_ns());
    MP_CHECK_STR(event.key, "a");
    MP_CHECK(mp_events_take(&event));
    MP_CHECK(event.kind == MP_EVENT_REQUEST_FAIL && event.registry == 8 && event.worker == 0);
    MP_CHECK(event.status == MP_TIMEOUT && event.request == 1ull << 63);
    MP_CHECK_STR(event.key, "b");
    MP_CHECK(!mp_events_take(&event));
    mp_events_want(0);
    post(MP_EVENT_READY, 4);
    MP_CHECK(!mp_events_take(&event));
    MP_CHECK_INT(mp_events_dropped(), 0);
    for (int i = 0; i < MP_EVENT_COUNT; i++)
        MP_CHECK(strlen(mp_event_name((mp_event_kind)i)) >= 4);
}

MP_TEST(events_full_ring_drops_the_latest_and_counts) {
    mp_event event;
    mp_events_want(EVERYTHING);
    for (uint64_t round = 1; round <= 3; round++) {
        for (uint64_t i = 0; i < SLOTS + 100; i++)
            post(MP_EVENT_SPAWN, i + 1);
        MP_CHECK_INT(mp_events_dropped(), 100 * round);
        for (uint64_t i = 0; i < SLOTS; i++) {
            MP_CHECK(mp_events_take(&event));
            MP_CHECK_INT(event.request, i + 1);
            if (i == 9) { /* slots are free again: one more event fits */
                post(MP_EVENT_READY, 5000);
                MP_CHECK_INT(mp_events_dropped(), 100 * round);
            }
        }
        MP_CHECK(mp_events_take(&event) && event.request == 5000);
        MP_CHECK(!mp_events_take(&event));
    }
}

/* --- fast writers and a slow reader --- */

enum { WRITERS = 4, EACH = 20000 };

MP_TEST(events_of_the_parent_do_not_reach_the_child) {
#if defined(__SANITIZE_THREAD__)
    MP_SKIP("ThreadSanitizer does not follow a fork of a process with threads");
#endif
    mp_event event;
    mp_error error;
    MP_CHECK_OK(mp_fork_install(&error), &error);
    mp_events_want(EVERYTHING);
    for (uint64_t i = 0; i < SLOTS / 2; i++)
        post(MP_EVENT_SPAWN, i + 1);
    for (int i = 0; i < 10; i++)
        MP_CHECK(mp_events_take(&event));
    pid_t child = fork();
    MP_CHECK(child >= 0);
    if (!child) {
        bool fine = !mp_events_take(&event);
        for (uint64_t i = 0; i < SLOTS; i++)
            post(MP_EVENT_READY, i + 1);
        for (uint64_t i = 0; i < SLOTS; i++)
            fine = fine && mp_events_take(&event) && event.kind == MP_EVENT_READY && event.request == i + 1;
        _exit(fine && !mp_events_take(&event) && mp_events_dropped() == 0 ? 0 : 1);
    }
    int how;
    MP_CHECK(waitpid(child, &how, 0) == child && WIFEXITED(how));
    MP_CHECK_INT(WEXITSTATUS(how), 0);
    MP_CHECK(mp_events_take(&event) && event.request == 11); /* the parent still has its other events */
}

/* --- events of a registry --- */

typedef struct received {
    int counts[MP_EVENT_COUNT];
    mp_event last[MP_EVENT_COUNT];
} received;

static void drain(received *received) {
    mp_event event;
    while (mp_events_take(&event)) {
        received->counts[event.kind]++;
        received->last[event.kind] = event;
    }
}

/* Drains the events. Checks that exactly one new failure event arrived, with this key and status. */
static void expect_refused(received *received, mp_registry *registry, const char *key, mp_status status) {
    int before = received->counts[MP_EVENT_REQUEST_FAIL];
    drain(received);
    MP_CHECK_INT(received->counts[MP_EVENT_REQUEST_FAIL], before + 1);
    const mp_event *event = &received->last[MP_EVENT_REQUEST_FAIL];
    MP_CHECK_INT(event->status, status);
    MP_CHECK_STR(event->key, key);
    MP_CHECK(event->registry == mp_registry_number(registry) && event->worker == 0);
}

static mp_status refuse(mp_registry *registry, const char *key, fake_call *call, mp_submit_options options) {
    mp_ticket *ticket;
    mp_error error;
    options.priority = 2;
    mp_status status = mp_registry_submit(registry, key, &call->base, &options, &ticket, &error);
    MP_CHECK(!ticket);
    return status;
}

MP_TEST(events_report_refused_requests) {
    fake fake;
    received received = {0};
    mp_error error;
    mp_submit_options plain = {0}, fast = {.fail_fast = true}, late = {.deadline_ns = 1},
                      again = {.fail_fast = true, .uncounted = true};
    mp_registry *registry = fake_registry_of(
        (mp_registry_config){.threads = 1, .max_workers = 1, .memory_limit = 1000000, .breaker_threshold = 1});
    fake_init(&fake);
    fake_add(registry, "a", &fake, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    mp_events_want(1 << MP_EVENT_REQUEST_FAIL | 1 << MP_EVENT_REQUEST_COMPLETE);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    drain(&received);
    MP_CHECK_INT(received.counts[MP_EVENT_REQUEST_FAIL], 0);

    MP_CHECK_INT(refuse(registry, "nobody", fake_call_create(1), plain), MP_UNKNOWN_MODEL);
    expect_refused(&received, registry, "nobody", MP_UNKNOWN_MODEL);
    fake_call *call = fake_call_create(1);
    call->base.capability = MP_TEXT_TO_TEXT;
    MP_CHECK_INT(refuse(registry, "a", call, plain), MP_WRONG_CAPABILITY);
    expect_refused(&received, registry, "a", MP_WRONG_CAPABILITY);
    call = fake_call_create(1);
    call->bad_argument = true;
    MP_CHECK_INT(refuse(registry, "a", call, plain), MP_INVALID_ARGUMENT);
    expect_refused(&received, registry, "a", MP_INVALID_ARGUMENT);
    MP_CHECK_INT(refuse(registry, "a", fake_call_create(1), late), MP_TIMEOUT);
    expect_refused(&received, registry, "a", MP_TIMEOUT);
    call = fake_call_create(1);
    call->base.bytes = 5000000;
    MP_CHECK_INT(refuse(registry, "a", call, plain), MP_MEMORY_EXHAUSTED);
    expect_refused(&received, registry, "a", MP_MEMORY_EXHAUSTED);

    atomic_store(&fake.hold, true);
    mp_ticket *held[MAX_HELD];
    int count = 0;
    mp_submit_options alone = {.priority = 2, .policy = MP_POLICY_SEQUENTIAL, .fail_fast = true};
    for (mp_ticket *ticket;; held[count++] = ticket) {
        mp_status status = mp_registry_submit(registry, "a", &fake_call_create(1)->base, &alone, &ticket, &error);
        if (status == MP_OVERLOADED)
            break;
        MP_CHECK_OK(status, &error);
        MP_CHECK(count < MAX_HELD - 1);
        fake_until(&fake.in_steps, 1);
    }
    expect_refused(&received, registry, "a", MP_OVERLOADED);
    MP_CHECK_INT(refuse(registry, "a", fake_call_create(1), fast), MP_OVERLOADED);
    expect_refused(&received, registry, "a", MP_OVERLOADED);
    MP_CHECK_INT(refuse(registry, "a", fake_call_create(1), again), MP_OVERLOADED); /* uncounted: no event */
    drain(&received);
    MP_CHECK_INT(received.counts[MP_EVENT_REQUEST_FAIL], 7);
    atomic_store(&fake.hold, false);
    for (int i = 0; i < count; i++)
        MP_CHECK_INT(fake_finish(held[i]), MP_OK);

    call = fake_call_create(1);
    call->numeric = true;
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), MP_NUMERIC);
    expect_refused(&received, registry, "a", MP_NUMERIC); /* exactly one event for the request */
    MP_CHECK_INT(refuse(registry, "a", fake_call_create(1), plain), MP_CIRCUIT_OPEN);
    expect_refused(&received, registry, "a", MP_CIRCUIT_OPEN);
    mp_registry_begin_shutdown(registry);
    MP_CHECK_INT(refuse(registry, "a", fake_call_create(1), plain), MP_SHUTTING_DOWN);
    expect_refused(&received, registry, "a", MP_SHUTTING_DOWN);
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    drain(&received);
    MP_CHECK_INT(received.counts[MP_EVENT_REQUEST_COMPLETE], stats.completed);
    MP_CHECK_INT(received.counts[MP_EVENT_REQUEST_COMPLETE] + received.counts[MP_EVENT_REQUEST_FAIL],
                 stats.total_requests);
    fake_end(registry);
}

/* The numbers of requests are never used again, although a freed ticket's memory is. */
MP_TEST(events_number_each_request_once) {
    enum { CALLS = 50 };
    fake fake;
    mp_event event;
    uint64_t last = 0;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 1});
    fake_init(&fake);
    fake_add(registry, "a", &fake, false);
    mp_events_want(1 << MP_EVENT_REQUEST_START | 1 << MP_EVENT_REQUEST_COMPLETE);
    for (int i = 0; i < CALLS; i++) {
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
        MP_CHECK(mp_events_take(&event) && event.kind == MP_EVENT_REQUEST_START && event.request > last);
        last = event.request;
        MP_CHECK(mp_events_take(&event) && event.kind == MP_EVENT_REQUEST_COMPLETE && event.request == last);
    }
    MP_CHECK(last < 1000000); /* a counter, not an address */
    fake_end(registry);
}
