/* The driver: cuts a call into tasks, gives them to threads, merges split results in the order of the keys.
 *
 * It knows shapes and strides, and of the kernels only their tile sizes. A task is a group of query panels of one
 * (batch entry, key/value head); where those are too few for the threads, each split of the keys is a task of its own
 * and leaves a state that a second phase merges. That choice moves work, never bits. Where weights are asked for, they
 * are one more phase. Built for the architecture's baseline.
 */
#include "mha.h"

#include <limits.h>
#include <stddef.h>

#include "cpu.h"
#include "driver.h"

#ifdef _OPENMP
#include <omp.h>
#endif

/* ---- levels */

/* MHA_HAVE_<LEVEL>: 1 where the level is built, else 0; the build says it of every level. */
#define KERNELS_1(kernels) kernels
#define KERNELS_0(kernels) NULL
#define KERNELS_IF(built, kernels) MHA_JOIN(KERNELS_, built)(kernels)
#define MHA_JOIN(a, b) a##b
#define LEVEL_OF(LEVEL, level) [MHA_ISA_##LEVEL] = {#level, KERNELS_IF(MHA_HAVE_##LEVEL, mha_kernels_##level)},
static const struct level {
    const char *name;
    const mha_kernels *const *kernels;
} levels[MHA_ISA_COUNT] = {MHA_LEVELS(LEVEL_OF)};

static int is_level(mha_isa isa) { return (int)isa >= 0 && isa < MHA_ISA_COUNT; }
const char *mha_isa_name(mha_isa isa) { return is_level(isa) ? levels[isa].name : NULL; }
int mha_isa_built(mha_isa isa) { return is_level(isa) && levels[isa].kernels != NULL; }
int mha_isa_usable(mha_isa isa) { return mha_isa_built(isa) && mha_cpu_has(isa); }
mha_tiles mha_isa_tiles(mha_isa isa, mha_dtype dtype) { return levels[isa].kernels[dtype]->tiles; }
int mha_few_rows(void) { return MHA_FEW_ROWS; }
int mha_key_block(void) { return MHA_KEY_BLOCK; }
int mha_key_split(void) { return MHA_KEY_SPLIT; }
void mha_exp2(mha_isa isa, mha_dtype dtype, const void *src, void *dst, int64_t count)
{
    levels[isa].kernels[dtype]->exp2(src, dst, count);
}
void mha_tanh(mha_isa isa, mha_dtype dtype, const void *src, void *dst, int64_t count)
{
    levels[isa].kernels[dtype]->tanh(src, dst, count);
}

/* ---- the plan of a call */

/* How far ahead of its position a query sees; below 0: no limit. */
static int64_t right_side(const mha_params *p) { return p->causal ? 0 : p->window_right; }

/* The most keys that a window lets a query see. */
static int64_t window_keys(const mha_params *p)
{
    int64_t left = p->window_left, right = right_side(p);
    if (left < 0 || right < 0 || left >= p->kv_len || right >= p->kv_len) return p->kv_len;
    return mha_min(left + right + 1, p->kv_len);
}

double mha_attention_ns(const mha_params *p, mha_dtype key, mha_dtype value)
{
    int64_t most = window_keys(p), read = most < p->kv_len - p->q_len ? most + p->q_len : p->kv_len;
    double pairs = (double)p->q_len * (double)most, keys = (double)read;
    if (p->q_starts) {
        pairs = 0;
        keys = (double)p->k_starts[p->lead_shape[0]];
        for (int64_t b = 0; b < p->lead_shape[0]; b++)
            pairs += (double)(p->q_starts[b + 1] - p->q_starts[b]) *
                     (double)mha_min(p->k_starts[b + 1] - p->k_starts[b], most);
    } else {
        for (int64_t d = 0; d < p->lead_ndim; d++) {
            pairs *= (double)p->lead_shape[d];
            keys *= (double)p->lead_shape[d];
        }
    }
    pairs *= (double)p->num_heads;
    double kv_bytes = (double)p->num_kv_heads * keys *
                      (double)(p->head_dim * mha_item_bytes(key) + p->value_dim * mha_item_bytes(value));
    /* Coarse, for one core: 10 flops a nanosecond and lane, 10 bytes a nanosecond, 20 flops a weight. */
    double lanes = levels[p->isa].kernels[p->dtype]->tiles.lanes;
    return pairs * (double)(2 * (p->head_dim + p->value_dim) + 20) / (10 * lanes) + kv_bytes / 10;
}

double mha_estimated_ns(const mha_params *p) { return mha_attention_ns(p, p->key.dtype, p->value.dtype); }

