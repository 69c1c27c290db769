/* sim_trace.c: the trace of events, and the report of a failed run. */
#include "sim_core.h"

#ifdef MP_SIM

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "mp_test.h"

enum { EVENTS = 4096, SHOWN = 120 };

typedef struct event {
    uint64_t step, clock_ns;
    int fibre;
    const char *op;
    const void *object;
    mp_seam_site site;
    char note[80];
} event;
static event events[EVENTS];
static uint64_t event_count;
static bool ending;

void sim_trace_begin(void) {
    event_count = 0;
    ending = false;
}

static event *next_event(const char *op, const void *object) {
    event *e = &events[event_count++ % EVENTS];
    e->step = sim.steps;
    e->clock_ns = sim.clock_ns;
    e->fibre = sim.current;
    e->op = op;
    e->object = object;
    e->site = mp_seam_at;
    e->note[0] = 0;
    return e;
}

void sim_trace(const char *op, const void *object) {
    if (sim.inlined || !sim.active)
        return;
    next_event(op, object);
    uint64_t what = (uint64_t)(unsigned char)op[0] << 8 | (uint64_t)(unsigned char)op[1];
    sim.hash =
        (sim.hash ^ (what << 32 | (uint64_t)(sim.current & 63) << 24 | (uint64_t)mp_seam_at.line)) * 1099511628211u;
    sim.hash ^= sim.clock_ns;
}

void sim_note(const char *format, ...) {
    event *e = next_event("note", NULL);
    va_list args;
    va_start(args, format);
    vsnprintf(e->note, sizeof(e->note), format, args);
    va_end(args);
}

static const char *base_name(const char *path) {
    const char *slash = path ? strrchr(path, '/') : NULL;
    return slash ? slash + 1 : path ? path : "";
}

static void print_event(const event *e) {
    char object[128] = "";
    if (!getenv("MPOOL_SIM_ALL") && (!strcmp(e->op, "now") || !strcmp(e->op, "alloc") || !strcmp(e->op, "free")))
        return;
    bool sited = strcmp(e->op, "now") && strcmp(e->op, "alloc") && strcmp(e->op, "free") && strcmp(e->op, "note");
    if (e->object)
        sim_name_of(e->object, object, sizeof(object));
    fprintf(stderr, "  %6llu %12.6f ms  %2d %-15s %-9s ", (unsigned long long)e->step,
            (double)(e->clock_ns - sim.began_ns) * 1e-6, e->fibre, e->fibre >= 0 ? sim.fibres[e->fibre].name : "",
            e->op);
    if (e->note[0])
        fprintf(stderr, "%s\n", e->note);
    else if (sited)
        fprintf(stderr, "%s at %s:%d\n", object, base_name(e->site.file), e->site.line);
    else
        fprintf(stderr, "\n");
}

/* Resolves return addresses to function and line with addr2line, if it is installed. */
const char *sim_describe_frames(void *const *by, int n) {
    extern const char __executable_start[];
    static char text[1024];
    char path[512], command[1024];
    ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
    path[length > 0 ? length : 0] = 0;
    int at = snprintf(command, sizeof(command), "addr2line -f -s -p -e '%s'", path);
    for (int i = 0; i < n && by[i]; i++)
        at += snprintf(command + at, sizeof(command) - (size_t)at, " %#lx",
                       (unsigned long)((const char *)by[i] - __executable_start - 1));
    FILE *pipe = n && by[0] && !getenv("MPOOL_SIM_QUIET") ? popen(command, "r") : NULL;
    size_t used = pipe ? fread(text, 1, sizeof(text) - 1, pipe) : 0;
    if (pipe)
        pclose(pipe);
    text[used] = 0;
    for (char *end = text; *end; end++)
        if (*end == '\n')
            *end = end[1] ? '<' : 0;
    return used ? text : "?";
}

static const char *waits(const sim_fibre *f) {
    static const char *const words[] = {
        "free",         "could run", "waits for the lock", "waits for a wake-up of", "sleeps", "waits for the end of",
        "is parked at", "has ended"};
    return words[f->state];
}

