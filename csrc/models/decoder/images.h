/* decoder/images.h: the interface between a decoder and the part of a model that turns images into rows. A decoder does
 * not handle pixels: it declares here what it calls, and vision/ implements it. */
#ifndef MP_MODELS_DECODER_IMAGES_H
#define MP_MODELS_DECODER_IMAGES_H

#include <string.h>

#include "models/decoder/sequence.h"

typedef struct mp_vision mp_vision;
typedef struct mp_image_store mp_image_store;
struct mp_tile;

typedef struct mp_request_images { /* image state of an item's sequences */
    int32_t (*positions)[3];      /* [n_prompt] positions on the three axes of M-RoPE, or NULL */
    int32_t shift;                /* position minus index of the tokens after the prompt */
    struct mp_tile *tiles[1];     /* [n_tiles] image tiles that the group holds; NULL for a tile that it does not
                                   * hold */
} mp_request_images;

/* Loads a decoder like mp_decoder_load; with `images`, also its image network and projector. */
mp_status mp_decoder_load_with(const mp_load_args *args, bool images, mp_model **model, mp_error *error);

/* Returns true for tensors of an image network, or of the projector between it and a decoder. */
static inline bool mp_decoder_images_own(const char *name) {
    return strncmp(name, "v.", 2) == 0 || strncmp(name, "mm.", 3) == 0;
}

/* ---- spans: images whose rows see each other in both directions (mp_decoder.image_spans), or a whole prompt --------
 * The keys of a span's rows depend on all of its rows, so a pass never ends inside a span. It may begin inside an
 * image, after published blocks: these are computed with the whole image, and a request with the same tokens has the
 * same image. Blocks of a whole prompt are not published. */

/* Returns the last run that begins at or before a position, or the first run. There must be runs. */
static inline const mp_image_run *mp_image_run_at(const mp_image_run *runs, int32_t n_runs, int32_t position) {
    int32_t low = 0, high = n_runs - 1;
    while (low < high) {
        int32_t middle = (low + high + 1) / 2;
        if (runs[middle].start <= position)
            low = middle;
        else
            high = middle - 1;
    }
    return &runs[low];
}
/* Returns the spans of a request, and their number in *count. */
static inline const mp_image_run *mp_spans_of(const mp_decoder *model, const mp_text_request *request, int32_t *count) {
    *count = model->whole_prompts ? 1 : model->image_spans ? request->images.n_runs : 0;
    return model->whole_prompts ? &request->whole_prompt : request->images.runs;
}
/* Returns the rows from a position to the end of its span; 0: it is in no span. */
static inline int mp_span_left(const mp_decoder *model, const mp_text_request *request, int32_t position) {
    int32_t count;
    const mp_image_run *spans = mp_spans_of(model, request, &count);
    if (count == 0)
        return 0;
    const mp_image_run *span = mp_image_run_at(spans, count, position);
    const int32_t end = span->start + span->rows;
    return span->start <= position && position < end ? end - position : 0;
}
/* Returns the most of `rows` rows from a position on that do not end inside a span. */
static inline int mp_span_fit(const mp_decoder *model, const mp_text_request *request, int32_t position, int rows) {
    const int inside = rows > 0 ? mp_span_left(model, request, position + rows - 1) : 0;
    if (inside <= 1) /* the last row ends a span, or is in none */
        return rows;
    int32_t count;
    const mp_image_run *spans = mp_spans_of(model, request, &count);
    const int before = mp_image_run_at(spans, count, position + rows - 1)->start - position;
    return before > 0 ? before : 0;
}

/* ---- the image part of a model (vision/load.c); any thread ------------------------------------------------------- */

/* Reads hyper-parameters and adds builder jobs, for a decoder of `width` components and `layers` layers. Creates
 * *vision even on failure; the caller destroys it. Leaves the builder with the compute type of the image network. */
mp_status mp_vision_read(const mp_load_args *args, const mp_builder *builder, int32_t width, int layers,
                         mp_vision **vision, mp_error *error);
