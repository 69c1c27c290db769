/* require.h: the base of every fuzz target: a condition that must hold for every input. */
#ifndef FUZZ_REQUIRE_H
#define FUZZ_REQUIRE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline void require_failed(const char *file, int line, const char *condition) {
    fprintf(stderr, "%s:%d: %s is false\n", file, line, condition);
    __builtin_trap();
}
#define REQUIRE(condition)                                   \
    do {                                                     \
        if (!(condition))                                    \
            require_failed(__FILE__, __LINE__, #condition);  \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
