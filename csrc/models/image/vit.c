/* image/vit.c: the forward pass of image transformers (ViT: Dosovitskiy et al., arXiv:2010.11929), part by part. */
#include "models/image/vit.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "models/nn/scratch.h"

enum { EMBED, BEFORE, ATTEND, AFTER };

/* An attention part is a range of rows of one head. It has at most PART_OPS operations, but at least PART_GRAINS grains
 * of rows, to amortise copying the keys and values. The copies take longer in bfloat16. LEAST_OPS: operations of the
 * smallest range of parts that a thread takes, about 20 us. */
enum { PART_OPS = 500000000, LEAST_OPS = 2000000, PART_GRAINS = 2, PART_GRAINS_BF16 = 6 };

typedef struct work { /* one thread's view of a pass */
    mp_vit_thread *l;
    const mp_team_thread *thread;
    const mp_vit *model;
    mp_vit_pass *pass;
    float *x;     /* [M, hidden] the residual stream */
    float *mixed; /* [M, hidden] in turn: patches, normed rows, outputs of attention */
    float *wide;  /* [M, 3 hidden] in turn: queries, keys and values; outputs to be scaled before they are added */
    float *inner; /* scratch of the part: feed-forward network; unfolded patches */
    mp_row_span *wanted; /* [count] the rows of each image that the last layer computes */
    int64_t kept;        /* the number of these rows */
    mp_row_context context;
    mp_attention attention;
} work;

static mp_attention attention_of(const mp_vit *model) {
    return (mp_attention){.heads = model->heads,
                          .kv_heads = model->heads,
                          .head_dim = model->head_dim,
                          .compute = model->compute,
                          .scale = model->normed_heads ? 1 : 1 / sqrtf((float)model->head_dim)};
}

static int inner_width(const mp_vit *model) { return model->gated ? 2 * model->ffn : model->ffn; }

static size_t row_bytes(const mp_vit *model, int M) {
    return mp_arena_cost((size_t)M * (size_t)model->hidden * sizeof(float));
}

size_t mp_vit_state_bytes(const mp_vit *model, int M) { return 5 * row_bytes(model, M); }

static size_t inner_bytes(const mp_vit *model, int part_rows) {
    size_t width = mp_larger(mp_larger((size_t)inner_width(model), (size_t)model->patches.K), (size_t)model->hidden);
    return mp_arena_cost((size_t)part_rows * width * sizeof(float));
}

static size_t wanted_bytes(int count) { return mp_arena_cost((size_t)count * sizeof(mp_row_span)); }

size_t mp_vit_part_bytes(const mp_vit *model, int part_rows, int count) {
    const mp_vit_pool *pool = &model->pool;
    const mp_linear *const linears[] = {&model->patches, &pool->q,      &pool->kv,
                                        &pool->out,      &pool->mlp.up, &pool->mlp.down};
    part_rows = part_rows > count ? part_rows : count; /* pooling has one row per image */
    mp_block_needs needs = {0};
    mp_transformer_needs(&model->layers[0].base, part_rows, &needs);
    size_t acts = needs.acts;
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++)
        if (linears[i]->parts)
            acts = mp_larger(acts, mp_linear_scratch(linears[i], part_rows));
    return wanted_bytes(count) + inner_bytes(model, part_rows) + mp_arena_cost(acts);
}

size_t mp_vit_thread_scratch(const mp_vit *model, int T) {
    const mp_attention shape = attention_of(model);
    size_t attention = mp_attention_scratch(&shape, T);
    size_t head = mp_arena_cost((size_t)model->hidden * sizeof(float)) + mp_head_scratch(&model->head) * sizeof(float);
    size_t position = mp_vit_position_scratch(model) * sizeof(float);
    return mp_arena_cost(mp_larger(mp_larger(attention, head), position));
}

/* Rows of the image that the last layer computes. */
static int kept_rows(const mp_vit_image *image) { return image->first_only ? 1 : image->n; }

