/* arch.h: the fields and flags of a row of archs.def, and the arguments of a family's loader. */
#ifndef MP_MODELS_ARCH_H
#define MP_MODELS_ARCH_H

#include "base/shared_memory.h"
#include "files/weights.h"
#include "models/model.h"

/* Flags of a row of archs.def, one enum for each family. tests/python/parity/test_arch_flags.py flips each flag and
 * expects that a fixture's test fails. */

typedef enum mp_encoder_flag { /* without MP_ENCODER_BIAS, a linear layer or norm has a bias if the file has one */
    MP_ENCODER_LEARNED_POSITIONS = 1 << 0, /* a position table is added to the token embeddings */
    MP_ENCODER_TOKEN_TYPES = 1 << 1,       /* a row of the token-type table is added to the embeddings */
    MP_ENCODER_POST_NORM = 1 << 2,         /* norms follow the residual sums and the embeddings */
    MP_ENCODER_BIAS = 1 << 3,              /* every linear layer has a bias */
    MP_ENCODER_ROPE = 1 << 4,              /* rotary position embeddings on queries and keys */
    MP_ENCODER_GATED = 1 << 5,             /* gated feed-forward sublayer */
    MP_ENCODER_RMS_NORM = 1 << 6,          /* RMS norms instead of layer norms */
    MP_ENCODER_HEAD_NORMS = 1 << 7,        /* queries and keys are normed per head, before rotation */
    MP_ENCODER_OUTPUT_NORMS = 1 << 8,      /* each sublayer's output is normed before it is added to the residual sum */
    MP_ENCODER_RELATIVE_BIAS = 1 << 9,     /* attention scores get a learned bias by distance bucket (T5) */
    MP_ENCODER_ALIBI = 1 << 10, /* attention scores fall linearly with distance, with one slope for each head */
    MP_ENCODER_LATENTS = 1 << 11,          /* tokens attend to learned latent vectors before pooling */
    MP_ENCODER_QUERY_NORMS = 1 << 12,      /* queries and keys are normed over all heads together */
    MP_ENCODER_INPUT_TWICE = 1 << 13,      /* after the norm of the attention sublayer the layer input is
                                           * added again, and the sum is normed */
    MP_ENCODER_DISENTANGLED = 1 << 14,     /* scores get products of learned keys and queries of distances:
                                            * nn/relative_attention.h */
} mp_encoder_flag;

typedef enum mp_decoder_flag { /* linear layers have biases if the file has them, whatever the flags */
    MP_DECODER_ROPE_NEOX = 1 << 0, /* rotary pairs are (i, i + d/2), not (2i, 2i + 1); `mpool.rope_neox` overrides it */
    MP_DECODER_SINKS = 1 << 1, /* attention sinks: a learned score per head joins the softmax without a value */
    MP_DECODER_LATENT_ATTENTION = 1 << 2, /* multi-head latent attention: decoder/mla.h */
    MP_DECODER_HEAD_NORMS = 1 << 3,       /* queries and keys are normed per head, before rotation */
    MP_DECODER_OUTPUT_NORMS = 1 << 4,     /* each sublayer's output is normed before it is added to the residual sum */
    MP_DECODER_QUERY_NORMS = 1 << 5,      /* queries and keys are normed over all heads together, before rotation */
    MP_DECODER_NO_INPUT_NORMS = 1 << 6,   /* sublayers read the residual sum as it is */
    MP_DECODER_GATED_HEADS = 1 << 7, /* the query projection has a gate after each head's query: the output of a head is
                                      * multiplied by the gate's sigmoid. Gates of one component need no flag */
} mp_decoder_flag;

typedef enum mp_vit_flag {          /* vision transformers */
    MP_VIT_CLASS_TOKEN = 1 << 0,    /* a learned class row precedes the patches */
    MP_VIT_INPUT_NORM = 1 << 1,     /* layer norm before the first layer */
    MP_VIT_LAYER_SCALE = 1 << 2,    /* each sublayer's output is scaled per component */
    MP_VIT_ANY_SIZE = 1 << 3,       /* position embeddings are interpolated for other image sizes */
    MP_VIT_SMOOTH_SIZE = 1 << 4,    /* the interpolation uses a wider filter when it shrinks the position grid */
    MP_VIT_ATTENTION_POOL = 1 << 5, /* pooling by a learned query over all rows; otherwise the first row is the
                                     * result */
    MP_VIT_ROOT_NORMS = 1 << 6,     /* RMS norms instead of layer norms */
    MP_VIT_AXIAL = 1 << 7,          /* two-dimensional rotary positions; layers may attend within windows, and patches
                                     * stand in window order */
    MP_VIT_ALIGNED = 1 << 8,        /* axial networks also have learned positions, which are interpolated linearly such
                                     * that the corners of both grids coincide */
    MP_VIT_SIDES = 1 << 9,          /* two learned positions per patch, of its column and of its line */
    MP_VIT_NORMED_HEADS = 1 << 10,  /* axial networks: queries, keys, values and the outputs of sublayers are normed;
                                     * products of queries and keys are not scaled; the first half of a head rotates by
                                     * column, the second by line */
    MP_VIT_LINEAR_SIZE = 1 << 11,   /* the interpolation is linear, not cubic; only with MP_VIT_SMOOTH_SIZE */
    MP_VIT_STAGGERED = 1 << 12,     /* axial networks: the frequencies of columns lie between those of lines */
} mp_vit_flag;

