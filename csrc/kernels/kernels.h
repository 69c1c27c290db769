/* kernels.h: the arithmetic of mpool, one table of functions per instruction set.
 *
 * Numeric contract of every variant of every slot:
 *   - An output depends only on its own inputs, not on the number of rows, the tile shape, the layout, the thread or
 *     the split of rows over calls. Threads split outputs, never the inner dimension.
 *   - GEMM: one fp32 FMA accumulator per output, K ascending. In F32 the chain is cut every MP_K_CHUNK inputs: the
 *     chain of a k-chunk starts at +0, and chunk sums are added in ascending order (the first is taken as it is).
 *   - Quantised GEMM: activations are quantised per row in blocks of 32 (per whole row for W_I8). The dot product of a
 *     block is exact in int32. One FMA per block (formulas below) adds it to the single accumulator, blocks ascending.
 *   - Reductions over a row (norms, softmax, dot) use one fixed tree of 16 lanes. Lane l sums elements l, l+16, ... in
 *     ascending order. Lanes are then added at distances 8, 4, 2, 1 (l += l+8; l += l+4; ...). max is order-free.
 *   - The code is compiled with -ffp-contract=off and writes FMAs explicitly. exp, tanh and GELU use polynomials of
 *     our own (math_const.h), the same in every variant.
 * Therefore all variants, on x86-64 and ARM, give the same bits for every slot except the bf16 ones. The bf16
 * instructions of each set round differently, so bf16 results are reproducible per instruction set only.
 *
 * Kernels return void, assert their preconditions, never allocate, and are thread-safe. Row strides are in elements.
 * Pointers need no alignment and outputs must not overlap inputs, unless a comment says otherwise.
 *
 * Letters: M rows (tokens), N outputs, K inputs, H heads, D head size, T keys. */
#ifndef MP_KERNELS_KERNELS_H
#define MP_KERNELS_KERNELS_H

#include "tensor/tensor.h"

enum {
    MP_K_CHUNK = 384,   /* inputs in one fp32 chain */
    MP_KV_BLOCK = 64,   /* tokens in one KV block */
    MP_ATTN_ROWS = 64,  /* maximum of rows * group (mp_attn_kv) in one attention call */
    MP_I8_MAX_INPUTS = 16384, /* maximum K of W_I8: one row fits the stack, and its dot product fits int32 */
};

/* ---- weight matrices --------------------------------------------------------------------------------------------- */

typedef enum mp_wkind { /* packed layouts; pack.h and pack_dense.h describe each */
    MP_W_F32,    /* from any dtype, dequantised */
    MP_W_BF16,   /* from any dtype, rounded to nearest even; a BF16 source is copied exactly */
    MP_W_I8,     /* from any float dtype: rotated (hadamard), then symmetric int8 per output row, scale = max|w| / 127.
                  * The int8 compute type of encoders uses it. */
    MP_W_Q4_0,
    MP_W_Q4_1,
    MP_W_Q5_0,
    MP_W_Q5_1,
    MP_W_Q8_0,
    MP_W_Q4_K,
    MP_W_Q5_K,
    MP_W_Q6_K,
    MP_W_Q2_K,
    MP_W_Q3_K,
    MP_W_TQ,      /* TQ1_0, TQ2_0: 2-bit codes, one scale per 256 inputs */
    MP_W_IQ2_XXS, /* IQ2_XXS, IQ1_S: 3-bit codes that index a table of int8 values, one scale per 32 inputs */
    MP_W_IQ2_XS,  /* IQ2_XS, IQ2_S, IQ1_M: as IQ2_XXS, one scale per 16 inputs */
    MP_W_IQ3,     /* IQ3_XXS, IQ3_S: as IQ2_XXS with 4-bit codes */
    MP_W_IQ4_NL,
    MP_W_IQ4_XS,
    MP_W_MXFP4,
    MP_W_NVFP4,
    MP_W_KIND_COUNT
} mp_wkind;

typedef enum mp_akind { /* activation format that a kind of weights requires */
    MP_A_F32,
    MP_A_BF16,
    MP_A_Q8, /* int8 per block of 32 */
    MP_A_I8, /* int8 per row */
} mp_akind;

typedef enum mp_compute { MP_COMPUTE_AUTO, MP_COMPUTE_F32, MP_COMPUTE_BF16, MP_COMPUTE_I8 } mp_compute;

