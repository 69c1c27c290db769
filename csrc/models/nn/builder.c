#include "models/nn/builder.h"

#include <assert.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "files/scaled_weights.h"
#include "models/nn/scratch.h"

static const char packing[] = "packing"; /* stage of a load, for mp_progress */

/* How the rows of a matrix get from its tensor into panels. */
typedef enum mp_row_source {
    ROWS_AS_STORED,  /* as they are in `tensor` or `scaled` */
    ROWS_CONVERTED,  /* in fp32, times `factor`, in another order; must be finite */
    ROWS_OF_KERNELS, /* in fp32, each row from [channels][taps] to [taps][channels] */
    ROWS_BY_HEAD,    /* in fp32, as `by_head` describes */
} mp_row_source;

typedef struct mp_build_job {
    mp_linear *linear; /* packed matrix: part `part` of this layer; otherwise NULL */
    int part;
    float **vector; /* if `linear` is NULL: destination of a vector, of one part's range of a layer's bias, or of a
                     * plain matrix */
    int64_t n, at;  /* length of the vector, or of a row of a plain matrix; offset within *vector if `append` */
    int64_t rows;   /* rows of a plain matrix, otherwise 1 */
    bool transposed; /* a plain matrix [rows, n] becomes [n, rows] */
    bool append;
    float add;   /* added to each value of a vector */
    bool exp;    /* the values x of a vector become -exp(x) */
    float scale; /* factor on each value of a bias */
    mp_tensor tensor;
    mp_scaled scaled; /* if the type of `tensor` has separate scales */
    float *taken;     /* the data of `tensor`, if the builder owns it */
    mp_row_source source;
    const char *name;     /* ROWS_CONVERTED: name of the tensor, owned by the spec */
    float factor;         /* ROWS_CONVERTED: factor on each value */
    mp_order rows_order, columns_order; /* ROWS_CONVERTED */
    int32_t taps;         /* ROWS_OF_KERNELS: kernel height * width */
    mp_head_rows by_head; /* ROWS_BY_HEAD */
    bool may_stay; /* may stay unpacked; false for matrices that are not in a file */
    bool packed;   /* finish has packed the matrix */
    size_t offset; /* offset in the slab */
} mp_build_job;

void mp_builder_init(mp_builder *builder, mp_weight_store *store, const mp_weights *weights, mp_compute compute) {
    *builder = (mp_builder){.store = store, .weights = weights, .compute = compute, .bias_scale = 1};
}

mp_status mp_builder_read_use(mp_builder *builder, mp_error *error) {
    return mp_weights_use_read(mp_weights_spec(builder->weights), &builder->use, error);
}

void mp_builder_drop_jobs(mp_weight_store *store) {
    for (int i = 0; i < store->count; i++)
        mp_free(store->jobs[i].taken);
    mp_free(store->jobs);
    store->jobs = NULL;
    store->count = store->capacity = 0;
}

static mp_status add_job(const mp_builder *builder, const mp_build_job *job, mp_error *error) {
    mp_weight_store *store = builder->store;
    if (store->count == store->capacity) {
        int capacity = store->capacity ? 2 * store->capacity : 256;
        mp_build_job *grown = mp_realloc(store->jobs, (size_t)capacity * sizeof *grown, MP_TAG_MISC);
        if (!grown)
            return mp_fail_memory(error, (uint64_t)capacity * sizeof *grown, "the list of tensors");
        store->jobs = grown;
        store->capacity = capacity;
    }
    store->jobs[store->count++] = *job;
    return MP_OK;
}

static void count_parameters(const mp_builder *builder, int64_t n) {
    if (!builder->uncounted)
        builder->store->parameters += n;
}

/* Returns the place of the next `bytes` of the slab. */
static size_t builder_place(const mp_builder *builder, size_t bytes) {
    size_t at = builder->store->slab_bytes;
    builder->store->slab_bytes += mp_arena_cost(bytes);
    return at;
}