static work work_of(mp_vit_thread *l) {
    const mp_vit_pass *pass = l->pass;
    int64_t kept = 0;
    for (int i = 0; i < pass->count; i++)
        kept += kept_rows(&pass->images[i]);
    const mp_vit *model = pass->model;
    const size_t bytes = row_bytes(model, pass->M);
    const int part_rows = pass->part_rows > pass->count ? pass->part_rows : pass->count;
    return (work){
        .l = l,
        .thread = l->thread,
        .model = model,
        .pass = l->pass,
        .x = (float *)(void *)pass->state,
        .mixed = (float *)(void *)(pass->state + bytes),
        .wide = (float *)(void *)(pass->state + 2 * bytes),
        .inner = (float *)(void *)(pass->part + wanted_bytes(pass->count)),
        .wanted = (mp_row_span *)(void *)pass->part,
        .kept = kept,
        .context = {.thread = l->thread,
                    .n_spans = pass->count,
                    .acts = pass->part + wanted_bytes(pass->count) + inner_bytes(model, part_rows)},
        .attention = attention_of(model),
    };
}

/* ---- parts ------------------------------------------------------------------------------------------------------- */

/* Two slots alternate: thread 0 may be one barrier ahead of a thread that still reads the previous slot. */
bool mp_vit_barrier(mp_vit_thread *l, uint64_t ops) {
    mp_vit_pass *pass = l->pass;
    const int slot = (int)(l->turn++ & 1);
    if (l->thread->index == 0) {
        pass->ops += ops;
        pass->stopped |= mp_lease_poll(pass->lease) ||
                         (pass->unwanted && atomic_load_explicit(pass->unwanted, memory_order_relaxed));
        pass->go_on[slot] = !pass->stopped && (!pass->until_ns || mp_sys_now_ns() < pass->until_ns);
    }
    mp_team_barrier(l->thread);
    return pass->go_on[slot];
}

int mp_vit_part_rows(const mp_vit *model, int M, uint64_t part_ops) {
    uint64_t rows = part_ops / (mp_vit_after_ops(model) + 1) / (uint64_t)model->grain * (uint64_t)model->grain;
    rows = rows > (uint64_t)model->grain ? rows : (uint64_t)model->grain;
    return rows < (uint64_t)M ? (int)rows : M;
}

int64_t mp_vit_next_rows(const mp_vit *model, int64_t left, int64_t most) {
    const int64_t parts = (left + most - 1) / most, each = (left + parts - 1) / parts, grain = model->grain;
    const int64_t rows = (each + grain - 1) / grain * grain;
    return rows < most ? (rows < left ? rows : left) : (most < left ? most : left);
}

/* True if the layer computes fewer rows than it reads. */
static bool drops_rows(const work *w, int layer) {
    return layer == w->model->layer_count - 1 && w->kept < w->pass->M;
}

/* Rows [*row0, *row1) of the next part of a stage that goes through `all` rows. */
static void next_rows(const work *w, const mp_vit_cursor *at, int64_t all, int64_t *row0, int64_t *row1) {
    *row0 = at->at;
    *row1 = at->at + mp_vit_next_rows(w->model, all - at->at, w->pass->part_rows);
}

static void step_on(mp_vit_cursor *at, int64_t done, int64_t all) {
    at->at = done;
    if (done < all)
        return;
    at->at = 0;
    if (++at->stage > AFTER) {
        at->stage = BEFORE;
        at->layer++;
    }
}

/* ---- from pixels to rows ----------------------------------------------------------------------------------------- */

/* Write a patch in the layout of the first matrix: channels, frames, lines, columns; or lines, columns, channels. */
static void unfold_patch(const mp_vit *model, const mp_vit_image *image, int y, int x, float *out) {
    const int p = model->patch;
    for (int i = 0; model->channels_last && i < p; i++) {
        const int64_t pixel = ((int64_t)y * p + i) * image->width + (int64_t)x * p;
        const uint8_t *line = image->pixels + pixel * MP_IMAGE_CHANNELS;
        for (int k = 0; k < p * MP_IMAGE_CHANNELS; k++)
            *out++ = model->pixel[k % MP_IMAGE_CHANNELS][line[k]];
    }
    for (int c = 0; !model->channels_last && c < MP_IMAGE_CHANNELS; c++)
        for (int i = 0; i < p * model->frames; i++) {
            const uint8_t *line = image->pixels + (size_t)(i / p) * image->frame +
                                  (((int64_t)y * p + i % p) * image->width + (int64_t)x * p) * MP_IMAGE_CHANNELS + c;
            for (int k = 0; k < p; k++)
                *out++ = model->pixel[c][line[k * MP_IMAGE_CHANNELS]];
        }
}

