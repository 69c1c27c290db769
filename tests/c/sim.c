/* sim.c: fibres, the clock, and the rows of the seam that are neither locks nor memory. See sim.h. */
#include "sim_core.h"

#ifdef MP_SIM

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const uint64_t TICK_NS = 50; /* how far each reading advances the clock */
static const uint64_t LATE_MAX_NS = 1000ull * 1000 * 1000;
enum { STACK = 128 * 1024, GUARD = 4096 };

sim_core sim = {.current = -1};
_Atomic int sim_armed;

/* --- switching: the registers that the ABI preserves are on the stack of the waiting fibre --- */

#if defined(__x86_64__)
void sim_switch(void **save, void *load);
__asm__(".text\n"
        ".globl sim_switch\n"
        ".type sim_switch, @function\n"
        "sim_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  subq $8, %rsp\n  stmxcsr (%rsp)\n  fnstcw 4(%rsp)\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  ldmxcsr (%rsp)\n  fldcw 4(%rsp)\n  addq $8, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  ret\n"
        ".size sim_switch, . - sim_switch\n");

static void *first_frame(uint8_t *stack, void (*entry)(void)) {
    void **top = (void **)(stack + STACK); /* page-aligned: ret leaves rsp as after a call */
    memset(top - 10, 0, 10 * sizeof(void *));
    top[-2] = (void *)entry; /* top[-1]: a zero return address, which ends the chain of frames */
    uint32_t control[2] = {0x1F80, 0x037F};
    memcpy(&top[-9], control, sizeof(control));
    return &top[-9];
}
#else
#include <ucontext.h>
static ucontext_t contexts[SIM_FIBRES + 1];
static void *first_frame(uint8_t *stack, void (*entry)(void)) {
    static int next;
    ucontext_t *context = &contexts[next++ % SIM_FIBRES];
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = STACK;
    makecontext(context, entry, 0);
    return context;
}
static void sim_switch(void **save, void *load) {
    ucontext_t self; /* on the stack of the waiting fibre */
    *save = &self;
    swapcontext(&self, load);
}
#endif

static void switch_to(int next) {
    int before = sim.current;
    if (next == before)
        return;
    void **save = before >= 0 ? &sim.fibres[before].sp : &sim.main_sp;
    if (before >= 0)
        sim.fibres[before].site = mp_seam_at;
    sim.current = next;
    sim_switch(save, next >= 0 ? sim.fibres[next].sp : sim.main_sp);
    if (before >= 0)
        mp_seam_at = sim.fibres[before].site;
}

/* --- the clock --- */

void sim_find_nearest(void) {
    sim.nearest_ns = 0;
    for (int i = 0; i < sim.most; i++) {
        uint64_t deadline = sim.fibres[i].deadline_ns;
        if (deadline && (!sim.nearest_ns || deadline < sim.nearest_ns))
            sim.nearest_ns = deadline;
    }
}

void sim_wake(int fibre, bool timed_out) {
    sim_fibre *f = &sim.fibres[fibre];
    if (sim.nudged >= 0 && f->site.what && strcmp(f->site.what, "&self->changed") == 0)
        sim.nudge_limit_ns = 1; /* an idle worker announces a check to the maintenance thread, which may act */
    if (sim.nudged >= 0 && timed_out)
        sim.nudge_limit_ns = 1; /* a deadline passed during the nudge: the thread that waited for it may wake others */
    if (f->state == SIM_ON_COND)
        sim_cond_leave(f->object);
    f->timed_out = timed_out;
    f->state = SIM_READY;
    f->deadline_ns = 0;
    sim.ready |= 1ull << fibre;
}

static void set_clock(uint64_t now_ns) {
    if (now_ns > sim.clock_ns)
        sim.clock_ns = now_ns;
    if (!sim.nearest_ns || sim.clock_ns < sim.nearest_ns)
        return;
    for (int i = 0; i < sim.most; i++)
        if (sim.fibres[i].deadline_ns && sim.fibres[i].deadline_ns <= sim.clock_ns)
            sim_wake(i, true);
    sim_find_nearest();
}

uint64_t sim_now(void) { return sim.clock_ns; }

