/* channel.c: see channel.h. */
#include "isolation/channel.h"

#include <stdatomic.h>
#include <string.h>

#include "base/cpu.h"
#include "base/intervals.h"
#include "base/options.h"

enum { ALIGN = 8 };
static const uint64_t CHILD_POLL_NS = 1000 * 1000 * 1000; /* long: the system kills the child when its parent dies */
_Static_assert(sizeof(mp_frame) == 24, "frames have the same layout on both sides");
_Static_assert((MP_RING_BYTES & (MP_RING_BYTES - 1)) == 0, "positions wrap by a mask");
_Static_assert(MP_FRAME_MAX + sizeof(mp_frame) + ALIGN <= MP_RING_BYTES / 2, "reading and writing overlap");

void mp_channel_init(mp_channel *channel, mp_channel_page *page, bool parent, mp_error *error, bool (*poll)(void *arg),
                     void *arg) {
    *channel = (mp_channel){
        .page = page,
        .in = parent ? &page->replies : &page->requests,
        .out = parent ? &page->requests : &page->replies,
        .own_events = parent ? &page->parent_events : &page->child_events,
        .other_events = parent ? &page->child_events : &page->parent_events,
        .parent = parent,
        .spin_ns = (uint64_t)page->setup.spin_us * 1000,
        .poll_ns = parent ? MP_CHILD_POLL_NS : CHILD_POLL_NS,
        .error = error,
        .poll = poll,
        .arg = arg,
    };
}

bool mp_channel_break(mp_channel *channel, const char *what) {
    if (!channel->broken)
        mp_fail(channel->error, MP_RECV, "a frame of a worker process was refused: %s", what);
    channel->broken = true;
    return false;
}

/* --- waiting --- */

typedef struct position_watch {
    const _Atomic uint64_t *position;
    uint64_t seen;
} position_watch;

static inline bool has_moved(void *arg) {
    const position_watch *watch = arg;
    return atomic_load_explicit(watch->position, memory_order_acquire) != watch->seen;
}

/* Wait until *position is not `seen`. Returns false when the channel's `poll` ended the wait. */
static bool wait_for(mp_channel *channel, _Atomic uint64_t *position, uint64_t seen, bool spin) {
    position_watch watch = {position, seen};
    uint64_t wanted;
    if (mp_spin(has_moved, &watch, spin ? channel->spin_ns : 0, NULL, NULL))
        return true;
    for (;;) {
        uint32_t events = mp_event_count_read(channel->own_events);
        if (!has_moved(&watch) && !mp_channel_asked(channel, &wanted)) /* do not park: `poll` answers it */
            mp_event_count_park_shared(channel->own_events, events, channel->poll_ns);
        if (has_moved(&watch))
            return true;
        if (!channel->poll(channel->arg)) {
            if (has_moved(&watch)) /* the other side wrote before it died */
                return true;
            channel->broken = true;
            return false;
        }
    }
}

/* --- copying in and out of a ring buffer --- */

static void channel_put(mp_ring *to, uint64_t at, const void *from, size_t bytes) {
    size_t offset = at & (MP_RING_BYTES - 1), first = MP_RING_BYTES - offset;
    first = first < bytes ? first : bytes;
    memcpy(to->data + offset, from, first);
    memcpy(to->data, (const uint8_t *)from + first, bytes - first);
}

static void channel_get(const mp_ring *from, uint64_t at, void *to, size_t bytes) {
    size_t offset = at & (MP_RING_BYTES - 1), first = MP_RING_BYTES - offset;
    first = first < bytes ? first : bytes;
    memcpy(to, from->data + offset, first);
    memcpy((uint8_t *)to + first, from->data, bytes - first);
}

/* Mix in one word. Each step is a bijection, so a difference in one word is always detected. */
static uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 32;
}

uint64_t mp_frame_checksum(const mp_frame *frame, const uint8_t *data) {
    uint64_t hash = mix(0x6d706f6f6c000001u, (uint64_t)frame->bytes << 32 | (uint64_t)frame->kind << 16 | frame->last);
    hash = mix(hash, frame->number);
    size_t at = 0;
    for (; at + 8 <= frame->bytes; at += 8) {
        uint64_t word;
        memcpy(&word, data + at, 8);
        hash = mix(hash, word);
    }
    uint64_t rest = 0;
    if (at < frame->bytes)
        memcpy(&rest, data + at, frame->bytes - at);
    return mix(hash, rest);
}

uint64_t mp_channel_build(void) {
    /* different builds place these functions at different distances */
    const uintptr_t places[] = {(uintptr_t)&mp_channel_receive, (uintptr_t)&mp_cpu_init, (uintptr_t)&mp_options_get,
                                (uintptr_t)&mp_lease_run, (uintptr_t)&mp_status_find};
    uint64_t hash = sizeof(mp_channel_page);
    for (size_t i = 1; i < sizeof places / sizeof *places; i++)
        hash = mix(hash, (uint64_t)(places[i] - places[0]));
    return hash;
}

