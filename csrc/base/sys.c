/* sys.c: see sys.h. Each real_ function makes one kind of system call and is one row of mp_sys_real. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/sys.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h> /* snprintf only */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h> /* malloc_trim only */
#endif

#include "base/alloc.h"
#include "base/mix.h"
#include "base/parking.h"
#include "base/platform.h"
#include "base/sanitize.h"

#if defined(__APPLE__)
#include <pthread/qos.h>
#include <sys/sysctl.h>
#endif
#if MP_LINUX
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/syscall.h>
#endif

#ifdef MP_SEAM
#define SYS(name) mp_sys_table.name
#undef mp_mutex_init
#undef mp_mutex_deinit
#undef mp_mutex_lock
#undef mp_mutex_unlock
#undef mp_cond_init
#undef mp_cond_deinit
#undef mp_cond_wait
#undef mp_cond_signal
#undef mp_cond_broadcast
#undef mp_thread_start
#undef mp_thread_join
#undef mp_sys_sleep_ns
#else
#define SYS(name) real_##name
#endif

/* --- time --- */

static const uint64_t SECOND = 1000000000u;

static struct timespec to_timespec(uint64_t ns) {
    return (struct timespec){.tv_sec = (time_t)(ns / SECOND), .tv_nsec = (long)(ns % SECOND)};
}

static uint64_t real_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND + (uint64_t)now.tv_nsec;
}

static void real_sleep_ns(uint64_t ns) {
    struct timespec left = to_timespec(ns);
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

uint64_t mp_sys_now_ns(void) { return SYS(now_ns)(); }

uint64_t mp_sys_thread_ns(void) {
    struct timespec time = {0};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (uint64_t)time.tv_sec * SECOND + (uint64_t)time.tv_nsec;
}

void mp_sys_sleep_ns(uint64_t ns) { SYS(sleep_ns)(ns); }

static uint64_t real_involuntary_switches(void) {
#if defined(RUSAGE_THREAD)
    struct rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) == 0)
        return (uint64_t)usage.ru_nivcsw;
#endif
    return 0;
}

uint64_t mp_sys_involuntary_switches(void) { return SYS(involuntary_switches)(); }

static uint64_t real_major_faults(void) {
#if defined(RUSAGE_THREAD)
    struct rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) == 0)
        return (uint64_t)usage.ru_majflt;
#endif
    return 0;
}

uint64_t mp_sys_major_faults(void) { return SYS(major_faults)(); }

static uint64_t real_random(void) {
    uint64_t value = 0;
#if MP_LINUX
    if (getrandom(&value, sizeof(value), GRND_NONBLOCK) == (ssize_t)sizeof(value))
        return value;
#elif defined(__APPLE__)
    arc4random_buf(&value, sizeof(value));
    return value;
#endif
    /* getrandom fails in early boot and in some sandboxes. These values then differ between calls and processes, but an
     * attacker could predict them. */
    static _Atomic uint64_t count;
    value = real_now_ns() ^ ((uint64_t)getpid() << 32) ^ (uint64_t)(uintptr_t)&value;
    return mp_mix(value ^ mp_mix(atomic_fetch_add_explicit(&count, 1, memory_order_relaxed)));
}

uint64_t mp_sys_random(void) { return SYS(random)(); }

/* --- locks --- */

static void sys_check(int result) {
    assert(result == 0);
    (void)result;
}

static void real_mutex_lock(pthread_mutex_t *mutex) { sys_check(pthread_mutex_lock(mutex)); }
static void real_mutex_unlock(pthread_mutex_t *mutex) { sys_check(pthread_mutex_unlock(mutex)); }

static int real_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t deadline_ns) {
    if (!deadline_ns)
        return pthread_cond_wait(cond, mutex);
#if defined(__APPLE__)
    /* conditions use the wall clock on macOS: wait for the remaining time, not until the deadline */
    uint64_t now = real_now_ns();
    struct timespec left = to_timespec(deadline_ns > now ? deadline_ns - now : 0);
    return pthread_cond_timedwait_relative_np(cond, mutex, &left);
#else
    struct timespec deadline = to_timespec(deadline_ns);
    return pthread_cond_timedwait(cond, mutex, &deadline);
#endif
}

