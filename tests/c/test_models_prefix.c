/* Prefix reuse: which blocks a request finds, and which stay in tight memory; reuse changes no result. */
#include <unistd.h>

#include "base/options.h"
#include "base/sanitize.h"
#include "model_fixture.h"
#include "models/generation/prefix_cache.h"

enum { PROMPT = 200, ANSWER = 20 };

/* ---- the cache alone --------------------------------------------------------------------------------------------- */

typedef struct bench {
    mp_budget budget;
    mp_kv_store store;
    mp_prefix_cache cache;
    int32_t tokens[8 * MP_KV_BLOCK];
} bench;

static void set_up(bench *b, uint32_t percent) {
    mp_test_random random = {5};
    *b = (bench){.budget = {.limit = UINT64_MAX}};
    b->store = (mp_kv_store){.heads = 1, .k_dim = 16, .v_dim = 16};
    const mp_kv_layout layout = mp_kv_lay_out(&b->store, 1, MP_I16);
    mp_prefix_init(&b->cache, &layout, &b->budget, percent);
    for (size_t i = 0; i < sizeof b->tokens / sizeof *b->tokens; i++)
        b->tokens[i] = (int32_t)(mp_test_random_u64(&random) % 1000);
}

static void take_down(bench *b) {
    mp_prefix_deinit(&b->cache);
    MP_CHECK_INT(b->budget.used, 0);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), 0);
}

/* Publish a sequence of the first n blocks of `tokens`. ids: [n], receives the block ids. */
static mp_prefix_chain publish(bench *b, uint64_t tenant, const int32_t *tokens, int n, uint32_t *ids) {
    mp_error error;
    mp_prefix_chain chain = mp_prefix_begin(&b->cache, (mp_cache_scope){tenant, false});
    for (int i = 0; i < n; i++) {
        MP_CHECK_OK(mp_prefix_take(&b->cache, &ids[i], &error), &error);
        mp_prefix_publish(&b->cache, &chain, tokens + i * MP_KV_BLOCK, &ids[i]);
    }
    MP_CHECK_INT(chain.count, n);
    return chain;
}

static void give(bench *b, const uint32_t *ids, int n) {
    while (n > 0)
        mp_prefix_unref_block(&b->cache, ids[--n]);
}

/* Keys that collide are told apart by their tokens (0), their predecessors (1) and their tenants (2). */
MP_TEST(models_prefix_survives_collisions) {
    bench b;
    uint32_t ids[2], id;
    mp_error error;
    set_up(&b, 25);
    publish(&b, 0, b.tokens, 2, ids);
    for (int kind = 0; kind < 3; kind++) {
        int32_t tokens[MP_KV_BLOCK];
        memcpy(tokens, b.tokens + (kind == 1 ? MP_KV_BLOCK : 0), sizeof tokens);
        tokens[17] += kind == 0;
        mp_prefix_chain chain = mp_prefix_begin(&b.cache, (mp_cache_scope){kind == 2, false});
        chain.key = (mp_cache_key){chain.scope, b.cache.known[ids[kind == 1]].key.hash};
        chain.key_known = true;
        MP_CHECK(!mp_prefix_find(&b.cache, &chain, tokens, &id));
        MP_CHECK_OK(mp_prefix_take(&b.cache, &id, &error), &error);
        uint32_t own = id;
        mp_prefix_publish(&b.cache, &chain, tokens, &id); /* both blocks can be in the cache */
        MP_CHECK_INT(id, own);
        MP_CHECK_INT(chain.count, 1);
        chain = mp_prefix_begin(&b.cache, (mp_cache_scope){kind == 2, false});
        chain.key = b.cache.known[own].key;
        chain.key_known = true;
        MP_CHECK(mp_prefix_find(&b.cache, &chain, tokens, &id));
        MP_CHECK_INT(id, own);
    }
    take_down(&b);
}

