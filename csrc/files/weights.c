/* weights.c: see weights.h. Before and after a file is mapped, its identity is compared with the one stored in the
 * spec, so that a load never mixes two versions of a model. */
#include "files/weights.h"

#include <stdatomic.h>
#include <stdio.h> /* snprintf only */
#include <stdlib.h> /* qsort, bsearch */
#include <string.h>

#include "base/alloc.h"
#include "files/spec_build.h"
#include "kernels/scaled.h"

struct mp_weights {
    mp_spec *spec; /* pinned */
    int map_count;
    mp_file_map *maps[]; /* [map_count], in the order of the spec's files */
};

/* Required alignment of a tensor's first byte: kernels load whole elements, and blocks of an even size contain 16-bit
 * scales. */
static uint64_t alignment_of(mp_dtype dtype) {
    const mp_dtype_row *row = mp_dtype_get(dtype);
    return row->items == 1 ? (uint64_t)row->bytes : row->bytes % 2 ? 1 : 2;
}

static mp_status check_bounds(const mp_weights *weights, const mp_tensor_entry *entry, mp_error *error) {
    MP_TRY(mp_spec_check_tensor(weights->spec, entry, error));
    const mp_file_map *map = weights->maps[entry->file];
    uint64_t size = mp_file_map_size(map), end;
    char field[96], allowed[64];
    snprintf(field, sizeof field, "%.70s: offset", entry->name);
    if (__builtin_add_overflow(entry->offset, entry->nbytes, &end) || end > size) {
        snprintf(allowed, sizeof allowed, "an end within the %llu bytes of the file", (unsigned long long)size);
        return mp_fail_file(error, MP_FORMAT, mp_file_map_path(map), -1, field, allowed,
                            "%llu, with %llu bytes after it",
                            (unsigned long long)entry->offset, (unsigned long long)entry->nbytes);
    }
    uint64_t align = alignment_of(entry->dtype);
    if (entry->offset % align) {
        snprintf(allowed, sizeof allowed, "multiples of %llu for %s", (unsigned long long)align,
                 mp_dtype_get(entry->dtype)->name);
        return mp_fail_file(error, MP_FORMAT, mp_file_map_path(map), -1, field, allowed, "%llu",
                            (unsigned long long)entry->offset);
    }
    return MP_OK;
}

static _Atomic int lender; /* process that has the files open: see mp_weights_set_lender; 0: none */

void mp_weights_set_lender(int process) { atomic_store(&lender, process); }

static mp_status fail_outdated(mp_status status, mp_error *error) {
    if (error)
        snprintf(error->field, sizeof error->field, MP_FIELD_OUTDATED);
    return status;
}

static mp_status check_identity(const mp_spec *spec, int file, const mp_file_id *id, mp_error *error) {
    if (mp_spec_same_file(spec, file, id))
        return MP_OK;
    return fail_outdated(mp_fail(error, MP_INTEGRITY, "%s changed after the model was described; load the model "
                                 "again", mp_spec_file(spec, file)), error);
}

static mp_status open_file(const mp_spec *spec, int file, mp_file_map **map, mp_error *error) {
    const char *path = mp_spec_file(spec, file);
    const int process = atomic_load(&lender);
    mp_file_id now, described;
    char place[64];
    const bool exists = mp_sys_identify(path, &now);
    if (process && mp_spec_file_identity(spec, file, &described) && !(exists && mp_file_id_same(&described, &now)) &&
        mp_sys_find_open(process, &described, place, sizeof place))
        return mp_file_map_open_at(place, path, map, error);
    /* Check the identity first: mapping a replaced file may fail with an error other than INTEGRITY. */
    if (exists)
        MP_TRY(check_identity(spec, file, &now, error));
    const mp_status status = mp_file_map_open(path, map, error);
    return exists ? status : fail_outdated(status, error);
}

mp_status mp_weights_open(mp_spec *spec, mp_weights **out, mp_error *error) {
    mp_status status = MP_OK;
    int files = mp_spec_file_count(spec), tensors = mp_spec_tensor_count(spec);
    *out = NULL;
    mp_spec_freeze(spec); /* the tensor table must not change after the checks below */
    size_t bytes = sizeof(mp_weights) + (size_t)files * sizeof(mp_file_map *);
    mp_weights *weights = mp_alloc_zeroed(bytes, MP_TAG_SPEC);
    if (!weights)
        return mp_fail_memory(error, bytes, "a model's files");
    weights->spec = mp_spec_pin(spec);
    weights->map_count = files;
    for (int i = 0; i < files; i++) {
        MP_TRY_GOTO(open_file(spec, i, &weights->maps[i], error));
        MP_TRY_GOTO(check_identity(spec, i, mp_file_map_id(weights->maps[i]), error));
    }
    for (int i = 0; i < tensors; i++)
        MP_TRY_GOTO(check_bounds(weights, mp_spec_tensor_at(spec, i), error));
    *out = weights;
    weights = NULL;
cleanup:
    mp_weights_close(weights);
    return status;
}

