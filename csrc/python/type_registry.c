/* type_registry.c: the Python type Registry, for model keys and requests (registry/registry.h). */
#include <math.h>

#include <stdio.h> /* snprintf only */
#include <string.h>

#include "base/cpu.h"
#include "base/options.h"
#include "isolation/isolation.h"
#include "models/model.h"
#include "python/binding.h"

typedef struct registry_object {
    PyObject_HEAD mp_registry *registry;
    uint64_t grace_ns;
    uint64_t start_ns, stall_ns; /* limits of worker processes: 3/4 of load_timeout and stall_timeout */
} registry_object;

static mp_registry *registry_of(PyObject *self) { return ((registry_object *)self)->registry; }

mp_registry *mp_registry_of(mp_state *state, PyObject *object) {
    if (PyObject_TypeCheck(object, state->registry_type))
        return registry_of(object);
    PyErr_Format(PyExc_TypeError, "expected a Registry, got %R", (PyObject *)Py_TYPE(object));
    return NULL;
}

/* --- life --- */

/* Iterate over a dict whose keys are capabilities; `put` stores each value. Returns false with an exception. */
static bool each_capability(mp_state *state, const char *name, PyObject *dict, mp_registry_config *config,
                            bool (*put)(mp_state *state, const char *name, PyObject *value, mp_capability capability,
                                        mp_registry_config *config)) {
    if (dict == Py_None)
        return true;
    if (!PyDict_Check(dict)) {
        PyErr_Format(PyExc_TypeError, "`%s` must be a dict whose keys are names of capabilities, got %R", name,
                     (PyObject *)Py_TYPE(dict));
        return false;
    }
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(dict, &at, &key, &value)) {
        mp_capability capability;
        const char *text = PyUnicode_AsUTF8AndSize(key, NULL);
        if (!text)
            return false;
        if (!mp_capability_from_name(text, &capability)) {
            mp_raise_new(state, MP_INVALID_ARGUMENT, "`%s`: there is no capability \"%s\"", name, text);
            return false;
        }
        if (!put(state, text, value, capability, config))
            return false;
    }
    return true;
}

/* Store a queue capacity: one number for all service classes, or a tuple with one number for each class. */
static bool put_capacity(mp_state *state, const char *name, PyObject *value, mp_capability capability,
                         mp_registry_config *config) {
    long capacities[MP_SERVICE_COUNT] = {0};
    if (PyTuple_Check(value)) {
        if (!PyArg_ParseTuple(value, "ll;queue_capacity: interactive requests, bulk requests", &capacities[0],
                              &capacities[1]))
            return false;
    } else {
        capacities[0] = capacities[1] = PyLong_AsLong(value);
        if (capacities[0] == -1 && PyErr_Occurred())
            return false;
    }
    for (int i = 0; i < MP_SERVICE_COUNT; i++) {
        if (capacities[i] < 1 || capacities[i] > 1000000) {
            mp_raise_new(state, MP_INVALID_ARGUMENT, "`queue_capacity` of %s must be 1 to 1,000,000, got %ld", name,
                         capacities[i]);
            return false;
        }
        config->queue_capacity[capability][i] = (int)capacities[i];
    }
    return true;
}

static bool put_policy(mp_state *state, const char *name, PyObject *value, mp_capability capability,
                       mp_registry_config *config) {
    const char *policy = PyUnicode_AsUTF8AndSize(value, NULL);
    if (!policy)
        return false;
    if (mp_policy_from_name(policy, &config->policy[capability]))
        return true;
    mp_raise_new(state, MP_INVALID_ARGUMENT, "`policy` of %s must be one of shared, pack, p2c, sequential, got \"%s\"",
                 name, policy);
    return false;
}

