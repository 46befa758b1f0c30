/* Vector operations of level scalar: one lane, the architecture's baseline, a multiplication and an addition for fma
 * (without hardware fma is a library call).
 *
 * max(a, b) gives b where either is NaN. choose(a, b, x, y) gives x where a < b, else y. below, keep_bits and add_bias
 * put -inf where the key is hidden, by a bias of -inf (a score of -inf and a bias of inf are NaN together); zero_hidden
 * and visible_bits (a bit a lane) take a score of -inf for a hidden key.
 * frac(x) = x - floor(x) and scale2(p, x) = p * 2^floor(x), for x in the domain that domain() clamps to: below it
 * 2^x is 0, so results under the smallest normal number are 0.
 */
#include <string.h>

#include "compiler.h"

#define KEEP(v) ((void)0)

typedef float vec_f32;
typedef double vec_f64;

/* Scores: 4 keys x 2 queries, 8 accumulators + 2 queries + 1 key in 16 registers; output: 4 queries x 2 columns. */
enum {
    vec_f32_lanes = 1,
    vec_f32_key_tile = 4,
    vec_f32_query_vecs = 2,
    vec_f32_panel = 16,
    vec_f32_row_tile = 4,
    vec_f32_col_vecs = 2,
    vec_f32_few_rows = 2,
    vec_f32_few_keys = 4,
    vec_f32_few_part = 256,
    vec_f32_align_values = 0,
    vec_f64_lanes = 1,
    vec_f64_key_tile = 4,
    vec_f64_query_vecs = 2,
    vec_f64_panel = 16,
    vec_f64_row_tile = 4,
    vec_f64_col_vecs = 2,
    vec_f64_few_rows = 2,
    vec_f64_few_keys = 4,
    vec_f64_few_part = 256,
    vec_f64_align_values = 0
};

MHA_INLINE vec_f32 vec_f32_zero(void) { return 0; }
MHA_INLINE vec_f32 vec_f32_set1(float x) { return x; }
MHA_INLINE vec_f32 vec_f32_load(const float *p) { return *p; }
MHA_INLINE vec_f32 vec_f32_load_n(const float *p, int64_t n) { return n > 0 ? *p : 0; }
MHA_INLINE void vec_f32_store(float *p, vec_f32 a) { *p = a; }
MHA_INLINE void vec_f32_store_n(float *p, vec_f32 a, int64_t n)
{
    if (n > 0) *p = a;
}
MHA_INLINE vec_f32 vec_f32_add(vec_f32 a, vec_f32 b) { return a + b; }
MHA_INLINE vec_f32 vec_f32_sub(vec_f32 a, vec_f32 b) { return a - b; }
MHA_INLINE vec_f32 vec_f32_mul(vec_f32 a, vec_f32 b) { return a * b; }
MHA_INLINE vec_f32 vec_f32_div(vec_f32 a, vec_f32 b) { return a / b; }
MHA_INLINE vec_f32 vec_f32_fma(vec_f32 a, vec_f32 b, vec_f32 c) { return a * b + c; }
MHA_INLINE vec_f32 vec_f32_max(vec_f32 a, vec_f32 b) { return a > b ? a : b; }
MHA_INLINE vec_f32 vec_f32_choose(vec_f32 a, vec_f32 b, vec_f32 x, vec_f32 y) { return a < b ? x : y; }
MHA_INLINE vec_f32 vec_f32_below(vec_f32 score, vec_f32 key, vec_f32 visible)
{
    return key < visible ? score : (float)-INFINITY;
}
MHA_INLINE vec_f32 vec_f32_keep_bits(vec_f32 score, uint32_t bits) { return bits & 1 ? score : (float)-INFINITY; }
MHA_INLINE vec_f32 vec_f32_add_bias(vec_f32 score, vec_f32 bias)
{
    if (bias == (float)-INFINITY) return (float)-INFINITY;
    return score == (float)-INFINITY ? score + bias : vec_f32_max(LOWEST_F32, score + bias);
}
MHA_INLINE vec_f32 vec_f32_zero_hidden(vec_f32 weight, vec_f32 score) { return score == (float)-INFINITY ? 0 : weight; }
MHA_INLINE uint32_t vec_f32_visible_bits(vec_f32 score) { return score != (float)-INFINITY; }
MHA_INLINE int vec_f32_any_nan(vec_f32 a) { return a != a; }
MHA_INLINE vec_f32 vec_f32_domain(vec_f32 x) { return vec_f32_max(-127, x); }
/* Rounding down without a library call: truncation is exact in the domain. NaN counts as 0, and so does what a row with
 * NaN may give above 0. */
