/* decoder/decoder.h: causal transformers with a paged KV cache. A step takes packed rows of many sequences: decode rows
 * and prefill slices. Used by the files of decoder/ and by vision/. */
#ifndef MP_MODELS_DECODER_DECODER_H
#define MP_MODELS_DECODER_DECODER_H

#include "models/arch.h"
#include "models/decoder/layer.h"
#include "models/generation/kv_cache.h"
#include "models/nn/attention.h"

enum { MP_ROPES = 2, MP_HEAD_MAX = 1024 /* components of a head; latent attention may have more */ };

typedef struct mp_mla { /* sizes of multi-head latent attention (decoder/mla.h); rank 0: the model has none */
    int32_t rank, q_rank;   /* components of a token's latent vector, and of the latent vector of its queries; q_rank
                             * 0: queries have no latent vector */
    int32_t plain, rotated; /* components of a head's query before k_b: not rotated, rotated */
    int32_t value;          /* components of a head's output after v_b */
} mp_mla;

typedef struct mp_decoder {
    mp_model_base base;
    mp_weights *weights;
    mp_weight_store store;
    float *balance;    /* memory of the layers' `balance`, or NULL */
    mp_adapters adapters;
    int32_t hidden, layer_count, vocab, context; /* vocab: rows of the head */
    mp_attention_shape *shapes; /* [shape_count] the different sizes of the layers' attention */
    uint16_t *layer_shapes;     /* [layer_count] index of each layer's shape */
    int shape_count;
    int32_t last_stored; /* the last layer whose mixer stores keys and values; those after it read the stores of
                          * earlier layers */
    float *ones;         /* weight of the norms of values, or NULL */
    int32_t shared_ffn;  /* width of the shared expert (0: none) */
    mp_mla latent;
    mp_norm like; /* `eps` and `root` of the norms of layers and output */
    float latent_eps;
    mp_act act;
    struct {
        int32_t count, used, ffn, from; /* used by layers from `from` on; count 0: no experts */
        int32_t latent; /* width of the rows of experts; 0: `hidden` (see mp_ffn) */
        mp_routing routing;
        float clamp; /* see mp_experts */
    } experts;
    float attention_softcap; /* soft cap of attention scores; 0 = none */
    float temperature_scale; /* factor of rotated queries at position p: 1 + temperature_scale * log(1 + floor(p /
                              * temperature_length)); 0 = none */
    int32_t temperature_length;
    float output_softcap;    /* soft cap of logits, after output_scale; 0 = none */
    float embedding_scale, output_scale;
    float residual_scale;   /* `scale` of each sublayer */
    mp_rope rope[MP_ROPES]; /* rotary tables */
    int ropes;              /* number of tables that each row needs, beginning with the first */
    int rope_dim;           /* the largest `dim` of the tables */
    mp_rope_sections sections;
    bool image_spans;       /* some layers have `spans` (mp_paged_attention) */
    bool whole_prompts;     /* the model embeds: a prompt is one span in all layers, in which a window reaches as far to
                             * both sides. The head reads the mean of a prompt's normed rows */
    int32_t long_from;      /* sequences that may become longer than this use the second table instead of the first
                             * (LongRoPE, arXiv:2402.13753); 0 = none */
    mp_tensor tokens; /* [vocab, hidden] as stored; unused when tied */
    struct {             /* inputs of each layer, besides the row: a row of `table` plus a projection of the
                          * embedding */
        int32_t width;   /* per layer; 0: the layers have none */
        bool plain;      /* there is no table: the inputs are the projection alone */
        mp_tensor table; /* [tokens, layers * width] read as it is mapped: rows that are not used cost no memory */
        mp_linear project;
        mp_norm norm; /* [width] of the projection */
    } inputs;
    bool tied;        /* the output matrix is the token table, packed */
    mp_norm norm;     /* [hidden] before the output */
    mp_linear head;   /* [vocab, hidden] */
    mp_decoder_layer *layers;
    int32_t streams; /* residual sums of a row besides the first (decoder/streams.h); 0: none */
    mp_linear stream_in[MP_STREAMS], stream_out[MP_STREAMS]; /* [hidden, hidden] to these sums, and back */
    float laurel_scale; /* `total` of sublayers with mp_ffn_laurel */
    bool adds_up;   /* some sublayers norm the sum of their networks' outputs */
    int last_mixed; /* index of the last layer that has a mixer; -1: none has one */
    int barriers;   /* about the number of barriers of a pass */
    mp_kv_store *kv_stores; /* one for each mixer that stores keys and values */
    mp_kv_layout kv;        /* how blocks hold them */
    struct mp_vision *vision; /* the part that turns images into rows (decoder/images.h), or NULL */
    struct mp_decoder *draft; /* owned draft model (decoder/drafting.h), or NULL */
    uint32_t max_token_bytes;
    int32_t sampled_vocab;   /* ids from here on have no token and are never sampled */
    _Atomic uint64_t row_ns;    /* running estimate of the time per prefill row in a full step */
    _Atomic uint64_t decode_ns; /* running estimate of the time of a step without prefill; initially derived from the
                                 * size of the weights */
} mp_decoder;