static mp_status add_vector(const mp_builder *builder, float **out, const char *name, int64_t n, int64_t at,
                            bool append, mp_error *error) {
    mp_build_job job = {.vector = out, .n = n, .at = at, .rows = 1, .append = append};
    const mp_tensor_entry *entry = mp_spec_find_tensor(mp_weights_spec(builder->weights), name);
    int64_t shape[2] = {n, 1};
    int dims = 1;
    /* such as [heads, 1] and [groups, n / groups] */
    if (entry && entry->ndim == 2 && entry->shape[0] > 0 && n % entry->shape[0] == 0) {
        shape[0] = entry->shape[0];
        shape[1] = n / shape[0];
        dims = 2;
    }
    MP_TRY(mp_weights_get(builder->weights, name, dims, shape, &job.tensor, error));
    job.tensor.ndim = 1;
    job.tensor.shape[0] = n;
    count_parameters(builder, n);
    if (!append)
        job.offset = builder_place(builder, (size_t)n * sizeof(float));
    return add_job(builder, &job, error);
}

mp_status mp_builder_plain(const mp_builder *builder, float **out, const char *name, int64_t rows, int64_t n,
                           mp_error *error) {
    mp_build_job job = {.vector = out, .n = n, .rows = rows};
    int64_t shape[2] = {rows, n};
    MP_TRY(mp_weights_get(builder->weights, name, 2, shape, &job.tensor, error));
    count_parameters(builder, rows * n);
    job.offset = builder_place(builder, (size_t)(rows * n) * sizeof(float));
    return add_job(builder, &job, error);
}

mp_status mp_builder_taps(const mp_builder *builder, float **out, const char *name, int32_t channels, int32_t taps,
                          mp_error *error) {
    const mp_tensor_entry *entry = mp_spec_find_tensor(mp_weights_spec(builder->weights), name);
    const bool flat = !entry || entry->ndim != 3;
    const int64_t shape[3] = {channels, flat ? taps : 1, taps};
    mp_build_job job = {.vector = out, .n = taps, .rows = channels, .transposed = true};
    assert(taps <= MP_BUILDER_TAPS);
    MP_TRY(mp_weights_get(builder->weights, name, flat ? 2 : 3, shape, &job.tensor, error));
    job.tensor.ndim = 2;
    job.tensor.shape[1] = taps;
    count_parameters(builder, (int64_t)channels * taps);
    job.offset = builder_place(builder, (size_t)channels * (size_t)taps * sizeof(float));
    return add_job(builder, &job, error);
}

mp_status mp_builder_vector(const mp_builder *builder, float **out, const char *name, int64_t n, mp_error *error) {
    return add_vector(builder, out, name, n, 0, false, error);
}

mp_status mp_builder_vector_plus(const mp_builder *builder, float **out, const char *name, int64_t n, float add,
                                 mp_error *error) {
    MP_TRY(add_vector(builder, out, name, n, 0, false, error));
    builder->store->jobs[builder->store->count - 1].add = add;
    return MP_OK;
}

mp_status mp_builder_vector_exp(const mp_builder *builder, float **out, const char *name, int64_t n, mp_error *error) {
    MP_TRY(add_vector(builder, out, name, n, 0, false, error));
    builder->store->jobs[builder->store->count - 1].exp = true;
    return MP_OK;
}

static mp_tensor tensor_of(const float *data, int32_t N, int32_t K) {
    return (mp_tensor){.dtype = MP_F32,
                       .ndim = 2,
                       .shape = {N, K},
                       .data = (const uint8_t *)data,
                       .nbytes = (uint64_t)N * (uint64_t)K * sizeof(float)};
}

