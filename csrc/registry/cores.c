/* cores.c: the CPU allocator. See cores.h. */
#include "registry/cores.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/cpu.h"
#include "base/crowding.h"
#include "base/options.h"
#include "base/trace.h"

enum { LOOK_NS = 20 * 1000 * 1000 }; /* interval at which a waiting thread calls give_up */

/* A thread that waits for CPUs, on its own stack. */
typedef struct lane_waiter {
    struct lane_waiter *next;
    int home, want, granted; /* > 0: this many were granted */
    mp_lanes *lanes;
    mp_cond cond;
} lane_waiter;

typedef struct mp_lost {
    uint64_t watched_ns;
    double lost_ns;
} mp_lost;

struct mp_cores {
    int lanes;
    bool process_wide;
    mp_topology topology;
    int capacity[MP_NODES_MAX]; /* CPUs of each node; their sum is at least `lanes` */
    _Atomic int references; /* one per pin, and one of all users together */
    mp_mutex lock;
    /* guarded by: lock */
    lane_waiter *first, *last;
    mp_team *team;
    bool team_refused; /* the system refused to start threads */
    bool closed;
    int forfeited;     /* forfeited leases that have not been returned */
    int leased[MP_NODES_MAX]; /* 0 <= leased <= capacity; the sum is `used` */
    int workers[MP_NODES_MAX]; /* workers with their home here */
    /* The input of mp_cores_together since its last decision: leases of several CPUs, and of all CPUs. */
    mp_lost many, all;
    uint64_t raised_ns, hold_ns, raise_after_ns;
    /* a fork holds the lock; several registries may share the allocator, and the hook of the first one counts */
    bool forking;
    /* written under lock, read without it as a hint */
    _Atomic int used;    /* CPUs leased; 0 <= used <= lanes */
    _Atomic int waiting; /* in the list */
    _Atomic int together; /* 1 <= together <= lanes */
    /* counters */
    _Atomic int runnable; /* workers between mp_cores_enter and mp_cores_leave */
    _Atomic int spinning; /* threads that spin on a CPU that no lease computes on */
};

static mp_shared_slot process_cores;

static int default_lanes(void) {
    int64_t asked = mp_options_get()->threads;
    return asked > 0 ? (int)asked : mp_cpu_lanes();
}

/* Distributes compute threads beyond the number of CPUs, if more were configured. */
static void share_out(mp_cores *cores) {
    int nodes = cores->topology.node_count, total = 0;
    for (int i = 0; i < nodes; i++)
        total += cores->capacity[i] = cores->topology.nodes[i].cpu_count;
    for (int i = 0; total < cores->lanes; i = (i + 1) % nodes, total++)
        cores->capacity[i]++;
}

mp_status mp_cores_open(int lanes, mp_cores **cores_out, mp_error *error) {
    return mp_cores_open_on(lanes, NULL, cores_out, error);
}

mp_status mp_cores_open_on(int lanes, const mp_topology *topology, mp_cores **cores_out, mp_error *error) {
    *cores_out = NULL;
    enum { MOST = 256 };
    if (lanes < 0 || lanes > MOST)
        return mp_fail(error, MP_INVALID_ARGUMENT, "`threads` must be 0 (all CPUs of this process) to %d, got %d", MOST,
                       lanes);
    if (lanes == 0 && (*cores_out = mp_shared_take(&process_cores)))
        return MP_OK;
    mp_cores *cores = mp_alloc_zeroed(sizeof(*cores), MP_TAG_POOL);
    if (!cores)
        return mp_fail_memory(error, sizeof(*cores), "the CPU allocator");
    mp_status status = MP_OK;
    if (topology)
        cores->topology = *topology;
    else
        status = mp_topology_read(&cores->topology, error);
    if (status != MP_OK) {
        mp_free(cores);
        return status;
    }
    cores->lanes = lanes ? lanes : default_lanes();
    if (cores->lanes > MOST)
        cores->lanes = MOST;
    share_out(cores);
    atomic_init(&cores->together, cores->lanes);
    atomic_init(&cores->references, 1);
    mp_mutex_init(&cores->lock);
    cores->process_wide = lanes == 0;
    *cores_out = cores->process_wide ? mp_shared_offer(&process_cores, cores) : cores;
    if (*cores_out != cores)
        mp_cores_unpin(cores);
    return MP_OK;
}

