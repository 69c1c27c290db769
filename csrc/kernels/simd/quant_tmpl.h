/* quant_tmpl.h: products of quantised weights with int8 rows, over the vectors of one instruction set.
 *
 * Include it inside a target region. The includer defines, for vectors of Q_LANES four-byte lanes (16 or 8):
 *   qi, qf                            vectors of integers and of floats
 *   q_part, q_part_zero()             accumulator of q_dot between flushes: its type and an empty one
 *   q_load q_and q_or_and(a, b, m)    a | (b & m)
 *   q_shr q_shl                       shifts within 16-bit lanes
 *   q_spread(p)                       the four bytes at p in every lane        q_set(i)  an int32 in every lane
 *   q_table(p) q_lookup(t, x)         the 16 bytes at p as a table t; maps each byte of x, 0 ... 15, to its entry
 *   q_zero q_to_float qf_zero qf_spread(p) qf_add qf_mul qf_fma(a, b, c) qf_fnma(a, b, c) qf_load qf_store
 *   q_u8(p)                           Q_LANES bytes as integers
 *   qf_halves(p) qf_bf16(p) qf_i8(p)  Q_LANES halves, bf16 numbers or signed bytes as floats
 *   q_dot(part, sum, w, a)            adds the dot products of unsigned w with signed a to (part, sum)
 *   q_dot_bytes(part, sum, w, a, odd) the same for `bytes` and tables: w is value + 128. With Q_WIDE, a holds inputs 0
 *                                     and 2 of each group as int16, and `odd` inputs 1 and 3; else `odd` equals a
 *   q_flush(part, sum)                adds part to sum and empties it
 *   Q_FLUSH_Q4, _Q5, _Q6, _Q7         dot products of each width between flushes, so that 16-bit parts never overflow
 *   Q_BYTES_OFFSET                    128 if q_dot_bytes uses w as it is, 0 if it restores the sign itself
 *   Q_WIDE                            1 if q_dot_bytes multiplies rows of int16, which are prepared as well
 *   Q_VECTORS(R)                      vectors of outputs in a tile of R rows; divides 32 / Q_LANES
 *   Q_ROWS                            maximum rows of a tile: 4 or 8
 *   Q_LIGHT_ROWS                      optional, the same for kinds that are unpacked by few operations; else Q_ROWS
 *   Q_TALL                            maximum rows of a tile if the product has more than Q_ROWS rows
 *   Q_CENTRE(q, n, start)             optional: computes for n groups of 16 inputs two words each, -32 times the sums
 *                                     of the q that are added to these words of a part. The parts of Q6_K start at
 *                                     them and then fit 16 bits after 16 inputs, although they may wrap before
 *   Q_AHEAD_ONE                       prefetch distance for one row in bytes; 0: no prefetches
 *   Q_NEAR                            locality of prefetches: 3 to the first-level cache, 2 to the second-level cache
 *   Q_KEEPS_HEAD                      1 if memory-bound tiles keep d and dmin of a superblock in registers, too
 *
 * A tile is R rows by Q_VECTORS(R) vectors. It reads the panel once, unpacks each line in registers and multiplies it
 * with all rows; nothing is unpacked to memory. Integer accumulators cover one block, float accumulators all of K.
 * Values that depend on a row and a block, but not on an output, come with the activations or are prepared for many
 * blocks at a time (q_rows). */
#include "kernels/simd/quant_kinds.h"

#ifndef Q_LIGHT_ROWS
#define Q_LIGHT_ROWS Q_ROWS
#endif

enum {
    Q_PREPARED = 8192, /* 16,384 inputs of 8 rows in groups of 16: each panel would prepare longer rows again */
    Q_PREPARED_WIDE = 1024,
};

typedef struct q_rows {         /* [R][q_stride(kind, R)]; one entry per block, two if groups are of 16 */
    int32_t start[Q_PREPARED];  /* initial integer accumulator: -(offset of the weights) * (sum of q); for kinds with
                                 * q_is_centred two words, each of the inputs that are added to this word */
    float low[Q_PREPARED];      /* for minima of groups of 16: sa * (float)(sum of q) */
    int16_t wide[Q_WIDE ? 32 * Q_PREPARED_WIDE : 1]; /* q, of each group inputs 0, 2, 1, 3; for kinds with q_is_wide */
    int row;                    /* first row of the tile whose blocks are all prepared; -1: none */
} q_rows;

