/* sim_memory.c: allocation of the simulator. A schedule never reuses a block, so that use after free is detected:
 * freed blocks are filled with a pattern, which is checked at the end.
 *
 *   | prefix, 64 bytes | the caller's block | padding to 64 | prefix | ... */
#include "sim_core.h"

#ifdef MP_SIM

#include <string.h>
#include <sys/mman.h>

enum { PREFIX = 64, FILL = 0xDD };
static const size_t ARENA = (size_t)256 << 20;
static const uint32_t LIVE = 0x51314C1Fu, FREED = 0x5131DEADu;

typedef struct prefix {
    uint32_t state;
    int fibre;
    size_t bytes;
    uint64_t step;
    void *by[4]; /* return addresses of the allocating functions */
} prefix;
_Static_assert(sizeof(prefix) <= PREFIX, "the prefix keeps the block aligned");

static uint8_t *arena;
static size_t used;
static uint64_t live;

void sim_memory_begin(void) {
    if (!arena) {
        arena = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (arena == MAP_FAILED)
            sim_fail("no memory for the arena");
    }
    used = 0;
    live = 0;
}

static size_t whole(size_t bytes) { return PREFIX + ((bytes + 63) & ~(size_t)63); }

void *sim_alloc(size_t bytes, size_t alignment) {
    sim_point("alloc", NULL);
    if (sim.faults && !sim.inlined && sim_chance(sim.setup->alloc)) {
        sim_note("allocation of %zu bytes fails", bytes);
        return NULL;
    }
    if (alignment > 64 || bytes > ARENA || used + whole(bytes) > ARENA)
        sim_fail("an allocation of %zu bytes, aligned to %zu, is more than the simulator has", bytes, alignment);
    prefix *head = (prefix *)(arena + used);
    used += whole(bytes);
    *head = (prefix){.state = LIVE, .fibre = sim.current, .bytes = bytes, .step = sim.steps};
    void **frame = __builtin_frame_address(0); /* the build keeps frame pointers; the first frame's is 0 */
    for (int i = 0; i < 4 && frame && frame[0]; i++, frame = frame[0])
        head->by[i] = frame[1];
    live++;
    memset((uint8_t *)head + PREFIX, 0xA5, bytes);
    return (uint8_t *)head + PREFIX;
}

void sim_free(void *memory, size_t bytes) {
    if (!memory)
        return;
    prefix *head = (prefix *)((uint8_t *)memory - PREFIX);
    if ((uint8_t *)memory < arena || (uint8_t *)memory >= arena + used || (head->state != LIVE && head->state != FREED))
        sim_fail("%p is freed, but is not an allocated block", memory);
    if (head->state == FREED)
        sim_fail("a block of %zu bytes is freed twice", head->bytes);
    if (head->bytes != bytes)
        sim_fail("a block of %zu bytes is freed with a size of %zu bytes", head->bytes, bytes);
    head->state = FREED;
    head->fibre = sim.current;
    head->step = sim.steps;
    live--;
    memset(memory, FILL, bytes);
    sim_point("free", NULL);
}

static bool is_filled(const uint8_t *block, size_t bytes) {
    return bytes == 0 || (block[0] == FILL && memcmp(block, block + 1, bytes - 1) == 0);
}

void sim_memory_end(void) {
    for (size_t at = 0; at < used;) {
        prefix *head = (prefix *)(arena + at);
        uint8_t *block = arena + at + PREFIX;
        if (head->state == LIVE)
            sim_fail("%llu blocks were not freed; one of %zu bytes, of thread %d, step %llu, by %s",
                     (unsigned long long)live, head->bytes, head->fibre, (unsigned long long)head->step,
                     sim_describe_frames(head->by, 4));
        if (!is_filled(block, head->bytes)) {
            size_t i = 0;
            while (block[i] == FILL)
                i++;
            sim_fail("byte %zu of a block of %zu was written after thread %d freed it at step %llu; it was of %s", i,
                     head->bytes, head->fibre, (unsigned long long)head->step, sim_describe_frames(head->by, 4));
        }
        at += whole(head->bytes);
    }
}

#endif
