/* decoder/mla.c: see decoder/mla.h. */
#include "models/decoder/mla.h"

#include <stdio.h>
#include <string.h>

#include "files/scaled_weights.h"

enum { MAX_RANK = 4096, MAX_PART = 1024, CHUNK = 64 /* rows that a thread multiplies at once for a head */ };

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
    model->heads = (int32_t)heads;
    model->kv_heads = model->groups = 1;
    while (heads % model->groups || heads / model->groups > MP_ATTN_ROWS)
        model->groups++;
    model->head_dim = (int32_t)(rank + rotated);
    model->value_dim = (int32_t)rank;
    model->rotated_from = (int32_t)rank;
    return MP_OK;
}

/* Adds k_b or v_b from a separate tensor [heads, N, K]: floats as stored, other types dequantised. */
static mp_status add_whole(mp_builder *builder, mp_linear *linear, const char *name, int32_t heads, int64_t N,
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

static mp_status read_halves(mp_decoder *model, mp_builder *builder, int index, mp_error *error) {
    const mp_mla *latent = &model->latent;
    mp_decoder_layer *layer = &model->layers[index];
    const int32_t stride = latent->plain + latent->value;
    char name[64], k_name[64], v_name[64];
    snprintf(name, sizeof name, "blk.%d.attn_kv_b.weight", index);
    snprintf(k_name, sizeof k_name, "blk.%d.attn_k_b.weight", index);
    snprintf(v_name, sizeof v_name, "blk.%d.attn_v_b.weight", index);
    if (mp_weights_has(builder->weights, k_name)) {
        MP_TRY(add_whole(builder, &layer->k_b, k_name, model->heads, latent->rank, latent->plain, error));
        return add_whole(builder, &layer->v_b, v_name, model->heads, latent->value, latent->rank, error);
    }
    mp_scaled both;
    MP_TRY(mp_weights_get_matrix(builder->weights, name, model->heads * stride, latent->rank, &both, error));
    mp_wkind any;
    if (!mp_wmat_kind_for(both.codes.dtype, MP_COMPUTE_AUTO, &any))
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s is stored as %s, which is not a weight type", name,
                       mp_dtype_get(both.codes.dtype)->name);
    const mp_head_rows keys = {both, model->heads, latent->rank, latent->plain, stride, .transposed = true};
    const mp_head_rows values = {both, model->heads, latent->value, latent->rank, stride, .first = latent->plain};
    MP_TRY(mp_builder_linear_by_head(builder, &layer->k_b, name, &keys, error));
    return mp_builder_linear_by_head(builder, &layer->v_b, name, &values, error);
}

/* Reads a projection of the layer's input, a part of layer->qkv. */
static mp_status read_input(mp_decoder *model, mp_builder *builder, int index, const char *part, int32_t N,
                            mp_error *error) {
    char name[64], bias[64];
    snprintf(name, sizeof name, "blk.%d.%s.weight", index, part);
    snprintf(bias, sizeof bias, "blk.%d.%s.bias", index, part);
    if (mp_weights_has(builder->weights, bias))
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s is not part of this architecture", bias);
    return mp_builder_linear(builder, &model->layers[index].qkv, name, NULL, N, model->hidden, error);
}

