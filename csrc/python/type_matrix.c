/* type_matrix.c: Matrix, a matrix of weights whose scales are separate tensors (files/scaled_weights.h). */
#include "files/scaled_weights.h"
#include "python/binding.h"

typedef struct matrix_object {
    PyObject_HEAD mp_weights *weights;
    mp_scaled matrix; /* views of the weights' files, immutable */
} matrix_object;

static PyObject *matrix_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"spec", "name", NULL};
    PyObject *object;
    const char *name;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Os:Matrix", names, &object, &name))
        return NULL;
    mp_state *state = mp_state_of_type(type);
    mp_spec *spec = mp_spec_freeze_object(state, object);
    if (!spec)
        return NULL;
    matrix_object *self = (matrix_object *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    mp_error error;
    mp_status status;
    Py_BEGIN_ALLOW_THREADS
        status = mp_weights_open(spec, &self->weights, &error);
        if (status == MP_OK)
            status = mp_weights_get_matrix(self->weights, name, -1, -1, &self->matrix, &error);
        if (status == MP_OK)
            status = mp_weights_check_poisoned(self->weights, &error);
    Py_END_ALLOW_THREADS
    if (status != MP_OK)
        mp_raise(state, &error, NULL);
    else if (!mp_dtype_is_scaled(self->matrix.codes.dtype))
        mp_raise_new(state, MP_INVALID_ARGUMENT, "%s must have a type whose scales are separate tensors, got %s", name,
                     mp_dtype_get(self->matrix.codes.dtype)->name);
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void matrix_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    mp_weights_close(((matrix_object *)object)->weights);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *matrix_rows(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"first", "count", NULL};
    const matrix_object *self = (matrix_object *)object;
    mp_state *state = mp_state_of(object);
    Py_ssize_t first, count;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nn:rows", names, &first, &count))
        return NULL;
    if (first < 0 || count < 0 || first > self->matrix.N - count)
        return mp_raise_new(state, MP_INVALID_ARGUMENT, "`rows` must be within 0 to %d, got %zd to %zd",
                            self->matrix.N - 1, first, first + count - 1);
    PyObject *array = PyArray_SimpleNew(2, ((npy_intp[]){count, self->matrix.K}), NPY_FLOAT32);
    if (!array)
        return NULL;
    uint8_t *out = PyArray_DATA((PyArrayObject *)array);
    mp_error error;
    mp_status status;
    Py_BEGIN_ALLOW_THREADS
        mp_scaled_rows(&self->matrix, (int32_t)first, (int32_t)count, MP_F32, out);
        status = mp_weights_check_poisoned(self->weights, &error);
    Py_END_ALLOW_THREADS
    if (status == MP_OK)
        return array;
    Py_DECREF(array);
    return mp_raise(state, &error, NULL);
}

static PyMethodDef methods[] = {
    {"rows", MP_METHOD(matrix_rows), METH_VARARGS | METH_KEYWORDS, "Rows as float32 (count, inputs)."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A matrix of weights whose scales are separate tensors."},
    {Py_tp_new, matrix_new},
    {Py_tp_dealloc, matrix_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec mp_matrix_type_spec = {
    .name = "mpool._core.Matrix",
    .basicsize = sizeof(matrix_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