static int64_t layout(mha_plan *plan)
{
    const mha_params *p = plan->p;
    int64_t states = plan->split_tasks ? mha_saturating(plan->tasks, plan->state_bytes) : 0;
    plan->thread_bytes = mha_align_up(sizeof(mha_task)) + mha_align_up(plan->rows_per_task * (int64_t)sizeof(mha_row)) +
                         mha_align_up(plan->scratch_bytes);
    int64_t scratch = mha_saturating(plan->thread_bytes, plan->threads);
    int64_t numbers = p->q_starts || p->lengths.data ? 2 : 0; /* of each batch entry, see mha_place_plan */
    plan->order_bytes = mha_align_up(mha_saturating(plan->batches, numbers * (int64_t)sizeof(int64_t)));
    if (states > INT64_MAX / 8 || scratch > INT64_MAX / 8 || plan->order_bytes > INT64_MAX / 8) return -1;
    return plan->order_bytes + states + scratch + 64;
}

static int is_half(mha_dtype dtype) { return dtype == MHA_F16 || dtype == MHA_BF16; }
/* Integers only with their scales, and scales only with integers. */
static int is_cached(const mha_array *a, const mha_array *scale)
{
    if (scale->data) return a->dtype == MHA_I8 && scale->dtype == MHA_F32;
    return mha_is_real(a->dtype) || is_half(a->dtype);
}

static mha_status check_dtypes(const mha_params *p)
{
    if (!mha_is_real(p->dtype)) return MHA_ERR_DTYPE;
    if (!mha_is_real(p->query.dtype) && !is_half(p->query.dtype)) return MHA_ERR_DTYPE;
    if (!is_cached(&p->key, &p->key_scale) || !is_cached(&p->value, &p->value_scale)) return MHA_ERR_DTYPE;
    if (p->mask.data && p->mask.dtype != MHA_BOOL && !mha_is_real(p->mask.dtype)) return MHA_ERR_DTYPE;
    return p->out.dtype == p->dtype || (p->dtype == MHA_F32 && is_half(p->out.dtype)) ? MHA_OK : MHA_ERR_DTYPE;
}

/* Whether it matters where among the keys a query stands. */
static int has_positions(const mha_params *p)
{
    return p->causal || p->window_left >= 0 || p->window_right >= 0 || p->slopes.data != NULL;
}

mha_status mha_check(const mha_params *p)
{
    if (!mha_isa_built(p->isa)) return MHA_ERR_ISA;
    if (p->num_heads < 0 || p->num_kv_heads < 0 || (p->num_kv_heads == 0 && p->num_heads > 0)) return MHA_ERR_SHAPE;
    if (p->q_len < 0 || p->kv_len < 0 || p->head_dim < 0 || p->value_dim < 0) return MHA_ERR_SHAPE;
    if (p->num_threads < 1 || p->lead_ndim < 0 || p->lead_ndim > MHA_MAX_LEAD) return MHA_ERR_SHAPE;
    if (p->num_kv_heads && p->num_heads % p->num_kv_heads) return MHA_ERR_SHAPE;
    if (has_positions(p) && !p->offset.data) return MHA_ERR_SHAPE;
    if (p->num_weight_rows < 0) return MHA_ERR_SHAPE;
    for (int64_t d = 0; d < p->lead_ndim; d++)
        if (p->lead_shape[d] < 0) return MHA_ERR_SHAPE;
    return check_dtypes(p);
}

static mha_matrix matrix_of(const mha_array *a, const mha_array *scale)
{
    return (mha_matrix){.dtype = a->dtype,
                        .row = a->row,
                        .col = a->col,
                        .scale_row = scale->row,
                        .page = a->lead[0],
                        .scale_page = scale->lead[0]};
}

/* Rows of a batch entry for one key/value head: its queries times the group. */
static int64_t entry_rows(const mha_plan *plan, int64_t batch)
{
    const int64_t *starts = plan->p->q_starts;
    return starts ? (starts[batch + 1] - starts[batch]) * plan->group : plan->rows;
}

/* Tasks of each of its key/value heads. */
static int64_t head_tasks(const mha_plan *plan, int64_t batch)
{
    return mha_divide_up(entry_rows(plan, batch), plan->rows_per_task);
}

static int64_t entry_tasks(const mha_plan *plan, int64_t batch)
{
    return plan->p->num_kv_heads * head_tasks(plan, batch);
}

/* Rows of a key/value head whose weights are wanted. */
static int64_t weight_rows(const mha_plan *plan)
{
    return plan->p->weight_rows ? mha_saturating(plan->p->num_weight_rows, plan->group) : plan->rows;
}

/* The most splits that a task's rows see. */
static int64_t task_splits(const mha_plan *plan)
{
    int64_t all = mha_divide_up(plan->p->kv_len, MHA_KEY_SPLIT), keys = window_keys(plan->p);
    if (keys < plan->p->kv_len) all = mha_min(all, (keys + plan->rows_per_task) / MHA_KEY_SPLIT + 2);
    return mha_max(all, 1);
}

