/* decoder/engine.c: the step interface over a decoder. A step is one pass over the weights for decode rows of all
 * running sequences and for prefill slices.
 *
 * The state of a sequence is its tokens (prompt and completion) and the number of tokens in the KV cache. Tokens not
 * yet cached are computed in order; after the last one the next token is sampled. So prefill, decode and the restart
 * after a preemption are the same operation. The n completions of a request share the cache of its prompt, and so do
 * prompts with a common prefix: see decoder/sequence.h. Draft tokens may follow the last token, each with logits of its
 * own: see generation/speculation.h. */
#include <assert.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/options.h"
#include "models/decoder/drafts.h"
#include "models/decoder/load.h"

/* ---- check ------------------------------------------------------------------------------------------------------- */

static mp_status check_ids(const mp_decoder *model, const int32_t *ids, int32_t n, const char *what, mp_error *error) {
    for (int32_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= model->tokens.shape[0])
            return mp_fail(error, MP_INVALID_ARGUMENT, "%s %d is outside the vocabulary of %lld", what, ids[i],
                           (long long)model->tokens.shape[0]);
    return MP_OK;
}

mp_status mp_decoder_check(const mp_model *base, mp_request *request_base, uint64_t *cost_ns, uint32_t *total,
                           mp_error *error) {
    const mp_decoder *model = (const mp_decoder *)base;
    mp_text_request *request = (mp_text_request *)request_base;
    if (request->n_prompt >= model->context) {
        mp_fail(error, MP_CONTEXT_OVERFLOW,
                "the prompt must have at most %d tokens, so that the model can generate one more; got %d. Shorten the "
                "prompt", model->context - 1, request->n_prompt);
        if (error) {
            snprintf(error->got, sizeof error->got, "%d", request->n_prompt);
            snprintf(error->allowed, sizeof error->allowed, "%d", model->context - 1);
        }
        return MP_CONTEXT_OVERFLOW;
    }
    MP_TRY(check_ids(model, request->prompt, request->n_prompt, "token id", error));
    MP_TRY(check_ids(model, request->bias_ids, request->n_bias, "logit_bias id", error));
    MP_TRY(check_ids(model, request->stop_ids, request->n_stop_ids, "stop id", error));
    if (request->adapter != 0 && mp_adapters_find(&model->adapters, request->adapter) == 0)
        return mp_fail(error, MP_INVALID_ARGUMENT, "the model has no adapter %d", request->adapter);
    if (model->whole_prompts && (request->sampling.max_tokens > 1 || request->n_choices > 1 || request->masks))
        return mp_fail(error, MP_UNSUPPORTED, "the model embeds texts and images; `max_tokens` and `n` must be 1, got "
                       "%d and %d", request->sampling.max_tokens, request->n_choices);
    if (model->whole_prompts && request->n_bias > 0) /* the row of logits is a vector: it has no column for a token */
        return mp_fail(error, MP_UNSUPPORTED, "the model embeds texts and images: `logit_bias` must be empty, got %d "
                       "ids", request->n_bias);
    request->whole_prompt = (mp_image_run){.rows = request->n_prompt};
    if (model->vision)
        MP_TRY(mp_vision_check(model->vision, request, error));
    else if (request->images.n_runs > 0)
        return mp_fail(error, MP_UNSUPPORTED, "the request has images, the model takes text only");
    uint64_t rows = (uint64_t)request->n_prompt + (uint64_t)request->sampling.max_tokens * (uint64_t)request->n_choices;
    *cost_ns = rows * atomic_load_explicit(&model->row_ns, memory_order_relaxed);
    /* units of progress: prompt tokens, completion tokens, ends of completions */
    int64_t units = request->n_prompt + (int64_t)request->n_choices * (request->sampling.max_tokens + 1);
    *total = units < UINT32_MAX ? (uint32_t)units : UINT32_MAX;
    request->vocab = model->vocab;
    request->hidden = model->hidden * (1 + (model->vision ? mp_vision_taps(model->vision) : 0));
    request->sampled_vocab = model->sampled_vocab;
    request->context = model->context;
    request->ends = mp_spec_tokens(mp_weights_spec(model->weights))->eog;
    request->n_ends = mp_spec_tokens(mp_weights_spec(model->weights))->eog_count;
    request->capture.layers = model->layer_count;
    request->capture.hidden = model->hidden;
    request->capture.vocab = model->vocab;
    return mp_text_request_output(request, model->max_token_bytes, error);
}

/* ---- admit, retire ----------------------------------------------------------------------------------------------- */

