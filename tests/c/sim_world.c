/* sim_world.c: see sim_world.h. */
#include "sim_world.h"

#ifdef MP_SIM

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "registry/registry.h"
#include "sim_fake.h"

#if __has_include("registry/audit.h")
#include "registry/audit.h"
#define HAS_AUDIT 1
#endif

enum { CALLERS = 6, KEYS = 5, MINE = 4, RECORDS = 64 };
static const uint64_t MS = 1000 * 1000, SECOND = 1000ull * 1000 * 1000;

typedef struct record { /* a call that was accepted */
    mp_ticket *ticket;
    sim_call *call;
    uint64_t deadline_ns;
    bool cancelled;
} record;

typedef struct caller {
    int number, fibre;
    /* what it waits for now, for the look at rest */
    mp_ticket *awaited;
    const char *loading, *submitting;
    mp_notifier *notifier;
} caller;

static struct {
    const sim_world *kind;
    mp_registry *registry;
    caller callers[CALLERS];
    int caller_count, key_count, capacity, closers;
    sim_model *models[KEYS];
    record kept[RECORDS]; /* looked at again after the end */
    int kept_count;
    mp_ticket *offered; /* one caller's reference for another */
    record offered_record;
    /* what happened, and so explains how a call may end */
    bool shutting_down, swapped, removed, refused_memory, refused_threads, load_fails, stalls, tight, files_change;
    uint64_t steps;
} w;

static const char *const keys[KEYS] = {"a", "b", "c", "d", "e"};

static int of(int n) { return (int)sim_below((uint64_t)n); }
static bool percent(int n) { return of(100) < n; }

/* --- looks from outside --- */

static void look_at_entry(void *arg, const mp_entry_info *info) {
    (void)arg;
    bool idle = strcmp(info->state, "ready") == 0, busy = strcmp(info->state, "busy") == 0;
    if (info->queued > 0 && (idle || strcmp(info->state, "cold") == 0 || strcmp(info->state, "failed") == 0))
        sim_fail("%d calls wait for %s, which is %s, and everybody sleeps", info->queued, info->key, info->state);
    for (int i = 0; i < w.caller_count; i++) {
        const caller *c = &w.callers[i];
        if (!sim_is_blocked(c->fibre))
            continue;
        if (c->submitting && strcmp(c->submitting, info->key) == 0 && info->queued < w.capacity && !w.swapped)
            sim_fail("caller %d waits for room in the queue of %s, which has room", i, info->key);
        if (c->loading && strcmp(c->loading, info->key) == 0 && (idle || busy) && !w.swapped)
            sim_fail("caller %d waits for %s to be loaded, which is %s", i, info->key, info->state);
    }
}

static void look_at_rest(void *arg) {
    (void)arg;
    for (int i = 0; i < w.caller_count; i++)
        if (w.callers[i].awaited && sim_is_blocked(w.callers[i].fibre) && mp_ticket_done(w.callers[i].awaited))
            sim_fail("caller %d waits for a call that is done", i);
    if (w.registry)
        mp_registry_visit(w.registry, look_at_entry, NULL);
}

static void look_at_step(void *arg) {
    (void)arg;
#ifdef HAS_AUDIT
    mp_error error;
    mp_error_clear(&error);
    if (w.registry && w.steps++ % 4 == 0 && mp_registry_audit(w.registry, sim_is_held, &error) != MP_OK)
        sim_fail("%s", error.message);
#endif
}

/* Why a call, a load or whatever ended so. */
static void check_status(mp_status status, const mp_error *error, const record *r, const char *what) {
    bool fine = false;
    switch (status) {
    case MP_OK:
        fine = true;
        break;
    case MP_TIMEOUT:
        fine = r->deadline_ns && sim_now() >= r->deadline_ns;
        break;
    case MP_CANCELLED:
        fine = r->cancelled || w.stalls || w.shutting_down;
        break;
    case MP_SHUTTING_DOWN:
        fine = w.shutting_down;
        break;
    case MP_UNKNOWN_MODEL:
        fine = w.removed;
        break;
    case MP_INVALID_ARGUMENT:
        fine = (r->call && r->call->bad_argument) || (!r->call && w.swapped);
        break;
    case MP_UNSUPPORTED:
        fine = r->call && r->call->refused;
        break;
    case MP_NUMERIC:
        fine = r->call && r->call->numeric;
        break;
    case MP_IO:
    case MP_MODEL:
        fine = w.load_fails;
        break;
    case MP_INTEGRITY:
        fine = w.files_change;
        break;
    case MP_MEMORY_EXHAUSTED:
        fine = w.refused_memory || w.tight;
        break;
    case MP_SPAWN_FAILED:
        fine = w.refused_threads || w.refused_memory || w.load_fails;
        break;
    case MP_SPAWN_TIMEOUT:
        fine = w.stalls;
        break;
    case MP_CIRCUIT_OPEN:
    case MP_NO_WORKERS:
        fine = w.load_fails || w.stalls || w.files_change || w.refused_memory || w.refused_threads;
        break;
    case MP_OVERLOADED:
        fine = !r->ticket;
        break;
    default:
        break;
    }
    if (!fine)
        sim_fail("%s ended in %s without a cause: %s", what, mp_status_find(status)->name, error->message);
    if (status != MP_OK && error->code != status)
        sim_fail("%s ended in %s, but its error says %s", what, mp_status_find(status)->name,
                 mp_status_find(error->code)->name);
}

