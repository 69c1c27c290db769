/* Static embeddings: vectors have the same bits alone and in a batch, with any number of threads; a row that is not
 * finite fails its request only; tables, mappings and ids out of range are refused. */
#include "estimate_fixture.h"
#include "encoder_fixture.h"
#include "ranges_fixture.h"
#include "models/lookup/lookup.h"

typedef struct kind {
    bool factors, poison;
} kind;

static void add_raw(tiny_file *file, const char *name, mp_dtype dtype, const void *data, int64_t count, size_t bytes) {
    mp_error error;
    file->used = (file->used + 63) & ~(size_t)63;
    file->bytes = realloc(file->bytes, file->used + bytes);
    file->capacity = file->used + bytes;
    memcpy(file->bytes + file->used, data, bytes);
    const mp_tensor_entry entry = {.name = name, .dtype = dtype, .ndim = 1, .shape = {count}, .offset = file->used,
                                   .nbytes = bytes};
    MP_CHECK_OK(mp_spec_add_tensor(file->spec, &entry, &error), &error);
    file->used += bytes;
}

/* A model of TINY_VOCAB tokens; the row of token 7 begins with NaN if `poison`. */
static mp_spec *lookup_spec(const kind *of, const char *key, int64_t value, const int64_t *mapping, int64_t rows) {
    mp_error error;
    char path[512];
    static int made;
    snprintf(path, sizeof path, "%s/lookup%d.bin", mp_test_directory(), made++);
    tiny_file file = {.spec = mp_spec_create(), .random = {11}};
    MP_CHECK_OK(mp_spec_set_architecture(file.spec, "static_embedding", &error), &error);
    MP_CHECK_OK(mp_spec_add_file(file.spec, path, &error), &error);
    const struct {
        const char *key;
        int64_t value;
    } numbers[] = {{"static_embedding.embedding_length", WIDTH},
                   {"static_embedding.context_length", POSITIONS},
                   {"static_embedding.vocab_size", TINY_VOCAB},
                   {"mpool.ignored_token", 9}};
    for (int i = 0; i < 4; i++)
        tiny_int(file.spec, numbers[i].key, key && !strcmp(key, numbers[i].key) ? value : numbers[i].value);
    tiny_flag(file.spec, "mpool.normalize", true);
    tiny_tensor(&file, "token_embd.weight", MP_F32, rows, WIDTH, 1, 0);
    if (of->poison)
        memset(file.bytes + 7 * WIDTH * 4, 0xFF, 4);
    float factors[TINY_VOCAB];
    for (int i = 0; i < TINY_VOCAB; i++)
        factors[i] = 0.5f + (float)i / TINY_VOCAB;
    if (of->factors)
        add_raw(&file, "token_embd.factor", MP_F32, factors, TINY_VOCAB, sizeof factors);
    if (mapping)
        add_raw(&file, "token_embd.mapping", MP_I64, mapping, TINY_VOCAB, sizeof(int64_t) * TINY_VOCAB);
    mp_test_write_file(path, file.bytes, file.used);
    free(file.bytes);
    return file.spec;
}

static mp_spec *plain(const void *arg) { return lookup_spec(arg, NULL, 0, NULL, TINY_VOCAB); }

static void check_contract(const kind *of) {
    static texts all;
    static float alone[TEXTS * WIDTH];
    make_texts(&all);
    check_groups(&(grouped){TEXTS, WIDTH, MP_COMPUTE_AUTO, plain, of, &all, run, NULL}, alone);
}

MP_TEST(models_lookup_contract) {
    check_contract(&(kind){false, false});
    check_contract(&(kind){true, false});
}

