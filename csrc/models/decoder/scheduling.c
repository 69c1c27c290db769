/* decoder/scheduling.c: chooses the rows, the image tile and the image span of the next step. */
#include <stdatomic.h>

#include "models/decoder/engine.h"
#include "models/decoder/pass.h"

enum {
    MIN_ROWS = 16,     /* minimum prefill rows, however little time is left */
    PASSES_ALONE = 4,  /* a step without decode rows may take as long as this number of decode steps */
    PASSES_BESIDE = 2, /* a step with decode rows may take as long as this number of decode steps */
    IMAGE_THREADS = 64 /* threads worth using for an image layer of hundreds of rows */
};

int mp_sequence_step_rows(mp_text_engine *engine, const mp_item *item, mp_sequence *seq, int most, int *missing) {
    const mp_text_request *request = (const mp_text_request *)item->request;
    const int32_t at = seq->cached.count;
    *missing = -1;
    if (seq->paused.x && seq->paused.at == at)
        return 0;
    mp_sequence_unpause(seq, engine->budget); /* published blocks have some of its rows */
    const int left = mp_sequence_group_left(item->state, &engine->cache, seq);
    const int span = mp_span_left(engine->model, request, at);
    int want = left < most ? left : most;
    if (span > want && span <= most) /* no snapshot is kept inside a span */
        want = span;
    const int ready = mp_images_ready(engine->images, request, item->state, seq, span > want ? span : want, missing);
    want = ready < want ? ready : want;
    return mp_span_fit(engine->model, request, at, want);
}

/* Returns the rows that an item could compute now, at most `most`; *missing: as for mp_sequence_step_rows. *decoding:
 * all its sequences are decoding. Sets *masks if a sequence waits for its mask. */
static int wanted_rows(mp_text_engine *engine, const mp_item *item, int most, bool *decoding, int *missing,
                       bool *masks) {
    mp_sequence_group *state = item->state;
    int rows = 0;
    *decoding = true;
    *missing = -1;
    for (int i = 0; i < state->n; i++) {
        mp_sequence *seq = &state->seqs[i];
        if (!seq->active || seq->done)
            continue;
        if (seq->awaits_mask) { /* once the mask is set, the step samples the next token and computes its row */
            bool may = mp_sequence_group_may_sample(item, i);
            rows += may;
            *masks |= !may;
            continue;
        }
        int tile;
        rows += mp_sequence_step_rows(engine, item, seq, rows < most ? most - rows : 0, &tile);
        *missing = *missing < 0 ? tile : *missing;
        *decoding &= seq->count - seq->cached.count == 1;
    }
    return rows;
}

static bool is_computing(const mp_text_engine *engine, const mp_item *item, int tile) {
    return mp_images_computing(engine->images, (const mp_text_request *)item->request, item->state, tile);
}

/* Proposes an image tile of an item for the next step. A tile whose computation has begun is preferred, otherwise the
 * first one proposed. */
static void choose_image_part(mp_text_engine *engine, mp_item *item, int tile) {
    const mp_item *chosen = engine->image_part.item;
    if (chosen && !is_computing(engine, item, tile))
        return;
    if (chosen && is_computing(engine, chosen, engine->image_part.tile))
        return;
    engine->image_part.item = item;
    engine->image_part.tile = tile;
}

/* Adds the chosen image tile to the plan. The tile gets the time that the rows leave, but at least that of one part of
 * the image network, and its time counts towards plan->cost_ns. The amount is the number of prompt rows that take this
 * time: the worker charges each item by its share of the amounts. */
static void plan_image_part(mp_text_engine *engine, uint64_t row_ns, uint64_t budget_ns, mp_plan *plan) {
    const mp_item *item = engine->image_part.item;
    const uint64_t all = mp_images_left_ns(engine->images, (const mp_text_request *)item->request,
                                           item->state, engine->image_part.tile);
    const uint64_t least = mp_images_part_ns(engine->images);
    uint64_t left = budget_ns > plan->cost_ns ? budget_ns - plan->cost_ns : 0;
    left = left > least ? left : least;
    engine->image_part.budget_ns = left;
    const uint64_t takes = left < all ? left : all, amount = takes / row_ns + 1;
    plan->cost_ns += takes;
    plan->items[plan->count] = engine->image_part.item;
    plan->amount[plan->count++] = amount < UINT32_MAX ? (uint32_t)amount : UINT32_MAX;
}

/* Proposes a span that an item begins or continues, whose tiles are computed. The first one proposed is chosen. */
static void choose_span(mp_text_engine *engine, mp_item *item) {
    mp_sequence_group *state = item->state;
    const mp_text_request *request = (const mp_text_request *)item->request;
    for (int i = 0; i < state->n && !engine->span.item; i++) {
        const mp_sequence *seq = &state->seqs[i];
        const int span = mp_span_left(engine->model, request, seq->cached.count);
        int missing;
        if (!seq->active || seq->done || span == 0 ||
            mp_images_ready(engine->images, request, state, seq, span, &missing) < span)
            continue;
        engine->span.item = item;
        engine->span.choice = i;
    }
}

/* Adds the span of engine->span to the plan: a pass of its own, which gets the time until `most_ns` that the other rows
 * leave, but at least that of one layer. As an image tile, it is charged by its time. */