static void real_cond_wake(pthread_cond_t *cond, bool all) {
    sys_check(all ? pthread_cond_broadcast(cond) : pthread_cond_signal(cond));
}

static void real_mutex_init(pthread_mutex_t *mutex) {
    pthread_mutexattr_t attr;
    sys_check(pthread_mutexattr_init(&attr));
#ifndef NDEBUG
    sys_check(pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_ERRORCHECK));
#endif
    sys_check(pthread_mutex_init(mutex, &attr));
    sys_check(pthread_mutexattr_destroy(&attr));
}

static void real_mutex_deinit(pthread_mutex_t *mutex) { sys_check(pthread_mutex_destroy(mutex)); }

#ifndef MP_SEAM
static void set_holder(mp_mutex *mutex, bool held) { (void)mutex, (void)held; }
#else
static uint64_t real_self(void) {
    static _Thread_local char place;
    return (uint64_t)(uintptr_t)&place;
}

static void set_holder(mp_mutex *mutex, bool held) {
    atomic_store_explicit(&mutex->holder, held ? SYS(self)() : 0, memory_order_relaxed);
}

bool mp_mutex_is_held(const mp_mutex *mutex, bool expected) {
    uint64_t self = SYS(self)();
    return !self || (atomic_load_explicit(&mutex->holder, memory_order_relaxed) == self) == expected;
}
#endif

void mp_mutex_init(mp_mutex *mutex) {
    SYS(mutex_init)(&mutex->os);
    set_holder(mutex, false);
}

void mp_mutex_deinit(mp_mutex *mutex) { SYS(mutex_deinit)(&mutex->os); }

void mp_mutex_lock(mp_mutex *mutex) {
    SYS(mutex_lock)(&mutex->os);
    set_holder(mutex, true);
}

void mp_mutex_unlock(mp_mutex *mutex) {
    set_holder(mutex, false);
    SYS(mutex_unlock)(&mutex->os);
}

static void real_cond_init(pthread_cond_t *cond) {
    pthread_condattr_t attr;
    sys_check(pthread_condattr_init(&attr));
#if !defined(__APPLE__)
    sys_check(pthread_condattr_setclock(&attr, CLOCK_MONOTONIC));
#endif
    sys_check(pthread_cond_init(cond, &attr));
    sys_check(pthread_condattr_destroy(&attr));
}

static void real_cond_deinit(pthread_cond_t *cond) { sys_check(pthread_cond_destroy(cond)); }

void mp_cond_init(mp_cond *cond) { SYS(cond_init)(&cond->os); }
void mp_cond_deinit(mp_cond *cond) { SYS(cond_deinit)(&cond->os); }

bool mp_cond_wait(mp_cond *cond, mp_mutex *mutex, uint64_t deadline_ns) {
    set_holder(mutex, false);
    int result = SYS(cond_wait)(&cond->os, &mutex->os, deadline_ns);
    set_holder(mutex, true);
    assert(result == 0 || result == ETIMEDOUT);
    return result != ETIMEDOUT;
}

void mp_cond_signal(mp_cond *cond) { SYS(cond_wake)(&cond->os, false); }
void mp_cond_broadcast(mp_cond *cond) { SYS(cond_wake)(&cond->os, true); }

/* --- threads --- */

static _Atomic uint64_t threads_created, threads_joined;

static _Thread_local bool in_background;      /* the calling thread runs in the background */
static _Thread_local bool starts_background; /* mp_thread_start_in_background */

typedef struct thread_start {
    void (*body)(void *);
    void *arg;
    bool background, inherited; /* inherited: the starting thread runs in the background */
    char name[16];
} thread_start;

bool mp_thread_start_in_background(bool background) {
    bool before = starts_background;
    starts_background = background;
    return before;
}

