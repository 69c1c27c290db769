/* encoder/engine.c: the step interface over an encoder. A step is one batch of texts from one or more requests. */
#include <stdatomic.h>
#include <string.h>

#include "models/encoder/engine.h"
#include "models/text_step.h"
#include "models/threads.h"

enum {
    GROUP_TOKENS = 256, /* rows that a thread takes through the layers at once: enough to amortise reading the weights,
                         * and few enough that their activations stay in the L2 cache */
    STEP_TOKENS = 16384 /* maximum rows in a step, whatever the budget */
};

/* ---- check ------------------------------------------------------------------------------------------------------- */

/* Check `attended` of a text. Rows after the attended ones see all attended rows, which windows do not allow. */
static mp_status check_attended(const mp_encoder *model, int32_t text, int32_t attended, int64_t n, mp_error *error) {
    if (attended > n)
        return mp_fail(error, MP_INVALID_ARGUMENT, "`attended` of text %d must be 1 to %lld, got %d", text,
                       (long long)n, attended);
    if (attended == n)
        return MP_OK;
    for (int i = 0; i < model->layer_count; i++) {
        const int32_t window = model->layers[i].base.window;
        if (window > 0 && n > window / 2 + 1)
            return mp_fail(error, MP_UNSUPPORTED,
                           "with `attended`, text %d must have at most %d tokens, because layer %d has a window, got "
                           "%lld", text, window / 2 + 1, i, (long long)n);
    }
    return MP_OK;
}

mp_status mp_encoder_check(const mp_model *base, mp_request *request_base, uint64_t *cost_ns, uint32_t *total,
                           mp_error *error) {
    const mp_encoder *model = (const mp_encoder *)base;
    mp_embedding_request *request = (mp_embedding_request *)request_base;
    MP_TRY(mp_embedding_request_check_outputs(request, mp_encoder_outputs(model), error));
    const bool pooled = request->outputs & MP_EMBED_POOLED;
    int32_t most = pooled ? model->head.width : model->hidden;
    if (pooled && model->head.size_count && request->dimensions && !mp_head_gives(&model->head, request->dimensions))
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "`dimensions` must be a size to which the model has a projection, got %d", request->dimensions);
    if (request->dimensions < 0 || (request->dimensions > most && (!pooled || !model->head.size_count)))
        return mp_fail(error, MP_INVALID_ARGUMENT, "`dimensions` must be 1 to %d, got %d", most, request->dimensions);
    if (!pooled && request->dimensions != 0 && request->dimensions != most)
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "`dimensions` must be %d, because token vectors cannot be truncated, got %d; leave it out",
                       most, request->dimensions);
    MP_TRY(mp_embedding_request_check_texts(request, 1, model->context, model->vocab, error));
    if (request->adapter != 0 && mp_adapters_find(&model->adapters, request->adapter) == 0)
        return mp_fail(error, MP_INVALID_ARGUMENT, "the model has no adapter %d", request->adapter);
    for (int32_t t = 0; t < request->n_texts; t++) {
        const int64_t n = request->offsets[t + 1] - request->offsets[t];
        if (request->second && (request->second[t] < 1 || request->second[t] >= n))
            return mp_fail(error, MP_INVALID_ARGUMENT, "pair %d: the second text begins at token %d of %lld", t,
                           request->second[t], (long long)n);
        if (request->attended)
            MP_TRY(check_attended(model, t, request->attended[t], n, error));
    }
    const mp_sparse_head *sparse = &model->sparse_head;
    const mp_embedding_sizes sizes = {
        .width = !pooled ? 0 : request->dimensions ? request->dimensions : most,
        .hidden = request->outputs & MP_EMBED_TOKENS ? model->hidden : 0,
        .row_width = request->outputs & MP_EMBED_ROWS ? model->row_head.width : 0,
        .sparse_most = request->outputs & MP_EMBED_SPARSE && sparse->kind == MP_SPARSE_VOCABULARY ? sparse->vocab : 0,
        .vocab = request->outputs & MP_EMBED_SPARSE ? sparse->vocab : 0,
    };
    *cost_ns = (uint64_t)request->n_tokens * atomic_load_explicit(&model->token_ns, memory_order_relaxed);
    *total = (uint32_t)request->n_texts;
    return mp_embedding_request_output(request, sizes, error);
}

/* ---- plan -------------------------------------------------------------------------------------------------------- */

/* The model may have been loaded again with other adapters since the request was checked. */
static mp_status engine_admit(mp_engine *engine, mp_item *item, mp_error *error) {
    const mp_encoder *model = ((const mp_encoder_engine_state *)engine)->model;
    const int32_t adapter = ((const mp_embedding_request *)item->request)->adapter;
    if (adapter != 0 && mp_adapters_find(&model->adapters, adapter) == 0)
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "the `adapter` of the request was unloaded; load the model with it again");
    item->state = engine;
    return MP_OK;
}