/* Convert `chaos`: a tuple of a seed and five probabilities, or None. Returns false with an exception. */
static bool chaos_in(PyObject *value, mp_chaos_rule *rule) {
    unsigned long long seed;
    if (value == Py_None)
        return true;
    if (!PyTuple_Check(value)) {
        PyErr_Format(PyExc_TypeError, "`chaos` must be None or a tuple of a seed and five probabilities, got %R",
                     (PyObject *)Py_TYPE(value));
        return false;
    }
    if (!PyArg_ParseTuple(value, "Kddddd;chaos: seed, fail, stall, die, slow, memory", &seed, &rule->fail, &rule->stall,
                          &rule->die, &rule->slow, &rule->memory))
        return false;
    rule->seed = seed;
    return true;
}

static PyObject *registry_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"threads",
                            "memory_bytes",
                            "step_budget",
                            "shutdown_grace",
                            "load_timeout",
                            "load_ceiling",
                            "stall_timeout",
                            "request_timeout",
                            "keep_alive",
                            "maintenance_interval",
                            "batch_wait",
                            "breaker_window",
                            "breaker_rest",
                            "breaker_threshold",
                            "max_workers",
                            "queue_capacity",
                            "policy",
                            "chaos",
                            "predictive_scaling",
                            "scale_timeout",
                            "background",
                            NULL};
    mp_state *state = mp_state_of_type(type);
    mp_registry_config config = {.threads = 0};
    long long memory = 0;
    /* durations in seconds; -INFINITY: not passed, keep the default */
    struct {
        const char *name;
        double seconds;
        uint64_t *ns;
    } times[] = {
        {"step_budget", -INFINITY, &config.step_budget_ns},
        {"shutdown_grace", -INFINITY, &config.shutdown_grace_ns},
        {"load_timeout", -INFINITY, &config.load_timeout_ns},
        {"load_ceiling", -INFINITY, &config.load_ceiling_ns},
        {"stall_timeout", -INFINITY, &config.stall_timeout_ns},
        {"request_timeout", -INFINITY, &config.patience_ns},
        {"keep_alive", -INFINITY, &config.keep_alive_ns},
        {"maintenance_interval", -INFINITY, &config.maintenance_every_ns},
        {"batch_wait", -INFINITY, &config.batch_wait_ns},
        {"breaker_window", -INFINITY, &config.breaker_window_ns},
        {"breaker_rest", -INFINITY, &config.breaker_backoff_ns},
    };
    enum { TIMES = sizeof(times) / sizeof(times[0]) };
    PyObject *capacity = Py_None, *policy = Py_None, *chaos = Py_None;
    int predictive_scaling = 0, scale_timeout = 0, background = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$iLdddddddddddiiOOOppp:Registry", names, &config.threads, &memory,
                                     &times[0].seconds, &times[1].seconds, &times[2].seconds, &times[3].seconds,
                                     &times[4].seconds, &times[5].seconds, &times[6].seconds, &times[7].seconds,
                                     &times[8].seconds, &times[9].seconds, &times[10].seconds,
                                     &config.breaker_threshold, &config.max_workers, &capacity, &policy, &chaos,
                                     &predictive_scaling, &scale_timeout, &background))
        return NULL;
    if (memory < 0) {
        mp_raise_new(state, MP_INVALID_ARGUMENT,
                     "`memory_bytes` must be 1 to 2^63 - 1, or 0 for the limit of the process, got %lld", memory);
        return NULL;
    }
    config.memory_limit = (uint64_t)memory;
    config.predictive_scaling = predictive_scaling;
    config.scale_timeout = scale_timeout;
    config.background = background;
    for (int i = 0; i < TIMES; i++)
        if (times[i].seconds != -INFINITY && !mp_seconds_in(state, times[i].name, times[i].seconds, times[i].ns))
            return NULL;
    if (!each_capability(state, "queue_capacity", capacity, &config, put_capacity) ||
        !each_capability(state, "policy", policy, &config, put_policy) || !chaos_in(chaos, &config.chaos))
        return NULL;
    registry_object *self = (registry_object *)PyType_GenericAlloc(type, 0);
    mp_error error;
    if (self && mp_registry_create(&config, &self->registry, &error) != MP_OK) {
        mp_raise(state, &error, NULL);
        Py_CLEAR(self);
    }
    if (self)
        self->grace_ns = config.shutdown_grace_ns ? config.shutdown_grace_ns : MP_SHUTDOWN_GRACE_NS;
    if (self) {
        self->start_ns = config.load_timeout_ns / 4 * 3;
        self->stall_ns = config.stall_timeout_ns / 4 * 3;
    }
    return (PyObject *)self;
}

