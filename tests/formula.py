"""The formula of attention over single numbers, in Python's floats: an oracle that shares nothing with the package."""

import math

import numpy as np


def formula(
    query,
    key,
    value,
    mask=None,
    *,
    scale=None,
    causal=False,
    offset=0,
    window=(-1, -1),
    softcap=0.0,
    lengths=None,
    slopes=None,
    sinks=None,
):
    """out, lse and weights of (batch, heads, length, width) arrays of finite numbers.

    mask broadcasts, lengths are (batch,) or (batch, queries), offset () or (batch,), slopes (heads,) or
    (batch, heads), sinks (heads,).
    """
    batch, heads, q_len, width = query.shape
    kv_heads, kv_len, value_width = value.shape[1:]
    scale = 1 / math.sqrt(width) if scale is None else scale
    mask = None if mask is None else np.broadcast_to(mask, (batch, heads, q_len, kv_len))
    offset = np.broadcast_to(offset, batch)
    if lengths is not None:
        lengths = np.asarray(lengths)
        lengths = np.broadcast_to(lengths[:, None] if lengths.ndim == 1 else lengths, (batch, q_len))
    if slopes is not None:
        slopes = np.broadcast_to(slopes, (batch, heads))

    out = np.zeros((batch, heads, q_len, value_width))
    lse = np.full((batch, heads, q_len), -math.inf)
    weights = np.zeros((batch, heads, q_len, kv_len))
    for b, h, i in np.ndindex(batch, heads, q_len):
        group = h // (heads // kv_heads)
        scores = {}
        for j in range(kv_len):
            back = i + int(offset[b]) - j
            hidden = (
                (causal and back < 0)
                or (window[0] >= 0 and back > window[0])
                or (window[1] >= 0 and -back > window[1])
                or (lengths is not None and not j < lengths[b, i])
                or (mask is not None and mask[b, h, i, j] == (False if mask.dtype == bool else -math.inf))
            )
            if hidden:
                continue
            pairs = zip(query[b, h, i], key[b, group, j], strict=True)
            score = scale * math.fsum(float(x) * float(y) for x, y in pairs)
            if softcap:
                score = softcap * math.tanh(score / softcap)
            if slopes is not None:
                score -= float(slopes[b, h]) * abs(back)
            if mask is not None and mask.dtype != bool:
                score += float(mask[b, h, i, j])
            scores[j] = score
        sink = -math.inf if sinks is None else float(sinks[h])
        top = max([sink, *scores.values()])
        if top == -math.inf:
            continue
        total = math.fsum([math.exp(sink - top), *(math.exp(score - top) for score in scores.values())])
        lse[b, h, i] = top + math.log(total)
        for j, score in scores.items():
            weights[b, h, i, j] = math.exp(score - top) / total
            out[b, h, i] += weights[b, h, i, j] * np.asarray(value[b, group, j], np.float64)
    return out, lse, weights