static mp_status add_part(const mp_builder *builder, mp_linear *linear, mp_build_job job, const char *name,
                          const char *bias_name, int32_t N, int32_t K, mp_error *error) {
    assert(linear->parts < MP_LINEAR_PARTS);
    int part = job.part = linear->parts;
    job.linear = linear;
    mp_wkind kind;
    const bool floats = job.source == ROWS_OF_KERNELS || job.source == ROWS_BY_HEAD;
    if (!mp_wmat_kind_for(floats ? MP_F32 : job.tensor.dtype, builder->compute, &kind))
        return mp_fail(error, MP_UNSUPPORTED,
                       "tensor %s is stored as %s, which the requested compute type does not support", name,
                       mp_dtype_get(job.tensor.dtype)->name);
    if (kind == MP_W_I8 && K > MP_I8_MAX_INPUTS)
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s has %d inputs, int8 allows at most %d", name, K,
                       MP_I8_MAX_INPUTS);
    mp_wmat_init(&linear->w[part], kind, N, K);
    linear->acts[part] = (uint8_t)mp_wmat_acts(kind);
    linear->column[part] = linear->N;
    linear->K = K;
    job.may_stay = job.may_stay && mp_may_stay_unpacked(builder->unpacked, builder->use, job.tensor.dtype, kind);
    if (job.may_stay && builder->use == MP_WEIGHTS_MAPPED)
        builder->store->mapped_bytes += job.tensor.nbytes;
    else
        job.offset = builder_place(builder, mp_wmat_bytes(&linear->w[part]));
    count_parameters(builder, (int64_t)N * K);
    MP_TRY(add_job(builder, &job, error));
    if (bias_name) {
        MP_TRY(add_vector(builder, &linear->bias, bias_name, N, linear->N, true, error));
        builder->store->jobs[builder->store->count - 1].scale = builder->bias_scale;
    }
    linear->N += N;
    linear->parts++;
    return MP_OK;
}

mp_status mp_builder_linear(const mp_builder *builder, mp_linear *linear, const char *name, const char *bias_name,
                            int32_t N, int32_t K, mp_error *error) {
    mp_build_job job = {.may_stay = true};
    MP_TRY(mp_weights_get_matrix(builder->weights, name, N, K, &job.scaled, error));
    job.tensor = job.scaled.codes;
    return add_part(builder, linear, job, name, bias_name, N, K, error);
}

mp_status mp_builder_conv(const mp_builder *builder, mp_linear *linear, const char *name, const char *bias_name,
                          int32_t N, int32_t channels, int32_t size, mp_error *error) {
    mp_build_job job = {.source = ROWS_OF_KERNELS, .taps = size * size};
    int64_t shape[4] = {N, channels, size, size};
    MP_TRY(mp_weights_get(builder->weights, name, 4, shape, &job.tensor, error));
    if (mp_dtype_get(job.tensor.dtype)->items > 1)
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s of a convolution must be stored as F32, F16 or BF16, got %s",
                       name, mp_dtype_get(job.tensor.dtype)->name);
    return add_part(builder, linear, job, name, bias_name, N, size * size * channels, error);
}

mp_status mp_builder_linear_of(const mp_builder *builder, mp_linear *linear, const char *name, const mp_tensor *tensor,
                               mp_error *error) {
    mp_build_job job = {.tensor = *tensor};
    return add_part(builder, linear, job, name, NULL, (int32_t)tensor->shape[0], (int32_t)tensor->shape[1], error);
}

mp_status mp_builder_linear_by_head(const mp_builder *builder, mp_linear *linear, const char *name,
                                    const mp_head_rows *rows, mp_error *error) {
    assert(rows->heads > 0 && rows->N % MP_PANEL_N == 0);
    mp_build_job job = {.tensor = rows->from.codes, .source = ROWS_BY_HEAD, .by_head = *rows};
    return add_part(builder, linear, job, name, NULL, rows->heads * rows->N, rows->K, error);
}

mp_status mp_builder_linear_taken(const mp_builder *builder, mp_linear *linear, const char *name, const char *bias,
                                  float *matrix, int32_t N, int32_t K, mp_error *error) {
    mp_build_job job = {.taken = matrix, .tensor = tensor_of(matrix, N, K)};
    int before = builder->store->count;
    mp_status status = add_part(builder, linear, job, name, bias, N, K, error);
    if (builder->store->count == before)
        mp_free(matrix);
    return status;
}

mp_status mp_builder_linear_converted(const mp_builder *builder, mp_linear *linear, const char *name, int32_t N,
                                      int32_t K, float factor, const mp_order *rows, const mp_order *columns,
                                      mp_error *error) {
    const int64_t shape[2] = {N, K};
    mp_build_job job = {.source = ROWS_CONVERTED, .factor = factor, .rows_order = *rows, .columns_order = *columns};
    MP_TRY(mp_weights_get(builder->weights, name, 2, shape, &job.tensor, error));
    if (mp_dtype_get(job.tensor.dtype)->items > 1 || mp_dtype_is_scaled(job.tensor.dtype))
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s of an adapter must be stored as F32, F16 or BF16, got %s",
                       name, mp_dtype_get(job.tensor.dtype)->name);
    job.name = mp_spec_find_tensor(mp_weights_spec(builder->weights), name)->name;
    mp_builder floats = *builder;
    floats.compute = MP_COMPUTE_F32;
    return add_part(&floats, linear, job, name, NULL, N, K, error);
}

