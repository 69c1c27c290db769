/* decoder/attention.h: attention over the paged KV cache.
 *
 * Attention works on units (sequence, KV head) in one of three modes:
 *   fused  one row per sequence: the thread that attends a unit also rotates and stores its row, without a barrier
 *   tiles  prefill: all rows are stored first, then units are cut into tiles of rows
 *   split  few units over long contexts: units are cut into ranges of KV blocks, whose partials are merged in order
 *
 * A cache of bytes holds rotated keys and values: the Hadamard matrix spreads the outliers of a head, which would take
 * the precision of the other components of their group (QuaRot, arXiv:2404.00456). Queries are rotated like keys, so
 * their products do not change; the output of attention is rotated back. Before that, decoder/balance.c's factors make
 * the components of keys smaller where those of queries can become larger. */
#ifndef MP_MODELS_DECODER_ATTENTION_H
#define MP_MODELS_DECODER_ATTENTION_H

#include "models/decoder/pass.h"

typedef struct mp_attend { /* a thread's call for one row block */
    const mp_decoder_pass *pass;
    const mp_decoder_view *view;
    const mp_paged_attention *attention;
    const mp_attention_plan *plan;
    float *qkv;   /* [rows, qkv_width] queries, keys, values, gates; a mixer that only reads sets the queries */
    float *mixed; /* [rows, heads * value_dim] the output */
    float scale;  /* factor on the output */
    void *kernel_scratch; /* the following three are the thread's own */
    float *state;    /* running softmax state */
    void **pointers; /* [2 * pass->most_blocks] KV blocks of a unit */
} mp_attend;

/* Bytes of qkv and mixed for blocks of up to M rows. */
size_t mp_attend_shared(const mp_attention_shape *shape, int M);
/* Bytes of a thread's scratch. */
size_t mp_attend_own(const mp_attention_shape *shape, int most_blocks);
/* Takes qkv and mixed from *shared, and the thread's scratch from *own. */
mp_attend mp_attend_begin(const mp_decoder_pass *pass, const mp_decoder_view *view,
                          const mp_paged_attention *attention, float scale, uint8_t **shared, uint8_t **own);
/* Rotates the rows of qkv, stores keys and values in the cache unless the mixer only reads them, and attends. qkv must
 * be complete. Ends with a barrier. */
void mp_attend_rows(const mp_attend *run);
/* Reads the options of attention: norms of queries and keys, sinks. */
mp_status mp_attend_read_options(const mp_layer_reader *reader, mp_paged_attention *attention, mp_error *error);

#endif
