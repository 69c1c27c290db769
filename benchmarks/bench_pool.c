/* bench_pool.c: the overhead of the pool, without Python.
 *
 *   bench_pool calls                    submit to start and to completion, with a spinning and with a parked worker;
 *                                       refusals when the queue is full
 *   bench_pool text <gguf> <threads> <tokens> <rounds>
 *                                       generation through the registry compared with a bare loop over the same engine;
 *                                       eight concurrent sequences compared with one
 *
 * Prints lines "name value". */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/cpu.h"
#include "base/options.h"
#include "base/sys.h"
#include "files/gguf.h"
#include "models/model.h"
#include "registry/registry.h"

static mp_error error;

static void check(mp_status status, const char *what) {
    if (status == MP_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, error.message);
    exit(1);
}
#define CHECK(call) check(call, #call)

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void print_ns(const char *name, uint64_t *ns, int n) {
    qsort(ns, (size_t)n, sizeof(*ns), by_size);
    printf("%s_p50_us %.2f\n%s_p99_us %.2f\n", name, (double)ns[n / 2] * 1e-3, name, (double)ns[n * 99 / 100] * 1e-3);
}

/* --- a model that computes nothing --- */

typedef struct empty_request {
    mp_request base;
    _Atomic uint64_t started_ns;
} empty_request;

static _Atomic bool hold;

static mp_status empty_admit(mp_engine *engine, mp_item *item, mp_error *out_error) {
    (void)engine, (void)out_error;
    item->state = item;
    return MP_OK;
}
static void empty_plan(mp_engine *engine, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan) {
    (void)engine, (void)budget_ns;
    for (int i = 0; i < n; i++) {
        plan->items[plan->count] = items[i];
        plan->amount[plan->count++] = 1;
    }
    plan->threads = 1;
    plan->cost_ns = 1000;
}
static void empty_step(mp_engine *engine, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    (void)engine;
    uint64_t now = mp_sys_now_ns();
    while (atomic_load(&hold) && !mp_lease_poll(lease))
        mp_sys_sleep_ns(100 * 1000);
    for (int i = 0; i < plan->count; i++) {
        atomic_store(&((empty_request *)plan->items[i]->request)->started_ns, now);
        outcomes[i] = MP_OUTCOME_DONE;
    }
}
static void empty_forget(mp_engine *engine, mp_item *item) {
    (void)engine;
    item->state = NULL;
}
static uint64_t empty_trim(mp_engine *engine) {
    (void)engine;
    return 0;
}
static void empty_free_engine(mp_engine *engine) { mp_free(engine); }

static mp_status empty_engine(mp_model *model, mp_budget *budget, mp_engine **engine, mp_error *out_error) {
    static const mp_engine_ops ops = {
        .admit = empty_admit,
        .plan = empty_plan,
        .step = empty_step,
        .preempt = empty_forget,
        .retire = empty_forget,
        .trim = empty_trim,
        .destroy = empty_free_engine,
    };
    (void)model, (void)budget;
    *engine = mp_alloc_zeroed(sizeof(**engine), MP_TAG_SCRATCH);
    if (!*engine)
        return mp_fail_memory(out_error, sizeof(**engine), "an engine");
    (*engine)->ops = &ops;
    return MP_OK;
}
static mp_status empty_check(const mp_model *model, mp_request *request, uint64_t *cost_ns, uint32_t *total,
                             mp_error *out_error) {
    (void)model, (void)request, (void)out_error;
    *cost_ns = 1000;
    *total = 1;
    return MP_OK;
}
static bool empty_healthy(const mp_model *model) { return model != NULL; }
static uint64_t empty_bytes(const mp_model *model) { return model ? 1000 : 0; }
static void empty_free_model(mp_model *model) { mp_free(model); }

