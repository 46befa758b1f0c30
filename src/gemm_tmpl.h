/* The micro-kernels: scores S^T = K Q^T and output O = P V of a panel, and the product of plain rows. Each result is
 * summed in one accumulator in the order of depth or keys, whatever the tile, so a row has the same bits in every tile.
 */

_Static_assert(V(key_tile) <= 8 && V(query_vecs) <= 3 && V(row_tile) <= 6 && V(col_vecs) <= 4 && V(few_rows) <= 4,
               "the accumulators below are declared for these tiles");

/* Steps of a sum over so many numbers: one each, or one a pair. */
MHA_INLINE int64_t FN(steps)(int64_t count) { return PAIRS ? (count + 1) / 2 : count; }

/* a * b + acc, of the two numbers in 32 bits where the kernel works on pairs. */
MHA_INLINE VEC FN(multiply_add)(VEC a, VEC b, VEC acc)
{
#if PAIRS
    return V(dot_pairs)(a, b, acc);
#else
    return V(fma)(a, b, acc);
#endif
}

/* Queries of pairs do not hold the scale, for they would be rounded once more. */
MHA_INLINE VEC FN(scaled)(VEC score, REAL scale) { return PAIRS ? V(mul)(score, V(set1)(scale)) : score; }

MHA_INLINE void FN(store_scores)(const int keys, const int vecs, const int kind, VEC acc[16][3], REAL scale,
                                 const FN(tile_mask) *mask, REAL *RESTRICT scores, REAL *RESTRICT max)
{
    UNROLL for (int v = 0; v < vecs; v++) {
        VEC highest = V(load)(max + v * V(lanes));
        UNROLL for (int k = 0; k < keys; k++) {
            REAL *dst = scores + k * V(panel) + v * V(lanes);
            VEC score = FN(hide)(kind, FN(scaled)(acc[k][v], scale), k, v, mask, dst);
            V(store)(dst, score);
            highest = V(max)(highest, score);
        }
        V(store)(max + v * V(lanes), highest);
    }
}

/* scores[key][lane] = sum_e keys[key][e] * query[e][lane] for a tile of keys x vecs vectors, -inf where the mask (NULL:
 * none) hides, and max[lane] raised to them. keys, vecs: constants once inlined. query: packed strip
 * [head_dim][query_vecs * lanes]. scores: row length panel. */
MHA_INLINE void FN(score_tile)(const int keys, const int vecs, const REAL *RESTRICT query, const REAL *RESTRICT key,
                               int64_t key_row, int64_t steps, REAL scale, const FN(tile_mask) *mask,
                               REAL *RESTRICT scores, REAL *RESTRICT max)
{
    VEC acc[16][3];
    const REAL *row[4] = {key, key + 4 * key_row, key + 8 * key_row, key + 12 * key_row};
    UNROLL for (int i = 0; i < 4; i++) OPAQUE(row[i]);
    UNROLL for (int k = 0; k < keys; k++) UNROLL for (int v = 0; v < vecs; v++) acc[k][v] = V(zero)();
    for (int64_t e = 0; e < steps; e++) {
        VEC q[3];
        UNROLL for (int v = 0; v < vecs; v++) q[v] = V(load)(query + v * V(lanes));
        UNROLL for (int k = 0; k < keys; k++) {
            VEC broadcast = V(set1)(row[k / 4][k % 4 * key_row + e]);
            UNROLL for (int v = 0; v < vecs; v++) acc[k][v] = FN(multiply_add)(broadcast, q[v], acc[k][v]);
        }
        query += V(query_vecs) * V(lanes);
    }
    if (!mask)
        FN(store_scores)(keys, vecs, FN(plain), acc, scale, mask, scores, max);
    else if (mask->bits)
        FN(store_scores)(keys, vecs, FN(by_bits), acc, scale, mask, scores, max);
    else if (mask->is_bias)
        FN(store_scores)(keys, vecs, FN(by_bias), acc, scale, mask, scores, max);
    else if (mask->before)
        FN(store_scores)(keys, vecs, FN(by_window), acc, scale, mask, scores, max);
    else
        FN(store_scores)(keys, vecs, FN(by_length), acc, scale, mask, scores, max);
}

