/* requests/text_embedding.c: text embedding requests. */
#include <stdio.h>

#include "models/requests/build.h"

static uint64_t embed_fingerprint(const mp_request *base) {
    const mp_embedding_request *request = (const mp_embedding_request *)base;
    uint64_t hash = mp_fingerprint(0, request->offsets, ((size_t)request->n_texts + 1) * sizeof *request->offsets);
    return mp_fingerprint(hash, request->ids, (size_t)request->n_tokens * sizeof *request->ids);
}

static void embed_usage(const mp_request *base, uint64_t *in, uint64_t *out) {
    *in = (uint64_t)((const mp_embedding_request *)base)->n_tokens;
    *out = 0;
}

static void free_output(mp_embedding_request *request) {
    float **const floats[] = {&request->vectors, &request->states, &request->rows, &request->sparse_values};
    for (int i = 0; i < 4; i++) {
        mp_free(*floats[i]);
        *floats[i] = NULL;
    }
    mp_free(request->sparse_counts);
    mp_free(request->sparse_ids);
    request->sparse_counts = request->sparse_ids = NULL;
    mp_request_charge_outputs(&request->base, 0);
}

static bool embed_drop_outputs(mp_request *base, bool begun) {
    if (!begun)
        free_output((mp_embedding_request *)base);
    return !begun;
}

static void embed_destroy(mp_request *base) {
    mp_embedding_request *request = (mp_embedding_request *)base;
    free_output(request);
    mp_free(request->ids);
    mp_free(request->offsets);
    mp_free(request->skip);
    mp_free(request->second);
    mp_free(request->attended);
    mp_free(request);
}

static mp_status check_embed(const mp_embedding_args *args, mp_error *error) {
    const size_t texts = (size_t)args->n_texts;
    MP_TRY(mp_check_range("the number of texts", args->n_texts, 1, MP_EMBED_MAX_TEXTS, error));
    MP_TRY(mp_check_range("the number of tokens", args->n_tokens, 0, INT64_MAX / 16, error));
    MP_TRY(mp_check_items_int32_t("ids", args->ids, (size_t)args->n_tokens, INT32_MIN, INT32_MAX, error));
    MP_TRY(mp_check_items_int64_t("offsets", args->offsets, texts + 1, 0, INT64_MAX, error));
    MP_TRY(mp_check_range("`dimensions`", args->dimensions, 0, INT32_MAX, error));
    MP_TRY(mp_check_range("`normalize`", args->normalize, -1, 1, error));
    MP_TRY(mp_check_range("`outputs`", args->outputs, 0, MP_EMBED_ALL, error));
    MP_TRY(mp_check_range("`adapter`", args->adapter, 0, INT32_MAX, error));
    if (args->attended)
        MP_TRY(mp_check_items_int32_t("attended", args->attended, texts, 1, INT32_MAX, error));
    MP_TRY(mp_check_range("offsets[0]", args->offsets[0], 0, 0, error));
    for (int32_t t = 0; t < args->n_texts; t++)
        if (args->offsets[t + 1] < args->offsets[t])
            return mp_fail(error, MP_INVALID_ARGUMENT, "`offsets[%d]` must not be less than its predecessor, got %lld",
                           t + 1, (long long)args->offsets[t + 1]);
    if (args->offsets[args->n_texts] != args->n_tokens)
        return mp_fail(error, MP_INVALID_ARGUMENT, "`offsets` must end at the number of ids, %lld, got %lld",
                       (long long)args->n_tokens, (long long)args->offsets[args->n_texts]);
    return MP_OK;
}

mp_status mp_embedding_request_create(const mp_embedding_args *args, mp_embedding_request **out, mp_error *error) {
    *out = NULL;
    MP_TRY(check_embed(args, error));
    mp_embedding_request *to = mp_alloc_zeroed(sizeof *to, MP_TAG_REQUEST);
    if (!to)
        return mp_fail_memory(error, sizeof *to, "a request");
    bool ok = true;
    uint64_t *bytes = &to->base.bytes;
    to->base = (mp_request){.capability = MP_TEXT_EMBEDDING,
                         .destroy = embed_destroy,
                         .drop_outputs = embed_drop_outputs,
                         .fingerprint = embed_fingerprint,
                         .usage = embed_usage,
                         .bytes = sizeof *to,
                         .tolerant = args->tolerant};
    const size_t texts = (size_t)args->n_texts;
    to->n_texts = args->n_texts;
    to->n_tokens = args->n_tokens;
    to->dimensions = args->dimensions;
    to->normalize = (int8_t)args->normalize;
    to->outputs = (uint8_t)(args->outputs ? args->outputs : MP_EMBED_POOLED);
    to->adapter = args->adapter;
    to->ids = mp_request_copy(args->ids, (size_t)args->n_tokens, sizeof *to->ids, bytes, &ok);
    to->offsets = mp_request_copy(args->offsets, texts + 1, sizeof *to->offsets, bytes, &ok);
    to->skip = mp_request_copy(args->skip, texts, sizeof *to->skip, bytes, &ok);
    to->second = mp_request_copy(args->second, texts, sizeof *to->second, bytes, &ok);
    to->attended = mp_request_copy(args->attended, texts, sizeof *to->attended, bytes, &ok);
    if (!ok) {
        embed_destroy(&to->base);
        return mp_fail_memory(error, (uint64_t)args->n_tokens * sizeof *args->ids, "the token ids of a request");
    }
    *out = to;
    return MP_OK;
}

