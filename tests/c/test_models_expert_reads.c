/* Models whose experts are larger than the memory: they load, give the same bytes, charge no experts, ask the system
 * for experts in the order of their use, and log once that experts are read from the disk repeatedly. */
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/log.h"
#include "base/options.h"
#include "model_fixture.h"
#include "models/decoder/decoder.h"
#include "models/nn/expert_scan.h"

enum { EXPERTS = 6, PROMPT = 40, ANSWER = 8 };
static const mp_dtype types[] = {MP_Q8_0};
static const tiny_kind moe = {.arch = "qwen3moe", .experts = EXPERTS};

static mp_model_facts facts_of(const tiny_model *tiny) {
    mp_model_facts facts;
    mp_model_get_facts(tiny->model, &facts);
    return facts;
}

static uint64_t run(tiny_model *tiny, int n) {
    int32_t prompt[PROMPT];
    for (int i = 0; i < n; i++)
        prompt[i] = (i * 11 + n) % (TINY_VOCAB - 1);
    mp_text_args args = {.n_prompt = n, .prompt = prompt, .n_choices = 1, .want_prompt_logits = true,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = ANSWER, .logprobs = 4,
                                      .ignore_eos = true}};
    tiny_job job;
    mp_outcome outcome;
    tiny_job_make(tiny, &job, &args, 0);
    tiny_job_admit(tiny, &job);
    int trims = 0;
    do {
        outcome = tiny_job_step(tiny, &job, 512);
        if (outcome == MP_OUTCOME_WAIT_MEMORY) { /* as a worker does: copies of experts give way to requests */
            MP_CHECK(tiny_trim(tiny) > 0 && ++trims < 20);
            continue;
        }
        MP_CHECK(outcome != MP_OUTCOME_FAILED);
    } while (outcome != MP_OUTCOME_DONE);
    const uint64_t hash = tiny_job_hash(&job);
    mp_request_destroy(&job.call->base);
    return hash;
}

/* The load is predicted and charged without the experts, whose bytes the facts state. Copies of experts take at most
 * two thirds of the budget, and none if that is in use. The bytes of the results are the same. */
MP_TEST(models_experts_may_be_larger_than_memory) {
    static const char *const uses[] = {"auto", "packed", "mapped"};
    uint64_t expected[2] = {0}, predicted, engine;
    for (int u = 0; u < 3; u++) {
        tiny_model tiny;
        tiny_weights = uses[u];
        tiny_load(&tiny, tiny_decoder_spec_as(&moe, types, 1, 7, -1), MP_COMPUTE_AUTO, 2);
        tiny_weights = NULL;
        const bool at_load = u == 1; /* the load packs all experts, as far as there is room */
        const uint64_t charged = tiny.model->ops->bytes(tiny.model) - facts_of(&tiny).expert_packed_bytes;
        const uint64_t experts = (uint64_t)TINY_LAYERS * EXPERTS * 3 * TINY_EXPERT * TINY_HIDDEN / 32 * 34;
        MP_CHECK_INT(facts_of(&tiny).expert_bytes, experts);
        MP_CHECK_INT(facts_of(&tiny).experts, at_load ? MP_MATRICES_PACKED : MP_MATRICES_MAPPED);
        MP_CHECK((facts_of(&tiny).expert_packed_bytes > 0) == at_load);
        tiny.loader.ops->footprint(tiny.loader.self, &predicted, &engine);
        MP_CHECK(predicted <= charged + 20000);
        MP_CHECK_INT(tiny.budget.used, charged + facts_of(&tiny).expert_packed_bytes);
        for (int i = 0; i < 2; i++) {
            const uint64_t hash = run(&tiny, i ? PROMPT : 1);
            MP_CHECK(u == 0 || hash == expected[i]);
            expected[i] = hash;
        }
        const mp_model_facts facts = facts_of(&tiny);
        /* the last expert is never used */
        MP_CHECK_INT(facts.experts, at_load  ? MP_MATRICES_PACKED
                                    : u == 2 ? MP_MATRICES_MAPPED
                                             : MP_MATRICES_PACKING);
        MP_CHECK_INT(facts.expert_packed_bytes, tiny.model->ops->bytes(tiny.model) - charged);
        const uint64_t scratch = tiny.engine->ops->bytes(tiny.engine);
        tiny_unload(&tiny);

        /* the same with a budget that has room for everything but a tenth of the experts */
        const uint64_t limit = charged + scratch + experts / 10;
        MP_CHECK(limit - charged < experts + scratch);
        tiny_weights = uses[u];
        tiny = (tiny_model){.spec = tiny_decoder_spec_as(&moe, types, 1, 7, -1), .budget = {.limit = limit}};
        tiny_weights = NULL;
        mp_error error;
        MP_CHECK_OK(mp_team_create(1, &tiny.team, &error), &error);
        mp_team_lease(tiny.team, 2, &tiny.lease);
        MP_CHECK_OK(mp_model_loader(tiny.spec, MP_COMPUTE_AUTO, &tiny.loader, &error), &error);
        MP_CHECK_OK(tiny.loader.ops->load(tiny.loader.self, &tiny.lease, &tiny.budget, NULL, &tiny.model, &error),
                    &error);
        MP_CHECK_OK(tiny.model->ops->engine(tiny.model, &tiny.budget, &tiny.engine, &error), &error);
        for (int i = 0; i < 2; i++)
            MP_CHECK(run(&tiny, i ? PROMPT : 1) == expected[i]);
        const uint64_t copies = tiny.model->ops->bytes(tiny.model) - charged;
        MP_CHECK_INT(facts_of(&tiny).expert_packed_bytes, copies);
        MP_CHECK(copies == 0 || charged + copies <= limit - limit / 3);
        tiny_unload(&tiny);
    }
}

