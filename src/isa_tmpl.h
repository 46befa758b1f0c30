/* What every isa_<level>.c compiles behind its vector operations: the algorithm once per compute dtype. Takes nothing
 * but the operations; gives kernels_f32 and kernels_f64.
 */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "kernels.h"

#define MHA_CAT3(a, b, c) a##b##c
#define MHA_CAT(a, b, c) MHA_CAT3(a, b, c)
#define V(op) MHA_CAT(MHA_CAT(vec_, LANES, _), op, )
#define VEC MHA_CAT(vec_, LANES, )
#define FN(name) MHA_CAT(name, _, SUFFIX)

/* PAIRS: the kernels multiply pairs of bfloat16 numbers, two neighbours of the depth or two keys in 32 bits. */
#define PAIRS 0
#define REAL float
#define LANES f32
#define SUFFIX f32
#define REAL_DTYPE MHA_F32
#define REAL_HIGHEST FLT_MAX
#define EXP2_COEFFICIENTS 0x1.e974fap-10f, 0x1.277856p-7f, 0x1.c91ce6p-5f, 0x1.ebdb56p-3f, 0x1.62e4bap-1f, 1.0f
#define TANH_COEFFICIENTS -0x1.75e1fcp-8f, 0x1.5226a8p-6f, -0x1.b83c5cp-5f, 0x1.110726p-3f, -0x1.555532p-2f
#include "kernels_tmpl.h"
#ifdef MHA_HAVE_PAIRS
#undef PAIRS
#undef SUFFIX
#define PAIRS 1
#define SUFFIX bf16
#include "kernels_tmpl.h"
#undef PAIRS
#define PAIRS 0
#endif
#undef REAL
#undef LANES
#undef SUFFIX
#undef REAL_DTYPE
#undef REAL_HIGHEST
#undef EXP2_COEFFICIENTS
#undef TANH_COEFFICIENTS

#define REAL double
#define LANES f64
#define SUFFIX f64
#define REAL_DTYPE MHA_F64
#define REAL_HIGHEST DBL_MAX
#define EXP2_COEFFICIENTS                                                                                              \
    0x1.58566fe5ab70ap-31, 0x1.c2c4781f7a633p-28, 0x1.b85f42f1e6966p-24, 0x1.628f3580bf4b8p-20, 0x1.ffcfc6aa0fa7bp-17, \
        0x1.4308fa1dce4b1p-13, 0x1.5d87ff4d22874p-10, 0x1.3b2ab6f73415ep-7, 0x1.c6b08d7065838p-5,                      \
        0x1.ebfbdff82c04bp-3, 0x1.62e42fefa39f5p-1, 1.0
#define TANH_COEFFICIENTS                                                                          \
    -0x1.0da7366720f8ap-16, 0x1.439129a88d1f3p-14, -0x1.df557dd16a557p-13, 0x1.3366137a90fa5p-11,  \
        -0x1.7d68a34aa4bd0p-10, 0x1.d6cf2811e8e7fp-9, -0x1.226e162c15d56p-7, 0x1.664f477adc3a2p-6, \
        -0x1.ba1ba1b506558p-5, 0x1.111111110accfp-3, -0x1.55555555554ffp-2
#include "kernels_tmpl.h"
#undef REAL
#undef SUFFIX
#undef REAL_DTYPE
#undef REAL_HIGHEST
#undef EXP2_COEFFICIENTS
#undef TANH_COEFFICIENTS
#undef LANES
#undef PAIRS
#undef FN
#undef VEC
#undef V
#undef MHA_CAT
#undef MHA_CAT3
