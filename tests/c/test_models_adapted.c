/* Language models with low-rank adapters: requests of several adapters in one pass, the model with merged weights,
 * hostile specs, requests for adapters that the model does not have, and failing allocations. */
#include "adapter_fixture.h"
#include "base/options.h"
#include "base/sanitize.h"
#include "late_threads.h"
#include "missing_fixture.h"
#include "models/decoder/decoder.h"

enum { WHOLE = 7, SMALL = 8, EMPTY = 9, PROMPT = 70, ANSWER = 6, JOBS = 8 };
static const int64_t ids[] = {WHOLE, SMALL, EMPTY};
enum { ADAPTERS = sizeof ids / sizeof *ids };

static const struct {
    const char *name;
    int N, K;
} layers[] = {{"attn_q", TINY_HIDDEN, TINY_HIDDEN},
              {"attn_k", TINY_HIDDEN / TINY_HEADS * TINY_KV_HEADS, TINY_HIDDEN},
              {"attn_v", TINY_HIDDEN / TINY_HEADS * TINY_KV_HEADS, TINY_HIDDEN},
              {"attn_output", TINY_HIDDEN, TINY_HIDDEN},
              {"ffn_gate", TINY_FFN, TINY_HIDDEN},
              {"ffn_up", TINY_FFN, TINY_HIDDEN},
              {"ffn_down", TINY_HIDDEN, TINY_FFN}};
enum { LAYERS = sizeof layers / sizeof *layers };

/* Adapter WHOLE updates every layer, with ranks 1, 31 and 33; SMALL two layers; EMPTY none. */
static void add_adapters(tiny_file *file) {
    static const int ranks[] = {1, 31, 33};
    char layer[64];
    tiny_ints(file->spec, "mpool.adapters", ids, ADAPTERS);
    for (int i = 0; i < TINY_LAYERS * LAYERS; i++) {
        snprintf(layer, sizeof layer, "blk.%d.%s", i / LAYERS, layers[i % LAYERS].name);
        tiny_update(file, 1, layer, ranks[i % 3], layers[i % LAYERS].N, layers[i % LAYERS].K, i % 2 ? 0.5 : -0.25);
    }
    tiny_update(file, 2, "blk.1.attn_q", 8, TINY_HIDDEN, TINY_HIDDEN, 1);
    tiny_update(file, 2, "blk.2.ffn_down", 3, TINY_HIDDEN, TINY_FFN, 1);
}

static float *values_of(const tiny_file *file, const char *name) {
    const mp_tensor_entry *entry = mp_spec_find_tensor(file->spec, name);
    MP_CHECK(entry && entry->dtype == MP_F32);
    return (float *)(void *)(file->bytes + entry->offset);
}