/* True if q_dot_bytes multiplies the kind with prepared rows of int16. */
static MP_INLINE int q_is_wide(int kind) { return Q_WIDE && (kind == MP_W_Q8_0 || q_is_iq4(kind)); }

#ifdef Q_CENTRE
#define Q_PART_OF(start) (start)
static MP_INLINE int q_is_centred(int kind) { return kind == MP_W_Q6_K; }
#else
#define Q_CENTRE(q, n, start) (void)0
#define Q_PART_OF(start)      q_part_zero()
static MP_INLINE int q_is_centred(int kind) { return kind < 0; }
#endif

/* Prepared entries per row: a multiple of 16, so that each chunk of blocks consists of whole superblocks. */
static MP_INLINE int q_stride(int kind, int R) {
    return (q_is_wide(kind) ? Q_PREPARED_WIDE : Q_PREPARED) / R / 16 * 16;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Widen 32 n inputs. */
static MP_INLINE void q_widen(const int8_t *q, int n, int16_t *wide) {
    for (int i = 0; i < 32 * n; i += 4) {
        wide[i] = q[i];
        wide[i + 1] = q[i + 2];
        wide[i + 2] = q[i + 1];
        wide[i + 3] = q[i + 3];
    }
}

/* Prepare blocks [b0, b0 + n) of rows m ... m + R - 1. */
static MP_INLINE void q_prepare(int kind, int R, const mp_acts *x, int m, int b0, int n, q_rows *rows) {
    const int offset = q_offset(kind);
    for (int r = 0; r < R; r++) {
        const int32_t *sum = x->sum + (int64_t)(m + r) * (x->K / 16) + 2 * b0;
        const float *scale = x->scale + (int64_t)(m + r) * (x->K / 32) + b0;
        int32_t *start = rows->start + r * q_stride(kind, R);
        float *low = rows->low + r * q_stride(kind, R);
        if (q_is_wide(kind))
            q_widen(x->q + (m + r) * x->ldq + 32 * b0, n, rows->wide + 32 * r * q_stride(kind, R));
        if (q_is_centred(kind)) {
            Q_CENTRE(x->q + (m + r) * x->ldq + 32 * b0, 2 * n, start);
        } else if (q_is_halved(kind)) {
            if (offset)
                for (int h = 0; h < 2 * n; h++)
                    start[h] = -offset * sum[h];
            if (q_has_mins(kind))
                for (int b = 0; b < n; b++) {
                    low[2 * b] = scale[b] * (float)sum[2 * b];
                    low[2 * b + 1] = scale[b] * (float)sum[2 * b + 1];
                }
        } else if (offset) {
            for (int b = 0; b < n; b++)
                start[b] = -offset * (sum[2 * b] + sum[2 * b + 1]);
        }
    }
}

/* ---- integers of a block ----------------------------------------------------------------------------------------- */

/* True if prefetches are issued beside the loads, false if they are issued before each block. Prefetches beside the
 * loads make memory-bound tiles that read whole lines up to 10 % faster, and make taller, compute-bound tiles
 * slower. */
static MP_INLINE int q_beside(int R) { return R <= 4 && Q_VECTORS(R) * Q_LANES == MP_PANEL_N; }

/* Multiply weights of group g by R rows of a block, with q_dot_bytes if `bytes`, else with q_dot. */
static MP_INLINE void q_dots_row(int bytes, int g, int R, int U, const qi *w, const int8_t *q, int64_t ldq,
                                 q_part *part, qi *sum) {
    const int wide = Q_WIDE && bytes;
    q += (wide ? 8 : 4) * g;
    MP_UNROLL
    for (int r = 0; r < R; r++) {
        const qi a = q_spread(q + r * ldq), odd = wide ? q_spread(q + r * ldq + 4) : a;
        MP_UNROLL
        for (int u = 0; u < U; u++) {
            if (bytes)
                q_dot_bytes(&part[r * U + u], &sum[r * U + u], w[u], a, odd);
            else
                q_dot(&part[r * U + u], &sum[r * U + u], w[u], a);
        }
    }
}

/* Dot products between flushes. */
static MP_INLINE int q_flush_after(int kind) {
    if (kind == MP_W_Q6_K)
        return q_is_centred(kind) ? 4 : Q_FLUSH_Q6;
    if (q_is_iq(kind))
        return Q_FLUSH_Q7;
    if (q_is_coded(kind) && !q_is_fp4(kind))
        return 8;
    return q_is_nibbles(kind) ? Q_FLUSH_Q4 : Q_FLUSH_Q5;
}

static MP_INLINE void q_flush_all(int count, q_part *part, qi *sum) {
    MP_UNROLL
    for (int i = 0; i < count; i++)
        q_flush(&part[i], &sum[i]);
}

/* Dot products of `count` groups from g0 on, four or all eight. */
static MP_INLINE void q_dots(int kind, int g0, int count, int R, int U, qi table, const uint8_t *block, int u0,
                             int ahead, const int8_t *q, int64_t ldq, q_part *part, qi *sum) {
    const int bytes = kind == MP_W_Q8_0 || q_is_iq4(kind), most = bytes ? 0 : q_flush_after(kind);
    const int flush = most < count ? most : count;
    /* kinds with a group in each nibble: a line after the other */
    const int paired = count == 8 && kind != MP_W_Q8_0 && !(q_is_coded(kind) && q_code_bits(kind) < 4);
    MP_UNROLL
    for (int i = 0; i < count; i++) {
        const int g = paired ? i / 2 + i % 2 * 4 : g0 + i;
        qi w[4];
        MP_UNROLL
        for (int u = 0; u < U; u++)
            w[u] = q_weights(kind, g, block, u0 + u, table, q_beside(R), ahead);
        q_dots_row(bytes, g, R, U, w, q, ldq, part, sum);
        if (!bytes && (i + 1) % flush == 0)
            q_flush_all(R * U, part, sum);
    }
}

/* ---- one block into the float accumulators ----------------------------------------------------------------------- */

typedef struct q_at { /* the rows of a tile at the current block */
    const int8_t *q; /* with q_is_wide, of `rows` */
    const float *scale;
    int64_t ldq, ld_scale;
    int64_t low; /* distance of the factors of minima from the scales; a second pointer costs AVX2 3 % */
    const q_rows *rows;
    int entry; /* index into rows */
    int ahead; /* prefetch distance, bytes */
    const uint8_t *small; /* scales of the block in its head, for kinds that keep them there */
    qf d[4], dmin[4];     /* those of the superblock, if q_keeps_head */
    qi table;  /* for kinds that have a table */
} q_at;

static MP_INLINE void q_start(int kind, int R, int U, const q_at *at, int entry, q_part *part, qi *sum) {
    MP_UNROLL
    for (int r = 0; r < R; r++) {
        const qi start = q_offset(kind) ? q_set(at->rows->start[r * q_stride(kind, R) + entry]) : q_zero();
        MP_UNROLL
        for (int u = 0; u < U; u++) {
            sum[r * U + u] = q_is_centred(kind) ? q_zero() : start;
            part[r * U + u] = q_is_centred(kind) ? Q_PART_OF(start) : q_part_zero();
        }
    }
}

/* f = fma(i, d * sa, f). With minima also f = fma(low, factor, f), or -low if the format subtracts it. */
static MP_INLINE void q_accumulate(int kind, int R, int U, const qf *d, const qf *low, const q_at *at, int entry,
                                   const qi *sum, qf *f) {
    const int minus = q_head_bytes(kind) != 0;
    MP_UNROLL
    for (int r = 0; r < R; r++) {
        const qf sa = qf_spread(at->scale + r * at->ld_scale);
        MP_UNROLL
        for (int u = 0; u < U; u++)
            f[r * U + u] = qf_fma(q_to_float(sum[r * U + u]), qf_mul(d[u], sa), f[r * U + u]);
        if (low) {
            const qf factor = qf_spread(q_is_halved(kind) ? &at->rows->low[r * q_stride(kind, R) + entry]
                                                          : at->scale + at->low + r * at->ld_scale);
            MP_UNROLL
            for (int u = 0; u < U; u++)
                f[r * U + u] = minus ? qf_fnma(low[u], factor, f[r * U + u]) : qf_fma(low[u], factor, f[r * U + u]);
        }
    }
}

/* True if a tile keeps the d and dmin of a superblock in registers for all its blocks. With 16 registers, memory-bound
 * tiles would be slower. */
static MP_INLINE int q_keeps_head(int kind, int R) {
    return q_is_coded(kind) && q_head_bytes(kind) && (Q_KEEPS_HEAD || !q_beside(R));
}

static MP_INLINE void q_keep_head(int kind, int U, const uint8_t *head, int u0, q_at *at) {
    MP_UNROLL
    for (int u = 0; u < U; u++) {
        at->d[u] = q_head_d(kind, head, (u0 + u) * Q_LANES);
        if (q_has_mins(kind))
            at->dmin[u] = q_head_dmin(head, (u0 + u) * Q_LANES);
    }
}

/* Add one block to the float accumulators f. `head` is the head of the block's superblock, unused by kinds without
 * heads. */
static MP_INLINE void q_block(int kind, int R, int U, const uint8_t *head, const uint8_t *block, int u0,
                              const q_at *at, qf *f) {
    const int parts = q_is_halved(kind) ? 2 : 1, kept = q_keeps_head(kind, R);
    MP_UNROLL
    for (int h = 0; h < parts; h++) {
        q_part part[16];
        qi sum[16];
        qf d[4], low[4];
        q_start(kind, R, U, at, at->entry + h, part, sum);
        q_dots(kind, 4 * h, 8 / parts, R, U, at->table, block, u0, at->ahead, at->q, at->ldq, part, sum);
        q_scales(kind, h, U, head, block, at->small, u0, kept ? at->d : NULL, kept ? at->dmin : NULL, d, low);
        q_accumulate(kind, R, U, d, q_has_mins(kind) ? low : NULL, at, at->entry + h, sum, f);
    }
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

static MP_INLINE void q_prefetch(const uint8_t *from, int bytes) {
    for (int i = 0; i < bytes; i += 64)
        __builtin_prefetch(from + i, 0, Q_NEAR);
}

/* Compute rows m ... m + R - 1 by the outputs of vectors u0 ... u0 + U - 1 of a panel. out [R, ld] points at output 0
 * of the panel. `ahead` is the prefetch distance of the panel in bytes; 0: the panel is in cache. */
static MP_INLINE void q_tile_vectors(int kind, int R, int U, const uint8_t *panel, int u0, const mp_acts *x, int m,
                                     int ahead, q_rows *rows, float *out, int64_t ld) {
    const int blocks = x->K / 32, bytes = q_block_bytes(kind), head_bytes = q_head_bytes(kind);
    const int integers = q_integers(kind), entries = q_is_halved(kind) ? 2 : 1, chunk = q_stride(kind, R) / entries;
    const uint8_t *block = panel + (q_has_table(kind) ? MP_PACK_LINE : 0), *head = block;
    q_at at = {.q = x->q + m * x->ldq, .scale = x->scale + m * (int64_t)blocks, .low = x->low - x->scale,
               .ldq = q_is_wide(kind) ? 64 * q_stride(kind, R) : x->ldq, .ld_scale = blocks, .rows = rows,
               .ahead = ahead};
    if (q_has_table(kind))
        at.table = q_table(panel);
    qf f[16];
    MP_UNROLL
    for (int i = 0; i < R * U; i++)
        f[i] = qf_zero();
    for (int b0 = 0; b0 < blocks; b0 += chunk) {
        const int n = blocks - b0 < chunk ? blocks - b0 : chunk;
        if (rows->row != m) {
            q_prepare(kind, R, x, m, b0, n, rows);
            rows->row = n == blocks ? m : -1;
        }
        if (q_is_wide(kind))
            at.q = (const int8_t *)rows->wide;
        for (int b = 0; b < n; b++) {
            if (head_bytes && b % 8 == 0) {
                head = block;
                block += head_bytes;
                q_prefetch(head + ahead, head_bytes);
                if (q_keeps_head(kind, R))
                    q_keep_head(kind, U, head, u0, &at);
            }
            if (q_beside(R))
                q_prefetch(block + integers + ahead, bytes - integers);
            else if (ahead)
                q_prefetch(block + ahead, bytes);
            at.entry = b * entries;
            at.small = head + MP_PACK_HALVES + b % 8 * MP_PACK_SMALL;
            q_block(kind, R, U, head, block, u0, &at, f);
            block += bytes;
            at.q += q_is_wide(kind) ? 64 : 32;
            at.scale++;
        }
    }
    MP_UNROLL
    for (int i = 0; i < R * U; i++)
        qf_store(out + (i / U) * ld + (u0 + i % U) * Q_LANES, f[i]);
}

typedef void q_tile(const uint8_t *panel, const mp_acts *x, int m, int ahead, q_rows *rows, float *out, int64_t ld);

#define Q_TILE(name, kind, R)                                                                                        \
    static MP_NOINLINE void q_##name##_##R(const uint8_t *panel, const mp_acts *x, int m, int ahead, q_rows *rows,   \
                                           float *out, int64_t ld) {                                                 \
        for (int u = 0; u < MP_PANEL_N / Q_LANES; u += Q_VECTORS(R))                                                 \
            q_tile_vectors(kind, R, Q_VECTORS(R), panel, u, x, m, u == 0 ? ahead : 0, rows, out, ld);                \
    }
#define Q_TILES_4(name, kind) Q_TILE(name, kind, 1) Q_TILE(name, kind, 2) Q_TILE(name, kind, 3) Q_TILE(name, kind, 4)
#define Q_TILES_8(name, kind)                                                                                        \
    Q_TILES_4(name, kind)                                                                                            \
    Q_TILE(name, kind, 5) Q_TILE(name, kind, 6) Q_TILE(name, kind, 7) Q_TILE(name, kind, 8)
#define Q_LIST_4(name) NULL, q_##name##_1, q_##name##_2, q_##name##_3, q_##name##_4
#define Q_LIST_8(name) Q_LIST_4(name), q_##name##_5, q_##name##_6, q_##name##_7, q_##name##_8
#define Q_PASTE(a, rows)     a##rows
#define Q_OF(a, rows)        Q_PASTE(a, rows)
#define Q_TILES(name, kind)  Q_OF(Q_TILES_, Q_ROWS)(name, kind)
#define Q_LIGHT(name, kind)  Q_OF(Q_TILES_, Q_LIGHT_ROWS)(name, kind)
Q_LIGHT(q4_0, MP_W_Q4_0)
Q_LIGHT(q4_1, MP_W_Q4_1)
Q_TILES(q5_0, MP_W_Q5_0)
Q_TILES(q5_1, MP_W_Q5_1)
Q_LIGHT(q8_0, MP_W_Q8_0)
Q_LIGHT(q4_k, MP_W_Q4_K)
Q_TILES(q5_k, MP_W_Q5_K)
Q_TILES(q6_k, MP_W_Q6_K)
Q_TILES(q2_k, MP_W_Q2_K)
Q_TILES(q3_k, MP_W_Q3_K)
Q_LIGHT(tq, MP_W_TQ)
Q_LIGHT(iq2_xxs, MP_W_IQ2_XXS)
Q_TILES(iq2_xs, MP_W_IQ2_XS)
Q_LIGHT(iq3, MP_W_IQ3)
Q_LIGHT(iq4_nl, MP_W_IQ4_NL)
Q_LIGHT(iq4_xs, MP_W_IQ4_XS)
Q_LIGHT(mxfp4, MP_W_MXFP4)
Q_TILES(nvfp4, MP_W_NVFP4)
#undef Q_TILE

/* ---- gemm -------------------------------------------------------------------------------------------------------- */

/* Measured: compared with Q_AHEAD, Q_AHEAD_MORE is 10 % faster for 3 rows or more and 6 % slower for 1 row. A distance
 * of 2 KiB is 33 % slower for 4 rows. */
enum {
    Q_AHEAD = 8192,        /* prefetch distance in bytes for two rows, and on most CPUs for one */
    Q_AHEAD_MORE = 12288,  /* prefetch distance in bytes for more rows */
    Q_ACTS_BYTES = 393216, /* bytes of activations that stay in L2 during a pass over the panels */
    Q_PANELS_BYTES = 262144, /* bytes of panels that a tile of rows is multiplied with before the next tile of rows */
};

/* Rows of the next tile when `left` rows remain. If `few`, all rows form one tile: a tile computes while it reads the
 * panel from memory, and a second tile would start to compute only after that. Many rows are cut into nearly equal
 * tiles: with tiles of at most 6 rows, 8 rows are cut into 4 + 4, not 6 + 2. */
static int q_tile_rows(int left, int tall, bool few) {
    if (few)
        return left;
    const int tiles = (left + tall - 1) / tall;
    return (left + tiles - 1) / tiles;
}

/* Store a finished tile of full width to y with bias and residual. Gives the bits of mp_epilogue_apply, which q_gemm
 * calls if there is an activation function. Faster: it uses the vectors of this file and reads the tile only once. */
static void q_finish(const mp_epilogue *ep, int R, int m, int n0, const float *tile, float *out, int64_t ldy) {
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < MP_PANEL_N; c += Q_LANES) {
            qf sum = qf_load(tile + r * MP_PANEL_N + c);
            if (ep->bias)
                sum = qf_add(sum, qf_load(ep->bias + n0 + c));
            if (ep->residual)
                sum = qf_add(sum, qf_load(ep->residual + (m + r) * ep->ld_residual + n0 + c));
            qf_store(out + r * ldy + c, sum);
        }
    }
}

