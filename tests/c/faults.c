/* faults.c: failure injection through the seam of base/sys.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/alloc.h"
#include "base/sys.h"
#include "mp_test.h"

#ifdef MP_SEAM

static struct {
    enum mp_test_fault fault;
    _Atomic int64_t calls;
    int64_t from, to; /* calls [from, to) fail, counted from 0 */
} plan;

/* sizes: those of all allocations of the last run without faults; refused: that of the first allocation that failed.
 * Both include the header of mp_alloc. */
enum { MAX_SIZES = 1 << 16 };
static _Atomic uint64_t sizes[MAX_SIZES], refused;

static bool fails(enum mp_test_fault fault) {
    if (plan.fault != fault)
        return false;
    int64_t call = atomic_fetch_add(&plan.calls, 1);
    return call >= plan.from && call < plan.to;
}

static void *faulty_alloc(size_t bytes, size_t alignment) {
    int64_t call = atomic_load(&plan.calls);
    uint64_t none = 0;
    if (fails(MP_FAULT_ALLOC)) {
        atomic_compare_exchange_strong(&refused, &none, bytes);
        return NULL;
    }
    if (plan.fault == MP_FAULT_ALLOC && plan.from == plan.to && call < MAX_SIZES)
        atomic_store(&sizes[call], bytes);
    return mp_sys_real.alloc(bytes, alignment);
}

static int faulty_thread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*body)(void *), void *arg) {
    return fails(MP_FAULT_THREAD) ? EAGAIN : mp_sys_real.thread_create(thread, attr, body, arg);
}

static int faulty_open(const char *path, int flags) {
    if (!fails(MP_FAULT_OPEN))
        return mp_sys_real.open(path, flags);
    errno = EMFILE;
    return -1;
}

static int64_t faulty_pread(int fd, void *to, size_t bytes, int64_t offset) {
    if (!fails(MP_FAULT_READ))
        return mp_sys_real.pread(fd, to, bytes, offset);
    errno = EIO;
    return -1;
}

static void *faulty_mmap(size_t bytes, int fd) {
    if (!fails(MP_FAULT_MAP))
        return mp_sys_real.mmap(bytes, fd);
    errno = ENOMEM;
    return MAP_FAILED;
}

static int faulty_fallocate(int fd, int64_t offset, int64_t bytes) {
    if (!fails(MP_FAULT_PAGES))
        return mp_sys_real.fallocate(fd, offset, bytes);
    errno = ENOSPC;
    return -1;
}

static int faulty_madvise(void *data, size_t bytes, int advice) {
    if (!fails(MP_FAULT_ADVISE))
        return mp_sys_real.madvise(data, bytes, advice);
    errno = EAGAIN;
    return -1;
}

