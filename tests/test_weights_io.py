"""Layers from arrays, states, files and torch: the same numbers, whole errors, no code from files."""

import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import draw

import mha_fast
from mha_fast import reference

MODULES = pytest.mark.parametrize("module", [mha_fast, reference], ids=["fast", "reference"])
NAMES = [f"{kind}_{letter}" for kind in "Wb" for letter in "qkvo"]
SUFFIXES = pytest.mark.parametrize("suffix", [".npz", ".safetensors"])


def attention(module, rng, dtype="float32"):
    """A layer of unlike widths, and five inputs' worth of room between num_heads and num_kv_heads."""
    layer = module.MultiHeadAttention(12, 4, 0.25, bias=True, num_kv_heads=2, dtype=dtype, rng=0)
    layer.W_k, layer.W_v = draw(rng, 5, 6, dtype=dtype), draw(rng, 7, 6, dtype=dtype)
    return layer


def layers(module, rng):
    return [attention(module, rng), module.PositionWiseFFN(6, 9, rng=0)]


def assert_same(got, want):
    assert type(got) is type(want)
    assert vars(got).keys() == vars(want).keys()
    for name, value in vars(want).items():
        other = vars(got)[name]
        assert type(other) is type(value), name
        if isinstance(value, np.ndarray):
            assert other.dtype == value.dtype and other.flags.c_contiguous and other.flags.writeable, name
            assert not np.shares_memory(other, value), name
        assert np.array_equal(other, value), name


# ---------------------------------------------------------------- arrays and states


@MODULES
@pytest.mark.parametrize("number", [0, 1], ids=["attention", "ffn"])
def test_state_there_and_back(module, rng, number):
    layer = layers(module, rng)[number]
    state = layer.state_dict()
    assert all(isinstance(array, np.ndarray) for array in state.values())
    assert_same(type(layer).from_state_dict(state), layer)
    assert_same(type(layer).from_arrays(**state), layer)


@MODULES
def test_a_state_is_a_snapshot(module, rng):
    layer = attention(module, rng)
    state, before = layer.state_dict(), layer.W_q.copy()
    layer.W_q[...] = 0
    assert np.array_equal(state["W_q"], before)


@MODULES
def test_from_arrays_gives_the_layer_with_zero_biases(module, rng):
    W_q, W_k, W_v, W_o = (draw(rng, 8, columns) for columns in (8, 4, 4, 8))
    layer = module.MultiHeadAttention.from_arrays(2, W_q=W_q, W_k=W_k, W_v=W_v, W_o=W_o, num_kv_heads=1)
    want = module.MultiHeadAttention(8, 2, num_kv_heads=1)
    want.W_q, want.W_k, want.W_v, want.W_o = W_q, W_k, W_v, W_o
    x = draw(rng, 2, 3, 8)
    assert np.array_equal(layer(x, x, x), want(x, x, x))
    assert_same(layer, want)


@MODULES
def test_arrays_are_copied_contiguous_whatever_their_strides(module, rng):
    W = draw(rng, 16, 16)[::-2, ::2].T
    layer = module.MultiHeadAttention.from_arrays(2, W_q=W, W_k=W, W_v=W, W_o=np.broadcast_to(W[:1], (8, 8)))
    for name in NAMES:
        array = getattr(layer, name)
        assert array.flags.c_contiguous and array.flags.writeable and not np.shares_memory(array, W)
    assert np.array_equal(layer.W_q, W)
    assert not np.shares_memory(layer.W_q, layer.W_k)


@pytest.mark.parametrize(
    "given, kept",
    [("float32", "float32"), ("float64", "float64"), ("float16", "float32"), ("bfloat16", "float32"),
     (">f4", "float32"), ("int64", "float64")],
)  # fmt: skip
def test_dtypes(rng, given, kept):
    if given == "bfloat16":
        given = pytest.importorskip("ml_dtypes").bfloat16
    W = (4 * draw(rng, 4, 4)).astype(given)
    layer = mha_fast.MultiHeadAttention.from_arrays(2, W_q=W, W_k=W, W_v=W, W_o=W, b_o=W[0])
    for name in NAMES:
        assert getattr(layer, name).dtype == np.dtype(kept) and getattr(layer, name).dtype.isnative, name
    assert np.array_equal(layer.W_q, W.astype(kept)) and np.array_equal(layer.b_o, W[0].astype(kept))


