/* convert.h: helpers that convert the arguments of requests. All set an exception and return NULL or false on failure.
 * The constructor of a request checks the bounds of numbers and items. */
#ifndef MP_PYTHON_CONVERT_H
#define MP_PYTHON_CONVERT_H

#include "python/binding.h"

typedef struct mp_entry_count {
    int64_t n;        /* -1 = not known */
    const char *name; /* name of the counted argument */
} mp_entry_count;

typedef struct mp_string_list {
    const char **text; /* borrowed from the list that mp_strings_in returns */
    int32_t *bytes;
} mp_string_list;

/* Check a count against its bounds. Raises INVALID_ARGUMENT, which names the counted argument. */
bool mp_count_in(mp_state *state, const char *name, const mp_entry_count *count, int64_t low, int64_t high);
/* Convert an object to a flat array of times * count->n + plus entries. Returns a new reference. If count->n is -1,
 * sets it from the array's length. */
PyObject *mp_entries_in(mp_state *state, PyObject *object, int type, const char *name, int times, mp_entry_count *count,
                        int plus);
/* As mp_entries_in, but puts the array into *made and returns its data. Does nothing and returns NULL unless *ok; sets
 * *ok to false on failure. */
const void *mp_data_in(mp_state *state, PyObject *object, int type, const char *name, int times, mp_entry_count *count,
                       int plus, PyObject **made, bool *ok);
/* Convert a sequence of numbers, and set count->n if it is -1. Free the result with PyMem_Free. */
int32_t *mp_list_in_int32_t(mp_state *state, PyObject *object, const char *name, int64_t low, int64_t high,
                            mp_entry_count *count);
float *mp_list_in_float(mp_state *state, PyObject *object, const char *name, mp_entry_count *count);
/* Convert a sequence of bytes objects. Returns a new reference to the list that owns the bytes. Free the arrays in *out
 * with PyMem_Free, even after a failure. */
PyObject *mp_strings_in(mp_state *state, PyObject *object, const char *name, mp_string_list *out,
                        mp_entry_count *count);

#endif
