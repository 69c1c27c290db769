/* decoder/balance.c: factors that bring the components of a key to one scale before they are stored in bytes.
 *
 * The bytes of a group share one scale, so a component k_i is stored with an error in proportion to the largest of all
 * components, and the product with a query has this error times q_i. Dividing k_i by s_i and multiplying q_i by s_i
 * keeps the product. By the inequality of Cauchy and Schwarz, the error of the product is least for
 * s_i = sqrt(|k_i| / |q_i|), with the usual sizes of the components in k_i and q_i. The rotary embedding mixes two
 * components, which therefore share a factor.
 *
 * The sizes come from the norms of queries and keys where the model has them, otherwise from the biases and a few rows
 * of both projections: the keys of Qwen2.5 have components with biases of 15 to 500 times the median. */
#include <math.h>

#include "models/decoder/load.h"
#include "models/decoder/pass.h"

enum {
    SAMPLES = 4, /* rows of a head's projection that are read */
    MAX = 1024   /* limit of the factors and of their inverses: hostile weights must not make finite keys infinite */
};

/* Returns the component that the rotary embedding turns together with component i of a head; i itself if it is not
 * rotated. */
static int partner(const mp_decoder *model, const mp_paged_attention *attention, int i) {
    const mp_rope *rope = &model->rope[0];
    const int at = i - model->rotated_from;
    if (attention->rope < 0 || at < 0 || at >= rope->dim)
        return i;
    return model->rotated_from + (rope->neox ? (at + rope->dim / 2) % rope->dim : at ^ 1);
}

/* Returns the mean square of the outputs of rows [first, first + rows) of a part of the projection, without the bias.
 * The inputs are as the sublayer's norm leaves them: of mean square 1, times its weights `norm`. Reads a few of the
 * rows. */
static double output_square(const mp_linear *qkv, const float *norm, int part, int first, int rows, float *row) {
    const mp_wmat *w = &qkv->w[part];
    double sum = 0;
    for (int i = 0; i < SAMPLES; i++) {
        const int n = first + i * rows / SAMPLES;
        mp_linear_row(qkv, part, n, row);
        for (int k = 0; k < w->K; k++) {
            const float x = norm ? row[k] * norm[k] : row[k];
            sum += (double)(x * x);
        }
    }
    return sum / SAMPLES;
}

/* Writes the squared sizes of the components of a head, mean over `heads` heads and over the two components of a
 * rotary pair. vectors: [heads, head_dim] biases or weights of norms, `stride` apart. */
static void measure(const mp_decoder *model, const mp_paged_attention *attention, const float *vectors, int heads,
                    int stride, float *squares) {
    for (int i = 0; i < model->head_dim; i++) {
        float sum = 0;
        for (int h = 0; h < heads; h++) {
            const float x = vectors[h * stride + i], y = vectors[h * stride + partner(model, attention, i)];
            sum += x * x + y * y;
        }
        squares[i] = sum / (float)(2 * heads);
    }
}

/* Writes the factors of one KV head and of its query heads. row: [hidden] scratch. */
static void balance_head(const mp_decoder *model, const mp_paged_attention *attention, const float *norm, int head,
                         float *row, float *factors) {
    const int d = model->head_dim, group = model->heads / model->kv_heads;
    double q_rest = 0, k_rest = 0; /* squared sizes without the biases */
    float q[MP_HEAD_MAX], k[MP_HEAD_MAX];
    if (attention->k_norm.weight) {
        measure(model, attention, attention->q_norm.weight, 1, 0, q);
        measure(model, attention, attention->k_norm.weight, 1, 0, k);
    } else {
        const mp_linear *qkv = &attention->qkv;
        measure(model, attention, qkv->bias + head * group * d, group, d, q);
        measure(model, attention, qkv->bias + (model->heads + head) * d, 1, 0, k);
        q_rest = output_square(qkv, norm, 0, head * group * d, group * d, row);
        k_rest = output_square(qkv, norm, 1, head * d, d, row);
    }
    for (int i = 0; i < d; i++) {
        const float factor = sqrtf(sqrtf((k[i] + (float)k_rest) / (q[i] + (float)q_rest)));
        /* NaN, from sizes of 0 or infinity, fails the comparison */
        factors[i] = factor >= 1.0f / MAX && factor <= MAX ? factor : 1;
    }
}

/* Returns true if a mixer has factors. Without biases and norms, all components of a head would have the same factor,
 * which changes no ratio to the largest of them. */
static bool has_factors(const mp_mixer *mixer) {
    return mixer->ops->balances && (mixer->attention.qkv.bias || mixer->attention.k_norm.weight);
}

mp_status mp_decoder_balance(mp_decoder *model, mp_error *error) {
    const size_t per_mixer = (size_t)model->kv_heads * (size_t)model->head_dim;
    size_t mixers = 0; /* with factors */
    mp_mixer *mixer;
    mp_sublayer *sub;
    for (int i = 0; i < model->layer_count; i++)
        for (int m = 0; (mixer = mp_layer_mixer(&model->layers[i], m, NULL)); m++)
            mixers += has_factors(mixer);
    if (mixers == 0)
        return MP_OK;
    model->balance = mp_alloc_array(mixers * per_mixer, sizeof *model->balance, MP_TAG_WEIGHTS);
    if (!model->balance)
        return mp_fail_memory(error, (uint64_t)mixers * per_mixer * sizeof *model->balance, "the factors of keys");
    float *row = mp_alloc_array((size_t)model->hidden, sizeof *row, MP_TAG_SCRATCH), *factors = model->balance;
    if (!row)
        return mp_fail_memory(error, (uint64_t)model->hidden * sizeof *row, "a row of weights");
    for (int i = 0; i < model->layer_count; i++)
        for (int m = 0; (mixer = mp_layer_mixer(&model->layers[i], m, &sub)); m++) {
            if (!has_factors(mixer))
                continue;
            mixer->attention.balance = factors;
            for (int head = 0; head < model->kv_heads; head++, factors += model->head_dim)
                balance_head(model, &mixer->attention, sub->norm.weight, head, row, factors);
        }
    mp_free(row);
    return MP_OK;
}