void mp_weights_close(mp_weights *weights) {
    if (!weights)
        return;
    for (int i = 0; i < weights->map_count; i++)
        mp_file_map_close(weights->maps[i]);
    mp_spec_unpin(weights->spec);
    mp_free(weights);
}

const mp_spec *mp_weights_spec(const mp_weights *weights) { return weights->spec; }

bool mp_weights_has(const mp_weights *weights, const char *name) {
    return mp_spec_find_tensor(weights->spec, name) != NULL;
}

/* Path of the file for an error about a tensor. `entry` may be NULL: the first file. */
static const char *file_of(const mp_weights *weights, const mp_tensor_entry *entry) {
    return entry ? mp_spec_file(weights->spec, entry->file) : mp_spec_origin(weights->spec);
}

const char *mp_weights_file(const mp_weights *weights, const char *name) {
    return file_of(weights, mp_spec_find_tensor(weights->spec, name));
}

/* Write "a tensor of shape [*, 64]"; -1 stands for any size. */
static void format_wanted(int ndim, const int64_t *shape, char *to, size_t size) {
    size_t at = (size_t)snprintf(to, size, "a tensor of shape [");
    for (int i = 0; i < ndim && at < size; i++)
        at += (size_t)(shape[i] < 0 ? snprintf(to + at, size - at, "%s*", i ? ", " : "")
                                    : snprintf(to + at, size - at, "%s%lld", i ? ", " : "", (long long)shape[i]));
    if (at < size)
        snprintf(to + at, size - at, "]");
}

mp_status mp_weights_get_any(const mp_weights *weights, const char *name, int ndim, const int64_t *shape,
                             mp_tensor *tensor, mp_error *error) {
    char wanted[96], got[96];
    const mp_tensor_entry *entry = mp_spec_find_tensor(weights->spec, name);
    bool good = entry && entry->ndim == ndim;
    for (int i = 0; good && i < ndim; i++)
        good = shape[i] == -1 || shape[i] == entry->shape[i];
    if (!good) {
        format_wanted(ndim, shape, wanted, sizeof wanted);
        if (!entry)
            return mp_fail_file(error, MP_FORMAT, file_of(weights, NULL), -1, name, wanted, "missing");
        mp_shape_text(entry->ndim, entry->shape, got, sizeof got);
        return mp_fail_file(error, MP_FORMAT, file_of(weights, entry), (int64_t)entry->offset, name, wanted,
                            "of shape %s", got);
    }
    *tensor = (mp_tensor){.dtype = entry->dtype,
                          .ndim = entry->ndim,
                          .data = mp_file_map_data(weights->maps[entry->file]) + entry->offset,
                          .nbytes = entry->nbytes};
    memcpy(tensor->shape, entry->shape, sizeof tensor->shape);
    return MP_OK;
}

mp_status mp_weights_get(const mp_weights *weights, const char *name, int ndim, const int64_t *shape, mp_tensor *tensor,
                         mp_error *error) {
    MP_TRY(mp_weights_get_any(weights, name, ndim, shape, tensor, error));
    mp_wkind kind;
    if (mp_dtype_is_scaled(tensor->dtype))
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s is stored as %s, which mpool supports only for the weights of "
                       "linear layers", name, mp_dtype_get(tensor->dtype)->name);
    if (!mp_wmat_kind_for(tensor->dtype, MP_COMPUTE_AUTO, &kind))
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s is stored as %s, which is not a weight type", name,
                       mp_dtype_get(tensor->dtype)->name);
    return MP_OK;
}

enum { LAYER_NAME = 160, LAYER_DIGITS = 12 }; /* longer than any name that a model reads, and than any layer's number */

typedef struct layer_part { /* "<prefix><layer>.<part>" of a tensor's name, without ".weight" or ".bias" */
    const char *part;
    int length, layer; /* length: bytes of `part` */
} layer_part;

/* Splits a name that ends with `end`. Returns false for any other name, and for a layer that the model does not
 * have. */
static bool split_name(const char *name, const char *prefix, int layers, const char *end, layer_part *out) {
    const size_t total = strlen(name), before = strlen(prefix), after = strlen(end);
    if (total >= LAYER_NAME - LAYER_DIGITS || strncmp(name, prefix, before) != 0)
        return false;
    const char *digits = name + before, *at = digits;
    int64_t layer = 0;
    for (; *at >= '0' && *at <= '9' && layer < layers; at++)
        layer = layer * 10 + (*at - '0');
    const bool canonical = at > digits && (*digits != '0' || at == digits + 1); /* "007" is not a layer number */
    const int64_t length = (int64_t)total - (at + 1 - name) - (int64_t)after;
    if (!canonical || layer >= layers || *at != '.' || length <= 0 || strcmp(name + total - after, end) != 0)
        return false;
    *out = (layer_part){.part = at + 1, .length = (int)length, .layer = (int)layer};
    return true;
}

