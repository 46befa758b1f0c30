/* Few queries (decoding) against key blocks: vectors along the depth, every key and value read once for a tile of rows.
 * The same online softmax as the panels', with the scores of a row lying along the keys. Each score and each output is
 * summed in an order that depends on neither the number of rows nor the tile.
 */

/* How many bytes before their turn keys and values are prefetched. */
enum { FN(few_prefetch_bytes) = 8192 };

/* Whether keys and values are prefetched. One row of the compute dtype has so little arithmetic that this gains only
 * where a long head lies in one piece. */
static int FN(few_prefetches)(const mha_task *task)
{
    if (task->num_rows > 1 || task->key.dtype != REAL_DTYPE) return 1;
    return task->key.row == task->head_dim && task->value.row == task->value_dim &&
           task->visible - task->first > MHA_KEY_SPLIT;
}

/* Where in the rows to come the next line is prefetched: in the order of memory, which hardware follows best, while a
 * tile reads four rows side by side. */
typedef struct FN(prefetcher) {
    const char *row;
    int64_t row_bytes, step, at; /* step: from row to row in bytes */
    int64_t rest;                /* of the lines of a tile's rows, those that its steps do not prefetch */
} FN(prefetcher);

MHA_INLINE void FN(prefetch_next)(FN(prefetcher) *next, const int64_t bytes)
{
    const int64_t line = bytes < 64 ? bytes : 64;
    if (!next->row) return;
    UNROLL for (int64_t i = 0; i < bytes; i += line) {
        PREFETCH(next->row + next->at);
        next->at += line;
        if (next->at < next->row_bytes) continue;
        next->row += next->step;
        next->at = 0;
    }
}

/* Numbers of a row that one vector holds. */
enum { FN(few_numbers) = PAIRS ? 2 * V(lanes) : V(lanes) };

/* One vector of a row from number index on, its pairs or converted; of the row's last numbers n. */
MHA_INLINE VEC FN(load_depth)(const mha_dtype storage, const char *row, int64_t index)
{
#if PAIRS
    (void)storage;
    return V(load_pairs)((const uint16_t *)row + index);
#else
    return FN(load_as)(storage, row, index);
#endif
}

MHA_INLINE VEC FN(load_depth_n)(const mha_dtype storage, const char *row, int64_t index, int64_t n)
{
#if PAIRS
    (void)storage;
    return V(load_pairs_n)((const uint16_t *)row + index, n);
#else
    return FN(load_as_n)(storage, row, index, n);
#endif
}

/* scores[row][key] of a tile of rows x keys (1 to 4). Four scores a row are written, two by four rows that take two
 * keys at a time: rows of scores have room for them. key: of dtype storage, converted in registers (pairs are not),
 * once for all rows. rows, keys, storage: constants once inlined. */
MHA_INLINE void FN(dot_tile)(const int rows, const int keys, const mha_dtype storage, const REAL *RESTRICT query,
                             int64_t query_row, const char *RESTRICT key, int64_t key_row, int64_t head_dim,
                             FN(prefetcher) *next, REAL *RESTRICT scores, int64_t score_row)
{
    VEC acc[4][4];
    int64_t whole = head_dim - head_dim % FN(few_numbers), e = 0;
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int k = 0; k < 4; k++) acc[r][k] = V(zero)();
    for (; e < whole; e += FN(few_numbers), query += V(lanes)) {
        VEC depth[4];
        FN(prefetch_next)(next, keys * FN(few_numbers) * mha_item_bytes(storage));
        UNROLL for (int k = 0; k < keys; k++) depth[k] = FN(load_depth)(storage, key, k * key_row + e);
        UNROLL for (int k = 0; k < keys; k++) KEEP(depth[k]);
        UNROLL for (int r = 0; r < rows; r++) {
            VEC q = V(load)(query + r * query_row);
            UNROLL for (int k = 0; k < keys; k++) acc[r][k] = FN(multiply_add)(q, depth[k], acc[r][k]);
        }
    }
    for (int64_t i = 0; i < next->rest; i++) FN(prefetch_next)(next, 64);
    if (e < head_dim)
        UNROLL for (int k = 0; k < keys; k++) {
            VEC depth = FN(load_depth_n)(storage, key, k * key_row + e, head_dim - e);
            UNROLL for (int r = 0; r < rows; r++)
                acc[r][k] = FN(multiply_add)(V(load)(query + r * query_row), depth, acc[r][k]);
        }
    if (rows > 2 && V(few_keys) == 2) { /* two rows' sums at a time */
        UNROLL for (int r = 0; r < rows; r += 2) {
            REAL sums[4];
            V(hsum4)(acc[r][0], acc[r][1], acc[r + 1][0], acc[r + 1][1], sums);
            UNROLL for (int i = 0; i < 4; i++) scores[(r + i / 2) * score_row + i % 2] = sums[i];
        }
        return;
    }
    UNROLL for (int r = 0; r < rows; r++)
        V(hsum4)(acc[r][0], acc[r][1], acc[r][2], acc[r][3], scores + r * score_row);
}

