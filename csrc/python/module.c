/* module.c: the module mpool._core: its functions and its state; waiting that checks for signals. */
#define MP_PYTHON_IMPORTS_NUMPY
#include <dirent.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h> /* snprintf only */
#include <string.h>

#include "base/alloc.h"
#include "base/cpu.h"
#include "base/forked.h"
#include "base/log.h"
#include "base/options.h"
#include "base/tenant.h"
#include "base/topology.h"
#include "files/file_map.h"
#include "kernels/quantize.h"
#include "kernels/scaled.h"
#include "models/model.h"
#include "python/binding.h"
#include "registry/events.h"

#define STRING_OF(x) #x
#define STRING(x)    STRING_OF(x)
#ifndef MPOOL_VERSION
#define MPOOL_VERSION 0.1.0
#endif

static const uint64_t SLICE_NS = 50ull * 1000 * 1000;

/* --- waiting --- */

bool mp_deadline(mp_state *state, PyObject *timeout, uint64_t *deadline_ns) {
    *deadline_ns = 0;
    if (!timeout || timeout == Py_None)
        return true;
    double seconds = PyFloat_AsDouble(timeout);
    if (seconds == -1.0 && PyErr_Occurred())
        return false;
    if (isnan(seconds) || seconds < 0) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "`timeout` must be a number of seconds of 0 or more, or None, got %g",
                     seconds);
        return false;
    }
    if (seconds < 1e9) /* a longer timeout means no deadline */
        *deadline_ns = mp_sys_now_ns() + (uint64_t)(seconds * 1e9);
    return true;
}

bool mp_seconds_in(mp_state *state, const char *name, double seconds, uint64_t *ns) {
    if (isnan(seconds) || seconds < 0) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "`%s` must be a number of seconds of 0 or more, got %g", name,
                     seconds);
        return false;
    }
    *ns = seconds < 1e9 ? (uint64_t)(seconds * 1e9) : MP_FOREVER;
    if (*ns == 0)
        *ns = 1;
    return true;
}

bool mp_submit_options_in(mp_state *state, mp_submit_args *submit) {
    mp_submit_options *options = &submit->options;
    if (!mp_deadline(state, submit->timeout, &options->deadline_ns) ||
        /* below 0: not passed; NaN is not below 0, and mp_seconds_in refuses it */
        (!(submit->patience < 0) && !mp_seconds_in(state, "patience", submit->patience, &options->patience_ns)) ||
        (!(submit->keep_alive < 0) &&
         !mp_seconds_in(state, "keep_alive", submit->keep_alive, &options->keep_alive_ns)))
        return false;
    if (submit->service_class >= MP_SERVICE_COUNT) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "`service_class` must be 0 (interactive) or 1 (bulk), got %d",
                     submit->service_class);
        return false;
    }
    if (strcmp(submit->policy, "default") != 0 && !mp_policy_from_name(submit->policy, &options->policy)) {
        mp_raise_new(state, MP_INVALID_ARGUMENT,
                     "`policy` must be one of default, shared, pack, p2c, sequential, got \"%s\"", submit->policy);
        return false;
    }
    if (submit->fail_fast > MP_FAIL_LOAD) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "`fail_fast` must be 0 to 2, got %d", submit->fail_fast);
        return false;
    }
    options->priority = submit->priority;
    options->service_class = submit->service_class;
    options->tenant = submit->tenant;
    options->revision = submit->revision;
    options->uncounted = submit->uncounted;
    options->fail_fast = (mp_fail_fast)submit->fail_fast;
    return true;
}

uint64_t mp_wait_slice(const mp_state *state, uint64_t deadline_ns) {
    if (!mp_is_main_thread(state))
        return deadline_ns;
    uint64_t slice = mp_sys_now_ns() + SLICE_NS;
    return deadline_ns && deadline_ns < slice ? deadline_ns : slice;
}

