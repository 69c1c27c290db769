/* cores.h: the ledger of CPUs. Whoever computes leases lanes here first, so that there are never more compute threads
 * than lanes: a worker alone may take all of them, several that have work share.
 *
 * On a machine with several memory nodes (base/topology.h) a worker has a home: the node that had most lanes free when
 * it was made, and fewest workers among those. How many lanes it gets is the same as elsewhere; which ones: those of
 * its home, else all of one other node, else its home's and then others'. They are bound to their nodes while they
 * work for it (base/team.h says why only there), and its scratch and caches lie on its home (base/alloc.h).
 *
 * A ledger is process-wide unless a registry asks for a number of lanes of its own. Any thread may call. */
#ifndef MP_REGISTRY_CORES_H
#define MP_REGISTRY_CORES_H

#include "base/event_count.h"
#include "base/team.h"
#include "base/topology.h"
#include "registry/shared.h"

typedef struct mp_cores mp_cores;

/* Use the process's ledger (lanes 0: MPOOL_THREADS, or the CPUs that the process may use), or one of its own. No
 * thread is started before the first lease of more than one lane. */
mp_status mp_cores_open(int lanes, mp_cores **cores, mp_error *error);
/* One of its own, on such a machine: for tests. */
mp_status mp_cores_open_on(int lanes, const mp_topology *topology, mp_cores **cores, mp_error *error);
/* Use it no more: the last user's close joins the helpers. No lease of that user is held, forfeited ones apart (then
 * the last of their holders to come back joins the helpers). NULL is legal. The ledger itself stays while it is
 * pinned, for callers that still ask it whether they may spin, and gives out single lanes. */
void mp_cores_close(mp_cores *cores);
mp_cores *mp_cores_pin(mp_cores *cores);
void mp_cores_unpin(mp_cores *cores);
int mp_cores_lanes(const mp_cores *cores);
int mp_cores_leased(mp_cores *cores);
/* Nodes, their lanes, and how many of them are leased. Fills at most MP_NODES_MAX rows. */
int mp_cores_nodes(mp_cores *cores, int *lanes, int *leased);

/* A worker is made: its home, from 0 on. And is no more. */
int mp_cores_settle(mp_cores *cores);
void mp_cores_unsettle(mp_cores *cores, int home);
/* The system's number of a home, for people; -1 where there is one node. */
int mp_cores_node_number(const mp_cores *cores, int home);
/* Where its memory is to be, for mp_alloc_prefer_node. */
int mp_cores_node_memory(const mp_cores *cores, int home);

/* A worker says that it has work, and that it has none. Those with work share the lanes. */
void mp_cores_enter(mp_cores *cores);
void mp_cores_leave(mp_cores *cores);
/* Others have work too, or wait for lanes. */
bool mp_cores_contended(mp_cores *cores);
/* Lanes of a lease by node: plain data, the holder's. */
typedef struct mp_lanes {
    int first; /* where lane 0 is */
    int16_t on[MP_NODES_MAX];
} mp_lanes;
/* Lease up to `want` lanes, at least 1 and no more than the caller's share; waits, first come first served, while all
 * are taken, until give_up(arg) (asked every 20 ms, no lock held; NULL: never). False: it was given up, and nothing is
 * leased. The caller holds no lock and no other lease. */
bool mp_cores_lease(mp_cores *cores, int home, int want, mp_lease *lease, mp_lanes *lanes,
                    bool (*give_up)(void *arg), void *arg);
/* Likewise for another process to compute on: no thread of this one wakes for them or spins. The lease runs nothing. */
bool mp_cores_lend(mp_cores *cores, int home, int want, mp_lease *lease, mp_lanes *lanes, bool (*give_up)(void *arg),
                   void *arg);
/* By the thread that leased. forfeited: its lanes were taken away by mp_cores_forfeit. */
void mp_cores_return(mp_cores *cores, mp_lease *lease, const mp_lanes *lanes, bool forfeited);
/* Take the lanes of a lease from a holder that may never return it: others get them from now on. */
void mp_cores_forfeit(mp_cores *cores, const mp_lanes *lanes);

/* How many lanes of one lease gain anything when they wait for each other many times a millisecond: all, while each has
 * a CPU to itself; fewer while programs of others take CPUs away, because then all wait for the lane that has none
 * (on two CPUs that six threads want, a token took 2.5 times as long on two lanes as on one). Learned from what leases
 * that say `together` lost of their time, and tried again after a while. */
int mp_cores_together(const mp_cores *cores);

/* Permission to spin while waiting: only on lanes that nobody computes on. */
mp_spin_rule mp_cores_spin_rule(mp_cores *cores, uint64_t spin_ns);

/* Where the process's is found. */
mp_shared_slot *mp_cores_slot(void);
/* See registry/fork.h; a second call of the same kind does nothing. The child counts from zero and starts a new team
 * when it needs one. */
void mp_cores_fork_before(mp_cores *cores);
void mp_cores_fork_parent(mp_cores *cores);
void mp_cores_fork_child(mp_cores *cores);

#endif
