/* capability.h: what a call asks and what it gets, one pair of structs a capability.
 *
 * A call is a `mp_call`: a request and its result in one allocation chain, made by the binding, owned by the ticket
 * until both its holders (the caller and the pool) have let go. Engines read the request and write the result; the
 * caller reads the result once the ticket is done, or, for streams, up to what has been published. */
#ifndef MP_MODELS_CAPABILITY_H
#define MP_MODELS_CAPABILITY_H

#include <stdatomic.h>

#include "base/alloc.h"
#include "models/capture.h"

typedef enum mp_capability {
#define MP_CAPABILITY(NAME, name, queue, bulk, policy) MP_##NAME,
#include "models/capabilities.def"
#undef MP_CAPABILITY
    MP_CAPABILITY_COUNT
} mp_capability;

typedef struct mp_capability_row {
    const char *name;
    int queue_capacity[2]; /* calls of one input, calls of many */
    const char *policy;
} mp_capability_row;
const mp_capability_row *mp_capability_get(mp_capability capability);
bool mp_capability_from_name(const char *name, mp_capability *capability);

typedef struct mp_call {
    mp_capability capability;
    void (*destroy)(struct mp_call *call); /* frees the whole chain */
    /* A hash of what is asked, equal for equal requests; never 0. NULL: it has none. */
    uint64_t (*fingerprint)(const struct mp_call *call);
    /* Units read and written so far: tokens, images. NULL: not counted. */
    void (*usage)(const struct mp_call *call, uint64_t *in, uint64_t *out);
    /* Whether the caller may have seen a piece of the result: then it does not begin again after a worker's fault.
     * NULL: there is nothing to be seen before the end. Any thread. */
    bool (*seen)(const struct mp_call *call);
    /* After a worker's fault it goes on from where it stands, as after a preemption: what it holds is of steps that
     * came to their end, a step that fails leaves it as it was, and what follows depends on that alone. */
    bool goes_on;
    uint64_t bytes; /* what it holds, charged to the queue's share of memory */
    bool tolerant;  /* the caller expects NaN and deals with it: no fault of the model's workers */
} mp_call;
static inline void mp_call_destroy(mp_call *call) {
    if (call)
        call->destroy(call);
}
/* A count of results that are complete, for whoever reads along: never fewer than before, also when the call is tried
 * again. */
static inline void mp_call_publish(_Atomic int32_t *done, int32_t count) {
    if (count > atomic_load_explicit(done, memory_order_relaxed))
        atomic_store_explicit(done, count, memory_order_release);
}

/* ---- text_embedding -------------------------------------------------------------------------------------------- */

enum { MP_EMBED_MOST_TEXTS = 1 << 24 };            /* of a call; checked where one is made */
enum { MP_EMBED_POOLED = 0, MP_EMBED_TOKENS = 1 }; /* one vector a text, or one a token (before pooling) */

typedef struct mp_embed_call {
    mp_call base;
    /* request */
    int32_t n_texts;
    int64_t n_tokens;   /* offsets[n_texts] */
    int32_t *ids;       /* [n_tokens], special tokens included */
    int64_t *offsets;   /* [n_texts + 1] */
    int32_t *skip;      /* [n_texts] leading tokens (a prompt) that pooling leaves out, or NULL */
    int32_t *second;    /* [n_texts] for pairs of texts: the token at which the second begins; or NULL */
    int32_t dimensions; /* first so many components, then normalised again; 0 = all */
    int8_t normalize;   /* 1, 0, or -1 = as the model says */
    uint8_t output;     /* MP_EMBED_* */
    /* result */
    int32_t width;        /* components a vector; filled by the engine's check before it is queued */
    float *vectors;       /* [n_texts, width] or [n_tokens, width]; 64-byte aligned; numpy adopts it */
    _Atomic int32_t done; /* texts finished so far; never fewer than before, also when it is tried again */
} mp_embed_call;

/* Copies ids, offsets and skip (NULL allowed). vectors is allocated by mp_embed_call_output once width is known. */
mp_status mp_embed_call_create(int32_t n_texts, const int32_t *ids, const int64_t *offsets, const int32_t *skip,
                               mp_embed_call **call, mp_error *error);
/* Makes the texts pairs: copies second. Each 1 <= second < tokens of its text; checked with the call. */
mp_status mp_embed_call_pairs(mp_embed_call *call, const int32_t *second, mp_error *error);
mp_status mp_embed_call_output(mp_embed_call *call, int32_t width, mp_error *error);

/* ---- image_embedding ------------------------------------------------------------------------------------------- */

enum { /* of a call; checked where one is made */
       MP_IMAGE_MOST = 1 << 20,
       MP_IMAGE_MOST_SIDE = 1 << 14, /* pixels */
       MP_IMAGE_CHANNELS = 3
};

