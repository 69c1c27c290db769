/* sys.h: the seam between the core and the operating system: allocations, threads, locks, clocks, files and mappings.
 *
 * The release build calls libc and pthread directly. A build with MP_SEAM=1 (tests) calls through mp_sys_table, which a
 * test may replace to count and fail calls, to run threads as fibres under a seeded scheduler, or to move the clock. No
 * file outside base/ calls malloc, pthread_* or open itself.
 *
 * Every function is thread-safe unless it says otherwise. */
#ifndef MP_BASE_SYS_H
#define MP_BASE_SYS_H

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/error.h"

/* --- time: nanoseconds of CLOCK_MONOTONIC. A deadline is a point on this clock; 0 = no deadline --- */
uint64_t mp_sys_now_ns(void);
/* CPU time of the calling thread so far, in ns. The call takes about 1 us. */
uint64_t mp_sys_thread_ns(void);
void mp_sys_sleep_ns(uint64_t ns);
/* now_ns + ns, saturating at UINT64_MAX, which means never. */
static inline uint64_t mp_sys_after(uint64_t now_ns, uint64_t ns) {
    return ns < UINT64_MAX - now_ns ? now_ns + ns : UINT64_MAX;
}

/* Involuntary context switches of the calling thread so far; 0 where the system does not count them. */
uint64_t mp_sys_involuntary_switches(void);
/* Page faults of the calling thread so far that waited for a disk; 0 where the system does not count them. */
uint64_t mp_sys_major_faults(void);

/* --- random numbers --- */
/* Return 64 random bits, for the seed of a request without one, a hash key or a name. Unpredictable, unless the system
 * has no random numbers. Never use it for results that must be reproducible. */
uint64_t mp_sys_random(void);

/* --- locks, not recursive --- */
typedef struct mp_mutex {
    pthread_mutex_t os;
#ifdef MP_SEAM
    _Atomic uint64_t holder; /* number of the thread that holds it; 0 = none */
#endif
} mp_mutex;
typedef struct mp_cond { pthread_cond_t os; } mp_cond; /* timed waits use CLOCK_MONOTONIC */
/* Initialiser of a static mutex. */
#define MP_MUTEX_STATIC {.os = PTHREAD_MUTEX_INITIALIZER}
void mp_mutex_init(mp_mutex *mutex);
void mp_mutex_deinit(mp_mutex *mutex);
void mp_mutex_lock(mp_mutex *mutex);
void mp_mutex_unlock(mp_mutex *mutex);
/* mp_assert_held(mutex) and mp_assert_not_held(mutex) check that the calling thread holds the lock, or not. Empty in
 * a build without MP_SEAM. */
#ifndef MP_SEAM
#define mp_assert_held(mutex) ((void)sizeof(mutex))
#define mp_assert_not_held(mutex) ((void)sizeof(mutex))
#else
bool mp_mutex_is_held(const mp_mutex *mutex, bool expected); /* true if what is expected holds, or is not known */
#define mp_assert_held(mutex) assert(mp_mutex_is_held(mutex, true))
#define mp_assert_not_held(mutex) assert(mp_mutex_is_held(mutex, false))
#endif
void mp_cond_init(mp_cond *cond);
void mp_cond_deinit(mp_cond *cond);
/* Wait until signalled or until the deadline (0 = none). Returns false when the deadline has passed. May wake
 * spuriously: always wait in a loop over the condition. */
bool mp_cond_wait(mp_cond *cond, mp_mutex *mutex, uint64_t deadline_ns);
void mp_cond_signal(mp_cond *cond);
void mp_cond_broadcast(mp_cond *cond);

/* --- threads --- */
typedef struct mp_thread { pthread_t os; bool started; } mp_thread;
/* Minimum stack size of a thread, used where the system's default is smaller (`ulimit -s`, another C library): kernels
 * use up to 512 KiB of stack. */