/* y[m, n] = sum_k x[m, k] * w[n, k]. Packing permutes quantised values and never requantises them. A panel holds
 * MP_PANEL_N outputs. Their weights of the same input are interleaved, so that each vector lane computes one output.
 * The last panel is padded with zeros. The caller owns `data`: 64-byte aligned, mp_wmat_bytes() long, followed by
 * MP_WMAT_SLACK bytes that kernels may read but whose values do not affect the result. */
enum { MP_PANEL_N = 32, MP_WMAT_SLACK = 16384 };

typedef struct mp_wmat {
    mp_wkind kind;
    int32_t N, K;
    int32_t panels;       /* ceil(N / MP_PANEL_N) */
    size_t panel_bytes;   /* multiple of 64 */
    uint8_t *data;        /* [panels][panel_bytes] */
} mp_wmat;

/* Choose the layout for a stored dtype. MP_COMPUTE_AUTO keeps quantised dtypes as stored, keeps BF16 if the CPU has
 * bf16 products, and converts other floats to F32. F32 and BF16 convert every weight dtype; I8 converts float dtypes
 * only. Returns false for every other pair of `stored` and `compute`: integers and F64 cannot be weights. */
bool mp_wmat_kind_for(mp_dtype stored, mp_compute compute, mp_wkind *kind);
/* Resolve the compute type of a network with float weights. Returns `asked` unless it is MP_COMPUTE_AUTO. For AUTO:
 * BF16 if the CPU has bf16 products, else F32. Use it only for networks whose bf16 outputs have a cosine similarity >=
 * 0.9999 to the fp32 ones (encoders, image encoders, image generation). */
mp_compute mp_resolve_compute(mp_compute asked);
/* Name of a compute type, as the facts of a model report it. AUTO gives "stored": the dtype of each weight decides. */
const char *mp_compute_name(mp_compute compute);
/* Return the activation format that mp_gemm requires for a kind of weights. */
mp_akind mp_wmat_acts(mp_wkind kind);
/* Set every field except data. For quantised kinds, K must be a multiple of the block size (32 or 256); dense kinds
 * accept any K. */
void mp_wmat_init(mp_wmat *w, mp_wkind kind, int32_t N, int32_t K);
/* Bytes of data, without MP_WMAT_SLACK. */
size_t mp_wmat_bytes(const mp_wmat *w);
/* Pack panels [panel0, panel1) from src, a tensor [N, K] whose dtype mp_wmat_kind_for maps to w->kind. Threads may pack
 * disjoint ranges of panels at the same time. */
void mp_wmat_pack(mp_wmat *w, const mp_tensor *src, int panel0, int panel1);
/* Read row n as floats into out [K]. The values equal those of mp_dequantize_row on the source, except for BF16 (values
 * as rounded by packing) and I8 (values as quantised by packing, rotated back). */
void mp_wmat_row(const mp_wmat *w, int32_t n, float *out);

/* Convert n items of a stored row to fp32, out [n], bit for bit as the `gguf` package does. n must be a multiple of the
 * block size of `dtype`. */
void mp_dequantize_row(mp_dtype dtype, const void *src, int64_t n, float *out);

/* ---- activations ------------------------------------------------------------------------------------------------- */

typedef struct mp_acts {
    mp_akind kind;
    int32_t M, K;
    const float *f32;  /* A_F32: [M, ld_f32], borrowed from the caller of mp_acts_fill, not copied */
    int64_t ld_f32;
    uint16_t *bf16;    /* A_BF16: [M, K rounded up to 32], padding 0 */
    int8_t *q;         /* A_Q8, A_I8: [M, K rounded up to 64]; values in [-127, 127], padding 0 */
    float *scale;      /* A_Q8: [M, K / 32]; A_I8: [M] */
    int32_t *sum;      /* A_Q8: [M, K / 16], sums of q over 16 inputs; A_I8: [M], sum of q */
    float *low;        /* A_Q8: [M, K / 32], factors of minima: scale * (float)(sum of q over 32 inputs) */
    int64_t ldq;       /* row stride of q and bf16, in elements */
} mp_acts;

/* Bytes of memory that mp_acts_init needs for M rows: 0 for A_F32. */
size_t mp_acts_bytes(mp_akind kind, int32_t M, int32_t K);
/* Initialise x, with its arrays in `memory`, which the caller owns: 64-byte aligned, mp_acts_bytes() long; NULL for
 * A_F32. */