/* A budget below the other weights refuses the load, and names the bytes. */
MP_TEST(models_experts_do_not_excuse_the_other_weights) {
    mp_error error;
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec_as(&moe, types, 1, 7, -1), MP_COMPUTE_AUTO, 1);
    const uint64_t charged = tiny.model->ops->bytes(tiny.model);
    mp_budget budget = {.limit = charged - 1};
    mp_model *model = NULL;
    MP_CHECK_STATUS(tiny.loader.ops->load(tiny.loader.self, &tiny.lease, &budget, NULL, &model, &error),
                    MP_MEMORY_EXHAUSTED, &error);
    char bytes[32];
    snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)charged);
    MP_CHECK_HAS(error.message, bytes);
    MP_CHECK_INT(budget.used, 0);
    budget.limit = charged;
    MP_CHECK_OK(tiny.loader.ops->load(tiny.loader.self, &tiny.lease, &budget, NULL, &model, &error), &error);
    model->ops->destroy(model);
    tiny_unload(&tiny);
}

typedef struct logged {
    int count;
    char last[512];
} logged;

static void collect(const mp_log_record *record, void *arg) {
    logged *log = arg;
    log->count++;
    snprintf(log->last, sizeof log->last, "%s", record->text);
}

/* A quarter of the window makes a model thrash, and less than a sixteenth ends it. Where the system does not tell which
 * pages are in memory, thrashing is logged at once and does not end. */
