/* A multi-head attention layer in one parallel region: weights packed, queries, keys and values projected, attended,
 * the output projected. Heads stay in the columns where the projections leave them, so nothing is transposed. Weights
 * are read anew in every call, in place where that is fast. Built for the architecture's baseline.
 *
 * Vaswani et al. 2017, section 3.2.2.
 */
#include <stddef.h>

#include "driver.h"

enum { PACK, PROJECT, FIRST_ATTENTION, OUTPUT = FIRST_ATTENTION + MHA_ATTENTION_PHASES, PHASES };
enum { QUERY, KEY, VALUE, OUT, MAPS };
/* Rows and column tiles of a task; fewer rows than a pack pays for read the weights where they lie. */
enum { ROWS = 96, COLUMN_TILES = 4, PACK_ROWS = 64 };

typedef struct map {
    mha_linear linear;
    char *packed, *out; /* packed: NULL where the weight is read in place */
    int64_t rows, out_batch, out_row, row_blocks, column_blocks, column_tiles;
} map;

typedef struct layer_plan {
    const mha_kernels *kernels;
    mha_params attention;
    mha_plan plan;
    map maps[MAPS];
    int64_t col_tile, item, bytes;
    int threads;
    char *memory, *rows; /* rows: a block of converted input rows a thread */
    int64_t rows_bytes;
} layer_plan;

static int reads_in_place(const mha_array *a, mha_dtype dtype) { return a->dtype == dtype && a->col == 1; }

double mha_layer_estimated_ns(const mha_layer *layer)
{
    const mha_linear *maps[] = {&layer->query, &layer->key, &layer->value, &layer->output};
    double products = 0, batch = (double)layer->attention.lead_shape[0];
    for (int m = 0; m < MAPS; m++)
        products += batch * (double)maps[m]->len * (double)maps[m]->depth * (double)maps[m]->cols;
    double lanes = mha_isa_tiles(layer->attention.isa, layer->attention.dtype).lanes;
    mha_dtype dtype = layer->attention.dtype;
    return mha_attention_ns(&layer->attention, dtype, dtype) + 2 * products / (10 * lanes);
}

/* Takes bytes from the workspace, on a cache line of their own; memory may be NULL, then only sizes are meant. */
static char *take(layer_plan *plan, int64_t bytes)
{
    char *taken = plan->memory ? plan->memory + plan->bytes : NULL;
    if (bytes > INT64_MAX / 16 || plan->bytes < 0 || plan->bytes > INT64_MAX / 4) {
        plan->bytes = -1;
        return NULL;
    }
    plan->bytes += mha_align_up(bytes);
    return taken;
}

/* Row length of an array in the workspace: an odd number of cache lines, so that rows spread over a cache's sets. */
static int64_t spread(const layer_plan *plan, int64_t cols)
{
    int64_t line = 64 / plan->item;
    return (mha_divide_up(cols, line) | 1) * line;
}

static void open_map(layer_plan *plan, map *map, const mha_linear *linear, int64_t batch)
{
    map->linear = *linear;
    map->rows = mha_saturating(batch, linear->len);
    map->column_tiles = mha_divide_up(linear->cols, plan->col_tile);
    map->row_blocks = mha_divide_up(map->rows, ROWS);
    map->column_blocks = mha_divide_up(map->column_tiles, COLUMN_TILES);
    map->packed = NULL;
    map->out_row = spread(plan, linear->cols);
    map->out_batch = mha_saturating(linear->len, map->out_row);
    int packs = map->rows >= PACK_ROWS || !reads_in_place(&linear->weight, plan->attention.dtype);
    int64_t packed = mha_saturating(mha_saturating(map->column_tiles, plan->col_tile), linear->depth);
    if (packs)
        map->packed = take(plan, mha_saturating(packed, plan->item));
    else
        map->column_tiles = 0; /* nothing to pack */
}

/* The result of a projection as an array of heads. */
static mha_array heads_of(const layer_plan *plan, const map *map, int64_t depth)
{
    mha_array a = {.data = map->out, .dtype = plan->attention.dtype, .head = depth, .row = map->out_row, .col = 1};
    a.lead[0] = map->out_batch;
    return a;
}

