from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha_fast._reference_sequences import KVCache as KVCache
from mha_fast._reference_sequences import apply_rotary as apply_rotary
from mha_fast._reference_sequences import attention_with_kvcache as attention_with_kvcache
from mha_fast._reference_sequences import merge_states as merge_states
from mha_fast._reference_sequences import varlen_attention as varlen_attention
from mha_fast._weights import AttentionWeights, FFNWeights

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

# An array; with return_lse or return_weights a tuple of arrays.
def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | str = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    valid_lens: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
    window_size: Sequence[int] | NDArray[np.integer] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    layout: str = "bhld",
    return_lse: bool = False,
    return_weights: bool = False,
    weights_rows: ArrayLike | None = None,
    out: NDArray[Any] | None = None,
    num_threads: int | None = None,
) -> Any: ...
def alibi_slopes(num_heads: int) -> NDArray[np.float64]: ...

class MultiHeadAttention(AttentionWeights):
    num_hiddens: int
    num_heads: int
    num_kv_heads: int
    dropout: float
    W_q: NDArray[Any]
    W_k: NDArray[Any]
    W_v: NDArray[Any]
    W_o: NDArray[Any]
    b_q: NDArray[Any]
    b_k: NDArray[Any]
    b_v: NDArray[Any]
    b_o: NDArray[Any]
    attention_weights: NDArray[Any] | None
    def __init__(
        self,
        num_hiddens: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        *,
        num_kv_heads: int | None = None,
        dtype: DTypeLike | None = None,
        rng: int | np.random.Generator | None = None,
    ) -> None: ...
    @property
    def d_k(self) -> int: ...
    @property
    def d_v(self) -> int: ...
    def __call__(
        self,
        queries: ArrayLike,
        keys: ArrayLike,
        values: ArrayLike,
        valid_lens: ArrayLike | None = None,
        *,
        attn_mask: ArrayLike | None = None,
        is_causal: bool | str = False,
        need_weights: bool = False,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]: ...
    def forward(
        self,
        queries: ArrayLike,
        keys: ArrayLike,
        values: ArrayLike,
        valid_lens: ArrayLike | None = None,
        *,
        attn_mask: ArrayLike | None = None,
        is_causal: bool | str = False,
        need_weights: bool = False,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]: ...
    def scaled_dot_product_attention(
        self, Q: ArrayLike, K: ArrayLike, V: ArrayLike, valid_lens: ArrayLike | None = None
    ) -> NDArray[Any]: ...
    def transpose_qkv(self, X: ArrayLike) -> NDArray[Any]: ...
    def transpose_output(self, X: ArrayLike) -> NDArray[Any]: ...
    def astype(self, dtype: DTypeLike) -> MultiHeadAttention: ...

class PositionWiseFFN(FFNWeights):
    num_hiddens: int
    ffn_num_hiddens: int
    W_1: NDArray[Any]
    W_2: NDArray[Any]
    b_1: NDArray[Any]
    b_2: NDArray[Any]
    def __init__(
        self,
        num_hiddens: int,
        ffn_num_hiddens: int,
        *,
        dtype: DTypeLike | None = None,
        rng: int | np.random.Generator | None = None,
    ) -> None: ...
    def __call__(self, X: ArrayLike) -> NDArray[Any]: ...
    def forward(self, X: ArrayLike) -> NDArray[Any]: ...
