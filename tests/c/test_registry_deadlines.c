/* Deadlines of callers that load or evict a model while another caller's load or eviction of it runs: the late caller
 * gets TIMEOUT, and the operation continues. Loads and steps last until the test ends them. A caller that returns
 * before that did not wait for the operation, so no check depends on how long anything takes. */
#include <stdatomic.h>

#include "base/sys.h"
#include "mp_test.h"
#include "test_registry_fake.h"

enum { RUNNING = -1 };

typedef struct caller { /* a thread that loads or evicts the model "a", without a deadline */
    mp_registry *registry;
    bool evicts, pins;
    mp_error error;
    mp_thread thread;
    _Atomic int status; /* RUNNING until it returns */
} caller;

static void run_caller(void *arg) {
    caller *self = arg;
    mp_status status = self->evicts ? mp_registry_evict(self->registry, "a", 0, &self->error)
                                    : mp_registry_load(self->registry, "a", self->pins, 0, &self->error);
    atomic_store(&self->status, status);
}

static void start_caller(caller *caller) {
    mp_error error;
    atomic_store(&caller->status, RUNNING);
    MP_CHECK_OK(mp_thread_start(&caller->thread, "calls", run_caller, caller, &error), &error);
}

static mp_status end_caller(caller *caller) {
    mp_thread_join(&caller->thread);
    return (mp_status)atomic_load(&caller->status);
}

/* Returns a deadline that has passed, or for `soon` one that passes while the caller waits. */
static uint64_t deadline(bool soon) { return soon ? fake_in_ms(20) : 1; }

/* Calls load twice, each time with another deadline. Both calls must time out and leave the entry as it is. */
static void expect_late_loads(mp_registry *registry, bool pin, const char *message) {
    mp_error error;
    mp_entry_info before, after;
    fake_info(registry, "a", &before);
    for (int soon = 0; soon < 2; soon++) {
        MP_CHECK_STATUS(mp_registry_load(registry, "a", pin, deadline(soon), &error), MP_TIMEOUT, &error);
        MP_CHECK_STR(error.message, message);
        MP_CHECK_HAS(error.hint, "Load it again");
        fake_info(registry, "a", &after);
        MP_CHECK_STR(after.state, before.state);
        MP_CHECK_INT(after.pinned, before.pinned);
    }
}

static void expect_late_evictions(mp_registry *registry, const char *message) {
    mp_error error;
    for (int soon = 0; soon < 2; soon++) {
        MP_CHECK_STATUS(mp_registry_evict(registry, "a", deadline(soon), &error), MP_TIMEOUT, &error);
        MP_CHECK_STR(error.message, message);
        MP_CHECK_STR(error.hint, "Unload it again to wait for it, or raise `timeout`");
    }
}

static const char load_goes_on[] =
    "a: the load did not end before the deadline (stage: packing); it continues in the background";
static const char not_begun[] =
    "a: the model was being evicted until the deadline, so its load has not begun";

/* --- loads --- */

/* The load of a caller without a deadline continues while others time out, and serves all later callers. A caller that
 * times out changes no pin: not its own, and not that of the caller that waits. */
MP_TEST(registry_deadlines_beside_a_load) {
    for (int pins = 0; pins < 2; pins++) {
        fake fake;
        mp_error error;
        mp_entry_info info;
        mp_registry *registry = fake_begin(&fake, 1, NULL);
        atomic_store(&fake.load_stalls, true);
        caller first = {.registry = registry, .pins = pins};
        start_caller(&first);
        fake_until(&fake.loads, 1);
        for (int pin = 0; pin < 2; pin++)
            expect_late_loads(registry, pin, load_goes_on);
        MP_CHECK_INT(first.status, RUNNING);
        MP_CHECK_INT(fake.models, 0);
        atomic_store(&fake.load_stalls, false);
        MP_CHECK_STATUS(end_caller(&first), MP_OK, &first.error);
        fake_info(registry, "a", &info);
        MP_CHECK_INT(info.pinned, pins);
        MP_CHECK_OK(mp_registry_load(registry, "a", false, deadline(false), &error), &error); /* nothing to wait for */
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
        MP_CHECK_INT(fake.loads, 1);
        fake_end(registry);
    }
}

/* The caller that started a load times out. The load continues and serves later callers and a request. */
MP_TEST(registry_deadlines_of_the_caller_that_starts_a_load) {
    enum { CALLERS = 3 };
    for (int soon = 0; soon < 2; soon++) {
        fake fake;
        mp_error error;
        caller callers[CALLERS];
        mp_registry *registry = fake_begin(&fake, 1, NULL);
        atomic_store(&fake.load_stalls, true);
        MP_CHECK_STATUS(mp_registry_load(registry, "a", true, deadline(soon), &error), MP_TIMEOUT, &error);
        MP_CHECK_HAS(error.message, "a: the load did not end before the deadline (stage: ");
        MP_CHECK_HAS(error.message, "); it continues in the background");
        fake_until(&fake.loads, 1);
        for (int i = 0; i < CALLERS; i++) {
            callers[i] = (caller){.registry = registry};
            start_caller(&callers[i]);
        }
        mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
        expect_late_loads(registry, false, load_goes_on);
        for (int i = 0; i < CALLERS; i++)
            MP_CHECK_INT(callers[i].status, RUNNING);
        MP_CHECK(!mp_ticket_done(ticket));
        atomic_store(&fake.load_stalls, false);
        for (int i = 0; i < CALLERS; i++)
            MP_CHECK_STATUS(end_caller(&callers[i]), MP_OK, &callers[i].error);
        MP_CHECK_INT(fake_finish(ticket), MP_OK);
        mp_entry_info info;
        fake_info(registry, "a", &info);
        MP_CHECK(!info.pinned); /* the caller that asked for it got TIMEOUT */
        MP_CHECK_INT(fake.loads, 1);
        fake_end(registry);
    }
}

