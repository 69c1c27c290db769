/* test_base_topology.c: base/topology.h, and compute threads on its nodes (base/team.h). Each machine is a fake
 * /sys. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/options.h"
#include "base/team.h"
#include "base/topology.h"
#include "fake_machines.h"
#include "mp_test.h"

static mp_error error;

/* Creates a fake /sys of a machine with these nodes online. lists[i] is the CPU list of node i; NULL = the node has no
 * folder. Returns its root. */
static char *machine(const char *online, const char *const *lists, int count) {
    static char root[64];
    snprintf(root, sizeof(root), "/tmp/mpool-nodes-XXXXXX");
    MP_CHECK(mkdtemp(root) != NULL);
    fake_put(root, "sys/devices/system/node/online", online);
    for (int i = 0; i < count; i++) {
        char name[64];
        snprintf(name, sizeof(name), "sys/devices/system/node/node%d/cpulist", i);
        if (lists[i])
            fake_put(root, name, lists[i]);
    }
    return root;
}

static void clear(const char *root) {
    char command[128];
    snprintf(command, sizeof(command), "rm -r %s", root);
    MP_CHECK_INT(system(command), 0);
}

static mp_cpu_set cpus(int first, int last) {
    mp_cpu_set set = {0};
    for (int i = first; i <= last; i++)
        mp_cpu_set_add(&set, i);
    return set;
}

/* Reads the topology below `root` and returns it as "number:memory:cpus ...". */
static const char *read_from(const char *root, const char *table, mp_cpu_set allowed) {
    static char text[4096];
    mp_topology topology;
    MP_CHECK_OK(mp_topology_read_from(root, table, &allowed, &topology, &error), &error);
    MP_CHECK(topology.node_count >= 1 && topology.node_count <= MP_NODES_MAX);
    size_t used = 0;
    int total = 0;
    for (int i = 0; i < topology.node_count; i++) {
        const mp_node *node = &topology.nodes[i];
        char list[256];
        mp_cpu_set_text(&node->cpus, list, sizeof(list));
        MP_CHECK_INT(node->cpu_count, mp_cpu_set_count(&node->cpus));
        total += node->cpu_count;
        used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%d:%d:%s", i ? " " : "", node->number,
                                 node->memory, list);
    }
    MP_CHECK_INT(total, mp_cpu_set_count(&allowed)); /* each CPU is in exactly one node */
    return text;
}

MP_TEST(base_topology_of_machines) {
    const char *const one[] = {"0-3\n"}, *const two[] = {"0-3,8-11\n", "4-7,12-15\n"};
    const char *const four[] = {"0-1\n", "2-3\n", "4-5\n", "6-7\n"};
    char *root = machine("0\n", one, 1);
    MP_CHECK_STR(read_from(root, "", cpus(0, 3)), "0:0:0-3");
    clear(root);
    root = machine("0-1\n", two, 2);
    MP_CHECK_STR(read_from(root, "", cpus(0, 15)), "0:0:0-3,8-11 1:1:4-7,12-15");
    clear(root);
    root = machine("0-3\n", four, 4);
    MP_CHECK_STR(read_from(root, "", cpus(0, 7)), "0:0:0-1 1:1:2-3 2:2:4-5 3:3:6-7");
    clear(root);
}

MP_TEST(base_topology_odd_machines) {
    /* Node 1 has memory only, 2 does not exist, 3 has a malformed list, 5 was removed during the read. */
    const char *const odd[] = {"0-1\n", "\n", NULL, "0x3\n", "2-3\n", NULL};
    char *root = machine("0-1,3-5\n", odd, 6);
    MP_CHECK_STR(read_from(root, "", cpus(0, 3)), "0:0:0-1 4:4:2-3");
    MP_CHECK_STR(read_from(root, "", cpus(0, 5)), "0:0:0-1 4:4:2-3 5:-1:4-5"); /* CPUs 4 and 5 are in no node */
    MP_CHECK_STR(read_from(root, "", cpus(2, 3)), "4:4:2-3");                  /* the affinity covers one node only */
    MP_CHECK_STR(read_from(root, "", cpus(1, 2)), "0:0:1 4:4:2");              /* CPUs 0 and 3 are missing */
    MP_CHECK_STR(read_from(root, "", cpus(0, -1)), "0:-1:");                   /* no CPU is allowed */
    clear(root);
    MP_CHECK_STR(read_from("/nowhere", "", cpus(0, 5)), "0:-1:0-5");
    const char *const none[] = {"\n", "\n"};
    root = machine("0-1\n", none, 2);
    MP_CHECK_STR(read_from(root, "", cpus(0, 5)), "0:-1:0-5");
    clear(root);
    root = machine("0-2000\n", none, 2);
    MP_CHECK_STR(read_from(root, "", cpus(0, 5)), "0:-1:0-5");
    clear(root);
    const char *const twice[] = {"0-3\n", "2-5\n"}; /* the first node keeps CPUs 2 and 3 */
    root = machine("0-1\n", twice, 2);
    MP_CHECK_STR(read_from(root, "", cpus(0, 5)), "0:0:0-3 1:1:4-5");
    clear(root);
    char lists[MP_NODES_MAX + 1][16];
    const char *many[MP_NODES_MAX + 1];
    for (int i = 0; i <= MP_NODES_MAX; i++) {
        snprintf(lists[i], sizeof(lists[i]), "%d\n", i);
        many[i] = lists[i];
    }
    root = machine("0-32\n", many, MP_NODES_MAX + 1);
    MP_CHECK_STR(read_from(root, "", cpus(0, MP_NODES_MAX)), "0:-1:0-32"); /* too many nodes: all CPUs form one */
    MP_CHECK_HAS(read_from(root, "", cpus(0, MP_NODES_MAX - 1)), "30:30:30 31:31:31");
    clear(root);
}

