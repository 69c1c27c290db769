#include "models/nn/ffn.h"

#include <assert.h>
#include <string.h>

/* ---- plain and gated --------------------------------------------------------------------------------------------- */

static void dense_needs(const mp_ffn *ffn, int M, mp_block_needs *needs) {
    const mp_mlp *mlp = &ffn->mlp;
    mp_needs_linear(needs, &mlp->up, M);
    mp_needs_linear(needs, &mlp->down, M);
    const size_t shared = needs->least_joined > 0 ? mp_mlp_most_scratch(mlp, M) : mp_mlp_scratch(mlp, M);
    mp_needs_scratch(needs, mp_arena_cost(shared), mp_arena_cost(mp_mlp_own_scratch(mlp)));
}

static void dense_cost(const mp_ffn *ffn, mp_block_cost *cost) {
    mp_cost_linear(cost, &ffn->mlp.up);
    mp_cost_linear(cost, &ffn->mlp.down);
    cost->barriers += 2;
}

static bool dense_add(const mp_row_context *context, const mp_ffn *ffn, const float *in, int M, float scale,
                      void *shared, void *own, const mp_residual *sum) {
    return mp_mlp_add(context, &ffn->mlp, in, sum->n, M, scale, shared, own, sum);
}

const mp_ffn_ops mp_ffn_dense = {dense_needs, dense_cost, dense_add, false};

/* ---- experts ----------------------------------------------------------------------------------------------------- */

/* Bytes of M rows of the experts. */
static size_t rows_bytes(const mp_ffn *ffn, int M) {
    return mp_arena_cost((size_t)M * (size_t)ffn->experts.hidden * sizeof(float));
}

static bool has_latents(const mp_ffn *ffn) { return ffn->mlp.up.parts > 0; }

/* Bytes of the latents of M rows. */
static size_t latents_bytes(const mp_ffn *ffn, int M) {
    return mp_arena_cost((size_t)M * (size_t)ffn->mlp.up.N * sizeof(float));
}

static void experts_needs(const mp_ffn *ffn, int M, mp_block_needs *needs) {
    const size_t normed = ffn->norm.n > 0 ? 3 * rows_bytes(ffn, M) : 2 * latents_bytes(ffn, M);
    mp_needs_scratch(needs, mp_arena_cost(mp_experts_scratch(&ffn->experts, M)) + normed,
                     mp_experts_thread_scratch(&ffn->experts));
    if (has_latents(ffn)) {
        mp_needs_linear(needs, &ffn->mlp.up, M);
        mp_needs_linear(needs, &ffn->mlp.down, M);
    }
}

static void experts_cost(const mp_ffn *ffn, mp_block_cost *cost) {
    const mp_experts *experts = &ffn->experts;
    const mp_expert_matrix *const matrices[] = {&experts->up, &experts->down, &experts->gate};
    for (int i = 0; i < (experts->plain ? 2 : 3); i++) {
        cost->idle += (int64_t)(experts->count - experts->used) * matrices[i]->N * matrices[i]->K;
        cost->mapped += (uint64_t)experts->used * mp_expert_bytes(matrices[i]);
        cost->rounded += matrices[i]->kind != MP_W_F32;
    }
    mp_cost_linear(cost, &ffn->mlp.up);
    mp_cost_linear(cost, &ffn->mlp.down);
    cost->barriers += has_latents(ffn) ? 11 : ffn->norm.n > 0 ? 9 : 8;
}

/* Adds experts that see latents of the rows. */
static bool latents_add(const mp_row_context *context, const mp_ffn *ffn, const float *in, int M, float scale,
                        uint8_t *shared, void *own, const mp_residual *sum) {
    const int64_t width = ffn->mlp.up.N;
    float *const x = mp_scratch_take(&shared, latents_bytes(ffn, M));
    float *const y = mp_scratch_take(&shared, latents_bytes(ffn, M));
    mp_row_linear(context, &ffn->mlp.up, in, sum->n, M, NULL, x, width);
    mp_team_loop loop = mp_team_rows(context->thread, M, width);
    while (mp_team_next(context->thread, &loop))
        memset(y + loop.begin * width, 0, (size_t)((loop.end - loop.begin) * width) * sizeof *y);
    if (!mp_row_meet(context))
        return false;
    mp_experts_forward(&ffn->experts, context->thread, in, x, M, scale, shared, own, context->lease, y);
    return mp_row_meet(context) && mp_residual_add(context, &ffn->mlp.down, y, width, M, NULL, sum);
}

