/* Each value that the parent refuses, with the reason, and the nearest value that it accepts. The tests are the child:
 * they write frames, messages and replies with right checksums that no correct process sends. */
#include "isolation_scene.h"
#include "request_fixture.h"

static const uint64_t HOUR_NS = 3600ull * 1000 * 1000 * 1000;
enum { TEXTS = 3, BUDGET = 1 << 20 /* memory_bytes of scene_admit */ };

/* ---- frames ------------------------------------------------------------------------------------------------------ */

static void write_frame(mp_ring *ring, uint64_t at, mp_frame frame) {
    static const uint8_t none[1];
    frame.checksum = mp_frame_checksum(&frame, none);
    memcpy(ring->data + at, &frame, sizeof frame);
}

MP_TEST(isolation_frames_are_refused_for_the_right_reason) {
    enum { HEAD = sizeof(mp_frame) };
    static const struct {
        mp_frame frame;
        uint64_t head;
        const char *why;
    } cases[] = {
        {{0, MP_FRAME_ADMIT, 0, 1, 0}, HEAD, ""},
        {{0, MP_FRAME_READY, 1, 1, 0}, HEAD, ""},
        {{0, MP_FRAME_NONE, 1, 1, 0}, HEAD, "its kind is unknown"},
        {{0, MP_FRAME_KIND_COUNT, 1, 1, 0}, HEAD, "its kind is unknown"},
        {{0, MP_FRAME_STEP, 2, 1, 0}, HEAD, "its kind is unknown"},
        {{0, MP_FRAME_STEP, 1, 0, 0}, HEAD, "its number is not the next one"},
        {{0, MP_FRAME_STEP, 1, 2, 0}, HEAD, "its number is not the next one"},
        {{0, MP_FRAME_STEP, 1, 1, 0}, HEAD - 8, "its position is impossible"},
        {{0, MP_FRAME_STEP, 1, 1, 0}, HEAD + 1, "its position is impossible"},
        {{0, MP_FRAME_STEP, 1, 1, 0}, MP_RING_BYTES, ""},
        {{0, MP_FRAME_STEP, 1, 1, 0}, MP_RING_BYTES + 8, "its position is impossible"},
        {{1, MP_FRAME_STEP, 1, 1, 0}, HEAD, "its length is impossible"},
        {{1, MP_FRAME_STEP, 1, 1, 0}, HEAD + 8, ""},
        {{MP_FRAME_MAX + 1, MP_FRAME_STEP, 1, 1, 0}, MP_RING_BYTES, "its length is impossible"},
    };
    static uint8_t got[MP_FRAME_MAX];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pair p;
        mp_frame frame = cases[i].frame;
        pair_init(&p);
        if (frame.bytes <= 1)
            write_frame(&p.page->replies, 0, frame);
        else
            memcpy(p.page->replies.data, &frame, sizeof frame);
        atomic_store(&p.page->replies.head, cases[i].head);
        MP_CHECK(mp_channel_receive(&p.parent, false, &frame, got) == !*cases[i].why);
        if (*cases[i].why)
            MP_CHECK_HAS(p.parent_error.message, cases[i].why);
        free(p.page);
    }
}

/* Frames may fill the ring completely. The writer waits for the reader only if the next frame does not fit. */
MP_TEST(isolation_a_ring_can_be_full) {
    enum { COST = MP_FRAME_MAX, COUNT = MP_RING_BYTES / COST };
    static uint8_t data[COST - sizeof(mp_frame)], got[MP_FRAME_MAX];
    mp_frame frame;
    pair p;
    pair_init(&p);
    for (int i = 0; i < COUNT; i++)
        MP_CHECK(mp_channel_send(&p.parent, MP_FRAME_PLAN, true, data, sizeof data));
    MP_CHECK(mp_channel_receive(&p.child, false, &frame, got));
    MP_CHECK_INT(frame.bytes, sizeof data);
    MP_CHECK(mp_channel_send(&p.parent, MP_FRAME_PLAN, true, data, sizeof data)); /* exactly the space that is free */
    MP_CHECK(!mp_channel_send(&p.parent, MP_FRAME_PLAN, true, data, 0)); /* `never` ends the wait */
    MP_CHECK(p.parent.broken && p.parent_error.code == MP_OK);
    MP_CHECK(mp_channel_receive(&p.child, false, &frame, got));
    MP_CHECK(!mp_channel_send(&p.parent, MP_FRAME_PLAN, true, data, 0)); /* a broken channel sends nothing */
    MP_CHECK_INT(atomic_load(&p.page->requests.head), (COUNT + 1) * COST);
    free(p.page);
}

