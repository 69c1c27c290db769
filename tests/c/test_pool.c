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

MP_TEST(pool_queue_orders_by_priority_then_arrival) {
    mp_queue queue;
    numbered_node things[6];
    static const int priorities[] = {2, 0, 4, 2, 0, 9};
    make(&queue, 6, 1);
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
    mp_queue_destroy(&queue);
}

MP_TEST(pool_queue_refuses_when_full) {
    mp_queue queue;
    numbered_node a = {.number = 1}, b = {.number = 2}, d = {.number = 4};
    make(&queue, 1, 1);
    MP_CHECK_INT(push(&queue, &a, 1, 0, 0, 0, 0), MP_QUEUE_TAKEN);
    MP_CHECK_INT(push(&queue, &b, 0, 0, 0, 0, 0), MP_QUEUE_FULL);
    MP_CHECK(!mp_queue_holds(&b.node));
    MP_CHECK_INT(push(&queue, &d, 3, 1, 0, 0, 0), MP_QUEUE_TAKEN); /* each kind has its own capacity */
    mp_queue_node_init(&b.node, 1, 0, 0, 0);
    mp_queue_push_front(&queue, &b.node); /* puts back a node that was accepted before: never refused */
    MP_CHECK_INT(queue.count, 3);
    MP_CHECK_INT(number_of(taken(&queue, 0)), 2);
    MP_CHECK_INT(number_of(taken(&queue, 0)), 1);
    MP_CHECK_INT(number_of(taken(&queue, 0)), 4);
    MP_CHECK(!mp_queue_holds(&a.node) && !mp_queue_holds(&b.node) && !mp_queue_holds(&d.node));
    mp_queue_destroy(&queue);
}

