/* test_base_sys.c: base/sys.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/platform.h"
#include "base/sys.h"
#include "mp_test.h"

static const uint64_t MS = 1000000;

static const char *in_directory(const char *name) {
    static char path[512];
    snprintf(path, sizeof(path), "%s/%s", mp_test_directory(), name);
    return path;
}

/* --- files --- */

MP_TEST(base_sys_open_reads_regular_files) {
    const char *path = in_directory("file");
    mp_test_write_file(path, "0123456789", 10);
    int fd;
    mp_file_id id;
    mp_error error;
    MP_CHECK_OK(mp_sys_open(path, &fd, &id, &error), &error);
    MP_CHECK_INT(id.size, 10);
    struct stat info;
    stat(path, &info);
    MP_CHECK_INT(id.inode, info.st_ino);
    MP_CHECK(id.mtime_ns > 0);
    mp_sys_close(fd);
    mp_sys_close(-1);
    char text[8], all[16];
    MP_CHECK(mp_sys_read_text(path, text, sizeof text) && mp_sys_read_text(path, all, sizeof all));
    MP_CHECK_STR(text, "0123456");
    MP_CHECK_STR(all, "0123456789");
    MP_CHECK(!mp_sys_read_text(in_directory("nothing"), all, sizeof all));
}

MP_TEST(base_sys_open_refuses_all_but_regular_files) {
    mp_error error;
    int fd = 5;
    const char *path = in_directory("fifo");
    MP_CHECK_INT(mkfifo(path, 0600), 0);
    MP_CHECK_STATUS(mp_sys_open(path, &fd, NULL, &error), MP_FORMAT, &error); /* does not block on a FIFO */
    MP_CHECK_HAS(error.got, "a FIFO");
    MP_CHECK_HAS(error.allowed, "a regular file");
    MP_CHECK_INT(fd, -1);
    MP_CHECK_STATUS(mp_sys_open(mp_test_directory(), &fd, NULL, &error), MP_FORMAT, &error);
    MP_CHECK_HAS(error.got, "a directory");
    MP_CHECK_STATUS(mp_sys_open("/dev/zero", &fd, NULL, &error), MP_FORMAT, &error);
    MP_CHECK_HAS(error.got, "a character device");
    path = in_directory("socket");
    int socket_fd = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    bool fits = strlen(path) < sizeof(address.sun_path);
    memcpy(address.sun_path, path, fits ? strlen(path) : 0);
    if (fits && bind(socket_fd, (struct sockaddr *)&address, sizeof(address)) == 0) {
        MP_CHECK_STATUS(mp_sys_open(path, &fd, NULL, &error), MP_FORMAT, &error);
        MP_CHECK_HAS(error.got, "a socket");
    }
    close(socket_fd);
    path = in_directory("nothing");
    MP_CHECK_STATUS(mp_sys_open(path, &fd, NULL, &error), MP_IO, &error);
    MP_CHECK_HAS(error.message, "No such file");
    char link[512];
    snprintf(link, sizeof(link), "%s/loop", mp_test_directory());
    MP_CHECK_INT(symlink(link, link), 0);
    MP_CHECK_STATUS(mp_sys_open(link, &fd, NULL, &error), MP_IO, &error);
}

#ifdef MP_SEAM

static uintptr_t advised_from, advised_bytes;
static int advised_calls;

static int note_advice(void *data, size_t bytes, int advice) {
    (void)advice;
    advised_from = (uintptr_t)data;
    advised_bytes = bytes;
    advised_calls++;
    return 0;
}