void sim_clock_jump(uint64_t ns) {
    sim_note("the clock jumps by %.3f s", (double)ns * 1e-9);
    set_clock(sim.clock_ns + ns);
}

/* --- points --- */

static void watch(void (*call)(void *arg)) {
    if (!call)
        return;
    uint64_t clock_ns = sim.clock_ns;
    mp_seam_site site = mp_seam_at;
    sim.inlined++;
    call(sim.watch_arg);
    sim.inlined--;
    mp_seam_at = site;
    sim.clock_ns = clock_ns;
}

static bool is_coarse(const char *op) {
    static const char *const always[] = {"lock", "wake", "wake all", "park", "unpark", "point", "start"};
    for (size_t i = 0; i < sizeof(always) / sizeof(always[0]); i++)
        if (strcmp(op, always[i]) == 0)
            return true;
    return false;
}

void sim_point(const char *op, const void *object) {
    if (sim.inlined || sim.current < 0)
        return;
    sim_trace(op, object);
    uint64_t limit = sim.setup->step_limit ? sim.setup->step_limit : 2000000;
    if (++sim.steps > limit)
        sim_fail("no end after %llu steps", (unsigned long long)limit);
    if (sim.setup->coarse && !is_coarse(op))
        return;
    watch(sim.watch_step);
    if (sim.faults && sim_sched_chance(sim.setup->spurious))
        sim_wake_spuriously();
    if (sim.faults && sim.nearest_ns && sim.nearest_ns - sim.clock_ns < LATE_MAX_NS &&
        sim_sched_chance(sim.setup->late)) {
        sim_note("late");
        sim.late_jumps++;
        sim.late_ns += sim.nearest_ns > sim.clock_ns ? sim.nearest_ns - sim.clock_ns : 0;
        set_clock(sim.nearest_ns);
    }
    switch_to(sim_sched_pick(sim.ready, sim.current));
}

/* Returns true for a wait that only a wake-up may end. Others poll by design: a reservation of memory also checks
 * models that become idle, and a wait for CPUs is called off with its requests. */
static bool is_nudged(const sim_fibre *f) {
    static const char *const polls[] = {"&governor->changed", "&self.cond"};
    for (size_t i = 0; i < sizeof(polls) / sizeof(polls[0]); i++)
        if (!sim.setup->nudge_polls && f->site.what && strcmp(f->site.what, polls[i]) == 0)
            return false;
    return f->state == SIM_ON_COND || f->state == SIM_PARKED;
}

bool sim_is_nudging(void) { return sim.nudged >= 0; }

/* All fibres wait after the nudge. Each must wait for the same object as before. */
static void check_nudged(void) {
    int nudged = sim.nudged;
    sim.nudged = -1;
    if (sim.nudge_limit_ns && sim.clock_ns >= sim.nudge_limit_ns) /* a deadline passed, which ends waits too */
        return;
    for (int i = 0; i < sim.most; i++) {
        const sim_fibre *f = &sim.fibres[i];
        if (f->state == f->nudge_state && f->object == f->nudge_object)
            continue;
        sim_fail("thread %d \"%s\" had something to do and was not woken: after a nudge, thread %d \"%s\" %s", nudged,
                 sim.fibres[nudged].name, i, f->name,
                 f->state == SIM_ENDED  ? "has ended"
                 : f->state == SIM_FREE ? "is gone"
                                        : "waits for another object");
    }
}

/* All fibres wait. Wakes the next one to be nudged; returns false if all were. */
static bool nudge(void) {
    if (sim.nudged >= 0)
        check_nudged();
    for (int i = 0; i < sim.most; i++) {
        if (sim.nudges >> i & 1 || !is_nudged(&sim.fibres[i]))
            continue;
        sim_trace("nudge", &sim.fibres[i]);
        for (int j = 0; j < sim.most; j++) {
            sim.fibres[j].nudge_state = sim.fibres[j].state;
            sim.fibres[j].nudge_object = sim.fibres[j].object;
        }
        sim.nudges |= 1ull << i;
        sim.nudge_limit_ns = sim.nearest_ns;
        sim_wake(i, false);
        sim.nudged = i;
        sim_find_nearest();
        return true;
    }
    sim.nudges = 0;
    return false;
}