/* `inherited`: Linux has given the thread the priority of the thread that started it. */
static void enter_background(bool inherited) {
    in_background = true;
#if MP_LINUX
    enum { NICER = 10 };
    const struct sched_param none = {0};
    if (inherited)
        return;
    /* Not through the C library, in which setpriority might mean the process, and musl has no sched_setscheduler. Other
     * policies than SCHED_OTHER are the user's own choice. */
    if (syscall(SYS_sched_getscheduler, 0) == SCHED_OTHER)
        syscall(SYS_sched_setscheduler, 0, SCHED_BATCH, &none);
    long now = 20 - syscall(SYS_getpriority, PRIO_PROCESS, 0); /* the system call returns 20 - nice: 1 to 40 */
    syscall(SYS_setpriority, PRIO_PROCESS, 0, now + NICER); /* the system reduces values above 19 */
#elif defined(__APPLE__)
    (void)inherited;
    pthread_set_qos_class_self_np(QOS_CLASS_UTILITY, 0);
#else
    (void)inherited;
#endif
}

static void *thread_main(void *arg) {
    thread_start start = *(thread_start *)arg;
    mp_free(arg);
#if MP_LINUX
    pthread_setname_np(pthread_self(), start.name);
#elif defined(__APPLE__)
    pthread_setname_np(start.name);
#endif
    if (start.background)
        enter_background(start.inherited);
    start.body(start.arg);
    return NULL;
}

static int real_thread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*body)(void *), void *arg) {
    return pthread_create(thread, attr, body, arg);
}

static void real_thread_join(pthread_t thread) { sys_check(pthread_join(thread, NULL)); }

static void real_thread_detach(pthread_t thread) { sys_check(pthread_detach(thread)); }

mp_status mp_thread_start(mp_thread *thread, const char *name, void (*body)(void *), void *arg, mp_error *error) {
    thread->started = false;
    thread_start *start = mp_alloc_zeroed(sizeof(*start), MP_TAG_POOL);
    if (!start)
        return mp_fail_memory(error, sizeof(*start), "a thread's start record");
    start->body = body;
    start->arg = arg;
    start->inherited = in_background;
    start->background = in_background || starts_background;
    strncpy(start->name, name, sizeof(start->name) - 1);

    /* The new thread inherits this thread's signal mask. Set the mask before the start, so that no signal reaches the
     * new thread first. */
    sigset_t blocked, before;
    sigfillset(&blocked);
    static const int faults[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
        sigdelset(&blocked, faults[i]);
    sys_check(pthread_sigmask(SIG_SETMASK, &blocked, &before));
    pthread_attr_t attr;
    size_t stack;
    sys_check(pthread_attr_init(&attr));
    sys_check(pthread_attr_getstacksize(&attr, &stack));
    if (stack < MP_THREAD_STACK_BYTES)
        sys_check(pthread_attr_setstacksize(&attr, MP_THREAD_STACK_BYTES));
    int result = SYS(thread_create)(&thread->os, &attr, thread_main, start);
    sys_check(pthread_attr_destroy(&attr));
    sys_check(pthread_sigmask(SIG_SETMASK, &before, NULL));

    if (result != 0) {
        mp_free(start);
        mp_error cause;
        mp_fail_errno(&cause, result, NULL, "the system refused to start a thread");
        return mp_fail_hint(error, MP_SPAWN_FAILED,
                            "Raise the limit on threads (ulimit -u, pids.max of the cgroup) or on memory (ulimit -v)",
                            "thread %s: %s", name, cause.message);
    }
    thread->started = true;
    atomic_fetch_add_explicit(&threads_created, 1, memory_order_relaxed);
    return MP_OK;
}

void mp_thread_join(mp_thread *thread) {
    if (!thread->started)
        return;
    SYS(thread_join)(thread->os);
    thread->started = false;
    atomic_fetch_add_explicit(&threads_joined, 1, memory_order_relaxed);
}

void mp_thread_detach(mp_thread *thread) {
    SYS(thread_detach)(thread->os);
    thread->started = false;
    atomic_fetch_add_explicit(&threads_joined, 1, memory_order_relaxed);
}

void mp_thread_counts(uint64_t *created, uint64_t *joined) {
    *joined = atomic_load_explicit(&threads_joined, memory_order_relaxed);
    *created = atomic_load_explicit(&threads_created, memory_order_relaxed);
}

mp_status mp_sys_at_fork(void (*before)(void), void (*parent)(void), void (*child)(void), mp_error *error) {
    int result = pthread_atfork(before, parent, child);
    return result ? mp_fail_errno(error, result, NULL, "the hooks for fork were refused") : MP_OK;
}

/* --- parking --- */

static void real_park(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns) {
#if MP_LINUX
    struct timespec timeout = to_timespec(timeout_ns);
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_PRIVATE, expected, timeout_ns ? &timeout : NULL, NULL, 0);
#else
    mp_parking_wait(word, expected, timeout_ns);
#endif
}

