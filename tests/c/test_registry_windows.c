/* The time between the end of a request or a load and the end of its worker. A caller that has its result may call the
 * registry again at once: the next call must not depend on how far the worker has come. The tests stop the worker at
 * one of these points:
 *
 *   fake.retire_hold    the last step of its request is over; the request has not ended
 *   fake.leave_hold     its request has ended; it has not begun to leave
 *   fake.destroy_hold   it is leaving; its engine or model is being freed
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
static mp_registry *begin_two(fake fakes[2]) {
    mp_registry *registry = fake_registry(2, MEMORY);
    for (int i = 0; i < 2; i++) {
        fake_init(&fakes[i]);
        fakes[i].model_bytes = LARGE;
        fake_add(registry, i ? "b" : "a", &fakes[i], false);
    }
    return registry;
}

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

/* The other worker of a model whose files changed serves no load either. */
MP_TEST(registry_windows_load_beside_a_changed_file) {
    fake fake;
    fake_init(&fake);
    fake.workers = 2;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 2, .max_workers = 2});
    fake_add(registry, "a", &fake, false);
    MP_CHECK_INT(load(registry, "a", 10000), MP_OK);
    fake_until(&fake.engines, 2);
    atomic_store(&fake.leave_hold, true);
    atomic_store(&fake.unhealthy, true);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_INTEGRITY);
    atomic_store(&fake.unhealthy, false);
    MP_CHECK_INT(load(registry, "a", 50), MP_TIMEOUT);
    atomic_store(&fake.leave_hold, false);
    MP_CHECK_INT(load(registry, "a", 10000), MP_OK);
    MP_CHECK_INT(fake.loads, 2);
    fake_end(registry);
}

/* A worker whose keep-alive has ended is told to leave: a load does not rely on it. */
MP_TEST(registry_windows_load_after_the_keep_alive) {
    fake fake;
    mp_error error;
    mp_registry *registry = fake_begin(&fake, 2, NULL);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    mp_entry *entry = registry->slots[0].current;
    for (bool idle = false; !idle; mp_sys_sleep_ns(FAKE_MS(1) / 4)) {
        mp_mutex_lock(&entry->lock);
        idle = entry->workers[0]->state == MP_WORKER_IDLE;
        mp_mutex_unlock(&entry->lock);
    }
    atomic_store(&fake.leave_hold, true);
    MP_CHECK_OK(mp_registry_keep_alive(registry, "a", 1, &error), &error);
    for (bool told = false; !told; mp_sys_sleep_ns(FAKE_MS(1) / 4)) {
        mp_mutex_lock(&entry->lock);
        told = entry->workers[0]->leave;
        mp_mutex_unlock(&entry->lock);
    }
    fake_until(&fake.in_leave, 1);
    MP_CHECK_STATUS(mp_registry_load(registry, "a", true, fake_in_ms(50), &error), MP_TIMEOUT, &error);
    atomic_store(&fake.leave_hold, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", true, fake_in_ms(10000), &error), &error);
    mp_sys_sleep_ns(FAKE_MS(20));
    MP_CHECK_INT(fake.models, 1); /* pinned */
    MP_CHECK_INT(fake.loads, 2);
    fake_end(registry);
}

typedef struct loading {
    mp_registry *registry;
    _Atomic int status; /* -1: not ended */
} loading;

static void load_a(void *arg) {
    loading *self = arg;
    atomic_store(&self->status, load(self->registry, "a", 10000));
}

/* A model that is loaded by a call of load, because it was being evicted, makes room for another model like any other
 * that is idle. */
MP_TEST(registry_windows_load_during_an_eviction) {
    fake fakes[2];
    mp_error error;
    mp_thread thread;
    mp_registry *registry = begin_two(fakes);
    atomic_store(&fakes[0].hold, true);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fakes[0].in_steps, 1);
    MP_CHECK_STATUS(mp_registry_evict(registry, "a", fake_in_ms(1), &error), MP_TIMEOUT, &error);
    loading waits = {.registry = registry, .status = -1};
    MP_CHECK_OK(mp_thread_start(&thread, "loads", load_a, &waits, &error), &error);
    mp_sys_sleep_ns(FAKE_MS(30)); /* it waits for the eviction */
    atomic_store(&fakes[0].hold, false);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    mp_thread_join(&thread);
    MP_CHECK_INT(waits.status, MP_OK);
    MP_CHECK_INT(fakes[0].loads, 2);
    MP_CHECK_INT(load(registry, "b", 10000), MP_OK);
    MP_CHECK_INT(fakes[0].models, 0);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    MP_CHECK_INT(load(registry, "b", 10000), MP_OK);
    fake_end(registry);
}

