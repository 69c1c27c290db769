/* Texts on their way between processes: what a child's completions have after a step, the parent has after the message;
 * what the parent has, another child gets. Both ends are in this process, and no model computes. */
#include <stdatomic.h>

#include "isolation_scene.h"

enum { WORDS = (VOCAB + 31) / 32, LAYERS = 2, HIDDEN = 3, VALUES = 3, RECORDS = 8 };

static const mp_request_wire *const wire = &mp_wire_text_to_text;
static mp_wire_out out;
static mp_wire_in in;

typedef struct side { /* a request as one process knows it */
    mp_item item;
    mp_text_request *call;
    _Alignas(16) uint8_t progress[256];
} side;

/* Sets up the outputs, as the check of a model does. */
static void set_up(side *s, mp_text_request *call) {
    mp_error error;
    call->vocab = call->sampled_vocab = VOCAB;
    call->context = 64;
    call->capture.layers = LAYERS;
    call->capture.hidden = HIDDEN;
    call->capture.vocab = VOCAB;
    MP_CHECK_OK(mp_text_request_output(call, 4, &error), &error);
    memset(s, 0, sizeof *s);
    s->call = call;
    s->item = (mp_item){.request = &call->base, .total = 20};
    MP_CHECK(wire->progress_bytes(&call->base) <= sizeof s->progress);
}

static void make(side *s, int choices, bool masked, bool captured) {
    static const int32_t prompt[] = {1, 2};
    static const char *const stop[] = {"bc"};
    static const int32_t stop_bytes[] = {2};
    static const uint32_t mask[WORDS];
    mp_text_args args = {.n_prompt = 2, .prompt = prompt, .n_choices = choices, .n_stop = 1, .stop = stop,
                         .stop_bytes = stop_bytes, .mask = masked ? mask : NULL,
                         .mask_bytes = masked ? (int64_t)sizeof mask : 0, .capture_values = captured ? VALUES : 0,
                         .capture_records = captured ? 1000 : 0,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = MAX_TOKENS,
                                      .logprobs = TOPS}};
    mp_text_request *call;
    mp_error error;
    MP_CHECK_OK(mp_text_request_create(&args, &call, &error), &error);
    set_up(s, call);
}

/* Adds a token to a completion of a child. Its text so far ends with `text`. */
static void add_token(side *s, int choice, int32_t id, const char *text, uint32_t final) {
    mp_choice *c = &s->call->choices[choice];
    const uint32_t at = c->token_count;
    c->tokens[at] = (mp_token_out){id, -0.25f * (float)id, (uint32_t)strlen(text)};
    for (int k = 0; k < TOPS; k++) {
        c->top_ids[at * TOPS + (uint32_t)k] = id + k;
        c->top_logprobs[at * TOPS + (uint32_t)k] = (float)(-id - k);
    }
    memcpy(c->text, text, strlen(text));
    c->text_bytes = final;
    c->token_count = at + 1;
}

/* Sends the request to a new child. */
static void resume(side *parent, side *child) {
    mp_request *request;
    mp_error error;
    pair p;
    pair_init(&p);
    mp_wire_begin(&out, &p.parent, MP_FRAME_ADMIT);
    wire->put_request(&out, &parent->item, parent->progress);
    MP_CHECK(mp_wire_end(&out) && mp_wire_receive(&in, &p.child, false));
    MP_CHECK_OK(wire->get_request(&in, &request, &error), &error);
    set_up(child, (mp_text_request *)request);
    child->item.cursor = parent->item.cursor;
    MP_CHECK_OK(wire->get_progress(&in, &child->item, child->progress, &error), &error);
    MP_CHECK(mp_wire_done(&in));
    free(p.page);
}

/* Sends the results of a step to the parent, which publishes them. */
static void report(side *child, side *parent, mp_outcome outcome, uint64_t began_ns, uint64_t now_ns) {
    pair p;
    pair_init(&p);
    mp_wire_begin(&out, &p.child, MP_FRAME_STEP);
    wire->put_results(&out, &child->item, child->progress);
    MP_CHECK(mp_wire_end(&out) && mp_wire_receive(&in, &p.parent, false));
    const bool moved = wire->get_results(&in, &parent->item, 1, outcome, parent->progress);
    if (!mp_wire_done(&in))
        MP_FAIL("%s", p.parent_error.message);
    MP_CHECK(moved);
    wire->publish(&parent->item, parent->progress, began_ns, now_ns);
    free(p.page);
}

/* Captured records arrive once, in the order of their tokens, and a new child goes on after them. */
MP_TEST(isolation_captured_records_of_a_child_become_those_of_the_parent) {
    static const char *const texts[] = {"a", "ad", "ade"};
    side parent, child, other;
    make(&parent, 1, false, true);
    resume(&parent, &child);
    const size_t floats = mp_capture_floats(&child.call->capture);
    for (uint32_t step = 0; step < 3; step++) {
        side *at = step < 2 ? &child : &other;
        if (step == 2) {
            resume(&parent, &other);
            MP_CHECK_INT(other.call->capture.sampled, 2);
        }
        add_token(at, 0, 3 + (int32_t)step, texts[step], step + 1);
        for (size_t f = 0; f < floats; f++)
            at->call->capture.data[step * floats + f] = (float)(100 * step + f);
        at->call->capture.sampled = step + 1;
        at->call->prompt_done_ns = 1;
        report(at, &parent, MP_OUTCOME_MORE, 1, 2);
        MP_CHECK_INT(parent.call->capture.sampled, step + 1);
        for (size_t f = 0; f < (step + 1) * floats; f++)
            MP_CHECK(parent.call->capture.data[f] == (float)(100 * (f / floats) + f % floats));
    }
    mp_request_destroy(&child.call->base);
    mp_request_destroy(&other.call->base);
    mp_request_destroy(&parent.call->base);
}

/* Each completion gets its own mask. */
MP_TEST(isolation_masks_reach_their_completions) {
    side parent, child;
    mp_error error;
    pair p;
    make(&parent, 2, true, false);
    resume(&parent, &child);
    for (int round = 0; round < 2; round++) {
        uint32_t bits[WORDS] = {0};
        for (int c = 0; c < 2; c++) { /* the second round sets a mask of the second completion alone */
            bits[0] = 1u << (4 * round + c + 1);
            if (round == 0 || c == 1)
                MP_CHECK_OK(mp_text_request_mask(parent.call, c, (uint32_t)round, bits, sizeof bits, &error), &error);
        }
        pair_init(&p);
        mp_wire_begin(&out, &p.parent, MP_FRAME_PLAN);
        wire->put_more(&out, &parent.item, parent.progress);
        const size_t bytes = out.used;
        MP_CHECK(mp_wire_end(&out) && mp_wire_receive(&in, &p.child, false));
        MP_CHECK(wire->get_more(&in, &child.item) && mp_wire_done(&in));
        MP_CHECK_INT(bytes, 2 + (round ? 1 : 2) * sizeof bits);
        MP_CHECK_INT(child.call->masks[0].bits[0], 1u << 1);
        MP_CHECK_INT(child.call->masks[1].bits[0], 1u << (round ? 6 : 2));
        MP_CHECK_INT(child.call->masks[0].ready, 1);
        MP_CHECK_INT(child.call->masks[1].ready, (uint32_t)round + 1);
        free(p.page);
        add_token(&parent, 1, 1, round ? "xy" : "x", 1);
        add_token(&child, 1, 1, round ? "xy" : "x", 1);
    }
    mp_request_destroy(&child.call->base);
    mp_request_destroy(&parent.call->base);
}
