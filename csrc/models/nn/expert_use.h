/* nn/expert_use.h: one use of a layer's experts: the rows of a pass choose experts (route), the system is asked for
 * their matrices (fetch), and the rows are multiplied by them (multiply). Internal to nn/experts.c and
 * nn/expert_fetch.c. */
#ifndef MP_MODELS_NN_EXPERT_USE_H
#define MP_MODELS_NN_EXPERT_USE_H

#include "models/nn/expert_scan.h"
#include "models/nn/experts.h"

typedef struct mp_expert_flags {
    _Atomic bool measured; /* the use is measured (nn/expert_reads.h) */
    _Atomic bool scans;    /* nn/expert_scan.h reads the matrices */
    _Atomic bool waited;   /* a thread waited for the disk, or asked for missing experts */
    _Atomic bool missed;   /* most experts are chosen, and experts were missing at the start */
} mp_expert_flags;

/* Scratch that the threads share. An entry is a (row, expert) pair. The n = M * used entries are grouped by expert, and
 * ordered by row within an expert. */
typedef struct mp_expert_scratch {
    float *scores;   /* [M, count] router scores */
    float *merit;    /* [M, count] values by which experts are selected */
    int32_t *chosen; /* [n] selected experts of each row */
    float *weight;   /* [n] */
    int32_t *entry;  /* [n] position of a row's expert in group order */
    int32_t *row;    /* [n] row of an entry */
    int32_t *first;  /* [count + 1] first entry of each expert */
    mp_expert_flags *flags;
    mp_expert_scan *scan;     /* while the model thrashes */
    mp_scan_matrix *matrices; /* [3 count] for `scan` */
    float *wide;              /* [n, hidden] rows of x in group order, then expert outputs */
    float *inner;             /* [n, 2 ffn] gate and up; plain: [n, ffn] */
    void *acts;
    size_t bytes;
} mp_expert_scratch;

typedef struct mp_expert_use { /* a thread's view of a use */
    const mp_experts *experts;
    const mp_team_thread *thread;
    mp_lease *lease;
    uint8_t *own; /* the thread's scratch */
    int M;
    mp_expert_scratch s;
    bool measured, scans; /* the flags, for the whole use */
    uint64_t faults;      /* major page faults of the thread when the use began */
    int scanned;          /* matrices of the scan that the thread has left */
} mp_expert_use;

/* Returns true if rows of the use have chosen expert e. */
static inline bool mp_expert_is_used(const mp_expert_scratch *s, int e) { return s->first[e + 1] > s->first[e]; }

/* Decides how the matrices of the chosen experts are read, and asks the system for those that no rows have used before.
 * All threads call it once thread 0 has grouped the entries. There is a barrier inside. */
void mp_expert_fetch(mp_expert_use *use);
/* Counts the use if it is measured. All threads call it when they have read the matrices. There is a barrier inside. */
void mp_expert_fetched(mp_expert_use *use);

#endif
