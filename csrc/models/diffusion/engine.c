/* engine.c: the step interface over a pipeline. A step is a range of blocks of one call: of a text encoder, of the
 * transformer in one denoising step, or of the decoder. Calls are drawn one after the other, so that a stage is loaded
 * once a call at most. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "models/diffusion/texts.h"

typedef enum phase { ENCODE, DENOISE, PREVIEW, DECODE, FINISHED } phase;

typedef struct diff_state { /* of an item, between steps */
    phase phase;
    int encoder, text, block;    /* where it stands: ENCODE: of `text`; else of a pass over the texts' rows */
    int picture, step;
    mp_diff_texts *texts[MP_DRAW_TEXTS]; /* used */
    bool known[MP_DRAW_TEXTS];           /* found, not to be computed */
    /* ENCODE */
    mp_diff_text run;
    mp_diff_memory encoding;
    /* DENOISE */
    mp_dit_pass pass;
    mp_diff_memory denoising;
    float *latents, *velocity[MP_DRAW_TEXTS]; /* [picture rows, 4 channels] */
    /* PREVIEW, DECODE */
    mp_vae_picture picture_run;
    mp_diff_memory decoding;
} diff_state;

typedef struct diff_engine {
    mp_engine base;
    mp_diffusion *model;
    mp_budget *budget;
    mp_arena arena;
    uint64_t charged;          /* for the arena */
    uint64_t weights;          /* for blocks */
    uint64_t items;            /* for what items hold */
    mp_diff_block *blocks[MP_DIFF_STAGES];
    mp_diff_cache cache;
    mp_item *current; /* the one being drawn */
    uint64_t budget_ns;
} diff_engine;

/* ---- check ------------------------------------------------------------------------------------------------------- */

static mp_status fail_size(const mp_diffusion *model, const mp_draw_call *call, mp_error *error) {
    const int32_t grain = mp_diff_scale(model) * MP_DIFF_PATCH, most = model->position_side * grain;
    int32_t near[2] = {call->width, call->height};
    for (int i = 0; i < 2; i++) {
        near[i] = (near[i] + grain / 2) / grain * grain;
        near[i] = near[i] < grain ? grain : most && near[i] > most ? most : near[i];
    }
    if (most)
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "the picture is %d x %d pixels, the model makes multiples of %d up to %d; "
                       "the nearest is %d x %d",
                       call->width, call->height, grain, most, near[0], near[1]);
    return mp_fail(error, MP_INVALID_ARGUMENT,
                   "the picture is %d x %d pixels, the model makes multiples of %d; the nearest is %d x %d",
                   call->width, call->height, grain, near[0], near[1]);
}

static mp_status check_ids(const mp_diffusion *model, const mp_draw_call *call, mp_error *error) {
    for (int e = 0; e < MP_DIFF_ENCODERS; e++) {
        const mp_diff_encoder *encoder = &model->encoder[e];
        const bool clip = e != MP_DIFF_T5;
        if (encoder->layers && (call->n_ids[e] < 1 || call->n_ids[e] > encoder->length ||
                                (clip && call->n_ids[e] != encoder->length)))
            return mp_fail(error, MP_INVALID_ARGUMENT, "%s takes %s%d tokens, got %d", mp_diff_stage_name(e),
                           clip ? "" : "1 to ", encoder->length, call->n_ids[e]);
        for (int t = 0; encoder->layers && t < call->n_texts; t++)
            for (int32_t i = 0; i < call->n_ids[e]; i++)
                if (call->ids[t][e][i] < 0 || call->ids[t][e][i] >= encoder->vocab)
                    return mp_fail(error, MP_INVALID_ARGUMENT, "token id %d is outside the vocabulary of %d",
                                   call->ids[t][e][i], encoder->vocab);
    }
    return MP_OK;
}

