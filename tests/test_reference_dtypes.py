"""float16 and bfloat16 as storage: computed in float32, rounded once; what mixtures become; where memory is copied."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from conftest import allowed, assert_close, draw, exact, largest, largest_score, pair_rounding, qkv, rounding
from formula import formula

from mha_fast import _validate, reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = [np.dtype("float16"), BFLOAT16]
ALL = {"return_lse": True, "return_weights": True}
half = pytest.mark.parametrize("dtype", HALVES, ids=str)


@pytest.fixture(autouse=True)
def no_floating_point_warnings():
    """A NumPy user may have asked for exceptions; none of the caller's numbers may raise one."""
    with np.errstate(all="raise"):
        yield


def single(arrays):
    return [array.astype("float32") for array in arrays]


def narrow(array, dtype):
    with np.errstate(under="ignore"):
        return array.astype(dtype)


def assert_near(got, want, arrays, compute="float32"):
    """out, lse and weights of a call against exact ones; out has one more rounding where it is stored narrower."""
    query, key, value = arrays
    bound = allowed(compute, query.shape[-1], largest_score(query, key))
    assert_close(got[0], want[0], bound * largest(value.astype("f8")) + rounding(got[0].dtype.name, largest(want[0])))
    assert_close(got[1], want[1], bound, "lse")
    assert_close(got[2], want[2], bound, "weights")


# ---------------------------------------------------------------- which dtype


@pytest.mark.parametrize(
    "dtypes, result, compute",
    [
        (("float16", "float16", "float16"), "float16", "float32"),
        ((BFLOAT16, BFLOAT16, BFLOAT16), BFLOAT16, "float32"),
        (("float16", BFLOAT16, "float16"), "float32", "float32"),
        ((BFLOAT16, BFLOAT16, "float16"), "float32", "float32"),
        (("float16", "float32", "float16"), "float32", "float32"),
        (("float32", BFLOAT16, BFLOAT16), "float32", "float32"),
        (("float16", BFLOAT16, "float32"), "float32", "float32"),
        (("float16", "float16", "float64"), "float64", "float64"),
        ((BFLOAT16, "float64", BFLOAT16), "float64", "float64"),
        (("float16", "float64", BFLOAT16), "float64", "float64"),
        (("int8", "float16", "float16"), "float64", "float64"),
        (("float16", "float16", "bool"), "float64", "float64"),
        ((">f2", "<f2", ">f2"), "float16", "float32"),
        ((BFLOAT16.newbyteorder(), BFLOAT16, BFLOAT16), BFLOAT16, "float32"),
    ],
)
def test_the_dtype_of_the_result(attention, rng, dtypes, result, compute):
    arrays = [np.round(np.abs(a) * 3).astype(d) for a, d in zip(qkv(rng), dtypes, strict=True)]
    got = attention(*arrays, **ALL)
    assert [x.dtype for x in got] == [result, compute, compute]
    assert got[0].dtype.isnative
    plain = [a.astype("f8") for a in arrays]
    assert_near(got, exact(*plain), plain, compute)


def test_ml_dtypes_is_not_imported():
    """float16 needs nothing but NumPy."""
    code = (
        "import sys, numpy, mha_fast.reference\n"
        "ones = numpy.ones((1, 2, 2), 'float16')\n"
        "assert mha_fast.reference.scaled_dot_product_attention(ones, ones, ones).dtype == 'float16'\n"
        "assert 'ml_dtypes' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- which numbers

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": "lower_right"},
    "lengths": {"valid_lens": [0, 17]},
    "window": {"window_size": (5, 3)},
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": [0.5, 0.25]},
    "sinks": {"sinks": [0.5, -1.0]},
    "scale": {"scale": -0.3},
}


@half
@pytest.mark.parametrize("case", OPTIONS)
def test_half_precision_is_storage_alone(attention, rng, dtype, case):
    """The same numbers in float32 give the same but for one rounding of the result."""
    arrays = qkv(rng, dtype=dtype)
    got = attention(*arrays, **OPTIONS[case], **ALL)
    assert [x.dtype for x in got] == [dtype, "float32", "float32"]
    want = attention(*single(arrays), **OPTIONS[case], **ALL)
    assert_near(got, want, arrays)


