/* Speculation: the lookup index finds drafts, drafts are made only where they pay, and a completion ends at the same
 * token with and without drafts. test_models_contract.c checks that drafts change no bit. */
#include <math.h>

#include "model_fixture.h"
#include "models/generation/speculation.h"
#include "speculation_fixture.h"

/* ---- the decision to speculate ----------------------------------------------------------------------------------- */

typedef struct world { /* simulated costs of a machine and predictability of a text */
    double read_ns, row_ns; /* costs of the weight read and of a row; see cost() */
    double accepted;        /* probability that a draft token is accepted */
    double found;           /* probability that a draft is found */
    int sequences;
} world;

static double cost(const world *w, int rows) {
    double compute = w->row_ns * rows;
    return compute > w->read_ns ? compute + 0.1 * w->read_ns : w->read_ns + 0.1 * compute;
}

/* Return the tokens per nanosecond over `steps` steps, relative to decoding without drafts. */
static double gain(mp_speculation *s, const world *w, int steps, mp_test_random *random) {
    mp_draft draft[MP_DRAFT_ROWS] = {0};
    mp_draft *list[MP_DRAFT_ROWS];
    double ns = 0, tokens = 0;
    for (int step = 0; step < steps; step++) {
        int n = 0, checked = 0, accepted = 0;
        if (mp_speculation_open(s, w->sequences, w->sequences)) {
            for (int i = 0; i < w->sequences; i++) {
                draft[i].run = 3;
                draft[i].count = mp_test_random_float(random, 0, 1) < w->found ? MP_DRAFT_MAX : 0;
                list[n++] = &draft[i];
            }
            mp_speculation_choose(s, list, n, w->sequences, w->sequences, 1000 * 1000);
        }
        for (int i = 0; i < n; i++) {
            checked += draft[i].count;
            for (int t = 0; t < draft[i].count; t++) {
                bool hit = mp_test_random_float(random, 0, 1) < w->accepted;
                mp_speculation_learn(s, &draft[i], t, hit);
                if (!hit)
                    break;
                accepted++;
            }
        }
        MP_CHECK(w->sequences + checked <= MP_DRAFT_ROWS);
        double took = cost(w, w->sequences + checked) * (0.95 + 0.1 * mp_test_random_float(random, 0, 1));
        if (mp_test_random_u64(random) % 50 == 0)
            took *= 5; /* another process used the CPU */
        mp_speculation_account(s, w->sequences, checked, accepted, (uint64_t)took);
        ns += cost(w, w->sequences + checked);
        tokens += w->sequences + accepted;
    }
    return tokens / ns / (w->sequences / cost(w, w->sequences));
}

/* Return the expected gain, as above, when every draft has `count` tokens. */
static double fixed_gain(const world *w, int count) {
    double tokens = 1;
    for (int i = count; i > 0; i--)
        tokens = 1 + w->accepted * tokens;
    double with = cost(w, w->sequences * (1 + count)) * w->found + cost(w, w->sequences) * (1 - w->found);
    return (tokens * w->found + 1 - w->found) * cost(w, w->sequences) / with;
}

/* Acceptance rates are running means, of the last 8 draft tokens of a sequence and of the last 32 of the engine, by the
 * length of the match before the token. */
MP_TEST(models_speculation_learns_odds) {
    static const int row_of[] = {0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3};
    for (int run = 1; run <= 10; run++) {
        mp_speculation s, before;
        mp_draft draft = {.run = run - run / 3};
        mp_speculation_init(&s, MP_SPECULATE_AUTO);
        before = s;
        double own = s.odds[row_of[run]], all = own;
        for (int i = 0; i < 100; i++) {
            const bool accepted = i == 0 || i == 2; /* the rest are rejected */
            mp_speculation_learn(&s, &draft, run / 3, accepted);
            own = fmax(own + (accepted - own) / 8, 0.001);
            all = fmax(all + (accepted - all) / 32, 0.001);
            MP_CHECK_NEAR(draft.odds[row_of[run]], own, 1e-5);
            MP_CHECK_NEAR(s.odds[row_of[run]], all, 1e-5);
        }
        for (int row = 0; row < MP_ODDS; row++)
            if (row != row_of[run])
                MP_CHECK(s.odds[row] == before.odds[row] && draft.odds[row] == 0);
    }
}

