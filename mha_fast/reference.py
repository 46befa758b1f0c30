"""Multi-head attention in NumPy alone: the meaning of every argument, written to be read.

    scores  = cap(scale * Q K^T) - slope * distance + bias,  cap(x) = softcap * tanh(x / softcap)
    weights = softmax(scores), over the keys that the query sees
    output  = weights V

Vaswani et al. 2017, "Attention Is All You Need", sections 3.2 and 3.3. The class keeps the names,
the drawing of weights and the `valid_lens` of the MultiHeadAttention class of "Dive into Deep
Learning", section 11.5, in its NumPy form.

The fast implementation has the same functions with the same signatures, results and errors.
Two things differ from the textbook formula. A query that sees no key gets 0, not NaN, and
whether it sees one is decided by masks, lengths and positions, never by values. And what a
query does not see never touches its result, even where NaN or infinity lies there: 0 * NaN
is NaN, so hidden values must not reach a product.

float16 and bfloat16 are read and written only; between lies float32, and one rounding at the end.
The scores of one batch element are held at once: memory grows with queries times keys.
"""

import copy

import numpy as np

from mha_fast import _validate, _weights

# This module is what those functions loop over: they look its function up when they are called.
from mha_fast._reference_sequences import (
    KVCache,
    apply_rotary,
    attention_with_kvcache,
    merge_states,
    varlen_attention,
)

