/* The small data structures of the registry against their definitions: random operations, and the same on a plain list
 * that follows the rules in the header. */
#include <string.h>

#include "base/sys.h"
#include "mp_test.h"
#include "registry/faults.h"
#include "registry/pool/queue.h"

static uint64_t state;

static uint64_t below(uint64_t n) { /* splitmix64 */
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (z ^ (z >> 31)) % n;
}

/* --- quarantine --- */

enum { PRINTS = 600 };

typedef struct suspect {
    uint64_t print, last_ns;
    int alone;
    bool in_company;
} suspect;

static suspect suspects[MP_QUARANTINE_ROWS];
static int suspect_count;

static void forget(int at) {
    memmove(&suspects[at], &suspects[at + 1], (size_t)(suspect_count - at - 1) * sizeof(suspect));
    suspect_count--;
}

static int find_suspect(uint64_t print, uint64_t now_ns) {
    for (int i = suspect_count - 1; i >= 0; i--)
        if (now_ns - suspects[i].last_ns >= 600ull * 1000 * 1000 * 1000)
            forget(i);
    for (int i = 0; i < suspect_count; i++)
        if (suspects[i].print == print)
            return i;
    return -1;
}

static int verdict(uint64_t print, uint64_t now_ns) {
    int at = find_suspect(print, now_ns);
    if (at < 0)
        return 0;
    return suspects[at].alone > 0 && suspects[at].alone + suspects[at].in_company >= 2 ? MP_QUARANTINE_FAULTS : 1;
}

static int accuse(uint64_t print, bool alone, uint64_t now_ns) {
    int at = find_suspect(print, now_ns);
    if (at < 0 && suspect_count == MP_QUARANTINE_ROWS) {
        int least = 0;
        for (int i = 1; i < suspect_count; i++)
            if (suspects[i].alone < suspects[least].alone ||
                (suspects[i].alone == suspects[least].alone && suspects[i].last_ns < suspects[least].last_ns))
                least = i;
        if (suspects[least].alone > alone)
            return 1; /* a suspect, but it is not remembered */
        forget(least);
    }
    if (at < 0) {
        at = suspect_count++;
        suspects[at] = (suspect){.print = print};
    }
    suspects[at].last_ns = now_ns;
    suspects[at].alone += alone;
    suspects[at].in_company |= !alone;
    return verdict(print, now_ns);
}

MP_TEST(registry_tables_quarantine_follows_its_rules) {
    for (uint64_t seed = 0; seed < 12; seed++) {
        static mp_quarantine table;
        memset(&table, 0, sizeof(table));
        state = seed;
        suspect_count = 0;
        uint64_t now = 1000;
        for (int step = 0; step < 6000; step++) {
            now += 1 + below(seed % 3 ? 1000 : 3ull * 1000 * 1000 * 1000); /* with every third seed, rows expire */
            uint64_t print = below(PRINTS);
            bool alone = below(100) < seed * 8;
            if (below(100) < 70) {
                MP_CHECK_INT(mp_quarantine_add(&table, print, alone, now), accuse(print, alone, now));
            } else {
                mp_quarantine_clear(&table, print, now);
                int at = find_suspect(print, now);
                if (at >= 0) {
                    suspects[at].in_company = false;
                    if (suspects[at].alone > 0)
                        suspects[at].alone--;
                    if (!suspects[at].alone)
                        forget(at);
                }
            }
            MP_CHECK_INT(mp_quarantine_check(&table, print, now), verdict(print, now));
            MP_CHECK(mp_quarantine_is_empty(&table) == (suspect_count == 0));
            if (step % 500 == 499)
                for (uint64_t i = 0; i < PRINTS; i++)
                    MP_CHECK_INT(mp_quarantine_check(&table, i, now), verdict(i, now));
        }
    }
}

/* --- breaker --- */

