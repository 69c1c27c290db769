/* capability.h: what a call asks and what it gets, one pair of structs a capability.
 *
 * A call is a `mp_request`: a request and its result in one allocation chain, made by the binding, owned by the ticket
 * until both its holders (the caller and the pool) have let go. Engines read the request and write the result; the
 * caller reads the result once the ticket is done, or, for streams, up to what has been published. */
#ifndef MP_MODELS_CAPABILITY_H
#define MP_MODELS_CAPABILITY_H

#include <stdatomic.h>

#include "base/alloc.h"
#include "models/capture.h"
#include "models/requests/schema.h"

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

typedef struct mp_request {
    mp_capability capability;
    void (*destroy)(struct mp_request *call); /* frees the whole chain */
    /* A hash of what is asked, equal for equal requests; never 0. NULL: it has none. */
    uint64_t (*fingerprint)(const struct mp_request *call);
    /* Units read and written so far: tokens, images. NULL: not counted. */
    void (*usage)(const struct mp_request *call, uint64_t *in, uint64_t *out);
    /* Whether the caller may have seen a piece of the result: then it does not begin again after a worker's fault.
     * NULL: there is nothing to be seen before the end. Any thread. */
    bool (*seen)(const struct mp_request *call);
    /* After a worker's fault it goes on from where it stands, as after a preemption: what it holds is of steps that
     * came to their end, a step that fails leaves it as it was, and what follows depends on that alone. */
    bool goes_on;
    uint64_t bytes;        /* memory of the request, charged to the queue's share */
    uint64_t output_bytes; /* of them: its outputs */
    bool tolerant;  /* the caller expects NaN and deals with it: no fault of the model's workers */
} mp_request;
static inline void mp_request_destroy(mp_request *call) {
    if (call)
        call->destroy(call);
}
/* A count of results that are complete, for whoever reads along: never fewer than before, also when the call is tried
 * again. */
static inline void mp_request_publish(_Atomic int32_t *done, int32_t count) {
    if (count > atomic_load_explicit(done, memory_order_relaxed))
        atomic_store_explicit(done, count, memory_order_release);
}

/* ---- text_embedding -------------------------------------------------------------------------------------------- */

enum { MP_EMBED_MOST_TEXTS = 1 << 24 };
enum { MP_EMBED_POOLED = 0, MP_EMBED_TOKENS = 1 }; /* one vector per text, or one per token (before pooling) */

#define MP_SCHEMA "models/requests/text_embedding.def"
typedef struct mp_embedding_args {
#include "models/requests/passes/args.def"
} mp_embedding_args;
typedef struct mp_embedding_request {
    mp_request base;
#include "models/requests/passes/fields.def"
} mp_embedding_request;
#undef MP_SCHEMA

/* Copies `args`. INVALID_ARGUMENT outside of the schema's bounds. */
mp_status mp_embedding_request_create(const mp_embedding_args *args, mp_embedding_request **call, mp_error *error);
/* Allocates the outputs, once the model's width is known; anew if a replaced model has another one. */
mp_status mp_embedding_request_output(mp_embedding_request *call, int32_t width, mp_error *error);
static inline int64_t mp_embedding_request_rows(const mp_embedding_request *call) { /* of vectors */
    return call->output == MP_EMBED_TOKENS ? call->n_tokens : call->n_texts;
}

/* ---- image_embedding ------------------------------------------------------------------------------------------- */

enum {
    MP_IMAGE_MOST = 1 << 20,
    MP_IMAGE_MOST_SIDE = 1 << 14, /* pixels */
    MP_IMAGE_CHANNELS = 3
};

#define MP_SCHEMA "models/requests/image_embedding.def"
typedef struct mp_image_embedding_args {
#include "models/requests/passes/args.def"
} mp_image_embedding_args;
typedef struct mp_image_embedding_request {
    mp_request base;
#include "models/requests/passes/fields.def"
} mp_image_embedding_request;
#undef MP_SCHEMA

/* Copies `args`. INVALID_ARGUMENT outside of the schema's bounds, or if `sizes` make another number of bytes. */
mp_status mp_image_embedding_request_create(const mp_image_embedding_args *args, mp_image_embedding_request **call,
                                            mp_error *error);
/* Allocates the outputs, once the model's rows and width are known; anew if a replaced model has others. */
mp_status mp_image_embedding_request_output(mp_image_embedding_request *call, int64_t n_rows, int32_t width,
                                            mp_error *error);
static inline int64_t mp_image_embedding_request_rows(const mp_image_embedding_request *call) { /* of vectors */
    return call->output == MP_EMBED_TOKENS ? call->n_rows : call->n_images;
}

/* ---- text_to_text ---------------------------------------------------------------------------------------------- */

