/* Calls of registry.h after the close and without an error; a sweep and a visit that get no memory. */
#include "mp_test.h"
#include "registry/state.h"
#include "test_registry_fake.h"

enum { THREADS = 2 };

static void count(mp_lease *lease, void *calls) {
    (void)lease;
    ++*(int *)calls;
}

static void visit_nothing(void *arg, const mp_entry_info *info) { (void)arg, (void)info; }

#ifdef MP_SEAM
static void count_visits(void *visits, const mp_entry_info *info) {
    (void)info;
    ++*(int *)visits;
}
#endif

/* A call after the close leaves `registry->inside` at 0: another close would wait for it. */
MP_TEST(registry_calls_after_the_close) {
    fake fake;
    mp_error error;
    mp_status status;
    mp_registry_stats stats;
    int computed = 0;
    mp_registry *registry = fake_begin(&fake, THREADS, NULL);
    mp_registry_close(registry, 0);
    for (int i = 0; i < 9; i++) {
        switch (i) {
        case 0: mp_registry_maintain(registry); break;
        case 1: MP_CHECK_INT(mp_registry_compute(registry, 0, count, &computed, &error), MP_SHUTTING_DOWN); break;
        case 2: MP_CHECK_INT(mp_registry_load(registry, "a", false, 0, &error), MP_SHUTTING_DOWN); break;
        case 3: MP_CHECK_INT(mp_registry_evict(registry, "a", 0, &error), MP_SHUTTING_DOWN); break;
        case 4: MP_CHECK_INT(mp_registry_remove(registry, "a", 0, &error), MP_SHUTTING_DOWN); break;
        case 5: MP_CHECK_INT(mp_registry_keep_alive(registry, "a", 1, &error), MP_SHUTTING_DOWN); break;
        case 6: MP_CHECK_OK(mp_registry_visit(registry, visit_nothing, NULL, &error), &error); break;
        case 7: mp_registry_get_stats(registry, &stats); break;
        case 8:
            MP_CHECK(!fake_submit(registry, "a", fake_call_create(1), &status));
            MP_CHECK_INT(status, MP_SHUTTING_DOWN);
            break;
        }
        MP_CHECK_INT(registry->inside, 0);
    }
    MP_CHECK_INT(computed, 0);
    fake_end(registry);
}

#ifdef MP_SEAM

static void *no_memory(size_t bytes, size_t alignment) {
    (void)bytes, (void)alignment;
    return NULL;
}

/* A sweep that gets no memory for its list of entries is repeated after 100 ms. */
MP_TEST(registry_calls_sweep_without_memory) {
    mp_registry *registry = fake_registry(THREADS, 0);
    mp_maintenance *maintenance = &registry->services->maintenance;
    mp_sys_table.alloc = no_memory;
    uint64_t next = maintenance->sweep(maintenance->arg, 5000);
    mp_sys_table.alloc = mp_sys_real.alloc;
    MP_CHECK_INT(next, 5000 + FAKE_MS(100));
    fake_end(registry);
}

/* A visit that gets no memory for its snapshot fails. Its caller must not take the registry for an empty one. */
MP_TEST(registry_calls_visit_without_memory) {
    fake fake;
    mp_error error;
    int visits = 0;
    mp_registry *registry = fake_begin(&fake, THREADS, NULL);
    mp_sys_table.alloc = no_memory;
    mp_status status = mp_registry_visit(registry, count_visits, &visits, &error);
    mp_status without_error = mp_registry_visit(registry, count_visits, &visits, NULL);
    mp_sys_table.alloc = mp_sys_real.alloc;
    MP_CHECK_STATUS(status, MP_MEMORY_EXHAUSTED, &error);
    MP_CHECK_INT(without_error, MP_MEMORY_EXHAUSTED);
    MP_CHECK_INT(visits, 0);
    MP_CHECK_OK(mp_registry_visit(registry, count_visits, &visits, &error), &error);
    MP_CHECK_INT(visits, 1);
    fake_end(registry);
}

#endif
