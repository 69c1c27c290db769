/* vision/store.c: computes the rows of images tile by tile and part by part, and keeps them by tenant and by
 * the hash of their pixels. */
#include <stdatomic.h>
#include <string.h>

#include "base/options.h"
#include "models/nn/scratch.h"
#include "models/vision/vision.h"

enum {
    MAX_TILES = 1024,   /* limited because a look-up scans all tiles */
    MAX_NUMBERS = 4096 /* images with a remembered number */
};

static int32_t store_larger(int32_t a, int32_t b) { return a > b ? a : b; }

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

static void free_tile(mp_image_store *store, mp_tile *tile) {
    store->tile_bytes -= tile->bytes;
    mp_budget_give(store->budget, tile->bytes);
    mp_free(tile->rows);
    mp_free(tile);
}

static void drop_tile(mp_image_store *store, mp_tile **at) {
    mp_tile *tile = *at;
    *at = tile->next;
    free_tile(store, tile);
}

/* Frees idle tiles, least recently used first, until at most `kept` bytes of idle tiles are left or `bytes` bytes are
 * freed. Returns the bytes freed. */
static uint64_t shrink_tiles(mp_image_store *store, uint64_t bytes, uint64_t kept) {
    uint64_t freed = 0, idle = 0;
    for (const mp_tile *tile = store->tiles; tile; tile = tile->next)
        idle += tile->users == 0 ? tile->bytes : 0;
    while (idle > kept && freed < bytes) {
        mp_tile **last = NULL;
        for (mp_tile **at = &store->tiles; *at; at = &(*at)->next)
            last = (*at)->users == 0 ? at : last;
        if (!last)
            break;
        idle -= (*last)->bytes;
        freed += (*last)->bytes;
        drop_tile(store, last);
    }
    return freed;
}

uint64_t mp_images_shrink(mp_image_store *store, uint64_t bytes) {
    return store ? shrink_tiles(store, bytes, 0) : 0;
}

/* Limits the bytes of idle tiles to a quarter of the limit for idle prefixes, and drops idle tiles beyond the
 * MAX_TILES most recently used tiles. */
static void bound_tiles(mp_image_store *store) {
    uint64_t limit = atomic_load_explicit(&mp_budget_top(store->budget)->limit, memory_order_relaxed);
    uint64_t percent = (uint64_t)mp_options_get()->prefix_percent;
    shrink_tiles(store, UINT64_MAX, percent == 0 ? 0 : limit == UINT64_MAX ? UINT64_MAX : limit / 400 * percent);
    int count = 0;
    for (mp_tile **at = &store->tiles; *at;) {
        if (++count > MAX_TILES && (*at)->users == 0)
            drop_tile(store, at);
        else
            at = &(*at)->next;
    }
}

static mp_image_key key_from(const mp_sequence_group *group, const uint8_t *pixels) {
    mp_image_key key = {.scope = group->image_scope};
    memcpy(key.pixels, pixels, sizeof key.pixels);
    return key;
}

static bool store_equal(const mp_image_key *a, const mp_image_key *b) {
    return mp_cache_scope_equal(a->scope, b->scope) && memcmp(a->pixels, b->pixels, sizeof a->pixels) == 0;
}

static mp_tile *find_tile(mp_image_store *store, const mp_image_key *key) {
    for (mp_tile **at = &store->tiles; *at; at = &(*at)->next) {
        mp_tile *tile = *at;
        if (!store_equal(&tile->key, key))
            continue;
        *at = tile->next;
        tile->next = store->tiles;
        store->tiles = tile;
        return tile;
    }
    return NULL;
}

/* Charges `bytes` to the budget; if the budget is full, first evicts idle tiles and prefixes. Returns false if that
 * does not suffice. */
static bool take_budget(mp_image_store *store, uint64_t bytes) {
    while (!mp_budget_take(store->budget, bytes))
        if (mp_images_shrink(store, bytes) == 0 && mp_prefix_shrink(store->cache, bytes) == 0)
            return false;
    return true;
}

