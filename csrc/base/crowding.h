/* crowding.h: detect that other processes need the CPUs, so that threads spin less. */
#ifndef MP_BASE_CROWDING_H
#define MP_BASE_CROWDING_H

/* Involuntary context switches per second: a machine is crowded from the first rate on, until below the second. */
enum { MP_CROWDED_FROM = 100, MP_CROWDED_UNTIL = 25 };

/* Rate of involuntary context switches of the calling thread, measured over its last 10 ms or more. Negative before the
 * first measurement; 0 where the system does not count them. */
double mp_crowding_rate(void);

#endif
