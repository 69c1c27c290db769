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
    const mp_rope *rope = attention->rope < 0 ? NULL : &model->rope[attention->rope];
    const int from = attention->shape->rotated_from, at = i - from;
    if (!rope || at < 0 || at >= rope->dim)
        return i;
    return from + (rope->neox ? (at + rope->dim / 2) % rope->dim : at ^ 1);
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
    for (int i = 0; i < attention->shape->head_dim; i++) {
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
    const mp_attention_shape *shape = attention->shape;
    const int d = shape->head_dim, group = shape->heads / shape->kv_heads;
    double q_rest = 0, k_rest = 0; /* squared sizes without the biases */
    float q[MP_HEAD_MAX], k[MP_HEAD_MAX];
    if (attention->k_norm.weight) {
        const mp_norm *q_norm = &attention->q_norm, *k_norm = &attention->k_norm;
        const int q_wide = q_norm->n > d ? d : 0, k_wide = k_norm->n > d ? d : 0; /* norms of all heads together */
        measure(model, attention, q_norm->weight + head * group * q_wide, q_wide ? group : 1, q_wide, q);
        measure(model, attention, k_norm->weight + head * k_wide, 1, 0, k);
    } else {
        const mp_linear *qkv = &attention->qkv;
        const int step = shape->query_step;
        measure(model, attention, qkv->bias + head * group * step, group, step, q);
        measure(model, attention, qkv->bias + shape->heads * step + head * d, 1, 0, k);
        q_rest = output_square(qkv, norm, 0, head * group * step, group * step, row);
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
    return mixer->ops->balances && !mixer->attention.reads_only &&
           (mixer->attention.qkv.bias || mixer->attention.k_norm.weight);
}

static size_t factors_of(const mp_paged_attention *attention) {
    return (size_t)attention->shape->kv_heads * (size_t)attention->shape->head_dim;
}

/* Gives a mixer that only reads keys the factors of the mixer that stores them. */
static void share_factors(mp_decoder *model, mp_paged_attention *reader) {
    const mp_mixer *mixer;
    for (int i = 0; i < model->layer_count; i++)
        for (int m = 0; (mixer = mp_layer_mixer(&model->layers[i], m, NULL)); m++)
            if (!mixer->attention.reads_only && mixer->attention.store == reader->store)
                reader->balance = mixer->attention.balance;
}

mp_status mp_decoder_balance(mp_decoder *model, mp_error *error) {
    size_t count = 0; /* factors of all mixers */
    mp_mixer *mixer;
    mp_sublayer *sub;
    for (int i = 0; i < model->layer_count; i++)
        for (int m = 0; (mixer = mp_layer_mixer(&model->layers[i], m, NULL)); m++)
            count += has_factors(mixer) ? factors_of(&mixer->attention) : 0;
    if (count == 0)
        return MP_OK;
    model->balance = mp_alloc_array(count, sizeof *model->balance, MP_TAG_WEIGHTS);
    if (!model->balance)
        return mp_fail_memory(error, (uint64_t)count * sizeof *model->balance, "the factors of keys");
    float *row = mp_alloc_array((size_t)model->hidden, sizeof *row, MP_TAG_SCRATCH), *factors = model->balance;
    if (!row)
        return mp_fail_memory(error, (uint64_t)model->hidden * sizeof *row, "a row of weights");
    for (int i = 0; i < model->layer_count; i++)
        for (int m = 0; (mixer = mp_layer_mixer(&model->layers[i], m, &sub)); m++) {
            if (!has_factors(mixer))
                continue;
            mixer->attention.balance = factors;
            for (int head = 0; head < mixer->attention.shape->kv_heads; head++) {
                balance_head(model, &mixer->attention, sub->norm.weight, head, row, factors);
                factors += mixer->attention.shape->head_dim;
            }
        }
    mp_free(row);
    for (int i = 0; i < model->layer_count; i++)
        for (int m = 0; (mixer = mp_layer_mixer(&model->layers[i], m, NULL)); m++)
            if (mixer->attention.reads_only)
                share_factors(model, &mixer->attention);
    return MP_OK;
}
