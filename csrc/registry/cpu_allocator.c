/* cpu_allocator.c: the CPU allocator. See cpu_allocator.h. */
#include "registry/cpu_allocator.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/crowding.h"
#include "base/intervals.h"
#include "base/log.h"

/* A thread that waits for CPUs. Stored on the stack of that thread. */
typedef struct thread_waiter {
    struct thread_waiter *next;
    int home, want, granted; /* `granted` > 0: the number of CPUs granted */
    mp_core_lease *cores;
    mp_cond cond;
} thread_waiter;

/* Sums over leases: their time, and the part of it that other programs took (mp_lease.watched_ns, .lost_ns). */
typedef struct mp_lost {
    uint64_t watched_ns;
    double lost_ns;
} mp_lost;

struct mp_cpu_allocator {
    int threads;
    bool process_wide, background;
    mp_topology topology;
    int capacity[MP_NODES_MAX]; /* cores or CPUs of each node (share_out); their sum is at least `threads` */
    _Atomic int references; /* one per pin, and one for all users together */
    mp_mutex lock;
    /* guarded by: lock */
    thread_waiter *first, *last;
    mp_team *team;
    bool team_refused; /* the system refused to start threads */
    bool closed;
    int forfeited;     /* forfeited leases that have not been returned */
    int leased[MP_NODES_MAX]; /* 0 <= leased <= capacity; the sum is `used` */
    int workers[MP_NODES_MAX]; /* number of workers whose home is this node */
    /* Measurements from which `allocator_learn` sets `barrier_threads`, since the last decision: `many` of leases of
     * several CPUs, `all` of leases of at least `barrier_threads` CPUs. */
    mp_lost many, all;
    uint64_t raised_ns, hold_ns, raise_after_ns;
    /* the forking thread holds the lock. Several registries may share the allocator: the first hook sets this, and
     * later hooks do nothing */
    bool forking;
    /* written under lock, read without it as a hint */
    _Atomic int used;    /* CPUs leased; 0 <= used <= threads */
    _Atomic int waiting; /* threads in the list `first` */
    _Atomic int barrier_threads; /* returned by mp_cpu_allocator_barrier_threads; 1 <= barrier_threads <= threads */
    /* counters */
    _Atomic int runnable; /* workers between mp_cpu_allocator_enter and mp_cpu_allocator_leave */
    _Atomic int spinning; /* threads that spin on a CPU that no lease computes on */
};

static mp_shared_slot process_allocator;

static int capacities(mp_cpu_allocator *allocator, bool of_cores) {
    int total = 0;
    for (int i = 0; i < allocator->topology.node_count; i++) {
        const mp_node *node = &allocator->topology.nodes[i];
        total += allocator->capacity[i] = of_cores ? node->core_count : node->cpu_count;
    }
    return total;
}

/* Sets the capacity of each node to its cores, so that no core gets two threads while another one has none. If more
 * compute threads than cores are configured, sets it to the CPUs of the node, and spreads threads beyond that over the
 * nodes. */
static void share_out(mp_cpu_allocator *allocator) {
    int total = capacities(allocator, true);
    if (total < allocator->threads)
        total = capacities(allocator, false);
    for (int i = 0; total < allocator->threads; i = (i + 1) % allocator->topology.node_count, total++)
        allocator->capacity[i]++;
}

static mp_status open_allocator(int threads, bool background, const mp_topology *topology,
                                mp_cpu_allocator **allocator_out, mp_error *error) {
    *allocator_out = NULL;
    enum { MAX = 256 };
    if (threads < 0 || threads > MAX)
        return mp_fail(error, MP_INVALID_ARGUMENT, "`threads` must be 0 (all CPUs of this process) to %d, got %d", MAX,
                       threads);
    const bool process_wide = threads == 0 && !background;
    if (process_wide && (*allocator_out = mp_shared_take(&process_allocator)))
        return MP_OK;
    mp_cpu_allocator *allocator = mp_alloc_zeroed(sizeof(*allocator), MP_TAG_POOL);
    if (!allocator)
        return mp_fail_memory(error, sizeof(*allocator), "the CPU allocator");
    mp_status status = MP_OK;
    if (topology)
        allocator->topology = *topology;
    else
        status = mp_topology_read(&allocator->topology, error);
    if (status != MP_OK) {
        mp_free(allocator);
        return status;
    }
    allocator->threads = threads ? threads : mp_topology_threads(&allocator->topology, NULL);
    if (allocator->threads > MAX)
        allocator->threads = MAX;
    share_out(allocator);
    atomic_init(&allocator->barrier_threads, allocator->threads);
    atomic_init(&allocator->references, 1);
    mp_mutex_init(&allocator->lock);
    allocator->process_wide = process_wide;
    allocator->background = background;
    *allocator_out = allocator->process_wide ? mp_shared_offer(&process_allocator, allocator) : allocator;
    if (*allocator_out != allocator)
        mp_cpu_allocator_unpin(allocator);
    return MP_OK;
}

