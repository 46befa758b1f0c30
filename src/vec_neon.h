/* Vector operations of level neon (AArch64 Advanced SIMD): 4 float32 or 2 float64 lanes, 32 registers.
 *
 * max gives NaN where either is NaN. choose(a, b, x, y) gives x where a < b, else y. below, keep_bits and add_bias put
 * -inf where the key is hidden, by a bias of -inf (a score of -inf and a bias of inf are NaN together); zero_hidden and
 * visible_bits (a bit a lane) take a score of -inf for a hidden key.
 * frac(x) = x - floor(x) and scale2(p, x) = p * 2^floor(x), for x in the domain that domain() clamps to: below it
 * 2^x is 0, so results under the smallest normal number are 0.
 */
#include <arm_neon.h>
#include <string.h>

#include "compiler.h"

#define KEEP(v) ((void)0)

typedef float32x4_t vec_f32;
typedef float64x2_t vec_f64;

/* Scores: 8 keys x 3 vectors of queries, 24 accumulators + 3 queries + 1 broadcast. Output: 6 queries x 4 vectors of
 * columns, 24 + 4 + 1. Few queries: 4 keys x 4 queries, 16 + 4 + 4. */
enum {
    vec_f32_lanes = 4,
    vec_f32_key_tile = 8,
    vec_f32_query_vecs = 3,
    vec_f32_panel = 48,
    vec_f32_row_tile = 6,
    vec_f32_col_vecs = 4,
    vec_f32_few_rows = 4,
    vec_f32_few_keys = 4,
    vec_f32_few_part = 256,
    vec_f32_align_values = 0,
    vec_f64_lanes = 2,
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

MHA_INLINE vec_f32 vec_f32_zero(void) { return vdupq_n_f32(0); }
MHA_INLINE vec_f32 vec_f32_set1(float x) { return vdupq_n_f32(x); }
MHA_INLINE vec_f32 vec_f32_load(const float *p) { return vld1q_f32(p); }
MHA_INLINE vec_f32 vec_f32_load_n(const float *p, int64_t n)
{
    float lanes[4] = {0};
    for (int i = 0; i < 4; i++)
        if (i < n) lanes[i] = p[i];
    return vld1q_f32(lanes);
}
MHA_INLINE void vec_f32_store(float *p, vec_f32 a) { vst1q_f32(p, a); }
MHA_INLINE void vec_f32_store_n(float *p, vec_f32 a, int64_t n)
{
    float lanes[4];
    vst1q_f32(lanes, a);
    for (int i = 0; i < 4; i++)
        if (i < n) p[i] = lanes[i];
}
MHA_INLINE vec_f32 vec_f32_add(vec_f32 a, vec_f32 b) { return vaddq_f32(a, b); }
MHA_INLINE vec_f32 vec_f32_sub(vec_f32 a, vec_f32 b) { return vsubq_f32(a, b); }
MHA_INLINE vec_f32 vec_f32_mul(vec_f32 a, vec_f32 b) { return vmulq_f32(a, b); }
MHA_INLINE vec_f32 vec_f32_div(vec_f32 a, vec_f32 b) { return vdivq_f32(a, b); }
MHA_INLINE vec_f32 vec_f32_fma(vec_f32 a, vec_f32 b, vec_f32 c) { return vfmaq_f32(c, a, b); }
MHA_INLINE vec_f32 vec_f32_max(vec_f32 a, vec_f32 b) { return vmaxq_f32(a, b); }
MHA_INLINE vec_f32 vec_f32_choose(vec_f32 a, vec_f32 b, vec_f32 x, vec_f32 y)
{
    return vbslq_f32(vcltq_f32(a, b), x, y);
}
MHA_INLINE vec_f32 vec_f32_below(vec_f32 score, vec_f32 key, vec_f32 visible)
{
    return vbslq_f32(vcltq_f32(key, visible), score, vdupq_n_f32(-INFINITY));
}
MHA_INLINE vec_f32 vec_f32_keep_bits(vec_f32 score, uint32_t bits)
{
    static const uint32_t lane[4] = {1, 2, 4, 8};
    return vbslq_f32(vtstq_u32(vdupq_n_u32(bits), vld1q_u32(lane)), score, vdupq_n_f32(-INFINITY));
}
MHA_INLINE vec_f32 vec_f32_add_bias(vec_f32 score, vec_f32 bias)
{
    vec_f32 infinity = vdupq_n_f32(-INFINITY), sum = vmaxq_f32(vdupq_n_f32(LOWEST_F32), vaddq_f32(score, bias));
    sum = vbslq_f32(vceqq_f32(score, infinity), vminq_f32(infinity, sum), sum);
    return vbslq_f32(vceqq_f32(bias, infinity), infinity, sum);
}
MHA_INLINE vec_f32 vec_f32_zero_hidden(vec_f32 weight, vec_f32 score)
{
    return vbslq_f32(vceqq_f32(score, vdupq_n_f32(-INFINITY)), vdupq_n_f32(0), weight);
}
MHA_INLINE uint32_t vec_f32_visible_bits(vec_f32 score)
{
    static const uint32_t lane[4] = {1, 2, 4, 8};
    uint32x4_t hidden = vceqq_f32(score, vdupq_n_f32(-INFINITY));
    return vaddvq_u32(vbicq_u32(vld1q_u32(lane), hidden));
}
MHA_INLINE int vec_f32_any_nan(vec_f32 a) { return vminvq_u32(vceqq_f32(a, a)) == 0; }
MHA_INLINE vec_f32 vec_f32_domain(vec_f32 x) { return vmaxq_f32(vdupq_n_f32(-127), x); }
MHA_INLINE vec_f32 vec_f32_frac(vec_f32 x) { return vsubq_f32(x, vrndmq_f32(x)); }
MHA_INLINE vec_f32 vec_f32_scale2(vec_f32 p, vec_f32 x)
{
    int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(vrndmq_f32(x)), vdupq_n_s32(127));
    return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
}
MHA_INLINE float vec_f32_hmax(vec_f32 a) { return vmaxvq_f32(a); }
/* dst[i] = the sum of the lanes of the i-th argument; one order of summation for each. */
MHA_INLINE void vec_f32_hsum4(vec_f32 a, vec_f32 b, vec_f32 c, vec_f32 d, float *dst)
{
    vst1q_f32(dst, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
MHA_INLINE void vec_f32_transpose(vec_f32 r[4])
{
    float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(r[0], r[1])), b = vreinterpretq_f64_f32(vtrn2q_f32(r[0], r[1]));
    float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(r[2], r[3])), d = vreinterpretq_f64_f32(vtrn2q_f32(r[2], r[3]));
    r[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, c));
    r[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
    r[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
    r[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
}

MHA_INLINE uint16x4_t vec_first_16(const uint16_t *p, int64_t n)
{
    uint16_t lanes[4] = {0};
    for (int i = 0; i < 4; i++)
        if (i < n) lanes[i] = p[i];
    return vld1_u16(lanes);
}
MHA_INLINE vec_f32 vec_f32_of_f16(uint16x4_t a) { return vcvt_f32_f16(vreinterpret_f16_u16(a)); }
MHA_INLINE vec_f32 vec_f32_of_bf16(uint16x4_t a) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(a), 16)); }
MHA_INLINE vec_f32 vec_f32_load_f16(const uint16_t *p) { return vec_f32_of_f16(vld1_u16(p)); }
MHA_INLINE vec_f32 vec_f32_load_f16_n(const uint16_t *p, int64_t n) { return vec_f32_of_f16(vec_first_16(p, n)); }
MHA_INLINE vec_f32 vec_f32_load_bf16(const uint16_t *p) { return vec_f32_of_bf16(vld1_u16(p)); }
MHA_INLINE vec_f32 vec_f32_load_bf16_n(const uint16_t *p, int64_t n) { return vec_f32_of_bf16(vec_first_16(p, n)); }
MHA_INLINE vec_f32 vec_f32_load_i8(const int8_t *p)
{
    int32_t four;
    memcpy(&four, p, sizeof four);
    int16x8_t words = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
}
MHA_INLINE vec_f32 vec_f32_load_i8_n(const int8_t *p, int64_t n)
{
    int8_t lanes[4] = {0};
    for (int i = 0; i < 4; i++)
        if (i < n) lanes[i] = p[i];
    return vec_f32_load_i8(lanes);
}
/* Rounded to nearest, ties to even; a NaN stays one. */
MHA_INLINE void vec_f32_store_f16(uint16_t *p, vec_f32 a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
MHA_INLINE void vec_f32_store_bf16(uint16_t *p, vec_f32 a)
{
    uint32x4_t bits = vreinterpretq_u32_f32(a), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16));
}