MHA_INLINE void FN(dot_rows)(const int rows, const mha_dtype storage, const REAL *query, int64_t query_row,
                             const char *key, int64_t key_row, int64_t count, int64_t head_dim, int prefetches,
                             REAL *scores, int64_t score_row)
{
    const int64_t item = mha_item_bytes(storage), row_bytes = head_dim * item;
    if (count * row_bytes <= FN(few_prefetch_bytes)) prefetches = 0; /* so few that the division below takes longer */
    int64_t ahead = prefetches ? FN(few_prefetch_bytes) / mha_max(row_bytes, 64) : 0;
    const int keys = rows > 2 ? V(few_keys) : 4;
    const int64_t step = keys * FN(few_numbers) * item, line = step < 64 ? step : 64;
    int64_t rest = keys * mha_round_up(row_bytes, line) - head_dim / FN(few_numbers) * step;
    FN(prefetcher) next = {prefetches ? key + ahead * key_row * item : NULL, row_bytes, key_row * item, 0,
                           prefetches ? mha_divide_up(rest, 64) : 0};
    int64_t k = 0;
    for (; k + keys <= count; k += keys, key += keys * key_row * item)
        FN(dot_tile)(rows, keys, storage, query, query_row, key, key_row, head_dim, &next, scores + k, score_row);
    if (keys > 3 && count - k == 3) FN(dot_tile)(rows, 3, storage, query, query_row, key, key_row, head_dim, &next,
                                                 scores + k, score_row);
    if (keys > 2 && count - k == 2) FN(dot_tile)(rows, 2, storage, query, query_row, key, key_row, head_dim, &next,
                                                 scores + k, score_row);
    if (count - k == 1) FN(dot_tile)(rows, 1, storage, query, query_row, key, key_row, head_dim, &next, scores + k,
                                     score_row);
}

/* scores[row][key] of a block, times the scales of the keys. */
MHA_INLINE void FN(few_scores_of)(const mha_dtype storage, const mha_task *task, FN(scratch) *s,
                                  const mha_rows *keys, int64_t count)
{
    int64_t key_row = keys->row, head_dim = task->head_dim;
    int prefetches = FN(few_prefetches)(task);
    for (int64_t r = 0, left; (left = task->num_rows - r) > 0;) {
        const REAL *query = s->query[0] + r * s->few_row;
        REAL *scores = s->scores + r * s->score_row;
        if (V(few_rows) >= 4 && left >= 4)
            FN(dot_rows)(4, storage, query, s->few_row, keys->data, key_row, count, head_dim, prefetches, scores,
                         s->score_row);
        else if (left >= 2)
            FN(dot_rows)(2, storage, query, s->few_row, keys->data, key_row, count, head_dim, prefetches, scores,
                         s->score_row);
        else
            FN(dot_rows)(1, storage, query, s->few_row, keys->data, key_row, count, head_dim, prefetches, scores,
                         s->score_row);
        r += left >= V(few_rows) ? V(few_rows) : left >= 2 ? 2 : 1;
    }
}

