/* Grammar masks and capture records with worker processes: the messages that the parent sends, and false results that
 * it refuses. */
#include "isolation_scene.h"
#include "test_isolation.h"

enum { WORDS = (VOCAB + 31) / 32, END = 7, ALLOWED = 10, STOP_ID = 12, HIDDEN = 5, LAYERS = 2, VALUES = 3 };

typedef struct masked_scene {
    scene s;
    mp_text_request *call;
    mp_plan plan;
} masked_scene;

/* Make a mask that allows these ids. */
static const uint32_t *mask_of(const int32_t *ids, int n) {
    static uint32_t bits[WORDS];
    memset(bits, 0, sizeof bits);
    for (int i = 0; i < n; i++)
        bits[ids[i] / 32] |= 1u << (ids[i] % 32);
    return bits;
}

static mp_text_request *make_call(int choices, bool masked, bool captured) {
    static const int32_t prompt[] = {1, 2}, stop_ids[] = {STOP_ID}, ends[] = {END, END + 1}, first[] = {ALLOWED};
    mp_text_args args = {.n_prompt = 2, .prompt = prompt, .n_choices = choices, .n_stop_ids = 1, .stop_ids = stop_ids,
                         .capture_values = captured ? VALUES : 0, .capture_records = captured ? 1000 : 0,
                         .mask = masked ? mask_of(first, 1) : NULL, .mask_bytes = masked ? WORDS * 4 : 0,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = MAX_TOKENS, .logprobs = -1}};
    mp_text_request *call;
    mp_error error;
    MP_CHECK_OK(mp_text_request_create(&args, &call, &error), &error);
    call->vocab = VOCAB + SPARE;
    call->sampled_vocab = VOCAB;
    call->context = 64;
    call->ends = ends;
    call->n_ends = 2;
    call->capture.layers = LAYERS;
    call->capture.hidden = HIDDEN;
    call->capture.vocab = VOCAB;
    MP_CHECK_OK(mp_text_request_output(call, 4, &error), &error);
    return call;
}

static void begin(masked_scene *m, int choices, bool masked, bool captured) {
    memset(m, 0, sizeof *m);
    m->s.mutate_at = -1;
    m->call = make_call(choices, masked, captured);
    scene_admit(&m->s, &m->call->base, 7);
}

static void end(masked_scene *m) {
    scene_end(&m->s);
    mp_request_destroy(&m->call->base);
}

/* Request a plan, to which the child replies with `count` items; return the count of the resulting plan. */
static int plan(masked_scene *m, uint32_t count) {
    mp_wire_begin(&m->s.out, &m->s.p.child, MP_FRAME_PLAN);
    mp_put_u32(&m->s.out, count);
    if (count) {
        mp_put_u32(&m->s.out, 0);
        mp_put_u32(&m->s.out, 1);
    }
    mp_put_u32(&m->s.out, 1);
    mp_put_u64(&m->s.out, 1000);
    mp_put_u8(&m->s.out, 0);
    send_answer(&m->s, false);
    mp_item *items[1] = {&m->s.item};
    m->s.plan.masks = false;
    m->s.engine->ops->plan(m->s.engine, items, 1, 1000000, &m->s.plan);
    return m->s.plan.count;
}

typedef struct sampled_run { /* tokens of one choice in a step: `count` times the same id, with a letter as text */
    int count;
    int32_t id;
    int finish, stop_index;
} sampled_run;

/* Run a step in which the choices sample these tokens. recorded: number of tokens with capture records; -1 = a request
 * without capture. */
static mp_outcome step(masked_scene *m, mp_outcome outcome, const sampled_run *sampled_runs, int recorded) {
    static uint32_t letters;
    mp_wire_out *out = &m->s.out;
    const mp_text_request *call = m->call;
    mp_wire_begin(out, &m->s.p.child, MP_FRAME_STEP);
    mp_put_u8(out, (uint8_t)outcome);
    mp_put_u32(out, 3);
    mp_put_u32(out, 0);
    mp_put_u8(out, 1);
    for (int c = 0; c < call->n_choices; c++) {
        uint32_t before = call->choices[c].token_count;
        if (call->choices[c].finish != MP_FINISH_NONE)
            continue;
        mp_put_u8(out, (uint8_t)sampled_runs[c].finish);
        mp_put_i32(out, sampled_runs[c].stop_index);
        mp_put_u32(out, (uint32_t)sampled_runs[c].count);
        letters = before + (uint32_t)sampled_runs[c].count;
        for (uint32_t t = before; t < letters; t++) {
            mp_put_i32(out, sampled_runs[c].id);
            mp_put_f32(out, NAN);
            mp_put_u32(out, t + 1);
        }
        mp_put_u32(out, letters);
        mp_put_u32(out, letters);
        mp_put(out, "abcd", (size_t)sampled_runs[c].count);
    }
    if (recorded >= 0) {
        const size_t floats = mp_capture_floats(&call->capture);
        mp_put_u32(out, (uint32_t)recorded);
        for (uint32_t i = call->capture.sampled; (int)i < recorded; i++)
            for (size_t f = 0; f < floats; f++)
                mp_put_f32(out, (float)(i * floats + f));
    }
    put_learnt(&m->s);
    return run_step(&m->s);
}

