/* decoder/load.c: loads a decoder from a spec: tensors, packed weights. decoder/hyper.c reads the hyper-parameters. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/options.h"
#include "models/decoder/drafting.h"
#include "models/decoder/images.h"
#include "models/decoder/load.h"
#include "models/decoder/mla.h"
#include "models/decoder/streams.h"

enum { MAX_VOCAB = 1 << 24, MAX_OUTPUTS = 1 << 16 /* components of a vector */ };

static void decoder_destroy(mp_model *base) {
    mp_decoder *model = (mp_decoder *)base;
    if (!model)
        return;
    if (model->draft)
        decoder_destroy(&model->draft->base.base);
    if (model->vision)
        mp_vision_destroy(model->vision);
    for (int i = 0; i < MP_ROPES; i++)
        mp_rope_deinit(&model->rope[i]);
    for (int i = 0; model->layers && i < model->layer_count; i++)
        mp_layer_deinit(&model->layers[i]);
    mp_weight_store_deinit(&model->store);
    mp_adapters_deinit(&model->adapters);
    mp_free(model->layers);
    mp_free(model->shapes);
    mp_free(model->layer_shapes);
    mp_free(model->kv_stores);
    mp_free(model->balance);
    mp_free(model->ones);
    mp_weights_close(model->weights);
    mp_free(model);
}

static bool decoder_healthy(const mp_model *base) {
    const mp_decoder *model = (const mp_decoder *)base;
    if (model->draft && !decoder_healthy(&model->draft->base.base))
        return false;
    return !mp_weight_store_corrupted(&model->store) && mp_weights_sound(model->weights);
}

static uint64_t decoder_bytes(const mp_model *base) {
    const mp_decoder *model = (const mp_decoder *)base;
    return mp_weight_store_bytes(&model->store) + (model->draft ? decoder_bytes(&model->draft->base.base) : 0);
}

static const mp_model_ops decoder_ops = {mp_decoder_engine, mp_decoder_check, decoder_healthy, decoder_bytes,
                                         decoder_destroy};

static mp_status read_output(mp_decoder *model, const mp_builder *builder, float norm_offset, mp_error *error) {
    const mp_weights *weights = model->weights;
    int64_t any[2] = {-1, model->hidden};
    MP_TRY(mp_weights_get(weights, "token_embd.weight", 2, any, &model->tokens, error));
    if (model->tokens.shape[0] > MAX_VOCAB)
        return mp_fail_file(error, MP_LIMIT, mp_spec_origin(mp_weights_spec(weights)), -1, "token_embd.weight",
                            "at most 16,777,216 rows", "%lld", (long long)model->tokens.shape[0]);
    model->vocab = (int32_t)model->tokens.shape[0];
    model->tied = !model->whole_prompts && !mp_weights_has(weights, "output.weight");
    if (!model->tied)
        model->store.parameters += mp_tensor_items(&model->tokens);
    if (model->whole_prompts) { /* the head projects to vectors */
        mp_tensor head;
        MP_TRY(mp_weights_get(weights, "output.weight", 2, any, &head, error));
        if (head.shape[0] > MAX_OUTPUTS)
            return mp_fail_file(error, MP_LIMIT, mp_spec_origin(mp_weights_spec(weights)), -1, "output.weight",
                                "at most 65,536 rows", "%lld", (long long)head.shape[0]);
        model->vocab = (int32_t)head.shape[0];
    }
    MP_TRY(mp_norm_read(&model->norm, builder, "output_norm", mp_decoder_norm(model, model->hidden),
                        mp_decoder_norm_bias(model), norm_offset, error));
    return mp_builder_linear(builder, &model->head, model->tied ? "token_embd.weight" : "output.weight", NULL,
                             model->vocab, model->hidden, error);
}

