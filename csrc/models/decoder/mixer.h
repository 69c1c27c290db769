/* decoder/mixer.h: the mixers of a layer: blocks that carry information from one row of a sequence to another. There is
 * a table of functions for each kind; the weights of one mixer; and the reader that mixers load them with. */
#ifndef MP_MODELS_DECODER_MIXER_H
#define MP_MODELS_DECODER_MIXER_H

#include "models/nn/adapter.h"
#include "models/nn/block.h"
#include "models/nn/norm.h"

struct mp_decoder;
struct mp_decoder_pass;
struct mp_decoder_view;
typedef struct mp_mixer mp_mixer;
typedef struct mp_layer_reader mp_layer_reader;

typedef struct mp_mixed { /* output of a mixer before its output projection */
    float *rows;          /* [rows of the block, width], in the shared scratch */
    int64_t width;
} mp_mixed;

typedef struct mp_mixer_ops {
    mp_status (*read)(const mp_layer_reader *reader, mp_mixer *mixer, mp_error *error);
    /* For blocks of up to M rows, of sequences with up to most_blocks KV blocks. */
    void (*needs)(const struct mp_decoder *model, const mp_mixer *mixer, int M, int most_blocks, mp_block_needs *needs);
    void (*cost)(const mp_mixer *mixer, mp_block_cost *cost);
    /* Mixes the rows of the view. in [rows, hidden]: the normed rows, complete, or the thread's own copy of them. The
     * result is multiplied by `scale`. All threads call it. Ends with a barrier. */
    mp_mixed (*mix)(const struct mp_decoder_pass *pass, const struct mp_decoder_view *view, const mp_mixer *mixer,
                    const float *in, float scale);
    bool balances; /* decoder/balance.c may balance the components of keys */
    /* Mixers with a state (generation/states.h); NULL: the mixer is attention, which keeps keys and values.
     * sizes: reads the sizes that the state depends on. state: returns the bytes of the mixer's part of a sequence's
     * state, and those of its part of the log. */
    mp_status (*sizes)(const mp_spec *spec, mp_mixer *mixer, mp_error *error);
    size_t (*state)(const mp_mixer *mixer, size_t *log_bytes);
} mp_mixer_ops;

typedef struct mp_attention_shape { /* sizes of attention; a pass lists the work of all mixers of one shape once */
    int32_t heads, kv_heads;
    int32_t groups;       /* attention groups; the heads of a group share one KV head */
    int32_t head_dim;     /* components of a head's query and key */
    int32_t gate_dim;     /* components of a head's gate: value_dim, 1 (for all components), or 0: no gates */
    int32_t gates_from;   /* the first component of the first gate: after its query, or after all values if gate_dim
                           * is 1 */
    int32_t gate_step;    /* components from one head's gate to the next */
    int32_t query_step;   /* components from one head's query to the next */
    int32_t value_dim;    /* components of a head's value */
    int32_t padded_dim;   /* the same in the KV cache and in attention: mp_kv_width(value_dim) */
    int32_t rotated_from; /* the first component of a head that is rotated */
    int32_t key_values;   /* 1: the values are the keys before their norm, and rows of qkv have no others; else 0 */
    int32_t qkv_width;    /* components of all queries, keys, values and gates */
    float scale;          /* factor on products of queries and keys */
} mp_attention_shape;

typedef struct mp_paged_attention { /* attention over the KV cache: decoder/attention.c */
    const mp_attention_shape *shape; /* one of mp_decoder.shapes */
    mp_linear qkv; /* queries, keys, values and gates side by side; latent attention: the projections to the
                    * latents */
    mp_norm q_norm, k_norm; /* [head_dim], or of all heads together; skipped if it has no weight */
    mp_norm v_norm;         /* [value_dim]; skipped if it has no weight */
    float *balance; /* [kv_heads, head_dim] factors on queries, divisors of the store's keys, in a cache of bytes
                     * (decoder/balance.c); or NULL */
    float *sinks;   /* [heads] attention sinks: scores without a value; or NULL */
    int rope;        /* index of the rotary table for queries and keys; -1: no rotation */
    int window;      /* positions that a row sees, its own included; 0 = all. At most those that the store keeps */
    bool spans;      /* the rows of an image see each other, within the window: a row sees as many later ones as there
                      * are in its image */
    int store;       /* index of the keys and values in mp_decoder.kv; mixers with equal KV heads may share one */
    bool reads_only; /* an earlier mixer stores the keys and values: `qkv` has queries only */
} mp_paged_attention;

typedef struct mp_latent_projections { /* further projections of latent attention: decoder/mla.h */
    mp_linear q_b, k_b, v_b;
    mp_norm q_a_norm, kv_a_norm; /* [q_rank], [rank] */
} mp_latent_projections;

