/* image/cost.c: the cost of image transformers, in operations and in time. */
#include <stdatomic.h>

#include "models/image/vit.h"

enum {
    PART_MS = 10,           /* duration of a part: a step of 25 ms then ends close to its limit */
    MIN_OPS = 200000000,    /* minimum operations of a part: below it, barriers and reading the weights cost noticeable
                             * time */
    SLOWEST_NS = 100000000  /* upper bound of the time per million operations */
};

static uint64_t inner_width(const mp_vit *model) { return (uint64_t)model->ffn * (model->gated ? 2 : 1); }

uint64_t mp_vit_keys_ops(const mp_vit *model) { return 4 * (uint64_t)model->hidden * (uint64_t)model->hidden; }

uint64_t mp_vit_queries_ops(const mp_vit *model) { return mp_vit_keys_ops(model) / 2; }

uint64_t mp_vit_before_ops(const mp_vit *model) { return mp_vit_keys_ops(model) + mp_vit_queries_ops(model); }

uint64_t mp_vit_after_ops(const mp_vit *model) {
    return 2 * (uint64_t)model->hidden * ((uint64_t)model->hidden + inner_width(model) + (uint64_t)model->ffn);
}

uint64_t mp_vit_attention_ops(const mp_vit *model, int64_t rows, int64_t T) {
    return 4 * (uint64_t)model->head_dim * (uint64_t)rows * (uint64_t)T;
}

/* Sum of the squares of the windows' sides, along one side of an image. */
static uint64_t cost_squares(int32_t side, int32_t window) {
    uint64_t rest = (uint64_t)(side % window), whole = (uint64_t)window;
    return (uint64_t)(side / window) * whole * whole + rest * rest;
}

uint64_t mp_vit_image_ops(const mp_vit *model, int32_t down, int32_t across, bool first_only) {
    const uint64_t rows = (uint64_t)mp_vit_rows(model, down, across), patches = (uint64_t)down * (uint64_t)across;
    const int32_t side = model->window * model->cell;
    uint64_t ops = 2 * patches * (uint64_t)model->patches.K * (uint64_t)model->hidden;
    for (int l = 0; l < model->layer_count; l++) {
        uint64_t seen = model->layers[l].windowed ? cost_squares(down, side) * cost_squares(across, side) : rows * rows;
        uint64_t queries = rows;
        if (first_only && l == model->layer_count - 1) {
            queries = 1;
            seen = rows;
        }
        ops += rows * mp_vit_keys_ops(model) + queries * (mp_vit_queries_ops(model) + mp_vit_after_ops(model)) +
               4 * (uint64_t)model->hidden * seen;
    }
    return ops;
}

/* Upper bound of the number of parts: each part has at least `grain` rows (in attention: rows of one head), except the
 * last part of a sequence. */
uint64_t mp_vit_image_parts(const mp_vit *model, int32_t down, int32_t across) {
    const uint64_t grain = (uint64_t)model->grain, heads = (uint64_t)model->heads;
    const uint64_t rows = (uint64_t)mp_vit_rows(model, down, across), grains = (rows + grain - 1) / grain;
    const int32_t side = model->window * model->cell;
    uint64_t parts = grains + (model->attention_pool ? grains : 0);
    for (int l = 0; l < model->layer_count; l++) {
        uint64_t part_count = grains;
        if (model->layers[l].windowed)
            part_count = (uint64_t)((down + side - 1) / side) * (uint64_t)((across + side - 1) / side) *
                         (((uint64_t)side * (uint64_t)side + grain - 1) / grain);
        parts += 2 * grains + heads * part_count;
    }
    return parts;
}

uint64_t mp_vit_ns(const mp_vit *model, uint64_t ops) {
    return ops / 1000 * atomic_load_explicit(&model->mega_ns, memory_order_relaxed) / 1000 + 1;
}

uint64_t mp_vit_part_ops(const mp_vit *model) {
    uint64_t mega_ns = atomic_load_explicit(&model->mega_ns, memory_order_relaxed);
    uint64_t ops = (uint64_t)PART_MS * 1000000 / mega_ns * 1000000;
    ops = ops > MIN_OPS ? ops : MIN_OPS;
    return ops < model->most_ops ? ops : model->most_ops;
}

void mp_vit_learn(mp_vit *model, uint64_t ops, uint64_t ns) {
    if (ops == 0)
        return;
    uint64_t now = ns / ops < SLOWEST_NS / 1000000 ? ns * 1000000 / ops : SLOWEST_NS;
    uint64_t old = atomic_load_explicit(&model->mega_ns, memory_order_relaxed);
    atomic_store_explicit(&model->mega_ns, (3 * old + now) / 4 + 1, memory_order_relaxed);
}
