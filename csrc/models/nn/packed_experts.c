#include "models/nn/packed_experts.h"

#include <stddef.h>

#include "base/sys.h"

enum { PACK_SHARE = 1, DECODE_SHARE = 8 }; /* passes that decode have one part in DECODE_SHARE of it */
/* Maximum time for packing that a pass finds at its start. More collects while the memory budget refuses copies. */
static const int64_t KEEP_MAX_NS = 50 * 1000 * 1000;
static const uint64_t POLL_NS = 100 * 1000;

/* Marks all panels of a matrix as not kept. */
static void reset_panels(mp_packed_matrix *matrix) {
    for (int64_t i = 0; i < (int64_t)matrix->count * matrix->panels; i++)
        atomic_store_explicit(&matrix->state[i], MP_PANEL_STORED, memory_order_relaxed);
    for (int32_t e = 0; e < matrix->count; e++) {
        atomic_store_explicit(&matrix->left[e], matrix->panels, memory_order_relaxed);
        atomic_store_explicit(&matrix->data[e], NULL, memory_order_relaxed);
    }
}

/* Memory is needed elsewhere: packing resumes only after further stored products. */
static void clear_pending(mp_packed_experts *experts) {
    mp_pack_budget_set(&experts->idle_time, 0);
    for (mp_packed_matrix *matrix = experts->first; matrix; matrix = matrix->next)
        for (int32_t e = 0; e < matrix->count; e++)
            if (atomic_exchange_explicit(&matrix->pending[e], 0, memory_order_relaxed))
                atomic_fetch_sub_explicit(&experts->pending, 1, memory_order_relaxed);
}

/* Runs in the child of a fork: the threads that packed panels and ran passes do not exist there. If one of them was
 * taking memory for a matrix, its bytes may stay charged and unused. */
static void forget_passes(mp_forked *self) {
    mp_packed_experts *experts = (mp_packed_experts *)((char *)self - offsetof(mp_packed_experts, forked));
    mp_mutex_init(&experts->lock);
    atomic_store_explicit(&experts->passes, 0, memory_order_relaxed);
    for (mp_packed_matrix *matrix = experts->first; matrix; matrix = matrix->next)
        for (int64_t i = 0; i < (int64_t)matrix->count * matrix->panels; i++)
            if (atomic_load_explicit(&matrix->state[i], memory_order_relaxed) == MP_PANEL_PACKING)
                atomic_store_explicit(&matrix->state[i], MP_PANEL_STORED, memory_order_relaxed);
}

mp_packed_experts *mp_packed_experts_create(const mp_weights *weights, mp_budget *budget) {
    mp_packed_experts *experts = mp_alloc_zeroed(sizeof *experts, MP_TAG_WEIGHTS);
    if (!experts)
        return NULL;
    mp_error error;
    if (mp_forked_add(&experts->forked, forget_passes, &error) != MP_OK) {
        mp_free(experts);
        return NULL;
    }
    experts->weights = weights;
    experts->budget = budget;
    experts->pack_share = PACK_SHARE;
    mp_mutex_init(&experts->lock);
    return experts;
}

/* Reserves the memory of all copies, without taking any from the system. mp_alloc_bytes counts what matrices take. */
static void packed_reserve(mp_packed_experts *experts) {
    size_t bytes;
    if (__builtin_add_overflow((size_t)experts->most, (size_t)MP_WMAT_SLACK + MP_HUGE_PAGE - 1, &bytes))
        return;
    bytes -= bytes % MP_HUGE_PAGE;
    experts->region = mp_region_alloc(bytes, MP_TAG_WEIGHTS);
    if (!experts->region)
        return;
    experts->region_bytes = bytes;
    mp_alloc_count(MP_TAG_WEIGHTS, -(int64_t)bytes);
}

/* Frees the region and gives its bytes back to the budget. Returns these bytes. */
static uint64_t packed_release(mp_packed_experts *experts) {
    const uint64_t bytes = atomic_exchange(&experts->charged, 0);
    if (experts->region) {
        mp_alloc_count(MP_TAG_WEIGHTS, (int64_t)experts->region_bytes - (int64_t)bytes);
        mp_region_free(experts->region, experts->region_bytes, MP_TAG_WEIGHTS);
        experts->region = NULL;
    }
    mp_budget_give(experts->budget, bytes);
    return bytes;
}

static void free_matrix(mp_packed_matrix *matrix) {
    mp_free((void *)matrix->data);
    mp_free((void *)matrix->state);
    mp_free((void *)matrix->left);
    mp_free((void *)matrix->pending);
    mp_free(matrix);
}

