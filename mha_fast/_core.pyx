"""From ndarrays to the C core's parameter struct: recognise or validate, fill, call, return. No arithmetic on data."""

import numpy as np

cimport numpy as cnp
from libc.float cimport DBL_MAX
from libc.math cimport INFINITY, sqrt
from libc.stdint cimport int64_t
from libc.string cimport strcmp, strrchr

from mha_fast._mha cimport (
    MHA_BF16,
    MHA_BOOL,
    MHA_ERR_DTYPE,
    MHA_ERR_ISA,
    MHA_ERR_SHAPE,
    MHA_ERR_WORKSPACE,
    MHA_F16,
    MHA_F32,
    MHA_F64,
    MHA_I8,
    MHA_I64,
    MHA_INLINE_NS,
    MHA_ISA_COUNT,
    MHA_MAX_LEAD,
    MHA_OK,
    mha_array,
    mha_compiler,
    mha_dtype,
    mha_estimated_ns,
    mha_exp2,
    mha_few_rows,
    mha_forward,
    mha_isa,
    mha_isa_built,
    mha_isa_name,
    mha_isa_tiles,
    mha_isa_usable,
    mha_key_block,
    mha_key_split,
    mha_layer,
    mha_layer_estimated_ns,
    mha_layer_forward,
    mha_layer_workspace_bytes,
    mha_linear,
    mha_openmp_max_threads,
    mha_openmp_num_procs,
    mha_openmp_version,
    mha_params,
    mha_pause_threads,
    mha_plan_of,
    mha_status,
    mha_tanh,
    mha_task_plan,
    mha_tiles,
    mha_workspace_bytes,
)

from mha_fast import _validate

cnp.import_array()

# A call of less than this keeps the GIL: giving it up may mean waiting behind another thread's switch interval.
cdef double RELEASE_GIL_NS = 20e3
cdef enum:
    SMALL_WORKSPACE = 24576  # bytes

cdef bint OPENMP = mha_openmp_version() != 0
cdef int OPENMP_MAX_AT_IMPORT = mha_openmp_max_threads()
cdef int MAX_THREADS = _validate.MAX_THREADS

# The module that holds the default thread count and the level; set by it, read by every call.
cdef dict config = {"num_threads": 1, "level": 0}


def bind_config(dict namespace):
    """Read `num_threads` and `level` from this namespace from now on; called once, while mha_fast is imported."""
    global config
    config = namespace


# ---- filling the struct

cdef inline bint is_bfloat16(cnp.ndarray array) noexcept:
    """True for ml_dtypes' bfloat16, which is told by the name of its type, here that behind the module's."""
    cdef cnp.dtype dtype = <cnp.dtype> cnp.PyArray_DESCR(array)
    cdef const char *name = dtype.typeobj.tp_name
    cdef const char *dot
    if not cnp.PyTypeNum_ISUSERDEF(cnp.PyArray_TYPE(array)) or cnp.PyArray_ITEMSIZE(array) != 2:
        return False
    dot = strrchr(name, c".")
    return strcmp(name if dot == NULL else dot + 1, "bfloat16") == 0


cdef inline mha_dtype dtype_of(cnp.ndarray array) noexcept:
    cdef int num = cnp.PyArray_TYPE(array)
    if num == cnp.NPY_FLOAT32:
        return MHA_F32
    if num == cnp.NPY_FLOAT64:
        return MHA_F64
    if num == cnp.NPY_FLOAT16:
        return MHA_F16
    if num == cnp.NPY_BOOL:
        return MHA_BOOL
    if num == cnp.NPY_INT8:
        return MHA_I8
    return MHA_BF16 if is_bfloat16(array) else MHA_I64


cdef inline int item_shift(cnp.ndarray array) noexcept:
    """log2 of the item size: strides are multiples of it, and a shift is a tenth of a division."""
    cdef cnp.npy_intp size = cnp.PyArray_ITEMSIZE(array)
    return 3 if size == 8 else 2 if size == 4 else 1 if size == 2 else 0


cdef void fill(mha_array *a, cnp.ndarray array, int lead, int head, int row, int col) noexcept:
    """Describe an array by its axes: `lead` leading ones, then the numbers of head, row and column (-1: has none)."""
    cdef cnp.npy_intp *strides = cnp.PyArray_STRIDES(array)
    cdef int shift = item_shift(array), d
    a.data = <char *> cnp.PyArray_DATA(array)
    a.dtype = dtype_of(array)
    a.head = strides[head] >> shift if head >= 0 else 0
    a.row = strides[row] >> shift if row >= 0 else 0
    a.col = strides[col] >> shift if col >= 0 else 0
    for d in range(lead):
        a.lead[d] = strides[d] >> shift


cdef void fill_per_head(mha_array *a, cnp.ndarray array, int lead) noexcept:
    """Describe a number for each head, the same in all batch entries."""
    cdef int d
    fill(a, array, 0, 0, -1, -1)
    for d in range(lead):
        a.lead[d] = 0


