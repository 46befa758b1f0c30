"""The rules about arguments of packed sequences, key/value caches, partial results and rotary positions.

As in `_validate`: both implementations call these functions, so both raise the same exception with the same text, and
nothing of the caller's is changed here. A cache is refused or accepted before anything is written into it.

Words: B is the number of sequences, H and Hkv are the query and key/value heads, L the queries of a call, E the width
of a query and a key, Ev that of a value.
"""

import numbers
from typing import Any, NamedTuple

import numpy as np

from mha_fast import _validate
from mha_fast._validate import (
    _addressable,
    _broadcast,
    _check_size,
    _clipped,
    _given,
    _input,
    _is_half,
    _readable,
    _result_dtype,
    _show,
    _storage_dtype,
    as_array,
    compute_dtype,
    flag,
)

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_CACHE_DTYPES = "float16, bfloat16, float32, float64 or int8"
# More tokens than any cache holds; a few times as many are still within int64.
_MORE_THAN_ANY = 2**60
# Numbers of this size and above could reach infinity when a rotation mixes two of them in float32.
_INT8_LIMIT = float(np.finfo(np.float32).max) / 2


class Options(NamedTuple):
    """What decides scores and visibility beside the arrays; the positions are lower-right in every sequence.

    Query i of a sequence of `queries` and `keys` stands at position i + keys - queries among the keys.
    """

    causal: bool
    scale: float
    window: tuple[int, int]  # keys to the left and right of the query's position, -1 without limit
    softcap: float  # 0 without
    slopes: np.ndarray | None  # (B, H) in the dtype of the computation
    sinks: np.ndarray | None  # (H,) in the dtype of the computation


