/* decoder/wavefront.h: the order in which threads carry row blocks through the layers of a pass.
 *
 * Threads usually divide the outputs of each layer, and meet at about 20 barriers in each one. If another program takes
 * the CPU of a thread, the others wait for it at the next barrier. A long pass on few threads is computed as a
 * wavefront instead: a thread takes a row block and a layer, and computes the layer for the block alone. Layer l of
 * block b needs layer l - 1 of the same block, and the keys, values and states that block b - 1 has left in layer l:
 *
 *   layer  0   1   2           Threads that wait for nobody are at different layers, the first block ahead of the
 *   b = 0  x   x   taken       second one. A thread without a CPU holds up the layer that it has taken and the
 *   b = 1  x   taken           blocks behind it; the others work on the blocks before it.
 *   b = 2  x
 *
 * The rows of a block give the same bits as in any other pass. */
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
    _Atomic bool stopped;
} mp_wavefront;

/* Takes the next layer of a row block. Waits until there is one. Returns the block, and the layer in *layer, or -1 once
 * all layers are taken, or the wavefront was stopped. */
int mp_wavefront_take(mp_wavefront *wave, const mp_team_thread *thread, int *layer);
/* The mixers of the layer that the thread has taken are computed. */
void mp_wavefront_mixed(mp_wavefront *wave, int block);
/* The layer is computed. */
void mp_wavefront_finish(mp_wavefront *wave, int block);
/* No thread takes another layer. */
void mp_wavefront_stop(mp_wavefront *wave);

#endif
