/* Keys of a registry and operations on all of it: order of keys, removal, close, files that change, loads in spite of a
 * backoff, the clock of requests. */
#include <stdatomic.h>

#include "base/log.h"
#include "base/sys.h"
#include "mp_test.h"
#include "registry/maintenance.h"
#include "test_registry_fake.h"

/* --- keys --- */

typedef struct visited {
    int count;
    char keys[64][256];
} visited;

static void note_key(void *arg, const mp_entry_info *info) {
    visited *self = arg;
    MP_CHECK(self->count < 64);
    strcpy(self->keys[self->count++], info->key);
}

/* A key has 1 to 255 bytes. */
MP_TEST(registry_keys_have_a_length) {
    static const int lengths[] = {0, 1, 255, 256};
    fake fake;
    mp_error error;
    fake_init(&fake);
    mp_registry *registry = fake_registry(1, 0);
    for (int i = 0; i < 4; i++) {
        char key[257] = "";
        memset(key, 'k', (size_t)lengths[i]);
        mp_loader loader = fake_loader(&fake);
        const bool legal = i == 1 || i == 2;
        MP_CHECK_STATUS(mp_registry_add(registry, key, &loader, MP_ADD_NEW, &error),
                        legal ? MP_OK : MP_INVALID_ARGUMENT, &error);
        if (legal)
            MP_CHECK_INT(fake_finish(fake_submit(registry, key, fake_call_create(1), NULL)), MP_OK);
        else
            MP_CHECK_STR(error.message, i ? "`key` must have 1 to 255 bytes, got 256"
                                          : "`key` must have 1 to 255 bytes, got 0");
    }
    fake_end(registry);
}

/* Keys are visited in ascending order and found, in whatever order they came and while others are removed. */
MP_TEST(registry_keys_are_ordered) {
    enum { KEYS = 23 };
    fake fake;
    mp_error error;
    fake_init(&fake);
    mp_registry *registry = fake_registry(1, 0);
    char keys[KEYS][16];
    bool present[KEYS] = {0};
    for (int i = 0; i < KEYS; i++)
        snprintf(keys[i], sizeof keys[i], "k%02d", i);
    for (int i = 0; i < KEYS * 3 / 2; i++) { /* 7 and 23 have no common factor */
        int at = i * 7 % KEYS;
        if (present[at])
            MP_CHECK_OK(mp_registry_remove(registry, keys[at], 0, &error), &error);
        else
            fake_add(registry, keys[at], &fake, false);
        present[at] = !present[at];
        visited visited = {0};
        MP_CHECK_OK(mp_registry_visit(registry, note_key, &visited, &error), &error);
        int count = 0;
        for (int j = 0; j < KEYS; j++) {
            if (present[j]) {
                MP_CHECK(count < visited.count);
                MP_CHECK_STR(visited.keys[count++], keys[j]);
            }
            MP_CHECK_STATUS(mp_registry_keep_alive(registry, keys[j], FAKE_MS(1000), &error),
                            present[j] ? MP_OK : MP_UNKNOWN_MODEL, &error);
        }
        MP_CHECK_INT(visited.count, count);
    }
    mp_ticket *ticket;
    mp_submit_options options = {0};
    MP_CHECK_INT(mp_registry_submit(registry, "none", &fake_call_create(1)->base, &options, &ticket, NULL),
                 MP_UNKNOWN_MODEL);
    fake_end(registry);
}

/* --- removal --- */

static _Atomic int removals;

static void wait_until_removed(void *registry) {
    mp_error error;
    MP_CHECK_OK(mp_registry_wait_removed(registry, "a", fake_in_ms(10000), &error), &error);
    atomic_fetch_add(&removals, 1);
}

