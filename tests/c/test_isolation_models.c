/* Real models in worker processes: requests have the same bytes as in this process, with any preemption and in
 * whichever process they continue. */
#include <dirent.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "isolated_fixture.h"
#include "heads_fixture.h"

enum { ITEMS = 8, ANSWER = 12 };

static const struct {
    int length, n;
    float temperature;
    const char *stop;
} rows[ITEMS] = {{1, 1, 0, NULL},   {70, 3, 0.9f, NULL},  {200, 1, 0, NULL},   {33, 2, 0.8f, "ab"},
                 {200, 1, 1, "q"},  {150, 1, 0, "no stop"}, {90, 4, 1.5f, "x"}, {64, 1, 0.7f, NULL}};

static void make_job(const tiny_model *model, tiny_job *job, int index) {
    mp_test_random everybody = {99}, own = {100 + (uint64_t)index};
    int32_t prompt[256], stop_bytes = rows[index].stop ? (int32_t)strlen(rows[index].stop) : 0;
    for (int i = 0; i < rows[index].length; i++)
        prompt[i] = (int32_t)(mp_test_random_u64(i < 128 && index % 2 ? &everybody : &own) % TINY_VOCAB);
    mp_text_args args = {
        .n_prompt = rows[index].length,
        .prompt = prompt,
        .n_choices = rows[index].n,
        .n_stop = rows[index].stop != NULL,
        .stop = &rows[index].stop,
        .stop_bytes = &stop_bytes,
        .sampling = {.temperature = rows[index].temperature, .top_k = 40, .top_p = 0.95f, .repetition_penalty = 1.1f,
                     .seed = 7, .max_tokens = ANSWER, .logprobs = index % 3 ? 5 : -1},
    };
    tiny_job_make(model, job, &args, 0);
}

/* Hash everything that a caller sees of a completion. */
static uint64_t hash_of(const tiny_job *job) {
    const mp_text_request *call = job->call;
    uint64_t hash = 14695981039346656037u;
    for (int c = 0; c < call->n_choices; c++) {
        const mp_choice *choice = &call->choices[c];
        size_t count = choice->token_count, k = call->sampling.logprobs > 0 ? (size_t)call->sampling.logprobs : 0;
        int32_t ends[2] = {choice->finish, choice->stop_index};
        hash = tiny_hash_bytes(hash, ends, sizeof ends);
        for (size_t t = 0; t < count; t++) {
            hash = tiny_hash_bytes(hash, &choice->tokens[t].id, sizeof(int32_t));
            if (call->sampling.logprobs >= 0)
                hash = tiny_hash_bytes(hash, &choice->tokens[t].logprob, sizeof(float));
            hash = tiny_hash_bytes(hash, &choice->tokens[t].byte_end, sizeof(uint32_t));
        }
        hash = tiny_hash_bytes(hash, choice->text, choice->text_bytes);
        if (k) {
            hash = tiny_hash_bytes(hash, choice->top_ids, count * k * sizeof(int32_t));
            hash = tiny_hash_bytes(hash, choice->top_logprobs, count * k * sizeof(float));
        }
    }
    return hash;
}

static void run_to_end(mp_engine *engine, mp_lease *lease, tiny_job *job) {
    mp_item *items[1] = {&job->item};
    mp_plan plan = {0};
    mp_outcome outcomes[MP_PLAN_MAX];
    mp_error error;
    MP_CHECK_OK(engine->ops->admit(engine, &job->item, &error), &error);
    do {
        engine->ops->plan(engine, items, 1, UINT64_MAX, &plan);
        MP_CHECK_INT(plan.count, 1);
        engine->ops->step(engine, lease, &plan, outcomes);
    } while (outcomes[0] == MP_OUTCOME_MORE);
    if (outcomes[0] != MP_OUTCOME_DONE)
        MP_FAIL("outcome %d: %s", outcomes[0], job->item.error.message);
    engine->ops->retire(engine, &job->item);
}

