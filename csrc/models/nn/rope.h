/* nn/rope.h: tables of rotary position embeddings. The angle of pair i at position p is p * freq_base^(-2i / dim),
 * adjusted by the scaling of the model ("RoFormer", arXiv:2104.09864; Llama 3's scaling as published with its
 * weights). */
#ifndef MP_MODELS_NN_ROPE_H
#define MP_MODELS_NN_ROPE_H

#include "files/spec.h"

typedef struct mp_rope {
    int dim; /* rotated components of a head, even */
    bool neox;
    double *inverse;       /* [dim / 2] angle per position */
    float attention_scale; /* factor on cos and sin; 1 without YaRN */
} mp_rope;

/* Reads {arch}.rope.* and allocates `inverse`. FORMAT for an unknown scaling type.
 *
 * Scaling types: linear, proportional, llama3 and yarn ("YaRN", arXiv:2309.00071). Proportional is linear for the first
 * mpool.rope_pairs pairs; the others do not turn. With yarn, pairs that turn more than beta_fast times within the
 * original context are unchanged, and the angles of pairs that turn fewer than beta_slow times are divided by the
 * factor. Between them is a ramp whose ends are rounded to whole numbers unless mpool.rope_yarn_truncate is false. cos
 * and sin are multiplied by mpool.rope_attention_factor, by default attn_factor * (1 + 0.1 ln factor). */
mp_status mp_rope_init(mp_rope *rope, const mp_spec *spec, int head_dim, bool neox, mp_error *error);
/* Initialises `rope` with frequency base `base` and no scaling. */
mp_status mp_rope_init_plain(mp_rope *rope, int dim, bool neox, double base, mp_error *error);
/* Divides the angle of pair i by divisors[i], [dim / 2]. `name` names the tensor of the divisors in errors. */
mp_status mp_rope_divide(mp_rope *rope, const double *divisors, const mp_spec *spec, const char *name,
                         mp_error *error);
void mp_rope_deinit(mp_rope *rope);
/* Writes cos and sin of one position to out [dim / 2][2]. Computes in double and rounds once, so the bits do not depend
 * on how the prompt is split into steps. */
void mp_rope_row(const mp_rope *rope, int64_t position, float *out);
typedef struct mp_rope_sections { /* M-RoPE (arXiv:2409.12191): which of three positions turns each pair */
    int32_t pairs[3]; /* number of pairs for each position; together dim / 2. All 0: the model has one position */
    bool interleaved; /* the positions take turns, pair by pair; each stops after its number of pairs, and the first
                       * position has all other pairs. Otherwise the pairs of a position follow one another */
} mp_rope_sections;

/* Like mp_rope_row with three positions. Equal positions give the bits of mp_rope_row. */
void mp_rope_axes(const mp_rope *rope, const mp_rope_sections *sections, const int32_t positions[3], float *out);

#endif
