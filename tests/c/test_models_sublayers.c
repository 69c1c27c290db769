/* Layers of other compositions than a mixer and then a feed-forward network: two mixers side by side, a mixer and a
 * network from one norm, layers without a mixer or without a network; attention with different heads, widths and
 * windows, and with shared keys and values. Some tests recompose a loaded model, because no file can describe all of
 * them; the others read files. Logits are compared with a float64 reference. */
#include "missing_fixture.h"
#include "stores_fixture.h"

enum { PROMPT = 85, ANSWER = 3 };

/* ---- reference --------------------------------------------------------------------------------------------------- */

/* For all rows of the prompt: y [N] = part of a linear layer times x, `ldx` and `ldy` values apart. */
static void multiply(const mp_linear *linear, int part, const double *x, int ldx, double *y, int ldy) {
    const mp_wmat *w = &linear->w[part];
    float row[TINY_FFN];
    for (int n = 0; n < w->N; n++) {
        mp_wmat_row(w, n, row);
        for (int t = 0; t < PROMPT; t++) {
            double sum = 0;
            for (int k = 0; k < w->K; k++)
                sum += (double)row[k] * x[t * ldx + k];
            y[t * ldy + n] = sum;
        }
    }
}

static void add(double out[][TINY_HIDDEN], double sum[][TINY_HIDDEN]) {
    for (int t = 0; t < PROMPT; t++)
        for (int i = 0; i < TINY_HIDDEN; i++)
            sum[t][i] += out[t][i];
}

static void norm(const mp_norm *weights, const double *x, double *y) {
    double squares = 0, mean = 0;
    for (int i = 0; i < TINY_HIDDEN && !weights->root; i++)
        mean += x[i] / TINY_HIDDEN;
    for (int i = 0; i < TINY_HIDDEN; i++)
        squares += (x[i] - mean) * (x[i] - mean);
    for (int i = 0; i < TINY_HIDDEN; i++)
        y[i] = (x[i] - mean) / sqrt(squares / TINY_HIDDEN + (double)weights->eps) * (double)weights->weight[i] +
               (weights->bias ? (double)weights->bias[i] : 0);
}

static void rotate(const mp_rope *rope, int position, double *head) {
    for (int i = 0; i < rope->dim / 2; i++) {
        const double angle = position * rope->inverse[i], a = head[2 * i], b = head[2 * i + 1];
        head[2 * i] = a * cos(angle) - b * sin(angle);
        head[2 * i + 1] = a * sin(angle) + b * cos(angle);
    }
}

typedef struct kept { /* keys and values of a store */
    double k[PROMPT][TINY_HIDDEN], v[PROMPT][TINY_HIDDEN];
} kept;

/* sum [PROMPT, hidden] += attention(in). */
static void attend(const mp_decoder *model, const mp_mixer *mixer, double in[][TINY_HIDDEN],
                   double sum[][TINY_HIDDEN]) {
    static kept stores[TINY_LAYERS];
    static double q[PROMPT][TINY_HIDDEN], mixed[PROMPT][TINY_HIDDEN], out[PROMPT][TINY_HIDDEN];
    const mp_paged_attention *attention = &mixer->attention;
    const mp_attention_shape *shape = attention->shape;
    const int d = shape->head_dim;
    kept *store = &stores[attention->store];
    multiply(&attention->qkv, 0, in[0], TINY_HIDDEN, q[0], TINY_HIDDEN);
    if (!attention->reads_only) {
        multiply(&attention->qkv, 1, in[0], TINY_HIDDEN, store->k[0], TINY_HIDDEN);
        multiply(&attention->qkv, 2, in[0], TINY_HIDDEN, store->v[0], TINY_HIDDEN);
    }
    memset(mixed, 0, sizeof mixed);
    for (int t = 0; t < PROMPT; t++) {
        const int from = attention->window > 0 && t >= attention->window ? t - attention->window + 1 : 0;
        for (int h = 0; h < shape->kv_heads && !attention->reads_only; h++)
            rotate(&model->rope[0], t, store->k[t] + h * d);
        for (int h = 0; h < shape->heads; h++) {
            const int kv = h * shape->kv_heads / shape->heads * d;
            double scores[PROMPT], total = 0;
            rotate(&model->rope[0], t, q[t] + h * d);
            for (int s = from; s <= t; s++) {
                double dot = 0;
                for (int i = 0; i < d; i++)
                    dot += q[t][h * d + i] * store->k[s][kv + i];
                total += scores[s] = exp(dot * (double)shape->scale);
            }
            for (int s = from; s <= t; s++)
                for (int i = 0; i < d; i++)
                    mixed[t][h * d + i] += scores[s] / total * store->v[s][kv + i];
        }
    }
    multiply(&mixer->out, 0, mixed[0], TINY_HIDDEN, out[0], TINY_HIDDEN);
    add(out, sum);
}

