/* model.c: creates a pipeline from a spec: checks the networks' hyper-parameters and every tensor. Reads no weights. */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h> /* snprintf only */
#include <string.h>

#include "models/diffusion/diffusion.h"

enum { MAX_LAYERS = 512, MAX_WIDTH = 65536, MAX_LENGTH = 4096, MAX_VOCAB = 1 << 24, MAX_SIDE = 4096 };

static void diffusion_destroy(mp_model *base) {
    mp_diffusion *model = (mp_diffusion *)base;
    if (!model)
        return;
    mp_free(model->dual);
    mp_free(model->ops);
    mp_weights_close(model->weights);
    mp_free(model);
}

static bool diffusion_healthy(const mp_model *base) {
    return mp_weights_sound(((const mp_diffusion *)base)->weights);
}

/* The model itself holds no weights: each engine builds its own. */
static uint64_t diffusion_bytes(const mp_model *base) {
    (void)base;
    return 0;
}

static const mp_model_ops diffusion_ops = {mp_diff_engine, mp_diff_check, diffusion_healthy, diffusion_bytes,
                                           diffusion_destroy};

/* ---- hyper-parameters -------------------------------------------------------------------------------------------- */

static mp_status diffusion_fact(const mp_spec *spec, const char *part, const char *name, int64_t low, int64_t high,
                                int32_t *out, mp_error *error) {
    char key[64];
    int64_t value;
    snprintf(key, sizeof key, "%s.%s", part, name);
    MP_TRY(mp_spec_int_capped(spec, key, low, high, NULL, &value, error));
    *out = (int32_t)value;
    return MP_OK;
}

static mp_status diffusion_number(const mp_spec *spec, const char *part, const char *name, float *out,
                                  mp_error *error) {
    char key[64];
    double value;
    snprintf(key, sizeof key, "%s.%s", part, name);
    MP_TRY(mp_spec_float(spec, key, -1e6, 1e6, NULL, &value, error));
    *out = (float)value;
    return MP_OK;
}

/* Refuses value `name` of a network that does not fit the other values. `what` follows the number: "" or what it
 * counts. */
static mp_status diffusion_refuse(const mp_spec *spec, const char *part, const char *name, const char *allowed,
                                  int64_t got, const char *what, mp_error *error) {
    char field[64];
    snprintf(field, sizeof field, "%s.%s", part, name);
    return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, field, allowed, "%lld%s", (long long)got, what);
}

static mp_status check_heads(const mp_spec *spec, const char *part, int32_t heads, int32_t head_dim, mp_error *error) {
    if (head_dim % 8)
        return diffusion_refuse(spec, part, "head_length", "a multiple of 8", head_dim, "", error);
    if ((int64_t)heads * head_dim > MAX_WIDTH)
        return diffusion_refuse(spec, part, "head_count", "heads of at most 65,536 components together",
                                (int64_t)heads * head_dim, " components", error);
    return MP_OK;
}

