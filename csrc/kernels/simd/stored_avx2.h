/* stored_avx2.h: products of weight rows as they are stored (slots stored_* of kernels.h), on 256-bit vectors.
 *
 * Include it inside a target region with AVX2, FMA and F16C. Eight weight rows are computed at a time; lane r of a
 * vector of sums belongs to row r. The integer products of a block are added within each row and then collected into
 * one vector, so that the FMAs over the blocks are those of quant_tmpl.h, lane by lane: the bits are the same.
 *
 * The includer defines:
 *   s_dot(w, a)        8 int32: sums of four neighbouring products of unsigned w, at most 128, with signed a
 *   s_short_dot(w, a)  the same for w of at most 24, or if S_SHORT, 16 int16: sums of two products */
#ifndef MP_KERNELS_SIMD_STORED_AVX2_H
#define MP_KERNELS_SIMD_STORED_AVX2_H

enum { S_ROWS = 8 };

typedef struct s_acts { /* one row of activations, from the first input of a stored block on */
    const int8_t *q;
    const float *scale;
    const int32_t *sum16;
} s_acts;

/* ---- collecting -------------------------------------------------------------------------------------------------- */

/* Returns in each 128-bit half h: the sums of the half h of v[0], v[1], v[2], v[3]. */
static MP_INLINE __m256i s_add4(const __m256i *v) {
    return _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
}

/* Lane r: the sum of inputs 0-15 (h = 0) or 16-31 (h = 1) of row r. first, second: s_add4 of rows 0-3 and 4-7. */
static MP_INLINE __m256i s_half(__m256i first, __m256i second, int h) {
    return h ? _mm256_permute2x128_si256(first, second, 0x31) : _mm256_permute2x128_si256(first, second, 0x20);
}

/* Returns in lane r the sum of v[r]. */
static MP_INLINE __m256i s_collect(const __m256i *v) {
    const __m256i first = s_add4(v), second = s_add4(v + 4);
    return _mm256_add_epi32(s_half(first, second, 0), s_half(first, second, 1));
}

/* The same for results of s_short_dot, w of at most 15: eight short sums can be added in 16 bits. */
static MP_INLINE __m256i s_collect4(const __m256i *v) {
    if (!S_SHORT)
        return s_collect(v);
    const __m256i first = _mm256_hadd_epi16(_mm256_hadd_epi16(v[0], v[1]), _mm256_hadd_epi16(v[2], v[3]));
    const __m256i second = _mm256_hadd_epi16(_mm256_hadd_epi16(v[4], v[5]), _mm256_hadd_epi16(v[6], v[7]));
    const __m256i sums = _mm256_hadd_epi16(first, second); /* each 128-bit half has one sum of each row */
    return _mm256_add_epi32(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(sums)),
                            _mm256_cvtepi16_epi32(_mm256_extracti128_si256(sums, 1)));
}

/* ---- reading eight rows ------------------------------------------------------------------------------------------ */

static MP_INLINE int32_t s_word(const uint8_t *from) {
    int32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

static MP_INLINE __m256i s_words(const uint8_t *const *at, size_t offset) {
    return _mm256_setr_epi32(s_word(at[0] + offset), s_word(at[1] + offset), s_word(at[2] + offset),
                             s_word(at[3] + offset), s_word(at[4] + offset), s_word(at[5] + offset),
                             s_word(at[6] + offset), s_word(at[7] + offset));
}

static MP_INLINE int16_t s_short(const uint8_t *from) {
    int16_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

static MP_INLINE __m256 s_halves(const uint8_t *const *at, size_t offset) {
    return _mm256_cvtph_ps(_mm_setr_epi16(s_short(at[0] + offset), s_short(at[1] + offset), s_short(at[2] + offset),
                                          s_short(at[3] + offset), s_short(at[4] + offset), s_short(at[5] + offset),
                                          s_short(at[6] + offset), s_short(at[7] + offset)));
}

/* Low and high halves of the words as floats. */
static MP_INLINE void s_split_halves(__m256i words, __m256 *low, __m256 *high) {
    const __m256i pairs = _mm256_packus_epi32(_mm256_and_si256(words, _mm256_set1_epi32(0xffff)),
                                              _mm256_srli_epi32(words, 16));
    const __m256i sorted = _mm256_permute4x64_epi64(pairs, 0xd8);
    *low = _mm256_cvtph_ps(_mm256_castsi256_si128(sorted));
    *high = _mm256_cvtph_ps(_mm256_extracti128_si256(sorted, 1));
}

static MP_INLINE __m256i s_load(const void *from) { return _mm256_loadu_si256(from); }

/* ---- one stored block into the accumulator ----------------------------------------------------------------------- */

static MP_INLINE __m256 s_add(__m256i sum, __m256 d, float sa, __m256 f) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(d, _mm256_set1_ps(sa)), f);
}

