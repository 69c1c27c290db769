/* test_models_sequence.c: sequences of a decoder: rows that are wiped, draft tokens, the order of a plan. */
#include "model_fixture.h"
#include "models/decoder/decoder.h"
#include "models/decoder/drafts.h"
#include "ranges_fixture.h"
#include "speculation_fixture.h"

enum { BLOCKS = 3, LAYERS = 3, HEADS = 2, SIZE = 16 };

/* Fill all slots of all layers with numbers, but with zeros in the `wiped` slots from `from` on. */
static void fill(mp_kv_cache *cache, const uint32_t *ids, int from, int wiped) {
    mp_test_random random = {3};
    for (int at = 0; at < BLOCKS * MP_KV_BLOCK; at++)
        for (int layer = 0; layer < LAYERS; layer++)
            for (int head = 0; head < HEADS; head++) {
                float values[SIZE];
                for (int i = 0; i < SIZE; i++)
                    values[i] = mp_test_random_float(&random, 1, 2) * (at < from || at >= from + wiped ? 1.0f : 0.0f);
                mp_kv_put(cache, ids[at / MP_KV_BLOCK], layer, head, at % MP_KV_BLOCK, values, values);
            }
}

/* Rows of a corrupted pass are zeroed in all layers, and no row before or after them changes, also at the border of a
 * block: the next block may belong to another sequence. */
MP_TEST(models_sequence_wipes_its_rows_only) {
    static const int cases[][2] = {{0, 1}, {5, 7}, {60, 3}, {60, 4}, {62, 5}, {64, 1}, {127, 1}, {0, 128}, {3, 0}};
    mp_kv_store stores[LAYERS] = {{.heads = HEADS, .k_dim = SIZE, .v_dim = SIZE},
                                  {.heads = HEADS, .k_dim = SIZE, .v_dim = SIZE, .window = 500},
                                  {.heads = HEADS, .k_dim = SIZE, .v_dim = SIZE}};
    const mp_kv_layout layout = mp_kv_lay_out(stores, LAYERS, MP_F32);
    mp_budget budget = {.limit = UINT64_MAX};
    mp_prefix_cache cache, expected;
    mp_error error;
    uint32_t ids[BLOCKS], same[BLOCKS];
    mp_kernels_init();
    mp_prefix_init(&cache, &layout, &budget, 25);
    mp_prefix_init(&expected, &layout, &budget, 25);
    for (int b = 0; b < BLOCKS; b++) {
        MP_CHECK_OK(mp_prefix_take(&cache, &ids[b], &error), &error);
        MP_CHECK_OK(mp_prefix_take(&expected, &same[b], &error), &error);
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mp_cached cached = {.blocks = ids, .count = cases[i][0]};
        fill(&cache.kv, ids, 0, 0);
        fill(&expected.kv, same, cases[i][0], cases[i][1]);
        mp_cached_wipe(&cached, &cache, cases[i][1]);
        for (int b = 0; b < BLOCKS; b++)
            for (int layer = 0; layer < LAYERS; layer++)
                for (int head = 0; head < HEADS; head++)
                    MP_CHECK(memcmp(mp_kv_k(&cache.kv, ids[b], layer, head),
                                    mp_kv_k(&expected.kv, same[b], layer, head),
                                    stores[layer].k_bytes + stores[layer].v_bytes) == 0);
    }
    for (int b = BLOCKS - 1; b >= 0; b--) {
        mp_prefix_unref_part(&cache, 1, ids[b]);
        mp_prefix_unref_part(&expected, 1, same[b]);
        mp_prefix_unref_block(&cache, ids[b]);
        mp_prefix_unref_block(&expected, same[b]);
    }
    mp_prefix_deinit(&cache);
    mp_prefix_deinit(&expected);
    MP_CHECK_INT(budget.used, 0);
}

enum { BAD = 7 }; /* a token with an infinite embedding row */

static int propose_bad(void *arg, const mp_item *item, int choice, int32_t *draft, int most) {
    (void)arg;
    (void)item;
    (void)choice;
    for (int i = 0; i < most; i++)
        draft[i] = BAD;
    return most;
}

/* Check that the components that pad the values of a sequence to whole vectors are zero in all slots of its blocks, and
 * that no key or value of a slot is infinite or NaN: kernels may read slots after the last row. */