@MODULES
def test_no_random_number_is_drawn(module, rng):
    before = np.random.get_state()[1].copy()
    for layer in layers(module, rng):
        type(layer).from_state_dict(layer.state_dict())
    assert np.array_equal(np.random.get_state()[1], before)


def arrays(**changed):
    return {name: np.zeros((8, 8)) if name[0] == "W" else np.zeros(8) for name in NAMES} | changed


@MODULES
@pytest.mark.parametrize(
    "changed, error, text",
    [
        ({"W_q": np.zeros(8)}, ValueError, "W_q has shape (8,); expected (any, any)"),
        ({"W_q": np.zeros((8, 9))}, ValueError, "num_hiddens is 9 and num_heads is 2"),
        ({"W_k": np.zeros((5, 4))}, ValueError, "W_k has shape (5, 4); expected (any, 8)"),
        ({"W_v": np.zeros((5, 4))}, ValueError, "W_v has shape (5, 4); expected (any, 8)"),
        ({"W_o": np.zeros((7, 8))}, ValueError, "W_o has shape (7, 8); expected (8, 8)"),
        ({"W_k": np.zeros((8, 8)), "num_kv_heads": 1}, ValueError, "W_k has shape (8, 8); expected (any, 4)"),
        ({"b_q": np.zeros(9)}, ValueError, "b_q has shape (9,); expected (8,)"),
        ({"b_o": np.zeros((1, 8))}, ValueError, "b_o has shape (1, 8); expected (8,)"),
        ({"W_o": np.zeros((8, 8), complex)}, TypeError, "W_o has dtype complex128"),
        ({"b_v": ["a"] * 8}, TypeError, "b_v has dtype <U1"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads is 3"),
        ({"dropout": 1.0}, ValueError, "dropout is 1.0"),
    ],
)
def test_arrays_that_do_not_fit(module, changed, error, text):
    with pytest.raises(error) as caught:
        module.MultiHeadAttention.from_arrays(2, **arrays(**changed))
    assert text in str(caught.value)


@MODULES
@pytest.mark.parametrize(
    "changed, text",
    [
        ({"W_1": np.zeros(3)}, "W_1 has shape (3,); expected (any, any)"),
        ({"W_2": np.zeros((2, 3))}, "W_2 has shape (2, 3); expected (4, any)"),
        ({"b_1": np.zeros(3)}, "b_1 has shape (3,); expected (4,)"),
        ({"b_2": np.zeros(4)}, "b_2 has shape (4,); expected (3,)"),
    ],
)
def test_arrays_that_do_not_fit_the_ffn(module, changed, text):
    with pytest.raises(ValueError) as caught:
        module.PositionWiseFFN.from_arrays(**({"W_1": np.zeros((3, 4)), "W_2": np.zeros((4, 3))} | changed))
    assert text in str(caught.value)


def test_a_layer_with_weights_that_do_not_fit_has_no_state(rng):
    layer = attention(mha_fast, rng)
    layer.W_k = np.zeros((5, 7))
    with pytest.raises(ValueError, match="W_k has shape"):
        layer.state_dict()


@pytest.mark.parametrize(
    "change, error, text",
    [
        (lambda s: s.pop("W_o"), ValueError, "state lacks W_o; expected num_heads, num_kv_heads, dropout, W_q"),
        (lambda s: s.update(scale=1), ValueError, "state has the unknown 'scale'"),
        (lambda s: s.update(num_heads=np.array([2])), TypeError, "num_heads is an array of shape (1,)"),
        (lambda s: s.update(num_heads=np.array(5)), ValueError, "num_hiddens is 12 and num_heads is 5"),
        (lambda s: s.update({f"layer.{n}": 0 for n in range(100)}), ValueError, "'layer.5' and 94 more"),
    ],
)
def test_states_that_do_not_fit(rng, change, error, text):
    state = attention(mha_fast, rng).state_dict()
    change(state)
    with pytest.raises(error) as caught:
        mha_fast.MultiHeadAttention.from_state_dict(state)
    assert text in str(caught.value)


def test_a_state_is_a_dict():
    with pytest.raises(TypeError, match="state is a list; expected a dict of arrays"):
        mha_fast.PositionWiseFFN.from_state_dict([1, 2])


# ---------------------------------------------------------------- files


@MODULES
@SUFFIXES
@pytest.mark.parametrize("number", [0, 1], ids=["attention", "ffn"])
@pytest.mark.parametrize("kind", [str, Path])
def test_files_there_and_back(module, rng, tmp_path, suffix, number, kind):
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    layer, path = layers(module, rng)[number], kind(tmp_path / f"layer{suffix}")
    layer.save(path)
    assert os.listdir(tmp_path) == [f"layer{suffix}"]
    assert_same(type(layer).load(path), layer)
    layer.save(path)  # replaces


@SUFFIXES
def test_a_file_of_weights_with_strides(rng, tmp_path, suffix):
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    layer = attention(mha_fast, rng)
    layer.W_q = draw(rng, 12, 12, dtype="float32").T
    layer.b_q = np.float32([0.5])[[0] * 12][::-1]
    layer.save(tmp_path / f"x{suffix}")
    same = mha_fast.MultiHeadAttention.load(tmp_path / f"x{suffix}")
    assert np.array_equal(same.W_q, layer.W_q) and np.array_equal(same.b_q, layer.b_q)


@pytest.mark.parametrize("name", ["x", "x.pt", "x.npy", "x.NPZ", ".npz"])
def test_other_suffixes(tmp_path, name):
    layer = mha_fast.PositionWiseFFN(2, 3)
    for call in (layer.save, mha_fast.PositionWiseFFN.load):
        with pytest.raises(ValueError, match=r"expected the suffix .npz or .safetensors"):
            call(tmp_path / name)
    assert not os.listdir(tmp_path)


def test_a_path_is_a_path():
    with pytest.raises(TypeError, match="path is a int; expected a str"):
        mha_fast.PositionWiseFFN.load(3)


@SUFFIXES
def test_files_that_are_not_there(tmp_path, suffix):
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    with pytest.raises(FileNotFoundError):
        mha_fast.PositionWiseFFN.load(tmp_path / f"x{suffix}")


@SUFFIXES
def test_files_that_cannot_be_written(tmp_path, suffix):
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    layer = mha_fast.PositionWiseFFN(2, 3)
    with pytest.raises(FileNotFoundError):
        layer.save(tmp_path / "missing" / f"x{suffix}")
    os.mkdir(tmp_path / f"x{suffix}")
    for call in (layer.save, mha_fast.PositionWiseFFN.load):
        with pytest.raises(OSError):
            call(tmp_path / f"x{suffix}")


def test_nothing_is_written_for_a_layer_that_does_not_fit(tmp_path):
    layer = mha_fast.PositionWiseFFN(2, 3)
    layer.b_1 = np.zeros(2)
    with pytest.raises(ValueError, match="b_1 has shape"):
        layer.save(tmp_path / "x.npz")
    assert not os.listdir(tmp_path)


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_in_a_file_is_run(tmp_path):
    trace, path = tmp_path / "trace", tmp_path / "x.npz"
    state = mha_fast.PositionWiseFFN(2, 3).state_dict()
    objects = np.empty((), object)
    objects[()] = Bomb(trace)
    np.savez(path, **(state | {"b_2": objects}))
    with pytest.raises(ValueError, match=r"x\.npz is no readable \.npz file"):
        mha_fast.PositionWiseFFN.load(path)
    path.write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(ValueError, match=r"x\.npz is no readable \.npz file"):
        mha_fast.PositionWiseFFN.load(path)
    assert not trace.exists()


@SUFFIXES
def test_damaged_files(rng, tmp_path, suffix):
    """Cut anywhere, or with any byte changed: the layer's class refuses it, or the numbers differ, or nothing does."""
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    path = tmp_path / f"x{suffix}"
    mha_fast.PositionWiseFFN(2, 3).save(path)
    whole = path.read_bytes()
    damaged = [whole[:n] for n in (0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1)]
    for position in rng.integers(0, len(whole), 300):
        damaged.append(whole[:position] + bytes([rng.integers(256)]) + whole[position + 1 :])
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            mha_fast.PositionWiseFFN.load(path)
        except (ValueError, TypeError):
            refused += 1
    assert refused > 50


def test_files_of_something_else(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, a=np.zeros(3))
    with pytest.raises(ValueError, match=r"x\.npz lacks W_1, lacks W_2, lacks b_1, lacks b_2, has the unknown 'a'"):
        mha_fast.PositionWiseFFN.load(path)
    single = io.BytesIO()
    np.save(single, np.zeros(3))
    path.write_bytes(single.getvalue())
    with pytest.raises(ValueError, match="it holds a single array"):
        mha_fast.PositionWiseFFN.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("W_1", b"no array")
    with pytest.raises(ValueError, match=r"lacks W_2|no readable"):
        mha_fast.PositionWiseFFN.load(path)


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    monkeypatch.setitem(__import__("sys").modules, "safetensors.numpy", None)
    layer = mha_fast.PositionWiseFFN(2, 3)
    for call in (layer.save, mha_fast.PositionWiseFFN.load):
        with pytest.raises(ImportError, match=r'pip install "mha_fast\[safetensors\]"'):
            call(tmp_path / "x.safetensors")
    assert not os.listdir(tmp_path)


# ---------------------------------------------------------------- torch


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def module_of(torch, seed=0, dtype="float64", **options):
    torch.manual_seed(seed)
    module = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=getattr(torch, dtype), **options).eval()
    with torch.no_grad():  # torch begins with biases of zero
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.normal_()
    return module


