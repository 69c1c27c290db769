/* The registry with fake models: each request ends exactly once under all conditions. */
#include <stdatomic.h>

#include "base/sys.h"
#include "mp_test.h"
#include "test_registry_fake.h"

/* --- the common path --- */

MP_TEST(registry_completes_a_request) {
    fake fake;
    fake_init(&fake);
    fake.version = 7;
    mp_registry *registry = fake_registry(2, 0);
    mp_entry_info info;
    fake_add(registry, "a", &fake, false);
    fake_info(registry, "a", &info);
    MP_CHECK_STR(info.state, "cold");
    MP_CHECK_INT(fake.loads, 0); /* nothing is loaded before the first request */
    fake_call *call = fake_call_create(3);
    mp_ticket *ticket = fake_submit(registry, "a", call, NULL);
    MP_CHECK_STATUS(fake_wait(ticket, NULL), MP_OK, &(mp_error){0});
    MP_CHECK_INT(call->finished, 1);
    MP_CHECK_INT(call->version, 7);
    MP_CHECK_INT(mp_ticket_position(ticket, NULL), -1);
    uint64_t submitted, started, finished;
    mp_ticket_times(ticket, &submitted, &started, &finished);
    MP_CHECK(submitted && submitted <= started && started <= finished);
    mp_ticket_release(ticket);
    fake_until_state(registry, "a", "ready");
    fake_info(registry, "a", &info);
    MP_CHECK_INT(info.workers, 1);
    MP_CHECK_INT(info.accepted, 1);
    MP_CHECK_INT(info.model_bytes, 1000);
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.memory_used, 1100);
    MP_CHECK_INT(stats.completed, 1);
    MP_CHECK_INT(stats.loads, 1);
    fake_end(registry);
}

MP_TEST(registry_refuses_invalid_requests) {
    fake fake, other;
    fake_init(&fake);
    fake_init(&other);
    other.capability = MP_TEXT_TO_TEXT;
    mp_registry *registry = fake_registry(1, 0);
    fake_add(registry, "a", &fake, false);
    fake_add(registry, "b", &other, false);
    mp_loader loader = fake_loader(&fake);
    mp_error error;
    MP_CHECK_STATUS(mp_registry_add(registry, "a", &loader, MP_ADD_NEW, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_HAS(error.message, "replace");
    char long_key[300];
    memset(long_key, 'k', sizeof(long_key));
    long_key[299] = 0;
    loader = fake_loader(&fake);
    MP_CHECK_STATUS(mp_registry_add(registry, long_key, &loader, MP_ADD_NEW, &error), MP_INVALID_ARGUMENT, &error);
    mp_status status;
    MP_CHECK(!fake_submit(registry, "none", fake_call_create(1), &status));
    MP_CHECK_INT(status, MP_UNKNOWN_MODEL);
    MP_CHECK(!fake_submit(registry, "b", fake_call_create(1), &status));
    MP_CHECK_INT(status, MP_WRONG_CAPABILITY);
    MP_CHECK_STATUS(mp_registry_load(registry, "none", false, 0, &error), MP_UNKNOWN_MODEL, &error);
    MP_CHECK_STATUS(mp_registry_evict(registry, "none", 0, &error), MP_UNKNOWN_MODEL, &error);
    MP_CHECK_STATUS(mp_registry_remove(registry, "none", 0, &error), MP_UNKNOWN_MODEL, &error);

    /* The worker refuses an invalid request for a cold model; once the model is loaded, submit refuses it at once. */
    fake_call *bad = fake_call_create(1);
    bad->bad_argument = true;
    mp_ticket *ticket = fake_submit(registry, "a", bad, NULL);
    MP_CHECK_INT(fake_finish(ticket), MP_INVALID_ARGUMENT);
    bad = fake_call_create(1);
    bad->bad_argument = true;
    MP_CHECK(!fake_submit(registry, "a", bad, &status));
    MP_CHECK_INT(status, MP_INVALID_ARGUMENT);
    bad = fake_call_create(1);
    bad->refused = true;
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", bad, NULL)), MP_UNSUPPORTED);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_end(registry);
}

MP_TEST(registry_evicts_and_loads_again) {
    fake fake;
    fake_init(&fake);
    mp_registry *registry = fake_registry(2, 0);
    mp_error error;
    mp_registry_stats stats;
    fake_add(registry, "a", &fake, false);
    MP_CHECK_OK(mp_registry_evict(registry, "a", fake_in_ms(5000), &error), &error); /* cold: no worker to evict */
    for (int round = 1; round <= 8; round++) {
        MP_CHECK_OK(mp_registry_load(registry, "a", round == 2, fake_in_ms(5000), &error), &error);
        MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(5000), &error), &error);
        MP_CHECK_INT(fake.loads, round);
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
        MP_CHECK_OK(mp_registry_evict(registry, "a", fake_in_ms(5000), &error), &error);
        MP_CHECK_INT(fake.models, 0);
        MP_CHECK_INT(fake.engines, 0);
        mp_registry_get_stats(registry, &stats);
        MP_CHECK_INT(stats.memory_used, 0);
    }
    MP_CHECK(stats.threads_created <= 6); /* threads of earlier workers are reused once they are idle */
    /* An eviction waits until the active request has completed. */
    atomic_store(&fake.hold, true);
    fake_call *call = fake_call_create(1);
    mp_ticket *ticket = fake_submit(registry, "a", call, NULL);
    fake_until(&fake.admitted, 9);
    MP_CHECK_STATUS(mp_registry_evict(registry, "a", fake_in_ms(1), &error), MP_TIMEOUT, &error);
    atomic_store(&fake.hold, false);
    MP_CHECK_OK(mp_registry_evict(registry, "a", fake_in_ms(5000), &error), &error);
    MP_CHECK(mp_ticket_done(ticket));
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    fake_end(registry);
}

