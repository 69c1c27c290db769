/* attention_scratch.h: layout of the scratch of attn_full, mp_attn_full_i16, attn_kv, attn_kv_i16 and attn_kv_i8
 * (internal to kernels/).
 *
 * attn_full | K by columns, panels of 32 keys [panels][D][32] | V [T up to 32][D up to 16] | scores [rows][T up to 32]
 *           | sums of values [rows][D up to 16]
 * attn_full_bf16 | panels of K | panels of V | scores [rows][T up to 32] | p [rows][p_ld] | q [rows][D up to 32]
 * mp_attn_full_i16 | blocks of K | blocks of V | pointers to K | pointers to V | q [64][D up to 2] | m, l [64] each
 *                  | o [64][D up to 16] | scratch of attn_kv
 * attn_kv   | a partial's o [64][v_dim] | p [64][64] | m, l, a, b [64] each
 * attn_kv_i16, attn_kv_i8 | s [64][64] | p int16 [64][64] | tile [6][v_dim] | m, l, by, a, b [64] each
 *
 * "T up to 32" means T rounded up to a multiple of 32. Every part is a multiple of 64 bytes. */
#ifndef MP_KERNELS_ATTENTION_SCRATCH_H
#define MP_KERNELS_ATTENTION_SCRATCH_H

#include <stddef.h>

#include "kernels/kernels.h"
#include "kernels/pack_dense.h"

enum {
    MP_ATTN_PANEL = 32,         /* keys in a panel of K */
    MP_ATTN_FULL_ROWS = 48,   /* rows whose scores are kept at a time: a multiple of the tile heights 6 and 8. Every
                               * pass over K and V serves all of them; their scores may exceed L2 */
    MP_ATTN_VALUES = 8 * 1024, /* floats of values that fit L1 */
    MP_ATTN_VALUES_IN_L2 = 64 * 1024, /* floats of values that every tile of rows can read from L2 */
};

static inline int mp_round_up(int n, int step) { return (n + step - 1) / step * step; }

typedef struct mp_attn_full_layout {
    int keys;                /* T rounded up to a panel */
    int v_ld;                /* D rounded up to 16 */
    int values;              /* keys whose values are multiplied by all rows before those of the following keys */
    size_t v, scores, sums, bytes; /* offsets in bytes; K is at 0 */
} mp_attn_full_layout;

static inline mp_attn_full_layout mp_attn_full_plan(int T, int D) {
    mp_attn_full_layout p;
    p.keys = mp_round_up(T, MP_ATTN_PANEL);
    p.v_ld = mp_round_up(D, 16);
    p.v = sizeof(float) * (size_t)p.keys * (size_t)D;
    p.scores = p.v + sizeof(float) * (size_t)p.keys * (size_t)p.v_ld;
    p.sums = p.scores + sizeof(float) * (size_t)p.keys * MP_ATTN_FULL_ROWS;
    p.bytes = p.sums + sizeof(float) * (size_t)p.v_ld * MP_ATTN_FULL_ROWS;
    p.values = MP_ATTN_VALUES / p.v_ld / MP_ATTN_PANEL * MP_ATTN_PANEL;
    if (p.values < MP_ATTN_PANEL)
        p.values = MP_ATTN_PANEL;
    if ((size_t)p.keys * (size_t)p.v_ld <= MP_ATTN_VALUES_IN_L2)
        p.values = p.keys;
    return p;
}

enum { MP_ATTN_BF16_ROWS = 32 }; /* rows whose scores are kept at a time: one block of x86/amx_dense.c */

typedef struct mp_attn_bf16_layout {
    int keys, depth, p_ld;                           /* T, D rounded up to 32; row stride of p (no multiple of 1,024) */
    size_t k_panel, v_panel, v, scores, p, q, bytes; /* bytes per panel of K and V; byte offsets (K is at 0) */
} mp_attn_bf16_layout;

