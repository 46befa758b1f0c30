"""The C interface, as src/mha.h declares it."""

from libc.stdint cimport int64_t

cdef extern from "mha.h" nogil:
    enum:
        MHA_MAX_LEAD
    const double MHA_INLINE_NS

    ctypedef enum mha_status:
        MHA_OK
        MHA_ERR_ISA
        MHA_ERR_SHAPE
        MHA_ERR_DTYPE
        MHA_ERR_WORKSPACE

    ctypedef enum mha_dtype:
        MHA_F32
        MHA_F64
        MHA_BOOL
        MHA_I64
        MHA_F16
        MHA_BF16
        MHA_I8

    ctypedef enum mha_isa:
        MHA_ISA_COUNT

    ctypedef struct mha_array:
        char *data
        mha_dtype dtype
        int64_t head, row, col
        int64_t lead[MHA_MAX_LEAD]

    ctypedef struct mha_params:
        mha_isa isa
        mha_dtype dtype
        int num_threads
        int causal
        int64_t window_left, window_right
        double scale, softcap
        int64_t lead_ndim
        int64_t lead_shape[MHA_MAX_LEAD]
        int64_t num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim
        mha_array query, key, value, key_scale, value_scale, mask, lengths, offset, slopes, sinks, out, lse, weights
        const int64_t *weight_rows
        int64_t num_weight_rows
        const int64_t *q_starts
        const int64_t *k_starts
        const int64_t *pages
        int64_t page_len, pages_row

    ctypedef struct mha_linear:
        mha_array x, weight
        const char *bias
        int64_t len, depth, cols

    ctypedef struct mha_layer:
        mha_params attention
        mha_linear query, key, value, output
        mha_array out

    ctypedef struct mha_tiles:
        int lanes, panel, key_tile, row_tile, col_tile

    ctypedef struct mha_task_plan:
        int64_t rows_per_task, row_tasks, splits, tail_heads, tasks
        int split_tasks, threads

    int64_t mha_workspace_bytes(const mha_params *params) noexcept
    mha_status mha_forward(const mha_params *params, void *workspace, int64_t workspace_bytes) noexcept
    double mha_estimated_ns(const mha_params *params) noexcept
    mha_status mha_plan_of(const mha_params *params, mha_task_plan *tasks) noexcept
    int64_t mha_layer_workspace_bytes(const mha_layer *layer) noexcept
    mha_status mha_layer_forward(const mha_layer *layer, void *workspace, int64_t workspace_bytes) noexcept
    double mha_layer_estimated_ns(const mha_layer *layer) noexcept

    const char *mha_isa_name(mha_isa isa) noexcept
    int mha_isa_built(mha_isa isa) noexcept
    int mha_isa_usable(mha_isa isa) noexcept
    mha_tiles mha_isa_tiles(mha_isa isa, mha_dtype dtype) noexcept
    int mha_few_rows() noexcept
    int mha_key_block() noexcept
    int mha_key_split() noexcept

    const char *mha_compiler() noexcept
    int mha_openmp_version() noexcept
    int mha_openmp_max_threads() noexcept
    int mha_openmp_num_procs() noexcept
    void mha_pause_threads() noexcept

    void mha_exp2(mha_isa isa, mha_dtype dtype, const void *src, void *dst, int64_t count) noexcept
    void mha_tanh(mha_isa isa, mha_dtype dtype, const void *src, void *dst, int64_t count) noexcept
