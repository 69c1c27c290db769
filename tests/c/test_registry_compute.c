/* Work that leases compute threads of a registry without being a request of a model: mp_registry_compute. */
#include "mp_test.h"
#include "registry/state.h"
#include "test_registry_fake.h"

enum { THREADS = 2 };

typedef struct seen {
    mp_registry *registry;
    int calls, threads, leased;
    mp_cpu_counts counts;
} seen;

static mp_cpu_allocator *cpus_of(const mp_registry *registry) { return registry->services->allocator_pinned; }

static void look(mp_lease *lease, void *arg) {
    seen *self = arg;
    self->calls++;
    self->threads = lease->threads;
    self->leased = mp_cpu_allocator_leased(cpus_of(self->registry));
    self->counts = mp_cpu_allocator_count(cpus_of(self->registry));
}

static void expect_idle(mp_registry *registry) {
    mp_cpu_counts counts;
    uint64_t end = fake_in_ms(20000);
    do { /* the thread of a worker that has left may still free it */
        counts = mp_cpu_allocator_count(cpus_of(registry));
        mp_sys_sleep_ns(FAKE_MS(1));
    } while ((counts.homes || counts.runnable) && mp_sys_now_ns() < end);
    MP_CHECK(counts.runnable == 0 && counts.homes == 0 && counts.waiting == 0);
    MP_CHECK_INT(mp_cpu_allocator_leased(cpus_of(registry)), 0);
    MP_CHECK_INT(registry->inside, 0);
}

MP_TEST(registry_compute_leases_all_free_threads) {
    mp_registry *registry = fake_registry(THREADS, 0);
    seen seen = {.registry = registry};
    mp_error error;
    MP_CHECK_OK(mp_registry_compute(registry, 0, look, &seen, &error), &error);
    MP_CHECK(seen.calls == 1 && seen.threads == THREADS && seen.leased == THREADS);
    MP_CHECK(seen.counts.runnable == 1 && seen.counts.homes == 1); /* it shares the CPUs as a worker does */
    expect_idle(registry);
    mp_registry_begin_shutdown(registry);
    MP_CHECK_STATUS(mp_registry_compute(registry, 0, look, &seen, &error), MP_SHUTTING_DOWN, &error);
    MP_CHECK_INT(seen.calls, 1);
    expect_idle(registry);
    fake_end(registry);
}

typedef struct patient {
    seen seen;
    mp_status status;
} patient;

static void compute_without_deadline(void *arg) {
    patient *self = arg;
    self->status = mp_registry_compute(self->seen.registry, 0, look, &self->seen, NULL);
}

MP_TEST(registry_compute_waits_for_a_load_until_its_deadline) {
    fake fake;
    mp_error error;
    mp_registry *registry = fake_registry(1, 0);
    seen seen = {.registry = registry};
    fake_init(&fake);
    fake.load_stalls = true; /* the load holds the only CPU */
    fake_add(registry, "a", &fake, false);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fake.loads, 1);
    MP_CHECK_STATUS(mp_registry_compute(registry, fake_in_ms(30), look, &seen, &error), MP_TIMEOUT, &error);
    MP_CHECK_STR(error.message, "no CPU was free in time");
    MP_CHECK_INT(seen.calls, 0);
    patient patient = {.seen = {.registry = registry}, .status = MP_INTERNAL};
    mp_thread thread;
    MP_CHECK_OK(mp_thread_start(&thread, "patient", compute_without_deadline, &patient, &error), &error);
    for (uint64_t end = fake_in_ms(20000); mp_sys_now_ns() < end && !mp_cpu_allocator_contended(cpus_of(registry));)
        mp_sys_sleep_ns(FAKE_MS(1));
    mp_sys_sleep_ns(FAKE_MS(60)); /* a wait is given up every 20 ms, if its deadline has passed */
    atomic_store(&fake.load_stalls, false);
    mp_thread_join(&thread);
    MP_CHECK(patient.status == MP_OK && patient.seen.calls == 1);
    MP_CHECK_OK(mp_registry_compute(registry, fake_in_ms(20000), look, &seen, &error), &error);
    MP_CHECK(seen.calls == 1 && seen.threads == 1);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    MP_CHECK_OK(mp_registry_remove(registry, "a", 0, &error), &error);
    expect_idle(registry);
    fake_end(registry);
}

static void visit_nothing(void *arg, const mp_entry_info *info) { (void)arg, (void)info; }

