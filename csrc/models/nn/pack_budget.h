/* nn/pack_budget.h: the time that passes may spend on packing panels that they could also multiply as stored.
 *
 * The budget counts only the packing. If it counted the whole pass, the first layers would use it up, and the weights
 * of later layers would stay unpacked. */
#ifndef MP_MODELS_NN_PACK_BUDGET_H
#define MP_MODELS_NN_PACK_BUDGET_H

#include <stdatomic.h>

#include "base/sys.h"
#include "kernels/kernels.h"

typedef struct mp_pack_budget {
    _Atomic int64_t left_ns; /* shared by all threads; the last panel may make it negative */
} mp_pack_budget;

/* Sets the time that is left. Passes that run at the same time share the budget of the last call. */
static inline void mp_pack_budget_set(mp_pack_budget *budget, uint64_t ns) {
    atomic_store_explicit(&budget->left_ns, (int64_t)ns, memory_order_relaxed);
}

/* Adds to the time that is left. */
static inline void mp_pack_budget_add(mp_pack_budget *budget, uint64_t ns) {
    atomic_fetch_add_explicit(&budget->left_ns, (int64_t)ns, memory_order_relaxed);
}

/* Subtracts from the time that is left, which may become negative. */
static inline void mp_pack_budget_spend(mp_pack_budget *budget, uint64_t ns) {
    atomic_fetch_sub_explicit(&budget->left_ns, (int64_t)ns, memory_order_relaxed);
}

static inline bool mp_pack_budget_left(const mp_pack_budget *budget) {
    return atomic_load_explicit(&budget->left_ns, memory_order_relaxed) > 0;
}

/* As mp_wmat_pack, and subtracts the time that it takes. */
static inline void mp_pack_budget_pack(mp_pack_budget *budget, mp_wmat *w, const mp_tensor *rows, int panel0,
                                       int panel1) {
    const uint64_t began = mp_sys_now_ns();
    mp_wmat_pack(w, rows, panel0, panel1);
    mp_pack_budget_spend(budget, mp_sys_now_ns() - began);
}

#endif
