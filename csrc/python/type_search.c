/* type_search.c: Search, an exact search in arrays of vectors (vectors/search.h). */
#include <stdatomic.h>

#include "python/binding.h"
#include "vectors/search.h"

typedef struct search_object {
    PyObject_HEAD mp_search *search; /* NULL after an error and after nearest() */
    PyObject *registry;
    mp_search_plan plan;
    atomic_flag busy;
} search_object;

/* Convert an argument to a matrix of float32. Copies it only if it is of another type or layout. */
static PyArrayObject *matrix_in(mp_state *state, PyObject *object, const char *name) {
    PyArrayObject *array = (PyArrayObject *)PyArray_FromAny(object, PyArray_DescrFromType(NPY_FLOAT32), 2, 2,
                                                            NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED, NULL);
    if (array && PyArray_DIM(array, 0) <= INT32_MAX && PyArray_DIM(array, 1) > 0 && PyArray_DIM(array, 1) <= 1 << 20)
        return array;
    if (array || PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear();
        mp_raise_new(state, MP_INVALID_ARGUMENT, "%s has the wrong type or shape, allowed: float32 [n, 1 to 2^20]",
                     name);
    }
    Py_XDECREF((PyObject *)array);
    return NULL;
}

static PyObject *search_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"registry", "queries", "most", "cosine", "least", NULL};
    mp_state *state = mp_state_of_type(type);
    PyObject *registry, *given, *least = Py_None;
    int most, cosine;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOip|O:Search", names, &registry, &given, &most, &cosine, &least) ||
        !mp_registry_of(state, registry))
        return NULL;
    mp_search_plan plan = {.most = most, .cosine = cosine, .counts = least != Py_None};
    if (plan.counts) {
        plan.least = (float)PyFloat_AsDouble(least);
        if (PyErr_Occurred())
            return NULL;
    }
    PyArrayObject *queries = matrix_in(state, given, "queries");
    if (!queries)
        return NULL;
    search_object *self = NULL;
    if (PyArray_DIM(queries, 0) == 0 || most < 0 || PyArray_DIM(queries, 0) * (int64_t)most > INT64_C(1) << 40) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "a search needs a query, most >= 0, and at most 2^40 results");
    } else if ((self = (search_object *)PyType_GenericAlloc(type, 0))) {
        plan.queries = (int32_t)PyArray_DIM(queries, 0);
        plan.dim = (int32_t)PyArray_DIM(queries, 1);
        self->plan = plan;
        self->registry = Py_NewRef(registry);
        atomic_flag_clear(&self->busy);
        mp_error error;
        if (mp_search_create(&plan, PyArray_DATA(queries), &self->search, &error) != MP_OK) {
            mp_raise(state, &error, NULL);
            Py_CLEAR(self);
        }
    }
    Py_DECREF(queries);
    return (PyObject *)self;
}

static void search_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    search_object *self = (search_object *)object;
    mp_search_destroy(self->search);
    Py_XDECREF(self->registry);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* Take the search for a call. Returns NULL with an exception if another call has it, or if it has ended. */
static mp_search *take(search_object *self) {
    if (atomic_flag_test_and_set(&self->busy)) {
        mp_raise_new(mp_state_of((PyObject *)self), MP_INVALID_ARGUMENT, "another thread uses this search");
        return NULL;
    }
    if (self->search)
        return self->search;
    atomic_flag_clear(&self->busy);
    mp_raise_new(mp_state_of((PyObject *)self), MP_INVALID_ARGUMENT, "this search has ended");
    return NULL;
}

static void end(search_object *self) {
    mp_search_destroy(self->search);
    self->search = NULL;
}

/* A search that waits for CPUs checks for signals after this time, and loses its place in the queue. */
static const uint64_t TURN_NS = 500ull * 1000 * 1000;

typedef struct add_call {
    mp_search *search;
    const float *vectors;
    int64_t count, done;
    mp_status status;
    mp_error error;
} add_call;

