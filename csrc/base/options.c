/* options.c: see options.h. */
#include "base/options.h"

#include <assert.h>
#include <stddef.h>
#include <stdio.h> /* snprintf only */
#include <stdlib.h>
#include <string.h>

static mp_options current = {
#define MP_OPTION(kind, field, variable, def, least, most, meaning) .field = def,
#include "base/options.def"
#undef MP_OPTION
};

static const mp_option_row rows[] = {
#define MP_OPTION_INT false
#define MP_OPTION_TEXT true
#define MP_OPTION_DEFAULT_INT(def) #def
#define MP_OPTION_DEFAULT_TEXT(def) def
#define MP_OPTION(kind, field, variable, def, least, most, meaning) \
    {variable, meaning, MP_OPTION_DEFAULT_##kind(def), least, most, MP_OPTION_##kind},
#include "base/options.def"
#undef MP_OPTION
};

static const size_t offsets[] = {
#define MP_OPTION(kind, field, variable, def, least, most, meaning) offsetof(mp_options, field),
#include "base/options.def"
#undef MP_OPTION
};

enum { ROW_COUNT = sizeof(rows) / sizeof(rows[0]) };

const mp_options *mp_options_get(void) { return &current; }

const mp_option_row *mp_option_rows(int *count) {
    *count = ROW_COUNT;
    return rows;
}

void mp_option_value(int row, char *to, size_t size) {
    assert(row >= 0 && row < ROW_COUNT && size > 0);
    const uint8_t *field = (const uint8_t *)&current + offsets[row];
    if (rows[row].is_text)
        snprintf(to, size, "%s", (const char *)field);
    else
        snprintf(to, size, "%lld", (long long)*(const int64_t *)(const void *)field);
}

/* Parse a decimal integer with nothing before or after it. */
static bool parse_int(const char *text, int64_t *value) {
    bool negative = *text == '-';
    const char *digit = text + (negative || *text == '+');
    if (!*digit)
        return false;
    int64_t parsed = 0;
    for (; *digit; digit++) {
        if (*digit < '0' || *digit > '9' || __builtin_mul_overflow(parsed, (int64_t)10, &parsed) ||
            __builtin_sub_overflow(parsed, (int64_t)(*digit - '0'), &parsed)) /* negative, so that INT64_MIN fits */
            return false;
    }
    if (!negative && __builtin_sub_overflow((int64_t)0, parsed, &parsed))
        return false;
    *value = parsed;
    return true;
}

static mp_status read_row(const mp_option_row *row, const char *text, uint8_t *field, mp_error *error) {
    if (row->is_text) {
        size_t length = strlen(text);
        if (length > (size_t)row->most)
            return mp_fail(error, MP_INVALID_ARGUMENT,
                           "the environment variable %s must have at most %lld bytes, got %zu; shorten or unset it",
                           row->variable, (long long)row->most, length);
        memcpy(field, text, length + 1);
        return MP_OK;
    }
    int64_t value;
    if (!parse_int(text, &value) || value < row->least || value > row->most)
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "the environment variable %s must be a whole number from %lld to %lld (default %s), got "
                       "\"%.64s\"; correct or unset it",
                       row->variable, (long long)row->least, (long long)row->most, row->def, text);
    memcpy(field, &value, sizeof(value));
    return MP_OK;
}

mp_status mp_options_init(mp_error *error) {
    mp_options fresh = {
#define MP_OPTION(kind, field, variable, def, least, most, meaning) .field = def,
#include "base/options.def"
#undef MP_OPTION
    };
    for (int i = 0; i < ROW_COUNT; i++) {
        const char *text = getenv(rows[i].variable);
        if (text && *text) /* an empty variable counts as unset */
            MP_TRY(read_row(&rows[i], text, (uint8_t *)&fresh + offsets[i], error));
    }
    current = fresh;
    return MP_OK;
}
