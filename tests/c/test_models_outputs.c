/* Outputs of encoders beside pooled vectors: hidden states, rows of a head, sparse vectors. Each has the same bits
 * whether its text runs alone or in a batch, with any number of threads, and whatever else the pass computes. */
#include <float.h>

#include "base/options.h"
#include "defaults_fixture.h"
#include "heads_fixture.h"
#include "sizes_fixture.h"

static mp_spec *with_heads(const void *arg) {
    void (*const *more)(tiny_file *) = arg;
    return tiny_encoder_spec_with(false, false, *more);
}

static unsigned asked; /* outputs of the requests of run_outputs */

static mp_outcome run_outputs(tiny_model *tiny, const void *inputs, int first, int count, uint64_t budget_ns,
                              float *out) {
    mp_embedding_request *call = make_outputs(inputs, first, count, asked);
    const mp_outcome outcome = run_call(tiny, &call->base, budget_ns);
    if (outcome == MP_OUTCOME_DONE)
        hash_outputs(call, out);
    mp_request_destroy(&call->base);
    return outcome;
}

static void check_outputs(void (*more)(tiny_file *), mp_compute compute) {
    static texts all;
    static float alone[TEXTS * OUTPUT_HASHES];
    make_texts(&all);
    asked = MP_EMBED_ALL;
    check_groups(&(grouped){TEXTS, OUTPUT_HASHES, compute, with_heads, (const void *)&more, &all, run_outputs,
                            compute_all},
                 alone);
}

MP_TEST_SECONDS(models_outputs_contract_float32, 90) {
    check_outputs(add_vocabulary_head, MP_COMPUTE_F32);
    check_outputs(add_sum_head, MP_COMPUTE_F32);
    check_outputs(add_token_head, MP_COMPUTE_F32);
}
MP_TEST_SECONDS(models_outputs_contract_bfloat16, 60) { check_outputs(add_vocabulary_head, MP_COMPUTE_BF16); }
MP_TEST_SECONDS(models_outputs_contract_int8, 60) { check_outputs(add_vocabulary_head, MP_COMPUTE_I8); }

MP_TEST(models_outputs_late_threads) {
    void (*const heads[])(tiny_file *) = {add_vocabulary_head, add_sum_head, add_token_head};
    static texts all;
    make_texts(&all);
    asked = MP_EMBED_ALL;
    for (int i = 0; i < 3; i++)
        check_late_threads(&(grouped){TEXTS, OUTPUT_HASHES, i ? MP_COMPUTE_F32 : MP_COMPUTE_I8, with_heads, &heads[i],
                                      &all, run_outputs, compute_all},
                           5, 2, UINT64_MAX);
}

/* For each combination of outputs: the sizes that a request gets, as defined, and the scratch, as recorded. */
MP_TEST(models_outputs_sizes) {
    enum { HEADS = 3, T = 2, M = 5000, COUNT = 8, ROWS_MASK = 2 };
    void (*const heads[HEADS])(tiny_file *) = {add_vocabulary_head, add_sum_head, add_token_head};
    static const unsigned masks[COUNT / 2] = {MP_EMBED_POOLED, MP_EMBED_TOKENS, MP_EMBED_ROWS, MP_EMBED_SPARSE};
    static const uint64_t recorded[HEADS][COUNT] = {
        {9120000, 28672, 9120000, 28672, 9120000, 1540096, 10560000, 640000},
        {9120000, 28672, 9120000, 28672, 9120000, 1540096, 10560000, 640000},
        {9120000, 28672, 9120000, 28672, 9120000, 1540096, 9120000, 28672},
    };
    static texts all;
    int wrong = 0;
    make_texts(&all);
    for (int h = 0; h < HEADS; h++) {
        tiny_model tiny;
        mp_error error;
        uint64_t got[COUNT], cost;
        uint32_t total;
        tiny_load(&tiny, tiny_encoder_spec_with(false, false, heads[h]), MP_COMPUTE_F32, 1);
        const mp_encoder *model = (const mp_encoder *)tiny.model;
        mp_encoder large = *model; /* a row head that takes more scratch than attention */
        large.row_head.chain.dense[0].out = 3000;
        MP_CHECK_INT(mp_encoder_outputs(model), MP_EMBED_ALL);
        for (unsigned outputs = 1; outputs <= MP_EMBED_ALL; outputs++) {
            const bool sparse = outputs & MP_EMBED_SPARSE;
            mp_embedding_request *call = make_outputs(&all, 3, T, outputs);
            MP_CHECK_OK(tiny.model->ops->check(tiny.model, &call->base, &cost, &total, &error), &error);
            MP_CHECK_INT(total, T);
            MP_CHECK_INT(call->sizes.width, outputs & MP_EMBED_POOLED ? TINY_WIDTH : 0);
            MP_CHECK_INT(call->sizes.hidden, outputs & MP_EMBED_TOKENS ? TINY_WIDTH : 0);
            MP_CHECK_INT(call->sizes.row_width, outputs & MP_EMBED_ROWS ? ROW_WIDTH : 0);
            MP_CHECK_INT(call->sizes.sparse_most, sparse && h < 2 ? TINY_VOCAB : 0);
            MP_CHECK_INT(call->sizes.vocab, sparse ? TINY_VOCAB : 0);
            mp_request_destroy(&call->base);
        }
        for (int m = 0; m < COUNT / 2; m++) {
            got[2 * m] = mp_encoder_group_scratch(model, M, masks[m]);
            got[2 * m + 1] = mp_encoder_thread_scratch(m == ROWS_MASK ? &large : model, T, M, masks[m]);
        }
        char what[32];
        snprintf(what, sizeof what, "head %d", h);
        wrong += !sizes_are(what, got, recorded[h], COUNT);
        tiny_unload(&tiny);
    }
    MP_CHECK_INT(wrong, 0);
}