static void add_mask(masked_scene *m, int choice, uint32_t index, int32_t id) {
    mp_error error;
    MP_CHECK_OK(mp_text_request_mask(m->call, choice, index, mask_of(&id, 1), WORDS * 4, &error), &error);
}

static const char *why_lost(masked_scene *m) {
    const mp_error *lost = m->s.engine->lost(m->s.engine);
    return lost ? lost->message : "";
}

static const sampled_run nothing = {0, 0, MP_FINISH_NONE, -1}, allowed = {1, ALLOWED, MP_FINISH_NONE, -1};

/* Run one step with the first mask, and check the reason why the parent refuses it; "" = the parent accepts it. */
static void check_first(mp_outcome outcome, sampled_run it, const char *why) {
    static masked_scene m;
    begin(&m, 1, true, false);
    MP_CHECK_INT(plan(&m, 1), 1);
    mp_outcome found = step(&m, outcome, &it, -1);
    if (*why) {
        MP_CHECK_INT(found, MP_OUTCOME_FAILED);
        MP_CHECK_HAS(why_lost(&m), why);
        MP_CHECK_INT(m.call->choices[0].token_count, 0); /* nothing is published */
        MP_CHECK_INT(m.call->choices[0].finish, MP_FINISH_NONE);
    } else {
        MP_CHECK(!m.s.engine->lost(m.s.engine) && found == outcome);
        MP_CHECK_INT(m.call->choices[0].token_count, (uint32_t)it.count);
    }
    end(&m);
}

MP_TEST(isolation_sampled_tokens_obey_their_mask) {
    const char *const against = "its mask does not allow", *const early = "before its mask came";
    check_first(MP_OUTCOME_WAIT_MASK, allowed, "");
    check_first(MP_OUTCOME_WAIT_MASK, nothing, "");
    check_first(MP_OUTCOME_MORE, (sampled_run){1, ALLOWED + 1, MP_FINISH_NONE, -1}, against);
    check_first(MP_OUTCOME_MORE, (sampled_run){1, VOCAB - 1, MP_FINISH_NONE, -1}, against);
    check_first(MP_OUTCOME_MORE, (sampled_run){2, ALLOWED, MP_FINISH_NONE, -1}, early);
    check_first(MP_OUTCOME_DONE, (sampled_run){0, 0, MP_FINISH_EOS, -1}, against);
    check_first(MP_OUTCOME_DONE, (sampled_run){0, 0, MP_FINISH_STOP, 0}, against);
    check_first(MP_OUTCOME_DONE, (sampled_run){1, ALLOWED, MP_FINISH_EOS, -1}, early);
    check_first(MP_OUTCOME_DONE, (sampled_run){1, ALLOWED, MP_FINISH_LENGTH, -1}, "before its maximum length");
}

