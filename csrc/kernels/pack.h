/* pack.h: the packed layouts of the quantised kinds, and functions that read packed values one at a time.
 *
 * A panel is 32 outputs, o = 0 ... 31, in two halves v = o / 16 of 16 lanes each: one 512-bit vector of four-byte
 * lanes, or two 256-bit vectors. A block is 32 inputs of all 32 outputs. Its inputs form 8 groups g of four, k = 4 g +
 * i. A lane is one group of one output, and byte i of the lane is input 4 g + i: the operand of a four-byte dot
 * product. A line is 64 bytes: 16 lanes. Lines are stored in the order in which a kernel reads them; another order
 * costs up to 20 % of the memory bandwidth. Blocks are ordered by ascending k. The size of every block and of every
 * head is a multiple of 64 bytes.
 *
 *   nibbles   [j = 0..3][v] lines, 512 bytes: low nibble = group j, high nibble = group j + 4
 *   bits      [v] lines, 128 bytes: bit g of byte i = bit 4 of input 4 g + i                         (Q5)
 *   pairs h   [v] lines, 128 bytes: bits 2 t, 2 t + 1 of byte i = bits 4, 5 of input 4 (4 h + t) + i, h = 0, 1   (Q6)
 *   twos      [h = 0, 1][v] lines, 256 bytes: bits 2 t, 2 t + 1 of byte i = input 4 (4 h + t) + i
 *   threes    [j = 0..2][v] lines, 384 bytes: bits 0-2 = group 2 j, bits 4-6 = group 2 j + 1; bit 3 = bit j of group 6,
 *             bit 7 = bit j of group 7
 *   bytes     [g = 0..7][v] lines, 1024 bytes: the signed value with its top bit flipped, so value + 128 unsigned
 *   halves    [o] f16, 64 bytes         small  [o] one byte, 32 bytes
 *
 *            one block                                                    bytes    bits per weight
 *   Q4_0     nibbles  d halves                                              576    4.5
 *   Q4_1     nibbles  d halves  m halves                                    640    5
 *   Q5_0     bits  nibbles  d halves                                        704    5.5
 *   Q5_1     bits  nibbles  d halves  m halves                              768    6
 *   Q8_0     bytes    d halves                                             1088    8.5
 *            one head per superblock of 8 blocks, then the 8 blocks
 *   Q4_K     d halves  dmin halves | nibbles  sc small  mn small            128 + 8 x 576    4.625
 *   Q5_K     d halves  dmin halves | bits  nibbles  sc small  mn small      128 + 8 x 704    5.625
 *   Q6_K     d halves | pairs 0  nibbles  pairs 1  sc small (int8) of inputs 0-15, of 16-31   64 + 8 x 832   6.5625
 *   Q2_K     d halves  dmin halves | twos  small of inputs 0-15, of 16-31 (sc + 16 mn)  128 + 8 x 320  2.625
 *   Q3_K     d halves | threes  sc small (int8) of inputs 0-15, of 16-31                64 + 8 x 448  3.5625
 *   TQ       d halves | twos                                                            64 + 8 x 256  2.0625
 *            one head per panel, a line: the 16 values of the table, each + an offset, then padding; then superblocks
 *   IQ2_XXS  d halves  sc small of each block | threes (codes)             320 + 8 x 384  3.3125
 *   IQ2_XS   d halves  sc small of each block | threes (codes)             320 + 8 x 384  3.3125
 *   IQ3      d halves  sc small of each block | nibbles (codes)            320 + 8 x 512  4.3125
 *   IQ4_XS   d halves  sc small (int8) of each block | nibbles (codes)     320 + 8 x 512  4.3125
 *            one head per panel as for IQ types, then blocks
 *   IQ4_NL   nibbles (codes)  d halves                                      576    4.5
 *   MXFP4    nibbles (codes)  s halves, in bf16                             576    4.5
 *   NVFP4    nibbles (codes)  s halves of inputs 0-15, of inputs 16-31      640    5
 *
 * d, dmin, m, sc and mn equal the stored values to the bit, except the sc of IQ types, which hold the factor of d in
 * the product that dequantising computes (mp_stored_block). IQ2_XXS, IQ3: factor = sc / 8. IQ2_XS: factor = n / 4 +
 * 1 / 8, where n is the low nibble of sc for inputs 0-15, and the high nibble for inputs 16-31. The s of MXFP4 and
 * NVFP4 are the scales that dequantising computes. For IQ1, scales are an eighth of those products, because the table
 * of IQ1 holds its values multiplied by eight. */
#ifndef MP_KERNELS_PACK_H
#define MP_KERNELS_PACK_H

#include "kernels/kernels.h"

enum { /* bytes of the parts */
    MP_PACK_LINE = 64,
    MP_PACK_STEP = 2 * MP_PACK_LINE, /* distance between consecutive lanes of one output in a part */
    MP_PACK_NIBBLES = 512,
    MP_PACK_THREES = 384,
    MP_PACK_TWOS = 256,
    MP_PACK_BITS = 128,
    MP_PACK_PAIRS = 128,
    MP_PACK_BYTES = 1024,
    MP_PACK_HALVES = 64,
    MP_PACK_SMALL = 32,
};
/* Numbers that are added to the values of a table, so that no value is negative. IQ_OFFSET: IQ1 to IQ3, whose values
 * become 0 to 127. FP4_OFFSET: MXFP4 and NVFP4, 0 to 24. IQ4_OFFSET: IQ4_NL and IQ4_XS. */
enum { MP_PACK_IQ_OFFSET = 64, MP_PACK_FP4_OFFSET = 12, MP_PACK_IQ4_OFFSET = 128 };

/* Bytes of a panel of K inputs. `kind` must be quantised (asserted). */
size_t mp_pack_panel_bytes(mp_wkind kind, int32_t K);

/* Pack panels [panel0, panel1) of a quantised w from src [N, K]. */
void mp_pack_quant(mp_wmat *w, const mp_tensor *src, int panel0, int panel1);

/* Block b of output o (0 ... 31) of a packed panel, as plain numbers. The weight of input k is scale[k / group] * q[k],
 * plus min[k / group] if `mins`. kernels.h and dequantize.h define how products are rounded. */
typedef struct mp_pack_view {
    int32_t q[32];
    int group; /* 16 or 32 */
    bool mins;
    float scale[2], min[2];
} mp_pack_view;
void mp_pack_view_block(mp_wkind kind, const uint8_t *panel, int b, int o, mp_pack_view *view);

/* Read row n of a packed quantised matrix as floats, out [K]. Equal to the dequantised source. */
void mp_pack_quant_row(const mp_wmat *w, int32_t n, float *out);

/* Build blocks of MXFP4 as dtype.def lays them out, 17 bytes each, from scales [blocks] and codes [blocks, 16]. In
 * `codes`, as OpenAI publishes them, one byte holds two neighbouring codes. In a block, byte i holds codes i and i +
 * 16. */
void mp_mxfp4_join(const uint8_t *scales, const uint8_t *codes, int64_t blocks, uint8_t *to);

#endif
