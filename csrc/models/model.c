#include "models/model.h"

#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "models/arch.h"

static const mp_family encoder = {mp_encoder_load, mp_encoder_footprint, mp_encoder_predict_weights},
                       lookup = {mp_lookup_load, mp_lookup_footprint, mp_lookup_predict_weights},
                       decoder = {mp_decoder_load, mp_decoder_footprint, mp_decoder_predict_weights},
                       vit = {mp_vit_load, mp_vit_footprint, NULL},
                       vision = {mp_vision_load, mp_vision_footprint, mp_vision_predict_weights},
                       diffusion = {mp_diffusion_load, mp_diffusion_footprint, NULL};

static const mp_arch archs[] = {
#define MP_ARCH(name, CAPABILITY, family, flags) {#name, MP_##CAPABILITY, &family, flags},
#include "models/archs.def"
#undef MP_ARCH
};
enum { ARCH_COUNT = sizeof archs / sizeof *archs };

int mp_arch_count(void) { return ARCH_COUNT; }

const mp_arch_info *mp_arch_at(int index) {
    static const mp_arch_info infos[] = {
#define MP_ARCH(name, CAPABILITY, family, flags) {#name, MP_##CAPABILITY},
#include "models/archs.def"
#undef MP_ARCH
    };
    return index >= 0 && index < ARCH_COUNT ? &infos[index] : NULL;
}

const mp_arch *mp_arch_find(const char *name) {
    for (int i = 0; i < ARCH_COUNT; i++)
        if (strcmp(archs[i].name, name) == 0)
            return &archs[i];
    return NULL;
}

/* Lists as many known architectures as fit in `known`, first those that share three initial letters with `name`. */
static mp_status fail_unknown_arch(const char *name, mp_error *error) {
    static const char more[] = ", ...";
    char known[96] = "";
    size_t used = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < ARCH_COUNT; i++) {
            size_t length = strlen(archs[i].name);
            if ((strncmp(archs[i].name, name, 3) == 0) != (pass == 0))
                continue;
            if (used + length + 2 + sizeof more > sizeof known) {
                memcpy(known + used, more, sizeof more);
                pass = 2;
                break;
            }
            if (used > 0) {
                memcpy(known + used, ", ", 2);
                used += 2;
            }
            memcpy(known + used, archs[i].name, length);
            used += length;
        }
    return mp_fail_file(error, MP_FORMAT, "", -1, "general.architecture", known, "%s", name[0] ? name : "missing");
}

typedef struct spec_loader {
    mp_spec *spec;
    const mp_arch *arch;
    mp_compute compute;
} spec_loader;

static mp_status model_load(const mp_arch *arch, mp_load_args *args, mp_model **model, mp_error *error) {
    if (mp_spec_draft(args->spec) && arch->capability != MP_TEXT_TO_TEXT)
        return mp_fail(error, MP_UNSUPPORTED, "`draft` needs a language model for text, got a model of type %.40s",
                       arch->name);
    mp_status status = arch->family->load(args, model, error);
    if (status != MP_OK) {
        mp_spec_place_error(args->spec, error);
        return status;
    }
    mp_model_base *base = (mp_model_base *)*model;
    base->facts.architecture = arch->name;
    if (base->facts.weights == MP_MATRICES_NONE)
        base->facts.weights = MP_MATRICES_PACKED;
    return MP_OK;
}

mp_status mp_model_load_shared(mp_spec *spec, mp_compute compute, mp_shm *shared, mp_lease *lease, mp_budget *budget,
                               mp_progress *progress, mp_model **model, mp_error *error) {
    const mp_arch *arch = mp_arch_find(mp_spec_architecture(spec));
    if (!arch)
        return fail_unknown_arch(mp_spec_architecture(spec), error);
    mp_load_args args = {spec, arch->flags, compute, lease, budget, progress, shared};
    return model_load(arch, &args, model, error);
}

