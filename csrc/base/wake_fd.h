/* wake_fd.h: a descriptor that an event loop can poll, and that any thread can make readable: an eventfd on Linux, a
 * pipe elsewhere. */
#ifndef MP_BASE_WAKE_FD_H
#define MP_BASE_WAKE_FD_H

#include "base/error.h"

typedef struct mp_wake_fd {
    int poll_fd;  /* poll this descriptor; -1 = none */
    int write_fd; /* internal; equal to poll_fd for an eventfd */
} mp_wake_fd;

/* Create descriptors with close-on-exec that never block. IO when the system refuses; *wake is then without
 * descriptors. */
mp_status mp_wake_fd_open(mp_wake_fd *wake, mp_error *error);
/* Make poll_fd readable. Thread-safe. */
void mp_wake_fd_set(const mp_wake_fd *wake);
/* Make poll_fd no longer readable. Must not run at the same time as mp_wake_fd_set: the caller must hold a lock in both
 * calls, which decides which of them is later. */
void mp_wake_fd_clear(const mp_wake_fd *wake);
/* Close the descriptors. Legal without descriptors. */
void mp_wake_fd_close(mp_wake_fd *wake);

#endif
