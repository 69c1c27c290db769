/* image/engine.c: the step interface over an image transformer. A step is one batch of images from one or more
 * requests. An image that takes longer than a step's time limit is a large image: it is computed in parts. Up to
 * MAX_LARGE large images take turns, so that no request waits for another request's whole image. */
#include <stdatomic.h>
#include <string.h>

#include "models/groups.h"
#include "models/image/vit.h"
#include "models/threads.h"

enum {
    GROUP_ROWS = 512,   /* maximum rows of a group, unless a single image has more. The layers are wider than those of
                         * small text encoders, and more rows amortise one pass over their weights */
    STEP_ROWS = 16384, /* maximum rows in a step, whatever the budget */
    EVEN_ROWS = 16,    /* minimum rows of an image that is left to the next step so that no thread is idle: with fewer
                        * rows, reading the weights once more would take longer */
    MAX_LARGE = 4,     /* maximum large images in progress: each needs a state */
    LARGE_MS = 25,     /* maximum time that a step spends on a large image: a request that arrives meanwhile waits until
                        * the step ends */
    TABLE_ROWS = 2048  /* maximum patches of a position table. For larger images each part computes its own positions:
                        * other requests would have to wait while the table is computed */
};

typedef struct position_table { /* position table for one grid other than the model's, kept for the next step */
    int32_t down, across;
    float *data; /* [down * across, hidden] */
    size_t bytes;
} position_table;

typedef struct large_image { /* a large image in progress */
    mp_item *item; /* item that this image belongs to; NULL: the slot is free */
    bool begun;    /* the fields below are set */
    mp_vit_cursor at;
    uint8_t *state; /* state of the network between steps */
    uint64_t ops;   /* operations finished so far */
    mp_arena memory; /* memory of `state` */
    uint64_t charged;
} large_image;

typedef struct vit_copy { /* an image that shares the vector of an earlier image of the step */
    int image, owner; /* index of the computed image; index of the item in the plan */
    float *out;
} vit_copy;

typedef struct vit_engine {
    mp_engine base;
    mp_vit *model;
    mp_budget *budget;
    mp_arena arena;
    uint64_t charged;     /* bytes charged for `arena` */
    mp_vit_image *images; /* [capacity] images of the step that are computed */
    mp_dedup_input *inputs; /* [capacity] the same images, as far as they may share vectors */
    vit_copy *copies;     /* [capacity] the other images of the step, unless they got a recent result */
    int capacity, copy_count;
    int threads;      /* threads of the last step; 0: none was run */
    mp_groups groups; /* groups of the step's images */
    mp_dedup_table dedup;
    position_table positions;
    large_image large[MAX_LARGE];
    large_image *planned; /* the large image of the coming step, or NULL, and its planned time */
    uint64_t planned_ns;
} vit_engine;

/* Frees a slot. The first slot keeps its memory for the next large image. */
static void forget_large(vit_engine *engine, large_image *large) {
    large->item = NULL;
    large->begun = false;
    if (large != engine->large)
        mp_engine_release(&large->memory, engine->budget, &large->charged);
    if (engine->planned == large)
        engine->planned = NULL;
}

static large_image *large_of(vit_engine *engine, const mp_item *item) {
    for (int i = 0; i < MAX_LARGE; i++)
        if (engine->large[i].item == item)
            return &engine->large[i];
    return NULL;
}

/* ---- check ------------------------------------------------------------------------------------------------------- */

static mp_status check_size(const mp_vit *model, int32_t image, int32_t height, int32_t width, mp_error *error) {
    const int32_t side = model->grid * model->patch;
    if (!model->any_size && (height != side || width != side))
        return mp_fail(error, MP_INVALID_ARGUMENT, "image %d must have %d x %d pixels, got %d x %d", image, side, side,
                       width, height);
    if (height < model->patch || width < model->patch)
        return mp_fail(error, MP_INVALID_ARGUMENT, "image %d must have at least %d pixels per side, got %d x %d", image,
                       model->patch, width, height);
    int64_t rows = (int64_t)(height / model->patch) * (width / model->patch);
    if (rows > MP_VIT_MAX_PATCHES)
        return mp_fail(error, MP_LIMIT, "image %d must have at most %d patches, got %lld", image,
                       (int)MP_VIT_MAX_PATCHES, (long long)rows);
    return MP_OK;
}

typedef struct vit_grid { /* an image in patches */
    int32_t down, across;
} vit_grid;

