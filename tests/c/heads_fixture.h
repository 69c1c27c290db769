/* heads_fixture.h: tiny encoders with heads beside the pooling, and requests for several outputs. */
#ifndef HEADS_FIXTURE_H
#define HEADS_FIXTURE_H

#include "base/siphash.h"
#include "encoder_fixture.h"

enum { ROW_WIDTH = 24, ROW_INNER = 40 };

static inline void add_row_head(tiny_file *file) { /* two layers; the second without bias */
    tiny_int(file->spec, "mpool.rows_count", 2);
    tiny_string(file->spec, "mpool.rows.0.activation", "tanh");
    tiny_flag(file->spec, "mpool.rows_normalize", true);
    tiny_tensor(file, "rows.0.weight", MP_F32, ROW_INNER, TINY_WIDTH, 0.3f, 0);
    tiny_tensor(file, "rows.0.bias", MP_F32, 1, ROW_INNER, 0.3f, 0);
    tiny_tensor(file, "rows.1.weight", MP_F32, ROW_WIDTH, ROW_INNER, 0.3f, 0);
}

/* A row head, and a masked-language-model head whose matrix is the table of tokens. */
static inline void add_vocabulary_head(tiny_file *file) {
    add_row_head(file);
    tiny_string(file->spec, "mpool.sparse", "vocabulary");
    tiny_int(file->spec, "mpool.sparse_count", 1);
    tiny_string(file->spec, "mpool.sparse.0.activation", "gelu");
    tiny_float(file->spec, "mpool.sparse.0.norm_epsilon", 1e-12);
    tiny_tensor(file, "sparse.0.weight", MP_F32, TINY_WIDTH, TINY_WIDTH, 0.3f, 0);
    tiny_tensor(file, "sparse.0.bias", MP_F32, 1, TINY_WIDTH, 0.3f, 0);
    tiny_tensor(file, "sparse.0.norm.weight", MP_F32, 1, TINY_WIDTH, 0.3f, 1);
    tiny_tensor(file, "sparse.0.norm.bias", MP_F32, 1, TINY_WIDTH, 0.3f, 0);
    tiny_tensor(file, "sparse_output.bias", MP_F32, 1, TINY_VOCAB, 0.5f, -12);
}

static inline void add_sum_head(tiny_file *file) { /* the same with sums, log1p twice, and a matrix of its own */
    add_vocabulary_head(file);
    tiny_flag(file->spec, "mpool.sparse_sum", true);
    tiny_int(file->spec, "mpool.sparse_logs", 2);
    tiny_tensor(file, "sparse_output.weight", MP_F32, TINY_VOCAB, TINY_WIDTH, 3, 0);
}

/* A row head, and one weight per token. */
static inline void add_token_head_that_skips(tiny_file *file, const int64_t *skipped, int count) {
    add_row_head(file);
    tiny_string(file->spec, "mpool.sparse", "tokens");
    tiny_int(file->spec, "mpool.sparse_count", 1);
    tiny_string(file->spec, "mpool.sparse.0.activation", "relu");
    tiny_ints(file->spec, "mpool.sparse_skipped", skipped, count);
    tiny_tensor(file, "two_rows", MP_F32, 2, TINY_WIDTH / 2, 0.3f, 0);
    mp_error error;
    const mp_tensor_entry entry = {.name = "sparse.0.weight", .dtype = MP_F32, .ndim = 2, .shape = {1, TINY_WIDTH},
                                   .offset = file->used - TINY_WIDTH * 4, .nbytes = TINY_WIDTH * 4};
    MP_CHECK_OK(mp_spec_add_tensor(file->spec, &entry, &error), &error); /* [1, width], which tiny_tensor cannot make */
    tiny_tensor(file, "sparse.0.bias", MP_F32, 1, 1, 0.3f, 0);
}

static inline void add_token_head(tiny_file *file) {
    static const int64_t skipped[] = {0, 9, 20};
    add_token_head_that_skips(file, skipped, 3);
}

/* Make a request for texts [first, first + count). */
static inline mp_embedding_request *make_outputs(const texts *all, int first, int count, unsigned outputs) {
    mp_error error;
    mp_embedding_request *call;
    int64_t offsets[TEXTS + 1];
    for (int t = 0; t <= count; t++)
        offsets[t] = all->offsets[first + t] - all->offsets[first];
    MP_CHECK_OK(make_embedding_request(count, all->ids + all->offsets[first], offsets, NULL, &call, &error), &error);
    call->outputs = (uint8_t)outputs;
    return call;
}

/* Write hashes of each output of each text: [texts, 16], finite. */
enum { OUTPUT_HASHES = 16 };
static inline void hash_outputs(const mp_embedding_request *call, float *out) {
    static const uint64_t key[2] = {1, 2};
    for (int32_t t = 0; t < call->n_texts; t++, out += OUTPUT_HASHES) {
        const size_t n = (size_t)(call->offsets[t + 1] - call->offsets[t]), at = (size_t)call->offsets[t];
        uint64_t hash[4] = {0};
        if (call->vectors)
            hash[0] = mp_siphash(key, call->vectors + t * call->sizes.width, (size_t)call->sizes.width * 4);
        if (call->states)
            hash[1] = mp_siphash(key, call->states + at * (size_t)call->sizes.hidden,
                                 n * (size_t)call->sizes.hidden * 4);
        if (call->rows)
            hash[2] = mp_siphash(key, call->rows + at * (size_t)call->sizes.row_width,
                                 n * (size_t)call->sizes.row_width * 4);
        if (call->sparse_counts) {
            const int64_t from = mp_embedding_sparse_at(call, t);
            const uint64_t both[2] = {
                mp_siphash(key, call->sparse_ids + from, (size_t)call->sparse_counts[t] * 4),
                mp_siphash(key, call->sparse_values + from, (size_t)call->sparse_counts[t] * 4)};
            hash[3] = mp_siphash(key, both, sizeof both);
        }
        for (int i = 0; i < OUTPUT_HASHES; i++)
            out[i] = (float)(hash[i / 4] >> 16 * (i % 4) & 0xFFFF);
    }
}

#endif