void mp_acts_init(mp_acts *x, mp_akind kind, int32_t M, int32_t K, void *memory);
/* Convert rows [row0, row1) of in [M, ld]. Threads may convert disjoint ranges of rows at the same time. For A_F32, the
 * call only stores `in` and `ld`, whatever the rows: one call by any thread suffices.
 * Q8: per block, scale = max|x| / 127 in fp32 and q = x * (127 / max|x|) rounded to nearest even. A block of zeros has
 * scale 0. A NaN or Inf in a block makes its scale NaN, which propagates to the outputs.
 * I8: the same formula with one scale per row, applied to the rotated inputs (slot hadamard). The rotation spreads a
 * large component over its block; without it, one large component would set the scale and the others would lose
 * precision. The weights are rotated by the inverse, so the products do not change. */
void mp_acts_fill(mp_acts *x, const float *in, int64_t ld, int row0, int row1);
/* Convert only the first n inputs of rows [row0, row1), for A_Q8 and A_BF16. n must be less than K and a multiple of
 * 32. */
void mp_acts_fill_first(mp_acts *x, const float *in, int64_t ld, int n, int row0, int row1);

/* Block size of the W_I8 rotation for K inputs: the largest power of two that divides K, at most 64. Size 1 leaves x
 * unchanged. */
static inline int mp_hadamard_size(int K) { return K & -K & 63 ? K & -K : 64; }

/* ---- GEMM -------------------------------------------------------------------------------------------------------- */

typedef enum mp_act {
    MP_ACT_NONE,
    MP_ACT_GELU,
    MP_ACT_GELU_TANH,
    MP_ACT_RELU,
    MP_ACT_SILU,
    MP_ACT_TANH,
    MP_ACT_SIGMOID,
    MP_ACT_QUICK_GELU, /* x * sigmoid(1.702 x), used by CLIP */
    MP_ACT_RELU2,      /* the square of ReLU (arXiv:2109.08668) */
} mp_act;

/* Operations on every output, applied while its tile is in cache, in this order: + bias[n]; act; + residual[m, n]. */
typedef struct mp_epilogue {
    const float *bias;      /* [N] or NULL */
    mp_act act;
    const float *residual;  /* [M, ld_residual] or NULL; may be y itself */
    int64_t ld_residual;
} mp_epilogue;

/* Multiply rows [m0, m1) of x by panels [panel0, panel1) of w into y [M, ldy]. y points at row 0, column 0; columns >=
 * N are never written. ep may be NULL. x must be of the kind mp_wmat_acts(w->kind).
 *
 * Notation: i is the exact int32 dot product of a block (i16: of 16 inputs), sa the scale of the activations, sum32 and
 * sum16 the sums of q over 32 and 16 inputs; the other letters are numbers of the weight format (pack.h). Blocks of 32
 * update the accumulator f in ascending order, as follows (each `*` rounds its fp32 product):
 *   Q4_0, Q5_0, Q8_0:  f = fma((float)i, d * sa, f)
 *   Q4_1, Q5_1:        f = fma((float)i, d * sa, f);  f = fma(m, sa * (float)sum32, f)
 *   Q4_K, Q5_K:        f = fma((float)i, (d * (float)sc) * sa, f);  f = fma(-(dmin * (float)mn), sa * (float)sum32, f)
 *   Q3_K, Q6_K:        per 16 inputs: f = fma((float)i16, (d * (float)sc) * sa, f)
 *   Q2_K:              per 16 inputs: the same; then f = fma(-(dmin * (float)mn), sa * (float)sum16, f)
 *   TQ, IQ2_XXS, IQ3, IQ4_NL, IQ4_XS, MXFP4:  f = fma((float)i, s * sa, f)
 *   IQ2_XS, NVFP4:     per 16 inputs: f = fma((float)i16, s * sa, f)
 *   I8:                one dot over all K: y = (float)i * (sw * sa)   of rotated inputs (K up to MP_I8_MAX_INPUTS)
 *   BF16:              AVX-512: vdpbf16ps on pairs (k, k+1), K ascending. ARM: bfdot and bfmmla, which add the two
 *                      products first and round to odd (arm/dot.h). AMX: sums of 32 inputs (x86/amx_dense.c). ref, AVX2
 *                      and NEON: fp32 FMAs on the rounded values. */
void mp_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
             float *y, int64_t ldy);

/* Multiply rows [m0, m1) of x by n weight rows as they are stored, without packing them: y[(m - m0) * ldy + o] =
 * x[m] . row o, for o < n. `rows` points at the first row, and `stride` is the distance of rows in bytes. x is of kind
 * A_F32 for rows of F32, otherwise A_Q8. The bits are those of mp_gemm with the packed rows. Call only if mp_stored_can
 * returns true.
 *
 * mp_stored_can returns false if packing is faster for `rows` rows of x, the type has no slot, `acts` is another kind,
 * or the instruction set has no variant of the slot. */