void mp_cores_close(mp_cores *cores) {
    if (!cores || (cores->process_wide && !mp_shared_drop(&process_cores)))
        return;
    mp_mutex_lock(&cores->lock);
    mp_team *team = cores->forfeited ? NULL : cores->team;
    assert(cores->forfeited || (atomic_load(&cores->used) == 0 && !cores->first && "a lease is still held"));
    if (!cores->forfeited) /* otherwise the last holder to return joins the threads */
        cores->team = NULL;
    cores->closed = true;
    mp_mutex_unlock(&cores->lock);
    mp_team_destroy(team);
    mp_cores_unpin(cores);
}

mp_cores *mp_cores_pin(mp_cores *cores) {
    atomic_fetch_add_explicit(&cores->references, 1, memory_order_relaxed);
    return cores;
}

void mp_cores_unpin(mp_cores *cores) {
    if (!cores || atomic_fetch_sub_explicit(&cores->references, 1, memory_order_acq_rel) != 1)
        return;
    mp_mutex_deinit(&cores->lock);
    mp_free(cores);
}

int mp_cores_lanes(const mp_cores *cores) { return cores->lanes; }

int mp_cores_leased(mp_cores *cores) { return atomic_load_explicit(&cores->used, memory_order_relaxed); }

/* --- nodes --- */

int mp_cores_nodes(mp_cores *cores, int *lanes, int *leased) {
    mp_mutex_lock(&cores->lock);
    for (int i = 0; i < cores->topology.node_count; i++) {
        lanes[i] = cores->capacity[i];
        leased[i] = cores->leased[i];
    }
    mp_mutex_unlock(&cores->lock);
    return cores->topology.node_count;
}

static int free_on(const mp_cores *cores, int node) { return cores->capacity[node] - cores->leased[node]; }

int mp_cores_settle(mp_cores *cores) {
    int home = 0;
    mp_mutex_lock(&cores->lock);
    for (int i = 1; i < cores->topology.node_count; i++) {
        int more = free_on(cores, i) - free_on(cores, home);
        if (more > 0 || (more == 0 && cores->workers[i] < cores->workers[home]))
            home = i;
    }
    cores->workers[home]++;
    mp_mutex_unlock(&cores->lock);
    return home;
}

void mp_cores_unsettle(mp_cores *cores, int home) {
    mp_mutex_lock(&cores->lock);
    assert(cores->workers[home] > 0);
    cores->workers[home]--;
    mp_mutex_unlock(&cores->lock);
}

int mp_cores_node_number(const mp_cores *cores, int home) {
    return cores->topology.node_count > 1 ? cores->topology.nodes[home].number : -1;
}

int mp_cores_node_memory(const mp_cores *cores, int home) {
    return cores->topology.node_count > 1 ? cores->topology.nodes[home].memory : -1;
}

/* --- shares --- */

void mp_cores_enter(mp_cores *cores) { atomic_fetch_add_explicit(&cores->runnable, 1, memory_order_relaxed); }

void mp_cores_leave(mp_cores *cores) {
    int before = atomic_fetch_sub_explicit(&cores->runnable, 1, memory_order_relaxed);
    assert(before > 0);
    (void)before;
}

bool mp_cores_contended(mp_cores *cores) {
    return atomic_load_explicit(&cores->runnable, memory_order_relaxed) > 1 ||
           atomic_load_explicit(&cores->waiting, memory_order_relaxed) > 0;
}

/* --- leases --- */

/* Must hold the lock. Chooses `count` CPUs, which are free. */
static void place(mp_cores *cores, int home, int count, mp_lanes *lanes) {
    int nodes = cores->topology.node_count, first = home;
    *lanes = (mp_lanes){0};
    for (int i = 0; i < nodes && free_on(cores, home) < count; i++) {
        /* Take all from one other node: the one that then has fewest left, so that a later lease of many finds them
         * together. */
        bool fits = free_on(cores, i) >= count;
        if (fits && (first == home || free_on(cores, i) < free_on(cores, first)))
            first = i;
    }
    for (int i = 0; i < nodes && !free_on(cores, first); i++)
        if (free_on(cores, i))
            first = i;
    lanes->first = first;
    for (int node = first; count > 0;) {
        int some = free_on(cores, node) < count ? free_on(cores, node) : count;
        lanes->on[node] = (int16_t)(lanes->on[node] + some);
        cores->leased[node] += some;
        count -= some;
        for (int i = 0; i < nodes; i++)
            if (free_on(cores, i) > free_on(cores, node))
                node = i;
    }
}

