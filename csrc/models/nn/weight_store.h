/* nn/weight_store.h: the life of a model's weights in memory. Every model has one store.
 *
 * Products read weights in packed order (kernels/pack.h), panel by panel: a panel has the rows of MP_PANEL_N outputs. A
 * panel that is not packed is read from the mapped file. The bits of a product do not depend on the state of a panel.
 *
 *           claim              publish               drop
 *   MAPPED ───────► PACKING ───────────► PACKED ─────────────► MAPPED (experts only)
 *      ▲               │
 *      └───────────────┘ no memory; in the child of a fork, whose parent's thread was packing it
 *
 *   weights               | states         | packed by                 | charged to the memory budget
 *   ----------------------|----------------|---------------------------|--------------------------------------------
 *   packed at load        | PACKED         | threads of the load       | slab: by the load, before it packs; given
 *                         |                |                           | back when the model is freed. A worker process
 *                         |                |                           | maps its parent's slab and charges nothing
 *   packed on use         | MAPPED to      | passes                    | the same slab: all of it by the load, although
 *                         | PACKED         |                           | the system provides a page when it is filled
 *   never packed (mapped) | MAPPED         | no thread                 | nothing
 *   experts               | MAPPED to      | passes, idle workers; the | an expert's matrix when its first panel is
 *                         | PACKED, MAPPED | load, with "packed"       | packed, while a third of the budget stays
 *                         | again          |                           | free; given back by drop
 *
 * Scratch for packing is charged too, and given back at the end. When the last panel of a matrix is PACKED, the pages
 * of the matrix in the file are released, so memory holds the weights once. Mapped pages belong to the system's page
 * cache and are never charged.
 *
 * Passes. Packing copies weights into memory not touched before, which takes longer than a step. A thread that needs a
 * MAPPED panel multiplies its rows as they are stored, or, where packing is faster, packs the panel into its own
 * scratch and computes with that. In addition, a pass has a time budget for panels that it packs for later passes.
 *  - Matrices of linear layers: 300 ms per pass and 2 ms per row; the first pass has only the time of its rows. Panels
 *    that OpenBLAS multiplies as stored are packed after the product.
 *  - Experts: a panel that a pass has to pack anyway is kept. If the expert has so few rows that its stored rows are
 *    multiplied, a pass starts its matrix when passes have multiplied stored rows for at least as long as they have
 *    packed such matrices. So the first passes take at most twice their time, and a model that is used little is not
 *    packed. A pass of at most MP_DECODE_ROWS rows counts an eighth of its time: passes that decode follow one another
 *    by the hundreds, and each of them gains little from packed panels. Between requests, idle workers pack the experts
 *    whose stored rows passes have multiplied (`pending`), for at most the time of these products.
 *
 * A load does not read the matrices that stay MAPPED: a file of 20 GB takes many seconds from a disk.
 * mp_weight_store_fetch reads those of linear layers on a thread of its own, in the order in which they were added,
 * while the first passes compute.
 *
 * Any number of engines may use a store at the same time. Copies of experts lie behind one another, in the order of
 * their first use, in one reserved region of huge pages, which the system provides faster than small ones. */
#ifndef MP_MODELS_NN_WEIGHT_STORE_H
#define MP_MODELS_NN_WEIGHT_STORE_H

#include <stdatomic.h>

#include "base/forked.h"
#include "base/sys.h"
#include "files/weights.h"
#include "kernels/kernels.h"
#include "models/arch.h"
#include "models/nn/expert_reads.h"

/* ---- the use that a model makes of its weights ------------------------------------------------------------------- */

/* AUTO: matrices of large models are packed on use. MAPPED: matrices are never packed, and their packed data is neither
 * allocated nor charged. PACKED: all matrices are packed before the first step. */
typedef enum mp_weights_use { MP_WEIGHTS_AUTO, MP_WEIGHTS_MAPPED, MP_WEIGHTS_PACKED } mp_weights_use;
/* Reads `mpool.weights` of the spec: auto (default), mapped, packed. auto becomes MAPPED if the spec sets
 * `mpool.float32_fast`, the matrices of its layers are F32, and the sums of the BLAS library differ from ours
 * (mp_blas_differs). */