void mp_packed_experts_destroy(mp_packed_experts *experts) {
    if (!experts)
        return;
    mp_forked_remove(&experts->forked);
    packed_release(experts);
    for (mp_packed_matrix *matrix = experts->first, *next; matrix; matrix = next) {
        next = matrix->next;
        free_matrix(matrix);
    }
    mp_mutex_deinit(&experts->lock);
    mp_free(experts);
}

mp_packed_matrix *mp_packed_experts_add(mp_packed_experts *experts, const mp_wmat *w, int32_t count) {
    mp_packed_matrix *matrix = mp_alloc_zeroed(sizeof *matrix, MP_TAG_WEIGHTS);
    if (!matrix)
        return NULL;
    *matrix = (mp_packed_matrix){.all = experts, .count = count, .panels = w->panels, .bytes = mp_wmat_bytes(w),
                                 .panel_bytes = w->panel_bytes};
    matrix->data = mp_alloc_array((size_t)count, sizeof *matrix->data, MP_TAG_WEIGHTS);
    matrix->state = mp_alloc_array((size_t)count * (size_t)w->panels, sizeof *matrix->state, MP_TAG_WEIGHTS);
    matrix->left = mp_alloc_array((size_t)count, sizeof *matrix->left, MP_TAG_WEIGHTS);
    matrix->pending = mp_alloc_array((size_t)count, sizeof *matrix->pending, MP_TAG_WEIGHTS);
    uint64_t bytes, most;
    if (!matrix->data || !matrix->state || !matrix->left || !matrix->pending ||
        __builtin_mul_overflow((uint64_t)matrix->bytes, (uint64_t)count, &bytes) ||
        __builtin_add_overflow(experts->most, bytes, &most)) {
        free_matrix(matrix);
        return NULL;
    }
    reset_panels(matrix);
    for (int32_t e = 0; e < count; e++)
        atomic_init(&matrix->pending[e], 0);
    matrix->next = experts->first;
    experts->first = matrix;
    experts->most = most;
    return matrix;
}

uint64_t mp_packed_experts_begin(mp_packed_experts *experts, int M) {
    if (!experts)
        return 0;
    atomic_store_explicit(&experts->decodes, M <= MP_DECODE_ROWS, memory_order_relaxed);
    int32_t passes = atomic_load(&experts->passes);
    while (passes < 0 || !atomic_compare_exchange_weak(&experts->passes, &passes, passes + 1))
        if (passes < 0) {
            mp_sys_sleep_ns(POLL_NS);
            passes = atomic_load(&experts->passes);
        }
    if (atomic_load_explicit(&experts->pass_time.left_ns, memory_order_relaxed) > KEEP_MAX_NS)
        mp_pack_budget_set(&experts->pass_time, (uint64_t)KEEP_MAX_NS);
    return atomic_load_explicit(&experts->packed, memory_order_relaxed);
}

bool mp_packed_experts_end(mp_packed_experts *experts, uint64_t packed) {
    if (!experts)
        return false;
    atomic_fetch_sub(&experts->passes, 1);
    return atomic_load_explicit(&experts->packed, memory_order_relaxed) != packed;
}

uint64_t mp_packed_experts_drop(mp_packed_experts *experts) {
    int32_t idle = 0;
    if (mp_packed_experts_bytes(experts) == 0 || !atomic_compare_exchange_strong(&experts->passes, &idle, -1))
        return 0;
    for (mp_packed_matrix *matrix = experts->first; matrix; matrix = matrix->next)
        reset_panels(matrix);
    clear_pending(experts);
    atomic_store_explicit(&experts->kept, 0, memory_order_relaxed);
    const uint64_t freed = packed_release(experts);
    atomic_store(&experts->passes, 0);
    return freed;
}

uint64_t mp_packed_experts_bytes(const mp_packed_experts *experts) {
    return experts ? atomic_load_explicit(&experts->charged, memory_order_relaxed) : 0;
}

/* Returns true if a third of the budget stays free after `bytes` more: requests need memory for KV blocks and scratch,
 * and the governor frees caches when little is left. */
static bool has_room(const mp_packed_experts *experts, uint64_t bytes) {
    const mp_budget *budget = mp_budget_top(experts->budget);
    const uint64_t limit = atomic_load_explicit(&budget->limit, memory_order_relaxed);
    const uint64_t used = atomic_load_explicit(&budget->used, memory_order_relaxed);
    return limit == UINT64_MAX || used + bytes <= limit - limit / 3;
}

