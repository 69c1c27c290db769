/* bpe_fixture.h: use a vocabulary, for tests that refuse its memory. */
#ifndef BPE_FIXTURE_H
#define BPE_FIXTURE_H

#include "files/bpe.h"

/* Make the vocabulary of a spec and a part of it, and free both. */
static inline mp_status use_vocabulary(void *spec, mp_error *error) {
    mp_bpe *bpe;
    mp_bpe_part part = {0};
    mp_status status = mp_bpe_create(spec, &bpe, error);
    if (status == MP_OK)
        status = mp_bpe_part_init(&part, bpe, error);
    if (status == MP_OK) {
        mp_bpe_part_add(&part, bpe, "abc", 3);
        status = mp_bpe_part_finish(&part, bpe, error);
    }
    mp_bpe_part_deinit(&part);
    mp_bpe_destroy(bpe);
    return status;
}

#endif