mp_status mp_cpu_allocator_open(int threads, bool background, mp_cpu_allocator **allocator_out, mp_error *error) {
    return open_allocator(threads, background, NULL, allocator_out, error);
}

mp_status mp_cpu_allocator_open_on(int threads, const mp_topology *topology, mp_cpu_allocator **allocator_out,
                                   mp_error *error) {
    return open_allocator(threads, false, topology, allocator_out, error);
}

void mp_cpu_allocator_close(mp_cpu_allocator *allocator) {
    if (!allocator || (allocator->process_wide && !mp_shared_drop(&process_allocator)))
        return;
    mp_mutex_lock(&allocator->lock);
    mp_team *team = allocator->forfeited ? NULL : allocator->team;
    assert(allocator->forfeited ||
           (atomic_load(&allocator->used) == 0 && !allocator->first && "a lease is still held"));
    allocator->closed = true; /* the return of the last forfeited lease joins the threads */
    mp_mutex_unlock(&allocator->lock);
    mp_team_destroy(team);
    mp_cpu_allocator_unpin(allocator);
}

mp_cpu_allocator *mp_cpu_allocator_pin(mp_cpu_allocator *allocator) {
    atomic_fetch_add_explicit(&allocator->references, 1, memory_order_relaxed);
    return allocator;
}

void mp_cpu_allocator_unpin(mp_cpu_allocator *allocator) {
    if (!allocator || atomic_fetch_sub_explicit(&allocator->references, 1, memory_order_acq_rel) != 1)
        return;
    mp_mutex_deinit(&allocator->lock);
    mp_free(allocator);
}

int mp_cpu_allocator_threads(const mp_cpu_allocator *allocator) { return allocator->threads; }

int mp_cpu_allocator_leased(mp_cpu_allocator *allocator) {
    return atomic_load_explicit(&allocator->used, memory_order_relaxed);
}

/* --- nodes --- */

int mp_cpu_allocator_nodes(mp_cpu_allocator *allocator, int *cpus, int *leased) {
    mp_mutex_lock(&allocator->lock);
    for (int i = 0; i < allocator->topology.node_count; i++) {
        cpus[i] = allocator->capacity[i];
        leased[i] = allocator->leased[i];
    }
    mp_mutex_unlock(&allocator->lock);
    return allocator->topology.node_count;
}

mp_cpu_counts mp_cpu_allocator_count_at_rest(mp_cpu_allocator *allocator) {
    mp_cpu_counts counts = {.runnable = atomic_load_explicit(&allocator->runnable, memory_order_relaxed),
                            .waiting = atomic_load_explicit(&allocator->waiting, memory_order_relaxed),
                            .spinning = atomic_load_explicit(&allocator->spinning, memory_order_relaxed)};
    for (const thread_waiter *at = allocator->first; at; at = at->next)
        counts.queued++;
    for (int i = 0; i < allocator->topology.node_count; i++)
        counts.homes += allocator->workers[i];
    return counts;
}

mp_cpu_counts mp_cpu_allocator_count(mp_cpu_allocator *allocator) {
    mp_mutex_lock(&allocator->lock);
    mp_cpu_counts counts = mp_cpu_allocator_count_at_rest(allocator);
    mp_mutex_unlock(&allocator->lock);
    return counts;
}

static int free_on(const mp_cpu_allocator *allocator, int node) {
    return allocator->capacity[node] - allocator->leased[node];
}

int mp_cpu_allocator_assign_home(mp_cpu_allocator *allocator) {
    int home = 0;
    mp_mutex_lock(&allocator->lock);
    for (int i = 1; i < allocator->topology.node_count; i++) {
        int more = free_on(allocator, i) - free_on(allocator, home);
        if (more > 0 || (more == 0 && allocator->workers[i] < allocator->workers[home]))
            home = i;
    }
    allocator->workers[home]++;
    mp_mutex_unlock(&allocator->lock);
    return home;
}