MP_TEST(pool_queue_removes_from_the_middle) {
    mp_queue queue;
    numbered_node things[50];
    mp_test_random random = {7};
    make(&queue, 50, 50);
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
    mp_queue_destroy(&queue);
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

/* A flow gains no credit for the time in which it was empty. */
MP_TEST(pool_queue_does_not_accumulate_unused_shares) {
    mp_queue queue;
    numbered_node things[30];
    make(&queue, 40, 1);
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
    mp_queue_destroy(&queue);
}

MP_TEST(pool_queue_starves_no_flow) {
    mp_queue queue;
    numbered_node old = {.number = -2}, urgent[2] = {{.number = 0}, {.number = 1}};
    make(&queue, 10, 1);
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

/* A tenant that gets the slot of another one does not inherit the service that the other one had. */
MP_TEST(pool_queue_does_not_charge_a_tenant_for_the_slot_of_another) {
    mp_queue queue;
    numbered_node first = {.number = 0}, others[MP_QUEUE_SPARE_FLOWS + 8], waiting[3], newcomer = {.number = 1};
    make(&queue, 4, 4);
    push(&queue, &first, 2, 0, 1, 1000 * 1000, 0);
    push(&queue, &others[0], 2, 0, 100, 1, 0);
    MP_CHECK_INT(number_of(taken(&queue, 0)), 0); /* tenant 1 got more than its share, and is idle for longest */
    taken(&queue, 0);
    MP_CHECK_INT(queue.flows.used, 2);
    for (int i = 1; i < queue.flows.count - 1; i++) { /* use all other slots once */
        push(&queue, &others[i], 2, 0, 100 + (uint32_t)i, 1, 0);
        taken(&queue, 0);
    }
    for (int i = 0; i < 3; i++) {
        waiting[i].number = 10 + i;
        push(&queue, &waiting[i], 2, 0, 100, 1, 0);
    }
    push(&queue, &newcomer, 2, 0, 7, 1, 0); /* takes the slot of tenant 1 */
    int place = 0;
    while (number_of(taken(&queue, 0)) != 1)
        place++;
    MP_CHECK(place <= 1);
    while (taken(&queue, 0))
        continue;
    mp_queue_destroy(&queue);
}

/* Queues n nodes of one tenant, with this cost each. */
static void push_many(mp_queue *queue, numbered_node *nodes, int n, int number, uint64_t tenant, uint64_t cost) {
    for (int i = 0; i < n; i++) {
        nodes[i].number = number;
        MP_CHECK_INT(push(queue, &nodes[i], 2, 0, tenant, cost, 0), MP_QUEUE_TAKEN);
    }
}

/* Takes n nodes of the tenants with numbers 1 and 2, which get turns. */
static void expect_turns(mp_queue *queue, int n) {
    int had[3] = {0};
    for (int i = 0; i < n; i++) {
        had[number_of(taken(queue, 0))]++;
        MP_CHECK(had[1] - had[2] >= -1 && had[1] - had[2] <= 1);
    }
}

/* A tenant that comes first after others were served takes turns from its first node on: it has no claim on the service
 * of the past, and owes none. */
MP_TEST(pool_queue_owes_newcomers_nothing) {
    for (int alone = 0; alone < 2; alone++) {
        mp_queue queue;
        numbered_node first[40], second[20], third[20];
        make(&queue, 100, 1);
        push_many(&queue, first, 40, 1, 1, 100);
        if (!alone)
            push_many(&queue, third, 20, 0, 3, 100);
        for (int i = 0; i < (alone ? 20 : 40); i++)
            taken(&queue, 0);
        for (int i = 0; i < 20 && !alone; i++) /* the third one has gone */
            if (mp_queue_holds(&third[i].node))
                mp_queue_remove(&queue, &third[i].node);
        push_many(&queue, second, 20, 2, 2, 100);
        expect_turns(&queue, 40);
        MP_CHECK_INT(queue.count, 0);
        mp_queue_destroy(&queue);
    }
}

/* The same after a tenant took much at once while another one waited, which then left without service. */
MP_TEST(pool_queue_owes_newcomers_nothing_after_a_cancellation) {
    mp_queue queue;
    numbered_node costly, first[11], cancelled, second[10];
    make(&queue, 100, 1);
    push_many(&queue, &costly, 1, 1, 1, 5000);
    push_many(&queue, first, 11, 1, 1, 100);
    push_many(&queue, &cancelled, 1, 0, 3, 100);
    MP_CHECK_INT(number_of(taken(&queue, 0)), 1);
    mp_queue_remove(&queue, &cancelled.node);
    MP_CHECK_INT(number_of(taken(&queue, 0)), 1);
    push_many(&queue, second, 10, 2, 2, 100);
    expect_turns(&queue, 20);
    mp_queue_destroy(&queue);
}

/* Virtual time advances by the cost of each node taken, divided by the number of waiting flows, without a remainder. */
MP_TEST(pool_queue_loses_no_virtual_time) {
    mp_queue queue;
    numbered_node first[2], second[2], third[2];
    make(&queue, 100, 1);
    push_many(&queue, first, 2, 1, 1, 4);
    push_many(&queue, second, 2, 2, 2, 4);
    push_many(&queue, third, 2, 3, 3, 4);
    taken(&queue, 0);
    MP_CHECK_INT(queue.levels[2].now, 1); /* 5 / 3 */
    taken(&queue, 0);
    MP_CHECK_INT(queue.levels[2].now, 3); /* 10 / 3 */
    taken(&queue, 0);
    MP_CHECK_INT(queue.levels[2].now, 5);
    while (taken(&queue, 0))
        continue;
    mp_queue_destroy(&queue);
}

/* A tenant that was idle while another one was served gets no more than its share afterwards, no matter how much
 * service it had before. */
MP_TEST(pool_queue_owes_idle_flows_nothing) {
    for (int large = 0; large < 2; large++) { /* the cost of the idle tenant's earlier node: 10 or 1,000 */
        mp_queue queue;
        numbered_node first[60], second[20], before;
        make(&queue, 100, 1);
        push_many(&queue, &before, 1, 2, 2, large ? 1000 : 10);
        MP_CHECK_INT(number_of(taken(&queue, 0)), 2);
        push_many(&queue, first, 60, 1, 1, 100);
        for (int i = 0; i < 40; i++)
            MP_CHECK_INT(number_of(taken(&queue, 0)), 1);
        push_many(&queue, second, 20, 2, 2, 100);
        expect_turns(&queue, 40);
        mp_queue_destroy(&queue);
    }
}

/* A tenant that took one costly node beside another one and comes back at once waits until the other has had as much.
 */
MP_TEST(pool_queue_charges_a_costly_node) {
    mp_queue queue;
    numbered_node first[30], second[2];
    int before = 0;
    make(&queue, 100, 1);
    push_many(&queue, second, 1, 2, 2, 999);
    push_many(&queue, first, 30, 1, 1, 99);
    MP_CHECK_INT(number_of(taken(&queue, 0)), 2);
    push_many(&queue, second + 1, 1, 2, 2, 99);
    while (number_of(taken(&queue, 0)) == 1)
        before++;
    MP_CHECK(before >= 10 && before <= 11); /* 10 nodes of cost 99 + 1 are as much as one of 999 + 1 */
    while (taken(&queue, 0))
        continue;
    mp_queue_destroy(&queue);
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