/* vecs, then keys, to constants; what a level's tiles do not reach falls away at compile time. */
MHA_INLINE void FN(score_vecs)(const int keys, int vecs, const REAL *query, const REAL *key, int64_t key_row,
                               int64_t steps, REAL scale, const FN(tile_mask) *mask, REAL *scores, REAL *max)
{
    if (V(query_vecs) >= 3 && vecs == 3)
        FN(score_tile)(keys, 3, query, key, key_row, steps, scale, mask, scores, max);
    else if (vecs == 2)
        FN(score_tile)(keys, 2, query, key, key_row, steps, scale, mask, scores, max);
    else
        FN(score_tile)(keys, 1, query, key, key_row, steps, scale, mask, scores, max);
}

MHA_NOINLINE void FN(score_keys)(int64_t keys, int vecs, const REAL *query, const REAL *key, int64_t key_row,
                                 int64_t steps, REAL scale, const FN(tile_mask) *mask, REAL *scores, REAL *max)
{
    if (keys == FN(tall_tile))
        FN(score_tile)(FN(tall_tile), 1, query, key, key_row, steps, scale, mask, scores, max);
    else if (keys == V(key_tile))
        FN(score_vecs)(V(key_tile), vecs, query, key, key_row, steps, scale, mask, scores, max);
    else if (V(key_tile) > 4 && keys == 4)
        FN(score_vecs)(4, vecs, query, key, key_row, steps, scale, mask, scores, max);
    else if (keys == 2)
        FN(score_vecs)(2, vecs, query, key, key_row, steps, scale, mask, scores, max);
    else
        FN(score_vecs)(1, vecs, query, key, key_row, steps, scale, mask, scores, max);
}

/* Runs of keys of a block that some row may see. */
typedef struct FN(run) {
    int64_t first, count;
} FN(run);

/* out[row][col] = alpha[row] * out[row][col] + sum_key weights[key][row] * value[key][col] for a tile of rows x vecs
 * vectors and keys [seen, visible); where first is set, out is not read. rows, vecs: constants once inlined. weights:
 * row length panel. */
