"""The ONNX operator: onnx's own implementation in float64 is the oracle, on the fused kernel and on the reference."""

import importlib
import sys

import numpy as np
import pytest
from conftest import UNIT, draw

from mha_fast import reference

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import mha_fast.onnx  # noqa: E402
from mha_fast.onnx import Attention  # noqa: E402

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")
BATCH, HEADS, KV_HEADS, QUERIES, KEYS, SIZE, V_SIZE, PAST = 2, 4, 2, 3, 5, 8, 6, 4
# Relative to the largest value: what rounding of the result to the type may lose, and some for float32 inside.
LIMITS = {"float64": 64 * UNIT["float64"], "float32": 64 * UNIT["float32"], "float16": 2.0**-10, "bfloat16": 2.0**-7}


@pytest.fixture(params=["fast", "reference"], autouse=True)
def implementation(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(mha_fast.onnx, "scaled_dot_product_attention", reference.scaled_dot_product_attention)


def as_dtype(name):
    return pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else np.dtype(name)


def run(inputs, opset=25, outputs=("Y",), ops=(Attention,), **attributes):
    """The outputs of one node by name; ops=() is onnx's own implementation."""
    given = INPUTS[: max(INPUTS.index(name) for name in inputs) + 1]
    wanted = OUTPUTS[: max(OUTPUTS.index(name) for name in outputs) + 1]
    node = helper.make_node(
        "Attention",
        [name if name in inputs else "" for name in given],
        [name if name in outputs else "" for name in wanted],
        **attributes,
    )

    def info(name, array, shape):
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)

    graph = helper.make_graph(
        [node],
        "attention",
        [info(name, array, array.shape) for name, array in inputs.items()],
        [info(name, inputs["Q"], None) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    with np.errstate(all="ignore"):  # onnx's own subtracts infinities
        return dict(zip(outputs, ReferenceEvaluator(model, new_ops=list(ops)).run(list(outputs), inputs), strict=True))


def raised(inputs, **options):
    """The exception of a run; the evaluator wraps a TypeError."""
    with pytest.raises((ValueError, TypeError)) as caught:
        run(inputs, **options)
    return caught.value.__cause__ or caught.value


def wide(array):
    return array.astype(np.float64) if array.dtype.kind == "f" or array.dtype.name == "bfloat16" else array


def exact(inputs, outputs=("Y",), **options):
    """onnx's own implementation in float64, without its two faults."""
    inputs = {name: wide(array) for name, array in inputs.items()}
    if "attn_mask" in inputs:  # beside is_causal it takes the number of queries from the mask
        mask = np.atleast_2d(inputs["attn_mask"])
        inputs["attn_mask"] = np.broadcast_to(mask, (*mask.shape[:-2], QUERIES, mask.shape[-1])).copy()
    want = run(inputs, outputs=outputs, ops=(), **options)
    if options.get("qk_matmul_output_mode") == 0 and "softcap" in options:  # the product before the cap, by the text
        uncapped = run(inputs, outputs=outputs, ops=(), **{k: v for k, v in options.items() if k != "softcap"})
        want["qk_matmul_output"] = uncapped["qk_matmul_output"]
    return want


def check(inputs, **options):
    before = {name: array.copy() for name, array in inputs.items()}
    got, want = run(inputs, **options), exact(inputs, **options)
    for name, array in got.items():
        assert array.dtype == inputs["V" if name == "present_value" else "Q"].dtype, name
        largest = np.abs(want[name][np.isfinite(want[name])]).max(initial=1.0)
        atol = largest * LIMITS[array.dtype.name]
        np.testing.assert_allclose(wide(array), want[name], rtol=0, atol=atol, err_msg=name)
    for name, array in inputs.items():
        assert np.array_equal(array, before[name]), f"{name} was changed"


def qkv(rng, rank=4, dtype="float32", past=False):
    """The inputs Q, K and V, with past_key and past_value, and the attributes of their rank."""
    sizes = {"Q": (HEADS, QUERIES, SIZE), "K": (KV_HEADS, KEYS, SIZE), "V": (KV_HEADS, KEYS, V_SIZE)}
    if past:
        sizes |= {"past_key": (KV_HEADS, PAST, SIZE), "past_value": (KV_HEADS, PAST, V_SIZE)}
    inputs = {name: draw(rng, BATCH, *shape).astype(as_dtype(dtype)) for name, shape in sizes.items()}
    if rank == 4:
        return inputs, {}
    for name in "QKV":
        array = inputs[name].swapaxes(1, 2)
        inputs[name] = np.ascontiguousarray(array).reshape(*array.shape[:2], -1)
    return inputs, {"q_num_heads": HEADS, "kv_num_heads": KV_HEADS}


FEATURES = {
    "plain": {},
    "causal": {"is_causal": 1},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 0.5},
    "left window": {"left_window_size": 1},
    "both windows": {"left_window_size": 1, "right_window_size": 0},
    "all": {"left_window_size": 2, "right_window_size": 1, "is_causal": 1, "softcap": 2.0, "scale": 0.7},
}
MASKS = {
    "no mask": lambda rng, keys: None,
    "bool": lambda rng, keys: rng.random((QUERIES, keys)) < 0.5,
    "float": lambda rng, keys: draw(rng, BATCH, HEADS, QUERIES, keys, dtype="float32"),
    "heads": lambda rng, keys: draw(rng, HEADS, 1, keys, dtype="float32"),
    "hidden": lambda rng, keys: np.where(rng.random((BATCH, 1, QUERIES, keys)) < 0.5, np.float32(-np.inf), 0),
    "a row": lambda rng, keys: rng.random(keys) < 0.5,
    "short": lambda rng, keys: rng.random((QUERIES, keys - 2)) < 0.5,
    "short float": lambda rng, keys: draw(rng, BATCH, 1, QUERIES, keys - 1, dtype="float32"),
}
CACHES = ("no cache", "past", "nonpad")


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("feature", FEATURES)
def test_everything_combines(rng, rank, cache, mask, feature):
    inputs, heads = qkv(rng, rank, past=cache == "past")
    if cache == "nonpad":
        inputs["nonpad_kv_seqlen"] = np.array([4, 2])  # the second: fewer keys than queries
    attn_mask = MASKS[mask](rng, KEYS + (PAST if cache == "past" else 0))
    if attn_mask is not None:
        inputs["attn_mask"] = attn_mask
    outputs = OUTPUTS if cache == "past" else ("Y", "qk_matmul_output")
    for mode in range(4):
        check(inputs, outputs=outputs, qk_matmul_output_mode=mode, **heads, **FEATURES[feature])


@pytest.mark.parametrize("opset", [23, 24, 25])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("rank", [3, 4])
def test_dtypes_and_opsets(rng, opset, dtype, rank):
    inputs, heads = qkv(rng, rank, dtype, past=True)
    inputs["attn_mask"] = draw(rng, QUERIES, KEYS + PAST).astype(as_dtype(dtype))
    for mode in range(4):
        check(inputs, opset=opset, outputs=OUTPUTS, is_causal=1, softcap=3.0, qk_matmul_output_mode=mode, **heads)


def test_values_of_another_dtype(rng):
    inputs, _ = qkv(rng)
    inputs["V"] = inputs["V"].astype(np.float16)
    check(inputs, outputs=OUTPUTS[:3])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("precision", ["FLOAT", "FLOAT16", "DOUBLE", "BFLOAT16"])
def test_softmax_precision_is_a_lower_bound(rng, dtype, precision):
    inputs, _ = qkv(rng, dtype=dtype)
    want = exact(inputs)["Y"]
    got = wide(run(inputs, softmax_precision=getattr(TensorProto, precision))["Y"])
    np.testing.assert_allclose(got, want, rtol=0, atol=LIMITS[dtype] * np.abs(want).max())
    if precision == "DOUBLE" and dtype != "float64":  # rounded once
        assert np.array_equal(got, want.astype(dtype))


def test_integer_masks_are_added(rng):
    inputs, _ = qkv(rng)
    inputs["attn_mask"] = rng.integers(-3, 3, (QUERIES, KEYS))
    check(inputs, outputs=("Y", "qk_matmul_output"), qk_matmul_output_mode=2)


@pytest.mark.parametrize("opset", [23, 24])
def test_a_mask_of_size_1(rng, opset):
    inputs, _ = qkv(rng)
    inputs["attn_mask"] = np.ones((QUERIES, 1), bool)
    got = run(inputs, opset=opset)["Y"]
    rest = {name: inputs[name] for name in "QKV"}
    if opset == 24:
        rest |= {name: rest[name][:, :, :1] for name in "KV"}
    np.testing.assert_allclose(got, run(rest, ops=())["Y"], rtol=0, atol=1e-6)


def test_a_query_that_sees_nothing_gives_zeros(rng):
    inputs, _ = qkv(rng)
    inputs["attn_mask"] = np.arange(QUERIES)[:, None] > np.zeros(KEYS)
    got = run(inputs, outputs=("Y", "qk_matmul_output"), qk_matmul_output_mode=3)
    assert not got["Y"][:, :, 0].any() and not got["qk_matmul_output"][:, :, 0].any()
    assert got["Y"][:, :, 1:].all()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_hidden_may_be_anything(rng, poison):
    inputs, _ = qkv(rng)
    inputs["nonpad_kv_seqlen"] = np.array([4, 2])
    want = run(inputs)["Y"]
    for entry, length in enumerate(inputs["nonpad_kv_seqlen"]):
        inputs["K"][entry, :, length:] = inputs["V"][entry, :, length:] = poison
    assert np.array_equal(run(inputs)["Y"], want)


def test_scores_are_computed_only_if_they_are_wanted(rng, monkeypatch):
    inputs, _ = qkv(rng, past=True)
    monkeypatch.delattr(mha_fast.onnx, "_scores")
    run(inputs)
    run(inputs, outputs=OUTPUTS[:3])
    run(inputs, outputs=("Y", "qk_matmul_output"), qk_matmul_output_mode=3)
    with pytest.raises(NameError):
        run(inputs, outputs=("Y", "qk_matmul_output"))


def test_several_nodes_of_one_model(rng):
    """Attributes are each node's own."""
    inputs, _ = qkv(rng)
    nodes = [helper.make_node("Attention", ["Q", "K", "V"], [f"Y{n}"], is_causal=n) for n in (0, 1)]
    nodes.append(helper.make_node("Sub", ["Y0", "Y1"], ["Y"]))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in inputs.items()]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])
    [got] = ReferenceEvaluator(model, new_ops=[Attention]).run(None, inputs)
    [want] = ReferenceEvaluator(model).run(None, inputs)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def without_head_counts(rng):
    return qkv(rng, rank=3)[0]