/* Returns the row or column of the file that becomes that of the layer at `index`. */
static int64_t source_of(const mp_order *order, int64_t index) {
    const int64_t at = index - order->first, each = order->a * order->b * order->width;
    if (at < 0 || at >= order->outer * each)
        return index;
    const int64_t block = at % each / order->width, a = block % order->a, b = block / order->a;
    return index - at % each + (a * order->b + b) * order->width + at % order->width;
}

/* Converts a row of a convolution from [channels][taps], as stored, to [taps][channels]. row: K floats of scratch. */
static void reorder_taps(const mp_build_job *job, int32_t n, float *row, float *to) {
    const mp_wmat *w = &job->linear->w[job->part];
    const int64_t taps = job->taps, channels = w->K / taps, row_bytes = (int64_t)job->tensor.nbytes / w->N;
    mp_dequantize_row(job->tensor.dtype, job->tensor.data + n * row_bytes, w->K, row);
    for (int64_t c = 0; c < channels; c++)
        for (int64_t t = 0; t < taps; t++)
            to[t * channels + c] = row[c * taps + t];
}

/* Converts the rows of a panel to scratch [MP_PANEL_N + 1, K]. Returns the number of rows. */
static int32_t convert_rows(const mp_build_job *job, int panel, float *scratch) {
    const mp_wmat *w = &job->linear->w[job->part];
    const int32_t first = panel * MP_PANEL_N, rows = w->N - first < MP_PANEL_N ? w->N - first : MP_PANEL_N;
    for (int32_t r = 0; r < rows; r++) {
        float *const to = scratch + (int64_t)r * w->K;
        if (job->source == ROWS_OF_KERNELS) {
            reorder_taps(job, first + r, scratch + (int64_t)MP_PANEL_N * w->K, to);
            continue;
        }
        float *const row = job->columns_order.outer > 0 ? scratch + (int64_t)MP_PANEL_N * w->K : to;
        mp_dequantize_row(job->tensor.dtype, mp_tensor_row(&job->tensor, source_of(&job->rows_order, first + r)), w->K,
                          row);
        for (int32_t i = 0; i < w->K; i++)
            to[i] = row[row == to ? i : source_of(&job->columns_order, i)] * job->factor;
    }
    return rows;
}

/* Packs panels of a matrix whose rows are converted one by one. Returns true if all values are finite. */
static bool pack_converted(const mp_build_job *job, int panel0, int panel1, float *scratch) {
    const mp_wmat *w = &job->linear->w[job->part];
    bool finite = true;
    for (int panel = panel0; panel < panel1; panel++) {
        const int32_t rows = convert_rows(job, panel, scratch);
        const mp_tensor tensor = tensor_of(scratch, rows, w->K);
        mp_wmat one;
        mp_wmat_init(&one, w->kind, rows, w->K);
        one.data = w->data + (size_t)panel * w->panel_bytes;
        mp_wmat_pack(&one, &tensor, 0, 1);
        finite = finite && mp_kernels_get()->all_finite(scratch, (int64_t)rows * w->K);
    }
    return finite;
}

/* Converts one head to scratch [N, K]. Scratch has max(N, K) more floats, for a row before it is transposed. */
static void convert_head(const mp_head_rows *rows, int32_t head, float *scratch) {
    const int32_t count = rows->transposed ? rows->K : rows->N, width = rows->transposed ? rows->N : rows->K;
    float *const spare = scratch + (int64_t)rows->N * rows->K;
    for (int32_t r = 0; r < count; r++) {
        const int32_t at = head * rows->stride + rows->first + r;
        float *const row = rows->transposed ? spare : scratch + (int64_t)r * width;
        if (mp_dtype_is_scaled(rows->from.codes.dtype))
            mp_scaled_rows(&rows->from, at, 1, MP_F32, (uint8_t *)row);
        else
            mp_dequantize_row(rows->from.codes.dtype, mp_tensor_row(&rows->from.codes, at), width, row);
        for (int32_t i = 0; rows->transposed && i < width; i++)
            scratch[(int64_t)i * rows->K + r] = row[i];
    }
}

