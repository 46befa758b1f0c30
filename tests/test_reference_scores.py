"""Windows, capped scores, ALiBi slopes, sinks and chosen rows of weights: by hand, by formula, by what they equal."""

import math

import numpy as np
import pytest
from conftest import DTYPES, allowed, assert_close, draw, largest, largest_score, qkv
from formula import formula

from mha_fast import reference

ALL = {"return_lse": True, "return_weights": True}


@pytest.fixture(autouse=True)
def no_floating_point_warnings():
    """A NumPy user may have asked for exceptions; none of the caller's numbers may raise one."""
    with np.errstate(all="raise"):
        yield


def assert_same(got, want, arrays, biggest=0.0, scale=None):
    """out, lse and weights within rounding of each other; `biggest` bounds what is added to the scores."""
    query, key, value = arrays
    dtype = np.result_type(*arrays).name
    bound = allowed(dtype, query.shape[-1], largest_score(query, key, scale) + biggest)
    limits = {"out": bound * largest(value), "lse": bound, "weights": bound}
    for (name, limit), g, w in zip(limits.items(), got, want, strict=True):
        assert_close(g, w, limit, name)


def visible(attention, queries, keys, batch=None, **options):
    """Which keys each query sees, from the weights of scores 0: rows of 0 and 1."""
    lead = () if batch is None else (batch,)
    arrays = [np.zeros((*lead, 1, length, 2)) for length in (queries, keys, keys)]
    weights = attention(*arrays, return_weights=True, **options)[1]
    return (weights[..., 0, :, :] > 0).astype(int).tolist()


# ---------------------------------------------------------------- by formula


def drawn_options(rng, batch, heads, queries, keys):
    """Each option in about half of the draws, in the words of the function and in those of the formula."""
    function, words = {}, {}

    def chosen():
        return rng.random() < 0.5

    if chosen():
        function["window_size"] = words["window"] = tuple(int(x) for x in rng.integers(-1, 5, 2))
    if chosen():
        function["softcap"] = words["softcap"] = float(rng.uniform(0.5, 5))
    if chosen():
        shape = (heads,) if chosen() else (batch, heads)
        function["alibi_slopes"] = words["slopes"] = rng.normal(0.3, 0.3, shape).astype(np.float32)
    if chosen():
        function["sinks"] = words["sinks"] = np.where(rng.random(heads) < 0.2, -np.inf, rng.normal(0, 2, heads))
    if chosen():
        function["valid_lens"] = words["lengths"] = rng.integers(-1, keys + 2, (batch, queries)[: rng.integers(1, 3)])
    if chosen():
        mask = rng.standard_normal((queries, keys))
        words["mask"] = function["attn_mask"] = mask > -1 if chosen() else np.where(mask < -1, -np.inf, mask)
    alignment = rng.integers(4)
    if alignment == 1:
        function["is_causal"], words["causal"] = "lower_right", True
        lengths = words.get("lengths", np.zeros((0, 0)))
        words["offset"] = (np.clip(lengths, 0, keys) if lengths.ndim == 1 else keys) - queries
    elif alignment > 1:
        function["q_offset"] = words["offset"] = rng.integers(-3, 6, batch)
        function["is_causal"] = words["causal"] = alignment == 2
    return function, words


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", range(60))
def test_every_option_with_every_other(attention, rng, dtype, case):
    batch, kv_heads, group, queries, keys = (int(x) for x in rng.integers(1, (3, 3, 4, 7, 9)))
    heads = kv_heads * group
    arrays = qkv(rng, batch, heads, queries, keys, 5, kv_heads=kv_heads, value_width=3, dtype=dtype)
    function, words = drawn_options(rng, batch, heads, queries, keys)
    print(function)
    got = attention(*arrays, enable_gqa=True, **function, **ALL)
    assert [result.dtype.name for result in got] == [dtype] * 3
    assert_same(got, formula(*arrays, **words), arrays, biggest=30)


def test_the_order_of_cap_slopes_and_bias(attention):
    """One key: the log-sum-exp is its score."""
    one = np.ones((1, 1, 1))
    _, lse = attention(
        one, one, one, np.array([[10.0]]), scale=3.0, softcap=2.0, alibi_slopes=[0.5], q_offset=4, return_lse=True
    )
    assert lse.item() == pytest.approx(2 * math.tanh(3 / 2) - 0.5 * 4 + 10, rel=1e-14)


# ---------------------------------------------------------------- windows


