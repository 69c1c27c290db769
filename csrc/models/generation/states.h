/* generation/states.h: memory of the states of an engine's sequences, and snapshots of them.
 *
 * A recurrent mixer, such as a short convolution, keeps a state of constant size of all earlier positions of a
 * sequence. The states of all mixers of a sequence lie side by side in one memory (mp_kv_layout.state_bytes). A mixer
 * adds rows to its state in one order, so the state after a row has the same bits whatever the passes were.
 *
 * A pass whose rows are all kept changes the state in place. A pass with draft rows leaves the state as it was, and
 * writes its rows to the log, which describes up to MP_STATE_LOG rows; the accepted ones are `pending`. The next pass
 * adds the pending rows to the state before it computes its own. So nothing remains of rejected rows.
 *
 * A snapshot is a copy of the state after the last position of a published block (generation/prefix_cache.h). Snapshots
 * take at most `percent` % of the budget's limit. The worth of a snapshot is the number of tokens before it since the
 * last snapshot of the same sequence: they would be computed again without it. The snapshot of least worth is evicted
 * first; the worth of all others then falls by as much, so unused snapshots are evicted in the end (GreedyDual, Young
 * 1994). One thread at a time. */
#ifndef MP_MODELS_GENERATION_STATES_H
#define MP_MODELS_GENERATION_STATES_H

#include "models/engine.h"
#include "models/generation/kv_arena.h"

enum { MP_STATE_LOG = 16 /* rows of a pass with drafts of one sequence */ };

typedef struct mp_state { /* the state of a sequence. Completions of one request share it until the next write */
    uint8_t *memory;
    uint8_t *log;        /* NULL until the first pass with drafts */
    uint32_t references; /* sequences */
    int pending;         /* accepted rows in the log, which are not in `memory` yet */
    bool logs;           /* the present pass writes its rows to the log */
    bool open;           /* the present pass has changed `memory`, and its rows are not yet published */
} mp_state;

typedef struct mp_snapshot {
    void *memory;
    uint32_t id;    /* its block */
    uint32_t gap;   /* tokens since the last snapshot before it */
    uint64_t worth; /* `evicted` of mp_states at its last use, plus gap */
} mp_snapshot;

typedef struct mp_states {
    mp_kv_arena states, logs;
    uint32_t percent;
    mp_snapshot *snapshots; /* [count] */
    uint32_t count, capacity;
    uint32_t *of_block; /* [blocks] index of the snapshot of a block + 1; 0: it has none */
    uint32_t blocks;
    uint64_t evicted; /* worth of the snapshot that was evicted last */
    mp_prefix_counters *counters; /* for statistics */
} mp_states;

/* bytes: of a state; 0: the model has no recurrent mixers. log_bytes: of a log. counters: outlive the states */
void mp_states_init(mp_states *states, size_t bytes, size_t log_bytes, mp_budget *budget, uint32_t percent,
                    mp_prefix_counters *counters);
void mp_states_deinit(mp_states *states); /* evicts all snapshots. All states must have been dropped */
static inline bool mp_states_exist(const mp_states *states) { return states->states.slot_bytes > 0; }
uint64_t mp_states_bytes(const mp_states *states); /* bytes charged to the budget */

/* Creates a zeroed state, or a copy of the memory `from`, with one reference. */
mp_status mp_state_create(mp_states *states, const void *from, mp_state **state, mp_error *error);
void mp_state_drop(mp_states *states, mp_state *state); /* drops a reference; the last drop frees the state */
mp_status mp_state_take_log(mp_states *states, mp_state *state, mp_error *error); /* unless the state has one */

void mp_states_trim(mp_states *states); /* frees the tables of snapshots. There must be none */

/* Keeps a copy of a state as the snapshot of a block, which has none, unless snapshots of more worth fill their share
 * or memory is exhausted. gap: tokens since the last snapshot before it */
void mp_snapshot_keep(mp_states *states, uint32_t id, uint32_t gap, const mp_state *state);
static inline bool mp_snapshot_exists(const mp_states *states, uint32_t id) {
    return id < states->blocks && states->of_block[id] > 0;
}
const void *mp_snapshot_use(mp_states *states, uint32_t id);  /* the memory of a snapshot, which exists */
size_t mp_snapshot_forget(mp_states *states, uint32_t id);    /* if it exists. Returns bytes given back to the budget */
/* Evicts the snapshot of least worth. Returns false if there is none. Adds the bytes given back to *bytes. */
bool mp_snapshot_evict(mp_states *states, uint64_t *bytes);

#endif