static bool same_part(const layer_part *a, const layer_part *b) {
    return a->length == b->length && memcmp(a->part, b->part, (size_t)a->length) == 0;
}

/* Orders by part, then by layer: the layers of a part become neighbours. */
static int compare_parts(const void *left, const void *right) {
    const layer_part *a = left, *b = right;
    if (a->length != b->length)
        return a->length < b->length ? -1 : 1;
    const int order = memcmp(a->part, b->part, (size_t)a->length);
    return order ? order : (a->layer > b->layer) - (a->layer < b->layer);
}

/* Writes the name of another layer's bias. */
static void name_bias(const char *prefix, int layer, const layer_part *bias, char name[LAYER_NAME]) {
    snprintf(name, LAYER_NAME, "%s%d.%.*s.bias", prefix, layer, bias->length, bias->part);
}

/* Sorting keeps the time near the number of tensors: a file may declare many layers, and a bias in few of them. */
mp_status mp_weights_check_biases(const mp_weights *weights, const char *prefix, int layers, mp_error *error) {
    static const char router[] = "ffn_gate_inp";
    const int tensors = mp_spec_tensor_count(weights->spec);
    layer_part part, *list = mp_alloc_array((size_t)tensors, sizeof *list, MP_TAG_MISC);
    mp_status status = MP_OK;
    size_t count = 0;
    if (!list)
        return mp_fail_memory(error, (uint64_t)tensors * sizeof *list, "the names of a model's layers");
    for (int t = 0; t < tensors; t++)
        if (split_name(mp_spec_tensor_at(weights->spec, t)->name, prefix, layers, ".weight", &part))
            list[count++] = part;
    qsort(list, count, sizeof *list, compare_parts);
    for (int t = 0; t < tensors && status == MP_OK; t++) {
        if (!split_name(mp_spec_tensor_at(weights->spec, t)->name, prefix, layers, ".bias", &part))
            continue;
        const layer_part gate = {.part = router, .length = (int)strlen(router), .layer = part.layer};
        const layer_part *owner = bsearch(&part, list, count, sizeof *list, compare_parts);
        const bool of_experts = strncmp(part.part, "ffn_", 4) == 0 || strncmp(part.part, "exp_", 4) == 0;
        if (!owner && of_experts) /* other biases without a weight (ssm_dt) need not be in all layers */
            owner = bsearch(&gate, list, count, sizeof *list, compare_parts);
        /* Without an owner, the layer lacks more than a bias. The check compares each bias with the nearest layers,
         * before and after, that have the owner: if any layer lacks the bias, one of them is next to a layer that
         * has it. */
        for (int step = -1; owner && step <= 1 && status == MP_OK; step += 2) {
            char name[LAYER_NAME];
            const ptrdiff_t at = owner - list + step;
            if (at < 0 || at >= (ptrdiff_t)count || !same_part(owner, &list[at]))
                continue;
            name_bias(prefix, list[at].layer, &part, name);
            if (!mp_weights_has(weights, name))
                status = mp_fail_file(error, MP_FORMAT, file_of(weights, NULL), -1, name,
                                      "a bias in all layers, or in none", "missing, but layer %d has it", part.layer);
        }
    }
    mp_free(list);
    return status;
}

void mp_weights_release(const mp_weights *weights, const mp_tensor *tensor) {
    for (int i = 0; i < weights->map_count; i++) {
        const uint8_t *data = mp_file_map_data(weights->maps[i]);
        if (tensor->data >= data && tensor->data < data + mp_file_map_size(weights->maps[i])) {
            mp_file_map_release(weights->maps[i], (uint64_t)(tensor->data - data), tensor->nbytes);
            return;
        }
    }
}

/* The first poisoned mapping; NULL if there is none. */
static const mp_file_map *poisoned_map(const mp_weights *weights) {
    for (int i = 0; i < weights->map_count; i++)
        if (mp_file_map_poisoned(weights->maps[i]))
            return weights->maps[i];
    return NULL;
}

bool mp_weights_poisoned(const mp_weights *weights) { return poisoned_map(weights) != NULL; }

mp_status mp_weights_check_poisoned(const mp_weights *weights, mp_error *error) {
    const mp_file_map *map = poisoned_map(weights);
    if (!map)
        return MP_OK;
    return mp_fail(error, MP_IO,
                   "a weight file was truncated while it was in use; restore it and load the model again: %s",
                   mp_file_map_path(map));
}

bool mp_weights_owned(const mp_weights *weights) {
    for (int i = 0; i < weights->map_count; i++)
        if (!mp_sys_owns(mp_file_map_id(weights->maps[i])))
            return false;
    return true;
}

bool mp_weights_unchanged(const mp_weights *weights) {
    for (int i = 0; i < weights->map_count; i++)
        if (!mp_file_map_unchanged(weights->maps[i]))
            return false;
    return true;
}

bool mp_weights_sound(const mp_weights *weights) {
    return !mp_weights_poisoned(weights) && mp_weights_unchanged(weights);
}