/* Takes no KV blocks: each step takes those that it needs. */
static mp_status engine_admit(mp_engine *base, mp_item *item, mp_error *error) {
    mp_text_engine *engine = (mp_text_engine *)base;
    const mp_text_request *request = (const mp_text_request *)item->request;
    if (item->state) { /* the item was preempted, maybe in another engine */
        MP_TRY(mp_images_number(engine->images, request, item->state, error));
        item->abandon = NULL;
        engine->admitted++;
        return MP_OK;
    }
    mp_sequence_group *state = NULL;
    mp_status status = mp_sequence_group_create(engine->model, &engine->cache, item, &state, error);
    if (status == MP_MEMORY_EXHAUSTED && mp_drafter_release(&engine->drafter) > 0)
        status = mp_sequence_group_create(engine->model, &engine->cache, item, &state, error);
    if (status != MP_OK)
        return status;
    item->state = state;
    status = mp_images_begin(engine->images, request, engine->model->sections.pairs[0] > 0, state, error);
    if (status == MP_OK)
        status = mp_images_number(engine->images, request, state, error);
    if (status == MP_OK)
        status = mp_sequence_group_resume(engine, item, error);
    if (status != MP_OK) {
        mp_sequence_group_destroy(state);
        item->state = NULL;
        return status;
    }
    engine->admitted++;
    return MP_OK;
}

/* Marks unfinished completions as cancelled, and publishes their held-back text. */
static void close_choices(mp_item *item) {
    mp_sequence_group *state = item->state;
    mp_text_request *request = (mp_text_request *)item->request;
    for (int i = 0; i < state->n; i++) {
        if (atomic_load_explicit(&request->choices[i].finish, memory_order_relaxed) != MP_FINISH_NONE)
            continue;
        mp_stream_finish(&state->seqs[i].stream, request);
        atomic_store_explicit(&request->choices[i].finish, MP_FINISH_CANCELLED, memory_order_release);
    }
}

static void abandon(mp_item *item) {
    close_choices(item);
    mp_sequence_group_destroy(item->state);
    item->state = NULL;
}

/* Releases an item's KV blocks and image tiles. */
static void release(mp_text_engine *engine, mp_item *item) {
    mp_sequence_group_drop(item->state, &engine->cache);
    mp_images_release(engine->images, (const mp_text_request *)item->request, item->state);
    if (--engine->admitted == 0)
        mp_images_trim(engine->images);
}

static void engine_preempt(mp_engine *base, mp_item *item) {
    release((mp_text_engine *)base, item);
    item->abandon = abandon;
}

static void engine_retire(mp_engine *base, mp_item *item) {
    if (!item->state)
        return;
    if (!item->abandon) /* if `abandon` is set, the item was preempted and holds no blocks */
        release((mp_text_engine *)base, item);
    abandon(item);
    item->abandon = NULL;
}

/* ---- step: before the pass --------------------------------------------------------------------------------------- */

static mp_status reserve(mp_text_engine *engine, size_t bytes, mp_error *error) {
    if (bytes <= engine->arena.size)
        return MP_OK;
    bytes += bytes / 8; /* contexts grow: avoid a new arena every 64 tokens */
    mp_arena *arena = &engine->arena;
    mp_status status = mp_engine_reserve(arena, bytes, engine->budget, &engine->charged, error);
    if (status != MP_OK && mp_drafter_release(&engine->drafter) > 0)
        status = mp_engine_reserve(arena, bytes, engine->budget, &engine->charged, error);
    if (status != MP_OK && mp_images_shrink(engine->images, bytes - arena->size) > 0)
        status = mp_engine_reserve(arena, bytes, engine->budget, &engine->charged, error);
    if (status != MP_OK && mp_prefix_shrink(&engine->cache, bytes - arena->size) > 0)
        status = mp_engine_reserve(arena, bytes, engine->budget, &engine->charged, error);
    return status;
}

static mp_status add_step(mp_text_engine *engine, const mp_step_seq *step, mp_error *error) {
    if (engine->step_count == engine->step_capacity) {
        int capacity = engine->step_capacity ? 2 * engine->step_capacity : 64;
        mp_step_seq *grown = mp_realloc(engine->steps, (size_t)capacity * sizeof *grown, MP_TAG_SCRATCH);
        if (!grown)
            return mp_fail_memory(error, (uint64_t)capacity * sizeof *grown, "the list of sequences");
        engine->steps = grown;
        engine->step_capacity = capacity;
    }
    engine->steps[engine->step_count++] = *step;
    return MP_OK;
}

