/* quant_kinds.h: the kinds of quantised weights over the vectors of one instruction set: sizes, codes and scales.
 *
 * Include it inside a target region, with the vectors that quant_tmpl.h names (q_load ... qf_i8), Q_LANES, Q_NEAR and
 * Q_BYTES_OFFSET. pack.h describes the layouts. */
#include "kernels/pack.h"

/* ---- properties of a kind ---------------------------------------------------------------------------------------- */

static MP_INLINE int q_is_nibbles(int kind) { return kind == MP_W_Q4_0 || kind == MP_W_Q4_1 || kind == MP_W_Q4_K; }
static MP_INLINE int q_is_fives(int kind) { return kind == MP_W_Q5_0 || kind == MP_W_Q5_1 || kind == MP_W_Q5_K; }
static MP_INLINE int q_is_super(int kind) { return kind == MP_W_Q4_K || kind == MP_W_Q5_K; }
/* Kinds that q_code unpacks. Codes index a table of values: of bytes (IQ4), from 0 to 24 (FP4), or from 0 to
 * 127 (IQ), after an offset. The codes of the others (Q2_K, Q3_K, TQ) are the values, after an offset. */
static MP_INLINE int q_is_iq4(int kind) { return kind == MP_W_IQ4_NL || kind == MP_W_IQ4_XS; }
static MP_INLINE int q_is_fp4(int kind) { return kind == MP_W_MXFP4 || kind == MP_W_NVFP4; }
static MP_INLINE int q_is_iq(int kind) { return kind == MP_W_IQ2_XXS || kind == MP_W_IQ2_XS || kind == MP_W_IQ3; }
static MP_INLINE int q_has_table(int kind) { return q_is_iq4(kind) || q_is_fp4(kind) || q_is_iq(kind); }
static MP_INLINE int q_is_coded(int kind) {
    return q_has_table(kind) || kind == MP_W_Q2_K || kind == MP_W_Q3_K || kind == MP_W_TQ;
}
static MP_INLINE int q_code_bits(int kind) {
    if (kind == MP_W_Q2_K || kind == MP_W_TQ)
        return 2;
    return kind == MP_W_Q3_K || kind == MP_W_IQ2_XXS || kind == MP_W_IQ2_XS ? 3 : 4;
}
static MP_INLINE int q_is_halved(int kind) { /* groups of 16 */
    return kind == MP_W_Q2_K || kind == MP_W_Q3_K || kind == MP_W_Q6_K || kind == MP_W_IQ2_XS || kind == MP_W_NVFP4;
}
static MP_INLINE int q_has_mins(int kind) {
    return kind == MP_W_Q4_1 || kind == MP_W_Q5_1 || q_is_super(kind) || kind == MP_W_Q2_K;
}

static MP_INLINE int q_offset(int kind) {
    switch (kind) {
    case MP_W_TQ: return 1;
    case MP_W_Q3_K: return 4;
    case MP_W_Q4_0: return 8;
    case MP_W_Q5_0: return 16;
    case MP_W_Q6_K: return 32;
    case MP_W_IQ2_XXS:
    case MP_W_IQ2_XS:
    case MP_W_IQ3: return MP_PACK_IQ_OFFSET;
    case MP_W_MXFP4:
    case MP_W_NVFP4: return MP_PACK_FP4_OFFSET;
    case MP_W_Q8_0:
    case MP_W_IQ4_NL:
    case MP_W_IQ4_XS: return Q_BYTES_OFFSET;
    default: return 0;
    }
}

/* Bytes of a block's integers; its scales follow them. */
static MP_INLINE int q_integers(int kind) {
    if (q_is_coded(kind))
        return q_code_bits(kind) * MP_PACK_STEP;
    if (q_is_nibbles(kind))
        return MP_PACK_NIBBLES;
    if (q_is_fives(kind))
        return MP_PACK_BITS + MP_PACK_NIBBLES;
    return kind == MP_W_Q6_K ? 2 * MP_PACK_PAIRS + MP_PACK_NIBBLES : MP_PACK_BYTES;
}

