/* How long the parent waits for a child that says nothing, on a made-up clock: each look at the clock lets a fixed time
 * pass. The test is the child, and writes nothing. */
#include "base/sys.h"

#ifdef MP_SEAM

#include "isolation_scene.h"
#include "request_fixture.h"

static const uint64_t MS = 1000 * 1000, SECOND = 1000ull * 1000 * 1000, DAY = 86400ull * 1000 * 1000 * 1000;
enum {
    CHECK_GAP_MS = 20, /* at most this counts as silence between two checks */
    BEGUN = 2,         /* looks at the beginning of a step */
    ENDLESS = 10000,   /* more heartbeats than any step has */
};

static uint64_t clock_ns, pass_ns;
static int looks;             /* at the clock, since start_clock */
static void (*at_look)(void); /* called at each look; NULL: nothing happens */

static uint64_t read_clock(void) {
    looks++;
    if (at_look)
        at_look();
    return clock_ns += pass_ns;
}

static void start_clock(uint64_t each_ns, void (*hook)(void)) {
    clock_ns = 1000 * SECOND;
    pass_ns = each_ns;
    looks = 0;
    at_look = hook;
    mp_sys_table.now_ns = read_clock;
}

static void stop_clock(void) { mp_sys_table = mp_sys_real; }

static scene s;

/* Starts an embedding request in a proxy with the stall limit `stall_ns`. */
static void begin(uint64_t stall_ns) {
    static const int32_t ids[] = {1};
    static const int64_t offsets[] = {0, 1};
    mp_embedding_request *call;
    mp_error error;
    memset(&s, 0, sizeof s);
    s.mutate_at = -1;
    s.stall_ns = stall_ns;
    MP_CHECK_OK(make_embedding_request(1, ids, offsets, NULL, &call, &error), &error);
    MP_CHECK_OK(mp_embedding_request_output(call, (mp_embedding_sizes){.width = 4}, &error), &error);
    scene_admit(&s, &call->base, 1);
}

static void end(const char *why) {
    mp_request *request = s.item.request;
    const mp_error *lost = s.engine->lost(s.engine);
    MP_CHECK(lost);
    MP_CHECK_INT(lost->code, MP_RECV);
    MP_CHECK_HAS(lost->message, why);
    scene_end(&s);
    mp_request_destroy(request);
}

/* A plan waits for at most 5 s, or for the limit of silence if that is shorter. */
MP_TEST(isolation_waits_end_at_their_limit) {
    static const struct {
        uint64_t stall_ns, pass_ns;
        int checks;
        const char *why;
    } cases[] = {
        {1 * SECOND, 20 * MS, 50, "was killed after 1 s without a heartbeat or response while it planned a step"},
        {1 * SECOND, 7 * MS, 143, "was killed after 1 s"},
        {1 * SECOND, DAY, 1000 / CHECK_GAP_MS, "was killed after 1 s"}, /* the clock jumps, or the machine sleeps */
        {60 * SECOND, 20 * MS, 250, "was killed after 5 s"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin(cases[i].stall_ns);
        mp_item *items[] = {&s.item};
        start_clock(cases[i].pass_ns, NULL);
        s.engine->ops->plan(s.engine, items, 1, 1000, &s.plan);
        stop_clock();
        MP_CHECK_INT(looks, 1 + cases[i].checks); /* one look at the beginning */
        end(cases[i].why);
    }
}

static _Atomic int cancelled;
static int beats, beats_left, stop_after;

/* The child's compute threads report a heartbeat at every second look, once the step has begun. */
static void beat(void) {
    if (beats_left > 0 && looks > BEGUN && looks % 2 == 0) {
        beats_left--;
        atomic_store(&s.p.page->lease.heartbeat, (uint64_t)++beats);
    }
    if (looks == stop_after)
        atomic_store(&cancelled, 1);
}

static mp_outcome run(int count, int cancel_at) {
    mp_outcome outcomes[MP_PLAN_MAX] = {MP_OUTCOME_DONE};
    beats = 0;
    beats_left = count;
    stop_after = cancel_at;
    atomic_store(&cancelled, 0);
    answer_plan(&s, 1, false);
    s.lease.cancelled = &cancelled;
    atomic_store(&s.lease.heartbeat, 0);
    start_clock(20 * MS, beat);
    s.engine->ops->step(s.engine, &s.lease, &s.plan, outcomes);
    stop_clock();
    s.lease.cancelled = NULL;
    return outcomes[0];
}

/* Silence begins anew at each heartbeat of the child, which becomes a heartbeat of the step. */
MP_TEST(isolation_heartbeats_end_the_silence) {
    static const struct {
        int beats, looks; /* a heartbeat is seen by the next check, which looks at the clock for the step's own */
    } cases[] = {{0, BEGUN + 50}, {1, BEGUN + 2 + 1 + 50}, {40, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin(1 * SECOND);
        MP_CHECK_INT(run(cases[i].beats, 0), MP_OUTCOME_FAILED);
        MP_CHECK_INT(beats, cases[i].beats);
        MP_CHECK_INT(s.item.error.code, MP_RECV);
        const uint64_t last = atomic_load(&s.lease.heartbeat);
        if (cases[i].beats == 0)
            MP_CHECK_INT(last, 0);
        else
            MP_CHECK(last > 1000 * SECOND && clock_ns - last == 50 * CHECK_GAP_MS * MS);
        if (cases[i].looks)
            MP_CHECK_INT(looks, cases[i].looks);
        MP_CHECK_INT(atomic_load(&s.p.page->stop), 0);
        end("was killed after 1 s without a heartbeat or response in a step");
    }
}

/* The child is told to stop a cancelled step. It has 1.5 s for that, even if it sends heartbeats. Its requests do not
 * fail. */
MP_TEST(isolation_cancelled_steps_end_within_their_grace) {
    enum { LOOK = 11, CHECKS = 1500 / CHECK_GAP_MS };
    for (int beating = 0; beating < 2; beating++) {
        begin(60 * SECOND);
        MP_CHECK_INT(run(beating ? ENDLESS : 0, LOOK), MP_OUTCOME_MORE);
        MP_CHECK_INT(s.item.error.code, MP_OK);
        MP_CHECK_INT(atomic_load(&s.p.page->stop), 1);
        if (beating)
            MP_CHECK(beats > CHECKS / 2);
        else
            MP_CHECK_INT(looks, LOOK - 1 + CHECKS);
        end("was killed because it ignored a cancellation in a step");
    }
}

#endif
