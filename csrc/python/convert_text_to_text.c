/* convert_text_to_text.c: arguments of a text call, and what it has produced so far. */
#include <stdatomic.h>
#include <string.h>

#include "python/binding.h"

/* --- arguments --- */

/* Items of a sequence as an array that the caller frees with PyMem_Free; NULL for none. */
typedef struct list_in {
    void *items;
    int32_t count;
} list_in;

static PyObject *fast_list(mp_state *state, PyObject *object, const char *name, Py_ssize_t most) {
    PyObject *list = PySequence_Fast(object, "a sequence is needed");
    if (list && PySequence_Fast_GET_SIZE(list) > most) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "%s has %zd entries, allowed: at most %zd", name,
                     PySequence_Fast_GET_SIZE(list), most);
        Py_CLEAR(list);
    }
    return list;
}

static bool ints_in(mp_state *state, PyObject *object, const char *name, list_in *out) {
    PyObject *list = fast_list(state, object, name, MP_TEXT_MOST_IDS);
    if (!list)
        return false;
    out->count = (int32_t)PySequence_Fast_GET_SIZE(list);
    int32_t *items = out->items = PyMem_Calloc((size_t)out->count + 1, sizeof(int32_t));
    bool ok = items || PyErr_NoMemory();
    for (int32_t i = 0; ok && i < out->count; i++) {
        long value = PyLong_AsLong(PySequence_Fast_GET_ITEM(list, i));
        if (value == -1 && PyErr_Occurred()) {
            ok = false;
        } else if (value < 0 || value > INT32_MAX) {
            mp_raise_new(state, MP_INVALID_ARGUMENT, "%s[%d] is %ld, allowed: a token id", name, i, value);
            ok = false;
        } else {
            items[i] = (int32_t)value;
        }
    }
    Py_DECREF(list);
    return ok;
}

static bool floats_in(mp_state *state, PyObject *object, const char *name, list_in *out) {
    PyObject *list = fast_list(state, object, name, MP_TEXT_MOST_IDS);
    if (!list)
        return false;
    out->count = (int32_t)PySequence_Fast_GET_SIZE(list);
    float *items = out->items = PyMem_Calloc((size_t)out->count + 1, sizeof(float));
    bool ok = items || PyErr_NoMemory();
    for (int32_t i = 0; ok && i < out->count; i++) {
        double value = PyFloat_AsDouble(PySequence_Fast_GET_ITEM(list, i));
        ok = !(value == -1.0 && PyErr_Occurred());
        items[i] = (float)value;
    }
    Py_DECREF(list);
    return ok;
}

/* Stop strings: borrowed from the bytes objects in *list, which the caller keeps. */
typedef struct stops_in {
    PyObject *list;
    const char *text[MP_TEXT_MOST_STOPS];
    int32_t bytes[MP_TEXT_MOST_STOPS];
    int32_t count;
} stops_in;

static bool stops_from(mp_state *state, PyObject *object, stops_in *out) {
    if (PyBytes_Check(object) || PyUnicode_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "stop is a sequence of bytes, not one string");
        return false;
    }
    out->list = fast_list(state, object, "stop", MP_TEXT_MOST_STOPS);
    if (!out->list)
        return false;
    out->count = (int32_t)PySequence_Fast_GET_SIZE(out->list);
    for (int32_t i = 0; i < out->count; i++) {
        char *text;
        Py_ssize_t bytes;
        if (PyBytes_AsStringAndSize(PySequence_Fast_GET_ITEM(out->list, i), &text, &bytes) < 0)
            return false;
        out->text[i] = text;
        out->bytes[i] = bytes > INT32_MAX ? INT32_MAX : (int32_t)bytes;
    }
    return true;
}

/* Images: None, or a tuple of arrays: pixels, sizes, tile_keys, runs, run_keys, sources (capability.h). The caller
 * gives up `parts`. */
enum { IMAGE_PARTS = 6 };

