/* convert_image_embedding.c: converts an image embedding request from Python, and its vectors to an array. */
#include "python/convert.h"

#define MP_SCHEMA   "models/requests/image_embedding.def"
#define PY_FUNCTION mp_image_embedding_from_python
#define PY_ARGS     mp_image_embedding_args
#define PY_REQUEST  mp_image_embedding_request
#define PY_CREATE   mp_image_embedding_request_create
#include "python/passes/function.def"

PyObject *mp_image_embedding_vectors(mp_state *state, mp_ticket *ticket, const char *key) {
    mp_image_embedding_request *request =
        (mp_image_embedding_request *)mp_ticket_request_of(state, ticket, MP_IMAGE_EMBEDDING);
    if (!request || !mp_ticket_check(state, ticket, key))
        return NULL;
    npy_intp rows = (npy_intp)mp_image_embedding_request_rows(request);
    return mp_borrowed_array(ticket, 2, (npy_intp[]){rows, request->width}, NPY_FLOAT32, request->vectors);
}