/* Compute rows m ... m + R - 1 of a panel. */
static MP_INLINE void q_panel(q_tile *tile, const mp_wmat *w, const mp_acts *x, int m, int R, int p, int ahead,
                              q_rows *rows, const mp_epilogue *ep, float *y, int64_t ldy) {
    _Alignas(64) float scratch[Q_ROWS * MP_PANEL_N];
    const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
    const int n0 = p * MP_PANEL_N, n1 = w->N - n0 < MP_PANEL_N ? w->N : n0 + MP_PANEL_N;
    float *out = y + (int64_t)m * ldy + n0;
    if (!ep && n1 - n0 == MP_PANEL_N) {
        tile(panel, x, m, ahead, rows, out, ldy);
        return;
    }
    tile(panel, x, m, ahead, rows, scratch, MP_PANEL_N);
    if (n1 - n0 == MP_PANEL_N && ep->act == MP_ACT_NONE) {
        q_finish(ep, R, m, n0, scratch, out, ldy);
        return;
    }
    mp_epilogue_apply(ep, m, m + R, n0, n1, scratch, MP_PANEL_N);
    for (int r = 0; r < R; r++)
        memcpy(out + r * ldy, scratch + r * MP_PANEL_N, (size_t)(n1 - n0) * sizeof *out);
}

