/* Vector operations of level avx512 (F, BW, DQ, VL): 16 float32 or 8 float64 lanes, 32 registers.
 *
 * max(a, b) gives b where either is NaN. choose(a, b, x, y) gives x where a < b, else y. below, keep_bits and add_bias
 * put -inf where the key is hidden, by a bias of -inf (a score of -inf and a bias of inf are NaN together); zero_hidden
 * and visible_bits (a bit a lane) take a score of -inf for a hidden key.
 * frac(x) = x - floor(x) and scale2(p, x) = p * 2^floor(x) make the exponential; x <= 0 or NaN, -inf included.
 */
#include <immintrin.h>

#include "compiler.h"

#define KEEP(v) ((void)0)

typedef __m512 vec_f32;
typedef __m512d vec_f64;

/* Scores: 8 keys x 3 vectors of queries, 24 accumulators + 3 queries + 1 broadcast. Output: 6 queries x 4 vectors of
 * columns, 24 + 4 + 1. Few queries: 4 keys x 4 queries, 16 + 4 + 4. */
enum {
    vec_f32_lanes = 16,
    vec_f32_key_tile = 8,
    vec_f32_query_vecs = 3,
    vec_f32_panel = 48,
    vec_f32_row_tile = 6,
    vec_f32_col_vecs = 4,
    vec_f32_few_rows = 4,
    vec_f32_few_keys = 4,
    vec_f32_few_part = 256,
    vec_f32_align_values = 0,
    vec_f64_lanes = 8,
    vec_f64_key_tile = 8,
    vec_f64_query_vecs = 3,
    vec_f64_panel = 24,
    vec_f64_row_tile = 6,
    vec_f64_col_vecs = 4,
    vec_f64_few_rows = 4,
    vec_f64_few_keys = 4,
    vec_f64_few_part = 256,
    vec_f64_align_values = 0
};

