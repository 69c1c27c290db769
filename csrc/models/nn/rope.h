/* nn/rope.h: rotary position tables. Angle of pair i at position p: p * freq_base^(-2i / dim), adjusted by the scaling
 * that the model was trained with ("RoFormer", arXiv:2104.09864; Llama 3's scaling as published with its weights). */
#ifndef MP_MODELS_NN_ROPE_H
#define MP_MODELS_NN_ROPE_H

#include "files/spec.h"

typedef struct mp_rope {
    int dim; /* rotated components of a head, even */
    bool neox;
    double *inverse;       /* [dim / 2] angle per position */
    float attention_scale; /* factor on cos and sin; 1 without YaRN */
} mp_rope;

/* Reads {arch}.rope.* ; inverse is allocated. FORMAT for a scaling type that is not known.
 *
 * Scaling types: linear and llama3; yarn ("YaRN", arXiv:2309.00071): pairs that turn more than beta_fast times within
 * the original context stay, those below beta_slow turn slower by the factor, with a ramp over the pairs between, whose
 * ends are whole numbers unless mpool.rope_yarn_truncate says otherwise. What cos and sin are multiplied with is
 * mpool.rope_attention_factor, by default attn_factor * (1 + 0.1 ln factor). */
mp_status mp_rope_init(mp_rope *rope, const mp_spec *spec, int head_dim, bool neox, mp_error *error);
/* As another, but with a base of its own and no scaling. */
mp_status mp_rope_init_plain(mp_rope *rope, const mp_rope *like, double base, mp_error *error);
/* Divide the angles of pair i by divisors[i], [dim / 2]. `name` is where they come from. */
mp_status mp_rope_divide(mp_rope *rope, const float *divisors, const mp_spec *spec, const char *name, mp_error *error);
void mp_rope_deinit(mp_rope *rope);
/* cos and sin of one position: out [dim / 2][2]. Computed in double, rounded once: the same in every chunk. */
void mp_rope_row(const mp_rope *rope, int64_t position, float *out);
/* The same with three positions: the first sections[0] pairs turn with the first of them, and so on (M-RoPE,
 * arXiv:2409.12191). Equal positions give the bits of mp_rope_row. */
void mp_rope_axes(const mp_rope *rope, const int32_t sections[3], const int32_t positions[3], float *out);

#endif