/* As add_adapters, and adds the update of each layer by WHOLE to the layer's weight. */
static void merge_adapter(tiny_file *file) {
    char name[96];
    double scale;
    mp_error error;
    add_adapters(file);
    for (int i = 0; i < TINY_LAYERS * LAYERS; i++) {
        const int N = layers[i % LAYERS].N, K = layers[i % LAYERS].K;
        const char *layer = layers[i % LAYERS].name;
        snprintf(name, sizeof name, "blk.%d.%s.weight", i / LAYERS, layer);
        float *w = values_of(file, name);
        snprintf(name, sizeof name, "adapter.1.blk.%d.%s.lora_a", i / LAYERS, layer);
        const float *a = values_of(file, name);
        const int rank = (int)mp_spec_find_tensor(file->spec, name)->shape[0];
        snprintf(name, sizeof name, "adapter.1.blk.%d.%s.lora_b", i / LAYERS, layer);
        const float *b = values_of(file, name);
        snprintf(name, sizeof name, "adapter.1.blk.%d.%s.scale", i / LAYERS, layer);
        MP_CHECK_OK(mp_spec_float(file->spec, name, -1, 1, NULL, &scale, &error), &error);
        for (int n = 0; n < N; n++)
            for (int k = 0; k < K; k++) {
                double sum = 0;
                for (int r = 0; r < rank; r++)
                    sum += (double)b[n * rank + r] * (double)a[r * K + k];
                w[n * K + k] = (float)((double)w[n * K + k] + scale * sum);
            }
    }
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */

static mp_text_args args_of(int32_t *prompt, int n, int seed, int32_t adapter, bool logits) {
    for (int i = 0; i < n; i++)
        prompt[i] = (i * 11 + seed) % (TINY_VOCAB - 1);
    return (mp_text_args){.n_prompt = n, .prompt = prompt, .n_choices = 1, .adapter = adapter,
                          .want_prompt_logits = logits,
                          .sampling = {.temperature = seed % 2 ? 0.8f : 0, .top_p = 1, .repetition_penalty = 1,
                                       .max_tokens = ANSWER, .logprobs = 4, .ignore_eos = true}};
}

/* Jobs 0 to 3 have the same prompt, which is longer than a block of keys and values. Jobs 4 and 6 return the logits of
 * all prompt tokens, the others compute the last layer of the last token only. */
static void make_job(const tiny_model *tiny, tiny_job *job, int index) {
    static const int32_t adapters[JOBS] = {0, WHOLE, SMALL, EMPTY, SMALL, WHOLE, 0, WHOLE};
    static const int lengths[JOBS] = {PROMPT, PROMPT, PROMPT, PROMPT, 1, 3, 33, 20};
    int32_t prompt[PROMPT];
    const mp_text_args args = args_of(prompt, lengths[index], index < 4 ? 2 : index, adapters[index],
                                      index >= 4 && index % 2 == 0);
    tiny_job_make(tiny, job, &args, 0);
}

static uint64_t run_alone(tiny_model *tiny, int index) {
    tiny_job job;
    make_job(tiny, &job, index);
    tiny_job_admit(tiny, &job);
    tiny_job_finish(tiny, &job);
    const uint64_t hash = tiny_job_hash(&job);
    mp_request_destroy(&job.call->base);
    return hash;
}

/* Run all jobs together, in steps of at most `amount` tokens of each. */
static void run_together(tiny_model *tiny, uint32_t amount, uint64_t *hashes) {
    tiny_job jobs[JOBS];
    int left = JOBS;
    for (int i = 0; i < JOBS; i++) {
        make_job(tiny, &jobs[i], i);
        tiny_job_admit(tiny, &jobs[i]);
    }
    for (int steps = 0; left > 0; steps++) {
        mp_plan plan = {0};
        mp_outcome outcomes[MP_PLAN_MAX];
        int index[JOBS];
        MP_CHECK(steps < 500);
        for (int i = 0; i < JOBS; i++)
            if (!jobs[i].done) {
                index[plan.count] = i;
                plan.items[plan.count] = &jobs[i].item;
                plan.amount[plan.count++] = amount;
            }
        tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
        for (int i = 0; i < plan.count; i++) {
            MP_CHECK(outcomes[i] == MP_OUTCOME_MORE || outcomes[i] == MP_OUTCOME_DONE);
            if (outcomes[i] != MP_OUTCOME_DONE)
                continue;
            tiny_job *job = &jobs[index[i]];
            job->done = true;
            left--;
            tiny->engine->ops->retire(tiny->engine, &job->item);
        }
    }
    for (int i = 0; i < JOBS; i++) {
        hashes[i] = tiny_job_hash(&jobs[i]);
        mp_request_destroy(&jobs[i].call->base);
    }
}

static void compare_hashes(const uint64_t *expected, const uint64_t *got, int threads, unsigned amount) {
    for (int i = 0; i < JOBS; i++)
        if (got[i] != expected[i])
            MP_FAIL("%d threads, steps of %u: job %d differs", threads, amount, i);
}

/* A request has the same bytes alone and beside requests of other adapters, in a model that packs its weights, maps
 * them, or shares them with another process. A request without an adapter has those of the model without adapters. The
 * load charges what was predicted. */
MP_TEST_SECONDS(models_adapted_requests_have_the_bytes_of_each_alone, 120) {
    static const mp_dtype types[] = {MP_Q8_0, MP_Q4_K, MP_Q4_0};
    static const tiny_kind plain = {.arch = "llama"}, kind = {.arch = "llama", .more = add_adapters};
    static const char *const uses[] = {"packed", "mapped"};
    uint64_t expected[JOBS], got[JOBS], without = 0, predicted, engine;
    tiny_model tiny;
    for (int i = -1; i < JOBS; i++) { /* each in a model of its own, whose cache is empty */
        tiny_load(&tiny, tiny_decoder_spec_as(i < 0 ? &plain : &kind, types, 3, 41, -1), MP_COMPUTE_AUTO, 1);
        *(i < 0 ? &without : &expected[i]) = run_alone(&tiny, i < 0 ? 0 : i);
        tiny_unload(&tiny);
    }
    for (int u = 0; u < 2; u++)
        for (int threads = 1; threads <= 3; threads += MP_SANITIZED ? 2 : 1) {
            tiny_weights = uses[u];
            tiny_load(&tiny, tiny_decoder_spec_as(&kind, types, 3, 41, -1), MP_COMPUTE_AUTO, threads);
            tiny_weights = NULL;
            const uint64_t charged = tiny.model->ops->bytes(tiny.model);
            tiny.loader.ops->footprint(tiny.loader.self, &predicted, &engine);
            MP_CHECK(charged <= predicted + 20000 && predicted <= charged + 20000);
            late_thread_of(threads);
            for (uint32_t amount = 512; amount >= 5; amount /= 9) {
                run_together(&tiny, amount, got);
                compare_hashes(expected, got, threads, amount);
            }
            for (int i = 0; i < JOBS; i++) /* the cache has the blocks of jobs with the same prompt */
                got[i] = run_alone(&tiny, i);
            compare_hashes(expected, got, threads, 512);
            late_thread(-1);
            if (u == 0 && threads == 1) {
                tiny_shared shared;
                tiny_share(&tiny, MP_COMPUTE_AUTO, &shared);
                run_together(&shared.second, 512, got);
                compare_hashes(expected, got, threads, 512);
                tiny_unshare(&shared);
            }
            tiny_unload(&tiny);
        }
    MP_CHECK(expected[0] == without && expected[3] == without);
    MP_CHECK(expected[1] != without && expected[2] != without && expected[1] != expected[2]);
}

static void read_logits(tiny_model *tiny, int32_t adapter, float *logits) {
    int32_t prompt[PROMPT];
    const mp_text_args args = args_of(prompt, PROMPT, 2, adapter, true);
    tiny_job job;
    tiny_job_make(tiny, &job, &args, 0);
    tiny_job_admit(tiny, &job);
    tiny_job_finish(tiny, &job);
    memcpy(logits, job.call->prompt_logits, (size_t)PROMPT * TINY_VOCAB * sizeof *logits);
    mp_request_destroy(&job.call->base);
}

static double largest_difference(const float *a, const float *b) {
    double largest = 0;
    for (int i = 0; i < PROMPT * TINY_VOCAB; i++)
        largest = fmax(largest, fabs((double)a[i] - (double)b[i]));
    return largest;
}

/* An adapter gives the logits of the model whose weights it is merged into, also with scaled residuals, norms of heads
 * and outputs, and windows. */
MP_TEST_SECONDS(models_adapted_logits_are_those_of_merged_weights, 60) {
    static const mp_dtype types[] = {MP_F32};
    static float base[PROMPT * TINY_VOCAB], adapted[PROMPT * TINY_VOCAB], merged[PROMPT * TINY_VOCAB];
    tiny_kind kinds[] = {{.arch = "llama"}, {.arch = "gemma3", .window = 9, .scaled = true}};
    for (int k = 0; k < 2; k++) {
        tiny_model tiny;
        kinds[k].more = add_adapters;
        tiny_load(&tiny, tiny_decoder_spec_as(&kinds[k], types, 1, 43, -1), MP_COMPUTE_F32, 2);
        read_logits(&tiny, 0, base);
        read_logits(&tiny, WHOLE, adapted);
        tiny_unload(&tiny);
        kinds[k].more = merge_adapter;
        tiny_load(&tiny, tiny_decoder_spec_as(&kinds[k], types, 1, 43, -1), MP_COMPUTE_F32, 2);
        read_logits(&tiny, 0, merged);
        tiny_unload(&tiny);
        const double error = largest_difference(adapted, merged), effect = largest_difference(adapted, base);
        if (!(error < effect / 1000 && effect > 0.1))
            MP_FAIL("kind %d: the logits differ by %g, those without the adapter by %g", k, error, effect);
    }
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

typedef struct hostile { /* one update of blk.1.attn_k, or of `layer`; zeros: a valid one of rank 4 */
    mp_status status;
    const char *named; /* part of the message or of its field */
    const char *layer;
    int64_t a[2], b[2];
    mp_dtype dtype; /* type of A */
    int ndim;       /* dimensions of A */
    float value;    /* the last value of B */
    double scale;
    const char *order_of; /* rows or columns; NULL: no order */
    int64_t order[5];
    bool no_a, no_b, no_scale, no_list;
    int number; /* in the names, plus 1 */
} hostile;

static const hostile *current;

static void add_tensor(tiny_file *file, const char *name, mp_dtype dtype, int ndim, const int64_t *shape, float last) {
    mp_error error;
    uint64_t row_bytes;
    const mp_dtype_row *type = mp_dtype_get(dtype);
    MP_CHECK(mp_dtype_row_bytes(dtype, shape[1], &row_bytes));
    const uint64_t bytes = (uint64_t)shape[0] * row_bytes;
    const size_t at = (file->used + 63) & ~(size_t)63;
    file->capacity = 2 * (at + bytes);
    file->bytes = realloc(file->bytes, file->capacity);
    MP_CHECK(file->bytes && type);
    memset(file->bytes + at, 0, bytes);
    if (dtype == MP_F32)
        memcpy(file->bytes + at + bytes - sizeof last, &last, sizeof last);
    mp_tensor_entry entry = {.name = name, .dtype = dtype, .ndim = ndim, .offset = at, .nbytes = bytes};
    for (int i = 0; i < ndim; i++)
        entry.shape[i] = ndim == 1 ? shape[0] * shape[1] : i < 2 ? shape[i] : 1;
    MP_CHECK_OK(mp_spec_add_tensor(file->spec, &entry, &error), &error);
    file->used = at + bytes;
}

static void add_hostile(tiny_file *file) {
    const hostile *h = current;
    const int64_t one = WHOLE, a[2] = {h->a[0] ? h->a[0] : 4, h->a[1] ? h->a[1] : TINY_HIDDEN},
                  b[2] = {h->b[0] ? h->b[0] : layers[1].N, h->b[1] ? h->b[1] : 4};
    const char *layer = h->layer ? h->layer : "blk.1.attn_k";
    const int number = h->number ? h->number - 1 : 1;
    char name[200];
    if (!h->no_list)
        tiny_ints(file->spec, "mpool.adapters", &one, 1);
    snprintf(name, sizeof name, "adapter.%d.%s.lora_a", number, layer);
    if (!h->no_a)
        add_tensor(file, name, h->dtype, h->ndim ? h->ndim : 2, a, 1);
    snprintf(name, sizeof name, "adapter.%d.%s.lora_b", number, layer);
    if (!h->no_b)
        add_tensor(file, name, MP_F32, 2, b, h->value);
    snprintf(name, sizeof name, "adapter.%d.%s.scale", number, layer);
    if (!h->no_scale)
        tiny_float(file->spec, name, h->scale != 0 ? h->scale : 1);
    snprintf(name, sizeof name, "adapter.%d.%s.%s", number, layer, h->order_of ? h->order_of : "rows");
    if (h->order_of)
        tiny_ints(file->spec, name, h->order, 5);
}

#define AT "adapter.1.blk.1.attn_k."
static const hostile cases[] = {
    {.status = MP_OK},
    {.status = MP_FORMAT, .named = AT "lora_a", .no_a = true},
    {.status = MP_FORMAT, .named = AT "lora_b", .no_b = true},
    {.status = MP_FORMAT, .named = AT "lora_a", .a = {4, TINY_HIDDEN - 1}},
    {.status = MP_FORMAT, .named = AT "lora_a", .a = {4, 2 * TINY_HIDDEN}},
    {.status = MP_FORMAT, .named = AT "lora_a", .ndim = 1},
    {.status = MP_FORMAT, .named = AT "lora_a", .ndim = 3},
    {.status = MP_LIMIT, .named = AT "lora_a", .a = {1025, 0}, .b = {0, 1025}},
    {.status = MP_OK, .a = {1024, 0}, .b = {0, 1024}},
    {.status = MP_OK, .a = {1, 0}, .b = {0, 1}},
    {.status = MP_FORMAT, .named = AT "lora_b", .b = {0, 5}},
    {.status = MP_FORMAT, .named = AT "lora_b", .b = {TINY_HIDDEN, 0}},
    {.status = MP_FORMAT, .named = AT "lora_b", .b = {1, 0}},
    {.status = MP_UNSUPPORTED, .named = AT "lora_a", .dtype = MP_Q8_0},
    {.status = MP_UNSUPPORTED, .named = AT "lora_a", .dtype = MP_I32},
    {.status = MP_UNSUPPORTED, .named = AT "lora_a", .dtype = MP_F8_E4M3},
    {.status = MP_FORMAT, .named = AT "lora_b", .value = NAN},
    {.status = MP_FORMAT, .named = AT "lora_b", .value = -INFINITY},
    {.status = MP_FORMAT, .named = AT "lora_b", .value = 3e38f, .scale = 1e6},
    {.status = MP_FORMAT, .named = AT "scale", .scale = 1e7},
    {.status = MP_FORMAT, .named = AT "scale", .scale = NAN},
    {.status = MP_FORMAT, .named = AT "scale", .no_scale = true},
    {.status = MP_OK, .order_of = "rows", .order = {1, 1, 2, 3, 1}},
    {.status = MP_OK, .order_of = "columns", .order = {0, 1, 1, 1, TINY_HIDDEN}},
    {.status = MP_FORMAT, .named = AT "columns", .order_of = "columns", .order = {1, 1, 1, 1, TINY_HIDDEN}},
    {.status = MP_FORMAT, .named = AT "rows", .order_of = "rows", .order = {0, 1, 0, 3, 1}},
    {.status = MP_FORMAT, .named = AT "rows", .order_of = "rows", .order = {0, -1, 2, -3, 1}},
    {.status = MP_FORMAT, .named = AT "rows", .order_of = "rows", .order = {0, 2, 3, INT64_MAX, 1}},
    {.status = MP_UNSUPPORTED, .named = AT "lora_a", .no_list = true},
    {.status = MP_UNSUPPORTED, .named = "adapter.2.blk.1.attn_k.lora_a", .number = 3},
    {.status = MP_UNSUPPORTED, .named = "adapter.0.blk.1.attn_k.lora_a", .number = 1},
    {.status = MP_UNSUPPORTED, .named = "adapter.1.blk.9.attn_k.lora_a", .layer = "blk.9.attn_k"},
    {.status = MP_UNSUPPORTED, .named = "adapter.1.output.lora_a", .layer = "output"},
    {.status = MP_UNSUPPORTED, .named = "adapter.1.blk.1.ffn_gate.7.lora_a", .layer = "blk.1.ffn_gate.7"},
};

/* A spec whose adapters do not fit is refused, and the error names the tensor or the key. */
MP_TEST_SECONDS(models_adapted_hostile_specs, 60) {
    static const mp_dtype types[] = {MP_Q8_0};
    static const tiny_kind kind = {.arch = "llama", .more = add_hostile};
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        current = &cases[i];
        const mp_status status = load_only(tiny_decoder_spec_as(&kind, types, 1, 47, -1), MP_COMPUTE_AUTO, &error);
        if (status != current->status)
            MP_FAIL("case %d: status %d (%s), expected %d", (int)i, status, status ? error.message : "",
                    current->status);
        if (current->named && !strstr(error.field, current->named) && !strstr(error.message, current->named))
            MP_FAIL("case %d: \"%s\" does not name %s", (int)i, error.message, current->named);
    }
}

static const mp_value *listed;

static void add_list(tiny_file *file) {
    mp_error error;
    MP_CHECK_OK(mp_spec_set(file->spec, "mpool.adapters", listed, &error), &error);
}

/* The list of adapters has at most 64 positive ids, each once. */
MP_TEST(models_adapted_lists_of_ids) {
    static const mp_dtype types[] = {MP_Q8_0};
    static const tiny_kind kind = {.arch = "llama", .more = add_list};
    static const int64_t zero[] = {0}, negative[] = {4, -1}, twice[] = {3, 5, 3};
    int64_t many[65];
    mp_error error;
    for (int i = 0; i < 65; i++)
        many[i] = i + 1;
    const struct {
        mp_status status;
        mp_value value;
    } lists[] = {{MP_OK, {.type = MP_VALUE_INTS, .count = 64, .as.integers = many}},
                 {MP_FORMAT, {.type = MP_VALUE_INTS, .count = 65, .as.integers = many}},
                 {MP_FORMAT, {.type = MP_VALUE_INTS, .count = 1, .as.integers = zero}},
                 {MP_FORMAT, {.type = MP_VALUE_INTS, .count = 2, .as.integers = negative}},
                 {MP_FORMAT, {.type = MP_VALUE_INTS, .count = 3, .as.integers = twice}},
                 {MP_FORMAT, {.type = MP_VALUE_INT, .count = 1, .as.integer = 1}},
                 {MP_FORMAT, {.type = MP_VALUE_STRING, .count = 1, .as.string = "1"}}};
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        mp_value value = lists[i].value;
        value.gguf_type = -1;
        listed = &value;
        MP_CHECK_STATUS(load_only(tiny_decoder_spec_as(&kind, types, 1, 48, -1), MP_COMPUTE_AUTO, &error),
                        lists[i].status, &error);
        if (lists[i].status != MP_OK)
            MP_CHECK_STR(error.field, "mpool.adapters");
    }
}

