/* hostile_fixture.h: tiny models whose files pass every check of a header, with hyper-parameters and weights that an
 * adversary chose: NaN scales, infinite minima, sizes beyond the tensors, rope bases of 0 and 1e308, expert ids. Any
 * bytes describe a model and its changes. Loading it and running a request must give a result or a typed error. Used by
 * a deterministic test and by tests/fuzz/fuzz_model.c. */
#ifndef HOSTILE_FIXTURE_H
#define HOSTILE_FIXTURE_H

#include "adapter_fixture.h"
#include "model_fixture.h"
#include "request_fixture.h"

enum { HOSTILE_KINDS = 8, HOSTILE_CHANGES = 8, HOSTILE_PROMPT = 21, HOSTILE_ANSWER = 3 };
enum { HOSTILE_ADAPTED = 3, HOSTILE_ADAPTER = 5 }; /* the kind with adapters; the adapter of its request */

typedef struct hostile_change { /* four bytes of input */
    uint8_t what, which, how, where;
} hostile_change;

typedef struct hostile_base { /* a valid model: its spec, and the bytes of its weight file */
    mp_spec *spec;
    uint8_t *bytes;
    size_t size;
} hostile_base;

static hostile_base hostile_bases[HOSTILE_KINDS]; /* made on first use */

static inline void hostile_adapters(tiny_file *file) {
    static const int64_t ids[] = {9, HOSTILE_ADAPTER}, halves[] = {0, TINY_HEADS, 2, TINY_HIDDEN / TINY_HEADS / 2, 1};
    tiny_ints(file->spec, "mpool.adapters", ids, 2);
    tiny_update(file, 1, "blk.1.attn_output", 2, TINY_HIDDEN, TINY_HIDDEN, 0.5);
    tiny_update(file, 2, "blk.1.attn_q", 3, TINY_HIDDEN, TINY_HIDDEN, 0.5);
    tiny_ints(file->spec, "adapter.2.blk.1.attn_q.rows", halves, 5);
    tiny_update(file, 2, "blk.1.ffn_down", 33, TINY_HIDDEN, TINY_FFN, 0.5);
}

static inline const hostile_base *hostile_base_of(int kind) {
    static const mp_dtype types[HOSTILE_KINDS][3] = {{MP_Q4_0, MP_Q8_0, MP_Q6_K}, {MP_F32, MP_F32, MP_F32},
                                                     {MP_Q4_K, MP_Q5_K, MP_Q3_K}, {MP_Q4_1, MP_Q5_1, MP_Q5_0},
                                                     {MP_Q8_0, MP_Q4_0, MP_Q8_0}, {MP_IQ4_XS, MP_Q2_K, MP_IQ2_XS},
                                                     {MP_Q8_0, MP_Q8_0, MP_Q4_K}, {MP_F32, MP_F32, MP_F32}};
    static const int64_t mixers[TINY_LAYERS] = {1, 0, 1};
    static const tiny_kind kinds[] = {
        {.arch = "llama"}, {.arch = "lfm2", .mixers = mixers}, {.arch = "llama", .window = 12},
        {.arch = "llama", .more = hostile_adapters},
        {.arch = "gpt_oss", .experts = 4, .biased = true}, {.arch = "gemma3", .window = 9, .scaled = true},
        {.arch = "deepseek2", .experts = 4}};
    hostile_base *base = &hostile_bases[kind];
    if (base->spec)
        return base;
    base->spec = kind == HOSTILE_KINDS - 1
                     ? tiny_encoder_spec_of(false, true)
                     : tiny_decoder_spec_as(&kinds[kind], types[kind], 3, 900 + (uint64_t)kind, -1);
    FILE *file = fopen(mp_spec_file(base->spec, 0), "rb");
    MP_CHECK(file && fseek(file, 0, SEEK_END) == 0);
    base->size = (size_t)ftell(file);
    base->bytes = malloc(base->size);
    rewind(file);
    MP_CHECK(base->bytes && fread(base->bytes, 1, base->size, file) == base->size);
    fclose(file);
    return base;
}

