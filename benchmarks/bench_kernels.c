/* bench_kernels.c: speed of the gemm kernels as a percentage of the machine's current arithmetic peak.
 *
 *   bench_kernels [--kind f32|bf16|i8|plain|TYPE]... [--mask word] [--rows m,m,..] [--shape NxK]... [--ms n]
 *                 [--pool MB] [--act] [--attention]
 *
 * Uses one thread. Prints one line per kind, shape and M. The peak is that of the kind's instruction (vfmadd231ps,
 * vdpbf16ps, vpdpbusd; 512 bits, or 256-bit FMAs under --mask avx2; tiles with AMX), measured by a probe just before
 * and just after the kernel. The time is the best of many short rounds, in CPU time, and excludes the preparation of
 * the activations. `pack` is the time to pack one matrix.
 *
 *   --pool MB     cycle through that much memory of weights (default 0: one matrix, in cache as in an encoder)
 *   --act         include bias and GELU in the time
 *   --attention   measure attn_kv, attn_kv_i16 and attn_kv_i8 instead: one token and a tile of a prompt over 128 to
 *                 2,048 positions (with --pool: over as many blocks as fit), as a percentage of vfmadd231ps and
 *                 vpdpwssd
 *   --kind plain  mp_gemm_f32_plain, with the OpenBLAS of MPOOL_BLAS if set
 *   --kind TYPE   a quantised type of GGUF (Q4_K, IQ2_XS, ...) with arbitrary codes; the peak is that of vpdpbusd
 *   --mask ref    measure the reference kernels */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/alloc.h"
#include "base/cpu.h"
#include "kernels/dequantize.h"
#include "kernels/variants.h"

/* CPU seconds of this thread, which exclude time that other processes take on a shared machine. */
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- probes: GFLOP/s (GOP/s) of one thread, 16 independent chains ------------------------------------------------ */

#if defined(__x86_64__)
#define CHAINS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define CLOBBERS                                                                                               \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
        "xmm13", "xmm14", "xmm15"
#define PROBE(name, zeros, instruction)                        \
    static void name(long rounds) {                            \
        __asm__ volatile(zeros ::: "memory");                  \
        for (long i = 0; i < rounds; i++)                      \
            __asm__ volatile(CHAINS(instruction)::: CLOBBERS); \
    }
#define F32_512(k)  "vfmadd231ps %%zmm30, %%zmm31, %%zmm" #k "\n"
#define BF16_512(k) "vdpbf16ps %%zmm30, %%zmm31, %%zmm" #k "\n"
#define I16_512(k)  "vpdpwssd %%zmm30, %%zmm31, %%zmm" #k "\n"
#define I8_512(k)   "vpdpbusd %%zmm30, %%zmm31, %%zmm" #k "\n"
#define F32_256(k)  "vfmadd231ps %%ymm" #k ", %%ymm" #k ", %%ymm" #k "\n"
#define ZERO_512    "vpxord %%zmm30, %%zmm30, %%zmm30\nvpxord %%zmm31, %%zmm31, %%zmm31"
PROBE(probe_f32, ZERO_512, F32_512)
PROBE(probe_bf16, ZERO_512, BF16_512)
PROBE(probe_i16, ZERO_512, I16_512)
PROBE(probe_i8, ZERO_512, I8_512)
PROBE(probe_avx2, "vzeroall", F32_256)

static double probe_rate(void (*run)(long), double operations) {
    const long rounds = 40000;
    double best = 0;
    for (int i = 0; i < 6; i++) {
        double t = now();
        run(rounds);
        t = now() - t;
        const double rate = operations * 16 * (double)rounds / t * 1e-9;
        best = rate > best ? rate : best;
    }
    return best;
}

