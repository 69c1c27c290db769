/* wire_text_embedding.c: text embedding requests between processes; see passes/vectors.def.
 * A message has the outputs of the mask one after the other, in the order of the schema. */
#include "models/capability.h"

#define MP_SCHEMA    "models/requests/text_embedding.def"
#define WIRE_ARGS    mp_embedding_args
#define WIRE_REQUEST mp_embedding_request
#define wire_create  mp_embedding_request_create
#define WIRE_EARLY   "more texts are finished than were planned"
#define WIRE_OUTCOME "the outcome of a request does not match its number of finished texts"

#include "isolation/passes/vectors.def"

static void wire_put(mp_wire_out *out, const mp_embedding_request *request, uint32_t from, uint32_t to) {
    const int64_t first = request->offsets[from], end = request->offsets[to];
    if (request->outputs & MP_EMBED_POOLED)
        put_vectors(out, request, from, to);
    if (request->outputs & MP_EMBED_TOKENS)
        put_states(out, request, first, end);
    if (request->outputs & MP_EMBED_ROWS)
        put_rows(out, request, first, end);
    if (!(request->outputs & MP_EMBED_SPARSE))
        return;
    put_sparse_counts(out, request, from, to);
    for (uint32_t t = from; t < to; t++) {
        const int64_t at = mp_embedding_sparse_at(request, t), past = at + request->sparse_counts[t];
        put_sparse_ids(out, request, at, past);
        put_sparse_values(out, request, at, past);
    }
}

static bool get_sparse(mp_wire_in *in, const mp_embedding_request *request, uint32_t text) {
    const int64_t at = mp_embedding_sparse_at(request, text), room = mp_embedding_sparse_at(request, text + 1) - at;
    const int32_t count = request->sparse_counts[text], *ids = request->sparse_ids + at;
    if (count > room)
        return mp_wire_refuse(in, "a sparse vector has too many weights");
    if (!get_sparse_ids(in, request, at, at + count))
        return false;
    for (int32_t i = 0; i < count; i++)
        if (ids[i] >= request->sizes.vocab || (i > 0 && ids[i] <= ids[i - 1]))
            return mp_wire_refuse(in, "the ids of a sparse vector do not ascend within the vocabulary");
    return get_sparse_values(in, request, at, at + count);
}

static bool wire_get(mp_wire_in *in, const mp_embedding_request *request, uint32_t from, uint32_t to) {
    const int64_t first = request->offsets[from], end = request->offsets[to];
    if ((request->outputs & MP_EMBED_POOLED && !get_vectors(in, request, from, to)) ||
        (request->outputs & MP_EMBED_TOKENS && !get_states(in, request, first, end)) ||
        (request->outputs & MP_EMBED_ROWS && !get_rows(in, request, first, end)))
        return false;
    if (!(request->outputs & MP_EMBED_SPARSE))
        return !in->failed;
    bool valid = get_sparse_counts(in, request, from, to);
    for (uint32_t t = from; t < to && valid; t++)
        valid = get_sparse(in, request, t);
    return valid;
}

static mp_status embed_check(const mp_request *request, mp_error *error) {
    (void)request;
    (void)error;
    return MP_OK;
}

/* An encoder finishes everything planned for a request within the step. */
static uint64_t embed_most_idle(const mp_request *request) {
    (void)request;
    return 1;
}

const mp_request_wire mp_wire_text_embedding = {.check = embed_check, .most_idle = embed_most_idle, WIRE_VECTORS};
