/* diffusion/stages.c: the engine's memory, and the parallel region that runs one block. */
#include <stdatomic.h>

#include "models/diffusion/schedule.h"

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static void drop_stage(mp_diffusion_engine *engine, int stage) {
    for (int i = 0; engine->blocks[stage] && i < engine->model->block_count[stage]; i++) {
        mp_diff_block *block = &engine->blocks[stage][i];
        engine->weights -= block->store.charged;
        mp_weight_store_deinit(&block->store);
        *block = (mp_diff_block){0};
    }
}

uint64_t mp_diff_drop_others(mp_diffusion_engine *engine, int stage) {
    const uint64_t before = engine->weights;
    for (int s = 0; s < MP_DIFF_STAGES; s++)
        if (s != stage)
            drop_stage(engine, s);
    return before - engine->weights;
}

static bool stage_take(mp_diffusion_engine *engine, uint64_t bytes, int stage) {
    return mp_budget_take(engine->budget, bytes) ||
           ((mp_diff_drop_others(engine, stage) | mp_diff_cache_trim(&engine->cache)) &&
            mp_budget_take(engine->budget, bytes));
}

/* Grow the scratch to `bytes` bytes if it is smaller. The next block reuses it. */
static mp_status stage_reserve(mp_diffusion_engine *engine, size_t bytes, int stage, mp_error *error) {
    if (bytes <= engine->arena.size)
        return MP_OK;
    mp_engine_release(&engine->arena, engine->budget, &engine->charged);
    if (!stage_take(engine, bytes, stage))
        return mp_fail_memory(error, bytes, "the scratch of a step");
    mp_status status = mp_arena_reserve(&engine->arena, bytes, error);
    if (status != MP_OK) {
        mp_budget_give(engine->budget, bytes);
        return status;
    }
    engine->charged = bytes;
    return MP_OK;
}

mp_status mp_diff_hold(mp_diffusion_engine *engine, mp_diff_memory *memory, int stage, int count, float **const parts[],
                       const size_t sizes[], mp_error *error) {
    size_t bytes = 0;
    for (int i = 0; i < count; i++)
        bytes += mp_arena_cost(sizes[i] * sizeof(float));
    if (!stage_take(engine, bytes, stage))
        return mp_fail_memory(error, bytes, "the state of an image");
    if (!(memory->at = mp_alloc(bytes, MP_TAG_SCRATCH))) {
        mp_budget_give(engine->budget, bytes);
        return mp_fail_memory(error, bytes, "the state of an image");
    }
    memory->bytes = bytes;
    engine->items += bytes;
    uint8_t *at = memory->at;
    for (int i = 0; i < count; i++) {
        *parts[i] = (float *)at;
        at += mp_arena_cost(sizes[i] * sizeof(float));
    }
    return MP_OK;
}

void mp_diff_let_go(mp_diffusion_engine *engine, mp_diff_memory *memory) {
    mp_free(memory->at);
    mp_budget_give(engine->budget, memory->bytes);
    engine->items -= memory->bytes;
    *memory = (mp_diff_memory){0};
}

/* Before a stage is loaded, drop all other stages if more than 70 % of the budget would be used otherwise. A stage that
 * stays saves the next request a load. */
static void make_space(mp_diffusion_engine *engine, int stage) {
    const mp_budget *budget = mp_budget_top(engine->budget);
    const uint64_t limit = atomic_load_explicit(&budget->limit, memory_order_relaxed);
    const uint64_t used = atomic_load_explicit(&budget->used, memory_order_relaxed);
    if (used + engine->model->stage_bytes[stage] > limit / 10 * 7)
        mp_diff_drop_others(engine, stage);
}

