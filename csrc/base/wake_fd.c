/* wake_fd.c: see wake_fd.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/wake_fd.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "base/platform.h"
#include "base/sys.h"

#if MP_LINUX
#include <sys/eventfd.h>

mp_status mp_wake_fd_open(mp_wake_fd *wake, mp_error *error) {
    wake->poll_fd = wake->write_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return wake->poll_fd >= 0 ? MP_OK : mp_fail_errno(error, errno, NULL, "creating an eventfd failed");
}

#else

mp_status mp_wake_fd_open(mp_wake_fd *wake, mp_error *error) {
    int ends[2];
    *wake = (mp_wake_fd){-1, -1};
    if (pipe(ends) != 0)
        return mp_fail_errno(error, errno, NULL, "creating a pipe failed");
    *wake = (mp_wake_fd){ends[0], ends[1]};
    /* Systems without eventfd have no pipe2 either: a process that another thread starts here inherits both ends. */
    for (int i = 0; i < 2; i++)
        if (fcntl(ends[i], F_SETFD, FD_CLOEXEC) != 0 || fcntl(ends[i], F_SETFL, O_NONBLOCK) != 0) {
            int cause = errno;
            mp_wake_fd_close(wake);
            return mp_fail_errno(error, cause, NULL, "setting up a pipe failed");
        }
    return MP_OK;
}

#endif

void mp_wake_fd_set(const mp_wake_fd *wake) {
    /* Eight bytes, as an eventfd requires. The write fails only if the counter or the pipe is full, and then the
     * descriptor is readable already. */
    ssize_t written = write(wake->write_fd, &(uint64_t){1}, sizeof(uint64_t));
    (void)written;
}

void mp_wake_fd_clear(const mp_wake_fd *wake) {
    uint64_t posts[64];
    while (read(wake->poll_fd, posts, sizeof(posts)) == (ssize_t)sizeof(posts)) {
    }
}

void mp_wake_fd_close(mp_wake_fd *wake) {
    mp_sys_close(wake->poll_fd);
    if (wake->write_fd != wake->poll_fd)
        mp_sys_close(wake->write_fd);
    *wake = (mp_wake_fd){-1, -1};
}
