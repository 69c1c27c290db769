/* scaled_weights.h: find a matrix whose scales are separate tensors (kernels/scaled.h) and check all of them.
 *
 * Beside "<name>.weight" [N, K], the spec has "<name>.scales"; for AWQ and GPTQ "<name>.zeros", or
 * "<name>.zeros_less_one" for GPTQ's first format; for GPTQ4_ORDERED "<name>.order". The key "mpool.scale_block" holds
 * outputs and inputs per scale. */
#ifndef MP_FILES_SCALED_WEIGHTS_H
#define MP_FILES_SCALED_WEIGHTS_H

#include "files/weights.h"
#include "kernels/scaled.h"

/* Get a matrix [N, K] of any weight type; a plain one sets `codes` only. FORMAT names a companion tensor that is
 * missing, has a wrong shape or type, or a value out of range: scales that are NaN, infinite, 0 or so large that a
 * packed block would exceed f16, and numbers of groups that do not exist. Reads all scales. */
mp_status mp_weights_get_matrix(const mp_weights *weights, const char *name, int64_t N, int64_t K, mp_scaled *matrix,
                                mp_error *error);
/* True for the name of a companion tensor. */
bool mp_is_companion(const char *name);

#endif
