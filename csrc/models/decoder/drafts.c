/* decoder/drafts.c: see decoder/drafts.h. */
#include "models/decoder/drafts.h"

#include <stdatomic.h>

/* ---- which sequences, which tokens ------------------------------------------------------------------------------- */

static int smaller(int a, int b) { return a < b ? a : b; }

static bool is_among(const int32_t *ids, int n, int32_t id) {
    for (int i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

int mp_drafts_most(const mp_decoder *model, const mp_item *item, int choice) {
    const mp_text_request *request = (const mp_text_request *)item->request;
    const mp_sequence *seq = &((const mp_sequence_group *)item->state)->seqs[choice];
    /* only decoding sequences; with masks, each draft token would need its own mask */
    if (!request->prompt_done_ns || seq->cached.count + 1 != seq->count || request->masks || seq->speculation_off)
        return 0;
    /* no tokens beyond max_tokens or the end of the context: the completion could not keep them */
    int rows = smaller(request->n_prompt + request->sampling.max_tokens - 1, model->context) - seq->count;
    /* A pass with drafts leaves the state as it was, so the row before a snapshot goes without */
    if (model->kv.state_bytes > 0)
        rows = smaller(rows, seq->cached.stop - seq->count - 1);
    return rows > 0 ? smaller(rows, MP_DRAFT_MAX) : 0;
}

bool mp_drafts_may_hold(const mp_decoder *model, const mp_item *item, int32_t id) {
    const mp_text_request *request = (const mp_text_request *)item->request;
    const mp_token_table *tokens = mp_spec_tokens(mp_weights_spec(model->weights));
    return id >= 0 && id < model->sampled_vocab && !is_among(tokens->eog, tokens->eog_count, id) &&
           !is_among(request->stop_ids, request->n_stop_ids, id);
}

/* ---- before the pass --------------------------------------------------------------------------------------------- */

/* Fills in the draft of a sequence by look-up: at most `most` tokens. */
static void look_up(mp_text_engine *engine, const mp_item *item, int choice, int most) {
    const mp_speculation *speculation = &engine->speculation;
    mp_sequence *seq = &((mp_sequence_group *)item->state)->seqs[choice];
    mp_draft *draft = &seq->draft;
    draft->of_model = false;
    if (speculation->propose) {
        draft->run = MP_DRAFT_RUN;
        draft->count = speculation->propose(speculation->propose_arg, item, choice, draft->tokens, most);
    } else {
        draft->count =
            mp_draft_find(&seq->index, engine->budget, seq->tokens, seq->count, most, draft->tokens, &draft->run);
    }
    for (int i = 0; i < draft->count; i++)
        if (!mp_drafts_may_hold(engine->model, item, draft->tokens[i]))
            draft->count = i;
}

int mp_drafts_add(mp_text_engine *engine, mp_lease *lease, const mp_plan *plan, int rows) {
    mp_draft *drafts[MP_DRAFT_ROWS];
    mp_step_seq *steps[MP_DRAFT_ROWS];
    int n = 0, added = 0;
    if (!mp_speculation_open(&engine->speculation, engine->step_count, rows))
        return 0;
    for (int s = 0; s < engine->step_count; s++) {
        mp_step_seq *step = &engine->steps[s];
        const mp_item *item = plan->items[step->plan];
        const int most = mp_drafts_most(engine->model, item, step->choice);
        if (most == 0)
            continue;
        look_up(engine, item, step->choice, most);
        steps[n] = step;
        drafts[n++] = &step->seq->draft;
    }
    if (engine->drafter.model && n > 0 && !engine->speculation.propose)
        mp_drafter_propose(engine, lease, plan, steps, n);
    mp_speculation_choose(&engine->speculation, drafts, n, engine->step_count, rows,
                          atomic_load_explicit(&engine->model->row_ns, memory_order_relaxed));
    for (int i = 0; i < n; i++)
        added += steps[i]->drafts = drafts[i]->count;
    return added;
}

void mp_drafts_take(mp_text_engine *engine) {
    for (int s = 0; s < engine->step_count; s++) {
        mp_step_seq *step = &engine->steps[s];
        if (step->drafts == 0)
            continue;
        int rows = step->rows + step->drafts;
        mp_error error;
        mp_cached_take(&step->seq->cached, &engine->cache, &rows, NULL);
        const bool logs = mp_cached_take_log(&step->seq->cached, &engine->cache, &error) == MP_OK;
        step->drafts = logs ? rows - step->rows : 0;
    }
}

void mp_drafts_drop(mp_text_engine *engine) {
    for (int s = 0; s < engine->step_count; s++)
        engine->steps[s].drafts = 0;
}

/* ---- after the pass ---------------------------------------------------------------------------------------------- */

bool mp_drafts_accept(mp_text_engine *engine, mp_step_seq *step) {
    mp_sequence *seq = step->seq;
    if (seq->done || step->accepted == step->drafts)
        return false;
    const bool accepted = seq->tokens[seq->cached.count] == seq->draft.tokens[step->accepted];
    mp_speculation_learn(&engine->speculation, &seq->draft, step->accepted, accepted);
    if (!accepted)
        return false;
    step->accepted++;
    mp_shadow_accept(seq->shadow);
    return true;
}

bool mp_drafts_undo(mp_text_engine *engine, const mp_decoder_pass *pass, const mp_row_seq *rows, mp_step_seq *step) {
    const int64_t hidden = pass->model->hidden;
    if (step->drafts == 0 ||
        mp_kernels_get()->all_finite(pass->x + (rows->row0 + rows->rows - step->drafts) * hidden,
                                     step->drafts * hidden))
        return false;
    mp_cached_wipe(&step->seq->cached, &engine->cache, step->rows + step->drafts);
    step->seq->speculation_off = true;
    return true;
}