MP_TEST(models_expert_reads_decide_by_windows) {
    enum { WINDOW = MP_EXPERT_WINDOW };
    for (int blind = 0; blind < 2; blind++) {
        mp_expert_reads reads = {.name = "m.gguf", .bytes = 12345678, .blind = blind};
        logged log = {0};
        MP_CHECK(!mp_expert_reads_sample(NULL, 1));
        int sampled = 0;
        for (int i = 0; i < 60; i++)
            sampled += mp_expert_reads_sample(&reads, i < 30 ? 1 : 16);
        MP_CHECK_INT(sampled, 40);
        for (int round = 0; round < 3; round++)
            for (int i = 0; i < WINDOW; i++)
                mp_expert_reads_add(&reads, i < WINDOW / 4 - 1);
        MP_CHECK_INT(atomic_load(&reads.thrashing), 0);
        for (int i = 0; i < WINDOW; i++)
            mp_expert_reads_add(&reads, i >= WINDOW / 4 * 3);
        MP_CHECK_INT(atomic_load(&reads.thrashing), 1);
        MP_CHECK(!mp_expert_reads_sample(&reads, 16));
        MP_CHECK_INT(mp_log_drain(collect, &log), blind);
        for (int round = 0; round < 3; round++)
            for (int i = 0; i < WINDOW; i++)
                mp_expert_reads_add(&reads, i < WINDOW / 16);
        MP_CHECK_INT(atomic_load(&reads.thrashing), 1);
        for (int i = 0; i < WINDOW; i++)
            mp_expert_reads_add(&reads, i < WINDOW / 16 - 1);
        MP_CHECK_INT(atomic_load(&reads.thrashing), 0);
        MP_CHECK_INT(mp_log_drain(collect, &log), 0);
        if (!blind)
            continue;
        MP_CHECK_HAS(log.last, "m.gguf: the same experts are read from the disk repeatedly. The experts have 12.3 MB");
        for (int i = 0; i < WINDOW; i++) /* logged once per load */
            mp_expert_reads_add(&reads, true);
        MP_CHECK_INT(atomic_load(&reads.thrashing), 1);
        MP_CHECK_INT(mp_log_drain(collect, &log), 0);
    }
}

#ifdef MP_SEAM
enum { ADVISED_MAX = 8192, PAGE = 4096 };
static _Atomic int advised;
static struct {
    uintptr_t from, end;
    int advice;
} advice_of[ADVISED_MAX];

static int note_advice(void *data, size_t bytes, int advice) {
    const int at = atomic_fetch_add(&advised, 1);
    MP_CHECK(at < ADVISED_MAX);
    advice_of[at].from = (uintptr_t)data;
    advice_of[at].end = (uintptr_t)data + bytes;
    advice_of[at].advice = advice;
    return 0;
}

static int advice_given(int advice) {
    int count = 0;
    for (int i = 0; i < atomic_load(&advised); i++)
        count += advice_of[i].advice == advice;
    return count;
}

/* Returns how often the system was asked for all pages of a tensor. */
static int asked_for(const mp_tensor *tensor) {
    int count = 0;
    for (int i = 0; i < atomic_load(&advised); i++)
        count += advice_of[i].advice == MADV_WILLNEED && advice_of[i].from <= (uintptr_t)tensor->data &&
                 advice_of[i].end >= (uintptr_t)tensor->data + tensor->nbytes;
    return count;
}

/* The system tells that the pages below this address are in memory. */
static _Atomic uintptr_t resident_below;

static _Atomic int told; /* calls that asked which pages are in memory */

static int tell_pages(void *data, size_t bytes, unsigned char *pages) {
    atomic_fetch_add(&told, 1);
    for (size_t i = 0; i * PAGE < bytes; i++)
        pages[i] = (uintptr_t)data + i * PAGE < atomic_load(&resident_below);
    return 0;
}

/* Loads a model whose experts are read from the file, as the user `reader`. The test decides which pages are in
 * memory. */
static mp_decoder *load_mapped_as(tiny_model *tiny, uid_t reader) {
    const uid_t self = geteuid();
    setenv("MPOOL_SPECULATION", "0", 1);
    mp_sys_table.madvise = note_advice;
    mp_sys_table.mincore = tell_pages;
    tiny_weights = "mapped";
    mp_spec *spec = tiny_decoder_spec_as(&moe, types, 1, 7, -1);
    MP_CHECK(reader == self || seteuid(reader) == 0);
    tiny_load(tiny, spec, MP_COMPUTE_AUTO, 2);
    MP_CHECK(reader == self || seteuid(self) == 0);
    tiny_weights = NULL;
    atomic_store(&advised, 0);
    return (mp_decoder *)tiny->model;
}

static mp_decoder *load_mapped(tiny_model *tiny) { return load_mapped_as(tiny, geteuid()); }

/* The core asks the system for an expert's matrices when rows choose the expert for the first time, and, while the
 * model thrashes, whenever rows choose it and it is not in memory. The core never asks for an expert that no row chose.
 * The results are the same. */