/* dst[i] = numbers[i] * scale[i * step]; careful: a scale that is no finite number counts as 0. */
static void FN(scale_keys)(REAL *dst, const REAL *numbers, const float *scale, int64_t step, int64_t count, int careful)
{
    for (int64_t i = 0; i < count; i++) {
        REAL factor = (REAL)scale[i * step];
        dst[i] = numbers[i] * (careful && factor - factor != 0 ? 0 : factor);
    }
}

static void FN(few_scores)(const mha_task *task, FN(scratch) *s, const FN(block) *block)
{
    const mha_rows *keys = &block->keys;
    if (FN(few_reads)(REAL_DTYPE) && keys->dtype == REAL_DTYPE)
        FN(few_scores_of)(REAL_DTYPE, task, s, keys, block->count);
    else if (FN(few_reads)(MHA_F16) && keys->dtype == MHA_F16)
        FN(few_scores_of)(MHA_F16, task, s, keys, block->count);
    else if (FN(few_reads)(MHA_BF16) && keys->dtype == MHA_BF16)
        FN(few_scores_of)(MHA_BF16, task, s, keys, block->count);
    else if (FN(few_reads)(MHA_I8))
        FN(few_scores_of)(MHA_I8, task, s, keys, block->count);
    for (int64_t r = 0; keys->scale && r < task->num_rows; r++) {
        REAL *scores = s->scores + r * s->score_row;
        FN(scale_keys)(scores, scores, keys->scale, keys->scale_row, block->count, 0);
    }
    for (int64_t r = 0; PAIRS && r < task->num_rows; r++) /* queries of pairs do not hold the scale */
        for (int64_t k = 0; k < block->count; k += V(lanes)) {
            REAL *scores = s->scores + r * s->score_row + k;
            V(store)(scores, FN(scaled)(V(load)(scores), (REAL)task->scale));
        }
}

/* out[row] = alpha[row] * out[row] + sum_key weights[row][key] * value[key] for rows x vecs vectors of columns; tail:
 * the columns in the last vector, or in the last two of pairs, where that is not whole, else 0. */
MHA_INLINE void FN(few_output_tile)(const int rows, const int vecs, const mha_dtype storage,
                                    const REAL *RESTRICT weights, int64_t weight_row, const char *RESTRICT value,
                                    int64_t value_row, int64_t count, int64_t tail, int prefetches,
                                    const REAL *RESTRICT alpha, int first, REAL *RESTRICT out, int64_t out_row)
{
    VEC acc[6][8];
    const int64_t ahead = FN(few_prefetch_bytes) / (vecs * V(lanes) * mha_item_bytes(storage));
#if PAIRS
    (void)prefetches;
    FN(pair_product_tile)(rows, vecs, weights, weight_row, value, value_row, count, tail, ahead, acc);
#else
    if (rows == 1 && storage == REAL_DTYPE && !prefetches)
        FN(product_tile)(rows, vecs, weights, weight_row, storage, value, value_row, count, tail, 0, acc);
    else
        FN(product_tile)(rows, vecs, weights, weight_row, storage, value, value_row, count, tail, ahead, acc);
#endif
    int absent = PAIRS && tail > 0 && tail <= V(lanes); /* the last vector lies behind the row */
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vecs; v++) {
        if (v == vecs - 1 && absent) break;
        REAL *dst = out + r * out_row + v * V(lanes);
        V(store)(dst, first ? acc[r][v] : V(fma)(V(load)(dst), V(set1)(alpha[r]), acc[r][v]));
    }
}