/* --- memory that a leaving worker holds: another model waits for it --- */

/* "b" needs memory that "a" is freeing: the load of "b" waits until its deadline, and succeeds once the memory is
 * free. */
static void expect_to_wait(mp_registry *registry, _Atomic bool *hold) {
    MP_CHECK_INT(load(registry, "b", 80), MP_TIMEOUT);
    atomic_store(hold, false);
    MP_CHECK_INT(load(registry, "b", 10000), MP_OK);
}

MP_TEST(registry_windows_memory_of_a_failed_engine) {
    fake fakes[2];
    mp_error error;
    mp_thread thread;
    mp_registry *registry = begin_two(fakes);
    fakes[0].engine_failures = 1;
    atomic_store(&fakes[0].destroy_hold, true);
    loading fails = {.registry = registry, .status = -1};
    MP_CHECK_OK(mp_thread_start(&thread, "loads", load_a, &fails, &error), &error);
    fake_until(&fakes[0].in_destroy, 1);
    expect_to_wait(registry, &fakes[0].destroy_hold);
    mp_thread_join(&thread);
    MP_CHECK_INT(fails.status, MP_IO);
    fake_end(registry);
}

/* A caller that learns of a failed load finds its memory free. */
MP_TEST(registry_windows_memory_is_free_when_a_load_fails) {
    fake fakes[2];
    mp_error error;
    mp_thread thread;
    mp_registry *registry = begin_two(fakes);
    fakes[0].engine_failures = 1;
    atomic_store(&fakes[0].destroy_hold, true);
    loading fails = {.registry = registry, .status = -1};
    MP_CHECK_OK(mp_thread_start(&thread, "loads", load_a, &fails, &error), &error);
    fake_until(&fakes[0].in_destroy, 1);
    mp_sys_sleep_ns(FAKE_MS(20));
    MP_CHECK_INT(fails.status, -1);
    atomic_store(&fakes[0].destroy_hold, false);
    mp_thread_join(&thread);
    MP_CHECK_INT(fake_stats(registry).memory_used, 0);
    fake_end(registry);
}

/* A pinned model whose last worker failed is freed, although the registry must not evict it. */
MP_TEST(registry_windows_memory_of_a_pinned_model) {
    for (int stage = 0; stage < 2; stage++) {
        fake fakes[2];
        mp_error error;
        mp_registry *registry = begin_two(fakes);
        _Atomic bool *hold = stage ? &fakes[0].destroy_hold : &fakes[0].leave_hold;
        MP_CHECK_OK(mp_registry_load(registry, "a", true, 0, &error), &error);
        atomic_store(hold, true);
        end_with_a_fault(registry, "a", &fakes[0]);
        expect_to_wait(registry, hold);
        MP_CHECK_INT(fakes[0].models, 0);
        fake_end(registry);
    }
}

