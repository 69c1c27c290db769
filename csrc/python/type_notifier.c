/* type_notifier.c: Notifier, the file descriptor that an event loop watches for tickets. */
#include <stdatomic.h>

#include "python/binding.h"
#include "registry/notifier.h"

typedef struct notifier_object {
    /* Owns a reference until dealloc, also after close: in a free-threaded build, another thread may be in a method. */
    PyObject_HEAD mp_notifier *notifier;
    _Atomic bool open;
} notifier_object;

static PyObject *notifier_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Notifier", names))
        return NULL;
    notifier_object *self = (notifier_object *)PyType_GenericAlloc(type, 0);
    mp_error error;
    if (self && mp_notifier_create(&self->notifier, &error) != MP_OK) {
        mp_raise(mp_state_of_type(type), &error, NULL);
        Py_CLEAR(self);
    }
    if (self) {
        mp_notifier_pin(self->notifier);
        atomic_store(&self->open, true);
    }
    return (PyObject *)self;
}

static void close_once(notifier_object *self) {
    if (atomic_exchange(&self->open, false))
        mp_notifier_destroy(self->notifier);
}

static void notifier_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    notifier_object *self = (notifier_object *)object;
    close_once(self);
    mp_notifier_unpin(self->notifier);
    PyObject_Free(object);
    Py_DECREF(type);
}

mp_notifier *mp_notifier_of(mp_state *state, PyObject *object) {
    if (!PyObject_TypeCheck(object, state->notifier_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Notifier, got %R", (PyObject *)Py_TYPE(object));
        return NULL;
    }
    notifier_object *self = (notifier_object *)object;
    if (atomic_load(&self->open))
        return self->notifier;
    mp_raise_new(state, MP_INVALID_ARGUMENT, "the notifier is closed; create a new one");
    return NULL;
}

static PyObject *notifier_fileno(PyObject *self, PyObject *none) {
    (void)none;
    mp_notifier *notifier = mp_notifier_of(mp_state_of(self), self);
    return notifier ? PyLong_FromLong(mp_notifier_fd(notifier)) : NULL;
}

static PyObject *notifier_take(PyObject *self, PyObject *none) {
    (void)none;
    enum { AT_ONCE = 256 };
    uint64_t ids[AT_ONCE];
    mp_notifier *notifier = mp_notifier_of(mp_state_of(self), self);
    PyObject *list = notifier ? PyList_New(0) : NULL;
    for (int count = AT_ONCE; list && count == AT_ONCE;) {
        count = mp_notifier_take(notifier, ids, AT_ONCE);
        for (int i = 0; list && i < count; i++) {
            PyObject *id = PyLong_FromUnsignedLongLong(ids[i]);
            if (!id || PyList_Append(list, id) < 0)
                Py_CLEAR(list);
            Py_XDECREF(id);
        }
    }
    return list;
}

static PyObject *notifier_close(PyObject *object, PyObject *none) {
    (void)none;
    close_once((notifier_object *)object);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"fileno", notifier_fileno, METH_NOARGS, "File descriptor that is readable while take() has tickets to return."},
    {"take", notifier_take, METH_NOARGS, "Ids of the tickets that finished or progressed since they were last taken."},
    {"close", notifier_close, METH_NOARGS, "Close the descriptor; tickets bound to it no longer notify it."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Wakes an event loop when tickets progress. Create one per loop."},
    {Py_tp_new, notifier_new},
    {Py_tp_dealloc, notifier_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec mp_notifier_type_spec = {
    .name = "mpool._core.Notifier", .basicsize = sizeof(notifier_object), .flags = Py_TPFLAGS_DEFAULT, .slots = slots};
