/* proxy.h: the engine of a worker whose real engine runs in a child process. Internal to isolation/. */
#ifndef MP_ISOLATION_PROXY_H
#define MP_ISOLATION_PROXY_H

#include "base/process.h"
#include "isolation/channel.h"
#include "isolation/isolation.h"

typedef struct mp_proxy_args { /* borrowed: must outlive the proxy */
    const mp_isolation_kind *kind;
    mp_model *model; /* the model as loaded in the parent */
    mp_capability capability;
    const char *const *argv, *const *envp;
    const mp_shm *description, *weights;
    uint64_t memory_bytes, fixed_bytes; /* limit of the engine's memory; bytes charged for the rest of the process */
    int threads;                        /* maximum compute threads of a step */
    uint64_t start_ns, stall_ns;
} mp_proxy_args;

/* Start a child and wait until it is ready. Charges fixed_bytes and what the child's engine uses to the budget. Returns
 * SPAWN_FAILED, SPAWN_TIMEOUT, or the error that the child reports. */
mp_status mp_proxy_create(const mp_proxy_args *args, mp_budget *budget, mp_engine **engine, mp_error *error);

/* Create a proxy over an existing page, without a process, for tests that act as the child. Charges no fixed_bytes. */
mp_status mp_proxy_attach(const mp_proxy_args *args, mp_budget *budget, mp_channel_page *page, mp_engine **engine,
                          mp_error *error);

#endif