enum { MP_THREAD_STACK_BYTES = 2 << 20 };
/* Start a thread. `name`: at most 15 characters, shown by the system's tools. The new thread blocks every signal except
 * those that its own faults raise: SIGBUS on a mapped file must reach its handler. SPAWN_FAILED when the system refuses
 * the thread. */
mp_status mp_thread_start(mp_thread *thread, const char *name, void (*body)(void *), void *arg, mp_error *error);
void mp_thread_join(mp_thread *thread); /* does nothing if the thread never started */
/* Detach a thread that may never return, instead of joining it. mp_thread_counts counts it as joined. */
void mp_thread_detach(mp_thread *thread);
/* Threads that the calling thread starts from now on run in the background, or not (the default): other programs go
 * first. Returns the previous setting. Threads that a background thread starts run in the background too, and so do its
 * child processes on Linux. There, background means the policy SCHED_BATCH and a nice value that is 10 higher: a thread
 * gets about a tenth of a CPU that another program wants, and never preempts another thread when it wakes. SCHED_IDLE
 * would leave it almost nothing, and all threads of a parallel region wait for the slowest one. On macOS, background
 * means the QoS class utility. Best effort: where the system refuses, the thread runs as usual. */
bool mp_thread_start_in_background(bool background);
/* Threads created and joined since the process began; equal after a clean shutdown. */
void mp_thread_counts(uint64_t *created, uint64_t *joined);

/* Register hooks that run at every later fork of the process: `before` and `parent` in the parent's forking thread,
 * `child` in the child's only thread. Used by base/forked.c only. MEMORY_EXHAUSTED when the system has no memory for
 * the hooks. */
mp_status mp_sys_at_fork(void (*before)(void), void (*parent)(void), void (*child)(void), mp_error *error);

/* --- CPUs and memory nodes; base/topology.h lists the CPUs of each node and core --- */
enum { MP_CPUS_MAX = 1024 };
typedef struct mp_cpu_set { uint64_t words[MP_CPUS_MAX / 64]; } mp_cpu_set; /* CPU i: bit i % 64 of word i / 64 */
/* Get the CPUs that the calling thread may use, of CPUs 0 to MP_CPUS_MAX - 1. Returns false where the system does not
 * report them. */
bool mp_sys_get_affinity(mp_cpu_set *cpus);
/* Bind the calling thread to these CPUs. Returns false when the system refuses; the thread's CPUs are then
 * unchanged. */
bool mp_sys_set_affinity(const mp_cpu_set *cpus);
int mp_sys_cpu(void); /* the CPU that the calling thread runs on; negative where the system does not report it */
/* Get a number that the system reports under this name, such as "hw.nperflevels" of macOS (sysctl). Returns false where
 * the system has no such names, or not this one. */
bool mp_sys_get_number(const char *name, int64_t *value);
/* Prefer this memory node (the system's number) for pages of an mp_sys_alloc block that are touched from now on. Best
 * effort. No effect on blocks below 256 KiB, which share pages with other blocks. */
void mp_sys_prefer_node(void *memory, size_t bytes, int node);

/* --- parking on a word, used by event_count.h only: a futex on Linux, parking.h elsewhere --- */
void mp_park(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns);
void mp_unpark_all(_Atomic uint32_t *word);

/* --- raw memory; use base/alloc.h instead --- */
enum { MP_HUGE_PAGE = 2 << 20 }; /* bytes of a huge page on x86-64, and on ARM with pages of 4 KiB */
void *mp_sys_alloc(size_t bytes, size_t alignment); /* NULL when refused; not zeroed; alignment: at most MP_HUGE_PAGE */
void mp_sys_free(void *memory, size_t bytes);        /* bytes: as passed to mp_sys_alloc */
/* True when mp_sys_alloc fills a block of this size with zeros. */
bool mp_sys_alloc_is_zero(size_t bytes);

