/* convert_text_to_text.c: converts a text request from Python to C, and its output so far to Python. */
#include <stdatomic.h>
#include <string.h>

#include "python/convert.h"

/* --- arguments --- */

enum { IMAGE_PARTS = 7 };

/* Convert `images`: None, or a tuple of seven arrays. The caller releases `parts`, even after a failure. Returns false
 * with an exception. */
static bool images_in(mp_state *state, PyObject *images, PyObject *parts[IMAGE_PARTS], mp_text_image_args *args) {
    mp_entry_count n_tiles = {-1, NULL}, n_runs = {-1, NULL}, n_sources = {-1, NULL}, n_times = {-1, NULL},
                   n_bytes = {-1, NULL};
    PyObject *pixels, *sizes, *tile_keys, *spans, *run_keys, *sources, *times;
    bool ok = true;
    if (images == Py_None)
        return true;
    if (!PyTuple_Check(images)) {
        PyErr_Format(PyExc_TypeError, "`images` must be None or a tuple of seven arrays, got %R",
                     (PyObject *)Py_TYPE(images));
        return false;
    }
    if (!PyArg_ParseTuple(images, "OOOOOOO:images", &pixels, &sizes, &tile_keys, &spans, &run_keys, &sources, &times))
        return false;
    args->sizes = mp_data_in(state, sizes, NPY_INT32, "sizes", 2, &n_tiles, 0, &parts[0], &ok);
    args->tile_keys =
        mp_data_in(state, tile_keys, NPY_UINT8, "tile_keys", MP_IMAGE_KEY, &n_tiles, 0, &parts[1], &ok);
    args->run_keys = mp_data_in(state, run_keys, NPY_UINT8, "run_keys", MP_IMAGE_KEY, &n_runs, 0, &parts[2], &ok);
    args->spans = mp_data_in(state, spans, NPY_INT32, "spans", 3, &n_runs, 0, &parts[3], &ok);
    args->sources = mp_data_in(state, sources, NPY_INT32, "sources", 1, &n_sources, 0, &parts[4], &ok);
    args->times = mp_data_in(state, times, NPY_INT32, "times", 1, &n_times, 0, &parts[5], &ok);
    args->pixels = mp_data_in(state, pixels, NPY_UINT8, "pixels", 1, &n_bytes, 0, &parts[6], &ok);
    ok = ok && mp_count_in(state, "the number of tiles", &n_tiles, 0, MP_TEXT_MAX_TILES) &&
         mp_count_in(state, "the number of runs", &n_runs, 0, MP_TEXT_MAX_TILES) &&
         mp_count_in(state, "the number of sources", &n_sources, 0, MP_TEXT_MAX_TOKENS) &&
         mp_count_in(state, "the number of times", &n_times, 0, MP_TEXT_MAX_TILES) &&
         mp_count_in(state, "the number of bytes of pixels", &n_bytes, 0, INT64_MAX / 16);
    if (!ok)
        return false;
    args->n_tiles = (int32_t)n_tiles.n;
    args->n_runs = (int32_t)n_runs.n;
    args->n_sources = n_sources.n;
    args->n_times = n_times.n;
    args->n_bytes = n_bytes.n;
    return true;
}

/* Convert `mask`: None, or bytes, which `args` borrows. Returns false with an exception. */
static bool mask_in(PyObject *mask, mp_text_args *args) {
    if (mask == Py_None)
        return true;
    if (!PyBytes_Check(mask)) {
        PyErr_Format(PyExc_TypeError, "`mask` must be bytes or None, got %R", (PyObject *)Py_TYPE(mask));
        return false;
    }
    args->mask = PyBytes_AsString(mask);
    args->mask_bytes = PyBytes_Size(mask);
    return true;
}

/* A sequence of strings in Python, and the arrays made from it. */
typedef struct strings {
    PyObject *in, *made;
    mp_string_list list;
    mp_entry_count count;
} strings;

static bool strings_in(mp_state *state, const char *name, strings *of) {
    of->count.n = -1;
    of->made = mp_strings_in(state, of->in, name, &of->list, &of->count);
    return of->made != NULL;
}

static void strings_free(strings *of) {
    Py_XDECREF(of->made);
    PyMem_Free(of->list.text);
    PyMem_Free(of->list.bytes);
}

