/* ops.c: what the networks are made of, on all lanes, with a look at the lease at least every few hundred rows. */
#include <assert.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "models/diffusion/diffusion.h"

bool mp_diff_poll(mp_diff_lane *l) {
    if (l->lane->index == 0 && mp_lease_poll(l->run->lease))
        atomic_store_explicit(&l->run->raised, 1, memory_order_relaxed);
    return atomic_load_explicit(&l->run->raised, memory_order_relaxed) != 0;
}

/* Two slots in turn: lane 0 may be one barrier ahead of a lane that still reads the last one's. */
bool mp_diff_meet(mp_diff_lane *l) {
    int slot = (int)(l->turn++ & 1);
    if (l->lane->index == 0)
        l->run->agreed[slot] = mp_diff_poll(l);
    mp_lane_sync(l->lane);
    return !l->run->agreed[slot];
}

size_t mp_diff_linear_scratch(const mp_linear *linear, int64_t M) {
    return mp_linear_scratch(linear, (int)(M < MP_DIFF_ROWS ? M : MP_DIFF_ROWS));
}

bool mp_diff_forward(mp_diff_lane *l, const mp_linear *linear, const float *x, int64_t ldx, int64_t M,
                     const mp_epilogue *ep, void *acts, float *y, int64_t ldy) {
    for (int64_t row = 0; row < M; row += MP_DIFF_ROWS) {
        int rows = (int)(M - row < MP_DIFF_ROWS ? M - row : MP_DIFF_ROWS);
        mp_epilogue part = ep ? *ep : (mp_epilogue){0};
        if (part.residual)
            part.residual += row * part.ld_residual;
        mp_linear_forward(linear, l->lane, x + row * ldx, ldx, rows, acts, NULL, NULL, &part, y + row * ldy, ldy);
        if (!mp_diff_meet(l))
            return false;
    }
    return true;
}

bool mp_diff_add_gated(mp_diff_lane *l, const mp_linear *linear, const float *x, int64_t ldx, int64_t M,
                       const float *gate, void *acts, float *rows, float *h) {
    const mp_kernels *call = mp_kernels_get();
    const int64_t n = linear->N;
    assert(x || M <= MP_DIFF_ROWS);
    for (int64_t row = 0, turn = 0; row < M; row += MP_DIFF_ROWS, turn ^= 1) {
        int count = (int)(M - row < MP_DIFF_ROWS ? M - row : MP_DIFF_ROWS);
        float *part = rows + turn * (M < MP_DIFF_ROWS ? M : MP_DIFF_ROWS) * n;
        mp_linear_forward(linear, l->lane, x ? x + row * ldx : NULL, ldx, count, acts, NULL, NULL, NULL, part, n);
        if (!mp_diff_meet(l))
            return false;
        int64_t from, to;
        mp_lane_split(l->lane, count, 1, &from, &to);
        for (int64_t r = from; r < to; r++)
            call->mul_add(gate, part + r * n, n, h + (row + r) * n);
    }
    return true;
}

bool mp_diff_layer_norm(mp_diff_lane *l, const float *x, int64_t M, int n, const float *weight, const float *bias,
                        float eps, float *y) {
    int64_t from, to;
    mp_lane_split(l->lane, M, 1, &from, &to);
    for (int64_t r = from; r < to; r++)
        mp_kernels_get()->layer_norm(x + r * n, weight, bias, eps, n, y + r * n);
    return mp_diff_meet(l);
}

int mp_t5_bucket(int distance, int buckets, int reach) {
    int half = buckets / 2, bucket = distance > 0 ? half : 0, away = distance < 0 ? -distance : distance;
    int exact = half / 2;
    if (away < exact)
        return bucket + away;
    float far = logf((float)away / (float)exact) / (float)log((double)reach / exact) * (float)(half - exact);
    int log_bucket = exact + (int)far;
    return bucket + (log_bucket < half - 1 ? log_bucket : half - 1);
}

/* Rows between two looks at the lease: enough to copy keys and values for. */
enum { ATTEND_ROWS = 128, ATTEND_ROWS_BF16 = 512 };

size_t mp_diff_attention_scratch(int T, int head_dim, bool relative) {
    return mp_arena_cost(mp_attn_full_scratch(T, head_dim)) +
           (relative ? mp_arena_cost(2 * (size_t)T * sizeof(float)) : 0);
}

/* The bias of one head, by distance [2 T - 1]. */
static void relative_bias(const mp_diff_attention *a, int head, float *bias) {
    for (int distance = 1 - a->T; distance < a->T; distance++)
        bias[distance + a->T - 1] = a->relative[mp_t5_bucket(distance, a->buckets, a->reach) * a->heads + head];
}

bool mp_diff_attend(mp_diff_lane *l, const mp_diff_attention *a) {
    const mp_attn_full_function full = mp_attn_full_for(a->compute, a->T, a->head_dim);
    const int each = full == mp_kernels_get()->attn_full ? ATTEND_ROWS : ATTEND_ROWS_BF16;
    const int parts = (a->T + each - 1) / each;
    float *bias = a->relative ? (float *)(l->own + mp_arena_cost(mp_attn_full_scratch(a->T, a->head_dim))) : NULL;
    int64_t from, to;
    int known = -1; /* head whose bias is there */
    mp_lane_split(l->lane, (int64_t)a->heads * parts, 1, &from, &to);
    for (int64_t unit = from; unit < to && !mp_diff_poll(l); unit++) {
        const int head = (int)(unit / parts), row0 = (int)(unit % parts) * each;
        const int64_t column = (int64_t)head * a->head_dim;
        if (bias && known != head)
            relative_bias(a, known = head, bias);
        mp_attn_full attention = {
            .q = a->q + column,
            .k = a->k + column,
            .v = a->v + column,
            .ld = a->ld,
            .out = a->out + column,
            .ld_out = a->ld_out,
            .T = a->T,
            .D = a->head_dim,
            .scale = a->scale,
            .causal = a->causal,
            .bias = bias ? bias + a->T - 1 : NULL,
            .ld_bias = -1,
        };
        full(&attention, row0, row0 + each < a->T ? row0 + each : a->T, l->own);
    }
    return mp_diff_meet(l);
}
