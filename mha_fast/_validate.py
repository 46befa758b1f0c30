"""Every rule about arguments: types, dtypes, shapes, broadcasting, and the errors.

Both implementations call these functions and nothing else checks what a user passes, so both
raise the same exception with the same text. A wrong type or dtype is a TypeError, a wrong shape
or value a ValueError; the text names the argument, what came, and what was expected. Nothing of
the caller's is changed, and no array values are looked at except lengths, offsets, slopes, sinks
and row numbers.

Words: `lead` is the shape before the head axis, H and Hkv are the query and key/value heads,
L the queries, S the keys, E the width of a query and a key, Ev that of a value.
"""

import collections.abc
import math
import numbers
import operator
import sys
import warnings
from typing import Any, NamedTuple

import numpy as np

_PACKAGE = __name__.partition(".")[0]
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_SUPPORTED = "float16, bfloat16, float32 and float64 are supported, bool and integers become float64"
_SUPPORTED_BY_LAYERS = "layers support float32 and float64, bool and integers become float64"
_LAYOUTS = ("bhld", "blhd")
_ALIGNMENTS = ("upper_left", "lower_right")

# More threads than any machine has cores only cost; and where the system refuses to start one, the OpenMP runtime ends
# the process.
MAX_THREADS = 1024
# Offsets and windows beyond this see all keys or none. i + offset and its distance to a key then stay inside int64.
_MAX_OFFSET = 2**62
# Candidates that the exact overlap test may try; views that one array's slicing and transposing
# gives are decided within a few dozen.
_OVERLAP_WORK = 10_000

_CAUSAL_WARNING = (
    "is_causal=True with more keys than queries: query i sees keys 0 to i (the upper-left corner), "
    'which is seldom meant. Say is_causal="lower_right" where the last query sees the last key, '
    "q_offset= where the position of the first query is known, or "
    'is_causal="upper_left" to keep this meaning without the warning.'
)


class Call(NamedTuple):
    """One attention call after every check; no field needs another one.

    The arrays are heads first whatever the caller's layout, 2-D inputs have a head axis of size
    1, leading axes are broadcast views. Inputs keep their storage dtype: float16, bfloat16, float32
    or float64, native and aligned.

    Query i stands at position i + offset among the keys; causality, window and slopes count from
    there. Compare distances, i + offset - j: a position plus a window may leave int64.
    """

    query: np.ndarray  # (*lead, H, L, E)
    key: np.ndarray  # (*lead, Hkv, S, E)
    value: np.ndarray  # (*lead, Hkv, S, Ev)
    mask: np.ndarray | None  # (*lead, H, L, S) bool, float32 or float64
    lengths: np.ndarray | None  # (*lead, L) int64 in 0..S: key j is visible iff j < length
    causal: bool
    offset: np.ndarray  # (*lead,) int64: if causal, query i sees key j iff j <= i + offset
    scale: float
    dtype: np.dtype  # of the result
    shape: tuple[int, ...]  # of the result, as the caller sees it
    out: np.ndarray | None  # (*lead, H, L, Ev), a view of out_object
    out_object: Any  # the very object to return, or None
    num_head_axes: int  # 0 if the results have no head axis
    layout: str
    return_lse: bool
    return_weights: bool
    num_threads: int | None
    window: tuple[int, int]  # (left, right), -1 = no limit: -right <= i + offset - j <= left
    softcap: float  # 0 = none, else normal in `compute`
    slopes: np.ndarray | None  # (*lead, H) in `compute`, finite: adds -slope * |i + offset - j|
    sinks: np.ndarray | None  # (H,) in `compute`, finite or -inf
    weights_rows: np.ndarray | None  # (R,) int64 in 0..L-1: the queries whose weights are returned, None = all
    compute: np.dtype  # of the computation, of log-sum-exp and weights: float32 or float64


class LayerCall(NamedTuple):
    """One call of a MultiHeadAttention layer after every check but those of the masks."""

    queries: np.ndarray  # (batch, L, width of W_q)
    keys: np.ndarray  # (batch, S, width of W_k)
    values: np.ndarray  # (batch, S, width of W_v)
    W_q: np.ndarray  # (width of queries, num_heads * depth)
    W_k: np.ndarray  # (width of keys, num_kv_heads * depth)
    W_v: np.ndarray  # (width of values, num_kv_heads * depth)
    W_o: np.ndarray  # (num_heads * depth, num_hiddens)
    b_q: np.ndarray  # biases are already in `dtype`
    b_k: np.ndarray
    b_v: np.ndarray
    b_o: np.ndarray
    num_heads: int
    num_kv_heads: int
    depth: int
    dtype: np.dtype
    shape: tuple[int, int, int]  # (batch, L, num_hiddens)
    out: np.ndarray | None
    out_object: Any
    need_weights: bool


class FFNCall(NamedTuple):
    """One call of a PositionWiseFFN after every check."""

    X: np.ndarray  # (..., width)
    W_1: np.ndarray  # (width, hidden)
    b_1: np.ndarray  # (hidden,), already in `dtype`
    W_2: np.ndarray  # (hidden, result width)
    b_2: np.ndarray
    dtype: np.dtype


# ---------------------------------------------------------------- single values


def _show(value):
    """The value as an error text quotes it: one short line, whatever it is."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a repr may fail: integers of more than 4300 digits do
        text = f"of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def flag(value, name):
    """The value as a bool; numbers are refused, 1 is more often a misplaced argument."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {_show(value)}; expected True or False")
    return bool(value)