/* The arguments of a request that need a conversion. */
typedef struct text_in {
    PyObject *prompt, *stop_ids, *bias_ids, *bias, *images, *mask;
    strings stop, reasoning_starts, reasoning_ends, call_starts;
    int in_reasoning, vision, prompt_logits, ignore_eos;
    unsigned long long seed;
    PyObject *made_prompt, *made_images[IMAGE_PARTS]; /* arrays that `args` borrows */
    int32_t *made_stop_ids, *made_bias_ids;
    float *made_bias;
} text_in;

/* Convert the arguments to `args`, which borrows from `in`. Returns false with an exception. */
static bool text_convert(mp_state *state, text_in *in, mp_text_args *args) {
    mp_entry_count n_prompt = {-1, NULL}, n_stop_ids = {-1, NULL}, n_bias = {-1, NULL};
    bool ok = true;
    args->prompt = mp_data_in(state, in->prompt, NPY_INT32, "prompt", 1, &n_prompt, 0, &in->made_prompt, &ok);
    ok = ok && strings_in(state, "stop", &in->stop) &&
         strings_in(state, "reasoning_starts", &in->reasoning_starts) &&
         strings_in(state, "reasoning_ends", &in->reasoning_ends) &&
         strings_in(state, "call_starts", &in->call_starts) &&
         (in->made_stop_ids = mp_list_in_int32_t(state, in->stop_ids, "stop_ids", 0, INT32_MAX, &n_stop_ids)) &&
         (in->made_bias_ids = mp_list_in_int32_t(state, in->bias_ids, "bias_ids", 0, INT32_MAX, &n_bias)) &&
         (in->made_bias = mp_list_in_float(state, in->bias, "bias", &n_bias)) &&
         mp_count_in(state, "the number of prompt tokens", &n_prompt, 1, MP_TEXT_MAX_TOKENS) &&
         mp_count_in(state, "the number of stop strings", &in->stop.count, 0, MP_TEXT_MAX_STOPS) &&
         mp_count_in(state, "the number of reasoning starts", &in->reasoning_starts.count, 0, MP_TEXT_MAX_STOPS) &&
         mp_count_in(state, "the number of reasoning ends", &in->reasoning_ends.count, 0, MP_TEXT_MAX_STOPS) &&
         mp_count_in(state, "the number of call starts", &in->call_starts.count, 0, MP_TEXT_MAX_STOPS) &&
         mp_count_in(state, "the number of stop ids", &n_stop_ids, 0, MP_TEXT_MAX_IDS) &&
         mp_count_in(state, "the number of logit biases", &n_bias, 0, MP_TEXT_MAX_IDS);
    if (!ok)
        return false;
    args->n_prompt = (int32_t)n_prompt.n;
    args->n_stop = (int32_t)in->stop.count.n;
    args->n_reasoning_starts = (int32_t)in->reasoning_starts.count.n;
    args->n_reasoning_ends = (int32_t)in->reasoning_ends.count.n;
    args->n_call_starts = (int32_t)in->call_starts.count.n;
    args->n_stop_ids = (int32_t)n_stop_ids.n;
    args->n_bias = (int32_t)n_bias.n;
    args->stop = in->stop.list.text;
    args->stop_bytes = in->stop.list.bytes;
    args->reasoning_starts = in->reasoning_starts.list.text;
    args->reasoning_start_bytes = in->reasoning_starts.list.bytes;
    args->reasoning_ends = in->reasoning_ends.list.text;
    args->reasoning_end_bytes = in->reasoning_ends.list.bytes;
    args->call_starts = in->call_starts.list.text;
    args->call_start_bytes = in->call_starts.list.bytes;
    args->stop_ids = in->made_stop_ids;
    args->bias_ids = in->made_bias_ids;
    args->bias = in->made_bias;
    args->in_reasoning = in->in_reasoning != 0;
    args->vision = in->vision != 0;
    args->want_prompt_logits = in->prompt_logits != 0;
    args->sampling.ignore_eos = in->ignore_eos != 0;
    args->sampling.seed = in->seed;
    return images_in(state, in->images, in->made_images, &args->images) && mask_in(in->mask, args);
}

static void text_release(text_in *in) {
    strings_free(&in->stop);
    strings_free(&in->reasoning_starts);
    strings_free(&in->reasoning_ends);
    strings_free(&in->call_starts);
    PyMem_Free(in->made_stop_ids);
    PyMem_Free(in->made_bias_ids);
    PyMem_Free(in->made_bias);
    Py_XDECREF(in->made_prompt);
    for (int i = 0; i < IMAGE_PARTS; i++)
        Py_XDECREF(in->made_images[i]);
}

