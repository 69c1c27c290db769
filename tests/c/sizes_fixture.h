/* sizes_fixture.h: sizes, counts and predictions compared with recorded ones.
 *
 * A size that is too large, a number of operations or a predicted time changes no result, so other tests miss most
 * mistakes in them. The tests printed the recorded numbers after the formulas had been read. A mismatch prints the new
 * row: record it if the change is intended. */
#ifndef SIZES_FIXTURE_H
#define SIZES_FIXTURE_H

#include <stdio.h>

#include "mp_test.h"

/* Return true if the `count` numbers are the recorded ones; otherwise print them. */
static inline bool sizes_are(const char *what, const uint64_t *got, const uint64_t *recorded, int count) {
    if (memcmp(got, recorded, (size_t)count * sizeof *got) == 0)
        return true;
    fprintf(stderr, "%s: got {", what);
    for (int i = 0; i < count; i++)
        fprintf(stderr, "%s%llu", i > 0 ? ", " : "", (unsigned long long)got[i]);
    fprintf(stderr, "}\n");
    for (int i = 0; i < count; i++)
        if (got[i] != recorded[i])
            fprintf(stderr, "  number %d was %llu\n", i, (unsigned long long)recorded[i]);
    return false;
}

#endif
