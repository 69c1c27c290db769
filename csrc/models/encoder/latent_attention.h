/* encoder/latent_attention.h: attention to learned vectors between an encoder and its pooling (NV-Embed: Lee et al.,
 * arXiv:2405.17428).
 *
 * Each token's state is normed, looks at `count` latents with several heads and gets what it sees added; then a gated
 * feed-forward layer. Latents and projections do not depend on the text, so what the heads compute is two matrices:
 * queries times keys as one, from a state to its scores, and values times the output projection as one, from weights
 * to what is added. They are multiplied out in fp32 when the model is loaded, head by head, and packed as all weights
 * are. */
#ifndef MP_MODELS_ENCODER_LATENT_ATTENTION_H
#define MP_MODELS_ENCODER_LATENT_ATTENTION_H

#include "models/nn/mlp.h"

typedef struct mp_latent_attention {
    int32_t hidden, heads, count;      /* count: latents */
    mp_linear scores;                  /* [heads * count, hidden], scaled */
    mp_linear values;                  /* [hidden, heads * count] */
    mp_mlp mlp;                        /* gated */
    mp_norm norm, ffn_norm;            /* [hidden] layer norms */
    float eps;
    float *products[2]; /* what is to be packed, between init and packed */
} mp_latent_attention;

/* Reads mpool.latent_* and the tensors latent.*, multiplies on the lease's lanes, and has the builder pack. With
 * `ready` the packed weights are there already: nothing is multiplied. The struct stays where it is. */
mp_status mp_latent_attention_init(mp_latent_attention *latent, mp_builder *builder, int32_t hidden, bool ready,
                                   mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_error *error);
/* When the builder has finished or will not: frees what was packed. */
void mp_latent_attention_packed(mp_latent_attention *latent, mp_budget *budget);

#endif
