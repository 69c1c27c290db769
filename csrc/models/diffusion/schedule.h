/* diffusion/schedule.h: a call that is being drawn: where it stands, what it holds, and the engine's stages. Of the
 * engine's files only (engine.c: the step interface; phases.c: what comes after what; stages.c: memory and blocks;
 * check.c: calls).
 *
 *   ENCODE ---> DENOISE ---> DECODE ---> FINISHED
 *                 |   ^
 *                 v   |  after a step with a preview
 *                PREVIEW
 *
 * A call that was preempted loses what it holds, but not what the call itself has: latents after the last step, and
 * what a preview that is due is to show. So its place can be told from the call alone (mp_diff_place), and it goes on
 * with the step, preview or picture that it was in. */
#ifndef MP_MODELS_DIFFUSION_SCHEDULE_H
#define MP_MODELS_DIFFUSION_SCHEDULE_H

#include "models/diffusion/texts.h"

typedef enum mp_diff_phase {
    MP_DIFF_ENCODE,  /* texts that are not known */
    MP_DIFF_DENOISE,
    MP_DIFF_PREVIEW, /* of the step that was just done */
    MP_DIFF_DECODE,  /* pictures whose steps are all done */
    MP_DIFF_FINISHED
} mp_diff_phase;

typedef struct mp_diff_position {
    mp_diff_phase phase;
    int image;   /* that is denoised, shown or decoded, or will be when texts are known */
    int step;    /* how many of its denoising steps are done; DECODE: not looked at */
    int encoder; /* ENCODE: which; MP_DIFF_ENCODERS: all texts are known */
    int text;    /* ENCODE, DENOISE: the one that the pass is over */
    int block;   /* of the phase's network, the next to be run */
} mp_diff_position;

typedef struct mp_diff_state { /* of an item, from admit to retire or preempt */
    mp_diff_position at;
    mp_diff_texts *texts[MP_DRAW_TEXTS]; /* used */
    bool known[MP_DRAW_TEXTS];           /* found, not to be computed */
    /* Each phase takes its memory when it begins and gives it back when it is over. */
    mp_diff_text run;
    mp_diff_memory encoding;
    mp_dit_pass pass;
    mp_diff_memory denoising;
    float *latents, *velocity[MP_DRAW_TEXTS]; /* of the step, [picture rows, 4 channels] */
    mp_vae_image image_run;
    mp_diff_memory decoding;
} mp_diff_state;

typedef struct mp_diffusion_engine {
    mp_engine base;
    mp_diffusion *model;
    mp_budget *budget;
    mp_arena arena;
    uint64_t charged; /* for the arena */
    uint64_t weights; /* for blocks */
    uint64_t items;   /* for what items hold */
    mp_diff_block *blocks[MP_DIFF_STAGES];
    mp_diff_cache cache;
    mp_item *current; /* the one being drawn */
    uint64_t budget_ns;
} mp_diffusion_engine;

static inline mp_image_generation_request *mp_diff_call(const mp_item *item) {
    return (mp_image_generation_request *)item->call;
}

/* ---- phases.c ---------------------------------------------------------------------------------------------------- */

/* Where a call with so many units done goes on, once texts are known or taken from the cache. */
mp_diff_position mp_diff_place(const mp_image_generation_request *call, uint32_t cursor);
/* One block. *done: it was not called off. */
mp_status mp_diff_advance(mp_diffusion_engine *engine, mp_item *item, mp_lease *lease, bool *done, mp_error *error);

/* ---- stages.c ---------------------------------------------------------------------------------------------------- */

/* Give up the weights of all stages but one, or of all (-1). Returns how many bytes are free now. */
uint64_t mp_diff_drop_others(mp_diffusion_engine *engine, int stage);
/* Memory of an item for a phase that runs `stage`: one piece for `count` parts of so many floats each. */
mp_status mp_diff_hold(mp_diffusion_engine *engine, mp_diff_memory *memory, int stage, int count, float **const parts[],
                       const size_t sizes[], mp_error *error);
void mp_diff_let_go(mp_diffusion_engine *engine, mp_diff_memory *memory);
/* Run block `index` of a stage (of the transformer: one more than there are, its end) for what the state says. *done:
 * it was not called off. */
mp_status mp_diff_run_block(mp_diffusion_engine *engine, mp_diff_state *state, mp_lease *lease, int stage, int index,
                            bool *done, mp_error *error);

#endif
