/* simd/pair_tile.h: a tile of dense_gemm.h with the ARM instructions that multiply two rows of 8 bytes by two rows of 8
 * bytes (usmmla, bfmmla).
 *
 * Include it before dense_gemm.h, inside the same target region and with its macros. Two steps of four outputs, zipped,
 * form two registers, each with 8 bytes of two outputs. A pair of activation rows forms one register with 8 bytes of
 * each row. An accumulator holds two outputs of two rows:
 *
 *     [o r] [o r + 1] [o + 1 r] [o + 1 r + 1]
 *
 * If the number of rows is odd, the last row is its own partner and half of its results are dropped. If the number of
 * steps is odd, the last step uses D(dot). In addition to the macros of dense_gemm.h, the includer defines (and this
 * file undefines):
 *   D_MMLA(acc, w, a)   acc as D_ACC, w and a as int32x4_t
 *   D_ZIP(x, y)         zip1 of two D_ACC
 *   D_UNZIP(n, x, y)    uzp<n> of two D_ACC
 *   D_BITS(w)           a D_W as int32x4_t */
static MP_INLINE void D(pair_tile)(const int R, const dense_tile *t) {
    enum { V = 4 }; /* vectors of 4 outputs: half a panel */
    const int pairs = (R + 1) / 2;
    const uint8_t *w = t->w, *a[6];
    D_ACC acc[24], rows[24];
    MP_UNROLL
    for (int r = 0; r < 2 * pairs; r++)
        a[r] = t->a + (r < R ? r : R - 1) * t->a_stride;
    MP_UNROLL
    for (int i = 0; i < pairs * 2 * V; i++) {
        const int r = i / (2 * V) * 2, next = r + 1 < R ? r + 1 : r;
        acc[i] = D_ZIP(D(start)(D_SCALED ? t->sum[r] : 0), D(start)(D_SCALED ? t->sum[next] : 0));
    }
    for (int s = 0; s + 2 <= t->steps; s += 2, w += 2 * DENSE_STEP) {
        int32x4_t av[3];
        __builtin_prefetch(w + t->prefetch, 0, 3);
        __builtin_prefetch(w + DENSE_STEP + t->prefetch, 0, 3);
        MP_UNROLL
        for (int p = 0; p < pairs; p++)
            av[p] = vreinterpretq_s32_u8(vcombine_u8(vld1_u8(a[2 * p] + 4 * s), vld1_u8(a[2 * p + 1] + 4 * s)));
        MP_UNROLL
        for (int v = 0; v < V; v++) {
            const int32x4_t one = D_BITS(D(load)(w + 16 * v)), two = D_BITS(D(load)(w + DENSE_STEP + 16 * v));
            const int32x4_t low = vzip1q_s32(one, two), high = vzip2q_s32(one, two);
            MP_UNROLL
            for (int p = 0; p < pairs; p++) {
                acc[p * 2 * V + 2 * v] = D_MMLA(acc[p * 2 * V + 2 * v], low, av[p]);
                acc[p * 2 * V + 2 * v + 1] = D_MMLA(acc[p * 2 * V + 2 * v + 1], high, av[p]);
            }
        }
    }
    MP_UNROLL
    for (int i = 0; i < pairs * V; i++) {
        const int p = i / V, v = i % V;
        rows[2 * p * V + v] = D_UNZIP(1, acc[2 * i], acc[2 * i + 1]);
        rows[(2 * p + 1) * V + v] = D_UNZIP(2, acc[2 * i], acc[2 * i + 1]);
    }
    if (t->steps % 2) {
        MP_UNROLL
        for (int i = 0; i < R * V; i++)
            rows[i] = D(dot)(rows[i], D(load)(w + 16 * (i % V)), D(splat)(a[i / V] + 4 * (t->steps - 1)));
    }
    MP_UNROLL
    for (int i = 0; i < R * V; i++) {
        const int r = i / V, at = i % V * 4;
        const float *sw = NULL;
        if (D_SCALED)
            sw = (const float *)(const void *)(t->w + (size_t)t->steps * DENSE_STEP) + at;
        v_float f = D(result)(rows[i], sw, D_SCALED ? t->sa[r] : 0.0f);
        if (t->bias)
            f = v_add(f, v_load(t->bias + at));
        if (t->residual)
            f = v_add(f, v_load(t->residual + r * t->ld_residual + at));
        v_store(t->out + r * t->ld + at, f);
    }
}
#undef D_MMLA
#undef D_ZIP
#undef D_UNZIP
#undef D_BITS