/* Takes memory for an expert's matrix. The lock must be held. */
static uint8_t *packed_take(mp_packed_experts *experts, uint64_t bytes) {
    if (!experts->region && !experts->refused) {
        packed_reserve(experts);
        experts->refused = !experts->region;
    }
    const uint64_t at = mp_packed_experts_bytes(experts);
    if (experts->refused || experts->most - at < bytes || !has_room(experts, bytes) ||
        !mp_budget_take(experts->budget, bytes))
        return NULL;
    mp_alloc_count(MP_TAG_WEIGHTS, (int64_t)bytes);
    atomic_store_explicit(&experts->charged, at + bytes, memory_order_relaxed);
    return experts->region + at;
}

/* Returns true if an expert's matrix has memory, and takes it if there is room. */
static bool has_memory(mp_packed_matrix *matrix, int expert) {
    mp_packed_experts *all = matrix->all;
    if (atomic_load_explicit(&matrix->data[expert], memory_order_acquire))
        return true;
    if (!has_room(all, matrix->bytes)) /* checked before the lock, so that threads do not queue for a refusal */
        return false;
    mp_mutex_lock(&all->lock);
    uint8_t *data = atomic_load_explicit(&matrix->data[expert], memory_order_relaxed);
    if (!data) {
        data = packed_take(all, matrix->bytes);
        atomic_store_explicit(&matrix->data[expert], data, memory_order_release);
    }
    mp_mutex_unlock(&all->lock);
    return data != NULL;
}

bool mp_packed_wants(mp_packed_matrix *matrix, int expert, int panel, bool few) {
    if (!matrix)
        return false;
    const bool started = atomic_load_explicit(&matrix->data[expert], memory_order_relaxed) != NULL;
    if (few && !started && !mp_pack_budget_left(&matrix->all->pass_time)) {
        if (!atomic_load_explicit(&matrix->pending[expert], memory_order_relaxed) &&
            !atomic_exchange_explicit(&matrix->pending[expert], 1, memory_order_relaxed))
            atomic_fetch_add_explicit(&matrix->all->pending, 1, memory_order_relaxed);
        return false;
    }
    _Atomic uint8_t *state = &matrix->state[(int64_t)expert * matrix->panels + panel];
    uint8_t expected = MP_PANEL_STORED;
    if (!atomic_compare_exchange_strong_explicit(state, &expected, MP_PANEL_PACKING, memory_order_acq_rel,
                                                 memory_order_relaxed))
        return false;
    if (has_memory(matrix, expert))
        return true;
    atomic_store_explicit(state, MP_PANEL_STORED, memory_order_release);
    return false;
}

void mp_packed_note_stored(mp_packed_matrix *matrix, uint64_t ns) {
    mp_packed_experts *all = matrix->all;
    ns *= (uint64_t)all->pack_share;
    mp_pack_budget_add(&all->idle_time, ns);
    const bool decodes = atomic_load_explicit(&all->decodes, memory_order_relaxed);
    mp_pack_budget_add(&all->pass_time, decodes ? ns / DECODE_SHARE : ns);
}

bool mp_packed_has_pending(const mp_packed_experts *experts) {
    return experts && mp_pack_budget_left(&experts->idle_time) &&
           atomic_load_explicit(&experts->pending, memory_order_relaxed) > 0;
}

void mp_packed_end_pending(mp_packed_matrix *matrix, int expert, bool packed) {
    mp_packed_experts *all = matrix->all;
    if (!packed)
        clear_pending(all);
    else if (atomic_exchange_explicit(&matrix->pending[expert], 0, memory_order_relaxed))
        atomic_fetch_sub_explicit(&all->pending, 1, memory_order_relaxed);
}

void mp_packed_keep(mp_packed_matrix *matrix, int expert, int panel, const mp_tensor *source) {
    mp_packed_experts *all = matrix->all;
    atomic_fetch_add_explicit(&all->kept, matrix->panel_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&all->packed, 1, memory_order_relaxed);
    atomic_store_explicit(&matrix->state[(int64_t)expert * matrix->panels + panel], MP_PANEL_KEPT,
                          memory_order_release);
    if (atomic_fetch_sub_explicit(&matrix->left[expert], 1, memory_order_acq_rel) == 1)
        mp_weights_release(all->weights, source); /* a thread that still reads these pages reads the file again */
}