MP_TEST(registry_tables_breaker_follows_its_rules) {
    enum { STEPS = 20000, PROBES = 64 };
    static uint64_t faults[STEPS];
    for (uint64_t seed = 0; seed < 24; seed++) {
        state = seed + 100;
        mp_breaker breaker = {.state = MP_BREAKER_CLOSED};
        const int some = 1 + (int)below(6);
        const mp_breaker_rule rule = {.threshold = seed == 0 ? 0 : seed == 1 ? MP_BREAKER_FAULTS_MAX : some,
                                      .probes = 1 + (int)below(3),
                                      .successes = 1 + (int)below(3),
                                      .window_ns = seed == 1 ? 2000 : 100,
                                      .backoff_ns = 50};
        mp_breaker_state now_is = MP_BREAKER_CLOSED;
        int count = 0, flying = 0, succeeded = 0, held = 0;
        uint32_t opened = 0, probes[PROBES], of[PROBES];
        uint64_t now = 1, open_until = 0;
        for (int step = 0; step < STEPS; step++) {
            now += below(20);
            switch (below(3)) {
            case 0: { /* a request arrives */
                uint32_t probe = 77;
                uint64_t left = 77;
                bool enters = mp_breaker_ask(&breaker, &rule, now, &probe, &left);
                if (now_is == MP_BREAKER_OPEN && now >= open_until) {
                    now_is = MP_BREAKER_HALF_OPEN;
                    flying = succeeded = 0;
                }
                bool as_probe = now_is == MP_BREAKER_HALF_OPEN && flying < rule.probes;
                MP_CHECK(enters == (now_is == MP_BREAKER_CLOSED || as_probe) && (probe != 0) == as_probe);
                MP_CHECK_INT(left, now_is == MP_BREAKER_OPEN ? open_until - now : 0);
                flying += as_probe;
                if (as_probe && held < PROBES) {
                    probes[held] = probe;
                    of[held++] = opened;
                }
                break;
            }
            case 1: { /* a request ends */
                bool success = below(3) > 0;
                if (below(2) || !held) {
                    mp_breaker_end(&breaker, &rule, 0, success);
                    break;
                }
                int at = (int)below((uint64_t)held);
                mp_breaker_end(&breaker, &rule, probes[at], success);
                if (of[at] == opened && now_is == MP_BREAKER_HALF_OPEN) { /* a probe of an earlier opening is ignored */
                    flying--;
                    succeeded += success;
                    if (success && succeeded >= rule.successes)
                        now_is = MP_BREAKER_CLOSED;
                }
                probes[at] = probes[--held];
                of[at] = of[held];
                break;
            }
            default: { /* a worker has a fault */
                bool opens = mp_breaker_fault(&breaker, &rule, now), expected = now_is == MP_BREAKER_HALF_OPEN;
                if (now_is == MP_BREAKER_CLOSED && rule.threshold) {
                    faults[count++] = now;
                    expected = count >= rule.threshold && now - faults[count - rule.threshold] <= rule.window_ns;
                }
                MP_CHECK(opens == expected);
                if (expected) {
                    now_is = MP_BREAKER_OPEN;
                    open_until = now + rule.backoff_ns;
                    count = 0;
                    opened++;
                }
                break;
            }
            }
            MP_CHECK_INT(breaker.state, now_is);
            MP_CHECK_STR(mp_breaker_name(&breaker), now_is == MP_BREAKER_CLOSED ? "closed"
                                                    : now_is == MP_BREAKER_OPEN ? "open"
                                                                                : "half-open");
        }
        MP_CHECK((opened > 10) == (rule.threshold != 0) || seed == 1);
    }
}

/* --- flows --- */