/* Samples the next token of a sequence that waited for its mask, if the mask is set now. */
static void sample_deferred(mp_text_engine *engine, mp_item *item, int c, mp_outcome *outcome) {
    mp_error error;
    if (!mp_sequence_group_may_sample(item, c))
        return;
    mp_status status = reserve(engine, mp_sample_bytes(engine->model), &error);
    if (status != MP_OK) {
        *outcome = MP_OUTCOME_WAIT_MEMORY;
        item->error = error;
        return;
    }
    mp_arena_reset(&engine->arena); /* nothing of this step is in the arena yet */
    status = mp_sequence_group_sample_deferred(engine, item, c,
                                               mp_arena_take(&engine->arena, mp_sample_bytes(engine->model)));
    if (status != MP_OK)
        *outcome = MP_OUTCOME_FAILED;
}

/* Selects the sequences of the step and the number of rows of each. Returns the total. Takes no memory that outlives
 * the step. */
static int select_rows(mp_text_engine *engine, const mp_plan *plan, mp_outcome *outcomes) {
    int rows = 0;
    engine->step_count = 0;
    for (int p = 0; p < plan->count; p++) {
        mp_item *item = plan->items[p];
        mp_sequence_group *state = item->state;
        int left = (int)plan->amount[p];
        outcomes[p] = MP_OUTCOME_MORE;
        if (atomic_load_explicit(&item->cancelled, memory_order_relaxed) || item == engine->span.item)
            continue;
        mp_sequence_group_reuse(item, &engine->cache);
        for (int c = 0; c < state->n && left > 0; c++) {
            mp_sequence *seq = &state->seqs[c];
            if (!seq->active || seq->done)
                continue;
            if (seq->awaits_mask)
                sample_deferred(engine, item, c, &outcomes[p]);
            if (outcomes[p] != MP_OUTCOME_MORE)
                break;
            /* 0 rows also while the sequence waits */
            int missing, want = seq->done ? 0 : mp_sequence_step_rows(engine, item, seq, left, &missing);
            if (want == 0)
                continue;
            mp_step_seq step = {.seq = seq, .plan = p, .choice = c, .rows = want};
            if (add_step(engine, &step, &item->error) != MP_OK) {
                outcomes[p] = MP_OUTCOME_FAILED;
                break;
            }
            rows += want;
            left -= want;
        }
    }
    return rows;
}

/* Takes KV blocks for the selected rows, and drops rows for which there is no memory. An item left without rows waits
 * for memory. */
static int take_blocks(mp_text_engine *engine, const mp_plan *plan, mp_outcome *outcomes) {
    int rows = 0, kept = 0;
    for (int p = 0, s = 0; p < plan->count; p++) {
        mp_item *item = plan->items[p];
        mp_status status = MP_OK;
        int mine = 0;
        for (; s < engine->step_count && engine->steps[s].plan == p; s++) {
            mp_step_seq step = engine->steps[s];
            if (outcomes[p] != MP_OUTCOME_MORE)
                continue;
            int wanted = step.rows;
            mp_status extended = mp_cached_take(&step.seq->cached, &engine->cache, &step.rows, &item->error);
            if (extended != MP_OK && mp_drafter_release(&engine->drafter) > 0) {
                step.rows = wanted;
                extended = mp_cached_take(&step.seq->cached, &engine->cache, &step.rows, &item->error);
            }
            if (extended != MP_OK && mp_images_shrink(engine->images, mp_prefix_block_bytes(&engine->cache)) > 0) {
                step.rows = wanted;
                extended = mp_cached_take(&step.seq->cached, &engine->cache, &step.rows, &item->error);
            }
            status = status == MP_OK ? extended : status;
            if (extended != MP_OK) {
                const mp_text_request *request = (const mp_text_request *)item->request;
                step.rows = mp_span_fit(engine->model, request, step.seq->cached.count, step.rows);
            }
            if (step.rows > 0)
                engine->steps[kept++] = step;
            mine += step.rows;
        }
        if (mine == 0 && status != MP_OK)
            outcomes[p] = MP_OUTCOME_WAIT_MEMORY;
        rows += mine;
    }
    engine->step_count = kept;
    return rows;
}

/* Sets rows->vector for the image rows of a sequence, whose ids are negative, and replaces these ids by 0. Also copies
 * the vectors to request->image_rows, unless that is NULL. */
