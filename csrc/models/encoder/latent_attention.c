/* encoder/latent_attention.c: see encoder/latent_attention.h. */
#include "models/encoder/latent_attention.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum { MAX_HEADS = 256, MAX_LATENTS = 8192, MAX_SIZE = 65536 };

typedef struct mp_latent_attention_run {
    const mp_latent_attention *latent;
    const mp_tensor *q, *kv, *out;
    const float *latents; /* [count, hidden], normed */
    int32_t size;         /* head size */
    uint8_t *scratch;     /* [threads][bytes] */
    size_t bytes;         /* bytes of scratch per thread */
    mp_progress *progress;
    _Atomic int next;
} mp_latent_attention_run;

/* Read rows [row, row + rows) and columns [column, column + columns) of a tensor as float32. */
static void read_block(const mp_tensor *tensor, int64_t row, int64_t rows, int64_t column, int64_t columns, float *to) {
    const int64_t item = mp_dtype_get(tensor->dtype)->bytes;
    for (int64_t r = 0; r < rows; r++)
        mp_dequantize_row(tensor->dtype, mp_tensor_row(tensor, row + r) + column * item, columns, to + r * columns);
}

/* Compute both products of one head. Scratch: block and transposed, each up to [hidden, size]; own [count, size]. */
static void multiply_head(const mp_latent_attention_run *run, int head, float *block, float *transposed, float *own) {
    const mp_latent_attention *latent = run->latent;
    const int32_t D = latent->hidden, L = latent->count, d = run->size, inner = latent->heads * d;
    const float scale = (float)(1 / sqrt((double)d));
    const int64_t first = (int64_t)head * d;
    float *scores = latent->products[0] + (int64_t)head * L * D, *values = latent->products[1] + (int64_t)head * L;
    read_block(run->kv, first, d, 0, D, block);
    mp_gemm_f32_plain(L, d, D, run->latents, D, block, D, own, d);
    read_block(run->q, first, d, 0, D, block);
    for (int64_t i = 0; i < d; i++)
        for (int64_t k = 0; k < D; k++)
            transposed[k * d + i] = block[i * D + k] * scale;
    mp_gemm_f32_plain(L, D, d, own, d, transposed, d, scores, D);
    read_block(run->kv, inner + first, d, 0, D, block);
    mp_gemm_f32_plain(L, d, D, run->latents, D, block, D, own, d);
    read_block(run->out, 0, D, first, d, block);
    mp_gemm_f32_plain(D, L, d, block, d, own, d, values, (int64_t)latent->heads * L);
}

static void multiply_body(const mp_team_thread *thread, void *arg) {
    mp_latent_attention_run *run = arg;
    const size_t block = (size_t)run->latent->hidden * (size_t)run->size;
    float *scratch = (float *)(void *)(run->scratch + (size_t)thread->index * run->bytes);
    for (;;) {
        int head = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed);
        if (head >= run->latent->heads)
            return;
        multiply_head(run, head, scratch, scratch + block, scratch + 2 * block);
        mp_progress_part(run->progress, "multiplying latents", (uint64_t)head + 1, (uint64_t)run->latent->heads);
    }
}

static mp_status read_vector(const mp_weights *weights, const char *name, int64_t n, float *out, mp_error *error) {
    mp_tensor tensor;
    MP_TRY(mp_weights_get(weights, name, 1, &n, &tensor, error));
    mp_dequantize_row(tensor.dtype, tensor.data, n, out);
    return MP_OK;
}

/* Read the latents [count, hidden] and norm them. norm: scratch, [2, hidden]. */
static mp_status read_latents(const mp_latent_attention *latent, const mp_weights *weights, float *out, float *norm,
                              mp_error *error) {
    const int64_t D = latent->hidden, shape[2] = {latent->count, D};
    mp_tensor tensor;
    MP_TRY(mp_weights_get(weights, "latent.latents", 2, shape, &tensor, error));
    MP_TRY(read_vector(weights, "latent.norm_context.weight", D, norm, error));
    MP_TRY(read_vector(weights, "latent.norm_context.bias", D, norm + D, error));
    read_block(&tensor, 0, latent->count, 0, D, out);
    for (int32_t l = 0; l < latent->count; l++)
        mp_kernels_get()->layer_norm(out + l * D, norm, norm + D, latent->eps, (int)D, out + l * D);
    return MP_OK;
}

