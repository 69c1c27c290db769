/* capability.h: requests and results, one pair of structs for each capability.
 *
 * A `mp_request` holds a request and its result, which are freed together. The binding creates it. The ticket owns it
 * until both holders, the caller and the pool, have released the ticket. Engines read the request and write the result.
 * The caller reads the result when the ticket is done; a streaming caller reads up to the published count. */
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
    int queue_capacity[2]; /* [0]: requests with one input; [1]: requests with several */
    const char *policy;
} mp_capability_row;
const mp_capability_row *mp_capability_get(mp_capability capability); /* never NULL */
/* Returns false, and leaves *capability unchanged, if no capability has this name. */
bool mp_capability_from_name(const char *name, mp_capability *capability);

typedef struct mp_request {
    mp_capability capability;
    void (*destroy)(struct mp_request *request); /* frees the request with its inputs and results */
    /* Returns a hash of the request's inputs: equal requests have equal hashes. Never returns 0. NULL: no hash. */
    uint64_t (*fingerprint)(const struct mp_request *request);
    /* Reports the units consumed and produced so far (tokens, images). NULL: not counted. */
    void (*usage)(const struct mp_request *request, uint64_t *in, uint64_t *out);
    /* Returns true if the caller may have seen part of the result: such a request is not restarted after a worker
     * fault. NULL: nothing is visible before the end. Thread-safe. */
    bool (*seen)(const struct mp_request *request);
    /* After a worker fault the request resumes from its current state, as after a preemption. This is safe because the
     * state holds completed steps only, a failed step leaves the state unchanged, and the rest of the result depends on
     * the state alone. */
    bool resumable;
    uint64_t bytes;        /* memory of the request, charged to the queue's share of the budget */
    uint64_t output_bytes; /* part of `bytes`: the outputs */
    bool tolerant;  /* the caller accepts NaN in the result: NaN then does not count as a worker fault */
} mp_request;
static inline void mp_request_destroy(mp_request *request) {
    if (request)
        request->destroy(request);
}
/* Publishes the count of complete results to readers. The count never decreases, even if the request is retried. */
static inline void mp_request_publish(_Atomic int32_t *done, int32_t count) {
    if (count > atomic_load_explicit(done, memory_order_relaxed))
        atomic_store_explicit(done, count, memory_order_release);
}

/* ---- text_embedding -------------------------------------------------------------------------------------------- */

enum { MP_EMBED_MAX_TEXTS = 1 << 24 };
/* Outputs of one pass, combined in a mask: one vector per text; hidden states, one per token; the rows of the model's
 * row head, one per token; one sparse vector per text. */
enum { MP_EMBED_POOLED = 1, MP_EMBED_TOKENS = 2, MP_EMBED_ROWS = 4, MP_EMBED_SPARSE = 8, MP_EMBED_ALL = 15 };

typedef struct mp_embedding_sizes { /* facts of the model and the request; 0 for outputs that were not asked for */
    int32_t width, hidden, row_width; /* components of a vector, of a hidden state, of a row of the row head */
    int32_t sparse_most; /* room for the weights of a text; 0: as many as the text has tokens */
    int32_t vocab;       /* ids of sparse weights are below this number */
} mp_embedding_sizes;

#define MP_SCHEMA "models/requests/text_embedding.def"
typedef struct mp_embedding_args {
#include "models/requests/passes/args.def"
} mp_embedding_args;
typedef struct mp_embedding_request {
    mp_request base;
#include "models/requests/passes/fields.def"
} mp_embedding_request;
#undef MP_SCHEMA

/* Copies `args`. Fails with INVALID_ARGUMENT if a field is outside the schema's bounds. */
mp_status mp_embedding_request_create(const mp_embedding_args *args, mp_embedding_request **request, mp_error *error);
/* Allocates the outputs once their sizes are known. Reallocates them if a replacement model has other sizes. */
mp_status mp_embedding_request_output(mp_embedding_request *request, mp_embedding_sizes sizes, mp_error *error);
/* Fails with UNSUPPORTED if the request asks for an output that is not in the mask `has`; the message lists those that
 * are. */
mp_status mp_embedding_request_check_outputs(const mp_embedding_request *request, unsigned has, mp_error *error);
/* Checks texts against a model: each has `least` to `context` tokens, of ids below `vocab`, and `skip` leaves one of
 * them. */
mp_status mp_embedding_request_check_texts(const mp_embedding_request *request, int32_t least, int32_t context,
                                           int32_t vocab, mp_error *error);
/* Returns the index in sparse_ids and sparse_values at which the sparse vector of a text begins. The vector has
 * sparse_counts[text] entries, by ascending id. For text = n_texts: the capacity for all texts. */
static inline int64_t mp_embedding_sparse_at(const mp_embedding_request *request, int64_t text) {
    return request->sizes.sparse_most ? text * request->sizes.sparse_most : request->offsets[text];
}

/* ---- image_embedding ------------------------------------------------------------------------------------------- */

