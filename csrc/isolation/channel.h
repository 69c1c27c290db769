/* channel.h: two ring buffers in memory shared with a worker process, and the frames in them.
 *
 *   parent --requests--> child          ring buffer: | read, free again | written, not read | free |
 *   parent <--replies--- child                       0                  tail                head   capacity
 *
 * A frame is a header (kind, length, number, checksum) and up to MP_FRAME_MAX bytes, which wrap at the ring's end.
 * Each side keeps its own positions in private memory and trusts nothing in the shared page. It copies a frame out
 * before parsing it, and checks that the other side's position is possible and that the frame's number and checksum are
 * right. A violation breaks the channel permanently.
 *
 * A waiting side spins, then parks on its own event count. The other side notifies that event count after each frame it
 * has written or read. A side parks for at most poll_ns at a time, because a dead process never notifies, and then
 * calls `poll`, which may end the wait.
 *
 * Each side must be used by one thread at a time. */
#ifndef MP_ISOLATION_CHANNEL_H
#define MP_ISOLATION_CHANNEL_H

#include "base/event_count.h"
#include "base/shared_memory.h"
#include "base/team.h"

enum {
    MP_RING_BYTES = 256 * 1024,
    MP_FRAME_MAX = 32 * 1024,
};

enum { /* exit codes of a child that could not report an error in a frame */
       MP_CHILD_OPTIONS = 80,
       MP_CHILD_MEMORY,
       MP_CHILD_BUILD,
       MP_CHILD_PARENT,
       MP_CHILD_CHANNEL,
       MP_CHILD_REFUSED
};

typedef enum mp_frame_kind {
    MP_FRAME_NONE,
    /* parent to child; the child replies with a message of the same kind, except to RETIRE */
    MP_FRAME_ADMIT,
    MP_FRAME_PLAN,
    MP_FRAME_STEP,
    MP_FRAME_TRIM,
    MP_FRAME_RETIRE,
    /* child to parent, once: ready to serve, or the error of the start */
    MP_FRAME_READY,
    MP_FRAME_KIND_COUNT
} mp_frame_kind;

typedef struct mp_frame {
    uint32_t bytes; /* after this header */
    uint16_t kind;
    uint16_t last;     /* 1: last frame of its message, else 0 */
    uint64_t number;   /* 1, 2, 3, ... in each direction */
    uint64_t checksum; /* over the fields above and the payload */
} mp_frame;

typedef struct mp_ring {
    _Alignas(64) _Atomic uint64_t head; /* total bytes written; stored by the writer */
    _Alignas(64) _Atomic uint64_t tail; /* total bytes read; stored by the reader */
    _Alignas(64) uint8_t data[MP_RING_BYTES];
} mp_ring;

typedef struct mp_channel_setup { /* written by the parent before the child starts, then constant */
    uint64_t build;               /* mp_channel_build of the parent */
    int32_t parent;               /* its process id */
    uint32_t spin_us;
    uint32_t capability;
    uint64_t description_bytes, weight_bytes; /* sizes of the other shared memories; 0 weight_bytes = none */
    uint64_t memory_bytes;                    /* limit of the engine's budget */
    uint64_t data_limit;                      /* RLIMIT_DATA of the process; 0 = none */
} mp_channel_setup;

/* The child's engine uses memory that the parent charges to its own budget. When the engine needs more than is charged,
 * the child asks and waits; the parent answers while it waits for a frame. Replies tell the parent what it can give
 * back. Questions have the numbers 1, 2, 3, ... */
typedef struct mp_channel_memory {
    _Atomic uint64_t wanted; /* written by the child: bytes to charge in total */
    _Atomic uint32_t asked;  /* written by the child after `wanted`: number of its last question */
    _Atomic uint64_t answer; /* written by the parent: number of the question * 2, + 1 if the bytes are charged */
} mp_channel_memory;

typedef struct mp_channel_page { /* the shared memory */
    mp_channel_setup setup;
    _Atomic int stop; /* set to 1 by the parent: every item of the step was cancelled */
    mp_channel_memory memory;
    /* Written by the child; the parent reads the heartbeat only. */
    mp_lease lease;
    _Alignas(64) mp_event_count parent_events; /* the parent waits here, the child notifies */
    _Alignas(64) mp_event_count child_events;
    mp_ring requests, replies;
} mp_channel_page;

typedef struct mp_channel { /* one side, private */
    mp_channel_page *page;
    mp_ring *in, *out;
    mp_event_count *own_events, *other_events;
    uint64_t tail, head;            /* own positions in `in` and in `out` */
    uint64_t in_number, out_number; /* number of the last frame in each direction */
    uint64_t spin_ns, poll_ns;
    bool parent;
    uint32_t answered;       /* the parent: number of the last question (mp_channel_memory) that it answered */
    bool broken;             /* permanently; *error has the reason */
    mp_error *error;         /* the channel owner's error */
    bool (*poll)(void *arg); /* returns false to end the wait, after filling *error */
    void *arg;
} mp_channel;

void mp_channel_init(mp_channel *channel, mp_channel_page *page, bool parent, mp_error *error, bool (*poll)(void *arg),
                     void *arg);
/* Write a frame. Waits for free space in the ring. Returns false when the channel is broken. */
bool mp_channel_send(mp_channel *channel, mp_frame_kind kind, bool last, const void *data, size_t bytes);
/* Wait for a frame and copy it from the ring to *frame and `data`. `data` must hold MP_FRAME_MAX bytes. `spin`: spin
 * before parking. Returns false when the channel is broken. */
bool mp_channel_receive(mp_channel *channel, bool spin, mp_frame *frame, uint8_t *data);
/* Returns true if the other side has written a frame, or claims to have. */
bool mp_channel_waiting(const mp_channel *channel);
/* Child: ask the parent to charge `bytes` in total for the engine, and wait for the answer. Returns false if the parent
 * refuses or `poll` ends the wait. Only one thread may ask at a time. This thread may differ from the one that uses the
 * frames, but only while that one does not wait for a frame. */
bool mp_channel_ask(mp_channel *channel, uint64_t bytes);
/* Parent: returns true if the child has asked a question that has no answer yet, and sets *wanted. */
bool mp_channel_asked(const mp_channel *channel, uint64_t *wanted);
/* Parent: answer the last question. */
void mp_channel_answer(mp_channel *channel, bool charged);
/* Break the channel because of a violation. Returns false. */
bool mp_channel_break(mp_channel *channel, const char *what);

/* Returns a number that is equal in processes with the same build of the core, and almost certainly different in
 * others. */
uint64_t mp_channel_build(void);

uint64_t mp_frame_checksum(const mp_frame *frame, const uint8_t *data);

#endif
