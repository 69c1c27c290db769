/* vision/vision.h: a decoder that takes images and text. An image network (image/vit.h) and a projector turn an image
 * into rows of the decoder's width. These rows replace the token embeddings at the placeholders of the prompt.
 *
 *   pixels -> image network -> [norm] -> merge * merge patches side by side -> linear -> [act -> linear] -> rows
 *   pixels -> image network -> [norm] -> merge * merge patches side by side -> norm -> linear -> act -> linear -> rows
 *   pixels -> image network -> norm -> merge * merge patches -> linear (merger) -> linear -> act -> linear -> rows
 *   pixels -> image network -> norm -> mean of merge * merge patches -> norm -> linear -> rows  (Gemma 3)
 *   pixels -> image network -> [mean of merge * merge patches -> scale] -> norm -> linear -> rows  (Gemma 4)
 *
 * With DeepStack (arXiv:2406.04334), further projectors read the patches after earlier layers of the image network
 * (taps). Each adds a vector to every row of the tile. The decoder adds them to the image rows after its first layers
 * (mp_rows.vector).
 *
 * The caller prepares the images (mp_text_images of capability.h). An image is one tile or several, each of which
 * passes through the network alone. A run of placeholders takes the rows of its image's tiles, in order or as listed in
 * `sources`, which may also name the learned newline.
 *
 * Each engine has a store of the rows of tiles, found by tenant and by the hash of their pixels. The store keeps a tile
 * while a request needs it, and afterwards as long as memory allows. A step computes one tile as far as its time budget
 * allows. After each part of a layer (image/vit.h) the step checks the time and whether the request was cancelled, so
 * decoding sequences wait no longer than for any other step. The next step continues the tile. If the next step belongs
 * to another request (after a worker fault, a request runs alone in its steps), that request starts a tile of its own,
 * and the unfinished tile is kept. The working memory is released when no request waits for a tile.
 *
 * In a sequence's tokens a placeholder is the negative number of its image. The store assigns a number when it first
 * sees an image. The prefix cache compares tokens, so it distinguishes images by these numbers. */
#ifndef MP_MODELS_VISION_VISION_H
#define MP_MODELS_VISION_VISION_H

#include "models/decoder/images.h"
#include "models/image/vit.h"

enum { MP_VISION_MAX_PATCHES = 16384 /* in one tile */, MP_VISION_MAX_TAPS = 8 };

typedef struct mp_projector {
    int32_t layers;          /* it reads the patches after this number of layers of the image network */
    mp_norm norm;            /* norms merge * merge patches, side by side, as one row; means: norms the mean */
    mp_linear merger;        /* joins merge * merge patches to one, before `first`; without parts: `first` reads them.
                              * It reads the first component of all patches, then the second, and so on */
    mp_linear first, second; /* second: without parts if the projector has only one layer */
} mp_projector;

struct mp_vision { /* the image part of a decoder; immutable once loaded */
    mp_vit image_encoder;  /* without a head; with its final norm only if the model uses that norm */
    int32_t merge;         /* merge * merge patches become one row */
    bool keep_class;       /* the class token becomes a row, too */
    bool averaged;         /* the projector of the last layer reads the mean of the patches, not all of them */
    float mean_scale;      /* factor on means */
    float *mean_bias, *bias_scale; /* [hidden] means become (mean - mean_bias) * bias_scale; or NULL */
    mp_act act;
    mp_projector projectors[MP_VISION_MAX_TAPS + 1]; /* those of the taps, by layer, then that of the last layer */
    int taps;
    float *newline;          /* [width] or NULL; not with taps */
    int32_t width;           /* width of the decoder */
    int32_t image_token;     /* id of placeholders; -1: any token within a run is a placeholder */
};

/* Components of a tile's row: the vector of the last layer, then those of the taps. */
static inline int64_t mp_vision_row(const mp_vision *vision) { return (int64_t)vision->width * (1 + vision->taps); }
/* Returns true if the tiles of a run are consecutive frames of a video: they have one size, there are as many as the
 * image network has frames, and the run has the rows of one. The first tile then stands for all, and its key is one of
 * all frames. */
static inline bool mp_vision_frames(const mp_vision *vision, const mp_text_images *images, const mp_image_run *run) {
    const int32_t *sizes = images->sizes + 2 * (ptrdiff_t)run->tile, unit = vision->image_encoder.patch * vision->merge;
    bool same = run->tiles > 1 && run->tiles == vision->image_encoder.frames && !images->sources;
    for (int32_t t = 1; same && t < run->tiles; t++)
        same = sizes[2 * t] == sizes[0] && sizes[2 * t + 1] == sizes[1];
    return same && run->rows == sizes[0] / unit * (sizes[1] / unit) + vision->keep_class;
}
/* Returns the number of rows of a tile of height x width pixels, or 0 if the network does not accept that size. */
int32_t mp_vision_rows(const mp_vision *vision, int32_t height, int32_t width);
/* ---- the store of an engine (vision/store.c); decoder/images.h has its functions --------------------------------- */

typedef struct mp_image_key { /* pixels of an image or tile, as one scope sees them */
    mp_cache_scope scope;
    uint8_t pixels[MP_IMAGE_KEY]; /* hash of the pixels, which the caller computes */
} mp_image_key;

typedef struct mp_tile {
    mp_image_key key;
    float *rows; /* [count, mp_vision_row] */
    size_t bytes;
    int32_t count;
    int users;            /* requests that hold the tile */
    struct mp_tile *next; /* the next less recently used tile */
} mp_tile;

typedef struct mp_tile_job { /* a tile being computed */
    mp_vit_image image;
    mp_arena memory;          /* memory of `state` and of the fields of `image`, charged to the budget */
    uint8_t *state;           /* state of the network between steps */
    mp_vit_cursor at;         /* progress within the network */
    uint64_t ops;             /* operations done so far */
    mp_tile *tile;            /* receives the rows */
    int projector;            /* the vectors of all projectors before this one are complete, */
    int32_t projected;        /* and the vectors of this one in the first `projected` rows */
    const mp_sequence_group *holder; /* the group that last computed this tile; NULL: released, any group may continue
                                      * the tile */
    struct mp_tile_job *next;
} mp_tile_job;

typedef struct mp_image_number {
    mp_image_key key;
    int32_t number;
} mp_image_number;

struct mp_image_store {
    const mp_vision *vision;
    mp_budget *budget;
    mp_prefix_cache *cache; /* its idle blocks may be evicted for tiles */
    mp_tile *tiles;         /* most recently used first */
    uint64_t tile_bytes;    /* bytes of all tiles, charged */
    mp_image_number *numbers; /* [number_count]; the entry at number_next is replaced next */
    int number_count, number_next;
    int32_t last_number;
    mp_tile_job *jobs;       /* at most one for each holder */
    mp_arena spare, scratch; /* memory of the last finished job, for the next one; scratch of one step */
    uint64_t charged;        /* bytes charged for `spare`, `scratch` and the jobs */
};

#endif