@half
@pytest.mark.parametrize("case", OPTIONS)
def test_the_reference_rounds_once(rng, dtype, case):
    """To the bit: neither scores nor weights are ever narrower than float32."""
    from mha_fast.reference import scaled_dot_product_attention as attention

    arrays = qkv(rng, dtype=dtype)
    out, lse, weights = attention(*arrays, **OPTIONS[case], **ALL)
    want = attention(*single(arrays), **OPTIONS[case], **ALL)
    assert np.array_equal(out, narrow(want[0], dtype))
    assert np.array_equal(lse, want[1])
    assert np.array_equal(weights, want[2])


@half
def test_against_the_formula(attention, rng, dtype):
    arrays = qkv(rng, heads=4, kv_heads=2, queries=5, keys=7, dtype=dtype)
    bias = draw(rng, 5, 7)
    got = attention(*arrays, bias, enable_gqa=True, window_size=(3, -1), sinks=[0, 1, -1, 2], **ALL)
    want = formula(*(a.astype("f8") for a in arrays), bias, window=(3, -1), sinks=[0, 1, -1, 2])
    query, key, value = arrays
    bound = allowed("float32", query.shape[-1], largest_score(query, key) + largest(bias))
    assert_close(got[0], want[0], bound * largest(value.astype("f8")) + rounding(dtype.name, largest(want[0])))
    assert_close(got[1], want[1], bound, "lse")
    assert_close(got[2], want[2], bound, "weights")


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("which", range(3))
@half
def test_one_half_beside_wider_ones(attention, rng, dtype, which, wide):
    arrays = qkv(rng, dtype=wide)
    arrays = [narrow(a, dtype) if n == which else a for n, a in enumerate(arrays)]
    plain = [a.astype(wide) for a in arrays]
    got = attention(*arrays, **ALL)
    assert got[0].dtype == wide
    assert_near(got, attention(*plain, **ALL), plain, wide)


@half
def test_ties_go_to_even_after_the_whole_sum(attention, dtype):
    """The mean of two neighbours lies between them."""
    step = 2.0 ** -(10 if dtype == "float16" else 7)
    pairs = np.array([[1, 1 + step], [1 + step, 1 + 2 * step]])
    query, key = np.zeros((2, 1, 1), dtype), np.zeros((2, 2, 1), dtype)
    assert attention(query, key, pairs[:, :, None].astype(dtype)).ravel().tolist() == [1, 1 + 2 * step]


@half
def test_subnormal_numbers_count(attention, dtype):
    tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    query, key = np.zeros((1, 1, 1), dtype), np.zeros((1, 2, 1), dtype)
    value = np.array([[[3 * tiny], [5 * tiny]]], dtype)
    is_fast = attention is not reference.scaled_dot_product_attention
    flushed = is_fast and pair_rounding(value)  # products of pairs take subnormal numbers for 0
    assert attention(query, key, value).item() == (0 if flushed else 4 * tiny)


def test_scores_may_leave_the_range_of_float16(attention):
    query, key = np.full((1, 1, 4), 60000, "f2"), np.full((1, 2, 4), 60000, "f2")
    value = np.array([[[1.0], [3.0]]], "f2")
    out, lse = attention(query, key, value, return_lse=True)
    assert out.item() == 2
    assert lse.item() == pytest.approx(2 * 60000.0**2, rel=1e-6)


@half
def test_the_largest_number_stays_finite(attention, dtype):
    # the kernels add values before they divide: both numbers have to fit float32
    top = float(ml_dtypes.finfo(dtype).max) / (2 if dtype == BFLOAT16 else 1)
    query, key, value = np.zeros((1, 3, 2), dtype), np.zeros((1, 2, 2), dtype), np.full((1, 2, 5), top, dtype)
    assert np.array_equal(attention(query, key, value), np.full((1, 3, 5), top, dtype))