/* An attempt that is not expected to pay needs a balance of more than four steps, and drafts three tokens. Each source
 * has a balance of its own, of at most eight steps, and other drafts need one above zero. */
MP_TEST(models_speculation_attempts_need_a_balance) {
    enum { NS = 1000, SEQUENCES = 2 };
    mp_speculation s;
    mp_draft draft = {0}, *drafts[] = {&draft};
    mp_speculation_init(&s, MP_SPECULATE_AUTO);
    for (int i = 0; i < 2 * MP_ODDS; i++)
        (i < MP_ODDS ? draft.odds : s.odds)[i % MP_ODDS] = 0.001f; /* no draft is expected to pay */
    mp_speculation_account(&s, SEQUENCES, 0, 0, NS);
    for (int above = 0; above < 2; above++) {
        s.model_balance_ns = s.balance_ns = 4 * NS + above;
        MP_CHECK_INT(mp_speculation_may_try_model(&s, SEQUENCES), above);
        draft.count = 5;
        draft.run = MP_DRAFT_LONG;
        mp_speculation_choose(&s, drafts, 1, SEQUENCES, SEQUENCES, NS);
        MP_CHECK_INT(draft.count, above ? 3 : 0);
        s.model_balance_ns = s.balance_ns = above;
        MP_CHECK_INT(mp_speculation_open(&s, SEQUENCES, SEQUENCES), above);
        MP_CHECK_INT(mp_speculation_model_gain(&s, drafts, 1, SEQUENCES, NS) > 0, above);
        s.model_balance_ns = s.balance_ns = 8 * NS - 20;
        for (int i = 0; i <= above; i++)
            mp_speculation_account(&s, SEQUENCES, 0, 0, NS);
        MP_CHECK_NEAR(s.balance_ns, 8 * NS - 10 * !above, 1e-9);
        MP_CHECK_NEAR(s.model_balance_ns, 8 * NS - 10 * !above, 1e-9);
    }
    s.model_balance_ns = s.balance_ns = 0;
    mp_speculation_model_pass(&s, 1, 300); /* the next step counts for the draft model */
    mp_speculation_account(&s, SEQUENCES, 4, 3, NS + 200);
    MP_CHECK_NEAR(s.balance_ns, 10, 1e-9);
    MP_CHECK_NEAR(s.model_balance_ns, 10 - 300 + 3 * NS / SEQUENCES - 200, 1e-9);
    mp_speculation_account(&s, SEQUENCES, 4, 3, NS + 200);
    MP_CHECK_NEAR(s.balance_ns, 20 + 3 * NS / SEQUENCES - 200, 1e-9);
    MP_CHECK_NEAR(s.model_balance_ns, 20 - 300 + 3 * NS / SEQUENCES - 200, 1e-9);
}

MP_TEST(models_speculation_pays_or_backs_off) {
    static const world worlds[] = {
        /* memory-bound; drafts are mostly, often, rarely, never accepted */
        {1e7, 1e6, 0.95, 0.9, 1}, {1e7, 1e6, 0.6, 0.5, 1}, {1e7, 1e6, 0.1, 0.9, 1}, {1e7, 1e6, 0, 1, 1},
        /* compute-bound: a row costs as much as the weight read, so no draft pays */
        {1e6, 1e6, 0.95, 1, 1}, {1e6, 1e6, 0, 1, 1},
        /* few sequences, so rows for drafts are cheap; many sequences, so they are not */
        {1e7, 1e6, 0.9, 0.9, 4}, {1e7, 1e6, 0.9, 0.9, 16}, {1e7, 1e6, 0.1, 0.9, 8}, {1e7, 1e6, 0, 1, 31},
        /* no draft is ever found */
        {1e7, 1e6, 0.9, 0, 1},
    };
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        const world *w = &worlds[i];
        mp_test_random random = {i};
        mp_speculation s;
        mp_speculation_init(&s, MP_SPECULATE_AUTO);
        double best = 1;
        for (int count = 0; count <= MP_DRAFT_MAX && w->sequences * (1 + count) <= MP_DRAFT_ROWS; count++)
            best = fmax(best, fixed_gain(w, count));
        double early = gain(&s, w, 200, &random), late = gain(&s, w, 5000, &random);
        if (early < 0.98 || late < 0.985)
            MP_FAIL("world %zu: %.3f, then %.3f of the speed without drafts", i, early, late);
        if (best > 1.05 && late < 1 + 0.85 * (best - 1))
            MP_FAIL("world %zu: %.3f of the speed without drafts, %.3f is possible", i, late, best);
    }
}

