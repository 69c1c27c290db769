/* The table of recent vectors (models/dedup.h): which inputs are equal, which vectors are kept, threads and forks. */
#include <stdatomic.h>
#include <string.h>

#include "base/sanitize.h"
#include "models/dedup.h"
#include "mp_test.h"

typedef struct bench {
    mp_budget budget;
    mp_recent recent;
} bench;

static void set_up(bench *b) {
    mp_error error;
    b->budget = (mp_budget){.limit = UINT64_MAX};
    MP_CHECK_OK(mp_recent_init(&b->recent, &b->budget, &error), &error);
    b->recent.keep_ns = UINT64_MAX;
}

static void take_down(bench *b) {
    mp_recent_deinit(&b->recent);
    MP_CHECK_INT(b->budget.used, 0);
}

static mp_dedup_input input_of(bench *b, mp_cache_scope scope, const void *content, size_t bytes, float *out,
                               int dimensions) {
    return (mp_dedup_input){.key = mp_recent_key(&b->recent, scope, content, bytes),
                            .options = {1, 2, 3, 4, 5},
                            .dimensions = dimensions,
                            .content = content,
                            .bytes = bytes,
                            .out = out};
}

/* Each field alone makes another input, also if the hashes collide. */
MP_TEST(models_recent_compares_whole_inputs) {
    static const mp_cache_scope scope = {5, 6};
    float kept[2] = {1, 2}, out[2] = {0};
    uint8_t content[4] = {1, 2, 3, 4}, other[4] = {1, 2, 3, 5};
    bench b;
    set_up(&b);
    mp_dedup_input input = input_of(&b, scope, content, 4, kept, 2);
    mp_dedup_table table = {0};
    mp_error error;
    mp_recent_keep(&b.recent, &input, 1);
    for (int i = 0; i < 9; i++) {
        mp_dedup_input inputs[2] = {input, input};
        mp_dedup_input *differs = &inputs[1];
        differs->out = out;
        differs->key.scope.tenant += i == 1;
        differs->key.scope.tenant += i == 2 ? 1ull << 32 : 0; /* all 64 bits count */
        differs->key.scope.variant += i == 3;
        differs->options[0] += i == 4;
        differs->options[MP_DEDUP_OPTIONS - 1] += i == 5;
        differs->dimensions -= i == 6;
        differs->bytes -= i == 7;
        differs->content = i == 8 ? other : content;
        MP_CHECK_INT(mp_recent_find(&b.recent, differs, 1), i == 0);
        MP_CHECK_OK(mp_dedup_table_begin(&table, 2, "a table", &error), &error);
        MP_CHECK_INT(mp_dedup_table_find(&table, inputs, 0), -1);
        MP_CHECK_INT(mp_dedup_table_find(&table, inputs, 1), i == 0 ? 0 : -1);
    }
    MP_CHECK(out[0] == 1 && out[1] == 2);
    MP_CHECK_INT(b.recent.hits, 1);
    mp_dedup_table_deinit(&table);
    take_down(&b);
}

/* The newest vectors are kept: at most MP_DEDUP_RECENT, and as many as fit. Against the list of all inputs. */
MP_TEST(models_recent_keeps_the_newest) {
    enum { ALL = 2000, MOST = 4000, WIDTH = 16 };
    static uint8_t content[ALL][MOST];
    static float vectors[ALL][WIDTH];
    static const size_t store[] = {1 << 20, 40000, 9999, MOST + WIDTH * 4};
    for (int round = 0; round < 4; round++) {
        bench b;
        mp_test_random random = {17 + (uint64_t)round};
        set_up(&b);
        b.recent.most_bytes = store[round];
        const size_t most = round == 0 ? 40 : MOST; /* round 0: the number of entries is the limit */
        size_t bytes[ALL];
        int dimensions[ALL];
        for (int i = 0; i < ALL; i++) {
            bytes[i] = 5 + mp_test_random_u64(&random) % (most - 4);
            dimensions[i] = 1 + (int)(mp_test_random_u64(&random) % WIDTH);
            memcpy(content[i], &i, sizeof i);
            for (int k = 0; k < WIDTH; k++)
                vectors[i][k] = (float)(i + k);
            mp_dedup_input input = input_of(&b, (mp_cache_scope){0}, content[i], bytes[i], vectors[i], dimensions[i]);
            mp_recent_keep(&b.recent, &input, 1);
            if (i % 50)
                continue;
            bool all = true;
            size_t used = 0;
            int found = 0;
            for (int j = i; j >= 0; j--) {
                float out[WIDTH];
                mp_dedup_input again = input_of(&b, (mp_cache_scope){0}, content[j], bytes[j], out, dimensions[j]);
                const bool hit = mp_recent_find(&b.recent, &again, 1);
                MP_CHECK(!hit || (all && memcmp(out, vectors[j], (size_t)dimensions[j] * sizeof(float)) == 0));
                all &= hit;
                found += hit;
                used += hit ? bytes[j] + (size_t)dimensions[j] * sizeof(float) : 0;
            }
            MP_CHECK(found >= 1 && used <= store[round]);
            MP_CHECK_INT(b.recent.count, found);
            if (round == 0)
                MP_CHECK_INT(found, i < MP_DEDUP_RECENT ? i + 1 : MP_DEDUP_RECENT);
            if (round == 1 && i > 100) /* unused: less than one input at the end, and less than one before the oldest */
                MP_CHECK(used + 2 * (MOST + WIDTH * 4) > store[round]);
        }
        take_down(&b);
    }
}

