/* test_isolation_child.c: the runner becomes a worker process when its environment says so, before main. */
#include <stdlib.h>
#include <unistd.h>

#include "mp_test.h"
#include "test_isolation.h"

extern char **environ;

__attribute__((constructor)) static void become_child(void) {
    const char *what = getenv("MP_TEST_ISOLATION");
    if (!what)
        return;
    if (strcmp(what, "exit") == 0)
        _exit(7);
    if (strcmp(what, "sleep") == 0)
        for (;;)
            sleep(1);
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
