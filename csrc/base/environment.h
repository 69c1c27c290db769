/* environment.h: environment variables for a library that reads them while it is being opened.
 *
 * setenv moves the array that getenv reads in other threads, and C has no lock against that. So an override makes a
 * second, complete array and swaps the process's pointer to it: a getenv in another thread reads one whole array or the
 * other. Arrays are never freed, because a reader may still be inside one; a later override of the same environment
 * uses the same array again. */
#ifndef MP_BASE_ENVIRONMENT_H
#define MP_BASE_ENVIRONMENT_H

#include "base/error.h"

enum { MP_ENVIRONMENT_MOST = 4 };

typedef struct mp_environment_override { /* caller's storage */
    struct mp_environment_array *array;
    char **before;                             /* the process's array until the override */
    const char *variables[MP_ENVIRONMENT_MOST]; /* "NAME=value" */
    char *old[MP_ENVIRONMENT_MOST];            /* entry of the same name before; NULL: was not set */
    int variable_count;
} mp_environment_override;

/* Set variables ("NAME=value", string constants) for the whole process until mp_environment_override_end. One thread at
 * a time. MEMORY_EXHAUSTED: nothing was changed. */
mp_status mp_environment_override_begin(mp_environment_override *self, const char *const *variables, int count,
                                        mp_error *error);
/* Restore the environment. A change that another thread made with setenv in between is kept. */
void mp_environment_override_end(mp_environment_override *self);
/* Restore the environment in a forked child, whose parent was overriding it in another thread at any point. */
void mp_environment_override_fork_child(mp_environment_override *self);

#endif