bool mp_stored_can(mp_dtype dtype, mp_akind acts, int rows);
void mp_stored_multiply(mp_dtype dtype, const uint8_t *rows, size_t stride, int n, const mp_acts *x, int m0, int m1,
                        float *y, int64_t ldy);

/* Multiply x [K] by n rows of F32 [n, ld], and each row by itself: y[o] = x . row o with the bits of
 * mp_stored_multiply, squares[o] = row o . row o with the bits of slot dot. Each component is loaded once.
 * mp_squared_product_for returns the slot squared_f32, or NULL where the instruction set has no variant of it. */
typedef void mp_squared_product(const float *rows, int64_t ld, int n, int K, const float *x, float *y, float *squares);
mp_squared_product *mp_squared_product_for(void);

/* Multiply all rows of x by outputs [n0, n1) of w, a tensor [N, K], without packing it: by mp_stored_multiply, or for
 * many rows of x and a tensor of F32 by OpenBLAS. ep, y and the bits are as for mp_gemm. Returns false, and does
 * nothing, where packing is faster. tile: scratch of the thread, MP_STORED_TILE floats. fast: allow a library whose
 * bits differ from those of mp_gemm (mp_blas_differs) and may depend on the number of rows. */
enum { MP_STORED_TILE = 256 * 512 };
bool mp_gemm_stored(const mp_tensor *w, const mp_acts *x, int n0, int n1, bool fast, const mp_epilogue *ep,
                    float *tile, float *y, int64_t ldy);
/* Returns true if mp_gemm_stored would multiply all rows of x by `outputs` (>= 1) outputs of w by OpenBLAS. */
bool mp_gemm_stored_by_blas(const mp_tensor *w, const mp_acts *x, int outputs, bool fast);

/* Compute act(x w^T + bias) of one part, or gated(act) of two parts with the same N: parts[0] is the gate, parts[1] the
 * values to be gated. Write the result as the last N inputs of `out` (kind A_Q8 or A_BF16), the activations of the next
 * product. `out` may have other inputs before these N; their number must be a multiple of MP_PANEL_N. The outputs of
 * each panel are rounded while they are in cache.
 *
 * The bits equal those of mp_gemm, gated and mp_acts_fill called in sequence, with one exception: a denormal may become
 * zero in `out` on instruction sets whose bf16 products flush denormals. Slot gemm_bf16_acts computes one part of kind
 * W_BF16 into A_BF16 (its y points at bf16 words). mp_gemm_acts calls this slot where it is faster than rounding fp32
 * tiles. */
typedef struct mp_gemm_part {
    const mp_wmat *w;
    const mp_acts *x;
    const float *bias; /* [N] or NULL */
} mp_gemm_part;
void mp_gemm_acts(const mp_gemm_part *parts, int count, mp_act act, int m0, int m1, int panel0, int panel1,
                  const mp_acts *out);
/* True if mp_gemm_acts can write N outputs as activations of `kind`. A_I8 is impossible: its scale depends on a whole
 * row, but mp_gemm_acts rounds panel by panel. */
static inline bool mp_gemm_acts_can(int32_t N, mp_akind kind) {
    return N % MP_PANEL_N == 0 && (kind == MP_A_Q8 || kind == MP_A_BF16);
}

/* y [M, ldy] = x [M, ldx] * transpose of w [N, ldw], in fp32, with w unpacked. Uses OpenBLAS if it is loaded, has
 * passed its self-test and computes products of this size with the bits of our own kernel, which it does not for small
 * products. Otherwise uses our own kernel. The bits are the same either way. */
void mp_gemm_f32_plain(int M, int N, int K, const float *x, int64_t ldx, const float *w, int64_t ldw, float *y,
                       int64_t ldy);

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* Full attention of one head over one sequence, for encoders: no KV cache, one softmax over all T keys of a row.
 *   score[r, t] = scale * (chain over d ascending of q[r, d] * k[t, d])
 *   softmax by the row tree (lane = t mod 16 over the visible t)
 *   out[r, d] = (chain over the visible t ascending of p[t] * v[t, d]) * (1 / sum); a sum of zero becomes +0
 * q, k and v must be finite: the v of a masked key is multiplied by 0.
 *
 * Threads may split rows [row0, row1) of one head, each with its own scratch. Each call first copies the K and V that
 * its rows see into scratch, in the order in which the kernel reads them (K by columns). Pass tens of rows per call to
 * amortise that copy. */