/* Must hold the lock. Grants CPUs now; returns 0 if none is free. */
static int grant(mp_cores *cores, int home, int want, mp_lanes *lanes) {
    int used = atomic_load_explicit(&cores->used, memory_order_relaxed), left = cores->lanes - used;
    int runnable = atomic_load_explicit(&cores->runnable, memory_order_relaxed);
    int share = runnable > 1 ? cores->lanes / runnable : cores->lanes;
    if (share < 1)
        share = 1;
    int granted = want < share ? want : share;
    if (granted < 1)
        granted = 1;
    if (granted > left)
        granted = left;
    atomic_store_explicit(&cores->used, used + granted, memory_order_relaxed);
    place(cores, home, granted, lanes);
    return granted;
}

/* Must hold the lock. Starts the compute threads when a second CPU is leased for the first time. */
static mp_team *team_for(mp_cores *cores, int lanes) {
    if (cores->closed)
        return NULL;
    if (lanes > 1 && !cores->team && !cores->team_refused) {
        mp_error error;
        if (mp_team_create(cores->lanes - 1, &cores->team, &error) != MP_OK) {
            cores->team_refused = true;
            mp_log(MP_LOG_WARNING, "Compute threads failed to start, computing on one thread: %s", error.message);
        }
    }
    return lanes > 1 ? cores->team : NULL;
}

static int count_lanes(const mp_cores *cores, const mp_lanes *lanes) {
    int count = 0;
    for (int i = 0; i < cores->topology.node_count; i++)
        count += lanes->on[i];
    return count;
}

static void give_back(mp_cores *cores, const mp_lanes *lanes) {
    int count = count_lanes(cores, lanes);
    if (!count)
        return;
    mp_mutex_lock(&cores->lock);
    assert(atomic_load_explicit(&cores->used, memory_order_relaxed) >= count);
    atomic_fetch_sub_explicit(&cores->used, count, memory_order_relaxed);
    for (int i = 0; i < cores->topology.node_count; i++) {
        assert(cores->leased[i] >= lanes->on[i]);
        cores->leased[i] -= lanes->on[i];
    }
    while (cores->first && atomic_load_explicit(&cores->used, memory_order_relaxed) < cores->lanes) {
        lane_waiter *waiter = cores->first;
        cores->first = waiter->next;
        if (!cores->first)
            cores->last = NULL;
        atomic_fetch_sub_explicit(&cores->waiting, 1, memory_order_relaxed);
        waiter->granted = grant(cores, waiter->home, waiter->want, waiter->lanes);
        /* Under the lock: the waiter's storage is gone as soon as it sees `granted`. */
        mp_cond_signal(&waiter->cond);
    }
    mp_mutex_unlock(&cores->lock);
}

/* Must hold the lock; unlocks it meanwhile. Waits for CPUs; returns 0 if it gave up. */
static int wait_for_lanes(mp_cores *cores, int home, int want, mp_lanes *lanes, bool (*give_up)(void *arg),
                          void *arg) {
    lane_waiter self = {.home = home, .want = want, .lanes = lanes}, **link;
    mp_cond_init(&self.cond);
    if (cores->last)
        cores->last->next = &self;
    else
        cores->first = &self;
    cores->last = &self;
    atomic_fetch_add_explicit(&cores->waiting, 1, memory_order_relaxed);
    bool over = false;
    while (!self.granted && !over) {
        mp_cond_wait(&self.cond, &cores->lock, give_up ? mp_sys_now_ns() + LOOK_NS : 0);
        if (self.granted || !give_up)
            continue;
        mp_mutex_unlock(&cores->lock);
        over = give_up(arg);
        mp_mutex_lock(&cores->lock);
    }
    if (!self.granted && over) {
        lane_waiter *before = NULL;
        for (link = &cores->first; *link != &self; link = &(*link)->next)
            before = *link;
        *link = self.next;
        if (cores->last == &self)
            cores->last = before;
        atomic_fetch_sub_explicit(&cores->waiting, 1, memory_order_relaxed);
    }
    mp_cond_deinit(&self.cond);
    return self.granted;
}

/* Fills in the places of a lease's compute threads, the caller's first. */
static int places_of(const mp_cores *cores, const mp_lanes *lanes, mp_place *places) {
    int nodes = cores->topology.node_count, count = 0;
    for (int i = 0; i < nodes; i++) {
        int node = (lanes->first + i) % nodes;
        if (lanes->on[node])
            places[count++] = (mp_place){nodes > 1 ? &cores->topology.nodes[node].cpus : NULL, lanes->on[node]};
    }
    return count;
}