static MP_INLINE int q_block_bytes(int kind) {
    const int integers = q_integers(kind);
    if (q_is_iq(kind) || kind == MP_W_TQ || kind == MP_W_IQ4_XS)
        return integers;
    if (kind == MP_W_NVFP4 || (q_has_mins(kind) && !q_is_halved(kind) && !q_is_super(kind)))
        return integers + 2 * MP_PACK_HALVES;
    return integers + (q_is_halved(kind) || q_is_super(kind) ? 2 * MP_PACK_SMALL : MP_PACK_HALVES);
}

static MP_INLINE int q_head_bytes(int kind) {
    if (q_is_iq(kind) || kind == MP_W_IQ4_XS)
        return MP_PACK_HALVES + 8 * MP_PACK_SMALL;
    if (q_is_super(kind) || kind == MP_W_Q2_K)
        return 2 * MP_PACK_HALVES;
    return kind == MP_W_Q3_K || kind == MP_W_Q6_K || kind == MP_W_TQ ? MP_PACK_HALVES : 0;
}

/* ---- integers of a block ----------------------------------------------------------------------------------------- */

/* Load lane j of a part for the outputs of vector u. If `prefetch`, prefetch the line `ahead` bytes further. */
static MP_INLINE qi q_take(const uint8_t *part, int u, int j, int prefetch, int ahead) {
    const uint8_t *from = part + j * MP_PACK_STEP + u * Q_LANES * 4;
    if (prefetch && u * Q_LANES % 16 == 0)
        __builtin_prefetch(from + ahead, 0, Q_NEAR);
    return q_load(from);
}

/* Move bit `at` of every byte to bit 4. The caller must mask the result: its other bits may come from a neighbouring
 * byte. */
static MP_INLINE qi q_to_bit4(qi x, int at) { return at < 4 ? q_shl(x, 4 - at) : at > 4 ? q_shr(x, at - 4) : x; }

/* The codes of group g for the outputs of vector u, one per byte. */
static MP_INLINE qi q_code(int bits, int g, const uint8_t *block, int u, int prefetch, int ahead) {
    if (bits == 2) {
        const qi x = q_take(block, u, g / 4, prefetch && g % 4 == 0, ahead);
        return q_and(g % 4 ? q_shr(x, g % 4 * 2) : x, q_set(0x03030303));
    }
    if (bits == 4) {
        const qi x = q_take(block, u, g % 4, prefetch && g < 4, ahead);
        return q_and(g < 4 ? x : q_shr(x, 4), q_set(0x0f0f0f0f));
    }
    const qi mask = q_set(0x07070707);
    if (g < 6) {
        const qi x = q_take(block, u, g / 2, prefetch && g % 2 == 0, ahead);
        return q_and(g % 2 ? q_shr(x, 4) : x, mask);
    }
    /* low nibbles: group 6, high nibbles: group 7 */
    qi both = q_and(q_shr(q_take(block, u, 0, 0, 0), 3), q_set(0x11111111));
    both = q_or_and(both, q_shr(q_take(block, u, 1, 0, 0), 2), q_set(0x22222222));
    both = q_or_and(both, q_shr(q_take(block, u, 2, 0, 0), 1), q_set(0x44444444));
    return q_and(g == 6 ? both : q_shr(both, 4), mask);
}

/* The unsigned weights of group g for the outputs of vector u: values plus the kind's offset, which for `bytes` and the
 * table of IQ4 is 128. table: for kinds that have one. */
