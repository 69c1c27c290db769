/* registry_rows.c: the models of a Registry as Python objects, with their workers, latencies and facts. */
#include "models/model.h"
#include "python/binding.h"

static PyObject *facts_of(const mp_model_facts *facts) {
    return Py_BuildValue("{s:s,s:s,s:s,s:z,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:z,s:L,s:L,s:N}", "architecture",
                         facts->architecture, "compute", facts->compute, "weights", mp_matrices_name(facts->weights),
                         "kv_dtype", facts->kv_dtype, "kv_token_bytes", (long long)facts->kv_token_bytes,
                         "sequence_state_bytes", (long long)facts->sequence_state_bytes, "context_length",
                         (long long)facts->context_length, "vocab", (long long)facts->vocab, "hidden_size",
                         (long long)facts->hidden_size, "layers", (long long)facts->layers, "output_size",
                         (long long)facts->output_size, "parameters", (long long)facts->parameters, "weight_bytes",
                         (long long)facts->weight_bytes, "draft_bytes", (long long)facts->draft_bytes, "experts",
                         mp_matrices_name(facts->experts), "expert_bytes", (long long)facts->expert_bytes,
                         "expert_packed_bytes", (long long)facts->expert_packed_bytes,
                         "thrashing", PyBool_FromLong(facts->thrashing));
}

static PyObject *worker_row(const mp_worker_info *info) {
    return Py_BuildValue("{s:I,s:s,s:i,s:K,s:d,s:d,s:K,s:K,s:i,s:i}", "id", info->id, "state", info->state, "running",
                         info->running, "served", (unsigned long long)info->served, "busy_seconds",
                         (double)info->busy_ns * 1e-9, "idle_seconds", (double)info->idle_ns * 1e-9, "engine_bytes",
                         (unsigned long long)info->engine_bytes, "predicted_bytes",
                         (unsigned long long)info->predicted_bytes, "process", info->process, "node", info->node);
}

/* Latencies of completed requests in seconds: count, sum, min, max, and [(upper bound, count)] without empty buckets.
 */
static PyObject *latency_dict(const mp_histogram *histogram) {
    PyObject *buckets = PyList_New(0);
    for (int i = 0; buckets && i < MP_HISTOGRAM_BUCKETS; i++) {
        if (!histogram->bucket[i])
            continue;
        bool last = i == MP_HISTOGRAM_BUCKETS - 1;
        PyObject *pair = Py_BuildValue("(dK)", last ? Py_HUGE_VAL : (double)mp_histogram_bound(i) * 1e-9,
                                       (unsigned long long)histogram->bucket[i]);
        if (!pair || PyList_Append(buckets, pair) < 0)
            Py_CLEAR(buckets);
        Py_XDECREF(pair);
    }
    if (!buckets)
        return NULL;
    return Py_BuildValue("{s:K,s:d,s:d,s:d,s:N}", "count", (unsigned long long)histogram->count, "sum",
                         (double)histogram->sum_ns * 1e-9, "min", (double)histogram->min_ns * 1e-9, "max",
                         (double)histogram->max_ns * 1e-9, "buckets", buckets);
}

typedef struct row_copy {
    mp_entry_info info;
    mp_model_facts facts;
} row_copy;
typedef struct row_copies {
    row_copy *rows;
    size_t count, capacity;
    bool refused;
} row_copies;

/* Creates no object and takes no lock of Python: an unload of the model waits for the visitor. */
static void copy_entry(void *arg, const mp_entry_info *info) {
    row_copies *copies = arg;
    if (copies->count == copies->capacity) {
        size_t larger = copies->capacity ? 2 * copies->capacity : 8;
        row_copy *grown = mp_realloc(copies->rows, larger * sizeof(*grown), MP_TAG_MISC);
        copies->refused |= !grown;
        if (!grown)
            return;
        copies->rows = grown;
        copies->capacity = larger;
    }
    row_copy *row = &copies->rows[copies->count++];
    row->info = *info;
    if (info->model)
        mp_model_get_facts(info->model, &row->facts);
}

