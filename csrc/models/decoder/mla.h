/* decoder/mla.h: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in its absorbed form. A token's keys
 * and values of all heads are made of one vector, its latent, and of one rotated key that all heads share; only these
 * are cached. What would make keys of latents is applied to queries instead, and what would make values to what
 * attention has mixed, so that all heads attend to one key head: key [rank + rotated], value [rank], the latent itself.
 *
 *   x -> q_a, norm, q_b (or q) -> each head's plain and rotated part;  plain part by k_b -> query [rank + rotated]
 *   x -> kv_a -> latent, normed, and the shared key
 *   what attention mixes, [heads, rank], by v_b -> [heads, value] -> attn_output
 *
 * k_b and v_b are the halves of kv_b, each head's in turn; they are kept in floats where a file has them quantised:
 * they would have to be turned, and are a small part of such a model. */
#ifndef MP_MODELS_DECODER_MLA_H
#define MP_MODELS_DECODER_MLA_H

#include "models/decoder/decoder.h"

/* Sizes from {arch}.attention.{kv_lora_rank, q_lora_rank, key_length_mla, value_length_mla}; sets those of heads. */
mp_status mp_mla_read_sizes(mp_decoder *model, const mp_spec *spec, mp_error *error);
/* The projections of a layer, but for attn_output; when biased, those of its input have biases. */
mp_status mp_mla_read_layer(mp_decoder *model, mp_builder *builder, int index, bool biased,
                               mp_error *error);
/* Bytes of a tensor once it is packed, if it is one of those that are kept in floats; else 0. */
uint64_t mp_mla_footprint(const mp_tensor_entry *entry, mp_compute compute);

/* Floats a row of pass->latent and of pass->per_head. */
static inline int64_t mp_mla_row(const mp_mla *latent, int32_t heads) {
    int64_t q = latent->q_rank > 0 ? latent->q_rank : (int64_t)heads * (latent->plain + latent->rotated);
    return q + latent->rank + latent->rotated;
}
static inline int64_t mp_mla_per_head(const mp_mla *latent, int32_t heads) {
    int32_t q = latent->plain + latent->rotated;
    return (int64_t)heads * (q > latent->value ? q : latent->value);
}
/* Bytes of scratch that a lane needs for itself. */
size_t mp_mla_thread_scratch(const mp_decoder *model);

/* Queries, keys and values of M rows in [M, hidden], to pass->qkv, not yet rotated. All lanes call it; own: the lane's
 * scratch for linear layers, by_head: of mp_mla_lane_scratch. Ends without a barrier. */
void mp_mla_project(const mp_decoder_pass *pass, const mp_team_thread *thread, const mp_decoder_layer *layer, int M,
                    const float *in, void *own, const mp_unpacked *raw, void *by_head);
/* What attention left in pass->mixed, to pass->per_head, [M, heads * value]. Begins and ends without a barrier. */
void mp_mla_values(const mp_decoder_pass *pass, const mp_team_thread *thread, const mp_decoder_layer *layer, int M,
                   void *by_head);

#endif