/* Requests for different outputs share a step, and each output has the bits that it has alone. */
MP_TEST(models_outputs_do_not_depend_on_the_mask) {
    static texts all;
    static float expected[TEXTS * OUTPUT_HASHES], out[TEXTS * OUTPUT_HASHES];
    enum { SHARE = 9 };
    make_texts(&all);
    for (int threads = 1; threads <= 3; threads++) {
        tiny_model tiny;
        mp_error error;
        tiny_load(&tiny, tiny_encoder_spec_with(false, false, add_vocabulary_head), MP_COMPUTE_F32, threads);
        ((mp_encoder *)tiny.model)->head.mode[0] = MP_POOL_CLS; /* the last layer then skips rows of pooled texts */
        compute_all(&tiny);
        asked = MP_EMBED_ALL;
        MP_CHECK_INT(run_outputs(&tiny, &all, 0, SHARE, UINT64_MAX, expected), MP_OUTCOME_DONE);
        mp_embedding_request *calls[MP_EMBED_ALL];
        mp_item items[MP_EMBED_ALL] = {0};
        mp_outcome outcomes[MP_PLAN_MAX];
        mp_plan plan = {.count = MP_EMBED_ALL};
        for (int i = 0; i < MP_EMBED_ALL; i++) {
            uint64_t cost;
            calls[i] = make_outputs(&all, 0, SHARE, (unsigned)i + 1);
            items[i].request = &calls[i]->base;
            MP_CHECK_OK(tiny.model->ops->check(tiny.model, items[i].request, &cost, &items[i].total, &error), &error);
            MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &items[i], &error), &error);
            plan.items[i] = &items[i];
            plan.amount[i] = SHARE;
        }
        tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
        for (int i = 0; i < MP_EMBED_ALL; i++) {
            MP_CHECK_INT(outcomes[i], MP_OUTCOME_DONE);
            hash_outputs(calls[i], out);
            for (int k = 0; k < SHARE * OUTPUT_HASHES; k++)
                if ((unsigned)(i + 1) >> k % OUTPUT_HASHES / 4 & 1)
                    MP_CHECK(out[k] == expected[k]);
                else
                    MP_CHECK(out[k] == 0);
            tiny.engine->ops->retire(tiny.engine, &items[i]);
            mp_request_destroy(&calls[i]->base);
        }
        tiny_unload(&tiny);
    }
}

/* ---- against the formulas ---------------------------------------------------------------------------------------- */

static void dense_of(const mp_dense *dense, const double *x, double *y) {
    double mean = 0, square = 0;
    for (int i = 0; i < dense->out; i++) {
        y[i] = dense->bias ? (double)dense->bias[i] : 0;
        for (int k = 0; k < dense->in; k++)
            y[i] += x[k] * (double)dense->weight[i * dense->in + k];
        y[i] = dense->act == MP_ACT_TANH   ? tanh(y[i])
               : dense->act == MP_ACT_GELU ? y[i] * 0.5 * erfc(-y[i] * 0.70710678118654752)
               : dense->act == MP_ACT_RELU ? (y[i] > 0 ? y[i] : 0)
                                           : y[i];
        mean += y[i] / dense->out;
    }
    for (int i = 0; i < dense->out; i++)
        square += (y[i] - mean) * (y[i] - mean) / dense->out;
    for (int i = 0; i < dense->out && dense->norm; i++)
        y[i] = (y[i] - mean) / sqrt(square + (double)dense->eps) * (double)dense->norm[i] +
               (double)dense->norm_bias[i];
}

