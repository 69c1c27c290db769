/* runner.c: runs the tests that mp_test.h registered.
 *
 *     runner [--list] [--only prefix]... [--test name]... [--jobs n] [--verbose] [--slow factor] [--limit seconds]
 *            [--first-failure]
 *
 * --limit replaces the limit of every test, and --slow multiplies it. --first-failure starts no test after one has
 * failed. --verbose prints the passed tests with their wall and CPU seconds. The exit code is 0 if no test failed and
 * at least one ran. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc.h"
#include "mp_test.h"

enum { EXIT_SKIPPED = 77, MAX_JOBS = 16, MAX_CHOSEN = 1024 };

static mp_test *tests;
static const mp_test *running;
static char directory[256];

/* Sanitizers: a refused allocation returns NULL, as the tests expect; a leak or a race fails the test's process. */
__attribute__((used, visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void) {
    return "allocator_may_return_null=1:detect_stack_use_after_return=1:exitcode=99";
}
__attribute__((used, visibility("default"))) const char *__ubsan_default_options(void);
const char *__ubsan_default_options(void) { return "print_stacktrace=1"; }
__attribute__((used, visibility("default"))) const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "exitcode=99:allocator_may_return_null=1"; }

static int by_file_and_name(const mp_test *a, const mp_test *b) {
    int order = strcmp(a->file, b->file);
    return order ? order : strcmp(a->name, b->name);
}

void mp_test_add(mp_test *test) {
    mp_test **at = &tests;
    while (*at && by_file_and_name(*at, test) < 0)
        at = &(*at)->next;
    test->next = *at;
    *at = test;
}

void mp_test_fail(const char *file, int line, const char *format, ...) {
    char message[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    fprintf(stderr, "FAIL %s\n  %s:%d: %s\n", running ? running->name : "?", file, line, message);
    _exit(1);
}

void mp_test_skip(const char *file, int line, const char *reason) {
    fprintf(stderr, "skip %s (%s:%d): %s\n", running ? running->name : "?", file, line, reason);
    _exit(EXIT_SKIPPED);
}

const char *mp_test_directory(void) { return directory; }

const char *mp_test_root(void) {
    static char root[1024];
    const char *given = getenv("MPOOL_TEST_ROOT");
    snprintf(root, sizeof(root), "%s", given ? given : __FILE__);
    if (!given) { /* .../tests/c/runner.c */
        for (int i = 0; i < 2; i++) {
            char *slash = strrchr(root, '/');
            if (slash)
                *slash = 0;
        }
    }
    return root;
}

void mp_test_write_file(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "wb");
    if (!file || (bytes && fwrite(data, 1, bytes, file) != bytes) || fclose(file) != 0)
        MP_FAIL("cannot write %s: %s", path, strerror(errno));
}

uint64_t mp_test_random_u64(mp_test_random *random) { /* splitmix64 */
    uint64_t z = random->state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

float mp_test_random_float(mp_test_random *random, float low, float high) {
    return low + (high - low) * ((float)(mp_test_random_u64(random) >> 40) * 0x1p-24f);
}

/* --- one process per test --- */

/* NULL in a runner without the core, such as those that test the runner itself */
#pragma weak mp_alloc_bytes
#pragma weak mp_tag_name

static void count_memory(uint64_t *bytes) {
    for (mp_tag tag = 0; tag < MP_TAG_COUNT; tag++)
        bytes[tag] = mp_alloc_bytes ? mp_alloc_bytes(tag) : 0;
}

/* Give new memory a pattern, so that a test sees values that were never written. Fresh memory is zero otherwise. */
static void fill_memory(void) {
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    mallopt(M_PERTURB, 0x5A);
#endif
}

/* A test frees all that it allocates. The sanitizer's leak check does not see blocks that a global still refers to, and
 * runs in one variant only. Threads that the test has left behind may still be ending. */
static void check_leaks(const uint64_t *before) {
    enum { TRIES = 200 };
    for (int i = 0; i < TRIES; i++) {
        uint64_t bytes[MP_TAG_COUNT];
        mp_tag tag = 0;
        count_memory(bytes);
        while (tag < MP_TAG_COUNT && bytes[tag] <= before[tag])
            tag++;
        if (tag == MP_TAG_COUNT)
            return;
        if (i == TRIES - 1)
            MP_FAIL("%llu bytes of %s memory are never freed", (unsigned long long)(bytes[tag] - before[tag]),
                    mp_tag_name(tag));
        nanosleep(&(struct timespec){.tv_nsec = 10 * 1000 * 1000}, NULL);
    }
}

typedef struct job {
    pid_t pid; /* 0 = free */
    const mp_test *test;
    double started;
    bool killed;
    char directory[256];
} job;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *where) {
    (void)info, (void)kind, (void)where;
    return remove(path);
}

static void start(job *j, const mp_test *test) {
    const char *base = getenv("TMPDIR");
    snprintf(j->directory, sizeof(j->directory), "%s/mp_test_XXXXXX", base && *base ? base : "/tmp");
    if (!mkdtemp(j->directory)) {
        fprintf(stderr, "cannot create %s: %s\n", j->directory, strerror(errno));
        exit(2);
    }
    fflush(NULL);
    j->test = test;
    j->started = now();
    j->killed = false;
    j->pid = fork();
    if (j->pid < 0) {
        fprintf(stderr, "cannot fork: %s\n", strerror(errno));
        exit(2);
    }
    if (j->pid == 0) {
        setpgid(0, 0); /* children of the test end with its process group */
        running = test;
        memcpy(directory, j->directory, sizeof(directory));
        uint64_t before[MP_TAG_COUNT];
        count_memory(before);
        fill_memory();
        test->body();
        check_leaks(before);
        exit(0); /* not _exit: the leak check runs at exit */
    }
    setpgid(j->pid, j->pid);
}