#if defined(MP_TARGET_AMX_BEGIN)
MP_TARGET_AMX_BEGIN
/* Four accumulator tiles, as in the kernels. One iteration issues 4 x 4 tile instructions. */
#define TILES(dot) { dot(0, 4, 6); dot(1, 4, 7); dot(2, 5, 6); dot(3, 5, 7); }
#define PROBE_TILES(name, dot)                                                                                      \
    static void name(long rounds) {                                                                                 \
        _Alignas(64) const uint8_t config[64] = {[0] = 1,   [16] = 64, [18] = 64, [20] = 64, [22] = 64, [24] = 64,  \
                                                 [26] = 64, [28] = 64, [30] = 64, [48] = 16, [49] = 16, [50] = 16,  \
                                                 [51] = 16, [52] = 16, [53] = 16, [54] = 16, [55] = 16};            \
        static uint8_t bytes[1024]; /* nonzero, because the CPU clocks higher on zeros */                       \
        for (int i = 0; i < 1024; i++)                                                                              \
            bytes[i] = (uint8_t)(i % 2 ? 0x3f : i * 2654435761u >> 24);                                             \
        _tile_loadconfig(config);                                                                                   \
        _tile_loadd(4, bytes, 64); _tile_loadd(5, bytes, 64); _tile_loadd(6, bytes, 64); _tile_loadd(7, bytes, 64); \
        for (long i = 0; i < rounds; i++) {                                                                         \
            TILES(dot) TILES(dot) TILES(dot) TILES(dot)                                                             \
        }                                                                                                           \
        _tile_release();                                                                                            \
    }
PROBE_TILES(probe_tiles_bf16, _tile_dpbf16ps)
PROBE_TILES(probe_tiles_i8, _tile_dpbsud)
MP_TARGET_END
#else
#define probe_tiles_bf16 NULL
#define probe_tiles_i8   NULL
#endif

static double probe(mp_wkind kind) {
    const bool tiles = mp_cpu_features() & MP_CPU_AMX;
    if (tiles && (kind == MP_W_BF16 || kind == MP_W_I8))
        return kind == MP_W_BF16 ? probe_rate(probe_tiles_bf16, 16384) : probe_rate(probe_tiles_i8, 32768);
    const bool wide = mp_cpu_features() & MP_CPU_AVX512;
    const bool dot8 = kind != MP_W_F32 && kind != MP_W_BF16 && mp_cpu_features() & MP_CPU_AVX512_VNNI;
    const bool dot16 = kind == MP_W_BF16 && mp_cpu_features() & MP_CPU_AVX512_BF16;
    return dot8    ? probe_rate(probe_i8, 128)
           : dot16 ? probe_rate(probe_bf16, 64)
           : wide  ? probe_rate(probe_f32, 32)
                   : probe_rate(probe_avx2, 16);
}

static double probe_attention(mp_dtype dtype) {
    const bool words = dtype != MP_F32 && mp_cpu_features() & MP_CPU_AVX512_VNNI;
    return words ? probe_rate(probe_i16, 64) : probe(MP_W_F32);
}
#else
static double probe(mp_wkind kind) {
    (void)kind;
    return NAN;
}

static double probe_attention(mp_dtype dtype) {
    (void)dtype;
    return NAN;
}
#endif

/* ---- one measurement ------------------------------------------------------------------------------------------- */

typedef struct bench {
    mp_dtype dtype; /* type of the stored weights */
    mp_wkind kind;
    int M, N, K, copies;
    mp_wmat w;
    mp_acts x;
    float *in, *y, *bias;
    void *weights;
    bool act, plain;
} bench;

static void fill(float *x, int64_t n) {
    static uint32_t seed = 1;
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)seed * 0x1p-31f;
    }
}

