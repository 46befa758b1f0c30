/* What kernels of bfloat16 pairs have of their own: queries and keys are pairs along the depth as they are stored,
 * values and weights pairs of two keys. Takes PAIRS; without it a step is one number.
 */
#if PAIRS
/* count numbers of a bfloat16 row as pairs, a zero behind an odd one. Bytes are copied, for pairs are read as REAL. */
static void FN(copy_pairs)(REAL *RESTRICT dst, const char *RESTRICT src, int64_t stride, int64_t count)
{
    char *to = (char *)dst;
    if (stride == 1)
        memcpy(to, src, (size_t)(2 * count));
    else
        for (int64_t i = 0; i < count; i++) memcpy(to + 2 * i, src + 2 * i * stride, 2);
    if (count % 2) memset(to + 2 * count, 0, 2);
}

/* A bfloat16 number, 0 for one that is not finite. */
MHA_INLINE uint16_t FN(finite_or_zero)(uint16_t number) { return (number & 0x7f80) == 0x7f80 ? 0 : number; }

static void FN(drop_non_finite)(char *number)
{
    uint16_t bits;
    memcpy(&bits, number, 2);
    bits = FN(finite_or_zero)(bits);
    memcpy(number, &bits, 2);
}

/* Rows first.. next to each other. careful: what is not finite is 0. */
static void FN(copy_rows)(REAL *dst, int64_t dst_row, const mha_task *task, const mha_matrix *src, int64_t first,
                          int64_t count, int64_t cols, int careful)
{
    for (int64_t k = 0; k < count; k++, dst += dst_row) {
        FN(copy_pairs)(dst, mha_key_row(task, src, first + k), src->col, cols);
        for (int64_t i = 0; careful && i < cols; i++) FN(drop_non_finite)((char *)dst + 2 * i);
    }
}

/* Whether a row of count numbers can be read as pairs where it lies. */
MHA_INLINE int FN(lies_in_pairs)(const char *row, int64_t stride, int64_t count)
{
    return stride == 1 && count % 2 == 0 && (uintptr_t)row % sizeof(REAL) == 0;
}

/* dst[key / 2][col] = values of two keys, those of a last single key with zeros. careful: what is not finite is 0. */
static void FN(pack_value_pairs)(REAL *dst, int64_t dst_row, const mha_task *task, int64_t first, int64_t count,
                                 int careful)
{
    static const uint16_t zero = 0;
    int64_t step = task->value.col;
    for (int64_t k = 0; k < count; k += 2, dst += dst_row) {
        const uint16_t *low = (const uint16_t *)mha_key_row(task, &task->value, first + k);
        const uint16_t *high = k + 1 < count ? (const uint16_t *)mha_key_row(task, &task->value, first + k + 1) : &zero;
        int64_t high_step = k + 1 < count ? step : 0, c = 0;
        if (step == 1 && high_step == 1 && !careful)
            for (; c + V(lanes) <= task->value_dim; c += V(lanes)) V(store)(dst + c, V(join_pairs)(low + c, high + c));
        for (; c < task->value_dim; c++) {
            uint16_t numbers[2] = {low[c * step], high[c * high_step]};
            for (int i = 0; careful && i < 2; i++) numbers[i] = FN(finite_or_zero)(numbers[i]);
            uint32_t pair = numbers[0] | (uint32_t)numbers[1] << 16;
            memcpy(dst + c, &pair, sizeof *dst);
        }
        for (; c < dst_row; c++) dst[c] = 0;
    }
}

/* Scores of one vector of lanes become weights, rounded to pairs of keys: those of keys k and k + 1 of the block lie at
 * k / 2. Gives the sum of the weights before they were rounded; key k belongs to the k % 4-th part. */
MHA_INLINE VEC FN(pair_exponentials)(REAL *scores, const FN(run) *runs, int num_runs, int64_t first, int64_t visible,
                                     VEC m)
{
    VEC sum[4] = {V(zero)(), V(zero)(), V(zero)(), V(zero)()};
    for (int n = 0; n < num_runs; n++) {
        VEC weight[4];
        int64_t end = runs[n].first + runs[n].count, seen = mha_min(end, visible);
        for (int64_t k = runs[n].first; k < end; k += 4) {
    UNROLL for (int i = 0; i < 4; i++) {
                weight[i] = k + i >= first && k + i < seen
                                ? FN(exp_lanes)(V(sub)(V(load)(scores + (k + i) * V(panel)), m))
                                : V(zero)();
                sum[i] = V(add)(sum[i], weight[i]);
            }
            V(store)(scores + k / 2 * V(panel), V(pack_pairs)(weight[0], weight[1]));
            if (k + 2 < end) V(store)(scores + (k / 2 + 1) * V(panel), V(pack_pairs)(weight[2], weight[3]));
        }
    }
    return V(add)(V(add)(sum[0], sum[1]), V(add)(sum[2], sum[3]));
}

/* count weights of a row, and zeros behind them up to a whole vector, become pairs in place. */
static void FN(pack_weights)(REAL *weights, int64_t count)
{
    for (int64_t k = 0; k < count; k += 2 * V(lanes)) {
        VEC high = k + V(lanes) < count ? V(load)(weights + k + V(lanes)) : V(zero)();
        V(store)(weights + k / 2, V(pack_row)(V(load)(weights + k), high));
    }
}

/* acc[row][vec] = sum_k a[row][k] * b[k][vec] for a tile of rows x vecs vectors of columns, vecs even, b where it lies:
 * like product_tile. a: pairs. tail: the columns in the last two vectors where those are not whole, else 0. */
MHA_INLINE void FN(pair_product_tile)(const int rows, const int vecs, const REAL *RESTRICT a, int64_t a_row,
                                      const char *RESTRICT b, int64_t b_row, int64_t count, int64_t tail,
                                      const int64_t ahead, VEC acc[6][8])
{
    const int64_t last = (vecs - 2) * V(lanes);
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vecs; v++) acc[r][v] = V(zero)();
    for (int64_t k = 0; k < count; k += 2) {
        const uint16_t *row[2] = {(const uint16_t *)b + k * b_row, (const uint16_t *)b + (k + 1) * b_row};
        VEC col[8];
        UNROLL for (int i = 0; i < 2; i++) {
            FN(prefetch_row)((const char *)(row[i] + ahead * b_row), vecs * V(lanes) * 2);
            int present = k + i < count;
            UNROLL for (int v = 0; v < vecs - 2; v += 2)
                col[v + i] = present ? V(load_pairs)(row[i] + v * V(lanes)) : V(zero)();
            col[vecs - 2 + i] = !present ? V(zero)()
                                : tail   ? V(load_pairs_n)(row[i] + last, tail)
                                         : V(load_pairs)(row[i] + last);
        }
        UNROLL for (int v = 0; v < vecs; v += 2) V(interleave)(&col[v], &col[v + 1]);
        UNROLL for (int r = 0; r < rows; r++) {
            VEC broadcast = V(set1)(a[r * a_row + k / 2]);
            UNROLL for (int v = 0; v < vecs; v++) acc[r][v] = V(dot_pairs)(broadcast, col[v], acc[r][v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v += 2) V(in_order)(&acc[r][v], &acc[r][v + 1]);
}
#endif