/* Unfold the patches [first, end) after patch `patch0` of the group, one per row. */
static void unfold(const work *w, int64_t patch0, int64_t first, int64_t end, float *out) {
    for (int i = 0; i < w->pass->count; i++) {
        const mp_vit_image *image = &w->pass->images[i];
        if (image->patch >= patch0 + end || image->patch + image->down * image->across <= patch0 + first)
            continue;
        for (int n = 0; n < image->down * image->across; n++) {
            int64_t patch = image->patch + (image->place ? image->place[n] : n) - patch0;
            if (patch < first || patch >= end)
                continue;
            float *to = out + patch * w->model->patches.K;
            unfold_patch(w->model, image, n / image->across, n % image->across, to);
            if (w->model->patch_norm.weight)
                mp_norm_row(&w->model->patch_norm, to, to);
        }
    }
}

static void add_sides(const mp_vit *model, int y, int x0, float *x) {
    const int64_t hidden = model->hidden;
    const float *column = model->positions + (int64_t)x0 * model->place_step * hidden;
    const float *line = model->positions + (model->first_line + (int64_t)y * model->place_step) * hidden;
    for (int64_t i = 0; i < hidden; i++)
        x[i] += column[i] + line[i];
}

/* Write row n of an image. Rows are the class token, the registers, then the patches. */
static void embed_row(const mp_vit *model, const mp_vit_image *image, int n, const float *patches, float *scratch,
                      float *x) {
    const mp_kernels *call = mp_kernels_get();
    const int hidden = model->hidden, before = model->classes + model->registers;
    const size_t bytes = (size_t)hidden * sizeof *x;
    if (n < model->classes) {
        memcpy(x, model->class_token, bytes);
        call->add(model->positions, hidden, x);
    } else if (n < before) {
        memcpy(x, model->register_tokens + (int64_t)(n - model->classes) * hidden, bytes);
    } else {
        memcpy(x, patches + (int64_t)(image->patch + n - before) * hidden, bytes);
        if (model->embedding_norm.weight)
            mp_norm_row(&model->embedding_norm, x, x);
        const int patch = image->order ? image->order[n - before] : n - before;
        if (model->places)
            add_sides(model, patch / image->across, patch % image->across, x);
        else if (image->positions)
            call->add(image->positions + (int64_t)patch * hidden, hidden, x);
        else if (model->positions)
            mp_vit_add_position(model, image->down, image->across, patch / image->across, patch % image->across,
                                scratch, x);
    }
    if (model->input_norm.weight)
        mp_norm_row(&model->input_norm, x, x);
}

/* Index in the group of the first patch at or after a row. */
static int64_t patch_at(const work *w, int64_t row) {
    const int before = w->model->classes + w->model->registers;
    for (int i = 0; i < w->pass->count; i++) {
        const mp_vit_image *image = &w->pass->images[i];
        if (row < image->row + image->n)
            return image->patch + (row - image->row > before ? row - image->row - before : 0);
    }
    return w->pass->P;
}

static uint64_t embed(const work *w, mp_vit_cursor *at) {
    const mp_vit *model = w->model;
    int64_t row0, row1;
    next_rows(w, at, w->pass->M, &row0, &row1);
    const int64_t patch0 = patch_at(w, row0), patch1 = patch_at(w, row1);
    mp_team_loop patches = mp_team_rows(w->thread, patch1 - patch0, model->patches.K);
    while (mp_team_next(w->thread, &patches))
        unfold(w, patch0, patches.begin, patches.end, w->inner);
    mp_team_barrier(w->thread);
    mp_row_linear(&w->context, &model->patches, w->inner, model->patches.K, (int)(patch1 - patch0), NULL,
                  w->mixed + patch0 * model->hidden, model->hidden);
    mp_team_barrier(w->thread);
    mp_team_loop rows = mp_team_rows(w->thread, row1 - row0, model->hidden);
    while (mp_team_next(w->thread, &rows))
        for (int i = 0; i < w->pass->count; i++) {
            const mp_vit_image *image = &w->pass->images[i];
            int64_t n = row0 + rows.begin - image->row, last = row0 + rows.end - image->row;
            for (n = n > 0 ? n : 0; n < last && n < image->n; n++)
                embed_row(model, image, (int)n, w->mixed, w->l->own, w->x + (image->row + n) * model->hidden);
        }
    step_on(at, row1, w->pass->M);
    return 2 * (uint64_t)(patch1 - patch0) * (uint64_t)model->patches.K * (uint64_t)model->hidden;
}

