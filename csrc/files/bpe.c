/* bpe.c: see bpe.h. Tokens are found by a keyed hash table over the texts in the spec; no text is copied. */
#include "files/bpe.h"

#include <string.h>

#include "base/alloc.h"
#include "base/siphash.h"
#include "files/spec_build.h"

struct mp_bpe {
    mp_spec *spec; /* pinned */
    const mp_value *tokens, *merges;
    uint64_t key[2]; /* random key of the hash, so that no file can be crafted to cause collisions */
    uint32_t *table; /* [mask + 1] token + 1; 0: empty; at most half full */
    uint32_t mask;
    uint64_t longest;  /* bytes of the longest token */
    int32_t (*ids)[3]; /* [merges]: left, right, joint token */
};

/* ---- tokens by text ---------------------------------------------------------------------------------------------- */

const char *mp_bpe_token(const mp_bpe *bpe, int32_t token, uint64_t *bytes) {
    const uint64_t *offsets = bpe->tokens->as.strings.offsets;
    *bytes = offsets[token + 1] - offsets[token];
    return bpe->tokens->as.strings.bytes + offsets[token];
}

static uint32_t hash_of(const mp_bpe *bpe, const char *text, uint64_t bytes) {
    return (uint32_t)mp_siphash(bpe->key, text, bytes);
}

int32_t mp_bpe_find(const mp_bpe *bpe, const char *text, uint64_t bytes) {
    for (uint32_t i = hash_of(bpe, text, bytes) & bpe->mask; bpe->table[i]; i = (i + 1) & bpe->mask) {
        int32_t token = (int32_t)(bpe->table[i] - 1);
        uint64_t length;
        const char *known = mp_bpe_token(bpe, token, &length);
        if (length == bytes && memcmp(known, text, bytes) == 0)
            return token;
    }
    return -1;
}

/* Returns false if a token occurs twice. Empty tokens may repeat: no text maps to them. */
static bool fill_table(mp_bpe *bpe) {
    for (uint64_t token = 0; token < bpe->tokens->count; token++) {
        uint64_t bytes;
        const char *text = mp_bpe_token(bpe, (int32_t)token, &bytes);
        if (bytes == 0)
            continue;
        if (bytes > bpe->longest)
            bpe->longest = bytes;
        uint32_t i = hash_of(bpe, text, bytes) & bpe->mask;
        for (; bpe->table[i]; i = (i + 1) & bpe->mask) {
            uint64_t length;
            const char *known = mp_bpe_token(bpe, (int32_t)(bpe->table[i] - 1), &length);
            if (length == bytes && memcmp(known, text, bytes) == 0)
                return false;
        }
        bpe->table[i] = (uint32_t)token + 1;
    }
    return true;
}

/* ---- merges ------------------------------------------------------------------------------------------------------ */

static bool read_merge(const mp_bpe *bpe, const char *text, uint64_t bytes, int32_t ids[3]) {
    char joint[512];
    const char *space = memchr(text, ' ', bytes);
    if (!space || bytes > sizeof joint || !mp_is_utf8(text, bytes))
        return false;
    uint64_t left = (uint64_t)(space - text), right = bytes - left - 1; /* an empty half is in no table */
    memcpy(joint, text, left);
    memcpy(joint + left, space + 1, right);
    ids[0] = mp_bpe_find(bpe, text, left);
    ids[1] = mp_bpe_find(bpe, space + 1, right);
    ids[2] = mp_bpe_find(bpe, joint, left + right);
    return ids[0] >= 0 && ids[1] >= 0 && ids[2] >= 0;
}

static bool read_merges(mp_bpe *bpe) {
    const uint64_t *offsets = bpe->merges->as.strings.offsets;
    for (uint64_t i = 0; i < bpe->merges->count; i++)
        if (!read_merge(bpe, bpe->merges->as.strings.bytes + offsets[i], offsets[i + 1] - offsets[i], bpe->ids[i]))
            return false;
    return true;
}

/* ---- vocabulary -------------------------------------------------------------------------------------------------- */

static const mp_value *strings_of(const mp_spec *spec, const char *key, uint64_t most) {
    const mp_value *value = mp_spec_find(spec, key);
    return value && value->type == MP_VALUE_STRINGS && value->count && value->count <= most ? value : NULL;
}