/* Another pass of the draft model pays if the tokens that it adds come faster than those that the step would have now.
 * The passes that the step has made count as its time. */
MP_TEST(models_speculation_continues_while_it_pays) {
    static const struct { double pass, verify, next, mean; bool goes_on; } cases[] = {
        {100, 1000, 1100, 0.7, true},   /* now 2.71 tokens in 1200 ns; 0.567 tokens more in 200 ns */
        {100, 1000, 1100, 0.5, false},  /* 0.405 tokens more in 200 ns, at the rate of now 0.452 */
        {100, 1000, 1000, 0.5, true},   /* the row is free: 0.405 tokens more in 100 ns */
        {400, 1000, 1100, 0.99, true},  /* now 2.71 tokens in 1800 ns; 0.802 tokens more in 500 ns */
        {400, 1000, 1100, 0.7, false},  /* 0.567 tokens more in 500 ns, at the rate of now 0.753 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mp_speculation s;
        mp_draft draft = {.of_model = true, .count = 2}, *list[] = {&draft};
        mp_speculation_init(&s, MP_SPECULATE_AUTO);
        s.plain[1] = (mp_pace){1000, 4};
        for (int rows = 3; rows <= 6; rows++) /* two draft tokens, and up to three more */
            s.drafted[rows] = (mp_pace){cases[i].verify + (rows - 3) * 3 * (cases[i].next - cases[i].verify), 4};
        s.drafted[4].ns = cases[i].next;
        s.model_passes[1] = (mp_pace){cases[i].pass, 4};
        s.odds[MP_ODDS_LOOKUP] = 0.9f; /* the class of both tokens */
        s.odds[MP_ODDS_MEAN] = (float)cases[i].mean;
        if (mp_speculation_continue_model(&s, list, 1, 1, 1000) != cases[i].goes_on)
            MP_FAIL("case %zu goes on: %d", i, !cases[i].goes_on);
    }
}

/* ---- with a draft model ------------------------------------------------------------------------------------------ */

/* mp_draft_confidence distinguishes five confidence classes, and finds the likeliest token at any position. */
MP_TEST(models_draft_confidence_is_the_lead_of_the_likeliest_token) {
    static const float leads[] = {0.1f, 1, 2, 5, 9};
    float logits[77];
    for (int32_t vocab = 1; vocab <= 77; vocab += 4)
        for (int32_t best = 0; best < vocab; best += 3)
            for (int class = 0; class < MP_DRAFT_CLASSES; class++) {
                int32_t likeliest;
                for (int32_t id = 0; id < vocab; id++)
                    logits[id] = -1 - (float)(id % 7);
                const int32_t next = (best + 1 + class) % vocab;
                logits[next] = 3;
                logits[best] = 3 + leads[class];
                const int confidence = mp_draft_confidence(logits, vocab, &likeliest);
                MP_CHECK_INT(likeliest, best);
                MP_CHECK_INT(confidence, next == best ? MP_DRAFT_CLASSES - 1 : class);
            }
    static const float borders[MP_DRAFT_CLASSES - 1] = {0.5f, 1.5f, 3, 6}; /* each begins a class */
    int32_t likeliest;
    for (int class = 1; class < MP_DRAFT_CLASSES; class++) {
        const float at[] = {borders[class - 1], 0, -9}, below[] = {nextafterf(borders[class - 1], 0), 0, -9};
        MP_CHECK_INT(mp_draft_confidence(at, 3, &likeliest), class);
        MP_CHECK_INT(mp_draft_confidence(below, 3, &likeliest), class - 1);
    }
    float tied[] = {1, 5, 2, 5};
    MP_CHECK_INT(mp_draft_confidence(tied, 4, &likeliest), 0);
    MP_CHECK_INT(likeliest, 1);
}

/* Speculation starts when a text begins to repeat itself, and stops when the repetition ends. */
MP_TEST(models_speculation_follows_the_text) {
    mp_test_random random = {77};
    mp_speculation s;
    mp_speculation_init(&s, MP_SPECULATE_AUTO);
    world prose = {1e7, 1e6, 0, 1, 1}, copy = {1e7, 1e6, 0.98, 1, 1};
    for (int times = 0; times < 3; times++) {
        double bad = gain(&s, &prose, 3000, &random);
        double good = gain(&s, &copy, 3000, &random);
        if (bad < 0.98 || good < 3)
            MP_FAIL("%.3f of the speed without drafts, then %.3f", bad, good);
    }
}