enum {
    MP_TEXT_MOST_TOKENS = INT32_MAX / 8, /* of a prompt, and of a completion */
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

#define MP_SCHEMA "models/requests/sampling.def"
typedef struct mp_sampling {
#include "models/requests/passes/fields.def"
} mp_sampling;
#undef MP_SCHEMA

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

/* The images of a prompt, for models that read them (models/vision/vision.h). */
enum { MP_IMAGE_KEY = 16, /* bytes of a hash for which nobody can find two inputs */
       MP_TEXT_MOST_TILES = 4096 };

typedef struct mp_image_run {
    int32_t start, rows; /* of the prompt's tokens */
    int32_t tile, tiles; /* its image's */
    int64_t source;      /* of its first row, in `sources` */
} mp_image_run;

#define MP_SCHEMA "models/requests/text_images.def"
typedef struct mp_text_image_args {
#include "models/requests/passes/args.def"
} mp_text_image_args;
typedef struct mp_text_images {
#include "models/requests/passes/fields.def"
} mp_text_images;
#undef MP_SCHEMA
static inline int64_t mp_text_images_rows(const mp_text_images *images) { /* of all runs */
    const mp_image_run *last = images->n_runs > 0 ? &images->runs[images->n_runs - 1] : NULL;
    return last ? last->source + last->rows : 0;
}

/* Which tokens may come next in one answer, by a grammar that lives outside the core: a bit an id, 1 = it may; ids
 * beyond the bits may not. The caller writes the bits for a place when it has seen the token before it, and the engine
 * reads them before it writes the token of that place: one buffer is enough. */
typedef struct mp_token_mask {
    _Atomic uint32_t ready; /* the bits are for token `ready - 1` of the answer; release after they are complete */
    uint32_t *bits;         /* [mask_words] */
} mp_token_mask;

#define MP_SCHEMA "models/requests/text_to_text.def"
typedef struct mp_text_args {
#include "models/requests/passes/args.def"
} mp_text_args;
typedef struct mp_text_request {
    mp_request base;
#include "models/requests/passes/fields.def"
    mp_text_images images;
    int32_t mask_words;   /* 0 = any token may come */
    mp_token_mask *masks; /* [n_choices], or NULL without words; written while the request runs */
    /* result */
    mp_choice *choices;                               /* [n_choices] */
    int32_t cached_tokens;                            /* prompt tokens that a prefix hit saved */
    uint64_t started_ns, prompt_done_ns, finished_ns; /* of the monotonic clock; 0 = not yet */
    int32_t hidden;        /* columns of image_rows; filled in by the engine's check */
    mp_capture capture;    /* of calls with one answer */
    int32_t vocab;         /* columns of prompt_logits; the engine's check fills it in, and this: */
    int32_t sampled_vocab; /* ids from here on are never drawn */
    int32_t context;       /* tokens of prompt and answer that the model reads at most */
    const int32_t *ends;   /* [n_ends] ids that end an answer: the model's, to be looked at while it serves the call */
    int32_t n_ends;
    /* sizes for which the outputs were allocated */
    uint32_t output_token_bytes;
    int32_t output_vocab, output_hidden, output_layers;
} mp_text_request;

#undef MP_SCHEMA

/* Copies `args`. INVALID_ARGUMENT outside of the schema's bounds. */
mp_status mp_text_request_create(const mp_text_args *args, mp_text_request **call, mp_error *error);
/* The mask for token `index` of an answer, the one that comes next; as many bytes as were given at first. One thread at
 * a time for an answer; the worker is to be told (mp_ticket_wake). INVALID_ARGUMENT: there is no such answer, it is not
 * masked, or the size is another. */
mp_status mp_text_request_mask(mp_text_request *call, int choice, uint32_t index, const void *mask, int64_t mask_bytes,
                            mp_error *error);
/* The bits for token `index` of an answer, or NULL: they are not there yet. */
static inline const uint32_t *mp_text_request_mask_at(const mp_text_request *call, int choice, uint32_t index) {
    const mp_token_mask *mask = &call->masks[choice];
    return __atomic_load_n((const uint32_t *)&mask->ready, __ATOMIC_ACQUIRE) == index + 1 ? mask->bits : NULL;
}
/* Allocates what the answers are written to, once the model is known: tokens, alternatives and text of every choice,
 * prompt_logits and records when wanted. A token adds at most max_token_bytes bytes, each of which may become U+FFFD
 * (3 bytes).
 * A queued call may be checked again after its model was replaced: what does not fit the new one is made anew, and is
 * MODEL when the answer has tokens. An answer that was begun goes on over a reload of the same files, which give the
 * same sizes (mp_spec_same_file). */
mp_status mp_text_request_output(mp_text_request *call, uint32_t max_token_bytes, mp_error *error);

/* ---- text_to_image --------------------------------------------------------------------------------------------- */

enum {
    MP_DRAW_MOST_SIDE = 8192, /* pixels */
    MP_DRAW_MOST_PICTURES = 64,
    MP_DRAW_MOST_STEPS = 1000,
    MP_DRAW_TEXTS = 2, /* the prompt, and the negative prompt */
    MP_DRAW_ENCODERS = 3,
    MP_DRAW_MOST_TOKENS = 4096 /* for one encoder */
};

#define MP_SCHEMA "models/requests/text_to_image.def"
typedef struct mp_image_generation_args {
#include "models/requests/passes/args.def"
} mp_image_generation_args;
typedef struct mp_image_generation_request {
    mp_request base;
#include "models/requests/passes/fields.def"
} mp_image_generation_request;
#undef MP_SCHEMA

/* Copies `args`. INVALID_ARGUMENT outside of the schema's bounds. */
mp_status mp_image_generation_request_create(const mp_image_generation_args *args, mp_image_generation_request **call,
                                             mp_error *error);
/* Allocates the results, once channels ... pooled_width are known; anew when a replaced model needs others. */
mp_status mp_image_generation_request_output(mp_image_generation_request *call, mp_error *error);
/* How far a call is, in units: steps of picture after picture, then pictures decoded. Previews are made in their order,
 * each after the step that it is of; so many are due once `cursor` units are done. */
int32_t mp_image_generation_previews_due(const mp_image_generation_request *call, uint32_t cursor);
static inline uint32_t mp_image_generation_steps(const mp_image_generation_request *call) {
    return (uint32_t)(call->n_images * call->n_steps);
}
static inline int64_t mp_image_generation_latents(const mp_image_generation_request *call) { /* floats of a picture's */
    return (int64_t)call->channels * call->high * call->wide;
}
static inline int64_t mp_image_generation_pixels(const mp_image_generation_request *call) { /* components of an image */
    return (int64_t)call->width * call->height * 3;
}

#endif
