/* The time between the end of a request or a load and the end of its worker. A caller that has its result may call the
 * registry again at once: the next call must not depend on how far the worker has come. The tests stop the worker at
 * one of these points:
 *
 *   fake.retire_hold    the last step of its request is over; the request has not ended
 *   fake.leave_hold     its request has ended; it has not begun to leave
 *   hold_events()       its load has ended; the registry does not know yet */
#include "base/sys.h"
#include "registry/state.h"
#include "test_registry_scene.h"

/* --- events that are reported late --- */

static void (*report)(mp_registry *registry, mp_entry *entry, mp_entry_event event);
static _Atomic bool held;
static _Atomic int waiting; /* threads that report an event */

static void report_late(mp_registry *registry, mp_entry *entry, mp_entry_event event) {
    atomic_fetch_add(&waiting, 1);
    while (atomic_load(&held))
        mp_sys_sleep_ns(FAKE_MS(1) / 4);
    atomic_fetch_sub(&waiting, 1);
    report(registry, entry, event);
}

/* Workers of the registry report no event until release_events. Call before the first load. */
static void hold_events(mp_registry *registry) {
    atomic_store(&held, true);
    report = registry->services->event;
    registry->services->event = report_late;
}

static void release_events(void) { atomic_store(&held, false); }

/* --- helpers --- */

/* A registry with memory for one of two fakes, "a" and "b". */
enum { LARGE = 150000, MEMORY = 200000 };

static mp_status load(mp_registry *registry, const char *key, uint64_t ms) {
    mp_error error;
    mp_status status = mp_registry_load(registry, key, false, fake_in_ms(ms), &error);
    MP_CHECK(status == MP_OK || error.code == status);
    return status;
}

/* Ends a request with an internal error of its worker. No retry follows, because the caller has seen a result. */
static void end_with_a_fault(mp_registry *registry, const char *key, fake *fake) {
    fake_call *call = fake_call_create(2);
    atomic_store(&fake->step_units, 1);
    call->streams = true;
    call->fault = MP_INTERNAL;
    call->faults = call->fault_from = 1;
    MP_CHECK_INT(fake_finish(fake_submit(registry, key, call, NULL)), MP_INTERNAL);
}

static void add_model(mp_registry *registry, const char *key, fake *fake, mp_add add, uint64_t revision) {
    mp_loader loader = fake_loader(fake);
    mp_error error;
    loader.revision = revision;
    MP_CHECK_OK(mp_registry_add(registry, key, &loader, add, &error), &error);
}

static const char *state_of(mp_registry *registry, const char *key) {
    mp_entry_info info;
    fake_info(registry, key, &info);
    return info.state;
}

/* --- cancel --- */

/* A request whose last step is over has not ended: a cancellation that reports success keeps its promise. */
MP_TEST(registry_windows_cancel_after_the_last_step) {
    fake fake;
    mp_error error;
    mp_registry *registry = fake_begin(&fake, 2, NULL);
    atomic_store(&fake.retire_hold, true);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fake.in_retire, 1);
    MP_CHECK(!mp_ticket_done(ticket) && mp_ticket_cancel(ticket) && mp_ticket_cancel(ticket));
    atomic_store(&fake.retire_hold, false);
    MP_CHECK_STATUS(fake_wait(ticket, &error), MP_CANCELLED, &error);
    MP_CHECK_STR(error.message, "a: the request was cancelled");
    MP_CHECK(!mp_ticket_cancel(ticket));
    mp_ticket_release(ticket);
    MP_CHECK_INT(fake_stats(registry).cancelled, 1);
    fake_end(registry);
}

static void pass_the_deadline(bool cancelled) {
    fake fake;
    mp_error error;
    mp_registry *registry = fake_begin(&fake, 2, NULL);
    MP_CHECK_INT(load(registry, "a", 10000), MP_OK);
    atomic_store(&fake.retire_hold, true);
    fake_call *call = fake_call_create(1);
    mp_submit_options options = {.priority = 2, .deadline_ns = fake_in_ms(200)};
    mp_ticket *ticket;
    MP_CHECK_OK(mp_registry_submit(registry, "a", &call->base, &options, &ticket, &error), &error);
    fake_until(&fake.in_retire, 1);
    mp_entry *entry = registry->slots[0].current;
    for (bool late = false; !late; mp_sys_sleep_ns(FAKE_MS(1) / 4)) { /* until the sweep has seen the deadline */
        mp_mutex_lock(&entry->lock);
        late = atomic_load(&ticket->cause) == MP_TIMEOUT;
        mp_mutex_unlock(&entry->lock);
    }
    MP_CHECK(!cancelled || mp_ticket_cancel(ticket));
    atomic_store(&fake.retire_hold, false);
    MP_CHECK_INT(fake_finish(ticket), cancelled ? MP_CANCELLED : MP_OK);
    fake_end(registry);
}

/* A result that is there when the deadline passes is delivered, unless the caller cancels after that. */
MP_TEST(registry_windows_deadline_after_the_last_step) {
    for (int cancelled = 0; cancelled < 2; cancelled++)
        pass_the_deadline(cancelled);
}

