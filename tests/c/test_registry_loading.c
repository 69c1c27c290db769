/* The registry during loads: single flight, failures, timeouts, memory. */
#include <stdatomic.h>

#include "base/sys.h"
#include "mp_test.h"
#include "test_registry_fake.h"

/* --- loading --- */

MP_TEST(registry_reports_a_failed_load_to_every_caller) {
    fake fake;
    fake_init(&fake);
    fake.load_ns = FAKE_MS(20);
    fake.load_failures = 1;
    mp_registry *registry = fake_registry(2, 0);
    mp_error error;
    fake_add(registry, "a", &fake, false);
    mp_ticket *waiting[4];
    for (int i = 0; i < 4; i++)
        waiting[i] = fake_submit(registry, "a", fake_call_create(1), NULL);
    for (int i = 0; i < 4; i++) {
        MP_CHECK_STATUS(fake_wait(waiting[i], &error), MP_IO, &error);
        MP_CHECK_STR(error.message, "the file is gone");
        mp_ticket_release(waiting[i]);
    }
    /* during the backoff, submit fails at once with the same cause and starts no load */
    mp_status status;
    MP_CHECK(!fake_submit(registry, "a", fake_call_create(1), &status));
    MP_CHECK_INT(status, MP_IO);
    MP_CHECK_INT(fake.loads, 1);
    fake_until_state(registry, "a", "failed");
    /* an explicit load ignores the backoff */
    MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(5000), &error), &error);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    MP_CHECK_INT(fake.loads, 2);
    /* after the backoff, a request starts a new load */
    MP_CHECK_OK(mp_registry_evict(registry, "a", 0, &error), &error);
    fake.load_failures = 1;
    MP_CHECK_STATUS(mp_registry_load(registry, "a", false, 0, &error), MP_IO, &error);
    mp_sys_sleep_ns(FAKE_MS(110));
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_end(registry);
}

MP_TEST(registry_load_failures_back_off_longer_each_time) {
    fake fake;
    fake_init(&fake);
    fake.load_failures = 1000;
    mp_registry *registry = fake_registry(1, 0);
    fake_add(registry, "a", &fake, false);
    static const uint64_t pauses_ns[] = {FAKE_MS(100), FAKE_MS(200)};
    uint64_t failed_ns = 0; /* a time before the end of the last load: pauses are at least as long as they should be */
    for (int loads = 0; loads < 3;) {
        mp_status status;
        uint64_t now_ns = mp_sys_now_ns();
        mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), &status);
        if (ticket) {
            MP_CHECK_INT(fake_finish(ticket), MP_IO);
            MP_CHECK(loads == 0 || mp_sys_now_ns() - failed_ns >= pauses_ns[loads - 1]);
            MP_CHECK_INT(fake.loads, ++loads);
            failed_ns = now_ns;
        }
        mp_sys_sleep_ns(FAKE_MS(1));
    }
    fake_end(registry);
}

/* An eviction ends with the load that it interrupts, also if this load is abandoned. */
MP_TEST(registry_evicts_a_load_without_progress) {
    fake fake;
    fake_init(&fake);
    fake.load_stalls = true;
    mp_registry_config config = {.threads = 2, .load_timeout_ns = FAKE_MS(100), .spin_ns = 1, .max_workers = 1};
    mp_registry *registry;
    mp_error error;
    MP_CHECK_OK(mp_registry_create(&config, &registry, &error), &error);
    fake_add(registry, "a", &fake, false);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fake.loads, 1);
    MP_CHECK_OK(mp_registry_evict(registry, "a", fake_in_ms(20000), &error), &error);
    MP_CHECK_INT(fake_finish(ticket), MP_SPAWN_TIMEOUT);
    fake_until_state(registry, "a", "cold"); /* the failure is forgotten, and nothing is left to unload */
    atomic_store(&fake.load_stalls, false);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    MP_CHECK_INT(fake.loads, 2);
    fake_end(registry);
}

MP_TEST(registry_abandons_a_load_without_progress) {
    fake fake;
    fake_init(&fake);
    fake.load_stalls = true;
    mp_registry_config config = {.threads = 2, .load_timeout_ns = FAKE_MS(30), .spin_ns = 1, .max_workers = 1};
    mp_registry *registry;
    mp_error error;
    MP_CHECK_OK(mp_registry_create(&config, &registry, &error), &error);
    fake_add(registry, "a", &fake, false);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    MP_CHECK_STATUS(fake_wait(ticket, &error), MP_SPAWN_TIMEOUT, &error);
    MP_CHECK_HAS(error.message, "packing"); /* the message names the stage */
    mp_ticket_release(ticket);
    mp_status status;
    MP_CHECK(!fake_submit(registry, "a", fake_call_create(1), &status));
    MP_CHECK_INT(status, MP_SPAWN_TIMEOUT);
    mp_entry_info info;
    fake_info(registry, "a", &info);
    MP_CHECK_INT(info.dead, 1); /* the abandoned worker, whose thread has not returned */
    MP_CHECK_STR(info.state, "failed");
    /* an explicit load starts a new worker, which times out too */
    MP_CHECK_STATUS(mp_registry_load(registry, "a", false, 0, &error), MP_SPAWN_TIMEOUT, &error);
    MP_CHECK_INT(fake.loads, 2);
    atomic_store(&fake.load_stalls, false); /* the threads of both abandoned workers return and end */
    do {
        mp_sys_sleep_ns(FAKE_MS(1));
        fake_info(registry, "a", &info);
    } while (info.dead);
    MP_CHECK_INT(fake.models, 0);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(5000), &error), &error);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_end(registry);
}

