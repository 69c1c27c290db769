/* binding.h: shared by the files of the Python binding. Only python/ includes Python.h and numpy.
 *
 * The GIL must be held on entry to every function here, unless a comment says otherwise. Functions that wait or compute
 * release it meanwhile. No thread of the core ever takes the GIL, so destroying a registry is safe at any time,
 * including interpreter shutdown. */
#ifndef MP_PYTHON_BINDING_H
#define MP_PYTHON_BINDING_H

/* One extension for 3.11 and every later Python. Free-threaded builds have no limited API, and that of 3.10 has no
 * Py_buffer. setup.py names the file. */
#include <patchlevel.h>
#include <pyconfig.h>
#if PY_VERSION_HEX >= 0x030B0000 && !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API  NPY_1_7_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL mp_numpy
#ifndef MP_PYTHON_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "files/spec.h"
#include "registry/registry.h"

/* Free-threaded builds: serialize calls on a mutable object. Empty in other builds, where the GIL serializes them. */
#ifdef Py_GIL_DISABLED
#define MP_BEGIN_EXCLUSIVE(object) Py_BEGIN_CRITICAL_SECTION(object)
#define MP_END_EXCLUSIVE()         Py_END_CRITICAL_SECTION()
#else
#define MP_BEGIN_EXCLUSIVE(object) {
#define MP_END_EXCLUSIVE()         }
#endif

#define MP_METHOD(function) ((PyCFunction)(void (*)(void))(function))

typedef struct mp_state { /* state of the module */
    PyObject *errors;     /* the module mpool.errors, imported on first use */
    PyTypeObject *spec_type, *gguf_type, *bpe_type, *matrix_type, *notifier_type, *ticket_type, *waiter_type,
        *registry_type, *search_type, *maxsim_type;
    unsigned long main_thread; /* identifier of the thread that runs signal handlers */
} mp_state;

mp_state *mp_state_of_module(PyObject *module);
mp_state *mp_state_of_type(PyTypeObject *type);
static inline mp_state *mp_state_of(PyObject *self) { return mp_state_of_type(Py_TYPE(self)); }

/* --- errors.c: each sets an exception and returns NULL --- */

/* key: the key of the model concerned, or NULL. */
PyObject *mp_raise(mp_state *state, const mp_error *error, const char *key);
PyObject *mp_raise_new(mp_state *state, mp_status code, const char *format, ...) __attribute__((format(printf, 3, 4)));
PyObject *mp_status_table(PyObject *module, PyObject *none);

/* --- waiting (module.c) --- */

/* Convert a timeout in seconds to a deadline; None and infinity give 0 (no deadline). Returns false with an
 * exception. */
bool mp_deadline(mp_state *state, PyObject *timeout, uint64_t *deadline_ns);
static inline bool mp_is_main_thread(const mp_state *state) {
    return PyThread_get_thread_ident() == state->main_thread;
}
/* End of the next wait: the deadline, or earlier in the main thread, which must check for signals. 0: no end. */
uint64_t mp_wait_slice(const mp_state *state, uint64_t deadline_ns);
/* mp_ticket_wait that checks for signals. Returns 1 if the ticket progressed, 0 if the deadline passed, -1 if a signal
 * handler raised an exception. */
int mp_wait_ticket(mp_state *state, mp_ticket *ticket, uint64_t seen, uint64_t deadline_ns, uint64_t *progress);

/* --- type_<name>.c --- */

extern PyType_Spec mp_spec_type_spec, mp_gguf_type_spec, mp_bpe_type_spec, mp_matrix_type_spec, mp_notifier_type_spec,
    mp_ticket_type_spec, mp_waiter_type_spec, mp_registry_type_spec, mp_search_type_spec, mp_maxsim_type_spec;

/* Takes ownership of the spec. */
PyObject *mp_spec_object(mp_state *state, mp_spec *spec);
/* Borrow the spec of a Spec object and freeze it. Returns NULL with TypeError for another object. */
mp_spec *mp_spec_freeze_object(mp_state *state, PyObject *object);
PyObject *mp_read_gguf(PyObject *module, PyObject *path);
/* Returns the byte-pair vocabulary of a spec that no longer changes, or None if the spec has no suitable one. */
PyObject *mp_bpe_object(mp_state *state, mp_spec *spec);
/* Borrow the notifier. Returns NULL with an exception if the object is not a Notifier or is closed. */
mp_notifier *mp_notifier_of(mp_state *state, PyObject *object);

/* Borrow the registry. Returns NULL with TypeError for another object. */
mp_registry *mp_registry_of(mp_state *state, PyObject *object);
/* Returns a list with a dict for each model (registry_rows.c). */
PyObject *mp_registry_rows(mp_state *state, mp_registry *registry);

typedef struct mp_ticket_object {
    PyObject_HEAD mp_ticket *ticket; /* the caller's reference */
    PyObject *registry;              /* keeps the workers alive until the request is complete */
    _Atomic int waiters;             /* Waiter objects that have not left (type_waiter.c) */
    char key[256];
} mp_ticket_object;
/* Takes ownership of the caller's reference to the ticket. */
PyObject *mp_ticket_object_new(mp_state *state, mp_ticket *ticket, PyObject *registry, const char *key);
/* Count a new waiter of a Ticket. Returns the Waiter. */
PyObject *mp_waiter_new(mp_state *state, PyObject *ticket);
/* Raise the error of a failed request, or INVALID_ARGUMENT if the request is not done. Returns false with an
 * exception. */
