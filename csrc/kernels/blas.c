/* blas.c: the only file that uses OpenBLAS, or another BLAS library.
 *
 * OpenBLAS initialises when it is opened: environment variables determine its kernels and its number of threads. If we
 * linked it, it would initialise before our code runs. Therefore the first large product opens it, after setting both
 * variables: kernels whose bits equal ours (by default OpenBLAS picks Haswell kernels on CPUs that have AVX-512), and
 * one thread, because threads of OpenBLAS would spin and compete with our compute threads.
 *
 * Start-up: nothing is opened before the first use. The variables are set through base/environment.h, never by setenv,
 * because other threads may call getenv. The library is used only after a self-test that compares bits.
 * Fork (MP_FORK_BLAS): a fork waits until a load in progress ends, so that the child does not inherit a half-opened
 * library. The wait could deadlock, because glibc before 2.36 runs fork handlers under the lock that pthread_atfork
 * takes, and OpenBLAS calls pthread_atfork while it is being opened. The fork therefore waits FORK_WAIT_NS at most. If
 * the load has not ended by then, the child uses our own kernels. Their bits equal those of a library that is SERVING.
 *
 * Other libraries: a library whose sums differ from ours, such as OpenBLAS with Haswell kernels or any CBLAS that the
 * user names, stays open for callers that accept its sums (mp_blas_sgemm_fast). */
#include "kernels/blas.h"

#include <assert.h>
#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/cpu.h"
#include "base/environment.h"
#include "base/forked.h"
#include "base/sys.h"

typedef void (*cblas_sgemm_function)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                                     const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc);
typedef char *(*corename_function)(void);
typedef void (*set_num_threads_function)(int);

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };
/* DIFFERENT: the library serves only mp_blas_sgemm_fast. */
enum { UNLOADED, LOADING, SERVING, DIFFERENT, REFUSED };
static const uint64_t POLL_NS = 1000 * 1000, FORK_WAIT_NS = 1000 * 1000 * 1000;

/* OpenBLAS sums in another order in two cases: in its small-matrix kernels, used when M*N*K of a call is at most
 * g_min_work, and in gemv, to which it may pass a single row or column. */
static const int64_t g_min_work = 1000000;
enum { MIN_SIDE = 3 };

static struct {
    mp_mutex lock;
    char path[MP_BLAS_PATH]; /* guarded by: lock; "" = none */
    _Atomic int state; /* changed under: lock */
    /* written by the thread that set LOADING; others read these only when `state` is no longer LOADING */
    cblas_sgemm_function sgemm;
    char core[64], why[256]; /* core: "" unless SERVING */
    mp_environment_override environment;
} g_blas = {.lock = MP_MUTEX_STATIC};

static _Atomic uint64_t g_work; /* see mp_blas_work */

/* --- lock and fork ------------------------------------------------------------------------------------------------ */

static void unlock(void) { mp_mutex_unlock(&g_blas.lock); }

/* Take the lock as soon as no thread is loading, or at the deadline (clock of mp_sys_now_ns; 0: none). */
static void lock_idle(uint64_t deadline_ns) {
    for (;;) {
        mp_mutex_lock(&g_blas.lock);
        if (atomic_load(&g_blas.state) != LOADING || (deadline_ns && mp_sys_now_ns() >= deadline_ns))
            return;
        unlock();
        mp_sys_sleep_ns(POLL_NS);
    }
}

static void before_fork(void) { lock_idle(mp_sys_now_ns() + FORK_WAIT_NS); }

static void after_fork_in_child(void) {
    mp_mutex_init(&g_blas.lock);
    if (atomic_load(&g_blas.state) != LOADING)
        return;
    mp_environment_override_fork_child(&g_blas.environment);
    g_blas.core[0] = 0;
    snprintf(g_blas.why, sizeof g_blas.why,
             "mpool's own kernels: the process was forked while OpenBLAS was being opened");
    atomic_store(&g_blas.state, REFUSED);
}