static vit_grid grid_of(const mp_vit *model, const mp_image_embedding_request *request, uint32_t image) {
    return (vit_grid){request->sizes[2 * image] / model->patch, request->sizes[2 * image + 1] / model->patch};
}

/* True if the request needs only the first row of each image after the last layer. */
static bool first_only(const mp_vit *model, const mp_image_embedding_request *request) {
    return !model->attention_pool && request->output != MP_IMAGE_TOKENS;
}

mp_status mp_vit_check(const mp_model *base, mp_request *request_base, uint64_t *cost_ns, uint32_t *total,
                       mp_error *error) {
    const mp_vit *model = (const mp_vit *)base;
    mp_image_embedding_request *request = (mp_image_embedding_request *)request_base;
    const bool tokens = request->output == MP_IMAGE_TOKENS;
    int32_t most = tokens ? model->hidden : model->head.width;
    int64_t rows = 0;
    uint64_t ops = 0, parts = 0;
    if (request->dimensions < 0 || request->dimensions > most ||
        (tokens && request->dimensions && request->dimensions != most))
        return mp_fail(error, MP_INVALID_ARGUMENT, "`dimensions` must be %s%d, got %d", tokens ? "" : "1 to ", most,
                       request->dimensions);
    for (int32_t i = 0; i < request->n_images; i++) {
        int32_t height = request->sizes[2 * i], width = request->sizes[2 * i + 1];
        MP_TRY(check_size(model, i, height, width, error));
        const vit_grid grid = grid_of(model, request, (uint32_t)i);
        const uint64_t own = mp_vit_image_parts(model, grid.down, grid.across);
        rows += mp_vit_rows(model, grid.down, grid.across);
        ops += mp_vit_image_ops(model, grid.down, grid.across, first_only(model, request));
        parts = own > parts ? own : parts;
    }
    request->most_parts = parts;
    *cost_ns = mp_vit_ns(model, ops);
    *total = (uint32_t)request->n_images;
    return mp_image_embedding_request_output(request, rows, request->dimensions ? request->dimensions : most, error);
}

/* ---- plan -------------------------------------------------------------------------------------------------------- */

static mp_status engine_admit(mp_engine *engine, mp_item *item, mp_error *error) {
    (void)error;
    item->state = engine;
    ((mp_image_embedding_request *)item->request)->keyed = 0; /* each loaded model has a hash key of its own */
    return MP_OK;
}

static int64_t image_rows(const mp_vit *model, const mp_image_embedding_request *request, uint32_t image) {
    const vit_grid grid = grid_of(model, request, image);
    return mp_vit_rows(model, grid.down, grid.across);
}

static uint64_t image_ns(const mp_vit *model, const mp_image_embedding_request *request, uint32_t image) {
    const vit_grid grid = grid_of(model, request, image);
    return mp_vit_ns(model, mp_vit_image_ops(model, grid.down, grid.across, first_only(model, request)));
}

/* First row of an image's result in the request's output. */
static int64_t result_at(const mp_vit *model, const mp_image_embedding_request *request, uint32_t image) {
    int64_t at = image;
    for (uint32_t n = 0; request->output == MP_IMAGE_TOKENS && n < image; n++)
        at += image_rows(model, request, n) - 1;
    return at;
}

static mp_vit_image describe(const mp_vit *model, const mp_image_embedding_request *request, uint32_t image,
                             int64_t at) {
    const vit_grid grid = grid_of(model, request, image);
    return (mp_vit_image){
        .pixels = request->pixels + request->offsets[image],
        .bytes = (size_t)(request->offsets[image + 1] - request->offsets[image]),
        .width = request->sizes[2 * image + 1],
        .down = grid.down,
        .across = grid.across,
        .n = mp_vit_rows(model, grid.down, grid.across),
        .dimensions = request->width,
        .normalize = request->normalize < 0 ? model->head.normalize : request->normalize > 0,
        .want_tokens = request->output == MP_IMAGE_TOKENS,
        .first_only = first_only(model, request),
        .out = request->vectors + at * request->width,
    };
}

/* The item's next image. */
static mp_vit_image next_image(const vit_engine *engine, const mp_item *item) {
    const mp_image_embedding_request *request = (const mp_image_embedding_request *)item->request;
    return describe(engine->model, request, item->cursor, result_at(engine->model, request, item->cursor));
}