void mp_cpu_allocator_release_home(mp_cpu_allocator *allocator, int home) {
    mp_mutex_lock(&allocator->lock);
    assert(allocator->workers[home] > 0);
    allocator->workers[home]--;
    mp_mutex_unlock(&allocator->lock);
}

int mp_cpu_allocator_node_number(const mp_cpu_allocator *allocator, int home) {
    return allocator->topology.node_count > 1 ? allocator->topology.nodes[home].number : -1;
}

int mp_cpu_allocator_node_memory(const mp_cpu_allocator *allocator, int home) {
    return allocator->topology.node_count > 1 ? allocator->topology.nodes[home].memory : -1;
}

/* --- shares --- */

void mp_cpu_allocator_enter(mp_cpu_allocator *allocator) {
    atomic_fetch_add_explicit(&allocator->runnable, 1, memory_order_relaxed);
}

void mp_cpu_allocator_leave(mp_cpu_allocator *allocator) {
    int before = atomic_fetch_sub_explicit(&allocator->runnable, 1, memory_order_relaxed);
    assert(before > 0);
    (void)before;
}

bool mp_cpu_allocator_busy(const mp_cpu_allocator *allocator) {
    return atomic_load_explicit(&allocator->runnable, memory_order_relaxed) > 0;
}

bool mp_cpu_allocator_contended(mp_cpu_allocator *allocator) {
    return atomic_load_explicit(&allocator->runnable, memory_order_relaxed) > 1 ||
           atomic_load_explicit(&allocator->waiting, memory_order_relaxed) > 0;
}

/* --- leases --- */

/* Must hold the lock. Takes `count` CPUs, and chooses their nodes. At least `count` CPUs must be free. */
static void take_cpus(mp_cpu_allocator *allocator, int home, int count, mp_core_lease *cores) {
    mp_assert_held(&allocator->lock);
    int nodes = allocator->topology.node_count, first = home;
    *cores = (mp_core_lease){0};
    for (int i = 0; i < nodes && free_on(allocator, home) < count; i++) {
        /* Take all CPUs from one other node: the node with the fewest free CPUs that suffice, so that a later, larger
         * lease still fits on one node. */
        bool fits = free_on(allocator, i) >= count;
        if (fits && (first == home || free_on(allocator, i) < free_on(allocator, first)))
            first = i;
    }
    for (int i = 0; i < nodes && !free_on(allocator, first); i++)
        if (free_on(allocator, i))
            first = i;
    cores->first = first;
    for (int node = first; count > 0;) {
        int some = free_on(allocator, node) < count ? free_on(allocator, node) : count;
        cores->on[node] = (int16_t)(cores->on[node] + some);
        allocator->leased[node] += some;
        count -= some;
        for (int i = 0; i < nodes; i++)
            if (free_on(allocator, i) > free_on(allocator, node))
                node = i;
    }
}

/* Must hold the lock. Grants up to the caller's share of the free CPUs at once; returns 0 if none is free. */
static int grant(mp_cpu_allocator *allocator, int home, int want, mp_core_lease *cores) {
    mp_assert_held(&allocator->lock);
    int used = atomic_load_explicit(&allocator->used, memory_order_relaxed), left = allocator->threads - used;
    int runnable = atomic_load_explicit(&allocator->runnable, memory_order_relaxed);
    int share = runnable > 1 ? allocator->threads / runnable : allocator->threads;
    int granted = want < share ? want : share;
    if (granted < 1)
        granted = 1;
    if (granted > left)
        granted = left;
    atomic_store_explicit(&allocator->used, used + granted, memory_order_relaxed);
    take_cpus(allocator, home, granted, cores);
    return granted;
}

/* Must hold the lock. Starts the compute threads when a second CPU is leased for the first time. */
static mp_team *team_for(mp_cpu_allocator *allocator, int threads) {
    mp_assert_held(&allocator->lock);
    if (allocator->closed)
        return NULL;
    if (threads > 1 && !allocator->team && !allocator->team_refused) {
        mp_error error;
        bool before = mp_thread_start_in_background(allocator->background);
        mp_status status = mp_team_create(allocator->threads - 1, &allocator->team, &error);
        mp_thread_start_in_background(before);
        if (status != MP_OK) {
            allocator->team_refused = true;
            mp_log(MP_LOG_WARNING, "Compute threads failed to start, computing on one thread: %s", error.message);
        }
    }
    return threads > 1 ? allocator->team : NULL;
}

