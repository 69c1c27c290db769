/* Frames, messages and answers of a worker process that cannot be believed: whatever it writes, the parent either finds
 * it right or gives the process up, and shows nobody anything of it. */
#include <stdatomic.h>
#include <stdlib.h>

#include "files/spec_build.h"
#include "isolation/capability_wire.h"
#include "isolation/proxy.h"
#include "isolation/spec_codec.h"
#include "model_fixture.h"

static bool never(void *arg) {
    (void)arg;
    return false; /* nobody else is there: what is not in the ring does not come */
}

typedef struct pair { /* both sides in one process */
    mp_channel_page *page;
    mp_channel parent, child;
    mp_error parent_error, child_error;
} pair;

static void pair_init(pair *p) {
    p->page = aligned_alloc(64, (sizeof *p->page + 63) / 64 * 64);
    MP_CHECK(p->page);
    memset(p->page, 0, sizeof *p->page);
    mp_error_clear(&p->parent_error);
    mp_error_clear(&p->child_error);
    mp_channel_init(&p->parent, p->page, true, &p->parent_error, never, NULL);
    mp_channel_init(&p->child, p->page, false, &p->child_error, never, NULL);
}

MP_TEST(isolation_frames_come_as_they_were_sent) {
    static uint8_t sent[MP_FRAME_MOST], got[MP_FRAME_MOST];
    mp_test_random random = {1};
    pair p;
    pair_init(&p);
    for (int i = 0; i < 400; i++) { /* several times round the ring */
        size_t bytes = i % 7 == 0 ? MP_FRAME_MOST : mp_test_random_u64(&random) % 5000;
        for (size_t k = 0; k < bytes; k++)
            sent[k] = (uint8_t)mp_test_random_u64(&random);
        mp_channel *from = i % 2 ? &p.parent : &p.child, *to = i % 2 ? &p.child : &p.parent;
        mp_frame frame;
        MP_CHECK(!mp_channel_waiting(to));
        MP_CHECK(mp_channel_send(from, MP_FRAME_STEP, i % 3 == 0, sent, bytes));
        MP_CHECK(mp_channel_receive(to, false, &frame, got));
        MP_CHECK_INT(frame.bytes, bytes);
        MP_CHECK_INT(frame.last, i % 3 == 0);
        MP_CHECK(memcmp(sent, got, bytes) == 0);
    }
    mp_frame frame;
    MP_CHECK(!mp_channel_receive(&p.parent, false, &frame, got)); /* `never` says that nobody comes */
    MP_CHECK(p.parent.broken);
    free(p.page);
}

MP_TEST(isolation_every_flipped_byte_of_a_frame_is_found) {
    static uint8_t data[100], got[MP_FRAME_MOST];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * 7);
    enum { COST = 128 }; /* header, 100 bytes, padding */
    for (size_t at = 0; at < COST; at++)
        for (int bit = 0; bit < 8; bit++) {
            pair p;
            mp_frame frame;
            pair_init(&p);
            MP_CHECK(mp_channel_send(&p.child, MP_FRAME_STEP, true, data, sizeof data));
            p.page->replies.data[at] ^= (uint8_t)(1 << bit);
            bool ok = mp_channel_receive(&p.parent, false, &frame, got);
            if (at < sizeof(mp_frame) + sizeof data)
                MP_CHECK(!ok && p.parent.broken && p.parent_error.code == MP_RECV);
            else
                MP_CHECK(ok && memcmp(got, data, sizeof data) == 0); /* padding says nothing */
            free(p.page);
        }
}

