/* type_gguf.c: GgufFile, the parsed header of a GGUF file. */
#include <string.h>

#include "files/gguf.h"
#include "python/binding.h"

typedef struct gguf_object {
    PyObject_HEAD mp_spec *spec; /* immutable after construction */
    PyObject *kv;                /* created on first use */
} gguf_object;

PyObject *mp_read_gguf(PyObject *module, PyObject *path) {
    mp_state *state = mp_state_of_module(module);
    PyObject *bytes;
    if (!PyUnicode_FSConverter(path, &bytes))
        return NULL;
    mp_spec *spec = NULL;
    mp_error error;
    mp_status status;
    const char *name = PyBytes_AsString(bytes);
    Py_BEGIN_ALLOW_THREADS
        status = mp_gguf_read(name, &spec, &error);
    Py_END_ALLOW_THREADS
    Py_DECREF(bytes);
    if (status != MP_OK)
        return mp_raise(state, &error, NULL);
    gguf_object *self = (gguf_object *)PyType_GenericAlloc(state->gguf_type, 0);
    if (!self) {
        mp_spec_unpin(spec);
        return NULL;
    }
    self->spec = spec;
    return (PyObject *)self;
}

static void gguf_dealloc(PyObject *object) {
    gguf_object *self = (gguf_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(self->kv);
    mp_spec_unpin(self->spec);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* --- values --- */

/* Returns a str, or bytes if the text is not valid UTF-8. */
static PyObject *string_out(const char *text, uint64_t length) {
    PyObject *string = PyUnicode_DecodeUTF8(text, (Py_ssize_t)length, "strict");
    if (string || !PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
        return string;
    PyErr_Clear();
    return PyBytes_FromStringAndSize(text, (Py_ssize_t)length);
}

static PyObject *string_at(const mp_value *value, uint64_t i, bool as_bytes) {
    const uint64_t *offsets = value->as.strings.offsets;
    const char *text = value->as.strings.bytes + offsets[i];
    Py_ssize_t length = (Py_ssize_t)(offsets[i + 1] - offsets[i]);
    return as_bytes ? PyBytes_FromStringAndSize(text, length) : PyUnicode_DecodeUTF8(text, length, "strict");
}

static PyObject *item_out(const mp_value *value, uint64_t i, bool as_bytes) {
    switch (value->type) {
    case MP_VALUE_BOOLS:
        return PyBool_FromLong(value->as.bools[i]);
    case MP_VALUE_INTS:
        return PyLong_FromLongLong(value->as.integers[i]);
    case MP_VALUE_FLOATS:
        return PyFloat_FromDouble(value->as.reals[i]);
    default:
        return string_at(value, i, as_bytes);
    }
}

static PyObject *list_out(const mp_value *value, bool as_bytes) {
    PyObject *list = PyList_New((Py_ssize_t)value->count);
    for (uint64_t i = 0; list && i < value->count; i++) {
        PyObject *item = item_out(value, i, as_bytes);
        if (!item) {
            Py_CLEAR(list);
            break;
        }
        PyList_SetItem(list, (Py_ssize_t)i, item);
    }
    /* if one string is not UTF-8, the whole list becomes bytes */
    if (!list && !as_bytes && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
        PyErr_Clear();
        return list_out(value, true);
    }
    return list;
}

static PyObject *value_out(const mp_value *value) {
    switch (value->type) {
    case MP_VALUE_BOOL:
        return PyBool_FromLong(value->as.integer != 0);
    case MP_VALUE_INT:
        return PyLong_FromLongLong(value->as.integer);
    case MP_VALUE_FLOAT:
        return PyFloat_FromDouble(value->as.real);
    case MP_VALUE_STRING:
        return string_out(value->as.string, value->count);
    default:
        return list_out(value, false);
    }
}

static PyObject *make_kv(const mp_spec *spec) {
    PyObject *dict = PyDict_New();
    for (int i = 0; dict && i < mp_spec_value_count(spec); i++) {
        const char *name;
        const mp_value *value = mp_spec_value_at(spec, i, &name);
        PyObject *key = string_out(name, strlen(name)), *object = key ? value_out(value) : NULL;
        if (!object || PyDict_SetItem(dict, key, object) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(object);
        Py_XDECREF(key);
    }
    return dict;
}

/* --- attributes --- */

static PyObject *gguf_kv(PyObject *object, void *closure) {
    (void)closure;
    gguf_object *self = (gguf_object *)object;
    PyObject *kv;
    MP_BEGIN_EXCLUSIVE(object);
    if (!self->kv)
        self->kv = make_kv(self->spec);
    kv = self->kv;
    Py_XINCREF(kv);
    MP_END_EXCLUSIVE();
    return kv;
}

static PyObject *gguf_keys(PyObject *object, void *closure) {
    (void)closure;
    const mp_spec *spec = ((gguf_object *)object)->spec;
    int count = mp_spec_value_count(spec);
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++) {
        const char *name;
        mp_spec_value_at(spec, i, &name);
        PyObject *key = string_out(name, strlen(name));
        if (!key) {
            Py_CLEAR(list);
            break;
        }
        PyList_SetItem(list, i, key);
    }
    return list;
}

static PyObject *gguf_value(PyObject *object, PyObject *key) {
    const char *name = PyUnicode_AsUTF8AndSize(key, NULL);
    if (!name)
        return NULL;
    const mp_value *value = mp_spec_find(((gguf_object *)object)->spec, name);
    if (value)
        return value_out(value);
    PyErr_SetObject(PyExc_KeyError, key);
    return NULL;
}

static PyObject *gguf_bpe(PyObject *object, PyObject *none) {
    (void)none;
    return mp_bpe_object(mp_state_of(object), ((gguf_object *)object)->spec);
}

static PyObject *tensor_out(const mp_tensor_entry *entry) {
    PyObject *shape = PyTuple_New(entry->ndim), *name = string_out(entry->name, strlen(entry->name)), *row = NULL;
    for (int i = 0; shape && i < entry->ndim; i++) {
        PyObject *size = PyLong_FromLongLong(entry->shape[i]);
        if (!size) {
            Py_CLEAR(shape);
            break;
        }
        PyTuple_SetItem(shape, i, size);
    }
    if (shape && name)
        row = Py_BuildValue("(OsOiKK)", name, mp_dtype_get(entry->dtype)->name, shape, (int)entry->file,
                            (unsigned long long)entry->offset, (unsigned long long)entry->nbytes);
    Py_XDECREF(name);
    Py_XDECREF(shape);
    return row;
}

static PyObject *gguf_tensors(PyObject *object, void *closure) {
    (void)closure;
    const mp_spec *spec = ((gguf_object *)object)->spec;
    int count = mp_spec_tensor_count(spec);
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++) {
        PyObject *row = tensor_out(mp_spec_tensor_at(spec, i));
        if (!row) {
            Py_CLEAR(list);
            break;
        }
        PyList_SetItem(list, i, row);
    }
    return list;
}

static PyObject *gguf_files(PyObject *object, void *closure) {
    (void)closure;
    const mp_spec *spec = ((gguf_object *)object)->spec;
    int count = mp_spec_file_count(spec);
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++) {
        PyObject *path = PyUnicode_DecodeFSDefault(mp_spec_file(spec, i));
        if (!path) {
            Py_CLEAR(list);
            break;
        }
        PyList_SetItem(list, i, path);
    }
    return list;
}

static PyObject *gguf_stamps(PyObject *object, void *closure) {
    (void)closure;
    const mp_spec *spec = ((gguf_object *)object)->spec;
    const int count = mp_spec_file_count(spec);
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++) {
        mp_file_id id = {0};
        mp_spec_file_identity(spec, i, &id); /* without memory, the identity is unknown: zeros, no file's stamp */
        PyObject *stamp = Py_BuildValue("(KKKK)", (unsigned long long)id.device, (unsigned long long)id.inode,
                                        (unsigned long long)id.size, (unsigned long long)id.mtime_ns);
        if (!stamp) {
            Py_CLEAR(list);
            break;
        }
        PyList_SetItem(list, i, stamp);
    }
    return list;
}