cdef void leave_out(mha_params *p) noexcept:
    """No optional array yet, and nothing that changes or hides scores."""
    p.window_left = p.window_right = -1
    p.softcap = 0.0
    p.key_scale.data = NULL
    p.value_scale.data = NULL
    p.key_scale.row = p.value_scale.row = 0
    p.key_scale.lead[0] = p.value_scale.lead[0] = 0
    p.mask.data = NULL
    p.lengths.data = NULL
    p.offset.data = NULL
    p.slopes.data = NULL
    p.sinks.data = NULL
    p.lse.data = NULL
    p.weights.data = NULL
    p.weight_rows = NULL
    p.num_weight_rows = 0
    p.lse.head = p.lse.row = p.lse.col = 0
    p.weights.head = p.weights.row = p.weights.col = 0
    p.mask.col = 0
    p.mask.dtype = MHA_BOOL
    p.q_starts = p.k_starts = p.pages = NULL
    p.page_len = p.pages_row = 0


cdef int resolve_threads(object num_threads) except -1:
    """The thread count of a call: the argument, else the default, capped where OpenMP's maximum was lowered.

    Without OpenMP it is 1: scratch for more would never be used.
    """
    cdef int threads, most
    if not OPENMP:
        return 1
    if num_threads is not None:
        return num_threads
    threads = config["num_threads"]
    most = mha_openmp_max_threads()
    return most if most < OPENMP_MAX_AT_IMPORT and most < threads else threads


cdef void fill_sizes(mha_params *p, cnp.ndarray query, cnp.ndarray key, cnp.ndarray value, int lead, int head, int row):
    """Sizes and strides of arrays whose heads and rows are these axes."""
    cdef int d
    p.isa = <mha_isa> <int> config["level"]
    p.lead_ndim = lead
    for d in range(lead):
        p.lead_shape[d] = cnp.PyArray_DIM(query, d)
    p.num_heads = cnp.PyArray_DIM(query, head) if head >= 0 else 1
    p.num_kv_heads = cnp.PyArray_DIM(key, head) if head >= 0 else 1
    p.q_len = cnp.PyArray_DIM(query, row)
    p.kv_len = cnp.PyArray_DIM(key, row)
    p.head_dim = cnp.PyArray_DIM(query, cnp.PyArray_NDIM(query) - 1)
    p.value_dim = cnp.PyArray_DIM(value, cnp.PyArray_NDIM(value) - 1)
    fill(&p.query, query, lead, head, row, cnp.PyArray_NDIM(query) - 1)
    fill(&p.key, key, lead, head, row, cnp.PyArray_NDIM(key) - 1)
    fill(&p.value, value, lead, head, row, cnp.PyArray_NDIM(value) - 1)


# ---- the call

cdef cnp.ndarray workspace_of(cnp.npy_intp size):
    """Memory for one call; an ndarray, since NumPy asks for huge pages where an array is large."""
    if size < 0:
        raise MemoryError("the workspace would be larger than the address space")
    return cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT8, 0)


cdef int run(mha_params *p) except -1:
    """Call the core with a workspace of its own; a short call's lies on the stack."""
    cdef char small[SMALL_WORKSPACE]
    cdef double ns = mha_estimated_ns(p)
    cdef bint brief = ns < RELEASE_GIL_NS
    cdef mha_status status = MHA_ERR_WORKSPACE
    if ns < MHA_INLINE_NS:
        p.num_threads = 1  # as the core would find by estimating again
    if brief:
        status = mha_forward(p, small, SMALL_WORKSPACE)
    if status == MHA_ERR_WORKSPACE:
        return run_in(p, workspace_of(mha_workspace_bytes(p)), brief)
    return check(status)


cdef int run_in(mha_params *p, cnp.ndarray memory, bint brief) except -1:
    """Call the core with this workspace; a call that is not brief gives up the GIL."""
    cdef void *workspace = cnp.PyArray_DATA(memory)
    cdef int64_t size = cnp.PyArray_SIZE(memory)
    cdef mha_status status
    if brief:
        status = mha_forward(p, workspace, size)
    else:
        with nogil:
            status = mha_forward(p, workspace, size)
    return check(status)


cdef int run_layer(mha_layer *layer) except -1:
    cdef cnp.ndarray memory = workspace_of(mha_layer_workspace_bytes(layer))
    cdef void *workspace = cnp.PyArray_DATA(memory)
    cdef int64_t size = cnp.PyArray_SIZE(memory)
    cdef mha_status status
    if mha_layer_estimated_ns(layer) > RELEASE_GIL_NS:
        with nogil:
            status = mha_layer_forward(layer, workspace, size)
    else:
        status = mha_layer_forward(layer, workspace, size)
    return check(status)


cdef int check(mha_status status) except -1:
    if status != MHA_OK:
        names = {MHA_ERR_ISA: "level", MHA_ERR_SHAPE: "shape", MHA_ERR_DTYPE: "dtype"}
        what = names.get(status, "workspace")
        raise RuntimeError(f"the C core refused a checked call: {what}; this is a bug in mha_fast")
    return 0


