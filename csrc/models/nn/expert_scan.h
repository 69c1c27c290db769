/* nn/expert_scan.h: reads the experts of a layer from the disk in the order of their use.
 *
 * While a model thrashes (nn/expert_reads.h), all threads visit the matrices of a layer in the same order and compute a
 * part of each. The system is asked for the matrices of the next AHEAD_BYTES, so that it reads while the threads
 * compute. Asking for all at once would be worse: with little memory, the system drops the first ones before their use.
 *
 * The rows of a prompt use almost all experts of every layer: each pass scans the file. If the page cache is smaller
 * than the experts, the system keeps those that were used last, so the next pass finds none of its first experts in
 * memory, and reading these drops the others before their turn. A use that reads most experts of a layer therefore
 * bypasses the page cache: it drops each matrix that it had to read from the disk, and those that were in memory stay
 * there for the next pass. One matrix of KEEP_ONE_IN is kept all the same, so that memory that becomes free is used
 * (Qureshi and others, "Adaptive insertion policies for high performance caching", ISCA 2007). */
#ifndef MP_MODELS_NN_EXPERT_SCAN_H
#define MP_MODELS_NN_EXPERT_SCAN_H

#include "models/nn/expert_reads.h"

typedef struct mp_scan_matrix {
    const mp_tensor *tensor; /* as stored, or NULL: the matrix is in memory */
    _Atomic int32_t visits;  /* threads that have not left it yet */
    _Atomic bool missing;    /* it was not in memory when it was asked for */
    _Atomic bool dropped;    /* the last thread drops it */
} mp_scan_matrix;

/* One scan, in the memory of its caller, who initialises it with mp_expert_scan_init and adds the matrices. */
typedef struct mp_expert_scan {
    mp_scan_matrix *matrices; /* [count] in the order of their use */
    int32_t count, threads, ahead; /* ahead: matrices that are asked for before their use */
    bool bypasses;            /* matrices are dropped after their use */
    _Atomic int32_t asked;    /* the system was asked for the first `asked` matrices */
    _Atomic bool missed;      /* a matrix that had been used before was not in memory */
    mp_expert_reads *reads;
} mp_expert_scan;

/* matrices: memory for all that will be added. largest: bytes of the largest one. */
void mp_expert_scan_init(mp_expert_scan *scan, mp_scan_matrix *matrices, int threads, uint64_t largest, bool bypasses,
                         mp_expert_reads *reads);
/* Adds the next matrix in the order of use. tensor: as in mp_scan_matrix; the same one may be added twice in a row. */
void mp_expert_scan_add(mp_expert_scan *scan, const mp_tensor *tensor);
/* Every thread calls these for every matrix, in order: before it reads the matrix, and after it. */
void mp_expert_scan_enter(mp_expert_scan *scan, int matrix);
void mp_expert_scan_leave(mp_expert_scan *scan, int matrix);

#endif