typedef struct mp_attn_full {
    const float *q, *k, *v; /* [T, ld] each, at the first column of this head; rows are tokens */
    int64_t ld;
    float *out;             /* [T, ld_out] at the first column of this head */
    int64_t ld_out;
    int T, D;
    float scale;
    bool causal;            /* row r sees key t if t <= r */
    int window;             /* 0: none; else row r sees |r - t| <= window / 2 (bidirectional) or r - t < window (causal)
                             */
    const float *bias;      /* NULL, or added to the scaled score: bias[r * ld_bias + t] for row r and key t */
    int64_t ld_bias;        /* T; or -1 if the bias depends only on t - r: 2 T - 1 values, `bias` at element T - 1 */
} mp_attn_full;
size_t mp_attn_full_scratch(int T, int D); /* bytes of 64-byte aligned memory for the functions that mp_attn_full_for
                                            * returns, also enough for every smaller T; calls leave no state in it */

/* mp_attn_full_i16 is the same attention by attn_kv_i16, for the int8 compute type: keys, values and queries are
 * rounded to I16, and blocks of MP_KV_BLOCK keys are merged as described below. All variants give the same bits. bias
 * is NULL. If a row's query, or a key or value that it sees, has a NaN or Inf, all components of the row are NaN. No
 * other row is affected. D is at most MP_ATTN_FULL_I16_DEPTH. */
void mp_attn_full_i16(const mp_attn_full *a, int row0, int row1, void *scratch);
enum { MP_ATTN_FULL_I16_DEPTH = 512 };

/* attn_full_bf16 is the slot for the bfloat16 compute type. It rounds q * scale, k, v and p = exp(score - max) to bf16.
 * Its products round as those of gemm_bf16, so variants differ in bits. out = (p * v) * (1 / sum of the unrounded p). A
 * row depends only on itself and on the keys that it sees. D is a multiple of 8, at most MP_ATTN_BF16_DEPTH.
 *
 * mp_attn_full_for returns the function to use for a compute type and a shape: attn_full_bf16 for MP_COMPUTE_BF16 on
 * CPUs that have a variant of the slot, mp_attn_full_i16 for MP_COMPUTE_I8 without bias on every CPU, and both only if
 * T is large enough to repay packing K and V. biased: whether `bias` will be set. */
typedef void (*mp_attn_full_function)(const mp_attn_full *a, int row0, int row1, void *scratch);
mp_attn_full_function mp_attn_full_for(mp_compute compute, int T, int D, bool biased);
enum { MP_ATTN_BF16_DEPTH = 512 };

/* Attention over a paged cache. A block holds MP_KV_BLOCK tokens of one layer and one KV head, in one of three formats.
 * The caller must zero new blocks. Attention reads all K and V from blocks, so those of current tokens must be stored
 * first.
 *   F32  K block: [k_dim][MP_KV_BLOCK] (a key's components are a column)       V block: [MP_KV_BLOCK][v_dim]
 *   I16  K block: int16 [k_dim / 2][MP_KV_BLOCK][2], fp32 scale [MP_KV_BLOCK]
 *        V block: int16 [MP_KV_BLOCK / 2][v_dim][2] (a pair is two tokens), fp32 scale [MP_KV_BLOCK]
 *   I8   the same with int8, then the multipliers: int8 [groups of MP_I8_GROUP components, the last may have fewer]
 *        [MP_KV_BLOCK]
 *
 * F32: the partial of one block for one row.
 *   s[t] = scale * (chain over d ascending of q[d] * k[d, t]); t is masked if its position is not visible
 *   m = max s;  p[t] = exp(s[t] - m) (0 when masked);  l = tree sum of the 64 p
 *   o[d] = chain over t ascending of p[t] * v[t, d]; a sum of zero becomes +0. Masked t are skipped or add
 *          0 * v, which is 0 because blocks are finite.
 * A row that sees no token of a block has m = -inf, l = 0, o = 0. Partials are merged in ascending block order:
 *   M = max(m_state, m);  a = exp(m_state - M);  b = exp(m - M);  l = l_state * a + l * b;  o = o_state * a + o * b
 * Each product is rounded, followed by one fp32 add. While l_state is 0, the partial replaces the state; a partial with
 * l = 0 is skipped. NaN and overflowed scores make l and o NaN; such a row is never mistaken for a row that sees no
 * token. Therefore neither the thread that computes a block nor the split of rows into prefill slices changes a bit.
 *
 * I16: all products are of integers. Keys and queries are at most MP_I16_KEY in magnitude, values MP_I16_VALUE and
 * softmax weights MP_I16_WEIGHT. Sums over 128 components or 64 tokens are therefore exact in int32. A row x of keys,
 * queries or values with top = max|x| and limit = MP_I16_KEY or MP_I16_VALUE is stored as
 *   scale = top / limit,  integers = x * (limit / top) rounded once, to nearest even;
 *   scale 0 and zeros when top < MP_I16_MIN;  scale NaN and zeros when top is NaN or Inf.
 * Notation: sq, sk, sv are the scales of query, key t and value t; i0, i1, ... are the exact dot products of 128
 * components each, ascending.
 *   x[t] = ((float)i0 + (float)i1 + ...) * sk;   f = sq * scale;   top = max x over the visible t;   m = top * f + 0
 *   p[t] = exp2((x[t] - top) * f2),  f2 = f * MP_LOG2E, NaN if m is infinite; exp2 as in math_const.h (0 when masked)
 *   l = tree sum of the 64 p;   w[t] = p[t] * sv (0 when masked);   most = max w, NaN if any w is NaN
 *   n[t] = w[t] * (MP_I16_WEIGHT / most) rounded once, to nearest even;   by = most / MP_I16_WEIGHT
 *   (most < MP_I16_MIN: n = 0, by = 0;  most NaN or Inf: n = 0, by = NaN)
 *   o[d] = (float)(sum over t of n[t] * v[t, d]) * by
 * The merge, and the result of a row that sees no token, are as for F32.
 *
 * I8: as I16. The integer of a component is its byte times the multiplier of its group. The limits of rows are
 * MP_I8_MAX times MP_I8_KEY or MP_I8_VALUE, the greatest multipliers. The multiplier of a group is mp_i8_multiplier of
 * the group's max|x|; its bytes are x * ((limit / top) / multiplier), rounded once. So a group has a scale of its own,
 * and the sums are as exact as those of I16.
 *
 * Softcap: s = softcap * tanh(s / softcap) in all formats, after scale. In I16 and I8, x[t] becomes softcap *
 * tanh(x[t] * f / softcap), and then f = 1. */