static void check_end(const record *r) {
    mp_error error;
    mp_error_clear(&error);
    SIM_CHECK(mp_ticket_done(r->ticket));
    mp_status status = mp_ticket_status(r->ticket, &error);
    uint64_t submitted, started, finished;
    mp_ticket_times(r->ticket, &submitted, &started, &finished);
    SIM_CHECK(submitted && finished >= submitted && (!started || (started >= submitted && finished >= started)));
    SIM_CHECK(mp_ticket_position(r->ticket) == -1);
    SIM_CHECK(!r->call->admitted && !r->call->saved);
    check_status(status, &error, r, "a call");
    if (status == MP_OK)
        SIM_CHECK(r->call->finished == 1 && r->call->done == r->call->units && !r->call->bad_argument &&
                  !r->call->refused && !r->call->numeric);
    if (status == MP_TIMEOUT)
        SIM_CHECK(finished >= r->deadline_ns);
}

/* --- what callers do --- */

static bool wait(caller *self, const record *r, uint64_t seen, uint64_t deadline_ns, uint64_t *progress) {
    self->awaited = r->ticket;
    bool moved = mp_ticket_wait(r->ticket, seen, deadline_ns, progress);
    self->awaited = NULL;
    if (!moved)
        SIM_CHECK(deadline_ns && sim_now() >= deadline_ns);
    return moved;
}

static void wait_to_end(caller *self, record *r) {
    uint64_t progress = 0, seen = 0;
    if (percent(50)) {
        wait(self, r, UINT64_MAX, 0, &progress);
    } else {
        do { /* a stream */
            wait(self, r, seen, 0, &progress);
            SIM_CHECK(progress > seen);
            seen = progress;
        } while (progress != UINT64_MAX);
    }
    SIM_CHECK(progress == UINT64_MAX);
    check_end(r);
}

static void wait_notified(caller *self, record *r) {
    uint64_t ids[4];
    if (!mp_ticket_bind(r->ticket, self->notifier, 7)) {
        SIM_CHECK(w.refused_memory);
        return;
    }
    for (bool done = false; !done;) {
        done = mp_ticket_done(r->ticket);
        mp_sys_sleep_ns(MS);
        int n = mp_notifier_take(self->notifier, ids, 4);
        SIM_CHECK(n <= 1 && (n == 0 || ids[0] == 7));
        if (n && mp_ticket_done(r->ticket))
            break;
        if (done && !n)
            sim_fail("caller %d was not notified of the end", self->number);
    }
}

static void cancel(record *r) {
    r->cancelled = true;
    mp_ticket_cancel(r->ticket);
}

static void let_go(record *r) {
    if (w.kept_count < RECORDS && percent(20)) {
        w.kept[w.kept_count++] = *r; /* looked at again after the end */
        return;
    }
    r->call->destroyed_is_error = false;
    mp_ticket_release(r->ticket);
}

