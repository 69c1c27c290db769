/* encoder/heads.h: the heads of an encoder beside its pooling: one that maps the hidden state of each token to a row
 * (ColBERT: Khattab and Zaharia, arXiv:2004.12832; labels of tokens), and one that gives a text a sparse vector over
 * the vocabulary.
 *
 * Sparse vectors are of two kinds. MP_SPARSE_VOCABULARY (SPLADE: Formal et al., arXiv:2109.10086): the head of a masked
 * language model gives each token a logit per entry of the vocabulary, and an entry's weight is the maximum or the sum
 * over the tokens of log1p(relu(logit)). The product is reduced tile by tile: a matrix [rows, vocabulary] never exists.
 * MP_SPARSE_TOKENS (BGE-M3: Chen et al., arXiv:2402.03216): each token has one weight, and an id has the largest weight
 * of its occurrences in the text.
 *
 * Only weights other than 0 are listed. The bits of a text do not depend on threads or on other texts. */
#ifndef MP_MODELS_ENCODER_HEADS_H
#define MP_MODELS_ENCODER_HEADS_H

#include "models/nn/dense.h"
#include "models/nn/linear.h"

typedef enum mp_sparse_kind { MP_SPARSE_NONE, MP_SPARSE_VOCABULARY, MP_SPARSE_TOKENS } mp_sparse_kind;

enum { MP_SPARSE_MAX_SKIPPED = 64 };

typedef struct mp_row_head {
    mp_dense_chain chain;
    int32_t width; /* components of a row; 0: the model has no row head */
    bool normalize;
} mp_row_head;

typedef struct mp_sparse_head {
    mp_sparse_kind kind;
    int32_t vocab;
    mp_dense_chain chain; /* VOCABULARY: the transform before the product; TOKENS: down to one weight */
    mp_linear output;     /* VOCABULARY: [vocab, chain.out] */
    bool sum;             /* VOCABULARY: sum over the tokens instead of the maximum */
    int logs;             /* VOCABULARY: how often log1p is applied, 1 or 2 */
    int skipped_count;
    int32_t skipped[MP_SPARSE_MAX_SKIPPED]; /* TOKENS: ids that get no weight */
} mp_sparse_head;

/* A text's sparse vector; the arrays have room for all weights that the text can have. */
typedef struct mp_sparse_text {
    int32_t *ids; /* ascending */
    float *values;
    int32_t *count;
    int32_t rows; /* tokens of the text */
} mp_sparse_text;

/* Read the heads of the spec: mpool.rows_count and mpool.rows_normalize with the tensors rows.I; mpool.sparse
 * ("vocabulary", "tokens"), mpool.sparse_count, mpool.sparse_sum, mpool.sparse_logs, mpool.sparse_skipped with the
 * tensors sparse.I, sparse_output.weight (default: token_embd.weight) and sparse_output.bias. The head must not move
 * until the builder has finished. */
mp_status mp_row_head_init(mp_row_head *head, const mp_builder *builder, int32_t hidden, mp_error *error);
mp_status mp_sparse_head_init(mp_sparse_head *head, const mp_builder *builder, int32_t hidden, int32_t vocab,
                              mp_error *error);
/* Floats of a thread's scratch for the chain of either head. */
size_t mp_heads_scratch(const mp_row_head *rows, const mp_sparse_head *sparse);
/* Computes rows [M, width] of hidden states [M, hidden]. Call on one thread. */
void mp_row_head_rows(const mp_row_head *head, const float *states, int M, bool normalize, float *scratch, float *rows);

/* ---- VOCABULARY -------------------------------------------------------------------------------------------------- */

/* Reduces tiles of the product to weights. The weights of each panel of the vocabulary are written to where the panel
 * begins in the text's arrays, followed by an id of -1 unless all of its weights are listed; mp_sparse_join then moves
 * them together. */
typedef struct mp_sparse_pass {
    const mp_sparse_head *head;
    const mp_sparse_text *texts; /* [count] */
    int count;
} mp_sparse_pass;

/* Multiplies the transformed rows of all texts, in order, [M, chain.out]. Call on all threads; there may be a barrier
 * inside, but none at the end. acts: mp_linear_scratch of `output`, shared. tile: mp_linear_tile(M) floats of the
 * thread. */
void mp_sparse_product(const mp_sparse_pass *pass, const mp_team_thread *thread, const float *rows, int M, void *acts,
                       uint8_t *panel_scratch, float *tile);
/* Joins the weights of one text. Call after a barrier, on one thread per text. */
void mp_sparse_join(const mp_sparse_pass *pass, int index);

/* ---- TOKENS ------------------------------------------------------------------------------------------------------ */

/* Lists the weights of a text from its hidden states. scratch: mp_heads_scratch floats. */
void mp_sparse_tokens(const mp_sparse_head *head, const int32_t *ids, const float *states, float *scratch,
                      const mp_sparse_text *out);

/* log1p(x) for x >= 0, rounded once from a double: the same bits on every machine. NaN and infinity stay. */
float mp_log1p(float x);

#endif