static void real_unpark_all(_Atomic uint32_t *word) {
#if MP_LINUX
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    mp_parking_wake(word);
#endif
}

void mp_park(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns) { SYS(park)(word, expected, timeout_ns); }
void mp_unpark_all(_Atomic uint32_t *word) { SYS(unpark_all)(word); }

/* --- CPUs and memory nodes --- */

static bool real_get_affinity(mp_cpu_set *cpus) {
    memset(cpus, 0, sizeof(*cpus));
#if MP_LINUX
    return sched_getaffinity(0, sizeof(*cpus), (cpu_set_t *)(void *)cpus) == 0;
#else
    return false;
#endif
}

static bool real_set_affinity(const mp_cpu_set *cpus) {
#if MP_LINUX
    return sched_setaffinity(0, sizeof(*cpus), (const cpu_set_t *)(const void *)cpus) == 0;
#else
    (void)cpus;
    return false;
#endif
}

static int real_cpu(void) {
#if MP_LINUX
    return sched_getcpu();
#else
    return -1;
#endif
}

static bool real_get_number(const char *name, int64_t *value) {
#if defined(__APPLE__)
    union { int32_t narrow; int64_t wide; } found = {0};
    size_t size = sizeof(found);
    if (sysctlbyname(name, &found, &size, NULL, 0) != 0 || (size != sizeof(found.narrow) && size != sizeof(found.wide)))
        return false;
    *value = size == sizeof(found.wide) ? found.wide : found.narrow;
    return true;
#else
    (void)name, (void)value;
    return false;
#endif
}

bool mp_sys_get_number(const char *name, int64_t *value) { return SYS(get_number)(name, value); }
bool mp_sys_get_affinity(mp_cpu_set *cpus) { return SYS(get_affinity)(cpus); }
bool mp_sys_set_affinity(const mp_cpu_set *cpus) { return SYS(set_affinity)(cpus); }
int mp_sys_cpu(void) { return SYS(cpu)(); }

/* --- raw memory --- */

/* A block of at least this size is a mapping of its own, so that freeing it returns its pages to the system: malloc
 * raises its mmap threshold at run time and would keep freed blocks of up to 32 MB. Sanitizers need malloc for their
 * red zones. */
static const size_t MAPPED_FROM = 256 * 1024;

static bool is_mapped(size_t bytes) { return !MP_SANITIZED && bytes >= MAPPED_FROM; }

static size_t page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

