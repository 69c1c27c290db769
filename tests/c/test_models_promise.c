/* The promise for models with states: a prefix that is reused changes no byte. Tokens, log probabilities and logits are
 * those of each request alone, without cache and drafts, for every schedule: slices, batch mates, threads, packed and
 * unpacked weights, preemption, reuse after each snapshot, drafts of all kinds, completions that share a state, evicted
 * snapshots, exhausted memory, requests that end in their prefill, and workers that die. A mixer that has a state gets
 * a row of `models`. */
#include "adapter_fixture.h"
#include "base/sanitize.h"
#include "late_threads.h"
#include "speculation_fixture.h"

static const struct {
    const char *arch;
    int64_t mixers[TINY_LAYERS];
    int window;
} models[] = {
    {"lfm3", {1, 0, 0}, 80}, /* short convolutions, gates of heads, and a window */
    {"lfm2", {2, 0, 2}, 0},  /* gated delta nets */
    {"lfm2", {3, 0, 3}, 0},  /* Mamba-2 */
};

enum {
    ITEMS = 12,
    GHOSTS = 4, /* requests that are cancelled */
    JOBS = ITEMS + GHOSTS,
    CHOICES = 3,
    ANSWER = 24, /* more than a full log */
    LONGEST = 2100,
    ADAPTER = 5,
    END = TINY_VOCAB - 1,
    INFINITE = 7, /* a token with an infinite embedding. Only drafts contain it */
};

static const struct {
    int length, shared; /* tokens of the prompt; those of its start that all prompts have */
    uint64_t tenant;
    int n;
    int32_t adapter;
    bool logits; /* prompt logits */
} rows[ITEMS] = {
    {460, 460, 0, 1, 0, false}, {262, 262, 0, 1, 0, false}, {420, 402, 0, 1, 0, false}, {220, 205, 0, 2, 0, false},
    {200, 150, 0, 3, 0, false}, {200, 127, 0, 1, 0, true},  {192, 192, 0, 1, 0, false}, {193, 193, 0, 2, 0, false},
    {1, 1, 0, 1, 0, false},     {200, 200, 1, 1, 0, false}, {200, 200, 0, 1, 5, false}, {150, 150, 0, 3, 5, true},
};

/* Token `at` of the prompt that all share. Messages end at 130, 200 and 405, so snapshots are kept after 128, 192 and
 * 384 tokens, and before the last token of each prompt. */
static int32_t token_at(mp_test_random *random, int at) {
    const int32_t token = (int32_t)(mp_test_random_u64(random) % END);
    return at == 129 || at == 199 || at == 404 ? END : token == INFINITE ? INFINITE + 1 : token;
}

static void make_prompt(int32_t *prompt, int length, int shared, uint64_t own) {
    mp_test_random everybody = {99}, mine = {own};
    for (int i = 0; i < length; i++)
        prompt[i] = token_at(i < shared ? &everybody : &mine, i);
}

/* Makes a request with the options of `row`. */
static void make_job_of(const tiny_model *tiny, tiny_job *job, const int32_t *prompt, int length, int row) {
    static const int32_t never = INFINITE;
    static const float bias = -1000;
    const mp_text_args args = {
        .n_prompt = length,
        .prompt = prompt,
        .n_choices = rows[row].n,
        .n_bias = 1,
        .bias_ids = &never,
        .bias = &bias,
        .adapter = rows[row].adapter,
        .want_prompt_logits = rows[row].logits,
        .sampling = {.temperature = row % 2 ? 0.9f : rows[row].n > 1 ? 1 : 0, .top_k = row == 3 ? 40 : 0,
                     .top_p = row == 1 ? 0.95f : 1, .repetition_penalty = row == 3 ? 1.2f : 1, .seed = 7,
                     .max_tokens = ANSWER, .logprobs = 9, .ignore_eos = true},
    };
    tiny_job_make(tiny, job, &args, rows[row].tenant);
}

static void make_job(const tiny_model *tiny, tiny_job *job, int row) {
    int32_t prompt[LONGEST];
    make_prompt(prompt, rows[row].length, rows[row].shared, 100 + (uint64_t)row);
    make_job_of(tiny, job, prompt, rows[row].length, row);
}

