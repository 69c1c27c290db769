/* decoder/wavefront.c: see decoder/wavefront.h. */
#include "models/decoder/wavefront.h"

static inline int read_count(const _Atomic int *count) { return atomic_load_explicit(count, memory_order_acquire); }

/* Returns the block whose next layer is ready and highest, the first one of several; -1 if no layer is ready. Sets
 * *left to the number of blocks with layers to take. */
static int find_ready(const mp_wavefront *wave, int threads, int *layer, int *left) {
    enum { SPARE = 2 }; /* blocks besides those of the threads, for threads that wait for one without a CPU */
    const bool closed = atomic_load_explicit(&wave->closed, memory_order_relaxed);
    int found = -1, open = 0;
    *left = 0;
    for (int b = 0; b < wave->count; b++) {
        const mp_wave_block *block = &wave->blocks[b];
        const int next = read_count(&block->taken);
        open += next > 0 && read_count(&block->finished) < wave->layers;
        if (next == wave->layers || (closed && next == 0))
            continue;
        ++*left;
        if (next == 0 && open >= threads + SPARE)
            continue;
        if (read_count(&block->finished) < next || (b > 0 && read_count(&wave->blocks[b - 1].mixed) <= next))
            continue;
        if (found < 0 || next > *layer) {
            found = b;
            *layer = next;
        }
    }
    return found;
}

int mp_wavefront_take(mp_wavefront *wave, const mp_team_thread *thread, int *layer) {
    for (;;) {
        const uint32_t seen = mp_event_count_read(&wave->changed);
        int left, block = find_ready(wave, thread->count, layer, &left);
        if (left == 0 || atomic_load_explicit(&wave->stopped, memory_order_relaxed))
            return -1;
        if (block < 0) {
            mp_team_wait(thread, &wave->changed, seen);
            continue;
        }
        int expected = *layer;
        if (atomic_compare_exchange_strong_explicit(&wave->blocks[block].taken, &expected, *layer + 1,
                                                    memory_order_relaxed, memory_order_relaxed))
            return block;
    }
}

void mp_wavefront_mixed(mp_wavefront *wave, int block) {
    mp_wave_block *at = &wave->blocks[block];
    atomic_store_explicit(&at->mixed, read_count(&at->taken), memory_order_release);
    mp_event_count_notify(&wave->changed);
}

void mp_wavefront_finish(mp_wavefront *wave, int block) {
    mp_wave_block *at = &wave->blocks[block];
    const int layers = read_count(&at->taken);
    atomic_store_explicit(&at->mixed, layers, memory_order_release);
    atomic_store_explicit(&at->finished, layers, memory_order_release);
    mp_event_count_notify(&wave->changed);
}

void mp_wavefront_close(mp_wavefront *wave) {
    atomic_store_explicit(&wave->closed, true, memory_order_relaxed);
    mp_event_count_notify(&wave->changed);
}

void mp_wavefront_stop(mp_wavefront *wave) {
    atomic_store_explicit(&wave->stopped, true, memory_order_relaxed);
    mp_event_count_notify(&wave->changed);
}

int mp_wavefront_finished(const mp_wavefront *wave) {
    int count = 0;
    while (count < wave->count && read_count(&wave->blocks[count].finished) == wave->layers)
        count++;
    return count;
}
