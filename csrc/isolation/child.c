/* child.c: the peer of a proxy: a process that serves one engine. See isolation.h.
 *
 * A single thread reads a message, executes it and replies. In a step this thread is thread 0 of as many compute
 * threads as the parent has leased. The child trusts the parent: a wrong value would be a bug in the parent. A message
 * that cannot be parsed ends the child. */
#include <limits.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "base/cpu.h"
#include "base/log.h"
#include "base/options.h"
#include "base/process.h"
#include "base/topology.h"
#include "files/weights.h"
#include "isolation/capability_wire.h"
#include "isolation/isolation.h"
#include "kernels/kernels.h"

/* limit of open files: one for each mapped file, at most 4096, and some of the process itself */
enum { FILES = 4096 + 256 };

typedef struct child_item {
    mp_item item;
    uint32_t id;
    uint64_t charged;
    struct child_item *next;
    _Alignas(16) uint8_t progress[];
} child_item;

typedef struct child {
    const mp_isolation_kind *kind;
    mp_shm memory, description, weights;
    mp_channel_page *page;
    mp_channel channel;
    mp_error broken;
    mp_budget budget;         /* used by the engine; the parent charges its own budget for it */
    mp_mutex asking;
    _Atomic uint64_t charged; /* bytes that the parent has charged for the engine; grows under `asking` */
    const mp_request_wire *wire;
    mp_model *model;
    mp_engine *engine;
    mp_team *team;
    int max_threads;                  /* maximum compute threads; lowered when memory does not suffice */
    mp_cpu_set places[MP_NODES_MAX + 1]; /* distinct CPU sets of the steps so far; teams compare pointers */
    int place_count;
    child_item *items;
    mp_plan plan;
    uint64_t plan_number;
    mp_outcome outcomes[MP_PLAN_MAX];
    mp_wire_in in;
    mp_wire_out out;
} child;

static bool check_parent(void *arg) {
    child *c = arg;
    if (mp_process_has_parent(c->page->setup.parent))
        return true;
    mp_fail(&c->broken, MP_RECV, "the parent process has exited");
    return false;
}

/* --- memory --- */

/* The parent charges whole grains, and one of them stays charged when memory is free, so that few requests and steps
 * ask. */
static const uint64_t GRAIN_BYTES = 1u << 20;

static uint64_t in_grains(uint64_t bytes) { return (bytes + GRAIN_BYTES - 1) / GRAIN_BYTES * GRAIN_BYTES; }

/* mp_budget.cover: lets the parent charge what the engine uses. Compute threads call it too. */
static bool cover(mp_budget *budget, uint64_t used) {
    child *c = (child *)((char *)budget - offsetof(child, budget));
    if (used <= atomic_load_explicit(&c->charged, memory_order_acquire))
        return true;
    mp_mutex_lock(&c->asking);
    bool covered = used <= atomic_load_explicit(&c->charged, memory_order_relaxed);
    const uint64_t limit = c->page->setup.memory_bytes, grains = in_grains(used);
    const uint64_t wanted[] = {grains < limit ? grains : limit, used}; /* the parent may have less than a grain */
    for (int i = 0; i < 2 && !covered; i++) {
        covered = mp_channel_ask(&c->channel, wanted[i]);
        if (covered)
            atomic_store_explicit(&c->charged, wanted[i], memory_order_release);
    }
    mp_mutex_unlock(&c->asking);
    return covered;
}

/* Report how many of the charged bytes the engine still needs. No other thread uses the budget meanwhile. */
static void put_memory(child *c) {
    const uint64_t charged = atomic_load_explicit(&c->charged, memory_order_relaxed);
    const uint64_t needed = in_grains(atomic_load_explicit(&c->budget.used, memory_order_relaxed)) + GRAIN_BYTES;
    atomic_store_explicit(&c->charged, needed < charged ? needed : charged, memory_order_relaxed);
    mp_put_u64(&c->out, atomic_load_explicit(&c->charged, memory_order_relaxed));
    const mp_state_use states = mp_prefix_state_use(c->engine->prefix);
    mp_put(&c->out, &states, sizeof states);
}

/* --- items --- */

static child_item *child_find(child *c, uint32_t id) {
    for (child_item *at = c->items; at; at = at->next)
        if (at->id == id)
            return at;
    return NULL;
}

static void free_item(child *c, child_item *item) {
    mp_budget_give(&c->budget, item->charged);
    mp_request_destroy(item->item.request);
    mp_free(item);
}

