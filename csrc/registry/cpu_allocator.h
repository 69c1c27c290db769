/* cpu_allocator.h: the CPU allocator. A thread leases CPUs here before it computes, so that there are never more
 * compute threads than configured. One worker alone may lease all of them; several workers with work share.
 *
 * On a machine with several memory nodes (base/topology.h) a worker has a home: the node with the most free CPUs when
 * the worker was created and, among equals, the fewest workers. The home does not change how many CPUs a worker gets,
 * only which ones: CPUs of its home if enough are free there, else all on one other node, else CPUs of several nodes.
 * The compute threads are bound to their nodes while they work for it (base/team.h says why only then), and its scratch
 * and caches lie on its home (base/alloc.h).
 *
 * An allocator is process-wide unless a registry configures its own number of compute threads, or threads in the
 * background. Thread-safe. */
#ifndef MP_REGISTRY_CPU_ALLOCATOR_H
#define MP_REGISTRY_CPU_ALLOCATOR_H

#include "base/event_count.h"
#include "base/team.h"
#include "base/topology.h"
#include "registry/shared.h"

typedef struct mp_cpu_allocator mp_cpu_allocator;

/* Opens the process's allocator (`threads` 0), or a private allocator with `threads` threads. `background`
 * (mp_thread_start_in_background): always a private allocator, because other pools use the threads of the process's
 * one, and a thread cannot leave the background again without privileges. Its number of threads is `threads`, or the
 * process's one (mp_topology_threads). Starts no thread before the first lease of more than one CPU. */
mp_status mp_cpu_allocator_open(int threads, bool background, mp_cpu_allocator **allocator, mp_error *error);
/* Opens a private allocator on the given machine, for tests. */
mp_status mp_cpu_allocator_open_on(int threads, const mp_topology *topology, mp_cpu_allocator **allocator,
                                   mp_error *error);
/* Ends one use. The end of the last use joins the compute threads. No lease of that user may be held, except forfeited
 * leases: then the return of the last forfeited lease joins the threads. NULL is legal. While pinned, a closed
 * allocator stays valid for spin rules and grants leases of one CPU. */
void mp_cpu_allocator_close(mp_cpu_allocator *allocator);
mp_cpu_allocator *mp_cpu_allocator_pin(mp_cpu_allocator *allocator);
void mp_cpu_allocator_unpin(mp_cpu_allocator *allocator);
int mp_cpu_allocator_threads(const mp_cpu_allocator *allocator);
int mp_cpu_allocator_leased(mp_cpu_allocator *allocator);
/* For tests. Returns the number of nodes; fills in the CPUs and the leased CPUs of each node: arrays of MP_NODES_MAX
 * elements. */
int mp_cpu_allocator_nodes(mp_cpu_allocator *allocator, int *cpus, int *leased);

/* `queued` is the length of the list that `waiting` counts, and `homes` the number of workers that have not released
 * their home. */
typedef struct mp_cpu_counts {
    int runnable, waiting, queued, spinning, homes;
} mp_cpu_counts;
/* For tests. Thread-safe. */
mp_cpu_counts mp_cpu_allocator_count(mp_cpu_allocator *allocator);
/* For audits, while no other thread runs. Takes no lock. */
mp_cpu_counts mp_cpu_allocator_count_at_rest(mp_cpu_allocator *allocator);

/* Chooses the home of a new worker, from 0 on; the worker must release it with mp_cpu_allocator_release_home. */
int mp_cpu_allocator_assign_home(mp_cpu_allocator *allocator);
void mp_cpu_allocator_release_home(mp_cpu_allocator *allocator, int home);
/* Returns the operating system's number of a home's node, for display; -1 if there is only one node. */
int mp_cpu_allocator_node_number(const mp_cpu_allocator *allocator, int home);
/* Returns the node for the worker's memory, for mp_alloc_prefer_node. */
int mp_cpu_allocator_node_memory(const mp_cpu_allocator *allocator, int home);

/* Call mp_cpu_allocator_enter when a worker gets work, and _leave when it has none any more. Workers with work share
 * the CPUs equally. */
void mp_cpu_allocator_enter(mp_cpu_allocator *allocator);
void mp_cpu_allocator_leave(mp_cpu_allocator *allocator);
/* True if any worker has work. */
bool mp_cpu_allocator_busy(const mp_cpu_allocator *allocator);
/* Call as a worker with work. Returns true if another worker has work, or if any thread waits for CPUs. */
bool mp_cpu_allocator_contended(mp_cpu_allocator *allocator);
/* The CPUs of a lease by node: plain data of the holder. */
typedef struct mp_core_lease {
    int first; /* node of the first CPU */
    int16_t on[MP_NODES_MAX];
} mp_core_lease;
/* Leases up to `want` CPUs, at least 1 and at most the caller's share. Waits in order of arrival while all are
 * leased, until give_up(arg) returns true (called every 20 ms without a lock; NULL: never); then returns false, with
 * nothing leased. Must not hold a lock or another lease. */
bool mp_cpu_allocator_lease(mp_cpu_allocator *allocator, int home, int want, mp_lease *lease, mp_core_lease *cores,
                            bool (*give_up)(void *arg), void *arg);
/* As mp_cpu_allocator_lease, but another process computes on the CPUs: the lease has no compute threads of this process
 * and cannot run a parallel region. */
bool mp_cpu_allocator_lend(mp_cpu_allocator *allocator, int home, int want, mp_lease *lease, mp_core_lease *cores,
                           bool (*give_up)(void *arg), void *arg);
/* Returns a lease. Must be called by the thread that leased. `forfeited`: mp_cpu_allocator_write_off has already freed
 * the CPUs. */
void mp_cpu_allocator_return(mp_cpu_allocator *allocator, mp_lease *lease, const mp_core_lease *cores,
                             bool forfeited);
/* Frees the CPUs of a lease that its holder may never return, so that other workers can lease them. */
void mp_cpu_allocator_write_off(mp_cpu_allocator *allocator, const mp_core_lease *cores);

/* Returns the number of compute threads of one lease that is worth using when they wait for each other many times per
 * millisecond. While each thread has a CPU to itself, that is all of them. While other programs take CPUs, fewer are
 * worth using, because all threads wait for the one without a CPU. Measured on two CPUs for which six threads
 * competed: a token took 2.5 times as long on two threads as on one. The number is learned from the lost time of
 * leases with `barrier_bound` set (mp_lease.lost_ns); a higher one is tried again later. */
int mp_cpu_allocator_barrier_threads(const mp_cpu_allocator *allocator);

/* Allows a waiting thread to spin only on CPUs that no lease computes on. */
mp_spin_rule mp_cpu_allocator_spin_rule(mp_cpu_allocator *allocator, uint64_t spin_ns);

/* Returns the slot (shared.h) of the process-wide allocator. */
mp_shared_slot *mp_cpu_allocator_slot(void);
/* See registry/fork.h. A second call of the same kind does nothing: several registries may share the allocator. In
 * the child no CPU is leased, and new threads start when they are needed. */
void mp_cpu_allocator_fork_before(mp_cpu_allocator *allocator);
void mp_cpu_allocator_fork_parent(mp_cpu_allocator *allocator);
void mp_cpu_allocator_fork_child(mp_cpu_allocator *allocator);

#endif