/* True while the interpreter shuts down. Py_IsFinalizing is too new for the limited API. */
static bool is_finalizing(void) {
    PyObject *type, *value, *traceback, *function = PySys_GetObject("is_finalizing"); /* NULL: sys is cleared already */
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *result = function ? PyObject_CallNoArgs(function) : NULL;
    bool finalizing = result != Py_False;
    Py_XDECREF(result);
    PyErr_Restore(type, value, traceback); /* also drops an exception of the call */
    return finalizing;
}

static void registry_dealloc(PyObject *object) {
    registry_object *self = (registry_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    mp_registry *registry = self->registry;
    if (registry) {
        /* No thread waits on this registry: a ticket references its registry, and a running method references self.
         * Core threads never take the GIL, so closing is safe with the GIL held. Keep the GIL during shutdown of the
         * interpreter, when releasing it is not safe. */
        PyThreadState *saved = is_finalizing() ? NULL : PyEval_SaveThread();
        mp_registry_close(registry, 0);
        mp_registry_destroy(registry);
        if (saved)
            PyEval_RestoreThread(saved);
    }
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *registry_begin_shutdown(PyObject *self, PyObject *none) {
    (void)none;
    mp_registry_begin_shutdown(registry_of(self));
    Py_RETURN_NONE;
}

static PyObject *registry_close(PyObject *self, PyObject *none) {
    (void)none;
    Py_BEGIN_ALLOW_THREADS
        mp_registry_close(registry_of(self), ((registry_object *)self)->grace_ns);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *registry_after_fork(PyObject *self, PyObject *none) {
    (void)none;
    mp_state *state = mp_state_of(self);
    state->main_thread = PyThread_get_thread_ident(); /* the forking thread is the main thread of the child */
    Py_RETURN_NONE;
}

/* --- entries --- */

static bool compute_in(mp_state *state, const char *name, mp_compute *compute) {
    static const struct {
        const char *name;
        mp_compute compute;
    } known[] = {
        {"auto", MP_COMPUTE_AUTO}, {"float32", MP_COMPUTE_F32}, {"bfloat16", MP_COMPUTE_BF16}, {"int8", MP_COMPUTE_I8}};
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (strcmp(known[i].name, name) == 0) {
            *compute = known[i].compute;
            return true;
        }
    }
    mp_raise_new(state, MP_INVALID_ARGUMENT, "`compute` must be one of auto, float32, bfloat16, int8, got \"%s\"",
                 name);
    return false;
}

enum { MAX_ARGUMENTS = 16, OPTION_BYTES = 512 };

/* Build the environment of worker processes: `given`, a tuple of bytes objects "NAME=value", with mpool's options set
 * to the values that this process uses. Python passes the variables: to read `environ` here, without a lock that setenv
 * takes too, would be a race. Free *options and the result with PyMem_Free. Returns NULL with an exception. */
static const char **make_environment(mp_state *state, PyObject *given, char (**options)[OPTION_BYTES]) {
    const Py_ssize_t count = PyTuple_Size(given);
    int rows, at = 0;
    const mp_option_row *row = mp_option_rows(&rows);
    const char **made = PyMem_Malloc(((size_t)count + (size_t)rows + 1) * sizeof(*made));
    *options = PyMem_Malloc((size_t)rows * sizeof(**options));
    bool ok = made && *options;
    if (!ok)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; ok && i < count; i++) {
        PyObject *variable = PyTuple_GetItem(given, i);
        const char *text = PyBytes_Check(variable) ? PyBytes_AsString(variable) : NULL;
        bool own = false;
        if (!text || strlen(text) != (size_t)PyBytes_Size(variable)) {
            ok = false;
            mp_raise_new(state, MP_INVALID_ARGUMENT, "`environment` must be a sequence of bytes without NUL");
        }
        for (int r = 0; ok && r < rows && !own; r++) {
            size_t length = strlen(row[r].variable);
            own = strncmp(text, row[r].variable, length) == 0 && text[length] == '=';
        }
        if (ok && !own)
            made[at++] = text;
    }
    for (int r = 0; ok && r < rows; r++) {
        char value[OPTION_BYTES / 2];
        mp_option_value(r, value, sizeof(value));
        bool cpu = strcmp(row[r].variable, "MPOOL_CPU") == 0; /* same CPU level: the child must compute the same bits */
        snprintf((*options)[r], OPTION_BYTES, "%s=%s", row[r].variable, cpu ? mp_cpu_level() : value);
        made[at++] = (*options)[r];
    }
    if (ok) {
        made[at] = NULL;
        return made;
    }
    PyMem_Free(made);
    PyMem_Free(*options);
    *options = NULL;
    return NULL;
}

/* Create a loader whose workers are processes started by `command`, a sequence of str. Returns false with an
 * exception. */
static bool isolated_loader(mp_state *state, const registry_object *self, mp_spec *spec, mp_compute compute,
                            PyObject *command, PyObject *environment, unsigned long long memory, mp_loader *loader,
                            mp_error *error, mp_status *status) {
    const char *argv[MAX_ARGUMENTS + 1];
    PyObject *list = mp_tuple_in(command, "`command` must be a sequence of str");
    Py_ssize_t count = list ? PyTuple_Size(list) : 0;
    bool ok = list != NULL;
    if (ok && (count < 1 || count > MAX_ARGUMENTS)) {
        mp_raise_new(state, MP_INVALID_ARGUMENT, "`command` must have 1 to %d parts, got %zd", MAX_ARGUMENTS, count);
        ok = false;
    }
    for (Py_ssize_t i = 0; ok && i < count; i++)
        ok = (argv[i] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(list, i), NULL)) != NULL;
    char(*values)[OPTION_BYTES] = NULL;
    PyObject *variables = !ok           ? NULL
                          : environment ? mp_tuple_in(environment, "`environment` must be a sequence of bytes")
                                        : PyTuple_New(0);
    const char **envp = variables ? make_environment(state, variables, &values) : NULL;
    if (envp) {
        argv[count] = NULL;
        mp_isolation_options options = {.argv = argv,
                                        .envp = envp,
                                        .memory_bytes = memory,
                                        .start_ns = self->start_ns,
                                        .stall_ns = self->stall_ns};
        *status = mp_isolation_loader(spec, compute, &options, loader, error);
        PyMem_Free(envp);
        PyMem_Free(values);
    }
    Py_XDECREF(variables);
    Py_XDECREF(list);
    return envp != NULL;
}

