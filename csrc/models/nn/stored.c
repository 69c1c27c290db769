#include "models/nn/stored.h"

#include <assert.h>
#include <stddef.h>

#include "base/alloc.h"
#include "base/sys.h"

enum { STORED, KEEPING, PACKED };

/* Time that the threads of a pass together may spend on keeping packed panels, per pass and per row of a pass. A larger
 * budget lengthens the steps of the first seconds; with a smaller budget, more steps pack all panels and keep few of
 * them. */
static const uint64_t KEEP_NS = 300ull * 1000 * 1000, KEEP_ROW_NS = 2000 * 1000;

/* A pass over unpacked panels may take the time of UNPACKED_ROWS rows, but at most UNPACKED_NS, whatever its budget. */
enum { UNPACKED_ROWS = 256 };
static const uint64_t UNPACKED_NS = 1500ull * 1000 * 1000;

/* Maximum bytes that the fetching thread reads before it checks whether it shall end: the file may have to come from a
 * disk. Must be a multiple of the page size. */
enum { FETCH_BYTES = 4 << 20 };

/* Runs in the child of a fork, which has no fetching thread, and marks panels that were being kept as stored: the
 * threads that packed them do not exist in the child, so these panels are incomplete. */
static void reset_threads(mp_forked *self) {
    mp_stored *stored = (mp_stored *)((char *)self - offsetof(mp_stored, forked));
    stored->fetcher = (mp_thread){0};
    atomic_store_explicit(&stored->fetching, false, memory_order_relaxed);
    for (int i = 0; i < stored->count; i++) {
        mp_stored_part *part = &stored->parts[i];
        for (int64_t p = 0; p < part->panels; p++)
            if (atomic_load_explicit(&part->state[p], memory_order_relaxed) == KEEPING)
                atomic_store_explicit(&part->state[p], STORED, memory_order_relaxed);
    }
}

mp_status mp_stored_create(const mp_weights *weights, int capacity, bool mapped, mp_stored **out, mp_error *error) {
    size_t bytes = sizeof(mp_stored) + (size_t)capacity * sizeof(mp_stored_part);
    mp_stored *stored = mp_alloc_zeroed(bytes, MP_TAG_WEIGHTS);
    if (!stored)
        return mp_fail_memory(error, bytes, "the list of matrices");
    const mp_status status = mp_forked_add(&stored->forked, reset_threads, error);
    if (status != MP_OK) {
        mp_free(stored);
        return status;
    }
    stored->weights = weights;
    stored->capacity = capacity;
    stored->mapped = mapped;
    stored->keep_ns = KEEP_NS;
    stored->keep_row_ns = KEEP_ROW_NS;
    *out = stored;
    return MP_OK;
}

void mp_stored_destroy(mp_stored *stored) {
    if (!stored)
        return;
    atomic_store_explicit(&stored->quit, true, memory_order_relaxed);
    mp_thread_join(&stored->fetcher);
    mp_forked_remove(&stored->forked);
    for (int i = 0; i < stored->count; i++)
        mp_free(stored->parts[i].state);
    mp_free(stored);
}

mp_status mp_stored_add(mp_stored *stored, const mp_wmat *w, const mp_tensor *tensor, mp_stored_part **out,
                        mp_error *error) {
    assert(stored->count < stored->capacity);
    mp_stored_part *part = &stored->parts[stored->count];
    part->state = mp_alloc_array((size_t)w->panels, sizeof *part->state, MP_TAG_WEIGHTS);
    if (!part->state)
        return mp_fail_memory(error, (uint64_t)w->panels, "the panel states of a matrix");
    part->all = stored;
    part->tensor = *tensor;
    part->panels = w->panels;
    atomic_init(&part->left, w->panels);
    if (w->panel_bytes + MP_WMAT_SLACK > stored->scratch)
        stored->scratch = w->panel_bytes + MP_WMAT_SLACK;
    if (tensor->dtype == MP_F32 && stored->scratch < MP_STORED_TILE * sizeof(float)) /* for mp_gemm_stored */
        stored->scratch = MP_STORED_TILE * sizeof(float);
    stored->count++;
    atomic_fetch_add_explicit(&stored->left, 1, memory_order_relaxed);
    *out = part;
    return MP_OK;
}

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

