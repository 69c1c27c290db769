#include "models/nn/weight_store.h"

#include <stddef.h>
#include <string.h>

#include "base/alloc.h"
#include "base/options.h"
#include "files/scaled_weights.h"
#include "models/nn/builder.h"
#include "models/nn/scratch.h"

/* Time that the threads of a pass together may spend on packing matrices of linear layers, per pass and per row of a
 * pass. A larger budget lengthens the steps of the first seconds; with a smaller budget, more steps pack all panels and
 * keep few of them. */
static const uint64_t KEEP_NS = 300ull * 1000 * 1000, KEEP_ROW_NS = 2000 * 1000;

/* A pass over unpacked panels may take the time of UNPACKED_ROWS rows, but at most UNPACKED_NS, whatever its budget. */
enum { UNPACKED_ROWS = 256 };
static const uint64_t UNPACKED_NS = 1500ull * 1000 * 1000;

/* Maximum bytes that the fetching thread reads before it checks whether it shall end: the file may have to come from a
 * disk. Must be a multiple of the page size. */
enum { FETCH_BYTES = 4 << 20 };

enum { PACK_SHARE = 1, DECODE_SHARE = 8 }; /* passes that decode have one part in DECODE_SHARE of it */
/* Maximum time for packing experts that a pass finds at its start. More collects while the memory budget refuses
 * copies. */
static const int64_t EXPERT_MAX_NS = 50 * 1000 * 1000;
static const uint64_t POLL_NS = 100 * 1000;

/* ---- the use that a model makes of its weights ------------------------------------------------------------------- */

/* Returns true if the matrices of the layers are stored as F32. Files use one type for all of them, except routers. */
static bool is_stored_as_f32(const mp_spec *spec) {
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const mp_tensor_entry *entry = mp_spec_tensor_at(spec, i);
        if (entry->ndim == 2 && strncmp(entry->name, "blk.", 4) == 0 && !strstr(entry->name, ".ffn_gate_inp"))
            return entry->dtype == MP_F32;
    }
    return false;
}

mp_status mp_weights_read_fast(const mp_spec *spec, bool *fast, mp_error *error) {
    return mp_spec_bool(spec, "mpool.float32_fast", &(bool){false}, fast, error);
}

mp_status mp_weights_use_read(const mp_spec *spec, mp_weights_use *use, mp_error *error) {
    static const char *const names[] = {
        [MP_WEIGHTS_AUTO] = "auto", [MP_WEIGHTS_MAPPED] = "mapped", [MP_WEIGHTS_PACKED] = "packed"};
    const char *name;
    bool fast;
    MP_TRY(mp_spec_string(spec, "mpool.weights", names[MP_WEIGHTS_AUTO], &name, error));
    MP_TRY(mp_weights_read_fast(spec, &fast, error));
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (strcmp(names[i], name) == 0) {
            *use = (mp_weights_use)i;
            if (fast && *use == MP_WEIGHTS_AUTO && is_stored_as_f32(spec) && mp_blas_differs())
                *use = MP_WEIGHTS_MAPPED;
            return MP_OK;
        }
    return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.weights", "auto, mapped, packed", "%s",
                        name);
}

mp_weights_use mp_weights_use_or_auto(const mp_spec *spec) {
    mp_weights_use use = MP_WEIGHTS_AUTO;
    mp_error error;
    return mp_weights_use_read(spec, &use, &error) == MP_OK ? use : MP_WEIGHTS_AUTO;
}

uint64_t mp_weights_threshold(mp_weights_use use) {
    return use == MP_WEIGHTS_AUTO     ? (uint64_t)mp_options_get()->pack_on_use_mb << 20
           : use == MP_WEIGHTS_MAPPED ? 0
                                      : UINT64_MAX;
}

bool mp_may_stay_unpacked(mp_unpacked unpacked, mp_weights_use use, mp_dtype dtype, mp_wkind kind) {
    if (mp_dtype_is_scaled(dtype))
        return false;
    if (unpacked == MP_UNPACKED_ENCODER)
        return use == MP_WEIGHTS_MAPPED || (kind == MP_W_F32 && dtype == MP_F32);
    return unpacked == MP_UNPACKED_EXACT && (kind == MP_W_BF16 ? dtype == MP_BF16 : kind != MP_W_I8);
}