/* Advice to read covers each page that the range touches; other advice covers the pages inside the range. */
MP_TEST(base_sys_seam_advice_rounds_to_pages) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), base = 1024 * page, top = UINTPTR_MAX / page * page;
    const struct {
        uintptr_t from, bytes, outer_from, outer_bytes, inner_from, inner_bytes; /* bytes 0: no advice */
    } rows[] = {
        {base, 2 * page, base, 2 * page, base, 2 * page},
        {base, 0, 0, 0, 0, 0},
        {base + 1, 0, 0, 0, 0, 0},
        {base, 1, base, page, 0, 0},
        {base + page - 1, 1, base, page, 0, 0},
        {base + page - 1, 2, base, 2 * page, 0, 0},
        {base + 1, page - 1, base, page, 0, 0},
        {base + 1, 2 * page - 1, base, 2 * page, base + page, page},
        {base, 3 * page - 1, base, 3 * page, base, 2 * page},
        {base - 1, 2 * page + 2, base - page, 4 * page, base, 2 * page},
        /* ranges whose end, or whose rounded end, exceeds the address space */
        {base, UINTPTR_MAX, 0, 0, 0, 0},
        {top - page, page + 1, 0, 0, top - page, page},
        {top + 1, page - 2, 0, 0, 0, 0},
    };
    static const struct {
        int advice;
        bool outer;
    } kinds[] = {{MP_ADVISE_WILLNEED, true}, {MP_ADVISE_POPULATE, true}, {MP_ADVISE_DONTNEED, false},
                 {MP_ADVISE_HUGE, false}};
    mp_sys_table.madvise = note_advice;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            const uintptr_t from = kinds[k].outer ? rows[i].outer_from : rows[i].inner_from;
            const uintptr_t bytes = kinds[k].outer ? rows[i].outer_bytes : rows[i].inner_bytes;
            advised_from = advised_bytes = 0;
            advised_calls = 0;
            mp_sys_advise((void *)rows[i].from, rows[i].bytes, kinds[k].advice);
            if (advised_calls != (bytes > 0) || advised_from != from || advised_bytes != bytes)
                MP_FAIL("row %zu, advice %d: %d calls, %zu bytes from %zu", i, kinds[k].advice, advised_calls,
                        (size_t)advised_bytes, (size_t)advised_from);
        }
    mp_sys_table.madvise = mp_sys_real.madvise;
}

static int interruptions;

static int64_t one_byte_at_a_time(int fd, void *to, size_t bytes, int64_t offset) {
    if (interruptions++ % 3 == 0) {
        errno = EINTR;
        return -1;
    }
    return mp_sys_real.pread(fd, to, bytes ? 1 : 0, offset);
}

static int interrupted_open(const char *path, int flags) {
    if (interruptions++ < 3) {
        errno = EINTR;
        return -1;
    }
    return mp_sys_real.open(path, flags);
}

static uint64_t frozen_clock(void) { return 42; }

MP_TEST(base_sys_seam_short_reads_and_interruptions_give_the_same_bytes) {
    const char *path = in_directory("file");
    static char data[3000], got[sizeof data + 1];
    for (int i = 0; i < 3000; i++)
        data[i] = (char)('a' + i % 23);
    mp_test_write_file(path, data, sizeof(data));
    mp_sys_table.open = interrupted_open;
    mp_sys_table.pread = one_byte_at_a_time;
    int fd;
    mp_error error;
    MP_CHECK_OK(mp_sys_open(path, &fd, NULL, &error), &error);
    mp_sys_close(fd);
    interruptions = 0;
    MP_CHECK(mp_sys_read_text(path, got, sizeof(got)));
    MP_CHECK_INT(memcmp(got, data, sizeof(data)), 0);
    MP_CHECK(interruptions > 4000);
    mp_sys_table.now_ns = frozen_clock;
    MP_CHECK_INT(mp_sys_now_ns(), 42);
}

static mp_status read_a_file(void *arg, mp_error *error) {
    int fd = -1;
    void *map = NULL;
    mp_status status;
    MP_TRY_GOTO(mp_sys_open(arg, &fd, NULL, error));
    MP_TRY_GOTO(mp_sys_map(fd, 4, arg, &map, error));
    mp_sys_advise(map, 1 << 20, MP_ADVISE_WILLNEED); /* best effort: a refusal is not an error */
cleanup:
    mp_sys_unmap(map, 4);
    mp_sys_close(fd);
    return status;
}

static mp_status read_a_text(void *arg, mp_error *error) {
    char text[5];
    return mp_sys_read_text(arg, text, sizeof text) ? MP_OK : mp_fail(error, MP_IO, "nothing was read");
}

MP_TEST(base_sys_seam_faults_of_files_are_errors) {
    char path[512];
    snprintf(path, sizeof(path), "%s", in_directory("file"));
    mp_test_write_file(path, "abcd", 4);
    static const enum mp_test_fault faults[] = {MP_FAULT_OPEN, MP_FAULT_MAP, MP_FAULT_ADVISE};
    for (int i = 0; i < 3; i++)
        MP_CHECK_INT(mp_test_fault_sweep(faults[i], read_a_file, path), 1);
    MP_CHECK_INT(mp_test_fault_sweep(MP_FAULT_READ, read_a_text, path), 1);
}

#endif

/* --- threads, locks, conditions --- */

typedef struct thread_view {
    char name[16];
    bool usr1_blocked, bus_blocked, term_blocked, int_blocked;
} thread_view;

