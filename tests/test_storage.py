"""float16, bfloat16 and mixed storage on each level: every number converted right, on every path and at every edge."""

import ml_dtypes
import numpy as np
import pytest
from conftest import (
    CONFIG,
    HALVES,
    allowed,
    assert_close,
    draw,
    exact,
    largest,
    largest_score,
    pair_rounding,
    qkv,
    rounding,
    tiles,
)

ALL_BITS = np.arange(65536, dtype=np.uint16)
FEW_ROWS = CONFIG["few_rows"]
# Either kernel, of few queries and of panels: one converts keys and values in registers, the other in a copy.
FAMILIES = pytest.mark.parametrize("queries", [1, FEW_ROWS + 1])
half = pytest.mark.parametrize("dtype", [np.dtype(name) for name in HALVES], ids=str)


@pytest.fixture(autouse=True)
def no_floating_point_warnings():
    """Conversions in the test itself meet every NaN and infinity there is."""
    with np.errstate(all="ignore"):
        yield


def every(dtype, finite=False):
    numbers = ALL_BITS.view(dtype)
    return numbers[np.isfinite(numbers.astype("f4"))] if finite else numbers


def same(got, want, within=0.0):
    """Equal to the bit, or to a bound that is given."""
    assert got.dtype == want.dtype
    if np.any(within):
        assert np.all(np.abs(got.astype("f4") - want.astype("f4")) <= within)
        return
    assert np.array_equal(np.isnan(got.astype("f4")), np.isnan(want.astype("f4")))
    number = ~np.isnan(want.astype("f4"))
    assert np.array_equal(got[number], want[number])


# ---------------------------------------------------------------- every number


@half
@FAMILIES
@pytest.mark.parametrize("finite", [True, False])
def test_every_value(isa, attend, dtype, queries, finite):
    """One key: the result is its value, in float32 and, after one more rounding, in the dtype itself."""
    value = every(dtype, finite)[None, None, None]
    query, key = np.zeros((1, 1, queries, 1), "f4"), np.zeros((1, 1, 1, 1), dtype)
    want = np.repeat(value, queries, axis=2)
    same(attend(query, key, value), want.astype("f4"))
    if pair_rounding(value):  # products of pairs take subnormal numbers for 0
        want = np.where(np.abs(want.astype("f4")) < np.finfo("f4").tiny, np.zeros((), dtype), want)
    same(attend(query.astype(dtype), key, value), want)


