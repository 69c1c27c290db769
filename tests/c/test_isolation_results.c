/* Corrupted or false results of a worker process: the parent either finds a result valid, or publishes none of it and
 * abandons the process. */
#include "files/spec_build.h"
#include "isolation_scene.h"
#include "request_fixture.h"
#include "test_isolation.h"

/* XOR masks that change a byte. */
static const uint8_t changes[] = {1, 2, 4, 8, 16, 32, 64, 128, 255, 127, 3, 0xC0};
enum { CHANGES = sizeof changes };

/* Compose a step that yields one token with an umlaut, and one alternative, for each choice. over: a stop string ends
 * the choice. */
static void compose_text(scene *s, bool over) {
    static const char text[] = "a\xC3\xA4z";
    mp_wire_begin(&s->out, &s->p.child, MP_FRAME_STEP);
    mp_put_u8(&s->out, over ? MP_OUTCOME_DONE : MP_OUTCOME_MORE);
    mp_put_u32(&s->out, 3); /* the item's cursor */
    mp_put_u32(&s->out, 0); /* cached tokens */
    mp_put_u8(&s->out, 1);
    mp_put_u8(&s->out, over ? MP_FINISH_STOP : MP_FINISH_NONE);
    mp_put_i32(&s->out, over ? 0 : -1);
    mp_put_u32(&s->out, 3);
    static const uint32_t ends[] = {1, 3, 4};
    for (int t = 0; t < 3; t++) {
        int32_t ids[TOPS] = {3, -1};
        float probabilities[TOPS] = {-1, -2};
        mp_put_i32(&s->out, 10 + t);
        mp_put_f32(&s->out, -0.5f);
        mp_put_u32(&s->out, ends[t]);
        mp_put(&s->out, ids, sizeof ids);
        mp_put(&s->out, probabilities, sizeof probabilities);
    }
    mp_put_u32(&s->out, over ? 4 : 3); /* final bytes of text */
    mp_put_u32(&s->out, 4);
    mp_put(&s->out, text, 4);
    put_learnt(s);
}

enum { END = VOCAB - 2, CONTEXT = 64 };

static mp_text_request *text_call(void) {
    static const int32_t end = END;
    static const int32_t prompt[] = {1, 2};
    static const char *const stop[] = {"!"};
    static const int32_t stop_bytes[] = {1};
    mp_text_args args = {.n_prompt = 2, .prompt = prompt, .n_choices = 1, .n_stop = 1, .stop = stop,
                         .stop_bytes = stop_bytes,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = MAX_TOKENS,
                                      .logprobs = TOPS}};
    mp_text_request *call;
    mp_error error;
    MP_CHECK_OK(mp_text_request_create(&args, &call, &error), &error);
    call->vocab = VOCAB + SPARE;
    call->sampled_vocab = VOCAB;
    call->context = CONTEXT;
    call->ends = &end;
    call->n_ends = 1;
    MP_CHECK_OK(mp_text_request_output(call, 4, &error), &error);
    return call;
}

/* Check that a caller sees a valid state of the request. */
static void check_text(const mp_text_request *call) {
    const mp_choice *choice = &call->choices[0];
    uint32_t before = 0;
    MP_CHECK(choice->token_count <= MAX_TOKENS && choice->text_bytes <= choice->text_capacity);
    for (uint32_t t = 0; t < choice->token_count; t++) {
        MP_CHECK(choice->tokens[t].id >= 0 && choice->tokens[t].id < VOCAB);
        MP_CHECK(choice->tokens[t].byte_end <= choice->text_capacity);
        MP_CHECK(choice->tokens[t].byte_end >= before || t + 1 == choice->token_count);
        before = choice->tokens[t].byte_end;
        for (int k = 0; k < TOPS; k++)
            MP_CHECK(choice->top_ids[t * TOPS + (uint32_t)k] >= -1 && choice->top_ids[t * TOPS + (uint32_t)k] < VOCAB);
    }
    MP_CHECK(mp_is_utf8(choice->text, choice->text_bytes));
    MP_CHECK(choice->finish >= MP_FINISH_NONE && choice->finish <= MP_FINISH_CANCELLED);
    MP_CHECK(choice->finish != MP_FINISH_STOP || choice->stop_index == 0);
    MP_CHECK(call->cached_tokens >= 0 && call->cached_tokens <= call->n_prompt);
}

