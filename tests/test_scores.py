"""Windows, caps, slopes and sinks on every level where tiles, blocks and splits begin and end; all options together."""

import numpy as np
import pytest
from conftest import DTYPES, check, draw, qkv, tiles

import mha_fast
from mha_fast import _core, _validate, reference

DTYPE = pytest.mark.parametrize("dtype", DTYPES)
FAMILIES = pytest.mark.parametrize("queries", [1, 8, 9, 70])


def around(*borders):
    return sorted({n for border in borders for n in (border - 1, border, border + 1) if n >= 0})


def far_keys(t):
    return 2 * t["key_split"] + t["key_block"] + 5


# ---------------------------------------------------------------- windows


@DTYPE
@FAMILIES
def test_windows_of_every_width(isa, rng, dtype, queries):
    t = tiles(dtype)
    keys = t["key_split"] + t["key_block"] + 3
    arrays = qkv(rng, 1, 1, queries, keys, width=4, dtype=dtype)
    for side in around(0, t["key_tile"], t["lanes"], t["panel"], t["key_block"]):
        for window in ((side, 0), (0, side), (side, side), (side, -1)):
            check(*arrays, window_size=window, q_offset=int(rng.integers(-queries, keys)))


@DTYPE
@FAMILIES
def test_windows_anywhere(isa, rng, dtype, queries):
    """Their borders at every border of a tile, a block and a split, before the first key and behind the last."""
    t = tiles(dtype)
    keys = far_keys(t)
    borders = np.array(around(0, 4, t["key_tile"], 16, t["panel"], t["key_block"], t["key_split"], 2 * t["key_split"]))
    offsets = np.concatenate([borders, borders + 20, [-queries - 30, -5, keys - queries, keys + 19, keys + 90]])
    arrays = qkv(rng, len(offsets), 1, queries, keys, width=4, dtype=dtype)
    check(*arrays, window_size=(20, 3), q_offset=offsets)
    check(
        *arrays, window_size=(20, -1), is_causal=True, q_offset=offsets, valid_lens=rng.integers(0, keys, len(offsets))
    )


@DTYPE
@pytest.mark.parametrize("kind", ["bool", "float"])
@FAMILIES
def test_windows_under_masks(isa, rng, dtype, kind, queries):
    t = tiles(dtype)
    keys = t["key_split"] + 9
    allowed = rng.random((queries, keys)) < 0.6
    mask = allowed if kind == "bool" else np.where(allowed, draw(rng, queries, keys), -np.inf).astype(dtype)
    arrays = qkv(rng, 1, 2, queries, keys, width=6, kv_heads=1, dtype=dtype)
    for window in ((30, 7), (300, 0), (0, 0), (5, -1)):
        for offset in (0, 200, keys - queries, keys):
            check(*arrays, mask, window_size=window, q_offset=offset, enable_gqa=True)


@pytest.mark.parametrize("queries", [1, 20])
def test_only_the_window_is_read(isa, rng, queries):
    """NaN in every key and value outside of it, and the result is that of the same keys alone."""
    keys = 3000
    query, key, value = qkv(rng, 1, 1, queries, keys, width=8, dtype="float32")
    begin, end = 1500 - 40, 1500 + queries
    key[:, :, :begin] = value[:, :, :begin] = key[:, :, end:] = value[:, :, end:] = np.nan
    got = mha_fast.scaled_dot_product_attention(query, key, value, window_size=(40, 0), q_offset=1500)
    alone = key[:, :, begin:end], value[:, :, begin:end]
    want = reference.scaled_dot_product_attention(query, *alone, window_size=(40, 0), q_offset=40)
    assert np.allclose(got, want, atol=1e-5)


def test_a_long_cache_needs_no_larger_workspace_for_a_window(isa, rng):
    """Splits outside a window are no tasks: a single head of a million keys with two threads stays small."""
    keys = 1_000_000
    key = np.broadcast_to(draw(rng, 1, 1, 1, 8, dtype="float32"), (1, 1, keys, 8))
    query = draw(rng, 1, 1, 2, 8, dtype="float32")
    got = mha_fast.scaled_dot_product_attention(
        query, key, key, window_size=(100, 0), q_offset=keys - 2, num_threads=2, return_lse=True
    )
    want = reference.scaled_dot_product_attention(
        query, key[:, :, :102], key[:, :, :102], window_size=(100, 0), q_offset=100, return_lse=True
    )
    for g, w in zip(got, want, strict=True):
        assert np.allclose(g, w, atol=1e-5)


