/* kernels.h: the arithmetic of mpool, one table of functions per instruction set.
 *
 * The numeric contract, which every variant of every slot keeps:
 *   - An output's arithmetic depends on its own inputs only: not on how many rows there are, on the tile, the layout,
 *     the thread or the chunk. Threads split outputs, never the inner dimension.
 *   - GEMM: one fp32 FMA accumulator an output, K ascending. In F32 the chain is cut every MP_K_CHUNK inputs: a chunk's
 *     chain starts at +0, chunk sums are added in ascending order (the first is taken as it is).
 *   - Quantised GEMM: activations are quantised per row in blocks of 32 (or per row for W_I8); a block's dot product is
 *     exact in int32; then one FMA a block (formulas below) into the one accumulator, blocks ascending.
 *   - Reductions over a row (norms, softmax, dot) use one fixed tree: 16 lanes, lane l sums elements l, l+16, ... in
 *     ascending order; then lanes are added 8 apart, 4, 2, 1 (l += l+8; l += l+4; ...). max is order-free.
 *   - -ffp-contract=off; FMAs are written out. exp, erf, tanh are our own polynomials, the same in every variant.
 * So ref, AVX2 and AVX-512 give the same bits for every slot but the bf16 ones, whose instruction rounds in its own way
 * (bf16 is reproducible per instruction set only).
 *
 * Kernels return void, assert their preconditions, never allocate, and may be called from any thread. Row strides are
 * in elements. Pointers need no alignment unless it is said. Outputs never overlap inputs unless it is said.
 *
 * Letters: M rows (tokens), N outputs, K inputs, H heads, D head size, T keys. */
#ifndef MP_KERNELS_KERNELS_H
#define MP_KERNELS_KERNELS_H

#include "tensor/tensor.h"

enum {
    MP_K_CHUNK = 384,   /* inputs in one fp32 chain */
    MP_KV_BLOCK = 64,   /* tokens in one KV block */
    MP_ATTN_ROWS = 64,  /* most query rows x grouped heads in one attn_block call */
    MP_I8_MOST_INPUTS = 16384, /* inputs of W_I8: a row of them fits a stack, and their dot product an int32 */
};

/* ---- weight matrices ------------------------------------------------------------------------------------------- */

typedef enum mp_wkind { /* packed layouts; each is described in pack.h */
    MP_W_F32,    /* from any dtype, dequantised */
    MP_W_BF16,   /* from any dtype, rounded to nearest even; exact from BF16 */
    MP_W_I8,     /* from any float dtype: rotated (hadamard), then symmetric int8 per output row, scale = max|w| / 127
                    (encoders' int8 class) */
    MP_W_Q4_0,
    MP_W_Q4_1,
    MP_W_Q5_0,
    MP_W_Q5_1,
    MP_W_Q8_0,
    MP_W_Q4_K,
    MP_W_Q5_K,
    MP_W_Q6_K,
    MP_W_TABLE32, /* IQ4_NL, IQ4_XS, MXFP4, IQ3_S, IQ3_XXS, IQ2_XXS, IQ1_S, TQ1_0, TQ2_0: codes of 4 bits for the 16
                     int8 of a table, an fp32 scale per 32 inputs */
    MP_W_TABLE16, /* Q3_K, IQ2_S, IQ2_XS, IQ1_M, NVFP4: a scale per 16 inputs */
    MP_W_TABLE16_MINS, /* Q2_K: and a minimum */
    MP_W_KIND_COUNT
} mp_wkind;

typedef enum mp_akind { /* what activations must look like for a kind of weight */
    MP_A_F32,
    MP_A_BF16,
    MP_A_Q8, /* int8 per block of 32 */
    MP_A_I8, /* int8 per row */
} mp_akind;

typedef enum mp_compute { MP_COMPUTE_AUTO, MP_COMPUTE_F32, MP_COMPUTE_BF16, MP_COMPUTE_I8 } mp_compute;

/* y[m, n] = sum_k x[m, k] * w[n, k]. Packing permutes, it never requantises. A panel holds MP_PANEL_N outputs with the
 * same inputs interleaved, so that one vector lane is one output; the last panel is padded with zeros. The memory is
 * the caller's: 64-byte aligned, mp_wmat_bytes() long, plus MP_WMAT_SLACK that is read, but counts for nothing. */
