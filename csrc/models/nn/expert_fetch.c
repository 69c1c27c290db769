/* nn/expert_fetch.c: how the matrices of the experts that a use has chosen come into memory. */
#include "base/sys.h"
#include "models/nn/expert_use.h"

static bool is_new(const mp_experts *experts, int e) {
    return !atomic_load_explicit(&experts->uses->seen[e], memory_order_relaxed);
}

/* Returns the matrix of an expert if passes read it from the file, or NULL if a packed copy of it is kept. */
static const mp_tensor *in_file(const mp_expert_matrix *matrix, int e) {
    return !matrix->packed || mp_panels_left(matrix->packed, e) ? &matrix->tensors[e] : NULL;
}

/* Returns true if a quarter of a sample of the matrices of chosen experts are not in memory. */
static bool is_missed(const mp_experts *experts, const mp_expert_scratch *s, int chosen) {
    enum { SAMPLES = 16 };
    const mp_expert_matrix *const parts[] = {&experts->down, &experts->up, &experts->gate};
    const int step = chosen / SAMPLES + 1;
    int at = 0, sampled = 0, missing = 0;
    for (int e = 0; e < experts->count; e++) {
        if (!mp_expert_is_used(s, e) || at++ % step)
            continue;
        const mp_tensor *tensor = in_file(parts[sampled++ % (experts->plain ? 2 : 3)], e);
        missing += tensor && !mp_expert_is_resident(tensor);
    }
    return 4 * missing >= sampled;
}

/* Lists the chosen matrices in the order of their use. */
static void begin_scan(const mp_experts *experts, int threads, bool bypasses, const mp_expert_scratch *s) {
    const uint64_t up = mp_expert_bytes(&experts->up), down = mp_expert_bytes(&experts->down);
    mp_expert_scan_init(s->scan, s->matrices, threads, up > down ? up : down, bypasses, experts->reads);
    for (int e = 0; e < experts->count; e++)
        if (mp_expert_is_used(s, e)) {
            if (!experts->plain)
                mp_expert_scan_add(s->scan, in_file(&experts->gate, e));
            mp_expert_scan_add(s->scan, in_file(&experts->up, e));
        }
    for (int e = 0; e < experts->count; e++)
        if (mp_expert_is_used(s, e))
            mp_expert_scan_add(s->scan, in_file(&experts->down, e));
}

/* Decides how the matrices are read (nn/expert_reads.h). A use of experts that no rows have used before is not
 * measured. */
static void begin_reads(const mp_experts *experts, int M, int threads, const mp_expert_scratch *s) {
    int chosen = 0;
    bool seen = experts->reads, missed = false;
    for (int e = 0; e < experts->count; e++)
        if (mp_expert_is_used(s, e)) {
            chosen++;
            seen = seen && !is_new(experts, e);
        }
    const bool most = seen && 2 * chosen >= experts->count;
    if (most && !mp_expert_reads_thrash(experts->reads)) {
        missed = is_missed(experts, s, chosen);
        mp_expert_reads_scan(experts->reads, &experts->uses->missed_ns, missed);
    }
    const bool thrash = mp_expert_reads_thrash(experts->reads);
    if (thrash)
        begin_scan(experts, threads, most, s);
    const bool measured = seen && (thrash ? !experts->reads->blind
                                          : !most && mp_expert_reads_sample(experts->reads, M));
    atomic_init(&s->flags->measured, measured);
    atomic_init(&s->flags->scans, thrash);
    atomic_init(&s->flags->waited, false);
    atomic_init(&s->flags->missed, missed);
}

/* Marks the chosen experts as used. */
static void mark_seen(const mp_experts *experts, const mp_expert_scratch *s) {
    for (int e = 0; experts->uses && e < experts->count; e++)
        if (mp_expert_is_used(s, e) && is_new(experts, e))
            atomic_store_explicit(&experts->uses->seen[e], 1, memory_order_relaxed);
}

/* Asks the system for the chosen experts that no rows have used before. Each thread asks for some of the matrices. */
static void ask_for_new(const mp_experts *experts, const mp_team_thread *thread, const mp_expert_scratch *s) {
    const mp_expert_matrix *const parts[] = {&experts->gate, &experts->up, &experts->down};
    int turn = 0;
    for (int p = experts->plain ? 1 : 0; experts->uses && p < 3; p++)
        for (int e = 0; e < experts->count; e++) {
            if (!mp_expert_is_used(s, e) || !is_new(experts, e) || turn++ % thread->count != thread->index)
                continue;
            const mp_tensor *tensor = in_file(parts[p], e);
            if (tensor)
                mp_expert_ask(experts->reads, tensor);
        }
}

void mp_expert_fetch(mp_expert_use *use) {
    const mp_expert_scratch *s = &use->s;
    if (use->thread->index == 0)
        begin_reads(use->experts, use->M, use->thread->count, s);
    mp_team_barrier(use->thread);
    use->measured = atomic_load_explicit(&s->flags->measured, memory_order_relaxed);
    use->scans = atomic_load_explicit(&s->flags->scans, memory_order_relaxed);
    use->faults = use->measured && !use->scans ? mp_sys_major_faults() : 0;
    if (!use->scans)
        ask_for_new(use->experts, use->thread, s);
}

void mp_expert_fetched(mp_expert_use *use) {
    const mp_experts *experts = use->experts;
    const mp_expert_scratch *s = &use->s;
    const bool waited = use->scans ? atomic_load_explicit(&s->scan->missed, memory_order_relaxed)
                                   : use->measured && mp_sys_major_faults() > use->faults;
    if (use->measured && waited)
        atomic_store_explicit(&s->flags->waited, true, memory_order_relaxed);
    mp_team_barrier(use->thread);
    if (use->thread->index != 0)
        return;
    mark_seen(experts, s);
    if (use->measured)
        mp_expert_reads_add(experts->reads, atomic_load_explicit(&s->flags->waited, memory_order_relaxed));
    if (atomic_load_explicit(&s->flags->missed, memory_order_relaxed))
        atomic_store_explicit(&experts->uses->missed_ns, mp_sys_now_ns(), memory_order_relaxed);
}
