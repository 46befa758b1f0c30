"""The layer on every level: its projections and attention against the reference in float64, memory, bits, threads."""

import numpy as np
import pytest
from conftest import DTYPES, UNIT, assert_close, draw, largest, tiles, wide

import mha_fast
from mha_fast import reference

DTYPE = pytest.mark.parametrize("dtype", DTYPES)
NAMES = [f"{kind}_{letter}" for kind in "Wb" for letter in "qkvo"]


def layers(rng, hiddens=24, heads=4, kv_heads=None, dtype="float64", widths=(None, None, None), cls=None):
    """A fast layer with weights of variance 1 / rows, and the reference's with the same numbers in float64."""
    layer = (cls or mha_fast.MultiHeadAttention)(hiddens, heads, bias=True, num_kv_heads=kv_heads, dtype=dtype, rng=0)
    for name, rows in zip(("W_q", "W_k", "W_v", "W_o"), (*widths, None), strict=True):
        columns = getattr(layer, name).shape[1]
        weight = draw(rng, rows or hiddens, columns, dtype=dtype) / np.dtype(dtype).type((rows or hiddens) ** 0.5)
        setattr(layer, name, weight)
        bias = f"b_{name[-1]}"
        setattr(layer, bias, draw(rng, columns, dtype=dtype))
    return layer, twin(layer)


def twin(layer):
    exact = reference.MultiHeadAttention(layer.num_hiddens, layer.num_heads, num_kv_heads=layer.num_kv_heads)
    for name in NAMES:
        setattr(exact, name, wide(np.asarray(getattr(layer, name))))
    return exact


def agree(layer, exact, queries, keys, values, **options):
    """The result and the weights; three products and an attention of numbers of about 1."""
    dtype = np.result_type(queries, keys, values, layer.W_q, layer.W_k, layer.W_v, layer.W_o)
    got = layer(queries, keys, values, need_weights=True, **options)
    want = exact(*(wide(x) for x in (queries, keys, values)), need_weights=True, **options)
    assert got.dtype == dtype
    depth = max(x.shape[-1] for x in (queries, keys, values, layer.W_o))
    bound = UNIT[dtype.name] * (200 + 40 * depth**0.5)
    assert_close(got, want, bound * largest(want))
    assert_close(layer.attention_weights, exact.attention_weights, bound, "weights")
    assert np.array_equal(layer(queries, keys, values, **options), got), "other bits than with weights"
    return got


def inputs(rng, queries=5, keys=7, hiddens=24, dtype="float64", batch=2):
    x, y = draw(rng, batch, queries, hiddens, dtype=dtype), draw(rng, batch, keys, hiddens, dtype=dtype)
    return x, y, y + x.dtype.type(1)


@pytest.mark.parametrize("module", [mha_fast, reference], ids=["fast", "reference"])
def test_a_class_has_its_own_attention_inside_one_body(module):
    cls = module.MultiHeadAttention
    assert cls._attention is module.scaled_dot_product_attention
    assert cls.scaled_dot_product_attention is reference.MultiHeadAttention.scaled_dot_product_attention


FEATURES = {
    "plain": lambda rng: {},
    "lengths": lambda rng: {"valid_lens": np.array([3, 7])},
    "a list": lambda rng: {"valid_lens": [0, 2.5]},
    "lengths of queries": lambda rng: {"valid_lens": rng.integers(0, 8, (2, 5))},
    "bool mask": lambda rng: {"attn_mask": rng.random((5, 7)) < 0.6},
    "float mask": lambda rng: {"attn_mask": draw(rng, 2, 4, 5, 7, dtype="float32")},
    "upper left": lambda rng: {"is_causal": "upper_left"},
    "lower right": lambda rng: {"is_causal": "lower_right", "valid_lens": np.array([6, 4])},
    "all": lambda rng: {"is_causal": "lower_right", "valid_lens": [6, 4], "attn_mask": rng.random((2, 1, 5, 7)) < 0.6},
}


@DTYPE
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_features(isa, rng, dtype, feature, kv_heads):
    agree(*layers(rng, kv_heads=kv_heads, dtype=dtype), *inputs(rng, dtype=dtype), **FEATURES[feature](rng))


