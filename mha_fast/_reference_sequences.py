"""Packed sequences, key/value caches, partial results and rotary positions in NumPy alone, for `mha_fast.reference`.

Each function is a loop over sequences around `reference.scaled_dot_product_attention`: slice, attend, put in place.
"""

import numpy as np

from mha_fast import _validate, _validate_sequences, reference

__all__ = ["KVCache", "apply_rotary", "attention_with_kvcache", "merge_states", "varlen_attention"]

# Tokens that a KVCache makes room for at first.
_FIRST_ROOM = 64


def merge_states(outs, lses):
    """Attention over all keys from attention over parts of them.

    Each part is the result of the same queries over other keys, with its log-sum-exp:

        lse = log(sum(exp(lses))),  out = sum(exp(lses - lse) outs)

    Parameters
    ----------
    outs : array_like, (n, ..., H, L, Ev)
        The parts' results on the first axis, or a sequence of them: float16, bfloat16, float32 or
        float64.
    lses : array_like, (n, ..., H, L)
        Their natural log-sum-exp, float32 or float64. A part without any visible key has -inf and
        changes nothing, whatever its result holds.

    Returns
    -------
    out : ndarray, (..., H, L, Ev)
        In the dtype of `outs`. Zeros where every part is empty, and NaN where a part is NaN.
    lse : ndarray, (..., H, L)
        In the dtype of `lses`, in which the weights are computed. -inf where every part is empty.

    Raises
    ------
    TypeError
        Another dtype.
    ValueError
        Shapes that do not fit.

    See Also
    --------
    scaled_dot_product_attention : ``return_lse=True`` gives the parts.

    Notes
    -----
    The normalizer of Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", as Dao
    et al. 2022, "FlashAttention", use it for blocks of keys. With `sinks`, give them to one part
    alone: each part that has them counts them.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_fast.reference import merge_states, scaled_dot_product_attention
    >>> query, key = np.zeros((1, 4)), np.ones((3, 4))
    >>> value = np.array([[1.0], [2.0], [6.0]])
    >>> parts = [
    ...     scaled_dot_product_attention(query, key[part], value[part], return_lse=True)
    ...     for part in (slice(0, 1), slice(1, 3), slice(3, 3))
    ... ]
    >>> out, lse = merge_states(*zip(*parts))
    >>> out.round(6).tolist(), np.exp(lse).round(6).tolist()
    ([[3.0]], [3.0])
    """
    outs, lses = _validate_sequences.merge_states(outs, lses)
    compute = _validate.compute_dtype(outs.dtype)
    with np.errstate(all="ignore"):
        # 1. Nothing overflows below the largest; -inf - -inf is NaN, so that empty rows take 0.
        empty = lses == -np.inf
        largest = lses.max(axis=0, initial=-np.inf)
        largest = np.where(largest == -np.inf, 0, largest).astype(lses.dtype, copy=False)
        # 2. The share of each part in the whole; only where all are empty is the sum 0.
        shares = np.exp(lses - largest)
        total = shares.sum(axis=0)
        shares /= np.where(total == 0, 1, total)
        # 3. 0 * NaN is NaN: what an empty part holds must not reach the sum.
        parts = np.where(empty[..., None], 0, outs.astype(compute, copy=False))
        out = (shares[..., None] * parts).sum(axis=0)
        return out.astype(outs.dtype, copy=False), largest + np.log(total)


