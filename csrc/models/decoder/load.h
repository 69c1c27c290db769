/* decoder/load.h: the steps of loading a decoder that have files of their own, and the packing of experts, at load and
 * by idle workers. */
#ifndef MP_MODELS_DECODER_LOAD_H
#define MP_MODELS_DECODER_LOAD_H

#include "models/decoder/decoder.h"

enum { MP_DECODER_LAYERS = 1024 };

/* Reads sizes, heads, scales and the activation. */
mp_status mp_decoder_read_hyper(mp_decoder *model, const mp_spec *spec, uint32_t flags, mp_error *error);
/* A norm of n components as those of the layers and the output: mp_norm_read's `like` and `bias`. Layer norms have
 * biases if the file has them. */
static inline mp_norm mp_decoder_norm(const mp_decoder *model, int32_t n) {
    return (mp_norm){.n = n, .eps = model->like.eps, .root = model->like.root};
}
static inline mp_norm_bias mp_decoder_norm_bias(const mp_decoder *model) {
    return model->like.root ? MP_NORM_NO_BIAS : MP_NORM_BIAS_IF_THERE;
}
/* Sets the sizes of a layer's attention. Sets `padded_dim` and `qkv_width` of the shape. */
void mp_decoder_set_shape(mp_decoder *model, int layer, mp_attention_shape shape);
/* Composes the layers (decoder/layer.h) and adds their tensors to the builder. */
mp_status mp_decoder_compose(mp_decoder *model, const mp_builder *builder, const mp_load_args *args, float norm_offset,
                             mp_error *error);
/* Returns the cost of all blocks. Call once the weights are loaded. */
mp_block_cost mp_decoder_cost(const mp_decoder *model);
/* Reads the rotary tables, and the table, window and place in the KV cache of each mixer. Call after
 * mp_decoder_compose. */
mp_status mp_decoder_read_layers(mp_decoder *model, const mp_load_args *args, mp_error *error);

/* Sets `balance` of the layers that have norms of queries and keys, or biases. Call it if the cache holds bytes, once
 * all weights are loaded. */
mp_status mp_decoder_balance(mp_decoder *model, mp_error *error);

/* Packs all experts, as long as a third of the memory budget stays free. */
void mp_decoder_pack_experts(mp_decoder *model, mp_lease *lease, mp_progress *progress);
/* `improve` of mp_engine_ops: packs experts that passes would otherwise multiply as stored. */
bool mp_decoder_pack_more(mp_decoder *model, mp_lease *lease);

#endif
