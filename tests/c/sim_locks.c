/* sim_locks.c: mutexes and condition variables of the simulator. Their state lies in the storage of the system's
 * objects. */
#include "sim_core.h"

#ifdef MP_SIM

#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { CLASSES = 64 };
static const uint32_t MUTEX = 0x51317E78u, COND = 0x51310CD0u, GONE = 0x51310000u, FORGOTTEN = 0x51310F02u;

/* Locks that are initialised at one source line form a class. Any two classes must always be taken in one order. */
typedef struct lock_class {
    mp_seam_site made;
    int rank;             /* 0 = none */
    int live;             /* locks of this schedule that are not destroyed */
    bool before[CLASSES]; /* before[i]: a lock of class i was held when one of this class was taken, at where[i] */
    mp_seam_site where[CLASSES];
    uint64_t seed[CLASSES];
} lock_class;
static lock_class classes[CLASSES]; /* kept over all schedules of the process */
static int class_count;

typedef struct lock_state {
    uint32_t magic;
    int16_t owner; /* -1: free */
    uint16_t class;
} lock_state;
typedef struct cond_state {
    uint32_t magic;
    uint16_t waiters, class;
} cond_state;
_Static_assert(sizeof(lock_state) <= sizeof(pthread_mutex_t) && sizeof(cond_state) <= sizeof(pthread_cond_t), "fits");

static lock_state *lock_of(const void *mutex) { return (lock_state *)(uintptr_t)mutex; }
static cond_state *cond_of(const void *cond) { return (cond_state *)(uintptr_t)cond; }

static const char *file_name(const char *path) {
    const char *slash = path ? strrchr(path, '/') : NULL;
    return slash ? slash + 1 : path ? path : "?";
}

static struct {
    const char *file;
    int rank;
} ranks[16];
static int rank_count;

void sim_lock_rank(const char *file, int rank) {
    for (int i = 0; i < rank_count; i++)
        if (strcmp(ranks[i].file, file) == 0)
            return;
    ranks[rank_count].file = file;
    ranks[rank_count++].rank = rank;
    for (int i = 0; i < class_count; i++)
        if (strcmp(file_name(classes[i].made.file), file) == 0)
            classes[i].rank = rank;
}

static uint16_t class_here(void) {
    for (int i = 0; i < class_count; i++)
        if (classes[i].made.line == mp_seam_at.line && classes[i].made.file == mp_seam_at.file)
            return (uint16_t)i;
    if (class_count == CLASSES)
        sim_fail("more than %d places make locks", CLASSES);
    classes[class_count].made = mp_seam_at;
    for (int i = 0; i < rank_count; i++)
        if (strcmp(ranks[i].file, file_name(mp_seam_at.file)) == 0)
            classes[class_count].rank = ranks[i].rank;
    return (uint16_t)class_count++;
}

static const char *class_name(int class, char *text, int size) {
    const mp_seam_site *made = &classes[class].made;
    snprintf(text, (size_t)size, "%s (%s:%d)", made->what ? made->what : "?", file_name(made->file), made->line);
    return text;
}

const char *sim_name_of(const void *object, char *text, int size) {
    snprintf(text, (size_t)size, "%p", object);
    if (!object)
        snprintf(text, (size_t)size, "-");
    else if ((const char *)object >= (const char *)sim.fibres &&
             (const char *)object < (const char *)&sim.fibres[SIM_FIBRES])
        snprintf(text, (size_t)size, "thread %d", (int)((const sim_fibre *)object - sim.fibres));
    else if (lock_of(object)->magic == MUTEX || lock_of(object)->magic == COND) {
        int class = lock_of(object)->magic == MUTEX ? lock_of(object)->class : cond_of(object)->class;
        class_name(class, text, size - 8);
        snprintf(text + strlen(text), 8, " %03x", (unsigned)((uintptr_t)object >> 6) & 0xFFF);
    }
    return text;
}

void sim_locks_begin(void) {
    for (int i = 0; i < class_count; i++)
        classes[i].live = 0;
}

void sim_locks_end(void) {
    char text[128];
    for (int i = 0; i < class_count; i++)
        if (classes[i].live)
            sim_fail("%d of the locks that %s makes were not destroyed", classes[i].live,
                     class_name(i, text, sizeof text));
}

