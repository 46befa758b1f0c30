/* Panels of queries against key blocks: online softmax with the scores transposed, so that a query is a lane.
 *
 * For each block: S^T = K Q^T; m' = max(m, max S); P = e^(S - m'); l = l e^(m - m') + sum P; O = O e^(m - m') + P V.
 * A block's sums start at 0. The packed queries hold the scale. The factor log2(e) of the exponential comes after the
 * maximum is subtracted: before, it would round large scores once more and overflow for a bias near the largest number.
 * Milakov & Gimelshein 2018; Rabe & Staats 2021; Dao 2023.
 */

/* A key block: row 0 of keys and values is its first key. */
typedef struct FN(block) {
    int64_t first, count;
    mha_rows keys, values;
} FN(block);

/* Whether a kernel reads the rows of a block where they lie. */
MHA_INLINE int FN(in_place)(const mha_task *task, const mha_matrix *matrix, int64_t first, int64_t count,
                            int whole_vectors)
{
    int readable = whole_vectors ? matrix->dtype == REAL_DTYPE : FN(few_reads)(matrix->dtype);
    return readable && matrix->col == 1 && !task->pack_keys && mha_even_keys(task, matrix, first, count) == count;
}

/* Whether a panel reads the rows of values where they lie, in whole vectors that do not lie across cache lines where a
 * level is slow with such. */
MHA_INLINE int FN(whole_values)(const mha_task *task, int64_t first)
{
    int64_t row = task->value.row * (int64_t)sizeof(REAL),
            address = (int64_t)(uintptr_t)mha_key_row(task, &task->value, first);
    return task->value_dim % V(lanes) == 0 && (!V(align_values) || (address | row) % (int64_t)sizeof(VEC) == 0);
}

#if !PAIRS
/* The scales of keys first.., evenly spaced; those of pages are gathered. */
static void FN(open_scales)(mha_rows *rows, const mha_task *task, const mha_matrix *src, int64_t first, int64_t count,
                            float *gathered)
{
    rows->scale = mha_key_scale(task, src, first);
    rows->scale_row = src->scale_row;
    if (!task->pages) return;
    for (int64_t k = 0; k < count; k++) gathered[k] = *mha_key_scale(task, src, first + k);
    rows->scale = gathered;
    rows->scale_row = 1;
}

/* Packs rows first.., from page to page. */
static void FN(pack_keys)(REAL *dst, int64_t dst_row, const mha_task *task, const mha_matrix *src, int64_t first,
                          int64_t count, int64_t cols, int takes_scale)
{
    mha_matrix from = *src;
    for (int64_t k = 0, even; k < count; k += even) {
        even = mha_even_keys(task, src, first + k, count - k);
        from.data = mha_key_row(task, src, first + k);
        from.scale = takes_scale ? mha_key_scale(task, src, first + k) : NULL;
        FN(pack_rows)(dst + k * dst_row, dst_row, &from, 0, even, cols);
    }
}

/* Rows first.. where they lie, or packed. A panel's copy is made once for many queries and takes the scale in; for few
 * queries it is left to the scores and weights, so that rows in any memory have one arithmetic. */
static void FN(open_rows)(mha_rows *rows, const mha_task *task, const mha_matrix *src, int64_t first, int64_t count,
                          int64_t cols, int in_place, int takes_scale, REAL *packed, int64_t packed_row,
                          float *gathered)
{
    rows->scale = NULL;
    if (src->scale && !takes_scale) FN(open_scales)(rows, task, src, first, count, gathered);
    if (in_place) {
        rows->data = mha_key_row(task, src, first);
        rows->dtype = src->dtype;
        rows->row = src->row;
        return;
    }
    FN(pack_keys)(packed, packed_row, task, src, first, count, cols, takes_scale);
    rows->data = (const char *)packed;
    rows->dtype = REAL_DTYPE;
    rows->row = packed_row;
}

#else
/* Rows first.. of bfloat16 numbers where they lie, or copied. careful: what is not finite is 0. */
static void FN(open_few_pairs)(mha_rows *rows, const mha_task *task, const mha_matrix *src, int64_t first,
                               int64_t count, int64_t cols, int careful, REAL *copy, int64_t copy_row)
{
    *rows = (mha_rows){.data = mha_key_row(task, src, first), .dtype = MHA_BF16, .row = src->row};
    if (FN(in_place)(task, src, first, count, 0) && !careful) return;
    *rows = (mha_rows){.data = (const char *)copy, .dtype = MHA_BF16, .row = 2 * copy_row};
    FN(copy_rows)(copy, copy_row, task, src, first, count, cols, careful);
}