def positive_integer(value, name):
    """The value as an int of at least 1."""
    return _integer(value, name, 1)


def _integer(value, name, least):
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {_show(value)}; expected an integer")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {_show(value)}; expected an integer") from None
    if number < least:
        raise ValueError(f"{name} is {_show(number)}; expected at least {least}")
    return number


def thread_count(value, name):
    """A number of threads as an int, or None as None (the default applies)."""
    if value is None:
        return None
    number = positive_integer(value, name)
    if number > MAX_THREADS:
        raise ValueError(f"{name} is {_show(number)}; expected at most {MAX_THREADS}")
    return number


def slope_count(num_heads):
    """A number of heads for `alibi_slopes` as an int."""
    number = positive_integer(num_heads, "num_heads")
    _check_size((number,), _FLOAT64.itemsize, "alibi_slopes")
    return number


def _finite_number(value, name):
    """The value as a finite float; takes Python and NumPy numbers and 0-d arrays."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {_show(value)}; expected a real number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {_show(value)}; expected a finite number")
    return number


def _no_dropout(dropout_p):
    if _finite_number(dropout_p, "dropout_p") != 0:
        raise ValueError(f"dropout_p is {_show(dropout_p)}; expected 0, for nothing is ever dropped")


def dropout_rate(value):
    """A layer's dropout as a float in [0, 1)."""
    rate = _finite_number(value, "dropout")
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout is {_show(value)}; expected 0 <= dropout < 1")
    return rate


def _choice(value, name, choices):
    listed = " or ".join(f'"{choice}"' for choice in choices)
    if not isinstance(value, str):
        raise TypeError(f"{name} is {_show(value)}; expected {listed}")
    if value not in choices:
        raise ValueError(f"{name} is {_show(value)}; expected {listed}")
    return str(value)


def _causal_alignment(is_causal, q_offset):
    """False, True, "upper_left" or "lower_right"."""
    if isinstance(is_causal, (bool, np.bool_)):
        return bool(is_causal)
    if not isinstance(is_causal, str) or is_causal not in _ALIGNMENTS:
        kind = ValueError if isinstance(is_causal, str) else TypeError
        raise kind(f'is_causal is {_show(is_causal)}; expected True, False, "upper_left" or "lower_right"')
    if q_offset is not None:
        raise ValueError(f'is_causal="{is_causal}" gives the offset; expected no q_offset beside it')
    return str(is_causal)


def _window(window_size):
    """(left, right) as ints; one that is too large for any key to lie outside is clipped."""
    vector = isinstance(window_size, np.ndarray) and window_size.ndim == 1
    if not isinstance(window_size, (tuple, list)) and not vector:
        raise TypeError(
            f"window_size is {_show(window_size)}; expected a pair (left, right): how many keys before and behind its "
            "own position a query sees, -1 for no limit"
        )
    if len(window_size) != 2:
        raise ValueError(f"window_size is {_show(window_size)}; expected two integers: (left, right)")
    left, right = (
        min(_integer(size, f"window_size[{side}]", -1), _MAX_OFFSET) for side, size in enumerate(window_size)
    )
    return left, right


def layer_dtype(dtype):
    """The dtype of a layer's weights: float32 or float64, None means float64."""
    if dtype is None:
        return _FLOAT64
    try:
        found = np.dtype(dtype)
    except Exception:  # numpy.dtype parses strings and may raise SyntaxError too
        raise TypeError(f"dtype is {_show(dtype)}; expected float32 or float64") from None
    if found.type not in (np.float32, np.float64):
        raise TypeError(f"dtype is {found}; expected float32 or float64")
    return np.dtype(found.type)


def generator(rng):
    """A numpy Generator from an int or a Generator; None stays None (numpy.random.rand)."""
    if rng is None or isinstance(rng, np.random.Generator):
        return rng
    if isinstance(rng, (bool, np.bool_)) or not isinstance(rng, numbers.Integral):
        raise TypeError(f"rng is {_show(rng)}; expected None, an int or a numpy.random.Generator")
    if rng < 0:
        raise ValueError(f"rng is {_show(rng)}; expected a seed of at least 0")
    return np.random.default_rng(int(rng))


# ---------------------------------------------------------------- single arrays


def as_array(value, name):
    """The value as a plain ndarray, without a copy where it is one in memory.

    Takes ndarrays and subclasses, nested sequences, `__array__`, buffers, and CPU objects that
    only have `__dlpack__`.
    """
    masked = isinstance(value, np.ma.MaskedArray) and value.dtype.names is None
    if masked and np.any(np.ma.getmaskarray(value)):
        raise ValueError(
            f"{name} is a masked array with masked entries; fill them, and hide keys with attn_mask or valid_lens"
        )
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            return np.from_dlpack(value)
        return np.asarray(value)
    except MemoryError:
        raise
    except ValueError as error:
        raise ValueError(f"{name} cannot be converted to an array: {error}") from error
    except Exception as error:  # a foreign __array__ or __dlpack__ raises what it likes
        raise TypeError(f"{name} cannot be converted to an array: {error}") from error


def _is_half(dtype):
    """True for float16 and for bfloat16, which is told by its name: it is ml_dtypes' and that is optional."""
    return dtype.type is np.float16 or dtype.name == "bfloat16"