cdef void fill_options(mha_params *p, call, options, int lead) except *:
    """How a call computes, and what of its options is no array of keys or queries."""
    p.dtype = MHA_F32 if call.compute == np.float32 else MHA_F64
    p.num_threads = resolve_threads(call.num_threads)
    p.scale = options.scale
    p.softcap = options.softcap
    p.causal = options.causal
    p.window_left, p.window_right = options.window
    if options.slopes is not None:
        fill(&p.slopes, options.slopes, lead, lead, -1, -1)
    if options.sinks is not None:
        fill_per_head(&p.sinks, options.sinks, lead)


cdef object open_lse(mha_params *p, call, tuple shape):
    """The array of log-sum-exps, described (heads and rows the last axes), or None where it is not asked for."""
    cdef int lead = <int> len(shape) - 2
    if not call.return_lse:
        return None
    lse = np.empty(shape, call.compute)
    fill(&p.lse, lse, lead, lead, lead + 1, -1)
    return lse


cdef int fill_call(mha_params *p, call) except -1:
    """Describe all of a validated call (`_validate.Call`) but its results; gives the number of leading axes."""
    cdef cnp.ndarray query = call.query, key = call.key, value = call.value
    cdef int lead = cnp.PyArray_NDIM(query) - 3
    leave_out(p)
    fill_sizes(p, query, key, value, lead, lead, lead + 1)
    fill_options(p, call, call, lead)
    if call.mask is not None:
        fill(&p.mask, call.mask, lead, lead, lead + 1, lead + 2)
    if call.lengths is not None:
        fill(&p.lengths, call.lengths, lead, -1, lead, -1)
    fill(&p.offset, call.offset, lead, -1, -1, -1)
    return lead


def attend(call):
    """The result of a validated call (`_validate.Call`)."""
    cdef mha_params p
    cdef cnp.ndarray out, weights, chosen
    cdef int lead = fill_call(&p, call)
    result = np.empty(call.shape, call.dtype) if call.out_object is None else call.out_object
    out = call.out if call.out_object is not None else _validate.heads_first(result, call.layout)
    fill(&p.out, out, lead, lead, lead + 1, lead + 2)
    results = [result]
    rows = call.query.shape[:-1]
    lse = open_lse(&p, call, rows)
    if call.return_lse:
        results.append(lse if call.num_head_axes else lse[0])
    if call.return_weights:
        # the core writes only the weights of visible keys
        if call.weights_rows is not None:
            # contiguous already, except where another axis had broadcast it
            chosen = np.ascontiguousarray(call.weights_rows)
            p.weight_rows = <const int64_t *> cnp.PyArray_DATA(chosen)
            p.num_weight_rows = cnp.PyArray_SIZE(chosen)
            rows = (*rows[:-1], p.num_weight_rows)
        weights = np.zeros((*rows, p.kv_len), call.compute)
        fill(&p.weights, weights, lead, lead, lead + 1, -1)
        results.append(weights if call.num_head_axes else weights[0])
    run(&p)
    return tuple(results) if len(results) > 1 else result


def plan_of(query, key, value, **options):
    """How the core cuts this call of `scaled_dot_product_attention`, a mha_task_plan as a dict; nothing is computed."""
    cdef mha_params p
    cdef mha_task_plan plan
    call = _validate.attention_call_of(query, key, value, **options)
    cdef int lead = fill_call(&p, call)
    # where the result goes does not matter, only what it is
    result = np.empty((1,) * (lead + 3), call.dtype)
    fill(&p.out, result, lead, lead, lead + 1, lead + 2)
    check(mha_plan_of(&p, &plan))
    return plan


# ---- packed sequences and caches

def attend_varlen(call):
    """The result of a validated call of packed sequences (`_validate_sequences.VarlenCall`)."""
    cdef mha_params p
    cdef cnp.ndarray query = call.query, key = call.key, value = call.value, out
    cdef cnp.ndarray q_starts = call.q_starts, k_starts = call.k_starts
    cdef cnp.ndarray q_lens = np.diff(q_starts), k_lens = np.diff(k_starts), offset = k_lens - q_lens
    cdef int64_t batch = cnp.PyArray_DIM(offset, 0)
    leave_out(&p)
    fill_sizes(&p, query, key, value, 0, 0, 1)
    # the entries are a leading dimension that the arrays do not have
    p.lead_ndim = 1
    p.lead_shape[0] = batch
    p.query.lead[0] = p.key.lead[0] = p.value.lead[0] = p.out.lead[0] = p.lse.lead[0] = 0
    p.q_starts = <const int64_t *> cnp.PyArray_DATA(q_starts)
    p.k_starts = <const int64_t *> cnp.PyArray_DATA(k_starts)
    p.q_len = q_lens.max(initial=0)
    p.kv_len = k_lens.max(initial=0)
    fill(&p.offset, offset, 1, -1, -1, -1)
    fill_options(&p, call, call.options, 1)
    result = np.empty(call.shape, call.dtype) if call.out is None else call.out_object
    out = call.out if call.out is not None else _validate.heads_first(result, "blhd")
    fill(&p.out, out, 0, 0, 1, 2)
    lse = open_lse(&p, call, call.query.shape[:2])
    run(&p)
    return (result, lse) if call.return_lse else result


