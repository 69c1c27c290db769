/* mp_registry_config.scale_timeout: the patience of requests grows with the queue. */
#include "base/sys.h"
#include "mp_test.h"
#include "test_registry_fake.h"

enum { WAITING = 12, STEP_MS = 20, PATIENCE_MS = 100 };

static mp_ticket *submit_with(mp_registry *registry, mp_submit_options options) {
    mp_ticket *ticket;
    mp_error error;
    options.priority = 2;
    MP_CHECK_OK(mp_registry_submit(registry, "a", &fake_call_create(1)->base, &options, &ticket, &error), &error);
    return ticket;
}

static mp_registry *open_with(fake *fake, bool scale, int capacity) {
    mp_registry_config config = {
        .threads = 1, .max_workers = 1, .patience_ns = FAKE_MS(PATIENCE_MS), .scale_timeout = scale};
    config.queue_capacity[MP_TEXT_EMBEDDING][MP_SERVICE_INTERACTIVE] = capacity;
    config.policy[MP_TEXT_EMBEDDING] = MP_POLICY_SEQUENTIAL;
    mp_registry *registry = fake_registry_of(config);
    fake_init(fake);
    atomic_store(&fake->step_ns, FAKE_MS(STEP_MS));
    fake_add(registry, "a", fake, false);
    for (int i = 0; i < 2; i++) /* afterwards the entry can predict the time of a request */
        MP_CHECK_INT(fake_finish(submit_with(registry, (mp_submit_options){0})), MP_OK);
    return registry;
}

/* Submits `ahead` requests, then one with `options`, which waits for longer than its patience. Returns the status of
 * the last request. */
static mp_status end_of_last(mp_registry *registry, int ahead, mp_submit_options options, mp_error *error) {
    mp_ticket *tickets[128];
    for (int i = 0; i < ahead; i++)
        tickets[i] = submit_with(registry, (mp_submit_options){.patience_ns = MP_FOREVER});
    mp_ticket *last = submit_with(registry, options);
    mp_status status = fake_wait(last, error);
    mp_ticket_release(last);
    for (int i = 0; i < ahead; i++) {
        if (status != MP_OK)
            mp_ticket_cancel(tickets[i]);
        fake_finish(tickets[i]);
    }
    return status;
}

MP_TEST(registry_patience_grows_with_the_predicted_wait) {
    for (int scale = 0; scale < 2; scale++) {
        fake fake;
        mp_error error;
        mp_registry *registry = open_with(&fake, scale, 100);
        MP_CHECK_STATUS(end_of_last(registry, WAITING, (mp_submit_options){0}, &error), scale ? MP_OK : MP_TIMEOUT,
                        &error);
        /* a patience that is given in the options does not grow */
        mp_submit_options patience = {.patience_ns = FAKE_MS(PATIENCE_MS)};
        MP_CHECK_STATUS(end_of_last(registry, WAITING, patience, &error), MP_TIMEOUT, &error);
        MP_CHECK_HAS(error.message, "no progress for 0.100 s");
        mp_submit_options deadline = {.deadline_ns = fake_in_ms(PATIENCE_MS)};
        MP_CHECK_STATUS(end_of_last(registry, WAITING, deadline, &error), MP_TIMEOUT, &error);
        fake_end(registry);
    }
}

MP_TEST(registry_patience_grows_within_bounds) {
    fake fake;
    mp_error error;
    mp_registry *registry = open_with(&fake, true, 100);
    uint64_t began = mp_sys_now_ns();
    /* two seconds of work are queued */
    MP_CHECK_STATUS(end_of_last(registry, 99, (mp_submit_options){0}, &error), MP_TIMEOUT, &error);
    MP_CHECK_HAS(error.message, "no progress for 1.000 s");
    MP_CHECK(mp_sys_now_ns() - began >= FAKE_MS(PATIENCE_MS) * MP_PATIENCE_SCALE);
    /* with an empty queue, the patience does not grow */
    atomic_store(&fake.hold, true);
    mp_ticket *ticket = submit_with(registry, (mp_submit_options){0});
    MP_CHECK_STATUS(fake_wait(ticket, &error), MP_TIMEOUT, &error);
    MP_CHECK_HAS(error.message, "no progress for 0.100 s");
    mp_ticket_release(ticket);
    atomic_store(&fake.hold, false);
    fake_end(registry);
}

/* The patience (patience_ns) of a request also grows while it waits for room in a full queue. */
typedef struct release {
    fake *fake;
    uint64_t when_ns;
} release;

static bool release_later(void *arg) {
    release *release = arg;
    if (mp_sys_now_ns() >= release->when_ns)
        atomic_store(&release->fake->hold, false);
    return false;
}

MP_TEST(registry_patience_grows_before_a_full_queue) {
    enum { FULL = 8 };
    for (int scale = 0; scale < 2; scale++) {
        fake fake;
        mp_error error;
        mp_registry *registry = open_with(&fake, scale, FULL);
        mp_ticket *tickets[FULL + 1], *last = NULL;
        atomic_store(&fake.hold, true);
        for (int i = 0; i <= FULL; i++) {
            tickets[i] = submit_with(registry, (mp_submit_options){.patience_ns = MP_FOREVER});
            fake_until(&fake.in_steps, 1);
        }
        release release = {&fake, fake_in_ms(2 * PATIENCE_MS)};
        mp_submit_options options = {.priority = 2, .give_up = release_later, .give_up_arg = &release};
        mp_status status = mp_registry_submit(registry, "a", &fake_call_create(1)->base, &options, &last, &error);
        MP_CHECK_STATUS(status, scale ? MP_OK : MP_TIMEOUT, &error);
        atomic_store(&fake.hold, false);
        for (int i = 0; i <= FULL; i++)
            MP_CHECK_INT(fake_finish(tickets[i]), MP_OK);
        if (last)
            MP_CHECK_INT(fake_finish(last), MP_OK);
        fake_end(registry);
    }
}

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
    uint64_t began = mp_sys_now_ns();
    MP_CHECK_OK(mp_registry_submit(registry, "a", &never->base, &options, &waiting, &error), &error);
    MP_CHECK_STATUS(fake_wait(waiting, &error), MP_TIMEOUT, &error);
    MP_CHECK(mp_sys_now_ns() - began < FAKE_MS(WORK_MS / 2));
    MP_CHECK(fake.preempted > 1); /* preempted again and again for lack of memory */
    mp_ticket_release(waiting);
    mp_ticket_cancel(busy);
    fake_finish(busy);
    fake_end(registry);
}