enum { MP_I16_KEY = 4095, MP_I16_VALUE = 2047, MP_I16_WEIGHT = 16383, MP_I16_DEPTH = 128 };
enum { MP_I8_GROUP = 32, MP_I8_MAX = 127, MP_I8_KEY = 32, MP_I8_VALUE = 16 };
#define MP_I16_MIN 0x1p-100f /* limit that keeps scales, their inverses and products with integers normal floats */

/* Returns the v_dim for values of `dim` components: rows of V are padded with zeros to whole vectors. */
static inline int mp_kv_width(int dim) { return (dim + 15) / 16 * 16; }
/* Bytes of one K or V block, F32, I16 or I8, of `dim` components. The result is a multiple of 64. */
static inline size_t mp_kv_bytes(mp_dtype dtype, int dim) {
    const size_t most = MP_KV_BLOCK * (size_t)dim, scales = MP_KV_BLOCK * sizeof(float);
    const size_t groups = ((size_t)dim + MP_I8_GROUP - 1) / MP_I8_GROUP;
    return dtype == MP_F32   ? most * sizeof(float)
           : dtype == MP_I16 ? most * sizeof(int16_t) + scales
                             : most + scales + MP_KV_BLOCK * groups;
}
/* Returns the multiplier of a group of an I8 block: the least integer from 1 to `most` that is not below greatest *
 * (factor / MP_I8_MAX). `factor` is the row's limit / top; 0: the row is stored as zeros, with multiplier 1. */
static inline int mp_i8_multiplier(float greatest, float factor, int most) {
    const float least = factor > 0.0f ? greatest * (factor / (float)MP_I8_MAX) : 0.0f;
    const int whole = (int)least, up = whole + ((float)whole < least);
    return up < 1 ? 1 : up < most ? up : most;
}

typedef struct mp_attn_kv {
    const float *q;            /* [rows, group, k_dim] with the strides below; I16, I8: as attn_query_i16 wrote it */
    int64_t ldq, ldq_group;    /* elements between rows, and between the query heads that share this KV head */
    int group;                 /* query heads per KV head; rows * group <= MP_ATTN_ROWS */
    int k_dim, v_dim;          /* k_dim even, v_dim a multiple of 16 */
    float scale;
    int64_t pos0;              /* position of row 0; row r is at pos0 + r and sees positions <= its own */
    int window;                /* 0: all positions; else the last `window` positions, including the row's own */
    int64_t end;               /* 0: none; else no row sees positions from `end` on; its own may be greater */
    bool near;                 /* I16: blocks are in the CPU's caches, and group or rows is 1. Changes no bit */
    float softcap;             /* 0: none; else the cap of the scores: see above */
    void *const *k_blocks;     /* [blocks] of this layer and KV head */
    void *const *v_blocks;
} mp_attn_kv;