MP_TEST(registry_keys_wait_until_removed) {
    fake fakes[2];
    mp_registry *registry = fake_registry(1, 0);
    mp_error error;
    mp_thread thread;
    for (int i = 0; i < 2; i++)
        fake_init(&fakes[i]);
    MP_CHECK_OK(mp_registry_wait_removed(registry, "a", 0, &error), &error); /* no such key */
    fake_add(registry, "a", &fakes[0], false);
    MP_CHECK_OK(mp_registry_wait_removed(registry, "a", 0, &error), &error); /* not removed */
    atomic_store(&fakes[0].hold, true);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fakes[0].in_steps, 1);
    MP_CHECK_STATUS(mp_registry_remove(registry, "a", fake_in_ms(1), &error), MP_TIMEOUT, &error);
    MP_CHECK_STR(error.message, "a: the removal did not end before the deadline (requests left: 1); it continues in "
                                "the background");
    MP_CHECK_STATUS(mp_registry_wait_removed(registry, "a", fake_in_ms(1), &error), MP_TIMEOUT, &error);
    MP_CHECK_STATUS(mp_registry_remove(registry, "a", fake_in_ms(1), &error), MP_TIMEOUT, &error); /* waits again */
    fake_add(registry, "a", &fakes[1], false); /* the key has a new entry */
    MP_CHECK_STATUS(mp_registry_wait_removed(registry, "a", fake_in_ms(1), &error), MP_TIMEOUT, &error);
    MP_CHECK_OK(mp_thread_start(&thread, "waits", wait_until_removed, registry, &error), &error);
    mp_sys_sleep_ns(FAKE_MS(5));
    MP_CHECK_INT(removals, 0);
    MP_CHECK_INT(fakes[0].loaders, 1);
    atomic_store(&fakes[0].hold, false);
    mp_thread_join(&thread);
    MP_CHECK_INT(removals, 1);
    MP_CHECK_INT(fakes[0].loaders, 0); /* everything is freed */
    MP_CHECK_INT(fakes[0].models, 0);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    MP_CHECK_OK(mp_registry_wait_removed(registry, "a", 0, &error), &error);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_end(registry);
}

/* --- close --- */

static void close_slowly(void *registry) { mp_registry_close(registry, FAKE_MS(100)); }

/* Every caller of close returns when the registry is closed, also one that came second. */
MP_TEST(registry_keys_second_close_waits_for_the_first) {
    fake fake;
    mp_thread thread;
    mp_error error;
    mp_ticket *ticket;
    mp_registry *registry = fake_begin(&fake, 1, &ticket);
    MP_CHECK_OK(mp_thread_start(&thread, "closes", close_slowly, registry, &error), &error);
    mp_sys_sleep_ns(FAKE_MS(20));
    mp_registry_close(registry, 0);
    MP_CHECK(mp_ticket_done(ticket));
    MP_CHECK_INT(fake.engines, 0);
    MP_CHECK_INT(fake.loaders, 0);
    mp_thread_join(&thread);
    MP_CHECK_INT(fake_finish(ticket), MP_SHUTTING_DOWN);
    fake_end(registry);
}

/* --- files that change --- */

/* A model file that changed opens the breaker, and every worker of the model leaves at once. */
MP_TEST(registry_keys_changed_files_end_all_workers) {
    fake fake;
    mp_error error;
    mp_entry_info info;
    mp_status status;
    fake_init(&fake);
    fake.workers = 2;
    fake.never_lost = true; /* idle workers sleep until they are woken */
    mp_registry *registry = fake_registry_of((mp_registry_config){
        .threads = 1, .max_workers = 2, .breaker_threshold = 1, .breaker_backoff_ns = FAKE_MS(60000)});
    fake_add(registry, "a", &fake, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    fake_until(&fake.engines, 2);
    do
        fake_info(registry, "a", &info);
    while (info.workers < 2);
    atomic_store(&fake.unhealthy, true);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_INTEGRITY);
    fake_until_state(registry, "a", "failed");
    fake_until_freed(&fake);
    fake_info(registry, "a", &info);
    MP_CHECK_STR(info.breaker, "open");
    MP_CHECK_INT(info.last_error, MP_INTEGRITY);
    MP_CHECK_INT(info.errors, 1);
    atomic_store(&fake.unhealthy, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    MP_CHECK(!fake_submit(registry, "a", fake_call_create(1), &status));
    MP_CHECK_INT(status, MP_CIRCUIT_OPEN);
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.worker_faults, 1);
    fake_end(registry);
}

/* --- loads --- */