/* sum [PROMPT, hidden] += short convolution(in). */
static void convolve(const mp_mixer *mixer, double in[][TINY_HIDDEN], double sum[][TINY_HIDDEN]) {
    static double bcx[PROMPT][3 * TINY_HIDDEN], y[PROMPT][TINY_HIDDEN], out[PROMPT][TINY_HIDDEN];
    const mp_causal_conv *conv = &mixer->recurrent.conv;
    multiply(&mixer->recurrent.in, 0, in[0], TINY_HIDDEN, bcx[0], 3 * TINY_HIDDEN);
    for (int t = 0; t < PROMPT; t++)
        for (int i = 0; i < TINY_HIDDEN; i++) {
            double taps = 0;
            for (int j = 0; j < conv->taps && j <= t; j++)
                taps += (double)conv->kernel[(conv->taps - 1 - j) * TINY_HIDDEN + i] * bcx[t - j][i] *
                        bcx[t - j][2 * TINY_HIDDEN + i];
            y[t][i] = taps * bcx[t][TINY_HIDDEN + i];
        }
    multiply(&mixer->out, 0, y[0], TINY_HIDDEN, out[0], TINY_HIDDEN);
    add(out, sum);
}

static double silu(double x) { return x / (1 + exp(-x)); }

/* x [n] / the root of the mean square, or / the length, with eps added to the square. */
static void unit(double *x, int n, double eps, bool mean) {
    double square = 0;
    for (int i = 0; i < n; i++)
        square += x[i] * x[i];
    square = sqrt((mean ? square / n : square) + eps);
    for (int i = 0; i < n; i++)
        x[i] /= square;
}

/* sum [PROMPT, hidden] += gated delta net(in). */
static void delta(const mp_mixer *mixer, double in[][TINY_HIDDEN], double sum[][TINY_HIDDEN]) {
    enum { KEYS = TINY_KEYS * TINY_DK, VALUES = TINY_VALUES * TINY_DV, CHANNELS = 2 * KEYS + VALUES };
    static double qkv[PROMPT][CHANNELS], z[PROMPT][VALUES], beta[PROMPT][TINY_VALUES], alpha[PROMPT][TINY_VALUES];
    static double o[PROMPT][VALUES], out[PROMPT][TINY_HIDDEN], S[TINY_VALUES][TINY_DK][TINY_DV];
    const mp_recurrent *own = &mixer->recurrent;
    multiply(&own->in, 0, in[0], TINY_HIDDEN, qkv[0], CHANNELS);
    multiply(&own->in, 1, in[0], TINY_HIDDEN, z[0], VALUES);
    multiply(&own->in, 2, in[0], TINY_HIDDEN, beta[0], TINY_VALUES);
    multiply(&own->in, 3, in[0], TINY_HIDDEN, alpha[0], TINY_VALUES);
    memset(S, 0, sizeof S);
    for (int t = 0; t < PROMPT; t++) {
        double c[CHANNELS] = {0};
        for (int i = 0; i < CHANNELS; i++) {
            for (int j = 0; j < own->conv.taps && j <= t; j++)
                c[i] += (double)own->conv.kernel[(own->conv.taps - 1 - j) * CHANNELS + i] * qkv[t - j][i];
            c[i] = silu(c[i]);
        }
        for (int h = 0; h < 2 * TINY_KEYS; h++)
            unit(c + h * TINY_DK, TINY_DK, 1e-6, false);
        for (int h = 0; h < TINY_VALUES; h++) {
            const int key = own->matrix.tiled ? h % TINY_KEYS : h / (TINY_VALUES / TINY_KEYS);
            const double *q = c + key * TINY_DK, *k = q + KEYS, *v = c + 2 * KEYS + h * TINY_DV;
            const double g = exp((double)own->decay[h] * log1p(exp(alpha[t][h] + (double)own->step_bias[h])));
            for (int j = 0; j < TINY_DV; j++) {
                double a = 0, total = 0;
                for (int i = 0; i < TINY_DK; i++)
                    a += S[h][i][j] * k[i];
                const double u = (v[j] - g * a) / (1 + exp(-beta[t][h]));
                for (int i = 0; i < TINY_DK; i++) {
                    S[h][i][j] = g * S[h][i][j] + k[i] * u;
                    total += S[h][i][j] * q[i] / sqrt(TINY_DK);
                }
                o[t][h * TINY_DV + j] = total;
            }
            unit(o[t] + h * TINY_DV, TINY_DV, (double)own->norm.eps, true);
            for (int j = 0; j < TINY_DV; j++)
                o[t][h * TINY_DV + j] *= (double)own->norm.weight[j] * silu(z[t][h * TINY_DV + j]);
        }
    }
    multiply(&mixer->out, 0, o[0], VALUES, out[0], TINY_HIDDEN);
    add(out, sum);
}

