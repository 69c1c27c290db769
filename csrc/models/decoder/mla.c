/* decoder/mla.c: see decoder/mla.h. */
#include "models/decoder/mla.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "files/scaled_weights.h"
#include "models/decoder/attention.h"
#include "models/decoder/load.h"

enum { MAX_RANK = 4096, MAX_PART = 1024, CHUNK = 64 /* rows that a thread multiplies at once for a head */ };
_Static_assert(MAX_RANK + MAX_PART <= MP_KV_DIM_MAX, "keys of latent attention fit into the cache");

/* ---- loading ----------------------------------------------------------------------------------------------------- */

static mp_status refuse_size(const mp_spec *spec, const char *field, const char *allowed, int64_t got,
                             mp_error *error) {
    return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, field, allowed, "%lld", (long long)got);
}

mp_status mp_mla_read_sizes(mp_decoder *model, const mp_spec *spec, mp_error *error) {
    int64_t heads, rank, q_rank, key, value, rotated, none = 0;
    MP_TRY(mp_spec_int_capped(spec, "{arch}.attention.head_count", 1, MAX_PART, NULL, &heads, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.attention.kv_lora_rank", 1, MAX_RANK, NULL, &rank, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.attention.q_lora_rank", 0, 4 * MAX_RANK, &none, &q_rank, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.attention.key_length_mla", 2, MAX_PART, NULL, &key, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.attention.value_length_mla", 1, MAX_PART, NULL, &value, error));
    MP_TRY(mp_spec_int(spec, "{arch}.rope.dimension_count", 2, key - 1, NULL, &rotated, error));
    if (rank % MP_PANEL_N)
        return refuse_size(spec, "attention.kv_lora_rank", "a multiple of 32", rank, error);
    if (value % MP_PANEL_N)
        return refuse_size(spec, "attention.value_length_mla", "a multiple of 32", value, error);
    if (rotated % 16)
        return refuse_size(spec, "rope.dimension_count", "a multiple of 16", rotated, error);
    model->latent = (mp_mla){
        .rank = (int32_t)rank,
        .q_rank = (int32_t)q_rank,
        .plain = (int32_t)(key - rotated),
        .rotated = (int32_t)rotated,
        .value = (int32_t)value,
    };
    mp_attention_shape shape = {
        .heads = (int32_t)heads,
        .kv_heads = 1,
        .groups = 1,
        .head_dim = (int32_t)(rank + rotated),
        .value_dim = (int32_t)rank,
        .rotated_from = (int32_t)rank,
        .scale = 1 / sqrtf((float)key), /* as trained, with the heads' own keys */
    };
    while (heads % shape.groups || heads / shape.groups > MP_ATTN_ROWS)
        shape.groups++;
    for (int i = 0; i < model->layer_count; i++)
        mp_decoder_set_shape(model, i, shape);
    return MP_OK;
}

/* Adds k_b or v_b from a separate tensor [heads, N, K]: floats as stored, other types dequantised. */
static mp_status add_whole(const mp_builder *builder, mp_linear *linear, const char *name, int32_t heads, int64_t N,
                           int64_t K, mp_error *error) {
    int64_t sizes[3] = {heads, N, K};
    mp_tensor all;
    MP_TRY(mp_weights_get(builder->weights, name, 3, sizes, &all, error));
    if (all.dtype != MP_F32 && all.dtype != MP_F16 && all.dtype != MP_BF16)
        return mp_builder_linear_by_head(
            builder, linear, name,
            &(mp_head_rows){{.codes = all}, heads, (int32_t)N, (int32_t)K, .stride = (int32_t)N}, error);
    all.ndim = 2;
    all.shape[0] = heads * N;
    all.shape[1] = K;
    return mp_builder_linear_of(builder, linear, name, &all, error);
}