/* Large blocks start at a huge-page boundary, so that MP_ADVISE_HUGE can use whole huge pages. */
static void *map_anonymous(size_t bytes, size_t alignment) {
    size_t page = page_size(), whole;
    size_t slack = alignment > page || bytes >= 2 * (size_t)MP_HUGE_PAGE ? MP_HUGE_PAGE : 0;
    if (__builtin_add_overflow(bytes, page - 1, &whole))
        return NULL;
    whole &= ~(page - 1);
    if (whole > SIZE_MAX - slack)
        return NULL;
    uint8_t *map = mmap(NULL, whole + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return NULL;
    if (!slack)
        return map;
    size_t head = (size_t)(-(uintptr_t)map & (slack - 1));
    if (head)
        munmap(map, head);
    if (slack - head)
        munmap(map + head + whole, slack - head);
    return map + head;
}

static void *real_alloc(size_t bytes, size_t alignment) {
    if (is_mapped(bytes) && alignment <= MP_HUGE_PAGE)
        return map_anonymous(bytes, alignment);
    void *memory = NULL;
    return posix_memalign(&memory, alignment, bytes ? bytes : 1) == 0 ? memory : NULL;
}

static void real_free(void *memory, size_t bytes) {
    if (memory && is_mapped(bytes)) {
        size_t page = page_size();
        munmap(memory, (bytes + page - 1) & ~(page - 1));
        return;
    }
    free(memory);
}

static void real_prefer_node(void *memory, size_t bytes, int node) {
#if MP_LINUX && defined(SYS_mbind)
    enum { PREFERRED = 1, BITS = 8 * sizeof(unsigned long), WORDS = 1024 / BITS }; /* from libnuma's <numaif.h> */
    unsigned long nodes[WORDS] = {0};
    if (!is_mapped(bytes) || node < 0 || node >= WORDS * BITS)
        return;
    nodes[node / BITS] = 1ul << node % BITS;
    size_t page = page_size();
    syscall(SYS_mbind, memory, (bytes + page - 1) & ~(page - 1), PREFERRED, nodes, (unsigned long)(WORDS * BITS), 0);
#else
    (void)memory, (void)bytes, (void)node;
#endif
}

void mp_sys_prefer_node(void *memory, size_t bytes, int node) {
    if (bytes >= MAPPED_FROM)
        SYS(prefer_node)(memory, bytes, node);
}

void *mp_sys_alloc(size_t bytes, size_t alignment) { return SYS(alloc)(bytes, alignment); }
void mp_sys_free(void *memory, size_t bytes) { SYS(free)(memory, bytes); }

bool mp_sys_alloc_is_zero(size_t bytes) {
#ifdef MP_SEAM
    (void)bytes; /* a test may replace the allocator by one that does not zero */
    return false;
#else
    return is_mapped(bytes);
#endif
}

/* --- files --- */

static int real_open(const char *path, int flags) { return open(path, flags); }

static int64_t real_pread(int fd, void *to, size_t bytes, int64_t offset) {
    return pread(fd, to, bytes, (off_t)offset);
}

static int real_fallocate(int fd, int64_t offset, int64_t bytes) {
#if MP_LINUX
    return fallocate(fd, 0, (off_t)offset, (off_t)bytes);
#else
    (void)fd, (void)offset, (void)bytes;
    errno = ENOSYS;
    return -1;
#endif
}

static void *real_mmap(size_t bytes, int fd) { return mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0); }

static int real_madvise(void *data, size_t bytes, int advice) { return madvise(data, bytes, advice); }

static int real_mincore(void *data, size_t bytes, unsigned char *pages) {
#ifdef __APPLE__
    return mincore(data, bytes, (char *)pages);
#else
    return mincore(data, bytes, pages);
#endif
}

static mp_status require_regular(const struct stat *info, const char *path, mp_error *error) {
    if (S_ISREG(info->st_mode))
        return MP_OK;
    const char *kind = S_ISDIR(info->st_mode)    ? "a directory"
                       : S_ISFIFO(info->st_mode) ? "a FIFO"
                       : S_ISSOCK(info->st_mode) ? "a socket"
                       : S_ISCHR(info->st_mode)  ? "a character device"
                       : S_ISBLK(info->st_mode)  ? "a block device"
                                                 : "of an unknown kind";
    return mp_fail_file(error, MP_FORMAT, path, -1, "the path", "a regular file", "%s", kind);
}

static mp_file_id identity_of(const struct stat *info) {
#if defined(__APPLE__)
    struct timespec written = info->st_mtimespec;
#else
    struct timespec written = info->st_mtim;
#endif
    return (mp_file_id){
        .device = (uint64_t)info->st_dev,
        .inode = (uint64_t)info->st_ino,
        .size = (uint64_t)info->st_size,
        .mtime_ns = (uint64_t)written.tv_sec * SECOND + (uint64_t)written.tv_nsec,
        .owner = (uint64_t)info->st_uid,
    };
}

bool mp_file_id_same(const mp_file_id *a, const mp_file_id *b) {
    return a->device == b->device && a->inode == b->inode && a->size == b->size && a->mtime_ns == b->mtime_ns;
}

bool mp_sys_owns(const mp_file_id *id) { return geteuid() == 0 || id->owner == (uint64_t)geteuid(); }

