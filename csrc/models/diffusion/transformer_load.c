/* transformer_load.c: builds the blocks of the transformer. Tensors are named as in the diffusers library. Each part of
 * a fused matrix has a name of its own; the catalogue maps the name to the part's place in the file. */
#include <stdio.h> /* snprintf only */
#include <string.h>

#include "models/diffusion/diffusion.h"

typedef struct matrix {
    const char *name;
    mp_linear *linear;
    int32_t N, K;
} matrix;

static mp_status add_all(const mp_diffusion *model, const mp_builder *builder, const char *prefix, const matrix *list,
                         int count, mp_error *error) {
    char name[MP_BUILDER_NAME];
    for (int i = 0; i < count; i++) {
        snprintf(name, sizeof name, "%s%s", prefix, list[i].name);
        MP_TRY(mp_diff_linear(model, builder, list[i].linear, name, list[i].N, list[i].K, error));
    }
    return MP_OK;
}

static mp_status add_norms(const mp_diffusion *model, const mp_builder *builder, const char *prefix, const char *q,
                           const char *k, mp_norm *q_norm, mp_norm *k_norm, mp_error *error) {
    const mp_norm like = {.n = model->head_dim, .eps = MP_DIFF_EPS, .root = true};
    char name[MP_BUILDER_NAME];
    if (!model->qk_norm)
        return MP_OK;
    snprintf(name, sizeof name, "%sattn%s", prefix, q);
    MP_TRY(mp_norm_read(q_norm, builder, name, like, MP_NORM_NO_BIAS, 0, error));
    snprintf(name, sizeof name, "%sattn%s", prefix, k);
    return mp_norm_read(k_norm, builder, name, like, MP_NORM_NO_BIAS, 0, error);
}

static mp_status build_joint(const mp_diffusion *model, int index, const mp_builder *builder, mp_dit_joint *block,
                             mp_error *error) {
    const int32_t H = model->hidden, F = 4 * H;
    mp_dit_side *p = &block->image, *t = &block->text;
    char prefix[48];
    snprintf(prefix, sizeof prefix, "transformer.joint.%d.", index);
    block->last = !model->flux && index == model->joint_layers - 1;
    block->dual = model->dual && model->dual[index];
    const matrix always[] = {{"norm1.linear", &p->modulation, (block->dual ? 9 : 6) * H, H},
                             {"attn.to_q", &p->qkv, H, H},
                             {"attn.to_k", &p->qkv, H, H},
                             {"attn.to_v", &p->qkv, H, H},
                             {"attn.add_q_proj", &t->qkv, H, H},
                             {"attn.add_k_proj", &t->qkv, H, H},
                             {"attn.add_v_proj", &t->qkv, H, H},
                             {"attn.to_out", &p->out, H, H},
                             {"ff.up", &p->up, F, H},
                             {"ff.down", &p->down, H, F}};
    const matrix keys[] = {{"norm1_context.shift", &t->modulation, H, H},
                           {"norm1_context.scale", &t->modulation, H, H}};
    const matrix texts[] = {{"norm1_context.linear", &t->modulation, 6 * H, H},
                            {"attn.to_add_out", &t->out, H, H},
                            {"ff_context.up", &t->up, F, H},
                            {"ff_context.down", &t->down, H, F}};
    const matrix dual[] = {{"attn2.to_q", &block->qkv2, H, H},
                           {"attn2.to_k", &block->qkv2, H, H},
                           {"attn2.to_v", &block->qkv2, H, H},
                           {"attn2.to_out", &block->out2, H, H}};
    MP_TRY(add_all(model, builder, prefix, always, sizeof always / sizeof *always, error));
    if (block->last)
        MP_TRY(add_all(model, builder, prefix, keys, sizeof keys / sizeof *keys, error));
    else
        MP_TRY(add_all(model, builder, prefix, texts, sizeof texts / sizeof *texts, error));
    if (block->dual) {
        MP_TRY(add_all(model, builder, prefix, dual, sizeof dual / sizeof *dual, error));
        MP_TRY(add_norms(model, builder, prefix, "2.norm_q", "2.norm_k", &block->q_norm2, &block->k_norm2, error));
    }
    MP_TRY(add_norms(model, builder, prefix, ".norm_q", ".norm_k", &p->q_norm, &p->k_norm, error));
    return add_norms(model, builder, prefix, ".norm_added_q", ".norm_added_k", &t->q_norm, &t->k_norm, error);
}

static mp_status build_single(const mp_diffusion *model, int index, const mp_builder *builder, mp_dit_single *block,
                              mp_error *error) {
    const int32_t H = model->hidden, F = 4 * H;
    char prefix[48];
    snprintf(prefix, sizeof prefix, "transformer.single.%d.", index);
    const matrix list[] = {{"norm.linear", &block->modulation, 3 * H, H},
                           {"attn.to_q", &block->qkv, H, H},
                           {"attn.to_k", &block->qkv, H, H},
                           {"attn.to_v", &block->qkv, H, H},
                           {"proj_mlp", &block->up, F, H},
                           {"proj_out", &block->out, H, H + F}};
    MP_TRY(add_all(model, builder, prefix, list, sizeof list / sizeof *list, error));
    return add_norms(model, builder, prefix, ".norm_q", ".norm_k", &block->q_norm, &block->k_norm, error);
}

static mp_status build_ends(const mp_diffusion *model, const mp_builder *builder, mp_dit_ends *ends, mp_error *error) {
    const int32_t H = model->hidden, patch = MP_DIFF_PATCH * MP_DIFF_PATCH * model->channels;
    const matrix list[] = {{"x_embedder", &ends->rows, H, patch},
                           {"context_embedder", &ends->texts, H, model->text_width},
                           {"time.0", &ends->time[0], H, MP_DIFF_WAVES},
                           {"time.1", &ends->time[1], H, H},
                           {"pooled.0", &ends->pooled[0], H, model->pooled_width},
                           {"pooled.1", &ends->pooled[1], H, H},
                           {"norm_out.shift", &ends->modulation, H, H},
                           {"norm_out.scale", &ends->modulation, H, H},
                           {"proj_out", &ends->velocity, patch, H}};
    const matrix guidance[] = {{"guidance.0", &ends->guidance[0], H, MP_DIFF_WAVES},
                               {"guidance.1", &ends->guidance[1], H, H}};
    MP_TRY(add_all(model, builder, "transformer.", list, sizeof list / sizeof *list, error));
    return model->guidance ? add_all(model, builder, "transformer.", guidance, 2, error) : MP_OK;
}

mp_status mp_dit_build(const mp_diffusion *model, int index, const mp_builder *builder, mp_diff_block *block,
                       mp_error *error) {
    if (index == 0)
        return build_ends(model, builder, &block->as.ends, error);
    if (index <= model->joint_layers)
        return build_joint(model, index - 1, builder, &block->as.joint, error);
    return build_single(model, index - 1 - model->joint_layers, builder, &block->as.single, error);
}