bool mp_ticket_check(mp_state *state, mp_ticket *ticket, const char *key);
/* Borrow the request of a ticket. Returns NULL with an exception if the request has another capability. */
mp_request *mp_ticket_request_of(mp_state *state, mp_ticket *ticket, mp_capability capability);

/* --- convert_<capability>.c --- */

/* Keyword arguments that every submit method has after its own. */
typedef struct mp_submit_args {
    mp_submit_options options;
    const char *key;
    /* --- as passed by the caller --- */
    PyObject *timeout;
    double patience, keep_alive; /* seconds; < 0: default */
    unsigned char priority, service_class, fail_fast;
    unsigned long long tenant, revision;
    int uncounted;
    const char *policy;
} mp_submit_args;
#define MP_SUBMIT_DEFAULTS \
    { .timeout = Py_None, .patience = -1, .keep_alive = -1, .priority = 2, .policy = "default" }
#define MP_SUBMIT_NAMES \
    "timeout", "patience", "keep_alive", "priority", "service_class", "tenant", "fail_fast", "uncounted", "policy", \
        "revision"
#define MP_SUBMIT_FORMAT "OddbbKbpsK"
#define MP_SUBMIT_TARGETS(s)                                                                            \
    &(s)->timeout, &(s)->patience, &(s)->keep_alive, &(s)->priority, &(s)->service_class, &(s)->tenant, \
        &(s)->fail_fast, &(s)->uncounted, &(s)->policy, &(s)->revision
/* Check the arguments and fill in `options`. Returns false with an exception. */
bool mp_submit_options_in(mp_state *state, mp_submit_args *submit);
/* Convert seconds to nanoseconds: infinity gives MP_FOREVER, and 0 s gives 1 ns, because 0 means the default. Returns
 * false with an exception. */
bool mp_seconds_in(mp_state *state, const char *name, double seconds, uint64_t *ns);
/* Return an array over memory of the ticket's request, without copying. The array pins the ticket. */
PyObject *mp_borrowed_array(mp_ticket *ticket, int ndim, npy_intp *shape, int type, void *data);
/* Return a tuple of a sequence's items, which other threads cannot change. Returns NULL with an exception; `message` is
 * that of the TypeError. */
PyObject *mp_tuple_in(PyObject *sequence, const char *message);
/* Convert any object that casts safely to `type` to a contiguous array. Returns a new reference. */
PyArrayObject *mp_array_in(mp_state *state, PyObject *object, int type, const char *name);

/* Parse the arguments of a submit function into a new request. Returns NULL with an exception. */
typedef mp_request *mp_from_python(mp_state *state, PyObject *args, PyObject *kwargs, mp_submit_args *submit);
/* mp_<capability>_from_python parses a request. The other functions return results of a ticket, as the methods of
 * Ticket that mpool/_core.pyi describes; `args`: the method's positional arguments. All return NULL with an
 * exception. */
mp_request *mp_embedding_from_python(mp_state *state, PyObject *args, PyObject *kwargs, mp_submit_args *submit);
PyObject *mp_embedding_vectors(mp_state *state, mp_ticket *ticket, const char *key);
/* of_head: rows of the row head, else hidden states; [n_tokens, width] */
PyObject *mp_embedding_tokens(mp_state *state, mp_ticket *ticket, const char *key, bool of_head);
/* (indptr int64 [n_texts + 1], ids int32, weights float32, vocabulary): copies */
PyObject *mp_embedding_sparse(mp_state *state, mp_ticket *ticket, const char *key);

mp_request *mp_image_embedding_from_python(mp_state *state, PyObject *args, PyObject *kwargs, mp_submit_args *submit);
PyObject *mp_image_embedding_vectors(mp_state *state, mp_ticket *ticket, const char *key);

mp_request *mp_text_from_python(mp_state *state, PyObject *args, PyObject *kwargs, mp_submit_args *submit);
PyObject *mp_text_text(mp_state *state, mp_ticket *ticket, PyObject *args);
PyObject *mp_text_tokens(mp_state *state, mp_ticket *ticket, PyObject *args);
PyObject *mp_text_sampled_ids(mp_state *state, mp_ticket *ticket, PyObject *args);
PyObject *mp_text_mask(mp_state *state, mp_ticket *ticket, const char *key, PyObject *args);
PyObject *mp_text_top_logprobs(mp_state *state, mp_ticket *ticket, PyObject *args);
PyObject *mp_text_usage(mp_state *state, mp_ticket *ticket);
PyObject *mp_text_prompt_logits(mp_state *state, mp_ticket *ticket);
PyObject *mp_text_capture(mp_state *state, mp_ticket *ticket);
PyObject *mp_text_image_rows(mp_state *state, mp_ticket *ticket);

mp_request *mp_image_generation_from_python(mp_state *state, PyObject *args, PyObject *kwargs, mp_submit_args *submit);
PyObject *mp_image_generation_progress(mp_state *state, mp_ticket *ticket);
PyObject *mp_image_generation_preview(mp_state *state, mp_ticket *ticket, PyObject *args);
PyObject *mp_image_generation_result(mp_state *state, mp_ticket *ticket, const char *key);

#endif
