/* encoder/encoder.c: the forward pass of encoders (BERT: Devlin et al., arXiv:1810.04805), by the flags of their
 * row. */
#include "models/encoder/encoder.h"

#include <string.h>

/* Columns of the rows that hold queries, keys and values, and what a half of a layer adds where that is normed. */
static int32_t wide(const mp_encoder *model) {
    const int32_t seen = model->latent.heads * model->latent.count;
    const int32_t most = seen > model->qkv_width ? seen : model->qkv_width;
    return model->flags & MP_ARCH_OUTPUT_NORMS && model->hidden > most ? model->hidden : most;
}

/* The feed-forward half's inner rows: floats, or what the second product takes where the first makes that. */
static size_t inner_bytes(const mp_encoder *model, int M) {
    const mp_encoder_layer *layer = &model->layers[0];
    const size_t latent = (size_t)M * 2 * (size_t)model->latent.ffn * sizeof(float);
    const size_t inner = mp_linear_fits(&layer->up, &layer->down) ? mp_linear_scratch(&layer->down, M)
                                                                  : (size_t)M * (size_t)model->up_width * sizeof(float);
    return latent > inner ? latent : inner;
}

static int32_t mixed_width(const mp_encoder *model) {
    return model->q_width > model->hidden ? model->q_width : model->hidden;
}

/* The longest text, which is as many rows of rotary tables, is not known to who reserves scratch: M serves for it. */
size_t mp_encoder_group_scratch(const mp_encoder *model, int M) {
    size_t rows = (size_t)M * sizeof(float);
    size_t acts = 0, experts = 0;
    const mp_encoder_layer *layer = &model->layers[0];
    const mp_latent_attention *latent = &model->latent;
    const mp_linear *linears[] = {&layer->qkv,     &layer->out,     &layer->up,  &layer->down,
                                  &latent->scores, &latent->values, &latent->up, &latent->down};
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++) {
        size_t need = mp_linear_scratch(linears[i], M);
        acts = need > acts ? need : acts;
    }
    for (int i = 0; i < model->layer_count; i++) {
        size_t need = model->layers[i].experts ? mp_experts_scratch(model->layers[i].experts, M) : 0;
        experts = need > experts ? need : experts;
    }
    return mp_arena_cost(rows * (size_t)model->hidden) + mp_arena_cost(rows * (size_t)wide(model)) +
           mp_arena_cost(rows * (size_t)mixed_width(model)) + mp_arena_cost(inner_bytes(model, M)) +
           mp_arena_cost(rows * (size_t)model->rope[0].dim) + mp_arena_cost(rows * (size_t)model->rope[1].dim) +
           (model->flags & MP_ARCH_INPUT_TWICE ? mp_arena_cost(rows * (size_t)model->hidden) : 0) +
           (acts > experts ? acts : experts);
}

size_t mp_encoder_lane_scratch(const mp_encoder *model, int T) {
    size_t attention = mp_attn_full_scratch(T, model->head_dim);
    size_t head = mp_head_scratch(&model->head) * sizeof(float);
    size_t row = (size_t)model->hidden * sizeof(float);
    size_t most = attention > head ? attention : head;
    for (int i = 0; i < model->layer_count; i++) {
        size_t experts = model->layers[i].experts ? mp_experts_lane_scratch(model->layers[i].experts) : 0;
        most = experts > most ? experts : most;
    }
    return mp_arena_cost(most > row ? most : row);
}

static void *take(uint8_t **at, size_t bytes) {
    void *piece = *at;
    *at += mp_arena_cost(bytes);
    return piece;
}

/* What a lane computes on: the group, and where its rows stand. */
typedef struct pass {
    const mp_encoder *model;
    const mp_kernels *call;
    const mp_lane *lane;
    const mp_encoder_text *texts;
    int count, M;
    int64_t row0, row1; /* the lane's, where rows are dealt out */
    float *x;           /* [M, hidden] the residual sum */
    float *qkv;         /* [M, wide] */
    float *mixed;       /* [M, mixed_width] normed rows, then attention's output */
    float *inner;       /* [M, up_width], or activations of `down` */
    float *angles[2];   /* [longest text, dim] of each rope */
    float *input;       /* [M, hidden] of a layer, kept for MP_ARCH_INPUT_TWICE */
    void *acts, *lane_scratch;
} pass;

