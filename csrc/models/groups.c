#include "models/groups.h"

#include <stdatomic.h>

#include "base/spread.h"

mp_status mp_groups_reserve(mp_groups *groups, int sequences, mp_error *error) {
    const size_t n = (size_t)sequences, bytes = n * (sizeof *groups->groups + 3 * sizeof(int32_t));
    if (sequences <= groups->capacity)
        return MP_OK;
    mp_groups_deinit(groups); /* drop the previous step's groups */
    if (!(groups->groups = mp_alloc(bytes, MP_TAG_SCRATCH)))
        return mp_fail_memory(error, bytes, "the groups of a step");
    groups->owner = (int32_t *)(void *)(groups->groups + n);
    groups->rows = groups->owner + n;
    groups->row0 = groups->rows + n;
    groups->capacity = sequences;
    return MP_OK;
}

void mp_groups_deinit(mp_groups *groups) {
    mp_free(groups->groups);
    *groups = (mp_groups){0};
}

void mp_groups_make(mp_groups *groups, int sequences, int64_t all_rows, int threads, int most) {
    const bool even = threads == 1 || all_rows <= (int64_t)threads * most;
    int64_t left = all_rows;
    groups->count = 0;
    groups->most_rows = groups->most_sequences = 1;
    for (int s = 0; s < sequences; left -= groups->groups[groups->count - 1].rows) {
        const int64_t share = even ? (all_rows + threads - 1) / threads : (left + 2 * threads - 1) / (2 * threads);
        const int64_t limit = share > most ? most : share > most / 4 || even ? share : most / 4;
        mp_group *group = &groups->groups[groups->count++];
        *group = (mp_group){.first = s};
        for (; s < sequences && (group->count == 0 || group->rows + groups->rows[s] <= limit); s++) {
            groups->row0[s] = group->rows;
            group->rows += groups->rows[s];
            group->count++;
        }
        groups->most_rows = group->rows > groups->most_rows ? group->rows : groups->most_rows;
        groups->most_sequences = group->count > groups->most_sequences ? group->count : groups->most_sequences;
    }
}

mp_status mp_group_step_reserve(mp_group_step *step, mp_arena *arena, mp_budget *budget, uint64_t *charged,
                                mp_error *error) {
    const size_t groups = step->group_bytes * (size_t)(step->together ? 1 : step->lease->threads);
    const size_t threads = step->thread_bytes * (size_t)step->lease->threads;
    mp_arena_reset(arena);
    MP_TRY(mp_engine_reserve(arena, groups + threads, budget, charged, error));
    step->group_scratch = mp_arena_take(arena, groups);
    step->thread_scratch = mp_arena_take(arena, threads);
    return MP_OK;
}

static void step_body(const mp_team_thread *thread, void *arg) {
    mp_group_step *step = arg;
    const mp_groups *groups = step->groups;
    const mp_team_thread single = mp_team_single();
    void *own = step->thread_scratch + (size_t)thread->index * step->thread_bytes;
    if (step->together) {
        step->run(step->arg, thread, &groups->groups[0], 0, own);
        return;
    }
    for (;;) {
        const int g = atomic_fetch_add_explicit(&step->next, 1, memory_order_relaxed);
        if (g >= groups->count || mp_lease_poll(step->lease))
            return;
        const int cpu = mp_spread_begin();
        step->run(step->arg, &single, &groups->groups[g], thread->index, own);
        mp_spread_end(cpu);
    }
}

void mp_group_step_run(mp_group_step *step) {
    if (step->groups->count > 0)
        mp_lease_run(step->lease, step_body, step);
}