/* Q4_K and Q5_K: block s of a superblock, from its sums. words: the 12 bytes of 6-bit scales and minima. */
static MP_INLINE __m256 s_add_super(int s, __m256i sum, const __m256i *words, __m256 d, __m256 dmin, const s_acts *a,
                                    __m256 f) {
    const __m256i six = _mm256_set1_epi32(63), four = _mm256_set1_epi32(15), two = _mm256_set1_epi32(0x30);
    const int shift = 8 * (s % 4);
    __m256i sc, mn;
    if (s < 4) {
        sc = _mm256_and_si256(_mm256_srli_epi32(words[0], shift), six);
        mn = _mm256_and_si256(_mm256_srli_epi32(words[1], shift), six);
    } else {
        sc = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(words[2], shift), four),
                             _mm256_and_si256(_mm256_srli_epi32(words[0], shift + 2), two));
        mn = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(words[2], shift + 4), four),
                             _mm256_and_si256(_mm256_srli_epi32(words[1], shift + 2), two));
    }
    const float sa = a->scale[s], factor = sa * (float)(a->sum16[2 * s] + a->sum16[2 * s + 1]);
    f = s_add(sum, _mm256_mul_ps(d, _mm256_cvtepi32_ps(sc)), sa, f);
    return _mm256_fnmadd_ps(_mm256_mul_ps(dmin, _mm256_cvtepi32_ps(mn)), _mm256_set1_ps(factor), f);
}

/* Returns bit s of each byte, moved to bit 4. */
static MP_INLINE __m256i s_fifth(__m256i bits, int s) {
    const __m256i moved = s < 4 ? _mm256_slli_epi16(bits, 4 - s) : _mm256_srli_epi16(bits, s - 4);
    return _mm256_and_si256(moved, _mm256_set1_epi8(16));
}

/* Adds a superblock of Q4_K to f; if `fives`, of Q5_K, which has 32 bytes of fifth bits before the nibbles. */
static MP_INLINE __m256 s_super(int fives, const uint8_t *const *at, const s_acts *a, __m256 f) {
    const __m256i mask = _mm256_set1_epi8(15);
    const __m256i words[] = {s_words(at, 4), s_words(at, 8), s_words(at, 12)};
    __m256 d, dmin;
    s_split_halves(s_words(at, 0), &d, &dmin);
    MP_UNROLL
    for (int pair = 0; pair < 4; pair++) {
        const __m256i a0 = s_load(a->q + 64 * pair), a1 = s_load(a->q + 64 * pair + 32);
        __m256i low[S_ROWS], high[S_ROWS];
        MP_UNROLL
        for (int r = 0; r < S_ROWS; r++) {
            const __m256i x = s_load(at[r] + (fives ? 48 : 16) + 32 * pair), bits = s_load(at[r] + 16);
            const __m256i lower = _mm256_and_si256(x, mask), upper = _mm256_and_si256(_mm256_srli_epi16(x, 4), mask);
            low[r] = fives ? s_dot(_mm256_or_si256(lower, s_fifth(bits, 2 * pair)), a0) : s_short_dot(lower, a0);
            high[r] = fives ? s_dot(_mm256_or_si256(upper, s_fifth(bits, 2 * pair + 1)), a1) : s_short_dot(upper, a1);
        }
        const __m256i first = fives ? s_collect(low) : s_collect4(low);
        const __m256i second = fives ? s_collect(high) : s_collect4(high);
        f = s_add_super(2 * pair, first, words, d, dmin, a, f);
        f = s_add_super(2 * pair + 1, second, words, d, dmin, a, f);
    }
    return f;
}

