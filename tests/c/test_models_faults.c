/* With each allocation failing in turn, load a model and run two requests with a common prefix: the result is a typed
 * error or the same completion, and nothing leaks. */
#include <stdatomic.h>

#include "base/options.h"
#include "model_fixture.h"
#include "request_fixture.h"

enum { PROMPT = 70, ANSWER = 5, CHOICES = 2 };

static mp_status make_call(mp_request **call, mp_error *error) {
    int32_t prompt[PROMPT];
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = i % 9 * 31; /* repetitive, so that speculation finds drafts */
    mp_text_args args = {.n_prompt = PROMPT,
                         .prompt = prompt,
                         .n_choices = CHOICES,
                         .sampling = {.temperature = 1, .top_p = 0.9f, .repetition_penalty = 1.1f, .max_tokens = ANSWER,
                                      .logprobs = 2, .ignore_eos = true}};
    mp_text_request *made;
    MP_TRY(mp_text_request_create(&args, &made, error));
    *call = &made->base;
    return MP_OK;
}

static void compare_calls(const mp_request *first, const mp_request *second) {
    const mp_text_request *a = (const mp_text_request *)first, *b = (const mp_text_request *)second;
    for (int c = 0; c < CHOICES; c++)
        MP_CHECK(memcmp(a->choices[c].tokens, b->choices[c].tokens, ANSWER * sizeof(mp_token_out)) == 0);
}

MP_TEST_SECONDS(models_allocation_sweep, 120) {
    static const mp_dtype types[] = {MP_Q8_0, MP_Q4_K};
    mp_error error;
    setenv("MPOOL_SPECULATION", "2", 1);
    MP_CHECK_OK(mp_options_init(&error), &error);
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    const tiny_kind kinds[] = {{.arch = "llama"}, {.arch = "lfm2", .mixers = (int64_t[]){1, 0, 2}}}; /* with states */
    for (int k = 0; k < 2; k++) {
        tiny_life life = {.spec = tiny_decoder_spec_as(&kinds[k], types, 2, 77 + (uint64_t)k, -1),
                          .compute = MP_COMPUTE_AUTO, .make = make_call, .compare = compare_calls};
        mp_test_alloc_sweep(tiny_live, &life);
        mp_spec_unpin(life.spec);
    }
}

/* A request may restart from zero only if the caller cannot have seen any of its output. */
MP_TEST(models_requests_report_seen_output) {
    mp_error error;
    mp_request *call;
    MP_CHECK_OK(make_call(&call, &error), &error);
    MP_CHECK(!call->seen(call)); /* legal before the output is allocated */
    mp_text_request *text = (mp_text_request *)call;
    MP_CHECK_OK(mp_text_request_output(text, 4, &error), &error);
    MP_CHECK(!call->seen(call));
    text->prompt_done_ns = 1;
    MP_CHECK(!call->seen(call));
    atomic_store(&text->choices[CHOICES - 1].token_count, 1);
    MP_CHECK(call->seen(call));
    mp_request_destroy(call);
    mp_embedding_request *embed;
    MP_CHECK_OK(make_embedding_request(1, (const int32_t[]){5}, (const int64_t[]){0, 1}, NULL, &embed, &error), &error);
    MP_CHECK(!embed->base.seen); /* callers read vectors only at the end */
    mp_request_destroy(&embed->base);
}

/* A reloaded model re-checks a waiting request. Before the first token, the output buffers are reallocated for that
 * model; afterwards they stay in place, because their content is published. */
MP_TEST(models_requests_keep_published_output) {
    mp_error error;
    mp_request *call;
    mp_error_clear(&error);
    MP_CHECK_OK(make_call(&call, &error), &error);
    mp_text_request *text = (mp_text_request *)call;
    MP_CHECK_OK(mp_text_request_output(text, 4, &error), &error);
    const uint64_t small = call->bytes;
    MP_CHECK_OK(mp_text_request_output(text, 8, &error), &error);
    MP_CHECK(call->bytes > small);
    for (int c = 0; c < CHOICES; c++) {
        const mp_choice before = {.text = text->choices[c].text, .tokens = text->choices[c].tokens};
        atomic_store(&text->choices[c].token_count, 1);
        MP_CHECK_OK(mp_text_request_output(text, 8, &error), &error); /* equal, then smaller, then larger sizes */
        MP_CHECK_OK(mp_text_request_output(text, 4, &error), &error);
        MP_CHECK_INT(mp_text_request_output(text, 9, &error), MP_MODEL);
        MP_CHECK(text->choices[c].text == before.text && text->choices[c].tokens == before.tokens);
        atomic_store(&text->choices[c].token_count, 0);
    }
    MP_CHECK_OK(mp_text_request_output(text, 9, &error), &error);
    mp_request_destroy(call);
}