static mp_status read_encoder(mp_diffusion *model, const mp_spec *spec, int which, mp_error *error) {
    mp_diff_encoder *e = &model->encoder[which];
    const char *part = mp_diff_stage_name(which);
    char name[64];
    snprintf(name, sizeof name, "%s.block_count", part);
    if (!mp_spec_find(spec, name))
        return MP_OK;
    mp_attention *shape = &e->attention;
    mp_embedding *embedding = &e->embedding;
    e->t5 = which == MP_DIFF_T5;
    MP_TRY(diffusion_fact(spec, part, "block_count", 1, MAX_LAYERS, &e->layers, error));
    MP_TRY(diffusion_fact(spec, part, "embedding_length", 1, MAX_WIDTH, &e->hidden, error));
    MP_TRY(diffusion_fact(spec, part, "head_count", 1, MAX_WIDTH, &shape->heads, error));
    MP_TRY(diffusion_fact(spec, part, "head_length", 8, MAX_WIDTH, &shape->head_dim, error));
    MP_TRY(diffusion_fact(spec, part, "feed_forward_length", 1, MAX_WIDTH, &e->ffn, error));
    MP_TRY(diffusion_fact(spec, part, "context_length", 1, MAX_LENGTH, &e->length, error));
    MP_TRY(diffusion_number(spec, part, "norm_epsilon", &e->eps, error));
    snprintf(name, sizeof name, "%s.activation", part);
    MP_TRY(mp_model_activation(spec, name, NULL, &e->act, error));
    MP_TRY(check_heads(spec, part, shape->heads, shape->head_dim, error));
    if (!e->t5 && shape->heads * shape->head_dim != e->hidden)
        return diffusion_refuse(spec, part, "head_count", "heads of embedding_length components together",
                                shape->heads * shape->head_dim, " components", error);
    shape->kv_heads = shape->heads;
    shape->scale = e->t5 ? 1 : 1 / sqrtf((float)shape->head_dim);
    shape->causal = !e->t5;
    embedding->n = e->hidden;
    embedding->scale = 1;
    int64_t any[2] = {-1, e->hidden}, positions[2] = {e->length, e->hidden};
    snprintf(name, sizeof name, "%s.tokens", part);
    MP_TRY(mp_weights_get(model->weights, name, 2, any, &embedding->tokens, error));
    if (embedding->tokens.shape[0] > MAX_VOCAB)
        return mp_fail(error, MP_LIMIT, "%s must have at most %d tokens, got %lld", part, MAX_VOCAB,
                       (long long)embedding->tokens.shape[0]);
    e->vocab = (int32_t)embedding->tokens.shape[0];
    if (!e->t5) {
        MP_TRY(diffusion_fact(spec, part, "projection_length", 0, MAX_WIDTH, &e->projection, error));
        MP_TRY(diffusion_fact(spec, part, "end_token", -1, MAX_VOCAB, &e->end, error));
        snprintf(name, sizeof name, "%s.positions", part);
        return mp_weights_get(model->weights, name, 2, positions, &embedding->positions, error);
    }
    int32_t buckets;
    MP_TRY(diffusion_fact(spec, part, "relative_buckets", 4, 4096, &buckets, error));
    MP_TRY(diffusion_fact(spec, part, "relative_distance", buckets, 1 << 20, &e->reach, error));
    if (buckets % 4)
        return diffusion_refuse(spec, part, "relative_buckets", "a multiple of 4", buckets, "", error);
    const int64_t shape_of_table[2] = {buckets, shape->heads};
    return mp_weights_get(model->weights, "t5.relative", 2, shape_of_table, &e->relative, error);
}

