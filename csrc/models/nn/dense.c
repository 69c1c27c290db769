#include "models/nn/dense.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    mp_act act;
} acts[] = {{"identity", MP_ACT_NONE},       {"tanh", MP_ACT_TANH}, {"gelu", MP_ACT_GELU},
            {"gelu_tanh", MP_ACT_GELU_TANH}, {"relu", MP_ACT_RELU}, {"silu", MP_ACT_SILU},
            {"sigmoid", MP_ACT_SIGMOID}};

static mp_status read_norm(mp_dense *dense, const mp_builder *builder, const char *chain, int index, mp_error *error) {
    char name[64];
    double eps;
    snprintf(name, sizeof name, "%s.%d.norm.weight", chain, index);
    if (!mp_weights_has(builder->weights, name))
        return MP_OK;
    MP_TRY(mp_builder_vector(builder, &dense->norm, name, dense->out, error));
    snprintf(name, sizeof name, "%s.%d.norm.bias", chain, index);
    if (mp_weights_has(builder->weights, name))
        MP_TRY(mp_builder_vector(builder, &dense->norm_bias, name, dense->out, error));
    snprintf(name, sizeof name, "mpool.%s.%d.norm_epsilon", chain, index);
    MP_TRY(mp_spec_float(mp_weights_spec(builder->weights), name, 1e-30, 1, NULL, &eps, error));
    dense->eps = (float)eps;
    return MP_OK;
}

static mp_status read_activation(mp_dense *dense, const mp_spec *spec, const char *key, mp_error *error) {
    const char *name;
    MP_TRY(mp_spec_string(spec, key, "identity", &name, error));
    dense->leaky = strcmp(name, "leaky_relu") == 0;
    if (dense->leaky)
        return MP_OK;
    for (size_t a = 0; a < sizeof acts / sizeof *acts; a++)
        if (strcmp(acts[a].name, name) == 0) {
            dense->act = acts[a].act;
            return MP_OK;
        }
    return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, key,
                        "identity, tanh, gelu, gelu_tanh, relu, leaky_relu, silu, sigmoid", "%s", name);
}

static mp_status read_residual(mp_dense *dense, const mp_builder *builder, const char *chain, int index,
                               mp_error *error) {
    char name[64];
    const bool none = false;
    snprintf(name, sizeof name, "mpool.%s.%d.adds_input", chain, index);
    MP_TRY(mp_spec_bool(mp_weights_spec(builder->weights), name, &none, &dense->adds_input, error));
    snprintf(name, sizeof name, "%s.%d.residual", chain, index);
    if (dense->adds_input && dense->in != dense->out)
        MP_TRY(mp_builder_plain(builder, &dense->residual, name, dense->out, dense->in, error));
    return MP_OK;
}

mp_status mp_dense_chain_init(mp_dense_chain *chain, const mp_builder *builder, const char *of, int32_t in,
                              mp_error *error) {
    const mp_spec *spec = mp_weights_spec(builder->weights);
    char name[64], key[64];
    int64_t count, none = 0;
    snprintf(key, sizeof key, "mpool.%s_count", of);
    MP_TRY(mp_spec_int(spec, key, 0, MP_MAX_DENSE, &none, &count, error));
    *chain = (mp_dense_chain){.in = in, .out = in};
    for (int i = 0; i < count; i++) {
        mp_dense *dense = &chain->dense[i];
        snprintf(name, sizeof name, "%s.%d.weight", of, i);
        snprintf(key, sizeof key, "mpool.%s.%d.activation", of, i);
        mp_tensor tensor;
        int64_t any[2] = {-1, chain->out};
        MP_TRY(mp_weights_get(builder->weights, name, 2, any, &tensor, error));
        if (tensor.shape[0] > 65536)
            return mp_fail_file(error, MP_LIMIT, mp_spec_origin(spec), -1, name, "at most 65,536 outputs", "%lld",
                                (long long)tensor.shape[0]);
        *dense = (mp_dense){.in = chain->out, .out = (int32_t)tensor.shape[0]};
        MP_TRY(read_activation(dense, spec, key, error));
        MP_TRY(mp_builder_plain(builder, &dense->weight, name, dense->out, dense->in, error));
        snprintf(name, sizeof name, "%s.%d.bias", of, i);
        if (mp_weights_has(builder->weights, name))
            MP_TRY(mp_builder_vector(builder, &dense->bias, name, dense->out, error));
        snprintf(name, sizeof name, "%s.%d.minus", of, i);
        if (mp_weights_has(builder->weights, name))
            MP_TRY(mp_builder_plain(builder, &dense->minus, name, dense->out, dense->in, error));
        MP_TRY(read_residual(dense, builder, of, i, error));
        MP_TRY(read_norm(dense, builder, of, i, error));
        chain->out = dense->out;
        chain->count++;
    }
    return MP_OK;
}

