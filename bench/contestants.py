"""Who computes a case: mha_fast, its reference, the plain NumPy formula and, where installed, torch and onnxruntime.

Each function takes a case and the number of threads and returns a call without arguments, or None for what that
library does not offer. All of them read the same arrays; what a user would prepare once is prepared outside the call.
NumPy's own threads are those of its BLAS: whoever runs the call limits them.
"""

import importlib.util
import itertools
import math

import numpy as np

import mha_fast
import mha_fast.reference
from bench.cases import dtype_of
from mha_fast import _config

FUNCTIONS = {
    "attention": "scaled_dot_product_attention",
    "cache": "attention_with_kvcache",
    "packed": "varlen_attention",
}
MOST_SCORES = 4e8  # of a case, for those who hold them all: 1.6 GB each time


def plain_attention(query, key, value, mask=None, softcap=0.0):
    scores = query @ key.swapaxes(-1, -2) * query.dtype.type(1 / math.sqrt(query.shape[-1]))
    scores = query.dtype.type(softcap) * np.tanh(scores / query.dtype.type(softcap)) if softcap else scores
    scores = scores if mask is None else scores + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ value / weights.sum(-1, keepdims=True)


def plain(case, threads):
    """Heads of one group stand on an axis of their own, so that key and value are not repeated.

    NumPy has no products of half types, and conversions are other work; nor does it read caches of pages or integers.
    """
    if case.kv_dtype not in ("float32", "float64") or case.page or holds_too_much(case):
        return None
    inputs, weights, options = case.arrays()
    if case.kind == "packed":
        return plain_loop(*inputs, options["cu_seqlens_q"])
    mask = case.additive_mask(options)
    if case.kind == "layer":
        (x,) = inputs
        split = (case.batch, case.q_len, case.num_heads, case.head_dim)

        def layer():
            q, k, v = ((x @ weights[f"W_{n}"] + weights[f"b_{n}"]).reshape(split).swapaxes(1, 2) for n in "qkv")
            joined = plain_attention(q, k, v, mask).swapaxes(1, 2).reshape(x.shape)
            return joined @ weights["W_o"] + weights["b_o"]

        return layer
    query, key, value = inputs if case.layout == "bhld" else (x.swapaxes(1, 2) for x in inputs)
    if case.layout == "blhd":
        return lambda: plain_attention(query, key, value, mask, case.softcap).swapaxes(1, 2)
    if case.kv_heads == case.num_heads:
        return lambda: plain_attention(query, key, value, mask, case.softcap)
    grouped = query.reshape(case.batch, case.kv_heads, -1, case.q_len, case.head_dim)
    key, value = key[:, :, None], value[:, :, None]
    mask = None if mask is None else mask[:, :, None]
    return lambda: plain_attention(grouped, key, value, mask, case.softcap).reshape(query.shape)


def plain_loop(query, key, value, starts):
    """Sequence by sequence: (tokens, heads, depth), of each all its keys."""
    parts = [slice(*ends) for ends in itertools.pairwise(starts)]

    def loop():
        out = np.empty_like(query)
        for part in parts:
            out[part] = plain_attention(*(x[part].swapaxes(0, 1) for x in (query, key, value))).swapaxes(0, 1)
        return out

    return loop


def holds_too_much(case):
    return case.batch * case.num_heads * case.q_len * case.kv_len > MOST_SCORES


def of_module(module, case):
    inputs, weights, options = case.arrays()
    if case.kind == "layer":
        layer = module.MultiHeadAttention(case.num_hiddens, case.num_heads, bias=True)
        for name, array in weights.items():
            setattr(layer, name, array)
        (x,) = inputs
        return lambda: layer(x, x, x, **options)
    function = getattr(module, FUNCTIONS[case.kind])
    return lambda: function(*inputs, **options)


def fast(case, threads):
    mha_fast.set_num_threads(threads)
    call = of_module(mha_fast, case)
    return at_level(call, case.level) if case.level else call


def at_level(call, level):
    """The call at another level than the process's; None where this machine cannot use it."""
    config = mha_fast.show_config()
    if level not in config["levels_usable"]:
        return None

    def forced():
        _config.set_level(level)
        try:
            return call()
        finally:
            _config.set_level(config["level"])

    return forced


def reference(case, threads):
    if holds_too_much(case):
        return None
    return of_module(mha_fast.reference, case)


