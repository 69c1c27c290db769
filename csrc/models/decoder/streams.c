/* decoder/streams.c: see decoder/streams.h. */
#include "models/decoder/streams.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "models/decoder/load.h"

/* ---- loading ----------------------------------------------------------------------------------------------------- */

/* Adds the projections `name` of all sums: one tensor [streams, hidden, hidden], or one for each. */
static mp_status read_projections(mp_decoder *model, const mp_builder *builder, const char *name, mp_linear *linears,
                                  mp_error *error) {
    char full[64];
    int64_t shape[3] = {model->streams, model->hidden, model->hidden};
    mp_tensor all;
    snprintf(full, sizeof full, "%s.weight", name);
    const bool joined = mp_weights_has(model->weights, full);
    if (joined)
        MP_TRY(mp_weights_get(model->weights, full, 3, shape, &all, error));
    for (int i = 0; i < model->streams; i++) {
        if (!joined) {
            snprintf(full, sizeof full, "%s.%d.weight", name, i);
            MP_TRY(mp_builder_linear(builder, &linears[i], full, NULL, model->hidden, model->hidden, error));
            continue;
        }
        mp_tensor one = {.dtype = all.dtype, .ndim = 2, .shape = {model->hidden, model->hidden},
                         .nbytes = all.nbytes / (uint64_t)model->streams};
        one.data = all.data + (uint64_t)i * one.nbytes;
        MP_TRY(mp_builder_linear_of(builder, &linears[i], full, &one, error));
    }
    return MP_OK;
}

mp_status mp_streams_read_model(mp_decoder *model, const mp_builder *builder, mp_error *error) {
    int64_t sums, one = 1;
    MP_TRY(mp_spec_int(mp_weights_spec(model->weights), "{arch}.altup.num_inputs", 1, MP_STREAMS + 1, &one, &sums,
                       error));
    model->streams = (int32_t)sums - 1;
    if (sums == 1)
        return MP_OK;
    model->adds_up = true;
    MP_TRY(read_projections(model, builder, "altup_proj", model->stream_in, error));
    return read_projections(model, builder, "altup_unembd_proj", model->stream_out, error);
}

mp_status mp_streams_read_layer(const mp_layer_reader *reader, mp_decoder_layer *layer, mp_error *error) {
    const mp_decoder *model = reader->model;
    const int64_t n = model->streams + 1, hidden = model->hidden;
    mp_streams *streams = &layer->streams;
    const struct {
        const char *name;
        float **to;
        int64_t rows, columns;
    } parts[] = {{"altup_router", &streams->router, n, hidden}, {"altup_predict_coef", &streams->predict, n * n, n},
                 {"altup_correct_coef", &streams->correct, n, n}};
    char name[64];
    if (model->streams == 0)
        return MP_OK;
    if (model->inputs.width == 0)
        return mp_fail(error, MP_UNSUPPORTED, "the model has several residual sums and no inputs of layers, which "
                       "mpool does not support");
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        snprintf(name, sizeof name, "blk.%d.%s.weight", reader->index, parts[i].name);
        MP_TRY(mp_builder_plain(reader->builder, parts[i].to, name, parts[i].rows, parts[i].columns, error));
    }
    MP_TRY(mp_reader_vector(reader, &streams->scale, "altup_correct_scale", model->hidden, true, error));
    return mp_reader_norm(reader, &streams->norm, "altup_router_norm", model->hidden, true, error);
}

/* ---- computing --------------------------------------------------------------------------------------------------- */

static float *others_of(const mp_decoder_pass *pass, int64_t row) {
    return pass->streams + row * pass->model->streams * pass->model->hidden;
}

static float mean_square(const float *x, int64_t n) { return mp_kernels_get()->dot(x, x, n) / (float)n; }

/* Makes the root mean square of y [n] that of another vector, `size`. */
static void resize(float size, float *y, int64_t n) {
    const float square = mean_square(y, n), by = size / sqrtf(square > 1e-5f ? square : 1e-5f);
    for (int64_t i = 0; i < n; i++)
        y[i] *= by;
}

/* Returns the number of rows of the block that begins at row `first`; 0 after the last one. */
static int rows_from(const mp_decoder_pass *pass, int first) {
    const int left = pass->rows.M - first;
    return left < pass->block_rows ? left : pass->block_rows;
}

void mp_streams_enter(const mp_decoder_pass *pass, const mp_decoder_view *view) {
    const mp_decoder *model = pass->model;
    const mp_team_thread *thread = view->context.thread;
    const int64_t hidden = model->hidden, width = hidden * model->streams;
    mp_row_context context = view->context;
    int64_t begin, end;
    context.adapters = NULL;
    for (int first = 0, rows; (rows = rows_from(pass, first)) > 0; first += rows) {
        for (int i = 0; i < model->streams; i++) {
            mp_row_linear(&context, &model->stream_in[i], pass->x + first * hidden, hidden, rows, NULL,
                          others_of(pass, first) + i * hidden, width);
            mp_team_barrier(thread);
        }
    }
    mp_team_split(thread, pass->rows.M, 1, &begin, &end);
    for (int64_t r = begin; r < end; r++) {
        const float size = sqrtf(mean_square(pass->x + r * hidden, hidden));
        for (int i = 0; i < model->streams; i++)
            resize(size, others_of(pass, r) + i * hidden, hidden);
    }
    mp_team_barrier(thread);
}

