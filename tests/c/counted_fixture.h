/* counted_fixture.h: counts the work of float32 kernels. The functions put into the table of kernels count, then call
 * the variant that was there. */
#ifndef COUNTED_FIXTURE_H
#define COUNTED_FIXTURE_H

#include <stdatomic.h>

#include "kernels/kernels.h"

typedef struct counted_kernels {
    mp_kernels in_use;
    _Atomic uint64_t products, attention, norms; /* multiplications of matrices; of attention; rows of layer norms */
    _Atomic uint64_t queries; /* rows and heads for which attention over a KV cache is computed */
} counted_kernels;

static counted_kernels counted;

static inline void counted_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                                const mp_epilogue *ep, float *y, int64_t ldy) {
    const int end = panel1 * MP_PANEL_N < w->N ? panel1 * MP_PANEL_N : w->N;
    counted.products += (uint64_t)(m1 - m0) * (uint64_t)(end - panel0 * MP_PANEL_N) * (uint64_t)w->K;
    counted.in_use.gemm_f32(w, x, m0, m1, panel0, panel1, ep, y, ldy);
}

static inline void counted_attention(const mp_attn_full *a, int row0, int row1, void *scratch) {
    counted.attention += 2 * (uint64_t)(row1 - row0) * (uint64_t)a->T * (uint64_t)a->D;
    counted.in_use.attn_full(a, row0, row1, scratch);
}

static inline void counted_norm(const float *x, const float *weight, const float *bias, float eps, int n, float *y) {
    counted.norms++;
    counted.in_use.layer_norm(x, weight, bias, eps, n, y);
}

static inline void counted_kv(const mp_attn_kv *a, int rows, int block0, int block1, mp_attn_partial *state,
                              void *scratch) {
    counted.queries += (uint64_t)rows * (uint64_t)a->group;
    counted.in_use.attn_kv(a, rows, block0, block1, state, scratch);
}

/* Count from now on, until mp_kernels_init. No other thread may run kernels meanwhile. */
static inline void count_kernels(void) {
    mp_kernels_init();
    mp_kernels *table = (mp_kernels *)mp_kernels_get(); /* the table itself is not constant */
    counted.in_use = *table;
    counted.products = counted.attention = counted.norms = counted.queries = 0;
    table->gemm_f32 = counted_gemm;
    table->attn_full = counted_attention;
    table->attn_kv = counted_kv;
    table->layer_norm = counted_norm;
}

#endif