/* From so many bytes apart on, rows of so many keys meet in the same cache sets and in few pages of the TLB. */
enum { FAR_ROW_BYTES = 2048, FAR_KEYS = 4 * MHA_KEY_SPLIT };

static int lie_far_apart(const mha_plan *plan)
{
    const mha_params *p = plan->p;
    int64_t key_row = p->key.row * mha_item_bytes(p->key.dtype),
            value_row = p->value.row * mha_item_bytes(p->value.dtype);
    return mha_max(key_row, value_row) >= FAR_ROW_BYTES && p->kv_len >= FAR_KEYS && !plan->few;
}

/* Whether panels copy blocks of keys or values, see open_block of the kernels. */
static int copies_blocks(const mha_plan *plan, int far)
{
    const mha_params *p = plan->p;
    mha_tiles tiles = plan->kernels->tiles;
    int64_t item = mha_item_bytes(p->dtype), steps = (p->value.row | p->value.head) * item;
    int across_lines = tiles.align_values && ((int64_t)(uintptr_t)p->value.data | steps) % (tiles.lanes * item);
    return far || p->key.dtype != p->dtype || p->value.dtype != p->dtype || p->key.col != 1 || p->value.col != 1 ||
           p->pages || p->value_dim % tiles.lanes || across_lines;
}

/* Tasks that each of many threads is left with where panels share copies, and where they share what a cache holds; the
 * threads that idle while others do their last task are at most this part of all tasks. */
enum { TASKS_WITH_COPIES = 4, TASKS_WITHOUT = 8, IDLE_PART = 16 };

/* Panels of a task: several share copied blocks, or blocks that come from a farther cache, as long as many threads have
 * tasks enough, more for the lesser gain, and hardly one is idle while the others do their last. */
static int64_t panels_together(const mha_plan *plan, int far)
{
    const mha_params *p = plan->p;
    int64_t panels = mha_divide_up(plan->rows, plan->kernels->tiles.panel), threads = plan->threads;
    int64_t key_bytes = p->head_dim * mha_item_bytes(p->key.dtype) + p->value_dim * mha_item_bytes(p->value.dtype);
    int copies = copies_blocks(plan, far), beyond_cache = mha_saturating(window_keys(p), key_bytes) >= MHA_CACHE_BYTES;
    int64_t most = copies || beyond_cache ? mha_min(panels, MHA_PANELS_TOGETHER) : 1,
            enough = (copies ? TASKS_WITH_COPIES : TASKS_WITHOUT) * threads;
    for (; most > 1 && !(copies && threads == 1); most--) {
        int64_t tasks = mha_saturating(plan->heads, mha_divide_up(panels, most));
        int64_t idle = (threads - tasks % threads) % threads;
        if (tasks >= enough && IDLE_PART * idle <= tasks) break;
    }
    return mha_max(most, 1);
}

void mha_make_plan(mha_plan *plan, const mha_params *p, int threads)
{
    plan->p = p;
    int pairs =
        p->dtype == MHA_F32 && p->query.dtype == MHA_BF16 && p->key.dtype == MHA_BF16 && p->value.dtype == MHA_BF16;
    plan->kernels = levels[p->isa].kernels[pairs ? MHA_PAIRS : p->dtype];
    if (!plan->kernels) plan->kernels = levels[p->isa].kernels[p->dtype];
    plan->batches = 1;
    for (int64_t d = 0; d < p->lead_ndim; d++) plan->batches = mha_saturating(plan->batches, p->lead_shape[d]);
    plan->group = p->num_kv_heads ? p->num_heads / p->num_kv_heads : 0;
    plan->rows = mha_saturating(p->q_len, plan->group);
    plan->few = plan->rows <= MHA_FEW_ROWS;
    plan->heads = mha_saturating(plan->batches, p->num_kv_heads);
    plan->threads = threads;
    int far = lie_far_apart(plan);
    int64_t most = plan->few ? plan->rows : panels_together(plan, far) * plan->kernels->tiles.panel;
    plan->rows_per_task = mha_max(mha_min(plan->rows, most), 1);
    plan->row_tasks = mha_divide_up(plan->rows, plan->rows_per_task);
    plan->weight_row_tasks = p->weights.data ? mha_divide_up(weight_rows(plan), plan->rows_per_task) : 0;
    int unequal = right_side(p) >= 0 && p->window_left < 0 && !p->q_starts; /* later rows see more keys */
    plan->tail_heads = unequal ? mha_min(plan->heads, 4 * (int64_t)threads / mha_max(plan->row_tasks, 1)) : 0;
    plan->splits = task_splits(plan);
    plan->tasks = p->q_starts ? 0 : mha_saturating(plan->heads, plan->row_tasks);
    for (int64_t b = 0; p->q_starts && b < plan->batches; b++) plan->tasks += entry_tasks(plan, b);
    plan->split_tasks = plan->threads > 1 && plan->splits > 1 && plan->tasks < 4 * (int64_t)plan->threads;
    if (plan->split_tasks) plan->tasks = mha_saturating(plan->tasks, plan->splits);
    /* One task reads a long head alone: what it needs next is nearer than the next head, which would push it out of the
     * cache. */
    plan->prefetches_own =
        plan->split_tasks || (plan->row_tasks == 1 && p->kv_len > MHA_KEY_SPLIT && p->window_left < 0);
    plan->shared = (mha_task){.scale = p->scale,
                              .softcap = p->softcap,
                              .kv_len = p->kv_len,
                              .head_dim = p->head_dim,
                              .value_dim = p->value_dim,
                              .max_rows = plan->rows_per_task,
                              .query_dtype = p->query.dtype,
                              .mask_dtype = p->mask.dtype,
                              .out_dtype = p->out.dtype,
                              .has_mask = p->mask.data != NULL,
                              .has_window = p->window_left >= 0,
                              .has_slopes = p->slopes.data != NULL,
                              .pack_keys = far,
                              .query_col = p->query.col,
                              .mask_col = p->mask.col,
                              .out_col = p->out.col,
                              .page_len = p->page_len,
                              .key = matrix_of(&p->key, &p->key_scale),
                              .value = matrix_of(&p->value, &p->value_scale)};
    plan->bytes = -1;
    if (p->head_dim > MHA_MAX_DEPTH || p->value_dim > MHA_MAX_DEPTH || plan->batches > MHA_MAX_DEPTH) return;
    plan->state_bytes = plan->kernels->state_bytes(&plan->shared);
    plan->scratch_bytes = plan->kernels->scratch_bytes(&plan->shared);
    plan->bytes = layout(plan);
}