mp_status mp_weights_use_read(const mp_spec *spec, mp_weights_use *use, mp_error *error);
/* Reads `mpool.float32_fast` of the spec; false by default. */
mp_status mp_weights_read_fast(const mp_spec *spec, bool *fast, mp_error *error);
/* For estimates: as mp_weights_use_read, but AUTO for a value with which the load will fail. */
mp_weights_use mp_weights_use_or_auto(const mp_spec *spec);
/* Matrices that may stay unpacked do so if together they have at least this many bytes. */
uint64_t mp_weights_threshold(mp_weights_use use);

/* Matrices that may stay unpacked. Rows of a matrix that is also a table of rows (mp_linear_row) must not depend on
 * packing, which rounds floats to bf16 and int8. */
typedef enum mp_unpacked {
    MP_UNPACKED_NONE,
    MP_UNPACKED_EXACT,   /* those whose values packing does not round */
    MP_UNPACKED_ENCODER, /* AUTO: matrices of F32 that compute in fp32; MAPPED: all */
} mp_unpacked;
/* Returns true if a matrix of type `dtype`, packed as `kind`, may stay unpacked. */
bool mp_may_stay_unpacked(mp_unpacked unpacked, mp_weights_use use, mp_dtype dtype, mp_wkind kind);
/* Predicts `facts.weights` of a model after its load in this process, without loading it. may_stay: returns true for
 * the matrices that the family adds with `unpacked`. */
mp_matrices mp_weights_predict(const mp_spec *spec, mp_compute compute, mp_unpacked unpacked,
                               bool (*may_stay)(const mp_spec *spec, const mp_tensor_entry *entry));

/* ---- time for packing -------------------------------------------------------------------------------------------- */

/* The time that passes may spend on packing panels that they could also multiply as stored. The budget counts only the
 * packing. If it counted the whole pass, the first layers would use it up, and the weights of later layers would stay
 * unpacked. */
typedef struct mp_pack_budget {
    _Atomic int64_t left_ns; /* shared by all threads; the last panel may make it negative */
} mp_pack_budget;

/* Sets the time that is left. Passes that run at the same time share the budget of the last call. */
static inline void mp_pack_budget_set(mp_pack_budget *budget, uint64_t ns) {
    atomic_store_explicit(&budget->left_ns, (int64_t)ns, memory_order_relaxed);
}
static inline void mp_pack_budget_add(mp_pack_budget *budget, uint64_t ns) {
    atomic_fetch_add_explicit(&budget->left_ns, (int64_t)ns, memory_order_relaxed);
}
/* Subtracts from the time that is left, which may become negative. */
static inline void mp_pack_budget_spend(mp_pack_budget *budget, uint64_t ns) {
    atomic_fetch_sub_explicit(&budget->left_ns, (int64_t)ns, memory_order_relaxed);
}
static inline bool mp_pack_budget_left(const mp_pack_budget *budget) {
    return atomic_load_explicit(&budget->left_ns, memory_order_relaxed) > 0;
}
/* As mp_wmat_pack, and subtracts the time that it takes. */
static inline void mp_pack_budget_pack(mp_pack_budget *budget, mp_wmat *w, const mp_tensor *rows, int panel0,
                                       int panel1) {
    const uint64_t began = mp_sys_now_ns();
    mp_wmat_pack(w, rows, panel0, panel1);
    mp_pack_budget_spend(budget, mp_sys_now_ns() - began);
}

/* ---- panels ------------------------------------------------------------------------------------------------------ */

typedef enum mp_panel_state { MP_PANEL_MAPPED, MP_PANEL_PACKING, MP_PANEL_PACKED } mp_panel_state;

typedef struct mp_panels { /* a matrix of a linear layer (count 1), or one matrix of each expert of a layer */
    struct mp_weight_store *store;
    struct mp_panels *next;
    const mp_tensor *sources; /* [count] the matrices in the file; borrowed from the expert matrix, or &source */
    mp_tensor source;
    size_t bytes, panel_bytes; /* bytes of a packed matrix, and of a packed panel */
    int32_t count, panels;
    _Atomic(uint8_t *) *data;  /* [count] packed matrix; NULL: it has no memory (yet) */
    _Atomic uint8_t *state;    /* [count, panels] mp_panel_state */
    _Atomic int32_t *left;     /* [count] panels that are not PACKED */
    _Atomic uint8_t *pending;  /* [count] 1: passes multiplied the expert's stored rows and had no time to pack it.
                                * NULL: not experts */
} mp_panels;

