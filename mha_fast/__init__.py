"""Fused multi-head attention on the CPU for NumPy arrays."""

__version__ = "0.1.0"

try:
    from mha_fast._core import scaled_dot_product_attention
except ModuleNotFoundError as error:
    if error.name != "mha_fast._core":
        raise
    raise ImportError(
        f"mha_fast was imported from {__path__[0]}, a source tree whose C extension was never built for this Python. "
        'Run "pip install -e ." in the folder above it, or leave that folder to import an installed mha_fast.'
    ) from None
from mha_fast._config import get_num_threads, set_num_threads, show_config
from mha_fast.attention import MultiHeadAttention, PositionWiseFFN, alibi_slopes
from mha_fast.sequences import KVCache, apply_rotary, attention_with_kvcache, merge_states, varlen_attention

__all__ = [
    "KVCache",
    "MultiHeadAttention",
    "PositionWiseFFN",
    "alibi_slopes",
    "apply_rotary",
    "attention_with_kvcache",
    "get_num_threads",
    "merge_states",
    "scaled_dot_product_attention",
    "set_num_threads",
    "show_config",
    "varlen_attention",
]
