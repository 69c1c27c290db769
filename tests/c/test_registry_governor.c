/* The figures of the memory governor: what a call reserves, when it waits or fails, and how much memory it asks for. */
#include <stdlib.h>

#include "base/cpu.h"
#include "base/sys.h"
#include "mp_test.h"
#include "registry/governor.h"
#include "registry/upkeep.h"
#include "test_registry_scene.h"

static mp_governor *open_governor(uint64_t limit) {
    mp_governor *governor;
    mp_error error;
    MP_CHECK_OK(mp_governor_open(limit, &governor, &error), &error);
    return governor;
}

/* Returns the bytes that are neither used nor reserved, as the largest reservation that is granted. */
static uint64_t free_bytes(mp_governor *governor) {
    uint64_t low = 0, high = UINT64_MAX / 2;
    while (low < high) {
        mp_guard guard;
        uint64_t middle = low + (high - low + 1) / 2;
        bool granted = mp_governor_try_reserve(governor, middle, &guard);
        mp_guard_release(&guard);
        *(granted ? &low : &high) = middle - !granted;
    }
    return low;
}

static bool once(void *arg) { return ++*(int *)arg > 1; }

/* A call reserves `wanted` if that much is free, else `needed`; one byte more is refused. */
MP_TEST(registry_governor_reserves_what_is_free) {
    static const struct {
        uint64_t used, needed, wanted, granted; /* granted 0: refused */
    } rows[] = {{0, 600, 1000, 1000}, {0, 600, 1001, 600}, {0, 1000, 1000, 1000}, {0, 1001, 1001, 0},
                {300, 700, 700, 700}, {300, 701, 900, 0},  {300, 500, 700, 700},  {300, 500, 701, 500},
                {1000, 1, 1, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mp_governor *governor = open_governor(1000);
        mp_budget *budget = mp_governor_budget(governor);
        mp_guard guard;
        mp_error error;
        MP_CHECK(mp_budget_take(budget, rows[i].used));
        mp_status status = mp_governor_reserve(governor, "a", rows[i].needed, rows[i].wanted, false, NULL, NULL, &guard,
                                               &error);
        MP_CHECK_STATUS(status, rows[i].granted ? MP_OK : MP_MEMORY_EXHAUSTED, &error);
        MP_CHECK_INT(guard.bytes, rows[i].granted);
        MP_CHECK_INT(free_bytes(governor), 1000 - rows[i].used - rows[i].granted);
        mp_guard_release(&guard);
        MP_CHECK_INT(free_bytes(governor), 1000 - rows[i].used);
        mp_budget_give(budget, rows[i].used);
        mp_governor_close(governor);
    }
}

/* Guards: a part of a reservation, bytes that the load has charged itself, and the end. */
MP_TEST(registry_governor_guards_hold_their_bytes) {
    mp_governor *governor = open_governor(1000);
    mp_guard whole, part, more;
    mp_error error;
    MP_CHECK_OK(mp_governor_reserve(governor, "a", 700, 700, false, NULL, NULL, &whole, &error), &error);
    part = mp_guard_split(&whole, 200);
    MP_CHECK(whole.bytes == 500 && part.bytes == 200);
    more = mp_guard_split(&part, 300); /* no more than there is */
    MP_CHECK(part.bytes == 0 && more.bytes == 200);
    MP_CHECK_INT(free_bytes(governor), 300);
    mp_guard_give(&whole);
    MP_CHECK_INT(free_bytes(governor), 800);
    mp_guard_release(&more);
    MP_CHECK_INT(free_bytes(governor), 1000);
    /* two loads still run: a call for more than is free waits for them */
    MP_CHECK(mp_budget_take(mp_governor_budget(governor), 500));
    for (int left = 2; left >= 0; left--) {
        int asked = 0;
        MP_CHECK_STATUS(mp_governor_reserve(governor, "b", 501, 501, false, once, &asked, &more, &error),
                        left ? MP_CANCELLED : MP_MEMORY_EXHAUSTED, &error);
        MP_CHECK_INT(asked, left ? 2 : 0);
        mp_guard_release(left == 2 ? &whole : &part);
    }
    mp_budget_give(mp_governor_budget(governor), 500);
    mp_governor_close(governor);
}

static uint64_t end_the_load(void *arg, const void *asker) {
    (void)asker;
    mp_guard_release(arg);
    return 0;
}

/* A load that ends while the reclaimers are asked is not in their answer: its model may be one that can be evicted. */
MP_TEST(registry_governor_load_that_ends_during_the_question) {
    mp_governor *governor = open_governor(1000);
    mp_guard guard;
    mp_reclaimer reclaimer = {.later = end_the_load, .arg = &guard};
    mp_governor_add_reclaimer(governor, &reclaimer);
    MP_CHECK(mp_governor_try_reserve(governor, 10, &guard));
    MP_CHECK(mp_budget_take(mp_governor_budget(governor), 900));
    MP_CHECK(mp_governor_may_free(governor, 800));
    mp_guard_release(&guard);
    MP_CHECK(!mp_governor_may_free(governor, 800));
    mp_governor_remove_reclaimer(governor, &reclaimer);
    mp_budget_give(mp_governor_budget(governor), 900);
    mp_governor_close(governor);
}

/* The limit rises only for a model that is alone: at most an eighth of the limit is in use. */
MP_TEST(registry_governor_raises_the_limit_for_one_model) {
    if (getenv("MPOOL_MEMORY_MB"))
        MP_SKIP("MPOOL_MEMORY_MB sets the limit");
    for (int over = 0; over < 2; over++) {
        mp_governor *governor = open_governor(0);
        mp_budget *budget = mp_governor_budget(governor);
        uint64_t most, limit = mp_governor_limit_of(mp_cpu_memory_bytes(), &most), used = limit / 8 + (uint64_t)over;
        mp_guard guard;
        mp_error error;
        MP_CHECK(mp_budget_take(budget, used));
        MP_CHECK_STATUS(mp_governor_reserve(governor, "a", most - used, most - used, false, NULL, NULL, &guard, &error),
                        over ? MP_MEMORY_EXHAUSTED : MP_OK, &error);
        MP_CHECK_INT(atomic_load(&budget->limit), over ? limit : most);
        mp_guard_release(&guard);
        mp_budget_give(budget, used);
        mp_governor_close(governor);
    }
}

MP_TEST(registry_governor_pressure_has_three_boundaries) {
    mp_governor *governor = open_governor(1000 * 1000);
    mp_budget *budget = mp_governor_budget(governor);
    static const char *const names[] = {"low", "normal", "high", "critical"};
    static const uint64_t bounds[] = {500000, 700000, 850000};
    for (int i = 0; i < 3; i++)
        for (int at = 0; at < 2; at++) {
            uint64_t used = bounds[i] - !at;
            MP_CHECK(mp_budget_take(budget, used));
            MP_CHECK_STR(mp_pressure_name(mp_governor_pressure(governor)), names[i + at]);
            mp_budget_give(budget, used);
        }
    mp_governor_close(governor);
}

/* --- reclaimers --- */

typedef struct owner { /* a reclaimer with idle memory */
    mp_reclaimer base;
    uint64_t has, future; /* could free; could free once requests have ended */
    uint64_t asked, free; /* the last shortage */
    bool whole;
    int calls, questions;
} owner;

static uint64_t reclaim(void *arg, const mp_shortage *shortage, bool whole) {
    owner *self = arg;
    self->calls++;
    self->asked = shortage->bytes;
    self->free = shortage->free;
    self->whole = whole;
    if (whole && self->has < shortage->bytes)
        return 0;
    return self->has < shortage->bytes ? self->has : shortage->bytes;
}

static uint64_t possible(void *arg, const void *asker) {
    (void)asker;
    owner *self = arg;
    self->questions++;
    return self->has;
}

static uint64_t later(void *arg, const void *asker) { (void)asker; return ((owner *)arg)->future; }

/* The owner that is added last is asked first. */
static mp_governor *open_with(uint64_t limit, owner owners[2], uint64_t has_first, uint64_t has_second) {
    mp_governor *governor = open_governor(limit);
    for (int i = 0; i < 2; i++)
        owners[i] = (owner){.has = i ? has_second : has_first,
                            .base = {.reclaim = reclaim, .possible = possible, .later = later, .arg = &owners[i]}};
    mp_governor_add_reclaimer(governor, &owners[1].base);
    mp_governor_add_reclaimer(governor, &owners[0].base);
    return governor;
}

static void close_with(mp_governor *governor, owner owners[2]) {
    for (int i = 0; i < 2; i++)
        mp_governor_remove_reclaimer(governor, &owners[i].base);
    mp_governor_close(governor);
}

/* A load above the limit evicts the models of others, or waits for them, until the limit may be raised: until at most
 * an eighth is in use, and what the machine offers is enough for both. */
MP_TEST(registry_governor_evicts_before_it_raises_the_limit) {
    if (getenv("MPOOL_MEMORY_MB"))
        MP_SKIP("MPOOL_MEMORY_MB sets the limit");
    uint64_t most, limit = mp_governor_limit_of(mp_cpu_memory_bytes(), &most), used = limit / 2;
    const uint64_t needs[] = {limit + 1, most - limit / 8, most - limit / 16, most};
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) {
        uint64_t left = most - needs[i] < limit / 8 ? most - needs[i] : limit / 8, lacking = used - left;
        for (int idle = 0; idle < 2; idle++)
            for (int under = 0; under < 2; under++) {
                owner owners[2];
                mp_governor *governor = open_with(0, owners, 0, 0);
                mp_budget *budget = mp_governor_budget(governor);
                mp_guard guard;
                mp_error error;
                int asked = 0;
                *(idle ? &owners[0].has : &owners[0].future) = lacking - (uint64_t)under;
                MP_CHECK(mp_budget_take(budget, used));
                MP_CHECK_STATUS(mp_governor_reserve(governor, "a", needs[i], needs[i], false, once, &asked, &guard,
                                                    &error),
                                under ? MP_MEMORY_EXHAUSTED : MP_CANCELLED, &error);
                MP_CHECK_INT(owners[0].asked, lacking);
                MP_CHECK_INT(atomic_load(&budget->limit), limit);
                mp_budget_give(budget, lacking);
                MP_CHECK_OK(mp_governor_reserve(governor, "a", needs[i], needs[i], false, NULL, NULL, &guard, &error),
                            &error);
                MP_CHECK_INT(atomic_load(&budget->limit), left + needs[i]);
                mp_guard_release(&guard);
                mp_budget_give(budget, left);
                close_with(governor, owners);
            }
    }
}