static mp_status empty_load(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_model **model,
                            mp_error *out_error) {
    static const mp_model_ops ops = {empty_engine, empty_check, empty_healthy, empty_bytes, empty_free_model};
    (void)self, (void)lease, (void)budget, (void)progress;
    *model = mp_alloc_zeroed(sizeof(**model), MP_TAG_WEIGHTS);
    if (!*model)
        return mp_fail_memory(out_error, sizeof(**model), "a model");
    (*model)->ops = &ops;
    return MP_OK;
}
static void empty_footprint(void *self, uint64_t *bytes, uint64_t *engine) {
    (void)self;
    *bytes = *engine = 1000;
}
static void empty_free_loader(void *self) { (void)self; }
static void empty_free_request(mp_request *request) { mp_free(request); }

static mp_request *empty_request_create(void) {
    empty_request *request = mp_alloc_zeroed(sizeof(*request), MP_TAG_REQUEST);
    if (!request)
        exit(1);
    request->base =
        (mp_request){.capability = MP_TEXT_EMBEDDING, .destroy = empty_free_request, .bytes = sizeof(*request)};
    return &request->base;
}

static mp_registry *empty_registry(uint64_t spin_ns) {
    static const mp_loader_ops ops = {empty_load, empty_footprint, empty_free_loader};
    mp_registry_config config = {.threads = 2, .memory_limit = 1u << 30, .spin_ns = spin_ns, .max_workers = 1};
    mp_registry *registry;
    CHECK(mp_registry_create(&config, &registry, &error));
    mp_loader loader = {.ops = &ops, .capability = MP_TEXT_EMBEDDING};
    CHECK(mp_registry_add(registry, "empty", &loader, MP_ADD_NEW, &error));
    CHECK(mp_registry_load(registry, "empty", true, 0, &error));
    return registry;
}

enum { REQUESTS = 20000, PARKED = 2000 };
static uint64_t start_ns[REQUESTS], result_ns[REQUESTS];

/* Measure n requests. pause_ns: pause between two requests, long enough for the worker to park; 0 = none. */
static void measure_requests(const char *name, uint64_t spin_ns, uint64_t pause_ns, int n) {
    mp_registry *registry = empty_registry(spin_ns);
    char label[64];
    for (int i = -n / 10; i < n; i++) {
        if (pause_ns)
            mp_sys_sleep_ns(pause_ns);
        mp_submit_options options = {.priority = 2};
        mp_ticket *ticket;
        uint64_t begin = mp_sys_now_ns(), progress;
        CHECK(mp_registry_submit(registry, "empty", empty_request_create(), &options, &ticket, &error));
        mp_ticket_wait(ticket, UINT64_MAX, 0, &progress);
        uint64_t end = mp_sys_now_ns();
        if (i >= 0) {
            start_ns[i] = atomic_load(&((empty_request *)mp_ticket_request(ticket))->started_ns) - begin;
            result_ns[i] = end - begin;
        }
        mp_ticket_release(ticket);
    }
    snprintf(label, sizeof(label), "%s_start", name);
    print_ns(label, start_ns, n);
    snprintf(label, sizeof(label), "%s_result", name);
    print_ns(label, result_ns, n);
    mp_registry_destroy(registry);
}

static void measure_refusals(void) {
    mp_registry *registry = empty_registry(1);
    mp_submit_options options = {.priority = 2, .fail_fast = true};
    mp_ticket *tickets[2000];
    int n = 0;
    atomic_store(&hold, true);
    for (int refused = 0; refused < 50 && n < 2000;) {
        mp_status status = mp_registry_submit(registry, "empty", empty_request_create(), &options, &tickets[n], &error);
        if (status == MP_OK)
            n++;
        else
            refused++;
        mp_sys_sleep_ns(20 * 1000); /* time for the worker to take the first request */
    }
    for (int i = 0; i < REQUESTS; i++) {
        mp_ticket *ticket;
        mp_request *request = empty_request_create();
        uint64_t begin = mp_sys_now_ns();
        if (mp_registry_submit(registry, "empty", request, &options, &ticket, &error) != MP_OVERLOADED) {
            fprintf(stderr, "the queue did not become full\n");
            exit(1);
        }
        start_ns[i] = mp_sys_now_ns() - begin;
    }
    print_ns("refusal", start_ns, REQUESTS);
    atomic_store(&hold, false);
    for (int i = 0; i < n; i++)
        mp_ticket_release(tickets[i]);
    mp_registry_destroy(registry);
}