/* ---- a task's rows */

/* Elements from an array's first to that of flat batch entry b. */
static int64_t lead_offset(const mha_params *p, const mha_array *a, int64_t b)
{
    int64_t offset = 0;
    if (p->lead_ndim == 1) return b * a->lead[0]; /* the usual case, without a division */
    for (int64_t d = p->lead_ndim - 1; d >= 0; d--) {
        offset += b % p->lead_shape[d] * a->lead[d];
        b /= p->lead_shape[d];
    }
    return offset;
}

static char *at(const mha_array *a, int64_t offset) { return a->data + offset * mha_item_bytes(a->dtype); }

/* Where a task lies; first_row counts the rows of the phase. */
typedef struct place {
    int64_t batch, head, first_row;
} place;

/* What decides, masks aside, which keys the queries of a batch entry see; NULL where there is none. */
typedef struct ranges {
    int64_t keys;
    const int64_t *length, *offset;
} ranges;

static ranges open_ranges(const mha_params *p, int64_t batch)
{
    ranges ranges = {p->q_starts ? p->k_starts[batch + 1] - p->k_starts[batch] : p->kv_len, NULL, NULL};
    if (p->lengths.data) ranges.length = (const int64_t *)at(&p->lengths, lead_offset(p, &p->lengths, batch));
    if (has_positions(p)) ranges.offset = (const int64_t *)at(&p->offset, lead_offset(p, &p->offset, batch));
    return ranges;
}

/* The keys that query i may see. In a window a row that sees none begins behind all keys: so it widens no range. */
static inline void set_range(const mha_params *p, mha_row *row, const ranges *ranges, int64_t i)
{
    int64_t visible = ranges->keys, right = right_side(p);
    if (ranges->length) visible = mha_min(mha_max(ranges->length[i * p->lengths.row], 0), visible);
    row->visible = visible;
    if (!ranges->offset) return;
    int64_t position = i + *ranges->offset;
    /* distances, for a position plus a window may leave int64 */
    if (right >= 0 && visible - 1 - position > right) row->visible = mha_max(position + right + 1, 0);
    row->position = position;
    if (p->window_left < 0) return;
    row->first = mha_max(position - p->window_left, 0);
    if (row->first < row->visible) return;
    row->first = p->kv_len;
    row->visible = 0;
}

/* The ranges of a task's rows and what they span. */
static void fill_ranges(const mha_plan *plan, mha_task *task, const place *place, const int64_t *chosen)
{
    const mha_params *p = plan->p;
    ranges ranges = open_ranges(p, place->batch);
    if (!ranges.length && !ranges.offset) {
        for (int64_t r = 0; r < task->num_rows; r++) task->rows[r].visible = ranges.keys;
        task->first = 0;
        task->visible = ranges.keys;
        return;
    }
    int64_t n = place->first_row / plan->group, member = place->first_row % plan->group;
    int64_t first = p->kv_len, visible = 0;
    for (int64_t r = 0; r < task->num_rows; r++) {
        mha_row *row = task->rows + r;
        set_range(p, row, &ranges, chosen ? chosen[n] : n);
        first = mha_min(first, row->first);
        visible = mha_max(visible, row->visible);
        if (++member == plan->group) {
            member = 0;
            n++;
        }
    }
    task->first = first;
    task->visible = visible;
}

