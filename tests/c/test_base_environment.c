/* test_base_environment.c: base/environment.h. */
#include <stdlib.h>

#include "base/environment.h"
#include "mp_test.h"

extern char **environ;

static const char *const variables[] = {"MP_TEST_ONE=1", "MP_TEST_TWO=2"};

MP_TEST(base_environment_override_sets_and_restores) {
    mp_environment_override override;
    mp_error error;
    setenv("MP_TEST_ONE", "before", 1);
    unsetenv("MP_TEST_TWO");
    char **array = environ;
    for (int i = 0; i < 3; i++) {
        MP_CHECK_OK(mp_environment_override_begin(&override, variables, 2, &error), &error);
        MP_CHECK(environ != array);
        MP_CHECK_STR(getenv("MP_TEST_ONE"), "1");
        MP_CHECK_STR(getenv("MP_TEST_TWO"), "2");
        MP_CHECK(getenv("PATH") != NULL);
        mp_environment_override_end(&override);
        MP_CHECK(environ == array);
        MP_CHECK_STR(getenv("MP_TEST_ONE"), "before");
        MP_CHECK(!getenv("MP_TEST_TWO"));
    }
}

/* setenv during the override, as another thread might call it: adding a variable moves the array `environ`, replacing
 * one does not. */
MP_TEST(base_environment_override_keeps_changes_by_others) {
    mp_environment_override override;
    mp_error error;
    setenv("MP_TEST_ONE", "before", 1);
    setenv("MP_TEST_OLD", "old", 1);
    MP_CHECK_OK(mp_environment_override_begin(&override, variables, 2, &error), &error);
    setenv("MP_TEST_NEW", "new", 1);
    mp_environment_override_end(&override);
    MP_CHECK_STR(getenv("MP_TEST_NEW"), "new");
    MP_CHECK_STR(getenv("MP_TEST_ONE"), "before");
    MP_CHECK(!getenv("MP_TEST_TWO"));
    MP_CHECK_OK(mp_environment_override_begin(&override, variables, 2, &error), &error);
    setenv("MP_TEST_OLD", "newer", 1);
    unsetenv("MP_TEST_NEW");
    mp_environment_override_end(&override);
    MP_CHECK_STR(getenv("MP_TEST_OLD"), "newer");
    MP_CHECK(!getenv("MP_TEST_NEW"));
    MP_CHECK_STR(getenv("MP_TEST_ONE"), "before");
    MP_CHECK(!getenv("MP_TEST_TWO"));
    setenv("MP_TEST_LAST", "last", 1); /* the environment still works */
    MP_CHECK_STR(getenv("MP_TEST_LAST"), "last");
}
