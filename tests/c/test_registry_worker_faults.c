/* Workers that fail: retries, replaced workers, the breaker, and quarantine. */
#include <stdatomic.h>

#include "base/sys.h"
#include "mp_test.h"
#include "registry/state.h"
#include "test_registry_fake.h"

/* Steps that find no memory: a request uses up its retry only if no idle model can free memory. */
MP_TEST(workers_step_without_memory) {
    for (int idle = 0; idle < 2; idle++) {
        fake fake, other;
        fake_init(&fake);
        fake_init(&other);
        mp_registry *registry =
            fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 1, .breaker_threshold = 1});
        fake_add(registry, "a", &fake, false);
        fake_add(registry, "b", &other, false);
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
        if (idle)
            MP_CHECK_INT(fake_finish(fake_submit(registry, "b", fake_call_create(1), NULL)), MP_OK);
        fake_call *call = fake_call_faulty(MP_MEMORY_EXHAUSTED, 2);
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), idle ? MP_OK : MP_MEMORY_EXHAUSTED);
        call = fake_call_faulty(MP_MEMORY_EXHAUSTED, 1);
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), MP_OK);
        MP_CHECK_INT(fake_stats(registry).worker_faults, 0);
        fake_end(registry);
    }
}

/* A fault in any step is retried once. After the caller has seen part of the result, the retry continues there if the
 * request can (`resumable`); otherwise the request ends with the error. */
MP_TEST(workers_fault_of_a_later_step) {
    static const struct {
        uint32_t from;
        int faults;
        bool streams, resumable;
        mp_status ends;
        int retries;
    } rows[] = {{0, 1, true, false, MP_OK, 1},  {1, 1, true, false, MP_MODEL, 0}, {4, 1, true, false, MP_MODEL, 0},
                {1, 1, false, false, MP_OK, 1}, {4, 1, false, false, MP_OK, 1},   {4, 2, false, false, MP_MODEL, 1},
                {1, 1, true, true, MP_OK, 1},   {4, 1, true, true, MP_OK, 1},     {4, 2, true, true, MP_MODEL, 1},
                {4, 1, false, true, MP_OK, 1},  {4, 1, false, false, MP_INTERNAL, 1}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        fake fake;
        fake_init(&fake);
        fake.step_units = 1;
        mp_registry *registry = fake_registry(1, 0);
        fake_add(registry, "a", &fake, false);
        bool dies = rows[i].ends == MP_INTERNAL;
        fake_call *call = fake_call_create(5);
        call->fault = dies ? MP_INTERNAL : MP_MODEL;
        call->fault_from = rows[i].from;
        call->faults = rows[i].faults;
        call->streams = rows[i].streams;
        call->base.resumable = rows[i].resumable;
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), dies ? MP_OK : rows[i].ends);
        MP_CHECK_INT(fake_stats(registry).retries, rows[i].retries);
        MP_CHECK_INT(fake_stats(registry).worker_faults, rows[i].faults);
        MP_CHECK_INT(fake.preempted, rows[i].resumable);
        MP_CHECK_INT(fake_stats(registry).preemptions, 0);
        fake_end(registry);
    }
}

/* A request does not continue after a model file changed. */
MP_TEST(workers_fault_of_a_file) {
    for (uint32_t from = 0; from < 2; from++) {
        fake fake;
        fake_init(&fake);
        fake.step_units = 1;
        mp_registry *registry = fake_registry(1, 0);
        fake_add(registry, "a", &fake, false);
        fake_call *call = fake_call_faulty(MP_INTEGRITY, 1);
        call->units = 3;
        call->fault_from = from;
        call->streams = call->base.resumable = true;
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), from ? MP_INTEGRITY : MP_OK);
        fake_end(registry);
    }
}

/* If an engine is lost outside a step, the culprit is unknown: each request has one retry, two if another program
 * killed a process, and the model stays loaded. */