__all__ = [
    "KVCache",
    "MultiHeadAttention",
    "PositionWiseFFN",
    "alibi_slopes",
    "apply_rotary",
    "attention_with_kvcache",
    "merge_states",
    "scaled_dot_product_attention",
    "varlen_attention",
]


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
    window_size=(-1, -1),
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
    """Attention of queries over keys, as weighted means of values.

    H and H_kv are the numbers of query heads and of key/value heads, L and S the numbers of
    queries and keys, E the width of a query and a key, Ev the width of a value.

    Parameters
    ----------
    query : array_like, (..., H, L, E)
        float16, bfloat16 (of the package ml_dtypes), float32 or float64; bool and integers become
        float64. 2-D arrays are one head, 3-D arrays have the heads first. Leading dimensions
        broadcast. Any strides.
    key : array_like, (..., H_kv, S, E)
    value : array_like, (..., H_kv, S, Ev)
    attn_mask : array_like, broadcasting to (..., H, L, S), optional
        bool: True where the query may attend to the key. Floating: added to the scores, after all
        that is below; -inf hides the key, a finite number is a bias however large. It keeps this
        order of axes in both layouts and never changes the dtype of the result.
    dropout_p : float
        Must be 0: nothing is ever dropped.
    is_causal : bool, "upper_left" or "lower_right"
        Query i sees key j only if ``j <= i + offset``. The offset is `q_offset` if that is given;
        else 0 for True and "upper_left", and the number of keys minus L for "lower_right", under
        lengths without the queries' axis counted for each batch element.
    scale : float, optional
        Factor of the scores, ``1 / sqrt(E)`` by default. May be 0 or negative.
    enable_gqa : bool
        Allow H to be a multiple of H_kv: query head h uses key/value head ``h // (H // H_kv)``.
    valid_lens : array_like of real numbers, (...) or (..., L), optional
        Query i sees key j only if ``j < valid_lens``; the leading dimensions without heads, with
        or without the queries. Beyond S means all keys, at or below 0 none.
    q_offset : int or array_like of int, (...), optional
        Position of query 0 among the keys, 0 by default. Makes nothing causal by itself; window and
        slopes count from ``i + offset`` too, with the offset of `is_causal` where that names one.
    window_size : (int, int)
        (left, right): query i sees key j only if ``i + offset - left <= j <= i + offset + right``;
        -1 is no limit.
    softcap : float
        Above 0: a scaled score s becomes ``softcap * tanh(s / softcap)``, an infinite one +-softcap.
    alibi_slopes : array_like, (H,) or (..., H), optional
        ``slope * |i + offset - j|`` is subtracted from the scores, after the cap. Finite; such a
        bias hides nothing, however large. See `alibi_slopes`.
    sinks : array_like, (H,), optional
        For each head the logit of one more key that every query sees and that has no value: it
        stands in the denominator of the softmax only, neither scaled nor capped nor masked. -inf
        is none.
    layout : "bhld" or "blhd"
        "blhd" takes and returns (..., L, H, E).
    return_lse, return_weights : bool
        Also return the log-sum-exp of the scores, the weights.
    weights_rows : array_like of int, (R,), optional
        Return the weights of these queries only, in this order; negative ones count from the end.
    out : ndarray, optional
        Where the result is written: its exact shape and dtype, no overlap with an input.
    num_threads : int, optional
        Threads of the fast implementation; checked here, and not used.

    Returns
    -------
    out : ndarray, (..., H, L, Ev)
        In the dtype of the three inputs if they share one; different ones meet in float64 if one of
        them is that, else in float32. The computation is in that dtype, for float16 and bfloat16 in
        float32 with one rounding at the end. A query that sees no key gets zeros.
    lse : ndarray, (..., H, L)
        If asked for: the natural logarithm of the sum of exponentials, in the dtype of the
        computation; -inf for such a query, or the sink.
    weights : ndarray, (..., H, L, S), or (..., H, R, S) with `weights_rows`
        If asked for: what the values were weighted with, in the dtype of the computation; 0 for
        hidden keys. With a sink they do not sum to 1.

    Raises
    ------
    TypeError
        An argument of another type, or an array of another dtype, than listed above; integers or
        bool together with bfloat16.
    ValueError
        Shapes that do not fit, a `dropout_p` other than 0, NaN in `valid_lens`, an infinite or NaN
        `scale`, `softcap` or slope, a sink that is NaN or inf, a negative `softcap`, a window below
        -1, `weights_rows` out of range or without `return_weights`, `q_offset` beside a named
        alignment, an `out` that is read-only, overlaps, or has another shape.

    Warns
    -----
    UserWarning
        ``is_causal=True`` without `q_offset` and with L < S, which is seldom what is meant.

    See Also
    --------
    MultiHeadAttention : the layer with its four projections.

    Notes
    -----
    Vaswani et al. 2017, section 3.2.1. Windows: Beltagy et al. 2020, "Longformer". Slopes: Press et
    al. 2022, "Train Short, Test Long". The cap: Gemma Team 2024, "Gemma 2". Sinks: Xiao et al. 2024,
    "Efficient Streaming Language Models with Attention Sinks".

    Examples
    --------
    Scores of 0 weigh the visible keys alike:

    >>> import numpy as np
    >>> from mha_fast.reference import scaled_dot_product_attention
    >>> query, key = np.zeros((2, 4)), np.ones((3, 4))
    >>> value = np.array([[1.0], [2.0], [6.0]])
    >>> scaled_dot_product_attention(query, key, value).ravel().tolist()
    [3.0, 3.0]
    >>> scaled_dot_product_attention(query, key, value, valid_lens=[2, 0]).ravel().tolist()
    [1.5, 0.0]

    Each query sees itself and the key before it, and a sink of logit 0 takes its share:

    >>> options = {"window_size": (1, 0), "sinks": [0.0], "return_weights": True, "weights_rows": [-1]}
    >>> out, weights = scaled_dot_product_attention(key, key, value, scale=0, **options)
    >>> weights.round(2).tolist()
    [[0.0, 0.33, 0.33]]
    """
    call = _validate.attention_call(
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
    lead, (num_heads, q_len) = call.query.shape[:-3], call.query.shape[-3:-1]
    kv_len = call.key.shape[-2]
    if out is None:
        out = np.empty(call.shape, call.dtype)
    out_heads = _validate.heads_first(out, call.layout) if call.out is None else call.out
    lse = np.empty((*lead, num_heads, q_len), call.compute)
    rows = slice(None) if call.weights_rows is None else call.weights_rows
    num_rows = q_len if call.weights_rows is None else len(rows)
    weights = np.empty((*lead, num_heads, num_rows, kv_len), call.compute) if return_weights else None

    # Overflow and NaN of the caller's numbers go where IEEE arithmetic leads them, silently.
    with np.errstate(all="ignore"):
        # Without rows nothing is left to do, however many batch elements a broadcast view has.
        for b in np.ndindex(lead) if lse.size else ():
            key_heads, value_heads = _one_per_query_head(call, b)
            seen = _visible(call, b)
            scores = _scores(call, b, key_heads)
            all_weights, lse[b] = _softmax(scores, seen, call.sinks)
            # A query that finds nothing but -inf looks at no value: with a sink its result is 0 whatever they hold.
            finds = (seen & (scores != -np.inf)).any(axis=-1, keepdims=True)
            out_heads[b] = _weighted_values(all_weights, value_heads, seen & finds)
            if return_weights:
                weights[b] = all_weights[:, rows]

    if not call.num_head_axes:
        lse = lse[0]
        weights = weights[0] if return_weights else None
    results = (out, *([lse] if return_lse else []), *([weights] if return_weights else []))
    return results if len(results) > 1 else out


def _one_per_query_head(call, b):
    """Keys (H, S, E) and values (H, S, Ev) of batch element b, in the dtype of the computation."""
    num_heads, num_kv_heads = call.query.shape[-3], call.key.shape[-3]
    group = num_heads // num_kv_heads if num_kv_heads else 1
    key, value = (array[b].astype(call.compute, copy=False) for array in (call.key, call.value))
    if group == 1:
        return key, value
    # Neighbouring query heads share a key/value head: 0 0 1 1, not 0 1 0 1.
    return np.repeat(key, group, axis=0), np.repeat(value, group, axis=0)


def _steps_back(call, b):
    """(L, S) int64: how many keys back from its own position a query finds a key, below 0 for keys ahead."""
    i, j = np.arange(call.query.shape[-2])[:, None], np.arange(call.key.shape[-2])
    return i + call.offset[b] - j


def _visible(call, b):
    """(H, L, S) bool, True where the query sees the key: the intersection of all that hides."""
    num_heads, q_len = call.query.shape[-3:-1]
    kv_len = call.key.shape[-2]
    left, right = call.window
    if call.causal:
        right = 0
    seen = np.ones((1, q_len, kv_len), bool)
    if call.lengths is not None:
        seen = seen & (np.arange(kv_len) < call.lengths[b][:, None])
    if left >= 0:
        seen = seen & (_steps_back(call, b) <= left)
    if right >= 0:
        seen = seen & (_steps_back(call, b) >= -right)
    if call.mask is not None:
        mask = call.mask[b]
        # Bytes, for a uint8 array viewed as bool may hold others than 0 and 1.
        seen = seen & (mask.view(np.uint8) != 0 if mask.dtype == bool else mask != -np.inf)
    return np.broadcast_to(seen, (num_heads, q_len, kv_len))


def _scores(call, b, key):
    """(H, L, S): the capped scale * Q K^T with all biases, for all pairs, the hidden ones too."""
    query = call.query[b].astype(call.compute, copy=False)
    scores = (query * call.compute.type(call.scale)) @ key.swapaxes(-1, -2)
    if call.softcap:
        softcap = call.compute.type(call.softcap)
        scores = softcap * np.tanh(scores / softcap)
    if call.slopes is not None:
        # In float64, for a distance may have 63 bits; a product beyond the range is a bias all the same.
        slopes, distance = call.slopes[b].astype(np.float64), np.abs(_steps_back(call, b))
        limits = np.finfo(call.compute)
        scores = _biased(scores, np.clip(-slopes[:, None, None] * distance, limits.min, limits.max))
    if call.mask is not None and call.mask.dtype != bool:
        scores = _biased(scores, call.mask[b])
    return scores


def _biased(scores, bias):
    """scores + bias, where a finite bias hides nothing: neither its cast nor the sum makes -inf of finite numbers."""
    bias = _validate.rounded(bias, scores.dtype)
    biased = scores + bias
    finite = np.isfinite(scores) & np.isfinite(bias)
    return np.where(finite, np.maximum(biased, np.finfo(scores.dtype).min), biased)


def _softmax(scores, seen, sinks):
    """Weights (H, L, S) and log-sum-exp (H, L) of the visible scores of each query and the sink (H,) of its head."""
    # 1. Hidden scores are replaced, whatever they are; adding -inf would keep a NaN.
    dtype = scores.dtype
    scores = np.where(seen, scores, dtype.type(-np.inf))
    sink = dtype.type(-np.inf) if sinks is None else sinks[:, None, None]
    # 2. Nothing overflows below the largest score. -inf - -inf is NaN: where nothing stands in the sum, take 0.
    nothing = ~seen.any(axis=-1, keepdims=True) & (sink == -np.inf)
    row_max = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    row_max = np.where(nothing, dtype.type(0), row_max)
    exponentials = np.exp(scores - row_max)
    # 3. A NaN that is seen makes the whole row NaN.
    row_sum = exponentials.sum(axis=-1, keepdims=True) + np.exp(sink - row_max)
    weights = np.where(seen, exponentials / np.where(nothing, dtype.type(1), row_sum), dtype.type(0))
    lse = np.where(nothing, dtype.type(-np.inf), row_max + np.log(row_sum))
    return weights, lse[..., 0]


def _weighted_values(weights, value, seen):
    """(H, L, Ev): weights V, where NaN and infinities in V reach only the queries that see them."""
    finite = np.isfinite(value)
    if finite.all():
        return weights @ value
    result = weights @ np.where(finite, value, 0)
    for head, j in np.argwhere(~finite.all(axis=-1)):
        rows = seen[head, :, j]
        entries = np.where(finite[head, j], 0, value[head, j])
        result[head, rows] += weights[head, rows, j, None] * entries
    return result


def alibi_slopes(num_heads):
    """Slopes for `scaled_dot_product_attention` that let heads look back over different distances.

    Parameters
    ----------
    num_heads : int

    Returns
    -------
    ndarray, (num_heads,)
        float64. For n heads, n a power of two, the powers of ``2**(-8 / n)`` from the first to the
        n-th. For another number those of the power of two below it, followed by every second slope
        of twice as many heads, from the first on.

    Raises
    ------
    TypeError, ValueError
        `num_heads` is no integer, or below 1.

    Notes
    -----
    Press et al. 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation", section 3, and the rule of its published code for other numbers of heads.

    Examples
    --------
    >>> from mha_fast.reference import alibi_slopes
    >>> alibi_slopes(8)[:3].tolist()
    [0.5, 0.25, 0.125]
    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    num_heads = _validate.slope_count(num_heads)
    power = 1 << (num_heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4.0 / power * np.arange(1, 2 * (num_heads - power), 2))
    return np.concatenate([slopes, between])


class MultiHeadAttention(_weights.AttentionWeights):
    """Multi-head attention layer with its four projections.

    Q = X W_q + b_q, K = Y W_k + b_k and V = Z W_v + b_v are split into heads; each head attends by
    itself; the heads are joined and projected by W_o and b_o.

    Parameters
    ----------
    num_hiddens : int
        Width of the layer, a multiple of `num_heads`.
    num_heads : int
        Number of query heads, each of depth ``num_hiddens // num_heads``.
    dropout : float
        At least 0 and below 1. Stored and never used: there is no training mode, and nothing is dropped.
    bias : bool
        Draw the biases; otherwise they are four arrays of zeros. They are always added.
    num_kv_heads : int, optional
        Number of key/value heads, a divisor of `num_heads`, which is the default.
    dtype : float32 or float64, optional
        Of the weights and biases, to which they are cast after the draw. float64 by default.
    rng : int or numpy.random.Generator, optional
        Source of the weights; ``numpy.random.rand``, and so `numpy.random.seed`, by default.

    Attributes
    ----------
    W_q : ndarray, (width of queries, num_hiddens)
    W_k, W_v : ndarray, (width of keys or values, num_kv_heads * depth)
    W_o : ndarray, (num_hiddens, num_hiddens)
        Uniform in [0, 1), drawn in the order W_q, W_k, W_v, W_o and applied as ``X @ W``. All
        input widths are `num_hiddens` until another array is assigned; weights and biases may be
        assigned or edited at any time between calls.
    b_q, b_k, b_v, b_o : ndarray, (columns of the W of the same letter,)
        Drawn in this order, after the weights.
    num_hiddens, num_heads, num_kv_heads : int
    d_k, d_v : int
        The depth of a head.
    dropout : float
        As it was given; it changes no result.
    attention_weights : ndarray, (batch, num_heads, L, S), or None
        Of the last call with ``need_weights=True``.

    Raises
    ------
    TypeError
        An argument of another type, or another dtype, than listed above.
    ValueError
        Numbers that are not positive or do not divide, a `dropout` outside its range.

    Notes
    -----
    Vaswani et al. 2017, section 3.2.2. Names, shapes and draws are those of the NumPy form of the
    class in "Dive into Deep Learning", section 11.5: after the same `numpy.random.seed` both are
    the same layer. Two departures: a query that sees no key attends to nothing and gives
    ``0 @ W_o + b_o``, and float32 weights with float32 inputs give float32.

    A layer may be called from several threads at once, except with ``need_weights=True``.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_fast.reference import MultiHeadAttention
    >>> layer = MultiHeadAttention(num_hiddens=100, num_heads=5, dropout=0.5)
    >>> queries, keys = np.random.rand(2, 4, 100), np.random.rand(2, 6, 100)
    >>> layer(queries, keys, keys, valid_lens=[3, 2]).shape
    (2, 4, 100)
    """

    # The fast class has the fast function here.
    _attention = staticmethod(scaled_dot_product_attention)

    def __init__(self, num_hiddens, num_heads, dropout=0.0, bias=False, *, num_kv_heads=None, dtype=None, rng=None):
        self.num_hiddens, self.num_heads, self.num_kv_heads = _validate.head_counts(
            num_hiddens, num_heads, num_kv_heads
        )
        self.dropout = _validate.dropout_rate(dropout)
        bias = _validate.flag(bias, "bias")
        dtype = _validate.layer_dtype(dtype)
        draw = _drawing(rng, dtype)
        width, kv_width = self.num_hiddens, self.num_kv_heads * self.d_k
        self.W_q = draw(width, width)
        self.W_k = draw(width, kv_width)
        self.W_v = draw(width, kv_width)
        self.W_o = draw(width, width)
        # Four arrays and not one four times: each may be edited in place.
        vector = draw if bias else lambda size: np.zeros(size, dtype)
        self.b_q = vector(width)
        self.b_k = vector(kv_width)
        self.b_v = vector(kv_width)
        self.b_o = vector(width)
        self.attention_weights = None

    @property
    def d_k(self):
        """Depth of a head in queries and keys."""
        return self.num_hiddens // self.num_heads

    @property
    def d_v(self):
        """Depth of a head in values, the same as `d_k`."""
        return self.num_hiddens // self.num_heads

    def __call__(
        self,
        queries,
        keys,
        values,
        valid_lens=None,
        *,
        attn_mask=None,
        is_causal=False,
        need_weights=False,
        out=None,
    ):
        """The same as `forward`."""
        return self.forward(
            queries,
            keys,
            values,
            valid_lens,
            attn_mask=attn_mask,
            is_causal=is_causal,
            need_weights=need_weights,
            out=out,
        )

    def forward(
        self,
        queries,
        keys,
        values,
        valid_lens=None,
        *,
        attn_mask=None,
        is_causal=False,
        need_weights=False,
        out=None,
    ):
        """Result of the layer, (batch, L, num_hiddens).

        Parameters
        ----------
        queries : array_like, (batch, L, rows of W_q)
            float32 or float64; bool and integers become float64.
        keys : array_like, (batch, S, rows of W_k)
        values : array_like, (batch, S, rows of W_v)
        valid_lens : array_like of real numbers, (batch,) or (batch, L), optional
            Number of keys that a query may see.
        attn_mask : array_like, broadcasting to (batch, num_heads, L, S), optional
            bool (True = may attend) or floating (added to the scores).
        is_causal : bool, "upper_left" or "lower_right"
        need_weights : bool
            Keep the weights in `attention_weights`.
        out : ndarray, optional
            Where the result is written: its exact shape and dtype, no overlap with an input, a
            weight or a bias.

        Returns
        -------
        ndarray, (batch, L, num_hiddens)
            In the result type of the inputs and the four W. A query that sees no key gives
            ``0 @ W_o + b_o``.

        Raises
        ------
        TypeError, ValueError
            As `scaled_dot_product_attention` does; also for weights and biases of another shape
            or dtype.

        Examples
        --------
        >>> import numpy as np
        >>> from mha_fast.reference import MultiHeadAttention
        >>> layer = MultiHeadAttention(8, 2, rng=0)
        >>> x = np.ones((1, 3, 8))
        >>> y = layer.forward(x, x, x, is_causal="lower_right", need_weights=True)
        >>> layer.attention_weights[0, 0].round(2).tolist()
        [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.33, 0.33, 0.33]]
        """
        call = _validate.layer_call(self, queries, keys, values, valid_lens, attn_mask, need_weights, out)
        # 1. Project: (batch, length, width) -> (batch, length, heads * depth).
        # 2. Split: -> (batch, heads, length, depth).
        query = _split(_affine(call.queries, call.W_q, call.b_q), call.depth)
        key = _split(_affine(call.keys, call.W_k, call.b_k), call.depth)
        value = _split(_affine(call.values, call.W_v, call.b_v), call.depth)
        # 3. Attend: -> (batch, num_heads, L, depth).
        attended = self._attention(
            query,
            key,
            value,
            attn_mask,
            is_causal=is_causal,
            enable_gqa=True,
            valid_lens=valid_lens,
            return_weights=call.need_weights,
        )
        if call.need_weights:
            attended, self.attention_weights = attended
        # 4. Join and project: -> (batch, L, num_hiddens).
        joined = attended.swapaxes(1, 2).reshape(call.shape)
        result = _affine(joined, call.W_o, call.b_o)
        if out is None:
            return result
        call.out[...] = result
        return out

    def scaled_dot_product_attention(self, Q, K, V, valid_lens=None):
        """Attention of arrays whose heads lie in the batch, (batch * num_heads, L, depth of V).

        Parameters
        ----------
        Q : array_like, (batch * num_heads, L, depth)
        K : array_like, (batch * num_heads, S, depth), or with num_kv_heads
        V : array_like, (batch * num_heads, S, depth of V), or with num_kv_heads
        valid_lens : array_like, (batch * num_heads,) or (batch * num_heads, L), optional
            Already repeated for each head.

        Returns
        -------
        ndarray, (batch * num_heads, L, depth of V)
            Zeros for a query that sees no key, in the result type of the three inputs.

        Raises
        ------
        TypeError, ValueError
            As the function `scaled_dot_product_attention` does.

        Examples
        --------
        >>> import numpy as np
        >>> from mha_fast.reference import MultiHeadAttention
        >>> layer = MultiHeadAttention(8, 2)
        >>> Q, K = np.zeros((4, 3, 4)), np.zeros((4, 5, 4))
        >>> layer.scaled_dot_product_attention(Q, K, K, np.repeat([5, 2], 2)).shape
        (4, 3, 4)
        """
        Q, K, V = _validate.head_entries(Q, K, V, self.num_heads, self.num_kv_heads)
        return self._attention(Q, K, V, valid_lens=valid_lens)[:, 0]

    def transpose_qkv(self, X):
        """Split the last axis into heads and move them into the batch.

        Parameters
        ----------
        X : array_like, (batch, length, heads * depth)
            The number of heads follows from the width, so that keys and values may have fewer.

        Returns
        -------
        ndarray, (batch * heads, length, depth)

        Raises
        ------
        ValueError
            X is not 3-D, or its width is no multiple of the depth.

        Examples
        --------
        >>> import numpy as np
        >>> from mha_fast.reference import MultiHeadAttention
        >>> layer = MultiHeadAttention(8, 2)
        >>> layer.transpose_qkv(np.zeros((3, 5, 8))).shape
        (6, 5, 4)
        """
        X, num_heads = _validate.split_heads(X, self.d_k)
        batch, length, _ = X.shape
        split = X.reshape(batch, length, num_heads, self.d_k)
        return split.swapaxes(1, 2).reshape(batch * num_heads, length, self.d_k)

    def transpose_output(self, X):
        """Undo `transpose_qkv` for all heads of the layer.

        Parameters
        ----------
        X : array_like, (batch * num_heads, length, depth)

        Returns
        -------
        ndarray, (batch, length, num_heads * depth)

        Raises
        ------
        ValueError
            X is not 3-D, or its first axis is no multiple of `num_heads`.

        Examples
        --------
        >>> import numpy as np
        >>> from mha_fast.reference import MultiHeadAttention
        >>> layer = MultiHeadAttention(8, 2)
        >>> layer.transpose_output(np.zeros((6, 5, 4))).shape
        (3, 5, 8)
        """
        X, batch = _validate.joined_batch(X, self.num_heads)
        _, length, depth = X.shape
        split = X.reshape(batch, self.num_heads, length, depth)
        return split.swapaxes(1, 2).reshape(batch, length, self.num_heads * depth)

    def astype(self, dtype):
        """A new layer whose weights and biases are copies in another dtype.

        Parameters
        ----------
        dtype : float32 or float64

        Returns
        -------
        MultiHeadAttention

        Raises
        ------
        TypeError
            Another dtype.

        Examples
        --------
        >>> from mha_fast.reference import MultiHeadAttention
        >>> MultiHeadAttention(8, 2).astype("float32").W_q.dtype
        dtype('float32')
        """
        dtype = _validate.layer_dtype(dtype)
        layer = copy.copy(self)
        for name in ("W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o"):
            with np.errstate(all="ignore"):
                setattr(layer, name, np.array(getattr(self, name), dtype))
        layer.attention_weights = None
        return layer


class PositionWiseFFN(_weights.FFNWeights):
    """Position-wise feed-forward network: ``max(0, X W_1 + b_1) W_2 + b_2``.

    Parameters
    ----------
    num_hiddens : int
        Width of the input and the result.
    ffn_num_hiddens : int
        Width between the two products.
    dtype : float32 or float64, optional
        Of the weights and biases, to which they are cast after the draw. float64 by default.
    rng : int or numpy.random.Generator, optional
        Source of the weights; ``numpy.random.rand`` by default.

    Attributes
    ----------
    W_1 : ndarray, (num_hiddens, ffn_num_hiddens)
    W_2 : ndarray, (ffn_num_hiddens, num_hiddens)
    b_1 : ndarray, (ffn_num_hiddens,)
    b_2 : ndarray, (num_hiddens,)
        Uniform in [0, 1), drawn in the order W_1, W_2, b_1, b_2. May be assigned or edited.
    num_hiddens, ffn_num_hiddens : int

    Raises
    ------
    TypeError
        An argument of another type, or another dtype, than listed above.
    ValueError
        A number below 1.

    Notes
    -----
    Vaswani et al. 2017, section 3.3.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_fast.reference import PositionWiseFFN
    >>> ffn = PositionWiseFFN(8, 32)
    >>> ffn(np.ones((2, 3, 8))).shape
    (2, 3, 8)
    """

    def __init__(self, num_hiddens, ffn_num_hiddens, *, dtype=None, rng=None):
        self.num_hiddens, self.ffn_num_hiddens = _validate.ffn_widths(num_hiddens, ffn_num_hiddens)
        draw = _drawing(rng, _validate.layer_dtype(dtype))
        self.W_1 = draw(self.num_hiddens, self.ffn_num_hiddens)
        self.W_2 = draw(self.ffn_num_hiddens, self.num_hiddens)
        self.b_1 = draw(self.ffn_num_hiddens)
        self.b_2 = draw(self.num_hiddens)

    def __call__(self, X):
        """The same as `forward`."""
        return self.forward(X)

    def forward(self, X):
        """Result at each position, (..., num_hiddens).

        Parameters
        ----------
        X : array_like, (..., num_hiddens)
            float32 or float64; bool and integers become float64.

        Returns
        -------
        ndarray, (..., num_hiddens)
            In the result type of X, W_1 and W_2.

        Raises
        ------
        TypeError, ValueError
            An input, a weight or a bias of another dtype or shape.

        Examples
        --------
        >>> import numpy as np
        >>> from mha_fast.reference import PositionWiseFFN
        >>> ffn = PositionWiseFFN(1, 2)
        >>> ffn.W_1, ffn.b_1 = np.array([[1.0, -1.0]]), np.array([0.0, 0.0])
        >>> ffn.W_2, ffn.b_2 = np.array([[10.0], [100.0]]), np.array([0.5])
        >>> ffn.forward([[3.0], [-2.0]]).ravel().tolist()
        [30.5, 200.5]
        """
        call = _validate.ffn_call(self, X)
        hidden = np.maximum(_affine(call.X, call.W_1, call.b_1), 0)
        return _affine(hidden, call.W_2, call.b_2)


def _drawing(rng, dtype):
    """draw(*shape): uniform numbers in [0, 1), cast to dtype after the draw."""
    generator = _validate.generator(rng)

    def draw(*shape):
        numbers = np.random.rand(*shape) if generator is None else generator.random(shape)
        return numbers.astype(dtype, copy=False)

    return draw


def _affine(X, W, b):
    """X W + b in the dtype of b, which is that of the result: (..., rows of W) -> (..., columns)."""
    with np.errstate(all="ignore"):
        return X.astype(b.dtype, copy=False) @ W.astype(b.dtype, copy=False) + b


def _split(X, depth):
    """(batch, length, heads * depth) -> (batch, heads, length, depth), a view."""
    batch, length, width = X.shape
    return X.reshape(batch, length, width // depth, depth).swapaxes(1, 2)