static mp_status latent_multiply(mp_latent_attention *latent, const mp_weights *weights, int32_t size, mp_lease *lease,
                                 mp_progress *progress, mp_error *error) {
    const int64_t D = latent->hidden, inner = (int64_t)latent->heads * size;
    const int64_t q[2] = {inner, D}, kv[2] = {2 * inner, D}, out[2] = {D, inner};
    static const char *const names[] = {"latent.to_q.weight", "latent.to_kv.weight", "latent.to_out.weight"};
    const int64_t *const shapes[] = {q, kv, out};
    mp_tensor tensors[3];
    for (int i = 0; i < 3; i++)
        MP_TRY(mp_weights_get(weights, names[i], 2, shapes[i], &tensors[i], error));
    for (int i = 0; i < 3; i++)
        if (mp_dtype_get(tensors[i].dtype)->items != 1)
            return mp_fail(error, MP_UNSUPPORTED, "tensor %s must be stored as F32, F16 or BF16, got %s", names[i],
                           mp_dtype_get(tensors[i].dtype)->name);
    const size_t part = ((size_t)D * (size_t)size * 2 + (size_t)latent->count * (size_t)size) * sizeof(float);
    const size_t first = mp_arena_cost((size_t)(latent->count + 2) * (size_t)D * sizeof(float));
    const size_t bytes = first + mp_arena_cost(part) * (size_t)lease->threads;
    uint8_t *memory = mp_alloc(bytes, MP_TAG_SCRATCH);
    if (!memory)
        return mp_fail_memory(error, bytes, "the products of latents");
    float *latents = (float *)(void *)memory;
    mp_status status = read_latents(latent, weights, latents, latents + latent->count * D, error);
    if (status == MP_OK) {
        mp_latent_attention_run run = {latent, &tensors[0],    &tensors[1],         &tensors[2], latents,
                                       size,   memory + first, mp_arena_cost(part), progress,    0};
        mp_lease_run(lease, multiply_body, &run);
    }
    mp_free(memory);
    return status;
}

static uint64_t product_bytes(const mp_latent_attention *latent) {
    return 2 * (uint64_t)latent->heads * (uint64_t)latent->count * (uint64_t)latent->hidden * sizeof(float);
}

static mp_status read_sizes(mp_latent_attention *latent, const mp_spec *spec, int32_t *size, mp_error *error) {
    int64_t heads, count, head, ffn;
    double eps;
    MP_TRY(mp_spec_int(spec, "mpool.latent_heads", 1, MAX_HEADS, NULL, &heads, error));
    MP_TRY(mp_spec_int(spec, "mpool.latent_count", 1, MAX_LATENTS, NULL, &count, error));
    MP_TRY(mp_spec_int(spec, "mpool.latent_head_size", 1, MAX_SIZE, NULL, &head, error));
    MP_TRY(mp_spec_int(spec, "mpool.latent_feed_forward", 1, 16 * MAX_SIZE, NULL, &ffn, error));
    MP_TRY(mp_spec_float(spec, "mpool.latent_epsilon", 1e-30, 1, NULL, &eps, error));
    latent->heads = (int32_t)heads;
    latent->count = (int32_t)count;
    latent->mlp = (mp_mlp){.ffn = (int32_t)ffn, .gated = true, .act = MP_ACT_GELU};
    latent->eps = (float)eps;
    *size = (int32_t)head;
    return MP_OK;
}

mp_status mp_latent_attention_init(mp_latent_attention *latent, const mp_builder *builder, int32_t hidden, bool ready,
                                   mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_error *error) {
    const mp_weights *weights = builder->weights;
    const int64_t D = hidden;
    int32_t size;
    *latent = (mp_latent_attention){.hidden = hidden};
    MP_TRY(read_sizes(latent, mp_weights_spec(weights), &size, error));
    const int64_t all = (int64_t)latent->heads * latent->count;
    if (!ready) {
        if (!mp_budget_take(budget, product_bytes(latent)))
            return mp_fail_memory(error, product_bytes(latent), "the products of latents");
        float *both = mp_alloc((size_t)product_bytes(latent), MP_TAG_SCRATCH);
        if (!both) {
            mp_budget_give(budget, product_bytes(latent));
            return mp_fail_memory(error, product_bytes(latent), "the products of latents");
        }
        latent->products[0] = both;
        latent->products[1] = both + all * D;
        MP_TRY(latent_multiply(latent, weights, size, lease, progress, error));
    }
    const uint64_t bytes = product_bytes(latent) / 2;
    const mp_tensor scores = {MP_F32, 2, {all, D}, (const uint8_t *)latent->products[0], bytes};
    const mp_tensor values = {MP_F32, 2, {D, all}, (const uint8_t *)latent->products[1], bytes};
    MP_TRY(mp_builder_linear_of(builder, &latent->scores, "latent.to_q.weight", &scores, error));
    MP_TRY(mp_builder_linear_of(builder, &latent->values, "latent.to_out.weight", &values, error));
    const mp_norm like = {.n = hidden, .eps = latent->eps};
    mp_mlp *mlp = &latent->mlp;
    MP_TRY(mp_builder_linear(builder, &mlp->up, "latent.ffn_gate.weight", "latent.ffn_gate.bias", mlp->ffn, hidden,
                             error));
    MP_TRY(mp_builder_linear(builder, &mlp->up, "latent.ffn_up.weight", "latent.ffn_up.bias", mlp->ffn, hidden, error));
    MP_TRY(mp_builder_linear(builder, &mlp->down, "latent.ffn_down.weight", "latent.ffn_down.bias", hidden, mlp->ffn,
                             error));
    MP_TRY(mp_norm_read(&latent->norm, builder, "latent.norm", like, MP_NORM_BIAS, 0, error));
    return mp_norm_read(&latent->ffn_norm, builder, "latent.ffn_norm", like, MP_NORM_BIAS, 0, error);
}

void mp_latent_attention_free_unpacked(mp_latent_attention *latent, mp_budget *budget) {
    if (!latent->products[0])
        return;
    mp_free(latent->products[0]);
    mp_budget_give(budget, product_bytes(latent));
    latent->products[0] = latent->products[1] = NULL;
}