/* Returns true if all threads share the texts of a step: a single text, or texts of one group while panels are
 * unpacked, so that a panel is packed once for all of them. Otherwise, each thread computes whole texts. */
static bool shared_by_threads(const mp_encoder *model, int64_t texts, int64_t rows) {
    return texts == 1 || (mp_weight_store_unpacked(&model->store) && rows <= GROUP_TOKENS);
}

static void engine_plan(mp_engine *base, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan) {
    const mp_encoder *model = ((const mp_encoder_engine_state *)base)->model;
    const mp_text_step_limits limits = {.step_tokens = STEP_TOKENS, .least_share = GROUP_TOKENS};
    const uint64_t token_ns = atomic_load_explicit(&model->token_ns, memory_order_relaxed);
    budget_ns = mp_weight_store_pass_ns(&model->store, budget_ns, token_ns);
    const mp_text_step_totals totals = mp_text_step_plan(items, n, budget_ns, token_ns, limits, plan);
    plan->barrier_bound = shared_by_threads(model, totals.texts, totals.tokens);
    plan->threads = totals.texts < 256 ? (int)totals.texts : 256;
    if (plan->barrier_bound)
        plan->threads = mp_threads_worth(&model->base.facts, totals.tokens, mp_encoder_barriers(model));
}

/* ---- step -------------------------------------------------------------------------------------------------------- */

typedef struct step_run {
    mp_encoder_engine_state *engine;
    mp_group_step step;
} step_run;

static void run_group(void *arg, const mp_team_thread *thread, const mp_group *group, int slot, void *thread_scratch) {
    const step_run *run = arg;
    const mp_encoder_engine_state *engine = run->engine;
    mp_encoder_forward(engine->model, thread, engine->texts + group->first, group->count, group->rows,
                       run->step.lease, mp_group_scratch(&run->step, slot), thread_scratch);
}

static mp_status make_lists(mp_encoder_engine_state *engine, int texts, mp_error *error) {
    if (texts > engine->text_capacity) {
        mp_encoder_text *grown = mp_realloc(engine->texts, (size_t)texts * sizeof *grown, MP_TAG_SCRATCH);
        if (grown)
            engine->texts = grown;
        mp_dedup_input *inputs = mp_realloc(engine->inputs, (size_t)texts * sizeof *inputs, MP_TAG_SCRATCH);
        if (inputs)
            engine->inputs = inputs;
        mp_encoder_copy *copies = mp_realloc(engine->copies, (size_t)texts * sizeof *copies, MP_TAG_SCRATCH);
        if (copies)
            engine->copies = copies;
        if (!grown || !inputs || !copies)
            return mp_fail_memory(error, (uint64_t)texts * (sizeof *grown + sizeof *inputs + sizeof *copies),
                                  "the list of texts");
        engine->text_capacity = texts;
    }
    MP_TRY(mp_groups_reserve(&engine->groups, texts, error));
    return mp_dedup_table_begin(&engine->dedup, texts, "the table of texts", error);
}

/* All that decides the vector of an item's text. */
static mp_dedup_input input_of(const mp_encoder *model, const mp_item *item, const mp_encoder_text *text) {
    const size_t bytes = (size_t)text->n * sizeof *text->ids;
    return (mp_dedup_input){
        .key = mp_recent_key(&model->recent, mp_cache_scope_of(item, text->adapter), text->ids, bytes),
        .options = {text->skip, text->second, text->attended, text->normalize},
        .dimensions = text->dimensions,
        .content = text->ids,
        .bytes = bytes,
        .out = text->out,
    };
}

/* Returns true if the text at `index`, the last of the list, need not be computed: a recent vector was copied to it, or
 * it shares the vector of an earlier text. */
static bool is_known(mp_encoder_engine_state *engine, int index, const mp_item *item, int owner, uint64_t now_ns) {
    const mp_encoder_text *text = &engine->texts[index];
    if (text->outputs != MP_EMBED_POOLED)
        return false;
    engine->inputs[index] = input_of(engine->model, item, text);
    if (mp_recent_find(&engine->model->recent, &engine->inputs[index], now_ns)) {
        engine->base.work.dedup_hits++;
        return true;
    }
    int same = mp_dedup_table_find(&engine->dedup, engine->inputs, index);
    if (same >= 0)
        engine->copies[engine->copy_count++] = (mp_encoder_copy){same, owner, text->out};
    engine->base.work.dedup_hits += same >= 0;
    return same >= 0;
}