mp_file_kind mp_sys_find(const char *path, mp_file_id *id) {
    struct stat info;
    if (stat(path, &info) != 0)
        return errno == ENOENT || errno == ENOTDIR ? MP_FILE_MISSING : MP_FILE_UNKNOWN;
    *id = identity_of(&info);
    return S_ISREG(info.st_mode) ? MP_FILE_REGULAR : MP_FILE_OTHER;
}

bool mp_sys_identify(const char *path, mp_file_id *id) { return mp_sys_find(path, id) == MP_FILE_REGULAR; }

bool mp_sys_identify_open(int fd, mp_file_id *id) {
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))
        return false;
    *id = identity_of(&info);
    return true;
}

bool mp_sys_find_open(int process, const mp_file_id *id, char *path, size_t size) {
    char folder[32];
    mp_file_id now;
    bool found = false;
    snprintf(folder, sizeof folder, "/proc/%d/fd", process);
    DIR *list = opendir(folder);
    for (struct dirent *one; list && !found && (one = readdir(list));)
        found = (size_t)snprintf(path, size, "%s/%s", folder, one->d_name) < size && mp_sys_identify(path, &now) &&
                mp_file_id_same(id, &now);
    if (list)
        closedir(list);
    return found;
}

mp_status mp_sys_open(const char *path, int *fd, mp_file_id *id, mp_error *error) {
    struct stat info;
    *fd = -1;
    if (stat(path, &info) == 0)
        MP_TRY(require_regular(&info, path, error)); /* opening some devices has side effects */
    int opened;
    do {
        opened = SYS(open)(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    } while (opened < 0 && errno == EINTR);
    if (opened < 0)
        return mp_fail_errno(error, errno, path, "cannot be opened");
    mp_status status = MP_OK;
    if (fstat(opened, &info) != 0)
        status = mp_fail_errno(error, errno, path, "cannot be examined");
    else
        status = require_regular(&info, path, error);
    if (status != MP_OK) {
        close(opened);
        return status;
    }
    if (id)
        *id = identity_of(&info);
    *fd = opened;
    return MP_OK;
}

void mp_sys_close(int fd) {
    if (fd >= 0)
        close(fd); /* do not retry on EINTR: Linux has closed the descriptor */
}

bool mp_sys_read_text(const char *path, char *to, size_t size) {
    int fd;
    do {
        fd = SYS(open)(path, O_RDONLY | O_CLOEXEC);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0)
        return false;
    size_t done = 0;
    while (done < size - 1) {
        int64_t got = SYS(pread)(fd, to + done, size - 1 - done, (int64_t)done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        done += (size_t)got;
    }
    close(fd);
    to[done] = 0;
    return done > 0;
}

bool mp_sys_fill(int fd, size_t from, size_t bytes) {
    /* Allocate in parts: a signal interrupts fallocate and undoes the current part only. */
    enum { LARGEST = 16 << 20, MIN = 64 << 10 };
    size_t part = LARGEST;
    for (size_t done = 0; done < bytes;) {
        size_t now = bytes - done < part ? bytes - done : part;
        if (SYS(fallocate)(fd, (int64_t)(from + done), (int64_t)now) == 0)
            done += now;
        else if (errno == EINTR)
            part = part > MIN ? part / 2 : MIN;
        else
            return errno == EOPNOTSUPP || errno == ENOSYS;
    }
    return true;
}

mp_status mp_sys_map(int fd, size_t bytes, const char *path, void **data, mp_error *error) {
    *data = NULL;
    if (bytes == 0)
        return mp_fail_file(error, MP_FORMAT, path, -1, "the size", "at least 1 byte", "0 bytes");
    void *map = SYS(mmap)(bytes, fd);
    if (map == MAP_FAILED)
        return mp_fail_errno(error, errno, path, "cannot be mapped");
    *data = map;
    return MP_OK;
}

void mp_sys_unmap(void *data, size_t bytes) {
    if (data)
        munmap(data, bytes);
}

void mp_sys_advise(void *data, size_t bytes, int advice) {
    int native;
    switch (advice) {
    case MP_ADVISE_WILLNEED:
        native = MADV_WILLNEED;
        break;
    case MP_ADVISE_DONTNEED:
        native = MADV_DONTNEED;
        break;
#ifdef MADV_HUGEPAGE
    case MP_ADVISE_HUGE:
        native = MADV_HUGEPAGE;
        break;
#endif
    case MP_ADVISE_POPULATE:
#if !MP_LINUX
        native = MADV_WILLNEED;
#elif defined(MADV_POPULATE_READ)
        native = MADV_POPULATE_READ;
#else
        native = 22; /* MADV_POPULATE_READ, Linux 5.14; older kernels refuse it */
#endif
        break;
    case MP_ADVISE_PAGEOUT:
#if !MP_LINUX
        return;
#elif defined(MADV_PAGEOUT)
        native = MADV_PAGEOUT;
#else
        native = 21; /* MADV_PAGEOUT, Linux 5.4; older kernels refuse it */
#endif
        break;
    default:
        return;
    }
    const bool reads = advice == MP_ADVISE_WILLNEED || advice == MP_ADVISE_POPULATE;
    uintptr_t page = page_size(), begin = (uintptr_t)data, end, *up = reads ? &end : &begin; /* `up` is rounded up */
    if (bytes == 0 || __builtin_add_overflow(begin, bytes, &end) || __builtin_add_overflow(*up, page - 1, up))
        return;
    begin &= ~(page - 1);
    end &= ~(page - 1);
    if (begin < end)
        SYS(madvise)((void *)begin, end - begin, native);
}

void mp_sys_trim_heap(void) {
#if defined(__GLIBC__) && !MP_SANITIZED
    /* One thread at a time: if another allocator replaces glibc's, the first call initialises glibc's heap, without a
     * lock. */
    static atomic_flag running = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&running)) {
        malloc_trim(0);
        atomic_flag_clear(&running);
    }
#endif
}

