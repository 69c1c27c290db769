/* encoder/encoder.h: bidirectional transformers over packed rows: the tokens of all texts of a group are concatenated,
 * attention runs per text, and nothing is padded. Internal to this folder. */
#ifndef MP_MODELS_ENCODER_ENCODER_H
#define MP_MODELS_ENCODER_ENCODER_H

#include "models/arch.h"
#include "models/dedup.h"
#include "models/encoder/heads.h"
#include "models/encoder/latent_attention.h"
#include "models/nn/adapter.h"
#include "models/nn/embedding.h"
#include "models/nn/pooling.h"
#include "models/nn/transformer.h"

/* A gated short convolution in place of attention (LFM2, arXiv:2511.23404). `qkv` of the layer then projects to three
 * parts b, c and x of the model's width, and mixed = c * conv(b * x). */
typedef struct mp_encoder_conv {
    float *kernel, *bias; /* [taps, hidden], [hidden] or NULL; kernel NULL: the layer has attention */
} mp_encoder_conv;

typedef struct mp_encoder_layer {
    mp_transformer_layer base; /* MP_ENCODER_POST_NORM: norms follow the residual additions. q_norm, k_norm: [head_dim];
                                * with MP_ENCODER_QUERY_NORMS, one norm over all heads */
    mp_norm input_norm;        /* MP_ENCODER_INPUT_TWICE: [hidden] norm of the sum of the attention sublayer's result
                                * and the layer's input */
    mp_relative_layer relative; /* MP_ENCODER_DISENTANGLED */
    mp_encoder_conv conv;
} mp_encoder_layer;

typedef struct mp_encoder {
    mp_model_base base;
    mp_weights *weights;
    mp_budget *budget;
    mp_weight_store store;
    uint64_t charged; /* bytes charged to the budget, besides those of the store */
    uint32_t flags; /* MP_ENCODER_* */
    mp_compute compute;
    int32_t hidden, ffn, layer_count, vocab, context;
    int32_t depth;  /* layers that a pass computes; layers may share weights, so `layers` may have fewer */
    int32_t *order; /* [depth] the element of `layers` of each layer that a pass computes; owned */
    mp_attention attention;
    int32_t q_width, kv_width, qkv_width; /* columns of the queries of all heads; of the keys; of queries, keys and
                                           * values together, or of the parts of a convolution if these are more */
    int32_t experts, experts_used;        /* 0: no experts */
    int32_t experts_every;                /* layers 1, 1 + experts_every, ... have experts */
    mp_routing routing;
    int32_t taps, taps_before; /* taps of short convolutions, 0: there are none; those before the row itself */
    float *no_row;             /* [hidden] zeros, a row outside of a text; NULL without convolutions; owned */
    float eps;
    mp_act act;
    mp_embedding embedding;
    mp_linear projection; /* embeddings [embedding.n] to hidden states [hidden]; no parts: they are hidden states */
    mp_norm projected_norm; /* [hidden] norm of the projected embeddings */
    int32_t token_types;  /* 1, or 2 if the second text of a pair has token type 1 */
    float *position_bias; /* owned; attention.bias points to it */
    mp_relative relative;   /* MP_ENCODER_DISENTANGLED */
    float *relative_tables; /* the learned keys and queries of all layers; owned */
    mp_norm output_norm;  /* [hidden] norm after the last layer */
    mp_rope rope[2];      /* [0]: layers with full attention; [1]: layers with a window; if rope[1].dim is 0, they use
                           * rope[0] */
    mp_encoder_layer *layers;
    mp_adapters adapters;
    mp_latent_attention latent; /* MP_ENCODER_LATENTS; else zeros */
    mp_head head;
    bool pooled; /* texts have vectors: `head` is in use */
    mp_row_head row_head;
    mp_sparse_head sparse_head;
    _Atomic uint64_t token_ns; /* running mean of the time of a step per token, in ns */
    mp_recent recent;          /* vectors of recent texts */
} mp_encoder;

typedef struct mp_encoder_text { /* one text of a group */
    const int32_t *ids;          /* [n] */
    int32_t n, row;              /* length; first row in the group */
    int32_t skip;   /* leading tokens that pooling leaves out */
    int32_t second; /* index of the first token of the second text of a pair; n: not a pair */
    int32_t attended; /* leading tokens that all tokens attend to; n: all */
    int32_t dimensions; /* components of `out` */
    uint8_t outputs; /* mask of MP_EMBED_* */
    uint8_t adapter; /* number of the adapter (mp_adapters_find); 0: none */
    bool normalize, normalize_rows, finite; /* finite: no output has NaN or infinity, set by mp_encoder_forward */
    float *out;    /* [dimensions] */
    float *states; /* [n, hidden] */
    float *rows;   /* [n, row width] */
    mp_sparse_text sparse;
} mp_encoder_text;

/* Mask of the outputs that the model has. */
unsigned mp_encoder_outputs(const mp_encoder *model);
/* mp_encoder_group_scratch: bytes of scratch of a group of M rows.
 * mp_encoder_thread_scratch: bytes per thread, for texts of up to T tokens in groups of up to M rows; less once all
 * weights are packed. `outputs`: mask of the outputs that texts ask for. */
size_t mp_encoder_group_scratch(const mp_encoder *model, int M, unsigned outputs);
size_t mp_encoder_thread_scratch(const mp_encoder *model, int T, int M, unsigned outputs);
/* Compute a group. Call on all threads of the region with the same group and group scratch, each with its own thread
 * scratch. lease: reports progress. Sets `finite` of every text. The bits do not depend on the grouping or the threads.
 * Ends WITHOUT a barrier: the outputs are complete at the end of the region. */
void mp_encoder_forward(const mp_encoder *model, const mp_team_thread *thread, mp_encoder_text *texts, int count, int M,
                        mp_lease *lease, void *group_scratch, void *thread_scratch);
/* Maximum barriers of a pass. */
int mp_encoder_barriers(const mp_encoder *model);

/* Loads what MP_ENCODER_DISENTANGLED adds, after the layers were listed: reads `mpool.relative_*` and the table of
 * distances, and computes each layer's learned keys and queries. Adds to `parameters` those of the tensors. */
mp_status mp_encoder_read_relative(mp_encoder *model, mp_lease *lease, mp_budget *budget, mp_progress *progress,
                                   int64_t *parameters, mp_error *error);
/* Predicts the bytes of these tables; 0: none. */
uint64_t mp_encoder_relative_bytes(const mp_spec *spec);

mp_status mp_encoder_engine(mp_model *model, mp_budget *budget, mp_engine **engine, mp_error *error);
mp_status mp_encoder_check(const mp_model *model, mp_request *request, uint64_t *cost_ns, uint32_t *total,
                           mp_error *error);

#endif