void mp_vision_destroy(mp_vision *vision);
/* Returns the number of taps: the image network yields 1 + taps vectors for each row (mp_rows.vector). */
int mp_vision_taps(const mp_vision *vision);
/* Returns true if the image network computes in float32 only. */
bool mp_vision_is_float32(const mp_vision *vision);
/* Checks that a request's images fit the model and its prompt, and that its placeholders are exactly the tokens of the
 * runs. Sets images.most_parts. */
mp_status mp_vision_check(const mp_vision *vision, mp_text_request *request, mp_error *error);

/* ---- the image store of an engine (vision/store.c); the worker's thread only -------------------------------------
 * NULL: the model takes no images. bytes, shrink, trim, begin, number, release and ready then do nothing. */

/* Returns NULL if memory is exhausted. */
mp_image_store *mp_images_create(const mp_vision *vision, mp_budget *budget, mp_prefix_cache *cache);
void mp_images_destroy(mp_image_store *store); /* NULL is legal */
uint64_t mp_images_bytes(const mp_image_store *store); /* all bytes charged for the store */
/* Releases at least `bytes` bytes of idle tiles, if there are that many. Returns the bytes released. */
uint64_t mp_images_shrink(mp_image_store *store, uint64_t bytes);
/* Releases the working memory, and drops unfinished tiles. Returns the bytes released. */
uint64_t mp_images_trim(mp_image_store *store);

/* Allocates the image state of an item's new group of sequences. With `axes`, computes M-RoPE positions: an image
 * advances the position of the tokens after it by its longer side, in rows. */
mp_status mp_images_begin(mp_image_store *store, const mp_text_request *request, bool axes, mp_sequence_group *group,
                          mp_error *error);
/* Replaces placeholders by image numbers in the tokens of all sequences. Call on every admission, before anything is
 * cached: tokens may hold the numbers of another store, where images were numbered differently. */
mp_status mp_images_number(mp_image_store *store, const mp_text_request *request, mp_sequence_group *group,
                           mp_error *error);
/* Releases the group's tiles, and lets any group continue a tile that this group has begun. */
void mp_images_release(mp_image_store *store, const mp_text_request *request, mp_sequence_group *group);

/* Returns how many of the next `want` rows of a sequence can be computed now: the rows before the first one whose tile
 * is missing. Sets *missing to that tile, or to -1. Holds the tiles of the rows that it counts. */
int mp_images_ready(mp_image_store *store, const mp_text_request *request, mp_sequence_group *group,
                    const mp_sequence *seq, int want, int *missing);
/* Returns the row [1 + taps, hidden] for a placeholder, whose tile the group must hold. Sets *source to the index of
 * the placeholder among the rows of all runs. */
const float *mp_images_row(const mp_image_store *store, const mp_text_request *request, const mp_sequence_group *group,
                           int32_t position, int64_t *source);
/* Returns true if this tile is being computed for a request of the same tenant. */
bool mp_images_computing(const mp_image_store *store, const mp_text_request *request, const mp_sequence_group *group,
                         int tile);
/* mp_images_left_ns predicts the time to complete a tile. mp_images_part_ns predicts the time of one part, the minimum
 * of a step. */
uint64_t mp_images_left_ns(const mp_image_store *store, const mp_text_request *request, const mp_sequence_group *group,
                           int tile);
uint64_t mp_images_part_ns(const mp_image_store *store);
/* Computes a missing tile for about `budget_ns`, at least one part of it, and holds it when complete. Drops other
 * unfinished tiles that this group computed last or that no group holds. Stops early if the lease is cancelled or
 * `unwanted` is set. */
mp_status mp_images_compute(mp_image_store *store, mp_lease *lease, const mp_text_request *request,
                            mp_sequence_group *group, int tile, uint64_t budget_ns, const _Atomic int *unwanted,
                            mp_error *error);

#endif