/* The parent refuses positions of the reader that no frame ends at, in a ring that has room. */
MP_TEST(isolation_bytes_are_acknowledged_as_they_were_written) {
    static const uint8_t data[8];
    static const uint64_t tails[] = {0, 32, 4, 31, 33, 40};
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++) {
        pair p;
        pair_init(&p);
        MP_CHECK(mp_channel_send(&p.parent, MP_FRAME_PLAN, true, data, sizeof data));
        atomic_store(&p.page->requests.tail, tails[i]);
        MP_CHECK(mp_channel_send(&p.parent, MP_FRAME_PLAN, true, data, sizeof data) == (i < 2));
        if (i >= 2)
            MP_CHECK_HAS(p.parent_error.message, "it acknowledged bytes that were never written");
        free(p.page);
    }
}

/* ---- messages ---------------------------------------------------------------------------------------------------- */

static mp_wire_out out;
static mp_wire_in in;

/* A message has no frame more than its bytes need, and is read to its end and no further. */
MP_TEST(isolation_messages_span_frames) {
    static uint8_t sent[3 * MP_FRAME_MAX], got[sizeof sent + 1];
    static const size_t sizes[] = {0, 1, MP_FRAME_MAX, MP_FRAME_MAX + 1, 2 * MP_FRAME_MAX, 3 * MP_FRAME_MAX};
    static const uint64_t frames[] = {1, 1, 1, 2, 2, 3};
    for (size_t k = 0; k < sizeof sent; k++)
        sent[k] = (uint8_t)(k * 31 + k / 256);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int more = -1; more <= 1; more++) {
            pair p;
            pair_init(&p);
            mp_wire_begin(&out, &p.child, MP_FRAME_STEP);
            const size_t most = sizes[i] ? sizes[i] - 1 : 0; /* the last byte apart */
            mp_put(&out, sent, most);
            mp_put(&out, sent + most, sizes[i] - most);
            MP_CHECK(mp_wire_end(&out));
            MP_CHECK_INT(p.child.out_number, frames[i]);
            if (sizes[i] == 0 && more < 0)
                more++;
            const size_t read = sizes[i] + (size_t)more;
            memset(got, 7, sizeof got);
            MP_CHECK(mp_wire_receive(&in, &p.parent, false));
            MP_CHECK(mp_get(&in, got, read) == (more <= 0));
            MP_CHECK(mp_wire_done(&in) == (more == 0));
            MP_CHECK(memcmp(sent, got, more < 0 ? read : sizes[i]) == 0);
            if (more)
                MP_CHECK_HAS(p.parent_error.message, more < 0 ? "a message is too long" : "a message is too short");
            if (more > 0)
                MP_CHECK_INT(got[sizes[i]], 0); /* missing bytes are 0 */
            free(p.page);
        }
}

/* A reader that skips the rest of a message reads the next one, if the frames of the first one are of one kind. */
MP_TEST(isolation_messages_are_skipped_to_their_end) {
    static const uint8_t part[100];
    for (int mixed = 0; mixed < 2; mixed++) {
        pair p;
        pair_init(&p);
        MP_CHECK(mp_channel_send(&p.child, MP_FRAME_STEP, false, part, sizeof part));
        MP_CHECK(mp_channel_send(&p.child, MP_FRAME_STEP, false, part, sizeof part));
        MP_CHECK(mp_channel_send(&p.child, mixed ? MP_FRAME_PLAN : MP_FRAME_STEP, true, part, sizeof part));
        MP_CHECK(mp_channel_send(&p.child, MP_FRAME_TRIM, true, part, 1));
        MP_CHECK(mp_wire_receive(&in, &p.parent, false));
        mp_get_u8(&in);
        MP_CHECK(mp_wire_skip(&in) == !mixed);
        MP_CHECK(mp_wire_done(&in) == !mixed);
        if (mixed)
            MP_CHECK_HAS(p.parent_error.message, "a message was not finished");
        else
            MP_CHECK(mp_wire_receive(&in, &p.parent, false) && in.kind == MP_FRAME_TRIM);
        free(p.page);
    }
}

