/* transformer.c: the transformer that predicts the velocity of the latents. Text rows and image rows attend to each
 * other: in joint blocks with separate weights, in single blocks (flux) with shared weights. */
#include <math.h>
#include <string.h>

#include "models/diffusion/diffusion.h"
#include "models/nn/scratch.h"

static const float EPS = MP_DIFF_EPS;

static size_t transformer_floats(int64_t rows, int64_t n) { return mp_arena_cost((size_t)(rows * n) * sizeof(float)); }

static int64_t transformer_chunk(int64_t rows) { return rows < MP_DIFF_ROWS ? rows : MP_DIFF_ROWS; }

static int64_t image_rows(const mp_dit_pass *pass) { return (int64_t)pass->grid_height * pass->grid_width; }

double mp_diff_gflop(const mp_diffusion *model, int64_t text_rows, int64_t rows) {
    const double H = model->hidden, T = (double)(text_rows + rows);
    double joint = 24 * H * H * T + 4 * H * T * T, single = 24 * H * H * T + 4 * H * T * T;
    return (model->joint_layers * joint + model->single_layers * single) * 1e-9;
}

/* ---- scratch: the same layout for sizing and for use ------------------------------------------------------------- */

typedef struct buffers {
    float *modulation, *modulation2; /* text: [6 hidden]; image: [9 hidden], or the sinusoidal embeddings of time and
                                      * guidance */
    float *normed, *normed2;         /* [all rows, hidden] */
    float *qkv;                      /* [all rows, 3 hidden] */
    float *inner;                    /* [chunk, 5 hidden] */
    float *rows;                     /* [2][chunk, hidden] */
    void *acts;
} buffers;

static void lay_out(const mp_diffusion *model, int64_t all, uint8_t *at, buffers *r) {
    const int64_t H = model->hidden;
    r->modulation = mp_scratch_take(&at, transformer_floats(6, H));
    r->modulation2 = mp_scratch_take(&at, mp_larger(transformer_floats(9, H), transformer_floats(2, MP_DIFF_WAVES)));
    r->normed = mp_scratch_take(&at, transformer_floats(all, H));
    r->normed2 = mp_scratch_take(&at, transformer_floats(all, H));
    r->qkv = mp_scratch_take(&at, transformer_floats(all, 3 * H));
    r->inner = mp_scratch_take(&at, transformer_floats(transformer_chunk(all), 5 * H));
    r->rows = mp_scratch_take(&at, transformer_floats(2 * transformer_chunk(all), H));
    r->acts = at;
}

size_t mp_dit_scratch(const mp_diffusion *model, const mp_diff_block *ends, const mp_diff_block *block, int index,
                      int64_t text_rows, int64_t image_rows) {
    buffers r;
    const int64_t all = text_rows + image_rows;
    uint8_t *const start = (uint8_t *)64; /* any aligned address: only differences count */
    lay_out(model, all, start, &r);
    size_t fixed = (size_t)((uint8_t *)r.acts - start), acts = 0;
    const mp_linear *list[16];
    int count = 0;
    const mp_dit_ends *e = &ends->as.ends;
    const mp_linear *outer[] = {&e->rows, &e->texts, &e->velocity, &e->modulation, &e->time[0], &e->time[1],
                                &e->pooled[0], &e->pooled[1]};
    memcpy(list, outer, sizeof outer);
    count = sizeof outer / sizeof *outer;
    if (index > 0 && index <= model->joint_layers) {
        const mp_dit_joint *b = &block->as.joint;
        const mp_linear *joint[] = {&b->text.qkv,  &b->text.out,  &b->text.up,         &b->text.down,
                                    &b->image.qkv, &b->image.out, &b->image.up,        &b->image.down,
                                    &b->qkv2,      &b->out2,      &b->text.modulation, &b->image.modulation};
        memcpy(list, joint, sizeof joint);
        count = sizeof joint / sizeof *joint;
    } else if (index > model->joint_layers) {
        const mp_dit_single *b = &block->as.single;
        const mp_linear *single[] = {&b->qkv, &b->up, &b->out, &b->modulation};
        memcpy(list, single, sizeof single);
        count = sizeof single / sizeof *single;
    }
    for (int i = 0; i < count; i++)
        acts = mp_larger(acts, mp_diff_linear_scratch(list[i], all));
    return fixed + mp_arena_cost(acts);
}

