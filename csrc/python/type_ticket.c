/* type_ticket.c: Ticket, a request in flight. convert_<capability>.c has the methods of each capability. */
#include <stdatomic.h>
#include <string.h>

#include "python/binding.h"

PyObject *mp_ticket_object_new(mp_state *state, mp_ticket *ticket, PyObject *registry, const char *key) {
    PyTypeObject *type = state->ticket_type;
    mp_ticket_object *self = (mp_ticket_object *)PyType_GenericAlloc(type, 0);
    if (!self) {
        mp_ticket_release(ticket);
        return NULL;
    }
    self->ticket = ticket;
    Py_INCREF(registry);
    self->registry = registry;
    strncpy(self->key, key, sizeof(self->key) - 1);
    return (PyObject *)self;
}

static void ticket_dealloc(PyObject *object) {
    mp_ticket_object *self = (mp_ticket_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    mp_ticket_release(self->ticket);
    Py_XDECREF(self->registry);
    PyObject_Free(object);
    Py_DECREF(type);
}

static mp_ticket *ticket_of(PyObject *self) { return ((mp_ticket_object *)self)->ticket; }

bool mp_ticket_check(mp_state *state, mp_ticket *ticket, const char *key) {
    mp_error error;
    if (!mp_ticket_done(ticket)) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "the request is not done; call wait() first");
        return false;
    }
    if (mp_ticket_status(ticket, &error) == MP_OK)
        return true;
    mp_raise(state, &error, key);
    return false;
}

mp_request *mp_ticket_request_of(mp_state *state, mp_ticket *ticket, mp_capability capability) {
    mp_request *request = mp_ticket_request(ticket);
    if (request->capability == capability)
        return request;
    mp_raise_new(state, MP_WRONG_CAPABILITY, "this ticket is for a request of %s, not of %s",
                 mp_capability_get(request->capability)->name, mp_capability_get(capability)->name);
    return NULL;
}

static PyObject *ticket_wait(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"timeout", NULL};
    PyObject *timeout = Py_None;
    uint64_t deadline_ns;
    mp_state *state = mp_state_of(self);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:wait", names, &timeout) ||
        !mp_deadline(state, timeout, &deadline_ns))
        return NULL;
    int moved = mp_wait_ticket(state, ticket_of(self), UINT64_MAX, deadline_ns, NULL);
    if (moved < 0) { /* an interrupted wait cancels the request */
        mp_ticket_cancel(ticket_of(self));
        return NULL;
    }
    return PyBool_FromLong(moved);
}

static PyObject *ticket_wait_progress(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"seen", "timeout", NULL};
    unsigned long long seen;
    PyObject *timeout = Py_None;
    uint64_t deadline_ns, progress = 0;
    mp_state *state = mp_state_of(self);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "K|O:wait_progress", names, &seen, &timeout) ||
        !mp_deadline(state, timeout, &deadline_ns))
        return NULL;
    if (mp_wait_ticket(state, ticket_of(self), seen, deadline_ns, &progress) < 0) {
        mp_ticket_cancel(ticket_of(self));
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(progress);
}

static PyObject *ticket_done(PyObject *self, PyObject *none) {
    (void)none;
    return PyBool_FromLong(mp_ticket_done(ticket_of(self)));
}

static PyObject *ticket_cancel(PyObject *self, PyObject *none) {
    (void)none;
    return PyBool_FromLong(mp_ticket_cancel(ticket_of(self)));
}

static PyObject *ticket_join(PyObject *self, PyObject *none) {
    (void)none;
    return mp_waiter_new(mp_state_of(self), self);
}

static PyObject *ticket_waiters(PyObject *self, PyObject *none) {
    (void)none;
    return PyLong_FromLong(atomic_load_explicit(&((mp_ticket_object *)self)->waiters, memory_order_relaxed));
}

