/* pack_dense.h: packing of W_F32, W_BF16 and W_I8 (internal to kernels/; wmat.c calls it).
 *
 * A panel holds MP_PANEL_N = 32 outputs. In all three kinds, one step of a kernel reads one 128-byte row of a panel and
 * one 4-byte word of each row of activations, so that lane j of a vector is output j:
 *
 *   F32   [K][32] fp32                              step k:  w[0..31][k]
 *   BF16  [ceil(K/32)*16][32][2] bf16               step s:  pairs (w[j][2s + 1], w[j][2s]), j = 0..31
 *   I8    [ceil(K/4)][32][4] u8 = q + 128           step s:  w[j][4s .. 4s + 3], j = 0..31
 *         then scale[32] fp32, then pairs[32] int32: sums of the products u[0] u[1] + u[2] u[3] of all steps, which
 *         AVX2 subtracts
 *
 * BF16: vdpbf16ps adds the product of the odd slots first, then that of the even slots. The earlier input is therefore
 * in the odd slot, in weights and activations alike. K is padded to 32 inputs, the depth of an AMX tile.
 *
 * I8: one operand of vpdpbusd is unsigned, so weights are stored plus 128. Kernels compensate by starting an
 * accumulator at -128 * (sum of the row's activations). The weights are rotated: q quantises w times the Hadamard
 * matrix, divided by its size (mp_hadamard_size(K)).
 *
 * Padding: inputs beyond K have weight 0 (I8: 128). Outputs beyond N have weight 0 and scale 0. */
#ifndef MP_KERNELS_PACK_DENSE_H
#define MP_KERNELS_PACK_DENSE_H

#include "kernels/kernels.h"

/* Bytes of one panel: a multiple of 64. kind is MP_W_F32, MP_W_BF16 or MP_W_I8. */
size_t mp_pack_dense_panel_bytes(mp_wkind kind, int32_t K);
/* mp_wmat_pack for these kinds: panels [panel0, panel1) from src [N, K] of any dtype that mp_dequantize_row accepts. K
 * must be a multiple of the dtype's block size. */
void mp_pack_dense(mp_wmat *w, const mp_tensor *src, int panel0, int panel1);
/* mp_wmat_row for these kinds: output n as floats, out [K]. */
void mp_pack_dense_row(const mp_wmat *w, int32_t n, float *out);
/* Pack floats w [cols, ldw], cols <= 32, into one F32 panel [K][32]. Outputs beyond `cols` are zero. */
void mp_pack_dense_f32(const float *w, int64_t ldw, int cols, int K, float *panel);

/* Convert fp32 to bf16, rounding to nearest even. NaN stays NaN (quiet). */
static inline uint16_t mp_bf16_from_f32(float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
static inline float mp_bf16_to_f32(uint16_t x) {
    const uint32_t u = (uint32_t)x << 16;
    float f;
    __builtin_memcpy(&f, &u, sizeof f);
    return f;
}

#endif
