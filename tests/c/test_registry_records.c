/* test_registry_records.c: the log records of the registry, each with its level: one record at INFO for each event of
 * a model, none for a request, WARNING and ERROR for faults alone. */
#include <stdio.h>

#include "base/log.h"
#include "base/sys.h"
#include "mp_test.h"
#include "test_registry_fake.h"

typedef struct expected {
    const char *text; /* part of the record */
    int level;
    int most; /* records that there may be; 0 = any number from 1 on */
    int seen;
} expected;

typedef struct records {
    expected *rows; /* ends with a row without a text */
    int wrong;      /* records of another level, or of no row */
} records;

static void take(const mp_log_record *record, void *arg) {
    records *all = arg;
    for (expected *row = all->rows; row->text; row++) {
        if (!strstr(record->text, row->text))
            continue;
        row->seen++;
        if (record->level != row->level) {
            printf("level %d instead of %d: %s\n", record->level, row->level, record->text);
            all->wrong++;
        }
        return;
    }
    printf("not expected: level %d, %s\n", record->level, record->text);
    all->wrong++;
}

/* Drains all records, and compares them with the rows. */
static void check_records(expected *rows) {
    records all = {.rows = rows};
    mp_log_drain(take, &all);
    MP_CHECK_INT(all.wrong, 0);
    for (const expected *row = rows; row->text; row++)
        if (row->seen < 1 || (row->most && row->seen > row->most))
            MP_FAIL("%d records instead of %d: %s", row->seen, row->most, row->text);
}

static void until_idle(mp_registry *registry) {
    mp_entry_info info;
    for (uint64_t end = fake_in_ms(10000);; mp_sys_sleep_ns(FAKE_MS(1) / 4)) {
        fake_info(registry, "a", &info);
        if (info.worker_count == 1 && strcmp(info.worker[0].state, "idle") == 0)
            return;
        MP_CHECK(mp_sys_now_ns() < end);
    }
}

MP_TEST(registry_records_of_a_model_and_its_requests) {
    fake fake, second;
    fake_init(&second);
    mp_error error;
    mp_log_set_level(MP_LOG_DEBUG);
    mp_registry *registry = fake_begin(&fake, 1, NULL);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(5000), &error), &error);
    for (int i = 0; i < 3; i++) {
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
        until_idle(registry); /* a worker that finds the next request queued does not become idle */
    }
    fake_add(registry, "a", &second, true);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(5000), &error), &error);
    MP_CHECK_OK(mp_registry_wait_removed(registry, "a", fake_in_ms(5000), &error), &error);
    MP_CHECK_OK(mp_registry_evict(registry, "a", fake_in_ms(5000), &error), &error);
    mp_registry_close(registry, 0);
    check_records((expected[]){
        {": spawning -> loading", MP_LOG_INFO, 2, 0},
        {": loading -> ready", MP_LOG_INFO, 2, 0},
        {"Loaded a in ", MP_LOG_INFO, 2, 0},
        {" -> processing", MP_LOG_DEBUG, 3, 0},
        {"processing -> idle", MP_LOG_DEBUG, 3, 0},
        {"Replaced a", MP_LOG_INFO, 1, 0},
        {" -> evicting", MP_LOG_INFO, 2, 0},
        {"Unloaded a", MP_LOG_INFO, 2, 0},
        {"Memory: ", MP_LOG_INFO, 0, 1}, /* may be there, as the next */
        {"The process did not run for ", MP_LOG_WARNING, 0, 1},
        {"Graceful shutdown complete", MP_LOG_INFO, 1, 0},
        {0},
    });
    fake_end(registry);
}

typedef struct memory_records {
    const char *last; /* ends the record that the test waits for */
    int seen, wrong;
} memory_records;
