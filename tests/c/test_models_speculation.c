/* Speculation: the lookup index finds drafts, drafts are made only where they pay, and a completion ends at the same
 * token with and without drafts. test_models_contract.c checks that drafts change no bit. */
#include <math.h>

#include "model_fixture.h"
#include "models/generation/speculation.h"
#include "speculation_fixture.h"

/* ---- the index --------------------------------------------------------------------------------------------------- */

/* Return the end of the last earlier occurrence of the sequence's last n tokens; 0 = none. */
static int last_run(const int32_t *tokens, int count, int n) {
    for (int end = count - 1; end >= n; end--)
        if (memcmp(tokens + end - n, tokens + count - n, (size_t)n * sizeof *tokens) == 0)
            return end;
    return 0;
}

MP_TEST(models_draft_index_agrees_with_a_search) {
    enum { COUNT = 3000 };
    mp_budget budget = {.limit = UINT64_MAX};
    mp_test_random random = {5};
    int32_t tokens[COUNT];
    long wanted = 0, missed = 0;
    for (int letters = 2; letters <= 200; letters *= 10) {
        mp_draft_index index = {0};
        for (int i = 0; i < COUNT; i++)
            tokens[i] = (int32_t)(mp_test_random_u64(&random) % (uint64_t)letters);
        for (int count = 1; count <= COUNT; count += 1 + (int)(mp_test_random_u64(&random) % 3)) {
            int32_t draft[MP_DRAFT_MAX];
            int run, most = 1 + (int)(mp_test_random_u64(&random) % MP_DRAFT_MAX);
            int found = mp_draft_find(&index, &budget, tokens, count, most, draft, &run);
            int end = count > MP_DRAFT_LONG ? last_run(tokens, count, MP_DRAFT_LONG) : 0;
            if (!end && count > MP_DRAFT_SHORT)
                end = last_run(tokens, count, MP_DRAFT_SHORT);
            MP_CHECK(end || !found);
            wanted += end > 0;
            missed += end && !found;
            if (!found)
                continue;
            MP_CHECK_INT(found, most);
            MP_CHECK(run >= MP_DRAFT_SHORT);
            /* the draft is the continuation of an earlier occurrence: of the last one, except after a hash collision */
            bool somewhere = false;
            for (end = count - 1; end >= run && !somewhere; end--) {
                somewhere = memcmp(tokens + end - run, tokens + count - run, (size_t)run * sizeof *tokens) == 0;
                for (int i = 0; i < most && somewhere; i++)
                    somewhere = draft[i] == tokens[end + i % (count - end)];
            }
            MP_CHECK(somewhere);
        }
        mp_draft_deinit(&index, &budget);
    }
    MP_CHECK(wanted > 2000);
    if (missed > wanted / 16) /* misses are runs that share a slot of the index */
        MP_FAIL("%ld of %ld were not found", missed, wanted);
    MP_CHECK_INT(budget.used, 0);
}

MP_TEST(models_draft_continues_repetitions) {
    mp_budget budget = {.limit = UINT64_MAX};
    mp_draft_index index = {0};
    const int32_t tokens[] = {9, 1, 2, 3, 1, 2, 3, 1, 2, 3};
    int32_t draft[MP_DRAFT_MAX];
    int run;
    MP_CHECK_INT(mp_draft_find(&index, &budget, tokens, 10, 7, draft, &run), 7);
    MP_CHECK_INT(run, 6);
    for (int i = 0; i < 7; i++)
        MP_CHECK_INT(draft[i], 1 + i % 3);
    mp_draft_deinit(&index, &budget);
}

MP_TEST(models_draft_memory_is_bounded_and_charged) {
    enum { COUNT = 400 * 1000 };
    mp_budget budget = {.limit = UINT64_MAX};
    mp_draft_index index = {0};
    int32_t *tokens = malloc(COUNT * sizeof *tokens), draft[MP_DRAFT_MAX];
    int run;
    MP_CHECK(tokens);
    for (int i = 0; i < COUNT; i++)
        tokens[i] = i % 1000;
    uint64_t before = mp_alloc_bytes(MP_TAG_REQUEST);
    for (int count = 1; count <= COUNT; count += 999)
        mp_draft_find(&index, &budget, tokens, count, 4, draft, &run);
    MP_CHECK(run == MP_DRAFT_RUN); /* the index finds recent runs in sequences of any length */
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_REQUEST) - before, budget.used);
    MP_CHECK(budget.used > 0 && budget.used <= 512 * 1024);
    mp_draft_deinit(&index, &budget);
    MP_CHECK_INT(budget.used, 0);
    budget.limit = 100; /* no memory for the index: no drafts are found */
    MP_CHECK_INT(mp_draft_find(&index, &budget, tokens, 2000, 4, draft, &run), 0);
    MP_CHECK_INT(budget.used, 0);
    free(tokens);
}