MP_TEST(registry_tables_flows_follow_their_rules) {
    enum { COUNT = 40, GROUPS = 3, KEYS = 70, SLOTS = COUNT + GROUPS * MP_FLOWS_SHARED };
    for (uint64_t seed = 0; seed < 20; seed++) {
        mp_flows flows;
        mp_error error;
        uint64_t key_of[COUNT], left_at[COUNT] = {0}; /* by slot: its flow, and when the last user left */
        int users[COUNT] = {0}, used = 0, entered[KEYS * 4], slot_of[KEYS * 4], count = 0;
        state = seed + 200;
        uint64_t keys = seed % 2 ? KEYS : COUNT + 2;
        MP_CHECK_OK(mp_flows_create(&flows, COUNT, GROUPS, &error), &error);
        MP_CHECK_INT(mp_flows_slots(&flows), SLOTS);
        for (uint64_t step = 1; step < 8000; step++) {
            if (count == KEYS * 4 || (count && below(100) < 50)) {
                int at = (int)below((uint64_t)count), slot = slot_of[at];
                mp_flows_leave(&flows, slot);
                if (slot < COUNT && --users[slot] == 0)
                    left_at[slot] = step;
                slot_of[at] = slot_of[--count];
                entered[at] = entered[count];
                continue;
            }
            uint64_t key = below(keys);
            int known = -1, idle = -1, group = (int)(key % GROUPS);
            for (int i = 0; i < used; i++) {
                if (key_of[i] == key)
                    known = i;
                if (!users[i] && (idle < 0 || left_at[i] < left_at[idle]))
                    idle = i;
            }
            bool fresh = false, shared = known < 0 && used == COUNT && idle < 0;
            int slot = mp_flows_enter(&flows, key, group, &fresh);
            MP_CHECK(fresh == (known < 0 && !shared));
            if (shared) { /* one of the slots of its group, the same one for every user */
                MP_CHECK(slot >= COUNT + group * MP_FLOWS_SHARED && slot < COUNT + (group + 1) * MP_FLOWS_SHARED);
                for (int i = 0; i < count; i++)
                    MP_CHECK(slot_of[i] < COUNT || entered[i] != (int)key || slot_of[i] == slot);
            } else {
                MP_CHECK_INT(slot, known >= 0 ? known : used < COUNT ? used : idle);
                used += known < 0 && used < COUNT;
                key_of[slot] = key;
                users[slot]++;
            }
            entered[count] = (int)key;
            slot_of[count++] = slot;
        }
        mp_flows_destroy(&flows);
    }
}

/* The flows are spread over the buckets, so that none is slow to find. */
MP_TEST(registry_tables_flows_are_spread) {
    for (int count = 15; count <= 257; count += 121) {
        mp_flows flows;
        mp_error error;
        bool fresh;
        int longest = 0, found = 0, buckets = 16;
        while (buckets < count)
            buckets *= 2;
        MP_CHECK_OK(mp_flows_create(&flows, count, 1, &error), &error);
        for (int i = 0; i < count; i++)
            MP_CHECK(mp_flows_enter(&flows, (uint64_t)i << 32, 0, &fresh) == i && fresh);
        for (int i = 0; i < buckets; i++) {
            int length = 0;
            for (int slot = flows.buckets[i]; slot >= 0; slot = flows.slots[slot].chain)
                length++;
            longest = length > longest ? length : longest;
            found += length;
        }
        MP_CHECK_INT(found, count);
        /* With a uniform hash, any bucket holds 15 flows or more with a probability below 1e-14: the tail of the
         * binomial distribution, times `buckets`. */
        MP_CHECK(longest <= 14);
        mp_flows_destroy(&flows);
    }
}

/* --- queue --- */

enum { NODES = 80, TENANTS = 5 };

typedef struct waiting { /* one flow: the work of a tenant of one kind, at one priority */
    uint64_t start, turn;
} waiting;

static struct {
    mp_queue queue;
    mp_queue_node nodes[NODES];
    bool queued[NODES];
    int64_t place[NODES]; /* smaller: earlier in its flow and in its level */
    int64_t front, back;
    waiting flows[MP_QUEUE_PRIORITIES][MP_QUEUE_KINDS][TENANTS];
    uint64_t now[MP_QUEUE_PRIORITIES], rest[MP_QUEUE_PRIORITIES], turns;
} line;

/* The least and the most time for which a kind has been full: the test reads the clock before and after the queue does.
 */
static struct {
    bool full;
    uint64_t least, most, since_least, since_most;
} fullness[MP_QUEUE_KINDS];

