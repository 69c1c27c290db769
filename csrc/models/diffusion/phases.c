/* phases.c: computes an image request block by block: texts, denoising steps, previews, images. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "models/diffusion/schedule.h"

/* ---- position of a request --------------------------------------------------------------------------------------- */

static uint32_t units_done(const mp_image_generation_request *request, const mp_diff_position *at) {
    return (uint32_t)(at->image * request->n_steps + at->step);
}

/* True if the step just finished is due for a preview. Previews are made in order, so at most one is due. */
static bool preview_due(const mp_image_generation_request *request, const mp_diff_position *at) {
    return mp_image_generation_previews_due(request, units_done(request, at)) >
           atomic_load_explicit(&request->previews_done, memory_order_relaxed);
}

mp_diff_position mp_diff_place(const mp_image_generation_request *request, uint32_t cursor) {
    const uint32_t steps = mp_image_generation_steps(request);
    if (cursor >= steps)
        return (mp_diff_position){.phase = MP_DIFF_DECODE, .image = (int)(cursor - steps)};
    mp_diff_position at = {.image = (int)cursor / request->n_steps, .step = (int)cursor % request->n_steps};
    at.phase = preview_due(request, &at) ? MP_DIFF_PREVIEW : MP_DIFF_ENCODE;
    return at;
}

/* ---- texts ------------------------------------------------------------------------------------------------------- */

/* Advance to the next text that an encoder has to compute, or to the end of the phase. */
static void next_encoder(const mp_diffusion_engine *engine, mp_diff_state *state, int texts) {
    while (state->at.encoder < MP_DIFF_ENCODERS) {
        for (; state->at.text < texts; state->at.text++)
            if (engine->model->encoder[state->at.encoder].layers && !state->known[state->at.text])
                return;
        state->at.text = 0;
        state->at.encoder++;
    }
}

/* Copy an encoder's output to the embedding that the transformer reads. */
static void keep_text(const mp_diffusion *model, const mp_image_generation_request *request, mp_diff_state *state) {
    mp_diff_texts *to = state->texts[state->at.text];
    const mp_diff_encoder *e = state->run.encoder;
    const size_t row = (size_t)e->hidden * sizeof(float);
    if (state->at.encoder == MP_DIFF_T5) {
        const int64_t first = model->flux ? 0 : request->n_ids[MP_DIFF_CLIP_L];
        memcpy(to->rows + first * model->text_width, state->run.x, (size_t)state->run.T * row);
        return;
    }
    const bool second = state->at.encoder == MP_DIFF_CLIP_G;
    const mp_diff_encoder *before = &model->encoder[MP_DIFF_CLIP_L];
    memcpy(to->pooled + (second ? before->projection : 0), state->run.pooled,
           (size_t)(e->projection ? e->projection : e->hidden) * sizeof(float));
    for (int32_t t = 0; !model->flux && t < state->run.T; t++)
        memcpy(to->rows + (int64_t)t * model->text_width + (second ? before->hidden : 0),
               state->run.before + (int64_t)t * e->hidden, row);
}

static mp_status begin_text(mp_diffusion_engine *engine, mp_diff_state *state,
                            const mp_image_generation_request *request, mp_error *error) {
    const mp_diff_encoder *e = &engine->model->encoder[state->at.encoder];
    const size_t T = (size_t)request->n_ids[state->at.encoder], n = (size_t)e->hidden;
    float **const parts[] = {&state->run.x, &state->run.before, &state->run.pooled, &state->run.bias};
    const size_t sizes[] = {T * n, e->t5 ? 0 : T * n, (size_t)(e->projection > e->hidden ? e->projection : e->hidden),
                            e->t5 ? (size_t)e->attention.heads * (2 * T - 1) : 0};
    MP_TRY(mp_diff_hold(engine, &state->encoding, state->at.encoder, 4, parts, sizes, error));
    state->run.encoder = e;
    state->run.T = (int32_t)T;
    state->run.ids = request->ids[state->at.text][state->at.encoder];
    return mp_diff_text_begin(&state->run, error);
}