static void add_adapter(tiny_file *file) {
    static const int64_t id = ADAPTER;
    tiny_ints(file->spec, "mpool.adapters", &id, 1);
    tiny_update(file, 1, "blk.0.ffn_down", 3, TINY_HIDDEN, TINY_FFN, 1);
    tiny_update(file, 1, "blk.1.attn_q", 2, TINY_HIDDEN, TINY_HIDDEN, 1);
}

static void load(tiny_model *tiny, int model, int threads) {
    static const mp_dtype types[] = {MP_F32};
    const tiny_kind kind = {.arch = models[model].arch, .mixers = models[model].mixers, .context = 2 * LONGEST,
                            .window = models[model].window, .more = add_adapter};
    tiny_load(tiny, tiny_decoder_spec_as(&kind, types, 1, 62, INFINITE), MP_COMPUTE_F32, threads);
}

static mp_text_engine *engine_of(const tiny_model *tiny) { return (mp_text_engine *)tiny->engine; }

/* ---- drafts ------------------------------------------------------------------------------------------------------ */

typedef enum draft_kind { LOOKED_UP, RIGHT, WRONG, MIXED, DRAFT_KINDS } draft_kind;

typedef struct schedule {
    tiny_model *tiny;
    mp_test_random random;
    tiny_job jobs[JOBS];
    int row[JOBS];
    draft_kind drafts;
    const int32_t (*answers)[CHOICES][ANSWER];
} schedule;

/* How often each event of the promise has happened. */
typedef struct happened {
    int full_accepted, all_rejected, partly_accepted, infinite, shared, preempted, deaths, ghosts, waits, evicted;
    int hits[LONGEST / MP_KV_BLOCK]; /* requests by reused blocks */
} happened;
static happened seen;

static uint64_t below(mp_test_random *random, uint64_t n) { return mp_test_random_u64(random) % n; }

static int propose(void *arg, const mp_item *item, int choice, int32_t *draft, int most) {
    schedule *s = arg;
    const tiny_job *job = (const tiny_job *)((const uint8_t *)item - offsetof(tiny_job, item));
    const int32_t *answer = s->answers[s->row[job - s->jobs]][choice];
    const int at = (int)job->call->choices[choice].token_count;
    const int count = s->drafts == MIXED ? 1 + (int)below(&s->random, (uint64_t)most) : most;
    MP_CHECK(at + count < ANSWER);
    for (int i = 0; i < count; i++) {
        const bool wrong = s->drafts == WRONG ? i == 0 : s->drafts == MIXED && below(&s->random, 5) == 0;
        draft[i] = wrong ? (answer[at + i] + 1) % INFINITE : answer[at + i];
    }
    if (s->drafts == WRONG && below(&s->random, 8) == 0)
        draft[count - 1] = INFINITE;
    return count;
}

/* ---- one request alone ------------------------------------------------------------------------------------------- */

static void run_alone(tiny_model *tiny, uint64_t *hashes, int32_t (*answers)[CHOICES][ANSWER]) {
    tiny_speculate(tiny->engine, MP_SPECULATE_OFF, NULL, NULL);
    for (int i = 0; i < ITEMS; i++) {
        tiny_job job;
        tiny_trim(tiny);
        make_job(tiny, &job, i);
        tiny_job_admit(tiny, &job);
        tiny_job_finish(tiny, &job);
        MP_CHECK_INT(job.call->cached_tokens, 0);
        hashes[i] = tiny_job_hash(&job);
        for (int c = 0; c < rows[i].n; c++)
            for (int t = 0; t < ANSWER; t++)
                answers[i][c][t] = job.call->choices[c].tokens[t].id;
        mp_request_destroy(&job.call->base);
    }
    tiny_trim(tiny);
}

/* ---- random schedules -------------------------------------------------------------------------------------------- */