static void fill_vectors(mp_text_engine *engine, const mp_item *item, const mp_step_seq *step, int row0,
                         const mp_rows *rows, int32_t *id) {
    mp_text_request *request = (mp_text_request *)item->request;
    const size_t bytes = (size_t)request->hidden * sizeof(float);
    for (int i = 0; i < step->rows + step->drafts; i++) {
        rows->vector[row0 + i] = NULL;
        if (id[row0 + i] >= 0)
            continue;
        int64_t source;
        const int32_t position = step->seq->cached.count + i;
        const float *row = mp_images_row(engine->images, request, item->state, position, &source);
        rows->vector[row0 + i] = row;
        id[row0 + i] = 0;
        if (request->image_rows)
            memcpy(request->image_rows + source * request->hidden, row, bytes);
    }
}

static bool is_captured(const mp_text_engine *engine, const mp_plan *plan) {
    for (int s = 0; s < engine->step_count; s++)
        if (((const mp_text_request *)plan->items[engine->steps[s].plan]->request)->capture.values > 0)
            return true;
    return false;
}

/* Adds capture records for the rows with logits, up to the number of tokens that the request captures. */
static void capture_step(const mp_step_seq *step, const mp_text_request *request, mp_rows *rows) {
    const mp_capture *capture = &request->capture;
    int token = step->seq->count - request->n_prompt; /* index in the completion */
    for (int i = 0; i <= step->drafts && token + i < capture->tokens; i++)
        rows->capture[rows->n_capture++] =
            mp_capture_at(capture, token + i, rows->M - 1 - step->drafts + i, step->output + i);
}

/* Sets seq->spans. */
static void set_spans(const mp_decoder *model, const mp_text_request *request, mp_row_seq *seq) {
    int32_t count;
    const mp_image_run *spans = mp_spans_of(model, request, &count), *end = spans + count;
    if (count == 0)
        return;
    seq->spans = mp_image_run_at(spans, count, seq->past);
    if (seq->spans->start + seq->spans->rows <= seq->past)
        seq->spans++;
    while (seq->spans + seq->n_spans < end && seq->spans[seq->n_spans].start < seq->past + seq->rows)
        seq->n_spans++;
}

/* Lays out the rows of the step. id, seq and output_row have room for the rows that select_rows and mp_drafts_add
 * counted. */
static void fill_rows(mp_text_engine *engine, const mp_plan *plan, mp_rows *rows, int32_t *id) {
    rows->M = 0;
    rows->n_output = 0;
    rows->n_capture = 0;
    rows->n_seq = engine->step_count;
    rows->taps = rows->vector ? mp_vision_taps(engine->model->vision) : 0;
    for (int s = 0; s < engine->step_count; s++) {
        mp_step_seq *step = &engine->steps[s];
        mp_sequence *seq = step->seq;
        mp_text_request *request = (mp_text_request *)plan->items[step->plan]->request;
        const mp_sequence_group *group = plan->items[step->plan]->state;
        const mp_request_images *images = group->images;
        const mp_state *state = seq->cached.state;
        memcpy(id + rows->M, seq->tokens + seq->cached.count, (size_t)step->rows * sizeof *id);
        memcpy(id + rows->M + step->rows, seq->draft.tokens, (size_t)step->drafts * sizeof *id);
        if (rows->vector)
            fill_vectors(engine, plan->items[step->plan], step, rows->M, rows, id);
        bool last = seq->cached.count + step->rows == seq->count;
        int prompt_left = request->n_prompt - seq->cached.count; /* negative once the sequence decodes */
        bool all = request->want_prompt_logits && step->choice == 0 && prompt_left > 0;
        rows->seq[s] = (mp_row_seq){
            .row0 = rows->M,
            .rows = step->rows + step->drafts,
            .past = seq->cached.count,
            .is_long = mp_decoder_is_long(engine->model, request),
            .adapter = group->adapter,
            .blocks = seq->cached.blocks,
            .state = state ? state->memory : NULL,
            .log = state ? state->log : NULL,
            .pending = state ? state->pending : 0,
            .logs = step->drafts > 0,
            .positions = images ? (const int32_t (*)[3])images->positions : NULL,
            .n_positions = request->n_prompt,
            .shift = images ? images->shift : 0,
            .all_outputs =
                all ? request->prompt_logits + (size_t)seq->cached.count * (size_t)engine->model->vocab : NULL,
            .all_rows = step->rows < prompt_left ? step->rows : prompt_left,
        };
        set_spans(engine->model, request, &rows->seq[s]);
        rows->M += step->rows + step->drafts;
        step->output = last ? rows->n_output : -1;
        for (int row = rows->M - 1 - step->drafts; last && row < rows->M; row++)
            rows->output_row[rows->n_output++] = row;
        if (last)
            capture_step(step, request, rows);
    }
    rows->id = id;
}