mp_matrices mp_weights_predict(const mp_spec *spec, mp_compute compute, mp_unpacked unpacked,
                               bool (*may_stay)(const mp_spec *spec, const mp_tensor_entry *entry)) {
    uint64_t bytes = 0;
    int count = 0;
    const mp_weights_use use = mp_weights_use_or_auto(spec);
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const mp_tensor_entry *entry = mp_spec_tensor_at(spec, i);
        mp_wkind kind;
        if (entry->ndim != 2 || mp_is_companion(entry->name) || !may_stay(spec, entry) ||
            !mp_wmat_kind_for(entry->dtype, compute, &kind) || !mp_may_stay_unpacked(unpacked, use, entry->dtype, kind))
            continue;
        bytes += entry->nbytes;
        count++;
    }
    if (count == 0 || bytes < mp_weights_threshold(use))
        return MP_MATRICES_PACKED;
    return use == MP_WEIGHTS_MAPPED ? MP_MATRICES_MAPPED : MP_MATRICES_PACKING;
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

/* Runs in the child of a fork, in which the threads that packed panels, ran passes and fetched pages do not exist: the
 * panels that they were packing are incomplete. If one of them was taking memory for a matrix, its bytes may stay
 * charged and unused. In a grandchild, panels that the child was packing stay PACKING for good: slower, but correct. */
static void forget_threads(mp_forked *self) {
    mp_weight_store *store = (mp_weight_store *)((char *)self - offsetof(mp_weight_store, forked));
    mp_panels *const lists[] = {store->linears, store->experts};
    mp_mutex_init(&store->lock);
    store->fetcher = (mp_thread){0};
    atomic_store_explicit(&store->fetching, false, memory_order_relaxed);
    atomic_store_explicit(&store->passes, 0, memory_order_relaxed);
    for (int l = 0; l < 2; l++)
        for (mp_panels *panels = lists[l]; panels; panels = panels->next)
            for (int64_t i = 0; i < (int64_t)panels->count * panels->panels; i++)
                if (atomic_load_explicit(&panels->state[i], memory_order_relaxed) == MP_PANEL_PACKING)
                    atomic_store_explicit(&panels->state[i], MP_PANEL_MAPPED, memory_order_relaxed);
}

mp_status mp_weight_store_pack_on_use(mp_weight_store *store, const mp_weights *weights, mp_error *error) {
    if (store->packs_on_use)
        return MP_OK;
    MP_TRY(mp_forked_add(&store->forked, forget_threads, error));
    mp_mutex_init(&store->lock);
    store->packs_on_use = true;
    store->weights = weights;
    store->keep_ns = KEEP_NS;
    store->keep_row_ns = KEEP_ROW_NS;
    store->pack_share = PACK_SHARE;
    return MP_OK;
}

static void free_panels(mp_panels *panels) {
    mp_free((void *)panels->data);
    mp_free((void *)panels->state);
    mp_free((void *)panels->left);
    mp_free((void *)panels->pending);
    mp_free(panels);
}

/* Marks all panels as MAPPED, without memory. */
static void reset_panels(mp_panels *panels) {
    for (int64_t i = 0; i < (int64_t)panels->count * panels->panels; i++)
        atomic_store_explicit(&panels->state[i], MP_PANEL_MAPPED, memory_order_relaxed);
    for (int32_t i = 0; i < panels->count; i++) {
        atomic_store_explicit(&panels->left[i], panels->panels, memory_order_relaxed);
        atomic_store_explicit(&panels->data[i], NULL, memory_order_relaxed);
    }
}