MP_TEST(registry_evicts_while_requests_keep_coming) {
    fake fake;
    fake_init(&fake);
    fake.step_ns = FAKE_MS(1);
    mp_registry *registry = fake_registry(2, 0);
    mp_error error;
    fake_add(registry, "a", &fake, false);
    for (int round = 0; round < 20; round++) {
        mp_ticket *tickets[4];
        for (int i = 0; i < 4; i++)
            tickets[i] = fake_submit(registry, "a", fake_call_create(2), NULL);
        MP_CHECK_OK(mp_registry_evict(registry, "a", fake_in_ms(5000), &error), &error);
        for (int i = 0; i < 4; i++)
            MP_CHECK_INT(fake_finish(tickets[i]), MP_OK);
    }
    fake_end(registry);
}

/* --- cancellation --- */

MP_TEST(registry_cancels_in_every_state) {
    fake fake;
    fake_init(&fake);
    fake.plan_items = 1;
    fake.memory = 1;
    mp_registry *registry = fake_registry(2, 0);
    fake_add(registry, "a", &fake, false);
    mp_error error;

    /* while the model loads */
    fake.load_ns = FAKE_MS(50);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fake.loads, 1);
    MP_CHECK_INT(mp_ticket_position(ticket, NULL), 0);
    mp_ticket_cancel(ticket);
    MP_CHECK(mp_ticket_done(ticket)); /* cancel ends a queued request before it returns */
    MP_CHECK_STATUS(mp_ticket_status(ticket, &error), MP_CANCELLED, &error);
    MP_CHECK_HAS(error.message, "a: ");
    mp_ticket_cancel(ticket);
    mp_ticket_release(ticket);

    /* an active request ends at the next poll of its lease, a queued one at once */
    atomic_store(&fake.hold, true);
    fake_call *running = fake_call_create(1), *waiting = fake_call_create(1), *queued = fake_call_create(1);
    running->memory = waiting->memory = queued->memory = 1;
    mp_ticket *runs = fake_submit(registry, "a", running, NULL);
    fake_until(&fake.admitted, 1);
    mp_ticket *waits = fake_submit(registry, "a", waiting, NULL), *waits_too = fake_submit(registry, "a", queued, NULL);
    mp_ticket_cancel(waits);
    MP_CHECK(mp_ticket_done(waits) && !mp_ticket_done(runs));
    MP_CHECK_INT(mp_ticket_position(waits_too, NULL), 0);
    mp_ticket_cancel(runs);
    MP_CHECK_INT(fake_wait(runs, NULL), MP_CANCELLED);
    MP_CHECK_INT(running->finished, 0);
    atomic_store(&fake.hold, false);
    MP_CHECK_INT(fake_wait(waits_too, NULL), MP_OK);
    MP_CHECK_INT(queued->finished, 1);
    mp_ticket_cancel(waits_too); /* done: cancellation has no effect */
    MP_CHECK_INT(mp_ticket_status(waits_too, NULL), MP_OK);
    mp_ticket_release(runs);
    mp_ticket_release(waits);
    mp_ticket_release(waits_too);

    /* one of two requests in a step is cancelled: the other one continues */
    fake.plan_items = 0;
    fake.memory = 0;
    atomic_store(&fake.hold, true);
    running = fake_call_create(1);
    waiting = fake_call_create(1);
    int admitted = fake.admitted;
    ticket = fake_submit(registry, "a", fake_call_create(1), NULL); /* occupies the worker until both are queued */
    fake_until(&fake.admitted, admitted + 1);
    runs = fake_submit(registry, "a", running, NULL);
    waits = fake_submit(registry, "a", waiting, NULL);
    mp_ticket_cancel(ticket);
    fake_until(&fake.admitted, admitted + 3);
    mp_sys_sleep_ns(FAKE_MS(5));
    mp_ticket_cancel(runs);
    mp_sys_sleep_ns(FAKE_MS(5));
    MP_CHECK(!mp_ticket_done(waits));
    atomic_store(&fake.hold, false);
    MP_CHECK_INT(fake_finish(waits), MP_OK);
    fake_finish(ticket);
    fake_finish(runs);

    /* releasing the last reference of the caller cancels the request */
    atomic_store(&fake.hold, true);
    ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    mp_ticket *second = mp_ticket_pin(ticket);
    admitted = fake.admitted;
    mp_ticket_release(ticket);
    mp_sys_sleep_ns(FAKE_MS(2));
    MP_CHECK(!mp_ticket_done(second));
    mp_ticket_release(second);
    fake_until_state(registry, "a", "ready");
    atomic_store(&fake.hold, false);
    fake_end(registry);
}