def varlen_attention(
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k=None,
    *,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
    out=None,
    num_threads=None,
):
    """Attention of sequences of any lengths that lie packed behind each other, lower-right in each.

    Sequence b has the queries ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` and sees the keys
    ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]``; no padding anywhere.

    Parameters
    ----------
    query : array_like, (tokens_q, H, E)
        float16, bfloat16, float32 or float64; bool and integers become float64. Any strides.
    key : array_like, (tokens_k, H_kv, E)
    value : array_like, (tokens_k, H_kv, Ev)
    cu_seqlens_q : array_like of int32 or int64, (B + 1,)
        Offsets of the sequences: the first is 0, none decreases, the last is tokens_q. A sequence
        may be empty.
    cu_seqlens_k : array_like of int32 or int64, (B + 1,), optional
        The same for keys; by default those of the queries.
    is_causal : bool
        Query i of a sequence sees its key j only if ``j <= i + keys - queries``: its last query
        sees its last key.
    scale : float, optional
        Factor of the scores, ``1 / sqrt(E)`` by default.
    enable_gqa : bool
        Allow H to be a multiple of H_kv: query head h uses key/value head ``h // (H // H_kv)``.
    window_size : (int, int)
        Keys that a query sees to the left and right of its position ``i + keys - queries``, -1 for
        all.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``; 0 leaves them.
    alibi_slopes : array_like, (H,) or (B, H), optional
        Adds ``-slope * |i + keys - queries - j|`` to the scores.
    sinks : array_like, (H,), optional
        One more logit in the denominator, without a value.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    out : ndarray, optional
        Where the result is written: its exact shape and dtype, no overlap with an input.
    num_threads : int, optional
        Threads of the fast implementation; checked here, and not used.

    Returns
    -------
    out : ndarray, (tokens_q, H, Ev)
        In the result type of the three inputs. A query that sees no key gets zeros.
    lse : ndarray, (H, tokens_q)
        If asked for: float32, float64 for float64; -inf for such a query.

    Raises
    ------
    TypeError
        An argument of another type, or an array of another dtype, than listed above.
    ValueError
        Shapes that do not fit; offsets that do not start at 0, decrease, or do not end at the
        number of tokens; a number out of range.

    See Also
    --------
    scaled_dot_product_attention : the same for one length, with masks.

    Notes
    -----
    Vaswani et al. 2017, section 3.2.1. The packed form and its names are those of Dao et al. 2022,
    "FlashAttention".

    Examples
    --------
    Two sequences of 2 and 3 tokens:

    >>> import numpy as np
    >>> from mha_fast.reference import varlen_attention
    >>> query, key = np.zeros((5, 1, 4)), np.ones((5, 1, 4))
    >>> value = np.array([1.0, 3.0, 10.0, 20.0, 60.0]).reshape(5, 1, 1)
    >>> varlen_attention(query, key, value, [0, 2, 5], is_causal=True).ravel().tolist()
    [1.0, 2.0, 10.0, 15.0, 30.0]
    """
    call = _validate_sequences.varlen_call(
        query,
        key,
        value,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        return_lse=return_lse,
        out=out,
        num_threads=num_threads,
    )
    return attend_varlen(call)


def attend_varlen(call):
    """The result of a `VarlenCall`, as `varlen_attention` returns it."""
    out = np.empty(call.shape, call.dtype) if call.out is None else call.out_object
    out_heads = _validate.heads_first(out, "blhd") if call.out is None else call.out
    lse = np.empty(out_heads.shape[:2], call.compute)
    for b in range(call.q_starts.size - 1):
        queries, keys = (slice(starts[b], starts[b + 1]) for starts in (call.q_starts, call.k_starts))
        out_heads[:, queries], lse[:, queries] = _attend(
            call, b, call.query[:, queries], call.key[:, keys], call.value[:, keys]
        )
    return (out, lse) if call.return_lse else out


def _attend(call, b, query, key, value):
    """Sequence b alone, lower-right: (H, L, E) over (Hkv, S, E) -> out (H, L, Ev), lse (H, L)."""
    options = call.options
    out, lse = reference.scaled_dot_product_attention(
        *(array.astype(call.compute, copy=False) for array in (query, key, value)),
        is_causal=options.causal,
        scale=options.scale,
        enable_gqa=True,
        q_offset=key.shape[1] - query.shape[1],
        window_size=options.window,
        softcap=options.softcap,
        alibi_slopes=None if options.slopes is None else options.slopes[b],
        sinks=options.sinks,
        return_lse=True,
    )
    with np.errstate(all="ignore"):
        return out.astype(call.dtype, copy=False), lse