/* The lengths of strings are 1 to `most`. A wrong length is refused before memory of its size is reserved. */
MP_TEST(isolation_lengths_of_strings_are_bounded) {
    static const int32_t lengths[][2] = {{1, 5}, {5, 1}, {0, 5}, {5, 6}, {-1, 5}, {1, INT32_MAX}};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        pair p;
        bool ok = true;
        pair_init(&p);
        mp_wire_begin(&out, &p.child, MP_FRAME_STEP);
        mp_put(&out, "abcdef", 6);
        MP_CHECK(mp_wire_end(&out) && mp_wire_receive(&in, &p.parent, false));
        const char *const *strings = mp_get_strings(&in, lengths[i], 2, 5, "a text is out of bounds", &ok);
        MP_CHECK(ok == (i < 2) && (strings != NULL) == ok);
        if (ok)
            MP_CHECK(memcmp(strings[0], "abcdef", 6) == 0 && strings[1] == strings[0] + lengths[i][0]);
        else
            MP_CHECK_HAS(p.parent_error.message, "a text is out of bounds");
        mp_free((void *)strings);
        free(p.page);
    }
}

/* Each text of an error fits its field, and each text that is longer is refused. */
MP_TEST(isolation_texts_of_errors_fit_their_fields) {
    static const size_t room[] = {sizeof((mp_error *)0)->message, sizeof((mp_error *)0)->file,
                                  sizeof((mp_error *)0)->field,   sizeof((mp_error *)0)->got,
                                  sizeof((mp_error *)0)->allowed, sizeof((mp_error *)0)->hint};
    static const mp_status allowed[] = {MP_NUMERIC, MP_OK};
    static char text[1024];
    enum { FIELDS = sizeof room / sizeof *room };
    memset(text, 'a', sizeof text);
    for (int longer = -1; longer < FIELDS; longer++) {
        const int64_t offset = 77;
        mp_error got;
        pair p;
        pair_init(&p);
        mp_wire_begin(&out, &p.child, MP_FRAME_STEP);
        mp_put_u32(&out, MP_NUMERIC);
        mp_put(&out, &offset, sizeof offset);
        for (int i = 0; i < FIELDS; i++) {
            const size_t bytes = room[i] - (i == longer ? 0 : 1);
            mp_put_u32(&out, (uint32_t)bytes);
            mp_put(&out, text, bytes);
        }
        MP_CHECK(mp_wire_end(&out) && mp_wire_receive(&in, &p.parent, false));
        MP_CHECK_INT(mp_get_error(&in, allowed, &got), longer < 0 ? MP_NUMERIC : MP_RECV);
        MP_CHECK(mp_wire_done(&in) == (longer < 0));
        MP_CHECK_INT(got.offset, offset);
        if (longer >= 0)
            MP_CHECK_HAS(p.parent_error.message, "a text is too long");
        const char *const texts[] = {got.message, got.file, got.field, got.got, got.allowed, got.hint};
        for (int i = 0; i < FIELDS && longer < 0; i++)
            MP_CHECK_INT(strlen(texts[i]), room[i] - 1);
        free(p.page);
    }
}

/* ---- replies ----------------------------------------------------------------------------------------------------- */

/* A proxy with two requests. Neither makes progress, because the test that is its child computes nothing. */
typedef struct duo {
    scene s;
    mp_item second;
    mp_item *items[2];
    uint64_t watched_ns, lost_ns; /* times of the next step: see mp_lease */
} duo;

static mp_embedding_request *texts_of(void) {
    static const int32_t ids[] = {1, 2, 3};
    static const int64_t offsets[] = {0, 1, 2, 3};
    mp_embedding_request *call;
    mp_error error;
    MP_CHECK_OK(make_embedding_request(TEXTS, ids, offsets, NULL, &call, &error), &error);
    MP_CHECK_OK(mp_embedding_request_output(call, (mp_embedding_sizes){.width = 4}, &error), &error);
    return call;
}

static void reply_to_admission(duo *d, uint32_t id) {
    mp_wire_begin(&d->s.out, &d->s.p.child, MP_FRAME_ADMIT);
    mp_put_u32(&d->s.out, id);
    mp_put_error(&d->s.out, MP_OK, NULL);
    send_answer(&d->s, false);
}

static mp_status admit_second(duo *d, uint32_t id) {
    mp_error error;
    reply_to_admission(d, id);
    return d->s.engine->ops->admit(d->s.engine, &d->second, &error);
}

