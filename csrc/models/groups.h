/* groups.h: distribution of a step's sequences (texts, images) over compute threads. Sequences are packed into groups
 * of rows that are computed together. Either each thread takes one group after another, with group scratch of its own,
 * or all threads share the only group. */
#ifndef MP_MODELS_GROUPS_H
#define MP_MODELS_GROUPS_H

#include "models/model.h"

typedef struct mp_group { /* sequences that are computed together */
    int first, count, rows;
} mp_group;

typedef struct mp_groups {
    mp_group *groups; /* [capacity]; the other arrays follow it in the same allocation */
    int32_t *owner;   /* [capacity] index of each sequence's item in the plan */
    int32_t *rows;    /* [capacity] rows of each sequence */
    int32_t *row0;    /* [capacity] first row of each sequence in its group; set by mp_groups_make */
    int capacity, count;
    int most_rows, most_sequences; /* maxima over the groups; at least 1 */
} mp_groups;

/* Allocates room for `sequences` sequences, whose rows and owners the caller fills in. Earlier content is lost. A
 * zeroed mp_groups is valid and empty. */
mp_status mp_groups_reserve(mp_groups *groups, int sequences, mp_error *error);
void mp_groups_deinit(mp_groups *groups);
/* Packs `sequences` consecutive sequences, which have `all_rows` rows in total, into groups. A group has at most `most`
 * rows, and at most the share of one of `threads` threads. A longer sequence forms its own group. If there is more than
 * one group for each thread, the last groups are smaller, down to a quarter of `most`: threads then end at about the
 * same time, although some are slower. */
void mp_groups_make(mp_groups *groups, int sequences, int64_t all_rows, int threads, int most);

typedef struct mp_group_step { /* one step over the groups */
    const mp_groups *groups;
    mp_lease *lease;
    bool together; /* all threads share the only group */
    size_t group_bytes, thread_bytes;
    uint8_t *group_scratch; /* [together ? 1 : threads][group_bytes] */
    uint8_t *thread_scratch; /* [threads][thread_bytes] */
    /* Called for each group: by all threads of the region if they share the group, otherwise by one. `slot`: index of
     * the group's scratch. */
    void (*run)(void *arg, const mp_team_thread *thread, const mp_group *group, int slot, void *thread_scratch);
    void *arg;
    _Atomic int next;
} mp_group_step;

/* Takes all scratch of the step from the arena, whose growth is charged to the budget (mp_engine_reserve). */
mp_status mp_group_step_reserve(mp_group_step *step, mp_arena *arena, mp_budget *budget, uint64_t *charged,
                                mp_error *error);
/* Runs all groups. Stops early, between groups, if mp_lease_poll returns true and the threads do not share the group.
 */
void mp_group_step_run(mp_group_step *step);
static inline void *mp_group_scratch(const mp_group_step *step, int slot) {
    return step->group_scratch + (size_t)slot * step->group_bytes;
}

#endif