MP_TEST(workers_lost_before_a_step) {
    static const struct {
        bool external_kill, resumable;
        int losses;
        mp_status ends;
    } rows[] = {{false, true, 2, MP_RECV}, {true, false, 2, MP_OK}, {true, true, 3, MP_RECV}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
        for (int plans = 0; plans < 2; plans++) {
            fake fake;
            fake_init(&fake);
            fake.external_kill = rows[i].external_kill;
            mp_registry *registry = fake_registry(1, 0);
            fake_add(registry, "a", &fake, false);
            fake_call *call = fake_call_create(1);
            call->base.resumable = rows[i].resumable;
            atomic_store(plans ? &call->losses_at_plan : &call->losses_at_admit, rows[i].losses);
            MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), rows[i].ends);
            MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
            MP_CHECK_INT(fake_stats(registry).workers_spawned, rows[i].losses + 1);
            MP_CHECK_INT(fake_stats(registry).retries, rows[i].losses - (rows[i].ends != MP_OK));
            MP_CHECK_INT(fake_stats(registry).worker_faults, rows[i].losses);
            MP_CHECK_INT(fake_stats(registry).preemptions, 0);
            fake_end(registry);
        }
}

MP_TEST(workers_with_an_internal_error_are_replaced) {
    fake fake;
    fake_init(&fake);
    fake.workers = 4;
    mp_registry *registry = fake_registry(1, 0);
    fake_add(registry, "a", &fake, false);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    atomic_store(&fake.hold, true);
    mp_ticket *tickets[3];
    for (int i = 0; i < 3; i++)
        tickets[i] = fake_submit(registry, "a", i ? fake_call_create(1) : fake_call_faulty(MP_INTERNAL, 1), NULL);
    atomic_store(&fake.hold, false);
    for (int i = 0; i < 3; i++)
        MP_CHECK_INT(fake_finish(tickets[i]), MP_OK);
    MP_CHECK_INT(fake.loads, 1); /* the replacement took over the model */
    fake_end(registry);
}

MP_TEST(workers_that_crash_repeatedly_break_the_model) {
    fake fake;
    fake_init(&fake);
    fake.workers = 4;
    mp_registry *registry =
        fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 1, .breaker_threshold = -1});
    fake_add(registry, "a", &fake, false);
    mp_error error;
    mp_status status = MP_OK;
    int tries = 0;
    for (; tries < 20 && status != MP_NO_WORKERS; tries++) {
        mp_ticket *ticket = fake_submit(registry, "a", fake_call_faulty(MP_INTERNAL, 2), &status);
        if (!ticket)
            break;
        status = fake_wait(ticket, &error);
        MP_CHECK(status == MP_INTERNAL || status == MP_NO_WORKERS); /* failed in its own step, or while it was queued */
        mp_ticket_release(ticket);
    }
    MP_CHECK(!fake_submit(registry, "a", fake_call_create(1), &status));
    MP_CHECK_INT(status, MP_NO_WORKERS);
    MP_CHECK(tries <= 5);
    mp_entry_info info;
    fake_info(registry, "a", &info);
    MP_CHECK_STR(info.state, "failed");
    MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(10000), &error), &error); /* ignores the failure */
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_end(registry);
}

/* As if the breaker had been open for its whole backoff. */
static void end_backoff(mp_registry *registry) {
    mp_entry *entry = registry->slots[0].current;
    mp_mutex_lock(&entry->lock);
    entry->faults.breaker.open_until_ns = mp_sys_now_ns();
    mp_mutex_unlock(&entry->lock);
}

