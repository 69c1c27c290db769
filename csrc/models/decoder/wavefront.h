/* decoder/wavefront.h: the order in which threads carry row blocks through the layers of a pass.
 *
 * Threads usually divide the outputs of each layer, and meet at several barriers in each one. If another program takes
 * the CPU of a thread, the others wait for it at the next barrier. A long pass on few threads is computed as a
 * wavefront instead: a thread takes a row block and a layer, and computes the layer for the block alone. Layer l of
 * block b needs layer l - 1 of the same block, and the keys, values and states that block b - 1 has left in layer l:
 *
 *   layer  0   1   2           The threads are at different layers. One that has no CPU holds up the layer that it
 *   b = 0  x   x   taken       has taken and the blocks behind it: the others work on the blocks before it, and
 *   b = 1  x   taken           begin further blocks.
 *   b = 2  x
 *
 * If others wait for the end of the step, the wavefront may be closed: the blocks that are begun go through all layers,
 * and the pass has computed fewer rows than planned. The rows of a block give the same bits as in any other pass. */
#ifndef MP_MODELS_DECODER_WAVEFRONT_H
#define MP_MODELS_DECODER_WAVEFRONT_H

#include "base/event_count.h"
#include "base/team.h"

typedef struct mp_wave_block { /* numbers of layers of a row block, in ascending order of their values */
    _Atomic int finished; /* computed */
    _Atomic int mixed;    /* whose mixers are computed: the next block may begin them */
    _Atomic int taken;    /* that a thread has begun */
} mp_wave_block;

typedef struct mp_wavefront { /* zeroed but for its sizes: ready for use, once */
    int layers, count;
    mp_wave_block *blocks; /* [count] */
    mp_event_count changed; /* notified after each change of a block */
    _Atomic bool closed;    /* no further block is begun */
    _Atomic bool stopped;   /* no further layer is begun */
} mp_wavefront;

/* Takes the next layer of a row block: of those that are ready, the one of the block that has come furthest. Begins a
 * block only while few are unfinished: others may wait for all of them. Waits until a layer is ready. Returns the
 * block, and the layer in *layer, or -1 once all layers are taken, or the wavefront was stopped. */
int mp_wavefront_take(mp_wavefront *wave, const mp_team_thread *thread, int *layer);
/* The mixers of the layer that the thread has taken are computed. */
void mp_wavefront_mixed(mp_wavefront *wave, int block);
/* The layer is computed. */
void mp_wavefront_finish(mp_wavefront *wave, int block);
/* The blocks that are not begun stay so. Those that are begun go through all layers. */
void mp_wavefront_close(mp_wavefront *wave);
/* No thread takes another layer. */
void mp_wavefront_stop(mp_wavefront *wave);
/* Returns the number of blocks that went through all layers, the first ones. Call after all threads. */
int mp_wavefront_finished(const mp_wavefront *wave);

#endif