static mp_status make_tile(mp_image_store *store, const mp_image_key *key, int32_t count, mp_tile **out,
                           mp_error *error) {
    size_t bytes = sizeof(mp_tile) + (size_t)count * (size_t)mp_vision_row(store->vision) * sizeof(float);
    if (!take_budget(store, bytes))
        return mp_fail_memory(error, bytes, "the rows of an image");
    mp_tile *tile = mp_alloc_zeroed(sizeof *tile, MP_TAG_SCRATCH);
    float *rows = tile ? mp_alloc(bytes - sizeof *tile, MP_TAG_SCRATCH) : NULL;
    if (!rows) {
        mp_free(tile);
        mp_budget_give(store->budget, bytes);
        return mp_fail_memory(error, bytes, "the rows of an image");
    }
    *tile = (mp_tile){.key = *key, .rows = rows, .bytes = bytes, .count = count};
    store->tile_bytes += bytes;
    *out = tile;
    return MP_OK;
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

mp_image_store *mp_images_create(const mp_vision *vision, mp_budget *budget, mp_prefix_cache *cache) {
    mp_image_store *store = mp_alloc_zeroed(sizeof *store, MP_TAG_SCRATCH);
    if (store)
        *store = (mp_image_store){.vision = vision, .budget = budget, .cache = cache};
    return store;
}

static void give_arena(mp_image_store *store, mp_arena *arena) {
    store->charged -= arena->size;
    mp_budget_give(store->budget, arena->size);
    mp_arena_deinit(arena);
}

/* Removes a job. The next job reuses its memory, unless there is spare memory already. The caller takes ownership of
 * the job's tile. */
static void end_job(mp_image_store *store, mp_tile_job **at) {
    mp_tile_job *job = *at;
    *at = job->next;
    if (store->spare.size == 0)
        store->spare = job->memory;
    else
        give_arena(store, &job->memory);
    mp_free(job);
}

static void drop_job(mp_image_store *store, mp_tile_job **at) {
    free_tile(store, (*at)->tile);
    end_job(store, at);
}

uint64_t mp_images_bytes(const mp_image_store *store) { return store ? store->tile_bytes + store->charged : 0; }

uint64_t mp_images_trim(mp_image_store *store) {
    if (!store)
        return 0;
    const uint64_t before = mp_images_bytes(store);
    while (store->jobs)
        drop_job(store, &store->jobs);
    give_arena(store, &store->spare);
    give_arena(store, &store->scratch);
    return before - mp_images_bytes(store);
}

void mp_images_destroy(mp_image_store *store) {
    if (!store)
        return;
    mp_images_shrink(store, UINT64_MAX);
    mp_images_trim(store);
    mp_free(store->numbers);
    mp_free(store);
}

/* ---- images of a request ----------------------------------------------------------------------------------------- */

static int32_t number_of(mp_image_store *store, const mp_image_key *key) {
    for (int i = 0; i < store->number_count; i++)
        if (store_equal(&store->numbers[i].key, key))
            return store->numbers[i].number;
    int at = store->number_count;
    if (at < MAX_NUMBERS)
        store->number_count++;
    else
        at = store->number_next++ % MAX_NUMBERS;
    /* Numbers wrap around after INT32_MAX. By then the prefixes cached under the first numbers have been evicted. */
    store->last_number = store->last_number < INT32_MAX ? store->last_number + 1 : 1;
    store->numbers[at].key = *key;
    store->numbers[at].number = store->last_number;
    return store->last_number;
}

/* Assigns M-RoPE positions: text advances on all axes alike; the rows of an image are placed by line and column, and
 * those of a video by time, too. As in the paper (arXiv:2409.12191), a token is one position after the last one of what
 * is before it. transformers 5.24 ignores the times of a video there, but not after the prompt. */
static void store_place(const mp_vision *vision, const mp_text_request *request, mp_request_images *own) {
    const mp_text_images *images = &request->images;
    const int32_t unit = vision->image_encoder.patch * vision->merge;
    int32_t at = 0, next = 0, first = 0;
    for (int32_t r = 0; r <= images->n_runs; r++) {
        const mp_image_run *run = &images->runs[r];
        for (int32_t end = r < images->n_runs ? run->start : request->n_prompt; at < end; at++, next++)
            own->positions[at][0] = own->positions[at][1] = own->positions[at][2] = next;
        if (r == images->n_runs)
            break;
        const bool continued = run->time >= 0;
        const int32_t time = continued ? run->time : 0;
        first = continued ? first : next;
        const int32_t down = images->sizes[2 * run->tile] / unit, across = images->sizes[2 * run->tile + 1] / unit;
        for (int32_t i = 0; i < run->rows; i++, at++) {
            own->positions[at][0] = first + time;
            own->positions[at][1] = first + i / across;
            own->positions[at][2] = first + i % across;
        }
        next = store_larger(next, first + store_larger(store_larger(down, across), time + 1));
    }
    own->shift = next - request->n_prompt;
}

mp_status mp_images_begin(mp_image_store *store, const mp_text_request *request, bool axes, mp_sequence_group *group,
                          mp_error *error) {
    const mp_text_images *images = &request->images;
    if (images->n_runs == 0)
        return MP_OK;
    size_t list = sizeof(mp_request_images) + (size_t)images->n_tiles * sizeof(mp_tile *);
    size_t bytes = list + (axes ? (size_t)request->n_prompt * sizeof *group->images->positions : 0);
    if (!take_budget(store, bytes))
        return mp_fail_memory(error, bytes, "the images of a request");
    group->charged += bytes;
    group->images = mp_alloc_zeroed(bytes, MP_TAG_REQUEST);
    if (!group->images)
        return mp_fail_memory(error, bytes, "the images of a request");
    if (axes) {
        group->images->positions = (void *)((uint8_t *)group->images + list);
        store_place(store->vision, request, group->images);
    }
    return MP_OK;
}

mp_status mp_images_number(mp_image_store *store, const mp_text_request *request, mp_sequence_group *group,
                           mp_error *error) {
    const mp_text_images *images = &request->images;
    if (images->n_runs > 0 && !store->numbers)
        store->numbers = mp_alloc_array(MAX_NUMBERS, sizeof *store->numbers, MP_TAG_SCRATCH);
    if (images->n_runs > 0 && !store->numbers)
        return mp_fail_memory(error, MAX_NUMBERS * sizeof *store->numbers, "the image numbers");
    for (int32_t r = 0; r < images->n_runs; r++) {
        const mp_image_key key = key_from(group, images->run_keys + (ptrdiff_t)r * MP_IMAGE_KEY);
        const int32_t number = number_of(store, &key);
        for (int c = 0; c < group->n; c++)
            for (int32_t i = 0; i < images->runs[r].rows; i++)
                group->seqs[c].tokens[images->runs[r].start + i] = -number;
    }
    return MP_OK;
}

void mp_images_release(mp_image_store *store, const mp_text_request *request, mp_sequence_group *group) {
    if (!store)
        return;
    for (int32_t t = 0; group->images && t < request->images.n_tiles; t++)
        if (group->images->tiles[t]) {
            group->images->tiles[t]->users--;
            group->images->tiles[t] = NULL;
        }
    for (mp_tile_job *job = store->jobs; job; job = job->next)
        job->holder = job->holder == group ? NULL : job->holder;
    bound_tiles(store);
}

/* Returns the index of a placeholder's tile, and sets *row to the row within that tile. Returns -1 for the newline. */
static int32_t tile_at(const mp_vision *vision, const mp_text_images *images, int32_t position, int32_t *row) {
    const mp_image_run *run = mp_image_run_at(images->runs, images->n_runs, position);
    int32_t at = position - run->start, tile = run->tile, rows;
    *row = images->sources ? images->sources[run->source + at] : at;
    if (*row < 0)
        return -1;
    while (*row >= (rows = mp_vision_rows(vision, images->sizes[2 * tile], images->sizes[2 * tile + 1]))) {
        *row -= rows;
        tile++;
    }
    return tile;
}

static bool store_hold(mp_image_store *store, const mp_text_images *images, mp_sequence_group *group, int32_t tile) {
    mp_tile **held = &group->images->tiles[tile];
    if (*held)
        return true;
    const mp_image_key key = key_from(group, images->tile_keys + (ptrdiff_t)tile * MP_IMAGE_KEY);
    *held = find_tile(store, &key);
    if (*held)
        (*held)->users++;
    return *held != NULL;
}

int mp_images_ready(mp_image_store *store, const mp_text_request *request, mp_sequence_group *group,
                    const mp_sequence *seq, int want, int *missing) {
    *missing = -1;
    for (int i = 0; group->images && i < want; i++) {
        int32_t position = seq->cached.count + i, row;
        if (position >= request->n_prompt)
            break;
        if (seq->tokens[position] >= 0)
            continue;
        int32_t tile = tile_at(store->vision, &request->images, position, &row);
        if (tile >= 0 && !store_hold(store, &request->images, group, tile)) {
            *missing = tile;
            return i;
        }
    }
    return want;
}

const float *mp_images_row(const mp_image_store *store, const mp_text_request *request, const mp_sequence_group *group,
                           int32_t position, int64_t *source) {
    const mp_image_run *run = mp_image_run_at(request->images.runs, request->images.n_runs, position);
    int32_t row, tile = tile_at(store->vision, &request->images, position, &row);
    *source = run->source + (position - run->start);
    if (tile < 0)
        return store->vision->newline;
    return group->images->tiles[tile]->rows + row * mp_vision_row(store->vision);
}

/* ---- computing --------------------------------------------------------------------------------------------------- */

static mp_vit_image describe(const mp_vision *vision, const mp_text_images *images, int tile) {
    const mp_vit *image_encoder = &vision->image_encoder;
    const int32_t height = images->sizes[2 * tile], width = images->sizes[2 * tile + 1];
    const int32_t down = height / image_encoder->patch, across = width / image_encoder->patch;
    const mp_image_run *run = images->runs;
    while (run->tile + run->tiles <= tile)
        run++;
    const bool frames = tile == run->tile && mp_vision_frames(vision, images, run);
    return (mp_vit_image){
        .width = width,
        .frame = frames ? (size_t)height * (size_t)width * MP_IMAGE_CHANNELS : 0,
        .down = down,
        .across = across,
        .n = mp_vit_rows(image_encoder, down, across),
    };
}

static mp_image_key key_of(const mp_text_request *request, const mp_sequence_group *group, int tile) {
    return key_from(group, request->images.tile_keys + (ptrdiff_t)tile * MP_IMAGE_KEY);
}

static mp_tile_job *find_job(const mp_image_store *store, const mp_image_key *key) {
    mp_tile_job *job = store->jobs;
    while (job && !store_equal(&job->tile->key, key))
        job = job->next;
    return job;
}

bool mp_images_computing(const mp_image_store *store, const mp_text_request *request, const mp_sequence_group *group,
                         int tile) {
    const mp_image_key key = key_of(request, group, tile);
    return find_job(store, &key) != NULL;
}

/* Operations of one row in the projector. */
static uint64_t project_ops(const mp_projector *projector) {
    return 2 * ((uint64_t)projector->merger.K * (uint64_t)projector->merger.N +
                (uint64_t)projector->first.K * (uint64_t)projector->first.N +
                (uint64_t)projector->second.K * (uint64_t)projector->second.N);
}

static int32_t rows_of(const mp_vision *vision, const mp_vit_image *image) {
    return image->down * image->across / (vision->merge * vision->merge) + vision->keep_class;
}

uint64_t mp_images_left_ns(const mp_image_store *store, const mp_text_request *request, const mp_sequence_group *group,
                           int tile) {
    const mp_image_key key = key_of(request, group, tile);
    const mp_vision *vision = store->vision;
    const mp_vit_image image = describe(vision, &request->images, tile);
    uint64_t all = mp_vit_image_ops(&vision->image_encoder, image.down, image.across, false);
    for (int p = 0; p <= vision->taps; p++)
        all += (uint64_t)rows_of(vision, &image) * project_ops(&vision->projectors[p]);
    const mp_tile_job *job = find_job(store, &key);
    const uint64_t done = job ? job->ops : 0;
    return mp_vit_ns(&vision->image_encoder, all > done ? all - done : 0);
}

uint64_t mp_images_part_ns(const mp_image_store *store) {
    const mp_vit *image_encoder = &store->vision->image_encoder;
    return mp_vit_ns(image_encoder, mp_vit_part_ops(image_encoder));
}

/* Resets an arena and grows it to at least `bytes` bytes, charged to the budget. Its contents are lost. */
static mp_status store_reserve(mp_image_store *store, mp_arena *arena, size_t bytes, mp_error *error) {
    bytes = mp_arena_cost(bytes);
    mp_arena_reset(arena);
    if (bytes <= arena->size)
        return MP_OK;
    size_t before = arena->size;
    if (!take_budget(store, bytes - before))
        return mp_fail_memory(error, bytes, "the scratch of an image network");
    mp_status status = mp_arena_reserve(arena, bytes, error);
    store->charged = store->charged - before + arena->size;
    if (status != MP_OK) /* a failed reserve has freed the old memory, too */
        mp_budget_give(store->budget, bytes);
    return status;
}

typedef struct job_run {
    const mp_vision *vision;
    mp_tile_job *job;
    mp_vit_pass pass;
    uint8_t *own; /* [threads][own_bytes] */
    size_t own_bytes;
    int32_t rows;     /* rows of a part in the projector */
    float *gathered;  /* [rows, gathered_step] */
    float *merged;    /* [rows, merger.N] of the projector, or NULL */
    float *inner;     /* [rows, first.N] of the projector, or NULL */
    uint8_t *acts;
} job_run;

/* Copies or norms one patch of row `index` of the tile: number `part` of the merge * merge, or the class token. */
static void take_patch(const mp_vision *vision, const mp_vit_image *image, const float *x, int32_t index, int32_t part,
                       const mp_norm *norm, float *out) {
    const mp_vit *image_encoder = &vision->image_encoder;
    const int32_t hidden = image_encoder->hidden, merge = vision->merge, across = image->across / merge;
    const int32_t cell = index - vision->keep_class, before = image_encoder->classes + image_encoder->registers;
    const int32_t y = cell / across * merge + part / merge, column = cell % across * merge + part % merge;
    const int32_t patch = y * image->across + column;
    const float *row = x + (int64_t)(cell < 0 ? 0 : before + (image->place ? image->place[patch] : patch)) * hidden;
    if (norm->weight)
        mp_norm_row(norm, row, out);
    else
        memcpy(out, row, (size_t)hidden * sizeof *out);
}

/* Gathers row `index` of the tile as input of a projector: the patches line by line, side by side, normed. For means of
 * patches and for mergers, `out` has space for one patch more. */
static void gather(const mp_vision *vision, const mp_projector *projector, const mp_vit_image *image, const float *x,
                   int32_t index, float *out) {
    static const mp_norm none = {0};
    const bool last = projector == &vision->projectors[vision->taps], averaged = vision->averaged && last;
    const bool merges = projector->merger.parts > 0;
    const mp_norm *norm = last ? &vision->image_encoder.norm : &none; /* taps norm the patches side by side */
    const int32_t hidden = vision->image_encoder.hidden, parts = vision->merge * vision->merge;
    float *const spare = out + (averaged ? hidden : parts * hidden);
    for (int32_t i = 0; i < parts; i++) {
        float *const to = merges || (averaged && i > 0) ? spare : averaged ? out : out + (int64_t)i * hidden;
        take_patch(vision, image, x, index, i, norm, to);
        if (averaged && i > 0)
            mp_kernels_get()->add(spare, hidden, out);
        for (int32_t k = 0; merges && k < hidden; k++)
            out[(int64_t)k * parts + i] = spare[k];
    }
    for (int32_t k = 0; averaged && k < hidden; k++)
        out[k] = out[k] / (float)parts * vision->mean_scale;
    for (int32_t k = 0; vision->mean_bias && k < hidden; k++)
        out[k] = (out[k] - vision->mean_bias[k]) * vision->bias_scale[k];
    if (projector->norm.weight)
        mp_norm_row(&projector->norm, out, out);
}

static const mp_linear *input_of(const mp_projector *projector) {
    return projector->merger.parts ? &projector->merger : &projector->first;
}

/* Components between two rows of `gathered`. */
static int64_t gathered_step(const mp_vision *vision, const mp_projector *projector) {
    const bool more = vision->averaged || projector->merger.parts;
    return input_of(projector)->K + (more ? vision->image_encoder.hidden : 0);
}

/* Computes the vectors of a projector in rows [row0, row1) of the tile. The layers before it must be complete. */
static void project(const job_run *run, const mp_team_thread *thread, int index, int32_t row0, int32_t row1) {
    const mp_vision *vision = run->vision;
    const mp_tile_job *job = run->job;
    const mp_projector *projector = &vision->projectors[index];
    const mp_linear *first = &projector->first, *second = &projector->second;
    const bool two = second->parts > 0;
    const int M = row1 - row0;
    const int64_t step = gathered_step(vision, projector);
    const int64_t ld = mp_vision_row(vision), at = index < vision->taps ? (int64_t)vision->width * (1 + index) : 0;
    float *out = job->tile->rows + row0 * ld + at;
    mp_epilogue plain = {0}, activate = {.act = vision->act};
    mp_team_loop loop = mp_team_rows(thread, M, step);
    while (mp_team_next(thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++)
            gather(vision, projector, &job->image, (const float *)(void *)job->state, row0 + (int32_t)r,
                   run->gathered + r * step);
    mp_team_barrier(thread);
    const float *in = run->gathered;
    int64_t ld_in = step;
    if (projector->merger.parts) {
        mp_linear_forward(&projector->merger, thread, in, step, M, run->acts, NULL, NULL, &plain, run->merged,
                          projector->merger.N);
        in = run->merged;
        ld_in = projector->merger.N;
        mp_team_barrier(thread);
    }
    mp_linear_forward(first, thread, in, ld_in, M, run->acts, NULL, NULL, two ? &activate : &plain,
                      two ? run->inner : out, two ? first->N : ld);
    if (!two)
        return;
    mp_team_barrier(thread);
    mp_linear_forward(second, thread, run->inner, first->N, M, run->acts, NULL, NULL, &plain, out, ld);
}

static void job_body(const mp_team_thread *thread, void *arg) {
    job_run *run = arg;
    mp_tile_job *job = run->job;
    mp_vit_thread l = {.thread = thread, .pass = &run->pass, .own = run->own + (size_t)thread->index * run->own_bytes};
    const mp_vision *vision = run->vision;
    int32_t row = job->projected, next;
    int at = job->projector;
    for (bool go_on = true; go_on && at <= vision->taps;) {
        const mp_projector *projector = &vision->projectors[at];
        go_on = mp_vit_advance(&l, projector->layers);
        for (; go_on && row < job->tile->count; row = next) {
            next = row + (int32_t)mp_vit_next_rows(&vision->image_encoder, job->tile->count - row, run->rows);
            project(run, thread, at, row, next);
            go_on = mp_vit_barrier(&l, (uint64_t)(next - row) * project_ops(projector));
        }
        if (row < job->tile->count)
            break;
        at++;
        row = 0;
    }
    if (thread->index != 0) /* all threads read the state of the job before a barrier */
        return;
    job->projector = at;
    job->projected = row;
}

/* Drops the jobs of other tiles that this group computed last or that no group holds. */
static void drop_others(mp_image_store *store, const mp_sequence_group *group, const mp_image_key *key) {
    for (mp_tile_job **at = &store->jobs; *at;)
        if ((!(*at)->holder || (*at)->holder == group) && !store_equal(&(*at)->tile->key, key))
            drop_job(store, at);
        else
            at = &(*at)->next;
}

static mp_status start_job(mp_image_store *store, const mp_text_request *request, int tile, const mp_image_key *key,
                           mp_tile_job **out, mp_error *error) {
    const mp_vit *image_encoder = &store->vision->image_encoder;
    mp_vit_image image = describe(store->vision, &request->images, tile);
    size_t axes = image_encoder->axial ? mp_vit_axes_bytes(image_encoder, image.down, image.across) : 0;
    size_t state = mp_arena_cost(mp_vit_state_bytes(image_encoder, image.n));
    mp_tile_job *job = mp_alloc_zeroed(sizeof *job, MP_TAG_SCRATCH);
    if (!job)
        return mp_fail_memory(error, sizeof *job, "an image tile");
    job->memory = store->spare;
    store->spare = (mp_arena){0};
    mp_status status = store_reserve(store, &job->memory, state + axes, error);
    if (status == MP_OK)
        status = make_tile(store, key, rows_of(store->vision, &image), &job->tile, error);
    if (status != MP_OK) {
        give_arena(store, &job->memory);
        mp_free(job);
        return status;
    }
    job->image = image;
    job->state = mp_arena_take(&job->memory, state);
    if (axes)
        mp_vit_axes(image_encoder, &job->image, mp_arena_take(&job->memory, axes));
    job->next = store->jobs;
    store->jobs = job;
    *out = job;
    return MP_OK;
}

/* Sets up the working memory of one step of the job. */
static mp_status make_run(mp_image_store *store, mp_tile_job *job, mp_lease *lease, job_run *run, mp_error *error) {
    const mp_vision *vision = store->vision;
    const mp_vit *image_encoder = &vision->image_encoder;
    const mp_projector *last = &vision->projectors[vision->taps];
    const uint64_t part_ops = mp_vit_part_ops(image_encoder), rows = part_ops / (project_ops(last) + 1);
    const int32_t grain = image_encoder->grain, most = job->tile->count;
    *run = (job_run){.vision = vision, .job = job, .own_bytes = mp_vit_thread_scratch(image_encoder, job->image.n)};
    run->rows = rows < (uint64_t)most ? (int32_t)rows / grain * grain : most;
    run->rows = run->rows > grain ? run->rows : grain < most ? grain : most;
    const int part_rows = mp_vit_part_rows(image_encoder, job->image.n, part_ops);
    const size_t f = sizeof(float), count = (size_t)run->rows, threads = run->own_bytes * (size_t)lease->threads;
    const size_t gathered = mp_arena_cost(count * (size_t)gathered_step(vision, last) * f);
    const size_t merged = last->merger.parts ? mp_arena_cost(count * (size_t)last->merger.N * f) : 0;
    size_t inner = 0, acts = merged ? mp_arena_cost(mp_linear_scratch(&last->merger, run->rows)) : 0;
    for (int p = 0; p <= vision->taps; p++) {
        const mp_projector *projector = &vision->projectors[p];
        const bool two = projector->second.parts > 0;
        inner = mp_larger(inner, two ? mp_arena_cost(count * (size_t)projector->first.N * f) : 0);
        acts = mp_larger(acts, mp_arena_cost(mp_linear_scratch(&projector->first, run->rows)));
        acts = mp_larger(acts, two ? mp_arena_cost(mp_linear_scratch(&projector->second, run->rows)) : 0);
    }
    const size_t network = mp_arena_cost(mp_vit_part_bytes(image_encoder, part_rows, 1)),
                 projector = gathered + merged + inner + acts;
    const size_t part = network > projector ? network : projector;
    MP_TRY(store_reserve(store, &store->scratch, mp_arena_cost(threads) + part, error));
    run->own = mp_arena_take(&store->scratch, mp_arena_cost(threads));
    uint8_t *memory = mp_arena_take(&store->scratch, part); /* used first by the network, then by the projector */
    run->gathered = (float *)(void *)memory;
    run->merged = merged ? (float *)(void *)(memory + gathered) : NULL;
    run->inner = inner ? (float *)(void *)(memory + gathered + merged) : NULL;
    run->acts = memory + gathered + merged + inner;
    run->pass = (mp_vit_pass){
        .model = image_encoder,
        .images = &job->image,
        .count = 1,
        .M = job->image.n,
        .P = job->image.down * job->image.across,
        .state = job->state,
        .part = memory,
        .part_rows = part_rows,
        .part_ops = part_ops,
        .lease = lease,
        .cursor = job->at,
    };
    return MP_OK;
}

/* Moves the job's complete tile to the store. */
static mp_status finish_job(mp_image_store *store, mp_tile_job *job, mp_error *error) {
    mp_tile *tile = job->tile;
    mp_tile_job **at = &store->jobs;
    while (*at != job)
        at = &(*at)->next;
    end_job(store, at);
    tile->next = store->tiles;
    store->tiles = tile;
    if (mp_kernels_get()->all_finite(tile->rows, tile->count * mp_vision_row(store->vision)))
        return MP_OK;
    drop_tile(store, &store->tiles);
    return mp_fail(error, MP_NUMERIC, "the model produced NaN or infinity for an image");
}

mp_status mp_images_compute(mp_image_store *store, mp_lease *lease, const mp_text_request *request,
                            mp_sequence_group *group, int tile, uint64_t budget_ns, const _Atomic int *unwanted,
                            mp_error *error) {
    mp_vision *vision = (mp_vision *)store->vision; /* mp_vit_learn changes its time estimate */
    job_run run;
    const uint64_t start = mp_sys_now_ns();
    const mp_image_key key = key_of(request, group, tile);
    drop_others(store, group, &key);
    mp_tile_job *job = find_job(store, &key);
    if (!job)
        MP_TRY(start_job(store, request, tile, &key, &job, error));
    job->holder = group;
    MP_TRY(make_run(store, job, lease, &run, error));
    run.pass.until_ns = mp_sys_after(start, budget_ns);
    run.pass.unwanted = unwanted;
    /* use this request's pixels: another request may have begun the job */
    job->image.pixels = request->images.pixels + request->images.offsets[tile];
    mp_lease_run(lease, job_body, &run);
    job->at = run.pass.cursor;
    job->ops += run.pass.ops;
    mp_vit_learn(&vision->image_encoder, run.pass.ops, mp_sys_now_ns() - start);
    if (job->projector <= vision->taps)
        return MP_OK;
    MP_TRY(finish_job(store, job, error));
    store_hold(store, &request->images, group, tile); /* keeps the tile from eviction until the next step */
    return MP_OK;
}

bool mp_vision_is_float32(const mp_vision *vision) { return vision->image_encoder.compute == MP_COMPUTE_F32; }
