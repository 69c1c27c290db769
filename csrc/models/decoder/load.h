/* decoder/load.h: what decoder/load.c and decoder/hyper.c share. */
#ifndef MP_MODELS_DECODER_LOAD_H
#define MP_MODELS_DECODER_LOAD_H

#include "models/decoder/decoder.h"

enum { MP_DECODER_LAYERS = 1024 };

/* Sizes, heads, scales, activation. */
mp_status mp_decoder_read_hyper(mp_decoder *model, const mp_spec *spec, uint32_t flags, mp_error *error);
/* Rotary tables, and what each layer has of them and of the window. model->weights and ->layers are there. */
mp_status mp_decoder_read_layers(mp_decoder *model, const mp_load_args *args, mp_error *error);

#endif
