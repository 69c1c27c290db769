/* encoder/engine.h: the state of an encoder's engine. For engine.c, and for tests that change its limits. */
#ifndef MP_ENCODER_ENGINE_H
#define MP_ENCODER_ENGINE_H

#include "models/encoder/encoder.h"
#include "models/groups.h"

typedef struct mp_encoder_copy { /* a text that gets the vector of another text of the step */
    int text, owner;             /* index of that other text; index of the item of this text in the plan */
    float *out;
} mp_encoder_copy;

typedef struct mp_encoder_engine_state {
    mp_engine base;
    mp_encoder *model;
    mp_budget *budget;
    mp_arena arena;
    uint64_t charged;
    mp_encoder_text *texts;  /* [text_capacity] texts to compute */
    mp_dedup_input *inputs;  /* [text_capacity] the same texts, as far as they may share vectors */
    mp_groups groups;        /* groups of the texts */
    mp_encoder_copy *copies; /* [text_capacity] */
    int text_capacity, copy_count;
    mp_dedup_table dedup;
} mp_encoder_engine_state;

#endif
