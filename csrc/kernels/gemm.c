/* gemm.c: dispatch of gemm by kind of weights, the epilogue of a tile, and fp32 products of unpacked matrices. */
#include <assert.h>
#include <string.h>

#include "kernels/blas.h"
#include "kernels/epilogue.h"
#include "kernels/pack_dense.h"
#include "kernels/variants.h"

void mp_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
             float *y, int64_t ldy) {
    const mp_kernels *k = mp_kernels_get();
    assert(x->kind == mp_wmat_acts(w->kind) && x->K == w->K);
    assert(0 <= m0 && m0 <= m1 && m1 <= x->M);
    assert(0 <= panel0 && panel0 <= panel1 && panel1 <= w->panels);
    if (m0 == m1 || panel0 == panel1)
        return;
    void (*const by_kind[MP_W_KIND_COUNT])(const mp_wmat *, const mp_acts *, int, int, int, int, const mp_epilogue *,
                                           float *, int64_t) = {
        [MP_W_F32] = k->gemm_f32,   [MP_W_BF16] = k->gemm_bf16, [MP_W_I8] = k->gemm_i8,
        [MP_W_Q4_0] = k->gemm_q4_0, [MP_W_Q4_1] = k->gemm_q4_1, [MP_W_Q5_0] = k->gemm_q5_0,
        [MP_W_Q5_1] = k->gemm_q5_1, [MP_W_Q8_0] = k->gemm_q8_0, [MP_W_Q4_K] = k->gemm_q4_k,
        [MP_W_Q5_K] = k->gemm_q5_k, [MP_W_Q6_K] = k->gemm_q6_k,
        [MP_W_Q2_K] = k->gemm_q2_k, [MP_W_Q3_K] = k->gemm_q3_k, [MP_W_TQ] = k->gemm_tq,
        [MP_W_IQ2_XXS] = k->gemm_iq2_xxs, [MP_W_IQ2_XS] = k->gemm_iq2_xs, [MP_W_IQ3] = k->gemm_iq3,
        [MP_W_IQ4_NL] = k->gemm_iq4_nl, [MP_W_IQ4_XS] = k->gemm_iq4_xs, [MP_W_MXFP4] = k->gemm_mxfp4,
        [MP_W_NVFP4] = k->gemm_nvfp4,
    };
    by_kind[w->kind](w, x, m0, m1, panel0, panel1, ep, y, ldy);
}

/* ---- rows as stored ---------------------------------------------------------------------------------------------- */

/* Returns the slot that multiplies one row of x by rows of a type, or NULL. */
static mp_stored_product *product_for(mp_dtype dtype) {
    const mp_kernels *k = mp_kernels_get();
    switch (dtype) {
#define CASE(type, slot) case type: return mp_kernels_is_ref(MP_SLOT_##slot) ? NULL : k->slot
        CASE(MP_Q4_0, stored_q4_0);
        CASE(MP_Q8_0, stored_q8_0);
        CASE(MP_Q4_K, stored_q4_k);
        CASE(MP_Q5_K, stored_q5_k);
        CASE(MP_Q6_K, stored_q6_k);
        CASE(MP_MXFP4, stored_mxfp4);
        CASE(MP_F32, stored_f32);
#undef CASE
    default: return NULL;
    }
}

/* Returns true if the slot of F32 that takes several rows of x has a variant. */
static bool takes_f32_rows(mp_dtype dtype) { return dtype == MP_F32 && !mp_kernels_is_ref(MP_SLOT_stored_f32_rows); }

bool mp_stored_can(mp_dtype dtype, mp_akind acts, int rows) {
    enum { MAX_ROWS = 2, MAX_F32_ROWS = 28 };
    if (acts != (dtype == MP_F32 ? MP_A_F32 : MP_A_Q8))
        return false;
    return takes_f32_rows(dtype) ? rows <= MAX_F32_ROWS : rows <= MAX_ROWS && product_for(dtype);
}