static void check_fullness(int kind, int capacity, uint64_t before_ns) {
    uint64_t after_ns = mp_sys_now_ns(), at_least = fullness[kind].least, at_most = fullness[kind].most;
    bool full = line.queue.counts[kind] >= capacity;
    if (fullness[kind].full) {
        at_least += before_ns - fullness[kind].since_least;
        at_most += after_ns - fullness[kind].since_most;
    }
    if (fullness[kind].full && !full) {
        fullness[kind].least = at_least;
        fullness[kind].most = at_most;
    } else if (full && !fullness[kind].full) {
        fullness[kind].since_least = after_ns;
        fullness[kind].since_most = before_ns;
        at_most += after_ns - before_ns;
    }
    fullness[kind].full = full;
    uint64_t said = mp_queue_full_ns(&line.queue, kind, after_ns);
    MP_CHECK(said >= at_least && said <= at_most);
}

static waiting *flow_of(const mp_queue_node *node) { return &line.flows[node->priority][node->kind][node->tenant]; }

/* Returns the first queued node of the flow or, without a flow, of the level; NULL: none. */
static mp_queue_node *first_of(int priority, const waiting *flow) {
    int best = -1;
    for (int i = 0; i < NODES; i++)
        if (line.queued[i] && line.nodes[i].priority == priority && (!flow || flow_of(&line.nodes[i]) == flow) &&
            (best < 0 || line.place[i] < line.place[best]))
            best = i;
    return best < 0 ? NULL : &line.nodes[best];
}

static bool is_before(const waiting *a, const waiting *b) {
    return a->start != b->start ? a->start < b->start : a->turn < b->turn;
}

/* Returns the waiting flow that has received least; counts the waiting flows. */
static waiting *least_of(int priority, int *count) {
    waiting *least = NULL;
    *count = 0;
    for (int i = 0; i < MP_QUEUE_KINDS * TENANTS; i++) {
        waiting *flow = &line.flows[priority][0][0] + i;
        if (!first_of(priority, flow))
            continue;
        ++*count;
        if (!least || is_before(flow, least))
            least = flow;
    }
    return least;
}

static mp_queue_node *best_at(uint64_t now_ns) {
    mp_queue_node *best = NULL;
    uint64_t best_gain = 0;
    for (int priority = 0; priority < MP_QUEUE_PRIORITIES; priority++) {
        int count;
        waiting *least = least_of(priority, &count);
        uint64_t oldest = UINT64_MAX;
        for (int i = 0; i < NODES; i++)
            if (line.queued[i] && line.nodes[i].priority == priority && line.nodes[i].since_ns < oldest)
                oldest = line.nodes[i].since_ns;
        uint64_t gain = least && now_ns > oldest ? (now_ns - oldest) / MP_QUEUE_AGEING_NS : 0;
        if (!least || (best && gain <= best_gain + (uint64_t)(priority - best->priority)))
            continue;
        best = first_of(priority, least);
        best_gain = gain;
    }
    return best;
}

static void put_in_line(int at, bool front) {
    mp_queue_node *node = &line.nodes[at];
    waiting *flow = flow_of(node);
    if (!first_of(node->priority, flow)) {
        if (flow->start < line.now[node->priority])
            flow->start = line.now[node->priority];
        flow->turn = line.turns++;
    }
    line.queued[at] = true;
    line.place[at] = front ? --line.front : ++line.back;
}

static void take_in_turn(int at) {
    mp_queue_node *node = &line.nodes[at];
    int level = node->priority, count;
    waiting *flow = flow_of(node);
    least_of(level, &count);
    uint64_t sum = line.rest[level] + node->cost + 1;
    line.now[level] += sum / (uint64_t)count;
    line.rest[level] = sum % (uint64_t)count;
    line.queued[at] = false;
    flow->start += node->cost + 1;
    flow->turn = line.turns++;
    waiting *least = least_of(level, &count);
    if (least && line.now[level] < least->start)
        line.now[level] = least->start;
}