static mp_status read_halves(const mp_layer_reader *reader, mp_latent_projections *to, mp_error *error) {
    const mp_decoder *model = reader->model;
    const mp_builder *builder = reader->builder;
    const mp_mla *latent = &model->latent;
    const mp_attention_shape *shape = mp_decoder_shape(model, reader->index);
    const int32_t stride = latent->plain + latent->value;
    char name[64], k_name[64], v_name[64];
    snprintf(name, sizeof name, "blk.%d.attn_kv_b.weight", reader->index);
    snprintf(k_name, sizeof k_name, "blk.%d.attn_k_b.weight", reader->index);
    snprintf(v_name, sizeof v_name, "blk.%d.attn_v_b.weight", reader->index);
    if (mp_weights_has(builder->weights, k_name)) {
        MP_TRY(add_whole(builder, &to->k_b, k_name, shape->heads, latent->rank, latent->plain, error));
        return add_whole(builder, &to->v_b, v_name, shape->heads, latent->value, latent->rank, error);
    }
    mp_scaled both;
    MP_TRY(mp_weights_get_matrix(builder->weights, name, shape->heads * stride, latent->rank, &both, error));
    mp_wkind any;
    if (!mp_wmat_kind_for(both.codes.dtype, MP_COMPUTE_AUTO, &any))
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s is stored as %s, which is not a weight type", name,
                       mp_dtype_get(both.codes.dtype)->name);
    const mp_head_rows keys = {both, shape->heads, latent->rank, latent->plain, stride, .transposed = true};
    const mp_head_rows values = {both, shape->heads, latent->value, latent->rank, stride, .first = latent->plain};
    MP_TRY(mp_builder_linear_by_head(builder, &to->k_b, name, &keys, error));
    return mp_builder_linear_by_head(builder, &to->v_b, name, &values, error);
}

/* Reads a projection of the layer's input, a part of attention.qkv. UNSUPPORTED if it has a bias. */
static mp_status read_input(const mp_layer_reader *reader, mp_mixer *mixer, const char *part, int32_t N,
                            mp_error *error) {
    char name[64], bias[64];
    snprintf(name, sizeof name, "blk.%d.%s.weight", reader->index, part);
    snprintf(bias, sizeof bias, "blk.%d.%s.bias", reader->index, part);
    if (mp_weights_has(reader->builder->weights, bias))
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s is not part of this architecture", bias);
    return mp_builder_linear(reader->builder, &mixer->attention.qkv, name, NULL, N, reader->model->hidden, error);
}

static mp_status read_latent(const mp_layer_reader *reader, mp_mixer *mixer, mp_error *error) {
    const mp_decoder *model = reader->model;
    const mp_mla *latent = &model->latent;
    const mp_attention_shape *shape = mixer->attention.shape = mp_decoder_shape(model, reader->index);
    const int32_t q = shape->heads * (latent->plain + latent->rotated);
    mp_norm norm = {.eps = model->latent_eps, .root = true};
    char name[64];
    if (latent->q_rank > 0) {
        MP_TRY(read_input(reader, mixer, "attn_q_a", latent->q_rank, error));
        snprintf(name, sizeof name, "blk.%d.attn_q_a_norm", reader->index);
        norm.n = latent->q_rank;
        MP_TRY(mp_norm_read(&mixer->latent.q_a_norm, reader->builder, name, norm, MP_NORM_NO_BIAS, 0, error));
        snprintf(name, sizeof name, "blk.%d.attn_q_b.weight", reader->index);
        MP_TRY(mp_builder_linear(reader->builder, &mixer->latent.q_b, name, NULL, q, latent->q_rank, error));
    } else {
        MP_TRY(read_input(reader, mixer, "attn_q", q, error));
    }
    MP_TRY(read_input(reader, mixer, "attn_kv_a_mqa", shape->head_dim, error));
    snprintf(name, sizeof name, "blk.%d.attn_kv_a_norm", reader->index);
    norm.n = latent->rank;
    MP_TRY(mp_norm_read(&mixer->latent.kv_a_norm, reader->builder, name, norm, MP_NORM_NO_BIAS, 0, error));
    MP_TRY(read_halves(reader, &mixer->latent, error));
    const mp_reader_part out = {"attn_output", model->hidden};
    MP_TRY(mp_reader_linear(reader, &mixer->out, &out, 1, shape->heads * latent->value, model->residual_scale, error));
    return mp_attend_read_options(reader, &mixer->attention, error);
}

bool mp_mla_is_latent(const char *name) {
    return strstr(name, ".attn_kv_b.") || strstr(name, ".attn_k_b.") || strstr(name, ".attn_v_b.");
}