/* A request of another model waits for the memory too. */
MP_TEST(registry_windows_memory_for_a_request) {
    fake fakes[2];
    mp_error error;
    mp_registry *registry = begin_two(fakes);
    fakes[1].model_bytes = 1000;
    MP_CHECK_INT(load(registry, "b", 10000), MP_OK);
    MP_CHECK_OK(mp_registry_load(registry, "a", true, 0, &error), &error);
    atomic_store(&fakes[0].destroy_hold, true);
    end_with_a_fault(registry, "a", &fakes[0]);
    for (int i = 0; i < 2; i++) {
        fake_call *call = fake_call_create(1);
        mp_submit_options options = {.priority = 2, .deadline_ns = fake_in_ms(i ? 10000 : 50)};
        mp_ticket *ticket;
        call->base.bytes = 100000;
        mp_status status = mp_registry_submit(registry, "b", &call->base, &options, &ticket, &error);
        MP_CHECK_STATUS(status, i ? MP_OK : MP_TIMEOUT, &error);
        if (i)
            MP_CHECK_INT(fake_finish(ticket), MP_OK);
        atomic_store(&fakes[0].destroy_hold, false);
    }
    fake_end(registry);
}

MP_TEST(registry_windows_memory_of_a_draining_model) {
    for (int replaced = 0; replaced < 2; replaced++) {
        fake fakes[2], next;
        mp_error error;
        mp_registry *registry = begin_two(fakes);
        fake_init(&next);
        atomic_store(&fakes[0].hold, true);
        mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
        fake_until(&fakes[0].in_steps, 1);
        if (replaced) {
            fake_add(registry, "a", &next, true);
            MP_CHECK_INT(load(registry, "a", 10000), MP_OK);
            MP_CHECK_INT(next.loads, 1);
        } else {
            MP_CHECK_STATUS(mp_registry_remove(registry, "a", fake_in_ms(1), &error), MP_TIMEOUT, &error);
        }
        expect_to_wait(registry, &fakes[0].hold);
        MP_CHECK_INT(fake_finish(ticket), MP_OK);
        fake_end(registry);
    }
}

/* Caches that are being freed count until they are free. */
MP_TEST(registry_windows_memory_of_caches) {
    fake fakes[2];
    mp_error error;
    mp_registry *registry = begin_two(fakes);
    atomic_store(&fakes[0].held_bytes, LARGE);
    MP_CHECK_OK(mp_registry_load(registry, "a", true, 0, &error), &error);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    atomic_store(&fakes[0].trim_hold, true);
    MP_CHECK_INT(load(registry, "b", 100), MP_TIMEOUT);
    MP_CHECK_INT(fakes[0].in_trim, 1);
    atomic_store(&fakes[0].trim_hold, false);
    MP_CHECK_INT(load(registry, "b", 10000), MP_MEMORY_EXHAUSTED); /* the pinned model itself stays */
    MP_CHECK_INT(fakes[0].models, 1);
    fake_end(registry);
}

typedef struct evicting {
    mp_entry *entry;
    mp_status status;
} evicting;

static void evict_entry(void *arg) {
    evicting *self = arg;
    mp_error error;
    self->status = mp_entry_evict(self->entry, 0, &error);
}

/* A model without workers that a caller evicts: its memory counts until it is free, and no load begins before. */
MP_TEST(registry_windows_memory_of_a_model_without_workers) {
    scene scene;
    mp_eviction value;
    mp_thread thread;
    mp_error error;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    scene_load(&scene);
    atomic_store(&scene.fake.destroy_hold, true);
    evicting evicts = {.entry = scene.entry, .status = MP_INTERNAL};
    MP_CHECK_OK(mp_thread_start(&thread, "evicts", evict_entry, &evicts, &error), &error);
    fake_until(&scene.fake.in_destroy, 1);
    mp_entry_value(scene.entry, &value);
    MP_CHECK_INT(value.coming, 1001);
    mp_mutex_lock(&scene.entry->lock);
    MP_CHECK(!mp_entry_begin(scene.entry));
    mp_mutex_unlock(&scene.entry->lock);
    atomic_store(&scene.fake.destroy_hold, false);
    mp_thread_join(&thread);
    MP_CHECK_INT(evicts.status, MP_OK);
    mp_entry_value(scene.entry, &value);
    MP_CHECK_INT(value.coming, 0);
    scene_close(&scene);
}

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