static mp_status encode(mp_diffusion_engine *engine, mp_item *item, mp_lease *lease, bool *done, mp_error *error) {
    mp_diff_state *state = item->state;
    const mp_image_generation_request *request = mp_diff_request(item);
    next_encoder(engine, state, request->n_texts);
    if (state->at.encoder == MP_DIFF_ENCODERS) {
        for (int t = 0; t < request->n_texts; t++) {
            const mp_diff_texts *texts = state->texts[t];
            if (!mp_kernels_get()->all_finite(texts->rows, (int64_t)request->text_rows * request->text_width) ||
                !mp_kernels_get()->all_finite(texts->pooled, request->pooled_width))
                return mp_fail(error, MP_NUMERIC, "a text encoder produced NaN or infinity");
            mp_diff_texts_complete(state->texts[t]);
            if (request->keep) {
                memcpy(request->texts + (int64_t)t * request->text_rows * request->text_width, texts->rows,
                       (size_t)request->text_rows * (size_t)request->text_width * sizeof(float));
                memcpy(request->pooled + (int64_t)t * request->pooled_width, texts->pooled,
                       (size_t)request->pooled_width * sizeof(float));
            }
        }
        state->at.phase = MP_DIFF_DENOISE;
        return MP_OK;
    }
    if (!state->encoding.at)
        MP_TRY(begin_text(engine, state, request, error));
    MP_TRY(mp_diff_run_block(engine, state, lease, state->at.encoder, state->at.block, done, error));
    if (!*done || ++state->at.block < engine->model->block_count[state->at.encoder])
        return MP_OK;
    keep_text(engine->model, request, state);
    mp_diff_let_go(engine, &state->encoding);
    state->at.block = 0;
    state->at.text++;
    return MP_OK;
}

/* ---- denoising --------------------------------------------------------------------------------------------------- */

/* latents [channels, height, width] <-> rows [height / 2 * width / 2][channels][2][2] */
static void phase_pack(const mp_image_generation_request *request, const float *latents, float *rows) {
    const int32_t C = request->channels, height = request->latent_height, width = request->latent_width;
    const int32_t across = width / MP_DIFF_PATCH;
    for (int32_t c = 0; c < C; c++)
        for (int32_t y = 0; y < height; y++)
            for (int32_t x = 0; x < width; x++) {
                const int64_t row = (int64_t)(y / 2) * across + x / 2;
                rows[(row * C + c) * 4 + y % 2 * 2 + x % 2] = latents[((int64_t)c * height + y) * width + x];
            }
}

static void unpack(const mp_image_generation_request *request, const float *rows, float *latents) {
    const int32_t C = request->channels, height = request->latent_height, width = request->latent_width;
    const int32_t across = width / MP_DIFF_PATCH;
    for (int32_t c = 0; c < C; c++)
        for (int32_t y = 0; y < height; y++)
            for (int32_t x = 0; x < width; x++) {
                const int64_t row = (int64_t)(y / 2) * across + x / 2;
                latents[((int64_t)c * height + y) * width + x] = rows[(row * C + c) * 4 + y % 2 * 2 + x % 2];
            }
}

static mp_status begin_denoising(mp_diffusion_engine *engine, mp_diff_state *state,
                                 const mp_image_generation_request *request, mp_error *error) {
    const mp_diffusion *model = engine->model;
    mp_dit_pass *pass = &state->pass;
    pass->text_rows = request->text_rows;
    pass->grid_height = request->latent_height / MP_DIFF_PATCH;
    pass->grid_width = request->latent_width / MP_DIFF_PATCH;
    const size_t latents = (size_t)mp_image_generation_latents(request), hidden = (size_t)model->hidden;
    const size_t rows = (size_t)request->text_rows + (size_t)pass->grid_height * (size_t)pass->grid_width;
    float **const parts[] = {&pass->h,        &pass->condition,    &pass->angles,
                             &state->latents, &state->velocity[0], &state->velocity[1]};
    const size_t sizes[] = {rows * hidden, hidden,  model->flux ? rows * (size_t)model->head_dim : 0,
                            latents,       latents, request->n_texts > 1 ? latents : 0};
    MP_TRY(mp_diff_hold(engine, &state->denoising, MP_DIFF_TRANSFORMER, 6, parts, sizes, error));
    if (model->flux)
        mp_dit_angles(model, pass);
    else
        pass->angles = NULL;
    return MP_OK;
}