static PyObject *registry_add(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"key",     "spec",           "compute",  "replace",
                            "command", "process_memory", "revision", "staged", "environment", NULL};
    mp_state *state = mp_state_of(self);
    const char *key, *compute_name = "auto";
    PyObject *object, *command = Py_None, *environment = NULL;
    int replace = 0, staged = 0;
    unsigned long long memory = 0, revision = 0;
    mp_compute compute;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO|spOKKpO:add", names, &key, &object, &compute_name, &replace,
                                     &command, &memory, &revision, &staged, &environment) ||
        !compute_in(state, compute_name, &compute))
        return NULL;
    mp_add add = staged ? MP_ADD_STAGED : replace ? MP_ADD_REPLACE : MP_ADD_NEW;
    mp_spec *spec = mp_spec_freeze_object(state, object);
    if (!spec)
        return NULL;
    mp_loader loader;
    mp_error error;
    mp_status status;
    if (command == Py_None)
        status = mp_model_loader(spec, compute, &loader, &error);
    else if (!isolated_loader(state, (registry_object *)self, spec, compute, command, environment, memory, &loader,
                              &error, &status))
        return NULL;
    if (status == MP_OK) {
        loader.revision = revision;
        Py_BEGIN_ALLOW_THREADS
            status = mp_registry_add(registry_of(self), key, &loader, add, &error);
        Py_END_ALLOW_THREADS
    }
    if (status != MP_OK)
        return mp_raise(state, &error, key);
    Py_RETURN_NONE;
}