/* ---- step: after the pass ---------------------------------------------------------------------------------------- */

static void report(const mp_text_engine *engine, const mp_plan *plan, mp_outcome *outcomes) {
    mp_error error;
    const bool whole = mp_weights_check_poisoned(engine->model->weights, &error) == MP_OK;
    for (int p = 0; p < plan->count; p++) {
        mp_item *item = plan->items[p];
        if (outcomes[p] != MP_OUTCOME_MORE)
            continue;
        if (!whole) {
            item->error = error;
            outcomes[p] = MP_OUTCOME_FAILED;
            continue;
        }
        const mp_sequence_group *state = item->state;
        mp_text_request *request = (mp_text_request *)item->request;
        bool done = true, waits = true;
        uint32_t cursor = (uint32_t)(request->prompt_done_ns ? request->n_prompt : state->seqs[0].cached.count);
        for (int c = 0; c < state->n; c++) {
            done &= state->seqs[c].done;
            waits &= state->seqs[c].done || state->seqs[c].awaits_mask;
            cursor += atomic_load_explicit(&request->choices[c].token_count, memory_order_relaxed) +
                      state->seqs[c].done;
        }
        item->cursor = cursor;
        if (done) {
            request->finished_ns = mp_sys_now_ns();
            outcomes[p] = MP_OUTCOME_DONE;
        } else if (waits) {
            outcomes[p] = MP_OUTCOME_WAIT_MASK;
        }
    }
}

/* ---- step -------------------------------------------------------------------------------------------------------- */

static void pass_body(const mp_team_thread *thread, void *arg) { mp_decoder_forward(arg, thread); }

/* Scratch is reserved before KV blocks. Without scratch no item of the pass can proceed, so all of them wait until
 * memory is released. */
static void defer_all(const mp_text_engine *engine, const mp_plan *plan, const mp_error *error, mp_outcome *outcomes) {
    for (int s = 0; s < engine->step_count; s++) {
        const int p = engine->steps[s].plan;
        if (outcomes[p] == MP_OUTCOME_MORE) {
            plan->items[p]->error = *error;
            outcomes[p] = MP_OUTCOME_WAIT_MEMORY;
        }
    }
}

/* Returns true if the parts of files that a pass has read (token table, experts, unpacked weights) are unchanged since
 * the load. Called after the pass, before tokens become visible. Costs a third of a microsecond per file. `report`
 * handles truncated files. */
static bool is_sound(mp_decoder *model, bool unpacked) {
    if (!mp_weight_store_sound(&model->store, unpacked))
        return false;
    bool reads = !model->tied || model->experts.count > 0;
    return !reads || mp_weights_poisoned(model->weights) || mp_weights_unchanged(model->weights);
}

static void sum_drafts(const mp_text_engine *engine, int *drafts, int *accepted) {
    *drafts = *accepted = 0;
    for (int s = 0; s < engine->step_count; s++) {
        *drafts += engine->steps[s].drafts;
        *accepted += engine->steps[s].accepted;
    }
}

static void count_work(mp_text_engine *engine, const mp_rows *all) {
    mp_step_work *work = &engine->base.work;
    int drafts, accepted;
    sum_drafts(engine, &drafts, &accepted);
    work->passes++;
    work->rows += (uint64_t)all->M;
    work->draft_tokens += (uint64_t)drafts;
    work->accepted_draft_tokens += (uint64_t)accepted;
    work->prefix_tokens = atomic_load_explicit(&engine->cache.counters.tokens, memory_order_relaxed);
}

/* Updates one of two time estimates: a pass with few rows takes the time of reading the weights, a pass with many rows
 * that of the arithmetic. Also updates the number of threads, and the estimates of the speculation. */
static void learn(mp_text_engine *engine, const mp_rows *all, const mp_lease *lease, uint64_t start_ns,
                  uint64_t thread_ns) {
    uint64_t ns = mp_sys_now_ns() - start_ns;
    int rows = all->M, drafts, accepted;
    mp_tuner_note(&engine->tuner, lease->threads, mp_team_size(lease->team), rows, ns);
    sum_drafts(engine, &drafts, &accepted);
    if (rows - drafts == all->n_seq && all->n_output == rows)
        mp_speculation_account(&engine->speculation, all->n_seq, drafts, accepted, mp_sys_thread_ns() - thread_ns);
    if (drafts > 0)
        return; /* row_ns and decode_ns serve to plan steps, and plans contain no drafts */
    bool many = rows >= MP_STEP_ROWS / 16;
    _Atomic uint64_t *estimate = many ? &engine->model->row_ns : &engine->model->decode_ns;
    uint64_t now = many ? ns / (uint64_t)rows : ns, old = atomic_load_explicit(estimate, memory_order_relaxed);
    atomic_store_explicit(estimate, old ? (3 * old + now) / 4 + 1 : now, memory_order_relaxed);
}