/* Create an item: read the request, check it against the model and charge the request's memory. */
static mp_status create_item(child *c, const mp_item *fields, child_item **out, mp_error *error) {
    mp_request *request = NULL;
    MP_TRY(c->wire->get_request(&c->in, &request, error));
    size_t bytes = sizeof(child_item) + c->wire->progress_bytes(request);
    child_item *item = mp_alloc_zeroed(bytes, MP_TAG_REQUEST);
    if (!item) {
        mp_request_destroy(request);
        return mp_fail_memory(error, bytes, "a request");
    }
    item->item = *fields;
    item->item.request = request;
    uint32_t total = 0;
    mp_status status = c->model->ops->check(c->model, request, &item->item.cost_ns, &total, error);
    if (status == MP_OK && total != fields->total)
        status = mp_fail(error, MP_INTERNAL, "a request has %u units in the worker process and %u in its parent", total,
                         fields->total);
    if (status == MP_OK && !mp_budget_take(&c->budget, request->bytes))
        status = mp_fail_memory(error, request->bytes, "a request in a worker process");
    else if (status == MP_OK)
        item->charged = request->bytes;
    if (status == MP_OK)
        status = c->wire->get_progress(&c->in, &item->item, item->progress, error);
    if (status != MP_OK) {
        free_item(c, item);
        return status;
    }
    *out = item;
    return MP_OK;
}

static bool child_admit(child *c) {
    mp_wire_in *in = &c->in;
    mp_item fields = {0};
    child_item *item = NULL;
    mp_error error;
    mp_error_clear(&error);
    uint32_t id = mp_get_u32(in);
    fields.priority = mp_get_u8(in);
    fields.tenant = mp_get_u64(in);
    fields.cursor = mp_get_u32(in);
    fields.total = mp_get_u32(in);
    mp_status status = create_item(c, &fields, &item, &error);
    if (status == MP_OK)
        status = c->engine->ops->admit(c->engine, &item->item, &error);
    if (!(status == MP_OK ? mp_wire_done(in) : mp_wire_skip(in)))
        return false;
    if (status == MP_OK) {
        item->id = id;
        item->next = c->items;
        c->items = item;
    } else if (item) {
        free_item(c, item);
    }
    mp_wire_begin(&c->out, &c->channel, MP_FRAME_ADMIT);
    mp_put_u32(&c->out, id);
    mp_put_error(&c->out, status, &error);
    return mp_wire_end(&c->out);
}

static bool child_retire(child *c) {
    uint32_t id = mp_get_u32(&c->in);
    if (!mp_wire_done(&c->in))
        return false;
    for (child_item **link = &c->items; *link; link = &(*link)->next) {
        child_item *item = *link;
        if (item->id != id)
            continue;
        *link = item->next;
        c->engine->ops->retire(c->engine, &item->item);
        free_item(c, item);
        c->plan.count = 0;
        return true;
    }
    return mp_wire_refuse(&c->in, "the request to retire is unknown");
}

/* --- steps --- */

static bool child_plan(child *c) {
    mp_item *items[MP_PLAN_MAX];
    uint64_t speed[MP_MODEL_SPEEDS];
    uint64_t number = mp_get_u64(&c->in);
    mp_get(&c->in, speed, sizeof speed);
    uint64_t budget_ns = mp_get_u64(&c->in);
    uint32_t n = mp_get_count(&c->in, MP_PLAN_MAX, "too many requests to plan");
    for (uint32_t i = 0; i < n; i++) {
        child_item *item = child_find(c, mp_get_u32(&c->in));
        if (!item)
            return mp_wire_refuse(&c->in, "the request to plan is unknown");
        items[i] = &item->item;
        if (c->wire->get_more && !c->wire->get_more(&c->in, items[i]))
            return false;
    }
    if (!mp_wire_done(&c->in) || n == 0)
        return false;
    if (c->kind->set_speed)
        c->kind->set_speed(c->model, speed);
    c->plan = (mp_plan){.threads = 1};
    c->plan_number = number;
    c->engine->ops->plan(c->engine, items, (int)n, budget_ns, &c->plan);
    mp_wire_begin(&c->out, &c->channel, MP_FRAME_PLAN);
    mp_put_u32(&c->out, (uint32_t)c->plan.count);
    for (int i = 0; i < c->plan.count; i++) {
        uint32_t index = 0;
        while (items[index] != c->plan.items[i])
            index++;
        mp_put_u32(&c->out, index);
        mp_put_u32(&c->out, c->plan.amount[i]);
    }
    mp_put_u32(&c->out, (uint32_t)c->plan.threads);
    mp_put_u64(&c->out, c->plan.cost_ns);
    mp_put_u8(&c->out, c->plan.barrier_bound);
    return mp_wire_end(&c->out);
}

