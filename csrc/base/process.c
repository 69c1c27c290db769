/* process.c: see process.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h> /* snprintf only */
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/platform.h"
#include "base/sanitize.h"
#include "base/sys.h"

#if MP_LINUX
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

static const uint64_t MS = 1000 * 1000;
enum { TERMINAL_SIGNALS = 3, KILL_WAIT_MS = 5000, LAST_FD = MP_PROCESS_FIRST_FD + MP_PROCESS_FDS - 1 };
static const int terminal_signals[TERMINAL_SIGNALS] = {SIGINT, SIGQUIT, SIGHUP};

int mp_process_id(void) { return (int)getpid(); }

uint64_t mp_process_stack_bytes(void) {
    static const uint64_t usual = 8u << 20;
    struct rlimit now;
    bool known = getrlimit(RLIMIT_STACK, &now) == 0 && now.rlim_cur != RLIM_INFINITY;
    if (!known)
        return usual; /* an upper bound: without a limit, the default stack is smaller */
    return now.rlim_cur < MP_THREAD_STACK_BYTES ? MP_THREAD_STACK_BYTES : (uint64_t)now.rlim_cur;
}

/* --- start --- */

/* Duplicate a descriptor to a number above those that the child uses, with close-on-exec. */
static int high_copy(int fd) { return fcntl(fd, F_DUPFD_CLOEXEC, LAST_FD + 1); }

static int add_actions(posix_spawn_file_actions_t *actions, const int *fds) {
    int result = 0;
    for (int fd = 0; fd < MP_PROCESS_FIRST_FD && !result; fd++)
        result = posix_spawn_file_actions_addopen(actions, fd, "/dev/null", O_RDWR, 0);
    for (int i = 0; i < MP_PROCESS_FDS && !result; i++)
        result = posix_spawn_file_actions_adddup2(actions, fds[i], MP_PROCESS_FIRST_FD + i);
    return result;
}

