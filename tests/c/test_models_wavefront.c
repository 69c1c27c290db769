/* test_models_wavefront.c: passes whose row blocks threads carry through the layers (decoder/wavefront.h). */
#include "adapter_fixture.h"
#include "base/sanitize.h"
#include "late_threads.h"
#include "models/decoder/engine.h"
#include "models/decoder/pass.h"
#include "models/decoder/wavefront.h"

enum { PROMPT = 500, ANSWER = 3, ADAPTER = 7, LAYERS = 2, BLOCKS = 3 };

/* ---- the order --------------------------------------------------------------------------------------------------- */

typedef struct order {
    mp_wave_block blocks[BLOCKS];
    mp_wavefront wave;
} order;

static void begin(order *o) {
    *o = (order){.wave = {.layers = LAYERS, .count = BLOCKS}};
    o->wave.blocks = o->blocks;
}

static void takes(order *o, int block, int layer) {
    const mp_team_thread thread = mp_team_single();
    int got = -1;
    MP_CHECK_INT(mp_wavefront_take(&o->wave, &thread, &got), block);
    if (block >= 0)
        MP_CHECK_INT(got, layer);
}

/* Layer l of a block is ready after layer l - 1 of the block, and after the mixers of the block before it. */
MP_TEST(models_wavefront_takes_what_is_ready) {
    order o;
    begin(&o);
    takes(&o, 0, 0);
    mp_wavefront_mixed(&o.wave, 0);
    takes(&o, 1, 0); /* block 0 is busy */
    mp_wavefront_mixed(&o.wave, 1);
    mp_wavefront_finish(&o.wave, 1);
    takes(&o, 2, 0); /* layer 1 of block 1 waits for block 0 */
    mp_wavefront_finish(&o.wave, 0);
    takes(&o, 0, 1);
    mp_wavefront_finish(&o.wave, 2);
    mp_wavefront_mixed(&o.wave, 0);
    takes(&o, 1, 1);
    MP_CHECK_INT(mp_wavefront_finished(&o.wave), 0);
    mp_wavefront_finish(&o.wave, 0);
    mp_wavefront_finish(&o.wave, 1);
    takes(&o, 2, 1);
    takes(&o, -1, -1);
    mp_wavefront_finish(&o.wave, 2);
    MP_CHECK_INT(mp_wavefront_finished(&o.wave), BLOCKS);
}

/* After mp_wavefront_close, begun blocks go on and no other one begins; after mp_wavefront_stop, nothing goes on. */
MP_TEST(models_wavefront_closes_and_stops) {
    order o;
    begin(&o);
    takes(&o, 0, 0);
    mp_wavefront_finish(&o.wave, 0);
    mp_wavefront_close(&o.wave);
    takes(&o, 0, 1);
    mp_wavefront_finish(&o.wave, 0);
    takes(&o, -1, -1);
    MP_CHECK_INT(mp_wavefront_finished(&o.wave), 1);
    begin(&o);
    takes(&o, 0, 0);
    mp_wavefront_finish(&o.wave, 0);
    mp_wavefront_stop(&o.wave);
    takes(&o, -1, -1);
    MP_CHECK_INT(mp_wavefront_finished(&o.wave), 0);
}

/* ---- passes ------------------------------------------------------------------------------------------------------ */

static void add_adapter(tiny_file *file) {
    static const int64_t id = ADAPTER;
    tiny_ints(file->spec, "mpool.adapters", &id, 1);
    tiny_update(file, 1, "blk.0.ffn_down", 3, TINY_HIDDEN, TINY_FFN, 1);
    tiny_update(file, 1, "blk.1.attn_q", 2, TINY_HIDDEN, TINY_HIDDEN, 1);
}

static void make_job(tiny_model *tiny, tiny_job *job, bool logits, int64_t adapter) {
    static int32_t prompt[PROMPT];
    mp_test_random random = {7};
    for (int t = 0; t < PROMPT; t++)
        prompt[t] = (int32_t)(mp_test_random_u64(&random) % TINY_VOCAB);
    const mp_text_args args = {
        .n_prompt = PROMPT,
        .prompt = prompt,
        .n_choices = 1,
        .adapter = adapter,
        .want_prompt_logits = logits,
        .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = ANSWER, .logprobs = 3, .ignore_eos = true},
    };
    tiny_job_make(tiny, job, &args, 0);
    tiny_job_admit(tiny, job);
}

static uint64_t run(tiny_model *tiny, bool logits, int64_t adapter) {
    tiny_job job;
    tiny_trim(tiny);
    make_job(tiny, &job, logits, adapter);
    tiny_job_finish(tiny, &job);
    const uint64_t hash = tiny_job_hash(&job);
    mp_request_destroy(&job.call->base);
    return hash;
}

static mp_spec *make_spec(const tiny_kind *kind, bool quantised) {
    static const mp_dtype some[] = {MP_Q8_0, MP_Q4_0, MP_Q6_K}, floats[] = {MP_F32};
    return tiny_decoder_spec_as(kind, quantised ? some : floats, quantised ? 3 : 1, 42, -1);
}

/* The results of a wavefront have the bits of a single thread: with attention of all kinds, states, inputs of layers,
 * layers without keys of their own, and adapters. */