static void q_gemm(q_tile *const *tiles, int most, const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0,
                   int panel1, const mp_epilogue *ep, float *y, int64_t ldy) {
    _Alignas(64) q_rows rows;
    rows.row = -1;
    assert(x->kind == MP_A_Q8 && x->K == w->K && 0 <= m0 && m1 <= x->M && 0 <= panel0 && panel1 <= w->panels);
    const bool few = m1 - m0 <= most; /* most: rows of the tallest tile */
    const int tall = most < Q_TALL ? most : Q_TALL;
    int pass = Q_ACTS_BYTES / w->K / tall * tall;
    if (pass < 8 * tall)
        pass = 8 * tall;
    int group = Q_PANELS_BYTES / (int)w->panel_bytes;
    group = group < 1 ? 1 : group;
    const int distance = m1 - m0 == 1 ? Q_AHEAD_ONE : m1 - m0 == 2 ? Q_AHEAD : Q_AHEAD_MORE;
    for (int begin = m0; begin < m1; begin += pass) {
        const int end = m1 - begin < pass ? m1 : begin + pass;
        for (int p = panel0; p < panel1; p += group) {
            int ahead = distance; /* the panels are in cache after their first tile */
            const int past = panel1 - p < group ? panel1 : p + group;
            for (int m = begin; m < end; ahead = 0) {
                const int R = q_tile_rows(end - m, tall, few);
                for (int at = p; at < past; at++)
                    q_panel(tiles[R], w, x, m, R, at, ahead, &rows, ep, y, ldy);
                m += R;
            }
        }
    }
}

