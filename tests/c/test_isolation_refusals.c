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

/* ---- messages ---------------------------------------------------------------------------------------------------- */

static mp_wire_in in;

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
    put_needed(&d->s, 0, (mp_state_use){0});
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

MP_TEST(isolation_a_trim_releases_at_most_the_budget) {
    static duo d;
    for (int more = 0; more < 2; more++) {
        begin_duo(&d);
        mp_wire_begin(&d.s.out, &d.s.p.child, MP_FRAME_TRIM);
        mp_put_u64(&d.s.out, (uint64_t)BUDGET + (uint64_t)more);
        put_needed(&d.s, 0, (mp_state_use){0});
        send_answer(&d.s, false);
        MP_CHECK_INT(d.s.engine->ops->trim(d.s.engine), more ? 0 : BUDGET);
        end_duo(&d, more ? "it released more memory than its budget" : "");
    }
}