static const mp_cpu_set *get_place(child *c) {
    mp_cpu_set cpus;
    if (!mp_get_u8(&c->in) || !mp_get(&c->in, &cpus, sizeof cpus))
        return NULL;
    for (int i = 0; i < c->place_count; i++)
        if (memcmp(&c->places[i], &cpus, sizeof cpus) == 0)
            return &c->places[i];
    if (c->place_count == MP_NODES_MAX + 1)
        return NULL;
    c->places[c->place_count] = cpus;
    return &c->places[c->place_count++];
}

/* Start more compute threads when a step needs them. If memory does not suffice for all, halve the number. */
static void lease_threads(child *c, int threads, const mp_cpu_set *cpus) {
    mp_error error;
    threads = threads < c->max_threads ? threads : c->max_threads;
    while (threads > 1 && mp_team_size(c->team) < threads) {
        mp_team_destroy(c->team);
        c->team = NULL;
        if (mp_team_create(threads - 1, &c->team, &error) != MP_OK)
            c->max_threads = threads /= 2;
    }
    mp_team_place place = {.cpus = cpus, .threads = threads};
    mp_team_lease_at(c->team, &place, 1, &c->page->lease);
    c->page->lease.cancelled = &c->page->stop;
}

static void put_measurements(child *c) {
    put_memory(c);
    const mp_prefix_counters *prefix = c->engine->prefix;
    uint64_t speed[MP_MODEL_SPEEDS] = {0};
    mp_put_u64(&c->out, prefix ? atomic_load_explicit(&prefix->hits, memory_order_relaxed) : 0);
    mp_put_u64(&c->out, prefix ? atomic_load_explicit(&prefix->tokens, memory_order_relaxed) : 0);
    mp_put_u64(&c->out, prefix ? atomic_load_explicit(&prefix->blocks, memory_order_relaxed) : 0);
    mp_put_u64(&c->out, prefix ? atomic_load_explicit(&prefix->evicted, memory_order_relaxed) : 0);
    mp_put(&c->out, &c->engine->work, sizeof c->engine->work);
    if (c->kind->get_speed)
        c->kind->get_speed(c->model, speed);
    mp_put(&c->out, speed, sizeof speed);
    mp_put_u64(&c->out, c->page->lease.watched_ns);
    mp_put_u64(&c->out, c->page->lease.lost_ns);
}

static bool child_step(child *c) {
    uint64_t number = mp_get_u64(&c->in);
    uint32_t threads = mp_get_count(&c->in, 256, "a step has too many threads");
    const mp_cpu_set *cpus = get_place(c);
    uint32_t n = mp_get_count(&c->in, MP_PLAN_MAX, "a step has too many requests");
    if (c->in.failed || number != c->plan_number || n != (uint32_t)c->plan.count || n == 0 || threads == 0)
        return mp_wire_refuse(&c->in, "a step differs from the plan");
    for (uint32_t i = 0; i < n; i++) {
        if (mp_get_u8(&c->in))
            atomic_store_explicit(&c->plan.items[i]->cancelled, 1, memory_order_relaxed);
        mp_error_clear(&c->plan.items[i]->error);
        c->outcomes[i] = MP_OUTCOME_MORE;
    }
    if (!mp_wire_done(&c->in))
        return false;
    lease_threads(c, (int)threads, cpus);
    c->engine->ops->step(c->engine, &c->page->lease, &c->plan, c->outcomes);
    mp_team_return(&c->page->lease);
    mp_wire_begin(&c->out, &c->channel, MP_FRAME_STEP);
    for (uint32_t i = 0; i < n; i++) {
        child_item *item = (child_item *)((char *)c->plan.items[i] - offsetof(child_item, item));
        mp_put_u8(&c->out, (uint8_t)c->outcomes[i]);
        if (c->outcomes[i] == MP_OUTCOME_FAILED) {
            if (item->item.error.code == MP_OK)
                mp_fail(&item->item.error, MP_MODEL, "the model failed while computing");
            mp_put_error(&c->out, item->item.error.code, &item->item.error);
        }
        c->wire->put_results(&c->out, &item->item, item->progress);
    }
    put_measurements(c);
    c->plan.count = 0;
    return mp_wire_end(&c->out);
}

