/* test_kernels_amx_attention.c: the attention of x86/amx_attention.c on the model of the tile unit (modelled.h). */
#if defined(__x86_64__)
#include "modelled.h"
#include "tile_model.h"

#define mp_amx_attention modelled_amx_attention
#include "kernels/x86/amx_attention.c"
#endif