static mp_status read_transformer(mp_diffusion *model, const mp_spec *spec, mp_error *error) {
    static const char part[] = "transformer";
    const bool yes = true, no = false;
    MP_TRY(diffusion_fact(spec, part, "block_count", 1, MAX_LAYERS, &model->joint_layers, error));
    MP_TRY(diffusion_fact(spec, part, "single_block_count", 0, MAX_LAYERS, &model->single_layers, error));
    MP_TRY(diffusion_fact(spec, part, "head_count", 1, MAX_WIDTH, &model->heads, error));
    MP_TRY(diffusion_fact(spec, part, "head_length", 8, MAX_WIDTH, &model->head_dim, error));
    MP_TRY(diffusion_fact(spec, part, "channels", 1, 1024, &model->channels, error));
    MP_TRY(diffusion_fact(spec, part, "text_length", 1, MAX_WIDTH, &model->text_width, error));
    MP_TRY(diffusion_fact(spec, part, "pooled_length", 1, MAX_WIDTH, &model->pooled_width, error));
    MP_TRY(mp_spec_bool(spec, "transformer.guidance", &no, &model->guidance, error));
    MP_TRY(mp_spec_bool(spec, "transformer.qk_norm", &yes, &model->qk_norm, error));
    MP_TRY(check_heads(spec, part, model->heads, model->head_dim, error));
    model->hidden = model->heads * model->head_dim;
    model->dual = mp_alloc_array((size_t)model->joint_layers, sizeof *model->dual, MP_TAG_WEIGHTS);
    if (!model->dual)
        return mp_fail_memory(error, (uint64_t)model->joint_layers, "a list of layers");
    if (model->flux) {
        int64_t axes[MP_DIFF_AXES];
        MP_TRY(mp_spec_ints(spec, "transformer.axes", MP_DIFF_AXES, 2, model->head_dim, NULL, axes, error));
        int64_t sum = 0;
        for (int i = 0; i < MP_DIFF_AXES; i++) {
            sum += axes[i];
            model->axes[i] = (int32_t)axes[i];
            if (axes[i] % 2)
                return diffusion_refuse(spec, part, "axes", "even numbers", axes[i], "", error);
        }
        return sum == model->head_dim
                   ? MP_OK
                   : diffusion_refuse(spec, part, "axes", "numbers that add up to head_length", sum, " in all", error);
    }
    MP_TRY(diffusion_fact(spec, part, "position_side", 1, MAX_SIDE, &model->position_side, error));
    if (model->single_layers || model->guidance)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, part,
                            "neither single blocks nor guidance, except for FLUX", "%d single blocks%s",
                            model->single_layers, model->guidance ? " and guidance" : "");
    const mp_value *dual = mp_spec_find(spec, "transformer.dual_layers");
    for (uint64_t i = 0; dual && dual->type == MP_VALUE_INTS && i < dual->count; i++)
        if (dual->as.integers[i] >= 0 && dual->as.integers[i] < model->joint_layers)
            model->dual[dual->as.integers[i]] = true;
    int64_t shape[2] = {(int64_t)model->position_side * model->position_side, model->hidden};
    return mp_weights_get(model->weights, "transformer.positions", 2, shape, &model->positions, error);
}

static void add_op(mp_diffusion *model, mp_vae_kind kind, int32_t in, int32_t out, bool doubled, const char *format,
                   int i, int j) {
    mp_vae_op *op = &model->ops[model->op_count++];
    *op = (mp_vae_op){.kind = kind, .in = in, .out = out, .doubled = doubled};
    char tail[40];
    snprintf(tail, sizeof tail, format, i, j);
    snprintf(op->name, sizeof op->name, "vae.%s", tail);
}

