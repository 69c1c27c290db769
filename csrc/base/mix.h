/* mix.h: an integer hash. */
#ifndef MP_BASE_MIX_H
#define MP_BASE_MIX_H

#include <stdint.h>

/* One step of splitmix64 from the state `value`: a bijection, so different inputs give different results. */
static inline uint64_t mp_mix(uint64_t value) {
    value += 0x9E3779B97F4A7C15u;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

#endif
