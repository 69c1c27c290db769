/* test_registry_notice.c: several event loops wait for one ticket. */
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/resource.h>

#include "base/alloc.h"
#include "base/sys.h"
#include "mp_test.h"
#include "test_registry_fake.h"

enum { LOOPS = 3, UNITS = 40 };

static bool next_of(mp_notifier *notifier, uint64_t id) {
    uint64_t ids[4], end = fake_in_ms(5000);
    while (mp_sys_now_ns() < end) {
        int count = mp_notifier_take(notifier, ids, 4);
        if (count)
            return count == 1 && ids[0] == id;
        mp_sys_sleep_ns(FAKE_MS(1) / 4);
    }
    return false;
}

MP_TEST(registry_notifiers_are_all_notified) {
    fake fake;
    fake_init(&fake);
    mp_registry *registry = fake_registry(1, 0);
    mp_notifier *notifiers[LOOPS];
    mp_error error;
    uint64_t ids[4];
    fake_add(registry, "a", &fake, false);
    for (int i = 0; i < LOOPS; i++)
        MP_CHECK_OK(mp_notifier_create(&notifiers[i], &error), &error);
    atomic_store(&fake.hold, true);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    for (int i = 0; i < LOOPS; i++)
        MP_CHECK(mp_ticket_bind(ticket, notifiers[i], 10 + (uint64_t)i));
    /* a notifier that is bound twice is notified once, with the last id */
    MP_CHECK(mp_ticket_bind(ticket, notifiers[0], 10));
    MP_CHECK(mp_ticket_bind(ticket, notifiers[1], 21));
    atomic_store(&fake.hold, false);
    MP_CHECK_INT(fake_wait(ticket, NULL), MP_OK);
    MP_CHECK(next_of(notifiers[0], 10));
    MP_CHECK(next_of(notifiers[1], 21));
    MP_CHECK(next_of(notifiers[2], 12));
    for (int i = 0; i < LOOPS; i++)
        MP_CHECK_INT(mp_notifier_take(notifiers[i], ids, 4), 0);
    /* the ticket is released while two notifiers list it and the third is destroyed */
    MP_CHECK(mp_ticket_bind(ticket, notifiers[0], 30));
    MP_CHECK(mp_ticket_bind(ticket, notifiers[1], 31));
    MP_CHECK(mp_ticket_bind(ticket, notifiers[2], 32));
    mp_notifier_destroy(notifiers[2]);
    mp_ticket_release(ticket);
    fake_until_no_calls(); /* the worker has released the ticket too */
    for (int i = 0; i < 2; i++) {
        MP_CHECK_INT(mp_notifier_take(notifiers[i], ids, 4), 0);
        mp_notifier_destroy(notifiers[i]);
    }
    fake_end(registry);
}

/* The descriptor stays readable until the last id was taken, so an event loop may take as many as it has room for. */
MP_TEST(registry_notifiers_stay_readable_until_they_are_empty) {
    enum { COUNT = 3 };
    fake fake;
    mp_ticket *tickets[COUNT];
    mp_notifier *notifier;
    mp_error error;
    fake_init(&fake);
    mp_registry *registry = fake_registry(1, 0);
    fake_add(registry, "a", &fake, false);
    MP_CHECK_OK(mp_notifier_create(&notifier, &error), &error);
    for (int i = 0; i < COUNT; i++) {
        tickets[i] = fake_submit(registry, "a", fake_call_create(1), NULL);
        MP_CHECK_INT(fake_wait(tickets[i], NULL), MP_OK);
        MP_CHECK(mp_ticket_bind(tickets[i], notifier, 10 + (uint64_t)i));
    }
    for (int i = 0; i <= COUNT; i++) {
        uint64_t id = 0;
        struct pollfd poller = {.fd = mp_notifier_fd(notifier), .events = POLLIN};
        MP_CHECK_INT(poll(&poller, 1, 0), i < COUNT);
        MP_CHECK_INT(mp_notifier_take(notifier, &id, 1), i < COUNT);
        MP_CHECK(i == COUNT || id == 10 + (uint64_t)i);
    }
    mp_notifier_destroy(notifier);
    for (int i = 0; i < COUNT; i++)
        mp_ticket_release(tickets[i]);
    fake_end(registry);
}

typedef struct loop {
    mp_ticket *ticket;
    uint64_t id;
    bool heard;
} loop;

static void run_loop(void *arg) {
    loop *self = arg;
    mp_notifier *notifier;
    mp_error error;
    if (mp_notifier_create(&notifier, &error) != MP_OK)
        return;
    self->heard = mp_ticket_bind(self->ticket, notifier, self->id);
    while (self->heard && !mp_ticket_done(self->ticket))
        self->heard = next_of(notifier, self->id);
    mp_notifier_destroy(notifier);
    mp_ticket_release(self->ticket);
}

