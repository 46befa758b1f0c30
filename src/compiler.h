/* What every level includes: what differs between compilers (inlining, unrolling, restrict, prefetch), and the lowest
 * numbers. */
#ifndef MHA_COMPILER_H
#define MHA_COMPILER_H

#include <float.h>

#define LOWEST_F32 (-FLT_MAX)
#define LOWEST_F64 (-DBL_MAX)

#if defined(_MSC_VER) && !defined(__clang__)
#define MHA_INLINE static __forceinline
#define MHA_NOINLINE static __declspec(noinline)
#define UNROLL
#define PREFETCH(address) ((void)(address))
#define OPAQUE(pointer) ((void)0)
#define IN_REGISTER(kind, value) ((void)0)
#define RESTRICT __restrict
#else
#define MHA_INLINE static inline __attribute__((always_inline, unused))
#define MHA_NOINLINE static __attribute__((noinline, unused))
/* The constant loops of the micro-kernels: their arrays live in registers only when unrolled. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define RESTRICT __restrict__
#define PREFETCH(address) __builtin_prefetch(address)
/* One of several pointers into one array: compilers would make all of them of the first, with more offsets than
 * registers. */
#define OPAQUE(pointer) __asm__("" : "+r"(pointer))
/* Compilers may read a value from memory again at each use instead. kind: the letter for its registers. */
#define IN_REGISTER(kind, value) __asm__("" : "+" kind(value))
#endif

#endif
