/* type_bpe.c: Bpe, a byte-pair vocabulary (files/bpe.h). */
#include "files/bpe.h"
#include "python/binding.h"

typedef struct bpe_object {
    PyObject_HEAD mp_bpe *bpe; /* immutable after construction */
} bpe_object;

PyObject *mp_bpe_object(mp_state *state, mp_spec *spec) {
    mp_bpe *bpe;
    mp_error error;
    mp_status status;
    Py_BEGIN_ALLOW_THREADS
        status = mp_bpe_create(spec, &bpe, &error);
    Py_END_ALLOW_THREADS
    if (status != MP_OK)
        return mp_raise(state, &error, NULL);
    if (!bpe)
        Py_RETURN_NONE;
    bpe_object *self = (bpe_object *)PyType_GenericAlloc(state->bpe_type, 0);
    if (!self) {
        mp_bpe_destroy(bpe);
        return NULL;
    }
    self->bpe = bpe;
    return (PyObject *)self;
}

static void bpe_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    mp_bpe_destroy(((bpe_object *)object)->bpe);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* Returns 1 if all words were added, 0 if their cost exceeds `most`, -1 with an exception. */
static int add_words(mp_bpe_part *part, const mp_bpe *bpe, PyObject *words, unsigned long long most) {
    PyObject *iterator = PyObject_GetIter(words), *word;
    if (!iterator)
        return -1;
    int result = 1;
    while (result == 1 && (word = PyIter_Next(iterator))) {
        Py_ssize_t bytes;
        const char *text = PyUnicode_AsUTF8AndSize(word, &bytes);
        if (text) {
            uint64_t cost = mp_bpe_word_cost(bpe, (uint64_t)bytes);
            if (cost <= most)
                mp_bpe_part_add(part, bpe, text, (uint64_t)bytes);
            else
                result = 0;
            most -= cost;
        }
        Py_DECREF(word);
        if (PyErr_Occurred())
            break;
    }
    Py_DECREF(iterator);
    return PyErr_Occurred() ? -1 : result;
}

static PyObject *text_of(const mp_bpe *bpe, int32_t token) {
    uint64_t bytes;
    const char *text = mp_bpe_token(bpe, token, &bytes);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)bytes, "strict");
}

static PyObject *tokens_out(const mp_bpe_part *part, const mp_bpe *bpe) {
    PyObject *ids = PyDict_New();
    for (uint32_t i = 0; ids && i < part->token_count; i++) {
        PyObject *text = text_of(bpe, part->tokens[i]), *id = text ? PyLong_FromLong(part->tokens[i]) : NULL;
        if (!id || PyDict_SetItem(ids, text, id) < 0)
            Py_CLEAR(ids);
        Py_XDECREF(id);
        Py_XDECREF(text);
    }
    return ids;
}

static PyObject *merges_out(const mp_bpe_part *part, const mp_bpe *bpe) {
    PyObject *list = PyList_New(part->merge_count);
    for (uint32_t i = 0; list && i < part->merge_count; i++) {
        PyObject *left = text_of(bpe, part->merges[i][0]), *right = left ? text_of(bpe, part->merges[i][1]) : NULL;
        PyObject *pair = right ? PyTuple_Pack(2, left, right) : NULL;
        if (pair)
            PyList_SetItem(list, i, pair);
        else
            Py_CLEAR(list);
        Py_XDECREF(left);
        Py_XDECREF(right);
    }
    return list;
}

static PyObject *bpe_part(PyObject *object, PyObject *args) {
    const mp_bpe *bpe = ((bpe_object *)object)->bpe;
    PyObject *words, *result = NULL;
    unsigned long long most;
    if (!PyArg_ParseTuple(args, "OK:part", &words, &most))
        return NULL;
    mp_bpe_part part;
    mp_error error;
    if (mp_bpe_part_init(&part, bpe, &error) != MP_OK)
        return mp_raise(mp_state_of(object), &error, NULL);
    int added = add_words(&part, bpe, words, most);
    if (added == 0) {
        result = Py_NewRef(Py_None);
    } else if (added > 0 && mp_bpe_part_finish(&part, bpe, &error) != MP_OK) {
        mp_raise(mp_state_of(object), &error, NULL);
    } else if (added > 0) {
        PyObject *ids = tokens_out(&part, bpe), *merges = ids ? merges_out(&part, bpe) : NULL;
        if (merges)
            result = PyTuple_Pack(2, ids, merges);
        Py_XDECREF(ids);
        Py_XDECREF(merges);
    }
    mp_bpe_part_deinit(&part);
    return result;
}

static PyObject *bpe_find(PyObject *object, PyObject *text) {
    Py_ssize_t bytes;
    const char *utf8 = PyUnicode_AsUTF8AndSize(text, &bytes);
    if (!utf8)
        return NULL;
    int32_t token = mp_bpe_find(((bpe_object *)object)->bpe, utf8, (uint64_t)bytes);
    return bytes > 0 && token >= 0 ? PyLong_FromLong(token) : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"find", bpe_find, METH_O, "The token with this text, or None."},
    {"part", bpe_part, METH_VARARGS, "Tokens and merges that byte-pair encoding needs for some words."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A byte-pair vocabulary with its merges."},
    {Py_tp_dealloc, bpe_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec mp_bpe_type_spec = {
    .name = "mpool._core.Bpe",
    .basicsize = sizeof(bpe_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