/* Reads the tensors of the layers' inputs (see mp_decoder.inputs). */
static mp_status read_inputs(mp_decoder *model, const mp_builder *builder, float norm_offset, mp_error *error) {
    static const char table[] = "per_layer_token_embd.weight", project[] = "per_layer_model_proj.weight";
    int64_t width, none = 0, shape[2] = {-1, 0};
    bool no = false;
    MP_TRY(mp_spec_int_capped(mp_weights_spec(model->weights), "{arch}.embedding_length_per_layer_input", 0,
                              INT32_MAX / MP_DECODER_LAYERS, &none, &width, error));
    if (width == 0)
        return MP_OK;
    shape[1] = width * model->layer_count;
    model->inputs.width = (int32_t)width;
    MP_TRY(mp_spec_bool(mp_weights_spec(model->weights), "mpool.plain_inputs", &no, &model->inputs.plain, error));
    if (model->inputs.plain && mp_weights_has(model->weights, table))
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s is not part of this architecture", table);
    if (!model->inputs.plain) {
        MP_TRY(mp_weights_get(model->weights, table, 2, shape, &model->inputs.table, error));
        model->store.parameters += mp_tensor_items(&model->inputs.table);
    }
    MP_TRY(mp_builder_linear(builder, &model->inputs.project, project, NULL, (int32_t)shape[1], model->hidden, error));
    MP_TRY(mp_adapters_add(&model->adapters, builder, &model->inputs.project, project, error));
    return mp_norm_read(&model->inputs.norm, builder, "per_layer_proj_norm",
                        mp_decoder_norm(model, model->inputs.width), mp_decoder_norm_bias(model), norm_offset, error);
}

static mp_status read_tokens(mp_decoder *model, const mp_spec *spec, mp_error *error) {
    const mp_token_table *tokens = mp_spec_tokens(spec);
    if (!tokens)
        return mp_fail(error, MP_INVALID_ARGUMENT, "a language model needs the bytes of its tokens: the spec has none");
    if (tokens->count > model->tokens.shape[0])
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "number of tokens",
                            "at most the rows of the token table", "%d of %lld", tokens->count,
                            (long long)model->tokens.shape[0]);
    /* rows beyond the tokens are untrained padding */
    model->sampled_vocab = tokens->count < model->vocab ? tokens->count : model->vocab;
    for (int32_t i = 0; i < tokens->count; i++) {
        uint64_t bytes = tokens->offsets[i + 1] - tokens->offsets[i];
        if (bytes > model->max_token_bytes)
            model->max_token_bytes = (uint32_t)bytes;
    }
    return MP_OK;
}

mp_status mp_decoder_load(const mp_load_args *args, mp_model **model, mp_error *error) {
    return mp_decoder_load_with(args, false, model, error);
}

/* floats: true if the layers compute in float32. */
static mp_status choose_kv_dtype(mp_decoder *model, const mp_spec *spec, bool floats, mp_error *error) {
    bool in_bytes;
    MP_TRY(mp_decoder_kv_in_bytes(spec, &in_bytes, error));
    const mp_kv_layout states = model->kv;
    model->kv = mp_kv_lay_out(model->kv_stores, states.count, mp_kv_dtype(floats, in_bytes));
    model->kv.state_bytes = states.state_bytes;
    model->kv.log_bytes = states.log_bytes;
    return model->kv.dtype == MP_I8 ? mp_decoder_balance(model, error) : MP_OK;
}

/* Sets the facts, and the speed that is assumed until a step is measured. `parameters` excludes those of an image
 * network. */
static void set_facts(mp_decoder *model, const mp_block_cost *cost, int64_t parameters, const char *compute) {
    enum { AROUND_LAYERS = 6 }; /* barriers before the first layer and after the last */
    const mp_weight_store *store = &model->store;
    const uint64_t mapped = store->mapped_bytes + cost->mapped;
    model->barriers = cost->barriers + AROUND_LAYERS;
    /* a row takes 1 us, and 1 ns per 256 parameters */
    atomic_init(&model->row_ns, (uint64_t)(parameters - cost->idle) / 256 + 1000);
    /* weights are read at 20 GB/s */
    atomic_init(&model->decode_ns, (store->slab_bytes + store->mapped_bytes) / 20 + 1);
    model->base.speed[0] = &model->row_ns;
    model->base.speed[1] = &model->decode_ns;
    model->base.facts = (mp_model_facts){
        .compute = compute,
        .kv_dtype = mp_kv_dtype_name(model->kv.dtype),
        .kv_token_bytes = mp_kv_token_bytes(&model->kv),
        .sequence_state_bytes = (int64_t)model->kv.state_bytes,
        .context_length = model->context,
        .vocab = model->vocab,
        .hidden_size = model->hidden,
        .layers = model->layer_count,
        .parameters = store->parameters,
        .weight_bytes = (int64_t)(store->slab_bytes + mapped),
    };
    mp_weight_store_facts(store, &model->base);
}

