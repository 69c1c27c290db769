#include "models/text_step.h"

#include <stdatomic.h>

mp_text_step_totals mp_text_step_plan(mp_item **items, int n, uint64_t budget_ns, uint64_t token_ns,
                                     mp_text_step_limits limits, mp_plan *plan) {
    const uint64_t fits = budget_ns / (token_ns ? token_ns : 1);
    int64_t left = fits < (uint64_t)limits.step_tokens ? (int64_t)fits : limits.step_tokens;
    mp_text_step_totals totals = {0};
    plan->count = 0;
    for (int i = 0; i < n && plan->count < MP_PLAN_MAX; i++) {
        mp_item *item = items[i];
        const int64_t equal = left / (n - i), least = left < limits.least_share ? left : limits.least_share;
        const int64_t share = equal > least ? equal : least;
        int64_t used = 0;
        uint32_t texts = 0;
        while (item->cursor + texts < item->total) {
            const int64_t tokens = mp_text_step_tokens(item, item->cursor + texts);
            if (used + tokens > share && !(plan->count == 0 && texts == 0))
                break;
            used += tokens;
            texts++;
        }
        if (texts == 0)
            continue;
        left = left > used ? left - used : 0;
        totals.tokens += used;
        totals.texts += texts;
        plan->items[plan->count] = item;
        plan->amount[plan->count++] = texts;
    }
    plan->cost_ns = (uint64_t)totals.tokens * token_ns;
    return totals;
}

void mp_text_step_learn(_Atomic uint64_t *token_ns, uint64_t spent_ns, int64_t tokens) {
    const uint64_t old = atomic_load_explicit(token_ns, memory_order_relaxed);
    const uint64_t latest = spent_ns / (uint64_t)tokens;
    atomic_store_explicit(token_ns, (7 * old + latest) / 8 + 1, memory_order_relaxed);
}
