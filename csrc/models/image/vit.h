/* image/vit.h: image transformers over packed rows: the patches of all images of a group are concatenated, attention
 * runs per image, and nothing is padded. Internal to this folder and vision/.
 *
 * If only the class token is read, the last layer computes keys and values for all rows, and all else for the class
 * token alone.
 *
 *   pixels -> patches [n, 3 p^2] -> linear -> + positions -> (class token, registers, patches) -> layers (pre-norm)
 *   -> norm -> class token, or attention pooling -> projection (the head) -> vector */
#ifndef MP_MODELS_IMAGE_VIT_H
#define MP_MODELS_IMAGE_VIT_H

#include <string.h>

#include "models/arch.h"
#include "models/dedup.h"
#include "models/nn/pooling.h"
#include "models/nn/transformer.h"

enum {
    MP_VIT_MAX_PATCHES = 8192, /* maximum patches of an image */
    MP_VIT_MAX_PLACES = 1 << 16, /* maximum columns, and lines, with learned positions */
    MP_VIT_GRAIN = 96           /* granularity of a part in rows, a multiple of every kernel's tile */
};

/* Bounds of the inputs and outputs of a linear part, each a vector of one value; NULL: no bound. */
typedef struct mp_vit_bounds {
    float *input_min, *input_max, *output_min, *output_max;
} mp_vit_bounds;

enum { MP_VIT_Q, MP_VIT_K, MP_VIT_V, MP_VIT_OUT, MP_VIT_GATE, MP_VIT_UP, MP_VIT_DOWN, MP_VIT_PARTS };

typedef struct mp_vit_layer {
    mp_transformer_layer base;
    mp_vit_bounds bounds[MP_VIT_PARTS];
    bool bounded; /* some part has bounds: image/bounded.c computes the layer */
    bool windowed; /* each row attends only to rows of its own window */
} mp_vit_layer;

/* Attention pooling: one learned query per head attends to all rows of an image. A residual MLP follows. */
typedef struct mp_vit_pool {
    mp_linear q, kv, out;
    mp_mlp mlp;
    mp_norm norm; /* [hidden] */
    float *probe; /* [hidden] */
} mp_vit_pool;

typedef struct mp_vit {
    mp_model_base base;
    mp_weights *weights;
    mp_weight_store store;
    mp_compute compute;
    int32_t hidden, heads, head_dim, ffn, layer_count;
    int32_t patch, grid;        /* side of a patch in pixels; side in patches of the grid that the positions were
                                 * trained for */
    int32_t classes, registers; /* rows before the patches: class tokens (0 or 1), registers */
    bool any_size;              /* images of other sizes are accepted, with interpolated positions; otherwise each side
                                 * of an image must have patch * grid pixels */
    bool smooth;                /* interpolate with the antialiasing filter when downscaling */
    bool linear;                /* smooth: interpolate linearly, not cubically */
    bool aligned;               /* interpolate linearly, with the corners of both grids in the same place */
    bool gated, attention_pool;
    bool root_norms;        /* RMS norms, without biases */
    bool axial;             /* two-dimensional rotary positions: see mp_vit_image.place */
    bool staggered;         /* axial: the frequencies of columns lie between those of lines */
    bool neox;              /* axial: rotary pairs are (i, i + d/2), not (2i, 2i + 1) */
    bool normed_heads;      /* axial: see MP_VIT_NORMED_HEADS */
    bool channels_last;     /* inputs of a patch are ordered line, column, channel; otherwise channel, line, column */
    int32_t places;         /* columns, and lines, that have learned positions; 0: each patch has one position */
    int32_t place_step, first_line; /* rows of `positions` between two columns or lines; row of line 0 */
    int32_t frames;         /* frames of a patch: networks for videos expect several, and an image is repeated */
    int32_t window, cell;   /* axial: side of a window in cells, and of a cell in patches */
    float rope_base;
    float eps;
    mp_act act;
    float pixel[MP_IMAGE_CHANNELS][256]; /* normalised value of a byte: (value - mean) / deviation */
    mp_linear patches;
    float *class_token;                  /* [hidden] or NULL */
    float *register_tokens;              /* [registers, hidden] or NULL */
    float *positions;                    /* [classes + grid^2, hidden], or [2 places, hidden]; NULL: only rotary
                                          * positions */
    float *ones;                         /* [hidden] for norms without weights, in networks with `places` */
    mp_norm patch_norm;                  /* [inputs of a patch] before the first matrix, or none */
    mp_norm embedding_norm;              /* [hidden] after the first matrix, or none */
    mp_norm input_norm;                  /* [hidden] before the first layer, or none */
    mp_norm norm;                        /* [hidden] after the last layer */
    mp_vit_layer *layers;
    mp_vit_pool pool;
    mp_head head;
    int32_t grain;            /* granularity of a part in rows: MP_VIT_GRAIN, smaller in tests */
    uint64_t most_ops;        /* maximum operations of a part; smaller in tests */
    _Atomic uint64_t mega_ns; /* running mean: ns per million operations; at least 1 */
    mp_recent recent;         /* vectors of recent images; only in models for image embedding */
} mp_vit;