MP_TEST(isolation_completions_end_where_their_masks_allow) {
    static const struct {
        int32_t allows;
        sampled_run it;
        const char *why;
    } rows[] = {{END + 1, {0, 0, MP_FINISH_EOS, -1}, ""},      {STOP_ID, {0, 0, MP_FINISH_STOP, 0}, ""},
                {STOP_ID, {0, 0, MP_FINISH_EOS, -1}, "allow"}, {END, {0, 0, MP_FINISH_STOP, 0}, "allow"},
                {END, {1, END, MP_FINISH_NONE, -1}, "after an"}, {-1, {0, 0, MP_FINISH_EOS, -1}, "before its mask"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        static masked_scene m;
        begin(&m, 1, true, false);
        MP_CHECK_INT(plan(&m, 1), 1);
        step(&m, MP_OUTCOME_WAIT_MASK, &allowed, -1);
        if (rows[i].allows >= 0)
            add_mask(&m, 0, 1, rows[i].allows);
        MP_CHECK_INT(plan(&m, 1), 1);
        step(&m, rows[i].it.finish ? MP_OUTCOME_DONE : MP_OUTCOME_MORE, &rows[i].it, -1);
        MP_CHECK_HAS(why_lost(&m), rows[i].why);
        MP_CHECK_INT(m.s.engine->lost(m.s.engine) != NULL, rows[i].why[0] != 0);
        end(&m);
    }
}

/* A process may report that it waits for a mask only if the parent has not sent the mask that the process needs. */
MP_TEST(isolation_mask_waits_without_reason_are_refused) {
    static masked_scene m;
    for (int way = 0; way < 4; way++) {
        const sampled_run both[] = {allowed, allowed}, second[] = {nothing, allowed};
        begin(&m, 2, way != 3, false);
        if (way == 0 || way == 3) { /* the first mask was sent, or the request has no masks */
            plan(&m, 0);
            MP_CHECK_HAS(why_lost(&m), "a plan is empty");
            end(&m);
            continue;
        }
        MP_CHECK_INT(plan(&m, 1), 1);
        MP_CHECK_INT(step(&m, MP_OUTCOME_WAIT_MASK, both, -1), MP_OUTCOME_WAIT_MASK);
        MP_CHECK_INT(plan(&m, 0), 0);
        MP_CHECK(m.s.plan.masks && !*why_lost(&m));
        add_mask(&m, 1, 1, ALLOWED);
        if (way == 1) {
            plan(&m, 0);
            MP_CHECK_HAS(why_lost(&m), "a plan is empty");
        } else {
            MP_CHECK_INT(plan(&m, 1), 1);
            MP_CHECK_INT(step(&m, MP_OUTCOME_WAIT_MASK, second, -1), MP_OUTCOME_WAIT_MASK);
            MP_CHECK_INT(plan(&m, 0), 0);
            MP_CHECK_INT(m.call->choices[1].token_count, 2);
        }
        end(&m);
    }
    begin(&m, 1, false, false); /* only a request with masks may wait for a mask */
    MP_CHECK_INT(plan(&m, 1), 1);
    MP_CHECK_INT(step(&m, MP_OUTCOME_WAIT_MASK, &allowed, -1), MP_OUTCOME_FAILED);
    MP_CHECK_HAS(why_lost(&m), "without masks waits for a mask");
    end(&m);
    begin(&m, 1, true, false); /* steps make no progress although the mask was sent */
    int steps = 0;
    for (; !*why_lost(&m) && steps < 1000; steps++) {
        plan(&m, 1);
        step(&m, MP_OUTCOME_WAIT_MASK, &nothing, -1);
    }
    MP_CHECK(steps > 4 && steps < 100);
    MP_CHECK_HAS(why_lost(&m), "made no progress");
    end(&m);
}

MP_TEST(isolation_capture_records_match_the_sampled_tokens) {
    static const struct {
        int count, recorded; /* in the first step: tokens, and tokens with records */
        bool fine;
    } rows[] = {{1, 1, true}, {1, 2, true}, {0, 1, true}, {0, 0, true}, {2, 1, false}, {1, 3, false}, {0, 2, false}};
    static masked_scene m;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const sampled_run it = {rows[i].count, ALLOWED, MP_FINISH_NONE, -1};
        begin(&m, 1, false, true);
        MP_CHECK_INT(plan(&m, 1), 1);
        step(&m, MP_OUTCOME_MORE, &it, rows[i].recorded);
        MP_CHECK_INT(!m.s.engine->lost(m.s.engine), rows[i].fine);
        MP_CHECK_INT(m.call->capture.sampled, rows[i].fine ? (uint32_t)rows[i].recorded : 0);
        if (!rows[i].fine)
            MP_CHECK_HAS(why_lost(&m), "captured records do not match the sampled tokens");
        for (uint32_t f = 0; f < m.call->capture.sampled * mp_capture_floats(&m.call->capture); f++)
            MP_CHECK(m.call->capture.data[f] == (float)f);
        if (rows[i].fine && rows[i].recorded) { /* published records stay */
            MP_CHECK_INT(plan(&m, 1), 1);
            step(&m, MP_OUTCOME_MORE, &nothing, rows[i].recorded - 1);
            MP_CHECK_HAS(why_lost(&m), "captured records do not match the sampled tokens");
        }
        end(&m);
    }
}

/* Change each byte of a step with a mask, and each byte of a step with records: the parent either accepts a correct
 * result or publishes nothing of it. */
MP_TEST_SECONDS(isolation_masked_completions_with_a_changed_byte_are_correct_or_refused, 60) {
    static const uint8_t changes[] = {1, 2, 8, 128, 255};
    static masked_scene m;
    for (int captured = 0; captured < 2; captured++) {
        int refused = 0;
        size_t used = 1;
        for (int at = -1; at < (int)used; at++)
            for (size_t i = 0; i < sizeof changes; i++) {
                begin(&m, 1, true, captured);
                MP_CHECK_INT(plan(&m, 1), 1);
                m.s.mutate_at = at;
                m.s.mutate_by = changes[i];
                step(&m, MP_OUTCOME_WAIT_MASK, &allowed, captured ? 1 : -1);
                used = m.s.out.used;
                const mp_choice *choice = &m.call->choices[0];
                bool lost = m.s.engine->lost(m.s.engine) != NULL;
                MP_CHECK(at >= 0 || !lost);
                MP_CHECK(choice->token_count <= 1 && (!choice->token_count || choice->tokens[0].id == ALLOWED));
                MP_CHECK(m.call->capture.sampled <= choice->token_count + 1);
                MP_CHECK(!lost || (!choice->token_count && !m.call->capture.sampled));
                refused += lost;
                end(&m);
            }
        MP_CHECK(refused > 50);
    }
}