static PyObject *registry_commit(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"keys", "revision", NULL};
    mp_state *state = mp_state_of(self);
    PyObject *keys;
    unsigned long long revision;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!K:commit", names, &PyTuple_Type, &keys, &revision))
        return NULL;
    const char *texts[MP_COMMIT_MAX];
    Py_ssize_t count = PyTuple_Size(keys);
    if (count > MP_COMMIT_MAX)
        return mp_raise_new(state, MP_INVALID_ARGUMENT, "`keys` must have at most %d items, got %zd", MP_COMMIT_MAX,
                            count);
    for (Py_ssize_t i = 0; i < count; i++)
        if (!(texts[i] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(keys, i), NULL)))
            return NULL;
    mp_error error;
    mp_status status;
    Py_BEGIN_ALLOW_THREADS
        status = mp_registry_commit(registry_of(self), texts, (int)count, revision, &error);
    Py_END_ALLOW_THREADS
    if (status != MP_OK)
        return mp_raise(state, &error, count ? texts[0] : NULL);
    Py_RETURN_NONE;
}

static PyObject *registry_withdraw(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"key", "revision", NULL};
    const char *key;
    unsigned long long revision;
    bool dropped;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sK:withdraw", names, &key, &revision))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        dropped = mp_registry_withdraw(registry_of(self), key, revision);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(dropped);
}

/* An operation that waits on an entry. wait_entry() calls it repeatedly with short deadlines and checks for signals
 * between the calls. */
typedef mp_status entry_wait(mp_registry *registry, const char *key, bool flag, uint64_t deadline_ns, mp_error *error);

static mp_status wait_load(mp_registry *registry, const char *key, bool pin, uint64_t deadline_ns, mp_error *error) {
    return mp_registry_load(registry, key, pin, deadline_ns, error);
}

static mp_status wait_evict(mp_registry *registry, const char *key, bool flag, uint64_t deadline_ns, mp_error *error) {
    (void)flag;
    return mp_registry_evict(registry, key, deadline_ns, error);
}

static mp_status wait_remove(mp_registry *registry, const char *key, bool flag, uint64_t deadline_ns, mp_error *error) {
    (void)flag;
    return mp_registry_remove(registry, key, deadline_ns, error);
}

static mp_status wait_removed(mp_registry *registry, const char *key, bool flag, uint64_t deadline_ns,
                              mp_error *error) {
    (void)flag;
    return mp_registry_wait_removed(registry, key, deadline_ns, error);
}

static PyObject *wait_entry(PyObject *self, entry_wait *wait, const char *key, bool flag, PyObject *timeout) {
    mp_state *state = mp_state_of(self);
    uint64_t deadline_ns;
    if (!mp_deadline(state, timeout, &deadline_ns))
        return NULL;
    for (;;) {
        mp_error error;
        mp_status status;
        uint64_t slice = mp_wait_slice(state, deadline_ns);
        Py_BEGIN_ALLOW_THREADS
            status = wait(registry_of(self), key, flag, slice, &error);
        Py_END_ALLOW_THREADS
        if (status == MP_OK)
            Py_RETURN_NONE;
        if (wait == wait_remove) /* the first call released the key, and another model may have been added under it
                                  * since */
            wait = wait_removed;
        if (status != MP_TIMEOUT || slice == deadline_ns)
            return mp_raise(state, &error, key);
        if (PyErr_CheckSignals() < 0)
            return NULL;
    }
}

