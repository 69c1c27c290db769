/* nn/linear.h: linear layers over packed weights, and the builder that loads them.
 *
 * A linear layer may have several parts that share their input (query, key and value; gate and up). Their outputs are
 * contiguous in a row, and activations are prepared once for all parts. */
#ifndef MP_MODELS_NN_LINEAR_H
#define MP_MODELS_NN_LINEAR_H

#include "base/arena.h"
#include "base/shared_memory.h"
#include "base/team.h"
#include "files/weights.h"
#include "kernels/kernels.h"
#include "kernels/scaled.h"
#include "models/engine.h"
#include "models/nn/stored.h"
#include "models/nn/weights_use.h"

enum { MP_LINEAR_PARTS = 3, MP_BUILDER_NAME = 72 };

typedef struct mp_linear {
    int parts;
    mp_wmat w[MP_LINEAR_PARTS];
    int32_t column[MP_LINEAR_PARTS]; /* first output column of each part */
    float *bias;                     /* [N] or NULL */
    int32_t N, K;
    uint8_t acts[MP_LINEAR_PARTS];           /* mp_akind of each part */
    mp_stored_part *stored[MP_LINEAR_PARTS]; /* NULL if the part was packed at load */
    struct mp_low_rank **updates; /* by adapter, NULL for those that leave the layer as it is (nn/adapter.h); or NULL */
    int first; /* views: index of the first part in the whole layer; otherwise 0 */
} mp_linear;

/* ---- building ---------------------------------------------------------------------------------------------------- */

/* A matrix [heads * N, K] that is made of a part of another matrix, `from`, which has `stride` rows per head. The part
 * begins at row `first` of each head: N rows of K values, or, if `transposed`, K rows of N values to be transposed. */
typedef struct mp_head_rows {
    mp_scaled from;
    int32_t heads, N, K, stride, first;
    bool transposed;
} mp_head_rows;

/* Collects the tensors of a model, then allocates one slab for all of them and packs on every thread of the lease. */
typedef struct mp_builder {
    const mp_weights *weights;
    mp_compute compute;
    struct mp_build_job *jobs;
    int count, capacity;
    mp_shm *shared; /* NULL, or the memory of the slab: see `mp_load_args.shared` */
    uint8_t *slab;  /* after finish: owned by the model, to be freed with mp_free; NULL if shared */
    size_t slab_bytes; /* excludes the slack after the last tensor */
    uint64_t charged; /* after finish: bytes charged to the budget */
    int64_t parameters;
    mp_weights_use use;   /* see mp_builder_read_use */
    uint64_t pack_on_use; /* threshold in bytes for finish with MP_WEIGHTS_AUTO. If the matrices that may stay unpacked
                           * have at least this total size, finish leaves all of them unpacked, else it packs all of
                           * them */
    mp_unpacked unpacked; /* which of the matrices added now may stay unpacked; calls of their layers must then pass
                           * `panel_scratch` */
    uint64_t mapped_bytes; /* bytes in the files of the matrices that are never packed */
    float bias_scale;     /* factor on the biases of linear layers that are added next; 1 after init */
    mp_stored *stored;    /* after finish: the unpacked matrices, owned by the model, or NULL */
    struct mp_packed_experts *packed_experts; /* not owned: keeps packed copies of the experts that are added
                                               * (nn/packed_experts.h), or NULL */
    struct mp_expert_reads *expert_reads;     /* not owned: measures reads of the experts that are added
                                               * (nn/expert_reads.h), or NULL */
} mp_builder;

void mp_builder_init(mp_builder *builder, const mp_weights *weights, mp_compute compute);
/* For families whose layers pass `panel_scratch`: sets `use` and `pack_on_use` from the spec and the options. Families
 * that do not call this pack all matrices. Call before adding matrices. */
mp_status mp_builder_read_use(mp_builder *builder, mp_error *error);
void mp_builder_deinit(mp_builder *builder); /* frees the job list, and the slab unless finish succeeded */
/* Adds one part of a linear layer: tensor `name` [N, K]; bias_name NULL: no bias. Add the parts of a layer in order,
 * all with or all without a bias. `linear` must not move until finish. */
mp_status mp_builder_linear(mp_builder *builder, mp_linear *linear, const char *name, const char *bias_name, int32_t N,
                            int32_t K, mp_error *error);
/* Adds a linear layer over unfolded neighbourhoods: tensor `name` [N, channels, size, size] as a matrix whose inputs
 * are ordered [size * size][channels]. The layer has one part; `bias_name` is as in mp_builder_linear. */
