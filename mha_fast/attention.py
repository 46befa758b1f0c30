"""The classes on the fast path: the reference's weights and rules; the core does a layer's work, NumPy the FFN's."""

import math

import numpy as np

from mha_fast import _core, _validate, reference
from mha_fast._core import scaled_dot_product_attention
from mha_fast.reference import alibi_slopes

__all__ = ["MultiHeadAttention", "PositionWiseFFN", "alibi_slopes", "scaled_dot_product_attention"]


def _documented_as(twin):
    """Give a function or class the text of its twin in the reference: what they promise is the same."""

    def decorate(item):
        if twin.__doc__ is not None:  # python -OO strips it
            item.__doc__ = twin.__doc__.replace("mha_fast.reference", "mha_fast")
        return item

    return decorate


_documented_as(reference.scaled_dot_product_attention)(scaled_dot_product_attention)


@_documented_as(reference.MultiHeadAttention)
class MultiHeadAttention(reference.MultiHeadAttention):
    _attention = staticmethod(scaled_dot_product_attention)

    @_documented_as(reference.MultiHeadAttention.forward)
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
        result = _core.layer_forward(self, queries, keys, values, valid_lens, attn_mask, is_causal, need_weights, out)
        if need_weights:
            result, self.attention_weights = result
        return result


@_documented_as(reference.PositionWiseFFN)
class PositionWiseFFN(reference.PositionWiseFFN):
    @_documented_as(reference.PositionWiseFFN.forward)
    def forward(self, X):
        call = _validate.ffn_call(self, X)
        hidden = _affine(call.X, call.W_1, call.b_1)
        np.maximum(hidden, 0, out=hidden)
        return _affine(hidden, call.W_2, call.b_2)


def _affine(X, W, b):
    """X W + b in the dtype of b: (..., rows of W) -> (..., columns), as one product of two matrices."""
    flat = X.reshape(math.prod(X.shape[:-1]), X.shape[-1]).astype(b.dtype, copy=False)
    with np.errstate(all="ignore"):
        product = flat @ W.astype(b.dtype, copy=False)
        product += b
    return product.reshape(*X.shape[:-1], W.shape[1])
