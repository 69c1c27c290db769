/* CPU leases on machines with several memory nodes: the allocator on simulated machines. */
#include <stdlib.h>

#include "base/alloc.h"
#include "base/options.h"
#include "mp_test.h"
#include "registry/cpu_allocator.h"
#include "test_registry_fake.h"

static mp_error error;

/* Opens an allocator for nodes with the given numbers of CPUs, numbered 0, 2, 4, ... The machine need not have these
 * CPUs: a thread that cannot be bound to them runs where the system allows. */
static mp_cpu_allocator *allocator_of(int threads, const int *cpus, int nodes) {
    mp_topology topology = {.node_count = nodes};
    int next = 512;
    for (int i = nodes; i < MP_NODES_MAX; i++)
        topology.nodes[i] = (mp_node){.number = -7, .memory = -7, .cpu_count = 1000}; /* must not be read */
    for (int i = 0; i < nodes; i++) {
        topology.nodes[i] = (mp_node){.number = 2 * i, .memory = 2 * i, .cpu_count = cpus[i]};
        for (int k = 0; k < cpus[i]; k++)
            mp_cpu_set_add(&topology.nodes[i].cpus, next++);
    }
    mp_cpu_allocator *allocator;
    MP_CHECK_OK(mp_cpu_allocator_open_on(threads, &topology, &allocator, &error), &error);
    return allocator;
}

typedef struct holder {
    int home;
    mp_lease lease;
    mp_core_lease threads;
} holder;

static void take(mp_cpu_allocator *allocator, holder *h, int want) {
    MP_CHECK(mp_cpu_allocator_lease(allocator, h->home, want, &h->lease, &h->threads, NULL, NULL));
    int sum = 0;
    for (int i = 0; i < MP_NODES_MAX; i++)
        sum += h->threads.on[i];
    MP_CHECK_INT(sum, h->lease.threads);
    MP_CHECK(h->threads.on[h->threads.first] > 0);
}

static void give(mp_cpu_allocator *allocator, holder *h) {
    mp_cpu_allocator_return(allocator, &h->lease, &h->threads, false);
}

/* Prints a holder's lease as "first node:threads,threads,...". */
static const char *where(const holder *h, int nodes) {
    static char text[256];
    int used = snprintf(text, sizeof(text), "%d:", h->threads.first);
    for (int i = 0; i < nodes; i++)
        used += snprintf(text + used, sizeof(text) - (size_t)used, i ? ",%d" : "%d", h->threads.on[i]);
    return text;
}

/* CPUs lent to a child process count as leased, and this process starts no compute threads for them. */
MP_TEST(registry_nodes_cpus_are_lent) {
    uint64_t threads, now, joined;
    mp_cpu_allocator *allocator = allocator_of(6, (int[]){4, 2}, 2);
    holder h = {.home = 0}, other = {.home = 0};
    mp_thread_counts(&threads, &joined);
    MP_CHECK(mp_cpu_allocator_lend(allocator, 0, 5, &h.lease, &h.threads, NULL, NULL));
    MP_CHECK_INT(h.lease.threads, 5);
    MP_CHECK_INT(h.lease.near, 4);
    MP_CHECK_STR(where(&h, 2), "0:4,1");
    MP_CHECK_INT(mp_cpu_allocator_leased(allocator), 5);
    mp_thread_counts(&now, &joined);
    MP_CHECK_INT(now, threads);
    take(allocator, &other, 6); /* gets the one CPU that is left */
    MP_CHECK_INT(other.lease.threads, 1);
    give(allocator, &h);
    give(allocator, &other);
    MP_CHECK_INT(mp_cpu_allocator_leased(allocator), 0);
    MP_CHECK(mp_cpu_allocator_lend(allocator, 1, 2, &h.lease, &h.threads, NULL, NULL));
    mp_cpu_allocator_write_off(allocator, &h.threads);
    MP_CHECK_INT(mp_cpu_allocator_leased(allocator), 0);
    mp_cpu_allocator_return(allocator, &h.lease, &h.threads, true);
    take(allocator, &other, 6);
    MP_CHECK_INT(other.lease.threads, 6);
    give(allocator, &other);
    mp_cpu_allocator_close(allocator);
}

