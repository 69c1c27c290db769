/* The limits of a request hold wherever it waits. */
#include <stdlib.h>

#include "base/sys.h"
#include "mp_test.h"
#include "registry/governor.h"
#include "test_registry_fake.h"

enum { WAITING = 12, STEP_MS = 20, PATIENCE_MS = 100 };

/* The patience (patience_ns) of a request also grows while it waits for room in a full queue. */
typedef struct release {
    fake *fake;
    uint64_t when_ns;
} release;

MP_TEST(registry_patience_ends_while_a_request_waits_for_memory) {
    enum { WORK_MS = 3000, UNIT_MS = 2, TOO_MUCH = 10, ROOM = 5 };
    mp_registry_config config = {.threads = 2, .max_workers = 2};
    config.policy[MP_TEXT_EMBEDDING] = MP_POLICY_SEQUENTIAL;
    mp_registry *registry = fake_registry_of(config);
    mp_submit_options options = {.priority = 2};
    mp_ticket *busy, *waiting;
    mp_error error;
    fake fake;
    fake_init(&fake);
    fake.workers = 2;
    atomic_store(&fake.step_units, 1);
    atomic_store(&fake.step_ns, FAKE_MS(UNIT_MS));
    atomic_store(&fake.memory, ROOM);
    fake_add(registry, "a", &fake, false);
    fake_call *work = fake_call_create(WORK_MS / UNIT_MS), *never = fake_call_create(1);
    never->memory_a_step = TOO_MUCH; /* never fits; but `work` is active, so the shortage may be temporary */
    MP_CHECK_OK(mp_registry_submit(registry, "a", &work->base, &options, &busy, &error), &error);
    fake_until(&fake.steps, 1);
    options.patience_ns = FAKE_MS(PATIENCE_MS);
    MP_CHECK_OK(mp_registry_submit(registry, "a", &never->base, &options, &waiting, &error), &error);
    MP_CHECK_STATUS(fake_wait(waiting, &error), MP_TIMEOUT, &error);
    MP_CHECK(!mp_ticket_done(busy)); /* the end of the other request did not end the wait */
    MP_CHECK(fake.preempted > 1); /* preempted again and again for lack of memory */
    mp_ticket_release(waiting);
    mp_ticket_cancel(busy);
    fake_finish(busy);
    fake_end(registry);
}

/* --- a request ends at its deadline, at the end of its patience and when it is cancelled, wherever it waits --- */

typedef enum limit { DEADLINE, PATIENCE, CANCELLED, LIMITS } limit;
enum { LIMIT_MS = 30, HELD = 60000000, ALL = 100000000 };

static bool give_up_now(void *arg) { return *(const limit *)arg == CANCELLED; }

static mp_submit_options options_of(limit *limit) {
    mp_submit_options options = {.priority = 2, .give_up = give_up_now, .give_up_arg = limit};
    if (*limit == DEADLINE)
        options.deadline_ns = fake_in_ms(LIMIT_MS);
    if (*limit == PATIENCE)
        options.patience_ns = FAKE_MS(LIMIT_MS);
    return options;
}

static void check_limit(limit limit, mp_status status, const mp_error *error) {
    MP_CHECK_STATUS(status, limit == CANCELLED ? MP_CANCELLED : MP_TIMEOUT, error);
    MP_CHECK(limit == CANCELLED || error->code == MP_TIMEOUT);
}

static uint32_t masks; /* 1: the second unit of a request waits for a mask that never comes; 0: none is needed */

/* Submits a request for "a", which waits until its limit; the test lets nothing else end the wait. */
static void end_waiting(mp_registry *registry, limit limit) {
    static const char *const words[LIMITS] = {"no result within the timeout, which ended 0.0",
                                              "no progress for 0.030 s", "was cancelled"};
    mp_submit_options options = options_of(&limit);
    mp_ticket *ticket;
    mp_error error;
    fake_call *call = fake_call_create(2);
    call->masks = masks;
    MP_CHECK_OK(mp_registry_submit(registry, "a", &call->base, &options, &ticket, &error), &error);
    if (limit == CANCELLED) {
        mp_sys_sleep_ns(FAKE_MS(5));
        MP_CHECK(!mp_ticket_done(ticket));
        mp_ticket_cancel(ticket);
    }
    mp_status status = fake_wait(ticket, &error);
    check_limit(limit, status, &error);
    MP_CHECK_HAS(error.message, words[limit]);
    if (limit == DEADLINE) { /* the deadline was set before the request was submitted, so less time may be left */
        const int left = atoi(strstr(error.message, words[limit]) + strlen(words[limit]));
        MP_CHECK(left > 0 && left <= LIMIT_MS);
    }
    MP_CHECK_INT(call->finished, 0);
    mp_ticket_release(ticket);
}