void mp_stored_multiply(mp_dtype dtype, const uint8_t *rows, size_t stride, int n, const mp_acts *x, int m0, int m1,
                        float *y, int64_t ldy) {
    if (takes_f32_rows(dtype)) {
        const int64_t ld = (int64_t)(stride / sizeof(float));
        mp_kernels_get()->stored_f32_rows((const float *)(const void *)rows, ld, n, x, m0, m1, y, ldy);
        return;
    }
    mp_stored_product *product = product_for(dtype);
    for (int m = m0; m < m1; m++)
        product(rows, stride, n, x, m, y + (m - m0) * ldy);
}

mp_squared_product *mp_squared_product_for(void) {
    return mp_kernels_is_ref(MP_SLOT_squared_f32) ? NULL : mp_kernels_get()->squared_f32;
}

void mp_epilogue_apply(const mp_epilogue *ep, int m0, int m1, int n0, int n1, float *tile, int64_t ld) {
    const int rows = m1 - m0, cols = n1 - n0;
    assert(rows >= 0 && cols >= 0 && ld >= cols);
    if (!ep)
        return;
    for (int r = 0; ep->bias && r < rows; r++)
        for (int c = 0; c < cols; c++)
            tile[r * ld + c] += ep->bias[n0 + c];
    if (ep->act != MP_ACT_NONE) {
        const mp_kernels *k = mp_kernels_get();
        if (ld == cols)
            k->activate(ep->act, (int64_t)rows * cols, tile);
        else
            for (int r = 0; r < rows; r++)
                k->activate(ep->act, cols, tile + r * ld);
    }
    for (int r = 0; ep->residual && r < rows; r++) {
        const float *residual = ep->residual + (m0 + r) * ep->ld_residual + n0;
        for (int c = 0; c < cols; c++)
            tile[r * ld + c] += residual[c];
    }
}

/* ---- unpacked fp32 ----------------------------------------------------------------------------------------------- */

/* Compute one k-chunk with our own kernel: pack the weights of 32 outputs at a time on the stack. If `add`, add to y
 * instead of overwriting it. */
static void plain_chunk(int M, int N, int K, const float *x, int64_t ldx, const float *w, int64_t ldw, bool add,
                        float *y, int64_t ldy) {
    _Alignas(64) float panel[MP_K_CHUNK * MP_PANEL_N];
    const mp_kernels *k = mp_kernels_get();
    const mp_acts acts = {.kind = MP_A_F32, .M = M, .K = K, .f32 = x, .ld_f32 = ldx};
    for (int n = 0; n < N; n += MP_PANEL_N) {
        const int cols = N - n < MP_PANEL_N ? N - n : MP_PANEL_N;
        const mp_wmat one = {.kind = MP_W_F32,
                             .N = cols,
                             .K = K,
                             .panels = 1,
                             .panel_bytes = mp_pack_dense_panel_bytes(MP_W_F32, K),
                             .data = (uint8_t *)panel};
        const mp_epilogue ep = {.residual = y + n, .ld_residual = ldy};
        mp_pack_dense_f32(w + n * ldw, ldw, cols, K, panel);
        k->gemm_f32(&one, &acts, 0, M, 0, 1, add ? &ep : NULL, y + n, ldy);
    }
}

void mp_gemm_f32_plain(int M, int N, int K, const float *x, int64_t ldx, const float *w, int64_t ldw, float *y,
                       int64_t ldy) {
    assert(M >= 0 && N >= 0 && K >= 0 && ldx >= K && ldw >= K && ldy >= N);
    if (K == 0)
        for (int m = 0; m < M; m++)
            memset(y + m * ldy, 0, sizeof(float) * (size_t)N);
    for (int k = 0; k < K; k += MP_K_CHUNK) {
        const int chunk = K - k < MP_K_CHUNK ? K - k : MP_K_CHUNK;
        if (!mp_blas_sgemm(M, N, chunk, x + k, ldx, w + k, ldw, k > 0, y, ldy))
            plain_chunk(M, N, chunk, x + k, ldx, w + k, ldw, k > 0, y, ldy);
    }
}

static int blocks_of(int n, int most) { return (n + most - 1) / most; }