static void observe_thread(void *arg) {
    thread_view *view = arg;
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    view->usr1_blocked = sigismember(&mask, SIGUSR1) == 1;
    view->term_blocked = sigismember(&mask, SIGTERM) == 1;
    view->int_blocked = sigismember(&mask, SIGINT) == 1;
    view->bus_blocked = sigismember(&mask, SIGBUS) == 1;
    pthread_getname_np(pthread_self(), view->name, sizeof(view->name));
}

MP_TEST(base_sys_threads_block_signals_and_are_counted) {
    uint64_t created, joined, created_after, joined_after;
    mp_thread_counts(&created, &joined);
    mp_thread thread = {0};
    mp_thread_join(&thread); /* the thread was never started */
    thread_view view = {0};
    mp_error error;
    MP_CHECK_OK(mp_thread_start(&thread, "a-name-longer-than-15", observe_thread, &view, &error), &error);
    mp_thread_join(&thread);
    mp_thread_join(&thread); /* a second join is legal */
    MP_CHECK(view.usr1_blocked && view.term_blocked && view.int_blocked);
    MP_CHECK(!view.bus_blocked);
    if (MP_LINUX)
        MP_CHECK_STR(view.name, "a-name-longer-t");
    mp_thread_counts(&created_after, &joined_after);
    MP_CHECK_INT(created_after - created, 1);
    MP_CHECK_INT(joined_after - joined, 1);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_POOL), 0);
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    MP_CHECK(sigismember(&mask, SIGUSR1) == 0); /* the caller's own mask is unchanged */
}

typedef struct meeting {
    mp_mutex mutex;
    mp_cond cond;
    int turn, waiting; /* guarded by: mutex */
} meeting;

static void take_turns(void *arg) {
    meeting *m = arg;
    mp_mutex_lock(&m->mutex);
    for (int i = 0; i < 200; i++) {
        while (m->turn != 1)
            mp_cond_wait(&m->cond, &m->mutex, 0);
        m->turn = 0;
        mp_cond_signal(&m->cond);
    }
    mp_mutex_unlock(&m->mutex);
}

MP_TEST(base_sys_cond_signal_wakes_the_waiter) {
    meeting m = {.turn = 0};
    mp_mutex_init(&m.mutex);
    mp_cond_init(&m.cond);
    mp_thread thread;
    mp_error error;
    MP_CHECK_OK(mp_thread_start(&thread, "turns", take_turns, &m, &error), &error);
    mp_mutex_lock(&m.mutex);
    for (int i = 0; i < 200; i++) {
        m.turn = 1;
        mp_cond_signal(&m.cond);
        while (m.turn != 0)
            mp_cond_wait(&m.cond, &m.mutex, mp_sys_now_ns() + 10000 * MS);
    }
    mp_mutex_unlock(&m.mutex);
    mp_thread_join(&thread);
    mp_cond_deinit(&m.cond);
    mp_mutex_deinit(&m.mutex);
}

MP_TEST(base_sys_cond_deadline_passes) {
    meeting m = {.turn = 0};
    mp_mutex_init(&m.mutex);
    mp_cond_init(&m.cond);
    mp_mutex_lock(&m.mutex);
    uint64_t start = mp_sys_now_ns(), deadline = start + 20 * MS;
    while (mp_cond_wait(&m.cond, &m.mutex, deadline)) {
    }
    uint64_t passed = mp_sys_now_ns() - start;
    MP_CHECK(passed >= 20 * MS && passed < 5000 * MS);
    MP_CHECK(!mp_cond_wait(&m.cond, &m.mutex, start)); /* a deadline in the past: returns at once */
    MP_CHECK(!mp_cond_wait(&m.cond, &m.mutex, 1));
    mp_mutex_unlock(&m.mutex);
    mp_cond_deinit(&m.cond);
    mp_mutex_deinit(&m.mutex);
}

/* --- parking --- */

static void unpark_later(void *arg) {
    _Atomic uint32_t *word = arg;
    mp_sys_sleep_ns(20 * MS);
    atomic_store(word, 1);
    mp_unpark_all(word);
}

MP_TEST(base_sys_park_waits_for_the_word) {
    _Atomic uint32_t word = 0;
    mp_park(&word, 7, 0); /* the word is not 7: returns at once */
    uint64_t start = mp_sys_now_ns();
    mp_park(&word, 0, 10 * MS);
    MP_CHECK(mp_sys_now_ns() - start < 5000 * MS); /* the timeout ended the wait */
    mp_thread thread;
    mp_error error;
    MP_CHECK_OK(mp_thread_start(&thread, "unpark", unpark_later, &word, &error), &error);
    while (atomic_load(&word) == 0)
        mp_park(&word, 0, 0);
    mp_thread_join(&thread);
}
