/* dedup.h: the limits of sharing vectors between identical inputs, and the table that finds the identical inputs of a
 * step. encoder/dedup.h and image/dedup.h say which texts and images are identical and keep the recent results. */
#ifndef MP_MODELS_DEDUP_H
#define MP_MODELS_DEDUP_H

#include <stdbool.h>
#include <stdint.h>

#include "base/alloc.h"

enum {
    MP_DEDUP_SHARED = 32,         /* maximum inputs that share one computation, to limit the number of inputs that one
                                   * fault affects */
    MP_DEDUP_KEEP_NS = 100000000, /* lifetime of a recent result */
    MP_DEDUP_RECENT = 256,        /* maximum recent results */
    MP_DEDUP_BYTES = 1 << 20      /* maximum bytes of all recent results: inputs and vectors */
};

typedef struct mp_dedup_slot {
    int input;  /* index of the computed input, plus 1; 0: empty */
    int served; /* number of inputs that share its result, this input included */
} mp_dedup_slot;

typedef struct mp_dedup_table {
    mp_dedup_slot *slots; /* [slot_count], a power of two */
    uint32_t slot_count;
} mp_dedup_table;

/* True if inputs[a] and inputs[b] get the same vector. */
typedef bool (*mp_dedup_identical)(const void *inputs, int a, int b);

/* Clear the table for a step of up to `count` inputs. `table` must be zeroed before the first step. `name` names it in
 * an error. */
mp_status mp_dedup_table_begin(mp_dedup_table *table, int count, const char *name, mp_error *error);
/* Return the index of an earlier input of this step that is identical to inputs[index] and whose vector fewer than
 * MP_DEDUP_SHARED inputs share. Returns -1 if there is none: inputs[index] must be computed, and later inputs may share
 * its vector. `key` must be equal for identical inputs. */
int mp_dedup_table_find(mp_dedup_table *table, const void *inputs, int index, uint64_t key,
                        mp_dedup_identical identical);
void mp_dedup_table_deinit(mp_dedup_table *table);

#endif
