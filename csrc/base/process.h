/* process.h: child processes: start, look, kill; and what a child does to itself.
 *
 * A child is started by exec (never by code that runs on in a forked copy of a process with threads), with every signal
 * at its default and those of the terminal blocked. It belongs to the process that started it: in a forked child of
 * that one, looking says dead, and killing does nothing. Whoever starts one looks at it until it is dead, so that no
 * zombie stays; that somebody else waited for it (os.wait, a handler of SIGCHLD) is taken for its end.
 *
 * Linux kills it with the thread that started it (mp_process_confine), so that thread has to outlive its use. */
#ifndef MP_BASE_PROCESS_H
#define MP_BASE_PROCESS_H

#include "base/error.h"

enum { MP_PROCESS_FDS = 3, MP_PROCESS_FIRST_FD = 3 };

typedef struct mp_process {
    int pid;    /* 0 = never started, or dead and gone */
    int handle; /* pidfd, or -1 */
    int owner;  /* process that started it */
    bool ended;
    int status; /* as waitpid says, once ended; -1 = somebody else was told */
} mp_process;

typedef struct mp_process_command {
    const char *const *argv; /* argv[0] is the path */
    const char *const *envp;
    int fds[MP_PROCESS_FDS]; /* become 3, 4, 5 in the child; standard input, output and error are /dev/null */
} mp_process_command;

/* SPAWN_FAILED with the system's words. */
mp_status mp_process_start(mp_process *process, const mp_process_command *command, mp_error *error);
/* Whether it runs (or stands still). One that has ended is reaped by this. */
bool mp_process_alive(mp_process *process);
/* SIGKILL, unless it has ended, and wait until it is gone: at once, but for one that hangs in the kernel, which is left
 * after 5 s. Closes the handle. Legal on one that was never started. */
void mp_process_kill(mp_process *process);
/* In a forked child of its owner: closes the handle. */
void mp_process_forget(mp_process *process);
/* "was killed by signal 9 (Killed)", "ended with code 1". */
void mp_process_how(const mp_process *process, char *to, size_t size);
/* Whether a signal ended it that others send, as a person, a service manager or a system without memory do, and that no
 * fault of its own raises. */
bool mp_process_was_ended(const mp_process *process);
/* Its exit code; -1 when it has none (yet). */
int mp_process_code(const mp_process *process);

/* --- by a child, at its start --- */

typedef struct mp_process_limits {
    uint64_t data_bytes; /* of private memory; 0 = as it is */
    int files;           /* descriptors */
} mp_process_limits;
/* Die with the parent's thread; no core files, no privileges from programs; ignore what a terminal sends to a group;
 * close every descriptor above those of the command. RECV when the parent is not `parent` any more. */
mp_status mp_process_confine(int parent, const mp_process_limits *limits, mp_error *error);
bool mp_process_has_parent(int parent);
int mp_process_id(void);
/* Of a thread, as the system makes them here and in children. */
uint64_t mp_process_stack_bytes(void);

#endif