static void chain_of(const mp_dense_chain *chain, const float *x, double *y) {
    double in[TINY_WIDTH];
    for (int i = 0; i < chain->in; i++)
        in[i] = (double)x[i];
    for (int l = 0; l < chain->count; l++) {
        dense_of(&chain->dense[l], in, y);
        memcpy(in, y, (size_t)chain->dense[l].out * sizeof *in);
    }
}

static void check_rows(const mp_row_head *head, const mp_embedding_request *call) {
    for (int64_t r = 0; r < call->n_tokens; r++) {
        double row[TINY_WIDTH], square = 0;
        chain_of(&head->chain, call->states + r * TINY_WIDTH, row);
        for (int i = 0; i < ROW_WIDTH; i++)
            square += row[i] * row[i];
        for (int i = 0; i < ROW_WIDTH; i++)
            MP_CHECK_NEAR(call->rows[r * ROW_WIDTH + i], row[i] / sqrt(square), 1e-5);
    }
}

/* Write the weights of a text in double precision. Returns how many are not 0. */
static int vocabulary_weights(const mp_sparse_head *head, const float *states, int n, double *weights) {
    int count = 0;
    for (int v = 0; v < TINY_VOCAB; v++)
        weights[v] = 0;
    for (int r = 0; r < n; r++) {
        double row[TINY_WIDTH];
        chain_of(&head->chain, states + r * TINY_WIDTH, row);
        for (int v = 0; v < TINY_VOCAB; v++) {
            float w[TINY_WIDTH];
            mp_wmat_row(&head->output.w[0], v, w);
            double logit = (double)head->output.bias[v];
            for (int k = 0; k < TINY_WIDTH; k++)
                logit += row[k] * (double)w[k];
            double weight = logit > 0 ? log1p(logit) : 0;
            weight = head->logs == 2 ? log1p(weight) : weight;
            weights[v] = head->sum ? weights[v] + weight : weight > weights[v] ? weight : weights[v];
        }
    }
    for (int v = 0; v < TINY_VOCAB; v++)
        count += weights[v] > 0;
    return count;
}

static void token_weights(const mp_sparse_head *head, const int32_t *ids, const float *states, int n, double *weights) {
    for (int v = 0; v < TINY_VOCAB; v++)
        weights[v] = 0;
    for (int r = 0; r < n; r++) {
        double weight[TINY_WIDTH];
        chain_of(&head->chain, states + r * TINY_WIDTH, weight);
        if (ids[r] != 0 && ids[r] != 9 && ids[r] != 20 && weight[0] > weights[ids[r]])
            weights[ids[r]] = weight[0];
    }
}

static void check_formula(void (*more)(tiny_file *)) {
    static texts all;
    enum { CHECKED = 6 };
    tiny_model tiny;
    int listed = 0, possible = 0;
    make_texts(&all);
    for (int t = 0; t < CHECKED; t++)
        all.ids[all.offsets[t]] = (int32_t[]){20, 9, 0}[t % 3]; /* get no weight from the token head */
    if (all.offsets[3] - all.offsets[2] > 3)
        all.ids[all.offsets[2] + 3] = all.ids[all.offsets[2] + 1]; /* occurs twice */
    tiny_load(&tiny, tiny_encoder_spec_with(false, false, more), MP_COMPUTE_F32, 1);
    const mp_encoder *model = (const mp_encoder *)tiny.model;
    mp_embedding_request *call = make_outputs(&all, 0, CHECKED, MP_EMBED_ALL);
    mp_error error;
    uint64_t cost;
    uint32_t total;
    MP_CHECK_OK(tiny.model->ops->check(tiny.model, &call->base, &cost, &total, &error), &error);
    for (int64_t i = 0; i < mp_embedding_sparse_at(call, CHECKED); i++)
        call->sparse_ids[i] = TINY_VOCAB / 2; /* the memory of outputs may hold anything, also ids */
    MP_CHECK_INT(run_call(&tiny, &call->base, UINT64_MAX), MP_OUTCOME_DONE);
    check_rows(&model->row_head, call);
    for (int t = 0; t < CHECKED; t++) {
        double weights[TINY_VOCAB];
        const int64_t first = call->offsets[t], at = mp_embedding_sparse_at(call, t);
        const int n = (int)(call->offsets[t + 1] - first);
        const float *states = call->states + first * TINY_WIDTH;
        if (model->sparse_head.kind == MP_SPARSE_VOCABULARY)
            vocabulary_weights(&model->sparse_head, states, n, weights);
        else
            token_weights(&model->sparse_head, call->ids + first, states, n, weights);
        for (int i = 0; i < call->sparse_counts[t]; i++) {
            const int32_t id = call->sparse_ids[at + i];
            MP_CHECK(id >= 0 && id < TINY_VOCAB && (i == 0 || id > call->sparse_ids[at + i - 1]));
            MP_CHECK_NEAR(call->sparse_values[at + i], weights[id], 1e-4);
            weights[id] = 0;
        }
        for (int v = 0; v < TINY_VOCAB; v++)
            MP_CHECK(weights[v] < 1e-5); /* no weight is missing */
        listed += call->sparse_counts[t];
        possible += model->sparse_head.kind == MP_SPARSE_VOCABULARY ? TINY_VOCAB : n;
    }
    MP_CHECK(listed > possible / 50 && listed < possible); /* neither empty nor all */
    mp_request_destroy(&call->base);
    tiny_unload(&tiny);
}