/* Random sequences of operations, compared with a simple model of the blocks that must be found. */
MP_TEST_SECONDS(models_prefix_random_use, 60) {
    enum { HELD = 12, STEPS = 20000, DEEP = 5 };
    bench b;
    mp_test_random random = {11};
    mp_error error;
    struct held {
        int n;
        uint32_t ids[DEEP], tenant;
        int32_t tokens[DEEP * MP_KV_BLOCK];
    } held[HELD] = {0};
    set_up(&b, 50);
    b.budget.limit = 60 * mp_prefix_block_bytes(&b.cache);
    for (int step = 0; step < STEPS; step++) {
        struct held *h = &held[mp_test_random_u64(&random) % HELD];
        if (h->n) {
            give(&b, h->ids, h->n);
            h->n = 0;
        } else {
            int n = 1 + (int)(mp_test_random_u64(&random) % DEEP);
            h->tenant = (uint32_t)(mp_test_random_u64(&random) % 2);
            for (int i = 0; i < n * MP_KV_BLOCK; i++) /* a tree with two branches at each block */
                h->tokens[i] = i % MP_KV_BLOCK ? i : (int32_t)(mp_test_random_u64(&random) % 2);
            mp_prefix_chain chain = mp_prefix_begin(&b.cache, (mp_cache_scope){h->tenant, false});
            while (h->n < n && mp_prefix_find(&b.cache, &chain, h->tokens + h->n * MP_KV_BLOCK, &h->ids[h->n]))
                h->n++;
            /* blocks of a held sequence must be found, with the same ids */
            for (int o = 0; o < HELD; o++)
                for (int i = 0; &held[o] != h && held[o].tenant == h->tenant && i < held[o].n && i < n; i++) {
                    if (memcmp(held[o].tokens, h->tokens, (size_t)(i + 1) * MP_KV_BLOCK * sizeof(int32_t)) != 0)
                        break;
                    MP_CHECK(i < h->n && held[o].ids[i] == h->ids[i]);
                }
            for (; h->n < n; h->n++) {
                if (mp_prefix_take(&b.cache, &h->ids[h->n], &error) != MP_OK)
                    break;
                mp_prefix_publish(&b.cache, &chain, h->tokens + h->n * MP_KV_BLOCK, &h->ids[h->n]);
            }
        }
        if (mp_test_random_u64(&random) % 500 == 0)
            mp_prefix_trim(&b.cache);
        if (mp_test_random_u64(&random) % 50 == 0)
            mp_prefix_shrink(&b.cache, 3 * mp_prefix_block_bytes(&b.cache));
        /* every block is free, idle or in use, and memory is in a block or spare */
        uint32_t used = 0;
        for (uint32_t id = 0; id < b.cache.kv.blocks; id++) {
            uint32_t references = 0;
            for (int o = 0; o < HELD; o++)
                for (int i = 0; i < held[o].n; i++)
                    references += held[o].ids[i] == id;
            used += references > 0;
            if (references > 0)
                MP_CHECK_INT(b.cache.kv.references[id], references + 1);
        }
        MP_CHECK_INT(used + b.cache.idle[0].count, b.cache.counters.blocks);
        MP_CHECK_INT(used + b.cache.idle[0].count + b.cache.kv.free_count, b.cache.kv.blocks);
        MP_CHECK_INT(b.budget.used, (used + b.cache.idle[0].count + b.cache.kv.part[0].spare_count) *
                                        mp_prefix_block_bytes(&b.cache));
    }
    MP_CHECK(b.cache.counters.evicted > 100);
    take_down(&b);
}

/* Returns the largest number of blocks, at most `most`, after which all window parts that the next row reads exist. */
static uint32_t reach_of(const mp_prefix_cache *cache, const uint32_t *ids, uint32_t most) {
    for (uint32_t end = most; end > 0; end--) {
        bool complete = true;
        for (int p = 1; p < cache->kv.layout.parts; p++)
            for (int b = mp_kv_first_seen(cache->kv.layout.window[p], (int64_t)end * MP_KV_BLOCK); b < (int)end; b++)
                complete &= mp_kv_has(&cache->kv, p, ids[b]);
        if (complete)
            return end;
    }
    return 0;
}

