from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mha_fast._validate_sequences import CacheCall, CacheState, VarlenCall

__all__ = ["KVCache", "apply_rotary", "attention_with_kvcache", "merge_states", "varlen_attention"]

def merge_states(outs: ArrayLike, lses: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]: ...

# An array; with return_lse a tuple of arrays. The same below.
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    out: NDArray[Any] | None = None,
    num_threads: int | None = None,
) -> Any: ...
def attend_varlen(call: VarlenCall) -> Any: ...
def attention_with_kvcache(
    query: ArrayLike,
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    *,
    cache_seqlens: ArrayLike,
    block_table: ArrayLike | None = None,
    k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    rotary_base: float | None = None,
    rotary_dim: int | None = None,
    rotary_interleaved: bool = False,
    return_lse: bool = False,
    out: NDArray[Any] | None = None,
    num_threads: int | None = None,
) -> Any: ...
def attend_cache(call: CacheCall) -> Any: ...
def write_tokens(state: CacheState) -> None: ...

class KVCache:
    batch: int
    num_kv_heads: int
    max_len: int
    head_dim: int
    v_head_dim: int
    dtype: np.dtype[Any]
    k_cache: NDArray[Any]
    v_cache: NDArray[Any]
    k_scale: NDArray[np.float32] | None
    v_scale: NDArray[np.float32] | None
    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: DTypeLike = ...,
    ) -> None: ...
    @property
    def seqlens(self) -> NDArray[np.int64]: ...
    def append(self, k: ArrayLike, v: ArrayLike, *, lengths: ArrayLike | None = None) -> None: ...
    def attend(
        self, query: ArrayLike, k: ArrayLike | None = None, v: ArrayLike | None = None, **options: Any
    ) -> Any: ...
    def truncate(self, lengths: ArrayLike) -> None: ...

def apply_rotary(
    x: ArrayLike,
    positions: ArrayLike,
    *,
    base: float = 10000.0,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> NDArray[Any]: ...
