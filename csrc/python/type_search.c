/* type_search.c: Search, an exact search in arrays of vectors (vectors/search.h), and MaxSim, exact late interaction
 * with ragged documents (vectors/maxsim.h). Both are scans (vectors/scan.h). */
#include <stdatomic.h>

#include "python/binding.h"
#include "vectors/maxsim.h"
#include "vectors/search.h"

typedef struct search_object {
    PyObject_HEAD mp_scan *scan; /* NULL after an error and after nearest() */
    PyObject *registry;
    mp_scan_plan plan;
    int32_t dim;
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
        mp_raise_new(state, MP_INVALID_ARGUMENT, "`%s` must be an array float32 [n, 1 to 2^20]", name);
    }
    Py_XDECREF((PyObject *)array);
    return NULL;
}

/* Copy an argument to an array [n] of a type. A copy, because the core reads it without the GIL, and another thread
 * may change the caller's array after it was checked. */
static PyArrayObject *list_in(mp_state *state, PyObject *object, int type, const char *name) {
    const int flags = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_ENSURECOPY;
    PyArrayObject *array =
        (PyArrayObject *)PyArray_FromAny(object, PyArray_DescrFromType(type), 1, 1, flags, NULL);
    if (!array && (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError))) {
        PyErr_Clear();
        mp_raise_new(state, MP_INVALID_ARGUMENT, "`%s` must be an array of one dimension", name);
    }
    return array;
}

/* Check offsets [n + 1] of ragged rows: they begin with 0, never decrease and end with `rows`. */
static bool check_offsets(mp_state *state, PyArrayObject *offsets, int64_t rows, const char *name) {
    const int64_t *at = PyArray_DATA(offsets), count = PyArray_DIM(offsets, 0);
    bool valid = count > 0 && count <= INT32_MAX && at[0] == 0 && at[count - 1] == rows;
    for (int64_t i = 1; valid && i < count; i++)
        valid = at[i] >= at[i - 1];
    if (!valid)
        mp_raise_new(state, MP_INVALID_ARGUMENT,
                     "`%s` must begin with 0, never decrease and end with the number of rows, %lld", name,
                     (long long)rows);
    return valid;
}

static void refuse_results(mp_state *state, int32_t queries, int most) {
    mp_raise_new(state, MP_INVALID_ARGUMENT,
                 "the number of queries must be >= 1, most >= 0, and their product at most 2^40, got %d queries "
                 "and most %d", queries, most);
}

/* Return a new object without a scan. */
static search_object *new_object(PyTypeObject *type, PyObject *registry, mp_scan_plan plan, int32_t dim) {
    search_object *self = (search_object *)PyType_GenericAlloc(type, 0);
    if (self) {
        self->plan = plan;
        self->dim = dim;
        self->registry = Py_NewRef(registry);
        atomic_flag_clear(&self->busy);
    }
    return self;
}

static PyObject *search_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"registry", "queries", "most", "cosine", "least", NULL};
    mp_state *state = mp_state_of_type(type);
    PyObject *registry, *given, *least = Py_None;
    int most, cosine;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOip|O:Search", names, &registry, &given, &most, &cosine, &least) ||
        !mp_registry_of(state, registry))
        return NULL;
    mp_search_plan plan = {.scan = {.most = most, .counts = least != Py_None}, .cosine = cosine};
    if (plan.scan.counts) {
        plan.scan.least = (float)PyFloat_AsDouble(least);
        if (PyErr_Occurred())
            return NULL;
    }
    PyArrayObject *queries = matrix_in(state, given, "queries");
    if (!queries)
        return NULL;
    search_object *self = NULL;
    plan.scan.queries = (int32_t)PyArray_DIM(queries, 0);
    plan.dim = (int32_t)PyArray_DIM(queries, 1);
    if (plan.scan.queries == 0 || most < 0 || plan.scan.queries * (int64_t)most > INT64_C(1) << 40) {
        refuse_results(state, plan.scan.queries, most);
    } else if ((self = new_object(type, registry, plan.scan, plan.dim))) {
        mp_error error;
        if (mp_search_create(&plan, PyArray_DATA(queries), &self->scan, &error) != MP_OK) {
            mp_raise(state, &error, NULL);
            Py_CLEAR(self);
        }
    }
    Py_DECREF(queries);
    return (PyObject *)self;
}