typedef struct mp_causal_conv { /* a convolution of each channel along the positions: decoder/recurrent.h */
    int32_t channels, taps;
    float *kernel; /* [taps, channels] the last tap is that of the row itself */
    float *bias;   /* [channels] or NULL */
} mp_causal_conv;

typedef struct mp_matrix_heads { /* heads with a matrix [dk, dv] as state: decoder/recurrent.h */
    int32_t heads, keys; /* number of heads, and of heads of keys and queries; several heads share one */
    int32_t dk, dv;
    bool tiled; /* head h has the keys of head h mod `keys`; otherwise those of head h / (heads / keys) */
} mp_matrix_heads;

typedef struct mp_recurrent { /* a mixer with a state */
    mp_linear in;
    mp_causal_conv conv;
    mp_matrix_heads matrix;
    float *decay, *step_bias; /* [heads] */
    float *skip;              /* [heads] (decoder/mamba2.c, with the fields below) */
    float step_low, step_high;
    float scales[5]; /* factors on the parts z, x, B, C and step of the projection; scales[0] 0: none */
    bool norm_then_gate;
    mp_norm norm;
    size_t state_at, log_at; /* place of its parts in the state and in the log */
} mp_recurrent;

struct mp_mixer {
    const mp_mixer_ops *ops;
    mp_linear out; /* output projection */
    float scale;   /* factor on the output, besides that of the sublayer */
    mp_paged_attention attention;
    mp_recurrent recurrent;
    mp_latent_projections latent; /* mp_mixer_latent */
};

extern const mp_mixer_ops mp_mixer_attention; /* decoder/attention.c */
extern const mp_mixer_ops mp_mixer_latent;    /* decoder/mla.c */
extern const mp_mixer_ops mp_mixer_short_conv; /* decoder/short_conv.c */
extern const mp_mixer_ops mp_mixer_gated_delta; /* decoder/gated_delta.c */
extern const mp_mixer_ops mp_mixer_mamba2;      /* decoder/mamba2.c */

/* ---- reading: decoder/layers.c ----------------------------------------------------------------------------------- */

struct mp_layer_reader {
    struct mp_decoder *model;
    const mp_builder *builder;
    int index;         /* index of the layer */
    uint32_t flags;    /* flags of the row in archs.def */
    float norm_offset; /* added to the weights of norms */
    bool gated;        /* networks that are no mixtures are gated; otherwise plain */
    bool one_norm;     /* mixer and network of a layer read the same normed rows */
    bool beside;       /* layers with another mixer have attention beside it */
    bool experts_beside; /* layers with experts have a dense network beside them, each with its own norms */
    int32_t dense_ffn; /* width of the layer's network that is no mixture */
    float sparse;                /* `sparse` of the layer's network that is no mixture */
    float gate_scale, ffn_scale; /* factors on gates, and on the outputs of networks with a norm of their own */
    const mp_mixer_ops *mixer; /* kind of the layer's mixer */
};

typedef struct mp_reader_part { /* a part of a linear layer: tensor blk.<index>.<name>.weight [N, K] */
    const char *name;
    int32_t N;
} mp_reader_part;

/* Adds the parts of a linear layer, with their biases if the file has them, and their updates by adapters. bias_scale:
 * factor on the biases. FORMAT if only some parts have a bias. */
mp_status mp_reader_linear(const mp_layer_reader *reader, mp_linear *linear, const mp_reader_part *parts, int count,
                           int32_t K, float bias_scale, mp_error *error);
/* Adds the norm blk.<index>.<name> of n components if `has`; UNSUPPORTED if the file has a norm that the architecture
 * does not have. */
mp_status mp_reader_norm(const mp_layer_reader *reader, mp_norm *norm, const char *name, int32_t n, bool has,
                         mp_error *error);
/* OK if the file has no tensor blk.<index>.<name>.weight. */
mp_status mp_reader_refuse(const mp_layer_reader *reader, const char *name, mp_error *error);
/* The same as mp_reader_norm for a vector blk.<index>.<name>.weight. */
mp_status mp_reader_vector(const mp_layer_reader *reader, float **vector, const char *name, int32_t n, bool has,
                           mp_error *error);

/* Adds the kernels blk.<index>.<name>.weight of a convolution, whose sizes are set, and its bias if the file has one.
 */
mp_status mp_reader_conv(const mp_layer_reader *reader, mp_causal_conv *conv, const char *name, mp_error *error);
/* Adds the vector a [heads], a < 0, of decays exp(a * step): tensor blk.<index>.ssm_a; or -exp(x) of the tensor
 * blk.<index>.ssm_a_log. */
mp_status mp_reader_decay(const mp_layer_reader *reader, float **decay, int32_t heads, mp_error *error);

#endif