MP_TEST(models_outputs_of_a_vocabulary_head) { check_formula(add_vocabulary_head); }
MP_TEST(models_outputs_of_a_vocabulary_head_with_sums) { check_formula(add_sum_head); }
MP_TEST(models_outputs_of_a_token_head) { check_formula(add_token_head); }

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static unsigned made_outputs;

static mp_status make_call(mp_request **call, mp_error *error) {
    const int32_t ids[12] = {9, 10, 11, 9, 10, 11, 9, 10, 11, 20, 21, 22};
    const int64_t offsets[5] = {0, 3, 6, 9, 12};
    mp_embedding_request *made;
    MP_TRY(make_embedding_request(4, ids, offsets, NULL, &made, error));
    made->outputs = (uint8_t)made_outputs;
    *call = &made->base;
    return MP_OK;
}

static void compare_calls(const mp_request *first, const mp_request *second) {
    float a[4 * OUTPUT_HASHES], b[4 * OUTPUT_HASHES];
    hash_outputs((const mp_embedding_request *)first, a);
    hash_outputs((const mp_embedding_request *)second, b);
    MP_CHECK(memcmp(a, b, sizeof a) == 0 && memcmp(a, a + 2 * OUTPUT_HASHES, sizeof a / 4) == 0);
}

MP_TEST_SECONDS(models_outputs_allocation_sweep, 120) {
    static void (*const heads[])(tiny_file *) = {add_vocabulary_head, add_token_head};
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (int i = 0; i < 2; i++) {
        tiny_life life = {.spec = tiny_encoder_spec_with(false, false, heads[i]), .compute = MP_COMPUTE_I8,
                          .make = make_call, .compare = compare_calls};
        made_outputs = MP_EMBED_ALL;
        mp_test_alloc_sweep(tiny_live, &life);
        mp_spec_unpin(life.spec);
    }
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */

MP_TEST(models_outputs_nan_fails_its_request_only) {
    static texts all;
    static float expected[TEXTS * OUTPUT_HASHES], out[TEXTS * OUTPUT_HASHES];
    make_texts(&all);
    for (int which = 0; which < 2; which++) {
        tiny_model tiny;
        tiny_load(&tiny, tiny_encoder_spec_with(true, false, which ? add_token_head : add_row_head), MP_COMPUTE_F32, 2);
        for (unsigned output = MP_EMBED_POOLED; output <= (which ? MP_EMBED_SPARSE : MP_EMBED_ROWS); output *= 2) {
            asked = output;
            MP_CHECK_INT(run_outputs(&tiny, &all, 0, 8, UINT64_MAX, expected), MP_OUTCOME_DONE);
            const int32_t before = all.ids[all.offsets[3]];
            all.ids[all.offsets[3]] = 7;
            MP_CHECK_INT(run_outputs(&tiny, &all, 0, 8, UINT64_MAX, out), MP_OUTCOME_FAILED);
            all.ids[all.offsets[3]] = before;
            MP_CHECK_INT(run_outputs(&tiny, &all, 0, 8, UINT64_MAX, out), MP_OUTCOME_DONE);
            MP_CHECK(memcmp(out, expected, 8 * OUTPUT_HASHES * sizeof *out) == 0);
        }
        tiny_unload(&tiny);
    }
}

/* The logits of an entry of the vocabulary are NaN in one text: the maximum must not lose them. */
MP_TEST(models_outputs_nan_logits_are_not_lost) {
    static texts all;
    static float out[TEXTS * OUTPUT_HASHES];
    make_texts(&all);
    asked = MP_EMBED_SPARSE;
    for (int sum = 0; sum < 2; sum++) {
        tiny_model tiny;
        tiny_load(&tiny, tiny_encoder_spec_with(false, false, sum ? add_sum_head : add_vocabulary_head),
                  MP_COMPUTE_F32, 1);
        ((mp_encoder *)tiny.model)->sparse_head.output.bias[TINY_VOCAB - 1] = NAN;
        MP_CHECK_INT(run_outputs(&tiny, &all, 0, 3, UINT64_MAX, out), MP_OUTCOME_FAILED);
        tiny_unload(&tiny);
    }
}

static void no_vectors(tiny_file *file) {
    add_token_head(file);
    tiny_flag(file->spec, "mpool.pooled", false);
}

MP_TEST(models_outputs_that_a_model_lacks_are_refused) {
    static const struct {
        void (*more)(tiny_file *);
        unsigned has;
        const char *message; /* part of the message, for the first output that the model lacks */
    } cases[] = {{NULL, 3, "no rows of a head, it has: vectors of texts, hidden states"},
                 {add_row_head, 7, "no sparse vectors, it has: vectors of texts, hidden states, rows of a head"},
                 {add_vocabulary_head, 15, ""},
                 {no_vectors, 14, "no vectors of texts, it has: hidden states, rows of a head, sparse vectors"}};
    static texts all;
    make_texts(&all);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tiny_model tiny;
        bool named = !*cases[i].message;
        tiny_load(&tiny, tiny_encoder_spec_with(false, false, cases[i].more), MP_COMPUTE_F32, 1);
        for (unsigned outputs = 1; outputs <= MP_EMBED_ALL; outputs++) {
            mp_embedding_request *call = make_outputs(&all, 0, 1, outputs);
            mp_error error;
            uint64_t cost;
            uint32_t total;
            const bool lacks = outputs & ~cases[i].has;
            MP_CHECK_STATUS(tiny.model->ops->check(tiny.model, &call->base, &cost, &total, &error),
                            lacks ? MP_UNSUPPORTED : MP_OK, &error);
            named = named || (lacks && strstr(error.message, cases[i].message));
            mp_request_destroy(&call->base);
        }
        MP_CHECK(named);
        tiny_unload(&tiny);
    }
}

