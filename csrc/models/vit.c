/* vit.c: the forward pass of image transformers (ViT: Dosovitskiy et al., arXiv:2010.11929). */
#include "models/vit.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

typedef struct buffers { /* of a group, shared by its lanes */
    float *x;            /* [M, hidden] the residual stream */
    float *mixed;        /* [max(M, P), hidden] normed rows; patches; what attention gave */
    float *wide;         /* [M, 3 hidden] queries, keys, values; unfolded patches [P, 3 p^2] */
    float *inner;        /* [M, inner width]; the one row of attention pooling's queries */
    void *acts;
} buffers;

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static int inner_width(const mp_vit *model) { return model->gated ? 2 * model->ffn : model->ffn; }

static void *take(uint8_t **at, size_t bytes) {
    void *piece = *at;
    *at += mp_arena_cost(bytes);
    return piece;
}

/* Lays the buffers out from `memory`, which may be NULL; returns the bytes before acts. */
static size_t lay_out(const mp_vit *model, int M, int P, uint8_t *memory, buffers *b) {
    uint8_t *at = memory;
    const size_t f = sizeof(float), rows = (size_t)M, hidden = (size_t)model->hidden;
    b->x = take(&at, rows * hidden * f);
    b->mixed = take(&at, larger(rows, (size_t)P) * hidden * f);
    b->wide = take(&at, larger(rows * 3 * hidden, (size_t)P * (size_t)model->patches.K) * f);
    b->inner = take(&at, larger(rows * (size_t)inner_width(model), hidden) * f);
    b->acts = at;
    return (size_t)(at - memory);
}

size_t mp_vit_group_scratch(const mp_vit *model, int M, int P, int count) {
    const mp_vit_layer *layer = &model->layers[0];
    const mp_vit_pool *pool = &model->pool;
    const struct {
        const mp_linear *linear;
        int rows;
    } linears[] = {{&model->patches, P}, {&layer->qkv, M},    {&layer->out, M}, {&layer->up, M},
                   {&layer->down, M},    {&pool->q, 1},       {&pool->kv, M},   {&pool->out, count},
                   {&pool->up, count},   {&pool->down, count}};
    size_t acts = 0;
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++)
        if (linears[i].linear->parts)
            acts = larger(acts, mp_linear_scratch(linears[i].linear, linears[i].rows));
    buffers b;
    return lay_out(model, M, P, (uint8_t *)64, &b) + acts;
}

size_t mp_vit_lane_scratch(const mp_vit *model, int T) {
    size_t attention = mp_attn_full_scratch(T, model->head_dim);
    size_t head = mp_arena_cost((size_t)model->hidden * sizeof(float)) + mp_head_scratch(&model->head) * sizeof(float);
    size_t position = mp_vit_position_scratch(model) * sizeof(float);
    return mp_arena_cost(larger(larger(attention, head), position));
}

/* ---- from pixels to rows ----------------------------------------------------------------------------------------- */

/* A patch as the weights of the convolution lie: channels, frames, lines, columns. */
static void unfold_patch(const mp_vit *model, const mp_vit_image *image, int y, int x, float *out) {
    const int p = model->patch;
    for (int c = 0; c < MP_IMAGE_CHANNELS; c++)
        for (int i = 0; i < p * model->frames; i++) {
            const uint8_t *line =
                image->pixels + (((int64_t)y * p + i % p) * image->width + (int64_t)x * p) * MP_IMAGE_CHANNELS + c;
            for (int k = 0; k < p; k++)
                *out++ = model->pixel[c][line[k * MP_IMAGE_CHANNELS]];
        }
}

static void unfold(const mp_vit *model, const mp_lane *lane, const mp_vit_image *images, int count, int P, float *out) {
    int64_t first, end;
    mp_lane_split(lane, P, 1, &first, &end);
    for (int i = 0; i < count; i++)
        for (int n = 0; n < images[i].down * images[i].across; n++) {
            int64_t patch = images[i].patch + (images[i].place ? images[i].place[n] : n);
            if (patch >= first && patch < end)
                unfold_patch(model, &images[i], n / images[i].across, n % images[i].across,
                             out + patch * model->patches.K);
        }
}