/* A call after the close leaves `registry->inside` at 0: another close would wait for it. */
MP_TEST(registry_compute_and_other_calls_after_the_close) {
    fake fake;
    mp_error error;
    mp_status status;
    mp_registry_stats stats;
    seen seen = {0};
    mp_registry *registry = seen.registry = fake_begin(&fake, THREADS, NULL);
    mp_registry_close(registry, 0);
    for (int i = 0; i < 9; i++) {
        switch (i) {
        case 0: mp_registry_maintain(registry); break;
        case 1: MP_CHECK_INT(mp_registry_compute(registry, 0, look, &seen, &error), MP_SHUTTING_DOWN); break;
        case 2: MP_CHECK_INT(mp_registry_load(registry, "a", false, 0, &error), MP_SHUTTING_DOWN); break;
        case 3: MP_CHECK_INT(mp_registry_evict(registry, "a", 0, &error), MP_SHUTTING_DOWN); break;
        case 4: MP_CHECK_INT(mp_registry_remove(registry, "a", 0, &error), MP_SHUTTING_DOWN); break;
        case 5: MP_CHECK_INT(mp_registry_keep_alive(registry, "a", 1, &error), MP_SHUTTING_DOWN); break;
        case 6: mp_registry_visit(registry, visit_nothing, NULL); break;
        case 7: mp_registry_get_stats(registry, &stats); break;
        case 8:
            MP_CHECK(!fake_submit(registry, "a", fake_call_create(1), &status));
            MP_CHECK_INT(status, MP_SHUTTING_DOWN);
            break;
        }
        MP_CHECK_INT(registry->inside, 0);
    }
    MP_CHECK_INT(seen.calls, 0);
    fake_end(registry);
}

/* Each function accepts NULL for `error`. */
MP_TEST(registry_compute_and_other_calls_without_an_error) {
    fake fake;
    mp_status status;
    mp_ticket *ticket;
    mp_registry *registry;
    mp_submit_options options = {.priority = 2};
    MP_CHECK_INT(mp_registry_create(&(mp_registry_config){.max_workers = -1}, &registry, NULL), MP_INVALID_ARGUMENT);
    registry = fake_begin(&fake, THREADS, NULL);
    atomic_store(&fake.load_failures, 1);
    mp_loader loader = fake_loader(&fake);
    MP_CHECK_INT(mp_registry_add(registry, "a", &loader, MP_ADD_NEW, NULL), MP_INVALID_ARGUMENT);
    MP_CHECK_INT(mp_registry_load(registry, "a", false, 0, NULL), MP_IO);
    registry->slots[0].current->retry_ns = fake_in_ms(100000); /* the backoff does not end */
    status = mp_registry_submit(registry, "a", &fake_call_create(1)->base, &options, &ticket, NULL);
    MP_CHECK_INT(status, MP_IO); /* the model is in its backoff */
    status = mp_registry_submit(registry, "b", &fake_call_create(1)->base, &options, &ticket, NULL);
    MP_CHECK_INT(status, MP_UNKNOWN_MODEL);
    MP_CHECK_INT(mp_registry_load(registry, "b", false, 0, NULL), MP_UNKNOWN_MODEL);
    MP_CHECK_INT(mp_registry_evict(registry, "b", 0, NULL), MP_UNKNOWN_MODEL);
    MP_CHECK_INT(mp_registry_remove(registry, "b", 0, NULL), MP_UNKNOWN_MODEL);
    MP_CHECK_INT(mp_registry_keep_alive(registry, "b", 1, NULL), MP_UNKNOWN_MODEL);
    MP_CHECK_INT(mp_registry_commit(registry, (const char *[]){"a"}, 1, 7, NULL), MP_SEND);
    mp_registry_close(registry, 0);
    MP_CHECK_INT(mp_registry_compute(registry, 0, look, NULL, NULL), MP_SHUTTING_DOWN);
    fake_end(registry);
}

#ifdef MP_SEAM

static void *no_memory(size_t bytes, size_t alignment) {
    (void)bytes, (void)alignment;
    return NULL;
}

/* A sweep that gets no memory for its list of entries is repeated after 100 ms. */
MP_TEST(registry_compute_and_a_sweep_without_memory) {
    mp_registry *registry = fake_registry(THREADS, 0);
    mp_maintenance *maintenance = &registry->services->maintenance;
    mp_sys_table.alloc = no_memory;
    uint64_t next = maintenance->sweep(maintenance->arg, 5000);
    mp_sys_table.alloc = mp_sys_real.alloc;
    MP_CHECK_INT(next, 5000 + FAKE_MS(100));
    fake_end(registry);
}

#endif