/* For TSan: loops bind a ticket, are notified of its end and release it while the worker publishes. */
MP_TEST(registry_notifiers_of_several_threads) {
    fake fake;
    fake_init(&fake);
    fake.step_units = 1;
    mp_registry *registry = fake_registry(1, 0);
    fake_add(registry, "a", &fake, false);
    for (int round = 0; round < 20; round++) {
        mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(UNITS), NULL);
        loop loops[LOOPS];
        mp_thread threads[LOOPS];
        mp_error error;
        for (int i = 0; i < LOOPS; i++) {
            loops[i] = (loop){mp_ticket_pin(ticket), 100 + (uint64_t)i, false};
            MP_CHECK_OK(mp_thread_start(&threads[i], "loop", run_loop, &loops[i], &error), &error);
        }
        for (int i = 0; i < LOOPS; i++) {
            mp_thread_join(&threads[i]);
            MP_CHECK(loops[i].heard);
        }
        MP_CHECK_INT(fake_finish(ticket), MP_OK);
    }
    fake_end(registry);
}

static mp_status bind_to_two(void *arg, mp_error *error) {
    (void)arg;
    static fake fake;
    fake_init(&fake);
    mp_notifier *notifiers[2] = {NULL, NULL};
    mp_registry_config config = {.threads = 1, .memory_limit = 1000 * 1000, .spin_ns = 1, .max_workers = 1};
    mp_registry *registry;
    MP_TRY(mp_registry_create(&config, &registry, error));
    mp_loader loader = fake_loader(&fake);
    mp_status status = mp_registry_add(registry, "a", &loader, MP_ADD_NEW, error);
    for (int i = 0; i < 2 && status == MP_OK; i++)
        status = mp_notifier_create(&notifiers[i], error);
    fake_call *call = status == MP_OK ? fake_call_create(2) : NULL;
    if (status == MP_OK && !call)
        status = mp_fail_memory(error, sizeof(*call), "a fake call");
    mp_submit_options options = {.deadline_ns = fake_in_ms(60000)};
    mp_ticket *ticket = NULL;
    if (status == MP_OK)
        status = mp_registry_submit(registry, "a", &call->base, &options, &ticket, error);
    if (status == MP_OK) {
        MP_CHECK(mp_ticket_bind(ticket, notifiers[0], 1));
        bool bound = mp_ticket_bind(ticket, notifiers[1], 2);
        status = fake_wait(ticket, error);
        /* the first notifier is notified even if binding the second failed */
        MP_CHECK(next_of(notifiers[0], 1));
        if (bound)
            MP_CHECK(next_of(notifiers[1], 2));
        else if (status == MP_OK)
            status = mp_fail_memory(error, sizeof(mp_notifier *), "a binding");
    }
    mp_ticket_release(ticket);
    mp_notifier_destroy(notifiers[0]);
    mp_notifier_destroy(notifiers[1]);
    fake_destroy(registry);
    return status;
}

MP_TEST_SECONDS(registry_notifiers_survive_refused_memory, 60) { mp_test_alloc_sweep(bind_to_two, NULL); }

/* Without a free descriptor no notifier is created, and nothing is kept. */
MP_TEST(registry_notifiers_need_a_descriptor) {
    struct rlimit before, none;
    mp_notifier *notifier;
    mp_error error;
    MP_CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    none = before;
    none.rlim_cur = 0;
    uint64_t bytes = mp_alloc_bytes(MP_TAG_POOL);
    MP_CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    mp_status status = mp_notifier_create(&notifier, &error);
    MP_CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    MP_CHECK(status != MP_OK && error.code == status && !notifier);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_POOL), bytes);
}

/* The end of a notifier closes its descriptor, also while a ticket is bound to it. */
MP_TEST(registry_notifiers_close_their_descriptor) {
    for (int bound = 0; bound < 2; bound++) {
        fake fake;
        mp_ticket *ticket;
        mp_notifier *notifier;
        mp_error error;
        mp_registry *registry = fake_begin(&fake, 1, &ticket);
        MP_CHECK_OK(mp_notifier_create(&notifier, &error), &error);
        MP_CHECK(!bound || mp_ticket_bind(ticket, notifier, 5));
        int fd = mp_notifier_fd(notifier);
        MP_CHECK(fcntl(fd, F_GETFD) >= 0);
        mp_notifier_destroy(notifier);
        MP_CHECK(fcntl(fd, F_GETFD) < 0);
        atomic_store(&fake.hold, false);
        MP_CHECK_INT(fake_finish(ticket), MP_OK);
        fake_end(registry);
    }
}