/* Subtract the product of `minus` and x from y, one output at a time. */
static void subtract_minus(const mp_dense *dense, const float *x, float *y) {
    for (int i = 0; i < dense->out; i++) {
        float less;
        mp_gemm_f32_plain(1, 1, dense->in, x, dense->in, dense->minus + (int64_t)i * dense->in, dense->in, &less, 1);
        y[i] -= less;
    }
}

static void leak(int32_t n, float *row) {
    for (int32_t i = 0; i < n; i++)
        row[i] = row[i] > 0 ? row[i] : 0.01f * row[i];
}

/* Adds the input x, or its product with `residual`, to y, one output at a time. */
static void add_input(const mp_dense *dense, const float *x, float *y) {
    for (int i = 0; i < dense->out; i++) {
        float more = x[dense->residual ? 0 : i];
        if (dense->residual)
            mp_gemm_f32_plain(1, 1, dense->in, x, dense->in, dense->residual + (int64_t)i * dense->in, dense->in, &more,
                              1);
        y[i] += more;
    }
}

void mp_dense_rows(const mp_dense *dense, const float *x, int64_t ldx, int M, float *y, int64_t ldy) {
    const mp_kernels *call = mp_kernels_get();
    mp_gemm_f32_plain(M, dense->out, dense->in, x, ldx, dense->weight, dense->in, y, ldy);
    for (int m = 0; m < M; m++) {
        float *row = y + m * ldy;
        if (dense->minus)
            subtract_minus(dense, x + m * ldx, row);
        if (dense->bias)
            call->add(dense->bias, dense->out, row);
        call->activate(dense->act, dense->out, row);
        if (dense->leaky)
            leak(dense->out, row);
        if (dense->adds_input)
            add_input(dense, x + m * ldx, row);
        if (dense->norm)
            call->layer_norm(row, dense->norm, dense->norm_bias, dense->eps, dense->out, row);
    }
}

/* Outputs of the widest layer before the last one. */
static size_t widest_inside(const mp_dense_chain *chain) {
    size_t widest = 0;
    for (int i = 0; i + 1 < chain->count; i++)
        widest = (size_t)chain->dense[i].out > widest ? (size_t)chain->dense[i].out : widest;
    return (widest + 15) & ~(size_t)15;
}

size_t mp_dense_chain_scratch(const mp_dense_chain *chain) { return 2 * MP_DENSE_ROWS * widest_inside(chain); }

void mp_dense_chain_rows(const mp_dense_chain *chain, const float *x, int M, float *scratch, float *y) {
    if (chain->count == 0)
        memcpy(y, x, (size_t)M * (size_t)chain->in * sizeof *y);
    for (int row = 0; row < M && chain->count > 0; row += MP_DENSE_ROWS) {
        const int rows = M - row < MP_DENSE_ROWS ? M - row : MP_DENSE_ROWS;
        const float *in = x + (int64_t)row * chain->in;
        for (int i = 0; i < chain->count; i++) {
            float *out = i + 1 == chain->count ? y + (int64_t)row * chain->out
                                               : scratch + (size_t)(i % 2) * MP_DENSE_ROWS * widest_inside(chain);
            mp_dense_rows(&chain->dense[i], in, chain->dense[i].in, rows, out, chain->dense[i].out);
            in = out;
        }
    }
}

void mp_scale_to_length_1(float *x, int64_t n) {
    float length = sqrtf(mp_kernels_get()->dot(x, x, n));
    length = length > 1e-12f || length != length ? length : 1e-12f;
    for (int64_t i = 0; i < n; i++)
        x[i] /= length;
}
