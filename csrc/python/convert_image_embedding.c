/* convert_image_embedding.c: arguments of an image embedding call, and its vectors as an array. */
#include "python/binding.h"

mp_image_call *mp_images_from_python(mp_state *state, PyObject *args, PyObject *kwargs, mp_submit_args *submit) {
    static char *names[] = {"key",    "pixels",   "sizes",         "dimensions", "normalize",
                            "output", "tolerant", MP_SUBMIT_NAMES, NULL};
    PyObject *pixels_in, *sizes_in;
    int dimensions = 0, normalize = -1, output = MP_EMBED_POOLED, tolerant = 0;
    *submit = (mp_submit_args)MP_SUBMIT_DEFAULTS;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sOO|$iiip" MP_SUBMIT_FORMAT, names, &submit->key, &pixels_in,
                                     &sizes_in, &dimensions, &normalize, &output, &tolerant,
                                     MP_SUBMIT_TARGETS(submit)) ||
        !mp_submit_options_in(state, submit))
        return NULL;

    mp_image_call *call = NULL;
    PyArrayObject *sizes = NULL, *pixels = mp_array_in(state, pixels_in, NPY_UINT8, "pixels");
    if (pixels)
        sizes = mp_array_in(state, sizes_in, NPY_INT32, "sizes");
    if (!sizes)
        goto cleanup;
    npy_intp numbers = PyArray_DIM(sizes, 0);
    if (numbers < 2 || numbers % 2 || numbers / 2 > MP_IMAGE_MOST) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "sizes has %zd entries, allowed: two an image, 2 to %d", numbers,
                     2 * MP_IMAGE_MOST);
    } else if (normalize < -1 || normalize > 1) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "normalize is %d, allowed: -1, 0, 1", normalize);
    } else if (output != MP_EMBED_POOLED && output != MP_EMBED_TOKENS) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "output is %d, allowed: 0 (a vector an image), 1 (one a row)", output);
    } else if (dimensions < 0) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "dimensions is %d, allowed: 0 (all) and up", dimensions);
    } else {
        mp_error error;
        mp_status status;
        Py_BEGIN_ALLOW_THREADS /* copies megabytes */
            status = mp_image_call_create((int32_t)(numbers / 2), PyArray_DATA(sizes), PyArray_DATA(pixels),
                                          PyArray_DIM(pixels, 0), &call, &error);
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
    Py_XDECREF(pixels);
    Py_XDECREF(sizes);
    return call;
}

PyObject *mp_image_vectors(mp_state *state, mp_ticket *ticket, const char *key) {
    mp_image_call *call = (mp_image_call *)mp_ticket_call_of(state, ticket, MP_IMAGE_EMBEDDING);
    if (!call || !mp_ticket_check(state, ticket, key))
        return NULL;
    npy_intp rows = call->output == MP_EMBED_TOKENS ? (npy_intp)call->n_rows : call->n_images;
    return mp_borrowed_array(ticket, 2, (npy_intp[]){rows, call->width}, NPY_FLOAT32, call->vectors);
}
