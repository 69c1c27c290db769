/* upkeep.c: which workers are told to trim, which models are evicted, and when the next check is due. */
#include "base/sys.h"
#include "registry/upkeep.h"
#include "test_registry_scene.h"

enum { MAX = 3, HELD = 100000, MODEL = 1000 };

typedef struct several { /* entries of one registry; entry 0 is idle for longest */
    scene scenes[MAX];
    mp_entry *entries[MAX];
    int count;
} several;

/* Opens entries that each have a model and an idle worker that holds HELD bytes. */
static void open_several(several *all, int count) {
    static const char *const keys[] = {"a", "b", "c"};
    all->count = count;
    uint64_t now = mp_sys_now_ns();
    for (int i = 0; i < count; i++) {
        scene *scene = &all->scenes[i];
        scene_open(scene, keys[i], i ? all->scenes[0].services : NULL, 1000 * 1000);
        all->entries[i] = scene->entry;
        scene_load(scene);
        mp_worker *worker = scene_worker(scene, MP_WORKER_IDLE);
        worker->held_bytes = HELD;
        worker->idle_since_ns = now - FAKE_MS(1000) * (uint64_t)(count - i);
    }
}

static void close_several(several *all) {
    for (int i = all->count - 1; i >= 0; i--)
        scene_close(&all->scenes[i]);
}

static bool told(const several *all, int i) { return all->entries[i]->workers[0]->memory == MP_MEMORY_ASKED; }

static mp_shortage shortage_of(several *all, uint64_t bytes) { /* all free memory is too little by `bytes` */
    mp_budget *budget = mp_governor_budget(all->scenes[0].services->governor);
    return (mp_shortage){all->scenes[0].services->governor, bytes,
                         atomic_load(&budget->limit) - atomic_load(&budget->used), NULL};
}

/* Only idle workers that hold caches and were not told before are told to trim, and only their bytes count. */
MP_TEST(registry_upkeep_tells_each_worker_once) {
    static const struct {
        mp_worker_state state;
        mp_worker_memory before;
        bool leave, expected;
    } rows[] = {
        {MP_WORKER_IDLE, .expected = true},
        {MP_WORKER_READY, .expected = true},
        {MP_WORKER_PROCESSING, .expected = true}, /* its requests have ended */
        {MP_WORKER_IDLE, .before = MP_MEMORY_ASKED},
        {MP_WORKER_IDLE, .before = MP_MEMORY_TRIMMED},
        {MP_WORKER_IDLE, .before = MP_MEMORY_TIGHT},
        {MP_WORKER_IDLE, .leave = true},
        {.state = MP_WORKER_LOADING},
        {MP_WORKER_PROCESSING, .before = MP_MEMORY_TRIMMED},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        scene scene;
        scene_open(&scene, "a", NULL, 1000 * 1000);
        mp_worker *other = scene_worker(&scene, MP_WORKER_IDLE), *worker = scene_worker(&scene, rows[i].state);
        other->held_bytes = 1000;
        worker->held_bytes = 30;
        worker->memory = rows[i].before;
        worker->leave = rows[i].leave;
        MP_CHECK_INT(mp_entry_trim(scene.entry), rows[i].expected ? 1030 : 1000);
        MP_CHECK_INT(worker->woken, rows[i].expected);
        MP_CHECK_INT(worker->memory, rows[i].expected ? MP_MEMORY_ASKED : rows[i].before);
        MP_CHECK(other->memory == MP_MEMORY_ASKED && other->woken);
        other->woken = worker->woken = false;
        MP_CHECK_INT(mp_entry_trim(scene.entry), 0); /* both were told to trim */
        MP_CHECK(!other->woken && !worker->woken);
        scene_activate(other, scene_ticket(&scene, 1, (mp_submit_options){0}), MP_TICKET_ADMITTED);
        other->memory = MP_MEMORY_AMPLE;
        MP_CHECK_INT(mp_entry_trim(scene.entry), 0); /* the worker has a request */
        MP_CHECK_INT(other->memory, MP_MEMORY_AMPLE);
        scene_close(&scene);
    }
}

/* An eviction of a model that is no longer idle does nothing, and says so. */
MP_TEST(registry_upkeep_evicts_idle_models_only) {
    several all;
    open_several(&all, 2);
    mp_worker *busy = all.entries[0]->workers[0], *idle = all.entries[1]->workers[0];
    busy->state = MP_WORKER_PROCESSING;
    MP_CHECK(!mp_entry_evict_idle(all.entries[0]));
    MP_CHECK(all.entries[0]->unload == MP_UNLOAD_NONE && !busy->woken);
    MP_CHECK(mp_entry_evict_idle(all.entries[1]));
    MP_CHECK(all.entries[1]->unload == MP_UNLOAD_REQUESTED && idle->woken);
    MP_CHECK(!mp_entry_evict_idle(all.entries[1])); /* it has begun */
    close_several(&all);
}

