/* sim_tiny.c: one model and two threads, which perform one operation each: small enough to run all schedules with few
 * preemptions. The seed chooses the two operations. */
#include "sim_world.h"

#ifdef MP_SIM

#include <string.h>

#include "sim_fake.h"

static const uint64_t MS = 1000 * 1000;

static struct {
    mp_registry *registry;
    mp_ticket *ticket; /* the request's ticket, for the other thread */
    bool closing, removed, cancelled;
} t;

static void require(mp_status status, bool fine, const mp_error *error) {
    if (status != MP_OK && !fine)
        sim_fail("%s: %s", mp_status_find(status)->name, error->message);
}

static void finish(mp_ticket *ticket, const sim_call *call) {
    mp_error error;
    uint64_t progress;
    SIM_CHECK(mp_ticket_wait(ticket, UINT64_MAX, 0, &progress) && progress == UINT64_MAX);
    mp_status status = mp_ticket_status(ticket, &error);
    require(status, (status == MP_SHUTTING_DOWN && t.closing) || (status == MP_CANCELLED && t.cancelled), &error);
    SIM_CHECK(status != MP_OK || call->finished == 1);
    mp_ticket_release(ticket);
}

static void call(void) {
    mp_error error;
    mp_ticket *ticket;
    sim_call *call = sim_fakes_call(2);
    mp_submit_options options = {.priority = 2};
    mp_status status = mp_registry_submit(t.registry, "a", &call->base, &options, &ticket, &error);
    bool gone = status == MP_UNKNOWN_MODEL || status == MP_SEND;
    require(status, (status == MP_SHUTTING_DOWN && t.closing) || (gone && t.removed), &error);
    if (status == MP_OK)
        finish(ticket, call);
}

static void cancel(void) {
    t.cancelled = true;
    mp_ticket_cancel(t.ticket);
}
static void wait_too(void) { SIM_CHECK(mp_ticket_wait(t.ticket, UINT64_MAX, 0, NULL)); }
static void load(void) {
    mp_error error;
    mp_status status = mp_registry_load(t.registry, "a", false, 0, &error);
    bool gone = status == MP_UNKNOWN_MODEL || status == MP_SEND;
    require(status, (status == MP_SHUTTING_DOWN && t.closing) || (gone && t.removed), &error);
}
static void evict(void) {
    mp_error error;
    require(mp_registry_evict(t.registry, "a", 0, &error), t.closing || t.removed, &error);
}
static void take_out(void) {
    mp_error error;
    t.removed = true;
    require(mp_registry_remove(t.registry, "a", 0, &error), false, &error);
    SIM_CHECK(fakes.models[0].models == 0 && fakes.models[0].engines == 0 && fakes.models[0].loaders == 0);
}
/* A request on its way to the old entry reaches the new one, or its caller gets an error. */
static void exchange(void) {
    mp_error error;
    take_out();
    mp_loader loader = sim_fakes_loader(sim_fakes_model());
    require(mp_registry_add(t.registry, "a", &loader, MP_ADD_NEW, &error), false, &error);
    call();
}
static void replace(void) {
    mp_error error;
    mp_loader loader = sim_fakes_loader(sim_fakes_model());
    require(mp_registry_add(t.registry, "a", &loader, MP_ADD_REPLACE, &error), t.closing, &error);
}
static void close_it(void) {
    t.closing = true;
    mp_registry_close(t.registry, 5 * MS);
}

typedef struct script {
    bool submitted; /* a request is submitted before the two threads start, and both have its ticket */
    void (*one)(void), (*other)(void);
    mp_policy policy; /* policy of all requests; if not the default: two compute threads and two workers */
} script;
static const script scripts[] = {
    {.one = call, .other = call},
    {.one = load, .other = load},
    {.one = call, .other = close_it},
    {.one = load, .other = close_it},
    {.one = call, .other = evict},
    {.one = call, .other = take_out},
    {.one = call, .other = replace},
    {.submitted = true, .one = cancel, .other = wait_too},
    {.submitted = true, .one = cancel, .other = close_it},
    {.submitted = true, .one = cancel, .other = evict},
    {.submitted = true, .one = wait_too, .other = evict},
    {.one = evict, .other = load},
    {.one = close_it, .other = close_it},
    {.one = call, .other = call, .policy = MP_POLICY_SHARED},
    {.one = call, .other = call, .policy = MP_POLICY_PACK},
    {.one = call, .other = call, .policy = MP_POLICY_P2C},
    {.one = call, .other = call, .policy = MP_POLICY_SEQUENTIAL},
    {.one = call, .other = exchange},
    {.submitted = true, .one = wait_too, .other = take_out},
    {.submitted = true, .one = wait_too, .other = exchange},
    {.submitted = true, .one = cancel, .other = take_out},
};
const int sim_tiny_scripts = sizeof(scripts) / sizeof(scripts[0]);

static void other_main(void *arg) { ((const script *)arg)->other(); }

void sim_tiny(void *world) {
    (void)world;
    const script *script = &scripts[sim_get_setup()->seed % (uint64_t)sim_tiny_scripts];
    mp_error error;
    memset(&t, 0, sizeof(t));
    sim_fakes_begin(script->policy ? 2 : 1);
    mp_registry_config config = {.threads = fakes.threads,
                                 .max_workers = fakes.threads,
                                 .spin_ns = 1,
                                 .memory_limit = 1000 * 1000,
                                 .step_budget_ns = 25 * MS};
    for (int i = 0; i < MP_CAPABILITY_COUNT; i++)
        config.policy[i] = script->policy;
    SIM_CHECK(mp_registry_create(&config, &t.registry, &error) == MP_OK);
    mp_loader loader = sim_fakes_loader(sim_fakes_model());
    SIM_CHECK(mp_registry_add(t.registry, "a", &loader, MP_ADD_NEW, &error) == MP_OK);
    sim_call *early = NULL;
    if (script->submitted) {
        mp_submit_options options = {.priority = 2};
        early = sim_fakes_call(2);
        require(mp_registry_submit(t.registry, "a", &early->base, &options, &t.ticket, &error), false, &error);
    }
    mp_thread thread;
    SIM_CHECK(mp_thread_start(&thread, "other", other_main, (void *)(uintptr_t)script, &error) == MP_OK);
    script->one();
    mp_thread_join(&thread);
    if (t.ticket)
        finish(t.ticket, early);
    t.closing = true;
    mp_registry_destroy(t.registry);
    sim_fakes_end();
}

#endif
