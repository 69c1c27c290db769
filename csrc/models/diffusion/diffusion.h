/* diffusion.h: image generation by flow matching: text encoders, a transformer that denoises latents, a decoder.
 *
 *   texts --encoders--> rows and one pooled vector --transformer, once or twice a step--> latents --decoder--> pixels
 *
 * A stage is one network. Its weights are blocks, each built on first use and each with memory of its own. So loading
 * can be cancelled between two blocks, and a finished stage can give its memory to the next. Internal to this folder;
 * other folders include models/arch.h.
 *
 * Sources: "Scaling Rectified Flow Transformers" (arXiv:2403.03206), the published configurations of FLUX.1 and Stable
 * Diffusion 3.5, CLIP (arXiv:2103.00020), T5 (arXiv:1910.10683), "High-Resolution Image Synthesis with Latent Diffusion
 * Models" (arXiv:2112.10752). */
#ifndef MP_MODELS_DIFFUSION_DIFFUSION_H
#define MP_MODELS_DIFFUSION_DIFFUSION_H

#include "models/arch.h"
#include "models/nn/conv.h"
#include "models/nn/embedding.h"
#include "models/nn/transformer.h"

enum {
    MP_DIFF_ENCODERS = 3, /* CLIP-L, CLIP-G, T5, in this order; a model may lack any of them */
    MP_DIFF_AXES = 3,     /* axes of rotary positions */
    MP_DIFF_LEVELS = 8,   /* maximum resolutions of a decoder */
    MP_DIFF_PATCH = 2,    /* a row of the transformer is a patch of this many latents a side */
    MP_DIFF_WAVES = 256,  /* components of a timestep's sinusoidal embedding */
};

#define MP_DIFF_EPS 1e-6f /* epsilon of every norm of the transformer */

typedef enum mp_diff_stage_id {
    MP_DIFF_CLIP_L,
    MP_DIFF_CLIP_G,
    MP_DIFF_T5,
    MP_DIFF_TRANSFORMER,
    MP_DIFF_DECODER,
    MP_DIFF_STAGES
} mp_diff_stage_id;

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

typedef struct mp_text_end { /* follows the last layer of a text encoder */
    mp_norm norm;         /* [hidden] */
    mp_linear projection; /* CLIP; parts 0: none */
} mp_text_end;

/* Weights of a block for one kind of rows, text or image. A modulation has one part for each vector that it outputs, in
 * this order: shift, scale and gate of the attention, then those of the MLP, then those of the second attention. */
typedef struct mp_dit_side {
    mp_linear modulation, qkv, out, up, down;
    mp_norm q_norm, k_norm; /* [head_dim]; skipped if it has no weight */
} mp_dit_side;
typedef struct mp_dit_joint {
    mp_dit_side text, image;
    bool last;           /* the text rows contribute only keys and values; their modulation is (shift, scale) */
    bool dual;           /* a second attention runs over the image rows alone */
    mp_linear qkv2, out2;
    mp_norm q_norm2, k_norm2;
} mp_dit_joint;
typedef struct mp_dit_single {
    mp_linear modulation, qkv, up, out; /* out takes the concatenated outputs of the attention and the MLP */
    mp_norm q_norm, k_norm;
} mp_dit_single;
typedef struct mp_dit_ends {
    mp_linear rows, texts;          /* projections to the hidden width */
    mp_linear time[2], guidance[2], pooled[2];
    mp_linear modulation, velocity; /* (shift, scale); projection to latents */
} mp_dit_ends;

typedef enum mp_vae_kind { MP_VAE_CONV, MP_VAE_RESIDUAL, MP_VAE_ATTENTION, MP_VAE_END } mp_vae_kind;
typedef struct mp_vae_op { /* one step of the decoder; its weights are in the block with the same index */
    mp_vae_kind kind;
    int32_t in, out; /* channels */
    bool doubled;    /* CONV: upsamples its input by 2 in both directions first */
    char name[48];
} mp_vae_op;
typedef struct mp_vae_block {
    mp_group_norm norm[2];
    mp_conv conv[2], shortcut;
    mp_linear qkv, out;
} mp_vae_block;

