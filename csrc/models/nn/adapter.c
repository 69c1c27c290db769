#include "models/nn/adapter.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

typedef struct mp_updates { /* the updates of one layer, indexed by adapter */
    struct mp_updates *next;
    mp_low_rank *by_adapter[];
} mp_updates;

/* ---- building ---------------------------------------------------------------------------------------------------- */

mp_status mp_adapters_open(mp_adapters *adapters, const mp_spec *spec, mp_error *error) {
    static const char key[] = "mpool.adapters";
    const mp_value *ids = mp_spec_find(spec, key);
    *adapters = (mp_adapters){0};
    if (!ids)
        return MP_OK;
    if (ids->type != MP_VALUE_INTS || ids->count > MP_ADAPTERS_MAX)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, key, "at most 64 integers",
                            ids->type == MP_VALUE_INTS ? "%llu integers" : "another type",
                            (unsigned long long)ids->count);
    for (uint64_t i = 0; i < ids->count; i++) {
        if (ids->as.integers[i] < 1 || mp_adapters_find(adapters, ids->as.integers[i]) > 0)
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, key, "positive integers, each once", "%lld",
                                (long long)ids->as.integers[i]);
        adapters->ids[adapters->count++] = ids->as.integers[i];
    }
    const size_t tensors = (size_t)mp_spec_tensor_count(spec);
    adapters->added = mp_alloc_zeroed(tensors * sizeof *adapters->added, MP_TAG_WEIGHTS);
    return adapters->added ? MP_OK : mp_fail_memory(error, tensors * sizeof *adapters->added, "the list of adapters");
}

void mp_adapters_deinit(mp_adapters *adapters) {
    for (mp_low_rank *at = adapters->updates, *next; at; at = next) {
        next = at->next;
        mp_free(at);
    }
    for (mp_updates *at = adapters->tables, *next; at; at = next) {
        next = at->next;
        mp_free(at);
    }
    for (int i = 0; adapters->embeddings && i < adapters->count; i++) {
        mp_free(adapters->embeddings[i].matrix);
        mp_free(adapters->embeddings[i].types);
    }
    mp_free(adapters->embeddings);
    mp_free(adapters->added);
    *adapters = (mp_adapters){0};
}

int mp_adapters_find(const mp_adapters *adapters, int64_t id) {
    for (int i = 0; i < adapters->count; i++)
        if (adapters->ids[i] == id)
            return i + 1;
    return 0;
}

/* Gets the table of a layer's updates, which every adapted part of the layer shares. */
static mp_status table_of(mp_adapters *adapters, mp_linear *linear, mp_error *error) {
    const size_t bytes = sizeof(mp_updates) + (size_t)adapters->count * sizeof(mp_low_rank *);
    if (linear->updates)
        return MP_OK;
    mp_updates *table = mp_alloc_zeroed(bytes, MP_TAG_WEIGHTS);
    if (!table)
        return mp_fail_memory(error, bytes, "the adapters of a layer");
    table->next = adapters->tables;
    adapters->tables = table;
    linear->updates = table->by_adapter;
    return MP_OK;
}

static mp_status update_of(mp_adapters *adapters, mp_linear *linear, int index, mp_low_rank **out, mp_error *error) {
    MP_TRY(table_of(adapters, linear, error));
    if (!linear->updates[index]) {
        mp_low_rank *update = mp_alloc_zeroed(sizeof *update, MP_TAG_WEIGHTS);
        if (!update)
            return mp_fail_memory(error, sizeof *update, "an adapter of a layer");
        update->next = adapters->updates;
        adapters->updates = linear->updates[index] = update;
    }
    *out = linear->updates[index];
    return MP_OK;
}

static void mark_added(mp_adapters *adapters, const mp_spec *spec, const char *name) {
    adapters->added[mp_spec_find_tensor(spec, name) - mp_spec_tensor_at(spec, 0)] = true;
}