/* Gives a new request the tokens of one whose process has died, as csrc/isolation does. */
static void carry_over(tiny_job *to, const tiny_job *from) {
    mp_text_request *a = to->call;
    const mp_text_request *b = from->call;
    const size_t tops = ANSWER * (size_t)b->sampling.logprobs;
    if (b->want_prompt_logits)
        memcpy(a->prompt_logits, b->prompt_logits, (size_t)b->n_prompt * TINY_VOCAB * sizeof(float));
    a->prompt_done_ns = b->prompt_done_ns;
    a->cached_tokens = b->cached_tokens;
    to->item.cursor = from->item.cursor;
    for (int c = 0; c < b->n_choices; c++) {
        mp_choice *x = &a->choices[c];
        const mp_choice *y = &b->choices[c];
        memcpy(x->tokens, y->tokens, ANSWER * sizeof *x->tokens);
        memcpy(x->top_ids, y->top_ids, tops * sizeof *x->top_ids);
        memcpy(x->top_logprobs, y->top_logprobs, tops * sizeof *x->top_logprobs);
        x->token_count = y->token_count;
        x->finish = y->finish;
        x->stop_index = y->stop_index;
    }
}

static void end_job(tiny_model *tiny, tiny_job *job) {
    tiny->engine->ops->retire(tiny->engine, &job->item);
    mp_request_destroy(&job->call->base);
    job->done = true;
}

/* The engine ends, and a new one takes over its requests: those of the same process, or new ones with their tokens. */
static void replace_engine(schedule *s) {
    tiny_model *tiny = s->tiny;
    const bool process = below(&s->random, 2);
    mp_error error;
    for (int i = 0; i < JOBS; i++) {
        tiny_job *job = &s->jobs[i], next;
        if (job->done || !job->item.state)
            continue;
        if (i >= ITEMS) {
            end_job(tiny, job);
        } else if (process) {
            make_job(tiny, &next, s->row[i]);
            carry_over(&next, job);
            end_job(tiny, job);
            *job = next;
        } else if (job->admitted) {
            tiny->engine->ops->preempt(tiny->engine, &job->item);
            job->admitted = false;
        }
    }
    tiny->engine->ops->destroy(tiny->engine);
    tiny->budget.limit = UINT64_MAX;
    MP_CHECK_OK(tiny->model->ops->engine(tiny->model, &tiny->budget, &tiny->engine, &error), &error);
    seen.deaths++;
}

/* Sequences share a state until the next write, and memory has one copy of each state and snapshot. */
static void check_states(const schedule *s) {
    const mp_states *states = &engine_of(s->tiny)->cache.states;
    const mp_sequence *all[JOBS * CHOICES];
    int n = 0;
    uint64_t distinct = 0;
    for (int i = 0; i < JOBS; i++) {
        const mp_sequence_group *group = s->jobs[i].done ? NULL : s->jobs[i].item.state;
        for (int c = 0; group && c < group->n; c++)
            if (group->seqs[c].cached.state)
                all[n++] = &group->seqs[c];
    }
    for (int i = 0; i < n; i++) {
        uint32_t references = 0;
        int first = i;
        for (int j = n - 1; j >= 0; j--)
            if (all[j]->cached.state == all[i]->cached.state) {
                references++;
                first = j;
                MP_CHECK_INT(all[j]->cached.count, all[i]->cached.count);
            }
        distinct += first == i;
        seen.shared += references > 1;
        MP_CHECK_INT(all[i]->cached.state->references, references);
    }
    MP_CHECK_INT(states->states.bytes, (distinct + states->count) * states->states.slot_bytes);
}

static void note_drafts(const mp_text_engine *engine) {
    for (int i = 0; i < engine->step_count; i++) {
        const mp_step_seq *step = &engine->steps[i];
        if (step->drafts == 0)
            continue;
        MP_CHECK(step->rows + step->drafts <= MP_STATE_LOG);
        seen.full_accepted += step->drafts == MP_STATE_LOG - 1 && step->accepted == step->drafts;
        seen.all_rejected += step->accepted == 0;
        seen.partly_accepted += step->accepted > 0 && step->accepted < step->drafts;
        seen.infinite += step->seq->speculation_off;
    }
}