static inline void hostile_free(void) {
    for (int kind = 0; kind < HOSTILE_KINDS; kind++) {
        mp_spec_unpin(hostile_bases[kind].spec);
        free(hostile_bases[kind].bytes);
        hostile_bases[kind] = (hostile_base){0};
    }
}

static inline int64_t hostile_int(int64_t value, uint8_t how) {
    static const int64_t ends[] = {0, 1, -1, 2, 3, 7, 255, 256, 257, 65535, 65536, INT32_MAX, (int64_t)INT32_MAX + 1,
                                   UINT32_MAX, INT64_MAX, INT64_MIN};
    switch (how >> 4) {
    case 0: return ends[how & 15];
    case 1: return value + (how & 15) - 8;
    case 2: return value * (1 + (how & 15));
    case 3: return value / (1 + (how & 15));
    default: return (int64_t)1 << (how & 63);
    }
}

static inline double hostile_float(double value, uint8_t how) {
    static const double ends[] = {0, -0.0, 1e308, -1e308, 1e-308, 5e-324, 3.5e38, 3.4e38, 1e-45, 1e-38, -1, 1,
                                  INFINITY, -INFINITY, NAN, 65536};
    return how < 64 ? ends[how & 15] : how < 128 ? value * (how - 96) : value * ldexp(1, (how & 127) * 4 - 256);
}

/* Set `value` in `spec` with the changes that name value number `index`. A value that the spec refuses stays unset. */
static inline void hostile_value(mp_spec *spec, const char *key, const mp_value *value, int index, int count,
                                 const hostile_change *changes, int n) {
    mp_error error;
    mp_value to = *value;
    int64_t integers[64];
    double reals[64];
    for (int i = 0; i < n; i++) {
        if (changes[i].what % 4 > 1 || changes[i].which % count != index)
            continue;
        const uint8_t how = changes[i].how;
        const uint64_t at = to.count ? changes[i].where % to.count : 0;
        switch (to.type) {
        case MP_VALUE_INT: to.as.integer = hostile_int(to.as.integer, how); break;
        case MP_VALUE_BOOL: to.as.integer ^= 1; break;
        case MP_VALUE_FLOAT: to.as.real = hostile_float(to.as.real, how); break;
        case MP_VALUE_INTS:
            if (to.count <= 64) {
                memmove(integers, to.as.integers, to.count * sizeof *integers);
                integers[at] = hostile_int(integers[at], how);
                to.as.integers = integers;
            }
            break;
        case MP_VALUE_FLOATS:
            if (to.count <= 64) {
                memmove(reals, to.as.reals, to.count * sizeof *reals);
                reals[at] = hostile_float(reals[at], how);
                to.as.reals = reals;
            }
            break;
        default: break;
        }
    }
    (void)(mp_spec_set(spec, key, &to, &error) == MP_OK);
}

/* Change the weights of one tensor in `bytes`: one element, one block, one row or all, to a value that overflows. */
static inline void hostile_weights(uint8_t *bytes, const mp_spec *spec, hostile_change change) {
    static const uint32_t singles[] = {0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF,
                                       0x00000001, 0x80000000, 0x7F800001, 0x5F000000};
    static const uint16_t halves[] = {0x7E00, 0xFE00, 0x7C00, 0xFC00, 0x7BFF, 0xFBFF, 0x0001, 0x8000, 0x7C01, 0x7000};
    const mp_tensor_entry *entry = mp_spec_tensor_at(spec, change.which % mp_spec_tensor_count(spec));
    const mp_dtype_row *type = mp_dtype_get(entry->dtype);
    const uint64_t blocks = entry->nbytes / (uint64_t)type->bytes, first = change.where % blocks;
    const uint64_t run = change.how >> 6 == 0 ? 1 : change.how >> 6 == 1 ? 8 : change.how >> 6 == 2 ? 256 : blocks;
    for (uint64_t b = first; b < blocks && b < first + run; b++) {
        uint8_t *block = bytes + entry->offset + b * (uint64_t)type->bytes;
        if (entry->dtype == MP_F32)
            memcpy(block, &singles[change.how % 10], 4);
        else if (change.how & 32) /* any two bytes of the block; the scales are among them */
            memcpy(block + (change.how * 7 + change.where) % (type->bytes - 1), &halves[change.how % 10], 2);
        else { /* the scales of all types are at an end of the block */
            memcpy(block, &halves[change.how % 10], 2);
            memcpy(block + 2, &halves[(change.how + change.where) % 10], 2);
            memcpy(block + type->bytes - 2, &halves[change.how % 10], 2);
        }
    }
}

