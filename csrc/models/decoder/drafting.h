/* decoder/drafting.h: a draft model: a smaller model with the same vocabulary that proposes draft tokens (Leviathan et
 * al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023). generation/speculation.h decides when.
 *
 * The draft model belongs to the model: it is loaded from the draft of the spec, charged to the same budget and freed
 * with it. Each engine has a KV cache for it. Before a step in which all sequences decode, the engine runs passes
 * of the draft model over all sequences together:
 *
 *   first pass    the tokens that the draft model has not computed yet; the last row gives the first draft token
 *   further       one row per sequence, its last draft token; each pass gives one more draft token
 *
 * Draft tokens are sampled as the model would sample them: with the options, the seed and the position of the request.
 * So a draft model with the probabilities of the model proposes exactly the tokens of the completion.
 *
 * The rows of draft tokens are tentative: the shadow of the sequence (decoder/sequence.h) counts them only after the
 * model has accepted their tokens. The next pass overwrites the others.
 *
 * The draft model computes a long prompt in slices, each about as long as a decode step. It begins only if its drafts
 * are expected to save twice the time of all slices. If memory is short, the blocks of the draft model are the first to
 * be dropped, and the draft model pauses for 256 steps. */
#ifndef MP_MODELS_DECODER_DRAFTING_H
#define MP_MODELS_DECODER_DRAFTING_H

#include "models/decoder/sequence.h"

typedef struct mp_drafter { /* state of an engine */
    mp_decoder *model;      /* NULL: there is no draft model */
    mp_prefix_cache cache;
    mp_shadow *shadows; /* those with blocks in `cache` */
    int pause;          /* steps without drafts of the model, because memory was short */
    bool logged;        /* a log record about the lack of memory was written */
} mp_drafter;

enum { MP_DRAFT_PADDING = 128 };
/* Checks the draft of a spec without loading it: both vocabularies must have equal tokens. They may differ in length by
 * at most MP_DRAFT_PADDING tokens, because files pad them differently. INVALID_ARGUMENT names both lengths or the first
 * different token; UNSUPPORTED: the draft is not a decoder of text. */
mp_status mp_draft_model_check(const mp_spec *spec, mp_error *error);
/* Loads the draft of args->spec, with the same compute type. */
mp_status mp_draft_model_load(const mp_load_args *args, mp_decoder **draft, mp_error *error);

void mp_drafter_init(mp_drafter *drafter, mp_decoder *model, mp_budget *budget);
void mp_drafter_deinit(mp_drafter *drafter);
/* Drops the blocks that no sequence needs. Returns the bytes released. */
uint64_t mp_drafter_trim(mp_drafter *drafter);
/* Drops all blocks, because memory is short, and pauses. Returns the bytes released. */
uint64_t mp_drafter_release(mp_drafter *drafter);

#endif