typedef enum mp_diffusion_flag {
    MP_DIFFUSION_SINGLE_BLOCKS = 1 << 0, /* text rows and image rows are rotated together and then share the weights of
                                          * single blocks */
} mp_diffusion_flag;

typedef struct mp_load_args {
    mp_spec *spec;
    uint32_t flags;     /* `flags` of the row in archs.def */
    mp_compute compute; /* as requested by the caller */
    mp_lease *lease;
    mp_budget *budget;
    mp_progress *progress;
    /* Memory of the packed weights. NULL: memory of this process. Otherwise the caller owns `shared` and frees it after
     * the model. If `shared` has no data, this load creates and fills it; otherwise the same load in another process
     * has filled it. */
    mp_shm *shared;
} mp_load_args;

/* The functions of a family. model.c has one per family. */
typedef struct mp_family {
    mp_status (*load)(const mp_load_args *args, mp_model **model, mp_error *error);
    void (*footprint)(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes);
    /* See mp_model_predict_weights. NULL: the family packs all matrices at load. */
    mp_matrices (*predict_weights)(const mp_spec *spec, mp_compute compute);
} mp_family;

typedef struct mp_arch {
    const char *name;
    mp_capability capability;
    const mp_family *family;
    uint32_t flags;
} mp_arch;

const mp_arch *mp_arch_find(const char *name); /* the row of archs.def with this name, or NULL */

/* Loaders, memory estimates and predicted use of weights of the families. */
mp_status mp_vision_load(const mp_load_args *args, mp_model **model, mp_error *error);
/* For families of texts: predicts the scratch of an engine for a first request of up to 96 tokens. Later requests take
 * more from the budget, or wait for it. */
uint64_t mp_first_request_bytes(const mp_spec *spec);

void mp_vision_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes);
mp_status mp_vit_load(const mp_load_args *args, mp_model **model, mp_error *error);
void mp_vit_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes);
mp_status mp_lookup_load(const mp_load_args *args, mp_model **model, mp_error *error);
void mp_lookup_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes);
mp_status mp_encoder_load(const mp_load_args *args, mp_model **model, mp_error *error);
mp_status mp_decoder_load(const mp_load_args *args, mp_model **model, mp_error *error);
mp_status mp_diffusion_load(const mp_load_args *args, mp_model **model, mp_error *error);
void mp_diffusion_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes);
void mp_encoder_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes);
void mp_decoder_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes);
mp_matrices mp_decoder_predict_weights(const mp_spec *spec, mp_compute compute);
/* Predicts the bytes of the state of a sequence (generation/states.h); 0 if the model has none. */
uint64_t mp_decoder_state_bytes(const mp_spec *spec);
mp_matrices mp_encoder_predict_weights(const mp_spec *spec, mp_compute compute);
mp_matrices mp_lookup_predict_weights(const mp_spec *spec, mp_compute compute);
mp_matrices mp_vision_predict_weights(const mp_spec *spec, mp_compute compute);

/* Base of every loaded model: a family's struct starts with it. */
typedef struct mp_model_base {
    mp_model base;
    mp_model_facts facts;
    const _Atomic int32_t *unpacked; /* number of matrices with unpacked panels: facts.weights is valid while it is
                                      * above 0; at 0 all are packed. NULL: facts.weights never changes */
    const _Atomic uint64_t *expert_copies; /* bytes of packed copies of experts now; NULL: none are kept */
    uint64_t expert_copies_most;           /* the same if all experts are packed */
    const _Atomic int32_t *thrashing;      /* `thrashing` of the facts; NULL: false */
    _Atomic uint64_t *speed[MP_MODEL_SPEEDS]; /* running speed estimates of the model; NULL: no such estimate */
} mp_model_base;

#endif