int mp_wait_ticket(mp_state *state, mp_ticket *ticket, uint64_t seen, uint64_t deadline_ns, uint64_t *progress) {
    for (;;) {
        bool moved;
        Py_BEGIN_ALLOW_THREADS
            moved = mp_ticket_wait(ticket, seen, mp_wait_slice(state, deadline_ns), progress);
        Py_END_ALLOW_THREADS
        if (moved)
            return 1;
        if (PyErr_CheckSignals() < 0)
            return -1;
        if (deadline_ns && mp_sys_now_ns() >= deadline_ns)
            return 0;
    }
}

/* --- arrays --- */

static void release_ticket(PyObject *capsule) { mp_ticket_release(PyCapsule_GetPointer(capsule, "mpool.ticket")); }

PyObject *mp_borrowed_array(mp_ticket *ticket, int ndim, npy_intp *shape, int type, void *data) {
    PyObject *array = PyArray_SimpleNewFromData(ndim, shape, type, data);
    if (!array)
        return NULL;
    PyObject *capsule = PyCapsule_New(ticket, "mpool.ticket", release_ticket);
    if (!capsule) {
        Py_DECREF(array);
        return NULL;
    }
    mp_ticket_pin(ticket);
    /* PyArray_SetBaseObject takes ownership of the capsule, even on failure */
    if (PyArray_SetBaseObject((PyArrayObject *)array, capsule) < 0)
        Py_CLEAR(array);
    return array;
}

PyArrayObject *mp_array_in(mp_state *state, PyObject *object, int type, const char *name) {
    PyArray_Descr *descr = PyArray_DescrFromType(type);
    PyArrayObject *array = (PyArrayObject *)PyArray_FromAny(
        object, descr, 1, 1, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED, NULL); /* takes ownership of descr */
    if (!array && (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError))) {
        PyErr_Clear();
        mp_raise_new(state, MP_INVALID_ARGUMENT,
                     "`%s` must be a one-dimensional array of %s", name,
                     type == NPY_INT32   ? "int32"
                     : type == NPY_INT64 ? "int64"
                     : type == NPY_UINT8 ? "uint8"
                                         : "float32");
    }
    return array;
}

/* --- functions --- */