/* Column tiles as wide as the rows leave registers for: values come from memory by whole rows where that fits. */
MHA_INLINE void FN(few_output_rows)(const int rows, const mha_dtype storage, const REAL *weights, int64_t weight_row,
                                    const char *values, int64_t value_row, int64_t count, int64_t cols, int prefetches,
                                    const REAL *alpha, int first, REAL *out, int64_t out_row)
{
    const int64_t most = rows > 2 ? V(col_vecs) : 2 * V(col_vecs);
    for (int64_t c = 0; c < cols;) {
        int64_t vecs = mha_round_up(cols - c, FN(few_numbers)) / V(lanes);
        int64_t width = mha_min(vecs >= 8 ? 8 : vecs >= 4 ? 4 : vecs >= 2 ? 2 : 1, most);
        int64_t tail = cols - c < width * V(lanes) ? cols % FN(few_numbers) : 0;
        const char *value = values + c * mha_item_bytes(storage);
        if (V(col_vecs) == 4 && rows <= 2 && width == 8)
            FN(few_output_tile)(rows, 8, storage, weights, weight_row, value, value_row, count, tail, prefetches,
                                alpha, first, out + c, out_row);
        else if (width == 4)
            FN(few_output_tile)(rows, 4, storage, weights, weight_row, value, value_row, count, tail, prefetches,
                                alpha, first, out + c, out_row);
        else if (width == 2)
            FN(few_output_tile)(rows, 2, storage, weights, weight_row, value, value_row, count, tail, prefetches,
                                alpha, first, out + c, out_row);
        else if (!PAIRS)
            FN(few_output_tile)(rows, 1, storage, weights, weight_row, value, value_row, count, tail, prefetches,
                                alpha, first, out + c, out_row);
        c += width * V(lanes);
    }
}