/* Returns true if all panels of the matrix are packed. */
static bool is_kept(const mp_stored_part *part) {
    return atomic_load_explicit(&part->left, memory_order_acquire) == 0;
}

static void fetch_main(void *arg) {
    mp_stored *stored = arg;
    for (int i = 0; i < stored->count; i++) {
        mp_stored_part *part = &stored->parts[i];
        const uint64_t chunks = chunks_of(&part->tensor);
        for (uint64_t chunk = 0; chunk < chunks && !is_kept(part); chunk++) {
            if (atomic_load_explicit(&stored->quit, memory_order_relaxed))
                return;
            fetch_chunk(&part->tensor, chunk);
        }
        if (is_kept(part)) /* its pages were released, perhaps before the last chunk was read */
            mp_weights_release(stored->weights, &part->tensor);
    }
    atomic_store_explicit(&stored->fetching, false, memory_order_relaxed);
}

void mp_stored_fetch(mp_stored *stored) {
    mp_error error;
    atomic_store_explicit(&stored->fetching, true, memory_order_relaxed);
    if (mp_thread_start(&stored->fetcher, "mpool-fetch", fetch_main, stored, &error) != MP_OK)
        atomic_store_explicit(&stored->fetching, false, memory_order_relaxed);
}

void mp_stored_facts(const mp_stored *stored, mp_matrices *weights, const _Atomic int32_t **unpacked) {
    *weights = !stored ? MP_MATRICES_PACKED : stored->mapped ? MP_MATRICES_MAPPED : MP_MATRICES_PACKING;
    *unpacked = stored ? &stored->left : NULL;
}

uint64_t mp_stored_pass_ns(const mp_stored *stored, uint64_t budget_ns, uint64_t row_ns) {
    if (!mp_stored_left(stored))
        return budget_ns;
    const uint64_t rows = row_ns < UNPACKED_NS / UNPACKED_ROWS ? UNPACKED_ROWS * row_ns : UNPACKED_NS;
    return budget_ns > rows ? budget_ns : rows;
}

void mp_stored_begin(mp_stored *stored, int M) {
    const bool first = !atomic_exchange_explicit(&stored->used, true, memory_order_relaxed);
    const uint64_t keep_ns = (first ? 0 : stored->keep_ns) + (uint64_t)M * stored->keep_row_ns;
    mp_pack_budget_set(&stored->time, stored->mapped ? 0 : keep_ns);
}

bool mp_stored_corrupted(const mp_stored *stored) {
    return stored && atomic_load_explicit(&stored->corrupted, memory_order_relaxed);
}

bool mp_stored_sound(mp_stored *stored) {
    if (atomic_load_explicit(&stored->corrupted, memory_order_relaxed))
        return false;
    if (mp_weights_sound(stored->weights))
        return true;
    atomic_store_explicit(&stored->corrupted, true, memory_order_relaxed);
    return false;
}

static inline bool is_packed(const mp_stored_part *part, int panel) {
    return atomic_load_explicit(&part->state[panel], memory_order_acquire) == PACKED;
}

/* Records that a panel is packed and will stay so. After the last panel of the matrix, releases the file's pages. */
static void mark_packed(mp_stored_part *part, int panel) {
    mp_stored *all = part->all;
    atomic_store_explicit(&part->state[panel], PACKED, memory_order_release);
    if (atomic_fetch_sub_explicit(&part->left, 1, memory_order_acq_rel) != 1)
        return;
    /* releasing is safe: a thread that still reads these pages reads them from the file again */
    mp_weights_release(all->weights, &part->tensor);
    mp_stored_sound(all); /* last check: after it, only mp_stored_corrupted is consulted */
    atomic_fetch_sub_explicit(&all->left, 1, memory_order_acq_rel);
}