/* A keep-alive that is set while a replacement loads holds for both models, whichever stays. */
MP_TEST(registry_windows_keep_alive_while_a_replacement_loads) {
    for (int fails = 0; fails < 2; fails++) {
        fake fake, next;
        mp_error error;
        mp_entry_info info;
        mp_registry *registry = fake_begin(&fake, 2, NULL);
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
        fake_init(&next);
        next.load_ns = FAKE_MS(50);
        next.load_failures = fails;
        fake_add(registry, "a", &next, true);
        fake_until(&next.loads, 1);
        MP_CHECK_OK(mp_registry_keep_alive(registry, "a", FAKE_MS(12345), &error), &error);
        MP_CHECK_INT(load(registry, "a", 10000), fails ? MP_IO : MP_OK);
        fake_info(registry, "a", &info);
        MP_CHECK_INT(info.keep_alive_ns, FAKE_MS(12345));
        fake_end(registry);
    }
}

/* A replacement of a model that is not in use is not loaded, even if a worker of the old one is still leaving. */
MP_TEST(registry_windows_replacement_after_a_failed_load) {
    fake fake, next;
    mp_registry *registry = fake_begin(&fake, 2, NULL);
    hold_events(registry);
    fake_init(&next);
    fake.load_failures = 1;
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_IO);
    fake_add(registry, "a", &next, true);
    mp_sys_sleep_ns(FAKE_MS(30));
    release_events();
    MP_CHECK_INT(next.loads, 0);
    MP_CHECK_STR(state_of(registry, "a"), "cold");
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    MP_CHECK_INT(next.loads, 1);
    fake_end(registry);
}

MP_TEST(registry_windows_replacement_after_a_fault) {
    fake fake, next;
    mp_registry *registry = fake_begin(&fake, 2, NULL);
    fake_init(&next);
    MP_CHECK_INT(load(registry, "a", 10000), MP_OK);
    atomic_store(&fake.leave_hold, true);
    end_with_a_fault(registry, "a", &fake);
    fake_add(registry, "a", &next, true);
    mp_sys_sleep_ns(FAKE_MS(30));
    atomic_store(&fake.leave_hold, false);
    MP_CHECK_INT(next.loads, 0);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    MP_CHECK_INT(next.loads, 1);
    fake_end(registry);
}

/* The same if the new model takes the place of one that was staged for a model that is not in use. */
MP_TEST(registry_windows_replacement_of_a_staged_model) {
    fake fake, staged, next;
    mp_registry *registry = fake_begin(&fake, 2, NULL);
    fake_init(&staged);
    fake_init(&next);
    add_model(registry, "a", &staged, MP_ADD_STAGED, 7);
    fake_add(registry, "a", &next, true);
    mp_sys_sleep_ns(FAKE_MS(20));
    MP_CHECK_INT(next.loads, 0);
    MP_CHECK_INT(fake.loaders, 0);
    MP_CHECK_INT(staged.loaders, 0);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    MP_CHECK_INT(next.loads, 1);
    fake_end(registry);
}

/* --- remove --- */

/* A removal ends with everything freed: also a replacement, whose load is cancelled. */
MP_TEST(registry_windows_remove_waits_for_a_replacement) {
    fake fake, next;
    mp_error error;
    mp_registry *registry = fake_begin(&fake, 2, NULL);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_init(&next);
    next.load_ns = FAKE_MS(15000);
    fake_add(registry, "a", &next, true);
    fake_until(&next.loads, 1);
    MP_CHECK_OK(mp_registry_remove(registry, "a", fake_in_ms(5000), &error), &error);
    MP_CHECK_INT(fake.loaders, 0);
    MP_CHECK_INT(next.loaders, 0);
    MP_CHECK_INT(fake_stats(registry).load_failures, 0);
    fake_end(registry);
}

/* The load of a removed model is cancelled only if no request waits for it. */
MP_TEST(registry_windows_remove_finishes_accepted_requests) {
    fake fake;
    mp_error error;
    mp_registry *registry = fake_begin(&fake, 2, NULL);
    fake.load_ns = FAKE_MS(50);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fake.loads, 1);
    MP_CHECK_OK(mp_registry_remove(registry, "a", fake_in_ms(5000), &error), &error);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    fake_end(registry);
}

