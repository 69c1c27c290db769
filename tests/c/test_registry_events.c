/* Every field of every event of workers and requests, in order, for each way in which a worker or a request ends. */
#include <string.h>

#include "mp_test.h"
#include "registry/events.h"
#include "registry/request.h"
#include "test_registry_fake.h"

typedef struct told {
    mp_event_kind kind;
    bool worker, request; /* the event names the worker that was spawned last; the request */
    mp_status status;
} told;

static uint32_t last_worker;
static uint64_t last_ns;

static bool take_soon(mp_event *event) {
    for (uint64_t end = fake_in_ms(20000); mp_sys_now_ns() < end; mp_sys_sleep_ns(FAKE_MS(1) / 4))
        if (mp_events_take(event))
            return true;
    return false;
}

static void expect(mp_registry *registry, const char *key, const told *rows, int count, uint64_t request) {
    mp_event event;
    for (int i = 0; i < count; i++) {
        MP_CHECK(take_soon(&event));
        if (event.kind != rows[i].kind)
            MP_FAIL("event %d is %s, not %s", i, mp_event_name(event.kind), mp_event_name(rows[i].kind));
        if (event.kind == MP_EVENT_SPAWN) { /* no id is used again */
            MP_CHECK(event.worker > last_worker);
            last_worker = event.worker;
        }
        MP_CHECK_INT(event.worker, rows[i].worker ? last_worker : 0);
        MP_CHECK_INT(event.request, rows[i].request ? request : 0);
        MP_CHECK_INT(event.status, rows[i].status);
        MP_CHECK_INT(event.registry, mp_registry_number(registry));
        MP_CHECK_STR(event.key, key);
        MP_CHECK_INT(event.cause[0] != 0, event.kind == MP_EVENT_FAIL);
        MP_CHECK(event.time_ns >= last_ns && event.time_ns <= mp_sys_now_ns());
        last_ns = event.time_ns;
    }
    MP_CHECK(!mp_events_take(&event));
}
#define EXPECT(key, rows, request) expect(registry, key, rows, (int)(sizeof(rows) / sizeof(rows[0])), request)

static const told begins[] = {{MP_EVENT_SPAWN, true, false, MP_OK}, {MP_EVENT_READY, true, false, MP_OK}};

/* The registry's number differs from every small number that a field of an event has. */
static mp_registry *open_one(fake *fake, uint64_t limit_ns) {
    for (int i = 0; i < 20; i++)
        mp_registry_destroy(fake_registry(1, 0));
    mp_registry *registry = fake_registry_of((mp_registry_config){
        .threads = 1, .max_workers = 1, .load_timeout_ns = limit_ns, .stall_timeout_ns = limit_ns});
    fake_init(fake);
    fake_add(registry, "a", fake, false);
    last_ns = mp_sys_now_ns();
    mp_events_want((1 << MP_EVENT_COUNT) - 1);
    return registry;
}

MP_TEST(registry_events_of_workers_and_requests) {
    static const told served[] = {{MP_EVENT_REQUEST_START, true, true, MP_OK},
                                  {MP_EVENT_REQUEST_COMPLETE, false, true, MP_OK}};
    static const told failed[] = {{MP_EVENT_REQUEST_START, true, true, MP_OK},
                                  {MP_EVENT_REQUEST_FAIL, false, true, MP_NUMERIC}};
    static const told retried[] = {{MP_EVENT_REQUEST_START, true, true, MP_OK},
                                   {MP_EVENT_FAIL, true, false, MP_INTERNAL},
                                   {MP_EVENT_SPAWN, true, false, MP_OK},
                                   {MP_EVENT_READY, true, false, MP_OK},
                                   {MP_EVENT_REQUEST_COMPLETE, false, true, MP_OK}};
    static const told refused[] = {{MP_EVENT_REQUEST_FAIL, false, true, MP_INVALID_ARGUMENT}};
    static const told unknown[] = {{MP_EVENT_REQUEST_FAIL, false, false, MP_UNKNOWN_MODEL}};
    static const told evicted[] = {{MP_EVENT_EVICT, true, false, MP_OK}};
    static const told not_loaded[] = {{MP_EVENT_SPAWN, true, false, MP_OK}, {MP_EVENT_FAIL, true, false, MP_IO}};
    fake fake;
    mp_error error;
    mp_status status;
    mp_registry *registry = open_one(&fake, 0);
    uint64_t number = 0;
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    EXPECT("a", begins, 0);
    for (int i = 0; i < 2; i++) { /* a request, then one whose step fails */
        fake_call *call = fake_call_create(1);
        call->numeric = i;
        mp_ticket *ticket = fake_submit(registry, "a", call, NULL);
        MP_CHECK(ticket->number > number);
        number = ticket->number;
        MP_CHECK_INT(fake_finish(ticket), i ? MP_NUMERIC : MP_OK);
        expect(registry, "a", i ? failed : served, 2, number);
    }
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_faulty(MP_INTERNAL, 1), NULL);
    number = ticket->number;
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    EXPECT("a", retried, number);
    fake_call *call = fake_call_create(1);
    call->bad_argument = true;
    MP_CHECK(!fake_submit(registry, "a", call, &status) && status == MP_INVALID_ARGUMENT);
    EXPECT("a", refused, number + 1); /* it had a ticket for a moment */
    MP_CHECK(!fake_submit(registry, "b", fake_call_create(1), &status) && status == MP_UNKNOWN_MODEL);
    EXPECT("b", unknown, 0);
    MP_CHECK_OK(mp_registry_evict(registry, "a", 0, &error), &error);
    EXPECT("a", evicted, 0);
    fake.load_failures = 1;
    MP_CHECK_INT(mp_registry_load(registry, "a", false, 0, &error), MP_IO);
    EXPECT("a", not_loaded, 0);
    fake_end(registry);
}
