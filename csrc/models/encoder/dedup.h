/* encoder/dedup.h: computes identical texts of a step once, and reuses the vectors of recent steps. Texts are identical
 * if their ids, their adapter, the start of the second text of a pair, the attended tokens, the tokens excluded from
 * pooling and the postprocessing of the vector are equal; the compute type is the same for all texts of an engine. By
 * the numeric contract, a shared vector has the bits that a separate computation would give. Only texts whose one
 * output is the pooled vector are shared.
 *
 * Each engine has one; only the engine's worker uses it. If there is no memory for recent results, none are kept. */
#ifndef MP_MODELS_ENCODER_DEDUP_H
#define MP_MODELS_ENCODER_DEDUP_H

#include "models/dedup.h"
#include "models/encoder/encoder.h"

enum { MP_ENCODER_DEDUP_TOKENS = 512 }; /* maximum tokens of a text whose result is kept */

struct mp_encoder_result; /* a recent result */

typedef struct mp_encoder_dedup {
    uint64_t keep_ns;    /* lifetime of a recent result: MP_DEDUP_KEEP_NS, unless a test changes it */
    /* for tests; mp_step_work.dedup_hits is the sum of both */
    uint64_t shared;     /* total texts that got the vector of another text of their step */
    uint64_t recalled;   /* total texts that got a recent result */
    mp_dedup_table step; /* the texts of the step */
    mp_budget *budget;
    struct mp_encoder_result *recent; /* [capacity] ring buffer, NULL until the first result */
    uint8_t *store;                   /* [capacity] rows of ids and vector; `recent` points into it */
    uint32_t capacity, next, count;   /* next: entry written next; count: valid results, the newest before next */
    size_t text_bytes, row_bytes;     /* bytes of a row's ids, and of the whole row */
    uint64_t charged;
    uint64_t hash_key[2];
} mp_encoder_dedup;

/* model_tokens: maximum tokens of a text; model_width: maximum components of a vector. Allocates nothing. */
void mp_encoder_dedup_init(mp_encoder_dedup *dedup, mp_budget *budget, int32_t model_tokens, int32_t model_width);
void mp_encoder_dedup_deinit(mp_encoder_dedup *dedup);
/* Begin a step of up to `texts` texts. */
mp_status mp_encoder_dedup_begin(mp_encoder_dedup *dedup, int texts, mp_error *error);
/* Compute the text's key from its ids. Call it before the functions below. */
void mp_encoder_dedup_key(const mp_encoder_dedup *dedup, mp_encoder_text *text);
/* If there is a recent result of an identical text, copy its vector to text->out and return true. */
bool mp_encoder_dedup_recall(mp_encoder_dedup *dedup, const mp_encoder_text *text, uint64_t now_ns);
/* Return the index of an earlier, identical text of this step, whose vector texts[index] shares. Returns -1 if there is
 * none: texts[index] must be computed, and later texts may share its vector. */
int mp_encoder_dedup_find(mp_encoder_dedup *dedup, const mp_encoder_text *texts, int index);
/* Keep the finite vectors of texts [count], computed at now_ns; if not all fit, the last ones. */
void mp_encoder_dedup_keep(mp_encoder_dedup *dedup, const mp_encoder_text *texts, int count, uint64_t now_ns);
/* Forget all recent results. Returns the bytes given back to the budget. */
uint64_t mp_encoder_dedup_trim(mp_encoder_dedup *dedup);

#endif
