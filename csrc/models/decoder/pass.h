/* decoder/pass.h: declarations shared by decoder/plan.c, decoder/decoder.c and the mixers. */
#ifndef MP_MODELS_DECODER_PASS_H
#define MP_MODELS_DECODER_PASS_H

#include "models/decoder/decoder.h"

/* A thread's view of the current row block. Its scratch: own rows | own prepared activations | scratch of blocks | a
 * panel of weights, while some are unpacked. */
typedef struct mp_decoder_view {
    mp_row_context context;
    float *own_rows;         /* [MP_PRIVATE_ROWS, hidden] normed rows */
    uint8_t *own;            /* scratch of blocks */
    int block, first, rows;  /* index of the row block, its first row in the pass, its rows */
    int layer;               /* index of the layer */
    bool outputs_only;       /* the pass reads only the output rows of the current mixer's result. The mixer stores the
                              * keys and values of all rows */
} mp_decoder_view;

size_t mp_decoder_thread_bytes(const mp_decoder *model, int most_blocks); /* scratch of a thread */
size_t mp_attention_partial_floats(const mp_attention_shape *shape); /* split mode: for one KV block and group */

/* A pass consists of row blocks. Unless it is a wavefront, all of them pass through a layer before the next one begins.
 * The intermediate results of a row block stay in L2, and all row blocks but the first find the layer's weights in a
 * nearer cache. A row block has at most MP_DECODER_ROWS rows; blocks are as equal as whole kernel tiles allow. MoE
 * models use a single row block, because few rows use an expert, and each block would read and pack its experts again.
 * No border lies inside an image whose rows see each other, because their keys must be stored before one of them
 * attends: a border moves to the image's first row, or to its end if the row block would be empty. */
enum { MP_DECODER_ROWS = 192, MP_DECODER_TILE = 12, MP_DECODER_JOINED = 16 /* `least_joined` of row contexts */ };
/* Returns the maximum rows of a block in a pass over M rows without images, or over any part of them. */
static inline int mp_decoder_most_rows(const mp_decoder *model, int M) {
    return M < MP_DECODER_ROWS || model->experts.count > 0 ? M : MP_DECODER_ROWS;
}
/* Returns the rows of each block but the last in such a pass. */
static inline int mp_decoder_block_rows(const mp_decoder *model, int M) {
    int most = mp_decoder_most_rows(model, M), blocks = (M + most - 1) / most, rows = (M + blocks - 1) / blocks;
    rows = (rows + MP_DECODER_TILE - 1) / MP_DECODER_TILE * MP_DECODER_TILE;
    return rows < M ? rows : M;
}

/* Rows of the blocks of a wavefront (decoder/wavefront.h), but for the last: smaller products read the weights too
 * often, and larger ones delay other requests, which wait until the blocks that are begun are finished. With fewer than
 * two blocks per thread, the threads would wait for each other; the rows of a step are enough for four threads. */
enum { MP_WAVE_ROWS = 60, MP_WAVE_THREADS = 4 };
static inline bool mp_decoder_is_wave(int M, int threads) {
    return threads > 1 && threads <= MP_WAVE_THREADS && M >= 2 * threads * MP_WAVE_ROWS;
}

/* Returns the angles of a row of the pass in a rotary table. */
static inline float *mp_decoder_rotation(const mp_decoder_pass *pass, int row, int rope) {
    const mp_decoder *model = pass->model;
    return pass->cos_sin + ((size_t)row * (size_t)model->ropes + (size_t)rope) * (size_t)model->rope_dim;
}
/* Returns the number of output rows in [row0, row0 + rows), and the index of the first in *first. */
static inline int mp_decoder_outputs_in(const mp_decoder_pass *pass, int row0, int rows, int *first) {
    int begin = 0, end;
    while (begin < pass->rows.n_output && pass->rows.output_row[begin] < row0)
        begin++;
    for (end = begin; end < pass->rows.n_output && pass->rows.output_row[end] < row0 + rows;)
        end++;
    *first = begin;
    return end - begin;
}

static inline int mp_decoder_blocks(int64_t positions) { return (int)((positions + MP_KV_BLOCK - 1) / MP_KV_BLOCK); }
static inline int mp_attention_group(const mp_attention_shape *shape) { /* query heads that share a KV head */
    return shape->heads / shape->groups;
}
static inline int mp_attention_kv_head(const mp_attention_shape *shape, int group) {
    return group * shape->kv_heads / shape->groups;
}
/* Returns the plan for the mixers of a shape. */
static inline const mp_attention_plan *mp_attention_plan_of(const mp_decoder_pass *pass,
                                                            const mp_attention_shape *shape) {
    return &pass->attention[shape - pass->model->shapes];
}
/* Returns the sizes of a layer's attention. */
static inline const mp_attention_shape *mp_decoder_shape(const mp_decoder *model, int layer) {
    return &model->shapes[model->layer_shapes[layer]];
}

#endif