typedef struct step_lists { /* bytes that the lists of a step's rows take in the arena */
    size_t id_bytes, seq_bytes, output_bytes, vector_bytes, capture_bytes;
} step_lists;

static void lay_out(mp_text_engine *engine, const mp_plan *plan, const step_lists *lists, mp_rows *rows) {
    mp_arena_reset(&engine->arena);
    int32_t *id = mp_arena_take(&engine->arena, lists->id_bytes);
    rows->seq = mp_arena_take(&engine->arena, lists->seq_bytes);
    rows->output_row = mp_arena_take(&engine->arena, lists->output_bytes);
    rows->vector = lists->vector_bytes ? mp_arena_take(&engine->arena, lists->vector_bytes) : NULL;
    rows->capture = lists->capture_bytes ? mp_arena_take(&engine->arena, lists->capture_bytes) : NULL;
    fill_rows(engine, plan, rows, id);
}

static size_t logit_bytes(const mp_text_engine *engine, const mp_rows *rows) {
    return mp_arena_cost((size_t)rows->n_output * (size_t)engine->model->vocab * sizeof(float));
}

/* Reserves scratch for the selected rows, takes KV blocks for as many of these rows as possible, and lays out the rows
 * that have blocks. Returns false if no row is left. */
static bool prepare(mp_text_engine *engine, const mp_plan *plan, int threads, int M, int drafts, mp_rows *rows,
                    mp_outcome *outcomes) {
    mp_error error;
    size_t seqs = (size_t)engine->step_count;
    step_lists lists = {
        .id_bytes = mp_arena_cost((size_t)(M + drafts) * sizeof(int32_t)),
        .seq_bytes = mp_arena_cost(seqs * sizeof(mp_row_seq)),
        .output_bytes = mp_arena_cost((seqs + (size_t)drafts) * sizeof(int)),
        .vector_bytes = engine->model->vision ? mp_arena_cost((size_t)(M + drafts) * sizeof(float *)) : 0,
        .capture_bytes =
            is_captured(engine, plan) ? mp_arena_cost((seqs + (size_t)drafts) * sizeof(mp_capture_row)) : 0,
    };
    size_t bytes = lists.id_bytes + lists.seq_bytes + lists.output_bytes + lists.vector_bytes + lists.capture_bytes;
    mp_status status = reserve(engine, bytes, &error);
    if (status == MP_OK) {
        lay_out(engine, plan, &lists, rows);
        bytes += logit_bytes(engine, rows) + mp_sample_bytes(engine->model) +
                 mp_decoder_pass_bytes(engine->model, rows, threads);
        status = reserve(engine, bytes, &error);
    }
    if (status != MP_OK && drafts > 0) {
        mp_drafts_drop(engine);
        return prepare(engine, plan, threads, M, 0, rows, outcomes);
    }
    if (status != MP_OK) {
        defer_all(engine, plan, &error, outcomes);
        return false;
    }
    if (take_blocks(engine, plan, outcomes) == 0)
        return false;
    if (drafts > 0)
        mp_drafts_take(engine);
    lay_out(engine, plan, &lists, rows); /* lay out again: rows may have been dropped, and the arena may have moved */
    rows->logits = mp_arena_take(&engine->arena, logit_bytes(engine, rows));
    return true;
}

/* Computes parts of the image network for the planned item. */
static void compute_image_part(mp_text_engine *engine, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    mp_item *item = engine->image_part.item;
    int p = 0;
    engine->image_part.item = NULL;
    while (p < plan->count && plan->items[p] != item)
        p++;
    if (!item || p == plan->count || outcomes[p] != MP_OUTCOME_MORE ||
        atomic_load_explicit(&item->cancelled, memory_order_relaxed))
        return;
    mp_status status = mp_images_compute(engine->images, lease, (const mp_text_request *)item->request,
                                         item->state, engine->image_part.tile, engine->image_part.budget_ns,
                                         &item->cancelled, &item->error);
    if (status != MP_OK)
        outcomes[p] = status == MP_MEMORY_EXHAUSTED ? MP_OUTCOME_WAIT_MEMORY : MP_OUTCOME_FAILED;
}