/* Two windows, of which a random part of the blocks is evicted: a request continues only where both still have all that
 * its next row reads. */
MP_TEST(models_prefix_reach_needs_every_window) {
    enum { DEEP = 8, ENTRIES = 2 * DEEP, ROUNDS = 400 };
    mp_kv_store stores[] = {{.heads = 1, .k_dim = 16, .v_dim = 16},
                            {.heads = 1, .k_dim = 16, .v_dim = 16, .window = 100},
                            {.heads = 1, .k_dim = 16, .v_dim = 16, .window = 200}};
    const mp_kv_layout layout = mp_kv_lay_out(stores, 3, MP_I16);
    mp_test_random random = {23};
    bench b;
    uint32_t ids[DEEP];
    int partial = 0;
    set_up(&b, 0);
    mp_prefix_deinit(&b.cache);
    mp_prefix_init(&b.cache, &layout, &b.budget, 1);
    for (int round = 0; round < ROUNDS; round++) {
        int order[ENTRIES];
        mp_prefix_chain chain;
        publish(&b, 0, b.tokens, DEEP, ids);
        for (int i = 0; i < ENTRIES; i++) {
            const int at = (int)(mp_test_random_u64(&random) % (uint64_t)(i + 1));
            order[i] = order[at];
            order[at] = i;
        }
        b.budget.limit = 100 * layout.bytes[1] * (mp_test_random_u64(&random) % (ENTRIES + 1));
        for (int i = 0; i < ENTRIES; i++) /* the limit keeps the last ones */
            mp_prefix_unref_part(&b.cache, 1 + order[i] % 2, ids[order[i] / 2]);
        for (uint32_t most = 1; most <= DEEP; most++) {
            const uint32_t expected = reach_of(&b.cache, ids, most);
            chain = mp_prefix_begin(&b.cache, (mp_cache_scope){0});
            MP_CHECK_INT(mp_prefix_reach(&b.cache, &chain, b.tokens, most), expected);
            partial += expected > 0 && expected < most;
        }
        b.budget.limit = UINT64_MAX;
        give(&b, ids, DEEP);
        mp_prefix_trim(&b.cache);
    }
    MP_CHECK(partial > ROUNDS / 10);
    take_down(&b);
}

/* ---- a decoder --------------------------------------------------------------------------------------------------- */

static const mp_dtype types[] = {MP_Q8_0, MP_Q4_K};

typedef struct job_spec { /* a request; its first `shared` tokens are the start of a common prompt */
    int length, shared, n, answer;
    uint64_t tenant;
    bool logits;
} job_spec;

static void make(const tiny_model *tiny, tiny_job *job, job_spec spec) {
    mp_test_random common = {99}, own = {1000 + (uint64_t)(spec.length * 1000 + spec.shared)};
    int32_t prompt[TINY_CONTEXT];
    for (int i = 0; i < spec.length; i++)
        prompt[i] = (int32_t)(mp_test_random_u64(i < spec.shared ? &common : &own) % TINY_VOCAB);
    mp_text_args args = {
        .n_prompt = spec.length, .prompt = prompt, .n_choices = spec.n ? spec.n : 1, .want_prompt_logits = spec.logits,
        .sampling = {.temperature = 0.8f, .top_p = 1, .repetition_penalty = 1, .seed = 3,
                     .max_tokens = spec.answer ? spec.answer : ANSWER, .logprobs = 5, .ignore_eos = true},
    };
    tiny_job_make(tiny, job, &args, spec.tenant);
}

/* Load a model twice; the prefix cache of `reference` is off. */
static void load(tiny_model *tiny, tiny_model *reference) {
    mp_error error;
    tiny_load(tiny, tiny_decoder_spec(types, 2, 51), MP_COMPUTE_AUTO, 1);
    setenv("MPOOL_PREFIX_PERCENT", "0", 1);
    MP_CHECK_OK(mp_options_init(&error), &error);
    tiny_load(reference, tiny_decoder_spec(types, 2, 51), MP_COMPUTE_AUTO, 1);
    unsetenv("MPOOL_PREFIX_PERCENT");
    MP_CHECK_OK(mp_options_init(&error), &error);
}

