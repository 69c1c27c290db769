#include "models/nn/expert_reads.h"

#include "base/log.h"
#include "base/sys.h"

/* Two system calls per thread measure a use; the rows of a token use each of 20 to 90 layers once. */
enum { SAMPLE = 3, MANY_ROWS = 16 };
static const uint64_t SUCCESSION_NS = UINT64_C(60) * 1000 * 1000 * 1000;

bool mp_expert_reads_sample(mp_expert_reads *reads, int rows) {
    return reads && !mp_expert_reads_thrash(reads) &&
           (rows >= MANY_ROWS || atomic_fetch_add_explicit(&reads->uses, 1, memory_order_relaxed) % SAMPLE == 0);
}

static void warn(mp_expert_reads *reads) {
    if (!atomic_exchange_explicit(&reads->warned, true, memory_order_relaxed))
        mp_log(MP_LOG_WARNING,
               "%s: the same experts are read from the disk repeatedly. The experts have %.1f MB, more than the page "
               "cache can hold. Free memory, or use a file with fewer bits per weight",
               reads->name, (double)reads->bytes / 1e6);
}

static void begin_thrashing(mp_expert_reads *reads) {
    atomic_store_explicit(&reads->again, 0, memory_order_relaxed);
    atomic_store_explicit(&reads->thrashing, 1, memory_order_relaxed);
    if (reads->blind)
        warn(reads);
}

void mp_expert_reads_add(mp_expert_reads *reads, bool missed) {
    if (missed)
        atomic_fetch_add_explicit(&reads->missed, 1, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&reads->counted, 1, memory_order_relaxed) + 1 < MP_EXPERT_WINDOW)
        return;
    const uint32_t misses = atomic_exchange_explicit(&reads->missed, 0, memory_order_relaxed);
    const bool thrashes = mp_expert_reads_thrash(reads);
    atomic_store_explicit(&reads->counted, 0, memory_order_relaxed);
    if (!thrashes && misses >= MP_EXPERT_WINDOW / 4)
        begin_thrashing(reads);
    else if (thrashes && misses < MP_EXPERT_WINDOW / 16)
        atomic_store_explicit(&reads->thrashing, 0, memory_order_relaxed);
}

void mp_expert_reads_scan(mp_expert_reads *reads, _Atomic uint64_t *missed_ns, bool missed) {
    const uint64_t before_ns = atomic_load_explicit(missed_ns, memory_order_relaxed);
    if (!missed)
        atomic_store_explicit(missed_ns, 0, memory_order_relaxed);
    else if (before_ns && mp_sys_now_ns() - before_ns < SUCCESSION_NS)
        begin_thrashing(reads);
}

/* Most of a matrix: pages at its ends may belong to its neighbours too. */
static bool is_most(const mp_tensor *matrix, uint64_t bytes) { return bytes >= matrix->nbytes / 10 * 9; }

bool mp_expert_is_resident(const mp_tensor *matrix) {
    return is_most(matrix, mp_sys_resident(matrix->data, matrix->nbytes));
}

bool mp_expert_ask(const mp_expert_reads *reads, const mp_tensor *matrix) {
    const uint64_t resident = reads->blind ? 0 : mp_sys_resident(matrix->data, matrix->nbytes);
    if (resident < matrix->nbytes)
        mp_sys_advise((void *)(uintptr_t)matrix->data, matrix->nbytes, MP_ADVISE_WILLNEED);
    return !reads->blind && !is_most(matrix, resident);
}

void mp_expert_reads_again(mp_expert_reads *reads, const mp_tensor *matrix) {
    if (atomic_fetch_add_explicit(&reads->again, matrix->nbytes, memory_order_relaxed) > reads->bytes)
        warn(reads);
}
