/* gemm_acts.c: mp_gemm_acts: products whose outputs become the activations of the next product (kernels.h). */
#include <assert.h>
#include <string.h>

#include "base/cpu.h"
#include "kernels/kernels.h"

/* Rows of one panel that are computed and rounded at a time, to A_BF16 and to A_Q8. Both are multiples of every
 * kernel's tile height, so that no tile is cut. Both are small enough for the outputs of two parts to stay in L1. */
enum { ROWS = 96, ROWS_Q8 = 48, WORDS = ROWS * MP_PANEL_N };

static void round_bf16(const float *tile, int m0, int rows, int panel, const mp_acts *out) {
    _Alignas(64) uint16_t words[WORDS];
    mp_kernels_get()->acts_bf16(tile, rows * MP_PANEL_N, words);
    uint16_t *to = out->bf16 + m0 * out->ldq + panel * MP_PANEL_N; /* `panel` counts from input 0 of `out` */
    for (int r = 0; r < rows; r++)
        memcpy(to + r * out->ldq, words + r * MP_PANEL_N, MP_PANEL_N * sizeof *words);
}

static void round_q8(const float *tile, int m0, int rows, int panel, const mp_acts *out) {
    int8_t q[ROWS_Q8 * MP_PANEL_N];
    float scale[ROWS_Q8];
    int32_t sum[2 * ROWS_Q8];
    const int blocks = out->K / MP_PANEL_N;
    mp_kernels_get()->acts_q8(tile, rows * MP_PANEL_N, q, scale, sum);
    for (int r = 0; r < rows; r++) {
        const int64_t block = (int64_t)(m0 + r) * blocks + panel;
        int8_t *to = out->q + (m0 + r) * out->ldq + panel * MP_PANEL_N;
        memcpy(to, q + r * MP_PANEL_N, MP_PANEL_N);
        if (panel == blocks - 1 && blocks % 2) /* q rows are padded with zeros to a multiple of 64 */
            memset(to + MP_PANEL_N, 0, MP_PANEL_N);
        out->scale[block] = scale[r];
        memcpy(out->sum + 2 * block, sum + 2 * r, 2 * sizeof *sum);
        out->low[block] = scale[r] * (float)(sum[2 * r] + sum[2 * r + 1]);
    }
}

void mp_gemm_acts(const mp_gemm_part *parts, int count, mp_act act, int m0, int m1, int panel0, int panel1,
                  const mp_acts *out) {
    const mp_kernels *k = mp_kernels_get();
    const mp_wmat *w = parts[0].w;
    assert(count == 1 || (count == 2 && parts[1].w->N == w->N));
    const int at = out->K - w->N;
    assert(mp_gemm_acts_can(w->N, out->kind) && at >= 0 && at % MP_PANEL_N == 0 && m1 <= out->M);
    if (count == 1 && w->kind == MP_W_BF16 && out->kind == MP_A_BF16 && mp_cpu_features() & MP_CPU_AMX) {
        const mp_epilogue ep = {.bias = parts[0].bias, .act = act};
        k->gemm_bf16_acts(w, parts[0].x, m0, m1, panel0, panel1, &ep, out->bf16 + at, out->ldq);
        return;
    }
    _Alignas(64) float tiles[2][WORDS];
    const int most = out->kind == MP_A_Q8 ? ROWS_Q8 : ROWS;
    for (int p = panel0; p < panel1; p++)
        for (int m = m0, rows; m < m1; m += rows) {
            rows = m1 - m < most ? m1 - m : most;
            for (int i = 0; i < count; i++) {
                /* kernels index rows and columns of the whole matrix, so shift the tile's base back */
                const mp_epilogue ep = {.bias = parts[i].bias, .act = count == 1 ? act : MP_ACT_NONE};
                mp_gemm(parts[i].w, parts[i].x, m, m + rows, p, p + 1, &ep, tiles[i] - ((int64_t)m + p) * MP_PANEL_N,
                        MP_PANEL_N);
            }
            if (count == 2)
                k->gated(act, tiles[0], tiles[1], (int64_t)rows * MP_PANEL_N, tiles[0]);
            (out->kind == MP_A_Q8 ? round_q8 : round_bf16)(tiles[0], m, rows, at / MP_PANEL_N + p, out);
        }
}