/* A shortage that caches can cover trims the coldest workers, and no more of them than needed. Bytes of workers that
 * were told to trim earlier count towards the shortage. */
MP_TEST(registry_upkeep_trims_what_is_lacking) {
    static const struct {
        uint64_t bytes;
        bool before[MAX], after[MAX]; /* which workers have been told */
        uint64_t coming;
    } rows[] = {
        {1, {0}, {1, 0, 0}, HELD},
        {HELD, {0}, {1, 0, 0}, HELD},
        {HELD + 1, {0}, {1, 1, 0}, 2 * HELD},
        {3 * HELD, {0}, {1, 1, 1}, 3 * HELD},
        {HELD, {0, 0, 1}, {0, 0, 1}, HELD},
        {HELD, {1, 0, 0}, {1, 0, 0}, HELD},
        {HELD + 1, {0, 0, 1}, {1, 0, 1}, 2 * HELD},
        {2 * HELD, {0, 1, 0}, {1, 1, 0}, 2 * HELD},
        {2 * HELD + 1, {0, 1, 0}, {1, 1, 1}, 3 * HELD},
    };
    for (size_t row = 0; row < sizeof rows / sizeof *rows; row++) {
        several all;
        open_several(&all, MAX);
        for (int i = 0; i < MAX; i++)
            all.entries[i]->workers[0]->memory = rows[row].before[i] ? MP_MEMORY_ASKED : MP_MEMORY_AMPLE;
        mp_shortage shortage = shortage_of(&all, rows[row].bytes);
        uint64_t coming = mp_upkeep_reclaim(all.entries, MAX, &shortage, true);
        for (int i = 0; i < MAX; i++) {
            if (told(&all, i) != rows[row].after[i])
                MP_FAIL("row %zu: worker %d was %s to trim", row, i, told(&all, i) ? "told" : "not told");
            MP_CHECK_INT(all.entries[i]->workers[0]->woken, rows[row].after[i] && !rows[row].before[i]);
            MP_CHECK_INT(all.entries[i]->unload, MP_UNLOAD_NONE);
        }
        MP_CHECK_INT(coming, rows[row].coming);
        close_several(&all);
    }
}

/* A shortage that caches cannot cover evicts models, until the caches of the others cover the rest. */
MP_TEST(registry_upkeep_evicts_what_is_lacking) {
    enum { EACH = MODEL + HELD + 1 };
    static const struct {
        uint64_t bytes;
        int evicted;
        bool whole;
        uint64_t coming;
    } rows[] = {{3 * HELD + 1, 1, true, EACH + 2 * HELD},
                {3 * EACH, 3, true, 3 * EACH},
                {3 * EACH + 1, 0, true, 0},
                {3 * EACH + 1, 0, false, 3 * HELD}}; /* caches first */
    for (size_t row = 0; row < sizeof rows / sizeof *rows; row++) {
        several all;
        open_several(&all, MAX);
        mp_shortage shortage = shortage_of(&all, rows[row].bytes);
        MP_CHECK_INT(mp_upkeep_reclaim(all.entries, MAX, &shortage, rows[row].whole), rows[row].coming);
        int evicted = 0;
        for (int i = 0; i < MAX; i++)
            evicted += all.entries[i]->unload == MP_UNLOAD_REQUESTED;
        MP_CHECK_INT(evicted, rows[row].evicted);
        close_several(&all);
    }
    mp_shortage none = {0};
    several all;
    open_several(&all, 1);
    none = shortage_of(&all, 0);
    MP_CHECK_INT(mp_upkeep_reclaim(all.entries, 1, &none, true), 0);
    MP_CHECK_INT(mp_upkeep_reclaim(all.entries, 0, &none, true), 0);
    close_several(&all);
}

/* A model that covers the shortage alone is evicted before a colder one that does not. If two cover it, the colder one
 * is. */
MP_TEST(registry_upkeep_prefers_models_that_suffice) {
    enum { SMALL = MODEL + HELD + 1 };
    for (int more = 0; more < 2; more++)
        for (int turned = 0; turned < 2; turned++) {
            several all;
            open_several(&all, 2);
            all.entries[1]->workers[0]->held_bytes = 2 * HELD; /* the larger model, which was used last */
            for (int i = 0; i < 2; i++)
                all.entries[i]->workers[0]->memory = MP_MEMORY_TRIMMED;
            mp_shortage shortage = shortage_of(&all, SMALL + (uint64_t)more);
            mp_entry *entries[] = {all.entries[turned], all.entries[!turned]};
            MP_CHECK_INT(mp_upkeep_reclaim(entries, 2, &shortage, false), more ? SMALL + HELD : SMALL);
            MP_CHECK_INT(all.entries[0]->unload, more ? MP_UNLOAD_NONE : MP_UNLOAD_REQUESTED);
            MP_CHECK_INT(all.entries[1]->unload, more ? MP_UNLOAD_REQUESTED : MP_UNLOAD_NONE);
            close_several(&all);
        }
}