static bool images_in(mp_state *state, PyObject *object, PyArrayObject **parts, mp_text_image_args *out) {
    static const struct {
        const char *name;
        int type, width; /* of an entry */
    } part[IMAGE_PARTS] = {{"pixels", NPY_UINT8, 1},  {"sizes", NPY_INT32, 2},
                           {"tile_keys", NPY_UINT8, MP_IMAGE_KEY}, {"runs", NPY_INT32, 3},
                           {"run_keys", NPY_UINT8, MP_IMAGE_KEY},  {"sources", NPY_INT32, 1}};
    npy_intp count[IMAGE_PARTS];
    if (object == Py_None)
        return true;
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != IMAGE_PARTS) {
        PyErr_SetString(PyExc_TypeError, "images is a tuple of six arrays");
        return false;
    }
    for (int i = 0; i < IMAGE_PARTS; i++) {
        parts[i] = mp_array_in(state, PyTuple_GET_ITEM(object, i), part[i].type, part[i].name);
        if (!parts[i])
            return false;
        count[i] = PyArray_DIM(parts[i], 0) / part[i].width;
    }
    if (count[1] > MP_TEXT_MOST_TILES || count[2] != count[1] || count[3] > count[1] || count[4] != count[3]) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "images has %zd tiles and %zd runs, allowed: at most %d tiles, with "
                     "keys each", count[1], count[3], (int)MP_TEXT_MOST_TILES);
        return false;
    }
    *out = (mp_text_image_args){
        .n_tiles = (int32_t)count[1],
        .n_runs = (int32_t)count[3],
        .sizes = PyArray_DATA(parts[1]),
        .pixels = PyArray_DATA(parts[0]),
        .n_bytes = count[0],
        .tile_keys = PyArray_DATA(parts[2]),
        .run_keys = PyArray_DATA(parts[4]),
        .runs = PyArray_DATA(parts[3]),
        .sources = PyArray_DATA(parts[5]),
        .n_sources = count[5],
    };
    return true;
}

mp_text_call *mp_text_from_python(mp_state *state, PyObject *args, PyObject *kwargs, mp_submit_args *submit) {
    static char *names[] = {"key",
                            "prompt",
                            "temperature",
                            "top_k",
                            "top_p",
                            "min_p",
                            "repetition_penalty",
                            "presence_penalty",
                            "frequency_penalty",
                            "seed",
                            "max_tokens",
                            "min_tokens",
                            "logprobs",
                            "ignore_eos",
                            "n",
                            "stop",
                            "stop_ids",
                            "bias_ids",
                            "bias",
                            "prompt_logits",
                            "vision",
                            "images",
                            "mask",
                            "capture_values",
                            "capture_records",
                            MP_SUBMIT_NAMES,
                            NULL};
    PyObject *prompt_in, *stop = NULL, *stop_ids = NULL, *bias_ids = NULL, *bias = NULL, *images = Py_None;
    PyObject *mask = Py_None;
    mp_text_args text = {.n_choices = 0};
    mp_sampling *s = &text.sampling;
    unsigned long long seed = 0;
    int ignore_eos = 0, prompt_logits = 0, vision = 0;
    *submit = (mp_submit_args)MP_SUBMIT_DEFAULTS;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO|$fifffffKiiipiOOOOppOOii" MP_SUBMIT_FORMAT, names,
                                     &submit->key, &prompt_in,
                                     &s->temperature, &s->top_k, &s->top_p, &s->min_p, &s->repetition_penalty,
                                     &s->presence_penalty, &s->frequency_penalty, &seed, &s->max_tokens, &s->min_tokens,
                                     &s->logprobs, &ignore_eos, &text.n_choices, &stop, &stop_ids, &bias_ids, &bias,
                                     &prompt_logits, &vision, &images, &mask, &text.capture_values,
                                     &text.capture_records, MP_SUBMIT_TARGETS(submit)) ||
        !mp_submit_options_in(state, submit))
        return NULL;
    if (!bias) { /* the last that is needed: the format cannot ask for keywords */
        PyErr_SetString(PyExc_TypeError, "submit_text needs every keyword from temperature to bias");
        return NULL;
    }
    if (mask != Py_None && !PyBytes_Check(mask)) {
        PyErr_SetString(PyExc_TypeError, "mask is bytes, or None");
        return NULL;
    }
    s->seed = seed;
    s->ignore_eos = ignore_eos;

    mp_text_call *call = NULL;
    list_in stop_list = {0}, bias_list = {0}, values = {0};
    stops_in stops = {.list = NULL};
    PyArrayObject *parts[IMAGE_PARTS] = {NULL};
    PyArrayObject *prompt = mp_array_in(state, prompt_in, NPY_INT32, "prompt");
    if (!prompt || !stops_from(state, stop, &stops) || !ints_in(state, stop_ids, "stop_ids", &stop_list) ||
        !ints_in(state, bias_ids, "bias_ids", &bias_list) || !floats_in(state, bias, "bias", &values) ||
        !images_in(state, images, parts, &text.images))
        goto cleanup;
    if (bias_list.count != values.count) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "there are %d bias_ids and %d values in bias", bias_list.count,
                     values.count);
    } else if (PyArray_DIM(prompt, 0) > INT32_MAX) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "the prompt has %zd tokens, allowed: below 2^31",
                     PyArray_DIM(prompt, 0));
    } else {
        text.n_prompt = (int32_t)PyArray_DIM(prompt, 0);
        text.prompt = PyArray_DATA(prompt);
        text.n_stop = stops.count;
        text.stop = stops.text;
        text.stop_bytes = stops.bytes;
        text.n_stop_ids = stop_list.count;
        text.stop_ids = stop_list.items;
        text.n_bias = bias_list.count;
        text.bias_ids = bias_list.items;
        text.bias = values.items;
        text.want_prompt_logits = prompt_logits;
        text.vision = vision;
        text.mask = mask == Py_None ? NULL : PyBytes_AS_STRING(mask);
        text.mask_bytes = mask == Py_None ? 0 : PyBytes_GET_SIZE(mask);
        mp_error error;
        mp_status status;
        if (text.images.n_bytes > 0) {
            Py_BEGIN_ALLOW_THREADS /* copies megabytes */
                status = mp_text_call_create(&text, &call, &error);
            Py_END_ALLOW_THREADS
        } else {
            status = mp_text_call_create(&text, &call, &error);
        }
        if (status != MP_OK)
            mp_raise(state, &error, submit->key);
    }