/* Take the lock as soon as no thread is loading. Returns false, without the lock, if the fork handlers cannot be
 * registered: a forked child could then inherit a half-opened library, so OpenBLAS is not used. */
static bool lock_for_change(void) {
    static const mp_fork_handlers handlers = {before_fork, unlock, after_fork_in_child};
    mp_error error;
    if (mp_fork_register(MP_FORK_BLAS, &handlers, &error) != MP_OK)
        return false;
    lock_idle(0);
    return true;
}

void mp_blas_set_path(const char *path) {
    if (!lock_for_change())
        return;
    snprintf(g_blas.path, sizeof g_blas.path, "%s", path ? path : "");
    atomic_store(&g_blas.state, UNLOADED);
    unlock();
}

static void blas_call(int M, int N, int K, const float *x, int64_t ldx, const float *w, int64_t ldw, bool add, float *y,
                      int64_t ldy) {
    g_blas.sgemm(ROW_MAJOR, NO_TRANS, TRANS, M, N, K, 1.0f, x, (int)ldx, w, (int)ldw, add ? 1.0f : 0.0f, y, (int)ldy);
}

/* ---- self-test --------------------------------------------------------------------------------------------------- */

/* Compare OpenBLAS with our kernels and with the definition, bit by bit. Each shape is just above g_min_work and runs
 * with beta 0 and beta 1. The inputs are fixed, so that every run gives the same result. Returns SERVING; DIFFERENT if
 * bits differ but all sums are within TOLERANCE; or REFUSED. Sets *problem unless it returns SERVING. */
static int self_test(const char **problem) {
    static const float TOLERANCE = 1e-3f; /* a sum of 2 * 384 products of factors below 1 has rounding errors of 1e-5 */
    static const struct {
        int M, N, K;
    } shapes[] = {
        {3, 901, 384}, {7, 383, 377}, {37, 101, 384}, {65, 47, 384}, {100, 129, 83}, {300, 301, 16}, {64, 64, 256},
    };
    enum { ITEMS = 384 * 901, OUTPUTS = 300 * 304 };
    float *memory = mp_alloc(sizeof(float) * (2 * ITEMS + 2 * OUTPUTS), MP_TAG_SCRATCH);
    *problem = "no memory for its self-test";
    if (!memory)
        return REFUSED;
    float *x = memory, *w = x + ITEMS, *theirs = w + ITEMS, *ours = theirs + OUTPUTS;
    uint32_t seed = 12345;
    for (int i = 0; i < 2 * ITEMS; i++) {
        seed = seed * 1664525u + 1013904223u;
        memory[i] = (float)(int32_t)seed * 0x1p-31f;
    }
    bool equal = true, close = true;
    for (size_t s = 0; close && s < sizeof shapes / sizeof *shapes; s++) {
        const int M = shapes[s].M, N = shapes[s].N, K = shapes[s].K, ldy = N + 3;
        assert(M * K <= ITEMS && N * K <= ITEMS && M * ldy <= OUTPUTS && (int64_t)M * N * K > g_min_work);
        memset(theirs, 0, sizeof(float) * OUTPUTS);
        memset(ours, 0, sizeof(float) * OUTPUTS);
        blas_call(M, N, K, x, K, w, K, false, theirs, ldy);
        blas_call(M, N, K, x, K, w, K, true, theirs, ldy);
        mp_gemm_f32_own(M, N, K, x, K, w, K, ours, ldy);
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
                ours[m * ldy + n] += ours[m * ldy + n];
        equal &= memcmp(theirs, ours, sizeof(float) * (size_t)(M * ldy)) == 0;
        for (int i = 0; i < M * ldy; i++)
            close &= fabsf(theirs[i] - ours[i]) <= TOLERANCE; /* false for NaN */
        for (int i = 0; equal && i < 64; i++) { /* compare 64 outputs with the definition, too */
            const int m = i * 7919 % M, n = i * 104729 % N;
            float chain = 0.0f;
            for (int k = 0; k < K; k++)
                chain = fmaf(x[m * K + k], w[n * K + k], chain);
            chain += chain;
            equal = memcmp(&chain, &theirs[m * ldy + n], sizeof chain) == 0;
        }
    }
    mp_free(memory);
    *problem = close ? "its sums differ from ours in the last bits" : "its sums are wrong";
    return equal ? SERVING : close ? DIFFERENT : REFUSED;
}