class Rotary(NamedTuple):
    """Rotate the first `dim` numbers of each row by its position."""

    base: float
    dim: int  # even
    interleaved: bool

    @property
    def frequencies(self):
        """Angle of each pair at position 1, (dim / 2,) float64; infinite for the least of bases."""
        with np.errstate(over="ignore"):
            return self.base ** (-2.0 * np.arange(self.dim // 2) / self.dim)


class VarlenCall(NamedTuple):
    """One call of `varlen_attention` after every check; the arrays are heads-first views of the caller's."""

    query: np.ndarray  # (H, tokens_q, E)
    key: np.ndarray  # (Hkv, tokens_k, E)
    value: np.ndarray  # (Hkv, tokens_k, Ev)
    q_starts: np.ndarray  # (B + 1,) int64: sequence b is q_starts[b] to q_starts[b + 1]
    k_starts: np.ndarray  # (B + 1,) int64
    options: Options
    dtype: np.dtype  # of the result
    compute: np.dtype  # of the computation and the log-sum-exp: float32 or float64
    shape: tuple[int, int, int]  # of the result, (tokens_q, H, Ev)
    out: np.ndarray | None  # (H, tokens_q, Ev), a view of out_object
    out_object: Any  # the very object to return, or None
    return_lse: bool
    num_threads: int | None


class CacheState(NamedTuple):
    """A cache, the new tokens of a call if there are any, and their places; all of it is checked, none of it copied.

    Token t of entry b lies in row b at t; with a block table, in row block_table[b, t // block] at t % block, and only
    the pages below totals[b] are checked and may be looked at. int8 caches hold value / scale.
    """

    k_cache: np.ndarray  # (B, Hkv, max_len, E), with a block table (blocks, Hkv, block, E)
    v_cache: np.ndarray  # the same with Ev
    k_scale: np.ndarray | None  # (B, Hkv, max_len) or (blocks, Hkv, block) float32, beside int8 alone
    v_scale: np.ndarray | None
    block_table: np.ndarray | None  # (B, max_blocks) int64
    k: np.ndarray | None  # (B, Hkv, n, E): its first totals[b] - starts[b] tokens are to be written, from starts[b] on
    v: np.ndarray | None  # (B, Hkv, n, Ev)
    starts: np.ndarray  # (B,) int64: tokens before the write
    totals: np.ndarray  # (B,) int64: tokens after it
    rotary: Rotary | None  # of k, at the positions of its tokens
    compute: np.dtype  # in which k is rotated and quantized: float32, float64 for a float64 cache


class CacheCall(NamedTuple):
    """One call of `attention_with_kvcache` after every check: write the new tokens, then attend to all of them."""

    state: CacheState
    query: np.ndarray  # (B, H, L, E); rotated too if state.rotary, at its position
    options: Options
    dtype: np.dtype
    compute: np.dtype
    shape: tuple[int, int, int, int]  # (B, H, L, Ev)
    out: np.ndarray | None
    out_object: Any
    return_lse: bool
    num_threads: int | None


# ---------------------------------------------------------------- dtypes


def _is_cache_dtype(dtype):
    return dtype.type in (np.float32, np.float64, np.int8) or _is_half(dtype)


def cache_dtype(dtype):
    """The dtype of a KVCache."""
    try:
        found = np.dtype(dtype)
    except Exception:  # numpy.dtype parses strings and may raise SyntaxError too
        raise TypeError(f"dtype is {_show(dtype)}; expected {_CACHE_DTYPES}") from None
    if not _is_cache_dtype(found):
        raise TypeError(f"dtype is {found}; expected {_CACHE_DTYPES}")
    return np.dtype(found.type)


# ---------------------------------------------------------------- options


class _Sizes(NamedTuple):
    """What the checks of slopes and sinks ask for."""

    lead: tuple[int]
    num_heads: int


def _options(is_causal, scale, window_size, softcap, alibi_slopes, sinks, batch, query, compute, named):
    """The checked options of a call whose query is (..., H, L, E); slopes and sinks join `named`."""
    sizes = _Sizes((batch,), query.shape[-3])
    return Options(
        causal=flag(is_causal, "is_causal"),
        scale=_validate._effective_scale(scale, query.shape[-1], compute),
        window=_validate._window(window_size),
        softcap=_validate._effective_softcap(softcap, compute),
        slopes=_validate._slopes(alibi_slopes, sizes, compute, named),
        sinks=_validate._sinks(sinks, sizes, compute, named),
    )


def _rank(array, name, axes):
    rank = axes.count(",") + 1
    if array.ndim != rank:
        raise ValueError(f"{name} has shape {array.shape}; expected {rank} dimensions: {axes}")


def _result(out, shape, dtype, lse_shape, compute, named):
    """The checked `out` or None; and the results' sizes are those that an array can have."""
    _check_size(shape, dtype.itemsize, "the result")
    _check_size(lse_shape, compute.itemsize, "the log-sum-exp")
    return None if out is None else _validate.checked_out(out, shape, dtype, named)


# ---------------------------------------------------------------- packed sequences


def _starts(array, name, tokens, of):
    """Offsets of packed sequences as (B + 1,) int64, from 0 to all `tokens` of the array named `of`."""
    if array.dtype.kind != "i" or array.itemsize not in (4, 8):
        raise TypeError(f"{name} has dtype {array.dtype}; expected int32 or int64")
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} has shape {array.shape}; expected one dimension: an offset per sequence and the end")
    array = np.ascontiguousarray(array, np.int64)
    if array[0] != 0:
        raise ValueError(f"{name}[0] is {array[0]}; expected 0")
    decreasing = array[1:] < array[:-1]
    if decreasing.any():
        i = int(decreasing.argmax())
        raise ValueError(f"{name}[{i + 1}] is {array[i + 1]} after {array[i]}; expected offsets that do not decrease")
    if array[-1] != tokens:
        raise ValueError(f"{name}[{array.size - 1}] is {array[-1]}; expected {tokens}, the number of tokens of {of}")
    return array


def varlen_call(
    query,
    key,
    value,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    is_causal,
    scale,
    enable_gqa,
    window_size,
    softcap,
    alibi_slopes,
    sinks,
    return_lse,
    out,
    num_threads,
):
    """Check the arguments of `varlen_attention` and return them as a `VarlenCall`."""
    enable_gqa = flag(enable_gqa, "enable_gqa")
    return_lse = flag(return_lse, "return_lse")
    num_threads = _validate.thread_count(num_threads, "num_threads")

    named = [(name, as_array(x, name)) for name, x in (("query", query), ("key", key), ("value", value))]
    for name, array in named:
        _rank(array, name, "(tokens, heads, width)")
    dtype = _result_dtype(named)
    compute = compute_dtype(dtype)
    query, key, value = (_validate.heads_first(_input(array, name), "blhd") for name, array in named)
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"query has width {query.shape[2]} but key has {key.shape[2]}")
    if key.shape[1] != value.shape[1]:
        raise ValueError(f"key has {key.shape[1]} tokens but value has {value.shape[1]}")
    _validate._check_heads(query.shape[0], key.shape[0], value.shape[0], enable_gqa)

    named.append(("cu_seqlens_q", as_array(cu_seqlens_q, "cu_seqlens_q")))
    q_starts = _starts(named[-1][1], "cu_seqlens_q", query.shape[1], "query")
    if cu_seqlens_k is None:
        k_starts = q_starts
        if key.shape[1] != query.shape[1]:
            raise ValueError(
                f"key has {key.shape[1]} tokens but query has {query.shape[1]}; expected the same number, "
                "or cu_seqlens_k"
            )
    else:
        named.append(("cu_seqlens_k", as_array(cu_seqlens_k, "cu_seqlens_k")))
        k_starts = _starts(named[-1][1], "cu_seqlens_k", key.shape[1], "key")
        if k_starts.size != q_starts.size:
            raise ValueError(f"cu_seqlens_q has {q_starts.size} offsets but cu_seqlens_k has {k_starts.size}")
    batch = q_starts.size - 1
    options = _options(is_causal, scale, window_size, softcap, alibi_slopes, sinks, batch, query, compute, named)

    shape = (query.shape[1], query.shape[0], value.shape[2])
    out_array = _result(out, shape, dtype, query.shape[:2], compute, named)
    return VarlenCall(
        query=query,
        key=key,
        value=value,
        q_starts=q_starts,
        k_starts=k_starts,
        options=options,
        dtype=dtype,
        compute=compute,
        shape=shape,
        out=None if out_array is None else _validate.heads_first(out_array, "blhd"),
        out_object=out,
        return_lse=return_lse,
        num_threads=num_threads,
    )


