/* How a completion ends: by a stop id, by the end token, by its maximum length; and what its penalties count. */
#include "model_fixture.h"
#include "models/generation/sampler.h"

enum { ANSWER = 8, END_TOKEN = TINY_VOCAB - 1 };

static const mp_dtype floats[] = {MP_F32};

/* Runs a completion alone. The caller destroys the request. */
static void run_alone(tiny_model *tiny, tiny_job *job, const mp_text_args *change) {
    static const int32_t prompt[] = {3, 1, 4, 1, 5};
    mp_text_args args = *change;
    args.n_prompt = 5;
    args.prompt = prompt;
    args.n_choices = 1;
    args.sampling.top_p = 1;
    args.sampling.repetition_penalty = 1;
    args.sampling.max_tokens = ANSWER;
    args.sampling.logprobs = -1;
    tiny_job_make(tiny, job, &args, 0);
    tiny_job_admit(tiny, job);
    tiny_job_finish(tiny, job);
}

/* Each id of the list ends the completion before its token, at any place in the list. */
MP_TEST(models_ends_at_stop_ids) {
    int32_t answer[ANSWER];
    tiny_model tiny;
    tiny_job job;
    tiny_load(&tiny, tiny_decoder_spec(floats, 1, 61), MP_COMPUTE_F32, 1);
    run_alone(&tiny, &job, &(mp_text_args){.sampling = {.temperature = 1, .seed = 4, .ignore_eos = true}});
    MP_CHECK_INT(job.call->choices[0].token_count, ANSWER);
    for (int t = 0; t < ANSWER; t++)
        answer[t] = job.call->choices[0].tokens[t].id;
    mp_request_destroy(&job.call->base);
    int ended = 0;
    for (int t = 0; t < ANSWER; t++) {
        int first = 0, unused = 0;
        while (answer[first] != answer[t])
            first++;
        for (int i = 0; i < ANSWER; i++) /* an id that the answer does not have */
            if (answer[i] == unused) {
                unused++;
                i = -1;
            }
        for (int place = 0; place < 3; place++) {
            int32_t ids[3] = {unused, unused, unused};
            ids[place] = answer[t];
            run_alone(&tiny, &job, &(mp_text_args){.n_stop_ids = place + 1, .stop_ids = ids, .sampling = {
                                                       .temperature = 1, .seed = 4, .ignore_eos = true}});
            MP_CHECK_INT(job.call->choices[0].finish, MP_FINISH_STOP);
            MP_CHECK_INT(job.call->choices[0].stop_index, place);
            MP_CHECK_INT(job.call->choices[0].token_count, first);
            mp_request_destroy(&job.call->base);
            ended += first > 0;
        }
    }
    MP_CHECK(ended > 0);
    tiny_unload(&tiny);
}

/* The end token ends a completion, and is not part of it. */
MP_TEST(models_ends_at_the_end_token) {
    static const int32_t end[] = {END_TOKEN};
    static const float bias[] = {100};
    for (int ignore = 0; ignore < 2; ignore++) {
        tiny_model tiny;
        tiny_job job;
        tiny_load(&tiny, tiny_decoder_spec(floats, 1, 61), MP_COMPUTE_F32, 1);
        run_alone(&tiny, &job, &(mp_text_args){.n_bias = 1, .bias_ids = end, .bias = bias,
                                               .sampling.ignore_eos = ignore});
        const mp_choice *choice = &job.call->choices[0];
        MP_CHECK_INT(choice->finish, ignore ? MP_FINISH_LENGTH : MP_FINISH_EOS);
        MP_CHECK_INT(choice->token_count, ignore ? ANSWER : 0);
        mp_request_destroy(&job.call->base);
        tiny_unload(&tiny);
    }
}

/* The frequency and presence penalties count the tokens of the completion, not those of the prompt: a token that the
 * bias prefers is chosen once. */
MP_TEST(models_ends_penalties_count_the_completion) {
    static const int32_t preferred[] = {5}; /* a token of the prompt */
    static const float bias[] = {50};
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec(floats, 1, 61), MP_COMPUTE_F32, 1);
    for (int presence = 0; presence < 2; presence++) {
        tiny_job job;
        run_alone(&tiny, &job, &(mp_text_args){.n_bias = 1, .bias_ids = preferred, .bias = bias, .sampling = {
                                                   .frequency_penalty = presence ? 0 : 100,
                                                   .presence_penalty = presence ? 100 : 0, .ignore_eos = true}});
        const mp_choice *choice = &job.call->choices[0];
        MP_CHECK_INT(choice->tokens[0].id, 5);
        for (int t = 1; t < ANSWER; t++)
            for (int i = 0; i < t; i++)
                MP_CHECK(choice->tokens[t].id != choice->tokens[i].id);
        mp_request_destroy(&job.call->base);
    }
    tiny_unload(&tiny);
}
