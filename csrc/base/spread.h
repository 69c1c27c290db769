/* spread.h: keeps the compute threads of the process on different CPUs.
 *
 * With two compute threads on two CPUs and another program bound to one of them, the system considers both compute
 * threads on the other CPU as balanced, and may leave them so for seconds: they then have one CPU instead of one and a
 * half. A thread that is about to compute alone for milliseconds therefore moves away from a CPU on which another
 * compute thread does so. It shares that CPU with another program at worst, and is not bound to it: the system may move
 * it again at once. */
#ifndef MP_BASE_SPREAD_H
#define MP_BASE_SPREAD_H

/* Call before a piece of work of a millisecond or more during which no other thread waits for this one. Returns the CPU
 * that the thread occupies, for mp_spread_end; -1: none. Thread-safe. */
int mp_spread_begin(void);
/* Call after the work, on the same thread. */
void mp_spread_end(int cpu);

#endif