/* Reads the order of the `n` rows or columns of a matrix, if the spec has the key. */
static mp_status read_order(const mp_spec *spec, const char *key, int64_t n, mp_order *order, mp_error *error) {
    int64_t values[5], none = 0, count = 1;
    MP_TRY(mp_spec_ints(spec, key, 5, 0, n, &none, values, error));
    *order = (mp_order){values[0], values[1], values[2], values[3], values[4]};
    for (int i = 1; i < 5 && count <= n; i++)
        count *= values[i];
    return mp_spec_find(spec, key) == NULL || (count > 0 && count <= n - order->first)
               ? MP_OK
               : mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, key,
                              "the first index of a range within the matrix, and the four sizes of that range",
                              "%lld, %lld, %lld, %lld, %lld of %lld", (long long)values[0], (long long)values[1],
                              (long long)values[2], (long long)values[3], (long long)values[4], (long long)n);
}

/* Adds the update of part `part` of a layer by the adapter at `index`, if it has one. stem: length of `name` without
 * ".weight". */
static mp_status add_update(mp_adapters *adapters, const mp_builder *builder, mp_linear *linear, int part, int index,
                            const char *name, int stem, mp_error *error) {
    enum { LENGTH = MP_BUILDER_NAME + 16 };
    const mp_spec *spec = mp_weights_spec(builder->weights);
    const int64_t any[2] = {-1, linear->K}, N = linear->w[part].N;
    const mp_order plain = {0};
    char a[LENGTH], b[LENGTH], factor[LENGTH], rows[LENGTH], columns[LENGTH];
    snprintf(a, sizeof a, MP_ADAPTER_PREFIX "%d.%.*s.lora_a", index + 1, stem, name);
    snprintf(b, sizeof b, MP_ADAPTER_PREFIX "%d.%.*s.lora_b", index + 1, stem, name);
    snprintf(factor, sizeof factor, MP_ADAPTER_PREFIX "%d.%.*s.scale", index + 1, stem, name);
    snprintf(rows, sizeof rows, MP_ADAPTER_PREFIX "%d.%.*s.rows", index + 1, stem, name);
    snprintf(columns, sizeof columns, MP_ADAPTER_PREFIX "%d.%.*s.columns", index + 1, stem, name);
    if (!mp_weights_has(builder->weights, a) && !mp_weights_has(builder->weights, b))
        return MP_OK;
    mp_low_rank *update = NULL;
    mp_tensor first;
    double scale;
    mp_order of_rows, of_columns;
    MP_TRY(mp_weights_get(builder->weights, a, 2, any, &first, error));
    const int64_t rank = first.shape[0];
    if (rank > MP_ADAPTER_MAX_RANK)
        return mp_fail(error, MP_LIMIT, "tensor %s has the rank %lld, mpool supports at most %d", a, (long long)rank,
                       MP_ADAPTER_MAX_RANK);
    MP_TRY(mp_spec_float(spec, factor, -1e6, 1e6, NULL, &scale, error));
    MP_TRY(read_order(spec, rows, N, &of_rows, error));
    MP_TRY(read_order(spec, columns, linear->K, &of_columns, error));
    MP_TRY(update_of(adapters, linear, index, &update, error));
    const int at = update->down.parts;
    mp_builder uncounted = *builder;
    uncounted.uncounted = true; /* the parameters of a model are those without adapters */
    MP_TRY(mp_builder_linear_converted(&uncounted, &update->down, a, (int32_t)rank, linear->K, 1, &plain, &of_columns,
                                       error));
    MP_TRY(mp_builder_linear_converted(&uncounted, &update->up[at], b, (int32_t)N, (int32_t)rank, (float)scale,
                                       &of_rows, &plain, error));
    update->part[at] = part;
    mark_added(adapters, spec, a);
    mark_added(adapters, spec, b);
    if (update->down.N > adapters->width)
        adapters->width = update->down.N;
    return MP_OK;
}

mp_status mp_adapters_add(mp_adapters *adapters, const mp_builder *builder, mp_linear *linear, const char *name,
                          mp_error *error) {
    static const char end[] = ".weight";
    const int stem = (int)(strlen(name) - strlen(end));
    assert(stem > 0 && strcmp(name + stem, end) == 0 && linear->parts > 0);
    for (int i = 0; i < adapters->count; i++)
        MP_TRY(add_update(adapters, builder, linear, linear->parts - 1, i, name, stem, error));
    return MP_OK;
}

/* ---- embeddings -------------------------------------------------------------------------------------------------- */

static const char token_table[] = "token_embd", type_table[] = "token_types";