typedef struct mp_vit_image { /* one image of a group */
    const uint8_t *pixels;    /* [height, width, 3] */
    size_t bytes;             /* bytes of `pixels` */
    size_t frame;             /* bytes from one frame of a video to the next one; 0: all frames are the image */
    int32_t width;
    int32_t down, across;  /* whole patches in height and width; remaining pixels are ignored */
    int32_t n, row, patch; /* rows; first row in the group; first patch in the group */
    int32_t dimensions;
    bool normalize, want_tokens, finite;
    bool first_only; /* only the image's first row is read after the last layer, so the layer computes no other row;
                      * not for axial networks */
    const float *positions; /* [down * across, hidden] positions of the patches; NULL: computed on the fly */
    /* Axial networks only (mp_vit_axes). `place`: row of each patch. `windows`: first row of each window, then the
     * number of rows. `rotation`: cosines and sines of each row. `order`: patch of each row, or NULL without learned
     * positions. Patches are ordered by window, then cell, then line. */
    const int32_t *place;   /* [down * across] */
    const int32_t *order;   /* [down * across] */
    const int32_t *windows; /* [window_count + 1] */
    int window_count;
    const float *rotation; /* [n, head_dim / 2, 2] */
    float *out;             /* [dimensions], or [n, hidden] when want_tokens */
} mp_vit_image;

static inline int32_t mp_vit_rows(const mp_vit *model, int32_t down, int32_t across) {
    return model->classes + model->registers + down * across;
}

/* ---- loading (image/load.c) -------------------------------------------------------------------------------------- */

/* Read hyper-parameters, and register the tensors of embeddings and layers with the builder. `norm`: also register the
 * norm after the last layer. */
mp_status mp_vit_read(mp_vit *model, const mp_builder *builder, const mp_spec *spec, uint32_t flags, bool norm,
                      mp_error *error);
/* Return the bytes that a tensor of an image network takes once loaded. */
uint64_t mp_vit_tensor_bytes(const mp_tensor_entry *entry, mp_compute compute);
/* Return the bytes that an engine needs for one image with this number of patches; 0: the size that the network was
 * trained for. `flags`: those of the architecture. */
uint64_t mp_vit_request_bytes(const mp_spec *spec, uint32_t flags, mp_compute compute, int32_t patches);

/* ---- positions (image/positions.c) ------------------------------------------------------------------------------- */

/* Add to x [hidden] the position of patch (y, x0) in a grid of down * across, interpolated from the model's grid as
 * torch's bicubic does, or its bilinear if the model is `aligned` or `linear`. scratch: mp_vit_position_scratch
 * floats. */
void mp_vit_add_position(const mp_vit *model, int32_t down, int32_t across, int32_t y, int32_t x0, float *scratch,
                         float *x);
size_t mp_vit_position_scratch(const mp_vit *model);
/* mp_vit_axes_bytes returns the bytes of the patch order and the rotations of an image in an axial network. mp_vit_axes
 * writes both to `memory` and sets image->place, windows, window_count and rotation. */
size_t mp_vit_axes_bytes(const mp_vit *model, int32_t down, int32_t across);
void mp_vit_axes(const mp_vit *model, mp_vit_image *image, void *memory);

/* ---- cost (image/cost.c) ----------------------------------------------------------------------------------------- */

/* Operations of a row in one layer before attention (keys and values, queries, and both), and after it. */
uint64_t mp_vit_keys_ops(const mp_vit *model);
uint64_t mp_vit_queries_ops(const mp_vit *model);
uint64_t mp_vit_before_ops(const mp_vit *model);
uint64_t mp_vit_after_ops(const mp_vit *model);
/* Operations of attention in one head, from `rows` rows to T rows. */
uint64_t mp_vit_attention_ops(const mp_vit *model, int64_t rows, int64_t T);
/* Operations of an image from its pixels to the last layer. Attention is quadratic in the rows. first_only: as in
 * mp_vit_image. */
uint64_t mp_vit_image_ops(const mp_vit *model, int32_t down, int32_t across, bool first_only);
/* Upper bound of the number of parts of an image, whatever the measured speed; includes attention pooling. */
uint64_t mp_vit_image_parts(const mp_vit *model, int32_t down, int32_t across);
/* mp_vit_ns predicts the time of `ops` operations. mp_vit_part_ops returns the operations of a part that takes about 10
 * ms. */
