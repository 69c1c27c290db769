/* recorded_fixture.h: results of tiny models compared with recorded ones.
 *
 * Tests of the numeric contract compare mpool with itself, so a wrong constant passes them. The parity tests compare it
 * with other implementations, but they are slow, and only they tell whether a result is right. Recorded results connect
 * the two: they were recorded when the parity tests passed, and a change of any of them within a second shows that the
 * parity tests have to decide again. A mismatch prints the new value. */
#ifndef RECORDED_FIXTURE_H
#define RECORDED_FIXTURE_H

#include <math.h>
#include <stdio.h>

#include "mp_test.h"

/* float32 results are the same on every machine up to the C library's functions; int8 and bfloat16 round values that
 * differ in their last bit to different neighbours. */
#define RECORDED_FLOATS 2e-5
#define RECORDED_ROUNDED 4e-3

/* Return the sum of the values, each times its own random number of -1 to 1. *length: their Euclidean length. */
static inline double recorded_projection(const float *values, size_t count, double *length) {
    mp_test_random random = {12345};
    double sum = 0, squares = 0;
    for (size_t i = 0; i < count; i++) {
        sum += (double)values[i] * (double)mp_test_random_float(&random, -1, 1);
        squares += (double)values[i] * (double)values[i];
    }
    *length = sqrt(squares);
    return sum;
}

/* Compare values with the recorded projection. tolerance: a share of the values' Euclidean length. */
static inline bool recorded_is(const char *what, const float *values, size_t count, double recorded, double tolerance) {
    double length, got = recorded_projection(values, count, &length);
    if (fabs(got - recorded) <= tolerance * length) /* false if one is NaN */
        return true;
    fprintf(stderr, "%s: recorded %.7g, got %.7g\n", what, recorded, got);
    return false;
}

#endif