/* ---- ends -------------------------------------------------------------------------------------------------------- */

enum { PROMPT = 60, ANSWER = 40 };

/* The continuation that the model would generate without stop conditions; drafts are taken from it. */
typedef struct plain_answer {
    int32_t tokens[ANSWER];
} plain_answer;

static int propose_known(void *arg, const mp_item *item, int choice, int32_t *draft, int most) {
    const plain_answer *answer = arg;
    const mp_text_request *call = (const mp_text_request *)item->request;
    int at = (int)call->choices[choice].token_count, count = 0;
    for (; count < most && at + count < ANSWER; count++)
        draft[count] = answer->tokens[at + count];
    return count;
}

static void ask(tiny_model *tiny, tiny_job *job, const mp_text_args *more) {
    int32_t prompt[512];
    mp_test_random random = {3};
    mp_text_args args = *more;
    for (int i = 0; i < args.n_prompt; i++)
        prompt[i] = (int32_t)(mp_test_random_u64(&random) % TINY_VOCAB);
    args.prompt = prompt;
    tiny_job_make(tiny, job, &args, 0);
    tiny_job_admit(tiny, job);
    tiny_job_finish(tiny, job);
}

static void check_same(const tiny_job *a, const tiny_job *b, const char *what) {
    for (int c = 0; c < a->call->n_choices; c++) {
        const mp_choice *x = &a->call->choices[c], *y = &b->call->choices[c];
        if (x->token_count != y->token_count || x->text_bytes != y->text_bytes || x->finish != y->finish ||
            x->stop_index != y->stop_index)
            MP_FAIL("%s: %u tokens, %u bytes, finish %d, stop %d; without drafts %u, %u, %d, %d", what,
                    y->token_count, y->text_bytes, y->finish, y->stop_index, x->token_count, x->text_bytes, x->finish,
                    x->stop_index);
        MP_CHECK(memcmp(x->text, y->text, x->text_bytes) == 0);
        for (uint32_t t = 0; t < x->token_count; t++) {
            MP_CHECK_INT(y->tokens[t].id, x->tokens[t].id);
            MP_CHECK(memcmp(&y->tokens[t].logprob, &x->tokens[t].logprob, sizeof(float)) == 0);
            MP_CHECK_INT(y->tokens[t].byte_end, x->tokens[t].byte_end);
        }
    }
}

