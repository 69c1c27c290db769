/* lookup/lookup.h: static embeddings. The vector of a text is the mean of its tokens' rows in a table (model2vec;
 * StaticEmbedding of sentence-transformers). There is no network.
 *
 *   token_embd.weight   [rows, dim] F32, F16, BF16 or I8: used as mapped, never copied. I8 values count as they are
 *   token_embd.mapping  [vocab] I32 or I64: the row of each token; without it, the row is the token's id
 *   token_embd.factor   [vocab] F32, F16, BF16 or F64: each token's row is multiplied by its factor
 *
 *   {arch}.embedding_length = dim; {arch}.context_length; {arch}.vocab_size; mpool.normalize;
 *   mpool.ignored_token: this token is left out of the mean; -1: none
 *
 * Each component is one chain of fp32 additions over the tokens in order, divided by their number. A text without a
 * counted token gets zeros. A truncated vector is normalised after truncation. */
#ifndef MP_LOOKUP_LOOKUP_H
#define MP_LOOKUP_LOOKUP_H

#include "models/arch.h"
#include "models/nn/builder.h"

typedef struct mp_lookup {
    mp_model_base base;
    mp_weights *weights;
    mp_tensor table;
    int32_t *mapping; /* [vocab] or NULL */
    float *factors;   /* [vocab] or NULL */
    int32_t vocab, dim, context, ignored;
    bool normalize;
    mp_budget *budget;
    uint64_t charged;
    mp_weight_store store; /* no weights are in it, because a static embedding packs none */
    _Atomic uint64_t token_ns;
} mp_lookup;

mp_status mp_lookup_check(const mp_model *model, mp_request *request, uint64_t *cost_ns, uint32_t *total,
                          mp_error *error);
mp_status mp_lookup_engine(mp_model *model, mp_budget *budget, mp_engine **engine, mp_error *error);
/* Computes the first `width` components of the vector of tokens ids [n] into out [width]. Thread-safe. Returns false if
 * a component is not finite. Polls the lease every 4,096 tokens. If the lease asks to stop or *stop is true, sets
 * *stop and returns early with undefined results. */
bool mp_lookup_vector(const mp_lookup *model, const int32_t *ids, int64_t n, int32_t width, bool normalize,
                      mp_lease *lease, _Atomic bool *stop, float *out);

#endif