/* ---- one forward pass -------------------------------------------------------------------------------------------- */

typedef struct mp_row_seq { /* consecutive rows of one sequence */
    int row0, rows;
    int32_t past;           /* position of row0 */
    bool is_long;           /* see mp_decoder.long_from */
    uint8_t adapter;        /* number of the adapter of all rows (mp_adapters_find); 0: none */
    const uint32_t *blocks; /* KV blocks of positions 0 .. past + rows - 1 */
    uint8_t *state, *log; /* generation/states.h; NULL: the model has no states */
    int pending;          /* rows of the log to add to the state before these */
    bool logs;            /* write these rows to the log, and leave the state as it is */
    const int32_t (*positions)[3]; /* [n_positions] M-RoPE positions of the first n_positions tokens; each position of a
                                    * later token is its index plus `shift`. NULL: all tokens are later tokens */
    int32_t n_positions, shift;
    const mp_image_run *spans; /* [n_spans] the images among the rows, if the model has `image_spans`, or the prompt.
                                * The rows end with a span's last row, or outside of spans: the keys of a row that
                                * begins a span depend on the span's other rows */
    int n_spans;
    float *all_outputs;     /* [all_rows, vocab] receives the logits of the first all_rows rows, or NULL */
    int all_rows;
} mp_row_seq;

typedef struct mp_rows {
    int M;
    const int32_t *id; /* [M] */
    const float **vector; /* [M] for each row NULL, or vectors [1 + taps, hidden]: the first replaces the token
                           * embedding, each other one is added after the next layer, from the first layer on
                           * (DeepStack, arXiv:2406.04334). NULL: no such rows */
    int taps;
    int n_seq;
    mp_row_seq *seq;
    int n_output;
    int *output_row; /* [n_output] */
    float *logits;   /* [n_output, vocab] */
    int n_capture;
    mp_capture_row *capture; /* [n_capture], in the order of outputs */
} mp_rows;

typedef struct mp_attention_unit { /* attention work of one KV head of one sequence */
    int seq, head;
    int row0, rows; /* within the sequence */
    int block0, block1;
    int32_t until; /* the rows also see the positions below this one, the end of their image; 0: only those up to their
                    * own */
    int partial; /* split mode: index of block0's partial */
} mp_attention_unit;

typedef struct mp_attention_plan { /* the work of all mixers of one shape */
    enum { MP_ATTEND_FUSED, MP_ATTEND_TILES, MP_ATTEND_SPLIT } mode; /* see decoder/attention.h */
    mp_attention_unit *units;
    int *thread_units; /* [block_count, threads + 1] first unit of each thread in each block */
    int unit_count;
} mp_attention_plan;

