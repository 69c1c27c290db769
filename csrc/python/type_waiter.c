/* type_waiter.c: Waiter, one of the threads and coroutines that wait for a ticket. Each operation is one call of the
 * core, which no signal handler, garbage collection or other thread can interrupt. An exception of a signal handler
 * may therefore neither leave a waiter counted nor a lock held. */
#include "python/binding.h"

typedef struct waiter_object {
    PyObject_HEAD PyObject *ticket; /* owns a reference; NULL once the waiter has left */
} waiter_object;

static _Atomic int *waiters_of(PyObject *ticket) { return &((mp_ticket_object *)ticket)->waiters; }

PyObject *mp_waiter_new(mp_state *state, PyObject *ticket) {
    waiter_object *self = (waiter_object *)PyType_GenericAlloc(state->waiter_type, 0);
    if (!self)
        return NULL;
    Py_INCREF(ticket);
    self->ticket = ticket;
    atomic_fetch_add_explicit(waiters_of(ticket), 1, memory_order_relaxed);
    return (PyObject *)self;
}

/* Does nothing if the waiter has left. */
static void leave(PyObject *object, bool gave_up) {
    PyObject *ticket;
    MP_BEGIN_EXCLUSIVE(object);
    ticket = ((waiter_object *)object)->ticket;
    ((waiter_object *)object)->ticket = NULL;
    MP_END_EXCLUSIVE();
    if (!ticket)
        return;
    if (atomic_fetch_sub_explicit(waiters_of(ticket), 1, memory_order_acq_rel) == 1 && gave_up)
        mp_ticket_cancel(((mp_ticket_object *)ticket)->ticket);
    Py_DECREF(ticket);
}

static void waiter_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    leave(object, false);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *waiter_leave(PyObject *self, PyObject *gave_up) {
    const int truth = PyObject_IsTrue(gave_up);
    if (truth < 0)
        return NULL;
    leave(self, truth);
    Py_RETURN_NONE;
}

static PyObject *waiter_enter(PyObject *self, PyObject *none) {
    (void)none;
    Py_INCREF(self);
    return self;
}

/* Exceptions that are no Exception cancel or interrupt the waiter: KeyboardInterrupt, CancelledError, GeneratorExit. */
static PyObject *waiter_exit(PyObject *self, PyObject *args) {
    PyObject *kind, *value, *trace;
    if (!PyArg_ParseTuple(args, "OOO:__exit__", &kind, &value, &trace))
        return NULL;
    leave(self, kind != Py_None && !PyErr_GivenExceptionMatches(kind, PyExc_Exception));
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"leave", waiter_leave, METH_O,
     "(gave_up): stop waiting. Cancels the request if this waiter gave up and was the last one."},
    {"__enter__", waiter_enter, METH_NOARGS, "Return the waiter."},
    {"__exit__", waiter_exit, METH_VARARGS,
     "Leave. The waiter gave up if the block ends with an exception that is no Exception."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "One waiter of a ticket, from Ticket.join() on until it leaves or is dropped."},
    {Py_tp_dealloc, waiter_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec mp_waiter_type_spec = {
    .name = "mpool._core.Waiter",
    .basicsize = sizeof(waiter_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
