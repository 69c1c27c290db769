/* test_kernels_amx_rows.c: the rows of x86/amx_rows.c on the model of the tile unit (modelled.h). */
#if defined(__x86_64__)
#include "modelled.h"
#include "tile_model.h"

#define mp_amx_rows modelled_amx_rows
#include "kernels/x86/amx_rows.c"
#endif