static void follow(caller *self, record *r) {
    mp_error error;
    switch (of(8)) {
    case 0: /* leaves early */
        r->call->destroyed_is_error = false;
        mp_ticket_release(r->ticket);
        return;
    case 1:
        cancel(r);
        break;
    case 2: { /* waits for a while, then cancels */
        uint64_t progress;
        if (!wait(self, r, UINT64_MAX, sim_now() + (uint64_t)of(20) * MS / 4 + 1, &progress))
            cancel(r);
        break;
    }
    case 3:
        if (self->notifier)
            wait_notified(self, r);
        break;
    case 4: { /* asks where it stands */
        int position = mp_ticket_position(r->ticket);
        SIM_CHECK(position >= -1 && position <= RECORDS);
        if (mp_ticket_done(r->ticket))
            mp_ticket_status(r->ticket, &error);
        break;
    }
    case 5: /* another may wait, or cancel it, too */
        if (!w.offered) {
            w.offered_record = *r;
            w.offered_record.cancelled = r->cancelled = true;
            w.offered = mp_ticket_pin(r->ticket);
        }
        break;
    default:
        break;
    }
    wait_to_end(self, r);
    let_go(r);
}

static bool may_give_up(void *arg) {
    (void)arg;
    return percent(30);
}

static bool submit(caller *self, record *r) {
    static const uint32_t units[] = {1, 1, 2, 3, 8};
    mp_error error;
    mp_error_clear(&error);
    *r = (record){0};
    sim_call *call = sim_fakes_call(units[of(5)]);
    if (!call)
        return false;
    call->bad_argument = percent(3);
    call->refused = percent(3);
    call->numeric = percent(3);
    if (w.kind->memory) {
        call->memory = 1 + of(4);
        call->memory_a_step = of(3);
        call->keeps_state = percent(50);
    }
    r->call = call;
    mp_submit_options options = {.priority = (uint8_t)of(5), .lane = (uint8_t)of(2), .tenant = (uint32_t)of(3)};
    if (percent(30))
        r->deadline_ns = options.deadline_ns = sim_now() + 1 + sim_below(30 * MS);
    options.fail_fast = percent(30);
    if (percent(20))
        options.give_up = may_give_up;
    const char *key = keys[of(w.key_count)];
    call->destroyed_is_error = false;
    sim_call before = *call;
    self->submitting = options.fail_fast ? NULL : key;
    mp_status status = mp_registry_submit(w.registry, key, &call->base, &options, &r->ticket, &error);
    self->submitting = NULL;
    if (status == MP_OK) {
        call->destroyed_is_error = true; /* the caller's reference keeps it */
        return true;
    }
    SIM_CHECK(!r->ticket);
    r->call = &before; /* it is gone */
    r->cancelled = options.give_up != NULL;
    check_status(status, &error, r, "submit");
    return false;
}

static void draw_script(sim_model *model) {
    static const uint64_t loads[] = {0, 1, 5, 20, 60}, steps[] = {0, 1, 2, 5};
    model->load_ns = loads[of(5)] * MS;
    model->step_ns = steps[of(4)] * MS;
    model->step_units = (uint32_t)of(3);
    model->plan_items = of(3);
    model->lanes = 1 + of(fakes.lanes);
    if (w.kind->memory) {
        model->memory = 4 + of(12);
        model->model_bytes = 20000 + 10000 * (uint64_t)of(4);
        model->engine_bytes = 1000;
    }
    if (w.kind->faults && percent(40)) {
        model->load_failures = of(3);
        model->engine_failures = percent(20);
        model->stall_ns = percent(20) ? 400 * MS : 0;
        w.load_fails |= model->load_failures || model->engine_failures;
        w.stalls |= model->stall_ns != 0;
    }
}

static void add(const char *key, bool replace, record *r) {
    mp_error error;
    mp_error_clear(&error);
    sim_model *model = sim_fakes_model();
    draw_script(model);
    mp_loader loader = sim_fakes_loader(model);
    mp_status status = mp_registry_add(w.registry, key, &loader, replace, &error);
    check_status(status, &error, r, "add");
}

static uint64_t some_deadline(record *r) {
    r->deadline_ns = percent(50) ? 0 : sim_now() + 1 + sim_below(60 * MS);
    return r->deadline_ns;
}

