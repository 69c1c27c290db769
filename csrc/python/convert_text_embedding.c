/* convert_text_embedding.c: converts a text embedding request from Python, and its vectors to an array. */
#include <string.h>

#include "python/convert.h"

#define MP_SCHEMA   "models/requests/text_embedding.def"
#define PY_FUNCTION mp_embedding_from_python
#define PY_ARGS     mp_embedding_args
#define PY_REQUEST  mp_embedding_request
#define PY_CREATE   mp_embedding_request_create
#include "python/passes/function.def"

/* Returns the finished request of the ticket if it has the output; else raises and returns NULL. */
static mp_embedding_request *finished(mp_state *state, mp_ticket *ticket, const char *key, unsigned output) {
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
    mp_embedding_request *request = finished(state, ticket, key, MP_EMBED_POOLED);
    return request ? mp_borrowed_array(ticket, 2, (npy_intp[]){request->n_texts, request->sizes.width}, NPY_FLOAT32,
                                       request->vectors)
                   : NULL;
}

PyObject *mp_embedding_tokens(mp_state *state, mp_ticket *ticket, const char *key, bool of_head) {
    mp_embedding_request *request = finished(state, ticket, key, of_head ? MP_EMBED_ROWS : MP_EMBED_TOKENS);
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
    mp_embedding_request *request = finished(state, ticket, key, MP_EMBED_SPARSE);
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
