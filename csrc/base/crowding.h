/* crowding.h: detect that other processes need the CPUs, so that threads spin less. */
#ifndef MP_BASE_CROWDING_H
#define MP_BASE_CROWDING_H

/* Involuntary context switches per second: a machine counts as crowded above MP_CROWDED_FROM, until the rate falls
 * below MP_CROWDED_UNTIL. */
enum { MP_CROWDED_FROM = 100, MP_CROWDED_UNTIL = 25 };

/* Involuntary context switches per second of the calling thread, measured over an interval of at least 10 ms. Negative
 * before the first measurement; 0 where the system does not count them. */
double mp_crowding_rate(void);

#endif
