/* vision/vision.h: a decoder that reads images beside text. It is a decoder like any other, with an image network
 * (image/vit.h) and a projector beside it, which make rows of the decoder's width of an image; where the prompt has
 * placeholders these rows stand instead of rows of the token table.
 *
 *   pixels -> image network -> [norm] -> merge * merge patches side by side -> linear -> [act -> linear] -> rows
 *
 * What a call brings (mp_text_images of capability.h) is prepared: an image is one tile or several, each of which goes
 * through the network alone; a run of placeholders in the prompt takes rows of the tiles of its image, in order or as
 * `sources` says, and the learned newline where that says so.
 *
 * The store of an engine keeps the rows of tiles by the hash of their pixels, as long as somebody needs them and beyond
 * that while there is room. A step computes one tile, as much of it as there is time for, and looks after each part of
 * a layer (image/vit.h) whether there is more and whether anybody still wants it: so answers which are being written
 * wait no longer than for any other step. The next step goes on with it, unless it is offered to others (calls that a
 * worker failed with take their steps alone): these have a tile of their own begun beside it, and none is lost. What it
 * computes in goes when nobody waits for a tile.
 *
 * In a sequence's tokens a placeholder is minus the number of its image, which an image gets when a store first sees it
 * and keeps there: so the prefix cache beside the store, which compares tokens, knows images from each other. */
#ifndef MP_MODELS_VISION_VISION_H
#define MP_MODELS_VISION_VISION_H

#include "models/decoder/images.h"
#include "models/image/vit.h"

enum { MP_VISION_MOST_PATCHES = 16384 }; /* of a tile */

typedef struct mp_vision { /* the part of a decoder that is about images; immutable once loaded */
    mp_vit image_encoder;  /* without a head; its norm only when it is used */
    int32_t merge;         /* patches a side that become one row */
    bool keep_class;       /* the class token is a row, too */
    mp_act act;
    mp_linear first, second; /* second: none when it has no parts */
    float *newline;          /* [width] or NULL */
    int32_t width;           /* of the decoder */
    int32_t image_token;     /* id of placeholders; -1: they are what runs say, whatever stands there */
} mp_vision;

/* Hyper-parameters, and jobs of the builder, for a decoder of so many components. *vision is made; destroy it. */
mp_status mp_vision_read(const mp_load_args *args, mp_builder *builder, int32_t width, mp_vision **vision,
                         mp_error *error);
void mp_vision_destroy(mp_vision *vision);

/* Rows that a tile of so many pixels becomes; 0 when the network does not take that size. */
int32_t mp_vision_rows(const mp_vision *vision, int32_t height, int32_t width);
/* Whether a call's images fit the model and its prompt; its placeholders are those of its runs. Sets most_parts. */
mp_status mp_vision_check(const mp_vision *vision, mp_text_request *call, mp_error *error);

extern const mp_image_ops mp_vision_ops; /* what a decoder asks of these functions */

/* ---- the store of an engine (vision/store.c); the worker's thread only ------------------------------------------- */

typedef struct mp_tile {
    uint8_t key[MP_IMAGE_KEY];
    float *rows; /* [count, width] */
    size_t bytes;
    int32_t count;
    int users;            /* calls that hold it */
    struct mp_tile *next; /* less recently used */
} mp_tile;

typedef struct mp_tile_job { /* a tile that is being computed */
    mp_vit_image image;
    mp_arena memory;          /* of state and image, charged */
    uint8_t *state;           /* the network's, between steps */
    mp_vit_cursor at;         /* where it stands there */
    uint64_t ops;             /* done so far */
    mp_tile *tile;            /* its rows, of which so many have been projected */
    int32_t projected;
    const mp_sequence_group *holder; /* who looked last; NULL: they are gone, and others may go on with it */
    struct mp_tile_job *next;
} mp_tile_job;

typedef struct mp_image_number {
    uint8_t key[MP_IMAGE_KEY];
    int32_t number;
} mp_image_number;

typedef struct mp_image_store {
    const mp_vision *vision;
    mp_budget *budget;
    mp_prefix_cache *cache; /* whose idle blocks may be given up for tiles */
    mp_tile *tiles;         /* the most recently used first */
    uint64_t tile_bytes;    /* of all, charged */
    mp_image_number *numbers; /* [number_count], the next to be replaced at number_next */
    int number_count, number_next;
    int32_t last_number;
    mp_tile_job *jobs;       /* one a holder at most */
    mp_arena spare, scratch; /* of a job that is over, for the next; of one step */
    uint64_t charged;        /* for both, and the memory of jobs */
} mp_image_store;

mp_image_store *mp_images_create(const mp_vision *vision, mp_budget *budget, mp_prefix_cache *cache); /* or NULL */
void mp_images_destroy(mp_image_store *store); /* NULL is legal */
uint64_t mp_images_bytes(const mp_image_store *store); /* that it holds, all charged */
/* Give back at least so many bytes of tiles that nobody holds, if there are; returns how many. */
uint64_t mp_images_shrink(mp_image_store *store, uint64_t bytes);
/* Give back what it computes in; tiles that are being computed are forgotten. */
uint64_t mp_images_rest(mp_image_store *store);
/* That and all tiles that nobody holds. */
uint64_t mp_images_trim(mp_image_store *store);

/* For an item's new answers: room for tiles; with axes positions on them, where an image is as long as its longer
 * side. */
mp_status mp_images_begin(mp_image_store *store, const mp_text_request *call, bool axes, mp_sequence_group *group,
                          mp_error *error);
/* Numbers instead of placeholders in the tokens of answers, whenever their item is admitted: they may have those of
 * another store, where other images had them. Nothing of the answers is cached yet. */
mp_status mp_images_number(mp_image_store *store, const mp_text_request *call, mp_sequence_group *group,
                           mp_error *error);
/* Hold no tiles any more, nor one that is being computed. */
void mp_images_release(mp_image_store *store, const mp_text_request *call, mp_sequence_group *group);

/* How many of the next `want` rows of a sequence can be computed now: those before the first whose tile is not there.
 * *missing: that tile, or -1. Holds the tiles of the others. */
int mp_images_ready(mp_image_store *store, const mp_text_request *call, mp_sequence_group *group,
                    const mp_sequence *seq, int want, int *missing);
/* The row that stands at a placeholder, whose tile is held. *source: its number among those of all runs. */
const float *mp_images_row(const mp_image_store *store, const mp_text_request *call, const mp_sequence_group *group,
                           int32_t position, int64_t *source);
/* Whether this is a tile that is being computed. */
bool mp_images_computing(const mp_image_store *store, const mp_text_request *call, int tile);
/* Predicted time until it is computed, and of a part of that, the least that a step takes. */
uint64_t mp_images_left_ns(const mp_image_store *store, const mp_text_request *call, int tile);
uint64_t mp_images_part_ns(const mp_image_store *store);
/* Compute a missing tile for about budget_ns, one part of it at least, and hold it in the end; another that was begun
 * for these answers, or whose answers are gone, is forgotten. Ends early when the lease's owner or `unwanted` says
 * so. */
mp_status mp_images_compute(mp_image_store *store, mp_lease *lease, const mp_text_request *call,
                            mp_sequence_group *group, int tile, uint64_t budget_ns, const _Atomic int *unwanted,
                            mp_error *error);

#endif