static void operate(caller *self, record *r) {
    mp_error error;
    mp_error_clear(&error);
    const char *key = keys[of(w.key_count)];
    if (percent(w.kind->swaps)) {
        w.swapped = true;
        if (percent(40)) {
            w.removed = true;
            mp_status status = mp_registry_remove(w.registry, key, some_deadline(r), &error);
            check_status(status, &error, r, "remove");
        } else if (fakes.count < SIM_FAKES) {
            add(key, percent(80), r);
        }
        return;
    }
    switch (of(4)) {
    case 0: {
        self->loading = key;
        mp_status status = mp_registry_load(w.registry, key, percent(30), some_deadline(r), &error);
        self->loading = NULL;
        check_status(status, &error, r, "load");
        break;
    }
    case 1:
        check_status(mp_registry_evict(w.registry, key, some_deadline(r), &error), &error, r, "evict");
        break;
    case 2: {
        mp_registry_stats stats;
        mp_registry_get_stats(w.registry, &stats);
        uint64_t over = stats.completed + stats.errors + stats.timeouts + stats.cancelled + stats.queue_full_rejections;
        SIM_CHECK(over <= stats.total_requests && stats.lanes_leased <= stats.lanes);
        break;
    }
    default:
        mp_sys_sleep_ns(1 + sim_below(10 * MS));
        if (w.kind->faults && percent(20)) {
            w.stalls = true;
            sim_clock_jump(600 * SECOND);
        } else if (w.kind->faults && percent(20)) {
            w.files_change = true;
            fakes.models[of(fakes.count)].unhealthy = percent(50);
        }
        break;
    }
}

static void caller_main(void *arg) {
    caller *self = arg;
    record mine[MINE];
    int waiting = 0;
    self->fibre = sim_self();
    mp_error error;
    if (percent(40) && mp_notifier_create(&self->notifier, &error) != MP_OK)
        self->notifier = NULL;
    if (w.kind->at_once)
        for (int i = 0; i < w.key_count; i++) {
            record r = {0};
            mp_error_clear(&error);
            int at = (i + self->number) % w.key_count;
            self->loading = keys[at];
            mp_status status = mp_registry_load(w.registry, keys[at], false, 0, &error);
            self->loading = NULL;
            check_status(status, &error, &r, "load");
        }
    for (int turns = 1 + of(6); turns; turns--) {
        record r = {0};
        if (w.offered && percent(40)) { /* of another caller */
            record other = w.offered_record;
            w.offered = NULL;
            uint64_t progress;
            if (percent(50))
                mp_ticket_cancel(other.ticket);
            else
                wait(self, &other, 0, percent(50) ? 0 : sim_now() + MS, &progress);
            mp_ticket_release(other.ticket);
        }
        if (percent(w.kind->operations)) {
            operate(self, &r);
        } else if (submit(self, &r)) {
            mine[waiting++] = r;
        }
        if (waiting == MINE || percent(50))
            while (waiting)
                follow(self, &mine[--waiting]);
    }
    while (waiting)
        follow(self, &mine[--waiting]);
    mp_notifier_destroy(self->notifier);
    self->notifier = NULL;
}

static void closer_main(void *arg) {
    (void)arg;
    mp_sys_sleep_ns(1 + sim_below(60 * MS));
    w.shutting_down = true;
    if (percent(30))
        mp_registry_begin_shutdown(w.registry);
    else
        mp_registry_close(w.registry, percent(50) ? 0 : sim_below(50 * MS));
}

/* --- the world --- */

static mp_status create(void) {
    static const uint64_t spins[] = {1, 1, 2000};
    mp_error error;
    sim_fakes_begin(1 + of(3));
    w.capacity = 1 + of(4);
    mp_registry_config config = {.lanes = fakes.lanes, .spin_ns = spins[of(3)], .step_budget_ns = 25 * MS};
    config.memory_limit = w.kind->memory ? 60000 + 10000 * (uint64_t)of(6) : 1000 * 1000 * 1000;
    config.load_timeout_ns = w.stalls ? 200 * MS : 0;
    for (int i = 0; i < MP_CAPABILITY_COUNT; i++)
        config.queue_capacity[i] = w.capacity;
    config.shutdown_grace_ns = 1 + sim_below(SECOND);
    w.tight = w.kind->memory;
    return mp_registry_create(&config, &w.registry, &error);
}

static void check_after_close(void) {
    mp_registry_stats stats;
    mp_registry_get_stats(w.registry, &stats);
    uint64_t over = stats.completed + stats.errors + stats.timeouts + stats.cancelled + stats.queue_full_rejections;
    if (stats.total_requests != over)
        sim_fail("%llu calls were submitted, %llu ended", (unsigned long long)stats.total_requests,
                 (unsigned long long)over);
    if (stats.memory_used || stats.lanes_leased)
        sim_fail("after close %llu bytes are charged and %d lanes leased", (unsigned long long)stats.memory_used,
                 stats.lanes_leased);
}