static void unload(tiny_model *tiny, tiny_model *reference) {
    MP_CHECK_INT(reference->engine->prefix->hits, 0);
    MP_CHECK_INT(reference->engine->prefix->blocks, 0);
    tiny_trim(tiny);
    tiny_trim(reference);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), 0); /* no reference leaked */
    tiny_unload(reference);
    tiny_unload(tiny);
}

static uint64_t alone(tiny_model *reference, job_spec spec) {
    tiny_job job;
    make(reference, &job, spec);
    tiny_job_admit(reference, &job);
    tiny_job_finish(reference, &job);
    MP_CHECK_INT(job.call->cached_tokens, 0);
    uint64_t hash = tiny_job_hash(&job);
    mp_request_destroy(&job.call->base);
    return hash;
}

/* Check that the job is done, that `cached` prompt tokens came from the cache, and that its result equals the result
 * without a cache. */
static void check_job(tiny_model *reference, tiny_job *job, job_spec spec, int cached) {
    MP_CHECK(job->done);
    MP_CHECK_INT(job->call->cached_tokens, cached);
    if (tiny_job_hash(job) != alone(reference, spec))
        MP_FAIL("a prompt of %d tokens of which %d were cached gives another result", spec.length, cached);
    mp_request_destroy(&job->call->base);
}

static void run(tiny_model *tiny, tiny_model *reference, job_spec spec, int cached) {
    tiny_job job;
    make(tiny, &job, spec);
    tiny_job_admit(tiny, &job);
    tiny_job_finish(tiny, &job);
    check_job(reference, &job, spec, cached);
}

MP_TEST_SECONDS(models_prefix_hits, 60) {
    tiny_model tiny, reference;
    load(&tiny, &reference);
    const mp_prefix_counters *counters = tiny.engine->prefix;
    run(&tiny, &reference, (job_spec){.length = PROMPT, .shared = 190}, 0);
    MP_CHECK_INT(counters->blocks, (PROMPT + ANSWER - 1) / 64);
    run(&tiny, &reference, (job_spec){.length = PROMPT, .shared = 190}, 192);     /* the same prompt again */
    run(&tiny, &reference, (job_spec){.length = PROMPT + 9, .shared = 190}, 128); /* differs inside the third block */
    run(&tiny, &reference, (job_spec){.length = PROMPT, .shared = 64}, 64);        /* at the edge of a block */
    run(&tiny, &reference, (job_spec){.length = PROMPT, .shared = 63}, 0);
    run(&tiny, &reference, (job_spec){.length = 129, .shared = 129}, 128);
    run(&tiny, &reference, (job_spec){.length = 128, .shared = 128}, 64);          /* the last token is computed */
    run(&tiny, &reference, (job_spec){.length = PROMPT, .shared = 190, .n = 3}, 192);
    run(&tiny, &reference, (job_spec){.length = PROMPT, .shared = 190, .tenant = 1}, 0);
    run(&tiny, &reference, (job_spec){.length = PROMPT, .shared = 190, .tenant = 1}, 192);
    uint64_t hits = counters->hits;
    run(&tiny, &reference, (job_spec){.length = PROMPT, .shared = 190, .logits = true}, 0); /* all rows needed */
    MP_CHECK_INT(counters->hits, hits);
    MP_CHECK_INT(hits, 7);
    MP_CHECK_INT(counters->tokens, 192 + 128 + 64 + 128 + 64 + 192 + 192);
    /* trim frees all cached blocks */
    uint64_t before = mp_alloc_bytes(MP_TAG_KV);
    uint64_t freed = tiny_trim(&tiny);
    MP_CHECK(before > 0 && freed >= before / 2);
    MP_CHECK_INT(counters->blocks, 0);
    run(&tiny, &reference, (job_spec){.length = PROMPT, .shared = 190}, 0);
    unload(&tiny, &reference);
}