@half
@FAMILIES
@pytest.mark.parametrize("width", [1, 64])
def test_every_key(isa, attend, dtype, queries, width):
    """One key, and a query that picks one of its numbers: the log-sum-exp is it. Vectors, and the tail alone."""
    numbers = every(dtype, finite=True)
    key = numbers[: len(numbers) // width * width].reshape(-1, 1, 1, width)
    for picked in (0, width // 2, width - 1):
        query = np.zeros((len(key), 1, queries, width), "f4")
        query[..., picked] = 1
        _, lse = attend(query, key, np.zeros((len(key), 1, 1, 1), "f4"), scale=1.0, return_lse=True)
        assert np.array_equal(lse, np.repeat(key[:, :, :, picked], queries, axis=2).astype("f4"))


@half
@FAMILIES
@pytest.mark.parametrize("last_step", [1, 3])
def test_every_query(isa, attend, dtype, queries, last_step):
    """One key of ones: the log-sum-exp is the query; contiguous, and with another last stride."""
    numbers = every(dtype, finite=True)
    numbers = numbers[: len(numbers) // (queries * 8) * queries * 8].reshape(-1, 1, queries, 8)
    for picked in (0, 7):
        query = np.zeros((*numbers.shape[:3], 8 * last_step), dtype)[..., ::last_step]
        query[..., picked] = numbers[..., picked]
        key, value = np.ones((len(query), 1, 1, 8), "f4"), np.zeros((len(query), 1, 1, 1), "f4")
        _, lse = attend(query, key, value, scale=1.0, return_lse=True)
        assert np.array_equal(lse, numbers[..., picked].astype("f4"))


@half
@FAMILIES
def test_halfway_cases_of_the_result(isa, attend, dtype, queries):
    """The mean of two numbers next to each other, subnormal ones too: to the even one, as NumPy rounds."""
    numbers = np.sort(every(dtype, finite=True).astype("f4"))
    numbers = numbers[np.abs(numbers) < 1e38].astype(dtype)
    if pair_rounding(numbers):
        numbers = numbers[np.abs(numbers.astype("f4")) >= np.finfo("f4").tiny]
    pairs = np.stack([numbers[:-1], numbers[1:]])
    query, key = np.zeros((1, 1, queries, 1), dtype), np.zeros((1, 1, 2, 1), dtype)
    wide = pairs.astype("f4")
    means = ((wide[0] + wide[1]) * np.float32(0.5)).astype(dtype)
    same(attend(query, key, pairs[None, None]), np.repeat(means[None, None, None], queries, axis=2))


@half
@FAMILIES
def test_the_result_is_the_float32_one_rounded(isa, attend, rng, dtype, queries):
    """To the bit, where the computation is the same; results of every size, many of them subnormal."""
    query, key, value = qkv(rng, 2, 2, queries, 40, 16, value_width=300, dtype=dtype)
    sizes = 2.0 ** rng.integers(-30, 10, 300)
    value = (value.astype("f8") * sizes).astype(dtype)
    got = attend(query, key, value)
    within = pair_rounding(query, key, value) * np.abs(value.astype("f4")).max(axis=2, keepdims=True)
    same(got, attend(query.astype("f4"), key, value).astype(dtype), 2 * within)


# ---------------------------------------------------------------- mixtures and edges


def check(attend, query, key, value, **options):
    """A call against the oracle, and its bits where the same numbers are stored in the compute dtype."""
    out, lse = attend(query, key, value, return_lse=True, **options)
    plain = [x.astype(lse.dtype) for x in (query, key, value)]
    want = exact(*plain, **options)
    compute = lse.dtype.name
    bound = allowed(compute, query.shape[-1], largest_score(*plain[:2]))
    pairs = pair_rounding(query, key, value)
    assert_close(out, want[0], (bound + pairs) * largest(plain[2]) + rounding(out.dtype.name, largest(want[0])))
    assert_close(lse, want[1], bound, "lse")
    as_computed = attend(*plain, return_lse=True, **options)
    same(out, as_computed[0].astype(out.dtype), 2 * pairs * largest(plain[2]))
    same(lse, as_computed[1], bound if pairs else 0.0)


@pytest.mark.parametrize("query_dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("key_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("value_dtype", ["float16", "bfloat16", "float64"])
@FAMILIES
def test_any_mixture(isa, attend, rng, query_dtype, key_dtype, value_dtype, queries):
    query, key, value = qkv(rng, 1, 2, queries, 40, 20, kv_heads=1, value_width=21)
    arrays = [x.astype(d) for x, d in zip((query, key, value), (query_dtype, key_dtype, value_dtype), strict=True)]
    check(attend, *arrays, enable_gqa=True)


@half
@pytest.mark.parametrize("queries", [1, 2, 4, FEW_ROWS + 1])
def test_widths(isa, attend, rng, dtype, queries):
    for width in range(1, 71):
        check(attend, *qkv(rng, 1, 1, queries, 7, width, value_width=71 - width, dtype=dtype))


@half
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
def test_groups(isa, attend, rng, dtype, group):
    """Every way to cut few rows into tiles, over two blocks of keys and columns of two tiles."""
    for keys, width in ((5, 64), (300, 64), (300, 130), (261, 72)):
        check(attend, *qkv(rng, 1, group, 1, keys, width, 1, dtype=dtype), enable_gqa=True)


@half
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("queries", [1, 4, 20])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_hidden_never_leaks(isa, attend, rng, dtype, where, queries, bad):
    """By length, border and mask, in the tile that some row sees."""
    query, key, value = qkv(rng, 2, 2, queries, 50, 24, dtype=dtype)
    hiding = {
        "lengths": {"valid_lens": [30, 30]},
        "causal": {"is_causal": True, "q_offset": 29 - queries + 1},
        "bool": {"attn_mask": np.arange(50) < 30},
        "float": {"attn_mask": np.where(np.arange(50) < 30, 0, -np.inf).astype("f4")},
    }
    want = {name: attend(query, key, value, **options) for name, options in hiding.items()}
    {"key": key, "value": value}[where][:, :, 30:] = bad
    for name, options in hiding.items():
        same(attend(query, key, value, **options), want[name])


@half
@pytest.mark.parametrize("queries", [3, 20])
def test_a_visible_nan_spoils_its_rows_alone(isa, attend, rng, dtype, queries):
    query, key, value = qkv(rng, 1, 1, queries, 50, 24, dtype=dtype)
    options = {"is_causal": True, "q_offset": 50 - queries}
    want = attend(query, key, value, **options)
    value[0, 0, -1, 3] = np.nan
    got = attend(query, key, value, **options)
    assert np.isnan(got[0, 0, -1, 3].astype("f4"))
    same(got[:, :, :-1], want[:, :, :-1])
    same(np.delete(got, 3, -1), np.delete(want, 3, -1))


@half
@pytest.mark.parametrize("queries", [3, 20])
@pytest.mark.parametrize("kind", ["float32", "float16", "bool"])
def test_masks(isa, attend, rng, dtype, kind, queries):
    mask = rng.random((queries, 60)) < 0.7
    mask = mask if kind == "bool" else np.where(mask, draw(rng, queries, 60), -np.inf).astype(kind)
    query, key, value = qkv(rng, 1, 2, queries, 60, 16, dtype=dtype)
    got = attend(query, key, value, mask, return_weights=True)
    want = attend(*(x.astype("f4") for x in (query, key, value)), mask, return_weights=True)
    pairs = pair_rounding(query, key, value)
    same(got[0], want[0].astype(dtype), 2 * pairs * largest(value.astype("f4")))
    same(got[1], want[1], 1e-5 if pairs else 0.0)


@half
@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("width", [31, 32, 33, 64])
def test_rows_in_any_memory_have_the_same_bits(isa, attend, rng, dtype, queries, width):
    """In place, far apart, at odd addresses, backwards, every other number: read where they lie or copied."""
    arrays = qkv(rng, 1, 2, queries, 300, width, dtype=dtype)
    want = attend(*arrays)
    for lay_out in (
        lambda x: np.concatenate([x, x], axis=-1)[..., :width],
        lambda x: np.concatenate([x[..., :1], x], axis=-1)[..., 1:],
        lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
        lambda x: np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1],
    ):
        for which in ([0], [1], [2], [0, 1, 2]):
            same(attend(*(lay_out(x) if i in which else x for i, x in enumerate(arrays))), want)


# ---------------------------------------------------------------- calls


@half
def test_common_and_checked_path_agree(isa, attend, rng, dtype):
    """The recognised call and the validated one (for its list of lengths) fill the same struct."""
    arrays = qkv(rng, dtype=dtype)
    lengths = [30, 4]
    fast = attend(*arrays, valid_lens=np.array(lengths), return_lse=True)
    for got, want in zip(fast, attend(*arrays, valid_lens=lengths, return_lse=True), strict=True):
        same(got, want)
    out = np.empty_like(fast[0])
    assert attend(*arrays, valid_lens=np.array(lengths), out=out) is out
    same(out, fast[0])


@half
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
@pytest.mark.parametrize("given", ["float16", "bfloat16", "float32", "float64"])
def test_numbers_of_heads_in_any_dtype(isa, attend, rng, dtype, name, given):
    """Beside half inputs the common path once read half-precision numbers as wider ones."""
    arrays = qkv(rng, heads=4, queries=3, dtype=dtype)
    numbers = np.linspace(0.5, 2, 4).astype(given)
    options, converted = ({"is_causal": "lower_right", name: x} for x in (numbers, numbers.astype("f4")))
    got = attend(*arrays, **options)
    same(got, attend(*arrays, **converted))
    want = attend(*(x.astype("f4") for x in arrays), **converted)
    same(got, want.astype(dtype), 2 * pair_rounding(*arrays) * largest(arrays[2].astype("f4")))


@pytest.mark.parametrize("name", ["int4", "float8_e4m3fn"])
def test_other_dtypes_of_ml_dtypes_are_refused(attend, rng, name):
    arrays = [np.zeros((1, 2, 2), getattr(ml_dtypes, name))] * 3
    with pytest.raises(TypeError, match=name):
        attend(*arrays)


@half
def test_panels_that_share_a_block(isa, attend, rng, dtype):
    """Every number of panels that one converted block serves, and one more."""
    panel = tiles("float32")["panel"]
    for queries in (panel, 2 * panel + 1, 4 * panel, 4 * panel + 1):
        check(attend, *qkv(rng, 1, 1, queries, 270, 12, dtype=dtype))