typedef struct mp_image_call {
    mp_call base;
    /* request */
    int32_t n_images;
    int32_t *sizes;     /* [n_images, 2] height and width in pixels */
    int64_t *offsets;   /* [n_images + 1] of an image's bytes in pixels */
    uint8_t *pixels;    /* image i [height, width, 3], red, green, blue, resized and cropped as the model wants it; mean
                         * and deviation are the model's to apply */
    int32_t dimensions; /* as of mp_embed_call */
    int8_t normalize;
    uint8_t output; /* MP_EMBED_POOLED, or MP_EMBED_TOKENS: all rows of the last layer, before the last norm */
    /* result */
    int64_t n_rows; /* of all images; filled by the engine's check before it is queued, as are these two */
    uint64_t most_parts; /* that an image of it is computed in */
    int32_t width;
    float *vectors;       /* [n_images, width] or [n_rows, width]; 64-byte aligned; numpy adopts it */
    _Atomic int32_t done; /* images finished so far; never fewer than before, also when it is tried again */
} mp_image_call;

/* Copies the sizes, and the pixels, which are as many bytes as the sizes say: n_bytes. */
mp_status mp_image_call_create(int32_t n_images, const int32_t *sizes, const uint8_t *pixels, int64_t n_bytes,
                               mp_image_call **call, mp_error *error);
mp_status mp_image_call_output(mp_image_call *call, int64_t n_rows, int32_t width, mp_error *error);

/* ---- text_to_text ---------------------------------------------------------------------------------------------- */

enum {                                      /* of a call; checked where one is made, so that nobody behind it has to */
       MP_TEXT_MOST_TOKENS = INT32_MAX / 8, /* of a prompt, and of an answer */
       MP_TEXT_MOST_CHOICES = 128,
       MP_TEXT_MOST_STOPS = 64,
       MP_TEXT_MOST_STOP_BYTES = 1024,
       MP_TEXT_MOST_IDS = 4096, /* to stop at; with a bias */
       MP_TEXT_MOST_LOGPROBS = 20,
       MP_TEXT_MOST_MASK_BYTES = 1 << 20
};

typedef enum mp_finish {
    MP_FINISH_NONE,
    MP_FINISH_STOP,
    MP_FINISH_LENGTH,
    MP_FINISH_EOS,
    MP_FINISH_CANCELLED
} mp_finish;

typedef struct mp_sampling {
    float temperature;        /* 0 = greedy */
    int32_t top_k;            /* 0 = off */
    float top_p, min_p;       /* 1 and 0 = off */
    float repetition_penalty; /* 1 = off; of tokens in prompt or output it divides positive logits, multiplies others */
    float presence_penalty, frequency_penalty; /* 0 = off; over the output only */
    uint64_t seed;
    int32_t max_tokens, min_tokens;
    int32_t logprobs; /* -1 = none, else how many alternatives (0..20) beside the chosen token */
    bool ignore_eos;
} mp_sampling;

typedef struct mp_token_out { /* one generated token as the caller may see it */
    int32_t id;
    float logprob;     /* of the unmodified distribution; NaN when not asked for */
    uint32_t byte_end; /* end of its text in choice->text */
} mp_token_out;

typedef struct mp_choice { /* one of n answers; written by the engine, read by the caller */
    mp_token_out *tokens;  /* [max_tokens] */
    int32_t *top_ids;      /* [max_tokens, logprobs] or NULL */
    float *top_logprobs;   /* [max_tokens, logprobs] or NULL */
    char *text;            /* [text_capacity] bytes, valid UTF-8 up to text_bytes */
    uint32_t text_capacity;
    _Atomic uint32_t token_count; /* tokens written; release after they are complete */
    _Atomic uint32_t
        text_bytes;         /* text that is decided: no half character, nothing that may still become a stop string */
    _Atomic int32_t finish; /* mp_finish */
    int32_t stop_index;     /* which stop string or id ended it, or -1 */
} mp_choice;

/* The images of a prompt, for models that read them (models/vision/vision.h): tiles, each a piece of an image that goes
 * through the network alone, and runs of placeholders that rows of consecutive tiles stand for. */
enum { MP_IMAGE_KEY = 16, /* bytes of a hash that nobody can find two inputs for */
       MP_TEXT_MOST_TILES = 4096 };

typedef struct mp_image_run {
    int32_t start, rows; /* of the prompt's tokens */
    int32_t tile, tiles; /* its image's */
    int64_t source;      /* of its first row, in `sources` */
} mp_image_run;

