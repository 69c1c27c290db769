/* ref/quant.c: the reference of quantised products, computed one output at a time from the packed layout, and of
 * quantising activations. Every other variant gives the same bits. */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "kernels/epilogue.h"
#include "kernels/pack.h"
#include "kernels/variants.h"

enum { ROWS = 16 }; /* rows that share one decoded block */

/* Add one block of 32 inputs to the accumulator of output (m, n), as kernels.h defines. */
static float add_block(const mp_pack_view *w, const mp_acts *x, int m, int b, float f) {
    const int8_t *q = x->q + (int64_t)m * x->ldq + b * 32;
    const int32_t *sum16 = x->sum + (int64_t)m * (x->K / 16) + b * 2;
    const float sa = x->scale[(int64_t)m * (x->K / 32) + b];
    for (int g = 0; g < 32 / w->group; g++) {
        int32_t dot = 0;
        for (int k = g * w->group; k < (g + 1) * w->group; k++)
            dot += w->q[k] * q[k];
        f = fmaf((float)dot, w->scale[g] * sa, f);
        if (w->mins) {
            int32_t sum = w->group == 32 ? sum16[0] + sum16[1] : sum16[g];
            f = fmaf(w->min[g], sa * (float)sum, f);
        }
    }
    return f;
}

static void gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                 float *y, int64_t ldy) {
    assert(x->kind == MP_A_Q8 && x->K == w->K && 0 <= m0 && m1 <= x->M && 0 <= panel0 && panel1 <= w->panels);
    float tile[ROWS * MP_PANEL_N];
    mp_pack_view view;
    for (int p = panel0; p < panel1; p++) {
        const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
        const int n0 = p * MP_PANEL_N, n1 = n0 + MP_PANEL_N < w->N ? n0 + MP_PANEL_N : w->N;
        for (int m = m0; m < m1; m += ROWS) {
            const int rows = m1 - m < ROWS ? m1 - m : ROWS;
            memset(tile, 0, sizeof tile);
            for (int o = 0; o < n1 - n0; o++)
                for (int b = 0; b < w->K / 32; b++) {
                    mp_pack_view_block(w->kind, panel, b, o, &view);
                    for (int r = 0; r < rows; r++)
                        tile[r * MP_PANEL_N + o] = add_block(&view, x, m + r, b, tile[r * MP_PANEL_N + o]);
                }
            mp_epilogue_apply(ep, m, m + rows, n0, n1, tile, MP_PANEL_N);
            for (int r = 0; r < rows; r++)
                memcpy(y + (int64_t)(m + r) * ldy + n0, tile + r * MP_PANEL_N, (size_t)(n1 - n0) * sizeof *y);
        }
    }
}

/* One block of one row at a time is packed as the first output of a panel. */
static void stored_product(mp_wkind kind, mp_dtype dtype, const uint8_t *rows, size_t stride, int n, const mp_acts *x,
                           int m, float *y) {
    enum { MAX = 256 * MP_PANEL_N * 9 / 8 + 1024 };
    _Alignas(64) uint8_t panel[MAX];
    const mp_dtype_row *row = mp_dtype_get(dtype);
    mp_pack_view view;
    mp_wmat w;
    mp_wmat_init(&w, kind, 1, row->items);
    assert(w.panel_bytes <= sizeof panel && x->kind == MP_A_Q8 && x->K % row->items == 0);
    w.data = panel;
    for (int o = 0; o < n; o++) {
        float f = 0;
        for (int b = 0; b < x->K / 32; b++) {
            const int at = b * 32 % row->items;
            if (at == 0) {
                const mp_tensor block = {.dtype = dtype, .ndim = 2, .shape = {1, row->items},
                                         .data = rows + (size_t)o * stride + (size_t)(b * 32 / row->items * row->bytes),
                                         .nbytes = (uint64_t)row->bytes};
                mp_pack_quant(&w, &block, 0, 1);
            }
            mp_pack_view_block(kind, panel, at / 32, 0, &view);
            f = add_block(&view, x, m, b, f);
        }
        y[o] = f;
    }
}

#define STORED(name, kind, dtype)                                                                             \
    static void stored_##name(const uint8_t *rows, size_t stride, int n, const mp_acts *x, int m, float *y) { \
        stored_product(kind, dtype, rows, stride, n, x, m, y);                                                \
    }
STORED(q4_0, MP_W_Q4_0, MP_Q4_0)
STORED(q8_0, MP_W_Q8_0, MP_Q8_0)
STORED(q4_k, MP_W_Q4_K, MP_Q4_K)
STORED(q5_k, MP_W_Q5_K, MP_Q5_K)
STORED(q6_k, MP_W_Q6_K, MP_Q6_K)
STORED(mxfp4, MP_W_MXFP4, MP_MXFP4)
#undef STORED

/* A block whose maximum is so small (below 4e-37) that 127 / max overflows is quantised to zeros. */
static void acts_q8(const float *x, int K, int8_t *q, float *scale, int32_t *sum16) {
    assert(K % 32 == 0);
    for (int b = 0; b < K / 32; b++, x += 32, q += 32, sum16 += 2) {
        float max = 0.0f;
        bool finite = true;
        for (int k = 0; k < 32; k++) {
            finite = finite && isfinite(x[k]);
            max = fabsf(x[k]) > max ? fabsf(x[k]) : max;
        }
        const float inverse = 127.0f / max;
        const bool zero = !finite || !isfinite(inverse);
        scale[b] = !finite ? NAN : zero ? 0.0f : max / 127.0f;
        sum16[0] = sum16[1] = 0;
        for (int k = 0; k < 32; k++) {
            q[k] = zero ? 0 : (int8_t)(int32_t)rintf(x[k] * inverse);
            sum16[k / 16] += q[k];
        }
    }
}

void mp_ref_quant(mp_kernel_table *table) {
    MP_SET(table, acts_q8, acts_q8, "ref");
    MP_SET(table, gemm_q4_0, gemm, "ref");
    MP_SET(table, gemm_q4_1, gemm, "ref");
    MP_SET(table, gemm_q5_0, gemm, "ref");
    MP_SET(table, gemm_q5_1, gemm, "ref");
    MP_SET(table, gemm_q8_0, gemm, "ref");
    MP_SET(table, gemm_q4_k, gemm, "ref");
    MP_SET(table, gemm_q5_k, gemm, "ref");
    MP_SET(table, gemm_q6_k, gemm, "ref");
    MP_SET(table, gemm_q2_k, gemm, "ref");
    MP_SET(table, gemm_q3_k, gemm, "ref");
    MP_SET(table, gemm_tq, gemm, "ref");
    MP_SET(table, gemm_iq2_xxs, gemm, "ref");
    MP_SET(table, gemm_iq2_xs, gemm, "ref");
    MP_SET(table, gemm_iq3, gemm, "ref");
    MP_SET(table, gemm_iq4_nl, gemm, "ref");
    MP_SET(table, gemm_iq4_xs, gemm, "ref");
    MP_SET(table, gemm_mxfp4, gemm, "ref");
    MP_SET(table, gemm_nvfp4, gemm, "ref");
    MP_SET(table, stored_q4_0, stored_q4_0, "ref");
    MP_SET(table, stored_q8_0, stored_q8_0, "ref");
    MP_SET(table, stored_q4_k, stored_q4_k, "ref");
    MP_SET(table, stored_q5_k, stored_q5_k, "ref");
    MP_SET(table, stored_q6_k, stored_q6_k, "ref");
    MP_SET(table, stored_mxfp4, stored_mxfp4, "ref");
}
