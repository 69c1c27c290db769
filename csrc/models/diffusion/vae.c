/* vae.c: the decoder from latents to pixels. Images are rows of pixels. The convolution upsamples while it reads, so an
 * upsampled image is never stored. */
#include <math.h>
#include <stdio.h> /* snprintf only */
#include <string.h>

#include "models/diffusion/diffusion.h"
#include "models/nn/scratch.h"

static const float EPS = 1e-6f;

static size_t vae_floats(int64_t rows, int64_t n) { return mp_arena_cost((size_t)(rows * n) * sizeof(float)); }

mp_status mp_vae_build(const mp_diffusion *model, int index, const mp_builder *builder, mp_diff_block *block,
                       mp_error *error) {
    const mp_vae_op *op = &model->ops[index];
    mp_vae_block *b = &block->as.vae;
    char name[MP_BUILDER_NAME];
    const int32_t groups = model->group_count;
    switch (op->kind) {
    case MP_VAE_CONV:
        return mp_conv_build(&b->conv[0], builder, op->name, op->in, op->out, 3, error);
    case MP_VAE_RESIDUAL:
        for (int i = 0; i < 2; i++) {
            int32_t in = i == 0 ? op->in : op->out;
            snprintf(name, sizeof name, "%s.norm%d", op->name, i + 1);
            MP_TRY(mp_group_norm_build(&b->norm[i], builder, name, in, groups, EPS, error));
            snprintf(name, sizeof name, "%s.conv%d", op->name, i + 1);
            MP_TRY(mp_conv_build(&b->conv[i], builder, name, in, op->out, 3, error));
        }
        if (op->in == op->out)
            return MP_OK;
        snprintf(name, sizeof name, "%s.conv_shortcut", op->name);
        return mp_conv_build(&b->shortcut, builder, name, op->in, op->out, 1, error);
    case MP_VAE_ATTENTION:
        snprintf(name, sizeof name, "%s.group_norm", op->name);
        MP_TRY(mp_group_norm_build(&b->norm[0], builder, name, op->in, groups, EPS, error));
        for (int i = 0; i < 3; i++) {
            snprintf(name, sizeof name, "%s.to_%c", op->name, "qkv"[i]);
            MP_TRY(mp_diff_linear(model, builder, &b->qkv, name, op->in, op->in, error));
        }
        snprintf(name, sizeof name, "%s.to_out", op->name);
        return mp_diff_linear(model, builder, &b->out, name, op->in, op->in, error);
    case MP_VAE_END:
        snprintf(name, sizeof name, "%s.conv_norm_out", op->name);
        MP_TRY(mp_group_norm_build(&b->norm[0], builder, name, op->in, groups, EPS, error));
        snprintf(name, sizeof name, "%s.conv_out", op->name);
        return mp_conv_build(&b->conv[0], builder, name, op->in, op->out, 3, error);
    }
    return mp_fail(error, MP_INTERNAL, "a decoder op has an unknown kind");
}

/* Maximum floats per pixel that an op needs in any of the images x, a and b. */
static int32_t vae_widest(const mp_vae_op *op) {
    return op->kind == MP_VAE_ATTENTION ? 3 * op->in : op->in > op->out ? op->in : op->out;
}

uint64_t mp_vae_floats(const mp_diffusion *model, int32_t height, int32_t width) {
    uint64_t top = 0, pixels = (uint64_t)height * (uint64_t)width;
    for (int i = 0; i < model->op_count; i++) {
        const mp_vae_op *op = &model->ops[i];
        if (op->doubled)
            pixels *= 4;
        uint64_t need = pixels * (uint64_t)(op->doubled ? op->out : vae_widest(op));
        top = need > top ? need : top;
    }
    return top;
}

/* ---- scratch: the same layout for sizing and for use ------------------------------------------------------------- */

typedef struct buffers { /* mp_diff_run.shared */
    float *scale, *mean, *sums; /* group norm: [widest], [widest], [blocks, widest] */
    void *acts;                 /* prepared activations of the attention's products */
} buffers;

static buffers lay_out(const mp_vae_op *op, int64_t pixels, uint8_t *at) {
    const int32_t n = vae_widest(op);
    buffers r;
    r.scale = mp_scratch_take(&at, vae_floats(1, n));
    r.mean = mp_scratch_take(&at, vae_floats(1, n));
    r.sums = mp_scratch_take(&at, vae_floats(mp_group_norm_blocks(pixels), n));
    r.acts = at;
    return r;
}

size_t mp_vae_scratch(const mp_diffusion *model, const mp_diff_block *block, int index, int64_t pixels) {
    const mp_vae_op *op = &model->ops[index];
    uint8_t *const start = (uint8_t *)64; /* any aligned address: only differences count */
    size_t norm = (size_t)((uint8_t *)lay_out(op, pixels, start).acts - start), products = 0;
    if (op->kind == MP_VAE_ATTENTION)
        products = mp_larger(mp_diff_linear_scratch(&block->as.vae.qkv, pixels),
                             mp_diff_linear_scratch(&block->as.vae.out, pixels));
    return norm + mp_arena_cost(products);
}

size_t mp_vae_own(const mp_diffusion *model, const mp_diff_block *block, int index, int64_t pixels) {
    const mp_vae_op *op = &model->ops[index];
    const mp_vae_block *b = &block->as.vae;
    if (op->kind == MP_VAE_ATTENTION)
        return mp_attn_full_scratch((int)pixels, op->in);
    const size_t bytes = mp_conv_scratch(&b->conv[0]); /* a shortcut has the same inputs and a ninth of the weights */
    return op->kind == MP_VAE_RESIDUAL ? mp_larger(bytes, mp_conv_scratch(&b->conv[1])) : bytes;
}