typedef struct mp_decoder_pass { /* shared by all threads of a pass; made by mp_decoder_plan_pass */
    const mp_decoder *model;
    const mp_kv_cache *cache;
    mp_rows rows;
    int block_count, block_rows; /* number of row blocks (decoder/pass.h), and rows of the largest */
    int *block_first;            /* [block_count + 1] first row of each; the last is the number of rows */
    mp_attention_plan *attention; /* [shape_count] */
    int most_blocks; /* KV blocks of the longest sequence */
    /* x [M, hidden]: the residual sums; cos_sin [M, ropes, dim]. For the current row block: normed [rows, hidden];
     * acts, prepared activations; shared, the scratch of the current block of the layer, and at the end the gathered
     * output rows. partials: mp_attention_partial_floats for each KV block of a unit; split mode only. */
    float *x, *normed, *cos_sin, *partials;
    float *added;               /* [rows of a block, hidden] sum of the outputs of networks before its norm, or NULL */
    float *streams, *predicted; /* [M, streams of the model, hidden] the other residual sums, and [rows of a block,
                                 * hidden] the first before the layer's sublayers; or NULL */
    float *inputs;              /* [M, layers * width of mp_decoder.inputs], or NULL */
    const float **row_inputs;    /* [M] the inputs of each row, or NULL */
    const float **output_inputs; /* [n_output] the same of the output rows */
    void *acts;
    uint8_t *shared;
    size_t own_rows, own_acts, own; /* bytes of the first three parts of a thread's scratch */
    struct mp_decoder_pass *carried; /* [threads] for each thread of a wavefront (decoder/wavefront.h) this pass with
                                      * the row blocks of the wavefront, and scratch of its own. NULL: threads divide
                                      * each layer */
    struct mp_wavefront *wavefront;  /* in `carried`: its wavefront; otherwise NULL */
    struct mp_decoder_pass *rest; /* the layers after `last_stored`, for the output rows alone, each as a sequence of
                                   * its own; NULL: these layers compute all rows */
    uint8_t *row_adapter;    /* [M] `adapter` of each row, or NULL: no row has one */
    uint8_t *output_adapter; /* [n_output] the same of the output rows */
    float *low_rank;         /* [row block, width of the adapters] */
    mp_lease *lease;
    bool unpacked;           /* some matrices were unpacked when the pass began */
    bool warming;            /* this pass takes longer than later passes (mp_weight_store_warming) */
    bool may_end; /* a wavefront may end after some of its row blocks if others wait (mp_lease_wanted) */
    int computed; /* rows computed: all of them, or with `may_end` the first ones, without logits */
    bool stop; /* every request of the step was cancelled: the pass ended after a layer, without logits */
    /* A pass may be left between two layers: set until_ns. If it is `paused`, another pass over the same rows computes
     * the rest: it begins at the same `layer`, with a copy of `x`. */
    const float *resumed; /* [M, hidden] x after `layer` layers; NULL: the pass begins with the embeddings */
    int layer;            /* the first layer; after a pause, the next one */
    uint64_t until_ns;    /* pause after the layer that ends at this time or later; 0: do not pause */
    bool paused;
    uint8_t *thread_scratch; /* [threads][thread_bytes] */
    size_t thread_bytes;
} mp_decoder_pass;

/* Returns the bytes of arena that a pass over these rows takes with `threads` threads. */
size_t mp_decoder_pass_bytes(const mp_decoder *model, const mp_rows *rows, int threads);
/* Takes mp_decoder_pass_bytes of buffers from the arena, copies `rows` (not its arrays), and assigns the work to
 * threads. */
void mp_decoder_plan_pass(mp_decoder_pass *pass, const mp_decoder *model, const mp_kv_cache *cache, const mp_rows *rows,
                          mp_lease *lease, mp_arena *arena);
/* Returns true if a pass over M rows may be a wavefront. It is one unless it has spans, captured rows, one row of each
 * sequence, or unpacked weights, which each row block would unpack again, or may pause between two layers. */
bool mp_decoder_carries(const mp_decoder *model, int M, int threads);
/* Runs the pass. All threads of the region must call it. Ends with a barrier, after which the logits are complete and
 * the cache holds the rows, or the first pass->computed ones, unless pass->stop. The bits of an output depend on its
 * sequence alone. */
void mp_decoder_forward(mp_decoder_pass *pass, const mp_team_thread *thread);

/* Reads the spec key mpool.kv_dtype: sets *in_bytes to false for "auto" (the default) and to true for "int8". */
mp_status mp_decoder_kv_in_bytes(const mp_spec *spec, bool *in_bytes, mp_error *error);

mp_status mp_decoder_engine(mp_model *model, mp_budget *budget, mp_engine **engine, mp_error *error);
mp_status mp_decoder_check(const mp_model *model, mp_request *request, uint64_t *cost_ns, uint32_t *total,
                           mp_error *error);

#endif
