/* convert_text_to_image.c: converts an image generation request from Python, and its images to arrays. */
#include <stdatomic.h>

#include "python/convert.h"

enum { ARRAYS = MP_T2I_TEXTS * MP_T2I_ENCODERS };

static bool counts_in(PyObject *counts, mp_image_generation_args *args) {
    if (!PyTuple_Check(counts)) {
        PyErr_Format(PyExc_TypeError, "`counts` must be a tuple of three numbers, got %R", (PyObject *)Py_TYPE(counts));
        return false;
    }
    return PyArg_ParseTuple(counts, "iii", &args->n_ids[0], &args->n_ids[1], &args->n_ids[2]);
}

/* Convert ids[text][encoder], arrays or None, and put the arrays into `arrays`, which the caller releases. Returns
 * false with an exception. */
static bool ids_in(mp_state *state, PyObject *texts, PyArrayObject *arrays[ARRAYS], mp_image_generation_args *args) {
    PyObject *outer = mp_tuple_in(texts, "`ids` must be a list of lists of arrays");
    if (!outer)
        return false;
    Py_ssize_t count = PyTuple_Size(outer);
    bool ok = count >= 1 && count <= MP_T2I_TEXTS;
    if (!ok)
        mp_raise_new(state, MP_INVALID_ARGUMENT, "`ids` must have 1 to %d texts, got %zd", (int)MP_T2I_TEXTS, count);
    args->n_texts = (int32_t)count;
    for (Py_ssize_t t = 0; ok && t < count; t++) {
        PyObject *inner = mp_tuple_in(PyTuple_GetItem(outer, t), "`ids` must be a list of lists of arrays");
        ok = inner && PyTuple_Size(inner) == MP_T2I_ENCODERS;
        if (inner && !ok)
            mp_raise_new(state, MP_INVALID_ARGUMENT, "`ids[%zd]` must have %d encoders, got %zd", t,
                         (int)MP_T2I_ENCODERS, PyTuple_Size(inner));
        for (int e = 0; ok && e < MP_T2I_ENCODERS; e++) {
            PyObject *item = PyTuple_GetItem(inner, e);
            if (item == Py_None)
                continue;
            PyArrayObject *array = arrays[t * MP_T2I_ENCODERS + e] = mp_array_in(state, item, NPY_INT32, "ids");
            ok = array != NULL;
            if (ok && PyArray_DIM(array, 0) != args->n_ids[e]) {
                mp_raise_new(state, MP_INVALID_ARGUMENT, "`ids[%zd][%d]` must have %d tokens, as in `counts`, got %zd",
                             t, e, args->n_ids[e], PyArray_DIM(array, 0));
                ok = false;
            }
            if (ok)
                args->ids[t][e] = PyArray_DATA(array);
        }
        Py_XDECREF(inner);
    }
    Py_DECREF(outer);
    return ok;
}

mp_request *mp_image_generation_from_python(mp_state *state, PyObject *positional, PyObject *keywords,
                                            mp_submit_args *submit) {
    static char *names[] = {"key",    "width", "height",   "ids",           "counts", "noise",         "times",
                            "sigmas", "n",     "guidance", "preview_every", "keep",   MP_SUBMIT_NAMES, NULL};
    mp_image_generation_args args = {.n_images = 1};
    mp_image_generation_request *request = NULL;
    mp_entry_count n_steps = {-1, NULL}, n_noise = {-1, NULL};
    PyObject *ids, *counts, *noise, *times, *sigmas, *made[3] = {NULL};
    PyArrayObject *arrays[ARRAYS] = {NULL};
    int keep = 0;
    bool ok = true;
    *submit = (mp_submit_args)MP_SUBMIT_DEFAULTS;
    if (!PyArg_ParseTupleAndKeywords(positional, keywords, "siiOOOOO|$ifip" MP_SUBMIT_FORMAT, names, &submit->key,
                                     &args.width, &args.height, &ids, &counts, &noise, &times, &sigmas, &args.n_images,
                                     &args.guidance, &args.preview_every, &keep, MP_SUBMIT_TARGETS(submit)) ||
        !mp_submit_options_in(state, submit))
        return NULL;
    args.keep = keep != 0;
    args.noise = mp_data_in(state, noise, NPY_FLOAT32, "noise", 1, &n_noise, 0, &made[0], &ok);
    args.times = mp_data_in(state, times, NPY_FLOAT32, "times", 1, &n_steps, 0, &made[1], &ok);
    args.sigmas = mp_data_in(state, sigmas, NPY_FLOAT32, "sigmas", 1, &n_steps, 1, &made[2], &ok);
    ok = ok && mp_count_in(state, "the number of steps", &n_steps, 1, MP_T2I_MAX_STEPS) &&
         mp_count_in(state, "the number of latents", &n_noise, 1, INT32_MAX) && counts_in(counts, &args) &&
         ids_in(state, ids, arrays, &args);
    if (ok) {
        mp_error error;
        mp_status status;
        args.n_steps = (int32_t)n_steps.n;
        args.n_noise = n_noise.n;
        Py_BEGIN_ALLOW_THREADS /* the call copies megabytes */
            status = mp_image_generation_request_create(&args, &request, &error);
        Py_END_ALLOW_THREADS
        if (status != MP_OK)
            mp_raise(state, &error, submit->key);
    }
    for (int i = 0; i < 3; i++)
        Py_XDECREF(made[i]);
    for (int i = 0; i < ARRAYS; i++)
        Py_XDECREF((PyObject *)arrays[i]);
    return request ? &request->base : NULL;
}

