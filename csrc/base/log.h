/* log.h: log records.
 *
 * The core prints nothing and writes no log file. mp_log puts a record into a bounded ring, and the binding's drain
 * thread passes it to Python's logging. A full ring drops the record, and the next drain passes on a record with
 * the number of dropped ones. mp_log takes no lock. */
#ifndef MP_BASE_LOG_H
#define MP_BASE_LOG_H

#include "base/error.h"

enum { /* levels of Python's logging */
    MP_LOG_DEBUG = 10,
    MP_LOG_INFO = 20,
    MP_LOG_WARNING = 30,
    MP_LOG_ERROR = 40,
    MP_LOG_OFF = 100,
};

typedef struct mp_log_record {
    uint64_t time_ns; /* mp_sys_now_ns */
    int level;
    char text[480]; /* truncated to fit, never inside a UTF-8 character */
} mp_log_record;

/* Record the message unless `level` is below the enabled level. Thread-safe. */
void mp_log(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Set the lowest level that is recorded; MP_LOG_WARNING at start-up. */
void mp_log_set_level(int level);
/* Returns true if `level` is recorded. Call it before preparing expensive arguments of mp_log. */
bool mp_log_enabled(int level);
/* Pass every published record to `take`, oldest first, and return their count. If records were dropped since the last
 * call, pass a WARNING with their number after them, which is not counted. Must be called by one thread at a time.
 * `take` may call mp_log. */
int mp_log_drain(void (*take)(const mp_log_record *record, void *arg), void *arg);
/* Number of records dropped by this process; in a forked child, also those that its parent dropped before the fork. */
uint64_t mp_log_dropped(void);
/* Discard all records. Called by base/forked.c in a forked child: the records belong to the parent, and a record that
 * another thread of the parent was writing is never published in the child. */
void mp_log_fork_child(void);

#endif
