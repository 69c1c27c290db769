#include "models/nn/pooling.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const mode_names[MP_POOL_COUNT] = {"cls",           "max",          "mean",
                                                      "mean_sqrt_len", "weightedmean", "lasttoken"};
static const char mode_list[] = "cls, max, mean, mean_sqrt_len, weightedmean, lasttoken";

static mp_status read_modes(mp_head *head, const mp_spec *spec, mp_error *error) {
    const mp_value *value = mp_spec_find(spec, "mpool.pooling");
    if (!value) {
        head->modes = 1;
        head->mode[0] = MP_POOL_MEAN;
        return MP_OK;
    }
    if (value->type != MP_VALUE_STRINGS || value->count < 1 || value->count > MP_POOL_COUNT)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.pooling", "a list of 1 to 6 names",
                            value->type == MP_VALUE_STRINGS ? "%llu names" : "another type",
                            (unsigned long long)value->count);
    for (uint64_t i = 0; i < value->count; i++) {
        const char *name = value->as.strings.bytes + value->as.strings.offsets[i];
        size_t length = value->as.strings.offsets[i + 1] - value->as.strings.offsets[i];
        int mode = 0;
        while (mode < MP_POOL_COUNT &&
               (strlen(mode_names[mode]) != length || memcmp(mode_names[mode], name, length) != 0))
            mode++;
        if (mode == MP_POOL_COUNT)
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.pooling", mode_list, "%.*s",
                                (int)length, name);
        head->mode[head->modes++] = (mp_pooling_mode)mode;
    }
    return MP_OK;
}

/* Reads the dense layers for particular output sizes. Each can replace the head's only dense layer. */
static mp_status read_sizes(mp_head *head, const mp_builder *builder, mp_error *error) {
    const mp_spec *spec = mp_weights_spec(builder->weights);
    const mp_value *value = mp_spec_find(spec, "mpool.dense_sizes");
    if (!value)
        return MP_OK;
    if (value->type != MP_VALUE_INTS || value->count > MP_MAX_SIZES || head->dense.count != 1 ||
        head->dense.dense[0].norm || head->dense.dense[0].minus)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.dense_sizes",
                            "at most 16 sizes, and exactly one dense layer without a norm or `minus`",
                            value->type == MP_VALUE_INTS ? "%llu sizes, %d dense layers%s" : "another type",
                            (unsigned long long)value->count, head->dense.count,
                            head->dense.count != 1                                    ? ""
                            : head->dense.dense[0].norm || head->dense.dense[0].minus ? " with a norm or `minus`"
                                                                                      : "");
    for (uint64_t i = 0; i < value->count; i++) {
        const int64_t size = value->as.integers[i];
        mp_dense *dense = &head->sizes[head->size_count++];
        char name[64];
        if (size < 1 || size > 65536)
            return mp_fail_file(error, MP_LIMIT, mp_spec_origin(spec), -1, "mpool.dense_sizes", "1 to 65,536", "%lld",
                                (long long)size);
        *dense = (mp_dense){.in = head->pooled, .out = (int32_t)size, .act = head->dense.dense[0].act};
        snprintf(name, sizeof name, "dense.size.%d.weight", (int)size);
        MP_TRY(mp_builder_plain(builder, &dense->weight, name, dense->out, dense->in, error));
        snprintf(name, sizeof name, "dense.size.%d.bias", (int)size);
        if (mp_weights_has(builder->weights, name))
            MP_TRY(mp_builder_vector(builder, &dense->bias, name, dense->out, error));
    }
    return MP_OK;
}

mp_status mp_head_init(mp_head *head, const mp_builder *builder, int32_t hidden, mp_error *error) {
    const mp_spec *spec = mp_weights_spec(builder->weights);
    *head = (mp_head){.hidden = hidden};
    bool normalize_default = true;
    MP_TRY(read_modes(head, spec, error));
    head->pooled = hidden * head->modes;
    MP_TRY(mp_dense_chain_init(&head->dense, builder, "dense", head->pooled, error));
    head->width = head->dense.out;
    MP_TRY(read_sizes(head, builder, error));
    return mp_spec_bool(spec, "mpool.normalize", &normalize_default, &head->normalize, error);
}

