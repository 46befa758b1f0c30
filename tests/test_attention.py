"""Every level, dtype and feature against the float64 reference; ranks, broadcasting, strides, mixed dtypes, out."""

import itertools

import numpy as np
import pytest
from conftest import DTYPES, assert_close, check, draw, exact, largest_score, qkv

import mha_fast

# What each feature adds to a call of 2 x 4 heads, 20 queries and 30 keys (more than one vector, less than a panel).
BATCH, HEADS, QUERIES, KEYS = 2, 4, 20, 30
MASK_SHAPES = [(KEYS,), (QUERIES, 1), (QUERIES, KEYS), (HEADS, QUERIES, KEYS), (BATCH, 1, 1, KEYS)]
MASK_SHAPES += [(BATCH, HEADS, QUERIES, KEYS), (BATCH, 1, QUERIES, 1), (1, HEADS, 1, KEYS)]


def bool_mask(rng, dtype, shape=(BATCH, 1, QUERIES, KEYS)):
    return {"attn_mask": rng.random(shape) < 0.6}


def float_mask(rng, dtype, shape=(HEADS, QUERIES, KEYS)):
    return {"attn_mask": np.where(rng.random(shape) < 0.3, -np.inf, 2 * draw(rng, *shape)).astype(dtype)}


def other_float_mask(rng, dtype):
    return float_mask(rng, "float64" if dtype == "float32" else "float32")


FEATURES = {
    "plain": lambda rng, dtype: {},
    "bool mask": bool_mask,
    "float mask": float_mask,
    "float mask of the other dtype": other_float_mask,
    "lengths": lambda rng, dtype: {"valid_lens": np.array([17, 30])},
    "lengths of queries": lambda rng, dtype: {"valid_lens": rng.integers(0, KEYS + 2, (BATCH, QUERIES))},
    "lengths beyond all": lambda rng, dtype: {"valid_lens": np.array([2**63 - 1, -(2**63)])},
    "fractions": lambda rng, dtype: {"valid_lens": [0.5, 29.5]},
    "upper left": lambda rng, dtype: {"is_causal": "upper_left"},
    "lower right": lambda rng, dtype: {"is_causal": "lower_right"},
    "offset": lambda rng, dtype: {"is_causal": True, "q_offset": 3},
    "offsets": lambda rng, dtype: {"is_causal": True, "q_offset": np.array([-5, 12])},
    "scale 0": lambda rng, dtype: {"scale": 0.0},
    "negative scale": lambda rng, dtype: {"scale": -0.4},
}


