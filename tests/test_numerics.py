"""Numbers at their limits: the exponential, large scores, finite masks, NaN and infinity, subnormals, accuracy.

`FEW` and `MANY` queries take the two kernels; one or two key blocks and splits are crossed wherever it may matter.
"""

import math

import numpy as np
import pytest
from conftest import DTYPES, UNIT, assert_close, check, draw, exact, largest, qkv

import mha_fast
from mha_fast import _config, _core, reference

FEW, MANY = 3, 21
KERNELS = pytest.mark.parametrize("queries", [FEW, MANY])
DTYPE = pytest.mark.parametrize("dtype", DTYPES)


# ---------------------------------------------------------------- the exponential

# The polynomials' relative errors are 8.3e-8 (0.7 eps) and 3.3e-18, Horner's scheme adds at most one eps; just below a
# power of two an eps is two ulp.
EXP2_ULP = {"float32": 4.0, "float64": 2.0}
# Levels whose results below the smallest normal number are rounded there; the others give 0.
GRADUAL = {"avx512", "avx512_bf16"}


def exp2(x, isa):
    return _core.exp2(np.ascontiguousarray(x), _config._LEVELS[isa][0])


@DTYPE
def test_exp2_in_ulp_over_its_whole_range(isa, rng, dtype):
    """Every binade of x from the smallest subnormal on, and every integer with its neighbours."""
    limits = np.finfo(dtype)
    exponents = np.arange(limits.minexp - limits.nmant, 11)
    binades = -np.ldexp(1 + rng.random((len(exponents), 1500)), exponents[:, None])
    whole = np.arange(limits.minexp, 1.0)
    x = np.concatenate([binades.ravel(), whole, rng.uniform(limits.minexp, 0, 100_000)]).astype(dtype)
    x = np.concatenate([x, np.nextafter(x, x.dtype.type(0))])
    x = x[(x >= limits.minexp) & (x <= 0)]
    want = np.exp2(x.astype(np.longdouble))
    error = np.abs(exp2(x, isa) - want) / np.spacing(want.astype(dtype)).astype(np.longdouble)
    assert error.max() <= EXP2_ULP[dtype], f"{isa} {dtype}: {error.max()} ulp at {x[error.argmax()]!r}"


@DTYPE
def test_exp2_of_integers_is_exact(isa, dtype):
    """The largest score of a row weighs exactly 1."""
    x = np.arange(np.finfo(dtype).minexp, 1).astype(dtype)
    assert np.array_equal(exp2(x, isa), np.ldexp(np.ones_like(x), x.astype(int)))
    assert exp2(np.array([-0.0], dtype), isa) == 1


@DTYPE
def test_exp2_of_special_values(isa, dtype):
    limits = np.finfo(dtype)
    x = np.array([-np.inf, limits.min, -(2.0**31), -(2.0**32), -(2.0**63), -1e5, np.nan, -np.inf], dtype)
    got = exp2(x, isa)
    assert np.isnan(got[6])
    assert not got[[0, 1, 2, 3, 4, 5, 7]].any()


@DTYPE
def test_exp2_below_the_smallest_normal_number(isa, rng, dtype):
    limits = np.finfo(dtype)
    x = rng.uniform(limits.minexp - limits.nmant - 20, limits.minexp, 20_000).astype(dtype)
    x = x[x < limits.minexp]
    got, want = exp2(x, isa), np.exp2(x.astype(np.longdouble))
    if isa in GRADUAL:
        assert np.abs(got - want).max() <= 2 * limits.smallest_subnormal.astype(np.longdouble)
    else:
        assert not got.any()


@DTYPE
def test_exp2_is_the_same_in_every_lane(isa, rng, dtype):
    x = -20 * rng.random(70).astype(dtype)
    want = exp2(x, isa)
    for first in range(20):
        for count in (1, 2, 3, 7, 8, 9, 15, 16, 17, 33):
            assert np.array_equal(exp2(x[first : first + count], isa), want[first : first + count])


