/* test_registry_replaced.c: a replacement that is replaced itself before it is loaded; requests that move to the
 * replacement. */
#include "mp_test.h"
#include "base/sys.h"
#include "registry/entry.h"
#include "test_registry_fake.h"

/* The latest of several replacements wins: the ones before it leave and free their loaders while the registry lives. */
MP_TEST(registry_latest_replacement_wins) {
    fake old, superseded, last;
    fake_init(&old);
    fake_init(&superseded);
    fake_init(&last);
    old.version = 1;
    superseded.version = 2;
    last.version = 3;
    superseded.load_ns = FAKE_MS(300);
    mp_registry *registry = fake_registry(2, 0);
    fake_add(registry, "a", &old, false);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_add(registry, "a", &superseded, true); /* loads while the old model serves */
    fake_until(&superseded.loads, 1);
    fake_add(registry, "a", &last, true);
    int version = 0;
    for (int i = 0; i < 2000 && version != 3; i++) {
        fake_call *call = fake_call_create(1);
        mp_ticket *ticket = fake_submit(registry, "a", call, NULL);
        MP_CHECK_INT(fake_wait(ticket, NULL), MP_OK);
        version = call->version;
        mp_ticket_release(ticket);
        mp_sys_sleep_ns(FAKE_MS(1));
    }
    MP_CHECK_INT(version, 3);
    const uint64_t end = fake_in_ms(5000);
    while ((atomic_load(&superseded.loaders) || atomic_load(&old.loaders)) && mp_sys_now_ns() < end)
        mp_sys_sleep_ns(FAKE_MS(1));
    MP_CHECK_INT(superseded.loaders, 0);
    MP_CHECK_INT(superseded.models, 0);
    MP_CHECK_INT(old.loaders, 0);
    MP_CHECK_INT(last.loads, 1);
    fake_end(registry);
}

typedef struct submitter {
    mp_registry *registry;
    mp_ticket *ticket;
    _Atomic bool asked; /* set while the request waits for room in the queue */
} submitter;

static bool note_wait(void *arg) {
    atomic_store((_Atomic bool *)arg, true);
    return false;
}

static void submit_one(void *arg) {
    submitter *self = arg;
    mp_submit_options options = {.priority = 2, .give_up = note_wait, .give_up_arg = &self->asked};
    mp_error error;
    MP_CHECK_OK(mp_registry_submit(self->registry, "a", &fake_call_create(1)->base, &options, &self->ticket, &error),
                &error);
}

typedef struct loading {
    mp_registry *registry;
    mp_status status;
} loading;

static void load_one(void *arg) {
    loading *self = arg;
    mp_error error;
    self->status = mp_registry_load(self->registry, "a", false, fake_in_ms(20000), &error);
}

/* A load waits for the replacement that was the latest when it began. If another one takes its place, the load waits
 * for that one instead of failing. */
MP_TEST(registry_load_follows_the_latest_replacement) {
    fake old, superseded, last;
    mp_error error;
    mp_thread thread;
    fake_init(&old);
    fake_init(&superseded);
    fake_init(&last);
    superseded.load_ns = FAKE_MS(300);
    mp_registry *registry = fake_registry(2, 0);
    fake_add(registry, "a", &old, false);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_add(registry, "a", &superseded, true);
    fake_until(&superseded.loads, 1);
    loading waits = {.registry = registry, .status = MP_INTERNAL};
    MP_CHECK_OK(mp_thread_start(&thread, "loads", load_one, &waits, &error), &error);
    mp_sys_sleep_ns(FAKE_MS(50)); /* most runs: the load waits already. Otherwise it waits for the last one at once */
    fake_add(registry, "a", &last, true);
    mp_thread_join(&thread);
    MP_CHECK_INT(waits.status, MP_OK);
    MP_CHECK_INT(last.loads, 1);
    fake_end(registry);
}

/* A request that waits for room in the queue of a replaced model moves to the replacement. Afterwards it holds a
 * reference to the replacement's entry, and none to the old entry. */
MP_TEST(registry_waiting_request_moves_to_the_replacement) {
    enum { ROOM = 4 };
    fake old, next;
    mp_error error;
    mp_thread thread;
    mp_ticket *tickets[1 + ROOM];
    fake_init(&old);
    fake_init(&next);
    old.memory = 1;
    old.version = 1;
    next.version = 2;
    mp_registry *registry = fake_registry(2, 0);
    fake_add(registry, "a", &old, false);
    atomic_store(&old.hold, true);
    for (int i = 0; i < 1 + ROOM; i++) { /* one request is active, the others fill the queue */
        fake_call *call = fake_call_create(1);
        call->memory = 1;
        tickets[i] = fake_submit(registry, "a", call, NULL);
        fake_until(&old.admitted, 1);
    }
    mp_entry *before = tickets[0]->entry;
    submitter waits = {.registry = registry};
    MP_CHECK_OK(mp_thread_start(&thread, "waits", submit_one, &waits, &error), &error);
    const uint64_t end = fake_in_ms(5000);
    while (!atomic_load(&waits.asked) && mp_sys_now_ns() < end)
        mp_sys_sleep_ns(FAKE_MS(1));
    MP_CHECK(waits.asked);
    atomic_store(&next.hold, true);
    fake_add(registry, "a", &next, true);
    mp_thread_join(&thread);
    MP_CHECK(waits.ticket->entry != before);
    MP_CHECK_STR(mp_entry_key(waits.ticket->entry), "a");
    /* the registry, the worker and five tickets; the watcher's references are short */
    const uint64_t until = fake_in_ms(5000);
    while (atomic_load(&before->references) != 1 + 1 + 1 + ROOM && mp_sys_now_ns() < until)
        mp_sys_sleep_ns(FAKE_MS(1) / 4);
    MP_CHECK_INT(atomic_load(&before->references), 1 + 1 + 1 + ROOM);
    fake_until(&next.in_steps, 1);
    mp_ticket_cancel(waits.ticket); /* by its entry: ends while the old model is still busy */
    MP_CHECK_INT(fake_finish(waits.ticket), MP_CANCELLED);
    atomic_store(&next.hold, false);
    atomic_store(&old.hold, false);
    for (int i = 0; i < 1 + ROOM; i++)
        MP_CHECK_INT(fake_finish(tickets[i]), MP_OK);
    fake_end(registry);
}