enum { MP_PANEL_N = 32, MP_WMAT_SLACK = 16384 };

typedef struct mp_wmat {
    mp_wkind kind;
    int32_t N, K;
    int32_t panels;       /* ceil(N / MP_PANEL_N) */
    size_t panel_bytes;   /* multiple of 64 */
    uint8_t *data;        /* [panels][panel_bytes] */
} mp_wmat;

/* The layout for a stored dtype: MP_COMPUTE_AUTO keeps quantised types as stored, and BF16 where the CPU multiplies it,
 * and takes F32 for other floats; F32, BF16 and I8 convert. false when that pair does not exist. */
bool mp_wmat_kind_for(mp_dtype stored, mp_compute compute, mp_wkind *kind);
/* The class of networks of floats that keep a cosine of 0.9999 in bf16, as encoders, image networks and those of
 * pictures do: BF16 where the CPU multiplies it, else F32, unless another than MP_COMPUTE_AUTO is asked for. */
mp_compute mp_float_class(mp_compute asked);
/* Its name in the facts of a model; AUTO where no class was chosen for all of it: "stored". */
const char *mp_compute_name(mp_compute compute);
mp_akind mp_wmat_acts(mp_wkind kind);
/* Sizes of a matrix; K must be a multiple of the kind's block (32 or 256). Fills everything but data. */
void mp_wmat_init(mp_wmat *w, mp_wkind kind, int32_t N, int32_t K);
size_t mp_wmat_bytes(const mp_wmat *w);
/* Pack panels [panel0, panel1) from src, a tensor [N, K] of a dtype that the kind takes. Lanes may share the work. */
void mp_wmat_pack(mp_wmat *w, const mp_tensor *src, int panel0, int panel1);
/* Row n as floats: out [K]. The same values as mp_dequantize_row of the source (for I8 and BF16: of the packed
 * values, rotated back). */
void mp_wmat_row(const mp_wmat *w, int32_t n, float *out);

/* n items of a stored row to fp32, bit for bit what the `gguf` package gives. n a multiple of the block. */
void mp_dequantize_row(mp_dtype dtype, const void *src, int64_t n, float *out);

/* ---- activations ----------------------------------------------------------------------------------------------- */

typedef struct mp_acts {
    mp_akind kind;
    int32_t M, K;
    const float *f32;  /* A_F32: [M, ld_f32], borrowed from the caller of mp_acts_fill; no copy */
    int64_t ld_f32;
    uint16_t *bf16;    /* A_BF16: [M, K rounded up to 32], padding 0 */
    int8_t *q;         /* A_Q8, A_I8: [M, K rounded up to 64]; values in [-127, 127], padding 0 */
    float *scale;      /* A_Q8: [M, K / 32]; A_I8: [M] */
    int32_t *sum;      /* A_Q8: [M, K / 16], sums of q over 16 inputs; A_I8: [M], sum of q */
    int64_t ldq;       /* row stride of q and bf16, elements */
} mp_acts;

/* Memory that M rows need beside the floats. */
size_t mp_acts_bytes(mp_akind kind, int32_t M, int32_t K);
/* memory: 64-byte aligned, mp_acts_bytes() long (NULL for A_F32). */
void mp_acts_init(mp_acts *x, mp_akind kind, int32_t M, int32_t K, void *memory);
/* Prepare rows [row0, row1) of in [M, ld]; lanes may share the work. A_F32 only remembers the pointer (any lane may).
 * Q8: per block scale = max|x| / 127 in fp32, q = round to nearest even of x * (127 / max|x|); a block of zeros has
 * scale 0. A NaN or Inf in a block makes its scale NaN, so that the outputs show it.
 * I8: the same per row, of the rotated inputs (slot hadamard): a few large components, which would take the whole range
 * of the row, are spread over their block. The weights hold the inverse rotation, so products are what they were. */