static int count_cores(const mp_cpu_allocator *allocator, const mp_core_lease *cores) {
    int count = 0;
    for (int i = 0; i < allocator->topology.node_count; i++)
        count += cores->on[i];
    return count;
}

static void give_back(mp_cpu_allocator *allocator, const mp_core_lease *cores) {
    int count = count_cores(allocator, cores);
    if (!count)
        return;
    mp_mutex_lock(&allocator->lock);
    assert(atomic_load_explicit(&allocator->used, memory_order_relaxed) >= count);
    atomic_fetch_sub_explicit(&allocator->used, count, memory_order_relaxed);
    for (int i = 0; i < allocator->topology.node_count; i++) {
        assert(allocator->leased[i] >= cores->on[i]);
        allocator->leased[i] -= cores->on[i];
    }
    while (allocator->first && atomic_load_explicit(&allocator->used, memory_order_relaxed) < allocator->threads) {
        thread_waiter *waiter = allocator->first;
        allocator->first = waiter->next;
        if (!allocator->first)
            allocator->last = NULL;
        atomic_fetch_sub_explicit(&allocator->waiting, 1, memory_order_relaxed);
        waiter->granted = grant(allocator, waiter->home, waiter->want, waiter->cores);
        /* Signal under the lock: the waiter's stack frame is gone as soon as the waiter sees `granted`. */
        mp_cond_signal(&waiter->cond);
    }
    mp_mutex_unlock(&allocator->lock);
}

/* Must hold the lock; releases it temporarily. Waits for CPUs; returns 0 if give_up returned true. */
static int wait_for_cpus(mp_cpu_allocator *allocator, int home, int want, mp_core_lease *cores,
                            bool (*give_up)(void *arg), void *arg) {
    mp_assert_held(&allocator->lock);
    thread_waiter self = {.home = home, .want = want, .cores = cores}, **link;
    mp_cond_init(&self.cond);
    if (allocator->last)
        allocator->last->next = &self;
    else
        allocator->first = &self;
    allocator->last = &self;
    atomic_fetch_add_explicit(&allocator->waiting, 1, memory_order_relaxed);
    bool over = false;
    while (!self.granted && !over) {
        if (give_up) {
            mp_mutex_unlock(&allocator->lock);
            over = give_up(arg);
            mp_mutex_lock(&allocator->lock);
        }
        if (!self.granted && !over)
            mp_cond_wait(&self.cond, &allocator->lock, give_up ? mp_sys_now_ns() + MP_POLL_NS : 0);
    }
    if (!self.granted && over) {
        thread_waiter *before = NULL;
        for (link = &allocator->first; *link != &self; link = &(*link)->next)
            before = *link;
        *link = self.next;
        if (allocator->last == &self)
            allocator->last = before;
        atomic_fetch_sub_explicit(&allocator->waiting, 1, memory_order_relaxed);
    }
    mp_cond_deinit(&self.cond);
    return self.granted;
}

/* Fills in the places of a lease's compute threads, the first node of the lease first. */
static int places_of(const mp_cpu_allocator *allocator, const mp_core_lease *cores, mp_team_place *places) {
    int nodes = allocator->topology.node_count, count = 0;
    for (int i = 0; i < nodes; i++) {
        int node = (cores->first + i) % nodes;
        if (cores->on[node])
            places[count++] =
                (mp_team_place){nodes > 1 ? &allocator->topology.nodes[node].cpus : NULL, cores->on[node]};
    }
    return count;
}

/* Cuts a lease down to its first `keep` CPUs and returns the others. */
static mp_core_lease split_off(const mp_cpu_allocator *allocator, mp_core_lease *cores, int keep) {
    int nodes = allocator->topology.node_count;
    mp_core_lease rest = {.first = cores->first};
    for (int i = 0; i < nodes; i++) {
        int node = (cores->first + i) % nodes, kept = cores->on[node] < keep ? cores->on[node] : keep;
        rest.on[node] = (int16_t)(cores->on[node] - kept);
        cores->on[node] = (int16_t)kept;
        keep -= kept;
    }
    return rest;
}

