/* test_models_encoder_plan.c: how an encoder divides a step among requests. */
#include <stdatomic.h>

#include "encoder_fixture.h"
#include "estimate_fixture.h"
#include "models/threads.h"

enum { TOKEN_NS = 1000, GROUP = 256, SHORT = 4, MANY = 300 };

/* A request of `count` texts, each of `length` tokens. */
static mp_request *request_of(int count, int length) {
    static int32_t ids[MANY * POSITIONS];
    int64_t offsets[MANY + 1];
    mp_embedding_request *call;
    mp_error error;
    for (int i = 0; i < count * length; i++)
        ids[i] = 8 + i % 100;
    for (int t = 0; t <= count; t++)
        offsets[t] = (int64_t)t * length;
    MP_CHECK_OK(make_embedding_request(count, ids, offsets, NULL, &call, &error), &error);
    return &call->base;
}

static void begin(tiny_model *tiny, mp_item *item, int count, int length) {
    mp_error error;
    uint64_t cost;
    *item = (mp_item){.request = request_of(count, length)};
    MP_CHECK_OK(tiny->model->ops->check(tiny->model, item->request, &cost, &item->total, &error), &error);
    MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, item, &error), &error);
}

static void set_token_ns(tiny_model *tiny, uint64_t ns) {
    atomic_store(&((mp_encoder_engine_state *)tiny->engine)->model->token_ns, ns);
}

/* The texts of each item in a step of `tokens` tokens; -1 for an item that is not in it. */
static void plan_of(tiny_model *tiny, mp_item **items, int n, int64_t tokens, int *texts) {
    mp_plan plan = {0};
    uint64_t all = 0;
    set_token_ns(tiny, TOKEN_NS);
    tiny->engine->ops->plan(tiny->engine, items, n, (uint64_t)tokens * TOKEN_NS, &plan);
    uint64_t planned = 0;
    for (int i = 0; i < n; i++) {
        texts[i] = -1;
        for (int k = 0; k < plan.count; k++)
            if (plan.items[k] == items[i]) {
                texts[i] = (int)plan.amount[k];
                planned += plan.amount[k] * SHORT;
                all += plan.amount[k];
            }
    }
    MP_CHECK(all > 0);
    MP_CHECK_INT(plan.barrier_bound, all == 1);
    if (all > 1) /* each thread computes whole texts */
        MP_CHECK_INT(plan.threads, all < 256 ? all : 256);
    MP_CHECK_INT(plan.cost_ns, planned * TOKEN_NS);
}

/* A request of 300 texts before a request of three: both are in the step, each within its share. */
MP_TEST(models_encoder_plan_shares_a_step) {
    tiny_model tiny;
    mp_item large, small, *items[2] = {&large, &small};
    int texts[2];
    tiny_load(&tiny, tiny_encoder_spec(false), MP_COMPUTE_F32, 1);
    begin(&tiny, &large, MANY, SHORT);
    begin(&tiny, &small, 3, SHORT);
    plan_of(&tiny, items, 2, 600, texts); /* half of 600 tokens: 75 texts of four */
    MP_CHECK_INT(texts[0], 300 / SHORT);
    MP_CHECK_INT(texts[1], 3);
    plan_of(&tiny, items, 2, 400, texts); /* a share has at least a group of rows */
    MP_CHECK_INT(texts[0], GROUP / SHORT);
    MP_CHECK_INT(texts[1], 3);
    plan_of(&tiny, items, 2, 102, texts); /* the first request gets the whole budget, the second waits */
    MP_CHECK_INT(texts[0], 102 / SHORT);
    MP_CHECK_INT(texts[1], -1);
    plan_of(&tiny, items, 2, 1, texts); /* the first request always gets a text */
    MP_CHECK_INT(texts[0], 1);
    MP_CHECK_INT(texts[1], -1);
    plan_of(&tiny, items, 1, 700, texts); /* alone it gets the whole step */
    MP_CHECK_INT(texts[0], 700 / SHORT);
    plan_of(&tiny, items, 1, 1 << 20, texts);
    MP_CHECK_INT(texts[0], MANY);
    mp_item *turned[2] = {&small, &large};
    plan_of(&tiny, turned, 2, 600, texts); /* the next request gets the time that a small one leaves */
    MP_CHECK_INT(texts[0], 3);
    MP_CHECK_INT(texts[1], (600 - 3 * SHORT) / SHORT);
    small.cursor = 2; /* two of its texts are done */
    plan_of(&tiny, turned, 2, 600, texts);
    MP_CHECK_INT(texts[0], 1);
    for (int i = 0; i < 2; i++) {
        tiny.engine->ops->retire(tiny.engine, items[i]);
        mp_request_destroy(items[i]->request);
    }
    tiny_unload(&tiny);
}

/* A step of 12 tokens takes 12,000 ns: 1,000 ns per token. */
MP_TEST(models_encoder_plan_learns_the_exact_time) {
    enum { COUNT = 3 };
    tiny_model tiny;
    mp_item item;
    tiny_load(&tiny, tiny_encoder_spec(false), MP_COMPUTE_F32, 1);
    begin(&tiny, &item, COUNT, SHORT);
    compute_all(&tiny);
    check_learned(&((mp_encoder *)tiny.model)->token_ns, 8000, COUNT * SHORT * 1000, (7 * 8000 + 1000) / 8 + 1,
                  &(planned_step){&tiny, &item, COUNT, 0});
    tiny.engine->ops->retire(tiny.engine, &item);
    mp_request_destroy(item.request);
    tiny_unload(&tiny);
}