/* For methods with the arguments `key` and `timeout`. */
static PyObject *wait_key(PyObject *self, PyObject *args, PyObject *kwargs, const char *format, entry_wait *wait) {
    static char *names[] = {"key", "timeout", NULL};
    const char *key;
    PyObject *timeout = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, names, &key, &timeout))
        return NULL;
    return wait_entry(self, wait, key, false, timeout);
}

static PyObject *registry_remove(PyObject *self, PyObject *args, PyObject *kwargs) {
    return wait_key(self, args, kwargs, "s|O:remove", wait_remove);
}

static PyObject *registry_wait_removed(PyObject *self, PyObject *args, PyObject *kwargs) {
    return wait_key(self, args, kwargs, "s|O:wait_removed", wait_removed);
}

static PyObject *registry_load(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"key", "pin", "timeout", NULL};
    const char *key;
    int pin = 0;
    PyObject *timeout = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|pO:load", names, &key, &pin, &timeout))
        return NULL;
    return wait_entry(self, wait_load, key, pin, timeout);
}

static PyObject *registry_evict(PyObject *self, PyObject *args, PyObject *kwargs) {
    return wait_key(self, args, kwargs, "s|O:evict", wait_evict);
}

static PyObject *registry_keep_alive(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"key", "seconds", "pin", NULL};
    PyObject *pin = Py_None;
    mp_state *state = mp_state_of(self);
    const char *key;
    double seconds;
    uint64_t ns;
    mp_error error;
    mp_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sd|O:keep_alive", names, &key, &seconds, &pin) ||
        !mp_seconds_in(state, "keep_alive", seconds, &ns))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        status = mp_registry_keep_alive(registry_of(self), key, ns, &error);
        if (status == MP_OK && pin != Py_None)
            status = mp_registry_pin(registry_of(self), key, pin == Py_True, &error);
    Py_END_ALLOW_THREADS
    if (status != MP_OK)
        return mp_raise(state, &error, key);
    Py_RETURN_NONE;
}

static PyObject *registry_entries(PyObject *self, PyObject *none) {
    (void)none;
    return mp_registry_rows(mp_state_of(self), registry_of(self));
}

static bool put_number(PyObject *dict, const char *name, uint64_t number) {
    PyObject *value = PyLong_FromUnsignedLongLong(number);
    bool ok = value && PyDict_SetItemString(dict, name, value) == 0;
    Py_XDECREF(value);
    return ok;
}

static PyObject *registry_stats(PyObject *self, PyObject *none) {
    (void)none;
    mp_registry_stats stats;
    mp_registry_get_stats(registry_of(self), &stats);
    PyObject *dict = PyDict_New(), *tags = PyDict_New();
    bool ok = dict && tags && put_number(dict, "memory_limit", stats.memory_limit) &&
              put_number(dict, "memory_used", stats.memory_used) &&
              put_number(dict, "compute_threads", (uint64_t)stats.threads) &&
              put_number(dict, "compute_threads_leased", (uint64_t)stats.threads_leased) &&
              put_number(dict, "threads_created", stats.threads_created) &&
              put_number(dict, "threads_joined", stats.threads_joined);
#define MP_METRIC(name, meaning) ok = ok && put_number(dict, #name, stats.name);
#include "registry/metrics.def"
#undef MP_METRIC
    PyObject *pressure = ok ? PyUnicode_FromString(stats.pressure) : NULL;
    ok = pressure && PyDict_SetItemString(dict, "pressure", pressure) == 0;
    Py_XDECREF(pressure);
    for (int i = 0; ok && i < MP_TAG_COUNT; i++)
        ok = put_number(tags, mp_tag_name((mp_tag)i), stats.bytes_by_tag[i]);
    if (!ok || PyDict_SetItemString(dict, "bytes_by_tag", tags) < 0)
        Py_CLEAR(dict);
    Py_XDECREF(tags);
    return dict;
}