uint64_t mp_mla_footprint(const mp_tensor_entry *entry, mp_compute compute) {
    mp_wkind kind;
    mp_wmat w;
    int64_t rows = 1, width = entry->shape[entry->ndim - 1];
    for (int i = 0; i + 1 < entry->ndim; i++)
        rows = entry->shape[i] > 0 && rows <= INT32_MAX ? rows * entry->shape[i] : INT64_MAX / 2;
    if (rows > INT32_MAX || width > INT32_MAX || !mp_wmat_kind_for(MP_F32, compute, &kind))
        return 0; /* the load will fail */
    mp_wmat_init(&w, kind, (int32_t)rows, (int32_t)width);
    return mp_wmat_bytes(&w);
}

/* ---- scratch ----------------------------------------------------------------------------------------------------- */

/* Floats per row of `latents`, the projections of a row to its latents. */
static int64_t latents_width(const mp_mla *latent, int32_t heads) {
    int64_t q = latent->q_rank > 0 ? latent->q_rank : (int64_t)heads * (latent->plain + latent->rotated);
    return q + latent->rank + latent->rotated;
}

/* Floats per row of `per_head`: queries before the cache's width, then the values of all heads. */
static int64_t per_head_width(const mp_mla *latent, int32_t heads) {
    int32_t q = latent->plain + latent->rotated;
    return (int64_t)heads * (q > latent->value ? q : latent->value);
}

static size_t acts_bytes(const mp_linear *linear) {
    return mp_acts_bytes(mp_wmat_acts(linear->w[0].kind), CHUNK, linear->K);
}

static void latent_needs(const mp_decoder *model, const mp_mixer *mixer, int M, int most_blocks,
                         mp_block_needs *needs) {
    const mp_mla *latent = &model->latent;
    const mp_attention_shape *shape = mixer->attention.shape;
    const size_t row = (size_t)M * sizeof(float);
    const size_t by_head = mp_larger(acts_bytes(&mixer->latent.k_b), acts_bytes(&mixer->latent.v_b));
    mp_needs_linear(needs, &mixer->attention.qkv, M);
    mp_needs_linear(needs, &mixer->latent.q_b, M);
    mp_needs_linear(needs, &mixer->out, M);
    mp_needs_scratch(needs,
                     mp_attend_shared(shape, M) + mp_arena_cost(row * (size_t)latents_width(latent, shape->heads)) +
                         mp_arena_cost(row * (size_t)per_head_width(latent, shape->heads)),
                     mp_attend_own(shape, most_blocks) + mp_arena_cost(by_head));
}