static mp_status spec_load(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_model **model,
                           mp_error *error) {
    spec_loader *loader = self;
    mp_load_args args = {loader->spec, loader->arch->flags, loader->compute, lease, budget, progress, NULL};
    return model_load(loader->arch, &args, model, error);
}

static void spec_footprint(void *self, uint64_t *model_bytes, uint64_t *engine_bytes) {
    spec_loader *loader = self;
    loader->arch->family->footprint(loader->spec, loader->compute, model_bytes, engine_bytes);
}

static void spec_destroy(void *self) {
    spec_loader *loader = self;
    if (!loader)
        return;
    mp_spec_unpin(loader->spec);
    mp_free(loader);
}

static const mp_loader_ops spec_loader_ops = {spec_load, spec_footprint, spec_destroy};

mp_status mp_model_loader(mp_spec *spec, mp_compute compute, mp_loader *out, mp_error *error) {
    const mp_arch *arch = mp_arch_find(mp_spec_architecture(spec));
    if (!arch)
        return fail_unknown_arch(mp_spec_architecture(spec), error);
    spec_loader *loader = mp_alloc_zeroed(sizeof *loader, MP_TAG_SPEC);
    if (!loader)
        return mp_fail_memory(error, sizeof *loader, "a model loader");
    loader->spec = mp_spec_pin(spec);
    loader->arch = arch;
    loader->compute = compute;
    *out = (mp_loader){.ops = &spec_loader_ops, .self = loader, .capability = arch->capability};
    return MP_OK;
}

const char *mp_matrices_name(mp_matrices matrices) {
    static const char *const names[] = {
        [MP_MATRICES_PACKED] = "packed", [MP_MATRICES_PACKING] = "packing", [MP_MATRICES_MAPPED] = "mapped"};
    return names[matrices];
}

uint64_t mp_model_predict_state(const mp_spec *spec) { return mp_decoder_state_bytes(spec); }

mp_matrices mp_model_predict_weights(const mp_spec *spec, mp_compute compute) {
    const mp_arch *arch = mp_arch_find(mp_spec_architecture(spec));
    return arch && arch->family->predict_weights ? arch->family->predict_weights(spec, compute) : MP_MATRICES_PACKED;
}

void mp_model_get_speed(const mp_model *model, uint64_t speed[MP_MODEL_SPEEDS]) {
    const mp_model_base *base = (const mp_model_base *)model;
    for (int i = 0; i < MP_MODEL_SPEEDS; i++)
        speed[i] = base->speed[i] ? atomic_load_explicit(base->speed[i], memory_order_relaxed) : 0;
}

void mp_model_set_speed(mp_model *model, const uint64_t speed[MP_MODEL_SPEEDS]) {
    const mp_model_base *base = (const mp_model_base *)model;
    for (int i = 0; i < MP_MODEL_SPEEDS; i++)
        if (base->speed[i] && speed[i])
            atomic_store_explicit(base->speed[i], speed[i], memory_order_relaxed);
}

void mp_model_get_facts(const mp_model *model, mp_model_facts *facts) {
    const mp_model_base *base = (const mp_model_base *)model;
    *facts = base->facts;
    if (base->unpacked && atomic_load_explicit(base->unpacked, memory_order_acquire) == 0)
        facts->weights = MP_MATRICES_PACKED;
    if (facts->expert_bytes == 0)
        return;
    const uint64_t copies = base->expert_copies ? atomic_load_explicit(base->expert_copies, memory_order_relaxed) : 0;
    facts->experts = copies == 0                         ? MP_MATRICES_MAPPED
                     : copies < base->expert_copies_most ? MP_MATRICES_PACKING
                                                         : MP_MATRICES_PACKED;
    facts->expert_packed_bytes = (int64_t)copies;
    facts->thrashing = base->thrashing && atomic_load_explicit(base->thrashing, memory_order_relaxed);
}