/* A registry with 100 MB and one compute thread, and two models: "b", which holds 60 MB and, while it is in a step, the
 * compute thread; and "a". */
static mp_registry *open_two(fake *a, fake *b, uint64_t bytes) {
    mp_registry *registry = fake_registry(1, ALL);
    mp_error error;
    fake_init(a);
    fake_init(b);
    a->model_bytes = bytes;
    b->model_bytes = HELD;
    fake_add(registry, "a", a, false);
    fake_add(registry, "b", b, false);
    MP_CHECK_OK(mp_registry_load(registry, "b", false, 0, &error), &error);
    return registry;
}

static mp_ticket *occupy(mp_registry *registry, fake *b) {
    atomic_store(&b->hold, true);
    mp_ticket *busy = fake_submit(registry, "b", fake_call_create(1), NULL);
    fake_until(&b->in_steps, 1);
    return busy;
}

static void close_two(mp_registry *registry, fake *b, mp_ticket *busy) {
    atomic_store(&b->hold, false);
    MP_CHECK_INT(fake_finish(busy), MP_OK);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_end(registry);
}

MP_TEST(registry_limits_end_a_wait_for_memory_of_a_request) {
    fake a, b;
    mp_registry *registry = open_two(&a, &b, 0);
    mp_ticket *busy = occupy(registry, &b), *ticket;
    mp_error error;
    for (limit limit = 0; limit < LIMITS; limit++) {
        mp_submit_options options = options_of(&limit);
        fake_call *call = fake_call_create(1);
        call->base.bytes = ALL - HELD + 1000000;
        mp_status status = mp_registry_submit(registry, "a", &call->base, &options, &ticket, &error);
        MP_CHECK(!ticket);
        check_limit(limit, status, &error);
        MP_CHECK_HAS(error.message, limit == CANCELLED ? "while it waited for memory" : "no memory was free");
    }
    close_two(registry, &b, busy);
}

MP_TEST(registry_limits_end_a_wait_for_memory_of_a_load) {
    for (limit limit = 0; limit < LIMITS; limit++) {
        fake a, b;
        mp_registry *registry = open_two(&a, &b, ALL - HELD + 1000000);
        mp_ticket *busy = occupy(registry, &b);
        end_waiting(registry, limit);
        MP_CHECK_INT(a.models, 0);
        close_two(registry, &b, busy);
    }
}

MP_TEST(registry_limits_end_a_wait_for_compute_threads) {
    for (int loaded = 0; loaded < 2; loaded++) {
        fake a, b;
        mp_registry *registry = open_two(&a, &b, 0);
        mp_error error;
        if (loaded) /* the step waits for the thread, not the load */
            MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
        mp_ticket *busy = occupy(registry, &b);
        for (limit limit = 0; limit < LIMITS; limit++)
            end_waiting(registry, limit);
        MP_CHECK_INT(a.steps, 0);
        MP_CHECK_INT(a.models, loaded);
        close_two(registry, &b, busy);
    }
}

typedef struct late {
    mp_guard guard;
    int asked;
} late;

/* Has nothing to free. The 20th call means that the wait did not end in time: it releases the guard, so that the test
 * fails instead of hanging. */
static uint64_t reclaim_nothing(void *arg, const mp_shortage *shortage, bool whole) {
    late *self = arg;
    (void)shortage;
    (void)whole;
    if (++self->asked == 20)
        mp_guard_release(&self->guard);
    return 0;
}

static uint64_t nothing(void *arg, const void *asker) {
    (void)asker;
    (void)arg;
    return 0;
}

static bool gives_up(void *arg) {
    ++*(int *)arg;
    return true;
}

/* A load that waits for another load's reservation calls give_up. If the load gives up, the next caller gets its
 * turn. */
MP_TEST(registry_limits_end_a_wait_for_a_reservation) {
    mp_governor *governor;
    mp_error error;
    mp_guard guard;
    int calls = 0;
    MP_CHECK_OK(mp_governor_open(1000, &governor, &error), &error);
    late other = {0};
    mp_reclaimer reclaimer = {.reclaim = reclaim_nothing, .possible = nothing, .later = nothing, .arg = &other};
    mp_governor_add_reclaimer(governor, &reclaimer);
    MP_CHECK(mp_governor_try_reserve(governor, 600, &other.guard));
    MP_CHECK_STATUS(mp_governor_reserve(governor, "a", 500, 500, false, gives_up, &calls, &guard, &error),
                    MP_CANCELLED, &error);
    MP_CHECK_STR(error.message, "a: the load was cancelled while it waited for memory");
    MP_CHECK(calls == 1 && other.asked == 1 && !guard.governor);
    MP_CHECK(mp_governor_try_reserve(governor, 400, &guard));
    mp_guard_release(&guard);
    mp_guard_release(&other.guard);
    mp_governor_remove_reclaimer(governor, &reclaimer);
    mp_governor_close(governor);
}