/* Adds experts with norms of their own. */
static bool normed_add(const mp_row_context *context, const mp_ffn *ffn, const float *in, int M, float scale,
                       uint8_t *shared, void *own, const mp_residual *sum) {
    const int64_t n = sum->n;
    float *const routed = mp_scratch_take(&shared, rows_bytes(ffn, M));
    float *const x = mp_scratch_take(&shared, rows_bytes(ffn, M));
    float *const y = mp_scratch_take(&shared, rows_bytes(ffn, M));
    mp_team_loop before = mp_team_rows(context->thread, M, 2 * n);
    while (mp_team_next(context->thread, &before))
        for (int64_t r = before.begin; r < before.end; r++) {
            mp_norm_row(&ffn->norm, in + r * n, x + r * n);
            mp_norm_row(&ffn->router_norm, in + r * n, routed + r * n);
            for (int64_t i = r * n; i < (r + 1) * n; i++)
                routed[i] *= ffn->router_scale;
            memset(y + r * n, 0, (size_t)n * sizeof *y);
        }
    if (!mp_row_meet(context))
        return false;
    mp_experts_forward(&ffn->experts, context->thread, routed, x, M, scale, shared, own, context->lease, y);
    if (!mp_row_meet(context))
        return false;
    mp_team_loop after = mp_team_rows(context->thread, M, n);
    while (mp_team_next(context->thread, &after))
        for (int64_t r = after.begin; r < after.end; r++) {
            mp_norm_row(sum->after, y + r * n, y + r * n);
            mp_residual_row(sum, y + r * n, r);
        }
    return true;
}

static bool experts_add(const mp_row_context *context, const mp_ffn *ffn, const float *in, int M, float scale,
                        void *shared, void *own, const mp_residual *sum) {
    if (ffn->norm.weight)
        return normed_add(context, ffn, in, M, scale, shared, own, sum);
    assert(!sum->scale && !(sum->after && sum->after->weight));
    if (has_latents(ffn))
        return latents_add(context, ffn, in, M, scale, shared, own, sum);
    mp_experts_forward(&ffn->experts, context->thread, in, in, M, scale, shared, own, context->lease, sum->x);
    return true;
}

const mp_ffn_ops mp_ffn_experts = {experts_needs, experts_cost, experts_add, true};

/* ---- LAuReL ------------------------------------------------------------------------------------------------------ */

static void laurel_needs(const mp_ffn *ffn, int M, mp_block_needs *needs) {
    mp_needs_linear(needs, &ffn->mlp.up, M);
    mp_needs_linear(needs, &ffn->mlp.down, M);
    mp_needs_scratch(needs, mp_arena_cost((size_t)M * (size_t)ffn->mlp.ffn * sizeof(float)), 0);
}

static bool laurel_add(const mp_row_context *context, const mp_ffn *ffn, const float *in, int M, float scale,
                       void *shared, void *own, const mp_residual *sum) {
    const int64_t n = sum->n;
    float *const inner = shared;
    (void)scale, (void)own;
    mp_row_linear(context, &ffn->mlp.up, in, n, M, NULL, inner, ffn->mlp.ffn);
    if (!mp_row_meet(context))
        return false;
    mp_row_linear(context, &ffn->mlp.down, inner, ffn->mlp.ffn, M, NULL, sum->scratch, n);
    if (!mp_row_meet(context))
        return false;
    mp_team_loop loop = mp_team_rows(context->thread, M, n);
    while (mp_team_next(context->thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++) {
            float *const out = sum->scratch + r * n;
            mp_norm_row(&ffn->after, out, out);
            mp_kernels_get()->add(in + r * n, n, out);
            mp_residual_row(sum, out, r);
        }
    return true;
}

const mp_ffn_ops mp_ffn_laurel = {laurel_needs, dense_cost, laurel_add, false};

void mp_ffn_deinit(mp_ffn *ffn) { mp_experts_deinit(&ffn->experts); }
