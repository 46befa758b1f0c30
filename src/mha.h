/* The whole C interface of mha_fast: a parameter struct and a call for attention, the same for a layer, and what the
 * build and the CPU offer.
 *
 * out[..., h, i, :] = softmax_j(cap(scale * query[..., h, i, :] . key[..., h / group, j, :]) + biases)
 *                     value[..., h / group, j, :]
 * over the keys j that query i may see; group = num_heads / num_kv_heads. A query that sees no key gets 0.
 *
 * Strides are in elements and may be anything, 0 and negative included. Arrays are read where they lie and may overlap,
 * but out, lse and weights overlap nothing. The caller has checked shapes and dtypes; here only O(1) checks are made.
 * Nothing is allocated, printed or kept between calls.
 */
#ifndef MHA_H
#define MHA_H

#include <stdint.h>

/* NumPy arrays have at most 64 dimensions; heads, rows and columns are not leading ones. */
#define MHA_MAX_LEAD 62

typedef enum { MHA_OK, MHA_ERR_ISA, MHA_ERR_SHAPE, MHA_ERR_DTYPE, MHA_ERR_WORKSPACE } mha_status;
typedef enum { MHA_F32, MHA_F64, MHA_BOOL, MHA_I64, MHA_F16, MHA_BF16, MHA_I8 } mha_dtype;
/* The instruction-set levels, in ascending preference within one architecture. */
#define MHA_LEVELS(LEVEL) \
    LEVEL(SCALAR, scalar) \
    LEVEL(NEON, neon)     \
    LEVEL(AVX2, avx2)     \
    LEVEL(AVX512, avx512) \
    LEVEL(AVX512_BF16, avx512_bf16)
#define MHA_ISA_OF(LEVEL, level) MHA_ISA_##LEVEL,
typedef enum { MHA_LEVELS(MHA_ISA_OF) MHA_ISA_COUNT } mha_isa;

/* An array (*lead, head, row, col); data is NULL where the array is absent. */
typedef struct mha_array {
    char *data;
    mha_dtype dtype;
    int64_t head, row, col;
    int64_t lead[MHA_MAX_LEAD];
} mha_array;

typedef struct mha_params {
    mha_isa isa;
    mha_dtype dtype; /* of the computation, of lse and weights: MHA_F32 or MHA_F64 */
    int num_threads;
    int causal; /* query i sees key j only if j <= i + offset */
    /* Query i sees key j only if -right <= i + offset - j <= left; below 0: no limit. */
    int64_t window_left, window_right; /* at most 2^62 */
    double scale;
    double softcap; /* a score becomes softcap * tanh(score / softcap); 0: it stays */
    int64_t lead_ndim, lead_shape[MHA_MAX_LEAD];
    int64_t num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim;
    /* MHA_F16, MHA_BF16, MHA_F32 or MHA_F64, key and value also MHA_I8; (*lead, heads, len, depth) */
    mha_array query, key, value;
    /* Beside MHA_I8 alone: MHA_F32 (*lead, heads, len); a number is its integer times the scale of its row. */
    mha_array key_scale, value_scale;
    mha_array mask;    /* MHA_BOOL (nonzero = may attend), MHA_F32 or MHA_F64 (added); (*lead, heads, q_len, kv_len) */
    mha_array lengths; /* MHA_I64 (*lead, q_len): query i sees key j only if j < length */
    mha_array offset;  /* MHA_I64 (*lead), within +-2^62; needed where causal, a window or slopes are set */
    mha_array slopes;  /* (*lead, heads), dtype as above, finite: -slope * |i + offset - j| is added to the scores */
    mha_array sinks;   /* (*lead, heads), dtype as above, finite or -inf: one more score of each row, without a value */
    /* Packed sequences: entry b of the one leading dimension has queries q_starts[b] to q_starts[b + 1] and keys
     * k_starts[b] to k_starts[b + 1] of arrays without that dimension (its stride is 0); q_len and kv_len are the
     * largest. NULL without. No mask, no lengths, no weights beside it. */
    const int64_t *q_starts, *k_starts;
    /* Pages: key t of entry b is row t % page_len of page pages[b * pages_row + t / page_len], which is an index of the
     * leading dimension of key and value. NULL without. */
    const int64_t *pages;
    int64_t page_len, pages_row;
    /* (*lead, heads, q_len, value_dim | none | kv_len), dtype as above; out also MHA_F16 or MHA_BF16 of a computation
     * in MHA_F32, rounded once. weights: zeros, column stride 1; hidden keys are left. */
    mha_array out, lse, weights;
    const int64_t *weight_rows; /* the queries whose weights are wanted, in the rows of weights; NULL: all */
    int64_t num_weight_rows;
} mha_params;

