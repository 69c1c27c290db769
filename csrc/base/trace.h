/* trace.h: log records.
 *
 * The core never writes to a file descriptor. mp_log puts a record into a bounded ring, from which one thread of the
 * binding takes it to Python's logging. A full ring drops the record and counts it. Recording takes no lock. */
#ifndef MP_BASE_TRACE_H
#define MP_BASE_TRACE_H

#include "base/error.h"

enum { /* numbers of Python's logging */
    MP_LOG_DEBUG = 10,
    MP_LOG_INFO = 20,
    MP_LOG_WARNING = 30,
    MP_LOG_ERROR = 40,
    MP_LOG_OFF = 100,
};

typedef struct mp_log_record {
    uint64_t time_ns; /* of mp_sys_now_ns */
    int level;
    char text[480]; /* cut to fit, never inside a UTF-8 character */
} mp_log_record;

/* Record, unless level is below what is enabled. Any thread. */
void mp_log(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Lowest level that is recorded from now on; MP_LOG_WARNING at the start. */
void mp_log_set_level(int level);
/* For a caller that would spend time on the arguments. */
bool mp_log_enabled(int level);
/* Hand every waiting record to take, oldest first, and return how many. One thread at a time; take may call mp_log. */
int mp_log_drain(void (*take)(const mp_log_record *record, void *arg), void *arg);
/* Records dropped since the process began. */
uint64_t mp_log_dropped(void);

#endif
