/* The pool alone: queue, bell, threads that run jobs. */
#include <stdatomic.h>

#include "base/sys.h"
#include "mp_test.h"
#include "registry/pool/pool.h"
#include "registry/pool/queue.h"

typedef struct thing {
    mp_queue_node node;
    int number;
} thing;

static int number_of(const mp_queue_node *node) { return node ? ((const thing *)(const void *)node)->number : -1; }

MP_TEST(pool_queue_orders_by_priority_then_arrival) {
    mp_queue queue;
    thing things[6];
    static const int priorities[] = {2, 0, 4, 2, 0, 9};
    mp_queue_init(&queue, 6);
    memset(things, 0, sizeof(things));
    for (int i = 0; i < 6; i++) {
        things[i].number = i;
        MP_CHECK_INT(mp_queue_push(&queue, &things[i].node, priorities[i]), MP_QUEUE_TAKEN);
    }
    MP_CHECK(mp_queue_full(&queue));
    static const int order[] = {1, 4, 0, 3, 2, 5};
    int at = 0;
    for (mp_queue_node *node = mp_queue_first(&queue); node; node = mp_queue_next(&queue, node)) {
        MP_CHECK_INT(number_of(node), order[at]);
        MP_CHECK_INT(mp_queue_position(&queue, node), at++);
    }
    MP_CHECK_INT(at, 6);
    for (int i = 0; i < 6; i++)
        MP_CHECK_INT(number_of(mp_queue_pop(&queue)), order[i]);
    MP_CHECK(mp_queue_pop(&queue) == NULL);
    MP_CHECK_INT(queue.count, 0);
}

MP_TEST(pool_queue_refuses_when_full_or_closed) {
    mp_queue queue;
    thing a = {.number = 1}, b = {.number = 2}, c = {.number = 3};
    mp_queue_init(&queue, 1);
    MP_CHECK_INT(mp_queue_push(&queue, &a.node, 1), MP_QUEUE_TAKEN);
    MP_CHECK_INT(mp_queue_push(&queue, &b.node, 0), MP_QUEUE_FULL);
    MP_CHECK(!mp_queue_holds(&b.node));
    mp_queue_push_front(&queue, &b.node, 1); /* accepted before: never refused */
    MP_CHECK_INT(queue.count, 2);
    mp_queue_close(&queue);
    MP_CHECK_INT(mp_queue_push(&queue, &c.node, 0), MP_QUEUE_CLOSED);
    MP_CHECK_INT(number_of(mp_queue_pop(&queue)), 2);
    MP_CHECK_INT(number_of(mp_queue_pop(&queue)), 1);
    MP_CHECK(!mp_queue_holds(&a.node) && !mp_queue_holds(&b.node));
}

MP_TEST(pool_queue_removes_from_the_middle) {
    mp_queue queue;
    thing things[50];
    mp_test_random random = {7};
    mp_queue_init(&queue, 50);
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
            MP_CHECK_INT(mp_queue_push(&queue, &things[i].node, i % 7), MP_QUEUE_TAKEN);
            count++;
        }
        waits[i] = !waits[i];
        MP_CHECK_INT(queue.count, count);
        MP_CHECK_INT(mp_queue_holds(&things[i].node), waits[i]);
    }
    int seen = 0, last = 0;
    for (mp_queue_node *node; (node = mp_queue_pop(&queue)); seen++) {
        MP_CHECK(waits[number_of(node)] && node->priority >= last);
        last = node->priority;
    }
    MP_CHECK_INT(seen, count);
}

/* --- bell --- */

static bool always(void *arg) {
    (void)arg;
    return true;
}

static void nothing(void *arg) { (void)arg; }

typedef struct desk { /* one thread puts work down, another takes it away */
    mp_mutex lock;
    mp_bell bell;
    int work, taken;
    bool over;
    mp_spin_rule rule;
} desk;

static void take_work(void *arg) {
    desk *desk = arg;
    mp_mutex_lock(&desk->lock);
    while (!desk->over || desk->work) {
        if (desk->work) {
            desk->work--;
            desk->taken++;
        } else {
            mp_bell_wait(&desk->bell, &desk->lock, &desk->rule, 0);
        }
    }
    mp_mutex_unlock(&desk->lock);
}

static void ring_many(uint64_t spin_ns) {
    enum { RINGS = 20000 };
    desk desk = {.rule = {always, always, nothing, NULL, spin_ns}};
    mp_mutex_init(&desk.lock);
    mp_bell_init(&desk.bell);
    mp_thread thread;
    mp_error error;
    MP_CHECK_OK(mp_thread_start(&thread, "taker", take_work, &desk, &error), &error);
    for (int i = 0; i <= RINGS; i++) {
        mp_mutex_lock(&desk.lock);
        if (i < RINGS)
            desk.work++;
        else
            desk.over = true;
        bool wake = mp_bell_ring(&desk.bell);
        mp_mutex_unlock(&desk.lock);
        if (wake)
            mp_bell_wake(&desk.bell);
        if (i % 64 == 0) /* so that it parks now and then */
            mp_sys_sleep_ns(200 * 1000);
    }
    mp_thread_join(&thread);
    MP_CHECK_INT(desk.taken, RINGS);
    mp_bell_deinit(&desk.bell);
    mp_mutex_deinit(&desk.lock);
}

MP_TEST(pool_bell_loses_no_ring_parked) { ring_many(0); }

MP_TEST(pool_bell_loses_no_ring_spinning) { ring_many(50 * 1000); }

MP_TEST(pool_bell_keeps_its_deadline) {
    mp_mutex lock;
    mp_bell bell;
    mp_mutex_init(&lock);
    mp_bell_init(&bell);
    mp_mutex_lock(&lock);
    uint64_t deadline = mp_sys_now_ns() + 20 * 1000 * 1000;
    while (mp_sys_now_ns() < deadline)
        mp_bell_wait(&bell, &lock, NULL, deadline);
    MP_CHECK_INT(bell.parked, 0);
    mp_mutex_unlock(&lock);
    mp_bell_deinit(&bell);
    mp_mutex_deinit(&lock);
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
    MP_CHECK_INT(threads, 0); /* created when the first job comes */
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
    MP_CHECK_INT(threads, busy); /* no half-registered worker */
    atomic_store(&gate, 1);
    mp_pool_destroy(pool);
    return status;
}

MP_TEST(pool_survives_refused_threads) { MP_CHECK_INT(mp_test_fault_sweep(MP_FAULT_THREAD, start_and_stop, NULL), 3); }

MP_TEST(pool_survives_refused_memory) { mp_test_alloc_sweep(start_and_stop, NULL); }
