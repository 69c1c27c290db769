/* lookup/engine.c: the step interface over a static embedding. A step is one batch of texts from any requests. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "kernels/kernels.h"
#include "models/lookup/lookup.h"
#include "models/text_step.h"

enum {
    STEP_TOKENS = 1 << 18, /* maximum tokens in a step of several texts, whatever the budget */
    SHARE = 64,            /* texts that a thread takes at once */
    PART = 256,            /* components that are summed at once */
    POLL_TOKENS = 4096,    /* tokens between two checks for cancellation */
};

/* ---- vectors ----------------------------------------------------------------------------------------------------- */

/* Adds components [at, at + count) of a token's row to `sum`. */
static void add_row(const mp_lookup *model, int32_t token, int32_t at, int32_t count, float *sum) {
    const mp_kernels *k = mp_kernels_get();
    const uint8_t *row = mp_tensor_row(&model->table, model->mapping ? model->mapping[token] : token);
    const mp_dtype dtype = model->table.dtype;
    const float *values = (const float *)(const void *)row + at;
    float part[PART];
    if (dtype == MP_I8)
        k->widen_i8((const int8_t *)row + at, count, part);
    else if (dtype != MP_F32)
        mp_dequantize_row(dtype, row + (size_t)at * sizeof(uint16_t), count, part);
    if (dtype != MP_F32)
        values = part;
    if (model->factors) {
        const float factor = model->factors[token];
        for (int32_t i = 0; i < count; i++)
            part[i] = values[i] * factor;
        values = part;
    }
    k->add(values, count, sum);
}

/* Reports progress. Returns true once the step must end. Within a text, too: a table on a slow disk is read slowly. */
static bool must_stop(mp_lease *lease, _Atomic bool *stop) {
    if (mp_lease_poll(lease))
        atomic_store_explicit(stop, true, memory_order_relaxed);
    return atomic_load_explicit(stop, memory_order_relaxed);
}

bool mp_lookup_vector(const mp_lookup *model, const int32_t *ids, int64_t n, int32_t width, bool normalize,
                      mp_lease *lease, _Atomic bool *stop, float *out) {
    const mp_kernels *k = mp_kernels_get();
    int64_t counted = 0;
    for (int64_t i = 0; i < n; i++)
        counted += ids[i] != model->ignored;
    const float divisor = counted ? (float)counted : 1.0f;
    for (int32_t at = 0; at < width; at += PART) {
        const int32_t count = width - at < PART ? width - at : PART;
        memset(out + at, 0, sizeof(float) * (size_t)count);
        for (int64_t i = 0; i < n; i++) {
            if (i % POLL_TOKENS == POLL_TOKENS - 1 && must_stop(lease, stop))
                return true;
            if (ids[i] != model->ignored)
                add_row(model, ids[i], at, count, out + at);
        }
        for (int32_t c = at; c < at + count; c++)
            out[c] /= divisor;
    }
    if (!k->all_finite(out, width))
        return false;
    const float square = normalize ? k->dot(out, out, width) : 0.0f;
    if (square > 0.0f) {
        const float scale = 1.0f / sqrtf(square);
        for (int32_t c = 0; c < width; c++)
            out[c] *= scale;
    }
    return k->all_finite(&square, 1);
}

/* ---- check ------------------------------------------------------------------------------------------------------- */

mp_status mp_lookup_check(const mp_model *base, mp_request *request_base, uint64_t *cost_ns, uint32_t *total,
                          mp_error *error) {
    const mp_lookup *model = (const mp_lookup *)base;
    mp_embedding_request *request = (mp_embedding_request *)request_base;
    MP_TRY(mp_embedding_request_check_outputs(request, MP_EMBED_POOLED, error));
    if (request->adapter != 0)
        return mp_fail(error, MP_INVALID_ARGUMENT, "the model has no adapter %d", request->adapter);
    if (request->dimensions < 0 || request->dimensions > model->dim)
        return mp_fail(error, MP_INVALID_ARGUMENT, "`dimensions` must be 1 to %d, got %d", model->dim,
                       request->dimensions);
    if (request->second || request->attended)
        return mp_fail(error, MP_UNSUPPORTED, "the model has no attention: `second` and `attended` are not allowed");
    MP_TRY(mp_embedding_request_check_texts(request, 0, model->context, model->vocab, error));
    *cost_ns = (uint64_t)request->n_tokens * atomic_load_explicit(&model->token_ns, memory_order_relaxed);
    *total = (uint32_t)request->n_texts;
    const mp_embedding_sizes sizes = {.width = request->dimensions ? request->dimensions : model->dim};
    return mp_embedding_request_output(request, sizes, error);
}

/* ---- engine ------------------------------------------------------------------------------------------------------ */

typedef struct lookup_engine {
    mp_engine base;
    mp_lookup *model;
} lookup_engine;

static mp_status engine_admit(mp_engine *engine, mp_item *item, mp_error *error) {
    (void)error;
    item->state = engine;
    return MP_OK;
}