/* ---- layers ------------------------------------------------------------------------------------------------------ */

/* Rows [row0, row1) in the layout of nn/transformer.h. */
static mp_transformer_rows rows_of(const work *w, int64_t row0, int64_t row1) {
    const int64_t hidden = w->model->hidden;
    return (mp_transformer_rows){.M = (int)(row1 - row0),
                                 .hidden = w->model->hidden,
                                 .row0 = row0,
                                 .x = w->x + row0 * hidden,
                                 .mixed = w->mixed + row0 * hidden,
                                 .ld_mixed = hidden,
                                 .qkv = w->wide + row0 * 3 * hidden,
                                 .ld_qkv = 3 * hidden,
                                 .inner = w->inner};
}

/* Norm the heads of a row, and rotate the first half of each query and key by column, the second by line. */
static void norm_heads(const mp_vit *model, const mp_vit_layer *layer, const float *rotation, float *qkv) {
    const mp_rope rope = {.dim = model->head_dim / 2, .neox = true};
    const mp_norm *const norms[] = {&layer->base.q_norm, &layer->base.k_norm};
    const mp_norm none = {0}, values = {.weight = model->ones, .n = model->head_dim, .eps = model->eps, .root = true};
    const int half = model->head_dim / 2;
    for (int i = 0; i < 2; i++, qkv += model->hidden) {
        mp_attention_place(norms[i], &rope, rotation + half, 0, model->heads, model->head_dim, qkv);
        mp_attention_place(&none, &rope, rotation, half, model->heads, model->head_dim, qkv);
    }
    mp_attention_place(&values, NULL, NULL, 0, model->heads, model->head_dim, qkv);
}

/* Rotate queries and keys of rows of axial networks, by line and column. */
static void rotate(const work *w, int layer, int64_t row0, int64_t row1) {
    const mp_rope rope = {.dim = w->model->head_dim, .neox = w->model->neox};
    const mp_norm none = {0};
    const mp_vit *model = w->model;
    for (int i = 0; i < w->pass->count; i++) {
        const mp_vit_image *image = &w->pass->images[i];
        int64_t n = row0 - image->row, last = row1 - image->row;
        for (n = n > 0 ? n : 0; n < last && n < image->n; n++) {
            const float *rotation = image->rotation + n * model->head_dim;
            float *qkv = w->wide + (image->row + n) * 3 * model->hidden;
            if (model->normed_heads)
                norm_heads(model, &model->layers[layer], rotation, qkv);
            else
                mp_attention_place(&none, &rope, rotation, 0, 2 * model->heads, /* keys follow queries */
                                   model->head_dim, qkv);
        }
    }
}

/* Number of rows in [row0, row1) that are queries of attention. */
static int64_t queries_in(const work *w, bool drops, int64_t row0, int64_t row1) {
    int64_t count = 0;
    for (int i = 0; drops && i < w->pass->count; i++) {
        const int64_t first = w->pass->images[i].row, end = first + kept_rows(&w->pass->images[i]);
        const int64_t from = first > row0 ? first : row0, to = end < row1 ? end : row1;
        count += to > from ? to - from : 0;
    }
    return drops ? count : row1 - row0;
}

