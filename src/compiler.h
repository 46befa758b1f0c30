/* What differs between compilers: inlining, unrolling, restrict. */
#ifndef MHA_COMPILER_H
#define MHA_COMPILER_H

#if defined(_MSC_VER) && !defined(__clang__)
#define MHA_INLINE static __forceinline
#define MHA_NOINLINE static __declspec(noinline)
#define UNROLL
#define RESTRICT __restrict
#else
#define MHA_INLINE static inline __attribute__((always_inline, unused))
#define MHA_NOINLINE static __attribute__((noinline, unused))
/* The constant loops of the micro-kernels: their arrays live in registers only when unrolled. */
#define UNROLL _Pragma("GCC unroll 16")
#define RESTRICT __restrict__
#endif

#endif