cleanup:
    PyMem_Free(stop_list.items);
    PyMem_Free(bias_list.items);
    PyMem_Free(values.items);
    Py_XDECREF(stops.list);
    Py_XDECREF(prompt);
    for (int i = 0; i < IMAGE_PARTS; i++)
        Py_XDECREF(parts[i]);
    return call;
}

/* --- results; also while the call runs: what the counts cover is complete --- */

static mp_text_call *text_call(mp_state *state, mp_ticket *ticket) {
    bool vision = mp_ticket_call(ticket)->capability == MP_VISION;
    return (mp_text_call *)mp_ticket_call_of(state, ticket, vision ? MP_VISION : MP_TEXT_TO_TEXT);
}

/* The choice that is the first of args; NULL with an exception. */
static mp_choice *choice_at(mp_state *state, mp_ticket *ticket, int index) {
    mp_text_call *call = text_call(state, ticket);
    if (!call)
        return NULL;
    if (index >= 0 && index < call->n_choices)
        return &call->choices[index];
    mp_raise_new(state, MP_INVALID_ARGUMENT, "choice is %d, allowed: 0 to %d", index, call->n_choices - 1);
    return NULL;
}

PyObject *mp_text_text(mp_state *state, mp_ticket *ticket, PyObject *args) {
    int index;
    Py_ssize_t start = 0;
    mp_choice *choice;
    if (!PyArg_ParseTuple(args, "i|n:text", &index, &start) || !(choice = choice_at(state, ticket, index)))
        return NULL;
    bool done = mp_ticket_done(ticket);
    /* finish first: it is stored last, so that a finished choice comes with all of its text */
    int finish = atomic_load_explicit(&choice->finish, memory_order_acquire);
    if (finish == MP_FINISH_CANCELLED && !done) /* it left a worker that failed, and may be tried again */
        finish = MP_FINISH_NONE;
    uint32_t tokens = atomic_load_explicit(&choice->token_count, memory_order_acquire);
    uint32_t bytes = atomic_load_explicit(&choice->text_bytes, memory_order_acquire);
    if (start < 0 || start > (Py_ssize_t)bytes)
        return mp_raise_new(state, MP_INVALID_ARGUMENT, "start is %zd, allowed: 0 to %u", start, bytes);
    return Py_BuildValue("(y#Iii)", bytes ? choice->text + start : "", (Py_ssize_t)bytes - start, tokens, finish,
                         finish == MP_FINISH_NONE ? -1 : choice->stop_index);
}

