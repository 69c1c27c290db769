/* dedup.h: equal inputs get one vector. A step computes equal texts or images once; vectors of recent steps are kept
 * for 0.1 s in one table per model, which all its workers share. By the numeric contract, a shared vector has the bits
 * that a separate computation would give.
 *
 * Inputs are equal if their scopes (tenant and adapter), options and contents are. Contents are the token ids of a
 * text, or the prepared pixels of an image: a request has them whatever its source is (file, array, URL), and no option
 * of the preparation has to be compared. Only pooled vectors are shared. */
#ifndef MP_MODELS_DEDUP_H
#define MP_MODELS_DEDUP_H

#include "base/forked.h"
#include "base/sys.h"
#include "models/cache_key.h"

enum {
    MP_DEDUP_SHARED = 32,         /* maximum inputs that share one computation, to limit the number of inputs that one
                                   * fault affects */
    MP_DEDUP_KEEP_NS = 100000000, /* lifetime of a recent vector */
    MP_DEDUP_RECENT = 256,        /* maximum recent vectors */
    MP_DEDUP_BYTES = 1 << 20,     /* maximum bytes of all recent vectors with their contents */
    MP_DEDUP_OPTIONS = 5
};

typedef struct mp_dedup_input {
    mp_cache_key key;
    int32_t options[MP_DEDUP_OPTIONS]; /* everything else that changes the vector */
    int32_t dimensions;                /* components of `out` */
    const void *content;
    size_t bytes;                      /* length of `content` */
    float *out;                        /* the vector */
} mp_dedup_input;

/* Returns true if all but the contents are equal, which makes equal contents very likely. */
bool mp_dedup_alike(const mp_dedup_input *a, const mp_dedup_input *b);

/* ---- the inputs of a step: one table per engine ------------------------------------------------------------------ */

typedef struct mp_dedup_slot {
    int input;  /* index of the computed input, plus 1; 0: empty */
    int served; /* number of inputs that share its result, this input included */
} mp_dedup_slot;

typedef struct mp_dedup_table {
    mp_dedup_slot *slots; /* [slot_count], a power of two */
    uint32_t slot_count;
    uint64_t shared; /* total inputs that got the vector of another input of their step; for tests */
} mp_dedup_table;

/* Clear the table for a step of up to `count` inputs. `table` must be zeroed before the first step. `name` names it in
 * an error. */
mp_status mp_dedup_table_begin(mp_dedup_table *table, int count, const char *name, mp_error *error);
/* Return the index of an earlier input of this step that equals inputs[index] and whose vector fewer than
 * MP_DEDUP_SHARED inputs share. Returns -1 if there is none: inputs[index] must be computed, and later inputs may share
 * its vector. */
int mp_dedup_table_find(mp_dedup_table *table, const mp_dedup_input *inputs, int index);
void mp_dedup_table_deinit(mp_dedup_table *table);

/* ---- recent vectors: one table per model ------------------------------------------------------------------------- */

typedef struct mp_recent_entry {
    mp_dedup_input input; /* content and out point into the store */
    uint64_t at_ns;
    size_t at; /* place in the store */
} mp_recent_entry;

/* All functions are thread-safe. `lock` is a leaf, held for one copy. Without memory, nothing is kept. In the child of
 * a fork, the table is empty. */
typedef struct mp_recent {
    uint64_t secret[2];
    mp_budget *budget; /* NULL: not initialised */
    mp_forked forked;
    uint64_t keep_ns;  /* MP_DEDUP_KEEP_NS, unless a test changes it */
    size_t most_bytes; /* MP_DEDUP_BYTES, unless a test changes it while nothing is kept */
    _Atomic uint64_t charged, hits; /* hits: total inputs that got a recent vector; for tests */
    mp_mutex lock;
    /* guarded by: lock */
    mp_recent_entry *entries; /* [MP_DEDUP_RECENT] ring buffer; NULL until the first vector is kept */
    uint8_t *store;           /* [most_bytes] ring buffer of contents and vectors */
    uint32_t next, count;     /* next: entry written next; count: entries, the newest before next */
    size_t end;               /* end of the newest entry in the store */
} mp_recent;

/* `recent` must not move afterwards. Allocates nothing. */
mp_status mp_recent_init(mp_recent *recent, mp_budget *budget, mp_error *error);
void mp_recent_deinit(mp_recent *recent); /* zeroed = legal */
/* Return the key of an input of this model. */
mp_cache_key mp_recent_key(const mp_recent *recent, mp_cache_scope scope, const void *content, size_t bytes);
/* If there is a recent vector of an equal input, copy it to input->out and return true. */
bool mp_recent_find(mp_recent *recent, const mp_dedup_input *input, uint64_t now_ns);
/* Keep a finite vector that was computed at now_ns. The oldest vectors make room. */
void mp_recent_keep(mp_recent *recent, const mp_dedup_input *input, uint64_t now_ns);
/* Forget all recent vectors. Returns the bytes given back to the budget. */
uint64_t mp_recent_trim(mp_recent *recent);

#endif
