/* arch.h: what a row of archs.def says, and what a family's loader gets. */
#ifndef MP_MODELS_ARCH_H
#define MP_MODELS_ARCH_H

#include "base/shared_memory.h"
#include "files/weights.h"
#include "models/model.h"

/* Flags of a row, one enum a family. A fixture fails when one of them is flipped (test_arch_flags.py). */

typedef enum mp_encoder_flag { /* biases of linear layers and norms are used where there are any, but for BIAS */
    MP_ENCODER_LEARNED_POSITIONS = 1 << 0, /* a table of positions is added to the embeddings */
    MP_ENCODER_TOKEN_TYPES = 1 << 1,       /* a row of the token-type table is added */
    MP_ENCODER_POST_NORM = 1 << 2,         /* norms stand after the residual sums, and after the embeddings */
    MP_ENCODER_BIAS = 1 << 3,              /* every linear layer has a bias */
    MP_ENCODER_ROPE = 1 << 4,              /* positions are rotated into queries and keys */
    MP_ENCODER_GATED = 1 << 5,             /* the feed-forward half has a gate */
    MP_ENCODER_RMS_NORM = 1 << 6,          /* norms are by the root mean square */
    MP_ENCODER_HEAD_NORMS = 1 << 7,        /* each head's queries and keys are normed before they are rotated */
    MP_ENCODER_OUTPUT_NORMS = 1 << 8,      /* what a half adds to the residual sum is normed, too */
    MP_ENCODER_RELATIVE_BIAS = 1 << 9,     /* scores get a bias by distance, from one table of buckets */
    MP_ENCODER_ALIBI = 1 << 10,            /* scores fall off with distance, each head by a slope of its own */
    MP_ENCODER_LATENTS = 1 << 11,          /* tokens attend to learned vectors before they are pooled */
    MP_ENCODER_QUERY_NORMS = 1 << 12,      /* queries are normed, all heads together, and so are keys */
    MP_ENCODER_INPUT_TWICE = 1 << 13,      /* a layer's input is added to its normed first half, and that normed */
} mp_encoder_flag;

typedef enum mp_decoder_flag {
    MP_DECODER_BIAS = 1 << 0,             /* every linear layer but query, key and value has a bias */
    MP_DECODER_QKV_BIAS = 1 << 1,         /* the query, key and value projections have a bias */
    MP_DECODER_ROPE_NEOX = 1 << 2,        /* rotary pairs are (i, i + d/2), not (2i, 2i + 1); mpool.rope_neox wins */
    MP_DECODER_SINKS = 1 << 3,            /* a head's weights add up to less than 1: a learned score takes the rest */
    MP_DECODER_LATENT_ATTENTION = 1 << 4, /* heads share one latent a token: decoder/mla.h */
    MP_DECODER_HEAD_NORMS = 1 << 5,       /* each head's queries and keys are normed before they are rotated */
    MP_DECODER_OUTPUT_NORMS = 1 << 6,     /* what a half adds to the residual sum is normed, too */
} mp_decoder_flag;

typedef enum mp_vit_flag {          /* image transformers */
    MP_VIT_CLASS_TOKEN = 1 << 0,    /* a learned row stands before the patches */
    MP_VIT_INPUT_NORM = 1 << 1,     /* layer norm before the first layer */
    MP_VIT_LAYER_SCALE = 1 << 2,    /* what a half of a layer adds is scaled by component */
    MP_VIT_ANY_SIZE = 1 << 3,       /* positions are interpolated for images of other sizes */
    MP_VIT_SMOOTH_SIZE = 1 << 4,    /* and with a wider filter where they become fewer */
    MP_VIT_ATTENTION_POOL = 1 << 5, /* a learned query attends to all rows; else the first row counts */
    MP_VIT_ROOT_NORMS = 1 << 6,     /* norms are by the root mean square */
    MP_VIT_AXIAL = 1 << 7,          /* lines and columns are rotated into queries and keys; most layers attend within
                                     * windows, in whose order the patches stand */
} mp_vit_flag;

typedef enum mp_diffusion_flag {
    MP_DIFFUSION_SINGLE_BLOCKS = 1 << 0, /* texts are rotated with the image's rows, then share its weights */
} mp_diffusion_flag;

typedef struct mp_load_args {
    mp_spec *spec;
    uint32_t flags;     /* of the row */
    mp_compute compute; /* as asked for */
    mp_lease *lease;
    mp_budget *budget;
    mp_progress *progress;
    /* NULL: the packed weights are memory of this process. Else they stand here, the caller's, who frees it after the
     * model: made and filled by the load when data is NULL; else filled already, by the same load elsewhere. */
    mp_shm *shared;
} mp_load_args;

typedef struct mp_arch {
    const char *name;
    mp_capability capability;
    mp_status (*load)(const mp_load_args *args, mp_model **model, mp_error *error);
    void (*footprint)(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes);
    uint32_t flags;
} mp_arch;

const mp_arch *mp_arch_find(const char *name); /* a row of archs.def; NULL: there is none */

/* The families. */
mp_status mp_vision_load(const mp_load_args *args, mp_model **model, mp_error *error);
void mp_vision_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes);
mp_status mp_vit_load(const mp_load_args *args, mp_model **model, mp_error *error);
void mp_vit_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes);
mp_status mp_encoder_load(const mp_load_args *args, mp_model **model, mp_error *error);
mp_status mp_decoder_load(const mp_load_args *args, mp_model **model, mp_error *error);
mp_status mp_diffusion_load(const mp_load_args *args, mp_model **model, mp_error *error);
void mp_diffusion_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes);
void mp_encoder_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes);
void mp_decoder_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes);

/* What every model carries behind mp_model; a family's struct starts with it. */
typedef struct mp_model_base {
    mp_model base;
    mp_model_facts facts;
    _Atomic uint64_t *speed[MP_MODEL_SPEEDS]; /* its running estimates, or NULL */
} mp_model_base;

#endif
