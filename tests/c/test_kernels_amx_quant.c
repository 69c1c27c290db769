/* test_kernels_amx_quant.c: the products of x86/amx_quant.c on the model of the tile unit (modelled.h). */
#if defined(__x86_64__)
#include "modelled.h"
#include "tile_model.h"

#define mp_amx_quant modelled_amx_quant
#include "kernels/x86/amx_quant.c"
#endif
