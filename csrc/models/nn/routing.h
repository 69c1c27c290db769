/* nn/routing.h: the MoE router: selects the experts of a row, and their weights. */
#ifndef MP_MODELS_NN_ROUTING_H
#define MP_MODELS_NN_ROUTING_H

#include "files/spec.h"

typedef struct mp_routing {
    bool sigmoid;   /* scores by sigmoid, each expert alone; otherwise by softmax over all */
    bool normalise; /* the weights of a row's experts are normalised to sum 1 before the scale */
    float epsilon;  /* added to the sum by which the weights are normalised */
    float scale;    /* factor on the weights */
    int32_t groups, groups_used; /* experts are selected within the best `groups_used` of `groups` equal groups; groups
                                  * 1: among all */
    bool corrected; /* experts are selected by score plus a learned bias, blk.{layer}.exp_probs_b.bias [count] */
} mp_routing;

/* Reads mpool.expert_gate (softmax or sigmoid), mpool.expert_normalise, _epsilon, _scale, _groups, _groups_used and
 * _corrected. FORMAT unless `used` of `count` experts can be selected in this way. */
mp_status mp_routing_read(mp_routing *routing, const mp_spec *spec, int32_t count, int32_t used, mp_error *error);

/* Selects the experts of one row, best first, and their weights. Ties go to the lowest id. If a score or correction is
 * NaN, all weights are NaN, so that the request fails. The merit of a group is that of its best expert, or with
 * sigmoids the sum of its two best (DeepSeek-V3, arXiv:2412.19437). Overwrites scores and merit [count]; correction
 * [count] may be NULL; writes chosen and weight [used]. */
void mp_route(const mp_routing *routing, const float *correction, int32_t count, int32_t used, float *scores,
              float *merit, int32_t *chosen, float *weight);

#endif