static void fail_deadlock(void) { sim_fail("deadlock: every thread waits, and none has a deadline"); }

/* No fibre can run: moves the clock to the nearest deadline. */
static void wait_for_clock(void) {
    watch(sim.watch_quiet);
    if (sim.setup->nudge && nudge())
        return;
    if (!sim.nearest_ns)
        fail_deadlock();
    uint64_t horizon = sim.setup->horizon_ns ? sim.setup->horizon_ns : 3600ull * 1000 * 1000 * 1000;
    if (sim.nearest_ns - sim.began_ns > horizon)
        sim_fail("the run hangs: not over after %.0f s", (double)horizon * 1e-9);
    set_clock(sim.nearest_ns);
}

void sim_block(sim_state state, const void *object, uint64_t deadline_ns) {
    if (sim.inlined)
        sim_fail("a watcher must not wait");
    int self = sim.current;
    sim_fibre *f = &sim.fibres[self];
    f->state = state;
    f->object = object;
    f->deadline_ns = deadline_ns;
    f->timed_out = false;
    f->site = mp_seam_at;
    sim.ready &= ~(1ull << self);
    if (deadline_ns && (!sim.nearest_ns || deadline_ns < sim.nearest_ns))
        sim.nearest_ns = deadline_ns;
    set_clock(sim.clock_ns); /* wakes this fibre if its deadline has passed */
    while (!sim.ready)
        wait_for_clock();
    switch_to(sim_sched_pick(sim.ready, -1));
    f->object = NULL;
}

static void row_point(void) { sim_point("point", NULL); }

/* See sim_atomic.h. */
void sim_atomic_point(void);
void sim_atomic_point(void) {
    if (sim.active)
        sim_point("atomic", NULL);
}

static uint64_t row_self(void) { return sim.inlined || sim.current < 0 ? 0 : (uint64_t)sim.current + 1; }

static uint64_t row_now_ns(void) {
    if (sim.inlined || sim.current < 0)
        return sim.clock_ns += TICK_NS;
    sim_point("now", NULL);
    if (sim.nudged >= 0)
        sim.clock_ns += TICK_NS; /* a spinning thread must end; waits whose deadline passes now end after the check */
    else
        set_clock(sim.clock_ns + TICK_NS);
    return sim.clock_ns;
}

static void row_sleep_ns(uint64_t ns) {
    sim_point("sleep", NULL);
    sim_block(SIM_ASLEEP, NULL, sim.clock_ns + (ns ? ns : 1));
}

static void row_park(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns) {
    sim_point("park", word);
    if (atomic_load(word) == expected)
        sim_block(SIM_PARKED, word, timeout_ns ? sim.clock_ns + timeout_ns : 0);
}

static void row_unpark_all(_Atomic uint32_t *word) {
    sim_point("unpark", word);
    for (int i = 0; i < sim.most; i++)
        if (sim.fibres[i].state == SIM_PARKED && sim.fibres[i].object == word)
            sim_wake(i, false);
    sim_find_nearest();
}

static uint64_t row_random(void) { return sim_random(); }
static uint64_t row_involuntary_switches(void) { return 0; }

/* Four CPUs on two nodes (MPOOL_NODES in sim_run.c). Depending on the seed, the process may use one node or both. */
static bool row_get_affinity(mp_cpu_set *cpus) {
    *cpus = (mp_cpu_set){{sim.setup->seed & 1 ? 0xF : 0x3}};
    return true;
}
static bool row_set_affinity(const mp_cpu_set *cpus) {
    (void)cpus;
    return true;
}
static int row_cpu(void) { return -1; }
static void row_prefer_node(void *memory, size_t bytes, int node) { (void)memory, (void)bytes, (void)node; }

/* --- threads --- */

static void fibre_main(void) {
    sim_fibre *self = &sim.fibres[sim.current];
    mp_seam_at = self->site;
    self->body(self->arg);
    sim_trace("end", NULL);
    if (self->held_count) {
        char name[64];
        sim_fail("a thread ended while it held %s", sim_name_of(self->held[0], name, sizeof(name)));
    }
    self->state = SIM_ENDED;
    sim.ready &= ~(1ull << sim.current);
    for (int i = 0; i < sim.most; i++)
        if (sim.fibres[i].state == SIM_ON_JOIN && sim.fibres[i].object == self)
            sim_wake(i, false);
    sim.alive--;
    while (sim.alive && !sim.ready)
        wait_for_clock();
    switch_to(sim.alive ? sim_sched_pick(sim.ready, -1) : -1);
}

