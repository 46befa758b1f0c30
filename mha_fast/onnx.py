"""The ONNX operator Attention on the fused kernel. Needs onnx: pip install "mha_fast[onnx]"."""

import numpy as np

from mha_fast import _validate, reference
from mha_fast._core import scaled_dot_product_attention

try:
    from onnx import TensorProto, defs
    from onnx.reference.op_run import OpRun
except ImportError as error:
    raise ImportError('mha_fast.onnx needs onnx: pip install "mha_fast[onnx]"') from error

__all__ = ["Attention"]

_FLOATING = ("float16", "bfloat16", "float32", "float64")
_PRECISIONS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
_QK_OUTPUT = 3  # place of qk_matmul_output among the outputs
_RAW, _CAPPED, _BIASED, _WEIGHTS = range(4)  # what qk_matmul_output_mode means


class Attention(OpRun):
    """The operator Attention of opsets 23, 24 and 25 for `onnx.reference.ReferenceEvaluator`.

    ``ReferenceEvaluator(model, new_ops=[Attention])`` runs every Attention node of the model through
    `mha_fast.scaled_dot_product_attention`. Nothing else of the evaluation changes.

    Inputs, attributes and outputs are those of the operator's text in the opset of the model: Q, K, V with 3 or 4
    axes, grouped heads, `attn_mask`, `past_key` and `past_value` with `present_key` and `present_value`,
    `nonpad_kv_seqlen` (from opset 24), `is_causal`, `scale`, `softcap`, `left_window_size` and `right_window_size`
    (opset 25), `softmax_precision`, `qk_matmul_output` in its four modes; float16, bfloat16, float32 and float64. The
    numbers of `qk_matmul_output_mode` are those of onnx 1.22 and later: 0 scaled product, 1 capped, 2 with all masks,
    3 weights.

    Raises
    ------
    ImportError
        On import: onnx is not installed.
    ValueError
        From the evaluator: shapes that do not fit, attributes out of range, inputs that exclude each other, an input or
        attribute that the opset of the model does not have.
    TypeError
        From the evaluator, which puts a text of its own before ours (see ``__cause__``): another dtype.

    Notes
    -----
    Vaswani et al. 2017, section 3.2.1; https://onnx.ai/onnx/operators/onnx__Attention.html. Where that text leaves a
    choice, or onnx's own implementation does something else:

    - float16 and bfloat16 are computed in float32 and rounded once. `softmax_precision` is a lower bound: DOUBLE takes
      the whole computation to float64; a type below that of the computation changes nothing.
    - What a query may not see never touches its result, even NaN or infinity; onnx's formula lets NaN through. Only
      False and -inf hide a key, a finite number is a bias however large. A query that sees no key gives zeros.
    - A mask whose last axis is shorter than the keys hides the rest from opset 24 on, even if its size is 1. In opset
      23 a mask must broadcast, and so a last axis of size 1 is repeated.
    - `qk_matmul_output` of mode 0 is the product before the cap, as the text says; onnx's Python caps it.
    - Integer masks are added as numbers, as onnx does.
    - In opset 25 `q_num_heads` and `kv_num_heads` beside inputs of 4 axes are refused, as onnx does; in the others they
      must agree with the shapes.
    - `scale` may be 0 or negative.

    `qk_matmul_output` takes memory for all pairs of queries and keys; the kernel does not, so leave it out where it is
    not needed. Modes 0 to 2 are plain NumPy.

    Examples
    --------
    >>> import numpy as np
    >>> from onnx import TensorProto, helper
    >>> from onnx.reference import ReferenceEvaluator
    >>> from mha_fast.onnx import Attention
    >>> node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], is_causal=1)
    >>> infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 2, 4]) for name in "QKVY"}
    >>> graph = helper.make_graph([node], "attention", [infos[name] for name in "QKV"], [infos["Y"]])
    >>> model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
    >>> x = np.arange(8, dtype=np.float32).reshape(1, 1, 2, 4)
    >>> [Y] = ReferenceEvaluator(model, new_ops=[Attention]).run(None, {"Q": 0 * x, "K": x, "V": x})
    >>> Y[0, 0].tolist()
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]
    """

    op_domain = ""

    def __init__(self, onnx_node, run_params, schema=None):
        # The evaluator gives no schema, and OpRun would take the newest one.
        schema = schema or defs.get_schema("Attention", run_params["opsets"][self.op_domain], self.op_domain)
        self.since_opset = schema.since_version
        unknown = [attribute.name for attribute in onnx_node.attribute if attribute.name not in schema.attributes]
        unknown += onnx_node.input[len(schema.inputs) :]
        if unknown:
            raise ValueError(f"the node has {', '.join(unknown)}, which Attention of opset {self.since_opset} has not")
        super().__init__(onnx_node, run_params, schema)

    def _run(
        self,
        Q,
        K,
        V,
        attn_mask=None,
        past_key=None,
        past_value=None,
        nonpad_kv_seqlen=None,
        *,
        scale=None,
        is_causal=0,
        q_num_heads=None,
        kv_num_heads=None,
        softmax_precision=None,
        softcap=0.0,
        qk_matmul_output_mode=_RAW,
        left_window_size=-1,
        right_window_size=-1,
    ):
        _check_choice(is_causal, "is_causal", (0, 1))
        _check_choice(qk_matmul_output_mode, "qk_matmul_output_mode", (_RAW, _CAPPED, _BIASED, _WEIGHTS))
        _check_choice(softmax_precision, "softmax_precision", (None, *_PRECISIONS))
        query, key, value = self._with_head_axis(Q, K, V, q_num_heads, kv_num_heads)
        offset = _offset(query, past_key, past_value, nonpad_kv_seqlen)
        present_key = _with_past(past_key, key, "past_key")
        present_value = _with_past(past_value, value, "past_value")
        if softmax_precision == TensorProto.DOUBLE:
            query = query.astype(np.float64)
        options = {
            "attn_mask": self._mask(attn_mask, present_key.shape[2]),
            "is_causal": bool(is_causal),
            "scale": scale,
            "enable_gqa": True,
            "valid_lens": nonpad_kv_seqlen,
            "q_offset": offset,
            "window_size": (left_window_size, right_window_size),
            "softcap": softcap,
        }

        qk_wanted = len(self.output) > _QK_OUTPUT and self.output[_QK_OUTPUT] != ""
        weights_wanted = qk_wanted and qk_matmul_output_mode == _WEIGHTS
        Y = scaled_dot_product_attention(query, present_key, present_value, return_weights=weights_wanted, **options)
        if weights_wanted:
            Y, qk_output = Y
        elif qk_wanted:
            qk_output = _scores(query, present_key, qk_matmul_output_mode, options)
        if Q.ndim == 3:
            batch, num_heads, q_len, head_dim = Y.shape
            Y = Y.swapaxes(1, 2).reshape(batch, q_len, num_heads * head_dim)
        with np.errstate(all="ignore"):
            outputs = (Y.astype(Q.dtype, copy=False), present_key, present_value)
            return (*outputs, qk_output.astype(Q.dtype, copy=False)) if qk_wanted else outputs

    def _with_head_axis(self, Q, K, V, q_num_heads, kv_num_heads):
        """Q, K and V as views (batch, heads, length, head_size)."""
        for name, array in (("Q", Q), ("K", K), ("V", V)):
            if array.dtype.name not in _FLOATING:
                raise TypeError(f"{name} has dtype {array.dtype}; expected {', '.join(_FLOATING)}")
        if not Q.ndim == K.ndim == V.ndim or Q.ndim not in (3, 4):
            raise ValueError(f"Q, K and V have {Q.ndim}, {K.ndim} and {V.ndim} axes; expected 3 each or 4 each")
        named = (
            ("Q", Q, "q_num_heads", q_num_heads),
            ("K", K, "kv_num_heads", kv_num_heads),
            ("V", V, "kv_num_heads", kv_num_heads),
        )
        if Q.ndim == 3:
            return [_split_heads(*each) for each in named]
        for name, array, count_name, count in named:
            if count is not None and self.since_opset >= 25:
                raise ValueError(f"{count_name} is {count}, but {name} has 4 axes; expected it beside 3 axes only")
            if count not in (None, array.shape[1]):
                raise ValueError(f"{count_name} is {count}, but {name} has shape {array.shape}")
        return Q, K, V

    def _mask(self, mask, kv_len):
        """The mask as `scaled_dot_product_attention` takes it: no integers, as long as the keys or broadcasting."""
        if mask is None:
            return None
        if mask.dtype.kind in "iu":
            mask = mask.astype(np.float64)
        missing = kv_len - mask.shape[-1] if mask.ndim else 0
        if self.since_opset < 24 or missing <= 0:
            return mask
        hidden = np.full((*mask.shape[:-1], missing), False if mask.dtype == bool else -np.inf, mask.dtype)
        return np.concatenate([mask, hidden], axis=-1)


