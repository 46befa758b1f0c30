"""The reference itself: hand-made cases, closed forms, and a loop over single rows in float64.

Everything else is measured against `mha_fast.reference`, so nothing here uses the fast path.
"""

import math

import numpy as np
import pytest

from mha_fast import reference
from mha_fast.reference import MultiHeadAttention, PositionWiseFFN, scaled_dot_product_attention

# Errors relative to the largest value. A row is a convex combination, so its error is that of some
# tens of roundings at these sizes: 64 ulp. Exactly representable cases are compared exactly.
TOLERANCE = {"float32": 64 * 2.0**-24, "float64": 64 * 2.0**-53}
DTYPES = ("float32", "float64")


@pytest.fixture(autouse=True)
def no_floating_point_warnings():
    """A NumPy user may have asked for exceptions; none of the caller's numbers may raise one."""
    with np.errstate(all="raise"):
        yield


def assert_near(got, want, what=""):
    got, want = np.asarray(got), np.asarray(want, np.float64)
    assert got.shape == want.shape, what
    assert np.array_equal(np.isnan(got), np.isnan(want)), f"{what}: NaN elsewhere"
    infinite = np.isinf(want)
    assert np.array_equal(got[infinite], want[infinite]), f"{what}: infinities differ"
    rest = np.isfinite(want)
    top = max(1.0, np.abs(want[rest]).max(initial=0.0))
    error = np.abs(got[rest] - want[rest]).max(initial=0.0) / top
    assert error <= TOLERANCE[got.dtype.name], f"{what}: error {error}"


def draws(rng, *shapes, dtype="float64"):
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def qkv(rng, batch=2, heads=2, queries=5, keys=7, width=4, value_width=3, kv_heads=None, dtype="float64"):
    kv_heads = heads if kv_heads is None else kv_heads
    return draws(
        rng,
        (batch, heads, queries, width),
        (batch, kv_heads, keys, width),
        (batch, kv_heads, keys, value_width),
        dtype=dtype,
    )


def one_row(query, keys, values, bias, scale):
    """Output, log-sum-exp and weights of one query over the keys it sees, with Python's floats."""
    scores = [
        sum(float(a) * float(b) for a, b in zip(query, key, strict=True)) * scale + float(extra)
        for key, extra in zip(keys, bias, strict=True)
    ]
    if not scores:
        return [0.0] * values.shape[1], -math.inf, []
    top = max(scores)
    exponentials = [math.exp(score - top) for score in scores]
    total = math.fsum(exponentials)
    weights = [e / total for e in exponentials]
    output = [math.fsum(w * float(v) for w, v in zip(weights, column, strict=True)) for column in values.T]
    return output, top + math.log(total), weights


def by_rows(query, key, value, mask=None, lengths=None, offset=None, scale=None):
    """Attention of 4-D arrays row by row. offset None: not causal; else one for each batch element."""
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    group = heads // key.shape[1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    output = np.zeros((batch, heads, queries, value.shape[3]))
    lse = np.zeros((batch, heads, queries))
    weights = np.zeros((batch, heads, queries, keys))
    full = None if mask is None else np.broadcast_to(mask, weights.shape)
    for b, h, i in np.ndindex(batch, heads, queries):
        seen, bias = [], []
        for j in range(keys):
            hidden = lengths is not None and j >= np.broadcast_to(lengths, (queries, batch)).T[b, i]
            hidden = hidden or (offset is not None and j > i + offset[b])
            extra = 0.0
            if full is not None and full.dtype == bool:
                hidden = hidden or not full[b, h, i, j]
            elif full is not None:
                extra = float(full[b, h, i, j])
                hidden = hidden or extra == -math.inf
            if not hidden:
                seen.append(j)
                bias.append(extra)
        kv = h // group
        output[b, h, i], lse[b, h, i], weights[b, h, i, seen] = one_row(
            query[b, h, i], key[b, kv, seen], value[b, kv, seen], bias, scale
        )
    return output, lse, weights


# ---------------------------------------------------------------- by hand


def test_two_keys_by_hand():
    """Scores 0 and ln 3: weights 1/4 and 3/4, log-sum-exp ln 4."""
    query, key = np.array([[1.0]]), np.array([[0.0], [math.log(3)]])
    value = np.array([[0.0, 8.0], [4.0, 0.0]])
    out, lse, weights = scaled_dot_product_attention(query, key, value, scale=1.0, return_lse=True, return_weights=True)
    assert_near(out, [[3.0, 2.0]])
    assert_near(lse, [math.log(4)])
    assert_near(weights, [[0.25, 0.75]])


def test_default_scale_is_one_over_the_root_of_the_width():
    """q k = 2 ln 3 over width 4: the score is ln 3."""
    query = np.ones((1, 4))
    key = np.array([[0.0] * 4, [math.log(3) / 2] * 4])
    assert_near(scaled_dot_product_attention(query, key, np.array([[0.0], [4.0]])), [[3.0]])


def test_negative_scale_by_hand():
    """The score -ln 3 beside 0: weights 3/4 and 1/4."""
    key = np.array([[0.0], [math.log(3)]])
    got = scaled_dot_product_attention(np.ones((1, 1)), key, np.array([[0.0], [4.0]]), scale=-1)
    assert_near(got, [[1.0]])


def test_bias_by_hand():
    """Equal scores and a bias of ln 3 on the second key."""
    mask = np.array([0.0, math.log(3)])
    got = scaled_dot_product_attention(np.ones((1, 2)), np.ones((2, 2)), np.array([[0.0], [4.0]]), mask)
    assert_near(got, [[3.0]])