typedef struct mp_diff_block {
    bool ready;
    mp_weight_store store;
    union {
        mp_transformer_layer text;
        mp_text_end text_end;
        mp_dit_ends ends;
        mp_dit_joint joint;
        mp_dit_single single;
        mp_vae_block vae;
    } as;
} mp_diff_block;

/* ---- the model --------------------------------------------------------------------------------------------------- */

typedef struct mp_diff_encoder { /* hyper-parameters of a text encoder; layers 0: the model lacks this encoder */
    bool t5;               /* T5; otherwise CLIP */
    int32_t layers, hidden, ffn, vocab, length; /* length: maximum tokens */
    int32_t projection;    /* CLIP: width of the projected pooled vector, or 0 */
    int32_t end;           /* CLIP: pool the row of the first token with this id; -1: of the highest id */
    mp_act act;
    float eps;
    mp_attention attention; /* mp_diff_text_begin copies it, and adds the bias of T5 to the copy */
    mp_embedding embedding;
    mp_tensor relative;     /* T5: [buckets, heads] of relative positions, as stored */
    int32_t reach;          /* T5: all distances from this one on share one bucket */
} mp_diff_encoder;

typedef struct mp_diffusion {
    mp_model_base base;
    mp_weights *weights;
    mp_compute compute; /* AUTO: float weights in the type of mp_resolve_compute, quantised weights as stored */
    bool flux;          /* FLUX; otherwise Stable Diffusion 3 */
    mp_diff_encoder encoder[MP_DIFF_ENCODERS];
    /* transformer */
    int32_t hidden, heads, head_dim, joint_layers, single_layers;
    int32_t channels;             /* channels of the latents */
    int32_t text_width, pooled_width;
    int32_t axes[MP_DIFF_AXES];   /* flux: rotated components per axis */
    int32_t position_side;        /* rows and columns of the table of positions; 0: none */
    mp_tensor positions;          /* [position_side^2, hidden] as stored */
    bool guidance, qk_norm;
    bool *dual;                   /* [joint_layers] */
    /* decoder */
    int32_t op_count, levels, group_count;
    mp_vae_op *ops;               /* [op_count] */
    float latent_scale, latent_shift;
    /* all stages */
    int32_t block_count[MP_DIFF_STAGES];
    uint64_t stage_bytes[MP_DIFF_STAGES];
    _Atomic uint64_t gflop_ns; /* running mean: ns per 10^9 operations of the transformer */
} mp_diffusion;

/* Pixels per side of one latent. */
static inline int32_t mp_diff_scale(const mp_diffusion *model) { return 1 << (model->levels - 1); }
static inline const char *mp_diff_stage_name(int stage) {
    static const char *const names[] = {"clip_l", "clip_g", "t5", "transformer", "vae"};
    return names[stage];
}
/* Returns the operations, in units of 10^9, of one pass of the transformer over `text_rows` and `image_rows` rows. */
double mp_diff_gflop(const mp_diffusion *model, int64_t text_rows, int64_t image_rows);

/* Add the tensors of block `index` of a stage to the block's store, and set the builder that finishes it. Checks names
 * and shapes; reads no weights. */
mp_status mp_diff_build(const mp_diffusion *model, int stage, int index, mp_diff_block *block, mp_builder *builder,
                        mp_error *error);
/* mp_diff_build for one network: a text encoder, the transformer, the decoder. */
mp_status mp_text_build(const mp_diffusion *model, int which, int index, const mp_builder *builder,
                        mp_diff_block *block, mp_error *error);
mp_status mp_dit_build(const mp_diffusion *model, int index, const mp_builder *builder, mp_diff_block *block,
                       mp_error *error);
mp_status mp_vae_build(const mp_diffusion *model, int index, const mp_builder *builder, mp_diff_block *block,
                       mp_error *error);