void mp_acts_fill(mp_acts *x, const float *in, int64_t ld, int row0, int row1);
/* The first n inputs of such rows of Q8 or BF16, n < K a multiple of 32. */
void mp_acts_fill_first(mp_acts *x, const float *in, int64_t ld, int n, int row0, int row1);

/* Inputs that one rotation of W_I8 mixes: the largest power of two that divides K, at most 64; 1 leaves x as it is. */
static inline int mp_hadamard_size(int K) { return K & -K & 63 ? K & -K : 64; }

/* ---- GEMM ------------------------------------------------------------------------------------------------------ */

typedef enum mp_act {
    MP_ACT_NONE,
    MP_ACT_GELU,
    MP_ACT_GELU_TANH,
    MP_ACT_RELU,
    MP_ACT_SILU,
    MP_ACT_TANH,
    MP_ACT_SIGMOID,
    MP_ACT_QUICK_GELU, /* x * sigmoid(1.702 x), as CLIP has it */
} mp_act;

/* Applied to every output while it is hot, in this order: + bias[n]; act; + residual[m, n]. */
typedef struct mp_epilogue {
    const float *bias;      /* [N] or NULL */
    mp_act act;
    const float *residual;  /* [M, ld_residual] or NULL; may be y itself */
    int64_t ld_residual;
} mp_epilogue;

/* Rows [m0, m1) of x times panels [panel0, panel1) of w into y [M, ldy] (y points at row 0, column 0; columns >= N are
 * never written). ep may be NULL. x must be of the kind mp_wmat_acts(w->kind).
 *
 * With i = the exact int32 dot product of a block, sa = activation scale, and weights as the format defines them, the
 * accumulator f takes per block of 32, ascending (fp32 products rounded where a * stands):
 *   Q4_0, Q5_0, Q8_0:  f = fma((float)i, d * sa, f)
 *   Q4_1, Q5_1:        f = fma((float)i, d * sa, f);  f = fma(m, sa * (float)sum32, f)
 *   Q4_K, Q5_K:        f = fma((float)i, (d * (float)sc) * sa, f);  f = fma(-(dmin * (float)mn), sa * (float)sum32, f)
 *   Q6_K:              per 16 inputs: f = fma((float)i16, (d * (float)sc) * sa, f)
 *   TABLE32:           f = fma((float)i, s * sa, f)
 *   TABLE16, _MINS:    per 16 inputs: f = fma((float)i16, s * sa, f);  with mins: f = fma(m, sa * (float)sum16, f)
 *   I8:                one dot over all K: y = (float)i * (sw * sa)   of rotated inputs (K up to MP_I8_MOST_INPUTS)
 *   BF16:              vdpbf16ps pairs (k, k+1), K ascending; on ARM bfdot and bfmmla, which add a pair up first and
 *                      round to odd (arm/dot.h); AMX adds up 32 inputs by themselves (x86/amx_dense.c); ref, AVX2 and
 *                      NEON do fp32 FMAs on the rounded values
 */
void mp_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
             float *y, int64_t ldy);

/* act(x w^T + bias) of rows and panels as above, or of two parts with as many outputs, a gate and what it gates, the
 * slot gated of theirs; as the last N inputs `out` (kind A_Q8 or A_BF16) of the next product, before which there may be
 * others, a multiple of MP_PANEL_N: each panel is rounded while it is hot. Bits are those of mp_gemm, gated and
 * mp_acts_fill one after another, but that denormals may be zeros in out where the products of a level take them for
 * zeros. The slot gemm_bf16_acts is one part of W_BF16 to A_BF16, y being words; mp_gemm_acts uses it where that is
 * faster than rounding tiles. */
typedef struct mp_gemm_part {
    const mp_wmat *w;
    const mp_acts *x;
    const float *bias; /* [N] or NULL */
} mp_gemm_part;
void mp_gemm_acts(const mp_gemm_part *parts, int count, mp_act act, int m0, int m1, int panel0, int panel1,
                  const mp_acts *out);
/* Whether N outputs can become inputs of that kind panel by panel: I8 has one scale a row. */
static inline bool mp_gemm_acts_can(int32_t N, mp_akind kind) {
    return N % MP_PANEL_N == 0 && (kind == MP_A_Q8 || kind == MP_A_BF16);
}