/* --- generation --- */

static mp_spec *spec_of(const char *path) {
    mp_spec *spec;
    CHECK(mp_gguf_read(path, &spec, &error));
    const mp_value *tokens = mp_spec_find(spec, "tokenizer.ggml.tokens");
    if (!tokens) {
        fprintf(stderr, "%s has no tokenizer.ggml.tokens\n", path);
        exit(1);
    }
    uint8_t *control = calloc(1, tokens->count);
    int32_t end[] = {0};
    mp_token_table table = {
        (int32_t)tokens->count, (const uint8_t *)tokens->as.strings.bytes, tokens->as.strings.offsets, control, 1, end};
    CHECK(mp_spec_set_tokens(spec, &table, &error));
    mp_spec_freeze(spec);
    free(control);
    return spec;
}

static mp_text_request *chat_request(int number, int tokens) {
    int32_t prompt[24];
    for (int i = 0; i < 24; i++)
        prompt[i] = 100 + (i * 37 + number * 11) % 800;
    mp_text_args args = {.n_prompt = 24, .prompt = prompt, .n_choices = 1};
    args.sampling = (mp_sampling){.temperature = 0,
                                  .top_p = 1,
                                  .repetition_penalty = 1,
                                  .max_tokens = tokens,
                                  .logprobs = -1,
                                  .ignore_eos = true};
    mp_text_request *request;
    CHECK(mp_text_request_create(&args, &request, &error));
    return request;
}

typedef struct bare {
    mp_team *team;
    mp_lease lease;
    mp_budget budget;
    mp_loader loader;
    mp_model *model;
    mp_engine *engine;
} bare;

static double bare_tokens_per_second(bare *b, int number, int tokens) {
    mp_text_request *request = chat_request(number, tokens);
    mp_item item = {.request = &request->base};
    uint64_t begin = mp_sys_now_ns();
    CHECK(b->model->ops->check(b->model, &request->base, &item.cost_ns, &item.total, &error));
    CHECK(b->engine->ops->admit(b->engine, &item, &error));
    mp_item *items[1] = {&item};
    mp_outcome outcomes[MP_PLAN_MAX];
    do {
        static mp_plan plan;
        plan.count = 0;
        b->engine->ops->plan(b->engine, items, 1, UINT64_MAX, &plan);
        b->engine->ops->step(b->engine, &b->lease, &plan, outcomes);
    } while (outcomes[0] == MP_OUTCOME_MORE);
    double seconds = (double)(mp_sys_now_ns() - begin) * 1e-9;
    if (outcomes[0] != MP_OUTCOME_DONE)
        check(item.error.code, item.error.message);
    b->engine->ops->retire(b->engine, &item);
    mp_request_destroy(&request->base);
    return tokens / seconds;
}

