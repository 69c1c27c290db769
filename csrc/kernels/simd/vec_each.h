/* vec_each.h: reductions of several rows, for instruction sets that have no faster way.
 *
 * VEC_EACH_ROW defines `name`, which reduces N rows of 16 (N is 4 or 16) at p [N][16]. Lane r of its result is `one` of
 * row r. Include it after vec and vec_load are defined. */
#ifndef MP_KERNELS_SIMD_VEC_EACH_H
#define MP_KERNELS_SIMD_VEC_EACH_H

#define VEC_EACH_ROW(name, one)                              \
    static MP_INLINE vec name(const int N, const float *p) { \
        float y[VEC_N] = {0};                                \
        for (int r = 0; r < N; r++)                          \
            y[r] = one(vec_load(p + r * VEC_N));             \
        return vec_load(y);                                  \
    }

#endif
