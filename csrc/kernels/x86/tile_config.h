/* x86/tile_config.h: the memory operand of ldtilecfg, for the kernels with AMX. */
#ifndef MP_KERNELS_X86_TILE_CONFIG_H
#define MP_KERNELS_X86_TILE_CONFIG_H

#include <stdint.h>

typedef struct tile_config {
    uint8_t palette, start_row, unused[14];
    uint16_t bytes[16]; /* bytes per row of tile i */
    uint8_t rows[16];
} tile_config;

#endif