#define Q_GEMM(name, rows)                                                                                           \
    static void gemm_##name(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,              \
                            const mp_epilogue *ep, float *y, int64_t ldy) {                                          \
        static q_tile *const tiles[] = {Q_OF(Q_LIST_, rows)(name)};                                                  \
        q_gemm(tiles, rows, w, x, m0, m1, panel0, panel1, ep, y, ldy);                                               \
    }
Q_GEMM(q4_0, Q_LIGHT_ROWS)
Q_GEMM(q4_1, Q_LIGHT_ROWS)
Q_GEMM(q5_0, Q_ROWS)
Q_GEMM(q5_1, Q_ROWS)
Q_GEMM(q8_0, Q_LIGHT_ROWS)
Q_GEMM(q4_k, Q_LIGHT_ROWS)
Q_GEMM(q5_k, Q_ROWS)
Q_GEMM(q6_k, Q_ROWS)
Q_GEMM(q2_k, Q_ROWS)
Q_GEMM(q3_k, Q_ROWS)
Q_GEMM(tq, Q_LIGHT_ROWS)
Q_GEMM(iq2_xxs, Q_LIGHT_ROWS)
Q_GEMM(iq2_xs, Q_ROWS)
Q_GEMM(iq3, Q_LIGHT_ROWS)
Q_GEMM(iq4_nl, Q_LIGHT_ROWS)
Q_GEMM(iq4_xs, Q_LIGHT_ROWS)
Q_GEMM(mxfp4, Q_LIGHT_ROWS)
Q_GEMM(nvfp4, Q_ROWS)
#undef Q_GEMM