bool sim_is_held(const mp_mutex *mutex) {
    return lock_of(&mutex->os)->magic == MUTEX && lock_of(&mutex->os)->owner >= 0;
}

int sim_waiters(const mp_cond *cond) { return cond_of(&cond->os)->waiters; }

static void require(const void *object, uint32_t magic, const char *what) {
    uint32_t found = lock_of(object)->magic;
    if (found == magic)
        return;
    sim_fail("%s: %p %s", what, object,
             found == GONE          ? "was destroyed"
             : found == FORGOTTEN   ? "has waiters in the parent of a fork and was not initialised in the child"
             : found == 0xDDDDDDDDu ? "lies in memory that was freed"
                                    : "was never initialised");
}

void sim_lock_init(pthread_mutex_t *mutex) {
    memset(mutex, 0, sizeof(*mutex));
    *lock_of(mutex) = (lock_state){MUTEX, -1, class_here()};
    classes[lock_of(mutex)->class].live++;
}

void sim_lock_deinit(pthread_mutex_t *mutex) {
    require(mutex, MUTEX, "a mutex is destroyed");
    if (lock_of(mutex)->owner >= 0)
        sim_fail("a mutex is destroyed while thread %d holds it", lock_of(mutex)->owner);
    for (int i = 0; i < sim.most; i++)
        if (sim.fibres[i].state == SIM_ON_MUTEX && sim.fibres[i].object == mutex)
            sim_fail("a mutex is destroyed while thread %d waits for it", i);
    lock_of(mutex)->magic = GONE;
    classes[lock_of(mutex)->class].live--;
}

/* Returns true if a lock of class `to` was ever taken while one of class `from` was held, directly or through locks of
 * other classes. */
static bool leads_to(int from, int to, bool *seen) {
    if (from == to)
        return true;
    seen[from] = true;
    for (int i = 0; i < class_count; i++)
        if (classes[i].before[from] && !seen[i] && leads_to(i, to, seen))
            return true;
    return false;
}

static void check_order(int held, int taken) {
    lock_class *class = &classes[taken];
    if (class->before[held])
        return;
    char a[96], b[96];
    class_name(held, a, sizeof(a));
    class_name(taken, b, sizeof(b));
    if (held == taken)
        sim_fail("two locks of one class are held at once: %s, at %s:%d", a, file_name(mp_seam_at.file),
                 mp_seam_at.line);
    if (class->rank && classes[held].rank >= class->rank)
        sim_fail("%s is taken at %s:%d while %s is held: against the order of locks", b, file_name(mp_seam_at.file),
                 mp_seam_at.line, a);
    bool seen[CLASSES] = {false};
    if (leads_to(taken, held, seen)) {
        const mp_seam_site *where = &classes[held].where[taken];
        sim_fail(
            "locks in both orders: %s is taken at %s:%d while %s is held; the other way round at %s:%d (seed %llu)", b,
            file_name(mp_seam_at.file), mp_seam_at.line, a, where->file ? file_name(where->file) : "(through others)",
            where->line, (unsigned long long)classes[held].seed[taken]);
    }
    class->before[held] = true;
    class->where[held] = mp_seam_at;
    class->seed[held] = sim.setup->seed;
}

static void take(pthread_mutex_t *mutex) {
    sim_fibre *self = &sim.fibres[sim.current];
    while (lock_of(mutex)->owner >= 0) {
        sim_block(SIM_ON_MUTEX, mutex, 0);
        require(mutex, MUTEX, "a mutex is locked");
    }
    lock_of(mutex)->owner = (int16_t)sim.current;
    if (self->held_count == SIM_HELD)
        sim_fail("more than %d locks are held at once", SIM_HELD);
    self->held[self->held_count++] = mutex;
}

void sim_lock(pthread_mutex_t *mutex) {
    sim_point("lock", mutex);
    require(mutex, MUTEX, "a mutex is locked");
    lock_state *lock = lock_of(mutex);
    if (sim.inlined || sim.current < 0) {
        if (lock->owner >= 0)
            sim_fail("a watcher needs a lock that thread %d holds", lock->owner);
        return;
    }
    if (lock->owner == sim.current)
        sim_fail("a mutex is locked twice by one thread");
    sim_fibre *self = &sim.fibres[sim.current];
    for (int i = 0; i < self->held_count && !self->forking; i++)
        check_order(lock_of(self->held[i])->class, lock->class);
    take(mutex);
}