static MP_INLINE __m256 s_q4_k(const uint8_t *const *at, const s_acts *a, int count, __m256 f) {
    (void)count;
    return s_super(0, at, a, f);
}

static MP_INLINE __m256 s_q5_k(const uint8_t *const *at, const s_acts *a, int count, __m256 f) {
    (void)count;
    return s_super(1, at, a, f);
}

static MP_INLINE __m256 s_q6_k(const uint8_t *const *at, const s_acts *a, int count, __m256 f) {
    (void)count;
    const __m256i four = _mm256_set1_epi8(15), two = _mm256_set1_epi8(0x30);
    const __m256 d = s_halves(at, 208);
    MP_UNROLL
    for (int s = 0; s < 8; s++) { /* block s: nibbles at 64 (s / 4) + 32 (s % 2), bits 4 and 5 at 128 + 32 (s / 4) */
        const __m256i q = s_load(a->q + 32 * s);
        __m256i part[S_ROWS];
        MP_UNROLL
        for (int r = 0; r < S_ROWS; r++) {
            __m256i x = s_load(at[r] + 64 * (s / 4) + 32 * (s % 2)), bits = s_load(at[r] + 128 + 32 * (s / 4));
            x = s % 4 < 2 ? x : _mm256_srli_epi16(x, 4);
            bits = s % 4 == 0   ? _mm256_slli_epi16(bits, 4)
                   : s % 4 == 1 ? _mm256_slli_epi16(bits, 2)
                   : s % 4 == 2 ? bits
                                : _mm256_srli_epi16(bits, 2);
            part[r] = s_dot(_mm256_or_si256(_mm256_and_si256(x, four), _mm256_and_si256(bits, two)), q);
        }
        const __m256i first = s_add4(part), second = s_add4(part + 4);
        const __m256i scales = s_words(at, 192 + 4 * (size_t)(s / 2));
        MP_UNROLL
        for (int h = 0; h < 2; h++) {
            const __m256i sc = _mm256_srai_epi32(_mm256_slli_epi32(scales, 24 - 16 * (s % 2) - 8 * h), 24);
            const __m256i sum = _mm256_sub_epi32(s_half(first, second, h), _mm256_set1_epi32(32 * a->sum16[2 * s + h]));
            f = s_add(sum, _mm256_mul_ps(d, _mm256_cvtepi32_ps(sc)), a->scale[s], f);
        }
    }
    return f;
}

/* Products of signed w: the sign moves to the activation. */
static MP_INLINE __m256i s_dot_signed(__m256i w, __m256i a) {
    return s_dot(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
}

static MP_INLINE __m256 s_q8_0(const uint8_t *const *at, const s_acts *a, int count, __m256 f) {
    (void)count;
    const __m256i q = s_load(a->q);
    __m256i part[S_ROWS];
    MP_UNROLL
    for (int r = 0; r < S_ROWS; r++)
        part[r] = s_dot_signed(s_load(at[r] + 2), q);
    return s_add(s_collect(part), s_halves(at, 0), a->scale[0], f);
}

/* ---- two stored blocks of 32 nibbles into the accumulator -------------------------------------------------------- */

/* The nibbles of blocks 0 and 1 as bytes; half h of a vector belongs to block h. */
typedef struct s_codes {
    __m256i low, high; /* inputs 0-15; inputs 16-31 */
} s_codes;

static MP_INLINE s_codes s_two(const uint8_t *first, const uint8_t *second) {
    const __m256i x = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)first)),
        _mm_loadu_si128((const __m128i *)(const void *)second), 1);
    const __m256i mask = _mm256_set1_epi8(15);
    return (s_codes){_mm256_and_si256(x, mask), _mm256_and_si256(_mm256_srli_epi16(x, 4), mask)};
}