/* Packs panels of a matrix that is made head by head. A head is converted once for all of its panels in the range. */
static void pack_by_head(const mp_build_job *job, int panel0, int panel1, float *scratch) {
    const mp_wmat *w = &job->linear->w[job->part];
    const mp_head_rows *rows = &job->by_head;
    const int each = rows->N / MP_PANEL_N;
    const mp_tensor tensor = tensor_of(scratch, rows->N, rows->K);
    mp_wmat one;
    mp_wmat_init(&one, w->kind, rows->N, rows->K);
    for (int panel = panel0; panel < panel1;) {
        const int head = panel / each, start = head * each, end = panel1 - start < each ? panel1 - start : each;
        convert_head(rows, head, scratch);
        one.data = w->data + (size_t)start * w->panel_bytes;
        mp_wmat_pack(&one, &tensor, panel - start, end);
        panel = start + end;
    }
}

/* Names the first value that is not finite. Threads notice such values in any order. */
static mp_status report_infinite(const mp_builder *builder, float *scratch, mp_error *error) {
    const mp_weight_store *store = builder->store;
    for (int i = 0; i < store->count; i++) {
        const mp_build_job *job = &store->jobs[i];
        for (int panel = 0; job->source == ROWS_CONVERTED && panel < job->linear->w[job->part].panels; panel++) {
            const int64_t K = job->linear->w[job->part].K, items = convert_rows(job, panel, scratch) * K;
            for (int64_t at = 0; at < items; at++)
                if (!isfinite(scratch[at]))
                    return mp_fail_file(error, MP_FORMAT, mp_weights_file(builder->weights, job->name), -1, job->name,
                                        "finite values, also times alpha / rank",
                                        "infinity or NaN at index %lld",
                                        (long long)(source_of(&job->rows_order, panel * MP_PANEL_N + at / K) * K +
                                                    source_of(&job->columns_order, at % K)));
        }
    }
    return mp_fail(error, MP_INTEGRITY, "a model file was changed while it was loaded; load the model again");
}

/* Small matrices: each thread packs whole matrices, and takes the next one from a shared counter. */
typedef struct pack_run {
    const mp_builder *builder;
    mp_progress *progress;
    _Atomic int job;
    _Atomic bool infinite; /* a converted value is not finite */
    uint8_t *scratch; /* `stride` bytes per thread; or NULL */
    size_t stride, charged; /* `charged`: bytes charged to the budget for `scratch` */
} pack_run;

/* Packs panels of a job. Returns false if a value of ROWS_CONVERTED is not finite. */
static bool pack_panels(const mp_build_job *job, int panel0, int panel1, uint8_t *scratch) {
    mp_wmat *w = &job->linear->w[job->part];
    float *const floats = (float *)(void *)scratch;
    switch (job->source) {
    case ROWS_CONVERTED:
        return pack_converted(job, panel0, panel1, floats);
    case ROWS_OF_KERNELS: /* need not be finite */
        (void)pack_converted(job, panel0, panel1, floats);
        break;
    case ROWS_BY_HEAD:
        pack_by_head(job, panel0, panel1, floats);
        break;
    case ROWS_AS_STORED:
        if (mp_dtype_is_scaled(job->tensor.dtype))
            mp_scaled_pack(w, &job->scaled, panel0, panel1, scratch);
        else
            mp_wmat_pack(w, &job->tensor, panel0, panel1);
        break;
    }
    return true;
}