/* Cuts a lease down to its first `keep` CPUs and returns the others. */
static mp_lanes split_off(const mp_cores *cores, mp_lanes *lanes, int keep) {
    int nodes = cores->topology.node_count;
    mp_lanes rest = {.first = lanes->first};
    for (int i = 0; i < nodes; i++) {
        int node = (lanes->first + i) % nodes, kept = lanes->on[node] < keep ? lanes->on[node] : keep;
        rest.on[node] = (int16_t)(lanes->on[node] - kept);
        lanes->on[node] = (int16_t)kept;
        keep -= kept;
    }
    return rest;
}

static bool lease_or_lend(mp_cores *cores, bool lend, int home, int want, mp_lease *lease, mp_lanes *lanes,
                          bool (*give_up)(void *arg), void *arg) {
    assert(home >= 0 && home < cores->topology.node_count);
    if (want > cores->lanes)
        want = cores->lanes;
    mp_mutex_lock(&cores->lock);
    int granted = cores->first ? 0 : grant(cores, home, want, lanes);
    if (!granted)
        granted = wait_for_lanes(cores, home, want, lanes, give_up, arg);
    if (!granted) {
        mp_mutex_unlock(&cores->lock);
        return false;
    }
    mp_team *team = lend ? NULL : team_for(cores, granted);
    mp_mutex_unlock(&cores->lock);

    mp_place places[MP_NODES_MAX];
    mp_team_lease_at(team, places, places_of(cores, lanes, places), lease);
    if (lend) {
        lease->lanes = granted;
        lease->near = places[0].lanes;
        return true;
    }
    /* Without a team (the system refused threads) the lease is one CPU. */
    mp_lanes surplus = split_off(cores, lanes, lease->lanes);
    give_back(cores, &surplus);
    return true;
}

bool mp_cores_lease(mp_cores *cores, int home, int want, mp_lease *lease, mp_lanes *lanes, bool (*give_up)(void *arg),
                    void *arg) {
    return lease_or_lend(cores, false, home, want, lease, lanes, give_up, arg);
}

bool mp_cores_lend(mp_cores *cores, int home, int want, mp_lease *lease, mp_lanes *lanes, bool (*give_up)(void *arg),
                   void *arg) {
    return lease_or_lend(cores, true, home, want, lease, lanes, give_up, arg);
}

/* --- compute threads that wait for each other --- */

int mp_cores_together(const mp_cores *cores) { return atomic_load_explicit(&cores->together, memory_order_relaxed); }

static void set_together(mp_cores *cores, int lanes) {
    atomic_store_explicit(&cores->together, lanes, memory_order_relaxed);
    cores->many = cores->all = (mp_lost){0};
}

static double lost_share(mp_lost *lost, uint64_t watched_ns, double lost_ns) {
    const uint64_t JUDGED_NS = 10 * 1000 * 1000;
    lost->watched_ns += watched_ns;
    lost->lost_ns += lost_ns;
    if (lost->watched_ns < JUDGED_NS)
        return -1;
    double share = lost->lost_ns / (double)lost->watched_ns;
    *lost = (mp_lost){0};
    return share;
}

/* Must hold the lock. n compute threads that wait for each other are all as slow as the slowest: one that loses a
 * share s of its time leaves the work of n (1 - s) threads. So n - 1 are better from s = 1/n on, or slightly before,
 * as they lose less. With many threads of which another one loses a little each time, fewer are no better: s must be
 * large, too. One more is tried when the present ones lose little: soon at first, and later each time it turns out
 * to be too many. */