def attend_cache(call, query_rows, write):
    """The result of a validated call on a cache (`_validate_sequences.CacheCall`).

    query_rows: the call's query, rotated where it has to be. write: puts the new tokens into the cache; it is called
    once results and workspace have their memory, so that running out of it leaves the cache as it was.
    """
    cdef mha_params p
    cdef cnp.ndarray memory
    cdef cnp.ndarray query = query_rows, key = call.state.k_cache, value = call.state.v_cache, out, table
    cdef cnp.ndarray totals = call.state.totals, offset = totals - query_rows.shape[2]
    leave_out(&p)
    fill_sizes(&p, query, key, value, 1, 1, 2)
    if call.state.block_table is not None:
        table = call.state.block_table
        p.pages = <const int64_t *> cnp.PyArray_DATA(table)
        p.pages_row = cnp.PyArray_DIM(table, 1)
        p.page_len = p.kv_len
    if call.state.k_scale is not None:
        fill(&p.key_scale, call.state.k_scale, 1, 1, 2, -1)
        fill(&p.value_scale, call.state.v_scale, 1, 1, 2, -1)
    p.kv_len = totals.max(initial=0)
    fill(&p.lengths, totals, 1, -1, -1, -1)
    fill(&p.offset, offset, 1, -1, -1, -1)
    fill_options(&p, call, call.options, 1)
    out = np.empty(call.shape, call.dtype) if call.out is None else call.out
    fill(&p.out, out, 1, 1, 2, 3)
    lse = open_lse(&p, call, call.shape[:3])
    memory = workspace_of(mha_workspace_bytes(&p))
    write()
    run_in(&p, memory, mha_estimated_ns(&p) < RELEASE_GIL_NS)
    result = out if call.out is None else call.out_object
    return (result, lse) if call.return_lse else result


# ---- the common case, recognised by exact tests that raise nothing

cdef inline int number_of(mha_dtype compute) noexcept:
    return cnp.NPY_FLOAT32 if compute == MHA_F32 else cnp.NPY_FLOAT64


cdef inline bint is_plain(object x, int num, int ndim) noexcept:
    """An ndarray (no subclass) of this dtype, native, aligned, with this many dimensions."""
    return (
        cnp.PyArray_CheckExact(x)
        and cnp.PyArray_TYPE(<cnp.ndarray> x) == num
        and cnp.PyArray_NDIM(<cnp.ndarray> x) == ndim
        and cnp.PyArray_ISBEHAVED_RO(<cnp.ndarray> x)
    )


cdef bint plain_mask(mha_array *a, object mask, mha_params *p) noexcept:
    """Describe a mask that broadcasts to (*lead, heads, q_len, kv_len); False where it is not a plain one."""
    cdef cnp.ndarray array
    cdef int d, axis, ndim, lead = <int> p.lead_ndim
    cdef int64_t wanted, size, stride
    if not cnp.PyArray_CheckExact(mask):
        return False
    array = mask
    ndim = cnp.PyArray_NDIM(array)
    if not (is_plain(mask, cnp.NPY_BOOL, ndim) or is_plain(mask, number_of(p.dtype), ndim)):
        return False
    if ndim < 1 or ndim > lead + 3:
        return False
    a.data = <char *> cnp.PyArray_DATA(array)
    a.dtype = dtype_of(array)
    for d in range(lead + 3):
        axis = d - (lead + 3 - ndim)
        size = cnp.PyArray_DIM(array, axis) if axis >= 0 else 1
        stride = cnp.PyArray_STRIDE(array, axis) >> item_shift(array) if size != 1 else 0
        if d < lead:
            wanted = p.lead_shape[d]
            a.lead[d] = stride
        elif d == lead:
            wanted = p.num_heads
            a.head = stride
        elif d == lead + 1:
            wanted = p.q_len
            a.row = stride
        else:
            wanted = p.kv_len
            a.col = stride
        if size != wanted and size != 1:
            return False
    return True


cdef bint plain_lengths(mha_array *a, object lengths, mha_params *p) noexcept:
    """Describe int64 lengths of shape lead or lead + (q_len,); False where they are not plain ones."""
    cdef cnp.ndarray array
    cdef int d, ndim, lead = <int> p.lead_ndim
    if not cnp.PyArray_CheckExact(lengths):
        return False
    array = lengths
    ndim = cnp.PyArray_NDIM(array)
    if ndim < lead or ndim > lead + 1 or not is_plain(lengths, cnp.NPY_INT64, ndim):
        return False
    for d in range(lead):
        if cnp.PyArray_DIM(array, d) != p.lead_shape[d]:
            return False
    if ndim == lead + 1 and cnp.PyArray_DIM(array, lead) != p.q_len:
        return False
    fill(a, array, lead, -1, lead if ndim == lead + 1 else -1, -1)
    return True