mp_status mp_model_activation(const mp_spec *spec, const char *key, const char *otherwise, mp_act *act,
                              mp_error *error) {
    static const struct {
        const char *name;
        mp_act act;
    } acts[] = {{"gelu", MP_ACT_GELU},
                {"gelu_tanh", MP_ACT_GELU_TANH},
                {"quick_gelu", MP_ACT_QUICK_GELU},
                {"relu", MP_ACT_RELU},
                {"relu2", MP_ACT_RELU2},
                {"silu", MP_ACT_SILU}};
    const char *name;
    MP_TRY(mp_spec_string(spec, key, otherwise, &name, error));
    for (size_t i = 0; i < sizeof acts / sizeof *acts; i++)
        if (strcmp(acts[i].name, name) == 0) {
            *act = acts[i].act;
            return MP_OK;
        }
    return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, key,
                        "gelu, gelu_tanh, quick_gelu, relu, relu2, silu", "%s", name);
}

mp_status mp_engine_reserve(mp_arena *arena, size_t bytes, mp_budget *budget, uint64_t *charged, mp_error *error) {
    if (bytes <= arena->size)
        return MP_OK;
    size_t more = bytes - arena->size;
    if (!mp_budget_take(budget, more))
        return mp_fail_memory(error, bytes, "the scratch of a step");
    mp_status status = mp_arena_reserve(arena, bytes, error);
    if (status != MP_OK) {
        mp_budget_give(budget, more);
        if (arena->size == 0) {
            mp_budget_give(budget, *charged);
            *charged = 0;
        }
        return status;
    }
    *charged += more;
    return MP_OK;
}

uint64_t mp_engine_release(mp_arena *arena, mp_budget *budget, uint64_t *charged) {
    const uint64_t bytes = *charged;
    mp_arena_deinit(arena);
    mp_budget_give(budget, bytes);
    *charged = 0;
    return bytes;
}

void mp_engine_fail_all(const mp_plan *plan, const mp_error *error, mp_outcome *outcomes) {
    for (int i = 0; i < plan->count; i++) {
        plan->items[i]->error = *error;
        outcomes[i] = MP_OUTCOME_FAILED;
    }
}

void mp_engine_fail_numeric(mp_item *item, mp_outcome *outcome) {
    if (*outcome == MP_OUTCOME_FAILED)
        return;
    mp_fail(&item->error, MP_NUMERIC, "the model produced NaN or infinity");
    *outcome = MP_OUTCOME_FAILED;
}

mp_status mp_engine_fail_changed(mp_error *error) {
    return mp_fail(error, MP_INTEGRITY,
                   "a model file was changed or truncated while it was in use; "
                   "repeat the request to load the file again");
}

void mp_engine_advance(mp_item *item, uint32_t units, _Atomic int32_t *done, mp_outcome *outcome) {
    item->cursor += units;
    mp_request_publish(done, (int32_t)item->cursor);
    if (item->cursor == item->total)
        *outcome = MP_OUTCOME_DONE;
}

/* ---- footprint --------------------------------------------------------------------------------------------------- */

uint64_t mp_first_request_bytes(const mp_spec *spec) {
    enum { ROWS = 96, FIXED = 1 << 20 };
    const int64_t none = 0;
    int64_t hidden = 0, ffn = 0;
    mp_error error;
    /* an array (one value per layer), or a size that is absent or wrong, counts nothing: either the load fails, or the
     * weights are large in comparison */
    if (mp_spec_int(spec, "{arch}.embedding_length", 0, 1 << 20, &none, &hidden, &error) != MP_OK)
        hidden = 0;
    if (mp_spec_int(spec, "{arch}.feed_forward_length", 0, 1 << 20, &none, &ffn, &error) != MP_OK)
        ffn = 4 * hidden;
    /* per row: its input and output, queries, keys and values, and the widest layer of the feed-forward network */
    return FIXED + ROWS * (uint64_t)(6 * hidden + ffn) * sizeof(float);
}