mp_status mp_decoder_load_with(const mp_load_args *args, bool images, mp_model **out, mp_error *error) {
    mp_status status;
    double norm_offset = 0;
    mp_builder builder;
    mp_decoder *model = mp_alloc_zeroed(sizeof *model, MP_TAG_WEIGHTS);
    if (!model)
        return mp_fail_memory(error, sizeof *model, "a model");
    model->base.base.ops = &decoder_ops;
    mp_progress_set(args->progress, "mapping", 0);
    MP_TRY_GOTO(mp_weights_open(args->spec, &model->weights, error));
    MP_TRY_GOTO(mp_decoder_read_hyper(model, args->spec, args->flags, error));
    MP_TRY_GOTO(mp_weights_check_biases(model->weights, "blk.", model->layer_count, error));
    mp_builder_init(&builder, &model->store, model->weights, args->compute);
    builder.shared = args->shared;
    MP_TRY_GOTO(mp_builder_read_use(&builder, error));
    builder.unpacked = MP_UNPACKED_EXACT;
    if (model->experts.count > 0)
        MP_TRY_GOTO(mp_experts_keep(&builder, error));
    /* nonzero for model folders whose norms multiply by 1 + weight */
    MP_TRY_GOTO(mp_spec_float(args->spec, "mpool.norm_offset", -1e3, 1e3, &norm_offset, &norm_offset, error));
    MP_TRY_GOTO(read_output(model, &builder, (float)norm_offset, error));
    MP_TRY_GOTO(read_tokens(model, args->spec, error));
    if (mp_spec_draft(args->spec))
        MP_TRY_GOTO(mp_draft_model_check(args->spec, error));
    model->layers = mp_alloc_array((size_t)model->layer_count, sizeof *model->layers, MP_TAG_WEIGHTS);
    if (!model->layers) {
        status = mp_fail_memory(error, (uint64_t)model->layer_count * sizeof *model->layers, "the layers");
        goto cleanup;
    }
    MP_TRY_GOTO(mp_adapters_open(&model->adapters, args->spec, error));
    MP_TRY_GOTO(read_inputs(model, &builder, (float)norm_offset, error));
    MP_TRY_GOTO(mp_streams_read_model(model, &builder, error));
    MP_TRY_GOTO(mp_decoder_compose(model, &builder, args, (float)norm_offset, error));
    MP_TRY_GOTO(mp_adapters_check(&model->adapters, args->spec, error));
    MP_TRY_GOTO(mp_decoder_read_layers(model, args, error));
    const int64_t parameters = model->store.parameters;
    if (images)
        MP_TRY_GOTO(mp_vision_read(args, &builder, model->hidden, model->layer_count, &model->vision, error));
    MP_TRY_GOTO(mp_builder_finish(&builder, args->lease, args->budget, args->progress, error));
    if (builder.use == MP_WEIGHTS_PACKED)
        mp_decoder_pack_experts(model, args->lease, args->progress);
    MP_TRY_GOTO(mp_weights_check_poisoned(model->weights, error));
    const mp_block_cost cost = mp_decoder_cost(model);
    bool floats = cost.rounded == 0;
    MP_TRY_GOTO(choose_kv_dtype(model, args->spec, floats, error));
    floats = floats && (!images || mp_vision_is_float32(model->vision));
    set_facts(model, &cost, parameters, floats ? "float32" : mp_compute_name(args->compute));
    if (mp_spec_draft(args->spec)) {
        MP_TRY_GOTO(mp_draft_model_load(args, &model->draft, error));
        model->base.facts.draft_bytes = model->draft->base.facts.weight_bytes;
    }
    *out = &model->base.base;
    model = NULL;
cleanup:
    decoder_destroy((mp_model *)model);
    return status;
}

/* How load uses a tensor, for the predictions below. */
typedef enum tensor_use {
    NOT_PACKED, /* stays in the file, belongs to the image network, or is no matrix */
    OF_ADAPTER, /* packed by mp_adapters_add */
    OF_LATENTS, /* packed by decoder/mla.c as floats */
    ROUTER,     /* packed as fp32 by mp_experts_init */
    OF_LAYERS,  /* a matrix of the layers or the head, which load adds with MP_UNPACKED_EXACT */
} tensor_use;

static tensor_use use_of(const mp_spec *spec, const mp_tensor_entry *entry) {
    const bool table = strcmp(entry->name, "per_layer_token_embd.weight") == 0 ||
                       (strcmp(entry->name, "token_embd.weight") == 0 && mp_spec_find_tensor(spec, "output.weight"));
    if (mp_is_companion(entry->name))
        return NOT_PACKED;
    if (mp_adapter_footprint(entry) > 0)
        return OF_ADAPTER;
    if (mp_mla_is_latent(entry->name))
        return OF_LATENTS;
    if (entry->ndim != 2 || table || mp_decoder_images_own(entry->name) || mp_expert_owns(entry->name))
        return NOT_PACKED;
    return strstr(entry->name, ".ffn_gate_inp.") ? ROUTER : OF_LAYERS;
}