MP_TEST(registry_nodes_full_home) {
    mp_cpu_allocator *allocator = allocator_of(16, (int[]){4, 4, 6, 2}, 4);
    holder a = {.home = 0}, b = {.home = 0}, c = {.home = 0}, d = {.home = 0};
    take(allocator, &a, 3);
    MP_CHECK_STR(where(&a, 4), "0:3,0,0,0");
    take(allocator, &b, 2); /* node 0 has one free CPU: both CPUs come from node 3, which has just two */
    MP_CHECK_STR(where(&b, 4), "3:0,0,0,2");
    take(allocator, &c, 5);
    MP_CHECK_STR(where(&c, 4), "2:0,0,5,0");
    take(allocator, &d, 6); /* no node has 6 free CPUs: the home node's, then those of other nodes */
    MP_CHECK_STR(where(&d, 4), "0:1,4,1,0");
    int threads[MP_NODES_MAX], leased[MP_NODES_MAX];
    MP_CHECK_INT(mp_cpu_allocator_nodes(allocator, threads, leased), 4);
    for (int i = 0; i < 4; i++)
        MP_CHECK_INT(leased[i], threads[i]);
    give(allocator, &a);
    give(allocator, &b);
    b.home = 1; /* the home node has no free CPU: the node with most free CPUs comes first */
    take(allocator, &b, 5);
    MP_CHECK_STR(where(&b, 4), "0:3,0,0,2");
    give(allocator, &b);
    give(allocator, &c);
    give(allocator, &d);
    mp_cpu_allocator_nodes(allocator, threads, leased);
    for (int i = 0; i < 4; i++)
        MP_CHECK_INT(leased[i], 0);
    mp_cpu_allocator_close(allocator);
}

/* Random leases and returns: no node leases more CPUs than it has, and at the end all CPUs are free. */
MP_TEST(registry_nodes_always_balance) {
    enum { HOLDERS = 6, ROUNDS = 4000 };
    static const int shapes[][1 + MP_NODES_MAX] = {
        {1, 8}, {2, 4, 4}, {3, 1, 2, 5}, {4, 2, 2, 2, 2}, {MP_NODES_MAX, [1 ... MP_NODES_MAX] = 1}};
    mp_test_random random = {77};
    for (int s = 0; s < 5; s++) {
        int nodes = shapes[s][0], threads[MP_NODES_MAX], leased[MP_NODES_MAX], held[MP_NODES_MAX];
        mp_cpu_allocator *allocator = allocator_of(5 + 2 * s, shapes[s] + 1, nodes);
        holder holders[HOLDERS] = {0};
        bool has[HOLDERS] = {false};
        for (int i = 0; i < HOLDERS; i++)
            holders[i].home = mp_cpu_allocator_assign_home(allocator);
        for (int round = 0; round < ROUNDS; round++) {
            int i = (int)(mp_test_random_u64(&random) % HOLDERS);
            if (has[i])
                give(allocator, &holders[i]);
            else if (mp_cpu_allocator_leased(allocator) < mp_cpu_allocator_threads(allocator))
                take(allocator, &holders[i], 1 + (int)(mp_test_random_u64(&random) % 9));
            else
                continue;
            has[i] = !has[i];
            memset(held, 0, sizeof(held));
            for (int k = 0; k < HOLDERS; k++)
                for (int node = 0; has[k] && node < nodes; node++)
                    held[node] += holders[k].threads.on[node];
            MP_CHECK_INT(mp_cpu_allocator_nodes(allocator, threads, leased), nodes);
            for (int node = 0; node < nodes; node++)
                MP_CHECK(held[node] == leased[node] && leased[node] <= threads[node]);
        }
        for (int i = 0; i < HOLDERS; i++)
            if (has[i])
                give(allocator, &holders[i]);
        MP_CHECK_INT(mp_cpu_allocator_leased(allocator), 0);
        mp_cpu_allocator_close(allocator);
    }
}

/* A node lends as many CPUs as it has cores, so that two nodes share eight threads even if one has eight CPUs. With
 * more threads than cores, it lends all of its CPUs. By default there is one thread per core. */
MP_TEST(registry_nodes_lend_one_cpu_per_core) {
    static const int rows[][2] = {{1, 4}, {8, 4}, {9, 8}, {16, 8}, {20, 10}}; /* threads, CPUs of each node */
    mp_topology topology = {.node_count = 2};
    mp_cpu_allocator *allocator;
    int cpus[MP_NODES_MAX], leased[MP_NODES_MAX];
    for (int i = 0; i < 2; i++)
        topology.nodes[i] = (mp_node){.number = i, .memory = -1, .cpu_count = 8, .core_count = 4};
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        MP_CHECK_OK(mp_cpu_allocator_open_on(rows[i][0], &topology, &allocator, &error), &error);
        MP_CHECK_INT(mp_cpu_allocator_nodes(allocator, cpus, leased), 2);
        MP_CHECK_INT(cpus[0], rows[i][1]);
        MP_CHECK_INT(cpus[1], rows[i][1]);
        mp_cpu_allocator_close(allocator);
    }
    unsetenv("MPOOL_THREADS");
    MP_CHECK_OK(mp_options_init(&error), &error);
    topology.cores.used_count = 1;
    MP_CHECK_OK(mp_cpu_allocator_open_on(0, &topology, &allocator, &error), &error);
    MP_CHECK_INT(mp_cpu_allocator_threads(allocator), 1);
    mp_cpu_allocator_close(allocator);
}