mp_status mp_bpe_create(mp_spec *spec, mp_bpe **out, mp_error *error) {
    *out = NULL;
    const mp_value *tokens = strings_of(spec, "tokenizer.ggml.tokens", MP_SPEC_MAX_TOKENS);
    const mp_value *merges = strings_of(spec, "tokenizer.ggml.merges", UINT32_MAX);
    if (!tokens || !merges)
        return MP_OK;
    mp_bpe *bpe = mp_alloc_zeroed(sizeof *bpe, MP_TAG_SPEC);
    if (!bpe)
        return mp_fail_memory(error, sizeof *bpe, "a vocabulary");
    bpe->spec = mp_spec_pin(spec);
    bpe->tokens = tokens;
    bpe->merges = merges;
    mp_siphash_key(bpe->key);
    uint32_t size = 64;
    while (size < 2 * tokens->count)
        size *= 2;
    bpe->mask = size - 1;
    bpe->table = mp_alloc_array(size, sizeof *bpe->table, MP_TAG_SPEC);
    bpe->ids = mp_alloc_array(merges->count, sizeof *bpe->ids, MP_TAG_SPEC);
    if (!bpe->table || !bpe->ids) {
        mp_bpe_destroy(bpe);
        return mp_fail_memory(error, size * sizeof *bpe->table + merges->count * sizeof *bpe->ids, "a vocabulary");
    }
    if (fill_table(bpe) && read_merges(bpe))
        *out = bpe;
    else
        mp_bpe_destroy(bpe);
    return MP_OK;
}

void mp_bpe_destroy(mp_bpe *bpe) {
    if (!bpe)
        return;
    mp_free(bpe->table);
    mp_free(bpe->ids);
    mp_spec_unpin(bpe->spec);
    mp_free(bpe);
}

/* ---- subsets ----------------------------------------------------------------------------------------------------- */

mp_status mp_bpe_part_init(mp_bpe_part *part, const mp_bpe *bpe, mp_error *error) {
    *part = (mp_bpe_part){.marked = mp_alloc_array(bpe->tokens->count, 1, MP_TAG_SPEC)};
    return part->marked ? MP_OK : mp_fail_memory(error, bpe->tokens->count, "a part of a vocabulary");
}

void mp_bpe_part_deinit(mp_bpe_part *part) {
    mp_free(part->marked);
    mp_free(part->tokens);
    mp_free(part->merges);
    *part = (mp_bpe_part){0};
}

uint64_t mp_bpe_word_cost(const mp_bpe *bpe, uint64_t bytes) {
    return bytes * (bytes < bpe->longest ? bytes : bpe->longest);
}

static inline bool starts_character(char byte) { return ((uint8_t)byte & 0xc0) != 0x80; }

void mp_bpe_part_add(mp_bpe_part *part, const mp_bpe *bpe, const char *word, uint64_t bytes) {
    for (uint64_t from = 0; from < bytes; from++) {
        if (!starts_character(word[from]))
            continue;
        for (uint64_t to = from + 1; to <= bytes && to - from <= bpe->longest; to++) {
            if (to < bytes && !starts_character(word[to]))
                continue;
            int32_t token = mp_bpe_find(bpe, word + from, to - from);
            if (token >= 0)
                part->marked[token] = 1;
        }
    }
}

mp_status mp_bpe_part_finish(mp_bpe_part *part, const mp_bpe *bpe, mp_error *error) {
    uint32_t tokens = 0, merges = 0;
    for (uint64_t i = 0; i < bpe->tokens->count; i++)
        tokens += part->marked[i];
    for (uint64_t i = 0; i < bpe->merges->count; i++)
        merges += part->marked[bpe->ids[i][2]]; /* both halves are marked too: they are substrings of its word */
    part->tokens = mp_alloc_array(tokens, sizeof *part->tokens, MP_TAG_SPEC);
    part->merges = mp_alloc_array(merges, sizeof *part->merges, MP_TAG_SPEC);
    if (!part->tokens || !part->merges)
        return mp_fail_memory(error, tokens * sizeof *part->tokens + merges * sizeof *part->merges,
                              "a part of a vocabulary");
    for (uint64_t i = 0; i < bpe->tokens->count; i++)
        if (part->marked[i])
            part->tokens[part->token_count++] = (int32_t)i;
    for (uint64_t i = 0; i < bpe->merges->count; i++)
        if (part->marked[bpe->ids[i][2]])
            memcpy(part->merges[part->merge_count++], bpe->ids[i], sizeof *part->merges);
    return MP_OK;
}
