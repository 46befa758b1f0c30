/* 2^x and e^x for x <= 0 in vector lanes: -inf gives 0, NaN stays NaN.
 *
 * 2^x = 2^floor(x) * p(x - floor(x)), p a minimax polynomial of 2^f on [0, 1) in the relative error with p(0) = 1
 * (Remez exchange in 60 digits): error 8.3e-8 at degree 5 for float32, 3.3e-18 at degree 11 for float64, before
 * rounding. Takes EXP2_COEFFICIENTS, highest power first.
 */
MHA_INLINE VEC FN(exp2_lanes)(VEC x)
{
    static const REAL coefficients[] = {EXP2_COEFFICIENTS};
    enum { count = sizeof coefficients / sizeof *coefficients };
    x = V(domain)(x);
    VEC f = V(frac)(x);
    VEC p = V(set1)(coefficients[0]);
    UNROLL for (int i = 1; i < count; i++) p = V(fma)(p, f, V(set1)(coefficients[i]));
    return V(scale2)(p, x);
}

/* e^x for x <= 0, the difference of a score and its row's maximum. */
MHA_INLINE VEC FN(exp_lanes)(VEC x) { return FN(exp2_lanes)(V(mul)(x, V(set1)((REAL)1.44269504088896340736))); }

static void FN(exp2)(const void *src, void *dst, int64_t count)
{
    for (int64_t i = 0; i < count; i += V(lanes)) {
        int64_t n = count - i < V(lanes) ? count - i : V(lanes);
        V(store_n)((REAL *)dst + i, FN(exp2_lanes)(V(load_n)((const REAL *)src + i, n)), n);
    }
}