/* The block for a panel of pairs: keys where they lie if they are pairs there, values packed. */
static void FN(open_pair_block)(FN(block) *block, const mha_task *task, FN(scratch) *s, int careful)
{
    int64_t first = block->first, count = block->count;
    const char *keys = mha_key_row(task, &task->key, first);
    int even = task->key.row % 2 == 0 && mha_even_keys(task, &task->key, first, count) == count;
    block->values = (mha_rows){.data = (const char *)s->values, .dtype = REAL_DTYPE, .row = s->out_row};
    FN(pack_value_pairs)(s->values, s->out_row, task, first, count, careful);
    if (even && !task->pack_keys && FN(lies_in_pairs)(keys, task->key.col, task->head_dim)) {
        block->keys = (mha_rows){.data = keys, .dtype = REAL_DTYPE, .row = task->key.row / 2};
        return;
    }
    block->keys = (mha_rows){.data = (const char *)s->keys, .dtype = REAL_DTYPE, .row = s->few_row};
    FN(copy_rows)(s->keys, s->few_row, task, &task->key, first, count, task->head_dim, 0);
}
#endif

/* whole_vectors: the kernel of panels, which reads whole vectors of values in the compute dtype, so rows that are none
 * are packed. careful: non-finite values are replaced by 0, see add_non_finite. */
static void FN(open_block)(FN(block) *block, const mha_task *task, FN(scratch) *s, int64_t first, int64_t end,
                           int whole_vectors, int careful)
{
    int64_t count = end - first;
    block->first = first;
    block->count = count;
#if PAIRS
    if (whole_vectors) {
        FN(open_pair_block)(block, task, s, careful);
        return;
    }
    FN(open_few_pairs)(&block->keys, task, &task->key, first, count, task->head_dim, 0, s->keys, s->few_row);
    FN(open_few_pairs)(&block->values, task, &task->value, first, count, task->value_dim, careful, s->values,
                       s->out_row);
#else
    int keys_in_place = FN(in_place)(task, &task->key, first, count, whole_vectors);
    int values_in_place = FN(in_place)(task, &task->value, first, count, whole_vectors) && !careful &&
                          (!whole_vectors || FN(whole_values)(task, first));
    FN(open_rows)(&block->keys, task, &task->key, first, count, task->head_dim, keys_in_place, whole_vectors, s->keys,
                  s->few_row, s->key_scales);
    FN(open_rows)(&block->values, task, &task->value, first, count, task->value_dim, values_in_place, whole_vectors,
                  s->values, s->out_row, s->value_scales);
    if (careful)
        for (int64_t i = 0; i < count * s->out_row; i++)
            if (s->values[i] - s->values[i] != 0) s->values[i] = 0;
#endif
}

/* The first key of a split that is visited. */
static int64_t FN(split_first)(const mha_task *task, int64_t split)
{
    return mha_max(split * MHA_KEY_SPLIT, task->first / MHA_KEY_STEP * MHA_KEY_STEP);
}

/* A block without the keys before the first that a panel sees. */
static FN(block) FN(seen_block)(const FN(block) *block, int64_t first)
{
    FN(block) seen = *block;
    int64_t left_out = mha_max(first / MHA_KEY_STEP * MHA_KEY_STEP - block->first, 0);
    seen.first += left_out;
    seen.count -= left_out;
    seen.keys.data += left_out * block->keys.row * mha_item_bytes(block->keys.dtype);
    seen.values.data += FN(steps)(left_out) * block->values.row * mha_item_bytes(block->values.dtype);
    return seen;
}

/* The border that a block begins at, whatever is left out in front: keys and positions count from there as REAL. */
MHA_INLINE int64_t FN(block_base)(const FN(block) *block) { return block->first / MHA_KEY_BLOCK * MHA_KEY_BLOCK; }

