/* nn/linear.h: linear layers over packed weights, and the builder that loads them.
 *
 * A linear layer may have several parts that share their input (query, key and value; gate and up): their outputs stand
 * side by side, and activations are prepared once for all. */
#ifndef MP_MODELS_NN_LINEAR_H
#define MP_MODELS_NN_LINEAR_H

#include "base/arena.h"
#include "base/shared_memory.h"
#include "base/team.h"
#include "files/weights.h"
#include "kernels/kernels.h"
#include "models/engine.h"
#include "models/nn/stored.h"

enum { MP_LINEAR_PARTS = 3, MP_BUILDER_NAME = 72 };

typedef struct mp_linear {
    int parts;
    mp_wmat w[MP_LINEAR_PARTS];
    int32_t column[MP_LINEAR_PARTS]; /* first output column of each part */
    float *bias;                     /* [N] or NULL */
    int32_t N, K;
    uint8_t acts[MP_LINEAR_PARTS];           /* mp_akind of each part */
    mp_stored_part *stored[MP_LINEAR_PARTS]; /* NULL when it was packed at load */
} mp_linear;

/* ---- building ---------------------------------------------------------------------------------------------------- */

/* Collects what a model needs, then allocates one slab for all of it and packs on every lane of the lease. */
typedef struct mp_builder {
    const mp_weights *weights;
    mp_compute compute;
    struct mp_build_job *jobs;
    int count, capacity;
    mp_shm *shared; /* NULL, or where the slab stands: see mp_load_args */
    uint8_t *slab;  /* after finish: the model's, to be freed with mp_free; NULL when it is shared */
    size_t slab_bytes;
    uint64_t charged; /* after finish: what the budget was charged */
    int64_t parameters;
    uint64_t pack_on_use; /* matrices that may be left, of so many bytes together, are not packed by finish: quantised
                           * ones, and those in floats that are added while `floats_on_use` */
    bool floats_on_use;   /* their layers are run with mp_unpacked */
    mp_stored *stored;    /* after finish: what was not packed, the model's, or NULL */
} mp_builder;

void mp_builder_init(mp_builder *builder, const mp_weights *weights, mp_compute compute);
void mp_builder_deinit(mp_builder *builder); /* frees the list, and the slab if finish was not reached or failed */
/* One part of a linear layer: tensor `name` [N, K]; bias_name NULL = no bias. Parts of one layer are added in order,
 * all with or all without a bias. Pointers must stay valid until finish. */
mp_status mp_builder_linear(mp_builder *builder, mp_linear *linear, const char *name, const char *bias_name, int32_t N,
                            int32_t K, mp_error *error);
/* A linear layer over unfolded neighbourhoods: tensor `name` [N, channels, size, size] as a matrix whose inputs are
 * ordered [size * size][channels], one part. The biases are as above. */
mp_status mp_builder_conv(mp_builder *builder, mp_linear *linear, const char *name, const char *bias_name, int32_t N,
                          int32_t channels, int32_t size, mp_error *error);
/* The same without a bias, from a matrix in memory that stays until finish. */
mp_status mp_builder_linear_of(mp_builder *builder, mp_linear *linear, const mp_tensor *tensor, mp_error *error);
/* The same from floats [N, K] that are allocated with mp_alloc; the builder frees them, also on failure. */
mp_status mp_builder_linear_taken(mp_builder *builder, mp_linear *linear, float *matrix, int32_t N, int32_t K,
                                  mp_error *error);
/* A vector of n floats, converted. */
mp_status mp_builder_vector(mp_builder *builder, float **out, const char *name, int64_t n, mp_error *error);
/* The same, with `add` added to each. */
mp_status mp_builder_vector_plus(mp_builder *builder, float **out, const char *name, int64_t n, float add,
                                 mp_error *error);
/* A matrix of [rows, n] floats, converted and otherwise as it is: for mp_gemm_f32_plain. */
mp_status mp_builder_plain(mp_builder *builder, float **out, const char *name, int64_t rows, int64_t n,
                           mp_error *error);
/* Allocate (charging the budget), pack, hand source pages back. On success the caller owns builder->slab and
 * builder->stored. A shared slab that is filled already costs and packs nothing: it must be as large as these weights
 * are. */
mp_status mp_builder_finish(mp_builder *builder, mp_lease *lease, mp_budget *budget, mp_progress *progress,
                            mp_error *error);

/* ---- running ----------------------------------------------------------------------------------------------------- */

/* Scratch for the prepared activations of up to M rows; shared by all lanes. */
size_t mp_linear_scratch(const mp_linear *linear, int M);
/* y [M, ldy] = x [M, ldx] W^T (+ bias, act, residual by ep; ep->bias is set from the layer and must be NULL on entry).
 * All lanes of the region call it with the same arguments; each computes a contiguous range of outputs. Begins with x
 * complete (after a barrier) and ends WITHOUT a barrier. There is one barrier inside, except when nothing is shared to
 * prepare or M <= MP_PRIVATE_ROWS and private_scratch is given, where each lane prepares all rows by itself.
 * x NULL: of the activations that mp_linear_into has left in scratch, after a barrier; none inside.
 * unpacked: the lane's, needed while the layer has stored parts with panels left; else NULL. */
enum { MP_PRIVATE_ROWS = 4 };
void mp_linear_forward(const mp_linear *linear, const mp_team_thread *thread, const float *x, int64_t ldx, int M,
                       void *scratch, void *private_scratch, const mp_unpacked *unpacked, const mp_epilogue *ep,
                       float *y, int64_t ldy);
/* act(linear(x)), or act(gate) * up of a layer of those two parts, as the activations of the layer `next` in
 * next_scratch (mp_linear_scratch of it): a panel's outputs are 32 of its inputs, so they are rounded while they are
 * hot, and floats never leave the lane's cache. All parts are packed. Bits are those of mp_linear_forward, the slot
 * `gated` and the preparation of the next layer one after another. Barriers as above; there is one inside. A layer with
 * fewer outputs than next has inputs gives the last of them; mp_linear_lead gives the others. */
void mp_linear_into(const mp_linear *linear, const mp_linear *next, const mp_team_thread *thread, const float *x,
                    int64_t ldx, int M, void *scratch, mp_act act, void *next_scratch);
/* True if mp_linear_into can: next takes Q8 or BF16 (I8 has one scale a row), and a gate is a part of its own. */
bool mp_linear_fits(const mp_linear *linear, const mp_linear *next);
/* The lane's rows of x [M, n], n of next's inputs less those that mp_linear_into gives. No barrier. */
void mp_linear_lead(const mp_linear *next, const mp_team_thread *thread, const float *x, int64_t ldx, int32_t n, int M,
                    void *next_scratch);

#endif