@half
@pytest.mark.parametrize("place", [1, 2])
def test_what_is_hidden_never_leaks(attention, rng, dtype, place):
    arrays = qkv(rng, dtype=dtype)
    want = attention(*arrays, window_size=(4, 4))
    arrays[place][:, :, 10] = np.nan
    got = attention(*arrays, window_size=(4, 4))
    untouched = np.abs(np.arange(20) - 10) > 4
    assert np.array_equal(got[:, :, untouched], want[:, :, untouched])
    assert np.isnan(got[:, :, ~untouched]).all()


@half
def test_rows_that_see_no_key(attention, rng, dtype):
    out, lse, weights = attention(*qkv(rng, dtype=dtype), valid_lens=[0, 30], **ALL)
    assert not out[0].any()
    assert np.array_equal(lse[0], np.full(lse[0].shape, -np.inf))
    assert not weights[0].any()


@half
@pytest.mark.parametrize("name", ["attn_mask", "alibi_slopes", "sinks", "valid_lens"])
def test_everything_else_may_be_half_too(attention, rng, dtype, name):
    arrays = qkv(rng, dtype=dtype)
    numbers = {
        "attn_mask": np.where(rng.random((20, 30)) < 0.2, -np.inf, rng.standard_normal((20, 30))),
        "alibi_slopes": draw(rng, 2),
        "sinks": np.array([0.3, -np.inf]),
        "valid_lens": np.array([6.5, 30]),
    }[name]
    numbers = narrow(numbers, dtype)
    got = attention(*arrays, **{name: numbers}, **ALL)
    assert got[0].dtype == dtype
    for g, w in zip(got, attention(*arrays, **{name: numbers.astype("f4")}, **ALL), strict=True):
        assert np.array_equal(g, w)


# ---------------------------------------------------------------- memory

VIEWS = {
    "every second": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "reversed": lambda a: a[..., ::-1].copy()[..., ::-1],
    "turned": lambda a: np.asfortranarray(a),
    "other byte order": lambda a: a.astype(a.dtype.newbyteorder()),
    "unaligned": lambda a: np.frombuffer(b"\0" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
    "read-only": lambda a: np.broadcast_to(a, a.shape),
}


@half
@pytest.mark.parametrize("view", VIEWS)
def test_memory_does_not_matter(attention, rng, dtype, view):
    arrays = qkv(rng, dtype=dtype)
    seen = [VIEWS[view](a) for a in arrays]
    got = attention(*seen)
    assert got.dtype == dtype
    assert got.dtype.isnative
    assert np.array_equal(got, attention(*arrays))


@pytest.mark.parametrize("dtypes", [("f2", "f2", "f2"), (BFLOAT16, "f2", "f4"), ("f4", "f8", BFLOAT16)])
def test_native_arrays_are_never_copied(dtypes):
    """Whatever they are mixed with: a call reads them where they lie."""
    arrays = [np.ones((2, 3, length, 8), dtype)[..., ::2] for length, dtype in zip((4, 5, 5), dtypes, strict=True)]
    call = _validate.attention_call_of(*arrays)
    for array, stored in zip(arrays, (call.query, call.key, call.value), strict=True):
        assert stored.dtype == array.dtype
        assert np.shares_memory(stored, array)


@half
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_out_is_written_and_returned(attention, rng, dtype, layout):
    arrays = [a if layout == "bhld" else a.swapaxes(1, 2) for a in qkv(rng, dtype=dtype)]
    want = attention(*arrays, layout=layout)
    for out in (np.full_like(want, np.nan), np.full((*want.shape[:-1], 2 * want.shape[-1]), np.nan, dtype)[..., ::2]):
        assert attention(*arrays, layout=layout, out=out) is out
        assert np.array_equal(out, want)


@half
def test_half_from_lists_of_scalars(attention, dtype):
    """What NumPy makes an array of that dtype is one."""
    one = dtype.type(1)
    assert attention([[one]], [[one]], [[one]]).dtype == dtype