static int start_fibre(const char *name, void *(*body)(void *), void *arg) {
    int at = 0;
    while (at < SIM_FIBRES &&
           !(sim.fibres[at].state == SIM_FREE ||
             (sim.fibres[at].state == SIM_ENDED && (sim.fibres[at].joined || sim.fibres[at].detached))))
        at++;
    if (at == SIM_FIBRES)
        sim_fail("more than %d threads", SIM_FIBRES);
    sim_fibre *f = &sim.fibres[at];
    uint8_t *stack = f->stack;
    if (!stack) {
        stack = mmap(NULL, STACK + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED || mprotect(stack, GUARD, PROT_NONE) != 0)
            sim_fail("no memory for a stack");
        stack += GUARD;
    }
    memset(f, 0, sizeof(*f));
    f->stack = stack;
    f->state = SIM_READY;
    f->body = body;
    f->arg = arg;
    f->site = mp_seam_at;
    strncpy(f->name, name, sizeof(f->name) - 1);
    f->sp = first_frame(stack, fibre_main);
    sim.ready |= 1ull << at;
    sim.alive++;
    if (at >= sim.most)
        sim.most = at + 1;
    sim_sched_started(at);
    return at;
}

static int row_thread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*body)(void *), void *arg) {
    (void)attr;
    if (sim.faults && sim_chance(sim.setup->thread)) {
        sim_note("thread creation fails");
        return EAGAIN;
    }
    int at = start_fibre(mp_seam_at.what ? mp_seam_at.what : "?", body, arg);
    *thread = (pthread_t)(at + 1);
    sim_point("start", &sim.fibres[at]);
    return 0;
}

static sim_fibre *fibre_of(pthread_t thread) {
    uint64_t number = (uint64_t)thread;
    if (number < 1 || number > (uint64_t)sim.most || sim.fibres[number - 1].joined || sim.fibres[number - 1].detached)
        sim_fail("the thread cannot be joined: it does not exist, was joined before, or is detached");
    return &sim.fibres[number - 1];
}

static void row_thread_join(pthread_t thread) {
    sim_fibre *other = fibre_of(thread);
    sim_point("join", other);
    while (other->state != SIM_ENDED)
        sim_block(SIM_ON_JOIN, other, 0);
    other->joined = true;
}

/* The row `thread_detach` of the seam. */
void sim_thread_detach(pthread_t thread);
void sim_thread_detach(pthread_t thread) { fibre_of(thread)->detached = true; }

/* --- fork --- */

/* The first handler that runs in the child: the other fibres exist in the parent only. */
static void fork_child(void) {
    if (!sim.active)
        return;
    for (int i = 0; i < sim.most; i++)
        if (i != sim.current) {
            if (sim.fibres[i].state == SIM_ON_COND)
                sim_cond_forget(sim.fibres[i].object);
            sim.fibres[i].state = SIM_FREE;
        }
    sim.ready = 1ull << sim.current;
    sim.alive = 1;
    sim.nearest_ns = 0;
    for (int i = 0; i < sim.most; i++)
        sim.fibres[i].deadline_ns = 0;
}

void sim_fork_install(void) {
    static bool done;
    if (!done && pthread_atfork(NULL, NULL, fork_child) != 0)
        sim_fail("the handler for forks was refused");
    done = true;
}

int sim_fork(void) {
    sim_fibre *self = &sim.fibres[sim.current];
    fflush(NULL);
    self->forking = true;
    int child = (int)fork();
    self->forking = false;
    if (child == 0)
        self->held_count = 0; /* the handlers made the locks anew */
    return child;
}

/* --- a run --- */

static void *first_body(void *arg) {
    struct {
        void (*body)(void *);
        void *arg;
    } *first = arg;
    first->body(first->arg);
    return NULL;
}