/* Changes what the schedule of the next step finds: memory, snapshots, packed weights, the engine. */
static void disturb(schedule *s) {
    tiny_model *tiny = s->tiny;
    mp_states *states = &engine_of(tiny)->cache.states;
    uint64_t bytes = 0;
    switch (below(&s->random, 32)) {
    case 0:
        tiny_trim(tiny);
        break;
    case 1: case 2: case 3:
        seen.evicted += mp_snapshot_evict(states, &bytes);
        break;
    case 4: case 5: case 6:
        tiny->budget.limit = tiny->budget.used + below(&s->random, 16) * (states->states.slot_bytes + (8 << 10));
        break;
    case 7:
        tiny->budget.limit = UINT64_MAX;
        engine_of(tiny)->cache.percent = 25;
        break;
    case 8:
        states->percent = below(&s->random, 3) ? 10 : 0;
        break;
    case 10: /* few idle blocks, so that blocks leave before their snapshots */
        tiny->budget.limit = 2 * tiny->budget.used;
        engine_of(tiny)->cache.percent = below(&s->random, 2) ? 25 : 1;
        break;
    case 9:
        tiny->engine->ops->improve(tiny->engine, &tiny->lease);
        break;
    case 11:
        if (below(&s->random, 2) == 0)
            replace_engine(s);
        break;
    default:
        break;
    }
}

/* Admits, preempts and cancels at random. Returns true if the job takes part in the next step. */
static bool joins(schedule *s, int i) {
    tiny_model *tiny = s->tiny;
    tiny_job *job = &s->jobs[i];
    mp_error error;
    if (job->done || below(&s->random, 3) == 0)
        return false;
    if (job->admitted && i >= ITEMS && below(&s->random, 5) == 0) {
        seen.ghosts += !job->call->prompt_done_ns;
        job->item.cancelled = true;
    } else if (job->admitted && below(&s->random, 20) == 0) {
        tiny->engine->ops->preempt(tiny->engine, &job->item);
        job->admitted = false;
        seen.preempted++;
    }
    if (!job->admitted) {
        const mp_status status = tiny->engine->ops->admit(tiny->engine, &job->item, &error);
        MP_CHECK(status == MP_OK || status == MP_MEMORY_EXHAUSTED);
        job->admitted = status == MP_OK;
    }
    return job->admitted;
}

static void run_schedule(schedule *s, uint64_t seed, const uint64_t *expected) {
    tiny_model *tiny = s->tiny;
    int open = JOBS, waits = 0;
    s->random = (mp_test_random){seed};
    for (int i = 0; i < JOBS; i++) {
        s->row[i] = i < ITEMS ? i : (int)below(&s->random, ITEMS);
        make_job(tiny, &s->jobs[i], s->row[i]);
    }
    while (open > 0) {
        mp_plan plan = {0};
        mp_outcome outcomes[MP_PLAN_MAX];
        int which[JOBS];
        disturb(s);
        for (int i = 0; i < JOBS; i++)
            if (joins(s, i)) {
                which[plan.count] = i;
                plan.items[plan.count] = &s->jobs[i].item;
                plan.amount[plan.count++] = 1 + (uint32_t)below(&s->random, below(&s->random, 6) ? 97 : 512);
            }
        s->drafts = (draft_kind)below(&s->random, DRAFT_KINDS);
        tiny_speculate(tiny->engine, below(&s->random, 4) ? MP_SPECULATE_ALWAYS : MP_SPECULATE_OFF,
                       s->drafts == LOOKED_UP ? NULL : propose, s);
        if (plan.count > 0) {
            tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
            note_drafts(engine_of(tiny));
        }
        for (int p = 0; p < plan.count; p++) {
            tiny_job *job = &s->jobs[which[p]];
            if (outcomes[p] == MP_OUTCOME_DONE && which[p] < ITEMS) {
                job->done = true;
                tiny->engine->ops->retire(tiny->engine, &job->item);
                seen.hits[job->call->cached_tokens / MP_KV_BLOCK]++;
                waits = 0;
            } else if (outcomes[p] == MP_OUTCOME_DONE || job->item.cancelled) {
                end_job(tiny, job);
            } else if (outcomes[p] == MP_OUTCOME_WAIT_MEMORY) {
                seen.waits++;
                tiny->engine->ops->preempt(tiny->engine, &job->item);
                job->admitted = false;
                tiny->budget.limit = ++waits > 40 ? UINT64_MAX : tiny->budget.limit;
            } else {
                MP_CHECK_INT(outcomes[p], MP_OUTCOME_MORE);
            }
        }
        check_states(s);
        open = 0;
        for (int i = 0; i < JOBS; i++)
            open += !s->jobs[i].done;
    }
    for (int i = 0; i < ITEMS; i++) {
        if (tiny_job_hash(&s->jobs[i]) != expected[i])
            MP_FAIL("request %d differs under seed %llu with %d threads", i, (unsigned long long)seed,
                    tiny->lease.threads);
        mp_request_destroy(&s->jobs[i].call->base);
    }
    tiny->budget.limit = UINT64_MAX;
}