static PyObject *architectures(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < mp_arch_count(); i++) {
        const mp_arch_info *info = mp_arch_at(i);
        PyObject *row = Py_BuildValue("(ss)", info->name, mp_capability_get(info->capability)->name);
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *capabilities(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < MP_CAPABILITY_COUNT; i++) {
        const mp_capability_row *info = mp_capability_get((mp_capability)i);
        PyObject *row = Py_BuildValue("(s(ii)s)", info->name, info->queue_capacity[MP_SERVICE_INTERACTIVE],
                                      info->queue_capacity[MP_SERVICE_BULK], info->policy);
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *module_options(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    int count;
    const mp_option_row *rows = mp_option_rows(&count);
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < count; i++) {
        char value[512];
        mp_option_value(i, value, sizeof(value));
        PyObject *text = PyUnicode_DecodeFSDefault(value);
        PyObject *row = text ? Py_BuildValue("(sOss)", rows[i].variable, text, rows[i].def, rows[i].meaning) : NULL;
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
        Py_XDECREF(text);
    }
    return list;
}

static PyObject *cpu_features(void) {
    static const struct {
        uint32_t bit;
        const char *name;
    } known[] = {
        {MP_CPU_AVX2, "avx2"},
        {MP_CPU_AVX_VNNI, "avxvnni"},
        {MP_CPU_AVX512, "avx512"},
        {MP_CPU_AVX512_VNNI, "avx512vnni"},
        {MP_CPU_AVX512_BF16, "avx512bf16"},
        {MP_CPU_AMX, "amx"},
        {MP_CPU_NEON, "neon"},
        {MP_CPU_DOTPROD, "dotprod"},
        {MP_CPU_I8MM, "i8mm"},
        {MP_CPU_ARM_BF16, "bf16"},
    };
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < sizeof(known) / sizeof(known[0]); i++) {
        if (!(mp_cpu_features() & known[i].bit))
            continue;
        PyObject *name = PyUnicode_FromString(known[i].name);
        if (!name || PyList_Append(list, name) < 0)
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static PyObject *kernel_variants(void) {
    PyObject *variants = PyDict_New();
    for (int i = 0; variants && i < mp_kernels_count(); i++) {
        PyObject *variant = PyUnicode_FromString(mp_kernels_variant(i));
        if (!variant || PyDict_SetItemString(variants, mp_kernels_slot(i), variant) < 0)
            Py_CLEAR(variants);
        Py_XDECREF(variant);
    }
    return variants;
}

/* [{"number", "cpus"}]: the memory nodes whose CPUs this process may use. */
static PyObject *memory_nodes(const mp_topology *topology) {
    PyObject *nodes = PyList_New(0);
    for (int i = 0; nodes && i < topology->node_count; i++) {
        char cpus[1024];
        mp_cpu_set_text(&topology->nodes[i].cpus, cpus, sizeof(cpus));
        PyObject *node = Py_BuildValue("{s:i,s:s}", "number", topology->nodes[i].number, "cpus", cpus);
        if (!node || PyList_Append(nodes, node) < 0)
            Py_CLEAR(nodes);
        Py_XDECREF(node);
    }
    return nodes;
}

/* {"packages", "source", "classes": [{"cores", "cpus", "cpu_list", "speed", "used"}]}: the cores of this process. */
static PyObject *core_classes(const mp_cores *cores) {
    PyObject *classes = PyList_New(0);
    for (int i = 0; classes && i < cores->class_count; i++) {
        const mp_core_class *group = &cores->classes[i];
        char list[1024];
        mp_cpu_set_text(&group->cpus, list, sizeof(list));
        PyObject *one = Py_BuildValue("{s:i,s:i,s:s,s:d,s:O}", "cores", group->core_count, "cpus", group->cpu_count,
                                      "cpu_list", list, "speed", (double)group->speed, "used",
                                      group->used ? Py_True : Py_False);
        if (!one || PyList_Append(classes, one) < 0)
            Py_CLEAR(classes);
        Py_XDECREF(one);
    }
    return classes ? Py_BuildValue("{s:i,s:s,s:N}", "packages", cores->package_count, "source",
                                   mp_speed_source_name(cores->source), "classes", classes)
                   : NULL;
}

/* {"compute_threads", "threads_from", "cores", "nodes"} */
static PyObject *machine_config(mp_state *state) {
    mp_error error;
    mp_topology *topology = mp_alloc(sizeof(*topology), MP_TAG_MISC);
    if (!topology)
        return PyErr_NoMemory();
    if (mp_topology_read(topology, &error) != MP_OK) {
        mp_free(topology);
        return mp_raise(state, &error, NULL);
    }
    mp_threads_reason reason;
    int threads = mp_topology_threads(topology, &reason);
    PyObject *nodes = memory_nodes(topology), *cores = core_classes(&topology->cores), *result = NULL;
    if (nodes && cores)
        result = Py_BuildValue("{s:i,s:s,s:O,s:O}", "compute_threads", threads, "threads_from",
                               mp_threads_reason_name(reason), "cores", cores, "nodes", nodes);
    Py_XDECREF(nodes);
    Py_XDECREF(cores);
    mp_free(topology);
    return result;
}

static PyObject *module_config(PyObject *module, PyObject *none) {
    (void)none;
#if defined(__clang__)
    const char *compiler = "clang " __clang_version__;
#else
    const char *compiler = "gcc " __VERSION__;
#endif
#if defined(__SANITIZE_ADDRESS__)
    const char *sanitizer = "address";
#elif defined(__SANITIZE_THREAD__)
    const char *sanitizer = "thread";
#else
    const char *sanitizer = "";
#endif
    const char *why = "", *core;
    Py_BEGIN_ALLOW_THREADS /* loads the BLAS library and runs its self-test on first use */
        core = mp_blas_core(&why);
    Py_END_ALLOW_THREADS
    PyObject *features = cpu_features(), *kernels = kernel_variants(), *result = NULL;
    PyObject *machine = machine_config(mp_state_of_module(module));
    if (features && kernels && machine)
        result = Py_BuildValue(
            "{s:{s:s,s:s,s:O},s:O,s:{s:s,s:s,s:K},s:K,s:s,s:s,s:s,s:s}", "cpu", "name", mp_cpu_name(), "level",
            mp_cpu_level(), "features", features, "kernels", kernels, "blas", "core", core, "why", why,
            "multiply_adds", (unsigned long long)mp_blas_work(),
            "memory_bytes", (unsigned long long)mp_cpu_memory_bytes(), "compiler", compiler, "version",
            STRING(MPOOL_VERSION), "sanitizer", sanitizer, "numpy_abi", "numpy C API " STRING(NPY_API_VERSION));
    if (result && PyDict_Update(result, machine) < 0)
        Py_CLEAR(result);
    Py_XDECREF(features);
    Py_XDECREF(kernels);
    Py_XDECREF(machine);
    return result;
}

static PyObject *dequantize(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"dtype", "data", "n", NULL};
    mp_state *state = mp_state_of_module(module);
    const char *name;
    Py_buffer data;
    Py_ssize_t n;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sy*n:dequantize", names, &name, &data, &n))
        return NULL;
    PyObject *array = NULL;
    mp_dtype dtype;
    mp_wkind kind;
    uint64_t bytes = 0;
    if (!mp_dtype_from_name(name, &dtype)) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "there is no storage type \"%s\"", name);
    } else if (mp_dtype_is_scaled(dtype) || !mp_wmat_kind_for(dtype, MP_COMPUTE_AUTO, &kind)) {
        mp_raise_new(state, MP_INVALID_ARGUMENT,
                     "`dtype` must be a type of weights without separate scale tensors, got \"%s\"", name);
    } else if (n < 0 || !mp_dtype_row_bytes(dtype, n, &bytes)) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "`n` must be a multiple of %d, 0 or more, got %zd",
                     mp_dtype_get(dtype)->items, n);
    } else if (bytes != (uint64_t)data.len) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "%zd items of %s must have %llu bytes, got %zd", n, name,
                     (unsigned long long)bytes, data.len);
    } else if ((array = PyArray_SimpleNew(1, (npy_intp[]){n}, NPY_FLOAT32))) {
        float *out = PyArray_DATA((PyArrayObject *)array);
        Py_BEGIN_ALLOW_THREADS
            if (n)
                mp_dequantize_row(dtype, data.buf, n, out);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return array;
}