/* Returns true if the panel is PACKED. NULL: false. */
static inline bool mp_panel_is_packed(const mp_panels *panels, int matrix, int panel) {
    return panels && atomic_load_explicit(&panels->state[(int64_t)matrix * panels->panels + panel],
                                          memory_order_acquire) == MP_PANEL_PACKED;
}
/* Returns true if any panel of the matrix is not PACKED. */
static inline bool mp_panels_left(const mp_panels *panels, int matrix) {
    return atomic_load_explicit(&panels->left[matrix], memory_order_acquire) > 0;
}
/* Returns the place of a panel that is PACKED, or that the caller has claimed. */
static inline uint8_t *mp_panel_place(const mp_panels *panels, int matrix, int panel) {
    return atomic_load_explicit(&panels->data[matrix], memory_order_acquire) + (size_t)panel * panels->panel_bytes;
}
/* Returns true if the panel was MAPPED and has memory. The caller then packs it into its place, and calls
 * mp_panel_publish. */
bool mp_panel_claim(mp_panels *panels, int matrix, int panel);
void mp_panel_publish(mp_panels *panels, int matrix, int panel);
/* As mp_panel_claim, for a panel of an expert. few: the caller could multiply the stored rows instead; the panel is
 * then claimed only if its matrix has been started, or if there is time to start it. NULL: false. */
bool mp_panel_claim_expert(mp_panels *panels, int matrix, int panel, bool few);

/* ---- the store --------------------------------------------------------------------------------------------------- */

/* A zeroed store is empty. It must not move. */
typedef struct mp_weight_store {
    const mp_weights *weights;
    mp_budget *budget;
    mp_forked forked;
    bool packs_on_use;         /* mp_weight_store_pack_on_use was called */
    _Atomic int32_t passes;    /* passes in progress; -1 while copies are dropped */
    _Atomic uint64_t packed;   /* panels packed by passes and idle workers since the load, including dropped ones */
    _Atomic bool corrupted;    /* see mp_weight_store_sound */

    /* the load: nn/builder.h */
    struct mp_build_job *jobs; /* [capacity] the tensors to load */
    int count, capacity;
    uint8_t *slab;             /* owned; NULL if worker processes share it */
    size_t slab_bytes;         /* excludes the slack after the last tensor */
    uint64_t charged;          /* bytes charged for the slab */
    uint64_t mapped_bytes;     /* bytes in the files of the matrices that are never packed */
    int64_t parameters;

    /* matrices of linear layers that the load has not packed */
    mp_panels *linears;
    bool mapped;                   /* they are never packed */
    bool fast;                     /* `mpool.float32_fast` of the spec: see mp_gemm_stored */
    size_t panel_scratch;          /* bytes of scratch for each thread */
    uint64_t keep_ns, keep_row_ns; /* time budget of a pass: fixed part, and part per row */
    mp_pack_budget linear_time;    /* the budget of the current pass */
    _Atomic int32_t unpacked;      /* matrices with panels that are not PACKED */
    _Atomic bool used;             /* the first pass has begun */
    _Atomic bool fetching, quit;   /* the fetching thread reads pages; it shall end */
    mp_thread fetcher;

    /* experts */
    mp_panels *experts;
    bool keeps_experts;        /* packed copies may be kept */
    bool partial;              /* the model has experts that are never packed */
    int pack_share;            /* time for packing matrices of experts with few rows, per time of stored products */
    mp_pack_budget expert_time; /* that passes may spend on it; negative if started matrices took longer */
    mp_pack_budget idle_time;  /* that idle workers may spend: the time of stored products, less that of such packing */
    _Atomic int32_t pending;   /* number of matrices that are `pending` */
    _Atomic bool decodes;      /* the pass that began last has at most MP_DECODE_ROWS rows */
    mp_mutex lock;             /* guards the region */
    uint8_t *region;           /* memory of the copies; NULL: not reserved */
    size_t region_bytes;
    bool refused;              /* the system refused the region */
    _Atomic uint64_t copied;   /* bytes of the region that matrices have taken, charged */
    _Atomic uint64_t kept;     /* bytes of PACKED panels */
    uint64_t most;             /* bytes of all matrices that may be kept */
    mp_expert_reads reads;     /* not measured if it has no name */
} mp_weight_store;

