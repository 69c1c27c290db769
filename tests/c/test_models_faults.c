/* Loading a model and answering two requests that start alike, with every allocation failing in turn: a typed error,
 * nothing leaked, and the same answer when there is one. */
#include "model_fixture.h"

static mp_status load_and_answer(void *arg, mp_error *error) {
    mp_spec *spec = arg;
    mp_status status;
    mp_team *team = NULL;
    mp_loader loader = {0};
    mp_model *model = NULL;
    mp_engine *engine = NULL;
    mp_text_call *calls[2] = {NULL};
    mp_budget budget = {.limit = UINT64_MAX};
    mp_item items[2] = {0};
    int32_t prompt[70];
    for (int i = 0; i < 70; i++)
        prompt[i] = i * i % TINY_VOCAB;
    mp_text_args args = {.n_prompt = 70,
                         .prompt = prompt,
                         .n_choices = 2,
                         .sampling = {.temperature = 1, .top_p = 0.9f, .repetition_penalty = 1.1f, .max_tokens = 3,
                                      .logprobs = 2, .ignore_eos = true}};
    mp_lease lease;
    MP_TRY(mp_team_create(0, &team, error));
    mp_team_lease(team, 1, &lease);
    MP_TRY_GOTO(mp_model_loader(spec, MP_COMPUTE_AUTO, &loader, error));
    MP_TRY_GOTO(loader.ops->load(loader.self, &lease, &budget, NULL, &model, error));
    MP_TRY_GOTO(model->ops->engine(model, &budget, &engine, error));
    for (int i = 0; i < 2; i++) {
        MP_TRY_GOTO(mp_text_call_create(&args, &calls[i], error));
        uint64_t cost;
        items[i].call = &calls[i]->base;
        MP_TRY_GOTO(model->ops->check(model, items[i].call, &cost, &items[i].total, error));
        MP_TRY_GOTO(engine->ops->admit(engine, &items[i], error));
        mp_item *planned[1] = {&items[i]};
        mp_plan plan;
        mp_outcome outcomes[MP_PLAN_MAX];
        do {
            engine->ops->plan(engine, planned, 1, UINT64_MAX, &plan);
            engine->ops->step(engine, &lease, &plan, outcomes);
        } while (outcomes[0] == MP_OUTCOME_MORE);
        if (outcomes[0] != MP_OUTCOME_DONE) { /* waiting for memory says why, too */
            *error = items[i].error;
            status = items[i].error.code;
            MP_CHECK(status != MP_OK);
            goto cleanup;
        }
    }
    for (int c = 0; c < 2; c++)
        MP_CHECK(memcmp(calls[0]->choices[c].tokens, calls[1]->choices[c].tokens, 3 * sizeof(mp_token_out)) == 0);
cleanup:
    if (engine) {
        engine->ops->retire(engine, &items[0]);
        engine->ops->retire(engine, &items[1]);
        engine->ops->destroy(engine);
    }
    if (model)
        model->ops->destroy(model);
    if (loader.ops)
        loader.ops->destroy(loader.self);
    for (int i = 0; i < 2; i++)
        if (calls[i])
            mp_call_destroy(&calls[i]->base);
    mp_team_return(&lease);
    mp_team_destroy(team);
    MP_CHECK_INT(budget.used, 0);
    return status;
}

MP_TEST_SECONDS(models_allocation_sweep, 120) {
    static const mp_dtype types[] = {MP_Q8_0, MP_Q4_K};
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    mp_spec *spec = tiny_decoder_spec(types, 2, 77);
    mp_test_alloc_sweep(load_and_answer, spec);
    mp_spec_unpin(spec);
}