def test_windows_by_hand(attention):
    assert visible(attention, 4, 4, window_size=(1, 0)) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible(attention, 4, 4, window_size=(0, 1)) == [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 1]]
    assert visible(attention, 3, 4, window_size=(0, 0)) == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    assert visible(attention, 3, 4, window_size=(-1, 0)) == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert visible(attention, 3, 4, window_size=(0, -1)) == [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert visible(attention, 2, 3, window_size=(-1, -1)) == [[1, 1, 1], [1, 1, 1]]


def test_the_offset_moves_a_window_that_is_not_causal(attention):
    assert visible(attention, 2, 5, window_size=(1, 1), q_offset=2) == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert visible(attention, 2, 3, window_size=(1, 0), q_offset=-1) == [[0, 0, 0], [1, 0, 0]]
    moved = visible(attention, 2, 4, batch=2, window_size=(1, 0), q_offset=[0, 2])
    assert moved == [[[1, 0, 0, 0], [1, 1, 0, 0]], [[0, 1, 1, 0], [0, 0, 1, 1]]]


def test_a_named_alignment_moves_the_window_too(attention):
    options = {"window_size": (1, 1)}
    assert visible(attention, 2, 4, is_causal="lower_right", **options) == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible(attention, 2, 4, is_causal="upper_left", **options) == [[1, 0, 0, 0], [1, 1, 0, 0]]
    ragged = visible(attention, 2, 4, batch=2, is_causal="lower_right", valid_lens=[4, 3], **options)
    assert ragged == [[[0, 1, 1, 0], [0, 0, 1, 1]], [[1, 1, 0, 0], [0, 1, 1, 0]]]


def test_a_window_and_lengths_intersect(attention):
    seen = visible(attention, 3, 4, batch=2, window_size=(1, 1), valid_lens=[1, 3])
    assert seen == [[[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0]]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [(0, 0), (3, 0), (0, 7), (2, 5), (-1, 1), (40, -1), (100, 100)])
@pytest.mark.parametrize("offset", [-5, 0, 33])
def test_a_window_is_a_mask(attention, rng, dtype, window, offset):
    arrays = qkv(rng, queries=30, keys=60, width=8, dtype=dtype)
    back = np.arange(30)[:, None] + offset - np.arange(60)
    left, right = (math.inf if side == -1 else side for side in window)
    got = attention(*arrays, window_size=window, q_offset=offset, **ALL)
    assert_same(got, attention(*arrays, (back <= left) & (-back <= right), **ALL), arrays)


def test_causal_is_a_window(attention, rng):
    arrays = qkv(rng, queries=9, keys=9)
    want = attention(*arrays, is_causal=True, **ALL)
    assert_same(attention(*arrays, window_size=(-1, 0), **ALL), want, arrays)
    assert_same(attention(*arrays, is_causal=True, window_size=(-1, 5), **ALL), want, arrays)


@pytest.mark.parametrize("offset", [2**62, 2**63 - 1, 10**30, -(2**62), -(10**30)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 10**30), (2**62, -1), (10**30, 10**30), (3, 3), (-1, 0), (0, -1)])
def test_far_positions_do_not_wrap(attention, rng, offset, window):
    """Offsets and windows count as at most 2**62: the largest window reaches from the largest offset back to key 0."""
    arrays = qkv(rng, queries=4, keys=6)
    weights = attention(*arrays, q_offset=offset, window_size=window, return_weights=True)[1]
    offset = max(-(2**62), min(offset, 2**62))
    left, right = (math.inf if side == -1 else min(side, 2**62) for side in window)
    seen = [[-right <= i + offset - j <= left for j in range(6)] for i in range(4)]
    assert np.array_equal(weights > 0, np.broadcast_to(seen, weights.shape))


@pytest.mark.parametrize("window", [[1, 0], np.array([1, 0]), np.array([1, 0], np.uint8), (np.int16(1), np.array(0))])
def test_pairs_of_any_kind(attention, window):
    assert visible(attention, 3, 3, window_size=window) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


# ---------------------------------------------------------------- softcap


