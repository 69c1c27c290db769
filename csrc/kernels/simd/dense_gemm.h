/* simd/dense_gemm.h: the body of a dense gemm, for one kind of weights and one instruction set.
 *
 * Include it inside a target region, once per kind. All dense kinds have the same shape (pack_dense.h): a step is 128
 * bytes of a panel and one 4-byte word of each row. A tile is R rows times P panels of V vectors, held in registers
 * over the steps of a k-chunk:
 *
 *            panel p          panel p + 1
 *            [  V vectors  ]  [  V vectors  ]     outputs -> lanes
 *   row m    acc acc ..       acc acc ..          one word of row m, broadcast
 *   row m+1  acc acc ..       acc acc ..
 *
 * The includer defines the following macros. This file undefines all except D_LANES, D_AHEAD and the v_ functions:
 *   D(name)             the name with the prefix of this kind
 *   D_LANES             floats in a vector; v_load, v_store, v_add, v_zero work on v_float
 *   D_W, D_A, D_ACC     result type of D(load) from a panel, of D(splat) from a row, and the accumulator of D(dot)
 *   D_CLASS             D_F32, D_BF16 or D_I8: the content of a word of a row
 *   D_HALVES            1: a tile spans whole panels (AVX-512);  2: half of one (fewer or shorter registers)
 *   D_MAX_ROWS          rows of the tallest tile, 4, 6 or 12
 *   D_PANELS(R)         panels that a tile of R rows spans: 2 if one panel has too few sums to hide latency, else 1
 *   D_BY_VECTOR         optional: multiply one vector of weights by all rows before loading the next. Fewer registers
 *                       hold weights, and each word of a row is loaded once per vector
 *   D_PARTS             optional: products D(dot) of a step, one after the other. A step then has as many words of a
 *                       row, and D(load) takes the number of the part as its second argument
 *   D_ROWS_WIDE         optional: rows of any class are `ldq` bytes apart in `q`
 *   D_WORD              optional: bytes of a row in a step, if not 4 per part
 *   D_WIDEN             optional: if a product has more than 6 tiles and at most D_WIDEN steps, D(widen)(w, steps, out)
 *                       first copies half a panel: 128 bytes per step, which D(load_widened) reads vector by vector,
 *                       then everything that D(result) reads
 *   D_AHEAD(rows)       optional, kept for all kinds: prefetch distance in bytes for the first tile of a product of
 *                       `rows` rows; 0: no prefetches
 *   D_BODY(R, P, t)     optional: computes a tile instead of D(tile) of this file (pair_tile.h)
 * and these functions, static MP_INLINE:
 *   D_ACC D(start)(int32_t sum)          start of a chain; sum = the row's sum of q (int8 only, else 0)
 *   D_W D(load)(const uint8_t *w)        V = 32 / D_HALVES / D_LANES vectors are consecutive
 *   D_A D(splat)(const uint8_t *a)
 *   D_ACC D(dot)(D_ACC acc, D_W w, D_A a)
 *   v_float D(result)(D_ACC acc, const float *sw, float sa) */

#ifndef MP_DENSE_TILE
#define MP_DENSE_TILE
/* Arguments of a tile function; all kinds use this struct. */
typedef struct dense_tile {
    const uint8_t *w; /* first step of the first panel; for the second half of a panel, half a step further */
    size_t panel_bytes;
    const uint8_t *a; /* first row */
    int64_t a_stride; /* bytes */
    int steps;
    int64_t prefetch;      /* bytes ahead of w; 0: the panel is already in cache */
    const int32_t *sum;    /* int8: [rows] sums of q */
    const float *sa;       /* int8: [rows] scales */
    const float *bias;     /* [P * 32 / D_HALVES] or NULL */
    const float *residual; /* [rows, ld_residual] or NULL */
    int64_t ld_residual;
    float *out; /* [rows, ld] */
    int64_t ld;
} dense_tile;
enum { DENSE_STEP = MP_PANEL_N * 4, DENSE_AHEAD = 8192, DENSE_BLOCK = 516 };
#ifndef D_AHEAD
#define D_AHEAD(rows) DENSE_AHEAD
#endif
/* Tiles of bf16 and int8 with more accumulators take one step per iteration: clang loads the words of a row for all
 * unrolled steps at once, and spills them. */
#ifdef __clang__
#define D_UNROLLED_SUMS 16
#else
#define D_UNROLLED_SUMS 28
#endif

/* Properties of the class: D_STEPS is the number of steps of K inputs, D_CHUNK the steps of one chain, D_ROW row m of
 * the activations, D_ROW_STRIDE the bytes between rows. D_SCALED is true if D(result) needs the int8 scales. */