size_t mp_dit_own(const mp_diffusion *model, int64_t rows) {
    return mp_larger(mp_arena_cost(mp_attn_full_scratch((int)rows, model->head_dim)),
                     transformer_floats(2, model->hidden));
}

/* ---- positions and times ----------------------------------------------------------------------------------------- */

/* An angle is row or column index times 10000^(-2i / dim). Text rows have position 0. */
void mp_dit_angles(const mp_diffusion *model, mp_dit_pass *pass) {
    const int64_t half = model->head_dim / 2, rows = image_rows(pass);
    for (int64_t row = 0; row < pass->text_rows + rows; row++) {
        float *to = pass->angles + row * 2 * half;
        const int64_t at = row - pass->text_rows;
        const double place[MP_DIFF_AXES] = {0, at < 0 ? 0 : (double)(at / pass->grid_width),
                                            at < 0 ? 0 : (double)(at % pass->grid_width)};
        for (int axis = 0; axis < MP_DIFF_AXES; axis++)
            for (int i = 0; i < model->axes[axis] / 2; i++, to += 2) {
                double angle = place[axis] * pow(10000.0, -2.0 * i / model->axes[axis]);
                to[0] = (float)cos(angle);
                to[1] = (float)sin(angle);
            }
    }
}

static void waves(float time, float *out) {
    const int half = MP_DIFF_WAVES / 2;
    for (int i = 0; i < half; i++) {
        float angle = time * expf(-9.210340371976184f * (float)i / (float)half);
        out[i] = cosf(angle);
        out[half + i] = sinf(angle);
    }
}

/* out [hidden] = plus + W1 silu(W0 in), with biases. */
static bool project(mp_diff_thread *l, const mp_linear layer[2], const float *in, const float *plus, buffers *r,
                    float *out) {
    const int32_t H = layer[0].N;
    const mp_epilogue silu = {.act = MP_ACT_SILU}, sum = {.residual = plus, .ld_residual = H};
    return mp_diff_forward(l, &layer[0], in, layer[0].K, 1, &silu, r->acts, r->modulation, H) &&
           mp_diff_forward(l, &layer[1], r->modulation, H, 1, plus ? &sum : NULL, r->acts, out, H);
}

static bool condition(mp_diff_thread *l, const mp_diffusion *model, const mp_dit_ends *ends, const mp_dit_pass *pass,
                      buffers *r) {
    const int32_t H = model->hidden;
    float *wave = r->modulation2, *sum = pass->condition;
    float *guide = wave + MP_DIFF_WAVES;
    if (l->thread->index == 0) {
        waves(pass->time, wave);
        waves(pass->guidance, guide);
    }
    if (!mp_diff_barrier(l) || !project(l, ends->time, wave, NULL, r, sum) ||
        (model->guidance && !project(l, ends->guidance, guide, sum, r, sum)) ||
        !project(l, ends->pooled, pass->pooled, sum, r, sum))
        return false;
    if (l->thread->index == 0)
        mp_kernels_get()->activate(MP_ACT_SILU, H, sum);
    return mp_diff_barrier(l);
}