static void install(void) {
    mp_sys_table = mp_sys_real;
    mp_sys_table.alloc = sim_alloc;
    mp_sys_table.free = sim_free;
    mp_sys_table.thread_create = row_thread_create;
    mp_sys_table.thread_join = row_thread_join;
    mp_sys_table.thread_detach = sim_thread_detach;
    mp_sys_table.now_ns = row_now_ns;
    mp_sys_table.sleep_ns = row_sleep_ns;
    mp_sys_table.random = row_random;
    mp_sys_table.involuntary_switches = row_involuntary_switches;
    mp_sys_table.get_affinity = row_get_affinity;
    mp_sys_table.set_affinity = row_set_affinity;
    mp_sys_table.cpu = row_cpu;
    mp_sys_table.prefer_node = row_prefer_node;
    mp_sys_table.mutex_init = sim_lock_init;
    mp_sys_table.mutex_deinit = sim_lock_deinit;
    mp_sys_table.mutex_lock = sim_lock;
    mp_sys_table.mutex_unlock = sim_unlock;
    mp_sys_table.self = row_self;
    mp_sys_table.cond_init = sim_cond_init;
    mp_sys_table.cond_deinit = sim_cond_deinit;
    mp_sys_table.cond_wait = sim_cond_wait;
    mp_sys_table.cond_wake = sim_cond_wake;
    mp_sys_table.park = row_park;
    mp_sys_table.unpark_all = row_unpark_all;
    mp_sys_table.point = row_point;
}

void sim_run(const sim_setup *setup, void (*body)(void *arg), void *arg, sim_result *result) {
    struct {
        void (*body)(void *);
        void *arg;
    } first = {body, arg};
    sim_install_handlers();
    for (int i = 0; i < SIM_FIBRES; i++)
        sim.fibres[i].state = SIM_FREE;
    sim.setup = setup;
    sim.ready = 0;
    sim.current = -1;
    sim.alive = sim.most = sim.inlined = 0;
    sim.steps = 0;
    sim.late_jumps = 0;
    sim.late_ns = 0;
    sim.nudged = -1;
    sim.nudges = 0;
    sim.hash = 14695981039346656037u;
    sim.random = setup->seed ^ 0x5DEECE66Du;
    sim.clock_ns = sim.began_ns = 1000ull * 1000 * 1000 * 1000;
    sim.nearest_ns = 0;
    sim.faults = true;
    sim.watch_step = sim.watch_quiet = NULL;
    mp_seam_at = (mp_seam_site){0};
    sim_trace_begin();
    sim_memory_begin();
    sim_locks_begin();
    sim_sched_begin(setup);
    install();
    sim.active = true;
    switch_to(start_fibre("main", first_body, &first));
    for (int i = 1; i < sim.most; i++)
        if (sim.fibres[i].state == SIM_ENDED && !sim.fibres[i].joined && !sim.fibres[i].detached)
            sim_fail("thread %d \"%s\" was never joined", i, sim.fibres[i].name);
    sim_memory_end();
    sim_locks_end();
    sim.active = false;
    mp_sys_table = mp_sys_real;
    if (result)
        *result = (sim_result){sim.steps, sim.hash, sim.clock_ns - sim.began_ns, sim.most};
}

/* --- inside a run --- */

uint64_t sim_random(void) { /* splitmix64 */
    uint64_t z = sim.random += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

uint64_t sim_below(uint64_t n) { return sim_random() % n; }
bool sim_chance(uint32_t of_65536) { return of_65536 && (sim_random() & 65535) < of_65536; }
void sim_faults(bool on) { sim.faults = on; }
const sim_setup *sim_get_setup(void) { return sim.setup; }
int sim_late_jumps(void) { return sim.late_jumps; }
uint64_t sim_late_ns(void) { return sim.late_ns; }
int sim_self(void) { return sim.current; }
bool sim_is_blocked(int fibre) { return sim.fibres[fibre].state != SIM_READY && sim.fibres[fibre].state != SIM_ENDED; }

void sim_watch(void (*step)(void *arg), void (*quiet)(void *arg), void *arg) {
    sim.watch_step = step;
    sim.watch_quiet = quiet;
    sim.watch_arg = arg;
}

#endif
