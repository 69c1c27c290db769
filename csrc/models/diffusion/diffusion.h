/* diffusion.h: pictures from texts by flow matching: text encoders, a transformer that moves latents, a decoder.
 *
 *   texts --encoders--> rows and one pooled vector --transformer, once or twice a step--> latents --decoder--> pixels
 *
 * A stage is one network. Its weights are blocks, each built when it is first run and each with memory of its own, so
 * that loading can be called off between blocks, and a stage that is done can give its memory to the next. Everything
 * here is used by the files of this folder only; the door is models/arch.h.
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
    MP_DIFF_ENCODERS = 3, /* CLIP-L, CLIP-G, T5, in this order; a model may lack some */
    MP_DIFF_AXES = 3,     /* of rotary positions */
    MP_DIFF_LEVELS = 8,   /* most resolutions of a decoder */
    MP_DIFF_PATCH = 2,    /* latents a side of a row of the transformer */
    MP_DIFF_WAVES = 256,  /* components of a time before its projection */
};

#define MP_DIFF_EPS 1e-6f /* of every norm of the transformer */

typedef enum mp_diff_stage_id {
    MP_DIFF_CLIP_L,
    MP_DIFF_CLIP_G,
    MP_DIFF_T5,
    MP_DIFF_TRANSFORMER,
    MP_DIFF_DECODER,
    MP_DIFF_STAGES
} mp_diff_stage_id;

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

typedef struct mp_text_end { /* behind the last layer of a text encoder */
    mp_norm norm;         /* [hidden] */
    mp_linear projection; /* CLIP; parts 0: none */
} mp_text_end;

/* What one of the two kinds of rows, texts and picture, has of its own in a block. Modulations are parts of the layer's
 * in the order shift, scale, gate of the attention, the same of the MLP, and of the second attention. */
typedef struct mp_dit_side {
    mp_linear modulation, qkv, out, up, down;
    mp_norm q_norm, k_norm; /* [head_dim], or without weights */
} mp_dit_side;
typedef struct mp_dit_joint {
    mp_dit_side text, image;
    bool last;           /* of texts nothing but keys and values is wanted any more; modulation is (shift, scale) */
    bool dual;           /* the picture's rows attend once more, to themselves */
    mp_linear qkv2, out2;
    mp_norm q_norm2, k_norm2;
} mp_dit_joint;
typedef struct mp_dit_single {
    mp_linear modulation, qkv, up, out; /* out takes the attention's and the MLP's outputs side by side */
    mp_norm q_norm, k_norm;
} mp_dit_single;
typedef struct mp_dit_ends {
    mp_linear rows, texts;          /* into the hidden width */
    mp_linear time[2], guidance[2], pooled[2];
    mp_linear modulation, velocity; /* (shift, scale); back to latents */
} mp_dit_ends;

typedef enum mp_vae_kind { MP_VAE_CONV, MP_VAE_RESIDUAL, MP_VAE_ATTENTION, MP_VAE_END } mp_vae_kind;
typedef struct mp_vae_op { /* one of the decoder's steps; weights in the block of the same number */
    mp_vae_kind kind;
    int32_t in, out; /* channels */
    bool doubled;    /* CONV: its output is twice as high and wide as its input */
    char name[48];
} mp_vae_op;
typedef struct mp_vae_block {
    mp_group_norm norm[2];
    mp_conv conv[2], shortcut;
    mp_linear qkv, out;
} mp_vae_block;