static void norm_row(const mp_encoder *model, const mp_norm *norm, int n, const float *x, float *y) {
    const mp_kernels *call = mp_kernels_get();
    if (model->flags & MP_ARCH_RMS_NORM)
        call->rms_norm(x, norm->weight, model->eps, n, y);
    else
        call->layer_norm(x, norm->weight, norm->bias, model->eps, n, y);
}

static void embed_row(const mp_encoder *model, int32_t id, int32_t position, int type, float *scratch, float *x) {
    const mp_kernels *call = mp_kernels_get();
    int n = model->hidden;
    mp_dequantize_row(model->tokens.dtype, mp_tensor_row(&model->tokens, id), n, x);
    if (model->embedding_scale != 1)
        for (int i = 0; i < n; i++)
            x[i] *= model->embedding_scale;
    if (model->token_type)
        call->add(model->token_type + (int64_t)type * n, n, x);
    if (model->positions.data) {
        mp_dequantize_row(model->positions.dtype, mp_tensor_row(&model->positions, position), n, scratch);
        call->add(scratch, n, x);
    }
    if (model->norm.weight)
        norm_row(model, &model->norm, n, x, x);
}

static void embed(const pass *p, int longest) {
    for (int t = 0; t < p->count; t++)
        for (int32_t i = 0; i < p->texts[t].n; i++) {
            int64_t row = p->texts[t].row + i;
            if (row >= p->row0 && row < p->row1)
                embed_row(p->model, p->texts[t].ids[i], i, i >= p->texts[t].second ? p->model->token_types - 1 : 0,
                          p->lane_scratch, p->x + row * p->model->hidden);
        }
    for (int i = 0; i < 2; i++) {
        const mp_rope *rope = &p->model->rope[i];
        int64_t from = 0, to = 0;
        if (rope->dim)
            mp_lane_split(p->lane, longest, 1, &from, &to);
        for (; from < to; from++)
            mp_rope_row(rope, from, p->angles[i] + from * rope->dim);
    }
}

/* The lane's rows of x [M, ld_x] into y [M, ld_y], which may be x. */
static void norm_rows(const pass *p, const mp_norm *norm, const float *x, int64_t ld_x, float *y, int64_t ld_y) {
    for (int64_t r = p->row0; r < p->row1; r++)
        norm_row(p->model, norm, p->model->hidden, x + r * ld_x, y + r * ld_y);
}

static void rotate_heads(const pass *p, const mp_norm *norm, const mp_rope *rope, const float *angles, int heads,
                         float *x) {
    const int dim = p->model->head_dim;
    for (int h = 0; h < heads; h++, x += dim) {
        if (norm->weight)
            norm_row(p->model, norm, dim, x, x);
        if (rope->dim)
            p->call->rope(x, angles, rope->dim, rope->neox);
    }
}

enum { PLACED = MP_ARCH_ROPE | MP_ARCH_HEAD_NORMS | MP_ARCH_QUERY_NORMS };

/* Queries and keys of the lane's rows. */
static void rotate(const pass *p, const mp_encoder_layer *layer) {
    const mp_encoder *model = p->model;
    const int which = layer->window && model->rope[1].dim ? 1 : 0;
    const mp_rope *rope = &model->rope[which];
    for (int t = 0; t < p->count; t++)
        for (int32_t i = 0; i < p->texts[t].n; i++) {
            int64_t row = p->texts[t].row + i;
            if (row < p->row0 || row >= p->row1)
                continue;
            float *at = p->qkv + row * model->qkv_width;
            const float *angles = rope->dim ? p->angles[which] + (int64_t)i * rope->dim : NULL;
            if (model->flags & MP_ARCH_QUERY_NORMS) {
                norm_row(model, &layer->q_norm, model->q_width, at, at);
                norm_row(model, &layer->k_norm, model->kv_width, at + model->q_width, at + model->q_width);
                continue;
            }
            rotate_heads(p, &layer->q_norm, rope, angles, model->heads, at);
            rotate_heads(p, &layer->k_norm, rope, angles, model->kv_heads, at + model->q_width);
        }
}