static void begin_duo(duo *d) {
    memset(d, 0, sizeof *d);
    d->s.mutate_at = -1;
    scene_admit(&d->s, &texts_of()->base, TEXTS);
    d->second = (mp_item){.request = &texts_of()->base, .total = TEXTS};
    d->items[0] = &d->s.item;
    d->items[1] = &d->second;
    d->s.item.cancelled = d->second.cancelled = 1; /* cancelled items need no progress */
}

/* Checks why the child was lost; "" = it was not. */
static void end_duo(duo *d, const char *why) {
    const mp_error *lost = d->s.engine->lost(d->s.engine);
    MP_CHECK_STR(lost ? "lost" : "", *why ? "lost" : "");
    if (lost) {
        MP_CHECK_INT(lost->code, MP_RECV);
        MP_CHECK_HAS(lost->message, why);
    }
    mp_request *first = d->s.item.request;
    d->s.engine->ops->retire(d->s.engine, &d->second);
    scene_end(&d->s);
    mp_request_destroy(first);
    mp_request_destroy(d->second.request);
}

MP_TEST(isolation_admissions_name_their_request) {
    static duo d;
    for (uint32_t id = 1; id <= 3; id++) {
        begin_duo(&d);
        MP_CHECK_INT(admit_second(&d, id), id == 2 ? MP_OK : MP_RECV);
        end_duo(&d, id == 2 ? "" : "it names another request");
    }
}

MP_TEST(isolation_plans_are_refused_for_the_right_reason) {
    static const struct {
        uint32_t count, index[3], amount[3], threads;
        uint64_t cost_ns;
        const char *why;
    } cases[] = {
        {2, {1, 0}, {1, 2}, 1, 0, ""},
        {1, {1}, {UINT32_MAX}, 256, HOUR_NS, ""},
        {0, {0}, {0}, 1, 0, "a plan is empty"},
        {3, {0, 1, 0}, {1, 1, 1}, 1, 0, "a plan is too long"},
        {1, {2}, {1}, 1, 0, "a plan has a request that was not offered"},
        {2, {1, 1}, {1, 1}, 1, 0, "a plan has a request twice, or an amount of 0"},
        {2, {0, 1}, {1, 0}, 1, 0, "a plan has a request twice, or an amount of 0"},
        {1, {0}, {1}, 0, 0, "a plan has an impossible cost"},
        {1, {0}, {1}, 257, 0, "a plan has too many threads"},
        {1, {0}, {1}, 1, HOUR_NS + 1, "a plan has an impossible cost"},
    };
    static duo d;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin_duo(&d);
        MP_CHECK_INT(admit_second(&d, 2), MP_OK);
        mp_wire_begin(&d.s.out, &d.s.p.child, MP_FRAME_PLAN);
        mp_put_u32(&d.s.out, cases[i].count);
        for (uint32_t k = 0; k < cases[i].count; k++) {
            mp_put_u32(&d.s.out, cases[i].index[k]);
            mp_put_u32(&d.s.out, cases[i].amount[k]);
        }
        mp_put_u32(&d.s.out, cases[i].threads);
        mp_put_u64(&d.s.out, cases[i].cost_ns);
    mp_put_u8(&d.s.out, 0);
        send_answer(&d.s, false);
        mp_plan plan = {0};
        d.s.engine->ops->plan(d.s.engine, d.items, 2, 1000, &plan);
        const bool valid = !*cases[i].why;
        MP_CHECK_INT(plan.count, valid ? (int)cases[i].count : 1); /* a placeholder for the worker, which ends */
        MP_CHECK_INT(plan.threads, valid ? (int)cases[i].threads : 1);
        MP_CHECK_INT(plan.cost_ns, valid ? cases[i].cost_ns : 0);
        for (int k = 0; k < plan.count; k++) {
            MP_CHECK(plan.items[k] == d.items[valid ? cases[i].index[k] : 0]);
            MP_CHECK_INT(plan.amount[k], valid ? cases[i].amount[k] : 1);
        }
        end_duo(&d, cases[i].why);
    }
}