uint64_t mp_vit_ns(const mp_vit *model, uint64_t ops);
uint64_t mp_vit_part_ops(const mp_vit *model);
/* Update the running mean: `ops` operations took `ns`. */
void mp_vit_learn(mp_vit *model, uint64_t ops, uint64_t ns);

/* ---- the forward pass (image/vit.c) ------------------------------------------------------------------------------ */

/* Progress of a group through the layers; all zeros: the beginning. A stage runs in parts: rows before or after
 * attention, or rows of one head in attention. Between parts only `mp_vit_pass.state` holds live data. */
typedef struct mp_vit_cursor {
    int32_t layer; /* layer_count: finished; `at` is then the next row for attention pooling */
    int32_t stage; /* stage of the layer: 0 embeddings (layer 0 only), then before attention, attention, after
                    * attention */
    int64_t at;    /* next row, or next part of attention */
} mp_vit_cursor;

typedef struct mp_vit_pass { /* a group of images in progress, shared by all threads of a region */
    const mp_vit *model;
    mp_vit_image *images;
    int count, M, P;      /* images, rows, patches; M >= P */
    uint8_t *state;       /* mp_vit_state_bytes bytes; must persist between parts and steps. Starts with the residual
                           * stream [M, hidden]. After the last layer, the stream has the first row of each image with
                           * first_only and all rows of the other images, without gaps */
    uint8_t *part;        /* mp_vit_part_bytes bytes, for part_rows rows */
    int part_rows;        /* mp_vit_part_rows */
    uint64_t part_ops;    /* approximate operations of a part on all threads */
    mp_lease *lease;
    const _Atomic int *unwanted; /* set when the item is cancelled; NULL: only the lease can cancel */
    uint64_t until_ns;    /* no part begins after this time; 0 = no limit */
    mp_vit_cursor cursor;
    uint64_t ops;         /* operations computed so far */
    bool stopped;         /* the lease or `unwanted` cancelled the pass */
    bool go_on[2];        /* thread 0's decisions whether to continue, in alternating slots */
} mp_vit_pass;

typedef struct mp_vit_thread {
    const mp_team_thread *thread;
    mp_vit_pass *pass;
    void *own; /* mp_vit_thread_scratch bytes */
    unsigned turn;
} mp_vit_thread;

/* Barrier after a part of `ops` operations. Returns false in all threads if no further part may begin. */
bool mp_vit_barrier(mp_vit_thread *l, uint64_t ops);

/* Rows of a part for a group of M rows. */
int mp_vit_part_rows(const mp_vit *model, int M, uint64_t part_ops);
/* Rows of the next part when `left` rows remain. Makes all parts of nearly the same size. */
int64_t mp_vit_next_rows(const mp_vit *model, int64_t left, int64_t most);
size_t mp_vit_state_bytes(const mp_vit *model, int M);
/* Scratch bytes of a part, for groups of up to `count` images. */
size_t mp_vit_part_bytes(const mp_vit *model, int part_rows, int count);
size_t mp_vit_thread_scratch(const mp_vit *model, int T);
/* Compute parts from the cursor on, at least one, until the first `layers` layers are finished, `until_ns` has passed
 * or the pass is cancelled. Returns true if these layers are finished. Call on all threads of the region with the same
 * pass. The result's bits do not depend on groups, parts or threads. */
bool mp_vit_advance(mp_vit_thread *l, int layers);
/* Compute a group up to its vectors, from the cursor on, on all threads of the region. Sets `finite` of every image.
 * Returns false, without results, if the pass was cancelled or `until_ns` has passed. Ends WITHOUT a barrier: the
 * vectors are complete at the end of the region. */
bool mp_vit_forward(mp_vit_thread *l);

/* ---- layers with bounds (image/bounded.c) ------------------------------------------------------------------------ */

/* mp_transformer_before and mp_transformer_after for layers with bounds. `inner` of the rows has space for M rows of
 * the network's width, and of `hidden`. */
void mp_vit_bounded_before(const mp_row_context *context, const mp_vit_layer *layer, const mp_transformer_rows *rows);
void mp_vit_bounded_after(const mp_row_context *context, const mp_vit_layer *layer, const mp_transformer_rows *rows);

/* Returns the table of a step's images, for tests. `engine` must come from mp_vit_engine. */
mp_dedup_table *mp_vit_engine_dedup(mp_engine *engine);
mp_status mp_vit_engine(mp_model *model, mp_budget *budget, mp_engine **engine, mp_error *error);
mp_status mp_vit_check(const mp_model *model, mp_request *request, uint64_t *cost_ns, uint32_t *total, mp_error *error);

#endif