static PyObject *registry_number(PyObject *self, PyObject *none) {
    (void)none;
    return PyLong_FromUnsignedLongLong(mp_registry_number(registry_of(self)));
}

static PyObject *registry_maintain(PyObject *self, PyObject *none) {
    (void)none;
    Py_BEGIN_ALLOW_THREADS
        mp_registry_maintain(registry_of(self));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* --- requests --- */

/* Lets a thread that waits in submit for space in the queue handle signals. */
typedef struct signal_check {
    PyThreadState *saved; /* state of the submitting thread, which released the GIL */
    bool main, raised;
} signal_check;

static bool signal_arrived(void *arg) {
    signal_check *check = arg;
    if (!check->main)
        return false;
    PyEval_RestoreThread(check->saved);
    check->raised = PyErr_CheckSignals() < 0;
    check->saved = PyEval_SaveThread();
    return check->raised;
}

/* Submit the request and, if `wait` is set, wait at most until signals must be checked (mp_wait_slice). Releases the
 * GIL once for both. Takes ownership of the request. Returns NULL with an exception if the registry refused the
 * request. */
static mp_ticket *submit(PyObject *self, mp_request *request, mp_submit_args *submit, bool wait, bool *done) {
    mp_state *state = mp_state_of(self);
    mp_ticket *ticket = NULL;
    mp_error error;
    signal_check check = {.main = mp_is_main_thread(state)};
    submit->options.give_up = signal_arrived;
    submit->options.give_up_arg = &check;
    *done = false;
    check.saved = PyEval_SaveThread();
    mp_status status = mp_registry_submit(registry_of(self), submit->key, request, &submit->options, &ticket, &error);
    if (status == MP_OK && wait)
        *done = mp_ticket_wait(ticket, UINT64_MAX, mp_wait_slice(state, 0), NULL);
    PyEval_RestoreThread(check.saved);
    if (status != MP_OK && !check.raised)
        mp_raise(state, &error, submit->key);
    return ticket;
}

static PyObject *submit_request(PyObject *self, PyObject *args, PyObject *kwargs, mp_from_python *from_python) {
    mp_state *state = mp_state_of(self);
    mp_submit_args options;
    bool done;
    mp_request *request = from_python(state, args, kwargs, &options);
    mp_ticket *ticket = request ? submit(self, request, &options, false, &done) : NULL;
    return ticket ? mp_ticket_object_new(state, ticket, self, options.key) : NULL;
}

/* Submit a request, wait, and return its vectors. Returns NULL with an exception. */
static PyObject *vectors_now(PyObject *self, PyObject *args, PyObject *kwargs, mp_from_python *from_python,
                             PyObject *(*vectors_of)(mp_state *state, mp_ticket *ticket, const char *key)) {
    mp_state *state = mp_state_of(self);
    mp_submit_args options;
    bool done;
    mp_request *request = from_python(state, args, kwargs, &options);
    mp_ticket *ticket = request ? submit(self, request, &options, true, &done) : NULL;
    if (!ticket)
        return NULL;
    PyObject *vectors = NULL;
    /* This wait needs no deadline, because the request ends at its own. */
    if (done || (PyErr_CheckSignals() == 0 && mp_wait_ticket(state, ticket, UINT64_MAX, 0, NULL) > 0))
        vectors = vectors_of(state, ticket, options.key);
    mp_ticket_release(ticket); /* cancels a request whose wait was interrupted */
    return vectors;
}

static PyObject *registry_embed(PyObject *self, PyObject *args, PyObject *kwargs) {
    return vectors_now(self, args, kwargs, mp_embedding_from_python, mp_embedding_vectors);
}

static PyObject *registry_embed_images(PyObject *self, PyObject *args, PyObject *kwargs) {
    return vectors_now(self, args, kwargs, mp_image_embedding_from_python, mp_image_embedding_vectors);
}

#define SUBMIT(name, from_python)                                                            \
    static PyObject *registry_submit_##name(PyObject *self, PyObject *args, PyObject *kwargs) { \
        return submit_request(self, args, kwargs, from_python);                              \
    }