/* Text `t` of a request; outputs that the request has not asked for are NULL. */
static mp_encoder_text text_of(const mp_encoder *model, const mp_embedding_request *request, uint32_t t) {
    const int64_t first = request->offsets[t];
    const int32_t n = (int32_t)(request->offsets[t + 1] - first);
    const bool chosen = request->normalize >= 0;
    mp_encoder_text text = {
        .ids = request->ids + first,
        .n = n,
        .skip = request->skip ? request->skip[t] : 0,
        .second = request->second ? request->second[t] : n,
        .attended = request->attended ? request->attended[t] : n,
        .adapter = (uint8_t)mp_adapters_find(&model->adapters, request->adapter),
        .dimensions = request->sizes.width,
        .outputs = request->outputs,
        .normalize = chosen ? request->normalize != 0 : model->head.normalize,
        .normalize_rows = chosen ? request->normalize != 0 : model->row_head.normalize,
    };
    if (text.outputs & MP_EMBED_POOLED)
        text.out = request->vectors + (int64_t)t * request->sizes.width;
    if (text.outputs & MP_EMBED_TOKENS)
        text.states = request->states + first * request->sizes.hidden;
    if (text.outputs & MP_EMBED_ROWS)
        text.rows = request->rows + first * request->sizes.row_width;
    if (text.outputs & MP_EMBED_SPARSE) {
        const int64_t at = mp_embedding_sparse_at(request, t);
        text.sparse = (mp_sparse_text){request->sparse_ids + at, request->sparse_values + at,
                                       request->sparse_counts + t, n};
    }
    return text;
}

static mp_status collect(mp_encoder_engine_state *engine, const mp_plan *plan, uint64_t now_ns, int *count,
                         int64_t *rows, int *longest, unsigned *outputs, mp_error *error) {
    int texts = 0;
    for (int i = 0; i < plan->count; i++)
        texts += (int)plan->amount[i];
    MP_TRY(make_lists(engine, texts, error));
    engine->copy_count = 0;
    *count = 0;
    *rows = 0;
    *longest = 1;
    *outputs = 0;
    for (int i = 0; i < plan->count; i++) {
        const mp_item *item = plan->items[i];
        mp_embedding_request *request = (mp_embedding_request *)item->request;
        if (atomic_load_explicit(&item->cancelled, memory_order_relaxed))
            continue;
        *outputs |= request->outputs;
        for (uint32_t k = 0; k < plan->amount[i]; k++) {
            uint32_t t = item->cursor + k;
            int32_t n = (int32_t)mp_text_step_tokens(item, t);
            engine->groups.owner[*count] = i;
            engine->groups.rows[*count] = n;
            engine->texts[*count] = text_of(engine->model, request, t);
            if (is_known(engine, *count, item, i, now_ns))
                continue;
            (*count)++;
            *rows += n;
            *longest = n > *longest ? n : *longest;
        }
    }
    return MP_OK;
}

/* Copy computed vectors to the texts that share them. If `whole` (the model files are intact), also keep the vectors as
 * recent results. */
static void share_results(mp_encoder_engine_state *engine, int texts, uint64_t now_ns, bool whole) {
    for (int c = 0; c < engine->copy_count; c++) {
        const mp_encoder_text *text = &engine->texts[engine->copies[c].text];
        memcpy(engine->copies[c].out, text->out, (size_t)text->dimensions * sizeof(float));
    }
    for (int t = 0; whole && t < texts; t++)
        if (engine->texts[t].finite && engine->texts[t].outputs == MP_EMBED_POOLED)
            mp_recent_keep(&engine->model->recent, &engine->inputs[t], now_ns);
}

/* Set the outcome of every item from its texts. */
static void conclude(mp_encoder_engine_state *engine, const mp_plan *plan, int texts, mp_outcome *outcomes) {
    const int32_t *owner = engine->groups.owner;
    for (int t = 0; t < texts; t++)
        if (!engine->texts[t].finite)
            mp_engine_fail_numeric(plan->items[owner[t]], &outcomes[owner[t]]);
    for (int c = 0; c < engine->copy_count; c++) {
        const mp_encoder_copy *made = &engine->copies[c];
        if (!engine->texts[made->text].finite)
            mp_engine_fail_numeric(plan->items[made->owner], &outcomes[made->owner]);
    }
    for (int i = 0; i < plan->count; i++) {
        mp_item *item = plan->items[i];
        if (outcomes[i] != MP_OUTCOME_FAILED && !atomic_load_explicit(&item->cancelled, memory_order_relaxed))
            mp_engine_advance(item, plan->amount[i], &((mp_embedding_request *)item->request)->done, &outcomes[i]);
    }
}

/* Returns MP_OK if the files that a step has read, also into packed panels, are those that were loaded. */
static mp_status check_files(mp_encoder *model, bool unpacked, mp_error *error) {
    MP_TRY(mp_weights_check_poisoned(model->weights, error));
    const bool experts_changed = model->experts > 0 && !mp_weights_unchanged(model->weights); /* each step reads them */
    if (!mp_weight_store_sound(&model->store, unpacked) || experts_changed)
        return mp_engine_fail_changed(error);
    return MP_OK;
}