/* All that decides the vector of an image of the item, without the hash of its pixels. */
static mp_dedup_input input_of(const mp_item *item, const mp_vit_image *image) {
    return (mp_dedup_input){
        .key = {.scope = mp_cache_scope_of(item, 0)},
        .options = {image->width, image->normalize},
        .dimensions = image->dimensions,
        .content = image->pixels,
        .bytes = image->bytes,
        .out = image->out,
    };
}

/* The item's next image, with its hash, which is computed once. The image must not want token vectors. */
static mp_dedup_input next_input(const vit_engine *engine, const mp_item *item, const mp_vit_image *image) {
    mp_image_embedding_request *request = (mp_image_embedding_request *)item->request;
    mp_dedup_input input = input_of(item, image);
    if (request->keyed != item->cursor + 1) {
        request->key = mp_recent_key(&engine->model->recent, input.key.scope, input.content, input.bytes).hash;
        request->keyed = item->cursor + 1;
    }
    input.key.hash = request->key;
    return input;
}

/* True if the item's next image is large: it has a slot already, or its predicted time exceeds `budget_ns`. */
static bool is_large(vit_engine *engine, const mp_item *item, uint64_t budget_ns) {
    return large_of(engine, item) ||
           image_ns(engine->model, (const mp_image_embedding_request *)item->request, item->cursor) > budget_ns;
}

/* True if the item's next image, which has no slot, equals an image in progress: the item then waits for that result.
 * `present`: the slots whose items this step can continue. Images in other slots do not count, because their requests
 * may be paused. */
static bool awaits_equal(const vit_engine *engine, const mp_item *item, const bool *present) {
    const mp_vit_image image = next_image(engine, item);
    for (int s = 0; s < MAX_LARGE && !image.want_tokens; s++) {
        if (!present[s])
            continue;
        const mp_vit_image progressing = next_image(engine, engine->large[s].item);
        if (progressing.want_tokens)
            continue;
        const mp_dedup_input own = next_input(engine, item, &image),
                             other = next_input(engine, engine->large[s].item, &progressing);
        if (mp_dedup_alike(&own, &other))
            return true;
    }
    return false;
}

/* Choose the large image to continue: that of the first item that has a slot or gets a free one. If there is no such
 * item, the first item with a large image takes over slot 0. */
static large_image *choose_large(vit_engine *engine, mp_item **items, int n, uint64_t budget_ns) {
    mp_item *first = NULL;
    bool present[MAX_LARGE] = {false};
    for (int i = 0; i < n; i++)
        for (int s = 0; s < MAX_LARGE; s++)
            present[s] |= engine->large[s].item == items[i];
    for (int i = 0; i < n; i++) {
        if (!is_large(engine, items[i], budget_ns))
            continue;
        large_image *large = large_of(engine, items[i]);
        if (!large && awaits_equal(engine, items[i], present))
            continue;
        large = large ? large : large_of(engine, NULL);
        if (large) {
            large->item = items[i];
            return large;
        }
        first = first ? first : items[i];
    }
    if (!first)
        return NULL;
    /* the item of slot 0 is not among `items` now */
    forget_large(engine, engine->large);
    engine->large->item = first;
    return engine->large;
}

/* Add the large image to the plan. It gets the time that remains of the budget, but at least that of one part. */
static void plan_large(vit_engine *engine, large_image *large, uint64_t budget_ns, mp_plan *plan) {
    const mp_vit *model = engine->model;
    const mp_image_embedding_request *request = (const mp_image_embedding_request *)large->item->request;
    const uint64_t all_ns = image_ns(model, request, large->item->cursor);
    const uint64_t done_ns = large->begun ? mp_vit_ns(model, large->ops) : 0;
    const uint64_t left_ns = all_ns > done_ns ? all_ns - done_ns : 0, least = mp_vit_ns(model, mp_vit_part_ops(model));
    uint64_t ns = budget_ns > plan->cost_ns ? budget_ns - plan->cost_ns : 0;
    ns = ns < LARGE_MS * 1000000ull ? ns : LARGE_MS * 1000000ull;
    ns = ns > least ? ns : least;
    engine->planned_ns = ns;
    plan->cost_ns += ns < left_ns ? ns : left_ns;
    plan->items[plan->count] = large->item;
    plan->amount[plan->count++] = 1;
    plan->barrier_bound = true;
    const int threads = mp_threads_worth(&model->base.facts, image_rows(model, request, large->item->cursor),
                                         10 * model->layer_count + 4);
    plan->threads = threads > plan->threads ? threads : plan->threads;
}