def _check_choice(value, name, choices):
    if value not in choices:
        raise ValueError(f"{name} is {value}; expected one of {', '.join(map(str, choices))}")


def _split_heads(name, array, count_name, count):
    """(batch, length, heads * head_size) -> (batch, heads, length, head_size), a view."""
    if count is None or count < 1 or array.shape[2] % count:
        raise ValueError(f"{name} has shape {array.shape}; expected {count_name} that divides its width, not {count}")
    batch, length, width = array.shape
    return array.reshape(batch, length, count, width // count).swapaxes(1, 2)


def _with_past(past, array, name):
    """Keys or values (batch, heads, length, head_size) behind those of the cache."""
    if past is None:
        return array
    batch, heads, _, head_size = array.shape
    if past.ndim != 4 or (*past.shape[:2], past.shape[3]) != (batch, heads, head_size):
        raise ValueError(f"{name} has shape {past.shape}; expected ({batch}, {heads}, any, {head_size})")
    return np.concatenate([past, array], axis=2)


def _offset(query, past_key, past_value, nonpad_kv_seqlen):
    """Position of the first query among the keys: how many valid keys lie before it."""
    if (past_key is None) != (past_value is None):
        raise ValueError("past_key or past_value is missing; expected both or none")
    if nonpad_kv_seqlen is None:
        return 0 if past_key is None else past_key.shape[2]
    if past_key is not None:
        raise ValueError("nonpad_kv_seqlen came beside past_key; expected one of the two kinds of cache")
    batch, _, q_len, _ = query.shape
    if nonpad_kv_seqlen.shape != (batch,) or nonpad_kv_seqlen.dtype.kind not in "iu":
        raise ValueError(
            f"nonpad_kv_seqlen has shape {nonpad_kv_seqlen.shape} and dtype {nonpad_kv_seqlen.dtype}; "
            f"expected ({batch},) and int64"
        )
    return nonpad_kv_seqlen.astype(np.int64) - q_len


def _scores(query, key, mode, options):
    """qk_matmul_output (batch, q_num_heads, queries, keys) before the softmax: modes 0 to 2."""
    if mode == _RAW:
        options = options | {"softcap": 0.0}
    if mode != _BIASED:
        options = options | {"attn_mask": None}
    call = _validate.attention_call_of(query, key, key, **options)
    scores = np.empty((*query.shape[:3], key.shape[2]), call.compute)
    with np.errstate(all="ignore"):
        for b in np.ndindex(query.shape[:1]):
            scores[b] = reference._scores(call, b, reference._one_per_query_head(call, b)[0])
            if mode == _BIASED:
                scores[b][~reference._visible(call, b)] = -np.inf
    return scores