/* Running or partial result of rows * group rows, row-major (row, group). The caller owns the memory: 64-byte aligned.
 */
typedef struct mp_attn_partial {
    float *m, *l;   /* [rows * group]; m = -inf and l = 0 for a row that sees no token of the block */
    float *o;       /* [rows * group, v_dim] */
} mp_attn_partial;
/* Steps: mp_attn_begin, then attn_block and attn_merge per block in ascending order, then the caller divides: out = o *
 * (1 / l). attn_block computes the partial of one block. attn_merge folds the partial into the state; its parameter
 * `rows` is rows * group. attn_block prefetches the next block if any of its rows sees it.
 *
 * attn_kv replaces both for blocks [block0, block1): it is faster and gives the same bits. Several calls with ascending
 * ranges may continue one state. The range may contain blocks that no row sees.
 *
 * attn_block_i16 and attn_kv_i16 do the same over I16 blocks, attn_block_i8 and attn_kv_i8 over I8 blocks. Call
 * attn_query_i16 on the queries first: it replaces the k_dim floats of a query by k_dim int16 followed by one fp32
 * scale, in place. */
void mp_attn_begin(int rows, int v_dim, mp_attn_partial *state); /* m = -inf, l = 0, o = 0 for `rows` partial rows */
size_t mp_attn_kv_scratch(int v_dim); /* bytes of 64-byte aligned memory for attn_kv, attn_kv_i16 and attn_kv_i8 */

/* ---- rows -------------------------------------------------------------------------------------------------------- */
/* The lanes of the tree start at +0 and add products by FMA. Means divide the sum by (float)n.
 * rms_norm    y = (x * (1 / sqrt(mean(x^2) + eps))) * weight; y may be x. Sum by the tree, in fp32.
 * layer_norm  mean by the tree; variance by the tree of (x - mean)^2; y = fma((x - mean) * rstd, weight, bias), without
 *             the addition when bias is NULL. y may be x.
 * add         y += x
 * mul_add     y = fma(a, b, y)
 * column_sums out[i] = the chain over the rows of x [rows, ld], ascending from +0: out + x, or with a centre [n]
 *             fma(d, d, out) where d = x - centre
 * affine      y = act(fma(x - centre, scale, shift)); y may be x
 * gated       y = act(gate) * up; y may be gate or up
 * activate    x = act(x). GELU is x * Phi(x), the exact form, precise for negative x too; see math_const.h
 * softcap     x = cap * tanh(x / cap); x / cap is rounded before tanh
 * softmax     x = exp(x - max) in place; returns the sum, the caller divides. NaN, +inf or only -inf in x gives NaN.
 * max         ignores NaN; -inf when there is nothing else
 * exp_sum     out = exp(x - max), returns the tree sum; out may be NULL or x
 * argmax      lowest index of the largest value; ignores NaN; 0 when there is nothing else
 * hadamard    multiplies blocks of `size` inputs (a power of two up to 64 that divides K) by the Hadamard matrix of
 *             that size, not normalised. For the distances h = 1, 2, 4, ... below size and i without the bit h:
 *             (x[i], x[i + h]) -> (x[i] + x[i + h], x[i] - x[i + h]); y may be x
 * dot         tree of FMAs
 * all_finite  no NaN, no inf
 * exp(x)      0 where the result would be below the smallest normal float, so that flush-to-zero changes nothing
 * rope        x [dim]: pairs (i, i + dim/2) when neox, else (2i, 2i + 1); cos_sin [dim/2][2]
 *             (a, b) -> (fma(a, cos, -(b * sin)), fma(a, sin, b * cos))
 * widen_i8    y = (float)x
 * causal_conv  y[r, c] = the chain over j < taps ascending of fma(kernel[j, c], x[r + j][at + c], y), from bias[c]
 *             (NULL: +0), for c < n. x [rows + taps - 1]: pointers to the rows and to the taps - 1 before them; kernel
 *             [taps, ld]; y [rows, ldy] may be none of them
 * row_maxima  maxima[j] = max(maxima[j], s[r, j]) over the rows r < n of rows [n, ld], for the outputs j < columns of
 *             one F32 panel [K][32] (pack_dense.h). s[r, j] has the bits of gemm_f32, times scales[r] unless `scales`
 *             is NULL; the sign of a zero is unspecified. columns is 1 to 32; maxima [32] from `columns` on are
 *             unspecified. Scores stay in registers. Returns false if a score is NaN or infinite; the maxima are then
 *             unspecified. A component of a row that is not finite makes every score of that row NaN or infinite.
 * row_maxima_i8  as row_maxima, for rows of int8 and a panel of digits (digits.h): s[r, j] = (f * unit[j]) * scales[r].
 *             f is the sum over the k-chunks, ascending, of fma((float)high, 256, (float)low). high and low are the
 *             exact dot products of the row with the two upper digits and with the lowest digit. n is at least 1.
 * kv_fill_i16  fills a pair of blocks with tokens 0 to n - 1 of k and v [n, ld], as kv_store_i16 stores them, and zeros
 *             in all other slots. A row has dim components; k_dim is dim rounded up to 2, v_dim mp_kv_width(dim).
 * kv_store, kv_store_i16, kv_store_i8    store k [k_dim] and v [v_dim] of one token into one slot, 0 to
 *             MP_KV_BLOCK - 1, of a pair of blocks. Threads may fill different slots of one block at the same time. */