static bool has_more(const mp_plan *plan) {
    for (int i = 0; i < plan->count; i++)
        if (plan->items[i]->cursor + plan->amount[i] < plan->items[i]->total)
            return true;
    return false;
}

/* Takes the last images out of a plan of `images` if they would keep only some threads busy, while the other threads
 * wait for the end of the step. The next step computes them beside further images, or a single one on all threads:
 * three images on two threads take as long as four, but two and then one take as long as three. Returns the number of
 * images that remain. */
static uint32_t even_out(const vit_engine *engine, mp_plan *plan, uint32_t images, int64_t rows) {
    const uint32_t threads = (uint32_t)engine->threads;
    if (threads < 2 || images <= threads || rows < (int64_t)images * EVEN_ROWS)
        return images;
    const uint32_t over = images % threads;
    if (over > 1 && !has_more(plan)) /* the next step could not keep all threads busy with them either */
        return images;
    for (uint32_t i = 0; i < over; i++) {
        const int last = plan->count - 1;
        const mp_item *item = plan->items[last];
        plan->cost_ns -= image_ns(engine->model, (const mp_image_embedding_request *)item->request,
                                  item->cursor + --plan->amount[last]);
        plan->count -= plan->amount[last] == 0;
    }
    return images - over;
}

/* As in the text encoder's engine, each item in turn is offered an equal share of the remaining time, and the first
 * item gets at least one image. The large image gets the time that is left. */
static void engine_plan(mp_engine *base, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan) {
    vit_engine *engine = (vit_engine *)base;
    const mp_vit *model = engine->model;
    const uint64_t group_ns = mp_vit_ns(model, GROUP_ROWS * (mp_vit_before_ops(model) + mp_vit_after_ops(model)) *
                                                   (uint64_t)model->layer_count);
    uint64_t left = budget_ns;
    int64_t planned = 0;
    uint32_t images = 0;
    large_image *large = choose_large(engine, items, n, budget_ns);
    engine->planned = large;
    plan->count = 0;
    plan->cost_ns = 0;
    for (int i = 0; i < n && plan->count < MP_PLAN_MAX - 1; i++) {
        mp_item *item = items[i];
        const mp_image_embedding_request *request = (const mp_image_embedding_request *)item->request;
        if (large && is_large(engine, item, budget_ns))
            continue;
        const uint64_t equal = left / (uint64_t)(n - i), least = left < group_ns ? left : group_ns;
        const uint64_t share = equal > least ? equal : least;
        uint64_t used = 0;
        uint32_t taken = 0;
        while (item->cursor + taken < item->total) {
            const int64_t rows = image_rows(model, request, item->cursor + taken);
            const uint64_t ns = image_ns(model, request, item->cursor + taken);
            if ((ns > share - used || planned + rows > STEP_ROWS) && !(plan->count == 0 && taken == 0))
                break;
            used = ns < share - used ? used + ns : share;
            planned += rows;
            plan->cost_ns += ns;
            taken++;
        }
        if (taken == 0)
            continue;
        left -= used;
        images += taken;
        plan->items[plan->count] = item;
        plan->amount[plan->count++] = taken;
    }
    images = even_out(engine, plan, images, planned);
    plan->barrier_bound = images == 1; /* else each thread computes whole images */
    plan->threads = images < 256 ? (int)images : 256;
    if (plan->barrier_bound)
        plan->threads = mp_threads_worth(&model->base.facts, planned, 10 * model->layer_count + 4);
    if (large)
        plan_large(engine, large, budget_ns, plan);
}

/* ---- step -------------------------------------------------------------------------------------------------------- */

typedef struct step_run {
    vit_engine *engine;
    mp_group_step step; /* scratch of a group: its state, then the scratch of a part */
    int part_rows;
    uint64_t part_ops;
    size_t state_bytes;
    mp_vit_pass shared; /* pass over the only group, when all threads share that group */
    _Atomic uint64_t ops;
} step_run;