MP_TEST(models_lookup_threads_share_a_batch) {
    enum { MANY = 700 };
    static int32_t ids[MANY * 3];
    static int64_t offsets[MANY + 1];
    mp_test_random random = {3};
    for (int t = 0; t < MANY; t++)
        offsets[t + 1] = offsets[t] + 1 + t % 3;
    for (int i = 0; i < offsets[MANY]; i++)
        ids[i] = (int32_t)(mp_test_random_u64(&random) % TINY_VOCAB);
    const kind of = {true, false};
    for (int threads = 1; threads <= 3; threads++) {
        tiny_model tiny;
        mp_error error;
        mp_embedding_request *call;
        tiny_load(&tiny, plain(&of), MP_COMPUTE_AUTO, threads);
        MP_CHECK_OK(make_embedding_request(MANY, ids, offsets, NULL, &call, &error), &error);
        MP_CHECK_INT(run_call(&tiny, &call->base, UINT64_MAX), MP_OUTCOME_DONE);
        for (int t = 0; t < MANY; t++) {
            float out[WIDTH];
            _Atomic bool stop = false;
            MP_CHECK(mp_lookup_vector((const mp_lookup *)tiny.model, ids + offsets[t], offsets[t + 1] - offsets[t],
                                      WIDTH, true, &tiny.lease, &stop, out));
            MP_CHECK(memcmp(out, call->vectors + t * WIDTH, sizeof out) == 0);
        }
        mp_request_destroy(&call->base);
        tiny_unload(&tiny);
    }
}

MP_TEST(models_lookup_means_leave_out_the_ignored_token) {
    const kind of = {false, false};
    const int32_t ids[] = {9, 20, 9, 30, 9, 9};
    float with[WIDTH], without[WIDTH], none[WIDTH];
    _Atomic bool stop = false;
    tiny_model tiny;
    tiny_load(&tiny, plain(&of), MP_COMPUTE_AUTO, 1);
    const mp_lookup *model = (const mp_lookup *)tiny.model;
    MP_CHECK(mp_lookup_vector(model, ids, 6, WIDTH, false, &tiny.lease, &stop, with));
    MP_CHECK(mp_lookup_vector(model, (int32_t[]){20, 30}, 2, WIDTH, false, &tiny.lease, &stop, without));
    MP_CHECK(memcmp(with, without, sizeof with) == 0);
    for (int c = 0; c < WIDTH; c++) {
        float a, b;
        memcpy(&a, mp_tensor_row(&model->table, 20) + 4 * c, 4);
        memcpy(&b, mp_tensor_row(&model->table, 30) + 4 * c, 4);
        MP_CHECK(with[c] == (a + b) / 2);
    }
    MP_CHECK(mp_lookup_vector(model, ids, 1, WIDTH, true, &tiny.lease, &stop, none));
    for (int c = 0; c < WIDTH; c++)
        MP_CHECK(none[c] == 0.0f);
    tiny_unload(&tiny);
}

/* A token's factor multiplies every component of its row. */
MP_TEST(models_lookup_factors_multiply_rows) {
    const kind of = {true, false};
    float vector[WIDTH];
    _Atomic bool stop = false;
    tiny_model tiny;
    tiny_load(&tiny, plain(&of), MP_COMPUTE_AUTO, 1);
    const mp_lookup *model = (const mp_lookup *)tiny.model;
    MP_CHECK(mp_lookup_vector(model, (int32_t[]){20, 30}, 2, WIDTH, false, &tiny.lease, &stop, vector));
    for (int c = 0; c < WIDTH; c++) {
        float a, b;
        memcpy(&a, mp_tensor_row(&model->table, 20) + 4 * c, 4);
        memcpy(&b, mp_tensor_row(&model->table, 30) + 4 * c, 4);
        MP_CHECK_NEAR(vector[c], (a * (0.5f + 20.0f / TINY_VOCAB) + b * (0.5f + 30.0f / TINY_VOCAB)) / 2, 1e-6);
    }
    tiny_unload(&tiny);
}

MP_TEST(models_lookup_nan_fails_its_request_only) {
    static texts all;
    static float out[TEXTS * WIDTH];
    const kind of = {false, true};
    make_texts(&all);
    all.ids[all.offsets[3]] = 7;
    tiny_model tiny;
    tiny_load(&tiny, plain(&of), MP_COMPUTE_AUTO, 2);
    MP_CHECK_INT(run(&tiny, &all, 0, 8, UINT64_MAX, out), MP_OUTCOME_FAILED);
    MP_CHECK_INT(run(&tiny, &all, 4, 8, UINT64_MAX, out), MP_OUTCOME_DONE);
    tiny_unload(&tiny);
}

