/* scaled.h: matrices of model folders whose scales are separate tensors (AWQ, GPTQ, FP8), converted row by row to a
 * type that mp_wmat_pack takes.
 *
 *   AWQ4     codes int32 [K, N / 8]; nibble i of a word is output {0, 2, 4, 6, 1, 3, 5, 7}[i] of eight
 *   GPTQ4    codes int32 [K / 8, N]; nibble i of a word is input i of eight
 *            Both: scales [groups, N]; zeros int32 [groups, N / 8] with outputs packed as in the codes of AWQ4, or in
 *            ascending order for GPTQ4. w = scale * (code - zero).
 *   GPTQ4_ORDERED   as GPTQ4; order int32 [K] has the group of each input
 *   F8_E4M3  codes [N, K], scales [ceil(N / rows), ceil(K / group)]. w = scale * value.
 *
 * The scales of AWQ and GPTQ are shared by whole blocks of 32 inputs, so Q4_1 holds them: d is the scale and m = -scale
 * * zero, both rounded to f16. In GPTQ4_ORDERED, neighbouring inputs have different scales, and FP8 has more precision
 * than 4 bits: both become Q8_0, which rounds again. Converted to F32, the product is rounded once. */
#ifndef MP_KERNELS_SCALED_H
#define MP_KERNELS_SCALED_H

#include "kernels/kernels.h"

typedef struct mp_scaled {
    mp_tensor codes;  /* [N, K] of a type above; of another type: a plain matrix, and the fields below are not used */
    mp_tensor scales; /* F32, F16 or BF16 */
    mp_tensor zeros;  /* AWQ4, GPTQ4, GPTQ4_ORDERED */
    mp_tensor order;  /* GPTQ4_ORDERED */
    int32_t N, K;
    int32_t rows, group; /* outputs and inputs that share a scale */
    int32_t groups;      /* scales of an output */
    int32_t zero_offset; /* added to stored zeros: 1 for GPTQ's first format, which stores one less */
} mp_scaled;

/* True for the types above. */
bool mp_dtype_is_scaled(mp_dtype dtype);
/* The type of the rows that are packed as `kind`: F32 for dense kinds, else Q4_1 or Q8_0. A plain matrix: its own. */
mp_dtype mp_scaled_rows_type(mp_dtype dtype, mp_wkind kind);
/* Writes rows [n0, n0 + n) to `to`, of type `type`: F32 or what mp_scaled_rows_type returns. `from` must be scaled.
 * Entries of `order` outside the groups count as group 0, because the file may change after it was checked. */
void mp_scaled_rows(const mp_scaled *from, int32_t n0, int32_t n, mp_dtype type, uint8_t *to);
/* Packs panels [panel0, panel1) like mp_wmat_pack. `from` must be scaled. scratch: mp_scaled_scratch bytes, 64-byte
 * aligned. */
void mp_scaled_pack(mp_wmat *w, const mp_scaled *from, int panel0, int panel1, uint8_t *scratch);
size_t mp_scaled_scratch(mp_dtype dtype, mp_wkind kind, int32_t K);
/* The value of an E4M3 number (no infinities; 0x7f and 0xff are NaN). */
float mp_e4m3_to_float(uint8_t bits);

#endif
