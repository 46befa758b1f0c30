/* Vector operations of level avx2 (AVX2, FMA, F16C): 8 float32 or 4 float64 lanes, 16 registers.
 *
 * max(a, b) gives b where either is NaN. choose(a, b, x, y) gives x where a < b, else y. below, keep_bits and add_bias
 * put -inf where the key is hidden, by a bias of -inf (a score of -inf and a bias of inf are NaN together); zero_hidden
 * and visible_bits (a bit a lane) take a score of -inf for a hidden key.
 * frac(x) = x - floor(x) and scale2(p, x) = p * 2^floor(x), for x in the domain that domain() clamps to: below it
 * 2^x is 0, so results under the smallest normal number are 0.
 */
#include <immintrin.h>

#include "compiler.h"

#define KEEP(v) IN_REGISTER("x", v) /* 16 registers: gcc would read keys again for each query */

typedef __m256 vec_f32;
typedef __m256d vec_f64;

/* Scores: 6 keys x 2 vectors of queries, 12 accumulators + 2 queries + 1 broadcast. Output: 6 queries x 2 vectors of
 * columns, 12 + 2 + 1. Few queries: 2 keys x 4 queries or 4 x 2, 8 + 2 + 1 or 8 + 4 + 1.
 * few_keys: of a tile of four queries. few_part: keys whose values are read for all columns before the next (256: all
 * of a block). align_values: values that lie across cache lines are copied. */
enum {
    vec_f32_lanes = 8,
    vec_f32_key_tile = 6,
    vec_f32_query_vecs = 2,
    vec_f32_panel = 48,
    vec_f32_row_tile = 6,
    vec_f32_col_vecs = 2,
    vec_f32_few_rows = 4,
    vec_f32_few_keys = 2,
    vec_f32_few_part = 32,
    vec_f32_align_values = 1,
    vec_f64_lanes = 4,
    vec_f64_key_tile = 6,
    vec_f64_query_vecs = 2,
    vec_f64_panel = 24,
    vec_f64_row_tile = 6,
    vec_f64_col_vecs = 2,
    vec_f64_few_rows = 4,
    vec_f64_few_keys = 2,
    vec_f64_few_part = 32,
    vec_f64_align_values = 1
};

