/* options.h: the values of options.def, read once. */
#ifndef MP_BASE_OPTIONS_H
#define MP_BASE_OPTIONS_H

#include "base/error.h"

typedef struct mp_options {
#define MP_OPTION_INT(field) int64_t field;
#define MP_OPTION_TEXT(field) char field[256];
#define MP_OPTION(kind, field, variable, def, least, most, meaning) MP_OPTION_##kind(field)
#include "base/options.def"
#undef MP_OPTION
#undef MP_OPTION_INT
#undef MP_OPTION_TEXT
} mp_options;

typedef struct mp_option_row {
    const char *variable, *meaning, *def; /* def: the default as text */
    int64_t least, most;                  /* of the value, or of a text's length in bytes */
    bool is_text;
} mp_option_row;

/* The process's options. Never NULL; before mp_options_init the defaults. */
const mp_options *mp_options_get(void);
/* Reads the environment. INVALID_ARGUMENT names the variable, its value and what is allowed. Once, before other
 * threads. */
mp_status mp_options_init(mp_error *error);
const mp_option_row *mp_option_rows(int *count);
/* The current value as text, for show_config. */
void mp_option_value(int row, char *to, size_t size);

#endif
