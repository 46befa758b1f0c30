/* Rows times a weight matrix plus a bias: the projections of a layer. An output is summed along the depth in blocks of
 * affine_depth, each from 0, whatever the tile.
 */

enum { FN(affine_depth) = 512, FN(affine_tile) = V(col_vecs) * V(lanes) };

/* out = acc + out, or acc + bias for the first block of the depth. */
MHA_INLINE void FN(affine_store)(const int rows, const int vecs, VEC acc[6][8], int64_t tail, const REAL *bias,
                                 REAL *RESTRICT out, int64_t out_row)
{
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vecs; v++) {
        REAL *dst = out + r * out_row + v * V(lanes);
        const REAL *other = bias ? bias + v * V(lanes) : dst;
        if (tail && v == vecs - 1)
            V(store_n)(dst, V(add)(acc[r][v], V(load_n)(other, tail)), tail);
        else
            V(store)(dst, V(add)(acc[r][v], V(load)(other)));
    }
}

MHA_INLINE void FN(affine_vecs)(const int rows, int vecs, const REAL *x, int64_t x_row, const char *weight,
                                int64_t weight_row, int64_t depth, int64_t tail, const REAL *bias, REAL *out,
                                int64_t out_row)
{
    VEC acc[6][8];
    if (V(col_vecs) >= 4 && vecs == 4) {
        FN(product_tile)(rows, 4, x, x_row, REAL_DTYPE, weight, weight_row, depth, tail, 0, acc);
        FN(affine_store)(rows, 4, acc, tail, bias, out, out_row);
    } else if (V(col_vecs) >= 3 && vecs == 3) {
        FN(product_tile)(rows, 3, x, x_row, REAL_DTYPE, weight, weight_row, depth, tail, 0, acc);
        FN(affine_store)(rows, 3, acc, tail, bias, out, out_row);
    } else if (vecs == 2) {
        FN(product_tile)(rows, 2, x, x_row, REAL_DTYPE, weight, weight_row, depth, tail, 0, acc);
        FN(affine_store)(rows, 2, acc, tail, bias, out, out_row);
    } else {
        FN(product_tile)(rows, 1, x, x_row, REAL_DTYPE, weight, weight_row, depth, tail, 0, acc);
        FN(affine_store)(rows, 1, acc, tail, bias, out, out_row);
    }
}

MHA_NOINLINE void FN(affine_rows)(int64_t rows, int vecs, const REAL *x, int64_t x_row, const char *weight,
                                  int64_t weight_row, int64_t depth, int64_t tail, const REAL *bias, REAL *out,
                                  int64_t out_row)
{
    if (rows == V(row_tile))
        FN(affine_vecs)(V(row_tile), vecs, x, x_row, weight, weight_row, depth, tail, bias, out, out_row);
    else if (V(row_tile) > 4 && rows == 4)
        FN(affine_vecs)(4, vecs, x, x_row, weight, weight_row, depth, tail, bias, out, out_row);
    else if (rows == 2)
        FN(affine_vecs)(2, vecs, x, x_row, weight, weight_row, depth, tail, bias, out, out_row);
    else
        FN(affine_vecs)(1, vecs, x, x_row, weight, weight_row, depth, tail, bias, out, out_row);
}

/* One column tile for all rows. */
static void FN(affine_columns)(const mha_affine *a, const REAL *x, int64_t x_row, int64_t col, int64_t width)
{
    const REAL *weight = (const REAL *)a->weight + (a->packed ? col * a->depth : col);
    int64_t weight_row = a->packed ? mha_round_up(width, V(lanes)) : a->weight_row;
    int vecs = (int)(mha_round_up(width, V(lanes)) / V(lanes));
    for (int64_t k = 0; k == 0 || k < a->depth; k += FN(affine_depth)) {
        int64_t depth = mha_min(a->depth - k, FN(affine_depth));
        for (int64_t r = 0; r < a->rows;) {
            int64_t left = a->rows - r, tile = mha_next_tile(left, V(row_tile));
            FN(affine_rows)(tile, vecs, x + r * x_row + k, x_row, (const char *)(weight + k * weight_row), weight_row,
                            depth, width % V(lanes), k ? NULL : (const REAL *)a->bias + col,
                            (REAL *)a->out + r * a->out_row + col, a->out_row);
            r += tile;
        }
    }
}

static void FN(affine)(const mha_affine *a, void *memory)
{
    const REAL *x = (const REAL *)a->x.data;
    int64_t x_row = a->x.row;
    if (a->x.dtype != REAL_DTYPE || a->x.col != 1) {
        x = memory;
        x_row = a->depth;
        FN(pack_rows)(memory, x_row, &a->x, 0, a->rows, a->depth);
    }
    for (int64_t col = a->col_begin; col < a->col_end; col += FN(affine_tile))
        FN(affine_columns)(a, x, x_row, col, mha_min(a->col_end - col, FN(affine_tile)));
}

/* One column tile of a weight matrix, its rows next to each other and filled up to whole vectors. */
static void FN(pack_weight)(void *packed, const mha_matrix *weight, int64_t depth, int64_t cols, int64_t tile)
{
    int64_t col = tile * FN(affine_tile), width = mha_min(cols - col, FN(affine_tile));
    mha_matrix columns = *weight;
    columns.data += col * weight->col * mha_item_bytes(weight->dtype);
    FN(pack_rows)((REAL *)packed + col * depth, mha_round_up(width, V(lanes)), &columns, 0, depth, width);
}
