/* isolation_scene.h: both ends of a channel in one process, and a proxy whose child is the test itself. */
#ifndef ISOLATION_SCENE_H
#define ISOLATION_SCENE_H

#include <stdatomic.h>
#include <stdlib.h>

#include "isolation/capability_wire.h"
#include "isolation/proxy.h"
#include "model_fixture.h"

static inline bool never(void *arg) {
    (void)arg;
    return false; /* no other process writes to the ring: a missing message never arrives */
}

typedef struct pair { /* both ends of a channel in this process */
    mp_channel_page *page;
    mp_channel parent, child;
    mp_error parent_error, child_error;
} pair;

static inline void pair_init(pair *p) {
    p->page = aligned_alloc(64, (sizeof *p->page + 63) / 64 * 64);
    MP_CHECK(p->page);
    memset(p->page, 0, sizeof *p->page);
    mp_error_clear(&p->parent_error);
    mp_error_clear(&p->child_error);
    mp_channel_init(&p->parent, p->page, true, &p->parent_error, never, NULL);
    mp_channel_init(&p->child, p->page, false, &p->child_error, never, NULL);
}

enum { VOCAB = TINY_VOCAB, MAX_TOKENS = 4, TOPS = 2, PAYLOAD = 4096, SPARE = 3 };

typedef struct scene { /* a proxy without a process, one admitted request, and the child's next message */
    pair p;
    mp_budget budget; /* without a limit, unless a test sets one */
    mp_engine *engine;
    mp_lease lease;
    mp_item item;
    mp_plan plan;
    mp_wire_out out;
    int mutate_at; /* byte of the result or plan to change, -1 = none */
    uint8_t mutate_by;
    size_t cut;                    /* truncate the message to this length; 0 = do not truncate */
    uint64_t stall_ns;             /* limit of silence; 0 = 1 ms */
    uint64_t speed;                /* speed measured by the model that the child reports, in ns; 0 = 1000 */
    const mp_isolation_kind *kind; /* NULL = no_kind */
} scene;

static const mp_isolation_kind no_kind;

static inline void send_answer(scene *s, bool target) {
    if (target && s->mutate_at >= 0 && (size_t)s->mutate_at < s->out.used)
        s->out.buffer[s->mutate_at] ^= s->mutate_by;
    if (target && s->cut && s->cut < s->out.used)
        s->out.used = s->cut;
    MP_CHECK(mp_wire_end(&s->out));
}

static inline void scene_admit(scene *s, mp_request *call, uint32_t total) {
    mp_error error;
    pair_init(&s->p);
    mp_proxy_args args = {.kind = s->kind ? s->kind : &no_kind, .capability = call->capability, .memory_bytes = 1 << 20,
                          .start_ns = 1000000000, .stall_ns = s->stall_ns ? s->stall_ns : 1000000};
    atomic_store(&s->budget.limit, UINT64_MAX);
    MP_CHECK_OK(mp_proxy_attach(&args, &s->budget, s->p.page, &s->engine, &error), &error);
    s->item = (mp_item){.request = call, .total = total};
    s->lease = (mp_lease){.threads = 1};
    mp_wire_begin(&s->out, &s->p.child, MP_FRAME_ADMIT);
    mp_put_u32(&s->out, 1);
    mp_put_error(&s->out, MP_OK, NULL);
    send_answer(s, false);
    MP_CHECK_OK(s->engine->ops->admit(s->engine, &s->item, &error), &error);
}

static inline void answer_plan(scene *s, uint32_t amount, bool target) {
    mp_wire_begin(&s->out, &s->p.child, MP_FRAME_PLAN);
    mp_put_u32(&s->out, 1);
    mp_put_u32(&s->out, 0);
    mp_put_u32(&s->out, amount);
    mp_put_u32(&s->out, 2);
    mp_put_u64(&s->out, 1000000);
    mp_put_u8(&s->out, 0); /* not barrier-bound */
    send_answer(s, target);
    mp_item *items[1] = {&s->item};
    s->engine->ops->plan(s->engine, items, 1, 1000000, &s->plan);
    MP_CHECK(s->plan.count == 1 && s->plan.items[0] == &s->item && s->plan.amount[0] >= 1);
    MP_CHECK(s->plan.threads >= 1 && s->plan.threads <= 256);
}

/* Puts the bytes that the engine needs, and the part of them that states take. */
static inline void put_needed(scene *s, uint64_t needed, mp_state_use states) {
    mp_put_u64(&s->out, needed);
    mp_put(&s->out, &states, sizeof states);
}

static inline void put_learnt(scene *s) {
    mp_step_work work = {.passes = 1, .rows = 3, .draft_tokens = 2, .accepted_draft_tokens = 1};
    put_needed(s, 0, (mp_state_use){0});
    for (int i = 0; i < 4; i++)
        mp_put_u64(&s->out, 5);
    mp_put(&s->out, &work, sizeof work);
    for (int i = 0; i < MP_MODEL_SPEEDS; i++)
        mp_put_u64(&s->out, s->speed ? s->speed : 1000);
    mp_put_u64(&s->out, 0); /* no region of the lease was measured */
    mp_put_u64(&s->out, 0);
}

static inline mp_outcome run_step(scene *s) {
    mp_outcome outcomes[MP_PLAN_MAX];
    send_answer(s, true);
    s->engine->ops->step(s->engine, &s->lease, &s->plan, outcomes);
    return outcomes[0];
}

static inline void scene_end(scene *s) {
    s->engine->ops->retire(s->engine, &s->item);
    s->engine->ops->destroy(s->engine);
    MP_CHECK_INT(s->budget.used, 0);
    free(s->p.page);
}

#endif
