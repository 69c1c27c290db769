/* image/vit.h: image transformers over packed rows: the patches of all images of a group stand behind each other,
 * attention runs per image, nothing is padded. Used by this folder and by vision/ only.
 *
 *   pixels -> patches [n, 3 p^2] -> linear -> + positions -> (class token, registers, patches) -> layers, norms before
 *   -> norm -> class token, or attention pooling -> projection (the head) -> vector */
#ifndef MP_MODELS_IMAGE_VIT_H
#define MP_MODELS_IMAGE_VIT_H

#include <string.h>

#include "models/arch.h"
#include "models/nn/pooling.h"
#include "models/nn/transformer.h"

enum {
    MP_VIT_MOST_PATCHES = 8192, /* of an image */
    MP_VIT_GRAIN = 96           /* rows of a part, a multiple of every kernel's tile */
};

typedef struct mp_vit_layer {
    mp_transformer_layer base;
    bool windowed; /* a row sees those of its window of the image, else all */
} mp_vit_layer;

/* Attention pooling: one learned query a head looks at all rows of an image, then a residual feed-forward layer. */
typedef struct mp_vit_pool {
    mp_linear q, kv, out;
    mp_mlp mlp;
    mp_norm norm; /* [hidden] */
    float *probe; /* [hidden] */
} mp_vit_pool;

typedef struct mp_vit {
    mp_model_base base;
    mp_weights *weights;
    mp_budget *budget;
    uint64_t charged; /* bytes taken from the budget */
    uint8_t *slab;
    mp_compute compute;
    int32_t hidden, heads, head_dim, ffn, layer_count;
    int32_t patch, grid;        /* side of a patch in pixels; patches a side that the positions were trained for */
    int32_t classes, registers; /* rows before the patches: class tokens (0 or 1), registers */
    bool any_size;              /* positions are interpolated for other sizes, else an image has patch * grid a side */
    bool smooth;                /* with a wider filter where they become fewer */
    bool gated, attention_pool;
    bool root_norms;        /* norms have no biases then */
    bool axial;             /* see mp_vit_image.place */
    int32_t frames;         /* how many times an image stands in a patch: networks for films take several */
    int32_t window, cell;   /* sides of a window and of the cells in it, in cells and in patches; axial ones */
    float rope_base;
    float eps;
    mp_act act;
    float pixel[MP_IMAGE_CHANNELS][256]; /* a byte's value, less the mean, over the deviation */
    mp_linear patches;
    float *class_token;                  /* [hidden] or NULL */
    float *register_tokens;              /* [registers, hidden] or NULL */
    float *positions;                    /* [classes + grid^2, hidden] */
    mp_norm input_norm;                  /* [hidden] before the first layer, or none */
    mp_norm norm;                        /* [hidden] after the last layer */
    mp_vit_layer *layers;
    mp_vit_pool pool;
    mp_head head;
    int32_t grain;            /* MP_VIT_GRAIN, and operations of a part at most; tests want smaller ones */
    uint64_t most_ops;
    _Atomic uint64_t mega_ns; /* running estimate of the time of a million operations */
} mp_vit;

typedef struct mp_vit_image { /* one image of a group */
    const uint8_t *pixels;    /* [height, width, 3] */
    int32_t width;
    int32_t down, across;  /* whole patches; what is left of a side takes no part */
    int32_t n, row, patch; /* rows; first row in the group; first patch in the group */
    int32_t dimensions;
    bool normalize, want_tokens, finite;
    const float *positions; /* [down * across, hidden] of its patches, or NULL: they are made for it */
    /* Of axial networks (mp_vit_axes): where each patch stands, the first rows of its windows and the number of rows,
     * and cosines and sines of each row. Patches stand window by window, in it cell by cell, in it line by line. */
    const int32_t *place;   /* [down * across] */
    const int32_t *windows; /* [window_count + 1] */
    int window_count;
    const float *rotation; /* [n, head_dim / 2, 2] */
    float *out;             /* [dimensions], or [n, hidden] when want_tokens */
} mp_vit_image;

static inline int32_t mp_vit_rows(const mp_vit *model, int32_t down, int32_t across) {
    return model->classes + model->registers + down * across;
}

/* ---- loading (image/load.c) -------------------------------------------------------------------------------------- */

/* Hyper-parameters, and jobs of the builder for embeddings and layers; the last norm too unless it is not used. */
mp_status mp_vit_read(mp_vit *model, mp_builder *builder, const mp_spec *spec, uint32_t flags, bool norm,
                      mp_error *error);
/* Bytes that a tensor of an image network takes once it is loaded. */
uint64_t mp_vit_tensor_bytes(const mp_tensor_entry *entry, mp_compute compute);

/* ---- positions (image/positions.c) ------------------------------------------------------------------------------- */

/* Adds to x [hidden] the position of patch (y, x0) of down * across: bicubic between the model's own, as torch has it.
 * floats: mp_vit_position_scratch of them. */