/* sum [PROMPT, hidden] += Mamba-2(in). */
static void selective(const mp_mixer *mixer, double in[][TINY_HIDDEN], double sum[][TINY_HIDDEN]) {
    enum { KEYS = TINY_KEYS * TINY_DK, INNER = TINY_VALUES * TINY_DV, CHANNELS = 2 * KEYS + INNER };
    enum { WIDTH = INNER + CHANNELS + TINY_VALUES, GROUP = INNER / TINY_KEYS };
    static double zx[PROMPT][WIDTH], y[PROMPT][INNER], out[PROMPT][TINY_HIDDEN], S[TINY_VALUES][TINY_DK][TINY_DV];
    const mp_recurrent *own = &mixer->recurrent;
    multiply(&own->in, 0, in[0], TINY_HIDDEN, zx[0], WIDTH);
    memset(S, 0, sizeof S);
    for (int t = 0; t < PROMPT; t++) {
        double c[CHANNELS];
        for (int i = 0; i < CHANNELS; i++) {
            c[i] = (double)own->conv.bias[i];
            for (int j = 0; j < own->conv.taps && j <= t; j++)
                c[i] += (double)own->conv.kernel[(own->conv.taps - 1 - j) * CHANNELS + i] * zx[t - j][INNER + i];
            c[i] = silu(c[i]);
        }
        for (int h = 0; h < TINY_VALUES; h++) {
            const double *b = c + INNER + h / (TINY_VALUES / TINY_KEYS) * TINY_DK;
            double step = log1p(exp(zx[t][INNER + CHANNELS + h] + (double)own->step_bias[h]));
            step = fmin(fmax(step, (double)own->step_low), (double)own->step_high);
            for (int j = 0; j < TINY_DV; j++) {
                double total = (double)own->skip[h] * c[h * TINY_DV + j];
                for (int i = 0; i < TINY_DK; i++) {
                    S[h][i][j] = exp((double)own->decay[h] * step) * S[h][i][j] + b[i] * step * c[h * TINY_DV + j];
                    total += S[h][i][j] * b[KEYS + i];
                }
                y[t][h * TINY_DV + j] = total * (own->norm_then_gate ? 1 : silu(zx[t][h * TINY_DV + j]));
            }
        }
        for (int g = 0; g < TINY_KEYS; g++)
            unit(y[t] + g * GROUP, GROUP, (double)own->norm.eps, true);
        for (int i = 0; i < INNER; i++)
            y[t][i] *= (double)own->norm.weight[i] * (own->norm_then_gate ? silu(zx[t][i]) : 1);
    }
    multiply(&mixer->out, 0, y[0], INNER, out[0], TINY_HIDDEN);
    add(out, sum);
}

static void feed(const mp_ffn *ffn, double in[][TINY_HIDDEN], double sum[][TINY_HIDDEN]) {
    static double gate[PROMPT][TINY_FFN], up[PROMPT][TINY_FFN], out[PROMPT][TINY_HIDDEN];
    multiply(&ffn->mlp.up, 0, in[0], TINY_HIDDEN, gate[0], TINY_FFN);
    if (ffn->mlp.gated)
        multiply(&ffn->mlp.up, 1, in[0], TINY_HIDDEN, up[0], TINY_FFN);
    for (int t = 0; t < PROMPT; t++)
        for (int i = 0; i < TINY_FFN; i++)
            up[t][i] = gate[t][i] / (1 + exp(-gate[t][i])) * (ffn->mlp.gated ? up[t][i] : 1);
    multiply(&ffn->mlp.down, 0, up[0], TINY_FFN, out[0], TINY_HIDDEN);
    add(out, sum);
}