static mp_panels *make_panels(mp_weight_store *store, const mp_wmat *w, int32_t count, bool experts) {
    mp_panels *panels = mp_alloc_zeroed(sizeof *panels, MP_TAG_WEIGHTS);
    if (!panels)
        return NULL;
    *panels = (mp_panels){.store = store, .count = count, .panels = w->panels, .bytes = mp_wmat_bytes(w),
                          .panel_bytes = w->panel_bytes};
    panels->data = mp_alloc_array((size_t)count, sizeof *panels->data, MP_TAG_WEIGHTS);
    panels->state = mp_alloc_array((size_t)count * (size_t)w->panels, sizeof *panels->state, MP_TAG_WEIGHTS);
    panels->left = mp_alloc_array((size_t)count, sizeof *panels->left, MP_TAG_WEIGHTS);
    if (experts)
        panels->pending = mp_alloc_array((size_t)count, sizeof *panels->pending, MP_TAG_WEIGHTS);
    if (!panels->data || !panels->state || !panels->left || (experts && !panels->pending)) {
        free_panels(panels);
        return NULL;
    }
    reset_panels(panels);
    for (int32_t i = 0; experts && i < count; i++)
        atomic_init(&panels->pending[i], 0);
    return panels;
}

static void append(mp_panels **list, mp_panels *panels) {
    while (*list)
        list = &(*list)->next;
    *list = panels;
}

mp_status mp_weight_store_add_linear(mp_weight_store *store, const mp_wmat *w, const mp_tensor *source,
                                     mp_panels **out, mp_error *error) {
    mp_panels *panels = make_panels(store, w, 1, false);
    if (!panels)
        return mp_fail_memory(error, sizeof *panels + (uint64_t)w->panels, "the panel states of a matrix");
    panels->source = *source;
    panels->sources = &panels->source;
    atomic_init(&panels->data[0], w->data);
    store->panel_scratch = mp_larger(store->panel_scratch, w->panel_bytes + MP_WMAT_SLACK);
    if (source->dtype == MP_F32) /* for mp_gemm_stored */
        store->panel_scratch = mp_larger(store->panel_scratch, MP_STORED_TILE * sizeof(float));
    append(&store->linears, panels);
    atomic_fetch_add_explicit(&store->unpacked, 1, memory_order_relaxed);
    *out = panels;
    return MP_OK;
}

mp_panels *mp_weight_store_add_experts(mp_weight_store *store, const mp_wmat *w, const mp_tensor *sources,
                                       int32_t count) {
    uint64_t bytes, most;
    if (__builtin_mul_overflow((uint64_t)mp_wmat_bytes(w), (uint64_t)count, &bytes) ||
        __builtin_add_overflow(store->most, bytes, &most))
        return NULL;
    mp_panels *panels = make_panels(store, w, count, true);
    if (!panels)
        return NULL;
    panels->sources = sources;
    append(&store->experts, panels);
    store->most = most;
    return panels;
}

/* Frees the region and gives its bytes back to the budget. Returns these bytes. */
static uint64_t release_region(mp_weight_store *store) {
    const uint64_t bytes = atomic_exchange(&store->copied, 0);
    if (store->region) {
        mp_alloc_count(MP_TAG_WEIGHTS, (int64_t)store->region_bytes - (int64_t)bytes);
        mp_region_free(store->region, store->region_bytes, MP_TAG_WEIGHTS);
        store->region = NULL;
    }
    if (bytes > 0)
        mp_budget_give(store->budget, bytes);
    return bytes;
}

void mp_weight_store_deinit(mp_weight_store *store) {
    mp_panels *const lists[] = {store->linears, store->experts};
    mp_builder_drop_jobs(store);
    if (store->packs_on_use) {
        atomic_store_explicit(&store->quit, true, memory_order_relaxed);
        mp_thread_join(&store->fetcher);
        mp_forked_remove(&store->forked);
        release_region(store);
        mp_mutex_deinit(&store->lock);
    }
    for (int l = 0; l < 2; l++)
        for (mp_panels *panels = lists[l], *next; panels; panels = next) {
            next = panels->next;
            free_panels(panels);
        }
    mp_free(store->slab);
    if (store->budget)
        mp_budget_give(store->budget, store->charged);
    *store = (mp_weight_store){0};
}

uint64_t mp_weight_store_bytes(const mp_weight_store *store) {
    return store->charged + atomic_load_explicit(&store->copied, memory_order_relaxed);
}

