/* The memory of one thread: how much it is and where everything lies, decided in one place. */

/* Keys of a tile of one vector of queries, which leaves the registers of the others free. */
enum { FN(tall_tile) = 2 * V(key_tile) };

/* The result over a range of keys for the rows of one panel. row_max is -inf and row_sum 0 where no key was
 * seen; then out is not defined. */
typedef struct FN(state) {
    REAL *out; /* [rows][out_row], not normalised */
    REAL *row_max, *row_sum;
} FN(state);

typedef struct FN(scratch) {
    int64_t out_row; /* value_dim rounded up to whole vectors */
    int64_t few_row; /* head_dim rounded up, for the few-query kernel */
    REAL *query[MHA_PANELS_TOGETHER];
    FN(state) split[MHA_PANELS_TOGETHER], total[MHA_PANELS_TOGETHER];
    int64_t score_row;                /* keys of a block and 3 more, rounded up, for the few-query kernel */
    REAL *scores;                     /* [keys of a block][panel], or [rows][score_row] */
    REAL *scaled;                     /* [rows][score_row]: weights times the scales of their values; NULL: none */
    float *key_scales, *value_scales; /* [keys of a block], of keys and values in pages */
    REAL *block_max;                  /* [panel] */
    REAL *alpha, *visible;            /* [panel] */
    REAL *keys, *values;              /* a packed block */
    REAL *mask_rows;                  /* [lanes][keys of a block], converted */
    REAL *converted;                  /* [lanes][head_dim] */
    uint16_t *bits;                   /* [panel / 16][keys of a block]: a bit a query */
    REAL *before;                     /* [panel], where there is a window */
    REAL *slope, *position;           /* [panel], where there are slopes */
    REAL *raw; /* [tall_tile + 1][panel]: a tile of scores before apply_rules, and their maximum */
} FN(scratch);

/* Takes count elements from the memory, on a cache line of their own. */
static REAL *FN(take)(uintptr_t *memory, int64_t count)
{
    REAL *taken = (REAL *)*memory;
    *memory += (uintptr_t)mha_round_up(count * (int64_t)sizeof(REAL), 64);
    return taken;
}

static FN(state) FN(take_state)(uintptr_t *memory, const mha_task *task)
{
    FN(state) state;
    int64_t rows = mha_min(task->max_rows, V(panel));
    state.out = FN(take)(memory, rows * mha_round_up(task->value_dim, V(lanes)));
    state.row_max = FN(take)(memory, V(panel));
    state.row_sum = FN(take)(memory, V(panel));
    return state;
}

/* Lays the scratch out over memory (an address, 0 to learn the size); gives where it ends. */
static uintptr_t FN(lay_out)(FN(scratch) *s, const mha_task *task, uintptr_t memory)
{
    int64_t block = mha_min(task->kv_len, MHA_KEY_BLOCK);
    int64_t panels = mha_round_up(task->max_rows, V(panel)) / V(panel);
    s->out_row = mha_round_up(task->value_dim, V(lanes));
    s->few_row = mha_round_up(task->head_dim, V(lanes));
    for (int64_t p = 0; p < panels; p++) {
        int64_t width = mha_min(mha_round_up(task->max_rows, V(query_vecs) * V(lanes)), V(panel));
        s->query[p] = FN(take)(&memory, mha_max(width, MHA_FEW_ROWS) * s->few_row);
        s->split[p] = FN(take_state)(&memory, task);
        s->total[p] = FN(take_state)(&memory, task);
    }
    s->score_row = mha_round_up(block + 3, V(lanes));
    s->scores = FN(take)(&memory, mha_max(block * V(panel), MHA_FEW_ROWS * s->score_row));
    s->block_max = FN(take)(&memory, V(panel));
    s->alpha = FN(take)(&memory, V(panel));
    s->visible = FN(take)(&memory, V(panel));
    s->keys = FN(take)(&memory, block * s->few_row);
    s->values = FN(take)(&memory, block * s->out_row);
    s->converted = FN(take)(&memory, V(lanes) * task->head_dim);
    s->mask_rows = NULL;
    s->bits = NULL;
    s->key_scales = task->page_len ? (float *)FN(take)(&memory, MHA_KEY_BLOCK) : NULL;
    s->value_scales = task->page_len ? (float *)FN(take)(&memory, MHA_KEY_BLOCK) : NULL;
    s->scaled = task->value.dtype == MHA_I8 ? FN(take)(&memory, MHA_FEW_ROWS * s->score_row) : NULL;
    if (task->has_mask && task->mask_dtype == MHA_BOOL) {
        s->bits = (uint16_t *)FN(take)(&memory, block * ((V(panel) + 15) / 16));
    } else if (task->has_mask) {
        s->mask_rows = FN(take)(&memory, V(lanes) * s->score_row);
    }
    s->before = task->has_window ? FN(take)(&memory, V(panel)) : NULL;
    s->slope = task->has_slopes ? FN(take)(&memory, V(panel)) : NULL;
    s->position = task->has_slopes ? FN(take)(&memory, V(panel)) : NULL;
    int rules = task->softcap != 0 || task->has_slopes || (task->has_window && task->has_mask);
    s->raw = rules ? FN(take)(&memory, (FN(tall_tile) + 1) * V(panel)) : NULL;
    return memory;
}

static int64_t FN(scratch_bytes)(const mha_task *task)
{
    FN(scratch) s;
    return mha_round_up(sizeof s, 64) + (int64_t)FN(lay_out)(&s, task, 0);
}

/* The layout itself lies at the beginning, made once for all tasks of a thread. */
static void FN(open_scratch)(const mha_task *task, void *memory)
{
    FN(lay_out)(memory, task, (uintptr_t)memory + (uintptr_t)mha_round_up(sizeof(FN(scratch)), 64));
}

static int64_t FN(state_bytes)(const mha_task *task)
{
    uintptr_t memory = 0;
    FN(take_state)(&memory, task);
    return mha_round_up(task->max_rows, V(panel)) / V(panel) * (int64_t)memory;
}