/* --- deadlines --- */

static mp_ticket *submit_until(mp_registry *registry, const char *key, uint64_t ms, fake_call *call) {
    mp_submit_options options = {.priority = 2, .deadline_ns = fake_in_ms(ms)};
    mp_ticket *ticket;
    mp_error error;
    MP_CHECK_OK(mp_registry_submit(registry, key, &call->base, &options, &ticket, &error), &error);
    return ticket;
}

MP_TEST(registry_enforces_deadlines_without_waiters) {
    fake fake;
    fake_init(&fake);
    fake.memory = 1;
    mp_registry *registry = fake_registry(2, 0);
    mp_error error;
    fake_add(registry, "a", &fake, false);
    /* while the model loads */
    atomic_store(&fake.load_stalls, true);
    mp_ticket *ticket = submit_until(registry, "a", 10, fake_call_create(1));
    uint64_t begin = mp_sys_now_ns();
    while (!mp_ticket_done(ticket) && mp_sys_now_ns() - begin < FAKE_MS(5000))
        mp_sys_sleep_ns(FAKE_MS(1));
    MP_CHECK_STATUS(mp_ticket_status(ticket, &error), MP_TIMEOUT, &error);
    MP_CHECK_HAS(error.message, "the request was still queued");
    mp_ticket_release(ticket);
    atomic_store(&fake.load_stalls, false);
    /* one request is running, the other is queued behind it */
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    atomic_store(&fake.hold, true);
    fake_call *first = fake_call_create(1), *second = fake_call_create(1);
    first->memory = second->memory = 1;
    mp_ticket *runs = submit_until(registry, "a", 500, first);
    fake_until(&fake.admitted, 1);
    mp_ticket *waits = submit_until(registry, "a", 10, second);
    MP_CHECK_INT(fake_wait(waits, &error), MP_TIMEOUT);
    MP_CHECK_INT(second->starts, 0);
    MP_CHECK_INT(fake_wait(runs, &error), MP_TIMEOUT);
    MP_CHECK_HAS(error.message, "running");
    atomic_store(&fake.hold, false);
    mp_ticket_release(runs);
    mp_ticket_release(waits);
    /* An expired request is not queued. */
    mp_submit_options options = {.deadline_ns = mp_sys_now_ns() - 1};
    MP_CHECK_STATUS(mp_registry_submit(registry, "a", &fake_call_create(1)->base, &options, &ticket, &error),
                    MP_TIMEOUT, &error);
    /* A wait that ends before the request does not affect the request. */
    atomic_store(&fake.hold, true);
    ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    uint64_t progress;
    MP_CHECK(!mp_ticket_wait(ticket, UINT64_MAX, fake_in_ms(2), &progress));
    atomic_store(&fake.hold, false);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    fake_end(registry);
}