@DTYPE
@pytest.mark.parametrize("heads", [1, 3])
def test_sizes_around_the_tiles(isa, rng, dtype, heads):
    """Depths of a head around the lanes, rows around the row tile and the panel, widths of inputs of their own."""
    t = tiles(dtype)
    for n, depth in enumerate((1, 2, t["lanes"] - 1 or 1, t["lanes"], t["lanes"] + 1, 4 * t["lanes"] + 1, 64)):
        widths = (heads * depth + 3, 1, 513) if n % 2 else (None, None, None)
        layer, exact = layers(rng, heads * depth, heads, dtype=dtype, widths=widths)
        rows = (1, t["row_tile"] - 1, t["row_tile"] + 1, t["panel"] - 1, t["panel"] + 1, 9, 4 * t["panel"] + 1)[n]
        x, y, z = (
            draw(rng, 2, length, weight.shape[0], dtype=dtype)
            for length, weight in ((rows, layer.W_q), (rows + n, layer.W_k), (rows + n, layer.W_v))
        )
        agree(layer, exact, x, y, z, valid_lens=[rows, rows + n])


@DTYPE
@pytest.mark.parametrize("missing", ["batch", "queries", "keys"])
def test_sizes_of_zero(isa, rng, dtype, missing):
    sizes = {"batch": 2, "queries": 5, "keys": 7} | {missing: 0}
    layer, _ = layers(rng, dtype=dtype)
    x, y, z = inputs(rng, dtype=dtype, **sizes)
    got = layer(x, y, z)
    assert got.shape == (sizes["batch"], sizes["queries"], 24)
    if missing == "keys":  # every query sees nothing: 0 W_o + b_o
        assert np.array_equal(got, np.broadcast_to(layer.b_o, got.shape))


@DTYPE
def test_a_query_that_sees_nothing_gives_the_bias(isa, rng, dtype):
    layer, _ = layers(rng, dtype=dtype)
    x, y, z = inputs(rng, dtype=dtype)
    got = layer(x, y, z, valid_lens=[0, 7])
    assert np.array_equal(got[0], np.broadcast_to(layer.b_o, got[0].shape))


@DTYPE
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_padding_may_hold_anything(isa, rng, dtype, poison):
    """Rows beyond the lengths, NaN among them, change no bit of the others."""
    layer, _ = layers(rng, dtype=dtype)
    x, y, z = inputs(rng, keys=40, dtype=dtype)
    want = layer(x, y, z, valid_lens=[33, 21])
    for n, length in enumerate((33, 21)):
        y[n, length:], z[n, length:] = poison, poison
    assert np.array_equal(layer(x, y, z, valid_lens=[33, 21]), want)


# ---------------------------------------------------------------- memory

VIEWS = {
    "columns first": np.asfortranarray,
    "spaced": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "backwards": lambda x: np.flip(np.flip(x).copy()),
    "byte-swapped": lambda x: x.astype(x.dtype.newbyteorder()),
    "part of rows": lambda x: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(2, 3)], constant_values=np.nan)[..., 2:-3],
}


@DTYPE
@pytest.mark.parametrize("view", VIEWS)
def test_memory_does_not_matter(isa, rng, dtype, view):
    """Inputs, weights and biases of any strides, each by itself; packed or read where they lie, one arithmetic."""
    layer, _ = layers(rng, kv_heads=2, dtype=dtype)
    arrays = inputs(rng, 9, 11, dtype=dtype)
    want = layer(*arrays, valid_lens=[4, 11])
    for n in range(3):
        changed = [VIEWS[view](x) if n == m else x for m, x in enumerate(arrays)]
        assert np.array_equal(layer(*changed, valid_lens=[4, 11]), want), n
    for name in NAMES:
        before = getattr(layer, name)
        setattr(layer, name, VIEWS[view](before))
        assert np.array_equal(layer(*arrays, valid_lens=[4, 11]), want), name
        setattr(layer, name, before)


@DTYPE
def test_out(isa, rng, dtype):
    layer, _ = layers(rng, dtype=dtype)
    arrays = inputs(rng, dtype=dtype)
    want = layer(*arrays)
    whole = np.full((2, 5, 50), 12345.0, dtype)
    for out in (np.empty_like(want), whole[..., 1:49:2], np.empty((5, 24, 2), dtype).transpose(2, 0, 1)):
        assert layer(*arrays, out=out) is out
        assert np.array_equal(out, want)
    whole[..., 1:49:2] = 12345.0
    assert (whole == 12345.0).all()


