"""Packed sequences and key/value caches on the fast path; merged results and rotary positions are NumPy's work."""

from mha_fast import _core, _reference_sequences, _validate_sequences, reference
from mha_fast.attention import _documented_as
from mha_fast.reference import apply_rotary, merge_states

__all__ = ["KVCache", "apply_rotary", "attention_with_kvcache", "merge_states", "varlen_attention"]


def _attend_cache(call):
    """Rotate the query, write the new tokens, attend."""
    query = call.query if call.state.rotary is None else _reference_sequences.rotated_query(call)
    return _core.attend_cache(call, query, lambda: _reference_sequences.write_tokens(call.state))


@_documented_as(reference.varlen_attention)
def varlen_attention(
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k=None,
    *,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
    out=None,
    num_threads=None,
):
    return _core.attend_varlen(
        _validate_sequences.varlen_call(
            query,
            key,
            value,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            return_lse=return_lse,
            out=out,
            num_threads=num_threads,
        )
    )


@_documented_as(reference.attention_with_kvcache)
def attention_with_kvcache(
    query,
    k_cache,
    v_cache,
    k=None,
    v=None,
    *,
    cache_seqlens,
    block_table=None,
    k_scale=None,
    v_scale=None,
    is_causal=True,
    scale=None,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    rotary_base=None,
    rotary_dim=None,
    rotary_interleaved=False,
    return_lse=False,
    out=None,
    num_threads=None,
):
    return _attend_cache(
        _validate_sequences.cache_call(
            query,
            k_cache,
            v_cache,
            k=k,
            v=v,
            cache_seqlens=cache_seqlens,
            block_table=block_table,
            k_scale=k_scale,
            v_scale=v_scale,
            is_causal=is_causal,
            scale=scale,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            rotary_base=rotary_base,
            rotary_dim=rotary_dim,
            rotary_interleaved=rotary_interleaved,
            return_lse=return_lse,
            out=out,
            num_threads=num_threads,
        )
    )


@_documented_as(reference.KVCache)
class KVCache(reference.KVCache):
    _attention = staticmethod(attention_with_kvcache)