mp_status mp_diff_check(const mp_model *base, mp_call *call_base, uint64_t *cost_ns, uint32_t *total, mp_error *error) {
    const mp_diffusion *model = (const mp_diffusion *)base;
    mp_draw_call *call = (mp_draw_call *)call_base;
    const int32_t scale = mp_diff_scale(model), grain = scale * MP_DIFF_PATCH;
    if (call->width % grain || call->height % grain ||
        (model->position_side &&
         (call->width / grain > model->position_side || call->height / grain > model->position_side)))
        return fail_size(model, call, error);
    MP_TRY(check_ids(model, call, error));
    if (call->n_texts > 1 && model->flux)
        return mp_fail(error, MP_INVALID_ARGUMENT, "this model is not guided away from a text: no negative prompt");
    call->channels = model->channels;
    call->high = call->height / scale;
    call->wide = call->width / scale;
    call->text_rows = (model->flux ? 0 : call->n_ids[MP_DIFF_CLIP_L]) + call->n_ids[MP_DIFF_T5];
    call->text_width = model->text_width;
    call->pooled_width = model->pooled_width;
    const int64_t latents = (int64_t)call->n_pictures * call->channels * call->high * call->wide;
    if (call->n_noise != latents)
        return mp_fail(error, MP_INVALID_ARGUMENT, "there are %lld latents, the model takes %lld: (%d, %d, %d, %d)",
                       (long long)call->n_noise, (long long)latents, call->n_pictures, call->channels, call->high,
                       call->wide);
    const int64_t rows = (int64_t)call->high * call->wide / (MP_DIFF_PATCH * MP_DIFF_PATCH);
    const double gflop = mp_diff_gflop(model, call->text_rows, rows) * call->n_texts * call->n_steps * call->n_pictures;
    *cost_ns = (uint64_t)(gflop * (double)atomic_load_explicit(&model->gflop_ns, memory_order_relaxed)) + 1;
    *total = (uint32_t)(call->n_pictures * (call->n_steps + 1));
    return mp_draw_call_output(call, error);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static void drop_stage(diff_engine *engine, int stage) {
    for (int i = 0; engine->blocks[stage] && i < engine->model->block_count[stage]; i++) {
        mp_diff_block *block = &engine->blocks[stage][i];
        mp_free(block->slab);
        mp_budget_give(engine->budget, block->charged);
        engine->weights -= block->charged;
        *block = (mp_diff_block){0};
    }
}

/* All but one, or all (-1). Returns how many bytes are free now. */
static uint64_t drop_others(diff_engine *engine, int stage) {
    const uint64_t before = engine->weights;
    for (int s = 0; s < MP_DIFF_STAGES; s++)
        if (s != stage)
            drop_stage(engine, s);
    return before - engine->weights;
}

static bool take(diff_engine *engine, uint64_t bytes, int stage) {
    return mp_budget_take(engine->budget, bytes) ||
           ((drop_others(engine, stage) | mp_diff_cache_trim(&engine->cache)) &&
            mp_budget_take(engine->budget, bytes));
}

/* Scratch is sized by a block and kept for the next. */
static mp_status reserve(diff_engine *engine, size_t bytes, int stage, mp_error *error) {
    if (bytes <= engine->arena.size)
        return MP_OK;
    mp_arena_deinit(&engine->arena);
    mp_budget_give(engine->budget, engine->charged);
    engine->charged = 0;
    if (!take(engine, bytes, stage))
        return mp_fail_memory(error, bytes, "the scratch of a step");
    mp_status status = mp_arena_reserve(&engine->arena, bytes, error);
    if (status != MP_OK) {
        mp_budget_give(engine->budget, bytes);
        return status;
    }
    engine->charged = bytes;
    return MP_OK;
}

/* One piece for `count` parts of so many floats each. */
static mp_status hold(diff_engine *engine, mp_diff_memory *memory, int stage, int count, float **const parts[],
                      const size_t sizes[], mp_error *error) {
    size_t bytes = 0;
    for (int i = 0; i < count; i++)
        bytes += mp_arena_cost(sizes[i] * sizeof(float));
    if (!take(engine, bytes, stage))
        return mp_fail_memory(error, bytes, "a picture that is being made");
    if (!(memory->at = mp_alloc(bytes, MP_TAG_SCRATCH))) {
        mp_budget_give(engine->budget, bytes);
        return mp_fail_memory(error, bytes, "a picture that is being made");
    }
    memory->bytes = bytes;
    engine->items += bytes;
    uint8_t *at = memory->at;
    for (int i = 0; i < count; i++) {
        *parts[i] = (float *)at;
        at += mp_arena_cost(sizes[i] * sizeof(float));
    }
    return MP_OK;
}

static void let_go(diff_engine *engine, mp_diff_memory *memory) {
    mp_free(memory->at);
    mp_budget_give(engine->budget, memory->bytes);
    engine->items -= memory->bytes;
    *memory = (mp_diff_memory){0};
}

/* Before a stage is loaded: those before it stay, for the next call, only while memory is plentiful. */
static void make_room(diff_engine *engine, int stage) {
    const uint64_t limit = atomic_load_explicit(&engine->budget->limit, memory_order_relaxed);
    const uint64_t used = atomic_load_explicit(&engine->budget->used, memory_order_relaxed);
    if (used + engine->model->stage_bytes[stage] > limit / 10 * 7)
        drop_others(engine, stage);
}

/* A block's weights, built on first use. */
static mp_status need(diff_engine *engine, int stage, int index, mp_lease *lease, mp_error *error) {
    mp_diff_block *block = &engine->blocks[stage][index];
    if (block->ready)
        return MP_OK;
    if (index == 0)
        make_room(engine, stage);
    mp_builder builder = {0};
    mp_status status;
    *block = (mp_diff_block){0};
    MP_TRY_GOTO(mp_diff_build(engine->model, stage, index, &builder, block, error));
    mp_budget *budget = engine->budget;
    if (!take(engine, builder.slab_bytes + MP_WMAT_SLACK, stage)) {
        status = mp_fail_memory(error, builder.slab_bytes, "the weights of a stage");
        goto cleanup;
    }
    mp_budget_give(budget, builder.slab_bytes + MP_WMAT_SLACK); /* finish takes it */
    MP_TRY_GOTO(mp_builder_finish(&builder, lease, budget, NULL, error));
    block->slab = builder.slab;
    block->charged = builder.charged;
    block->ready = true;
    engine->weights += block->charged;
    builder.slab = NULL;
cleanup:
    mp_builder_deinit(&builder);
    if (status != MP_OK)
        *block = (mp_diff_block){0};
    return status;
}

/* ---- units of work ----------------------------------------------------------------------------------------------- */

typedef struct job {
    diff_engine *engine;
    diff_state *state;
    mp_diff_run run;
    int stage, index;
    bool end; /* of the transformer */
    bool done;
} job;

static bool run_transformer(mp_diff_lane *l, const mp_diffusion *model, const job *j, const mp_diff_block *blocks) {
    const mp_dit_pass *pass = &j->state->pass;
    if (j->end)
        return mp_dit_end(l, model, &blocks[0].as.ends, pass);
    if (j->index == 0)
        return mp_dit_begin(l, model, &blocks[0].as.ends, pass);
    if (j->index <= model->joint_layers)
        return mp_dit_joint_forward(l, model, &blocks[j->index].as.joint, pass);
    return mp_dit_single_forward(l, model, &blocks[j->index].as.single, pass);
}

static void body(const mp_lane *lane, void *arg) {
    job *j = arg;
    const mp_diffusion *model = j->engine->model;
    const mp_diff_block *blocks = j->engine->blocks[j->stage];
    mp_diff_lane l = {lane, &j->run, j->run.own + (size_t)lane->index * j->run.own_bytes, 0};
    bool done;
    if (j->stage == MP_DIFF_TRANSFORMER)
        done = run_transformer(&l, model, j, blocks);
    else if (j->stage == MP_DIFF_DECODER)
        done = mp_vae_forward(&l, model, &blocks[j->index], j->index, &j->state->picture_run);
    else
        done = mp_diff_text_forward(&l, model, &j->state->run, &blocks[j->index], j->index);
    if (lane->index == 0)
        j->done = done;
}

/* Run block `index` of a stage (of the transformer: one more than there are, its end). *done: it was not called off. */
static mp_status run_block(diff_engine *engine, diff_state *state, mp_lease *lease, int stage, int index, bool *done,
                           mp_error *error) {
    const mp_diffusion *model = engine->model;
    job j = {.engine = engine, .state = state, .stage = stage, .index = index};
    if (stage == MP_DIFF_TRANSFORMER) {
        MP_TRY(need(engine, stage, 0, lease, error));
        j.end = index == model->block_count[stage];
        j.index = j.end ? 0 : index;
    }
    MP_TRY(need(engine, stage, j.index, lease, error));
    if (mp_lease_poll(lease)) {
        *done = false;
        return MP_OK;
    }
    const mp_diff_block *block = &engine->blocks[stage][j.index];
    size_t shared;
    if (stage == MP_DIFF_TRANSFORMER) {
        const int64_t rows = (int64_t)state->pass.rows_high * state->pass.rows_wide;
        shared = mp_dit_scratch(model, &engine->blocks[stage][0], block, j.index, state->pass.text_rows, rows);
        j.run.own_bytes = mp_dit_own(model, state->pass.text_rows + rows);
    } else if (stage == MP_DIFF_DECODER) {
        const int64_t pixels = (int64_t)state->picture_run.high * state->picture_run.wide
                               << 2 * model->ops[index].doubled;
        shared = mp_vae_scratch(model, block, index, pixels);
        j.run.own_bytes = mp_vae_own(model, block, index, pixels);
    } else {
        shared = mp_diff_text_scratch(model, stage, block, index, state->run.T);
        j.run.own_bytes = mp_diff_text_own(model, stage, state->run.T);
    }
    shared = mp_arena_cost(shared);
    j.run.own_bytes = mp_arena_cost(j.run.own_bytes);
    MP_TRY(reserve(engine, shared + j.run.own_bytes * (size_t)lease->lanes, stage, error));
    mp_arena_reset(&engine->arena);
    j.run.lease = lease;
    j.run.shared = mp_arena_take(&engine->arena, shared);
    j.run.own = mp_arena_take(&engine->arena, j.run.own_bytes * (size_t)lease->lanes);
    mp_lease_run(lease, body, &j);
    if (mp_weights_poisoned(model->weights))
        return mp_fail(error, MP_IO, "a weight file became shorter while it was in use");
    *done = j.done;
    return MP_OK;
}

/* ---- texts ------------------------------------------------------------------------------------------------------- */

static const mp_draw_call *call_of(const mp_item *item) { return (const mp_draw_call *)item->call; }

/* The next text of this encoder, or of the next that there is, that has to be computed; else the phase is over. */
static void next_encoder(const diff_engine *engine, diff_state *state, int texts) {
    while (state->encoder < MP_DIFF_ENCODERS) {
        for (; state->text < texts; state->text++)
            if (engine->model->encoder[state->encoder].layers && !state->known[state->text])
                return;
        state->text = 0;
        state->encoder++;
    }
}

/* What an encoder gave, to where the transformer wants it. */
static void keep_text(const mp_diffusion *model, const mp_draw_call *call, diff_state *state) {
    mp_diff_texts *to = state->texts[state->text];
    const mp_diff_encoder *e = state->run.encoder;
    const size_t row = (size_t)e->hidden * sizeof(float);
    if (state->encoder == MP_DIFF_T5) {
        const int64_t first = model->flux ? 0 : call->n_ids[MP_DIFF_CLIP_L];
        memcpy(to->rows + first * model->text_width, state->run.x, (size_t)state->run.T * row);
        return;
    }
    const bool second = state->encoder == MP_DIFF_CLIP_G;
    const mp_diff_encoder *before = &model->encoder[MP_DIFF_CLIP_L];
    memcpy(to->pooled + (second ? before->projection : 0), state->run.pooled,
           (size_t)(e->projection ? e->projection : e->hidden) * sizeof(float));
    for (int32_t t = 0; !model->flux && t < state->run.T; t++)
        memcpy(to->rows + (int64_t)t * model->text_width + (second ? before->hidden : 0),
               state->run.before + (int64_t)t * e->hidden, row);
}

static mp_status begin_text(diff_engine *engine, diff_state *state, const mp_draw_call *call, mp_error *error) {
    const mp_diff_encoder *e = &engine->model->encoder[state->encoder];
    const size_t T = (size_t)call->n_ids[state->encoder], n = (size_t)e->hidden;
    const bool clip = state->encoder != MP_DIFF_T5;
    float **const parts[] = {&state->run.x, &state->run.before, &state->run.pooled};
    const size_t sizes[] = {T * n, clip ? T * n : 0, (size_t)(e->projection > e->hidden ? e->projection : e->hidden)};
    MP_TRY(hold(engine, &state->encoding, state->encoder, 3, parts, sizes, error));
    state->run.encoder = e;
    state->run.which = state->encoder;
    state->run.T = (int32_t)T;
    state->run.ids = call->ids[state->text][state->encoder];
    return MP_OK;
}

static mp_status encode(diff_engine *engine, mp_item *item, mp_lease *lease, bool *done, mp_error *error) {
    diff_state *state = item->state;
    const mp_draw_call *call = call_of(item);
    next_encoder(engine, state, call->n_texts);
    if (state->encoder == MP_DIFF_ENCODERS) {
        for (int t = 0; t < call->n_texts; t++) {
            const mp_diff_texts *texts = state->texts[t];
            if (!mp_kernels_get()->all_finite(texts->rows, (int64_t)call->text_rows * call->text_width) ||
                !mp_kernels_get()->all_finite(texts->pooled, call->pooled_width))
                return mp_fail(error, MP_NUMERIC, "a text encoder produced NaN or infinity");
            mp_diff_texts_complete(&engine->cache, state->texts[t]);
            if (call->keep) {
                memcpy(call->texts + (int64_t)t * call->text_rows * call->text_width, texts->rows,
                       (size_t)call->text_rows * (size_t)call->text_width * sizeof(float));
                memcpy(call->pooled + (int64_t)t * call->pooled_width, texts->pooled,
                       (size_t)call->pooled_width * sizeof(float));
            }
        }
        state->phase = DENOISE;
        return MP_OK;
    }
    if (!state->encoding.at)
        MP_TRY(begin_text(engine, state, call, error));
    MP_TRY(run_block(engine, state, lease, state->encoder, state->block, done, error));
    if (!*done || ++state->block < engine->model->block_count[state->encoder])
        return MP_OK;
    keep_text(engine->model, call, state);
    let_go(engine, &state->encoding);
    state->block = 0;
    state->text++;
    return MP_OK;
}

/* ---- denoising --------------------------------------------------------------------------------------------------- */

/* latents [channels, high, wide] <-> rows [high / 2 * wide / 2][channels][2][2] */
static void pack(const mp_draw_call *call, const float *latents, float *rows) {
    const int32_t C = call->channels, high = call->high, wide = call->wide, across = wide / MP_DIFF_PATCH;
    for (int32_t c = 0; c < C; c++)
        for (int32_t y = 0; y < high; y++)
            for (int32_t x = 0; x < wide; x++) {
                const int64_t row = (int64_t)(y / 2) * across + x / 2;
                rows[(row * C + c) * 4 + y % 2 * 2 + x % 2] = latents[((int64_t)c * high + y) * wide + x];
            }
}

static void unpack(const mp_draw_call *call, const float *rows, float *latents) {
    const int32_t C = call->channels, high = call->high, wide = call->wide, across = wide / MP_DIFF_PATCH;
    for (int32_t c = 0; c < C; c++)
        for (int32_t y = 0; y < high; y++)
            for (int32_t x = 0; x < wide; x++) {
                const int64_t row = (int64_t)(y / 2) * across + x / 2;
                latents[((int64_t)c * high + y) * wide + x] = rows[(row * C + c) * 4 + y % 2 * 2 + x % 2];
            }
}

static size_t latent_count(const mp_draw_call *call) {
    return (size_t)call->channels * (size_t)call->high * (size_t)call->wide;
}

static mp_status begin_denoising(diff_engine *engine, diff_state *state, const mp_draw_call *call, mp_error *error) {
    const mp_diffusion *model = engine->model;
    mp_dit_pass *pass = &state->pass;
    pass->text_rows = call->text_rows;
    pass->rows_high = call->high / MP_DIFF_PATCH;
    pass->rows_wide = call->wide / MP_DIFF_PATCH;
    const size_t latents = latent_count(call), hidden = (size_t)model->hidden;
    const size_t rows = (size_t)call->text_rows + (size_t)pass->rows_high * (size_t)pass->rows_wide;
    float **const parts[] = {&pass->h,        &pass->condition,    &pass->angles,
                             &state->latents, &state->velocity[0], &state->velocity[1]};
    const size_t sizes[] = {rows * hidden, hidden, model->flux ? rows * (size_t)model->head_dim : 0, latents, latents,
                            call->n_texts > 1 ? latents : 0};
    MP_TRY(hold(engine, &state->denoising, MP_DIFF_TRANSFORMER, 6, parts, sizes, error));
    if (model->flux)
        mp_dit_angles(model, pass);
    else
        pass->angles = NULL;
    return MP_OK;
}

static void begin_step(diff_state *state, const mp_draw_call *call) {
    const float *from = state->step ? call->latents : call->noise;
    pack(call, from + (int64_t)state->picture * (int64_t)latent_count(call), state->latents);
}

/* After the last pass: x += (next sigma - sigma) v, with v = away + scale (v - away) when guided. */
static mp_status end_step(diff_engine *engine, mp_item *item, mp_error *error) {
    diff_state *state = item->state;
    mp_draw_call *call = (mp_draw_call *)item->call;
    const int64_t n = (int64_t)latent_count(call);
    float *v = state->velocity[0];
    const float *away = state->velocity[1];
    for (int64_t i = 0; call->n_texts > 1 && i < n; i++)
        v[i] = away[i] + call->guidance * (v[i] - away[i]);
    if (!mp_kernels_get()->all_finite(v, n))
        return mp_fail(error, MP_NUMERIC, "the model produced NaN or infinity in step %d", state->step + 1);
    const float by = call->sigmas[state->step + 1] - call->sigmas[state->step];
    for (int64_t i = 0; i < n; i++)
        state->latents[i] += by * v[i];
    unpack(call, state->latents, call->latents + state->picture * n);
    if (call->keep)
        memcpy(call->history + ((int64_t)state->picture * call->n_steps + state->step) * n,
               call->latents + state->picture * n, (size_t)n * sizeof(float));
    state->step++;
    item->cursor++;
    const int32_t done = state->picture * call->n_steps + state->step;
    if (done > atomic_load_explicit(&call->steps_done, memory_order_relaxed)) /* not one tried again */
        atomic_store_explicit(&call->steps_done, done, memory_order_release);
    (void)engine;
    return MP_OK;
}

static bool preview_due(const mp_draw_call *call, const diff_state *state) {
    return call->n_previews && state->step < call->n_steps && state->step % call->preview_every == 0;
}

static mp_status denoise(diff_engine *engine, mp_item *item, mp_lease *lease, bool *done, mp_error *error) {
    diff_state *state = item->state;
    const mp_draw_call *call = call_of(item);
    const mp_diffusion *model = engine->model;
    if (state->picture == call->n_pictures) {
        let_go(engine, &state->denoising);
        state->picture = 0;
        state->phase = DECODE;
        return MP_OK;
    }
    if (!state->denoising.at)
        MP_TRY(begin_denoising(engine, state, call, error));
    if (state->block == 0 && state->text == 0)
        begin_step(state, call);
    const mp_diff_texts *texts = state->texts[state->text];
    state->pass.texts = texts->rows;
    state->pass.pooled = texts->pooled;
    state->pass.latents = state->latents;
    state->pass.velocity = state->velocity[state->text];
    state->pass.time = call->times[state->step];
    state->pass.guidance = call->guidance * 1000;
    const uint64_t start = mp_sys_now_ns();
    const bool measured = state->block > 0 && state->block < model->block_count[MP_DIFF_TRANSFORMER] &&
                          engine->blocks[MP_DIFF_TRANSFORMER][state->block].ready;
    MP_TRY(run_block(engine, state, lease, MP_DIFF_TRANSFORMER, state->block, done, error));
    if (!*done)
        return MP_OK;
    if (measured) {
        const int64_t rows = (int64_t)state->pass.rows_high * state->pass.rows_wide;
        const double blocks = model->block_count[MP_DIFF_TRANSFORMER] - 1;
        const double gflop = mp_diff_gflop(model, call->text_rows, rows) / blocks;
        const uint64_t spent = (uint64_t)((double)(mp_sys_now_ns() - start) / (gflop > 1e-6 ? gflop : 1e-6));
        const uint64_t old = atomic_load_explicit(&engine->model->gflop_ns, memory_order_relaxed);
        atomic_store_explicit(&engine->model->gflop_ns, (15 * old + spent) / 16 + 1, memory_order_relaxed);
    }
    if (++state->block <= model->block_count[MP_DIFF_TRANSFORMER])
        return MP_OK;
    state->block = 0;
    if (++state->text < call->n_texts)
        return MP_OK;
    state->text = 0;
    MP_TRY(end_step(engine, item, error));
    if (preview_due(call, state)) {
        state->phase = PREVIEW;
    } else if (state->step == call->n_steps) {
        state->step = 0;
        state->picture++;
    }
    return MP_OK;
}

/* ---- decoding ---------------------------------------------------------------------------------------------------- */

/* Rows of pixels [high * wide, channels] of a picture's latents; of a preview, of what the step says will be left. */
static mp_status begin_decoding(diff_engine *engine, diff_state *state, const mp_draw_call *call, mp_error *error) {
    const mp_diffusion *model = engine->model;
    mp_vae_picture *run = &state->picture_run;
    const size_t size = (size_t)mp_vae_floats(model, call->high, call->wide);
    float **const parts[] = {&run->x, &run->a, &run->b};
    const size_t sizes[] = {size, size, size};
    MP_TRY(hold(engine, &state->decoding, MP_DIFF_DECODER, 3, parts, sizes, error));
    run->high = call->high;
    run->wide = call->wide;
    const int64_t n = (int64_t)latent_count(call), plane = (int64_t)call->high * call->wide;
    const float *latents = call->latents + state->picture * n;
    if (state->phase == PREVIEW) { /* velocities point from what will be left to the noise */
        const float sigma = call->sigmas[state->step];
        for (int64_t i = 0; i < n; i++)
            state->latents[i] -= sigma * state->velocity[0][i];
        unpack(call, state->latents, run->a);
        latents = run->a;
    }
    for (int64_t i = 0; i < plane; i++)
        for (int32_t c = 0; c < call->channels; c++)
            run->x[i * call->channels + c] = latents[c * plane + i] / model->latent_scale + model->latent_shift;
    return MP_OK;
}

static float clamp(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }

static mp_status decode(diff_engine *engine, mp_item *item, mp_lease *lease, bool *done, mp_error *error) {
    diff_state *state = item->state;
    mp_draw_call *call = (mp_draw_call *)item->call;
    if (!state->decoding.at)
        MP_TRY(begin_decoding(engine, state, call, error));
    MP_TRY(run_block(engine, state, lease, MP_DIFF_DECODER, state->block, done, error));
    if (!*done || ++state->block < engine->model->op_count)
        return MP_OK;
    state->block = 0;
    const int64_t n = (int64_t)call->height * call->width * 3;
    const float *x = state->picture_run.x;
    if (!mp_kernels_get()->all_finite(x, n))
        return mp_fail(error, MP_NUMERIC, "the decoder produced NaN or infinity");
    if (state->phase == PREVIEW) {
        const int32_t number = state->step / call->preview_every - 1;
        const int32_t at = state->picture * call->n_previews + number;
        uint8_t *to = call->previews + at * n;
        for (int64_t i = 0; i < n; i++)
            to[i] = (uint8_t)lrintf(clamp(x[i] * 0.5f + 0.5f) * 255);
        let_go(engine, &state->decoding);
        const int32_t seen = atomic_load_explicit(&call->previews_done, memory_order_relaxed);
        for (int32_t i = seen; i < at; i++) /* what was due when the call was preempted */
            memcpy(call->previews + i * n, to, (size_t)n);
        if (at + 1 > seen)
            atomic_store_explicit(&call->previews_done, at + 1, memory_order_release);
        state->phase = DENOISE;
        return MP_OK;
    }
    float *to = call->pixels + state->picture * n;
    for (int64_t i = 0; i < n; i++)
        to[i] = clamp(x[i] * 0.5f + 0.5f);
    let_go(engine, &state->decoding);
    item->cursor++;
    if (++state->picture > atomic_load_explicit(&call->pictures_done, memory_order_relaxed))
        atomic_store_explicit(&call->pictures_done, state->picture, memory_order_release);
    if (state->picture == call->n_pictures)
        state->phase = FINISHED;
    return MP_OK;
}

/* ---- the step interface ------------------------------------------------------------------------------------------ */

static void free_state(diff_engine *engine, mp_item *item) {
    diff_state *state = item->state;
    if (engine->current == item)
        engine->current = NULL;
    if (!state)
        return;
    let_go(engine, &state->encoding);
    let_go(engine, &state->denoising);
    let_go(engine, &state->decoding);
    for (int t = 0; t < MP_DRAW_TEXTS; t++)
        mp_diff_texts_release(&engine->cache, state->texts[t]);
    mp_free(state);
    item->state = NULL;
}

/* An item that was preempted goes on with the step that it was in. */
static mp_status engine_admit(mp_engine *base, mp_item *item, mp_error *error) {
    diff_engine *engine = (diff_engine *)base;
    const mp_draw_call *call = call_of(item);
    diff_state *state = mp_alloc_zeroed(sizeof *state, MP_TAG_SCRATCH);
    if (!state)
        return mp_fail_memory(error, sizeof *state, "the state of a call");
    item->state = state;
    const uint32_t steps = (uint32_t)(call->n_pictures * call->n_steps);
    if (item->cursor < steps) {
        state->picture = (int)item->cursor / call->n_steps;
        state->step = (int)item->cursor % call->n_steps;
    } else { /* nothing is left to denoise */
        state->phase = DECODE;
        state->picture = (int)(item->cursor - steps);
        return MP_OK;
    }
    for (int t = 0; t < call->n_texts; t++) {
        mp_status status = mp_diff_texts_get(&engine->cache, call, t, &state->texts[t], &state->known[t], error);
        if (status != MP_OK) {
            free_state(engine, item);
            return status;
        }
    }
    return MP_OK;
}

/* The call that was begun, unless somebody more urgent waits: stages are long to load. */
static void engine_plan(mp_engine *base, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan) {
    diff_engine *engine = (diff_engine *)base;
    mp_item *chosen = items[0];
    for (int i = 0; i < n; i++)
        if (items[i] == engine->current && items[i]->priority <= chosen->priority)
            chosen = items[i];
    engine->current = chosen;
    engine->budget_ns = budget_ns;
    plan->count = 1;
    plan->items[0] = chosen;
    plan->amount[0] = 1;
    plan->together = engine->model->hidden < 1024;
    plan->lanes = mp_lanes_worth(&engine->model->base.facts, 1024, 64);
    const uint64_t left = chosen->total > chosen->cursor ? chosen->total - chosen->cursor : 1;
    const uint64_t cost = chosen->cost_ns / (chosen->total ? chosen->total : 1) * left;
    plan->cost_ns = cost < budget_ns ? cost + 1 : budget_ns;
}

static mp_status advance(diff_engine *engine, mp_item *item, mp_lease *lease, bool *done, mp_error *error) {
    switch (((diff_state *)item->state)->phase) {
    case ENCODE:
        return encode(engine, item, lease, done, error);
    case DENOISE:
        return denoise(engine, item, lease, done, error);
    default:
        return decode(engine, item, lease, done, error);
    }
}

static void engine_step(mp_engine *base, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    diff_engine *engine = (diff_engine *)base;
    mp_item *item = plan->items[0];
    const uint64_t start = mp_sys_now_ns();
    mp_error error;
    mp_error_clear(&error);
    outcomes[0] = MP_OUTCOME_MORE;
    do {
        bool done = true;
        mp_status status = advance(engine, item, lease, &done, &error);
        if (status == MP_MEMORY_EXHAUSTED) {
            item->error = error;
            outcomes[0] = MP_OUTCOME_WAIT_MEMORY;
            return;
        }
        if (status != MP_OK) {
            item->error = error;
            outcomes[0] = MP_OUTCOME_FAILED;
            return;
        }
        if (!done || atomic_load_explicit(&item->cancelled, memory_order_relaxed))
            return;
        if (((diff_state *)item->state)->phase == FINISHED) {
            outcomes[0] = MP_OUTCOME_DONE;
            engine->current = NULL;
            return;
        }
    } while (mp_sys_now_ns() - start < engine->budget_ns);
}

static void engine_retire(mp_engine *base, mp_item *item) { free_state((diff_engine *)base, item); }

static uint64_t trim(diff_engine *engine) {
    uint64_t before = engine->charged + engine->weights + engine->cache.charged;
    drop_others(engine, -1);
    mp_diff_cache_trim(&engine->cache);
    mp_arena_deinit(&engine->arena);
    mp_budget_give(engine->budget, engine->charged);
    engine->charged = 0;
    return before - engine->weights - engine->cache.charged;
}

/* Between steps nothing of the weights is in use. */
static uint64_t engine_trim(mp_engine *base) { return trim((diff_engine *)base); }

static void engine_destroy(mp_engine *base) {
    diff_engine *engine = (diff_engine *)base;
    trim(engine);
    for (int s = 0; s < MP_DIFF_STAGES; s++)
        mp_free(engine->blocks[s]);
    mp_free(engine);
}

static uint64_t engine_bytes(const mp_engine *base) {
    const diff_engine *engine = (const diff_engine *)base;
    return engine->charged + engine->weights + engine->items + engine->cache.charged;
}

static const mp_engine_ops diff_engine_ops = {engine_admit,  engine_plan, engine_step,    engine_retire,
                                              engine_retire, engine_trim, engine_destroy, engine_bytes};

mp_status mp_diff_engine(mp_model *base, mp_budget *budget, mp_engine **out, mp_error *error) {
    mp_diffusion *model = (mp_diffusion *)base;
    diff_engine *engine = mp_alloc_zeroed(sizeof *engine, MP_TAG_SCRATCH);
    if (!engine)
        return mp_fail_memory(error, sizeof *engine, "an engine");
    engine->base.ops = &diff_engine_ops;
    engine->model = model;
    engine->budget = budget;
    mp_diff_cache_init(&engine->cache, budget);
    for (int s = 0; s < MP_DIFF_STAGES; s++) {
        const size_t count = (size_t)model->block_count[s];
        if (count && !(engine->blocks[s] = mp_alloc_array(count, sizeof *engine->blocks[s], MP_TAG_SCRATCH))) {
            engine_destroy(&engine->base);
            return mp_fail_memory(error, count * sizeof *engine->blocks[s], "an engine");
        }
    }
    *out = &engine->base;
    return MP_OK;
}