/* ---- loading ----------------------------------------------------------------------------------------------------- */

/* Return false unless the address space has room for the library, with a buffer for each thread that calls it: OpenBLAS
 * calls exit() if it cannot allocate one. */
static bool has_space(void) {
    enum { LIBRARY = 64 << 20, BUFFER = 32 << 20 };
    const long threads = sysconf(_SC_NPROCESSORS_ONLN);
    const size_t size = LIBRARY + (size_t)(threads < 1 ? 1 : threads) * BUFFER;
    void *space = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED)
        return false;
    munmap(space, size);
    return true;
}

/* Open the library while its environment variables are overridden. Returns NULL and sets *problem on failure. */
static void *open_library(const char *path, const char *core_variable, const char **problem) {
    const char *const variables[] = {"OPENBLAS_NUM_THREADS=1", core_variable};
    mp_error error;
    *problem = "too little address space";
    if (!has_space())
        return NULL;
    *problem = "no memory";
    if (mp_environment_override_begin(&g_blas.environment, variables, core_variable ? 2 : 1, &error) != MP_OK)
        return NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    mp_environment_override_end(&g_blas.environment);
    if (!library)
        *problem = dlerror();
    return library;
}

/* Find a symbol. The OpenBLAS build of scipy prefixes symbols with `scipy_`, other libraries do not. */
static void *blas_find(void *library, const char *name) {
    char prefixed[64];
    snprintf(prefixed, sizeof prefixed, "scipy_%s", name);
    void *symbol = dlsym(library, prefixed);
    return symbol ? symbol : dlsym(library, name);
}

__attribute__((format(printf, 2, 3))) static int refuse(void *library, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(g_blas.why, sizeof g_blas.why, format, args);
    va_end(args);
    if (library)
        dlclose(library);
    g_blas.core[0] = 0;
    return REFUSED;
}

/* Open, check and test the library. Called once per path, by the thread that set LOADING, without the lock. Returns the
 * new state: SERVING, DIFFERENT or REFUSED. */