/* Rows to prefetch per tile of keys, so that a panel prefetches all of them. */
static int64_t FN(prefetch_rows)(const mha_task *task)
{
    int64_t end = mha_min(task->visible, task->split_end * MHA_KEY_SPLIT), most = 0;
    int64_t tiles = mha_max(end - FN(split_first)(task, task->split_begin), 0) / V(key_tile) + 1;
    for (int n = 0; n < MHA_PREFETCHES; n++) most = mha_max(most, task->prefetch[n].rows);
    return (most + tiles - 1) / tiles;
}

/* Prefetches the shares of the tiles [begin, end) of the task's keys. */
static void FN(prefetch_shares)(const FN(panel) *panel, int64_t begin, int64_t end)
{
    const mha_prefetch *prefetch = panel->prefetch;
    for (int n = 0; n < MHA_PREFETCHES; n++)
        for (int64_t r = begin * panel->prefetch_rows; r < mha_min(end * panel->prefetch_rows, prefetch[n].rows); r++)
            for (int64_t byte = 0; byte < prefetch[n].row_bytes; byte += 64)
                PREFETCH(prefetch[n].data + r * prefetch[n].step + byte);
}

/* Prefetches the mask of the keys from key on, the shares of the tiles [begin, end) of the block before. */
static void FN(prefetch_mask)(const mha_task *task, const FN(panel) *panel, int64_t key, int64_t begin, int64_t end)
{
    int64_t bytes = mha_item_bytes(task->mask_dtype), share = panel->num_rows * V(key_tile) / MHA_KEY_BLOCK + 1;
    if (task->mask_col != 1 || key >= panel->visible) return;
    for (int64_t r = begin * share; r < mha_min(end * share, panel->shared_mask ? 1 : panel->num_rows); r++)
        for (int64_t byte = 0; byte < MHA_KEY_BLOCK * bytes; byte += 64)
            PREFETCH(panel->rows[r].mask + key * bytes + byte);
}

/* The scores of keys first.. of a block for a panel, whose strips of queries lie one after the other, and their maximum
 * in block_max. Of a strip the vectors before the first and behind the last that see a tile are left out: their scores
 * are not defined. */
static void FN(score_panel)(const mha_task *task, FN(scratch) *s, const FN(panel) *panel, const FN(block) *block,
                            int64_t first, int64_t count, int64_t block_keys)
{
    int always = task->softcap != 0 || task->has_slopes;
    FN(tile_mask) mask = {.bits_row = block_keys,
                          .is_bias = task->has_mask && !s->bits,
                          .softcap = (REAL)task->softcap,
                          .slope = s->slope,
                          .position = s->position};
    int64_t tiles_before = (block->first - FN(split_first)(task, task->split_begin)) / V(key_tile);
    for (int64_t k = first; k < first + count;) {
        int64_t left = first + count - k, key = block->first + k;
        int64_t keys = panel->vecs == 1 && left >= FN(tall_tile) ? FN(tall_tile) : mha_next_tile(left, V(key_tile));
        int64_t begin = mha_divide_up(k, V(key_tile)),
                end = mha_divide_up(k + keys, V(key_tile)); /* an edge tile prefetches once */
        if (panel->prefetch) FN(prefetch_shares)(panel, tiles_before + begin, tiles_before + end);
        if (task->has_mask) FN(prefetch_mask)(task, panel, FN(block_base)(block) + MHA_KEY_BLOCK, begin, end);
        int upper = key + keys > panel->all_visible, lower = key < panel->all_first;
        int rules = always || (lower && task->has_mask), masked = task->has_mask || lower || upper;
        mask.bits = s->bits ? s->bits + k : NULL;
        mask.visible = lower || upper ? s->visible : NULL;
        mask.before = lower ? s->before : NULL;
        mask.key = key - FN(block_base)(block);
        for (int strip = 0; strip < panel->vecs; strip += V(query_vecs)) {
            int v = strip, end = panel->vecs < strip + V(query_vecs) ? panel->vecs : strip + V(query_vecs);
            while (upper && v < end && panel->vec_visible[v] <= key) v++;
            while (lower && v < end && panel->vec_first[end - 1] >= key + keys) end--;
            if (v == end) continue;
            mask.lane = v * V(lanes);
            REAL *scores = s->scores + k * V(panel) + mask.lane, *max = s->block_max + mask.lane;
            FN(score_keys)(keys, end - v,
                           panel->query + strip * V(lanes) * FN(steps)(task->head_dim) + (v - strip) * V(lanes),
                           (const REAL *)block->keys.data + k * block->keys.row, block->keys.row,
                           FN(steps)(task->head_dim), (REAL)task->scale, masked && !rules ? &mask : NULL,
                           rules ? s->raw : scores, rules ? s->raw + FN(tall_tile) *V(panel) : max);
            if (rules) FN(apply_rules)((int)keys, end - v, &mask, s->raw, scores, max);
        }
        k += keys;
    }
}