/* A load that lacks memory asks for exactly what it lacks, and says how much is free. */
MP_TEST(registry_governor_asks_for_what_is_lacking) {
    owner owners[2];
    mp_governor *governor = open_with(1000, owners, 5000, 0);
    mp_guard held, guard;
    mp_error error;
    int asked = 0;
    MP_CHECK(mp_budget_take(mp_governor_budget(governor), 300));
    MP_CHECK(mp_governor_try_reserve(governor, 200, &held));
    MP_CHECK_STATUS(mp_governor_reserve(governor, "a", 650, 900, false, once, &asked, &guard, &error), MP_CANCELLED,
                    &error);
    MP_CHECK_INT(owners[0].asked, 150);
    MP_CHECK_INT(owners[0].free, 500);
    MP_CHECK(owners[0].whole && !owners[1].calls);
    mp_guard_release(&held);
    mp_budget_give(mp_governor_budget(governor), 300);
    close_with(governor, owners);
}

/* A call waits only if the free bytes and those that models in use will free are enough. */
MP_TEST(registry_governor_waits_only_if_enough_may_become_free) {
    owner owners[2];
    mp_governor *governor = open_with(1000, owners, 0, 0);
    mp_budget *budget = mp_governor_budget(governor);
    MP_CHECK(mp_budget_take(budget, 400));
    static const struct {
        uint64_t first, second, bytes;
        bool may;
    } rows[] = {{0, 0, 600, true},      {0, 0, 601, false},     {100, 100, 800, true},
                {100, 100, 801, false}, {400, 0, 1000, true},   {500, 500, 1001, false}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        owners[0].future = rows[i].first;
        owners[1].future = rows[i].second;
        if (mp_governor_may_free(governor, rows[i].bytes) != rows[i].may)
            MP_FAIL("row %zu", i);
    }
    mp_budget_give(budget, 400);
    close_with(governor, owners);
}