static int open_files(void) {
    int count = 0;
    for (int fd = 0; fd < 64; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static uint64_t live_bytes(void) {
    uint64_t bytes = 0;
    for (int tag = 0; tag < MP_TAG_COUNT; tag++)
        bytes += mp_alloc_bytes((mp_tag)tag);
    return bytes;
}

/* Returns true if `told` is what allocations `first` to `last` ask for. Large parts of a spec have a block of their
 * own, of at most MORE further bytes. */
static bool is_sum(double told, double slack, int64_t first, int64_t last) {
    enum { LARGE = 8192, MORE = 48 };
    double sum = 0, most = 0;
    for (int64_t i = first; i <= last; i++) {
        sum += (double)(sizes[i] - MP_TEST_HEADER);
        most += sizes[i] >= LARGE ? MORE : 0;
    }
    return told - slack <= sum && sum <= told + slack + most;
}

/* Returns true if the error names what the refused allocation needs, or the allocations that are made with it. Few
 * errors name only one of these, so neighbours count. */
static bool names_size(int64_t call, const char *message) {
    enum { TOGETHER = 80, SHARED = MP_TEST_HEADER + 32 + 32 * 1024 }; /* a block that small parts of a spec share */
    const char *number = strstr(message, "needs ");
    if (call >= MAX_SIZES || sizes[call] != refused || refused == SHARED || !number || strstr(message, "a model spec "))
        return true;
    double told = strtod(number + strlen("needs "), NULL), slack = 0.5;
    if (strstr(number, " MB")) {
        told *= 1e6;
        slack = 0.051e6;
    }
    for (int64_t first = call > TOGETHER ? call - TOGETHER : 0; first <= call + 8; first++)
        for (int64_t last = first; last < first + TOGETHER && last < MAX_SIZES && sizes[last]; last++)
            if (is_sum(told, slack, first, last))
                return true;
    return false;
}

/* Run the body once with calls [from, to) failing; return the number of calls. The first run may leave memory
 * allocated: it fills process-wide caches. */
static int64_t run(enum mp_test_fault fault, int64_t from, int64_t to, bool first, mp_test_sweep_body body, void *arg) {
    mp_error error;
    mp_error_clear(&error);
    plan.fault = fault;
    plan.from = from;
    plan.to = to;
    atomic_store(&plan.calls, 0);
    atomic_store(&refused, 0);
    const int files = open_files();
    uint64_t bytes = live_bytes(), created, joined, created_after, joined_after;
    mp_thread_counts(&created, &joined);
    mp_status status = body(arg, &error);
    plan.from = plan.to = 0;
    mp_thread_counts(&created_after, &joined_after);
    long long n = (long long)from + 1;
    if (status != MP_OK && from == to)
        MP_FAIL("the body returned %s without a fault: %s", mp_status_find(status)->name, error.message);
    if (status != MP_OK && !error.message[0])
        MP_FAIL("call %lld failing (%s) gave %s without a message", n, to == INT64_MAX ? "and all after it" : "once",
                mp_status_find(status)->name);
    if (status != MP_OK && error.code != status)
        MP_FAIL("call %lld failing gave %s, but the error says %s", n, mp_status_find(status)->name,
                mp_status_find(error.code)->name);
    if (live_bytes() != bytes && !first)
        MP_FAIL("call %lld failing (%s) left %lld bytes", n, to == INT64_MAX ? "and all after it" : "once",
                (long long)(live_bytes() - bytes));
    if (open_files() != files && !first)
        MP_FAIL("call %lld failing left %d more files open", n, open_files() - files);
    if (created_after - created != joined_after - joined)
        MP_FAIL("call %lld failing left %lld threads", n,
                (long long)(created_after - created) - (long long)(joined_after - joined));
    /* after a refusal that the code survives, all further ones give an error about another allocation */
    if (fault == MP_FAULT_ALLOC && to == from + 1 && status == MP_MEMORY_EXHAUSTED && created_after == created &&
        !names_size(from, error.message))
        MP_FAIL("allocation %lld of %lld bytes was refused, but the error says \"%s\"", n,
                (long long)(refused - MP_TEST_HEADER), error.message);
    return atomic_load(&plan.calls);
}

int mp_test_fault_sweep(enum mp_test_fault fault, mp_test_sweep_body body, void *arg) {
    mp_sys_table.alloc = faulty_alloc;
    mp_sys_table.thread_create = faulty_thread_create;
    mp_sys_table.open = faulty_open;
    mp_sys_table.pread = faulty_pread;
    mp_sys_table.mmap = faulty_mmap;
    mp_sys_table.fallocate = faulty_fallocate;
    mp_sys_table.madvise = faulty_madvise;
    run(fault, 0, 0, true, body, arg);
    int64_t calls = run(fault, 0, 0, false, body, arg);
    for (int64_t n = 0; n < calls; n++) {
        run(fault, n, n + 1, false, body, arg);
        run(fault, n, INT64_MAX, false, body, arg);
    }
    run(fault, 0, 0, false, body, arg);
    mp_sys_table = mp_sys_real;
    return (int)calls;
}

#else

int mp_test_fault_sweep(enum mp_test_fault fault, mp_test_sweep_body body, void *arg) {
    (void)fault, (void)body, (void)arg;
    MP_SKIP("failure injection needs the seam build");
}

#endif

void mp_test_alloc_sweep(mp_test_sweep_body body, void *arg) {
    if (mp_test_fault_sweep(MP_FAULT_ALLOC, body, arg) == 0)
        MP_FAIL("the swept body allocates nothing");
}