/* Converts n values, whole rows or blocks, through fp32. */
static mp_status convert(mp_dtype to, mp_dtype from, const uint8_t *data, Py_ssize_t n, uint8_t *out) {
    enum { SLICE = 2048 }; /* a multiple of every block */
    const mp_dtype_row *source = mp_dtype_get(from), *target = mp_dtype_get(to);
    float values[SLICE], back[SLICE];
    for (Py_ssize_t at = 0; at < n; at += SLICE) {
        const int64_t count = n - at < SLICE ? n - at : SLICE;
        uint8_t *written = out + at / target->items * target->bytes;
        mp_dequantize_row(from, data + at / source->items * source->bytes, count, values);
        if (!mp_kernels_get()->all_finite(values, count))
            return MP_FORMAT;
        mp_quantize_row(to, values, count, written);
        mp_dequantize_row(to, written, count, back); /* a scale may exceed f16 */
        if (!mp_kernels_get()->all_finite(back, count))
            return MP_FORMAT;
    }
    return MP_OK;
}

static PyObject *quantize(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"dtype", "source", "data", "n", NULL};
    mp_state *state = mp_state_of_module(module);
    const char *target, *source;
    Py_buffer data;
    Py_ssize_t n;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ssy*n:quantize", names, &target, &source, &data, &n))
        return NULL;
    PyObject *result = NULL;
    mp_dtype to, from;
    mp_wkind kind;
    uint64_t bytes = 0, size = 0;
    if (!mp_dtype_from_name(target, &to) || !mp_can_quantize(to)) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "mpool does not quantise to \"%s\"", target);
    } else if (!mp_dtype_from_name(source, &from) || mp_dtype_is_scaled(from) ||
               !mp_wmat_kind_for(from, MP_COMPUTE_AUTO, &kind)) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "there is no storage type \"%s\" of weights", source);
    } else if (n < 0 || n > (PY_SSIZE_T_MAX >> 4) || !mp_dtype_row_bytes(from, n, &bytes) ||
               !mp_dtype_row_bytes(to, n, &size)) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "`n` must be a multiple of %d and %d, 0 or more, got %zd",
                     mp_dtype_get(from)->items, mp_dtype_get(to)->items, n);
    } else if (bytes != (uint64_t)data.len) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "%zd items of %s must have %llu bytes, got %zd", n, source,
                     (unsigned long long)bytes, data.len);
    } else if ((result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size))) {
        uint8_t *out = (uint8_t *)PyBytes_AsString(result);
        mp_status status;
        Py_BEGIN_ALLOW_THREADS
            status = convert(to, from, data.buf, n, out);
        Py_END_ALLOW_THREADS
        if (status != MP_OK) {
            Py_CLEAR(result);
            mp_raise_new(state, status, "the data has a value that is NaN, infinite or outside the range of %s",
                         target);
        }
    }
    PyBuffer_Release(&data);
    return result;
}

