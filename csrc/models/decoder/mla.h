/* decoder/mla.h: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in absorbed form. The keys and values of
 * all heads derive from one vector per token, its latent, and one rotated key that all heads share. Only these two are
 * cached. The key up-projection is absorbed into the queries, and the value up-projection is applied to the output of
 * attention. So all heads attend to one key head: key [rank + rotated], value [rank], the latent itself.
 *
 *   x -> q_a, norm, q_b (or q) -> each head's plain and rotated part;  plain part by k_b -> query [rank + rotated]
 *   x -> kv_a -> latent, normed, and the shared key
 *   output of attention, [heads, rank], by v_b -> [heads, value] -> attn_output
 *
 * k_b and v_b are the halves of kv_b, head by head. If a file stores these matrices quantised, they are converted to
 * floats, because k_b must be transposed; they are a small part of the model. */
#ifndef MP_MODELS_DECODER_MLA_H
#define MP_MODELS_DECODER_MLA_H

#include "models/decoder/decoder.h"

/* Reads the sizes {arch}.attention.{kv_lora_rank, q_lora_rank, key_length_mla, value_length_mla} and derives the sizes
 * of heads from them. */
mp_status mp_mla_read_sizes(mp_decoder *model, const mp_spec *spec, mp_error *error);
/* Returns true for the names of k_b, v_b and kv_b, which are packed as floats. */
bool mp_mla_is_latent(const char *name);
/* Predicts the packed bytes of k_b, v_b or kv_b; 0 if the load will fail. */
uint64_t mp_mla_footprint(const mp_tensor_entry *entry, mp_compute compute);

#endif
