/* Models whose prompts are one span: a row sees exactly the positions that it should, the vector is the projection of
 * the mean of all rows, and a request has the same bits in any schedule. */
#include "base/sanitize.h"
#include "late_threads.h"
#include "models/decoder/engine.h"
#include "models/vision/vision.h"
#include "vision_fixture.h"
#include "missing_fixture.h"

enum { WINDOW = 9, OUTPUTS = 44, INPUTS = 32 };

/* Adds an image encoder, a head, and inputs of the layers without a table. */
static void add_whole(tiny_file *file) {
    char name[64];
    add_image_encoder(file);
    tiny_flag(file->spec, "mpool.whole_prompts", true);
    tiny_flag(file->spec, "mpool.plain_inputs", true);
    tiny_int(file->spec, "llava.embedding_length_per_layer_input", INPUTS);
    tiny_tensor(file, "output.weight", MP_F32, OUTPUTS, TINY_HIDDEN, 0.3f, 0);
    tiny_tensor(file, "per_layer_model_proj.weight", MP_F32, TINY_LAYERS * INPUTS, TINY_HIDDEN, 0.5f, 0);
    tiny_tensor(file, "per_layer_proj_norm.weight", MP_F32, 1, INPUTS, 0.3f, 1);
    for (int l = 0; l < TINY_LAYERS; l++) {
        snprintf(name, sizeof name, "blk.%d.inp_gate.weight", l);
        tiny_tensor(file, name, MP_F32, INPUTS, TINY_HIDDEN, 0.3f, 0);
        snprintf(name, sizeof name, "blk.%d.proj.weight", l);
        tiny_tensor(file, name, MP_F32, TINY_HIDDEN, INPUTS, 0.3f, 0);
        snprintf(name, sizeof name, "blk.%d.post_norm.weight", l);
        tiny_tensor(file, name, MP_F32, 1, TINY_HIDDEN, 0.3f, 1);
    }
}

static const tiny_kind whole_kind = {.arch = "llava", .window = WINDOW, .context = 1024, .more = add_whole};

static const struct { /* tokens, images and tokens of each prompt */
    int before, images, after;
} shapes[] = {{1, 0, 0},   {30, 0, 0},   {150, 0, 0}, {3, 1, 5},  {0, 2, 70},
              {700, 0, 0}, {40, 1, 500}, {64, 0, 0},  {600, 1, 5}};
enum { SHAPES = sizeof shapes / sizeof *shapes, MOST = 800 };

/* changed: index of a token that is another one; -1: none */
static bool captures = true;
static void make_prompt(const tiny_model *tiny, tiny_job *job, int index, int changed, bool logits) {
    static uint8_t pixels[2 * PIXELS], keys[2 * MP_IMAGE_KEY], run_keys[2 * MP_IMAGE_KEY];
    int32_t prompt[MOST], sizes[4], runs[6], at = 0;
    mp_test_random text = {77 + (uint64_t)index};
    const int images = shapes[index].images;
    for (; at < shapes[index].before; at++)
        prompt[at] = (int32_t)(mp_test_random_u64(&text) % (TINY_VOCAB - 1));
    for (int i = 0; i < images; i++) {
        keys[i * MP_IMAGE_KEY] = run_keys[i * MP_IMAGE_KEY] = (uint8_t)(1 + i + 2 * index); /* none is encoded before */
        for (int p = 0; p < PIXELS; p++)
            pixels[i * PIXELS + p] = (uint8_t)(p * (8 + i));
        sizes[2 * i] = sizes[2 * i + 1] = SIDE;
        runs[3 * i] = at;
        runs[3 * i + 1] = ROWS;
        runs[3 * i + 2] = 1;
        for (int r = 0; r < ROWS; r++)
            prompt[at++] = MARK;
    }
    for (int i = 0; i < shapes[index].after; i++)
        prompt[at++] = (int32_t)(mp_test_random_u64(&text) % (TINY_VOCAB - 1));
    if (changed >= 0)
        prompt[changed] = (prompt[changed] + 1) % (TINY_VOCAB - 1);
    const mp_text_args args = {
        .n_prompt = at,
        .prompt = prompt,
        .n_choices = 1,
        .want_prompt_logits = logits,
        .capture_values = captures ? TINY_HIDDEN : 0,
        .capture_records = captures ? TINY_LAYERS + MP_CAPTURE_OTHERS : 0,
        .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 1},
        .vision = true,
        .images = {.n_tiles = images, .n_runs = images, .sizes = sizes, .pixels = pixels,
                   .n_bytes = images * PIXELS, .tile_keys = keys, .run_keys = run_keys, .spans = runs},
    };
    tiny_job_make(tiny, job, &args, 0);
}