/* Allocates floats of the model, which `budget` is charged for. */
static mp_status take_floats(mp_budget *budget, uint64_t *charged, int64_t rows, int32_t n, float **out,
                             mp_error *error) {
    const uint64_t bytes = (uint64_t)rows * (uint64_t)n * sizeof(float);
    if (!mp_budget_take(budget, bytes))
        return mp_fail_memory(error, bytes, "the adapters of an embedding");
    *charged += bytes;
    *out = mp_alloc((size_t)bytes, MP_TAG_WEIGHTS);
    return *out ? MP_OK : mp_fail_memory(error, bytes, "the adapters of an embedding");
}

static mp_status check_finite(const mp_weights *weights, const mp_tensor *tensor, const char *name, float *row,
                              mp_error *error) {
    for (int64_t r = 0; r < tensor->shape[0]; r++) {
        mp_dequantize_row(tensor->dtype, mp_tensor_row(tensor, r), tensor->shape[1], row);
        if (!mp_kernels_get()->all_finite(row, tensor->shape[1]))
            return mp_fail_file(error, MP_FORMAT, mp_weights_file(weights, name), -1, name, "finite values",
                                "a value in row %lld that is not finite", (long long)r);
    }
    return MP_OK;
}

typedef struct table_update { /* the matrices of a table's update, and their factor */
    mp_tensor a, b;
    float scale;
} table_update;

/* Reads the update of `table` by the adapter at `index`. Leaves a.data NULL if it has none. row: n floats. */
static mp_status read_table(mp_adapters *adapters, const mp_weights *weights, const char *table, int index,
                            int64_t rows, int32_t n, float *row, table_update *out, mp_error *error) {
    const mp_spec *spec = mp_weights_spec(weights);
    const int64_t any[2] = {rows, -1};
    char a[64], b[64], factor[64];
    double scale;
    snprintf(a, sizeof a, MP_ADAPTER_PREFIX "%d.%s.lora_a", index + 1, table);
    snprintf(b, sizeof b, MP_ADAPTER_PREFIX "%d.%s.lora_b", index + 1, table);
    snprintf(factor, sizeof factor, MP_ADAPTER_PREFIX "%d.%s.scale", index + 1, table);
    *out = (table_update){0};
    if (!mp_weights_has(weights, a) && !mp_weights_has(weights, b))
        return MP_OK;
    MP_TRY(mp_weights_get(weights, a, 2, any, &out->a, error));
    const int64_t shape[2] = {out->a.shape[1], n};
    if (shape[0] > n || shape[0] > MP_ADAPTER_MAX_RANK)
        return mp_fail(error, MP_LIMIT, "tensor %s has the rank %lld, mpool supports at most %d", a,
                       (long long)shape[0], n < MP_ADAPTER_MAX_RANK ? n : MP_ADAPTER_MAX_RANK);
    MP_TRY(mp_weights_get(weights, b, 2, shape, &out->b, error));
    MP_TRY(mp_spec_float(spec, factor, -1e6, 1e6, NULL, &scale, error));
    out->scale = (float)scale;
    MP_TRY(check_finite(weights, &out->a, a, row, error));
    MP_TRY(check_finite(weights, &out->b, b, row, error));
    mark_added(adapters, spec, a);
    mark_added(adapters, spec, b);
    return MP_OK;
}

static void scale_rows(const table_update *from, int32_t n, float *out) {
    for (int64_t r = 0; r < from->b.shape[0]; r++) {
        float *row = out + r * n;
        mp_dequantize_row(from->b.dtype, mp_tensor_row(&from->b, r), n, row);
        for (int32_t i = 0; i < n; i++)
            row[i] *= from->scale;
    }
}

/* Multiply A and B of the token types. left, row: n floats each. */
static void multiply_types(const table_update *from, int32_t types, int32_t n, float *left, float *row, float *out) {
    memset(out, 0, (size_t)types * (size_t)n * sizeof(float));
    for (int32_t t = 0; t < types; t++) {
        mp_dequantize_row(from->a.dtype, mp_tensor_row(&from->a, t), from->a.shape[1], left);
        for (int64_t r = 0; r < from->b.shape[0]; r++) {
            mp_dequantize_row(from->b.dtype, mp_tensor_row(&from->b, r), n, row);
            for (int32_t i = 0; i < n; i++)
                out[(int64_t)t * n + i] += left[r] * (from->scale * row[i]);
        }
    }
}

