/* wire_vision.h: the images of a text call on their way to a worker process. Used by wire_text_to_text.c only. */
#ifndef MP_ISOLATION_WIRE_VISION_H
#define MP_ISOLATION_WIRE_VISION_H

#include "isolation/wire.h"
#include "models/capability.h"

void mp_wire_put_images(mp_wire_out *out, const mp_text_images *images);
/* Arrays that *args points to afterwards, also after a failure, until mp_wire_free_images. *ok: false without memory.
 */
void mp_wire_get_images(mp_wire_in *in, mp_text_image_args *args, bool *ok);
void mp_wire_free_images(mp_text_image_args *args);

#endif
