/* sim_atomic.h: included first in the files of the registry and in base/event_count.c, in the simulator's build. Every
 * atomic operation becomes a point at which another thread may run, and is sequentially consistent, because the
 * simulator runs one thread at a time. Relaxed additions and subtractions are counters, not scheduling points. */
#ifndef TESTS_SIM_ATOMIC_H
#define TESTS_SIM_ATOMIC_H

#include <stdatomic.h>

#include "base/sys.h"

void sim_atomic_point(void);
#define SIM_ATOMIC(object)            (MP_SEAM_AT(#object), sim_atomic_point())
#define SIM_ATOMIC_ADD(object, order) ((order) == memory_order_relaxed ? (void)0 : SIM_ATOMIC(object))

#undef atomic_load
#undef atomic_load_explicit
#undef atomic_store
#undef atomic_store_explicit
#undef atomic_exchange_explicit
#undef atomic_fetch_add_explicit
#undef atomic_fetch_sub_explicit
#undef atomic_compare_exchange_strong_explicit
/* clang-format off */
#define atomic_load(object) (SIM_ATOMIC(object), __atomic_load_n(object, __ATOMIC_SEQ_CST))
#define atomic_load_explicit(object, order) atomic_load(object)
#define atomic_store(object, value) \
    (SIM_ATOMIC(object), __atomic_store_n(object, value, __ATOMIC_SEQ_CST))
#define atomic_store_explicit(object, value, order) atomic_store(object, value)
/* clang-format on */
#define atomic_exchange_explicit(object, value, order) \
    (SIM_ATOMIC(object), __atomic_exchange_n(object, value, __ATOMIC_SEQ_CST))
#define atomic_fetch_add_explicit(object, value, order) \
    (SIM_ATOMIC_ADD(object, order), __atomic_fetch_add(object, value, __ATOMIC_SEQ_CST))
#define atomic_fetch_sub_explicit(object, value, order) \
    (SIM_ATOMIC_ADD(object, order), __atomic_fetch_sub(object, value, __ATOMIC_SEQ_CST))
#define atomic_compare_exchange_strong_explicit(object, expected, value, success, failure) \
    (SIM_ATOMIC(object),                                                                   \
     __atomic_compare_exchange_n(object, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))

#endif