static PyObject *maxsim_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"registry", "tokens", "offsets", "most", NULL};
    mp_state *state = mp_state_of_type(type);
    PyObject *registry, *given, *ends;
    int most;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOi:MaxSim", names, &registry, &given, &ends, &most) ||
        !mp_registry_of(state, registry))
        return NULL;
    PyArrayObject *tokens = matrix_in(state, given, "tokens");
    PyArrayObject *offsets = tokens ? list_in(state, ends, NPY_INT64, "offsets") : NULL;
    search_object *self = NULL;
    if (offsets && check_offsets(state, offsets, PyArray_DIM(tokens, 0), "offsets")) {
        mp_maxsim_plan plan = {.scan = {.queries = (int32_t)PyArray_DIM(offsets, 0) - 1, .most = most},
                               .dim = (int32_t)PyArray_DIM(tokens, 1)};
        if (plan.scan.queries == 0 || most < 0 || plan.scan.queries * (int64_t)most > INT64_C(1) << 40) {
            refuse_results(state, plan.scan.queries, most);
        } else if ((self = new_object(type, registry, plan.scan, plan.dim))) {
            mp_error error;
            if (mp_maxsim_create(&plan, PyArray_DATA(tokens), PyArray_DATA(offsets), &self->scan, &error) != MP_OK) {
                mp_raise(state, &error, NULL);
                Py_CLEAR(self);
            }
        }
    }
    Py_XDECREF((PyObject *)tokens);
    Py_XDECREF((PyObject *)offsets);
    return (PyObject *)self;
}

static void search_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    search_object *self = (search_object *)object;
    mp_scan_destroy(self->scan);
    Py_XDECREF(self->registry);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* Lock the search for a call. Returns NULL with an exception if another call has locked it, or if it has ended. */
static mp_scan *search_take(search_object *self) {
    if (atomic_flag_test_and_set(&self->busy)) {
        mp_raise_new(mp_state_of((PyObject *)self), MP_INVALID_ARGUMENT,
                     "another thread uses this search; create one for each thread");
        return NULL;
    }
    if (self->scan)
        return self->scan;
    atomic_flag_clear(&self->busy);
    mp_raise_new(mp_state_of((PyObject *)self), MP_INVALID_ARGUMENT, "this search has ended; create a new one");
    return NULL;
}

static void search_end(search_object *self) {
    mp_scan_destroy(self->scan);
    self->scan = NULL;
}

/* A search waits for CPUs at most this long. It then checks for signals, and queues again at the end. */
static const uint64_t TURN_NS = 500ull * 1000 * 1000;

typedef struct add_call {
    mp_scan *scan;
    const void *items;
    int64_t count, done;
    mp_status status;
    mp_error error;
} add_call;

static void add_slice(mp_lease *lease, void *arg) {
    /* A slice occupies its CPUs at most this long. Between slices, workers get CPUs and the caller checks for
     * signals. */
    enum { SLICE_NS = 20 * 1000 * 1000 };
    add_call *call = arg;
    call->status = mp_scan_add(call->scan, lease, call->items, call->count, &call->done, mp_sys_now_ns() + SLICE_NS,
                               &call->error);
}

/* Add items to a scan that `search_take` has locked, and unlock it. Releases the GIL. Returns None, or NULL with an
 * exception; the search has then ended. */
static PyObject *add_items(search_object *self, const void *items, int64_t count) {
    mp_state *state = mp_state_of((PyObject *)self);
    mp_registry *registry = mp_registry_of(state, self->registry);
    add_call call = {.scan = self->scan, .items = items, .count = count};
    bool failed = false;
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
            search_end(self);
    }
    atomic_flag_clear(&self->busy);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* Check the components of rows against those of the queries. */
