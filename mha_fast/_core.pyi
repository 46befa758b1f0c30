from typing import Any

from numpy.typing import ArrayLike, NDArray

from mha_fast._validate import Call, LayerCall

__test__: dict[str, str]

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
    layout: str = "bhld",
    return_lse: bool = False,
    return_weights: bool = False,
    out: NDArray[Any] | None = None,
    num_threads: int | None = None,
) -> Any: ...
def attend(call: Call) -> Any: ...
def attend_layer(call: LayerCall, attention: Call) -> Any: ...
def layer_forward(
    module: Any,
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    valid_lens: ArrayLike | None,
    attn_mask: ArrayLike | None,
    is_causal: bool | str,
    need_weights: bool,
    out: NDArray[Any] | None,
) -> Any: ...
def bind_config(namespace: dict[str, Any]) -> None: ...
def levels() -> dict[str, tuple[int, bool]]: ...
def build_info() -> dict[str, Any]: ...
def tiles(level: int) -> dict[str, dict[str, int]]: ...
def pause_threads() -> None: ...
def exp2(x: NDArray[Any], level: int) -> NDArray[Any]: ...