def compute_dtype(dtype):
    """float64 for float64, else float32: 16-bit numbers are stored, not computed with."""
    return _FLOAT64 if dtype == _FLOAT64 else _FLOAT32


def _storage_dtype(dtype, name, half=True):
    """The dtype in which an array of this dtype is read; `half` allows float16 and bfloat16."""
    if dtype.type in (np.float32, np.float64) or (half and _is_half(dtype)):
        return np.dtype(dtype.type)
    if dtype.kind in "biu":
        return _FLOAT64
    raise TypeError(f"{name} has dtype {dtype}; {_SUPPORTED if half else _SUPPORTED_BY_LAYERS}")


def _result_dtype(named):
    """The dtype of the result of these arrays: theirs if they share one, else the next that holds all."""
    integers = [(name, array.dtype) for name, array in named if array.dtype.kind in "biu"]
    bfloat16 = [(name, array.dtype) for name, array in named if array.dtype.name == "bfloat16"]
    if integers and bfloat16:
        raise TypeError(
            "{} has dtype {} and {} has dtype {}; expected floating numbers beside bfloat16".format(
                *integers[0], *bfloat16[0]
            )
        )
    dtypes = {_storage_dtype(array.dtype, name) for name, array in named}
    if len(dtypes) == 1:
        return dtypes.pop()
    return _FLOAT64 if _FLOAT64 in dtypes else _FLOAT32


def _once(array):
    """The array with one entry on each axis of stride 0: everything that lies in memory."""
    return array[(..., *(slice(0, 1) if step == 0 else slice(None) for step in array.strides))]


def _converted(array, dtype):
    """A copy in `dtype`, native and aligned; an axis of stride 0 is copied once and repeated."""
    with np.errstate(all="ignore"):
        copy = _once(array).astype(dtype)
    return copy if copy.shape == array.shape else np.broadcast_to(copy, array.shape)


def rounded(array, dtype):
    """The array in float32 or float64, where a finite number stays finite."""
    limits = np.finfo(dtype)
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(array), np.clip(array, limits.min, limits.max), array).astype(dtype)


def _addressable(array):
    """True if element strides reach every element: aligned, no stride inside an element."""
    return array.flags.aligned and not any(step % array.itemsize for step in array.strides)


def _readable(array, dtype):
    """The array in `dtype`, and as the kernels read it; copied only if it is not so already."""
    if array.dtype == dtype and _addressable(array):
        return array
    return _converted(array, dtype)


def _input(array, name, half=True):
    return _readable(array, _storage_dtype(array.dtype, name, half))


def _given(value, name, named):
    """An optional array as it came, or None; `named` collects what `out` must not overlap."""
    if value is None:
        return None
    named.append((name, as_array(value, name)))
    return named[-1][1]


def _check_size(shape, itemsize, name):
    """NumPy counts bytes in a signed word; leave the text of its own error to nobody."""
    # Axes of size 0 do not make the other axes' strides smaller: NumPy leaves them out too.
    if math.prod(size or 1 for size in shape) * itemsize > sys.maxsize:
        raise ValueError(f"{name} would have shape {_show(shape)}, more than an array can hold")


def _broadcast(array, shape, name):
    if array.shape == shape:
        return array
    _check_size(shape, array.itemsize, name)
    return np.broadcast_to(array, shape)


def _fits(shape, target):
    """True if `shape` broadcasts to `target` from the right, as NumPy does it."""
    return len(shape) <= len(target) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False)
    )


def _clipped(integers, low, high):
    """An integer array of any width as int64 within low..high, low <= 0 <= high."""
    if integers.dtype.kind == "u":
        clipped = np.minimum(integers.astype(np.uint64), np.uint64(high))
    else:
        clipped = np.clip(integers.astype(np.int64), low, high)
    return np.asarray(clipped, np.int64)  # arithmetic on 0-d arrays gives scalars


# ---------------------------------------------------------------- shapes of one attention call


class _Sizes(NamedTuple):
    num_head_axes: int
    lead: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int


def heads_first(array, layout):
    """A view (..., heads, length, width) of a caller's array; a 2-D one gets its head axis."""
    if array.ndim == 2:
        return array[None]
    return array.swapaxes(-3, -2) if layout == "blhd" else array


def _attention_inputs(query, key, value):
    """The three inputs as they came, named, after the checks of dtypes and ranks."""
    named = [(name, as_array(x, name)) for name, x in (("query", query), ("key", key), ("value", value))]
    for name, array in named:
        _storage_dtype(array.dtype, name)
    for name, array in named:
        if array.ndim < 2:
            raise ValueError(f"{name} has shape {array.shape}; expected at least 2 dimensions: length and width")
    ranks = [array.ndim for _, array in named]
    if len(set(ranks)) > 1:
        raise ValueError("query, key and value have {}, {} and {} dimensions; expected the same number".format(*ranks))
    return named


def _lead(query, key, value):
    """The leading shape that the three broadcast to."""
    lead = []
    for sizes in zip(query.shape[:-3], key.shape[:-3], value.shape[:-3], strict=True):
        wanted = set(sizes) - {1}
        if len(wanted) > 1:
            raise ValueError(
                f"the leading dimensions of query {query.shape[:-3]}, key {key.shape[:-3]} and "
                f"value {value.shape[:-3]} do not broadcast"
            )
        lead.append(wanted.pop() if wanted else 1)
    return tuple(lead)


