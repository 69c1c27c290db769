/* decoder/decoder.h: causal transformers with a paged key-value cache. A step takes rows of many sequences, packed: the
 * next token of some, slices of the prompts of others. Used by the files decoder*.c only. */
#ifndef MP_MODELS_DECODER_DECODER_H
#define MP_MODELS_DECODER_DECODER_H

#include "models/arch.h"
#include "models/nn/experts.h"
#include "models/nn/attention.h"
#include "models/nn/mlp.h"
#include "models/generation/kv_cache.h"

enum { MP_ROPES = 2 };

typedef struct mp_mla { /* of attention to latents (decoder/mla.h); rank 0: there is none */
    int32_t rank, q_rank;   /* components of a token's latent; of its queries', 0: they have none */
    int32_t plain, rotated; /* of a head's query before k_b: what is not rotated, what is */
    int32_t value;          /* of a head's output behind v_b */
} mp_mla;

typedef struct mp_decoder_layer {
    mp_norm attention_norm, ffn_norm;   /* [hidden] */
    mp_norm q_norm, k_norm;             /* [head_dim], or without weights */
    float *sinks;                       /* [heads] scores without a value, or NULL */
    mp_norm attention_after, ffn_after; /* [hidden] of what is added to the residual sum, or without weights */
    mp_linear qkv, out, gate_up, down;
    mp_linear q_b, k_b, v_b;      /* of latents: qkv has the projections to them */
    mp_norm q_a_norm, kv_a_norm;  /* [q_rank], [rank] */
    int32_t ffn;                  /* width of gate and up */
    mp_experts experts; /* instead of gate_up and down, or beside them; none when its count is 0 */
    int rope;   /* rotary table of its queries and keys; -1: they are not rotated */
    int window; /* positions that a row sees, its own included; 0 = all */
    int kv;     /* its number in the cache, which counts windowed layers last */
} mp_decoder_layer;

typedef struct mp_decoder {
    mp_model_base base;
    mp_weights *weights;
    mp_budget *budget;
    uint64_t charged; /* bytes taken from the budget */
    uint8_t *slab;
    mp_stored *stored; /* what of the slab is not filled yet, or NULL */
    int32_t hidden, heads, kv_heads, head_dim, layer_count, vocab, context;
    int32_t value_dim;    /* of a head's value; head_dim is that of queries and keys */
    int32_t rotated_from; /* the first component of a head that is rotated */
    int32_t groups;       /* heads are attended to in so many groups, each of one KV head */
    int32_t ffn;          /* of the widest layer */
    int32_t dense_ffn, shared_ffn; /* of layers without experts; beside experts, 0: nothing stands there */
    int32_t qkv_width;    /* (heads + kv_heads) * head_dim + kv_heads * value_dim */
    mp_mla latent;
    float eps, latent_eps;
    mp_act act;
    struct {
        int32_t count, used, ffn, from; /* of layers from `from` on; count 0: none */
        mp_routing routing;
        float clamp; /* see mp_experts */
    } experts;
    float attention_scale;   /* on products of queries and keys */
    float attention_softcap; /* 0 = none, as the next */
    float output_softcap;    /* of logits, after their scale */
    float embedding_scale, residual_scale, output_scale;
    mp_rope rope[MP_ROPES]; /* equally wide */
    int ropes;              /* tables that a row needs, from the first on */
    int32_t sections[3]; /* M-RoPE: pairs of a head that turn with each of three positions; 0: all with the one */
    int32_t long_from;      /* sequences that may become longer than this are rotated by the second table instead of the
                             * first (LongRoPE, arXiv:2402.13753); 0 = none */
    mp_tensor tokens; /* [vocab, hidden] as stored; unused when tied */
    bool tied;        /* the output matrix is the token table, packed */
    mp_norm norm;     /* [hidden] before the output */
    mp_linear head;   /* [vocab, hidden] */
    mp_decoder_layer *layers;
    mp_kv_group kv; /* the windowed layers see equally far */
    const struct mp_image_ops *image_ops; /* decoder/images.h; NULL: the model reads no images */
    struct mp_vision *vision;             /* what makes rows of images, or NULL */
    uint32_t max_token_bytes;
    int32_t sampled_vocab;   /* ids from here on have no token and are never drawn */
    _Atomic uint64_t row_ns;    /* running estimate of time per prompt row in a full step */
    _Atomic uint64_t decode_ns; /* the same of a step in which nobody reads a prompt; at first a guess by the weights */
} mp_decoder;

