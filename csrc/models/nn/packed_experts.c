#include "models/nn/packed_experts.h"

#include <stddef.h>

#include "base/sys.h"

/* Time that the threads of a pass together may spend on packing panels which it would otherwise multiply as stored. On
 * two threads a token of a large model takes 15 to 100 ms, so this delays the first hundreds of tokens by an eighth or
 * less. */
static const uint64_t KEEP_NS = 4 * 1000 * 1000;
static const uint64_t POLL_NS = 100 * 1000;

static void reset_panels(mp_packed_matrix *matrix) {
    for (int64_t i = 0; i < (int64_t)matrix->count * matrix->panels; i++)
        atomic_store_explicit(&matrix->state[i], MP_PANEL_STORED, memory_order_relaxed);
    for (int32_t e = 0; e < matrix->count; e++)
        atomic_store_explicit(&matrix->left[e], matrix->panels, memory_order_relaxed);
}

/* Runs in the child of a fork: the threads that packed panels and ran passes do not exist there. The bytes of a panel
 * that was being packed stay charged. */
static void forget_passes(mp_forked *self) {
    mp_packed_experts *experts = (mp_packed_experts *)((char *)self - offsetof(mp_packed_experts, forked));
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
    experts->keep_ns = KEEP_NS;
    return experts;
}

/* Reserves the memory of the copies as a whole; mp_alloc_bytes counts only what is kept. Where the system uses huge
 * pages for everything, the first write to an expert would also take the memory of its neighbours, uncharged. */
static uint8_t *reserve(const mp_packed_matrix *matrix) {
    const size_t bytes = (size_t)matrix->count * matrix->bytes + MP_WMAT_SLACK;
    uint8_t *data = mp_alloc(bytes, MP_TAG_WEIGHTS);
    if (data) {
        mp_alloc_count(MP_TAG_WEIGHTS, -(int64_t)bytes);
        mp_sys_advise(data, bytes, MP_ADVISE_SMALL);
    }
    return data;
}

static void unreserve(mp_packed_matrix *matrix) {
    if (matrix->data)
        mp_alloc_count(MP_TAG_WEIGHTS, (int64_t)((size_t)matrix->count * matrix->bytes + MP_WMAT_SLACK));
    mp_free(matrix->data);
    matrix->data = NULL;
}

void mp_packed_experts_destroy(mp_packed_experts *experts) {
    if (!experts)
        return;
    mp_forked_remove(&experts->forked);
    const uint64_t bytes = mp_packed_experts_bytes(experts);
    for (mp_packed_matrix *matrix = experts->first, *next; matrix; matrix = next) {
        next = matrix->next;
        unreserve(matrix);
        mp_free(matrix->state);
        mp_free(matrix->left);
        mp_free(matrix);
    }
    mp_alloc_count(MP_TAG_WEIGHTS, -(int64_t)bytes);
    mp_budget_give(experts->budget, bytes);
    mp_free(experts);
}

mp_packed_matrix *mp_packed_experts_add(mp_packed_experts *experts, const mp_wmat *w, int32_t count) {
    mp_packed_matrix *matrix = mp_alloc_zeroed(sizeof *matrix, MP_TAG_WEIGHTS);
    if (!matrix)
        return NULL;
    *matrix = (mp_packed_matrix){.all = experts, .count = count, .panels = w->panels, .bytes = mp_wmat_bytes(w),
                                 .panel_bytes = w->panel_bytes};
    matrix->state = mp_alloc_array((size_t)count * (size_t)w->panels, sizeof *matrix->state, MP_TAG_WEIGHTS);
    matrix->left = mp_alloc_array((size_t)count, sizeof *matrix->left, MP_TAG_WEIGHTS);
    size_t all;
    if (matrix->state && matrix->left && !__builtin_mul_overflow(matrix->bytes, (size_t)count, &all))
        matrix->data = reserve(matrix);
    if (!matrix->data) {
        mp_free(matrix->state);
        mp_free(matrix->left);
        mp_free(matrix);
        return NULL;
    }
    reset_panels(matrix);
    matrix->next = experts->first;
    experts->first = matrix;
    experts->most += (uint64_t)count * (uint64_t)w->panels * w->panel_bytes;
    return matrix;
}

uint64_t mp_packed_experts_begin(mp_packed_experts *experts) {
    if (!experts)
        return 0;
    int32_t passes = atomic_load(&experts->passes);
    while (passes < 0 || !atomic_compare_exchange_weak(&experts->passes, &passes, passes + 1))
        if (passes < 0) {
            mp_sys_sleep_ns(POLL_NS);
            passes = atomic_load(&experts->passes);
        }
    mp_pack_budget_set(&experts->time, experts->keep_ns);
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
    const uint64_t bytes = mp_packed_experts_bytes(experts);
    if (bytes == 0 || !atomic_compare_exchange_strong(&experts->passes, &idle, -1))
        return 0;
    for (mp_packed_matrix *matrix = experts->first; matrix; matrix = matrix->next) {
        reset_panels(matrix);
        unreserve(matrix);
        matrix->data = reserve(matrix); /* NULL: from now on, nothing is kept of these experts */
    }
    const uint64_t freed = atomic_exchange(&experts->charged, 0);
    mp_alloc_count(MP_TAG_WEIGHTS, -(int64_t)freed);
    mp_budget_give(experts->budget, freed);
    atomic_store(&experts->passes, 0);
    return freed;
}

uint64_t mp_packed_experts_bytes(const mp_packed_experts *experts) {
    return experts ? atomic_load_explicit(&experts->charged, memory_order_relaxed) : 0;
}

/* Charges a panel if a third of the budget stays free: requests need memory for KV blocks and scratch, and the governor
 * frees caches when little is left. */
static bool take(mp_packed_experts *experts, uint64_t bytes) {
    const uint64_t limit = atomic_load_explicit(&experts->budget->limit, memory_order_relaxed);
    const uint64_t used = atomic_load_explicit(&experts->budget->used, memory_order_relaxed);
    if (limit != UINT64_MAX && used + bytes > limit - limit / 3)
        return false;
    return mp_budget_take(experts->budget, bytes);
}

bool mp_packed_wants(mp_packed_matrix *matrix, int expert, int panel, bool few) {
    if (!matrix || !matrix->data)
        return false;
    mp_packed_experts *all = matrix->all;
    _Atomic uint8_t *state = &matrix->state[(int64_t)expert * matrix->panels + panel];
    uint8_t expected = MP_PANEL_STORED;
    if (few && !mp_pack_budget_left(&all->time))
        return false;
    if (!atomic_compare_exchange_strong_explicit(state, &expected, MP_PANEL_PACKING, memory_order_acq_rel,
                                                 memory_order_relaxed))
        return false;
    if (take(all, matrix->panel_bytes))
        return true;
    atomic_store_explicit(state, MP_PANEL_STORED, memory_order_release);
    return false;
}

void mp_packed_keep(mp_packed_matrix *matrix, int expert, int panel, const mp_tensor *source) {
    mp_packed_experts *all = matrix->all;
    atomic_fetch_add_explicit(&all->charged, matrix->panel_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&all->packed, 1, memory_order_relaxed);
    mp_alloc_count(MP_TAG_WEIGHTS, (int64_t)matrix->panel_bytes);
    atomic_store_explicit(&matrix->state[(int64_t)expert * matrix->panels + panel], MP_PANEL_KEPT,
                          memory_order_release);
    if (atomic_fetch_sub_explicit(&matrix->left[expert], 1, memory_order_acq_rel) == 1)
        mp_weights_release(all->weights, source); /* a thread that still reads these pages reads the file again */
}
