/* wire_text_embedding.c: text embedding requests between processes; see wire_vectors.h. A message of results has the
 * outputs of the mask one after the other, in the order of their bits. */
#include <float.h>

#include "isolation/wire_vectors.h"

static void embed_put_request(mp_wire_out *out, const mp_item *item, void *progress) {
    const mp_embedding_request *request = (const mp_embedding_request *)item->request;
    const size_t texts = (size_t)request->n_texts;
    ((mp_vectors_progress *)progress)->cursor = item->cursor;
    mp_put_i32(out, request->n_texts);
    mp_put_i64(out, request->n_tokens);
    mp_put(out, request->ids, (size_t)request->n_tokens * sizeof *request->ids);
    mp_put(out, request->offsets, (texts + 1) * sizeof *request->offsets);
    mp_put_optional(out, request->skip, texts * sizeof *request->skip);
    mp_put_i32(out, request->dimensions);
    mp_put_u8(out, (uint8_t)request->normalize);
    mp_put_u8(out, request->outputs);
    mp_put_optional(out, request->second, texts * sizeof *request->second);
    mp_put_i32(out, request->adapter);
    mp_put_optional(out, request->attended, texts * sizeof *request->attended);
}

static mp_status embed_get_request(mp_wire_in *in, mp_request **out, mp_error *error) {
    mp_embedding_args args = {0};
    mp_embedding_request *request = NULL;
    bool ok = true;
    args.n_texts =
        (int32_t)mp_wire_within(in, mp_get_i32(in), 1, MP_EMBED_MAX_TEXTS, "the number of texts is out of bounds");
    args.n_tokens = mp_wire_within(in, mp_get_i64(in), 0, INT64_MAX / 16, "the number of tokens is out of bounds");
    args.ids = mp_get_array(in, args.n_tokens, sizeof *args.ids, &ok);
    args.offsets = mp_get_array(in, (int64_t)args.n_texts + 1, sizeof *args.offsets, &ok);
    args.skip = mp_get_optional(in, args.n_texts, sizeof *args.skip, &ok);
    args.dimensions = mp_get_i32(in);
    args.normalize = (int8_t)mp_get_u8(in);
    args.outputs = mp_get_u8(in);
    args.second = mp_get_optional(in, args.n_texts, sizeof *args.second, &ok);
    args.adapter = mp_get_i32(in);
    args.attended = mp_get_optional(in, args.n_texts, sizeof *args.attended, &ok);
    mp_status status = in->failed ? mp_fail(error, MP_RECV, "a request was truncated")
                       : !ok      ? mp_fail_memory(error, sizeof *request, "a request")
                                  : mp_embedding_request_create(&args, &request, error);
    if (status == MP_OK)
        *out = &request->base;
    mp_free((void *)args.ids);
    mp_free((void *)args.offsets);
    mp_free((void *)args.skip);
    mp_free((void *)args.second);
    mp_free((void *)args.attended);
    return status;
}

static void put_rows(mp_wire_out *out, const float *rows, int32_t width, int64_t first, int64_t end) {
    mp_put(out, rows + first * width, (size_t)(end - first) * (size_t)width * sizeof *rows);
}

static bool get_rows(mp_wire_in *in, float *rows, int32_t width, int64_t first, int64_t end, const char *what) {
    return mp_get_floats(in, rows + first * width, (size_t)(end - first) * (size_t)width, -FLT_MAX, FLT_MAX, what);
}