static bool convolve(mp_diff_thread *l, const mp_conv *conv, const float *x, int height, int width, bool doubled,
                     const float *residual, float *y) {
    mp_team_loop loop = mp_team_shared((int64_t)height * width, MP_CONV_ROWS);
    while (mp_team_next(l->thread, &loop))
        for (int64_t row = loop.begin; row < loop.end && !mp_diff_poll(l); row += MP_CONV_ROWS)
            mp_conv_forward(conv, x, height, width, doubled, row,
                            row + MP_CONV_ROWS < loop.end ? row + MP_CONV_ROWS : loop.end, residual, y, l->own);
    return mp_diff_barrier(l);
}

static bool normalise(mp_diff_thread *l, const buffers *r, const mp_group_norm *norm, const float *x, int64_t rows,
                      mp_act act, float *y) {
    const int32_t n = norm->channels;
    const int64_t blocks = mp_group_norm_blocks(rows);
    float *sums = r->sums, *mean = r->mean, *scale = r->scale;
    for (int pass = 0; pass < 2; pass++) {
        mp_team_loop loop = mp_team_rows(l->thread, blocks, (int64_t)MP_GROUP_NORM_ROWS * n);
        while (mp_team_next(l->thread, &loop))
            for (int64_t b = loop.begin; b < loop.end; b++)
                mp_group_norm_sums(norm, x, rows, b, pass ? mean : NULL, sums + b * n);
        if (!mp_diff_barrier(l))
            return false;
        if (l->thread->index == 0 && pass == 0)
            mp_group_norm_mean(norm, sums, rows, mean);
        else if (l->thread->index == 0)
            mp_group_norm_scale(norm, sums, rows, scale);
        if (!mp_diff_barrier(l))
            return false;
    }
    mp_team_loop loop = mp_team_rows(l->thread, rows, n);
    while (mp_team_next(l->thread, &loop))
        for (int64_t row = loop.begin; row < loop.end; row++)
            mp_kernels_get()->affine(x + row * n, mean, scale, norm->bias, act, n, y + row * n);
    return mp_diff_barrier(l);
}

static void swap(float **a, float **b) {
    float *kept = *a;
    *a = *b;
    *b = kept;
}

/* Writes the result to a. */
static bool vae_residual(mp_diff_thread *l, const mp_vae_op *op, const mp_vae_block *block, const mp_vae_image *image,
                         float *x, float *a, float *b) {
    const int height = image->height, width = image->width;
    const int64_t rows = (int64_t)height * width;
    const bool same = op->in == op->out;
    const buffers r = lay_out(op, rows, l->run->shared);
    if (!normalise(l, &r, &block->norm[0], x, rows, MP_ACT_SILU, a) ||
        !convolve(l, &block->conv[0], a, height, width, false, NULL, b) ||
        !normalise(l, &r, &block->norm[1], b, rows, MP_ACT_SILU, b) ||
        !convolve(l, &block->conv[1], b, height, width, false, same ? x : NULL, a))
        return false;
    return same || convolve(l, &block->shortcut, x, height, width, false, a, a);
}

static bool vae_attention(mp_diff_thread *l, const mp_vae_op *op, const mp_vae_block *block, const mp_vae_image *image,
                          float *x, float *a, float *b) {
    const int64_t rows = (int64_t)image->height * image->width, n = op->in;
    const mp_epilogue sum = {.residual = x, .ld_residual = n};
    const mp_attention head = {.heads = 1, .kv_heads = 1, .head_dim = op->in, .scale = 1 / sqrtf((float)n)};
    const mp_attention_rows qkv = {.q = b, .k = b + n, .v = b + 2 * n, .ld = 3 * n, .out = a, .ld_out = n};
    const buffers r = lay_out(op, rows, l->run->shared);
    return normalise(l, &r, &block->norm[0], x, rows, MP_ACT_NONE, a) &&
           mp_diff_forward(l, &block->qkv, a, n, rows, NULL, r.acts, b, 3 * n) &&
           mp_diff_attend(l, &head, &qkv, (int)rows) &&
           mp_diff_forward(l, &block->out, a, n, rows, &sum, r.acts, x, n);
}

bool mp_vae_forward(mp_diff_thread *l, const mp_diffusion *model, const mp_diff_block *block, int index,
                    mp_vae_image *image) {
    const mp_vae_op *op = &model->ops[index];
    const mp_vae_block *weights = &block->as.vae;
    float *x = image->x, *a = image->a, *b = image->b;
    int32_t height = image->height << op->doubled, width = image->width << op->doubled;
    bool done = false, in_a = true;
    buffers r;
    switch (op->kind) {
    case MP_VAE_CONV:
        done = convolve(l, &weights->conv[0], x, height, width, op->doubled, NULL, a);
        break;
    case MP_VAE_RESIDUAL:
        done = vae_residual(l, op, weights, image, x, a, b);
        break;
    case MP_VAE_ATTENTION:
        done = vae_attention(l, op, weights, image, x, a, b);
        in_a = false;
        break;
    case MP_VAE_END:
        r = lay_out(op, (int64_t)height * width, l->run->shared);
        done = normalise(l, &r, &weights->norm[0], x, (int64_t)height * width, MP_ACT_SILU, b) &&
               convolve(l, &weights->conv[0], b, height, width, false, NULL, a);
        break;
    }
    if (!done)
        return false;
    if (l->thread->index == 0) {
        if (in_a)
            swap(&image->x, &image->a);
        image->height = height;
        image->width = width;
    }
    return mp_diff_barrier(l);
}
