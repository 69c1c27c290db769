/* decoder/sampling.c: from logits to tokens: sampling, stop strings, ends of completions, verification of drafts. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "models/decoder/drafts.h"

/* Ends one completion and releases its KV blocks. stop_index: index of the stop string, or n_stop plus the index of the
 * stop id; -1: neither. */
static void finish_choice(mp_text_engine *engine, mp_sequence *seq, mp_choice *choice, mp_finish finish,
                          int stop_index) {
    choice->stop_index = stop_index;
    seq->done = true;
    mp_sequence_drop(seq, &engine->cache);
    atomic_store_explicit(&choice->finish, finish, memory_order_release);
}

/* finish_choice for a completion with its whole text. A stop string in the text that was held back ends it before
 * `finish` did. */
static void finish_text(mp_text_engine *engine, const mp_text_request *request, mp_sequence *seq, mp_choice *choice,
                        mp_finish finish, int stop_index) {
    int found = mp_stream_finish(&seq->stream, request);
    if (found >= 0)
        finish_choice(engine, seq, choice, MP_FINISH_STOP, found);
    else
        finish_choice(engine, seq, choice, finish, stop_index);
}

static int find_id(const int32_t *ids, int n, int32_t id) {
    for (int i = 0; i < n; i++)
        if (ids[i] == id)
            return i;
    return -1;
}

/* Appends a sampled token to a sequence. */
static mp_status accept(mp_text_engine *engine, mp_text_request *request, mp_sequence_group *state, int c, int32_t id,
                        float logprob, mp_error *error) {
    mp_sequence *seq = &state->seqs[c];
    mp_choice *choice = &request->choices[c];
    const mp_token_table *table = engine->tokens;
    uint32_t index = atomic_load_explicit(&choice->token_count, memory_order_relaxed);
    if (find_id(table->eog, table->eog_count, id) >= 0) {
        finish_text(engine, request, seq, choice, MP_FINISH_EOS, -1);
        return MP_OK;
    }
    /* like a stop string, a stop id that is text does not end the reasoning */
    const bool reasons = mp_stream_reasons(&seq->stream, request) && !table->control[id];
    int stop = reasons ? -1 : find_id(request->stop_ids, request->n_stop_ids, id);
    if (stop >= 0) {
        finish_text(engine, request, seq, choice, MP_FINISH_STOP, request->n_stop + stop);
        return MP_OK;
    }
    if (state->penalties)
        MP_TRY(mp_history_add(&seq->history, id, false, error));
    const uint8_t *bytes = table->bytes + table->offsets[id];
    size_t count = table->control[id] ? 0 : table->offsets[id + 1] - table->offsets[id];
    stop = mp_stream_append(&seq->stream, request, bytes, count);
    choice->tokens[index] = (mp_token_out){id, logprob, seq->stream.bytes};
    atomic_store_explicit(&choice->token_count, index + 1, memory_order_release);
    mp_stream_publish(&seq->stream);
    if (stop >= 0) {
        finish_choice(engine, seq, choice, MP_FINISH_STOP, stop);
    } else if ((int32_t)index + 1 >= request->sampling.max_tokens || seq->count >= engine->model->context) {
        finish_text(engine, request, seq, choice, MP_FINISH_LENGTH, -1);
    } else {
        seq->tokens[seq->count++] = id;
    }
    return MP_OK;
}