static bool is_of_layers(const mp_spec *spec, const mp_tensor_entry *entry) { return use_of(spec, entry) == OF_LAYERS; }

mp_matrices mp_decoder_predict_weights(const mp_spec *spec, mp_compute compute) {
    return mp_weights_predict(spec, compute, MP_UNPACKED_EXACT, is_of_layers);
}

/* Predicts the bytes of a matrix of the layers or the head, or of a router, in packed order; 0 if the matrix is never
 * packed, or if the load will fail. */
static uint64_t packed_bytes(const mp_tensor_entry *entry, mp_compute compute, mp_unpacked unpacked,
                             mp_weights_use use) {
    mp_wkind kind;
    mp_wmat w;
    if (entry->shape[0] > INT32_MAX || entry->shape[1] > INT32_MAX ||
        !mp_wmat_kind_for(entry->dtype, compute, &kind) ||
        (use == MP_WEIGHTS_MAPPED && mp_may_stay_unpacked(unpacked, use, entry->dtype, kind)))
        return 0;
    mp_wmat_init(&w, kind, (int32_t)entry->shape[0], (int32_t)entry->shape[1]);
    return mp_wmat_bytes(&w);
}

/* Predicts the memory of the state of a sequence. */
static uint64_t state_memory(const mp_spec *spec) {
    mp_kv_arena arena;
    mp_kv_arena_init(&arena, mp_decoder_state_bytes(spec), NULL);
    return arena.region_bytes ? arena.region_bytes : arena.slot_bytes;
}

/* Predicts the KV cache of the first request, which fits into one block: two regions of pages (generation/kv_arena.h),
 * because layers with a sliding window have regions of their own. Adds 64 bytes per token of the vocabulary for logits
 * and the scratch of the sampler. */
static uint64_t cache_bytes(const mp_spec *spec) {
    int64_t layers, heads, all_heads, hidden, dim, one = 1;
    mp_error error;
    const mp_tensor_entry *table = mp_spec_find_tensor(spec, "token_embd.weight");
    uint64_t logits = table && table->ndim == 2 ? (uint64_t)table->shape[0] * 64 : 0, block = 0;
    if (mp_spec_int(spec, "{arch}.block_count", 1, 1 << 16, NULL, &layers, &error) == MP_OK &&
        mp_spec_int(spec, "{arch}.embedding_length", 1, 1 << 20, NULL, &hidden, &error) == MP_OK &&
        mp_spec_int(spec, "{arch}.attention.head_count", 1, 1 << 16, &one, &all_heads, &error) == MP_OK) {
        if (mp_spec_int(spec, "{arch}.attention.head_count_kv", 1, 1 << 16, &all_heads, &heads, &error) != MP_OK)
            heads = all_heads; /* one number per layer */
        const int64_t equal = hidden / all_heads;
        if (mp_spec_int(spec, "{arch}.attention.key_length", 1, 1 << 16, &equal, &dim, &error) != MP_OK)
            dim = equal;
        block = (uint64_t)(layers * heads * dim) * 2 * MP_KV_BLOCK * sizeof(int16_t);
    }
    return logits + 2 * ((block + MP_HUGE_PAGE - 1) / MP_HUGE_PAGE) * MP_HUGE_PAGE + state_memory(spec);
}

void mp_decoder_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes) {
    uint64_t bytes = 0;
    const mp_weights_use use = mp_weights_use_or_auto(spec);
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const mp_tensor_entry *entry = mp_spec_tensor_at(spec, i);
        switch (use_of(spec, entry)) {
        case NOT_PACKED:
            break;
        case OF_ADAPTER:
            bytes += mp_adapter_footprint(entry);
            break;
        case OF_LATENTS:
            bytes += mp_mla_footprint(entry, compute);
            break;
        case ROUTER:
            bytes += packed_bytes(entry, MP_COMPUTE_F32, MP_UNPACKED_NONE, use);
            break;
        case OF_LAYERS:
            bytes += packed_bytes(entry, compute, MP_UNPACKED_EXACT, use);
            break;
        }
    }
    *model_bytes = bytes + MP_WMAT_SLACK;
    *engine_bytes = mp_first_request_bytes(spec) + cache_bytes(spec);
    if (mp_spec_draft(spec)) {
        uint64_t draft_bytes, scratch_bytes; /* the engine uses its scratch for the passes of both models */
        mp_decoder_footprint(mp_spec_draft(spec), compute, &draft_bytes, &scratch_bytes);
        *model_bytes += draft_bytes;
    }
}