/* One pointer of each row; that of an absent array stays NULL for all tasks. */
static void fill_pointers(const mha_plan *plan, mha_task *task, size_t field, const mha_array *a, const place *place,
                          int64_t i, int64_t member)
{
    int64_t item = mha_item_bytes(a->dtype);
    int64_t head_step = a->head * item, row_step = a->row * item - (plan->group - 1) * head_step;
    int64_t head = place->head * plan->group + member;
    char *row = at(a, lead_offset(plan->p, a, place->batch) + head * a->head + i * a->row);
    for (int64_t r = 0; r < task->num_rows; r++) {
        *(char **)((char *)(task->rows + r) + field) = row;
        int last = ++member == plan->group;
        row += last ? row_step : head_step;
        if (last) member = 0;
    }
}

/* The n-th rows become those of the n-th chosen query, for their weights. */
static void choose_queries(const mha_plan *plan, mha_task *task, const place *place, const int64_t *chosen)
{
    const mha_params *p = plan->p;
    for (int64_t r = 0; r < task->num_rows; r++) {
        int64_t n = (place->first_row + r) / plan->group, further = chosen[n] - n;
        task->rows[r].query += further * p->query.row * mha_item_bytes(p->query.dtype);
        if (p->mask.data) task->rows[r].mask += further * p->mask.row * mha_item_bytes(p->mask.dtype);
    }
}

/* rows: of the key/value head in this phase. The queries of a group lie next to each other, so that a panel's
 * positions, and with them the keys that it sees, are close together. */
static void fill_rows(const mha_plan *plan, mha_task *task, const place *place, int64_t rows, const int64_t *chosen)
{
    const mha_params *p = plan->p;
    task->num_rows = mha_min(rows - place->first_row, plan->rows_per_task);
    int64_t i = place->first_row / plan->group, member = place->first_row % plan->group;
    if (p->q_starts) i += p->q_starts[place->batch];
    fill_pointers(plan, task, offsetof(mha_row, query), &p->query, place, i, member);
    fill_pointers(plan, task, offsetof(mha_row, out), &p->out, place, i, member);
    if (p->mask.data) fill_pointers(plan, task, offsetof(mha_row, mask), &p->mask, place, i, member);
    if (p->slopes.data) fill_pointers(plan, task, offsetof(mha_row, slope), &p->slopes, place, i, member);
    if (p->sinks.data) fill_pointers(plan, task, offsetof(mha_row, sink), &p->sinks, place, i, member);
    if (p->lse.data) fill_pointers(plan, task, offsetof(mha_row, lse), &p->lse, place, i, member);
    if (p->weights.data) fill_pointers(plan, task, offsetof(mha_row, weights), &p->weights, place, i, member);
    if (chosen) choose_queries(plan, task, place, chosen);
    fill_ranges(plan, task, place, chosen);
}

static place place_of(const mha_plan *plan, int64_t head, int64_t first_row)
{
    int64_t batch = head / plan->p->num_kv_heads;
    return (place){plan->order ? plan->order[batch] : batch, head % plan->p->num_kv_heads, first_row};
}

/* The same order over sequences of their own lengths: the entry is searched for by its first task. */
static place locate_packed(const mha_plan *plan, int64_t t)
{
    int64_t entry = 0;
    for (int64_t end = plan->batches; end - entry > 1;) {
        int64_t middle = entry + (end - entry) / 2;
        if (plan->first_task[middle] <= t)
            entry = middle;
        else
            end = middle;
    }
    int64_t batch = plan->order[entry], tasks = head_tasks(plan, batch);
    t -= plan->first_task[entry];
    return (place){batch, t / tasks, (tasks - 1 - t % tasks) * plan->rows_per_task};
}

/* Task t of (batch entries by work, kv heads, row groups from the last to the first): the last rows see most keys, and
 * tasks of one head follow each other while its keys and values are in the cache. The last heads' tasks are sorted by
 * row group alone where a border makes them unequal: many threads then end together. */
static place locate(const mha_plan *plan, int64_t t)
{
    if (plan->p->q_starts) return locate_packed(plan, t);
    int64_t head = t / plan->row_tasks, group = t % plan->row_tasks, first_tail = plan->heads - plan->tail_heads;
    if (head >= first_tail) {
        t -= first_tail * plan->row_tasks;
        head = first_tail + t % plan->tail_heads;
        group = t / plan->tail_heads;
    }
    return place_of(plan, head, (plan->row_tasks - 1 - group) * plan->rows_per_task);
}

/* Where the head of key or value begins: for rows in pages that of the first page. */
static char *kv_rows(const mha_params *p, const mha_array *a, const place *place)
{
    int64_t entry = p->pages ? 0 : p->q_starts ? p->k_starts[place->batch] * a->row : lead_offset(p, a, place->batch);
    return at(a, entry + place->head * a->head);
}