#ifdef MP_SEAM
static void *no_alloc(size_t bytes, size_t alignment) {
    (void)bytes;
    (void)alignment;
    return NULL;
}
#endif

/* Further tokens need no memory until the index has fewer than six slots for each. */
MP_TEST(models_draft_index_keeps_its_memory) {
#ifdef MP_SEAM
    enum { COUNT = 100 };
    mp_budget budget = {.limit = UINT64_MAX};
    mp_draft_index index = {0};
    int32_t tokens[COUNT], draft[MP_DRAFT_MAX];
    int run;
    for (int i = 0; i < COUNT; i++)
        tokens[i] = i % 20;
    MP_CHECK_INT(mp_draft_find(&index, &budget, tokens, COUNT - 1, 4, draft, &run), 4);
    mp_sys_table.alloc = no_alloc;
    const int found = mp_draft_find(&index, &budget, tokens, COUNT, 4, draft, &run);
    mp_sys_table = mp_sys_real;
    MP_CHECK_INT(found, 4);
    MP_CHECK_INT(draft[0], COUNT % 20);
    mp_draft_deinit(&index, &budget);
    MP_CHECK_INT(budget.used, 0);
#else
    MP_SKIP("needs the seam build");
#endif
}

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

/* The time of a step is the minimum of its first four measurements. Later measurements correct all times by an eighth
 * of the drift, of at most 20 %, and their own by another 32nd. The balance starts at two steps, that of a draft model
 * at four, and both grow by 1 % of the decode time. */