cdef bint plain_inputs(
    mha_params *p, object query, object key, object value, object layout, object enable_gqa
) noexcept:
    """Describe three plain arrays of one dtype whose shapes fit without broadcasting, head axis included."""
    cdef int num, ndim, d, head, row
    cdef cnp.npy_intp *q
    cdef cnp.npy_intp *k
    cdef cnp.npy_intp *v
    if not cnp.PyArray_CheckExact(query):
        return False
    num = cnp.PyArray_TYPE(<cnp.ndarray> query)
    ndim = cnp.PyArray_NDIM(<cnp.ndarray> query)
    if ndim < 3 or not (
        num == cnp.NPY_FLOAT32 or num == cnp.NPY_FLOAT64 or num == cnp.NPY_FLOAT16 or is_bfloat16(<cnp.ndarray> query)
    ):
        return False
    if not (is_plain(query, num, ndim) and is_plain(key, num, ndim) and is_plain(value, num, ndim)):
        return False
    if layout is not BHLD and layout is not BLHD:
        return False
    head, row = (ndim - 3, ndim - 2) if layout is BHLD else (ndim - 2, ndim - 3)
    q = cnp.PyArray_DIMS(<cnp.ndarray> query)
    k = cnp.PyArray_DIMS(<cnp.ndarray> key)
    v = cnp.PyArray_DIMS(<cnp.ndarray> value)
    for d in range(ndim - 3):
        if q[d] != k[d] or q[d] != v[d]:
            return False
    if k[row] != v[row] or k[head] != v[head] or q[ndim - 1] != k[ndim - 1]:
        return False
    if q[head] != k[head] and not (enable_gqa is True and k[head] > 0 and q[head] % k[head] == 0):
        return False
    if q[ndim - 1] == 0:
        return False  # the default scale would divide by it
    fill_sizes(p, query, key, value, ndim - 3, head, row)
    p.dtype = MHA_F64 if num == cnp.NPY_FLOAT64 else MHA_F32
    return True


cdef str BHLD = "bhld"
cdef str BLHD = "blhd"
cdef int64_t ZERO = 0
cdef tuple ALL_KEYS = (-1, -1)


cdef void extent(cnp.ndarray array, char **low, char **high) noexcept:
    """The lowest address of an array's elements, and the one behind the highest."""
    cdef cnp.npy_intp reach
    cdef int d
    low[0] = <char *> cnp.PyArray_DATA(array)
    high[0] = low[0] + cnp.PyArray_ITEMSIZE(array)
    for d in range(cnp.PyArray_NDIM(array)):
        reach = (cnp.PyArray_DIM(array, d) - 1) * cnp.PyArray_STRIDE(array, d)
        if reach < 0:
            low[0] += reach
        else:
            high[0] += reach


cdef bint plain_out(mha_params *p, object out, cnp.ndarray query, tuple inputs) noexcept:
    """A contiguous result array of the right shape that lies apart from all inputs."""
    cdef cnp.ndarray array, other
    cdef char *low
    cdef char *high
    cdef char *other_low
    cdef char *other_high
    cdef int d, ndim = cnp.PyArray_NDIM(query)
    if not is_plain(out, cnp.PyArray_TYPE(query), ndim):
        return False
    array = out
    if not (cnp.PyArray_ISWRITEABLE(array) and cnp.PyArray_IS_C_CONTIGUOUS(array)):
        return False
    for d in range(ndim - 1):
        if cnp.PyArray_DIM(array, d) != cnp.PyArray_DIM(query, d):
            return False
    if cnp.PyArray_DIM(array, ndim - 1) != p.value_dim:
        return False
    extent(array, &low, &high)
    for x in inputs:
        if x is None:
            continue
        if not cnp.PyArray_CheckExact(x):
            return False
        other = x
        extent(other, &other_low, &other_high)
        if other_low < high and low < other_high:
            return False
    return True


cdef bint plain_position(mha_params *p, object is_causal, object q_offset, object valid_lens, int64_t *offset) noexcept:
    """The causal rule where it is one offset for all batch entries."""
    cdef int d
    offset[0] = 0
    p.causal = is_causal is not False
    if type(q_offset) is int:
        if not (is_causal is False or is_causal is True) or not -(1 << 40) < q_offset < 1 << 40:
            return False
        offset[0] = q_offset
    elif q_offset is not None:
        return False
    elif is_causal is True:
        if p.q_len < p.kv_len:
            return False  # the validator warns
    elif is_causal is not False:
        if type(is_causal) is not str or valid_lens is not None:
            return False
        if is_causal == "lower_right":
            offset[0] = p.kv_len - p.q_len
        elif is_causal != "upper_left":
            return False
    p.offset.data = <char *> offset
    p.offset.dtype = MHA_I64
    for d in range(<int> p.lead_ndim):
        p.offset.lead[d] = 0
    return True


