/* sys.h: the seam. Every allocation, thread, lock, clock, file and mapping of the core goes through here.
 *
 * The release build calls libc and pthread directly (the functions are static inline or trivially thin). A build with
 * MP_SEAM=1 (tests) calls through mp_sys_table, which a test may replace to count and fail calls, to run threads as
 * fibres under a seeded scheduler, or to move the clock. Nothing outside base/ calls malloc, pthread_* or open itself.
 *
 * Threads: every function may be called from any thread unless it says otherwise. */
#ifndef MP_BASE_SYS_H
#define MP_BASE_SYS_H

#include <pthread.h>

#include "base/error.h"

/* --- time: nanoseconds of CLOCK_MONOTONIC; deadlines are absolute in it; 0 = none --- */
uint64_t mp_sys_now_ns(void);
/* Time that the calling thread has had a processor; takes a microsecond. */
uint64_t mp_sys_thread_ns(void);
void mp_sys_sleep_ns(uint64_t ns);
/* So much later; UINT64_MAX is never, and stays. */
static inline uint64_t mp_sys_after(uint64_t now_ns, uint64_t ns) {
    return ns < UINT64_MAX - now_ns ? now_ns + ns : UINT64_MAX;
}

/* How often the system has taken the CPU away from the calling thread so far; 0 where it does not tell. */
uint64_t mp_sys_taken_away(void);

/* --- randomness for seeds that the caller did not give; never for anything that must repeat --- */
uint64_t mp_sys_random(void);

/* --- locks; not recursive --- */
typedef struct mp_mutex { pthread_mutex_t os; } mp_mutex;
typedef struct mp_cond { pthread_cond_t os; } mp_cond; /* on CLOCK_MONOTONIC */
/* For a lock of the whole process, which nobody could initialise first. */
#define MP_MUTEX_STATIC {PTHREAD_MUTEX_INITIALIZER}
void mp_mutex_init(mp_mutex *mutex);
void mp_mutex_deinit(mp_mutex *mutex);
void mp_mutex_lock(mp_mutex *mutex);
void mp_mutex_unlock(mp_mutex *mutex);
void mp_cond_init(mp_cond *cond);
void mp_cond_deinit(mp_cond *cond);
/* Wait until signalled or, when deadline_ns is not 0, until then. Returns false when the deadline has passed. May wake
 * spuriously: always wait in a loop over the predicate. */
bool mp_cond_wait(mp_cond *cond, mp_mutex *mutex, uint64_t deadline_ns);
void mp_cond_signal(mp_cond *cond);
void mp_cond_broadcast(mp_cond *cond);

/* --- threads --- */
typedef struct mp_thread { pthread_t os; bool started; } mp_thread;
/* Least stack of a thread, whatever the system's default is (`ulimit -s`, another C library): kernels put aside up to
 * 512 KiB there. */
enum { MP_THREAD_STACK_BYTES = 2 << 20 };
/* name: at most 15 characters, shown by the system's tools. Every signal is blocked in the new thread, except those
 * that a fault of the thread itself raises (SIGBUS on a mapped file must reach its handler). SPAWN_FAILED when
 * refused. */
mp_status mp_thread_start(mp_thread *thread, const char *name, void (*body)(void *), void *arg, mp_error *error);
void mp_thread_join(mp_thread *thread); /* legal on one that never started */
/* Nobody will join it: for a thread that may never return. It counts as joined from now on. */
void mp_thread_detach(mp_thread *thread);
/* Counts since the process began: created == joined after a clean shutdown. */
void mp_thread_counts(uint64_t *created, uint64_t *joined);

/* Call the hooks around every later fork of the process: `before` and `parent` in the parent's forking thread, `child`
 * in the child's only thread. Used by base/forked.c only. MEMORY_EXHAUSTED when refused. */
mp_status mp_sys_at_fork(void (*before)(void), void (*parent)(void), void (*child)(void), mp_error *error);

/* --- CPUs and memory nodes; base/topology.h says which CPUs lie where --- */
enum { MP_CPUS_MAX = 1024 };
typedef struct mp_cpu_set { uint64_t words[MP_CPUS_MAX / 64]; } mp_cpu_set; /* CPU i: bit i % 64 of word i / 64 */
/* CPUs that the calling thread may use, of the first MP_CPUS_MAX. False where the system does not tell. */
bool mp_sys_get_affinity(mp_cpu_set *cpus);
/* The calling thread runs on these from now on. False when refused: it runs where it did. */
bool mp_sys_set_affinity(const mp_cpu_set *cpus);
/* Pages of a block of mp_sys_alloc that are touched from now on come from this memory node (the system's number) while
 * it has some. Best effort, and for large blocks only: a small one shares its pages with others. */
void mp_sys_prefer_node(void *memory, size_t bytes, int node);

/* --- parking on a word, used by team.c only: futex on Linux, a short sleep elsewhere --- */
void mp_park(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns);
void mp_unpark_all(_Atomic uint32_t *word);

/* --- raw memory; use base/alloc.h instead --- */
void *mp_sys_alloc(size_t bytes, size_t alignment); /* NULL when refused; not zeroed */
void mp_sys_free(void *memory, size_t bytes);        /* bytes: as they were asked for */
/* Whether a block of this size comes from mp_sys_alloc filled with zeros. */
bool mp_sys_alloc_is_zero(size_t bytes);

