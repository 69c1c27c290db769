/* weights.h: find tensors by name, for every file format. Maps the files of a spec and checks the bounds of every
 * tensor against the mapped files. The GGUF parser makes the same check, but the tensor table may come from Python
 * instead. */
#ifndef MP_FILES_WEIGHTS_H
#define MP_FILES_WEIGHTS_H

#include "files/file_map.h"
#include "files/spec.h"

typedef struct mp_weights mp_weights;

/* `field` of an error: the paths of a spec no longer name the files that it describes. Another spec, made of the files
 * of now, may load. */
#define MP_FIELD_OUTDATED "files"

/* The process that has the files of all models open, in a worker process. If a path no longer names the file of the
 * spec, mp_weights_open opens that file there: the path is looked at anew only when the parent loads the model. */
void mp_weights_set_lender(int process);
/* Map the files. Takes a reference to the spec and freezes it. Returns FORMAT for a tensor outside its file, a byte
 * count that does not match dtype and shape, or a misaligned tensor; IO if a file is missing; INTEGRITY if a file
 * has changed since the spec stored its identity (mp_spec_same_file). For the last two, the field of the error is
 * MP_FIELD_OUTDATED. */
mp_status mp_weights_open(mp_spec *spec, mp_weights **weights, mp_error *error);
void mp_weights_close(mp_weights *weights); /* invalidates all views; does nothing for NULL */
const mp_spec *mp_weights_spec(const mp_weights *weights);

/* Get a borrowed view of a tensor whose shape must be shape[0..ndim); -1 matches any size >= 1. FORMAT names the
 * tensor, its shape and the required shape. UNSUPPORTED for a type that mp_dequantize_row cannot read: integers, F64,
 * and types whose scales are separate tensors, which only linear layers can have (files/scaled_weights.h). */
mp_status mp_weights_get(const mp_weights *weights, const char *name, int ndim, const int64_t *shape, mp_tensor *tensor,
                         mp_error *error);
/* As mp_weights_get, for all types: the caller checks the type. */
mp_status mp_weights_get_any(const mp_weights *weights, const char *name, int ndim, const int64_t *shape,
                             mp_tensor *tensor, mp_error *error);
bool mp_weights_has(const mp_weights *weights, const char *name);
/* Get the path of the file with a tensor, for errors; the first file if there is no such tensor. */
const char *mp_weights_file(const mp_weights *weights, const char *name);
/* Check the biases of layers 0 to `layers` - 1, whose tensors are named "<prefix><layer>.". FORMAT names a bias that is
 * missing in a layer and present in another one, if both have its weight. Layers without the weight need no bias. A
 * bias of experts without a weight of its own, such as exp_probs_b.bias, belongs to the router, ffn_gate_inp.weight.
 * The time depends on the number of tensors, not on `layers`. */
mp_status mp_weights_check_biases(const mp_weights *weights, const char *prefix, int layers, mp_error *error);
/* Give the pages of a tensor back to the system. Call after the tensor is packed; a later access reads the file
 * again. */
void mp_weights_release(const mp_weights *weights, const mp_tensor *tensor);
/* True if a mapping is poisoned (a file was truncated while mapped). */
bool mp_weights_poisoned(const mp_weights *weights);
/* Call after a step. Returns IO if a mapping is poisoned; the results of the step are then invalid. */
mp_status mp_weights_check_poisoned(const mp_weights *weights, mp_error *error);
/* True if this process owns every file: then the system tells which of their pages are in memory. */
bool mp_weights_owned(const mp_weights *weights);
/* True if every path still names the mapped file and no file was written to. */
bool mp_weights_unchanged(const mp_weights *weights);
/* True if no mapping is poisoned and every file is unchanged. */
bool mp_weights_sound(const mp_weights *weights);

#endif
