/* encoder/dedup.h: computes identical texts of a step once, and reuses the vectors of recent steps. Texts are identical
 * if their ids, their adapter, the tokens excluded from pooling and the postprocessing of the vector are equal; the
 * compute type is the same for all texts of an engine. By the numeric contract, a shared vector has the bits that a
 * separate computation would give. Only texts whose one output is the pooled vector are shared.
 *
 * Each engine has one; only the engine's worker uses it. If there is no memory for recent results, none are kept. */
#ifndef MP_MODELS_ENCODER_DEDUP_H
#define MP_MODELS_ENCODER_DEDUP_H

#include "models/encoder/encoder.h"

enum {
    MP_DEDUP_SHARED = 32,         /* maximum texts that share one computation, to limit the number of texts that one
                                   * fault affects */
    MP_DEDUP_KEEP_NS = 100000000, /* lifetime of a recent result */
    MP_DEDUP_RECENT = 256,        /* maximum recent results */
    MP_DEDUP_BYTES = 1 << 20,     /* maximum bytes of all recent results */
    MP_DEDUP_TOKENS = 512         /* maximum tokens of a text whose result is kept */
};

struct mp_dedup_slot;   /* an entry of the step's table */
struct mp_dedup_result; /* a recent result */

typedef struct mp_encoder_dedup {
    uint64_t keep_ns;            /* lifetime of a recent result: MP_DEDUP_KEEP_NS, unless a test changes it */
    uint64_t shared;             /* total texts that got the vector of another text of their step */
    uint64_t recalled;           /* total texts that got a recent result */
    struct mp_dedup_slot *slots; /* [slot_count], a power of two; table of the step, cleared by mp_dedup_begin */
    uint32_t slot_count;
    mp_budget *budget;
    struct mp_dedup_result *recent; /* [capacity] ring buffer, NULL until the first result */
    uint8_t *store;                 /* [capacity] rows of ids and vector; `recent` points into it */
    uint32_t capacity, next, count; /* next: slot written next; count: valid results, the newest before next */
    size_t text_bytes, row_bytes;   /* bytes of a row's ids, and of the whole row */
    uint64_t charged;
    uint64_t hash_key[2];
} mp_encoder_dedup;

/* model_tokens: maximum tokens of a text; model_width: maximum components of a vector. Allocates nothing. */
void mp_dedup_init(mp_encoder_dedup *dedup, mp_budget *budget, int32_t model_tokens, int32_t model_width);
void mp_dedup_deinit(mp_encoder_dedup *dedup);
/* Begin a step of up to `texts` texts. */
mp_status mp_dedup_begin(mp_encoder_dedup *dedup, int texts, mp_error *error);
/* Compute the text's key from its ids. Call it before the functions below. */
void mp_dedup_key(const mp_encoder_dedup *dedup, mp_encoder_text *text);
/* If there is a recent result of an identical text, copy its vector to text->out and return true. */
bool mp_dedup_recall(mp_encoder_dedup *dedup, const mp_encoder_text *text, uint64_t now_ns);
/* Return the index of an earlier, identical text of this step, whose vector texts[index] shares. Returns -1 if there is
 * none: texts[index] must be computed, and later texts may share its vector. */
int mp_dedup_find(mp_encoder_dedup *dedup, const mp_encoder_text *texts, int index);
/* Keep the finite vectors of texts [count], computed at now_ns; if not all fit, the last ones. */
void mp_dedup_keep(mp_encoder_dedup *dedup, const mp_encoder_text *texts, int count, uint64_t now_ns);
/* Forget all recent results. Returns the bytes given back to the budget. */
uint64_t mp_dedup_trim(mp_encoder_dedup *dedup);

#endif