MP_TEST(models_lookup_refuses_invalid_requests) {
    const kind of = {false, false};
    tiny_model tiny;
    mp_error error;
    tiny_load(&tiny, plain(&of), MP_COMPUTE_AUTO, 1);
    static int32_t ids[POSITIONS + 1];
    const struct {
        int32_t id;
        int64_t length;
        mp_status expected;
    } cases[] = {{TINY_VOCAB, 1, MP_INVALID_ARGUMENT}, {-1, 1, MP_INVALID_ARGUMENT}, {1, 0, MP_OK},
                 {1, POSITIONS + 1, MP_CONTEXT_OVERFLOW}, {1, POSITIONS, MP_OK}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mp_embedding_request *call;
        uint64_t cost;
        uint32_t total;
        const int64_t offsets[2] = {0, cases[i].length};
        ids[0] = cases[i].id;
        MP_CHECK_OK(make_embedding_request(1, ids, offsets, NULL, &call, &error), &error);
        MP_CHECK_INT(tiny.model->ops->check(tiny.model, &call->base, &cost, &total, &error), cases[i].expected);
        mp_request_destroy(&call->base);
    }
    tiny_unload(&tiny);
}

static void check_refused(mp_spec *spec, const char *field) {
    mp_error error;
    mp_loader loader;
    mp_model *model;
    mp_budget budget = {.limit = UINT64_MAX};
    mp_team *team;
    mp_lease lease;
    mp_kernels_init();
    MP_CHECK_OK(mp_team_create(0, &team, &error), &error);
    mp_team_lease(team, 1, &lease);
    MP_CHECK_OK(mp_model_loader(spec, MP_COMPUTE_AUTO, &loader, &error), &error);
    MP_CHECK_STATUS(loader.ops->load(loader.self, &lease, &budget, NULL, &model, &error), MP_FORMAT, &error);
    MP_CHECK_HAS(error.field, field);
    MP_CHECK_INT(budget.used, 0);
    loader.ops->destroy(loader.self);
    mp_team_return(&lease);
    mp_team_destroy(team);
    mp_spec_unpin(spec);
}

MP_TEST(models_lookup_refuses_hostile_tables) {
    const kind of = {true, false};
    static int64_t mapping[TINY_VOCAB];
    check_refused(lookup_spec(&of, NULL, 0, NULL, TINY_VOCAB - 1), "token_embd.weight");
    check_refused(lookup_spec(&of, "static_embedding.vocab_size", TINY_VOCAB + 1, NULL, TINY_VOCAB), "token_embd");
    check_refused(lookup_spec(&of, "static_embedding.embedding_length", WIDTH + 1, NULL, TINY_VOCAB), "token_embd");
    check_refused(lookup_spec(&of, "static_embedding.context_length", 0, NULL, TINY_VOCAB), "context_length");
    check_refused(lookup_spec(&of, "mpool.ignored_token", TINY_VOCAB, NULL, TINY_VOCAB), "ignored_token");
    for (int i = 0; i < 3; i++) {
        static const int64_t bad[] = {5, -1, INT64_MAX};
        mapping[TINY_VOCAB - 1] = bad[i];
        check_refused(lookup_spec(&of, NULL, 0, mapping, 5), "token_embd.mapping");
    }
}