static inline mp_attn_bf16_layout mp_attn_bf16_plan(int T, int D) {
    mp_attn_bf16_layout s;
    s.keys = mp_round_up(T, 32);
    s.depth = mp_round_up(D, 32);
    s.p_ld = s.keys + (s.keys % 1024 == 0 ? 32 : 0);
    s.k_panel = mp_pack_dense_panel_bytes(MP_W_BF16, D);
    s.v_panel = mp_pack_dense_panel_bytes(MP_W_BF16, T);
    s.v = s.k_panel * (size_t)(s.keys / MP_PANEL_N);
    s.scores = s.v + s.v_panel * (size_t)(s.depth / MP_PANEL_N);
    s.p = s.scores + sizeof(float) * MP_ATTN_BF16_ROWS * (size_t)s.keys;
    s.q = s.p + sizeof(uint16_t) * MP_ATTN_BF16_ROWS * (size_t)s.p_ld;
    s.bytes = s.q + sizeof(uint16_t) * MP_ATTN_BF16_ROWS * (size_t)s.depth + MP_WMAT_SLACK;
    return s;
}

typedef struct mp_attn_kv_layout {
    size_t p, m, l, a, b, bytes; /* offsets in bytes; o is at 0 */
} mp_attn_kv_layout;

static inline mp_attn_kv_layout mp_attn_kv_plan(int v_dim) {
    const size_t row = sizeof(float) * MP_ATTN_ROWS;
    mp_attn_kv_layout s;
    s.p = row * (size_t)v_dim;
    s.m = s.p + row * MP_KV_BLOCK;
    s.l = s.m + row;
    s.a = s.l + row;
    s.b = s.a + row;
    s.bytes = s.b + row;
    return s;
}

typedef struct mp_attn_i16_layout {
    size_t p, tile, m, l, by, a, b, bytes; /* offsets in bytes; s is at 0 */
} mp_attn_i16_layout;

static inline mp_attn_i16_layout mp_attn_i16_plan(int v_dim) {
    const size_t row = sizeof(float) * MP_ATTN_ROWS;
    mp_attn_i16_layout s;
    s.p = row * MP_KV_BLOCK;
    s.tile = s.p + sizeof(int16_t) * MP_ATTN_ROWS * MP_KV_BLOCK;
    s.m = s.tile + sizeof(float) * 6 * (size_t)v_dim;
    s.l = s.m + row;
    s.by = s.l + row;
    s.a = s.by + row;
    s.b = s.a + row;
    s.bytes = s.b + row;
    return s;
}

typedef struct mp_attn_full_i16_layout {
    int blocks, k_dim, v_dim;
    size_t k_bytes, v_bytes;                               /* bytes of a block of K, of V */
    size_t v, k_list, v_list, queries, m, l, o, kv, bytes; /* offsets in bytes; blocks of K are at 0 */
} mp_attn_full_i16_layout;

static inline mp_attn_full_i16_layout mp_attn_full_i16_plan(int T, int D) {
    mp_attn_full_i16_layout s;
    const size_t row = sizeof(float) * MP_ATTN_ROWS;
    s.blocks = (T + MP_KV_BLOCK - 1) / MP_KV_BLOCK;
    s.k_dim = mp_round_up(D, 2);
    s.v_dim = mp_kv_width(D);
    s.k_bytes = mp_kv_bytes(MP_I16, s.k_dim);
    s.v_bytes = mp_kv_bytes(MP_I16, s.v_dim);
    const size_t list = sizeof(void *) * (size_t)mp_round_up(s.blocks, 64 / (int)sizeof(void *));
    s.v = s.k_bytes * (size_t)s.blocks;
    s.k_list = s.v + s.v_bytes * (size_t)s.blocks;
    s.v_list = s.k_list + list;
    s.queries = s.v_list + list;
    s.m = s.queries + row * (size_t)s.k_dim;
    s.l = s.m + row;
    s.o = s.l + row;
    s.kv = s.o + row * (size_t)s.v_dim;
    s.bytes = s.kv + mp_attn_kv_scratch(s.v_dim);
    return s;
}

#endif