enum {
    MP_IMAGE_MAX = 1 << 20,
    MP_IMAGE_MAX_SIDE = 1 << 14, /* pixels */
    MP_IMAGE_CHANNELS = 3
};
enum { MP_IMAGE_POOLED = 0, MP_IMAGE_TOKENS = 1 }; /* one vector per image, or one per patch (before pooling) */

#define MP_SCHEMA "models/requests/image_embedding.def"
typedef struct mp_image_embedding_args {
#include "models/requests/passes/args.def"
} mp_image_embedding_args;
typedef struct mp_image_embedding_request {
    mp_request base;
#include "models/requests/passes/fields.def"
} mp_image_embedding_request;
#undef MP_SCHEMA

/* Copies `args`. Fails with INVALID_ARGUMENT if a field is outside the schema's bounds, or if `sizes` do not match the
 * number of bytes. */
mp_status mp_image_embedding_request_create(const mp_image_embedding_args *args, mp_image_embedding_request **request,
                                            mp_error *error);
/* Allocates the outputs once the model's number of rows and width are known. Reallocates them if a replacement model
 * has other values. */
mp_status mp_image_embedding_request_output(mp_image_embedding_request *request, int64_t n_rows, int32_t width,
                                            mp_error *error);
/* Returns the number of result vectors. */
static inline int64_t mp_image_embedding_request_rows(const mp_image_embedding_request *request) {
    return request->output == MP_IMAGE_TOKENS ? request->n_rows : request->n_images;
}

/* ---- text_to_text ---------------------------------------------------------------------------------------------- */

enum {
    MP_TEXT_MAX_TOKENS = INT32_MAX / 8, /* maximum length of a prompt, and of a completion */
    MP_TEXT_MAX_CHOICES = 128,
    MP_TEXT_MAX_STOPS = 64,
    MP_TEXT_MAX_STOP_BYTES = 1024,
    MP_TEXT_MAX_IDS = 4096, /* maximum stop ids, and maximum ids with a bias */
    MP_TEXT_MAX_LOGPROBS = 20,
    MP_TEXT_MAX_MASK_BYTES = 1 << 20
};

typedef enum mp_finish {
    MP_FINISH_NONE, /* not finished yet */
    MP_FINISH_STOP, /* a stop string or a stop id: see mp_choice.stop_index */
    MP_FINISH_LENGTH, /* max_tokens, or the end of the context */
    MP_FINISH_EOS, /* an end-of-text id of the model (mp_text_request.ends) */
    MP_FINISH_CANCELLED
} mp_finish;

#define MP_SCHEMA "models/requests/sampling.def"
typedef struct mp_sampling {
#include "models/requests/passes/fields.def"
} mp_sampling;
#undef MP_SCHEMA

typedef struct mp_token_out { /* one generated token, as the caller sees it */
    int32_t id;
    float logprob;     /* under the unmodified distribution; NaN when not requested */
    uint32_t byte_end; /* end of the token's text in `choice->text` */
} mp_token_out;

typedef struct mp_choice { /* one of n completions; written by the engine, read by the caller */
    mp_token_out *tokens;  /* [max_tokens] */
    int32_t *top_ids;      /* [max_tokens, logprobs] or NULL */
    float *top_logprobs;   /* [max_tokens, logprobs] or NULL */
    char *text;            /* [text_capacity] bytes, valid UTF-8 up to text_bytes */
    uint32_t text_capacity;
    _Atomic uint32_t token_count; /* tokens written; stored with release order once they are complete */
    _Atomic uint32_t text_bytes; /* bytes of `text` that will not change: whole characters, before any possible start of
                                  * a stop string. Stored after token_count, so a reader of text finds its tokens */
    _Atomic int32_t finish; /* mp_finish */
    int32_t stop_index;     /* index of the stop string or stop id that ended the completion, or -1 */
} mp_choice;

/* Images of a prompt, for models that accept images (models/vision/vision.h). */
enum { MP_IMAGE_KEY = 16, /* bytes of a collision-resistant hash */
       MP_TEXT_MAX_TILES = 4096 };

typedef struct mp_image_run {
    int32_t start, rows; /* the run's tokens in the prompt: first index and number */
    int32_t tile, tiles; /* tiles of the run's image: first index and number */
    int64_t source;      /* index of the run's first row in `sources` */
} mp_image_run;

#define MP_SCHEMA "models/requests/text_images.def"
typedef struct mp_text_image_args {
#include "models/requests/passes/args.def"
} mp_text_image_args;
typedef struct mp_text_images {
#include "models/requests/passes/fields.def"
} mp_text_images;
#undef MP_SCHEMA
static inline int64_t mp_text_images_rows(const mp_text_images *images) { /* rows of all runs together */
    const mp_image_run *last = images->n_runs > 0 ? &images->runs[images->n_runs - 1] : NULL;
    return last ? last->source + last->rows : 0;
}

