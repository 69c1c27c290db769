/* diffusion/schedule.h: the state of an image request in the engine, and the engine itself. Internal to the engine's
 * files: engine.c (step interface), phases.c (order of the phases), stages.c (memory and blocks), check.c.
 *
 *   ENCODE ---> DENOISE ---> DECODE ---> FINISHED
 *                 |   ^
 *                 v   |  after a step with a preview
 *                PREVIEW
 *
 * Preemption frees this state. The request itself keeps the latents after the last step, and the predicted latents of a
 * preview that is due. mp_diff_place derives the position from the request alone, so a resumed request continues with
 * the same step, preview or image. */
#ifndef MP_MODELS_DIFFUSION_SCHEDULE_H
#define MP_MODELS_DIFFUSION_SCHEDULE_H

#include "models/diffusion/texts.h"

typedef enum mp_diff_phase {
    MP_DIFF_ENCODE,  /* encodes the texts that are not cached */
    MP_DIFF_DENOISE,
    MP_DIFF_PREVIEW, /* decodes a preview of the step just finished */
    MP_DIFF_DECODE,  /* decodes the images, whose steps are all finished */
    MP_DIFF_FINISHED
} mp_diff_phase;

typedef struct mp_diff_position {
    mp_diff_phase phase;
    int image;   /* image to denoise, preview or decode; ENCODE: image to denoise next */
    int step;    /* finished denoising steps of the image; DECODE: unused */
    int encoder; /* ENCODE: current encoder; MP_DIFF_ENCODERS: all texts are encoded */
    int text;    /* ENCODE, DENOISE: text of the current pass */
    int block;   /* next block of the phase's network */
} mp_diff_position;

typedef struct mp_diff_state { /* state of an item, from admit to retire or preempt */
    mp_diff_position at;
    mp_diff_texts *texts[MP_T2I_TEXTS]; /* entries of the text cache, one reference each; or NULL */
    bool known[MP_T2I_TEXTS];           /* the text was complete in the cache: skip the encoders */
    /* A phase allocates its memory when it begins and frees it when it ends. */
    mp_diff_text run;
    mp_diff_memory encoding;
    mp_dit_pass pass;
    mp_diff_memory denoising;
    float *latents, *velocity[MP_T2I_TEXTS]; /* latents and velocities of the current step, [image rows, 4 channels]
                                              * each */
    mp_vae_image image_run;
    mp_diff_memory decoding;
} mp_diff_state;

typedef struct mp_diffusion_engine {
    mp_engine base;
    mp_diffusion *model;
    mp_budget *budget;
    mp_arena arena;
    uint64_t charged; /* bytes charged for the arena */
    uint64_t weights; /* bytes charged for blocks */
    uint64_t items;   /* bytes charged for phases of items */
    mp_diff_block *blocks[MP_DIFF_STAGES];
    mp_diff_cache cache;
    mp_item *current; /* the request in progress, or NULL */
    uint64_t budget_ns;
} mp_diffusion_engine;

static inline mp_image_generation_request *mp_diff_request(const mp_item *item) {
    return (mp_image_generation_request *)item->request;
}

/* ---- phases.c ---------------------------------------------------------------------------------------------------- */

/* Position at which a request with `cursor` finished units resumes. A request that resumes in ENCODE reuses the texts
 * that are still cached. */
mp_diff_position mp_diff_place(const mp_image_generation_request *request, uint32_t cursor);
/* Compute one block. Sets *done to false if the step was cancelled. */
mp_status mp_diff_advance(mp_diffusion_engine *engine, mp_item *item, mp_lease *lease, bool *done, mp_error *error);

/* ---- stages.c ---------------------------------------------------------------------------------------------------- */

/* Free the weights of all stages but `stage` (-1: of all). Returns the bytes freed. */
uint64_t mp_diff_drop_others(mp_diffusion_engine *engine, int stage);
/* Allocate an item's memory for a phase that runs `stage`: one block, split into `count` parts of sizes[i] floats. */
mp_status mp_diff_hold(mp_diffusion_engine *engine, mp_diff_memory *memory, int stage, int count, float **const parts[],
                       const size_t sizes[], mp_error *error);
/* Frees the memory of a phase and returns its bytes to the budget. Zeroed memory is legal. */
void mp_diff_let_go(mp_diffusion_engine *engine, mp_diff_memory *memory);
/* Run block `index` of a stage. For the transformer, index block_count runs its output layers. Sets *done to false if
 * the step was cancelled. */
mp_status mp_diff_run_block(mp_diffusion_engine *engine, mp_diff_state *state, mp_lease *lease, int stage, int index,
                            bool *done, mp_error *error);

#endif