/* Each tensor has types of its own. The error names the type found. */
MP_TEST(models_lookup_refuses_types) {
    static const struct { const char *name, *allowed; mp_dtype dtype; const char *got; } cases[] = {
        {"token_embd.weight", "F32, F16, BF16 or I8", MP_I32, "I32"}, /* the bytes of each stay the same */
        {"token_embd.mapping", "I32 or I64", MP_F64, "F64"},
        {"token_embd.factor", "F32, F16, BF16 or F64", MP_I32, "I32"},
    };
    static int64_t mapping[TINY_VOCAB];
    const kind of = {true, false};
    mp_error error;
    mp_kernels_init();
    mp_spec *base = lookup_spec(&of, NULL, 0, mapping, TINY_VOCAB);
    MP_CHECK_OK(load_only(mp_spec_pin(base), MP_COMPUTE_AUTO, &error), &error);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int t = 0;
        while (strcmp(mp_spec_tensor_at(base, t)->name, cases[i].name) != 0)
            t++;
        mp_spec *spec = spec_copy(base, t, 0);
        mp_tensor_entry entry = *mp_spec_tensor_at(base, t);
        entry.dtype = cases[i].dtype;
        MP_CHECK_OK(mp_spec_add_tensor(spec, &entry, &error), &error);
        MP_CHECK_STATUS(load_only(spec, MP_COMPUTE_AUTO, &error), MP_FORMAT, &error);
        MP_CHECK_STR(error.field, cases[i].name);
        MP_CHECK_STR(error.allowed, cases[i].allowed);
        MP_CHECK_STR(error.got, cases[i].got);
    }
    mp_spec_unpin(base);
}

/* A table has at most 2^24 rows. The file has a hole, which takes no space. */
MP_TEST(models_lookup_most_rows) {
    enum { MAX = 1 << 24 };
    const kind of = {false, false};
    mp_error error;
    mp_kernels_init();
    for (int more = 0; more < 2; more++) {
        mp_spec *base = plain(&of), *spec = spec_copy(base, 0, 0);
        mp_tensor_entry entry = *mp_spec_tensor_at(base, 0);
        MP_CHECK_STR(entry.name, "token_embd.weight");
        entry.dtype = MP_I8;
        entry.shape[0] = MAX + more;
        entry.nbytes = (uint64_t)entry.shape[0] * WIDTH;
        MP_CHECK_INT(truncate(mp_spec_file(base, 0), (off_t)(entry.offset + entry.nbytes)), 0);
        MP_CHECK_OK(mp_spec_add_tensor(spec, &entry, &error), &error);
        MP_CHECK_STATUS(load_only(spec, MP_COMPUTE_AUTO, &error), more ? MP_FORMAT : MP_OK, &error);
        if (more)
            MP_CHECK(strcmp(error.allowed, "at most 16,777,216 rows") == 0 && strcmp(error.got, "16777217 rows") == 0);
        mp_spec_unpin(base);
    }
}

/* Requests share the time of a step: each gets an equal share of what is left, and the first one gets a text of any
 * length. The model has a speed estimate, which processes of the same model copy. */
MP_TEST(models_lookup_plan_shares_a_step) {
    enum { MANY = 40, FEW = 3, SHORT = 4, TOKEN_NS = 1000 };
    static const struct {
        int first, second, tokens, texts[2];
    } cases[] = {{MANY, MANY, 80, {10, 10}}, {MANY, FEW, 80, {10, FEW}}, {FEW, MANY, 80, {FEW, 17}},
                 {MANY, MANY, 200, {25, 25}}, {MANY, MANY, 14, {1, 2}}, {MANY, MANY, 1, {1, -1}}};
    static const int32_t ids[MANY * SHORT];
    int64_t offsets[MANY + 1];
    const kind of = {false, false};
    tiny_model tiny;
    mp_error error;
    uint64_t cost, speed[MP_MODEL_SPEEDS];
    tiny_load(&tiny, plain(&of), MP_COMPUTE_AUTO, 1);
    mp_model_get_speed(tiny.model, speed);
    MP_CHECK(speed[0] > 0);
    atomic_store(&((mp_lookup *)tiny.model)->token_ns, TOKEN_NS);
    mp_model_get_speed(tiny.model, speed);
    MP_CHECK_INT(speed[0], TOKEN_NS);
    for (int t = 0; t <= MANY; t++)
        offsets[t] = (int64_t)t * SHORT;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mp_item items[2] = {0}, *list[2] = {&items[0], &items[1]};
        mp_plan plan = {0};
        for (int k = 0; k < 2; k++) {
            mp_embedding_request *call;
            MP_CHECK_OK(make_embedding_request(k ? cases[i].second : cases[i].first, ids, offsets, NULL, &call, &error),
                        &error);
            items[k].request = &call->base;
            MP_CHECK_OK(tiny.model->ops->check(tiny.model, &call->base, &cost, &items[k].total, &error), &error);
            MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &items[k], &error), &error);
        }
        tiny.engine->ops->plan(tiny.engine, list, 2, (uint64_t)cases[i].tokens * TOKEN_NS, &plan);
        uint64_t planned = 0;
        for (int k = 0, at = 0; k < 2; k++) {
            const bool is_in = at < plan.count && plan.items[at] == list[k];
            MP_CHECK_INT(is_in ? (int)plan.amount[at] : -1, cases[i].texts[k]);
            planned += is_in ? plan.amount[at++] * SHORT : 0;
        }
        MP_CHECK_INT(plan.cost_ns, planned * TOKEN_NS);
        for (int k = 0; k < 2; k++) {
            tiny.engine->ops->retire(tiny.engine, list[k]);
            mp_request_destroy(items[k].request);
        }
    }
    tiny_unload(&tiny);
}