def _check_heads(num_heads, key_heads, value_heads, enable_gqa):
    if key_heads != value_heads:
        raise ValueError(f"key has {key_heads} heads but value has {value_heads}")
    if num_heads == key_heads:
        return
    if not enable_gqa:
        raise ValueError(
            f"query has {num_heads} heads but key has {key_heads}; expected the same, or enable_gqa=True and a multiple"
        )
    # Zero heads before the remainder: it would be a division by zero.
    if key_heads == 0 or num_heads % key_heads:
        raise ValueError(f"query has {num_heads} heads, which is no multiple of the {key_heads} heads of key")


def _sizes(named, layout, enable_gqa):
    """Check that the shapes of the three inputs agree, and name their sizes."""
    query, key, value = (heads_first(array, layout) for _, array in named)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query has width {query.shape[-1]} but key has {key.shape[-1]}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key has length {key.shape[-2]} but value has {value.shape[-2]}")
    _check_heads(query.shape[-3], key.shape[-3], value.shape[-3], enable_gqa)
    num_head_axes = int(named[0][1].ndim > 2)
    lead = _lead(query, key, value)
    num_heads, q_len, head_dim = query.shape[-3:]
    num_kv_heads, kv_len, value_dim = value.shape[-3:]
    return _Sizes(num_head_axes, lead, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim)


def _stored_input(name, array, layout, sizes):
    """An input as a view (*lead, heads, length, width) in its storage dtype, copied only where that has to be."""
    array = heads_first(_input(array, name), layout)
    return _broadcast(array, sizes.lead + array.shape[-3:], name)


def _result_shape(sizes, layout):
    if not sizes.num_head_axes:
        return (sizes.q_len, sizes.value_dim)
    rows = (sizes.num_heads, sizes.q_len)
    return (*sizes.lead, *(rows if layout == "bhld" else rows[::-1]), sizes.value_dim)


# ---------------------------------------------------------------- who sees whom


def _mask_dtype(dtype):
    if dtype.kind == "b":
        return np.dtype(bool)
    if dtype.type in (np.float32, np.float64):
        return np.dtype(dtype.type)
    if _is_half(dtype):
        return _FLOAT32  # exact
    if dtype.kind in "iu":
        raise TypeError(
            f"attn_mask has dtype {dtype}; expected bool (True = may attend: attn_mask != 0) "
            "or floating (added to the scores: attn_mask.astype(numpy.float32))"
        )
    raise TypeError(
        f"attn_mask has dtype {dtype}; expected bool (True = may attend), float16, bfloat16, "
        "float32 or float64 (added to the scores)"
    )


def _mask(array, sizes):
    """The caller's mask as a view (*lead, H, L, S); what it repeats stays repeated."""
    dtype = _mask_dtype(array.dtype)
    full = (*sizes.lead, sizes.num_heads, sizes.q_len, sizes.kv_len)
    target = full if sizes.num_head_axes else full[1:]
    if array.ndim == 0 or not _fits(array.shape, target):
        raise ValueError(f"attn_mask has shape {array.shape}; expected one that broadcasts to {target}")
    return _broadcast(_readable(array, dtype), full, "attn_mask")


def _counted_keys(array, kv_len):
    """Lengths as int64 in 0..S: key j is visible iff j < length, so a fraction rounds up."""
    dtype = array.dtype
    if dtype.kind in "iu":
        return _clipped(array, 0, kv_len)
    if dtype.kind != "f" and not _is_half(dtype):
        raise TypeError(f"valid_lens has dtype {dtype}; expected integers or floating numbers")
    with np.errstate(all="ignore"):
        counts = np.ceil(array).astype(np.float64)
        if np.isnan(counts).any():
            raise ValueError("valid_lens holds NaN; expected numbers")
        # float(kv_len) may be rounded up, hence the minimum below.
        counts = np.clip(counts, 0.0, float(kv_len)).astype(np.int64)
    return np.asarray(np.minimum(counts, kv_len))


def _lengths(array, sizes):
    """The caller's lengths, int64 in their own shape: `lead` or `lead + (L,)`."""
    expected = (sizes.lead, (*sizes.lead, sizes.q_len))
    if array.shape not in expected:
        raise ValueError(
            f"valid_lens has shape {array.shape}; expected {expected[0]} or {expected[1]}: "
            "the leading dimensions without heads, with or without the queries"
        )
    return _counted_keys(array, sizes.kv_len)


def _offset_array(q_offset):
    if isinstance(q_offset, numbers.Integral) and not isinstance(q_offset, (bool, np.bool_)):
        # Here and not below, because an int beyond 64 bits would become an object array.
        return np.array(max(-_MAX_OFFSET, min(int(q_offset), _MAX_OFFSET)), np.int64)
    array = as_array(q_offset, "q_offset")
    if array.dtype.kind not in "iu":
        raise TypeError(f"q_offset has dtype {array.dtype}; expected integers")
    return array


def _offsets(array, sizes):
    if array.shape not in ((), sizes.lead):
        raise ValueError(
            f"q_offset has shape {array.shape}; expected an int or {sizes.lead}: the leading dimensions without heads"
        )
    return _broadcast(_clipped(array, -_MAX_OFFSET, _MAX_OFFSET), sizes.lead, "q_offset")


