#include "models/nn/conv.h"

#include <assert.h>
#include <math.h>
#include <stdio.h> /* snprintf only */
#include <string.h>

mp_status mp_conv_build(mp_conv *conv, const mp_builder *builder, const char *name, int32_t in, int32_t out,
                        int32_t size, mp_error *error) {
    char weight[MP_BUILDER_NAME], bias[MP_BUILDER_NAME];
    snprintf(weight, sizeof weight, "%s.weight", name);
    snprintf(bias, sizeof bias, "%s.bias", name);
    conv->in = in;
    conv->out = out;
    conv->size = size;
    return mp_builder_conv(builder, &conv->linear, weight, bias, out, in, size, error);
}

static size_t unfolded_bytes(const mp_conv *conv) {
    return mp_arena_cost((size_t)MP_CONV_ROWS * (size_t)conv->linear.K * sizeof(float));
}

size_t mp_conv_scratch(const mp_conv *conv) {
    return unfolded_bytes(conv) + mp_linear_scratch(&conv->linear, MP_CONV_ROWS);
}

void mp_conv_forward(const mp_conv *conv, const float *x, int height, int width, bool doubled, int64_t row0,
                     int64_t row1, const float *residual, float *y, void *scratch) {
    assert(row0 <= row1 && row1 - row0 <= MP_CONV_ROWS && row1 <= (int64_t)height * width);
    const int reach = conv->size / 2, in_width = doubled ? width / 2 : width;
    const size_t bytes = (size_t)conv->in * sizeof(float);
    float *unfolded = scratch, *to = unfolded;
    for (int64_t row = row0; row < row1; row++) {
        const int py = (int)(row / width), px = (int)(row % width);
        for (int dy = -reach; dy <= reach; dy++)
            for (int dx = -reach; dx <= reach; dx++, to += conv->in) {
                const int sy = py + dy, sx = px + dx;
                if (sy < 0 || sy >= height || sx < 0 || sx >= width)
                    memset(to, 0, bytes);
                else
                    memcpy(to, x + ((int64_t)(sy >> doubled) * in_width + (sx >> doubled)) * conv->in, bytes);
            }
    }
    mp_team_thread single = mp_team_single();
    mp_epilogue ep = {.residual = residual ? residual + row0 * conv->out : NULL, .ld_residual = conv->out};
    mp_linear_forward(&conv->linear, &single, unfolded, conv->linear.K, (int)(row1 - row0),
                      (uint8_t *)scratch + unfolded_bytes(conv), NULL, NULL, &ep, y + row0 * conv->out, conv->out);
}

mp_status mp_group_norm_build(mp_group_norm *norm, const mp_builder *builder, const char *name, int32_t channels,
                              int32_t groups, float eps, mp_error *error) {
    char weight[MP_BUILDER_NAME], bias[MP_BUILDER_NAME];
    snprintf(weight, sizeof weight, "%s.weight", name);
    snprintf(bias, sizeof bias, "%s.bias", name);
    norm->channels = channels;
    norm->groups = groups;
    norm->eps = eps;
    MP_TRY(mp_builder_vector(builder, &norm->weight, weight, channels, error));
    return mp_builder_vector(builder, &norm->bias, bias, channels, error);
}

void mp_group_norm_sums(const mp_group_norm *norm, const float *x, int64_t rows, int64_t b, const float *centre,
                        float *sums) {
    const int64_t first = b * MP_GROUP_NORM_ROWS, left = rows - first;
    mp_kernels_get()->column_sums(x + first * norm->channels, norm->channels,
                                  (int)(left < MP_GROUP_NORM_ROWS ? left : MP_GROUP_NORM_ROWS), norm->channels, centre,
                                  sums);
}

static double group_mean(const mp_group_norm *norm, const float *sums, int64_t rows, int group) {
    const int width = norm->channels / norm->groups;
    double sum = 0;
    for (int64_t b = 0; b < mp_group_norm_blocks(rows); b++)
        for (int c = 0; c < width; c++)
            sum += (double)sums[b * norm->channels + group * width + c];
    return sum / ((double)rows * width);
}

void mp_group_norm_mean(const mp_group_norm *norm, const float *sums, int64_t rows, float *mean) {
    const int width = norm->channels / norm->groups;
    for (int g = 0; g < norm->groups; g++) {
        const float value = (float)group_mean(norm, sums, rows, g);
        for (int c = g * width; c < (g + 1) * width; c++)
            mean[c] = value;
    }
}

void mp_group_norm_scale(const mp_group_norm *norm, const float *sums, int64_t rows, float *scale) {
    const int width = norm->channels / norm->groups;
    for (int g = 0; g < norm->groups; g++) {
        const float value = (float)(1.0 / sqrt(group_mean(norm, sums, rows, g) + (double)norm->eps));
        for (int c = g * width; c < (g + 1) * width; c++)
            scale[c] = value * norm->weight[c];
    }
}
