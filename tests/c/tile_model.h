/* tile_model.h: the tile unit of AMX in plain C, for tests on machines without it.
 *
 *     #include "tile_model.h"
 *     #include "kernels/x86/amx_dense.c"     runs on the model
 *
 * The tile intrinsics that the kernels use become calls of the model, vcvtne2ps2bf16 becomes plain AVX-512, and the
 * target region of AMX becomes that of AVX-512. The kernels then need AVX-512 (F BW VL DQ) only.
 *
 * Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (LDTILECFG, TILELOADD, TILESTORED,
 * TILEZERO, TILERELEASE, TDPBF16PS, TDPBSUD, TDPBSSD, VCVTNE2PS2BF16) and volume 1, chapter "Programming with Intel
 * AMX". Everything that raises an exception there ends the test with a message, and so does what the kernels never
 * need: a configuration that continues an interrupted load (start_row). */
#ifndef MP_TILE_MODEL_H
#define MP_TILE_MODEL_H

#include <stdbool.h>
#include <stdint.h>

/* The instructions. `file` and `line`: where the kernel has them. */
void tile_model_configure(const void *config, const char *file, int line);
void tile_model_release(void);
void tile_model_zero(int tile, const char *file, int line);
void tile_model_load(int tile, const void *base, int64_t stride, bool streamed, const char *file, int line);
void tile_model_store(int tile, void *base, int64_t stride, const char *file, int line);
void tile_model_dpbf16ps(int to, int a, int b, const char *file, int line); /* to += a * b, bfloat16 pairs */
void tile_model_dpbsud(int to, int a, int b, const char *file, int line);   /* to += a * b, bytes: signed, unsigned */
void tile_model_dpbssd(int to, int a, int b, const char *file, int line);   /* to += a * b, bytes: signed, signed */

#if defined(__x86_64__) && !defined(MP_TILE_MODEL_ITSELF)
#include <immintrin.h>

#include "kernels/simd/target.h"

#undef MP_TARGET_AMX_BEGIN
#define MP_TARGET_AMX_BEGIN MP_TARGET_AVX512_BEGIN

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#undef _tile_dpbssd
#undef _mm512_cvtne2ps_pbh
#define _tile_loadconfig(config)              tile_model_configure(config, __FILE__, __LINE__)
#define _tile_release()                       tile_model_release()
#define _tile_zero(tile)                      tile_model_zero(tile, __FILE__, __LINE__)
#define _tile_loadd(tile, base, stride)       tile_model_load(tile, base, stride, false, __FILE__, __LINE__)
#define _tile_stream_loadd(tile, base, stride) tile_model_load(tile, base, stride, true, __FILE__, __LINE__)
#define _tile_stored(tile, base, stride)      tile_model_store(tile, base, stride, __FILE__, __LINE__)
#define _tile_dpbf16ps(to, a, b)              tile_model_dpbf16ps(to, a, b, __FILE__, __LINE__)
#define _tile_dpbsud(to, a, b)                tile_model_dpbsud(to, a, b, __FILE__, __LINE__)
#define _tile_dpbssd(to, a, b)                tile_model_dpbssd(to, a, b, __FILE__, __LINE__)
#define _mm512_cvtne2ps_pbh(high, low)        tile_model_round_pairs(high, low)

MP_TARGET_AVX512_BEGIN
/* Round to bfloat16, to nearest even. Denormals become zeros with their sign, NaN becomes quiet. */
static MP_INLINE __m256i tile_model_round(__m512 x) {
    const __m512i u = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i y = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 small = _mm512_testn_epi32_mask(u, _mm512_set1_epi32(0x7f800000));
    y = _mm512_mask_and_epi32(y, small, u, _mm512_set1_epi32((int)0x80000000u));
    y = _mm512_mask_or_epi32(y, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(y, 16));
}

static MP_INLINE __m512i tile_model_round_pairs(__m512 high, __m512 low) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(tile_model_round(low)), tile_model_round(high), 1);
}
MP_TARGET_END
#endif

#endif
