/* convert_image_embedding.c: converts an image embedding request from Python, and its vectors to an array. */
#include "python/convert.h"

#define MP_SCHEMA "models/requests/image_embedding.def"

mp_request *mp_image_embedding_from_python(mp_state *state, PyObject *positional, PyObject *keywords,
                                           mp_submit_args *submit) {
    static char *names[] = {"key",
#include "python/passes/names.def"
                            MP_SUBMIT_NAMES, NULL};
#include "python/passes/locals.def"
    mp_image_embedding_args arguments = {0}, *args = &arguments;
    mp_image_embedding_request *request = NULL;
    bool ok = true;
    *submit = (mp_submit_args)MP_SUBMIT_DEFAULTS;
    if (!PyArg_ParseTupleAndKeywords(positional, keywords, "s"
#include "python/passes/format.def"
                                     MP_SUBMIT_FORMAT, names, &submit->key,
#include "python/passes/targets.def"
                                     MP_SUBMIT_TARGETS(submit)) ||
        !mp_submit_options_in(state, submit))
        return NULL;
#include "python/passes/entries.def"
#include "python/passes/store.def"
    if (ok) {
        mp_error error;
        mp_status status;
        Py_BEGIN_ALLOW_THREADS /* the call copies megabytes */
            status = mp_image_embedding_request_create(args, &request, &error);
        Py_END_ALLOW_THREADS
        if (status != MP_OK)
            mp_raise(state, &error, submit->key);
    }
#include "python/passes/release.def"
    return request ? &request->base : NULL;
}

PyObject *mp_image_embedding_vectors(mp_state *state, mp_ticket *ticket, const char *key) {
    mp_image_embedding_request *request =
        (mp_image_embedding_request *)mp_ticket_request_of(state, ticket, MP_IMAGE_EMBEDDING);
    if (!request || !mp_ticket_check(state, ticket, key))
        return NULL;
    npy_intp rows = (npy_intp)mp_image_embedding_request_rows(request);
    return mp_borrowed_array(ticket, 2, (npy_intp[]){rows, request->width}, NPY_FLOAT32, request->vectors);
}