void mp_weight_store_facts(const mp_weight_store *store, mp_model_base *base) {
    base->facts.weights = !store->linears ? MP_MATRICES_PACKED : store->mapped ? MP_MATRICES_MAPPED
                                                                               : MP_MATRICES_PACKING;
    base->unpacked = store->linears ? &store->unpacked : NULL;
    base->facts.expert_bytes = (int64_t)store->reads.bytes;
    base->thrashing = &store->reads.thrashing;
    if (store->most > 0) {
        base->expert_copies = &store->kept;
        base->expert_copies_most = store->partial ? UINT64_MAX : store->most;
    }
}

/* ---- panels ------------------------------------------------------------------------------------------------------ */

/* Returns true if a third of the budget stays free after `bytes` more: requests need memory for KV blocks and scratch,
 * and the governor frees caches when little is left. */
static bool has_room(const mp_weight_store *store, uint64_t bytes) {
    const mp_budget *budget = mp_budget_top(store->budget);
    const uint64_t limit = atomic_load_explicit(&budget->limit, memory_order_relaxed);
    const uint64_t used = atomic_load_explicit(&budget->used, memory_order_relaxed);
    return limit == UINT64_MAX || used + bytes <= limit - limit / 3;
}

/* Reserves the memory of all copies, without taking any from the system. mp_alloc_bytes counts what matrices take. */
static void reserve_region(mp_weight_store *store) {
    size_t bytes;
    if (__builtin_add_overflow((size_t)store->most, (size_t)MP_WMAT_SLACK + MP_HUGE_PAGE - 1, &bytes))
        return;
    bytes -= bytes % MP_HUGE_PAGE;
    store->region = mp_region_alloc(bytes, MP_TAG_WEIGHTS);
    if (!store->region)
        return;
    store->region_bytes = bytes;
    mp_alloc_count(MP_TAG_WEIGHTS, -(int64_t)bytes);
}

/* Takes memory for an expert's matrix. The lock must be held. */
static uint8_t *take_copy(mp_weight_store *store, uint64_t bytes) {
    if (!store->region && !store->refused) {
        reserve_region(store);
        store->refused = !store->region;
    }
    const uint64_t at = atomic_load_explicit(&store->copied, memory_order_relaxed);
    if (store->refused || store->most - at < bytes || !has_room(store, bytes) || !mp_budget_take(store->budget, bytes))
        return NULL;
    mp_alloc_count(MP_TAG_WEIGHTS, (int64_t)bytes);
    atomic_store_explicit(&store->copied, at + bytes, memory_order_relaxed);
    return store->region + at;
}

/* Returns true if the matrix has memory, and takes it if there is room. */
static bool has_memory(mp_panels *panels, int matrix) {
    mp_weight_store *store = panels->store;
    if (atomic_load_explicit(&panels->data[matrix], memory_order_acquire))
        return true;
    if (!has_room(store, panels->bytes)) /* checked before the lock, so that threads do not queue for a refusal */
        return false;
    mp_mutex_lock(&store->lock);
    uint8_t *data = atomic_load_explicit(&panels->data[matrix], memory_order_relaxed);
    if (!data) {
        data = take_copy(store, panels->bytes);
        atomic_store_explicit(&panels->data[matrix], data, memory_order_release);
    }
    mp_mutex_unlock(&store->lock);
    return data != NULL;
}

bool mp_panel_claim(mp_panels *panels, int matrix, int panel) {
    _Atomic uint8_t *state = &panels->state[(int64_t)matrix * panels->panels + panel];
    uint8_t expected = MP_PANEL_MAPPED;
    if (!atomic_compare_exchange_strong_explicit(state, &expected, MP_PANEL_PACKING, memory_order_acq_rel,
                                                 memory_order_relaxed))
        return false;
    if (has_memory(panels, matrix))
        return true;
    atomic_store_explicit(state, MP_PANEL_MAPPED, memory_order_release);
    return false;
}