PyObject *mp_text_drawn_ids(mp_state *state, mp_ticket *ticket, PyObject *args) {
    int index;
    unsigned int start;
    mp_choice *choice;
    if (!PyArg_ParseTuple(args, "iI:drawn_ids", &index, &start) || !(choice = choice_at(state, ticket, index)))
        return NULL;
    bool done = mp_ticket_done(ticket);
    int finish = atomic_load_explicit(&choice->finish, memory_order_acquire);
    bool ended = finish != MP_FINISH_NONE && (finish != MP_FINISH_CANCELLED || done); /* see mp_text_text */
    uint32_t count = atomic_load_explicit(&choice->token_count, memory_order_acquire);
    PyObject *ids = PyList_New(count > start ? (Py_ssize_t)(count - start) : 0);
    for (uint32_t i = start; ids && i < count; i++) {
        PyObject *id = PyLong_FromLong(choice->tokens[i].id);
        if (!id)
            Py_CLEAR(ids);
        else
            PyList_SET_ITEM(ids, (Py_ssize_t)(i - start), id);
    }
    return ids ? Py_BuildValue("(NO)", ids, ended ? Py_True : Py_False) : NULL;
}

PyObject *mp_text_mask(mp_state *state, mp_ticket *ticket, const char *key, PyObject *args) {
    int index;
    unsigned int token;
    Py_buffer mask;
    mp_text_call *call;
    mp_error error;
    if (!PyArg_ParseTuple(args, "iIy*:mask", &index, &token, &mask))
        return NULL;
    call = text_call(state, ticket);
    mp_status status = call ? mp_text_call_mask(call, index, token, mask.buf, mask.len, &error) : MP_OK;
    PyBuffer_Release(&mask);
    if (!call)
        return NULL;
    if (status != MP_OK)
        return mp_raise(state, &error, key);
    mp_ticket_wake(ticket);
    Py_RETURN_NONE;
}

/* Of (choice, start=0): the choice, and how many of its tokens there are from the start on, 0 if they are fewer. */
static mp_choice *tokens_from(mp_state *state, mp_ticket *ticket, PyObject *args, const char *format,
                              unsigned int *start, npy_intp *count) {
    int index;
    mp_choice *choice;
    *start = 0;
    if (!PyArg_ParseTuple(args, format, &index, start) || !(choice = choice_at(state, ticket, index)))
        return NULL;
    uint32_t tokens = atomic_load_explicit(&choice->token_count, memory_order_acquire);
    *count = tokens > *start ? (npy_intp)(tokens - *start) : 0;
    return choice;
}

PyObject *mp_text_tokens(mp_state *state, mp_ticket *ticket, PyObject *args) {
    unsigned int start;
    npy_intp count;
    mp_choice *choice = tokens_from(state, ticket, args, "i|I:tokens", &start, &count);
    if (!choice)
        return NULL;
    PyObject *ids = PyArray_SimpleNew(1, &count, NPY_INT32), *logprobs = PyArray_SimpleNew(1, &count, NPY_FLOAT32);
    PyObject *ends = PyArray_SimpleNew(1, &count, NPY_UINT32), *result = NULL;
    if (ids && logprobs && ends) {
        int32_t *id = PyArray_DATA((PyArrayObject *)ids);
        float *logprob = PyArray_DATA((PyArrayObject *)logprobs);
        uint32_t *end = PyArray_DATA((PyArrayObject *)ends);
        for (npy_intp i = 0; i < count; i++) {
            id[i] = choice->tokens[start + i].id;
            logprob[i] = choice->tokens[start + i].logprob;
            end[i] = choice->tokens[start + i].byte_end;
        }
        result = PyTuple_Pack(3, ids, logprobs, ends);
    }
    Py_XDECREF(ids);
    Py_XDECREF(logprobs);
    Py_XDECREF(ends);
    return result;
}