MP_TEST(base_topology_of_a_table) {
    const char *const two[] = {"0-3\n", "4-7\n"};
    char *root = machine("0-1\n", two, 2);
    MP_CHECK_STR(read_from(root, "0-1;2-3;4-7", cpus(0, 7)), "0:0:0-1 1:0:2-3 2:1:4-7");
    MP_CHECK_STR(read_from(root, " 4 - 7 ; 0 , 2-3 ", cpus(0, 7)), "0:1:4-7 1:0:0,2-3 2:-1:1");
    MP_CHECK_STR(read_from(root, "0-3;4-7;100-200", cpus(2, 5)), "0:0:2-3 1:1:4-5");
    MP_CHECK_STR(read_from(root, "100;200", cpus(2, 5)), "2:-1:2-5");
    MP_CHECK_STR(read_from(root, "0-1023", cpus(0, 7)), "0:0:0-7");
    MP_CHECK_STR(read_from(root, "off", cpus(0, 7)), "0:-1:0-7");
    clear(root);
    MP_CHECK_STR(read_from("/nowhere", "0;1", cpus(0, 1)), "0:-1:0 1:-1:1");

    static const char *const wrong[] = {"x",   ";",     "0;",          "0;;1",    "0-",  "-1",    "3-1",   "0,", "1024",
                                        "0 1", "0;off", "99999999999", "0-3;3-5", "0;0", "off;0", "0-3:2", " "};
    mp_cpu_set allowed = cpus(0, 7);
    mp_topology topology;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        MP_CHECK_STATUS(mp_topology_check(wrong[i], &error), MP_INVALID_ARGUMENT, &error);
        MP_CHECK_HAS(error.message, "MPOOL_NODES");
        MP_CHECK_HAS(error.message, "must be the CPUs of each node");
        MP_CHECK_STATUS(mp_topology_read_from("/nowhere", wrong[i], &allowed, &topology, &error), MP_INVALID_ARGUMENT,
                        &error);
    }
    MP_CHECK_OK(mp_topology_check("", &error), &error);
    MP_CHECK_OK(mp_topology_check("off", &error), &error);
    MP_CHECK_OK(mp_topology_check("0-7;8-15", &error), &error);
}

/* --- compute threads on nodes --- */

typedef struct seen {
    mp_cpu_set threads[8];
    int cpu[8];
} seen;

static void observe(const mp_team_thread *thread, void *arg) {
    seen *s = arg;
    mp_sys_get_affinity(&s->threads[thread->index]);
    s->cpu[thread->index] = sched_getcpu();
}

static bool same(const mp_cpu_set *a, const mp_cpu_set *b) { return memcmp(a, b, sizeof(*a)) == 0; }

/* Uses two CPUs of this machine as two nodes. Returns false if the machine has only one CPU. */
static bool two_nodes(mp_cpu_set *before, mp_cpu_set *first, mp_cpu_set *second) {
    int found = 0;
    *first = *second = (mp_cpu_set){0};
    if (!mp_sys_get_affinity(before))
        return false;
    for (int i = 0; i < MP_CPUS_MAX && found < 2; i++)
        if (mp_cpu_set_has(before, i))
            mp_cpu_set_add(found++ ? second : first, i);
    return found == 2;
}

static mp_team *make_team(int helpers) {
    mp_team *team;
    MP_CHECK_OK(mp_team_create(helpers, &team, &error), &error);
    return team;
}