/* Returns the hash of the vector and all other records of a finished request. */
static uint64_t hash_of(const tiny_job *job) {
    MP_CHECK_INT(job->call->capture.sampled, 1);
    MP_CHECK_INT(job->call->cached_tokens, 0);
    return tiny_hash_bytes(14695981039346656037u, job->call->capture.data, tiny_capture_bytes(job->call));
}

/* Runs a step of n jobs, and retires those that it completes. Jobs without memory are preempted. */
static void step_all(tiny_model *tiny, tiny_job **jobs, int n, uint64_t budget_ns) {
    mp_item *items[SHAPES];
    mp_plan plan = {.alone_threads = n == 1 ? 2 : 0};
    mp_outcome outcomes[MP_PLAN_MAX];
    for (int j = 0; j < n; j++)
        items[j] = &jobs[j]->item;
    atomic_store(&((mp_decoder *)tiny->model)->decode_ns, 1); /* else a step takes at least four passes */
    tiny->engine->ops->plan(tiny->engine, items, n, budget_ns, &plan);
    MP_CHECK(plan.count > 0);
    tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
    for (int p = 0; p < plan.count; p++) {
        tiny_job *job = (tiny_job *)((uint8_t *)plan.items[p] - offsetof(tiny_job, item));
        job->done = outcomes[p] == MP_OUTCOME_DONE;
        if (job->done)
            tiny->engine->ops->retire(tiny->engine, plan.items[p]);
        else if (outcomes[p] == MP_OUTCOME_WAIT_MEMORY && job->admitted)
            tiny->engine->ops->preempt(tiny->engine, plan.items[p]);
        else
            MP_CHECK(outcomes[p] == MP_OUTCOME_MORE || outcomes[p] == MP_OUTCOME_WAIT_MEMORY);
        job->admitted &= outcomes[p] != MP_OUTCOME_WAIT_MEMORY;
    }
}

static void finish(tiny_model *tiny, tiny_job *job, uint64_t budget_ns) {
    tiny_job_admit(tiny, job);
    while (!job->done)
        step_all(tiny, &job, 1, budget_ns);
}

/* Row i sees row j, that is, another token j changes the outputs of row i, if they are less than the window apart, or
 * if there is no window. The vector is the mean of the outputs of all rows. */
