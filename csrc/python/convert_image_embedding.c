/* convert_image_embedding.c: converts an image embedding request from Python, and its vectors to an array. */
#include "python/convert.h"

mp_request *mp_image_embedding_from_python(mp_state *state, PyObject *positional, PyObject *keywords,
                                           mp_submit_args *submit) {
    static char *names[] = {"key",    "pixels",   "sizes",         "dimensions", "normalize",
                            "output", "tolerant", MP_SUBMIT_NAMES, NULL};
    mp_image_embedding_args args = {.normalize = -1, .output = MP_IMAGE_POOLED};
    mp_image_embedding_request *request = NULL;
    mp_entry_count n_images = {-1, NULL}, n_bytes = {-1, NULL};
    PyObject *pixels, *sizes, *made[2] = {NULL};
    int tolerant = 0;
    bool ok = true;
    *submit = (mp_submit_args)MP_SUBMIT_DEFAULTS;
    if (!PyArg_ParseTupleAndKeywords(positional, keywords, "sOO|$iiip" MP_SUBMIT_FORMAT, names, &submit->key, &pixels,
                                     &sizes, &args.dimensions, &args.normalize, &args.output, &tolerant,
                                     MP_SUBMIT_TARGETS(submit)) ||
        !mp_submit_options_in(state, submit))
        return NULL;
    args.tolerant = tolerant != 0;
    args.pixels = mp_data_in(state, pixels, NPY_UINT8, "pixels", 1, &n_bytes, 0, &made[0], &ok);
    args.sizes = mp_data_in(state, sizes, NPY_INT32, "sizes", 2, &n_images, 0, &made[1], &ok);
    ok = ok && mp_count_in(state, "the number of images", &n_images, 1, MP_IMAGE_MAX) &&
         mp_count_in(state, "the number of bytes of pixels", &n_bytes, 1, INT64_MAX / 16);
    if (ok) {
        mp_error error;
        mp_status status;
        args.n_images = (int32_t)n_images.n;
        args.n_bytes = n_bytes.n;
        Py_BEGIN_ALLOW_THREADS /* the call copies megabytes */
            status = mp_image_embedding_request_create(&args, &request, &error);
        Py_END_ALLOW_THREADS
        if (status != MP_OK)
            mp_raise(state, &error, submit->key);
    }
    for (int i = 0; i < 2; i++)
        Py_XDECREF(made[i]);
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