static void FN(open_panel)(const mha_task *task, FN(scratch) *s, int p, FN(panel) *panel)
{
    panel->rows = task->rows + p * V(panel);
    panel->num_rows = mha_min(task->num_rows - p * V(panel), V(panel));
    panel->vecs = (int)(mha_round_up(panel->num_rows, V(lanes)) / V(lanes));
    panel->query = s->query[p];
    panel->prefetch = p == 0 ? task->prefetch : NULL;
    panel->prefetch_rows = panel->prefetch ? FN(prefetch_rows)(task) : 0;
    panel->shared_mask = 1;
    panel->visible = panel->all_visible = panel->rows[0].visible;
    panel->first = panel->all_first = panel->rows[0].first;
    for (int64_t r = 1; r < panel->num_rows; r++) {
        panel->visible = mha_max(panel->visible, panel->rows[r].visible);
        panel->all_visible = mha_min(panel->all_visible, panel->rows[r].visible);
        panel->first = mha_min(panel->first, panel->rows[r].first);
        panel->all_first = mha_max(panel->all_first, panel->rows[r].first);
        if (panel->rows[r].mask != panel->rows[0].mask) panel->shared_mask = 0;
    }
    for (int v = 0; v < panel->vecs; v++) {
        panel->vec_visible[v] = 0;
        panel->vec_first[v] = task->kv_len;
        for (int64_t r = v * V(lanes); r < mha_min(panel->num_rows, (v + 1) * V(lanes)); r++) {
            panel->vec_visible[v] = mha_max(panel->vec_visible[v], panel->rows[r].visible);
            panel->vec_first[v] = mha_min(panel->vec_first[v], panel->rows[r].first);
        }
        panel->vec_first[v] -= panel->vec_first[v] % 4;
    }
    for (int v = 0; v < panel->vecs; v++) {
        int strip = v / V(query_vecs) * V(query_vecs);
        REAL *dst = s->query[p] + strip * V(lanes) * FN(steps)(task->head_dim) + (v - strip) * V(lanes);
        FN(pack_query_lanes)(dst, V(query_vecs) * V(lanes), task, panel->rows + v * V(lanes),
                             panel->num_rows - v * V(lanes) < V(lanes) ? panel->num_rows - v * V(lanes) : V(lanes),
                             (REAL)task->scale, s->converted);
    }
}

/* The lanes' numbers for a block; lanes without a row repeat the last one. */
static void FN(open_lanes)(const mha_task *task, FN(scratch) *s, const FN(panel) *panel, const FN(block) *block,
                           int64_t count)
{
    int64_t base = FN(block_base)(block);
    int border = block->first + count > panel->all_visible || block->first < panel->all_first;
    for (int i = 0; i < panel->vecs * V(lanes); i++) s->block_max[i] = -INFINITY;
    for (int i = 0; border && i < panel->vecs * V(lanes); i++) {
        const mha_row *row = panel->rows + mha_min(i, panel->num_rows - 1);
        s->visible[i] = (REAL)mha_max(mha_min(row->visible - base, MHA_KEY_BLOCK), 0);
        if (task->has_window) s->before[i] = (REAL)(mha_max(mha_min(row->first - base, MHA_KEY_BLOCK), 0) - 1);
    }
    for (int i = 0; task->has_slopes && i < panel->vecs * V(lanes); i++) {
        const mha_row *row = panel->rows + mha_min(i, panel->num_rows - 1);
        s->slope[i] = *(const REAL *)row->slope;
        s->position[i] = (REAL)(row->position - base);
    }
}

/* The scores of a panel against a block, hidden ones -inf or not defined. Gives the number of runs. */
static int FN(block_scores)(const mha_task *task, FN(scratch) *s, const FN(panel) *panel, const FN(block) *block,
                            FN(run) *runs)
{
    int64_t count = mha_min(block->count, panel->visible - block->first);
    FN(open_lanes)(task, s, panel, block, count);
    int num_runs = FN(mask_block)(task, s, panel, block->first, count, runs);
    for (int n = 0; n < num_runs; n++) FN(score_panel)(task, s, panel, block, runs[n].first, runs[n].count, count);
    return num_runs;
}

