/* States: folding them in the order of the keys, and writing the rows at the end. Few-query and panel kernels share
 * this. */

/* rows: of the panel, whole vectors for a panel kernel. */
static void FN(clear)(FN(state) *state, int64_t rows)
{
    for (int64_t i = 0; i < rows; i++) {
        state->row_max[i] = -INFINITY;
        state->row_sum[i] = 0;
    }
}

/* One row of total becomes the merge of total and part, keys of part behind those of total. */
static void FN(fold_row)(int64_t out_row, REAL *total_out, REAL *total_max, REAL *total_sum, const REAL *part_out,
                         REAL part_max, REAL part_sum)
{
    if (part_sum == 0) return;
    if (*total_sum == 0) {
        memcpy(total_out, part_out, (size_t)out_row * sizeof(REAL));
        *total_max = part_max;
        *total_sum = part_sum;
        return;
    }
    VEC a = V(set1)(*total_max), b = V(set1)(part_max);
    VEC m = V(max)(V(max)(a, b), V(set1)(-REAL_HIGHEST));
    VEC alpha = FN(exp_lanes)(V(sub)(a, m));
    VEC beta = FN(exp_lanes)(V(sub)(b, m));
    for (int64_t c = 0; c < out_row; c += V(lanes))
        V(store)(total_out + c, V(fma)(V(load)(total_out + c), alpha, V(mul)(V(load)(part_out + c), beta)));
    V(store_n)(total_sum, V(fma)(V(set1)(*total_sum), alpha, V(mul)(V(set1)(part_sum), beta)), 1);
    V(store_n)(total_max, m, 1);
}

static void FN(fold)(int64_t rows, int64_t out_row, FN(state) *total, const FN(state) *part)
{
    for (int64_t r = 0; r < rows; r++)
        FN(fold_row)(out_row, total->out + r * out_row, total->row_max + r, total->row_sum + r, part->out + r * out_row,
                     part->row_max[r], part->row_sum[r]);
}

/* Whether a query may see a key, from the masks alone. */
static int FN(sees)(const mha_task *task, const mha_row *row, int64_t key)
{
    if (key < row->first || key >= row->visible) return 0;
    if (!task->has_mask) return 1;
    const char *mask = row->mask + key * task->mask_col * mha_item_bytes(task->mask_dtype);
    if (task->mask_dtype == MHA_BOOL) return *mask != 0;
    return task->mask_dtype == MHA_F32 ? *(const float *)mask != -INFINITY : *(const double *)mask != -INFINITY;
}

static int FN(sees_any)(const mha_task *task, const mha_row *row)
{
    for (int64_t key = row->first; key < row->visible; key++)
        if (FN(sees)(task, row, key)) return 1;
    return 0;
}

/* The same as write_row into float16 or bfloat16, from a computation in float32. */
static void FN(write_half)(const mha_task *task, uint16_t *dst, const REAL *out, REAL factor)
{
    for (int64_t c = 0; c < task->value_dim; c += vec_f32_lanes) {
        int64_t cols = mha_min(task->value_dim - c, vec_f32_lanes);
        float numbers[vec_f32_lanes] = {0};
        uint16_t stored[vec_f32_lanes];
        for (int64_t i = 0; i < cols; i++) numbers[i] = (float)(out ? out[c + i] * factor : factor);
        if (task->out_dtype == MHA_F16)
            vec_f32_store_f16(stored, vec_f32_load(numbers));
        else
            vec_f32_store_bf16(stored, vec_f32_load(numbers));
        for (int64_t i = 0; i < cols; i++) dst[(c + i) * task->out_col] = stored[i];
    }
}

/* Writes factor * out to a row of the result whose columns are numbers of the compute dtype next to each other. */
MHA_INLINE void FN(write_row)(REAL *RESTRICT dst, const REAL *RESTRICT out, REAL factor, int64_t cols)
{
    VEC scale = V(set1)(factor);
    int64_t c = 0;
    for (; c + V(lanes) <= cols; c += V(lanes)) V(store)(dst + c, V(mul)(V(load)(out + c), scale));
    if (c < cols) V(store_n)(dst + c, V(mul)(V(load)(out + c), scale), cols - c);
}

/* The same to any row; out may be NULL for a row of equal values. */
MHA_NOINLINE void FN(write_any_row)(const mha_task *task, char *row, const REAL *out, REAL factor)
{
    REAL *dst = (REAL *)row;
    if (task->out_dtype != REAL_DTYPE)
        FN(write_half)(task, (uint16_t *)row, out, factor);
    else
        for (int64_t c = 0; c < task->value_dim; c++) dst[c * task->out_col] = out ? out[c] * factor : factor;
}

/* A row of a state takes in its sink, a score without a value. Gives by how much the output, here left as it is or made
 * 0 where it was not defined, has to shrink. */
MHA_NOINLINE REAL FN(add_sink)(const mha_row *row, FN(state) *state, int64_t r, int64_t out_row)
{
    REAL sink = *(const REAL *)row->sink, alpha[V(lanes)];
    if (sink == (REAL)-INFINITY) return 1;
    if (state->row_sum[r] == 0) memset(state->out + r * out_row, 0, (size_t)out_row * sizeof(REAL));
    VEC old = V(set1)(state->row_max[r]), added = V(set1)(sink), m = V(max)(old, added);
    VEC shrink = FN(exp_lanes)(V(sub)(old, m)), weight = FN(exp_lanes)(V(sub)(added, m));
    V(store_n)(state->row_sum + r, V(fma)(V(set1)(state->row_sum[r]), shrink, weight), 1);
    V(store_n)(state->row_max + r, m, 1);
    V(store)(alpha, shrink);
    return alpha[0];
}