static char *head_rows(const mha_params *p, const mha_array *a, const place *place)
{
    return at(a, lead_offset(p, a, place->batch) + place->head * a->head);
}

static void open_head(const mha_params *p, mha_matrix *matrix, const mha_array *a, const mha_array *scale,
                      const place *place)
{
    matrix->data = kv_rows(p, a, place);
    if (scale->data) matrix->scale = (const float *)kv_rows(p, scale, place);
}

static void open_task(const mha_plan *plan, mha_task *task, const place *place, int weights)
{
    const mha_params *p = plan->p;
    open_head(p, &task->key, &p->key, &p->key_scale, place);
    open_head(p, &task->value, &p->value, &p->value_scale, place);
    task->pages = p->pages ? p->pages + place->batch * p->pages_row : NULL;
    fill_rows(plan, task, place, weights ? weight_rows(plan) : entry_rows(plan, place->batch),
              weights ? p->weight_rows : NULL);
    task->split_begin = task->first / MHA_KEY_SPLIT;
    task->split_end = mha_divide_up(task->visible, MHA_KEY_SPLIT);
    task->state = NULL;
}

static mha_prefetch prefetch_of(const mha_array *a, const char *head, int64_t first, int64_t last, int64_t cols)
{
    int64_t bytes = mha_item_bytes(a->dtype);
    return (mha_prefetch){head + first * a->row * bytes, a->row * bytes, last - first, cols * bytes};
}

/* Rows of the keys and values of a head. */
static void prefetch_keys(const mha_params *p, mha_task *task, const place *place, int64_t first, int64_t last)
{
    task->prefetch[0] = prefetch_of(&p->key, kv_rows(p, &p->key, place), first, last, p->head_dim);
    task->prefetch[1] = prefetch_of(&p->value, kv_rows(p, &p->value, place), first, last, p->value_dim);
}

/* The task's own keys, a block before their turn. */
static void prefetch_own_keys(const mha_params *p, mha_task *task, const place *here)
{
    int64_t begin = mha_max(task->split_begin * MHA_KEY_SPLIT, task->first) + MHA_KEY_BLOCK;
    int64_t end = mha_min(task->split_end * MHA_KEY_SPLIT + MHA_KEY_BLOCK, task->visible);
    prefetch_keys(p, task, here, mha_min(begin, end), end);
}

/* In a window, the keys of the next task. Gives the first. */
static int64_t prefetch_next_window(const mha_plan *plan, mha_task *task, const place *here, const place *next)
{
    const mha_params *p = plan->p;
    int64_t last = mha_min(next->first_row + plan->rows_per_task, entry_rows(plan, next->batch)) - 1;
    ranges ranges = open_ranges(p, next->batch);
    mha_row lowest = {0}, highest = {0};
    int same_head = next->batch == here->batch && next->head == here->head;
    set_range(p, &lowest, &ranges, next->first_row / plan->group);
    set_range(p, &highest, &ranges, last / plan->group);
    /* the rest is this task's own where it is the same head */
    int64_t end = same_head ? mha_min(highest.visible, task->first) : highest.visible;
    prefetch_keys(p, task, next, lowest.first, end);
    return mha_min(lowest.first, end);
}

/* The task's share of the next head's keys. */
static void prefetch_next_head(const mha_plan *plan, mha_task *task, const place *here, int64_t t)
{
    const mha_params *p = plan->p;
    int64_t tasks = head_tasks(plan, here->batch), share = here->first_row / plan->rows_per_task;
    if (t + tasks >= plan->tasks) return;
    place place = locate(plan, t + tasks);
    ranges ranges = open_ranges(p, place.batch);
    mha_row last = {0}; /* what it sees the others mostly see too */
    set_range(p, &last, &ranges, entry_rows(plan, place.batch) / plan->group - 1);
    prefetch_keys(p, task, &place, last.visible * share / tasks, last.visible * (share + 1) / tasks);
}

/* What task t prefetches beside its own work: keys and values, and the rows of the task that this thread probably takes
 * next. */
static void choose_prefetches(const mha_plan *plan, mha_task *task, const place *here, int64_t t)
{
    const mha_params *p = plan->p;
    int has_next = !plan->split_tasks && t + plan->threads < plan->tasks;
    place next = has_next ? locate(plan, t + plan->threads) : *here;
    int64_t first_key = 0;
    for (int n = 0; n < MHA_PREFETCHES; n++) task->prefetch[n].rows = 0;
    if (plan->prefetches_own)
        prefetch_own_keys(p, task, here);
    else if (p->window_left < 0)
        prefetch_next_head(plan, task, here, t);
    else if (has_next)
        first_key = prefetch_next_window(plan, task, here, &next);
    if (!has_next || plan->group != 1) return;
    int64_t before = p->q_starts ? p->q_starts[next.batch] : 0, first = before + next.first_row;
    int64_t last = mha_min(first + plan->rows_per_task, before + entry_rows(plan, next.batch));
    task->prefetch[2] = prefetch_of(&p->query, head_rows(p, &p->query, &next), first, last, p->head_dim);
    task->prefetch[3] = prefetch_of(&p->out, head_rows(p, &p->out, &next), first, last, p->value_dim);
    if (p->mask.data)
        task->prefetch[4] = prefetch_of(
            &p->mask, head_rows(p, &p->mask, &next) + first_key * p->mask.col * mha_item_bytes(p->mask.dtype), first,
            last, mha_min(p->kv_len - first_key, MHA_KEY_BLOCK));
}