static void learn(mp_cores *cores, const mp_lease *lease) {
    const uint64_t SOON_NS = 100 * 1000 * 1000, HOLD_NS = 100 * 1000 * 1000, MOST_NS = 2000 * 1000 * 1000u;
    const double TOO_MUCH = 0.8, LARGE = 0.2, MOST_OF_IT = 0.6, LITTLE = 0.4;
    int together = atomic_load_explicit(&cores->together, memory_order_relaxed), lanes = lease->lanes;
    uint64_t now = mp_sys_now_ns();
    double lost = (double)lease->lost_ns;
    if (lanes > 1) {
        double share = lost_share(&cores->many, lease->watched_ns, lost);
        if (share > LARGE && share * lanes > TOO_MUCH) {
            int fewer = share > MOST_OF_IT ? lanes / 2 : lanes - 1;
            bool in_vain = cores->raised_ns && now - cores->raised_ns < SOON_NS;
            cores->hold_ns = !in_vain ? HOLD_NS : 2 * cores->hold_ns < MOST_NS ? 2 * cores->hold_ns : MOST_NS;
            cores->raise_after_ns = now + cores->hold_ns;
            if (fewer < together)
                set_together(cores, fewer);
            return;
        }
    }
    if (lanes < together || together == cores->lanes)
        return;
    double share = lost_share(&cores->all, lease->watched_ns, lost);
    if (share >= 0 && share * (together + 1) < LITTLE && now >= cores->raise_after_ns) {
        cores->raised_ns = now;
        set_together(cores, together + 1);
    }
}

void mp_cores_return(mp_cores *cores, mp_lease *lease, const mp_lanes *lanes, bool forfeited) {
    if (lease->together && lease->watched_ns) {
        mp_mutex_lock(&cores->lock);
        learn(cores, lease);
        mp_mutex_unlock(&cores->lock);
    }
    if (!lease->team) /* lent to another process: it has no threads here */
        lease->lanes = 1;
    mp_team_return(lease); /* first: a thread must be free before its CPU is granted again */
    if (!forfeited) {
        give_back(cores, lanes);
        return;
    }
    mp_mutex_lock(&cores->lock);
    bool last = --cores->forfeited == 0 && cores->closed;
    mp_team *team = last ? cores->team : NULL;
    if (last)
        cores->team = NULL;
    mp_mutex_unlock(&cores->lock);
    mp_team_destroy(team);
}

void mp_cores_forfeit(mp_cores *cores, const mp_lanes *lanes) {
    mp_mutex_lock(&cores->lock);
    cores->forfeited++;
    mp_mutex_unlock(&cores->lock);
    give_back(cores, lanes);
}

/* --- spinning --- */

static bool lanes_left(void *arg) {
    mp_cores *cores = arg;
    return atomic_load_explicit(&cores->used, memory_order_relaxed) +
               atomic_load_explicit(&cores->spinning, memory_order_relaxed) <=
           cores->lanes;
}

static void spin_end(void *arg) {
    mp_cores *cores = arg;
    atomic_fetch_sub_explicit(&cores->spinning, 1, memory_order_relaxed);
}

static bool spin_begin(void *arg) {
    mp_cores *cores = arg;
    if (mp_crowding_rate() > MP_CROWDED_FROM) /* a machine that is busy with other processes is not ours to spin on */
        return false;
    atomic_fetch_add_explicit(&cores->spinning, 1, memory_order_relaxed);
    if (lanes_left(cores))
        return true;
    spin_end(cores);
    return false;
}

mp_spin_rule mp_cores_spin_rule(mp_cores *cores, uint64_t spin_ns) {
    return (mp_spin_rule){
        .begin = spin_begin, .may_spin = lanes_left, .end = spin_end, .arg = cores, .spin_ns = spin_ns};
}

/* --- fork --- */

mp_shared_slot *mp_cores_slot(void) { return &process_cores; }

void mp_cores_fork_before(mp_cores *cores) {
    if (cores->forking)
        return;
    mp_mutex_lock(&cores->lock);
    cores->forking = true;
}

void mp_cores_fork_parent(mp_cores *cores) {
    if (!cores->forking)
        return;
    cores->forking = false;
    mp_mutex_unlock(&cores->lock);
}

void mp_cores_fork_child(mp_cores *cores) {
    if (!cores->forking)
        return;
    cores->forking = false;
    mp_mutex_init(&cores->lock);
    cores->first = cores->last = NULL;
    cores->team = NULL; /* its threads are the parent's: leave its memory alone */
    cores->team_refused = false;
    cores->forfeited = 0;
    memset(cores->leased, 0, sizeof(cores->leased));
    memset(cores->workers, 0, sizeof(cores->workers));
    atomic_store(&cores->used, 0);
    atomic_store(&cores->waiting, 0);
    atomic_store(&cores->runnable, 0);
    atomic_store(&cores->spinning, 0);
    atomic_store(&cores->together, cores->lanes);
    cores->many = cores->all = (mp_lost){0};
    cores->raised_ns = cores->raise_after_ns = 0;
}
