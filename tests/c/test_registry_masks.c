/* Requests that wait for grammar masks, which a thread of their caller provides. */
#include "base/sys.h"
#include "mp_test.h"
#include "test_registry_fake.h"

enum { MASKED = 6, MASKED_UNITS = 40 };

typedef struct bringer {
    mp_ticket *tickets[MASKED];
    fake_call *calls[MASKED];
    _Atomic bool may;
} bringer;

/* Provides masks until all requests have ended. Calls mp_ticket_wake on each once more afterwards. */
static void bring_masks(void *arg) {
    bringer *all = arg;
    for (int over = 0; over < MASKED;) {
        over = 0;
        mp_sys_sleep_ns(FAKE_MS(1) / 16);
        for (int i = 0; i < MASKED; i++) {
            fake_call *call = all->calls[i];
            bool done = mp_ticket_done(all->tickets[i]);
            if (!done && atomic_load(&all->may) && atomic_load(&call->masks) == atomic_load(&call->done))
                atomic_fetch_add(&call->masks, 1);
            mp_ticket_wake(all->tickets[i]);
            over += done;
        }
    }
}

MP_TEST(registry_masks_come_from_another_thread) {
    fake fake;
    fake_init(&fake);
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 2, .max_workers = 1});
    fake_add(registry, "a", &fake, false);
    bringer all = {.may = false};
    mp_error error;
    for (int i = 0; i < MASKED; i++) {
        all.calls[i] = fake_call_create(MASKED_UNITS);
        atomic_store(&all.calls[i]->masks, 1); /* the first mask comes with the request */
        all.tickets[i] = fake_submit(registry, "a", all.calls[i], NULL);
    }
    mp_thread thread;
    MP_CHECK_OK(mp_thread_start(&thread, "masks", bring_masks, &all, &error), &error);
    for (int i = 0; i < MASKED; i++)
        while (atomic_load(&all.calls[i]->done) < 1)
            mp_sys_sleep_ns(FAKE_MS(1) / 4);
    for (int i = 0; i < 20; i++) /* served while all others wait for masks and are woken without need */
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(2), NULL)), MP_OK);
    for (int i = 0; i < MASKED; i++)
        MP_CHECK_INT((int)atomic_load(&all.calls[i]->done), 1);
    mp_ticket_cancel(all.tickets[0]); /* while it waits for a mask */
    MP_CHECK_INT(fake_wait(all.tickets[0], &error), MP_CANCELLED);
    atomic_store(&all.may, true);
    for (int i = 1; i < MASKED; i++) {
        MP_CHECK_INT(fake_wait(all.tickets[i], &error), MP_OK);
        MP_CHECK_INT((int)atomic_load(&all.calls[i]->done), MASKED_UNITS);
    }
    mp_thread_join(&thread);
    for (int i = 0; i < MASKED; i++)
        mp_ticket_release(all.tickets[i]);
    fake_end(registry);
}