/* ---- one forward pass -------------------------------------------------------------------------------------------- */

typedef struct mp_row_seq { /* consecutive rows of one sequence */
    int row0, rows;
    int32_t past;           /* position of row0 */
    bool is_long;           /* see mp_decoder.long_from */
    const uint32_t *blocks; /* KV blocks for positions 0 .. past + rows - 1 */
    const int32_t (*positions)[3]; /* [n_positions] of its first rows, for M-RoPE; later ones' are by `shift` more than
                                    * their number. NULL: there are none */
    int32_t n_positions, shift;
    float *all_outputs;     /* [all_rows, vocab]: logits of the first rows too, or NULL */
    int all_rows;
} mp_row_seq;

typedef struct mp_rows {
    int M;
    const int32_t *id; /* [M] */
    const float **vector; /* [M] rows [hidden] that stand instead of the token table's, or NULL; NULL: there are none */
    int n_seq;
    mp_row_seq *seq;
    int n_output;
    int *output_row; /* [n_output] */
    float *logits;   /* [n_output, vocab] */
    int n_capture;
    mp_capture_row *capture; /* [n_capture] in the order of their outputs */
} mp_rows;

typedef struct mp_attention_unit { /* work on one KV head of one sequence */
    int seq, head;
    int row0, rows; /* within the sequence */
    int block0, block1;
    int partial; /* split mode: index of block0's partial */
} mp_attention_unit;

typedef struct mp_decoder_pass { /* everything the lanes share in a pass; made by mp_decoder_plan_pass */
    const mp_decoder *model;
    const mp_kv_cache *cache;
    mp_rows rows;
    enum { MP_ATTEND_FUSED, MP_ATTEND_TILES, MP_ATTEND_SPLIT } mode;
    int block_count, block_rows; /* decoder/pass.h; the last may have fewer rows */
    mp_attention_unit *units;
    int *thread_units; /* [block_count, lanes + 1] first unit of each lane in each block */
    int unit_count, most_blocks;
    float *x, *normed, *qkv, *mixed, *inner, *cos_sin, *partials;
    float *latent, *per_head; /* of latents: see decoder/mla.h */
    void *acts, *experts;
    mp_lease *lease;
    uint64_t keep_until_ns; /* see mp_stored_begin */
    bool unpacked;          /* some weights were not packed when it began */
    bool stop; /* every call of the step was cancelled: the pass ended after a layer, without logits */
    uint8_t *thread_scratch; /* [lanes] pieces */
    size_t thread_bytes;
} mp_decoder_pass;

/* Bytes of arena that a pass over these rows takes with so many lanes. */
size_t mp_decoder_pass_bytes(const mp_decoder *model, const mp_rows *rows, int threads);
/* Takes that much from the arena and decides who computes what. rows is copied. */
void mp_decoder_plan_pass(mp_decoder_pass *pass, const mp_decoder *model, const mp_kv_cache *cache, const mp_rows *rows,
                          mp_lease *lease, mp_arena *arena);
/* All lanes of the region call it. Afterwards (it ends with a barrier) the logits are complete and the cache holds the
 * rows, unless pass->stop. Bits of an output depend on its sequence alone. */
void mp_decoder_forward(mp_decoder_pass *pass, const mp_team_thread *thread);

mp_status mp_decoder_engine(mp_model *model, mp_budget *budget, mp_engine **engine, mp_error *error);
mp_status mp_decoder_check(const mp_model *model, mp_request *call, uint64_t *cost_ns, uint32_t *total,
                           mp_error *error);

#endif
