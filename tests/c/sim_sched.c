/* sim_sched.c: the schedulers. See sim.h. */
#include "sim.h"

#ifdef MP_SIM

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FIBRES = 64, CHANGES = 16, PATH = 20000, UNFAIR = 400 };

static struct {
    const sim_setup *setup;
    uint64_t random;
    uint32_t stay; /* random: probability that the running fibre continues, in units of 1 / 65,536 */
    /* pct */
    uint32_t priority[FIBRES]; /* larger runs first */
    uint32_t lowest;
    uint64_t step, change[CHANGES];
    int changes;
    int last, in_a_row;
} sched;

/* --- exhaustive: the chosen alternative and the number of alternatives of each decision --- */

static struct {
    uint16_t chosen[PATH], count[PATH];
    int depth, length, preemptions;
} path;

static uint64_t next_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static uint64_t roll(void) { return next_random(&sched.random); }

void sim_sched_begin(const sim_setup *setup) {
    memset(&sched, 0, sizeof(sched));
    sched.setup = setup;
    sched.random = setup->seed * 2 + 1;
    sched.last = -1;
    static const uint32_t stays[] = {0, 32768, 52000, 61000, 64500};
    sched.stay = stays[roll() % 5];
    sched.lowest = 1000000;
    sched.changes = setup->depth < CHANGES ? setup->depth : CHANGES;
    /* Lengths of schedules differ by orders of magnitude, so the span of the priority changes is random too. */
    uint64_t span = 64ull << (roll() % 8);
    for (int i = 0; i < sched.changes; i++)
        sched.change[i] = roll() % span;
    path.depth = path.preemptions = 0;
}

void sim_sched_started(int fibre) { sched.priority[fibre] = 1000001 + (uint32_t)(roll() % 1000000); }

static int decide(int n) {
    if (n <= 1)
        return 0;
    if (path.depth == PATH)
        sim_fail("more than %d decisions in one schedule", PATH);
    if (path.depth == path.length) {
        path.chosen[path.length] = 0;
        path.count[path.length++] = (uint16_t)n;
    }
    if (path.count[path.depth] != n)
        sim_fail("decision %d had %d alternatives in the run before and has %d now: something besides the schedule "
                 "decides",
                 path.depth, path.count[path.depth], n);
    return path.chosen[path.depth++];
}

void sim_first(void) {
    path.length = path.depth = 0;
    const char *text = getenv("MPOOL_SIM_CHOICES"); /* chosen/count,... */
    while (text && *text && path.length < PATH) {
        char *end;
        path.chosen[path.length] = (uint16_t)strtoul(text, &end, 10);
        path.count[path.length++] = (uint16_t)strtoul(end + 1, &end, 10);
        text = *end ? end + 1 : end;
    }
}

bool sim_next(void) {
    path.length = path.depth;
    while (path.length && path.chosen[path.length - 1] + 1 >= path.count[path.length - 1])
        path.length--;
    if (!path.length)
        return false;
    path.chosen[path.length - 1]++;
    return true;
}

void sim_sched_describe(char *text, int size) {
    int used = 0;
    text[0] = 0;
    for (int i = 0; i < path.depth && used < size - 16; i++)
        used += snprintf(text + used, (size_t)(size - used), "%s%d/%d", i ? "," : "", path.chosen[i], path.count[i]);
}

static int pick_exhaustive(uint64_t runnable, int self) {
    int options[FIBRES], n = 0;
    if (self >= 0) {
        options[n++] = self;
        if (path.preemptions >= sched.setup->depth)
            return self;
    }
    for (uint64_t left = runnable; left; left &= left - 1) {
        int fibre = __builtin_ctzll(left);
        if (fibre != self)
            options[n++] = fibre;
    }
    int at = decide(n);
    if (self >= 0 && at > 0)
        path.preemptions++;
    return options[at];
}

static int pick_random(uint64_t runnable, int self) {
    if (self >= 0 && (roll() & 65535) < sched.stay)
        return self;
    for (int skip = (int)(roll() % (uint64_t)__builtin_popcountll(runnable)); skip; skip--)
        runnable &= runnable - 1;
    return __builtin_ctzll(runnable);
}

static int pick_pct(uint64_t runnable, int self) {
    sched.step++;
    for (int i = 0; self >= 0 && i < sched.changes; i++)
        if (sched.change[i] == sched.step)
            sched.priority[self] = sched.lowest--;
    /* A fibre that spins until another one has run must let that one run eventually. */
    if (self >= 0 && self == sched.last && ++sched.in_a_row > UNFAIR) {
        sched.priority[self] = sched.lowest--;
        sched.in_a_row = 0;
    }
    int best = -1;
    for (uint64_t left = runnable; left; left &= left - 1) {
        int fibre = __builtin_ctzll(left);
        if (best < 0 || sched.priority[fibre] > sched.priority[best])
            best = fibre;
    }
    if (best != sched.last)
        sched.in_a_row = 0;
    sched.last = best;
    return best;
}

int sim_sched_pick(uint64_t runnable, int self) {
    if (!(runnable & (runnable - 1)))
        return __builtin_ctzll(runnable);
    switch (sched.setup->scheduler) {
    case SIM_PCT:
        return pick_pct(runnable, self);
    case SIM_EXHAUSTIVE:
        return pick_exhaustive(runnable, self);
    default:
        return pick_random(runnable, self);
    }
}

int sim_sched_choose(int n) {
    return sched.setup->scheduler == SIM_EXHAUSTIVE ? decide(n) : (int)(roll() % (uint64_t)n);
}

bool sim_sched_chance(uint32_t of_65536) {
    return of_65536 && sched.setup->scheduler != SIM_EXHAUSTIVE && (roll() & 65535) < of_65536;
}

#endif
