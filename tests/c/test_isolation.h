/* test_isolation.h: the test runner as its own worker process: what a child is started with, and kinds of models that
 * it can serve. */
#ifndef TEST_ISOLATION_H
#define TEST_ISOLATION_H

#include "isolation/isolation.h"

/* Options that start this program again: as mp_isolation_main ("spec"), or with the fakes of
 * test_isolation_fake.c ("fake"). */
mp_isolation_options isolation_options(const char *what);

#endif