#if !PAIRS
MHA_INLINE VEC FN(exponential)(REAL *score, VEC m)
{
    VEC weight = FN(exp_lanes)(V(sub)(V(load)(score), m));
    V(store)(score, weight);
    return weight;
}

/* Scores of one vector of lanes become weights, those of keys that the vector does not see, before first or from
 * visible on, 0; gives their sum, made of four so that it loses less: key k of the block belongs to the k % 4-th. */
MHA_INLINE VEC FN(exponentials)(REAL *scores, const FN(run) *runs, int num_runs, int64_t first, int64_t visible, VEC m)
{
    VEC sum[4] = {V(zero)(), V(zero)(), V(zero)(), V(zero)()};
    for (int n = 0; n < num_runs; n++) {
        int64_t k = runs[n].first, end = k + runs[n].count, seen = mha_min(end, visible);
        for (; k < mha_min(first, end); k++) V(store)(scores + k * V(panel), V(zero)());
        for (; k + 4 <= seen; k += 4) UNROLL for (int i = 0; i < 4; i++)
                sum[i] = V(add)(sum[i], FN(exponential)(scores + (k + i) * V(panel), m));
        UNROLL for (int i = 0; i < 3; i++)
            if (k + i < seen) sum[i] = V(add)(sum[i], FN(exponential)(scores + (k + i) * V(panel), m));
        for (k = mha_max(k, seen); k < end; k++) V(store)(scores + k * V(panel), V(zero)());
    }
    return V(add)(V(add)(sum[0], sum[1]), V(add)(sum[2], sum[3]));
}
#endif

/* Scores become weights; row_max, row_sum move on and alpha says by how much the output so far has to shrink. */
static void FN(block_softmax)(FN(scratch) *s, const FN(panel) *panel, int64_t first, const FN(run) *runs, int num_runs,
                              FN(state) *state)
{
    for (int v = 0; v < panel->vecs; v++) {
        int lane = v * V(lanes);
        VEC old = V(load)(state->row_max + lane), now = V(max)(old, V(load)(s->block_max + lane));
        /* -inf - -inf is NaN: while a row has seen nothing, subtract a finite number. */
        VEC m = V(max)(now, V(set1)(-REAL_HIGHEST)), alpha = FN(exp_lanes)(V(sub)(old, m));
#if PAIRS
        VEC sum = FN(pair_exponentials)(s->scores + lane, runs, num_runs, panel->vec_first[v] - first,
                                   panel->vec_visible[v] - first, m);
#else
        VEC sum = FN(exponentials)(s->scores + lane, runs, num_runs, panel->vec_first[v] - first,
                                   panel->vec_visible[v] - first, m);
#endif
        V(store)(s->alpha + lane, alpha);
        V(store)(state->row_max + lane, now);
        V(store)(state->row_sum + lane, V(fma)(V(load)(state->row_sum + lane), alpha, sum));
    }
}

/* The output of a panel moves on by one block, in column tiles of even width and tiles of rows that begin and stop at
 * the first and the last key that one of their rows sees. */
static void FN(block_output)(FN(scratch) *s, const FN(panel) *panel, const FN(block) *block, const FN(run) *runs,
                             int num_runs, int first, REAL *out)
{
    int64_t vecs = s->out_row / V(lanes), tiles = (vecs + V(col_vecs) - 1) / V(col_vecs);
    for (int64_t t = 0; t < tiles; t++) {
        int64_t begin = vecs * t / tiles, width = vecs * (t + 1) / tiles - begin, col = begin * V(lanes);
        for (int64_t r = 0; r < panel->num_rows;) {
            int64_t left = panel->num_rows - r;
            int64_t rows = mha_next_tile(left, V(row_tile)), visible = 0, seen = block->count;
            for (int64_t i = r; i < r + rows; i++) {
                visible = mha_max(visible, panel->rows[i].visible - block->first);
                seen = mha_min(seen, panel->rows[i].first - block->first);
            }
            FN(output_rows)(rows, (int)width, s->scores + r, (const REAL *)block->values.data + col, block->values.row,
                            runs, num_runs, seen, visible, s->alpha + r, first, out + r * s->out_row + col, s->out_row);
            r += rows;
        }
    }
}