/* Only texts that ask for pooled vectors and nothing else share a computation. */
MP_TEST(models_outputs_are_not_shared_between_texts) {
    static texts all;
    static float expected[TEXTS * OUTPUT_HASHES], out[TEXTS * OUTPUT_HASHES];
    make_texts(&all);
    for (int i = 0; i < 3; i++) /* texts 0 to 2 are equal */
        memcpy(all.ids + i * 4, (const int32_t[]){9, 10, 11, 12}, 4 * sizeof(int32_t));
    all.offsets[1] = 4, all.offsets[2] = 8, all.offsets[3] = 12;
    tiny_model tiny;
    tiny_load(&tiny, tiny_encoder_spec_with(false, false, add_vocabulary_head), MP_COMPUTE_F32, 1);
    const mp_dedup_table *dedup = dedup_of(tiny.engine);
    mp_recent *recent = recent_of(tiny.engine);
    recent->keep_ns = UINT64_MAX;
    asked = MP_EMBED_POOLED;
    MP_CHECK_INT(run_outputs(&tiny, &all, 0, 3, UINT64_MAX, expected), MP_OUTCOME_DONE);
    MP_CHECK(dedup->shared == 2 && recent->hits == 0);
    for (asked = MP_EMBED_POOLED; asked <= MP_EMBED_ALL; asked++) {
        MP_CHECK_INT(run_outputs(&tiny, &all, 0, 3, UINT64_MAX, out), MP_OUTCOME_DONE);
        MP_CHECK_INT(dedup->shared, 2);
        MP_CHECK_INT(recent->hits, 3);
        for (int i = 0; i < 4 && asked & MP_EMBED_POOLED; i++)
            MP_CHECK(out[i] == expected[i]);
    }
    tiny_unload(&tiny);
}

/* ---- attention to the first tokens only -------------------------------------------------------------------------- */

