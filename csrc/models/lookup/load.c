/* lookup/load.c: loads a static embedding from a spec. The table stays in the mapped file. */
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "kernels/kernels.h"
#include "models/lookup/lookup.h"
#include "models/nn/linear.h"

enum { MAX_WIDTH = 65536, MAX_CONTEXT = 1 << 20, MAX_VOCAB = 1 << 24 };

static void lookup_destroy(mp_model *base) {
    mp_lookup *model = (mp_lookup *)base;
    if (!model)
        return;
    mp_free(model->mapping);
    mp_free(model->factors);
    mp_weight_store_deinit(&model->store);
    mp_budget_give(model->budget, model->charged);
    mp_weights_close(model->weights);
    mp_free(model);
}

static bool lookup_healthy(const mp_model *base) { return mp_weights_sound(((const mp_lookup *)base)->weights); }

static uint64_t lookup_bytes(const mp_model *base) {
    const mp_lookup *model = (const mp_lookup *)base;
    return model->charged + mp_weight_store_bytes(&model->store);
}

static const mp_model_ops lookup_ops = {mp_lookup_engine, mp_lookup_check, lookup_healthy, lookup_bytes,
                                        lookup_destroy};

/* `unit` follows the number. */
static mp_status lookup_refuse(const mp_lookup *model, const char *tensor, const char *allowed, long long got,
                               const char *unit, mp_error *error) {
    return mp_fail_file(error, MP_FORMAT, mp_spec_origin(mp_weights_spec(model->weights)), -1, tensor, allowed,
                        "%lld%s", got, unit);
}

static mp_status refuse_type(const mp_lookup *model, const char *name, const char *allowed, mp_dtype found,
                             mp_error *error) {
    return mp_fail_file(error, MP_FORMAT, mp_spec_origin(mp_weights_spec(model->weights)), -1, name, allowed, "%s",
                        mp_dtype_get(found)->name);
}

static mp_status read_numbers(mp_lookup *model, const mp_spec *spec, mp_error *error) {
    const int64_t none = -1;
    const bool plain = false;
    int64_t dim, context, vocab, ignored;
    MP_TRY(mp_spec_int(spec, "{arch}.embedding_length", 1, MAX_WIDTH, NULL, &dim, error));
    MP_TRY(mp_spec_int(spec, "{arch}.context_length", 1, MAX_CONTEXT, NULL, &context, error));
    MP_TRY(mp_spec_int(spec, "{arch}.vocab_size", 1, MAX_VOCAB, NULL, &vocab, error));
    MP_TRY(mp_spec_int(spec, "mpool.ignored_token", -1, vocab - 1, &none, &ignored, error));
    MP_TRY(mp_spec_bool(spec, "mpool.normalize", &plain, &model->normalize, error));
    model->dim = (int32_t)dim;
    model->context = (int32_t)context;
    model->vocab = (int32_t)vocab;
    model->ignored = (int32_t)ignored;
    return MP_OK;
}

/* Takes `bytes` from the budget and allocates them. */
static mp_status lookup_reserve(mp_lookup *model, mp_budget *budget, uint64_t bytes, void **out, mp_error *error) {
    if (!mp_budget_take(budget, bytes))
        return mp_fail_memory(error, bytes, "the mapping and factors of tokens");
    model->charged += bytes;
    *out = mp_alloc(bytes, MP_TAG_WEIGHTS);
    return *out ? MP_OK : mp_fail_memory(error, bytes, "the mapping and factors of tokens");
}

static mp_status read_mapping(mp_lookup *model, mp_budget *budget, mp_error *error) {
    static const char name[] = "token_embd.mapping";
    const int64_t shape[1] = {model->vocab}, rows = model->table.shape[0];
    mp_tensor tensor;
    if (!mp_weights_has(model->weights, name))
        return rows >= model->vocab ? MP_OK
                                    : lookup_refuse(model, "token_embd.weight", "a row for each token", rows, " rows",
                                                    error);
    MP_TRY(mp_weights_get_any(model->weights, name, 1, shape, &tensor, error));
    if (tensor.dtype != MP_I32 && tensor.dtype != MP_I64)
        return refuse_type(model, name, "I32 or I64", tensor.dtype, error);
    void *memory;
    MP_TRY(lookup_reserve(model, budget, (uint64_t)model->vocab * sizeof(int32_t), &memory, error));
    model->mapping = memory;
    for (int32_t t = 0; t < model->vocab; t++) {
        int64_t row;
        int32_t narrow;
        if (tensor.dtype == MP_I64) {
            memcpy(&row, tensor.data + (size_t)t * sizeof row, sizeof row);
        } else {
            memcpy(&narrow, tensor.data + (size_t)t * sizeof narrow, sizeof narrow);
            row = narrow;
        }
        if (row < 0 || row >= rows)
            return lookup_refuse(model, name, "rows of token_embd.weight", row, "", error);
        model->mapping[t] = (int32_t)row;
    }
    return MP_OK;
}

