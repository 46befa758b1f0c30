/* Dense masks of a panel against one key block: turned to the layout of the scores once per block, and whole tiles that
 * hide every key from every row dropped.
 */

enum { FN(mask_tile) = 8 };

/* The panel's side of a key block. */
typedef struct FN(panel) {
    const mha_row *rows;
    int64_t num_rows;
    int vecs;
    int shared_mask;                          /* all rows read one mask row */
    int64_t visible, all_visible;             /* some row, or every row, sees keys below this one (masks aside) */
    int64_t vec_visible[V(panel) / V(lanes)]; /* some row of a vector does */
    int64_t first, all_first;                 /* some row, or every row, sees keys from this one on */
    int64_t vec_first[V(panel) / V(lanes)];   /* some row of a vector does; a multiple of 4, see exponentials */
    const REAL *query;
    const mha_prefetch *prefetch; /* NULL: another panel of the task does it */
    int64_t prefetch_rows;        /* per tile of keys */
} FN(panel);

static void FN(add_run)(FN(run) *runs, int *num_runs, int64_t first, int64_t count)
{
    if (*num_runs && runs[*num_runs - 1].first + runs[*num_runs - 1].count == first) {
        runs[*num_runs - 1].count += count;
    } else {
        runs[*num_runs].first = first;
        runs[(*num_runs)++].count = count;
    }
}

/* bits[key] |= bit where the mask's row is set; a product and no choice, so that every compiler makes vectors of it. */
MHA_NOINLINE void FN(set_bits)(uint16_t *RESTRICT bits, const char *RESTRICT mask, int64_t step, int64_t count,
                               uint16_t bit)
{
    if (step == 1)
        for (int64_t k = 0; k < count; k++) bits[k] |= (uint16_t)((uint16_t)(mask[k] != 0) * bit);
    else
        for (int64_t k = 0; k < count; k++) bits[k] |= (uint16_t)((uint16_t)(mask[k * step] != 0) * bit);
}

/* bits[group][key] of a bool mask for keys first.. */
static int FN(mask_bits)(const mha_task *task, FN(scratch) *s, const FN(panel) *panel, int64_t first, int64_t count,
                         FN(run) *runs)
{
    int64_t groups = (panel->num_rows + 15) / 16;
    int num_runs = 0;
    memset(s->bits, 0, (size_t)(groups * count) * sizeof *s->bits);
    for (int64_t r = 0; r < panel->num_rows; r += panel->shared_mask ? 16 : 1)
        FN(set_bits)(s->bits + r / 16 * count, panel->rows[r].mask + first * task->mask_col, task->mask_col, count,
                     panel->shared_mask ? 0xffff : (uint16_t)(1u << r % 16));
    for (int64_t k = 0; k < count; k += FN(mask_tile)) {
        int64_t keys = mha_min(count - k, FN(mask_tile));
        unsigned any = 0;
        for (int64_t g = 0; g < groups; g++)
            for (int64_t i = 0; i < keys; i++) any |= s->bits[g * count + k + i];
        if (any) FN(add_run)(runs, &num_runs, k, keys);
    }
    return num_runs;
}

/* bias[key][lane] for one vector of lanes, whose rows begin at from[lane]; notes the tiles that some lane may see. */
static void FN(transpose_bias)(REAL *bias, const REAL *const *from, int64_t count, unsigned char *tile_seen)
{
    for (int64_t k = 0; k < count; k += V(lanes)) {
        int64_t keys = mha_min(count - k, V(lanes));
        VEC r[V(lanes)];
        uint32_t seen = 0;
        if (keys == V(lanes)) UNROLL for (int i = 0; i < V(lanes); i++) r[i] = V(load)(from[i] + k);
        else
            UNROLL for (int i = 0; i < V(lanes); i++) r[i] = V(load_n)(from[i] + k, keys);
        UNROLL for (int i = 0; i < V(lanes); i++) seen |= V(visible_bits)(r[i]);
        for (int i = 0; i < V(lanes); i += FN(mask_tile))
            tile_seen[(k + i) / FN(mask_tile)] |= (seen >> i & ((1u << FN(mask_tile)) - 1)) != 0;
        V(transpose)(r);
        REAL *dst = bias + k * V(panel);
        UNROLL for (int i = 0; i < V(lanes); i++)
            if (i < keys) V(store)(dst + i * V(panel), r[i]);
    }
}

/* The biases of a float mask for keys first.., to where the scores will lie. */
static int FN(mask_bias)(const mha_task *task, FN(scratch) *s, const FN(panel) *panel, int64_t first, int64_t count,
                         FN(run) *runs)
{
    unsigned char seen[MHA_KEY_BLOCK / FN(mask_tile) + 1] = {0}; /* a vector may reach beyond the last tile */
    int64_t bytes = mha_item_bytes(task->mask_dtype);
    int in_place = task->mask_dtype == REAL_DTYPE && task->mask_col == 1;
    int num_runs = 0;
    for (int v = 0; v < panel->vecs; v++) {
        const REAL *from[V(lanes)];
        for (int i = 0; i < V(lanes); i++) {
            /* lanes without a row repeat the last one */
            int64_t r = mha_min(v * V(lanes) + i, panel->num_rows - 1);
            const char *row = panel->rows[r].mask + first * task->mask_col * bytes;
            from[i] = in_place ? (const REAL *)row : s->mask_rows + (panel->shared_mask ? 0 : i * count);
            if (!in_place && (i == 0 || !panel->shared_mask))
                FN(convert)(s->mask_rows + i * count, row, task->mask_dtype, task->mask_col, count);
        }
        FN(transpose_bias)(s->scores + v * V(lanes), from, count, seen);
    }
    for (int64_t k = 0; k < count; k += FN(mask_tile))
        if (seen[k / FN(mask_tile)]) FN(add_run)(runs, &num_runs, k, mha_min(count - k, FN(mask_tile)));
    return num_runs;
}

/* Prepares the mask for keys first.. and gives the runs of keys that some row may see. */
static int FN(mask_block)(const mha_task *task, FN(scratch) *s, const FN(panel) *panel, int64_t first, int64_t count,
                          FN(run) *runs)
{
    if (!task->has_mask) {
        runs[0].first = 0;
        runs[0].count = count;
        return 1;
    }
    return task->mask_dtype == MHA_BOOL ? FN(mask_bits)(task, s, panel, first, count, runs)
                                        : FN(mask_bias)(task, s, panel, first, count, runs);
}
