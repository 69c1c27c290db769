/* parking.c: see parking.h. */
#include "base/parking.h"

#include "base/mix.h"
#include "base/sys.h"

/* More buckets than threads that usually wait at a time, so that two words in use seldom share one. */
enum { BUCKETS = 64 };

typedef struct bucket {
    mp_mutex lock;
    mp_cond changed;
    int waiting; /* guarded by: lock */
    char padding[64]; /* two buckets do not share a cache line */
} bucket;

static bucket buckets[BUCKETS];
static pthread_once_t ready = PTHREAD_ONCE_INIT;

static void make_locks(void) {
    for (int i = 0; i < BUCKETS; i++) {
        mp_mutex_init(&buckets[i].lock);
        mp_cond_init(&buckets[i].changed);
        buckets[i].waiting = 0;
    }
}

static bucket *bucket_of(_Atomic uint32_t *word) {
    pthread_once(&ready, make_locks);
    return &buckets[mp_mix((uint64_t)(uintptr_t)word) % BUCKETS];
}

void mp_parking_wait(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns) {
    bucket *at = bucket_of(word);
    uint64_t deadline_ns = timeout_ns ? mp_sys_after(mp_sys_now_ns(), timeout_ns) : 0;
    mp_mutex_lock(&at->lock);
    /* A waker changes the word, then takes the lock: it either sees this thread in `waiting` or its change is seen
     * here. */
    if (atomic_load_explicit(word, memory_order_acquire) == expected) {
        at->waiting++;
        mp_cond_wait(&at->changed, &at->lock, deadline_ns);
        at->waiting--;
    }
    mp_mutex_unlock(&at->lock);
}

void mp_parking_wake(_Atomic uint32_t *word) {
    bucket *at = bucket_of(word);
    mp_mutex_lock(&at->lock);
    if (at->waiting)
        mp_cond_broadcast(&at->changed);
    mp_mutex_unlock(&at->lock);
}

void mp_parking_fork_child(void) {
    make_locks(); /* another thread of the parent may have held a lock at the fork */
}