MP_TEST(workers_breaker_opens_and_closes) {
    fake fake;
    fake_init(&fake);
    mp_registry *registry = fake_registry_of((mp_registry_config){
        .threads = 1, .max_workers = 1, .breaker_threshold = 4, .breaker_backoff_ns = FAKE_MS(60000)});
    fake_add(registry, "a", &fake, false);
    mp_status status;
    mp_error error;
    mp_entry_info info;
    /* requests that are refused as unsupported are not faults */
    for (int i = 0; i < 10; i++) {
        fake_call *bad = fake_call_create(1);
        bad->refused = true;
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", bad, NULL)), MP_UNSUPPORTED);
    }
    for (int i = 0; i < 10; i++) { /* nor is lack of memory, in spite of the retry */
        fake_call *call = fake_call_faulty(MP_MEMORY_EXHAUSTED, i % 2 + 1);
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), i % 2 ? MP_MEMORY_EXHAUSTED : MP_OK);
    }
    MP_CHECK_INT(fake_stats(registry).worker_faults, 0);
    for (int i = 0; i < 4; i++) { /* a request counts once, whether or not its retry fails too */
        fake_info(registry, "a", &info);
        MP_CHECK_STR(info.breaker, "closed");
        fake_call *call = fake_call_faulty(MP_MODEL, i == 2 ? 1 : 2);
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), i == 2 ? MP_OK : MP_MODEL);
    }
    MP_CHECK_INT(fake_stats(registry).worker_faults, 3 * 2 + 1);
    fake_info(registry, "a", &info);
    MP_CHECK_STR(info.breaker, "open");
    MP_CHECK(!fake_submit(registry, "a", fake_call_create(1), &status));
    MP_CHECK_INT(status, MP_CIRCUIT_OPEN);
    MP_CHECK_INT(fake_stats(registry).circuit_rejections, 1);
    end_backoff(registry);
    /* half-open: three probes, no more */
    atomic_store(&fake.hold, true);
    mp_ticket *probes[3];
    for (int i = 0; i < 3; i++)
        probes[i] = fake_submit(registry, "a", fake_call_create(1), NULL);
    MP_CHECK(!fake_submit(registry, "a", fake_call_create(1), &status));
    MP_CHECK_INT(status, MP_CIRCUIT_OPEN);
    fake_info(registry, "a", &info);
    MP_CHECK_STR(info.breaker, "half-open");
    mp_ticket_cancel(probes[0]); /* a cancellation does not count for the breaker, and frees its probe */
    atomic_store(&fake.hold, false);
    mp_status ended = fake_finish(probes[0]);
    MP_CHECK(ended == MP_CANCELLED || ended == MP_OK); /* OK if its step ended before the cancellation */
    for (int i = 1; i < 3; i++)
        MP_CHECK_INT(fake_finish(probes[i]), MP_OK);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_info(registry, "a", &info);
    MP_CHECK_STR(info.breaker, "closed");
    /* a probe that fails opens the breaker again */
    for (int i = 0; i < 4; i++)
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_faulty(MP_MODEL, 2), NULL)), MP_MODEL);
    end_backoff(registry);
    mp_ticket *failing = fake_submit(registry, "a", fake_call_faulty(MP_MODEL, 9), NULL);
    MP_CHECK_STATUS(fake_wait(failing, &error), MP_MODEL, &error);
    mp_ticket_release(failing);
    fake_info(registry, "a", &info);
    MP_CHECK_STR(info.breaker, "open");
    fake_end(registry);
}

MP_TEST(workers_poison_request_is_quarantined) {
    fake fake;
    fake_init(&fake);
    mp_registry *registry = fake_registry(1, 0);
    fake_add(registry, "a", &fake, false);
    mp_status status;
    fake_call *poison = fake_call_faulty(MP_INTERNAL, 100);
    uint64_t fingerprint = poison->fingerprint;
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", poison, NULL)), MP_INTERNAL);
    int steps = fake.steps;
    poison = fake_call_faulty(MP_INTERNAL, 100);
    poison->fingerprint = fingerprint;
    MP_CHECK(!fake_submit(registry, "a", poison, &status));
    MP_CHECK_INT(status, MP_MODEL);
    MP_CHECK_INT(fake.steps, steps); /* the request reached no worker */
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_end(registry);
}