MP_TEST(isolation_torn_repeated_and_forged_frames_are_refused) {
    static uint8_t data[64], got[MP_FRAME_MOST];
    static const uint64_t forged[] = {1, 4, 8, 16, 23, MP_RING_BYTES + 8, UINT64_MAX, UINT64_MAX - 7, 1ull << 63};
    mp_frame frame;
    pair p;
    for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) { /* a position that cannot be */
        pair_init(&p);
        atomic_store(&p.page->replies.head, forged[i]);
        MP_CHECK(!mp_channel_receive(&p.parent, false, &frame, got));
        MP_CHECK(p.parent.broken && p.parent_error.code == MP_RECV);
        free(p.page);
    }
    for (size_t cut = 0; cut < 88; cut += 8) { /* published before it was written */
        pair_init(&p);
        MP_CHECK(mp_channel_send(&p.child, MP_FRAME_STEP, true, data, sizeof data));
        memset(p.page->replies.data + cut, 0xAA, 88 - cut);
        MP_CHECK(!mp_channel_receive(&p.parent, false, &frame, got));
        free(p.page);
    }
    for (uint32_t length = 0; length < 200; length++) { /* a length that is not what was written, well signed */
        pair_init(&p);
        mp_frame made = {length == 199 ? UINT32_MAX : length, MP_FRAME_STEP, 1, 1, 0};
        uint8_t room[256] = {0};
        if (made.bytes < sizeof room)
            made.checksum = mp_frame_checksum(&made, room);
        memcpy(p.page->replies.data, &made, sizeof made);
        atomic_store(&p.page->replies.head, 88);
        bool ok = mp_channel_receive(&p.parent, false, &frame, got);
        MP_CHECK(ok == (length <= 64));
        free(p.page);
    }
    pair_init(&p); /* again: the number has been */
    MP_CHECK(mp_channel_send(&p.child, MP_FRAME_STEP, true, data, sizeof data));
    MP_CHECK(mp_channel_receive(&p.parent, false, &frame, got));
    memcpy(p.page->replies.data + 88, p.page->replies.data, 88);
    atomic_store(&p.page->replies.head, 176);
    MP_CHECK(!mp_channel_receive(&p.parent, false, &frame, got));
    MP_CHECK_HAS(p.parent_error.message, "not the next one");
    free(p.page);
    static const uint64_t read[] = {8, 4, UINT64_MAX, 1ull << 40}; /* it read what was never written */
    for (size_t i = 0; i < sizeof read / sizeof *read; i++) {
        pair_init(&p);
        atomic_store(&p.page->requests.tail, read[i]);
        MP_CHECK(!mp_channel_send(&p.parent, MP_FRAME_PLAN, true, data, sizeof data));
        MP_CHECK(p.parent.broken);
        free(p.page);
    }
}

MP_TEST(isolation_errors_cross_as_printable_text) {
    static mp_wire_out out;
    static mp_wire_in in;
    mp_error sent, got;
    pair p;
    pair_init(&p);
    mp_fail(&sent, MP_NUMERIC, "NaN \x01\x02 in \xC3\xA4 \x7F");
    memcpy(sent.field, "\xFF\xFE", 3);
    mp_wire_begin(&out, &p.child, MP_FRAME_READY);
    mp_put_error(&out, MP_NUMERIC, &sent);
    MP_CHECK(mp_wire_end(&out) && mp_wire_receive(&in, &p.parent, false));
    MP_CHECK_INT(mp_get_error(&in, &got), MP_NUMERIC);
    MP_CHECK(mp_wire_done(&in));
    MP_CHECK_STR(got.message, "NaN ?? in \xC3\xA4 ?");
    MP_CHECK_STR(got.field, "??");
    mp_wire_begin(&out, &p.child, MP_FRAME_READY);
    mp_put_u32(&out, 7777); /* no such status */
    uint8_t rest[64] = {0};
    mp_put(&out, rest, sizeof rest);
    MP_CHECK(mp_wire_end(&out) && mp_wire_receive(&in, &p.parent, false));
    mp_get_error(&in, &got);
    MP_CHECK(!mp_wire_done(&in) && p.parent.broken);
    free(p.page);
}

/* ---- answers that cannot be believed ---- */

enum { VOCAB = TINY_VOCAB, MOST_TOKENS = 4, TOPS = 2, PAYLOAD = 4096 };

