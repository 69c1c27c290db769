/* decoder/engine.h: what an engine of a decoder is made of, and what its two files share: decoder/engine.c chooses and
 * runs steps, decoder/sampling.c makes tokens of what they computed. The worker's thread only. */
#ifndef MP_MODELS_DECODER_ENGINE_H
#define MP_MODELS_DECODER_ENGINE_H

#include "models/decoder/images.h"

typedef struct mp_step_seq { /* a sequence that takes part in this step */
    mp_sequence *seq;
    int plan; /* index in the plan */
    int choice, rows, output;
    int drafts, accepted; /* rows more, and of those the ones that were guessed right */
} mp_step_seq;

typedef struct mp_text_engine {
    mp_engine base;
    mp_decoder *model;
    mp_budget *budget;
    mp_prefix_cache cache;
    mp_arena arena;
    uint64_t charged;
    const mp_token_table *tokens;
    int admitted; /* items with a state */
    mp_speculation speculation;
    mp_step_seq *steps; /* [step_capacity] */
    int step_count, step_capacity;
    mp_decoder_images images; /* of a model that reads images */
    struct {               /* the tile that the next step computes, or goes on with; as planned */
        mp_item *item;     /* NULL: none */
        int tile;
        uint64_t budget_ns;
    } image_part;
} mp_text_engine;

/* A call whose answers were begun by an engine that is gone, or in another process, goes on where they stand: the same
 * tokens are accepted again, which gives the same text. */
mp_status mp_sequence_group_resume(mp_text_engine *engine, mp_item *item, mp_error *error);
/* Bytes of arena that mp_sequence_group_sample needs as scratch. */
size_t mp_sample_bytes(const mp_decoder *model);
/* Whether an answer that waited for its mask has it now; and the token that is drawn then from the logits that were
 * kept. scratch: as of mp_sequence_group_sample. */
bool mp_sequence_group_may_sample(const mp_item *item, int choice);
mp_status mp_sequence_group_sample_deferred(mp_text_engine *engine, mp_item *item, int choice, void *scratch);
/* After a pass over engine->steps: the next token of each answer that has logits, which are overwritten, and as many
 * more as were guessed right. outcomes [plan->count] */
void mp_sequence_group_sample(mp_text_engine *engine, const mp_plan *plan, const mp_decoder_pass *pass, void *scratch,
                              mp_outcome *outcomes);

#endif