def tanh(x, isa):
    return _core.tanh(np.ascontiguousarray(x), _config._LEVELS[isa][0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tanh_in_ulp_over_its_whole_range(isa, rng, dtype):
    """Relative near 0 too, where a formula of exponentials alone would lose all digits."""
    exponents = rng.uniform(-30, np.log10(30), 4000)
    near = rng.uniform(0.6, 0.65, 2000)  # where polynomial and exponential meet
    x = np.concatenate([10.0**exponents, near, rng.uniform(0, 4, 4000)]).astype(dtype)
    want = np.tanh(x.astype(np.longdouble))
    for sign in (1, -1):
        error = np.abs(tanh(sign * x, isa) - sign * want) / np.spacing(want.astype(dtype)).astype(np.longdouble)
        assert error.max() <= 2.5
    if np.finfo(np.longdouble).eps < np.finfo(dtype).eps:
        assert error.mean() <= 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_tanh_of_special_values(isa, dtype):
    limits = np.finfo(dtype)
    x = np.array([np.inf, -np.inf, limits.max, limits.min, 30, -30, 0], dtype)
    assert tanh(x, isa).tolist() == [1, -1, 1, -1, 1, -1, 0]
    assert np.isnan(tanh(np.array([np.nan], dtype), isa)).all()
    tiny = np.array([limits.tiny, -limits.tiny, 4 * limits.tiny], dtype)
    assert np.array_equal(tanh(tiny, isa), tiny)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tanh_is_the_same_in_every_lane(isa, rng, dtype):
    x = rng.uniform(-3, 3, 67).astype(dtype)
    want = tanh(x, isa)
    for first in range(16):
        for count in (1, 7, 17):
            assert np.array_equal(tanh(x[first : first + count], isa), want[first : first + count])


# ---------------------------------------------------------------- large scores


@DTYPE
@KERNELS
@pytest.mark.parametrize("power", [10, 20, 60, 125])
def test_of_large_scores_the_largest_takes_all(isa, attend, rng, dtype, queries, power):
    """Scores are whole multiples of 2^power, exact in both dtypes; equal ones share."""
    steps = rng.integers(-3, 4, (1, 1, 600, 1)).astype(dtype)
    query = np.full((1, 1, queries, 1), 2.0 ** (power // 2), dtype)
    value = draw(rng, 1, 1, 600, 5, dtype=dtype)
    for sign in (1, -1):
        key = steps * dtype_power(dtype, power - power // 2)
        out, lse = attend(query, key, value, scale=float(sign), return_lse=True)
        best = (sign * steps).max()
        chosen = (sign * steps[0, 0, :, 0]) == best
        mean = value[0, 0, chosen].astype(np.float64).mean(axis=0)
        assert_close(out, np.broadcast_to(mean, out.shape), 64 * UNIT[dtype] * largest(value))
        assert_close(lse, np.full(lse.shape, best * 2.0**power + math.log(chosen.sum())), 4 * UNIT[dtype] * 2.0**power)


def dtype_power(dtype, power):
    return np.dtype(dtype).type(2.0**power)


@DTYPE
@KERNELS
@pytest.mark.parametrize("score", [88.7, 100.0, 1000.0, 1e4])
def test_scores_beyond_the_range_of_the_exponential(isa, rng, dtype, queries, score):
    query, key, value = qkv(rng, 1, 2, queries, 300, 16, dtype=dtype)
    check(query * query.dtype.type(score / 16), key, value)


@DTYPE
@KERNELS
def test_the_maximum_may_grow_or_fall_along_the_keys(isa, rng, dtype, queries):
    """What was summed so far is rescaled at each block, or what comes adds nothing."""
    query, key, value = qkv(rng, 1, 1, queries, 1300, 4, dtype=dtype)
    for ramp in (np.arange(1300), -np.arange(1300), 50 * np.sin(np.arange(1300) / 90)):
        check(query, key, value, ramp.astype(dtype))


# ---------------------------------------------------------------- finite masks are biases

LIMITS = {name: np.finfo(name) for name in DTYPES}
BIASES = {
    "float32 min": ("float32", LIMITS["float32"].min),
    "float32 max": ("float32", LIMITS["float32"].max),
    "float64 min": ("float64", LIMITS["float64"].min),
    "float64 max": ("float64", LIMITS["float64"].max),
    "float16 min": ("float16", np.finfo("float16").min),
    "-1e9": ("float32", -1e9),
    "-1e300": ("float64", -1e300),
}


@DTYPE
@KERNELS
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("size", [1.0, 1e15])
def test_a_row_of_one_large_finite_bias_is_the_mean(isa, attend, rng, dtype, queries, bias, size):
    """It swallows the scores, be they 1e30 (float32) and of its own sign; it hides nothing."""
    mask_dtype, number = BIASES[bias]
    if size > 1 and (abs(float(number)) < 1e38 or (dtype == "float64" and mask_dtype == "float32")):
        size = 1.0
    query, key, value = qkv(rng, 1, 2, queries, 300, 8, dtype=dtype)
    if abs(float(number)) < 1e38:
        query *= 0  # a smaller bias does not swallow the scores
    mask = np.zeros((queries, 300), mask_dtype)
    mask[1] = number
    out, lse = attend(query * query.dtype.type(size), key * key.dtype.type(size), value, mask, return_lse=True)
    want = value.astype(np.float64).mean(axis=2)
    assert_close(out[:, :, 1], want, 300 * UNIT[dtype])
    assert np.isfinite(lse).all()


@DTYPE
@KERNELS
def test_a_sum_of_score_and_bias_below_the_range_hides_nothing(isa, attend, rng, dtype, queries):
    """Scores of minus a quarter of the largest number and the lowest bias: the sum must not be -inf."""
    limits = LIMITS[dtype]
    query, key, value = qkv(rng, 1, 1, queries, 270, 1, dtype=dtype)
    query[...] = math.sqrt(float(limits.max)) / 2
    key[...] = -math.sqrt(float(limits.max)) / 2
    seen = np.arange(270) % 3 != 1
    mask = np.where(seen, limits.min, -np.inf).astype(dtype)
    for shape in ((270,), (queries, 270)):
        out, lse, weights = attend(
            query, key, value, np.broadcast_to(mask, shape).copy(), scale=1.0, return_lse=True, return_weights=True
        )
        want = np.broadcast_to(value[:, :, seen].astype(np.float64).mean(axis=2, keepdims=True), out.shape)
        assert_close(out, want, 300 * UNIT[dtype])
        assert_close(weights, np.broadcast_to(seen / seen.sum(), weights.shape), 4 * UNIT[dtype], "weights")
        assert np.isfinite(lse).all()


@KERNELS
def test_only_infinity_hides_in_a_wider_mask(isa, attend, rng, queries):
    """-1e300 and finfo(float32).min are one bias in float32; -inf between them is a hidden key."""
    query, key, value = qkv(rng, 1, 1, queries, 7, 8, dtype="float32")
    mask = np.array([-1e300, -np.inf, LIMITS["float32"].min, -1e39, -np.inf, -np.inf, LIMITS["float64"].min])
    out, lse = attend(query, key, value, mask, return_lse=True)
    want = value[:, :, [0, 2, 3, 6]].astype(np.float64).mean(axis=2, keepdims=True)
    assert_close(out, np.broadcast_to(want, out.shape), 16 * UNIT["float32"])
    assert np.isfinite(lse).all()


@DTYPE
@KERNELS
@pytest.mark.parametrize("filler", [-1e4, -1e9, "min"])
def test_a_finite_filler_beside_others_weighs_nothing(isa, rng, dtype, queries, filler):
    filler = LIMITS[dtype].min if filler == "min" else filler
    query, key, value = qkv(rng, 1, 2, queries, 40, 8, dtype=dtype)
    keep = rng.random((queries, 40)) < 0.5
    keep[:, 0] = True
    want = exact(query, key, value, keep)[0]
    got = _core.scaled_dot_product_attention(query, key, value, np.where(keep, 0, filler).astype(dtype))
    assert_close(got, want, 400 * UNIT[dtype] * largest(value))


# ---------------------------------------------------------------- rows that see nothing


@DTYPE
@KERNELS
@pytest.mark.parametrize("fill", [0.5, np.nan, np.inf])
@pytest.mark.parametrize("kind", ["bool", "float", "lengths", "offset"])
def test_a_row_that_sees_nothing_is_zero_whatever_lies_there(isa, attend, rng, dtype, queries, fill, kind):
    query, key, value = (np.full(x.shape, fill, dtype) for x in qkv(rng, 2, 4, queries, 300, 5, 2))
    seen = np.zeros((queries, 300), bool)
    options = {
        "bool": {"attn_mask": seen},
        "float": {"attn_mask": np.where(seen, 0, -np.inf).astype(dtype)},
        "lengths": {"valid_lens": [0, -1]},
        "offset": {"is_causal": True, "q_offset": -queries},
    }[kind]
    out = np.full((2, 4, queries, 5), np.nan, dtype)
    got, lse, weights = attend(
        query, key, value, **options, enable_gqa=True, out=out, return_lse=True, return_weights=True
    )
    assert got is out and not out.any() and not weights.any() and np.isneginf(lse).all()


# ---------------------------------------------------------------- what is hidden never leaks

# 1100 keys: more than one split; the hidden ones reach over the border of the first.
SEEN, KEYS = 1000, 1100


def hidings(queries, dtype):
    seen = np.arange(KEYS) < SEEN
    scattered = np.arange(KEYS) % 3 != 1
    infinite = np.where(scattered, 0.25, -np.inf).astype(dtype)
    return {
        "lengths": ({"valid_lens": [SEEN]}, seen),
        "causal": ({"is_causal": True, "q_offset": SEEN - queries}, seen),
        "bool mask": ({"attn_mask": scattered}, scattered),
        "bool mask of rows": ({"attn_mask": np.repeat(scattered[None], queries, 0)}, scattered),
        "float mask": ({"attn_mask": np.repeat(infinite[None], queries, 0)}, scattered),
        "float mask of the other dtype": (
            {"attn_mask": infinite.astype("float64" if dtype == "float32" else "float32")},
            scattered,
        ),
    }


def in_memory(x, way):
    if way == "blhd":
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    if way == "spaced":
        memory = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)
        memory[..., ::2] = x
        return memory[..., ::2]
    return x


@DTYPE
@KERNELS
@pytest.mark.parametrize("hiding", hidings(FEW, "float32"))
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("way", ["plain", "blhd", "spaced"])
def test_poison_in_hidden_keys_and_values_changes_no_bit(isa, attend, rng, dtype, queries, hiding, poison, way):
    query, key, value = qkv(rng, 1, 4, queries, KEYS, 6, 2, 5, dtype)
    options, seen = hidings(queries, dtype)[hiding]
    options |= {"enable_gqa": True, "return_lse": True, "return_weights": True}
    want = attend(query, key, value, **options)
    key[:, :, ~seen] = poison
    value[:, :, ~seen] = poison
    for keys, values in ((key, value), (np.nan_to_num(key, posinf=0, neginf=0), value)):
        got = attend(query, in_memory(keys, way), in_memory(values, way), **options)
        for name, g, w in zip(("out", "lse", "weights"), got, want, strict=True):
            assert np.array_equal(g, w), f"{name}, {isa}"


@DTYPE
@pytest.mark.parametrize("queries", [1, MANY])
def test_poison_behind_the_lengths_of_far_rows_changes_no_bit(isa, attend, rng, dtype, queries):
    """Rows 2 KiB apart and many keys: blocks are copied before they are used."""
    keys = 4 * 1024 + 100
    memory = np.full((keys, 2, 2048 // np.dtype(dtype).itemsize), np.nan, dtype)
    key, value = memory[None, None, :, 0, :16], memory[None, None, :, 1, :16]
    key[:, :, : keys - 5], value[:, :, : keys - 5] = draw(rng, 2, 1, 1, keys - 5, 16, dtype=dtype)
    query = draw(rng, 1, 1, queries, 16, dtype=dtype)
    got = attend(query, key, value, valid_lens=[keys - 5])
    want = attend(query, key[:, :, : keys - 5].copy(), value[:, :, : keys - 5].copy())
    assert np.array_equal(got, want)


@DTYPE
@KERNELS
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_in_the_future_reaches_only_later_rows(isa, attend, rng, dtype, queries, poison):
    """Rows share tiles with the poisoned ones and keep their bits all the same."""
    keys = 280
    position = keys - queries - 3 + queries // 2  # the key of the middle row
    query, key, value = qkv(rng, 2, 2, queries, keys, 6, 1, 9, dtype)
    options = {"is_causal": True, "q_offset": keys - queries - 3, "enable_gqa": True, "return_lse": True}
    want, want_lse = attend(query, key, value, **options)
    late = np.arange(queries) >= queries // 2
    value[0, 0, position, 4] = poison
    got, lse = attend(query, key, value, **options)
    assert np.array_equal(lse, want_lse)
    want[0, :, late, 4] = poison
    assert np.array_equal(got, want, equal_nan=True)
    key[0, 0, position] = np.nan
    got, lse = attend(query, key, value, **options)
    want[0, :, late] = np.nan
    want_lse[0, :, late] = np.nan
    assert np.array_equal(got, want, equal_nan=True)
    assert np.array_equal(lse, want_lse, equal_nan=True)


@DTYPE
@KERNELS
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masks_are_not_read_where_lengths_and_positions_hide(isa, attend, rng, dtype, queries, poison):
    query, key, value = qkv(rng, 1, 2, queries, 300, 6, dtype=dtype)
    mask = draw(rng, queries, 300, dtype=dtype)
    for options, hidden in (
        ({"valid_lens": [261]}, np.arange(300) >= 261),
        ({"is_causal": "lower_right"}, np.arange(300) > np.arange(queries)[:, None] + 300 - queries),
    ):
        want = attend(query, key, value, mask, **options)
        assert np.array_equal(attend(query, key, value, np.where(hidden, poison, mask).astype(dtype), **options), want)


# ---------------------------------------------------------------- what is seen spoils its own


@DTYPE
@KERNELS
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("width", [3, 16, 33])
def test_a_value_reaches_only_its_column(isa, attend, rng, dtype, queries, poison, width):
    query, key, value = qkv(rng, 2, 2, queries, 600, 6, 1, width, dtype)
    want = attend(query, key, value, enable_gqa=True)
    value[1, 0, 511, width - 1] = poison
    want[1, :, :, width - 1] = poison
    assert np.array_equal(attend(query, key, value, enable_gqa=True), want, equal_nan=True)


@DTYPE
@KERNELS
def test_infinities_of_both_signs_are_nan(isa, attend, rng, dtype, queries):
    query, key, value = qkv(rng, 1, 1, queries, 1100, 6, value_width=5, dtype=dtype)
    want = attend(query, key, value)
    value[0, 0, 3, 1], value[0, 0, 1090, 1] = np.inf, -np.inf
    want[..., 1] = np.nan
    assert np.array_equal(attend(query, key, value), want, equal_nan=True)


@DTYPE
@KERNELS
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_seen_value_spoils_even_with_a_weight_of_zero(isa, attend, rng, dtype, queries, poison):
    """Whether a key is seen is a matter of masks, never of the size of its weight."""
    query, key, value = qkv(rng, 1, 1, queries, 300, 6, dtype=dtype)
    mask = np.zeros(300, dtype)
    mask[270] = -1e6
    want = attend(query, key, value, mask)
    value[0, 0, 270, 2] = poison
    want[..., 2] = np.nan
    assert np.array_equal(attend(query, key, value, mask), want, equal_nan=True)


@DTYPE
@KERNELS
@pytest.mark.parametrize("keys", [*range(1, 20), 31, 33, 255, 256, 257, 1025])
def test_nan_in_a_query_spoils_its_row_alone(isa, attend, rng, dtype, queries, keys):
    """At every number of keys: a NaN is no empty row."""
    query, key, value = qkv(rng, 1, 2, queries, keys, 6, 1, dtype=dtype)
    options = {"enable_gqa": True, "return_lse": True, "return_weights": True}
    want = attend(query, key, value, **options)
    query[0, 1, 2, 3] = np.nan
    for g, w in zip(attend(query, key, value, **options), want, strict=True):
        w[0, 1, 2] = np.nan
        assert np.array_equal(g, w, equal_nan=True)


@DTYPE
@KERNELS
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_mask_spoils_its_own_rows(isa, attend, rng, dtype, queries, poison):
    """NaN, and +inf, which minus itself is NaN."""
    query, key, value = qkv(rng, 1, 2, queries, 300, 6, dtype=dtype)
    mask = draw(rng, queries, 300, dtype=dtype)
    want = attend(query, key, value, mask)
    mask[1, 280] = poison
    want[:, :, 1] = np.nan
    assert np.array_equal(attend(query, key, value, mask), want, equal_nan=True)


@DTYPE
@KERNELS
@pytest.mark.parametrize("keys", [1, 5, 40, 300])
@pytest.mark.parametrize("part", range(3))
def test_infinite_queries_and_keys_are_as_in_the_reference(isa, attend, rng, dtype, queries, keys, part):
    """Scores of -inf weigh nothing, of +inf and of -inf alone are NaN, as in the plain formula."""
    options = {"return_lse": True, "return_weights": True}
    for _ in range(6):
        query, key, value = qkv(rng, 1, 2, queries, keys, 2, dtype=dtype)
        for array, rate in ((query, 0.1), (key, [0.02, 0.3, 1.0][part])):
            hit = rng.random(array.shape) < rate
            array[hit] = rng.choice([np.inf, -np.inf], hit.sum())
        options["attn_mask"] = None if rng.random() < 0.5 else rng.random((queries, keys)) < 0.8
        got = attend(query, key, value, **options)
        want = reference.scaled_dot_product_attention(query, key, value, **options)
        for name, g, w in zip(("out", "lse", "weights"), got, want, strict=True):
            assert_close(g, w, 1e3 * UNIT[dtype], name)


@DTYPE
@KERNELS
def test_scores_that_overflow_are_as_in_the_reference(isa, attend, rng, dtype, queries):
    """The product of finite queries and keys may be infinite."""
    query, key, value = qkv(rng, 1, 2, queries, 40, 3, dtype=dtype)
    query[0, 0, 1] *= np.sqrt(LIMITS[dtype].max)
    key[0, 0, ::7] *= np.sqrt(LIMITS[dtype].max) * 8
    options = {"scale": 1.0, "return_lse": True}
    want = reference.scaled_dot_product_attention(query[:, :1, 1:2], key[:, :1], value[:, :1], **options)
    got = attend(query, key, value, **options)
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(np.isnan(g[0, 0, 1]), np.isnan(w[0, 0, 0]))


# ---------------------------------------------------------------- small numbers


@DTYPE
@KERNELS
def test_subnormal_values_are_kept(isa, attend, rng, dtype, queries):
    tiny = LIMITS[dtype].smallest_subnormal
    query, key, value = qkv(rng, 1, 1, queries, 256, 6, value_width=5, dtype=dtype)
    value[...] = tiny * 12345
    assert (attend(query * 0, key, value) == tiny * 12345).all()
    value[...] = LIMITS[dtype].smallest_normal * (1 + rng.random(value.shape))
    assert_close(attend(query, key, value) / LIMITS[dtype].smallest_normal, ones_scaled(query, key, value), 1e-4)


def ones_scaled(query, key, value):
    """The exact result in units of the smallest normal number, which are not subnormal in float64."""
    return exact(query, key, value.astype(np.longdouble) / np.longdouble(LIMITS[value.dtype.name].smallest_normal))[0]


@DTYPE
@KERNELS
def test_subnormal_queries_and_keys_give_the_mean(isa, attend, rng, dtype, queries):
    query, key, value = qkv(rng, 1, 1, queries, 256, 6, dtype=dtype)
    query, key = (x * LIMITS[dtype].smallest_normal / 8 for x in (query, key))
    want = np.broadcast_to(value.astype(np.float64).mean(axis=2, keepdims=True), value[:, :, :queries].shape)
    assert_close(attend(query, key, value), want, 256 * UNIT[dtype])
    # a large scale brings the scores back: the product is not lost in between
    power = {"float32": 2.0**120, "float64": 2.0**1000}[dtype]
    small = draw(rng, 1, 1, queries, 6, dtype=dtype)
    check(small / query.dtype.type(power), draw(rng, 1, 1, 256, 6, dtype=dtype), value, scale=power / 2)


# ---------------------------------------------------------------- accuracy


def longdouble_formula(query, key, value):
    query, key, value = (x.astype(np.longdouble) for x in (query, key, value))
    return formula(query, key, value)


def formula(query, key, value):
    """The plain four lines, in the dtype of the inputs."""
    scores = query @ key.swapaxes(-1, -2) * query.dtype.type(1 / math.sqrt(query.shape[-1]))
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores)
    return (weights / weights.sum(axis=-1, keepdims=True)) @ value


ACCURACY = {
    "unit normal": lambda rng, q, k, v: (q, k, v),
    "sharp": lambda rng, q, k, v: (4 * q, k, v),
    "values of one sign": lambda rng, q, k, v: (q, k, abs(v) + 1),
    "uniform weights": lambda rng, q, k, v: (q / 100, k, v + 1),
}


def error_ratio(attend, arrays):
    """Root mean square error over the plain formula's in the same dtype; steadier than the ratio of the largest."""
    want = longdouble_formula(*arrays) if arrays[0].dtype == np.float64 else exact(*arrays)[0]
    error, plain = (((got - want) ** 2).mean() ** 0.5 for got in (attend(*arrays), formula(*arrays)))
    return float(error / plain)


# (heads, queries, keys) and how often the plain formula's error a level may have there. From 4096 keys on the blocks'
# sums from 0 pay; below, the formula's pairwise sum has the advantage of a sum along one accumulator a block.
ACCURACY_SIZES = {(64, 1, 300): 3.0, (16, 8, 300): 3.0, (4, 64, 300): 3.0}
ACCURACY_SIZES |= {(32, 1, 4096): 2.0, (2, 8, 4096): 2.0, (2, 24, 4096): 2.0, (16, 1, 9000): 2.0}


@DTYPE
@pytest.mark.parametrize("case", ACCURACY)
@pytest.mark.parametrize("sizes", ACCURACY_SIZES, ids=str)
def test_about_as_exact_as_the_plain_formula(isa, attend, rng, dtype, case, sizes):
    arrays = [x.astype(dtype) for x in ACCURACY[case](rng, *qkv(rng, 1, *sizes, 16))]
    assert error_ratio(attend, arrays) <= ACCURACY_SIZES[sizes]


@DTYPE
def test_over_many_keys_not_worse_than_the_plain_formula(isa, attend, rng, dtype):
    """In geometric mean over the inputs above."""
    ratios = []
    for case in ACCURACY.values():
        for sizes in ((16, 1, 4096), (2, 8, 4096), (2, 24, 4096), (8, 1, 9000)):
            ratios.append(error_ratio(attend, [x.astype(dtype) for x in case(rng, *qkv(rng, 1, *sizes, 16))]))
    assert np.exp(np.log(ratios).mean()) <= 1.0, f"{isa} {dtype}: {np.round(ratios, 2)}"


@KERNELS
def test_float64_is_float64_throughout(isa, attend, rng, queries):
    """No step in single precision: 29 bits more than that would leave."""
    arrays = qkv(rng, 1, 2, queries, 300, 64)
    mask = draw(rng, queries, 300)
    want = longdouble_formula(*arrays)
    assert np.abs(attend(*arrays) - want).max() < 1e-14
    assert_close(attend(*arrays, mask), exact(*arrays, mask)[0], 1e-14)


@DTYPE
@KERNELS
def test_equal_keys_weigh_exactly_alike(isa, attend, dtype, queries):
    """4096 equal keys over values of 1 give 1: sums do not stall."""
    query, key = np.ones((1, 1, queries, 3), dtype), np.ones((1, 1, 4096, 3), dtype)
    out, lse, weights = attend(query, key, np.ones((1, 1, 4096, 2), dtype), return_lse=True, return_weights=True)
    assert (out == 1).all()
    assert (weights == 1 / 4096).all()
    assert_close(lse, np.full(lse.shape, math.sqrt(3) + math.log(4096)), 16 * UNIT[dtype])


@DTYPE
def test_one_row_is_as_exact_in_every_kernel(isa, rng, dtype):
    """The two kernels differ in bits and in nothing else."""
    query, key, value = qkv(rng, 1, 1, MANY, 700, 40, dtype=dtype)
    many = check(query, key, value)
    few = check(query[:, :, :FEW], key, value)
    assert_close(few, many[:, :, :FEW], 64 * UNIT[dtype] * largest(value))


@KERNELS
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_a_row_of_scores_of_minus_infinity_is_not_empty(isa, rng, queries, mask):
    """0/0 with every kind of mask: the row sees keys, whatever their scores."""
    query, key, value = qkv(rng, 1, 1, queries, 70, 4)
    query[0, 0, 0], key[...] = -np.inf, np.abs(key) + 1
    kind = {None: None, "bool": np.ones((queries, 70), bool), "float": np.zeros((queries, 70), np.float32)}[mask]
    out, lse = mha_fast.scaled_dot_product_attention(query, key, value, kind, return_lse=True)
    assert np.isnan(out[0, 0, 0]).all() and np.isnan(lse[0, 0, 0])
    assert np.isfinite(out[0, 0, 1:]).all()