static void pack_body(const mp_team_thread *thread, void *arg) {
    pack_run *run = arg;
    mp_weight_store *store = run->builder->store;
    uint8_t *scratch = run->scratch ? run->scratch + (size_t)thread->index * run->stride : NULL;
    for (;;) {
        int i = atomic_fetch_add_explicit(&run->job, 1, memory_order_relaxed);
        if (i >= store->count)
            return;
        mp_build_job *job = &store->jobs[i];
        if (!job->linear || job->packed)
            continue;
        if (!pack_panels(job, 0, job->linear->w[job->part].panels, scratch))
            atomic_store_explicit(&run->infinite, true, memory_order_relaxed);
        mp_weights_release(run->builder->weights, &job->tensor);
        mp_progress_part(run->progress, packing, (uint64_t)i, (uint64_t)store->count);
    }
}

/* A matrix of at least SPLIT_BYTES keeps every thread busy: all threads pack it together. */
enum { SPLIT_BYTES = 4 << 20 };

typedef struct split_run {
    const mp_build_job *job;
    pack_run *all;
} split_run;

static void split_body(const mp_team_thread *thread, void *arg) {
    enum { LEAST_BYTES = 256 << 10 }; /* are packed in 20 us or more */
    split_run *run = arg;
    const mp_wmat *w = &run->job->linear->w[run->job->part];
    uint8_t *scratch = run->all->scratch ? run->all->scratch + (size_t)thread->index * run->all->stride : NULL;
    mp_team_loop loop = mp_team_shared(w->panels, 1 + LEAST_BYTES / (int64_t)w->panel_bytes);
    while (mp_team_next(thread, &loop))
        if (!pack_panels(run->job, (int)loop.begin, (int)loop.end, scratch))
            atomic_store_explicit(&run->all->infinite, true, memory_order_relaxed);
}

/* Leaves the matrices that may stay unpacked as stored, if together they have enough bytes. */
static mp_status leave_unpacked(const mp_builder *builder, mp_error *error) {
    mp_weight_store *store = builder->store;
    uint64_t bytes = 0;
    int count = 0;
    for (int i = 0; i < store->count; i++)
        if (store->jobs[i].may_stay) {
            bytes += store->jobs[i].tensor.nbytes;
            count++;
        }
    const bool mapped = builder->use == MP_WEIGHTS_MAPPED; /* without packed data, which processes share */
    if ((builder->shared && !mapped) || count == 0 || bytes < mp_weights_threshold(builder->use))
        return MP_OK;
    MP_TRY(mp_weight_store_pack_on_use(store, builder->weights, error));
    MP_TRY(mp_weights_read_fast(mp_weights_spec(builder->weights), &store->fast, error));
    store->mapped = mapped;
    for (int i = 0; i < store->count; i++) {
        mp_build_job *job = &store->jobs[i];
        if (!job->may_stay)
            continue;
        mp_linear *linear = job->linear;
        MP_TRY(mp_weight_store_add_linear(store, &linear->w[job->part], &job->tensor, &linear->panels[job->part],
                                          error));
        job->linear = NULL; /* not packed by finish */
    }
    mp_weight_store_fetch(store);
    return MP_OK;
}

typedef struct fill_run {
    const mp_shm *shared;
    mp_progress *progress;
    _Atomic size_t next;
    _Atomic bool refused;
} fill_run;

static void fill_body(const mp_team_thread *thread, void *arg) {
    enum { SLICE = 16 << 20 };
    fill_run *run = arg;
    (void)thread;
    size_t bytes = run->shared->bytes, from;
    while ((from = atomic_fetch_add_explicit(&run->next, SLICE, memory_order_relaxed)) < bytes) {
        if (!mp_shm_fill(run->shared, from, bytes - from < SLICE ? bytes - from : SLICE))
            atomic_store_explicit(&run->refused, true, memory_order_relaxed);
        mp_progress_part(run->progress, "making memory", from, bytes);
    }
}

/* Creates the shared memory. All threads of the lease fill it, and report progress. */
static mp_status make_shared(mp_shm *shared, size_t bytes, mp_lease *lease, mp_progress *progress, mp_error *error) {
    MP_TRY(mp_shm_create_empty(shared, bytes, MP_TAG_WEIGHTS, "mpool-weights", error));
    fill_run run = {.shared = shared, .progress = progress};
    mp_lease_run(lease, fill_body, &run);
    if (!atomic_load_explicit(&run.refused, memory_order_relaxed))
        return MP_OK;
    mp_shm_free(shared);
    return mp_fail_memory(error, bytes, "the packed weights");
}