mp_status mp_builder_conv(mp_builder *builder, mp_linear *linear, const char *name, const char *bias_name, int32_t N,
                          int32_t channels, int32_t size, mp_error *error);
/* Adds a part without a bias, from a matrix in memory that must stay valid until finish. `name` names the tensor in
 * errors. */
mp_status mp_builder_linear_of(mp_builder *builder, mp_linear *linear, const char *name, const mp_tensor *tensor,
                               mp_error *error);
/* As mp_builder_linear_of, from floats [N, K] allocated with mp_alloc. Takes ownership of `matrix`, also on failure. */
mp_status mp_builder_linear_taken(mp_builder *builder, mp_linear *linear, const char *name, float *matrix, int32_t N,
                                  int32_t K, mp_error *error);
/* Adds a part without a bias: the matrix that `rows` describes, as floats. `rows->N` must be a multiple of MP_PANEL_N.
 * Finish converts one head at a time per thread. `name` names the tensor in errors. */
mp_status mp_builder_linear_by_head(mp_builder *builder, mp_linear *linear, const char *name, const mp_head_rows *rows,
                                    mp_error *error);
/* Adds a part without a bias: tensor `name` [N, K] of F32, F16 or BF16, times `factor`, as fp32. With
 * interleaved_heads > 0, the rows belong to this many heads; the two halves of a head follow one another in the tensor
 * and are interleaved in the layer. With interleaved_heads < 0, the reverse. With 0, the rows stay in their order.
 * Finish converts 32 rows at a time per thread, and fails with FORMAT if a value times `factor` is not finite. */
mp_status mp_builder_linear_converted(mp_builder *builder, mp_linear *linear, const char *name, int32_t N, int32_t K,
                                      float factor, int64_t interleaved_heads, mp_error *error);
/* Adds a vector of n values, converted to fp32. */
mp_status mp_builder_vector(mp_builder *builder, float **out, const char *name, int64_t n, mp_error *error);
/* Adds a vector like mp_builder_vector, with `add` added to each value. */
mp_status mp_builder_vector_plus(mp_builder *builder, float **out, const char *name, int64_t n, float add,
                                 mp_error *error);
/* Adds a matrix [rows, n], converted to fp32 but not packed: for mp_gemm_f32_plain. */
mp_status mp_builder_plain(mp_builder *builder, float **out, const char *name, int64_t rows, int64_t n,
                           mp_error *error);
/* Allocates the slab (charged to the budget), packs, and releases source pages. Charges scratch while it packs. On
 * success the caller owns builder->slab and builder->stored. If the shared slab is already filled, charges and packs
 * nothing; its size must equal the packed size of these weights. */
mp_status mp_builder_finish(mp_builder *builder, mp_lease *lease, mp_budget *budget, mp_progress *progress,
                            mp_error *error);

/* ---- running ----------------------------------------------------------------------------------------------------- */

/* Scratch for the prepared activations of up to M rows, shared by all threads. */
size_t mp_linear_scratch(const mp_linear *linear, int M);
/* y [M, ldy] = x [M, ldx] W^T (+ bias, activation, residual as in `ep`; ep->bias is set from the layer and must be NULL
 * on entry). All threads of the region must call it with the same arguments; each computes a contiguous range of
 * outputs. x must be complete (after a barrier). Ends WITHOUT a barrier. There is one barrier inside, except in two
 * cases: all parts take fp32 activations, which need no preparation; or M <= MP_PRIVATE_ROWS and private_scratch is not
 * NULL, so that each thread prepares all rows by itself. x NULL: uses the activations that mp_linear_into has left in
 * `scratch`, after a barrier; no barrier inside. panel_scratch: as in mp_stored_gemm; required while the layer has
 * unpacked panels, otherwise NULL. */
enum { MP_PRIVATE_ROWS = 4 };
void mp_linear_forward(const mp_linear *linear, const mp_team_thread *thread, const float *x, int64_t ldx, int M,
                       void *scratch, void *private_scratch, uint8_t *panel_scratch, const mp_epilogue *ep,
                       float *y, int64_t ldy);
/* Computes linear(x [M, ldx]) + bias of a layer of one part tile by tile, for products that are reduced at once: `take`
 * gets a tile of all rows and `columns` outputs from `column` on, [M, ld]. Thread i of n takes the panels from
 * panels * i / n on, in ascending order. tile: mp_linear_tile(M) floats of the thread, which are enough for fewer rows,
 * too. Other arguments and barriers are as in mp_linear_forward without private scratch. The bits of an output do not
 * depend on the tiles. */
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