MP_TEST(base_team_threads_run_on_their_node) {
    mp_cpu_set before, now, a, b;
    if (!two_nodes(&before, &a, &b))
        MP_SKIP("one CPU");
    mp_team *team = make_team(3);
    mp_lease lease;
    for (int round = 0; round < 20; round++) {
        const mp_cpu_set *first = round % 2 ? &a : &b, *other = round % 2 ? &b : &a;
        seen s = {0};
        mp_team_lease_at(team, (mp_team_place[]){{first, 2}, {other, 2}}, 2, &lease);
        MP_CHECK_INT(lease.threads, 4);
        mp_lease_run(&lease, observe, &s);
        for (int i = 0; i < 4; i++) {
            MP_CHECK(same(&s.threads[i], i < 2 ? first : other));
            MP_CHECK(mp_cpu_set_has(i < 2 ? first : other, s.cpu[i]));
        }
        mp_team_return(&lease);
        MP_CHECK(mp_sys_get_affinity(&now) && same(&now, &before)); /* the caller is bound only inside a region */
        mp_team_lease_at(team, &(mp_team_place){first, 1}, 1, &lease);
        MP_CHECK(mp_sys_get_affinity(&now) && same(&now, first));
        mp_team_return(&lease);
        MP_CHECK(mp_sys_get_affinity(&now) && same(&now, &before));
    }
    mp_team_destroy(team);
    mp_team_lease_at(NULL, &(mp_team_place){&b, 1}, 1, &lease); /* without a team, the caller is bound too */
    MP_CHECK(mp_sys_get_affinity(&now) && same(&now, &b));
    mp_team_return(&lease);
    MP_CHECK(mp_sys_get_affinity(&now) && same(&now, &before));
}

MP_TEST(base_team_without_nodes_binds_nothing) {
    mp_cpu_set before, now;
    if (!mp_sys_get_affinity(&before))
        MP_SKIP("the system does not report its topology");
    mp_team *team = make_team(2);
    mp_lease lease;
    seen s = {0};
    mp_team_lease(team, 3, &lease);
    mp_lease_run(&lease, observe, &s);
    for (int i = 0; i < 3; i++)
        MP_CHECK(same(&s.threads[i], &before));
    mp_team_return(&lease);
    MP_CHECK(mp_sys_get_affinity(&now) && same(&now, &before));
    mp_team_destroy(team);
}

/* --- memory --- */

enum { LARGE = 1 << 20 };

#ifdef MP_SEAM
static int preferred, preferred_on;

static void note_prefer(void *memory, size_t bytes, int node) {
    MP_CHECK(memory != NULL && bytes >= LARGE);
    preferred++;
    preferred_on = node;
}

MP_TEST(base_alloc_large_scratch_prefers_the_local_node) {
    mp_sys_table.prefer_node = note_prefer;
    static const struct {
        mp_tag tag;
        int bytes, node;
        bool is_placed;
    } rows[] = {{MP_TAG_KV, LARGE, 3, true},       {MP_TAG_SCRATCH, LARGE, 0, true}, {MP_TAG_WEIGHTS, LARGE, 3, false},
                {MP_TAG_REQUEST, LARGE, 3, false}, {MP_TAG_KV, 1000, 3, false},      {MP_TAG_KV, LARGE, -1, false}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        preferred = 0;
        mp_alloc_prefer_node(rows[i].node);
        mp_free(mp_alloc(rows[i].bytes, rows[i].tag));
        MP_CHECK_INT(preferred, rows[i].is_placed);
        MP_CHECK(!preferred || preferred_on == rows[i].node);
    }
}
#elif defined(__linux__)
#include <sys/syscall.h>

/* The system's memory policy of a page, or -1. */
static int policy_at(void *at) {
    int mode = -1;
    unsigned long nodes[16] = {0}, by_address = 2;
    unsigned long bits = 8 * sizeof(nodes);
    return syscall(SYS_get_mempolicy, &mode, nodes, bits, at, by_address) == 0 ? mode : -1;
}

MP_TEST(base_alloc_large_scratch_prefers_the_local_node) {
#if defined(__SANITIZE_THREAD__)
    MP_SKIP("the sanitizer's allocator maps its own pages");
#endif
    mp_topology topology;
    enum { DEFAULT = 0, PREFERRED = 1 };
    MP_CHECK_OK(mp_topology_read(&topology, &error), &error);
    int node = topology.nodes[0].memory;
    uint8_t *anywhere = mp_alloc(LARGE, MP_TAG_KV), *page = anywhere - (uintptr_t)anywhere % 4096;
    if (node < 0 || policy_at(anywhere) != DEFAULT || syscall(SYS_mbind, page, 4096, DEFAULT, NULL, 0, 0) != 0)
        MP_SKIP("the system has no nodes, or a sandbox forbids reading them");
    mp_alloc_prefer_node(node);
    uint8_t *near = mp_alloc(LARGE, MP_TAG_KV), *weights = mp_alloc(LARGE, MP_TAG_WEIGHTS);
    MP_CHECK_INT(policy_at(near), PREFERRED);
    MP_CHECK_INT(policy_at(weights), DEFAULT);
    memset(near, 1, LARGE);
    mp_free(near);
    mp_free(weights);
    mp_free(anywhere);
}
#endif