typedef struct scene { /* a proxy without a process, one admitted call, and what a child would answer */
    pair p;
    mp_engine *engine;
    mp_lease lease;
    mp_item item;
    mp_plan plan;
    mp_wire_out out;
    int mutate_at; /* byte of the answer to the step or plan, -1 = none */
    uint8_t mutate_by;
    size_t cut; /* 0 = whole */
} scene;

static const mp_isolation_kind no_kind;

/* Bits that a byte is changed by. */
static const uint8_t changes[] = {1, 2, 4, 8, 16, 32, 64, 128, 255, 127, 3, 0xC0};
enum { CHANGES = sizeof changes };

static void send_answer(scene *s, bool target) {
    if (target && s->mutate_at >= 0 && (size_t)s->mutate_at < s->out.used)
        s->out.buffer[s->mutate_at] ^= s->mutate_by;
    if (target && s->cut && s->cut < s->out.used)
        s->out.used = s->cut;
    MP_CHECK(mp_wire_end(&s->out));
}

static void scene_admit(scene *s, mp_call *call, uint32_t total) {
    mp_error error;
    pair_init(&s->p);
    mp_proxy_args args = {.kind = &no_kind, .capability = call->capability, .memory_bytes = 1 << 20,
                          .start_ns = 1000000000, .stall_ns = 1000000};
    MP_CHECK_OK(mp_proxy_attach(&args, s->p.page, &s->engine, &error), &error);
    s->item = (mp_item){.call = call, .total = total};
    s->lease = (mp_lease){.lanes = 1};
    mp_wire_begin(&s->out, &s->p.child, MP_FRAME_ADMIT);
    mp_put_u32(&s->out, 1);
    mp_put_error(&s->out, MP_OK, NULL);
    send_answer(s, false);
    MP_CHECK_OK(s->engine->ops->admit(s->engine, &s->item, &error), &error);
}

static void answer_plan(scene *s, uint32_t amount, bool target) {
    mp_wire_begin(&s->out, &s->p.child, MP_FRAME_PLAN);
    mp_put_u32(&s->out, 1);
    mp_put_u32(&s->out, 0);
    mp_put_u32(&s->out, amount);
    mp_put_u32(&s->out, 2);
    mp_put_u64(&s->out, 1000000);
    send_answer(s, target);
    mp_item *items[1] = {&s->item};
    s->engine->ops->plan(s->engine, items, 1, 1000000, &s->plan);
    MP_CHECK(s->plan.count == 1 && s->plan.items[0] == &s->item && s->plan.amount[0] >= 1);
    MP_CHECK(s->plan.lanes >= 1 && s->plan.lanes <= 256);
}

static void put_learnt(scene *s) {
    mp_step_work work = {.passes = 1, .rows = 3, .guessed = 2, .right = 1};
    for (int i = 0; i < 4; i++)
        mp_put_u64(&s->out, 5);
    mp_put(&s->out, &work, sizeof work);
    for (int i = 0; i < MP_MODEL_SPEEDS; i++)
        mp_put_u64(&s->out, 1000);
}

static mp_outcome run_step(scene *s) {
    mp_outcome outcomes[MP_PLAN_MAX];
    send_answer(s, true);
    s->engine->ops->step(s->engine, &s->lease, &s->plan, outcomes);
    return outcomes[0];
}

static void scene_end(scene *s) {
    s->engine->ops->retire(s->engine, &s->item);
    s->engine->ops->destroy(s->engine);
    free(s->p.page);
}

/* A step that gives an answer with an umlaut and an alternative each; ends by a stop string when `over`. */
static void compose_text(scene *s, bool over) {
    static const char text[] = "a\xC3\xA4z";
    mp_wire_begin(&s->out, &s->p.child, MP_FRAME_STEP);
    mp_put_u8(&s->out, over ? MP_OUTCOME_DONE : MP_OUTCOME_MORE);
    mp_put_u32(&s->out, 3); /* cursor */
    mp_put_u32(&s->out, 0); /* cached */
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
    mp_put_u32(&s->out, over ? 4 : 3); /* decided */
    mp_put_u32(&s->out, 4);
    mp_put(&s->out, text, 4);
    put_learnt(s);
}

