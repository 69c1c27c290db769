/* convert_text_embedding.c: arguments of an embedding call, and its vectors as an array. */
#include "python/binding.h"

mp_embed_call *mp_embed_from_python(mp_state *state, PyObject *args, PyObject *kwargs, mp_submit_args *submit) {
    static char *names[] = {"key",    "ids",      "offsets", "skip",          "dimensions", "normalize",
                            "output", "tolerant", "second",  MP_SUBMIT_NAMES, NULL};
    PyObject *ids_in, *offsets_in, *skip_in = Py_None, *second_in = Py_None;
    int dimensions = 0, normalize = -1, output = MP_EMBED_POOLED, tolerant = 0;
    *submit = (mp_submit_args)MP_SUBMIT_DEFAULTS;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sOO|O$iiipO" MP_SUBMIT_FORMAT, names, &submit->key, &ids_in,
                                     &offsets_in, &skip_in, &dimensions, &normalize, &output, &tolerant, &second_in,
                                     MP_SUBMIT_TARGETS(submit)) ||
        !mp_submit_options_in(state, submit))
        return NULL;

    mp_embed_call *call = NULL;
    PyArrayObject *skip = NULL, *second = NULL, *offsets = NULL, *ids = mp_array_in(state, ids_in, NPY_INT32, "ids");
    if (ids)
        offsets = mp_array_in(state, offsets_in, NPY_INT64, "offsets");
    if (offsets && skip_in != Py_None)
        skip = mp_array_in(state, skip_in, NPY_INT32, "skip");
    if (offsets && second_in != Py_None)
        second = mp_array_in(state, second_in, NPY_INT32, "second");
    if (!offsets || (skip_in != Py_None && !skip) || (second_in != Py_None && !second))
        goto cleanup;
    npy_intp texts = PyArray_DIM(offsets, 0) - 1, tokens = PyArray_DIM(ids, 0);
    const int64_t *ends = PyArray_DATA(offsets);
    if (texts < 1 || texts > INT32_MAX) {
        mp_raise_new(state, MP_INVALID_ARGUMENT,
                     "offsets has %zd entries, allowed: one more than there are texts, 2 to 2^31", texts + 1);
    } else if (ends[texts] != tokens) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "offsets ends at %lld, but there are %zd ids", (long long)ends[texts],
                     tokens);
    } else if (skip && PyArray_DIM(skip, 0) != texts) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "skip has %zd entries, allowed: one a text, %zd", PyArray_DIM(skip, 0),
                     texts);
    } else if (second && PyArray_DIM(second, 0) != texts) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "second has %zd entries, allowed: one a pair, %zd",
                     PyArray_DIM(second, 0), texts);
    } else if (normalize < -1 || normalize > 1) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "normalize is %d, allowed: -1, 0, 1", normalize);
    } else if (output != MP_EMBED_POOLED && output != MP_EMBED_TOKENS) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "output is %d, allowed: 0 (a vector a text), 1 (a vector a token)",
                     output);
    } else if (dimensions < 0) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "dimensions is %d, allowed: 0 (all) and up", dimensions);
    } else {
        mp_error error;
        mp_status status;
        Py_BEGIN_ALLOW_THREADS /* a bulk call copies megabytes */
            status = mp_embed_call_create((int32_t)texts, PyArray_DATA(ids), ends, skip ? PyArray_DATA(skip) : NULL,
                                          &call, &error);
        if (status == MP_OK && second && (status = mp_embed_call_pairs(call, PyArray_DATA(second), &error)) != MP_OK) {
            mp_call_destroy(&call->base);
            call = NULL;
        }
        Py_END_ALLOW_THREADS if (status != MP_OK) {
            mp_raise(state, &error, submit->key);
            goto cleanup;
        }
        call->dimensions = dimensions;
        call->normalize = (int8_t)normalize;
        call->output = (uint8_t)output;
        call->base.tolerant = tolerant;
    }
cleanup:
    Py_XDECREF(ids);
    Py_XDECREF(offsets);
    Py_XDECREF(skip);
    Py_XDECREF(second);
    return call;
}

PyObject *mp_embed_vectors(mp_state *state, mp_ticket *ticket, const char *key) {
    mp_embed_call *call = (mp_embed_call *)mp_ticket_call_of(state, ticket, MP_TEXT_EMBEDDING);
    if (!call || !mp_ticket_check(state, ticket, key))
        return NULL;
    npy_intp rows = call->output == MP_EMBED_TOKENS ? (npy_intp)call->n_tokens : call->n_texts;
    return mp_borrowed_array(ticket, 2, (npy_intp[]){rows, call->width}, NPY_FLOAT32, call->vectors);
}