def _lower_right(lengths, sizes):
    """The offset at which the last query sees the last key of its batch element."""
    keys = np.int64(sizes.kv_len)
    if lengths is not None and lengths.shape == sizes.lead:
        keys = lengths
    return _broadcast(np.asarray(keys - np.int64(sizes.q_len)), sizes.lead, "q_offset")


def _visibility(attn_mask, valid_lens, q_offset, causal, sizes, named):
    """Mask, lengths and offset as fields of a `Call`."""
    mask = _given(attn_mask, "attn_mask", named)
    if mask is not None:
        mask = _mask(mask, sizes)
    lengths = _given(valid_lens, "valid_lens", named)
    if lengths is not None:
        lengths = _lengths(lengths, sizes)
    offset = np.array(0, np.int64)
    if q_offset is not None:
        offset = _offset_array(q_offset)
        named.append(("q_offset", offset))
    offset = _lower_right(lengths, sizes) if causal == "lower_right" else _offsets(offset, sizes)
    if lengths is not None:
        if lengths.ndim == len(sizes.lead):
            lengths = lengths[..., None]
        lengths = _broadcast(lengths, (*sizes.lead, sizes.q_len), "valid_lens")
    return mask, lengths, offset


def _warn_upper_left():
    """Warn at the first frame outside this package: the default filter then says it once there.

    The text holds no sizes, for the filter counts another text as another warning.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _inside_package(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(_CAUSAL_WARNING, UserWarning, stacklevel=level)


def _inside_package(frame):
    name = frame.f_globals.get("__name__") or ""
    return name == _PACKAGE or name.startswith(_PACKAGE + ".")


# ---------------------------------------------------------------- out


def _overlaps_itself(array):
    """True unless the strides prove that no two elements share memory.

    In the order of their strides, each axis must step over all that the axes below it span.
    Slices, transposes and reversals of an ordinary array pass.
    """
    span = 0
    for step, size in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if step <= span:
            return True
        span += step * (size - 1)
    return False


def _shares_memory(first, second):
    try:
        return np.shares_memory(first, second, max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True


def checked_out(out, shape, dtype, inputs):
    """`out` as a plain ndarray that may be written while the named `inputs` are read."""
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"out is a {type(out).__name__}; expected a numpy.ndarray")
    array = np.asarray(out)
    if array.dtype != dtype:
        raise TypeError(f"out has dtype {array.dtype}; expected {dtype}")
    if array.shape != shape:
        raise ValueError(f"out has shape {array.shape}; expected {shape}")
    if not array.flags.writeable:
        raise ValueError("out is read-only; expected a writable array")
    if not _addressable(array):
        raise ValueError(
            f"out is unaligned or has strides {array.strides}; expected an aligned array whose "
            f"strides are multiples of {array.itemsize} bytes"
        )
    if array.size and _overlaps_itself(array):
        raise ValueError("out overlaps itself; expected every element in a place of its own")
    for name, other in inputs:
        if _shares_memory(array, other):
            raise ValueError(f"out shares memory with {name}; expected memory of its own")
    return array


# ---------------------------------------------------------------- what is done to the scores


def _effective_scale(scale, head_dim, compute):
    if scale is None:
        # Without any width all scores are 0 and the scale does not matter.
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    scale = _finite_number(scale, "scale")
    if abs(scale) > float(np.finfo(compute).max):
        raise ValueError(f"scale is {scale}; expected a number within the range of {compute}")
    return scale


def _effective_softcap(softcap, compute):
    softcap = _finite_number(softcap, "softcap")
    if softcap < 0:
        raise ValueError(f"softcap is {softcap}; expected 0, which is none, or a positive number")
    # A cap that is 0 or inf in the dtype of the computation would make a NaN of every score.
    limits = np.finfo(compute)
    if softcap and not float(limits.tiny) <= softcap <= float(limits.max):
        raise ValueError(f"softcap is {softcap}; expected 0 or a number within the normal range of {compute}")
    return softcap


def _numbers_of_heads(value, name, shapes, lowest, compute, named):
    """Numbers of heads in `compute`, of one of these shapes, at least `lowest` and below infinity; None as None."""
    array = _given(value, name, named)
    if array is None:
        return None
    _storage_dtype(array.dtype, name)
    if array.shape not in shapes:
        expected = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{name} has shape {array.shape}; expected {expected}: a number for each query head")
    entries = _once(array).astype(_FLOAT64)
    # NaN is not below infinity either.
    if not np.all((entries >= lowest) & (entries < math.inf)):
        allowed = "finite numbers" if lowest > -math.inf else "finite numbers, or -inf for none"
        raise ValueError(f"{name} holds NaN or infinity; expected {allowed}")
    return np.broadcast_to(rounded(entries, compute), array.shape)


def _slopes(alibi_slopes, sizes, compute, named):
    """The slopes as a view (*lead, H), or None."""
    full = (*sizes.lead, sizes.num_heads)
    lowest = np.finfo(np.float64).min
    slopes = _numbers_of_heads(alibi_slopes, "alibi_slopes", (full[-1:], full), lowest, compute, named)
    return None if slopes is None else _broadcast(slopes, full, "alibi_slopes")


def _sinks(sinks, sizes, compute, named):
    """One logit for each head, (H,), or None."""
    return _numbers_of_heads(sinks, "sinks", ((sizes.num_heads,),), -math.inf, compute, named)


# ---------------------------------------------------------------- one attention call


def _weights_rows(weights_rows, return_weights, sizes, named):
    """Numbers of the queries whose weights are wanted, (R,) int64 from the front; None is all of them."""
    array = _given(weights_rows, "weights_rows", named)
    if array is None:
        return None
    if not return_weights:
        raise ValueError("weights_rows chooses rows of the weights; expected return_weights=True beside it")
    if array.ndim != 1:
        raise ValueError(f"weights_rows has shape {array.shape}; expected 1 dimension: the numbers of queries")
    # An empty list comes as floating numbers.
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"weights_rows has dtype {array.dtype}; expected integers")
    rows = _clipped(array, -sizes.q_len - 1, sizes.q_len)
    outside = (rows < -sizes.q_len) | (rows >= sizes.q_len)
    if outside.any():
        raise ValueError(f"weights_rows holds {array[outside][0]}, but there are {sizes.q_len} queries")
    return np.where(rows < 0, rows + sizes.q_len, rows)


def _check_results(shape, sizes, dtype, compute, return_weights, weights_rows):
    """That all results fit into memory that can be addressed."""
    rows = (*sizes.lead, sizes.num_heads, sizes.q_len)
    _check_size(shape, dtype.itemsize, "the result")
    _check_size(rows, compute.itemsize, "the log-sum-exp")
    if return_weights:
        num_rows = sizes.q_len if weights_rows is None else len(weights_rows)
        _check_size((*rows[:-1], num_rows, sizes.kv_len), compute.itemsize, "the weights")


def attention_call(
    query,
    key,
    value,
    *,
    attn_mask,
    dropout_p,
    is_causal,
    scale,
    enable_gqa,
    valid_lens,
    q_offset,
    window_size,
    softcap,
    alibi_slopes,
    sinks,
    layout,
    return_lse,
    return_weights,
    weights_rows,
    out,
    num_threads,
):
    """Check the arguments of `scaled_dot_product_attention` and return them as a `Call`.

    No option has a default here: one that a caller forgets to hand on is an error.
    """
    # 1. Options that no array is needed for.
    _no_dropout(dropout_p)
    causal = _causal_alignment(is_causal, q_offset)
    window = _window(window_size)
    enable_gqa = flag(enable_gqa, "enable_gqa")
    layout = _choice(layout, "layout", _LAYOUTS)
    return_lse = flag(return_lse, "return_lse")
    return_weights = flag(return_weights, "return_weights")
    num_threads = thread_count(num_threads, "num_threads")

    # 2. The inputs; `named` are the arrays as they came, which `out` must not overlap.
    named = _attention_inputs(query, key, value)
    sizes = _sizes(named, layout, enable_gqa)
    dtype = _result_dtype(named)
    compute = compute_dtype(dtype)

    # 3. The scores: who sees whom, and what is done to them.
    scale = _effective_scale(scale, sizes.head_dim, compute)
    softcap = _effective_softcap(softcap, compute)
    mask, lengths, offset = _visibility(attn_mask, valid_lens, q_offset, causal, sizes, named)
    slopes = _slopes(alibi_slopes, sizes, compute, named)
    sinks = _sinks(sinks, sizes, compute, named)

    # 4. The results.
    rows = _weights_rows(weights_rows, return_weights, sizes, named)
    shape = _result_shape(sizes, layout)
    _check_results(shape, sizes, dtype, compute, return_weights, rows)
    out_view = None if out is None else heads_first(checked_out(out, shape, dtype, named), layout)
    if causal is True and q_offset is None and sizes.q_len < sizes.kv_len:
        _warn_upper_left()
    query, key, value = (_stored_input(name, array, layout, sizes) for name, array in named[:3])
    return Call(
        query=query,
        key=key,
        value=value,
        mask=mask,
        lengths=lengths,
        causal=bool(causal),
        offset=offset,
        scale=scale,
        dtype=dtype,
        shape=shape,
        out=out_view,
        out_object=out,
        num_head_axes=sizes.num_head_axes,
        layout=layout,
        return_lse=return_lse,
        return_weights=return_weights,
        num_threads=num_threads,
        window=window,
        softcap=softcap,
        slopes=slopes,
        sinks=sinks,
        weights_rows=rows,
        compute=compute,
    )


# The options of `scaled_dot_product_attention` at their defaults.
_DEFAULTS = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
    "valid_lens": None,
    "q_offset": None,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "sinks": None,
    "layout": "bhld",
    "return_lse": False,
    "return_weights": False,
    "weights_rows": None,
    "out": None,
    "num_threads": None,
}


def attention_call_of(query, key, value, **options):
    """Check a call whose caller leaves options out, which then have their defaults; `attention_call` has none."""
    return attention_call(query, key, value, **(_DEFAULTS | options))


# ---------------------------------------------------------------- layers


def head_counts(num_hiddens, num_heads, num_kv_heads):
    """The three numbers of a layer as ints; num_kv_heads None means num_heads."""
    num_hiddens = positive_integer(num_hiddens, "num_hiddens")
    num_heads = positive_integer(num_heads, "num_heads")
    if num_hiddens % num_heads:
        raise ValueError(
            f"num_hiddens is {_show(num_hiddens)} and num_heads is {_show(num_heads)}; "
            "expected num_hiddens to be a multiple of num_heads"
        )
    _check_size((num_hiddens, num_hiddens), _FLOAT64.itemsize, "W_q")
    if num_kv_heads is None:
        return num_hiddens, num_heads, num_heads
    num_kv_heads = positive_integer(num_kv_heads, "num_kv_heads")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads is {_show(num_heads)} and num_kv_heads is {_show(num_kv_heads)}; "
            "expected num_heads to be a multiple of num_kv_heads"
        )
    return num_hiddens, num_heads, num_kv_heads


def ffn_widths(num_hiddens, ffn_num_hiddens):
    """The two widths of a feed-forward network as ints."""
    num_hiddens = positive_integer(num_hiddens, "num_hiddens")
    ffn_num_hiddens = positive_integer(ffn_num_hiddens, "ffn_num_hiddens")
    _check_size((num_hiddens, ffn_num_hiddens), _FLOAT64.itemsize, "W_1")
    return num_hiddens, ffn_num_hiddens


def _three_axes(array, name, axes):
    if array.ndim != 3:
        raise ValueError(f"{name} has shape {array.shape}; expected 3 dimensions: {axes}")


def _weight(layer, name, rows, columns, inputs):
    """The layer's matrix `name` of shape (rows, columns); rows None takes any."""
    array = as_array(getattr(layer, name), name)
    inputs.append((name, array))
    stored = _input(array, name, half=False)
    if array.ndim != 2 or columns not in (None, array.shape[1]) or rows not in (None, array.shape[0]):
        wanted = ", ".join("any" if size is None else str(size) for size in (rows, columns))
        raise ValueError(f"{name} has shape {array.shape}; expected ({wanted})")
    return stored