/* A vector is used for `keep_ns`. One that another worker computed after this step began is used, too. */
MP_TEST(models_recent_vectors_expire) {
    uint8_t content[8] = {0};
    float vector[2] = {1, 2};
    bench b;
    set_up(&b);
    b.recent.keep_ns = MP_DEDUP_KEEP_NS;
    mp_dedup_input input = input_of(&b, (mp_cache_scope){0}, content, 8, vector, 2);
    mp_recent_keep(&b.recent, &input, 1000);
    MP_CHECK(mp_recent_find(&b.recent, &input, 900));
    MP_CHECK(mp_recent_find(&b.recent, &input, 1000 + MP_DEDUP_KEEP_NS));
    MP_CHECK(!mp_recent_find(&b.recent, &input, 1001 + MP_DEDUP_KEEP_NS));
    take_down(&b);
}

/* In the child of a fork the table is empty and its lock is free, whatever other threads did at the fork. */
MP_TEST(models_recent_is_empty_after_a_fork) {
    uint8_t content[8] = {0};
    float vector[2] = {1, 2};
    bench b;
    set_up(&b);
    mp_dedup_input input = input_of(&b, (mp_cache_scope){0}, content, 8, vector, 2);
    mp_recent_keep(&b.recent, &input, 1);
    if (!MP_SANITIZED) /* ThreadSanitizer reports a new lock in the place of one that is held */
        mp_mutex_lock(&b.recent.lock);
    b.recent.forked.forget(&b.recent.forked);
    MP_CHECK(!mp_recent_find(&b.recent, &input, 1));
    mp_recent_keep(&b.recent, &input, 1);
    MP_CHECK(mp_recent_find(&b.recent, &input, 1));
    take_down(&b);
}

enum { THREADS = 4, INPUTS = 50, TURNS = 2000 };

typedef struct shared_table {
    bench *bench;
    int thread;
} shared_table;

static _Atomic int hits;

static void use_table(void *arg) {
    const shared_table *shared = arg;
    for (int turn = 0; turn < TURNS; turn++) {
        int32_t content[64] = {turn % (turn % 3 ? 5 : INPUTS)}; /* the table keeps the first five */
        float vector[8], out[8];
        for (int k = 0; k < 8; k++)
            vector[k] = (float)(content[0] * 8 + k);
        mp_dedup_input input = input_of(shared->bench, (mp_cache_scope){0}, content, sizeof content, out, 8);
        if (mp_recent_find(&shared->bench->recent, &input, 1)) {
            MP_CHECK(memcmp(out, vector, sizeof out) == 0);
            atomic_fetch_add(&hits, 1);
        }
        input.out = vector;
        mp_recent_keep(&shared->bench->recent, &input, 1);
        input.out = out;
        if (mp_recent_find(&shared->bench->recent, &input, 1)) /* no other thread has dropped it yet */
            MP_CHECK(memcmp(out, vector, sizeof out) == 0);
        if (turn % 500 == 100 * shared->thread)
            mp_recent_trim(&shared->bench->recent);
    }
}

MP_TEST(models_recent_is_shared_by_threads) {
    bench b;
    mp_thread threads[THREADS];
    shared_table shared[THREADS];
    mp_error error;
    set_up(&b);
    b.recent.most_bytes = 5000;
    for (int i = 0; i < THREADS; i++) {
        shared[i] = (shared_table){&b, i};
        MP_CHECK_OK(mp_thread_start(&threads[i], "table", use_table, &shared[i], &error), &error);
    }
    for (int i = 0; i < THREADS; i++)
        mp_thread_join(&threads[i]);
    MP_CHECK(atomic_load(&hits) > THREADS * TURNS / 10);
    take_down(&b);
}