static void *must(size_t bytes) {
    void *memory = mp_alloc(bytes, MP_TAG_MISC);
    if (!memory) {
        fprintf(stderr, "no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return memory;
}

static void run(const bench *b, int times) {
    const mp_epilogue ep = {.bias = b->bias, .act = MP_ACT_GELU};
    mp_wmat w = b->w;
    for (int t = 0; b->plain && t < times; t++)
        mp_gemm_f32_plain(b->M, b->N, b->K, b->in, b->K, b->weights, b->K, b->y, b->N);
    for (int t = 0; !b->plain && t < times; t++)
        for (int c = 0; c < b->copies; c++) {
            w.data = b->w.data + (size_t)c * mp_wmat_bytes(&w);
            mp_gemm(&w, &b->x, 0, b->M, 0, w.panels, b->act ? &ep : NULL, b->y, b->N);
        }
}

/* Make stored weights: random floats, or bytes below 64, which also make finite f16 numbers. The exponents of MXFP4
 * blocks are 96 to 127: subnormal scales would take more than half of the time. */
static mp_tensor make_weights(bench *b) {
    const mp_dtype_row *row = mp_dtype_get(b->dtype);
    const size_t count = (size_t)b->N * (size_t)b->K, bytes = count / (size_t)row->items * (size_t)row->bytes;
    uint8_t *at = b->weights = must(bytes);
    if (b->dtype == MP_F32)
        fill(b->weights, (int64_t)count);
    for (size_t i = 0; b->dtype != MP_F32 && i < bytes; i++)
        at[i] = (uint8_t)(i * 2654435761u >> 24 & 63);
    for (size_t i = 0; b->dtype == MP_MXFP4 && i < bytes; i += (size_t)row->bytes)
        at[i] = (uint8_t)(96 + at[i] / 2);
    return (mp_tensor){.dtype = b->dtype, .ndim = 2, .shape = {b->N, b->K}, .data = at, .nbytes = bytes};
}

static void measure(bench *b, const char *name, double seconds, size_t pool) {
    const mp_tensor src = make_weights(b);
    mp_wmat_init(&b->w, b->kind, b->N, b->K);
    const size_t bytes = mp_wmat_bytes(&b->w);
    b->copies = pool > bytes ? (int)(pool / bytes) : 1;
    b->w.data = must(bytes * (size_t)b->copies + MP_WMAT_SLACK);
    mp_wmat_pack(&b->w, &src, 0, b->w.panels); /* warm-up: faults in the pages */
    double packing = now();
    mp_wmat_pack(&b->w, &src, 0, b->w.panels);
    packing = now() - packing;
    for (int c = 1; c < b->copies; c++)
        memcpy(b->w.data + (size_t)c * bytes, b->w.data, bytes);
    b->in = must(sizeof(float) * (size_t)b->M * (size_t)b->K);
    fill(b->in, (int64_t)b->M * b->K);
    void *memory = must(mp_acts_bytes(mp_wmat_acts(b->kind), b->M, b->K));
    mp_acts_init(&b->x, mp_wmat_acts(b->kind), b->M, b->K, memory);
    mp_acts_fill(&b->x, b->in, b->K, 0, b->M);
    b->y = must(sizeof(float) * (size_t)b->M * (size_t)b->N);
    b->bias = must(sizeof(float) * (size_t)b->N);
    fill(b->bias, b->N);

    run(b, 1);
    double t = now();
    run(b, 1);
    t = now() - t;
    const int times =
        t > 0 && t < 0.002 ? (int)(0.002 / t) + 1 : 1; /* 2 ms rounds: short enough to miss interruptions */
    double best = 1e9;
    const double before = probe(b->kind), end = now() + seconds;
    do {
        t = now();
        run(b, times);
        t = (now() - t) / times;
        best = t < best ? t : best;
    } while (now() < end);
    const double after = probe(b->kind), peak = before > after ? before : after;
    const double rate = 2.0 * b->M * b->N * b->K * b->copies / best * 1e-9;
    printf("%-7s N%-5d K%-5d M%-4d %8.1f us %8.1f GFLOP/s %5.1f %% of %.0f  %6.1f GB/s  pack %.0f us\n", name, b->N,
           b->K, b->M, best / b->copies * 1e6, rate, 100 * rate / peak, peak, (double)bytes * b->copies / best * 1e-9,
           packing * 1e6);
    fflush(stdout);
    mp_free(b->weights);
    mp_free(b->w.data);
    mp_free(b->in);
    mp_free(memory);
    mp_free(b->y);
    mp_free(b->bias);
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

/* Measure attention of the last `rows` of `positions` tokens over `copies` caches in turn, with one KV head and `group`
 * query heads of size `dim`. */
static void measure_attention(mp_dtype dtype, int rows, int positions, int group, int dim, double seconds,
                              size_t pool) {
    const mp_kernels *call = mp_kernels_get();
    const bool integers = dtype != MP_F32, int8 = dtype == MP_I8;
    const int blocks = (positions + MP_KV_BLOCK - 1) / MP_KV_BLOCK, n = rows * group;
    const size_t bytes = mp_kv_bytes(dtype, dim), whole = 2 * bytes * (size_t)blocks;
    const int copies = pool > whole ? (int)(pool / whole) : 1;
    uint8_t *cache = must(whole * (size_t)copies);
    void **pointers = must(sizeof(void *) * 2 * (size_t)(blocks * copies));
    float *token = must(sizeof(float) * 2 * (size_t)dim), *q = must(sizeof(float) * (size_t)(n * dim));
    float *state_memory = must(sizeof(float) * (size_t)(MP_ATTN_ROWS * (dim + 2)));
    void *scratch = must(mp_attn_kv_scratch(dim));
    mp_attn_partial state = {state_memory, state_memory + MP_ATTN_ROWS, state_memory + 2 * MP_ATTN_ROWS};
    memset(cache, 0, whole * (size_t)copies);
    for (int c = 0; c < copies; c++)
        for (int t = 0; t < positions; t++) {
            void **k = pointers + 2 * blocks * c + t / MP_KV_BLOCK, **v = k + blocks;
            *k = cache + whole * (size_t)c + 2 * bytes * (size_t)(t / MP_KV_BLOCK);
            *v = (uint8_t *)*k + bytes;
            fill(token, 2 * dim);
            (int8 ? call->kv_store_i8
             : integers ? call->kv_store_i16
                        : call->kv_store)(token, token + dim, dim, dim, t % MP_KV_BLOCK, *k, *v);
        }
    fill(q, (int64_t)n * dim);
    for (int i = 0; i < n && integers; i++)
        call->attn_query_i16(q + i * dim, dim);
    mp_attn_kv a = {.q = q, .ldq = (int64_t)group * dim, .ldq_group = dim, .group = group, .k_dim = dim, .v_dim = dim,
                    .scale = 1 / sqrtf((float)dim), .pos0 = positions - rows};
    double best = 1e9;
    const double before = probe_attention(dtype), end = now() + seconds;
    do {
        const int times = 1 + 400000 / (n * positions * copies);
        double t = now();
        for (int i = 0; i < times; i++)
            for (int c = 0; c < copies; c++) {
                a.k_blocks = pointers + 2 * blocks * c;
                a.v_blocks = a.k_blocks + blocks;
                mp_attn_begin(n, dim, &state);
                (int8 ? call->attn_kv_i8
                 : integers ? call->attn_kv_i16
                            : call->attn_kv)(&a, rows, 0, blocks, &state, scratch);
            }
        t = (now() - t) / times / copies;
        best = t < best ? t : best;
    } while (now() < end);
    const double after = probe_attention(dtype), peak = before > after ? before : after;
    const double rate = 4.0 * n * positions * dim / best * 1e-9;
    printf("attn %s D%-3d %2d x %-2d over %-5d %8.2f us %8.1f GFLOP/s %5.1f %% of %.0f  %6.1f GB/s\n",
           int8 ? "i8 " : integers ? "i16" : "f32", dim, rows, group, positions, best * 1e6, rate,
           100 * rate / peak, peak, (double)whole / best * 1e-9);
    fflush(stdout);
    mp_free(cache);
    mp_free(pointers);
    mp_free(token);
    mp_free(q);
    mp_free(state_memory);
    mp_free(scratch);
}

static void all_attention(double seconds, size_t pool) {
    static const int heads[][2] = {{3, 64}, {7, 64}, {6, 128}, {2, 128}}, positions[] = {128, 512, 2048};
    static const mp_dtype types[] = {MP_F32, MP_I16, MP_I8};
    for (int type = 0; type < 3; type++)
        for (int h = 0; h < 4; h++)
            for (int p = 0; p < 3; p++)
                for (int tile = 0; tile < 2; tile++)
                    measure_attention(types[type], tile ? MP_ATTN_ROWS / heads[h][0] : 1, positions[p],
                                      heads[h][0], heads[h][1], seconds, pool);
}

int main(int argc, char **argv) {
    static const char *const names[] = {"f32", "bf16", "i8", "plain"};
    static const mp_wkind kinds[] = {MP_W_F32, MP_W_BF16, MP_W_I8, MP_W_F32};
    const char *mask = "";
    mp_dtype quantised[16];
    int quantised_count = 0;
    bool want[4] = {false}, act = false, attention = false;
    int rows[32] = {8, 16, 64, 512}, row_count = 4, shapes[16][2] = {{1152, 384}, {1536, 384}, {384, 1536}},
        shape_count = 3;
    bool own_shapes = false;
    double seconds = 0.06;
    size_t pool = 0;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--act") == 0) {
            act = true;
            continue;
        }
        if (strcmp(argv[i], "--attention") == 0) {
            attention = true;
            continue;
        }
        if (strcmp(argv[i], "--kind") == 0) {
            for (int k = 0; k < 4; k++)
                want[k] |= strcmp(value, names[k]) == 0;
            bool mins;
            if (quantised_count < 16 && mp_dtype_from_name(value, &quantised[quantised_count]))
                quantised_count += mp_stored_block_group(quantised[quantised_count], &mins) != 0;
        } else if (strcmp(argv[i], "--mask") == 0) {
            mask = value;
        } else if (strcmp(argv[i], "--ms") == 0) {
            seconds = atof(value) * 1e-3;
        } else if (strcmp(argv[i], "--pool") == 0) {
            pool = (size_t)atoi(value) << 20;
        } else if (strcmp(argv[i], "--rows") == 0) {
            row_count = 0;
            for (const char *p = value; *p && row_count < 32; p = *p == ',' ? p + 1 : p)
                rows[row_count++] = (int)strtol(p, (char **)&p, 10);
        } else if (strcmp(argv[i], "--shape") == 0 && shape_count < 16) {
            shape_count = own_shapes ? shape_count : 0;
            own_shapes = true;
            if (sscanf(value, "%dx%d", &shapes[shape_count][0], &shapes[shape_count][1]) == 2)
                shape_count++;
        } else {
            fprintf(stderr, "unknown argument %s; see the head of bench_kernels.c\n", argv[i]);
            return 2;
        }
        i++;
    }
    mp_error error;
    if (mp_cpu_init(mask, &error) != MP_OK) {
        fprintf(stderr, "%s\n", error.message);
        return 2;
    }
    mp_kernels_init();
    printf("# %s, %s\n", mp_cpu_name(), mp_cpu_level());
    if (attention) {
        all_attention(seconds, pool);
        return 0;
    }
    if (want[3]) {
        const char *path = getenv("MPOOL_BLAS"), *why;
        mp_blas_set_path(path ? path : "");
        mp_blas_core(&why);
        printf("# %s\n", why);
    }
    for (int q = 0; q < quantised_count; q++)
        for (int s = 0; s < shape_count; s++)
            for (int r = 0; r < row_count; r++) {
                bench b = {.dtype = quantised[q], .M = rows[r], .N = shapes[s][0], .K = shapes[s][1], .act = act};
                mp_wmat_kind_for(b.dtype, MP_COMPUTE_AUTO, &b.kind);
                measure(&b, mp_dtype_get(b.dtype)->name, seconds, pool);
            }
    const bool some = want[0] || want[1] || want[2] || want[3] || quantised_count > 0;
    for (int k = 0; k < 4; k++) {
        if (some ? !want[k] : k == 3)
            continue;
        for (int s = 0; s < shape_count; s++)
            for (int r = 0; r < row_count; r++) {
                bench b = {.dtype = MP_F32, .kind = kinds[k], .M = rows[r], .N = shapes[s][0], .K = shapes[s][1],
                           .act = act, .plain = k == 3};
                measure(&b, names[k], seconds, pool);
            }
    }
    return 0;
}