static void begin_step(mp_diff_state *state, const mp_image_generation_request *request) {
    const float *from = state->at.step ? request->latents : request->noise;
    phase_pack(request, from + (int64_t)state->at.image * mp_image_generation_latents(request), state->latents);
}

/* Finish a step after its last pass: x += (next sigma - sigma) v. With guidance, v = negative + scale (v -
 * negative). */
static mp_status end_step(mp_item *item, mp_error *error) {
    mp_diff_state *state = item->state;
    mp_image_generation_request *request = mp_diff_request(item);
    const int64_t n = mp_image_generation_latents(request);
    float *v = state->velocity[0];
    const float *negative = state->velocity[1];
    for (int64_t i = 0; request->n_texts > 1 && i < n; i++)
        v[i] = negative[i] + request->guidance * (v[i] - negative[i]);
    if (!mp_kernels_get()->all_finite(v, n))
        return mp_fail(error, MP_NUMERIC, "the model produced NaN or infinity in step %d", state->at.step + 1);
    const float by = request->sigmas[state->at.step + 1] - request->sigmas[state->at.step];
    for (int64_t i = 0; i < n; i++)
        state->latents[i] += by * v[i];
    unpack(request, state->latents, request->latents + state->at.image * n);
    if (request->keep)
        memcpy(request->history + ((int64_t)state->at.image * request->n_steps + state->at.step) * n,
               request->latents + state->at.image * n, (size_t)n * sizeof(float));
    state->at.step++;
    item->cursor++;
    if (preview_due(request, &state->at)) { /* x - sigma * v predicts the denoised latents */
        const float sigma = request->sigmas[state->at.step];
        for (int64_t i = 0; i < n; i++)
            state->latents[i] -= sigma * v[i];
        unpack(request, state->latents, request->preview_latents);
        state->at.phase = MP_DIFF_PREVIEW;
    } else if (state->at.step == request->n_steps) {
        state->at.step = 0;
        state->at.image++;
    }
    mp_request_publish(&request->steps_done, (int32_t)item->cursor);
    return MP_OK;
}

static mp_status denoise(mp_diffusion_engine *engine, mp_item *item, mp_lease *lease, bool *done, mp_error *error) {
    mp_diff_state *state = item->state;
    const mp_image_generation_request *request = mp_diff_request(item);
    const mp_diffusion *model = engine->model;
    if (state->at.image == request->n_images) {
        mp_diff_let_go(engine, &state->denoising);
        state->at.image = 0;
        state->at.phase = MP_DIFF_DECODE;
        return MP_OK;
    }
    if (!state->denoising.at)
        MP_TRY(begin_denoising(engine, state, request, error));
    if (state->at.block == 0 && state->at.text == 0)
        begin_step(state, request);
    const mp_diff_texts *texts = state->texts[state->at.text];
    state->pass.texts = texts->rows;
    state->pass.pooled = texts->pooled;
    state->pass.latents = state->latents;
    state->pass.velocity = state->velocity[state->at.text];
    state->pass.time = request->times[state->at.step];
    state->pass.guidance = request->guidance * 1000;
    const uint64_t start = mp_sys_now_ns();
    const bool measured = state->at.block > 0 && state->at.block < model->block_count[MP_DIFF_TRANSFORMER] &&
                          engine->blocks[MP_DIFF_TRANSFORMER][state->at.block].ready;
    MP_TRY(mp_diff_run_block(engine, state, lease, MP_DIFF_TRANSFORMER, state->at.block, done, error));
    if (!*done)
        return MP_OK;
    if (measured) {
        const int64_t rows = (int64_t)state->pass.grid_height * state->pass.grid_width;
        const double blocks = model->block_count[MP_DIFF_TRANSFORMER] - 1;
        const double gflop = mp_diff_gflop(model, request->text_rows, rows) / blocks;
        const uint64_t spent = (uint64_t)((double)(mp_sys_now_ns() - start) / (gflop > 1e-6 ? gflop : 1e-6));
        const uint64_t old = atomic_load_explicit(&engine->model->gflop_ns, memory_order_relaxed);
        atomic_store_explicit(&engine->model->gflop_ns, (15 * old + spent) / 16 + 1, memory_order_relaxed);
    }
    if (++state->at.block <= model->block_count[MP_DIFF_TRANSFORMER])
        return MP_OK;
    state->at.block = 0;
    if (++state->at.text < request->n_texts)
        return MP_OK;
    state->at.text = 0;
    return end_step(item, error);
}