static uint64_t before_attention(const work *w, mp_vit_cursor *at) {
    const bool drops = drops_rows(w, at->layer);
    int64_t row0, row1;
    next_rows(w, at, w->pass->M, &row0, &row1);
    const mp_transformer_rows rows = rows_of(w, row0, row1);
    mp_row_context context = w->context;
    context.wanted = drops ? w->wanted : NULL;
    const mp_vit_layer *layer = &w->model->layers[at->layer];
    if (layer->bounded)
        mp_vit_bounded_before(&context, layer, &rows);
    else
        mp_transformer_before(&context, &layer->base, &rows);
    if (w->model->axial) {
        mp_team_barrier(w->thread);
        mp_team_loop loop = mp_team_rows(w->thread, row1 - row0, 3 * (int64_t)w->model->hidden);
        while (mp_team_next(w->thread, &loop))
            rotate(w, at->layer, row0 + loop.begin, row0 + loop.end);
    }
    step_on(at, row1, w->pass->M);
    return (uint64_t)(row1 - row0) * mp_vit_keys_ops(w->model) +
           (uint64_t)queries_in(w, drops, row0, row1) * mp_vit_queries_ops(w->model);
}

static uint64_t after_attention(const work *w, mp_vit_cursor *at) {
    const bool drops = drops_rows(w, at->layer);
    const int64_t all = drops ? w->kept : w->pass->M;
    int64_t row0, row1;
    if (drops && at->at == 0) {
        const mp_transformer_rows every = rows_of(w, 0, w->pass->M);
        mp_row_context context = w->context;
        context.wanted = w->wanted;
        mp_transformer_keep(&context, &every);
    }
    next_rows(w, at, all, &row0, &row1);
    const mp_transformer_rows rows = rows_of(w, row0, row1);
    const mp_vit_layer *layer = &w->model->layers[at->layer];
    if (layer->bounded)
        mp_vit_bounded_after(&w->context, layer, &rows);
    else
        mp_transformer_after(&w->context, &layer->base, &rows);
    step_on(at, row1, all);
    return (uint64_t)(row1 - row0) * mp_vit_after_ops(w->model);
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* Rows that attend to each other: those of an image, or of one window of it. A part is a range of the first `queries`
 * rows in one head; parts are numbered head by head. */
typedef struct field {
    int64_t row0;         /* first row within the group */
    int T, queries, each; /* rows; rows that the layer computes; rows of a part */
    int64_t part_count, parts; /* parts: number per head; part_count: number in all heads */
    uint64_t ops;          /* operations of a part; the last of a head may be smaller */
} field;

static field field_at(const work *w, int layer, int image, int window) {
    const mp_vit *model = w->model;
    const mp_vit_image *one = &w->pass->images[image];
    const bool windowed = model->layers[layer].windowed;
    const int first = windowed ? one->windows[window] : 0, end = windowed ? one->windows[window + 1] : one->n;
    field f = {.row0 = one->row + first, .T = end - first};
    f.queries = drops_rows(w, layer) ? kept_rows(one) : f.T;
    const bool plain = mp_attention_function(&w->attention, f.T) != mp_kernels_get()->attn_full_bf16;
    const uint64_t limit = PART_OPS < model->most_ops ? PART_OPS : model->most_ops;
    const int64_t least = (int64_t)(plain ? PART_GRAINS : PART_GRAINS_BF16) * model->grain;
    const int64_t most = (int64_t)(limit / mp_vit_attention_ops(model, 1, f.T)) / model->grain * model->grain;
    f.each = (int)mp_vit_next_rows(model, f.queries, most > least ? most : least);
    f.parts = (f.queries + f.each - 1) / f.each;
    f.part_count = (int64_t)model->heads * f.parts;
    f.ops = mp_vit_attention_ops(model, f.each, f.T);
    return f;
}

static void attend_part(const work *w, const field *f, int64_t part) {
    const mp_vit *model = w->model;
    const int row0 = (int)(part % f->parts) * f->each;
    const int row1 = row0 + f->each < f->queries ? row0 + f->each : f->queries;
    const mp_row_span span = {.row0 = f->row0, .rows = f->T};
    const mp_attention_rows rows = {.q = w->wide,
                                    .k = w->wide + model->hidden,
                                    .v = w->wide + 2 * model->hidden,
                                    .ld = 3 * model->hidden,
                                    .out = w->mixed,
                                    .ld_out = model->hidden};
    mp_attention_head(&w->attention, &rows, &span, (int)(part / f->parts), 0, row0, row1, w->l->own);
    if (w->thread->index == 0)
        mp_lease_poll(w->pass->lease); /* report a heartbeat */
}

/* Compute attention parts [part, last), numbered image by image and window by window. */
static void attend_parts(const work *w, int layer, int64_t part, int64_t last) {
    const mp_vit_pass *pass = w->pass;
    const bool windowed = w->model->layers[layer].windowed;
    int64_t base = 0;
    for (int i = 0; i < pass->count && part < last; i++)
        for (int n = 0; n < (windowed ? pass->images[i].window_count : 1) && part < last; n++) {
            const field f = field_at(w, layer, i, n);
            for (; part < last && part < base + f.part_count; part++)
                attend_part(w, &f, part - base);
            base += f.part_count;
        }
}

/* Compute attention parts from the cursor on, a multiple of the number of threads while there are so many. */
static uint64_t attend(const work *w, mp_vit_cursor *at) {
    const mp_vit_pass *pass = w->pass;
    const int64_t threads = w->thread->count;
    const bool windowed = w->model->layers[at->layer].windowed;
    const int64_t first = at->at;
    int64_t all = 0, taken = 0;
    uint64_t ops = 0;
    for (int i = 0; i < pass->count; i++)
        for (int n = 0; n < (windowed ? pass->images[i].window_count : 1); n++) {
            const field f = field_at(w, at->layer, i, n);
            const int64_t there = all + f.part_count - (first + taken);
            all += f.part_count;
            if (there <= 0 || (ops >= pass->part_ops && taken % threads == 0))
                continue;
            int64_t more = ops < pass->part_ops ? (int64_t)((pass->part_ops - ops + f.ops - 1) / f.ops) : 0;
            more += (threads - (taken + more) % threads) % threads;
            more = more < there ? more : there;
            taken += more;
            const int64_t lasts = (f.part_count - there + more) / f.parts - (f.part_count - there) / f.parts;
            ops += (uint64_t)more * f.ops -
                   mp_vit_attention_ops(w->model, lasts * (f.parts * f.each - f.queries), f.T);
        }
    mp_team_loop loop = mp_team_shared(taken, 1 + (int64_t)(LEAST_OPS / (1 + ops / (uint64_t)(taken + !taken))));
    while (mp_team_next(w->thread, &loop))
        attend_parts(w, at->layer, first + loop.begin, first + loop.end);
    step_on(at, first + taken, all);
    return ops;
}

bool mp_vit_advance(mp_vit_thread *l, int layers) {
    static uint64_t (*const stages[])(const work *, mp_vit_cursor *) = {embed, before_attention, attend,
                                                                         after_attention};
    const work w = work_of(l);
    mp_vit_cursor at = l->pass->cursor;
    if (at.stage != EMBED && at.layer == layers)
        return true;
    for (int i = 0; l->thread->index == 0 && i < l->pass->count; i++) {
        const mp_vit_image *image = &l->pass->images[i];
        w.wanted[i] = (mp_row_span){.row0 = image->row, .rows = kept_rows(image)};
    }
    mp_team_barrier(l->thread);
    bool go_on = true;
    while (go_on && (at.stage == EMBED || at.layer < layers)) {
        uint64_t ops = stages[at.stage](&w, &at);
        go_on = mp_vit_barrier(l, ops);
    }
    if (l->thread->index == 0) /* all threads read the cursor before the barrier */
        l->pass->cursor = at;
    return go_on;
}

/* ---- from rows to a vector --------------------------------------------------------------------------------------- */

/* Compute keys and values of the rows from the cursor on, for attention pooling. */
static bool pool_keys(const work *w) {
    const mp_vit *model = w->model;
    const int hidden = model->hidden;
    for (int64_t row0 = w->pass->cursor.at, row1; row0 < w->pass->M; row0 = row1) {
        row1 = row0 + mp_vit_next_rows(model, w->pass->M - row0, w->pass->part_rows);
        const mp_transformer_rows rows = rows_of(w, row0, row1);
        const float *in = mp_transformer_normed(&w->context, &model->norm, &rows);
        mp_row_linear(&w->context, &model->pool.kv, in, hidden, rows.M, NULL, w->wide + row0 * 2 * hidden, 2 * hidden);
        if (mp_vit_barrier(w->l, 4 * (uint64_t)(row1 - row0) * (uint64_t)hidden * (uint64_t)hidden))
            continue;
        if (w->thread->index == 0) /* all threads read the cursor before the barrier */
            w->pass->cursor.at = row1;
        return false;
    }
    return true;
}

/* The learned query attends to each image. Writes pooled rows [count, hidden] to x, over the residual stream, which is
 * no longer needed. */
static bool pool_by_attention(const work *w) {
    const mp_vit *model = w->model;
    const mp_vit_pool *pool = &model->pool;
    const int hidden = model->hidden, count = w->pass->count;
    const mp_transformer_rows pooled = rows_of(w, 0, count);
    const mp_residual sum = mp_transformer_residual(&pooled, NULL, NULL);
    mp_attention shape = w->attention;
    float *q = w->inner, *kv = w->wide;
    /* with one row of queries, the copies for bfloat16 would cost more than they save */
    shape.compute = MP_COMPUTE_F32;
    if (!pool_keys(w))
        return false;
    mp_row_linear(&w->context, &pool->q, pool->probe, hidden, 1, NULL, q, hidden);
    mp_team_barrier(w->thread);
    int64_t begin, end;
    mp_team_split(w->thread, (int64_t)count * model->heads, 1, &begin, &end);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t i = unit / model->heads;
        const mp_row_span span = {.rows = w->pass->images[i].n};
        const float *k = kv + (int64_t)w->pass->images[i].row * 2 * hidden;
        const mp_attention_rows rows = {.q = q, /* a single row: its stride is never used */
                                        .k = k,
                                        .v = k + hidden,
                                        .ld = 2 * hidden,
                                        .out = w->mixed + i * hidden,
                                        .ld_out = hidden};
        mp_attention_head(&shape, &rows, &span, (int)(unit % model->heads), 0, 0, 1, w->l->own);
    }
    mp_team_barrier(w->thread);
    mp_row_linear(&w->context, &pool->out, w->mixed, hidden, count, NULL, w->x, hidden);
    mp_team_barrier(w->thread);
    const float *in = mp_transformer_normed(&w->context, &pool->norm, &pooled);
    mp_mlp_forward(&w->context, &pool->mlp, in, hidden, count, w->inner, &sum);
    mp_team_barrier(w->thread);
    return true;
}