SUBMIT(embed, mp_embedding_from_python)
SUBMIT(images, mp_image_embedding_from_python)
SUBMIT(text, mp_text_from_python)
SUBMIT(image_generation, mp_image_generation_from_python)

static PyMethodDef methods[] = {
    {"add", MP_METHOD(registry_add), METH_VARARGS | METH_KEYWORDS, "Register a model under a key without loading it."},
    {"commit", MP_METHOD(registry_commit), METH_VARARGS | METH_KEYWORDS,
     "Give new requests to the models that were staged with this revision."},
    {"withdraw", MP_METHOD(registry_withdraw), METH_VARARGS | METH_KEYWORDS,
     "Drop a staged model; False if it is the current one already."},
    {"remove", MP_METHOD(registry_remove), METH_VARARGS | METH_KEYWORDS,
     "Remove a key after its requests have finished."},
    {"wait_removed", MP_METHOD(registry_wait_removed), METH_VARARGS | METH_KEYWORDS,
     "Wait until the models that were removed from a key are gone."},
    {"load", MP_METHOD(registry_load), METH_VARARGS | METH_KEYWORDS, "Load the model now and wait until it is ready."},
    {"evict", MP_METHOD(registry_evict), METH_VARARGS | METH_KEYWORDS, "Unload the model but keep the key."},
    {"keep_alive", MP_METHOD(registry_keep_alive), METH_VARARGS | METH_KEYWORDS,
     "Idle seconds after which workers, and finally the model, are unloaded; inf = never. pin: never evict it."},
    {"entries", registry_entries, METH_NOARGS, "One dict per entry."},
    {"stats", registry_stats, METH_NOARGS, "Counters, memory and compute threads."},
    {"number", registry_number, METH_NOARGS, "A number unique among the registries of this process."},
    {"maintain", registry_maintain, METH_NOARGS, "Start the maintenance thread now; idempotent."},
    {"submit_embed", MP_METHOD(registry_submit_embed), METH_VARARGS | METH_KEYWORDS,
     "Queue a text embedding request; returns a Ticket."},
    {"embed", MP_METHOD(registry_embed), METH_VARARGS | METH_KEYWORDS, "Submit, wait and return the vectors."},
    {"submit_images", MP_METHOD(registry_submit_images), METH_VARARGS | METH_KEYWORDS,
     "Queue an image embedding request; returns a Ticket."},
    {"embed_images", MP_METHOD(registry_embed_images), METH_VARARGS | METH_KEYWORDS,
     "Submit images, wait and return the vectors."},
    {"submit_text", MP_METHOD(registry_submit_text), METH_VARARGS | METH_KEYWORDS,
     "Queue a text request; returns a Ticket."},
    {"submit_image_generation", MP_METHOD(registry_submit_image_generation), METH_VARARGS | METH_KEYWORDS,
     "Queue an image generation request; returns a Ticket."},
    {"begin_shutdown", registry_begin_shutdown, METH_NOARGS, "Refuse new requests from now on."},
    {"close", registry_close, METH_NOARGS, "Drain and join; idempotent; thread-safe."},
    {"after_fork", registry_after_fork, METH_NOARGS,
     "Call in a forked child: its only thread becomes the main thread."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Keys, their models, and the workers of the models."},
    {Py_tp_new, registry_new},
    {Py_tp_dealloc, registry_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec mp_registry_type_spec = {
    .name = "mpool._core.Registry", .basicsize = sizeof(registry_object), .flags = Py_TPFLAGS_DEFAULT, .slots = slots};