#define D_F32  0
#define D_BF16 1
#define D_I8   2
#define D_STEPS(K) (D_CLASS == D_F32 ? (K) : D_CLASS == D_BF16 ? ((K) + 1) / 2 : ((K) + 3) / 4)
#define D_CHUNK    (D_CLASS == D_F32 ? MP_K_CHUNK : INT32_MAX)
#define D_ROW(x, m)                                                         \
    (D_CLASS == D_F32    ? (const uint8_t *)((x)->f32 + (m) * (x)->ld_f32)  \
     : D_CLASS == D_BF16 ? (const uint8_t *)((x)->bf16 + (m) * (x)->ldq)    \
                         : (const uint8_t *)((x)->q + (m) * (x)->ldq))
#define D_ROW_STRIDE(x)                                             \
    (D_CLASS == D_F32    ? (x)->ld_f32 * (int64_t)sizeof(float)     \
     : D_CLASS == D_BF16 ? (x)->ldq * (int64_t)sizeof(uint16_t)     \
                         : (x)->ldq)
#define D_SCALED (D_CLASS == D_I8)
#endif

#define D_V (MP_PANEL_N / D_HALVES / D_LANES)

#ifdef D_ROWS_WIDE
#define D_FROM(x, m) ((const uint8_t *)(x)->q + (m) * (x)->ldq)
#define D_STRIDE(x)  ((x)->ldq)
#else
#define D_FROM   D_ROW
#define D_STRIDE D_ROW_STRIDE
#endif

#ifdef D_PARTS
#define D_LOAD(w, part) D(load)(w, part)
#else
#define D_PARTS         1
#define D_LOAD(w, part) D(load)(w)
#endif
#ifndef D_WORD
#define D_WORD (4 * D_PARTS)
#endif

#ifndef D_WIDEN
#define D_WIDENED(from) D_LOAD(from, part)
#else
#define D_WIDENED(from) D(load_widened)(from)
#endif
/* D_HELD: vectors of weights that are in registers at a time, those of a step or one. D_BARRIER: without it the
 * compiler keeps the words of the rows in registers over all vectors of the step, and spills. */
#ifdef D_BY_VECTOR
#define D_HELD 1
#define D_BARRIER(pointer) __asm__ volatile("" : "+r"(pointer))
#else
#define D_HELD D_V
#define D_BARRIER(pointer) (void)0
#endif

/* Compute `count` (a constant) steps of the tile. a[i] points at row 3 * i. x86 instructions can address base, base +
 * stride and base + 2 * stride, so 12 rows need only 4 base registers, the stride and no arithmetic. */
static MP_INLINE void D(steps)(const int R, const int P, const int widened, const int count, const dense_tile *t,
                               const uint8_t *w, const uint8_t *const *a, D_ACC *acc) {
    const int64_t stride = t->a_stride;
    MP_UNROLL
    for (int u = 0; u < count; u++) {
        MP_UNROLL
        for (int held = 0; held < D_PARTS * D_V; held += D_HELD) { /* all vectors of a part, then the next part */
            const int part = held / D_V, first = held % D_V;
            D_W wv[8];
            MP_UNROLL
            for (int p = 0; p < P; p++) {
                const uint8_t *from = w + (size_t)p * t->panel_bytes + u * DENSE_STEP;
                MP_UNROLL
                for (int line = 0; held == 0 && line < 2 / D_HALVES; line++)
                    __builtin_prefetch(from + line * 64 + t->prefetch, 0, 3);
                MP_UNROLL
                for (int v = 0; v < D_HELD; v++)
                    wv[p * D_HELD + v] = widened ? D_WIDENED(from + (first + v) * D_LANES * 8)
                                                 : D_LOAD(from + (first + v) * D_LANES * 4, part);
            }
            const uint8_t *row[4];
            MP_UNROLL
            for (int i = 0; i < (R + 2) / 3; i++) {
                row[i] = a[i];
                D_BARRIER(row[i]);
            }
            MP_UNROLL
            for (int r = 0; r < R; r++) {
                const D_A av = D(splat)(row[r / 3] + r % 3 * stride + u * D_WORD + part * 4);
                MP_UNROLL
                for (int i = 0; i < P * D_HELD; i++) {
                    const int at = r * P * D_V + i / D_HELD * D_V + first + i % D_HELD;
                    acc[at] = D(dot)(acc[at], wv[i], av);
                }
            }
        }
    }
}