static const REAL FN(lane_index)[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Caps the scores of one row and adds its slope, for count keys from first on. */
static void FN(few_rules)(const mha_task *task, const mha_row *row, int64_t first, int64_t count, REAL *scores)
{
    int64_t base = first / MHA_KEY_BLOCK * MHA_KEY_BLOCK;
    VEC slope = V(set1)(row->slope ? *(const REAL *)row->slope : 0), index = V(load)(FN(lane_index));
    VEC position = V(set1)((REAL)(row->position - base));
    for (int64_t k = 0; k < count; k += V(lanes)) {
        VEC score = V(load)(scores + k), key = V(add)(index, V(set1)((REAL)(first - base + k)));
        if (task->softcap != 0) score = FN(cap)(score, (REAL)task->softcap);
        if (row->slope) score = FN(add_slope)(score, slope, V(sub)(position, key));
        V(store)(scores + k, score);
    }
}

/* Applies the mask of one row to the scores of count keys from first on. */
static void FN(few_mask)(const mha_task *task, FN(scratch) *s, const mha_row *row, int64_t first, int64_t count,
                         REAL *scores)
{
    if (task->mask_dtype == MHA_BOOL) {
        const char *mask = row->mask + first * task->mask_col;
        for (int64_t k = 0; k < count; k++) scores[k] = mask[k * task->mask_col] ? scores[k] : (REAL)-INFINITY;
        return;
    }
    FN(convert)(s->mask_rows, row->mask + first * task->mask_col * mha_item_bytes(task->mask_dtype), task->mask_dtype,
                task->mask_col, count);
    for (int64_t k = 0; k < count; k += V(lanes))
        V(store)(scores + k, V(add_bias)(V(load)(scores + k), V(load)(s->mask_rows + k)));
}

/* All that is done to the scores of one row but for the keys behind the last visible one. */
MHA_NOINLINE void FN(few_adjust)(const mha_task *task, FN(scratch) *s, const mha_row *row, int64_t first, int64_t count,
                                 REAL *scores)
{
    if (task->softcap != 0 || task->has_slopes) FN(few_rules)(task, row, first, count, scores);
    if (task->has_mask) FN(few_mask)(task, s, row, first, count, scores);
    if (task->has_window)
        for (int64_t k = 0; k < mha_min(row->first - first, count); k++) scores[k] = (REAL)-INFINITY;
}

/* Hides the keys of a block at or beyond visible, the padding of the last vector too, and gives the largest score. The
 * vectors are stored whole: small stores would hold up the loads of the next pass. */
static REAL FN(few_max)(REAL *scores, int64_t visible, int64_t count)
{
    VEC highest = V(set1)(-INFINITY), index = V(load)(FN(lane_index));
    for (int64_t k = 0; k < count; k += V(lanes)) {
        VEC score = V(load)(scores + k);
        if (visible < k + V(lanes)) {
            score = V(below)(score, index, V(set1)((REAL)mha_max(visible - k, 0)));
            V(store)(scores + k, score);
        }
        highest = V(max)(highest, score);
    }
    return V(hmax)(highest);
}

MHA_INLINE VEC FN(few_exponentials)(REAL *scores, int64_t count, REAL old_max, REAL block_max)
{
    VEC m = V(max)(V(max)(V(set1)(old_max), V(set1)(block_max)), V(set1)(-REAL_HIGHEST)), sum = V(zero)();
    for (int64_t k = 0; k < count; k += V(lanes)) {
        VEC weight = FN(exp_lanes)(V(sub)(V(load)(scores + k), m));
        V(store)(scores + k, weight);
        sum = V(add)(sum, weight);
    }
    return sum;
}

/* Scores become weights. What there is one of for each row is worked out for all rows in one vector. */
static void FN(few_softmax)(FN(scratch) *s, int64_t rows, int64_t count, const REAL *block_max, FN(state) *state)
{
    REAL sums[MHA_FEW_ROWS + V(lanes)];
    for (int64_t r = 0; r < rows; r += 4) {
        VEC sum[4];
        UNROLL for (int64_t i = 0; i < 4; i++)
            sum[i] = r + i < rows ? FN(few_exponentials)(s->scores + (r + i) * s->score_row, count,
                                                         state->row_max[r + i], block_max[r + i])
                                  : V(zero)();
        V(hsum4)(sum[0], sum[1], sum[2], sum[3], sums + r);
    }
    for (int64_t r = 0; r < rows; r += V(lanes)) {
        VEC old = V(load)(state->row_max + r), now = V(max)(old, V(load)(block_max + r));
        VEC alpha = FN(exp_lanes)(V(sub)(old, V(max)(now, V(set1)(-REAL_HIGHEST))));
        V(store)(s->alpha + r, alpha);
        V(store)(state->row_max + r, now);
        V(store)(state->row_sum + r, V(fma)(V(load)(state->row_sum + r), alpha, V(load)(sums + r)));
    }
}

MHA_INLINE void FN(few_output_of)(const mha_dtype storage, const mha_task *task, FN(scratch) *s, const REAL *weights,
                                  const REAL *alphas, const mha_rows *values, int64_t count, FN(state) *state,
                                  int first)
{
    int64_t cols = task->value_dim, score_row = s->score_row, row = values->row;
    int prefetches = FN(few_prefetches)(task);
    for (int64_t r = 0, left; (left = task->num_rows - r) > 0;) {
        const REAL *from = weights + r * score_row, *alpha = alphas + r;
        REAL *out = state->out + r * s->out_row;
        /* four rows where they need no narrower column tiles than two, or where registers are few anyway */
        int four = V(few_rows) >= 4 && left >= 4 && (V(col_vecs) == 2 || cols <= V(col_vecs) * V(lanes));
        if (V(few_rows) >= 4 && four)
            FN(few_output_rows)(4, storage, from, score_row, values->data, row, count, cols, prefetches, alpha, first,
                                out, s->out_row);
        else if (left >= 2)
            FN(few_output_rows)(2, storage, from, score_row, values->data, row, count, cols, prefetches, alpha, first,
                                out, s->out_row);
        else
            FN(few_output_rows)(1, storage, from, score_row, values->data, row, count, cols, prefetches, alpha, first,
                                out, s->out_row);
        r += four ? 4 : left >= 2 ? 2 : 1;
    }
}

/* The output moves on by the keys of a block or of a part of one, whose weights are multiplied by the scales of the
 * values; their sum is not. weights: [row][score_row] from the first of these keys on. */
static void FN(few_output)(const mha_task *task, FN(scratch) *s, const FN(block) *block, REAL *weights,
                           const REAL *alphas, FN(state) *state, int first, int careful)
{
    const mha_rows *values = &block->values;
    const REAL *scaled = values->scale ? s->scaled : weights;
    for (int64_t r = 0; values->scale && r < task->num_rows; r++)
        FN(scale_keys)(s->scaled + r * s->score_row, weights + r * s->score_row, values->scale, values->scale_row,
                       block->count, careful);
#if PAIRS
    for (int64_t r = 0; r < task->num_rows; r++) FN(pack_weights)(weights + r * s->score_row, block->count);
#endif
    if (FN(few_reads)(REAL_DTYPE) && values->dtype == REAL_DTYPE)
        FN(few_output_of)(REAL_DTYPE, task, s, scaled, alphas, values, block->count, state, first);
    else if (FN(few_reads)(MHA_F16) && values->dtype == MHA_F16)
        FN(few_output_of)(MHA_F16, task, s, scaled, alphas, values, block->count, state, first);
    else if (FN(few_reads)(MHA_BF16) && values->dtype == MHA_BF16)
        FN(few_output_of)(MHA_BF16, task, s, scaled, alphas, values, block->count, state, first);
    else if (FN(few_reads)(MHA_I8))
        FN(few_output_of)(MHA_I8, task, s, scaled, alphas, values, block->count, state, first);
}

_Static_assert(!PAIRS || V(few_part) >= MHA_KEY_BLOCK, "weights become pairs a whole block at a time");

/* The same in parts, whose rows of values stay in the nearest cache while their columns are gone through one tile after
 * the other. The borders are the same for all rows, widths and dtypes, and so is the order of summation. */
static void FN(few_output_parts)(const mha_task *task, FN(scratch) *s, const FN(block) *block, FN(state) *state,
                                 int first, int careful)
{
    REAL unchanged[MHA_FEW_ROWS];
    for (int64_t r = 0; r < MHA_FEW_ROWS; r++) unchanged[r] = 1;
    FN(block) part = *block;
    for (int64_t done = 0; done < block->count; done += part.count) {
        part.first = block->first + done;
        part.count = mha_min(block->count - done, V(few_part) - part.first % V(few_part));
        part.values.data = block->values.data + done * block->values.row * mha_item_bytes(block->values.dtype);
        if (part.values.scale) part.values.scale = block->values.scale + done * block->values.scale_row;
        FN(few_output)(task, s, &part, s->scores + done, done ? unchanged : s->alpha, state, first && !done, careful);
    }
}

/* The scores of all rows against a block, hidden ones -inf, and their maxima. */
static void FN(few_hidden_scores)(const mha_task *task, FN(scratch) *s, const FN(block) *block, REAL *block_max)
{
    int64_t count = block->count;
    int adjusts = task->has_mask || task->has_window || task->has_slopes || task->softcap != 0;
    FN(few_scores)(task, s, block);
    for (int64_t r = 0; r < task->num_rows; r++) {
        REAL *scores = s->scores + r * s->score_row;
        if (adjusts) FN(few_adjust)(task, s, task->rows + r, block->first, count, scores);
        block_max[r] = FN(few_max)(scores, mha_min(task->rows[r].visible - block->first, count), count);
    }
}

static void FN(few_block)(const mha_task *task, FN(scratch) *s, const FN(block) *block, FN(state) *state, int first,
                          int with_output, int careful)
{
    int64_t rows = task->num_rows, count = block->count;
    REAL block_max[MHA_FEW_ROWS + V(lanes)];
    FN(few_hidden_scores)(task, s, block, block_max);
    FN(few_softmax)(s, rows, count, block_max, state);
    if (!with_output) return;
    if (V(few_part) < MHA_KEY_BLOCK)
        FN(few_output_parts)(task, s, block, state, first, careful);
    else
        FN(few_output)(task, s, block, s->scores, s->alpha, state, first, careful);
    FN(run) all = {0, count};
    if (careful)
        FN(add_non_finite)(task, task->rows, rows, block->first, &all, 1, s->scores, s->score_row, 1, PAIRS, state->out,
                           s->out_row);
}

static void FN(few_split)(const mha_task *task, FN(scratch) *s, int64_t split, int with_output, int careful,
                          FN(state) *state)
{
    int64_t begin = FN(split_first)(task, split), end = mha_min(task->visible, (split + 1) * MHA_KEY_SPLIT), next;
    FN(clear)(state, task->num_rows);
    for (int64_t first = begin; first < end; first = next) {
        next = mha_block_end(first, end);
        FN(block) block;
        FN(open_block)(&block, task, s, first, next, 0, careful);
        FN(few_block)(task, s, &block, state, first == begin, with_output, careful);
    }
}

/* Queries one after the other, multiplied by the scale, zeros behind their depth; pairs are copied as they are. */
static void FN(pack_few_queries)(const mha_task *task, FN(scratch) *s)
{
#if PAIRS
    for (int64_t r = 0; r < task->num_rows; r++) {
        REAL *query = s->query[0] + r * s->few_row;
        memset(query, 0, (size_t)s->few_row * sizeof(REAL));
        FN(copy_pairs)(query, task->rows[r].query, task->query_col, task->head_dim);
    }
#else
    VEC scale = V(set1)((REAL)task->scale);
    int64_t head_dim = task->head_dim;
    for (int64_t r = 0; r < task->num_rows; r++) {
        REAL *query = s->query[0] + r * s->few_row;
        const REAL *from = FN(query_row)(task, task->rows + r, s->converted);
        int64_t e = 0;
        for (; e + V(lanes) <= head_dim; e += V(lanes)) V(store)(query + e, V(mul)(V(load)(from + e), scale));
        if (e < head_dim) V(store)(query + e, V(mul)(V(load_n)(from + e, head_dim - e), scale));
    }
#endif
}

static void FN(attend_few)(const mha_task *task, void *memory)
{
    FN(scratch) *s = memory;
    uintptr_t left = (uintptr_t)task->state;
    FN(state) part = task->state ? FN(take_state)(&left, task) : s->split[0];
    FN(pack_few_queries)(task, s);
    if (task->split_begin >= task->split_end) FN(clear)(&s->total[0], task->num_rows);
    for (int64_t split = task->split_begin; split < task->split_end; split++) {
        FN(few_split)(task, s, split, 1, 0, &part);
        if (!FN(is_finite)(&part, task->num_rows, s->out_row)) FN(few_split)(task, s, split, 1, 1, &part);
        if (task->state) return;
        FN(advance)(task->num_rows, s->out_row, &s->total[0], &part, split == task->split_begin);
    }
    if (!task->state) s->split[0] = part;
    FN(finish)(task, task->rows, task->num_rows, s->out_row, &s->total[0]);
}

/* weights[row][key] for the keys of a block, from scores with hidden ones -inf and the state over all keys. */
static void FN(few_write_weights)(const mha_task *task, const FN(scratch) *s, const FN(block) *block,
                                  const FN(state) *state)
{
    for (int64_t r = 0; r < task->num_rows; r++) {
        const REAL *scores = s->scores + r * s->score_row;
        REAL *dst = (REAL *)task->rows[r].weights + block->first;
        VEC m = V(set1)(state->row_max[r] > -REAL_HIGHEST ? state->row_max[r] : -REAL_HIGHEST);
        VEC factor = V(set1)(1 / state->row_sum[r]);
        for (int64_t k = 0; k < block->count; k += V(lanes)) {
            VEC score = V(load)(scores + k), weight = V(mul)(FN(exp_lanes)(V(sub)(score, m)), factor);
            V(store_n)(dst + k, V(zero_hidden)(weight, score), mha_min(block->count - k, V(lanes)));
        }
    }
}

/* The weights of few queries: the keys once for the sums, once more to write. */
static void FN(few_weights)(const mha_task *task, void *memory)
{
    FN(scratch) *s = memory;
    FN(state) *total = &s->total[0];
    REAL block_max[MHA_FEW_ROWS + V(lanes)];
    int64_t rows = task->num_rows, next;
    if (task->split_begin >= task->split_end) return; /* nobody sees a key */
    FN(pack_few_queries)(task, s);
    for (int64_t split = task->split_begin; split < task->split_end; split++) {
        FN(few_split)(task, s, split, 0, 0, &s->split[0]);
        FN(advance)(rows, 0, total, &s->split[0], split == task->split_begin);
    }
    FN(add_sinks)(task->rows, rows, total);
    for (int64_t first = FN(split_first)(task, task->split_begin); first < task->visible; first = next) {
        next = mha_block_end(first, task->visible);
        FN(block) block;
        FN(open_block)(&block, task, s, first, next, 0, 0);
        FN(few_hidden_scores)(task, s, &block, block_max);
        FN(few_write_weights)(task, s, &block, total);
    }
    FN(undefined_weights)(task, task->rows, rows, total);
}
