/* wire_text_embedding.c: see capability_wire.h. Results are the vectors of the texts that were finished since. */
#include <stdatomic.h>

#include "isolation/capability_wire.h"

typedef struct embed_note { /* in both processes */
    uint32_t cursor;        /* texts finished: whose vectors have come, or were sent */
} embed_note;

static mp_status embed_check(const mp_call *call, mp_error *error) {
    (void)call;
    (void)error;
    return MP_OK;
}

static size_t embed_bytes(const mp_call *call) {
    (void)call;
    return sizeof(embed_note);
}

static void embed_put_call(mp_wire_out *out, const mp_item *item, void *note) {
    const mp_embed_call *call = (const mp_embed_call *)item->call;
    ((embed_note *)note)->cursor = item->cursor;
    mp_put_i32(out, call->n_texts);
    mp_put_i32(out, call->dimensions);
    mp_put_u8(out, (uint8_t)(call->normalize + 1));
    mp_put_u8(out, call->output);
    mp_put_u8(out, (uint8_t)((call->skip != NULL) + 2 * (call->second != NULL)));
    mp_put(out, call->offsets, ((size_t)call->n_texts + 1) * sizeof *call->offsets);
    mp_put(out, call->ids, (size_t)call->n_tokens * sizeof *call->ids);
    if (call->skip)
        mp_put(out, call->skip, (size_t)call->n_texts * sizeof *call->skip);
    if (call->second)
        mp_put(out, call->second, (size_t)call->n_texts * sizeof *call->second);
}

static mp_status embed_get_call(mp_wire_in *in, mp_call **out, mp_error *error) {
    int32_t texts = (int32_t)mp_get_count(in, MP_EMBED_MOST_TEXTS, "there are too many texts");
    int32_t dimensions = mp_get_i32(in);
    uint8_t normalize = mp_get_u8(in), output = mp_get_u8(in), has = mp_get_u8(in);
    int64_t *offsets = mp_alloc_array((size_t)texts + 1, sizeof *offsets, MP_TAG_REQUEST);
    int32_t *ids = NULL, *skip = NULL, *second = NULL;
    mp_embed_call *call = NULL;
    mp_status status = MP_OK;
    if (!offsets) {
        status = mp_fail_memory(error, (uint64_t)texts * sizeof *offsets, "a call");
        goto cleanup;
    }
    mp_get(in, offsets, ((size_t)texts + 1) * sizeof *offsets);
    ids = in->failed ? NULL : mp_alloc_array((size_t)offsets[texts], sizeof *ids, MP_TAG_REQUEST);
    skip = ids && has & 1 ? mp_alloc_array((size_t)texts, sizeof *skip, MP_TAG_REQUEST) : NULL;
    second = ids && has & 2 ? mp_alloc_array((size_t)texts, sizeof *second, MP_TAG_REQUEST) : NULL;
    if (!in->failed && (!ids || (has & 1 && !skip) || (has & 2 && !second))) {
        status = mp_fail_memory(error, (uint64_t)offsets[texts] * sizeof *ids, "a call");
        goto cleanup;
    }
    if (ids)
        mp_get(in, ids, (size_t)offsets[texts] * sizeof *ids);
    if (skip)
        mp_get(in, skip, (size_t)texts * sizeof *skip);
    if (second)
        mp_get(in, second, (size_t)texts * sizeof *second);
    if (in->failed) {
        status = mp_fail(error, MP_RECV, "a call was cut");
        goto cleanup;
    }
    status = mp_embed_call_create(texts, ids, offsets, skip, &call, error);
    if (status == MP_OK && second && (status = mp_embed_call_pairs(call, second, error)) != MP_OK)
        mp_call_destroy(&call->base);
    if (status == MP_OK) {
        call->dimensions = dimensions;
        call->normalize = (int8_t)((int)normalize - 1);
        call->output = output;
        *out = &call->base;
    }
cleanup:
    mp_free(offsets);
    mp_free(ids);
    mp_free(skip);
    mp_free(second);
    return status;
}

static mp_status embed_go_on(mp_wire_in *in, mp_item *item, void *record, mp_error *error) {
    (void)in;
    (void)error;
    ((embed_note *)record)->cursor = item->cursor;
    return MP_OK;
}

/* Where the vectors of texts [from, to) stand. */
static float *vectors_of(const mp_embed_call *call, uint32_t from, uint32_t to, size_t *bytes) {
    bool tokens = call->output == MP_EMBED_TOKENS;
    size_t first = tokens ? (size_t)call->offsets[from] : from, end = tokens ? (size_t)call->offsets[to] : to;
    *bytes = (end - first) * (size_t)call->width * sizeof(float);
    return call->vectors + first * (size_t)call->width;
}

static void embed_put_results(mp_wire_out *out, const mp_item *item, void *record) {
    embed_note *sent = record;
    size_t bytes;
    const float *vectors = vectors_of((const mp_embed_call *)item->call, sent->cursor, item->cursor, &bytes);
    mp_put_u32(out, item->cursor);
    mp_put(out, vectors, bytes);
    sent->cursor = item->cursor;
}

static bool embed_get_results(mp_wire_in *in, const mp_item *item, uint32_t amount, mp_outcome outcome, void *note) {
    embed_note *seen = note;
    uint32_t cursor = mp_get_u32(in), left = item->total - seen->cursor;
    if (cursor < seen->cursor || cursor - seen->cursor > (amount < left ? amount : left)) {
        return mp_wire_refuse(in, "texts are finished that were not to be");
    }
    if (outcome != MP_OUTCOME_FAILED && (outcome == MP_OUTCOME_DONE) != (cursor == item->total)) {
        return mp_wire_refuse(in, "an outcome does not fit the texts that are finished");
    }
    size_t bytes;
    float *vectors = vectors_of((const mp_embed_call *)item->call, seen->cursor, cursor, &bytes);
    bool moved = cursor > seen->cursor;
    mp_get(in, vectors, bytes);
    seen->cursor = cursor;
    return moved;
}

/* An encoder is done with what was planned of a call in one step. */
static uint64_t embed_most_idle(const mp_call *call) {
    (void)call;
    return 1;
}

static void embed_publish(mp_item *item, void *note, uint64_t began_ns, uint64_t now_ns) {
    (void)began_ns;
    (void)now_ns;
    mp_embed_call *call = (mp_embed_call *)item->call;
    item->cursor = ((embed_note *)note)->cursor;
    mp_call_publish(&call->done, (int32_t)item->cursor);
}

static void embed_close(mp_item *item) { (void)item; }

const mp_call_wire mp_wire_text_embedding = {
    .check = embed_check,
    .note_bytes = embed_bytes,
    .put_call = embed_put_call,
    .get_results = embed_get_results,
    .most_idle = embed_most_idle,
    .publish = embed_publish,
    .close = embed_close,
    .get_call = embed_get_call,
    .record_bytes = embed_bytes,
    .go_on = embed_go_on,
    .put_results = embed_put_results,
};
