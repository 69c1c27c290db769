/* The memory of a worker process: it asks for what its engine uses, and the parent charges its own budget. */
#include "isolation_scene.h"
#include "request_fixture.h"

enum { LIMIT = 1 << 20 /* memory_bytes of scene_admit */ };

static bool always(void *arg) {
    (void)arg;
    return true;
}

/* A child that asks questions, and then replies to TRIM with the bytes that it needs. */
typedef struct questions {
    scene *s;
    uint64_t wanted[3]; /* 0 ends the list */
    bool charged[3];
    uint64_t needed;
    mp_state_use states;
} questions;

static void ask_all(void *arg) {
    questions *q = arg;
    for (int i = 0; i < 3 && q->wanted[i]; i++)
        q->charged[i] = mp_channel_ask(&q->s->p.child, q->wanted[i]);
    mp_wire_begin(&q->s->out, &q->s->p.child, MP_FRAME_TRIM);
    mp_put_u64(&q->s->out, 1);
    put_needed(q->s, q->needed, q->states);
    MP_CHECK(mp_wire_end(&q->s->out));
}

static mp_request *a_text(void) {
    static const int32_t ids[] = {1};
    static const int64_t offsets[] = {0, 1};
    mp_embedding_request *call;
    mp_error error;
    MP_CHECK_OK(make_embedding_request(1, ids, offsets, NULL, &call, &error), &error);
    MP_CHECK_OK(mp_embedding_request_output(call, (mp_embedding_sizes){.width = 4}, &error), &error);
    return &call->base;
}

static void begin(scene *s, uint64_t free_bytes) {
    memset(s, 0, sizeof *s);
    s->mutate_at = -1;
    s->stall_ns = 60ull * 1000 * 1000 * 1000;
    scene_admit(s, a_text(), 1);
    s->p.child.poll = always;
    s->p.child.poll_ns = 1000 * 1000;
    atomic_store(&s->budget.limit, free_bytes);
}

/* Let the child ask during a TRIM. Returns the bytes that the parent believes were released. */
static uint64_t trim(questions *q) {
    mp_thread child;
    mp_error error;
    MP_CHECK_OK(mp_thread_start(&child, "child", ask_all, q, &error), &error);
    uint64_t released = q->s->engine->ops->trim(q->s->engine);
    mp_thread_join(&child);
    return released;
}

static void end(scene *s) {
    mp_request *call = s->item.request;
    scene_end(s);
    mp_request_destroy(call);
}

MP_TEST(isolation_memory_is_charged_when_the_child_asks) {
    static const struct {
        uint64_t free_bytes, wanted[3];
        bool charged[3];
        uint64_t most, needed;
    } cases[] = {
        {LIMIT, {1, 4096, LIMIT}, {true, true, true}, LIMIT, LIMIT},
        {UINT64_MAX, {LIMIT + 1, LIMIT, UINT64_MAX}, {false, true, false}, LIMIT, 0},    /* the process's limit */
        {5000, {5001, 5000, 5001}, {false, true, false}, 5000, 4999},                    /* the parent's budget */
        {5000, {3000, 1, 3001}, {true, true, true}, 3001, 3001},                         /* a question lowers nothing */
    };
    static scene s;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin(&s, cases[i].free_bytes);
        questions q = {.s = &s, .needed = cases[i].most};
        memcpy(q.wanted, cases[i].wanted, sizeof q.wanted);
        MP_CHECK_INT(trim(&q), 1);
        for (int k = 0; k < 3; k++)
            MP_CHECK_INT(q.charged[k], cases[i].charged[k]);
        MP_CHECK_INT(s.budget.used, cases[i].most);
        MP_CHECK_INT(s.engine->ops->bytes(s.engine), cases[i].most);

        q = (questions){.s = &s, .needed = cases[i].needed};
        MP_CHECK_INT(trim(&q), 1);
        MP_CHECK_INT(s.budget.used, cases[i].needed);
        end(&s);
    }
}

MP_TEST(isolation_states_are_within_the_memory_of_the_engine) {
    static const struct {
        mp_state_use states;
        bool fine;
    } cases[] = {{{60, 40, 2}, true},  {{0, 100, 100}, true},          {{61, 40, 2}, false},
                 {{0, 101, 1}, false}, {{UINT64_MAX, 40, 1}, false}, {{0, 3, 4}, false}};
    static scene s;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin(&s, 100);
        questions q = {.s = &s, .wanted = {100}, .needed = 100, .states = cases[i].states};
        MP_CHECK_INT(trim(&q), cases[i].fine);
        const mp_state_use use = mp_prefix_state_use(s.engine->prefix), none = {0};
        MP_CHECK(memcmp(&use, cases[i].fine ? &cases[i].states : &none, sizeof use) == 0);
        MP_CHECK_INT(s.engine->lost(s.engine) == NULL, cases[i].fine);
        end(&s);
    }
}
