/* late_threads.h: makes one thread of every parallel region late, so that a missing barrier changes results in every
 * run and not only under an unlucky schedule. */
#ifndef LATE_THREADS_H
#define LATE_THREADS_H

/* From now on, after each barrier and at the start of each region, thread `index` continues only when all other threads
 * have reached their next barrier or the end of the region. They do not wait for it until then: threads wait for each
 * other at barriers only. -1: no thread is late, the default. The caller's regions must run one at a time, with at most
 * eight threads. In every second region, each thread computes one share of each loop (mp_team_next), in turns. In
 * the others, they take rows one by one (mp_team_rows). */
void late_thread(int index);
/* For tests that run with 1, 2, 3, ... threads: the first of two threads is late, the last of three; with any other
 * number none. */
static inline void late_thread_of(int threads) { late_thread(threads == 2 ? 0 : threads == 3 ? 2 : -1); }
/* Returns the number of barriers that the late thread has met since the last call. */
int late_thread_barriers(void);
/* Returns the number of calls of mp_lease_poll outside base/team.c since the last call. A model that polls too
 * rarely passes for hung, and is cancelled late. */
int lease_polls(void);

#endif