mp_status mp_sequence_group_resume(mp_text_engine *engine, mp_item *item, mp_error *error) {
    mp_text_request *request = (mp_text_request *)item->request;
    mp_sequence_group *state = item->state;
    if (request->prompt_done_ns || item->cursor)
        state->prefilled = request->prompt_done_ns || (int32_t)item->cursor > request->n_prompt ? request->n_prompt
                                                                                                : (int32_t)item->cursor;
    for (int c = 0; c < state->n; c++) {
        mp_choice *choice = &request->choices[c];
        mp_sequence *seq = &state->seqs[c];
        uint32_t count = atomic_load_explicit(&choice->token_count, memory_order_relaxed);
        int32_t finish = atomic_load_explicit(&choice->finish, memory_order_relaxed);
        const uint32_t bytes = atomic_load_explicit(&choice->text_bytes, memory_order_relaxed);
        int stop_index = choice->stop_index;
        seq->active |= request->prompt_done_ns != 0;
        if (count == 0 && finish == MP_FINISH_NONE)
            continue;
        atomic_store_explicit(&choice->token_count, 0, memory_order_relaxed);
        atomic_store_explicit(&choice->text_bytes, 0, memory_order_relaxed);
        for (uint32_t i = 0; i < count && !seq->done; i++) {
            const mp_status status =
                accept(engine, request, state, c, choice->tokens[i].id, choice->tokens[i].logprob, error);
            if (status == MP_OK)
                continue;
            /* the caller may have seen all of them, so they must count as results */
            atomic_store_explicit(&choice->token_count, count, memory_order_relaxed);
            atomic_store_explicit(&choice->text_bytes, bytes, memory_order_relaxed);
            return status;
        }
        if (finish != MP_FINISH_NONE && !seq->done) {
            /* a stop id or an end token, which is not part of the completion, has ended it */
            finish_text(engine, request, seq, choice, (mp_finish)finish, stop_index);
        }
    }
    return MP_OK;
}

mp_sample_args mp_sequence_group_sample_args(const mp_item *item, int c, uint32_t index) {
    const mp_text_request *request = (const mp_text_request *)item->request;
    const mp_sequence_group *state = item->state;
    bool early = (int32_t)index < request->sampling.min_tokens;
    return (mp_sample_args){
        .sampling = &request->sampling,
        .history = state->penalties ? &state->seqs[c].history : NULL,
        .n_bias = request->n_bias,
        .bias_ids = request->bias_ids,
        .bias = request->bias,
        .n_barred = early ? state->n_barred : state->n_always,
        .barred = state->barred,
        .choice = (uint32_t)c,
        .position = index,
    };
}

/* Samples the next token of one sequence from its logits, which are overwritten. If the sequence's mask is not set yet,
 * copies the logits to seq->deferred_logits and samples nothing. */
static mp_status sample(mp_text_engine *engine, mp_item *item, int c, float *logits, mp_candidate *candidates) {
    mp_text_request *request = (mp_text_request *)item->request;
    mp_sequence_group *state = item->state;
    mp_choice *choice = &request->choices[c];
    mp_sequence *seq = &state->seqs[c];
    const mp_sampling *s = &request->sampling;
    int32_t vocab = engine->model->sampled_vocab;
    uint32_t index = atomic_load_explicit(&choice->token_count, memory_order_relaxed);
    if (request->capture.values > 0) /* counted even if sampling fails: the captured records help to find why */
        atomic_store_explicit(&request->capture.sampled, index + 1, memory_order_release);
    if (!mp_kernels_get()->all_finite(logits, vocab))
        return mp_fail(&item->error, MP_NUMERIC, "the model produced NaN or infinity in the logits of token %u", index);
    const uint32_t *mask = request->masks ? mp_text_request_mask_at(request, c, index) : NULL;
    seq->awaits_mask = request->masks && !mask;
    if (seq->awaits_mask) {
        if (logits != seq->deferred_logits)
            memcpy(seq->deferred_logits, logits, (size_t)vocab * sizeof *logits);
        return MP_OK;
    }
    mp_sample_args args = mp_sequence_group_sample_args(item, c, index);
    args.mask_words = request->mask_words;
    args.mask = mask;
    float *original = NULL;
    if (s->logprobs >= 0) { /* log probabilities are those of the model, before any adjustment */
        original = (float *)(candidates + vocab);
        memcpy(original, logits, (size_t)vocab * sizeof *original);
    }
    int32_t id = mp_sample(&args, logits, vocab, candidates);
    if (id < 0)
        return mp_fail_hint(&item->error, MP_NUMERIC, "Forbid fewer tokens: see logit_bias, ignore_eos and min_tokens",
                            "no token can be sampled: every logit is minus infinity");
    float logprob = NAN;
    if (original) {
        int k = s->logprobs;
        mp_logprobs(original, vocab, id, k, &logprob, k ? choice->top_ids + (size_t)index * (size_t)k : NULL,
                    k ? choice->top_logprobs + (size_t)index * (size_t)k : NULL, candidates);
    }
    return accept(engine, request, state, c, id, logprob, &item->error);
}