def attention_with_kvcache(
    query,
    k_cache,
    v_cache,
    k=None,
    v=None,
    *,
    cache_seqlens,
    block_table=None,
    k_scale=None,
    v_scale=None,
    is_causal=True,
    scale=None,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    rotary_base=None,
    rotary_dim=None,
    rotary_interleaved=False,
    return_lse=False,
    out=None,
    num_threads=None,
):
    """Write new keys and values into a cache, and attend to all that it holds then, lower-right.

    Entry b holds ``total = cache_seqlens[b] + n`` tokens after the write, n being the tokens of `k`
    and `v`. Query i stands at position ``i + total - L``, so that the last one sees the last token.

    Parameters
    ----------
    query : array_like, (B, H, L, E)
        float16, bfloat16, float32 or float64; bool and integers become float64. H is a multiple of
        H_kv: query head h uses key/value head ``h // (H // H_kv)``.
    k_cache : ndarray, (B, H_kv, max_len, E), or with a `block_table` (blocks, H_kv, block, E)
        float16, bfloat16, float32, float64 or int8; any strides, but aligned and in native byte
        order, because a cache is never copied. Beyond an entry's total it may hold anything.
    v_cache : ndarray
        The same with the width Ev.
    k : array_like, (B, H_kv, n, E), optional
        The new keys, written in place to the tokens ``cache_seqlens[b]`` and following, before
        anything is read. They are converted to float32 (float64 in a float64 cache), rotated there
        if that is asked for, and rounded to the dtype of the cache.
    v : array_like, (B, H_kv, n, Ev), optional
        The new values, with `k` or not at all.
    cache_seqlens : int or array_like of int, (B,)
        Tokens that each entry holds before the write.
    block_table : array_like of int32 or int64, (B, pages), optional
        Token t of entry b lies in block ``block_table[b, t // block]`` at ``t % block``. Numbers
        behind the last page that an entry needs are never looked at. Entries may share the pages
        that they read, and none that they write.
    k_scale, v_scale : ndarray of float32, (B, H_kv, max_len) or (blocks, H_kv, block)
        Beside int8 caches, and only there: a number is its integer times the scale of its token and
        head. New tokens are written with ``scale = max(abs(row)) / 127`` and
        ``rint(row / scale)``, so that each number is off by at most ``max(abs(row)) / 254`` and the
        roundings of float32.
    is_causal : bool
        Query i sees token j only if ``j <= i + total - L``.
    scale : float, optional
        Factor of the scores, ``1 / sqrt(E)`` by default.
    window_size : (int, int)
        Tokens that a query sees to the left and right of its position, -1 for all.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``; 0 leaves them.
    alibi_slopes : array_like, (H,) or (B, H), optional
        Adds ``-slope * |i + total - L - j|`` to the scores.
    sinks : array_like, (H,), optional
        One more logit in the denominator, without a value.
    rotary_base : float, optional
        Rotate queries and new keys by their positions, as `apply_rotary` does with this `base`;
        keys stay rotated in the cache. None rotates nothing.
    rotary_dim : int, optional
    rotary_interleaved : bool
        `rotary_dim` and `interleaved` of `apply_rotary`.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    out : ndarray, optional
        Where the result is written: its exact shape and dtype, no overlap with an input or cache.
    num_threads : int, optional
        Threads of the fast implementation; checked here, and not used.

    Returns
    -------
    out : ndarray, (B, H, L, Ev)
        In the result type of the query and the caches, for int8 caches in that of the query. A
        query that sees no token gets zeros.
    lse : ndarray, (B, H, L)
        If asked for: float32, float64 for a float64 result; -inf for such a query.

    Raises
    ------
    TypeError
        An argument of another type, or an array of another dtype, than listed above.
    ValueError
        Shapes that do not fit; more tokens than the cache has room for; a page that does not exist,
        or that two places of the table would write to; NaN, infinity or numbers from 1.7e38 on for
        an int8 cache; a cache that cannot be written, or shares memory; a number out of range.
        Nothing is written then.

    See Also
    --------
    KVCache : storage that grows, and its lengths.

    Notes
    -----
    Vaswani et al. 2017, section 3.2.1. Pages: Kwon et al. 2023, "Efficient Memory Management for
    Large Language Model Serving with PagedAttention".

    Examples
    --------
    One entry, one head; the second call sees the token of the first one too:

    >>> import numpy as np
    >>> from mha_fast.reference import attention_with_kvcache
    >>> k_cache, v_cache = np.zeros((1, 1, 8, 4)), np.zeros((1, 1, 8, 1))
    >>> query = token = np.zeros((1, 1, 1, 4))
    >>> for length, number in enumerate([3.0, 5.0]):
    ...     v = np.full((1, 1, 1, 1), number)
    ...     out = attention_with_kvcache(query, k_cache, v_cache, token, v, cache_seqlens=length)
    >>> out.item()
    4.0
    """
    call = _validate_sequences.cache_call(
        query,
        k_cache,
        v_cache,
        k=k,
        v=v,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        k_scale=k_scale,
        v_scale=v_scale,
        is_causal=is_causal,
        scale=scale,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        rotary_base=rotary_base,
        rotary_dim=rotary_dim,
        rotary_interleaved=rotary_interleaved,
        return_lse=return_lse,
        out=out,
        num_threads=num_threads,
    )
    return attend_cache(call)