/* Send one result with a changed byte or cut short. Returns true if the parent accepted it. */
static bool try_text(int at, uint8_t by, size_t cut, bool over, size_t *used) {
    static scene s;
    memset(&s, 0, sizeof s);
    mp_text_request *call = text_call();
    s.mutate_at = -1;
    scene_admit(&s, &call->base, 7);
    answer_plan(&s, 2, false);
    s.mutate_at = at;
    s.mutate_by = by;
    s.cut = cut;
    compose_text(&s, over);
    *used = s.out.used;
    mp_outcome outcome = run_step(&s);
    const mp_error *lost = s.engine->lost(s.engine);
    bool taken = !lost;
    if (lost && at < 0 && !cut)
        MP_FAIL("refused: %s", lost->message);
    if (taken) {
        MP_CHECK(outcome == MP_OUTCOME_MORE || outcome == MP_OUTCOME_DONE || outcome == MP_OUTCOME_FAILED ||
                 outcome == MP_OUTCOME_WAIT_MEMORY);
        MP_CHECK((outcome == MP_OUTCOME_DONE) == (over && outcome != MP_OUTCOME_FAILED));
    } else {
        MP_CHECK_INT(outcome, MP_OUTCOME_FAILED);
        MP_CHECK_INT(s.item.error.code, MP_RECV);
        MP_CHECK_INT(call->choices[0].token_count, 0); /* nothing of the result is published */
        MP_CHECK_INT(call->choices[0].text_bytes, 0);
        MP_CHECK_INT(call->choices[0].finish, MP_FINISH_NONE);
        MP_CHECK_INT(call->prompt_done_ns, 0);
        MP_CHECK_INT(s.item.cursor, 0);
    }
    check_text(call);
    scene_end(&s);
    check_text(call);
    mp_request_destroy(&call->base);
    return taken;
}

MP_TEST_SECONDS(isolation_completions_with_a_changed_byte_are_correct_or_refused, 120) {
    for (int over = 0; over < 2; over++) {
        size_t used = 0, unused;
        int taken = 0, refused = 0;
        MP_CHECK(try_text(-1, 0, 0, over, &used));
        MP_CHECK(used > 100 && used < PAYLOAD);
        for (size_t at = 0; at < used; at++)
            for (int i = 0; i < CHANGES; i++) {
                bool ok = try_text((int)at, changes[i], 0, over, &unused);
                taken += ok;
                refused += !ok;
            }
        for (size_t cut = 1; cut < used; cut++)
            MP_CHECK(!try_text(-1, 0, cut, over, &unused));
        MP_CHECK(taken > 0 && refused > 500); /* changed floats, counters and letters are accepted */
    }
}

MP_TEST_SECONDS(isolation_plans_with_a_changed_byte_are_correct_or_refused, 60) {
    static scene s;
    for (int at = -1; at < 24; at++)
        for (int i = 0; i < CHANGES; i++) {
            memset(&s, 0, sizeof s);
            mp_text_request *call = text_call();
            s.mutate_at = -1;
            scene_admit(&s, &call->base, 7);
            s.mutate_at = at;
            s.mutate_by = changes[i];
            answer_plan(&s, 2, true); /* also checks what a caller sees */
            scene_end(&s);
            mp_request_destroy(&call->base);
        }
}

enum { WIDTH = 4 };

/* Make a request for two texts or two images, with memory for its vectors. */
static mp_request *make_vectors_call(bool images, float **vectors, _Atomic int32_t **done) {
    static const int32_t ids[] = {1, 2, 3}, sizes[] = {2, 3, 1, 1};
    static const int64_t offsets[] = {0, 1, 3};
    static const uint8_t pixels[3 * (2 * 3 + 1)];
    mp_error error;
    if (images) {
        mp_image_embedding_request *call;
        MP_CHECK_OK(make_image_embedding_request(2, sizes, pixels, sizeof pixels, &call, &error), &error);
        MP_CHECK_OK(mp_image_embedding_request_output(call, 9, WIDTH, &error), &error);
        *vectors = call->vectors;
        *done = &call->done;
        return &call->base;
    }
    mp_embedding_request *call;
    MP_CHECK_OK(make_embedding_request(2, ids, offsets, NULL, &call, &error), &error);
    MP_CHECK_OK(mp_embedding_request_output(call, (mp_embedding_sizes){.width = WIDTH}, &error), &error);
    *vectors = call->vectors;
    *done = &call->done;
    return &call->base;
}