MP_TEST_SECONDS(isolation_texts_have_the_same_bytes_in_any_process, 120) {
    static const mp_dtype types[] = {MP_Q8_0, MP_Q4_1, MP_Q6_K};
    uint64_t expected[ITEMS];
    tiny_model here;
    tiny_load(&here, tiny_decoder_spec(types, 3, 42), MP_COMPUTE_AUTO, 2);
    for (int i = 0; i < ITEMS; i++) {
        tiny_job job;
        make_job(&here, &job, i);
        run_to_end(here.engine, &here.lease, &job);
        expected[i] = hash_of(&job);
        mp_request_destroy(&job.call->base);
    }
    isolated it;
    isolated_load(&it, mp_spec_pin(here.spec), MP_COMPUTE_AUTO, 2, isolation_options("spec"));
    tiny_model there = {.model = it.model};
    for (int seed = 0; seed < mp_test_rounds(6); seed++) {
        mp_test_random random = {(uint64_t)seed};
        tiny_job jobs[ITEMS];
        int home[ITEMS];
        mp_error error;
        for (int i = 0; i < ITEMS; i++) {
            make_job(&there, &jobs[i], i);
            home[i] = -1;
        }
        for (int open = ITEMS; open > 0;) {
            int which = (int)(mp_test_random_u64(&random) % 2), n = 0;
            mp_engine *engine = it.engine[which];
            mp_item *items[ITEMS];
            for (int i = 0; i < ITEMS; i++) {
                if (jobs[i].done)
                    continue;
                if (home[i] >= 0 && mp_test_random_u64(&random) % 7 == 0) { /* preempt; re-admit in either engine */
                    it.engine[home[i]]->ops->preempt(it.engine[home[i]], &jobs[i].item);
                    home[i] = -1;
                }
                if (home[i] < 0 && mp_test_random_u64(&random) % 2) {
                    MP_CHECK_OK(engine->ops->admit(engine, &jobs[i].item, &error), &error);
                    home[i] = which;
                }
                if (home[i] == which)
                    items[n++] = &jobs[i].item;
            }
            if (n == 0)
                continue;
            mp_plan plan = {0};
            mp_outcome outcomes[MP_PLAN_MAX];
            engine->ops->plan(engine, items, n, 1 + mp_test_random_u64(&random) % 2000000, &plan);
            MP_CHECK(plan.count >= 1);
            engine->ops->step(engine, &it.lease, &plan, outcomes);
            if (engine->lost(engine))
                MP_FAIL("lost: %s", engine->lost(engine)->message);
            for (int p = 0; p < plan.count; p++) {
                tiny_job *job = (tiny_job *)((char *)plan.items[p] - offsetof(tiny_job, item));
                MP_CHECK(outcomes[p] == MP_OUTCOME_MORE || outcomes[p] == MP_OUTCOME_DONE);
                if (outcomes[p] == MP_OUTCOME_DONE) {
                    engine->ops->retire(engine, &job->item);
                    job->done = true;
                    open--;
                }
            }
        }
        for (int i = 0; i < ITEMS; i++) {
            if (hash_of(&jobs[i]) != expected[i])
                MP_FAIL("item %d differs under seed %d", i, seed);
            mp_request_destroy(&jobs[i].call->base);
        }
    }
    MP_CHECK(it.engine[0]->prefix->hits + it.engine[1]->prefix->hits > 0);
    isolated_unload(&it);
    tiny_unload(&here);
}

