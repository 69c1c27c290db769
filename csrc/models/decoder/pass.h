/* decoder/pass.h: declarations shared by decoder/plan.c and decoder/decoder.c. */
#ifndef MP_MODELS_DECODER_PASS_H
#define MP_MODELS_DECODER_PASS_H

#include "models/decoder/decoder.h"

/* Layout of a thread's scratch: own rows | own prepared activations | attention scratch | running state | pointers to
 * KV blocks | a head's rows of latents | a panel of an expert | a panel of weights, while some are unpacked. Offsets in
 * bytes; rows start at 0. */
typedef struct mp_thread_layout {
    size_t acts, attention, state, pointers, by_head, expert, panel, bytes;
} mp_thread_layout;

mp_thread_layout mp_decoder_thread_layout(const mp_decoder *model, int most_blocks);
size_t mp_decoder_partial_floats(const mp_decoder *model); /* split mode: for one KV block and attention group */

/* A pass consists of row blocks, and all row blocks pass through a layer before the next layer begins. The intermediate
 * results of a row block stay in L2, and all row blocks but the first find the layer's weights in a nearer cache. A row
 * block has at most MP_DECODER_ROWS rows; blocks are as equal as whole kernel tiles allow. MoE models use a single row
 * block, because few rows use an expert, and each block would read and pack its experts again. */
enum { MP_DECODER_ROWS = 192, MP_DECODER_TILE = 12 };
/* Returns the maximum rows of a block in a pass over M rows, or over any part of them. */
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
