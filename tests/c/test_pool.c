/* test_pool.c: registry/pool/: the queue, and threads that run jobs. */
#include <stdatomic.h>

#include "base/alloc.h"
#include "base/sys.h"
#include "mp_test.h"
#include "registry/pool/pool.h"
#include "registry/pool/queue.h"

typedef struct numbered_node {
    mp_queue_node node;
    int number;
} numbered_node;

static int number_of(const mp_queue_node *node) {
    return node ? ((const numbered_node *)(const void *)node)->number : -1;
}

static const uint64_t SECOND = 1000ull * 1000 * 1000;

static mp_queue_node *taken(mp_queue *queue, uint64_t now_ns) {
    mp_queue_node *node = mp_queue_best(queue, now_ns);
    if (node)
        mp_queue_take(queue, node);
    return node;
}

static mp_queue_result push(mp_queue *queue, numbered_node *added, int priority, int kind, uint32_t tenant,
                            uint64_t cost, uint64_t since_ns) {
    mp_queue_node_init(&added->node, priority, kind, tenant, since_ns);
    added->node.cost = cost;
    return mp_queue_push(queue, &added->node);
}

MP_TEST(pool_queue_orders_by_priority_then_arrival) {
    mp_queue queue;
    numbered_node things[6];
    static const int priorities[] = {2, 0, 4, 2, 0, 9};
    mp_queue_init(&queue, (int[]){6, 1});
    for (int i = 0; i < 6; i++) {
        things[i].number = i;
        MP_CHECK_INT(push(&queue, &things[i], priorities[i], 0, 0, 5, (uint64_t)i), MP_QUEUE_TAKEN);
    }
    MP_CHECK(mp_queue_full(&queue, 0) && !mp_queue_full(&queue, 1));
    MP_CHECK_INT(queue.cost, 30);
    static const int order[] = {1, 4, 0, 3, 2, 5};
    int at = 0;
    for (mp_queue_node *node = mp_queue_first(&queue); node; node = mp_queue_next(&queue, node)) {
        uint64_t cost;
        MP_CHECK_INT(number_of(node), order[at]);
        MP_CHECK_INT(mp_queue_position(&queue, node, &cost), at);
        MP_CHECK_INT(cost, 5 * at++);
    }
    MP_CHECK_INT(at, 6);
    for (int i = 0; i < 6; i++)
        MP_CHECK_INT(number_of(taken(&queue, 10)), order[i]);
    MP_CHECK(mp_queue_best(&queue, 10) == NULL);
    MP_CHECK_INT(queue.count + queue.counts[0] + (int)queue.cost, 0);
}

MP_TEST(pool_queue_refuses_when_full_or_closed) {
    mp_queue queue;
    numbered_node a = {.number = 1}, b = {.number = 2}, c = {.number = 3}, d = {.number = 4};
    mp_queue_init(&queue, (int[]){1, 1});
    MP_CHECK_INT(push(&queue, &a, 1, 0, 0, 0, 0), MP_QUEUE_TAKEN);
    MP_CHECK_INT(push(&queue, &b, 0, 0, 0, 0, 0), MP_QUEUE_FULL);
    MP_CHECK(!mp_queue_holds(&b.node));
    MP_CHECK_INT(push(&queue, &d, 3, 1, 0, 0, 0), MP_QUEUE_TAKEN); /* each kind has its own capacity */
    mp_queue_node_init(&b.node, 1, 0, 0, 0);
    mp_queue_push_front(&queue, &b.node); /* puts back a node that was accepted before: never refused */
    MP_CHECK_INT(queue.count, 3);
    mp_queue_close(&queue);
    MP_CHECK_INT(push(&queue, &c, 0, 0, 0, 0, 0), MP_QUEUE_CLOSED);
    MP_CHECK_INT(number_of(taken(&queue, 0)), 2);
    MP_CHECK_INT(number_of(taken(&queue, 0)), 1);
    MP_CHECK_INT(number_of(taken(&queue, 0)), 4);
    MP_CHECK(!mp_queue_holds(&a.node) && !mp_queue_holds(&b.node) && !mp_queue_holds(&d.node));
}