static bool lease_or_lend(mp_cpu_allocator *allocator, bool lend, int home, int want, mp_lease *lease,
                          mp_core_lease *cores, bool (*give_up)(void *arg), void *arg) {
    assert(home >= 0 && home < allocator->topology.node_count);
    mp_mutex_lock(&allocator->lock);
    int granted = allocator->first ? 0 : grant(allocator, home, want, cores);
    if (!granted)
        granted = wait_for_cpus(allocator, home, want, cores, give_up, arg);
    if (!granted) {
        mp_mutex_unlock(&allocator->lock);
        return false;
    }
    mp_team *team = lend ? NULL : team_for(allocator, granted);
    mp_mutex_unlock(&allocator->lock);

    mp_team_place places[MP_NODES_MAX];
    mp_team_lease_at(team, places, places_of(allocator, cores, places), lease);
    if (lend) {
        lease->threads = granted;
        lease->near = places[0].threads;
        return true;
    }
    /* The lease has fewer threads than CPUs if the system refused threads, or if forfeited leases still hold helpers:
     * return the other CPUs. */
    lease->runnable = &allocator->runnable;
    lease->waiting = &allocator->waiting;
    mp_core_lease surplus = split_off(allocator, cores, lease->threads);
    give_back(allocator, &surplus);
    return true;
}

bool mp_cpu_allocator_lease(mp_cpu_allocator *allocator, int home, int want, mp_lease *lease, mp_core_lease *cores,
                            bool (*give_up)(void *arg), void *arg) {
    return lease_or_lend(allocator, false, home, want, lease, cores, give_up, arg);
}

bool mp_cpu_allocator_lend(mp_cpu_allocator *allocator, int home, int want, mp_lease *lease, mp_core_lease *cores,
                           bool (*give_up)(void *arg), void *arg) {
    return lease_or_lend(allocator, true, home, want, lease, cores, give_up, arg);
}

/* --- compute threads that wait for each other --- */

int mp_cpu_allocator_barrier_threads(const mp_cpu_allocator *allocator) {
    return atomic_load_explicit(&allocator->barrier_threads, memory_order_relaxed);
}

static void set_barrier_threads(mp_cpu_allocator *allocator, int threads) {
    atomic_store_explicit(&allocator->barrier_threads, threads, memory_order_relaxed);
    allocator->many = allocator->all = (mp_lost){0};
}

static double lost_share(mp_lost *lost, uint64_t watched_ns, double lost_ns) {
    lost->watched_ns += watched_ns;
    lost->lost_ns += lost_ns;
    if (lost->watched_ns < MP_CROWDING_NS)
        return -1;
    double share = lost->lost_ns / (double)lost->watched_ns;
    *lost = (mp_lost){0};
    return share;
}

/* Must hold the lock. Adjusts the number of threads that compute together. n threads that meet at barriers are all as
 * slow as the slowest thread: if that thread loses a share s of its time to other programs, n threads do the work of n
 * (1 - s). So n - 1 threads are faster if s > 1/n, and already at a slightly smaller s, because fewer threads lose less
 * (TOO_MUCH). If s is small, a different thread loses the time in each step, and fewer threads do not help, so s must
 * also exceed LARGE. While the threads lose little, one more thread is tried: first after MP_HOLD_FIRST_NS, and after
 * twice the time whenever the last try had to be undone. */
static void allocator_learn(mp_cpu_allocator *allocator, const mp_lease *lease) {
    mp_assert_held(&allocator->lock);
    const double TOO_MUCH = 0.8, LARGE = 0.2, MAX_OF_IT = 0.6, LITTLE = 0.4;
    int most = atomic_load_explicit(&allocator->barrier_threads, memory_order_relaxed), threads = lease->threads;
    uint64_t now = mp_sys_now_ns();
    double lost = (double)lease->lost_ns;
    if (threads > 1) {
        double share = lost_share(&allocator->many, lease->watched_ns, lost);
        if (share > LARGE && share * threads > TOO_MUCH) {
            int fewer = share > MAX_OF_IT ? threads / 2 : threads - 1;
            bool in_vain = allocator->raised_ns && now - allocator->raised_ns < MP_HOLD_FIRST_NS;
            allocator->hold_ns = !in_vain                                   ? MP_HOLD_FIRST_NS
                                 : 2 * allocator->hold_ns < MP_HOLD_MAX_NS ? 2 * allocator->hold_ns
                                                                            : MP_HOLD_MAX_NS;
            allocator->raise_after_ns = now + allocator->hold_ns;
            if (fewer < most)
                set_barrier_threads(allocator, fewer);
            return;
        }
    }
    if (threads < most || most == allocator->threads)
        return;
    double share = lost_share(&allocator->all, lease->watched_ns, lost);
    if (share >= 0 && share * (most + 1) < LITTLE && now >= allocator->raise_after_ns) {
        allocator->raised_ns = now;
        set_barrier_threads(allocator, most + 1);
    }
}

