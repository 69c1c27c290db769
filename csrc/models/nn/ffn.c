#include "models/nn/ffn.h"

#include <assert.h>

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

static void experts_needs(const mp_ffn *ffn, int M, mp_block_needs *needs) {
    mp_needs_scratch(needs, mp_arena_cost(mp_experts_scratch(&ffn->experts, M)),
                     mp_experts_thread_scratch(&ffn->experts));
}

static void experts_cost(const mp_ffn *ffn, mp_block_cost *cost) {
    const mp_experts *experts = &ffn->experts;
    const mp_expert_matrix *const matrices[] = {&experts->up, &experts->down, &experts->gate};
    for (int i = 0; i < (experts->plain ? 2 : 3); i++) {
        cost->idle += (int64_t)(experts->count - experts->used) * matrices[i]->N * matrices[i]->K;
        cost->mapped += (uint64_t)experts->used * mp_expert_bytes(matrices[i]);
        cost->rounded += matrices[i]->kind != MP_W_F32;
    }
    cost->barriers += 8;
}

static bool experts_add(const mp_row_context *context, const mp_ffn *ffn, const float *in, int M, float scale,
                        void *shared, void *own, const mp_residual *sum) {
    assert(!sum->scale && !(sum->after && sum->after->weight));
    mp_experts_forward(&ffn->experts, context->thread, in, M, scale, shared, own, context->lease, sum->x);
    return true;
}

const mp_ffn_ops mp_ffn_experts = {experts_needs, experts_cost, experts_add, true};

void mp_ffn_deinit(mp_ffn *ffn) { mp_experts_deinit(&ffn->experts); }