/* Sets up a pass over the rows of a span: it continues a pass that is paused, and may pause itself. A model with states
 * has none of such passes: a pass that ends early would have changed some of the states. */
static void resume(mp_text_engine *engine, mp_sequence *seq, uint64_t until_ns, mp_decoder_pass *pass) {
    const mp_decoder *model = engine->model;
    if (model->kv.state_bytes > 0 || !mp_sequence_may_pause(seq, &engine->cache, pass->rows.M, model->hidden))
        return;
    pass->layer = seq->paused.layer;
    pass->resumed = pass->layer > 0 ? seq->paused.x : NULL;
    pass->until_ns = until_ns;
}

/* Runs a pass over the M rows of engine->steps, and over `drafts` draft rows. span: NULL, or the only sequence, whose
 * pass may pause at `until_ns`. */
static void run_pass(mp_text_engine *engine, mp_lease *lease, const mp_plan *plan, int M, int drafts, mp_sequence *span,
                     uint64_t until_ns, mp_outcome *outcomes) {
    const uint64_t start = mp_sys_now_ns(), thread_ns = mp_sys_thread_ns();
    mp_rows rows = {0};
    if (M == 0 || !prepare(engine, plan, lease->threads, M, drafts, &rows, outcomes))
        return;
    void *sampling = mp_arena_take(&engine->arena, mp_sample_bytes(engine->model));
    mp_decoder_pass pass;
    mp_decoder_plan_pass(&pass, engine->model, &engine->cache.kv, &rows, lease, &engine->arena);
    pass.may_end = engine->short_rows > 0 && rows.n_seq == 1 && drafts == 0;
    if (span)
        resume(engine, span, until_ns, &pass);
    const bool begins = pass.layer == 0;
    for (int s = 0; s < engine->step_count; s++)
        mp_cached_enter(&engine->steps[s].seq->cached, engine->steps[s].drafts);
    mp_weight_store *store = &engine->model->store;
    const uint64_t packed = mp_weight_store_begin(store, rows.M);
    mp_lease_run(lease, pass_body, &pass);
    const bool kept = mp_weight_store_end(store, packed);
    if (!pass.stop && pass.computed < rows.M) {
        assert(rows.n_seq == 1 && drafts == 0);
        rows.M = engine->steps[0].rows = pass.computed;
        rows.n_output = 0;
        engine->steps[0].output = -1;
        lease->cut_short = true;
    }
    if (!is_sound(engine->model, pass.unpacked)) {
        mp_error error;
        mp_engine_fail_changed(&error);
        mp_engine_fail_all(plan, &error, outcomes);
    } else if (pass.paused) {
        memcpy(span->paused.x, pass.x, span->paused.bytes);
        span->paused.layer = pass.layer;
    } else if (!pass.stop) {
        mp_sequence_group_sample(engine, plan, &pass, sampling, outcomes);
        count_work(engine, &rows);
        /* a pass that packs or reads weights, or ends early, takes longer than others */
        if (begins && !pass.warming && !kept && pass.computed == pass.rows.M)
            learn(engine, &rows, lease, start, thread_ns);
    }
    if (span && !pass.paused)
        mp_sequence_unpause(span, engine->budget);
}

/* Runs the planned pass over the rows of a span. */
static void run_span(mp_text_engine *engine, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    mp_item *item = engine->span.item;
    int p = 0;
    engine->span.item = NULL;
    while (p < plan->count && plan->items[p] != item)
        p++;
    if (!item || p == plan->count || outcomes[p] != MP_OUTCOME_MORE ||
        atomic_load_explicit(&item->cancelled, memory_order_relaxed))
        return;
    const int choice = engine->span.choice;
    mp_sequence *seq = &((mp_sequence_group *)item->state)->seqs[choice];
    const mp_text_request *request = (const mp_text_request *)item->request;
    const mp_step_seq step = {.seq = seq, .plan = p, .choice = choice,
                              .rows = mp_span_left(engine->model, request, seq->cached.count)};
    engine->step_count = 0;
    if (add_step(engine, &step, &item->error) != MP_OK)
        outcomes[p] = MP_OUTCOME_FAILED;
    else
        run_pass(engine, lease, plan, step.rows, 0, seq, mp_sys_after(mp_sys_now_ns(), engine->span.budget_ns),
                 outcomes);
}

