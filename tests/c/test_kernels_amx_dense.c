/* test_kernels_amx_dense.c: the products of x86/amx_dense.c on the model of the tile unit (modelled.h). */
#if defined(__x86_64__)
#include "modelled.h"
#include "tile_model.h"

#define mp_amx_dense modelled_amx_dense
#include "kernels/x86/amx_dense.c"
#endif