/* ---- phases: attend, merge the states of splits, weights */

enum { ATTEND, MERGE, WEIGHTS };

int64_t mha_attention_tasks(const void *of, int phase)
{
    const mha_plan *plan = of;
    int64_t row_tasks = plan->split_tasks ? plan->tasks / plan->splits : plan->tasks;
    if (phase == ATTEND) return plan->tasks;
    return phase == WEIGHTS ? plan->heads * plan->weight_row_tasks : plan->split_tasks ? row_tasks : 0;
}

/* A thread's task, its rows, and the kernels' scratch lie one after the other. */
static mha_task *thread_task(const mha_plan *plan, int thread)
{
    return (mha_task *)(plan->scratch + thread * plan->thread_bytes);
}

static char *thread_scratch(const mha_plan *plan, int thread)
{
    return (char *)thread_task(plan, thread) + plan->thread_bytes - mha_align_up(plan->scratch_bytes);
}

void mha_attention_start(const void *of, int thread)
{
    const mha_plan *plan = of;
    mha_task *task = thread_task(plan, thread);
    *task = plan->shared;
    task->rows = (mha_row *)((char *)task + mha_align_up(sizeof *task));
    for (int64_t r = 0; r < plan->rows_per_task; r++) task->rows[r] = (mha_row){0};
    plan->kernels->open_scratch(task, thread_scratch(plan, thread));
}

void mha_attention_task(const void *of, int phase, int64_t t, int thread)
{
    const mha_plan *plan = of;
    mha_task *task = thread_task(plan, thread);
    char *scratch = thread_scratch(plan, thread);
    int splitting = phase == ATTEND && plan->split_tasks;
    place place = phase == WEIGHTS
                      ? place_of(plan, t / plan->weight_row_tasks, t % plan->weight_row_tasks * plan->rows_per_task)
                      : locate(plan, splitting ? t / plan->splits : t);
    open_task(plan, task, &place, phase == WEIGHTS);
    if (phase == WEIGHTS) {
        (plan->few ? plan->kernels->few_weights : plan->kernels->panel_weights)(task, scratch);
    } else if (phase == MERGE) {
        plan->kernels->merge(task, plan->states + t * plan->splits * plan->state_bytes, scratch);
    } else {
        if (splitting) {
            int64_t split = task->split_begin + t % plan->splits;
            if (split >= task->split_end) return;
            task->split_begin = split;
            task->split_end = split + 1;
            task->state = plan->states + t * plan->state_bytes;
        }
        int few = entry_rows(plan, place.batch) <= MHA_FEW_ROWS;
        if (!few && !plan->p->pages) choose_prefetches(plan, task, &place, t);
        (few ? plan->kernels->attend_few : plan->kernels->attend_panels)(task, scratch);
    }
}

/* The one place with OpenMP: one region a call, a barrier between phases, tasks in their order to whoever is free;
 * without OpenMP one thread does them all. */
void mha_run(const mha_job *job)
{
#ifdef _OPENMP
    if (job->threads > 1) {
#pragma omp parallel num_threads(job->threads)
        {
            uint64_t saved = mha_fp_enter();
            job->start(job->plan, omp_get_thread_num());
            for (int phase = 0; phase < job->phases; phase++) {
                int64_t tasks = job->tasks(job->plan, phase);
                if (!tasks) continue;
#pragma omp for schedule(dynamic, 1)
                for (int64_t t = 0; t < tasks; t++) job->run(job->plan, phase, t, omp_get_thread_num());
            }
            mha_fp_leave(saved);
        }
        return;
    }
#endif
    uint64_t saved = mha_fp_enter();
    job->start(job->plan, 0);
    for (int phase = 0; phase < job->phases; phase++)
        for (int64_t t = 0, tasks = job->tasks(job->plan, phase); t < tasks; t++) job->run(job->plan, phase, t, 0);
    mha_fp_leave(saved);
}

