/* process.h: start, poll and kill child processes, and let a child confine itself.
 *
 * A child is started by exec, never as a forked copy of a process with threads. All its signals have their default
 * actions and the terminal's signals are blocked. A child belongs to the process that started it: in a forked child of
 * that process, mp_process_alive returns false and mp_process_kill only closes the handle. The owner must poll a child
 * until it is dead, so that no zombie remains. If other code of the process reaped the child (os.wait, a handler of
 * SIGCHLD), the child counts as ended.
 *
 * Linux kills a child when the thread that started it ends (mp_process_confine), so that thread must outlive the
 * child. */
#ifndef MP_BASE_PROCESS_H
#define MP_BASE_PROCESS_H

#include "base/error.h"

enum { MP_PROCESS_FDS = 3, MP_PROCESS_FIRST_FD = 3 };

typedef struct mp_process {
    int pid;    /* 0 = never started, or closed by mp_process_kill or mp_process_forget */
    int handle; /* pidfd, or -1 */
    int owner;  /* id of the process that started it */
    bool ended;
    int status; /* from waitpid, once ended; -1 = unknown: other code reaped the child */
} mp_process;

typedef struct mp_process_command {
    const char *const *argv; /* argv[0]: the path */
    const char *const *envp;
    int fds[MP_PROCESS_FDS]; /* descriptors 3, 4 and 5 of the child, whose standard streams are /dev/null */
} mp_process_command;

/* Start a child. SPAWN_FAILED, with the system's message, when the system refuses. */
mp_status mp_process_start(mp_process *process, const mp_process_command *command, mp_error *error);
/* True while the child has not ended. Reaps a child that has ended. */
bool mp_process_alive(mp_process *process);
/* Kill the child (SIGKILL), wait until it has ended, but at most 5 s because it may hang in the kernel, and close the
 * handle. Legal on a child that was never started. */
void mp_process_kill(mp_process *process);
/* Close the handle without killing the child. Call in a forked child of the process that started it. */
void mp_process_forget(mp_process *process);
/* Describe how the child ended: "was killed by signal 9 (Killed)", "ended with code 1". */
void mp_process_describe_end(const mp_process *process, char *to, size_t size);
/* True when the child was killed from outside: by SIGKILL, SIGTERM, SIGINT, SIGHUP or SIGQUIT. Users, service managers
 * and the kernel's out-of-memory killer send these; no fault of the child itself raises them. */
bool mp_process_was_killed(const mp_process *process);
/* Exit code of the child; -1 while it runs, or if a signal ended it or other code reaped it. */
int mp_process_code(const mp_process *process);

/* --- called by a child, at its start --- */

typedef struct mp_process_limits {
    uint64_t data_bytes; /* limit of private memory; 0 = unchanged */
    int files;           /* limit of descriptors; 0 = unchanged */
} mp_process_limits;
/* Confine the calling process. It closes all descriptors above those of mp_process_command, writes no core file, and
 * ignores SIGINT, SIGQUIT and SIGHUP, which a terminal sends to all its processes. On Linux it is killed when the
 * parent's thread that started it ends, and gains no privileges by exec. RECV when its parent is no longer `parent`. */
mp_status mp_process_confine(int parent, const mp_process_limits *limits, mp_error *error);
bool mp_process_has_parent(int parent);
int mp_process_id(void);
/* Default stack size in bytes of a thread in this process and its children. */
uint64_t mp_process_stack_bytes(void);

#endif