MHA_INLINE void FN(output_tile)(const int rows, const int vecs, const REAL *RESTRICT weights,
                                const REAL *RESTRICT value, int64_t value_row, const FN(run) *runs, int num_runs,
                                int64_t seen, int64_t visible, const REAL *RESTRICT alpha, int first,
                                REAL *RESTRICT out, int64_t out_row)
{
    VEC acc[6][4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vecs; v++) acc[r][v] = V(zero)();
    for (int n = 0; n < num_runs; n++) {
        int64_t first = mha_max(runs[n].first, seen), end = FN(steps)(mha_min(runs[n].first + runs[n].count, visible));
        int64_t begin = PAIRS ? first / 2 : first;
        const REAL *row = value + begin * value_row, *weight = weights + begin * V(panel);
        for (int64_t k = begin; k < end; k++) {
            VEC col[4];
            UNROLL for (int v = 0; v < vecs; v++) col[v] = V(load)(row + v * V(lanes));
            UNROLL for (int r = 0; r < rows; r++) {
                VEC broadcast = V(set1)(weight[r]);
                UNROLL for (int v = 0; v < vecs; v++) acc[r][v] = FN(multiply_add)(broadcast, col[v], acc[r][v]);
            }
            row += value_row;
            weight += V(panel);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        REAL *dst = out + r * out_row;
        UNROLL for (int v = 0; v < vecs; v++) {
            VEC sum = first ? acc[r][v] : V(fma)(V(load)(dst + v * V(lanes)), V(set1)(alpha[r]), acc[r][v]);
            V(store)(dst + v * V(lanes), sum);
        }
    }
}

MHA_INLINE void FN(output_vecs)(const int rows, int vecs, const REAL *weights, const REAL *value, int64_t value_row,
                                const FN(run) *runs, int num_runs, int64_t seen, int64_t visible, const REAL *alpha,
                                int first, REAL *out, int64_t out_row)
{
    if (V(col_vecs) >= 4 && vecs == 4)
        FN(output_tile)(rows, 4, weights, value, value_row, runs, num_runs, seen, visible, alpha, first, out, out_row);
    else if (V(col_vecs) >= 3 && vecs == 3)
        FN(output_tile)(rows, 3, weights, value, value_row, runs, num_runs, seen, visible, alpha, first, out, out_row);
    else if (vecs == 2)
        FN(output_tile)(rows, 2, weights, value, value_row, runs, num_runs, seen, visible, alpha, first, out, out_row);
    else
        FN(output_tile)(rows, 1, weights, value, value_row, runs, num_runs, seen, visible, alpha, first, out, out_row);
}

MHA_NOINLINE void FN(output_rows)(int64_t rows, int vecs, const REAL *weights, const REAL *value, int64_t value_row,
                                  const FN(run) *runs, int num_runs, int64_t seen, int64_t visible, const REAL *alpha,
                                  int first, REAL *out, int64_t out_row)
{
    if (rows == V(row_tile))
        FN(output_vecs)(V(row_tile), vecs, weights, value, value_row, runs, num_runs, seen, visible, alpha, first,
                        out, out_row);
    else if (V(row_tile) > 4 && rows == 4)
        FN(output_vecs)(4, vecs, weights, value, value_row, runs, num_runs, seen, visible, alpha, first, out, out_row);
    else if (rows == 2)
        FN(output_vecs)(2, vecs, weights, value, value_row, runs, num_runs, seen, visible, alpha, first, out, out_row);
    else
        FN(output_vecs)(1, vecs, weights, value, value_row, runs, num_runs, seen, visible, alpha, first, out, out_row);
}

MHA_INLINE void FN(prefetch_row)(const char *row, int64_t bytes)
{
    for (int64_t byte = 0; byte < bytes; byte += 64) PREFETCH(row + byte);
}

/* acc[row][vec] = sum_k a[row][k] * b[k][vec] for a tile of rows x vecs vectors; b is of dtype storage; tail: the
 * columns in the last vector where it is not whole, else 0; ahead: how many rows before their turn those of b are
 * prefetched, 0: never. rows, vecs, storage: constants once inlined. */
MHA_INLINE void FN(product_tile)(const int rows, const int vecs, const REAL *RESTRICT a, int64_t a_row,
                                 const mha_dtype storage, const char *RESTRICT b, int64_t b_row, int64_t count,
                                 int64_t tail, const int64_t ahead, VEC acc[6][8])
{
    const int64_t item = mha_item_bytes(storage), last = (vecs - 1) * V(lanes);
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vecs; v++) acc[r][v] = V(zero)();
    for (int64_t k = 0; k < count; k++, b += b_row * item) {
        VEC col[8];
        if (ahead) FN(prefetch_row)(b + ahead * b_row * item, vecs * V(lanes) * item);
        UNROLL for (int v = 0; v < vecs - 1; v++) col[v] = FN(load_as)(storage, b, v * V(lanes));
        col[vecs - 1] = tail ? FN(load_as_n)(storage, b, last, tail) : FN(load_as)(storage, b, last);
        UNROLL for (int r = 0; r < rows; r++) {
            VEC broadcast = V(set1)(a[r * a_row + k]);
            UNROLL for (int v = 0; v < vecs; v++) acc[r][v] = V(fma)(broadcast, col[v], acc[r][v]);
        }
    }
}