cdef bint plain_numbers(mha_array *a, object numbers, mha_params *p, double lowest) noexcept:
    """Describe a number of the compute dtype for each head, from `lowest` to below infinity; False where not so."""
    cdef int num = number_of(p.dtype)
    cdef cnp.ndarray array
    cdef double number
    cdef int64_t h
    if not is_plain(numbers, num, 1):
        return False
    array = numbers
    if cnp.PyArray_DIM(array, 0) != p.num_heads:
        return False
    for h in range(p.num_heads):
        number = (<float *> cnp.PyArray_GETPTR1(array, h))[0] if num == cnp.NPY_FLOAT32 else (
            <double *> cnp.PyArray_GETPTR1(array, h)
        )[0]
        if not lowest <= number < INFINITY:  # NaN neither
            return False
    fill_per_head(a, array, <int> p.lead_ndim)
    return True


cdef bint plain_scores(
    mha_params *p, object window_size, object softcap, object alibi_slopes, object sinks
) noexcept:
    """What changes or hides scores, where it is of the types that the names promise."""
    cdef object left, right
    if type(softcap) is not float or not (<double> softcap == 0.0 or 1e-30 < <double> softcap < 1e30):
        return False
    p.softcap = <double> softcap
    if window_size is not ALL_KEYS:
        if type(window_size) is not tuple or len(<tuple> window_size) != 2:
            return False
        left, right = <tuple> window_size
        if type(left) is not int or type(right) is not int:
            return False
        if not (-1 <= left < 1 << 40 and -1 <= right < 1 << 40):
            return False
        p.window_left, p.window_right = left, right
    if alibi_slopes is not None and not plain_numbers(&p.slopes, alibi_slopes, p, -DBL_MAX):
        return False
    return sinks is None or plain_numbers(&p.sinks, sinks, p, -INFINITY)


cdef object attend_plain(mha_params *p, cnp.ndarray query, object layout, object out, bint return_lse):
    """The result of the common case; all but the results is filled in."""
    cdef int ndim = cnp.PyArray_NDIM(query), lead = ndim - 3, num = cnp.PyArray_TYPE(query), d
    cdef int head = lead if layout is BHLD else lead + 1, row = lead + 1 if layout is BHLD else lead
    cdef cnp.npy_intp shape[MHA_MAX_LEAD + 3]
    cdef cnp.ndarray result, lse
    for d in range(ndim - 1):
        shape[d] = cnp.PyArray_DIM(query, d)
    shape[ndim - 1] = p.value_dim
    result = cnp.PyArray_EMPTY(ndim, shape, num, 0) if out is None else out
    fill(&p.out, result, lead, head, row, ndim - 1)
    if not return_lse:
        run(p)
        return result
    shape[lead] = p.num_heads
    shape[lead + 1] = p.q_len
    lse = cnp.PyArray_EMPTY(ndim - 1, shape, number_of(p.dtype), 0)
    fill(&p.lse, lse, lead, lead, lead + 1, -1)
    run(p)
    return result, lse


def scaled_dot_product_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
    enable_gqa=False,
    valid_lens=None,
    q_offset=None,
    window_size=ALL_KEYS,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    layout="bhld",
    return_lse=False,
    return_weights=False,
    weights_rows=None,
    out=None,
    num_threads=None,
):
    cdef mha_params p
    cdef int64_t offset
    if (
        return_weights is False
        and weights_rows is None
        and (return_lse is False or return_lse is True)
        and type(dropout_p) is float
        and <double> dropout_p == 0.0
        and (num_threads is None or (type(num_threads) is int and 0 < num_threads <= MAX_THREADS))
        and (enable_gqa is False or enable_gqa is True)
        and (scale is None or (type(scale) is float and -1e30 < <double> scale < 1e30))
        and plain_inputs(&p, query, key, value, layout, enable_gqa)
    ):
        leave_out(&p)
        if (
            plain_position(&p, is_causal, q_offset, valid_lens, &offset)
            and (attn_mask is None or plain_mask(&p.mask, attn_mask, &p))
            and (valid_lens is None or plain_lengths(&p.lengths, valid_lens, &p))
            and plain_scores(&p, window_size, softcap, alibi_slopes, sinks)
            and (
                out is None
                or plain_out(&p, out, query, (query, key, value, attn_mask, valid_lens, alibi_slopes, sinks))
            )
        ):
            p.scale = 1.0 / sqrt(<double> p.head_dim) if scale is None else <double> scale
            p.num_threads = resolve_threads(num_threads)
            return attend_plain(&p, query, layout, out, return_lse is True)
    return attend(
        _validate.attention_call(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            valid_lens=valid_lens,
            q_offset=q_offset,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            layout=layout,
            return_lse=return_lse,
            return_weights=return_weights,
            weights_rows=weights_rows,
            out=out,
            num_threads=num_threads,
        )
    )


# ---- layers