static mp_status read_decoder(mp_diffusion *model, const mp_spec *spec, mp_error *error) {
    int64_t widths[MP_DIFF_LEVELS];
    int32_t layers;
    const bool yes = true;
    bool attention;
    const mp_value *list = mp_spec_find(spec, "vae.channels");
    if (!list || list->type != MP_VALUE_INTS || list->count < 1 || list->count > MP_DIFF_LEVELS)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "vae.channels", "an array of 1 to 8 integers",
                            !list                          ? "missing"
                            : list->type != MP_VALUE_INTS ? "another type"
                                                           : "an array of %llu",
                            (unsigned long long)(list ? list->count : 0));
    model->levels = (int32_t)list->count;
    MP_TRY(mp_spec_ints(spec, "vae.channels", model->levels, 8, 8192, NULL, widths, error));
    MP_TRY(diffusion_fact(spec, "vae", "layers", 1, 64, &layers, error));
    MP_TRY(diffusion_fact(spec, "vae", "groups", 1, 8192, &model->group_count, error));
    MP_TRY(diffusion_number(spec, "vae", "scaling_factor", &model->latent_scale, error));
    MP_TRY(diffusion_number(spec, "vae", "shift_factor", &model->latent_shift, error));
    MP_TRY(mp_spec_bool(spec, "vae.attention", &yes, &attention, error));
    const int32_t top = (int32_t)widths[model->levels - 1];
    for (int i = 0; i < model->levels; i++)
        if (widths[i] % model->group_count)
            return diffusion_refuse(spec, "vae", "groups", "a divisor of every number in vae.channels",
                                    model->group_count, "", error);
    if (!(model->latent_scale > 0))
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "vae", "a scaling_factor above 0", "%g",
                            (double)model->latent_scale);
    if (attention && top % 8)
        return diffusion_refuse(spec, "vae", "channels",
                                "a multiple of 8 as the last number, because vae.attention is true", top, "",
                                error);
    const int32_t count = 5 + model->levels * (layers + 2);
    model->ops = mp_alloc_array((size_t)count, sizeof *model->ops, MP_TAG_WEIGHTS);
    if (!model->ops)
        return mp_fail_memory(error, (uint64_t)count * sizeof *model->ops, "the steps of a decoder");
    add_op(model, MP_VAE_CONV, model->channels, top, false, "conv_in", 0, 0);
    add_op(model, MP_VAE_RESIDUAL, top, top, false, "mid.resnets.%d", 0, 0);
    if (attention)
        add_op(model, MP_VAE_ATTENTION, top, top, false, "mid.attention", 0, 0);
    add_op(model, MP_VAE_RESIDUAL, top, top, false, "mid.resnets.%d", 1, 0);
    int32_t width = top;
    for (int i = 0; i < model->levels; i++) {
        const int32_t out = (int32_t)widths[model->levels - 1 - i];
        for (int32_t j = 0; j <= layers; j++, width = out)
            add_op(model, MP_VAE_RESIDUAL, width, out, false, "up.%d.resnets.%d", i, j);
        if (i < model->levels - 1)
            add_op(model, MP_VAE_CONV, out, out, true, "up.%d.conv", i, 0);
    }
    add_op(model, MP_VAE_END, width, 3, false, "end", 0, 0);
    return MP_OK;
}

/* Refuses a size of a text encoder. `value` is allowed; the words before and after it say which value it is. */
static mp_status refuse_encoder(const mp_spec *spec, const char *part, const char *name, const char *before,
                                int32_t value, const char *after, int64_t got, const char *what, mp_error *error) {
    char allowed[96];
    snprintf(allowed, sizeof allowed, "%s%d%s", before, value, after);
    return diffusion_refuse(spec, part, name, allowed, got, what, error);
}

/* Check that the pipeline has the text encoders that the transformer needs, and that their widths fit it. */
static mp_status check_fit(const mp_diffusion *model, const mp_spec *spec, mp_error *error) {
    static const char field[] = "text encoders";
    const mp_diff_encoder *l = &model->encoder[MP_DIFF_CLIP_L], *g = &model->encoder[MP_DIFF_CLIP_G],
                          *t5 = &model->encoder[MP_DIFF_T5];
    if (!l->layers || (model->flux ? !t5->layers || g->layers : !g->layers))
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, field,
                            model->flux ? "clip_l and t5" : "clip_l and clip_g, with or without t5",
                            "clip_l: %s, clip_g: %s, t5: %s", l->layers ? "yes" : "no", g->layers ? "yes" : "no",
                            t5->layers ? "yes" : "no");
    if (t5->layers && t5->hidden != model->text_width)
        return refuse_encoder(spec, "t5", "embedding_length", "", model->text_width, " (transformer.text_length)",
                              t5->hidden, "", error);
    if (model->flux)
        return l->hidden == model->pooled_width
                   ? MP_OK
                   : refuse_encoder(spec, "clip_l", "embedding_length", "", model->pooled_width,
                                    " (transformer.pooled_length)", l->hidden, "", error);
    if (l->length != g->length)
        return refuse_encoder(spec, "clip_g", "context_length", "", l->length, ", as clip_l", g->length, "", error);
    if (l->hidden + g->hidden > model->text_width)
        return refuse_encoder(spec, "clip_g", "embedding_length", "at most ", model->text_width,
                              " (transformer.text_length) with that of clip_l", l->hidden + g->hidden,
                              " with that of clip_l", error);
    if (!l->projection || !g->projection || l->projection + g->projection != model->pooled_width)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, field,
                            "projections of clip_l and clip_g that add up to transformer.pooled_length",
                            "%d and %d for %d", l->projection, g->projection, model->pooled_width);
    return MP_OK;
}