MP_TEST_SECONDS(models_whole_prompts_rows_see_both_sides, 120) {
    enum { TEXT = 2, PROMPT = 150 };
    static const mp_dtype floats[] = {MP_F32};
    static const int64_t first[TINY_LAYERS] = {0, 2, 2}; /* only the first layer has attention */
    for (int window = 0; window <= WINDOW; window += WINDOW) {
        const tiny_kind kind = {.arch = "llava", .window = window, .blocks = first, .more = add_whole};
        tiny_model tiny;
        tiny_job base;
        tiny_load(&tiny, tiny_decoder_spec_as(&kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
        make_prompt(&tiny, &base, TEXT, -1, true);
        finish(&tiny, &base, UINT64_MAX);
        const float *const vector = base.call->capture.data + (TINY_LAYERS + 2) * TINY_HIDDEN;
        for (int c = 0; c < OUTPUTS; c++) {
            double sum = 0;
            for (int i = 0; i < PROMPT; i++)
                sum += (double)base.call->prompt_logits[i * OUTPUTS + c];
            MP_CHECK(fabs(sum / PROMPT - (double)vector[c]) < 1e-5);
        }
        for (int j = 0; j < PROMPT; j += MP_SANITIZED ? 7 : 1) {
            tiny_job job;
            make_prompt(&tiny, &job, TEXT, j, true);
            finish(&tiny, &job, UINT64_MAX);
            for (int i = 0; i < PROMPT; i++) {
                const bool sees = !window || (j > i - window && j < i + window);
                const float *was = base.call->prompt_logits + i * OUTPUTS;
                if ((memcmp(was, job.call->prompt_logits + i * OUTPUTS, OUTPUTS * sizeof *was) != 0) != sees)
                    MP_FAIL("window %d: row %d %s row %d", window, i, sees ? "does not see" : "sees", j);
            }
            mp_request_destroy(&job.call->base);
        }
        mp_request_destroy(&base.call->base);
        tiny_unload(&tiny);
    }
}

/* Runs all requests together, in steps of any time, with preemptions. limit: bytes beyond those in use. */
static void run_mixed(tiny_model *tiny, uint64_t seed, const uint64_t *expected, uint64_t limit) {
    mp_test_random random = {seed};
    tiny_job jobs[SHAPES], *active[SHAPES];
    mp_error error;
    tiny->budget.limit = limit ? tiny->budget.used + limit : UINT64_MAX;
    for (int i = 0; i < SHAPES; i++)
        make_prompt(tiny, &jobs[i], i, -1, false);
    for (int rounds = 0, open = SHAPES; open > 0; rounds++) {
        int n = 0;
        MP_CHECK(rounds < 100000);
        open = 0;
        for (int k = 0; k < SHAPES; k++) {
            tiny_job *job = &jobs[(k + (int)seed) % SHAPES];
            open += !job->done;
            if (job->done || mp_test_random_u64(&random) % 3 == 0)
                continue;
            if (job->admitted && mp_test_random_u64(&random) % 11 == 0) {
                tiny->engine->ops->preempt(tiny->engine, &job->item);
                job->admitted = false;
            }
            if (!job->admitted)
                job->admitted = tiny->engine->ops->admit(tiny->engine, &job->item, &error) == MP_OK;
            MP_CHECK(job->admitted || limit > 0);
            if (job->admitted)
                active[n++] = job;
        }
        if (mp_test_random_u64(&random) % 23 == 0)
            tiny_trim(tiny);
        if (n > 0)
            step_all(tiny, active, n, mp_test_random_u64(&random) % 3 ? mp_test_random_u64(&random) % 1000000
                                                                       : UINT64_MAX);
    }
    for (int i = 0; i < SHAPES; i++) {
        if (hash_of(&jobs[i]) != expected[i])
            MP_FAIL("request %d differs under seed %llu with %d threads", i, (unsigned long long)seed,
                    tiny->lease.threads);
        mp_request_destroy(&jobs[i].call->base);
    }
    tiny->budget.limit = UINT64_MAX;
}

MP_TEST_SECONDS(models_whole_prompts_contract, 300) {
    static const mp_dtype types[] = {MP_F32, MP_Q8_0};
    for (int kind = 0; kind < 2; kind++) {
        uint64_t expected[SHAPES];
        for (int threads = 1; threads <= 3; threads++) {
            tiny_model tiny;
            tiny_load(&tiny, tiny_decoder_spec_as(&whole_kind, &types[kind], 1, 42, -1),
                      kind ? MP_COMPUTE_AUTO : MP_COMPUTE_F32, threads);
            for (int i = 0; i < SHAPES; i++) {
                for (int again = 0; again < 2; again++) { /* nothing of an equal prompt is reused */
                    tiny_job job;
                    make_prompt(&tiny, &job, i, -1, false);
                    late_thread(again ? threads - 1 : -1);
                    finish(&tiny, &job, again ? 1 : UINT64_MAX);
                    late_thread(-1);
                    if ((threads > 1 || again) && hash_of(&job) != expected[i])
                        MP_FAIL("request %d of kind %d differs with %d threads, again %d", i, kind, threads, again);
                    expected[i] = hash_of(&job);
                    mp_request_destroy(&job.call->base);
                }
            }
            MP_CHECK_INT(tiny.engine->prefix->hits, 0);
            for (uint64_t seed = 1; seed <= (uint64_t)mp_test_rounds(4); seed++)
                run_mixed(&tiny, seed + 10 * (uint64_t)threads, expected, 0);
            tiny_trim(&tiny);
            const uint64_t least = tiny.budget.used;
            run_mixed(&tiny, 99, expected, 48 << 20);
            tiny_trim(&tiny);
            MP_CHECK_INT(tiny.budget.used, least);
            MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), 0); /* no reference leaked */
            tiny_unload(&tiny);
        }
    }
}

