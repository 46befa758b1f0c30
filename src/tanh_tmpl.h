/* tanh in vector lanes, of any sign and size: +-inf gives +-1, NaN stays NaN.
 *
 * Where |x| < 5/8: x + x^3 P(x^2), P a minimax polynomial in the relative error of tanh (Remez exchange in 60 digits):
 * 4.4e-9 at degree 4 for float32, 1.1e-17 at degree 10 for float64, before rounding. Elsewhere (1 - t) / (1 + t) with
 * t = e^(-2|x|), where the difference loses less than a bit.
 * Takes TANH_COEFFICIENTS, highest power first.
 */
MHA_INLINE VEC FN(tanh_lanes)(VEC x)
{
    static const REAL coefficients[] = {TANH_COEFFICIENTS};
    enum { count = sizeof coefficients / sizeof *coefficients };
    VEC minus = V(sub)(V(zero)(), x), size = V(max)(x, minus), one = V(set1)(1);
    VEC t = FN(exp2_lanes)(V(mul)(size, V(set1)((REAL)(-2 * 1.44269504088896340736))));
    VEC large = V(div)(V(sub)(one, t), V(add)(one, t));
    large = V(choose)(x, V(zero)(), V(sub)(V(zero)(), large), large);
    VEC z = V(mul)(x, x), p = V(set1)(coefficients[0]);
    UNROLL for (int i = 1; i < count; i++) p = V(fma)(p, z, V(set1)(coefficients[i]));
    return V(choose)(size, V(set1)((REAL)0.625), V(fma)(V(mul)(x, z), p, x), large);
}

static void FN(tanh)(const void *src, void *dst, int64_t count)
{
    for (int64_t i = 0; i < count; i += V(lanes)) {
        int64_t n = count - i < V(lanes) ? count - i : V(lanes);
        V(store_n)((REAL *)dst + i, FN(tanh_lanes)(V(load_n)((const REAL *)src + i, n)), n);
    }
}