static PyObject *counts_of(const uint64_t counts[MP_REASON_COUNT]) {
    PyObject *found = PyDict_New();
    for (int i = 0; found && i < MP_REASON_COUNT; i++) {
        PyObject *count = PyLong_FromUnsignedLongLong(counts[i]);
        if (!count || PyDict_SetItemString(found, mp_reason_name((mp_reason)i), count) < 0)
            Py_CLEAR(found);
        Py_XDECREF(count);
    }
    return found;
}

static void append_entry(PyObject **list, const row_copy *copy) {
    const mp_entry_info *info = &copy->info;
    if (!*list)
        return;
    PyObject *workers = PyList_New(0), *row = NULL;
    for (int i = 0; workers && i < info->worker_count; i++) {
        PyObject *worker = worker_row(&info->worker[i]);
        if (!worker || PyList_Append(workers, worker) < 0)
            Py_CLEAR(workers);
        Py_XDECREF(worker);
    }
    PyObject *facts = info->model ? facts_of(&copy->facts) : PyDict_New(), *latency = latency_dict(&info->latency);
    if (workers && facts && latency)
        row = Py_BuildValue(
            "{s:s,s:s,s:s,s:s,s:s,s:i,s:i,s:i,s:i,s:i,s:(ii),s:(ii),s:O,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:d,"
            "s:d,s:s,s:d,s:i,s:K,s:K,s:O,s:O,s:O,s:d,s:K,s:d,s:N,s:N,s:N}",
            "key", info->key, "capability", mp_capability_get(info->capability)->name, "state", info->state, "breaker",
            info->breaker, "policy", mp_policy_name(info->policy), "workers", info->workers, "busy", info->busy, "dead",
            info->dead, "queued", info->queued, "running", info->running, "waiting", info->waiting[0], info->waiting[1],
            "capacity", info->capacity[0], info->capacity[1], "pinned", info->pinned ? Py_True : Py_False,
            "model_bytes", (unsigned long long)info->model_bytes, "predicted_bytes",
            (unsigned long long)info->predicted_bytes, "engine_bytes", (unsigned long long)info->engine_bytes,
            "state_bytes", (unsigned long long)info->states.state_bytes, "snapshot_bytes",
            (unsigned long long)info->states.snapshot_bytes, "snapshots",
            (unsigned long long)info->states.snapshots, "calls",
            (unsigned long long)info->accepted, "errors", (unsigned long long)info->errors, "idle_seconds",
            (double)info->idle_ns * 1e-9, "keep_alive",
            info->keep_alive_ns == MP_FOREVER ? Py_HUGE_VAL : (double)info->keep_alive_ns * 1e-9, "last_error",
            info->last_error == MP_OK ? "" : mp_status_find(info->last_error)->name, "arrivals", info->arrivals,
            "predicted_workers", info->predicted, "units_in", (unsigned long long)info->units_in, "units_out",
            (unsigned long long)info->units_out, "worker", workers, "latency", latency, "facts", facts,
            "queue_full_seconds", (double)(info->full_ns[0] + info->full_ns[1]) * 1e-9, "rows",
            (unsigned long long)info->rows, "load_seconds", (double)info->load_ns * 1e-9, "deaths",
            counts_of(info->reasons.deaths), "retries", counts_of(info->reasons.retries), "evictions",
            counts_of(info->reasons.evictions));
    if (!row || PyList_Append(*list, row) < 0)
        Py_CLEAR(*list);
    Py_XDECREF(row);
    Py_XDECREF(facts);
    Py_XDECREF(latency);
    Py_XDECREF(workers);
}

PyObject *mp_registry_rows(mp_state *state, mp_registry *registry) {
    mp_error error;
    row_copies copies = {0};
    /* Keeps the GIL, because the copy is quick. A thread that holds a registry lock never waits for the GIL. */
    mp_status status = mp_registry_visit(registry, copy_entry, &copies, &error);
    if (status == MP_OK && copies.refused)
        status = mp_fail(&error, MP_MEMORY_EXHAUSTED, "the system refused memory for the list of models");
    PyObject *list = status == MP_OK ? PyList_New(0) : NULL;
    for (size_t i = 0; i < copies.count; i++)
        append_entry(&list, &copies.rows[i]);
    mp_free(copies.rows);
    return status == MP_OK ? list : mp_raise(state, &error, NULL);
}