MP_TEST(models_expert_reads_ask_ahead) {
    tiny_model tiny;
    mp_decoder *decoder = load_mapped(&tiny);
    const uint64_t expected = run(&tiny, PROMPT);
    int first = 0;
    for (int l = 0; l < TINY_LAYERS; l++) {
        const mp_experts *experts = &mp_layer_ffn(&decoder->layers[l], 0)->experts;
        const mp_expert_matrix *parts[] = {&experts->gate, &experts->up, &experts->down};
        for (int e = 0; e < EXPERTS; e++)
            for (int p = 0; p < 3; p++) {
                const int count = asked_for(&parts[p]->tensors[e]);
                if (experts->uses->seen[e])
                    MP_CHECK(count >= 1); /* a request for a neighbour on the same page may cover a small one */
                else
                    MP_CHECK_INT(count, 0);
                first += experts->uses->seen[e];
            }
        MP_CHECK_INT(experts->uses->seen[EXPERTS - 1], 0);
    }
    MP_CHECK_INT(advice_given(MADV_WILLNEED), first);
    MP_CHECK(first > 3 * TINY_LAYERS);

    atomic_store(&advised, 0);
    atomic_store(&resident_below, UINTPTR_MAX);
    MP_CHECK(run(&tiny, PROMPT) == expected);
    MP_CHECK_INT(advice_given(MADV_WILLNEED), 0);

    for (int missing = 1; missing >= 0; missing--) {
        atomic_store(&advised, 0);
        atomic_store(&resident_below, missing ? 0 : UINTPTR_MAX);
        atomic_store(&decoder->store.reads.thrashing, 1);
        MP_CHECK(run(&tiny, PROMPT) == expected);
        const int asked = advice_given(MADV_WILLNEED), dropped = advice_given(MADV_PAGEOUT);
        if (missing) { /* two experts of three matrices per layer and token */
            MP_CHECK(asked >= ANSWER * TINY_LAYERS * 2 * 3);
            MP_CHECK(dropped > 0); /* the prompt reads most experts */
        } else {
            MP_CHECK_INT(asked + dropped, 0);
        }
    }
    for (int i = 0; i < 2; i++)
        MP_CHECK(run(&tiny, PROMPT) == expected);
    MP_CHECK(!facts_of(&tiny).thrashing);
    MP_CHECK_INT(advice_given(MADV_WILLNEED), 0);
    tiny_unload(&tiny);
    mp_sys_table = mp_sys_real;
}

/* A scan asks for the matrices that it needs next, in their order, and not for others. The last thread that leaves a
 * matrix drops it, if it had to be read and is not the one of 16 that is kept. */