/* One unit of work is a text and a head. */
static void attend(const pass *p, const mp_encoder_layer *layer) {
    const mp_encoder *model = p->model;
    const int64_t group = model->heads / model->kv_heads;
    int64_t begin, end;
    mp_lane_split(p->lane, (int64_t)p->count * model->heads, 1, &begin, &end);
    for (int64_t unit = begin; unit < end; unit++) {
        const mp_encoder_text *text = &p->texts[unit / model->heads];
        const int64_t head = unit % model->heads;
        const float *row = p->qkv + (int64_t)text->row * model->qkv_width;
        const float *k = row + model->q_width + head / group * model->head_dim;
        mp_attn_full attention = {
            .q = row + head * model->head_dim,
            .k = k,
            .v = k + model->kv_width,
            .ld = model->qkv_width,
            .out = p->mixed + (int64_t)text->row * model->q_width + head * model->head_dim,
            .ld_out = model->q_width,
            .T = text->n,
            .D = model->head_dim,
            .scale = model->scale,
            .causal = model->causal,
            .window = layer->window,
            .ld_bias = -1,
        };
        if (model->position_bias) /* from position 0 less position 0 */
            attention.bias = model->position_bias + head * (2 * (int64_t)model->context - 1) + model->context - 1;
        mp_attn_full_for(model->compute, text->n, model->head_dim)(&attention, 0, text->n, p->lane_scratch);
    }
}

static void finish_text(const mp_encoder *model, mp_encoder_text *text, const float *x, float *scratch) {
    const mp_kernels *call = mp_kernels_get();
    const float *rows = x + (int64_t)text->row * model->hidden;
    int64_t floats = text->dimensions;
    if (text->want_tokens) {
        floats = (int64_t)text->n * model->hidden;
        memcpy(text->out, rows, (size_t)floats * sizeof(float));
    } else {
        mp_head_apply(&model->head, rows, text->n, text->skip, text->dimensions, text->normalize, scratch, text->out);
    }
    text->finite = call->all_finite(text->out, floats);
}

static void linear(const pass *p, const mp_linear *layer, const float *x, int64_t ldx, const mp_epilogue *ep, float *y,
                   int64_t ldy) {
    mp_linear_forward(layer, p->lane, x, ldx, p->M, p->acts, NULL, NULL, ep, y, ldy);
    mp_lane_sync(p->lane);
}

/* A projection's output is added to the residual sum, as it is or normed. x NULL: of the activations in p->inner. */
static void add_output(const pass *p, const mp_linear *layer, const mp_norm *after, const float *x, int64_t ldx) {
    const int32_t n = p->model->hidden;
    const bool norm = after->weight;
    mp_epilogue plain = {0}, residual = {.residual = p->x, .ld_residual = n};
    const mp_epilogue *ep = norm ? &plain : &residual;
    float *y = norm ? p->qkv : p->x;
    const int64_t ldy = norm ? wide(p->model) : n;
    mp_linear_forward(layer, p->lane, x, ldx, p->M, x ? p->acts : p->inner, NULL, NULL, ep, y, ldy);
    mp_lane_sync(p->lane);
    if (!norm)
        return;
    for (int64_t r = p->row0; r < p->row1; r++) {
        float *row = p->qkv + r * wide(p->model);
        norm_row(p->model, after, n, row, row);
        p->call->add(row, n, p->x + r * n);
    }
    mp_lane_sync(p->lane);
}

