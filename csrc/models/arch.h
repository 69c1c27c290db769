/* arch.h: what a row of archs.def says, and what a family's loader gets. */
#ifndef MP_MODELS_ARCH_H
#define MP_MODELS_ARCH_H

#include "base/shared_memory.h"
#include "files/weights.h"
#include "models/model.h"

enum {                                     /* flags of a row; a fixture fails when one of them is flipped */
       MP_ARCH_LEARNED_POSITIONS = 1 << 0, /* a table of positions is added to the embeddings */
       MP_ARCH_TOKEN_TYPES = 1 << 1,       /* row 0 of the token-type table is added */
       MP_ARCH_POST_NORM = 1 << 2,         /* layer norm after the residual sum, and after the embeddings */
       MP_ARCH_BIAS = 1 << 3,              /* every linear layer has a bias (decoders: every other) */
       MP_ARCH_QKV_BIAS = 1 << 4,          /* the query, key and value projections have a bias */
       MP_ARCH_ROPE_NEOX = 1 << 5,         /* rotary pairs are (i, i + d/2), not (2i, 2i + 1) */
       MP_ARCH_SINKS = 1 << 6,             /* a head's weights add up to less than 1: a learned score takes the rest */
       MP_ARCH_LATENT_ATTENTION = 1 << 7,  /* heads share one latent a token: decoder/mla.h */
       MP_ARCH_HEAD_NORMS = 1 << 23,       /* each head's queries and keys are normed before they are rotated */
       MP_ARCH_OUTPUT_NORMS = 1 << 24,     /* what a layer adds to the residual sum is normed, too */
       /* of encoders; biases of linear layers and norms are used where there are any, but for MP_ARCH_BIAS */
       MP_ARCH_ROPE = 1 << 20,          /* positions are rotated into queries and keys */
       MP_ARCH_GATED = 1 << 21,         /* the feed-forward layer has a gate */
       MP_ARCH_RMS_NORM = 1 << 22,      /* norms are by the root mean square */
       MP_ARCH_RELATIVE_BIAS = 1 << 25, /* scores get a bias by distance, from one table of buckets */
       MP_ARCH_ALIBI = 1 << 26,         /* scores fall off with distance, each head by a slope of its own */
       MP_ARCH_LATENTS = 1 << 27,       /* tokens look at learned vectors before they are pooled */
       MP_ARCH_QUERY_NORMS = 1 << 28,   /* queries are normed, all heads together, and so are keys */
       MP_ARCH_INPUT_TWICE = 1 << 29,   /* a layer's input is added to its normed first half again, and that normed */
       MP_ARCH_SINGLE_BLOCKS = 1 << 30,    /* pictures: texts turn with the picture's rows, then share its weights */
};

enum {                                    /* of image transformers; the bits mean something else to other families */
       MP_ARCH_CLASS_TOKEN = 1 << 20,     /* a learned row stands before the patches */
       MP_ARCH_INPUT_NORM = 1 << 21,      /* layer norm before the first layer */
       MP_ARCH_LAYER_SCALE = 1 << 22,     /* what a half of a layer adds is scaled by component */
       MP_ARCH_ANY_SIZE = 1 << 23,        /* positions are interpolated for images of other sizes */
       MP_ARCH_SMOOTH_SIZE = 1 << 24,     /* and with a wider filter where they become fewer */
       MP_ARCH_ATTENTION_POOL = 1 << 25,  /* a learned query looks at all rows; else the first row counts */
       MP_ARCH_ROOT_NORMS = 1 << 26,      /* norms are by the root mean square */
       MP_ARCH_AXIAL = 1 << 27,           /* lines and columns are rotated into queries and keys; most layers look at
                                           * windows, by which the patches stand */
};

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
/* The flags of a row for a model's files: GGUF files hold some families' query and key rows permuted for adjacent
 * pairs; folders hold them as trained. */
mp_status mp_arch_flags(const mp_arch *arch, const mp_spec *spec, uint32_t *flags, mp_error *error);

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
