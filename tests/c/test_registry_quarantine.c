/* The quarantine refuses requests that make workers fail, but no innocent requests that were in the same step. */
#include <stdatomic.h>

#include "base/sys.h"
#include "mp_test.h"
#include "registry/faults.h"
#include "test_registry_fake.h"

enum { COMPANY = 4 };

/* Makes a registry in which a failing request takes down the worker and every request in its step. */
static mp_registry *start(fake *fake, int workers) {
    fake_init(fake);
    fake->whole = true;
    fake->workers = workers;
    fake->step_units = 1;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = workers,
                                                                  .max_workers = workers,
                                                                  .breaker_threshold = -1,
                                                                  .stall_timeout_ns = FAKE_MS(300),
                                                                  .maintenance_every_ns = FAKE_MS(10),
                                                                  .queue_capacity[MP_TEXT_EMBEDDING] = {32, 32}});
    fake_add(registry, "a", fake, false);
    return registry;
}

static fake_call *call_of(uint64_t fingerprint, int kills) {
    fake_call *call = fake_call_create(1);
    call->fingerprint = fingerprint;
    call->fault = MP_INTERNAL;
    atomic_store(&call->faults, kills);
    return call;
}

/* Submits `calls` while another request is in a step, so that all of them share the next step. */
static void submit_together(mp_registry *registry, fake *fake, fake_call **calls, int n, mp_ticket **tickets) {
    mp_error error;
    MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(10000), &error), &error);
    atomic_store(&fake->hold, true);
    mp_ticket *first = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fake->in_steps, 1);
    for (int i = 0; i < n; i++)
        tickets[i] = fake_submit(registry, "a", calls[i], NULL);
    atomic_store(&fake->hold, false);
    MP_CHECK_INT(fake_finish(first), MP_OK);
}

static mp_status once_as(mp_registry *registry, uint64_t fingerprint, int kills, mp_status fault) {
    mp_status status;
    fake_call *call = call_of(fingerprint, kills);
    call->fault = fault;
    mp_ticket *ticket = fake_submit(registry, "a", call, &status);
    return ticket ? fake_finish(ticket) : status;
}

static mp_status once(mp_registry *registry, uint64_t fingerprint, int kills) {
    return once_as(registry, fingerprint, kills, MP_INTERNAL);
}

/* Requests 1 to 3 are innocent, and share steps with two culprits, one after the other. */
MP_TEST(quarantine_spares_requests_beside_a_culprit) {
    fake fake;
    mp_registry *registry = start(&fake, 1);
    for (uint64_t culprit = 100; culprit < 102; culprit++) {
        fake_call *calls[COMPANY] = {call_of(culprit, 100), call_of(1, 0), call_of(2, 0), call_of(3, 0)};
        mp_ticket *tickets[COMPANY];
        submit_together(registry, &fake, calls, COMPANY, tickets);
        MP_CHECK_INT(fake_finish(tickets[0]), MP_INTERNAL);
        for (int i = 1; i < COMPANY; i++)
            MP_CHECK_INT(fake_finish(tickets[i]), MP_OK); /* its retry is in a step without the culprit */
        MP_CHECK_INT(once(registry, culprit, 100), MP_MODEL);
        MP_CHECK_INT(once(registry, 1, 0), MP_OK);
    }
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.worker_faults, 2 * 2); /* each culprit took down two workers */
    fake_end(registry);
}

/* External kills of workers put no request into quarantine, not even one that was alone in each of the steps. */
MP_TEST(quarantine_ignores_external_kills) {
    for (int external_kill = 0; external_kill < 2; external_kill++) {
        fake fake;
        mp_registry *registry = start(&fake, 1);
        fake.external_kill = external_kill;
        for (int i = 0; i < 3; i++)
            MP_CHECK_INT(once_as(registry, 100, 2, MP_RECV), i && !external_kill ? MP_MODEL : MP_RECV);
        MP_CHECK_INT(once(registry, 100, 0), external_kill ? MP_OK : MP_MODEL);
        fake_end(registry);
    }
}

/* Request 1 shares one fatal step with each of two culprits, without a success in between. Losses of shared steps make
 * a request only a suspect. */