bool mp_panel_claim_expert(mp_panels *panels, int matrix, int panel, bool few) {
    if (!panels)
        return false;
    mp_weight_store *store = panels->store;
    const bool started = atomic_load_explicit(&panels->data[matrix], memory_order_relaxed) != NULL;
    if (!few || started || mp_pack_budget_left(&store->expert_time))
        return mp_panel_claim(panels, matrix, panel);
    if (!atomic_load_explicit(&panels->pending[matrix], memory_order_relaxed) &&
        !atomic_exchange_explicit(&panels->pending[matrix], 1, memory_order_relaxed))
        atomic_fetch_add_explicit(&store->pending, 1, memory_order_relaxed);
    return false;
}

void mp_panel_publish(mp_panels *panels, int matrix, int panel) {
    mp_weight_store *store = panels->store;
    const bool expert = panels->pending != NULL;
    atomic_fetch_add_explicit(&store->packed, 1, memory_order_relaxed);
    if (expert)
        atomic_fetch_add_explicit(&store->kept, panels->panel_bytes, memory_order_relaxed);
    atomic_store_explicit(&panels->state[(int64_t)matrix * panels->panels + panel], MP_PANEL_PACKED,
                          memory_order_release);
    if (atomic_fetch_sub_explicit(&panels->left[matrix], 1, memory_order_acq_rel) != 1)
        return;
    /* releasing is safe: a thread that still reads these pages reads them from the file again */
    mp_weights_release(store->weights, &panels->sources[matrix]);
    if (expert)
        return;
    mp_weight_store_sound(store, true); /* last check: after it, only `corrupted` is consulted */
    atomic_fetch_sub_explicit(&store->unpacked, 1, memory_order_acq_rel);
}

/* ---- reading the file ahead -------------------------------------------------------------------------------------- */

/* Chunks of a matrix end at addresses that are multiples of FETCH_BYTES, wherever its data begins, so that no page of
 * the matrix belongs to two chunks. Returns the bytes from the previous such address to the first byte. */
static uint64_t chunk_offset(const mp_tensor *tensor) { return (uintptr_t)tensor->data % FETCH_BYTES; }

static uint64_t chunks_of(const mp_tensor *tensor) {
    return (chunk_offset(tensor) + tensor->nbytes + FETCH_BYTES - 1) / FETCH_BYTES;
}

static void fetch_chunk(const mp_tensor *tensor, uint64_t chunk) {
    const uint64_t offset = chunk_offset(tensor), end = (chunk + 1) * FETCH_BYTES - offset;
    const uint64_t from = chunk ? chunk * FETCH_BYTES - offset : 0, to = end < tensor->nbytes ? end : tensor->nbytes;
    mp_sys_advise((uint8_t *)tensor->data + from, (size_t)(to - from), MP_ADVISE_POPULATE);
}

static void fetch_main(void *arg) {
    mp_weight_store *store = arg;
    for (mp_panels *panels = store->linears; panels; panels = panels->next) {
        const uint64_t chunks = chunks_of(&panels->source);
        for (uint64_t chunk = 0; chunk < chunks && mp_panels_left(panels, 0); chunk++) {
            if (atomic_load_explicit(&store->quit, memory_order_relaxed))
                return;
            fetch_chunk(&panels->source, chunk);
        }
        if (!mp_panels_left(panels, 0)) /* its pages were released, perhaps before the last chunk was read */
            mp_weights_release(store->weights, &panels->source);
    }
    atomic_store_explicit(&store->fetching, false, memory_order_relaxed);
}

void mp_weight_store_fetch(mp_weight_store *store) {
    mp_error error;
    atomic_store_explicit(&store->fetching, true, memory_order_relaxed);
    if (mp_thread_start(&store->fetcher, "mpool-fetch", fetch_main, store, &error) != MP_OK)
        atomic_store_explicit(&store->fetching, false, memory_order_relaxed);
}

/* ---- passes ------------------------------------------------------------------------------------------------------ */

uint64_t mp_weight_store_pass_ns(const mp_weight_store *store, uint64_t budget_ns, uint64_t row_ns) {
    if (!mp_weight_store_unpacked(store))
        return budget_ns;
    const uint64_t rows = row_ns < UNPACKED_NS / UNPACKED_ROWS ? UNPACKED_ROWS * row_ns : UNPACKED_NS;
    return budget_ns > rows ? budget_ns : rows;
}