static int blas_load(void) {
    const uint32_t features = mp_cpu_features();
    const char *core = features & MP_CPU_AVX512 ? "OPENBLAS_CORETYPE=SkylakeX"
                            : features & MP_CPU_AVX2 ? "OPENBLAS_CORETYPE=Haswell"
                                                : NULL;
#if defined(__APPLE__)
    const char *system_library = "libopenblas.dylib";
#else
    const char *system_library = "libopenblas.so.0";
#endif
    const char *path = strcmp(g_blas.path, "system") == 0 ? system_library : g_blas.path;
    const char *problem;
    if (path[0] == 0 || strcmp(path, "none") == 0)
        return refuse(NULL, "mpool's own kernels: %s", path[0] ? "OpenBLAS is turned off" : "no OpenBLAS was named");
    void *library = open_library(path, core, &problem);
    if (!library)
        return refuse(NULL, "mpool's own kernels: the BLAS library could not be opened: %s", problem ? problem : path);
    cblas_sgemm_function sgemm;
    corename_function corename;
    set_num_threads_function set_num_threads;
    void *symbols[3] = {blas_find(library, "cblas_sgemm"), blas_find(library, "openblas_get_corename"),
                        blas_find(library, "openblas_set_num_threads")};
    memcpy(&sgemm, &symbols[0], sizeof sgemm); /* ISO C has no cast from object to function pointers */
    memcpy(&corename, &symbols[1], sizeof corename);
    memcpy(&set_num_threads, &symbols[2], sizeof set_num_threads);
    if (!sgemm)
        return refuse(library, "mpool's own kernels: %s has no function cblas_sgemm", path);
    const bool is_openblas = corename && set_num_threads;
    if (is_openblas)
        set_num_threads(1); /* if another module opened the library earlier, it may use several threads */
    g_blas.sgemm = sgemm;
    char name[128];
    snprintf(name, sizeof name, is_openblas ? "OpenBLAS (%.50s)" : "%.120s", is_openblas ? corename() : path);
    int found = self_test(&problem);
    if (found == SERVING && !is_openblas) { /* it may use other kernels for sizes not tested */
        found = DIFFERENT;
        problem = "it is not OpenBLAS";
    }
    if (found == REFUSED)
        return refuse(library, "mpool's own kernels: %s is not used: %s", name, problem);
    if (found == DIFFERENT) {
        snprintf(g_blas.why, sizeof g_blas.why,
                 "mpool's own kernels: %s serves compute=\"float32-fast\" only: %s", name, problem);
        return DIFFERENT;
    }
    snprintf(g_blas.core, sizeof g_blas.core, "%s", corename());
    snprintf(g_blas.why, sizeof g_blas.why, "%s for large unpacked fp32 products: same bits as mpool's kernels", name);
    return SERVING;
}

static int ensure(void) {
    int state = atomic_load_explicit(&g_blas.state, memory_order_acquire);
    if (state != UNLOADED && state != LOADING)
        return state;
    if (!lock_for_change())
        return REFUSED;
    state = atomic_load(&g_blas.state);
    if (state == UNLOADED)
        atomic_store(&g_blas.state, LOADING);
    unlock();
    if (state != UNLOADED)
        return state;
    state = blas_load();
    mp_mutex_lock(&g_blas.lock);
    atomic_store_explicit(&g_blas.state, state, memory_order_release);
    unlock();
    return state;
}

bool mp_blas_takes(int M, int N, int K) {
    return M >= MIN_SIDE && N >= MIN_SIDE && (int64_t)M * N * K > g_min_work && ensure() == SERVING;
}

bool mp_blas_differs(void) { return ensure() == DIFFERENT; }

/* The function of CBLAS takes the distances of rows as int. */
static bool blas_fits(int64_t ldx, int64_t ldw, int64_t ldy) {
    return ldx <= INT32_MAX && ldw <= INT32_MAX && ldy <= INT32_MAX;
}

static void count_work(int M, int N, int K) {
    atomic_fetch_add_explicit(&g_work, (uint64_t)M * (uint64_t)N * (uint64_t)K, memory_order_relaxed);
}

bool mp_blas_sgemm(int M, int N, int K, const float *x, int64_t ldx, const float *w, int64_t ldw, bool add, float *y,
                   int64_t ldy) {
    assert(K <= MP_K_CHUNK);
    if (!blas_fits(ldx, ldw, ldy) || !mp_blas_takes(M, N, K))
        return false;
    blas_call(M, N, K, x, ldx, w, ldw, add, y, ldy);
    count_work(M, N, K);
    return true;
}

bool mp_blas_sgemm_fast(int M, int N, int K, const float *x, int64_t ldx, const float *w, int64_t ldw, float *y,
                        int64_t ldy) {
    const int state = ensure();
    if (!blas_fits(ldx, ldw, ldy) || (state != SERVING && state != DIFFERENT))
        return false;
    blas_call(M, N, K, x, ldx, w, ldw, false, y, ldy);
    count_work(M, N, K);
    return true;
}

uint64_t mp_blas_work(void) { return atomic_load_explicit(&g_work, memory_order_relaxed); }

const char *mp_blas_core(const char **why) {
    ensure();
    if (why)
        *why = g_blas.why;
    return g_blas.core;
}
