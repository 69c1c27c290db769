/* diffusion/text.c: the text encoders of CLIP and T5. An encoder computes one text at a time, with layers of
 * nn/transformer.h. */
#include <math.h>
#include <stdio.h> /* snprintf only */
#include <string.h>

#include "models/diffusion/diffusion.h"
#include "models/nn/scratch.h"

/* ---- loading ----------------------------------------------------------------------------------------------------- */

typedef struct text_names { /* names of tensors, relative to the stage's name */
    const char *layers, *q, *k, *v, *out, *gate, *up, *down, *attention_norm, *ffn_norm; /* gate NULL: not gated */
} text_names;

static const text_names clip_names = {"layers",   "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                      "self_attn.out_proj", NULL, "mlp.fc1", "mlp.fc2", "layer_norm1", "layer_norm2"};
static const text_names t5_names = {"block",    "attn.q",   "attn.k", "attn.v",    "attn.o",
                                    "ffn.wi_0", "ffn.wi_1", "ffn.wo", "attn_norm", "ffn_norm"};

static mp_status read_norm(const mp_diff_encoder *e, const mp_builder *builder, const char *prefix, const char *name,
                           mp_norm *norm, mp_error *error) {
    const mp_norm like = {.n = e->hidden, .eps = e->eps, .root = e->t5};
    char full[MP_BUILDER_NAME];
    snprintf(full, sizeof full, "%s.%s", prefix, name);
    return mp_norm_read(norm, builder, full, like, e->t5 ? MP_NORM_NO_BIAS : MP_NORM_BIAS, 0, error);
}

static mp_status build_end(const mp_diffusion *model, const mp_diff_encoder *e, const char *stage,
                           const mp_builder *builder, mp_text_end *end, mp_error *error) {
    char name[MP_BUILDER_NAME];
    MP_TRY(read_norm(e, builder, stage, "final_layer_norm", &end->norm, error));
    if (e->projection == 0)
        return MP_OK;
    snprintf(name, sizeof name, "%s.text_projection", stage);
    return mp_diff_linear(model, builder, &end->projection, name, e->projection, e->hidden, error);
}

mp_status mp_text_build(const mp_diffusion *model, int which, int index, const mp_builder *builder,
                        mp_diff_block *block, mp_error *error) {
    const mp_diff_encoder *e = &model->encoder[which];
    const char *stage = mp_diff_stage_name(which);
    if (index == e->layers)
        return build_end(model, e, stage, builder, &block->as.text_end, error);
    mp_transformer_layer *layer = &block->as.text;
    const text_names *names = e->t5 ? &t5_names : &clip_names;
    const int32_t width = mp_diff_text_width(e);
    const struct {
        const char *name;
        mp_linear *linear;
        int32_t N, K;
    } linears[] = {{names->q, &layer->qkv, width, e->hidden},     {names->k, &layer->qkv, width, e->hidden},
                   {names->v, &layer->qkv, width, e->hidden},     {names->out, &layer->out, e->hidden, width},
                   {names->gate, &layer->ffn.mlp.up, e->ffn, e->hidden},
                   {names->up, &layer->ffn.mlp.up, e->ffn, e->hidden},
                   {names->down, &layer->ffn.mlp.down, e->hidden, e->ffn}};
    char prefix[MP_BUILDER_NAME / 2], name[MP_BUILDER_NAME];
    layer->ffn.ops = &mp_ffn_dense;
    layer->ffn.mlp.ffn = e->ffn;
    layer->ffn.mlp.gated = e->t5;
    layer->ffn.mlp.act = e->act;
    snprintf(prefix, sizeof prefix, "%s.%s.%d", stage, names->layers, index);
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++) {
        if (!linears[i].name)
            continue;
        snprintf(name, sizeof name, "%s.%s", prefix, linears[i].name);
        MP_TRY(mp_diff_linear(model, builder, linears[i].linear, name, linears[i].N, linears[i].K, error));
    }
    MP_TRY(read_norm(e, builder, prefix, names->attention_norm, &layer->attention_norm, error));
    return read_norm(e, builder, prefix, names->ffn_norm, &layer->ffn_norm, error);
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

static size_t text_floats(int64_t rows, int64_t n) { return (size_t)(rows * n) * sizeof(float); }

static int32_t range_rows(int32_t T) { return T < MP_DIFF_ROWS ? T : MP_DIFF_ROWS; }

static mp_block_needs needs_of(const mp_transformer_layer *layer, int32_t T) {
    mp_block_needs needs = {0};
    mp_transformer_needs(layer, range_rows(T), &needs);
    return needs;
}

/* Lay out the layer's shared scratch from *at on. Afterwards *at points to the memory for prepared activations. */
static mp_transformer_rows lay_out(const mp_diff_encoder *e, const mp_transformer_layer *layer, int32_t T, float *x,
                                   uint8_t **at) {
    const int32_t width = mp_diff_text_width(e), mixed = width > e->hidden ? width : e->hidden;
    mp_transformer_rows rows = {.M = T, .hidden = e->hidden, .x = x, .ld_mixed = mixed, .ld_qkv = 3 * (int64_t)width};
    rows.mixed = mp_scratch_take(at, text_floats(T, mixed));
    rows.qkv = mp_scratch_take(at, text_floats(T, 3 * (int64_t)width));
    rows.inner = mp_scratch_take(at, needs_of(layer, T).shared);
    return rows;
}

size_t mp_diff_text_scratch(const mp_diffusion *model, int which, const mp_diff_block *block, int index, int32_t T) {
    const mp_diff_encoder *e = &model->encoder[which];
    if (index == e->layers)
        return e->t5 ? 0
                     : mp_arena_cost(text_floats(1, e->hidden)) +
                           mp_diff_linear_scratch(&block->as.text_end.projection, 1);
    uint8_t *const start = (uint8_t *)64, *at = start; /* any aligned address: only differences count */
    lay_out(e, &block->as.text, T, NULL, &at);
    return (size_t)(at - start) + mp_arena_cost(needs_of(&block->as.text, T).acts);
}

size_t mp_diff_text_own(const mp_diffusion *model, int which, int32_t T) {
    const mp_diff_encoder *e = &model->encoder[which];
    return mp_larger(mp_attention_scratch(&e->attention, T), text_floats(1, e->hidden));
}

mp_status mp_diff_text_begin(mp_diff_text *text, mp_error *error) {
    const mp_diff_encoder *e = text->encoder;
    text->attention = e->attention;
    if (!e->t5)
        return MP_OK;
    text->attention.bias = text->bias;
    text->attention.bias_length = text->T;
    return mp_attention_bias_learned(&e->relative, e->attention.heads, text->T, e->reach, text->bias, error);
}

static bool embed(mp_diff_thread *l, const mp_diff_text *text) {
    const mp_diff_encoder *e = text->encoder;
    int64_t from, to;
    mp_team_split(l->thread, text->T, 1, &from, &to);
    for (int64_t t = from; t < to; t++)
        mp_embedding_row(&e->embedding, text->ids[t], (int32_t)t, 0, 0, (float *)l->own, text->x + t * e->hidden);
    return mp_diff_barrier(l);
}

static bool run_layer(mp_diff_thread *l, const mp_diff_text *text, const mp_transformer_layer *layer) {
    uint8_t *at = l->run->shared;
    const mp_transformer_rows rows = lay_out(text->encoder, layer, text->T, text->x, &at);
    const mp_row_span span = {.rows = text->T};
    const mp_row_context context = mp_diff_context(l, &span, at);
    return mp_transformer_forward(&context, layer, &text->attention, &rows, MP_DIFF_ROWS,
                                  mp_diff_attention_rows(&text->attention, text->T), l->own);
}

static int32_t pooled_row(const mp_diff_text *text) {
    int32_t best = 0;
    for (int32_t t = 0; t < text->T; t++) {
        if (text->encoder->end < 0 ? text->ids[t] > text->ids[best] : text->ids[t] == text->encoder->end)
            best = t;
        if (text->encoder->end >= 0 && text->ids[t] == text->encoder->end)
            break;
    }
    return best;
}

/* CLIP: norm and project the pooled row. */
static bool text_pool(mp_diff_thread *l, const mp_diff_text *text, const mp_text_end *end) {
    const mp_diff_encoder *e = text->encoder;
    uint8_t *at = l->run->shared;
    float *normed = mp_scratch_take(&at, text_floats(1, e->hidden));
    if (l->thread->index == 0)
        mp_norm_row(&end->norm, text->x + (int64_t)pooled_row(text) * e->hidden,
                    e->projection ? normed : text->pooled);
    if (!mp_diff_barrier(l))
        return false;
    return !e->projection ||
           mp_diff_forward(l, &end->projection, normed, e->hidden, 1, NULL, at, text->pooled, e->projection);
}

bool mp_diff_text_forward(mp_diff_thread *l, const mp_diff_text *text, const mp_diff_block *block, int index) {
    const mp_diff_encoder *e = text->encoder;
    if (index == 0 && !embed(l, text))
        return false;
    if (index == e->layers && !e->t5)
        return text_pool(l, text, &block->as.text_end);
    if (index == e->layers) {
        mp_norm_rows(&block->as.text_end.norm, l->thread, text->T, text->x, e->hidden, text->x, e->hidden);
        return mp_diff_barrier(l);
    }
    /* save x: the last layer overwrites it after barriers, which thread 0 reaches later */
    if (!e->t5 && index == e->layers - 1 && l->thread->index == 0)
        memcpy(text->before, text->x, text_floats(text->T, e->hidden));
    return run_layer(l, text, &block->as.text);
}
