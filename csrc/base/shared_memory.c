/* shared_memory.c: see shared_memory.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/platform.h"
#include "base/sys.h"

static mp_status shared_fail(mp_shm *shm, int errnum, const char *what, mp_error *error) {
    mp_shm_free(shm);
    return mp_fail_errno(error, errnum, NULL, what);
}

/* --- calls that differ between systems: the file, the seal of its size, the seal of its content, waiting --- */

#if MP_LINUX
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
enum { SIZE_SEALS = F_SEAL_SHRINK | F_SEAL_GROW };

/* Open an unnamed file of this size, which no process can truncate. Returns -1 and sets errno when the system
 * refuses. */
static int open_sized(size_t bytes, const char *name) {
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && (ftruncate(fd, (off_t)bytes) != 0 || fcntl(fd, F_ADD_SEALS, SIZE_SEALS) != 0)) {
        int cause = errno;
        close(fd);
        errno = cause;
        return -1;
    }
    return fd;
}

/* True when no process can change the size of the file. */
static bool has_fixed_size(int fd) {
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & SIZE_SEALS) == SIZE_SEALS;
}

/* Refuse new writable mappings of the file. Returns false where the system cannot. */
static bool refuse_writers(mp_shm *shm) { return fcntl(shm->fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0; }

void mp_shm_keep_from_forks(mp_shm *shm) { madvise(shm->data, shm->bytes, MADV_DONTFORK); }

void mp_shm_park(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns) {
    struct timespec timeout = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT, expected, timeout_ns ? &timeout : NULL, NULL, 0);
}

void mp_shm_wake(_Atomic uint32_t *word) { syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

#else
#if defined(__APPLE__)
#include <mach/vm_inherit.h>
#endif
#include <stdatomic.h>
#include <stdio.h> /* snprintf only */

/* Open an object of shm_open under a random name, which is removed at once. Returns -1 and sets errno when the system
 * refuses. */
static int open_sized(size_t bytes, const char *name) {
    char path[32]; /* macOS allows 31 characters */
    (void)name;
    snprintf(path, sizeof(path), "/mpool-%016llx", (unsigned long long)mp_sys_random());
    int fd = shm_open(path, O_RDWR | O_CREAT | O_EXCL, 0600), cause = errno;
    if (fd < 0)
        return -1;
    shm_unlink(path);
    if (ftruncate(fd, (off_t)bytes) == 0 && fcntl(fd, F_SETFD, FD_CLOEXEC) == 0)
        return fd;
    cause = errno;
    close(fd);
    errno = cause;
    return -1;
}

/* macOS refuses to size an object a second time. */
static bool has_fixed_size(int fd) {
    (void)fd;
    return true;
}

static bool refuse_writers(mp_shm *shm) {
    (void)shm;
    return false;
}

void mp_shm_keep_from_forks(mp_shm *shm) {
#if defined(__APPLE__)
    minherit(shm->data, shm->bytes, VM_INHERIT_NONE);
#else
    madvise(shm->data, shm->bytes, MADV_DONTFORK);
#endif
}

/* macOS has no call that waits on a word shared between processes: poll, at intervals that double up to 1 ms. */
void mp_shm_park(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns) {
    enum { FIRST_NS = 50 * 1000, LONGEST_NS = 1000 * 1000 };
    const uint64_t end = timeout_ns ? mp_sys_after(mp_sys_now_ns(), timeout_ns) : UINT64_MAX;
    for (uint64_t nap = FIRST_NS; atomic_load_explicit(word, memory_order_acquire) == expected;) {
        uint64_t now = mp_sys_now_ns();
        if (now >= end)
            return;
        mp_sys_sleep_ns(end - now < nap ? end - now : nap);
        nap = 2 * nap < LONGEST_NS ? 2 * nap : LONGEST_NS;
    }
}

void mp_shm_wake(_Atomic uint32_t *word) { (void)word; }

#endif

/* --- calls that all systems have --- */

mp_status mp_shm_create_empty(mp_shm *shm, size_t bytes, mp_tag tag, const char *name, mp_error *error) {
    *shm = (mp_shm){.bytes = bytes, .fd = -1, .tag = tag};
    if (bytes == 0 || bytes > PTRDIFF_MAX)
        return mp_fail_memory(error, bytes, "shared memory");
    shm->fd = open_sized(bytes, name);
    if (shm->fd < 0)
        return shared_fail(shm, errno, "shared memory was refused", error);
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, shm->fd, 0);
    if (data == MAP_FAILED)
        return shared_fail(shm, errno, "shared memory cannot be mapped", error);
    shm->data = data;
    mp_alloc_count(tag, (int64_t)bytes);
    shm->counted = true;
    return MP_OK;
}

bool mp_shm_fill(const mp_shm *shm, size_t from, size_t bytes) { return mp_sys_fill(shm->fd, from, bytes); }

mp_status mp_shm_create(mp_shm *shm, size_t bytes, mp_tag tag, const char *name, mp_error *error) {
    MP_TRY(mp_shm_create_empty(shm, bytes, tag, name, error));
    if (mp_shm_fill(shm, 0, bytes))
        return MP_OK;
    mp_shm_free(shm);
    return mp_fail_memory(error, bytes, "shared memory");
}

mp_status mp_shm_map(mp_shm *shm, int fd, size_t bytes, bool writable, mp_error *error) {
    *shm = (mp_shm){.bytes = bytes, .fd = fd};
    struct stat info;
    bool is_fixed = has_fixed_size(fd); /* before fstat: a size that is not sealed may change after it was read */
    if (fstat(fd, &info) != 0)
        return shared_fail(shm, errno, "shared memory cannot be examined", error);
    if (bytes == 0 || (uint64_t)info.st_size < bytes || !is_fixed) {
        mp_sys_close(fd);
        *shm = (mp_shm){.fd = -1};
        return mp_fail(error, MP_INTEGRITY, "shared memory must have at least %zu bytes, of a sealed size, got %lld%s",
                       bytes, (long long)info.st_size, is_fixed ? "" : ", which may change");
    }
    void *data = mmap(NULL, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED)
        return shared_fail(shm, errno, "shared memory cannot be mapped", error);
    shm->data = data;
    return MP_OK;
}

mp_status mp_shm_freeze(mp_shm *shm, mp_error *error) {
    if (!refuse_writers(shm)) {
        if (mprotect(shm->data, shm->bytes, PROT_READ) != 0)
            return mp_fail_errno(error, errno, NULL, "shared memory cannot be protected");
        return MP_OK;
    }
    /* The seal does not affect the existing writable mapping: replace that mapping by a read-only one, which mprotect
     * cannot make writable again because of the seal. */
    if (mmap(shm->data, shm->bytes, PROT_READ, MAP_SHARED | MAP_FIXED, shm->fd, 0) == MAP_FAILED)
        return mp_fail_errno(error, errno, NULL, "shared memory cannot be protected");
    return MP_OK;
}

void mp_shm_forget(mp_shm *shm) {
    if (shm->counted)
        mp_alloc_count(shm->tag, -(int64_t)shm->bytes);
    if (shm->bytes)
        mp_sys_close(shm->fd);
    *shm = (mp_shm){.fd = -1};
}

void mp_shm_free(mp_shm *shm) {
    if (shm->data)
        munmap(shm->data, shm->bytes);
    mp_shm_forget(shm);
}