static void append_record(const mp_log_record *record, void *arg) {
    PyObject **list = arg;
    if (!*list)
        return;
    PyObject *text = PyUnicode_DecodeUTF8(record->text, (Py_ssize_t)strlen(record->text), "replace");
    PyObject *row = text ? Py_BuildValue("(iO)", record->level, text) : NULL;
    if (!row || PyList_Append(*list, row) < 0)
        Py_CLEAR(*list);
    Py_XDECREF(row);
    Py_XDECREF(text);
}

static PyObject *drain_log(PyObject *module, PyObject *none) {
    (void)none;
    PyObject *list = PyList_New(0);
    MP_BEGIN_EXCLUSIVE(module); /* only one thread at a time may drain */
    (void)module;
    mp_log_drain(append_record, &list);
    MP_END_EXCLUSIVE();
    return list;
}

/* --- events --- */

static PyObject *event_names(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < MP_EVENT_COUNT; i++) {
        PyObject *name = PyUnicode_FromString(mp_event_name((mp_event_kind)i));
        if (!name || PyList_Append(list, name) < 0)
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static PyObject *want_events(PyObject *module, PyObject *kinds) {
    (void)module;
    unsigned long wanted = PyLong_AsUnsignedLong(kinds);
    if (wanted == (unsigned long)-1 && PyErr_Occurred())
        return NULL;
    mp_events_want((uint32_t)wanted);
    Py_RETURN_NONE;
}

static PyObject *drain_events(PyObject *module, PyObject *none) {
    (void)none;
    PyObject *list = PyList_New(0);
    MP_BEGIN_EXCLUSIVE(module); /* only one thread at a time may take events */
    (void)module;
    mp_event event;
    while (list && mp_events_take(&event)) {
        PyObject *key = PyUnicode_DecodeUTF8(event.key, (Py_ssize_t)strlen(event.key), "replace");
        PyObject *cause = PyUnicode_DecodeUTF8(event.cause, (Py_ssize_t)strlen(event.cause), "replace");
        PyObject *row = key && cause
                            ? Py_BuildValue("(KiOIKsdO)", (unsigned long long)event.registry, (int)event.kind, key,
                                            event.worker, (unsigned long long)event.request,
                                            mp_status_find(event.status)->name, (double)event.time_ns * 1e-9, cause)
                            : NULL;
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
        Py_XDECREF(cause);
        Py_XDECREF(key);
    }
    MP_END_EXCLUSIVE();
    return list;
}

static PyObject *events_dropped(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    return PyLong_FromUnsignedLongLong(mp_events_dropped());
}

static PyObject *metrics(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    static const char *const rows[][2] = {
#define MP_METRIC(name, meaning) {#name, meaning},
#include "registry/metrics.def"
#undef MP_METRIC
    };
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < sizeof(rows) / sizeof(rows[0]); i++) {
        PyObject *row = Py_BuildValue("(ss)", rows[i][0], rows[i][1]);
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *set_log_level(PyObject *module, PyObject *level) {
    (void)module;
    long value = PyLong_AsLong(level);
    if (value == -1 && PyErr_Occurred())
        return NULL;
    mp_log_set_level(value < 0 ? 0 : value > MP_LOG_OFF ? MP_LOG_OFF : (int)value);
    Py_RETURN_NONE;
}

static PyObject *tenant_number(PyObject *module, PyObject *name) {
    (void)module;
    char *bytes;
    Py_ssize_t count;
    if (PyBytes_AsStringAndSize(name, &bytes, &count) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(mp_tenant_of(bytes, (size_t)count));
}

/* --- stamps of files (mpool/models/files.py) --- */

typedef struct stamp {
    PyObject *key; /* owned: keeps `path` valid without the GIL */
    const char *path;
    mp_file_kind kind;
    mp_file_id id;
} stamp;

/* Convert a row of a dictionary of stamps. Returns false, perhaps with an exception, if this function cannot. */
static bool convert_stamp(PyObject *key, PyObject *value, stamp *row) {
    const Py_ssize_t size = value == Py_None ? 0 : PyTuple_Size(value);
    Py_ssize_t length;
    uint64_t numbers[4];
    if (size == 1) /* a pointer, of kind UNKNOWN: the caller reads it */
        return true;
    if (size != 0 && size != 3 && size != 4)
        return false;
    row->path = PyUnicode_AsUTF8AndSize(key, &length);
    if (!row->path || strlen(row->path) != (size_t)length)
        return false;
    for (Py_ssize_t i = 0; i < size; i++)
        numbers[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(value, i));
    row->kind = size == 0 ? MP_FILE_MISSING : size == 3 ? MP_FILE_OTHER : MP_FILE_REGULAR;
    if (size != 0)
        row->id = (mp_file_id){.device = numbers[0], .inode = numbers[1], .size = size == 4 ? numbers[2] : 0,
                               .mtime_ns = numbers[size - 1]};
    row->key = key;
    Py_INCREF(key);
    return !PyErr_Occurred();
}

static bool is_current(const stamp *row) {
    mp_file_id now = {0};
    if (row->kind == MP_FILE_UNKNOWN)
        return true;
    if (mp_sys_find(row->path, &now) != row->kind)
        return false;
    if (row->kind == MP_FILE_OTHER)
        now.size = 0; /* the size of a folder is no part of its stamp */
    return mp_file_id_same(&now, &row->id);
}

static PyObject *are_current(PyObject *module, PyObject *stamps) {
    (void)module;
    const Py_ssize_t count = PyDict_Size(stamps);
    Py_ssize_t at = 0, converted = 0;
    PyObject *key, *value;
    if (count < 0)
        return NULL;
    stamp *rows = PyMem_Calloc((size_t)count + 1, sizeof *rows);
    if (!rows)
        return PyErr_NoMemory();
    bool current = true;
    while (current && converted < count && PyDict_Next(stamps, &at, &key, &value))
        current = convert_stamp(key, value, &rows[converted++]);
    PyErr_Clear();
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; current && i < converted; i++)
        current = is_current(&rows[i]);
    Py_END_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < converted; i++)
        Py_XDECREF(rows[i].key);
    PyMem_Free(rows);
    return PyBool_FromLong(current);
}

static PyMethodDef functions[] = {
    {"status_table", mp_status_table, METH_NOARGS,
     "Rows of status.def: number, name, text, Python class, built-in base."},
    {"architectures", architectures, METH_NOARGS, "Rows of archs.def: name, capability."},
    {"capabilities", capabilities, METH_NOARGS, "Rows of capabilities.def: name, queue capacities, policy."},
    {"options", module_options, METH_NOARGS, "Rows of options.def: variable, value in use, default, meaning."},
    {"config", module_config, METH_NOARGS,
     "CPU, kernels, BLAS, compute threads and memory in use; compiler and versions of this build."},
    {"dequantize", MP_METHOD(dequantize), METH_VARARGS | METH_KEYWORDS, "n items of a stored row as float32 (n,)."},
    {"quantize", MP_METHOD(quantize), METH_VARARGS | METH_KEYWORDS,
     "Convert n items of type `source` to bytes of type `dtype`."},
    {"drain_log", drain_log, METH_NOARGS, "Take the records of the core's log ring, (level, text), oldest first."},
    {"set_log_level", set_log_level, METH_O, "Record messages of this logging level and above."},
    {"metrics", metrics, METH_NOARGS, "Rows of metrics.def: name, meaning."},
    {"event_names", event_names, METH_NOARGS, "Kinds of events, in the order of their bits."},
    {"want_events", want_events, METH_O, "Record events of these kinds (one bit each) from now on."},
    {"drain_events", drain_events, METH_NOARGS,
     "Take the recorded events, oldest first: registry number, kind, key, worker, request, status, seconds, cause."},
    {"events_dropped", events_dropped, METH_NOARGS, "Number of events that were dropped because the queue was full."},
    {"tenant_number", tenant_number, METH_O, "Number of a tenant in this process, from its name as bytes."},
    {"are_current", are_current, METH_O,
     "False if a file or folder has another stamp than this dictionary says (mpool.models.files), or cannot be asked."},
    {"read_gguf", mp_read_gguf, METH_O, "Parse the header of a GGUF file and of its splits."},
    {NULL, NULL, 0, NULL},
};

/* --- the module --- */

#if defined(__APPLE__)
#define OPENBLAS_FOLDER "_libs/lib" /* the library finds those that it needs in _libs/.dylibs */
#define OPENBLAS_ENDING ".dylib"
#else
#define OPENBLAS_FOLDER "_libs"
#define OPENBLAS_ENDING ".so"
#endif

/* Find the OpenBLAS that was installed next to the module. */
static bool find_openblas(PyObject *module, char *path, size_t size) {
    PyObject *file = PyModule_GetFilenameObject(module), *bytes = NULL;
    bool found = false;
    if (file && PyUnicode_FSConverter(file, &bytes)) {
        const char *name = PyBytes_AsString(bytes), *slash = strrchr(name, '/');
        int folder = slash ? (int)(slash - name) + 1 : 0;
        int written = snprintf(path, size, "%.*s" OPENBLAS_FOLDER, folder, name);
        DIR *libraries = written > 0 && (size_t)written < size ? opendir(path) : NULL;
        for (struct dirent *entry; libraries && !found && (entry = readdir(libraries));) {
            const char *end = strrchr(entry->d_name, '.');
            found = end && strcmp(end, OPENBLAS_ENDING) == 0 && strstr(entry->d_name, "openblas") &&
                    (size_t)snprintf(path, size, "%.*s" OPENBLAS_FOLDER "/%s", folder, name, entry->d_name) < size;
        }
        if (libraries)
            closedir(libraries);
    }
    PyErr_Clear(); /* a module without a file name is built in and has no libraries next to it */
    Py_XDECREF(bytes);
    Py_XDECREF(file);
    return found;
}

/* Initialise the core once per process, before any other thread of the core exists. */
static bool init_core(mp_state *state, PyObject *module) {
    static _Atomic int initialised;
    if (atomic_exchange(&initialised, 1))
        return true;
    mp_error error;
    if (mp_fork_init(&error) != MP_OK || mp_options_init(&error) != MP_OK ||
        mp_cpu_init(mp_options_get()->cpu, &error) != MP_OK ||
        mp_topology_check(mp_options_get()->nodes, &error) != MP_OK) {
        atomic_store(&initialised, 0);
        mp_raise(state, &error, NULL);
        return false;
    }
    mp_tenant_init();
    mp_kernels_init();
    mp_file_map_init();
    if (mp_options_get()->blas[0]) {
        mp_blas_set_path(mp_options_get()->blas);
        return true;
    }
    char library[MP_BLAS_PATH];
    if (find_openblas(module, library, sizeof(library)))
        mp_blas_set_path(library);
    return true;
}

static bool add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type) {
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type && PyModule_AddType(module, *type) == 0;
}