cdef void fill_linear(mha_linear *linear, cnp.ndarray x, cnp.ndarray weight, cnp.ndarray bias) noexcept:
    """Describe x (batch, len, depth), weight (depth, cols) and a contiguous bias (cols,)."""
    fill(&linear.x, x, 1, -1, 1, 2)
    fill(&linear.weight, weight, 0, -1, 0, 1)
    linear.bias = <const char *> cnp.PyArray_DATA(bias)
    linear.len = cnp.PyArray_DIM(x, 1)
    linear.depth = cnp.PyArray_DIM(weight, 0)
    linear.cols = cnp.PyArray_DIM(weight, 1)


cdef void fill_layer_sizes(mha_layer *layer, int num, int num_heads, int num_kv_heads) except *:
    """The attention inside a layer whose maps are filled in, before masks."""
    cdef mha_params *p = &layer.attention
    leave_out(p)
    p.isa = <mha_isa> <int> config["level"]
    p.dtype = MHA_F32 if num == cnp.NPY_FLOAT32 else MHA_F64
    p.lead_ndim = 1
    p.num_heads = num_heads
    p.num_kv_heads = num_kv_heads
    p.q_len = layer.query.len
    p.kv_len = layer.key.len
    p.head_dim = layer.query.cols // num_heads
    p.value_dim = p.head_dim
    p.scale = 1.0 / sqrt(<double> p.head_dim)
    p.causal = 0
    p.offset.data = <char *> &ZERO
    p.offset.dtype = MHA_I64
    p.offset.lead[0] = 0
    p.num_threads = resolve_threads(None)


def attend_layer(call, attention):
    """The result of a validated call of a layer (`_validate.LayerCall`, and the `Call` of its attention)."""
    cdef mha_layer layer
    cdef mha_params *p = &layer.attention
    cdef cnp.ndarray out, weights
    biases = [np.ascontiguousarray(b) for b in (call.b_q, call.b_k, call.b_v, call.b_o)]
    fill_linear(&layer.query, call.queries, call.W_q, biases[0])
    fill_linear(&layer.key, call.keys, call.W_k, biases[1])
    fill_linear(&layer.value, call.values, call.W_v, biases[2])
    fill_linear(&layer.output, call.queries, call.W_o, biases[3])
    fill_layer_sizes(&layer, np.dtype(call.dtype).num, call.num_heads, call.num_kv_heads)
    p.lead_shape[0] = call.shape[0]
    p.causal = attention.causal
    if attention.mask is not None:
        fill(&p.mask, attention.mask, 1, 1, 2, 3)
    if attention.lengths is not None:
        fill(&p.lengths, attention.lengths, 1, -1, 1, -1)
    fill(&p.offset, attention.offset, 1, -1, -1, -1)
    if call.need_weights:
        weights = np.zeros((call.shape[0], call.num_heads, call.shape[1], call.keys.shape[1]), call.dtype)
        fill(&p.weights, weights, 1, 1, 2, -1)
    # the core writes rows of adjacent columns
    in_place = call.out is not None and call.out.strides[2] == call.out.itemsize
    out = call.out if in_place else np.empty(call.shape, call.dtype)
    fill(&layer.out, out, 1, -1, 1, 2)
    run_layer(&layer)
    if call.out is not None and not in_place:
        call.out[...] = out
    result = out if call.out is None else call.out_object
    return (result, weights) if call.need_weights else result


cdef bint plain_linear(mha_linear *linear, object x, object weight, object bias, int num) noexcept:
    """Describe a map whose arrays are plain, of one dtype, and fit each other."""
    cdef cnp.npy_intp cols
    if not (is_plain(x, num, 3) and is_plain(weight, num, 2) and is_plain(bias, num, 1)):
        return False
    cols = cnp.PyArray_DIM(<cnp.ndarray> weight, 1)
    if cnp.PyArray_DIM(<cnp.ndarray> x, 2) != cnp.PyArray_DIM(<cnp.ndarray> weight, 0):
        return False
    if cnp.PyArray_DIM(<cnp.ndarray> bias, 0) != cols or not cnp.PyArray_IS_C_CONTIGUOUS(<cnp.ndarray> bias):
        return False
    fill_linear(linear, x, weight, bias)
    return True


