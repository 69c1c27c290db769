/* nn/routing.h: which experts of a mixture a row is given, and how much each of them counts. */
#ifndef MP_MODELS_NN_ROUTING_H
#define MP_MODELS_NN_ROUTING_H

#include "files/spec.h"

typedef struct mp_routing {
    bool sigmoid;   /* scores are each expert's own; else shares of all */
    bool normalise; /* the weights of a row's experts add up to 1, before the scale; else they are the scores */
    float scale;    /* of weights */
    int32_t groups, groups_used; /* experts are chosen within the best of so many equal groups; groups 1: among all */
    bool corrected; /* experts are chosen by score and a learned bias, blk.{layer}.exp_probs_b.bias [count] */
} mp_routing;

/* Keys mpool.expert_gate (softmax or sigmoid), mpool.expert_normalise, _scale, _groups, _groups_used, _corrected.
 * FORMAT unless `used` of `count` experts can be chosen so. */
mp_status mp_routing_read(mp_routing *routing, const mp_spec *spec, int32_t count, int32_t used, mp_error *error);

/* The experts of one row, best first, and their weights. The lowest id of equally good ones; NaN is chosen last, and
 * makes the weights NaN. A group is as good as its best expert, or with sigmoids as its two best together (DeepSeek-V3,
 * arXiv:2412.19437). scores, merit [count] are overwritten, correction [count] may be NULL; chosen, weight [used]. */
void mp_route(const mp_routing *routing, const float *correction, int32_t count, int32_t used, float *scores,
              float *merit, int32_t *chosen, float *weight);

#endif
