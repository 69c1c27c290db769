/* type_spec.c: Spec, a model spec under construction (files/spec.h). */
#include <math.h>
#include <string.h>

#include "models/model.h"
#include "python/binding.h"

typedef struct spec_object {
    PyObject_HEAD mp_spec *spec;
    bool frozen; /* set when the spec is registered, or used by a Matrix or as a draft model: the core then shares it */
} spec_object;

PyObject *mp_spec_object(mp_state *state, mp_spec *spec) {
    spec_object *self = (spec_object *)PyType_GenericAlloc(state->spec_type, 0);
    if (!self) {
        mp_spec_unpin(spec);
        return NULL;
    }
    self->spec = spec;
    return (PyObject *)self;
}

static PyObject *spec_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"architecture", NULL};
    const char *architecture;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:Spec", names, &architecture))
        return NULL;
    mp_state *state = mp_state_of_type(type);
    mp_spec *spec = mp_spec_create();
    if (!spec)
        return PyErr_NoMemory();
    mp_error error;
    if (mp_spec_set_architecture(spec, architecture, &error) != MP_OK) {
        mp_spec_unpin(spec);
        return mp_raise(state, &error, NULL);
    }
    return mp_spec_object(state, spec);
}

static void spec_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    mp_spec_unpin(((spec_object *)object)->spec);
    PyObject_Free(object);
    Py_DECREF(type);
}

mp_spec *mp_spec_freeze_object(mp_state *state, PyObject *object) {
    if (!PyObject_TypeCheck(object, state->spec_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Spec, got %R", (PyObject *)Py_TYPE(object));
        return NULL;
    }
    spec_object *self = (spec_object *)object;
    MP_BEGIN_EXCLUSIVE(object);
    if (!self->frozen)
        mp_spec_freeze(self->spec);
    self->frozen = true;
    MP_END_EXCLUSIVE();
    return self->spec;
}

/* A change of the spec; apply() refuses it if the spec is frozen. */
typedef struct change {
    mp_status (*apply)(mp_spec *spec, const void *what, mp_error *error);
    const void *what;
} change;

static PyObject *apply(PyObject *object, change change) {
    spec_object *self = (spec_object *)object;
    mp_error error;
    mp_status status;
    MP_BEGIN_EXCLUSIVE(object);
    if (self->frozen)
        status = mp_fail(&error, MP_INVALID_ARGUMENT,
                         "the spec was registered, or used by a Matrix or as a draft model, and can no longer be "
                         "changed; create a new one");
    else
        status = change.apply(self->spec, change.what, &error);
    MP_END_EXCLUSIVE();
    if (status != MP_OK)
        return mp_raise(mp_state_of(object), &error, NULL);
    Py_RETURN_NONE;
}

/* --- files and tensors --- */

static mp_status add_file(mp_spec *spec, const void *path, mp_error *error) {
    return mp_spec_add_file(spec, path, error);
}

static PyObject *spec_add_file(PyObject *self, PyObject *path) {
    PyObject *bytes;
    if (!PyUnicode_FSConverter(path, &bytes))
        return NULL;
    PyObject *result = apply(self, (change){add_file, PyBytes_AsString(bytes)});
    Py_DECREF(bytes);
    return result;
}

/* Get the identity of a file from a dictionary of stamps (mpool/models/files.py). Returns 1 if it is there, 0 if not,
 * -1 with an exception. */
static int find_stamp(PyObject *stamps, const char *file, mp_file_id *id) {
    uint64_t numbers[4] = {0};
    PyObject *path = PyUnicode_DecodeFSDefault(file);
    PyObject *stamp = path ? PyDict_GetItemWithError(stamps, path) : NULL; /* borrowed */
    Py_XDECREF(path);
    if (!stamp || !PyTuple_Check(stamp) || PyTuple_Size(stamp) != 4)
        return PyErr_Occurred() ? -1 : 0;
    for (Py_ssize_t i = 0; i < 4; i++)
        numbers[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(stamp, i));
    *id = (mp_file_id){.device = numbers[0], .inode = numbers[1], .size = numbers[2], .mtime_ns = numbers[3]};
    return PyErr_Occurred() ? -1 : 1;
}

static PyObject *spec_note_files(PyObject *self, PyObject *stamps) {
    const mp_spec *spec = ((spec_object *)self)->spec;
    if (!PyDict_Check(stamps))
        return PyErr_Format(PyExc_TypeError, "stamps must be a dict");
    for (int i = 0; i < mp_spec_file_count(spec); i++) {
        mp_file_id id;
        const int found = find_stamp(stamps, mp_spec_file(spec, i), &id);
        if (found < 0)
            return NULL;
        if (found)
            mp_spec_same_file(spec, i, &id);
    }
    mp_spec_note_files(spec);
    Py_RETURN_NONE;
}

static mp_status add_tensor(mp_spec *spec, const void *entry, mp_error *error) {
    return mp_spec_add_tensor(spec, entry, error);
}

static PyObject *spec_add_tensor(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"name", "dtype", "shape", "file", "offset", "nbytes", NULL};
    mp_state *state = mp_state_of(self);
    const char *name, *dtype;
    PyObject *shape, *offset, *nbytes;
    int file;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ssOiOO:add_tensor", names, &name, &dtype, &shape, &file, &offset,
                                     &nbytes))
        return NULL;
    mp_tensor_entry entry = {.name = name, .file = file};
    if (!mp_dtype_from_name(dtype, &entry.dtype))
        return mp_raise_new(state, MP_FORMAT, "%s: there is no storage type \"%s\"", name, dtype);
    entry.offset = PyLong_AsUnsignedLongLong(offset);
    if (!PyErr_Occurred())
        entry.nbytes = PyLong_AsUnsignedLongLong(nbytes);
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return NULL;
        PyErr_Clear();
        return mp_raise_new(state, MP_FORMAT, "%s: `offset` and `nbytes` must be from 0 to 2^64 - 1", name);
    }
    PyObject *list = mp_tuple_in(shape, "`shape` must be a sequence");
    if (!list)
        return NULL;
    Py_ssize_t ndim = PyTuple_Size(list);
    if (ndim > MP_MAX_DIMS) {
        Py_DECREF(list);
        return mp_raise_new(state, MP_FORMAT, "%s must have 1 to %d dimensions, got %zd", name, MP_MAX_DIMS, ndim);
    }
    entry.ndim = (int32_t)ndim;
    for (Py_ssize_t i = 0; i < ndim && !PyErr_Occurred(); i++)
        entry.shape[i] = PyLong_AsLongLong(PyTuple_GetItem(list, i));
    Py_DECREF(list);
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return NULL;
        PyErr_Clear();
        return mp_raise_new(state, MP_FORMAT, "%s: each dimension must be below 2^63", name);
    }
    return apply(self, (change){add_tensor, &entry});
}

