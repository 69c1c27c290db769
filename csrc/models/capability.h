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
    /* Frees the outputs, which check() makes again. `begun`: steps have computed part of the request. Returns false,
     * and frees nothing, if the outputs may hold part of the result. */
    bool (*drop_outputs)(struct mp_request *request, bool begun);
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

typedef struct mp_embedding_args {
    int32_t n_texts;         /* 1 to MP_EMBED_MAX_TEXTS */
    int64_t n_tokens;        /* offsets[n_texts] */
    const int32_t *ids;      /* [n_tokens], special tokens included */
    const int64_t *offsets;  /* [n_texts + 1], ascending from 0 */
    const int32_t *skip;     /* [n_texts] leading tokens that pooling excludes; or NULL */
    int32_t dimensions;      /* components to keep and normalise again; 0 = all */
    int32_t normalize;       /* -1 = the model's default */
    int32_t outputs;         /* a mask; 0 = MP_EMBED_POOLED */
    bool tolerant;           /* not sent to worker processes */
    const int32_t *second;   /* [n_texts] pairs: first token of the second text; or NULL */
    int32_t adapter;         /* id of an adapter of the model (nn/adapter.h); 0 = none */
    const int32_t *attended; /* [n_texts] number of leading tokens that are attended to; the tokens after them attend to
                              * these only; or NULL */
} mp_embedding_args;
typedef struct mp_embedding_request {
    mp_request base;
    int32_t n_texts; /* the inputs: as above */
    int64_t n_tokens;
    int32_t *ids;
    int64_t *offsets;
    int32_t *skip;
    int32_t dimensions;
    int8_t normalize;
    uint8_t outputs;
    int32_t *second;
    int32_t adapter;
    int32_t *attended;
    mp_embedding_sizes sizes; /* filled in by the engine's check */
    /* Outputs, NULL if not asked for. Numpy arrays borrow the first three. */
    float *vectors;           /* [n_texts, sizes.width] */
    float *states;            /* [n_tokens, sizes.hidden] */
    float *rows;              /* [n_tokens, sizes.row_width] */
    int32_t *sparse_counts;   /* [n_texts] */
    int32_t *sparse_ids;      /* [mp_embedding_sparse_at(request, n_texts)] */
    float *sparse_values;     /* likewise */
    _Atomic int32_t done;     /* finished texts */
} mp_embedding_request;

/* Copies `args`. Fails with INVALID_ARGUMENT if a field is out of bounds. */
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

typedef struct mp_image_embedding_args {
    int32_t n_images;      /* 1 to MP_IMAGE_MAX */
    int64_t n_bytes;       /* bytes of the pixels */
    const uint8_t *pixels; /* [n_bytes], image i: [height, width, 3], RGB, resized and cropped */
    const int32_t *sizes;  /* [n_images, 2] height, width: 1 to MP_IMAGE_MAX_SIDE */
    int32_t dimensions, normalize; /* as in mp_embedding_args */
    int32_t output;        /* MP_IMAGE_TOKENS: rows of the last layer, before its norm */
    bool tolerant;         /* not sent to worker processes */
} mp_image_embedding_args;
typedef struct mp_image_embedding_request {
    mp_request base;
    int32_t n_images; /* the inputs: as above */
    int64_t n_bytes;
    uint8_t *pixels;
    int32_t *sizes;
    int32_t dimensions;
    int8_t normalize;
    uint8_t output;
    int64_t *offsets; /* [n_images + 1] start of each image in `pixels`, in bytes */
    /* Filled in by the engine's check. */
    int64_t n_rows;      /* rows of all images */
    uint64_t most_parts; /* upper bound of the number of parts of any image */
    uint32_t keyed; /* an image's index plus 1, whose `key` the engine has computed; 0: none. The engine forgets the key
                     * when it admits the request */
    uint64_t key;
    int32_t width;        /* components of a vector */
    float *vectors;       /* output [n_images or n_rows, width]; a numpy array borrows it */
    _Atomic int32_t done; /* finished images */
} mp_image_embedding_request;