/* y [M, ldy] = x [M, ldx] times w [N, ldw] transposed, fp32, w as it lies in memory (not packed). Uses OpenBLAS when it
 * is there, its self-test passed and M*N*K is large enough for equal bits; else our own loop: the same bits either
 * way. */
void mp_gemm_f32_plain(int M, int N, int K, const float *x, int64_t ldx, const float *w, int64_t ldw, float *y,
                       int64_t ldy);

/* ---- attention ------------------------------------------------------------------------------------------------- */

/* Full attention of one sequence and one head, as encoders use it: no cache, softmax over all T keys at once.
 * score[r, t] = scale * (chain over d ascending of q[r, d] * k[t, d]); softmax by the row tree (lane = t mod 16 over
 * the visible t); out[r, d] = (chain over the visible t ascending of p[t] * v[t, d]) * (1 / sum), a chain that ends in
 * a zero ending in +0. q, k and v are finite: a masked v counts as 0 * v.
 *
 * Rows [row0, row1) of one head may be split between lanes, each with a scratch of its own: a call first copies the K
 * and V that its rows can see into scratch in the kernel's order (K by columns), so calls want tens of rows, not
 * one. */
typedef struct mp_attn_full {
    const float *q, *k, *v; /* [T, ld] each, at this head's first column; rows are tokens */
    int64_t ld;
    float *out;             /* [T, ld_out] at this head's first column */
    int64_t ld_out;
    int T, D;               /* D a multiple of 8 */
    float scale;
    bool causal;            /* key t is seen by row r when t <= r */
    int window;             /* 0 = none; else |r - t| <= window / 2 (bidirectional) or r - t < window (causal) */
    const float *bias;      /* added to the scaled score: of row r and key t bias[r * ld_bias + t]; or NULL */
    int64_t ld_bias;        /* T; or -1 for a bias of t - r alone, [2 T - 1] values of which bias points to the T-th */
} mp_attn_full;
size_t mp_attn_full_scratch(int T, int D); /* bytes, of 64-byte aligned memory; holds nothing between calls */

/* attn_full_bf16, for the class of bfloat16: q * scale, k, v and p = exp(score - max) are rounded to bf16, products are
 * as those of gemm_bf16, in whose bits variants differ; out = (p * v) * (1 / sum of the p that are not rounded). Its
 * rows too depend on nothing but themselves and the keys they see. D up to MP_ATTN_BF16_DEPTH.
 *
 * The one of the two slots to use for a class and a shape: bf16 where tiles make it worth its copies. */
typedef void (*mp_attn_full_function)(const mp_attn_full *a, int row0, int row1, void *scratch);
mp_attn_full_function mp_attn_full_for(mp_compute compute, int T, int D);
enum { MP_ATTN_BF16_DEPTH = 512 };

