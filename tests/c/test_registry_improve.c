/* Optional work of engines between requests: registry/improve.c. */
#include <stdatomic.h>

#include "base/sys.h"
#include "mp_test.h"
#include "registry/state.h"
#include "test_registry_fake.h"

static void serve_one(mp_registry *registry, const char *key) {
    MP_CHECK_INT(fake_finish(fake_submit(registry, key, fake_call_create(1), NULL)), MP_OK);
}

/* An idle worker improves its engine until nothing is left, and asks again after the next request. */
MP_TEST(improve_of_idle_workers) {
    fake fake;
    mp_registry *registry = fake_begin(&fake, 1, NULL);
    atomic_store(&fake.slices, 3);
    serve_one(registry, "a");
    fake_until(&fake.improved, 3);
    atomic_store(&fake.slices, 2); /* work that appears without a request is not noticed */
    mp_sys_sleep_ns(FAKE_MS(30));
    MP_CHECK_INT(atomic_load(&fake.improved), 3);
    serve_one(registry, "a");
    fake_until(&fake.improved, 5);
    fake_end(registry);
}

/* A request that arrives during a slice is served after it, before the next one. */
MP_TEST(improve_makes_way_for_requests) {
    fake fake;
    mp_registry *registry = fake_begin(&fake, 1, NULL);
    atomic_store(&fake.slices, 1000000);
    atomic_store(&fake.improve_hold, true);
    serve_one(registry, "a");
    fake_until(&fake.in_improve, 1);
    const int steps = atomic_load(&fake.steps), improved = atomic_load(&fake.improved);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    mp_sys_sleep_ns(FAKE_MS(10));
    MP_CHECK_INT(atomic_load(&fake.steps), steps);
    atomic_store(&fake.hold, true); /* the step does not end: the worker takes no further slice */
    atomic_store(&fake.improve_hold, false);
    fake_until(&fake.in_steps, 1);
    MP_CHECK_INT(atomic_load(&fake.improved), improved + 1);
    atomic_store(&fake.hold, false);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    fake_until(&fake.improved, improved + 5);
    fake_end(registry); /* also ends the slices */
}

/* A worker whose slice makes no progress is abandoned, as in a step, and another one serves. */
MP_TEST(improve_that_hangs) {
    fake fake;
    fake_init(&fake);
    mp_registry *registry = fake_registry_of((mp_registry_config){
        .threads = 2, .max_workers = 1, .stall_timeout_ns = FAKE_MS(200)});
    fake_add(registry, "a", &fake, false);
    atomic_store(&fake.slices, 1);
    atomic_store(&fake.improve_hold, true);
    serve_one(registry, "a");
    fake_until(&fake.in_improve, 1);
    atomic_store(&fake.slices, 0); /* else the next worker might begin the slice that the abandoned one ends */
    serve_one(registry, "a");
    MP_CHECK_INT(fake_stats(registry).workers_dead, 1);
    atomic_store(&fake.improve_hold, false);
    while (atomic_load(&fake.engines) > 1) /* the abandoned worker frees its engine */
        mp_sys_sleep_ns(FAKE_MS(1));
    fake_end(registry);
}
