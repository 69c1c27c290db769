/* Keys of a registry: length, order, and loads under a key that exists or whose workers died. */
#include <stdatomic.h>

#include "base/log.h"
#include "base/sys.h"
#include "mp_test.h"
#include "registry/maintenance.h"
#include "test_registry_fake.h"

/* --- keys --- */

typedef struct visited {
    int count;
    char keys[64][256];
} visited;

static void note_key(void *arg, const mp_entry_info *info) {
    visited *self = arg;
    MP_CHECK(self->count < 64);
    strcpy(self->keys[self->count++], info->key);
}

/* A key has 1 to 255 bytes. */
MP_TEST(registry_keys_have_a_length) {
    static const int lengths[] = {0, 1, 255, 256};
    fake fake;
    mp_error error;
    fake_init(&fake);
    mp_registry *registry = fake_registry(1, 0);
    for (int i = 0; i < 4; i++) {
        char key[257] = "";
        memset(key, 'k', (size_t)lengths[i]);
        mp_loader loader = fake_loader(&fake);
        const bool legal = i == 1 || i == 2;
        MP_CHECK_STATUS(mp_registry_add(registry, key, &loader, MP_ADD_NEW, &error),
                        legal ? MP_OK : MP_INVALID_ARGUMENT, &error);
        if (legal)
            MP_CHECK_INT(fake_finish(fake_submit(registry, key, fake_call_create(1), NULL)), MP_OK);
        else
            MP_CHECK_STR(error.message, i ? "`key` must have 1 to 255 bytes, got 256"
                                          : "`key` must have 1 to 255 bytes, got 0");
    }
    fake_end(registry);
}

/* Keys are visited in ascending order and found, in whatever order they came and while others are removed. */
MP_TEST(registry_keys_are_ordered) {
    enum { KEYS = 23 };
    fake fake;
    mp_error error;
    fake_init(&fake);
    mp_registry *registry = fake_registry(1, 0);
    char keys[KEYS][16];
    bool present[KEYS] = {0};
    for (int i = 0; i < KEYS; i++)
        snprintf(keys[i], sizeof keys[i], "k%02d", i);
    for (int i = 0; i < KEYS * 3 / 2; i++) { /* 7 and 23 have no common factor */
        int at = i * 7 % KEYS;
        if (present[at])
            MP_CHECK_OK(mp_registry_remove(registry, keys[at], 0, &error), &error);
        else
            fake_add(registry, keys[at], &fake, false);
        present[at] = !present[at];
        visited visited = {0};
        MP_CHECK_OK(mp_registry_visit(registry, note_key, &visited, &error), &error);
        int count = 0;
        for (int j = 0; j < KEYS; j++) {
            if (present[j]) {
                MP_CHECK(count < visited.count);
                MP_CHECK_STR(visited.keys[count++], keys[j]);
            }
            MP_CHECK_STATUS(mp_registry_keep_alive(registry, keys[j], FAKE_MS(1000), &error),
                            present[j] ? MP_OK : MP_UNKNOWN_MODEL, &error);
        }
        MP_CHECK_INT(visited.count, count);
    }
    mp_ticket *ticket;
    mp_submit_options options = {0};
    MP_CHECK_INT(mp_registry_submit(registry, "none", &fake_call_create(1)->base, &options, &ticket, NULL),
                 MP_UNKNOWN_MODEL);
    fake_end(registry);
}

/* --- loads --- */

/* A caller that asks for a model gets it although its workers died and their backoff has not ended. */
MP_TEST(registry_keys_load_ignores_the_backoff_of_deaths) {
    fake fake;
    mp_error error;
    fake_init(&fake);
    mp_registry *registry =
        fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 1, .breaker_threshold = -1});
    fake_add(registry, "a", &fake, false);
    fake_call *call = fake_call_create(1);
    call->fault = MP_INTERNAL;
    call->faults = 2;
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), MP_INTERNAL);
    fake_until_state(registry, "a", "cold");
    MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(5000), &error), &error);
    fake_end(registry);
}

/* A loader that is refused, because its key exists, is freed, and the model under the key stays. */
MP_TEST(registry_keys_exist_once) {
    fake fake, second;
    mp_error error;
    fake_init(&fake);
    fake_init(&second);
    mp_registry *registry = fake_registry(1, 0);
    fake_add(registry, "a", &fake, false);
    mp_loader loader = fake_loader(&second);
    MP_CHECK_STATUS(mp_registry_add(registry, "a", &loader, MP_ADD_NEW, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_STR(error.message,
                 "`key` must be new, got \"a\", which exists already; pass `replace` to load another model under it");
    MP_CHECK_INT(second.loaders, 0);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    MP_CHECK_INT(fake.loads, 1);
    fake_end(registry);
}