/* Add one part to a linear layer: tensors `name`.weight [N, K] and, if present, `name`.bias, in the model's compute
 * type. */
mp_status mp_diff_linear(const mp_diffusion *model, const mp_builder *builder, mp_linear *linear, const char *name,
                         int32_t N, int32_t K, mp_error *error);

mp_status mp_diff_engine(mp_model *model, mp_budget *budget, mp_engine **engine, mp_error *error);
mp_status mp_diff_check(const mp_model *model, mp_request *request, uint64_t *cost_ns, uint32_t *total,
                        mp_error *error);

/* ---- running ----------------------------------------------------------------------------------------------------- */

/* All threads of a region call the functions below, except those that return sizes and those that say "on one thread".
 * For each network, a function ..._scratch returns the bytes of mp_diff_run.shared that a block needs, and a function
 * ..._own returns the bytes of mp_diff_run.own that each thread needs. */

/* One parallel region. When the lease is cancelled, every computing function below returns false in all threads, and
 * its output is incomplete. */
typedef struct mp_diff_run {
    mp_lease *lease;
    _Atomic int raised; /* the lease is cancelled */
    int agreed[2];      /* `raised` as thread 0 saw it at a barrier, in alternating slots */
    uint8_t *shared; /* scratch shared by all threads */
    uint8_t *own;    /* [threads][own_bytes] scratch of each thread */
    size_t own_bytes;
} mp_diff_run;

typedef struct mp_diff_thread {
    const mp_team_thread *thread;
    mp_diff_run *run;
    uint8_t *own;
    unsigned turn;
} mp_diff_thread;

/* Barrier. Returns false in all threads if the step is cancelled. */
bool mp_diff_barrier(mp_diff_thread *l);
/* Reports a heartbeat. Returns true if the step is cancelled: the caller then skips its work up to the next barrier. */
bool mp_diff_poll(mp_diff_thread *l);

enum { MP_DIFF_ROWS = 512 }; /* rows that a linear layer computes between two barriers */
size_t mp_diff_linear_scratch(const mp_linear *linear, int64_t M); /* bytes of mp_diff_run.shared */

/* y [M, ldy] = x [M, ldx] W^T with bias, activation and residual. Ends with a barrier. */
bool mp_diff_forward(mp_diff_thread *l, const mp_linear *linear, const float *x, int64_t ldx, int64_t M,
                     const mp_epilogue *ep, void *acts, float *y, int64_t ldy);
/* h [M, N] += gate [N] * (x W^T + bias). rows: scratch [2][min(M, MP_DIFF_ROWS), N]. Ends WITHOUT a barrier. x NULL:
 * `acts` already holds the prepared activations of at most MP_DIFF_ROWS rows (mp_linear_forward). */
bool mp_diff_add_gated(mp_diff_thread *l, const mp_linear *linear, const float *x, int64_t ldx, int64_t M,
                       const float *gate, void *acts, float *rows, float *h);
/* y = layer norm of x [M, n] with `weight` and `bias`. Ends with a barrier. */
bool mp_diff_layer_norm(mp_diff_thread *l, const float *x, int64_t M, int n, const float *weight, const float *bias,
                        float eps, float *y);

/* Returns the row context for blocks of nn/, with the barriers and polls of this step. spans: one, or NULL. */
mp_row_context mp_diff_context(mp_diff_thread *l, const mp_row_span *spans, void *acts);
/* Returns the rows of a head that a thread computes between two polls. */
int mp_diff_attention_rows(const mp_attention *attention, int T);
/* Attention of T rows to each other. Uses the thread's own scratch (mp_attention_scratch). Ends with a barrier. */
bool mp_diff_attend(mp_diff_thread *l, const mp_attention *attention, const mp_attention_rows *rows, int T);