/* --- the size of an eviction --- */

/* While memory is critical, maintenance evicts models of a tenth of the limit at a time, and no further ones once the
 * pressure is lower. */
MP_TEST_SECONDS(registry_governor_evicts_a_tenth, 60) {
    enum { MODELS = 22, BYTES = 40000, LIMIT = 1000 * 1000 };
    static fake fakes[MODELS];
    char key[3] = "a";
    mp_registry *registry = fake_registry_of((mp_registry_config){
        .threads = 1, .max_workers = 1, .memory_limit = LIMIT, .maintenance_every_ns = FAKE_MS(1000)});
    for (int i = 0; i < MODELS; i++) { /* 880,000 bytes and the engines: critical with the last one */
        key[0] = (char)('a' + i);
        fake_init(&fakes[i]);
        fakes[i].model_bytes = BYTES;
        fake_add(registry, key, &fakes[i], false);
        MP_CHECK_INT(fake_finish(fake_submit(registry, key, fake_call_create(1), NULL)), MP_OK);
    }
    mp_registry_stats stats;
    for (uint64_t end = fake_in_ms(20000); mp_sys_now_ns() < end; mp_sys_sleep_ns(FAKE_MS(1))) {
        stats = fake_stats(registry);
        if (strcmp(stats.pressure, "critical") != 0 && stats.evictions)
            break;
    }
    mp_sys_sleep_ns(FAKE_MS(1500)); /* the next check evicts no more */
    int models = 0;
    for (int i = 0; i < MODELS; i++)
        models += atomic_load(&fakes[i].models);
    MP_CHECK_INT(models, MODELS - 3); /* two models of 40,100 bytes are less than 100,000 bytes, three are enough */
    fake_end(registry);
}