/* A request for an adapter that the model does not have is refused, also if the model that checked it had the adapter:
 * a model may be loaded again with other adapters. */
MP_TEST(models_adapted_requests_for_unknown_adapters) {
    static const mp_dtype types[] = {MP_Q8_0};
    static const tiny_kind plain = {.arch = "llama"}, kind = {.arch = "llama", .more = add_adapters};
    static const int32_t unknown[] = {1, 2, 3, WHOLE - 1, EMPTY + 1, WHOLE + 256, INT32_MAX};
    int32_t prompt[PROMPT];
    tiny_model adapted, other;
    mp_text_request *request;
    mp_error error;
    uint64_t cost;
    uint32_t total;
    tiny_load(&adapted, tiny_decoder_spec_as(&kind, types, 1, 49, -1), MP_COMPUTE_AUTO, 1);
    tiny_load(&other, tiny_decoder_spec_as(&plain, types, 1, 50, -1), MP_COMPUTE_AUTO, 1);
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        const mp_text_args args = args_of(prompt, PROMPT, 2, unknown[i], false);
        MP_CHECK_OK(mp_text_request_create(&args, &request, &error), &error);
        MP_CHECK_STATUS(adapted.model->ops->check(adapted.model, &request->base, &cost, &total, &error),
                        MP_INVALID_ARGUMENT, &error);
        MP_CHECK_HAS(error.message, "adapter");
        mp_request_destroy(&request->base);
    }
    mp_text_args args = args_of(prompt, PROMPT, 2, -1, false);
    MP_CHECK_STATUS(mp_text_request_create(&args, &request, &error), MP_INVALID_ARGUMENT, &error);
    args = args_of(prompt, PROMPT, 2, WHOLE, true);
    tiny_job job;
    tiny_job_make(&adapted, &job, &args, 0);
    MP_CHECK_STATUS(other.engine->ops->admit(other.engine, &job.item, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_HAS(error.message, "adapter");
    other.engine->ops->retire(other.engine, &job.item);
    tiny_job_admit(&adapted, &job);
    tiny_job_finish(&adapted, &job);
    mp_request_destroy(&job.call->base);
    tiny_unload(&other);
    tiny_unload(&adapted);
}

/* ---- failing allocations ----------------------------------------------------------------------------------------- */

static mp_status make_call(mp_request **call, mp_error *error) {
    int32_t prompt[PROMPT];
    mp_text_request *made;
    const mp_text_args args = args_of(prompt, PROMPT, 2, WHOLE, false);
    MP_TRY(mp_text_request_create(&args, &made, error));
    *call = &made->base;
    return MP_OK;
}

static void compare_calls(const mp_request *first, const mp_request *second) {
    const mp_text_request *a = (const mp_text_request *)first, *b = (const mp_text_request *)second;
    MP_CHECK(memcmp(a->choices[0].tokens, b->choices[0].tokens, ANSWER * sizeof(mp_token_out)) == 0);
}

static void add_small(tiny_file *file) { /* both matrices reordered, which are copied once more */
    static const int64_t one = WHOLE, halves[] = {0, TINY_HEADS, 2, TINY_HIDDEN / TINY_HEADS / 2, 1};
    tiny_ints(file->spec, "mpool.adapters", &one, 1);
    tiny_update(file, 1, "blk.0.attn_q", 4, TINY_HIDDEN, TINY_HIDDEN, 1);
    tiny_ints(file->spec, "adapter.1.blk.0.attn_q.rows", halves, 5);
    tiny_update(file, 1, "blk.2.ffn_down", 4, TINY_HIDDEN, TINY_FFN, 1);
}

MP_TEST_SECONDS(models_adapted_allocation_sweep, 120) {
    static const mp_dtype types[] = {MP_Q8_0};
    static const tiny_kind kind = {.arch = "llama", .more = add_small};
    mp_error error;
    MP_CHECK_OK(mp_options_init(&error), &error);
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    tiny_life life = {.spec = tiny_decoder_spec_as(&kind, types, 1, 51, -1), .compute = MP_COMPUTE_AUTO,
                      .make = make_call, .compare = compare_calls};
    mp_test_alloc_sweep(tiny_live, &life);
    mp_spec_unpin(life.spec);
}
