/* vit_positions.c: learned positions for images of other sizes, interpolated as torch's bicubic does. */
#include "models/vit.h"

#include <math.h>
#include <string.h>

typedef struct taps { /* the rows or columns that one is mixed from */
    int count;
    int32_t *index; /* [count] */
    float *weight;  /* [count] */
} taps;

static int most_taps(const mp_vit *model) { return model->grid + 4; }

size_t mp_vit_position_scratch(const mp_vit *model) { return 2 * (size_t)model->hidden + 4 * (size_t)most_taps(model); }

/* Keys' kernel; a = -0.75 as torch's plain bicubic has it, -0.5 with the wider filter. */
static float cubic(float x, float a) {
    x = fabsf(x);
    if (x < 1)
        return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

static void make_taps(int from, int to, int at, bool smooth, taps *taps) {
    float scale = (float)from / (float)to;
    if (!smooth) {
        float source = scale * ((float)at + 0.5f) - 0.5f, whole = floorf(source), t = source - whole;
        taps->count = 4;
        for (int i = 0; i < 4; i++) {
            int index = (int)whole - 1 + i;
            taps->index[i] = index < 0 ? 0 : index >= from ? from - 1 : index;
            taps->weight[i] = cubic(t + 1 - (float)i, -0.75f);
        }
        return;
    }
    float wide = scale > 1 ? scale : 1, support = 2 * wide, centre = scale * ((float)at + 0.5f), sum = 0;
    int first = (int)(centre - support + 0.5f), end = (int)(centre + support + 0.5f);
    first = first > 0 ? first : 0;
    end = end < from ? end : from;
    taps->count = end - first;
    for (int i = 0; i < taps->count; i++) {
        taps->index[i] = first + i;
        taps->weight[i] = cubic(((float)(first + i) - centre + 0.5f) / wide, -0.5f);
        sum += taps->weight[i];
    }
    for (int i = 0; i < taps->count; i++)
        taps->weight[i] /= sum;
}

void mp_vit_add_position(const mp_vit *model, int32_t down, int32_t across, int32_t y, int32_t x0, float *scratch,
                         float *x) {
    const int n = model->hidden, most = most_taps(model);
    const float *positions = model->positions + (int64_t)model->classes * n;
    if (down == model->grid && across == model->grid) {
        mp_kernels_get()->add(positions + ((int64_t)y * across + x0) * n, n, x);
        return;
    }
    float *mixed = scratch, *line = scratch + n, *rest = scratch + 2 * (size_t)n;
    taps rows = {0, (int32_t *)(void *)(rest + 2 * most), rest}, columns = {0, rows.index + most, rest + most};
    make_taps(model->grid, down, y, model->smooth, &rows);
    make_taps(model->grid, across, x0, model->smooth, &columns);
    memset(mixed, 0, (size_t)n * sizeof *mixed);
    for (int r = 0; r < rows.count; r++) {
        memset(line, 0, (size_t)n * sizeof *line);
        for (int c = 0; c < columns.count; c++) {
            const float *one = positions + ((int64_t)rows.index[r] * model->grid + columns.index[c]) * n;
            for (int i = 0; i < n; i++)
                line[i] += one[i] * columns.weight[c];
        }
        for (int i = 0; i < n; i++)
            mixed[i] += line[i] * rows.weight[r];
    }
    mp_kernels_get()->add(mixed, n, x);
}
