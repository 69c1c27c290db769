/* options.h: values of the environment variables in options.def, read once at start-up. */
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
    int64_t least, most;                  /* bounds of the value, or of a text's length in bytes */
    bool is_text;
} mp_option_row;

/* Options of the process. Never NULL; holds the defaults before mp_options_init. */
const mp_options *mp_options_get(void);
/* Read the environment. Call once, before other threads exist. INVALID_ARGUMENT names the variable, its value (of a
 * text: its length) and what is allowed. */
mp_status mp_options_init(mp_error *error);
const mp_option_row *mp_option_rows(int *count);
/* Write the current value as text, for show_config. */
void mp_option_value(int row, char *to, size_t size);

#endif