static PyObject *gguf_architecture(PyObject *object, void *closure) {
    (void)closure;
    const char *name = mp_spec_architecture(((gguf_object *)object)->spec);
    return PyUnicode_DecodeUTF8(name, (Py_ssize_t)strlen(name), "replace");
}

/* --- a copy to extend --- */

static mp_status copy_spec(const mp_spec *from, mp_spec *to, mp_error *error) {
    MP_TRY(mp_spec_set_architecture(to, mp_spec_architecture(from), error));
    for (int i = 0; i < mp_spec_file_count(from); i++)
        MP_TRY(mp_spec_add_file(to, mp_spec_file(from, i), error));
    for (int i = 0; i < mp_spec_value_count(from); i++) {
        const char *key;
        const mp_value *value = mp_spec_value_at(from, i, &key);
        MP_TRY(mp_spec_set(to, key, value, error));
    }
    for (int i = 0; i < mp_spec_tensor_count(from); i++)
        MP_TRY(mp_spec_add_tensor(to, mp_spec_tensor_at(from, i), error));
    return mp_spec_tokens(from) ? mp_spec_set_tokens(to, mp_spec_tokens(from), error) : MP_OK;
}

static PyObject *gguf_spec(PyObject *object, PyObject *none) {
    (void)none;
    mp_state *state = mp_state_of(object);
    mp_spec *copy = mp_spec_create();
    if (!copy)
        return PyErr_NoMemory();
    mp_error error;
    mp_status status;
    Py_BEGIN_ALLOW_THREADS
        status = copy_spec(((gguf_object *)object)->spec, copy, &error);
    Py_END_ALLOW_THREADS
    if (status != MP_OK) {
        mp_spec_unpin(copy);
        return mp_raise(state, &error, NULL);
    }
    return mp_spec_object(state, copy);
}

static PyGetSetDef attributes[] = {
    {"kv", gguf_kv, NULL, "Keys and values of the header.", NULL},
    {"keys", gguf_keys, NULL, "Keys of the header.", NULL},
    {"tensors", gguf_tensors, NULL, "(name, dtype, shape outermost first, file, offset, nbytes) of each tensor.", NULL},
    {"stamps", gguf_stamps, NULL, "Stamp of each file when it was read: device, inode, size and mtime.", NULL},
    {"files", gguf_files, NULL, "Paths, more than one when the model is split.", NULL},
    {"architecture", gguf_architecture, NULL, "general.architecture.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"spec", gguf_spec, METH_NOARGS, "A new, extensible Spec with the content of this header."},
    {"value", gguf_value, METH_O, "The value of a key, as a new object."},
    {"bpe", gguf_bpe, METH_NOARGS, "Its byte-pair vocabulary; None if it has no suitable one."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The parsed header of a GGUF file."},
    {Py_tp_dealloc, gguf_dealloc},
    {Py_tp_getset, attributes},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec mp_gguf_type_spec = {
    .name = "mpool._core.GgufFile",
    .basicsize = sizeof(gguf_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