/* Signal handlers run in the thread that `threading` calls the main thread. */
static bool find_main_thread(mp_state *state) {
    PyObject *threading = PyImport_ImportModule("threading");
    PyObject *thread = threading ? PyObject_CallMethod(threading, "main_thread", NULL) : NULL;
    PyObject *ident = thread ? PyObject_GetAttrString(thread, "ident") : NULL;
    state->main_thread = ident ? PyLong_AsUnsignedLong(ident) : 0;
    Py_XDECREF(ident);
    Py_XDECREF(thread);
    Py_XDECREF(threading);
    return !PyErr_Occurred();
}

static int exec_module(PyObject *module) {
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        PyErr_SetString(PyExc_ImportError,
                        "mpool._core must be imported in the main interpreter, because numpy needs it");
        return -1;
    }
    if (PyArray_ImportNumPyAPI() < 0)
        return -1;
    mp_state *state = mp_state_of_module(module);
    if (!find_main_thread(state) || !init_core(state, module) ||
        !add_type(module, &mp_spec_type_spec, &state->spec_type) ||
        !add_type(module, &mp_gguf_type_spec, &state->gguf_type) ||
        !add_type(module, &mp_bpe_type_spec, &state->bpe_type) ||
        !add_type(module, &mp_matrix_type_spec, &state->matrix_type) ||
        !add_type(module, &mp_notifier_type_spec, &state->notifier_type) ||
        !add_type(module, &mp_ticket_type_spec, &state->ticket_type) ||
        !add_type(module, &mp_waiter_type_spec, &state->waiter_type) ||
        !add_type(module, &mp_registry_type_spec, &state->registry_type) ||
        !add_type(module, &mp_search_type_spec, &state->search_type) ||
        !add_type(module, &mp_maxsim_type_spec, &state->maxsim_type))
        return -1;
    return PyModule_AddStringConstant(module, "__version__", STRING(MPOOL_VERSION));
}