/* --- values --- */

typedef struct keyed_value {
    const char *key;
    mp_value value;
} keyed_value;

static mp_status set_value(mp_spec *spec, const void *what, mp_error *error) {
    const keyed_value *entry = what;
    return mp_spec_set(spec, entry->key, &entry->value, error);
}

/* Value type of a Python object, or -1 with TypeError. */
static int kind_of(const char *key, PyObject *object) {
    if (PyBool_Check(object))
        return MP_VALUE_BOOL;
    if (PyLong_Check(object))
        return MP_VALUE_INT;
    if (PyFloat_Check(object))
        return MP_VALUE_FLOAT;
    if (PyUnicode_Check(object) || PyBytes_Check(object))
        return MP_VALUE_STRING;
    PyErr_Format(PyExc_TypeError,
                 "%s: a value must be a bool, int, float, str, bytes or a list of one of these, got %R", key,
                 (PyObject *)Py_TYPE(object));
    return -1;
}

static bool int_in(const char *key, PyObject *object, int64_t *out) {
    *out = PyLong_AsLongLong(object);
    if (*out != -1 || !PyErr_Occurred())
        return true;
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: an int must fit 64 bits with its sign, got %R", key, object);
    }
    return false;
}

/* Borrow the bytes of a str or bytes object. Returns false with an exception. */
static bool bytes_in(PyObject *object, const char **text, Py_ssize_t *length) {
    if (PyUnicode_Check(object))
        return (*text = PyUnicode_AsUTF8AndSize(object, length)) != NULL;
    *text = PyBytes_AsString(object);
    *length = PyBytes_Size(object);
    return true;
}

static bool scalar_in(const char *key, PyObject *object, int kind, mp_value *out) {
    Py_ssize_t length;
    *out = (mp_value){.type = (mp_value_type)kind, .gguf_type = -1, .count = 1};
    switch (kind) {
    case MP_VALUE_BOOL:
        out->as.integer = object == Py_True;
        return true;
    case MP_VALUE_INT:
        return int_in(key, object, &out->as.integer);
    case MP_VALUE_FLOAT:
        out->as.real = PyFloat_AsDouble(object);
        return true;
    default:
        if (!bytes_in(object, &out->as.string, &length))
            return false;
        out->count = (uint64_t)length;
        return true;
    }
}

static bool number_in(PyObject *object, double *out) {
    *out = PyFloat_AsDouble(object);
    return *out != -1.0 || !PyErr_Occurred();
}