MHA_INLINE __m256i vec_f32_first(int64_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
MHA_INLINE vec_f32 vec_f32_zero(void) { return _mm256_setzero_ps(); }
MHA_INLINE vec_f32 vec_f32_set1(float x) { return _mm256_set1_ps(x); }
MHA_INLINE vec_f32 vec_f32_load(const float *p) { return _mm256_loadu_ps(p); }
MHA_INLINE vec_f32 vec_f32_load_n(const float *p, int64_t n) { return _mm256_maskload_ps(p, vec_f32_first(n)); }
MHA_INLINE void vec_f32_store(float *p, vec_f32 a) { _mm256_storeu_ps(p, a); }
MHA_INLINE void vec_f32_store_n(float *p, vec_f32 a, int64_t n) { _mm256_maskstore_ps(p, vec_f32_first(n), a); }
MHA_INLINE vec_f32 vec_f32_add(vec_f32 a, vec_f32 b) { return _mm256_add_ps(a, b); }
MHA_INLINE vec_f32 vec_f32_sub(vec_f32 a, vec_f32 b) { return _mm256_sub_ps(a, b); }
MHA_INLINE vec_f32 vec_f32_mul(vec_f32 a, vec_f32 b) { return _mm256_mul_ps(a, b); }
MHA_INLINE vec_f32 vec_f32_div(vec_f32 a, vec_f32 b) { return _mm256_div_ps(a, b); }
MHA_INLINE vec_f32 vec_f32_fma(vec_f32 a, vec_f32 b, vec_f32 c) { return _mm256_fmadd_ps(a, b, c); }
MHA_INLINE vec_f32 vec_f32_max(vec_f32 a, vec_f32 b) { return _mm256_max_ps(a, b); }
MHA_INLINE vec_f32 vec_f32_choose(vec_f32 a, vec_f32 b, vec_f32 x, vec_f32 y)
{
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
MHA_INLINE vec_f32 vec_f32_below(vec_f32 score, vec_f32 key, vec_f32 visible)
{
    __m256 see = _mm256_cmp_ps(key, visible, _CMP_LT_OQ);
    return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), score, see);
}
MHA_INLINE vec_f32 vec_f32_keep_bits(vec_f32 score, uint32_t bits)
{
    __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i see = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), lane), lane);
    return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), score, _mm256_castsi256_ps(see));
}
MHA_INLINE vec_f32 vec_f32_add_bias(vec_f32 score, vec_f32 bias)
{
    __m256 least = _mm256_set1_ps(-INFINITY),
           sum = _mm256_max_ps(_mm256_set1_ps(LOWEST_F32), _mm256_add_ps(score, bias));
    sum = _mm256_blendv_ps(sum, _mm256_min_ps(least, sum), _mm256_cmp_ps(score, least, _CMP_EQ_OQ));
    return _mm256_blendv_ps(sum, least, _mm256_cmp_ps(bias, least, _CMP_EQ_OQ));
}
MHA_INLINE vec_f32 vec_f32_zero_hidden(vec_f32 weight, vec_f32 score)
{
    return _mm256_and_ps(weight, _mm256_cmp_ps(score, _mm256_set1_ps(-INFINITY), _CMP_NEQ_UQ));
}
MHA_INLINE uint32_t vec_f32_visible_bits(vec_f32 score)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(score, _mm256_set1_ps(-INFINITY), _CMP_NEQ_UQ));
}
MHA_INLINE int vec_f32_any_nan(vec_f32 a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0; }
MHA_INLINE vec_f32 vec_f32_domain(vec_f32 x) { return _mm256_max_ps(_mm256_set1_ps(-127), x); }
MHA_INLINE vec_f32 vec_f32_floor(vec_f32 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
MHA_INLINE vec_f32 vec_f32_frac(vec_f32 x) { return _mm256_sub_ps(x, vec_f32_floor(x)); }
MHA_INLINE vec_f32 vec_f32_scale2(vec_f32 p, vec_f32 x)
{
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(vec_f32_floor(x)), _mm256_set1_epi32(127));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
MHA_INLINE float vec_f32_hmax(vec_f32 a)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
/* dst[i] = the sum of the lanes of the i-th argument; one order of summation for each. */
MHA_INLINE void vec_f32_hsum4(vec_f32 a, vec_f32 b, vec_f32 c, vec_f32 d, float *dst)
{
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(dst, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
MHA_INLINE void vec_f32_transpose(vec_f32 r[8])
{
    __m256 t[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    UNROLL for (int i = 0; i < 8; i++) r[i] = t[i];
}

/* The first n elements, zeros behind them: there are no masked loads of so narrow ones. */
MHA_INLINE __m128i vec_first_16(const uint16_t *p, int64_t n)
{
    uint16_t lanes[8] = {0};
    for (int i = 0; i < 8; i++)
        if (i < n) lanes[i] = p[i];
    return _mm_loadu_si128((const __m128i *)lanes);
}
MHA_INLINE __m128i vec_first_8(const int8_t *p, int64_t n)
{
    int8_t lanes[16] = {0};
    for (int i = 0; i < 8; i++)
        if (i < n) lanes[i] = p[i];
    return _mm_loadu_si128((const __m128i *)lanes);
}
MHA_INLINE vec_f32 vec_f32_of_bf16(__m128i a)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16));
}
MHA_INLINE vec_f32 vec_f32_of_i8(__m128i a) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(a)); }
MHA_INLINE vec_f32 vec_f32_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
MHA_INLINE vec_f32 vec_f32_load_f16_n(const uint16_t *p, int64_t n) { return _mm256_cvtph_ps(vec_first_16(p, n)); }
MHA_INLINE vec_f32 vec_f32_load_bf16(const uint16_t *p) { return vec_f32_of_bf16(_mm_loadu_si128((const __m128i *)p)); }
MHA_INLINE vec_f32 vec_f32_load_bf16_n(const uint16_t *p, int64_t n) { return vec_f32_of_bf16(vec_first_16(p, n)); }
MHA_INLINE vec_f32 vec_f32_load_i8(const int8_t *p) { return vec_f32_of_i8(_mm_loadl_epi64((const __m128i *)p)); }
MHA_INLINE vec_f32 vec_f32_load_i8_n(const int8_t *p, int64_t n) { return vec_f32_of_i8(vec_first_8(p, n)); }
/* Rounded to nearest, ties to even; a NaN stays one. */
MHA_INLINE void vec_f32_store_f16(uint16_t *p, vec_f32 a)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
MHA_INLINE void vec_f32_store_bf16(uint16_t *p, vec_f32 a)
{
    __m256i bits = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    rounded = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan));
    rounded = _mm256_srli_epi32(rounded, 16);
    _mm_storeu_si128((__m128i *)p,
                     _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}