static mp_vit_pass pass_of(const step_run *run, const mp_group *group, int slot) {
    uint8_t *scratch = mp_group_scratch(&run->step, slot);
    const mp_vit_image *images = run->engine->images + group->first, *last = &images[group->count - 1];
    return (mp_vit_pass){
        .model = run->engine->model,
        .images = run->engine->images + group->first,
        .count = group->count,
        .M = group->rows,
        .P = last->patch + last->down * last->across,
        .state = scratch,
        .part = scratch + run->state_bytes,
        .part_rows = run->part_rows,
        .part_ops = run->part_ops,
        .lease = run->step.lease,
    };
}

static void run_group(void *arg, const mp_team_thread *thread, const mp_group *group, int slot, void *thread_scratch) {
    step_run *run = arg;
    mp_vit_pass own;
    mp_vit_pass *pass = &run->shared; /* one image, one group */
    if (!run->step.together) {
        own = pass_of(run, group, slot);
        pass = &own;
    }
    mp_vit_thread l = {.thread = thread, .pass = pass, .own = thread_scratch};
    mp_vit_forward(&l); /* stops only if the lease is cancelled, which engine_step sees afterwards */
    if (thread->index == 0)
        atomic_fetch_add_explicit(&run->ops, pass->ops, memory_order_relaxed);
}

static mp_status make_lists(vit_engine *engine, int images, mp_error *error) {
    if (images > engine->capacity) {
        mp_vit_image *grown = mp_realloc(engine->images, (size_t)images * sizeof *grown, MP_TAG_SCRATCH);
        if (grown)
            engine->images = grown;
        mp_dedup_input *inputs = mp_realloc(engine->inputs, (size_t)images * sizeof *inputs, MP_TAG_SCRATCH);
        if (inputs)
            engine->inputs = inputs;
        vit_copy *copies = mp_realloc(engine->copies, (size_t)images * sizeof *copies, MP_TAG_SCRATCH);
        if (copies)
            engine->copies = copies;
        if (!grown || !inputs || !copies)
            return mp_fail_memory(error, (uint64_t)images * (sizeof *grown + sizeof *inputs + sizeof *copies),
                                  "the images of a step");
        engine->capacity = images;
    }
    MP_TRY(mp_groups_reserve(&engine->groups, images, error));
    return mp_dedup_table_begin(&engine->dedup, images, "the table of images", error);
}

static void drop_positions(vit_engine *engine) {
    mp_free(engine->positions.data);
    mp_budget_give(engine->budget, engine->positions.bytes);
    engine->positions = (position_table){0};
}

/* Make a table of positions for the first image whose grid is not the model's, unless the table of the last step is for
 * that grid. Without memory for a table, positions are computed row by row, with the same bits. */
static void keep_positions(vit_engine *engine, mp_vit_image *images, int count) {
    const mp_vit *model = engine->model;
    position_table *table = &engine->positions;
    int first = 0;
    while (first < count && images[first].down == model->grid && images[first].across == model->grid)
        first++;
    if (first == count)
        return;
    const int32_t down = images[first].down, across = images[first].across;
    if (!table->data || table->down != down || table->across != across) {
        drop_positions(engine);
        size_t bytes = (size_t)down * (size_t)across * (size_t)model->hidden * sizeof(float);
        float *scratch = mp_alloc_array(mp_vit_position_scratch(model), sizeof *scratch, MP_TAG_SCRATCH);
        if (scratch && mp_budget_take(engine->budget, bytes)) {
            table->data = mp_alloc_zeroed(bytes, MP_TAG_SCRATCH);
            if (!table->data)
                mp_budget_give(engine->budget, bytes);
        }
        if (table->data) {
            *table = (position_table){down, across, table->data, bytes};
            for (int32_t n = 0; n < down * across; n++)
                mp_vit_add_position(model, down, across, n / across, n % across, scratch,
                                    table->data + (int64_t)n * model->hidden);
        }
        mp_free(scratch);
    }
    for (int i = first; i < count; i++)
        if (table->data && images[i].down == down && images[i].across == across)
            images[i].positions = table->data;
}

/* True if the plan continues the item's large image. */
static bool is_planned(const vit_engine *engine, const mp_item *item) {
    return engine->planned && engine->planned->item == item;
}

/* Returns true if the image at `index`, the last of the list, need not be computed: a recent vector was copied to it,
 * or it shares the vector of an earlier image. */
