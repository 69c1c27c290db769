/* speculation_fixture.h: engines whose drafts the test controls. */
#ifndef MP_TEST_SPECULATION_FIXTURE_H
#define MP_TEST_SPECULATION_FIXTURE_H

#include "models/decoder/engine.h"

/* Set the source of an engine's drafts; call between steps. propose NULL: drafts come from the lookup index. */
static inline void tiny_speculate(mp_engine *base, mp_speculate mode, mp_propose *propose, void *arg) {
    mp_text_engine *engine = (mp_text_engine *)base;
    mp_speculation_init(&engine->speculation, mode);
    engine->speculation.propose = propose;
    engine->speculation.propose_arg = arg;
}

#endif