/* pooled: the image's row of attention pooling; NULL: norm and use the image's first row. */
static void finish_image(const mp_vit *model, mp_vit_image *image, const float *rows, const float *pooled,
                         float *scratch) {
    const mp_kernels *call = mp_kernels_get();
    if (!pooled) {
        mp_norm_row(&model->norm, rows, scratch);
        pooled = scratch;
    }
    float *rest = scratch + mp_arena_cost((size_t)model->hidden * sizeof *scratch) / sizeof *scratch;
    mp_head_apply(&model->head, pooled, 1, 0, image->dimensions, image->normalize, rest, image->out);
    image->finite = call->all_finite(image->out, image->dimensions);
}

static void copy_tokens(const work *w) {
    int64_t first, end;
    const float *rows = w->x;
    mp_team_split(w->thread, w->pass->count, 1, &first, &end);
    for (int64_t i = 0; i < end; rows += (int64_t)kept_rows(&w->pass->images[i++]) * w->model->hidden) {
        mp_vit_image *image = &w->pass->images[i];
        int64_t floats = (int64_t)image->n * w->model->hidden;
        if (i < first || !image->want_tokens)
            continue;
        memcpy(image->out, rows, (size_t)floats * sizeof *image->out);
        image->finite = mp_kernels_get()->all_finite(image->out, floats);
    }
}

bool mp_vit_forward(mp_vit_thread *l) {
    const work w = work_of(l);
    mp_vit_image *images = l->pass->images;
    const float *rows = w.x;
    int64_t first, end;
    if (!mp_vit_advance(l, w.model->layer_count))
        return false;
    copy_tokens(&w); /* pool_by_attention overwrites the rows only after a barrier */
    if (w.model->attention_pool && !pool_by_attention(&w))
        return false;
    mp_team_split(l->thread, l->pass->count, 1, &first, &end);
    for (int64_t i = 0; i < end; rows += (int64_t)kept_rows(&images[i++]) * w.model->hidden)
        if (i >= first && !images[i].want_tokens)
            finish_image(w.model, &images[i], rows, w.model->attention_pool ? w.x + i * w.model->hidden : NULL, l->own);
    return true;
}
