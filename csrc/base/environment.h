/* environment.h: set environment variables while a library that reads them is being opened.
 *
 * setenv may move the array that getenv reads in other threads, and C has no lock against that. An override therefore
 * builds a second, complete array and points `environ` to it: getenv in another thread reads either the old or the new
 * array, each complete. Arrays are never freed, because a thread may still be reading them; a later override of the
 * same environment reuses the array. */
#ifndef MP_BASE_ENVIRONMENT_H
#define MP_BASE_ENVIRONMENT_H

#include "base/error.h"

enum { MP_ENVIRONMENT_MAX = 4 };

typedef struct mp_environment_override { /* caller's storage */
    struct mp_environment_array *array;
    char **before;                             /* `environ` before the override */
    const char *variables[MP_ENVIRONMENT_MAX]; /* "NAME=value" */
    char *old[MP_ENVIRONMENT_MAX];             /* previous entry of each variable; NULL: was not set */
    int variable_count;
} mp_environment_override;

/* Set variables ("NAME=value", string constants) for the whole process until mp_environment_override_end. Only one
 * override may be active at a time. On MEMORY_EXHAUSTED nothing is changed. */
mp_status mp_environment_override_begin(mp_environment_override *self, const char *const *variables, int count,
                                        mp_error *error);
/* Restore the environment. A change that another thread made with setenv during the override is kept. */
void mp_environment_override_end(mp_environment_override *self);
/* Restore the environment in a forked child if another thread of the parent had this override active at the fork.
 * Otherwise do nothing. */
void mp_environment_override_fork_child(mp_environment_override *self);

#endif
