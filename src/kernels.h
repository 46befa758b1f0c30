/* The contract between the driver (which knows shapes) and the kernels (which know tiles). Internal.
 *
 * A task is one group of query rows against the keys of one key/value head. Keys are cut into splits of MHA_KEY_SPLIT
 * and those into blocks of MHA_KEY_BLOCK, both counted from key 0: they are part of the arithmetic, so a row has the
 * same bits whatever thread, task or batch it is computed in. The result over a range of keys is a state: row_max,
 * row_sum and the unnormalised output; states are folded in the order of the keys.
 */
#ifndef MHA_KERNELS_H
#define MHA_KERNELS_H

#include "mha.h"

#define MHA_KEY_BLOCK 256
#define MHA_KEY_SPLIT 1024
#define MHA_FEW_ROWS 8
/* Keys are left out from the front of a block in steps of this: no sum over keys that is made of parts then changes. */
#define MHA_KEY_STEP 16
/* Panels of a task that go through the key blocks together: they share a block's packed copy, or read it again from the
 * nearer cache where a head's keys and values are more than that holds, the second-level cache of a core of today. */
#define MHA_PANELS_TOGETHER 4
#define MHA_CACHE_BYTES 1048576

static inline int64_t mha_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t mha_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t mha_divide_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static inline int mha_is_real(mha_dtype dtype) { return dtype == MHA_F32 || dtype == MHA_F64; }
static inline int64_t mha_item_bytes(mha_dtype dtype)
{
    static const unsigned char bytes[] = {[MHA_F32] = 4, [MHA_F64] = 8,  [MHA_BOOL] = 1, [MHA_I64] = 8,
                                          [MHA_F16] = 2, [MHA_BF16] = 2, [MHA_I8] = 1};
    return bytes[dtype];
}
static inline int64_t mha_round_up(int64_t n, int64_t unit) { return mha_divide_up(n, unit) * unit; }
/* The key behind the last of a key's block, or the number of keys where those end before. */
static inline int64_t mha_block_end(int64_t key, int64_t keys)
{
    return mha_min(keys, (key / MHA_KEY_BLOCK + 1) * MHA_KEY_BLOCK);
}
/* Keys or rows of the next tile where so many are left: the whole tile, or what edge tiles there are. */
static inline int64_t mha_next_tile(int64_t left, int64_t whole)
{
    return left >= whole ? whole : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* Rows of one head; strides in elements. */
typedef struct mha_matrix {
    const char *data;
    mha_dtype dtype;
    int64_t row, col;
    const float *scale; /* of each row, scale_row elements apart; NULL: none */
    int64_t scale_row;
    int64_t page, scale_page; /* from one page's first row to the next one's, where rows lie in pages */
} mha_matrix;

/* Rows of a key block as a kernel reads them: columns next to each other, evenly spaced. */
typedef struct mha_rows {
    const char *data;
    int64_t row;
    const float *scale;
    int64_t scale_row;
    mha_dtype dtype;
} mha_rows;

/* One query of a task. mask points at key 0 of the query's mask row, weights at its weights row, slope and sink at a
 * number; NULL where there is none. */
typedef struct mha_row {
    const char *query, *mask, *slope, *sink;
    char *out, *lse, *weights;
    int64_t first, visible; /* keys below the one and keys at or beyond the other are hidden */
    int64_t position;       /* among the keys; where there are slopes */
} mha_row;

/* Rows that this task or a later one will touch, prefetched while it computes: what a head reads for the first time
 * comes from memory, and the hardware's own prefetch stops at every page. */
typedef struct mha_prefetch {
    const char *data;
    int64_t step, rows, row_bytes; /* step in bytes */
} mha_prefetch;
enum { MHA_PREFETCHES = 5 };

typedef struct mha_task {
    /* what all tasks of a call share */
    double scale, softcap;
    int64_t kv_len, head_dim, value_dim, max_rows;
    mha_dtype query_dtype, mask_dtype, out_dtype;
    int has_mask, has_window, has_slopes; /* has_window: rows may have a first key */
    int pack_keys;                        /* copy key and value blocks even where they could be read in place */
    int64_t query_col, mask_col, out_col;
    /* what differs */
    mha_matrix key, value;
    const int64_t *pages; /* of the task's batch entry, NULL where the rows of key and value are evenly spaced */
    int64_t page_len;
    mha_row *rows;
    int64_t num_rows, first, visible; /* the smallest and the largest of the rows' */
    mha_prefetch prefetch[MHA_PREFETCHES];
    int64_t split_begin, split_end;
    void *state; /* NULL: normalise and write the rows; else leave the state of the one split here */
} mha_task;

/* Elements from the first key of a head to another one, where keys are row and pages are page elements apart. */
static inline int64_t mha_key_offset(const mha_task *task, int64_t key, int64_t row, int64_t page)
{
    if (!task->pages) return key * row;
    return task->pages[key / task->page_len] * page + key % task->page_len * row;
}

/* Where a key's row of key or value begins. */
static inline const char *mha_key_row(const mha_task *task, const mha_matrix *matrix, int64_t key)
{
    return matrix->data + mha_key_offset(task, key, matrix->row, matrix->page) * mha_item_bytes(matrix->dtype);
}

/* Where a key's scale lies; NULL: there is none. */
static inline const float *mha_key_scale(const mha_task *task, const mha_matrix *matrix, int64_t key)
{
    if (!matrix->scale) return NULL;
    return matrix->scale + mha_key_offset(task, key, matrix->scale_row, matrix->scale_page);
}

/* Of count keys from key on, how many lie evenly spaced, with their scales: pages may happen to follow each other. */
static inline int64_t mha_even_keys(const mha_task *task, const mha_matrix *matrix, int64_t key, int64_t count)
{
    if (!task->pages) return count;
    const int64_t *page = task->pages + key / task->page_len;
    int64_t even = task->page_len - key % task->page_len;
    for (; even < count && (page[1] - page[0]) * matrix->page == task->page_len * matrix->row &&
           (page[1] - page[0]) * matrix->scale_page == task->page_len * matrix->scale_row;
         page++)
        even += task->page_len;
    return mha_min(even, count);
}

/* out[rows][col_begin..col_end] = x weight + bias. weight has depth rows: those of the matrix itself, or packed column
 * tiles. out and bias are in the compute dtype; col_begin is the border of a column tile. */
typedef struct mha_affine {
    mha_matrix x;
    const char *weight, *bias;
    char *out;
    int packed;
    int64_t rows, depth, col_begin, col_end, weight_row, out_row;
} mha_affine;

typedef struct mha_kernels {
    mha_tiles tiles;
    int64_t (*scratch_bytes)(const mha_task *task);            /* per thread, for tasks of up to max_rows rows */
    void (*open_scratch)(const mha_task *task, void *scratch); /* before a thread's first task */
    int64_t (*state_bytes)(const mha_task *task);
    void (*attend_panels)(const mha_task *task, void *scratch);
    void (*attend_few)(const mha_task *task, void *scratch);
    /* Folds the states of splits [split_begin, split_end), one after the other, normalises and writes the rows. */
    void (*merge)(const mha_task *task, void *states, void *scratch);
    void (*panel_weights)(const mha_task *task, void *scratch);
    void (*few_weights)(const mha_task *task, void *scratch);
    void (*affine)(const mha_affine *affine,
                   void *scratch); /* scratch: rows * depth numbers where x is not read in place */
    void (*pack_weight)(void *packed, const mha_matrix *weight, int64_t depth, int64_t cols, int64_t tile);
    void (*exp2)(const void *src, void *dst, int64_t count);
    void (*tanh)(const void *src, void *dst, int64_t count);
} mha_kernels;

enum { MHA_PAIRS = 2 };
/* Tables for float32 and float64, indexed by mha_dtype, and one for bfloat16 in all three inputs where the level
 * multiplies pairs of them, else NULL. */
typedef const mha_kernels *const mha_kernel_tables[3];
#define MHA_KERNELS_OF(LEVEL, level) extern mha_kernel_tables mha_kernels_##level;
MHA_LEVELS(MHA_KERNELS_OF)

#endif
