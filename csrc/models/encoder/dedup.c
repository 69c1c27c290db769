/* encoder/dedup.c: the comparison of texts, and the ring buffer of recent results. */
#include "models/encoder/dedup.h"

#include <string.h>

#include "base/siphash.h"

typedef struct mp_encoder_result {
    mp_encoder_text text; /* ids and out point into the store */
    uint64_t at_ns;
} mp_encoder_result;

void mp_encoder_dedup_init(mp_encoder_dedup *dedup, mp_budget *budget, int32_t model_tokens, int32_t model_width) {
    const int32_t tokens = model_tokens < MP_ENCODER_DEDUP_TOKENS ? model_tokens : MP_ENCODER_DEDUP_TOKENS;
    *dedup = (mp_encoder_dedup){.keep_ns = MP_DEDUP_KEEP_NS, .budget = budget};
    mp_siphash_key(dedup->hash_key);
    dedup->text_bytes = mp_arena_cost((size_t)tokens * sizeof(int32_t));
    dedup->row_bytes = dedup->text_bytes + mp_arena_cost((size_t)model_width * sizeof(float));
    const size_t each = dedup->row_bytes + sizeof(mp_encoder_result);
    dedup->capacity = MP_DEDUP_BYTES / each < MP_DEDUP_RECENT ? (uint32_t)(MP_DEDUP_BYTES / each) : MP_DEDUP_RECENT;
}

uint64_t mp_encoder_dedup_trim(mp_encoder_dedup *dedup) {
    const uint64_t bytes = dedup->charged;
    mp_free(dedup->recent);
    mp_free(dedup->store);
    mp_budget_give(dedup->budget, bytes);
    dedup->recent = NULL;
    dedup->store = NULL;
    dedup->charged = 0;
    dedup->count = dedup->next = 0;
    return bytes;
}

void mp_encoder_dedup_deinit(mp_encoder_dedup *dedup) {
    mp_encoder_dedup_trim(dedup);
    mp_dedup_table_deinit(&dedup->step);
}

/* ---- keys -------------------------------------------------------------------------------------------------------- */

/* The key covers the ids only: `identical` compares all that changes a vector. */
void mp_encoder_dedup_key(const mp_encoder_dedup *dedup, mp_encoder_text *text) {
    text->key = mp_siphash(dedup->hash_key, text->ids, (size_t)text->n * sizeof *text->ids);
}

static bool identical(const mp_encoder_text *a, const mp_encoder_text *b) {
    return a->key == b->key && a->n == b->n && a->skip == b->skip &&
           a->second == b->second && a->attended == b->attended && a->adapter == b->adapter &&
           a->dimensions == b->dimensions &&
           a->normalize == b->normalize && memcmp(a->ids, b->ids, (size_t)a->n * sizeof(int32_t)) == 0;
}

/* ---- within a step ----------------------------------------------------------------------------------------------- */

mp_status mp_encoder_dedup_begin(mp_encoder_dedup *dedup, int texts, mp_error *error) {
    return mp_dedup_table_begin(&dedup->step, texts, "the table of texts", error);
}

static bool identical_in_step(const void *texts, int a, int b) {
    return identical((const mp_encoder_text *)texts + a, (const mp_encoder_text *)texts + b);
}

int mp_encoder_dedup_find(mp_encoder_dedup *dedup, const mp_encoder_text *texts, int index) {
    const int same = mp_dedup_table_find(&dedup->step, texts, index, texts[index].key, identical_in_step);
    dedup->shared += same >= 0;
    return same;
}

/* ---- recent results ---------------------------------------------------------------------------------------------- */

bool mp_encoder_dedup_recall(mp_encoder_dedup *dedup, const mp_encoder_text *text, uint64_t now_ns) {
    for (uint32_t i = 1; i <= dedup->count; i++) {
        const mp_encoder_result *result = &dedup->recent[(dedup->next + dedup->capacity - i) % dedup->capacity];
        if (now_ns - result->at_ns > dedup->keep_ns)
            return false; /* the remaining results are older */
        if (!identical(&result->text, text))
            continue;
        memcpy(text->out, result->text.out, (size_t)text->dimensions * sizeof(float));
        dedup->recalled++;
        return true;
    }
    return false;
}

static bool make_space(mp_encoder_dedup *dedup) {
    if (dedup->recent || dedup->capacity == 0)
        return dedup->recent != NULL;
    const uint64_t bytes = dedup->capacity * (dedup->row_bytes + sizeof(mp_encoder_result));
    if (!mp_budget_take(dedup->budget, bytes))
        return false;
    dedup->charged = bytes;
    dedup->recent = mp_alloc_array(dedup->capacity, sizeof *dedup->recent, MP_TAG_SCRATCH);
    dedup->store = mp_alloc(dedup->capacity * dedup->row_bytes, MP_TAG_SCRATCH);
    if (dedup->recent && dedup->store)
        return true;
    mp_encoder_dedup_trim(dedup);
    return false;
}

static bool may_keep(const mp_encoder_dedup *dedup, const mp_encoder_text *text) {
    return text->finite && text->outputs == MP_EMBED_POOLED && (size_t)text->n * sizeof(int32_t) <= dedup->text_bytes &&
           (size_t)text->dimensions * sizeof(float) <= dedup->row_bytes - dedup->text_bytes;
}

void mp_encoder_dedup_keep(mp_encoder_dedup *dedup, const mp_encoder_text *texts, int count, uint64_t now_ns) {
    const int first = count > (int)dedup->capacity ? count - (int)dedup->capacity : 0;
    for (int t = first; t < count; t++) {
        if (!may_keep(dedup, &texts[t]) || !make_space(dedup))
            continue;
        mp_encoder_result *result = &dedup->recent[dedup->next];
        uint8_t *row = dedup->store + dedup->next * dedup->row_bytes;
        *result = (mp_encoder_result){.text = texts[t], .at_ns = now_ns};
        result->text.ids = memcpy(row, texts[t].ids, (size_t)texts[t].n * sizeof(int32_t));
        result->text.out = memcpy(row + dedup->text_bytes, texts[t].out, (size_t)texts[t].dimensions * sizeof(float));
        dedup->next = (dedup->next + 1) % dedup->capacity;
        dedup->count += dedup->count < dedup->capacity;
    }
}