mp_status mp_adapters_add_embedding(mp_adapters *adapters, const mp_weights *weights, mp_embedding *embedding,
                                    int64_t types, int32_t used, mp_budget *budget, uint64_t *charged,
                                    mp_error *error) {
    const int32_t n = embedding->n;
    table_update found;
    mp_status status = MP_OK;
    if (adapters->count == 0)
        return MP_OK;
    float *scratch = mp_alloc(2 * (size_t)n * sizeof(float), MP_TAG_MISC);
    adapters->embeddings = mp_alloc_zeroed((size_t)adapters->count * sizeof *adapters->embeddings, MP_TAG_WEIGHTS);
    if (!scratch || !adapters->embeddings) {
        status = mp_fail_memory(error, (uint64_t)adapters->count * sizeof *adapters->embeddings,
                                "the adapters of an embedding");
        goto cleanup;
    }
    for (int i = 0; i < adapters->count; i++) {
        mp_embedding_update *update = &adapters->embeddings[i];
        MP_TRY_GOTO(read_table(adapters, weights, token_table, i, embedding->tokens.shape[0], n, scratch, &found,
                               error));
        if (found.a.data) {
            update->rank = (int32_t)found.a.shape[1];
            MP_TRY_GOTO(take_floats(budget, charged, update->rank, n, &update->matrix, error));
            scale_rows(&found, n, update->matrix);
            update->tokens = found.a;
        }
        if (types == 0)
            continue;
        MP_TRY_GOTO(read_table(adapters, weights, type_table, i, types, n, scratch, &found, error));
        if (found.a.data) {
            MP_TRY_GOTO(take_floats(budget, charged, used, n, &update->types, error));
            multiply_types(&found, used, n, scratch, scratch + n, update->types);
        }
    }
    embedding->updates = adapters->embeddings;
cleanup:
    mp_free(scratch);
    return status;
}

/* ---- checks ------------------------------------------------------------------------------------------------------ */

static bool is_of_adapter(const char *name) {
    return strncmp(name, MP_ADAPTER_PREFIX, sizeof MP_ADAPTER_PREFIX - 1) == 0;
}

mp_status mp_adapters_check(const mp_adapters *adapters, const mp_spec *spec, mp_error *error) {
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const char *name = mp_spec_tensor_at(spec, i)->name;
        if (is_of_adapter(name) && !(adapters->added && adapters->added[i]))
            return mp_fail(error, MP_UNSUPPORTED,
                           "tensor %s of an adapter belongs to no layer that adapters can update", name);
    }
    return MP_OK;
}