MHA_INLINE __m256i vec_f64_first(int64_t n)
{
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
}
MHA_INLINE vec_f64 vec_f64_zero(void) { return _mm256_setzero_pd(); }
MHA_INLINE vec_f64 vec_f64_set1(double x) { return _mm256_set1_pd(x); }
MHA_INLINE vec_f64 vec_f64_load(const double *p) { return _mm256_loadu_pd(p); }
MHA_INLINE vec_f64 vec_f64_load_n(const double *p, int64_t n) { return _mm256_maskload_pd(p, vec_f64_first(n)); }
MHA_INLINE void vec_f64_store(double *p, vec_f64 a) { _mm256_storeu_pd(p, a); }
MHA_INLINE void vec_f64_store_n(double *p, vec_f64 a, int64_t n) { _mm256_maskstore_pd(p, vec_f64_first(n), a); }
MHA_INLINE vec_f64 vec_f64_add(vec_f64 a, vec_f64 b) { return _mm256_add_pd(a, b); }
MHA_INLINE vec_f64 vec_f64_sub(vec_f64 a, vec_f64 b) { return _mm256_sub_pd(a, b); }
MHA_INLINE vec_f64 vec_f64_mul(vec_f64 a, vec_f64 b) { return _mm256_mul_pd(a, b); }
MHA_INLINE vec_f64 vec_f64_div(vec_f64 a, vec_f64 b) { return _mm256_div_pd(a, b); }
MHA_INLINE vec_f64 vec_f64_fma(vec_f64 a, vec_f64 b, vec_f64 c) { return _mm256_fmadd_pd(a, b, c); }
MHA_INLINE vec_f64 vec_f64_max(vec_f64 a, vec_f64 b) { return _mm256_max_pd(a, b); }
MHA_INLINE vec_f64 vec_f64_choose(vec_f64 a, vec_f64 b, vec_f64 x, vec_f64 y)
{
    return _mm256_blendv_pd(y, x, _mm256_cmp_pd(a, b, _CMP_LT_OQ));
}
MHA_INLINE vec_f64 vec_f64_below(vec_f64 score, vec_f64 key, vec_f64 visible)
{
    __m256d see = _mm256_cmp_pd(key, visible, _CMP_LT_OQ);
    return _mm256_blendv_pd(_mm256_set1_pd(-INFINITY), score, see);
}
MHA_INLINE vec_f64 vec_f64_keep_bits(vec_f64 score, uint32_t bits)
{
    __m256i lane = _mm256_setr_epi64x(1, 2, 4, 8);
    __m256i see = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(bits), lane), lane);
    return _mm256_blendv_pd(_mm256_set1_pd(-INFINITY), score, _mm256_castsi256_pd(see));
}
MHA_INLINE vec_f64 vec_f64_add_bias(vec_f64 score, vec_f64 bias)
{
    __m256d least = _mm256_set1_pd(-INFINITY), sum = _mm256_max_pd(_mm256_set1_pd(LOWEST_F64), _mm256_add_pd(score,
                                                                                                             bias));
    sum = _mm256_blendv_pd(sum, _mm256_min_pd(least, sum), _mm256_cmp_pd(score, least, _CMP_EQ_OQ));
    return _mm256_blendv_pd(sum, least, _mm256_cmp_pd(bias, least, _CMP_EQ_OQ));
}
MHA_INLINE vec_f64 vec_f64_zero_hidden(vec_f64 weight, vec_f64 score)
{
    return _mm256_and_pd(weight, _mm256_cmp_pd(score, _mm256_set1_pd(-INFINITY), _CMP_NEQ_UQ));
}
MHA_INLINE uint32_t vec_f64_visible_bits(vec_f64 score)
{
    return (uint32_t)_mm256_movemask_pd(_mm256_cmp_pd(score, _mm256_set1_pd(-INFINITY), _CMP_NEQ_UQ));
}
MHA_INLINE int vec_f64_any_nan(vec_f64 a) { return _mm256_movemask_pd(_mm256_cmp_pd(a, a, _CMP_UNORD_Q)) != 0; }
MHA_INLINE vec_f64 vec_f64_domain(vec_f64 x) { return _mm256_max_pd(_mm256_set1_pd(-1023), x); }
MHA_INLINE vec_f64 vec_f64_floor(vec_f64 x)
{
    return _mm256_round_pd(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
MHA_INLINE vec_f64 vec_f64_frac(vec_f64 x) { return _mm256_sub_pd(x, vec_f64_floor(x)); }
MHA_INLINE vec_f64 vec_f64_scale2(vec_f64 p, vec_f64 x)
{
    /* 1.5 * 2^52 puts the integer floor(x) + 1023 into the low bits: AVX2 converts no 64-bit integers. */
    __m256d biased = _mm256_add_pd(vec_f64_floor(x), _mm256_set1_pd(0x1.8p52 + 1023));
    return _mm256_mul_pd(p, _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(biased), 52)));
}
MHA_INLINE double vec_f64_hmax(vec_f64 a)
{
    __m128d m = _mm_max_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_max_sd(m, _mm_unpackhi_pd(m, m)));
}
MHA_INLINE void vec_f64_hsum4(vec_f64 a, vec_f64 b, vec_f64 c, vec_f64 d, double *dst)
{
    __m256d ab = _mm256_hadd_pd(a, b), cd = _mm256_hadd_pd(c, d);
    __m256d low = _mm256_permute2f128_pd(ab, cd, 0x20), high = _mm256_permute2f128_pd(ab, cd, 0x31);
    _mm256_storeu_pd(dst, _mm256_add_pd(low, high));
}
MHA_INLINE void vec_f64_transpose(vec_f64 r[4])
{
    __m256d a = _mm256_unpacklo_pd(r[0], r[1]), b = _mm256_unpackhi_pd(r[0], r[1]);
    __m256d c = _mm256_unpacklo_pd(r[2], r[3]), d = _mm256_unpackhi_pd(r[2], r[3]);
    r[0] = _mm256_permute2f128_pd(a, c, 0x20);
    r[1] = _mm256_permute2f128_pd(b, d, 0x20);
    r[2] = _mm256_permute2f128_pd(a, c, 0x31);
    r[3] = _mm256_permute2f128_pd(b, d, 0x31);
}
MHA_INLINE vec_f64 vec_f64_of_f16(__m128i a) { return _mm256_cvtps_pd(_mm_cvtph_ps(a)); }
MHA_INLINE vec_f64 vec_f64_of_bf16(__m128i a)
{
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(a), 16)));
}
MHA_INLINE vec_f64 vec_f64_load_f16(const uint16_t *p) { return vec_f64_of_f16(_mm_loadl_epi64((const __m128i *)p)); }
MHA_INLINE vec_f64 vec_f64_load_f16_n(const uint16_t *p, int64_t n) { return vec_f64_of_f16(vec_first_16(p, n)); }
MHA_INLINE vec_f64 vec_f64_load_bf16(const uint16_t *p) { return vec_f64_of_bf16(_mm_loadl_epi64((const __m128i *)p)); }
MHA_INLINE vec_f64 vec_f64_load_bf16_n(const uint16_t *p, int64_t n) { return vec_f64_of_bf16(vec_first_16(p, n)); }
MHA_INLINE vec_f64 vec_f64_load_i8_n(const int8_t *p, int64_t n)
{
    return _mm256_cvtepi32_pd(_mm_cvtepi8_epi32(vec_first_8(p, n)));
}
MHA_INLINE vec_f64 vec_f64_load_i8(const int8_t *p) { return vec_f64_load_i8_n(p, 4); }