/* widened: the panel is a copy of D(widen). */
static MP_INLINE void D(tile_of)(const int R, const int P, const int widened, const dense_tile *t) {
    const int unrolled = D_CLASS != D_F32 && R * P * D_V > D_UNROLLED_SUMS ? 1 : 4; /* steps of an iteration */
    D_ACC acc[28], run[28];
    const uint8_t *w = t->w, *a[4];
    int left = t->steps;
    bool first = true;
    MP_UNROLL
    for (int i = 0; i < (R + 2) / 3; i++)
        a[i] = t->a + 3 * i * t->a_stride;
    for (;;) {
        int n = left < D_CHUNK ? left : D_CHUNK;
        left -= n;
        MP_UNROLL
        for (int i = 0; i < R * P * D_V; i++)
            acc[i] = D(start)(D_SCALED ? t->sum[i / (P * D_V)] : 0);
        for (; n >= unrolled; n -= unrolled) {
            D(steps)(R, P, widened, unrolled, t, w, a, acc);
            w += unrolled * DENSE_STEP;
            MP_UNROLL
            for (int i = 0; i < (R + 2) / 3; i++)
                a[i] += unrolled * D_WORD;
        }
        for (; n > 0; n--) {
            D(steps)(R, P, widened, 1, t, w, a, acc);
            w += DENSE_STEP;
            MP_UNROLL
            for (int i = 0; i < (R + 2) / 3; i++)
                a[i] += D_WORD;
        }
#if D_SCALED
        (void)run, (void)first;
        break;
#else
        if (!first) {
            MP_UNROLL
            for (int i = 0; i < R * P * D_V; i++)
                acc[i] = v_add(run[i], acc[i]);
        }
        if (left == 0)
            break;
        MP_UNROLL
        for (int i = 0; i < R * P * D_V; i++)
            run[i] = acc[i];
        first = false;
#endif
    }
    v_float f[28];
    MP_UNROLL
    for (int i = 0; i < R * P * D_V; i++) {
        const int r = i / (P * D_V), v = i % (P * D_V);
        const float *sw = NULL;
        if (D_SCALED) /* scales follow the last step of their panel; those of its second half start 64 bytes later */
            sw = (const float *)(const void *)(t->w + (size_t)(v / D_V) * t->panel_bytes +
                                               (size_t)t->steps * DENSE_STEP) +
                 v % D_V * D_LANES;
        f[i] = D(result)(acc[i], sw, D_SCALED ? t->sa[r] : 0.0f);
    }
    if (t->bias) {
        MP_UNROLL
        for (int i = 0; i < R * P * D_V; i++)
            f[i] = v_add(f[i], v_load(t->bias + i % (P * D_V) * D_LANES));
    }
    if (t->residual) {
        MP_UNROLL
        for (int i = 0; i < R * P * D_V; i++)
            f[i] = v_add(f[i], v_load(t->residual + i / (P * D_V) * t->ld_residual + i % (P * D_V) * D_LANES));
    }
    MP_UNROLL
    for (int i = 0; i < R * P * D_V; i++)
        v_store(t->out + i / (P * D_V) * t->ld + i % (P * D_V) * D_LANES, f[i]);
}

static MP_INLINE void D(tile)(const int R, const int P, const dense_tile *t) { D(tile_of)(R, P, 0, t); }