/* In a step of two requests, the cancelled one does not advance, and the other one gets its vectors. */
MP_TEST(models_lookup_cancelled_in_a_step) {
    static const int32_t ids[] = {1, 2};
    static const int64_t offsets[] = {0, 2};
    const kind of = {false, false};
    tiny_model tiny;
    mp_error error;
    mp_plan plan = {.count = 2};
    mp_item items[2] = {0};
    mp_outcome outcomes[MP_PLAN_MAX];
    tiny_load(&tiny, plain(&of), MP_COMPUTE_AUTO, 1);
    for (int i = 0; i < 2; i++) {
        mp_embedding_request *call;
        uint64_t cost;
        MP_CHECK_OK(make_embedding_request(1, ids, offsets, NULL, &call, &error), &error);
        items[i].request = &call->base;
        MP_CHECK_OK(tiny.model->ops->check(tiny.model, items[i].request, &cost, &items[i].total, &error), &error);
        MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &items[i], &error), &error);
        plan.items[i] = &items[i];
        plan.amount[i] = 1;
    }
    atomic_store(&items[0].cancelled, 1);
    float *untouched = ((mp_embedding_request *)items[0].request)->vectors;
    untouched[0] = 77;
    tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
    MP_CHECK(outcomes[0] == MP_OUTCOME_MORE && items[0].cursor == 0 && untouched[0] == 77);
    MP_CHECK(outcomes[1] == MP_OUTCOME_DONE && items[1].cursor == 1);
    for (int i = 0; i < 2; i++) {
        tiny.engine->ops->retire(tiny.engine, &items[i]);
        mp_request_destroy(items[i].request);
    }
    tiny_unload(&tiny);
}

/* A cancelled step ends within a text: a text can have a million tokens, on pages of a slow disk. */
MP_TEST(models_lookup_stops_within_a_text) {
    enum { TOKENS = 4096 };
    static int32_t ids[2 * TOKENS];
    static const _Atomic int cancelled = 1;
    _Atomic bool stop = false;
    float out[WIDTH];
    const kind of = {false, false};
    tiny_model tiny;
    tiny_load(&tiny, plain(&of), MP_COMPUTE_AUTO, 1);
    const mp_lookup *model = (const mp_lookup *)tiny.model;
    tiny.lease.cancelled = &cancelled;
    MP_CHECK(mp_lookup_vector(model, ids, TOKENS - 1, WIDTH, false, &tiny.lease, &stop, out) && !stop);
    MP_CHECK(mp_lookup_vector(model, ids, 2 * TOKENS, WIDTH, false, &tiny.lease, &stop, out) && stop);
    tiny.lease.cancelled = NULL;
    tiny_unload(&tiny);
}

