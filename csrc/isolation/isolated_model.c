/* isolated_model.c: loaders and models whose engines are proxies. See isolation.h. */
#include <stdatomic.h>
#include <string.h>

#include "base/cpu.h"
#include "isolation/capability_wire.h"
#include "isolation/proxy.h"
#include "isolation/spec_codec.h"
#include "models/arch.h"

/* Memory of a child process without its engine: interpreter, this library, spec and layers. */
static const uint64_t FIXED_BYTES = 16u << 20;
static const uint64_t DEFAULT_NS = 20ull * 1000 * 1000 * 1000;
enum { REQUEST_BYTES = 64 << 20 };
/* Memory of a child process for requests beyond the first one, which the footprint covers, by default. */
enum { ROOM_BYTES = 64 << 20, ROOM_BYTES_OF_TEXT = 256 << 20 };
/* The parent charges whole grains of 1 MiB, one of them in advance (child.c). */
enum { GRAINS_BYTES = 2 << 20 };

typedef struct isolated_loader {
    const mp_isolation_kind *kind;
    void *self;
    mp_capability capability;
    char **argv, **envp;
    uint64_t memory_bytes, start_ns, stall_ns;
    _Atomic int references; /* one for the registry, one per model: the loader may be destroyed before its models */
} isolated_loader;

typedef struct isolated_model {
    mp_model_base base;
    isolated_loader *loader; /* owns a reference */
    mp_model *inner;
    mp_shm description, weights;
    int threads; /* maximum compute threads that its steps can lease */
} isolated_model;

/* --- loader --- */

static void free_texts(char **texts) {
    for (int i = 0; texts && texts[i]; i++)
        mp_free(texts[i]);
    mp_free(texts);
}

static mp_status copy_texts(const char *const *texts, char ***copy, mp_error *error) {
    size_t count = 0, bytes = 0;
    for (; texts[count]; count++)
        bytes += strlen(texts[count]) + 1;
    *copy = mp_alloc_array(count + 1, sizeof **copy, MP_TAG_SPEC);
    for (size_t i = 0; *copy && i < count; i++)
        if (!((*copy)[i] = mp_strdup(texts[i], MP_TAG_SPEC)))
            return mp_fail_memory(error, bytes, "the command of a worker process");
    return *copy ? MP_OK : mp_fail_memory(error, bytes, "the command of a worker process");
}

static void unpin(isolated_loader *loader) {
    if (atomic_fetch_sub_explicit(&loader->references, 1, memory_order_acq_rel) != 1)
        return;
    if (loader->kind->destroy)
        loader->kind->destroy(loader->self);
    free_texts(loader->argv);
    free_texts(loader->envp);
    mp_free(loader);
}

static uint64_t memory_of(const isolated_loader *loader) {
    uint64_t model, engine;
    if (loader->memory_bytes)
        return loader->memory_bytes;
    loader->kind->footprint(loader->self, &model, &engine);
    if (model == 0) /* the engine size includes the weights: add 25 % and REQUEST_BYTES for requests */
        return engine + engine / 4 + REQUEST_BYTES;
    /* the engine of MP_VISION includes an image: one is computed at a time, so only texts need more memory */
    bool text = loader->capability == MP_TEXT_TO_TEXT || loader->capability == MP_VISION;
    return engine + (text ? ROOM_BYTES_OF_TEXT : ROOM_BYTES);
}

static void isolated_footprint(void *self, uint64_t *model_bytes, uint64_t *engine_bytes) {
    isolated_loader *loader = self;
    loader->kind->footprint(loader->self, model_bytes, engine_bytes);
    *engine_bytes += FIXED_BYTES + GRAINS_BYTES;
}

static void isolated_destroy(void *self) {
    if (self)
        unpin(self);
}

/* --- model --- */

static mp_status model_engine(mp_model *base, mp_budget *budget, mp_engine **engine, mp_error *error) {
    isolated_model *model = (isolated_model *)base;
    const isolated_loader *loader = model->loader;
    mp_proxy_args args = {
        .kind = loader->kind,
        .model = model->inner,
        .capability = loader->capability,
        .argv = (const char *const *)loader->argv,
        .envp = (const char *const *)loader->envp,
        .description = &model->description,
        .weights = &model->weights,
        .memory_bytes = memory_of(loader),
        .fixed_bytes = FIXED_BYTES,
        .threads = model->threads,
        .start_ns = loader->start_ns,
        .stall_ns = loader->stall_ns,
    };
    return mp_proxy_create(&args, budget, engine, error);
}