static inline mp_spec *hostile_spec(const hostile_base *base, const hostile_change *changes, int n) {
    mp_error error;
    const char *key;
    char path[512];
    mp_spec *spec = mp_spec_create();
    uint8_t *bytes = malloc(base->size);
    MP_CHECK(spec && bytes);
    memcpy(bytes, base->bytes, base->size);
    snprintf(path, sizeof path, "%s/hostile.bin", mp_test_directory());
    MP_CHECK_OK(mp_spec_set_architecture(spec, mp_spec_architecture(base->spec), &error), &error);
    MP_CHECK_OK(mp_spec_add_file(spec, path, &error), &error);
    const int values = mp_spec_value_count(base->spec);
    for (int i = 0; i < values; i++) {
        const mp_value *value = mp_spec_value_at(base->spec, i, &key);
        hostile_value(spec, key, value, i, values, changes, n);
    }
    for (int i = 0; i < mp_spec_tensor_count(base->spec); i++)
        MP_CHECK_OK(mp_spec_add_tensor(spec, mp_spec_tensor_at(base->spec, i), &error), &error);
    for (int i = 0; i < n; i++)
        if (changes[i].what % 4 > 1)
            hostile_weights(bytes, base->spec, changes[i]);
    if (mp_spec_tokens(base->spec))
        MP_CHECK_OK(mp_spec_set_tokens(spec, mp_spec_tokens(base->spec), &error), &error);
    mp_spec_freeze(spec);
    mp_test_write_file(path, bytes, base->size);
    free(bytes);
    return spec;
}

static inline mp_status hostile_request(bool encoder, int vocab, int32_t adapter, mp_request **request,
                                        mp_error *error) {
    int32_t ids[2 * HOSTILE_PROMPT];
    for (int i = 0; i < 2 * HOSTILE_PROMPT; i++)
        ids[i] = i * 31 % vocab;
    if (encoder) {
        mp_embedding_request *made;
        MP_TRY(make_embedding_request(2, ids, (const int64_t[]){0, 5, 2 * HOSTILE_PROMPT}, NULL, &made, error));
        *request = &made->base;
        return MP_OK;
    }
    mp_text_args args = {.n_prompt = HOSTILE_PROMPT, .prompt = ids, .n_choices = 1, .adapter = adapter,
                         .sampling = {.temperature = 1, .top_p = 0.9f, .repetition_penalty = 1.1f,
                                      .max_tokens = HOSTILE_ANSWER, .logprobs = 1, .ignore_eos = true}};
    mp_text_request *made;
    MP_TRY(mp_text_request_create(&args, &made, error));
    *request = &made->base;
    return MP_OK;
}

/* Check the result of a completed request: every number that a caller receives is finite. */
static inline void hostile_check(const mp_request *request, bool encoder) {
    if (encoder) {
        const mp_embedding_request *call = (const mp_embedding_request *)request;
        for (int i = 0; i < 2 * TINY_WIDTH; i++)
            MP_CHECK(isfinite(call->vectors[i]));
        return;
    }
    const mp_choice *choice = &((const mp_text_request *)request)->choices[0];
    for (int i = 0; i < HOSTILE_ANSWER; i++) {
        MP_CHECK(choice->tokens[i].id >= 0 && choice->tokens[i].id < TINY_VOCAB);
        MP_CHECK(isfinite(choice->tokens[i].logprob));
    }
}