VARIANTS = {
    "packed": {},
    "no bias": {"bias": False},
    "kdim": {"kdim": 5},
    "kdim, vdim, no bias": {"kdim": 5, "vdim": 7, "bias": False},
}


@MODULES
def test_torch_names_without_torch(module, rng):
    """Packed and separate names give one layer, whose weights are the transposed ones."""
    q, k, v, out = draw(rng, 4, 12, 12)
    biases = {"in_proj_bias": draw(rng, 36), "out_proj.bias": draw(rng, 12)}
    packed = {"in_proj_weight": np.concatenate([q, k, v]), "out_proj.weight": out} | biases
    separate = {"q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v, "out_proj.weight": out} | biases
    layer = module.MultiHeadAttention.from_torch(packed, num_heads=3)
    assert_same(module.MultiHeadAttention.from_torch(separate, num_heads=3), layer)
    want = [q.T, k.T, v.T, out.T, *np.split(biases["in_proj_bias"], 3), biases["out_proj.bias"]]
    for name, array in zip(NAMES, want, strict=True):
        assert np.array_equal(getattr(layer, name), array) and getattr(layer, name).flags.c_contiguous, name


@MODULES
@pytest.mark.parametrize("dtype, limit", [("float64", 1e-14), ("float32", 5e-6)])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", ["module", "state_dict", "arrays"])
def test_torch_gives_the_same_numbers(torch, module, rng, variant, dtype, limit, form):
    source = module_of(torch, dtype=dtype, **VARIANTS[variant])
    state = source.state_dict()
    if form == "arrays":
        state = {name: tensor.numpy() for name, tensor in state.items()}
    cls = module.MultiHeadAttention
    layer = cls.from_torch(source) if form == "module" else cls.from_torch(state, num_heads=3)
    queries = draw(rng, 2, 4, 12, dtype=dtype)
    keys, values = (draw(rng, 2, 6, width or 12, dtype=dtype) for width in (source.kdim, source.vdim))
    hidden = np.arange(6) >= np.array([3, 5])[:, None]
    with torch.no_grad():
        want, weights = source(
            *(torch.from_numpy(x) for x in (queries, keys, values)),
            key_padding_mask=torch.from_numpy(hidden),
            average_attn_weights=False,
        )
    got = layer(queries, keys, values, valid_lens=[3, 5], need_weights=True)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=limit)
    np.testing.assert_allclose(layer.attention_weights, weights.numpy(), rtol=0, atol=limit)
    for name in NAMES:
        assert getattr(layer, name).flags.c_contiguous and getattr(layer, name).dtype == dtype, name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_half_types_become_float32(torch, dtype):
    source = module_of(torch, dtype="float32").to(getattr(torch, dtype))
    layer = mha_fast.MultiHeadAttention.from_torch(source)
    for name in NAMES:
        assert getattr(layer, name).dtype == np.float32, name
    assert np.array_equal(layer.W_o, source.out_proj.weight.detach().float().numpy().T)