/* ---- recurrent states -------------------------------------------------------------------------------------------- */

enum { MP_STATE_BLOCK = 16 }; /* components of values in a block of a state */

/* A head of a recurrent mixer with a matrix as state (gated delta net, Mamba-2), over the rows of a sequence. The
 * columns of the matrix are independent. They lie in blocks of MP_STATE_BLOCK columns, S [dk][MP_STATE_BLOCK]; the
 * columns from dv on are padding, whose values are unspecified. Slot state_scan, for each row in order and each column:
 *
 *   u = v, or with beta: u = beta * (v - decay * a), where a = the sum of S[i] * k[i]
 *   S[i] = fma(k[i], u, decay * S[i])
 *   o = the sum of S[i] * q[i]
 *
 * A sum over i < dk has four partial sums by FMA, of the i with i mod 4 = 0, 1, 2, 3, each ascending from +0; it is
 * (p0 + p1) + (p2 + p3). Every other product is rounded. So a state depends on its rows alone, and not on the calls
 * that they come in. */
typedef struct mp_state_scan {
    float *state; /* [ceil(dv / MP_STATE_BLOCK)][dk][MP_STATE_BLOCK] */
    int dk, dv, rows;
    const float *k, *q; /* [rows, ldk] and [rows, ldq]; q NULL: no outputs */
    const float *v;     /* [rows, ldv] */
    const float *decay, *beta; /* [rows, ld_gates] one number per row; beta NULL: u = v */
    float *u, *o; /* [rows, ldu] receives u, or NULL; [rows, ldo] */
    int64_t ldk, ldq, ldv, ld_gates, ldu, ldo;
} mp_state_scan;

/* ---- the table --------------------------------------------------------------------------------------------------- */

typedef struct mp_kernels {
#define MP_KERNEL(slot, ret, params) ret(*slot) params;
#include "kernels/kernels.def"
#undef MP_KERNEL
} mp_kernels;

/* The table in use. Every slot starts with its function of ref/. Each instruction set that base/cpu.h reports then
 * overrides the slots that it implements, lowest set first. */
const mp_kernels *mp_kernels_get(void);
/* Fill the table from mp_cpu_features(). The Python module calls this function when it is loaded, an isolated child
 * process when it starts. Tests call it again after mp_cpu_init with another feature mask. Not thread-safe. */
void mp_kernels_init(void);
/* For show_config and the tests: the number of slots, the name of a slot, and the variant in use ("ref", "avx2",
 * "avx512", ...). */
int mp_kernels_count(void);
const char *mp_kernels_slot(int index);
const char *mp_kernels_variant(int index);

/* ---- OpenBLAS (blas.c) ------------------------------------------------------------------------------------------- */
/* Set the path of the library that is opened on first use: "system" is libopenblas.so.0 (on macOS libopenblas.dylib),
 * "" and "none" disable OpenBLAS. Call before other threads start. */
#define MP_BLAS_PATH 4096 /* bytes of the longest path, with the final NUL: PATH_MAX of Linux */
void mp_blas_set_path(const char *path);
/* The core type of OpenBLAS ("SkylakeX", "Haswell", ...), or "" if it is not in use. Sets *why (`why` may be NULL) to a
 * sentence that states which kernels are in use and the reason. Tries to load the library if no earlier call did. */
const char *mp_blas_core(const char **why);
/* Returns true if a library was opened, but its sums differ from those of our kernels: only products whose caller asks
 * for `fast` use it (mp_gemm_stored). Tries to load the library if no earlier call did. */
bool mp_blas_differs(void);
/* Multiply-adds that OpenBLAS has computed since the process started. */
uint64_t mp_blas_work(void);

#endif
