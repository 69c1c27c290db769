/* Captures: every record matches its checkpoint and its token, and the number of records is exact.
 * test_models_contract.c checks that no schedule changes a record. */
#include "model_fixture.h"
#include "models/generation/speculation.h"
#include "speculation_fixture.h"

enum { PROMPT = 70, ANSWER = 9, ALL = MP_CAPTURE_MAX_VALUES, RECORDS = TINY_LAYERS + MP_CAPTURE_OTHERS };

static void make_job(const tiny_model *tiny, tiny_job *job, int values, int records) {
    int32_t prompt[PROMPT];
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = i % 9 * 31;
    mp_text_args args = {.n_prompt = PROMPT,
                         .prompt = prompt,
                         .n_choices = 1,
                         .want_prompt_logits = true,
                         .capture_values = values,
                         .capture_records = records,
                         .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .max_tokens = ANSWER,
                                      .logprobs = 2, .ignore_eos = true}};
    tiny_job_make(tiny, job, &args, 0);
}

static void check_equal(const float *a, const float *b, int count) {
    MP_CHECK(memcmp(a, b, (size_t)count * sizeof *a) == 0);
}

static const float *record_of(const mp_text_request *call, int token, int record) {
    const mp_capture *capture = &call->capture;
    return capture->data + (size_t)token * mp_capture_floats(capture) +
           record * mp_capture_values(capture, capture->hidden);
}

static double sum_of_squares(const float *x, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++)
        sum += (double)x[i] * x[i];
    return sum;
}

/* The first record is the token's row of the embedding matrix. The record of the final norm follows from the last
 * layer's output. The logits record of the first token equals the prompt logits of the last row. No two layers and no
 * two tokens produce the same record. */
MP_TEST(models_capture_records_match_their_checkpoints) {
    static const mp_dtype types[] = {MP_F32};
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec(types, 1, 81), MP_COMPUTE_F32, 2);
    tiny_job job;
    make_job(&tiny, &job, ALL, 1000);
    const mp_text_request *call = job.call;
    MP_CHECK_INT(call->capture.layers, TINY_LAYERS);
    MP_CHECK_INT(call->capture.tokens, ANSWER);
    MP_CHECK_INT(mp_capture_floats(&call->capture), (RECORDS - 1) * TINY_HIDDEN + TINY_VOCAB);
    tiny_job_admit(&tiny, &job);
    tiny_job_finish(&tiny, &job);
    MP_CHECK_INT(call->capture.sampled, ANSWER);
    FILE *file = fopen(mp_spec_file(tiny.spec, 0), "rb");
    float row[TINY_HIDDEN];
    for (int t = 0; t < ANSWER; t++) {
        int32_t id = t ? call->choices[0].tokens[t - 1].id : call->prompt[PROMPT - 1];
        MP_CHECK(file && fseek(file, (long)(id * sizeof row), SEEK_SET) == 0 && fread(row, sizeof row, 1, file) == 1);
        check_equal(record_of(call, t, 0), row, TINY_HIDDEN);
        for (int l = 0; l < TINY_LAYERS; l++)
            MP_CHECK(memcmp(record_of(call, t, l), record_of(call, t, l + 1), sizeof row) != 0);
        for (int r = 1; t && r < RECORDS; r++)
            MP_CHECK(memcmp(record_of(call, t, r), record_of(call, t - 1, r), sizeof row) != 0);
        const float *x = record_of(call, t, TINY_LAYERS), *normed = record_of(call, t, TINY_LAYERS + 1);
        double scale = sqrt(sum_of_squares(x, TINY_HIDDEN) / TINY_HIDDEN + 1e-5);
        for (int i = 0; t && i < TINY_HIDDEN; i++) { /* the norm's weights computed from any token agree */
            double weight = normed[i] * scale / x[i], first = record_of(call, 0, TINY_LAYERS + 1)[i] *
                            sqrt(sum_of_squares(record_of(call, 0, TINY_LAYERS), TINY_HIDDEN) / TINY_HIDDEN + 1e-5) /
                            record_of(call, 0, TINY_LAYERS)[i];
            MP_CHECK(fabs(weight - first) < 1e-3 && weight > 0.5 && weight < 1.5);
        }
    }
    fclose(file);
    check_equal(record_of(call, 0, RECORDS - 1), call->prompt_logits + (PROMPT - 1) * TINY_VOCAB, TINY_VOCAB);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* Records of tokens beyond the capture's capacity are dropped; earlier records are unchanged. */
