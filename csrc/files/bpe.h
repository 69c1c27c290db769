/* bpe.h: the vocabulary and the merges of a byte-pair tokenizer, as a GGUF header has them, searched where they stand.
 *
 * To tokenise a word, byte-pair encoding only ever looks at tokens that are pieces of that word and at merges that make
 * one. A tokenizer with nothing but those gives the same ids as the whole one, and is made in a hundredth of the time:
 * this finds them. */
#ifndef MP_FILES_BPE_H
#define MP_FILES_BPE_H

#include "files/spec.h"

typedef struct mp_bpe mp_bpe;

/* Keeps a reference to the spec, which must not change any more. NULL in *bpe without an error when the keys are
 * missing or not fit: tokens that are not distinct, a merge that is not UTF-8, not two tokens with a space between
 * them, or whose joint text is no token. Who wants to know what is wrong reads them in full. Fails only when memory is
 * refused. */
mp_status mp_bpe_create(mp_spec *spec, mp_bpe **bpe, mp_error *error);
void mp_bpe_destroy(mp_bpe *bpe); /* NULL is legal */

/* Look-ups that adding a word takes. */
uint64_t mp_bpe_word_cost(const mp_bpe *bpe, uint64_t bytes);

/* A part of it: the pieces of some words. One thread at a time; several parts of one mp_bpe may be made side by
 * side. */
typedef struct mp_bpe_part {
    uint8_t *marked;      /* [tokens], 1 = in it */
    int32_t *tokens;      /* [token_count], ascending after mp_bpe_part_finish */
    int32_t (*merges)[2]; /* [merge_count]: left and right, by rank */
    uint32_t token_count, merge_count;
} mp_bpe_part;

mp_status mp_bpe_part_init(mp_bpe_part *part, const mp_bpe *bpe, mp_error *error);
void mp_bpe_part_deinit(mp_bpe_part *part);
/* Mark every token that is a piece of a word, UTF-8, cut between characters. */
void mp_bpe_part_add(mp_bpe_part *part, const mp_bpe *bpe, const char *word, uint64_t bytes);
/* List what is marked, and the merges between them. */
mp_status mp_bpe_part_finish(mp_bpe_part *part, const mp_bpe *bpe, mp_error *error);

/* The token with exactly these bytes, at least one; -1 when there is none. */
int32_t mp_bpe_find(const mp_bpe *bpe, const char *text, uint64_t bytes);
/* Bytes of a token, borrowed. */
const char *mp_bpe_token(const mp_bpe *bpe, int32_t token, uint64_t *bytes);

#endif
