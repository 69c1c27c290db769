/* decoder/packing.c: packs a decoder's experts, at load or between requests. */
#include "base/alloc.h"
#include "models/decoder/load.h"
#include "models/nn/scratch.h"

/* Longest time between two polls of the worker for requests. */
static const uint64_t SLICE_NS = 2 * 1000 * 1000;

void mp_decoder_pack_experts(mp_decoder *model, mp_lease *lease, mp_progress *progress) {
    const mp_ffn *ffn;
    for (int i = 0; i < model->layer_count && model->store.experts; i++) {
        for (int f = 0; (ffn = mp_layer_ffn(&model->layers[i], f)); f++)
            if (ffn->experts.count > 0)
                mp_experts_pack(&ffn->experts, lease, model->store.budget);
        mp_progress_part(progress, "packing", (uint64_t)i + 1, (uint64_t)model->layer_count);
    }
}

bool mp_decoder_pack_more(mp_decoder *model, mp_lease *lease) {
    mp_packed_experts *packed = model->store.experts;
    if (!lease || !mp_packed_has_pending(packed))
        return mp_packed_has_pending(packed);
    const uint64_t until_ns = mp_sys_after(mp_sys_now_ns(), SLICE_NS);
    size_t bytes = 0;
    const mp_ffn *ffn;
    for (int i = 0; i < model->layer_count; i++)
        for (int f = 0; (ffn = mp_layer_ffn(&model->layers[i], f)); f++)
            if (ffn->experts.count > 0)
                bytes = mp_larger(bytes, mp_experts_thread_scratch(&ffn->experts));
    if (!mp_budget_take(model->store.budget, bytes))
        return false;
    uint8_t *own = mp_alloc(bytes, MP_TAG_SCRATCH);
    const uint64_t before = mp_packed_experts_begin(packed, 1); /* no other engine may drop the copies meanwhile */
    for (int i = 0; i < model->layer_count && own && mp_sys_now_ns() < until_ns; i++)
        for (int f = 0; (ffn = mp_layer_ffn(&model->layers[i], f)); f++)
            if (ffn->experts.count > 0)
                mp_experts_pack_pending(&ffn->experts, until_ns, lease, own);
    mp_packed_experts_end(packed, before);
    const bool more = own && mp_packed_has_pending(packed);
    mp_free(own);
    mp_budget_give(model->store.budget, bytes);
    return more;
}