/* A run of a text encoder, layer by layer. x [T, hidden] is the residual stream. */
typedef struct mp_diff_text {
    const mp_diff_encoder *encoder;
    int32_t T;
    const int32_t *ids;
    float *x;      /* [T, hidden] */
    float *before; /* CLIP: the state before the last layer [T, hidden] */
    float *pooled; /* CLIP: [projection, or hidden] */
    float *bias;   /* T5: [heads, 2 T - 1] added to the scores by distance */
    mp_attention attention;
} mp_diff_text;
/* Width of a row of queries. */
static inline int32_t mp_diff_text_width(const mp_diff_encoder *e) {
    return e->attention.heads * e->attention.head_dim;
}
/* Fills in `bias` and `attention`. Call on one thread before block 0, after `encoder`, `T` and the memory are set. */
mp_status mp_diff_text_begin(mp_diff_text *text, mp_error *error);
size_t mp_diff_text_scratch(const mp_diffusion *model, int which, const mp_diff_block *block, int index, int32_t T);
size_t mp_diff_text_own(const mp_diffusion *model, int which, int32_t T);
/* Computes block `index`; block 0 begins with the embeddings. */
bool mp_diff_text_forward(mp_diff_thread *l, const mp_diff_text *text, const mp_diff_block *block, int index);

/* One pass of the transformer, block by block. Text rows precede image rows. */
typedef struct mp_dit_pass {
    int32_t text_rows, grid_height, grid_width; /* image rows: grid_height * grid_width */
    const float *texts;                      /* [text_rows, text_width] */
    const float *pooled;                     /* [pooled_width] */
    const float *latents;                    /* [image rows, 4 channels]; a row is a patch: (channel, y, x) */
    float time, guidance;                    /* time: 0..1000; guidance: input of a guidance-distilled model */
    float *h;                                /* [all rows, hidden] */
    float *condition;                        /* [hidden], after the SiLU */
    float *angles;                           /* flux: [all rows, head_dim / 2][2] cos, sin */
    float *velocity;                         /* [image rows, 4 channels], laid out as latents */
} mp_dit_pass;
size_t mp_dit_scratch(const mp_diffusion *model, const mp_diff_block *ends, const mp_diff_block *block, int index,
                      int64_t text_rows, int64_t image_rows);
size_t mp_dit_own(const mp_diffusion *model, int64_t rows);
/* Fills in the rotary angles of a pass. Call on one thread. */
void mp_dit_angles(const mp_diffusion *model, mp_dit_pass *pass);
/* mp_dit_begin fills `condition` and `h` from the inputs of the pass. One call per block follows, and mp_dit_end fills
 * `velocity`. */
bool mp_dit_begin(mp_diff_thread *l, const mp_diffusion *model, const mp_dit_ends *ends, const mp_dit_pass *pass);
bool mp_dit_joint_forward(mp_diff_thread *l, const mp_diffusion *model, const mp_dit_joint *block,
                          const mp_dit_pass *pass);
bool mp_dit_single_forward(mp_diff_thread *l, const mp_diffusion *model, const mp_dit_single *block,
                           const mp_dit_pass *pass);
bool mp_dit_end(mp_diff_thread *l, const mp_diffusion *model, const mp_dit_ends *ends, const mp_dit_pass *pass);

/* A run of the decoder, op by op. */
typedef struct mp_vae_image {
    int32_t height, width;
    float *x, *a, *b; /* [mp_vae_floats] each. x holds the image; a and b are scratch. If an op wrote its result to a,
                       * thread 0 swaps x and a before the last barrier of the op. */
} mp_vae_image;
/* Floats of the largest intermediate image while latents of height x width are decoded. */
uint64_t mp_vae_floats(const mp_diffusion *model, int32_t height, int32_t width);
size_t mp_vae_scratch(const mp_diffusion *model, const mp_diff_block *block, int index, int64_t pixels);
size_t mp_vae_own(const mp_diffusion *model, const mp_diff_block *block, int index, int64_t pixels);
bool mp_vae_forward(mp_diff_thread *l, const mp_diffusion *model, const mp_diff_block *block, int index,
                    mp_vae_image *image);

#endif