/* --- faults of the model --- */

MP_TEST(registry_fault_of_one_item_spares_the_others) {
    fake fake;
    fake_init(&fake);
    mp_registry *registry = fake_registry(1, 0);
    fake_add(registry, "a", &fake, false);
    fake.load_stalls = true; /* all three requests are queued before the first step */
    fake_call *calls[3];
    mp_ticket *tickets[3];
    mp_error error;
    for (int i = 0; i < 3; i++) {
        calls[i] = fake_call_create(1);
        calls[i]->numeric = i == 1;
        tickets[i] = fake_submit(registry, "a", calls[i], NULL);
    }
    fake.load_stalls = false;
    MP_CHECK_INT(fake_finish(tickets[0]), MP_OK);
    MP_CHECK_INT(fake_finish(tickets[2]), MP_OK);
    MP_CHECK_STATUS(fake_wait(tickets[1], &error), MP_NUMERIC, &error);
    MP_CHECK_HAS(error.message, "NaN");
    MP_CHECK_INT(calls[1]->starts, 1); /* no retry: the result would be NaN again */
    mp_ticket_release(tickets[1]);
    MP_CHECK_INT(fake.steps, 1);
    mp_entry_info info;
    fake_info(registry, "a", &info);
    MP_CHECK_INT(info.errors, 1);
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.retries, 0);
    MP_CHECK_INT(stats.worker_faults, 1);
    fake_end(registry);
}

MP_TEST(registry_model_with_changed_files_is_unloaded) {
    fake fake;
    fake_init(&fake);
    mp_registry *registry = fake_registry(1, 0);
    mp_error error;
    fake_add(registry, "a", &fake, false);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake.unhealthy = true; /* results of later steps are not delivered */
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    MP_CHECK_STATUS(fake_wait(ticket, &error), MP_INTEGRITY, &error);
    mp_ticket_release(ticket);
    fake_until_state(registry, "a", "failed");
    fake_until_freed(&fake);
    MP_CHECK_STATUS(mp_registry_load(registry, "a", false, 0, &error), MP_INTEGRITY, &error); /* the new load fails */
    fake.unhealthy = false;
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_end(registry);
}

/* --- the queue --- */

static bool give_up_third_time(void *arg) { return ++*(int *)arg == 3; }

