/* released_fixture.h: the ranges of pages that a release gives back. Needs the seam build. */
#ifndef RELEASED_FIXTURE_H
#define RELEASED_FIXTURE_H

#include "base/sys.h"

#ifdef MP_SEAM
static uintptr_t released_from, released_to;
static int released_ranges;

/* For mp_sys_table.madvise. */
static inline int record_advice(void *data, size_t bytes, int advice) {
    released_from = (uintptr_t)data, released_to = (uintptr_t)data + bytes;
    released_ranges++;
    return mp_sys_real.madvise(data, bytes, advice);
}
#endif

#endif