static int traverse_module(PyObject *module, visitproc visit, void *arg) {
    mp_state *state = mp_state_of_module(module);
    Py_VISIT(state->errors);
    Py_VISIT(state->spec_type);
    Py_VISIT(state->gguf_type);
    Py_VISIT(state->bpe_type);
    Py_VISIT(state->matrix_type);
    Py_VISIT(state->notifier_type);
    Py_VISIT(state->ticket_type);
    Py_VISIT(state->waiter_type);
    Py_VISIT(state->registry_type);
    Py_VISIT(state->search_type);
    Py_VISIT(state->maxsim_type);
    return 0;
}

static int clear_module(PyObject *module) {
    mp_state *state = mp_state_of_module(module);
    Py_CLEAR(state->errors);
    Py_CLEAR(state->spec_type);
    Py_CLEAR(state->gguf_type);
    Py_CLEAR(state->bpe_type);
    Py_CLEAR(state->matrix_type);
    Py_CLEAR(state->notifier_type);
    Py_CLEAR(state->ticket_type);
    Py_CLEAR(state->waiter_type);
    Py_CLEAR(state->registry_type);
    Py_CLEAR(state->search_type);
    Py_CLEAR(state->maxsim_type);
    return 0;
}

static void free_module(void *module) { clear_module(module); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, exec_module},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mpool._core",
    .m_doc = "The C core of mpool. Private: use the package mpool instead.",
    .m_size = sizeof(mp_state),
    .m_methods = functions,
    .m_slots = slots,
    .m_traverse = traverse_module,
    .m_clear = clear_module,
    .m_free = free_module,
};

mp_state *mp_state_of_module(PyObject *module) { return PyModule_GetState(module); }

mp_state *mp_state_of_type(PyTypeObject *type) { return PyType_GetModuleState(type); }

PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
