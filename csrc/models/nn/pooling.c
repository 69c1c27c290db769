#include "models/nn/pooling.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const mode_names[MP_POOL_COUNT] = {"cls",           "max",          "mean",
                                                      "mean_sqrt_len", "weightedmean", "lasttoken"};
static const char mode_list[] = "cls, max, mean, mean_sqrt_len, weightedmean, lasttoken";

static const struct {
    const char *name;
    mp_act act;
} acts[] = {{"identity", MP_ACT_NONE},       {"tanh", MP_ACT_TANH}, {"gelu", MP_ACT_GELU},
            {"gelu_tanh", MP_ACT_GELU_TANH}, {"relu", MP_ACT_RELU}, {"silu", MP_ACT_SILU},
            {"sigmoid", MP_ACT_SIGMOID}};

static mp_status read_modes(mp_head *head, const mp_spec *spec, mp_error *error) {
    const mp_value *value = mp_spec_find(spec, "mpool.pooling");
    if (!value) {
        head->modes = 1;
        head->mode[0] = MP_POOL_MEAN;
        return MP_OK;
    }
    if (value->type != MP_VALUE_STRINGS || value->count < 1 || value->count > MP_POOL_COUNT)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.pooling", "a list of 1 to 6 names", "%s",
                            "something else");
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

static mp_status read_norm(mp_dense *dense, mp_builder *builder, int index, mp_error *error) {
    char name[64];
    double eps;
    snprintf(name, sizeof name, "dense.%d.norm.weight", index);
    if (!mp_weights_has(builder->weights, name))
        return MP_OK;
    MP_TRY(mp_builder_vector(builder, &dense->norm, name, dense->out, error));
    snprintf(name, sizeof name, "dense.%d.norm.bias", index);
    if (mp_weights_has(builder->weights, name))
        MP_TRY(mp_builder_vector(builder, &dense->norm_bias, name, dense->out, error));
    snprintf(name, sizeof name, "mpool.dense.%d.norm_epsilon", index);
    MP_TRY(mp_spec_float(mp_weights_spec(builder->weights), name, 1e-30, 1, NULL, &eps, error));
    dense->eps = (float)eps;
    return MP_OK;
}

/* Reads the dense layers for particular output sizes. Each can replace the head's only dense layer. */
static mp_status read_sizes(mp_head *head, mp_builder *builder, mp_error *error) {
    const mp_spec *spec = mp_weights_spec(builder->weights);
    const mp_value *value = mp_spec_find(spec, "mpool.dense_sizes");
    if (!value)
        return MP_OK;
    if (value->type != MP_VALUE_INTS || value->count > MP_MAX_SIZES || head->dense_count != 1 || head->dense[0].norm)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.dense_sizes",
                            "at most 16 sizes, and exactly one dense layer without a norm", "%s", "something else");
    for (uint64_t i = 0; i < value->count; i++) {
        const int64_t size = value->as.integers[i];
        mp_dense *dense = &head->sizes[head->size_count++];
        char name[64];
        if (size < 1 || size > 65536)
            return mp_fail_file(error, MP_LIMIT, mp_spec_origin(spec), -1, "mpool.dense_sizes", "1 to 65,536", "%lld",
                                (long long)size);
        *dense = (mp_dense){.in = head->pooled, .out = (int32_t)size, .act = head->dense[0].act};
        snprintf(name, sizeof name, "dense.size.%d.weight", (int)size);
        MP_TRY(mp_builder_plain(builder, &dense->weight, name, dense->out, dense->in, error));
        snprintf(name, sizeof name, "dense.size.%d.bias", (int)size);
        if (mp_weights_has(builder->weights, name))
            MP_TRY(mp_builder_vector(builder, &dense->bias, name, dense->out, error));
    }
    return MP_OK;
}