/* --- files --- */
typedef struct mp_file_id { /* enough to notice that a path now names another content */
    uint64_t device, inode, size, mtime_ns;
    uint64_t ctime_ns;     /* writing moves it, too, and nobody can set it back */
    uint64_t mode, links;  /* changing one of these three also moves ctime, and no content */
    uint64_t owner;        /* user and group */
} mp_file_id;
/* The same content, as far as that can be told without reading it. */
bool mp_file_id_same(const mp_file_id *a, const mp_file_id *b);
/* Of what a path names now; false when there is nothing, or no regular file. */
bool mp_sys_identify(const char *path, mp_file_id *id);
/* Open a regular file for reading (O_CLOEXEC, O_NONBLOCK so that a FIFO cannot hang it). FORMAT when it is not one: a
 * device is not even opened. IO with the system's words otherwise. id may be NULL. */
mp_status mp_sys_open(const char *path, int *fd, mp_file_id *id, mp_error *error);
void mp_sys_close(int fd);
/* Read what there is, at most size - 1 bytes, of a file of procfs or sysfs, which have no size; zero-terminated. False
 * when there is nothing. */
bool mp_sys_read_text(const char *path, char *to, size_t size);
/* Pages for the first `bytes` of a file in memory, now: a write to one that cannot be had later would be SIGBUS. False
 * when there are not so many; true also where the system cannot be asked. */
bool mp_sys_fill(int fd, size_t from, size_t bytes);
/* Map read-only and shared. FORMAT when bytes is 0. */
mp_status mp_sys_map(int fd, size_t bytes, const char *path, void **data, mp_error *error);
void mp_sys_unmap(void *data, size_t bytes);
enum { MP_ADVISE_WILLNEED, MP_ADVISE_DONTNEED, MP_ADVISE_HUGE, MP_ADVISE_POPULATE };
/* Best effort; whole pages inside the range only. */
void mp_sys_advise(void *data, size_t bytes, int advice);

#ifdef MP_SEAM
/* The replaceable table. A test copies mp_sys_real, changes rows and assigns mp_sys_table before any other call. */
typedef struct mp_sys_calls {
    void *(*alloc)(size_t bytes, size_t alignment);
    void (*free)(void *memory, size_t bytes);
    int (*thread_create)(pthread_t *thread, const pthread_attr_t *attr, void *(*body)(void *), void *arg);
    uint64_t (*now_ns)(void);
    uint64_t (*random)(void);
    uint64_t (*taken_away)(void);
    void (*mutex_init)(pthread_mutex_t *mutex);
    void (*mutex_deinit)(pthread_mutex_t *mutex);
    void (*cond_init)(pthread_cond_t *cond);
    void (*cond_deinit)(pthread_cond_t *cond);
    void (*park)(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns);
    void (*unpark_all)(_Atomic uint32_t *word);
    void (*point)(void);
    bool (*get_affinity)(mp_cpu_set *cpus);
    bool (*set_affinity)(const mp_cpu_set *cpus);
    void (*prefer_node)(void *memory, size_t bytes, int node);
    int (*open)(const char *path, int flags);
    int64_t (*pread)(int fd, void *to, size_t bytes, int64_t offset);
    int (*fallocate)(int fd, int64_t offset, int64_t bytes);
    void *(*mmap)(size_t bytes, int fd);
    int (*madvise)(void *data, size_t bytes, int advice);
    int (*cond_wait)(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t deadline_ns); /* 0 or ETIMEDOUT */
    void (*cond_wake)(pthread_cond_t *cond, bool all);
    void (*mutex_lock)(pthread_mutex_t *mutex);
    void (*mutex_unlock)(pthread_mutex_t *mutex);
    void (*thread_join)(pthread_t thread);
    void (*thread_detach)(pthread_t thread);
    void (*sleep_ns)(uint64_t ns);
} mp_sys_calls;
extern const mp_sys_calls mp_sys_real;
extern mp_sys_calls mp_sys_table;

/* Where the last call of the seam stands in the sources, for a test that shows what happened. */
typedef struct mp_seam_site {
    const char *file, *what; /* what: the argument as it is written there, or a thread's name */
    int line;
} mp_seam_site;
extern _Thread_local mp_seam_site mp_seam_at;
/* The planted bug that is active, 0 = none; and how often its place was reached. */
extern _Atomic int mp_seam_armed, mp_seam_reached;
bool mp_seam_reach(void);

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

/* --- for tests; nothing in a build without MP_SEAM --- */

/* Another thread may run here. Stands beside the atomics whose order matters, and in loops that spin on one. */
static inline void mp_seam_point(void) {
#ifdef MP_SEAM
    mp_sys_table.point();
#endif
}
/* A bug that a test plants, to see that it is found: true only while the test has armed this number. Each number stands
 * in one place. */
static inline bool mp_seam_mutation(int number) {
#ifdef MP_SEAM
    return __builtin_expect(mp_seam_armed == number, 0) && mp_seam_reach();
#else
    (void)number;
    return false;
#endif
}

#endif