static void embed_put_results(mp_wire_out *out, const mp_item *item, void *progress) {
    const mp_embedding_request *request = (const mp_embedding_request *)item->request;
    const mp_embedding_sizes *sizes = &request->sizes;
    mp_vectors_progress *sent = progress;
    const uint32_t from = sent->cursor, to = item->cursor;
    const int64_t first = request->offsets[from], end = request->offsets[to];
    mp_put_u32(out, to);
    sent->cursor = to;
    if (request->outputs & MP_EMBED_POOLED)
        put_rows(out, request->vectors, sizes->width, from, to);
    if (request->outputs & MP_EMBED_TOKENS)
        put_rows(out, request->states, sizes->hidden, first, end);
    if (request->outputs & MP_EMBED_ROWS)
        put_rows(out, request->rows, sizes->row_width, first, end);
    if (!(request->outputs & MP_EMBED_SPARSE))
        return;
    mp_put(out, request->sparse_counts + from, (to - from) * sizeof *request->sparse_counts);
    for (uint32_t t = from; t < to; t++) {
        const int64_t at = mp_embedding_sparse_at(request, t);
        mp_put(out, request->sparse_ids + at, (size_t)request->sparse_counts[t] * sizeof *request->sparse_ids);
        put_rows(out, request->sparse_values, 1, at, at + request->sparse_counts[t]);
    }
}

static bool get_sparse(mp_wire_in *in, const mp_embedding_request *request, uint32_t text) {
    const int64_t at = mp_embedding_sparse_at(request, text), room = mp_embedding_sparse_at(request, text + 1) - at;
    const int32_t count = request->sparse_counts[text];
    int32_t *ids = request->sparse_ids + at;
    if (count < 0)
        return mp_wire_refuse(in, "a number of weights is negative");
    if (count > room)
        return mp_wire_refuse(in, "a sparse vector has too many weights");
    if (!mp_get(in, ids, (size_t)count * sizeof *ids))
        return false;
    for (int32_t i = 0; i < count; i++)
        if (ids[i] < 0)
            return mp_wire_refuse(in, "the id of a weight is negative");
    for (int32_t i = 0; i < count; i++)
        if (ids[i] >= request->sizes.vocab || (i > 0 && ids[i] <= ids[i - 1]))
            return mp_wire_refuse(in, "the ids of a sparse vector do not ascend within the vocabulary");
    return get_rows(in, request->sparse_values, 1, at, at + count, "a weight is not finite");
}

static bool embed_get_results(mp_wire_in *in, const mp_item *item, uint32_t amount, mp_outcome outcome,
                              void *progress) {
    const mp_embedding_request *request = (const mp_embedding_request *)item->request;
    const mp_embedding_sizes *sizes = &request->sizes;
    mp_vectors_progress *seen = progress;
    const uint32_t from = seen->cursor;
    uint32_t to;
    if (!mp_vectors_get_cursor(in, item, amount, outcome, seen, &to))
        return false;
    const int64_t first = request->offsets[from], end = request->offsets[to];
    const unsigned of = request->outputs;
    if ((of & MP_EMBED_POOLED && !get_rows(in, request->vectors, sizes->width, from, to, "a vector is not finite")) ||
        (of & MP_EMBED_TOKENS &&
         !get_rows(in, request->states, sizes->hidden, first, end, "a hidden state is not finite")) ||
        (of & MP_EMBED_ROWS &&
         !get_rows(in, request->rows, sizes->row_width, first, end, "a token vector is not finite")))
        return false;
    if (of & MP_EMBED_SPARSE) {
        if (!mp_get(in, request->sparse_counts + from, (to - from) * sizeof *request->sparse_counts))
            return false;
        for (uint32_t t = from; t < to; t++)
            if (!get_sparse(in, request, t))
                return false;
    }
    seen->cursor = to;
    return !in->failed && to > from;
}

static void embed_publish(mp_item *item, void *progress, uint64_t began_ns, uint64_t now_ns) {
    (void)began_ns;
    (void)now_ns;
    item->cursor = ((mp_vectors_progress *)progress)->cursor;
    mp_request_publish(&((mp_embedding_request *)item->request)->done, (int32_t)item->cursor);
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

const mp_request_wire mp_wire_text_embedding = {
    .check = embed_check,
    .progress_bytes = mp_vectors_progress_bytes,
    .put_request = embed_put_request,
    .get_results = embed_get_results,
    .most_idle = embed_most_idle,
    .publish = embed_publish,
    .close = mp_vectors_close,
    .get_request = embed_get_request,
    .get_progress = mp_vectors_get_progress,
    .put_results = embed_put_results,
};