/* --- files --- */
typedef struct mp_file_id { /* identity of a file's content: detects that the file was changed or replaced */
    uint64_t device, inode, size, mtime_ns;
    uint64_t owner; /* user id; not compared */
} mp_file_id;
/* True when both identify the same content, as far as metadata can tell: device, inode, size and modification time. The
 * change time does not count, because chmod, chown and new links advance it too. */
bool mp_file_id_same(const mp_file_id *a, const mp_file_id *b);
/* True if the process has the file's user id, or is the superuser. */
bool mp_sys_owns(const mp_file_id *id);
typedef enum mp_file_kind { MP_FILE_UNKNOWN, MP_FILE_MISSING, MP_FILE_REGULAR, MP_FILE_OTHER } mp_file_kind;
/* Identify what a path names now: a regular file, or another one such as a folder. Returns MISSING if it names nothing,
 * UNKNOWN if the system does not say. */
mp_file_kind mp_sys_find(const char *path, mp_file_id *id);
/* Identify the file that a path names now. Returns false unless the path names a regular file. */
bool mp_sys_identify(const char *path, mp_file_id *id);
/* Identify an open file. Returns false unless it is a regular file. */
bool mp_sys_identify_open(int fd, mp_file_id *id);
/* Find a file among the descriptors of another process, and write a path that opens it, whatever the file's own path
 * names by now. Returns false if that process has no such file open, or where the system has no /proc. */
bool mp_sys_find_open(int process, const mp_file_id *id, char *path, size_t size);
/* Open a regular file for reading, with O_CLOEXEC, and with O_NONBLOCK so that opening a FIFO cannot block. FORMAT for
 * any other kind of file; a device is refused before it is opened. IO, with the system's message, for any other
 * failure. `id` may be NULL. */
mp_status mp_sys_open(const char *path, int *fd, mp_file_id *id, mp_error *error);
void mp_sys_close(int fd);
/* Read a file of procfs or sysfs, whose size is unknown: at most size - 1 bytes, zero-terminated. Returns false when
 * nothing could be read. */
bool mp_sys_read_text(const char *path, char *to, size_t size);
/* Allocate the pages of a byte range of a memory file now, because a later write to a page that cannot be allocated
 * raises SIGBUS. Returns false when there is not enough memory, and true where the system cannot preallocate pages. */
bool mp_sys_fill(int fd, size_t from, size_t bytes);
/* Map the first `bytes` bytes of a file, read-only and shared. FORMAT when `bytes` is 0; IO or MEMORY_EXHAUSTED when
 * the system refuses. `path` is for the error. */
mp_status mp_sys_map(int fd, size_t bytes, const char *path, void **data, mp_error *error);
void mp_sys_unmap(void *data, size_t bytes);
enum { MP_ADVISE_WILLNEED, MP_ADVISE_DONTNEED, MP_ADVISE_HUGE, MP_ADVISE_POPULATE, MP_ADVISE_PAGEOUT };
/* Advise the system about the pages of a range. Best effort. WILLNEED and POPULATE cover every page that contains a
 * byte of the range, because reading more bytes is harmless. The others cover only whole pages inside the range,
 * because the other bytes of a page may be in use. PAGEOUT drops pages of a file from the page cache, unless other
 * processes map them. */
void mp_sys_advise(void *data, size_t bytes, int advice);
/* Give free pages of the C library's heap back to the system, where the library has such a call. Takes up to tens of
 * milliseconds, in which allocations of other threads may wait. */
void mp_sys_trim_heap(void);
/* Bytes of a mapped range whose pages are in memory. Counts whole pages, so it may exceed `bytes`. For a file that
 * another user owns (mp_sys_owns), the system may report all pages. */
uint64_t mp_sys_resident(const void *data, size_t bytes);