/* --- load --- */

/* After a fault, a load waits for the worker to leave and loads the model again. */
MP_TEST(registry_windows_load_after_a_fault) {
    for (int changed = 0; changed < 2; changed++) { /* an internal error; a changed model file */
        fake fake;
        mp_registry *registry = fake_begin(&fake, 2, NULL);
        MP_CHECK_INT(load(registry, "a", 10000), MP_OK);
        atomic_store(&fake.leave_hold, true);
        if (changed) {
            atomic_store(&fake.unhealthy, true);
            MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_INTEGRITY);
            atomic_store(&fake.unhealthy, false);
        } else {
            end_with_a_fault(registry, "a", &fake);
        }
        MP_CHECK_INT(load(registry, "a", 50), MP_TIMEOUT);
        MP_CHECK_STR(state_of(registry, "a"), "evicting");
        atomic_store(&fake.leave_hold, false);
        MP_CHECK_INT(load(registry, "a", 10000), MP_OK);
        MP_CHECK_INT(fake.loads, 2);
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
        fake_end(registry);
    }
}

typedef struct loading {
    mp_registry *registry;
    _Atomic int status; /* -1: not ended */
} loading;

/* --- memory that a leaving worker holds: another model waits for it --- */

typedef struct evicting {
    mp_entry *entry;
    mp_status status;
} evicting;

/* --- replacements --- */

/* A replacement whose load has failed is gone for the next call: keep-alive, commit and state apply to the old model.
 */
MP_TEST(registry_windows_failed_replacement) {
    for (int staged = 0; staged < 2; staged++) {
        fake fake, next;
        mp_error error;
        mp_entry_info info;
        mp_registry *registry = fake_begin(&fake, 2, NULL);
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
        hold_events(registry);
        fake_init(&next);
        next.load_failures = 1;
        next.load_ns = FAKE_MS(50); /* the call of load below joins it */
        add_model(registry, "a", &next, staged ? MP_ADD_STAGED : MP_ADD_REPLACE, 7);
        MP_CHECK_INT(load(registry, "a", 10000), MP_IO);
        if (staged)
            MP_CHECK_STATUS(mp_registry_commit(registry, (const char *[]){"a"}, 1, 7, &error), MP_SEND, &error);
        MP_CHECK_OK(mp_registry_keep_alive(registry, "a", FAKE_MS(12345), &error), &error);
        release_events();
        MP_CHECK_INT(load(registry, "a", 10000), MP_OK);
        MP_CHECK_INT(next.loads, 1);
        fake_info(registry, "a", &info);
        MP_CHECK_INT(info.keep_alive_ns, FAKE_MS(12345));
        MP_CHECK_STR(info.state, "ready");
        fake_end(registry);
    }
}

/* --- remove --- */

/* Several models of one key drain: each wait is for all of them. */
MP_TEST(registry_windows_remove_waits_for_replaced_models) {
    for (int removed = 0; removed < 2; removed++) {
        fake fake, next;
        mp_error error;
        mp_ticket *ticket;
        mp_registry *registry = fake_begin(&fake, 2, &ticket);
        fake_init(&next);
        fake_add(registry, "a", &next, true);
        MP_CHECK_INT(load(registry, "a", 10000), MP_OK);
        MP_CHECK_INT(next.loads, 1);
        if (removed)
            MP_CHECK_STATUS(mp_registry_remove(registry, "a", fake_in_ms(50), &error), MP_TIMEOUT, &error);
        MP_CHECK_STATUS(mp_registry_wait_removed(registry, "a", fake_in_ms(50), &error), MP_TIMEOUT, &error);
        atomic_store(&fake.hold, false);
        MP_CHECK_OK(mp_registry_wait_removed(registry, "a", fake_in_ms(5000), &error), &error);
        MP_CHECK_INT(fake.loaders, 0);
        MP_CHECK_INT(next.loaders, !removed);
        MP_CHECK_INT(fake_finish(ticket), MP_OK);
        fake_end(registry);
    }
}

/* --- info and evict after a failed load --- */

/* An eviction forgets a failed load, also if the worker of that load has not left, and also after its deadline. */
MP_TEST(registry_windows_evict_forgets_a_failed_load) {
    fake fake;
    mp_error error;
    mp_registry *registry = fake_begin(&fake, 2, NULL);
    hold_events(registry);
    fake.load_failures = 1;
    MP_CHECK_INT(load(registry, "a", 10000), MP_IO);
    MP_CHECK_STATUS(mp_registry_evict(registry, "a", fake_in_ms(10), &error), MP_TIMEOUT, &error);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    release_events();
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    fake.load_failures = 1;
    MP_CHECK_OK(mp_registry_evict(registry, "a", 0, &error), &error);
    MP_CHECK_INT(load(registry, "a", 10000), MP_IO);
    MP_CHECK_OK(mp_registry_evict(registry, "a", 0, &error), &error);
    MP_CHECK_STR(state_of(registry, "a"), "cold");
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_end(registry);
}
