/* test_base_log.c: base/log.h. */
#include <stdatomic.h>

#include "base/log.h"
#include "base/sys.h"
#include "mp_test.h"

typedef struct collected {
    int count;
    char last[480];
    int last_level;
    uint64_t last_ns;
    int next[4]; /* next number expected from each writer */
    int wrong;
} collected;

static void collect(const mp_log_record *record, void *arg) {
    collected *c = arg;
    c->count++;
    c->last_level = record->level;
    if (record->time_ns < c->last_ns && c->next[0] == 0)
        c->wrong++;
    c->last_ns = record->time_ns;
    memcpy(c->last, record->text, sizeof(c->last));
}

MP_TEST(base_log_records_from_the_enabled_level_on) {
    collected c = {0};
    MP_CHECK(!mp_log_enabled(MP_LOG_INFO) && mp_log_enabled(MP_LOG_WARNING));
    mp_log(MP_LOG_INFO, "not %s", "this");
    MP_CHECK_INT(mp_log_drain(collect, &c), 0);
    mp_log(MP_LOG_ERROR, "this %d", 1);
    MP_CHECK_INT(mp_log_drain(collect, &c), 1);
    MP_CHECK_STR(c.last, "this 1");
    MP_CHECK_INT(c.last_level, MP_LOG_ERROR);
    mp_log_set_level(MP_LOG_DEBUG);
    mp_log(MP_LOG_DEBUG, "detail");
    mp_log_set_level(MP_LOG_OFF);
    mp_log(MP_LOG_ERROR, "ignored");
    MP_CHECK_INT(mp_log_drain(collect, &c), 1);
    MP_CHECK_STR(c.last, "detail");
    MP_CHECK_INT(mp_log_dropped(), 0);
}

MP_TEST(base_log_truncates_between_characters) {
    char text[1024] = "x";
    while (strlen(text) < 900)
        strcat(text, "\xE2\x82\xAC");
    collected c = {0};
    mp_log(MP_LOG_ERROR, "%s", text);
    MP_CHECK_INT(mp_log_drain(collect, &c), 1);
    MP_CHECK_INT(strlen(c.last) % 3, 1);
    MP_CHECK(strlen(c.last) > 470 && strncmp(c.last, text, strlen(c.last)) == 0);
}

MP_TEST(base_log_full_drops_and_counts) {
    collected c = {0};
    for (int i = 0; i < 1000; i++)
        mp_log(MP_LOG_ERROR, "%d", i);
    uint64_t dropped = mp_log_dropped();
    MP_CHECK(dropped > 0);
    MP_CHECK_INT(mp_log_drain(collect, &c), 1000 - (int)dropped);
    MP_CHECK_INT(c.wrong, 0);
    char lost[64];
    snprintf(lost, sizeof lost, "%d log records were lost", (int)dropped);
    MP_CHECK_HAS(c.last, lost);
    MP_CHECK_INT(c.last_level, MP_LOG_WARNING);
    for (int round = 0; round < 20; round++) { /* the ring works after it was full, and wraps around */
        for (int i = 0; i < 100; i++)
            mp_log(MP_LOG_ERROR, "round %d", round);
        MP_CHECK_INT(mp_log_drain(collect, &c), 100);
        MP_CHECK_HAS(c.last, "round"); /* the loss is reported once */
    }
    MP_CHECK_INT(mp_log_dropped(), dropped);
}

typedef struct writer {
    mp_thread thread;
    int index;
    _Atomic int *finished;
} writer;

static void write_records(void *arg) {
    writer *w = arg;
    for (int i = 0; i < 3000; i++)
        mp_log(MP_LOG_ERROR, "%d %d", w->index, i);
    atomic_fetch_add(w->finished, 1);
}

static void check_order(const mp_log_record *record, void *arg) {
    collected *c = arg;
    int index, number;
    if (record->level == MP_LOG_WARNING) /* the number of dropped records */
        return;
    if (sscanf(record->text, "%d %d", &index, &number) != 2 || index < 0 || index > 3 || number < c->next[index]) {
        c->wrong++;
        return;
    }
    c->next[index] = number + 1; /* records may be dropped, but never repeated or reordered */
    c->count++;
}

MP_TEST(base_log_many_writers_one_reader) {
    writer writers[4];
    collected c = {0};
    _Atomic int finished = 0;
    for (int i = 0; i < 4; i++) {
        writers[i] = (writer){.index = i, .finished = &finished};
        mp_error error;
        MP_CHECK_OK(mp_thread_start(&writers[i].thread, "writer", write_records, &writers[i], &error), &error);
    }
    while (atomic_load(&finished) < 4)
        mp_log_drain(check_order, &c);
    for (int i = 0; i < 4; i++)
        mp_thread_join(&writers[i].thread);
    mp_log_drain(check_order, &c);
    MP_CHECK_INT(c.wrong, 0);
    MP_CHECK_INT((uint64_t)c.count + mp_log_dropped(), 4 * 3000);
}
