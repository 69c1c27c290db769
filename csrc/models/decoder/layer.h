/* decoder/layer.h: the layers of a decoder. A layer is a list of sublayers:
 *
 *   in = norm(x), or x without a norm
 *   x += after(scale * block(in)), for each block of the sublayer: first its mixers, then its networks
 *
 * The sum may be multiplied by a factor at the end of the layer.
 *
 * The usual layer has two: attention, and a feed-forward network. A layer may also have one sublayer, of either kind,
 * and a sublayer may have several blocks that read the same normed input: two mixers side by side, attention and a
 * feed-forward network from one norm, or experts and a shared expert. A sublayer with `after` has one
 * block, or networks whose outputs are added up, each after a norm of its own (`after` of mp_ffn):
 *
 *   x += after(sum of after_f(network_f(in))) */
#ifndef MP_MODELS_DECODER_LAYER_H
#define MP_MODELS_DECODER_LAYER_H

#include "models/decoder/mixer.h"
#include "models/nn/ffn.h"

enum { MP_SUBLAYERS = 3, MP_SUBLAYER_BLOCKS = 2, MP_STREAMS = 3 /* residual sums besides the first */ };

typedef struct mp_sublayer {
    mp_norm norm;  /* norm of the input; skipped if it has no weight */
    mp_norm after; /* norm of the block's output; skipped if it has no weight */
    float scale;   /* factor on each block's output, before `after`. Blocks multiply the input of their last linear
                    * layer, and the loader its bias, with the same result */
    float *total;  /* factor on the sum after the sublayer, which has `after` then; or NULL */
    int mixers, ffns;
    mp_mixer *mixer[MP_SUBLAYER_BLOCKS]; /* owned */
    mp_ffn *ffn[MP_SUBLAYER_BLOCKS];     /* owned */
} mp_sublayer;

typedef struct mp_streams { /* a layer's weights for several residual sums: decoder/streams.h */
    mp_norm norm;             /* norm of the row for the router */
    float *router;            /* [n, hidden], with n sums */
    float *predict, *correct; /* [n * n, n], [n, n] */
    float *scale;             /* [hidden] factors of the row for the last sublayer */
} mp_streams;

typedef struct mp_decoder_layer {
    int count;
    mp_streams streams;
    mp_sublayer sublayer[MP_SUBLAYERS];
} mp_decoder_layer;

/* Add a zeroed block to a sublayer, and return it; NULL if there is no memory. */
mp_mixer *mp_sublayer_add_mixer(mp_sublayer *sub, const mp_mixer_ops *ops);
mp_ffn *mp_sublayer_add_ffn(mp_sublayer *sub, const mp_ffn_ops *ops);
void mp_layer_deinit(mp_decoder_layer *layer);

/* Returns the nth mixer of a layer, from 0 on, and its sublayer in *of unless of is NULL; NULL: the layer has fewer. */
mp_mixer *mp_layer_mixer(mp_decoder_layer *layer, int nth, mp_sublayer **of);
/* Returns the nth feed-forward network of a layer. */
mp_ffn *mp_layer_ffn(mp_decoder_layer *layer, int nth);

#endif