def changed(**arrays):
    return lambda rng: qkv(rng)[0] | arrays


REFUSED = {
    "window of opset 24": (
        changed(),
        {"opset": 24, "left_window_size": 1},
        "left_window_size, which Attention of opset 24",
    ),
    "nonpad of opset 23": (
        changed(nonpad_kv_seqlen=np.array([1, 2])),
        {"opset": 23},
        "nonpad_kv_seqlen, which Attention of opset 23",
    ),
    "no head counts": (without_head_counts, {}, "Q has shape (2, 3, 32); expected q_num_heads"),
    "head counts": (
        without_head_counts,
        {"q_num_heads": 4, "kv_num_heads": 3},
        "K has shape (2, 5, 16); expected kv_num",
    ),
    "no such head count": (
        without_head_counts,
        {"q_num_heads": 0},
        "expected q_num_heads that divides its width, not 0",
    ),
    "head count of 4 axes": (changed(), {"q_num_heads": HEADS}, "q_num_heads is 4, but Q has 4 axes"),
    "other head count": (
        changed(),
        {"opset": 24, "kv_num_heads": 1},
        "kv_num_heads is 1, but K has shape (2, 2, 5, 8)",
    ),
    "axes": (changed(Q=np.zeros((2, 3, 32), "f4")), {}, "Q, K and V have 3, 4 and 4 axes"),
    "dtype": (changed(V=np.zeros((2, 2, 5, 6), "i4")), {}, "V has dtype int32"),
    "past alone": (changed(past_key=np.zeros((2, 2, 4, 8), "f4")), {}, "past_key or past_value is missing"),
    "past of another shape": (
        changed(past_key=np.zeros((2, 4, 4, 8), "f4"), past_value=np.zeros((2, 2, 4, 6), "f4")),
        {},
        "past_key has shape (2, 4, 4, 8); expected (2, 2, any, 8)",
    ),
    "two caches": (
        lambda rng: qkv(rng, past=True)[0] | {"nonpad_kv_seqlen": np.array([1, 2])},
        {},
        "nonpad_kv_seqlen came beside past_key",
    ),
    "nonpad of another shape": (
        changed(nonpad_kv_seqlen=np.array([3])),
        {},
        "nonpad_kv_seqlen has shape (1,) and dtype int64; expected (2,)",
    ),
    "mask too long": (changed(attn_mask=np.ones((3, 6), bool)), {}, "attn_mask has shape (3, 6)"),
    "mask too short": (changed(attn_mask=np.ones((3, 4), bool)), {"opset": 23}, "attn_mask has shape (3, 4)"),
    "mode": (changed(), {"qk_matmul_output_mode": 4}, "qk_matmul_output_mode is 4"),
    "causal": (changed(), {"is_causal": 2}, "is_causal is 2"),
    "precision": (changed(), {"softmax_precision": TensorProto.INT8}, "softmax_precision is 3"),
    "window": (changed(), {"right_window_size": -2}, "window_size[1] is -2"),
    "softcap": (changed(), {"softcap": -1.0}, "softcap is -1.0"),
    "heads": (changed(Q=np.zeros((2, 3, 3, 8), "f4")), {}, "no multiple of the 2 heads of key"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(rng, case):
    inputs, options, text = REFUSED[case]
    error = raised(inputs(rng), **options)
    assert text in str(error)
    assert isinstance(error, TypeError if case == "dtype" else ValueError)


def test_the_result_comes_from_the_kernel(rng, monkeypatch):
    calls = []
    attend = mha_fast.onnx.scaled_dot_product_attention
    monkeypatch.setattr(
        mha_fast.onnx, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or attend(*a, **k)
    )
    run(qkv(rng)[0], outputs=("Y", "qk_matmul_output"))
    assert len(calls) == 1


def test_without_onnx(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "mha_fast.onnx")
    with pytest.raises(ImportError, match=r'needs onnx: pip install "mha_fast\[onnx\]"'):
        importlib.import_module("mha_fast.onnx")