/* Load the activations that belong to s_codes. If the number of blocks is odd, padding follows the last one
 * (mp_acts). */
static MP_INLINE s_codes s_two_acts(const s_acts *a) {
    const __m256i first = s_load(a->q), second = s_load(a->q + 32);
    return (s_codes){s_half(first, second, 0), s_half(first, second, 1)};
}

/* Partial sums of unsigned codes of at most 24. */
static MP_INLINE __m256i s_dot_codes(s_codes w, s_codes a) {
    const __m256i low = s_short_dot(w.low, a.low), high = s_short_dot(w.high, a.high);
    return S_SHORT ? _mm256_add_epi16(low, high) : _mm256_add_epi32(low, high);
}

/* Half h of *first and *second: the sums of block h of rows 0-3 and 4-7. v: results of s_dot_codes.
 * With S_SHORT, a sum has four products of at most 24 x 127, so two sums can be added in 16 bits. */
static MP_INLINE void s_collect_codes(const __m256i *v, __m256i *first, __m256i *second) {
    const __m256i one = _mm256_set1_epi16(1);
    if (!S_SHORT) {
        *first = s_add4(v);
        *second = s_add4(v + 4);
        return;
    }
    *first = _mm256_hadd_epi32(_mm256_madd_epi16(_mm256_hadd_epi16(v[0], v[1]), one),
                               _mm256_madd_epi16(_mm256_hadd_epi16(v[2], v[3]), one));
    *second = _mm256_hadd_epi32(_mm256_madd_epi16(_mm256_hadd_epi16(v[4], v[5]), one),
                                _mm256_madd_epi16(_mm256_hadd_epi16(v[6], v[7]), one));
}

/* Codes stand for value + offset. */
static MP_INLINE __m256i s_codes_sum(__m256i first, __m256i second, int h, int offset, const s_acts *a) {
    const int32_t sum = offset * (a->sum16[2 * h] + a->sum16[2 * h + 1]);
    return _mm256_sub_epi32(s_half(first, second, h), _mm256_set1_epi32(sum));
}

static MP_INLINE __m256 s_q4_0(const uint8_t *const *at, const s_acts *a, int count, __m256 f) {
    enum { OFFSET = 8, BYTES = 18 };
    const s_codes q = s_two_acts(a);
    __m256i part[S_ROWS], first, second;
    MP_UNROLL
    for (int r = 0; r < S_ROWS; r++)
        part[r] = s_dot_codes(s_two(at[r] + 2, at[r] + 2 + (count - 1) * BYTES), q);
    s_collect_codes(part, &first, &second);
    f = s_add(s_codes_sum(first, second, 0, OFFSET, a), s_halves(at, 0), a->scale[0], f);
    if (count == 2)
        f = s_add(s_codes_sum(first, second, 1, OFFSET, a), s_halves(at, BYTES), a->scale[1], f);
    return f;
}

/* The scales of MXFP4 are those of mp_mxfp4_scale. */
static MP_INLINE __m256 s_mxfp4_scales(const uint8_t *const *at, size_t offset) {
    const __m256i one = _mm256_set1_epi32(1);
    const __m256i exponent = _mm256_setr_epi32(at[0][offset], at[1][offset], at[2][offset], at[3][offset],
                                               at[4][offset], at[5][offset], at[6][offset], at[7][offset]);
    const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), exponent); /* exponents 0 and 1 */
    const __m256i usual = _mm256_slli_epi32(_mm256_sub_epi32(exponent, one), 23);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(tiny, usual, _mm256_cmpgt_epi32(exponent, one)));
}