static MP_INLINE qi q_weights(int kind, int g, const uint8_t *block, int u, qi table, int prefetch, int ahead) {
    if (kind == MP_W_Q8_0)
        return q_take(block, u, g, prefetch, ahead);
    if (q_is_coded(kind)) {
        const qi code = q_code(q_code_bits(kind), g, block, u, prefetch, ahead);
        return q_has_table(kind) ? q_lookup(table, code) : code;
    }
    if (kind == MP_W_Q6_K) {
        const uint8_t *two = g < 4 ? block : block + MP_PACK_PAIRS + MP_PACK_NIBBLES;
        const qi low = q_code(4, g, block + MP_PACK_PAIRS, u, prefetch, ahead);
        const qi pairs = q_take(two, u, 0, prefetch && g % 4 == 0, ahead);
        return q_or_and(low, q_to_bit4(pairs, g % 4 * 2), q_set(0x30303030));
    }
    if (!q_is_fives(kind))
        return q_code(4, g, block, u, prefetch, ahead);
    const qi low = q_code(4, g, block + MP_PACK_BITS, u, prefetch, ahead);
    return q_or_and(low, q_to_bit4(q_take(block, u, 0, prefetch && g == 0, ahead), g), q_set(0x10101010));
}

/* ---- scales ------------------------------------------------------------------------------------------------------ */

/* Returns the d of a superblock. For IQ types, the result includes the unit of their scales. */
static MP_INLINE qf q_head_d(int kind, const uint8_t *head, int o) {
    const float unit = kind == MP_W_IQ2_XS ? 0.25f : 0.125f;
    return q_is_iq(kind) ? qf_mul(qf_halves(head + 2 * o), qf_spread(&unit)) : qf_halves(head + 2 * o);
}

static MP_INLINE qf q_head_dmin(const uint8_t *head, int o) { return qf_halves(head + MP_PACK_HALVES + 2 * o); }

/* The scales d for U vectors of outputs from u0 on: of inputs 16 h ... 16 h + 15 (q_is_halved), or of the whole block
 * (h = 0). low: the minima, if the kind has them, as stored: in superblocks they are subtracted, else added. small: the
 * block's scales in its head, for kinds that keep them there. kept_d and kept_dmin: those of the head, or NULL. */
static MP_INLINE void q_scales(int kind, int h, int U, const uint8_t *head, const uint8_t *block, const uint8_t *small,
                               int u0, const qf *kept_d, const qf *kept_dmin, qf *d, qf *low) {
    const uint8_t *scales = block + q_integers(kind);
    const float half = 0.5f;
    MP_UNROLL
    for (int u = 0; u < U; u++) {
        const int o = (u0 + u) * Q_LANES;
        if (kind == MP_W_MXFP4) {
            d[u] = qf_bf16(scales + 2 * o);
        } else if (kind == MP_W_NVFP4) {
            d[u] = qf_halves(scales + h * MP_PACK_HALVES + 2 * o);
        } else if (q_head_bytes(kind) == 0) {
            d[u] = qf_halves(scales + 2 * o);
            if (q_has_mins(kind))
                low[u] = qf_halves(scales + MP_PACK_HALVES + 2 * o);
        } else {
            d[u] = kept_d ? kept_d[u] : q_head_d(kind, head, o);
            if (q_is_super(kind)) {
                d[u] = qf_mul(d[u], q_to_float(q_u8(scales + o)));
                low[u] = qf_mul(q_head_dmin(head, o), q_to_float(q_u8(scales + MP_PACK_SMALL + o)));
            } else if (kind == MP_W_Q2_K) {
                const qi both = q_u8(scales + h * MP_PACK_SMALL + o);
                d[u] = qf_mul(d[u], q_to_float(q_and(both, q_set(15))));
                low[u] = qf_mul(kept_dmin ? kept_dmin[u] : q_head_dmin(head, o), q_to_float(q_shr(both, 4)));
            } else if (kind == MP_W_IQ2_XS) {
                const qi sc = q_u8(small + o), n = h ? q_shr(sc, 4) : q_and(sc, q_set(15));
                d[u] = qf_mul(d[u], qf_add(q_to_float(n), qf_spread(&half)));
            } else if (q_is_halved(kind)) {
                d[u] = qf_mul(d[u], qf_i8(scales + h * MP_PACK_SMALL + o));
            } else if (kind == MP_W_IQ4_XS) {
                d[u] = qf_mul(d[u], qf_i8(small + o));
            } else if (q_is_iq(kind)) {
                d[u] = qf_mul(d[u], q_to_float(q_u8(small + o)));
            }
        }
    }
}