/* Computes the logits [PROMPT, TINY_VOCAB] of the ids. */
static void reference(const mp_decoder *model, const int32_t *ids, double *logits) {
    static double x[PROMPT][TINY_HIDDEN], in[PROMPT][TINY_HIDDEN];
    float row[TINY_HIDDEN];
    for (int t = 0; t < PROMPT; t++) {
        mp_wmat_row(&model->head.w[0], ids[t], row);
        for (int i = 0; i < TINY_HIDDEN; i++)
            x[t][i] = (double)row[i];
    }
    for (int l = 0; l < TINY_LAYERS; l++)
        for (int s = 0; s < model->layers[l].count; s++) {
            const mp_sublayer *sub = &model->layers[l].sublayer[s];
            for (int t = 0; t < PROMPT; t++)
                norm(&sub->norm, x[t], in[t]);
            for (int m = 0; m < sub->mixers; m++)
                if (sub->mixer[m]->ops == &mp_mixer_short_conv)
                    convolve(sub->mixer[m], in, x);
                else if (sub->mixer[m]->ops == &mp_mixer_gated_delta)
                    delta(sub->mixer[m], in, x);
                else if (sub->mixer[m]->ops == &mp_mixer_mamba2)
                    selective(sub->mixer[m], in, x);
                else
                    attend(model, sub->mixer[m], in, x);
            for (int f = 0; f < sub->ffns; f++)
                feed(sub->ffn[f], in, x);
        }
    for (int t = 0; t < PROMPT; t++)
        norm(&model->norm, x[t], in[t]);
    multiply(&model->head, 0, in[0], TINY_HIDDEN, logits, TINY_VOCAB);
}

/* ---- compositions ------------------------------------------------------------------------------------------------ */

/* Returns a sublayer with the given blocks, each an index into the loaded layers; -1: none. It has the norm of the
 * loaded layer `norm_of`. */
static mp_sublayer sublayer(const mp_decoder_layer *loaded, int norm_of, int mixer0, int mixer1, int ffn0, int ffn1) {
    const int mixers[] = {mixer0, mixer1}, ffns[] = {ffn0, ffn1};
    mp_sublayer sub = {.norm = loaded[norm_of].sublayer[0].norm, .scale = 1};
    for (int i = 0; i < 2; i++) {
        if (mixers[i] >= 0)
            sub.mixer[sub.mixers++] = loaded[mixers[i]].sublayer[0].mixer[0];
        if (ffns[i] >= 0)
            sub.ffn[sub.ffns++] = loaded[ffns[i]].sublayer[1].ffn[0];
    }
    return sub;
}

static void compose(mp_decoder *model, bool mixes_last) {
    mp_decoder_layer loaded[TINY_LAYERS];
    memcpy(loaded, model->layers, sizeof loaded);
    memset(model->layers, 0, sizeof loaded);
    if (mixes_last) { /* a network; two mixers side by side; a mixer and networks from one norm */
        model->layers[0] = (mp_decoder_layer){.count = 1, .sublayer = {sublayer(loaded, 0, -1, -1, 0, -1)}};
        model->layers[1] = (mp_decoder_layer){.count = 1, .sublayer = {sublayer(loaded, 1, 0, 1, -1, -1)}};
        model->layers[2] = (mp_decoder_layer){.count = 1, .sublayer = {sublayer(loaded, 2, 2, -1, 1, 2)}};
        model->last_mixed = 2;
    } else { /* two mixers and a network from one norm; a mixer; two networks, one after the other */
        model->layers[0] = (mp_decoder_layer){.count = 1, .sublayer = {sublayer(loaded, 0, 0, 1, 0, -1)}};
        model->layers[1] = (mp_decoder_layer){.count = 1, .sublayer = {sublayer(loaded, 1, 2, -1, -1, -1)}};
        model->layers[2] = (mp_decoder_layer){
            .count = 2, .sublayer = {sublayer(loaded, 2, -1, -1, 1, -1), sublayer(loaded, 0, -1, -1, 2, -1)}};
        model->last_mixed = 1;
    }
}