/* All that is checked of a layer, before anything is planned. */
static mha_status check_layer(const mha_params *attention, const mha_linear *const linears[MAPS])
{
    mha_status status = mha_check(attention);
    if (status != MHA_OK) return status;
    if (attention->lead_ndim != 1) return MHA_ERR_SHAPE;
    for (int m = 0; m < MAPS; m++) {
        if (linears[m]->len < 0 || linears[m]->depth < 0 || linears[m]->cols < 0) return MHA_ERR_SHAPE;
        if (!mha_is_real(linears[m]->weight.dtype)) return MHA_ERR_DTYPE;
        if (m != OUT && !mha_is_real(linears[m]->x.dtype)) return MHA_ERR_DTYPE;
    }
    return MHA_OK;
}

/* The layer over memory, NULL to learn the size. */
static mha_status make_layer_plan(layer_plan *plan, const mha_layer *layer, char *memory)
{
    const mha_linear *linears[MAPS] = {&layer->query, &layer->key, &layer->value, &layer->output};
    mha_params *p = &plan->attention;
    *p = layer->attention;
    p->query.dtype = p->key.dtype = p->value.dtype = p->out.dtype = p->dtype; /* the maps' results */
    mha_status status = check_layer(p, linears);
    if (status != MHA_OK) return status;
    plan->memory = memory;
    plan->bytes = 0;
    plan->item = mha_item_bytes(p->dtype);
    plan->col_tile = mha_isa_tiles(p->isa, p->dtype).col_tile;
    plan->threads = mha_layer_estimated_ns(layer) < MHA_INLINE_NS ? 1 : p->num_threads;
    int64_t depth = 0;
    for (int m = 0; m < MAPS; m++) {
        map *map = &plan->maps[m];
        open_map(plan, map, linears[m], p->lead_shape[0]);
        if (m != OUT) map->out = take(plan, mha_saturating(mha_saturating(map->rows, map->out_row), plan->item));
        if (m != OUT && !reads_in_place(&map->linear.x, p->dtype)) depth = mha_max(depth, map->linear.depth);
    }
    map *out = &plan->maps[OUT];
    int64_t attended_row = spread(plan, out->linear.depth);
    /* A task reads its queries before it writes their results, so both take one place, but for weights, which come
     * later. */
    char *attended = plan->maps[QUERY].out;
    if (p->weights.data || p->head_dim != p->value_dim)
        attended = take(plan, mha_saturating(mha_saturating(out->rows, attended_row), plan->item));
    plan->rows_bytes = mha_align_up(mha_saturating(ROWS * plan->item, mha_min(depth, INT64_MAX / 4096)));
    plan->rows = take(plan, mha_saturating(plan->rows_bytes, plan->threads));
    p->query = heads_of(plan, &plan->maps[QUERY], p->head_dim);
    p->key = heads_of(plan, &plan->maps[KEY], p->head_dim);
    p->value = heads_of(plan, &plan->maps[VALUE], p->value_dim);

    p->out = p->query;
    p->out.data = attended;
    p->out.head = p->value_dim;
    p->out.row = attended_row;
    p->out.lead[0] = mha_saturating(out->linear.len, attended_row);
    out->linear.x = p->out;
    out->out = layer->out.data;
    out->out_row = layer->out.row;
    out->out_batch = layer->out.lead[0];
    mha_make_plan(&plan->plan, p, plan->threads);
    plan->kernels = plan->plan.kernels;
    char *attention = take(plan, plan->plan.bytes < 0 ? INT64_MAX : plan->plan.bytes);
    if (memory && plan->bytes >= 0) mha_place_plan(&plan->plan, attention);
    return MHA_OK;
}

static int64_t layer_tasks(const void *of, int phase)
{
    const layer_plan *plan = of;
    int64_t tasks = 0;
    if (phase >= FIRST_ATTENTION && phase < OUTPUT) return mha_attention_tasks(&plan->plan, phase - FIRST_ATTENTION);
    if (phase == OUTPUT) return plan->maps[OUT].row_blocks * plan->maps[OUT].column_blocks;
    for (int m = 0; m < MAPS; m++) {
        const map *map = &plan->maps[m];
        if (phase == PACK) tasks += map->column_tiles;
        if (phase == PROJECT && m != OUT) tasks += map->row_blocks * map->column_blocks;
    }
    return tasks;
}

static void pack(const layer_plan *plan, int64_t t)
{
    int m = 0;
    while (t >= plan->maps[m].column_tiles) t -= plan->maps[m++].column_tiles;
    const mha_linear *linear = &plan->maps[m].linear;
    mha_matrix weight = {.data = linear->weight.data,
                         .dtype = linear->weight.dtype,
                         .row = linear->weight.row,
                         .col = linear->weight.col};
    plan->kernels->pack_weight(plan->maps[m].packed, &weight, linear->depth, linear->cols, t);
}