@pytest.mark.parametrize("which", [*NAMES, 0, 1, 2])
def test_mixed_dtypes(isa, rng, which):
    """One float64 weight or input makes the result float64; a bias makes nothing."""
    layer, _ = layers(rng, dtype="float32")
    arrays = list(inputs(rng, dtype="float32"))
    if isinstance(which, str):
        setattr(layer, which, getattr(layer, which).astype("float64"))
    else:
        arrays[which] = arrays[which].astype("float64")
    got = agree(layer, twin(layer), *arrays)
    assert got.dtype == ("float32" if str(which).startswith("b_") else "float64")


def test_edits_in_place_count_at_once(isa, rng):
    """Nothing is cached, neither of C-contiguous weights nor of packed ones."""
    layer, _ = layers(rng)
    arrays = inputs(rng)
    for order in (np.ascontiguousarray, np.asfortranarray):
        for name in NAMES:
            setattr(layer, name, order(getattr(layer, name)))
            before = layer(*arrays)
            getattr(layer, name)[...] *= 1.5
            agree(layer, twin(layer), *arrays)
            assert name == "b_k" or not np.array_equal(layer(*arrays), before)  # a shift of all scores


class Fresh(mha_fast.MultiHeadAttention):
    """Weights that nobody else holds: each look at one gives a new array."""


for _name in NAMES:
    setattr(
        Fresh,
        _name,
        property(
            lambda self, name=_name: self.__dict__[name].copy(),
            lambda self, value, name=_name: self.__dict__.__setitem__(name, value),
        ),
    )


@DTYPE
def test_weights_live_as_long_as_the_call(isa, rng, dtype):
    """A property may make them, and another thread may replace them, while a call runs."""
    layer, exact = layers(rng, 256, 4, dtype=dtype, cls=Fresh)
    agree(layer, exact, *inputs(rng, 33, 44, 256, dtype))


# ---------------------------------------------------------------- bits


@DTYPE
@pytest.mark.parametrize("queries", [1, 30])
def test_the_same_bits_for_any_number_of_threads_and_batch(isa, rng, dtype, queries):
    layer, _ = layers(rng, 96, 6, 2, dtype)
    arrays = inputs(rng, queries, 50, 96, dtype, batch=7)
    lengths = rng.integers(0, 51, 7)
    want = layer(*arrays, valid_lens=lengths)
    for threads in (2, 3, 7):
        mha_fast.set_num_threads(threads)
        for _ in range(2):
            assert np.array_equal(layer(*arrays, valid_lens=lengths), want), threads
    for b in (0, 6):
        one = slice(b, b + 1)
        assert np.array_equal(layer(*(x[one] for x in arrays), valid_lens=lengths[one]), want[one]), b


@DTYPE
def test_the_method_and_the_transposes_make_the_layer(isa, rng, dtype):
    """Step by step as in the article: project, split, attend, join, project."""
    layer, exact = layers(rng, kv_heads=4, dtype=dtype)
    x, y, z = inputs(rng, 9, 11, dtype=dtype)
    Q, K, V = (
        layer.transpose_qkv(a @ W + b)
        for a, W, b in ((x, layer.W_q, layer.b_q), (y, layer.W_k, layer.b_k), (z, layer.W_v, layer.b_v))
    )
    joined = layer.transpose_output(layer.scaled_dot_product_attention(Q, K, V, np.repeat([4, 11], 4)))
    want = exact(*(wide(a) for a in (x, y, z)), valid_lens=[4, 11])
    assert_close(joined @ layer.W_o + layer.b_o, want, 500 * UNIT[dtype] * largest(want))


def test_no_queries_with_lengths_per_query(isa):
    """(batch, 0) lengths hold nothing to read."""
    layer = mha_fast.MultiHeadAttention(8, 2, rng=0)
    keys = np.ones((5, 300, 8))
    assert layer(np.ones((5, 0, 8)), keys, keys, valid_lens=np.zeros((5, 0), int)).shape == (5, 0, 8)