/* Plans the first request and runs a step. The child reports `outcome` and no finished text. */
static mp_outcome step_with(duo *d, uint8_t outcome, const mp_step_work *work, const uint64_t *speed) {
    static const uint64_t prefix[] = {11, 12, 13, 14};
    mp_outcome outcomes[MP_PLAN_MAX];
    answer_plan(&d->s, 1, false);
    mp_wire_begin(&d->s.out, &d->s.p.child, MP_FRAME_STEP);
    mp_put_u8(&d->s.out, outcome);
    if (outcome == MP_OUTCOME_FAILED)
        mp_put_error(&d->s.out, MP_OK, NULL);
    mp_put_u32(&d->s.out, 0);
    mp_put_u64(&d->s.out, 0); /* bytes that the engine needs */
    mp_put(&d->s.out, prefix, sizeof prefix);
    mp_put(&d->s.out, work, sizeof *work);
    mp_put(&d->s.out, speed, MP_MODEL_SPEEDS * sizeof *speed);
    mp_put_u64(&d->s.out, d->watched_ns);
    mp_put_u64(&d->s.out, d->lost_ns);
    send_answer(&d->s, false);
    d->s.engine->ops->step(d->s.engine, &d->s.lease, &d->s.plan, outcomes);
    return outcomes[0];
}

MP_TEST(isolation_outcomes_are_refused_for_the_right_reason) {
    static const uint64_t speed[MP_MODEL_SPEEDS];
    static const mp_step_work work;
    static const struct {
        uint8_t outcome;
        const char *why;
    } cases[] = {{MP_OUTCOME_MORE, ""},
                 {MP_OUTCOME_WAIT_MEMORY, ""},
                 {MP_OUTCOME_WAIT_MASK, "an outcome is unknown"}, /* only texts wait for masks */
                 {MP_OUTCOME_DONE, "the outcome of a request does not match its number of finished inputs"},
                 {MP_OUTCOME_FAILED, "a request fails without a reason"},
                 {MP_OUTCOME_FAILED + 1, "an outcome is unknown"}};
    static duo d;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin_duo(&d);
        MP_CHECK_INT(step_with(&d, cases[i].outcome, &work, speed),
                     *cases[i].why ? MP_OUTCOME_FAILED : cases[i].outcome);
        end_duo(&d, cases[i].why);
    }
}

/* Counters of work never decrease, and at most the draft tokens that were computed are accepted. */
MP_TEST(isolation_counters_of_work_never_decrease) {
    enum { COUNTERS = sizeof(mp_step_work) / sizeof(uint64_t) };
    static const uint64_t speed[MP_MODEL_SPEEDS];
    static duo d;
    for (int i = -1; i <= COUNTERS; i++) {
        mp_step_work work = {5, 5, 5, 5, 5, 5};
        begin_duo(&d);
        MP_CHECK_INT(step_with(&d, MP_OUTCOME_MORE, &work, speed), MP_OUTCOME_MORE);
        MP_CHECK(memcmp(&d.s.engine->work, &work, sizeof work) == 0);
        const mp_prefix_counters *prefix = d.s.engine->prefix;
        MP_CHECK(prefix->hits == 11 && prefix->tokens == 12 && prefix->blocks == 13 && prefix->evicted == 14);
        if (i == COUNTERS)
            work.accepted_draft_tokens++;
        else if (i >= 0)
            ((uint64_t *)(void *)&work)[i]--;
        MP_CHECK_INT(step_with(&d, MP_OUTCOME_MORE, &work, speed), i < 0 ? MP_OUTCOME_MORE : MP_OUTCOME_FAILED);
        end_duo(&d, i < 0 ? "" : "a counter of work decreased");
    }
}

/* The worker learns whether a plan meets at barriers, and what the child measured there: at most the time of the step.
 */
