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
