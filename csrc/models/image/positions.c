/* image/positions.c: learned positions for image sizes other than the trained one, interpolated as torch's bicubic
 * does; positions of axial networks. */
#include "models/image/vit.h"

#include <math.h>
#include <string.h>

typedef struct taps { /* source rows or columns that one output row or column is interpolated from */
    int count;
    int32_t *index; /* [count] */
    float *weight;  /* [count] */
} taps;

static int most_taps(const mp_vit *model) { return model->grid + 4; }

size_t mp_vit_position_scratch(const mp_vit *model) { return 2 * (size_t)model->hidden + 4 * (size_t)most_taps(model); }

/* Keys' cubic convolution kernel: a = -0.75 as in torch's plain bicubic, -0.5 with the antialiasing filter. */
static float cubic(float x, float a) {
    x = fabsf(x);
    if (x < 1)
        return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

/* Weights of the two neighbours of a place, when both ends of the axis keep theirs. */
static void make_two(int from, int to, int at, taps *taps) {
    const float source = (float)at * (float)(from - 1) / (float)(to > 1 ? to - 1 : 1), whole = floorf(source);
    taps->count = 2;
    for (int i = 0; i < 2; i++) {
        const int index = (int)whole + i;
        taps->index[i] = index < from ? index : from - 1;
        taps->weight[i] = 1 - fabsf(source - whole - (float)i);
    }
}

static void make_taps(const mp_vit *model, int to, int at, taps *taps) {
    const int from = model->grid;
    float scale = (float)from / (float)to;
    if (model->aligned) {
        make_two(from, to, at, taps);
        return;
    }
    if (!model->smooth) {
        float source = scale * ((float)at + 0.5f) - 0.5f, whole = floorf(source), t = source - whole;
        taps->count = 4;
        for (int i = 0; i < 4; i++) {
            int index = (int)whole - 1 + i;
            taps->index[i] = index < 0 ? 0 : index >= from ? from - 1 : index;
            taps->weight[i] = cubic(t + 1 - (float)i, -0.75f);
        }
        return;
    }
    float wide = scale > 1 ? scale : 1, support = model->linear ? wide : 2 * wide;
    float centre = scale * ((float)at + 0.5f), sum = 0;
    int first = (int)(centre - support + 0.5f), end = (int)(centre + support + 0.5f);
    first = first > 0 ? first : 0;
    end = end < from ? end : from;
    taps->count = end - first;
    for (int i = 0; i < taps->count; i++) {
        taps->index[i] = first + i;
        const float away = ((float)(first + i) - centre + 0.5f) / wide;
        taps->weight[i] = model->linear ? fmaxf(0, 1 - fabsf(away)) : cubic(away, -0.5f);
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
    make_taps(model, down, y, &rows);
    make_taps(model, across, x0, &columns);
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

/* ---- axial networks ---------------------------------------------------------------------------------------------- */

static int32_t windows_of(const mp_vit *model, int32_t down, int32_t across) {
    const int32_t side = model->window * model->cell;
    return ((down + side - 1) / side) * ((across + side - 1) / side);
}

size_t mp_vit_axes_bytes(const mp_vit *model, int32_t down, int32_t across) {
    const size_t patches = (size_t)down * (size_t)across;
    return (model->positions ? 2 : 1) * mp_arena_cost(patches * sizeof(int32_t)) +
           mp_arena_cost(((size_t)windows_of(model, down, across) + 1) * sizeof(int32_t)) +
           mp_arena_cost(patches * (size_t)model->head_dim * sizeof(float));
}

/* Angles of one line or column. Half of a head's pairs rotate by line, the other half by column, with the same
 * frequencies, or with frequencies that are `shift` steps lower. */
static void make_rotation(const mp_vit *model, int32_t at, double shift, float *out) {
    const int half = model->head_dim / 4;
    for (int i = 0; i < half; i++) {
        double angle = at * pow((double)model->rope_base, -(i + shift) / half);
        out[2 * i] = (float)cos(angle);
        out[2 * i + 1] = (float)sin(angle);
    }
}

/* Compute the rotation of each line and of each column once, and copy it to the other rows of that line or column. */
static void make_rotations(const mp_vit *model, const mp_vit_image *image, float *rotation) {
    const int32_t down = image->down, across = image->across, half = model->head_dim / 2;
    const size_t bytes = (size_t)half * sizeof *rotation;
    for (int32_t y = 0; y < down; y++)
        make_rotation(model, y, 0, rotation + 2 * (int64_t)image->place[y * across] * half);
    for (int32_t x = 0; x < across; x++)
        make_rotation(model, x, model->staggered ? 0.5 : 0, rotation + (2 * (int64_t)image->place[x] + 1) * half);
    for (int32_t y = 0; y < down; y++)
        for (int32_t x = 0; x < across; x++) {
            float *out = rotation + 2 * (int64_t)image->place[y * across + x] * half;
            if (x > 0)
                memcpy(out, rotation + 2 * (int64_t)image->place[y * across] * half, bytes);
            if (y > 0)
                memcpy(out + half, rotation + (2 * (int64_t)image->place[x] + 1) * half, bytes);
        }
}

void mp_vit_axes(const mp_vit *model, mp_vit_image *image, void *memory) {
    const int32_t down = image->down, across = image->across, cell = model->cell, side = model->window * cell;
    const size_t windows_at = mp_arena_cost((size_t)down * (size_t)across * sizeof(int32_t));
    const size_t list = ((size_t)windows_of(model, down, across) + 1) * sizeof(int32_t);
    int32_t *place = memory, *windows = (void *)((uint8_t *)memory + windows_at), row = 0;
    float *rotation = (void *)((uint8_t *)memory + windows_at + mp_arena_cost(list));
    const size_t angles = mp_arena_cost((size_t)down * (size_t)across * (size_t)model->head_dim * sizeof(float));
    int32_t *order = model->positions ? (void *)((uint8_t *)rotation + angles) : NULL;
    image->window_count = 0;
    for (int32_t top = 0; top < down; top += side)
        for (int32_t left = 0; left < across; left += side) {
            windows[image->window_count++] = row;
            for (int32_t y = top; y < down && y < top + side; y += cell)
                for (int32_t x = left; x < across && x < left + side; x += cell)
                    for (int32_t i = 0; i < cell * cell; i++, row++)
                        place[(y + i / cell) * across + x + i % cell] = row;
        }
    windows[image->window_count] = row;
    for (int32_t patch = 0; order && patch < down * across; patch++)
        order[place[patch]] = patch;
    image->place = place;
    image->order = order;
    image->windows = windows;
    image->rotation = rotation;
    make_rotations(model, image, rotation);
}
