/* decoder/drafting.c: see decoder/drafting.h. */
#include "models/decoder/drafting.h"

#include <stdatomic.h>
#include <string.h>

#include "base/log.h"
#include "base/options.h"
#include "models/decoder/drafts.h"

enum {
    SLICE = 256,    /* maximum rows of a pass that computes prompts; sequences that find none left add FEW_ROWS each */
    MIN_SLICE = 16, /* minimum of this limit, even if the rows take longer than a decode step */
    FEW_ROWS = 4,   /* missing rows per sequence that the draft model always computes */
    HORIZON = 256,  /* computing a prompt must pay off within this number of completion tokens */
    PAUSE = 256     /* steps without drafts of the model after a lack of memory */
};

/* ---- load -------------------------------------------------------------------------------------------------------- */

static mp_status check_tokens(const mp_token_table *model, const mp_token_table *draft, mp_error *error) {
    const int32_t count = model->count < draft->count ? model->count : draft->count;
    const int32_t more = model->count + draft->count - 2 * count;
    if (more > MP_DRAFT_PADDING)
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "`draft` must have the vocabulary of the model: it has %d tokens, the model has %d",
                       draft->count, model->count);
    for (int32_t id = 0; id < count; id++) {
        const uint64_t bytes = model->offsets[id + 1] - model->offsets[id];
        if (draft->control[id] == model->control[id] && draft->offsets[id + 1] - draft->offsets[id] == bytes &&
            memcmp(draft->bytes + draft->offsets[id], model->bytes + model->offsets[id], bytes) == 0)
            continue;
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "`draft` must have the vocabulary of the model: token %d differs (%d tokens, the model has %d)",
                       id, draft->count, model->count);
    }
    return MP_OK;
}

mp_status mp_draft_model_check(const mp_spec *spec, mp_error *error) {
    const mp_spec *draft = mp_spec_draft(spec);
    const mp_arch *arch = mp_arch_find(mp_spec_architecture(draft));
    const mp_token_table *tokens = mp_spec_tokens(draft);
    if (!arch || arch->family->load != mp_decoder_load || !tokens)
        return mp_fail(error, MP_UNSUPPORTED, "`draft` must be a language model for text, got a model of type %.40s",
                       mp_spec_architecture(draft));
    if (mp_spec_find(draft, "mpool.layer_mixers"))
        return mp_fail(error, MP_UNSUPPORTED,
                       "`draft` must be a model in which every layer has attention, got a model of type %.40s",
                       mp_spec_architecture(draft));
    return check_tokens(mp_spec_tokens(spec), tokens, error);
}