cdef bint plain_layer(
    mha_layer *layer, object module, object queries, object keys, object values, tuple weights
) except *:
    """Describe a call of a layer with plain arrays that fit; False where the validator has to look."""
    cdef int num
    cdef int64_t batch
    W_q, W_k, W_v, W_o, b_q, b_k, b_v, b_o = weights
    num_hiddens, num_heads, num_kv_heads = module.num_hiddens, module.num_heads, module.num_kv_heads
    if not (type(num_hiddens) is int and type(num_heads) is int and type(num_kv_heads) is int):
        return False
    if not (0 < num_kv_heads <= num_heads <= num_hiddens < 1 << 30):
        return False
    if num_hiddens % num_heads or num_heads % num_kv_heads:
        return False
    if not cnp.PyArray_CheckExact(queries):
        return False
    num = cnp.PyArray_TYPE(<cnp.ndarray> queries)
    if num != cnp.NPY_FLOAT32 and num != cnp.NPY_FLOAT64:
        return False
    if not (
        plain_linear(&layer.query, queries, W_q, b_q, num)
        and plain_linear(&layer.key, keys, W_k, b_k, num)
        and plain_linear(&layer.value, values, W_v, b_v, num)
        and is_plain(W_o, num, 2)
        and is_plain(b_o, num, 1)
        and cnp.PyArray_IS_C_CONTIGUOUS(<cnp.ndarray> b_o)
        and cnp.PyArray_DIM(<cnp.ndarray> b_o, 0) == num_hiddens
    ):
        return False
    fill_linear(&layer.output, queries, W_o, b_o)
    batch = cnp.PyArray_DIM(<cnp.ndarray> queries, 0)
    if batch != cnp.PyArray_DIM(<cnp.ndarray> keys, 0) or batch != cnp.PyArray_DIM(<cnp.ndarray> values, 0):
        return False
    if layer.key.len != layer.value.len or layer.query.cols != num_hiddens:
        return False
    if layer.output.depth != num_hiddens or layer.output.cols != num_hiddens:
        return False
    if layer.key.cols != num_hiddens // num_heads * num_kv_heads or layer.value.cols != layer.key.cols:
        return False
    fill_layer_sizes(layer, num, num_heads, num_kv_heads)
    layer.attention.lead_shape[0] = batch
    return True


def layer_forward(module, queries, keys, values, valid_lens, attn_mask, is_causal, need_weights, out):
    """The result of a layer, as (result, weights) if need_weights is true."""
    cdef mha_layer layer
    cdef mha_params *p = &layer.attention
    cdef cnp.npy_intp shape[3]
    cdef cnp.ndarray result
    # Held for the whole call: an attribute may be reassigned meanwhile, or be made anew at each access.
    weights = (module.W_q, module.W_k, module.W_v, module.W_o, module.b_q, module.b_k, module.b_v, module.b_o)
    if (
        out is None
        and need_weights is False
        and (is_causal is False or is_causal is True)
        and plain_layer(&layer, module, queries, keys, values, weights)
        and (is_causal is False or p.q_len >= p.kv_len)
        and (attn_mask is None or plain_mask(&p.mask, attn_mask, p))
        and (valid_lens is None or plain_lengths(&p.lengths, valid_lens, p))
    ):
        p.causal = is_causal is True
        shape[0], shape[1], shape[2] = p.lead_shape[0], p.q_len, layer.output.cols
        result = cnp.PyArray_EMPTY(3, shape, cnp.PyArray_TYPE(<cnp.ndarray> queries), 0)
        fill(&layer.out, result, 1, -1, 1, 2)
        run_layer(&layer)
        return result
    call = _validate.layer_call(module, queries, keys, values, valid_lens, attn_mask, need_weights, out)
    return attend_layer(call, _validate.layer_attention(call, valid_lens, attn_mask, is_causal))


# ---- what the build and the machine offer

def levels():
    """The levels by name: (number, usable here), for those that this build holds, in ascending preference."""
    return {
        mha_isa_name(<mha_isa> isa).decode(): (isa, bool(mha_isa_usable(<mha_isa> isa)))
        for isa in range(MHA_ISA_COUNT)
        if mha_isa_built(<mha_isa> isa)
    }


def build_info():
    """Facts of the build: compiler, OpenMP version (0 without), and the sizes that the arithmetic depends on."""
    return {
        "compiler": mha_compiler().decode(),
        "openmp": mha_openmp_version(),
        "few_rows": mha_few_rows(),
        "key_block": mha_key_block(),
        "key_split": mha_key_split(),
    }


def openmp_cpus():
    """CPUs of the process as OpenMP counts them, though it may have bound this thread to one; 1 without OpenMP."""
    return mha_openmp_num_procs()


def tiles(int level):
    """The tile sizes of a level for each compute dtype."""
    cdef mha_tiles t
    result = {}
    for name, dtype in (("float32", MHA_F32), ("float64", MHA_F64)):
        t = mha_isa_tiles(<mha_isa> level, dtype)
        result[name] = {
            "lanes": t.lanes,
            "panel": t.panel,
            "key_tile": t.key_tile,
            "row_tile": t.row_tile,
            "col_tile": t.col_tile,
        }
    return result


def pause_threads():
    """End the OpenMP workers of the calling thread, so that it may fork; the next call starts new ones."""
    mha_pause_threads()


def exp2(cnp.ndarray x, int level):
    """2**x by the vector exponential of a level, for tests: x is C-contiguous float32 or float64, x <= 0 or NaN."""
    result = np.empty_like(x)
    mha_exp2(<mha_isa> level, dtype_of(x), cnp.PyArray_DATA(x), cnp.PyArray_DATA(<cnp.ndarray> result), x.size)
    return result


def tanh(cnp.ndarray x, int level):
    """The hyperbolic tangent of a level, for tests: x is C-contiguous float32 or float64."""
    result = np.empty_like(x)
    mha_tanh(<mha_isa> level, dtype_of(x), cnp.PyArray_DATA(x), cnp.PyArray_DATA(<cnp.ndarray> result), x.size)
    return result