static void registry_world(void *arg) {
    const sim_world *kind = arg;
    memset(&w, 0, sizeof(w));
    w.kind = kind;
    w.refused_memory = w.refused_threads = kind->faults;
    w.stalls = kind->faults; /* also when others are kept from running for as long as a load may stand still */
    if (create() != MP_OK) {
        SIM_CHECK(kind->faults);
        return;
    }
    sim_watch(look_at_step, look_at_rest, NULL);
    record none = {0};
    w.key_count = kind->at_once ? kind->keys : 1 + of(kind->keys);
    for (int i = 0; i < w.key_count; i++) {
        w.removed = w.swapped = kind->faults; /* an add that was refused leaves the key unknown */
        add(keys[i], false, &none);
    }
    mp_thread threads[CALLERS + 2];
    bool started[CALLERS + 2] = {false};
    mp_error error;
    w.caller_count = kind->at_once ? kind->callers : 1 + of(kind->callers);
    for (int i = 0; i < w.caller_count; i++)
        w.callers[i] = (caller){.number = i, .fibre = sim_self()};
    for (int i = 0; i < w.caller_count; i++)
        started[i] = mp_thread_start(&threads[i], "caller", caller_main, &w.callers[i], &error) == MP_OK;
    if (kind->shutdown)
        for (int i = 0, n = 1 + of(2); i < n; i++)
            started[CALLERS + i] = mp_thread_start(&threads[CALLERS + i], "closer", closer_main, NULL, &error) == MP_OK;
    for (int i = 0; i < CALLERS + 2; i++)
        if (started[i])
            mp_thread_join(&threads[i]);
    if (w.offered)
        mp_ticket_release(w.offered);
    w.offered = NULL;
    sim_faults(false); /* the end is to be clean: what was refused has been dealt with */
    w.shutting_down = true;
    mp_registry_close(w.registry, percent(50) ? 0 : sim_below(SECOND));
    check_after_close();
    for (int i = 0; i < w.kept_count; i++)
        check_end(&w.kept[i]);
    mp_registry *registry = w.registry;
    w.registry = NULL;
    mp_registry_destroy(registry);
    for (int i = 0; i < w.kept_count; i++) {
        check_end(&w.kept[i]);
        w.kept[i].call->destroyed_is_error = false;
        mp_ticket_release(w.kept[i].ticket);
    }
    sim_fakes_end();
}

static const sim_world worlds[] = {
    {.name = "calls", .body = registry_world, .callers = 4, .keys = 2, .operations = 15},
    {.name = "memory", .body = registry_world, .callers = 4, .keys = 3, .operations = 25, .memory = true},
    {.name = "swaps", .body = registry_world, .callers = 4, .keys = 2, .operations = 55, .swaps = 60},
    {.name = "shutdown",
     .body = registry_world,
     .callers = 4,
     .keys = 3,
     .operations = 35,
     .swaps = 30,
     .shutdown = true},
    {.name = "faults", .body = registry_world, .callers = 4, .keys = 2, .operations = 35, .swaps = 20, .faults = true},
    {.name = "storm",
     .body = registry_world,
     .callers = 5,
     .keys = 3,
     .operations = 45,
     .swaps = 30,
     .memory = true,
     .shutdown = true,
     .faults = true},
    {.name = "five", .body = registry_world, .callers = 5, .keys = 5, .operations = 10, .at_once = true},
    {.name = "pool", .body = sim_parts_pool, .callers = 3},
    {.name = "cores", .body = sim_parts_cores, .callers = 4},
    {.name = "ticks", .body = sim_parts_ticks, .callers = 3},
};

const sim_world *sim_world_find(const char *name) {
    for (size_t i = 0; i < sizeof(worlds) / sizeof(worlds[0]); i++)
        if (strcmp(worlds[i].name, name) == 0)
            return &worlds[i];
    return NULL;
}

sim_setup sim_world_setup(const sim_world *world, sim_scheduler scheduler, int depth, uint64_t seed) {
    uint64_t dice = (seed + 1) * 0x9E3779B97F4A7C15u;
    dice ^= dice >> 29;
    sim_setup setup = {.world = world->name, .seed = seed, .scheduler = scheduler, .depth = depth};
    static const uint32_t rates[] = {0, 0, 60, 600};
    setup.spurious = rates[dice & 3];
    setup.late = rates[dice >> 2 & 3] / 2;
    if (world->faults) {
        static const uint32_t refusals[] = {0, 100, 1000, 6000};
        setup.alloc = refusals[dice >> 4 & 3];
        setup.thread = refusals[dice >> 6 & 3] * 4;
    }
    return setup;
}

#endif