/* --- CPUs of two nodes in one lease --- */

enum { NODES = 2, A_NODE = 2, MAX_THREADS = NODES * A_NODE };

/* Describes two nodes of two compute threads each, on two CPUs of this machine. Returns false if it has one CPU. */
static bool two_by_two(mp_topology *topology, mp_cpu_set *all) {
    *topology = (mp_topology){.node_count = NODES};
    int found = 0;
    for (int i = 0; mp_sys_get_affinity(all) && i < MP_CPUS_MAX && found < NODES; i++)
        if (mp_cpu_set_has(all, i)) {
            topology->nodes[found] = (mp_node){.number = found, .memory = -1, .cpu_count = A_NODE};
            mp_cpu_set_add(&topology->nodes[found++].cpus, i);
        }
    return found == NODES;
}

static void note_place(const mp_team_thread *thread, void *arg) {
    mp_cpu_set *ran = arg;
    MP_CHECK(mp_sys_get_affinity(&ran[thread->index]));
}

/* Checks that each compute thread runs on the node that the lease assigns to it, in order from the lease's first node,
 * and that the calling thread is unbound again afterwards. */
static void check_places(mp_cpu_allocator *allocator, const mp_topology *topology, int home, int want,
                         const char *expected) {
    holder h = {.home = home};
    mp_cpu_set ran[MAX_THREADS], before, after;
    MP_CHECK(mp_sys_get_affinity(&before));
    take(allocator, &h, want);
    MP_CHECK_STR(where(&h, NODES), expected);
    MP_CHECK(h.lease.bound);
    MP_CHECK_INT(h.lease.near, h.threads.on[h.threads.first]);
    mp_lease_run(&h.lease, note_place, ran);
    int thread = 0;
    for (int i = 0; i < NODES; i++) {
        int node = (h.threads.first + i) % NODES;
        for (int k = 0; k < h.threads.on[node]; k++, thread++)
            MP_CHECK(memcmp(&ran[thread], &topology->nodes[node].cpus, sizeof *ran) == 0);
    }
    MP_CHECK_INT(thread, h.lease.threads);
    give(allocator, &h);
    MP_CHECK(mp_sys_get_affinity(&after) && memcmp(&before, &after, sizeof before) == 0);
}

MP_TEST(registry_nodes_threads_of_two_nodes_run_in_place) {
    mp_topology topology;
    mp_cpu_set all;
    if (!two_by_two(&topology, &all))
        MP_SKIP("one CPU");
    mp_cpu_allocator *allocator;
    MP_CHECK_OK(mp_cpu_allocator_open_on(MAX_THREADS, &topology, &allocator, &error), &error);
    for (int round = 0; round < 50; round++) { /* threads move between the nodes */
        check_places(allocator, &topology, 0, 3, "0:2,1");
        check_places(allocator, &topology, 1, 2, "1:0,2");
        check_places(allocator, &topology, 1, 4, "1:2,2");
        check_places(allocator, &topology, 0, 1, "0:1,0");
        holder first = {.home = 0};
        take(allocator, &first, 1);
        check_places(allocator, &topology, 0, 2, "1:0,2"); /* only one free CPU at home: both elsewhere */
        check_places(allocator, &topology, 0, 3, "0:1,2"); /* no node has three free CPUs: the home's CPU first */
        give(allocator, &first);
    }
    mp_cpu_allocator_close(allocator);
}

#ifdef MP_SEAM

static _Atomic int bindings;

static bool count_binding(const mp_cpu_set *cpus) {
    (void)cpus;
    atomic_fetch_add(&bindings, 1);
    return true;
}

static void do_nothing(const mp_team_thread *thread, void *arg) { (void)thread, (void)arg; }

/* A machine with a single node leaves the choice of a CPU to the system. */
MP_TEST(registry_nodes_single_node_binds_no_thread) {
    for (int nodes = 1; nodes <= 2; nodes++) {
        mp_cpu_allocator *allocator = allocator_of(4, (int[]){2 * (3 - nodes), 2}, nodes);
        holder h = {.home = 0};
        atomic_store(&bindings, 0);
        mp_sys_table.set_affinity = count_binding;
        take(allocator, &h, 3);
        mp_lease_run(&h.lease, do_nothing, NULL);
        give(allocator, &h);
        mp_cpu_allocator_close(allocator);
        mp_sys_table.set_affinity = mp_sys_real.set_affinity;
        MP_CHECK((atomic_load(&bindings) > 0) == (nodes == 2));
    }
}

#endif
