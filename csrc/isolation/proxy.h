/* proxy.h: the engine of a worker whose real engine is in a child process. Used in this room only. */
#ifndef MP_ISOLATION_PROXY_H
#define MP_ISOLATION_PROXY_H

#include "base/process.h"
#include "isolation/channel.h"
#include "isolation/isolation.h"

typedef struct mp_proxy_args { /* borrowed until the proxy is gone */
    const mp_isolation_kind *kind;
    mp_model *model; /* the parent's */
    mp_capability capability;
    const char *const *argv, *const *envp;
    const mp_shm *description, *weights;
    uint64_t memory_bytes, fixed_bytes; /* of the child's engine; of the process besides */
    int lanes;                          /* that a step may have */
    uint64_t start_ns, stall_ns;
} mp_proxy_args;

/* Start a child and wait until it is ready. Charges the budget memory_bytes + fixed_bytes. SPAWN_FAILED, SPAWN_TIMEOUT,
 * or what the child says. */
mp_status mp_proxy_create(const mp_proxy_args *args, mp_budget *budget, mp_engine **engine, mp_error *error);

/* The same over a page and without a process, for tests that are the child themselves. */
mp_status mp_proxy_attach(const mp_proxy_args *args, mp_channel_page *page, mp_engine **engine, mp_error *error);

#endif