# ---------------------------------------------------------------- caches


def _cache_array(array, name):
    """A cache or its scales as a plain ndarray of the same memory: a copy would lose what is written, and cost."""
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a {type(array).__name__}; expected a numpy.ndarray")
    array = np.asarray(array)
    if not array.dtype.isnative or not _addressable(array):
        raise ValueError(
            f"{name} is byte-swapped, unaligned or has strides {array.strides}; expected an array in native byte "
            f"order, aligned, whose strides are multiples of {array.itemsize} bytes"
        )
    return array


def _caches(k_cache, v_cache, paged):
    """The two caches, which agree in all but their widths."""
    caches = [(name, _cache_array(x, name)) for name, x in (("k_cache", k_cache), ("v_cache", v_cache))]
    for name, array in caches:
        if not _is_cache_dtype(array.dtype):
            raise TypeError(f"{name} has dtype {array.dtype}; expected {_CACHE_DTYPES}")
        _rank(array, name, "(blocks, heads, block, width)" if paged else "(batch, heads, max_len, width)")
    (_, k_cache), (_, v_cache) = caches
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(f"k_cache has dtype {k_cache.dtype} but v_cache has {v_cache.dtype}")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"k_cache has shape {k_cache.shape} but v_cache has {v_cache.shape}; expected the same but for the width"
        )
    if paged and not k_cache.shape[2]:
        raise ValueError(f"k_cache has shape {k_cache.shape}; expected blocks of at least 1 token")
    return k_cache, v_cache