def torch(case, threads):
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attention

    if case.kind == "packed" or case.cache or case.page or case.softcap:
        return None
    torch.set_num_threads(threads)
    inputs, weights, options = case.arrays()
    lengths = torch.from_numpy(case.lengths())
    if case.kind == "layer":
        layer = torch.nn.MultiheadAttention(case.num_hiddens, case.num_heads, batch_first=True).eval()
        layer = layer.to(getattr(torch, case.dtype))
        with torch.no_grad():
            layer.in_proj_weight.copy_(torch.from_numpy(np.concatenate([weights[f"W_{n}"].T for n in "qkv"])))
            layer.in_proj_bias.copy_(torch.from_numpy(np.concatenate([weights[f"b_{n}"] for n in "qkv"])))
            layer.out_proj.weight.copy_(torch.from_numpy(weights["W_o"].T.copy()))
            layer.out_proj.bias.copy_(torch.from_numpy(weights["b_o"]))
        x = torch.from_numpy(inputs[0])
        padding = torch.arange(case.kv_len) >= lengths[:, None] if case.ragged else None

        def call():
            return layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    else:
        blhd = case.layout == "blhd"
        query, key, value = (tensor(x).transpose(1, 2) if blhd else tensor(x) for x in inputs)
        given = {"enable_gqa": True} if case.kv_heads != case.num_heads else {}
        if case.mask == "bias" or case.alibi:
            given["attn_mask"] = torch.from_numpy(case.additive_mask(options))
        elif case.is_causal == "upper_left" and not (case.window or case.ragged or case.mask):
            given["is_causal"] = True
        elif (visible := case.visible(options)) is not None:
            given["attn_mask"] = torch.from_numpy(visible)

        def call():
            result = attention(query, key, value, **given)
            return result.transpose(1, 2) if blhd else result

    def without_gradients():
        with torch.inference_mode():
            return ndarray(call())

    return without_gradients


def tensor(array):
    """The array's memory as a tensor; both libraries have bfloat16, and neither knows the other's."""
    import torch

    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def ndarray(tensor):
    import torch

    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view(dtype_of("bfloat16"))


def onnxruntime(case, threads):
    """Its MultiHeadAttention takes (batch, length, heads * depth) and has neither groups nor lower-right causal: a
    group's keys and values are repeated outside the call. A layer is its Attention and two more nodes."""
    if case.dtype != "float32" or case.kind not in ("attention", "layer") or case.is_causal == "lower_right":
        return None
    if case.mask or case.window or case.softcap or case.alibi:
        return None
    if case.ragged and case.kind != "layer":
        return None
    import onnxruntime
    from onnx import helper

    inputs, weights, _ = case.arrays()
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    model = onnx_layer(case, weights) if case.kind == "layer" else onnx_attention(case)
    model = helper.make_model(
        model, ir_version=9, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    if case.kind == "layer":
        feeds = {"x": inputs[0]} | ({"lengths": case.lengths().astype(np.int32)} if case.ragged else {})
        return lambda: session.run(["o"], feeds)[0]
    by_length = [x if case.layout == "blhd" else x.swapaxes(1, 2) for x in inputs]
    by_length[1:] = [np.repeat(x, case.num_heads // case.kv_heads, axis=2) for x in by_length[1:]]
    feeds = {name: x.reshape(*x.shape[:2], -1) for name, x in zip("qkv", by_length, strict=True)}
    shape = (case.batch, case.q_len, case.num_heads, case.head_dim)

    def call():
        result = session.run(["o"], feeds)[0].reshape(shape)
        return result if case.layout == "blhd" else result.swapaxes(1, 2)

    return call


def onnx_attention(case):
    from onnx import TensorProto, helper

    causal = int(case.is_causal == "upper_left")
    node = helper.make_node(
        "MultiHeadAttention", list("qkv"), ["o"],
        domain="com.microsoft", num_heads=case.num_heads, unidirectional=causal,
    )  # fmt: skip
    declared = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, ["b", f"l{n}", "d"]) for n in "qkvo"}
    return helper.make_graph([node], "attention", [declared[n] for n in "qkv"], [declared["o"]])


def onnx_layer(case, weights):
    """The weights are constants of the graph, as in an exported model."""
    from onnx import TensorProto, helper, numpy_helper

    constants = {"w": np.concatenate([weights[f"W_{n}"] for n in "qkv"], axis=1), "w_o": weights["W_o"]}
    constants |= {"b": np.concatenate([weights[f"b_{n}"] for n in "qkv"]), "b_o": weights["b_o"]}
    lengths = ["lengths"] if case.ragged else []
    nodes = [
        helper.make_node(
            "Attention", ["x", "w", "b", *lengths], ["joined"], domain="com.microsoft", num_heads=case.num_heads
        ),
        helper.make_node("MatMul", ["joined", "w_o"], ["product"]),
        helper.make_node("Add", ["product", "b_o"], ["o"]),
    ]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", "l", "d"])]
    given += [helper.make_tensor_value_info(n, TensorProto.INT32, ["b"]) for n in lengths]
    made = [helper.make_tensor_value_info("o", TensorProto.FLOAT, ["b", "l", "d"])]
    held = [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in constants.items()]
    return helper.make_graph(nodes, "layer", given, made, initializer=held)


CONTESTANTS = {"mha_fast": fast, "plain": plain, "reference": reference}
if importlib.util.find_spec("torch"):
    CONTESTANTS["torch"] = torch
if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
    CONTESTANTS["onnxruntime"] = onnxruntime
