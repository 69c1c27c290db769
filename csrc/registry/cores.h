/* cores.h: the ledger of CPUs. Whoever computes leases lanes here first, so that there are never more compute threads
 * than lanes: a worker alone may take all of them, several that have work share.
 *
 * A ledger is process-wide unless a registry asks for a number of lanes of its own. Any thread may call. */
#ifndef MP_REGISTRY_CORES_H
#define MP_REGISTRY_CORES_H

#include "base/team.h"
#include "registry/pool/bell.h"

typedef struct mp_cores mp_cores;

/* Use the process's ledger (lanes 0: MPOOL_THREADS, or the CPUs that the process may use), or one of its own. No
 * thread is started before the first lease of more than one lane. */
mp_status mp_cores_open(int lanes, mp_cores **cores, mp_error *error);
/* Use it no more: the last user's close joins the helpers. No lease of that user is held, forfeited ones apart (then
 * the last of their holders to come back joins the helpers). NULL is legal. The ledger itself stays while it is
 * pinned, for callers that still ask it whether they may spin, and gives out single lanes. */
void mp_cores_close(mp_cores *cores);
mp_cores *mp_cores_pin(mp_cores *cores);
void mp_cores_unpin(mp_cores *cores);
int mp_cores_lanes(const mp_cores *cores);
int mp_cores_leased(mp_cores *cores);

/* A worker says that it has work, and that it has none. Those with work share the lanes. */
void mp_cores_enter(mp_cores *cores);
void mp_cores_leave(mp_cores *cores);
/* Others have work too, or wait for lanes. */
bool mp_cores_contended(mp_cores *cores);
/* Lease up to `want` lanes, at least 1 and no more than the caller's share; waits, first come first served, while all
 * are taken, until give_up(arg) (asked every 20 ms, no lock held; NULL: never). False: it was given up, and nothing is
 * leased. The caller holds no lock and no other lease. */
bool mp_cores_lease(mp_cores *cores, int want, mp_lease *lease, bool (*give_up)(void *arg), void *arg);
/* forfeited: its lanes were taken away by mp_cores_forfeit. */
void mp_cores_return(mp_cores *cores, mp_lease *lease, bool forfeited);
/* Take the lanes of a lease from a holder that may never return it: others get them from now on. */
void mp_cores_forfeit(mp_cores *cores, int lanes);

/* Permission to spin while waiting: only on lanes that nobody computes on. */
mp_spin_rule mp_cores_spin_rule(mp_cores *cores, uint64_t spin_ns);

/* See registry/fork.h; a second call of the same kind does nothing. The child counts from zero and starts a new team
 * when it needs one. */
void mp_cores_fork_before(mp_cores *cores);
void mp_cores_fork_parent(mp_cores *cores);
void mp_cores_fork_child(mp_cores *cores);

#endif
