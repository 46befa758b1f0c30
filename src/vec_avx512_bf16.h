/* Vector operations of level avx512_bf16: those of avx512, and products of pairs of bfloat16 numbers, two in 32 bits.
 * The instructions take denormal numbers for 0.
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
    /* all of the one before all of the other, then one of each */
    __m512i order = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                      0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low)));
}
/* The same of two rows that are bfloat16 already. */
MHA_INLINE vec_f32 vec_f32_join_pairs(const uint16_t *low, const uint16_t *high)
{
    __m512i l = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)low));
    __m512i h = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)high));
    return _mm512_castsi512_ps(_mm512_or_si512(l, _mm512_slli_epi32(h, 16)));
}
/* The numbers of one row as pairs, those of low first. */
MHA_INLINE vec_f32 vec_f32_pack_row(vec_f32 low, vec_f32 high)
{
    return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low));
}
/* Numbers of a row as pairs, n of them with zeros behind. */
MHA_INLINE vec_f32 vec_f32_load_pairs(const uint16_t *p) { return _mm512_castsi512_ps(_mm512_loadu_si512(p)); }
MHA_INLINE vec_f32 vec_f32_load_pairs_n(const uint16_t *p, int64_t n)
{
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p));
}
/* Two rows of numbers become pairs of one from each, in an order of columns that in_order puts right. */
MHA_INLINE void vec_f32_interleave(vec_f32 *a, vec_f32 *b)
{
    __m512i first = _mm512_castps_si512(*a), second = _mm512_castps_si512(*b);
    *a = _mm512_castsi512_ps(_mm512_unpacklo_epi16(first, second));
    *b = _mm512_castsi512_ps(_mm512_unpackhi_epi16(first, second));
}
MHA_INLINE void vec_f32_in_order(vec_f32 *a, vec_f32 *b)
{
    __m512 even = _mm512_shuffle_f32x4(*a, *b, 0x44), odd = _mm512_shuffle_f32x4(*a, *b, 0xee);
    *a = _mm512_shuffle_f32x4(even, even, 0xd8);
    *b = _mm512_shuffle_f32x4(odd, odd, 0xd8);
}
