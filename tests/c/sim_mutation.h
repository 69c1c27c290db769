/* sim_mutation.h: included first in the copies that build.py plants bugs and points into (mutations.py). */
#ifndef TESTS_SIM_MUTATION_H
#define TESTS_SIM_MUTATION_H

#include "base/sys.h"

#ifdef MP_SEAM
/* Number of the planted bug that is active; 0 = none. */
extern _Atomic int sim_armed;
static inline bool sim_mutation(int number) { return sim_armed == number; }
/* Let the simulator switch threads at this point. */
static inline void sim_yield(void) { mp_sys_table.point(); }
#endif

#endif