#ifdef MP_SEAM
/* The table of system calls. A test copies mp_sys_real, changes rows and assigns mp_sys_table before any other call. */
typedef struct mp_sys_calls {
    void *(*alloc)(size_t bytes, size_t alignment);
    void (*free)(void *memory, size_t bytes);
    int (*thread_create)(pthread_t *thread, const pthread_attr_t *attr, void *(*body)(void *), void *arg);
    uint64_t (*now_ns)(void);
    uint64_t (*random)(void);
    uint64_t (*involuntary_switches)(void);
    uint64_t (*major_faults)(void);
    int (*mincore)(void *data, size_t bytes, unsigned char *pages);
    void (*mutex_init)(pthread_mutex_t *mutex);
    void (*mutex_deinit)(pthread_mutex_t *mutex);
    void (*cond_init)(pthread_cond_t *cond);
    void (*cond_deinit)(pthread_cond_t *cond);
    void (*park)(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns);
    void (*unpark_all)(_Atomic uint32_t *word);
    void (*point)(void);
    bool (*get_affinity)(mp_cpu_set *cpus);
    bool (*set_affinity)(const mp_cpu_set *cpus);
    int (*cpu)(void);
    bool (*get_number)(const char *name, int64_t *value);
    void (*prefer_node)(void *memory, size_t bytes, int node);
    int (*open)(const char *path, int flags);
    int64_t (*pread)(int fd, void *to, size_t bytes, int64_t offset);
    int (*fallocate)(int fd, int64_t offset, int64_t bytes);
    void *(*mmap)(size_t bytes, int fd);
    int (*madvise)(void *data, size_t bytes, int advice);
    int (*cond_wait)(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t deadline_ns); /* returns 0 or ETIMEDOUT */
    void (*cond_wake)(pthread_cond_t *cond, bool all);
    void (*mutex_lock)(pthread_mutex_t *mutex);
    void (*mutex_unlock)(pthread_mutex_t *mutex);
    uint64_t (*self)(void); /* a number of the calling thread; 0: no other thread runs, and locks are not checked */
    void (*thread_join)(pthread_t thread);
    void (*thread_detach)(pthread_t thread);
    void (*sleep_ns)(uint64_t ns);
} mp_sys_calls;
extern const mp_sys_calls mp_sys_real;
extern mp_sys_calls mp_sys_table;

/* Source position of the calling thread's last call through the seam; tests print it in traces. */
typedef struct mp_seam_site {
    const char *file, *what; /* `what`: the argument as written in the source, or a thread's name */
    int line;
} mp_seam_site;
extern _Thread_local mp_seam_site mp_seam_at;

#define MP_SEAM_AT(text) (mp_seam_at = (mp_seam_site){__FILE__, text, __LINE__})
#define mp_mutex_init(mutex) (MP_SEAM_AT(#mutex), mp_mutex_init(mutex))
#define mp_mutex_deinit(mutex) (MP_SEAM_AT(#mutex), mp_mutex_deinit(mutex))
#define mp_mutex_lock(mutex) (MP_SEAM_AT(#mutex), mp_mutex_lock(mutex))
#define mp_mutex_unlock(mutex) (MP_SEAM_AT(#mutex), mp_mutex_unlock(mutex))
#define mp_cond_init(cond) (MP_SEAM_AT(#cond), mp_cond_init(cond))
#define mp_cond_deinit(cond) (MP_SEAM_AT(#cond), mp_cond_deinit(cond))
#define mp_cond_wait(cond, mutex, deadline_ns) (MP_SEAM_AT(#cond), mp_cond_wait(cond, mutex, deadline_ns))
#define mp_cond_signal(cond) (MP_SEAM_AT(#cond), mp_cond_signal(cond))
#define mp_cond_broadcast(cond) (MP_SEAM_AT(#cond), mp_cond_broadcast(cond))
#define mp_thread_start(thread, name, body, arg, error) \
    (MP_SEAM_AT(name), mp_thread_start(thread, name, body, arg, error))
#define mp_thread_join(thread) (MP_SEAM_AT(#thread), mp_thread_join(thread))
#define mp_sys_sleep_ns(ns) (MP_SEAM_AT(#ns), mp_sys_sleep_ns(ns))
#endif

#endif