/* One linear map of a layer: (batch, len, depth) x times (depth, cols) weight plus bias. x, weight: MHA_F32 or MHA_F64,
 * any strides; x has one leading dimension, the batch. bias: cols numbers of the compute dtype, one after the other. */
typedef struct mha_linear {
    mha_array x, weight;
    const char *bias;
    int64_t len, depth, cols;
} mha_linear;

/* A multi-head attention layer: projections, attention, output projection in one call. attention.query, .key, .value
 * and .out are the core's own; the layer's heads lie next to each other in the columns of its maps. output.x is not
 * read; out is (batch, len, cols) with column stride 1. */
typedef struct mha_layer {
    mha_params attention;
    mha_linear query, key, value, output;
    mha_array out;
} mha_layer;

typedef struct mha_tiles {
    int lanes, panel, key_tile, row_tile, col_tile; /* numbers of queries, queries, keys, queries, columns */
    int align_values;                               /* values that lie across cache lines are copied */
} mha_tiles;

/* How a call is cut: row_tasks tasks of at most rows_per_task rows (q_len * group) for each key/value head of each
 * batch entry, with split_tasks times the splits of its keys. Of the last tail_heads heads, tasks come by row group. */
typedef struct mha_task_plan {
    int64_t rows_per_task, row_tasks, splits, tail_heads, tasks;
    int split_tasks, threads;
} mha_task_plan;

/* Bytes that mha_forward needs for these parameters; -1 where that is beyond what can be addressed. */
int64_t mha_workspace_bytes(const mha_params *params);
mha_status mha_forward(const mha_params *params, void *workspace, int64_t workspace_bytes);
/* A coarse estimate of the nanoseconds that the call takes on one thread. */
double mha_estimated_ns(const mha_params *params);
/* Below this much work on one thread, waking others costs more than it gains: the call stays on the calling thread. */
#define MHA_INLINE_NS 10e3

/* The same for a layer. */
int64_t mha_layer_workspace_bytes(const mha_layer *layer);
mha_status mha_layer_forward(const mha_layer *layer, void *workspace, int64_t workspace_bytes);
double mha_layer_estimated_ns(const mha_layer *layer);

/* The tasks and threads of mha_forward for these parameters; of arrays only q_starts and k_starts are read. */
mha_status mha_plan_of(const mha_params *params, mha_task_plan *tasks);

const char *mha_isa_name(mha_isa isa);
int mha_isa_built(mha_isa isa);
int mha_isa_usable(mha_isa isa); /* built, and both the CPU and the operating system allow it */
mha_tiles mha_isa_tiles(mha_isa isa, mha_dtype dtype);
/* Calls with at most this many rows (q_len * group) per key/value head use the few-query kernel. */
int mha_few_rows(void);
int mha_key_block(void);
int mha_key_split(void);

const char *mha_compiler(void);
int mha_openmp_version(void); /* 0 without OpenMP */
int mha_openmp_max_threads(void);
int mha_openmp_num_procs(void); /* CPUs of the process, though OpenMP may have bound this thread to one */
/* Ends the OpenMP workers that the calling thread owns, so that it may fork. */
void mha_pause_threads(void);

/* For tests: dst[i] = 2^src[i], src[i] <= 0, and tanh(src[i]), by the vector functions of a level. */
void mha_exp2(mha_isa isa, mha_dtype dtype, const void *src, void *dst, int64_t count);
void mha_tanh(mha_isa isa, mha_dtype dtype, const void *src, void *dst, int64_t count);

#endif