static void count_loaded(const mp_log_record *record, void *arg) {
    int *counts = arg;
    counts[0] += strstr(record->text, "Loaded a in ") && strstr(record->text, " (2.5 MB)");
    counts[1] += strstr(record->text, "Loaded ") != NULL;
    counts[2] += strstr(record->text, " for a: loading -> ready") != NULL;
}

/* A load of two workers is reported once. */
MP_TEST(registry_keys_load_is_reported_once) {
    fake fake;
    mp_error error;
    int counts[3] = {0};
    fake_init(&fake);
    fake.workers = 2;
    fake.model_bytes = 2500 * 1000;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 2});
    fake_add(registry, "a", &fake, false);
    mp_log_set_level(MP_LOG_DEBUG);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    for (uint64_t end = fake_in_ms(10000); counts[2] < 2 && mp_sys_now_ns() < end; mp_sys_sleep_ns(FAKE_MS(1)))
        mp_log_drain(count_loaded, counts);
    mp_registry_close(registry, 0);
    mp_log_drain(count_loaded, counts);
    MP_CHECK_INT(counts[2], 2);
    MP_CHECK_INT(counts[0], 1);
    MP_CHECK_INT(counts[1], 1);
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.loads, 1);
    MP_CHECK_INT(stats.workers_spawned, 2);
    fake_end(registry);
}

/* A caller that asks for a model gets it although its workers died and their backoff has not ended. */
MP_TEST(registry_keys_load_ignores_the_backoff_of_deaths) {
    fake fake;
    mp_error error;
    fake_init(&fake);
    mp_registry *registry =
        fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 1, .breaker_threshold = -1});
    fake_add(registry, "a", &fake, false);
    fake_call *call = fake_call_create(1);
    call->fault = MP_INTERNAL;
    call->faults = 2;
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), MP_INTERNAL);
    fake_until_state(registry, "a", "cold");
    MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(5000), &error), &error);
    fake_end(registry);
}

/* A loader that is refused, because its key exists, is freed, and the model under the key stays. */
MP_TEST(registry_keys_exist_once) {
    fake fake, second;
    mp_error error;
    fake_init(&fake);
    fake_init(&second);
    mp_registry *registry = fake_registry(1, 0);
    fake_add(registry, "a", &fake, false);
    mp_loader loader = fake_loader(&second);
    MP_CHECK_STATUS(mp_registry_add(registry, "a", &loader, MP_ADD_NEW, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_STR(error.message,
                 "`key` must be new, got \"a\", which exists already; pass `replace` to load another model under it");
    MP_CHECK_INT(second.loaders, 0);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    MP_CHECK_INT(fake.loads, 1);
    fake_end(registry);
}

/* --- the clock of requests --- */

static uint64_t never(void *arg, uint64_t now_ns) {
    (void)arg;
    (void)now_ns;
    return UINT64_MAX;
}

/* The first request with a limit makes the sleeping thread tick, although no thread reads the clock. */
MP_TEST(registry_keys_clock_ticks_without_readers) {
    mp_maintenance maintenance = {0};
    mp_pool *pool;
    mp_error error;
    mp_maintenance_init(&maintenance, never, NULL);
    MP_CHECK_OK(mp_pool_create("ticks", 1, &pool, &error), &error);
    mp_maintenance_at(&maintenance, pool, mp_sys_now_ns());
    uint64_t end = fake_in_ms(10000);
    while (atomic_load(&maintenance.next_ns) != UINT64_MAX && mp_sys_now_ns() < end)
        mp_sys_sleep_ns(FAKE_MS(1));
    mp_sys_sleep_ns(FAKE_MS(20)); /* it sleeps */
    uint64_t before = atomic_load(&maintenance.count);
    mp_maintenance_begin_timed(&maintenance);
    MP_CHECK_INT(atomic_load(&maintenance.count), before + 1);
    while (atomic_load(&maintenance.count) < before + 2 && mp_sys_now_ns() < end)
        mp_sys_sleep_ns(FAKE_MS(5));
    MP_CHECK(atomic_load(&maintenance.count) >= before + 2);
    mp_maintenance_end_timed(&maintenance);
    mp_maintenance_stop(&maintenance);
    mp_pool_destroy(pool);
    mp_maintenance_deinit(&maintenance);
}