MP_TEST(models_expert_scan_bypasses_the_page_cache) {
    enum { MATRICES = 40, BYTES = 4 << 20, AHEAD = 5 /* for 16 MiB */ };
    static mp_tensor tensors[MATRICES];
    static mp_scan_matrix matrices[MATRICES + 2];
    uint8_t *const base = (uint8_t *)(uintptr_t)(UINT64_C(1) << 40); /* never read */
    mp_sys_table.madvise = note_advice;
    mp_sys_table.mincore = tell_pages;
    for (int bypasses = 0; bypasses < 2; bypasses++) {
        /* a warning follows when more bytes have been asked for than all experts have */
        mp_expert_reads reads = {.name = "m.gguf", .bytes = (uint64_t)(bypasses ? MATRICES - 10 : MATRICES) * BYTES};
        logged log = {0};
        mp_expert_scan scan;
        atomic_store(&advised, 0);
        atomic_store(&resident_below, (uintptr_t)base + 8 * BYTES); /* the first eight are in memory */
        mp_expert_scan_init(&scan, matrices, 2, BYTES - 1, bypasses, &reads);
        for (int i = 0; i < MATRICES; i++) {
            tensors[i] = (mp_tensor){.data = base + (size_t)i * BYTES, .nbytes = BYTES};
            mp_expert_scan_add(&scan, &tensors[i]);
            if (i == 10) { /* gate and up in one tensor, and a matrix that is packed */
                mp_expert_scan_add(&scan, &tensors[i]);
                mp_expert_scan_add(&scan, NULL);
            }
        }
        MP_CHECK_INT(scan.count, MATRICES + 2);
        int asked = 0, dropped = 0;
        for (int i = 0; i < scan.count; i++) {
            mp_expert_scan_enter(&scan, i);
            const int until = atomic_load(&scan.asked);
            MP_CHECK_INT(until, i + AHEAD + 1 < scan.count ? i + AHEAD + 1 : scan.count);
            mp_expert_scan_enter(&scan, i); /* the other thread */
            mp_expert_scan_leave(&scan, i);
            MP_CHECK_INT(advice_given(MADV_PAGEOUT), dropped); /* the other thread still reads it */
            mp_expert_scan_leave(&scan, i);
            const mp_tensor *tensor = scan.matrices[i].tensor;
            const bool read = tensor && (uintptr_t)tensor->data >= (uintptr_t)base + 8 * BYTES;
            asked += read;
            dropped += bypasses && read && asked % 16 != 0;
            MP_CHECK_INT(advice_given(MADV_PAGEOUT), dropped);
            if (tensor)
                MP_CHECK_INT(asked_for(tensor), read ? 3 : 0); /* ahead, and at its use: each thread finds it missing */
        }
        MP_CHECK_INT(asked, MATRICES - 8);
        MP_CHECK_INT(dropped, bypasses ? asked - asked / 16 : 0);
        MP_CHECK(atomic_load(&scan.missed));
        MP_CHECK_INT(mp_log_drain(collect, &log), bypasses);
    }
    mp_sys_table = mp_sys_real;
}

static _Atomic uint64_t faults;
static _Atomic int faulting;

static uint64_t count_faults(void) {
    return atomic_fetch_add(&faults, (uint64_t)atomic_load(&faulting)) + (uint64_t)atomic_load(&faulting);
}

/* Threads that wait for the disk make the model thrash, but only while they read experts that were used before. Then
 * experts that are in memory again end it. */
MP_TEST(models_expert_reads_of_tokens) {
    logged log = {0};
    tiny_model tiny;
    mp_sys_table.major_faults = count_faults;
    mp_decoder *decoder = load_mapped(&tiny);
    atomic_store(&resident_below, UINTPTR_MAX);
    for (int i = 0; i < 60; i++)
        run(&tiny, 3);
    MP_CHECK(!facts_of(&tiny).thrashing);
    atomic_store(&faulting, 1);
    for (int i = 0; i < 20; i++) { /* as after a load: no use counts */
        for (int l = 0; l < TINY_LAYERS; l++)
            memset((void *)mp_layer_ffn(&decoder->layers[l], 0)->experts.uses->seen, 0, EXPERTS);
        const uint32_t uses = atomic_load(&decoder->store.reads.uses);
        run(&tiny, 1 + i);
        if (i == 0)
            MP_CHECK(atomic_load(&decoder->store.reads.uses) - uses < ANSWER * TINY_LAYERS);
        atomic_store(&decoder->store.reads.missed, 0);
    }
    MP_CHECK(!facts_of(&tiny).thrashing);
    atomic_store(&resident_below, 0);
    for (int i = 0; i < 200 && !facts_of(&tiny).thrashing; i++)
        run(&tiny, 3);
    MP_CHECK(facts_of(&tiny).thrashing);
    for (int i = 0; i < 20; i++) {
        atomic_store(&advised, 0);
        run(&tiny, 3);
    }
    MP_CHECK(facts_of(&tiny).thrashing);
    MP_CHECK_INT(mp_log_drain(collect, &log), 1);
    MP_CHECK_HAS(log.last, "tiny-7.bin: the same experts are read from the disk repeatedly");
    atomic_store(&resident_below, UINTPTR_MAX);
    atomic_store(&faulting, 0);
    for (int i = 0; i < 20; i++)
        run(&tiny, 3);
    MP_CHECK(!facts_of(&tiny).thrashing);
    tiny_unload(&tiny);
    mp_sys_table = mp_sys_real;
}

#endif