/* The limit applies to a loader that never reports progress, from the moment at which it gets its compute threads. */
MP_TEST(registry_abandons_a_load_that_reports_nothing) {
    fake fake;
    mp_error error;
    mp_registry *registry =
        fake_registry_of((mp_registry_config){.threads = 1, .load_timeout_ns = FAKE_MS(30), .max_workers = 1});
    fake_init(&fake);
    fake.load_stalls = fake.load_silent = true;
    fake_add(registry, "a", &fake, false);
    MP_CHECK_STATUS(mp_registry_load(registry, "a", false, fake_in_ms(20000), &error), MP_SPAWN_TIMEOUT, &error);
    MP_CHECK_STR(error.message, "a: the load made no progress for 0.03 s (stage: loading)");
    atomic_store(&fake.load_stalls, false);
    mp_entry_info info;
    do { /* until the thread of the abandoned worker has returned */
        mp_sys_sleep_ns(FAKE_MS(1));
        fake_info(registry, "a", &info);
    } while (info.dead);
    fake_end(registry);
}

MP_TEST(registry_a_slow_load_with_progress_does_not_time_out) {
    fake fake;
    fake_init(&fake);
    fake.load_ns = FAKE_MS(700);
    mp_registry_config config = {.threads = 2, .load_timeout_ns = FAKE_MS(350), .spin_ns = 1, .max_workers = 1};
    mp_registry *registry;
    mp_error error;
    MP_CHECK_OK(mp_registry_create(&config, &registry, &error), &error);
    fake_add(registry, "a", &fake, false);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_end(registry);
}

/* --- memory --- */

MP_TEST(registry_reports_needed_and_free_memory) {
    fake big, small;
    fake_init(&big);
    fake_init(&small);
    big.model_bytes = 90 * 1000 * 1000;
    small.model_bytes = 20 * 1000 * 1000;
    mp_registry *registry = fake_registry(2, 100 * 1000 * 1000);
    mp_error error;
    fake_add(registry, "big", &big, false);
    fake_add(registry, "small", &small, false);
    MP_CHECK_OK(mp_registry_load(registry, "big", true, 0, &error), &error);
    MP_CHECK_STATUS(mp_registry_load(registry, "small", false, 0, &error), MP_MEMORY_EXHAUSTED, &error);
    MP_CHECK_HAS(error.message, "small needs 20.0 MB");
    MP_CHECK_HAS(error.message, "10.0 MB of 100.0 MB are free");
    MP_CHECK_HAS(error.message, "big 90.0 MB (pinned)");
    MP_CHECK_INT(small.loads, 0);
    MP_CHECK_OK(mp_registry_evict(registry, "big", 0, &error), &error);
    MP_CHECK_OK(mp_registry_load(registry, "small", false, 0, &error), &error);
    /* two loads that do not fit together: the second one waits for the first, then until that model is idle */
    MP_CHECK_OK(mp_registry_evict(registry, "small", 0, &error), &error);
    big.load_ns = FAKE_MS(20);
    big.hold = true; /* `big` stays in use */
    mp_ticket *first = fake_submit(registry, "big", fake_call_create(1), NULL);
    fake_until(&big.loads, 2);
    MP_CHECK_STATUS(mp_registry_load(registry, "small", false, fake_in_ms(100), &error), MP_TIMEOUT, &error);
    MP_CHECK_HAS(error.message, "waiting for memory");
    atomic_store(&big.hold, false);
    MP_CHECK_INT(fake_finish(first), MP_OK);
    MP_CHECK_OK(mp_registry_load(registry, "small", false, fake_in_ms(10000), &error), &error);
    MP_CHECK_INT(big.models, 0);
    /* a request above the limit; a smaller one would wait for `small` to be evicted */
    fake_call *call = fake_call_create(1);
    call->base.bytes = 101 * 1000 * 1000;
    mp_status status;
    MP_CHECK(!fake_submit(registry, "big", call, &status));
    MP_CHECK_INT(status, MP_MEMORY_EXHAUSTED);
    fake_end(registry);
}

static mp_status submit_as(mp_registry *registry, const char *key, mp_fail_fast fail_fast, mp_ticket **ticket,
                           mp_error *error) {
    mp_submit_options options = {.priority = 2, .fail_fast = fail_fast};
    mp_error_clear(error);
    return mp_registry_submit(registry, key, &fake_call_create(1)->base, &options, ticket, error);
}