MP_TEST_SECONDS(models_speculation_ends_at_the_same_token, 60) {
    static const mp_dtype types[] = {MP_Q8_0};
    static const float temperatures[] = {0, 1.5f};
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec(types, 1, 51), MP_COMPUTE_AUTO, 2);
    uint32_t asked = 0;
    for (size_t i = 0; i < 2; i++) {
        const mp_sampling sampling = {.temperature = temperatures[i], .top_p = 1, .repetition_penalty = 1.3f,
                                      .frequency_penalty = 0.2f, .seed = 9, .max_tokens = ANSWER, .logprobs = 2,
                                      .ignore_eos = true};
        const mp_text_args plain = {.n_prompt = PROMPT, .n_choices = 1, .sampling = sampling};
        plain_answer answer;
        tiny_job job;
        tiny_speculate(tiny.engine, MP_SPECULATE_OFF, NULL, NULL);
        ask(&tiny, &job, &plain);
        MP_CHECK_INT(job.call->choices[0].token_count, ANSWER);
        char text[ANSWER];
        memcpy(text, job.call->choices[0].text, ANSWER); /* one letter per token */
        for (int t = 0; t < ANSWER; t++)
            answer.tokens[t] = job.call->choices[0].tokens[t].id;
        mp_request_destroy(&job.call->base);
        for (int at = 0; at < ANSWER; at += 3) {
            const char *stop[] = {"@@", text + at};
            const int32_t stop_bytes[] = {2, ANSWER - at < 3 ? ANSWER - at : 3};
            const int32_t stop_ids[] = {TINY_VOCAB - 2, answer.tokens[at]};
            const int32_t bias_ids[] = {answer.tokens[at], TINY_VOCAB - 1};
            const float bias[] = {-3, 8};
            struct {
                const char *name;
                mp_text_args args;
            } cases[] = {{"nothing", plain}, {"stop string", plain}, {"stop id", plain}, {"later stop id", plain},
                         {"bias", plain}, {"max_tokens", plain}, {"context", plain}, {"end", plain},
                         {"later end", plain}, {"answers", plain}};
            cases[1].args.n_stop = 2;
            cases[1].args.stop = stop;
            cases[1].args.stop_bytes = stop_bytes;
            cases[2].args.n_stop_ids = cases[3].args.n_stop_ids = 2;
            cases[2].args.stop_ids = cases[3].args.stop_ids = stop_ids;
            cases[3].args.sampling.min_tokens = at / 2 + 3;
            for (int c = 4; c < 9; c += c == 4 ? 3 : 1) {
                cases[c].args.n_bias = c == 4 ? 1 : 2;
                cases[c].args.bias_ids = bias_ids;
                cases[c].args.bias = bias;
                cases[c].args.sampling.ignore_eos = false;
            }
            cases[5].args.sampling.max_tokens = 1 + at;
            cases[6].args.n_prompt = TINY_CONTEXT - 1 - at;
            cases[8].args.sampling.min_tokens = at;
            cases[9].args.n_choices = 3;
            for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
                if (at > 0 && (c == 0 || c == 9)) /* these two do not depend on `at` */
                    continue;
                if (!mp_test_take(&asked))
                    continue;
                tiny_job without, with;
                tiny_speculate(tiny.engine, MP_SPECULATE_OFF, NULL, NULL);
                ask(&tiny, &without, &cases[c].args);
                plain_answer known = answer;
                if (c >= 4) /* in earlier cases, the draft continues past the end */
                    for (uint32_t t = 0; t < ANSWER; t++)
                        known.tokens[t] = t < without.call->choices[0].token_count
                                              ? without.call->choices[0].tokens[t].id : TINY_VOCAB - 2;
                tiny_speculate(tiny.engine, MP_SPECULATE_ALWAYS, propose_known, &known);
                ask(&tiny, &with, &cases[c].args);
                check_same(&without, &with, cases[c].name);
                mp_request_destroy(&without.call->base);
                mp_request_destroy(&with.call->base);
            }
        }
    }
    MP_CHECK(tiny.engine->work.accepted_draft_tokens > (uint64_t)mp_test_rounds(1000));
    tiny_trim(&tiny);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), 0);
    tiny_unload(&tiny);
}