static bool check_dim(search_object *self, PyArrayObject *rows, const char *name) {
    if (PyArray_DIM(rows, 1) == self->dim)
        return true;
    mp_raise_new(mp_state_of((PyObject *)self), MP_INVALID_ARGUMENT,
                 "`%s` must have %d components, like the queries, got %lld", name, self->dim,
                 (long long)PyArray_DIM(rows, 1));
    return false;
}

static PyObject *search_add(PyObject *object, PyObject *given) {
    search_object *self = (search_object *)object;
    PyArrayObject *vectors = matrix_in(mp_state_of(object), given, "vectors");
    PyObject *result = NULL;
    if (vectors && check_dim(self, vectors, "vectors") && search_take(self))
        result = add_items(self, PyArray_DATA(vectors), PyArray_DIM(vectors, 0));
    Py_XDECREF((PyObject *)vectors);
    return result;
}

/* The rows of documents as they are, without a copy: float32 or int8, C-contiguous. */
static PyArrayObject *token_rows(mp_state *state, PyObject *object) {
    if (PyArray_Check(object)) {
        PyArrayObject *array = (PyArrayObject *)object;
        const int type = PyArray_TYPE(array);
        if ((type == NPY_FLOAT32 || type == NPY_INT8) && PyArray_NDIM(array) == 2 && PyArray_ISCARRAY_RO(array))
            return (PyArrayObject *)Py_NewRef(object);
    }
    mp_raise_new(state, MP_INVALID_ARGUMENT, "`values` must be a C-contiguous array [n, d] of float32 or int8");
    return NULL;
}

/* The array that receives all scores [queries, documents], or NULL with an exception. */
static PyArrayObject *all_scores(search_object *self, PyObject *object, int64_t count) {
    if (PyArray_Check(object)) {
        PyArrayObject *array = (PyArrayObject *)object;
        if (PyArray_TYPE(array) == NPY_FLOAT32 && PyArray_NDIM(array) == 2 && PyArray_ISCARRAY(array) &&
            PyArray_DIM(array, 0) == self->plan.queries && PyArray_DIM(array, 1) == count)
            return (PyArrayObject *)Py_NewRef(object);
    }
    mp_raise_new(mp_state_of((PyObject *)self), MP_INVALID_ARGUMENT,
                 "`scores` must be a writable float32 array [%d, %lld]", self->plan.queries, (long long)count);
    return NULL;
}

static PyObject *maxsim_add(PyObject *object, PyObject *args) {
    search_object *self = (search_object *)object;
    mp_state *state = mp_state_of(object);
    PyObject *given, *ends, *factors, *out, *result = NULL;
    PyArrayObject *values = NULL, *offsets = NULL, *scales = NULL, *scores = NULL;
    if (!PyArg_ParseTuple(args, "OOOO:add", &given, &ends, &factors, &out) || !(values = token_rows(state, given)) ||
        !check_dim(self, values, "documents") || !(offsets = list_in(state, ends, NPY_INT64, "offsets")) ||
        !check_offsets(state, offsets, PyArray_DIM(values, 0), "offsets"))
        goto cleanup;
    const int64_t count = PyArray_DIM(offsets, 0) - 1;
    if (factors != Py_None && !(scales = list_in(state, factors, NPY_FLOAT32, "scales")))
        goto cleanup;
    if (scales && PyArray_DIM(scales, 0) != PyArray_DIM(values, 0)) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "`scales` must have one number for each row, %lld, got %lld",
                     (long long)PyArray_DIM(values, 0), (long long)PyArray_DIM(scales, 0));
        goto cleanup;
    }
    if (out != Py_None && !(scores = all_scores(self, out, count)))
        goto cleanup;
    const mp_maxsim_documents documents = {.dtype = PyArray_TYPE(values) == NPY_INT8 ? MP_I8 : MP_F32,
                                           .values = PyArray_DATA(values),
                                           .scales = scales ? PyArray_DATA(scales) : NULL,
                                           .offsets = PyArray_DATA(offsets),
                                           .scores = scores ? PyArray_DATA(scores) : NULL,
                                           .ld = count};
    if (search_take(self)) {
        mp_maxsim_begin(self->scan, &documents, count);
        result = add_items(self, &documents, count);
    }