# ---------------------------------------------------------------- slopes


@DTYPE
@FAMILIES
@pytest.mark.parametrize("offset", [2**24 + 1, 2**25 + 7, 2**40])
def test_slopes_of_distances_that_float32_rounds(isa, rng, dtype, queries, offset):
    arrays = qkv(rng, 1, 2, queries, 300, width=4, dtype=dtype)
    slopes = np.array([2.0**-20, 2.0**-24])
    check(*arrays, alibi_slopes=slopes, q_offset=offset, biggest=float(slopes[0]) * (offset + queries))


@DTYPE
@FAMILIES
def test_slopes_and_sinks_of_each_head_of_a_group(isa, rng, dtype, queries):
    keys = 600
    arrays = qkv(rng, 2, 6, queries, keys, width=5, kv_heads=2, dtype=dtype)
    slopes, sinks = draw(rng, 2, 6), np.array([0.0, -np.inf, 3.0, -2.0, 50.0, -50.0])
    options = {"enable_gqa": True, "q_offset": 300}
    check(*arrays, alibi_slopes=slopes[0], sinks=sinks, **options, biggest=largest_bias(slopes[0], queries, keys, 300))
    check(*arrays, alibi_slopes=slopes, **options, biggest=largest_bias(slopes, queries, keys, 300))


@DTYPE
@FAMILIES
@pytest.mark.parametrize("keys", [5, 2500])
def test_beside_a_sink_scores_of_minus_infinity_look_at_no_value(isa, attend, dtype, queries, keys):
    query, key = np.ones((1, queries, 4), dtype), np.full((1, keys, 4), -np.inf, dtype)
    value = np.ones((1, keys, 3), dtype)
    value[0, 1:4] = [[np.nan, np.inf, 1.0], [1.0, -np.inf, 1.0], [np.inf, 1.0, 1.0]]
    for function in (attend, reference.scaled_dot_product_attention):
        out, lse = function(query, key, value, sinks=[0.5], return_lse=True)
        assert not out.any() and (lse == 0.5).all()
        assert np.isnan(function(query, key, value)).all()  # without one, inf - inf


def largest_bias(slopes, queries, keys, offset):
    return float(np.abs(slopes).max()) * (abs(offset) + queries + keys)


# ---------------------------------------------------------------- every option with every other


def drawn(rng, t, dtype):
    """Arrays and options of one call."""
    queries = int(rng.choice(around(1, t["few_rows"], t["lanes"], t["panel"], 2 * t["panel"])[1:]))
    keys = int(rng.choice(around(1, 16, t["key_block"], 2 * t["key_block"], t["key_split"])[1:]))
    group, kv_heads = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    heads = group * kv_heads
    query, key, value = qkv(
        rng, 2, heads, queries, keys, int(rng.integers(1, 40)), kv_heads, int(rng.integers(1, 40)), dtype
    )
    options, biggest = {"enable_gqa": True}, 0.0

    def chosen(odds=0.5):
        return rng.random() < odds

    mask = None
    if chosen():
        allowed = rng.random((queries, keys)) < 0.7
        mask = allowed if chosen() else np.where(allowed, draw(rng, queries, keys), -np.inf).astype(dtype)
    if chosen():
        options["valid_lens"] = rng.integers(0, keys + 1, (2, queries)[: rng.integers(1, 3)])
    options["is_causal"] = [False, True, "lower_right"][rng.integers(3)]
    offset = 0
    if options["is_causal"] != "lower_right":
        offset = int(rng.integers(-queries, keys + 1))
        options["q_offset"] = np.array([offset, 0])
    if chosen(0.7):
        most = int(rng.choice([3, 40, 300, keys]))
        options["window_size"] = tuple(int(n) for n in rng.integers(-1, most + 1, 2))
    if chosen():
        options["softcap"] = float(rng.uniform(0.3, 30))
    if chosen():
        slopes = draw(rng, *((2, heads) if chosen() else (heads,)), dtype=dtype) / 8
        options["alibi_slopes"] = slopes
        biggest = largest_bias(slopes, queries, keys, max(abs(offset), keys))
    if chosen():
        options["sinks"] = np.where(rng.random(heads) < 0.2, -np.inf, 3 * draw(rng, heads)).astype(dtype)
    if chosen():
        options["scale"] = float(rng.uniform(-1, 1))
    return (query, key, value, mask), options, biggest


@DTYPE
@pytest.mark.parametrize("part", range(8))
def test_all_options_together(isa, rng, dtype, part):
    for _ in range(8):
        arrays, options, biggest = drawn(rng, tiles(dtype), dtype)
        threads = int(rng.integers(1, 4))
        check(*arrays, **options, num_threads=threads, biggest=biggest)


