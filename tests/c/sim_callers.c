/* sim_callers.c: the actions of callers in the worlds of a whole registry, and the checks of their results. */
#include "registry/maintenance.h"
#include "sim_state.h"

#ifdef MP_SIM

#include <string.h>

static const uint64_t MS = 1000 * 1000, SECOND = 1000ull * 1000 * 1000;

/* Returns true if a fault must end the request. A request is retried once, or twice if it can continue and one fault
 * was an external kill. It is not retried if the caller saw a part of the result that a retry cannot continue, or if
 * the quarantine refuses it. */
static bool failed_for_good(const record *r) {
    const sim_call *call = r->call;
    bool again = call->failed == 1 || (call->failed == 2 && call->spared);
    return !again || !call->innocent || call->failed_late || r->cancelled || r->deadline_ns || r->patience_ns ||
           w.shutting_down;
}

/* Checks that the status of a request, a load or another operation has a cause in this world. */
/* A load without stalls takes milliseconds. It passes the default limit of 30 s only by such jumps. */
bool sim_loads_are_late(void) { return sim_late_ns() >= 29 * SECOND; }

void sim_check_status(mp_status status, const mp_error *error, const record *r, const char *what) {
    bool fine = false;
    switch (status) {
    case MP_OK:
        fine = true;
        break;
    case MP_TIMEOUT:
        fine = (r->deadline_ns && sim_now() >= r->deadline_ns) ||
               (r->patience_ns && sim_now() >= r->began_ns + r->patience_ns) ||
               (r->call && !r->ticket && r->deadline_ns); /* refused: predicted to miss the deadline */
        break;
    case MP_CANCELLED:
        fine = r->cancelled || w.shutting_down || (r->call && r->call->cancelled_inside);
        break;
    case MP_SHUTTING_DOWN:
        fine = w.shutting_down;
        break;
    case MP_SEND:
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
        fine = w.load_fails;
        break;
    case MP_MODEL: /* also if requests with the same fingerprint made workers fail twice */
        fine = w.load_fails || w.stalls || (w.crashes && !(r->call && r->call->innocent));
        break;
    case MP_INTERNAL:
        fine = w.crashes && failed_for_good(r);
        break;
    case MP_INTEGRITY:
        fine = w.files_change && (!fakes.processes || !r->call || failed_for_good(r));
        break;
    case MP_MEMORY_EXHAUSTED:
        fine = w.refused_memory || w.tight;
        break;
    case MP_SPAWN_FAILED:
        fine = w.refused_threads || w.refused_memory || w.load_fails;
        break;
    case MP_SPAWN_TIMEOUT:
        fine = w.stalls || sim_loads_are_late();
        break;
    case MP_CIRCUIT_OPEN:
    case MP_NO_WORKERS:
        fine = w.load_fails || w.stalls || w.files_change || w.refused_memory || w.refused_threads || w.numeric ||
               w.crashes;
        break;
    case MP_RECV:
        fine = w.stalls ||
               (fakes.processes && r->call &&
                (r->call->lost_worker > 1 + r->call->killed_worker || (r->call->failed && failed_for_good(r))));
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

void sim_check_end(const record *r) {
    mp_error error;
    mp_error_clear(&error);
    SIM_CHECK(mp_ticket_done(r->ticket));
    mp_status status = mp_ticket_status(r->ticket, &error);
    uint64_t submitted, started, finished;
    mp_ticket_times(r->ticket, &submitted, &started, &finished);
    SIM_CHECK(submitted && finished >= submitted && (!started || (started >= submitted && finished >= started)));
    SIM_CHECK(mp_ticket_position(r->ticket, NULL) == -1);
    SIM_CHECK((!r->call->admitted && !r->call->saved) || w.stalls); /* an abandoned worker's engine may hold it */
    sim_check_status(status, &error, r, "a request");
    if (status == MP_OK)
        SIM_CHECK(r->call->finished == 1 && r->call->done == r->call->units && !r->call->bad_argument &&
                  !r->call->refused && !r->call->numeric && !r->call->taken_back);
    if (status == MP_TIMEOUT && r->ample)
        sim_fail("a request expired although the process was paused for %.0f s", (double)fakes.paused_ns * 1e-9);
    /* A pause costs a request at most MP_PAUSE_NS, also a request that is accepted before the pause is noticed. */
    uint64_t charged = fakes.paused_ns ? 2 * MP_PAUSE_NS : 0;
    if (status == MP_TIMEOUT)
        SIM_CHECK((r->deadline_ns && finished + charged >= r->deadline_ns) ||
                  (r->patience_ns && finished + charged >= submitted + r->patience_ns));
    if (fakes.on_time && r->deadline_ns && finished > r->deadline_ns + SIM_PROMPT_NS)
        sim_fail("a request ended %.3f ms after its deadline", (double)(finished - r->deadline_ns) * 1e-6);
    if (fakes.on_time && r->call->unwanted_ns && finished > r->call->unwanted_ns + SIM_PROMPT_NS)
        sim_fail("a request ended %.3f ms after it was cancelled", (double)(finished - r->call->unwanted_ns) * 1e-6);
    if (w.kind->special && w.kind->special->ended)
        w.kind->special->ended(r);
}

/* --- actions of callers --- */

static bool wait(caller *self, const record *r, uint64_t seen, uint64_t deadline_ns, uint64_t *progress) {
    self->seen = seen == UINT64_MAX ? seen - 1 : seen;
    self->awaited = r->ticket;
    bool moved = mp_ticket_wait(r->ticket, seen, deadline_ns, progress);
    self->awaited = NULL;
    if (!moved)
        SIM_CHECK(deadline_ns && sim_now() >= deadline_ns);
    return moved;
}

static void wait_to_end(caller *self, record *r) {
    uint64_t progress = 0, seen = 0;
    if (percent(w.kind->streams ? 10 : 50)) {
        wait(self, r, UINT64_MAX, 0, &progress);
    } else {
        do { /* waits for each step of progress */
            wait(self, r, seen, 0, &progress);
            SIM_CHECK(progress > seen);
            seen = progress;
        } while (progress != UINT64_MAX);
    }
    SIM_CHECK(progress == UINT64_MAX);
    sim_check_end(r);
}

void sim_take_notices(caller *self) {
    uint64_t ids[3];
    for (int n = 3; n == 3;) {
        n = mp_notifier_take(self->notifier, ids, 3);
        for (int i = 0; i < n; i++) {
            SIM_CHECK(ids[i] < 64 && self->bound >> ids[i] & 1);
            self->notified |= 1ull << ids[i];
        }
    }
}

static uint64_t bind(caller *self, mp_ticket *ticket) {
    uint64_t id = (uint64_t)__builtin_ctzll(~self->bound);
    self->bound |= 1ull << id;
    if (mp_ticket_bind(ticket, self->notifier, id))
        return id;
    SIM_CHECK(w.refused_memory);
    return UINT64_MAX;
}

/* Waits for the ticket through a notifier, as an event loop does. Sometimes returns without waiting, so that a bound
 * ticket is released. */
static void wait_notified(caller *self, mp_ticket *ticket) {
    uint64_t id = bind(self, ticket);
    if (id == UINT64_MAX || percent(25))
        return;
    self->expected_id = id;
    self->expected = ticket;
    for (;;) {
        mp_sys_sleep_ns(MS);
        sim_take_notices(self);
        if (!(self->notified >> id & 1))
            continue; /* check_at_rest reports a notification that is missing */
        self->notified &= ~(1ull << id);
        if (mp_ticket_done(ticket))
            break;
    }
    self->expected = NULL;
}

static void cancel(record *r) {
    r->cancelled = true;
    if (!r->call->unwanted_ns)
        r->call->unwanted_ns = sim_now();
    r->call->taken_back |= mp_ticket_cancel(r->ticket);
}

static void let_go(record *r) {
    if (w.kept_count < RECORDS && percent(20)) {
        w.kept[w.kept_count++] = *r; /* checked again after the registry was closed */
        return;
    }
    r->call->destroyed_is_error = false;
    mp_ticket_release(r->ticket);
}

/* Waits for the offered request, or cancels it. The request may be one of the caller's own. */
static void take_offer(caller *self) {
    if (!w.offered)
        return;
    record other = w.offered_record;
    w.offered = NULL;
    uint64_t progress;
    if (percent(30))
        other.call->taken_back |= mp_ticket_cancel(other.ticket);
    else if (self->notifier && percent(60))
        wait_notified(self, other.ticket);
    else
        wait(self, &other, 0, percent(50) ? 0 : sim_now() + MS, &progress);
    mp_ticket_release(other.ticket);
}

static void follow(caller *self, record *r) {
    mp_error error;
    if (!r->endless && !w.offered && !w.plain && percent(30)) { /* another caller may wait for it or cancel it */
        w.offered_record = *r;
        w.offered_record.cancelled = r->cancelled = true;
        w.offered = mp_ticket_pin(r->ticket);
    }
    switch (w.kind->streams || w.plain ? 7 : of(r->endless ? 3 : 8)) {
    case 0: /* releases the ticket without waiting for the end */
        r->call->destroyed_is_error = false;
        if (w.offered != r->ticket) /* otherwise another caller takes the request over */
            r->call->unwanted_ns = sim_now();
        if (r->call->masked) /* the thread that provides its masks also has a reference */
            mp_ticket_cancel(r->ticket);
        mp_ticket_release(r->ticket);
        return;
    case 1:
        cancel(r);
        break;
    case 2: { /* waits for some time, then cancels */
        uint64_t progress;
        if (!wait(self, r, UINT64_MAX, sim_now() + (uint64_t)of(20) * MS / 4 + 1, &progress))
            cancel(r);
        break;
    }
    case 3:
        if (self->notifier)
            wait_notified(self, r->ticket);
        break;
    case 4: { /* reads its queue position */
        int position = mp_ticket_position(r->ticket, NULL);
        SIM_CHECK(position >= -1 && position <= RECORDS);
        if (mp_ticket_done(r->ticket))
            mp_ticket_status(r->ticket, &error);
        break;
    }
    case 5:
        take_offer(self);
        break;
    default:
        break;
    }
    wait_to_end(self, r);
    if (w.plain)
        SIM_CHECK(mp_ticket_status(r->ticket, &error) == MP_OK);
    let_go(r);
}

/* A give_up callback may use the registry. */
static bool may_give_up(void *arg) {
    (void)arg;
    mp_registry_stats stats;
    mp_registry_get_stats(w.registry, &stats);
    return !sim_is_nudging() && percent(30);
}

static bool submit(caller *self, record *r) {
    static const uint32_t units[] = {1, 1, 2, 3, 8};
    mp_error error;
    mp_error_clear(&error);
    *r = (record){.began_ns = sim_now()};
    sim_call *call = sim_fakes_call(units[of(5)]);
    if (!call)
        return false;
    if (percent(5) && !w.kind->streams && !w.plain) {
        call->units = 2000;
        r->endless = true;
    }
    call->bad_argument = percent(3);
    call->refused = percent(3);
    call->numeric = percent(3);
    w.numeric |= call->numeric;
    if (w.kind->memory) {
        call->memory = 1 + of(4);
        call->memory_a_step = of(3);
        call->outputs = percent(50) ? sim_below(20000) : 0;
        call->keeps_state = percent(50);
    }
    r->call = call;
    mp_submit_options options = {
        .priority = (uint8_t)of(5), .service_class = (uint8_t)of(2), .tenant = (uint32_t)of(3)};
    if (percent(30))
        r->deadline_ns = options.deadline_ns = sim_now() + 1 + sim_below(30 * MS);
    options.fail_fast = percent(30);
    if (percent(20))
        options.give_up = may_give_up;
#ifdef MP_FOREVER
    if (percent(15))
        r->patience_ns = options.patience_ns = 20 * MS + sim_below(200 * MS);
    if (percent(10))
        options.keep_alive_ns = 1 + sim_below(50 * MS);
    if (percent(20))
        options.policy = (mp_policy)of(MP_POLICY_COUNT);
    mp_policy policy = options.policy == MP_POLICY_DEFAULT ? w.policy : options.policy;
    call->alone = policy == MP_POLICY_SEQUENTIAL;
#endif
    const char *key = sim_keys[of(w.key_count)];
    if (w.plain) {
        *r = (record){.began_ns = r->began_ns, .call = call};
        options = (mp_submit_options){.priority = 2};
        call->bad_argument = call->refused = call->numeric = call->alone = false;
        call->memory = call->memory_a_step = 0;
        call->outputs = 0;
    }
    if (w.kind->special && w.kind->special->call)
        w.kind->special->call(r, &options);
    call->deadline_ns = options.deadline_ns;
    call->destroyed_is_error = false;
    sim_call before = *call;
    self->submitting = options.fail_fast ? NULL : key;
    mp_status status = mp_registry_submit(w.registry, key, &call->base, &options, &r->ticket, &error);
    self->submitting = NULL;
    if (status == MP_OK) {
        SIM_CHECK(!r->past);
        call->destroyed_is_error = true; /* the caller's ticket keeps the request alive */
        if (w.kind->special && w.kind->special->submitted)
            w.kind->special->submitted(r);
        return true;
    }
    SIM_CHECK(!r->ticket && !w.plain);
    r->call = &before; /* submit has freed the request */
    r->cancelled = options.give_up != NULL;
    sim_check_status(status, &error, r, "submit");
    return false;
}

static void script_of_world(sim_model *model) {
    if (w.kind->special && w.kind->special->script)
        w.kind->special->script(model);
}

static void random_script(sim_model *model) {
    static const uint64_t loads[] = {0, 1, 5, 20, 60}, steps[] = {0, 1, 2, 5};
    model->load_ns = loads[of(5)] * MS;
    model->step_ns = steps[of(4)] * MS;
    model->uneven = percent(40);
    model->step_units = (uint32_t)of(3);
    model->plan_items = of(3);
    model->threads = 1 + of(fakes.threads);
    if (w.kind->stuck && percent(60)) {
        model->stuck_steps = 1 + of(3);
        /* often as long as the limit: the step then ends while the sweep abandons its worker */
        model->stuck_ns = percent(50) ? 50 * MS << of(6) : w.stall_ns + sim_below(2000);
        if (percent(10))
            model->stuck_ns = 8 * SECOND; /* longer than a close may take */
    }
    if (w.kind->streams) {
        model->load_ns = 0;
        model->step_units = 1;
        model->uneven = true;
    }
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

void sim_add(const char *key, bool replace, record *r) {
    mp_error error;
    mp_error_clear(&error);
    sim_model *model = sim_fakes_model();
    random_script(model);
    script_of_world(model);
    mp_loader loader = sim_fakes_loader(model);
    mp_status status = mp_registry_add(w.registry, key, &loader, replace ? MP_ADD_REPLACE : MP_ADD_NEW, &error);
    sim_check_status(status, &error, r, "add");
}

static uint64_t some_deadline(record *r) {
    r->deadline_ns = percent(50) ? 0 : sim_now() + 1 + sim_below(60 * MS);
    return r->deadline_ns;
}

/* Other threads run while a visitor uses the model. */
static void note_entry(void *arg, const mp_entry_info *info) {
    (void)arg;
    for (int points = info->model && percent(50) ? of(20) : 0; points; points--)
        sim_yield();
}

static void operate(caller *self, record *r) {
    mp_error error;
    mp_error_clear(&error);
    const char *key = sim_keys[of(w.key_count)];
    if (percent(w.kind->swaps)) {
        w.swapped = true;
        if (percent(40)) {
            w.removed = true;
            mp_status status = mp_registry_remove(w.registry, key, some_deadline(r), &error);
            sim_check_status(status, &error, r, "remove");
        } else if (fakes.count < SIM_FAKES - 3) { /* the world may add some itself */
            sim_add(key, percent(80), r);
        }
        return;
    }
    switch (of(4)) {
    case 0: {
        self->loading = key;
        mp_status status = mp_registry_load(w.registry, key, !w.unpinned && percent(30), some_deadline(r), &error);
        self->loading = NULL;
        sim_check_status(status, &error, r, "load");
        break;
    }
    case 1:
        if (w.safe && w.safe >= w.key_count)
            break;
        key = sim_keys[w.safe + of(w.key_count - w.safe)];
        sim_check_status(mp_registry_evict(w.registry, key, some_deadline(r), &error), &error, r, "evict");
        break;
    case 2: {
        mp_registry_stats stats, later; /* no snapshot: the counters change while they are read */
        mp_registry_get_stats(w.registry, &stats);
        mp_registry_get_stats(w.registry, &later);
        uint64_t over = stats.completed + stats.errors + stats.timeouts + stats.cancelled + stats.queue_full_rejections;
        SIM_CHECK(over <= later.total_requests && stats.threads_leased <= stats.threads);
        if (w.unpinned)
            sim_visit(note_entry, NULL);
        break;
    }
    default:
        mp_sys_sleep_ns(1 + sim_below(10 * MS));
        if (w.kind->faults && percent(20)) {
            w.stalls = true;
            sim_pause(600 * SECOND);
        } else if (w.kind->faults && percent(20)) {
            w.files_change = true;
            fakes.models[of(fakes.count)].unhealthy = percent(50);
        }
        break;
    }
}

void sim_caller_main(void *arg) {
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
            self->loading = sim_keys[at];
            mp_status status = mp_registry_load(w.registry, sim_keys[at], false, 0, &error);
            self->loading = NULL;
            sim_check_status(status, &error, &r, "load");
        }
    for (int turns = 1 + of(6); turns; turns--) {
        record r = {0};
        if (percent(60))
            take_offer(self);
        if (percent(w.kind->operations)) {
            operate(self, &r);
        } else if (submit(self, &r)) {
            mine[waiting++] = r;
        }
        if (waiting == MINE || w.plain || percent(50))
            while (waiting)
                follow(self, &mine[--waiting]);
    }
    while (waiting)
        follow(self, &mine[--waiting]);
    mp_notifier_destroy(self->notifier);
    self->notifier = NULL;
}

#endif