static mp_status model_check(const mp_model *base, mp_request *request, uint64_t *cost_ns, uint32_t *total,
                             mp_error *error) {
    const isolated_model *model = (const isolated_model *)base;
    MP_TRY(mp_request_wire_of(model->loader->capability)->check(request, error));
    return model->inner->ops->check(model->inner, request, cost_ns, total, error);
}

static bool model_healthy(const mp_model *base) {
    const mp_model *inner = ((const isolated_model *)base)->inner;
    return inner->ops->healthy(inner);
}

static uint64_t model_bytes(const mp_model *base) {
    const mp_model *inner = ((const isolated_model *)base)->inner;
    return inner->ops->bytes(inner);
}

static void model_destroy(mp_model *base) {
    isolated_model *model = (isolated_model *)base;
    if (model->inner)
        model->inner->ops->destroy(model->inner);
    mp_shm_free(&model->weights); /* free after the model, which reads the packed weights in this memory */
    mp_shm_free(&model->description);
    unpin(model->loader);
    mp_free(model);
}

static const mp_model_ops isolated_ops = {model_engine, model_check, model_healthy, model_bytes, model_destroy};

/* Write the description into shared memory that every child maps. */
static mp_status describe(isolated_model *model, mp_error *error) {
    const isolated_loader *loader = model->loader;
    uint8_t *bytes = NULL;
    size_t size = 0;
    MP_TRY(loader->kind->describe(loader->self, &bytes, &size, error));
    mp_status status = mp_shm_create(&model->description, size, MP_TAG_SPEC, "mpool-spec", error);
    if (status == MP_OK) {
        memcpy(model->description.data, bytes, size);
        status = mp_shm_freeze(&model->description, error);
    }
    mp_free(bytes);
    return status;
}

static mp_status isolated_load(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_model **out,
                               mp_error *error) {
    isolated_loader *loader = self;
    isolated_model *model = mp_alloc_zeroed(sizeof *model, MP_TAG_WEIGHTS);
    if (!model)
        return mp_fail_memory(error, sizeof *model, "a model");
    model->base.base.ops = &isolated_ops;
    model->loader = loader;
    model->weights.fd = model->description.fd = -1;
    model->threads = lease->team ? mp_team_size(lease->team) : lease->threads;
    model->threads = model->threads > mp_cpu_threads() ? model->threads : mp_cpu_threads();
    atomic_fetch_add_explicit(&loader->references, 1, memory_order_relaxed);
    mp_status status = loader->kind->load(loader->self, lease, budget, progress, &model->weights, &model->inner, error);
    if (status == MP_OK)
        status = describe(model, error);
    if (status != MP_OK) {
        model_destroy(&model->base.base);
        return status;
    }
    if (loader->kind->facts)
        loader->kind->facts(model->inner, &model->base.facts);
    *out = &model->base.base;
    return MP_OK;
}

static const mp_loader_ops isolated_loader_ops = {isolated_load, isolated_footprint, isolated_destroy};

mp_status mp_isolation_wrap(const mp_isolation_kind *kind, void *self, mp_capability capability,
                            const mp_isolation_options *options, mp_loader *out, mp_error *error) {
    isolated_loader *loader = mp_alloc_zeroed(sizeof *loader, MP_TAG_SPEC);
    if (!loader) {
        if (kind->destroy)
            kind->destroy(self);
        return mp_fail_memory(error, sizeof *loader, "a model loader");
    }
    loader->kind = kind;
    loader->self = self;
    loader->capability = capability;
    loader->memory_bytes = options->memory_bytes;
    loader->start_ns = options->start_ns ? options->start_ns : DEFAULT_NS;
    loader->stall_ns = options->stall_ns ? options->stall_ns : DEFAULT_NS;
    atomic_init(&loader->references, 1);
    mp_status status = MP_OK;
    if (!mp_request_wire_of(capability))
        status = mp_fail(error, MP_UNSUPPORTED, "%s models do not support process isolation; use isolation=\"thread\"",
                         mp_capability_get(capability)->name);
    if (status == MP_OK)
        status = copy_texts(options->argv, &loader->argv, error);
    if (status == MP_OK)
        status = copy_texts(options->envp, &loader->envp, error);
    if (status != MP_OK) {
        unpin(loader);
        return status;
    }
    /* The default policy is p2c. Under `pack`, one pass over the weights serves many sequences, so the crash of one
     * process would fail all of these; p2c spreads the requests over processes. Image generation keeps the capability's
     * policy: it computes one request after the other, and a second process would load all networks again. */
    *out = (mp_loader){.ops = &isolated_loader_ops,
                       .self = loader,
                       .capability = capability,
                       .policy = capability == MP_TEXT_TO_IMAGE ? NULL : "p2c"};
    return MP_OK;
}

