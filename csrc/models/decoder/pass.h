/* decoder/pass.h: what decoder/plan.c and decoder/decoder.c share. */
#ifndef MP_MODELS_DECODER_PASS_H
#define MP_MODELS_DECODER_PASS_H

#include "models/decoder/decoder.h"

/* A lane's scratch: rows of its own | prepared activations of its own | attention scratch | running state | pointers to
 * KV blocks | a head's rows of latents | a panel of an expert | a panel of weights, while some are not
 * packed. Offsets in bytes; rows start at 0. */
typedef struct mp_thread_layout {
    size_t acts, attention, state, pointers, by_head, expert, panel, bytes;
} mp_thread_layout;

mp_thread_layout mp_decoder_thread_layout(const mp_decoder *model, int most_blocks);
size_t mp_decoder_partial_floats(const mp_decoder *model); /* of one block and KV head in split mode */

/* A pass is made of blocks of rows, and a block goes through a layer before the next one does: what it leaves behind
 * from one product to the next stays in L2, and the layer's weights come from a nearer cache for all blocks but the
 * first. At most MP_DECODER_ROWS, as even as whole tiles of the kernels let them be. Mixtures of experts are one block:
 * a row uses few of them, and each is unpacked once a block. */
enum { MP_DECODER_ROWS = 192, MP_DECODER_TILE = 12 };
/* The most that a block of a pass over M rows, or over any part of them, may have. */
static inline int mp_decoder_most_rows(const mp_decoder *model, int M) {
    return M < MP_DECODER_ROWS || model->experts.count > 0 ? M : MP_DECODER_ROWS;
}
static inline int mp_decoder_block_rows(const mp_decoder *model, int M) {
    int most = mp_decoder_most_rows(model, M), blocks = (M + most - 1) / most, rows = (M + blocks - 1) / blocks;
    rows = (rows + MP_DECODER_TILE - 1) / MP_DECODER_TILE * MP_DECODER_TILE;
    return rows < M ? rows : M;
}

static inline int mp_decoder_blocks(int64_t positions) { return (int)((positions + MP_KV_BLOCK - 1) / MP_KV_BLOCK); }
static inline int mp_decoder_group(const mp_decoder *model) { /* query heads of a group, which share a KV head */
    return model->heads / model->groups;
}
static inline int mp_decoder_kv_head(const mp_decoder *model, int group) {
    return group * model->kv_heads / model->groups;
}

#endif
