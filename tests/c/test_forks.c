/* test_forks.c: forks while other threads hold the process-wide state of base/, files/ and kernels/. Forks with
 * a registry are tested in test_registry_forks.c. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/forked.h"
#include "base/log.h"
#include "base/sys.h"
#include "files/spec.h"
#include "kernels/kernels.h"
#include "mp_test.h"

#if defined(__SANITIZE_THREAD__)
#define SKIP_UNDER_TSAN() MP_SKIP("ThreadSanitizer does not follow a fork of a process with threads")
#else
#define SKIP_UNDER_TSAN() (void)0
#endif

extern char **environ;

static _Atomic bool over;

/* Fork `forks` times while `busy` runs on another thread. `check` runs in each child and must return 0 within 5 s. */
static void fork_while(void (*busy)(void *arg), int (*check)(void *arg), void *arg, int forks) {
    mp_thread thread;
    mp_error error;
    MP_CHECK_OK(mp_thread_start(&thread, "busy", busy, arg, &error), &error);
    for (int i = 0; i < forks; i++) {
        pid_t child = fork();
        MP_CHECK(child >= 0);
        if (child == 0) {
            alarm(5);
            _exit(check(arg));
        }
        int how = 0;
        MP_CHECK(waitpid(child, &how, 0) == child);
        if (how)
            MP_FAIL("child %d: status 0x%x (0xe: it hung)", i, how);
        mp_sys_sleep_ns(100 * 1000);
    }
    atomic_store(&over, true);
    mp_thread_join(&thread);
}

/* --- the log --- */

static void count_record(const mp_log_record *record, void *arg) {
    int *counts = arg;
    counts[strncmp(record->text, "child", 5) == 0 ? 0 : 1]++;
}

static void ignore_record(const mp_log_record *record, void *arg) { (void)record, (void)arg; }

static void log_on(void *arg) {
    while (!atomic_load(&over)) { /* most of the time, a slot is claimed but not published yet */
        mp_log(MP_LOG_ERROR, "parent");
        mp_log_drain(ignore_record, arg);
    }
}

static int log_in_child(void *arg) {
    (void)arg;
    int counts[2] = {0};
    for (int i = 0; i < 300; i++) { /* enough to wrap around the ring */
        mp_log(MP_LOG_ERROR, "child %d", i);
        mp_log_drain(count_record, counts);
    }
    return counts[0] != 300 || counts[1] != 0;
}

MP_TEST(forks_child_logs_its_own_records_only) {
    SKIP_UNDER_TSAN();
    mp_error error;
    int counts[2] = {0};
    MP_CHECK_OK(mp_fork_init(&error), &error);
    for (int i = 0; i < 10; i++)
        mp_log(MP_LOG_ERROR, "parent %d", i);
    pid_t child = fork();
    if (child == 0)
        _exit(log_in_child(NULL));
    int how = 0;
    MP_CHECK(waitpid(child, &how, 0) == child);
    MP_CHECK_INT(how, 0);
    MP_CHECK_INT(mp_log_drain(count_record, counts), 10); /* the parent keeps its records */
    MP_CHECK_INT(counts[1], 10);
}

static int log_after_drain(void *arg) {
    mp_log_drain(ignore_record, arg); /* records that the child inherited */
    return log_in_child(NULL);
}

MP_TEST(forks_child_logs_past_a_slot_that_the_parent_had_claimed) {
    SKIP_UNDER_TSAN();
    mp_error error;
    MP_CHECK_OK(mp_fork_init(&error), &error);
    fork_while(log_on, log_after_drain, NULL, 200);
}

/* --- specs --- */

static void build_on(void *arg) {
    (void)arg;
    mp_error error;
    while (!atomic_load(&over)) {
        mp_spec *spec = mp_spec_create();
        if (spec)
            mp_spec_add_file(spec, "a", &error);
        mp_spec_unpin(spec);
    }
}

static int build_once(void *arg) {
    (void)arg;
    mp_error error;
    mp_spec *spec = mp_spec_create();
    int wrong = !spec || mp_spec_add_file(spec, "a", &error) != MP_OK;
    mp_spec_unpin(spec);
    return wrong;
}

MP_TEST(forks_while_a_spec_is_built) {
    SKIP_UNDER_TSAN();
#if defined(__SANITIZE_ADDRESS__)
    MP_SKIP("the sanitizer's allocator may be locked by another thread in the child forever");
#endif
    mp_error error;
    MP_CHECK_OK(mp_fork_init(&error), &error);
    fork_while(build_on, build_once, NULL, 100);
}

/* --- OpenBLAS --- */

static void load_on(void *path) {
    for (int loads = 0; !atomic_load(&over); loads++) {
        mp_blas_set_path(path);
        mp_blas_core(NULL);
        if (loads % 16 == 0) /* a fork waits up to a second for a moment without a load */
            mp_sys_sleep_ns(50 * 1000);
    }
}

static int load_once(void *path) {
    const char *why = "";
    if (getenv("OPENBLAS_NUM_THREADS"))
        return 2;
    mp_blas_core(&why);
    mp_blas_set_path(path);
    mp_blas_core(&why);
    return !why[0];
}

MP_TEST(forks_while_a_blas_is_loaded) {
    SKIP_UNDER_TSAN();
#if defined(__SANITIZE_ADDRESS__)
    MP_SKIP("the sanitizer's allocator may be locked by another thread in the child forever");
#endif
    const char *path = getenv("MPOOL_BLAS");
    if (path && (!*path || strcmp(path, "none") == 0))
        path = NULL;
    /* a library that is opened each time, then refused, since it is not a BLAS library */
    char *library = (char *)(uintptr_t)(path ? path : "libresolv.so.2");
    mp_kernels_init();
    mp_blas_set_path(library);
    fork_while(load_on, load_once, library, path ? 10 : 60);
}

static void load_once_on(void *path) {
    mp_blas_set_path(path);
    mp_blas_core(NULL);
}

/* A fork does not wait forever for a load that hangs: glibc before 2.36 runs fork handlers under a lock that OpenBLAS
 * needs while it is being opened. Here the load hangs because it opens a FIFO, until the test opens the other end. */
MP_TEST(forks_while_a_blas_load_hangs) {
    SKIP_UNDER_TSAN();
    char path[512];
    mp_thread thread;
    mp_error error;
    snprintf(path, sizeof path, "%s/fifo.so", mp_test_directory());
    MP_CHECK_INT(mkfifo(path, 0600), 0);
    MP_CHECK_OK(mp_thread_start(&thread, "loads", load_once_on, path, &error), &error);
    while (!getenv("OPENBLAS_NUM_THREADS"))
        mp_sys_sleep_ns(1000 * 1000);
    mp_sys_sleep_ns(20 * 1000 * 1000);
    pid_t child = fork();
    if (child == 0) {
        const char *why = "";
        alarm(15);
        int wrong = mp_blas_core(&why)[0] != 0 || !strstr(why, "was forked");
        _exit(wrong | (getenv("OPENBLAS_NUM_THREADS") != NULL) << 1);
    }
    int how = 0; /* a fork that waited for the load would last until the test's timeout */
    MP_CHECK(waitpid(child, &how, 0) == child);
    MP_CHECK_INT(how, 0);
    int fd = open(path, O_WRONLY); /* the thread's dlopen sees an empty file and fails */
    MP_CHECK(fd >= 0);
    close(fd);
    mp_thread_join(&thread);
    MP_CHECK(!getenv("OPENBLAS_NUM_THREADS"));
}