def test_the_three_causal_alignments_by_hand():
    """Scores of 0 give the mean of what is seen; V = 0, 2, 4, 6."""
    query, key = np.zeros((2, 1)), np.zeros((4, 1))
    value = np.array([[0.0], [2.0], [4.0], [6.0]])

    def means(**options):
        return scaled_dot_product_attention(query, key, value, **options).ravel().tolist()

    assert means() == [3.0, 3.0]
    assert means(is_causal="upper_left") == [0.0, 1.0]
    assert means(is_causal="lower_right") == [2.0, 3.0]
    assert means(is_causal=True, q_offset=1) == [1.0, 2.0]
    assert means(is_causal=True, q_offset=-1) == [0.0, 0.0]
    assert means(q_offset=1) == [3.0, 3.0]
    assert means(is_causal="lower_right", valid_lens=3) == [1.0, 2.0]
    assert means(is_causal="lower_right", valid_lens=[3, 1]) == [2.0, 0.0]
    assert means(is_causal="lower_right", valid_lens=1) == [0.0, 0.0]


def test_neighbouring_query_heads_share_a_key_head():
    query = np.zeros((1, 4, 1, 2))
    key = np.zeros((1, 2, 3, 2))
    value = np.array([10.0, 20.0]).reshape(1, 2, 1, 1).repeat(3, axis=2)
    got = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    assert got.ravel().tolist() == [10.0, 10.0, 20.0, 20.0]


# ---------------------------------------------------------------- the loop over rows


MASKS = {
    "none": lambda rng, shape: None,
    "bool": lambda rng, shape: rng.random(shape) < 0.6,
    "bias": lambda rng, shape: rng.standard_normal(shape) * 3,
    "bias and -inf": lambda rng, shape: np.where(rng.random(shape) < 0.5, -np.inf, rng.standard_normal(shape)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [None, [3, 9], [0, 2.5]], ids=["no lens", "3 9", "0 2.5"])
@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right", "offsets"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_rows(rng, dtype, mask, lengths, causal, kv_heads):
    query, key, value = qkv(rng, heads=4, kv_heads=kv_heads, dtype=dtype)
    attn_mask = MASKS[mask](rng, (2, 4, 5, 7))
    if attn_mask is not None and attn_mask.dtype != bool:
        attn_mask = attn_mask.astype(dtype)
    last = [7, 7] if lengths is None else np.ceil(np.clip(lengths, 0, 7))
    offset = {
        None: None,
        "upper_left": [0, 0],
        "lower_right": [last[0] - 5, last[1] - 5],
        "offsets": [4, -2],
    }[causal]
    options = {"is_causal": causal or False}
    if causal == "offsets":
        options = {"is_causal": True, "q_offset": offset}
    got = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask,
        valid_lens=lengths,
        enable_gqa=True,
        return_lse=True,
        return_weights=True,
        **options,
    )
    want = by_rows(query, key, value, attn_mask, lengths, offset)
    for name, g, w in zip(("out", "lse", "weights"), got, want, strict=True):
        assert g.dtype == dtype
        assert_near(g, w, name)


@pytest.mark.parametrize("scale", [None, 1.0, 0, -0.5, 30.0, np.float32(0.25), np.array(2)])
def test_rows_for_every_scale(rng, scale):
    query, key, value = qkv(rng)
    got = scaled_dot_product_attention(query, key, value, scale=scale)
    want = by_rows(query, key, value, scale=None if scale is None else float(scale))[0]
    assert_near(got, want)


def test_rows_for_lengths_of_each_query(rng):
    query, key, value = qkv(rng)
    lengths = rng.integers(0, 9, (2, 5))
    got = scaled_dot_product_attention(query, key, value, valid_lens=lengths)
    for b in range(2):
        one = slice(b, b + 1)
        want = by_rows(query[one], key[one], value[one], lengths=lengths[b][:, None])[0]
        assert_near(got[one], want)


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_the_keys_does_not_matter(rng, dtype):
    query, key, value = qkv(rng, dtype=dtype)
    order = rng.permutation(7)
    want = scaled_dot_product_attention(query, key, value)
    assert_near(scaled_dot_product_attention(query, key[:, :, order], value[:, :, order]), want)


def test_a_constant_bias_changes_the_lse_alone(rng):
    query, key, value = qkv(rng)
    out, lse = scaled_dot_product_attention(query, key, value, return_lse=True)
    shifted, shifted_lse = scaled_dot_product_attention(query, key, value, np.full(7, 3.0), return_lse=True)
    assert_near(shifted, out)
    assert_near(shifted_lse, lse + 3.0)


def test_hidden_keys_are_as_good_as_removed(rng):
    query, key, value = qkv(rng)
    keep = np.array([True, False, True, True, False, False, True])
    want = scaled_dot_product_attention(query, key[:, :, keep], value[:, :, keep])
    assert_near(scaled_dot_product_attention(query, key, value, keep), want)
    assert_near(scaled_dot_product_attention(query, key, value, np.where(keep, 0.0, -np.inf)), want)