static void give(pthread_mutex_t *mutex, const char *what) {
    require(mutex, MUTEX, what);
    lock_state *lock = lock_of(mutex);
    sim_fibre *self = &sim.fibres[sim.current];
    if (lock->owner < 0)
        sim_fail("%s that no thread holds", what);
    if (lock->owner != sim.current)
        sim_fail("%s that thread %d holds", what, lock->owner);
    lock->owner = -1;
    for (int i = self->held_count - 1; i >= 0; i--)
        if (self->held[i] == mutex) {
            memmove(&self->held[i], &self->held[i + 1], (size_t)(self->held_count - 1 - i) * sizeof(self->held[0]));
            self->held_count--;
            break;
        }
    for (int i = 0; i < sim.most; i++)
        if (sim.fibres[i].state == SIM_ON_MUTEX && sim.fibres[i].object == mutex)
            sim_wake(i, false);
}

void sim_unlock(pthread_mutex_t *mutex) {
    if (sim.inlined || sim.current < 0)
        return;
    give(mutex, "a mutex is unlocked");
    sim_point("unlock", mutex);
}

void sim_cond_init(pthread_cond_t *cond) {
    memset(cond, 0, sizeof(*cond));
    *cond_of(cond) = (cond_state){COND, 0, class_here()};
    classes[cond_of(cond)->class].live++;
}

void sim_cond_deinit(pthread_cond_t *cond) {
    require(cond, COND, "a condition variable is destroyed");
    if (cond_of(cond)->waiters)
        sim_fail("a condition variable is destroyed while %d wait for it", cond_of(cond)->waiters);
    cond_of(cond)->magic = GONE;
    classes[cond_of(cond)->class].live--;
}

int sim_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t deadline_ns) {
    if (sim.inlined && deadline_ns)
        return ETIMEDOUT;
    sim_fibre *self = &sim.fibres[sim.current];
    require(cond, COND, "a wait for a condition variable");
    if (self->held_count > 1) {
        char name[64];
        sim_fail("a wait for a condition variable while %s is held too",
                 sim_name_of(self->held[self->held[0] == mutex], name, sizeof(name)));
    }
    give(mutex, "a wait releases a mutex");
    sim_trace("wait", cond);
    cond_of(cond)->waiters++;
    sim_block(SIM_ON_COND, cond, deadline_ns);
    bool timed_out = self->timed_out;
    sim_trace(timed_out ? "timed out" : "woken", cond);
    require(mutex, MUTEX, "a mutex is locked after a wait");
    take(mutex);
    return timed_out ? ETIMEDOUT : 0;
}

void sim_cond_forget(const void *cond) { cond_of(cond)->magic = FORGOTTEN; }

void sim_cond_leave(const void *cond) { cond_of(cond)->waiters--; }

void sim_cond_wake(pthread_cond_t *cond, bool all) {
    sim_point(all ? "wake all" : "wake", cond);
    require(cond, COND, "a condition variable is signalled");
    int waiting[SIM_FIBRES], n = 0;
    for (int i = 0; i < sim.most; i++)
        if (sim.fibres[i].state == SIM_ON_COND && sim.fibres[i].object == cond)
            waiting[n++] = i;
    if (!n)
        return;
    int first = all ? 0 : sim_sched_choose(n), last = all ? n : first + 1;
    for (int i = first; i < last; i++)
        sim_wake(waiting[i], false);
    sim_find_nearest();
}

void sim_wake_spuriously(void) {
    int waiting[SIM_FIBRES], n = 0;
    for (int i = 0; i < sim.most; i++)
        if (sim.fibres[i].state == SIM_ON_COND || sim.fibres[i].state == SIM_PARKED)
            waiting[n++] = i;
    if (!n)
        return;
    sim_wake(waiting[sim_sched_choose(n)], false);
    sim_find_nearest();
}

#endif