static void attention_half(const pass *p, const mp_encoder_layer *layer, const float *x) {
    const mp_encoder *model = p->model;
    mp_epilogue plain = {0};
    linear(p, &layer->qkv, x, model->hidden, &plain, p->qkv, model->qkv_width);
    if (model->flags & PLACED) {
        rotate(p, layer);
        mp_lane_sync(p->lane);
    }
    attend(p, layer);
    mp_lane_sync(p->lane);
    add_output(p, &layer->out, &layer->attention_after, p->mixed, model->q_width);
}

/* Experts read all rows while they add to the sum. */
static void experts_half(const pass *p, const mp_encoder_layer *layer, const float *x) {
    const int64_t n = p->model->hidden;
    if (x == p->x)
        memcpy(p->mixed + p->row0 * n, x + p->row0 * n, (size_t)((p->row1 - p->row0) * n) * sizeof(float));
    for (int64_t r = p->row0; r < p->row1 && layer->experts_bias; r++)
        p->call->add(layer->experts_bias, n, p->x + r * n);
    mp_lane_sync(p->lane);
    mp_experts_forward(layer->experts, p->lane, p->mixed, p->M, 1, p->acts, p->lane_scratch, p->x);
}

static void feed_forward_half(const pass *p, const mp_encoder_layer *layer, const float *x) {
    const mp_encoder *model = p->model;
    if (layer->experts) {
        experts_half(p, layer, x);
        return;
    }
    const bool gated = model->flags & MP_ARCH_GATED;
    if (mp_linear_fits(&layer->up, &layer->down)) {
        mp_linear_into(&layer->up, &layer->down, p->lane, x, model->hidden, p->M, p->acts, model->act, p->inner);
        mp_lane_sync(p->lane);
        add_output(p, &layer->down, &layer->ffn_after, NULL, 0);
        return;
    }
    mp_epilogue activate = {.act = gated ? MP_ACT_NONE : model->act};
    linear(p, &layer->up, x, model->hidden, &activate, p->inner, model->up_width);
    if (gated) {
        for (int64_t r = p->row0; r < p->row1; r++) {
            float *gate = p->inner + r * model->up_width;
            p->call->gated(model->act, gate, gate + model->ffn, model->ffn, gate);
        }
        mp_lane_sync(p->lane);
    }
    add_output(p, &layer->down, &layer->ffn_after, p->inner, model->up_width);
}

static void layer_post_norm(const pass *p, const mp_encoder_layer *layer) {
    const int64_t n = p->model->hidden;
    if (p->input)
        memcpy(p->input + p->row0 * n, p->x + p->row0 * n, (size_t)((p->row1 - p->row0) * n) * sizeof(float));
    attention_half(p, layer, p->x);
    norm_rows(p, &layer->attention_norm, p->x, n, p->x, n);
    if (p->input) {
        p->call->add(p->input + p->row0 * n, (p->row1 - p->row0) * n, p->x + p->row0 * n);
        norm_rows(p, &layer->input_norm, p->x, n, p->x, n);
    }
    mp_lane_sync(p->lane);
    feed_forward_half(p, layer, p->x);
    norm_rows(p, &layer->ffn_norm, p->x, n, p->x, n);
    mp_lane_sync(p->lane);
}

/* A layer without a norm (ModernBERT's first: the embeddings are normed) takes the sum as it is. */
static const float *normed(const pass *p, const mp_norm *norm) {
    const int32_t n = p->model->hidden;
    if (!norm->weight)
        return p->x;
    norm_rows(p, norm, p->x, n, p->mixed, n);
    mp_lane_sync(p->lane);
    return p->mixed;
}

static void layer_pre_norm(const pass *p, const mp_encoder_layer *layer) {
    attention_half(p, layer, normed(p, &layer->attention_norm));
    feed_forward_half(p, layer, normed(p, &layer->ffn_norm));
}

static void latent_rows(const pass *p, float *const norm[2]) {
    const mp_latent_attention *latent = &p->model->latent;
    for (int64_t r = p->row0; r < p->row1; r++)
        p->call->layer_norm(p->x + r * latent->hidden, norm[0], norm[1], latent->eps, latent->hidden,
                            p->mixed + r * latent->hidden);
    mp_lane_sync(p->lane);
}