static bool is_known(vit_engine *engine, int index, const mp_item *item, int owner, uint64_t now_ns) {
    const mp_vit_image *image = &engine->images[index];
    mp_recent *recent = &engine->model->recent;
    if (image->want_tokens)
        return false;
    mp_dedup_input *input = &engine->inputs[index];
    *input = input_of(item, image);
    input->key = mp_recent_key(recent, input->key.scope, input->content, input->bytes);
    if (mp_recent_find(recent, input, now_ns)) {
        engine->base.work.dedup_hits++;
        return true;
    }
    const int same = mp_dedup_table_find(&engine->dedup, engine->inputs, index);
    if (same >= 0)
        engine->copies[engine->copy_count++] = (vit_copy){same, owner, image->out};
    engine->base.work.dedup_hits += same >= 0;
    return same >= 0;
}

/* List the images of a plan that are computed, in order. */
static mp_status collect(vit_engine *engine, const mp_plan *plan, uint64_t now_ns, int *count, int64_t *rows,
                         int *longest, mp_error *error) {
    const mp_vit *model = engine->model;
    uint32_t most = 0;
    for (int i = 0; i < plan->count; i++)
        most += plan->amount[i];
    MP_TRY(make_lists(engine, (int)most, error));
    engine->copy_count = 0;
    *count = 0;
    *rows = 0;
    for (int i = 0; i < plan->count; i++) {
        const mp_item *item = plan->items[i];
        const mp_image_embedding_request *request = (const mp_image_embedding_request *)item->request;
        int64_t at = result_at(model, request, item->cursor);
        if (is_planned(engine, item) || atomic_load_explicit(&item->cancelled, memory_order_relaxed))
            continue;
        for (uint32_t n = item->cursor; n < item->cursor + plan->amount[i]; n++) {
            const mp_vit_image *image = &engine->images[*count];
            engine->images[*count] = describe(model, request, n, at);
            engine->groups.rows[*count] = image->n;
            engine->groups.owner[*count] = i;
            at += image->want_tokens ? image->n : 1;
            if (is_known(engine, *count, item, i, now_ns))
                continue;
            (*count)++;
            *rows += image->n;
            *longest = image->n > *longest ? image->n : *longest;
        }
    }
    keep_positions(engine, engine->images, *count);
    return MP_OK;
}

/* Set each image's first row and first patch within its group. */
static void place_images(vit_engine *engine) {
    const mp_groups *groups = &engine->groups;
    for (int g = 0; g < groups->count; g++) {
        int32_t patch = 0;
        for (int i = groups->groups[g].first; i < groups->groups[g].first + groups->groups[g].count; i++) {
            mp_vit_image *image = &engine->images[i];
            image->row = groups->row0[i];
            image->patch = patch;
            patch += image->down * image->across;
        }
    }
}

/* Record that `images` more images of an item are finished. */
static void count_done(mp_item *item, uint32_t images, mp_outcome *outcome) {
    mp_engine_advance(item, images, &((mp_image_embedding_request *)item->request)->done, outcome);
}

/* Copy computed vectors to the images that share them, and keep them as recent results. */
static void share_results(vit_engine *engine, int images, uint64_t now_ns) {
    for (int c = 0; c < engine->copy_count; c++) {
        const mp_vit_image *image = &engine->images[engine->copies[c].image];
        memcpy(engine->copies[c].out, image->out, (size_t)image->dimensions * sizeof(float));
    }
    for (int i = 0; i < images; i++)
        if (engine->images[i].finite && !engine->images[i].want_tokens)
            mp_recent_keep(&engine->model->recent, &engine->inputs[i], now_ns);
}

static void conclude(vit_engine *engine, const mp_plan *plan, int images, mp_outcome *outcomes) {
    const int32_t *owner = engine->groups.owner;
    for (int c = 0; c < engine->copy_count; c++) {
        const vit_copy *copy = &engine->copies[c];
        if (!engine->images[copy->image].finite)
            mp_engine_fail_numeric(plan->items[copy->owner], &outcomes[copy->owner]);
    }
    for (int i = 0; i < images; i++)
        if (!engine->images[i].finite)
            mp_engine_fail_numeric(plan->items[owner[i]], &outcomes[owner[i]]);
    for (int i = 0; i < plan->count; i++) {
        mp_item *item = plan->items[i];
        if (outcomes[i] != MP_OUTCOME_FAILED && !is_planned(engine, item) &&
            !atomic_load_explicit(&item->cancelled, memory_order_relaxed))
            count_done(item, plan->amount[i], &outcomes[i]);
    }
}

typedef struct large_run {
    mp_vit_pass pass;
    uint8_t *own; /* [threads][own_bytes] */
    size_t own_bytes;
    bool done;
} large_run;