MP_TEST(quarantine_two_culprits_at_once) {
    fake fake;
    mp_registry *registry = start(&fake, 1);
    fake_call *calls[] = {call_of(100, 100), call_of(1, 0), call_of(101, 100), call_of(1, 0)};
    mp_ticket *tickets[4];
    for (int i = 0; i < 4; i++)
        calls[i]->streams = true; /* no retry, because the caller has seen part of the result */
    for (int i = 0; i < 4; i++) {
        calls[i]->units = 3;
        calls[i]->fault_from = 1;
    }
    submit_together(registry, &fake, calls, 2, tickets);
    MP_CHECK_INT(fake_finish(tickets[0]), MP_INTERNAL);
    MP_CHECK_INT(fake_finish(tickets[1]), MP_INTERNAL);
    submit_together(registry, &fake, calls + 2, 2, tickets);
    MP_CHECK_INT(fake_finish(tickets[0]), MP_INTERNAL);
    mp_status innocent = fake_finish(tickets[1]);
    MP_CHECK_INT(innocent, MP_OK); /* a suspect, so it is alone in its steps */
    MP_CHECK_INT(once(registry, 1, 0), MP_OK);
    MP_CHECK_INT(once(registry, 100, 1), MP_INTERNAL); /* its second lost worker, alone in the step */
    MP_CHECK_INT(once(registry, 100, 1), MP_MODEL);
    fake_end(registry);
}

/* A request that was alone in two stalled steps is the culprit. */
MP_TEST(quarantine_of_a_request_that_stands_still_alone) {
    fake fake;
    mp_registry *registry = start(&fake, 1);
    mp_status status;
    for (int i = 0; i < 2; i++) {
        atomic_store(&fake.step_stalls, true);
        MP_CHECK_INT(once(registry, 1, 0), MP_RECV);
        atomic_store(&fake.step_stalls, false);
        while (atomic_load(&fake.in_steps)) /* the abandoned thread has not returned */
            mp_sys_sleep_ns(FAKE_MS(1));
    }
    int steps = fake.steps;
    MP_CHECK(!fake_submit(registry, "a", call_of(1, 0), &status));
    MP_CHECK_INT(status, MP_MODEL);
    MP_CHECK_INT(once(registry, 2, 0), MP_OK);
    MP_CHECK_INT(fake.steps - steps, 1);
    fake_end(registry);
}

/* Equal requests in one step are one suspect. Once one of them is quarantined, the others reach no worker. */
MP_TEST(quarantine_of_equal_requests) {
    fake fake;
    mp_registry *registry = start(&fake, 1);
    fake_call *calls[COMPANY];
    mp_ticket *tickets[COMPANY];
    for (int i = 0; i < COMPANY; i++)
        calls[i] = call_of(100, 100);
    submit_together(registry, &fake, calls, COMPANY, tickets);
    int refused = 0;
    for (int i = 0; i < COMPANY; i++) {
        mp_status status = fake_finish(tickets[i]);
        MP_CHECK(status == MP_INTERNAL || status == MP_MODEL);
        refused += status == MP_MODEL;
    }
    MP_CHECK_INT(refused, COMPANY - 1);
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.worker_faults, 2);
    fake_end(registry);
}

/* Requests without a fingerprint are never refused, and their failures are recorded for no request. */
MP_TEST(quarantine_needs_a_fingerprint) {
    fake fake;
    mp_registry *registry = start(&fake, 1);
    for (int round = 0; round < 2; round++) { /* with an empty table, and with one that refuses a request */
        for (int kills = 0; kills <= 2; kills += 2) {
            fake_call *call = call_of(0, kills);
            call->base.fingerprint = NULL;
            MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), kills ? MP_INTERNAL : MP_OK);
            mp_error error; /* five lost workers within a minute would break the model */
            MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(10000), &error), &error);
        }
        MP_CHECK_INT(once(registry, 100, round ? 0 : 2), round ? MP_MODEL : MP_INTERNAL);
    }
    fake_end(registry);
}

/* A retry that succeeds clears its request: the loss had another cause. */
MP_TEST(quarantine_forgets_the_loss_of_a_request_that_succeeds) {
    fake fake;
    mp_registry *registry = start(&fake, 1);
    for (int i = 0; i < 3; i++)
        MP_CHECK_INT(once(registry, 100, 1), MP_OK);
    fake_end(registry);
}