/* Rows of batch entry b that somebody reads: keys beyond its length are never seen. */
static int64_t rows_read(const layer_plan *plan, int m, int64_t b)
{
    const mha_params *p = &plan->attention;
    if ((m != KEY && m != VALUE) || !p->lengths.data || p->lengths.row || !p->q_len) return plan->maps[m].linear.len;
    int64_t length = *(const int64_t *)(p->lengths.data + b * p->lengths.lead[0] * (int64_t)sizeof(int64_t));
    return mha_max(mha_min(length, p->kv_len), 0);
}

/* Rows [first, end) of one map, counted over the batch: pieces whose rows are evenly spaced. */
static void project_rows(const layer_plan *plan, int m, int64_t first, int64_t end, mha_affine *a, int thread)
{
    const map *map = &plan->maps[m];
    const mha_array *x = &map->linear.x;
    int64_t len = map->linear.len;
    int even = x->lead[0] == len * x->row && map->out_batch == len * map->out_row;
    while (first < end) {
        int64_t b = first / len, i = first % len, last = mha_min(end, (b + 1) * len), read = rows_read(plan, m, b);
        while (even && read == len && last < end && rows_read(plan, m, last / len) == len)
            last = mha_min(end, last + len);
        a->rows = (read == len ? last : mha_min(last, b * len + read)) - first;
        a->x.data = x->data + (b * x->lead[0] + i * x->row) * mha_item_bytes(x->dtype);
        a->out = map->out + (b * map->out_batch + i * map->out_row) * plan->item;
        if (a->rows > 0) plan->kernels->affine(a, plan->rows + thread * plan->rows_bytes);
        first = last;
    }
}

static void project(const layer_plan *plan, int m, int64_t t, int thread)
{
    while (m < OUT && t >= plan->maps[m].row_blocks * plan->maps[m].column_blocks) {
        t -= plan->maps[m].row_blocks * plan->maps[m].column_blocks;
        m++;
    }
    const map *map = &plan->maps[m];
    const mha_linear *linear = &map->linear;
    int64_t block = t / map->column_blocks, column = t % map->column_blocks * COLUMN_TILES * plan->col_tile;
    mha_affine a = {.x = {.dtype = linear->x.dtype, .row = linear->x.row, .col = linear->x.col},
                    .bias = linear->bias,
                    .weight = map->packed ? map->packed : linear->weight.data,
                    .packed = map->packed != NULL,
                    .depth = linear->depth,
                    .weight_row = linear->weight.row,
                    .out_row = map->out_row,
                    .col_begin = column,
                    .col_end = mha_min(linear->cols, column + COLUMN_TILES * plan->col_tile)};
    project_rows(plan, m, block * ROWS, mha_min(map->rows, (block + 1) * ROWS), &a, thread);
}

static void layer_start(const void *of, int thread)
{
    const layer_plan *plan = of;
    mha_attention_start(&plan->plan, thread);
}

static void layer_task(const void *of, int phase, int64_t t, int thread)
{
    const layer_plan *plan = of;
    if (phase == PACK)
        pack(plan, t);
    else if (phase == PROJECT)
        project(plan, QUERY, t, thread);
    else if (phase == OUTPUT)
        project(plan, OUT, t, thread);
    else
        mha_attention_task(&plan->plan, phase - FIRST_ATTENTION, t, thread);
}

int64_t mha_layer_workspace_bytes(const mha_layer *layer)
{
    layer_plan plan;
    if (make_layer_plan(&plan, layer, NULL) != MHA_OK || plan.bytes < 0) return -1;
    return plan.bytes + 64;
}

mha_status mha_layer_forward(const mha_layer *layer, void *workspace, int64_t workspace_bytes)
{
    layer_plan plan;
    if (!workspace) return MHA_ERR_WORKSPACE;
    mha_status status = make_layer_plan(&plan, layer, NULL);
    if (status != MHA_OK) return status;
    if (plan.bytes < 0 || workspace_bytes < plan.bytes + 64) return MHA_ERR_WORKSPACE;
    make_layer_plan(&plan, layer, (char *)workspace + (64 - (uintptr_t)workspace % 64) % 64);
    mha_run(&(mha_job){&plan, plan.threads, PHASES, layer_start, layer_tasks, layer_task});
    return MHA_OK;
}