static void engine_plan(mp_engine *base, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan) {
    const mp_lookup *model = ((const lookup_engine *)base)->model;
    const mp_text_step_limits limits = {.step_tokens = STEP_TOKENS};
    const uint64_t token_ns = atomic_load_explicit(&model->token_ns, memory_order_relaxed);
    const mp_text_step_totals totals = mp_text_step_plan(items, n, budget_ns, token_ns, limits, plan);
    const uint32_t shares = (totals.texts + SHARE - 1) / SHARE;
    plan->barrier_bound = false;
    plan->threads = shares < 256 ? (int)shares : 256;
}

typedef struct step_run {
    const mp_lookup *model;
    const mp_plan *plan;
    mp_lease *lease;
    uint32_t start[MP_PLAN_MAX + 1]; /* number of texts of the items before each one */
    _Atomic uint32_t next;           /* first text that no thread has taken */
    _Atomic bool stop;
    _Atomic bool failed[MP_PLAN_MAX]; /* a vector of this item is not finite */
} step_run;

static void step_body(const mp_team_thread *thread, void *arg) {
    (void)thread;
    step_run *run = arg;
    const uint32_t all = run->start[run->plan->count];
    int i = 0;
    for (;;) {
        const bool stops = must_stop(run->lease, &run->stop);
        const uint32_t from = atomic_fetch_add_explicit(&run->next, SHARE, memory_order_relaxed);
        if (from >= all || stops)
            return;
        for (uint32_t at = from; at < all && at < from + SHARE; at++) {
            while (at >= run->start[i + 1])
                i++;
            const mp_item *item = run->plan->items[i];
            if (atomic_load_explicit(&item->cancelled, memory_order_relaxed))
                continue;
            mp_embedding_request *request = (mp_embedding_request *)item->request;
            const uint32_t t = item->cursor + (at - run->start[i]);
            const int64_t skip = request->skip ? request->skip[t] : 0, first = request->offsets[t] + skip;
            const bool normalize = request->normalize < 0 ? run->model->normalize : request->normalize != 0;
            if (!mp_lookup_vector(run->model, request->ids + first, request->offsets[t + 1] - first,
                                  request->sizes.width, normalize, run->lease, &run->stop,
                                  request->vectors + (int64_t)t * request->sizes.width))
                atomic_store_explicit(&run->failed[i], true, memory_order_relaxed);
        }
    }
}

static void engine_step(mp_engine *base, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    lookup_engine *engine = (lookup_engine *)base;
    mp_lookup *model = engine->model;
    const uint64_t start = mp_sys_now_ns();
    step_run run = {.model = model, .plan = plan, .lease = lease};
    int64_t tokens = 0;
    for (int i = 0; i < plan->count; i++) {
        const mp_embedding_request *request = (const mp_embedding_request *)plan->items[i]->request;
        const uint32_t cursor = plan->items[i]->cursor;
        run.start[i + 1] = run.start[i] + plan->amount[i];
        tokens += request->offsets[cursor + plan->amount[i]] - request->offsets[cursor];
        outcomes[i] = MP_OUTCOME_MORE;
    }
    mp_lease_run(lease, step_body, &run);
    const bool stopped = atomic_load_explicit(&run.stop, memory_order_relaxed) || mp_lease_poll(lease);
    mp_error error;
    mp_error_clear(&error);
    if (mp_weights_check_poisoned(model->weights, &error) != MP_OK || !mp_weights_unchanged(model->weights)) {
        if (error.code == MP_OK)
            mp_engine_fail_changed(&error);
        mp_engine_fail_all(plan, &error, outcomes);
        return;
    }
    for (int i = 0; i < plan->count && !stopped; i++) {
        mp_item *item = plan->items[i];
        if (atomic_load_explicit(&run.failed[i], memory_order_relaxed))
            mp_engine_fail_numeric(item, &outcomes[i]);
        else if (!atomic_load_explicit(&item->cancelled, memory_order_relaxed))
            mp_engine_advance(item, plan->amount[i], &((mp_embedding_request *)item->request)->done, &outcomes[i]);
    }
    if (tokens > 0 && !stopped)
        mp_text_step_learn(&model->token_ns, mp_sys_now_ns() - start, tokens);
}

static void engine_preempt(mp_engine *engine, mp_item *item) {
    (void)engine;
    (void)item; /* nothing is kept between steps */
}

static void engine_retire(mp_engine *engine, mp_item *item) {
    (void)engine;
    item->state = NULL;
}

static uint64_t engine_trim(mp_engine *engine) {
    (void)engine;
    return 0;
}

static void engine_destroy(mp_engine *engine) { mp_free(engine); }

static uint64_t engine_bytes(const mp_engine *engine) {
    (void)engine;
    return 0;
}

mp_status mp_lookup_engine(mp_model *model, mp_budget *budget, mp_engine **out, mp_error *error) {
    static const mp_engine_ops ops = {
        .admit = engine_admit,
        .plan = engine_plan,
        .step = engine_step,
        .preempt = engine_preempt,
        .retire = engine_retire,
        .trim = engine_trim,
        .destroy = engine_destroy,
        .bytes = engine_bytes,
    };
    (void)budget;
    lookup_engine *engine = mp_alloc_zeroed(sizeof *engine, MP_TAG_SCRATCH);
    if (!engine)
        return mp_fail_memory(error, sizeof *engine, "an engine");
    engine->base.ops = &ops;
    engine->model = (mp_lookup *)model;
    *out = &engine->base;
    return MP_OK;
}
