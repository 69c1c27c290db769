#include "models/nn/routing.h"

#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

mp_status mp_routing_read(mp_routing *routing, const mp_spec *spec, int32_t count, int32_t used, mp_error *error) {
    const char *gate;
    bool yes = true, no = false;
    double scale, epsilon, unscaled = 1, tiny = 1e-20;
    int64_t groups, groups_used, one = 1;
    MP_TRY(mp_spec_string(spec, "mpool.expert_gate", "softmax", &gate, error));
    MP_TRY(mp_spec_bool(spec, "mpool.expert_normalise", &yes, &routing->normalise, error));
    MP_TRY(mp_spec_bool(spec, "mpool.expert_corrected", &no, &routing->corrected, error));
    MP_TRY(mp_spec_float(spec, "mpool.expert_epsilon", 1e-30, 1, &tiny, &epsilon, error));
    MP_TRY(mp_spec_float(spec, "mpool.expert_scale", 1e-6, 1e6, &unscaled, &scale, error));
    MP_TRY(mp_spec_int(spec, "mpool.expert_groups", 1, count, &one, &groups, error));
    MP_TRY(mp_spec_int(spec, "mpool.expert_groups_used", 1, groups, &groups, &groups_used, error));
    routing->sigmoid = strcmp(gate, "sigmoid") == 0;
    if (!routing->sigmoid && strcmp(gate, "softmax") != 0)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.expert_gate", "softmax, sigmoid", "%s",
                            gate);
    if (count % groups || groups_used * (count / groups) < used || (groups > 1 && count / groups < 2))
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.expert_groups",
                            "equal groups of at least two experts, with enough experts in the groups used",
                            "%lld of %lld groups of %d experts for %d", (long long)groups_used, (long long)groups,
                            count, used);
    routing->epsilon = routing->sigmoid ? (float)epsilon : 0; /* softmax: the sum is above 0 */
    routing->scale = (float)scale;
    routing->groups = (int32_t)groups;
    routing->groups_used = (int32_t)groups_used;
    return MP_OK;
}

/* Returns true if expert a ranks before b: by merit, then by id; NaN last. */
static bool routing_before(const float *merit, int32_t a, int32_t b) {
    const float x = merit[a], y = merit[b];
    if (isnan(x) || isnan(y))
        return isnan(x) == isnan(y) ? a < b : isnan(y);
    return x > y || (x == y && a < b);
}

/* Restores the heap below `at`; the lowest-ranked expert is on top. */
static void sink(const float *merit, int32_t *heap, int32_t n, int32_t at) {
    const int32_t id = heap[at];
    for (int32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && routing_before(merit, heap[child], heap[child + 1]))
            child++;
        if (!routing_before(merit, id, heap[child]))
            break;
        heap[at] = heap[child];
    }
    heap[at] = id;
}

/* Selects the best `used` experts, best first. open[g]: experts of group g, which has `each` experts, may be selected;
 * NULL: all experts may be selected. */
static void select_best(const float *merit, int32_t count, const bool *open, int32_t each, int32_t used,
                        int32_t *chosen) {
    int32_t n = 0;
    for (int32_t i = 0; i < count; i++) {
        if (open && !open[i / each])
            continue;
        if (n < used) {
            chosen[n++] = i;
            for (int32_t at = n == used ? used / 2 : 0; n == used && at-- > 0;)
                sink(merit, chosen, used, at);
        } else if (routing_before(merit, i, chosen[0])) {
            chosen[0] = i;
            sink(merit, chosen, used, 0);
        }
    }
    for (int32_t left = used; left > 1;) { /* heap sort: the lowest-ranked moves to the end */
        const int32_t last = chosen[0];
        chosen[0] = chosen[--left];
        sink(merit, chosen, left, 0);
        chosen[left] = last;
    }
}

enum { MAX_GROUPS = 4096 };

static void open_groups(const mp_routing *routing, int32_t count, const float *merit, bool *open) {
    const int32_t each = count / routing->groups;
    float group[MAX_GROUPS];
    int32_t best[MAX_GROUPS];
    for (int32_t g = 0; g < routing->groups; g++) {
        int32_t top[2];
        select_best(merit + (int64_t)g * each, each, NULL, 1, 2, top);
        const float *own = merit + (int64_t)g * each;
        group[g] = routing->sigmoid ? own[top[0]] + own[top[1]] : own[top[0]];
        open[g] = false;
    }
    select_best(group, routing->groups, NULL, 1, routing->groups_used, best);
    for (int32_t i = 0; i < routing->groups_used; i++)
        open[best[i]] = true;
}

void mp_route(const mp_routing *routing, const float *correction, int32_t count, int32_t used, float *scores,
              float *merit, int32_t *chosen, float *weight) {
    const mp_kernels *call = mp_kernels_get();
    const bool grouped = routing->groups > routing->groups_used;
    bool open[MAX_GROUPS];
    float sum = 1;
    if (routing->sigmoid)
        call->activate(MP_ACT_SIGMOID, count, scores);
    /* Softmax keeps the order of the scores, so without correction the raw scores serve as merits. A correction is
     * added to the softmax values themselves. */
    memcpy(merit, scores, (size_t)count * sizeof *merit);
    if (!routing->sigmoid)
        sum = call->softmax(scores, count);
    for (int32_t e = 0; correction && e < count; e++)
        merit[e] = scores[e] / sum + correction[e];
    if (grouped)
        open_groups(routing, count, merit, open);
    select_best(merit, count, grouped ? open : NULL, count / routing->groups, used, chosen);
    if (routing->normalise) {
        sum = 0;
        for (int32_t j = 0; j < used; j++)
            sum += scores[chosen[j]];
        sum += routing->epsilon;
    }
    /* NaN ranks last, so the selected experts may hide it */
    bool nan = false;
    for (int32_t e = 0; e < count; e++)
        nan |= isnan(merit[e]);
    for (int32_t j = 0; j < used; j++)
        weight[j] = nan ? NAN : scores[chosen[j]] / sum * routing->scale;
}