MP_TEST_SECONDS(models_wavefront_has_the_bits_of_one_thread, 120) {
    static const int64_t conv[TINY_LAYERS] = {1, 0, 1};
    static const tiny_kind kinds[] = {
        {.arch = "llama", .more = add_adapter},
        {.arch = "gemma3", .window = 80, .scaled = true},
        {.arch = "gemma4", .window = 80},
        {.arch = "lfm3", .mixers = conv},
        {.arch = "olmo2"},
    };
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int quantised = 0; quantised < 2; quantised++) {
            const int64_t adapter = kinds[k].more ? ADAPTER : 0;
            uint64_t expected[2] = {0};
            for (int threads = 1; threads <= (MP_SANITIZED ? 2 : MP_WAVE_THREADS); threads++) {
                tiny_model tiny;
                tiny_load(&tiny, make_spec(&kinds[k], quantised), quantised ? MP_COMPUTE_AUTO : MP_COMPUTE_F32,
                          threads);
                lease_polls();
                for (int logits = 0; logits < 2; logits++) {
                    const uint64_t got = run(&tiny, logits, adapter);
                    if (threads == 1)
                        expected[logits] = got;
                    else if (got != expected[logits])
                        MP_FAIL("%s, quantised %d, logits %d: %d threads give other bits than one", kinds[k].arch,
                                quantised, logits, threads);
                }
                const int polls = lease_polls();
                /* each block polls after each layer; snapshots of states make passes too short for four threads */
                if (threads > 1 && threads < 4 && polls < 2 * TINY_LAYERS * (PROMPT / MP_WAVE_ROWS))
                    MP_FAIL("%s, %d threads: %d polls", kinds[k].arch, threads, polls);
                tiny_unload(&tiny);
            }
        }
}

#ifdef MP_SEAM

static _Atomic int asked;

static int count_question(void) {
    atomic_fetch_add(&asked, 1);
    return -1;
}

/* Before each layer of a block, a thread looks whether another one computes on its CPU. */
MP_TEST(models_wavefront_threads_leave_occupied_cpus) {
    static const tiny_kind kind = {.arch = "llama"};
    tiny_model tiny;
    tiny_load(&tiny, make_spec(&kind, false), MP_COMPUTE_F32, 2);
    atomic_store(&asked, 0);
    mp_sys_table.cpu = count_question;
    run(&tiny, false, 0);
    mp_sys_table = mp_sys_real;
    MP_CHECK(atomic_load(&asked) >= TINY_LAYERS * (PROMPT / MP_WAVE_ROWS));
    tiny_unload(&tiny);
}

#endif

/* ---- long steps -------------------------------------------------------------------------------------------------- */

/* Plans and runs a step of a worker that is alone, or not. Returns the rows of the prompt that are computed. */
static int step(tiny_model *tiny, tiny_job *job, bool alone) {
    mp_plan plan = {.alone_threads = alone ? 2 : 0};
    mp_outcome outcome;
    mp_item *items[] = {&job->item};
    tiny->engine->ops->plan(tiny->engine, items, 1, 1, &plan);
    tiny->lease.cut_short = false;
    tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, &outcome);
    MP_CHECK_INT(outcome, MP_OUTCOME_MORE);
    return ((const mp_sequence_group *)job->item.state)->seqs[0].cached.count;
}

/* A worker that is alone computes a prompt in one step, however small the budget. The step ends after the row blocks
 * that are begun once others wait. A step beside others, or with a lease of one thread, has the budget's rows only.
 * A later step computes the other rows, with the same result. */
MP_TEST(models_wavefront_ends_early_for_others) {
    static const tiny_kind kind = {.arch = "llama"};
    uint64_t expected = 0;
    for (int threads = 1; threads <= 2; threads++) {
        tiny_model tiny;
        _Atomic int wanted = 0, runnable = 1, waiting = 0, *const others[] = {&wanted, &runnable, &waiting};
        tiny_job job;
        tiny_load(&tiny, make_spec(&kind, false), MP_COMPUTE_F32, threads);
        tiny.lease.wanted = &wanted;
        tiny.lease.runnable = &runnable;
        tiny.lease.waiting = &waiting;
        if (threads == 1)
            expected = run(&tiny, false, 0);
        atomic_store(&((mp_decoder *)tiny.model)->row_ns, 1000000); /* the budget allows few rows */
        atomic_store(&((mp_decoder *)tiny.model)->decode_ns, 1);
        for (int i = -2; i < 3; i++) {
            const bool alone = i > -2;
            tiny_trim(&tiny);
            make_job(&tiny, &job, false, 0);
            if (i >= 0)
                atomic_fetch_add(others[i], 1);
            const int rows = step(&tiny, &job, alone);
            if (i >= 0)
                atomic_fetch_sub(others[i], 1);
            if (threads == 1 || !alone)
                MP_CHECK(rows < MP_WAVE_ROWS);
            else if (i < 0)
                MP_CHECK_INT(rows, PROMPT);
            else
                MP_CHECK(rows % MP_WAVE_ROWS == 0 && rows > 0 && rows <= (threads + 2) * MP_WAVE_ROWS);
            MP_CHECK_INT(tiny.lease.cut_short, alone && (threads == 1 || i >= 0));
            tiny_job_finish(&tiny, &job);
            MP_CHECK(tiny_job_hash(&job) == expected);
            mp_request_destroy(&job.call->base);
        }
        tiny_unload(&tiny);
    }
}