/* Allocates the slab and charges it to the budget. */
static mp_status place_slab(const mp_builder *builder, size_t bytes, mp_lease *lease, mp_budget *budget,
                            mp_progress *progress, mp_error *error) {
    mp_weight_store *store = builder->store;
    mp_shm *shared = builder->shared;
    if (shared && shared->data) {
        if (shared->bytes != bytes)
            return mp_fail(error, MP_INTEGRITY, "the packed weights have %zu bytes, these files give %zu",
                           shared->bytes, bytes);
        store->slab = shared->data;
        return MP_OK;
    }
    if (!mp_budget_take(budget, bytes))
        return mp_fail_memory(error, bytes, "the packed weights");
    mp_status status = MP_OK;
    if (shared)
        status = make_shared(shared, bytes, lease, progress, error);
    else if (!(store->slab = mp_alloc(bytes, MP_TAG_WEIGHTS)))
        status = mp_fail_memory(error, bytes, "the packed weights");
    if (status != MP_OK) {
        mp_budget_give(budget, bytes);
        return status;
    }
    if (shared)
        store->slab = shared->data;
    store->charged = bytes;
    mp_sys_advise(store->slab, bytes, MP_ADVISE_HUGE);
    return MP_OK;
}

/* Allocates, for each thread, scratch for rows that are converted before they are packed, and charges it to the budget,
 * with the matrices that the builder owns. Does nothing if there is neither. */
static mp_status make_scratch(const mp_builder *builder, const mp_lease *lease, mp_budget *budget, pack_run *run,
                              mp_error *error) {
    const mp_weight_store *store = builder->store;
    size_t taken = 0;
    for (int i = 0; i < store->count; i++) {
        const mp_build_job *job = &store->jobs[i];
        if (!job->linear)
            continue;
        taken += job->taken ? job->tensor.nbytes : 0;
        const mp_wmat *w = &job->linear->w[job->part];
        const size_t K = (size_t)w->K, head = (size_t)job->by_head.N;
        size_t bytes = (MP_PANEL_N + 1) * K * sizeof(float); /* convert_rows */
        if (job->source == ROWS_BY_HEAD)
            bytes = (head * K + mp_larger(head, K)) * sizeof(float); /* convert_head */
        else if (job->source == ROWS_AS_STORED)
            bytes = mp_scaled_scratch(job->tensor.dtype, w->kind, w->K);
        run->stride = mp_larger(run->stride, bytes);
    }
    if (run->stride == 0 && taken == 0)
        return MP_OK;
    run->stride = mp_arena_cost(run->stride);
    const size_t bytes = run->stride * (size_t)lease->threads;
    if (mp_budget_take(budget, bytes + taken)) {
        run->charged = bytes + taken;
        run->scratch = mp_alloc(bytes, MP_TAG_MISC);
    }
    return run->scratch ? MP_OK : mp_fail_memory(error, bytes + taken, "the rows of weights while they are packed");
}

static void drop_scratch(pack_run *run, mp_budget *budget) {
    mp_free(run->scratch);
    mp_budget_give(budget, run->charged);
}

/* Frees the slab after a failure. */
static void drop_slab(const mp_builder *builder, mp_budget *budget) {
    mp_weight_store *store = builder->store;
    if (builder->shared)
        mp_shm_free(builder->shared);
    else
        mp_free(store->slab);
    store->slab = NULL;
    mp_budget_give(budget, store->charged);
    store->charged = 0;
}

/* Makes room in the slab for the biases of layers: those of a layer's parts share one vector. */
static void place_biases(const mp_builder *builder) {
    mp_weight_store *store = builder->store;
    for (int i = 0; i < store->count; i++) {
        mp_build_job *job = &store->jobs[i];
        if (!job->vector || !job->append || job->at != 0)
            continue;
        int64_t n = 0;
        for (int k = i; k < store->count; k++)
            if (store->jobs[k].vector == job->vector)
                n += store->jobs[k].n;
        job->offset = builder_place(builder, (size_t)n * sizeof(float));
    }
}