static bool child_trim(child *c) {
    if (!mp_wire_done(&c->in))
        return false;
    mp_wire_begin(&c->out, &c->channel, MP_FRAME_TRIM);
    mp_put_u64(&c->out, c->engine->ops->trim(c->engine));
    put_memory(c);
    return mp_wire_end(&c->out);
}

static bool serve_one(child *c) {
    if (!mp_wire_receive(&c->in, &c->channel, true))
        return false;
    switch (c->in.kind) {
    case MP_FRAME_ADMIT:
        return child_admit(c);
    case MP_FRAME_RETIRE:
        return child_retire(c);
    case MP_FRAME_PLAN:
        return child_plan(c);
    case MP_FRAME_STEP:
        return child_step(c);
    case MP_FRAME_TRIM:
        return child_trim(c);
    default:
        return mp_wire_refuse(&c->in, "it is not a request frame");
    }
}

/* --- start --- */

static int init_core(void) {
    mp_error error;
    if (mp_options_init(&error) != MP_OK || mp_cpu_init(mp_options_get()->cpu, &error) != MP_OK)
        return MP_CHILD_OPTIONS;
    mp_log_set_level(MP_LOG_OFF); /* no thread drains the log ring in a child */
    mp_kernels_init();
    mp_file_map_init();
    if (mp_options_get()->blas[0])
        mp_blas_set_path(mp_options_get()->blas);
    return 0;
}

static mp_status open_model(child *c, mp_error *error) {
    const mp_channel_setup *setup = &c->page->setup;
    MP_TRY(mp_shm_map(&c->description, MP_PROCESS_FIRST_FD + 1, setup->description_bytes, false, error));
    if (setup->weight_bytes)
        MP_TRY(mp_shm_map(&c->weights, MP_PROCESS_FIRST_FD + 2, setup->weight_bytes, false, error));
    else
        mp_sys_close(MP_PROCESS_FIRST_FD + 2);
    atomic_init(&c->budget.limit, setup->memory_bytes);
    c->budget.cover = cover;
    MP_TRY(c->kind->open(c->description.data, c->description.bytes, &c->weights, &c->budget, &c->model, error));
    return c->model->ops->engine(c->model, &c->budget, &c->engine, error);
}

static int child_run(child *c) {
    mp_error error;
    mp_error_clear(&error);
    if (mp_shm_map(&c->memory, MP_PROCESS_FIRST_FD, sizeof(mp_channel_page), true, &error) != MP_OK)
        return error.code == MP_INTEGRITY ? MP_CHILD_BUILD : MP_CHILD_MEMORY;
    c->page = c->memory.data;
    const mp_channel_setup *setup = &c->page->setup;
    if (setup->build != mp_channel_build())
        return MP_CHILD_BUILD;
    c->wire = mp_request_wire_of((mp_capability)setup->capability);
    if (!c->wire)
        return MP_CHILD_BUILD;
    mp_process_limits limits = {.data_bytes = setup->data_limit, .files = FILES};
    if (mp_process_confine(setup->parent, &limits, &error) != MP_OK)
        return MP_CHILD_PARENT;
    mp_weights_set_lender(setup->parent);
    mp_channel_init(&c->channel, c->page, false, &c->broken, check_parent, c);
    mp_status status = open_model(c, &error);
    mp_wire_begin(&c->out, &c->channel, MP_FRAME_READY);
    mp_put_error(&c->out, status, &error);
    if (!mp_wire_end(&c->out))
        return MP_CHILD_CHANNEL;
    if (status != MP_OK)
        return MP_CHILD_REFUSED;
    while (serve_one(c)) {
    }
    return MP_CHILD_CHANNEL;
}

int mp_isolation_serve(const mp_isolation_kind *kind) {
    int code = init_core();
    if (code)
        return code;
    child *c = mp_alloc_zeroed(sizeof *c, MP_TAG_POOL);
    if (!c)
        return MP_CHILD_MEMORY;
    c->kind = kind;
    mp_mutex_init(&c->asking);
    c->max_threads = INT_MAX;
    return child_run(c); /* returning ends the process: the system frees its memory */
}