#if D_MAX_ROWS == 4
#define D_EACH(X) X(1) X(2) X(3) X(4)
#elif D_MAX_ROWS == 6
#define D_EACH(X) X(1) X(2) X(3) X(4) X(5) X(6)
#else
#define D_EACH(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#endif
#ifndef D_BODY
#define D_BODY(R, P, t) D(tile)(R, P, t)
#endif
#define D_TILE(R)                                                    \
    static void D(one_##R)(const dense_tile *t) { D_BODY(R, 1, t); } \
    static void D(wide_##R)(const dense_tile *t) { D_BODY(R, D_PANELS(R), t); }
#ifdef D_WIDEN
#define D_TILE_WIDENED(R) static void D(widened_##R)(const dense_tile *t) { D(tile_of)(R, 1, 1, t); }
#define D_ONE_WIDENED(R) D(widened_##R),
D_EACH(D_TILE_WIDENED)
#endif
#define D_ONE(R) D(one_##R),
#define D_WIDE(R) D_PANELS(R) > 1 ? D(wide_##R) : D(one_##R),
D_EACH(D_TILE)

/* Multiply rows [m0, m1) by panels [panel0, panel1). A panel stays in cache while all rows are multiplied by it. */
static void D(block)(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                     float *y, int64_t ldy) {
    typedef void (*tile_function)(const dense_tile *);
    static const tile_function tiles[2][D_MAX_ROWS] = {{D_EACH(D_ONE)}, {D_EACH(D_WIDE)}};
    _Alignas(64) float buffer[D_MAX_ROWS * MP_PANEL_N * 2];
    _Alignas(64) float bias[MP_PANEL_N * 2];
    const int rows = m1 - m0;
    const int count = (rows + D_MAX_ROWS - 1) / D_MAX_ROWS; /* tiles, of nearly equal height */
    const mp_act act = ep ? ep->act : MP_ACT_NONE;
    const int wide = count == 1 ? D_PANELS(rows) : 1, ahead = D_AHEAD(rows);
    dense_tile t = {.panel_bytes = w->panel_bytes, .a_stride = D_STRIDE(x), .steps = D_STEPS(w->K)};
    /* the epilogue that remains after the tile has added the bias */
    const mp_epilogue rest = {
        .act = act, .residual = ep ? ep->residual : NULL, .ld_residual = ep ? ep->ld_residual : 0};
    t.ld_residual = rest.ld_residual;

    for (int p = panel0, P; p < panel1; p += P) {
        P = panel1 - p >= wide ? wide : 1;
        for (int half = 0; half < D_HALVES; half++) {
            const int width = P * MP_PANEL_N / D_HALVES;
            const int n0 = p * MP_PANEL_N + half * width;
            const int cols = w->N - n0 < width ? w->N - n0 : width;
            if (cols <= 0)
                break;
            const bool direct = cols == width && act == MP_ACT_NONE;
            t.w = w->data + (size_t)p * w->panel_bytes + (size_t)half * (DENSE_STEP / D_HALVES);
            t.bias = ep && ep->bias ? ep->bias + n0 : NULL;
            if (t.bias && cols < width) {
                memset(bias, 0, sizeof bias);
                memcpy(bias, t.bias, sizeof(float) * (size_t)cols);
                t.bias = bias;
            }
#ifdef D_WIDEN
            _Alignas(64) uint8_t memory[D_WIDEN * DENSE_STEP + 192];
            static const tile_function widened[D_MAX_ROWS] = {D_EACH(D_ONE_WIDENED)};
            const bool widens = count > 6 && t.steps <= D_WIDEN;
            if (widens) {
                D(widen)(t.w, t.steps, memory);
                t.w = memory;
            }
#endif
            for (int i = 0; i < count; i++) {
                const int r0 = m0 + (int)((int64_t)rows * i / count);
                const int r1 = m0 + (int)((int64_t)rows * (i + 1) / count);
#ifdef D_WIDEN
                const tile_function tile = widens ? widened[r1 - r0 - 1] : tiles[P > 1][r1 - r0 - 1];
#else
                const tile_function tile = tiles[P > 1][r1 - r0 - 1];
#endif
                t.a = D_FROM(x, r0);
                t.prefetch = i == 0 ? ahead : 0;
#if D_SCALED
                t.sum = x->sum + r0;
                t.sa = x->scale + r0;
#endif
                if (direct) {
                    t.residual = rest.residual ? rest.residual + r0 * t.ld_residual + n0 : NULL;
                    t.out = y + r0 * ldy + n0;
                    t.ld = ldy;
                    tile(&t);
                    continue;
                }
                t.residual = NULL;
                t.out = buffer;
                t.ld = width;
                tile(&t);
                /* compact the rows to `cols`: drop outputs beyond N */
                for (int r = 1; cols < width && r < r1 - r0; r++)
                    memmove(buffer + r * cols, buffer + r * width, sizeof(float) * (size_t)cols);
                mp_epilogue_apply(&rest, r0, r1, n0, n0 + cols, buffer, cols);
                if (cols == width) { /* few vectors per row: gcc would turn memcpy into a slower byte loop */
                    for (int r = 0; r < r1 - r0; r++)
                        for (int c = 0; c < width; c += D_LANES)
                            v_store(y + (r0 + r) * ldy + n0 + c, v_load(buffer + r * width + c));
                    continue;
                }
                for (int r = r0; r < r1; r++)
                    memcpy(y + r * ldy + n0, buffer + (r - r0) * cols, sizeof(float) * (size_t)cols);
            }
        }
    }
}

static void D(gemm)(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                    float *y, int64_t ldy) {
    /* blocks of at most DENSE_BLOCK rows: enough to repay reading the panels from memory, few enough to stay in cache
     * while all panels pass */
    const int count = (m1 - m0 + DENSE_BLOCK - 1) / DENSE_BLOCK;
    for (int i = 0; i < count; i++) {
        const int r0 = m0 + (int)((int64_t)(m1 - m0) * i / count);
        const int r1 = m0 + (int)((int64_t)(m1 - m0) * (i + 1) / count);
        D(block)(w, x, r0, r1, panel0, panel1, ep, y, ldy);
    }
}

#undef D_EACH
#undef D_TILE
#undef D_BODY
#undef D_ONE
#undef D_WIDE
#undef D_V
#undef D
#undef D_W
#undef D_A
#undef D_ACC
#undef D_CLASS
#undef D_MAX_ROWS
#undef D_BY_VECTOR
#undef D_HELD
#undef D_BARRIER
#undef D_PANELS
#undef D_PARTS
#undef D_LOAD
#undef D_WORD
#undef D_ROWS_WIDE
#undef D_FROM
#undef D_STRIDE
#undef D_WIDEN
#undef D_WIDENED