/* One panel's state moves on by one block. started: whether out holds something. */
static void FN(panel_block)(const mha_task *task, FN(scratch) *s, const FN(panel) *panel, const FN(block) *block,
                            FN(state) *state, int *started, int with_output, int careful)
{
    FN(run) runs[MHA_KEY_BLOCK / FN(mask_tile)];
    int num_runs = FN(block_scores)(task, s, panel, block, runs);
    if (!num_runs) return;
    FN(block_softmax)(s, panel, block->first, runs, num_runs, state);
    if (!with_output) return;
    FN(block_output)(s, panel, block, runs, num_runs, !*started, state->out);
    if (careful)
        FN(add_non_finite)(task, panel->rows, panel->num_rows, block->first, runs, num_runs, s->scores, 1, V(panel),
                           PAIRS, state->out, s->out_row);
    *started = 1;
}

/* The states of all panels over one split of the keys. Panels share packed blocks. */
static void FN(panels_split)(const mha_task *task, FN(scratch) *s, const FN(panel) *panels, int num_panels,
                             int64_t split, int with_output, int careful, FN(state) *states)
{
    int64_t end = mha_min(task->visible, (split + 1) * MHA_KEY_SPLIT), next;
    int started[MHA_PANELS_TOGETHER] = {0};
    for (int p = 0; p < num_panels; p++) FN(clear)(&states[p], panels[p].vecs * V(lanes));
    for (int64_t first = FN(split_first)(task, split); first < end; first = next) {
        next = mha_block_end(first, end);
        FN(block) block;
        FN(open_block)(&block, task, s, first, next, 1, careful);
        for (int p = 0; p < num_panels; p++) {
            if (panels[p].visible <= first || panels[p].first >= next) continue;
            FN(block) seen = FN(seen_block)(&block, panels[p].first);
            FN(panel_block)(task, s, &panels[p], &seen, &states[p], &started[p], with_output, careful);
        }
    }
}

static int FN(open_panels)(const mha_task *task, FN(scratch) *s, FN(panel) *panels)
{
    int num_panels = (int)(mha_round_up(task->num_rows, V(panel)) / V(panel));
    for (int p = 0; p < num_panels; p++) FN(open_panel)(task, s, p, &panels[p]);
    return num_panels;
}

/* total takes in the split's state; an empty total changes places with it. */
static void FN(advance)(int64_t rows, int64_t out_row, FN(state) *total, FN(state) *split, int is_first)
{
    if (is_first) {
        FN(state) swap = *total;
        *total = *split;
        *split = swap;
    } else {
        FN(fold)(rows, out_row, total, split);
    }
}

static void FN(attend_panels)(const mha_task *task, void *memory)
{
    FN(scratch) *s = memory;
    FN(panel) panels[MHA_PANELS_TOGETHER];
    FN(state) left[MHA_PANELS_TOGETHER], *states = task->state ? left : s->split;
    int num_panels = FN(open_panels)(task, s, panels);
    uintptr_t at = (uintptr_t)task->state;
    for (int p = 0; p < num_panels; p++) {
        if (task->state) left[p] = FN(take_state)(&at, task);
        FN(clear)(&s->total[p], panels[p].vecs * V(lanes));
    }
    for (int64_t split = task->split_begin; split < task->split_end; split++) {
        FN(panels_split)(task, s, panels, num_panels, split, 1, 0, states);
        int finite = 1;
        for (int p = 0; p < num_panels; p++)
            finite = finite && FN(is_finite)(&states[p], panels[p].num_rows, s->out_row);
        if (!finite) FN(panels_split)(task, s, panels, num_panels, split, 1, 1, states);
        if (task->state) return;
        for (int p = 0; p < num_panels; p++)
            FN(advance)(panels[p].num_rows, s->out_row, &s->total[p], &states[p], split == task->split_begin);
    }
    for (int p = 0; p < num_panels; p++) FN(finish)(task, panels[p].rows, panels[p].num_rows, s->out_row, &s->total[p]);
}