static void fill_transposed(const mp_build_job *job) {
    float row[MP_BUILDER_TAPS];
    for (int64_t r = 0; r < job->rows; r++) {
        mp_dequantize_row(job->tensor.dtype, mp_tensor_row(&job->tensor, r), job->n, row);
        for (int64_t i = 0; i < job->n; i++)
            (*job->vector)[i * job->rows + r] = row[i];
    }
}

static void negate_exp(float *x, int64_t n) {
    mp_kernels_get()->exp_sum(x, n, 0, x);
    for (int64_t i = 0; i < n; i++)
        x[i] = -x[i];
}

/* Sets the places of all tensors, and fills those that are not packed unless they are `filled` already. */
static void fill_vectors(const mp_builder *builder, bool filled) {
    mp_weight_store *store = builder->store;
    for (int i = 0; i < store->count; i++) {
        mp_build_job *job = &store->jobs[i];
        if (job->linear) {
            if (!job->may_stay || builder->use != MP_WEIGHTS_MAPPED)
                job->linear->w[job->part].data = store->slab + job->offset;
            continue;
        }
        if (!job->append || job->at == 0)
            *job->vector = (float *)(store->slab + job->offset);
        if (job->transposed && !filled)
            fill_transposed(job);
        for (int64_t row = 0; row < job->rows && !filled && !job->transposed; row++)
            mp_dequantize_row(job->tensor.dtype, mp_tensor_row(&job->tensor, row), job->n,
                              *job->vector + job->at + row * job->n);
        for (int64_t v = 0; job->add != 0 && v < job->n && !filled; v++)
            (*job->vector)[v] += job->add;
        if (job->exp && !filled)
            negate_exp(*job->vector, job->n);
        for (int64_t v = 0; job->append && job->scale != 1 && v < job->n && !filled; v++)
            (*job->vector)[job->at + v] *= job->scale;
        if (job->rows > 1 && !filled)
            mp_weights_release(builder->weights, &job->tensor);
    }
}

static mp_status pack_matrices(const mp_builder *builder, mp_lease *lease, mp_budget *budget, mp_progress *progress,
                               mp_error *error) {
    mp_weight_store *store = builder->store;
    pack_run run = {.builder = builder, .progress = progress};
    mp_status status = make_scratch(builder, lease, budget, &run, error);
    for (int i = 0; i < store->count && status == MP_OK; i++) {
        mp_build_job *job = &store->jobs[i];
        if (!job->linear || job->tensor.nbytes < SPLIT_BYTES)
            continue;
        split_run split = {job, &run};
        mp_lease_run(lease, split_body, &split);
        mp_weights_release(builder->weights, &job->tensor);
        mp_progress_set(progress, packing, 0);
        job->packed = true;
    }
    if (status == MP_OK)
        mp_lease_run(lease, pack_body, &run);
    if (status == MP_OK && mp_weights_poisoned(builder->weights))
        status = mp_fail(error, MP_IO,
                         "a weight file was truncated while it was loaded; restore it and load the model again");
    else if (status == MP_OK && atomic_load_explicit(&run.infinite, memory_order_relaxed))
        status = report_infinite(builder, (float *)(void *)run.scratch, error);
    drop_scratch(&run, budget);
    return status;
}

mp_status mp_builder_finish(const mp_builder *builder, mp_lease *lease, mp_budget *budget, mp_progress *progress,
                            mp_error *error) {
    mp_shm *shared = builder->shared;
    const bool filled = shared && shared->data;
    builder->store->budget = budget;
    place_biases(builder);
    MP_TRY(place_slab(builder, builder->store->slab_bytes + MP_WMAT_SLACK, lease, budget, progress, error));
    mp_progress_set(progress, packing, 0);
    fill_vectors(builder, filled);
    mp_status status = leave_unpacked(builder, error);
    if (!filled && status == MP_OK)
        status = pack_matrices(builder, lease, budget, progress, error);
    if (!filled && status == MP_OK && shared)
        status = mp_shm_freeze(shared, error);
    if (!filled && status != MP_OK)
        drop_slab(builder, budget);
    if (shared)
        builder->store->slab = NULL; /* the caller owns it */
    mp_builder_drop_jobs(builder->store);
    return status;
}