/* Admit the request to a new scene and plan all of it. */
static void begin_vectors(scene *s, mp_request *call) {
    memset(s, 0, sizeof *s);
    s->mutate_at = -1;
    scene_admit(s, call, 2);
    answer_plan(s, 2, false);
}

/* Begin the result of the step: DONE with both rows. */
static void begin_rows(scene *s) {
    mp_wire_begin(&s->out, &s->p.child, MP_FRAME_STEP);
    mp_put_u8(&s->out, MP_OUTCOME_DONE);
    mp_put_u32(&s->out, 2);
}

static void change_vectors(bool images) {
    static scene s;
    size_t used = 1;
    int refused = 0;
    for (int at = -1; at < (int)used; at++)
        for (int i = 0; i < CHANGES; i++) {
            float *vectors;
            _Atomic int32_t *done;
            mp_request *call = make_vectors_call(images, &vectors, &done);
            begin_vectors(&s, call);
            s.mutate_at = at;
            s.mutate_by = changes[i];
            begin_rows(&s);
            for (int k = 0; k < 2 * WIDTH; k++)
                mp_put_f32(&s.out, (float)k);
            put_learnt(&s);
            used = s.out.used;
            mp_outcome outcome = run_step(&s);
            bool lost = s.engine->lost(s.engine) != NULL;
            refused += lost;
            MP_CHECK(at >= 0 || (!lost && outcome == MP_OUTCOME_DONE && vectors[7] == 7));
            MP_CHECK(lost ? outcome == MP_OUTCOME_FAILED && *done == 0 : *done <= 2);
            scene_end(&s);
            mp_request_destroy(call);
        }
    MP_CHECK(refused > 100);
}

MP_TEST_SECONDS(isolation_vectors_with_a_changed_byte_are_correct_or_refused, 60) { change_vectors(false); }
MP_TEST_SECONDS(isolation_image_vectors_with_a_changed_byte_are_correct_or_refused, 60) { change_vectors(true); }

MP_TEST(isolation_vectors_that_are_not_finite_are_refused) {
    static scene s;
    static const float values[] = {1, NAN, INFINITY, -INFINITY};
    for (int images = 0; images < 2; images++)
        for (int i = 0; i < 4; i++) {
            float *vectors;
            _Atomic int32_t *done;
            mp_request *call = make_vectors_call(images, &vectors, &done);
            begin_vectors(&s, call);
            begin_rows(&s);
            for (int k = 0; k < 2 * WIDTH; k++)
                mp_put_f32(&s.out, k == WIDTH ? values[i] : 0);
            put_learnt(&s);
            MP_CHECK_INT(run_step(&s), i ? MP_OUTCOME_FAILED : MP_OUTCOME_DONE);
            const mp_error *lost = s.engine->lost(s.engine);
            MP_CHECK((lost != NULL) == (i > 0) && *done == (i ? 0 : 2));
            if (lost)
                MP_CHECK_HAS(lost->message, "a vector is not finite");
            scene_end(&s);
            mp_request_destroy(call);
        }
}