static mp_text_call *text_call(void) {
    static const int32_t prompt[] = {1, 2};
    static const char *const stop[] = {"!"};
    static const int32_t stop_bytes[] = {1};
    mp_text_args args = {.n_prompt = 2, .prompt = prompt, .n_choices = 1, .n_stop = 1, .stop = stop,
                         .stop_bytes = stop_bytes,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = MOST_TOKENS,
                                      .logprobs = TOPS}};
    mp_text_call *call;
    mp_error error;
    MP_CHECK_OK(mp_text_call_create(&args, &call, &error), &error);
    call->vocab = VOCAB;
    MP_CHECK_OK(mp_text_call_output(call, 4, &error), &error);
    return call;
}

/* What a caller sees is possible. */
static void check_text(const mp_text_call *call) {
    const mp_choice *choice = &call->choices[0];
    uint32_t before = 0;
    MP_CHECK(choice->token_count <= MOST_TOKENS && choice->text_bytes <= choice->text_capacity);
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

/* One mutated answer; returns whether the parent took it. */
static bool try_text(int at, uint8_t by, size_t cut, bool over, size_t *used) {
    static scene s;
    memset(&s, 0, sizeof s);
    mp_text_call *call = text_call();
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
        MP_CHECK_INT(call->choices[0].token_count, 0); /* nothing of it is seen */
        MP_CHECK_INT(call->choices[0].text_bytes, 0);
        MP_CHECK_INT(call->choices[0].finish, MP_FINISH_NONE);
        MP_CHECK_INT(call->prompt_done_ns, 0);
        MP_CHECK_INT(s.item.cursor, 0);
    }
    check_text(call);
    scene_end(&s);
    check_text(call);
    mp_call_destroy(&call->base);
    return taken;
}

MP_TEST_SECONDS(isolation_answers_with_any_byte_changed_are_right_or_refused, 120) {
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
        MP_CHECK(taken > 0 && refused > 500); /* floats, counters and letters may be any */
    }
}

MP_TEST_SECONDS(isolation_plans_with_any_byte_changed_are_right_or_refused, 60) {
    static scene s;
    for (int at = -1; at < 24; at++)
        for (int i = 0; i < CHANGES; i++) {
            memset(&s, 0, sizeof s);
            mp_text_call *call = text_call();
            s.mutate_at = -1;
            scene_admit(&s, &call->base, 7);
            s.mutate_at = at;
            s.mutate_by = changes[i];
            answer_plan(&s, 2, true); /* checks what came out */
            scene_end(&s);
            mp_call_destroy(&call->base);
        }
}

MP_TEST_SECONDS(isolation_vectors_with_any_byte_changed_are_right_or_refused, 60) {
    static scene s;
    static const int32_t ids[] = {1, 2, 3};
    static const int64_t offsets[] = {0, 1, 3};
    enum { WIDTH = 4 };
    size_t used = 1;
    int refused = 0;
    for (int at = -1; at < (int)used; at++)
        for (int i = 0; i < CHANGES; i++) {
            mp_embed_call *call;
            mp_error error;
            MP_CHECK_OK(mp_embed_call_create(2, ids, offsets, NULL, &call, &error), &error);
            MP_CHECK_OK(mp_embed_call_output(call, WIDTH, &error), &error);
            memset(&s, 0, sizeof s);
            s.mutate_at = -1;
            scene_admit(&s, &call->base, 2);
            answer_plan(&s, 2, false);
            s.mutate_at = at;
            s.mutate_by = changes[i];
            mp_wire_begin(&s.out, &s.p.child, MP_FRAME_STEP);
            mp_put_u8(&s.out, MP_OUTCOME_DONE);
            mp_put_u32(&s.out, 2);
            for (int k = 0; k < 2 * WIDTH; k++)
                mp_put_f32(&s.out, (float)k);
            put_learnt(&s);
            used = s.out.used;
            mp_outcome outcome = run_step(&s);
            bool lost = s.engine->lost(s.engine) != NULL;
            refused += lost;
            MP_CHECK(at >= 0 || (!lost && outcome == MP_OUTCOME_DONE && call->vectors[7] == 7));
            MP_CHECK(lost ? outcome == MP_OUTCOME_FAILED && call->done == 0 : call->done <= 2);
            scene_end(&s);
            mp_call_destroy(&call->base);
        }
    MP_CHECK(refused > 100);
}

