/* test_kernels_ranges.c: products of no rows or no panels write nothing; the types that a computation uses; the kernel
 * and the initial state of attention. */
#include "kernel_test.h"
#include "kernels/attention_scratch.h"

enum { ROWS = 40, OUTPUTS = 1024, INPUTS = 1536 };

typedef struct product {
    mp_wmat w;
    mp_acts x;
    void *memory;
} product;

static product product_of(mp_wkind kind) {
    product p = {0};
    const mp_akind acts = mp_wmat_acts(kind);
    static float rows[ROWS * INPUTS];
    mp_wmat_init(&p.w, kind, OUTPUTS, INPUTS);
    p.w.data = kt_alloc(mp_wmat_bytes(&p.w));
    memset(p.w.data, 0, mp_wmat_bytes(&p.w));
    p.memory = kt_alloc(mp_acts_bytes(acts, ROWS, INPUTS) + 64);
    mp_acts_init(&p.x, acts, ROWS, INPUTS, p.memory);
    mp_acts_fill(&p.x, rows, INPUTS, 0, ROWS);
    return p;
}

static void drop(product *p) {
    kt_free(p->w.data);
    kt_free(p->memory);
}

/* A thread may get no rows or no panels of a product, also of one whose weights are larger than the cache. */
MP_TEST(kernels_products_of_empty_ranges) {
    static const int ranges[][4] = {{0, 0, 0, 32}, {17, 17, 0, 32}, {ROWS, ROWS, 0, 32}, {0, ROWS, 0, 0},
                                    {0, ROWS, 9, 9}, {0, ROWS, 32, 32}, {5, 5, 32, 32}};
    float *y = kt_alloc(sizeof(float) * ROWS * OUTPUTS);
    for (int i = 0; i < KT_MASKS; i++) {
        if (!kt_use(kt_masks[i]))
            continue;
        for (int kind = 0; kind < MP_W_KIND_COUNT; kind++) {
            product p = product_of((mp_wkind)kind);
            for (int j = 0; j < ROWS * OUTPUTS; j++)
                y[j] = -77.0f;
            for (size_t r = 0; r < sizeof ranges / sizeof *ranges; r++)
                mp_gemm(&p.w, &p.x, ranges[r][0], ranges[r][1], ranges[r][2], ranges[r][3], NULL, y, OUTPUTS);
            for (int j = 0; j < ROWS * OUTPUTS; j++)
                if (y[j] != -77.0f)
                    MP_FAIL("%s, kind %d: output %d was written", kt_masks[i], kind, j);
            static const mp_akind outs[] = {MP_A_BF16, MP_A_Q8};
            for (int o = 0; o < 2; o++) {
                const size_t bytes = mp_acts_bytes(outs[o], ROWS, OUTPUTS);
                uint8_t *memory = kt_alloc(bytes), *before = kt_alloc(bytes);
                mp_acts out;
                mp_acts_init(&out, outs[o], ROWS, OUTPUTS, memory);
                memset(memory, 0xee, bytes);
                memcpy(before, memory, bytes);
                const mp_gemm_part part = {.w = &p.w, .x = &p.x};
                for (size_t r = 0; mp_gemm_acts_can(OUTPUTS, outs[o]) && r < sizeof ranges / sizeof *ranges; r++)
                    mp_gemm_acts(&part, 1, MP_ACT_NONE, ranges[r][0], ranges[r][1], ranges[r][2], ranges[r][3], &out);
                MP_CHECK(memcmp(memory, before, bytes) == 0);
                kt_free(memory);
                kt_free(before);
            }
            drop(&p);
        }
    }
    kt_free(y);
    kt_use("");
}

/* Unless a type is asked for, float weights are multiplied in BF16 where the CPU has instructions for it, else in
 * FP32. */