PyObject *mp_image_generation_progress(mp_state *state, mp_ticket *ticket) {
    const mp_image_generation_request *request =
        (mp_image_generation_request *)mp_ticket_request_of(state, ticket, MP_TEXT_TO_IMAGE);
    return request
               ? Py_BuildValue("(iiii)", atomic_load_explicit(&request->steps_done, memory_order_acquire),
                               atomic_load_explicit(&request->previews_done, memory_order_acquire),
                               atomic_load_explicit(&request->images_done, memory_order_acquire), request->n_previews)
               : NULL;
}

PyObject *mp_image_generation_preview(mp_state *state, mp_ticket *ticket, PyObject *args) {
    int index;
    mp_image_generation_request *request =
        (mp_image_generation_request *)mp_ticket_request_of(state, ticket, MP_TEXT_TO_IMAGE);
    if (!request || !PyArg_ParseTuple(args, "i:preview", &index))
        return NULL;
    int32_t done = atomic_load_explicit(&request->previews_done, memory_order_acquire);
    if (index < 0 || index >= done)
        return mp_raise_new(state, MP_INVALID_ARGUMENT, "preview is %d, but %d are finished", index, done);
    return mp_borrowed_array(ticket, 3, (npy_intp[]){request->height, request->width, 3}, NPY_UINT8,
                             request->previews + (int64_t)index * request->height * request->width * 3);
}

static bool put_item(PyObject *dict, const char *name, PyObject *value) {
    int status = value ? PyDict_SetItemString(dict, name, value) : -1;
    Py_XDECREF(value);
    return status == 0;
}

PyObject *mp_image_generation_result(mp_state *state, mp_ticket *ticket, const char *key) {
    mp_image_generation_request *c =
        (mp_image_generation_request *)mp_ticket_request_of(state, ticket, MP_TEXT_TO_IMAGE);
    if (!c || !mp_ticket_check(state, ticket, key))
        return NULL;
    PyObject *dict = PyDict_New();
    npy_intp pixels[] = {c->n_images, c->height, c->width, 3};
    npy_intp latents[] = {c->n_images, c->channels, c->latent_height, c->latent_width};
    npy_intp history[] = {c->n_images, c->n_steps, c->channels, c->latent_height, c->latent_width};
    npy_intp texts[] = {c->n_texts, c->text_rows, c->text_width}, pooled[] = {c->n_texts, c->pooled_width};
    if (dict && put_item(dict, "pixels", mp_borrowed_array(ticket, 4, pixels, NPY_FLOAT32, c->pixels)) &&
        put_item(dict, "latents", mp_borrowed_array(ticket, 4, latents, NPY_FLOAT32, c->latents)) &&
        (!c->keep || (put_item(dict, "texts", mp_borrowed_array(ticket, 3, texts, NPY_FLOAT32, c->texts)) &&
                      put_item(dict, "pooled", mp_borrowed_array(ticket, 2, pooled, NPY_FLOAT32, c->pooled)) &&
                      put_item(dict, "history", mp_borrowed_array(ticket, 5, history, NPY_FLOAT32, c->history)))))
        return dict;
    Py_XDECREF(dict);
    return NULL;
}
