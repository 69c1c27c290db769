/* test_registry_replaced.c: a replacement that is replaced itself before it is loaded. */
#include "mp_test.h"
#include "base/sys.h"
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
