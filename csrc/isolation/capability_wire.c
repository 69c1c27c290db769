/* capability_wire.c: the table of capability_wire.h. */
#include "isolation/capability_wire.h"

const mp_request_wire *mp_request_wire_of(mp_capability capability) {
    static const mp_request_wire *const rows[MP_CAPABILITY_COUNT] = {
        [MP_TEXT_EMBEDDING] = &mp_wire_text_embedding,
        [MP_TEXT_TO_TEXT] = &mp_wire_text_to_text,
        [MP_IMAGE_EMBEDDING] = &mp_wire_image_embedding,
        [MP_VISION] = &mp_wire_text_to_text,
        [MP_TEXT_TO_IMAGE] = &mp_wire_text_to_image,
    };
    return (unsigned)capability < MP_CAPABILITY_COUNT ? rows[capability] : NULL;
}