/* Packs one panel into scratch, as a matrix of one panel, and computes with it. */
static void gemm_through_scratch(const mp_stored_part *part, const mp_wmat *w, const mp_acts *x, int panel,
                                 const mp_epilogue *ep, float *y, int64_t ldy, uint8_t *scratch) {
    int32_t n0 = panel * MP_PANEL_N, left = w->N - n0, n = left < MP_PANEL_N ? left : MP_PANEL_N;
    mp_tensor rows = part->tensor;
    rows.data = mp_tensor_row(&part->tensor, n0);
    rows.nbytes = part->tensor.nbytes / (uint64_t)w->N * (uint64_t)n;
    rows.shape[0] = n;
    mp_wmat one = *w;
    one.N = n;
    one.panels = 1;
    one.data = scratch;
    mp_wmat_pack(&one, &rows, 0, 1);
    mp_epilogue end = ep ? *ep : (mp_epilogue){0};
    if (end.bias)
        end.bias += n0;
    if (end.residual)
        end.residual += n0;
    mp_gemm(&one, x, 0, x->M, 0, 1, &end, y + n0, ldy);
}

/* Returns the end of the outputs of the panels before panel1. */
static int outputs_end(const mp_wmat *w, int panel1) { return panel1 < w->panels ? panel1 * MP_PANEL_N : w->N; }

/* Computes with panels [panel0, panel1), none of which was packed a moment ago, without keeping any. */
static void gemm_unpacked(const mp_stored_part *part, const mp_wmat *w, const mp_acts *x, int panel0, int panel1,
                          const mp_epilogue *ep, float *y, int64_t ldy, uint8_t *scratch) {
    if (mp_gemm_stored(&part->tensor, x, panel0 * MP_PANEL_N, outputs_end(w, panel1), part->all->fast, ep,
                       (float *)(void *)scratch, y, ldy))
        return;
    for (int p = panel0; p < panel1; p++)
        gemm_through_scratch(part, w, x, p, ep, y, ldy, scratch);
}

/* Packs a panel permanently if there is time and no other thread packs it. Returns true if it did; the caller then
 * calls mark_packed. */
static bool stored_keep(mp_stored_part *part, const mp_wmat *w, int panel) {
    mp_pack_budget *time = &part->all->time;
    uint8_t expected = STORED;
    if (!mp_pack_budget_left(time) ||
        !atomic_compare_exchange_strong_explicit(&part->state[panel], &expected, KEEPING, memory_order_acq_rel,
                                                 memory_order_relaxed))
        return false;
    mp_wmat whole = *w;
    mp_pack_budget_pack(time, &whole, &part->tensor, panel, panel + 1);
    return true;
}

void mp_stored_gemm(mp_stored_part *part, const mp_wmat *w, const mp_acts *x, int panel0, int panel1,
                    const mp_epilogue *ep, float *y, int64_t ldy, uint8_t *panel_scratch) {
    for (int p = panel0, end; p < panel1; p = end) {
        end = p;
        while (end < panel1 && is_packed(part, end))
            end++;
        if (end > p) {
            mp_gemm(w, x, 0, x->M, p, end, ep, y, ldy);
            continue;
        }
        do /* panel p counts as unpacked, even if another thread has packed it since */
            end++;
        while (end < panel1 && !is_packed(part, end));
        /* OpenBLAS multiplies stored rows, and needs large products: it gets all panels up to the next packed one.
         * These are packed afterwards, for later passes. */
        const int outputs = outputs_end(w, end) - p * MP_PANEL_N;
        const bool by_blas = mp_gemm_stored_by_blas(&part->tensor, x, outputs, part->all->fast);
        if (!by_blas && stored_keep(part, w, p)) {
            end = p + 1;
            mp_gemm(w, x, 0, x->M, p, end, ep, y, ldy);
            mark_packed(part, p);
            continue;
        }
        gemm_unpacked(part, w, x, p, end, ep, y, ldy, panel_scratch);
        for (int panel = p; by_blas && panel < end; panel++)
            if (stored_keep(part, w, panel))
                mark_packed(part, panel);
    }
}

void mp_stored_row(const mp_stored_part *part, const mp_wmat *w, int32_t n, float *out) {
    if (is_packed(part, n / MP_PANEL_N))
        mp_wmat_row(w, n, out);
    else
        mp_dequantize_row(part->tensor.dtype, mp_tensor_row(&part->tensor, n), w->K, out);
}