/* A head with layers for particular sizes offers these sizes and its full width only, no truncated vectors. */
bool mp_head_gives(const mp_head *head, int dimensions) {
    for (int i = 0; i < head->size_count; i++)
        if (head->sizes[i].out == dimensions)
            return true;
    return head->size_count ? dimensions == head->width : dimensions >= 1 && dimensions <= head->width;
}

int32_t mp_head_widest(const mp_head *head) {
    int32_t widest = head->width;
    for (int i = 0; i < head->size_count; i++)
        widest = head->sizes[i].out > widest ? head->sizes[i].out : widest;
    return widest;
}

mp_row_span mp_head_reads(const mp_head *head, int32_t n, int32_t skip) {
    if (head->modes == 1 && head->mode[0] == MP_POOL_CLS)
        return (mp_row_span){.row0 = skip, .rows = 1};
    if (head->modes == 1 && head->mode[0] == MP_POOL_LAST_TOKEN)
        return (mp_row_span){.row0 = n - 1, .rows = 1};
    return (mp_row_span){.row0 = 0, .rows = n};
}

size_t mp_head_scratch(const mp_head *head) {
    size_t widest = (size_t)head->pooled;
    for (int i = 0; i < head->dense.count; i++)
        if ((size_t)head->dense.dense[i].out > widest)
            widest = (size_t)head->dense.dense[i].out;
    if ((size_t)mp_head_widest(head) > widest)
        widest = (size_t)mp_head_widest(head);
    return 2 * ((widest + 15) & ~(size_t)15);
}

static void pool_sum(const float *tokens, int n, int skip, int d, bool weighted, float *out) {
    memset(out, 0, (size_t)d * sizeof *out);
    for (int t = skip; t < n; t++) {
        const float *row = tokens + (size_t)t * (size_t)d;
        float weight = weighted ? (float)(t + 1) : 1;
        for (int i = 0; i < d; i++)
            out[i] = weighted ? fmaf(row[i], weight, out[i]) : out[i] + row[i];
    }
}

static void pool_one(mp_pooling_mode mode, const float *tokens, int n, int skip, int d, float *out) {
    float divisor;
    switch (mode) {
    case MP_POOL_CLS:
        memcpy(out, tokens + (size_t)skip * (size_t)d, (size_t)d * sizeof *out);
        return;
    case MP_POOL_LAST_TOKEN:
        memcpy(out, tokens + (size_t)(n - 1) * (size_t)d, (size_t)d * sizeof *out);
        return;
    case MP_POOL_MAX:
        memcpy(out, tokens + (size_t)skip * (size_t)d, (size_t)d * sizeof *out);
        for (int t = skip + 1; t < n; t++)
            for (int i = 0; i < d; i++) {
                float x = tokens[(size_t)t * (size_t)d + (size_t)i];
                out[i] = x > out[i] || x != x ? x : out[i]; /* NaN must reach the result */
            }
        return;
    case MP_POOL_MEAN:
        pool_sum(tokens, n, skip, d, false, out);
        divisor = (float)(n - skip);
        break;
    case MP_POOL_MEAN_SQRT_LEN:
        pool_sum(tokens, n, skip, d, false, out);
        divisor = sqrtf((float)(n - skip));
        break;
    default:
        assert(mode == MP_POOL_WEIGHTED_MEAN);
        pool_sum(tokens, n, skip, d, true, out);
        divisor = 0;
        for (int t = skip; t < n; t++)
            divisor += (float)(t + 1);
        break;
    }
    for (int i = 0; i < d; i++)
        out[i] /= divisor;
}

void mp_head_apply(const mp_head *head, const float *tokens, int n, int skip, int dimensions, bool normalize,
                   float *scratch, float *out) {
    float *in = scratch, *next = scratch + mp_head_scratch(head) / 2;
    for (int i = 0; i < head->modes; i++)
        pool_one(head->mode[i], tokens, n, skip, head->hidden, in + (size_t)i * (size_t)head->hidden);
    for (int i = 0; i < head->dense.count; i++) {
        const mp_dense *dense = &head->dense.dense[i];
        for (int s = 0; s < head->size_count; s++)
            if (head->sizes[s].out == dimensions && dimensions != head->width)
                dense = &head->sizes[s];
        mp_dense_rows(dense, in, dense->in, 1, next, dense->out);
        float *t = in;
        in = next;
        next = t;
    }
    memcpy(out, in, (size_t)dimensions * sizeof *out);
    if (normalize)
        mp_scale_to_length_1(out, dimensions);
}