MP_TEST(registry_a_full_queue_refuses_or_waits) {
    fake fake;
    fake_init(&fake);
    fake.memory = 1;
    mp_registry *registry = fake_registry(1, 0);
    mp_error error;
    fake_add(registry, "a", &fake, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    atomic_store(&fake.hold, true);
    mp_ticket *tickets[6], *ticket;
    for (int i = 0; i < 5; i++) { /* one request is active, four are queued */
        fake_call *call = fake_call_create(1);
        call->memory = 1;
        tickets[i] = fake_submit(registry, "a", call, NULL);
        if (i == 0)
            fake_until(&fake.admitted, 1);
    }
    MP_CHECK_INT(mp_ticket_position(tickets[0], NULL), -1);
    MP_CHECK_INT(mp_ticket_position(tickets[4], NULL), 3);
    mp_submit_options options = {.priority = 0, .fail_fast = true};
    MP_CHECK_STATUS(mp_registry_submit(registry, "a", &fake_call_create(1)->base, &options, &ticket, &error),
                    MP_OVERLOADED, &error);
    MP_CHECK_HAS(error.message, "the queue is full (4 requests)");
    options = (mp_submit_options){.deadline_ns = fake_in_ms(20)};
    MP_CHECK_STATUS(mp_registry_submit(registry, "a", &fake_call_create(1)->base, &options, &ticket, &error),
                    MP_TIMEOUT, &error);
    MP_CHECK_HAS(error.message, "full");
    int asked = 0;
    options = (mp_submit_options){.give_up = give_up_third_time, .give_up_arg = &asked};
    MP_CHECK_STATUS(mp_registry_submit(registry, "a", &fake_call_create(1)->base, &options, &ticket, &error),
                    MP_CANCELLED, &error);
    MP_CHECK_INT(asked, 3);
    /* a cancellation makes room in the queue */
    mp_ticket_cancel(tickets[2]);
    tickets[5] = fake_submit(registry, "a", fake_call_create(1), NULL);
    /* completed work makes room for a waiting submitter */
    herd herd = {.registry = registry, .key = "a"};
    mp_thread thread;
    MP_CHECK_OK(mp_thread_start(&thread, "waits", fake_herd_member, &herd, &error), &error);
    mp_sys_sleep_ns(FAKE_MS(5));
    MP_CHECK_INT(herd.ok, 0);
    atomic_store(&fake.hold, false);
    mp_thread_join(&thread);
    MP_CHECK_INT(herd.ok, 1);
    for (int i = 0; i < 6; i++)
        MP_CHECK_INT(fake_finish(tickets[i]), i == 2 ? MP_CANCELLED : MP_OK);
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.queue_full_rejections, 1);
    fake_end(registry);
}

/* --- progress and notifiers --- */

MP_TEST(registry_progress_wakes_and_ends) {
    fake fake;
    fake_init(&fake);
    fake.step_units = 1;
    fake.step_ns = FAKE_MS(1);
    mp_registry *registry = fake_registry(1, 0);
    fake_add(registry, "a", &fake, false);
    fake_call *call = fake_call_create(10);
    mp_ticket *ticket = fake_submit(registry, "a", call, NULL);
    uint64_t seen = 0, wakes = 0;
    while (seen != UINT64_MAX) {
        uint64_t before = seen;
        MP_CHECK(mp_ticket_wait(ticket, seen, fake_in_ms(5000), &seen));
        MP_CHECK(seen > before);
        MP_CHECK(seen == UINT64_MAX || call->done >= seen);
        wakes++;
    }
    MP_CHECK(wakes >= 2 && wakes <= 10);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    fake_end(registry);
}

static int take_all(mp_notifier *notifier, uint64_t *ids) {
    int count = 0;
    uint64_t end = fake_in_ms(5000);
    while (!(count = mp_notifier_take(notifier, ids, 8)) && mp_sys_now_ns() < end)
        mp_sys_sleep_ns(FAKE_MS(1) / 4);
    return count;
}