/* Fill `memory` with the numbers of a list of type `kind`. Returns false with an exception. */
static bool numbers_in(const char *key, PyObject *list, int kind, void *memory, mp_value *out) {
    for (uint64_t i = 0; i < out->count; i++) {
        PyObject *item = PyTuple_GetItem(list, (Py_ssize_t)i);
        int item_kind = kind_of(key, item);
        /* integers may appear in a list of floats */
        if (item_kind >= 0 && item_kind != kind && !(kind == MP_VALUE_FLOAT && item_kind == MP_VALUE_INT))
            PyErr_Format(PyExc_TypeError, "%s: the values of a list must have one type, item %llu has the type %R", key,
                         (unsigned long long)i, (PyObject *)Py_TYPE(item));
        if (PyErr_Occurred())
            return false;
        if (kind == MP_VALUE_BOOL)
            ((uint8_t *)memory)[i] = item == Py_True;
        else if (kind == MP_VALUE_INT ? !int_in(key, item, &((int64_t *)memory)[i])
                                      : !number_in(item, &((double *)memory)[i]))
            return false;
    }
    switch (kind) {
    case MP_VALUE_BOOL:
        out->type = MP_VALUE_BOOLS;
        out->as.bools = memory;
        break;
    case MP_VALUE_INT:
        out->type = MP_VALUE_INTS;
        out->as.integers = memory;
        break;
    default:
        out->type = MP_VALUE_FLOATS;
        out->as.reals = memory;
    }
    return true;
}

/* Copy the strings of a list to one allocation: offsets [count + 1], then the bytes. The caller frees it with
 * PyMem_Free. Returns NULL with an exception. */
static void *strings_in(const char *key, PyObject *list, mp_value *out) {
    size_t total = 0, table = (out->count + 1) * sizeof(uint64_t);
    const char *text;
    Py_ssize_t length;
    for (uint64_t i = 0; i < out->count; i++) {
        PyObject *item = PyTuple_GetItem(list, (Py_ssize_t)i);
        if (!PyUnicode_Check(item) && !PyBytes_Check(item)) {
            PyErr_Format(PyExc_TypeError, "%s: the values of a list must have one type, item %llu has the type %R", key,
                         (unsigned long long)i, (PyObject *)Py_TYPE(item));
            return NULL;
        }
        if (!bytes_in(item, &text, &length))
            return NULL;
        total += (size_t)length;
    }
    uint8_t *memory = PyMem_Malloc(table + total + 1);
    if (!memory)
        return PyErr_NoMemory();
    uint64_t *offsets = (uint64_t *)(void *)memory;
    offsets[0] = 0;
    for (uint64_t i = 0; i < out->count; i++) {
        if (!bytes_in(PyTuple_GetItem(list, (Py_ssize_t)i), &text, &length)) {
            PyMem_Free(memory);
            return NULL;
        }
        memcpy(memory + table + offsets[i], text, (size_t)length);
        offsets[i + 1] = offsets[i] + (uint64_t)length;
    }
    out->type = MP_VALUE_STRINGS;
    out->as.strings.bytes = (const char *)memory + table;
    out->as.strings.offsets = offsets;
    return memory;
}

static PyObject *set_list(PyObject *self, const char *key, PyObject *object) {
    /* Copy to a tuple: another thread may change the given list. */
    PyObject *list = PySequence_Tuple(object), *result = NULL;
    if (!list)
        return NULL;
    keyed_value entry = {key, {.gguf_type = -1, .count = (uint64_t)PyTuple_Size(list)}};
    int kind = entry.value.count ? kind_of(key, PyTuple_GetItem(list, 0)) : MP_VALUE_INT;
    for (uint64_t i = 0; kind == MP_VALUE_INT && i < entry.value.count; i++)
        if (PyFloat_Check(PyTuple_GetItem(list, (Py_ssize_t)i)))
            kind = MP_VALUE_FLOAT;
    void *memory = NULL;
    bool ok = false;
    if (kind == MP_VALUE_STRING) {
        ok = (memory = strings_in(key, list, &entry.value)) != NULL;
    } else if (kind >= 0) {
        memory = PyMem_Calloc(entry.value.count + 1, sizeof(int64_t));
        ok = memory ? numbers_in(key, list, kind, memory, &entry.value) : PyErr_NoMemory() != NULL;
    }
    if (ok)
        result = apply(self, (change){set_value, &entry});
    PyMem_Free(memory);
    Py_DECREF(list);
    return result;
}

static PyObject *spec_set(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"key", "value", NULL};
    const char *key;
    PyObject *object;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO:set", names, &key, &object))
        return NULL;
    if (PyList_Check(object) || PyTuple_Check(object))
        return set_list(self, key, object);
    keyed_value entry = {.key = key};
    int kind = kind_of(key, object);
    if (kind < 0 || !scalar_in(key, object, kind, &entry.value))
        return NULL;
    return apply(self, (change){set_value, &entry});
}

/* --- tokens --- */