/* Check a request whose token vectors exceed one frame, and whose steps alternate between two workers. */
static void check_embedding(mp_model *here, mp_engine *engine, isolated *it, mp_lease *lease, uint8_t outputs) {
    enum { COUNT = 40 };
    static int32_t ids[COUNT * 40];
    static float hashes[2][COUNT * OUTPUT_HASHES];
    int64_t offsets[COUNT + 1] = {0};
    mp_test_random random = {outputs};
    mp_error error;
    for (int t = 0; t < COUNT; t++) {
        offsets[t + 1] = offsets[t] + 1 + (int64_t)(mp_test_random_u64(&random) % 40);
        for (int64_t i = offsets[t]; i < offsets[t + 1]; i++)
            ids[i] = (int32_t)(mp_test_random_u64(&random) % TINY_VOCAB);
    }
    for (int k = 0; k < 2; k++) {
        mp_item item = {0}, *items[1] = {&item};
        mp_embedding_request *call;
        uint64_t cost;
        MP_CHECK_OK(make_embedding_request(COUNT, ids, offsets, NULL, &call, &error), &error);
        call->outputs = outputs;
        item.request = &call->base;
        mp_model *model = k ? it->model : here;
        MP_CHECK_OK(model->ops->check(model, item.request, &cost, &item.total, &error), &error);
        mp_outcome outcomes[MP_PLAN_MAX] = {MP_OUTCOME_MORE};
        for (int turn = 0; outcomes[0] != MP_OUTCOME_DONE; turn++) {
            mp_engine *with = k ? it->engine[turn % 2] : engine;
            mp_plan plan = {0};
            MP_CHECK_OK(with->ops->admit(with, &item, &error), &error);
            with->ops->plan(with, items, 1, 1, &plan); /* 1 ns: the smallest amount */
            with->ops->step(with, k ? &it->lease : lease, &plan, outcomes);
            MP_CHECK(outcomes[0] == MP_OUTCOME_MORE || outcomes[0] == MP_OUTCOME_DONE);
            if (outcomes[0] == MP_OUTCOME_MORE)
                with->ops->preempt(with, &item);
            else
                with->ops->retire(with, &item);
        }
        MP_CHECK_INT(call->done, COUNT);
        hash_outputs(call, hashes[k]);
        mp_request_destroy(&call->base);
    }
    MP_CHECK(memcmp(hashes[0], hashes[1], sizeof hashes[0]) == 0);
}

static void check_outputs_in_processes(void (*more)(tiny_file *), mp_compute compute) {
    static const uint8_t outputs[] = {MP_EMBED_POOLED, MP_EMBED_TOKENS, MP_EMBED_ROWS, MP_EMBED_SPARSE, MP_EMBED_ALL};
    tiny_model here;
    isolated it;
    tiny_load(&here, tiny_encoder_spec_with(false, false, more), compute, 2);
    isolated_load(&it, mp_spec_pin(here.spec), compute, 2, isolation_options("spec"));
    for (size_t i = 0; i < sizeof outputs; i++)
        check_embedding(here.model, here.engine, &it, &here.lease, outputs[i]);
    for (int i = 0; i < 2; i++) { /* an encoder has no prefixes */
        const mp_prefix_counters *prefix = it.engine[i]->prefix;
        MP_CHECK(prefix->hits == 0 && prefix->tokens == 0 && prefix->blocks == 0 && prefix->evicted == 0);
    }
    isolated_unload(&it);
    tiny_unload(&here);
}

MP_TEST_SECONDS(isolation_vectors_have_the_same_bytes_in_any_process, 60) {
    check_outputs_in_processes(add_vocabulary_head, MP_COMPUTE_F32);
    check_outputs_in_processes(add_vocabulary_head, MP_COMPUTE_I8);
    check_outputs_in_processes(add_token_head, MP_COMPUTE_F32);
}

/* Kinds of text requests: all options at their limits, or one option above its limit. */
enum { ALL_WITHIN, MORE_CHOICES, MORE_STOPS, MORE_STOP_BYTES, MORE_STOP_IDS, MORE_BIASES, MORE_LOGPROBS, EXCESSES };

MP_TEST(isolation_prompt_logits_are_refused) {
    static const mp_dtype types[] = {MP_Q8_0};
    static const int32_t prompt[] = {1};
    mp_text_args args = {.n_prompt = 1, .prompt = prompt, .n_choices = 1, .want_prompt_logits = true,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 1, .logprobs = -1}};
    mp_text_request *call;
    mp_error error;
    uint64_t cost;
    uint32_t total;
    isolated it;
    isolated_load(&it, tiny_decoder_spec(types, 1, 3), MP_COMPUTE_AUTO, 1, isolation_options("spec"));
    MP_CHECK_OK(mp_text_request_create(&args, &call, &error), &error);
    MP_CHECK_STATUS(it.model->ops->check(it.model, &call->base, &cost, &total, &error), MP_UNSUPPORTED, &error);
    mp_request_destroy(&call->base);
    isolated_unload(&it);
}