/* Cuts a long step down to the rows that the budget allows, if the lease has too few threads for a pass that may end
 * early. Returns its rows. */
static int shorten(mp_text_engine *engine, mp_lease *lease, int rows) {
    if (engine->short_rows == 0 || rows <= engine->short_rows || engine->step_count != 1 ||
        mp_decoder_carries(engine->model, rows, lease->threads))
        return rows;
    lease->cut_short = true;
    return engine->steps[0].rows = engine->short_rows;
}

static void engine_step(mp_engine *base, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    mp_text_engine *engine = (mp_text_engine *)base;
    const uint64_t start = mp_sys_now_ns();
    for (int p = 0; p < plan->count; p++) {
        mp_text_request *request = (mp_text_request *)plan->items[p]->request;
        if (!request->started_ns)
            request->started_ns = start;
    }
    const int selected = select_rows(engine, plan, outcomes), M = shorten(engine, lease, selected);
    const int drafts = mp_drafts_add(engine, lease, plan, M);
    compute_image_part(engine, lease, plan, outcomes);
    run_pass(engine, lease, plan, M, drafts, NULL, 0, outcomes);
    run_span(engine, lease, plan, outcomes);
    report(engine, plan, outcomes);
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

static uint64_t release_memory(mp_text_engine *engine) {
    uint64_t bytes = mp_prefix_trim(&engine->cache) + mp_images_shrink(engine->images, UINT64_MAX) +
                     mp_drafter_trim(&engine->drafter);
    if (engine->admitted > 0)
        return bytes; /* keep the scratch: the next step needs it */
    /* the working memory of images was released with the last item */
    return bytes + mp_engine_release(&engine->arena, engine->budget, &engine->charged);
}

static uint64_t engine_trim(mp_engine *base) {
    mp_text_engine *engine = (mp_text_engine *)base;
    mp_decoder *draft = engine->drafter.model;
    return release_memory(engine) + mp_weight_store_drop(&engine->model->store) +
           (draft ? mp_weight_store_drop(&draft->store) : 0);
}

static void engine_destroy(mp_engine *base) {
    mp_text_engine *engine = (mp_text_engine *)base;
    release_memory(engine);
    mp_images_destroy(engine->images);
    mp_prefix_deinit(&engine->cache);
    mp_drafter_deinit(&engine->drafter);
    mp_free(engine->steps);
    mp_free(engine);
}

/* Excludes the draft indexes of running sequences. */
static uint64_t engine_bytes(const mp_engine *base) {
    const mp_text_engine *engine = (const mp_text_engine *)base;
    return engine->charged + mp_prefix_bytes(&engine->cache) + mp_prefix_bytes(&engine->drafter.cache) +
           mp_images_bytes(engine->images);
}

static bool engine_improve(mp_engine *base, mp_lease *lease) {
    return mp_decoder_pack_more(((mp_text_engine *)base)->model, lease);
}

static const mp_engine_ops decoder_engine_ops = {
    .admit = engine_admit,
    .plan = mp_decoder_plan_step,
    .step = engine_step,
    .preempt = engine_preempt,
    .retire = engine_retire,
    .trim = engine_trim,
    .destroy = engine_destroy,
    .bytes = engine_bytes,
    .improve = engine_improve,
};

mp_status mp_decoder_engine(mp_model *base, mp_budget *budget, mp_engine **out, mp_error *error) {
    mp_decoder *model = (mp_decoder *)base;
    mp_text_engine *engine = mp_alloc_zeroed(sizeof *engine, MP_TAG_SCRATCH);
    if (!engine)
        return mp_fail_memory(error, sizeof *engine, "an engine");
    if (model->vision && !(engine->images = mp_images_create(model->vision, budget, &engine->cache))) {
        mp_free(engine);
        return mp_fail_memory(error, sizeof *engine, "an engine");
    }
    engine->base.ops = &decoder_engine_ops;
    engine->model = model;
    engine->budget = budget;
    engine->tokens = mp_spec_tokens(mp_weights_spec(model->weights));
    mp_prefix_init(&engine->cache, &model->kv, budget, (uint32_t)mp_options_get()->prefix_percent);
    mp_speculation_init(&engine->speculation, (mp_speculate)mp_options_get()->speculation);
    mp_drafter_init(&engine->drafter, model->draft, budget);
    if (model->draft)
        engine->speculation.model_share =
            (double)model->draft->base.facts.weight_bytes / (double)model->base.facts.weight_bytes;
    engine->base.prefix = &engine->cache.counters;
    *out = &engine->base;
    return MP_OK;
}
