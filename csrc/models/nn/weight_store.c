#include "models/nn/weight_store.h"

#include "base/alloc.h"
#include "models/nn/builder.h"

void mp_weight_store_deinit(mp_weight_store *store) {
    mp_builder_drop_jobs(store);
    mp_stored_destroy(store->stored);
    mp_packed_experts_destroy(store->experts);
    mp_free(store->slab);
    if (store->budget)
        mp_budget_give(store->budget, store->charged);
    *store = (mp_weight_store){0};
}

uint64_t mp_weight_store_bytes(const mp_weight_store *store) {
    return store->charged + mp_packed_experts_bytes(store->experts);
}
