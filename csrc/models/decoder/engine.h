/* decoder/engine.h: the engine of a decoder, shared by its five files: decoder/scheduling.c plans steps,
 * decoder/engine.c runs them, decoder/sampling.c turns logits into tokens, decoder/drafts.c decides about drafts,
 * decoder/drafting.c runs the draft model. Only the worker's thread uses it. */
#ifndef MP_MODELS_DECODER_ENGINE_H
#define MP_MODELS_DECODER_ENGINE_H

#include "models/decoder/drafting.h"
#include "models/decoder/images.h"
#include "models/threads.h"

enum { MP_STEP_ROWS = 512 }; /* maximum rows of a pass; a prefill may add a few */

typedef struct mp_step_seq { /* a sequence in this step */
    mp_sequence *seq;
    int plan; /* index of its item in the plan */
    int choice, rows, output;
    int drafts, accepted; /* draft rows after `rows`; number of drafts accepted */
} mp_step_seq;

typedef struct mp_text_engine {
    mp_engine base;
    mp_decoder *model;
    mp_budget *budget;
    mp_prefix_cache cache;
    mp_arena arena;
    uint64_t charged;
    const mp_token_table *tokens;
    int admitted; /* number of admitted items, without preempted ones */
    mp_speculation speculation;
    mp_drafter drafter;
    mp_thread_tuner tuner;
    mp_step_seq *steps; /* [step_capacity] */
    int step_count, step_capacity;
    int short_rows; /* rows of the planned step that the budget allows, if it has more because the worker is alone; or
                     * 0 */
    struct mp_image_store *images; /* decoder/images.h; NULL: the model takes no images */
    struct {               /* planned work on one image tile in the next step */
        mp_item *item;     /* NULL: none */
        int tile;
        uint64_t budget_ns;
    } image_part;
    struct {               /* planned work on the rows of an image, in a pass of their own, in the next step */
        mp_item *item;     /* NULL: none */
        int choice;
        uint64_t budget_ns;
    } span;
} mp_text_engine;

/* Plans all decode rows first; prefills share the rows for which time is left, in the given order. The first prefill
 * may always have a few rows, so that many decoding sequences cannot starve it. A span that exceeds them has a pass of
 * its own, which a step leaves when its time is used up. A function of mp_engine_ops. */
void mp_decoder_plan_step(mp_engine *base, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan);
/* Returns the rows that a sequence could compute now, at most `most`, in a pass with other sequences. *missing: the
 * first image tile that a row needs and that is not computed, or -1. */
int mp_sequence_step_rows(mp_text_engine *engine, const mp_item *item, mp_sequence *seq, int most, int *missing);
/* Replays the tokens of a request that another engine or process has begun, so that its sequences continue after these
 * tokens. Accepting the same tokens gives the same text. */
mp_status mp_sequence_group_resume(mp_text_engine *engine, mp_item *item, mp_error *error);
/* Returns the bytes of scratch that sampling needs. */
size_t mp_sample_bytes(const mp_decoder *model);
/* mp_sequence_group_may_sample returns true if a sequence that waited for its mask now has it;
 * mp_sequence_group_sample_deferred then samples from the kept logits. scratch: mp_sample_bytes. */
bool mp_sequence_group_may_sample(const mp_item *item, int choice);
mp_status mp_sequence_group_sample_deferred(mp_text_engine *engine, mp_item *item, int choice, void *scratch);
/* Returns how the request samples the token at `index` of a completion, without its mask. */
mp_sample_args mp_sequence_group_sample_args(const mp_item *item, int choice, uint32_t index);
/* Lets the draft model propose tokens for the n sequences, if it is expected to pay: its tokens then replace those of
 * their drafts. Uses the arena. */
void mp_drafter_propose(mp_text_engine *engine, mp_lease *lease, const mp_plan *plan, mp_step_seq **steps, int n);
/* Call after a pass over engine->steps. Samples the next token of each sequence that has logits, and one more token for
 * each accepted draft token. Overwrites the logits. scratch: mp_sample_bytes. outcomes [plan->count]. */
void mp_sequence_group_sample(mp_text_engine *engine, const mp_plan *plan, const mp_decoder_pass *pass, void *scratch,
                              mp_outcome *outcomes);

#endif