MP_TEST(models_speculation_measures_steps) {
    static const uint64_t first[] = {1000, 1200, 900, 2000}, drafted[] = {1500, 1400};
    mp_speculation s;
    mp_speculation_init(&s, MP_SPECULATE_AUTO);
    double balance = 2000, of_model = 4000;
    for (int i = 0; i < 4; i++) {
        mp_speculation_account(&s, 1, 0, 0, first[i]);
        MP_CHECK_NEAR(s.plain[1].ns, i < 2 ? 1000 : 900, 0);
        balance += i < 2 ? 10 : 9;
        of_model += i < 2 ? 10 : 9;
        MP_CHECK_NEAR(s.balance_ns, balance, 1e-9);
        MP_CHECK_NEAR(s.model_balance_ns, of_model, 1e-9);
    }
    for (int i = 0; i < 2; i++) { /* two draft tokens, one accepted: a step saved, and what the two rows cost */
        mp_speculation_account(&s, 1, 2, 1, drafted[i]);
        MP_CHECK_NEAR(s.drafted[3].ns, drafted[i], 0);
        balance += 9 + 900 - ((double)drafted[i] - 900);
        MP_CHECK_NEAR(s.balance_ns, balance, 1e-9);
    }
    mp_speculation_account(&s, 1, 0, 0, 990);
    double plain = 900 * (1 + 0.1 / 8) * (1 + 0.1 / 32), other = 1400 * (1 + 0.1 / 8);
    MP_CHECK_NEAR(s.plain[1].ns, plain, 1e-9);
    MP_CHECK_NEAR(s.drafted[3].ns, other, 1e-9);
    mp_speculation_account(&s, 1, 0, 0, 900000);
    MP_CHECK_NEAR(s.plain[1].ns, plain * (1 + 0.2 / 8) * (1 + 0.2 / 32), 1e-9);
    MP_CHECK_NEAR(s.drafted[3].ns, other * (1 + 0.2 / 8), 1e-9);
    plain = s.plain[1].ns;
    mp_speculation_account(&s, 1, 0, 0, 1);
    MP_CHECK_NEAR(s.plain[1].ns, plain * (1 - 0.2 / 8) * (1 - 0.2 / 32), 1e-9);
    const mp_speculation before = s;
    mp_speculation_account(&s, MP_DRAFT_ROWS + 1, 0, 0, 5000); /* too many rows for drafts: not recorded */
    mp_speculation_account(&s, 1, MP_DRAFT_ROWS, 0, 5000);
    MP_CHECK(memcmp(&s, &before, sizeof s) == 0);
    for (int i = 0; i < 1000; i++)
        mp_speculation_account(&s, 1, 0, 0, (uint64_t)s.plain[1].ns);
    MP_CHECK_NEAR(s.balance_ns, 8 * s.plain[1].ns, 1e-9); /* the most */
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

/* A decision looks ahead only at rows that a pass with drafts may have: here 32, which do not pay. */
MP_TEST(models_speculation_looks_ahead_within_a_pass) {
    enum { SEQUENCES = MP_DRAFT_ROWS / 2 };
    mp_draft draft[SEQUENCES] = {0}, *list[SEQUENCES];
    mp_speculation s;
    mp_speculation_init(&s, MP_SPECULATE_AUTO);
    for (int i = 0; i < SEQUENCES; i++) {
        draft[i].of_model = true;
        list[i] = &draft[i];
    }
    for (int i = 0; i < MP_ODDS; i++)
        s.odds[i] = 0.9f;
    s.opened = true;
    s.plain[SEQUENCES] = (mp_pace){1000, 4};
    s.model_passes[SEQUENCES] = (mp_pace){1, 4};
    s.drafted[MP_DRAFT_ROWS] = (mp_pace){1100, 4};
    MP_CHECK(mp_speculation_continue_model(&s, list, SEQUENCES, SEQUENCES, 1000));
    s.drafted[MP_DRAFT_ROWS].ns = 100000;
    MP_CHECK(!mp_speculation_continue_model(&s, list, SEQUENCES, SEQUENCES, 1000));
}

/* ---- with a draft model ------------------------------------------------------------------------------------------ */

/* Like gain(), with a draft model and without look-up. pass_ns: time of a pass of the draft model. The draft model
 * is confident in a token with probability w->found; the model accepts w->accepted of these tokens and 15 % of the
 * others. */
static double model_gain(mp_speculation *s, const world *w, double pass_ns, int steps, mp_test_random *random) {
    mp_draft draft[MP_DRAFT_ROWS] = {0};
    mp_draft *list[MP_DRAFT_ROWS];
    const int n = w->sequences;
    double ns = 0, tokens = 0;
    for (int step = 0; step < steps; step++) {
        int checked = 0, accepted = 0;
        bool open = mp_speculation_open(s, n, n), attempt;
        for (int i = 0; i < n; i++) {
            draft[i].count = 0;
            draft[i].of_model = false;
            list[i] = &draft[i];
        }
        attempt = open && !(mp_speculation_model_gain(s, list, n, n, 1000 * 1000) > 1);
        if (open && (!attempt || mp_speculation_may_try_model(s, n)))
            do {
                for (int i = 0; i < n; i++) {
                    draft[i].of_model = true;
                    draft[i].confidence[draft[i].count] = mp_test_random_float(random, 0, 1) < w->found ? 4 : 1;
                    mp_speculation_model_token(s, &draft[i], draft[i].count++);
                }
                const double noise = 0.95 + 0.1 * mp_test_random_float(random, 0, 1);
                mp_speculation_model_pass(s, n, (uint64_t)(pass_ns * noise));
                ns += pass_ns;
            } while (!attempt && mp_speculation_continue_model(s, list, n, n, 1000 * 1000));
        if (open)
            mp_speculation_choose(s, list, n, n, n, 1000 * 1000);
        for (int i = 0; i < n; i++) {
            checked += draft[i].count;
            for (int t = 0; t < draft[i].count; t++) {
                bool hit = mp_test_random_float(random, 0, 1) < (draft[i].confidence[t] == 4 ? w->accepted : 0.15);
                mp_speculation_learn(s, &draft[i], t, hit);
                if (!hit)
                    break;
                accepted++;
            }
        }
        MP_CHECK(n + checked <= MP_DRAFT_ROWS);
        double took = cost(w, n + checked);
        mp_speculation_account(s, n, checked, accepted,
                               (uint64_t)(took * (0.95 + 0.1 * mp_test_random_float(random, 0, 1))));
        ns += took;
        tokens += n + accepted;
    }
    return tokens / ns / (n / cost(w, n));
}

MP_TEST(models_speculation_uses_a_draft_model_where_it_pays) {
    static const struct {
        world w;
        double pass_ns, least;
    } cases[] = {
        /* code, prose, noise, for one and several sequences; a draft model as slow as the model; rows as slow as
         * passes */
        {{1e7, 1e6, 0.98, 0.95, 1}, 3e6, 1.7}, {{1e7, 1e6, 0.9, 0.4, 1}, 3e6, 0.97},
        {{1e7, 1e6, 0.1, 0.2, 1}, 3e6, 0.97},
        {{1e7, 1e6, 0.98, 0.95, 4}, 3e6, 1.4}, {{1e7, 1e6, 0.1, 0.2, 4}, 3e6, 0.97},
        {{1e7, 1e6, 0.98, 0.95, 1}, 1e7, 0.97}, {{1e6, 1e6, 0.98, 0.95, 1}, 3e5, 0.97},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mp_test_random random = {i};
        mp_speculation s;
        mp_speculation_init(&s, MP_SPECULATE_AUTO);
        s.model_share = 0.4;
        double early = model_gain(&s, &cases[i].w, cases[i].pass_ns, 300, &random);
        double late = model_gain(&s, &cases[i].w, cases[i].pass_ns, 3000, &random);
        if (early < fmin(0.96, cases[i].least) || late < cases[i].least)
            MP_FAIL("case %zu: %.3f, then %.3f of the speed without drafts, at least %.3f expected", i, early, late,
                    cases[i].least);
    }
}

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

/* If all drafts are accepted, a step yields up to 16 tokens instead of one, and the engine expects more of drafts. */
MP_TEST(models_speculation_saves_passes) {
    static const mp_dtype types[] = {MP_Q8_0};
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec(types, 1, 52), MP_COMPUTE_AUTO, 1);
    const mp_text_args args = {.n_prompt = PROMPT, .n_choices = 1, .sampling = {.temperature = 1, .top_p = 1,
                               .repetition_penalty = 1, .max_tokens = ANSWER, .logprobs = -1, .ignore_eos = true}};
    plain_answer answer;
    tiny_job job;
    tiny_speculate(tiny.engine, MP_SPECULATE_OFF, NULL, NULL);
    ask(&tiny, &job, &args);
    MP_CHECK_INT(tiny.engine->work.passes, ANSWER); /* one pass for the prompt, then one per token */
    MP_CHECK_INT(tiny.engine->work.rows, PROMPT + ANSWER - 1);
    for (int t = 0; t < ANSWER; t++)
        answer.tokens[t] = job.call->choices[0].tokens[t].id;
    mp_request_destroy(&job.call->base);
    tiny_speculate(tiny.engine, MP_SPECULATE_ALWAYS, propose_known, &answer);
    tiny_trim(&tiny);
    mp_step_work before = tiny.engine->work;
    const float odds = sum_of_odds(tiny.engine);
    ask(&tiny, &job, &args);
    MP_CHECK(sum_of_odds(tiny.engine) > odds);
    MP_CHECK_INT(tiny.engine->work.passes - before.passes, 4); /* yielding 1 (prompt), 16, 16 and 7 tokens */
    MP_CHECK_INT(tiny.engine->work.draft_tokens - before.draft_tokens, 36);
    MP_CHECK_INT(tiny.engine->work.accepted_draft_tokens - before.accepted_draft_tokens, 36);
    MP_CHECK_INT(tiny.engine->work.rows - before.rows, PROMPT + ANSWER - 1);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
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

/* Proposals of the test hook count as the longest matches: what they teach is learned for this length alone. */
MP_TEST(models_speculation_learns_from_proposals) {
    static const mp_dtype types[] = {MP_Q8_0};
    const mp_text_args args = {.n_prompt = 20, .n_choices = 1, .sampling = {.top_p = 1, .repetition_penalty = 1,
                               .max_tokens = 12, .logprobs = 0, .ignore_eos = true}};
    tiny_model tiny;
    tiny_job job;
    int32_t wrong = 5;
    tiny_load(&tiny, tiny_decoder_spec(types, 1, 53), MP_COMPUTE_AUTO, 1);
    tiny_speculate(tiny.engine, MP_SPECULATE_ALWAYS, draft_badly, &wrong);
    const mp_speculation *s = &((const mp_text_engine *)tiny.engine)->speculation;
    const mp_speculation before = *s;
    ask(&tiny, &job, &args);
    MP_CHECK(tiny.engine->work.draft_tokens > 0);
    for (int row = 0; row < MP_ODDS; row++)
        MP_CHECK((s->odds[row] < before.odds[row]) == (row == MP_ODDS_LOOKUP - 1));
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