def _bias(layer, name, size, dtype, inputs):
    """The layer's vector `name`, cast to the dtype of the result."""
    array = as_array(getattr(layer, name), name)
    inputs.append((name, array))
    _storage_dtype(array.dtype, name, half=False)
    if array.shape != (size,):
        raise ValueError(f"{name} has shape {array.shape}; expected ({size},)")
    return _readable(array, dtype)


def _check_width(array, name, weight, weight_name):
    if array.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"{name} has width {array.shape[-1]} but {weight_name} has shape {weight.shape}; "
            f"expected width {weight.shape[0]}"
        )


def _layer_inputs(queries, keys, values):
    """The three inputs, named, after the checks among themselves."""
    named = [(name, as_array(x, name)) for name, x in (("queries", queries), ("keys", keys), ("values", values))]
    for name, array in named:
        _storage_dtype(array.dtype, name, half=False)
        _three_axes(array, name, "(batch, length, width)")
    queries, keys, values = (array for _, array in named)
    for name, array in named[1:]:
        if array.shape[0] != queries.shape[0]:
            raise ValueError(f"queries has batch {queries.shape[0]} but {name} has {array.shape[0]}")
    if keys.shape[1] != values.shape[1]:
        raise ValueError(f"keys has length {keys.shape[1]} but values has {values.shape[1]}")
    return named


