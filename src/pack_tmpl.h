/* Copies into the workspace: storage dtype to compute dtype, rows to contiguous rows, queries to a transposed panel.
 * Takes REAL_DTYPE and REAL_HIGHEST. */

/* count numbers of float16, bfloat16 or int8. storage: a constant once inlined. */
MHA_INLINE void FN(widen)(const mha_dtype storage, REAL *RESTRICT dst, const char *src, int64_t stride, int64_t count)
{
    int64_t i = 0;
    if (stride != 1) {
        for (; i < count; i++) V(store_n)(dst + i, FN(load_as_n)(storage, src, i * stride, 1), 1);
        return;
    }
    for (; i + V(lanes) <= count; i += V(lanes)) V(store)(dst + i, FN(load_as)(storage, src, i));
    if (i < count) V(store_n)(dst + i, FN(load_as_n)(storage, src, i, count - i), count - i);
}

/* float64 to the compute dtype: a finite number stays finite, since only -inf hides a key. */
MHA_INLINE REAL FN(narrow)(double x)
{
    if (x > REAL_HIGHEST && x < INFINITY) return REAL_HIGHEST;
    if (x < -REAL_HIGHEST && x > -INFINITY) return -REAL_HIGHEST;
    return (REAL)x;
}

static void FN(convert)(REAL *RESTRICT dst, const char *src, mha_dtype dtype, int64_t stride, int64_t count)
{
    if (dtype == MHA_F32) {
        const float *from = (const float *)src;
        if (stride == 1)
            for (int64_t i = 0; i < count; i++) dst[i] = (REAL)from[i];
        else
            for (int64_t i = 0; i < count; i++) dst[i] = (REAL)from[i * stride];
    } else if (dtype == MHA_F16) {
        FN(widen)(MHA_F16, dst, src, stride, count);
    } else if (dtype == MHA_BF16) {
        FN(widen)(MHA_BF16, dst, src, stride, count);
    } else if (dtype == MHA_I8) {
        FN(widen)(MHA_I8, dst, src, stride, count);
    } else {
        const double *from = (const double *)src;
        for (int64_t i = 0; i < count; i++) dst[i] = FN(narrow)(from[i * stride]);
    }
}

static void FN(multiply)(REAL *numbers, int64_t count, REAL factor)
{
    for (int64_t i = 0; i < count; i++) numbers[i] *= factor;
}

/* dst[count][dst_row] = rows first.. of a matrix with cols columns, times its scale, zeros behind them. */
static void FN(pack_rows)(REAL *dst, int64_t dst_row, const mha_matrix *src, int64_t first, int64_t count, int64_t cols)
{
    int64_t bytes = mha_item_bytes(src->dtype);
    int whole = src->dtype == REAL_DTYPE && src->col == 1 && cols == dst_row && !src->scale;
    if (whole) { /* vectors: a library's copy is a call for each row */
        const REAL *from = (const REAL *)src->data + first * src->row;
        for (int64_t i = 0; i < count; i++, dst += dst_row, from += src->row)
            for (int64_t c = 0; c < cols; c += V(lanes)) V(store)(dst + c, V(load)(from + c));
        return;
    }
    for (int64_t i = 0; i < count; i++, dst += dst_row) {
        FN(convert)(dst, src->data + (first + i) * src->row * bytes, src->dtype, src->col, cols);
        if (src->scale) FN(multiply)(dst, cols, (REAL)src->scale[(first + i) * src->scale_row]);
        for (int64_t c = cols; c < dst_row; c++) dst[c] = 0;
    }
}

/* The numbers or pairs of a query next to each other: where it lies, or copied. */
static const REAL *FN(query_row)(const mha_task *task, const mha_row *row, REAL *copy)
{
#if PAIRS
    if (FN(lies_in_pairs)(row->query, task->query_col, task->head_dim)) return (const REAL *)row->query;
    FN(copy_pairs)(copy, row->query, task->query_col, task->head_dim);
#else
    if (task->query_dtype == REAL_DTYPE && task->query_col == 1) return (const REAL *)row->query;
    FN(convert)(copy, row->query, task->query_dtype, task->query_col, task->head_dim);
#endif
    return copy;
}

/* dst[e][lane] = factor * query[lane][e] for up to lanes queries, zeros in the other lanes; dst_row: its row length.
 * Pairs are copied as they are. */
static void FN(pack_query_lanes)(REAL *dst, int64_t dst_row, const mha_task *task, const mha_row *rows, int64_t count,
                                 REAL factor, REAL *converted)
{
    const REAL *from[V(lanes)];
    int64_t steps = FN(steps)(task->head_dim);
    for (int64_t i = 0; i < V(lanes); i++)
        from[i] = i < count ? FN(query_row)(task, rows + i, converted + i * steps) : NULL;
    for (int64_t e = 0; e < steps; e += V(lanes)) {
        VEC r[V(lanes)];
        int64_t depth = steps - e < V(lanes) ? steps - e : V(lanes);
    UNROLL for (int i = 0; i < V(lanes); i++)
            r[i] = i >= count ? V(zero)() : depth == V(lanes) ? V(load)(from[i] + e) : V(load_n)(from[i] + e, depth);
        V(transpose)(r);
        UNROLL for (int i = 0; i < V(lanes); i++)
            if (i < depth) V(store)(dst + (e + i) * dst_row, PAIRS ? r[i] : V(mul)(r[i], V(set1)(factor)));
    }
}