/* Apply the epilogue to a tile of sums and store it in y. */
static void put_tile(const mp_epilogue *ep, int m0, int m1, int n0, int n1, float *tile, float *y, int64_t ldy) {
    mp_epilogue_apply(ep, m0, m1, n0, n1, tile, n1 - n0);
    for (int m = m0; m < m1; m++)
        memcpy(y + m * ldy + n0, tile + (int64_t)(m - m0) * (n1 - n0), sizeof *y * (size_t)(n1 - n0));
}

/* Multiply by OpenBLAS in tiles of at most TILE_ROWS times TILE_COLUMNS outputs, all about equally large: OpenBLAS
 * copies both inputs of each call, and a chunk that is too small for it is computed by our own kernel. fast: one
 * call for all of K, with sums in the order of the library. */
static void stored_by_blas(const mp_tensor *w, const mp_acts *x, int n0, int n1, bool fast, const mp_epilogue *ep,
                           float *tile, float *y, int64_t ldy) {
    enum { TILE_ROWS = 256, TILE_COLUMNS = MP_STORED_TILE / TILE_ROWS };
    assert(x->M > 0 && n0 < n1);
    const int down = blocks_of(x->M, TILE_ROWS), rows = blocks_of(x->M, down);
    const int across = blocks_of(n1 - n0, TILE_COLUMNS), columns = blocks_of(n1 - n0, across);
    for (int n = n0, end; n < n1; n = end) {
        end = n1 - n < columns ? n1 : n + columns;
        for (int m = 0, last; m < x->M; m = last) {
            last = x->M - m < rows ? x->M : m + rows;
            const float *in = x->f32 + m * x->ld_f32;
            const float *weights = (const float *)(const void *)w->data + (int64_t)n * x->K;
            if (!fast || !mp_blas_sgemm_fast(last - m, end - n, x->K, in, x->ld_f32, weights, x->K, tile, end - n))
                mp_gemm_f32_plain(last - m, end - n, x->K, in, x->ld_f32, weights, x->K, tile, end - n);
            put_tile(ep, m, last, n, end, tile, y, ldy);
        }
    }
}

/* Return true if products go to a library whose bits differ from those of mp_gemm. fast: the caller allows that. */
static bool takes_other_bits(bool fast) { return fast && mp_blas_differs(); }

bool mp_gemm_stored_by_blas(const mp_tensor *w, const mp_acts *x, int outputs, bool fast) {
    enum { BLAS_ROWS = 96 }; /* with fewer rows, OpenBLAS is slower than packing a panel and our kernel */
    if (w->dtype != MP_F32 || x->kind != MP_A_F32 || x->M < BLAS_ROWS)
        return false;
    return takes_other_bits(fast) || mp_blas_takes(x->M, outputs, x->K < MP_K_CHUNK ? x->K : MP_K_CHUNK);
}

bool mp_gemm_stored(const mp_tensor *w, const mp_acts *x, int n0, int n1, bool fast, const mp_epilogue *ep,
                    float *tile, float *y, int64_t ldy) {
    if (mp_stored_can(w->dtype, x->kind, x->M)) {
        const size_t stride = (size_t)(w->nbytes / (uint64_t)w->shape[0]);
        for (int n = n0, end; n < n1; n = end) {
            end = n1 - n < MP_PANEL_N ? n1 : n + MP_PANEL_N;
            mp_stored_multiply(w->dtype, w->data + (size_t)n * stride, stride, end - n, x, 0, x->M, tile, end - n);
            put_tile(ep, 0, x->M, n, end, tile, y, ldy);
        }
        return true;
    }
    if (!mp_gemm_stored_by_blas(w, x, n1 - n0, fast))
        return false;
    stored_by_blas(w, x, n0, n1, takes_other_bits(fast), ep, tile, y, ldy);
    return true;
}

void mp_gemm_f32_own(int M, int N, int K, const float *x, int64_t ldx, const float *w, int64_t ldw, float *y,
                     int64_t ldy) {
    for (int k = 0; k < K; k += MP_K_CHUNK) {
        const int chunk = K - k < MP_K_CHUNK ? K - k : MP_K_CHUNK;
        plain_chunk(M, N, chunk, x + k, ldx, w + k, ldw, k > 0, y, ldy);
    }
}
