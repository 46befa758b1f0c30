from typing import Any

from numpy.typing import NDArray
from onnx import NodeProto
from onnx.reference.op_run import OpRun

__all__ = ["Attention"]

class Attention(OpRun):
    since_opset: int
    def __init__(self, onnx_node: NodeProto, run_params: dict[str, Any], schema: Any = None) -> None: ...
    def _run(
        self,
        Q: NDArray[Any],
        K: NDArray[Any],
        V: NDArray[Any],
        attn_mask: NDArray[Any] | None = None,
        past_key: NDArray[Any] | None = None,
        past_value: NDArray[Any] | None = None,
        nonpad_kv_seqlen: NDArray[Any] | None = None,
        *,
        scale: float | None = None,
        is_causal: int = 0,
        q_num_heads: int | None = None,
        kv_num_heads: int | None = None,
        softmax_precision: int | None = None,
        softcap: float = 0.0,
        qk_matmul_output_mode: int = 0,
        left_window_size: int = -1,
        right_window_size: int = -1,
    ) -> tuple[NDArray[Any], ...]: ...
