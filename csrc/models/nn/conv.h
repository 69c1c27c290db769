/* nn/conv.h: convolutions and group norms over images whose rows are pixels: [height * width, channels], row by row.
 *
 * A convolution is a linear layer over unfolded neighbourhoods, with zero padding. */
#ifndef MP_MODELS_NN_CONV_H
#define MP_MODELS_NN_CONV_H

#include "models/nn/builder.h"

typedef struct mp_conv {
    mp_linear linear;
    int32_t in, out, size; /* channels in and out; kernel size in pixels, odd */
} mp_conv;

mp_status mp_conv_build(mp_conv *conv, const mp_builder *builder, const char *name, int32_t in, int32_t out,
                        int32_t size, mp_error *error); /* loads tensors name.weight and name.bias */

enum { MP_CONV_ROWS = 256 }; /* maximum number of output pixels in one kernel call */
size_t mp_conv_scratch(const mp_conv *conv); /* bytes; the memory must be aligned to 64 */
/* Computes output pixels [row0, row1) of an image of height x width pixels: y [height * width, out] from x [height *
 * width, in]. If `doubled`, x is half as high and wide, and each of its pixels stands for four. Adds residual [height *
 * width, out] unless it is NULL; `residual` may be y. Single-threaded: threads take separate ranges, and the bits do
 * not depend on the ranges. */
void mp_conv_forward(const mp_conv *conv, const float *x, int height, int width, bool doubled, int64_t row0,
                     int64_t row1, const float *residual, float *y, void *scratch);

/* ---- group norm ("Group Normalization", arXiv:1803.08494) -------------------------------------------------------- */

typedef struct mp_group_norm {
    float *weight, *bias; /* [channels] */
    int32_t channels, groups;
    float eps;
} mp_group_norm;

mp_status mp_group_norm_build(mp_group_norm *norm, const mp_builder *builder, const char *name, int32_t channels,
                              int32_t groups, float eps, mp_error *error); /* loads tensors name.weight and name.bias */

/* Column sums are taken over blocks of rows. The block sums are added in double, in ascending order, so the bits do not
 * depend on the thread that computes a block. */
enum { MP_GROUP_NORM_ROWS = 64 };
static inline int64_t mp_group_norm_blocks(int64_t rows) {
    return (rows + MP_GROUP_NORM_ROWS - 1) / MP_GROUP_NORM_ROWS;
}
/* Sums block b of x [rows, channels] into sums [channels]: x itself, or (x - centre)^2 if centre [channels] is
 * given. */
void mp_group_norm_sums(const mp_group_norm *norm, const float *x, int64_t rows, int64_t b, const float *centre,
                        float *sums);
/* Combine the sums [blocks, channels] of all blocks. mp_group_norm_mean writes the mean of each channel's group to mean
 * [channels]. mp_group_norm_scale takes sums of (x - centre)^2 and writes the factor of each channel, weight /
 * sqrt(variance + eps), to scale [channels]. */
void mp_group_norm_mean(const mp_group_norm *norm, const float *sums, int64_t rows, float *mean);
void mp_group_norm_scale(const mp_group_norm *norm, const float *sums, int64_t rows, float *scale);

#endif
