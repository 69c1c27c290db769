/* error.h: status codes and error records.
 *
 * Every function that can fail returns mp_status. If the status is not MP_OK, it also fills the caller's mp_error,
 * unless that pointer is NULL. Kernels return void and assert their preconditions. Bad input never aborts. */
#ifndef MP_BASE_ERROR_H
#define MP_BASE_ERROR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum mp_status {
#define MP_STATUS(number, NAME, text, python_class, builtin) MP_##NAME = number,
#include "base/status.def"
#undef MP_STATUS
} mp_status;

/* One row of status.def, for the binding and the tests. */
typedef struct mp_status_row {
    mp_status code;
    const char *name, *text, *python_class, *builtin;
} mp_status_row;

/* An error, in the caller's storage; owns nothing. Every string is zero-terminated and truncated to fit, never inside a
 * UTF-8 character. mp_fail_file fills `file`, `field`, `got` and `allowed`, and mp_fail_errno fills `file`; otherwise
 * they are empty. */
typedef struct mp_error {
    mp_status code;
    int64_t offset; /* byte in the file, or -1 */
    char message[512];
    char file[256];
    char field[96];
    char got[96];
    char allowed[96];
    char hint[96]; /* suggested next step, or "" */
} mp_error;

/* All rows, in the order of status.def. Sets *count to their number. */
const mp_status_row *mp_status_rows(int *count);
/* The row of a code; the row of INTERNAL for an unknown code. */
const mp_status_row *mp_status_find(mp_status code);

/* Fill *error (may be NULL) and return code, so that a failing function can `return mp_fail(...)`. */
mp_status mp_fail(mp_error *error, mp_status code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* mp_fail with a suggested next step. `hint` must not point into *error. */
mp_status mp_fail_hint(mp_error *error, mp_status code, const char *hint, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* mp_fail for a fault in the content of a file. `code` is MP_FORMAT or MP_LIMIT; `offset` is -1 when unknown. The
 * message is composed of file, offset, field, the value found (`got_format`) and the values allowed. */
mp_status mp_fail_file(mp_error *error, mp_status code, const char *file, int64_t offset, const char *field,
                       const char *allowed, const char *got_format, ...) __attribute__((format(printf, 7, 8)));
/* mp_fail for a failed system call: MP_IO, or MP_MEMORY_EXHAUSTED if `errnum` is ENOMEM. The message is `what` and the
 * system's text for `errnum`; `file` may be NULL. */
mp_status mp_fail_errno(mp_error *error, int errnum, const char *file, const char *what);
/* Reset *error (may be NULL) to MP_OK, offset -1 and empty strings. */
void mp_error_clear(mp_error *error);
/* Drop an incomplete UTF-8 character from the end of a truncated text. */
void mp_text_trim(char *text);

/* Return a failing status to the caller. The failed call has filled the error. */
#define MP_TRY(call)                          \
    do {                                      \
        mp_status mp_try_status = (call);     \
        if (mp_try_status != MP_OK)           \
            return mp_try_status;             \
    } while (0)
/* MP_TRY for a function with a local `status` and a label `cleanup`: stores the status and, on failure, jumps there. */
#define MP_TRY_GOTO(call)                     \
    do {                                      \
        status = (call);                      \
        if (status != MP_OK)                  \
            goto cleanup;                     \
    } while (0)

#endif