typedef struct mp_text_images {
    int32_t n_tiles, n_runs;
    int32_t *sizes;     /* [n_tiles, 2] height and width in pixels */
    int64_t *offsets;   /* [n_tiles + 1] of a tile's bytes in pixels */
    uint8_t *pixels;    /* as of mp_image_call */
    uint8_t *tile_keys; /* [n_tiles, MP_IMAGE_KEY] hashes of size and pixels */
    mp_image_run *runs; /* [n_runs] in the prompt's order, each with tiles of its own */
    uint8_t *run_keys;  /* [n_runs, MP_IMAGE_KEY] hashes of its tiles and its sources */
    int32_t *sources;   /* [rows of all runs] which row of its image's tiles stands there, -1 = the newline; NULL: one
                         * after the other */
    uint64_t most_parts; /* that all tiles are computed in; filled by the engine's check before it is queued */
} mp_text_images;

/* Which tokens may come next in one answer, by a grammar that lives outside the core: a bit an id, 1 = it may; ids
 * beyond the bits may not. The caller writes the bits for a place when it has seen the token before it, and the engine
 * reads them before it writes the token of that place: one buffer is enough. */
typedef struct mp_token_mask {
    _Atomic uint32_t ready; /* the bits are for token `ready - 1` of the answer; release after they are complete */
    uint32_t *bits;         /* [mask_words] */
} mp_token_mask;

typedef struct mp_text_call {
    mp_call base;
    /* request */
    int32_t n_prompt;
    int32_t *prompt; /* [n_prompt] */
    mp_sampling sampling;
    int32_t n_choices;
    int32_t n_stop;      /* stop strings */
    char **stop;         /* [n_stop] bytes */
    int32_t *stop_bytes; /* [n_stop] lengths, at least 1 */
    int32_t n_stop_ids;
    int32_t *stop_ids;
    int32_t n_bias;
    int32_t *bias_ids; /* [n_bias] */
    float *bias;       /* [n_bias] added to the logits first */
    mp_text_images images;
    int32_t mask_words;   /* 0 = any token may come */
    mp_token_mask *masks; /* [n_choices], or NULL without words; written while the call runs */
    /* result */
    mp_choice *choices;                               /* [n_choices] */
    int32_t cached_tokens;                            /* prompt tokens that a prefix hit saved */
    uint64_t started_ns, prompt_done_ns, finished_ns; /* of the monotonic clock; 0 = not yet */
    float *prompt_logits; /* [n_prompt, vocab] when want_prompt_logits, for tests and scoring; else NULL */
    float *image_rows;    /* [rows of all runs, hidden] when want_prompt_logits, as they were computed; else NULL */
    int32_t hidden;       /* columns of image_rows; the check's */
    bool want_prompt_logits;
    mp_capture capture;    /* of calls with one answer */
    int32_t vocab;         /* columns of prompt_logits; the engine's check fills it in, and this: */
    int32_t sampled_vocab; /* ids from here on are never drawn */
    int32_t context;       /* tokens of prompt and answer that the model reads at most */
    const int32_t *ends;   /* [n_ends] ids that end an answer: the model's, to be looked at while it serves the call */
    int32_t n_ends;
    uint64_t output_bytes; /* what mp_text_call_output allocated, and for what: */
    uint32_t output_token_bytes;
    int32_t output_vocab, output_hidden, output_layers;
} mp_text_call;

typedef struct mp_text_image_args {
    int32_t n_tiles, n_runs;
    const int32_t *sizes;
    const uint8_t *pixels;
    int64_t n_bytes;
    const uint8_t *tile_keys, *run_keys;
    const int32_t *runs; /* [n_runs, 3] start, rows, tiles */
    const int32_t *sources;
    int64_t n_sources; /* 0: none */
} mp_text_image_args;

/* Copies everything. INVALID_ARGUMENT beyond the bounds above. */
typedef struct mp_text_args {
    int32_t n_prompt;
    const int32_t *prompt;
    mp_sampling sampling;
    int32_t n_choices, n_stop;
    const char *const *stop;
    const int32_t *stop_bytes;
    int32_t n_stop_ids;
    const int32_t *stop_ids;
    int32_t n_bias;
    const int32_t *bias_ids;
    const float *bias;
    bool want_prompt_logits;
    int32_t capture_values, capture_records; /* see mp_capture; 0: nothing is captured */
    bool vision; /* a call to a model that reads images, of which there may be none */
    const void *mask; /* [mask_bytes] for the first token of each answer; NULL: none, now and later */
    int64_t mask_bytes; /* a multiple of 4 */
    mp_text_image_args images;
} mp_text_args;
mp_status mp_text_call_create(const mp_text_args *args, mp_text_call **call, mp_error *error);
/* The mask for token `index` of an answer, the one that comes next; as many bytes as were given at first. One thread at
 * a time for an answer; the worker is to be told (mp_ticket_wake). INVALID_ARGUMENT: there is no such answer, it is not
 * masked, or the size is another. */
mp_status mp_text_call_mask(mp_text_call *call, int choice, uint32_t index, const void *mask, int64_t mask_bytes,
                            mp_error *error);