/* Attention over a paged cache. Blocks hold MP_KV_BLOCK tokens of one layer and one KV head, fresh ones zeroed, in one
 * of two forms. K and V are always stored first and read back.
 *   F32  K block: [k_dim][MP_KV_BLOCK] (a key's components are a column)       V block: [MP_KV_BLOCK][v_dim]
 *   I16  K block: int16 [k_dim / 2][MP_KV_BLOCK][2], fp32 scale [MP_KV_BLOCK]
 *        V block: int16 [MP_KV_BLOCK / 2][v_dim][2] (a pair is two tokens), fp32 scale [MP_KV_BLOCK]
 *
 * F32: a block's partial for a row: s[t] = scale * (chain over d ascending of q[d] * k[d, t]), t masked when its
 * position is not visible; m = max s; p[t] = exp(s[t] - m) (0 when masked); l = tree sum of the 64 p; o[d] = chain over
 * t ascending of p[t] * v[t, d], a chain that ends in a zero ending in +0 (masked t are skipped or add 0 * v: blocks
 * are finite). A row that sees nothing of a block has m = -inf, l = 0, o = 0. Partials are merged in ascending block
 * order:
 *   M = max(m_state, m);  a = exp(m_state - M);  b = exp(m - M);  l = l_state * a + l * b;  o = o_state * a + o * b
 * (each product rounded, then one fp32 add); while l_state is 0 the partial is taken as it is, and a partial with l = 0
 * is left out. NaN and overflowed scores end as NaN in l and o, never as a row that sees nothing. So who computes which
 * block, and in how many chunks the rows came, changes no bit.
 *
 * I16: products of integers of MP_I16_KEY (keys, queries), MP_I16_VALUE and MP_I16_WEIGHT at most, whose sums over 128
 * inputs or 64 tokens are exact in int32. A row x of keys, queries or values with top = max|x| has
 *   scale = top / most,  integers = x * (most / top) rounded once, to nearest even;
 *   scale 0 and zeros when top < MP_I16_LEAST;  scale NaN and zeros when top is NaN or Inf.
 * With sq, sk, sv the scales of query, key t and value t, and i the exact sum over each 128 components, ascending:
 *   x[t] = ((float)i0 + (float)i1 + ...) * sk;   f = sq * scale;   top = max x over the visible t;   m = top * f + 0
 *   p[t] = exp2((x[t] - top) * f2),  f2 = f * MP_LOG2E, NaN if m is infinite; exp2 as in math_const.h (0 when masked)
 *   l = tree sum of the 64 p;   w[t] = p[t] * sv (0 when masked);   most = max w, NaN winning
 *   n[t] = w[t] * (MP_I16_WEIGHT / most) rounded once, to nearest even;   by = most / MP_I16_WEIGHT
 *   (most < MP_I16_LEAST: n = 0, by = 0;  most NaN or Inf: n = 0, by = NaN)
 *   o[d] = (float)(sum over t of n[t] * v[t, d]) * by
 * A row that sees nothing and the merge are as above.
 *
 * With a softcap, s = softcap * tanh(s / softcap) in either form, after scale: in I16 x[t] becomes
 * softcap * tanh(x[t] * f / softcap) and then f = 1. */
enum { MP_I16_KEY = 4095, MP_I16_VALUE = 2047, MP_I16_WEIGHT = 16383, MP_I16_DEPTH = 128 };
#define MP_I16_LEAST 0x1p-100f /* so that no scale, inverse or product with an integer leaves the normal floats */

/* Bytes of a K or V block, F32 or I16, of so many components (a multiple of 16); a multiple of 64. */
static inline size_t mp_kv_bytes(mp_dtype dtype, int dim) {
    const size_t most = MP_KV_BLOCK * (size_t)dim;
    return dtype == MP_F32 ? most * sizeof(float) : most * sizeof(int16_t) + MP_KV_BLOCK * sizeof(float);
}

typedef struct mp_attn_kv {
    const float *q;            /* [rows, group, k_dim] through the strides below; I16: as attn_query_i16 left them */
    int64_t ldq, ldq_group;    /* elements between rows, and between the query heads that share this KV head */
    int group;                 /* query heads per KV head; rows * group <= MP_ATTN_ROWS */
    int k_dim, v_dim;          /* multiples of 16 */
    float scale;
    int64_t pos0;              /* position of row 0; row r stands at pos0 + r and sees positions <= its own */
    int window;                /* 0 = all; else only the last `window` positions, its own included */
    float softcap;             /* 0 = none; else what softens scores: see above */
    void *const *k_blocks;     /* [blocks] of this layer and KV head */
    void *const *v_blocks;
} mp_attn_kv;

/* Running or partial result of rows * group rows, row-major (row, group). Memory is the caller's, 64-byte aligned. */
typedef struct mp_attn_partial {
    float *m, *l;   /* [rows * group]; m = -inf and l = 0 for a row that sees nothing of the block */
    float *o;       /* [rows * group, v_dim] */
} mp_attn_partial;
/* attn_block computes the partial of one block; attn_merge folds it into the state, its `rows` being rows * group
 * (mp_attn_begin at the start). The caller divides: out = o * (1 / l). While it works, attn_block has the next block
 * fetched, when its rows see that: go through blocks in ascending order.
 * attn_kv does both for blocks [block0, block1), quicker: the same bits as attn_block and attn_merge, block by block. A
 * range may be cut into several calls on one state, ascending. Blocks that no row sees may be in the range.
 * attn_block_i16 and attn_kv_i16 are the same over blocks of the form I16, for queries (k_dim floats each) that
 * attn_query_i16 has turned into k_dim int16 and, behind them, an fp32 scale, where they stood. */