@DTYPE
@pytest.mark.parametrize("queries", [3, 60])
def test_rows_of_weights(isa, rng, dtype, queries):
    """The same bits as in all rows, in any order, with repeats, of a group, by several threads."""
    arrays = qkv(rng, 2, 6, queries, 700, width=9, kv_heads=2, dtype=dtype)
    options = {
        "attn_mask": rng.random((queries, 700)) < 0.8,
        "enable_gqa": True,
        "q_offset": 300,
        "window_size": (200, 300),
        "alibi_slopes": draw(rng, 6, dtype=dtype),
        "sinks": draw(rng, 6, dtype=dtype),
        "return_weights": True,
    }
    out, weights = mha_fast.scaled_dot_product_attention(*arrays, **options)
    for rows in ([0], [-1, 0, 1], rng.integers(0, queries, 100), []):
        for threads in (1, 3):
            got = mha_fast.scaled_dot_product_attention(*arrays, **options, weights_rows=rows, num_threads=threads)
            assert np.array_equal(got[0], out)
            assert np.array_equal(got[1], weights[:, :, np.array(rows, int)])


# ---------------------------------------------------------------- the common path


@DTYPE
def test_plain_options_need_no_validator(rng, dtype, monkeypatch):
    """What the common path takes gives the validated call's bits."""
    query, key, value = qkv(rng, 2, 4, 9, 20, kv_heads=2, dtype=dtype)
    options = {
        "enable_gqa": True,
        "window_size": (3, 2),
        "softcap": 4.0,
        "alibi_slopes": draw(rng, 4, dtype=dtype),
        "sinks": np.array([0, -np.inf, 1, -5], dtype),
    }
    want = _core.attend(_validate.attention_call_of(query, key, value, **options))
    monkeypatch.setattr(_validate, "attention_call", None)
    assert np.array_equal(mha_fast.scaled_dot_product_attention(query, key, value, **options), want)


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (1, -2)},
        {"window_size": (0,)},
        {"window_size": 3},
        {"window_size": (True, 1)},
        {"softcap": float("nan")},
        {"softcap": -1.0},
        {"softcap": float("inf")},
        {"alibi_slopes": np.array([1, np.nan], "f4")},
        {"alibi_slopes": np.array([1, np.inf], "f4")},
        {"alibi_slopes": np.array([-np.inf, 1], "f4")},
        {"alibi_slopes": np.zeros(3, "f4")},
        {"sinks": np.array([np.inf, 0], "f4")},
        {"sinks": np.array([0, np.nan], "f4")},
        {"sinks": np.zeros((1, 2), "f4")},
        {"weights_rows": [0]},
    ],
    ids=str,
)
def test_the_common_path_lets_no_mistake_through(rng, options):
    arrays = qkv(rng, 1, 2, 3, 4, dtype="float32")
    texts = []
    for function in (mha_fast.scaled_dot_product_attention, reference.scaled_dot_product_attention):
        with pytest.raises((TypeError, ValueError)) as caught:
            function(*arrays, **options)
        texts.append((caught.type, str(caught.value)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_out_apart_from_numbers_of_heads(rng, name):
    arrays = qkv(rng, 1, 4, 1, 5, width=1, dtype="float32")
    out = np.zeros((1, 4, 1, 1), "float32")
    with pytest.raises(ValueError, match="shares memory"):
        mha_fast.scaled_dot_product_attention(*arrays, **{name: out.ravel()}, out=out)


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_infinite_scores_meet_infinite_biases(isa, attend, queries, dtype, with_sinks):
    """A bias of -inf hides whatever the score is; -inf plus inf is NaN, seen, and spoils its row."""
    query, key = np.ones((1, 1, queries, 4), dtype), np.ones((1, 1, 20, 4), dtype)
    key[0, 0, 3], value = -np.inf, np.ones((1, 1, 20, 2), dtype)
    options = {"return_lse": True} | ({"sinks": np.zeros(1, dtype)} if with_sinks else {})
    for bias, at in ((np.inf, 3), (-np.inf, 3), (1.0, 3), (np.inf, 5), (-np.inf, 5), (np.nan, 3)):
        mask = np.zeros((queries, 20), dtype)
        mask[:, at] = bias
        want = reference.scaled_dot_product_attention(query, key, value, mask, **options)
        for got, expected in zip(attend(query, key, value, mask, **options), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5)