typedef struct mp_diff_block {
    bool ready;
    uint8_t *slab;
    uint64_t charged;
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

typedef struct mp_diff_encoder { /* its facts; layers 0: there is none */
    bool t5;               /* else CLIP */
    int32_t layers, hidden, ffn, vocab, length; /* length: most tokens */
    int32_t projection;    /* CLIP: width of the pooled vector after it, or 0 */
    int32_t end;           /* CLIP: the token whose row is pooled, the first of them; -1: that with the highest id */
    mp_act act;
    float eps;
    mp_attention attention; /* T5: its bias is a text's */
    mp_embedding embedding;
    mp_tensor relative;     /* T5: [buckets, heads] of relative positions, as stored */
    int32_t reach;          /* T5: distance from which on all are alike */
} mp_diff_encoder;

typedef struct mp_diffusion {
    mp_model_base base;
    mp_weights *weights;
    mp_compute compute; /* AUTO: floats as auto_class says, the rest as stored */
    bool flux;          /* else Stable Diffusion 3: what differs is said where this is asked */
    mp_diff_encoder encoder[MP_DIFF_ENCODERS];
    /* transformer */
    int32_t hidden, heads, head_dim, joint_layers, single_layers;
    int32_t channels;             /* of latents */
    int32_t text_width, pooled_width;
    int32_t axes[MP_DIFF_AXES];   /* rotated components of each, flux */
    int32_t position_side;        /* rows and columns of the table of positions, else 0 */
    mp_tensor positions;          /* [position_side^2, hidden] as stored */
    bool guidance, qk_norm;
    bool *dual;                   /* [joint_layers] */
    /* decoder */
    int32_t op_count, levels, group_count, top_channels;
    mp_vae_op *ops;               /* [op_count] */
    float latent_scale, latent_shift;
    /* all of it */
    int32_t block_count[MP_DIFF_STAGES];
    uint64_t stage_bytes[MP_DIFF_STAGES];
    _Atomic uint64_t gflop_ns; /* running estimate of the time of 10^9 operations in the transformer */
} mp_diffusion;

/* Pixels a side of one latent. */
static inline int32_t mp_diff_scale(const mp_diffusion *model) { return 1 << (model->levels - 1); }
static inline const char *mp_diff_stage_name(int stage) {
    static const char *const names[] = {"clip_l", "clip_g", "t5", "transformer", "vae"};
    return names[stage];
}
/* Operations of the transformer on so many rows of texts and picture, in 10^9. */
double mp_diff_gflop(const mp_diffusion *model, int64_t text_rows, int64_t image_rows);

/* Collect block `index` of a stage: names and shapes are checked, nothing is read. */
mp_status mp_diff_build(const mp_diffusion *model, int stage, int index, mp_builder *builder, mp_diff_block *block,
                        mp_error *error);
/* By stage. */
mp_status mp_text_build(const mp_diffusion *model, int which, int index, mp_builder *builder, mp_diff_block *block,
                        mp_error *error);
mp_status mp_dit_build(const mp_diffusion *model, int index, mp_builder *builder, mp_diff_block *block,
                       mp_error *error);
mp_status mp_vae_build(const mp_diffusion *model, int index, mp_builder *builder, mp_diff_block *block,
                       mp_error *error);
/* One part of a linear layer: tensors name.weight [N, K] and, when there is one, name.bias, in the class of the
 * model. */
mp_status mp_diff_linear(const mp_diffusion *model, mp_builder *builder, mp_linear *linear, const char *name, int32_t N,
                         int32_t K, mp_error *error);

mp_status mp_diff_engine(mp_model *model, mp_budget *budget, mp_engine **engine, mp_error *error);
mp_status mp_diff_check(const mp_model *model, mp_request *call, uint64_t *cost_ns, uint32_t *total, mp_error *error);

/* ---- running: everything below is called by all lanes of a region ------------------------------------------------ */

/* One region. The step is over early when the lease says so: every function below returns false then, in all lanes
 * alike, and what it was to write is unfinished. */
typedef struct mp_diff_run {
    mp_lease *lease;
    _Atomic int raised;
    int agreed[2];
    uint8_t *shared; /* scratch of all lanes */
    uint8_t *own;    /* [lanes][own_bytes] */
    size_t own_bytes;
} mp_diff_run;

typedef struct mp_diff_thread {
    const mp_team_thread *thread;
    mp_diff_run *run;
    uint8_t *own;
    unsigned turn;
} mp_diff_thread;

/* Barrier at which the lanes agree whether to go on. */
bool mp_diff_barrier(mp_diff_thread *l);
/* Beats the heart; true when there is no point in going on with what has no barriers until the next meet. */
bool mp_diff_poll(mp_diff_thread *l);

enum { MP_DIFF_ROWS = 512 }; /* rows of a linear layer between two barriers */
size_t mp_diff_linear_scratch(const mp_linear *linear, int64_t M); /* of ->shared */

/* y [M, ldy] = x [M, ldx] W^T, bias, act, residual; ends with a barrier. */
bool mp_diff_forward(mp_diff_thread *l, const mp_linear *linear, const float *x, int64_t ldx, int64_t M,
                     const mp_epilogue *ep, void *acts, float *y, int64_t ldy);
/* h [M, N] += gate [N] * (x W^T + bias); rows: scratch [2][min(M, MP_DIFF_ROWS), N]. Ends WITHOUT a barrier. x NULL: of
 * activations in acts, of MP_DIFF_ROWS rows at most (mp_linear_forward). */
bool mp_diff_add_gated(mp_diff_thread *l, const mp_linear *linear, const float *x, int64_t ldx, int64_t M,
                       const float *gate, void *acts, float *rows, float *h);
/* y = layer norm of x [M, n] with these weights; ends with a barrier. */
bool mp_diff_layer_norm(mp_diff_thread *l, const float *x, int64_t M, int n, const float *weight, const float *bias,
                        float eps, float *y);

/* The row context of blocks of nn/: barriers and polls are those of the step. spans: one, or NULL. */
mp_row_context mp_diff_context(mp_diff_thread *l, const mp_row_span *spans, void *acts);
/* Rows of a head that a lane attends to between two polls. */
int mp_diff_attention_rows(const mp_attention *attention, int T);
/* Attention of T rows to each other; scratch is the lane's own, mp_attention_scratch. Ends with a barrier. */
bool mp_diff_attend(mp_diff_thread *l, const mp_attention *attention, const mp_attention_rows *rows, int T);

/* A text encoder, layer by layer. x [T, hidden] is the text's state throughout. */
typedef struct mp_diff_text {
    const mp_diff_encoder *encoder;
    int32_t T;
    const int32_t *ids;
    float *x;      /* [T, hidden] */
    float *before; /* CLIP: the state before the last layer [T, hidden] */
    float *pooled; /* CLIP: [projection, or hidden] */
    float *bias;   /* T5: [heads, 2 T - 1] what scores get by distance */
    mp_attention attention;
} mp_diff_text;
/* The width of a row of queries. */
static inline int32_t mp_diff_text_width(const mp_diff_encoder *e) {
    return e->attention.heads * e->attention.head_dim;
}
/* Before block 0, by one thread: encoder, T and memory are set; fills bias and attention. */
mp_status mp_diff_text_begin(mp_diff_text *text, mp_error *error);
size_t mp_diff_text_scratch(const mp_diffusion *model, int which, const mp_diff_block *block, int index, int32_t T);
size_t mp_diff_text_own(const mp_diffusion *model, int which, int32_t T);
/* Block `index`; before block 0 the embeddings are looked up. */
bool mp_diff_text_forward(mp_diff_thread *l, const mp_diff_text *text, const mp_diff_block *block, int index);

/* One pass of the transformer, block by block. Rows of texts come first. */
typedef struct mp_dit_pass {
    int32_t text_rows, rows_high, rows_wide; /* picture rows: high * wide */
    const float *texts;                      /* [text_rows, text_width] */
    const float *pooled;                     /* [pooled_width] */
    const float *latents;                    /* [picture rows, 4 channels]: (channel, y, x) of a patch */
    float time, guidance;                    /* 0..1000; the scale that a distilled model is told */
    float *h;                                /* [all rows, hidden] */
    float *condition;                        /* [hidden], after its SiLU */
    float *angles;                           /* flux: [all rows, head_dim / 2][2] cos, sin */
    float *velocity;                         /* [picture rows, 4 channels] as latents */
} mp_dit_pass;
size_t mp_dit_scratch(const mp_diffusion *model, const mp_diff_block *ends, const mp_diff_block *block, int index,
                      int64_t text_rows, int64_t image_rows);
size_t mp_dit_own(const mp_diffusion *model, int64_t rows);
/* Positions' angles of a pass; by one thread. */
void mp_dit_angles(const mp_diffusion *model, mp_dit_pass *pass);
bool mp_dit_begin(mp_diff_thread *l, const mp_diffusion *model, const mp_dit_ends *ends, const mp_dit_pass *pass);
bool mp_dit_joint_forward(mp_diff_thread *l, const mp_diffusion *model, const mp_dit_joint *block,
                          const mp_dit_pass *pass);
bool mp_dit_single_forward(mp_diff_thread *l, const mp_diffusion *model, const mp_dit_single *block,
                           const mp_dit_pass *pass);
bool mp_dit_end(mp_diff_thread *l, const mp_diffusion *model, const mp_dit_ends *ends, const mp_dit_pass *pass);

/* The decoder, op by op. */
typedef struct mp_vae_image {
    int32_t high, wide;
    float *x, *a, *b; /* [most floats of an op] each; x holds the picture, the others are scratch, and they change
                       * places; only lane 0 changes them, before the last barrier of an op */
} mp_vae_image;
/* Floats of the largest picture while latents of high x wide are decoded. */
uint64_t mp_vae_floats(const mp_diffusion *model, int32_t high, int32_t wide);
size_t mp_vae_scratch(const mp_diffusion *model, const mp_diff_block *block, int index, int64_t pixels);
size_t mp_vae_own(const mp_diffusion *model, const mp_diff_block *block, int index, int64_t pixels);
bool mp_vae_forward(mp_diff_thread *l, const mp_diffusion *model, const mp_diff_block *block, int index,
                    mp_vae_image *image);

#endif