def _scale_of(scale, cache, name, cache_name):
    """The scales of an int8 cache, one per token and head; None for every other dtype."""
    if cache.dtype != np.int8:
        if scale is not None:
            raise ValueError(f"{name} is given but {cache_name} has dtype {cache.dtype}; expected it beside int8 alone")
        return None
    if scale is None:
        raise ValueError(f"{cache_name} has dtype int8; expected {name} with it")
    scale = _cache_array(scale, name)
    if scale.dtype != _FLOAT32:
        raise TypeError(f"{name} has dtype {scale.dtype}; expected float32")
    if scale.shape != cache.shape[:3]:
        raise ValueError(f"{name} has shape {scale.shape}; expected {cache.shape[:3]}")
    return scale


def _counts(value, name, batch):
    """An int or (B,) integers of at least 0 as (B,) int64; what is far beyond any cache is clipped."""
    if isinstance(value, numbers.Integral) and not isinstance(value, (bool, np.bool_)):
        # Here and not below, because an int beyond 64 bits would become an object array.
        array = np.array(max(-1, min(int(value), _MORE_THAN_ANY)))
    else:
        array = as_array(value, name)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}; expected integers")
    if array.shape not in ((), (batch,)):
        raise ValueError(f"{name} has shape {array.shape}; expected an int or ({batch},)")
    negative = array < 0
    if negative.any():
        raise ValueError(f"{_count_given(value, name, int(negative.argmax()))}; expected at least 0")
    return np.ascontiguousarray(_broadcast(_clipped(array, 0, _MORE_THAN_ANY), (batch,), name))


def _count_given(value, name, b):
    """What `_counts` took for entry b, named and not clipped."""
    array = None if isinstance(value, numbers.Integral) else as_array(value, name)
    if array is None or not array.ndim:
        return f"{name} is {_show(int(value))}"
    return f"{name}[{b}] is {array[b]}"


def _check_seqlens(cache_seqlens, starts, new, capacity, of):
    """Every entry has room for its tokens, cache_seqlens and the new ones; `starts` are its clipped counts."""
    capacity = min(capacity, _MORE_THAN_ANY - 1)
    beyond = starts > capacity - new
    if beyond.any():
        given = _count_given(cache_seqlens, "cache_seqlens", int(beyond.argmax()))
        tokens = f" and k has {new} tokens" if new else ""
        raise ValueError(f"{given}{tokens}; expected at most {capacity} in all, {of}")


def _quantizable(array):
    """True if rows of these numbers have a scale; integers always do."""
    with np.errstate(all="ignore"):  # bfloat16 warns of NaN
        # The comparison is False for NaN too.
        return array.dtype.kind in "biu" or float(np.abs(array).max(initial=0)) < _INT8_LIMIT


def _new_tokens(k, v, batch, num_kv_heads, widths, dtype):
    """The caller's k and v, (B, Hkv, n, E) and (B, Hkv, n, Ev), named; and as they are read."""
    named = [(name, as_array(x, name)) for name, x in (("k", k), ("v", v))]
    for (name, array), width in zip(named, widths, strict=True):
        _storage_dtype(array.dtype, name)
        _rank(array, name, "(batch, heads, tokens, width)")
        tokens = named[0][1].shape[2]
        if array.shape != (batch, num_kv_heads, tokens, width):
            raise ValueError(
                f"{name} has shape {array.shape}; expected ({batch}, {num_kv_heads}, {tokens}, {width}) for this cache"
            )
    for name, array in named if dtype == np.int8 else ():
        if not _quantizable(array):
            raise ValueError(
                f"{name} holds NaN, infinity or numbers of {_INT8_LIMIT:.3g} and more; "
                "expected finite numbers for an int8 cache"
            )
    return named, *(_input(array, name) for name, array in named)


def _check_writable(written, read):
    """Each of the named arrays `written` has memory of its own, that may be written while the others are read."""
    for i, (name, array) in enumerate(written):
        if not array.flags.writeable:
            raise ValueError(f"{name} is read-only; expected a writable array to take new tokens")
        if array.size and _validate._overlaps_itself(array):
            raise ValueError(f"{name} overlaps itself; expected every element in a place of its own")
        for other, memory in (*written[:i], *read):
            if _validate._shares_memory(array, memory):
                raise ValueError(f"{name} shares memory with {other}; expected memory of its own to take new tokens")