MP_TEST_SECONDS(models_promise_of_every_schedule, 300) {
    int borders = 0;
    seen = (happened){0};
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        uint64_t expected[ITEMS];
        int32_t answers[ITEMS][CHOICES][ANSWER];
        for (int first = MP_SANITIZED ? 2 : 1, threads = first; threads <= (MP_SANITIZED ? 2 : 3); threads++) {
            tiny_model tiny;
            load(&tiny, (int)m, threads);
            if (threads == first)
                run_alone(&tiny, expected, answers);
            schedule s = {.tiny = &tiny, .answers = answers};
            for (uint64_t seed = 1; seed <= (uint64_t)mp_test_rounds(m ? 1 : 2); seed++) {
                late_thread_of(seed == 1 ? threads : 1);
                run_schedule(&s, 10 * seed + (uint64_t)threads, expected);
            }
            late_thread(-1);
            tiny_trim(&tiny);
            MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), 0); /* no reference leaked */
            tiny_unload(&tiny);
        }
    }
    if (MP_SANITIZED) /* fewer schedules: not everything happens */
        return;
    MP_CHECK(seen.full_accepted && seen.all_rejected && seen.partly_accepted && seen.infinite);
    MP_CHECK(seen.shared && seen.preempted && seen.deaths && seen.ghosts && seen.waits && seen.evicted);
    for (int blocks = 1; blocks < LONGEST / MP_KV_BLOCK; blocks++)
        borders += seen.hits[blocks] > 0;
    MP_CHECK(borders >= 3);
}

/* ---- each snapshot ----------------------------------------------------------------------------------------------- */

/* Runs a request to its end, and returns its hash. */
static uint64_t run(tiny_model *tiny, tiny_job *job, int *cached) {
    tiny_job_admit(tiny, job);
    tiny_job_finish(tiny, job);
    const uint64_t hash = tiny_job_hash(job);
    *cached = job->call->cached_tokens;
    mp_request_destroy(&job->call->base);
    return hash;
}

static uint64_t run_prompt(tiny_model *tiny, int shared, int length, int row, int *cached) {
    int32_t prompt[LONGEST];
    tiny_job job;
    make_prompt(prompt, length, shared, 50);
    make_job_of(tiny, &job, prompt, length, row);
    return run(tiny, &job, cached);
}

/* Checks that a prompt reuses `expected` tokens, with the bytes that it has without a cache. Leaves no cache. */
static void check_reuse(tiny_model *tiny, int shared, int length, int row, int expected) {
    int cached, none;
    const uint64_t hash = run_prompt(tiny, shared, length, row, &cached);
    tiny->budget.limit = UINT64_MAX;
    tiny_trim(tiny);
    if (run_prompt(tiny, shared, length, row, &none) != hash)
        MP_FAIL("a prompt with %d common tokens differs after %d reused ones", shared, cached);
    MP_CHECK_INT(none, 0);
    if (expected >= 0 && cached != expected)
        MP_FAIL("a prompt with %d common tokens reuses %d, expected %d", shared, cached, expected);
    tiny_trim(tiny);
}

/* A first prompt of 460 tokens leaves snapshots after 128, 384 and 448; one of 300 after 128, 192 and 256. */
static void check_each_snapshot(tiny_model *tiny) {
    static const struct {
        int first, shared, length, row, cached;
    } cases[] = {
        {460, 460, 460, 0, 448}, {460, 449, 460, 1, 448}, {460, 447, 460, 0, 384}, {460, 385, 400, 4, 384},
        {460, 383, 460, 1, 128}, {460, 128, 129, 0, 128}, {460, 127, 460, 0, 0},   {300, 300, 300, 0, 256},
        {300, 255, 300, 3, 192}, {300, 191, 200, 0, 128},
        {460, 460, 460, 9, 0}, {460, 460, 460, 10, 0}, /* another tenant, another adapter */
    };
    int cached;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i += MP_TEST_SHARE) {
        run_prompt(tiny, cases[i].first, cases[i].first, 0, &cached);
        check_reuse(tiny, cases[i].shared, cases[i].length, cases[i].row, cases[i].cached);
    }
}

