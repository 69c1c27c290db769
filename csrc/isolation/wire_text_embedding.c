/* wire_text_embedding.c: text embedding requests between processes; see passes/vectors.def. */
#include "models/capability.h"

#define MP_SCHEMA    "models/requests/text_embedding.def"
#define WIRE_ARGS    mp_embedding_args
#define WIRE_REQUEST mp_embedding_request
#define wire_create  mp_embedding_request_create
#define WIRE_RESULTS vectors
#define WIRE_EARLY   "more texts are finished than were planned"
#define WIRE_OUTCOME "the outcome of a request does not match its number of finished texts"

static inline size_t wire_rows_at(const mp_embedding_request *request, uint32_t text) {
    return request->output == MP_EMBED_TOKENS ? (size_t)request->offsets[text] : text;
}

#include "isolation/passes/vectors.def"

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