uint64_t mp_adapter_footprint(const mp_tensor_entry *entry) {
    if (!is_of_adapter(entry->name) || entry->ndim != 2 || entry->shape[0] < 1 || entry->shape[0] > INT32_MAX ||
        entry->shape[1] < 1 || entry->shape[1] > INT32_MAX)
        return 0;
    const char *layer = strchr(entry->name + sizeof MP_ADAPTER_PREFIX - 1, '.');
    if (layer && strcmp(layer, ".token_embd.lora_a") == 0)
        return 0;
    mp_wmat w;
    mp_wmat_init(&w, MP_W_F32, (int32_t)entry->shape[0], (int32_t)entry->shape[1]);
    return mp_wmat_bytes(&w);
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

typedef struct adapted_rows { /* consecutive rows with the same adapter */
    int row0, rows;
    const mp_low_rank *update;
} adapted_rows;

/* Finds the next run of rows after `at` that have the same adapter, if it updates the layer. Pass a zeroed `at` first.
 * Returns false at the end. */
static bool next_rows(const mp_row_context *context, const mp_linear *linear, int M, adapted_rows *at) {
    int row = at->row0 + at->rows;
    for (; row < M; row++) {
        const int adapter = context->adapters[row];
        if (adapter == 0 || !linear->updates[adapter - 1])
            continue;
        at->row0 = row;
        at->update = linear->updates[adapter - 1];
        while (row < M && context->adapters[row] == adapter)
            row++;
        at->rows = row - at->row0;
        return true;
    }
    return false;
}

/* A unit is one panel of outputs of one row, so that threads can share the panels of many rows and the rows of a single
 * panel. Units of a matrix are ordered by panel. Computes units [from, to) of the rows. */
static void multiply_units(const mp_wmat *w, const mp_acts *x, const adapted_rows *at, int64_t from, int64_t to,
                           const mp_epilogue *ep, float *y, int64_t ldy) {
    while (from < to) {
        const int panel = (int)(from / at->rows), row = (int)(from % at->rows);
        if (row == 0 && to - from >= at->rows) {
            const int panels = (int)((to - from) / at->rows);
            mp_gemm(w, x, at->row0, at->row0 + at->rows, panel, panel + panels, ep, y, ldy);
            from += (int64_t)panels * at->rows;
        } else {
            const int last = at->rows - row < to - from ? at->rows : row + (int)(to - from);
            mp_gemm(w, x, at->row0 + row, at->row0 + last, panel, panel + 1, ep, y, ldy);
            from += last - row;
        }
    }
}

typedef struct thread_share { /* the units [begin, end) of all matrices; `at`: units of the matrices so far */
    int64_t begin, end, at;
} thread_share;

static void multiply_share(const mp_wmat *w, const mp_acts *x, const adapted_rows *at, thread_share *share,
                           const mp_epilogue *ep, float *y, int64_t ldy) {
    const int64_t units = (int64_t)w->panels * at->rows;
    const int64_t from = share->begin > share->at ? share->begin - share->at : 0;
    const int64_t to = share->end - share->at < units ? share->end - share->at : units;
    share->at += units;
    multiply_units(w, x, at, from, to, ep, y, ldy);
}

/* Returns the index in the layer of the output part that part `p` of an update belongs to; -1 if a view leaves it out.
 */
static int part_in(const mp_linear *linear, const mp_low_rank *update, int p) {
    const int part = update->part[p] - linear->first;
    return part >= 0 && part < linear->parts ? part : -1;
}

/* Returns the thread's share of all products with A, or with B if `up`. */
static thread_share share_of(const mp_row_context *context, const mp_linear *linear, int M, bool up) {
    adapted_rows at = {0};
    thread_share share = {0};
    int64_t units = 0;
    while (next_rows(context, linear, M, &at))
        for (int p = 0; p < at.update->down.parts; p++)
            if (part_in(linear, at.update, p) >= 0)
                units += (int64_t)(up ? &at.update->up[p].w[0] : &at.update->down.w[p])->panels * at.rows;
    mp_team_split(context->thread, units, 1, &share.begin, &share.end);
    return share;
}

static mp_acts adapter_floats(int M, int32_t K, const float *x, int64_t ld) {
    mp_acts acts;
    mp_acts_init(&acts, MP_A_F32, M, K, NULL);
    mp_acts_fill(&acts, x, ld, 0, M);
    return acts;
}

void mp_adapter_forward(const mp_row_context *context, const mp_linear *linear, const float *x, int64_t ldx, int M,
                        const mp_epilogue *ep, float *y, int64_t ldy) {
    adapted_rows at = {0};
    const bool any = next_rows(context, linear, M, &at);
    assert(x && (!ep || ep->act == MP_ACT_NONE));
    if (any) {
        thread_share share = share_of(context, linear, M, false);
        const mp_acts in = adapter_floats(M, linear->K, x, ldx);
        for (at = (adapted_rows){0}; next_rows(context, linear, M, &at);)
            for (int p = 0; p < at.update->down.parts; p++)
                if (part_in(linear, at.update, p) >= 0)
                    multiply_share(&at.update->down.w[p], &in, &at, &share, NULL,
                                   context->low_rank + at.update->down.column[p], context->low_rank_width);
    }
    mp_linear_forward(linear, context->thread, x, ldx, M, context->acts, context->own_acts,
                      context->panel_scratch, ep, y, ldy);
    if (!any)
        return;
    mp_team_barrier(context->thread);
    thread_share share = share_of(context, linear, M, true);
    for (at = (adapted_rows){0}; next_rows(context, linear, M, &at);)
        for (int p = 0; p < at.update->down.parts; p++) {
            const mp_linear *up = &at.update->up[p];
            const int part = part_in(linear, at.update, p);
            if (part < 0)
                continue;
            const float *low_rank = context->low_rank + at.update->down.column[p];
            const mp_acts in = adapter_floats(M, up->K, low_rank, context->low_rank_width);
            float *const out = y + linear->column[part];
            const mp_epilogue add = {.residual = out, .ld_residual = ldy};
            multiply_share(&up->w[0], &in, &at, &share, &add, out, ldy);
        }
}