uint64_t mp_sys_resident(const void *data, size_t bytes) {
    enum { PAGES = 512 };
    unsigned char pages[PAGES];
    const size_t page = page_size();
    const uintptr_t begin = (uintptr_t)data & ~(page - 1), end = (uintptr_t)data + bytes;
    uint64_t resident = 0;
    for (uintptr_t at = begin; at < end; at += PAGES * page) {
        const size_t left = end - at < PAGES * page ? end - at : PAGES * page;
        if (SYS(mincore)((void *)at, left, pages) != 0)
            return bytes;
        for (size_t i = 0; i < (left + page - 1) / page; i++)
            resident += pages[i] & 1 ? page : 0;
    }
    return resident;
}

#ifdef MP_SEAM
_Thread_local mp_seam_site mp_seam_at;

static void real_point(void) {}

#define REAL_CALLS                                                                                                  \
    {                                                                                                               \
        .alloc = real_alloc, .free = real_free, .thread_create = real_thread_create, .now_ns = real_now_ns,         \
        .random = real_random, .involuntary_switches = real_involuntary_switches,                                   \
        .major_faults = real_major_faults,                                                                          \
        .mutex_init = real_mutex_init, .mutex_deinit = real_mutex_deinit,                                           \
        .cond_init = real_cond_init, .cond_deinit = real_cond_deinit,                                               \
        .park = real_park, .unpark_all = real_unpark_all, .point = real_point, .get_affinity = real_get_affinity,   \
        .set_affinity = real_set_affinity, .get_number = real_get_number, .prefer_node = real_prefer_node,          \
        .open = real_open, .pread = real_pread, .fallocate = real_fallocate, .mmap = real_mmap,                     \
        .madvise = real_madvise, .cond_wait = real_cond_wait, .cond_wake = real_cond_wake,                          \
        .mutex_lock = real_mutex_lock, .mutex_unlock = real_mutex_unlock, .thread_join = real_thread_join,          \
        .thread_detach = real_thread_detach, .sleep_ns = real_sleep_ns, .mincore = real_mincore,                    \
        .self = real_self, .cpu = real_cpu                                                                          \
    }

const mp_sys_calls mp_sys_real = REAL_CALLS;
mp_sys_calls mp_sys_table = REAL_CALLS;
#endif
