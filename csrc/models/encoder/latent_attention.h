/* encoder/latent_attention.h: attention to learned latent vectors between an encoder and its pooling (NV-Embed: Lee et
 * al., arXiv:2405.17428).
 *
 * Each token's state is normed, attends to `count` latents with several heads, and the result is added to the state; a
 * gated MLP follows. Latents and projections do not depend on the text, so two precomputed matrices suffice: the
 * product of query projection and keys maps a state to its scores, and the product of values and output projection maps
 * attention weights to the output. Loading computes both products in fp32, head by head, and packs them like all
 * weights. */
#ifndef MP_MODELS_ENCODER_LATENT_ATTENTION_H
#define MP_MODELS_ENCODER_LATENT_ATTENTION_H

#include "models/nn/mlp.h"

typedef struct mp_latent_attention {
    int32_t hidden, heads, count;      /* count: number of latents */
    mp_linear scores;                  /* [heads * count, hidden], scaled */
    mp_linear values;                  /* [hidden, heads * count] */
    mp_mlp mlp;                        /* gated */
    mp_norm norm, ffn_norm;            /* [hidden] layer norms */
    float eps;
    float *products[2]; /* unpacked products; NULL except between mp_latent_attention_init and
                         * mp_latent_attention_free_unpacked */
} mp_latent_attention;

/* Reads mpool.latent_* and the tensors latent.*, multiplies on the lease's threads, and registers the products with the
 * builder. If `ready`, the packed weights exist already and nothing is multiplied. `latent` must not move until the
 * builder has finished. */
mp_status mp_latent_attention_init(mp_latent_attention *latent, const mp_builder *builder, int32_t hidden, bool ready,
                                   mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_error *error);
/* Call after the builder has finished or was abandoned. Frees the unpacked matrices. */
void mp_latent_attention_free_unpacked(mp_latent_attention *latent, mp_budget *budget);

#endif