/* Copies `args`. Fails with INVALID_ARGUMENT if a field is out of bounds, or if `sizes` do not match the
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

typedef struct mp_sampling { /* how a text request samples; text_to_text.c has the bounds */
    float temperature;        /* 0 = greedy */
    int32_t top_k;            /* 0 = off */
    float top_p;              /* 1 = off */
    float min_p;              /* 0 = off */
    float repetition_penalty; /* on tokens of prompt and output; divides positive logits, multiplies others; 1 = off */
    float presence_penalty;   /* on tokens of the output; 0 = off */
    float frequency_penalty;
    uint64_t seed;
    int32_t max_tokens;
    int32_t min_tokens; /* at most max_tokens */
    int32_t logprobs;   /* alternatives besides the sampled token; -1 = none */
    bool ignore_eos;
} mp_sampling;
#define MP_SAMPLING_DEFAULTS \
    { .temperature = 1, .top_p = 1, .repetition_penalty = 1, .max_tokens = 1, .logprobs = -1 }

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
       MP_TEXT_MAX_TILES = 4096,
       MP_TEXT_MAX_TIME = 1 << 17 }; /* largest time of a run; with all runs and tokens, positions stay below 2^31 */

typedef struct mp_image_run {
    int32_t start, rows; /* the run's tokens in the prompt: first index and number */
    int32_t tile, tiles; /* tiles of the run's image: first index and number */
    int64_t source;      /* index of the run's first row in `sources` */
    int32_t time;        /* < 0: the run begins an image or a video; else it continues the video of the run before it,
                          * and this is its position in time, counted from that of the video's first run */
} mp_image_run;

/* A tile is a part of an image that passes through the network alone. A run is a range of placeholder tokens in the
 * prompt that stand for rows of consecutive tiles; several runs may show rows of the same tiles. */
typedef struct mp_text_image_args {
    int32_t n_tiles, n_runs;  /* at most MP_TEXT_MAX_TILES */
    int64_t n_sources;        /* rows of all runs; 0: each run takes the rows of its tiles in order */
    int64_t n_times;          /* n_runs; 0: no run continues a video */
    int64_t n_bytes;          /* bytes of the pixels */
    const int32_t *sizes;     /* [n_tiles, 2] height, width in pixels */
    const uint8_t *tile_keys; /* [n_tiles, MP_IMAGE_KEY] hashes of size and pixels */
    const uint8_t *run_keys;  /* [n_runs, MP_IMAGE_KEY] hashes of each run's tiles, sources and time */
    const int32_t *spans;     /* [n_runs, 3] start, rows, tiles, in prompt order; 0 tiles: those of the run before */
    const int32_t *sources;   /* [n_sources] index among the rows of the image's tiles; -1 = the newline */
    const int32_t *times;     /* [n_times] -1, or the time of a run (mp_image_run): at most MP_TEXT_MAX_TIME */
    const uint8_t *pixels;    /* [n_bytes]: [height, width, 3] bytes of each tile */
} mp_text_image_args;
typedef struct mp_text_images {
    int32_t n_tiles, n_runs; /* the inputs: as above */
    int64_t n_sources, n_times, n_bytes;
    int32_t *sizes;
    uint8_t *tile_keys, *run_keys;
    int32_t *spans, *sources, *times;
    uint8_t *pixels;
    int64_t *offsets;    /* [n_tiles + 1] start of each tile in `pixels`, in bytes */
    mp_image_run *runs;  /* [n_runs] spans with first tile and first source */
    uint64_t most_parts; /* filled in by the engine's check: upper bound of the number of parts of all tiles */
} mp_text_images;
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

