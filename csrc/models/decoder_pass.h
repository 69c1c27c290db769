/* decoder_pass.h: what decoder_plan.c and decoder.c share. */
#ifndef MP_MODELS_DECODER_PASS_H
#define MP_MODELS_DECODER_PASS_H

#include "models/decoder.h"

/* A lane's scratch: rows of its own | prepared activations of its own | attention scratch | running state | pointers to
 * KV blocks | a panel of an expert | a panel of weights, while some are not packed. Offsets in bytes; rows start at
 * 0. */
typedef struct mp_lane_layout {
    size_t acts, attention, state, pointers, expert, panel, bytes;
} mp_lane_layout;

mp_lane_layout mp_decoder_lane_layout(const mp_decoder *model, int most_blocks);
size_t mp_decoder_partial_floats(const mp_decoder *model); /* of one block and KV head in split mode */

static inline int mp_decoder_blocks(int64_t positions) { return (int)((positions + MP_KV_BLOCK - 1) / MP_KV_BLOCK); }
static inline int mp_decoder_group(const mp_decoder *model) { /* query heads that share a KV head */
    return model->heads / model->kv_heads;
}

#endif