def inputs(rng, dtype, kv_heads=HEADS, **sizes):
    return qkv(rng, BATCH, HEADS, dtype=dtype, **({"queries": QUERIES, "keys": KEYS, "kv_heads": kv_heads} | sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_features(isa, rng, dtype, feature, kv_heads):
    check(*inputs(rng, dtype, kv_heads), **FEATURES[feature](rng, dtype), enable_gqa=kv_heads != HEADS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_features_of_few_queries(isa, rng, dtype, feature, kv_heads):
    """The kernel for few queries has masks, lengths and borders of its own."""
    options = FEATURES[feature](rng, dtype)
    if "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"][..., :2, :]
    if np.ndim(options.get("valid_lens")) == 2:
        options["valid_lens"] = options["valid_lens"][:, :2]
    check(*inputs(rng, dtype, kv_heads, queries=2), **options, enable_gqa=True)


MASKS = ["plain", "bool mask", "float mask"]
LENGTHS = ["plain", "lengths", "lengths of queries"]
POSITIONS = ["plain", "upper left", "lower right", "offsets"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", [*itertools.product(MASKS, LENGTHS, POSITIONS)], ids=" + ".join)
def test_everything_that_hides_combines(isa, rng, dtype, names):
    options = {}
    for name in names:
        options |= FEATURES[name](rng, dtype)
    kv_heads = int(rng.choice([1, 2, 4]))
    options |= {"enable_gqa": True, "scale": float(rng.choice([0.2, -0.3, 0.0]))}
    query, key, value = inputs(rng, dtype, kv_heads)
    got = check(query, key, value, **options)
    turned = [x.swapaxes(1, 2) for x in (query, key, value)]
    assert np.array_equal(check(*turned, **options, layout="blhd").swapaxes(1, 2), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("kind", [bool_mask, float_mask])
def test_mask_shapes(isa, rng, dtype, shape, kind):
    check(*inputs(rng, dtype, kv_heads=2), **kind(rng, dtype, shape), enable_gqa=True)


@pytest.mark.parametrize("kept", range(16))
@pytest.mark.parametrize("kind", [bool_mask, float_mask])
def test_masks_repeat_along_any_axes(attend, rng, kept, kind):
    """All sizes differ but batch = kv heads, where taking one axis for the other would go unseen elsewhere."""
    full = (2, 6, 3, 11)
    shape = tuple(size if kept >> axis & 1 else 1 for axis, size in enumerate(full))
    query, key, value = qkv(rng, 2, 6, 3, 11, width=5, kv_heads=2)
    mask = kind(rng, "float64", shape)["attn_mask"]
    want = attend(query, key, value, np.ascontiguousarray(np.broadcast_to(mask, full)), enable_gqa=True)
    assert np.array_equal(attend(query, key, value, mask, enable_gqa=True), want)
    assert_close(want, exact(query, key, value, mask, enable_gqa=True)[0], 1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 9, 16])
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_groups(isa, rng, dtype, group, queries):
    """Panels hold the heads of a group next to each other, whatever the size of the group."""
    mask = rng.random((2 * group, 1, 21)) < 0.8
    query, key, value = qkv(rng, 1, 2 * group, queries, 21, kv_heads=2, dtype=dtype)
    check(query, key, value, mask, is_causal="lower_right", enable_gqa=True)


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("options", [{}, {"is_causal": "upper_left"}, {"valid_lens": [17, 30]}], ids=str)
def test_asking_for_more_changes_nothing(attend, rng, lse, weights, options):
    """Another result is no other path: causal and lengths hold on each."""
    arrays = inputs(rng, "float32")
    want = attend(*arrays, **options, return_lse=True, return_weights=True)
    got = attend(*arrays, **options, return_lse=lse, return_weights=weights)
    got = got if isinstance(got, tuple) else (got,)
    wanted = [want[0], *([want[1]] if lse else []), *([want[2]] if weights else [])]
    assert len(got) == len(wanted)
    for g, w in zip(got, wanted, strict=True):
        assert np.array_equal(g, w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_is_returned_and_filled(isa, attend, rng, dtype):
    query, key, value = inputs(rng, dtype, value_width=7)
    want = attend(query, key, value, valid_lens=[0, 9])
    out = np.full(want.shape, np.nan, dtype)
    assert attend(query, key, value, valid_lens=[0, 9], out=out) is out
    assert np.array_equal(out, want)


OUT_VIEWS = {
    "blhd memory": lambda shape, dtype: np.empty((shape[0], shape[2], shape[1], shape[3]), dtype).swapaxes(1, 2),
    "columns first": lambda shape, dtype: np.empty(shape[::-1], dtype).T,
    "every second column": lambda shape, dtype: np.empty((*shape[:3], 2 * shape[3]), dtype)[..., ::2],
    "backwards": lambda shape, dtype: np.empty(shape, dtype)[::-1, ::-1, ::-1, ::-1],
    "part of a row": lambda shape, dtype: np.empty((*shape[:3], shape[3] + 3), dtype)[..., 2:-1],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", OUT_VIEWS)
@pytest.mark.parametrize("queries", [1, QUERIES])
def test_out_may_have_any_strides(isa, attend, rng, dtype, view, queries):
    query, key, value = inputs(rng, dtype, value_width=19, queries=queries)
    want = attend(query, key, value)
    out = OUT_VIEWS[view](want.shape, dtype)
    assert attend(query, key, value, out=out) is out
    assert np.array_equal(out, want)


# ---------------------------------------------------------------- ranks and broadcasting


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [None, (), (3,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_ranks(isa, rng, dtype, lead, layout):
    """2-D is one head, 3-D heads first, and so on; lengths and offsets have the leading dimensions."""
    heads = () if lead is None else (2,)
    lead = lead or ()
    shapes = [(*lead, *heads, n, w) for n, w in ((5, 6), (9, 6), (9, 4))]
    arrays = [draw(rng, *shape, dtype=dtype) for shape in shapes]
    if layout == "blhd" and heads:
        arrays = [x.swapaxes(-3, -2).copy() for x in arrays]
    for lengths in (rng.integers(0, 11, lead), rng.integers(0, 11, (*lead, 5))):
        offset = rng.integers(-2, 9, lead)
        check(*arrays, valid_lens=lengths, is_causal=True, q_offset=offset, layout=layout)
        check(*arrays, rng.random((5, 9)) < 0.7, valid_lens=lengths, is_causal="lower_right", layout=layout)


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions_broadcast(isa, attend, rng, dtype):
    query = draw(rng, 3, 1, 2, 5, 6, dtype=dtype)
    key, value = draw(rng, 1, 2, 2, 9, 6, dtype=dtype), draw(rng, 1, 1, 2, 9, 4, dtype=dtype)
    mask, lengths = rng.random((2, 1, 5, 9)) < 0.7, rng.integers(0, 10, (3, 2))
    got = check(query, key, value, mask, valid_lens=lengths)
    for a, b in np.ndindex(3, 2):
        want = attend(query[a, 0], key[0, b], value[0, 0], mask[b], valid_lens=lengths[a, b])
        assert np.array_equal(got[a, b], want)


# ---------------------------------------------------------------- memory


def fused(arrays):
    """Slices of one array (batch, length, 3, heads, width), as a fused projection gives them."""
    width = max(x.shape[-1] for x in arrays)
    batch, heads = arrays[0].shape[:2]
    memory = np.full((batch, max(x.shape[2] for x in arrays), 3, heads, width), np.nan, arrays[0].dtype)
    views = [memory[:, : x.shape[2], n, :, : x.shape[3]].swapaxes(1, 2) for n, x in enumerate(arrays)]
    for view, x in zip(views, arrays, strict=True):
        view[...] = x
    return views


def unaligned(x):
    record = np.zeros(x.shape, [("flag", "i1"), ("number", x.dtype)])
    record["number"] = x
    return record["number"]


def locked(x):
    copy = x.copy()
    copy.flags.writeable = False
    return copy


def spaced(x):
    memory = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)
    memory[..., ::2] = x
    return memory[..., ::2]


def odd_ones(x):
    """Axes of size 1 whose strides lead nowhere."""
    strides = [12344 if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True)]
    return np.lib.stride_tricks.as_strided(x, x.shape, strides)


VIEWS = {
    "columns first": lambda x: np.asfortranarray(x),
    "blhd memory": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "rows last": lambda x: np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3),
    "backwards": lambda x: np.ascontiguousarray(x[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1],
    "columns backwards": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "spaced columns": spaced,
    "part of rows": lambda x: np.pad(x, [(0, 0), (0, 0), (1, 2), (3, 4)], constant_values=np.nan)[..., 1:-2, 3:-4],
    "read-only": locked,
    "byte-swapped": lambda x: x.astype(x.dtype.newbyteorder()),
    "unaligned": unaligned,
    "odd strides of ones": odd_ones,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["query", "key", "value", "attn_mask", "all"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("queries", [1, QUERIES])
def test_memory_does_not_matter(isa, attend, rng, dtype, which, view, queries):
    """Each input has strides of its own; none is derived from another's."""
    arrays = dict(zip(("query", "key", "value"), inputs(rng, dtype, queries=queries, value_width=17), strict=True))
    arrays["attn_mask"] = float_mask(rng, dtype, (1, HEADS, queries, KEYS))["attn_mask"]
    want = attend(**arrays)
    names = arrays if which == "all" else [which]
    got = attend(**arrays | {name: VIEWS[view](arrays[name]) for name in names})
    assert np.array_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, QUERIES])
def test_slices_of_a_fused_array(isa, attend, rng, dtype, queries):
    arrays = inputs(rng, dtype, queries=queries)
    want = attend(*arrays)
    views = fused(arrays)
    assert np.array_equal(attend(*views), want)
    turned = [x.swapaxes(1, 2) for x in views]
    assert np.array_equal(attend(*turned, layout="blhd").swapaxes(1, 2), want)


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("queries", [1, QUERIES])
def test_strides_of_zero(isa, rng, which, axis, queries):
    arrays = dict(zip(("query", "key", "value"), inputs(rng, "float32", queries=queries), strict=True))
    one = arrays[which][(slice(None),) * axis + (slice(0, 1),)]
    arrays[which] = np.broadcast_to(one, arrays[which].shape)
    check(**arrays)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_any_strides(isa, attend, rng, kind):
    arrays = inputs(rng, "float32")
    mask = (bool_mask if kind == "bool" else float_mask)(rng, "float32", (BATCH, HEADS, QUERIES, KEYS))["attn_mask"]
    want = attend(*arrays, mask)
    spread = np.zeros((*mask.shape[:-1], 2 * KEYS), mask.dtype)
    spread[..., ::2] = mask
    for view in (np.asfortranarray(mask), spread[..., ::2], mask[..., ::-1].copy()[..., ::-1], locked(mask)):
        assert np.array_equal(attend(*arrays, view), want)


def test_any_byte_but_0_of_a_bool_mask_is_true(isa, attend, rng):
    arrays = inputs(rng, "float32")
    mask = rng.integers(0, 3, (QUERIES, KEYS)).astype(np.uint8) * 127
    for queries in (QUERIES, 1):
        first = arrays[0][:, :, :queries]
        want = attend(first, *arrays[1:], mask[:queries] != 0)
        assert np.array_equal(attend(first, *arrays[1:], mask[:queries].view(bool)), want)


# ---------------------------------------------------------------- dtypes and widths


@pytest.mark.parametrize("dtypes", [*itertools.product(DTYPES, repeat=3)], ids="-".join)
@pytest.mark.parametrize("queries", [1, QUERIES])
def test_mixed_dtypes(isa, rng, dtypes, queries):
    """The result type of the three is that of the computation; storage stays what it is."""
    arrays = [x.astype(d) for x, d in zip(inputs(rng, "float64", queries=queries), dtypes, strict=True)]
    check(*arrays, valid_lens=[17, 30])


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["int8", "uint64", "bool", "int32"])
def test_integers_become_float64(attend, rng, which, dtype):
    arrays = [x.astype("float32") for x in inputs(rng, "float64")]
    arrays[which] = rng.integers(0, 2, arrays[which].shape).astype(dtype)
    got = attend(*arrays)
    assert got.dtype == np.float64
    arrays[which] = arrays[which].astype(np.float64)
    assert_close(got, exact(*arrays)[0], 1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, value_width", [(24, 1), (1, 24), (7, 130), (130, 7), (64, 65)])
@pytest.mark.parametrize("queries", [1, QUERIES])
def test_values_have_a_width_of_their_own(isa, rng, dtype, width, value_width, queries):
    got = check(*inputs(rng, dtype, width=width, value_width=value_width, queries=queries))
    assert got.shape == (BATCH, HEADS, queries, value_width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, QUERIES])
@pytest.mark.parametrize("missing", ["batch", "heads", "queries", "keys", "width", "value_width"])
def test_sizes_of_zero(isa, attend, dtype, queries, missing):
    sizes = {"batch": 2, "heads": 2, "queries": queries, "keys": 5, "width": 3, "value_width": 4} | {missing: 0}
    b, h, n, s, e, ev = sizes.values()
    arrays = [np.full(shape, 3.0, dtype) for shape in ((b, h, n, e), (b, h, s, e), (b, h, s, ev))]
    out, lse, weights = attend(*arrays, return_lse=True, return_weights=True)
    assert out.shape == (b, h, n, ev) and lse.shape == (b, h, n) and weights.shape == (b, h, n, s)
    if missing == "keys":
        assert not out.any() and np.isneginf(lse).all()
    if missing == "width":  # scores of 0: the mean of the values
        assert_close(out, np.full(out.shape, 3.0), 1e-6)
        assert_close(weights, np.full(weights.shape, 0.2), 1e-7)
    assert np.array_equal(attend(*arrays), out)


def test_the_class_runs_on_every_level(isa, rng):
    """Projections around the same attention: grouped heads, lengths, weights asked for."""
    from mha_fast import reference

    x, y = draw(rng, 2, 9, 24), draw(rng, 2, 13, 24)
    layers = [m.MultiHeadAttention(24, 6, bias=True, num_kv_heads=2, rng=1) for m in (mha_fast, reference)]
    got, want = (layer(x, y, y, valid_lens=[4, 13], need_weights=True) for layer in layers)
    score = largest_score(layers[1].transpose_qkv(x @ layers[1].W_q), layers[1].transpose_qkv(x @ layers[1].W_q))
    assert_close(got, want, 1e-15 * score * np.abs(want).max())
    assert_close(layers[0].attention_weights, layers[1].attention_weights, 1e-14 * score)