/* Writes the modalities of a row [streams + 1]. normed: scratch [hidden]. */
static void route(const mp_decoder *model, const mp_streams *streams, const float *x, float *normed,
                  float *modalities) {
    const mp_kernels *call = mp_kernels_get();
    const int32_t n = model->streams + 1, hidden = model->hidden;
    mp_norm_row(&streams->norm, x, normed);
    for (int i = 0; i < n; i++) /* tanh(y) = 2 sigmoid(2 y) - 1 */
        modalities[i] = call->dot(normed, streams->router + i * hidden, hidden) * (2 / (float)hidden);
    call->activate(MP_ACT_SIGMOID, n, modalities);
    for (int i = 0; i < n; i++)
        modalities[i] = 2 * modalities[i] - 1;
}

static float product(const float *row, const float *modalities, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++)
        sum += row[i] * modalities[i];
    return sum;
}

void mp_streams_predict(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_decoder_layer *layer) {
    enum { MOST = MP_STREAMS + 1 };
    const mp_decoder *model = pass->model;
    const int64_t hidden = model->hidden;
    const int n = model->streams + 1;
    float factors[MOST][MOST], modalities[MOST], old[MOST];
    if (pass->rows.n_capture > 0)
        mp_team_barrier(view->context.thread); /* thread 0 may still copy rows, which this function changes */
    mp_team_loop loop = mp_team_rows(view->context.thread, view->rows, hidden * n * n);
    while (mp_team_next(view->context.thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++) {
            float *const x = pass->x + (view->first + r) * hidden, *const others = others_of(pass, view->first + r);
            route(model, &layer->streams, x, (float *)(void *)view->own, modalities);
            for (int to = 0; to < n; to++)
                for (int from = 0; from < n; from++)
                    factors[to][from] = product(layer->streams.predict + (to * n + from) * n, modalities, n);
            for (int64_t i = 0; i < hidden; i++) {
                for (int s = 0; s < n; s++)
                    old[s] = s == 0 ? x[i] : others[(s - 1) * hidden + i];
                for (int to = 0; to < n; to++) {
                    float sum = old[to];
                    for (int from = 0; from < n; from++)
                        sum += old[from] * factors[to][from];
                    *(to == 0 ? &x[i] : &others[(to - 1) * hidden + i]) = sum;
                }
            }
            memcpy(pass->predicted + r * hidden, x, (size_t)hidden * sizeof *x);
        }
    mp_team_barrier(view->context.thread);
}

void mp_streams_correct(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_decoder_layer *layer) {
    enum { MOST = MP_STREAMS + 1 };
    const mp_decoder *model = pass->model;
    const mp_team_thread *thread = view->context.thread;
    const mp_sublayer *inputs = &layer->sublayer[layer->count - 1];
    const int64_t hidden = model->hidden;
    const int n = model->streams + 1;
    const mp_residual output = {.x = pass->added, .n = model->hidden, .after = &inputs->after, .scratch = pass->normed};
    float modalities[MOST], factors[MOST];
    mp_team_loop loop = mp_team_rows(thread, view->rows, hidden * n);
    while (mp_team_next(thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++) {
            float *const x = pass->x + (view->first + r) * hidden, *const others = others_of(pass, view->first + r);
            const float *const predicted = pass->predicted + r * hidden;
            route(model, &layer->streams, x, (float *)(void *)view->own, modalities);
            for (int s = 0; s < n; s++)
                factors[s] = 1 + product(layer->streams.correct + s * n, modalities, n);
            for (int64_t i = 0; i < hidden; i++) {
                const float change = x[i] - predicted[i];
                x[i] = predicted[i] + change * factors[0];
                for (int s = 1; s < n; s++)
                    others[(s - 1) * hidden + i] += change * factors[s];
                pass->normed[r * hidden + i] = x[i] * layer->streams.scale[i];
            }
            memset(pass->added + r * hidden, 0, (size_t)hidden * sizeof *pass->added);
        }
    mp_team_barrier(thread);
    inputs->ffn[0]->ops->add(&view->context, inputs->ffn[0], pass->normed, view->rows, 1, pass->shared, view->own,
                             &output);
    mp_team_barrier(thread);
    mp_team_loop sums = mp_team_rows(thread, view->rows, hidden * n);
    while (mp_team_next(thread, &sums))
        for (int64_t r = sums.begin; r < sums.end; r++)
            for (int s = 0; s < model->streams; s++)
                mp_kernels_get()->add(pass->added + r * hidden, hidden, others_of(pass, view->first + r) + s * hidden);
    mp_team_barrier(thread);
}

void mp_streams_leave(const mp_decoder_pass *pass, const mp_decoder_view *view) {
    const mp_decoder *model = pass->model;
    const mp_team_thread *thread = view->context.thread;
    const int64_t hidden = model->hidden, width = hidden * model->streams;
    mp_row_context context = view->context;
    int64_t begin, end;
    context.adapters = NULL;
    for (int first = 0, rows; (rows = rows_from(pass, first)) > 0; first += rows) {
        mp_team_split(thread, rows, 1, &begin, &end);
        for (int64_t r = begin; r < end; r++) /* the sizes of the first sum */
            pass->predicted[r] = sqrtf(mean_square(pass->x + (first + r) * hidden, hidden));
        for (int i = 0; i < model->streams; i++) {
            mp_row_linear(&context, &model->stream_out[i], others_of(pass, first) + i * hidden, width, rows, NULL,
                          pass->added, hidden);
            mp_team_barrier(thread);
            for (int64_t r = begin; r < end; r++) {
                float *const y = pass->added + r * hidden, *const x = pass->x + (first + r) * hidden;
                resize(pass->predicted[r], y, hidden);
                mp_kernels_get()->add(y, hidden, x);
                for (int64_t at = 0; i == model->streams - 1 && at < hidden; at++)
                    x[at] /= (float)(model->streams + 1);
            }
            mp_team_barrier(thread);
        }
    }
}
