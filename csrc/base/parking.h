/* parking.h: mp_park for systems without futexes. The address of a word selects one of 64 pairs of a lock and a
 * condition variable. Used by sys.c only. */
#ifndef MP_BASE_PARKING_H
#define MP_BASE_PARKING_H

#include <stdatomic.h>
#include <stdint.h>

/* Wait at most timeout_ns (0 = no limit) while the value of the word is `expected`. May return spuriously: words share
 * condition variables. Takes a leaf lock. */
void mp_parking_wait(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns);
/* Wake all threads that wait on the word. Change the word first. */
void mp_parking_wake(_Atomic uint32_t *word);
/* Make new locks. Call in a forked child, on its only thread. */
void mp_parking_fork_child(void);

#endif
