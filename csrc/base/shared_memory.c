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

#include "base/sys.h"

#if defined(__linux__)
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
enum { SIZE_SEALS = F_SEAL_SHRINK | F_SEAL_GROW };

static mp_status fail(mp_shm *shm, int errnum, const char *what, mp_error *error) {
    mp_shm_free(shm);
    return mp_fail_errno(error, errnum, NULL, what);
}

mp_status mp_shm_create_empty(mp_shm *shm, size_t bytes, mp_tag tag, const char *name, mp_error *error) {
    *shm = (mp_shm){.bytes = bytes, .fd = -1, .tag = tag};
    if (bytes == 0 || bytes > PTRDIFF_MAX)
        return mp_fail_memory(error, bytes, "shared memory");
    shm->fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (shm->fd < 0)
        return fail(shm, errno, "shared memory was refused", error);
    if (ftruncate(shm->fd, (off_t)bytes) != 0 || fcntl(shm->fd, F_ADD_SEALS, SIZE_SEALS) != 0)
        return fail(shm, errno, "shared memory was refused", error);
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, shm->fd, 0);
    if (data == MAP_FAILED)
        return fail(shm, errno, "shared memory cannot be mapped", error);
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
    if (fstat(fd, &info) != 0)
        return fail(shm, errno, "shared memory cannot be examined", error);
    int seals = fcntl(fd, F_GET_SEALS);
    if (bytes == 0 || (uint64_t)info.st_size < bytes || seals < 0 || (seals & SIZE_SEALS) != SIZE_SEALS) {
        mp_sys_close(fd);
        *shm = (mp_shm){.fd = -1};
        return mp_fail(error, MP_INTEGRITY, "shared memory has %lld bytes, expected: %zu, sealed",
                       (long long)info.st_size, bytes);
    }
    void *data = mmap(NULL, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED)
        return fail(shm, errno, "shared memory cannot be mapped", error);
    shm->data = data;
    return MP_OK;
}

mp_status mp_shm_freeze(mp_shm *shm, mp_error *error) {
    if (fcntl(shm->fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
        /* The kernel does not support this seal. */
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

void mp_shm_keep_from_forks(mp_shm *shm) { madvise(shm->data, shm->bytes, MADV_DONTFORK); }

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

void mp_shm_park(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns) {
    struct timespec timeout = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT, expected, timeout_ns ? &timeout : NULL, NULL, 0);
}

void mp_shm_wake(_Atomic uint32_t *word) { syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

#else

static mp_status refuse(mp_shm *shm, mp_error *error) {
    *shm = (mp_shm){.fd = -1};
    return mp_fail(error, MP_UNSUPPORTED, "memory is shared between processes on Linux only");
}
mp_status mp_shm_create(mp_shm *shm, size_t bytes, mp_tag tag, const char *name, mp_error *error) {
    (void)bytes, (void)tag, (void)name;
    return refuse(shm, error);
}
mp_status mp_shm_create_empty(mp_shm *shm, size_t bytes, mp_tag tag, const char *name, mp_error *error) {
    return mp_shm_create(shm, bytes, tag, name, error);
}
bool mp_shm_fill(const mp_shm *shm, size_t from, size_t bytes) {
    (void)shm, (void)from, (void)bytes;
    return false;
}
mp_status mp_shm_map(mp_shm *shm, int fd, size_t bytes, bool writable, mp_error *error) {
    (void)bytes, (void)writable;
    mp_sys_close(fd);
    return refuse(shm, error);
}
mp_status mp_shm_freeze(mp_shm *shm, mp_error *error) { return refuse(shm, error); }
void mp_shm_keep_from_forks(mp_shm *shm) { (void)shm; }
void mp_shm_forget(mp_shm *shm) { *shm = (mp_shm){.fd = -1}; }
void mp_shm_free(mp_shm *shm) { *shm = (mp_shm){.fd = -1}; }
void mp_shm_park(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns) {
    (void)word, (void)expected, (void)timeout_ns;
}
void mp_shm_wake(_Atomic uint32_t *word) { (void)word; }

#endif