static void plan_span(mp_text_engine *engine, uint64_t row_ns, uint64_t most_ns, mp_plan *plan) {
    const mp_item *item = engine->span.item;
    const mp_sequence *seq = &((const mp_sequence_group *)item->state)->seqs[engine->span.choice];
    const mp_text_request *request = (const mp_text_request *)item->request;
    const int layers = engine->model->layer_count, done = seq->paused.x ? seq->paused.layer : 0;
    const uint64_t layer =
        (uint64_t)mp_span_left(engine->model, request, seq->cached.count) * row_ns / (uint64_t)layers;
    const uint64_t all = layer * (uint64_t)(layers - done);
    const uint64_t left = most_ns > plan->cost_ns ? most_ns - plan->cost_ns : 0;
    engine->span.budget_ns = left;
    const uint64_t takes = left > all ? all : left > layer ? left : layer, amount = takes / row_ns + 1;
    plan->cost_ns += takes;
    plan->items[plan->count] = engine->span.item;
    plan->amount[plan->count++] = amount < UINT32_MAX ? (uint32_t)amount : UINT32_MAX;
}

/* Returns the prompt rows of an item whose pass may be long, because it ends early if others wait; 0: the budget limits
 * them. threads: the compute threads of the pool. */
static int long_rows(mp_text_engine *engine, const mp_item *item, int threads, bool *masks) {
    const mp_text_request *request = (const mp_text_request *)item->request;
    const mp_sequence_group *group = item->state;
    const mp_decoder *model = engine->model;
    bool decoding;
    int missing;
    if (threads == 0 || group->n > 1 || group->images || request->want_prompt_logits || request->capture.values > 0 ||
        model->kv.state_bytes > 0 || mp_weight_store_unpacked(&model->store) ||
        mp_weight_store_warming(&model->store))
        return 0;
    const int rows = wanted_rows(engine, item, MP_STEP_ROWS, &decoding, &missing, masks);
    return mp_decoder_carries(model, rows, threads) ? rows : 0;
}

void mp_decoder_plan_step(mp_engine *base, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan) {
    mp_text_engine *engine = (mp_text_engine *)base;
    uint64_t row_ns = atomic_load_explicit(&engine->model->row_ns, memory_order_relaxed) + 1;
    int planned = 0, left = 0;
    uint64_t most = 0;
    bool first = true;
    plan->count = 0;
    plan->cost_ns = 0;
    plan->masks = false;
    engine->image_part.item = engine->span.item = NULL;
    engine->short_rows = 0;
    for (int i = 0; i < n; i++)
        mp_sequence_group_reuse(items[i], &engine->cache);
    for (int prompts = 0; prompts < 2; prompts++) {
        if (prompts) {
            /* the decode rows together take about the time of one pass over the weights */
            const uint64_t pass = atomic_load_explicit(&engine->model->decode_ns, memory_order_relaxed);
            plan->cost_ns = planned ? pass : 0;
            /* every pass takes at least the time of reading the weights: allow enough rows to amortise it */
            const uint64_t least = (planned ? PASSES_BESIDE : PASSES_ALONE) * pass;
            most = budget_ns > least ? budget_ns : least;
            if (!planned)
                most = mp_weight_store_pass_ns(&engine->model->store, most, row_ns);
            const uint64_t fits = (most - plan->cost_ns) / row_ns;
            left = fits < (uint64_t)(MP_STEP_ROWS - planned) ? (int)fits : MP_STEP_ROWS - planned;
            const int most_rows = n == 1 ? long_rows(engine, items[0], plan->alone_threads, &plan->masks) : 0;
            if (most_rows > left && most_rows > MIN_ROWS) {
                engine->short_rows = left > MIN_ROWS ? left : MIN_ROWS;
                left = most_rows;
            }
        }
        for (int i = 0; i < n && plan->count < MP_PLAN_MAX; i++) {
            bool decoding;
            int missing, rows = wanted_rows(engine, items[i], MP_STEP_ROWS, &decoding, &missing, &plan->masks);
            if (prompts && rows == 0 && missing >= 0)
                choose_image_part(engine, items[i], missing);
            if (decoding == (prompts == 1))
                continue;
            int room = !prompts ? MP_STEP_ROWS - planned : first && left < MIN_ROWS ? MIN_ROWS : left;
            if (prompts && rows > room)
                rows = wanted_rows(engine, items[i], room, &decoding, &missing, &plan->masks);
            if (prompts && rows == 0)
                choose_span(engine, items[i]);
            if (rows == 0 || (!prompts && rows > room))
                continue;
            if (prompts) {
                first = false;
                left -= rows;
                plan->cost_ns += (uint64_t)rows * row_ns;
            }
            plan->items[plan->count] = items[i];
            plan->amount[plan->count++] = (uint32_t)rows;
            planned += rows;
        }
    }
    enum { LONG_ROWS = 64 }; /* from here on, a barrier takes little of the time between barriers */
    const int worth = mp_threads_worth(&engine->model->base.facts, engine->span.item ? MP_STEP_ROWS : planned,
                                       engine->model->barriers);
    plan->threads = engine->span.item ? worth : mp_tuner_plan(&engine->tuner, worth, planned);
    if (!engine->image_part.item && n == engine->admitted && plan->count < MP_PLAN_MAX)
        mp_images_trim(engine->images); /* no item waits for a tile */
    if (engine->image_part.item && plan->count == MP_PLAN_MAX)
        engine->image_part.item = NULL;
    if (engine->image_part.item) {
        plan_image_part(engine, row_ns, budget_ns, plan);
        plan->threads = plan->threads > IMAGE_THREADS ? plan->threads : IMAGE_THREADS;
    }
    if (engine->span.item && plan->count == MP_PLAN_MAX)
        engine->span.item = NULL;
    if (engine->span.item)
        plan_span(engine, row_ns, most, plan);
    /* a long pass on few threads is a wavefront, which a thread without a CPU does not hold up */
    plan->barrier_bound = (planned < LONG_ROWS || plan->alone_threads > MP_WAVE_THREADS) && !engine->span.item &&
                          !engine->image_part.item;
}