static void engine_step(mp_engine *base, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    mp_encoder_engine_state *engine = (mp_encoder_engine_state *)base;
    mp_error error;
    mp_error_clear(&error);
    int texts = 0, longest = 1;
    int64_t rows = 0;
    unsigned outputs = 0;
    uint64_t start = mp_sys_now_ns();
    if (collect(engine, plan, start, &texts, &rows, &longest, &outputs, &error) != MP_OK) {
        mp_engine_fail_all(plan, &error, outcomes);
        return;
    }
    const bool together = lease->threads > 1 && shared_by_threads(engine->model, texts, rows);
    mp_groups_make(&engine->groups, texts, rows, together ? 1 : lease->threads, GROUP_TOKENS);
    for (int t = 0; t < texts; t++)
        engine->texts[t].row = engine->groups.row0[t];
    mp_weight_store *store = &engine->model->store;
    const bool unpacked = mp_weight_store_unpacked(store), warming = mp_weight_store_warming(store);
    const int most_rows = engine->groups.most_rows;
    step_run run = {.engine = engine,
                    .step = {.groups = &engine->groups,
                             .lease = lease,
                             .together = together,
                             .group_bytes = mp_encoder_group_scratch(engine->model, most_rows, outputs),
                             .thread_bytes = mp_encoder_thread_scratch(engine->model, longest, most_rows, outputs),
                             .run = run_group}};
    run.step.arg = &run;
    if (mp_group_step_reserve(&run.step, &engine->arena, engine->budget, &engine->charged, &error) != MP_OK) {
        mp_engine_fail_all(plan, &error, outcomes);
        return;
    }
    const uint64_t packed = mp_weight_store_begin(store, (int)rows);
    mp_group_step_run(&run.step);
    mp_weight_store_end(store, packed);

    bool stopped = mp_lease_poll(lease);
    bool whole = check_files(engine->model, unpacked, &error) == MP_OK;
    uint64_t end = mp_sys_now_ns();
    if (!stopped)
        share_results(engine, texts, end, whole);
    for (int i = 0; i < plan->count; i++)
        outcomes[i] = MP_OUTCOME_MORE;
    if (!whole)
        mp_engine_fail_all(plan, &error, outcomes);
    else if (!stopped)
        conclude(engine, plan, texts, outcomes);
    if (rows > 0 && !stopped && !warming) /* a step that packs or reads weights takes longer than later steps */
        mp_text_step_learn(&engine->model->token_ns, end - start, rows);
}

static void engine_preempt(mp_engine *engine, mp_item *item) {
    (void)engine;
    (void)item; /* an encoder keeps no state between steps */
}

static void engine_retire(mp_engine *engine, mp_item *item) {
    (void)engine;
    item->state = NULL;
}

static uint64_t release_memory(mp_encoder_engine_state *engine) {
    return mp_engine_release(&engine->arena, engine->budget, &engine->charged);
}

static uint64_t engine_trim(mp_engine *base) {
    mp_encoder_engine_state *engine = (mp_encoder_engine_state *)base;
    return release_memory(engine) + mp_recent_trim(&engine->model->recent) +
           mp_weight_store_drop(&engine->model->store);
}

static void engine_destroy(mp_engine *base) {
    mp_encoder_engine_state *engine = (mp_encoder_engine_state *)base;
    release_memory(engine);
    mp_dedup_table_deinit(&engine->dedup);
    mp_free(engine->copies);
    mp_free(engine->inputs);
    mp_free(engine->texts);
    mp_groups_deinit(&engine->groups);
    mp_free(engine);
}

static uint64_t engine_bytes(const mp_engine *base) {
    return ((const mp_encoder_engine_state *)base)->charged;
}

static const mp_engine_ops encoder_engine_ops = {
    .admit = engine_admit,
    .plan = engine_plan,
    .step = engine_step,
    .preempt = engine_preempt,
    .retire = engine_retire,
    .trim = engine_trim,
    .destroy = engine_destroy,
    .bytes = engine_bytes,
};

mp_status mp_encoder_engine(mp_model *model, mp_budget *budget, mp_engine **out, mp_error *error) {
    mp_encoder_engine_state *engine = mp_alloc_zeroed(sizeof *engine, MP_TAG_SCRATCH);
    if (!engine)
        return mp_fail_memory(error, sizeof *engine, "an engine");
    engine->base.ops = &encoder_engine_ops;
    engine->model = (mp_encoder *)model;
    engine->budget = budget;
    *out = &engine->base;
    return MP_OK;
}
