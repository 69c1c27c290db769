/* bpe.h: extract the part of a byte-pair vocabulary that given words need, directly from the arrays of a GGUF header.
 *
 * To tokenize a word, byte-pair encoding uses only the tokens that are substrings of the word, and the merges that
 * produce such a token. A tokenizer built from only these tokens and merges returns the same ids as the full tokenizer
 * and is built in 1 % of the time. This module finds these tokens and merges. */
#ifndef MP_FILES_BPE_H
#define MP_FILES_BPE_H

#include "files/spec.h"

typedef struct mp_bpe mp_bpe;

/* Index the vocabulary of `spec`. Takes a reference to the spec, which must be frozen or no longer change. Sets *bpe to
 * NULL and returns MP_OK if `tokenizer.ggml.tokens` or `tokenizer.ggml.merges` is missing or unsuitable: duplicate
 * tokens, or more than MP_SPEC_MAX_TOKENS; a merge that is longer than 512 bytes, is not UTF-8, is not two tokens
 * separated by a space, or whose joint text is not a token. Does not report the reason. Fails only if memory is
 * refused. */
mp_status mp_bpe_create(mp_spec *spec, mp_bpe **bpe, mp_error *error);
void mp_bpe_destroy(mp_bpe *bpe); /* NULL is legal */

/* Maximum number of hash look-ups in mp_bpe_part_add for a word of `bytes` bytes. */
uint64_t mp_bpe_word_cost(const mp_bpe *bpe, uint64_t bytes);

/* A subset of the vocabulary: the tokens that are substrings of the words added so far. Use a part from one thread at a
 * time. Different parts of one mp_bpe may be built concurrently. */
typedef struct mp_bpe_part {
    uint8_t *marked;      /* [tokens], 1: in the subset */
    int32_t *tokens;      /* [token_count], ascending after mp_bpe_part_finish */
    int32_t (*merges)[2]; /* [merge_count]: left and right token, by rank */
    uint32_t token_count, merge_count;
} mp_bpe_part;

mp_status mp_bpe_part_init(mp_bpe_part *part, const mp_bpe *bpe, mp_error *error);
void mp_bpe_part_deinit(mp_bpe_part *part);
/* Mark every token that is a substring of `word` (UTF-8) and begins and ends at a character boundary. */
void mp_bpe_part_add(mp_bpe_part *part, const mp_bpe *bpe, const char *word, uint64_t bytes);
/* Fill `tokens` with the marked tokens, and `merges` with the merges that produce a marked token. */
mp_status mp_bpe_part_finish(mp_bpe_part *part, const mp_bpe *bpe, mp_error *error);

/* The token with exactly these bytes (at least one), or -1. */
int32_t mp_bpe_find(const mp_bpe *bpe, const char *text, uint64_t bytes);
/* Bytes of a token, borrowed from the spec. */
const char *mp_bpe_token(const mp_bpe *bpe, int32_t token, uint64_t *bytes);

#endif