/* Row n of an image: class token, registers, then patches. */
static void embed_row(const mp_vit *model, const mp_vit_image *image, int n, const float *patches, float *scratch,
                      float *x) {
    const mp_kernels *call = mp_kernels_get();
    const int hidden = model->hidden, before = model->classes + model->registers;
    const size_t bytes = (size_t)hidden * sizeof *x;
    if (n < model->classes) {
        memcpy(x, model->class_token, bytes);
        call->add(model->positions, hidden, x);
    } else if (n < before) {
        memcpy(x, model->register_tokens + (int64_t)(n - model->classes) * hidden, bytes);
    } else {
        int patch = n - before;
        memcpy(x, patches + (int64_t)(image->patch + patch) * hidden, bytes);
        if (!model->positions)
            return;
        if (image->positions)
            call->add(image->positions + (int64_t)patch * hidden, hidden, x);
        else
            mp_vit_add_position(model, image->down, image->across, patch / image->across, patch % image->across,
                                scratch, x);
    }
    if (model->input_norm)
        call->layer_norm(x, model->input_norm, model->input_norm_bias, model->eps, hidden, x);
}

static void embed(const mp_vit *model, const mp_lane *lane, const mp_vit_image *images, int count, int M, int P,
                  const buffers *b, float *scratch) {
    int64_t row0, row1;
    mp_epilogue plain = {0};
    unfold(model, lane, images, count, P, b->wide);
    mp_lane_sync(lane);
    mp_linear_forward(&model->patches, lane, b->wide, model->patches.K, P, b->acts, NULL, NULL, &plain, b->mixed,
                      model->hidden);
    mp_lane_sync(lane);
    mp_lane_split(lane, M, 1, &row0, &row1);
    for (int i = 0; i < count; i++)
        for (int n = 0; n < images[i].n; n++) {
            int64_t row = images[i].row + n;
            if (row >= row0 && row < row1)
                embed_row(model, &images[i], n, b->mixed, scratch, b->x + row * model->hidden);
        }
    mp_lane_sync(lane);
}

/* ---- layers ------------------------------------------------------------------------------------------------------ */

static void norm_rows(const mp_vit *model, const mp_lane *lane, const float *weight, const float *bias, int M,
                      const float *x, float *y) {
    int64_t row0, row1;
    mp_lane_split(lane, M, 1, &row0, &row1);
    for (int64_t r = row0; r < row1; r++)
        mp_vit_norm(model, x + r * model->hidden, weight, bias, y + r * model->hidden);
    mp_lane_sync(lane);
}

/* x += scale * y */
static void add_scaled(const mp_vit *model, const mp_lane *lane, const float *scale, int M, const float *y, float *x) {
    int64_t row0, row1;
    const int n = model->hidden;
    mp_lane_split(lane, M, 1, &row0, &row1);
    for (int64_t r = row0; r < row1; r++)
        for (int i = 0; i < n; i++)
            x[r * n + i] += y[r * n + i] * scale[i];
    mp_lane_sync(lane);
}

/* Adds a linear layer's outputs to x, scaled if there is a scale. */
static void add_linear(const mp_vit *model, const mp_lane *lane, const mp_linear *linear, const float *scale,
                       const float *in, int64_t ld_in, int M, const buffers *b) {
    mp_epilogue plain = {0}, residual = {.residual = b->x, .ld_residual = model->hidden};
    float *out = scale ? b->wide : b->x;
    mp_linear_forward(linear, lane, in, ld_in, M, b->acts, NULL, NULL, scale ? &plain : &residual, out, model->hidden);
    mp_lane_sync(lane);
    if (scale)
        add_scaled(model, lane, scale, M, out, b->x);
}

/* Rows [first, end) of an image, which see each other, in one head. */
static void attend_rows(const mp_vit *model, const mp_vit_image *image, int head, int32_t first, int32_t end,
                        const buffers *b, void *scratch) {
    const int64_t column = (int64_t)head * model->head_dim, row = image->row + first;
    const float *q = b->wide + row * 3 * model->hidden + column;
    mp_attn_full attention = {
        .q = q,
        .k = q + model->hidden,
        .v = q + 2 * model->hidden,
        .ld = 3 * model->hidden,
        .out = b->mixed + row * model->hidden + column,
        .ld_out = model->hidden,
        .T = end - first,
        .D = model->head_dim,
        .scale = 1 / sqrtf((float)model->head_dim),
    };
    mp_attn_full_for(model->compute, end - first, model->head_dim)(&attention, 0, end - first, scratch);
}

