#include "models/nn/relative_attention.h"

#include <math.h>
#include <stdlib.h>

#include "models/nn/scratch.h"

/* Signed bucket of a distance, as in the reference implementation. Its logarithms are in fp32; the exact ones differ
 * from an integer by rounding only, which `CLOSE` covers. */
static double bucket_of(int64_t distance, int32_t buckets, int32_t farthest) {
    static const double CLOSE = 1e-5;
    const int32_t half = buckets / 2;
    const int64_t size = llabs(distance);
    if (size <= half)
        return (double)distance;
    const double part = log((double)size / half) / log((double)(farthest - 1) / half) * (half - 1);
    const double far = ceil(part - CLOSE) + half;
    return distance < 0 ? -far : far;
}

mp_status mp_relative_init(mp_relative *relative, int32_t span, int32_t buckets, int32_t farthest, int64_t length,
                           mp_error *error) {
    const int64_t count = 2 * length - 1;
    *relative = (mp_relative){.rows = 2 * span, .length = length};
    relative->index = mp_alloc_array((size_t)count, sizeof *relative->index, MP_TAG_WEIGHTS);
    if (!relative->index)
        return mp_fail_memory(error, (uint64_t)count * sizeof *relative->index, "the rows of distances");
    for (int64_t i = 0; i < count; i++) {
        const int64_t distance = i - (length - 1);
        const double row = (buckets ? bucket_of(distance, buckets, farthest) : (double)distance) + span;
        relative->index[i] = (int32_t)(row < 0 ? 0 : row > relative->rows - 1 ? relative->rows - 1 : row);
    }
    return MP_OK;
}

void mp_relative_deinit(mp_relative *relative) {
    mp_free(relative->index);
    relative->index = NULL;
}

/* Returns the rows by distance, at distance 0, for sequences of up to T rows: those of -(T - 1) ... T - 1 are in
 * [*first, *first + *count). Buckets may skip rows, so a sequence may need more rows than it has distances. */
static const int32_t *range_of(const mp_relative *relative, int T, int32_t *first, int32_t *count) {
    const int64_t far = (T < relative->length ? T : relative->length) - 1;
    const int32_t *zero = relative->index + relative->length - 1;
    *first = zero[-far];
    *count = zero[far] - *first + 1;
    return zero;
}

typedef struct parts { /* the parts of a thread's scratch */
    float *of_keys;    /* [T, rows] products of keys and learned queries */
    float *of_queries; /* [MP_RELATIVE_BLOCK, rows] products of queries and learned keys */
    float *bias;       /* [MP_RELATIVE_BLOCK, T] */
} parts;

static parts divide(const mp_relative *relative, int T, void *scratch) {
    uint8_t *at = scratch;
    int32_t first, count;
    range_of(relative, T, &first, &count);
    const size_t rows = (size_t)count * sizeof(float);
    parts made;
    made.of_keys = mp_scratch_take(&at, (size_t)T * rows);
    made.of_queries = mp_scratch_take(&at, MP_RELATIVE_BLOCK * rows);
    made.bias = mp_scratch_take(&at, MP_RELATIVE_BLOCK * (size_t)T * sizeof(float));
    return made;
}

size_t mp_relative_scratch(const mp_relative *relative, int T) {
    int32_t first, count;
    range_of(relative, T, &first, &count);
    const size_t rows = (size_t)count * sizeof(float);
    return mp_arena_cost((size_t)T * rows) + mp_arena_cost(MP_RELATIVE_BLOCK * rows) +
           mp_arena_cost(MP_RELATIVE_BLOCK * (size_t)T * sizeof(float));
}

void mp_relative_begin(const mp_relative_head *head) {
    const mp_relative_layer *layer = head->layer;
    const int64_t column = (int64_t)head->head * head->head_dim;
    int32_t first, count;
    range_of(layer->shape, head->T, &first, &count);
    if (layer->queries)
        mp_gemm_f32_plain(head->keys, count, head->head_dim, head->k, head->ld,
                          layer->queries + first * layer->width + column, layer->width,
                          divide(layer->shape, head->T, head->scratch).of_keys, count);
}

const float *mp_relative_bias(const mp_relative_head *head, int row0, int row1) {
    const mp_relative_layer *layer = head->layer;
    const parts made = divide(layer->shape, head->T, head->scratch);
    const int64_t column = (int64_t)head->head * head->head_dim;
    int32_t first, count;
    const int32_t *zero = range_of(layer->shape, head->T, &first, &count);
    if (layer->keys)
        mp_gemm_f32_plain(row1 - row0, count, head->head_dim, head->q + row0 * head->ld, head->ld,
                          layer->keys + first * layer->width + column, layer->width, made.of_queries, count);
    for (int r = row0; r < row1; r++) {
        float *bias = made.bias + (int64_t)(r - row0) * head->keys;
        const float *own = made.of_queries + (int64_t)(r - row0) * count;
        for (int t = 0; t < head->keys; t++) {
            const int32_t at = zero[r - t] - first;
            float sum = layer->keys ? own[at] : 0;
            if (layer->queries)
                sum += made.of_keys[(int64_t)t * count + at];
            bias[t] = sum * head->scale + (head->add ? head->add[t - r] : 0);
        }
    }
    return made.bias;
}
