/* groups.h: how an engine shares the sequences of a step (texts, images) out to lanes. Sequences are packed into groups
 * of rows that are computed together; each lane takes one group after another, with scratch of its own, or all lanes
 * share the one group that there is. */
#ifndef MP_MODELS_GROUPS_H
#define MP_MODELS_GROUPS_H

#include "models/model.h"

typedef struct mp_group { /* sequences that are computed together */
    int first, count, rows;
} mp_group;

typedef struct mp_groups {
    mp_group *groups; /* [capacity]; the other lists stand behind it in the same memory */
    int32_t *owner;   /* [capacity] of each sequence: the index of its item in the plan */
    int32_t *rows;    /* [capacity] of each sequence */
    int32_t *row0;    /* [capacity] of each sequence: its first row in its group; mp_groups_make */
    int capacity, count;
    int most_rows, most_sequences; /* of a group; at least 1 */
} mp_groups;

/* Zeroed storage is empty. Room for so many sequences, whose rows and owners the caller fills; old ones are dropped. */
mp_status mp_groups_reserve(mp_groups *groups, int sequences, mp_error *error);
void mp_groups_deinit(mp_groups *groups);
/* Consecutive sequences, of all_rows rows together, into groups of equal size for `lanes` lanes, of up to `most` rows
 * each; a longer sequence is a group of its own. */
void mp_groups_make(mp_groups *groups, int sequences, int64_t all_rows, int threads, int most);

typedef struct mp_group_step { /* one step over the groups */
    const mp_groups *groups;
    mp_lease *lease;
    bool together; /* all lanes share each group */
    size_t group_bytes, thread_bytes;
    uint8_t *group_scratch; /* [together ? 1 : lanes][group_bytes] */
    uint8_t *thread_scratch; /* [lanes][lane_bytes] */
    /* Called for each group: by all lanes of `lane` when they share it, else by one. `piece`: the number of its group
     * scratch. */
    void (*run)(void *arg, const mp_team_thread *thread, const mp_group *group, int piece, void *thread_scratch);
    void *arg;
    _Atomic int next;
} mp_group_step;

/* Takes the scratch from the arena, which is charged to the budget (mp_engine_reserve). */
mp_status mp_group_step_reserve(mp_group_step *step, mp_arena *arena, mp_budget *budget, uint64_t *charged,
                                mp_error *error);
/* Ends early when the lease says so, between groups. */
void mp_group_step_run(mp_group_step *step);
static inline void *mp_group_scratch(const mp_group_step *step, int piece) {
    return step->group_scratch + (size_t)piece * step->group_bytes;
}

#endif
