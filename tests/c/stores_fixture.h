/* stores_fixture.h: a decoder whose attention blocks differ in heads, widths and windows, and share keys and values. No
 * architecture has such blocks side by side, so the fixture recomposes a loaded model. */
#ifndef MP_STORES_FIXTURE_H
#define MP_STORES_FIXTURE_H

#include "model_fixture.h"
#include "models/decoder/load.h"
#include "models/decoder/pass.h"

enum { TINY_SHORT_WINDOW = 5, TINY_LONG_WINDOW = 70 };

/* Makes these layers, and an engine for them:
 *   0  attention to all positions, and beside it attention with half the heads of twice the width and a short window
 *   1  attention with a long window
 *   2  attention of the first block's heads, which reads that block's keys and values */
static inline void tiny_mix_stores(tiny_model *tiny) {
    enum { HEAD = TINY_HIDDEN / TINY_HEADS };
    mp_decoder *model = (mp_decoder *)tiny->model;
    mp_sublayer *first = &model->layers[0].sublayer[0];
    mp_error error;
    mp_mixer *beside = mp_sublayer_add_mixer(first, first->mixer[0]->ops);
    mp_paged_attention *to[] = {&first->mixer[0]->attention, &beside->attention,
                                &mp_layer_mixer(&model->layers[1], 0, NULL)->attention,
                                &mp_layer_mixer(&model->layers[2], 0, NULL)->attention};
    *beside = *mp_layer_mixer(&model->layers[1], 0, NULL);
    mp_attention_shape wide = *to[0]->shape;
    wide.heads /= 2;
    wide.kv_heads = wide.groups = wide.kv_heads / 2;
    wide.head_dim = wide.value_dim = 2 * HEAD;
    mp_decoder_set_shape(model, 1, wide);
    to[1]->shape = mp_decoder_shape(model, 1);
    to[1]->window = TINY_SHORT_WINDOW;
    to[2]->window = TINY_LONG_WINDOW;
    to[3]->window = 0;
    to[3]->reads_only = true;
    to[3]->qkv.parts = 1;
    to[3]->qkv.N = to[3]->qkv.w[0].N;
    for (int i = 0; i < 3; i++) {
        to[i]->store = i;
        model->kv_stores[i] = (mp_kv_store){.heads = to[i]->shape->kv_heads, .k_dim = to[i]->shape->head_dim,
                                         .v_dim = to[i]->shape->padded_dim, .window = to[i]->window};
    }
    to[3]->store = 0;
    model->kv = mp_kv_lay_out(model->kv_stores, 3, model->kv.dtype);
    MP_CHECK_INT(model->kv.parts, 3);
    tiny->engine->ops->destroy(tiny->engine);
    MP_CHECK_OK(tiny->model->ops->engine(tiny->model, &tiny->budget, &tiny->engine, &error), &error);
}

#endif