/* With MP_FAIL_LOAD, a request is refused while its model's load waits for a model in use, in the queue or in submit.
 * Others wait. The eviction of an idle model is no reason to refuse. */
MP_TEST(registry_refuses_requests_while_a_load_waits_for_memory) {
    fake big, small;
    fake_init(&big);
    fake_init(&small);
    big.model_bytes = 90 * 1000 * 1000;
    small.model_bytes = 20 * 1000 * 1000;
    big.load_ns = small.load_ns = FAKE_MS(60);
    mp_registry *registry = fake_registry(2, 100 * 1000 * 1000);
    mp_error error;
    mp_ticket *busy, *waiting, *refused;
    fake_add(registry, "big", &big, false);
    fake_add(registry, "small", &small, false);
    atomic_store(&big.hold, true);
    MP_CHECK_OK(submit_as(registry, "big", MP_FAIL_LOAD, &busy, &error), &error);
    fake_until(&big.in_steps, 1);
    MP_CHECK_OK(submit_as(registry, "small", MP_FAIL_LOAD, &refused, &error), &error);
    MP_CHECK_STATUS(fake_wait(refused, &error), MP_OVERLOADED, &error);
    MP_CHECK_STR(error.field, MP_FIELD_MEMORY);
    mp_ticket_release(refused);
    MP_CHECK_OK(submit_as(registry, "small", MP_FAIL_SUBMIT, &waiting, &error), &error);
    mp_status status = MP_OK;
    for (int i = 0; i < 200 && status == MP_OK; i++) { /* accepted until the load has waited */
        if ((status = submit_as(registry, "small", MP_FAIL_LOAD, &refused, &error)) == MP_OK)
            MP_CHECK_INT(fake_finish(refused), MP_OVERLOADED);
    }
    MP_CHECK_STATUS(status, MP_OVERLOADED, &error);
    MP_CHECK_STR(error.field, MP_FIELD_MEMORY);
    MP_CHECK(!mp_ticket_done(waiting));
    MP_CHECK_INT(small.loads, 0);
    atomic_store(&big.hold, false);
    MP_CHECK_INT(fake_finish(busy), MP_OK);
    fake_until(&small.loads, 1);
    MP_CHECK_OK(submit_as(registry, "small", MP_FAIL_LOAD, &busy, &error), &error); /* the load goes on */
    MP_CHECK_INT(fake_finish(waiting), MP_OK);
    MP_CHECK_INT(fake_finish(busy), MP_OK);
    for (int i = 0; i < 4; i++) { /* models that were used just now are evicted */
        MP_CHECK_OK(submit_as(registry, i % 2 ? "small" : "big", MP_FAIL_LOAD, &busy, &error), &error);
        MP_CHECK_INT(fake_finish(busy), MP_OK);
    }
    fake_end(registry);
}

MP_TEST(registry_preempts_the_youngest_of_the_lowest_priority) {
    fake fake;
    fake_init(&fake);
    fake.memory = 10;
    fake.step_units = 1;
    mp_registry *registry = fake_registry(1, 0);
    fake_add(registry, "a", &fake, false);
    mp_error error;
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    /* three requests start with memory 1 and grow by 1 per step to 6 each: together they exceed the limit of 10 */
    fake_call *calls[3];
    mp_ticket *tickets[3];
    atomic_store(&fake.hold, true);
    for (int i = 0; i < 3; i++) {
        calls[i] = fake_call_create(5);
        calls[i]->memory = 1;
        calls[i]->memory_a_step = 1;
        mp_submit_options options = {.priority = i == 1 ? 3 : 2};
        MP_CHECK_OK(mp_registry_submit(registry, "a", &calls[i]->base, &options, &tickets[i], &error), &error);
    }
    atomic_store(&fake.hold, false);
    for (int i = 0; i < 3; i++) {
        MP_CHECK_INT(fake_finish(mp_ticket_pin(tickets[i])), MP_OK);
        MP_CHECK_INT(calls[i]->finished, 1);
    }
    MP_CHECK(fake.preempted >= 1);
    MP_CHECK(calls[1]->starts > 1);    /* the lowest priority was preempted */
    MP_CHECK_INT(calls[0]->starts, 1); /* the older of the two others was not */
    for (int i = 0; i < 3; i++)
        mp_ticket_release(tickets[i]);
    /* a request that is too large even alone fails, instead of being preempted forever */
    fake_call *large = fake_call_create(50);
    large->memory = 1;
    large->memory_a_step = 1;
    mp_ticket *ticket = fake_submit(registry, "a", large, NULL);
    MP_CHECK_STATUS(fake_wait(ticket, &error), MP_MEMORY_EXHAUSTED, &error);
    mp_ticket_release(ticket);
    MP_CHECK(fake.trims >= 1);
    large = fake_call_create(1);
    large->memory = 11;
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", large, NULL)), MP_MEMORY_EXHAUSTED);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_end(registry);
}