/* Sparse vectors of a process must fit their room, and their ids must ascend within the vocabulary. */
MP_TEST(isolation_sparse_vectors_are_correct_or_refused) {
    enum { ROOM = 3, VOCAB = 10 };
    static const int32_t tokens[] = {1, 2, 3};
    static const int64_t offsets[] = {0, 1, 3};
    static const struct {
        int32_t counts[2], ids[4];
        float values[4];
        const char *reason;
    } cases[] = {{{2, 2}, {0, 9, 3, 4}, {1, 2, 3, 4}, NULL},
                 {{0, 3}, {1, 2, 3}, {1, 2, 3}, NULL},
                 {{4, 0}, {1, 2, 3, 4}, {1, 1, 1, 1}, "has too many weights"},
                 {{-1, 0}, {0}, {0}, "is negative"},
                 {{2, 2}, {5, 5, 3, 4}, {1, 2, 3, 4}, "do not ascend"},
                 {{2, 2}, {5, 4, 3, 4}, {1, 2, 3, 4}, "do not ascend"},
                 {{2, 2}, {0, 10, 3, 4}, {1, 2, 3, 4}, "do not ascend within the vocabulary"},
                 {{2, 2}, {-1, 4, 3, 4}, {1, 2, 3, 4}, "is negative"},
                 {{2, 2}, {1, 4, 3, 4}, {1, NAN, 3, 4}, "a weight is not finite"},
                 {{2, 2}, {1, 4, 3, 4}, {1, 2, 3, INFINITY}, "a weight is not finite"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static scene s;
        mp_embedding_request *call;
        mp_error error;
        int at = 0;
        MP_CHECK_OK(make_embedding_request(2, tokens, offsets, NULL, &call, &error), &error);
        call->outputs = MP_EMBED_SPARSE;
        const mp_embedding_sizes sizes = {.sparse_most = ROOM, .vocab = VOCAB};
        MP_CHECK_OK(mp_embedding_request_output(call, sizes, &error), &error);
        begin_vectors(&s, &call->base);
        begin_rows(&s);
        mp_put(&s.out, cases[i].counts, sizeof cases[i].counts);
        for (int t = 0; t < 2; t++) {
            const int count = cases[i].counts[t] > 0 ? cases[i].counts[t] : 0;
            mp_put(&s.out, cases[i].ids + at, (size_t)count * sizeof(int32_t));
            mp_put(&s.out, cases[i].values + at, (size_t)count * sizeof(float));
            at += count;
        }
        put_learnt(&s);
        MP_CHECK_INT(run_step(&s), cases[i].reason ? MP_OUTCOME_FAILED : MP_OUTCOME_DONE);
        const mp_error *lost = s.engine->lost(s.engine);
        MP_CHECK((lost != NULL) == (cases[i].reason != NULL) && call->done == (lost ? 0 : 2));
        if (lost)
            MP_CHECK_HAS(lost->message, cases[i].reason);
        else
            MP_CHECK(call->sparse_ids[ROOM] == cases[i].ids[cases[i].counts[0]]);
        scene_end(&s);
        mp_request_destroy(&call->base);
    }
}

MP_TEST(isolation_patch_vectors_of_images_are_refused) {
    float *vectors;
    _Atomic int32_t *done;
    mp_error error;
    mp_request *call = make_vectors_call(true, &vectors, &done);
    const mp_request_wire *wire = mp_request_wire_of(MP_IMAGE_EMBEDDING);
    MP_CHECK_OK(wire->check(call, &error), &error);
    ((mp_image_embedding_request *)call)->output = MP_IMAGE_TOKENS;
    MP_CHECK_STATUS(wire->check(call, &error), MP_UNSUPPORTED, &error);
    mp_request_destroy(call);
}

MP_TEST(isolation_unexpected_messages_of_a_child_are_refused) {
    static scene s;
    mp_text_request *call = text_call();
    s.mutate_at = -1;
    scene_admit(&s, &call->base, 7);
    mp_wire_begin(&s.out, &s.p.child, MP_FRAME_STEP); /* the child replies to a plan request with a step */
    put_learnt(&s);
    send_answer(&s, false);
    mp_item *items[1] = {&s.item};
    s.engine->ops->plan(s.engine, items, 1, 1000000, &s.plan);
    const mp_error *lost = s.engine->lost(s.engine);
    MP_CHECK(lost && lost->code == MP_RECV);
    MP_CHECK_HAS(lost->message, "replies to another message");
    mp_outcome outcomes[MP_PLAN_MAX];
    s.engine->ops->step(s.engine, &s.lease, &s.plan, outcomes);
    MP_CHECK_INT(outcomes[0], MP_OUTCOME_MORE); /* the step did not begin, so no request is suspect */
    mp_error error;
    mp_item another = {.request = &call->base, .total = 7};
    MP_CHECK_STATUS(s.engine->ops->admit(s.engine, &another, &error), MP_RECV, &error);
    MP_CHECK_INT(s.engine->ops->trim(s.engine), 0);
    scene_end(&s);
    mp_request_destroy(&call->base);
}

/* ---- false results in well-formed frames ------------------------------------------------------------------------- */

typedef struct claim { /* the text and tokens of a reported result */
    const char *text;
    int count;
    int32_t id[MAX_TOKENS];
    uint32_t end[MAX_TOKENS];
    int32_t top;
    uint32_t final, text_end;
    int finish, stop_index;
} claim;

static void compose_claim(scene *s, const claim *it) {
    mp_wire_begin(&s->out, &s->p.child, MP_FRAME_STEP);
    mp_put_u8(&s->out, it->finish ? MP_OUTCOME_DONE : MP_OUTCOME_MORE);
    mp_put_u32(&s->out, 3);
    mp_put_u32(&s->out, 0);
    mp_put_u8(&s->out, 1);
    mp_put_u8(&s->out, (uint8_t)it->finish);
    mp_put_i32(&s->out, it->stop_index);
    mp_put_u32(&s->out, (uint32_t)it->count);
    for (int t = 0; t < it->count; t++) {
        int32_t ids[TOPS] = {it->top, -1};
        float probabilities[TOPS] = {-1, -2};
        mp_put_i32(&s->out, it->id[t]);
        mp_put_f32(&s->out, -0.5f);
        mp_put_u32(&s->out, it->end[t]);
        mp_put(&s->out, ids, sizeof ids);
        mp_put(&s->out, probabilities, sizeof probabilities);
    }
    mp_put_u32(&s->out, it->final);
    mp_put_u32(&s->out, it->text_end);
    size_t sent = strlen(it->text);
    mp_put(&s->out, it->text, sent);
    put_learnt(s);
}

/* Send claims one after the other. Check the reason why the parent refuses the last; "" = the parent accepts it. */
static void check_claims(const claim *claims, int count, const char *why) {
    static scene s;
    memset(&s, 0, sizeof s);
    s.mutate_at = -1;
    mp_text_request *call = text_call();
    scene_admit(&s, &call->base, 7);
    for (int i = 0; i < count; i++) {
        answer_plan(&s, 2, false);
        compose_claim(&s, &claims[i]);
        mp_outcome outcome = run_step(&s);
        const mp_error *lost = s.engine->lost(s.engine);
        if (i + 1 < count || !*why) {
            if (lost)
                MP_FAIL("claim %d is refused: %s", i, lost->message);
            continue;
        }
        MP_CHECK(lost && outcome == MP_OUTCOME_FAILED);
        MP_CHECK_INT(s.item.error.code, MP_RECV);
        MP_CHECK_HAS(s.item.error.message, why);
    }
    check_text(call);
    scene_end(&s);
    mp_request_destroy(&call->base);
}

MP_TEST(isolation_texts_end_where_their_tokens_and_characters_do) {
    enum { OPEN = MP_FINISH_NONE, STOP = MP_FINISH_STOP, EOS = MP_FINISH_EOS };
    static const char umlaut[] = "a\xC3\xA4z";
    claim open = {umlaut, 2, {1, 2}, {3, 4}, 3, 1, 4, OPEN, -1}; /* all text after "a" is held back */
    claim cut = {"", 1, {3}, {1}, 3, 1, 1, STOP, 0};             /* a stop string that starts after "a" ends the text */
    check_claims((claim[]){open, cut}, 2, "");
    cut.end[0] = cut.final = cut.text_end = 2; /* an end within the character that was sent before */
    check_claims((claim[]){open, cut}, 2, "middle of a character");
    cut = (claim){"", 1, {3}, {1}, 3, 3, 3, STOP, 0}; /* the text ends after its last token */
    check_claims((claim[]){open, cut}, 2, "does not end where its tokens do");
    cut = (claim){"", 0, {0}, {0}, 3, 4, 4, STOP, 0}; /* no token completes the stop string */
    check_claims((claim[]){open, cut}, 2, "does not end where its tokens do");
    claim over = {umlaut, 2, {1, 2}, {3, 4}, 3, 4, 4, EOS, -1};
    check_claims(&over, 1, "");
    over.end[0] = 2;
    check_claims(&over, 1, "middle of a character");
    over.end[0] = 3;
    over.end[1] = 0; /* token 1 ends before token 0, although no stop string cut the text */
    check_claims(&over, 1, "impossible byte");
    claim beyond = {"ab", 2, {1, 2}, {1, 9}, 3, 2, 2, EOS, -1}; /* token 1 ends beyond the text */
    check_claims(&beyond, 1, "does not end where its tokens do");
    beyond.finish = STOP;
    beyond.stop_index = 0;
    check_claims(&beyond, 1, "does not end where its tokens do");
    beyond.end[0] = 3; /* the first token ends beyond the second */
    beyond.end[1] = 2;
    check_claims(&beyond, 1, "does not end where its tokens do");
    beyond.end[0] = 2;
    check_claims(&beyond, 1, "");
    claim more = {"abcdef", 1, {1}, {1}, 3, 6, 6, EOS, -1}; /* bytes after the last token, other than one U+FFFD */
    check_claims(&more, 1, "does not end where its tokens do");
    more = (claim){"a\xEF\xBF\xBD", 1, {1}, {1}, 3, 4, 4, EOS, -1};
    check_claims(&more, 1, "");
    claim seen = {"ab", 2, {1, 2}, {1, 2}, 3, 3, 2, OPEN, -1}; /* more text is final than exists */
    check_claims(&seen, 1, "impossible length");
    claim shorter = {"", 0, {0}, {0}, 3, 2, 2, EOS, -1}; /* less text than was published before */
    claim longer = {"abc", 1, {1}, {3}, 3, 3, 3, OPEN, -1};
    check_claims((claim[]){longer, shorter}, 2, "impossible length");
}

typedef struct limits {
    int32_t context, min_tokens, n_ends;
    bool ignore_eos;
} limits;

static void check_claim_within(claim it, limits limits, const char *why) {
    static scene s;
    memset(&s, 0, sizeof s);
    s.mutate_at = -1;
    mp_text_request *call = text_call();
    call->context = limits.context;
    call->n_ends = limits.n_ends;
    call->sampling.min_tokens = limits.min_tokens;
    call->sampling.ignore_eos = limits.ignore_eos;
    scene_admit(&s, &call->base, 7);
    answer_plan(&s, 2, false);
    compose_claim(&s, &it);
    mp_outcome outcome = run_step(&s);
    const mp_error *lost = s.engine->lost(s.engine);
    if (*why) {
        MP_CHECK(lost && outcome == MP_OUTCOME_FAILED && call->choices[0].token_count == 0);
        MP_CHECK_HAS(s.item.error.message, why);
    } else {
        MP_CHECK(!lost);
        MP_CHECK_INT(call->choices[0].finish, it.finish);
    }
    scene_end(&s);
    mp_request_destroy(&call->base);
}

MP_TEST(isolation_completions_end_where_they_must) {
    enum { OPEN = MP_FINISH_NONE, EOS = MP_FINISH_EOS, LENGTH = MP_FINISH_LENGTH };
    const limits usual = {.context = CONTEXT, .n_ends = 1};
    claim four = {"abcd", 4, {1, 2, 3, 4}, {1, 2, 3, 4}, 3, 4, 4, LENGTH, -1}, open = four;
    claim three = {"abc", 3, {1, 2, 3}, {1, 2, 3}, 3, 3, 3, LENGTH, -1};
    check_claim_within(four, usual, "");
    check_claim_within(three, usual, "before its maximum length");
    limits narrow = usual;
    narrow.context = 4; /* a prompt of 2 tokens: no position is left after the third token */
    check_claim_within(three, narrow, "");
    check_claim_within(four, narrow, "too long");
    open.finish = OPEN;
    check_claim_within(open, usual, "continues at its maximum length");
    three.finish = OPEN;
    check_claim_within(three, usual, "");
    check_claim_within(three, narrow, "continues at its maximum length");
    three.finish = EOS;
    check_claim_within(three, usual, "");
    four.finish = EOS; /* 4 tokens are the maximum: an end token would be the fifth */
    check_claim_within(four, usual, "no end token can be sampled");
    limits other = usual;
    other.min_tokens = 3;
    check_claim_within(three, other, "");
    other.min_tokens = 4;
    check_claim_within(three, other, "no end token can be sampled");
    other = usual;
    other.ignore_eos = true;
    check_claim_within(three, other, "no end token can be sampled");
    other = usual;
    other.n_ends = 0;
    check_claim_within(three, other, "no end token can be sampled");
    three.id[1] = END;
    check_claim_within(three, usual, "after an end token");
}

MP_TEST(isolation_token_ids_are_within_the_vocabulary) {
    claim it = {"a", 1, {VOCAB - 1}, {1}, VOCAB - 1, 1, 1, MP_FINISH_NONE, -1};
    check_claims(&it, 1, "");
    it.id[0] = VOCAB; /* the model has a row for this id, but the tokenizer has no text */
    check_claims(&it, 1, "a token id is outside the vocabulary");
    it.id[0] = 1;
    it.top = VOCAB;
    check_claims(&it, 1, "an alternative is outside the vocabulary");
}

static bool is_one_of(mp_status status, const mp_status *list) {
    for (; *list != MP_OK; list++)
        if (*list == status)
            return true;
    return false;
}

static mp_error failure_of(mp_status status) {
    mp_error said;
    mp_fail(&said, status, "an injected failure");
    return said;
}

MP_TEST(isolation_requests_fail_only_with_allowed_errors) {
    static const mp_status at_admission[] = {MP_MEMORY_EXHAUSTED, MP_MODEL, MP_INTERNAL, MP_OK};
    static const mp_status in_a_step[] = {MP_MEMORY_EXHAUSTED, MP_INTEGRITY, MP_MODEL, MP_IO,
                                          MP_NUMERIC,          MP_INTERNAL,  MP_OK};
    static scene s;
    int count, taken = 0;
    const mp_status_row *all = mp_status_rows(&count);
    for (int i = 0; i < count; i++) {
        mp_error said = failure_of(all[i].code), error;
        mp_text_request *call = text_call();
        memset(&s, 0, sizeof s);
        s.mutate_at = -1;
        scene_admit(&s, &call->base, 7);
        mp_item another = {.request = &call->base, .total = 7};
        mp_wire_begin(&s.out, &s.p.child, MP_FRAME_ADMIT);
        mp_put_u32(&s.out, 2);
        mp_put_error(&s.out, said.code, &said);
        send_answer(&s, false);
        mp_status status = s.engine->ops->admit(s.engine, &another, &error);
        bool right = said.code == MP_OK || is_one_of(said.code, at_admission);
        MP_CHECK_INT(status, right ? said.code : MP_RECV);
        MP_CHECK_INT(s.engine->lost(s.engine) != NULL, !right);
        if (!right)
            MP_CHECK_HAS(error.message, "not allowed here");
        taken += right;
        s.engine->ops->retire(s.engine, &another);
        scene_end(&s);
        mp_request_destroy(&call->base);

        call = text_call();
        memset(&s, 0, sizeof s);
        s.mutate_at = -1;
        scene_admit(&s, &call->base, 7);
        answer_plan(&s, 2, false);
        mp_wire_begin(&s.out, &s.p.child, MP_FRAME_STEP);
        mp_put_u8(&s.out, MP_OUTCOME_FAILED);
        mp_put_error(&s.out, said.code, &said);
        mp_put_u32(&s.out, 0);
        mp_put_u32(&s.out, 0);
        mp_put_u8(&s.out, 0);
        mp_put_u8(&s.out, MP_FINISH_NONE);
        mp_put_i32(&s.out, -1);
        mp_put_u32(&s.out, 0);
        mp_put_u32(&s.out, 0);
        mp_put_u32(&s.out, 0);
        put_learnt(&s);
        MP_CHECK_INT(run_step(&s), MP_OUTCOME_FAILED);
        right = is_one_of(said.code, in_a_step);
        MP_CHECK_INT(s.item.error.code, right ? said.code : MP_RECV);
        MP_CHECK_INT(s.engine->lost(s.engine) != NULL, !right);
        taken += right;
        scene_end(&s);
        mp_request_destroy(&call->base);
    }
    MP_CHECK_INT(taken, 4 + 6);
}

/* Run steps without progress until the proxy abandons the process; return the number of steps. The child reports a
 * token after `before` steps. */
static int idle_steps(uint64_t before) {
    static scene s;
    int steps = 0;
    memset(&s, 0, sizeof s);
    s.mutate_at = -1;
    mp_text_request *call = text_call();
    scene_admit(&s, &call->base, 7);
    claim nothing = {"", 0, {0}, {0}, 3, 0, 0, MP_FINISH_NONE, -1}, token = {"a", 1, {1}, {1}, 3, 1, 1, 0, -1};
    while (!s.engine->lost(s.engine)) {
        MP_CHECK(++steps < 1000);
        answer_plan(&s, 2, false);
        if ((uint64_t)steps == before)
            nothing.final = nothing.text_end = 1;
        compose_claim(&s, (uint64_t)steps == before ? &token : &nothing);
        run_step(&s);
    }
    MP_CHECK_INT(s.item.error.code, MP_RECV);
    MP_CHECK_HAS(s.item.error.message, "made no progress on a request");
    scene_end(&s);
    mp_request_destroy(&call->base);
    return steps;
}

MP_TEST(isolation_steps_without_progress_end) {
    mp_text_request *call = text_call();
    int most = (int)mp_wire_text_to_text.most_idle(&call->base);
    mp_request_destroy(&call->base);
    MP_CHECK_INT(idle_steps(0), 2 + most); /* the first step reports the end of prefill */
    MP_CHECK_INT(idle_steps((uint64_t)most), most + most + 1);
}
