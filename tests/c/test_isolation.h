/* test_isolation.h: options that start the test runner as its own worker process (test_isolation_child.c). */
#ifndef TEST_ISOLATION_H
#define TEST_ISOLATION_H

#include "isolation/isolation.h"

/* Returns options that start this program again. `what` chooses what the child does: "spec": mp_isolation_main; "exit":
 * exit with code 7; "sleep": never report; "ready<n>": report status n as the result of its start, then sleep. */
mp_isolation_options isolation_options(const char *what);

#endif