MP_TEST(kernels_types_of_computations) {
    static const struct { mp_compute compute; const char *name; } rows[] = {
        {MP_COMPUTE_F32, "float32"}, {MP_COMPUTE_BF16, "bfloat16"}, {MP_COMPUTE_I8, "int8"}};
    for (int i = 0; i < KT_MASKS; i++) {
        if (!kt_use(kt_masks[i]))
            continue;
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
            MP_CHECK_INT(mp_resolve_compute(rows[r].compute), rows[r].compute);
            MP_CHECK_STR(mp_compute_name(rows[r].compute), rows[r].name);
        }
        MP_CHECK_STR(mp_compute_name(MP_COMPUTE_AUTO), "stored");
        mp_wkind kind;
        MP_CHECK(mp_wmat_kind_for(MP_BF16, MP_COMPUTE_AUTO, &kind));
        MP_CHECK_INT(mp_resolve_compute(MP_COMPUTE_AUTO), kind == MP_W_BF16 ? MP_COMPUTE_BF16 : MP_COMPUTE_F32);
        const bool has = strcmp(kt_masks[i], "avx512bf16") == 0 || strncmp(kt_masks[i], "amx", 3) == 0 ||
                         strcmp(kt_masks[i], "bf16") == 0;
        if (strcmp(kt_masks[i], "amx model") != 0) /* AVX-512 with or without BF16 */
            MP_CHECK_INT(mp_resolve_compute(MP_COMPUTE_AUTO), has ? MP_COMPUTE_BF16 : MP_COMPUTE_F32);
    }
    kt_use("");
}

/* The rounding of attention depends on the kernel, so the sizes that use tiles must not change unnoticed. */
MP_TEST(kernels_attention_by_size) {
    static const struct { mp_compute compute; int T, D; bool tiles; } cases[] = {
        {MP_COMPUTE_BF16, 48, 64, true},   {MP_COMPUTE_BF16, 47, 64, false},
        {MP_COMPUTE_BF16, 4096, 8, true},  {MP_COMPUTE_BF16, 48, MP_ATTN_BF16_DEPTH, true},
        {MP_COMPUTE_BF16, 48, MP_ATTN_BF16_DEPTH + 8, false}, {MP_COMPUTE_BF16, 48, 60, false},
        {MP_COMPUTE_BF16, 48, 63, false},  {MP_COMPUTE_F32, 512, 64, false},
        {MP_COMPUTE_AUTO, 512, 64, false},
    };
    static const struct { int T, D; bool biased, integers; } bytes[] = {
        {48, 64, false, true},  {47, 64, false, false}, {88, 32, false, true},   {87, 32, false, false},
        {47, 512, false, false}, {64, 512, false, true}, {64, 513, false, false}, {512, 63, false, true},
        {512, 64, true, false}, {8192, 1, false, true},
    };
    for (int i = 0; i < KT_MASKS; i++) {
        if (!kt_use(kt_masks[i]))
            continue;
        const mp_kernels *k = mp_kernels_get();
        const bool has = mp_cpu_features() & MP_CPU_AVX512_BF16 || strcmp(kt_masks[i], "amx model") == 0;
        for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
            if (mp_attn_full_for(cases[c].compute, cases[c].T, cases[c].D, false) !=
                (has && cases[c].tiles ? k->attn_full_bf16 : k->attn_full))
                MP_FAIL("%s: %s, T=%d D=%d", kt_masks[i], mp_compute_name(cases[c].compute), cases[c].T, cases[c].D);
        for (size_t c = 0; c < sizeof bytes / sizeof *bytes; c++)
            if (mp_attn_full_for(MP_COMPUTE_I8, bytes[c].T, bytes[c].D, bytes[c].biased) !=
                (bytes[c].integers ? mp_attn_full_i16 : k->attn_full))
                MP_FAIL("%s: int8, T=%d D=%d", kt_masks[i], bytes[c].T, bytes[c].D);
    }
    kt_use("");
}

