/* nn/builder.h: loads the weights of a model. Collects its tensors, then allocates one slab for all of them and packs
 * on every thread of the lease. */
#ifndef MP_MODELS_NN_BUILDER_H
#define MP_MODELS_NN_BUILDER_H

#include "base/shared_memory.h"
#include "kernels/scaled.h"
#include "models/nn/linear.h"
#include "models/nn/weight_store.h"

enum { MP_BUILDER_NAME = 72, MP_BUILDER_TAPS = 16 /* taps of mp_builder_taps */ };

/* A matrix [heads * N, K] that is made of a part of another matrix, `from`, which has `stride` rows per head. The part
 * begins at row `first` of each head: N rows of K values, or, if `transposed`, K rows of N values to be transposed. */
typedef struct mp_head_rows {
    mp_scaled from;
    int32_t heads, N, K, stride, first;
    bool transposed;
} mp_head_rows;

/* Another order of rows or columns: those from `first` on are [outer][a][b][width] in the file, and
 * [outer][b][a][width] in the layer. All zero: the order of the file. */
typedef struct mp_order {
    int64_t first, outer, a, b, width;
} mp_order;

/* How the tensors that are added next are loaded. Functions that add tensors take it as const: for tensors with other
 * values, pass a changed copy. */
typedef struct mp_builder {
    mp_weight_store *store; /* collects the tensors, and owns them after finish */
    const mp_weights *weights;
    mp_shm *shared; /* NULL, or the memory of the slab: see `mp_load_args.shared` */
    mp_compute compute;
    mp_weights_use use;   /* see mp_builder_read_use */
    mp_unpacked unpacked; /* which matrices may stay unpacked; calls of their layers must then pass `panel_scratch` */
    float bias_scale;     /* factor on the biases of linear layers */
    bool uncounted;       /* the values do not count as parameters of the model */
} mp_builder;

/* Sets the values of a model that packs all matrices at load. */
void mp_builder_init(mp_builder *builder, mp_weight_store *store, const mp_weights *weights, mp_compute compute);
/* For families whose layers pass `panel_scratch`: sets `use` from the spec and the options. Call before adding
 * tensors. */
mp_status mp_builder_read_use(mp_builder *builder, mp_error *error);
/* Frees the list of tensors, which finish or the end of the store does too. */
void mp_builder_drop_jobs(mp_weight_store *store);
/* Adds one part of a linear layer: tensor `name` [N, K]; bias_name NULL: no bias. Add the parts of a layer in order,
 * all with or all without a bias. `linear` must not move until finish. */
mp_status mp_builder_linear(const mp_builder *builder, mp_linear *linear, const char *name, const char *bias_name,
                            int32_t N, int32_t K, mp_error *error);
/* Adds a linear layer over unfolded neighbourhoods: tensor `name` [N, channels, size, size] as a matrix whose inputs
 * are ordered [size * size][channels]. The layer has one part; `bias_name` is as in mp_builder_linear. */
mp_status mp_builder_conv(const mp_builder *builder, mp_linear *linear, const char *name, const char *bias_name,
                          int32_t N, int32_t channels, int32_t size, mp_error *error);
/* Adds a part without a bias, from a matrix in memory that must stay valid until finish. `name` names the tensor in
 * errors. */
mp_status mp_builder_linear_of(const mp_builder *builder, mp_linear *linear, const char *name, const mp_tensor *tensor,
                               mp_error *error);
/* As mp_builder_linear_of, from floats [N, K] allocated with mp_alloc, with a bias unless `bias` is NULL. Takes
 * ownership of `matrix`, also on failure. */
mp_status mp_builder_linear_taken(const mp_builder *builder, mp_linear *linear, const char *name, const char *bias,
                                  float *matrix, int32_t N, int32_t K, mp_error *error);
/* Adds a part without a bias: the matrix that `rows` describes, as floats. `rows->N` must be a multiple of MP_PANEL_N.
 * Finish converts one head at a time per thread. `name` names the tensor in errors. */
mp_status mp_builder_linear_by_head(const mp_builder *builder, mp_linear *linear, const char *name,
                                    const mp_head_rows *rows, mp_error *error);
/* Adds a part without a bias: tensor `name` [N, K] of F32, F16 or BF16, times `factor`, as fp32. The orders of rows and
 * columns must fit into N and K. Finish converts 32 rows at a time per thread, and fails with FORMAT if a value times
 * `factor` is not finite. */
mp_status mp_builder_linear_converted(const mp_builder *builder, mp_linear *linear, const char *name, int32_t N,
                                      int32_t K, float factor, const mp_order *rows, const mp_order *columns,
                                      mp_error *error);
/* Adds a vector of n values, converted to fp32. */
mp_status mp_builder_vector(const mp_builder *builder, float **out, const char *name, int64_t n, mp_error *error);
/* Adds a vector like mp_builder_vector, with `add` added to each value. */
mp_status mp_builder_vector_plus(const mp_builder *builder, float **out, const char *name, int64_t n, float add,
                                 mp_error *error);
/* Adds a vector like mp_builder_vector, whose values x become -exp(x). */
mp_status mp_builder_vector_exp(const mp_builder *builder, float **out, const char *name, int64_t n, mp_error *error);
/* Adds a matrix [rows, n], converted to fp32 but not packed: for mp_gemm_f32_plain. */
mp_status mp_builder_plain(const mp_builder *builder, float **out, const char *name, int64_t rows, int64_t n,
                           mp_error *error);
/* Adds the kernels of a convolution along one axis, one per channel: tensor `name` [channels, taps] or [channels, 1,
 * taps], converted to fp32 as [taps, channels]. */
mp_status mp_builder_taps(const mp_builder *builder, float **out, const char *name, int32_t channels, int32_t taps,
                          mp_error *error);
/* Allocates the slab (charged to the budget), packs, and releases source pages. If the matrices that may stay unpacked
 * have at least mp_weights_threshold bytes together, all of them stay unpacked. Charges scratch while it packs. The
 * store owns the result. If the shared slab is already filled, charges and packs nothing; its size must equal the
 * packed size of these weights. */
mp_status mp_builder_finish(const mp_builder *builder, mp_lease *lease, mp_budget *budget, mp_progress *progress,
                            mp_error *error);

#endif