/* --- models of a spec --- */

typedef struct spec_source {
    mp_spec *spec;
    mp_compute compute;
    mp_loader loader; /* used to predict the footprint only */
} spec_source;

static mp_status spec_load(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_shm *weights,
                           mp_model **model, mp_error *error) {
    const spec_source *source = self;
    return mp_model_load_shared(source->spec, source->compute, weights, lease, budget, progress, model, error);
}

static void spec_footprint(void *self, uint64_t *model_bytes, uint64_t *engine_bytes) {
    const spec_source *source = self;
    source->loader.ops->footprint(source->loader.self, model_bytes, engine_bytes);
}

/* Header of a description: the compute type. The encoded spec follows the header. */
typedef struct spec_head {
    uint32_t compute, zero;
} spec_head;

static mp_status spec_describe(void *self, uint8_t **bytes, size_t *size, mp_error *error) {
    const spec_source *source = self;
    spec_head head = {(uint32_t)source->compute, 0};
    uint8_t *spec;
    size_t spec_size;
    MP_TRY(mp_spec_encode(source->spec, &spec, &spec_size, error));
    *size = sizeof head + spec_size;
    *bytes = mp_alloc(*size, MP_TAG_SPEC);
    if (*bytes) {
        memcpy(*bytes, &head, sizeof head);
        memcpy(*bytes + sizeof head, spec, spec_size);
    }
    mp_free(spec);
    return *bytes ? MP_OK : mp_fail_memory(error, *size, "a serialized model spec");
}

static mp_status spec_open(const uint8_t *bytes, size_t size, mp_shm *weights, mp_budget *budget, mp_model **model,
                           mp_error *error) {
    spec_head head;
    mp_spec *spec;
    if (size < sizeof head)
        return mp_fail(error, MP_INTEGRITY, "the description of a model must have at least %zu bytes, got %zu",
                       sizeof head, size);
    memcpy(&head, bytes, sizeof head);
    if (head.compute > MP_COMPUTE_I8)
        return mp_fail(error, MP_INTEGRITY, "the compute type in the description of a model must be 0 to %d, got %u",
                       MP_COMPUTE_I8, head.compute);
    MP_TRY(mp_spec_decode(bytes + sizeof head, size - sizeof head, &spec, error));
    mp_lease lease = {.threads = 1};
    mp_status status =
        mp_model_load_shared(spec, (mp_compute)head.compute, weights, &lease, budget, NULL, model, error);
    mp_spec_unpin(spec);
    return status;
}

static void spec_destroy(void *self) {
    spec_source *source = self;
    if (source->loader.ops)
        source->loader.ops->destroy(source->loader.self);
    mp_spec_unpin(source->spec);
    mp_free(source);
}

static const mp_isolation_kind spec_kind = {
    .load = spec_load,
    .footprint = spec_footprint,
    .describe = spec_describe,
    .destroy = spec_destroy,
    .facts = mp_model_get_facts,
    .open = spec_open,
    .get_speed = mp_model_get_speed,
    .set_speed = mp_model_set_speed,
};

mp_status mp_isolation_loader(mp_spec *spec, mp_compute compute, const mp_isolation_options *options, mp_loader *loader,
                              mp_error *error) {
    if (mp_spec_draft(spec))
        return mp_fail(error, MP_UNSUPPORTED,
                       "models with `draft` do not support process isolation; use isolation=\"thread\"");
    spec_source *source = mp_alloc_zeroed(sizeof *source, MP_TAG_SPEC);
    if (!source)
        return mp_fail_memory(error, sizeof *source, "a model loader");
    source->spec = mp_spec_pin(spec);
    source->compute = compute;
    mp_status status = mp_model_loader(spec, compute, &source->loader, error);
    if (status != MP_OK) {
        spec_destroy(source);
        return status;
    }
    return mp_isolation_wrap(&spec_kind, source, source->loader.capability, options, loader, error);
}

int mp_isolation_main(void) { return mp_isolation_serve(&spec_kind); }