static void print_fibres(void) {
    char name[128];
    for (int i = 0; i < sim.most; i++) {
        const sim_fibre *f = &sim.fibres[i];
        if (f->state == SIM_FREE || (f->state == SIM_ENDED && f->joined))
            continue;
        const mp_seam_site *site = i == sim.current ? &mp_seam_at : &f->site;
        fprintf(stderr, "  thread %2d %-15s %s %s", i, f->name,
                i == sim.current && f->state == SIM_READY ? "runs" : waits(f),
                f->object && f->state != SIM_READY ? sim_name_of(f->object, name, sizeof(name)) : "");
        fprintf(stderr, " at %s:%d", base_name(site->file), site->line);
        if (f->deadline_ns)
            fprintf(stderr, ", until %.3f ms", (double)(f->deadline_ns - sim.began_ns) * 1e-6);
        for (int j = 0; j < f->held_count; j++)
            fprintf(stderr, "%s %s", j ? "," : "; holds", sim_name_of(f->held[j], name, sizeof(name)));
        void *by[8] = {NULL};
        void **frame = i == sim.current ? __builtin_frame_address(0) : NULL;
#if defined(__x86_64__)
        if (i != sim.current && f->state != SIM_ENDED)
            frame = ((void ***)f->sp)[6]; /* rbp, as saved by sim_switch */
#endif
        for (int j = 0; j < 8 && frame && frame[0]; j++, frame = frame[0])
            by[j] = frame[1];
        fprintf(stderr, "\n    %s\n", f->state == SIM_ENDED ? "" : sim_describe_frames(by, 8));
    }
}

static void print_end(const char *message) {
    static const char *const names[] = {"random", "pct", "exhaustive"};
    static char choices[8192];
    const sim_setup *s = sim.setup;
    fprintf(stderr, "SIM %s\n", message);
    if (!s)
        return;
    fprintf(stderr, "  repeat: MPOOL_SIM=%s:%d:%s:%d:%llu:%d", s->world ? s->world : "?", s->variant,
            names[s->scheduler], s->depth, (unsigned long long)s->seed, sim_armed);
    if (s->scheduler == SIM_EXHAUSTIVE) {
        sim_sched_describe(choices, sizeof(choices));
        fprintf(stderr, " MPOOL_SIM_CHOICES=%s", choices);
    }
    fprintf(stderr, " <runner> --only sim_replay\n");
    if (getenv("MPOOL_SIM_QUIET"))
        return;
    print_fibres();
    uint64_t from = 0, shown = getenv("MPOOL_SIM") ? EVENTS : SHOWN;
    if (event_count > shown)
        from = event_count - shown;
    fprintf(stderr, "  the last %llu of %llu events: step, time, thread, what\n",
            (unsigned long long)(event_count - from), (unsigned long long)event_count);
    for (uint64_t i = from; i < event_count; i++)
        print_event(&events[i % EVENTS]);
    fprintf(stderr, "SIM %s\n", message);
}

void sim_fail(const char *format, ...) {
    char message[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    if (!ending) {
        ending = true;
        print_end(message);
    }
    mp_test_fail(sim.setup && sim.setup->world ? sim.setup->world : "sim",
                 (int)(sim.setup ? sim.setup->seed & 0x7FFFFFFF : 0), "%s", message);
}

static void on_signal(int number) {
    if (!ending) {
        ending = true;
        print_end(number == SIGABRT                       ? "an assertion failed"
                  : number == SIGSEGV || number == SIGBUS ? "bad memory access"
                                                          : "killed");
    }
    signal(number, SIG_DFL);
    raise(number);
}

void sim_install_handlers(void) {
    static uint8_t stack[128 * 1024];
    static bool done;
    if (done)
        return;
    done = true;
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof(stack)};
    sigaltstack(&alternate, NULL);
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK | SA_NODEFER};
    static const int numbers[] = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        sigaction(numbers[i], &action, NULL);
}

#endif