/* One call evicts no more models than it lacked bytes, even if others take all that becomes free. */
MP_TEST(registry_governor_evicts_no_more_than_was_lacking) {
    enum { MODELS = 6 };
    static scene scenes[MODELS]; /* models of 1,000 bytes, without workers */
    mp_entry *entries[MODELS];
    int models = 0;
    for (int i = 0; i < MODELS; i++) {
        scene_open(&scenes[i], "a", i ? scenes[0].services : NULL, 1000 * 1000);
        scene_load(&scenes[i]);
        entries[i] = scenes[i].entry;
    }
    mp_shortage shortage = {scenes[0].services->governor, 2000, UINT64_MAX, NULL};
    mp_upkeep_reclaim(entries, MODELS, &shortage, false);
    for (int i = 0; i < MODELS; i++)
        models += scenes[i].fake.models;
    MP_CHECK_INT(models, MODELS - 2);
    for (int i = MODELS - 1; i >= 0; i--)
        scene_close(&scenes[i]);
}

static int count_freeing(fake *fakes, int count) {
    int freeing = 0;
    for (int i = 1; i < count; i++)
        freeing += atomic_load(&fakes[i].in_destroy) > 0;
    return freeing;
}

/* A worker whose engine refuses a request for lack of memory asks other models for a sixteenth of the limit. */
MP_TEST(registry_governor_frees_a_sixteenth_for_a_request) {
    enum { MODELS = 6, LIMIT = 160000 };
    static fake fakes[MODELS];
    char key[2] = "a";
    mp_registry *registry = fake_registry(1, LIMIT);
    for (int i = 0; i < MODELS; i++) {
        key[0] = (char)('a' + i);
        fake_init(&fakes[i]);
        fakes[i].model_bytes = 4000;
        fake_add(registry, key, &fakes[i], false);
        MP_CHECK_INT(fake_finish(fake_submit(registry, key, fake_call_create(1), NULL)), MP_OK);
        fake_until_state(registry, key, "ready");
        atomic_store(&fakes[i].destroy_hold, i > 0); /* memory that is being freed counts: no second call evicts more */
    }
    fake_call *call = fake_call_create(1);
    call->memory = 2;
    atomic_store(&fakes[0].memory, 1);
    mp_ticket *ticket = fake_submit(registry, "a", call, NULL);
    int evicted = 0;
    uint64_t end = fake_in_ms(10000);
    while (evicted < 3 && mp_sys_now_ns() < end) {
        MP_CHECK(!mp_ticket_wait(ticket, UINT64_MAX, fake_in_ms(1), NULL));
        evicted = count_freeing(fakes, MODELS);
    }
    MP_CHECK(!mp_ticket_wait(ticket, UINT64_MAX, fake_in_ms(300), NULL));
    evicted = count_freeing(fakes, MODELS);
    MP_CHECK_INT(evicted, 3); /* two models of 4,100 bytes are less than 10,000 bytes, three are enough */
    atomic_store(&fakes[0].memory, 2);
    for (int i = 1; i < MODELS; i++)
        atomic_store(&fakes[i].destroy_hold, false);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    fake_end(registry);
}