static double pooled_tokens_per_second(mp_registry *registry, int number, int tokens, int chats) {
    mp_ticket *tickets[64];
    mp_submit_options options = {.priority = 2};
    uint64_t begin = mp_sys_now_ns(), progress;
    for (int i = 0; i < chats; i++)
        CHECK(mp_registry_submit(registry, "text", &chat_request(number + i, tokens)->base, &options, &tickets[i],
                                 &error));
    for (int i = 0; i < chats; i++) {
        mp_ticket_wait(tickets[i], UINT64_MAX, 0, &progress);
        CHECK(mp_ticket_status(tickets[i], &error));
        mp_ticket_release(tickets[i]);
    }
    return chats * tokens / ((double)(mp_sys_now_ns() - begin) * 1e-9);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n) {
    qsort(values, (size_t)n, sizeof(*values), by_value);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

static void measure_text(const char *path, int threads, int tokens, int rounds) {
    enum { MAX_ROUNDS = 101 };
    mp_spec *spec = spec_of(path);
    bare b = {.budget = {.limit = UINT64_MAX}};
    CHECK(mp_team_create(threads - 1, &b.team, &error));
    mp_team_lease(b.team, threads, &b.lease);
    CHECK(mp_model_loader(spec, MP_COMPUTE_AUTO, &b.loader, &error));
    CHECK(b.loader.ops->load(b.loader.self, &b.lease, &b.budget, NULL, &b.model, &error));
    CHECK(b.model->ops->engine(b.model, &b.budget, &b.engine, &error));
    mp_team_return(&b.lease);

    mp_registry *registry;
    mp_registry_config config = {.threads = threads, .memory_limit = 8ull << 30, .max_workers = 1};
    CHECK(mp_registry_create(&config, &registry, &error));
    mp_loader loader;
    CHECK(mp_model_loader(spec, MP_COMPUTE_AUTO, &loader, &error));
    CHECK(mp_registry_add(registry, "text", &loader, MP_ADD_NEW, &error));
    CHECK(mp_registry_load(registry, "text", true, 0, &error));

    double bare_rate[MAX_ROUNDS], pooled_rate[MAX_ROUNDS], ratio[MAX_ROUNDS], eight[MAX_ROUNDS], gain[MAX_ROUNDS];
    rounds = rounds < 1 ? 1 : rounds > MAX_ROUNDS ? MAX_ROUNDS : rounds;
    for (int i = -1; i < rounds; i++) { /* prompts differ between rounds, so that none is found in the prefix cache */
        double got[2] = {0, 0};
        for (int turn = 0; turn < 2; turn++) {
            int which = (i + turn) & 1;
            if (which == 0) {
                mp_team_lease(b.team, threads, &b.lease);
                got[0] = bare_tokens_per_second(&b, 20 * i + 20, tokens);
                mp_team_return(&b.lease);
            } else {
                got[1] = pooled_tokens_per_second(registry, 20 * i + 20, tokens, 1);
            }
        }
        double all = pooled_tokens_per_second(registry, 20 * i + 21, tokens, 8);
        if (i < 0)
            continue; /* warm-up */
        bare_rate[i] = got[0];
        pooled_rate[i] = got[1];
        ratio[i] = got[1] / got[0];
        eight[i] = all;
        gain[i] = all / got[1];
    }
    printf(
        "bare_tokens_s %.1f\npooled_tokens_s %.1f\npooled_to_bare %.4f\neight_chats_tokens_s %.1f\neight_to_one %.3f\n",
        median(bare_rate, rounds), median(pooled_rate, rounds), median(ratio, rounds), median(eight, rounds),
        median(gain, rounds));
    mp_registry_destroy(registry);
    b.engine->ops->destroy(b.engine);
    b.model->ops->destroy(b.model);
    b.loader.ops->destroy(b.loader.self);
    mp_team_destroy(b.team);
    mp_spec_unpin(spec);
}

int main(int argc, char **argv) {
    CHECK(mp_options_init(&error));
    CHECK(mp_cpu_init("", &error));
    mp_kernels_init();
    if (argc == 2 && strcmp(argv[1], "calls") == 0) {
        measure_requests("spinning", 5ull * 1000 * 1000, 0, REQUESTS);
        measure_requests("parked", 1, 300 * 1000, PARKED);
        measure_refusals();
    } else if (argc == 6 && strcmp(argv[1], "text") == 0) {
        measure_text(argv[2], atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
    } else {
        fprintf(stderr, "usage: bench_pool calls | bench_pool text <gguf> <threads> <tokens> <rounds>\n");
        return 2;
    }
    return 0;
}