typedef struct tally {
    int passed, failed, skipped;
} tally;

static double seconds_of(struct timeval time) { return (double)time.tv_sec + (double)time.tv_usec * 1e-6; }

static void finish(job *j, int status, const struct rusage *used, bool verbose, tally *t) {
    const char *name = j->test->name;
    double seconds = now() - j->started;
    kill(-j->pid, SIGKILL);
    nftw(j->directory, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        t->passed++;
        if (verbose)
            printf("ok   %s (%.2f s, cpu %.2f s)\n", name, seconds,
                   seconds_of(used->ru_utime) + seconds_of(used->ru_stime));
    } else if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SKIPPED) {
        t->skipped++;
    } else {
        t->failed++;
        if (j->killed)
            fprintf(stderr, "FAIL %s\n  %s: did not end within %.0f s\n", name, j->test->file, seconds);
        else if (WIFSIGNALED(status))
            fprintf(stderr, "FAIL %s\n  %s: ended by signal %d (%s)\n", name, j->test->file, WTERMSIG(status),
                    strsignal(WTERMSIG(status)));
        else if (WEXITSTATUS(status) != 1) /* a failed check has already printed its message */
            fprintf(stderr, "FAIL %s\n  %s: exit code %d (see the sanitizer's report above)\n", name, j->test->file,
                    WEXITSTATUS(status));
    }
    j->pid = 0;
}

typedef struct choice {
    const char *name;
    bool is_prefix;
} choice;

static bool wanted(const mp_test *test, const choice *chosen, int count) {
    for (int i = 0; i < count; i++)
        if (chosen[i].is_prefix ? strncmp(test->name, chosen[i].name, strlen(chosen[i].name)) == 0
                                : strcmp(test->name, chosen[i].name) == 0)
            return true;
    return count == 0;
}

int main(int argc, char **argv) {
    bool list = false, verbose = false, first_failure = false;
    int job_count = 1, chosen_count = 0;
    double slow = 1, limit = 0;
    static choice chosen[MAX_CHOSEN];
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (strcmp(argv[i], "--list") == 0)
            list = true;
        else if (strcmp(argv[i], "--verbose") == 0)
            verbose = true;
        else if (strcmp(argv[i], "--only") == 0 && more && chosen_count < MAX_CHOSEN)
            chosen[chosen_count++] = (choice){argv[++i], true};
        else if (strcmp(argv[i], "--test") == 0 && more && chosen_count < MAX_CHOSEN)
            chosen[chosen_count++] = (choice){argv[++i], false};
        else if (strcmp(argv[i], "--first-failure") == 0)
            first_failure = true;
        else if (strcmp(argv[i], "--limit") == 0 && more)
            limit = atof(argv[++i]);
        else if (strcmp(argv[i], "--jobs") == 0 && more)
            job_count = atoi(argv[++i]);
        else if (strcmp(argv[i], "--slow") == 0 && more)
            slow = atof(argv[++i]);
        else {
            fprintf(stderr,
                    "usage: %s [--list] [--only prefix]... [--test name]... [--jobs n] [--verbose] [--slow factor] "
                    "[--limit seconds] [--first-failure]\n",
                    argv[0]);
            return 2;
        }
    }
    job_count = job_count < 1 ? 1 : job_count > MAX_JOBS ? MAX_JOBS : job_count;

    for (const mp_test *test = tests; test; test = test->next)
        if (test->next && strcmp(test->name, test->next->name) == 0) {
            fprintf(stderr, "two tests have the name %s\n", test->name);
            return 2;
        }
    if (list) {
        for (const mp_test *test = tests; test; test = test->next)
            if (wanted(test, chosen, chosen_count))
                printf("%s\n", test->name);
        return 0;
    }

    static job jobs[MAX_JOBS];
    tally t = {0, 0, 0};
    double begun = now();
    const mp_test *next = tests;
    for (;;) {
        int busy = 0;
        for (int i = 0; i < job_count; i++) {
            job *j = &jobs[i];
            while (!j->pid && next && !(first_failure && t.failed)) {
                if (wanted(next, chosen, chosen_count))
                    start(j, next);
                next = next->next;
            }
            if (!j->pid)
                continue;
            busy++;
            int status;
            struct rusage used;
            if (wait4(j->pid, &status, WNOHANG, &used) == j->pid) {
                finish(j, status, &used, verbose, &t);
            } else if (!j->killed && now() - j->started > (limit > 0 ? limit : j->test->seconds) * slow) {
                j->killed = true;
                kill(-j->pid, SIGKILL);
                kill(j->pid, SIGKILL);
            }
        }
        if (!busy && (!next || (first_failure && t.failed)))
            break;
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    fflush(NULL);
    printf("c tests: %d passed, %d failed, %d skipped in %.1f s\n", t.passed, t.failed, t.skipped, now() - begun);
    return t.failed || t.passed + t.skipped == 0;
}