def layer_call(layer, queries, keys, values, valid_lens, attn_mask, need_weights, out):
    """Check a call of `MultiHeadAttention.forward`; the attention inside checks the masks.

    They come here too only because `out` must not overlap them. Weights and biases are the
    layer's of this moment: users may replace or edit them between calls.
    """
    need_weights = flag(need_weights, "need_weights")
    num_hiddens, num_heads, num_kv_heads = head_counts(layer.num_hiddens, layer.num_heads, layer.num_kv_heads)
    depth = num_hiddens // num_heads
    kv_width = num_kv_heads * depth

    inputs = _layer_inputs(queries, keys, values)
    queries, keys, values = (_input(array, name) for name, array in inputs)
    W_q = _weight(layer, "W_q", None, num_hiddens, inputs)
    W_k = _weight(layer, "W_k", None, kv_width, inputs)
    W_v = _weight(layer, "W_v", None, kv_width, inputs)
    W_o = _weight(layer, "W_o", num_hiddens, num_hiddens, inputs)
    _check_width(queries, "queries", W_q, "W_q")
    _check_width(keys, "keys", W_k, "W_k")
    _check_width(values, "values", W_v, "W_v")
    dtype = np.result_type(queries, keys, values, W_q, W_k, W_v, W_o)
    b_q = _bias(layer, "b_q", num_hiddens, dtype, inputs)
    b_k = _bias(layer, "b_k", kv_width, dtype, inputs)
    b_v = _bias(layer, "b_v", kv_width, dtype, inputs)
    b_o = _bias(layer, "b_o", num_hiddens, dtype, inputs)

    shape = (queries.shape[0], queries.shape[1], num_hiddens)
    _check_size(shape, dtype.itemsize, "the result")
    out_array = None
    if out is not None:
        for name, mask in (("valid_lens", valid_lens), ("attn_mask", attn_mask)):
            if mask is not None:
                inputs.append((name, as_array(mask, name)))
        out_array = checked_out(out, shape, dtype, inputs)
    return LayerCall(
        queries=queries,
        keys=keys,
        values=values,
        W_q=W_q,
        W_k=W_k,
        W_v=W_v,
        W_o=W_o,
        b_q=b_q,
        b_k=b_k,
        b_v=b_v,
        b_o=b_o,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        depth=depth,
        dtype=dtype,
        shape=shape,
        out=out_array,
        out_object=out,
        need_weights=need_weights,
    )