/* One unit of work is an image, or a window of it, and a head. */
static void attend(const mp_vit *model, const mp_lane *lane, const mp_vit_layer *layer, const mp_vit_image *images,
                   int count, const buffers *b, mp_vit_stop *stop, void *scratch) {
    int64_t begin, end, unit = 0, units = 0;
    for (int i = 0; i < count; i++)
        units += (int64_t)model->heads * (layer->windowed ? images[i].window_count : 1);
    mp_lane_split(lane, units, 1, &begin, &end);
    for (int i = 0; i < count; i++) {
        const mp_vit_image *image = &images[i];
        for (int w = 0; w < (layer->windowed ? image->window_count : 1); w++)
            for (int head = 0; head < model->heads; head++, unit++)
                if (unit >= begin && unit < end) {
                    attend_rows(model, image, head, layer->windowed ? image->windows[w] : 0,
                                layer->windowed ? image->windows[w + 1] : image->n, b, scratch);
                    if (lane->index == 0) /* a sign of life; whether to go on is asked after the layer */
                        mp_lease_poll(stop->lease);
                }
    }
    mp_lane_sync(lane);
}

/* Queries and keys of axial networks, by line and column. */
static void rotate(const mp_vit *model, const mp_lane *lane, const mp_vit_image *images, int count, const buffers *b) {
    const mp_kernels *call = mp_kernels_get();
    int64_t begin, end, row = 0;
    for (int i = 0; i < count; i++)
        row += images[i].n;
    mp_lane_split(lane, row, 1, &begin, &end);
    for (int i = 0; i < count; i++)
        for (int n = 0; n < images[i].n; n++) {
            row = images[i].row + n;
            if (row < begin || row >= end)
                continue;
            for (int head = 0; head < 2 * model->heads; head++) /* keys stand behind queries */
                call->rope(b->wide + row * 3 * model->hidden + (int64_t)head * model->head_dim,
                           images[i].rotation + (int64_t)n * model->head_dim, model->head_dim, true);
        }
    mp_lane_sync(lane);
}

static void gate_rows(const mp_vit *model, const mp_lane *lane, int M, float *inner) {
    const mp_kernels *call = mp_kernels_get();
    int64_t row0, row1;
    mp_lane_split(lane, M, 1, &row0, &row1);
    for (int64_t r = row0; r < row1; r++) {
        float *row = inner + r * inner_width(model);
        call->gated(model->act, row, row + model->ffn, model->ffn, row);
    }
    mp_lane_sync(lane);
}

static void run_layer(const mp_vit *model, const mp_lane *lane, const mp_vit_layer *layer, const mp_vit_image *images,
                      int count, int M, const buffers *b, mp_vit_stop *stop, void *scratch) {
    const int hidden = model->hidden;
    mp_epilogue plain = {0}, activate = {.act = model->act};
    norm_rows(model, lane, layer->attention_norm, layer->attention_norm_bias, M, b->x, b->mixed);
    mp_linear_forward(&layer->qkv, lane, b->mixed, hidden, M, b->acts, NULL, NULL, &plain, b->wide, 3 * hidden);
    mp_lane_sync(lane);
    if (model->axial)
        rotate(model, lane, images, count, b);
    attend(model, lane, layer, images, count, b, stop, scratch);
    add_linear(model, lane, &layer->out, layer->attention_scale, b->mixed, hidden, M, b);
    norm_rows(model, lane, layer->ffn_norm, layer->ffn_norm_bias, M, b->x, b->mixed);
    mp_linear_forward(&layer->up, lane, b->mixed, hidden, M, b->acts, NULL, NULL, model->gated ? &plain : &activate,
                      b->inner, inner_width(model));
    mp_lane_sync(lane);
    if (model->gated)
        gate_rows(model, lane, M, b->inner);
    add_linear(model, lane, &layer->down, layer->ffn_scale, b->inner, inner_width(model), M, b);
}

