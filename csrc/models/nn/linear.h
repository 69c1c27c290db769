/* nn/linear.h: linear layers over packed weights. nn/builder.h loads them.
 *
 * A linear layer may have several parts that share their input (query, key and value; gate and up). Their outputs are
 * contiguous in a row, and activations are prepared once for all parts. */
#ifndef MP_MODELS_NN_LINEAR_H
#define MP_MODELS_NN_LINEAR_H

#include "base/arena.h"
#include "base/team.h"
#include "files/weights.h"
#include "kernels/kernels.h"
#include "models/engine.h"
#include "models/nn/weight_store.h"

enum { MP_LINEAR_PARTS = 4 };

typedef struct mp_linear {
    int parts;
    mp_wmat w[MP_LINEAR_PARTS];
    int32_t column[MP_LINEAR_PARTS]; /* first output column of each part */
    float *bias;                     /* [N] or NULL */
    int32_t N, K;
    uint8_t acts[MP_LINEAR_PARTS];           /* mp_akind of each part */
    mp_panels *panels[MP_LINEAR_PARTS];      /* NULL if the part was packed at load */
    struct mp_low_rank **updates; /* by adapter, NULL for those that leave the layer as it is (nn/adapter.h); or NULL */
    int first; /* views: index of the first part in the whole layer; otherwise 0 */
} mp_linear;

/* Like mp_gemm over all rows of x and panels [panel0, panel1) of a matrix that may be unpacked; packs panels on the
 * way, as the store decides. panel_scratch: store->panel_scratch bytes of the calling thread. */
void mp_panels_gemm(mp_panels *panels, const mp_wmat *w, const mp_acts *x, int panel0, int panel1,
                    const mp_epilogue *ep, float *y, int64_t ldy, uint8_t *panel_scratch);
/* Writes row n [K] of the matrix of a part, which may be unpacked. */
void mp_linear_row(const mp_linear *linear, int part, int32_t n, float *out);

/* Scratch for the prepared activations of up to M rows, shared by all threads. */
size_t mp_linear_scratch(const mp_linear *linear, int M);
/* y [M, ldy] = x [M, ldx] W^T (+ bias, activation, residual as in `ep`; ep->bias is set from the layer and must be NULL
 * on entry). All threads of the region must call it with the same arguments; each computes a contiguous range of
 * outputs. x must be complete (after a barrier). Ends WITHOUT a barrier. There is one barrier inside, except in two
 * cases: all parts take fp32 activations, which need no preparation; or M <= MP_PRIVATE_ROWS and private_scratch is not
 * NULL, so that each thread prepares all rows by itself. x NULL: uses the activations that mp_linear_into has left in
 * `scratch`, after a barrier; no barrier inside. panel_scratch: as in mp_panels_gemm; required while the layer has
 * unpacked panels, otherwise NULL. */
enum { MP_PRIVATE_ROWS = 4 };
void mp_linear_forward(const mp_linear *linear, const mp_team_thread *thread, const float *x, int64_t ldx, int M,
                       void *scratch, void *private_scratch, uint8_t *panel_scratch, const mp_epilogue *ep,
                       float *y, int64_t ldy);
/* Computes linear(x [M, ldx]) + bias of a layer of one part tile by tile, for products that are reduced at once: `take`
 * gets a tile of all rows and `columns` outputs from `column` on, [M, ld]. Tiles begin and end at panels; each is taken
 * by one thread, in any order. tile: mp_linear_tile(M) floats of the thread, which are enough for fewer rows, too.
 * Other arguments and barriers are as in mp_linear_forward without private scratch. The bits of an output do not depend
 * on the tiles. */
typedef void mp_tile_taker(void *arg, int32_t column, int32_t columns, const float *tile, int64_t ld);
size_t mp_linear_tile(int M);
void mp_linear_tiles(const mp_linear *linear, const mp_team_thread *thread, const float *x, int64_t ldx, int M,
                     void *scratch, uint8_t *panel_scratch, float *tile, mp_tile_taker *take, void *arg);
/* Returns a view of the parts [first, first + count) of a layer. mp_linear_forward with the view computes the columns
 * of these parts only, at their place in the rows of the whole layer. */
mp_linear mp_linear_view(const mp_linear *linear, int first, int count);
/* Computes act(linear(x)), or act(gate) * up for a layer of two parts, and stores it in `next_scratch` as the prepared
 * activations of layer `next` (size: mp_linear_scratch of `next`). The 32 outputs of a panel are rounded while they are
 * in the thread's cache. All parts must be packed. The bits equal those of mp_linear_forward, the kernel `gated` and
 * the preparation of `next` one after another. Ends WITHOUT a barrier; there is at most one barrier inside. If the
 * layer has fewer outputs than `next` has inputs, the outputs become the last inputs of `next`, and mp_linear_lead
 * writes the inputs before them. */
void mp_linear_into(const mp_linear *linear, const mp_linear *next, const mp_team_thread *thread, const float *x,
                    int64_t ldx, int M, void *scratch, mp_act act, void *next_scratch);
/* Returns true if mp_linear_into supports the pair, once `linear` is packed. `linear` must not be a mapped layer, which
 * is never packed. It must have one part, or gate and up as two parts of equal size; its outputs and the inputs of
 * `next` must fill whole panels. `next` must have one part and take Q8 or BF16 activations: I8 has one scale per row,
 * which is known only when the row is complete. */
bool mp_linear_fits(const mp_linear *linear, const mp_linear *next);
/* Prepares the thread's rows of x [M, n] as the first n inputs of `next`, those that mp_linear_into does not write. No
 * barrier. */
void mp_linear_lead(const mp_linear *next, const mp_team_thread *thread, const float *x, int64_t ldx, int32_t n, int M,
                    void *next_scratch);

#endif
