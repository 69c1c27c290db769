/* decoder/packing.c: packs a decoder's experts, at load or between requests. */
#include "base/alloc.h"
#include "models/decoder/load.h"
#include "models/nn/scratch.h"

/* Longest time between two polls of the worker for requests. */
static const uint64_t SLICE_NS = 2 * 1000 * 1000;

void mp_decoder_pack_experts(mp_decoder *model, mp_lease *lease, mp_progress *progress) {
    const mp_ffn *ffn;
    for (int i = 0; i < model->layer_count && model->store.keeps_experts; i++) {
        for (int f = 0; (ffn = mp_layer_ffn(&model->layers[i], f)); f++)
            if (ffn->experts.count > 0)
                mp_experts_pack(&ffn->experts, lease, model->store.budget);
        mp_progress_part(progress, "packing", (uint64_t)i + 1, (uint64_t)model->layer_count);
    }
}

bool mp_decoder_pack_more(mp_decoder *model, mp_lease *lease) {
    mp_weight_store *store = &model->store;
    if (!lease || !mp_weight_store_has_pending(store))
        return mp_weight_store_has_pending(store);
    const uint64_t until_ns = mp_sys_after(mp_sys_now_ns(), SLICE_NS);
    size_t bytes = 0;
    const mp_ffn *ffn;
    for (int i = 0; i < model->layer_count; i++)
        for (int f = 0; (ffn = mp_layer_ffn(&model->layers[i], f)); f++)
            if (ffn->experts.count > 0)
                bytes = mp_larger(bytes, mp_experts_thread_scratch(&ffn->experts));
    if (!mp_budget_take(store->budget, bytes))
        return false;
    uint8_t *own = mp_alloc(bytes, MP_TAG_SCRATCH);
    mp_weight_store_enter(store); /* no other engine may drop the copies meanwhile */
    for (int i = 0; i < model->layer_count && own && mp_sys_now_ns() < until_ns; i++)
        for (int f = 0; (ffn = mp_layer_ffn(&model->layers[i], f)); f++)
            if (ffn->experts.count > 0)
                mp_experts_pack_pending(&ffn->experts, until_ns, lease, own);
    mp_weight_store_leave(store);
    const bool more = own && mp_weight_store_has_pending(store);
    mp_free(own);
    mp_budget_give(store->budget, bytes);
    return more;
}
