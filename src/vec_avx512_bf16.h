/* Vector operations of level avx512_bf16: those of avx512, and products of pairs of bfloat16 numbers, two in 32 bits. The
 * instructions take denormal numbers for 0.
 */
#include "vec_avx512.h"

#define MHA_HAVE_PAIRS

MHA_INLINE vec_f32 vec_f32_dot_pairs(vec_f32 a, vec_f32 b, vec_f32 acc)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
/* Each lane's two numbers, rounded to nearest, the first in the lower half. */
MHA_INLINE vec_f32 vec_f32_pack_pairs(vec_f32 low, vec_f32 high)
{
    __m512i l = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
    __m512i h = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high));
    return _mm512_castsi512_ps(_mm512_or_si512(l, _mm512_slli_epi32(h, 16)));
}
/* The same of two rows that are bfloat16 already. */
MHA_INLINE vec_f32 vec_f32_join_pairs(const uint16_t *low, const uint16_t *high)
{
    __m512i l = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)low));
    __m512i h = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)high));
    return _mm512_castsi512_ps(_mm512_or_si512(l, _mm512_slli_epi32(h, 16)));
}