static uint64_t frame_cost(size_t bytes) { return (sizeof(mp_frame) + bytes + ALIGN - 1) & ~(uint64_t)(ALIGN - 1); }

/* --- memory --- */

bool mp_channel_ask(mp_channel *channel, uint64_t bytes) {
    mp_channel_memory *memory = &channel->page->memory;
    const uint32_t number = atomic_load_explicit(&memory->asked, memory_order_relaxed) + 1;
    atomic_store_explicit(&memory->wanted, bytes, memory_order_relaxed);
    atomic_store_explicit(&memory->asked, number, memory_order_seq_cst);
    mp_event_count_notify_shared(channel->other_events);
    for (;;) {
        uint32_t events = mp_event_count_read(channel->own_events);
        uint64_t answer = atomic_load_explicit(&memory->answer, memory_order_acquire);
        if (answer >> 1 == number)
            return answer & 1;
        mp_event_count_park_shared(channel->own_events, events, channel->poll_ns);
        if (!channel->poll(channel->arg))
            return false;
    }
}

bool mp_channel_asked(const mp_channel *channel, uint64_t *wanted) {
    const mp_channel_memory *memory = &channel->page->memory;
    if (!channel->parent || atomic_load_explicit(&memory->asked, memory_order_acquire) == channel->answered)
        return false;
    *wanted = atomic_load_explicit(&memory->wanted, memory_order_relaxed);
    return true;
}

void mp_channel_answer(mp_channel *channel, bool charged) {
    mp_channel_memory *memory = &channel->page->memory;
    channel->answered = atomic_load_explicit(&memory->asked, memory_order_relaxed);
    atomic_store_explicit(&memory->answer, (uint64_t)channel->answered * 2 + charged, memory_order_seq_cst);
    mp_event_count_notify_shared(channel->other_events);
}

/* --- frames --- */

bool mp_channel_send(mp_channel *channel, mp_frame_kind kind, bool last, const void *data, size_t bytes) {
    uint64_t cost = frame_cost(bytes);
    while (!channel->broken) {
        uint64_t tail = atomic_load_explicit(&channel->out->tail, memory_order_acquire);
        uint64_t used = channel->head - tail;
        if (used > MP_RING_BYTES || tail % ALIGN)
            return mp_channel_break(channel, "it acknowledged bytes that were never written");
        if (MP_RING_BYTES - used >= cost)
            break;
        if (!wait_for(channel, &channel->out->tail, tail, false))
            return false;
    }
    if (channel->broken)
        return false;
    mp_frame frame = {(uint32_t)bytes, (uint16_t)kind, last, ++channel->out_number, 0};
    frame.checksum = mp_frame_checksum(&frame, data);
    channel_put(channel->out, channel->head, &frame, sizeof(frame));
    channel_put(channel->out, channel->head + sizeof(frame), data, bytes);
    channel->head += cost;
    atomic_store_explicit(&channel->out->head, channel->head, memory_order_seq_cst);
    mp_event_count_notify_shared(channel->other_events);
    return true;
}

bool mp_channel_waiting(const mp_channel *channel) {
    return atomic_load_explicit(&channel->in->head, memory_order_acquire) != channel->tail;
}

bool mp_channel_receive(mp_channel *channel, bool spin, mp_frame *frame, uint8_t *data) {
    if (channel->broken)
        return false;
    if (!mp_channel_waiting(channel) && !wait_for(channel, &channel->in->head, channel->tail, spin))
        return false;
    uint64_t there = atomic_load_explicit(&channel->in->head, memory_order_acquire) - channel->tail;
    if (there > MP_RING_BYTES || there < sizeof(*frame) || there % ALIGN)
        return mp_channel_break(channel, "its position is impossible");
    channel_get(channel->in, channel->tail, frame, sizeof(*frame));
    if (frame->bytes > MP_FRAME_MAX || frame_cost(frame->bytes) > there)
        return mp_channel_break(channel, "its length is impossible");
    channel_get(channel->in, channel->tail + sizeof(*frame), data, frame->bytes);
    if (frame->checksum != mp_frame_checksum(frame, data))
        return mp_channel_break(channel, "its checksum is wrong");
    if (frame->number != channel->in_number + 1)
        return mp_channel_break(channel, "its number is not the next one");
    if (frame->kind == MP_FRAME_NONE || frame->kind >= MP_FRAME_KIND_COUNT || frame->last > 1)
        return mp_channel_break(channel, "its kind is unknown");
    channel->in_number++;
    channel->tail += frame_cost(frame->bytes);
    atomic_store_explicit(&channel->in->tail, channel->tail, memory_order_seq_cst);
    mp_event_count_notify_shared(channel->other_events);
    return true;
}