/* ---- from rows to a vector --------------------------------------------------------------------------------------- */

/* The learned query looks at each image: pooled rows [count, hidden] in b->x, whose own rows are needed no more. */
static void pool_by_attention(const mp_vit *model, const mp_lane *lane, const mp_vit_image *images, int count, int M,
                              const buffers *b, void *scratch) {
    const mp_kernels *call = mp_kernels_get();
    const mp_vit_pool *pool = &model->pool;
    const int hidden = model->hidden;
    mp_epilogue plain = {0}, activate = {.act = model->act}, residual = {.residual = b->x, .ld_residual = hidden};
    float *q = b->inner, *kv = b->wide;
    norm_rows(model, lane, model->norm, model->norm_bias, M, b->x, b->mixed);
    mp_linear_forward(&pool->q, lane, pool->probe, hidden, 1, b->acts, NULL, NULL, &plain, q, hidden);
    mp_lane_sync(lane);
    mp_linear_forward(&pool->kv, lane, b->mixed, hidden, M, b->acts, NULL, NULL, &plain, kv, 2 * hidden);
    mp_lane_sync(lane);
    int64_t begin, end;
    mp_lane_split(lane, (int64_t)count * model->heads, 1, &begin, &end);
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t i = unit / model->heads, column = unit % model->heads * model->head_dim;
        const float *k = kv + (int64_t)images[i].row * 2 * hidden + column;
        mp_attn_full attention = {
            .q = q + column, /* one row of queries: its stride is never used */
            .k = k,
            .v = k + hidden,
            .ld = 2 * hidden,
            .out = b->mixed + i * hidden + column,
            .ld_out = hidden,
            .T = images[i].n,
            .D = model->head_dim,
            .scale = 1 / sqrtf((float)model->head_dim),
        };
        call->attn_full(&attention, 0, 1, scratch);
    }
    mp_lane_sync(lane);
    mp_linear_forward(&pool->out, lane, b->mixed, hidden, count, b->acts, NULL, NULL, &plain, b->x, hidden);
    mp_lane_sync(lane);
    norm_rows(model, lane, pool->norm, pool->norm_bias, count, b->x, b->mixed);
    mp_linear_forward(&pool->up, lane, b->mixed, hidden, count, b->acts, NULL, NULL, &activate, b->inner, model->ffn);
    mp_lane_sync(lane);
    mp_linear_forward(&pool->down, lane, b->inner, model->ffn, count, b->acts, NULL, NULL, &residual, b->x, hidden);
    mp_lane_sync(lane);
}

/* pooled: the image's row of attention pooling, or NULL: its first row, normed, is what counts. */
static void finish_image(const mp_vit *model, mp_vit_image *image, const float *rows, const float *pooled,
                         float *scratch) {
    const mp_kernels *call = mp_kernels_get();
    if (!pooled) {
        call->layer_norm(rows, model->norm, model->norm_bias, model->eps, model->hidden, scratch);
        pooled = scratch;
    }
    float *rest = scratch + mp_arena_cost((size_t)model->hidden * sizeof *scratch) / sizeof *scratch;
    mp_head_apply(&model->head, pooled, 1, 0, image->dimensions, image->normalize, rest, image->out);
    image->finite = call->all_finite(image->out, image->dimensions);
}

/* ---- axial networks ---------------------------------------------------------------------------------------------- */

static int32_t windows_of(const mp_vit *model, int32_t down, int32_t across) {
    const int32_t side = model->window * model->cell;
    return ((down + side - 1) / side) * ((across + side - 1) / side);
}

size_t mp_vit_axes_bytes(const mp_vit *model, int32_t down, int32_t across) {
    const size_t patches = (size_t)down * (size_t)across;
    return mp_arena_cost(patches * sizeof(int32_t)) +
           mp_arena_cost(((size_t)windows_of(model, down, across) + 1) * sizeof(int32_t)) +
           mp_arena_cost(patches * (size_t)model->head_dim * sizeof(float));
}

/* Half of a head's pairs turn with the line, the others with the column, at the same speeds. */
static void turn(const mp_vit *model, int32_t y, int32_t x, float *out) {
    const int half = model->head_dim / 4;
    for (int i = 0; i < 2 * half; i++) {
        double angle = (i < half ? y : x) * pow((double)model->rope_base, -(double)(i % half) / half);
        out[2 * i] = (float)cos(angle);
        out[2 * i + 1] = (float)sin(angle);
    }
}