static mp_status set_tokens(mp_spec *spec, const void *tokens, mp_error *error) {
    return mp_spec_set_tokens(spec, tokens, error);
}

static PyObject *spec_set_tokens(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"data", "offsets", "control", "eog", NULL};
    mp_state *state = mp_state_of(self);
    Py_buffer data, control;
    PyObject *offsets_in, *eog_in, *result = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*Oy*O:set_tokens", names, &data, &offsets_in, &control, &eog_in))
        return NULL;
    PyArrayObject *offsets = mp_array_in(state, offsets_in, NPY_INT64, "offsets");
    PyArrayObject *eog = offsets ? mp_array_in(state, eog_in, NPY_INT32, "eog") : NULL;
    npy_intp count = offsets ? PyArray_DIM(offsets, 0) - 1 : 0;
    if (eog && (count < 0 || count > INT32_MAX || control.len != count)) {
        mp_raise_new(state, MP_INVALID_ARGUMENT,
                     "`offsets` and `control` must have n + 1 and n entries for n tokens, got %zd and %zd", count + 1,
                     control.len);
    } else if (eog) {
        const int64_t *ends = PyArray_DATA(offsets);
        bool ok = ends[0] == 0 && ends[count] == data.len;
        for (npy_intp i = 0; ok && i < count; i++)
            ok = ends[i + 1] >= ends[i];
        if (ok) {
            mp_token_table tokens = {.count = (int32_t)count,
                                     .bytes = data.buf,
                                     .offsets = (const uint64_t *)ends,
                                     .control = control.buf,
                                     .eog_count = (int32_t)PyArray_DIM(eog, 0),
                                     .eog = PyArray_DATA(eog)};
            result = apply(self, (change){set_tokens, &tokens});
        } else {
            mp_raise_new(state, MP_INVALID_ARGUMENT,
                         "`offsets` must start at 0, never decrease and end at the length of `data`, %zd", data.len);
        }
    }
    Py_XDECREF((PyObject *)offsets);
    Py_XDECREF((PyObject *)eog);
    PyBuffer_Release(&data);
    PyBuffer_Release(&control);
    return result;
}

/* --- draft model --- */

static mp_status set_draft(mp_spec *spec, const void *draft, mp_error *error) {
    return mp_spec_set_draft(spec, *(mp_spec *const *)draft, error);
}

static PyObject *spec_set_draft(PyObject *self, PyObject *draft) {
    mp_spec *spec = mp_spec_freeze_object(mp_state_of(self), draft);
    return spec ? apply(self, (change){set_draft, &spec}) : NULL;
}

static PyObject *spec_weights(PyObject *self, PyObject *none) {
    (void)none;
    mp_matrices weights;
    MP_BEGIN_EXCLUSIVE(self);
    weights = mp_model_predict_weights(((spec_object *)self)->spec, MP_COMPUTE_AUTO);
    MP_END_EXCLUSIVE();
    return PyUnicode_FromString(mp_matrices_name(weights));
}

static PyObject *spec_state_bytes(PyObject *self, PyObject *none) {
    (void)none;
    uint64_t bytes;
    MP_BEGIN_EXCLUSIVE(self);
    bytes = mp_model_predict_state(((spec_object *)self)->spec);
    MP_END_EXCLUSIVE();
    return PyLong_FromUnsignedLongLong(bytes);
}

static PyMethodDef methods[] = {
    {"add_file", spec_add_file, METH_O, "Add a weight file; tensors refer to it by its index."},
    {"note_files", spec_note_files, METH_O,
     "Store the identity of all files, so that a load refuses others: that of their stamps in a dict by path, else "
     "that of now. Call after add_file."},
    {"add_tensor", MP_METHOD(spec_add_tensor), METH_VARARGS | METH_KEYWORDS,
     "Add a tensor: its type, shape and place in a file."},
    {"set", MP_METHOD(spec_set), METH_VARARGS | METH_KEYWORDS,
     "Set a key: bool, int, float, str, bytes or a list of one type."},
    {"set_tokens", MP_METHOD(spec_set_tokens), METH_VARARGS | METH_KEYWORDS,
     "Set the bytes that each token adds to the text."},
    {"set_draft", spec_set_draft, METH_O,
     "Set the spec of the draft model, which can then no longer be changed."},
    {"weights", spec_weights, METH_NOARGS, "Predict how a model in this process uses its weights after its load."},
    {"state_bytes", spec_state_bytes, METH_NOARGS, "Predict the bytes of the state of a sequence in recurrent layers."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A model spec under construction: files, values, tensors, tokens."},
    {Py_tp_new, spec_new},
    {Py_tp_dealloc, spec_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec mp_spec_type_spec = {
    .name = "mpool._core.Spec", .basicsize = sizeof(spec_object), .flags = Py_TPFLAGS_DEFAULT, .slots = slots};
