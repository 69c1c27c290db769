/* machine.c: functions of the module about cores and compute threads. */
#include "base/alloc.h"
#include "base/cpu.h"
#include "base/topology.h"
#include "models/threads.h"
#include "python/binding.h"

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

PyObject *mp_machine_config(mp_state *state) {
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

PyObject *mp_machine(PyObject *module, PyObject *none) {
    (void)none;
    PyObject *machine = mp_machine_config(mp_state_of_module(module)), *name = PyUnicode_FromString(mp_cpu_name());
    if (!name || !machine || PyDict_SetItemString(machine, "cpu_name", name) < 0)
        Py_CLEAR(machine);
    Py_XDECREF(name);
    return machine;
}

PyObject *mp_learned_threads(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    PyObject *numbers = PyTuple_New(MP_LEARNED_CLASSES);
    for (int class = 0; numbers && class < MP_LEARNED_CLASSES; class++) {
        PyObject *number = PyLong_FromLong(mp_threads_learned(class));
        if (!number || PyTuple_SetItem(numbers, class, number) < 0)
            Py_CLEAR(numbers);
    }
    return numbers;
}

PyObject *mp_set_learned_threads(PyObject *module, PyObject *numbers) {
    (void)module;
    int threads[MP_LEARNED_CLASSES];
    if (!PyArg_ParseTuple(numbers, "iii:set_learned_threads", &threads[0], &threads[1], &threads[2]))
        return NULL;
    for (int class = 0; class < MP_LEARNED_CLASSES; class++)
        mp_threads_set_learned(class, threads[class]);
    Py_RETURN_NONE;
}
