#include "models/nn/expert_scan.h"

#include "base/sys.h"

enum {
    AHEAD_BYTES = 16 << 20, /* 5 to 10 ms of a disk that reads 2 to 3 GB/s */
    KEEP_ONE_IN = 16,
};

void mp_expert_scan_init(mp_expert_scan *scan, mp_scan_matrix *matrices, int threads, uint64_t largest, bool bypasses,
                         mp_expert_reads *reads) {
    *scan = (mp_expert_scan){.matrices = matrices, .threads = threads, .bypasses = bypasses, .reads = reads};
    scan->ahead = 1 + (int32_t)(AHEAD_BYTES / (largest + 1));
}

void mp_expert_scan_add(mp_expert_scan *scan, const mp_tensor *tensor) {
    mp_scan_matrix *matrix = &scan->matrices[scan->count++];
    matrix->tensor = tensor;
    atomic_init(&matrix->visits, scan->threads);
    atomic_init(&matrix->missing, false);
    atomic_init(&matrix->dropped, false);
    /* gate and up may be rows of one tensor: it is asked for once, and dropped after its second use */
    if (scan->count > 1 && tensor && matrix[-1].tensor && matrix[-1].tensor->data == tensor->data)
        matrix[-1].tensor = NULL;
}

static void ask(mp_expert_scan *scan, mp_scan_matrix *matrix) {
    if (!matrix->tensor || !mp_expert_ask(scan->reads, matrix->tensor))
        return;
    mp_expert_reads_again(scan->reads, matrix->tensor);
    const uint32_t read = atomic_fetch_add_explicit(&scan->reads->scanned, 1, memory_order_relaxed);
    atomic_store_explicit(&matrix->dropped, scan->bypasses && (read + 1) % KEEP_ONE_IN != 0, memory_order_relaxed);
    atomic_store_explicit(&matrix->missing, true, memory_order_relaxed);
    atomic_store_explicit(&scan->missed, true, memory_order_relaxed);
}

void mp_expert_scan_enter(mp_expert_scan *scan, int matrix) {
    int32_t at = atomic_load_explicit(&scan->asked, memory_order_relaxed);
    while (at < scan->count && at <= matrix + scan->ahead)
        if (atomic_compare_exchange_weak_explicit(&scan->asked, &at, at + 1, memory_order_relaxed,
                                                  memory_order_relaxed))
            ask(scan, &scan->matrices[at++]);
    /* With little memory, the system may have read only a part of what it was asked for. A fault would read as much as
     * its readahead (8 MiB on some systems), most of it from matrices that no row needs. */
    const mp_scan_matrix *entered = &scan->matrices[matrix];
    if (atomic_load_explicit(&entered->missing, memory_order_relaxed))
        mp_expert_ask(scan->reads, entered->tensor);
}

/* The thread that asks for a matrix leaves it later, so the last thread that leaves sees `dropped`. */
void mp_expert_scan_leave(mp_expert_scan *scan, int matrix) {
    mp_scan_matrix *left = &scan->matrices[matrix];
    if (atomic_fetch_sub_explicit(&left->visits, 1, memory_order_acq_rel) == 1 &&
        atomic_load_explicit(&left->dropped, memory_order_relaxed))
        mp_sys_advise((void *)(uintptr_t)left->tensor->data, left->tensor->nbytes, MP_ADVISE_PAGEOUT);
}
