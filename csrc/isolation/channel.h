/* channel.h: two rings in memory that a process shares with a worker process, and frames in them.
 *
 *   parent --requests--> child          a ring: | read, free again | written, not read | free |
 *   parent <--replies--- child                  0                  tail                head   capacity
 *
 * A frame is a header (kind, length, number, checksum) and up to MP_FRAME_MOST bytes, which wrap round the ring's end.
 * Each side keeps its own positions to itself and believes nothing that stands in the page: a frame is copied out
 * before it is looked at, the other's position must be possible, and number and checksum must fit. What does not fit
 * breaks the channel for good.
 *
 * Waiting: spin, then park on the side's own bell, which the other rings after each frame written and read; never for
 * longer than look_ns, since nobody rings when the other is dead. `look` is asked between, and ends the wait.
 *
 * One thread a side. */
#ifndef MP_ISOLATION_CHANNEL_H
#define MP_ISOLATION_CHANNEL_H

#include "base/shared_memory.h"
#include "base/team.h"

enum {
    MP_RING_BYTES = 256 * 1024,
    MP_FRAME_MOST = 32 * 1024,
};

enum { /* exit codes of a child that did not get as far as to say why */
       MP_CHILD_OPTIONS = 80,
       MP_CHILD_MEMORY,
       MP_CHILD_BUILD,
       MP_CHILD_PARENT,
       MP_CHILD_CHANNEL,
       MP_CHILD_REFUSED
};

typedef enum mp_frame_kind {
    MP_FRAME_NONE,
    /* parent to child; each but RETIRE is answered by the frame of the same name */
    MP_FRAME_ADMIT,
    MP_FRAME_PLAN,
    MP_FRAME_STEP,
    MP_FRAME_TRIM,
    MP_FRAME_RETIRE,
    /* child to parent, once, when it is ready to serve */
    MP_FRAME_READY,
    MP_FRAME_KIND_COUNT
} mp_frame_kind;

typedef struct mp_frame {
    uint32_t bytes; /* after this header */
    uint16_t kind;
    uint16_t last;     /* 1: of its message, else 0 */
    uint64_t number;   /* 1, 2, 3, ... in each direction */
    uint64_t checksum; /* of the fields above and of what follows */
} mp_frame;

typedef struct mp_ring {
    _Alignas(64) _Atomic uint64_t head; /* bytes written so far, by its writer */
    _Alignas(64) _Atomic uint64_t tail; /* bytes read so far, by its reader */
    _Alignas(64) uint8_t data[MP_RING_BYTES];
} mp_ring;

typedef struct mp_bell_word {
    _Alignas(64) _Atomic uint32_t rings;
    _Atomic uint32_t parked;
} mp_bell_word;

typedef struct mp_channel_setup { /* written by the parent before the child starts */
    uint64_t build;               /* mp_channel_build of the parent */
    int32_t parent;               /* process */
    uint32_t spin_us;
    uint32_t capability;
    uint64_t description_bytes, weight_bytes; /* of the other descriptors; weights 0 = none */
    uint64_t memory_bytes;                    /* the engine's budget */
    uint64_t data_limit;                      /* of the process, 0 = none */
} mp_channel_setup;

typedef struct mp_channel_page { /* what is shared */
    mp_channel_setup setup;
    _Atomic int stop; /* raised by the parent: every item of the step was cancelled */
    /* The child's: the parent reads the heartbeat alone. */
    mp_lease lease;
    mp_bell_word parent_bell, child_bell;
    mp_ring requests, replies;
} mp_channel_page;

typedef struct mp_channel { /* one side, private */
    mp_channel_page *page;
    mp_ring *in, *out;
    mp_bell_word *own_bell, *other_bell;
    uint64_t tail, head;            /* own positions: in `in`, in `out` */
    uint64_t in_number, out_number; /* of the last frame */
    uint64_t spin_ns, look_ns;
    bool broken;             /* for good; error says why */
    mp_error *error;         /* the owner's */
    bool (*look)(void *arg); /* may the side wait on? false: the owner has filled *error */
    void *arg;
} mp_channel;

void mp_channel_init(mp_channel *channel, mp_channel_page *page, bool parent, mp_error *error, bool (*look)(void *arg),
                     void *arg);
/* Write a frame, waiting for room. False: broken. */
bool mp_channel_send(mp_channel *channel, mp_frame_kind kind, bool last, const void *data, size_t bytes);
/* Wait for a frame and copy it out: data has room for MP_FRAME_MOST bytes. spin: first, for as long as options allow.
 * False: broken. */
bool mp_channel_receive(mp_channel *channel, bool spin, mp_frame *frame, uint8_t *data);
/* Something to receive is there, or is said to be. */
bool mp_channel_waiting(const mp_channel *channel);
/* Break it: what came does not fit. Returns false. */
bool mp_channel_break(mp_channel *channel, const char *what);

/* Alike in processes that run the same build of the core, and hardly ever in others. */
uint64_t mp_channel_build(void);

uint64_t mp_frame_checksum(const mp_frame *frame, const uint8_t *data);

#endif