/* Call before the first mp_weight_store_add_*; later calls do nothing. */
mp_status mp_weight_store_pack_on_use(mp_weight_store *store, const mp_weights *weights, mp_error *error);
/* Adds the matrix `source` of a linear layer. w: its packed matrix, whose data is not filled yet. The store owns the
 * result. */
mp_status mp_weight_store_add_linear(mp_weight_store *store, const mp_wmat *w, const mp_tensor *source,
                                     mp_panels **panels, mp_error *error);
/* Adds `count` matrices of experts with the layout of `w`; sources: [count]. Returns NULL if memory is exhausted: then
 * no panel of them is kept. */
mp_panels *mp_weight_store_add_experts(mp_weight_store *store, const mp_wmat *w, const mp_tensor *sources,
                                       int32_t count);
/* Starts to read the source pages, so that the first passes do not wait for them page by page. Returns at once. Call
 * after the last mp_weight_store_add_linear, at most once. Best effort: without a thread, passes read the pages they
 * use. The end of the store ends the thread after the chunk that it reads (4 MiB). A forked child does not continue. */
void mp_weight_store_fetch(mp_weight_store *store);
/* Frees everything and gives the charged bytes back. */
void mp_weight_store_deinit(mp_weight_store *store);

/* Bytes charged to the budget now. */
uint64_t mp_weight_store_bytes(const mp_weight_store *store);
/* Sets the facts of a model about its weights. */
void mp_weight_store_facts(const mp_weight_store *store, mp_model_base *base);
/* Returns true while a matrix of a linear layer has a panel that is not PACKED; once false, it stays false. */
static inline bool mp_weight_store_unpacked(const mp_weight_store *store) {
    return atomic_load_explicit(&store->unpacked, memory_order_acquire) > 0;
}
/* Returns true while passes take longer than later passes: they pack matrices, or wait for pages of the file. */
static inline bool mp_weight_store_warming(const mp_weight_store *store) {
    return mp_weight_store_unpacked(store) &&
           (!store->mapped || atomic_load_explicit(&store->fetching, memory_order_relaxed));
}
/* Returns the time that a pass of many rows may take, given its budget and the time of a row. While matrices are
 * unpacked, the result is at least the time of 256 rows or 1.5 s, whichever is shorter: every pass reads all matrices
 * and packs their panels, which takes as long as the products of dozens of rows. */
uint64_t mp_weight_store_pass_ns(const mp_weight_store *store, uint64_t budget_ns, uint64_t row_ns);

/* Call before and after each pass of M rows. The time budgets begin with it, and no copy is dropped until its end.
 * mp_weight_store_end returns true if any pass has packed a panel since `packed`, the result of
 * mp_weight_store_begin. */
enum { MP_DECODE_ROWS = 8 };
uint64_t mp_weight_store_begin(mp_weight_store *store, int M);
bool mp_weight_store_end(mp_weight_store *store, uint64_t packed);
/* The same for a thread that only packs. */
void mp_weight_store_enter(mp_weight_store *store);
void mp_weight_store_leave(mp_weight_store *store);
/* Frees all copies of experts, unless a pass is in progress. Returns the bytes freed. */
uint64_t mp_weight_store_drop(mp_weight_store *store);

/* Call after a pass. unpacked: it used panels of linear layers that were not PACKED. Returns true if the files are
 * those that were loaded. Once it has returned false, it always returns false, and mp_weight_store_corrupted returns
 * true: packed panels may be wrong. */
bool mp_weight_store_sound(mp_weight_store *store, bool unpacked);
static inline bool mp_weight_store_corrupted(const mp_weight_store *store) {
    return atomic_load_explicit(&store->corrupted, memory_order_relaxed);
}

/* Reports that the stored rows of a panel of an expert were multiplied in `ns`. */
void mp_weight_store_note_stored(mp_weight_store *store, uint64_t ns);
/* Returns true if an expert is pending and idle workers have time to pack it. */
bool mp_weight_store_has_pending(const mp_weight_store *store);
/* Call after an attempt to pack a pending expert. packed: true clears its mark. False: the budget refused its memory,
 * so all marks and the time of idle workers are cleared. */
void mp_weight_store_end_pending(mp_panels *panels, int expert, bool packed);

#endif
