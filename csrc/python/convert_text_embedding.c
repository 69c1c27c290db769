/* convert_text_embedding.c: converts a text embedding request from Python, and its vectors to an array. */
#include <string.h>

#include "python/convert.h"

mp_request *mp_embedding_from_python(mp_state *state, PyObject *positional, PyObject *keywords,
                                     mp_submit_args *submit) {
    static char *names[] = {"key",      "ids",    "offsets", "skip",     "dimensions",    "normalize", "outputs",
                            "tolerant", "second", "adapter", "attended", MP_SUBMIT_NAMES, NULL};
    mp_embedding_args args = {.normalize = -1, .outputs = MP_EMBED_POOLED};
    mp_embedding_request *request = NULL;
    mp_entry_count n_texts = {-1, NULL}, n_tokens = {-1, NULL};
    PyObject *ids, *offsets, *skip = Py_None, *second = Py_None, *attended = Py_None, *made[5] = {NULL};
    int tolerant = 0;
    bool ok = true;
    *submit = (mp_submit_args)MP_SUBMIT_DEFAULTS;
    if (!PyArg_ParseTupleAndKeywords(positional, keywords, "sOO|O$iiipOiO" MP_SUBMIT_FORMAT, names, &submit->key, &ids,
                                     &offsets, &skip, &args.dimensions, &args.normalize, &args.outputs, &tolerant,
                                     &second, &args.adapter, &attended, MP_SUBMIT_TARGETS(submit)) ||
        !mp_submit_options_in(state, submit))
        return NULL;
    args.tolerant = tolerant != 0;
    args.ids = mp_data_in(state, ids, NPY_INT32, "ids", 1, &n_tokens, 0, &made[0], &ok);
    args.offsets = mp_data_in(state, offsets, NPY_INT64, "offsets", 1, &n_texts, 1, &made[1], &ok);
    if (skip != Py_None)
        args.skip = mp_data_in(state, skip, NPY_INT32, "skip", 1, &n_texts, 0, &made[2], &ok);
    if (second != Py_None)
        args.second = mp_data_in(state, second, NPY_INT32, "second", 1, &n_texts, 0, &made[3], &ok);
    if (attended != Py_None)
        args.attended = mp_data_in(state, attended, NPY_INT32, "attended", 1, &n_texts, 0, &made[4], &ok);
    ok = ok && mp_count_in(state, "the number of texts", &n_texts, 1, MP_EMBED_MAX_TEXTS) &&
         mp_count_in(state, "the number of tokens", &n_tokens, 0, INT64_MAX / 16);
    if (ok) {
        mp_error error;
        mp_status status;
        args.n_texts = (int32_t)n_texts.n;
        args.n_tokens = n_tokens.n;
        Py_BEGIN_ALLOW_THREADS /* the call copies megabytes */
            status = mp_embedding_request_create(&args, &request, &error);
        Py_END_ALLOW_THREADS
        if (status != MP_OK)
            mp_raise(state, &error, submit->key);
    }
    for (int i = 0; i < 5; i++)
        Py_XDECREF(made[i]);
    return request ? &request->base : NULL;
}

/* Returns the finished request of the ticket if it has the output; else raises and returns NULL. */
static mp_embedding_request *embedding_finished(mp_state *state, mp_ticket *ticket, const char *key, unsigned output) {
    mp_embedding_request *request = (mp_embedding_request *)mp_ticket_request_of(state, ticket, MP_TEXT_EMBEDDING);
    if (!request || !mp_ticket_check(state, ticket, key))
        return NULL;
    if (request->outputs & output)
        return request;
    mp_raise_new(state, MP_INVALID_ARGUMENT,
                 "the request did not ask for this output: `outputs` must have bit %u, got %d", output,
                 request->outputs);
    return NULL;
}

PyObject *mp_embedding_vectors(mp_state *state, mp_ticket *ticket, const char *key) {
    mp_embedding_request *request = embedding_finished(state, ticket, key, MP_EMBED_POOLED);
    return request ? mp_borrowed_array(ticket, 2, (npy_intp[]){request->n_texts, request->sizes.width}, NPY_FLOAT32,
                                       request->vectors)
                   : NULL;
}

PyObject *mp_embedding_tokens(mp_state *state, mp_ticket *ticket, const char *key, bool of_head) {
    mp_embedding_request *request = embedding_finished(state, ticket, key, of_head ? MP_EMBED_ROWS : MP_EMBED_TOKENS);
    if (!request)
        return NULL;
    const npy_intp width = of_head ? request->sizes.row_width : request->sizes.hidden;
    return mp_borrowed_array(ticket, 2, (npy_intp[]){(npy_intp)request->n_tokens, width}, NPY_FLOAT32,
                             of_head ? request->rows : request->states);
}

/* Copies the weights of all texts together. */
static void join_sparse(const mp_embedding_request *request, int64_t *indptr, int32_t *ids, float *values) {
    for (int32_t t = 0; t < request->n_texts; t++) {
        const int64_t at = mp_embedding_sparse_at(request, t);
        const size_t count = (size_t)request->sparse_counts[t];
        if (ids && count > 0) {
            memcpy(ids + indptr[t], request->sparse_ids + at, count * sizeof *ids);
            memcpy(values + indptr[t], request->sparse_values + at, count * sizeof *values);
        }
        indptr[t + 1] = indptr[t] + (int64_t)count;
    }
}

PyObject *mp_embedding_sparse(mp_state *state, mp_ticket *ticket, const char *key) {
    mp_embedding_request *request = embedding_finished(state, ticket, key, MP_EMBED_SPARSE);
    if (!request)
        return NULL;
    PyObject *indptr = PyArray_ZEROS(1, (npy_intp[]){(npy_intp)request->n_texts + 1}, NPY_INT64, 0);
    if (!indptr)
        return NULL;
    int64_t *at = PyArray_DATA((PyArrayObject *)indptr);
    join_sparse(request, at, NULL, NULL);
    PyObject *ids = PyArray_SimpleNew(1, (npy_intp[]){(npy_intp)at[request->n_texts]}, NPY_INT32);
    PyObject *values = PyArray_SimpleNew(1, (npy_intp[]){(npy_intp)at[request->n_texts]}, NPY_FLOAT32);
    PyObject *result = NULL;
    if (ids && values) {
        int32_t *to = PyArray_DATA((PyArrayObject *)ids);
        float *weights = PyArray_DATA((PyArrayObject *)values);
        Py_BEGIN_ALLOW_THREADS /* the caller holds the ticket, which owns the request */
            join_sparse(request, at, to, weights);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("(OOOi)", indptr, ids, values, (int)request->sizes.vocab);
    }
    Py_DECREF(indptr);
    Py_XDECREF(ids);
    Py_XDECREF(values);
    return result;
}
