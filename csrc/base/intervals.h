/* intervals.h: lengths of time, and a share of memory, that limit one another. Each says what a change trades.
 *
 * Two more belong here in spirit and stand beside their code, because they depend on its loops: an idle worker packs in
 * slices of 2 ms (models/decoder/packing.c), and a pass packs panels for later passes for up to 300 ms
 * (models/nn/weight_store.c). */
#ifndef MP_BASE_INTERVALS_H
#define MP_BASE_INTERVALS_H

#define MP_MS 1000000ull /* nanoseconds */

/* --- the wait of a new request for a worker that computes ---
 * A request waits for the current step, or for one slice of optional work. */

/* Default of `step_budget`: longer steps cost less overhead, shorter ones let other requests in sooner. */
#define MP_STEP_BUDGET_NS (25 * MP_MS)
/* Largest `batch_wait`: requests that come within it share a pass, and the first one waits for all of it. */
#define MP_BATCH_WAIT_MAX_NS (2 * MP_MS)
/* A worker without requests begins optional work after this time: a busy program sends its next request sooner. */
#define MP_IMPROVE_FIRST_NS (5 * MP_MS)
/* Next attempt at optional work while requests are queued, other workers compute, or memory is short. */
#define MP_IMPROVE_AGAIN_NS (100 * MP_MS)

/* --- polls: conditions that no thread signals ---
 * A shorter interval ends a cancelled or expired wait sooner, and wakes the CPU more often. */

/* Calls of `give_up` while a thread waits for CPUs or memory; next admission after a shortage of memory. */
#define MP_POLL_NS (20 * MP_MS)
/* Waits for room in a queue and for grammar masks: deadlines are checked at least this often. */
#define MP_DEADLINE_POLL_NS (50 * MP_MS)
/* Next question for memory of a request that waits for memory before it is queued; also wakes for room. */
#define MP_MEMORY_POLL_NS (5 * MP_MS)
/* Maintenance while memory is critical: at least this often, because the system may kill the process next. */
#define MP_CRITICAL_POLL_NS (1 * MP_MS)
/* Checks of a worker process that it lives. Must be well below MP_CHILD_GAP_NS. */
#define MP_CHILD_POLL_NS (4 * MP_MS)
/* Silent time that one check may count: a larger gap means that this process did not run (it was stopped, or the
 * machine slept), not that the child is stuck. */
#define MP_CHILD_GAP_NS (20 * MP_MS)

/* --- tries after a failure: the first soon, then half as often each time --- */

/* Start of a worker after a death, and the next sweep after a refused allocation. */
#define MP_BACKOFF_FIRST_NS (100 * MP_MS)
#define MP_BACKOFF_MAX_NS (10000 * MP_MS)

/* --- other programs on the same CPUs ---
 * A judgement over less than a few time slices of the system's scheduler is a judgement of single switches. */

/* Shortest time over which lost CPU time and context switches are judged. */
#define MP_CROWDING_NS (10 * MP_MS)
/* Time before one more thread is tried; doubles whenever the last try had to be undone within it. */
#define MP_HOLD_FIRST_NS (100 * MP_MS)
#define MP_HOLD_MAX_NS (2000 * MP_MS)

/* --- memory ---
 * 1 / MP_SMALL_USE of the limit: with no more in use, the process counts as empty, so that the limit may be raised for
 * a single large model. A larger share takes a second, small model for nothing. */
enum { MP_SMALL_USE = 8 };

#endif
