from mha_fast import reference
from mha_fast._core import scaled_dot_product_attention as scaled_dot_product_attention

__all__ = ["MultiHeadAttention", "PositionWiseFFN", "scaled_dot_product_attention"]

class MultiHeadAttention(reference.MultiHeadAttention): ...
class PositionWiseFFN(reference.PositionWiseFFN): ...
