/* encoder/disentangled.c: loads the tables of disentangled attention (nn/relative_attention.h). Each layer maps the
 * table of distances to keys and queries, with weights of its own or with those of its attention. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "models/encoder/encoder.h"

enum { MAX_SPAN = 1 << 16, MAX_FARTHEST = 1 << 20 };

typedef struct run {
    const mp_encoder *model;
    const mp_tensor *weights; /* [layers][terms], [width, hidden] each */
    const mp_tensor *biases;  /* [layers][terms], [width] each; data NULL: no bias */
    int terms;
    const float *distances; /* [rows, hidden], normed */
    float *scratch;         /* [threads][width * (hidden + 1)] */
    mp_progress *progress;
    _Atomic int next;
} run;

static void compute_body(const mp_team_thread *thread, void *arg) {
    run *all = arg;
    const mp_encoder *model = all->model;
    const int64_t hidden = model->hidden, width = model->q_width, rows = model->relative.rows;
    float *const matrix = all->scratch + thread->index * width * (hidden + 1), *const bias = matrix + width * hidden;
    const int count = model->layer_count * all->terms;
    for (;;) {
        const int i = atomic_fetch_add_explicit(&all->next, 1, memory_order_relaxed);
        if (i >= count)
            return;
        float *table = model->relative_tables + i * rows * width;
        for (int64_t n = 0; n < width; n++)
            mp_dequantize_row(all->weights[i].dtype, mp_tensor_row(&all->weights[i], n), hidden, matrix + n * hidden);
        mp_gemm_f32_plain((int)rows, (int)width, (int)hidden, all->distances, hidden, matrix, hidden, table, width);
        if (all->biases[i].data) {
            mp_dequantize_row(all->biases[i].dtype, all->biases[i].data, width, bias);
            for (int64_t r = 0; r < rows; r++)
                mp_kernels_get()->add(bias, width, table + r * width);
        }
        mp_progress_part(all->progress, "computing distances", (uint64_t)i + 1, (uint64_t)count);
    }
}

typedef struct settings {
    int64_t span, buckets, farthest;
    bool keys, queries, shared, normed; /* terms; weights of the attention are used; the distances are normed */
} settings;

static mp_status read_settings(const mp_encoder *model, const mp_spec *spec, settings *to, mp_error *error) {
    const int64_t none = 0;
    const bool no = false;
    MP_TRY(mp_spec_int(spec, "mpool.relative_span", 1, MAX_SPAN, NULL, &to->span, error));
    MP_TRY(mp_spec_int(spec, "mpool.relative_buckets", 0, MAX_SPAN, &none, &to->buckets, error));
    MP_TRY(mp_spec_int(spec, "mpool.relative_farthest", 1, MAX_FARTHEST, &to->span, &to->farthest, error));
    MP_TRY(mp_spec_bool(spec, "mpool.relative_keys", &no, &to->keys, error));
    MP_TRY(mp_spec_bool(spec, "mpool.relative_queries", &no, &to->queries, error));
    MP_TRY(mp_spec_bool(spec, "mpool.relative_shared", &no, &to->shared, error));
    MP_TRY(mp_spec_bool(spec, "mpool.relative_normed", &no, &to->normed, error));
    if (to->buckets && (to->buckets < 2 || to->buckets >= 2 * (to->farthest - 1) || to->span != to->buckets))
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.relative_buckets",
                            "0, or the value of mpool.relative_span, from 2 to twice the farthest distance", "%lld",
                            (long long)to->buckets);
    if (!to->keys && !to->queries)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.relative_keys",
                            "true, unless mpool.relative_queries is", "false");
    if (model->attention.causal || model->attention.kv_heads != model->attention.heads)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "attention.head_count_kv",
                            "as many as heads, and no causal mask: attention is disentangled", "%d",
                            model->attention.kv_heads);
    for (int i = 0; i < model->layer_count; i++)
        if (model->layers[i].base.window)
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.layer_windows",
                                "none: attention is disentangled", "%d", model->layers[i].base.window);
    return MP_OK;
}

/* Read the table of distances [rows, hidden]; if `normed`, norm its rows. */
static mp_status read_distances(const mp_encoder *model, bool normed, float *out, int64_t *parameters,
                                mp_error *error) {
    const int64_t n = model->hidden, shape[2] = {model->relative.rows, n};
    mp_tensor table, weight = {0}, bias = {0};
    MP_TRY(mp_weights_get(model->weights, "rel_embd.weight", 2, shape, &table, error));
    *parameters += mp_tensor_items(&table);
    for (int64_t r = 0; r < shape[0]; r++)
        mp_dequantize_row(table.dtype, mp_tensor_row(&table, r), n, out + r * n);
    if (!normed)
        return MP_OK;
    MP_TRY(mp_weights_get(model->weights, "rel_embd_norm.weight", 1, &n, &weight, error));
    MP_TRY(mp_weights_get(model->weights, "rel_embd_norm.bias", 1, &n, &bias, error));
    *parameters += 2 * n;
    float *both = mp_alloc_array(2 * (size_t)n, sizeof *both, MP_TAG_MISC);
    if (!both)
        return mp_fail_memory(error, 2 * (uint64_t)n * sizeof *both, "the norm of distances");
    mp_dequantize_row(weight.dtype, weight.data, n, both);
    mp_dequantize_row(bias.dtype, bias.data, n, both + n);
    for (int64_t r = 0; r < shape[0]; r++)
        mp_kernels_get()->layer_norm(out + r * n, both, both + n, model->eps, (int)n, out + r * n);
    mp_free(both);
    return MP_OK;
}