MP_TEST(registry_notifiers_list_tickets_with_progress) {
    fake fake;
    fake_init(&fake);
    mp_registry *registry = fake_registry(1, 0);
    mp_notifier *notifier;
    mp_error error;
    uint64_t ids[8];
    fake_add(registry, "a", &fake, false);
    MP_CHECK_OK(mp_notifier_create(&notifier, &error), &error);
    MP_CHECK(mp_notifier_fd(notifier) >= 0);
    MP_CHECK_INT(mp_notifier_take(notifier, ids, 8), 0);
    /* a ticket is bound once before and once after its request is done */
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    mp_ticket_bind(ticket, notifier, 41);
    MP_CHECK_INT(take_all(notifier, ids), 1);
    MP_CHECK_INT(ids[0], 41);
    MP_CHECK_INT(fake_wait(ticket, NULL), MP_OK);
    MP_CHECK_INT(mp_notifier_take(notifier, ids, 8), 0);
    mp_ticket_bind(ticket, notifier, 42);
    MP_CHECK_INT(mp_notifier_take(notifier, ids, 8), 1);
    MP_CHECK_INT(ids[0], 42);
    mp_ticket_release(ticket);
    /* a request with five steps of progress is listed once until the caller takes its id */
    fake.step_units = 1;
    fake_call *call = fake_call_create(5);
    ticket = fake_submit(registry, "a", call, NULL);
    mp_ticket_bind(ticket, notifier, 43);
    MP_CHECK_INT(fake_wait(ticket, NULL), MP_OK);
    MP_CHECK_INT(mp_notifier_take(notifier, ids, 8), 1);
    /* a ticket is released while it is listed, and a notifier is destroyed before its ticket */
    mp_ticket_bind(ticket, notifier, 44);
    mp_ticket_release(ticket);
    fake_until_no_calls();
    MP_CHECK_INT(mp_notifier_take(notifier, ids, 8), 0);
    atomic_store(&fake.hold, true);
    ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    mp_ticket_bind(ticket, notifier, 45);
    mp_notifier_destroy(notifier);
    atomic_store(&fake.hold, false);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    fake_end(registry);
}

/* --- replace and remove --- */

static void stage(mp_registry *registry, fake *fake, uint64_t revision) {
    mp_loader loader = fake_loader(fake);
    mp_error error;
    loader.revision = revision;
    MP_CHECK_OK(mp_registry_add(registry, "a", &loader, MP_ADD_STAGED, &error), &error);
}

/* Submit a request for a revision (0: any). Returns its status, and in *version the version of the fake that ran it. */
static mp_status ask(mp_registry *registry, uint64_t revision, int *version) {
    mp_submit_options options = {.priority = 2, .revision = revision};
    fake_call *call = fake_call_create(1);
    mp_ticket *ticket;
    mp_error error;
    mp_status status = mp_registry_submit(registry, "a", &call->base, &options, &ticket, &error);
    if (status == MP_OK) {
        status = fake_wait(ticket, NULL);
        *version = call->version;
        mp_ticket_release(ticket);
    }
    return status;
}