MHA_INLINE vec_f32 vec_f32_floor(vec_f32 x)
{
    float whole = (float)(int32_t)(x <= 0 ? x : 0);
    return whole - (whole > x);
}
MHA_INLINE vec_f32 vec_f32_frac(vec_f32 x) { return x - vec_f32_floor(x); }
MHA_INLINE vec_f32 vec_f32_scale2(vec_f32 p, vec_f32 x)
{
    uint32_t bits = (uint32_t)((int32_t)vec_f32_floor(x) + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}
MHA_INLINE float vec_f32_hmax(vec_f32 a) { return a; }
MHA_INLINE void vec_f32_hsum4(vec_f32 a, vec_f32 b, vec_f32 c, vec_f32 d, float *dst)
{
    dst[0] = a;
    dst[1] = b;
    dst[2] = c;
    dst[3] = d;
}
MHA_INLINE void vec_f32_transpose(vec_f32 r[1]) { (void)r; }

MHA_INLINE float vec_f32_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
MHA_INLINE uint32_t vec_f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
MHA_INLINE vec_f32 vec_f32_load_f16(const uint16_t *p)
{
    uint32_t sign = (uint32_t)(*p & 0x8000) << 16, rest = (uint32_t)(*p & 0x7fff) << 13;
    /* the exponent is 112 too small, for subnormal numbers too; the largest one stands for infinities and NaN */
    uint32_t bits = rest < 0x1f << 23 ? vec_f32_bits(vec_f32_of_bits(rest) * 0x1p112f) : rest | 0xffu << 23;
    return vec_f32_of_bits(sign | bits);
}
MHA_INLINE vec_f32 vec_f32_load_f16_n(const uint16_t *p, int64_t n) { return n > 0 ? vec_f32_load_f16(p) : 0; }
MHA_INLINE vec_f32 vec_f32_load_bf16(const uint16_t *p) { return vec_f32_of_bits((uint32_t)*p << 16); }
MHA_INLINE vec_f32 vec_f32_load_bf16_n(const uint16_t *p, int64_t n) { return n > 0 ? vec_f32_load_bf16(p) : 0; }
MHA_INLINE vec_f32 vec_f32_load_i8(const int8_t *p) { return *p; }
MHA_INLINE vec_f32 vec_f32_load_i8_n(const int8_t *p, int64_t n) { return n > 0 ? *p : 0; }
/* Rounded to nearest, ties to even; a NaN stays one. */
MHA_INLINE void vec_f32_store_f16(uint16_t *p, vec_f32 a)
{
    uint32_t sign = vec_f32_bits(a) >> 16 & 0x8000, rest = vec_f32_bits(a) & 0x7fffffff;
    if (rest > 0x7f800000)
        rest = 0x7e00 | (rest >> 13 & 0x3ff);
    else if (rest >= 0x477ff000) /* 65520 is halfway to what would be the next number */
        rest = 0x7c00;
    else if (rest < 0x38800000) /* subnormal: 0.5 has the same last place, 2^-24 */
        rest = vec_f32_bits(vec_f32_of_bits(rest) + 0.5f) - vec_f32_bits(0.5f);
    else
        rest = (rest - (112 << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
    *p = (uint16_t)(sign | rest);
}
MHA_INLINE void vec_f32_store_bf16(uint16_t *p, vec_f32 a)
{
    uint32_t bits = vec_f32_bits(a);
    *p = (uint16_t)((a != a ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

MHA_INLINE vec_f64 vec_f64_zero(void) { return 0; }
MHA_INLINE vec_f64 vec_f64_set1(double x) { return x; }
MHA_INLINE vec_f64 vec_f64_load(const double *p) { return *p; }
MHA_INLINE vec_f64 vec_f64_load_n(const double *p, int64_t n) { return n > 0 ? *p : 0; }
MHA_INLINE void vec_f64_store(double *p, vec_f64 a) { *p = a; }
MHA_INLINE void vec_f64_store_n(double *p, vec_f64 a, int64_t n)
{
    if (n > 0) *p = a;
}
MHA_INLINE vec_f64 vec_f64_add(vec_f64 a, vec_f64 b) { return a + b; }
MHA_INLINE vec_f64 vec_f64_sub(vec_f64 a, vec_f64 b) { return a - b; }
MHA_INLINE vec_f64 vec_f64_mul(vec_f64 a, vec_f64 b) { return a * b; }
MHA_INLINE vec_f64 vec_f64_div(vec_f64 a, vec_f64 b) { return a / b; }
MHA_INLINE vec_f64 vec_f64_fma(vec_f64 a, vec_f64 b, vec_f64 c) { return a * b + c; }
MHA_INLINE vec_f64 vec_f64_max(vec_f64 a, vec_f64 b) { return a > b ? a : b; }
MHA_INLINE vec_f64 vec_f64_choose(vec_f64 a, vec_f64 b, vec_f64 x, vec_f64 y) { return a < b ? x : y; }
MHA_INLINE vec_f64 vec_f64_below(vec_f64 score, vec_f64 key, vec_f64 visible)
{
    return key < visible ? score : (double)-INFINITY;
}
MHA_INLINE vec_f64 vec_f64_keep_bits(vec_f64 score, uint32_t bits) { return bits & 1 ? score : (double)-INFINITY; }
MHA_INLINE vec_f64 vec_f64_add_bias(vec_f64 score, vec_f64 bias)
{
    if (bias == (double)-INFINITY) return (double)-INFINITY;
    return score == (double)-INFINITY ? score + bias : vec_f64_max(LOWEST_F64, score + bias);
}
MHA_INLINE vec_f64 vec_f64_zero_hidden(vec_f64 weight, vec_f64 score)
{
    return score == (double)-INFINITY ? 0 : weight;
}
MHA_INLINE uint32_t vec_f64_visible_bits(vec_f64 score) { return score != (double)-INFINITY; }
MHA_INLINE int vec_f64_any_nan(vec_f64 a) { return a != a; }
MHA_INLINE vec_f64 vec_f64_domain(vec_f64 x) { return vec_f64_max(-1023, x); }
/* Rounding down without a library call: truncation is exact in the domain. NaN counts as 0, and so does what a row with
 * NaN may give above 0. */
MHA_INLINE vec_f64 vec_f64_floor(vec_f64 x)
{
    double whole = (double)(int64_t)(x <= 0 ? x : 0);
    return whole - (whole > x);
}
MHA_INLINE vec_f64 vec_f64_frac(vec_f64 x) { return x - vec_f64_floor(x); }
MHA_INLINE vec_f64 vec_f64_scale2(vec_f64 p, vec_f64 x)
{
    uint64_t bits = (uint64_t)((int64_t)vec_f64_floor(x) + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}
MHA_INLINE double vec_f64_hmax(vec_f64 a) { return a; }
MHA_INLINE void vec_f64_hsum4(vec_f64 a, vec_f64 b, vec_f64 c, vec_f64 d, double *dst)
{
    dst[0] = a;
    dst[1] = b;
    dst[2] = c;
    dst[3] = d;
}
MHA_INLINE void vec_f64_transpose(vec_f64 r[1]) { (void)r; }
MHA_INLINE vec_f64 vec_f64_load_f16(const uint16_t *p) { return vec_f32_load_f16(p); }
MHA_INLINE vec_f64 vec_f64_load_f16_n(const uint16_t *p, int64_t n) { return vec_f32_load_f16_n(p, n); }
MHA_INLINE vec_f64 vec_f64_load_bf16(const uint16_t *p) { return vec_f32_load_bf16(p); }
MHA_INLINE vec_f64 vec_f64_load_bf16_n(const uint16_t *p, int64_t n) { return vec_f32_load_bf16_n(p, n); }
MHA_INLINE vec_f64 vec_f64_load_i8(const int8_t *p) { return *p; }
MHA_INLINE vec_f64 vec_f64_load_i8_n(const int8_t *p, int64_t n) { return n > 0 ? *p : 0; }