def attend_cache(call):
    """The result of a `CacheCall`, as `attention_with_kvcache` returns it; new tokens are written."""
    state, batch = call.state, call.shape[0]
    out = np.empty(call.shape, call.dtype) if call.out is None else call.out_object
    out_array = out if call.out is None else call.out
    lse = np.empty(call.shape[:3], call.compute)
    query = rotated_query(call)
    write_tokens(state)
    for b in range(batch):
        key = _tokens(state, b, state.k_cache, state.k_scale, call.compute)
        value = _tokens(state, b, state.v_cache, state.v_scale, call.compute)
        out_array[b], lse[b] = _attend(call, b, query[b], key, value)
    return (out, lse) if call.return_lse else out


def rotated_query(call):
    """The query of a `CacheCall` in the dtype of the computation, each row rotated by its position."""
    query, state, queries = call.query.astype(call.compute, copy=False), call.state, call.shape[2]
    if state.rotary is None:
        return query
    with np.errstate(all="ignore"):
        return _rotated(query, _positions(state.totals - queries, queries), state.rotary)


def write_tokens(state):
    """Write the new tokens of a `CacheState` to their places in the caches."""
    if state.k is None:
        return
    # 1. Where each new token comes from and goes to, one number a token.
    counts = state.totals - state.starts
    entry = np.repeat(np.arange(counts.size), counts)
    index = np.arange(entry.size) - np.repeat(np.cumsum(counts) - counts, counts)
    row, slot = entry, state.starts[entry] + index
    if state.block_table is not None:
        block = state.k_cache.shape[2]
        row, slot = state.block_table[entry, slot // block], slot % block
    # 2. What is to be written: (tokens, Hkv, width).
    writes = []
    with np.errstate(all="ignore"):
        k = state.k.astype(state.compute, copy=False)
        if state.rotary is not None:
            k = _rotated(k, _positions(state.starts, k.shape[2]), state.rotary)
        for new, cache, scale in ((k, state.k_cache, state.k_scale), (state.v, state.v_cache, state.v_scale)):
            tokens = new.swapaxes(1, 2)[entry, index].astype(state.compute, copy=False)
            if scale is None:
                writes.append((cache, tokens))
            else:
                writes += zip((cache, scale), _quantized(tokens), strict=True)
        # 3. Nothing before here: if memory runs out, the cache is as it was.
        for array, rows in writes:
            array[row, :, slot] = rows


def _quantized(rows):
    """Rows (..., width) as int8 and a float32 scale (...) for each: rows = int8 * scale, to a half of it."""
    scale = np.abs(rows).max(axis=-1, initial=0) / np.float32(127)
    # A row of zeros, or of numbers whose scale underflows to 0, is all 0.
    steps = rows / np.where(scale == 0, np.float32(np.inf), scale)[..., None]
    return np.clip(np.rint(steps), -127, 127).astype(np.int8), scale


def _tokens(state, b, cache, scale, dtype):
    """What entry b holds after the write: (Hkv, totals[b], width) in `dtype`."""
    total = state.totals[b]
    if state.block_table is None:
        rows, scales = cache[b], None if scale is None else scale[b]
    else:
        # (pages, Hkv, block, width) -> (Hkv, pages * block, width)
        pages = state.block_table[b, : -(-total // cache.shape[2])]
        _, heads, block, width = cache.shape
        rows = cache[pages].swapaxes(0, 1).reshape(heads, pages.size * block, width)
        scales = None if scale is None else scale[pages].swapaxes(0, 1).reshape(heads, pages.size * block)
    rows = rows[:, :total].astype(dtype, copy=False)
    with np.errstate(all="ignore"):
        return rows if scales is None else rows * scales[:, :total, None].astype(dtype, copy=False)


class KVCache:
    """Keys and values of the tokens seen so far, for one attention layer; room grows up to a limit.

    Parameters
    ----------
    batch : int
    num_kv_heads : int
    max_len : int
        The most tokens that an entry may hold. Room is made as tokens come, at least twice as much
        each time, and never for more than this.
    head_dim : int
        Width of a key.
    v_head_dim : int, optional
        Width of a value, `head_dim` by default.
    dtype : float16, bfloat16, float32, float64 or int8
        Of the storage, float32 by default. int8 has a float32 scale for each token and head; a
        number is then off by at most 1 / 254 of the largest in its row, and the roundings of
        float32.

    Attributes
    ----------
    seqlens : ndarray of int64, (batch,)
        Tokens of each entry, a copy.
    k_cache : ndarray, (batch, num_kv_heads, room, head_dim)
    v_cache : ndarray, (batch, num_kv_heads, room, v_head_dim)
    k_scale, v_scale : ndarray of float32, (batch, num_kv_heads, room), or None
        The storage, as `attention_with_kvcache` takes it. Other arrays take its place when the room
        grows.
    batch, num_kv_heads, max_len, head_dim, v_head_dim : int
    dtype : numpy.dtype

    Raises
    ------
    TypeError
        A number that is no integer, another dtype.
    ValueError
        A number below 1; more than an array can hold.

    See Also
    --------
    attention_with_kvcache : the same on arrays of the caller's, and on pages.

    Notes
    -----
    A refused call leaves the cache as it was. It belongs to one thread at a time.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_fast.reference import KVCache
    >>> cache = KVCache(batch=2, num_kv_heads=1, max_len=100, head_dim=4)
    >>> prompt = np.ones((2, 1, 5, 4), np.float32)
    >>> cache.append(prompt, prompt, lengths=[5, 3])
    >>> token = np.ones((2, 1, 1, 4), np.float32)
    >>> cache.attend(token, token, token).shape
    (2, 1, 1, 4)
    >>> cache.seqlens.tolist()
    [6, 4]
    """

    # The fast class has the fast function here.
    _attention = staticmethod(attention_with_kvcache)

    def __init__(self, batch, num_kv_heads, max_len, head_dim, v_head_dim=None, dtype=np.float32):
        sizes = _validate_sequences.cache_sizes(batch, num_kv_heads, max_len, head_dim, v_head_dim)
        self.batch, self.num_kv_heads, self.max_len, self.head_dim, self.v_head_dim = sizes
        self.dtype = _validate_sequences.cache_dtype(dtype)
        self._seqlens = np.zeros(self.batch, np.int64)
        self._use(self._storage(0))

    @property
    def seqlens(self):
        """Tokens of each entry, (batch,) int64, a copy."""
        return self._seqlens.copy()

    def append(self, k, v, *, lengths=None):
        """Add tokens behind those of each entry.

        Parameters
        ----------
        k : array_like, (batch, num_kv_heads, n, head_dim)
        v : array_like, (batch, num_kv_heads, n, v_head_dim)
            float16, bfloat16, float32 or float64; bool and integers become float64. They are
            rounded to the dtype of the cache.
        lengths : int or array_like of int, (batch,), optional
            Tokens of each entry that count, the first ones; all n by default.

        Raises
        ------
        TypeError
            Another dtype.
        ValueError
            Shapes that do not fit, `lengths` beyond n, more tokens than `max_len`; NaN, infinity or
            numbers from 1.7e38 on for an int8 cache.

        Examples
        --------
        >>> import numpy as np
        >>> from mha_fast.reference import KVCache
        >>> cache = KVCache(2, 1, 100, 4)
        >>> cache.append(np.ones((2, 1, 5, 4)), np.ones((2, 1, 5, 4)), lengths=[5, 3])
        >>> cache.seqlens.tolist()
        [5, 3]
        """
        k, v, counts = _validate_sequences.appended(self, k, v, lengths, self._seqlens)
        totals = self._seqlens + counts
        storage = self._room_for(totals)
        write_tokens(
            _validate_sequences.CacheState(
                **storage,
                block_table=None,
                k=k,
                v=v,
                starts=self._seqlens,
                totals=totals,
                rotary=None,
                compute=_validate.compute_dtype(self.dtype),
            )
        )
        self._use(storage)
        self._seqlens = totals

    def attend(self, query, k=None, v=None, **options):
        """Add tokens, if any are given, and attend to all that each entry holds then, lower-right.

        Parameters
        ----------
        query : array_like, (batch, H, L, head_dim)
        k : array_like, (batch, num_kv_heads, n, head_dim), optional
        v : array_like, (batch, num_kv_heads, n, v_head_dim), optional
        **options
            Those of `attention_with_kvcache` but for what the cache itself gives: `is_causal`,
            `scale`, `window_size`, `softcap`, `alibi_slopes`, `sinks`, `rotary_base`, `rotary_dim`,
            `rotary_interleaved`, `return_lse`, `out`, `num_threads`.

        Returns
        -------
        out : ndarray, (batch, H, L, v_head_dim)
        lse : ndarray, (batch, H, L)
            If asked for.

        Raises
        ------
        TypeError, ValueError
            As `append` and `attention_with_kvcache` do.

        Examples
        --------
        >>> import numpy as np
        >>> from mha_fast.reference import KVCache
        >>> cache = KVCache(1, 2, 100, 4)
        >>> token = np.ones((1, 2, 1, 4), np.float32)
        >>> cache.attend(np.ones((1, 8, 1, 4), np.float32), token, token).shape
        (1, 8, 1, 4)
        """
        totals = self._seqlens
        if k is not None or v is not None:
            k, v, counts = _validate_sequences.appended(self, k, v, None, self._seqlens)
            totals = self._seqlens + counts
        storage = self._room_for(totals)
        result = self._attention(query, k=k, v=v, cache_seqlens=self._seqlens, block_table=None, **storage, **options)
        self._use(storage)
        self._seqlens = totals
        return result

    def truncate(self, lengths):
        """Forget the last tokens.

        Parameters
        ----------
        lengths : int or array_like of int, (batch,)
            Tokens that each entry keeps, at most those that it holds.

        Raises
        ------
        TypeError
            No integers.
        ValueError
            Another shape, a negative number, or one above what the entry holds.

        Examples
        --------
        >>> import numpy as np
        >>> from mha_fast.reference import KVCache
        >>> cache = KVCache(2, 1, 100, 4)
        >>> cache.append(np.ones((2, 1, 5, 4)), np.ones((2, 1, 5, 4)))
        >>> cache.truncate([5, 2])
        >>> cache.seqlens.tolist()
        [5, 2]
        """
        self._seqlens = _validate_sequences.truncated(lengths, self._seqlens)

    def _storage(self, room):
        """Empty storage for this many tokens an entry, by the names of the attributes and arguments."""
        rows = (self.batch, self.num_kv_heads, room)
        scaled = self.dtype == np.int8
        return {
            "k_cache": np.zeros((*rows, self.head_dim), self.dtype),
            "v_cache": np.zeros((*rows, self.v_head_dim), self.dtype),
            "k_scale": np.zeros(rows, np.float32) if scaled else None,
            "v_scale": np.zeros(rows, np.float32) if scaled else None,
        }

    def _room_for(self, totals):
        """Storage with room for these lengths: the present one, or a larger copy of it."""
        present = {name: getattr(self, name) for name in ("k_cache", "v_cache", "k_scale", "v_scale")}
        needed, room = int(totals.max()), self.k_cache.shape[2]
        if needed <= room:
            return present
        larger = self._storage(min(self.max_len, max(needed, 2 * room, _FIRST_ROOM)))
        kept = int(self._seqlens.max())
        for name, array in present.items():
            if array is not None:
                larger[name][:, :, :kept] = array[:, :, :kept]
        return larger

    def _use(self, storage):
        self.k_cache, self.v_cache = storage["k_cache"], storage["v_cache"]
        self.k_scale, self.v_scale = storage["k_scale"], storage["v_scale"]


def apply_rotary(x, positions, *, base=10000.0, interleaved=False, rotary_dim=None):
    """Rotary position embedding: rotate pairs of numbers of each row by angles that its position gives.

    Pair p of a row at position m turns by ``m * base ** (-2 p / rotary_dim)``, so that the product
    of a rotated query and a rotated key depends on the difference of their positions alone.

    Parameters
    ----------
    x : array_like, (..., H, L, E) or (L, E)
        Queries or keys: float16, bfloat16, float32 or float64; bool and integers become float64.
    positions : array_like of real numbers, broadcasting to (..., L)
        The leading dimensions without heads, and the rows: (L,) or (B, L) for (B, H, L, E). They
        may be negative or fractions.
    base : float
        Above 0.
    interleaved : bool
        False pairs number p with number ``p + rotary_dim / 2`` (GPT-NeoX, Llama), True pairs
        neighbours, ``2 p`` with ``2 p + 1`` (the paper, GPT-J).
    rotary_dim : int, optional
        Rotate only the first numbers of a row, this even number of them; E by default.

    Returns
    -------
    ndarray, the shape of x
        In its dtype. Angles are computed in float64, the rotation in float32, for float64 in
        float64.

    Raises
    ------
    TypeError
        An argument of another type, or an array of another dtype, than listed above.
    ValueError
        Shapes that do not fit, a width or `rotary_dim` that is odd, a `base` that is not above 0;
        positions or angles that are NaN or infinite in float64.

    Notes
    -----
    Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".

    Examples
    --------
    >>> import numpy as np
    >>> from mha_fast.reference import apply_rotary
    >>> apply_rotary([[1.0, 0.0]], [np.pi / 2]).round(6).tolist()
    [[0.0, 1.0]]
    """
    x, positions, rotary = _validate_sequences.rotary_call(x, positions, base, interleaved, rotary_dim)
    compute = _validate.compute_dtype(x.dtype)
    with np.errstate(all="ignore"):
        return _rotated(x.astype(compute, copy=False), positions, rotary).astype(x.dtype, copy=False)


def _rotated(x, positions, rotary):
    """x (..., L, E), float32 or float64, with its rows turned; positions broadcast to (..., L)."""
    half = rotary.dim // 2
    angles = positions[..., None].astype(np.float64) * rotary.frequencies
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    pairs = (
        (slice(0, rotary.dim, 2), slice(1, rotary.dim, 2))
        if rotary.interleaved
        else (slice(0, half), slice(half, rotary.dim))
    )
    first, second = (x[..., part] for part in pairs)
    rotated = x.copy()
    rotated[..., pairs[0]] = first * cos - second * sin
    rotated[..., pairs[1]] = second * cos + first * sin
    return rotated


def _positions(first, count):
    """Positions (B, 1, count) of the tokens from `first` (B,) on, for rows (B, H, count, E)."""
    return first[:, None, None] + np.arange(count)