/* Find the matrix and the bias of one term of a layer. */
static mp_status find_term(const mp_encoder *model, int layer, bool queries, bool shared, mp_tensor *weight,
                           mp_tensor *bias, int64_t *parameters, mp_error *error) {
    const int64_t shape[2] = {model->q_width, model->hidden};
    const char *const name = queries ? (shared ? "attn_q" : "attn_pos_q") : (shared ? "attn_k" : "attn_pos_k");
    char full[64];
    *bias = (mp_tensor){0};
    snprintf(full, sizeof full, "blk.%d.%s.weight", layer, name);
    MP_TRY(mp_weights_get(model->weights, full, 2, shape, weight, error));
    snprintf(full, sizeof full, "blk.%d.%s.bias", layer, name);
    if (mp_weights_has(model->weights, full))
        MP_TRY(mp_weights_get(model->weights, full, 1, shape, bias, error));
    if (!shared)
        *parameters += mp_tensor_items(weight) + (bias->data ? shape[0] : 0);
    return MP_OK;
}

static mp_status disentangled_take(mp_encoder *model, mp_budget *budget, uint64_t bytes, mp_error *error) {
    if (!mp_budget_take(budget, bytes))
        return mp_fail_memory(error, bytes, "the tables of distances");
    model->charged += bytes;
    return MP_OK;
}

/* Compute the tables of all layers. `tensors`: memory for two tensors of each term. */
static mp_status disentangled_compute(mp_encoder *model, const settings *set, mp_tensor *tensors, mp_lease *lease,
                                      mp_budget *budget, mp_progress *progress, int64_t *parameters, mp_error *error) {
    const int terms = set->keys + set->queries;
    const size_t rows = (size_t)model->relative.rows, hidden = (size_t)model->hidden, width = (size_t)model->q_width;
    mp_tensor *const biases = tensors + model->layer_count * terms;
    for (int i = 0; i < model->layer_count * terms; i++)
        MP_TRY(find_term(model, i / terms, !set->keys || i % terms == 1, set->shared, &tensors[i], &biases[i],
                         parameters, error));
    const size_t floats = rows * hidden + (size_t)lease->threads * width * (hidden + 1);
    float *scratch = NULL;
    const uint64_t bytes = (uint64_t)floats * sizeof *scratch;
    if (!mp_budget_take(budget, bytes))
        return mp_fail_memory(error, bytes, "the tables of distances");
    scratch = mp_alloc_array(floats, sizeof *scratch, MP_TAG_SCRATCH);
    if (!scratch) {
        mp_budget_give(budget, bytes);
        return mp_fail_memory(error, bytes, "the tables of distances");
    }
    mp_status status = read_distances(model, set->normed, scratch, parameters, error);
    if (status == MP_OK) {
        run all = {model, tensors, biases, terms, scratch, scratch + rows * hidden, progress, 0};
        mp_lease_run(lease, compute_body, &all);
    }
    mp_free(scratch);
    mp_budget_give(budget, bytes);
    return status;
}

mp_status mp_encoder_read_relative(mp_encoder *model, mp_lease *lease, mp_budget *budget, mp_progress *progress,
                                   int64_t *parameters, mp_error *error) {
    settings set;
    MP_TRY(read_settings(model, mp_weights_spec(model->weights), &set, error));
    const int terms = set.keys + set.queries;
    const uint64_t table = 2 * (uint64_t)set.span * (uint64_t)model->q_width;
    const uint64_t bytes = (uint64_t)model->layer_count * (uint64_t)terms * table * sizeof(float);
    MP_TRY(disentangled_take(model, budget, bytes + (2 * (uint64_t)model->context - 1) * sizeof(int32_t), error));
    MP_TRY(mp_relative_init(&model->relative, (int32_t)set.span, (int32_t)set.buckets, (int32_t)set.farthest,
                            model->context, error));
    if (!(model->relative_tables = mp_alloc((size_t)bytes, MP_TAG_WEIGHTS)))
        return mp_fail_memory(error, bytes, "the tables of distances");
    const size_t count = 2 * (size_t)model->layer_count * (size_t)terms;
    mp_tensor *tensors = mp_alloc_array(count, sizeof *tensors, MP_TAG_MISC);
    if (!tensors)
        return mp_fail_memory(error, count * sizeof *tensors, "the tables of distances");
    mp_status status = disentangled_compute(model, &set, tensors, lease, budget, progress, parameters, error);
    mp_free(tensors);
    for (int i = 0; i < model->layer_count; i++) {
        const float *first = model->relative_tables + (size_t)(i * terms) * table;
        model->layers[i].relative = (mp_relative_layer){.shape = &model->relative, .width = model->q_width};
        model->layers[i].relative.keys = set.keys ? first : NULL;
        model->layers[i].relative.queries = set.queries ? first + (set.keys ? table : 0) : NULL;
    }
    model->attention.relative = &model->layers[0].relative;
    return status;
}

uint64_t mp_encoder_relative_bytes(const mp_spec *spec) {
    const mp_tensor_entry *table = mp_spec_find_tensor(spec, "rel_embd.weight");
    const mp_tensor_entry *query = mp_spec_find_tensor(spec, "blk.0.attn_q.weight");
    int64_t layers, zero = 0;
    bool keys, queries, no = false;
    mp_error error;
    if (!table || !query || mp_spec_int(spec, "{arch}.block_count", 0, 1024, &zero, &layers, &error) != MP_OK ||
        mp_spec_bool(spec, "mpool.relative_keys", &no, &keys, &error) != MP_OK ||
        mp_spec_bool(spec, "mpool.relative_queries", &no, &queries, &error) != MP_OK ||
        table->shape[0] > 2 * MAX_SPAN || query->shape[0] > 1 << 16)
        return 0; /* not such a model, or the load will fail */
    return (uint64_t)(layers * (keys + queries) * table->shape[0] * query->shape[0]) * sizeof(float);
}
