/* file_map.c: mappings and the SIGBUS handler. See file_map.h.
 *
 * The handler must find the mapping of a faulting address without locks or allocation. Mappings are therefore listed in
 * a static array of slots. A slot is acquired by compare-and-swap, its range is written under a sequence counter, and
 * it is released before the memory is unmapped. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "files/file_map.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/alloc.h"

/* State that the signal handler reads: static, lock-free, never freed. `sequence` is odd while a slot is being
 * rewritten (a seqlock), so that a handler on another thread never pairs the start of one mapping with the end of the
 * slot's next mapping. */
typedef struct map_slot {
    _Atomic uint32_t taken;
    _Atomic uint32_t sequence;
    _Atomic uintptr_t begin, end; /* begin == end: empty */
    _Atomic uint32_t poisoned;
} map_slot;

enum { MAX_MAPS = 4096 };

static map_slot slots[MAX_MAPS];
static _Atomic int slots_used; /* slots from this index on were never taken */
static _Atomic int installed;
static struct sigaction previous;
static uintptr_t page_mask;

struct mp_file_map {
    map_slot *slot;
    void *data;
    char *path;
    int fd; /* keeps naming the mapped file when its path names another one */
    mp_file_id id;
};

static void slot_write(map_slot *slot, uintptr_t begin, uintptr_t end) {
    atomic_fetch_add(&slot->sequence, 1);
    atomic_store(&slot->begin, begin);
    atomic_store(&slot->end, end);
    atomic_fetch_add(&slot->sequence, 1);
}

static map_slot *slot_acquire(const void *data, uint64_t bytes) {
    for (int i = 0; i < MAX_MAPS; i++) {
        uint32_t free_mark = 0;
        if (!atomic_compare_exchange_strong(&slots[i].taken, &free_mark, 1))
            continue;
        int used = atomic_load(&slots_used);
        while (used < i + 1 && !atomic_compare_exchange_weak(&slots_used, &used, i + 1)) {
        }
        atomic_store(&slots[i].poisoned, 0);
        slot_write(&slots[i], (uintptr_t)data, (uintptr_t)data + (uintptr_t)bytes);
        return &slots[i];
    }
    return NULL;
}

static void slot_release(map_slot *slot) {
    slot_write(slot, 0, 0);
    atomic_store(&slot->taken, 0);
}

/* Async-signal-safe: atomics only. The faulting thread keeps its mapping open, so the slot of that mapping does not
 * change. */
static map_slot *slot_find(uintptr_t address) {
    int used = atomic_load(&slots_used);
    for (int i = 0; i < used; i++) {
        map_slot *slot = &slots[i];
        uint32_t sequence = atomic_load(&slot->sequence);
        uintptr_t begin = atomic_load(&slot->begin), end = atomic_load(&slot->end);
        /* round up: the last page extends beyond the end of the file */
        if (address >= begin && address < ((end + ~page_mask) & page_mask) && !(sequence & 1) &&
            sequence == atomic_load(&slot->sequence))
            return slot;
    }
    return NULL;
}

static void forward_signal(int number, siginfo_t *info, void *context) {
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(number, info, context);
        return;
    }
    if (previous.sa_handler == SIG_IGN && info->si_code <= 0)
        return; /* sent by kill(), and the previous disposition ignored it */
    if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
        previous.sa_handler(number);
        return;
    }
    signal(number, SIG_DFL);
    raise(number); /* delivered after this handler returns: SIGBUS is blocked until then */
}