/* Mask of the tokens allowed next in one completion, written by a grammar engine outside the core: bit `id` is 1 if
 * the token is allowed. Ids beyond the mask are not allowed. The caller writes the mask for index i after it has seen
 * token i - 1, and the engine reads it before it samples token i. One buffer is therefore enough. */
typedef struct mp_token_mask {
    _Atomic uint32_t ready; /* `bits` are for token `ready - 1` of the completion; stored with release order once `bits`
                             * are complete */
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
    int32_t mask_words;   /* 0 = no mask, every token is allowed */
    mp_token_mask *masks; /* [n_choices], or NULL if `mask_words` is 0; written while the request runs */
    /* Result. The engine's check() fills in `hidden`, `vocab`, `sampled_vocab`, `context` and `ends`. */
    mp_choice *choices;                               /* [n_choices] */
    int32_t cached_tokens;                            /* prompt tokens found in the prefix cache */
    uint64_t started_ns, prompt_done_ns, finished_ns; /* monotonic clock; 0 = not yet */
    int32_t hidden;        /* columns of `image_rows` */
    mp_capture capture;    /* only for requests with one completion */
    int32_t vocab;         /* columns of `prompt_logits` */
    int32_t sampled_vocab; /* ids from here on are never sampled */
    int32_t context;       /* maximum length of prompt and completion together */
    const int32_t *ends;   /* [n_ends] end-of-text ids; owned by the model, valid only while the model serves the
                            * request */
    int32_t n_ends;
    /* sizes for which the outputs were allocated */
    uint32_t output_token_bytes;
    int32_t output_vocab, output_hidden, output_layers;
} mp_text_request;

#undef MP_SCHEMA

/* Copies `args`. Fails with INVALID_ARGUMENT if a field is outside the schema's bounds. */
mp_status mp_text_request_create(const mp_text_args *args, mp_text_request **request, mp_error *error);
/* Sets the mask for token `index` of a completion, which must be the next token; `mask_bytes` must equal the size given
 * at creation. Call from one thread at a time for each completion, then wake the worker (mp_ticket_wake). Fails with
 * INVALID_ARGUMENT if the completion does not exist or has no masks, or if the size differs. */
mp_status mp_text_request_mask(mp_text_request *request, int choice, uint32_t index, const void *mask,
                               int64_t mask_bytes, mp_error *error);
/* Returns the mask for token `index` of a completion, or NULL if that mask has not been set yet. */
static inline const uint32_t *mp_text_request_mask_at(const mp_text_request *request, int choice, uint32_t index) {
    const mp_token_mask *mask = &request->masks[choice];
    return __atomic_load_n((const uint32_t *)&mask->ready, __ATOMIC_ACQUIRE) == index + 1 ? mask->bits : NULL;
}
/* Allocates the outputs once the model is known: tokens, alternatives and text of every completion, and prompt_logits
 * and capture records if requested. A token adds at most `max_token_bytes` bytes, each of which may become U+FFFD (3
 * bytes).
 *
 * A queued request is checked again if its model was replaced. Outputs that do not fit the new model are reallocated;
 * the call fails with MODEL if a completion already has tokens. A running request continues over a reload of the same
 * files, because they give the same sizes (mp_spec_same_file). */
mp_status mp_text_request_output(mp_text_request *request, uint32_t max_token_bytes, mp_error *error);

/* ---- text_to_image --------------------------------------------------------------------------------------------- */

enum {
    MP_T2I_MAX_SIDE = 8192, /* pixels */
    MP_T2I_MAX_IMAGES = 64,
    MP_T2I_MAX_STEPS = 1000,
    MP_T2I_TEXTS = 2, /* the prompt, and the negative prompt */
    MP_T2I_ENCODERS = 3,
    MP_T2I_MAX_TOKENS = 4096 /* for one encoder */
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

/* Copies `args`. Fails with INVALID_ARGUMENT if a field is outside the schema's bounds. */
mp_status mp_image_generation_request_create(const mp_image_generation_args *args,
                                             mp_image_generation_request **request, mp_error *error);
/* Allocates the results once the fields `channels` to `pooled_width` are known. Reallocates them if a replacement model
 * has other values. */
mp_status mp_image_generation_request_output(mp_image_generation_request *request, mp_error *error);
/* Number of previews due once `cursor` units are done. Units are the denoising steps of all images, image after image,
 * and then the decoding of each image. Previews are made in the order of their steps, each after its step. */
int32_t mp_image_generation_previews_due(const mp_image_generation_request *request, uint32_t cursor);
/* Returns the number of denoising steps of all images. */
static inline uint32_t mp_image_generation_steps(const mp_image_generation_request *request) {
    return (uint32_t)(request->n_images * request->n_steps);
}
/* Returns the number of floats of one image's latents. */
static inline int64_t mp_image_generation_latents(const mp_image_generation_request *request) {
    return (int64_t)request->channels * request->latent_height * request->latent_width;
}
/* Returns the number of values of one image: width * height * 3. */
static inline int64_t mp_image_generation_pixels(const mp_image_generation_request *request) {
    return (int64_t)request->width * request->height * 3;
}

#endif