void mp_attn_begin(int rows, int v_dim, mp_attn_partial *state); /* m = -inf, l = 0, o = 0 for `rows` partial rows */
size_t mp_attn_kv_scratch(int v_dim); /* bytes, of 64-byte aligned memory, for attn_kv and attn_kv_i16 */

/* ---- rows ------------------------------------------------------------------------------------------------------ */
/* The tree's lanes start at +0 and take elements by FMA where there is a product; sums are divided by (float)n.
 * rms_norm    y = (x * (1 / sqrt(mean(x^2) + eps))) * weight; y may be x. Sum by the tree, in fp32.
 * layer_norm  mean by the tree; variance by the tree of (x - mean)^2; y = fma((x - mean) * rstd, weight, bias), without
 *             the addition when bias is NULL. y may be x.
 * add         y += x
 * mul_add     y = fma(a, b, y)
 * column_sums out[i] = the chain over the rows of x [rows, ld], ascending from +0: out + x, or with a centre [n]
 *             fma(d, d, out) where d = x - centre
 * affine      y = act(fma(x - centre, scale, shift)); y may be x
 * gated       y = act(gate) * up; y may be gate or up
 * activate    x = act(x). GELU is x * Phi(x), the exact form (not less precise for negative x); see math_const.h
 * softcap     x = cap * tanh(x / cap), the division rounded first
 * softmax     x = exp(x - max) in place, returns the sum (not divided). A NaN or +inf, or nothing but -inf, gives NaN.
 * max         NaN never wins; -inf when there is nothing else
 * exp_sum     out = exp(x - max), returns the tree sum; out may be NULL or x
 * argmax      lowest index of the largest; NaN never wins; 0 when there is nothing else
 * hadamard    blocks of `size` inputs (a power of two up to 64 that divides K) times the Hadamard matrix of that size,
 *             not normalised: for the distances h = 1, 2, 4, ... below size and i without the bit h,
 *             (x[i], x[i + h]) -> (x[i] + x[i + h], x[i] - x[i + h]); y may be x
 * dot         tree of FMAs
 * all_finite  no NaN, no inf
 * exp(x)      0 where the result would be below the smallest normal float, so that flush-to-zero changes nothing
 * rope        x [dim]: pairs (i, i + dim/2) when neox, else (2i, 2i + 1); cos_sin [dim/2][2]
 *             (a, b) -> (fma(a, cos, -(b * sin)), fma(a, sin, b * cos))
 * kv_store, kv_store_i16    one token's k [k_dim], v [v_dim] into slot [0, MP_KV_BLOCK) of a pair of blocks. Slots of
 *             one block may be filled by several threads at a time */

/* ---- the table ------------------------------------------------------------------------------------------------- */

typedef struct mp_kernels {
#define MP_KERNEL(slot, ret, params) ret(*slot) params;
#include "kernels/kernels.def"
#undef MP_KERNEL
} mp_kernels;

/* The table in use: ref, then overridden by each instruction set that base/cpu.h reports, lowest first. */
const mp_kernels *mp_kernels_get(void);
/* Fill from mp_cpu_features(). Called when the module loads; tests call it again after mp_cpu_init with another
 * mask. */
void mp_kernels_init(void);
/* For show_config and the tests: number of slots, a slot's name, and the variant in use ("ref", "avx2", "avx512",
 * ...). */
int mp_kernels_count(void);
const char *mp_kernels_slot(int index);
const char *mp_kernels_variant(int index);

/* ---- OpenBLAS (blas.c) ----------------------------------------------------------------------------------------- */
/* Path of the library to open on first need ("" or "none": never). Before any other thread. */
void mp_blas_set_path(const char *path);
/* "SkylakeX", "Haswell", ...; "" when not loaded; why says in words what is in use and why. Loads it if need be. */
const char *mp_blas_core(const char **why);

#endif