static void large_body(const mp_team_thread *thread, void *arg) {
    large_run *run = arg;
    mp_vit_thread l = {.thread = thread, .pass = &run->pass, .own = run->own + (size_t)thread->index * run->own_bytes};
    const bool done = mp_vit_forward(&l);
    if (thread->index == 0)
        run->done = done;
}

static mp_status begin_large(vit_engine *engine, large_image *large, int32_t rows, mp_error *error) {
    const size_t bytes = mp_vit_state_bytes(engine->model, rows);
    if (large->begun)
        return MP_OK;
    mp_arena_reset(&large->memory);
    MP_TRY(mp_engine_reserve(&large->memory, bytes, engine->budget, &large->charged, error));
    large->state = mp_arena_take(&large->memory, bytes);
    large->at = (mp_vit_cursor){0};
    large->ops = 0;
    large->begun = true;
    return MP_OK;
}

/* Compute parts of the planned image, at least one, until its time is over. Returns the operations computed. */
static uint64_t compute_large(vit_engine *engine, mp_lease *lease, uint64_t start, mp_outcome *outcome) {
    const mp_vit *model = engine->model;
    large_image *large = engine->planned;
    mp_item *item = large->item;
    mp_vit_image image = next_image(engine, item);
    mp_dedup_input input = {0};
    if (!image.want_tokens) {
        input = next_input(engine, item, &image);
        if (mp_recent_find(&engine->model->recent, &input, start)) {
            engine->base.work.dedup_hits++;
            forget_large(engine, large);
            count_done(item, 1, outcome);
            return 0;
        }
    }
    const uint64_t part_ops = mp_vit_part_ops(model);
    const int part_rows = mp_vit_part_rows(model, image.n, part_ops);
    const size_t part = mp_vit_part_bytes(model, part_rows, 1), own = mp_vit_thread_scratch(model, image.n);
    const size_t threads = own * (size_t)lease->threads;
    mp_status status = begin_large(engine, large, image.n, &item->error);
    mp_arena_reset(&engine->arena);
    if (status == MP_OK)
        status = mp_engine_reserve(&engine->arena, part + threads, engine->budget, &engine->charged, &item->error);
    if (status != MP_OK) {
        *outcome = MP_OUTCOME_FAILED;
        return 0;
    }
    if (large->at.layer == 0 && large->at.stage == 0 && image.n <= TABLE_ROWS)
        keep_positions(engine, &image, 1);
    large_run run = {
        .own_bytes = own,
        .pass = {.model = model,
                 .images = &image,
                 .count = 1,
                 .M = image.n,
                 .P = image.down * image.across,
                 .state = large->state,
                 .part = mp_arena_take(&engine->arena, part),
                 .part_rows = part_rows,
                 .part_ops = part_ops,
                 .lease = lease,
                 .unwanted = &item->cancelled,
                 .until_ns = mp_sys_after(start, engine->planned_ns),
                 .cursor = large->at},
    };
    run.own = mp_arena_take(&engine->arena, threads);
    mp_lease_run(lease, large_body, &run);
    large->at = run.pass.cursor;
    large->ops += run.pass.ops;
    if (run.done) {
        forget_large(engine, large);
        if (image.finite && !image.want_tokens)
            mp_recent_keep(&engine->model->recent, &input, mp_sys_now_ns());
        if (image.finite)
            count_done(item, 1, outcome);
        else
            mp_engine_fail_numeric(item, outcome);
    }
    return run.pass.ops;
}

