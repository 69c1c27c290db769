/* decoder/streams.h: several residual sums per row, of which the layers compute one ("Alternating Updates", AltUp,
 * arXiv:2301.13310; Gemma 3n). The sums are x of the pass and `streams` others.
 *
 * Before a layer, each sum becomes a mixture of all sums, whose factors depend on the row ("predict"). After it, each
 * sum moves by a factor times what the layer added to the first one ("correct"). The network with the row's inputs of
 * the layer reads the first sum, and adds its output to the others. */
#ifndef MP_MODELS_DECODER_STREAMS_H
#define MP_MODELS_DECODER_STREAMS_H

#include "models/decoder/pass.h"

/* Reads the number of sums and the projections to them and back. */
mp_status mp_streams_read_model(mp_decoder *model, const mp_builder *builder, mp_error *error);
/* Reads the weights of a layer, if the model has such sums. Its last sublayer must be that of the inputs. */
mp_status mp_streams_read_layer(const mp_layer_reader *reader, mp_decoder_layer *layer, mp_error *error);

/* All threads call the following functions, which end with a barrier.
 * Makes the other sums of the rows from their embeddings. */
void mp_streams_enter(const mp_decoder_pass *pass, const mp_decoder_view *view);
/* Before and after the sublayers of a layer, but the last, on the rows of the view. */
void mp_streams_predict(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_decoder_layer *layer);
void mp_streams_correct(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_decoder_layer *layer);
/* Makes x of the pass the mean of all sums. */
void mp_streams_leave(const mp_decoder_pass *pass, const mp_decoder_view *view);

#endif