def _block_table(array, batch):
    """The table as (B, pages) int64; its numbers are checked once the lengths are known."""
    if array.dtype.kind != "i" or array.itemsize not in (4, 8):
        raise TypeError(f"block_table has dtype {array.dtype}; expected int32 or int64")
    if array.ndim != 2 or array.shape[0] != batch:
        raise ValueError(f"block_table has shape {array.shape}; expected ({batch}, pages of an entry)")
    return np.ascontiguousarray(array, np.int64)


def _check_pages(table, starts, totals, blocks, block):
    """Every page that holds a token exists, and none is written through two places of the table."""
    page = np.arange(table.shape[1])
    used = page < -(-totals // block)[:, None]
    wrong = used & ((table < 0) | (table >= blocks))
    if wrong.any():
        b, p = np.argwhere(wrong)[0]
        raise ValueError(
            f"block_table[{b}, {p}] is {table[b, p]} and entry {b} has {totals[b]} tokens; expected 0 to {blocks - 1}"
        )
    places = np.argwhere(used & (page >= (starts // block)[:, None]) & (totals > starts)[:, None])
    pages = table[places[:, 0], places[:, 1]]
    order = np.argsort(pages, kind="stable")
    twice = pages[order[1:]] == pages[order[:-1]]
    if twice.any():
        i = int(twice.argmax())
        (a, p), (b, q) = places[order[i]], places[order[i + 1]]
        raise ValueError(
            f"block_table[{a}, {p}] and block_table[{b}, {q}] are both {table[a, p]}, and both take new tokens; "
            "expected a page of its own for each"
        )


def _rotary(base, dim, interleaved, head_dim, names):
    """The checked parameters of a rotation of rows of this width; `names` are those of the arguments."""
    base_name, dim_name, interleaved_name = names
    number = _validate._finite_number(base, base_name)
    if number <= 0:
        raise ValueError(f"{base_name} is {_show(base)}; expected a number above 0")
    if dim is None:
        if head_dim % 2:
            raise ValueError(f"the width is {head_dim}; expected an even one, or an even {dim_name} of less")
        dim = head_dim
    else:
        dim = _validate.positive_integer(dim, dim_name)
        if dim % 2 or dim > head_dim:
            raise ValueError(f"{dim_name} is {_show(dim)}; expected an even number of at most the width {head_dim}")
    return Rotary(number, dim, flag(interleaved, interleaved_name))


def _check_angles(rotary, farthest, base_name):
    """No angle at positions up to this one, in either direction, is beyond float64: its sine would be NaN."""
    with np.errstate(over="ignore"):
        angle = np.float64(farthest) * rotary.frequencies.max(initial=1.0)
    if not np.isfinite(angle):
        raise ValueError(
            f"{base_name} is {rotary.base} and a position {float(farthest)}; expected angles, "
            "position * base ** (-2 p / rotary_dim), that float64 can hold"
        )


def _cache_rotary(base, dim, interleaved, head_dim):
    """The rotation of a call on a cache, None without a base."""
    if base is None:
        if dim is not None or flag(interleaved, "rotary_interleaved"):
            raise ValueError("rotary_dim or rotary_interleaved is given without rotary_base; expected rotary_base too")
        return None
    return _rotary(base, dim, interleaved, head_dim, ("rotary_base", "rotary_dim", "rotary_interleaved"))


def cache_call(
    query,
    k_cache,
    v_cache,
    *,
    k,
    v,
    cache_seqlens,
    block_table,
    k_scale,
    v_scale,
    is_causal,
    scale,
    window_size,
    softcap,
    alibi_slopes,
    sinks,
    rotary_base,
    rotary_dim,
    rotary_interleaved,
    return_lse,
    out,
    num_threads,
):
    """Check the arguments of `attention_with_kvcache` and return them as a `CacheCall`."""
    return_lse = flag(return_lse, "return_lse")
    num_threads = _validate.thread_count(num_threads, "num_threads")
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is None; expected k and v together or neither")

    # 1. The query and the caches.
    named = [("query", as_array(query, "query"))]
    query = _input(named[0][1], "query")
    _rank(query, "query", "(batch, heads, queries, width)")
    batch, num_heads, _, head_dim = query.shape
    k_cache, v_cache = _caches(k_cache, v_cache, block_table is not None)
    blocks, num_kv_heads, block, cache_dim = k_cache.shape
    if head_dim != cache_dim:
        raise ValueError(f"query has width {head_dim} but k_cache has {cache_dim}")
    if num_heads and (not num_kv_heads or num_heads % num_kv_heads):
        raise ValueError(f"query has {num_heads} heads, which is no multiple of the {num_kv_heads} heads of k_cache")
    if block_table is None and blocks != batch:
        raise ValueError(f"query has batch {batch} but k_cache has {blocks}; a cache in pages needs block_table")
    k_scale = _scale_of(k_scale, k_cache, "k_scale", "k_cache")
    v_scale = _scale_of(v_scale, v_cache, "v_scale", "v_cache")
    caches = [("k_cache", k_cache), ("v_cache", v_cache), ("k_scale", k_scale), ("v_scale", v_scale)]
    caches = [(name, array) for name, array in caches if array is not None]
    dtype = query.dtype if k_cache.dtype == np.int8 else _result_dtype(named + caches[:1])
    compute = compute_dtype(dtype)
    options = _options(is_causal, scale, window_size, softcap, alibi_slopes, sinks, batch, query, compute, named)
    rotary = _cache_rotary(rotary_base, rotary_dim, rotary_interleaved, head_dim)

    # 2. The new tokens and their places.
    starts = _counts(cache_seqlens, "cache_seqlens", batch)
    if isinstance(cache_seqlens, np.ndarray):
        named.append(("cache_seqlens", np.asarray(cache_seqlens)))
    block_table = _given(block_table, "block_table", named)
    new = 0
    if k is not None:
        tokens, k, v = _new_tokens(k, v, batch, num_kv_heads, (cache_dim, v_cache.shape[3]), k_cache.dtype)
        named += tokens
        new = k.shape[2]
        _check_writable(caches, named)
    if block_table is None:
        _check_seqlens(cache_seqlens, starts, new, block, "max_len of the cache")
    else:
        block_table = _block_table(block_table, batch)
        pages = block_table.shape[1]
        room = f"what the {pages} pages of block_table hold, {block} tokens each"
        _check_seqlens(cache_seqlens, starts, new, pages * block, room)
        _check_pages(block_table, starts, starts + new, blocks, block)
    totals = starts + new
    if rotary is not None:
        _check_angles(rotary, max(totals.max(initial=0), query.shape[2]), "rotary_base")

    # 3. The result.
    shape = (*query.shape[:3], v_cache.shape[3])
    out_array = _result(out, shape, dtype, shape[:3], compute, named + caches)
    state = CacheState(
        k_cache, v_cache, k_scale, v_scale, block_table, k, v, starts, totals, rotary, compute_dtype(k_cache.dtype)
    )
    return CacheCall(
        state=state,
        query=query,
        options=options,
        dtype=dtype,
        compute=compute,
        shape=shape,
        out=out_array,
        out_object=out,
        return_lse=return_lse,
        num_threads=num_threads,
    )


# ---------------------------------------------------------------- KVCache


def cache_sizes(batch, num_kv_heads, max_len, head_dim, v_head_dim):
    """The sizes of a KVCache as ints; v_head_dim None means head_dim."""
    named = (("batch", batch), ("num_kv_heads", num_kv_heads), ("max_len", max_len), ("head_dim", head_dim))
    *rows, head_dim = (_validate.positive_integer(size, name) for name, size in named)
    v_head_dim = head_dim if v_head_dim is None else _validate.positive_integer(v_head_dim, "v_head_dim")
    for name, width in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        # Of any dtype, so that scales fit too.
        _check_size((*rows, width), _FLOAT64.itemsize, f"a cache of this batch, num_kv_heads, max_len and {name}")
    return (*rows, head_dim, v_head_dim)


def appended(cache, k, v, lengths, seqlens):
    """The checked k and v of a KVCache's new tokens, and how many of them each entry takes, (B,) int64."""
    if k is None or v is None:
        raise ValueError(f"{'k' if k is None else 'v'} is None; expected k and v together")
    widths = (cache.head_dim, cache.v_head_dim)
    _, k, v = _new_tokens(k, v, cache.batch, cache.num_kv_heads, widths, cache.dtype)
    counts = np.full(cache.batch, k.shape[2], np.int64)
    if lengths is not None:
        given, lengths = lengths, _counts(lengths, "lengths", cache.batch)
        beyond = lengths > counts
        if beyond.any():
            b = int(beyond.argmax())
            raise ValueError(f"{_count_given(given, 'lengths', b)}; expected at most the {counts[b]} tokens of k")
        counts = lengths
    beyond = seqlens > cache.max_len - counts
    if beyond.any():
        b = int(beyond.argmax())
        raise ValueError(
            f"entry {b} would hold {seqlens[b]} + {counts[b]} tokens; expected at most {cache.max_len}, "
            "max_len of the cache"
        )
    return k, v, counts


def truncated(lengths, seqlens):
    """The lengths to which a KVCache is cut, (B,) int64, none above what it holds."""
    given, lengths = lengths, _counts(lengths, "lengths", seqlens.size)
    beyond = lengths > seqlens
    if beyond.any():
        b = int(beyond.argmax())
        raise ValueError(f"{_count_given(given, 'lengths', b)}; expected at most {seqlens[b]}, the tokens of entry {b}")
    return lengths


# ---------------------------------------------------------------- partial results, rotary positions


def merge_states(outs, lses):
    """The parts as (n, ..., L, Ev) and (n, ..., L)."""
    outs, lses = _input(as_array(outs, "outs"), "outs"), as_array(lses, "lses")
    if lses.dtype.type not in (np.float32, np.float64):
        raise TypeError(f"lses has dtype {lses.dtype}; expected float32 or float64")
    if outs.ndim < 3:
        raise ValueError(f"outs has shape {outs.shape}; expected at least 3 dimensions: states, queries and width")
    if lses.shape != outs.shape[:-1]:
        raise ValueError(f"lses has shape {lses.shape}; expected {outs.shape[:-1]}, that of outs without the width")
    return outs, _readable(lses, np.dtype(lses.dtype.type))


def rotary_call(x, positions, base, interleaved, rotary_dim):
    """Check the arguments of `apply_rotary`: x (..., L, E), positions broadcasting to (..., L), and a `Rotary`."""
    x = as_array(x, "x")
    dtype = _storage_dtype(x.dtype, "x")
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; expected at least 2 dimensions: length and width")
    positions = as_array(positions, "positions")
    if positions.dtype.kind not in "iuf":
        raise TypeError(f"positions has dtype {positions.dtype}; expected integers or floating numbers")
    with np.errstate(all="ignore"):
        farthest = np.abs(positions.astype(np.float64)).max(initial=0)  # NaN if there is one
    if not np.isfinite(farthest):
        raise ValueError("positions holds NaN or infinity in float64; expected finite numbers")
    target = (*x.shape[:-3], x.shape[-2])
    if not _validate._fits(positions.shape, target):
        raise ValueError(
            f"positions has shape {positions.shape}; expected one that broadcasts to {target}, "
            "the shape of x without heads and width"
        )
    if x.ndim > 2 and positions.ndim > 1:
        positions = positions[..., None, :]
    rotary = _rotary(base, rotary_dim, interleaved, x.shape[-1], ("base", "rotary_dim", "interleaved"))
    _check_angles(rotary, farthest, "base")
    return _readable(x, dtype), positions, rotary