/* A request without captures reads all rows, too: its token has the same log probability. */
MP_TEST(models_whole_prompts_without_captures) {
    static const mp_dtype floats[] = {MP_F32};
    mp_token_out tokens[2];
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec_as(&whole_kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    for (int i = 0; i < 2; i++) {
        tiny_job job;
        captures = i == 0;
        make_prompt(&tiny, &job, 2, -1, false);
        finish(&tiny, &job, UINT64_MAX);
        tokens[i] = job.call->choices[0].tokens[0];
        mp_request_destroy(&job.call->base);
    }
    captures = true;
    MP_CHECK_INT(tokens[1].id, tokens[0].id);
    MP_CHECK(tokens[1].logprob == tokens[0].logprob && isfinite(tokens[0].logprob));
    tiny_unload(&tiny);
}

/* A long prompt yields between layers; its rows wait for all of its images. */
MP_TEST(models_whole_prompts_yield_between_layers) {
    enum { LONG = 6, SHORT = 1 };
    static const mp_dtype floats[] = {MP_F32};
    tiny_model tiny;
    tiny_job jobs[2], *both[] = {&jobs[0], &jobs[1]};
    tiny_load(&tiny, tiny_decoder_spec_as(&whole_kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    make_prompt(&tiny, &jobs[0], LONG, -1, false);
    tiny_job_admit(&tiny, &jobs[0]);
    const mp_sequence *seq = &((const mp_sequence_group *)jobs[0].item.state)->seqs[0];
    while (!seq->paused.x) {
        MP_CHECK_INT(seq->cached.count, 0);
        step_all(&tiny, both, 1, 1);
    }
    make_prompt(&tiny, &jobs[1], SHORT, -1, false);
    tiny_job_admit(&tiny, &jobs[1]);
    MP_CHECK_INT(seq->paused.layer, 1);
    step_all(&tiny, both, 2, 1000000000);
    MP_CHECK(jobs[1].done);
    while (!jobs[0].done)
        step_all(&tiny, both, 1, 1);
    for (int j = 0; j < 2; j++)
        mp_request_destroy(&jobs[j].call->base);
    tiny_unload(&tiny);
}

static void add_table(tiny_file *file) {
    add_whole(file);
    tiny_tensor(file, "per_layer_token_embd.weight", MP_F32, TINY_VOCAB, TINY_LAYERS * INPUTS, 0.5f, 0);
}
static void add_no_head(tiny_file *file) {
    add_image_encoder(file);
    tiny_flag(file->spec, "mpool.whole_prompts", true);
}
static void add_wide_head(tiny_file *file) {
    add_no_head(file);
    tiny_tensor(file, "output.weight", MP_F32, (1 << 16) + 1, TINY_HIDDEN, 0.3f, 0);
}

/* Models and requests that do not fit are refused. */
MP_TEST(models_whole_prompts_refuses) {
    static const mp_dtype floats[] = {MP_F32};
    static const int64_t mixers[TINY_LAYERS] = {0, 1, 0};
    static const struct {
        tiny_kind kind;
        mp_status status;
    } models[] = {{{.arch = "llava", .more = add_table}, MP_UNSUPPORTED},
                  {{.arch = "llava", .more = add_no_head}, MP_FORMAT},
                  {{.arch = "llava", .more = add_wide_head}, MP_LIMIT},
                  {{.arch = "llava", .mixers = mixers, .more = add_whole}, MP_UNSUPPORTED}};
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        MP_CHECK_INT(load_only(tiny_decoder_spec_as(&models[i].kind, floats, 1, 42, -1), MP_COMPUTE_F32, &error),
                     models[i].status);
    }
    tiny_model tiny;
    tiny_job job;
    uint64_t cost;
    uint32_t total;
    tiny_load(&tiny, tiny_decoder_spec_as(&whole_kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    make_prompt(&tiny, &job, 1, -1, false);
    job.call->sampling.max_tokens = 2;
    MP_CHECK_INT(tiny.model->ops->check(tiny.model, job.item.request, &cost, &total, &error), MP_UNSUPPORTED);
    job.call->sampling.max_tokens = 1;
    job.call->prompt[3] = TINY_VOCAB; /* ids are those of the token table, not of the head */
    MP_CHECK_INT(tiny.model->ops->check(tiny.model, job.item.request, &cost, &total, &error), MP_INVALID_ARGUMENT);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}