static void check_line(uint64_t now_ns) {
    int count = 0, counts[MP_QUEUE_KINDS] = {0};
    uint64_t cost = 0;
    mp_queue_node *at = mp_queue_first(&line.queue), *other = &line.nodes[below(NODES)];
    for (int level = 0; level < MP_QUEUE_PRIORITIES; level++)
        for (int64_t last = INT64_MIN; at && at->priority == level; at = mp_queue_next(&line.queue, at)) {
            int index = (int)(at - line.nodes), position = 0;
            uint64_t ahead = 0, said;
            MP_CHECK(line.queued[index] && mp_queue_holds(at) && line.place[index] > last);
            last = line.place[index];
            count++;
            counts[at->kind]++;
            cost += at->cost;
            for (int i = 0; i < NODES; i++)
                if (line.queued[i] && (line.nodes[i].priority < level || (line.nodes[i].priority == level &&
                                                                           line.nodes[i].since_ns < at->since_ns))) {
                    position++;
                    ahead += line.nodes[i].cost;
                }
            MP_CHECK_INT(mp_queue_position(&line.queue, at, &said), position);
            MP_CHECK(said == ahead);
            if (line.queued[other - line.nodes])
                MP_CHECK(mp_queue_precedes(&line.queue, at, other) ==
                         (level != other->priority ? level < other->priority : is_before(flow_of(at), flow_of(other))));
        }
    MP_CHECK(!at && count == line.queue.count && cost == line.queue.cost);
    for (int i = 0; i < MP_QUEUE_KINDS; i++)
        MP_CHECK_INT(line.queue.counts[i], counts[i]);
    MP_CHECK(mp_queue_best(&line.queue, now_ns) == best_at(now_ns));
}

MP_TEST(registry_tables_queue_follows_its_rules) {
    for (uint64_t seed = 0; seed < 12; seed++) {
        mp_error error;
        memset(&line, 0, sizeof(line));
        memset(fullness, 0, sizeof(fullness));
        state = seed + 300;
        const int capacity[MP_QUEUE_KINDS] = {30, 20};
        MP_CHECK_OK(mp_queue_create(&line.queue, capacity, &error), &error);
        uint64_t now = MP_QUEUE_AGEING_NS;
        for (int step = 0; step < 1500; step++) {
            now += 1 + below(seed % 2 ? 1000 : MP_QUEUE_AGEING_NS / 8);
            int at = (int)below(NODES);
            uint64_t before_ns = mp_sys_now_ns();
            mp_queue_node *node = &line.nodes[at], *best = mp_queue_best(&line.queue, now);
            if (!line.queued[at]) {
                int kind = (int)below(2);
                mp_queue_node_init(node, (int)below(seed % 3 ? 2 : MP_QUEUE_PRIORITIES), kind,
                                   (uint32_t)below(TENANTS), now);
                node->cost = below(10) ? below(100) : 0;
                if (below(10) == 0) {
                    mp_queue_push_front(&line.queue, node); /* never refused */
                    put_in_line(at, true);
                } else {
                    bool full = line.queue.counts[kind] >= capacity[kind];
                    MP_CHECK(mp_queue_full(&line.queue, kind) == full);
                    MP_CHECK_INT(mp_queue_push(&line.queue, node), full ? MP_QUEUE_FULL : MP_QUEUE_TAKEN);
                    if (!full)
                        put_in_line(at, false);
                }
            } else if (below(3) == 0) {
                mp_queue_remove(&line.queue, node);
                line.queued[at] = false;
                MP_CHECK(!mp_queue_holds(node));
            } else {
                mp_queue_node *taken = below(4) ? best : node; /* a worker may skip requests that it may not take */
                mp_queue_take(&line.queue, taken);
                take_in_turn((int)(taken - line.nodes));
                MP_CHECK(!mp_queue_holds(taken));
            }
            for (int i = 0; i < MP_QUEUE_KINDS; i++)
                check_fullness(i, capacity[i], before_ns);
            check_line(now);
        }
        for (int i = 0; i < NODES; i++)
            if (line.queued[i])
                mp_queue_remove(&line.queue, &line.nodes[i]);
        mp_queue_destroy(&line.queue);
    }
}