def test_two_halves_merge_through_their_lse(rng):
    query, key, value = qkv(rng)
    whole, lse = scaled_dot_product_attention(query, key, value, return_lse=True)
    halves = [
        scaled_dot_product_attention(query, key[:, :, part], value[:, :, part], return_lse=True)
        for part in (slice(0, 3), slice(3, 7))
    ]
    total = np.logaddexp(halves[0][1], halves[1][1])
    merged = sum(np.exp(part_lse - total)[..., None] * out for out, part_lse in halves)
    assert_near(total, lse)
    assert_near(merged, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(rng, dtype):
    """Scores of 1e5: the row takes the value of its largest score."""
    query = np.full((1, 1, 1, 1), 1e5, dtype)
    key = np.array([1.0, 3.0, 2.0], dtype).reshape(1, 1, 3, 1)
    value = np.array([5.0, 6.0, 7.0], dtype).reshape(1, 1, 3, 1)
    out, lse = scaled_dot_product_attention(query, key, value, return_lse=True)
    assert out.item() == 6.0
    assert lse.item() == 3e5


# ---------------------------------------------------------------- rows that see nothing


EMPTY_ROWS = {
    "length 0": {"valid_lens": np.array([0])},
    "negative length": {"valid_lens": np.array([-3.5])},
    "bool mask": {"attn_mask": np.zeros((3, 4), bool)},
    "-inf mask": {"attn_mask": np.full((3, 4), -np.inf)},
    "float16 -inf mask": {"attn_mask": np.full((3, 4), -np.inf, np.float16)},
    "offset": {"is_causal": True, "q_offset": -3},
    "offset beyond 64 bits": {"is_causal": True, "q_offset": -(10**30)},
    "lower right of a short batch": {"is_causal": "lower_right", "valid_lens": np.array([0])},
    "together only": {"attn_mask": np.array([False, True, True, True]), "valid_lens": np.array([1])},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EMPTY_ROWS)
@pytest.mark.parametrize("fill", [1.0, np.nan, np.inf])
def test_a_row_that_sees_no_key_is_zero(dtype, case, fill):
    """Whatever lies in query, key and value: emptiness is a matter of visibility."""
    arrays = [np.full((1, 2, n, 3), fill, dtype) for n in (3, 4, 4)]
    out = np.full((1, 2, 3, 3), np.nan, dtype)
    got, lse, weights = scaled_dot_product_attention(
        *arrays, **EMPTY_ROWS[case], out=out, return_lse=True, return_weights=True
    )
    assert got is out
    assert not out.any()
    assert np.isneginf(lse).all()
    assert not weights.any()


def test_empty_rows_between_others(rng):
    query, key, value = qkv(rng)
    mask = np.ones((5, 7), bool)
    mask[[0, 3]] = False
    out = scaled_dot_product_attention(query, key, value, mask)
    want = scaled_dot_product_attention(query, key, value)
    assert not out[:, :, [0, 3]].any()
    assert_near(out[:, :, [1, 2, 4]], want[:, :, [1, 2, 4]])


# ---------------------------------------------------------------- NaN and infinity


HIDING = {
    "bool mask": {"attn_mask": np.arange(7) < 4},
    "-inf mask": {"attn_mask": np.where(np.arange(7) < 4, 0.0, -np.inf)},
    "lengths": {"valid_lens": [4, 4]},
    "causal": {"is_causal": True, "q_offset": np.array([-1, -1])},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_hidden_never_leaks(rng, dtype, hiding, poison):
    query, key, value = qkv(rng, dtype=dtype)
    want = scaled_dot_product_attention(query, key, value, **HIDING[hiding], return_lse=True, return_weights=True)
    key[:, :, 4:] = poison
    value[:, :, 4:] = poison
    got = scaled_dot_product_attention(query, key, value, **HIDING[hiding], return_lse=True, return_weights=True)
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(g, w)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_value_reaches_only_its_column_and_the_rows_that_see_it(rng, poison):
    query, key, value = qkv(rng)
    want = scaled_dot_product_attention(query, key, value, is_causal="upper_left")
    value[0, 1, 2, 1] = poison
    got = scaled_dot_product_attention(query, key, value, is_causal="upper_left")
    want[0, 1, 2:, 1] = poison
    assert_near(got, want)


def test_infinities_of_both_signs_are_nan(rng):
    query, key, value = qkv(rng)
    value[0, 0, 1, 0], value[0, 0, 2, 0] = np.inf, -np.inf
    got = scaled_dot_product_attention(query, key, value, is_causal="upper_left")
    assert got[0, 0, 1, 0] == np.inf
    assert np.isnan(got[0, 0, 2:, 0]).all()
    assert np.isfinite(np.delete(got, 0, axis=3)).all()


def test_a_weight_that_underflows_is_still_seen():
    """0 * NaN is NaN where the key is visible."""
    key = np.array([[0.0], [-1e4]])
    got = scaled_dot_product_attention(np.ones((1, 1)), key, np.array([[1.0, 1.0], [np.nan, 2.0]]))
    assert np.isnan(got[0, 0])
    assert got[0, 1] == 1.0


@pytest.mark.parametrize("keys", [1, 3, 4, 8, 16, 17, 33])
def test_nan_in_a_query_spoils_its_row_alone(rng, keys):
    query, key, value = qkv(rng, keys=keys)
    want = scaled_dot_product_attention(query, key, value)
    query[1, 0, 2, 1] = np.nan
    got, lse = scaled_dot_product_attention(query, key, value, return_lse=True)
    want[1, 0, 2] = np.nan
    assert_near(got, want)
    assert np.argwhere(np.isnan(lse)).tolist() == [[1, 0, 2]]


def test_nan_in_a_key_spoils_the_rows_that_see_it(rng):
    query, key, value = qkv(rng)
    want, _, want_weights = scaled_dot_product_attention(
        query, key, value, is_causal="upper_left", return_lse=True, return_weights=True
    )
    key[0, 0, 3, 2] = np.nan
    got, _, weights = scaled_dot_product_attention(
        query, key, value, is_causal="upper_left", return_lse=True, return_weights=True
    )
    want[0, 0, 3:] = np.nan
    assert_near(got, want)
    assert np.isnan(weights[0, 0, 3, :4]).all()
    assert not weights[0, 0, 3, 4:].any()
    assert np.array_equal(weights[1], want_weights[1])


def test_nan_and_plus_infinity_in_a_mask_spoil_their_rows(rng):
    query, key, value = qkv(rng)
    mask = np.zeros((5, 7))
    want = scaled_dot_product_attention(query, key, value, mask)
    mask[1, 2], mask[3, 0] = np.nan, np.inf
    want[:, :, [1, 3]] = np.nan
    assert_near(scaled_dot_product_attention(query, key, value, mask), want)


# ---------------------------------------------------------------- finite masks are biases


FLOAT32, FLOAT64 = np.finfo(np.float32), np.finfo(np.float64)


@pytest.mark.parametrize(
    "dtype, bias",
    [
        ("float32", np.float32(FLOAT32.min)),
        ("float32", np.float32(FLOAT32.max)),
        ("float32", np.float64(FLOAT64.min)),
        ("float32", np.float64(FLOAT64.max)),
        ("float32", np.float64(-1e300)),
        ("float32", np.float32(-1e9)),
        ("float64", np.float64(FLOAT64.min)),
        ("float64", np.float64(FLOAT64.max)),
    ],
)
def test_a_row_of_one_large_finite_number_is_the_mean(rng, dtype, bias):
    query, key, value = qkv(rng, dtype=dtype)
    mask = np.zeros((5, 7), bias.dtype)
    mask[2] = bias
    got, lse = scaled_dot_product_attention(query, key, value, mask, return_lse=True)
    assert_near(got[:, :, 2], value.astype("float64").mean(axis=2))
    assert np.isfinite(lse).all()


def test_a_wider_mask_is_clamped_and_only_infinity_hides(rng):
    """-1e300 beside finfo(float32).min is the same bias; -inf beside them is a hidden key."""
    query, key, value = qkv(rng, dtype="float32")
    mask = np.array([-1e300, -np.inf, FLOAT32.min, -1e39, -np.inf, -np.inf, FLOAT64.min])
    got = scaled_dot_product_attention(query, key, value, mask)
    want = np.broadcast_to(value[:, :, [0, 2, 3, 6]].astype("float64").mean(axis=2)[:, :, None], got.shape)
    assert_near(got, want)


def test_a_finite_bias_and_a_finite_score_stay_finite():
    """Scores of -1e32 beside finfo(float32).min: their sum must not become -inf."""
    query, key = np.full((1, 1), -1e16, np.float32), np.full((3, 1), 1e16, np.float32)
    value = np.array([[1.0], [2.0], [6.0]], np.float32)
    got = scaled_dot_product_attention(query, key, value, np.full(3, FLOAT32.min, np.float32))
    assert got.item() == 3.0


@pytest.mark.parametrize("mask_dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_never_changes_the_dtype(rng, dtype, mask_dtype):
    query, key, value = qkv(rng, dtype=dtype)
    mask = np.round(rng.standard_normal((5, 7)) * 8) / 8  # exact in float16
    got = scaled_dot_product_attention(query, key, value, mask.astype(mask_dtype))
    assert got.dtype == dtype
    assert_near(got, by_rows(query, key, value, mask)[0])


def test_a_bfloat16_mask(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    query, key, value = qkv(rng, dtype="float32")
    mask = np.where(rng.random((5, 7)) < 0.3, -np.inf, 0.5).astype(ml_dtypes.bfloat16)
    got = scaled_dot_product_attention(query, key, value, mask)
    assert_near(got, by_rows(query, key, value, mask.astype("float64"))[0])


# ---------------------------------------------------------------- masks, lengths, offsets


@pytest.mark.parametrize("kept", range(16))
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_broadcast_along_every_axis(rng, kept, kind):
    query, key, value = qkv(rng, batch=2, heads=3, queries=4, keys=5)
    full = (2, 3, 4, 5)
    shape = tuple(size if kept >> axis & 1 else 1 for axis, size in enumerate(full))
    mask = rng.random(shape) < 0.7 if kind == "bool" else rng.standard_normal(shape)
    before = mask.copy()
    want = by_rows(query, key, value, mask)[0]
    assert_near(scaled_dot_product_attention(query, key, value, mask), want)
    while mask.ndim > 1 and mask.shape[0] == 1:
        mask = mask[0]
        assert_near(scaled_dot_product_attention(query, key, value, mask), want, mask.shape)
    assert np.array_equal(mask.ravel(), before.ravel())


def test_the_first_of_three_mask_axes_counts_query_heads(rng):
    query, key, value = qkv(rng, batch=2, heads=2, kv_heads=1)
    mask = np.ones((2, 5, 7), bool)
    mask[1] = False
    got = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    assert got[:, 0].all()
    assert not got[:, 1].any()


def test_any_byte_but_0_of_a_bool_mask_is_true(rng):
    query, key, value = qkv(rng)
    mask = (rng.random((5, 7)) < 0.5) * np.uint8(2)
    want = scaled_dot_product_attention(query, key, value, mask != 0)
    assert np.array_equal(scaled_dot_product_attention(query, key, value, mask.view(bool)), want)


@pytest.mark.parametrize(
    "lengths, counts",
    [
        ([2, 5], [2, 5]),
        ([2.0, 4.5], [2, 5]),
        ([1e-300, 6.999], [1, 7]),
        ([-1, 8], [0, 7]),
        ([-np.inf, np.inf], [0, 7]),
        ([-0.5, 1e300], [0, 7]),
        (np.array([3, 255], np.uint8), [3, 7]),
        (np.array([3, 2**64 - 1], np.uint64), [3, 7]),
        (np.array([-(2**63), 2**63 - 1]), [0, 7]),
        (np.array([2.5, 65504], np.float16), [3, 7]),
        (np.array([2.5, 3], np.longdouble), [3, 3]),
        (np.array([2, 5], ">i4"), [2, 5]),
    ],
)
def test_lengths_count_keys(rng, lengths, counts):
    query, key, value = qkv(rng)
    got = scaled_dot_product_attention(query, key, value, valid_lens=lengths)
    assert_near(got, by_rows(query, key, value, lengths=counts)[0])


def test_lengths_of_one_byte_beside_many_keys(rng):
    query, key, value = qkv(rng, queries=1, keys=300)
    got = scaled_dot_product_attention(query, key, value, valid_lens=np.array([255, 7], np.uint8))
    assert_near(got, by_rows(query, key, value, lengths=[255, 7])[0])


@pytest.mark.parametrize("offset", [2**63 - 1, -(2**63), 10**30, -(10**30), np.uint64(2**64 - 1)])
def test_offsets_do_not_wrap(rng, offset):
    query, key, value = qkv(rng)
    got = scaled_dot_product_attention(query, key, value, is_causal=True, q_offset=offset)
    want = scaled_dot_product_attention(query, key, value) if int(offset) > 0 else np.zeros((2, 2, 5, 3))
    assert_near(got, want)


# ---------------------------------------------------------------- shapes and memory


def test_two_and_three_dimensions_are_one_batch_element(rng):
    query, key, value = qkv(rng, batch=1)
    lengths = rng.integers(0, 8, 5)
    mask = rng.standard_normal((5, 7))
    options = {"return_lse": True, "return_weights": True}
    want = scaled_dot_product_attention(query, key, value, mask, valid_lens=lengths[None], **options)
    three = scaled_dot_product_attention(query[0], key[0], value[0], mask, valid_lens=lengths, **options)
    two = scaled_dot_product_attention(query[0, 0], key[0, 0], value[0, 0], mask, valid_lens=lengths, **options)
    for w, a, b in zip(want, three, two, strict=True):
        assert np.array_equal(a, w[0])
        assert np.array_equal(b, w[0, 0])


@pytest.mark.parametrize("ndim", [2, 3, 4, 5])
def test_layouts_give_the_same(rng, ndim):
    shapes = [(2, 3, 2, n, w)[5 - ndim :] for n, w in ((5, 4), (7, 4), (7, 3))]
    arrays = draws(rng, *shapes)
    mask = rng.standard_normal((5, 7))
    options = {"return_lse": True, "return_weights": True}
    want = scaled_dot_product_attention(*arrays, mask, **options)

    def turned(array):
        return array.swapaxes(-3, -2) if array.ndim > 2 else array

    got = scaled_dot_product_attention(*map(turned, arrays), mask, layout="blhd", **options)
    assert np.array_equal(turned(got[0]), want[0])
    assert np.array_equal(got[1], want[1])
    assert np.array_equal(got[2], want[2])
    out = np.empty(got[0].shape)
    assert scaled_dot_product_attention(*map(turned, arrays), mask, layout="blhd", out=out) is out
    assert np.array_equal(out, got[0])


def test_leading_dimensions_broadcast(rng):
    query, key, value = draws(rng, (3, 1, 2, 5, 4), (1, 2, 2, 7, 4), (1, 1, 2, 7, 3))
    lengths = rng.integers(0, 8, (3, 2))
    got = scaled_dot_product_attention(query, key, value, valid_lens=lengths)
    assert got.shape == (3, 2, 2, 5, 3)
    for a, b in np.ndindex(3, 2):
        want = scaled_dot_product_attention(query[a, 0], key[0, b], value[0, 0], valid_lens=lengths[a, b])
        assert np.array_equal(got[a, b], want)


@pytest.mark.parametrize("axis", range(6), ids=["B", "H", "L", "S", "E", "Ev"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_sizes_of_zero(axis, dtype, masked):
    sizes = [2, 2, 3, 4, 5, 6]
    sizes[axis] = 0
    b, h, n, s, e, ev = sizes
    arrays = [np.ones((b, h, n, e), dtype), np.ones((b, h, s, e), dtype), np.ones((b, h, s, ev), dtype)]
    options = {"attn_mask": np.zeros((n, s), dtype), "valid_lens": np.full(b, s)} if masked else {}
    out, lse, weights = scaled_dot_product_attention(*arrays, **options, return_lse=True, return_weights=True)
    assert out.shape == (b, h, n, ev)
    assert lse.shape == (b, h, n)
    assert weights.shape == (b, h, n, s)
    assert out.dtype == lse.dtype == weights.dtype == dtype
    if s == 0:
        assert not out.any()
        assert np.isneginf(lse).all()
    elif e == 0:
        assert (out == 1).all()
        assert (weights == 0.25).all()


def test_key_heads_of_zero_with_no_query_heads():
    arrays = [np.ones((2, 0, n, 3)) for n in (4, 5, 5)]
    assert scaled_dot_product_attention(*arrays).shape == (2, 0, 4, 3)
    arrays[1:] = np.ones((2, 2, 5, 3)), np.ones((2, 2, 5, 3))
    assert scaled_dot_product_attention(*arrays, enable_gqa=True).shape == (2, 0, 4, 3)


def views(array):
    """The same numbers in other memory."""
    wide = np.repeat(array, 2, axis=-1)
    record = np.zeros(array.shape, [("flag", "i1"), ("number", array.dtype)])
    record["number"] = array
    locked = array.copy()
    locked.flags.writeable = False
    flipped = np.ascontiguousarray(array[:, :, ::-1])[:, :, ::-1]
    return {
        "every second": wide[..., ::2],
        "Fortran": np.asfortranarray(array),
        "reversed": flipped,
        "byte-swapped": array.astype(array.dtype.newbyteorder()),
        "unaligned": record["number"],
        "read-only": locked,
    }


@pytest.mark.parametrize("view", views(np.zeros((1, 1, 1, 1))))
@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["query", "key", "value", "attn_mask"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_does_not_matter(rng, view, which, dtype):
    arrays = [*qkv(rng, dtype=dtype), *draws(rng, (2, 2, 5, 7), dtype=dtype)]
    want = scaled_dot_product_attention(*arrays)
    before = arrays[which].copy()
    arrays[which] = views(arrays[which])[view]
    got = scaled_dot_product_attention(*arrays)
    assert got.dtype == dtype
    assert_near(got, want)
    assert np.array_equal(arrays[which], before)


def test_broadcast_inputs_stay_views(rng):
    """A batch that repeats, and one of 2**40 elements without a query: nothing is copied or looped over."""
    query, key, value = qkv(rng, batch=1)
    wide = [np.broadcast_to(array, (3, *array.shape[1:])) for array in (query, key, value)]
    want = scaled_dot_product_attention(query, key, value)
    assert np.array_equal(scaled_dot_product_attention(*wide), np.repeat(want, 3, axis=0))
    endless = np.broadcast_to(query[:, :, :0], (2**40, 2, 0, 4))
    assert scaled_dot_product_attention(endless, key, value).shape == (2**40, 2, 0, 3)


class OnlyArray:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array, dtype=dtype)


class OnlyDLPack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize(
    "wrap", [np.ndarray.tolist, OnlyArray, OnlyDLPack, memoryview, lambda a: a.astype("int16"), np.ma.asarray]
)
def test_array_likes(rng, wrap):
    arrays = [np.round(array * 3) for array in qkv(rng)]
    want = scaled_dot_product_attention(*arrays)
    got = scaled_dot_product_attention(*map(wrap, arrays))
    assert type(got) is np.ndarray
    assert got.dtype == "float64"
    assert np.array_equal(got, want)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_matrix_is_its_array(rng):
    query, key, value = draws(rng, (5, 4), (7, 4), (7, 3))
    got = scaled_dot_product_attention(np.matrix(query), np.matrix(key), np.matrix(value))
    assert type(got) is np.ndarray
    assert np.array_equal(got, scaled_dot_product_attention(query, key, value))


def test_memory_maps(rng, tmp_path):
    query, key, value = qkv(rng, dtype="float32")
    maps = []
    for n, array in enumerate((query, key, value)):
        array.tofile(tmp_path / str(n))
        maps.append(np.memmap(tmp_path / str(n), array.dtype, "r", shape=array.shape))
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=(2, 2, 5, 3))
    assert scaled_dot_product_attention(*maps, out=out) is out
    assert np.array_equal(out, scaled_dot_product_attention(query, key, value))


@pytest.mark.parametrize(
    "dtypes, result",
    [
        (("float32", "float32", "float32"), "float32"),
        (("float32", "float64", "float32"), "float64"),
        (("float32", "float32", "float64"), "float64"),
        (("float32", "int8", "float32"), "float64"),
        (("bool", "uint64", "int16"), "float64"),
        ((">f4", "<f4", ">f4"), "float32"),
    ],
)
def test_the_dtype_of_the_result(rng, dtypes, result):
    arrays = [np.round(a * 3).astype(d) for a, d in zip(map(np.abs, qkv(rng)), dtypes, strict=True)]
    out, lse, weights = scaled_dot_product_attention(*arrays, return_lse=True, return_weights=True)
    assert out.dtype == lse.dtype == weights.dtype == result
    assert out.dtype.isnative
    assert_near(out, by_rows(*arrays)[0])


OUTS = {
    "contiguous": lambda shape: np.full(shape, np.nan),
    "Fortran": lambda shape: np.full(shape, np.nan, order="F"),
    "every second": lambda shape: np.full((*shape[:-1], 2 * shape[-1]), np.nan)[..., ::2],
    "reversed": lambda shape: np.full(shape, np.nan)[:, ::-1, ::-1],
    "turned": lambda shape: np.full(shape[::-1], np.nan).T,
}


@pytest.mark.parametrize("memory", OUTS)
def test_out_is_written_and_returned(rng, memory):
    query, key, value = qkv(rng)
    out = OUTS[memory]((2, 2, 5, 3))
    got = scaled_dot_product_attention(query, key, value, out=out)
    assert got is out
    assert np.array_equal(out, scaled_dot_product_attention(query, key, value))


def test_out_may_lie_between_the_inputs(rng):
    """Four parts of one buffer, each its own columns."""
    fused = rng.standard_normal((2, 5, 4, 2, 3))
    query, key, value, out = (fused[:, :, part].swapaxes(1, 2) for part in range(4))
    want = scaled_dot_product_attention(query.copy(), key.copy(), value.copy())
    before = fused[:, :, :3].copy()
    assert scaled_dot_product_attention(query, key, value, out=out) is out
    assert np.array_equal(out, want)
    assert np.array_equal(fused[:, :, :3], before)


@pytest.mark.parametrize("asked", [(), ("return_lse",), ("return_weights",), ("return_lse", "return_weights")])
def test_a_tuple_only_if_asked(rng, asked):
    query, key, value = qkv(rng)
    got = scaled_dot_product_attention(query, key, value, **dict.fromkeys(asked, True))
    out, lse, weights = scaled_dot_product_attention(query, key, value, return_lse=True, return_weights=True)
    if not asked:
        assert type(got) is np.ndarray
        return
    want = {"return_lse": lse, "return_weights": weights}
    assert type(got) is tuple
    assert len(got) == 1 + len(asked)
    for g, w in zip(got, [out, *(want[name] for name in asked)], strict=True):
        assert np.array_equal(g, w)


# ---------------------------------------------------------------- the layer


WEIGHTS = ("W_q", "W_k", "W_v", "W_o")
BIASES = ("b_q", "b_k", "b_v", "b_o")


def article(layer, queries, keys, values, valid_lens=None):
    """The layer as its formula says it, head by head, in float64."""
    depth = layer.num_hiddens // layer.num_heads
    group = layer.num_heads // layer.num_kv_heads
    Q, K, V = (
        np.asarray(x, np.float64) @ getattr(layer, "W_" + n) + getattr(layer, "b_" + n)
        for x, n in ((queries, "q"), (keys, "k"), (values, "v"))
    )
    heads = []
    for h in range(layer.num_heads):
        own = slice(h * depth, (h + 1) * depth)
        kv = slice(h // group * depth, (h // group + 1) * depth)
        heads.append(by_rows(Q[:, None, :, own], K[:, None, :, kv], V[:, None, :, kv], None, valid_lens)[0])
    return np.concatenate(heads, axis=-1)[:, 0] @ np.asarray(layer.W_o, np.float64) + layer.b_o


def tamed(layer, rng):
    """Weights of mean 0: those of the draw make every softmax a choice of one key."""
    for name in WEIGHTS + BIASES:
        old = getattr(layer, name)
        setattr(layer, name, (rng.standard_normal(old.shape) / np.sqrt(old.shape[0])).astype(old.dtype))
    return layer


def test_the_example_everybody_knows():
    np.random.seed(3)
    layer = MultiHeadAttention(100, 5, 0.5)
    queries, keys = np.random.rand(2, 4, 100), np.random.rand(2, 6, 100)
    out = layer.forward(queries, keys, keys, [3, 2])
    assert out.shape == (2, 4, 100)
    assert out.dtype == np.float64
    assert layer.attention_weights is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_weights_are_drawn_in_order(bias, kv_heads):
    np.random.seed(11)
    layer = MultiHeadAttention(12, 4, 0.1, bias, num_kv_heads=kv_heads)
    after = np.random.rand()
    np.random.seed(11)
    kv_width = 3 * (kv_heads or 4)
    shapes = {"W_q": (12, 12), "W_k": (12, kv_width), "W_v": (12, kv_width), "W_o": (12, 12)}
    for name, shape in shapes.items():
        assert np.array_equal(getattr(layer, name), np.random.rand(*shape)), name
    for name, size in zip(BIASES, (12, kv_width, kv_width, 12), strict=True):
        want = np.random.rand(size) if bias else np.zeros(size)
        assert np.array_equal(getattr(layer, name), want), name
    assert np.random.rand() == after
    assert (layer.num_hiddens, layer.num_heads, layer.num_kv_heads) == (12, 4, kv_heads or 4)
    assert (layer.d_k, layer.d_v, layer.dropout) == (3, 3, 0.1)


def test_an_int_and_its_generator_draw_the_same():
    layers = [
        MultiHeadAttention(8, 2, bias=True, rng=5),
        MultiHeadAttention(8, 2, bias=True, rng=np.random.default_rng(5)),
        MultiHeadAttention(8, 2, bias=True, rng=np.int64(5)),
    ]
    source = np.random.default_rng(5)
    for name in WEIGHTS + BIASES:
        want = source.random((8, 8) if name in WEIGHTS else (8,))
        for layer in layers:
            assert np.array_equal(getattr(layer, name), want)


def test_the_cast_comes_after_the_draw():
    double, single = (MultiHeadAttention(8, 2, bias=True, rng=5, dtype=d) for d in (None, np.float32))
    for name in WEIGHTS + BIASES:
        assert getattr(single, name).dtype == np.float32
        assert np.array_equal(getattr(single, name), getattr(double, name).astype(np.float32))


def test_without_bias_four_separate_arrays():
    layer = MultiHeadAttention(8, 2)
    layer.b_q += 1.0
    assert not (layer.b_k.any() or layer.b_v.any() or layer.b_o.any())


@pytest.mark.parametrize("valid_lens", [None, [3, 0, 9]])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_is_its_formula(rng, valid_lens, kv_heads, dtype):
    layer = tamed(MultiHeadAttention(12, 4, bias=True, num_kv_heads=kv_heads, dtype=dtype, rng=1), rng)
    queries, keys, values = draws(rng, (3, 5, 12), (3, 7, 12), (3, 7, 12), dtype=dtype)
    got = layer.forward(queries, keys, values, valid_lens)
    assert got.dtype == dtype
    assert_near(got, article(layer, queries, keys, values, valid_lens))
    assert np.array_equal(layer(queries, keys, values, valid_lens), got)


def test_a_query_that_sees_no_key_gives_the_output_bias(rng):
    layer = tamed(MultiHeadAttention(12, 4, bias=True, rng=1), rng)
    x = rng.standard_normal((2, 3, 12))
    x[0, 1:] = np.nan
    got = layer.forward(x[:, :1], x, x, [[1], [0]])
    assert np.isfinite(got).all()
    assert np.array_equal(got[1, 0], layer.b_o)


def test_masks_of_the_layer(rng):
    layer = tamed(MultiHeadAttention(12, 4, rng=1), rng)
    x = rng.standard_normal((2, 5, 12))
    want = layer.forward(x, x, x, is_causal=True)
    assert_near(layer.forward(x, x, x, attn_mask=np.tri(5, dtype=bool)), want)
    assert_near(layer.forward(x, x, x, np.tile(np.arange(1, 6), (2, 1))), want)
    assert_near(layer.forward(x[:, 3:], x, x, is_causal="lower_right"), want[:, 3:])


def test_need_weights_keeps_them(rng):
    layer = tamed(MultiHeadAttention(12, 4, num_kv_heads=2, rng=1), rng)
    x, y = draws(rng, (2, 3, 12), (2, 5, 12))
    want = layer.forward(x, y, y, [5, 2])
    assert layer.attention_weights is None
    assert np.array_equal(layer.forward(x, y, y, [5, 2], need_weights=True), want)
    assert layer.attention_weights.shape == (2, 4, 3, 5)
    assert_near(layer.attention_weights.sum(axis=-1), np.ones((2, 4, 3)))
    assert not layer.attention_weights[1, ..., 2:].any()


def test_edited_and_replaced_weights_are_honoured(rng):
    layer = tamed(MultiHeadAttention(12, 4, rng=1), rng)
    x, y, z = draws(rng, (2, 3, 12), (2, 5, 7), (2, 5, 9))
    layer.W_k, layer.W_v = rng.standard_normal((7, 12)), np.asfortranarray(rng.standard_normal((9, 12)))
    assert_near(layer(x, y, z), article(layer, x, y, z))
    layer.W_v[:] /= 2
    layer.b_v[3] = 1.0
    layer.b_o = np.arange(12)
    assert_near(layer(x, y, z), article(layer, x, y, z))


@pytest.mark.parametrize("changed", ["queries", "keys", "values", *WEIGHTS])
def test_one_float64_among_float32_makes_the_result_float64(rng, changed):
    layer = tamed(MultiHeadAttention(12, 4, bias=True, rng=1, dtype=np.float32), rng)
    inputs = dict(
        zip(("queries", "keys", "values"), draws(rng, (2, 3, 12), (2, 5, 12), (2, 5, 12), dtype="f4"), strict=True)
    )
    if changed in inputs:
        inputs[changed] = inputs[changed].astype(np.float64)
    else:
        setattr(layer, changed, getattr(layer, changed).astype(np.float64))
    got = layer(**inputs)
    assert got.dtype == np.float64
    assert_near(got, article(layer, **inputs))


def test_float64_biases_leave_float32(rng):
    layer = tamed(MultiHeadAttention(12, 4, rng=1, dtype=np.float32), rng)
    layer.b_o = rng.standard_normal(12)
    x = rng.standard_normal((2, 3, 12)).astype(np.float32)
    got = layer(x, x, x)
    assert got.dtype == np.float32
    assert_near(got, article(layer, x, x, x))


def test_out_of_the_layer(rng):
    layer = tamed(MultiHeadAttention(12, 4, rng=1), rng)
    x = rng.standard_normal((2, 3, 12))
    out = np.full((2, 12, 3), np.nan).swapaxes(1, 2)
    assert layer(x, x, x, out=out) is out
    assert np.array_equal(out, layer(x, x, x))


@pytest.mark.parametrize("batch, length", [(3, 5), (0, 5), (3, 0)])
def test_transposes_are_inverse(rng, batch, length):
    layer = MultiHeadAttention(12, 4)
    x = rng.standard_normal((batch, length, 12))
    split = layer.transpose_qkv(x)
    assert split.shape == (batch * 4, length, 3)
    for b, h in np.ndindex(batch, 4):
        assert np.array_equal(split[b * 4 + h], x[b, :, 3 * h : 3 * h + 3])
    assert np.array_equal(layer.transpose_output(split), x)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_steps_make_the_whole(rng, kv_heads):
    layer = tamed(MultiHeadAttention(12, 4, num_kv_heads=kv_heads, rng=1), rng)
    x, y = draws(rng, (2, 3, 12), (2, 5, 12))
    lengths = np.array([4, 2])
    Q, K, V = (
        layer.transpose_qkv(a @ getattr(layer, "W_" + n) + getattr(layer, "b_" + n))
        for a, n in ((x, "q"), (y, "k"), (y, "v"))
    )
    assert K.shape == (2 * kv_heads, 5, 3)
    heads = layer.scaled_dot_product_attention(Q, K, V, np.repeat(lengths, 4))
    assert heads.shape == (8, 3, 3)
    assert_near(layer.transpose_output(heads) @ layer.W_o + layer.b_o, layer(x, y, y, lengths))


def test_the_method_takes_lengths_of_each_query(rng):
    layer = MultiHeadAttention(12, 4)
    Q, K, V = draws(rng, (8, 3, 3), (8, 5, 3), (8, 5, 2))
    lengths = rng.integers(0, 6, (8, 3))
    got = layer.scaled_dot_product_attention(Q, K, V, lengths)
    want = scaled_dot_product_attention(Q[:, None], K[:, None], V[:, None], valid_lens=lengths)
    assert np.array_equal(got, want[:, 0])


@pytest.mark.parametrize("sizes", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_empty_calls_of_the_layer(sizes):
    batch, queries, keys = sizes
    layer = MultiHeadAttention(8, 2, bias=True)
    x, y = np.ones((batch, queries, 8)), np.ones((batch, keys, 8))
    got = layer(x, y, y)
    assert got.shape == (batch, queries, 8)
    if keys == 0:
        assert np.array_equal(got, np.broadcast_to(layer.b_o, got.shape))


def test_astype_makes_a_new_layer(rng):
    layer = tamed(MultiHeadAttention(8, 2, 0.3, True, num_kv_heads=1, rng=1), rng)
    x = rng.standard_normal((2, 3, 8))
    layer(x, x, x, need_weights=True)
    single = layer.astype(np.float32)
    assert type(single) is type(layer)
    assert (single.num_heads, single.num_kv_heads, single.dropout) == (2, 1, 0.3)
    assert single.attention_weights is None
    for name in WEIGHTS + BIASES:
        assert getattr(single, name).dtype == np.float32
        assert getattr(layer, name).dtype == np.float64
        assert not np.shares_memory(getattr(layer.astype(np.float64), name), getattr(layer, name))
    assert single(*[x.astype(np.float32)] * 3).dtype == np.float32


def test_inputs_of_the_layer_are_not_changed(rng):
    layer = tamed(MultiHeadAttention(8, 2, bias=True, rng=1), rng)
    arrays = [rng.standard_normal((2, 3, 8)), *(getattr(layer, name) for name in WEIGHTS + BIASES)]
    before = [array.copy() for array in arrays]
    layer(arrays[0], arrays[0], arrays[0], [1, 2], need_weights=True)
    assert all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True))


# ---------------------------------------------------------------- the feed-forward network


def test_the_network_draws_in_order():
    np.random.seed(7)
    ffn = PositionWiseFFN(4, 6)
    np.random.seed(7)
    for name, shape in (("W_1", (4, 6)), ("W_2", (6, 4)), ("b_1", (6,)), ("b_2", (4,))):
        assert np.array_equal(getattr(ffn, name), np.random.rand(*shape)), name
    source = np.random.default_rng(2)
    assert np.array_equal(PositionWiseFFN(4, 6, rng=2).W_1, source.random((4, 6)))
    assert PositionWiseFFN(4, 6, dtype="float32").b_2.dtype == np.float32


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (0, 4), (2, 0, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_network_is_its_formula(rng, shape, dtype):
    ffn = PositionWiseFFN(4, 6, dtype=dtype, rng=1)
    for name in ("W_1", "W_2", "b_1", "b_2"):
        setattr(ffn, name, rng.standard_normal(getattr(ffn, name).shape).astype(dtype))
    x = rng.standard_normal(shape).astype(dtype)
    got = ffn(x)
    hidden = np.maximum(0, x.astype("f8") @ ffn.W_1 + ffn.b_1)
    assert got.dtype == dtype
    assert_near(got, hidden @ ffn.W_2.astype("f8") + ffn.b_2)


def test_the_network_keeps_nan_in_its_position(rng):
    ffn = PositionWiseFFN(4, 6)
    x = rng.standard_normal((2, 3, 4))
    x[1, 2, 0] = np.nan
    got = ffn(x)
    assert np.argwhere(np.isnan(got).any(axis=-1)).tolist() == [[1, 2]]


def test_the_module_says_what_it_offers():
    assert reference.__all__ == [
        "KVCache",
        "MultiHeadAttention",
        "PositionWiseFFN",
        "alibi_slopes",
        "apply_rotary",
        "attention_with_kvcache",
        "merge_states",
        "scaled_dot_product_attention",
        "varlen_attention",
    ]


@pytest.mark.parametrize("name", ["fast", "reference"])
def test_a_feed_forward_network_of_no_width(name):
    import mha_fast

    ffn = (mha_fast if name == "fast" else mha_fast.reference).PositionWiseFFN(8, 32, rng=0)
    ffn.W_1 = np.ones((0, 32))
    assert ffn(np.ones((3, 0))).shape == (3, 8)
    ffn.W_1, ffn.b_1, ffn.W_2 = np.ones((8, 0)), np.ones(0), np.ones((0, 8))
    assert np.array_equal(ffn(np.ones((3, 8))), np.broadcast_to(ffn.b_2, (3, 8)))