/* Compute the hidden states of one text. attended 0: all tokens are attended to. */
static mp_status states_of(tiny_model *tiny, const int32_t *ids, int n, int attended, float *out, mp_error *error) {
    const int64_t offsets[2] = {0, n};
    mp_embedding_request *call;
    uint64_t cost;
    uint32_t total;
    MP_CHECK_OK(mp_embedding_request_create(&(mp_embedding_args){.n_texts = 1, .n_tokens = n, .ids = ids,
                                                                 .offsets = offsets, .normalize = -1,
                                                                 .outputs = MP_EMBED_TOKENS,
                                                                 .attended = attended ? &attended : NULL},
                                            &call, error),
                error);
    mp_status status = tiny->model->ops->check(tiny->model, &call->base, &cost, &total, error);
    if (status == MP_OK) {
        MP_CHECK_INT(run_call(tiny, &call->base, UINT64_MAX), MP_OUTCOME_DONE);
        memcpy(out, call->states, (size_t)n * TINY_WIDTH * sizeof *out);
    }
    mp_request_destroy(&call->base);
    return status;
}

MP_TEST(models_outputs_attend_to_the_first_tokens) {
    enum { N = 30 };
    static int32_t ids[N];
    static float all[N * TINY_WIDTH], some[N * TINY_WIDTH], alone[N * TINY_WIDTH], changed[N * TINY_WIDTH];
    const size_t row = TINY_WIDTH * sizeof(float);
    mp_error error;
    for (int i = 0; i < N; i++)
        ids[i] = 10 + i * 3;
    for (int threads = 1; threads <= 3; threads++) {
        tiny_model tiny;
        tiny_load(&tiny, tiny_encoder_spec(false), MP_COMPUTE_F32, threads);
        MP_CHECK_OK(states_of(&tiny, ids, N, 0, all, &error), &error);
        MP_CHECK_OK(states_of(&tiny, ids, N, N, some, &error), &error);
        MP_CHECK(memcmp(all, some, sizeof all) == 0);
        for (int attended = 1; attended < N; attended += 7) { /* fewer and more rows than keys */
            MP_CHECK_OK(states_of(&tiny, ids, N, attended, some, &error), &error);
            MP_CHECK_OK(states_of(&tiny, ids, attended, 0, alone, &error), &error);
            MP_CHECK(memcmp(some, alone, (size_t)attended * row) == 0); /* as without the other tokens */
            MP_CHECK(memcmp(some + (N - 1) * TINY_WIDTH, all + (N - 1) * TINY_WIDTH, row) != 0);
            ids[N - 1]++; /* only this token attends to it */
            MP_CHECK_OK(states_of(&tiny, ids, N, attended, changed, &error), &error);
            ids[N - 1]--;
            MP_CHECK(memcmp(some, changed, (N - 1) * row) == 0);
            MP_CHECK(memcmp(some + (N - 1) * TINY_WIDTH, changed + (N - 1) * TINY_WIDTH, row) != 0);
            ids[0]++; /* every token attends to it */
            MP_CHECK_OK(states_of(&tiny, ids, N, attended, changed, &error), &error);
            ids[0]--;
            for (int r = 0; r < N; r++)
                MP_CHECK(memcmp(some + r * TINY_WIDTH, changed + r * TINY_WIDTH, row) != 0);
        }
        MP_CHECK_STATUS(states_of(&tiny, ids, N, N + 1, some, &error), MP_INVALID_ARGUMENT, &error);
        MP_CHECK_HAS(error.message, "`attended` of text 0 must be 1 to 30, got 31");
        mp_encoder *model = (mp_encoder *)tiny.model;
        model->layers[1].base.window = 2 * (N - 1);
        MP_CHECK_OK(states_of(&tiny, ids, N, 8, some, &error), &error);
        model->layers[1].base.window = 2 * (N - 1) - 1;
        MP_CHECK_STATUS(states_of(&tiny, ids, N, 8, some, &error), MP_UNSUPPORTED, &error);
        MP_CHECK_HAS(error.message, "text 0 must have at most 29 tokens, because layer 1 has a window, got 30");
        MP_CHECK_OK(states_of(&tiny, ids, N, N, some, &error), &error);
        model->layers[1].base.window = 0;
        model->attention.causal = true;
        MP_CHECK_OK(states_of(&tiny, ids, N, 8, some, &error), &error);
        MP_CHECK_OK(states_of(&tiny, ids, N, 0, all, &error), &error);
        MP_CHECK(memcmp(some, all, 8 * row) == 0);
        MP_CHECK(memcmp(some + 8 * TINY_WIDTH, all + 8 * TINY_WIDTH, row) != 0); /* does not see itself */
        tiny_unload(&tiny);
    }
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

static int bad_case;

static void bad_head(tiny_file *file) {
    static const int64_t outside[] = {5, TINY_VOCAB}, many[65];
    if (bad_case == 3 || bad_case == 4) {
        add_token_head_that_skips(file, bad_case == 3 ? outside : many, bad_case == 3 ? 2 : 65);
        return;
    }
    tiny_string(file->spec, "mpool.sparse", bad_case == 0 ? "words" : bad_case == 5 ? "tokens" : "vocabulary");
    tiny_int(file->spec, "mpool.sparse_logs", bad_case == 1 ? 3 : 1);
    tiny_int(file->spec, "mpool.sparse_count", bad_case == 6 ? 1 : 0);
    if (bad_case == 2)
        tiny_tensor(file, "sparse_output.weight", MP_F32, TINY_VOCAB - 1, TINY_WIDTH, 0.5f, 0);
    tiny_int(file->spec, "mpool.rows_count", bad_case == 7 ? 9 : bad_case == 8 ? 2 : bad_case == 9 ? 1 : 0);
    tiny_tensor(file, "rows.0.weight", MP_F32, ROW_INNER, TINY_WIDTH, 0.3f, 0);
    if (bad_case == 9)
        tiny_string(file->spec, "mpool.rows.0.activation", "softmax");
}

MP_TEST(models_outputs_refuse_wrong_heads) {
    static const char *const fields[] = {"mpool.sparse", "mpool.sparse_logs", "sparse_output.weight",
                                         "mpool.sparse_skipped", "mpool.sparse_skipped", "sparse.weight",
                                         "sparse.0.weight", "mpool.rows_count", "rows.1.weight",
                                         "mpool.rows.0.activation"};
    for (bad_case = 0; bad_case < (int)(sizeof fields / sizeof *fields); bad_case++) {
        mp_error error;
        mp_loader loader;
        mp_team *team;
        mp_lease lease;
        mp_model *model = NULL;
        mp_budget budget = {.limit = UINT64_MAX};
        mp_spec *spec = tiny_encoder_spec_with(false, false, bad_head);
        MP_CHECK_OK(mp_cpu_init("", &error), &error);
        mp_kernels_init();
        MP_CHECK_OK(mp_team_create(0, &team, &error), &error);
        mp_team_lease(team, 1, &lease);
        MP_CHECK_OK(mp_model_loader(spec, MP_COMPUTE_F32, &loader, &error), &error);
        const mp_status status = loader.ops->load(loader.self, &lease, &budget, NULL, &model, &error);
        if ((status != MP_FORMAT && status != MP_LIMIT) || model || !strstr(error.field, fields[bad_case]))
            MP_FAIL("case %d: status %d, field %s, %s", bad_case, status, error.field, error.message);
        MP_CHECK_INT(budget.used, 0);
        loader.ops->destroy(loader.self);
        mp_team_return(&lease);
        mp_team_destroy(team);
        mp_spec_unpin(spec);
    }
}

static uint64_t hash_of_outputs(mp_spec *spec) {
    static texts all;
    float out[2 * OUTPUT_HASHES];
    tiny_model tiny;
    make_texts(&all);
    asked = MP_EMBED_ALL;
    tiny_load(&tiny, spec, MP_COMPUTE_F32, 1);
    MP_CHECK_INT(run_outputs(&tiny, &all, 5, 2, UINT64_MAX, out), MP_OUTCOME_DONE);
    tiny_unload(&tiny);
    return tiny_hash_bytes(1, out, sizeof out);
}

MP_TEST(models_outputs_defaults) {
    MP_RESULTS_ONLY();
    static const optional_key keys[] = {
        {"mpool.rows_normalize", "false", "true"},
        {"mpool.rows.0.activation", "identity", "silu"},
        {"mpool.rows.1.activation", "identity", "sigmoid"},
        {"mpool.sparse.0.activation", "identity", "gelu_tanh"},
        {"mpool.sparse_sum", "false", "true"},
        {"mpool.sparse_logs", "1", "2"},
    };
    static const optional_key skipped[] = {{"mpool.sparse_skipped", NULL, NULL}};
    check_defaults(tiny_encoder_spec_with(false, false, add_sum_head), hash_of_outputs, KEYS(keys));
    check_defaults(tiny_encoder_spec_with(false, false, add_token_head), hash_of_outputs, KEYS(skipped));
}

/* Compute the rows of one text, with the request's choice of normalisation: -1 leaves it to the model. */
static void rows_of(tiny_model *tiny, int normalize, float *out) {
    static const int32_t ids[] = {7, 8, 9};
    static const int64_t offsets[] = {0, 3};
    mp_error error;
    mp_embedding_request *call;
    uint64_t cost;
    uint32_t total;
    MP_CHECK_OK(mp_embedding_request_create(&(mp_embedding_args){.n_texts = 1, .n_tokens = 3, .ids = ids,
                                                                 .offsets = offsets, .normalize = (int8_t)normalize,
                                                                 .outputs = MP_EMBED_ROWS},
                                            &call, &error),
                &error);
    MP_CHECK_OK(tiny->model->ops->check(tiny->model, &call->base, &cost, &total, &error), &error);
    MP_CHECK_INT(run_call(tiny, &call->base, UINT64_MAX), MP_OUTCOME_DONE);
    memcpy(out, call->rows, 3 * ROW_WIDTH * sizeof *out);
    mp_request_destroy(&call->base);
}

/* A request may ask for rows of length 1 or as they are; otherwise the model decides. */
MP_TEST(models_outputs_normalize_rows_as_requested) {
    enum { COUNT = 3 * ROW_WIDTH };
    for (int normalized = 0; normalized < 2; normalized++) {
        const mp_value value = {.type = MP_VALUE_BOOL, .gguf_type = -1, .count = 1, .as.integer = normalized};
        mp_spec *base = tiny_encoder_spec_with(false, false, add_vocabulary_head);
        tiny_model tiny;
        float plain[COUNT], unit[COUNT], usual[COUNT];
        tiny_load(&tiny, spec_with(base, "mpool.rows_normalize", &value), MP_COMPUTE_F32, 1);
        mp_spec_unpin(base);
        rows_of(&tiny, 0, plain);
        rows_of(&tiny, 1, unit);
        rows_of(&tiny, -1, usual);
        MP_CHECK(memcmp(usual, normalized ? unit : plain, sizeof usual) == 0);
        for (int r = 0; r < 3; r++) {
            double square = 0;
            for (int i = 0; i < ROW_WIDTH; i++)
                square += (double)plain[r * ROW_WIDTH + i] * (double)plain[r * ROW_WIDTH + i];
            MP_CHECK(fabs(square - 1) > 1e-3);
            for (int i = 0; i < ROW_WIDTH; i++)
                MP_CHECK_NEAR(unit[r * ROW_WIDTH + i], (double)plain[r * ROW_WIDTH + i] / sqrt(square), 1e-5);
        }
        tiny_unload(&tiny);
    }
}

/* Weights that a pass packed from a changed file stay wrong, so later passes fail, although they read no file. */
MP_TEST(models_outputs_of_corrupted_weights_fail) {
    enum { MAX_STEPS = 100 };
    static texts all;
    tiny_model tiny;
    mp_error error;
    mp_status code = MP_OK;
    make_texts(&all);
    setenv("MPOOL_PACK_ON_USE_MB", "0", 1);
    MP_CHECK_OK(mp_options_init(&error), &error);
    tiny_load(&tiny, tiny_encoder_spec(false), MP_COMPUTE_F32, 1);
    compute_all(&tiny);
    mp_weight_store *store = &((mp_encoder *)tiny.model)->store;
    MP_CHECK(mp_weight_store_unpacked(store));
    tiny_wait_until_fetched(store);
    store->keep_ns = store->keep_row_ns = UINT64_MAX / 4;
    for (int step = 0; step < MAX_STEPS && mp_weight_store_unpacked(store); step++) {
        mp_embedding_request *call = make_outputs(&all, 0, TEXTS, MP_EMBED_TOKENS);
        MP_CHECK_INT(end_call(&tiny, &call->base, UINT64_MAX, &code), MP_OUTCOME_DONE);
        mp_request_destroy(&call->base);
    }
    MP_CHECK(!mp_weight_store_unpacked(store));
    for (int corrupted = 0; corrupted < 2; corrupted++) {
        mp_embedding_request *call = make_outputs(&all, 0, 2, MP_EMBED_TOKENS);
        atomic_store(&store->corrupted, corrupted);
        MP_CHECK_INT(end_call(&tiny, &call->base, UINT64_MAX, &code),
                     corrupted ? MP_OUTCOME_FAILED : MP_OUTCOME_DONE);
        MP_CHECK(!corrupted || code == MP_INTEGRITY);
        MP_CHECK_INT(tiny.model->ops->healthy(tiny.model), !corrupted);
        mp_request_destroy(&call->base);
    }
    tiny_unload(&tiny);
}