/* A replaced model that is gone is no longer listed, although no call waits for it. */
MP_TEST(registry_windows_models_that_are_gone_are_not_listed) {
    fake fakes[4];
    mp_registry *registry = fake_begin(&fakes[0], 2, NULL);
    for (int i = 1; i < 4; i++) {
        fake_init(&fakes[i]);
        MP_CHECK_INT(load(registry, "a", 10000), MP_OK);
        fake_add(registry, "a", &fakes[i], true);
        MP_CHECK_INT(load(registry, "a", 10000), MP_OK);
        int listed = 1;
        for (uint64_t end = fake_in_ms(10000); listed && mp_sys_now_ns() < end; mp_sys_sleep_ns(FAKE_MS(1) / 4)) {
            mp_mutex_lock(&registry->lock);
            listed = registry->leaving_count;
            mp_mutex_unlock(&registry->lock);
        }
        MP_CHECK_INT(listed, 0);
    }
    fake_end(registry);
}

/* A staged model that is withdrawn drains as a removed one does. */
MP_TEST(registry_windows_wait_for_a_withdrawn_model) {
    fake old, staged;
    mp_error error;
    mp_registry *registry = fake_begin(&old, 2, NULL);
    fake_init(&staged);
    MP_CHECK_INT(load(registry, "a", 10000), MP_OK);
    add_model(registry, "a", &staged, MP_ADD_STAGED, 7);
    MP_CHECK_INT(load(registry, "a", 10000), MP_OK);
    MP_CHECK_INT(staged.models, 1);
    atomic_store(&staged.destroy_hold, true);
    MP_CHECK(mp_registry_withdraw(registry, "a", 7));
    MP_CHECK_STATUS(mp_registry_wait_removed(registry, "a", fake_in_ms(50), &error), MP_TIMEOUT, &error);
    atomic_store(&staged.destroy_hold, false);
    MP_CHECK_OK(mp_registry_wait_removed(registry, "a", fake_in_ms(10000), &error), &error);
    MP_CHECK_INT(staged.loaders, 0);
    MP_CHECK_INT(old.models, 1);
    fake_end(registry);
}

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

/* A removed entry without workers is not gone before its model is free. */
MP_TEST(registry_windows_remove_frees_a_model_without_workers) {
    scene scene;
    mp_error error;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    scene_load(&scene);
    scene.entry->removal = MP_REMOVAL_DRAINING; /* mp_entry_remove is about to free the model */
    MP_CHECK_OK(mp_entry_wait_gone(scene.entry, fake_in_ms(1000), &error), &error);
    MP_CHECK_INT(scene.fake.models, 0);
    MP_CHECK_INT(scene.entry->removal, MP_REMOVAL_GONE);
    scene_close(&scene);
}

/* --- info and evict after a failed load --- */

MP_TEST(registry_windows_info_after_a_failed_load) {
    fake fake;
    mp_registry *registry = fake_begin(&fake, 2, NULL);
    hold_events(registry);
    fake.load_failures = 1;
    MP_CHECK_INT(load(registry, "a", 10000), MP_IO);
    MP_CHECK_STR(state_of(registry, "a"), "failed");
    MP_CHECK_INT(fake_stats(registry).load_failures, 1);
    release_events();
    fake_end(registry);
}

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

/* The load fails after the deadline of the eviction. */
MP_TEST(registry_windows_evict_forgets_a_load_that_fails_later) {
    fake fake;
    mp_error error;
    mp_registry *registry = fake_begin(&fake, 2, NULL);
    fake.load_failures = 1;
    fake.load_ns = FAKE_MS(100);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fake.loads, 1);
    MP_CHECK_STATUS(mp_registry_evict(registry, "a", fake_in_ms(1), &error), MP_TIMEOUT, &error);
    MP_CHECK_INT(fake_finish(ticket), MP_IO);
    fake_until_state(registry, "a", "cold");
    fake.load_ns = 0;
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_end(registry);
}