/* The predicted memory: 4 bytes per id for each of the two tables beside the rows. Without a number of ids, or with one
 * that the load refuses, these tables count nothing. */
MP_TEST(models_lookup_footprint) {
    static const int64_t mapping[TINY_VOCAB];
    for (int tables = 0; tables <= 2; tables++) {
        const kind of = {.factors = tables > 0};
        mp_spec *spec = lookup_spec(&of, NULL, 0, tables > 1 ? mapping : NULL, TINY_VOCAB);
        mp_spec *without = spec_with(spec, "static_embedding.vocab_size", NULL);
        uint64_t model, engine;
        mp_lookup_footprint(spec, MP_COMPUTE_AUTO, &model, &engine);
        MP_CHECK_INT(model, (uint64_t)tables * TINY_VOCAB * sizeof(int32_t) + MP_WMAT_SLACK);
        MP_CHECK_INT(engine, 0); /* its requests need no scratch */
        const mp_value large = {.type = MP_VALUE_INT, .gguf_type = -1, .count = 1, .as.integer = (1 << 24) + 1};
        mp_spec *wrong = spec_with(spec, "static_embedding.vocab_size", &large);
        mp_lookup_footprint(without, MP_COMPUTE_AUTO, &model, &engine);
        MP_CHECK_INT(model, MP_WMAT_SLACK);
        mp_lookup_footprint(wrong, MP_COMPUTE_AUTO, &model, &engine);
        MP_CHECK_INT(model, MP_WMAT_SLACK);
        mp_spec_unpin(wrong);
        mp_spec_unpin(without);
        mp_spec_unpin(spec);
    }
}

/* With each allocation failing in turn, a load or a request fails with an error, and nothing leaks. */
static mp_status sweep_make(mp_request **call, mp_error *error) {
    static const int32_t ids[] = {9, 10, 11, 12, 13};
    static const int64_t offsets[] = {0, 2, 5};
    return make_embedding_request(2, ids, offsets, NULL, (mp_embedding_request **)(void *)call, error);
}

static void sweep_compare(const mp_request *first, const mp_request *second) {
    MP_CHECK(memcmp(((const mp_embedding_request *)first)->vectors, ((const mp_embedding_request *)second)->vectors,
                    2 * WIDTH * sizeof(float)) == 0);
}

MP_TEST_SECONDS(models_lookup_allocation_sweep, 60) {
    static const int64_t mapping[TINY_VOCAB];
    const kind of = {.factors = true};
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    tiny_life life = {.spec = lookup_spec(&of, NULL, 0, mapping, TINY_VOCAB), .compute = MP_COMPUTE_AUTO,
                      .make = sweep_make, .compare = sweep_compare};
    mp_test_alloc_sweep(tiny_live, &life);
    mp_spec_unpin(life.spec);
}

/* A step of 10 tokens takes 10,000 ns: 1,000 ns per token. */
MP_TEST(models_lookup_learns_the_exact_time) {
    static const int32_t ids[] = {9, 10, 11, 12, 13, 9, 10, 11, 12, 13};
    static const int64_t offsets[] = {0, 4, 10};
    const kind of = {false, false};
    tiny_model tiny;
    mp_item item = {0};
    mp_error error;
    uint64_t cost;
    mp_embedding_request *call;
    tiny_load(&tiny, plain(&of), MP_COMPUTE_AUTO, 1);
    MP_CHECK_OK(make_embedding_request(2, ids, offsets, NULL, &call, &error), &error);
    item.request = &call->base;
    MP_CHECK_OK(tiny.model->ops->check(tiny.model, item.request, &cost, &item.total, &error), &error);
    MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &item, &error), &error);
    check_learned(&((mp_lookup *)tiny.model)->token_ns, 8000, 10000, (7 * 8000 + 1000) / 8 + 1,
                  &(planned_step){&tiny, &item, 2, 0});
    tiny.engine->ops->retire(tiny.engine, &item);
    mp_request_destroy(item.request);
    tiny_unload(&tiny);
}
