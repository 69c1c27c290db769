/* diffusion/ops.c: operations of the networks, each on all threads. Each polls the lease at least every MP_DIFF_ROWS
 * rows. */
#include <assert.h>
#include <stdatomic.h>
#include <stdio.h> /* snprintf only */

#include "models/diffusion/diffusion.h"

mp_status mp_diff_linear(const mp_diffusion *model, const mp_builder *builder, mp_linear *linear, const char *name,
                         int32_t N, int32_t K, mp_error *error) {
    char weight[MP_BUILDER_NAME + 8], bias[MP_BUILDER_NAME];
    snprintf(weight, sizeof weight, "%s.weight", name);
    snprintf(bias, sizeof bias, "%s.bias", name);
    const mp_tensor_entry *entry = mp_spec_find_tensor(mp_weights_spec(model->weights), weight);
    bool quantised = entry && mp_dtype_get(entry->dtype)->items > 1;
    mp_builder own = *builder;
    own.compute = quantised ? model->compute : mp_resolve_compute(model->compute);
    return mp_builder_linear(&own, linear, weight, mp_weights_has(model->weights, bias) ? bias : NULL, N, K, error);
}

bool mp_diff_poll(mp_diff_thread *l) {
    if (l->thread->index == 0 && mp_lease_poll(l->run->lease))
        atomic_store_explicit(&l->run->raised, 1, memory_order_relaxed);
    return atomic_load_explicit(&l->run->raised, memory_order_relaxed) != 0;
}

/* Two slots alternate: thread 0 may be one barrier ahead of a thread that still reads the previous slot. */
bool mp_diff_barrier(mp_diff_thread *l) {
    int slot = (int)(l->turn++ & 1);
    if (l->thread->index == 0)
        l->run->agreed[slot] = mp_diff_poll(l);
    mp_team_barrier(l->thread);
    return !l->run->agreed[slot];
}

size_t mp_diff_linear_scratch(const mp_linear *linear, int64_t M) {
    return mp_linear_scratch(linear, (int)(M < MP_DIFF_ROWS ? M : MP_DIFF_ROWS));
}

bool mp_diff_forward(mp_diff_thread *l, const mp_linear *linear, const float *x, int64_t ldx, int64_t M,
                     const mp_epilogue *ep, void *acts, float *y, int64_t ldy) {
    for (int64_t row = 0; row < M; row += MP_DIFF_ROWS) {
        int rows = (int)(M - row < MP_DIFF_ROWS ? M - row : MP_DIFF_ROWS);
        mp_epilogue part = ep ? *ep : (mp_epilogue){0};
        if (part.residual)
            part.residual += row * part.ld_residual;
        mp_linear_forward(linear, l->thread, x + row * ldx, ldx, rows, acts, NULL, NULL, &part, y + row * ldy, ldy);
        if (!mp_diff_barrier(l))
            return false;
    }
    return true;
}

bool mp_diff_add_gated(mp_diff_thread *l, const mp_linear *linear, const float *x, int64_t ldx, int64_t M,
                       const float *gate, void *acts, float *rows, float *h) {
    const mp_kernels *call = mp_kernels_get();
    const int64_t n = linear->N;
    assert(x || M <= MP_DIFF_ROWS);
    for (int64_t row = 0, turn = 0; row < M; row += MP_DIFF_ROWS, turn ^= 1) {
        int count = (int)(M - row < MP_DIFF_ROWS ? M - row : MP_DIFF_ROWS);
        float *part = rows + turn * (M < MP_DIFF_ROWS ? M : MP_DIFF_ROWS) * n;
        mp_linear_forward(linear, l->thread, x ? x + row * ldx : NULL, ldx, count, acts, NULL, NULL, NULL, part, n);
        if (!mp_diff_barrier(l))
            return false;
        mp_team_loop loop = mp_team_rows(l->thread, count, n);
        while (mp_team_next(l->thread, &loop))
            for (int64_t r = loop.begin; r < loop.end; r++)
                call->mul_add(gate, part + r * n, n, h + (row + r) * n);
    }
    return true;
}

bool mp_diff_layer_norm(mp_diff_thread *l, const float *x, int64_t M, int n, const float *weight, const float *bias,
                        float eps, float *y) {
    const mp_norm norm = {.weight = (float *)weight, .bias = (float *)bias, .n = n, .eps = eps}; /* read only */
    mp_norm_rows(&norm, l->thread, M, x, n, y, n);
    return mp_diff_barrier(l);
}

static bool meet(void *thread) { return mp_diff_barrier(thread); }

static bool ops_poll(void *thread) { return mp_diff_poll(thread); }

mp_row_context mp_diff_context(mp_diff_thread *l, const mp_row_span *spans, void *acts) {
    return (mp_row_context){.thread = l->thread,
                            .spans = spans,
                            .n_spans = spans ? 1 : 0,
                            .acts = acts,
                            .meet = meet,
                            .poll = ops_poll,
                            .arg = l};
}

int mp_diff_attention_rows(const mp_attention *attention, int T) {
    enum { PLAIN = 128, BF16 = 512 }; /* enough rows to amortise the copies of keys and values */
    const bool plain = mp_attention_function(attention, T) != mp_kernels_get()->attn_full_bf16;
    return plain ? PLAIN : BF16;
}

bool mp_diff_attend(mp_diff_thread *l, const mp_attention *attention, const mp_attention_rows *rows, int T) {
    const mp_row_span span = {.rows = T};
    const mp_row_context context = mp_diff_context(l, &span, NULL);
    mp_attention_forward(&context, attention, rows, 0, mp_diff_attention_rows(attention, T), l->own);
    return mp_diff_barrier(l);
}