def test_torch_tensors_as_arrays(torch):
    W = torch.ones(4, 4, requires_grad=True)
    layer = mha_fast.MultiHeadAttention.from_arrays(2, W_q=W, W_k=W, W_v=W, W_o=W.bfloat16())
    assert layer.W_o.dtype == np.float32 and np.array_equal(layer.W_o, np.ones((4, 4)))


def test_torch_dropout_is_kept(torch):
    assert mha_fast.MultiHeadAttention.from_torch(module_of(torch, dropout=0.25)).dropout == 0.25


def test_torch_weights_are_copies(torch):
    source = module_of(torch)
    layer = mha_fast.MultiHeadAttention.from_torch(source)
    before = layer.W_q.copy()
    with torch.no_grad():
        source.in_proj_weight.zero_()
    assert np.array_equal(layer.W_q, before)


def test_torch_modules_that_a_layer_cannot_be(torch):
    make, state = mha_fast.MultiHeadAttention.from_torch, module_of(torch, add_bias_kv=True).state_dict()
    with pytest.raises(ValueError, match="add_bias_kv"):
        make(module_of(torch, add_bias_kv=True))
    with pytest.raises(ValueError, match="add_bias_kv"):
        make(state, 3)
    with pytest.raises(ValueError, match="add_zero_attn"):
        make(module_of(torch, add_zero_attn=True))
    with pytest.raises(TypeError, match=r"source is a Linear; expected a torch.nn.MultiheadAttention"):
        make(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="num_heads is 4 but source has 3"):
        make(module_of(torch), num_heads=4)
    with pytest.raises(TypeError, match="in_proj_weight cannot be converted to an array"):
        make(module_of(torch).to("meta"))


