from mha_fast import reference
from mha_fast.reference import apply_rotary as apply_rotary
from mha_fast.reference import attention_with_kvcache as attention_with_kvcache
from mha_fast.reference import merge_states as merge_states
from mha_fast.reference import varlen_attention as varlen_attention

__all__ = ["KVCache", "apply_rotary", "attention_with_kvcache", "merge_states", "varlen_attention"]

class KVCache(reference.KVCache): ...
