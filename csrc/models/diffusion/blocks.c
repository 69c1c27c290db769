/* diffusion/blocks.c: builds the blocks of every stage; each network builds its own. */
#include "models/diffusion/diffusion.h"

mp_status mp_diff_build(const mp_diffusion *model, int stage, int index, mp_diff_block *block, mp_builder *builder,
                        mp_error *error) {
    mp_builder_init(builder, &block->store, model->weights, mp_resolve_compute(model->compute));
    switch ((mp_diff_stage_id)stage) {
    case MP_DIFF_CLIP_L:
    case MP_DIFF_CLIP_G:
    case MP_DIFF_T5:
        return mp_text_build(model, stage, index, builder, block, error);
    case MP_DIFF_TRANSFORMER:
        return mp_dit_build(model, index, builder, block, error);
    default:
        return mp_vae_build(model, index, builder, block, error);
    }
}
