/* test_pool.c: registry/pool/: the queue, and threads that run jobs. */
#include <stdatomic.h>
#include <stdlib.h>

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

static void make(mp_queue *queue, int one, int two) {
    mp_error error;
    MP_CHECK_OK(mp_queue_create(queue, (int[]){one, two}, &error), &error);
}

static const uint64_t SECOND = 1000ull * 1000 * 1000;

static mp_queue_node *taken(mp_queue *queue, uint64_t now_ns) {
    mp_queue_node *node = mp_queue_best(queue, now_ns);
    if (node)
        mp_queue_take(queue, node);
    return node;
}

static mp_queue_result push(mp_queue *queue, numbered_node *added, int priority, int kind, uint64_t tenant,
                            uint64_t cost, uint64_t since_ns) {
    mp_queue_node_init(&added->node, priority, kind, tenant, since_ns);
    added->node.cost = cost;
    return mp_queue_push(queue, &added->node);
}

/* Tenant 1 pushes 30 nodes of cost 10, then tenant 2 pushes 10 of cost 30: both get the same share of served cost. */
MP_TEST(pool_queue_gives_tenants_equal_shares) {
    mp_queue queue;
    numbered_node things[40];
    make(&queue, 40, 1);
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
    mp_queue_destroy(&queue);
}

/* --- shares of tenants with chosen numbers --- */

typedef struct crowd {
    mp_queue queue;
    numbered_node *nodes; /* `each` per tenant; number: index of the tenant */
    int *served, tenants, each;
} crowd;

static void gather(crowd *all, int tenants, int each, uint32_t stride) {
    *all = (crowd){.tenants = tenants, .each = each};
    make(&all->queue, tenants * each, 1);
    all->nodes = calloc((size_t)(tenants * each), sizeof(numbered_node));
    all->served = calloc((size_t)tenants, sizeof(int));
    for (int i = 0; i < tenants * each; i++) { /* all of the first tenant's nodes, then all of the second's, ... */
        all->nodes[i].number = i / each;
        push(&all->queue, &all->nodes[i], 2, 0, (uint32_t)(i / each) * stride, 7, (uint64_t)i);
    }
}

static void disperse(crowd *all) {
    mp_queue_destroy(&all->queue);
    free(all->nodes);
    free(all->served);
}

/* Equal shares within one node, at each moment, for tenants whose numbers share their low bits. */
MP_TEST(pool_queue_gives_tenants_with_chosen_numbers_equal_shares) {
    static const int sizes[] = {17, 20, 333, 10000};
    static const uint32_t strides[] = {1, 16, 4096, 65536};
    for (int i = 0; i < 4; i++) {
        crowd all;
        gather(&all, sizes[i], 3, strides[i]);
        for (int k = 0; k < sizes[i] * 3; k++) {
            mp_queue_node *node = taken(&all.queue, 0);
            MP_CHECK_INT(all.served[number_of(node)]++, k / sizes[i]); /* no tenant's second before every first */
        }
        MP_CHECK_INT(all.queue.count, 0);
        disperse(&all);
    }
}

/* A tenant that uses a new name for each request, and tenants that send one request at a time, get no more than their
 * shares: a tenant with many requests waits for at most one node of each other flow between two of its own. */
MP_TEST(pool_queue_gives_newcomers_no_more_than_their_share) {
    enum { MINE = 20, OTHERS = 4, TURNS = 400 };
    for (int renamed = 0; renamed < 2; renamed++) {
        mp_queue queue;
        numbered_node mine[MINE], others[OTHERS];
        int waited = 0, got = 0;
        make(&queue, 100, 1);
        for (int i = 0; i < MINE; i++) {
            mine[i].number = -2;
            push(&queue, &mine[i], 2, 0, 1, 1000, 0);
        }
        for (int i = 0; i < OTHERS; i++) {
            others[i].number = i;
            push(&queue, &others[i], 2, 0, 16 + (uint32_t)i * 16, 1000, 0);
        }
        for (int turn = 0; turn < TURNS && got < MINE; turn++) {
            int number = number_of(taken(&queue, 0));
            got += number == -2;
            waited = number == -2 ? 0 : waited + 1;
            MP_CHECK(waited <= 2 * OTHERS);
            if (number < 0)
                continue;
            uint32_t tenant = renamed ? 1000 + (uint32_t)turn * 16 : 16 + (uint32_t)number * 16;
            push(&queue, &others[number], 2, 0, tenant, 1000, (uint64_t)turn);
        }
        MP_CHECK_INT(got, MINE);
        mp_queue_destroy(&queue);
    }
}

/* Fair shares also apply in a level that is served early because its oldest node has waited for long. */
MP_TEST(pool_queue_shares_a_level_that_is_served_for_its_age) {
    mp_queue queue;
    numbered_node many[40], one = {.number = -2}, urgent = {.number = -3};
    make(&queue, 100, 1);
    for (int i = 0; i < 40; i++) {
        many[i].number = i;
        push(&queue, &many[i], 4, 0, 16, 1000, 0);
    }
    push(&queue, &one, 4, 0, 32, 1000, SECOND);
    uint64_t now = 20 * SECOND;
    for (int turn = 0, got = 0; !got; turn++) {
        push(&queue, &urgent, 0, 0, 0, 1000, now);
        int number = number_of(taken(&queue, now));
        MP_CHECK(number != -3 && turn < 2);
        got = number == -2;
        mp_queue_remove(&queue, &urgent.node);
    }
    while (taken(&queue, now)) {
    }
    mp_queue_destroy(&queue);
}