static void run(tiny_model *tiny, tiny_job *job, const int32_t *prompt, int count, bool want_prompt_logits) {
    const mp_text_args args = {.n_prompt = count,
                               .prompt = prompt,
                               .n_choices = 1,
                               .want_prompt_logits = want_prompt_logits,
                               .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1,
                                            .max_tokens = ANSWER, .logprobs = 2, .ignore_eos = true}};
    tiny_job_make(tiny, job, &args, 0);
    tiny_job_admit(tiny, job);
    tiny_job_finish(tiny, job);
}

static void mix_last(tiny_model *tiny) { compose((mp_decoder *)tiny->model, true); }
static void mix_first(tiny_model *tiny) { compose((mp_decoder *)tiny->model, false); }

/* Compares the logits of a model with the reference. */
static void compare(tiny_model *tiny) {
    static double expected[PROMPT * TINY_VOCAB];
    const mp_decoder *model = (const mp_decoder *)tiny->model;
    int32_t prompt[PROMPT];
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = i * 37 % (TINY_VOCAB - 1);
    reference(model, prompt, expected);
    /* each of a few prompts has other numbers of rows in a pass; only the first also asks for all rows' results */
    for (int count = PROMPT; count > 1; count /= 2) {
        tiny_job all, last;
        run(tiny, &all, prompt, count, true);
        run(tiny, &last, prompt, count, false);
        double most = 0;
        for (int i = 0; i < count * TINY_VOCAB; i++)
            most = fmax(most, fabs((double)all.call->prompt_logits[i] - expected[i]));
        if (most > 1e-3)
            MP_FAIL("logits of %d rows differ by %g", count, most);
        for (int t = 0; t < ANSWER; t++)
            MP_CHECK(memcmp(&all.call->choices[0].tokens[t], &last.call->choices[0].tokens[t],
                            sizeof(mp_token_out)) == 0);
        mp_request_destroy(&all.call->base);
        mp_request_destroy(&last.call->base);
    }
}

static void check(const tiny_kind *kind, void (*recompose)(tiny_model *), int threads) {
    static const mp_dtype types[] = {MP_F32};
    tiny_model tiny;
    tiny_weights = "packed"; /* blocks move: no matrix may be packed later */
    tiny_load(&tiny, tiny_decoder_spec_as(kind, types, 1, 91, -1), MP_COMPUTE_F32, threads);
    tiny_weights = NULL;
    if (recompose)
        recompose(&tiny);
    compare(&tiny);
    tiny_unload(&tiny);
}

static const tiny_kind plain = {.arch = "llama"};

MP_TEST(models_sublayers_any_composition_equals_the_reference) {
    for (int threads = 1; threads <= 2; threads++) {
        check(&plain, mix_first, threads);
        check(&plain, mix_last, threads);
    }
}

MP_TEST(models_sublayers_of_different_stores_equal_the_reference) {
    for (int threads = 1; threads <= 2; threads++)
        check(&plain, tiny_mix_stores, threads);
}

static void tile_heads(tiny_file *file) { tiny_flag(file->spec, "mpool.tiled_heads", true); }

static void limit_steps(tiny_file *file) {
    tiny_float(file->spec, "mpool.step_low", 0.6);
    tiny_float(file->spec, "mpool.step_high", 0.9);
    tiny_flag(file->spec, "mpool.norm_then_gate", true);
}