static void q_set_gemms(mp_kernel_table *table, const char *variant) {
    MP_SET(table, gemm_q4_0, gemm_q4_0, variant);
    MP_SET(table, gemm_q4_1, gemm_q4_1, variant);
    MP_SET(table, gemm_q5_0, gemm_q5_0, variant);
    MP_SET(table, gemm_q5_1, gemm_q5_1, variant);
    MP_SET(table, gemm_q8_0, gemm_q8_0, variant);
    MP_SET(table, gemm_q4_k, gemm_q4_k, variant);
    MP_SET(table, gemm_q5_k, gemm_q5_k, variant);
    MP_SET(table, gemm_q6_k, gemm_q6_k, variant);
    MP_SET(table, gemm_q2_k, gemm_q2_k, variant);
    MP_SET(table, gemm_q3_k, gemm_q3_k, variant);
    MP_SET(table, gemm_tq, gemm_tq, variant);
    MP_SET(table, gemm_iq2_xxs, gemm_iq2_xxs, variant);
    MP_SET(table, gemm_iq2_xs, gemm_iq2_xs, variant);
    MP_SET(table, gemm_iq3, gemm_iq3, variant);
    MP_SET(table, gemm_iq4_nl, gemm_iq4_nl, variant);
    MP_SET(table, gemm_iq4_xs, gemm_iq4_xs, variant);
    MP_SET(table, gemm_mxfp4, gemm_mxfp4, variant);
    MP_SET(table, gemm_nvfp4, gemm_nvfp4, variant);
}