typedef struct mp_text_args {
    int32_t n_prompt; /* 1 to MP_TEXT_MAX_TOKENS */
    int32_t n_stop, n_reasoning_starts, n_reasoning_ends, n_call_starts; /* at most MP_TEXT_MAX_STOPS */
    int32_t n_stop_ids, n_bias;                                          /* at most MP_TEXT_MAX_IDS */
    const int32_t *prompt;                                               /* [n_prompt] */
    mp_sampling sampling;
    int32_t n_choices; /* 1 to MP_TEXT_MAX_CHOICES */
    /* Strings and their lengths in bytes, 1 to MP_TEXT_MAX_STOP_BYTES; see stop_strings.h. */
    const char *const *stop, *const *reasoning_starts, *const *reasoning_ends, *const *call_starts;
    const int32_t *stop_bytes, *reasoning_start_bytes, *reasoning_end_bytes, *call_start_bytes;
    bool in_reasoning;        /* the prompt has begun the reasoning */
    const int32_t *stop_ids;  /* [n_stop_ids] */
    const int32_t *bias_ids;  /* [n_bias] */
    const float *bias;        /* [n_bias] added to the logits before sampling */
    int32_t capture_values;   /* see mp_capture; 0 = no capture */
    int32_t capture_records;
    int32_t adapter;          /* id of an adapter of the model (nn/adapter.h); 0 = none */
    bool vision;              /* the model takes images; the request may have none */
    bool want_prompt_logits;  /* for tests and scoring */
    mp_text_image_args images;
    const void *mask;         /* [mask_bytes] for the first token of each choice; NULL: the request has no masks */
    int64_t mask_bytes;       /* a multiple of 4 */
} mp_text_args;
typedef struct mp_text_request {
    mp_request base;
    int32_t n_prompt; /* the inputs: as above */
    int32_t n_stop, n_reasoning_starts, n_reasoning_ends, n_call_starts;
    int32_t n_stop_ids, n_bias;
    int32_t *prompt;
    mp_sampling sampling;
    int32_t n_choices;
    char **stop, **reasoning_starts, **reasoning_ends, **call_starts;
    int32_t *stop_bytes, *reasoning_start_bytes, *reasoning_end_bytes, *call_start_bytes;
    bool in_reasoning;
    int32_t *stop_ids, *bias_ids;
    float *bias;
    int32_t capture_values, capture_records;
    int32_t adapter;
    bool want_prompt_logits;
    float *prompt_logits; /* output [n_prompt, vocab], if want_prompt_logits */
    float *image_rows;    /* output [rows of all runs, hidden], if want_prompt_logits and images are given; with
                           * DeepStack, `hidden` counts all vectors of a row */
    mp_text_images images;
    mp_image_run whole_prompt; /* filled in by the engine's check: all tokens of the prompt, as one run */
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

/* Copies `args`. Fails with INVALID_ARGUMENT if a field is out of bounds. */
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

typedef struct mp_image_generation_args {
    int32_t width, height; /* pixels: 1 to MP_T2I_MAX_SIDE */
    int32_t n_steps;       /* 1 to MP_T2I_MAX_STEPS */
    int64_t n_noise;       /* number of latents */
    int32_t n_texts;       /* 1 to MP_T2I_TEXTS */
    const int32_t *ids[MP_T2I_TEXTS][MP_T2I_ENCODERS]; /* NULL: encoder not used */
    int32_t n_ids[MP_T2I_ENCODERS];                    /* tokens of each text for this encoder */
    const float *noise;    /* [n_images, channels, latent_height, latent_width] initial latents */
    const float *times;    /* [n_steps] 0 to 1000, input of the model */
    const float *sigmas;   /* [n_steps + 1] noise levels, descending */
    int32_t n_images;      /* 1 to MP_T2I_MAX_IMAGES */
    float guidance;        /* with one text: input of a guidance-distilled model */
    int32_t preview_every; /* steps between previews; 0 = none */
    bool keep;             /* keep text embeddings and the latents of each step, for tests */
} mp_image_generation_args;
typedef struct mp_image_generation_request {
    mp_request base;
    int32_t width, height; /* the inputs: as above */
    int32_t n_steps;
    int64_t n_noise;
    int32_t n_texts;
    int32_t *ids[MP_T2I_TEXTS][MP_T2I_ENCODERS];
    int32_t n_ids[MP_T2I_ENCODERS];
    float *noise, *times, *sigmas;
    int32_t n_images;
    float guidance;
    int32_t preview_every;
    bool keep;
    /* Filled in by the engine's check. */
    int32_t channels, latent_height, latent_width; /* latents: [channels, latent_height, latent_width] */
    int32_t text_rows, text_width, pooled_width;
    int32_t n_previews;     /* previews of each image */
    /* Outputs. `latents`: as `noise`; `pixels`: [n_images, height, width, 3] values from 0 to 1. */
    float *latents, *pixels;
    uint8_t *previews;      /* [n_images, n_previews, height, width, 3], or NULL */
    float *preview_latents; /* latents of the preview in progress, or NULL if there are no previews */
    float *texts, *pooled;  /* [n_texts, text_rows, text_width], [n_texts, pooled_width], or NULL unless `keep` */
    float *history;         /* [n_images, n_steps] latents, or NULL unless `keep` */
    _Atomic int32_t steps_done, previews_done; /* finished steps and previews of all images */
    _Atomic int32_t images_done;               /* decoded images */
} mp_image_generation_request;

/* Copies `args`. Fails with INVALID_ARGUMENT if a field is out of bounds. */
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