mp_status mp_embedding_request_output(mp_embedding_request *request, mp_embedding_sizes sizes, mp_error *error) {
    if (request->base.output_bytes > 0 && memcmp(&request->sizes, &sizes, sizeof sizes) == 0)
        return MP_OK;
    bool ok = true;
    uint64_t bytes = 0;
    free_output(request);
    request->sizes = sizes;
    const unsigned of = request->outputs;
    const size_t texts = (size_t)request->n_texts, tokens = (size_t)request->n_tokens;
    request->vectors = of & MP_EMBED_POOLED ? mp_request_floats(texts, sizes.width, &bytes, &ok) : NULL;
    request->states = of & MP_EMBED_TOKENS ? mp_request_floats(tokens, sizes.hidden, &bytes, &ok) : NULL;
    request->rows = of & MP_EMBED_ROWS ? mp_request_floats(tokens, sizes.row_width, &bytes, &ok) : NULL;
    if (of & MP_EMBED_SPARSE) {
        const size_t weights = (size_t)mp_embedding_sparse_at(request, request->n_texts);
        request->sparse_counts = mp_request_memory(texts, sizeof *request->sparse_counts, &bytes, &ok);
        request->sparse_ids = mp_request_memory(weights, sizeof *request->sparse_ids, &bytes, &ok);
        request->sparse_values = mp_request_floats(weights, 1, &bytes, &ok);
    }
    mp_request_charge_outputs(&request->base, ok ? bytes : 0);
    if (ok)
        return MP_OK;
    free_output(request);
    return mp_fail_memory(error, bytes, "the vectors");
}

mp_status mp_embedding_request_check_outputs(const mp_embedding_request *request, unsigned has, mp_error *error) {
    static const struct {
        unsigned output;
        const char *name;
    } outputs[] = {{MP_EMBED_POOLED, "vectors of texts"},
                   {MP_EMBED_TOKENS, "hidden states"},
                   {MP_EMBED_ROWS, "rows of a head"},
                   {MP_EMBED_SPARSE, "sparse vectors"}};
    enum { COUNT = sizeof outputs / sizeof *outputs };
    const char *lacks = NULL;
    char list[96] = "";
    size_t used = 0;
    for (int i = 0; i < COUNT; i++) {
        if (has & outputs[i].output)
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%s", used ? ", " : "", outputs[i].name);
        else if (request->outputs & outputs[i].output)
            lacks = outputs[i].name;
    }
    return lacks ? mp_fail(error, MP_UNSUPPORTED, "the model has no %s, it has: %s", lacks, list) : MP_OK;
}

mp_status mp_embedding_request_check_texts(const mp_embedding_request *request, int32_t least, int32_t context,
                                           int32_t vocab, mp_error *error) {
    for (int32_t t = 0; t < request->n_texts; t++) {
        const int64_t n = request->offsets[t + 1] - request->offsets[t];
        if (n < least)
            return mp_fail(error, MP_INVALID_ARGUMENT, "text %d has no tokens", t);
        if (n > context) {
            mp_fail(error, MP_CONTEXT_OVERFLOW, "text %d has %lld tokens, the model takes %d", t, (long long)n,
                    context);
            if (error) {
                snprintf(error->got, sizeof error->got, "%lld", (long long)n);
                snprintf(error->allowed, sizeof error->allowed, "%d", context);
            }
            return MP_CONTEXT_OVERFLOW;
        }
        if (request->skip && (request->skip[t] < 0 || request->skip[t] >= n))
            return mp_fail(error, MP_INVALID_ARGUMENT, "`skip` of text %d must be 0 or more and below %lld, got %d", t,
                           (long long)n, request->skip[t]);
    }
    for (int64_t i = 0; i < request->n_tokens; i++)
        if (request->ids[i] < 0 || request->ids[i] >= vocab)
            return mp_fail(error, MP_INVALID_ARGUMENT, "token id %d is outside the vocabulary of %d", request->ids[i],
                           vocab);
    return MP_OK;
}