static mp_status read_factors(mp_lookup *model, mp_budget *budget, mp_error *error) {
    static const char name[] = "token_embd.factor";
    const int64_t shape[1] = {model->vocab};
    mp_tensor tensor;
    if (!mp_weights_has(model->weights, name))
        return MP_OK;
    MP_TRY(mp_weights_get_any(model->weights, name, 1, shape, &tensor, error));
    const bool wide = tensor.dtype == MP_F64;
    if (!wide && tensor.dtype != MP_F32 && tensor.dtype != MP_F16 && tensor.dtype != MP_BF16)
        return refuse_type(model, name, "F32, F16, BF16 or F64", tensor.dtype, error);
    void *memory;
    MP_TRY(lookup_reserve(model, budget, (uint64_t)model->vocab * sizeof(float), &memory, error));
    model->factors = memory;
    if (!wide)
        mp_dequantize_row(tensor.dtype, tensor.data, model->vocab, model->factors);
    for (int32_t t = 0; wide && t < model->vocab; t++) {
        double factor;
        memcpy(&factor, tensor.data + (size_t)t * sizeof factor, sizeof factor);
        model->factors[t] = (float)factor;
    }
    for (int32_t t = 0; t < model->vocab; t++)
        if (!mp_kernels_get()->all_finite(model->factors + t, 1))
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(mp_weights_spec(model->weights)), -1, name,
                                "finite numbers", "NaN or infinity for token %d", t);
    return MP_OK;
}

mp_status mp_lookup_load(const mp_load_args *args, mp_model **out, mp_error *error) {
    mp_status status;
    mp_builder builder;
    mp_lookup *model = mp_alloc_zeroed(sizeof *model, MP_TAG_WEIGHTS);
    if (!model)
        return mp_fail_memory(error, sizeof *model, "a model");
    model->base.base.ops = &lookup_ops;
    model->budget = args->budget;
    mp_progress_set(args->progress, "mapping", 0);
    MP_TRY_GOTO(mp_weights_open(args->spec, &model->weights, error));
    MP_TRY_GOTO(read_numbers(model, args->spec, error));
    const int64_t shape[2] = {-1, model->dim};
    MP_TRY_GOTO(mp_weights_get_any(model->weights, "token_embd.weight", 2, shape, &model->table, error));
    const mp_dtype dtype = model->table.dtype;
    if (dtype != MP_F32 && dtype != MP_F16 && dtype != MP_BF16 && dtype != MP_I8) {
        status = refuse_type(model, "token_embd.weight", "F32, F16, BF16 or I8", dtype, error);
        goto cleanup;
    }
    if (model->table.shape[0] > MAX_VOCAB) {
        status = lookup_refuse(model, "token_embd.weight", "at most 16,777,216 rows", model->table.shape[0], " rows",
                               error);
        goto cleanup;
    }
    MP_TRY_GOTO(read_mapping(model, args->budget, error));
    MP_TRY_GOTO(read_factors(model, args->budget, error));
    /* packs nothing, but makes the shared memory that worker processes expect of every model */
    mp_builder_init(&builder, &model->store, model->weights, MP_COMPUTE_F32);
    builder.shared = args->shared;
    MP_TRY_GOTO(mp_builder_finish(&builder, args->lease, args->budget, args->progress, error));
    atomic_init(&model->token_ns, (uint64_t)model->dim / 8 + 20);
    model->base.speed[0] = &model->token_ns;
    model->base.facts = (mp_model_facts){
        .compute = mp_compute_name(MP_COMPUTE_F32),
        .weights = MP_MATRICES_MAPPED,
        .context_length = model->context,
        .vocab = model->vocab,
        .hidden_size = model->dim,
        .output_size = model->dim,
        .parameters = mp_tensor_items(&model->table),
        .weight_bytes = (int64_t)model->table.nbytes,
    };
    *out = &model->base.base;
    model = NULL;
cleanup:
    lookup_destroy((mp_model *)model);
    return status;
}

mp_matrices mp_lookup_predict_weights(const mp_spec *spec, mp_compute compute) {
    (void)spec, (void)compute;
    return MP_MATRICES_MAPPED;
}

void mp_lookup_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes) {
    (void)compute;
    int64_t vocab = 0; /* if the size is absent or wrong: the load will fail */
    mp_error error;
    mp_spec_int(spec, "{arch}.vocab_size", 0, MAX_VOCAB, NULL, &vocab, &error);
    const int arrays = (mp_spec_find_tensor(spec, "token_embd.mapping") != NULL) +
                       (mp_spec_find_tensor(spec, "token_embd.factor") != NULL);
    *model_bytes = (uint64_t)vocab * sizeof(int32_t) * (uint64_t)arrays + MP_WMAT_SLACK;
    *engine_bytes = 0;
}
