/* sim_states.h: real cache parts for the simulator's fake engines. A request is a sequence of tokens whose first ones
 * are those of all requests; a unit has SIM_UNIT_ROWS of them. The state of a sequence is a fold of its tokens in their
 * order, so a lost, repeated or foreign row shows. */
#ifndef TESTS_SIM_STATES_H
#define TESTS_SIM_STATES_H

#include "models/engine.h"
#include "models/generation/cache_parts.h"

enum { SIM_UNIT_ROWS = 8, SIM_SEQUENCE = 320 };

typedef struct sim_sequence {
    mp_cached cached;
    int32_t tokens[SIM_SEQUENCE];
} sim_sequence;

void sim_states_init(mp_prefix_cache *cache, mp_budget *budget);
/* Creates the sequence of an item without cached rows; NULL if there is no memory. */
sim_sequence *sim_sequence_create(const mp_prefix_cache *cache, const mp_item *item, uint32_t own);
void sim_sequence_destroy(sim_sequence *seq); /* must have been dropped; NULL is legal */
/* Computes the rows of the first `units` units, in random slices, with drafts that may be wrong, and with copies that
 * diverge. Returns false if memory is exhausted. */
bool sim_sequence_compute(mp_prefix_cache *cache, sim_sequence *seq, uint32_t units);

#endif
