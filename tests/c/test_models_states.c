/* States of recurrent mixers: new ones are zero; snapshots of least worth leave first. */
#include "mp_test.h"
#include "models/generation/states.h"

/* A share of three snapshots: the one that saves fewest tokens leaves first, and use keeps a snapshot. */
MP_TEST(models_states_of_least_worth_leave_first) {
    enum { BYTES = 4096, SHARE = 3 };
    mp_budget budget = {.limit = 10 * SHARE * BYTES + BYTES};
    mp_error error;
    mp_states states;
    mp_state *state;
    uint64_t given = 0;
    mp_prefix_counters counters = {0};
    mp_states_init(&states, BYTES, BYTES, &budget, 10, &counters);
    MP_CHECK_OK(mp_state_create(&states, NULL, &state, &error), &error);
    const uint32_t gaps[] = {256, 2048, 64, 512};
    for (uint32_t id = 0; id < 4; id++) { /* the fourth replaces the third */
        state->memory[0] = (uint8_t)(10 + id);
        mp_snapshot_keep(&states, id, gaps[id], state);
    }
    MP_CHECK(mp_snapshot_exists(&states, 0) && mp_snapshot_exists(&states, 1) && mp_snapshot_exists(&states, 3));
    MP_CHECK(!mp_snapshot_exists(&states, 2) && !mp_snapshot_exists(&states, 4));
    mp_state_use use = mp_prefix_state_use(&counters);
    MP_CHECK(use.state_bytes == BYTES && use.snapshot_bytes == SHARE * BYTES && use.snapshots == SHARE);
    MP_CHECK_OK(mp_state_take_log(&states, state, &error), &error);
    MP_CHECK_INT(mp_prefix_state_use(&counters).state_bytes, 2 * BYTES);
    MP_CHECK_INT(*(const uint8_t *)mp_snapshot_use(&states, 0), 10); /* its worth is now that of a new one: 64 + 256 */
    mp_snapshot_keep(&states, 9, 128, state);                         /* 64 + 128: less than all others */
    MP_CHECK(!mp_snapshot_exists(&states, 9));
    MP_CHECK(mp_snapshot_evict(&states, &given) && !mp_snapshot_exists(&states, 0));
    mp_snapshot_keep(&states, 9, 128, state); /* there is room, and the others have lost 320 of their lead */
    MP_CHECK(mp_snapshot_exists(&states, 9));
    MP_CHECK(mp_snapshot_evict(&states, &given) && !mp_snapshot_exists(&states, 9));
    MP_CHECK(mp_snapshot_evict(&states, &given) && !mp_snapshot_exists(&states, 3));
    MP_CHECK_INT(mp_snapshot_forget(&states, 1), BYTES);
    MP_CHECK(!mp_snapshot_evict(&states, &given));
    MP_CHECK_INT(given, 3 * BYTES);
    mp_state_drop(&states, state);
    use = mp_prefix_state_use(&counters);
    MP_CHECK(use.state_bytes == 0 && use.snapshot_bytes == 0 && use.snapshots == 0);
    mp_states_deinit(&states);
    MP_CHECK_INT(budget.used, 0);
}

/* A new state is zero, also in memory that held another one; a copy is that of its source. */
MP_TEST(models_states_begin_with_zeroes) {
    enum { BYTES = 256 };
    mp_budget budget = {.limit = UINT64_MAX};
    mp_prefix_counters counters = {0};
    mp_error error;
    mp_states states;
    mp_state *state, *copy;
    mp_states_init(&states, BYTES, BYTES, &budget, 10, &counters);
    for (int i = 0; i < 3; i++) {
        MP_CHECK_OK(mp_state_create(&states, NULL, &state, &error), &error);
        for (int b = 0; b < BYTES; b++)
            MP_CHECK_INT(state->memory[b], 0);
        memset(state->memory, 0xFF, BYTES);
        MP_CHECK_OK(mp_state_create(&states, state->memory, &copy, &error), &error);
        MP_CHECK(copy->memory != state->memory && memcmp(copy->memory, state->memory, BYTES) == 0);
        mp_state_drop(&states, state);
        mp_state_drop(&states, copy);
    }
    mp_states_deinit(&states);
    MP_CHECK_INT(budget.used, 0);
}