def test_a_cap_by_hand(attention):
    query, key = np.array([[1.0]]), np.array([[0.0], [2.0]])
    value = np.array([[0.0], [1.0]])
    out = attention(query, key, value, scale=1.0, softcap=0.5)
    assert out.item() == pytest.approx(1 / (1 + math.exp(-0.5 * math.tanh(4.0))), rel=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_cap_is_none(attention, rng, dtype):
    arrays = qkv(rng, dtype=dtype)
    want = attention(*arrays, **ALL)
    for softcap in (1e9, 1e30, float(np.finfo(dtype).max)):
        assert_same(attention(*arrays, softcap=softcap, **ALL), want, arrays)
    assert_same(attention(*arrays, softcap=0, **ALL), want, arrays)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.25, 30.0])
def test_capped_scores_are_bounded(attention, rng, dtype, softcap):
    """Weights of S keys lie between e^-2c and e^2c of the mean."""
    query, key, value = qkv(rng, width=4, dtype=dtype)
    weights = attention(query * 1000, key, value, softcap=softcap, return_weights=True)[1]
    ratio = np.log(weights.max(axis=-1) / np.maximum(weights.min(axis=-1), np.finfo(dtype).tiny))
    assert (ratio <= 2 * softcap * 1.001).all()
    assert (ratio >= softcap).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tiny_cap_makes_all_scores_alike(attention, rng, dtype):
    query, key, value = qkv(rng, dtype=dtype)
    out = attention(query, key, value, softcap=float(np.finfo(dtype).tiny))
    assert_close(out, np.broadcast_to(value.astype("f8").mean(axis=2, keepdims=True), out.shape), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_score_is_the_cap(attention, dtype):
    query, value = np.array([[1.0]], dtype), np.eye(3, dtype=dtype)
    key = np.array([[np.inf], [0.0], [-np.inf]], dtype)
    _, lse, weights = attention(query, key, value, softcap=2.0, **ALL)
    exponentials = np.exp([2.0, 0.0, -2.0])
    assert_close(weights[0], exponentials / exponentials.sum(), 1e-6)
    assert_close(lse, [np.log(exponentials.sum())], 1e-6)


def test_an_overflown_score_is_the_cap(attention):
    query, key = np.array([[1e30]], "f4"), np.array([[1e30], [-1e30]], "f4")
    weights = attention(query, key, np.ones((2, 1), "f4"), softcap=1.0, return_weights=True)[1]
    assert_close(weights[0], np.exp([1.0, -1.0]) / np.exp([1.0, -1.0]).sum(), 1e-6)


def test_a_visible_nan_stays_nan_under_a_cap(attention, rng):
    query, key, value = qkv(rng)
    key[0, 0, 3] = np.nan
    out, lse, weights = attention(query, key, value, softcap=2.0, **ALL)
    assert np.isnan(out[0, 0]).all()
    assert np.isnan(lse[0, 0]).all()
    assert np.isnan(weights[0, 0]).all()
    assert np.isfinite(out[0, 1]).all()
    assert np.isfinite(out[1]).all()


# ---------------------------------------------------------------- slopes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 30, -7])
@pytest.mark.parametrize("per_batch", [False, True])
def test_slopes_are_a_bias(attention, rng, dtype, offset, per_batch):
    arrays = qkv(rng, heads=4, kv_heads=2, dtype=dtype)
    slopes = rng.normal(0.1, 0.2, (2, 4) if per_batch else 4).astype(dtype)
    distance = np.abs(np.arange(20)[:, None] + offset - np.arange(30))
    bias = -slopes.astype("f8")[..., None, None] * distance
    got = attention(*arrays, enable_gqa=True, alibi_slopes=slopes, q_offset=offset, **ALL)
    assert_same(got, attention(*arrays, bias, enable_gqa=True, **ALL), arrays, biggest=largest(bias))


def test_slopes_by_hand(attention):
    """Scores 0, slope log 2: the weights halve with every step away from the query's position."""
    arrays = [np.zeros((1, length, 2)) for length in (2, 4, 4)]
    weights = attention(*arrays, alibi_slopes=[math.log(2)], q_offset=1, return_weights=True)[1]
    assert_close(weights[0], [np.array([2, 4, 2, 1]) / 9, np.array([1, 2, 4, 2]) / 9], 1e-15)


def test_slopes_follow_the_lower_right_corner_of_each_length(attention, rng):
    arrays = qkv(rng, queries=4, keys=9)
    options = {"valid_lens": [9, 6], "alibi_slopes": [0.5, 0.25]}
    got = attention(*arrays, is_causal="lower_right", **options, **ALL)
    assert_same(got, attention(*arrays, is_causal=True, q_offset=[5, 2], **options, **ALL), arrays, biggest=5)


def test_a_causal_shift_of_slopes_changes_the_lse_alone(attention, rng):
    """Seen from later positions every key is as many steps further: the same amount for all."""
    arrays = qkv(rng, heads=2)
    slopes = np.array([0.5, 0.125])
    out, lse, weights = attention(*arrays, alibi_slopes=slopes, q_offset=40, **ALL)
    shifted = attention(*arrays, alibi_slopes=slopes, q_offset=48, **ALL)
    assert_same(shifted, (out, lse - 8 * slopes[:, None], weights), arrays, biggest=40)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slope", [1e-30, 0.5, 1e38, 1e300, -1e-30])
@pytest.mark.parametrize("offset", [2**62, -(2**62), 10**30])
def test_far_slopes_hide_nothing(attention, rng, dtype, slope, offset):
    """The distance swallows the scores, so every key weighs the same; a product beyond the range is its end."""
    arrays = qkv(rng, queries=3, keys=5, dtype=dtype)
    out, lse, weights = attention(*arrays, alibi_slopes=[slope] * 2, q_offset=offset, **ALL)
    assert np.isfinite(lse).all()
    assert np.isfinite(out).all()
    if abs(slope) > 1e-3:
        assert_close(weights, np.full(weights.shape, 0.2), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_steep_slope_never_empties_a_row(attention, rng, dtype):
    """One visible key, far away under the steepest slope, is all there is: weight 1."""
    query, key, value = qkv(rng, queries=1, keys=9, dtype=dtype)
    mask = np.arange(9) == 8
    slope = [float(np.finfo(dtype).max)] * 2
    out, lse, weights = attention(query, key, value, mask, alibi_slopes=slope, **ALL)
    assert np.array_equal(out, value[:, :, 8:])
    assert np.array_equal(weights, np.broadcast_to(mask.astype(dtype), weights.shape))
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_low_score_under_a_steep_slope_stays_finite(attention, dtype):
    """Their sum would be -inf, and a row of -inf is NaN."""
    limit = np.finfo(dtype).max
    query, key = np.array([[1.0]], dtype), np.array([[0], [-limit / 2]], dtype)
    options = {"attn_mask": np.array([False, True]), "scale": 1.0, "alibi_slopes": [float(limit)]}
    out, lse = attention(query, key, np.array([[1.0], [2.0]], dtype), return_lse=True, **options)
    assert out.item() == 2
    assert lse.item() == -limit


def test_slopes_of_every_rank(attention, rng):
    query, key, value = qkv(rng, batch=6, heads=2, queries=4, keys=5)
    slopes = draw(rng, 6, 2)
    want = attention(query, key, value, alibi_slopes=slopes)
    folded = [array.reshape(2, 3, *array.shape[1:]) for array in (query, key, value)]
    assert np.array_equal(attention(*folded, alibi_slopes=slopes.reshape(2, 3, 2)), want.reshape(2, 3, *want.shape[1:]))
    assert np.array_equal(attention(query[3], key[3], value[3], alibi_slopes=slopes[3]), want[3])
    assert np.array_equal(attention(query[3, 1], key[3, 1], value[3, 1], alibi_slopes=slopes[3, 1:]), want[3, 1])
    same = np.broadcast_to(slopes[0], (6, 2))
    assert np.array_equal(
        attention(query, key, value, alibi_slopes=slopes[0]), attention(query, key, value, alibi_slopes=same)
    )


@pytest.mark.parametrize("slopes", [[1, 2], [True, False], np.array([0.5, 2], ">f4"), np.array([0.5, 2], "f2")])
def test_slopes_and_sinks_of_other_dtypes(attention, rng, slopes):
    arrays = qkv(rng, dtype="float32")
    numbers = np.array(slopes, "f4")
    for name in ("alibi_slopes", "sinks"):
        got = attention(*arrays, **{name: slopes})
        assert got.dtype == np.float32
        assert np.array_equal(got, attention(*arrays, **{name: numbers}))


def test_the_slopes_of_the_paper():
    powers = [2.0**-i for i in range(1, 9)]
    assert_close(reference.alibi_slopes(8), powers, 1e-16)
    assert_close(reference.alibi_slopes(16)[1::2], powers, 1e-16)
    assert_close(reference.alibi_slopes(12), [*powers, *(2.0 ** -(i + 0.5) for i in range(4))], 1e-16)
    assert reference.alibi_slopes(1).tolist() == [2.0**-8]
    assert reference.alibi_slopes(np.int8(2)).dtype == np.float64


@pytest.mark.parametrize("heads", [*range(1, 34), 100])
def test_slopes_of_any_number_of_heads(heads):
    slopes = reference.alibi_slopes(heads)
    assert slopes.shape == (heads,)
    assert len(set(slopes)) == heads
    assert ((slopes > 0) & (slopes < 1)).all()


# ---------------------------------------------------------------- sinks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"is_causal": "lower_right"}, {"window_size": (4, 2)}, {"valid_lens": [0, 9]}])
def test_a_sink_is_one_more_key_without_a_value(attention, rng, dtype, options):
    """The same key for every query: its score is a bias, all else about it is 0, and everybody sees it."""
    query, key, value = arrays = qkv(rng, queries=12, dtype=dtype)
    sinks = np.array([0.5, -3.0], dtype)
    hidden = attention(*arrays, return_weights=True, **options)[1] == 0
    bias = np.concatenate([np.where(hidden, -np.inf, 0), np.broadcast_to(sinks[:, None, None], (2, 2, 12, 1))], -1)
    longer = [np.concatenate([array, np.zeros_like(array[:, :, :1])], axis=2) for array in (key, value)]
    out, lse, weights = attention(query, *longer, bias, **ALL)
    assert_same(attention(*arrays, sinks=sinks, **options, **ALL), (out, lse, weights[..., :-1]), arrays, biggest=3)


def test_a_sink_by_hand(attention):
    arrays = [np.ones((2, length, 2)) for length in (1, 3, 3)]
    out, lse, weights = attention(*arrays, scale=0, sinks=[0.0, math.log(3)], **ALL)
    assert_close(out[:, 0, 0], [3 / 4, 1 / 2], 1e-15)
    assert_close(lse[:, 0], [math.log(4), math.log(6)], 1e-15)
    assert_close(weights[:, 0], [[1 / 4] * 3, [1 / 6] * 3], 1e-15)


@pytest.mark.parametrize("options", [{}, {"softcap": 0.01}, {"scale": 0.0}, {"attn_mask": np.zeros((1, 3), bool)}])
def test_nothing_is_done_to_a_sink(attention, rng, options):
    """Whatever happens to the scores, a sink far above them is the log-sum-exp."""
    query, key, value = qkv(rng, queries=2, keys=3)
    _, lse = attention(query, key, value, sinks=[100.0, 200.0], return_lse=True, **options)
    assert_close(lse, np.broadcast_to([[100.0], [200.0]], lse.shape), 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_sees_no_key_has_its_sink(attention, rng, dtype):
    query, key, value = qkv(rng, heads=3, queries=3, keys=4, dtype=dtype)
    value[:, :, 0] = np.nan
    sinks = np.array([1.5, -np.inf, -2000.25], dtype)
    out, lse, weights = attention(query, key, value, valid_lens=[[0, 0, 0], [0, 4, 0]], sinks=sinks, **ALL)
    empty = np.array([[True, True, True], [True, False, True]])
    assert not out.swapaxes(1, 2)[empty].any()
    assert not weights.swapaxes(1, 2)[empty].any()
    assert np.array_equal(lse.swapaxes(1, 2)[empty], np.broadcast_to(sinks, (5, 3)))
    assert np.isnan(out[1, :, 1]).all()


def test_no_keys_at_all(attention):
    arrays = [np.ones((2, length, 4)) for length in (3, 0, 0)]
    out, lse, weights = attention(*arrays, sinks=[2.0, -np.inf], alibi_slopes=[1, 1], window_size=(1, 1), **ALL)
    assert not out.any()
    assert lse.tolist() == [[2.0] * 3, [-np.inf] * 3]
    assert weights.shape == (2, 3, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_of_minus_infinity_is_none(attention, rng, dtype):
    arrays = qkv(rng, dtype=dtype)
    for got, want in zip(attention(*arrays, sinks=[-np.inf] * 2, **ALL), attention(*arrays, **ALL), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_sinks_stay_finite(attention, rng, dtype):
    arrays = qkv(rng, dtype=dtype)
    limit = float(np.finfo(dtype).max)
    for sink in (limit, 1e300):
        out, lse, _ = attention(*arrays, sinks=[sink, -sink], **ALL)
        assert np.array_equal(lse[:, 0], np.full(lse[:, 0].shape, min(sink, limit), dtype))
        assert not out[:, 0].any()
        assert np.array_equal(out[:, 1], attention(*arrays)[:, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_minus_infinity_beside_a_sink(attention, dtype):
    """They are seen, and weigh nothing beside a logit that is finite."""
    query, key = np.ones((1, 1, 1), dtype), np.full((1, 3, 1), -np.inf, dtype)
    out, lse, weights = attention(query, key, np.ones((1, 3, 2), dtype), sinks=[-5.0], **ALL)
    assert not out.any()
    assert not weights.any()
    assert lse.item() == -5.0


def test_a_visible_nan_beside_a_sink(attention, rng):
    query, key, value = qkv(rng)
    query[0, 0, 2] = np.nan
    out, lse, weights = attention(query, key, value, sinks=[1.0, 1.0], **ALL)
    for result in (out[0, 0], weights[0, 0], lse[0, 0, :, None]):
        assert np.isnan(result[2]).all()
        assert np.isfinite(np.delete(result, 2, axis=0)).all()


# ---------------------------------------------------------------- what is hidden stays hidden


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["key", "value"])
def test_what_a_window_hides_never_leaks(attention, rng, dtype, poison, place):
    query, key, value = qkv(rng, queries=30, keys=40, dtype=dtype)
    options = {"window_size": (3, 2), "q_offset": 4, "softcap": 3.0, "alibi_slopes": [0.5, 0.1], "sinks": [0.0, 1.0]}
    want = attention(query, key, value, **options, **ALL)
    {"key": key, "value": value}[place][:, :, 20] = poison
    touched = (np.arange(30) + 4 >= 18) & (np.arange(30) + 4 <= 23)
    for g, w in zip(attention(query, key, value, **options, **ALL), want, strict=True):
        assert np.array_equal(g[:, :, ~touched], w[:, :, ~touched])


# ---------------------------------------------------------------- rows of weights


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("rows", [[0], [4, 1], [-1, -5, 0], [2, 2, 2], [], range(5), np.array([3, 0], np.uint8)])
def test_weights_of_chosen_rows(attention, rng, layout, rows):
    query, key, value = qkv(rng, heads=4, kv_heads=2, queries=5, keys=7)
    if layout == "blhd":
        query, key, value = (array.swapaxes(1, 2) for array in (query, key, value))
    options = {"layout": layout, "enable_gqa": True, "window_size": (2, 2), "sinks": [0, 1, 2, 3]}
    want = attention(query, key, value, **options, **ALL)
    out, lse, weights = attention(query, key, value, weights_rows=rows, **options, **ALL)
    assert np.array_equal(out, want[0])
    assert np.array_equal(lse, want[1])
    assert weights.dtype == np.float64
    assert np.array_equal(weights, want[2][:, :, np.array(rows, int)])


def test_weights_of_chosen_rows_of_a_matrix(attention, rng):
    query, key, value = (array[0, 0] for array in qkv(rng, queries=5, keys=7))
    want = attention(query, key, value, return_weights=True)[1]
    weights = attention(query, key, value, return_weights=True, weights_rows=[-2])[1]
    assert np.array_equal(weights, want[-2:-1])


# ---------------------------------------------------------------- arrays


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
@pytest.mark.parametrize("width", [0, 2])
def test_sizes_of_zero(attention, sizes, width):
    b, h, n, s = sizes
    arrays = [np.ones((b, h, length, width)) for length in (n, s, s)]
    options = {"softcap": 2.0, "alibi_slopes": np.ones((b, h)), "sinks": np.zeros(h), "window_size": (1, 0)}
    out, lse, weights = attention(*arrays, **options, **ALL)
    assert out.shape == (b, h, n, width)
    assert not out.any()
    assert np.array_equal(lse, np.zeros((b, h, n)))
    assert weights.shape == (b, h, n, s)


def test_any_memory_and_nothing_is_changed(attention, rng):
    arrays = qkv(rng, heads=3)
    slopes, sinks, rows = draw(rng, 2, 3), draw(rng, 3), np.array([3, -1])
    options = {"alibi_slopes": slopes, "sinks": sinks, "weights_rows": rows}
    want = attention(*arrays, **options, **ALL)
    turned = {
        "alibi_slopes": np.asfortranarray(slopes),
        "sinks": np.repeat(sinks, 2)[::2],
        "weights_rows": rows[::-1].copy()[::-1],
    }
    for array in turned.values():
        array.flags.writeable = False
    for g, w in zip(attention(*arrays, **turned, **ALL), want, strict=True):
        assert np.array_equal(g, w)
    assert np.array_equal(rows, [3, -1])
