/* nn/adapter.h: low-rank adapters of linear layers (LoRA: Hu et al., arXiv:2106.09685), chosen row by row.
 *
 * An adapter adds scale * B (A x) to the outputs of a part of a layer, where A [rank, K] and B [N, rank] are matrices
 * of its own. A model may have several adapters, and each row of a pass names one of them or none. The updates are
 * computed in fp32, whatever the compute type of the layer is. An update depends on its own row only: the bits are the
 * same alone and beside rows of other adapters, and a row without an adapter has the bits that it has in a model
 * without adapters.
 *
 * The spec of a model lists its adapters: the key mpool.adapters holds the id of each one. Matrices of the adapter at
 * index i are the tensors adapter.<i + 1>.<layer>.lora_a and .lora_b, where <layer> is the name of the adapted weight
 * without ".weight". The key adapter.<i + 1>.<layer>.scale is the factor. The keys adapter.<i + 1>.<layer>.rows and
 * .columns, five integers each, are the fields of mp_order: how the rows of B and the columns of A are ordered if that
 * differs from the outputs and inputs of the layer.
 *
 * <layer> may also be token_embd or token_types. The matrices of an embedding are A [rows of the table, rank] and
 * B [rank, n]: the row of A times B is added to the row of the table. A of the tokens is read from the mapped file,
 * like the table. */
#ifndef MP_MODELS_NN_ADAPTER_H
#define MP_MODELS_NN_ADAPTER_H

#include "models/nn/embedding.h"
#include "models/nn/builder.h"
#include "models/nn/row_context.h"

enum { MP_ADAPTERS_MAX = 64, MP_ADAPTER_MAX_RANK = 1024 };
#define MP_ADAPTER_PREFIX "adapter."

typedef struct mp_low_rank { /* the update of a layer by one adapter */
    mp_linear down;                /* A of every adapted part, side by side: [sum of ranks, K] */
    mp_linear up[MP_LINEAR_PARTS]; /* [N, rank] of each part of `down`: B times the scale */
    int part[MP_LINEAR_PARTS];     /* index in the layer of each part of `down` */
    struct mp_low_rank *next;      /* list of all updates of a model */
} mp_low_rank;

typedef struct mp_adapters { /* the adapters of a model */
    int count;
    int64_t ids[MP_ADAPTERS_MAX];
    int32_t width;      /* largest sum of ranks of an update */
    bool *added;        /* [tensors of the spec]: true once its matrix was added to a layer; NULL without adapters */
    mp_low_rank *updates;
    struct mp_updates *tables;
    mp_embedding_update *embeddings; /* [count], or NULL: no adapter updates the embeddings */
} mp_adapters;

/* Reads the list of adapters. FORMAT for an id that occurs twice. Call mp_adapters_deinit also after a failure. */
mp_status mp_adapters_open(mp_adapters *adapters, const mp_spec *spec, mp_error *error);
void mp_adapters_deinit(mp_adapters *adapters); /* invalidates `updates` of the layers */
/* Returns the number of the adapter with this id: its index plus 1; 0 if the model does not have it. */
int mp_adapters_find(const mp_adapters *adapters, int64_t id);
/* Adds the updates of the last part of `linear`, whose weight is the tensor `name`. Call after mp_builder_linear.
 * FORMAT names a matrix whose shape does not fit, or that holds a value which is not finite. */
mp_status mp_adapters_add(mp_adapters *adapters, const mp_builder *builder, mp_linear *linear, const char *name,
                          mp_error *error);
/* Adds the updates of `embedding`, whose tables are token_embd.weight and, with `types` rows, token_types.weight.
 * types 0: there is no such table. used: rows of it that are used. Charges `budget` and adds the bytes to `charged`.
 * FORMAT as for mp_adapters_add; LIMIT for a rank above n. */
mp_status mp_adapters_add_embedding(mp_adapters *adapters, const mp_weights *weights, mp_embedding *embedding,
                                    int64_t types, int32_t used, mp_budget *budget, uint64_t *charged,
                                    mp_error *error);
/* Call after the last layer. UNSUPPORTED names a matrix of an adapter that was not added. */
mp_status mp_adapters_check(const mp_adapters *adapters, const mp_spec *spec, mp_error *error);
/* Returns the bytes that the matrix `entry` of an adapter takes when it is loaded; 0 for every other tensor, and for
 * matrices that stay in the mapped file. */
uint64_t mp_adapter_footprint(const mp_tensor_entry *entry);

/* As mp_row_linear, for a layer with updates and rows with adapters. Ends WITHOUT a barrier; a barrier must follow
 * before the next call. `linear` may be a view of a layer. If an update applies to a row, there is one more barrier
 * inside than in mp_linear_forward. x must not be NULL, and `ep` must have no activation. */
void mp_adapter_forward(const mp_row_context *context, const mp_linear *linear, const float *x, int64_t ldx, int M,
                        const mp_epilogue *ep, float *y, int64_t ldy);

#endif