void mp_vit_axes(const mp_vit *model, mp_vit_image *image, void *memory) {
    const int32_t down = image->down, across = image->across, cell = model->cell, side = model->window * cell;
    uint8_t *at = memory;
    int32_t *place = take(&at, (size_t)down * (size_t)across * sizeof *place);
    int32_t *windows = take(&at, ((size_t)windows_of(model, down, across) + 1) * sizeof *windows);
    float *rotation = (float *)at;
    int32_t row = 0;
    image->window_count = 0;
    for (int32_t top = 0; top < down; top += side)
        for (int32_t left = 0; left < across; left += side) {
            windows[image->window_count++] = row;
            for (int32_t y = top; y < down && y < top + side; y += cell)
                for (int32_t x = left; x < across && x < left + side; x += cell)
                    for (int32_t i = 0; i < cell * cell; i++, row++) {
                        place[(y + i / cell) * across + x + i % cell] = row;
                        turn(model, y + i / cell, x + i % cell, rotation + (int64_t)row * model->head_dim);
                    }
        }
    windows[image->window_count] = row;
    image->place = place;
    image->windows = windows;
    image->rotation = rotation;
}

static void copy_tokens(const mp_vit *model, const mp_lane *lane, mp_vit_image *images, int count, const float *x) {
    int64_t first, end;
    mp_lane_split(lane, count, 1, &first, &end);
    for (int64_t i = first; i < end; i++) {
        mp_vit_image *image = &images[i];
        int64_t floats = (int64_t)image->n * model->hidden;
        if (!image->want_tokens)
            continue;
        memcpy(image->out, x + (int64_t)image->row * model->hidden, (size_t)floats * sizeof *x);
        image->finite = mp_kernels_get()->all_finite(image->out, floats);
    }
}

int mp_vit_run(const mp_vit *model, const mp_lane *lane, const mp_vit_image *images, int count, int M, int P, int from,
               int end, mp_vit_stop *stop, void *group_scratch, void *lane_scratch) {
    buffers b;
    lay_out(model, M, P, group_scratch, &b);
    if (from == 0)
        embed(model, lane, images, count, M, P, &b, lane_scratch);
    for (int l = from; l < end; l++) {
        run_layer(model, lane, &model->layers[l], images, count, M, &b, stop, lane_scratch);
        /* the others read it after this barrier, before the next: it is not written again until they did */
        if (lane->index == 0 && mp_lease_poll(stop->lease))
            atomic_store_explicit(&stop->stop, true, memory_order_relaxed);
        mp_lane_sync(lane);
        if (atomic_load_explicit(&stop->stop, memory_order_relaxed))
            return l + 1;
    }
    return end;
}

float *mp_vit_states(const mp_vit *model, int M, int P, void *group_scratch, float **spare) {
    buffers b;
    lay_out(model, M, P, group_scratch, &b);
    *spare = b.wide;
    return b.x;
}

void mp_vit_forward(const mp_vit *model, const mp_lane *lane, mp_vit_image *images, int count, int M, int P,
                    mp_vit_stop *stop, void *group_scratch, void *lane_scratch) {
    buffers b;
    lay_out(model, M, P, group_scratch, &b);
    mp_vit_run(model, lane, images, count, M, P, 0, model->layer_count, stop, group_scratch, lane_scratch);
    if (atomic_load_explicit(&stop->stop, memory_order_relaxed))
        return;
    copy_tokens(model, lane, images, count, b.x);
    mp_lane_sync(lane);
    if (model->attention_pool)
        pool_by_attention(model, lane, images, count, M, &b, lane_scratch);
    int64_t first, end;
    mp_lane_split(lane, count, 1, &first, &end);
    for (int64_t i = first; i < end; i++)
        if (!images[i].want_tokens)
            finish_image(model, &images[i], b.x + (int64_t)images[i].row * model->hidden,
                         model->attention_pool ? b.x + i * model->hidden : NULL, lane_scratch);
    mp_lane_sync(lane);
}