/* Check that the layers of each network have the same biases, because mp_diff_linear reads a bias only if the file has
 * it. The decoder's only optional biases are those of its one attention. */
static mp_status check_biases(const mp_diffusion *model, mp_error *error) {
    const struct {
        const char *prefix;
        int32_t layers;
    } lists[] = {{"clip_l.layers.", model->encoder[MP_DIFF_CLIP_L].layers},
                 {"clip_g.layers.", model->encoder[MP_DIFF_CLIP_G].layers},
                 {"t5.block.", model->encoder[MP_DIFF_T5].layers},
                 {"transformer.joint.", model->joint_layers},
                 {"transformer.single.", model->single_layers}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        MP_TRY(mp_weights_check_biases(model->weights, lists[i].prefix, lists[i].layers, error));
    return MP_OK;
}

/* Returns the number of values of the tables that are used in their files. */
static int64_t table_items(const mp_diffusion *model) {
    int64_t items = model->positions.data ? mp_tensor_items(&model->positions) : 0;
    for (int s = 0; s < MP_DIFF_ENCODERS; s++) {
        const mp_diff_encoder *e = &model->encoder[s];
        const mp_tensor *const tables[] = {&e->embedding.tokens, &e->embedding.positions, &e->relative};
        for (int i = 0; i < 3; i++)
            items += tables[i]->data ? mp_tensor_items(tables[i]) : 0;
    }
    return items;
}

static mp_status check_blocks(mp_diffusion *model, int64_t *parameters, mp_error *error) {
    *parameters = table_items(model);
    for (int s = 0; s < MP_DIFF_ENCODERS; s++)
        model->block_count[s] = model->encoder[s].layers ? model->encoder[s].layers + 1 : 0;
    model->block_count[MP_DIFF_TRANSFORMER] = 1 + model->joint_layers + model->single_layers;
    model->block_count[MP_DIFF_DECODER] = model->op_count;
    for (int s = 0; s < MP_DIFF_STAGES; s++)
        for (int i = 0; i < model->block_count[s]; i++) {
            mp_diff_block block = {0};
            mp_builder builder;
            mp_status status = mp_diff_build(model, s, i, &block, &builder, error);
            model->stage_bytes[s] += block.store.slab_bytes + MP_WMAT_SLACK;
            *parameters += block.store.parameters;
            mp_weight_store_deinit(&block.store);
            MP_TRY(status);
        }
    return MP_OK;
}

mp_status mp_diffusion_load(const mp_load_args *args, mp_model **out, mp_error *error) {
    mp_status status;
    int64_t parameters = 0;
    mp_diffusion *model = mp_alloc_zeroed(sizeof *model, MP_TAG_WEIGHTS);
    if (!model)
        return mp_fail_memory(error, sizeof *model, "a model");
    model->base.base.ops = &diffusion_ops;
    model->compute = args->compute;
    model->flux = (args->flags & MP_DIFFUSION_SINGLE_BLOCKS) != 0;
    if (args->compute == MP_COMPUTE_I8) {
        status = mp_fail(error, MP_UNSUPPORTED, "`compute` must be auto, float32 or bfloat16 for image generation, got "
                                                "int8");
        goto cleanup;
    }
    mp_progress_set(args->progress, "mapping", 0);
    MP_TRY_GOTO(mp_weights_open(args->spec, &model->weights, error));
    for (int i = 0; i < MP_DIFF_ENCODERS; i++)
        MP_TRY_GOTO(read_encoder(model, args->spec, i, error));
    MP_TRY_GOTO(read_transformer(model, args->spec, error));
    MP_TRY_GOTO(read_decoder(model, args->spec, error));
    MP_TRY_GOTO(check_fit(model, args->spec, error));
    MP_TRY_GOTO(check_biases(model, error));
    mp_progress_set(args->progress, "checking", 50);
    MP_TRY_GOTO(check_blocks(model, &parameters, error));
    atomic_init(&model->gflop_ns, 10 * 1000 * 1000);
    model->base.speed[0] = &model->gflop_ns;
    model->base.facts = (mp_model_facts){
        .compute = mp_compute_name(mp_resolve_compute(args->compute)),
        .hidden_size = model->hidden,
        .layers = model->joint_layers + model->single_layers,
        .parameters = parameters,
    };
    for (int s = 0; s < MP_DIFF_STAGES; s++)
        model->base.facts.weight_bytes += (int64_t)model->stage_bytes[s];
    *out = &model->base.base;
    model = NULL;
cleanup:
    diffusion_destroy((mp_model *)model);
    return status;
}

/* Scratch bytes of a stage, for an image of the size that the model was trained for; 0 if the spec lacks that size. */
static uint64_t working_bytes(const mp_spec *spec, int stage) {
    int64_t heads = 0, head = 0, side = 0, widths[MP_DIFF_LEVELS] = {0};
    const int64_t none = 0;
    const mp_value *list = mp_spec_find(spec, "vae.channels");
    mp_spec_int(spec, "pipeline.side", 0, MAX_SIDE, &none, &side, NULL);
    if (stage == MP_DIFF_TRANSFORMER) {
        const int64_t texts = 512;
        mp_spec_int(spec, "transformer.head_count", 0, MAX_WIDTH, &none, &heads, NULL);
        mp_spec_int(spec, "transformer.head_length", 0, MAX_WIDTH, &none, &head, NULL);
        const uint64_t width = (uint64_t)(heads * head), rows = (uint64_t)(side * side / 4 + texts);
        return sizeof(float) * (6 * rows * width + 8 * MP_DIFF_ROWS * width + 2 * 2 * rows * (uint64_t)head);
    }
    if (stage != MP_DIFF_DECODER || !list || list->type != MP_VALUE_INTS || list->count < 2 ||
        list->count > MP_DIFF_LEVELS || mp_spec_ints(spec, "vae.channels", (int)list->count, 1, MAX_WIDTH, NULL, widths,
                                                     NULL) != MP_OK)
        return 0;
    /* the widest image follows the last upsampling */
    return 3 * sizeof(float) * (uint64_t)widths[1] * (uint64_t)(side * side) << 2 * (list->count - 1);
}

/* The footprint is that of the largest stage, because stages are loaded and dropped in turn. */
void mp_diffusion_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes) {
    uint64_t stages[MP_DIFF_STAGES] = {0}, most = 0;
    const bool half = mp_resolve_compute(compute) == MP_COMPUTE_BF16;
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const mp_tensor_entry *entry = mp_spec_tensor_at(spec, i);
        const mp_dtype_row *type = mp_dtype_get(entry->dtype);
        uint64_t items = entry->nbytes / (uint64_t)type->bytes * (uint64_t)type->items;
        uint64_t bytes = type->items > 1 && compute == MP_COMPUTE_AUTO ? entry->nbytes
                         : entry->ndim > 1 && half                     ? items * 2
                                                                       : items * 4;
        const char *dot = strchr(entry->name, '.');
        size_t length = dot ? (size_t)(dot - entry->name) : 0;
        const char *last = dot ? dot + 1 : "";
        if (strcmp(last, "tokens") == 0 || strcmp(last, "positions") == 0)
            continue; /* used in the mapped file */
        for (int s = 0; s < MP_DIFF_STAGES; s++)
            if (strlen(mp_diff_stage_name(s)) == length && strncmp(entry->name, mp_diff_stage_name(s), length) == 0)
                stages[s] += bytes;
    }
    for (int s = 0; s < MP_DIFF_STAGES; s++) {
        const uint64_t bytes = stages[s] ? stages[s] + working_bytes(spec, s) : 0;
        most = bytes > most ? bytes : most;
    }
    *model_bytes = 0;
    *engine_bytes = most + (1 << 20);
}