/* The number of keys that the queries of an entry may see together, causal rules aside. */
static int64_t entry_work(const mha_params *p, int64_t b)
{
    if (p->q_starts) return mha_saturating(p->q_starts[b + 1] - p->q_starts[b], p->k_starts[b + 1] - p->k_starts[b]);
    const int64_t *length = (const int64_t *)at(&p->lengths, lead_offset(p, &p->lengths, b));
    int64_t work = 0;
    for (int64_t i = 0; i < (p->lengths.row ? p->q_len : 1); i++)
        work += mha_max(mha_min(length[i * p->lengths.row], p->kv_len), 0);
    return work;
}

/* Batch entries by their work, largest first, ties in order (Shell sort: nothing is allocated). */
static void sort_batches(const mha_plan *plan, int64_t *order, int64_t *work)
{
    for (int64_t b = 0; b < plan->batches; b++) {
        order[b] = b;
        work[b] = entry_work(plan->p, b);
    }
    int64_t gap = 1;
    while (gap < plan->batches / 3) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3)
        for (int64_t n = gap; n < plan->batches; n++) {
            int64_t b = order[n], m = n;
            for (; m >= gap; m -= gap) {
                int64_t other = order[m - gap];
                if (work[other] > work[b] || (work[other] == work[b] && other < b)) break;
                order[m] = other;
            }
            order[m] = b;
        }
}

void mha_place_plan(mha_plan *plan, char *memory)
{
    plan->order = plan->first_task = NULL;
    plan->states = memory + plan->order_bytes;
    plan->scratch = plan->states + (plan->split_tasks ? plan->tasks * plan->state_bytes : 0);
    int sorts = plan->p->q_starts || (plan->p->lengths.data && plan->threads > 1);
    if (!sorts || !plan->tasks) return;
    plan->order = (int64_t *)memory;
    int64_t *work = plan->order + plan->batches;
    sort_batches(plan, plan->order, work);
    if (!plan->p->q_starts) return;
    plan->first_task = work; /* no longer needed */
    int64_t tasks = 0;
    for (int64_t e = 0; e < plan->batches; e++) {
        plan->first_task[e] = tasks;
        tasks += entry_tasks(plan, plan->order[e]);
    }
}

/* ---- one call of attention */

static mha_status plan_call(mha_plan *plan, const mha_params *p)
{
    mha_status status = mha_check(p);
    if (status != MHA_OK) return status;
    int threads = p->num_threads > 1 && mha_estimated_ns(p) < MHA_INLINE_NS ? 1 : p->num_threads;
    mha_make_plan(plan, p, threads);
    if (plan->tasks < threads) mha_make_plan(plan, p, (int)mha_max(plan->tasks, 1));
    return MHA_OK;
}

int64_t mha_workspace_bytes(const mha_params *params)
{
    mha_plan plan;
    return plan_call(&plan, params) == MHA_OK ? plan.bytes : -1;
}

mha_status mha_forward(const mha_params *params, void *workspace, int64_t workspace_bytes)
{
    mha_plan plan;
    mha_status status = plan_call(&plan, params);
    if (status != MHA_OK) return status;
    if (!plan.tasks) return MHA_OK;
    if (!workspace || plan.bytes < 0 || workspace_bytes < plan.bytes) return MHA_ERR_WORKSPACE;
    mha_place_plan(&plan, (char *)workspace + (64 - (uintptr_t)workspace % 64) % 64);
    mha_run(&(mha_job){&plan, plan.threads, MHA_ATTENTION_PHASES, mha_attention_start, mha_attention_tasks,
                       mha_attention_task});
    return MHA_OK;
}

mha_status mha_plan_of(const mha_params *params, mha_task_plan *tasks)
{
    mha_plan plan;
    mha_status status = plan_call(&plan, params);
    if (status != MHA_OK) return status;
    *tasks = (mha_task_plan){.rows_per_task = plan.rows_per_task,
                             .row_tasks = plan.row_tasks,
                             .splits = plan.splits,
                             .tail_heads = plan.tail_heads,
                             .tasks = plan.tasks,
                             .split_tasks = plan.split_tasks,
                             .threads = plan.threads};
    return MHA_OK;
}

/* ---- the build and its runtime */

const char *mha_compiler(void)
{
#if defined(__VERSION__) && defined(__clang__)
    return __VERSION__;
#elif defined(__VERSION__)
    return "GCC " __VERSION__;
#else
    return "unknown";
#endif
}

#ifdef _OPENMP
int mha_openmp_version(void) { return _OPENMP; }
int mha_openmp_max_threads(void) { return omp_get_max_threads(); }
int mha_openmp_num_procs(void) { return omp_get_num_procs(); }
void mha_pause_threads(void)
{
#if _OPENMP >= 201811 || \
    (defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 9) /* OpenMP 5.0; libgomp has it before */
    omp_pause_resource_all(omp_pause_soft);
#endif
}
#else
int mha_openmp_version(void) { return 0; }
int mha_openmp_max_threads(void) { return 1; }
int mha_openmp_num_procs(void) { return 1; }
void mha_pause_threads(void) {}
#endif