mp_status mp_mla_read_layer(mp_decoder *model, mp_builder *builder, int index, mp_error *error) {
    const mp_mla *latent = &model->latent;
    mp_decoder_layer *layer = &model->layers[index];
    const int32_t q = model->heads * (latent->plain + latent->rotated);
    mp_norm norm = {.eps = model->latent_eps, .root = true};
    char name[64];
    if (latent->q_rank > 0) {
        MP_TRY(read_input(model, builder, index, "attn_q_a", latent->q_rank, error));
        snprintf(name, sizeof name, "blk.%d.attn_q_a_norm", index);
        norm.n = latent->q_rank;
        MP_TRY(mp_norm_read(&layer->q_a_norm, builder, name, norm, MP_NORM_NO_BIAS, 0, error));
        snprintf(name, sizeof name, "blk.%d.attn_q_b.weight", index);
        MP_TRY(mp_builder_linear(builder, &layer->q_b, name, NULL, q, latent->q_rank, error));
    } else {
        MP_TRY(read_input(model, builder, index, "attn_q", q, error));
    }
    MP_TRY(read_input(model, builder, index, "attn_kv_a_mqa", model->head_dim, error));
    snprintf(name, sizeof name, "blk.%d.attn_kv_a_norm", index);
    norm.n = latent->rank;
    MP_TRY(mp_norm_read(&layer->kv_a_norm, builder, name, norm, MP_NORM_NO_BIAS, 0, error));
    return read_halves(model, builder, index, error);
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

/* ---- running ----------------------------------------------------------------------------------------------------- */

static size_t acts_bytes(const mp_linear *linear) {
    return mp_acts_bytes(mp_wmat_acts(linear->w[0].kind), CHUNK, linear->K);
}

size_t mp_mla_thread_scratch(const mp_decoder *model) {
    size_t most = 0;
    for (int l = 0; model->latent.rank > 0 && l < model->layer_count; l++) {
        size_t k = acts_bytes(&model->layers[l].k_b), v = acts_bytes(&model->layers[l].v_b);
        most = k > most ? k : most;
        most = v > most ? v : most;
    }
    return mp_arena_cost(most);
}

/* For each head h, multiplies the inputs from column h * x_step on by the head's N rows of the matrix, and writes N
 * outputs from column h * y_step on. The threads divide the heads and, in chunks, the rows. */
static void run_by_head(const mp_linear *linear, const mp_team_thread *thread, int32_t heads, const float *x,
                        int64_t ldx, int64_t x_step, int M, float *y, int64_t ldy, int64_t y_step, void *scratch) {
    const int32_t N = linear->N / heads, panels = N / MP_PANEL_N;
    const int chunks = (M + CHUNK - 1) / CHUNK;
    mp_epilogue plain = {0};
    int64_t begin, end;
    mp_team_split(thread, (int64_t)heads * chunks, 1, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        const int h = (int)(i / chunks), row0 = (int)(i % chunks) * CHUNK;
        const int rows = M - row0 < CHUNK ? M - row0 : CHUNK;
        mp_acts acts;
        mp_acts_init(&acts, mp_wmat_acts(linear->w[0].kind), rows, linear->K, scratch);
        mp_acts_fill(&acts, x + row0 * ldx + h * x_step, ldx, 0, rows);
        mp_gemm(&linear->w[0], &acts, 0, rows, h * panels, (h + 1) * panels, &plain,
                y + row0 * ldy + h * (y_step - N), ldy);
    }
}

void mp_mla_project(const mp_decoder_pass *pass, const mp_team_thread *thread, const mp_decoder_layer *layer, int M,
                    const float *in, void *own, uint8_t *panel_scratch, void *by_head) {
    const mp_decoder *model = pass->model;
    const mp_mla *latent = &model->latent;
    const int32_t heads = model->heads, part = latent->plain + latent->rotated;
    const int64_t width = mp_mla_row(latent, heads), keys = (int64_t)heads * model->head_dim;
    mp_epilogue plain = {0};
    mp_linear_forward(&layer->qkv, thread, in, model->hidden, M, pass->acts, own, panel_scratch, &plain,
                      pass->latent, width);
    mp_team_barrier(thread);
    int64_t begin, end;
    mp_team_split(thread, M, 1, &begin, &end);
    for (int64_t r = begin; r < end; r++) {
        float *row = pass->latent + r * width, *kv = row + width - model->head_dim;
        float *k = pass->qkv + r * model->qkv_width + keys, *v = k + model->head_dim;
        if (latent->q_rank > 0)
            mp_norm_row(&layer->q_a_norm, row, row);
        mp_norm_row(&layer->kv_a_norm, kv, k);
        memcpy(v, k, (size_t)latent->rank * sizeof *k);
        memcpy(k + latent->rank, kv + latent->rank, (size_t)latent->rotated * sizeof *k);
    }
    mp_team_barrier(thread);
    const float *q = pass->latent;
    int64_t ldq = width;
    if (latent->q_rank > 0) {
        q = pass->per_head;
        ldq = (int64_t)heads * part;
        mp_linear_forward(&layer->q_b, thread, pass->latent, width, M, pass->acts, own, panel_scratch, &plain,
                          pass->per_head, ldq);
        mp_team_barrier(thread);
    }
    run_by_head(&layer->k_b, thread, heads, q, ldq, part, M, pass->qkv, model->qkv_width, model->head_dim, by_head);
    for (int64_t r = begin; r < end; r++)
        for (int32_t h = 0; h < heads; h++)
            memcpy(pass->qkv + r * model->qkv_width + (int64_t)h * model->head_dim + latent->rank,
                   q + r * ldq + (int64_t)h * part + latent->plain, (size_t)latent->rotated * sizeof *q);
}

void mp_mla_values(const mp_decoder_pass *pass, const mp_team_thread *thread, const mp_decoder_layer *layer, int M,
                   void *by_head) {
    const mp_decoder *model = pass->model;
    const int64_t rank = model->latent.rank, value = model->latent.value, heads = model->heads;
    run_by_head(&layer->v_b, thread, model->heads, pass->mixed, heads * rank, rank, M, pass->per_head, heads * value,
                value, by_head);
}
