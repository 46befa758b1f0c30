from mha_fast import reference
from mha_fast._core import scaled_dot_product_attention as scaled_dot_product_attention
from mha_fast.reference import alibi_slopes as alibi_slopes

__all__ = ["MultiHeadAttention", "PositionWiseFFN", "alibi_slopes", "scaled_dot_product_attention"]

class MultiHeadAttention(reference.MultiHeadAttention): ...
class PositionWiseFFN(reference.PositionWiseFFN): ...