MP_TEST(isolation_a_child_may_not_speak_out_of_turn) {
    static scene s;
    mp_text_call *call = text_call();
    s.mutate_at = -1;
    scene_admit(&s, &call->base, 7);
    mp_wire_begin(&s.out, &s.p.child, MP_FRAME_STEP); /* asked to plan, it answers a step */
    put_learnt(&s);
    send_answer(&s, false);
    mp_item *items[1] = {&s.item};
    s.engine->ops->plan(s.engine, items, 1, 1000000, &s.plan);
    const mp_error *lost = s.engine->lost(s.engine);
    MP_CHECK(lost && lost->code == MP_RECV);
    MP_CHECK_HAS(lost->message, "another question");
    mp_outcome outcomes[MP_PLAN_MAX];
    s.engine->ops->step(s.engine, &s.lease, &s.plan, outcomes);
    MP_CHECK_INT(outcomes[0], MP_OUTCOME_MORE); /* nobody is the victim of a step that did not begin */
    mp_error error;
    mp_item another = {.call = &call->base, .total = 7};
    MP_CHECK_STATUS(s.engine->ops->admit(s.engine, &another, &error), MP_RECV, &error);
    MP_CHECK_INT(s.engine->ops->trim(s.engine), 0);
    scene_end(&s);
    mp_call_destroy(&call->base);
}

MP_TEST(isolation_capabilities_without_a_wire_are_refused) {
    mp_error error;
    mp_engine *engine;
    static mp_channel_page page;
    for (int c = 0; c < MP_CAPABILITY_COUNT; c++) {
        mp_proxy_args args = {.kind = &no_kind, .capability = (mp_capability)c};
        if (mp_call_wire_of(args.capability))
            continue;
        MP_CHECK_STATUS(mp_proxy_attach(&args, &page, &engine, &error), MP_UNSUPPORTED, &error);
        MP_CHECK_HAS(error.message, mp_capability_get(args.capability)->name);
    }
    MP_CHECK(mp_call_wire_of(MP_TEXT_EMBEDDING) && mp_call_wire_of(MP_TEXT_TO_TEXT));
}

/* ---- specs ------------------------------------------------------------------------------------------------------- */

static void check_same_spec(const mp_spec *a, const mp_spec *b) {
    uint8_t *first, *second;
    size_t first_size, second_size;
    mp_error error;
    MP_CHECK_OK(mp_spec_encode(a, &first, &first_size, &error), &error);
    MP_CHECK_OK(mp_spec_encode(b, &second, &second_size, &error), &error);
    MP_CHECK_INT(first_size, second_size);
    MP_CHECK(memcmp(first, second, first_size) == 0);
    mp_free(first);
    mp_free(second);
}