MP_TEST(models_sublayers_mixers_with_states_equal_the_reference) {
    static const int64_t convolutions[TINY_LAYERS] = {1, 0, 1}, deltas[TINY_LAYERS] = {2, 0, 2};
    static const int64_t mambas[TINY_LAYERS] = {3, 0, 3};
    const tiny_kind kinds[] = {{.arch = "llama", .mixers = convolutions},
                               {.arch = "llama", .mixers = deltas},
                               {.arch = "llama", .mixers = deltas, .more = tile_heads},
                               {.arch = "llama", .mixers = mambas},
                               {.arch = "llama", .mixers = mambas, .more = limit_steps}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        for (int threads = 1; threads <= 2; threads++)
            check(&kinds[i], NULL, threads);
}

/* A file may list the number of KV heads of each layer. */
MP_TEST(models_sublayers_of_different_heads_equal_the_reference) {
    const tiny_kind uneven = {.arch = "llama", .uneven = true};
    for (int threads = 1; threads <= 2; threads++)
        check(&uneven, NULL, threads);
}

/* A sublayer norms the output of one block. Experts add up their outputs in the residual sum, so they have no such
 * norm. */
MP_TEST(models_sublayers_refuse_a_norm_of_experts) {
    static const mp_dtype types[] = {MP_F32};
    mp_budget budget = {.limit = UINT64_MAX};
    mp_error error;
    mp_team *team;
    mp_lease lease;
    mp_loader loader;
    mp_model *model = NULL;
    mp_spec *spec = tiny_decoder_spec_as(&(tiny_kind){.arch = "gemma2", .experts = 5}, types, 1, 92, -1);
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    MP_CHECK_OK(mp_team_create(0, &team, &error), &error);
    mp_team_lease(team, 1, &lease);
    MP_CHECK_OK(mp_model_loader(spec, MP_COMPUTE_F32, &loader, &error), &error);
    MP_CHECK_STATUS(loader.ops->load(loader.self, &lease, &budget, NULL, &model, &error), MP_UNSUPPORTED, &error);
    MP_CHECK_INT(budget.used, 0);
    loader.ops->destroy(loader.self);
    mp_team_return(&lease);
    mp_team_destroy(team);
    mp_spec_unpin(spec);
}

/* Reads a file of each option, and checks the blocks and norms of its layers and its logits. */
MP_TEST(models_sublayers_are_read_as_the_options_say) {
    static const mp_dtype types[] = {MP_F32};
    static const int64_t alone[TINY_LAYERS] = {2, 1, 2};
    static const struct {
        tiny_kind kind;
        int sublayers, mixers[TINY_LAYERS], ffns[TINY_LAYERS]; /* mixers and networks of the first sublayers */
    } kinds[] = {
        {{.arch = "llama", .layer_norms = true}, 2, {1, 1, 1}, {0, 0, 0}},
        {{.arch = "llama", .plain_ffn = true}, 2, {1, 1, 1}, {0, 0, 0}},
        {{.arch = "llama", .one_norm = true}, 1, {1, 1, 1}, {1, 1, 1}},
        {{.arch = "llama", .blocks = alone, .plain_ffn = true}, 1, {0, 1, 0}, {1, 0, 1}},
        {{.arch = "llama", .one_norm = true, .layer_norms = true, .plain_ffn = true}, 1, {1, 1, 1}, {1, 1, 1}},
    };
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        tiny_model tiny;
        tiny_load(&tiny, tiny_decoder_spec_as(&kinds[k].kind, types, 1, 93, -1), MP_COMPUTE_F32, 2);
        const mp_decoder *model = (const mp_decoder *)tiny.model;
        for (int l = 0; l < TINY_LAYERS; l++) {
            const mp_decoder_layer *layer = &model->layers[l];
            MP_CHECK_INT(layer->count, kinds[k].sublayers);
            MP_CHECK_INT(layer->sublayer[0].mixers, kinds[k].mixers[l]);
            MP_CHECK_INT(layer->sublayer[0].ffns, kinds[k].ffns[l]);
            MP_CHECK((layer->sublayer[0].norm.bias != NULL) == kinds[k].kind.layer_norms);
            MP_CHECK(layer->sublayer[0].norm.root != kinds[k].kind.layer_norms);
        }
        MP_CHECK_INT(model->last_mixed, kinds[k].kind.blocks ? 1 : TINY_LAYERS - 1);
        compare(&tiny);
        tiny_unload(&tiny);
    }
}

/* Tensors that the options leave out are refused: a file that has them describes another computation. */
MP_TEST(models_sublayers_refuse_tensors_that_the_options_leave_out) {
    static const mp_dtype types[] = {MP_F32};
    static const char *const keys[] = {"mpool.gated_ffn", "mpool.one_norm", "mpool.layer_blocks"};
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (int i = 0; i < 4; i++) {
        const int64_t blocks[TINY_LAYERS] = {i == 2 ? 1 : 2, 0, 0};
        const tiny_kind kind = {.arch = "llama", .one_norm = i >= 2}; /* without the norm that a lone block lacks */
        mp_spec *base = tiny_decoder_spec_as(&kind, types, 1, 94, -1), *spec = spec_copy(base, -1, 0);
        if (i < 2)
            tiny_flag(spec, keys[i], i == 1);
        else
            tiny_ints(spec, keys[2], blocks, TINY_LAYERS);
        mp_spec_freeze(spec);
        MP_CHECK_STATUS(load_only(spec, MP_COMPUTE_F32, &error), MP_UNSUPPORTED, &error);
        mp_spec_unpin(base);
    }
}