/* Build a block's weights on first use. */
static mp_status ensure_block(mp_diffusion_engine *engine, int stage, int index, mp_lease *lease, mp_error *error) {
    mp_diff_block *block = &engine->blocks[stage][index];
    if (block->ready)
        return MP_OK;
    if (index == 0)
        make_space(engine, stage);
    mp_builder builder;
    mp_status status;
    MP_TRY_GOTO(mp_diff_build(engine->model, stage, index, block, &builder, error));
    mp_budget *budget = engine->budget;
    if (!stage_take(engine, block->store.slab_bytes + MP_WMAT_SLACK, stage)) {
        status = mp_fail_memory(error, block->store.slab_bytes, "the weights of a stage");
        goto cleanup;
    }
    mp_budget_give(budget, block->store.slab_bytes + MP_WMAT_SLACK); /* mp_builder_finish charges these bytes again */
    MP_TRY_GOTO(mp_builder_finish(&builder, lease, budget, NULL, error));
    block->ready = true;
    engine->weights += block->store.charged;
cleanup:
    if (status != MP_OK) {
        mp_weight_store_deinit(&block->store);
        *block = (mp_diff_block){0};
    }
    return status;
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

typedef struct job {
    mp_diffusion_engine *engine;
    mp_diff_state *state;
    mp_diff_run run;
    int stage, index;
    bool end; /* run the transformer's output layers */
    bool done;
} job;

static bool run_transformer(mp_diff_thread *l, const mp_diffusion *model, const job *j, const mp_diff_block *blocks) {
    const mp_dit_pass *pass = &j->state->pass;
    if (j->end)
        return mp_dit_end(l, model, &blocks[0].as.ends, pass);
    if (j->index == 0)
        return mp_dit_begin(l, model, &blocks[0].as.ends, pass);
    if (j->index <= model->joint_layers)
        return mp_dit_joint_forward(l, model, &blocks[j->index].as.joint, pass);
    return mp_dit_single_forward(l, model, &blocks[j->index].as.single, pass);
}

static void stage_body(const mp_team_thread *thread, void *arg) {
    job *j = arg;
    const mp_diffusion *model = j->engine->model;
    const mp_diff_block *blocks = j->engine->blocks[j->stage];
    mp_diff_thread l = {thread, &j->run, j->run.own + (size_t)thread->index * j->run.own_bytes, 0};
    bool done;
    if (j->stage == MP_DIFF_TRANSFORMER)
        done = run_transformer(&l, model, j, blocks);
    else if (j->stage == MP_DIFF_DECODER)
        done = mp_vae_forward(&l, model, &blocks[j->index], j->index, &j->state->image_run);
    else
        done = mp_diff_text_forward(&l, &j->state->run, &blocks[j->index], j->index);
    if (thread->index == 0)
        j->done = done;
}

mp_status mp_diff_run_block(mp_diffusion_engine *engine, mp_diff_state *state, mp_lease *lease, int stage, int index,
                            bool *done, mp_error *error) {
    const mp_diffusion *model = engine->model;
    job j = {.engine = engine, .state = state, .stage = stage, .index = index};
    if (stage == MP_DIFF_TRANSFORMER) {
        MP_TRY(ensure_block(engine, stage, 0, lease, error));
        j.end = index == model->block_count[stage];
        j.index = j.end ? 0 : index;
    }
    MP_TRY(ensure_block(engine, stage, j.index, lease, error));
    if (mp_lease_poll(lease)) {
        *done = false;
        return MP_OK;
    }
    const mp_diff_block *block = &engine->blocks[stage][j.index];
    size_t shared;
    if (stage == MP_DIFF_TRANSFORMER) {
        const int64_t rows = (int64_t)state->pass.grid_height * state->pass.grid_width;
        shared = mp_dit_scratch(model, &engine->blocks[stage][0], block, j.index, state->pass.text_rows, rows);
        j.run.own_bytes = mp_dit_own(model, state->pass.text_rows + rows);
    } else if (stage == MP_DIFF_DECODER) {
        const mp_vae_image *image = &state->image_run;
        const int64_t pixels = (int64_t)image->height * image->width << 2 * model->ops[index].doubled;
        shared = mp_vae_scratch(model, block, index, pixels);
        j.run.own_bytes = mp_vae_own(model, block, index, pixels);
    } else {
        shared = mp_diff_text_scratch(model, stage, block, index, state->run.T);
        j.run.own_bytes = mp_diff_text_own(model, stage, state->run.T);
    }
    shared = mp_arena_cost(shared);
    j.run.own_bytes = mp_arena_cost(j.run.own_bytes);
    MP_TRY(stage_reserve(engine, shared + j.run.own_bytes * (size_t)lease->threads, stage, error));
    mp_arena_reset(&engine->arena);
    j.run.lease = lease;
    j.run.shared = mp_arena_take(&engine->arena, shared);
    j.run.own = mp_arena_take(&engine->arena, j.run.own_bytes * (size_t)lease->threads);
    mp_lease_run(lease, stage_body, &j);
    MP_TRY(mp_weights_check_poisoned(model->weights, error));
    *done = j.done;
    return MP_OK;
}