PyObject *mp_text_top_logprobs(mp_state *state, mp_ticket *ticket, PyObject *args) {
    unsigned int start;
    npy_intp shape[2];
    mp_choice *choice = tokens_from(state, ticket, args, "i|I:top_logprobs", &start, &shape[0]);
    if (!choice)
        return NULL;
    int k = text_call(state, ticket)->sampling.logprobs;
    if (k <= 0)
        Py_RETURN_NONE;
    shape[1] = k;
    PyObject *ids = PyArray_SimpleNew(2, shape, NPY_INT32), *logprobs = PyArray_SimpleNew(2, shape, NPY_FLOAT32);
    PyObject *result = NULL;
    if (ids && logprobs) {
        size_t items = (size_t)shape[0] * (size_t)k, first = (size_t)start * (size_t)k;
        if (items) {
            memcpy(PyArray_DATA((PyArrayObject *)ids), choice->top_ids + first, items * sizeof(int32_t));
            memcpy(PyArray_DATA((PyArrayObject *)logprobs), choice->top_logprobs + first, items * sizeof(float));
        }
        result = PyTuple_Pack(2, ids, logprobs);
    }
    Py_XDECREF(ids);
    Py_XDECREF(logprobs);
    return result;
}

static double seconds_between(uint64_t from, uint64_t to) {
    return from && to > from ? (double)(to - from) * 1e-9 : 0.0;
}

PyObject *mp_text_usage(mp_state *state, mp_ticket *ticket) {
    mp_text_call *call = text_call(state, ticket);
    if (!call)
        return NULL;
    unsigned long generated = 0;
    for (int i = 0; i < call->n_choices; i++)
        generated += atomic_load_explicit(&call->choices[i].token_count, memory_order_acquire);
    uint64_t submitted, started, finished;
    mp_ticket_times(ticket, &submitted, &started, &finished);
    if (!mp_ticket_done(ticket)) /* the engine's times are complete once it is done */
        return Py_BuildValue("(ikiddd)", call->n_prompt, generated, 0, seconds_between(submitted, started), 0.0, 0.0);
    uint64_t prompt_done = call->prompt_done_ns ? call->prompt_done_ns : finished;
    return Py_BuildValue("(ikiddd)", call->n_prompt, generated, call->cached_tokens,
                         seconds_between(submitted, started), seconds_between(started, prompt_done),
                         seconds_between(prompt_done, finished));
}

PyObject *mp_text_prompt_logits(mp_state *state, mp_ticket *ticket) {
    mp_text_call *call = text_call(state, ticket);
    if (!call)
        return NULL;
    if (!call->prompt_logits)
        return mp_raise_new(state, MP_INVALID_ARGUMENT, "the call was made without prompt_logits");
    return mp_borrowed_array(ticket, 2, (npy_intp[]){call->n_prompt, call->vocab}, NPY_FLOAT32, call->prompt_logits);
}

PyObject *mp_text_capture(mp_state *state, mp_ticket *ticket) {
    mp_text_call *call = text_call(state, ticket);
    if (!call)
        return NULL;
    const mp_capture *capture = &call->capture;
    if (capture->values == 0)
        return mp_raise_new(state, MP_INVALID_ARGUMENT, "the call was made without capture_values");
    npy_intp drawn = atomic_load_explicit(&capture->drawn, memory_order_acquire);
    npy_intp kept = drawn < capture->tokens ? drawn : capture->tokens;
    PyObject *data = mp_borrowed_array(ticket, 2, (npy_intp[]){kept, (npy_intp)mp_capture_floats(capture)},
                                       NPY_FLOAT32, capture->data);
    return data ? Py_BuildValue("(Niiin)", data, capture->layers, capture->hidden, capture->vocab,
                                (Py_ssize_t)(drawn - kept))
                : NULL;
}

PyObject *mp_text_image_rows(mp_state *state, mp_ticket *ticket) {
    mp_text_call *call = text_call(state, ticket);
    if (!call)
        return NULL;
    if (!call->image_rows)
        return mp_raise_new(state, MP_INVALID_ARGUMENT, "the call was made without prompt_logits, or without images");
    const mp_image_run *last = &call->images.runs[call->images.n_runs - 1];
    return mp_borrowed_array(ticket, 2, (npy_intp[]){(npy_intp)(last->source + last->rows), call->hidden}, NPY_FLOAT32,
                             call->image_rows);
}