static int set_signals(posix_spawnattr_t *attributes) {
    sigset_t blocked, all;
    sigemptyset(&blocked);
    for (int i = 0; i < TERMINAL_SIGNALS; i++)
        sigaddset(&blocked, terminal_signals[i]);
    sigfillset(&all);
    sigdelset(&all, SIGKILL);
    sigdelset(&all, SIGSTOP);
    int result = posix_spawnattr_setsigmask(attributes, &blocked);
    if (!result)
        result = posix_spawnattr_setsigdefault(attributes, &all);
    return result ? result : posix_spawnattr_setflags(attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
}

mp_status mp_process_start(mp_process *process, const mp_process_command *command, mp_error *error) {
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    int fds[MP_PROCESS_FDS], result = 0;
    pid_t pid = 0;
    *process = (mp_process){.handle = -1, .owner = (int)getpid()};
    for (int i = 0; i < MP_PROCESS_FDS; i++) {
        fds[i] = high_copy(command->fds[i]);
        if (fds[i] < 0)
            result = errno;
    }
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    if (!result)
        result = add_actions(&actions, fds);
    if (!result)
        result = set_signals(&attributes);
    if (!result)
        result = posix_spawn(&pid, command->argv[0], &actions, &attributes, (char *const *)command->argv,
                             (char *const *)command->envp);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    for (int i = 0; i < MP_PROCESS_FDS; i++)
        mp_sys_close(fds[i]);
    if (result) {
        mp_error cause;
        mp_fail_errno(&cause, result, NULL, "the system refused to start it");
        return mp_fail_hint(error, MP_SPAWN_FAILED,
                            result == EAGAIN || result == ENOMEM ? "Raise the limit on processes (ulimit -u, pids.max "
                                                                   "of the cgroup) or on memory (ulimit -v)" : "",
                            "%s: %s", command->argv[0], cause.message);
    }
    process->pid = (int)pid;
#if MP_LINUX && defined(SYS_pidfd_open)
    process->handle = (int)syscall(SYS_pidfd_open, pid, 0); /* close-on-exec; -1 where the kernel has no pidfd */
#endif
    return MP_OK;
}

/* --- poll and kill --- */

static void note_end(mp_process *process, int status) {
    process->ended = true;
    process->status = status;
}

bool mp_process_alive(mp_process *process) {
    if (process->pid == 0 || process->ended || process->owner != (int)getpid())
        return false;
    /* The handle reports the end even when waitpid fails: other code reaped the child, or SIGCHLD is ignored. */
    struct pollfd check = {.fd = process->handle, .events = POLLIN};
    int ready; /* -1: no handle, or poll failed */
    do { /* retry when a signal to this process interrupts poll */
        ready = process->handle >= 0 ? poll(&check, 1, 0) : -1;
    } while (process->handle >= 0 && ready < 0 && errno == EINTR);
    if (ready == 0)
        return true;
    int status = 0;
    pid_t got;
    do {
        got = waitpid(process->pid, &status, WNOHANG);
    } while (got < 0 && errno == EINTR);
    if (got == process->pid)
        note_end(process, status);
    else if (got < 0 || ready > 0)
        note_end(process, -1);
    return !process->ended;
}

void mp_process_kill(mp_process *process) {
    if (process->pid == 0)
        return;
    const uint64_t until_ns = mp_sys_after(mp_sys_now_ns(), KILL_WAIT_MS * MS);
    while (mp_process_alive(process) && mp_sys_now_ns() < until_ns) {
#if MP_LINUX && defined(SYS_pidfd_send_signal)
        if (process->handle >= 0 && syscall(SYS_pidfd_send_signal, process->handle, SIGKILL, NULL, 0) == 0) {
            struct pollfd check = {.fd = process->handle, .events = POLLIN};
            poll(&check, 1, 1);
            continue;
        }
#endif
        kill(process->pid, SIGKILL);
        mp_sys_sleep_ns(MS);
    }
    mp_process_forget(process);
}

void mp_process_forget(mp_process *process) {
    int handle = process->handle;
    process->handle = -1; /* before the close: a child forked in between must not close a reused number */
    process->pid = 0;
    mp_sys_close(handle);
}

void mp_process_describe_end(const mp_process *process, char *to, size_t size) {
    int status = process->status;
    if (!process->ended)
        snprintf(to, size, "runs");
    else if (status == -1)
        snprintf(to, size, "ended");
    else if (WIFSIGNALED(status))
        snprintf(to, size, "was killed by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        snprintf(to, size, "ended with code %d", WEXITSTATUS(status));
}

bool mp_process_was_killed(const mp_process *process) {
    if (!process->ended || process->status == -1 || !WIFSIGNALED(process->status))
        return false;
    int number = WTERMSIG(process->status);
    return number == SIGKILL || number == SIGTERM || number == SIGINT || number == SIGHUP || number == SIGQUIT;
}

int mp_process_code(const mp_process *process) {
    bool known = process->ended && process->status != -1 && WIFEXITED(process->status);
    return known ? WEXITSTATUS(process->status) : -1;
}

/* --- called by a child --- */

bool mp_process_has_parent(int parent) { return (int)getppid() == parent; }

static void process_limit(int what, uint64_t most) {
    struct rlimit now;
    if (getrlimit(what, &now) != 0)
        return;
    rlim_t value = now.rlim_max == RLIM_INFINITY || most < now.rlim_max ? (rlim_t)most : now.rlim_max;
    now.rlim_cur = now.rlim_max = value;
    setrlimit(what, &now); /* never refused: the hard limit only falls, and the soft limit equals it */
}

static void close_others(void) {
#if MP_LINUX && defined(SYS_close_range)
    if (syscall(SYS_close_range, LAST_FD + 1, ~0u, 0) == 0)
        return;
#endif
    struct rlimit most;
    int end = getrlimit(RLIMIT_NOFILE, &most) == 0 && most.rlim_cur < 65536 ? (int)most.rlim_cur : 65536;
    for (int fd = LAST_FD + 1; fd < end; fd++)
        close(fd);
}

mp_status mp_process_confine(int parent, const mp_process_limits *limits, mp_error *error) {
    for (int i = 0; i < TERMINAL_SIGNALS; i++)
        signal(terminal_signals[i], SIG_IGN);
#if MP_LINUX
    prctl(PR_SET_NAME, "mpool-worker");
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
#endif
    if (!mp_process_has_parent(parent)) /* the parent died before PR_SET_PDEATHSIG took effect */
        return mp_fail(error, MP_RECV, "the process that started this one is gone");
    close_others();
    process_limit(RLIMIT_CORE, 0);
    if (limits->files)
        process_limit(RLIMIT_NOFILE, (uint64_t)limits->files);
    if (limits->data_bytes && !MP_SANITIZED) /* a sanitizer's shadow memory counts as data */
        process_limit(RLIMIT_DATA, limits->data_bytes);
    return MP_OK;
}
