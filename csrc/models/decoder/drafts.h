/* decoder/drafts.h: the drafts of a step. These functions decide which sequences have a draft, how many tokens it has,
 * and what becomes of its rows:
 *
 *   mp_drafts_add     before the pass: proposes drafts, and keeps the tokens that are expected to pay
 *   mp_drafts_take    takes cache memory for them; a draft is shortened if memory is short
 *   mp_drafts_drop    the step goes without drafts
 *   mp_drafts_accept  after the pass: the next draft token of a sequence is accepted, or its rows are rejected
 *   mp_drafts_undo    after the pass: a row of the sequence is not finite
 *
 * They call the sources of drafts (generation/draft.h: look-up; decoder/drafting.h: a draft model) and the estimates of
 * what pays (generation/speculation.h). Rejected rows are tentative rows of the cache (generation/cache_parts.h): the
 * sequence does not keep them. */
#ifndef MP_MODELS_DECODER_DRAFTS_H
#define MP_MODELS_DECODER_DRAFTS_H

#include "models/decoder/engine.h"

/* Returns the largest number of draft tokens that may follow a sequence now. 0: it may have no draft. */
int mp_drafts_most(const mp_decoder *model, const mp_item *item, int choice);
/* Returns true if a draft may contain the token: the model can sample it, and it does not end the completion. */
bool mp_drafts_may_hold(const mp_decoder *model, const mp_item *item, int32_t id);

/* Adds drafts to the decoding sequences of the step, which has `rows` rows so far. Returns the number of draft
 * tokens. */
int mp_drafts_add(mp_text_engine *engine, mp_lease *lease, const mp_plan *plan, int rows);
void mp_drafts_take(mp_text_engine *engine);
void mp_drafts_drop(mp_text_engine *engine);
/* Returns true if the sequence has sampled the next token of its draft, whose row is then valid. Otherwise the pass has
 * no more rows for the sequence. */
bool mp_drafts_accept(mp_text_engine *engine, mp_step_seq *step);
/* If a draft row is not finite, discards all rows of the sequence and returns true: such a row may have corrupted
 * earlier rows of its KV block, because attention of these rows multiplies its masked slot by zero, which gives NaN.
 * The next step computes the rows again, without drafts. rows: those of the sequence */
bool mp_drafts_undo(mp_text_engine *engine, const mp_decoder_pass *pass, const mp_row_seq *rows, mp_step_seq *step);

#endif
