/* error.c: see error.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h> /* vsnprintf and snprintf only: no stream is ever opened or written */
#include <string.h>

static const mp_status_row rows[] = {
#define MP_STATUS(number, NAME, text, python_class, builtin) {MP_##NAME, #NAME, text, python_class, builtin},
#include "base/status.def"
#undef MP_STATUS
};

enum { ROW_COUNT = sizeof(rows) / sizeof(rows[0]) };

const mp_status_row *mp_status_rows(int *count) {
    *count = ROW_COUNT;
    return rows;
}

const mp_status_row *mp_status_find(mp_status code) {
    const mp_status_row *internal = NULL;
    for (int i = 0; i < ROW_COUNT; i++) {
        if (rows[i].code == code)
            return &rows[i];
        if (rows[i].code == MP_INTERNAL)
            internal = &rows[i];
    }
    return internal;
}

/* Length in bytes of the UTF-8 character that starts with `lead`; 0 for a byte that cannot start one. */
static size_t utf8_length(uint8_t lead) {
    if (lead < 0x80)
        return 1;
    if (lead >= 0xC2 && lead <= 0xDF)
        return 2;
    if ((lead & 0xF0) == 0xE0)
        return 3;
    if (lead >= 0xF0 && lead <= 0xF4)
        return 4;
    return 0;
}

/* Keeps bytes that are not UTF-8: names from files may contain any bytes. */
void mp_text_trim(char *text) {
    size_t length = strlen(text);
    for (size_t back = 1; back <= 3 && back <= length; back++) {
        uint8_t byte = (uint8_t)text[length - back];
        if ((byte & 0xC0) == 0x80)
            continue;
        if (utf8_length(byte) > back)
            text[length - back] = 0;
        return;
    }
}

static void copy_text(char *to, size_t size, const char *from) {
    size_t length = strlen(from);
    if (length >= size)
        length = size - 1;
    memcpy(to, from, length);
    to[length] = 0;
    mp_text_trim(to);
}

/* Truncate a long path at its start, because the file name at its end identifies the file best. */
static void copy_path(char *to, size_t size, const char *path) {
    size_t length = strlen(path);
    if (length < size) {
        copy_text(to, size, path);
        return;
    }
    const char *tail = path + length - (size - 1 - 3);
    while (((uint8_t)*tail & 0xC0) == 0x80)
        tail++;
    memcpy(to, "...", 3);
    copy_text(to + 3, size - 3, tail);
}

void mp_error_clear(mp_error *error) {
    if (!error)
        return;
    error->code = MP_OK;
    error->offset = -1;
    error->message[0] = error->file[0] = error->field[0] = error->got[0] = error->allowed[0] = error->hint[0] = 0;
}

static void format_text(char *to, size_t size, mp_status code, const char *format, va_list args) {
    if (vsnprintf(to, size, format, args) < 0)
        copy_text(to, size, mp_status_find(code)->text);
    mp_text_trim(to);
}

static void error_fail(mp_error *error, mp_status code, const char *hint, const char *format, va_list args) {
    if (!error)
        return;
    char message[sizeof(error->message)]; /* the arguments may point into *error */
    format_text(message, sizeof(message), code, format, args);
    mp_error_clear(error);
    error->code = code;
    memcpy(error->message, message, sizeof(message));
    copy_text(error->hint, sizeof(error->hint), hint);
}

mp_status mp_fail(mp_error *error, mp_status code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    error_fail(error, code, "", format, args);
    va_end(args);
    return code;
}

mp_status mp_fail_hint(mp_error *error, mp_status code, const char *hint, const char *format, ...) {
    va_list args;
    va_start(args, format);
    error_fail(error, code, hint, format, args);
    va_end(args);
    return code;
}

mp_status mp_fail_file(mp_error *error, mp_status code, const char *file, int64_t offset, const char *field,
                       const char *allowed, const char *got_format, ...) {
    if (!error)
        return code;
    mp_error made; /* the arguments may point into *error */
    mp_error_clear(&made);
    made.code = code;
    made.offset = offset;
    copy_path(made.file, sizeof(made.file), file ? file : "");
    copy_text(made.field, sizeof(made.field), field ? field : "");
    copy_text(made.allowed, sizeof(made.allowed), allowed ? allowed : "");
    va_list args;
    va_start(args, got_format);
    format_text(made.got, sizeof(made.got), code, got_format, args);
    va_end(args);

    char path[160], at[32] = ""; /* limited, so that the allowed values always fit into the message */
    copy_path(path, sizeof(path), made.file);
    if (offset >= 0)
        snprintf(at, sizeof(at), " at byte %lld", (long long)offset);
    snprintf(made.message, sizeof(made.message), "%s%s%s%s%s%s%s%s", path, at, path[0] || at[0] ? ": " : "", made.field,
             made.got[0] ? " is " : "", made.got, made.allowed[0] ? ", allowed: " : "", made.allowed);
    mp_text_trim(made.message);
    *error = made;
    return code;
}

mp_status mp_fail_errno(mp_error *error, int errnum, const char *file, const char *what) {
    mp_status code = errnum == ENOMEM ? MP_MEMORY_EXHAUSTED : MP_IO;
    if (!error)
        return code;
    char buffer[128];
#if defined(__GLIBC__)
    const char *words = strerror_r(errnum, buffer, sizeof(buffer));
#else
    const char *words = strerror_r(errnum, buffer, sizeof(buffer)) == 0 ? buffer : "unknown error";
#endif
    char path[sizeof(error->file)];
    copy_path(path, sizeof(path), file ? file : "");
    mp_fail(error, code, "%s%s%s: %s (errno %d)", path, path[0] ? ": " : "", what, words, errnum);
    memcpy(error->file, path, sizeof(path));
    return code;
}
