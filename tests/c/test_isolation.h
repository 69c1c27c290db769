/* test_isolation.h: runs the test runner as its own worker process: options that start the child, and the kinds of
 * models that the child serves. */
#ifndef TEST_ISOLATION_H
#define TEST_ISOLATION_H

#include "isolation/isolation.h"

/* Options that start this program again: as mp_isolation_main ("spec"), or with the fake models of
 * test_isolation_fake.c ("fake"). */
mp_isolation_options isolation_options(const char *what);

#endif