/* The next turn of a conversation finds the generated tokens as well. */
MP_TEST_SECONDS(models_prefix_chat_history, 60) {
    tiny_model tiny, reference;
    load(&tiny, &reference);
    tiny_job first, second, plain;
    make(&tiny, &first, (job_spec){.length = 50, .shared = 50, .answer = 100});
    tiny_job_admit(&tiny, &first);
    tiny_job_finish(&tiny, &first);
    int32_t history[170];
    memcpy(history, first.call->prompt, 50 * sizeof *history);
    for (int i = 0; i < 100; i++)
        history[50 + i] = first.call->choices[0].tokens[i].id;
    for (int i = 150; i < 170; i++)
        history[i] = i;
    mp_text_args args = {.n_prompt = 170, .prompt = history, .n_choices = 1,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = ANSWER, .logprobs = 5,
                                      .ignore_eos = true}};
    tiny_job_make(&tiny, &second, &args, 0);
    tiny_job_make(&reference, &plain, &args, 0);
    tiny_job_admit(&tiny, &second);
    tiny_job_finish(&tiny, &second);
    MP_CHECK_INT(second.call->cached_tokens, 128);
    tiny_job_admit(&reference, &plain);
    tiny_job_finish(&reference, &plain);
    MP_CHECK(tiny_job_hash(&second) == tiny_job_hash(&plain));
    mp_request_destroy(&first.call->base);
    mp_request_destroy(&second.call->base);
    mp_request_destroy(&plain.call->base);
    unload(&tiny, &reference);
}

/* A request shares the blocks of another request that is still running: decoding, prefilling, or further in the same
 * prompt. */
MP_TEST_SECONDS(models_prefix_of_running_requests, 60) {
    tiny_model tiny, reference;
    load(&tiny, &reference);
    job_spec what = {.length = PROMPT, .shared = 190};
    tiny_job a, b, c;
    make(&tiny, &a, what);
    make(&tiny, &b, what);
    make(&tiny, &c, what);
    tiny_job_admit(&tiny, &a);
    tiny_job_admit(&tiny, &b);
    tiny_job_admit(&tiny, &c);
    tiny_job_step(&tiny, &a, 70);
    tiny_job_step(&tiny, &b, 20); /* b shares a's first block and computes 20 tokens of the second */
    MP_CHECK_INT(b.call->cached_tokens, 64);
    tiny_job_step(&tiny, &a, 512);
    MP_CHECK(a.call->prompt_done_ns > 0);
    tiny_job_step(&tiny, &b, 1); /* b replaces its partial block by a's complete one */
    MP_CHECK_INT(b.call->cached_tokens, 64 + 44 + 64);
    tiny_job_step(&tiny, &a, 1);
    tiny_job_finish(&tiny, &b);
    tiny_job_finish(&tiny, &a);
    check_job(&reference, &a, what, 0);
    check_job(&reference, &b, what, 64 + 44 + 64);
    tiny_job_finish(&tiny, &c);
    check_job(&reference, &c, what, 192);
    unload(&tiny, &reference);
}

enum { ANSWERS = 2048 }; /* upper bound of a sequence's bytes outside its blocks; much less than a block */

/* A preempted request releases its shared blocks without affecting other requests, and finds them again. */
MP_TEST_SECONDS(models_prefix_preempted, 60) {
    tiny_model tiny, reference;
    load(&tiny, &reference);
    mp_error error;
    job_spec what = {.length = PROMPT, .shared = 190, .n = 2, .answer = 90};
    tiny_job a, b;
    make(&tiny, &a, what);
    make(&tiny, &b, what);
    tiny_job_admit(&tiny, &a);
    tiny_job_step(&tiny, &a, 512);
    tiny_job_admit(&tiny, &b);
    tiny_job_step(&tiny, &b, 512);
    for (int round = 0; round < 40; round++) {
        tiny_job *job = round % 2 ? &a : &b;
        uint64_t tokens = tiny.engine->prefix->tokens;
        tiny.engine->ops->preempt(tiny.engine, &job->item);
        if (round % 7 == 0)
            tiny_trim(&tiny);
        tiny_job_step(&tiny, round % 2 ? &b : &a, 2);
        MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &job->item, &error), &error);
        tiny_job_step(&tiny, job, 512);
        MP_CHECK(tiny.engine->prefix->tokens >= tokens + 2 * 192); /* both requests find at least the prompt */
        tiny_job_step(&tiny, job, 512);
    }
    tiny_job_finish(&tiny, &a);
    tiny_job_finish(&tiny, &b);
    check_job(&reference, &a, what, 0);
    check_job(&reference, &b, what, 192); /* blocks found after a preemption are not counted */
    unload(&tiny, &reference);
}