/* When every slot is in use, further flows share slots that a random number of the table chooses. */
MP_TEST(pool_flows_are_bounded) {
    enum { OWN = 8, MORE = 2000 };
    mp_flows flows;
    mp_error error;
    int users[OWN + 2 * MP_FLOWS_SHARED] = {0}, slot[OWN + MORE];
    bool fresh;
    MP_CHECK_OK(mp_flows_create(&flows, OWN, 2, &error), &error);
    MP_CHECK_INT(mp_flows_slots(&flows), OWN + 2 * MP_FLOWS_SHARED);
    for (int i = 0; i < OWN + MORE; i++)
        users[slot[i] = mp_flows_enter(&flows, (uint64_t)i * 16, 1, &fresh)]++;
    for (int i = 0; i < OWN; i++)
        MP_CHECK_INT(users[i], 1);
    for (int i = 0; i < MP_FLOWS_SHARED; i++) {
        MP_CHECK_INT(users[OWN + i], 0); /* the shared slots of the other group */
        MP_CHECK(users[OWN + MP_FLOWS_SHARED + i] > MORE / MP_FLOWS_SHARED / 2);
    }
    mp_flows other;
    int same = 0;
    MP_CHECK_OK(mp_flows_create(&other, OWN, 2, &error), &error);
    for (int i = 0; i < OWN + MORE; i++)
        same += mp_flows_enter(&other, (uint64_t)i * 16, 1, &fresh) == slot[i];
    MP_CHECK(same < MORE / 4); /* another table, another choice */
    mp_flows_destroy(&other);
    /* The slot that has been idle for longest is reused; the others remember their flow. */
    mp_flows_leave(&flows, slot[3]);
    mp_flows_leave(&flows, slot[5]);
    MP_CHECK_INT(mp_flows_enter(&flows, 999983, 1, &fresh), slot[3]);
    MP_CHECK(fresh);
    MP_CHECK_INT(mp_flows_enter(&flows, 5 * 16, 1, &fresh), slot[5]);
    MP_CHECK(!fresh);
    mp_flows_destroy(&flows);
}

/* Against a list of idle flows in the order in which they became idle: a new flow gets a slot that was never used, else
 * that of the longest idle flow; a known flow gets its own. */
MP_TEST(pool_flows_reuse_the_longest_idle) {
    enum { OWN = 6, KEYS = 10, ROUNDS = 4000 };
    mp_flows flows;
    mp_error error;
    mp_test_random random = {7};
    int slot_of[KEYS], users[KEYS] = {0}, idle[KEYS], idle_count = 0, used = 0, busy = 0, reused = 0, returned = 0;
    bool fresh;
    for (int i = 0; i < KEYS; i++)
        slot_of[i] = -1;
    MP_CHECK_OK(mp_flows_create(&flows, OWN, 1, &error), &error);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t dice = mp_test_random_u64(&random);
        int key = (int)(dice % KEYS);
        if (dice >> 32 & 3 && users[key]) {
            mp_flows_leave(&flows, slot_of[key]);
            if (--users[key] == 0) {
                idle[idle_count++] = key;
                busy--;
            }
            continue;
        }
        if (!users[key] && busy == OWN)
            continue;
        int expected = slot_of[key], victim = -1;
        bool known = expected >= 0;
        if (!known && used < OWN)
            expected = used++;
        else if (!known)
            expected = slot_of[victim = idle[0]];
        for (int i = 0, kept = 0, count = idle_count; i < count; i++) { /* take the key or the victim off the list */
            if (idle[i] == (known ? key : victim))
                idle_count--;
            else
                idle[kept++] = idle[i];
        }
        if (victim >= 0)
            slot_of[victim] = -1;
        reused += victim >= 0;
        returned += known && !users[key];
        slot_of[key] = mp_flows_enter(&flows, (uint64_t)key * 1000, 0, &fresh);
        busy += users[key]++ == 0;
        MP_CHECK_INT(slot_of[key], expected);
        MP_CHECK_INT(fresh, !known);
    }
    MP_CHECK(reused > 100 && returned > 100);
    mp_flows_destroy(&flows);
}

static mp_status make_queue(void *arg, mp_error *error) {
    (void)arg;
    mp_queue queue;
    MP_TRY(mp_queue_create(&queue, (int[]){10, 10}, error));
    mp_queue_destroy(&queue);
    return MP_OK;
}

MP_TEST(pool_queue_survives_refused_memory) { mp_test_alloc_sweep(make_queue, NULL); }

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
    MP_CHECK_OK(mp_pool_create("test-pool", 8, false, &pool, &error), &error);
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
    MP_CHECK_OK(mp_pool_create("test-pool", 3, false, &pool, &error), &error);
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
    MP_CHECK_OK(mp_pool_create("test-pool", 3, false, &pool, &error), &error);
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
    MP_TRY(mp_pool_create("test-pool", 4, false, &pool, error));
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