MHA_INLINE __mmask16 vec_f32_first(int64_t n) { return (__mmask16)((1u << n) - 1); }
MHA_INLINE vec_f32 vec_f32_zero(void) { return _mm512_setzero_ps(); }
MHA_INLINE vec_f32 vec_f32_set1(float x) { return _mm512_set1_ps(x); }
MHA_INLINE vec_f32 vec_f32_load(const float *p) { return _mm512_loadu_ps(p); }
MHA_INLINE vec_f32 vec_f32_load_n(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(vec_f32_first(n), p); }
MHA_INLINE void vec_f32_store(float *p, vec_f32 a) { _mm512_storeu_ps(p, a); }
MHA_INLINE void vec_f32_store_n(float *p, vec_f32 a, int64_t n) { _mm512_mask_storeu_ps(p, vec_f32_first(n), a); }
MHA_INLINE vec_f32 vec_f32_add(vec_f32 a, vec_f32 b) { return _mm512_add_ps(a, b); }
MHA_INLINE vec_f32 vec_f32_sub(vec_f32 a, vec_f32 b) { return _mm512_sub_ps(a, b); }
MHA_INLINE vec_f32 vec_f32_mul(vec_f32 a, vec_f32 b) { return _mm512_mul_ps(a, b); }
MHA_INLINE vec_f32 vec_f32_div(vec_f32 a, vec_f32 b) { return _mm512_div_ps(a, b); }
MHA_INLINE vec_f32 vec_f32_fma(vec_f32 a, vec_f32 b, vec_f32 c) { return _mm512_fmadd_ps(a, b, c); }
MHA_INLINE vec_f32 vec_f32_max(vec_f32 a, vec_f32 b) { return _mm512_max_ps(a, b); }
MHA_INLINE vec_f32 vec_f32_choose(vec_f32 a, vec_f32 b, vec_f32 x, vec_f32 y)
{
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
}
MHA_INLINE vec_f32 vec_f32_below(vec_f32 score, vec_f32 key, vec_f32 visible)
{
    __mmask16 see = _mm512_cmp_ps_mask(key, visible, _CMP_LT_OQ);
    return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), see, score);
}
MHA_INLINE vec_f32 vec_f32_keep_bits(vec_f32 score, uint32_t bits)
{
    return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), (__mmask16)bits, score);
}
MHA_INLINE vec_f32 vec_f32_add_bias(vec_f32 score, vec_f32 bias)
{
    __m512 least = _mm512_set1_ps(-INFINITY),
           sum = _mm512_max_ps(_mm512_set1_ps(LOWEST_F32), _mm512_add_ps(score, bias));
    sum = _mm512_mask_min_ps(sum, _mm512_cmp_ps_mask(score, least, _CMP_EQ_OQ), least, sum);
    return _mm512_mask_mov_ps(sum, _mm512_cmp_ps_mask(bias, least, _CMP_EQ_OQ), least);
}
MHA_INLINE vec_f32 vec_f32_zero_hidden(vec_f32 weight, vec_f32 score)
{
    __mmask16 see = _mm512_cmp_ps_mask(score, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    return _mm512_maskz_mov_ps(see, weight);
}
MHA_INLINE uint32_t vec_f32_visible_bits(vec_f32 score)
{
    return _mm512_cmp_ps_mask(score, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
}
MHA_INLINE int vec_f32_any_nan(vec_f32 a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }
MHA_INLINE vec_f32 vec_f32_domain(vec_f32 x) { return x; }
MHA_INLINE vec_f32 vec_f32_frac(vec_f32 x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
MHA_INLINE vec_f32 vec_f32_scale2(vec_f32 p, vec_f32 x) { return _mm512_scalef_ps(p, x); }
MHA_INLINE float vec_f32_hmax(vec_f32 a) { return _mm512_reduce_max_ps(a); }
/* dst[i] = the sum of the lanes of the i-th argument; one order of summation for each. */
MHA_INLINE void vec_f32_hsum4(vec_f32 a, vec_f32 b, vec_f32 c, vec_f32 d, float *dst)
{
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512 s = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
    _mm_storeu_ps(dst, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
MHA_INLINE void vec_f32_transpose(vec_f32 r[16])
{
    __m512 t[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    }
}

MHA_INLINE vec_f32 vec_f32_of_bf16(__m256i a)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16));
}
MHA_INLINE vec_f32 vec_f32_of_i8(__m128i a) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(a)); }
MHA_INLINE vec_f32 vec_f32_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
MHA_INLINE vec_f32 vec_f32_load_f16_n(const uint16_t *p, int64_t n)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(vec_f32_first(n), p));
}
MHA_INLINE vec_f32 vec_f32_load_bf16(const uint16_t *p)
{
    return vec_f32_of_bf16(_mm256_loadu_si256((const __m256i *)p));
}
MHA_INLINE vec_f32 vec_f32_load_bf16_n(const uint16_t *p, int64_t n)
{
    return vec_f32_of_bf16(_mm256_maskz_loadu_epi16(vec_f32_first(n), p));
}
MHA_INLINE vec_f32 vec_f32_load_i8(const int8_t *p) { return vec_f32_of_i8(_mm_loadu_si128((const __m128i *)p)); }
MHA_INLINE vec_f32 vec_f32_load_i8_n(const int8_t *p, int64_t n)
{
    return vec_f32_of_i8(_mm_maskz_loadu_epi8(vec_f32_first(n), p));
}
/* Rounded to nearest, ties to even; a NaN stays one. */
MHA_INLINE void vec_f32_store_f16(uint16_t *p, vec_f32 a)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
MHA_INLINE void vec_f32_store_bf16(uint16_t *p, vec_f32 a)
{
    __m512i bits = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

MHA_INLINE __mmask8 vec_f64_first(int64_t n) { return (__mmask8)((1u << n) - 1); }
MHA_INLINE vec_f64 vec_f64_zero(void) { return _mm512_setzero_pd(); }
MHA_INLINE vec_f64 vec_f64_set1(double x) { return _mm512_set1_pd(x); }
MHA_INLINE vec_f64 vec_f64_load(const double *p) { return _mm512_loadu_pd(p); }
MHA_INLINE vec_f64 vec_f64_load_n(const double *p, int64_t n) { return _mm512_maskz_loadu_pd(vec_f64_first(n), p); }
MHA_INLINE void vec_f64_store(double *p, vec_f64 a) { _mm512_storeu_pd(p, a); }
MHA_INLINE void vec_f64_store_n(double *p, vec_f64 a, int64_t n) { _mm512_mask_storeu_pd(p, vec_f64_first(n), a); }
MHA_INLINE vec_f64 vec_f64_add(vec_f64 a, vec_f64 b) { return _mm512_add_pd(a, b); }
MHA_INLINE vec_f64 vec_f64_sub(vec_f64 a, vec_f64 b) { return _mm512_sub_pd(a, b); }
MHA_INLINE vec_f64 vec_f64_mul(vec_f64 a, vec_f64 b) { return _mm512_mul_pd(a, b); }
MHA_INLINE vec_f64 vec_f64_div(vec_f64 a, vec_f64 b) { return _mm512_div_pd(a, b); }
MHA_INLINE vec_f64 vec_f64_fma(vec_f64 a, vec_f64 b, vec_f64 c) { return _mm512_fmadd_pd(a, b, c); }
MHA_INLINE vec_f64 vec_f64_max(vec_f64 a, vec_f64 b) { return _mm512_max_pd(a, b); }
MHA_INLINE vec_f64 vec_f64_choose(vec_f64 a, vec_f64 b, vec_f64 x, vec_f64 y)
{
    return _mm512_mask_mov_pd(y, _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ), x);
}
MHA_INLINE vec_f64 vec_f64_below(vec_f64 score, vec_f64 key, vec_f64 visible)
{
    __mmask8 see = _mm512_cmp_pd_mask(key, visible, _CMP_LT_OQ);
    return _mm512_mask_mov_pd(_mm512_set1_pd(-INFINITY), see, score);
}
MHA_INLINE vec_f64 vec_f64_keep_bits(vec_f64 score, uint32_t bits)
{
    return _mm512_mask_mov_pd(_mm512_set1_pd(-INFINITY), (__mmask8)bits, score);
}
MHA_INLINE vec_f64 vec_f64_add_bias(vec_f64 score, vec_f64 bias)
{
    __m512d least = _mm512_set1_pd(-INFINITY), sum = _mm512_max_pd(_mm512_set1_pd(LOWEST_F64), _mm512_add_pd(score,
                                                                                                             bias));
    sum = _mm512_mask_min_pd(sum, _mm512_cmp_pd_mask(score, least, _CMP_EQ_OQ), least, sum);
    return _mm512_mask_mov_pd(sum, _mm512_cmp_pd_mask(bias, least, _CMP_EQ_OQ), least);
}
MHA_INLINE vec_f64 vec_f64_zero_hidden(vec_f64 weight, vec_f64 score)
{
    __mmask8 see = _mm512_cmp_pd_mask(score, _mm512_set1_pd(-INFINITY), _CMP_NEQ_UQ);
    return _mm512_maskz_mov_pd(see, weight);
}
MHA_INLINE uint32_t vec_f64_visible_bits(vec_f64 score)
{
    return _mm512_cmp_pd_mask(score, _mm512_set1_pd(-INFINITY), _CMP_NEQ_UQ);
}
MHA_INLINE int vec_f64_any_nan(vec_f64 a) { return _mm512_cmp_pd_mask(a, a, _CMP_UNORD_Q) != 0; }
MHA_INLINE vec_f64 vec_f64_domain(vec_f64 x) { return x; }
MHA_INLINE vec_f64 vec_f64_frac(vec_f64 x) { return _mm512_reduce_pd(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
MHA_INLINE vec_f64 vec_f64_scale2(vec_f64 p, vec_f64 x) { return _mm512_scalef_pd(p, x); }
MHA_INLINE double vec_f64_hmax(vec_f64 a) { return _mm512_reduce_max_pd(a); }
MHA_INLINE void vec_f64_hsum4(vec_f64 a, vec_f64 b, vec_f64 c, vec_f64 d, double *dst)
{
    __m256d a4 = _mm256_add_pd(_mm512_castpd512_pd256(a), _mm512_extractf64x4_pd(a, 1));
    __m256d b4 = _mm256_add_pd(_mm512_castpd512_pd256(b), _mm512_extractf64x4_pd(b, 1));
    __m256d c4 = _mm256_add_pd(_mm512_castpd512_pd256(c), _mm512_extractf64x4_pd(c, 1));
    __m256d d4 = _mm256_add_pd(_mm512_castpd512_pd256(d), _mm512_extractf64x4_pd(d, 1));
    __m256d ab = _mm256_hadd_pd(a4, b4), cd = _mm256_hadd_pd(c4, d4);
    __m256d low = _mm256_permute2f128_pd(ab, cd, 0x20), high = _mm256_permute2f128_pd(ab, cd, 0x31);
    _mm256_storeu_pd(dst, _mm256_add_pd(low, high));
}
MHA_INLINE void vec_f64_transpose(vec_f64 r[8])
{
    __m512d t[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm512_unpacklo_pd(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_pd(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        r[i] = _mm512_shuffle_f64x2(t[i], t[i + 2], 0x88);
        r[i + 2] = _mm512_shuffle_f64x2(t[i], t[i + 2], 0xdd);
        r[i + 4] = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0x88);
        r[i + 6] = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0xdd);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f64x2(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f64x2(r[i], r[i + 4], 0xdd);
    }
    UNROLL for (int i = 0; i < 8; i++) r[i] = t[i];
}
MHA_INLINE vec_f64 vec_f64_of_bf16(__m128i a)
{
    return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)));
}
MHA_INLINE vec_f64 vec_f64_of_f16(__m128i a) { return _mm512_cvtps_pd(_mm256_cvtph_ps(a)); }
MHA_INLINE vec_f64 vec_f64_of_i8(__m128i a) { return _mm512_cvtepi32_pd(_mm256_cvtepi8_epi32(a)); }
MHA_INLINE vec_f64 vec_f64_load_f16(const uint16_t *p) { return vec_f64_of_f16(_mm_loadu_si128((const __m128i *)p)); }
MHA_INLINE vec_f64 vec_f64_load_f16_n(const uint16_t *p, int64_t n)
{
    return vec_f64_of_f16(_mm_maskz_loadu_epi16(vec_f64_first(n), p));
}
MHA_INLINE vec_f64 vec_f64_load_bf16(const uint16_t *p) { return vec_f64_of_bf16(_mm_loadu_si128((const __m128i *)p)); }
MHA_INLINE vec_f64 vec_f64_load_bf16_n(const uint16_t *p, int64_t n)
{
    return vec_f64_of_bf16(_mm_maskz_loadu_epi16(vec_f64_first(n), p));
}
MHA_INLINE vec_f64 vec_f64_load_i8(const int8_t *p) { return vec_f64_of_i8(_mm_loadl_epi64((const __m128i *)p)); }
MHA_INLINE vec_f64 vec_f64_load_i8_n(const int8_t *p, int64_t n)
{
    return vec_f64_of_i8(_mm_maskz_loadu_epi8(vec_f64_first(n), p));
}