static mp_spec *full_spec(void) {
    static const mp_dtype types[] = {MP_Q8_0, MP_F32};
    mp_spec *spec = tiny_decoder_spec(types, 2, 5), *copy;
    mp_error error;
    MP_CHECK_OK(mp_spec_copy(spec, &copy, &error), &error);
    mp_spec_unpin(spec);
    static const int64_t integers[] = {-1, 1ll << 60};
    static const double reals[] = {0.5, -1e300};
    static const uint8_t bools[] = {1, 0, 1};
    static const uint64_t offsets[] = {0, 3, 3, 5};
    const struct {
        const char *key;
        mp_value value;
    } values[] = {
        {"x.ints", {.type = MP_VALUE_INTS, .gguf_type = 11, .count = 2, .as.integers = integers}},
        {"x.floats", {.type = MP_VALUE_FLOATS, .gguf_type = 12, .count = 2, .as.reals = reals}},
        {"x.bools", {.type = MP_VALUE_BOOLS, .gguf_type = 7, .count = 3, .as.bools = bools}},
        {"x.text", {.type = MP_VALUE_STRING, .gguf_type = 8, .count = 5, .as.string = "a\0b\xFF!"}},
        {"x.texts", {.type = MP_VALUE_STRINGS, .gguf_type = 8, .count = 3, .as.strings = {"abcde", offsets}}},
        {"x.bool", {.type = MP_VALUE_BOOL, .gguf_type = 7, .count = 1, .as.integer = 1}},
        {"tokenizer.left.out", {.type = MP_VALUE_INT, .gguf_type = 4, .count = 1, .as.integer = 3}},
    };
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        MP_CHECK_OK(mp_spec_set(copy, values[i].key, &values[i].value, &error), &error);
    MP_CHECK_OK(mp_spec_add_file(copy, "/nowhere/second", &error), &error);
    mp_file_id id = {1, 2, 3, 4};
    MP_CHECK(mp_spec_same_file(copy, 1, &id));
    mp_spec_freeze(copy);
    return copy;
}

MP_TEST(isolation_specs_come_out_as_they_went_in) {
    mp_spec *spec = full_spec(), *decoded;
    uint8_t *bytes;
    size_t size;
    mp_error error;
    MP_CHECK_OK(mp_spec_encode(spec, &bytes, &size, &error), &error);
    MP_CHECK_OK(mp_spec_decode(bytes, size, &decoded, &error), &error);
    check_same_spec(spec, decoded);
    MP_CHECK(!mp_spec_find(decoded, "tokenizer.left.out") && mp_spec_find(decoded, "x.texts"));
    MP_CHECK_INT(mp_spec_find(decoded, "x.text")->count, 5);
    mp_file_id id = {1, 2, 3, 4}, other = {1, 2, 3, 5};
    MP_CHECK(mp_spec_same_file(decoded, 1, &id) && !mp_spec_same_file(decoded, 1, &other));
    mp_spec_unpin(decoded);
    mp_spec_unpin(spec);
    mp_free(bytes);
}

MP_TEST_SECONDS(isolation_bytes_that_are_no_spec_are_refused, 60) {
    mp_spec *spec = full_spec(), *decoded;
    uint8_t *bytes;
    size_t size;
    mp_error error;
    int taken = 0, refused = 0;
    MP_CHECK_OK(mp_spec_encode(spec, &bytes, &size, &error), &error);
    uint8_t *exact = malloc(size);
    for (size_t cut = 0; cut < size; cut += cut < 2000 ? 1 : 37) {
        uint8_t *shorter = malloc(cut + 1); /* a reader that goes too far is seen */
        memcpy(shorter, bytes, cut);
        MP_CHECK(mp_spec_decode(shorter, cut, &decoded, &error) != MP_OK && error.message[0]);
        free(shorter);
    }
    mp_test_random random = {3};
    for (size_t at = 0; at < size; at++) {
        memcpy(exact, bytes, size);
        exact[at] ^= (uint8_t)(1 + mp_test_random_u64(&random) % 255);
        if (mp_spec_decode(exact, size, &decoded, &error) == MP_OK) {
            mp_spec_unpin(decoded);
            taken++;
        } else {
            MP_CHECK(error.message[0]);
            refused++;
        }
    }
    MP_CHECK(taken > 0 && refused > 0);
    free(exact);
    mp_free(bytes);
    mp_spec_unpin(spec);
}