/* Each row of a new state has seen no key, whatever the memory contained, and nothing behind the state is written. */
MP_TEST(kernels_attention_begins_without_keys) {
    for (int rows = 1; rows <= 9; rows++)
        for (int v_dim = 16; v_dim <= 48; v_dim += 16) {
            mp_attn_partial p = {kt_alloc(sizeof(float) * (size_t)(rows + 1)),
                                 kt_alloc(sizeof(float) * (size_t)(rows + 1)),
                                 kt_alloc(sizeof(float) * (size_t)((rows + 1) * v_dim))};
            for (int i = 0; i < (rows + 1) * v_dim; i++)
                p.o[i] = 7.0f;
            for (int i = 0; i <= rows; i++)
                p.m[i] = p.l[i] = 7.0f;
            mp_attn_begin(rows, v_dim, &p);
            for (int i = 0; i < rows; i++)
                MP_CHECK(p.m[i] == -INFINITY && p.l[i] == 0.0f);
            for (int i = 0; i < rows * v_dim; i++)
                MP_CHECK(p.o[i] == 0.0f);
            MP_CHECK(p.m[rows] == 7.0f && p.l[rows] == 7.0f && p.o[rows * v_dim] == 7.0f);
            kt_free(p.m), kt_free(p.l), kt_free(p.o);
        }
}

/* The scratch of a number of keys is enough for every smaller number. The parts of each kernel follow one another. */
MP_TEST(kernels_attention_scratch) {
    static const int heads[] = {8, 40, 64, 256, MP_ATTN_BF16_DEPTH};
    mp_kernels_init();
    for (int i = 0; i < 5; i++)
        for (int T = 1, D = heads[i]; T <= 2200; T++) {
            const mp_attn_full_layout full = mp_attn_full_plan(T, D);
            const mp_attn_bf16_layout bf16 = mp_attn_bf16_plan(T, D);
            const mp_attn_full_i16_layout i16 = mp_attn_full_i16_plan(T, D);
            const size_t keys = (size_t)(T + 31) / 32 * 32, depth = (size_t)(D + 31) / 32 * 32, whole = sizeof(float);
            MP_CHECK_INT(full.v, whole * keys * (size_t)D);
            MP_CHECK_INT(full.scores - full.v, whole * keys * ((size_t)(D + 15) / 16 * 16));
            MP_CHECK_INT(full.sums - full.scores, whole * keys * 48);
            MP_CHECK_INT(full.bytes - full.sums, whole * 48 * ((size_t)(D + 15) / 16 * 16));
            MP_CHECK_INT(bf16.v, bf16.k_panel * (keys / 32));
            MP_CHECK_INT(bf16.scores - bf16.v, bf16.v_panel * (depth / 32));
            MP_CHECK_INT(bf16.p - bf16.scores, whole * 32 * keys);
            MP_CHECK_INT(bf16.q - bf16.p, sizeof(uint16_t) * 32 * (keys + (keys % 1024 ? 0 : 32)));
            MP_CHECK_INT(bf16.bytes - bf16.q, sizeof(uint16_t) * 32 * depth + MP_WMAT_SLACK);
            const size_t bytes = mp_attn_full_scratch(T, D);
            MP_CHECK(bytes >= full.bytes && bytes >= bf16.bytes);
            MP_CHECK(bytes >= i16.bytes || mp_attn_full_for(MP_COMPUTE_I8, T, D, false) != mp_attn_full_i16);
            const size_t blocks = (size_t)(T + 63) / 64, wide = (size_t)(D + 15) / 16 * 16;
            MP_CHECK_INT(i16.v, mp_kv_bytes(MP_I16, D) * blocks);
            MP_CHECK_INT(i16.k_list - i16.v, mp_kv_bytes(MP_I16, (int)wide) * blocks);
            MP_CHECK_INT(i16.v_list - i16.k_list, (sizeof(void *) * blocks + 63) / 64 * 64);
            MP_CHECK_INT(i16.queries - i16.v_list, (sizeof(void *) * blocks + 63) / 64 * 64);
            MP_CHECK_INT(i16.m - i16.queries, whole * 64 * (size_t)D);
            MP_CHECK_INT(i16.o - i16.m, whole * 2 * 64);
            MP_CHECK_INT(i16.kv - i16.o, whole * 64 * wide);
            MP_CHECK_INT(i16.bytes - i16.kv, mp_attn_kv_scratch((int)wide));
            MP_CHECK(T == 1 || bytes >= mp_attn_full_scratch(T - 1, D));
        }
}