static inline mp_status hostile_live(mp_spec *spec, int kind, mp_compute compute, mp_error *error) {
    const bool encoder = kind == HOSTILE_KINDS - 1;
    mp_status status;
    mp_team *team = NULL;
    mp_loader loader = {0};
    mp_model *model = NULL;
    mp_engine *engine = NULL;
    mp_request *request = NULL;
    mp_budget budget = {.limit = 1 << 28};
    mp_item item = {0};
    mp_lease lease;
    uint64_t cost;
    MP_TRY(mp_team_create(0, &team, error));
    mp_team_lease(team, 1, &lease);
    MP_TRY_GOTO(mp_model_loader(spec, compute, &loader, error));
    MP_TRY_GOTO(loader.ops->load(loader.self, &lease, &budget, NULL, &model, error));
    MP_TRY_GOTO(model->ops->engine(model, &budget, &engine, error));
    MP_TRY_GOTO(hostile_request(encoder, TINY_VOCAB, kind == HOSTILE_ADAPTED ? HOSTILE_ADAPTER : 0, &request, error));
    item.request = request;
    MP_TRY_GOTO(model->ops->check(model, request, &cost, &item.total, error));
    MP_TRY_GOTO(engine->ops->admit(engine, &item, error));
    mp_item *planned[1] = {&item};
    mp_outcome outcomes[MP_PLAN_MAX];
    do {
        mp_plan plan = {0};
        engine->ops->plan(engine, planned, 1, UINT64_MAX, &plan);
        engine->ops->step(engine, &lease, &plan, outcomes);
    } while (outcomes[0] == MP_OUTCOME_MORE);
    if (outcomes[0] == MP_OUTCOME_DONE) {
        hostile_check(request, encoder);
    } else {
        *error = item.error;
        status = item.error.code;
        MP_CHECK(status != MP_OK);
    }
cleanup:
    if (engine) {
        engine->ops->retire(engine, &item);
        engine->ops->destroy(engine);
    }
    if (model)
        model->ops->destroy(model);
    if (loader.ops)
        loader.ops->destroy(loader.self);
    mp_request_destroy(request);
    mp_team_return(&lease);
    mp_team_destroy(team);
    MP_CHECK_INT(budget.used, 0);
    return status;
}

/* Make the model that the bytes describe, load it, and run a request. Returns the status of the first failure. */
static inline mp_status hostile_run(const uint8_t *data, size_t size, mp_error *error) {
    static const mp_compute computes[] = {MP_COMPUTE_AUTO, MP_COMPUTE_F32};
    hostile_change changes[HOSTILE_CHANGES] = {0};
    if (size < 1)
        return MP_OK;
    const int kind = data[0] % HOSTILE_KINDS;
    const mp_compute compute = computes[data[0] >> 7];
    int n = (int)((size - 1) / sizeof *changes);
    n = n < HOSTILE_CHANGES ? n : HOSTILE_CHANGES;
    if (n)
        memcpy(changes, data + 1, (size_t)n * sizeof *changes);
    mp_error_clear(error);
    mp_spec *spec = hostile_spec(hostile_base_of(kind), changes, n);
    const mp_status status = hostile_live(spec, kind, compute, error);
    mp_spec_unpin(spec);
    if (status != MP_OK) {
        MP_CHECK(error->code == status && error->message[0]);
        MP_CHECK(status == MP_FORMAT || status == MP_LIMIT || status == MP_UNSUPPORTED || status == MP_NUMERIC ||
                 status == MP_MEMORY_EXHAUSTED || status == MP_INVALID_ARGUMENT || status == MP_CONTEXT_OVERFLOW);
    }
    return status;
}

#endif