static MP_INLINE __m256 s_mxfp4(const uint8_t *const *at, const s_acts *a, int count, __m256 f) {
    enum { OFFSET = 12, BYTES = 17 };
    const __m128i values = _mm_loadu_si128((const __m128i *)(const void *)mp_stored_table(MP_MXFP4));
    const __m256i table = _mm256_broadcastsi128_si256(_mm_add_epi8(values, _mm_set1_epi8(OFFSET)));
    const s_codes q = s_two_acts(a);
    __m256i part[S_ROWS], first, second;
    MP_UNROLL
    for (int r = 0; r < S_ROWS; r++) {
        s_codes w = s_two(at[r] + 1, at[r] + 1 + (count - 1) * BYTES);
        w.low = _mm256_shuffle_epi8(table, w.low);
        w.high = _mm256_shuffle_epi8(table, w.high);
        part[r] = s_dot_codes(w, q);
    }
    s_collect_codes(part, &first, &second);
    f = s_add(s_codes_sum(first, second, 0, OFFSET, a), s_mxfp4_scales(at, 0), a->scale[0], f);
    if (count == 2)
        f = s_add(s_codes_sum(first, second, 1, OFFSET, a), s_mxfp4_scales(at, BYTES), a->scale[1], f);
    return f;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Adds `count` stored blocks of eight rows to f. */
typedef __m256 s_blocks(const uint8_t *const *at, const s_acts *a, int count, __m256 f);

/* `items` inputs are stored in `bytes` bytes; `block` takes up to `most` blocks. While eight rows are computed, the
 * next eight are prefetched. */
static MP_INLINE void s_product(s_blocks *block, int most, int items, int bytes, const uint8_t *rows, size_t stride,
                                int n, const mp_acts *x, int m, float *y) {
    const int blocks = x->K / items, every = bytes < 64 ? 64 / bytes / most * most : most;
    assert(x->kind == MP_A_Q8 && x->K % items == 0 && 0 <= m && m < x->M && n > 0);
    for (int o = 0; o < n; o += S_ROWS) {
        const int count = n - o < S_ROWS ? n - o : S_ROWS;
        const uint8_t *at[S_ROWS];
        for (int r = 0; r < S_ROWS; r++) /* lanes without a row repeat the last one */
            at[r] = rows + (size_t)(o + (r < count ? r : count - 1)) * stride;
        s_acts a = {x->q + m * x->ldq, x->scale + m * (int64_t)(x->K / 32), x->sum + m * (int64_t)(x->K / 16)};
        __m256 f = _mm256_setzero_ps();
        for (int b = 0; b < blocks; b += most) {
            if (b % every == 0)
                for (int r = 0; r < S_ROWS; r++)
                    for (int i = 0; i < bytes; i += 64)
                        __builtin_prefetch(at[r] + S_ROWS * stride + i, 0, 3);
            if (b + most <= blocks)
                f = block(at, &a, most, f);
            else
                f = block(at, &a, 1, f);
            for (int r = 0; r < S_ROWS; r++)
                at[r] += most * bytes;
            a.q += most * items;
            a.scale += most * items / 32;
            a.sum16 += most * items / 16;
        }
        float out[S_ROWS];
        _mm256_storeu_ps(out, f);
        memcpy(y + o, out, (size_t)count * sizeof *y);
    }
}

#define S_PRODUCT(name, most, items, bytes)                                                                       \
    static void stored_##name(const uint8_t *rows, size_t stride, int n, const mp_acts *x, int m, float *y) {     \
        s_product(s_##name, most, items, bytes, rows, stride, n, x, m, y);                                        \
    }
S_PRODUCT(q4_0, 2, 32, 18)
S_PRODUCT(q8_0, 1, 32, 34)
S_PRODUCT(q4_k, 1, 256, 144)
S_PRODUCT(q5_k, 1, 256, 176)
S_PRODUCT(q6_k, 1, 256, 210)
S_PRODUCT(mxfp4, 2, 32, 17)
#undef S_PRODUCT

static void s_set_products(mp_kernel_table *table, const char *variant) {
    MP_SET(table, stored_q4_0, stored_q4_0, variant);
    MP_SET(table, stored_q8_0, stored_q8_0, variant);
    MP_SET(table, stored_q4_k, stored_q4_k, variant);
    MP_SET(table, stored_q5_k, stored_q5_k, variant);
    MP_SET(table, stored_q6_k, stored_q6_k, variant);
    MP_SET(table, stored_mxfp4, stored_mxfp4, variant);
}

#endif