void mp_vit_add_position(const mp_vit *model, int32_t down, int32_t across, int32_t y, int32_t x0, float *scratch,
                         float *x);
size_t mp_vit_position_scratch(const mp_vit *model);
/* Bytes for what axial networks want to know of an image, and its making, which sets image->place and so on. */
size_t mp_vit_axes_bytes(const mp_vit *model, int32_t down, int32_t across);
void mp_vit_axes(const mp_vit *model, mp_vit_image *image, void *memory);

/* ---- what it costs (image/cost.c) -------------------------------------------------------------------------------- */

/* Multiplications and additions that a row takes before attention, and after it. */
uint64_t mp_vit_before_ops(const mp_vit *model);
uint64_t mp_vit_after_ops(const mp_vit *model);
/* Those of attention of rows to T rows, in one head. */
uint64_t mp_vit_attention_ops(const mp_vit *model, int64_t rows, int64_t T);
/* Those of an image from its pixels to the last layer: quadratic in its rows where they see each other. */
uint64_t mp_vit_image_ops(const mp_vit *model, int32_t down, int32_t across);
/* How many parts that can be at most, whatever was learnt; with attention pooling, if there is any. */
uint64_t mp_vit_image_parts(const mp_vit *model, int32_t down, int32_t across);
/* As time, and what a part may have, which is to take about 10 ms. */
uint64_t mp_vit_ns(const mp_vit *model, uint64_t ops);
uint64_t mp_vit_part_ops(const mp_vit *model);
/* So many operations took so long. */
void mp_vit_learn(mp_vit *model, uint64_t ops, uint64_t ns);

/* ---- the forward pass (image/vit.c) ------------------------------------------------------------------------------ */

/* Where a group stands on its way through the layers; zeros: at its beginning. It goes in parts: some rows of what is
 * before or after attention, or some of attention's rows and heads. Nothing but the state is left of a part. */
typedef struct mp_vit_cursor {
    int32_t layer; /* layer_count: at the end; `at` is then the next row that attention pooling takes */
    int32_t stage; /* of it: 0 (of the first alone) the embeddings, then before attention, attention, after it */
    int64_t at;    /* the next row, or piece of attention */
} mp_vit_cursor;

typedef struct mp_vit_pass { /* a group of images on its way; all lanes of a region share it */
    const mp_vit *model;
    mp_vit_image *images;
    int count, M, P;      /* images, rows, patches; M >= P */
    uint8_t *state;       /* mp_vit_state_bytes, which stay while it is on its way; first its rows, [M, hidden] */
    uint8_t *part;        /* mp_vit_part_bytes for part_rows */
    int part_rows;        /* mp_vit_part_rows */
    uint64_t part_ops;    /* that a part of all lanes may have, about */
    mp_lease *lease;
    const _Atomic int *unwanted; /* raised when there is no point in going on, beside the lease's; or NULL */
    uint64_t until_ns;    /* no part begins after it; 0 = whenever */
    mp_vit_cursor cursor;
    uint64_t ops;         /* done so far */
    bool stopped;         /* nobody wants it any more */
    bool go_on[2];        /* what the lanes agreed on, in turns */
} mp_vit_pass;

typedef struct mp_vit_thread {
    const mp_team_thread *thread;
    mp_vit_pass *pass;
    void *own; /* mp_vit_lane_scratch */
    unsigned turn;
} mp_vit_thread;

/* Barrier after a part of so many operations, at which the lanes agree whether there is to be another. */
bool mp_vit_barrier(mp_vit_thread *l, uint64_t ops);

/* Rows of a part of a group of M rows. */
int mp_vit_part_rows(const mp_vit *model, int M, uint64_t part_ops);
/* How many of the rows that are left a part takes: parts are of nearly the same size. */
int64_t mp_vit_next_rows(const mp_vit *model, int64_t left, int64_t most);
size_t mp_vit_state_bytes(const mp_vit *model, int M);
/* Scratch of a part, for groups of up to `count` images. */
size_t mp_vit_part_bytes(const mp_vit *model, int part_rows, int count);
size_t mp_vit_thread_scratch(const mp_vit *model, int T);
/* Parts from the cursor on, one at least: until the last layer is done, or somebody says otherwise. True: it is done,
 * and the lanes may go on. All lanes of the region call it, with the same pass. Bits do not depend on the grouping, the
 * parts or the lanes. */
bool mp_vit_advance(mp_vit_thread *l);
/* Compute a group to its vectors, with all lanes of the region, from the cursor on. Sets finite of every image. False:
 * it was stopped, or its time is over, and it has no results yet. */
bool mp_vit_forward(mp_vit_thread *l);

mp_status mp_vit_engine(mp_model *model, mp_budget *budget, mp_engine **engine, mp_error *error);
mp_status mp_vit_check(const mp_model *model, mp_request *call, uint64_t *cost_ns, uint32_t *total, mp_error *error);

#endif