mp_status mp_draft_model_load(const mp_load_args *args, mp_decoder **draft, mp_error *error) {
    mp_load_args mine = *args;
    mp_model *model;
    if (args->shared)
        return mp_fail(error, MP_UNSUPPORTED,
                       "models with `draft` do not support process isolation; use isolation=\"thread\"");
    mine.spec = mp_spec_draft(args->spec);
    mine.flags = mp_arch_find(mp_spec_architecture(mine.spec))->flags;
    MP_TRY(mp_decoder_load(&mine, &model, error));
    *draft = (mp_decoder *)model;
    return MP_OK;
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

void mp_drafter_init(mp_drafter *drafter, mp_decoder *model, mp_budget *budget) {
    *drafter = (mp_drafter){.model = model};
    if (model) /* its prefix cache gets a quarter of the model's share */
        mp_prefix_init(&drafter->cache, &model->kv, budget, (uint32_t)mp_options_get()->prefix_percent / 4);
}

void mp_drafter_deinit(mp_drafter *drafter) {
    if (drafter->model)
        mp_prefix_deinit(&drafter->cache);
}

uint64_t mp_drafter_trim(mp_drafter *drafter) { return drafter->model ? mp_prefix_trim(&drafter->cache) : 0; }

uint64_t mp_drafter_release(mp_drafter *drafter) {
    if (!drafter->model)
        return 0;
    while (drafter->shadows)
        mp_shadow_drop(drafter->shadows);
    const uint64_t bytes = mp_drafter_trim(drafter);
    if (bytes > 0) {
        drafter->pause = PAUSE;
        if (!drafter->logged)
            mp_log(MP_LOG_WARNING, "the draft model pauses: its KV cache was dropped, because memory is short");
        drafter->logged = true;
    }
    return bytes;
}

/* ---- passes ------------------------------------------------------------------------------------------------------ */

typedef struct draft_seq { /* a sequence for which the draft model proposes tokens in this step */
    mp_sequence *seq;
    mp_item *item;
    int choice, most; /* most: maximum number of its draft tokens */
    int rows;         /* rows in the next pass */
    bool output;      /* the next pass computes the logits of a draft token */
    bool over;        /* no more passes */
} draft_seq;

typedef struct draft_step {
    mp_text_engine *engine;
    mp_lease *lease;
    draft_seq seqs[MP_DRAFT_ROWS];
    int n, sequences; /* length of `seqs`; number of all sequences of the step */
    uint64_t row_ns; /* time of a row of the model, not of the draft model */
} draft_step;

static void pass_body(const mp_team_thread *thread, void *arg) { mp_decoder_forward(arg, thread); }

/* Adds a sequence to the rows of a pass. Returns false if there is no memory for its KV blocks. */
static bool add_rows(mp_drafter *drafter, draft_seq *one, mp_rows *rows, int32_t *id) {
    mp_shadow *shadow = one->seq->shadow;
    mp_cached *cached = &shadow->cached;
    int needed = shadow->tentative + one->rows;
    if (mp_cached_take(cached, &drafter->cache, &needed, NULL) != MP_OK)
        return false;
    if (cached->count == one->seq->count) /* its last draft token */
        id[rows->M] = one->seq->draft.tokens[shadow->tentative];
    else
        memcpy(id + rows->M, one->seq->tokens + cached->count, (size_t)one->rows * sizeof *id);
    rows->seq[rows->n_seq++] = (mp_row_seq){
        .row0 = rows->M,
        .rows = one->rows,
        .past = cached->count + shadow->tentative,
        .is_long = cached->chain.scope.variant != 0,
        .blocks = cached->blocks,
    };
    rows->M += one->rows;
    if (one->output)
        rows->output_row[rows->n_output++] = rows->M - 1;
    return true;
}

/* Samples the next draft token of a sequence from the draft model's logits, which are overwritten. */
static void sample_draft(mp_text_engine *engine, draft_seq *one, float *logits, mp_candidate *candidates) {
    const mp_decoder *model = engine->model, *draft_model = engine->drafter.model;
    const int32_t vocab =
        model->sampled_vocab < draft_model->sampled_vocab ? model->sampled_vocab : draft_model->sampled_vocab;
    const mp_text_request *request = (const mp_text_request *)one->item->request;
    mp_draft *draft = &one->seq->draft;
    const uint32_t index = atomic_load_explicit(&request->choices[one->choice].token_count, memory_order_relaxed);
    int32_t likeliest, id = -1;
    if (mp_kernels_get()->all_finite(logits, vocab)) {
        const int confidence = mp_draft_confidence(logits, vocab, &likeliest);
        mp_sample_args args = mp_sequence_group_sample_args(one->item, one->choice, index + (uint32_t)draft->count);
        if (draft_model->vocab < model->vocab)
            args.n_bias = 0; /* a biased id may have no logit */
        id = mp_sample(&args, logits, vocab, candidates);
        draft->confidence[draft->count] = (uint8_t)(id == likeliest ? confidence : 0);
    } else {
        one->seq->shadow->off = true;
    }
    if (mp_drafts_may_hold(model, one->item, id)) {
        draft->tokens[draft->count] = id;
        mp_speculation_model_token(&engine->speculation, draft, draft->count++);
    } else {
        one->over = true;
    }
    one->over |= draft->count >= one->most;
}

/* Records the pass for the sequences, and samples their next draft tokens. */
static void finish_pass(draft_step *step, const mp_decoder_pass *pass, mp_candidate *candidates) {
    mp_text_engine *engine = step->engine;
    int output = 0;
    for (int g = 0; g < step->n; g++) {
        draft_seq *one = &step->seqs[g];
        mp_shadow *shadow = one->seq->shadow;
        if (one->over)
            continue;
        if (shadow->cached.count == one->seq->count) { /* the row of a draft token */
            shadow->tentative++;
        } else {
            mp_cached_publish(&shadow->cached, &engine->drafter.cache, one->seq->tokens, one->rows, true);
            one->over = !one->output; /* the rest of the prompt follows in later steps */
        }
        if (!one->output)
            continue;
        if (shadow->tentative == 0) { /* the first draft token replaces those found by look-up */
            one->seq->draft.count = 0;
            one->seq->draft.of_model = true;
        }
        sample_draft(engine, one, pass->rows.logits + (size_t)output++ * (size_t)pass->model->vocab, candidates);
        one->rows = 1;
    }
}

/* Runs a pass of the draft model over the sequences that are not over. Returns false if it was not computed: there is
 * no memory, or the step was cancelled. */
static bool run_pass(draft_step *step) {
    mp_text_engine *engine = step->engine;
    mp_decoder *model = engine->drafter.model;
    mp_row_seq seqs[MP_DRAFT_ROWS];
    int output_row[MP_DRAFT_ROWS];
    int32_t id[SLICE + MP_DRAFT_ROWS * (FEW_ROWS + 1)];
    mp_rows rows = {.id = id, .seq = seqs, .output_row = output_row};
    mp_decoder_pass pass;
    const uint64_t start_ns = mp_sys_thread_ns();
    for (int g = 0; g < step->n; g++)
        if (!step->seqs[g].over)
            step->seqs[g].over = !add_rows(&engine->drafter, &step->seqs[g], &rows, id);
    if (rows.M == 0)
        return false;
    const size_t logits = (size_t)rows.n_output * (size_t)model->vocab * sizeof(float);
    const size_t sampling = mp_sample_bytes(engine->model);
    const size_t bytes = mp_arena_cost(logits) + mp_arena_cost(sampling) +
                         mp_decoder_pass_bytes(model, &rows, step->lease->threads);
    if (mp_engine_reserve(&engine->arena, bytes, engine->budget, &engine->charged, NULL) != MP_OK)
        return false;
    mp_arena_reset(&engine->arena); /* nothing of this step is in the arena yet */
    rows.logits = mp_arena_take(&engine->arena, logits);
    mp_candidate *candidates = mp_arena_take(&engine->arena, sampling);
    mp_decoder_plan_pass(&pass, model, &engine->drafter.cache.kv, &rows, step->lease, &engine->arena);
    const uint64_t packed = mp_weight_store_begin(&model->store, rows.M);
    mp_lease_run(step->lease, pass_body, &pass);
    const bool kept = mp_weight_store_end(&model->store, packed);
    if (pass.stop)
        return false;
    finish_pass(step, &pass, candidates);
    const uint64_t ns = mp_sys_thread_ns() - start_ns;
    if (pass.warming || kept)
        return true; /* it takes longer than later passes */
    if (rows.M <= MP_DRAFT_ROWS)
        mp_speculation_model_pass(&engine->speculation, rows.M, ns);
    else
        atomic_store_explicit(&engine->drafter.model->row_ns, ns / (uint64_t)rows.M + 1, memory_order_relaxed);
    return true;
}

/* ---- a step ------------------------------------------------------------------------------------------------------ */

/* Returns the shadow of a sequence, ready for rows of the draft model, or NULL. */
static mp_shadow *open_shadow(mp_text_engine *engine, const mp_item *item, mp_sequence *seq) {
    mp_drafter *drafter = &engine->drafter;
    mp_shadow *shadow = seq->shadow;
    if (!shadow || shadow->off)
        return NULL;
    if (!shadow->cache) {
        const bool is_long = mp_decoder_is_long(drafter->model, (const mp_text_request *)item->request);
        mp_cached_begin(&shadow->cached, &drafter->cache, mp_cache_scope_of(item, is_long));
        shadow->cache = &drafter->cache;
        shadow->next = drafter->shadows;
        shadow->link = &drafter->shadows;
        if (shadow->next)
            shadow->next->link = &shadow->next;
        drafter->shadows = shadow;
    }
    shadow->tentative = 0;
    if (shadow->cached.count + 1 < seq->count)
        mp_cached_reach(&shadow->cached, &drafter->cache, seq->tokens, seq->count - 1);
    for (int32_t i = shadow->cached.count; i < seq->count; i++)
        shadow->off |= seq->tokens[i] < 0 || seq->tokens[i] >= drafter->model->vocab;
    return shadow->off ? NULL : shadow;
}

/* Lists the sequences for which the draft model can propose tokens. Returns the number of their rows that it has not
 * computed, without the last row of each. */
static int64_t list_sequences(draft_step *step, const mp_plan *plan, mp_step_seq **steps, int n, int64_t *tokens) {
    mp_text_engine *engine = step->engine;
    int64_t behind = 0;
    for (int i = 0; i < n; i++) {
        mp_item *item = plan->items[steps[i]->plan];
        mp_sequence *seq = steps[i]->seq;
        int most = mp_drafts_most(engine->model, item, steps[i]->choice);
        const int room = engine->drafter.model->context - seq->count + 1; /* the last draft token needs no row */
        most = most < room ? most : room;
        const mp_shadow *shadow = most > 0 ? open_shadow(engine, item, seq) : NULL;
        if (!shadow)
            continue;
        const mp_text_request *request = (const mp_text_request *)item->request;
        const int left = request->n_prompt + request->sampling.max_tokens - seq->count;
        *tokens += left < HORIZON ? left : HORIZON;
        behind += seq->count - shadow->cached.count - 1;
        step->seqs[step->n++] = (draft_seq){.seq = seq,
                                            .item = item,
                                            .choice = steps[i]->choice,
                                            .most = most,
                                            .rows = seq->count - shadow->cached.count};
    }
    return behind;
}

/* Limits the rows of the first pass to about the time of a decode step. Earlier sequences get their rows first. A
 * sequence that exceeds the limit still gets up to FEW_ROWS. */
static void limit_rows(draft_step *step, uint64_t draft_row_ns) {
    const bool always = step->engine->speculation.mode == MP_SPECULATE_ALWAYS;
    uint64_t fits = atomic_load_explicit(&step->engine->model->decode_ns, memory_order_relaxed) / draft_row_ns;
    int left = always || fits > SLICE ? SLICE : fits < MIN_SLICE ? MIN_SLICE : (int)fits;
    for (int g = 0; g < step->n; g++) {
        draft_seq *one = &step->seqs[g];
        const int wanted = one->rows, room = left > FEW_ROWS ? left : FEW_ROWS;
        one->rows = wanted < room ? wanted : room;
        one->output = one->rows == wanted;
        left -= one->rows;
    }
}

/* Collects the drafts of the sequences that take part in the next pass. */
static int list_drafts(draft_step *step, mp_draft **drafts) {
    int n = 0;
    for (int g = 0; g < step->n; g++)
        if (!step->seqs[g].over)
            drafts[n++] = &step->seqs[g].seq->draft;
    return n;
}

void mp_drafter_propose(mp_text_engine *engine, mp_lease *lease, const mp_plan *plan, mp_step_seq **steps, int n) {
    draft_step step = {.engine = engine, .lease = lease, .sequences = engine->step_count};
    const mp_speculation *speculation = &engine->speculation;
    const uint64_t draft_row_ns = atomic_load_explicit(&engine->drafter.model->row_ns, memory_order_relaxed) + 1;
    mp_draft *drafts[MP_DRAFT_ROWS];
    int64_t tokens = 0;
    step.row_ns = atomic_load_explicit(&engine->model->row_ns, memory_order_relaxed);
    if (engine->drafter.pause > 0) {
        engine->drafter.pause--;
        return;
    }
    const int64_t behind = list_sequences(&step, plan, steps, n, &tokens);
    if (step.n == 0)
        return;
    const double gain =
        mp_speculation_model_gain(speculation, drafts, list_drafts(&step, drafts), step.sequences, step.row_ns);
    const bool attempt = !(gain > 1);
    if (attempt && (behind > FEW_ROWS * step.n || !mp_speculation_may_try_model(speculation, step.sequences)))
        return;
    if (speculation->mode == MP_SPECULATE_AUTO && behind > FEW_ROWS * step.n &&
        2 * (double)behind * (double)draft_row_ns >
            mp_speculation_saved_ns(speculation, gain, step.sequences, tokens))
        return;
    limit_rows(&step, draft_row_ns);
    while (run_pass(&step)) {
        const int left = list_drafts(&step, drafts);
        if (attempt || !mp_speculation_continue_model(speculation, drafts, left, step.sequences, step.row_ns))
            return;
    }
}
