/* sim_states.c: see sim_states.h. */
#include "sim_states.h"

#ifdef MP_SIM

#include <string.h>

#include "kernels/kernels.h"
#include "sim.h"

enum { SHARED = 200, WRONG = -1 };

const mp_kernels *mp_kernels_get(void) { sim_fail("the simulator has no kernels"); }

void sim_states_init(mp_prefix_cache *cache, mp_budget *budget) {
    const mp_kv_layout layout = {.parts = 1, .bytes = {256}, .state_bytes = 1024,
                                 .log_bytes = MP_STATE_LOG * sizeof(int32_t)};
    mp_prefix_init(cache, &layout, budget, 10);
    cache->states.percent = 50; /* up to five snapshots */
}

sim_sequence *sim_sequence_create(const mp_prefix_cache *cache, const mp_item *item, uint32_t own) {
    sim_sequence *seq = mp_alloc_zeroed(sizeof *seq, MP_TAG_REQUEST);
    mp_error error;
    if (!seq || mp_cached_init(&seq->cached, SIM_SEQUENCE, &error) != MP_OK) {
        mp_free(seq);
        return NULL;
    }
    for (int32_t i = 0; i < SIM_SEQUENCE; i++)
        seq->tokens[i] = i < SHARED ? i : (int32_t)(own % 3) * 1000 + i; /* three continuations */
    mp_cached_begin(&seq->cached, cache, mp_cache_scope_of(item, 0));
    return seq;
}

void sim_sequence_destroy(sim_sequence *seq) {
    if (seq)
        mp_cached_deinit(&seq->cached);
    mp_free(seq);
}

static uint64_t fold(uint64_t state, const int32_t *tokens, int count) {
    for (int i = 0; i < count; i++)
        state = state * 6364136223846793005u + (uint64_t)(uint32_t)tokens[i] + 1;
    return state;
}

static uint64_t memory_of(const mp_state *state) {
    uint64_t value;
    memcpy(&value, state->memory, sizeof value);
    return value;
}

static void check(const sim_sequence *seq) {
    const mp_state *state = seq->cached.state;
    SIM_CHECK(state || seq->cached.count == 0);
    if (state)
        SIM_CHECK(fold(memory_of(state), (const int32_t *)(const void *)state->log, state->pending) ==
                  fold(0, seq->tokens, seq->cached.count));
}

/* A pass over the next `rows` rows, and over `drafts` more of which `accepted` are right. */
static void pass(mp_prefix_cache *cache, sim_sequence *seq, int rows, int drafts, int accepted) {
    mp_state *state = seq->cached.state;
    const int32_t *next = seq->tokens + seq->cached.count;
    int32_t *log = (int32_t *)(void *)state->log;
    uint64_t value = fold(memory_of(state), log, state->pending);
    mp_cached_enter(&seq->cached, drafts);
    if (drafts == 0)
        value = fold(value, next, rows);
    for (int i = 0; drafts > 0 && i < rows + drafts; i++)
        log[i] = i < rows + accepted ? next[i] : WRONG;
    memcpy(state->memory, &value, sizeof value);
    mp_cached_publish(&seq->cached, cache, seq->tokens, rows, true);
    for (int i = 0; i < accepted; i++)
        mp_cached_publish(&seq->cached, cache, seq->tokens, 1, true);
    check(seq);
}

static int smaller(int a, int b) { return a < b ? a : b; }

/* Computes up to `end` rows, as an engine's step does. */
static bool compute_to(mp_prefix_cache *cache, sim_sequence *seq, int32_t end) {
    mp_cached *cached = &seq->cached;
    mp_error error;
    while (cached->count < end) {
        if (cached->count + 1 < end)
            mp_cached_reach(cached, cache, seq->tokens, end - 1);
        check(seq);
        cached->stop = (cached->count / MP_KV_BLOCK + 1) * MP_KV_BLOCK;
        const int most = smaller(end, cached->stop) - cached->count;
        int rows = 1 + (int)sim_below((uint64_t)most);
        int drafts = smaller(smaller(end, cached->stop) - cached->count - 2, MP_STATE_LOG - 1);
        if (sim_below(2) == 0 && drafts > 0)
            rows = 1;
        mp_cached_take(cached, cache, &rows, &error);
        if (rows == 0)
            return false;
        if (rows > 1 || drafts <= 0)
            drafts = 0;
        int all = rows + drafts;
        if (drafts > 0)
            mp_cached_take(cached, cache, &all, &error);
        if (all > rows && mp_cached_take_log(cached, cache, &error) != MP_OK)
            all = rows;
        pass(cache, seq, rows, all - rows, all > rows ? (int)sim_below((uint64_t)(all - rows + 1)) : 0);
    }
    return true;
}

bool sim_sequence_compute(mp_prefix_cache *cache, sim_sequence *seq, uint32_t units) {
    const int32_t end = smaller((int)smaller((int)units, SIM_SEQUENCE) * SIM_UNIT_ROWS, SIM_SEQUENCE - 20);
    if (!compute_to(cache, seq, end))
        return false;
    const mp_item item = {.tenant = seq->cached.chain.scope.tenant};
    sim_sequence *other = sim_below(4) || seq->cached.state->pending > 0 ? NULL : sim_sequence_create(cache, &item, 1);
    if (other) {
        memcpy(other->tokens, seq->tokens, (size_t)seq->cached.count * sizeof *seq->tokens);
        mp_cached_copy(&other->cached, &seq->cached, cache);
        check(other);
        compute_to(cache, other, end + (int32_t)sim_below(20));
        check(seq);
        mp_cached_drop(&other->cached, cache);
        sim_sequence_destroy(other);
    }
    return true;
}

#endif
