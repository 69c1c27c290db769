/* convert.c: see convert.h. */
#include "python/convert.h"

bool mp_count_in(mp_state *state, const char *name, const mp_entry_count *count, int64_t low, int64_t high) {
    const int64_t n = count->n < 0 ? 0 : count->n;
    if (n >= low && n <= high)
        return true;
    mp_raise_new(state, MP_INVALID_ARGUMENT, "`%s` must be %lld to %lld, got %lld%s%s%s", name, (long long)low,
                 (long long)high, (long long)n, count->name ? ", counted in `" : "", count->name ? count->name : "",
                 count->name ? "`" : "");
    return false;
}

/* The number of entries is times * count->n + plus. */
static bool count_entries(mp_state *state, const char *name, Py_ssize_t entries, int times, mp_entry_count *count,
                          int plus) {
    const int64_t found = entries < plus ? -1 : (entries - plus) / times;
    if (found < 0 || found * times + plus != entries) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "`%s` must have a multiple of %d entries, plus %d, got %zd", name,
                     times, plus, entries);
        return false;
    }
    if (count->n >= 0 && count->n != found) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "`%s` must have %lld entries, to go with `%s`, got %zd", name,
                     (long long)(count->n * times + plus), count->name, entries);
        return false;
    }
    *count = (mp_entry_count){found, count->name ? count->name : name};
    return true;
}

PyObject *mp_entries_in(mp_state *state, PyObject *object, int type, const char *name, int times, mp_entry_count *count,
                        int plus) {
    PyArrayObject *array = mp_array_in(state, object, type, name);
    if (array && !count_entries(state, name, PyArray_DIM(array, 0), times, count, plus))
        Py_CLEAR(array);
    return (PyObject *)array;
}

const void *mp_data_in(mp_state *state, PyObject *object, int type, const char *name, int times, mp_entry_count *count,
                       int plus, PyObject **made, bool *ok) {
    if (!*ok)
        return NULL;
    *made = mp_entries_in(state, object, type, name, times, count, plus);
    *ok = *made != NULL;
    return *ok ? PyArray_DATA((PyArrayObject *)*made) : NULL;
}

PyObject *mp_tuple_in(PyObject *sequence, const char *message) {
    PyObject *tuple = PySequence_Tuple(sequence);
    if (!tuple && PyErr_ExceptionMatches(PyExc_TypeError))
        PyErr_SetString(PyExc_TypeError, message);
    return tuple;
}

static PyObject *list_in(mp_state *state, PyObject *object, const char *name, mp_entry_count *count) {
    if (!object || PyBytes_Check(object) || PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "keyword argument `%s` must be given, as a sequence that is not one string",
                     name);
        return NULL;
    }
    PyObject *list = mp_tuple_in(object, "a sequence is needed");
    if (list && !count_entries(state, name, PyTuple_Size(list), 1, count, 0))
        Py_CLEAR(list);
    return list;
}

int32_t *mp_list_in_int32_t(mp_state *state, PyObject *object, const char *name, int64_t low, int64_t high,
                            mp_entry_count *count) {
    PyObject *list = list_in(state, object, name, count);
    int32_t *items = list ? PyMem_Calloc((size_t)count->n + 1, sizeof *items) : NULL;
    bool ok = items || (list && PyErr_NoMemory());
    for (int64_t i = 0; ok && i < count->n; i++) {
        long value = PyLong_AsLong(PyTuple_GetItem(list, i));
        ok = !(value == -1 && PyErr_Occurred());
        if (ok && (value < low || value > high)) {
            mp_raise_new(state, MP_INVALID_ARGUMENT, "`%s[%lld]` must be %lld to %lld, got %ld", name, (long long)i,
                         (long long)low, (long long)high, value);
            ok = false;
        }
        items[i] = (int32_t)value;
    }
    Py_XDECREF(list);
    if (ok)
        return items;
    PyMem_Free(items);
    return NULL;
}

float *mp_list_in_float(mp_state *state, PyObject *object, const char *name, mp_entry_count *count) {
    PyObject *list = list_in(state, object, name, count);
    float *items = list ? PyMem_Calloc((size_t)count->n + 1, sizeof *items) : NULL;
    bool ok = items || (list && PyErr_NoMemory());
    for (int64_t i = 0; ok && i < count->n; i++) {
        double value = PyFloat_AsDouble(PyTuple_GetItem(list, i));
        ok = !(value == -1.0 && PyErr_Occurred());
        items[i] = (float)value;
    }
    Py_XDECREF(list);
    if (ok)
        return items;
    PyMem_Free(items);
    return NULL;
}

PyObject *mp_strings_in(mp_state *state, PyObject *object, const char *name, mp_string_list *out,
                        mp_entry_count *count) {
    PyObject *list = list_in(state, object, name, count);
    if (!list)
        return NULL;
    out->text = PyMem_Calloc((size_t)count->n + 1, sizeof *out->text);
    out->bytes = PyMem_Calloc((size_t)count->n + 1, sizeof *out->bytes);
    bool ok = (out->text && out->bytes) || PyErr_NoMemory();
    for (int64_t i = 0; ok && i < count->n; i++) {
        char *text;
        Py_ssize_t bytes;
        ok = PyBytes_AsStringAndSize(PyTuple_GetItem(list, i), &text, &bytes) == 0;
        out->text[i] = ok ? text : NULL;
        out->bytes[i] = !ok ? 0 : bytes > INT32_MAX ? INT32_MAX : (int32_t)bytes;
    }
    if (!ok)
        Py_CLEAR(list);
    return list;
}