size_t mp_sample_bytes(const mp_decoder *model) {
    return mp_arena_cost((size_t)model->sampled_vocab * (sizeof(mp_candidate) + sizeof(float))) +
           mp_arena_cost((size_t)model->vocab * sizeof(float));
}

bool mp_sequence_group_may_sample(const mp_item *item, int c) {
    const mp_text_request *request = (const mp_text_request *)item->request;
    const mp_sequence_group *state = item->state;
    uint32_t index = atomic_load_explicit(&request->choices[c].token_count, memory_order_relaxed);
    return state->seqs[c].awaits_mask && mp_text_request_mask_at(request, c, index);
}

mp_status mp_sequence_group_sample_deferred(mp_text_engine *engine, mp_item *item, int c, void *scratch) {
    mp_sequence_group *state = item->state;
    return sample(engine, item, c, state->seqs[c].deferred_logits, scratch);
}

/* When the prefill of an item is complete, forks its other sequences from the first, and samples their first tokens
 * from the same logits. */
static mp_status start_others(mp_text_engine *engine, mp_item *item, const mp_sequence *first, const float *logits,
                              float *copy, mp_candidate *candidates) {
    mp_text_request *request = (mp_text_request *)item->request;
    mp_sequence_group *state = item->state;
    request->prompt_done_ns = mp_sys_now_ns();
    mp_sequence_group_fork(state, &engine->cache);
    for (int c = 1; c < state->n; c++) {
        if (state->seqs[c].cached.count != first->cached.count)
            continue; /* this sequence computes the rest of the prompt itself and samples later */
        memcpy(copy, logits, (size_t)engine->model->vocab * sizeof *copy);
        MP_TRY(sample(engine, item, c, copy, candidates));
    }
    return MP_OK;
}

void mp_sequence_group_sample(mp_text_engine *engine, const mp_plan *plan, const mp_decoder_pass *pass, void *scratch,
                              mp_outcome *outcomes) {
    size_t vocab = (size_t)engine->model->vocab;
    mp_candidate *candidates = scratch;
    float *copy = (float *)((uint8_t *)scratch +
                            mp_arena_cost((size_t)engine->model->sampled_vocab * (sizeof *candidates + sizeof(float))));
    /* keys and values of a whole prompt are of no use to a longer one */
    const bool sound = !mp_weights_poisoned(engine->model->weights) && !engine->model->whole_prompts;
    for (int s = 0; s < engine->step_count; s++) {
        mp_step_seq *step = &engine->steps[s];
        mp_item *item = plan->items[step->plan];
        mp_sequence *seq = step->seq;
        if (mp_drafts_undo(engine, pass, &pass->rows.seq[s], step))
            continue;
        mp_sequence_group_keep(item, &engine->cache, step->choice, step->rows, sound);
        if (step->output < 0 || outcomes[step->plan] == MP_OUTCOME_FAILED)
            continue;
        float *logits = pass->rows.logits + (size_t)step->output * vocab;
        mp_status status = MP_OK;
        if (!((mp_text_request *)item->request)->prompt_done_ns)
            status = start_others(engine, item, seq, logits, copy, candidates);
        if (status == MP_OK)
            status = sample(engine, item, step->choice, logits, candidates);
        while (status == MP_OK && mp_drafts_accept(engine, step)) {
            mp_sequence_group_keep(item, &engine->cache, step->choice, 1, sound);
            status = sample(engine, item, step->choice, logits + (size_t)step->accepted * vocab, candidates);
        }
        if (status != MP_OK)
            outcomes[step->plan] = MP_OUTCOME_FAILED;
    }
}
