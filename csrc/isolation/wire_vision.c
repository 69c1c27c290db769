/* wire_vision.c: see wire_vision.h. Pixels go as they are: the process knows images by their hashes, and computes those
 * that it has not kept. */
#include "isolation/wire_vision.h"

static int64_t rows_of(const mp_text_images *images) {
    const mp_image_run *last = &images->runs[images->n_runs - 1];
    return last->source + last->rows;
}

void mp_wire_put_images(mp_wire_out *out, const mp_text_images *images) {
    const size_t tiles = (size_t)images->n_tiles, runs = (size_t)images->n_runs;
    mp_put_i32(out, images->n_tiles);
    mp_put_i32(out, images->n_runs);
    if (runs == 0)
        return;
    const int64_t sources = images->sources ? rows_of(images) : 0;
    mp_put(out, &sources, sizeof sources);
    mp_put(out, images->sizes, 2 * tiles * sizeof *images->sizes);
    mp_put(out, images->tile_keys, tiles * MP_IMAGE_KEY);
    mp_put(out, images->run_keys, runs * MP_IMAGE_KEY);
    for (size_t r = 0; r < runs; r++) {
        mp_put_i32(out, images->runs[r].start);
        mp_put_i32(out, images->runs[r].rows);
        mp_put_i32(out, images->runs[r].tiles);
    }
    mp_put(out, images->sources, (size_t)sources * sizeof *images->sources);
    mp_put(out, &images->offsets[tiles], sizeof *images->offsets);
    mp_put(out, images->pixels, (size_t)images->offsets[tiles]);
}

void mp_wire_get_images(mp_wire_in *in, mp_text_image_args *args, bool *ok) {
    args->n_tiles = (int32_t)mp_get_count(in, MP_TEXT_MOST_TILES, "there are too many tiles of images");
    args->n_runs = (int32_t)mp_get_count(in, (uint32_t)args->n_tiles, "there are more images than tiles of them");
    if (args->n_runs == 0)
        return;
    mp_get(in, &args->n_sources, sizeof args->n_sources);
    if (!in->failed && (args->n_sources < 0 || args->n_sources > MP_TEXT_MOST_TOKENS)) {
        mp_wire_refuse(in, "there are too many rows of images");
        args->n_sources = 0;
    }
    args->sizes = mp_get_array(in, 2 * (int64_t)args->n_tiles, sizeof *args->sizes, ok);
    args->tile_keys = mp_get_array(in, args->n_tiles, MP_IMAGE_KEY, ok);
    args->run_keys = mp_get_array(in, args->n_runs, MP_IMAGE_KEY, ok);
    args->runs = mp_get_array(in, 3 * (int64_t)args->n_runs, sizeof *args->runs, ok);
    args->sources = mp_get_array(in, args->n_sources, sizeof *args->sources, ok);
    mp_get(in, &args->n_bytes, sizeof args->n_bytes);
    if (!in->failed && args->n_bytes < 0)
        mp_wire_refuse(in, "there are too many pixels");
    args->pixels = mp_get_array(in, args->n_bytes, 1, ok);
}

void mp_wire_free_images(mp_text_image_args *args) {
    const void *const arrays[] = {args->sizes, args->pixels, args->tile_keys,
                                  args->run_keys, args->runs, args->sources};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        mp_free((void *)arrays[i]);
}