static void add_slice(mp_lease *lease, void *arg) {
    enum { SLICE_NS = 20 * 1000 * 1000 }; /* workers wait this long for their CPUs, and signals for the caller */
    add_call *call = arg;
    call->status = mp_search_add(call->search, lease, call->vectors, call->count, &call->done,
                                 mp_sys_now_ns() + SLICE_NS, &call->error);
}

static PyObject *search_add(PyObject *object, PyObject *given) {
    search_object *self = (search_object *)object;
    mp_state *state = mp_state_of(object);
    mp_registry *registry = mp_registry_of(state, self->registry);
    PyArrayObject *vectors = matrix_in(state, given, "vectors");
    if (!vectors)
        return NULL;
    if (PyArray_DIM(vectors, 1) != self->plan.dim) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "vectors have %lld components, allowed: %d, like the queries",
                     (long long)PyArray_DIM(vectors, 1), self->plan.dim);
        Py_DECREF(vectors);
        return NULL;
    }
    add_call call = {.search = take(self), .vectors = PyArray_DATA(vectors), .count = PyArray_DIM(vectors, 0)};
    bool failed = !call.search;
    while (!failed && call.done < call.count) {
        mp_status status;
        mp_error error;
        Py_BEGIN_ALLOW_THREADS
            status = mp_registry_compute(registry, mp_sys_now_ns() + TURN_NS, add_slice, &call, &error);
        Py_END_ALLOW_THREADS
        if (status == MP_OK && call.status != MP_OK)
            mp_raise(state, &call.error, NULL);
        else if (status != MP_OK && status != MP_TIMEOUT)
            mp_raise(state, &error, NULL);
        failed = PyErr_Occurred() || PyErr_CheckSignals() < 0;
        if (failed)
            end(self);
    }
    if (call.search)
        atomic_flag_clear(&self->busy);
    Py_DECREF(vectors);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *search_nearest(PyObject *object, PyObject *none) {
    (void)none;
    search_object *self = (search_object *)object;
    mp_search *search = take(self);
    if (!search)
        return NULL;
    npy_intp shape[] = {self->plan.queries, mp_search_found(search)};
    PyObject *numbers = PyArray_SimpleNew(2, shape, NPY_INT64), *scores = PyArray_SimpleNew(2, shape, NPY_FLOAT32);
    PyObject *result = numbers && scores ? PyTuple_Pack(2, numbers, scores) : NULL;
    if (result) {
        int64_t *to = PyArray_DATA((PyArrayObject *)numbers);
        float *values = PyArray_DATA((PyArrayObject *)scores);
        Py_BEGIN_ALLOW_THREADS mp_search_nearest(search, to, values);
        Py_END_ALLOW_THREADS end(self);
    }
    atomic_flag_clear(&self->busy);
    Py_XDECREF(numbers);
    Py_XDECREF(scores);
    return result;
}

static PyObject *search_counts(PyObject *object, PyObject *none) {
    (void)none;
    search_object *self = (search_object *)object;
    mp_search *search = take(self);
    if (!search)
        return NULL;
    PyObject *counts = PyArray_SimpleNew(1, (npy_intp[]){self->plan.queries}, NPY_INT64);
    if (counts)
        mp_search_counts(search, PyArray_DATA((PyArrayObject *)counts));
    atomic_flag_clear(&self->busy);
    return counts;
}

static PyMethodDef methods[] = {
    {"add", search_add, METH_O, "Compare the queries with more vectors."},
    {"nearest", search_nearest, METH_NOARGS, "Numbers and scores of the nearest vectors, best first. Ends the search."},
    {"counts", search_counts, METH_NOARGS, "Number of vectors with a score of at least `least`, for each query."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "An exact search in arrays of vectors."},
    {Py_tp_new, search_new},
    {Py_tp_dealloc, search_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec mp_search_type_spec = {
    .name = "mpool._core.Search", .basicsize = sizeof(search_object), .flags = Py_TPFLAGS_DEFAULT, .slots = slots};