/* A load that fails after a caller has timed out reports its cause to the callers that wait. A later call loads the
 * model again. */
MP_TEST(registry_deadlines_beside_a_load_that_fails) {
    fake fake;
    mp_error error;
    mp_registry *registry = fake_begin(&fake, 1, NULL);
    atomic_store(&fake.load_stalls, true);
    atomic_store(&fake.load_failures, 1);
    caller first = {.registry = registry};
    start_caller(&first);
    fake_until(&fake.loads, 1);
    expect_late_loads(registry, true, load_goes_on);
    MP_CHECK_INT(first.status, RUNNING);
    atomic_store(&fake.load_stalls, false);
    MP_CHECK_STATUS(end_caller(&first), MP_IO, &first.error);
    MP_CHECK_STR(first.error.message, "the file is gone");
    MP_CHECK_INT(fake.loads, 1);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(10000), &error), &error);
    MP_CHECK_INT(fake.loads, 2);
    fake_end(registry);
}

/* --- evictions --- */

/* An eviction waits for an active request. Callers that evict or load meanwhile time out, and the eviction continues.
 * No caller waits for a load any more, so none follows it. The next caller loads the model again. */
MP_TEST(registry_deadlines_beside_an_eviction) {
    fake fake;
    mp_error error;
    mp_entry_info info;
    mp_ticket *ticket;
    mp_registry_stats stats;
    mp_registry *registry = fake_begin(&fake, 1, &ticket);
    caller first = {.registry = registry, .evicts = true};
    start_caller(&first);
    fake_until_state(registry, "a", "evicting");
    expect_late_evictions(registry, "a: the unload did not end before the deadline (active requests: 1); it continues "
                                    "in the background");
    for (int pin = 0; pin < 2; pin++)
        expect_late_loads(registry, pin, not_begun);
    MP_CHECK_INT(first.status, RUNNING);
    MP_CHECK_INT(fake.models, 1);
    MP_CHECK(!mp_ticket_done(ticket));
    atomic_store(&fake.hold, false);
    MP_CHECK_STATUS(end_caller(&first), MP_OK, &first.error);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    fake_until_state(registry, "a", "cold");
    MP_CHECK_INT(fake.models, 0);
    MP_CHECK_INT(fake.loads, 1);
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.evictions, 1);
    MP_CHECK_OK(mp_registry_evict(registry, "a", deadline(false), &error), &error); /* nothing to wait for */
    MP_CHECK_OK(mp_registry_load(registry, "a", true, fake_in_ms(10000), &error), &error);
    fake_info(registry, "a", &info);
    MP_CHECK(info.pinned);
    MP_CHECK_INT(fake.loads, 2);
    fake_end(registry);
}

/* A caller that waits for the end of an eviction gets its load, although others time out. */
MP_TEST(registry_deadlines_of_a_load_after_an_eviction) {
    fake fake;
    mp_ticket *ticket;
    mp_error error;
    mp_registry *registry = fake_begin(&fake, 1, &ticket);
    MP_CHECK_STATUS(mp_registry_evict(registry, "a", deadline(false), &error), MP_TIMEOUT, &error);
    caller second = {.registry = registry, .pins = true};
    start_caller(&second);
    for (mp_entry_info info = {0}; !info.pinned; fake_info(registry, "a", &info)) /* it waits: it has set the pin */
        mp_sys_sleep_ns(FAKE_MS(1) / 4);
    expect_late_loads(registry, false, not_begun);
    MP_CHECK_INT(second.status, RUNNING);
    atomic_store(&fake.hold, false);
    MP_CHECK_STATUS(end_caller(&second), MP_OK, &second.error);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    MP_CHECK_INT(fake.loads, 2);
    fake_end(registry);
}

/* A model is evicted while another caller's load of it runs: the load ends, then the model is freed. */
MP_TEST(registry_deadlines_of_an_eviction_beside_a_load) {
    fake fake;
    mp_registry *registry = fake_begin(&fake, 1, NULL);
    atomic_store(&fake.load_stalls, true);
    caller first = {.registry = registry, .pins = true};
    start_caller(&first);
    fake_until(&fake.loads, 1);
    expect_late_evictions(registry, "a: the unload did not end before the deadline (active requests: 0); it continues "
                                    "in the background");
    MP_CHECK_INT(first.status, RUNNING);
    atomic_store(&fake.load_stalls, false);
    MP_CHECK_STATUS(end_caller(&first), MP_OK, &first.error);
    fake_until_state(registry, "a", "cold");
    MP_CHECK_INT(fake.models, 0);
    MP_CHECK_INT(fake.loads, 1);
    fake_end(registry);
}