cleanup:
    Py_XDECREF((PyObject *)values);
    Py_XDECREF((PyObject *)offsets);
    Py_XDECREF((PyObject *)scales);
    Py_XDECREF((PyObject *)scores);
    return result;
}

static PyObject *search_nearest(PyObject *object, PyObject *none) {
    (void)none;
    search_object *self = (search_object *)object;
    mp_scan *scan = search_take(self);
    if (!scan)
        return NULL;
    npy_intp shape[] = {self->plan.queries, mp_scan_found(scan)};
    PyObject *numbers = PyArray_SimpleNew(2, shape, NPY_INT64), *scores = PyArray_SimpleNew(2, shape, NPY_FLOAT32);
    PyObject *result = numbers && scores ? PyTuple_Pack(2, numbers, scores) : NULL;
    if (result) {
        int64_t *to = PyArray_DATA((PyArrayObject *)numbers);
        float *values = PyArray_DATA((PyArrayObject *)scores);
        Py_BEGIN_ALLOW_THREADS
            mp_scan_nearest(scan, to, values);
        Py_END_ALLOW_THREADS
        search_end(self);
    }
    atomic_flag_clear(&self->busy);
    Py_XDECREF(numbers);
    Py_XDECREF(scores);
    return result;
}

static PyObject *search_counts(PyObject *object, PyObject *none) {
    (void)none;
    search_object *self = (search_object *)object;
    mp_scan *scan = search_take(self);
    if (!scan)
        return NULL;
    PyObject *counts = PyArray_SimpleNew(1, (npy_intp[]){self->plan.queries}, NPY_INT64);
    if (counts)
        mp_scan_counts(scan, PyArray_DATA((PyArrayObject *)counts));
    atomic_flag_clear(&self->busy);
    return counts;
}

static PyMethodDef search_methods[] = {
    {"add", search_add, METH_O, "Compare the queries with more vectors."},
    {"nearest", search_nearest, METH_NOARGS, "Numbers and scores of the nearest vectors, best first. Ends the search."},
    {"counts", search_counts, METH_NOARGS, "Number of vectors with a score of at least `least`, for each query."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot search_slots[] = {
    {Py_tp_doc, "An exact search in arrays of vectors."},
    {Py_tp_new, search_new},
    {Py_tp_dealloc, search_dealloc},
    {Py_tp_methods, search_methods},
    {0, NULL},
};

PyType_Spec mp_search_type_spec = {.name = "mpool._core.Search",
                                   .basicsize = sizeof(search_object),
                                   .flags = Py_TPFLAGS_DEFAULT,
                                   .slots = search_slots};

static PyMethodDef maxsim_methods[] = {
    {"add", maxsim_add, METH_VARARGS, "Compare the queries with more documents."},
    {"nearest", search_nearest, METH_NOARGS,
     "Numbers and scores of the nearest documents, best first. Ends the search."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot maxsim_slots[] = {
    {Py_tp_doc, "Exact late interaction of queries with ragged documents."},
    {Py_tp_new, maxsim_new},
    {Py_tp_dealloc, search_dealloc},
    {Py_tp_methods, maxsim_methods},
    {0, NULL},
};

PyType_Spec mp_maxsim_type_spec = {.name = "mpool._core.MaxSim",
                                   .basicsize = sizeof(search_object),
                                   .flags = Py_TPFLAGS_DEFAULT,
                                   .slots = maxsim_slots};