mp_request *mp_text_from_python(mp_state *state, PyObject *positional, PyObject *keywords, mp_submit_args *submit) {
    static char *names[] = {"key", "prompt", "n", "stop", "reasoning_starts", "reasoning_ends", "call_starts",
                            "in_reasoning", "stop_ids", "bias_ids", "bias", "capture_values", "capture_records",
                            "adapter", "vision", "prompt_logits", "temperature", "top_k", "top_p", "min_p",
                            "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "max_tokens",
                            "min_tokens", "logprobs", "ignore_eos", "images", "mask", MP_SUBMIT_NAMES, NULL};
    mp_text_args args = {.sampling = MP_SAMPLING_DEFAULTS, .n_choices = 1};
    mp_sampling *s = &args.sampling;
    text_in in = {.images = Py_None, .mask = Py_None};
    mp_text_request *request = NULL;
    *submit = (mp_submit_args)MP_SUBMIT_DEFAULTS;
    if (!PyArg_ParseTupleAndKeywords(
            positional, keywords, "sO|$iOOOOpOOOiiipp" "fifffffKiiip" "OO" MP_SUBMIT_FORMAT, names, &submit->key,
            &in.prompt, &args.n_choices, &in.stop.in, &in.reasoning_starts.in, &in.reasoning_ends.in,
            &in.call_starts.in, &in.in_reasoning, &in.stop_ids, &in.bias_ids, &in.bias, &args.capture_values,
            &args.capture_records, &args.adapter, &in.vision, &in.prompt_logits, /* sampling: */
            &s->temperature, &s->top_k, &s->top_p, &s->min_p, &s->repetition_penalty, &s->presence_penalty,
            &s->frequency_penalty, &in.seed, &s->max_tokens, &s->min_tokens, &s->logprobs, &in.ignore_eos,
            &in.images, &in.mask, MP_SUBMIT_TARGETS(submit)) ||
        !mp_submit_options_in(state, submit))
        return NULL;
    if (text_convert(state, &in, &args)) {
        mp_error error;
        mp_status status;
        if (args.images.n_bytes > 0) {
            Py_BEGIN_ALLOW_THREADS /* the call copies megabytes */
                status = mp_text_request_create(&args, &request, &error);
            Py_END_ALLOW_THREADS
        } else {
            status = mp_text_request_create(&args, &request, &error);
        }
        if (status != MP_OK)
            mp_raise(state, &error, submit->key);
    }
    text_release(&in);
    return request ? &request->base : NULL;
}

/* --- results, readable while the request runs: entries below a published count are complete --- */

static mp_text_request *text_request(mp_state *state, mp_ticket *ticket) {
    bool vision = mp_ticket_request(ticket)->capability == MP_VISION;
    return (mp_text_request *)mp_ticket_request_of(state, ticket, vision ? MP_VISION : MP_TEXT_TO_TEXT);
}

/* Borrow the choice at `index`. Returns NULL with an exception. */
static mp_choice *choice_at(mp_state *state, mp_ticket *ticket, int index) {
    mp_text_request *request = text_request(state, ticket);
    if (!request)
        return NULL;
    if (index >= 0 && index < request->n_choices)
        return &request->choices[index];
    mp_raise_new(state, MP_INVALID_ARGUMENT, "`choice` must be 0 to %d, got %d", request->n_choices - 1, index);
    return NULL;
}

PyObject *mp_text_text(mp_state *state, mp_ticket *ticket, PyObject *args) {
    int index;
    Py_ssize_t start = 0;
    mp_choice *choice;
    if (!PyArg_ParseTuple(args, "i|n:text", &index, &start) || !(choice = choice_at(state, ticket, index)))
        return NULL;
    bool done = mp_ticket_done(ticket);
    /* Read `finish` first: it is stored last, so a finished choice has all of its text. */
    int finish = atomic_load_explicit(&choice->finish, memory_order_acquire);
    if (finish == MP_FINISH_CANCELLED && !done) /* a failed worker abandoned the choice, and the request may be
                                                 * retried */
        finish = MP_FINISH_NONE;
    uint32_t tokens = atomic_load_explicit(&choice->token_count, memory_order_acquire);
    uint32_t bytes = atomic_load_explicit(&choice->text_bytes, memory_order_acquire);
    if (start < 0 || start > (Py_ssize_t)bytes)
        return mp_raise_new(state, MP_INVALID_ARGUMENT, "`start` must be 0 to %u, got %zd", bytes, start);
    return Py_BuildValue("(y#Iii)", bytes ? choice->text + start : "", (Py_ssize_t)bytes - start, tokens, finish,
                         finish == MP_FINISH_NONE ? -1 : choice->stop_index);
}

