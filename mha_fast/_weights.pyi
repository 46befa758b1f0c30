import os
from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike, NDArray
from typing_extensions import Self

class Stored:
    def state_dict(self) -> dict[str, NDArray[Any]]: ...
    @classmethod
    def from_state_dict(cls, state: Mapping[str, ArrayLike]) -> Self: ...
    def save(self, path: str | os.PathLike[str]) -> None: ...
    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self: ...

class AttentionWeights(Stored):
    @classmethod
    def from_arrays(
        cls,
        num_heads: int,
        *,
        W_q: ArrayLike,
        W_k: ArrayLike,
        W_v: ArrayLike,
        W_o: ArrayLike,
        b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None,
        b_v: ArrayLike | None = None,
        b_o: ArrayLike | None = None,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
    ) -> Self: ...
    # A torch.nn.MultiheadAttention, whose type is not known where torch is not installed, or its state_dict.
    @classmethod
    def from_torch(cls, source: Any, num_heads: int | None = None) -> Self: ...

class FFNWeights(Stored):
    @classmethod
    def from_arrays(
        cls, *, W_1: ArrayLike, W_2: ArrayLike, b_1: ArrayLike | None = None, b_2: ArrayLike | None = None
    ) -> Self: ...