static float sum_of_odds(const mp_engine *engine) {
    const float *odds = ((const mp_text_engine *)engine)->speculation.odds;
    float sum = 0;
    for (int i = 0; i < MP_ODDS; i++)
        sum += odds[i];
    return sum;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static int draft_badly(void *arg, const mp_item *item, int choice, int32_t *draft, int most) {
    (void)item;
    (void)choice;
    for (int i = 0; i < most; i++)
        draft[i] = *(const int32_t *)arg;
    return most;
}

/* Drafts never cause a lack of memory: a completion that fits without drafts succeeds with drafts at any limit. */
MP_TEST_SECONDS(models_speculation_needs_no_memory, 60) {
    static const mp_dtype types[] = {MP_Q8_0};
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec(types, 1, 53), MP_COMPUTE_AUTO, 2);
    const mp_text_args args = {.n_prompt = 124, .n_choices = 1, .sampling = {.top_p = 1, .repetition_penalty = 1,
                               .max_tokens = 3, .logprobs = 0, .ignore_eos = true}};
    tiny_job job, again;
    tiny_speculate(tiny.engine, MP_SPECULATE_OFF, NULL, NULL);
    ask(&tiny, &job, &args);
    tiny_trim(&tiny);
    ask(&tiny, &again, &args); /* this request allocates its blocks and scratch again */
    uint64_t enough = tiny.budget.used;
    tiny_trim(&tiny);
    mp_request_destroy(&again.call->base);
    int32_t wrong = 5;
    tiny_speculate(tiny.engine, MP_SPECULATE_ALWAYS, draft_badly, &wrong);
    tiny.budget.limit = enough + 2048; /* for memory freed at the end of the request */
    const float odds = sum_of_odds(tiny.engine);
    ask(&tiny, &again, &args);
    MP_CHECK(sum_of_odds(tiny.engine) < odds);
    check_same(&job, &again, "with little memory");
    mp_request_destroy(&again.call->base);
    tiny.budget.limit = UINT64_MAX;
    tiny_speculate(tiny.engine, MP_SPECULATE_ALWAYS, NULL, NULL);
    tiny_trim(&tiny);
    ask(&tiny, &again, &args);
    check_same(&job, &again, "by look-up");
    mp_request_destroy(&again.call->base);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* A step whose scratch has no room for draft tokens leaves them out. */
MP_TEST(models_speculation_gives_way_to_scratch) {
    static const mp_dtype types[] = {MP_Q8_0};
    const mp_text_args args = {.n_prompt = 2, .n_choices = 1, .sampling = {.top_p = 1, .repetition_penalty = 1,
                               .max_tokens = 12, .logprobs = 0, .ignore_eos = true}};
    tiny_model tiny;
    tiny_job job, again;
    int32_t wrong = 5;
    tiny_load(&tiny, tiny_decoder_spec(types, 1, 53), MP_COMPUTE_AUTO, 1);
    tiny_speculate(tiny.engine, MP_SPECULATE_OFF, NULL, NULL);
    ask(&tiny, &job, &args);
    tiny_trim(&tiny);
    int32_t prompt[2];
    memcpy(prompt, job.call->prompt, sizeof prompt);
    mp_text_args same = args;
    same.prompt = prompt;
    tiny_job_make(&tiny, &again, &same, 0);
    tiny_job_admit(&tiny, &again);
    MP_CHECK_INT(tiny_job_step(&tiny, &again, 512), MP_OUTCOME_MORE);
    tiny_speculate(tiny.engine, MP_SPECULATE_ALWAYS, draft_badly, &wrong);
    tiny.budget.limit = tiny.budget.used;
    tiny_job_finish(&tiny, &again);
    MP_CHECK(tiny.engine->work.draft_tokens <= 1); /* one token fits: the last step has no more */
    check_same(&job, &again, "without room for drafts");
    mp_request_destroy(&again.call->base);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* ---- drafts with infinite rows ----------------------------------------------------------------------------------- */

/* A draft token may have an infinite embedding row, which makes the values of its position infinite. In attention the
 * earlier rows of its block multiply these values by zero, which yields NaN unless the kernel masks them. */
static void survive_infinity(mp_dtype type) {
    const int32_t bad = 7;
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec_with(&type, 1, 54, bad), type == MP_F32 ? MP_COMPUTE_F32 : MP_COMPUTE_AUTO, 2);
    mp_text_args args = {.n_prompt = 70, .n_choices = 2, .sampling = {.temperature = 0.8f, .top_p = 1,
                         .repetition_penalty = 1, .max_tokens = 60, .logprobs = 3, .ignore_eos = true}};
    const float never = -1e6f;
    args.n_bias = 1;
    args.bias_ids = &bad;
    args.bias = &never;
    int32_t prompt[70];
    for (int i = 0; i < 70; i++)
        prompt[i] = 20 + i;
    args.prompt = prompt;
    tiny_job without, with;
    tiny_speculate(tiny.engine, MP_SPECULATE_OFF, NULL, NULL);
    tiny_job_make(&tiny, &without, &args, 0);
    tiny_job_admit(&tiny, &without);
    tiny_job_finish(&tiny, &without);
    tiny_speculate(tiny.engine, MP_SPECULATE_ALWAYS, draft_badly, (void *)(intptr_t)&bad);
    tiny_trim(&tiny);
    tiny_job_make(&tiny, &with, &args, 0);
    tiny_job_admit(&tiny, &with);
    tiny_job_finish(&tiny, &with);
    check_same(&without, &with, "with an infinite row in the block");
    /* drafted at most once per completion */
    MP_CHECK(tiny.engine->work.draft_tokens > 0 && tiny.engine->work.draft_tokens <= 2 * MP_DRAFT_MAX);
    MP_CHECK_INT(tiny.engine->work.accepted_draft_tokens, 0);
    mp_request_destroy(&without.call->base);
    mp_request_destroy(&with.call->base);
    tiny_unload(&tiny);
}

MP_TEST(models_speculation_survives_infinity) {
    survive_infinity(MP_F32);
    survive_infinity(MP_Q8_0);
}