MP_TEST(models_capture_drops_tokens_beyond_its_capacity) {
    static const mp_dtype types[] = {MP_Q8_0};
    tiny_model tiny;
    mp_error error;
    tiny_load(&tiny, tiny_decoder_spec(types, 1, 83), MP_COMPUTE_AUTO, 1);
    tiny_job all, some;
    make_job(&tiny, &all, 4, ANSWER * RECORDS);
    make_job(&tiny, &some, 4, 3 * RECORDS - 1);
    MP_CHECK_INT(all.call->capture.tokens, ANSWER);
    MP_CHECK_INT(some.call->capture.tokens, 2);
    MP_CHECK_INT(tiny_capture_bytes(some.call), 2 * RECORDS * 4 * sizeof(float));
    tiny_job_admit(&tiny, &all);
    tiny_job_finish(&tiny, &all);
    tiny_job_admit(&tiny, &some);
    tiny_job_finish(&tiny, &some);
    MP_CHECK_INT(all.call->capture.sampled, ANSWER);
    MP_CHECK_INT(some.call->capture.sampled, ANSWER);
    MP_CHECK(memcmp(all.call->capture.data, some.call->capture.data, tiny_capture_bytes(some.call)) == 0);
    mp_request_destroy(&all.call->base);
    mp_request_destroy(&some.call->base);
    /* no capacity for even one token */
    mp_text_request *call;
    mp_text_args args = {.n_prompt = 1, .prompt = (const int32_t[]){5}, .n_choices = 1, .capture_values = 4,
                         .capture_records = RECORDS - 1,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 1}};
    uint64_t cost;
    uint32_t total;
    MP_CHECK_OK(mp_text_request_create(&args, &call, &error), &error);
    MP_CHECK_INT(tiny.model->ops->check(tiny.model, &call->base, &cost, &total, &error), MP_INVALID_ARGUMENT);
    mp_request_destroy(&call->base);
    tiny_unload(&tiny);
}

/* Non-finite logits yield no token, but the captured records show where the first non-finite value appears. */
MP_TEST(models_capture_records_nonfinite_rows) {
    static const mp_dtype types[] = {MP_F32};
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec_as(&(tiny_kind){.arch = "llama"}, types, 1, 84, 7), MP_COMPUTE_F32, 1);
    tiny_job job;
    mp_text_args args = {.n_prompt = 2, .prompt = (const int32_t[]){3, 7}, .n_choices = 1, .capture_values = 4,
                         .capture_records = 1000,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 5}};
    tiny_job_make(&tiny, &job, &args, 0);
    tiny_job_admit(&tiny, &job);
    MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), MP_OUTCOME_FAILED);
    MP_CHECK_INT(job.item.error.code, MP_NUMERIC);
    MP_CHECK_INT(job.call->capture.sampled, 1);
    MP_CHECK(isinf(record_of(job.call, 0, 0)[0]) && isnan(record_of(job.call, 0, 1)[0]));
    tiny.engine->ops->retire(tiny.engine, &job.item);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* ---- each allocation fails in turn ------------------------------------------------------------------------------- */

static mp_status make_call(mp_request **call, mp_error *error) {
    mp_text_args args = {.n_prompt = 3, .prompt = (const int32_t[]){5, 6, 7}, .n_choices = 1, .capture_values = 10,
                         .capture_records = 1000,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 4, .ignore_eos = true}};
    mp_text_request *made;
    MP_TRY(mp_text_request_create(&args, &made, error));
    *call = &made->base;
    return MP_OK;
}

static void compare_calls(const mp_request *first, const mp_request *second) {
    const mp_text_request *a = (const mp_text_request *)first, *b = (const mp_text_request *)second;
    MP_CHECK_INT(a->capture.sampled, 4);
    MP_CHECK(memcmp(a->capture.data, b->capture.data, tiny_capture_bytes(a)) == 0);
}

MP_TEST_SECONDS(models_capture_allocation_sweep, 120) {
    static const mp_dtype types[] = {MP_Q8_0};
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    tiny_life life = {.spec = tiny_decoder_spec(types, 1, 85), .compute = MP_COMPUTE_AUTO,
                      .make = make_call, .compare = compare_calls};
    mp_test_alloc_sweep(tiny_live, &life);
    mp_spec_unpin(life.spec);
}