void mp_weight_store_enter(mp_weight_store *store) {
    int32_t passes = atomic_load(&store->passes);
    while (passes < 0 || !atomic_compare_exchange_weak(&store->passes, &passes, passes + 1))
        if (passes < 0) {
            mp_sys_sleep_ns(POLL_NS);
            passes = atomic_load(&store->passes);
        }
}

void mp_weight_store_leave(mp_weight_store *store) { atomic_fetch_sub(&store->passes, 1); }

uint64_t mp_weight_store_begin(mp_weight_store *store, int M) {
    if (mp_weight_store_unpacked(store)) {
        const bool first = !atomic_exchange_explicit(&store->used, true, memory_order_relaxed);
        const uint64_t keep_ns = (first ? 0 : store->keep_ns) + (uint64_t)M * store->keep_row_ns;
        mp_pack_budget_set(&store->linear_time, store->mapped ? 0 : keep_ns);
    }
    atomic_store_explicit(&store->decodes, M <= MP_DECODE_ROWS, memory_order_relaxed);
    mp_weight_store_enter(store);
    if (atomic_load_explicit(&store->expert_time.left_ns, memory_order_relaxed) > EXPERT_MAX_NS)
        mp_pack_budget_set(&store->expert_time, (uint64_t)EXPERT_MAX_NS);
    return atomic_load_explicit(&store->packed, memory_order_relaxed);
}

bool mp_weight_store_end(mp_weight_store *store, uint64_t packed) {
    mp_weight_store_leave(store);
    return atomic_load_explicit(&store->packed, memory_order_relaxed) != packed;
}

bool mp_weight_store_sound(mp_weight_store *store, bool unpacked) {
    if (mp_weight_store_corrupted(store))
        return false;
    if (!unpacked || mp_weights_sound(store->weights))
        return true;
    atomic_store_explicit(&store->corrupted, true, memory_order_relaxed);
    return false;
}

/* ---- experts ----------------------------------------------------------------------------------------------------- */

/* Memory is needed elsewhere: packing resumes only after further stored products. */
static void clear_pending(mp_weight_store *store) {
    mp_pack_budget_set(&store->idle_time, 0);
    for (mp_panels *panels = store->experts; panels; panels = panels->next)
        for (int32_t e = 0; e < panels->count; e++)
            if (atomic_exchange_explicit(&panels->pending[e], 0, memory_order_relaxed))
                atomic_fetch_sub_explicit(&store->pending, 1, memory_order_relaxed);
}

uint64_t mp_weight_store_drop(mp_weight_store *store) {
    int32_t idle = 0;
    if (atomic_load_explicit(&store->copied, memory_order_relaxed) == 0 ||
        !atomic_compare_exchange_strong(&store->passes, &idle, -1))
        return 0;
    for (mp_panels *panels = store->experts; panels; panels = panels->next)
        reset_panels(panels);
    clear_pending(store);
    atomic_store_explicit(&store->kept, 0, memory_order_relaxed);
    const uint64_t freed = release_region(store);
    atomic_store(&store->passes, 0);
    return freed;
}

void mp_weight_store_note_stored(mp_weight_store *store, uint64_t ns) {
    ns *= (uint64_t)store->pack_share;
    mp_pack_budget_add(&store->idle_time, ns);
    const bool decodes = atomic_load_explicit(&store->decodes, memory_order_relaxed);
    mp_pack_budget_add(&store->expert_time, decodes ? ns / DECODE_SHARE : ns);
}

bool mp_weight_store_has_pending(const mp_weight_store *store) {
    return mp_pack_budget_left(&store->idle_time) && atomic_load_explicit(&store->pending, memory_order_relaxed) > 0;
}

void mp_weight_store_end_pending(mp_panels *panels, int expert, bool packed) {
    if (!packed)
        clear_pending(panels->store);
    else if (atomic_exchange_explicit(&panels->pending[expert], 0, memory_order_relaxed))
        atomic_fetch_sub_explicit(&panels->store->pending, 1, memory_order_relaxed);
}