/* A row whose visible scores are all -inf is 0/0; only a row that sees nothing is 0. */
MHA_NOINLINE void FN(finish_empty)(const mha_task *task, const mha_row *row)
{
    int undefined = FN(sees_any)(task, row);
    FN(write_any_row)(task, row->out, NULL, undefined ? (REAL)NAN : 0);
    if (row->lse) *(REAL *)row->lse = undefined ? (REAL)NAN : (REAL)-INFINITY;
}

/* Normalises and writes the rows of one panel. */
static void FN(finish)(const mha_task *task, const mha_row *rows, int64_t count, int64_t out_row, FN(state) *state)
{
    const REAL *out = state->out;
    int plain = task->out_dtype == REAL_DTYPE && task->out_col == 1;
    for (int64_t r = 0; r < count; r++, out += out_row) {
        REAL factor = rows[r].sink ? FN(add_sink)(rows + r, state, r, out_row) : 1, sum = state->row_sum[r];
        if (sum == 0) {
            FN(finish_empty)(task, rows + r);
            continue;
        }
        factor /= sum;
        if (plain)
            FN(write_row)((REAL *)rows[r].out, out, factor, task->value_dim);
        else
            FN(write_any_row)(task, rows[r].out, out, factor);
        if (rows[r].lse) *(REAL *)rows[r].lse = (REAL)(state->row_max[r] + log((double)sum));
    }
}

static void FN(merge)(const mha_task *task, void *states, void *memory)
{
    FN(scratch) *s = memory;
    uintptr_t at = (uintptr_t)states;
    for (int64_t first = 0, p = 0; first < task->num_rows; first += V(panel), p++) FN(clear)(&s->total[p], V(panel));
    for (int64_t split = task->split_begin; split < task->split_end; split++) {
        uintptr_t end = at + (uintptr_t)FN(state_bytes)(task);
        for (int64_t first = 0, p = 0; first < task->num_rows; first += V(panel), p++) {
            FN(state) part = FN(take_state)(&at, task);
            FN(fold)(mha_min(task->num_rows - first, V(panel)), s->out_row, &s->total[p], &part);
        }
        at = end;
    }
    for (int64_t first = 0, p = 0; first < task->num_rows; first += V(panel), p++)
        FN(finish)(task, task->rows + first, mha_min(task->num_rows - first, V(panel)), s->out_row, &s->total[p]);
}

/* Finite numbers only? The rows' own padding columns are finite whenever the rest is. */
static int FN(is_finite)(const FN(state) *state, int64_t rows, int64_t out_row)
{
    VEC nothing[4] = {V(zero)(), V(zero)(), V(zero)(), V(zero)()}; /* four independent sums hide the latency of one */
    for (int64_t r = 0; r < rows; r++) {
        if (state->row_sum[r] == 0) continue;
        const REAL *row = state->out + r * out_row;
        int64_t c = 0;
        for (; c + 4 * V(lanes) <= out_row; c += 4 * V(lanes)) UNROLL for (int i = 0; i < 4; i++)
                nothing[i] = V(fma)(V(load)(row + c + i * V(lanes)), V(zero)(), nothing[i]);
        for (; c < out_row; c += V(lanes)) nothing[0] = V(fma)(V(load)(row + c), V(zero)(), nothing[0]);
    }
    return !V(any_nan)(V(add)(V(add)(nothing[0], nothing[1]), V(add)(nothing[2], nothing[3])));
}

/* The weight of a key of the block, which pairs hold as one of two bfloat16 numbers. */
MHA_INLINE REAL FN(weight_at)(const REAL *weights, int64_t key_step, int pairs, int64_t key)
{
    if (!pairs) return weights[key * key_step];
    uint16_t halves[sizeof(REAL) / 2];
    memcpy(halves, weights + key / 2 * key_step, sizeof halves);
    uint32_t bits = (uint32_t)halves[key % 2] << 16;
    float weight;
    memcpy(&weight, &bits, sizeof weight);
    return weight;
}

/* With the non-finite entries of the values left out of the product, adds them for the queries that see them.
 * weights[row * row_step + key * key_step] belongs to a key of the block, or pairs of two keys do. */
static void FN(add_non_finite)(const mha_task *task, const mha_row *rows, int64_t count, int64_t first_key,
                               const FN(run) *runs, int num_runs, const REAL *weights, int64_t row_step,
                               int64_t key_step, int pairs, REAL *out, int64_t out_row)
{
    for (int n = 0; n < num_runs; n++)
        for (int64_t k = runs[n].first; k < runs[n].first + runs[n].count; k++) {
            int64_t key = first_key + k;
            const char *value = mha_key_row(task, &task->value, key);
            for (int64_t c = 0; c < task->value_dim; c++) {
                REAL x;
                FN(convert)(&x, value + c * task->value.col * mha_item_bytes(task->value.dtype), task->value.dtype, 1,
                            1);
                if (task->value.scale) x *= (REAL)*mha_key_scale(task, &task->value, key);
                if (x - x == 0) continue;
                for (int64_t r = 0; r < count; r++)
                    if (FN(sees)(task, rows + r, key))
                        out[r * out_row + c] += FN(weight_at)(weights + r * row_step, key_step, pairs, k) * x;
            }
        }
}