PyObject *mp_text_sampled_ids(mp_state *state, mp_ticket *ticket, PyObject *args) {
    int index;
    unsigned int start;
    mp_choice *choice;
    if (!PyArg_ParseTuple(args, "iI:sampled_ids", &index, &start) || !(choice = choice_at(state, ticket, index)))
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
            PyList_SetItem(ids, (Py_ssize_t)(i - start), id);
    }
    return ids ? Py_BuildValue("(NO)", ids, ended ? Py_True : Py_False) : NULL;
}

PyObject *mp_text_mask(mp_state *state, mp_ticket *ticket, const char *key, PyObject *args) {
    int index;
    unsigned int token;
    Py_buffer mask;
    mp_text_request *request;
    mp_error error;
    if (!PyArg_ParseTuple(args, "iIy*:mask", &index, &token, &mask))
        return NULL;
    request = text_request(state, ticket);
    mp_status status = request ? mp_text_request_mask(request, index, token, mask.buf, mask.len, &error) : MP_OK;
    PyBuffer_Release(&mask);
    if (!request)
        return NULL;
    if (status != MP_OK)
        return mp_raise(state, &error, key);
    mp_ticket_wake(ticket);
    Py_RETURN_NONE;
}

/* Parse (choice, start=0). Returns the choice, and in *count the number of its tokens from `start` on. */
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
    int k = text_request(state, ticket)->sampling.logprobs;
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
    mp_text_request *request = text_request(state, ticket);
    if (!request)
        return NULL;
    unsigned long generated = 0;
    for (int i = 0; i < request->n_choices; i++)
        generated += atomic_load_explicit(&request->choices[i].token_count, memory_order_acquire);
    uint64_t submitted, started, finished;
    mp_ticket_times(ticket, &submitted, &started, &finished);
    if (!mp_ticket_done(ticket)) /* until the request is done, the engine may write prompt_done_ns and cached_tokens */
        return Py_BuildValue("(ikiddd)", request->n_prompt, generated, 0, seconds_between(submitted, started), 0.0,
                             0.0);
    uint64_t prompt_done = request->prompt_done_ns ? request->prompt_done_ns : finished;
    return Py_BuildValue("(ikiddd)", request->n_prompt, generated, request->cached_tokens,
                         seconds_between(submitted, started), seconds_between(started, prompt_done),
                         seconds_between(prompt_done, finished));
}

PyObject *mp_text_prompt_logits(mp_state *state, mp_ticket *ticket) {
    mp_text_request *request = text_request(state, ticket);
    if (!request)
        return NULL;
    if (!request->prompt_logits)
        return mp_raise_new(state, MP_INVALID_ARGUMENT, "the request was made without prompt_logits");
    return mp_borrowed_array(ticket, 2, (npy_intp[]){request->n_prompt, request->vocab}, NPY_FLOAT32,
                             request->prompt_logits);
}

PyObject *mp_text_capture(mp_state *state, mp_ticket *ticket) {
    mp_text_request *request = text_request(state, ticket);
    if (!request)
        return NULL;
    const mp_capture *capture = &request->capture;
    if (capture->values == 0)
        return mp_raise_new(state, MP_INVALID_ARGUMENT, "the request was made without capture_values");
    npy_intp sampled = atomic_load_explicit(&capture->sampled, memory_order_acquire);
    npy_intp kept = sampled < capture->tokens ? sampled : capture->tokens;
    PyObject *data = mp_borrowed_array(ticket, 2, (npy_intp[]){kept, (npy_intp)mp_capture_floats(capture)},
                                       NPY_FLOAT32, capture->data);
    return data ? Py_BuildValue("(Niiin)", data, capture->layers, capture->hidden, capture->vocab,
                                (Py_ssize_t)(sampled - kept))
                : NULL;
}

PyObject *mp_text_image_rows(mp_state *state, mp_ticket *ticket) {
    mp_text_request *request = text_request(state, ticket);
    if (!request)
        return NULL;
    if (!request->image_rows)
        return mp_raise_new(state, MP_INVALID_ARGUMENT, "the request was made without prompt_logits or images");
    const mp_image_run *last = &request->images.runs[request->images.n_runs - 1];
    return mp_borrowed_array(ticket, 2, (npy_intp[]){(npy_intp)(last->source + last->rows), request->hidden},
                             NPY_FLOAT32, request->image_rows);
}