def layer_attention(call, valid_lens, attn_mask, is_causal):
    """Check the masks of a layer's call, and return its attention as a `Call` of arrays without memory of their own."""
    batch, q_len, _ = call.shape
    query, key = (
        np.broadcast_to(np.zeros((), call.dtype), (batch, length, heads, call.depth))
        for length, heads in ((q_len, call.num_heads), (call.keys.shape[1], call.num_kv_heads))
    )
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "valid_lens": valid_lens}
    return attention_call_of(query, key, key, **options, enable_gqa=True, layout="blhd")


def ffn_call(layer, X):
    """Check a call of `PositionWiseFFN.forward`."""
    array = as_array(X, "X")
    stored = _input(array, "X", half=False)
    if array.ndim == 0:
        raise ValueError("X has shape (); expected at least 1 dimension: the width")
    W_1 = _weight(layer, "W_1", None, None, [])
    W_2 = _weight(layer, "W_2", W_1.shape[1], None, [])
    _check_width(array, "X", W_1, "W_1")
    dtype = np.result_type(stored, W_1, W_2)
    b_1 = _bias(layer, "b_1", W_1.shape[1], dtype, [])
    b_2 = _bias(layer, "b_2", W_2.shape[1], dtype, [])
    _check_size((*array.shape[:-1], W_2.shape[1]), dtype.itemsize, "the result")
    return FFNCall(stored, W_1, b_1, W_2, b_2, dtype)


def split_heads(X, depth):
    """X as an ndarray (batch, length, width) and the number of heads of this depth in it."""
    X = as_array(X, "X")
    _three_axes(X, "X", "(batch, length, width)")
    if X.shape[2] % depth:
        raise ValueError(f"X has width {X.shape[2]}; expected a multiple of the depth {depth}")
    return X, X.shape[2] // depth


def joined_batch(X, num_heads):
    """X as an ndarray (batch * num_heads, length, depth) and the batch in it."""
    X = as_array(X, "X")
    _three_axes(X, "X", "(batch * num_heads, length, depth)")
    if X.shape[0] % num_heads:
        raise ValueError(f"X has {X.shape[0]} entries on its first axis; expected a multiple of the {num_heads} heads")
    return X, X.shape[0] // num_heads


def head_entries(Q, K, V, num_heads, num_kv_heads):
    """Q, K, V (batch * heads, length, depth) as (batch * num_heads, 1, length, depth).

    K and V may have the layer's key/value heads; they are then repeated to the query heads.
    """
    named = [(name, as_array(x, name)) for name, x in (("Q", Q), ("K", K), ("V", V))]
    for name, array in named:
        _three_axes(array, name, "(batch * heads, length, depth)")
    entries = named[0][1].shape[0]
    group = num_heads // num_kv_heads
    views = []
    for name, array in named:
        if array.shape[0] != entries and array.shape[0] * group == entries:
            array = np.repeat(array, group, axis=0)
        if array.shape[0] != entries:
            raise ValueError(f"Q has {entries} entries on its first axis but {name} has {array.shape[0]}")
        views.append(array[:, None])
    return views


# ---------------------------------------------------------------- weights from elsewhere


def owned_weight(value, name):
    """A C-contiguous copy of a weight or a bias; half types become float32, which holds them exactly."""
    array = as_array(value, name)
    dtype = _FLOAT32 if _is_half(array.dtype) else _storage_dtype(array.dtype, name)
    with np.errstate(all="ignore"):
        return np.array(array, dtype, order="C")


def exact_shape(array, name, shape):
    """Refuse an array of another shape; None is any size."""
    if array.ndim != len(shape) or any(want not in (None, n) for want, n in zip(shape, array.shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {array.shape}; expected ({wanted}{',' * (len(shape) == 1)})")


def layer_weights(layer, num_heads, num_kv_heads):
    """Check the four W of a MultiHeadAttention among themselves; num_hiddens, num_heads and num_kv_heads."""
    width = _weight(layer, "W_q", None, None, []).shape[1]
    width, num_heads, num_kv_heads = head_counts(width, num_heads, num_kv_heads)
    kv_width = num_kv_heads * (width // num_heads)
    _weight(layer, "W_k", None, kv_width, [])
    _weight(layer, "W_v", None, kv_width, [])
    _weight(layer, "W_o", width, width, [])
    return width, num_heads, num_kv_heads


def ffn_weights(layer):
    """Check the two W of a PositionWiseFFN; num_hiddens and ffn_num_hiddens."""
    widths = ffn_widths(*_weight(layer, "W_1", None, None, []).shape)
    _weight(layer, "W_2", widths[1], None, [])
    return widths


def layer_bias(layer, name, size):
    """Check the layer's vector `name`."""
    _bias(layer, name, size, _FLOAT64, [])


def state_entries(state, names, what):
    """A mapping with exactly these names as a dict; `what` is what an error calls it."""
    if not isinstance(state, collections.abc.Mapping):
        raise TypeError(f"{what} is a {type(state).__name__}; expected a dict of arrays")
    missing = [name for name in names if name not in state]
    unknown = [_show(name) for name in state if name not in names]
    if missing or unknown:
        faults = [*(f"lacks {name}" for name in missing), *(f"has the unknown {name}" for name in unknown)]
        raise ValueError(f"{what} {_listed(faults)}; expected {', '.join(names)}")
    return dict(state)


def _listed(faults):
    """The first few, joined: a whole model's state has hundreds of names."""
    return ", ".join(faults[:6]) + (f" and {len(faults) - 6} more" if len(faults) > 6 else "")