MP_TEST(registry_staged_model_waits_for_its_commit) {
    fake old, new, broken;
    fake_init(&old);
    fake_init(&new);
    fake_init(&broken);
    old.version = 1;
    new.version = 2;
    broken.load_failures = 1;
    mp_registry *registry = fake_registry(2, 0);
    mp_error error;
    mp_registry_stats stats;
    const char *key = "a";
    int version = 0;
    stage(registry, &old, 1); /* a new key: there is nothing to wait for */
    MP_CHECK_INT(ask(registry, 1, &version), MP_OK);
    MP_CHECK_INT(version, 1);

    stage(registry, &new, 2);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    MP_CHECK_INT(new.models, 1);
    MP_CHECK_INT(ask(registry, 0, &version), MP_OK); /* loaded, but not committed */
    MP_CHECK_INT(version, 1);
    MP_CHECK_INT(ask(registry, 2, &version), MP_SEND);
    MP_CHECK(mp_registry_withdraw(registry, "a", 2));
    MP_CHECK(mp_registry_withdraw(registry, "a", 2));
    MP_CHECK_STATUS(mp_registry_commit(registry, &key, 1, 2, &error), MP_SEND, &error);

    stage(registry, &broken, 3); /* fails to load: the old model stays */
    MP_CHECK_STATUS(mp_registry_load(registry, "a", false, 0, &error), MP_IO, &error);
    while (mp_registry_load(registry, "a", false, 0, &error) != MP_OK) /* until the registry has dropped it */
        mp_sys_sleep_ns(1000 * 1000);
    MP_CHECK_STATUS(mp_registry_commit(registry, &key, 1, 3, &error), MP_SEND, &error);
    MP_CHECK_INT(ask(registry, 1, &version), MP_OK);

    stage(registry, &new, 4);
    MP_CHECK_OK(mp_registry_commit(registry, &key, 1, 4, &error), &error); /* not loaded: the next request loads it */
    MP_CHECK_OK(mp_registry_commit(registry, &key, 1, 4, &error), &error);
    MP_CHECK(!mp_registry_withdraw(registry, "a", 4));
    mp_registry_get_stats(registry, &stats);
    uint64_t total = stats.total_requests, errors = stats.errors;
    MP_CHECK_INT(ask(registry, 1, &version), MP_SEND); /* prepared for the old model */
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.total_requests, total);
    MP_CHECK_INT(stats.errors, errors);
    MP_CHECK_INT(ask(registry, 4, &version), MP_OK);
    MP_CHECK_INT(version, 2);
    MP_CHECK_INT(ask(registry, 0, &version), MP_OK);
    MP_CHECK_INT(version, 2);
    MP_CHECK_OK(mp_registry_remove(registry, "a", 0, &error), &error);
    mp_registry_get_stats(registry, &stats);
    total = stats.total_requests, errors = stats.errors;
    MP_CHECK_INT(ask(registry, 4, &version), MP_SEND); /* prepared for the model that was removed */
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.total_requests, total);
    MP_CHECK_INT(stats.errors, errors);
    MP_CHECK_INT(ask(registry, 0, &version), MP_UNKNOWN_MODEL);
    uint64_t end = fake_in_ms(5000);
    while ((atomic_load(&old.loaders) || atomic_load(&broken.loaders)) && mp_sys_now_ns() < end)
        mp_sys_sleep_ns(FAKE_MS(1));
    MP_CHECK_INT(old.models, 0);
    MP_CHECK_INT(broken.loaders, 0);
    stage(registry, &old, 5); /* closing frees a model that is staged */
    fake_end(registry);
}

MP_TEST(registry_commits_as_many_keys_as_are_allowed) {
    fake old[MP_COMMIT_MAX], new[MP_COMMIT_MAX];
    static char names[MP_COMMIT_MAX][4];
    const char *keys[MP_COMMIT_MAX];
    mp_registry *registry = fake_registry(1, 0);
    mp_error error;
    for (int i = 0; i < MP_COMMIT_MAX; i++) {
        snprintf(names[i], sizeof(names[i]), "k%d", i);
        keys[i] = names[i];
        fake_init(&old[i]);
        fake_init(&new[i]);
        new[i].version = 2;
        fake_add(registry, keys[i], &old[i], false);
        mp_loader loader = fake_loader(&new[i]);
        loader.revision = 2;
        MP_CHECK_OK(mp_registry_add(registry, keys[i], &loader, MP_ADD_STAGED, &error), &error);
    }
    MP_CHECK_OK(mp_registry_commit(registry, keys, MP_COMMIT_MAX, 2, &error), &error);
    for (int i = 0; i < MP_COMMIT_MAX; i++) {
        MP_CHECK_INT(fake_finish(fake_submit(registry, keys[i], fake_call_create(1), NULL)), MP_OK);
        MP_CHECK_INT(old[i].loaders, 0);
        MP_CHECK_INT(new[i].loads, 1);
    }
    fake_end(registry);
}
