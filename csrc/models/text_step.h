/* text_step.h: how an engine that embeds texts divides a step among requests, and learns the time of a token. The text
 * encoder and the static embedding use it. */
#ifndef MP_MODELS_TEXT_STEP_H
#define MP_MODELS_TEXT_STEP_H

#include "models/engine.h"

typedef struct mp_text_step_limits {
    int64_t step_tokens; /* maximum tokens in a step, whatever the budget */
    int64_t least_share; /* tokens that an item is offered even if its equal share is smaller */
} mp_text_step_limits;

typedef struct mp_text_step_totals { /* sums over the items of a plan */
    uint32_t texts;
    int64_t tokens;
} mp_text_step_totals;

/* Tokens of one text of an embedding request. */
static inline int64_t mp_text_step_tokens(const mp_item *item, uint32_t text) {
    const mp_embedding_request *request = (const mp_embedding_request *)item->request;
    return request->offsets[text + 1] - request->offsets[text];
}

/* Fills in `count`, `items`, `amount` (texts) and `cost_ns` of the plan; the engine sets the other fields. Each item in
 * turn is offered an equal share of the remaining time, so that a large request cannot crowd out small ones. Unused
 * time passes to the next item. The first item always gets at least one text. */
mp_text_step_totals mp_text_step_plan(mp_item **items, int n, uint64_t budget_ns, uint64_t token_ns,
                                     mp_text_step_limits limits, mp_plan *plan);
/* Moves the running mean `*token_ns` by an eighth towards the time per token of a step. tokens > 0. */
void mp_text_step_learn(_Atomic uint64_t *token_ns, uint64_t spent_ns, int64_t tokens);

#endif