/* ---- decoding ---------------------------------------------------------------------------------------------------- */

/* Fill in the decoder's input, pixel rows [height * width, channels]: the latents of an image, or for a preview the
 * latents that the last step predicts. */
static mp_status begin_decoding(mp_diffusion_engine *engine, mp_diff_state *state,
                                const mp_image_generation_request *request, mp_error *error) {
    const mp_diffusion *model = engine->model;
    mp_vae_image *run = &state->image_run;
    const size_t size = (size_t)mp_vae_floats(model, request->latent_height, request->latent_width);
    float **const parts[] = {&run->x, &run->a, &run->b};
    const size_t sizes[] = {size, size, size};
    MP_TRY(mp_diff_hold(engine, &state->decoding, MP_DIFF_DECODER, 3, parts, sizes, error));
    run->height = request->latent_height;
    run->width = request->latent_width;
    const int64_t plane = (int64_t)request->latent_height * request->latent_width;
    const int64_t n = mp_image_generation_latents(request);
    const bool preview = state->at.phase == MP_DIFF_PREVIEW;
    const float *latents = preview ? request->preview_latents : request->latents + state->at.image * n;
    for (int64_t i = 0; i < plane; i++)
        for (int32_t c = 0; c < request->channels; c++)
            run->x[i * request->channels + c] = latents[c * plane + i] / model->latent_scale + model->latent_shift;
    return MP_OK;
}

static float clamp(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }

static void end_preview(mp_diff_state *state, mp_image_generation_request *request, const float *x, int64_t n) {
    const int32_t number = atomic_load_explicit(&request->previews_done, memory_order_relaxed);
    uint8_t *to = request->previews + number * n;
    for (int64_t i = 0; i < n; i++)
        to[i] = (uint8_t)lrintf(clamp(x[i] * 0.5f + 0.5f) * 255);
    atomic_store_explicit(&request->previews_done, number + 1, memory_order_release);
    state->at.phase = state->at.encoder == MP_DIFF_ENCODERS ? MP_DIFF_DENOISE : MP_DIFF_ENCODE;
}

static void end_image(mp_diff_state *state, mp_item *item, const float *x, int64_t n) {
    mp_image_generation_request *request = mp_diff_request(item);
    float *to = request->pixels + state->at.image * n;
    for (int64_t i = 0; i < n; i++)
        to[i] = clamp(x[i] * 0.5f + 0.5f);
    item->cursor++;
    mp_request_publish(&request->images_done, ++state->at.image);
    if (state->at.image == request->n_images)
        state->at.phase = MP_DIFF_FINISHED;
}

static mp_status phase_decode(mp_diffusion_engine *engine, mp_item *item, mp_lease *lease, bool *done,
                              mp_error *error) {
    mp_diff_state *state = item->state;
    mp_image_generation_request *request = mp_diff_request(item);
    if (!state->decoding.at)
        MP_TRY(begin_decoding(engine, state, request, error));
    MP_TRY(mp_diff_run_block(engine, state, lease, MP_DIFF_DECODER, state->at.block, done, error));
    if (!*done || ++state->at.block < engine->model->op_count)
        return MP_OK;
    state->at.block = 0;
    const int64_t n = (int64_t)request->height * request->width * 3;
    const float *x = state->image_run.x;
    if (!mp_kernels_get()->all_finite(x, n))
        return mp_fail(error, MP_NUMERIC, "the decoder produced NaN or infinity");
    if (state->at.phase == MP_DIFF_PREVIEW)
        end_preview(state, request, x, n);
    else
        end_image(state, item, x, n);
    mp_diff_let_go(engine, &state->decoding);
    return MP_OK;
}

mp_status mp_diff_advance(mp_diffusion_engine *engine, mp_item *item, mp_lease *lease, bool *done, mp_error *error) {
    switch (((mp_diff_state *)item->state)->at.phase) {
    case MP_DIFF_ENCODE:
        return encode(engine, item, lease, done, error);
    case MP_DIFF_DENOISE:
        return denoise(engine, item, lease, done, error);
    default:
        return phase_decode(engine, item, lease, done, error);
    }
}