MP_TEST(pool_queue_removes_from_the_middle) {
    mp_queue queue;
    numbered_node things[50];
    mp_test_random random = {7};
    mp_queue_init(&queue, (int[]){50, 50});
    memset(things, 0, sizeof(things));
    bool waits[50] = {false};
    int count = 0;
    for (int turn = 0; turn < 5000; turn++) {
        int i = (int)(mp_test_random_u64(&random) % 50);
        if (waits[i]) {
            mp_queue_remove(&queue, &things[i].node);
            count--;
        } else {
            things[i].number = i;
            MP_CHECK_INT(push(&queue, &things[i], i % 7, i % 2, (uint32_t)i % 5, 1, 0), MP_QUEUE_TAKEN);
            count++;
        }
        waits[i] = !waits[i];
        MP_CHECK_INT(queue.count, count);
        MP_CHECK_INT(queue.counts[0] + queue.counts[1], count);
        MP_CHECK_INT(mp_queue_holds(&things[i].node), waits[i]);
    }
    int seen = 0, last = 0;
    for (mp_queue_node *node; (node = taken(&queue, 0)); seen++) {
        MP_CHECK(waits[number_of(node)] && node->priority >= last);
        last = node->priority;
    }
    MP_CHECK_INT(seen, count);
}

/* Tenant 1 pushes 30 nodes of cost 10, then tenant 2 pushes 10 of cost 30: both get the same share of served cost. */
MP_TEST(pool_queue_gives_tenants_equal_shares) {
    mp_queue queue;
    numbered_node things[40];
    mp_queue_init(&queue, (int[]){40, 1});
    for (int i = 0; i < 40; i++) {
        things[i].number = i;
        MP_CHECK_INT(push(&queue, &things[i], 2, 0, i < 30 ? 1 : 2, i < 30 ? 10 : 30, (uint64_t)i), MP_QUEUE_TAKEN);
    }
    int64_t had[2] = {0, 0};
    for (int i = 0; i < 40; i++) {
        int number = number_of(taken(&queue, 40));
        had[number >= 30] += number < 30 ? 10 : 30;
        int64_t apart = had[0] - had[1];
        MP_CHECK(apart >= -40 && apart <= 40); /* 10 + 30: the cost of one node of each tenant */
    }
    MP_CHECK_INT(had[0], had[1]);
}

/* A flow gains no credit for the time in which it was empty. */
MP_TEST(pool_queue_does_not_accumulate_unused_shares) {
    mp_queue queue;
    numbered_node things[30];
    mp_queue_init(&queue, (int[]){40, 1});
    for (int i = 0; i < 20; i++) {
        things[i].number = i;
        push(&queue, &things[i], 2, 0, 1, 10, 0);
    }
    for (int i = 0; i < 10; i++)
        taken(&queue, 0);
    for (int i = 20; i < 30; i++) {
        things[i].number = i;
        push(&queue, &things[i], 2, 0, 2, 10, 0);
    }
    int newcomer = 0;
    for (int i = 0; i < 10; i++)
        newcomer += number_of(taken(&queue, 0)) >= 20;
    MP_CHECK(newcomer >= 4 && newcomer <= 6);
}

MP_TEST(pool_queue_starves_no_flow) {
    mp_queue queue;
    numbered_node old = {.number = -2}, urgent[2] = {{.number = 0}, {.number = 1}};
    mp_queue_init(&queue, (int[]){10, 1});
    push(&queue, &old, 4, 0, 0, 1, 0);
    /* Whenever an urgent node was served, another one arrives. The old node gains one level per MP_QUEUE_AGEING_NS. */
    uint64_t now = 0;
    for (int turn = 0;; turn++) {
        numbered_node *numbered_node = &urgent[turn % 2];
        push(&queue, numbered_node, 0, 0, 0, 1, now);
        if (number_of(taken(&queue, now)) == -2)
            break;
        MP_CHECK(now < 100 * SECOND);
        now += SECOND / 4;
    }
    MP_CHECK(now > 4 * MP_QUEUE_AGEING_NS && now <= 5 * MP_QUEUE_AGEING_NS + SECOND);
}

/* --- jobs --- */

enum { JOBS = 300 };
static _Atomic int runs[JOBS];
static _Atomic int gate;

static void run_once(void *arg) { atomic_fetch_add((_Atomic int *)arg, 1); }

static void wait_at_gate(void *arg) {
    atomic_fetch_add((_Atomic int *)arg, 1);
    while (!atomic_load(&gate))
        mp_sys_sleep_ns(100 * 1000);
}