MP_TEST(isolation_plans_and_steps_tell_of_barriers) {
    static const mp_step_work work;
    static const uint64_t speed[MP_MODEL_SPEEDS];
    static duo d;
    for (int bound = 0; bound < 2; bound++) {
        begin_duo(&d);
        mp_wire_begin(&d.s.out, &d.s.p.child, MP_FRAME_PLAN);
        mp_put_u32(&d.s.out, 1);
        mp_put_u32(&d.s.out, 0);
        mp_put_u32(&d.s.out, 1);
        mp_put_u32(&d.s.out, 2);
        mp_put_u64(&d.s.out, 1000);
        mp_put_u8(&d.s.out, (uint8_t)bound);
        send_answer(&d.s, false);
        mp_plan plan = {.barrier_bound = !bound};
        d.s.engine->ops->plan(d.s.engine, d.items, 1, 1000, &plan);
        MP_CHECK_INT(plan.barrier_bound, bound);
        end_duo(&d, "");
    }
    static const uint64_t times[][4] = {/* measured, lost; of these the worker takes */
                                        {0, 0, 0, 0}, {5, 2, 5, 2}, {5, 9, 5, 5}, {UINT64_MAX, 3, UINT64_MAX, 3}};
    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
        begin_duo(&d);
        d.watched_ns = times[i][0];
        d.lost_ns = times[i][1];
        const uint64_t began_ns = mp_sys_now_ns();
        MP_CHECK_INT(step_with(&d, MP_OUTCOME_MORE, &work, speed), MP_OUTCOME_MORE);
        const uint64_t took_ns = mp_sys_now_ns() - began_ns;
        MP_CHECK_INT(d.s.lease.lost_ns, times[i][3]);
        if (times[i][2] == UINT64_MAX)
            MP_CHECK(d.s.lease.watched_ns >= 3 && d.s.lease.watched_ns <= took_ns);
        else
            MP_CHECK_INT(d.s.lease.watched_ns, times[i][2]);
        end_duo(&d, "");
    }
}

MP_TEST(isolation_speeds_are_at_most_an_hour) {
    static const mp_step_work work;
    static duo d;
    for (int i = -1; i < MP_MODEL_SPEEDS; i++) {
        uint64_t speed[MP_MODEL_SPEEDS];
        for (int k = 0; k < MP_MODEL_SPEEDS; k++)
            speed[k] = HOUR_NS + (k == i);
        begin_duo(&d);
        MP_CHECK_INT(step_with(&d, MP_OUTCOME_MORE, &work, speed), i < 0 ? MP_OUTCOME_MORE : MP_OUTCOME_FAILED);
        end_duo(&d, i < 0 ? "" : "a speed is out of range");
    }
}

MP_TEST(isolation_a_trim_releases_at_most_the_budget) {
    static duo d;
    for (int more = 0; more < 2; more++) {
        begin_duo(&d);
        mp_wire_begin(&d.s.out, &d.s.p.child, MP_FRAME_TRIM);
        mp_put_u64(&d.s.out, (uint64_t)BUDGET + (uint64_t)more);
        mp_put_u64(&d.s.out, 0); /* bytes that the engine needs */
        send_answer(&d.s, false);
        MP_CHECK_INT(d.s.engine->ops->trim(d.s.engine), more ? 0 : BUDGET);
        end_duo(&d, more ? "it released more memory than its budget" : "");
    }
}

/* A plan is for at most MP_PLAN_MAX requests; the child gets no more. */
MP_TEST(isolation_plans_are_for_at_most_256_requests) {
    enum { OFFERED = MP_PLAN_MAX + 1 };
    static duo d;
    static mp_item *items[OFFERED];
    begin_duo(&d);
    for (int i = 0; i < OFFERED; i++)
        items[i] = &d.s.item;
    MP_CHECK(mp_wire_receive(&in, &d.s.p.child, false) && in.kind == MP_FRAME_ADMIT);
    mp_wire_begin(&d.s.out, &d.s.p.child, MP_FRAME_PLAN);
    mp_put_u32(&d.s.out, 1);
    mp_put_u32(&d.s.out, MP_PLAN_MAX - 1);
    mp_put_u32(&d.s.out, 1);
    mp_put_u32(&d.s.out, 1);
    mp_put_u64(&d.s.out, 0);
    mp_put_u8(&d.s.out, 0);
    send_answer(&d.s, false);
    d.s.engine->ops->plan(d.s.engine, items, OFFERED, 1000, &d.s.plan);
    uint64_t speed[MP_MODEL_SPEEDS];
    MP_CHECK(mp_wire_receive(&in, &d.s.p.child, false) && in.kind == MP_FRAME_PLAN);
    MP_CHECK_INT(mp_get_u64(&in), 1); /* number of the plan */
    mp_get(&in, speed, sizeof speed);
    MP_CHECK_INT(mp_get_u64(&in), 1000);
    MP_CHECK_INT(mp_get_u32(&in), MP_PLAN_MAX);
    for (int i = 0; i < MP_PLAN_MAX; i++)
        MP_CHECK_INT(mp_get_u32(&in), 1);
    MP_CHECK(mp_wire_done(&in));
    end_duo(&d, "");
}
