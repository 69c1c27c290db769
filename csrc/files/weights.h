/* weights.h: name -> borrowed tensor, whatever the format was. Maps the spec's files and checks every bound of every
 * tensor against them (again: the table came from Python). */
#ifndef MP_FILES_WEIGHTS_H
#define MP_FILES_WEIGHTS_H

#include "files/file_map.h"
#include "files/spec.h"

typedef struct mp_weights mp_weights;

/* Keeps a reference to the spec and freezes it. FORMAT for a tensor outside its file, a byte count that does not follow
 * from dtype and shape, a misaligned float; IO when a file is gone. */
mp_status mp_weights_open(mp_spec *spec, mp_weights **weights, mp_error *error);
void mp_weights_close(mp_weights *weights); /* NULL is legal; views die with it */
const mp_spec *mp_weights_spec(const mp_weights *weights);

/* The view of a tensor whose shape must be shape[0..ndim). An entry -1 of shape takes any size >= 1. FORMAT names the
 * tensor, what its shape is and what was implied. */
mp_status mp_weights_get(const mp_weights *weights, const char *name, int ndim, const int64_t *shape, mp_tensor *tensor,
                         mp_error *error);
bool mp_weights_has(const mp_weights *weights, const char *name);
/* Hand the source pages of a tensor back to the system after it was packed. */
void mp_weights_release(const mp_weights *weights, const mp_tensor *tensor);
/* Any mapping poisoned (a file shrank under us). */
bool mp_weights_poisoned(const mp_weights *weights);
/* After a step: IO if that is so, for then nothing that was computed counts. */
mp_status mp_weights_whole(const mp_weights *weights, mp_error *error);
/* Every file is still the one that was mapped. */
bool mp_weights_unchanged(const mp_weights *weights);
/* Both: they are there, whole and the same. */
bool mp_weights_sound(const mp_weights *weights);

#endif
