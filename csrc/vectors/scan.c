/* scan.c: see scan.h. Threads take blocks of items in ascending order. */
#include "vectors/scan.h"

#include <stdatomic.h>
#include <string.h>

#include "base/arena.h"
#include "kernels/kernels.h"
#include "vectors/nearest.h"

typedef struct add_run {
    mp_scan *scan;
    const void *items;
    int64_t count;
    uint64_t until_ns;
    _Atomic int64_t next;    /* first item that no thread has taken */
    _Atomic int64_t invalid; /* first invalid item, or INT64_MAX */
} add_run;

/* Lays out the arrays of a thread from `memory` on, and returns their bytes. memory NULL: only returns the bytes. */
static size_t lay_out(const mp_scan *scan, uint8_t *memory) {
    const size_t queries = (size_t)scan->plan.queries, kept = queries * (size_t)scan->plan.most;
    const size_t sizes[] = {kept * sizeof(float), kept * sizeof(int64_t), queries * sizeof(int64_t),
                            scan->scratch_bytes};
    uint8_t *starts[sizeof sizes / sizeof *sizes];
    size_t at = mp_arena_cost(sizeof(mp_scan_thread));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        starts[i] = memory ? memory + at : NULL;
        at += mp_arena_cost(sizes[i]);
    }
    if (memory)
        *(mp_scan_thread *)(void *)memory = (mp_scan_thread){.scores = (float *)(void *)starts[0],
                                                             .numbers = (int64_t *)(void *)starts[1],
                                                             .counts = (int64_t *)(void *)starts[2],
                                                             .scratch = starts[3]};
    return at;
}

void mp_scan_destroy(mp_scan *scan) {
    if (!scan)
        return;
    for (int i = 0; i < MP_SCAN_THREADS; i++)
        mp_free(scan->threads[i]);
    scan->ops->destroy(scan);
}

/* ---- adding ------------------------------------------------------------------------------------------------------ */

static void add_body(const mp_team_thread *thread, void *arg) {
    add_run *run = arg;
    mp_scan *scan = run->scan;
    mp_scan_thread *state = scan->threads[thread->index];
    do {
        const int64_t first = atomic_fetch_add_explicit(&run->next, scan->block, memory_order_relaxed);
        if (first >= run->count)
            return;
        const int32_t count = run->count - first < scan->block ? (int32_t)(run->count - first) : scan->block;
        const int32_t valid = scan->ops->compare(scan, state, run->items, first, count);
        if (valid == count) {
            state->seen += count;
            continue;
        }
        int64_t least = atomic_load_explicit(&run->invalid, memory_order_relaxed);
        while (first + valid < least &&
               !atomic_compare_exchange_weak_explicit(&run->invalid, &least, first + valid, memory_order_relaxed,
                                                      memory_order_relaxed))
            continue;
        return;
    } while (mp_sys_now_ns() < run->until_ns);
}

mp_status mp_scan_add(mp_scan *scan, mp_lease *lease, const void *items, int64_t count, int64_t *done,
                      uint64_t until_ns, mp_error *error) {
    const size_t bytes = lay_out(scan, NULL);
    for (int i = 0; i < lease->threads; i++) {
        if (scan->threads[i])
            continue;
        uint8_t *memory = mp_alloc_zeroed(bytes, MP_TAG_SCRATCH);
        if (!memory)
            return mp_fail_memory(error, bytes, "the results of a search");
        lay_out(scan, memory);
        scan->threads[i] = (mp_scan_thread *)(void *)memory;
    }
    add_run run = {.scan = scan, .items = items, .count = count, .until_ns = until_ns};
    scan->base = scan->added - *done;
    atomic_init(&run.next, *done);
    atomic_init(&run.invalid, INT64_MAX);
    mp_lease_run(lease, add_body, &run);
    const int64_t invalid = atomic_load_explicit(&run.invalid, memory_order_relaxed);
    if (invalid != INT64_MAX)
        return scan->ops->refuse(scan, items, invalid, scan->base + invalid, error);
    const int64_t next = atomic_load_explicit(&run.next, memory_order_relaxed);
    *done = next < count ? next : count;
    scan->added = scan->base + *done;
    return MP_OK;
}

void mp_scan_merge(const mp_scan *scan, mp_scan_thread *thread, int32_t query, const float *scores, int32_t count,
                   int64_t first) {
    const mp_scan_plan *plan = &scan->plan;
    if (plan->counts) {
        int32_t reached = 0;
        for (int32_t n = 0; n < count; n++)
            reached += scores[n] >= plan->least;
        thread->counts[query] += reached;
    }
    if (plan->most == 0)
        return;
    float *best = thread->scores + (int64_t)query * plan->most;
    int64_t *numbers = thread->numbers + (int64_t)query * plan->most;
    int64_t kept = thread->seen < plan->most ? thread->seen : plan->most;
    /* numbers ascend, so a score that equals the worst one is worse */
    if (kept == plan->most && !(mp_kernels_get()->max(scores, count) > best[0]))
        return;
    for (int32_t n = 0; n < count; n++)
        if (kept < plan->most || scores[n] > best[0])
            mp_nearest_offer(best, numbers, &kept, plan->most, scores[n], scan->base + first + n);
}

/* ---- results ----------------------------------------------------------------------------------------------------- */

int32_t mp_scan_found(const mp_scan *scan) {
    return scan->added < scan->plan.most ? (int32_t)scan->added : scan->plan.most;
}

void mp_scan_nearest(mp_scan *scan, int64_t *numbers, float *scores) {
    const int32_t most = scan->plan.most, found = mp_scan_found(scan);
    for (int32_t q = 0; found > 0 && q < scan->plan.queries; q++) {
        float *best = scores + (int64_t)q * found;
        int64_t *of = numbers + (int64_t)q * found;
        int64_t kept = 0;
        for (int i = 0; i < MP_SCAN_THREADS; i++) {
            const mp_scan_thread *thread = scan->threads[i];
            const int64_t have = !thread ? 0 : thread->seen < most ? thread->seen : most;
            for (int64_t j = 0; j < have; j++)
                mp_nearest_offer(best, of, &kept, found, thread->scores[(int64_t)q * most + j],
                                 thread->numbers[(int64_t)q * most + j]);
        }
        mp_nearest_sort(best, of, found);
    }
}

void mp_scan_counts(const mp_scan *scan, int64_t *out) {
    memset(out, 0, sizeof(int64_t) * (size_t)scan->plan.queries);
    for (int i = 0; i < MP_SCAN_THREADS; i++)
        for (int32_t q = 0; scan->threads[i] && q < scan->plan.queries; q++)
            out[q] += scan->threads[i]->counts[q];
}