/* A step reads no weight file, because the load copied all weights. */
static void engine_step(mp_engine *base, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    vit_engine *engine = (vit_engine *)base;
    mp_error error;
    mp_error_clear(&error);
    int images = 0, longest = 1;
    int64_t rows = 0;
    uint64_t start = mp_sys_now_ns();
    if (collect(engine, plan, start, &images, &rows, &longest, &error) != MP_OK) {
        mp_engine_fail_all(plan, &error, outcomes);
        return;
    }
    mp_groups *groups = &engine->groups;
    engine->threads = lease->threads;
    mp_groups_make(groups, images, rows, lease->threads, GROUP_ROWS);
    place_images(engine);
    step_run run = {.engine = engine,
                    .state_bytes = mp_vit_state_bytes(engine->model, groups->most_rows),
                    .step = {.groups = groups,
                             .lease = lease,
                             .together = images == 1, /* all threads share a single image */
                             .thread_bytes = mp_vit_thread_scratch(engine->model, longest),
                             .run = run_group}};
    run.step.arg = &run;
    run.part_ops = mp_vit_part_ops(engine->model) / (uint64_t)(run.step.together ? 1 : lease->threads);
    run.part_rows = mp_vit_part_rows(engine->model, groups->most_rows, run.part_ops);
    run.step.group_bytes = run.state_bytes + mp_vit_part_bytes(engine->model, run.part_rows, groups->most_sequences);
    if (mp_group_step_reserve(&run.step, &engine->arena, engine->budget, &engine->charged, &error) != MP_OK) {
        mp_engine_fail_all(plan, &error, outcomes);
        return;
    }
    if (run.step.together)
        run.shared = pass_of(&run, &groups->groups[0], 0);
    mp_group_step_run(&run.step);

    const bool stopped = mp_lease_poll(lease);
    uint64_t ops = atomic_load_explicit(&run.ops, memory_order_relaxed);
    for (int i = 0; i < plan->count; i++)
        outcomes[i] = MP_OUTCOME_MORE;
    if (!stopped) {
        share_results(engine, images, mp_sys_now_ns());
        conclude(engine, plan, images, outcomes);
    }
    for (int i = 0; !stopped && i < plan->count; i++)
        if (is_planned(engine, plan->items[i]))
            ops += compute_large(engine, lease, mp_sys_now_ns(), &outcomes[i]);
    engine->planned = NULL;
    if (!stopped)
        mp_vit_learn(engine->model, ops, mp_sys_now_ns() - start);
}

static void engine_preempt(mp_engine *base, mp_item *item) {
    vit_engine *engine = (vit_engine *)base;
    large_image *large = large_of(engine, item);
    if (large)
        forget_large(engine, large);
}

static void engine_retire(mp_engine *base, mp_item *item) {
    engine_preempt(base, item);
    item->state = NULL;
}

static uint64_t engine_bytes(const mp_engine *base) {
    const vit_engine *engine = (const vit_engine *)base;
    uint64_t bytes = engine->charged + engine->positions.bytes;
    for (int i = 0; i < MAX_LARGE; i++)
        bytes += engine->large[i].charged;
    return bytes;
}

/* Frees everything but the states of large images in progress. */
static uint64_t release_memory(mp_engine *base) {
    vit_engine *engine = (vit_engine *)base;
    const uint64_t before = engine_bytes(base);
    mp_engine_release(&engine->arena, engine->budget, &engine->charged);
    for (int i = 0; i < MAX_LARGE; i++)
        if (!engine->large[i].begun)
            mp_engine_release(&engine->large[i].memory, engine->budget, &engine->large[i].charged);
    drop_positions(engine);
    return before - engine_bytes(base);
}

/* Also frees the recent vectors of all workers. */
static uint64_t engine_trim(mp_engine *base) {
    return release_memory(base) + mp_recent_trim(&((vit_engine *)base)->model->recent);
}

static void engine_destroy(mp_engine *base) {
    vit_engine *engine = (vit_engine *)base;
    for (int i = 0; i < MAX_LARGE; i++)
        forget_large(engine, &engine->large[i]);
    release_memory(base);
    mp_dedup_table_deinit(&engine->dedup);
    mp_free(engine->copies);
    mp_free(engine->inputs);
    mp_free(engine->images);
    mp_groups_deinit(&engine->groups);
    mp_free(engine);
}

static const mp_engine_ops vit_engine_ops = {
    .admit = engine_admit,
    .plan = engine_plan,
    .step = engine_step,
    .preempt = engine_preempt,
    .retire = engine_retire,
    .trim = engine_trim,
    .destroy = engine_destroy,
    .bytes = engine_bytes,
};

mp_dedup_table *mp_vit_engine_dedup(mp_engine *engine) { return &((vit_engine *)engine)->dedup; }

mp_status mp_vit_engine(mp_model *model, mp_budget *budget, mp_engine **out, mp_error *error) {
    vit_engine *engine = mp_alloc_zeroed(sizeof *engine, MP_TAG_SCRATCH);
    if (!engine)
        return mp_fail_memory(error, sizeof *engine, "an engine");
    engine->base.ops = &vit_engine_ops;
    engine->model = (mp_vit *)model;
    engine->budget = budget;
    *out = &engine->base;
    return MP_OK;
}