bool mp_dit_begin(mp_diff_thread *l, const mp_diffusion *model, const mp_dit_ends *ends, const mp_dit_pass *pass) {
    const int32_t H = model->hidden, patch = ends->rows.K;
    const int64_t rows = image_rows(pass);
    float *image = pass->h + (int64_t)pass->text_rows * H;
    buffers r;
    lay_out(model, pass->text_rows + rows, l->run->shared, &r);
    if (!condition(l, model, ends, pass, &r) ||
        !mp_diff_forward(l, &ends->texts, pass->texts, model->text_width, pass->text_rows, NULL, r.acts, pass->h, H) ||
        !mp_diff_forward(l, &ends->rows, pass->latents, patch, rows, NULL, r.acts, image, H))
        return false;
    if (!model->position_side)
        return true;
    const int64_t top = (model->position_side - pass->grid_height) / 2;
    const int64_t left = (model->position_side - pass->grid_width) / 2;
    int64_t from, to;
    mp_team_split(l->thread, rows, 1, &from, &to);
    for (int64_t row = from; row < to; row++) {
        int64_t at = (top + row / pass->grid_width) * model->position_side + left + row % pass->grid_width;
        mp_dequantize_row(model->positions.dtype, mp_tensor_row(&model->positions, at), H, (float *)l->own);
        mp_kernels_get()->add((const float *)l->own, H, image + row * H);
    }
    return mp_diff_barrier(l);
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* Compute a block's modulation and add 1 to its scales. group 3: (shift, scale, gate), so every third vector from the
 * second on. group 2: (shift, scale), so every second. */
static bool modulate(mp_diff_thread *l, const mp_linear *linear, const mp_dit_pass *pass, int32_t H, int group,
                     void *acts, float *out) {
    if (!mp_diff_forward(l, linear, pass->condition, H, 1, NULL, acts, out, linear->N))
        return false;
    int64_t from, to;
    mp_team_split(l->thread, H, 16, &from, &to);
    for (int32_t part = 1; part < linear->N / H; part += group)
        for (int64_t i = from; i < to; i++)
            out[(int64_t)part * H + i] += 1;
    return mp_diff_barrier(l);
}

/* Norm and rotate queries and keys in place in qkv [rows, 3 hidden], head by head. No barrier. */
static void rotate_heads(mp_diff_thread *l, const mp_diffusion *model, const mp_norm *q_norm, const mp_norm *k_norm,
                         const float *angles, int64_t rows, float *qkv) {
    const int32_t H = model->hidden, D = model->head_dim;
    const mp_rope rope = {.dim = D};
    mp_team_loop loop = mp_team_rows(l->thread, rows, 2 * (int64_t)H);
    while (mp_team_next(l->thread, &loop))
        for (int64_t row = loop.begin; row < loop.end; row++)
            for (int part = 0; part < 2; part++)
                mp_attention_place(part ? k_norm : q_norm, angles ? &rope : NULL, angles ? angles + row * D : NULL, 0,
                                   model->heads, D, qkv + row * 3 * H + part * H);
}

static bool attend(mp_diff_thread *l, const mp_diffusion *model, const float *qkv, int64_t rows, float *out) {
    const int32_t H = model->hidden;
    const mp_attention shape = {.heads = model->heads,
                                .kv_heads = model->heads,
                                .head_dim = model->head_dim,
                                .compute = mp_resolve_compute(model->compute),
                                .scale = 1 / sqrtf((float)model->head_dim)};
    const mp_attention_rows heads = {
        .q = qkv, .k = qkv + H, .v = qkv + 2 * H, .ld = 3 * (int64_t)H, .out = out, .ld_out = H};
    return mp_diff_barrier(l) && mp_diff_attend(l, &shape, &heads, (int)rows);
}

/* h += gate * out(gelu(up(normed))) for M rows. With `first`, out takes [first, gelu(...)] concatenated. */
static bool add_mlp(mp_diff_thread *l, const mp_linear *up, const mp_linear *out, const float *first,
                    const float *normed, int32_t H, int64_t M, const float *gate, buffers *r, float *h) {
    const mp_epilogue gelu = {.act = MP_ACT_GELU_TANH};
    const int64_t width = out->K;
    const bool fits = mp_linear_fits(up, out);
    for (int64_t row = 0; row < M; row += MP_DIFF_ROWS, normed += MP_DIFF_ROWS * (int64_t)H) {
        const int64_t rows = transformer_chunk(M - row);
        if (first && fits)
            mp_linear_lead(out, l->thread, first + row * H, H, H, (int)rows, r->inner);
        mp_team_loop loop = mp_team_rows(l->thread, first && !fits ? rows : 0, H);
        while (mp_team_next(l->thread, &loop))
            for (int64_t i = loop.begin; i < loop.end; i++)
                memcpy(r->inner + i * width, first + (row + i) * H, (size_t)H * sizeof(float));
        if (fits)
            mp_linear_into(up, out, l->thread, normed, H, (int)rows, r->acts, gelu.act, r->inner);
        if (fits ? !mp_diff_barrier(l)
                 : !mp_diff_forward(l, up, normed, H, rows, &gelu, r->acts, r->inner + width - up->N, width))
            return false;
        /* the next rows overwrite `inner` and `acts`, which were read before the last barrier, and `rows` after their
         * first one */
        if (!mp_diff_add_gated(l, out, fits ? NULL : r->inner, width, rows, gate, fits ? r->inner : r->acts, r->rows,
                               h + row * H))
            return false;
    }
    return true;
}

/* h += gate * MLP(modulated norm(h)). */
static bool transformer_mlp(mp_diff_thread *l, const mp_dit_side *side, int32_t H, int64_t M, const float *modulation,
                            buffers *r, float *normed, float *h) {
    return mp_diff_layer_norm(l, h, M, H, modulation + 4 * (int64_t)H, modulation + 3 * (int64_t)H, EPS, normed) &&
           add_mlp(l, &side->up, &side->down, NULL, normed, H, M, modulation + 5 * (int64_t)H, r, h);
}

/* Compute the queries, keys and values of one kind of rows. */
static bool project_qkv(mp_diff_thread *l, const mp_diffusion *model, const mp_dit_side *side, const float *modulation,
                        const float *h, int64_t M, const float *angles, buffers *r, float *normed, float *qkv) {
    const int32_t H = model->hidden;
    if (!mp_diff_layer_norm(l, h, M, H, modulation + H, modulation, EPS, normed) ||
        !mp_diff_forward(l, &side->qkv, normed, H, M, NULL, r->acts, qkv, 3 * (int64_t)H))
        return false;
    rotate_heads(l, model, &side->q_norm, &side->k_norm, angles, M, qkv);
    return true;
}

bool mp_dit_joint_forward(mp_diff_thread *l, const mp_diffusion *model, const mp_dit_joint *block,
                          const mp_dit_pass *pass) {
    const int32_t H = model->hidden;
    const int64_t L = pass->text_rows, P = image_rows(pass);
    float *text = pass->h, *image = pass->h + L * H;
    const float *angles = pass->angles, *image_angles = angles ? angles + L * model->head_dim : NULL;
    buffers r;
    lay_out(model, L + P, l->run->shared, &r);
    float *of_text = r.modulation, *of_image = r.modulation2;
    if (!modulate(l, &block->text.modulation, pass, H, 3, r.acts, of_text) ||
        !modulate(l, &block->image.modulation, pass, H, 3, r.acts, of_image) ||
        !project_qkv(l, model, &block->text, of_text, text, L, angles, &r, r.normed, r.qkv) ||
        !project_qkv(l, model, &block->image, of_image, image, P, image_angles, &r, r.normed + L * H,
                     r.qkv + L * 3 * H))
        return false;
    if (block->dual &&
        !mp_diff_layer_norm(l, image, P, H, of_image + 7 * (int64_t)H, of_image + 6 * (int64_t)H, EPS, r.normed2))
        return false;
    if (!attend(l, model, r.qkv, L + P, r.normed) ||
        !mp_diff_add_gated(l, &block->image.out, r.normed + L * H, H, P, of_image + 2 * (int64_t)H, r.acts, r.rows,
                           image) ||
        !mp_diff_barrier(l))
        return false;
    if (block->dual) {
        if (!mp_diff_forward(l, &block->qkv2, r.normed2, H, P, NULL, r.acts, r.qkv, 3 * (int64_t)H))
            return false;
        rotate_heads(l, model, &block->q_norm2, &block->k_norm2, NULL, P, r.qkv);
        if (!attend(l, model, r.qkv, P, r.normed2) ||
            !mp_diff_add_gated(l, &block->out2, r.normed2, H, P, of_image + 8 * (int64_t)H, r.acts, r.rows, image) ||
            !mp_diff_barrier(l))
            return false;
    }
    if (!block->last) {
        if (!mp_diff_add_gated(l, &block->text.out, r.normed, H, L, of_text + 2 * (int64_t)H, r.acts, r.rows, text) ||
            !mp_diff_barrier(l) || !transformer_mlp(l, &block->text, H, L, of_text, &r, r.normed, text))
            return false;
    }
    return transformer_mlp(l, &block->image, H, P, of_image, &r, r.normed + L * H, image);
}

bool mp_dit_single_forward(mp_diff_thread *l, const mp_diffusion *model, const mp_dit_single *block,
                           const mp_dit_pass *pass) {
    const int64_t H = model->hidden, T = pass->text_rows + image_rows(pass);
    buffers r;
    lay_out(model, T, l->run->shared, &r);
    if (!modulate(l, &block->modulation, pass, (int32_t)H, 3, r.acts, r.modulation) ||
        !mp_diff_layer_norm(l, pass->h, T, (int)H, r.modulation + H, r.modulation, EPS, r.normed) ||
        !mp_diff_forward(l, &block->qkv, r.normed, H, T, NULL, r.acts, r.qkv, 3 * H))
        return false;
    rotate_heads(l, model, &block->q_norm, &block->k_norm, pass->angles, T, r.qkv);
    return attend(l, model, r.qkv, T, r.normed2) && add_mlp(l, &block->up, &block->out, r.normed2, r.normed, (int32_t)H,
                                                            T, r.modulation + 2 * H, &r, pass->h);
}

/* Stable Diffusion 3 projects a patch to (y, x, channel). Reorder it to the latents' (channel, y, x). */
static void reorder_patches(mp_diff_thread *l, const mp_diffusion *model, int64_t rows, float *velocity) {
    enum { SIDES = MP_DIFF_PATCH * MP_DIFF_PATCH };
    const int32_t C = model->channels;
    float *row = (float *)l->own;
    int64_t from, to;
    mp_team_split(l->thread, rows, 1, &from, &to);
    for (int64_t r = from; r < to; r++) {
        float *v = velocity + r * SIDES * C;
        memcpy(row, v, (size_t)SIDES * (size_t)C * sizeof(float));
        for (int32_t c = 0; c < C; c++)
            for (int32_t s = 0; s < SIDES; s++)
                v[c * SIDES + s] = row[s * C + c];
    }
}

bool mp_dit_end(mp_diff_thread *l, const mp_diffusion *model, const mp_dit_ends *ends, const mp_dit_pass *pass) {
    const int32_t H = model->hidden, patch = ends->velocity.N;
    const int64_t rows = image_rows(pass);
    const float *image = pass->h + (int64_t)pass->text_rows * H;
    buffers r;
    lay_out(model, pass->text_rows + rows, l->run->shared, &r);
    if (!modulate(l, &ends->modulation, pass, H, 2, r.acts, r.modulation) ||
        !mp_diff_layer_norm(l, image, rows, H, r.modulation + H, r.modulation, EPS, r.normed) ||
        !mp_diff_forward(l, &ends->velocity, r.normed, H, rows, NULL, r.acts, pass->velocity, patch))
        return false;
    if (!model->flux)
        reorder_patches(l, model, rows, pass->velocity);
    return mp_diff_barrier(l);
}