static bool computes(const char *task) { /* exclude the threads of a sanitizer */
    char file[400], name[32] = "";
    snprintf(file, sizeof file, "%s/comm", task);
    FILE *comm = fopen(file, "r");
    MP_CHECK(comm && fgets(name, sizeof name, comm));
    fclose(comm);
    return strcmp(name, "mpool-compute\n") == 0;
}

/* Return how many compute threads of a process are bound to exactly these CPUs. */
static int helpers_at(int process, const mp_cpu_set *cpus) {
    char path[64], line[256];
    int count = 0;
    snprintf(path, sizeof path, "/proc/%d/task", process);
    DIR *tasks = opendir(path);
    MP_CHECK(tasks);
    for (struct dirent *task; (task = readdir(tasks));) {
        mp_cpu_set own = {{0}};
        char own_path[350], file[400];
        snprintf(own_path, sizeof own_path, "%s/%s", path, task->d_name);
        if (task->d_name[0] == '.' || !computes(own_path))
            continue;
        snprintf(file, sizeof file, "%s/status", own_path);
        FILE *status = fopen(file, "r");
        MP_CHECK(status);
        while (fgets(line, sizeof line, status)) {
            if (strncmp(line, "Cpus_allowed_list:", 18) != 0)
                continue;
            for (char *next = line + 18; *next && *next != '\n'; next += *next == ',') {
                int from = (int)strtol(next, &next, 10), to = *next == '-' ? (int)strtol(next + 1, &next, 10) : from;
                for (int cpu = from; cpu <= to; cpu++)
                    mp_cpu_set_add(&own, cpu);
            }
        }
        fclose(status);
        count += memcmp(cpus, &own, sizeof own) == 0;
    }
    closedir(tasks);
    return count;
}

MP_TEST_SECONDS(isolation_processes_compute_on_their_leased_cpus, 60) {
    enum { THREADS = 4, A_NODE = 2, BOTH = 2 };
    static const int rounds[] = {0, 1, BOTH, 1, 0, BOTH, 1, BOTH};
    static const mp_dtype types[] = {MP_Q8_0};
    static mp_cpu_set node[2];
    mp_cpu_set all;
    int cpus = 0;
    if (!mp_sys_get_affinity(&all))
        MP_SKIP("the system does not report which CPUs a thread may use");
    for (int i = 0; i < MP_CPUS_MAX && cpus < 2; i++)
        if (mp_cpu_set_has(&all, i))
            mp_cpu_set_add(&node[cpus++], i);
    if (cpus < 2)
        MP_SKIP("one CPU");
    isolated it;
    isolated_load(&it, tiny_decoder_spec(types, 1, 3), MP_COMPUTE_AUTO, THREADS, isolation_options("spec"));
    mp_team_return(&it.lease);
    tiny_model there = {.model = it.model};
    for (size_t i = 0; i < sizeof rounds / sizeof *rounds; i++) {
        bool both = rounds[i] == BOTH;
        int first = both ? 0 : rounds[i];
        mp_team_place places[] = {{&node[first], A_NODE}, {&node[!first], A_NODE}};
        tiny_job job;
        mp_team_lease_at(it.team, places, 1 + both, &it.lease);
        MP_CHECK_INT(it.lease.threads, both ? THREADS : A_NODE);
        make_job(&there, &job, 2);
        run_to_end(it.engine[0], &it.lease, &job);
        mp_request_destroy(&job.call->base);
        mp_team_return(&it.lease);
        if (both) /* threads that were bound to one node are bound again */
            MP_CHECK_INT(helpers_at(it.engine[0]->process, &all), THREADS - 1);
        else
            MP_CHECK(helpers_at(it.engine[0]->process, &node[first]) >= A_NODE - 1);
    }
    mp_team_lease(it.team, 1, &it.lease);
    isolated_unload(&it);
}