MP_TEST(pool_runs_each_job_once_and_joins_its_threads) {
    mp_pool *pool;
    mp_error error;
    uint64_t created, joined;
    MP_CHECK_OK(mp_pool_create("test-pool", 8, &pool, &error), &error);
    int threads, busy;
    mp_pool_counts(pool, &threads, &busy);
    MP_CHECK_INT(threads, 0); /* the first job starts the first thread */
    for (int i = 0; i < JOBS; i++) {
        mp_status status;
        while ((status = mp_pool_run(pool, (mp_job){run_once, (void *)&runs[i]}, &error)) == MP_SPAWN_FAILED)
            mp_sys_sleep_ns(50 * 1000);
        MP_CHECK_OK(status, &error);
    }
    mp_pool_destroy(pool);
    for (int i = 0; i < JOBS; i++)
        MP_CHECK_INT(runs[i], 1);
    mp_thread_counts(&created, &joined);
    MP_CHECK_INT(created, joined);
    MP_CHECK(created <= 8);
}

MP_TEST(pool_gives_every_job_a_thread_up_to_its_limit) {
    mp_pool *pool;
    mp_error error;
    MP_CHECK_OK(mp_pool_create("test-pool", 3, &pool, &error), &error);
    for (int i = 0; i < 3; i++)
        MP_CHECK_OK(mp_pool_run(pool, (mp_job){wait_at_gate, (void *)&runs[0]}, &error), &error);
    MP_CHECK_STATUS(mp_pool_run(pool, (mp_job){run_once, (void *)&runs[1]}, &error), MP_SPAWN_FAILED, &error);
    MP_CHECK_HAS(error.message, "3 threads");
    while (atomic_load(&runs[0]) < 3)
        mp_sys_sleep_ns(100 * 1000);
    atomic_store(&gate, 1);
    mp_pool_destroy(pool);
    MP_CHECK_INT(runs[1], 0);
}

/* A job that does not end is disowned: destroy does not wait for it, and its thread ends with the job. */
MP_TEST(pool_destroy_does_not_wait_for_disowned_jobs) {
    mp_pool *pool;
    mp_error error;
    uint64_t created, joined;
    MP_CHECK_OK(mp_pool_create("test-pool", 3, &pool, &error), &error);
    MP_CHECK_OK(mp_pool_run(pool, (mp_job){wait_at_gate, (void *)&runs[0]}, &error), &error);
    MP_CHECK_OK(mp_pool_run(pool, (mp_job){run_once, (void *)&runs[1]}, &error), &error);
    while (atomic_load(&runs[0]) < 1)
        mp_sys_sleep_ns(100 * 1000);
    mp_pool_disown(pool, &runs[2]); /* no job has this arg */
    mp_pool_disown(pool, &runs[0]);
    int threads, busy;
    mp_pool_counts(pool, &threads, &busy);
    MP_CHECK(threads <= 1 && busy <= 1);
    mp_pool_destroy(pool);
    MP_CHECK_INT(runs[1], 1);
    mp_thread_counts(&created, &joined);
    MP_CHECK_INT(created, joined);
    uint64_t held = mp_alloc_bytes(MP_TAG_POOL);
    MP_CHECK(held > 0);
    atomic_store(&gate, 1);
    for (int i = 0; i < 5000 && mp_alloc_bytes(MP_TAG_POOL); i++)
        mp_sys_sleep_ns(1000 * 1000);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_POOL), 0);
}

static mp_status start_and_stop(void *arg, mp_error *error) {
    (void)arg;
    mp_pool *pool;
    MP_TRY(mp_pool_create("test-pool", 4, &pool, error));
    atomic_store(&gate, 0);
    mp_status status = MP_OK;
    for (int i = 0; i < 3 && status == MP_OK; i++)
        status = mp_pool_run(pool, (mp_job){wait_at_gate, (void *)&runs[0]}, error);
    int threads, busy;
    mp_pool_counts(pool, &threads, &busy);
    MP_CHECK(threads == 3 || status != MP_OK);
    MP_CHECK_INT(threads, busy); /* every counted thread runs a job */
    atomic_store(&gate, 1);
    mp_pool_destroy(pool);
    return status;
}

MP_TEST(pool_survives_refused_threads) { MP_CHECK_INT(mp_test_fault_sweep(MP_FAULT_THREAD, start_and_stop, NULL), 3); }

MP_TEST(pool_survives_refused_memory) { mp_test_alloc_sweep(start_and_stop, NULL); }