static void check_slots(const tiny_model *tiny, const mp_sequence *seq) {
    const mp_decoder *model = (const mp_decoder *)tiny->model;
    const mp_kv_cache *kv = &((const mp_text_engine *)tiny->engine)->cache.kv;
    const int padded = model->kv_stores[0].v_dim;
    for (int b = 0; b < seq->cached.block_count; b++)
        for (int store = 0; store < kv->layout.count; store++)
            for (int head = 0; head < model->kv_stores[store].heads; head++) {
                const mp_kv_store *at = &model->kv_stores[store];
                const float *k = mp_kv_k(kv, seq->cached.blocks[b], store, head);
                const float *v = mp_kv_v(kv, seq->cached.blocks[b], store, head);
                MP_CHECK(mp_kernels_get()->all_finite(k, (size_t)(at->k_dim * MP_KV_BLOCK)));
                MP_CHECK(mp_kernels_get()->all_finite(v, (size_t)(padded * MP_KV_BLOCK)));
                for (int slot = 0; slot < MP_KV_BLOCK; slot++)
                    for (int i = model->shapes[0].value_dim; i < padded; i++)
                        MP_CHECK(v[slot * padded + i] == 0);
            }
}

/* Heads of 8 components: values are padded to 16, and rows of infinite drafts are wiped with their padding. */
MP_TEST(models_sequence_wipes_infinite_drafts_and_padding) {
    static const mp_dtype type = MP_F32;
    const mp_value heads = {.type = MP_VALUE_INT, .gguf_type = -1, .count = 1, .as.integer = 32};
    const int32_t bad = BAD, prompt[] = {20, 21, 22, 23, 24, 25};
    const float never = -1e6f;
    const mp_text_args args = {.prompt = prompt, .n_prompt = 6, .n_choices = 2, .n_bias = 1, .bias_ids = &bad,
                               .bias = &never, .sampling = {.temperature = 0.8f, .top_p = 1, .repetition_penalty = 1,
                               .max_tokens = 8, .logprobs = -1, .ignore_eos = true}};
    tiny_model tiny;
    tiny_job job;
    mp_outcome outcome;
    mp_spec *base = tiny_decoder_spec_with(&type, 1, 54, BAD), *half = spec_with(base, "llama.attention.head_count",
                                                                                 &heads);
    tiny_load(&tiny, spec_with(half, "llama.attention.head_count_kv", &heads), MP_COMPUTE_F32, 1);
    mp_spec_unpin(base);
    mp_spec_unpin(half);
    MP_CHECK_INT(((const mp_decoder *)tiny.model)->kv_stores[0].v_dim,
                 2 * ((const mp_decoder *)tiny.model)->shapes[0].value_dim);
    tiny_speculate(tiny.engine, MP_SPECULATE_ALWAYS, propose_bad, NULL);
    tiny_job_make(&tiny, &job, &args, 0);
    tiny_job_admit(&tiny, &job);
    do {
        outcome = tiny_job_step(&tiny, &job, 512);
        const mp_sequence_group *group = job.item.state;
        for (int c = 0; outcome == MP_OUTCOME_MORE && c < group->n; c++)
            check_slots(&tiny, &group->seqs[c]);
    } while (outcome == MP_OUTCOME_MORE);
    MP_CHECK_INT(outcome, MP_OUTCOME_DONE);
    MP_CHECK(tiny.engine->work.draft_tokens > 0);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* Tokens that end a completion are not drafted, since no row would follow them; nor are tokens that the model cannot
 * sample. */
MP_TEST(models_sequence_drafts_no_end) {
    static const mp_dtype floats[] = {MP_F32};
    static int32_t stop_ids[] = {11, 7, 0};
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec(floats, 1, 42), MP_COMPUTE_F32, 1);
    const mp_decoder *model = (const mp_decoder *)tiny.model;
    const mp_token_table *tokens = mp_spec_tokens(mp_weights_spec(model->weights));
    mp_text_request request = {.stop_ids = stop_ids};
    const mp_item item = {.request = &request.base};
    MP_CHECK(tokens->eog_count > 0);
    for (int count = 0; count <= 3; count++) {
        request.n_stop_ids = count;
        for (int32_t id = -2; id < model->sampled_vocab + 2; id++) {
            bool ends = false;
            for (int i = 0; i < tokens->eog_count; i++)
                ends |= tokens->eog[i] == id;
            for (int i = 0; i < count; i++)
                ends |= stop_ids[i] == id;
            MP_CHECK_INT(mp_drafts_may_hold(model, &item, id), id >= 0 && id < model->sampled_vocab && !ends);
        }
    }
    tiny_unload(&tiny);
}
