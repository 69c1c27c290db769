/* errors.c: convert an mp_error to an exception class of mpool.errors, as status.def maps them. */
#include <stdarg.h>
#include <stdio.h> /* vsnprintf only */
#include <stdlib.h>
#include <string.h>

#include "files/weights.h"
#include "python/binding.h"

PyObject *mp_status_table(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    int count;
    const mp_status_row *rows = mp_status_rows(&count);
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++) {
        PyObject *row = Py_BuildValue("(issss)", (int)rows[i].code, rows[i].name, rows[i].text, rows[i].python_class,
                                      rows[i].builtin);
        if (!row) {
            Py_CLEAR(list);
            break;
        }
        PyList_SetItem(list, i, row);
    }
    return list;
}

static PyObject *error_class(mp_state *state, mp_status code) {
    if (!state->errors) {
        PyObject *errors = PyImport_ImportModule("mpool.errors");
        if (!errors)
            return NULL;
        if (state->errors)
            Py_DECREF(errors);
        else
            state->errors = errors;
    }
    return PyObject_GetAttrString(state->errors, mp_status_find(code)->python_class);
}

/* Decode a text from the core. Replaces invalid UTF-8, because paths and names may contain any bytes. */
static PyObject *text_of(const char *text) { return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace"); }

/* kwargs[name] = text, unless the text is empty. */
static bool put_text(PyObject *kwargs, const char *name, const char *text) {
    if (!text[0])
        return true;
    PyObject *value = text_of(text);
    bool ok = value && PyDict_SetItemString(kwargs, name, value) == 0;
    Py_XDECREF(value);
    return ok;
}

static bool put_int(PyObject *kwargs, const char *name, long long number) {
    PyObject *value = PyLong_FromLongLong(number);
    bool ok = value && PyDict_SetItemString(kwargs, name, value) == 0;
    Py_XDECREF(value);
    return ok;
}

/* Find the first whole number in a text: "at most 512" gives 512. */
static bool first_number(const char *text, long long *number) {
    const char *digit = text + strcspn(text, "0123456789");
    if (!*digit)
        return false;
    *number = strtoll(digit, NULL, 10);
    return true;
}

/* Add the structured fields of an error to the kwargs of its exception class. Leaves out empty fields. */
static bool put_details(PyObject *kwargs, const mp_error *error) {
    long long number;
    switch (error->code) {
    case MP_FORMAT:
        return put_text(kwargs, "file", error->file) &&
               (error->offset < 0 || put_int(kwargs, "offset", error->offset)) &&
               put_text(kwargs, "field", error->field) && put_text(kwargs, "got", error->got) &&
               put_text(kwargs, "allowed", error->allowed);
    case MP_INVALID_ARGUMENT:
    case MP_LIMIT:
        return put_text(kwargs, "param", error->field) && put_text(kwargs, "got", error->got) &&
               put_text(kwargs, "allowed", error->allowed);
    case MP_CONTEXT_OVERFLOW:
        return (!first_number(error->got, &number) || put_int(kwargs, "tokens", number)) &&
               (!first_number(error->allowed, &number) || put_int(kwargs, "limit", number));
    default:
        return true;
    }
}

PyObject *mp_raise(mp_state *state, const mp_error *error, const char *key) {
    const char *text = error->message[0] ? error->message : mp_status_find(error->code)->text;
    PyObject *type = error_class(state, error->code), *exception = NULL;
    PyObject *message = text_of(text), *args = message ? PyTuple_Pack(1, message) : NULL, *kwargs = PyDict_New();
    if (type && args && kwargs && put_details(kwargs, error) && put_text(kwargs, "hint", error->hint) &&
        put_text(kwargs, "key", key ? key : ""))
        exception = PyObject_Call(type, args, kwargs);
    /* the message names the file: the server does not show it to clients */
    if (exception && error->file[0] && PyObject_SetAttrString(exception, "_of_files", Py_True) != 0)
        Py_CLEAR(exception);
    if (exception && (error->code == MP_INTEGRITY || error->code == MP_IO) &&
        strcmp(error->field, MP_FIELD_OUTDATED) == 0 &&
        PyObject_SetAttrString(exception, "_outdated", Py_True) != 0)
        Py_CLEAR(exception);
    if (exception && error->code == MP_OVERLOADED && strcmp(error->field, MP_FIELD_MEMORY) == 0 &&
        PyObject_SetAttrString(exception, "_of_memory", Py_True) != 0)
        Py_CLEAR(exception);
    if (exception)
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    Py_XDECREF(exception);
    Py_XDECREF(kwargs);
    Py_XDECREF(args);
    Py_XDECREF(message);
    Py_XDECREF(type);
    return NULL;
}

PyObject *mp_raise_new(mp_state *state, mp_status code, const char *format, ...) {
    mp_error error;
    mp_error_clear(&error);
    error.code = code;
    va_list args;
    va_start(args, format);
    vsnprintf(error.message, sizeof(error.message), format, args);
    va_end(args);
    return mp_raise(state, &error, NULL);
}
