/* log.c: see log.h. */
#include "base/log.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h> /* snprintf and vsnprintf only */
#include <string.h>

#include "base/mpsc_ring.h"
#include "base/sys.h"

static MP_MPSC_SLOT(mp_log_record) slots[256];
static mp_mpsc_ring ring = MP_MPSC_RING(slots);
static _Atomic int lowest = MP_LOG_WARNING;

void mp_log_set_level(int level) { atomic_store_explicit(&lowest, level, memory_order_relaxed); }
bool mp_log_enabled(int level) { return level >= atomic_load_explicit(&lowest, memory_order_relaxed); }
uint64_t mp_log_dropped(void) { return mp_mpsc_dropped(&ring); }
void mp_log_fork_child(void) { mp_mpsc_reset(&ring); }

void mp_log(int level, const char *format, ...) {
    if (!mp_log_enabled(level))
        return;
    /* Format before claiming a slot: the drain thread stops at a claimed slot until it is published. */
    char message[sizeof(((mp_log_record *)0)->text)];
    va_list args;
    va_start(args, format);
    if (vsnprintf(message, sizeof(message), format, args) < 0)
        message[0] = 0;
    va_end(args);
    mp_text_trim(message);
    uint64_t position;
    mp_log_record *record = mp_mpsc_claim(&ring, &position);
    if (!record)
        return;
    record->time_ns = mp_sys_now_ns();
    record->level = level;
    memcpy(record->text, message, sizeof(message));
    mp_mpsc_publish(&ring, position);
}

int mp_log_drain(void (*take)(const mp_log_record *record, void *arg), void *arg) {
    int taken = 0;
    for (mp_log_record record; mp_mpsc_take(&ring, &record); taken++)
        take(&record, arg);
    static uint64_t reported; /* read and written by the draining thread */
    const uint64_t dropped = mp_log_dropped();
    if (dropped != reported) {
        mp_log_record lost = {.time_ns = mp_sys_now_ns(), .level = MP_LOG_WARNING};
        snprintf(lost.text, sizeof lost.text, "%" PRIu64 " log records were lost: more arrived than could be passed on",
                 dropped - reported);
        reported = dropped;
        take(&lost, arg);
    }
    return taken;
}