static PyObject *ticket_check(PyObject *self, PyObject *none) {
    (void)none;
    if (!mp_ticket_check(mp_state_of(self), ticket_of(self), ((mp_ticket_object *)self)->key))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *ticket_bind(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"notifier", "id", NULL};
    PyObject *object;
    unsigned long long id;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OK:bind", names, &object, &id))
        return NULL;
    mp_notifier *notifier = mp_notifier_of(mp_state_of(self), object);
    if (!notifier)
        return NULL;
    if (!mp_ticket_bind(ticket_of(self), notifier, id))
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *ticket_times(PyObject *self, PyObject *none) {
    (void)none;
    uint64_t submitted, started, finished;
    mp_ticket_times(ticket_of(self), &submitted, &started, &finished);
    return Py_BuildValue("(ddd)", (double)submitted * 1e-9, (double)started * 1e-9, (double)finished * 1e-9);
}

static PyObject *ticket_position(PyObject *self, PyObject *none) {
    (void)none;
    return PyLong_FromLong(mp_ticket_position(ticket_of(self), NULL));
}

static PyObject *ticket_eta(PyObject *self, PyObject *none) {
    (void)none;
    uint64_t eta_ns;
    mp_ticket_position(ticket_of(self), &eta_ns);
    return PyFloat_FromDouble((double)eta_ns * 1e-9);
}

static PyObject *ticket_vectors(PyObject *self, PyObject *none) {
    (void)none;
    if (mp_ticket_request(ticket_of(self))->capability == MP_IMAGE_EMBEDDING)
        return mp_image_embedding_vectors(mp_state_of(self), ticket_of(self), ((mp_ticket_object *)self)->key);
    return mp_embedding_vectors(mp_state_of(self), ticket_of(self), ((mp_ticket_object *)self)->key);
}

static PyObject *ticket_states(PyObject *self, PyObject *none) {
    (void)none;
    return mp_embedding_tokens(mp_state_of(self), ticket_of(self), ((mp_ticket_object *)self)->key, false);
}

static PyObject *ticket_rows(PyObject *self, PyObject *none) {
    (void)none;
    return mp_embedding_tokens(mp_state_of(self), ticket_of(self), ((mp_ticket_object *)self)->key, true);
}

static PyObject *ticket_sparse(PyObject *self, PyObject *none) {
    (void)none;
    return mp_embedding_sparse(mp_state_of(self), ticket_of(self), ((mp_ticket_object *)self)->key);
}

static PyObject *ticket_texts_done(PyObject *self, PyObject *none) {
    (void)none;
    mp_request *request = mp_ticket_request_of(mp_state_of(self), ticket_of(self), MP_TEXT_EMBEDDING);
    return request ? PyLong_FromLong(
                         atomic_load_explicit(&((mp_embedding_request *)request)->done, memory_order_acquire))
                   : NULL;
}

static PyObject *ticket_text(PyObject *self, PyObject *args) {
    return mp_text_text(mp_state_of(self), ticket_of(self), args);
}

static PyObject *ticket_sampled_ids(PyObject *self, PyObject *args) {
    return mp_text_sampled_ids(mp_state_of(self), ticket_of(self), args);
}

static PyObject *ticket_mask(PyObject *self, PyObject *args) {
    return mp_text_mask(mp_state_of(self), ticket_of(self), ((mp_ticket_object *)self)->key, args);
}

static PyObject *ticket_tokens(PyObject *self, PyObject *args) {
    return mp_text_tokens(mp_state_of(self), ticket_of(self), args);
}

static PyObject *ticket_top_logprobs(PyObject *self, PyObject *args) {
    return mp_text_top_logprobs(mp_state_of(self), ticket_of(self), args);
}

static PyObject *ticket_usage(PyObject *self, PyObject *none) {
    (void)none;
    return mp_text_usage(mp_state_of(self), ticket_of(self));
}

static PyObject *ticket_prompt_logits(PyObject *self, PyObject *none) {
    (void)none;
    if (!mp_ticket_check(mp_state_of(self), ticket_of(self), ((mp_ticket_object *)self)->key))
        return NULL;
    return mp_text_prompt_logits(mp_state_of(self), ticket_of(self));
}

static PyObject *ticket_capture(PyObject *self, PyObject *none) {
    (void)none;
    if (!mp_ticket_done(ticket_of(self)))
        return mp_raise_new(mp_state_of(self), MP_INVALID_ARGUMENT, "the request is not done; call wait() first");
    return mp_text_capture(mp_state_of(self), ticket_of(self));
}

static PyObject *ticket_image_rows(PyObject *self, PyObject *none) {
    (void)none;
    if (!mp_ticket_check(mp_state_of(self), ticket_of(self), ((mp_ticket_object *)self)->key))
        return NULL;
    return mp_text_image_rows(mp_state_of(self), ticket_of(self));
}

static PyObject *ticket_image_progress(PyObject *self, PyObject *none) {
    (void)none;
    return mp_image_generation_progress(mp_state_of(self), ticket_of(self));
}

static PyObject *ticket_preview(PyObject *self, PyObject *args) {
    return mp_image_generation_preview(mp_state_of(self), ticket_of(self), args);
}

static PyObject *ticket_generated_images(PyObject *self, PyObject *none) {
    (void)none;
    return mp_image_generation_result(mp_state_of(self), ticket_of(self), ((mp_ticket_object *)self)->key);
}

static PyMethodDef methods[] = {
    {"wait", MP_METHOD(ticket_wait), METH_VARARGS | METH_KEYWORDS,
     "Wait until done; False if the timeout passes first (the request continues)."},
    {"wait_progress", MP_METHOD(ticket_wait_progress), METH_VARARGS | METH_KEYWORDS,
     "Wait until the progress counter exceeds `seen`; returns it (2**64 - 1 once done)."},
    {"done", ticket_done, METH_NOARGS, "True if the request is complete."},
    {"cancel", ticket_cancel, METH_NOARGS, "Ask the request to stop. Return False if it had already ended."},
    {"join", ticket_join, METH_NOARGS, "Count a waiter. The last waiter that gives up cancels the request."},
    {"waiters", ticket_waiters, METH_NOARGS, "Number of waiters that have not left."},
    {"check", ticket_check, METH_NOARGS, "Raise the error of a failed request. The request must be done."},
    {"bind", MP_METHOD(ticket_bind), METH_VARARGS | METH_KEYWORDS,
     "Notify a notifier, with this id, of all progress; in addition to notifiers bound before."},
    {"times", ticket_times, METH_NOARGS, "Seconds of time.monotonic(): submitted, started, finished; 0.0 = not yet."},
    {"position", ticket_position, METH_NOARGS, "Requests ahead in the queue; -1 once running or done."},
    {"eta", ticket_eta, METH_NOARGS, "Predicted seconds until it is done; 0.0 = done, or unknown."},
    {"vectors", ticket_vectors, METH_NOARGS, "float32 (n_texts, width), not copied."},
    {"states", ticket_states, METH_NOARGS, "Hidden states: float32 (n_tokens, width), not copied."},
    {"rows", ticket_rows, METH_NOARGS, "Token vectors or logits of labels: float32 (n_tokens, width), not copied."},
    {"sparse", ticket_sparse, METH_NOARGS, "Sparse vectors: (indptr, ids, weights, vocabulary), copied."},
    {"texts_done", ticket_texts_done, METH_NOARGS, "Texts finished so far."},
    {"text", ticket_text, METH_VARARGS, "(choice, start=0): final text, tokens so far, finish reason, stop index."},
    {"sampled_ids", ticket_sampled_ids, METH_VARARGS,
     "(choice, start): list of the ids from index `start` on, and True if no more will follow."},
    {"mask", ticket_mask, METH_VARARGS,
     "(choice, index, bits): set the tokens allowed at `index` of a choice, the next one; one bit per id."},
    {"tokens", ticket_tokens, METH_VARARGS,
     "(choice, start=0): ids, logprobs, byte_end of the tokens so far, from index `start` on."},
    {"top_logprobs", ticket_top_logprobs, METH_VARARGS,
     "(choice, start=0): (tokens, k) ids and logprobs of the top tokens, or None."},
    {"usage", ticket_usage, METH_NOARGS, "Prompt, generated and cached tokens; seconds queued, prompt, generation."},
    {"prompt_logits", ticket_prompt_logits, METH_NOARGS, "float32 (n_prompt, vocab) if requested, not copied."},
    {"capture", ticket_capture, METH_NOARGS,
     "With capture_values: float32 (tokens, values), not copied; layers, hidden, vocab; tokens that did not fit."},
    {"image_rows", ticket_image_rows, METH_NOARGS,
     "float32 (rows of all images, hidden) in order of computation, if prompt_logits was set; not copied."},
    {"image_progress", ticket_image_progress, METH_NOARGS,
     "Steps, previews and images finished so far; previews per image."},
    {"preview", ticket_preview, METH_VARARGS, "(index): uint8 (height, width, 3) of a finished preview, not copied."},
    {"generated_images", ticket_generated_images, METH_NOARGS,
     "A dict of arrays, not copied: pixels, latents, and the kept intermediate results."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A request in flight. Dropping the last reference cancels it."},
    {Py_tp_dealloc, ticket_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec mp_ticket_type_spec = {
    .name = "mpool._core.Ticket",
    .basicsize = sizeof(mp_ticket_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