def torch_state(**changed):
    state = {"in_proj_weight": np.zeros((12, 4)), "out_proj.weight": np.zeros((4, 4)), "in_proj_bias": np.zeros(12)}
    return {name: array for name, array in (state | changed).items() if array is not None}


SEPARATE = {"in_proj_weight": None, "q_proj_weight": np.zeros((4, 4)), "k_proj_weight": np.zeros((4, 5))}


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"out_proj.weight": np.zeros((4, 5))}, "out_proj.weight has shape (4, 5); expected (4, 4)"),
        ({"out_proj.weight": np.zeros(4)}, "out_proj.weight has shape (4,); expected (any, any)"),
        ({"in_proj_weight": np.zeros((4, 12))}, "in_proj_weight has shape (4, 12); expected (12, 4)"),
        ({"in_proj_bias": np.zeros(4)}, "in_proj_bias has shape (4,); expected (12,)"),
        ({"out_proj.bias": np.zeros(5)}, "out_proj.bias has shape (5,); expected (4,)"),
        ({"in_proj_weight": None}, "source lacks in_proj_weight; expected in_proj_weight, out_proj.weight"),
        ({"self_attn.in_proj_weight": np.zeros(1)}, "source has the unknown 'self_attn.in_proj_weight'"),
        (SEPARATE, "source lacks v_proj_weight"),
        ({**SEPARATE, "v_proj_weight": np.zeros((5, 4))}, "v_proj_weight has shape (5, 4); expected (4, any)"),
    ],
)
def test_torch_states_that_do_not_fit(changed, text):
    with pytest.raises(ValueError) as caught:
        mha_fast.MultiHeadAttention.from_torch(torch_state(**changed), num_heads=2)
    assert text in str(caught.value)


def test_a_torch_state_needs_num_heads():
    with pytest.raises(ValueError, match="num_heads is None; expected a number"):
        mha_fast.MultiHeadAttention.from_torch(torch_state())
    with pytest.raises(ValueError, match="num_hiddens is 4 and num_heads is 3"):
        mha_fast.MultiHeadAttention.from_torch(torch_state(), num_heads=3)