MHA_INLINE vec_f64 vec_f64_zero(void) { return vdupq_n_f64(0); }
MHA_INLINE vec_f64 vec_f64_set1(double x) { return vdupq_n_f64(x); }
MHA_INLINE vec_f64 vec_f64_load(const double *p) { return vld1q_f64(p); }
MHA_INLINE vec_f64 vec_f64_load_n(const double *p, int64_t n)
{
    double lanes[2] = {0};
    for (int i = 0; i < 2; i++)
        if (i < n) lanes[i] = p[i];
    return vld1q_f64(lanes);
}
MHA_INLINE void vec_f64_store(double *p, vec_f64 a) { vst1q_f64(p, a); }
MHA_INLINE void vec_f64_store_n(double *p, vec_f64 a, int64_t n)
{
    double lanes[2];
    vst1q_f64(lanes, a);
    for (int i = 0; i < 2; i++)
        if (i < n) p[i] = lanes[i];
}
MHA_INLINE vec_f64 vec_f64_add(vec_f64 a, vec_f64 b) { return vaddq_f64(a, b); }
MHA_INLINE vec_f64 vec_f64_sub(vec_f64 a, vec_f64 b) { return vsubq_f64(a, b); }
MHA_INLINE vec_f64 vec_f64_mul(vec_f64 a, vec_f64 b) { return vmulq_f64(a, b); }
MHA_INLINE vec_f64 vec_f64_div(vec_f64 a, vec_f64 b) { return vdivq_f64(a, b); }
MHA_INLINE vec_f64 vec_f64_fma(vec_f64 a, vec_f64 b, vec_f64 c) { return vfmaq_f64(c, a, b); }
MHA_INLINE vec_f64 vec_f64_max(vec_f64 a, vec_f64 b) { return vmaxq_f64(a, b); }
MHA_INLINE vec_f64 vec_f64_choose(vec_f64 a, vec_f64 b, vec_f64 x, vec_f64 y)
{
    return vbslq_f64(vcltq_f64(a, b), x, y);
}
MHA_INLINE vec_f64 vec_f64_below(vec_f64 score, vec_f64 key, vec_f64 visible)
{
    return vbslq_f64(vcltq_f64(key, visible), score, vdupq_n_f64(-INFINITY));
}
MHA_INLINE vec_f64 vec_f64_keep_bits(vec_f64 score, uint32_t bits)
{
    static const uint64_t lane[2] = {1, 2};
    return vbslq_f64(vtstq_u64(vdupq_n_u64(bits), vld1q_u64(lane)), score, vdupq_n_f64(-INFINITY));
}
MHA_INLINE vec_f64 vec_f64_add_bias(vec_f64 score, vec_f64 bias)
{
    vec_f64 infinity = vdupq_n_f64(-INFINITY), sum = vmaxq_f64(vdupq_n_f64(LOWEST_F64), vaddq_f64(score, bias));
    sum = vbslq_f64(vceqq_f64(score, infinity), vminq_f64(infinity, sum), sum);
    return vbslq_f64(vceqq_f64(bias, infinity), infinity, sum);
}
MHA_INLINE vec_f64 vec_f64_zero_hidden(vec_f64 weight, vec_f64 score)
{
    return vbslq_f64(vceqq_f64(score, vdupq_n_f64(-INFINITY)), vdupq_n_f64(0), weight);
}
MHA_INLINE uint32_t vec_f64_visible_bits(vec_f64 score)
{
    static const uint64_t lane[2] = {1, 2};
    uint64x2_t hidden = vceqq_f64(score, vdupq_n_f64(-INFINITY));
    return (uint32_t)vaddvq_u64(vbicq_u64(vld1q_u64(lane), hidden));
}
MHA_INLINE int vec_f64_any_nan(vec_f64 a)
{
    uint64x2_t number = vceqq_f64(a, a);
    return (vgetq_lane_u64(number, 0) & vgetq_lane_u64(number, 1)) == 0;
}
MHA_INLINE vec_f64 vec_f64_domain(vec_f64 x) { return vmaxq_f64(vdupq_n_f64(-1023), x); }
MHA_INLINE vec_f64 vec_f64_frac(vec_f64 x) { return vsubq_f64(x, vrndmq_f64(x)); }
MHA_INLINE vec_f64 vec_f64_scale2(vec_f64 p, vec_f64 x)
{
    int64x2_t exponent = vaddq_s64(vcvtq_s64_f64(vrndmq_f64(x)), vdupq_n_s64(1023));
    return vmulq_f64(p, vreinterpretq_f64_s64(vshlq_n_s64(exponent, 52)));
}
MHA_INLINE double vec_f64_hmax(vec_f64 a) { return vmaxvq_f64(a); }
MHA_INLINE void vec_f64_hsum4(vec_f64 a, vec_f64 b, vec_f64 c, vec_f64 d, double *dst)
{
    vst1q_f64(dst, vpaddq_f64(a, b));
    vst1q_f64(dst + 2, vpaddq_f64(c, d));
}
MHA_INLINE void vec_f64_transpose(vec_f64 r[2])
{
    float64x2_t low = vtrn1q_f64(r[0], r[1]);
    r[1] = vtrn2q_f64(r[0], r[1]);
    r[0] = low;
}
MHA_INLINE vec_f64 vec_f64_low(vec_f32 a) { return vcvt_f64_f32(vget_low_f32(a)); }
MHA_INLINE vec_f64 vec_f64_load_f16_n(const uint16_t *p, int64_t n) { return vec_f64_low(vec_f32_load_f16_n(p, n)); }
MHA_INLINE vec_f64 vec_f64_load_f16(const uint16_t *p) { return vec_f64_load_f16_n(p, 2); }
MHA_INLINE vec_f64 vec_f64_load_bf16_n(const uint16_t *p, int64_t n) { return vec_f64_low(vec_f32_load_bf16_n(p, n)); }
MHA_INLINE vec_f64 vec_f64_load_bf16(const uint16_t *p) { return vec_f64_load_bf16_n(p, 2); }
MHA_INLINE vec_f64 vec_f64_load_i8_n(const int8_t *p, int64_t n) { return vec_f64_low(vec_f32_load_i8_n(p, n)); }
MHA_INLINE vec_f64 vec_f64_load_i8(const int8_t *p) { return vec_f64_load_i8_n(p, 2); }