/* Without the snapshot of the longest prefix, the one before it serves. The one that saves fewest tokens leaves first.
 */
static void check_evictions(tiny_model *tiny) {
    static const int left[] = {384, 384, 0};
    uint64_t bytes = 0;
    int cached;
    for (int evicted = 1; evicted <= 3; evicted++) {
        run_prompt(tiny, 460, 460, 0, &cached);
        for (int i = 0; i < evicted; i++)
            MP_CHECK(mp_snapshot_evict(&engine_of(tiny)->cache.states, &bytes));
        check_reuse(tiny, 460, 460, 0, left[evicted - 1]);
    }
}

/* A block takes its snapshot along: the next prompt gets the ids of evicted blocks. */
static void check_evicted_blocks(tiny_model *tiny) {
    static const int lengths[] = {460, 440, 200}, left[] = {448, 384, 128};
    mp_prefix_cache *cache = &engine_of(tiny)->cache;
    int cached;
    for (int i = 0; i < 3; i++) {
        cache->percent = 1; /* one idle block */
        tiny->budget.limit = 2 * tiny->budget.used;
        run_prompt(tiny, 460, 460, 0, &cached);
        tiny->budget.limit = UINT64_MAX;
        cache->percent = 25;
        run_prompt(tiny, 0, 460, 0, &cached);
        check_reuse(tiny, 0, lengths[i], 0, left[i]);
    }
}

/* The memory of a new state is that of evicted snapshots: maybe of the one that the request was to reuse. */
static void check_full_memory(tiny_model *tiny) {
    mp_states *states = &engine_of(tiny)->cache.states;
    const size_t step = states->states.slot_bytes / 4 * 3;
    uint64_t bytes = 0;
    int cached;
    for (size_t room = 0; room < 5 * step; room += MP_TEST_SHARE * step) {
        run_prompt(tiny, 0, 400, 0, &cached); /* idle blocks that the request can take */
        while (mp_snapshot_evict(states, &bytes))
            ;
        run_prompt(tiny, 460, 460, 0, &cached);
        tiny->budget.limit = tiny->budget.used + room;
        states->percent = 100;
        check_reuse(tiny, 460, 460, 0, -1);
    }
}

/* A completion passes token 2,048 with drafts: a snapshot is kept there all the same, and the next turn begins there.
 */
static void check_long_completion(tiny_model *tiny) {
    enum { PROMPT = 2030 };
    static const int32_t answers[ITEMS][CHOICES][ANSWER]; /* all drafts are wrong */
    schedule s = {.tiny = tiny, .answers = answers, .drafts = WRONG};
    int32_t prompt[LONGEST];
    uint64_t hashes[2];
    make_prompt(prompt, PROMPT, PROMPT, 0);
    make_job_of(tiny, &s.jobs[0], prompt, PROMPT, 0);
    tiny_speculate(tiny->engine, MP_SPECULATE_ALWAYS, propose, &s);
    tiny_job_admit(tiny, &s.jobs[0]);
    tiny_job_finish(tiny, &s.jobs[0]);
    tiny_speculate(tiny->engine, MP_SPECULATE_OFF, NULL, NULL);
    for (int t = 0; t < ANSWER; t++)
        prompt[PROMPT + t] = s.jobs[0].call->choices[0].tokens[t].id;
    mp_request_destroy(&s.jobs[0].call->base);
    for (int again = 0; again < 2; again++) {
        tiny_job next;
        int cached;
        make_job_of(tiny, &next, prompt, PROMPT + ANSWER, 1);
        hashes[again] = run(tiny, &next, &cached);
        MP_CHECK_INT(cached, again ? 0 : 2048);
        tiny_trim(tiny);
    }
    MP_CHECK(hashes[0] == hashes[1]);
}

MP_TEST_SECONDS(models_promise_of_each_snapshot, 120) {
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        tiny_model tiny;
        load(&tiny, (int)m, 1);
        check_each_snapshot(&tiny);
        if (m == 0) { /* the same for all mixers */
            check_evictions(&tiny);
            check_evicted_blocks(&tiny);
            check_full_memory(&tiny);
        }
        if (!MP_SANITIZED)
            check_long_completion(&tiny);
        MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), 0);
        tiny_unload(&tiny);
    }
}
