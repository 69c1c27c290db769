/* test_isolation_child.c: turns the test runner into a worker process, before main, if the environment requests it. */
#include <stdlib.h>
#include <unistd.h>

#include "base/process.h"
#include "isolation/wire.h"
#include "mp_test.h"
#include "test_isolation.h"

extern char **environ;

static bool never(void *arg) {
    (void)arg;
    return false;
}

/* Run as a child whose only message reports the status of its start. */
static void send_ready(mp_status status) {
    static mp_wire_out out;
    mp_shm page;
    mp_channel channel;
    mp_error error, said;
    mp_fail(&said, status, "an injected failure");
    if (mp_shm_map(&page, MP_PROCESS_FIRST_FD, sizeof(mp_channel_page), true, &error) != MP_OK)
        _exit(1);
    mp_channel_init(&channel, page.data, false, &error, never, NULL);
    mp_wire_begin(&out, &channel, MP_FRAME_READY);
    mp_put_error(&out, status, &said);
    mp_wire_end(&out);
    for (;;)
        sleep(1);
}

__attribute__((constructor)) static void become_child(void) {
    const char *what = getenv("MP_TEST_ISOLATION");
    if (!what)
        return;
    if (strcmp(what, "exit") == 0)
        _exit(7);
    if (strcmp(what, "sleep") == 0)
        for (;;)
            sleep(1);
    if (strncmp(what, "ready", 5) == 0)
        send_ready((mp_status)atoi(what + 5));
    _exit(mp_isolation_main());
}

mp_isolation_options isolation_options(const char *what) {
    static const char *argv[] = {"/proc/self/exe", NULL};
    static const char *envp[256];
    static char own[64];
    int count = 0;
    snprintf(own, sizeof own, "MP_TEST_ISOLATION=%s", what);
    for (; environ[count] && count < 250; count++)
        envp[count] = environ[count];
    envp[count++] = own;
    envp[count] = NULL;
    return (mp_isolation_options){.argv = argv, .envp = envp};
}