static void look_at_latents(const pass *p) {
    const mp_latent_attention *latent = &p->model->latent;
    const int32_t n = latent->hidden, seen = latent->heads * latent->count, up = 2 * latent->ffn;
    mp_epilogue plain = {0}, residual = {.residual = p->x, .ld_residual = n};
    latent_rows(p, latent->norm);
    linear(p, &latent->scores, p->mixed, n, &plain, p->qkv, seen);
    for (int64_t r = p->row0; r < p->row1; r++)
        for (int h = 0; h < latent->heads; h++) {
            float *weights = p->qkv + r * seen + h * latent->count;
            const float inverse = 1.0f / p->call->softmax(weights, latent->count);
            for (int i = 0; i < latent->count; i++)
                weights[i] *= inverse;
        }
    mp_lane_sync(p->lane);
    linear(p, &latent->values, p->qkv, seen, &residual, p->x, n);
    latent_rows(p, latent->ffn_norm);
    linear(p, &latent->up, p->mixed, n, &plain, p->inner, up);
    for (int64_t r = p->row0; r < p->row1; r++) {
        float *gate = p->inner + r * up;
        p->call->gated(MP_ACT_GELU, gate, gate + latent->ffn, latent->ffn, gate);
    }
    mp_lane_sync(p->lane);
    linear(p, &latent->down, p->inner, up, &residual, p->x, n);
}

int mp_encoder_barriers(const mp_encoder *model) {
    int layer = 7;
    layer += model->flags & PLACED ? 1 : 0;
    layer += model->flags & MP_ARCH_GATED ? 1 : 0;
    layer += model->flags & MP_ARCH_OUTPUT_NORMS ? 2 : 0;
    layer += model->experts ? 6 : 0;
    return layer * model->layer_count + 1 + (model->flags & MP_ARCH_LATENTS ? 8 : 0);
}

void mp_encoder_forward(const mp_encoder *model, const mp_lane *lane, mp_encoder_text *texts, int count, int M,
                        void *group_scratch, void *lane_scratch) {
    uint8_t *at = group_scratch;
    size_t rows = (size_t)M * sizeof(float);
    int longest = 1;
    for (int t = 0; t < count; t++)
        longest = texts[t].n > longest ? texts[t].n : longest;
    pass p = {.model = model,
              .call = mp_kernels_get(),
              .lane = lane,
              .texts = texts,
              .count = count,
              .M = M,
              .lane_scratch = lane_scratch};
    p.x = take(&at, rows * (size_t)model->hidden);
    p.qkv = take(&at, rows * (size_t)wide(model));
    p.mixed = take(&at, rows * (size_t)mixed_width(model));
    p.inner = take(&at, inner_bytes(model, M));
    for (int i = 0; i < 2; i++)
        p.angles[i] = take(&at, rows * (size_t)model->rope[i].dim);
    if (model->flags & MP_ARCH_INPUT_TWICE)
        p.input = take(&at, rows * (size_t)model->hidden);
    p.acts = at;
    mp_lane_split(lane, M, 1, &p.row0, &p.row1);
    embed(&p, longest);
    mp_lane_sync(lane);

    const bool post_norm = model->flags & MP_ARCH_POST_NORM;
    for (int l = 0; l < model->layer_count; l++)
        if (post_norm)
            layer_post_norm(&p, &model->layers[l]);
        else
            layer_pre_norm(&p, &model->layers[l]);
    if (model->output_norm.weight) {
        norm_rows(&p, &model->output_norm, p.x, model->hidden, p.x, model->hidden);
        mp_lane_sync(lane);
    }

    if (model->flags & MP_ARCH_LATENTS)
        look_at_latents(&p);

    int64_t text0, text1;
    mp_lane_split(lane, count, 1, &text0, &text1);
    for (int64_t t = text0; t < text1; t++)
        finish_text(model, &texts[t], p.x, lane_scratch);
    mp_lane_sync(lane);
}