static void on_sigbus(int number, siginfo_t *info, void *context) {
    int saved = errno;
    uintptr_t address = (uintptr_t)info->si_addr;
    map_slot *slot = info->si_code > 0 ? slot_find(address) : NULL;
    if (slot) {
        atomic_store(&slot->poisoned, 1);
        /* Not through the seam (MP_SEAM): a signal handler must not call functions that a test may have replaced. */
        void *page = mmap((void *)(address & page_mask), (size_t)(~page_mask + 1), PROT_READ,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        errno = saved;
        if (page != MAP_FAILED)
            return;
    }
    forward_signal(number, info, context);
}

void mp_file_map_init(void) {
    int expected = 0;
    if (!atomic_compare_exchange_strong(&installed, &expected, 1))
        return;
    page_mask = ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
    /* The zeros of sa_mask are an empty set on Linux and macOS. */
    const struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    /* Read the old action first: a fault between the two calls must find `previous` filled. */
    sigaction(SIGBUS, NULL, &previous);
    sigaction(SIGBUS, &action, NULL);
}

_Static_assert(SIZE_MAX >= INT64_MAX, "a mapping can have the size of any file");

mp_status mp_file_map_open(const char *path, mp_file_map **out, mp_error *error) {
    return mp_file_map_open_at(path, path, out, error);
}

mp_status mp_file_map_open_at(const char *place, const char *path, mp_file_map **out, mp_error *error) {
    mp_status status = MP_OK;
    *out = NULL;
    mp_file_map *map = mp_alloc_zeroed(sizeof *map, MP_TAG_SPEC);
    if (!map)
        return mp_fail_memory(error, sizeof *map, "a file mapping");
    map->fd = -1;
    map->path = mp_strdup(path, MP_TAG_SPEC);
    if (!map->path) {
        status = mp_fail_memory(error, strlen(path) + 1, "a file's path");
        goto cleanup;
    }
    MP_TRY_GOTO(mp_sys_open(place, &map->fd, &map->id, error));
    if (map->id.size == 0) {
        status = mp_fail_file(error, MP_FORMAT, path, 0, "file size", "at least 1 byte", "an empty file");
        goto cleanup;
    }
    MP_TRY_GOTO(mp_sys_map(map->fd, (size_t)map->id.size, path, &map->data, error));
    map->slot = slot_acquire(map->data, map->id.size);
    if (!map->slot) {
        status = mp_fail_file(error, MP_LIMIT, path, -1, "number of mapped files", "at most 4096; unload models first",
                              "%d", MAX_MAPS + 1);
        goto cleanup;
    }
    *out = map;
    map = NULL;
cleanup:
    mp_file_map_close(map);
    return status;
}

/* Identify the file of the descriptor. Returns false if the descriptor is no longer that of the mapped file: a daemon
 * may have closed every descriptor that it does not know, and its number may have been reused. */
static bool identify_mapped(const mp_file_map *map, mp_file_id *now) {
    return mp_sys_identify_open(map->fd, now) && now->device == map->id.device && now->inode == map->id.inode;
}

void mp_file_map_close(mp_file_map *map) {
    mp_file_id now;
    if (!map)
        return;
    if (map->slot)
        slot_release(map->slot); /* before the address range can be reused by another mapping */
    if (map->data)
        mp_sys_unmap(map->data, (size_t)map->id.size);
    if (map->fd >= 0 && identify_mapped(map, &now))
        mp_sys_close(map->fd);
    mp_free(map->path);
    mp_free(map);
}

const uint8_t *mp_file_map_data(const mp_file_map *map) { return map->data; }
uint64_t mp_file_map_size(const mp_file_map *map) { return map->id.size; }
const char *mp_file_map_path(const mp_file_map *map) { return map->path; }
const mp_file_id *mp_file_map_id(const mp_file_map *map) { return &map->id; }
bool mp_file_map_poisoned(const mp_file_map *map) { return atomic_load(&map->slot->poisoned) != 0; }

bool mp_file_map_unchanged(const mp_file_map *map) {
    mp_file_id now;
    return (identify_mapped(map, &now) || mp_sys_identify(map->path, &now)) && mp_file_id_same(&map->id, &now);
}

void mp_file_map_release(const mp_file_map *map, uint64_t offset, uint64_t bytes) {
    if (offset >= map->id.size)
        return;
    if (bytes > map->id.size - offset)
        bytes = map->id.size - offset;
    mp_sys_advise((uint8_t *)map->data + offset, (size_t)bytes, MP_ADVISE_DONTNEED);
}