typedef struct asked {
    int calls;
    uint64_t bytes;
    bool whole;
} asked;

static uint64_t note_call(void *arg, const mp_shortage *shortage, bool whole) {
    asked *self = arg;
    self->calls++;
    self->bytes = shortage->bytes;
    self->whole = whole;
    return 0;
}

static uint64_t no_bytes(void *arg, const void *asker) {
    (void)asker;
    (void)arg;
    return 0;
}

/* While memory is critical, a check of several models in use asks for a tenth of the limit, and a check of a single one
 * trims its caches: the model stays. */
MP_TEST(registry_upkeep_of_critical_memory) {
    for (int in_use = 0; in_use <= MAX; in_use++)
        for (int critical = 0; critical < 2; critical++) {
            several all;
            asked asked = {0};
            open_several(&all, MAX);
            mp_governor *governor = all.scenes[0].services->governor;
            mp_budget *budget = mp_governor_budget(governor);
            mp_reclaimer reclaimer = {.reclaim = note_call, .possible = no_bytes, .later = no_bytes, .arg = &asked};
            mp_governor_add_reclaimer(governor, &reclaimer);
            uint64_t more = 900 * 1000 - atomic_load(&budget->used);
            if (critical)
                MP_CHECK(mp_budget_take(budget, more));
            for (int i = 0; i < MAX; i++) {
                all.entries[i]->keep_alive_ns = MP_FOREVER;
                if (i >= in_use)
                    all.entries[i]->worker_count = 0;
            }
            mp_upkeep upkeep;
            mp_upkeep_init(&upkeep, 1);
            mp_upkeep_sweep(&upkeep, all.scenes[0].services, all.entries, MAX, mp_sys_now_ns() + 10);
            MP_CHECK_INT(asked.calls, critical && in_use > 1);
            if (asked.calls) {
                MP_CHECK_INT(asked.bytes, 100 * 1000);
                MP_CHECK(!asked.whole);
            }
            for (int i = 0; i < in_use; i++)
                MP_CHECK_INT(told(&all, i), critical && in_use == 1);
            mp_governor_remove_reclaimer(governor, &reclaimer);
            if (critical)
                mp_budget_give(budget, more);
            for (int i = 0; i < MAX; i++)
                all.entries[i]->worker_count = 1;
            close_several(&all);
        }
}

/* The memory is checked every `every_ns` while a worker exists, and every second while memory is critical. */
MP_TEST(registry_upkeep_next_check) {
    const uint64_t SECOND = FAKE_MS(1000);
    scene scene;
    mp_upkeep upkeep;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    mp_budget *budget = mp_governor_budget(scene.services->governor);
    mp_upkeep_init(&upkeep, 60 * SECOND);
    uint64_t begin = upkeep.tick_ns;
    MP_CHECK(mp_upkeep_sweep(&upkeep, scene.services, &scene.entry, 1, begin + SECOND) == UINT64_MAX);
    atomic_store(&scene.services->active_workers, 1);
    MP_CHECK_INT(mp_upkeep_sweep(&upkeep, scene.services, &scene.entry, 1, begin + SECOND) - begin, 60 * SECOND);
    MP_CHECK_INT(mp_upkeep_sweep(&upkeep, scene.services, &scene.entry, 1, begin + 60 * SECOND - 1) - begin,
                 60 * SECOND);
    MP_CHECK_INT(mp_upkeep_sweep(&upkeep, scene.services, &scene.entry, 1, begin + 60 * SECOND) - begin, 120 * SECOND);
    MP_CHECK(mp_budget_take(budget, 900 * 1000));
    MP_CHECK_INT(mp_upkeep_sweep(&upkeep, scene.services, &scene.entry, 1, begin + 60 * SECOND) - begin, 61 * SECOND);
    MP_CHECK_INT(mp_upkeep_sweep(&upkeep, scene.services, &scene.entry, 1, begin + 61 * SECOND) - begin, 62 * SECOND);
    MP_CHECK_INT(upkeep.logged_ns - begin, 61 * SECOND);
    mp_budget_give(budget, 900 * 1000);
    MP_CHECK_INT(mp_upkeep_sweep(&upkeep, scene.services, &scene.entry, 1, begin + 62 * SECOND) - begin, 121 * SECOND);
    /* a check of an entry that is due earlier comes first */
    mp_worker *worker = scene_ready(&scene);
    scene.entry->keep_alive_ns = FAKE_MS(10);
    worker->idle_since_ns = begin + 62 * SECOND;
    MP_CHECK_INT(mp_upkeep_sweep(&upkeep, scene.services, &scene.entry, 1, begin + 62 * SECOND) - begin,
                 62 * SECOND + FAKE_MS(10));
    scene_close(&scene);
}