/* The bits for token `index` of an answer, or NULL: they are not there yet. */
static inline const uint32_t *mp_text_call_mask_at(const mp_text_call *call, int choice, uint32_t index) {
    const mp_token_mask *mask = &call->masks[choice];
    return __atomic_load_n((const uint32_t *)&mask->ready, __ATOMIC_ACQUIRE) == index + 1 ? mask->bits : NULL;
}
/* Allocates what the answers are written to, once the model is known: tokens, alternatives and text of every choice,
 * prompt_logits and records when wanted. A token adds at most max_token_bytes bytes, each of which may become U+FFFD
 * (3 bytes).
 * A queued call may be checked again after its model was replaced: what does not fit the new one is made anew, and is
 * MODEL when the answer has tokens. An answer that was begun goes on over a reload of the same files, which give the
 * same sizes (mp_spec_same_file). */
mp_status mp_text_call_output(mp_text_call *call, uint32_t max_token_bytes, mp_error *error);

/* ---- text_to_image --------------------------------------------------------------------------------------------- */

enum { /* of a call; checked where one is made */
       MP_DRAW_MOST_SIDE = 8192,  /* pixels */
       MP_DRAW_MOST_PICTURES = 64,
       MP_DRAW_MOST_STEPS = 1000,
       MP_DRAW_TEXTS = 2,         /* what to draw, and what not to */
       MP_DRAW_ENCODERS = 3,
       MP_DRAW_MOST_TOKENS = 4096 /* for one encoder */
};

typedef struct mp_draw_call {
    mp_call base;
    /* request */
    int32_t width, height; /* pixels */
    int32_t n_pictures, n_steps;
    int32_t n_texts;       /* 1, or 2: guided away from the second */
    int32_t *ids[MP_DRAW_TEXTS][MP_DRAW_ENCODERS]; /* tokens for each encoder, padded as it wants; NULL: not used */
    int32_t n_ids[MP_DRAW_ENCODERS];               /* as many for both texts */
    float guidance;        /* with two texts: scale; with one: what a distilled model is told */
    float *times;          /* [n_steps] 0..1000, as the model is told */
    float *sigmas;         /* [n_steps + 1] shares of noise, descending */
    float *noise;          /* [n_pictures, channels, high, wide] latents to start from */
    int64_t n_noise;       /* floats of it */
    int32_t preview_every; /* steps between previews; 0 = none */
    bool keep;             /* text embeddings and the latents after each step, for tests */
    /* result; sizes are known once it was checked against the model */
    int32_t channels, high, wide; /* of latents */
    int32_t text_rows, text_width, pooled_width;
    float *latents;        /* [n_pictures, channels, high, wide] as far as they are */
    float *pixels;         /* [n_pictures, height, width, 3], 0 to 1 */
    uint8_t *previews;     /* [n_pictures, n_previews, height, width, 3] */
    int32_t n_previews;    /* of a picture */
    float *preview_latents; /* [channels, high, wide] of the preview that is being made; NULL without previews */
    float *texts;          /* keep: [n_texts, text_rows, text_width] */
    float *pooled;         /* keep: [n_texts, pooled_width] */
    float *history;        /* keep: [n_pictures, n_steps, channels, high, wide] */
    uint64_t output_bytes;
    _Atomic int32_t steps_done;    /* of all pictures together; release after they are complete */
    _Atomic int32_t previews_done; /* likewise, picture by picture */
    _Atomic int32_t pictures_done; /* likewise: decoded */
} mp_draw_call;

typedef struct mp_draw_args {
    int32_t width, height, n_pictures, n_steps, n_texts;
    const int32_t *ids[MP_DRAW_TEXTS][MP_DRAW_ENCODERS];
    int32_t n_ids[MP_DRAW_ENCODERS];
    float guidance;
    const float *times, *sigmas, *noise;
    int64_t n_noise;
    int32_t preview_every;
    bool keep;
} mp_draw_args;
/* Copies everything. INVALID_ARGUMENT beyond the bounds above. */
mp_status mp_draw_call_create(const mp_draw_args *args, mp_draw_call **call, mp_error *error);
/* Allocates the results, once channels ... pooled_width are known; anew when a replaced model needs others. */
mp_status mp_draw_call_output(mp_draw_call *call, mp_error *error);
/* How far a call is, in units: steps of picture after picture, then pictures decoded. Previews are made in their order,
 * each after the step that it is of; so many are due once `cursor` units are done. */
int32_t mp_draw_previews_due(const mp_draw_call *call, uint32_t cursor);
static inline uint32_t mp_draw_steps(const mp_draw_call *call) {
    return (uint32_t)(call->n_pictures * call->n_steps);
}
static inline int64_t mp_draw_latents(const mp_draw_call *call) { /* floats of a picture's */
    return (int64_t)call->channels * call->high * call->wide;
}

#endif