/* weights[row][key] for the keys of one block, from the scores and the panel's state over all keys. */
static void FN(write_weights)(FN(scratch) *s, const FN(panel) *panel, const FN(block) *block, const FN(state) *state,
                              const FN(run) *runs, int num_runs)
{
    for (int v = 0; v < panel->vecs; v++) {
        int lane = v * V(lanes);
        int64_t rows = mha_min(panel->num_rows - lane, V(lanes));
        const REAL *scores = s->scores + lane;
        REAL inverse[V(lanes)];
        for (int i = 0; i < V(lanes); i++) inverse[i] = 1 / state->row_sum[lane + i];
        VEC m = V(max)(V(load)(state->row_max + lane), V(set1)(-REAL_HIGHEST)), factor = V(load)(inverse);
        for (int n = 0; n < num_runs; n++) {
            int64_t seen = mha_min(runs[n].first + runs[n].count, panel->vec_visible[v] - block->first);
            int64_t k = mha_max(runs[n].first, panel->vec_first[v] - block->first);
            for (; k < seen; k += V(lanes)) {
                int64_t keys = mha_min(seen - k, V(lanes));
                VEC w[V(lanes)];
                for (int i = 0; i < V(lanes); i++) {
                    VEC score = V(load)(scores + (k + mha_min(i, keys - 1)) * V(panel));
                    w[i] = V(mul)(FN(exp_lanes)(V(sub)(score, m)), factor);
                    w[i] = V(zero_hidden)(w[i], score);
                }
                V(transpose)(w);
                for (int64_t r = 0; r < rows; r++) {
                    REAL *dst = (REAL *)panel->rows[lane + r].weights + block->first + k;
                    V(store_n)(dst, w[r], keys);
                }
            }
        }
    }
}

/* A sum that is 0 or no number is no sum of weights: all that the row sees is NaN, as in 0/0 and inf/inf. */
static void FN(undefined_weights)(const mha_task *task, const mha_row *rows, int64_t count, const FN(state) *state)
{
    for (int64_t r = 0; r < count; r++) {
        if (state->row_sum[r] > 0 && state->row_sum[r] < INFINITY) continue;
        for (int64_t key = rows[r].first; key < rows[r].visible; key++)
            ((REAL *)rows[r].weights)[key] = FN(sees)(task, rows + r, key) ? (REAL)NAN : 0;
    }
}

/* The rows of a state without output take in their sinks. */
static void FN(add_sinks)(const mha_row *rows, int64_t count, FN(state) *state)
{
    for (int64_t r = 0; r < count; r++) {
        if (rows[r].sink) FN(add_sink)(rows + r, state, r, 0);
    }
}

/* The weights of the rows of a task over all keys; those of hidden keys are 0 or left as they are. */
static void FN(panel_weights)(const mha_task *task, void *memory)
{
    FN(scratch) *s = memory;
    FN(panel) panels[MHA_PANELS_TOGETHER];
    FN(run) runs[MHA_KEY_BLOCK / FN(mask_tile)];
    if (task->split_begin >= task->split_end) return; /* nobody sees a key */
    int num_panels = FN(open_panels)(task, s, panels);
    for (int64_t split = task->split_begin; split < task->split_end; split++) {
        FN(panels_split)(task, s, panels, num_panels, split, 0, 0, s->split);
        for (int p = 0; p < num_panels; p++)
            FN(advance)(panels[p].num_rows, 0, &s->total[p], &s->split[p], split == task->split_begin);
    }
    for (int p = 0; p < num_panels; p++) FN(add_sinks)(panels[p].rows, panels[p].num_rows, &s->total[p]);
    int64_t next;
    for (int64_t first = FN(split_first)(task, task->split_begin); first < task->visible; first = next) {
        next = mha_block_end(first, task->visible);
        FN(block) block;
        FN(open_block)(&block, task, s, first, next, 1, 0);
        for (int p = 0; p < num_panels; p++) {
            if (panels[p].visible <= first || panels[p].first >= next) continue;
            FN(block) seen = FN(seen_block)(&block, panels[p].first);
            int num_runs = FN(block_scores)(task, s, &panels[p], &seen, runs);
            FN(write_weights)(s, &panels[p], &seen, &s->total[p], runs, num_runs);
        }
    }
    for (int p = 0; p < num_panels; p++) FN(undefined_weights)(task, panels[p].rows, panels[p].num_rows, &s->total[p]);
}