static void latent_cost(const mp_mixer *mixer, mp_block_cost *cost) {
    mp_cost_linear(cost, &mixer->attention.qkv);
    mp_cost_linear(cost, &mixer->latent.q_b);
    mp_cost_linear(cost, &mixer->out);
    cost->barriers += 7;
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

/* For each head h, multiplies the inputs from column h * x_step on by the head's N rows of the matrix, and writes N
 * outputs from column h * y_step on. The threads divide the heads and, in chunks, the rows. */
static void run_by_head(const mp_linear *linear, const mp_team_thread *thread, int32_t heads, const float *x,
                        int64_t ldx, int64_t x_step, int M, float *y, int64_t ldy, int64_t y_step, void *scratch) {
    const int32_t N = linear->N / heads, panels = N / MP_PANEL_N;
    const int chunks = (M + CHUNK - 1) / CHUNK;
    mp_epilogue plain = {0};
    mp_team_loop loop = mp_team_shared((int64_t)heads * chunks, 1);
    while (mp_team_next(thread, &loop))
        for (int64_t i = loop.begin; i < loop.end; i++) {
            const int h = (int)(i / chunks), row0 = (int)(i % chunks) * CHUNK;
            const int rows = M - row0 < CHUNK ? M - row0 : CHUNK;
            mp_acts acts;
            mp_acts_init(&acts, mp_wmat_acts(linear->w[0].kind), rows, linear->K, scratch);
            mp_acts_fill(&acts, x + row0 * ldx + h * x_step, ldx, 0, rows);
            mp_gemm(&linear->w[0], &acts, 0, rows, h * panels, (h + 1) * panels, &plain,
                    y + row0 * ldy + h * (y_step - N), ldy);
        }
}

/* Computes queries, keys and values of the rows in [rows, hidden] into run->qkv, before rotation. Ends without a
 * barrier. */
static void project(const mp_attend *run, const mp_mixer *mixer, const float *in, float *latents, float *per_head,
                    void *by_head) {
    const mp_decoder *model = run->pass->model;
    const mp_row_context *context = &run->view->context;
    const mp_latent_projections *to = &mixer->latent;
    const mp_mla *latent = &model->latent;
    const mp_attention_shape *shape = run->attention->shape;
    const int M = run->view->rows;
    const int32_t heads = shape->heads, part = latent->plain + latent->rotated;
    const int64_t width = latents_width(latent, heads), keys = (int64_t)heads * shape->head_dim;
    mp_row_linear(context, &mixer->attention.qkv, in, model->hidden, M, NULL, latents, width);
    mp_team_barrier(context->thread);
    mp_team_loop norms = mp_team_rows(context->thread, M, width);
    while (mp_team_next(context->thread, &norms))
        for (int64_t r = norms.begin; r < norms.end; r++) {
            float *row = latents + r * width, *kv = row + width - shape->head_dim;
            float *k = run->qkv + r * shape->qkv_width + keys, *v = k + shape->head_dim;
            if (latent->q_rank > 0)
                mp_norm_row(&to->q_a_norm, row, row);
            mp_norm_row(&to->kv_a_norm, kv, k);
            memcpy(v, k, (size_t)latent->rank * sizeof *k);
            memcpy(k + latent->rank, kv + latent->rank, (size_t)latent->rotated * sizeof *k);
        }
    mp_team_barrier(context->thread);
    const float *q = latents;
    int64_t ldq = width;
    if (latent->q_rank > 0) {
        q = per_head;
        ldq = (int64_t)heads * part;
        mp_row_linear(context, &to->q_b, latents, width, M, NULL, per_head, ldq);
        mp_team_barrier(context->thread);
    }
    run_by_head(&to->k_b, context->thread, heads, q, ldq, part, M, run->qkv, shape->qkv_width, shape->head_dim,
                by_head);
    mp_team_loop copies = mp_team_rows(context->thread, M, (int64_t)heads * latent->rotated);
    while (mp_team_next(context->thread, &copies))
        for (int64_t r = copies.begin; r < copies.end; r++)
            for (int32_t h = 0; h < heads; h++)
                memcpy(run->qkv + r * shape->qkv_width + (int64_t)h * shape->head_dim + latent->rank,
                       q + r * ldq + (int64_t)h * part + latent->plain, (size_t)latent->rotated * sizeof *q);
}

static mp_mixed latent_mix(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_mixer *mixer,
                           const float *in, float scale) {
    const mp_decoder *model = pass->model;
    const mp_mla *latent = &model->latent;
    const mp_attention_shape *shape = mixer->attention.shape;
    const mp_team_thread *thread = view->context.thread;
    const int64_t rank = latent->rank, value = latent->value, heads = shape->heads;
    const size_t row = (size_t)pass->block_rows * sizeof(float);
    uint8_t *shared = pass->shared, *own = view->own;
    const mp_attend run = mp_attend_begin(pass, view, &mixer->attention, scale, &shared, &own);
    float *const latents = mp_scratch_take(&shared, row * (size_t)latents_width(latent, shape->heads));
    float *const per_head = mp_scratch_take(&shared, row * (size_t)per_head_width(latent, shape->heads));
    project(&run, mixer, in, latents, per_head, own);
    mp_team_barrier(thread);
    mp_attend_rows(&run);
    run_by_head(&mixer->latent.v_b, thread, shape->heads, run.mixed, heads * rank, rank, view->rows, per_head,
                heads * value, value, own);
    mp_team_barrier(thread);
    return (mp_mixed){per_head, heads * value};
}

const mp_mixer_ops mp_mixer_latent = {.read = read_latent,
                                      .needs = latent_needs,
                                      .cost = latent_cost,
                                      .mix = latent_mix};