/* --- the table by itself --- */

MP_TEST(quarantine_counts_suspicions) {
    static mp_quarantine q;
    MP_CHECK(mp_quarantine_is_empty(&q));
    for (int i = 0; i < 5; i++)
        MP_CHECK_INT(mp_quarantine_add(&q, 1, false, 10), 1); /* shared steps: never more than a suspect */
    mp_quarantine_clear(&q, 1, 11);
    MP_CHECK(mp_quarantine_is_empty(&q));
    MP_CHECK_INT(mp_quarantine_add(&q, 2, false, 12), 1);
    MP_CHECK_INT(mp_quarantine_add(&q, 2, true, 13), MP_QUARANTINE_FAULTS);
    MP_CHECK_INT(mp_quarantine_add(&q, 3, true, 14), 1);
    mp_quarantine_clear(&q, 3, 15); /* a success cancels one loss */
    MP_CHECK_INT(mp_quarantine_check(&q, 3, 16), 0);
    MP_CHECK_INT(mp_quarantine_add(&q, 3, true, 16), 1);
    MP_CHECK_INT(mp_quarantine_add(&q, 3, true, 17), MP_QUARANTINE_FAULTS);
    mp_quarantine_clear(&q, 3, 18);
    MP_CHECK_INT(mp_quarantine_check(&q, 3, 18), 1);
    MP_CHECK_INT(mp_quarantine_add(&q, 3, true, 19), MP_QUARANTINE_FAULTS);
    /* suspects that fill the table do not displace refused requests */
    for (uint64_t i = 0; i < 3 * MP_QUARANTINE_ROWS; i++)
        mp_quarantine_add(&q, 1000 + i, false, 20 + i);
    MP_CHECK_INT(mp_quarantine_check(&q, 2, 2000), MP_QUARANTINE_FAULTS);
    MP_CHECK_INT(mp_quarantine_check(&q, 3, 2000), MP_QUARANTINE_FAULTS);
    MP_CHECK_INT(mp_quarantine_check(&q, 1000 + 3 * MP_QUARANTINE_ROWS - 1, 2000), 1);
    MP_CHECK_INT(mp_quarantine_check(&q, 1000, 2000), 0); /* the oldest row was replaced */
    /* a row expires 10 minutes after its last loss */
    const uint64_t TEN_MINUTES = 600ull * 1000 * 1000 * 1000;
    mp_quarantine_add(&q, 4, true, 3000);
    mp_quarantine_add(&q, 4, true, 5000);
    MP_CHECK_INT(mp_quarantine_check(&q, 4, 5000 + TEN_MINUTES - 1), MP_QUARANTINE_FAULTS);
    MP_CHECK_INT(mp_quarantine_check(&q, 4, 5000 + TEN_MINUTES), 0);
    /* every row expires, which empties the table */
    MP_CHECK_INT(mp_quarantine_check(&q, 2, 601ull * 1000 * 1000 * 1000), 0);
    MP_CHECK(mp_quarantine_is_empty(&q));
}

/* The first external kill of a process does not use up the retry of a request that can continue. */
MP_TEST(workers_requests_survive_one_external_kill) {
    static const struct {
        bool external_kill, resumable;
        int faults;
        mp_status ends;
        int retries;
    } rows[] = {{true, true, 2, MP_OK, 2},    {true, true, 3, MP_RECV, 2}, {true, false, 1, MP_OK, 1},
                {true, false, 2, MP_RECV, 1}, {false, true, 1, MP_OK, 1},  {false, true, 2, MP_RECV, 1}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        fake fake;
        mp_registry_stats stats;
        fake_init(&fake);
        fake.step_units = 1;
        fake.external_kill = rows[i].external_kill;
        mp_registry *registry = fake_registry(1, 0);
        fake_add(registry, "a", &fake, false);
        fake_call *call = fake_call_create(5);
        call->fault = MP_RECV;
        call->fault_from = 2;
        call->faults = rows[i].faults;
        call->streams = call->base.resumable = rows[i].resumable;
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), rows[i].ends);
        mp_registry_get_stats(registry, &stats);
        MP_CHECK_INT(stats.retries, rows[i].retries);
        fake_end(registry);
    }
}