void mp_cpu_allocator_return(mp_cpu_allocator *allocator, mp_lease *lease, const mp_core_lease *cores,
                             bool forfeited) {
    if (lease->barrier_bound && lease->watched_ns) {
        mp_mutex_lock(&allocator->lock);
        allocator_learn(allocator, lease);
        mp_mutex_unlock(&allocator->lock);
    }
    if (!lease->team) /* lent to another process: no helpers of this process to return */
        lease->threads = 1;
    mp_team_return(lease); /* return the helpers first: a thread must be free before its CPU is granted again */
    if (!forfeited) {
        give_back(allocator, cores);
        return;
    }
    mp_mutex_lock(&allocator->lock);
    bool last = --allocator->forfeited == 0 && allocator->closed;
    mp_team *team = last ? allocator->team : NULL;
    if (last)
        allocator->team = NULL;
    mp_mutex_unlock(&allocator->lock);
    mp_team_destroy(team);
}

void mp_cpu_allocator_write_off(mp_cpu_allocator *allocator, const mp_core_lease *cores) {
    mp_mutex_lock(&allocator->lock);
    allocator->forfeited++;
    mp_mutex_unlock(&allocator->lock);
    give_back(allocator, cores);
}

/* --- spinning --- */

static bool threads_left(void *arg) {
    mp_cpu_allocator *allocator = arg;
    return atomic_load_explicit(&allocator->used, memory_order_relaxed) +
               atomic_load_explicit(&allocator->spinning, memory_order_relaxed) <=
           allocator->threads;
}

static void spin_end(void *arg) {
    mp_cpu_allocator *allocator = arg;
    atomic_fetch_sub_explicit(&allocator->spinning, 1, memory_order_relaxed);
}

static bool spin_begin(void *arg) {
    mp_cpu_allocator *allocator = arg;
    if (mp_crowding_rate() > MP_CROWDED_FROM) /* do not spin on CPUs that other processes need */
        return false;
    atomic_fetch_add_explicit(&allocator->spinning, 1, memory_order_relaxed);
    if (threads_left(allocator))
        return true;
    spin_end(allocator);
    return false;
}

mp_spin_rule mp_cpu_allocator_spin_rule(mp_cpu_allocator *allocator, uint64_t spin_ns) {
    return (mp_spin_rule){
        .begin = spin_begin, .may_spin = threads_left, .end = spin_end, .arg = allocator, .spin_ns = spin_ns};
}

/* --- fork --- */

mp_shared_slot *mp_cpu_allocator_slot(void) { return &process_allocator; }

void mp_cpu_allocator_fork_before(mp_cpu_allocator *allocator) {
    if (allocator->forking)
        return;
    mp_mutex_lock(&allocator->lock);
    allocator->forking = true;
}

void mp_cpu_allocator_fork_parent(mp_cpu_allocator *allocator) {
    if (!allocator->forking)
        return;
    allocator->forking = false;
    mp_mutex_unlock(&allocator->lock);
}

void mp_cpu_allocator_fork_child(mp_cpu_allocator *allocator) {
    if (!allocator->forking)
        return;
    allocator->forking = false;
    mp_mutex_init(&allocator->lock);
    allocator->first = allocator->last = NULL;
    allocator->team = NULL; /* the team's threads exist in the parent only: do not touch its memory */
    allocator->team_refused = false;
    allocator->forfeited = 0;
    memset(allocator->leased, 0, sizeof(allocator->leased));
    memset(allocator->workers, 0, sizeof(allocator->workers));
    atomic_store(&allocator->used, 0);
    atomic_store(&allocator->waiting, 0);
    atomic_store(&allocator->runnable, 0);
    atomic_store(&allocator->spinning, 0);
    atomic_store(&allocator->barrier_threads, allocator->threads);
    allocator->many = allocator->all = (mp_lost){0};
    allocator->raised_ns = 0;
}