static mp_status read_dense(mp_head *head, mp_builder *builder, mp_error *error) {
    const mp_spec *spec = mp_weights_spec(builder->weights);
    int64_t count, none = 0;
    MP_TRY(mp_spec_int(spec, "mpool.dense_count", 0, MP_MAX_DENSE, &none, &count, error));
    head->width = head->pooled;
    for (int i = 0; i < count; i++) {
        mp_dense *dense = &head->dense[i];
        char name[64], key[64];
        snprintf(name, sizeof name, "dense.%d.weight", i);
        snprintf(key, sizeof key, "mpool.dense.%d.activation", i);
        mp_tensor tensor;
        int64_t any[2] = {-1, head->width};
        MP_TRY(mp_weights_get(builder->weights, name, 2, any, &tensor, error));
        if (tensor.shape[0] > 65536)
            return mp_fail_file(error, MP_LIMIT, mp_spec_origin(spec), -1, name, "at most 65,536 outputs", "%lld",
                                (long long)tensor.shape[0]);
        const char *act;
        MP_TRY(mp_spec_string(spec, key, "identity", &act, error));
        size_t a = 0;
        while (a < sizeof acts / sizeof *acts && strcmp(acts[a].name, act) != 0)
            a++;
        if (a == sizeof acts / sizeof *acts)
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, key,
                                "identity, tanh, gelu, gelu_tanh, relu, silu, sigmoid", "%s", act);
        *dense = (mp_dense){.in = head->width, .out = (int32_t)tensor.shape[0], .act = acts[a].act};
        MP_TRY(mp_builder_plain(builder, &dense->weight, name, dense->out, dense->in, error));
        snprintf(name, sizeof name, "dense.%d.bias", i);
        if (mp_weights_has(builder->weights, name))
            MP_TRY(mp_builder_vector(builder, &dense->bias, name, dense->out, error));
        snprintf(name, sizeof name, "dense.%d.minus", i);
        if (mp_weights_has(builder->weights, name))
            MP_TRY(mp_builder_plain(builder, &dense->minus, name, dense->out, dense->in, error));
        MP_TRY(read_norm(dense, builder, i, error));
        head->width = dense->out;
        head->dense_count++;
    }
    return MP_OK;
}

mp_status mp_head_init(mp_head *head, mp_builder *builder, int32_t hidden, mp_error *error) {
    const mp_spec *spec = mp_weights_spec(builder->weights);
    *head = (mp_head){.hidden = hidden};
    bool normalize_default = true;
    MP_TRY(read_modes(head, spec, error));
    head->pooled = hidden * head->modes;
    MP_TRY(read_dense(head, builder, error));
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

mp_row_span mp_head_reads(const mp_head *head, int32_t n) {
    if (head->modes == 1 && head->mode[0] == MP_POOL_CLS)
        return (mp_row_span){.row0 = 0, .rows = 1};
    if (head->modes == 1 && head->mode[0] == MP_POOL_LAST_TOKEN)
        return (mp_row_span){.row0 = n - 1, .rows = 1};
    return (mp_row_span){.row0 = 0, .rows = n};
}

size_t mp_head_scratch(const mp_head *head) {
    size_t widest = (size_t)head->pooled;
    for (int i = 0; i < head->dense_count; i++)
        if ((size_t)head->dense[i].out > widest)
            widest = (size_t)head->dense[i].out;
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
        memcpy(out, tokens, (size_t)d * sizeof *out);
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

/* y -= minus x, one output at a time. */
static void subtract_minus(const mp_dense *dense, const float *x, float *y) {
    for (int i = 0; i < dense->out; i++) {
        float less;
        mp_gemm_f32_plain(1, 1, dense->in, x, dense->in, dense->minus + (int64_t)i * dense->in, dense->in, &less, 1);
        y[i] -= less;
    }
}

void mp_head_apply(const mp_head *head, const float *tokens, int n, int skip, int dimensions, bool normalize,
                   float *scratch, float *out) {
    const mp_kernels *call = mp_kernels_get();
    float *in = scratch, *next = scratch + mp_head_scratch(head) / 2;
    for (int i = 0; i < head->modes; i++)
        pool_one(head->mode[i], tokens, n, skip, head->hidden, in + (size_t)i * (size_t)head->hidden);
    for (int i = 0; i < head->dense_count; i++) {
        const mp_dense *dense = &head->dense[i];
        for (int s = 0; s < head->size_count; s++)
            if (head->sizes[s].out == dimensions && dimensions != head->width)
                dense = &head->sizes[s];
        mp_gemm_f32_plain(1, dense->out, dense->in, in, dense->in, dense->weight, dense->in, next, dense->out);
        if (dense->minus)
            subtract_minus(dense, in, next);
        if (dense->bias)
            call->add(dense->bias, dense->out, next);
        call->activate(dense->act, dense->out, next);
        if (dense->norm)
            call->layer_norm(next, dense->norm, dense->norm_bias, dense->eps, dense->out, next);
        float *t = in;
        in = next;
        next = t;
    }
    memcpy(out, in, (size_t)dimensions * sizeof *out);
    if (normalize) {
        /* as torch.nn.functional.normalize, which divides by max(norm, 1e-12) */
        float norm = sqrtf(call->dot(out, out, dimensions));
        norm = norm > 1e-12f || norm != norm ? norm : 1e-12f;
        for (int i = 0; i < dimensions; i++)
            out[i] /= norm;
    }
}