/* Preempt and re-admit the jobs other than `i`, the youngest first: all, or with `random` at least one. */
static void preempt_youngest(tiny_model *tiny, tiny_job *jobs, int count, int i, mp_test_random *random) {
    mp_error error;
    for (int o = count - 1; o >= 0; o--)
        if (o != i && jobs[o].admitted && !jobs[o].done) {
            tiny->engine->ops->preempt(tiny->engine, &jobs[o].item);
            MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &jobs[o].item, &error), &error);
            if (random && mp_test_random_u64(random) % 2)
                break;
        }
}

/* Under a tight budget a waiting item preempts the youngest; all requests end with the same bytes. */
MP_TEST_SECONDS(models_prefix_tight_memory, 120) {
    enum { JOBS = 6 };
    static const job_spec specs[JOBS] = {{200, 190, .answer = 70}, {150, 150, .n = 2, .answer = 40},
                                         {200, 190, .answer = 30}, {180, 100, .answer = 90},
                                         {200, 190, .tenant = 4},  {60, 60, .n = 3}};
    tiny_model tiny, reference;
    mp_error error;
    load(&tiny, &reference);
    uint64_t expected[JOBS];
    for (int i = 0; i < JOBS; i++)
        expected[i] = alone(&reference, specs[i]);
    run(&tiny, &reference, (job_spec){.length = 500, .shared = 0, .answer = 1}, 0); /* allocate the scratch */
    uint64_t block = mp_alloc_bytes(MP_TAG_KV) / 9, base = tiny.budget.used;
    for (uint64_t seed = 6; seed > 6 - (uint64_t)mp_test_rounds(6); seed--) {
        mp_test_random random = {seed};
        tiny_job jobs[JOBS];
        int waits = 0;
        tiny.budget.limit = base + (seed % 3) * 2 * block + 10 * ANSWERS;
        for (int i = 0; i < JOBS; i++)
            make(&tiny, &jobs[i], specs[i]);
        for (int open = JOBS; open > 0;) {
            int i = (int)(mp_test_random_u64(&random) % JOBS);
            tiny_job *job = &jobs[i];
            if (job->done)
                continue;
            if (!job->admitted && tiny.engine->ops->admit(tiny.engine, &job->item, &error) != MP_OK) {
                MP_CHECK_STATUS(error.code, MP_MEMORY_EXHAUSTED, &error); /* no memory even for lists */
                preempt_youngest(&tiny, jobs, JOBS, i, NULL);
                MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &job->item, &error), &error);
            }
            job->admitted = true;
            mp_outcome outcome = tiny_job_step(&tiny, job, 1 + (int)(mp_test_random_u64(&random) % 90));
            open -= outcome == MP_OUTCOME_DONE;
            if (outcome != MP_OUTCOME_WAIT_MEMORY)
                continue;
            waits++;
            preempt_youngest(&tiny, jobs, JOBS, i, &random);
        }
        for (int i = 0; i < JOBS; i++) {
            if (tiny_job_hash(&jobs[i]) != expected[i])
                MP_FAIL("call %d differs under seed %llu", i, (unsigned long long)seed);
            mp_request_destroy(&jobs[i].call->base);
        }
        MP_CHECK(waits > 0);
    }
    MP_CHECK(tiny.engine->prefix->hits > 0 && tiny.engine->prefix->evicted > 0);
    tiny.budget.limit = UINT64_MAX;
    unload(&tiny, &reference);
}
