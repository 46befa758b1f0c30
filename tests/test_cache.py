"""Key/value caches: cached = uncached, paged = contiguous, int8 within its bound; a refused call changes nothing."""

import copy
import inspect
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
from conftest import DTYPES, STORED, allowed, assert_close, draw, exact, largest, largest_score, rounding, wide

from mha_fast import reference, sequences

STORED_DTYPES = (*DTYPES, *STORED)
every_dtype = pytest.mark.parametrize("dtype", STORED_DTYPES)
SCORES = {
    "window": {"window_size": (3, 1)},
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": np.array([0.5, 0.1, 0.0, 1.0])},
    "slopes of each": {"alibi_slopes": np.linspace(0, 1, 8).reshape(2, 4)},
    "sinks": {"sinks": np.array([0.0, 1.0, -2.0, 5.0])},
}
B, H, HKV, E, EV = 2, 4, 2, 24, 10


class Tokens:
    """Query, key and value of a whole sequence, and what plain causal attention makes of them in float64."""

    def __init__(self, rng, dtype, length=45, **options):
        self.query = draw(rng, B, H, length, E, dtype=dtype)
        self.key = draw(rng, B, HKV, length, E, dtype=dtype)
        self.value = draw(rng, B, HKV, length, EV, dtype=dtype)
        options = {"is_causal": True, "enable_gqa": True} | options
        self.want = exact(self.query, self.key, self.value, **options)[:2]
        compute = "float64" if dtype == "float64" else "float32"
        bound = allowed(compute, E, largest_score(self.query, self.key))
        top = largest(wide(self.value))
        self.limits = bound * top + rounding(dtype, top), bound

    def same(self, got, rows=slice(None), more=0.0):
        for name, g, w, limit in zip(("out", "lse"), got, self.want, self.limits, strict=True):
            assert_close(g, w[:, :, rows], limit + more, name)


def caches(max_len, dtype, fill=math.nan):
    """Contiguous caches that hold `fill`."""
    if np.dtype(dtype) == np.int8:
        scales = {name: np.full((B, HKV, max_len), fill, "f4") for name in ("k_scale", "v_scale")}
        return np.full((B, HKV, max_len, E), 99, dtype), np.full((B, HKV, max_len, EV), 99, dtype), scales
    return np.full((B, HKV, max_len, E), fill, dtype), np.full((B, HKV, max_len, EV), fill, dtype), {}


def pages(block, pages_each, dtype, rng):
    """Paged caches full of NaN, and a table that scatters the pages of all entries among unused ones."""
    blocks = B * pages_each + 3
    table = rng.permutation(blocks)[: B * pages_each].reshape(B, pages_each).astype(np.int32)
    if np.dtype(dtype) == np.int8:
        scales = {name: np.full((blocks, HKV, block), np.nan, "f4") for name in ("k_scale", "v_scale")}
        return np.full((blocks, HKV, block, E), 99, dtype), np.full((blocks, HKV, block, EV), 99, dtype), scales, table
    shapes = ((blocks, HKV, block, width) for width in (E, EV))
    return *(np.full(shape, np.nan, dtype) for shape in shapes), {}, table


# ---------------------------------------------------------------- cached = uncached


@every_dtype
@pytest.mark.parametrize("chunks", [[45], [1] * 45, [20, 24, 1], [7, 0, 38]])
def test_chunks_into_a_cache_equal_one_prefill(rng, forms, dtype, chunks):
    x = Tokens(rng, dtype)
    k_cache, v_cache, _ = caches(50, dtype)
    start = 0
    for n in chunks:
        now = slice(start, start + n)
        got = forms.attention_with_kvcache(
            x.query[:, :, now], k_cache, v_cache, x.key[:, :, now], x.value[:, :, now],
            cache_seqlens=start, return_lse=True,
        )  # fmt: skip
        x.same(got, now)
        start += n
    for cache, written in ((k_cache, x.key), (v_cache, x.value)):
        assert np.array_equal(cache[:, :, :45], written)
        assert np.isnan(cache[:, :, 45:].astype(np.float64)).all(), "written beyond the new tokens"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_entries_of_different_lengths(rng, forms, dtype):
    x = Tokens(rng, dtype)
    k_cache, v_cache, _ = caches(45, dtype)
    starts = np.array([3, 30])
    for b, start in enumerate(starts):
        k_cache[b, :, :start], v_cache[b, :, :start] = x.key[b, :, :start], x.value[b, :, :start]
    places = starts[:, None] + np.arange(5)
    query, k, v = (np.stack([a[b][:, places[b]] for b in range(B)]) for a in (x.query, x.key, x.value))
    got = forms.attention_with_kvcache(query, k_cache, v_cache, k, v, cache_seqlens=starts, return_lse=True)
    for name, g, w, limit in zip(("out", "lse"), got, x.want, x.limits, strict=True):
        assert_close(g, np.stack([w[b][:, places[b]] for b in range(B)]), limit, name)


@every_dtype
@pytest.mark.parametrize("block", [1, 7, 16])
def test_pages_equal_one_cache(rng, forms, dtype, block):
    x = Tokens(rng, dtype)
    k_cache, v_cache, _, table = pages(block, -(-45 // block) + 2, dtype, rng)
    table[:, -2:] = [-1, 2**31 - 1]  # never looked at
    start = 0
    for n in (20, 24, 1):
        now = slice(start, start + n)
        got = forms.attention_with_kvcache(
            x.query[:, :, now], k_cache, v_cache, x.key[:, :, now], x.value[:, :, now],
            cache_seqlens=np.full(B, start), block_table=table, return_lse=True,
        )  # fmt: skip
        x.same(got, now)
        start += n
    unused = np.setdiff1d(np.arange(k_cache.shape[0]), table[:, :-2])
    assert np.isnan(k_cache[unused].astype(np.float64)).all()


def test_entries_may_read_the_same_pages(rng, forms):
    x = Tokens(rng, "float32")
    k_cache, v_cache, _, table = pages(8, 6, "float32", rng)
    prefix = slice(0, 16)
    table[1, :2] = table[0, :2]
    for page in range(2):
        k_cache[table[0, page]] = x.key[0, :, page * 8 : page * 8 + 8]
        v_cache[table[0, page]] = x.value[0, :, page * 8 : page * 8 + 8]
    k, v = x.key[:, :, 16:20], x.value[:, :, 16:20]
    got = forms.attention_with_kvcache(
        x.query[:, :, 16:20], k_cache, v_cache, k, v, cache_seqlens=16, block_table=table, return_lse=True
    )
    for b in range(B):
        key, value = (np.concatenate([a[:1, :, prefix], new[b : b + 1]], 2) for a, new in ((x.key, k), (x.value, v)))
        want = exact(x.query[b : b + 1, :, 16:20], key, value, is_causal=True, q_offset=16, enable_gqa=True)[:2]
        for g, w, limit in zip(got, want, x.limits, strict=True):
            assert_close(g[b : b + 1], w, limit)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", SCORES)
def test_every_option_holds_in_a_cache(rng, forms, case, is_causal):
    x = Tokens(rng, "float32")
    k_cache, v_cache, _ = caches(45, "float32")
    query = x.query[:, :, -9:]
    want = exact(query, x.key, x.value, is_causal=is_causal, q_offset=36, enable_gqa=True, **SCORES[case])
    got = forms.attention_with_kvcache(
        query, k_cache, v_cache, x.key, x.value, cache_seqlens=0, is_causal=is_causal, return_lse=True, **SCORES[case]
    )
    for g, w, limit in zip(got, want, x.limits, strict=False):
        assert_close(g, w, limit)


def test_without_new_tokens_the_last_query_sees_the_last_token(rng, forms):
    x = Tokens(rng, "float32")
    for array in (x.key, x.value):
        array.flags.writeable = False  # nothing is written
    got = forms.attention_with_kvcache(x.query[:, :, 30:40], x.key, x.value, cache_seqlens=40, return_lse=True)
    x.same(got, slice(30, 40))
    scale = forms.attention_with_kvcache(x.query, x.key, x.value, cache_seqlens=45, scale=0.5, is_causal=False)
    want = exact(x.query, x.key, x.value, scale=0.5, enable_gqa=True)[0]
    assert_close(scale, want, x.limits[0] * 4)


def test_more_queries_than_tokens_and_no_tokens(forms):
    query = np.ones((B, H, 3, E))
    k_cache, v_cache, _ = caches(4, "float64")
    out, lse = forms.attention_with_kvcache(query, k_cache, v_cache, cache_seqlens=0, return_lse=True)
    assert not out.any()
    assert (lse == -np.inf).all()
    token = np.ones((B, HKV, 1, E)), np.ones((B, HKV, 1, EV))
    out, lse = forms.attention_with_kvcache(query, k_cache, v_cache, *token, cache_seqlens=0, return_lse=True)
    assert np.array_equal(out[0, 0, :, 0], [0, 0, 1])
    assert np.array_equal(lse[0, 0] > -np.inf, [False, False, True])


def test_caches_of_any_strides_and_out(rng, forms):
    """(batch, tokens, heads, width) memory, and every second place of a larger array."""
    x = Tokens(rng, "float32")
    k_cache = np.full((B, 50, HKV, E), np.nan, "f4").swapaxes(1, 2)
    v_cache = np.full((B, HKV, 100, 2 * EV), np.nan, "f4")[:, :, ::-2, ::2]
    out = np.full((B, H, 45, 2 * EV), np.nan, "f4")[..., ::2]
    got = forms.attention_with_kvcache(x.query, k_cache, v_cache, x.key, x.value, cache_seqlens=0, out=out)
    assert got is out
    assert_close(out, x.want[0], x.limits[0])
    assert np.array_equal(v_cache[:, :, :45], x.value)


@pytest.mark.parametrize(
    "query, cache, result",
    [
        ("float32", "float16", "float32"),
        ("float16", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float16", "float64", "float64"),
        ("float16", "int8", "float16"),
        ("float64", "int8", "float64"),
        ("int32", "float16", "float64"),
    ],
)
@pytest.mark.parametrize("token", ["float64", "float16", "int64"])
def test_dtypes_are_promoted(rng, forms, query, cache, result, token):
    q = draw(rng, B, H, 2, E, dtype=query)
    k, v = (np.round(draw(rng, B, HKV, 6, width) * 4).astype(token) for width in (E, EV))
    k_cache, v_cache, scales = caches(8, cache)
    got = forms.attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0, **scales)
    assert got.dtype == result
    want = exact(wide(q.astype(np.float64)), wide(k), wide(v), is_causal=True, q_offset=4, enable_gqa=True)[0]
    # Small integers are exact in every cache but int8.
    if cache != "int8":
        assert np.allclose(got.astype(np.float64), want, rtol=0.01, atol=0.1 if "16" in result else 1e-4)


# ---------------------------------------------------------------- int8


def int8_rounding(x):
    """The documented bound of an int8 row, with the roundings of float32 in scale, quotient and product."""
    top = np.abs(x.astype(np.float64)).max(axis=-1, keepdims=True)
    return top / 254 + top * 4 * 2.0**-24 + 1e-43


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-6, 1.0, 1e6, 1e37])
def test_int8_keeps_each_number_within_its_bound(rng, forms, size):
    k, v = (draw(rng, B, HKV, 40, width) * size for width in (E, EV))
    k[0, 0, 3] = 0
    k[0, 0, 4, 1:] = 0
    k_cache, v_cache, scales = caches(40, "int8")
    forms.attention_with_kvcache(np.ones((B, H, 1, E), "f4"), k_cache, v_cache, k, v, cache_seqlens=0, **scales)
    for x, cache, scale in ((k, k_cache, scales["k_scale"]), (v, v_cache, scales["v_scale"])):
        kept = cache.astype(np.float64) * scale[..., None].astype(np.float64)
        assert (np.abs(kept - x) <= int8_rounding(x)).all()
        assert cache.min() >= -127
    assert scales["k_scale"][0, 0, 3] == 0
    if size > 1e-30:
        assert np.abs(k_cache[0, 0, 4]).tolist() == [127] + [0] * (E - 1)


@pytest.mark.parametrize("query_dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("paged", [False, True])
def test_int8_attention_is_that_of_the_kept_numbers(rng, forms, query_dtype, paged):
    x = Tokens(rng, "float64")
    k_cache, v_cache, scales = caches(45, "int8")
    more = {}
    if paged:
        k_cache, v_cache, scales, more["block_table"] = pages(16, 3, "int8", rng)
    query = x.query.astype(query_dtype)
    got = forms.attention_with_kvcache(
        query, k_cache, v_cache, x.key, x.value, cache_seqlens=0, return_lse=True, **scales, **more
    )
    kept = [
        c * s[..., None].astype(np.float64) for c, s in ((k_cache, scales["k_scale"]), (v_cache, scales["v_scale"]))
    ]
    if paged:
        kept = [a[more["block_table"]].swapaxes(1, 2).reshape(B, HKV, 48, a.shape[-1])[:, :, :45] for a in kept]
    want = exact(query.astype(np.float64), *kept, is_causal=True, enable_gqa=True)[:2]
    limits = Tokens(rng, "float64" if query_dtype == "float64" else "float32").limits
    unit = rounding(query_dtype, largest(x.value))
    for g, w, limit in zip(got, want, (limits[0] * 2 + unit, limits[1] * 2), strict=True):
        assert_close(g, w, limit)


# ---------------------------------------------------------------- rotary


@pytest.mark.parametrize("rotary_dim, interleaved", [(None, False), (8, True)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rotation_inside_is_rotation_before(rng, forms, dtype, rotary_dim, interleaved):
    x = Tokens(rng, dtype)
    plain = {"base": 500.0, "rotary_dim": rotary_dim, "interleaved": interleaved}
    inside = {"rotary_base": 500.0, "rotary_dim": rotary_dim, "rotary_interleaved": interleaved}
    query, key = (reference.apply_rotary(a, np.arange(45), **plain) for a in (x.query, x.key))
    want = exact(query, key, x.value, is_causal=True, enable_gqa=True)[:2]
    k_cache, v_cache, _ = caches(45, dtype)
    start = 0
    for n in (30, 14, 1):
        now = slice(start, start + n)
        got = forms.attention_with_kvcache(
            x.query[:, :, now], k_cache, v_cache, x.key[:, :, now], x.value[:, :, now],
            cache_seqlens=start, return_lse=True, **inside,
        )  # fmt: skip
        for g, w, limit in zip(got, want, x.limits, strict=True):
            assert_close(g, w[:, :, now], limit)
        start += n
    assert np.allclose(k_cache, key, rtol=0, atol=1e-6)
    # A query whose token is in the cache already stands where that token stands.
    got = forms.attention_with_kvcache(
        x.query[:, :, -2:], k_cache, v_cache, cache_seqlens=45, return_lse=True, **inside
    )
    for g, w, limit in zip(got, want, x.limits, strict=True):
        assert_close(g, w[:, :, -2:], limit)


def test_what_is_not_finite_turns_in_silence(forms):
    query, token = np.full((1, 1, 1, 4), np.inf), np.full((1, 1, 1, 4), -np.inf)
    k_cache, v_cache = np.zeros((2, 1, 1, 3, 4))
    out = forms.attention_with_kvcache(
        query, k_cache, v_cache, token, np.ones((1, 1, 1, 4)), cache_seqlens=1, rotary_base=10.0
    )
    assert np.isnan(out).all()


def test_rotated_keys_are_rounded_once(rng, forms):
    """Rotated in float32 and then stored, whatever the dtypes of key and cache."""
    k, v = draw(rng, B, HKV, 5, E, dtype="float16"), draw(rng, B, HKV, 5, EV, dtype="float16")
    want = reference.apply_rotary(k.astype(np.float32), np.arange(3, 8))
    for dtype in ("float16", "bfloat16", "float32"):
        k_cache, v_cache, _ = caches(8, dtype, fill=0)
        forms.attention_with_kvcache(
            np.ones((B, H, 1, E), "f4"), k_cache, v_cache, k, v, cache_seqlens=3, rotary_base=10000.0
        )
        assert np.allclose(
            k_cache[:, :, 3:].astype("f8"), want.astype(dtype).astype("f8"), rtol=2 * rounding(dtype, 1.0) + 1e-7
        )


# ---------------------------------------------------------------- every wrong argument


def ones(*shape, dtype="float64"):
    return np.ones(shape, dtype)


def base():
    """A right call: batch 2, 4 query heads, 3 queries and new tokens, room for 10, widths 6 and 5."""
    return {"query": ones(2, 4, 3, 6), "k_cache": ones(2, 2, 10, 6), "v_cache": ones(2, 2, 10, 5),
            "k": 2 * ones(2, 2, 3, 6), "v": 2 * ones(2, 2, 3, 5), "cache_seqlens": np.array([2, 7])}  # fmt: skip


def paged(table):
    """The same on 8 pages of 4 tokens."""
    return {"k_cache": ones(8, 2, 4, 6), "v_cache": ones(8, 2, 4, 5), "block_table": table}


def endless(width):
    """A page of so many tokens that several do not count in 64 bits."""
    return np.broadcast_to(np.float16(1), (1, 2, 2**58, width))


def int8(**changed):
    scales = {"k_scale": ones(2, 2, 10, dtype="f4"), "v_scale": ones(2, 2, 10, dtype="f4")}
    return {"k_cache": ones(2, 2, 10, 6, dtype="i1"), "v_cache": ones(2, 2, 10, 5, dtype="i1")} | scales | changed


def read_only(array):
    array.flags.writeable = False
    return array


def both(shape):
    return dict(zip(("k_cache", "v_cache"), np.ones((2, *shape)), strict=True))


def one_array():
    cache = ones(2, 2, 10, 6)
    return {"k_cache": cache, "v_cache": cache, "v": ones(2, 2, 3, 6)}


def query_in_cache():
    cache = ones(2, 4, 10, 6)
    return {"k_cache": cache, "v_cache": ones(2, 4, 10, 5), "query": cache[:, :, 7:],
            "k": ones(2, 4, 3, 6), "v": ones(2, 4, 3, 5)}  # fmt: skip


def with_nan(array, number=math.nan):
    array[-1, -1, -1, -1] = number
    return array


SUPPORTED = "float16, bfloat16, float32 and float64 are supported, bool and integers become float64"
CACHES = "expected float16, bfloat16, float32, float64 or int8"
INT8 = "holds NaN, infinity or numbers of 1.7e+38 and more; expected finite numbers for an int8 cache"
WRITABLE = "expected a writable array to take new tokens"
OWN = "expected memory of its own to take new tokens"
ROOM = "expected at most 10 in all, max_len of the cache"
ERRORS = {
    # Shapes and dtypes.
    "query rank": (
        {"query": ones(4, 3, 6)},
        ValueError,
        "query has shape (4, 3, 6); expected 4 dimensions: (batch, heads, queries, width)",
    ),
    "query dtype": ({"query": ones(2, 4, 3, 6, dtype="c8")}, TypeError, f"query has dtype complex64; {SUPPORTED}"),
    "query width": ({"query": ones(2, 4, 3, 8)}, ValueError, "query has width 8 but k_cache has 6"),
    "query batch": (
        {"query": ones(3, 4, 3, 6)},
        ValueError,
        "query has batch 3 but k_cache has 2; a cache in pages needs block_table",
    ),
    "query heads": (
        {"query": ones(2, 5, 3, 6)},
        ValueError,
        "query has 5 heads, which is no multiple of the 2 heads of k_cache",
    ),
    "cache list": ({"k_cache": [[[[1.0]]]]}, TypeError, "k_cache is a list; expected a numpy.ndarray"),
    "cache masked": (
        {"v_cache": np.ma.ones((2, 2, 10, 5))},
        TypeError,
        "v_cache is a MaskedArray; expected a numpy.ndarray",
    ),
    "cache rank": (
        {"v_cache": ones(2, 10, 5)},
        ValueError,
        "v_cache has shape (2, 10, 5); expected 4 dimensions: (batch, heads, max_len, width)",
    ),
    "page rank": (
        paged([[0], [1]]) | {"k_cache": ones(8, 4, 6)},
        ValueError,
        "k_cache has shape (8, 4, 6); expected 4 dimensions: (blocks, heads, block, width)",
    ),
    "cache dtype": ({"k_cache": ones(2, 2, 10, 6, dtype="i4")}, TypeError, f"k_cache has dtype int32; {CACHES}"),
    "cache dtypes": (
        {"k_cache": ones(2, 2, 10, 6, dtype="f4")},
        TypeError,
        "k_cache has dtype float32 but v_cache has float64",
    ),
    "cache shapes": (
        {"v_cache": ones(2, 2, 9, 5)},
        ValueError,
        "k_cache has shape (2, 2, 10, 6) but v_cache has (2, 2, 9, 5); expected the same but for the width",
    ),
    "cache byte-swapped": (
        {"k_cache": ones(2, 2, 10, 6, dtype=">f8")},
        ValueError,
        "k_cache is byte-swapped, unaligned or has strides (960, 480, 48, 8); expected an array in native byte order, "
        "aligned, whose strides are multiples of 8 bytes",
    ),
    "cache unaligned": (
        {"v_cache": np.zeros((2, 2, 10, 5), [("flag", "i1"), ("number", "f8")])["number"]},
        ValueError,
        "v_cache is byte-swapped, unaligned or has strides (900, 450, 45, 9); expected an array in native byte order, "
        "aligned, whose strides are multiples of 8 bytes",
    ),
    "k alone": ({"v": None}, ValueError, "v is None; expected k and v together or neither"),
    "v alone": ({"k": None}, ValueError, "k is None; expected k and v together or neither"),
    "k rank": (
        {"k": ones(2, 3, 6)},
        ValueError,
        "k has shape (2, 3, 6); expected 4 dimensions: (batch, heads, tokens, width)",
    ),
    "k heads": ({"k": ones(2, 4, 3, 6)}, ValueError, "k has shape (2, 4, 3, 6); expected (2, 2, 3, 6) for this cache"),
    "v tokens": ({"v": ones(2, 2, 4, 5)}, ValueError, "v has shape (2, 2, 4, 5); expected (2, 2, 3, 5) for this cache"),
    "v width": ({"v": ones(2, 2, 3, 6)}, ValueError, "v has shape (2, 2, 3, 6); expected (2, 2, 3, 5) for this cache"),
    "k dtype": ({"k": ones(2, 2, 3, 6, dtype="c8")}, TypeError, f"k has dtype complex64; {SUPPORTED}"),
    # Lengths.
    "no room": (
        {"cache_seqlens": [2, 8]},
        ValueError,
        f"cache_seqlens[1] is 8 and k has 3 tokens; {ROOM}",
    ),
    "beyond": (
        {"cache_seqlens": 11, "k": None, "v": None},
        ValueError,
        f"cache_seqlens is 11; {ROOM}",
    ),
    "beyond 64 bits": (
        {"cache_seqlens": np.array([0, 2**64 - 1], "u8")},
        ValueError,
        f"cache_seqlens[1] is {2**64 - 1} and k has 3 tokens; {ROOM}",
    ),
    "int beyond 64 bits": (
        {"cache_seqlens": 2**200},
        ValueError,
        f"cache_seqlens is {str(2**200)[:57]}... and k has 3 tokens; {ROOM}",
    ),
    "int without a text": (
        {"cache_seqlens": 10**5000, "k": None, "v": None},
        ValueError,
        f"cache_seqlens is of type int; {ROOM}",
    ),
    "array of an int": ({"cache_seqlens": np.array(9)}, ValueError, f"cache_seqlens is 9 and k has 3 tokens; {ROOM}"),
    "negative array of an int": (
        {"cache_seqlens": np.array(-9)},
        ValueError,
        "cache_seqlens is -9; expected at least 0",
    ),
    "negative length": ({"cache_seqlens": [2, -1]}, ValueError, "cache_seqlens[1] is -1; expected at least 0"),
    "negative int": ({"cache_seqlens": -3}, ValueError, "cache_seqlens is -3; expected at least 0"),
    "lengths shape": (
        {"cache_seqlens": [1, 2, 3]},
        ValueError,
        "cache_seqlens has shape (3,); expected an int or (2,)",
    ),
    "lengths float": ({"cache_seqlens": [1.0, 2.0]}, TypeError, "cache_seqlens has dtype float64; expected integers"),
    "lengths bool": ({"cache_seqlens": True}, TypeError, "cache_seqlens has dtype bool; expected integers"),
    "lengths None": ({"cache_seqlens": None}, TypeError, "cache_seqlens has dtype object; expected integers"),
    # Pages.
    "table dtype": (
        paged([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
        TypeError,
        "block_table has dtype float64; expected int32 or int64",
    ),
    "table unsigned": (
        paged(np.ones((2, 3), "u4")),
        TypeError,
        "block_table has dtype uint32; expected int32 or int64",
    ),
    "table shape": (
        paged([[0, 1, 2]]),
        ValueError,
        "block_table has shape (1, 3); expected (2, pages of an entry)",
    ),
    "page missing": (
        paged([[0, 1, 2], [3, 4, 8]]),
        ValueError,
        "block_table[1, 2] is 8 and entry 1 has 10 tokens; expected 0 to 7",
    ),
    "page negative": (
        paged([[0, -1, 2], [3, 4, 5]]),
        ValueError,
        "block_table[0, 1] is -1 and entry 0 has 5 tokens; expected 0 to 7",
    ),
    "page written by two": (
        paged([[0, 5, 2], [3, 4, 5]]),
        ValueError,
        "block_table[0, 1] and block_table[1, 2] are both 5, and both take new tokens; "
        "expected a page of its own for each",
    ),
    "page written twice": (
        paged([[0, 1, 2], [3, 4, 4]]),
        ValueError,
        "block_table[1, 1] and block_table[1, 2] are both 4, and both take new tokens; "
        "expected a page of its own for each",
    ),
    "pages too few": (
        paged([[0, 1], [2, 3]]),
        ValueError,
        "cache_seqlens[1] is 7 and k has 3 tokens; expected at most 8 in all, "
        "what the 2 pages of block_table hold, 4 tokens each",
    ),
    "pages beyond 64 bits": (
        paged([[0] * 32] * 2)
        | {"k_cache": endless(6), "v_cache": endless(5), "cache_seqlens": [1, 2**62], "k": None, "v": None},
        ValueError,
        f"cache_seqlens[1] is {2**62}; expected at most {2**60 - 1} in all, "
        f"what the 32 pages of block_table hold, {2**58} tokens each",
    ),
    "pages of nothing": (
        paged([[0], [1]]) | {"k_cache": ones(8, 2, 0, 6), "v_cache": ones(8, 2, 0, 5)},
        ValueError,
        "k_cache has shape (8, 2, 0, 6); expected blocks of at least 1 token",
    ),
    # int8.
    "no scale": (int8(v_scale=None), ValueError, "v_cache has dtype int8; expected v_scale with it"),
    "scale beside float64": (
        {"k_scale": ones(2, 2, 10, dtype="f4")},
        ValueError,
        "k_scale is given but k_cache has dtype float64; expected it beside int8 alone",
    ),
    "scale dtype": (int8(k_scale=ones(2, 2, 10)), TypeError, "k_scale has dtype float64; expected float32"),
    "scale shape": (
        int8(k_scale=ones(2, 2, 9, dtype="f4")),
        ValueError,
        "k_scale has shape (2, 2, 9); expected (2, 2, 10)",
    ),
    "scale list": (int8(v_scale=[1.0]), TypeError, "v_scale is a list; expected a numpy.ndarray"),
    "scale read-only": (
        int8(v_scale=read_only(ones(2, 2, 10, dtype="f4"))),
        ValueError,
        f"v_scale is read-only; {WRITABLE}",
    ),
    "int8 NaN": (int8(k=with_nan(ones(2, 2, 3, 6))), ValueError, f"k {INT8}"),
    "int8 infinity": (int8(v=with_nan(ones(2, 2, 3, 5, dtype="f2"), -math.inf)), ValueError, f"v {INT8}"),
    "int8 bfloat16": (int8(v=with_nan(ones(2, 2, 3, 5, dtype=ml_dtypes.bfloat16))), ValueError, f"v {INT8}"),
    "int8 large": (int8(k=with_nan(ones(2, 2, 3, 6), 1e39)), ValueError, f"k {INT8}"),
    # Memory.
    "read-only": ({"k_cache": read_only(ones(2, 2, 10, 6))}, ValueError, f"k_cache is read-only; {WRITABLE}"),
    "broadcast": (
        {"v_cache": np.lib.stride_tricks.as_strided(ones(2, 10, 5), (2, 2, 10, 5), (0, 400, 40, 8))},
        ValueError,
        "v_cache overlaps itself; expected every element in a place of its own",
    ),
    "one array for both": (one_array(), ValueError, f"v_cache shares memory with k_cache; {OWN}"),
    "query in the cache": (query_in_cache(), ValueError, f"k_cache shares memory with query; {OWN}"),
    # Options.
    "is_causal": ({"is_causal": "lower_right"}, TypeError, "is_causal is 'lower_right'; expected True or False"),
    "return_lse": ({"return_lse": 0}, TypeError, "return_lse is 0; expected True or False"),
    "scale NaN": ({"scale": math.nan}, ValueError, "scale is nan; expected a finite number"),
    "window int": (
        {"window_size": 3},
        TypeError,
        "window_size is 3; expected a pair (left, right): how many keys before and behind its own position a query "
        "sees, -1 for no limit",
    ),
    "softcap": ({"softcap": -1}, ValueError, "softcap is -1.0; expected 0, which is none, or a positive number"),
    "slopes": (
        {"alibi_slopes": ones(5)},
        ValueError,
        "alibi_slopes has shape (5,); expected (4,) or (2, 4): a number for each query head",
    ),
    "sinks": ({"sinks": ones(2, 4)}, ValueError, "sinks has shape (2, 4); expected (4,): a number for each query head"),
    "rotary_base": ({"rotary_base": -1.0}, ValueError, "rotary_base is -1.0; expected a number above 0"),
    "rotary_dim": (
        {"rotary_base": 1e4, "rotary_dim": 8},
        ValueError,
        "rotary_dim is 8; expected an even number of at most the width 6",
    ),
    "rotary_dim huge": (
        {"rotary_base": 1e4, "rotary_dim": 10**5000},
        ValueError,
        "rotary_dim is of type int; expected an even number of at most the width 6",
    ),
    "rotary angle": (
        {"rotary_base": 5e-324, "query": ones(2, 4, 3, 600), "k_cache": ones(2, 2, 10, 600), "k": ones(2, 2, 3, 600)},
        ValueError,
        "rotary_base is 5e-324 and a position 10.0; expected angles, position * base ** (-2 p / rotary_dim), "
        "that float64 can hold",
    ),
    "rotary_dim alone": (
        {"rotary_dim": 4},
        ValueError,
        "rotary_dim or rotary_interleaved is given without rotary_base; expected rotary_base too",
    ),
    "interleaved alone": (
        {"rotary_interleaved": True},
        ValueError,
        "rotary_dim or rotary_interleaved is given without rotary_base; expected rotary_base too",
    ),
    "threads": ({"num_threads": 1.5}, TypeError, "num_threads is 1.5; expected an integer"),
    "out shape": ({"out": ones(2, 4, 3, 6)}, ValueError, "out has shape (2, 4, 3, 6); expected (2, 4, 3, 5)"),
    "out dtype": ({"out": ones(2, 4, 3, 5, dtype="f4")}, TypeError, "out has dtype float32; expected float64"),
}


def snapshot(arguments):
    return {name: x.tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray) and x.flags.writeable}


@pytest.mark.parametrize("module", [sequences, reference])
@pytest.mark.parametrize("case", ERRORS)
def test_errors(module, case):
    changed, kind, text = ERRORS[case]
    arguments = base() | changed
    before = snapshot(arguments)
    with pytest.raises(kind) as info:
        module.attention_with_kvcache(**arguments)
    assert str(info.value) == text
    assert snapshot(arguments) == before, "a refused call wrote"


@pytest.mark.parametrize("what", ["result", "log-sum-exp", "values"])
def test_a_call_without_memory_has_written_nothing(forms, monkeypatch, what):
    """Of results that no memory holds, and of new values whose conversion finds none."""
    arguments = base() | {"query": np.broadcast_to(1.0, (2, 4, 2**50, 6)), "cache_seqlens": 0}
    if what == "log-sum-exp":  # the result has no width
        arguments |= {"v_cache": ones(2, 2, 10, 0), "v": ones(2, 2, 3, 0), "return_lse": True}
    if what == "values":

        def refuse(rows):
            if rows.shape[-1] == 5:
                raise MemoryError
            return rows.astype("i1"), rows[..., 0]

        arguments = base() | int8()
        monkeypatch.setattr("mha_fast._reference_sequences._quantized", refuse)
    before = snapshot(arguments)
    with pytest.raises(MemoryError):
        forms.attention_with_kvcache(**arguments)
    assert snapshot(arguments) == before


@pytest.mark.parametrize("module", [sequences, reference])
def test_out_must_not_overlap_the_cache(module):
    arguments = base() | {"v_cache": ones(2, 4, 10, 5), "k_cache": ones(2, 4, 10, 6), "k": None, "v": None}
    with pytest.raises(ValueError, match="out shares memory with v_cache"):
        module.attention_with_kvcache(**arguments, out=arguments["v_cache"][:, :, :3])


def test_a_cache_must_not_overlap_its_lengths_and_table():
    memory = np.zeros((4, 1, 4, 6))
    table, seqlens = memory.view(np.int64)[0, 0, 0, :4].reshape(2, 2), memory.view(np.int64)[0, 0, 1, :2]
    arguments = {"query": ones(2, 1, 1, 6), "v_cache": ones(4, 1, 4, 6), "k": ones(2, 1, 1, 6), "v": ones(2, 1, 1, 6)}
    for name, array in (("block_table", table), ("cache_seqlens", seqlens)):
        places = {"block_table": np.arange(4).reshape(2, 2), "cache_seqlens": [0, 0]} | {name: array}
        with pytest.raises(ValueError, match=f"k_cache shares memory with {name}"):
            reference.attention_with_kvcache(**arguments, k_cache=memory, **places)


def test_the_right_calls_of_these_cases_are_accepted(forms):
    """So that each case above is refused for its own reason."""
    for changed in ({}, paged([[0, 1, -1], [3, 4, 5]]), int8(), one_array() | {"k": None, "v": None}):
        arguments = base() | changed
        width = arguments["v_cache"].shape[-1]
        assert forms.attention_with_kvcache(**arguments).shape == (2, 4, 3, width)


@pytest.mark.parametrize("zeros", range(1, 64))
def test_empty_arrays(forms, zeros):
    b, h, n, new, e, ev = (0 if zeros >> bit & 1 else 2 for bit in range(6))
    arrays = np.ones((b, h, n, e)), np.zeros((b, h, 4, e)), np.zeros((b, h, 4, ev))
    tokens = np.ones((b, h, new, e)), np.ones((b, h, new, ev))
    out, lse = forms.attention_with_kvcache(*arrays, *tokens, cache_seqlens=np.full(b, 1), return_lse=True)
    assert out.shape == (b, h, n, ev)
    assert lse.shape == (b, h, n)


# ---------------------------------------------------------------- KVCache


@pytest.mark.parametrize("dtype", [*STORED_DTYPES, "int8"])
@pytest.mark.parametrize("chunks", [[200], [1] * 20, [70, 1, 1, 60]])
def test_a_cache_of_any_dtype_equals_one_prefill(rng, forms, dtype, chunks):
    stored = "float32" if dtype == "int8" else dtype
    x = Tokens(rng, stored, length=sum(chunks))
    cache = forms.KVCache(B, HKV, 200, E, EV, dtype=dtype)
    start = 0
    for n in chunks:
        now = slice(start, start + n)
        got = cache.attend(x.query[:, :, now], x.key[:, :, now], x.value[:, :, now], return_lse=True)
        # An int8 key is off by at most 2 % of a row's largest in each of 24 products, a value likewise.
        x.same(got, now, more=0.1 if dtype == "int8" else 0.0)
        start += n
    assert cache.seqlens.tolist() == [start] * B
    assert cache.dtype == dtype
    assert (cache.k_scale is None) == (dtype != "int8")


def test_append_then_attend_is_attend(rng, forms):
    x = Tokens(rng, "float32")
    apart, together = forms.KVCache(B, HKV, 45, E, EV), forms.KVCache(B, HKV, 45, E, EV)
    for now in (slice(0, 40), slice(40, 45)):
        assert apart.append(x.key[:, :, now], x.value[:, :, now]) is None
        got = apart.attend(x.query[:, :, now])
        assert np.array_equal(got, together.attend(x.query[:, :, now], x.key[:, :, now], x.value[:, :, now]))
    assert np.array_equal(apart.k_cache[:, :, :45], together.k_cache[:, :, :45])


def test_room_grows_geometrically_and_never_beyond_max_len(rng):
    cache = reference.KVCache(1, 1, 1000, 2)
    token = np.ones((1, 1, 1, 2))
    rooms = []
    for _ in range(1000):
        cache.append(token, token)
        rooms.append(cache.k_cache.shape[2])
    assert max(rooms) == 1000
    assert len(set(rooms)) <= 6
    assert all(room > i for i, room in enumerate(rooms))
    assert cache.k_cache.all()


def test_a_huge_max_len_costs_nothing():
    cache = reference.KVCache(1, 1, 2**40, 64)
    cache.append(np.ones((1, 1, 3, 64)), np.ones((1, 1, 3, 64)))
    assert cache.k_cache.nbytes < 2**20


def test_ragged_tokens(rng, forms):
    x = Tokens(rng, "float64")
    cache = forms.KVCache(B, HKV, 45, E, EV, dtype="float64")
    key, value = x.key.copy(), x.value.copy()
    key[0, :, 3:], value[0, :, 3:] = np.nan, np.nan  # padding of the shorter entry
    cache.append(key[:, :, :30], value[:, :, :30], lengths=[3, 30])
    assert cache.seqlens.tolist() == [3, 30]
    k, v, query = (np.stack([a[0, :, 3:4], a[1, :, 30:31]]) for a in (x.key, x.value, x.query))
    out = cache.attend(query, k, v)
    assert cache.seqlens.tolist() == [4, 31]
    want = np.stack([x.want[0][0, :, 3:4], x.want[0][1, :, 30:31]])
    assert_close(out, want, x.limits[0])


@pytest.mark.parametrize("lengths, kept", [(20, [20, 20]), ([5, 30], [5, 30]), ([0, 0], [0, 0]), (np.uint8(7), [7, 7])])
def test_truncate_forgets(rng, forms, lengths, kept):
    x = Tokens(rng, "float32")
    cache = forms.KVCache(B, HKV, 45, E, EV)
    cache.append(draw(rng, B, HKV, 30, E), draw(rng, B, HKV, 30, EV))
    cache.truncate(lengths)
    assert cache.seqlens.tolist() == kept
    cache.truncate(0)
    x.same(cache.attend(x.query, x.key, x.value, return_lse=True))


def test_the_lengths_are_a_copy(rng):
    cache = reference.KVCache(2, 1, 4, 2)
    cache.seqlens[0] = 3
    assert cache.seqlens.tolist() == [0, 0]
    assert cache.seqlens.dtype == np.int64


@pytest.mark.parametrize("module", [sequences, reference])
def test_copies_and_pickles_go_their_own_way(rng, module):
    x = Tokens(rng, "float32")
    cache = module.KVCache(B, HKV, 45, E, EV)
    cache.append(x.key[:, :, :40], x.value[:, :, :40])
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert type(twin) is module.KVCache
        x.same(twin.attend(x.query[:, :, 40:], x.key[:, :, 40:], x.value[:, :, 40:], return_lse=True), slice(40, 45))
        assert cache.seqlens.tolist() == [40, 40]


def too_large(name, max_len, width):
    return (
        f"a cache of this batch, num_kv_heads, max_len and {name} would have shape (2, 1, {max_len}, {width}), "
        "more than an array can hold"
    )


NEW = {"batch": 2, "num_kv_heads": 1, "max_len": 8, "head_dim": 4}
CONSTRUCTOR = {
    "batch": ({"batch": 0}, ValueError, "batch is 0; expected at least 1"),
    "heads": ({"num_kv_heads": 1.0}, TypeError, "num_kv_heads is 1.0; expected an integer"),
    "max_len": ({"max_len": -8}, ValueError, "max_len is -8; expected at least 1"),
    "head_dim": ({"head_dim": None}, TypeError, "head_dim is None; expected an integer"),
    "v_head_dim": ({"v_head_dim": 0}, ValueError, "v_head_dim is 0; expected at least 1"),
    "max_len huge": ({"max_len": 2**63}, ValueError, too_large("head_dim", 2**63, 4)),
    "head_dim huge": ({"head_dim": 2**62}, ValueError, too_large("head_dim", 8, 2**62)),
    "v_head_dim huge": ({"v_head_dim": 2**62}, ValueError, too_large("v_head_dim", 8, 2**62)),
    "scales huge": ({"max_len": 2**60, "head_dim": 1, "dtype": "i1"}, ValueError, too_large("head_dim", 2**60, 1)),
    "batch without a text": (
        {"batch": 10**5000},
        ValueError,
        "a cache of this batch, num_kv_heads, max_len and head_dim would have shape of type tuple, "
        "more than an array can hold",
    ),
    "dtype": ({"dtype": np.uint8}, TypeError, f"dtype is uint8; {CACHES}"),
    "dtype word": ({"dtype": "half float"}, TypeError, f"dtype is 'half float'; {CACHES}"),
}


@pytest.mark.parametrize("case", CONSTRUCTOR)
def test_constructor_errors(case):
    changed, kind, text = CONSTRUCTOR[case]
    with pytest.raises(kind) as info:
        reference.KVCache(**(NEW | changed))
    assert str(info.value) == text


K = np.ones((2, 1, 3, 4))
BAD = K.copy()
BAD[1, 0, 2, 3] = np.nan
METHODS = {
    "append beyond": (
        "append",
        (np.ones((2, 1, 4, 4)), np.ones((2, 1, 4, 4))),
        {},
        ValueError,
        "entry 0 would hold 5 + 4 tokens; expected at most 8, max_len of the cache",
    ),
    "append shape": (
        "append",
        (K[:1], K),
        {},
        ValueError,
        "k has shape (1, 1, 3, 4); expected (2, 1, 3, 4) for this cache",
    ),
    "append dtype": ("append", (K, K.astype("c16")), {}, TypeError, f"v has dtype complex128; {SUPPORTED}"),
    "append None": ("append", (K, None), {}, ValueError, "v is None; expected k and v together"),
    "append NaN": ("append", (K, BAD), {}, ValueError, f"v {INT8}"),
    "lengths": (
        "append",
        (K, K),
        {"lengths": [1, 4]},
        ValueError,
        "lengths[1] is 4; expected at most the 3 tokens of k",
    ),
    "lengths negative": ("append", (K, K), {"lengths": [-1, 3]}, ValueError, "lengths[0] is -1; expected at least 0"),
    "lengths shape": (
        "append",
        (K, K),
        {"lengths": [1]},
        ValueError,
        "lengths has shape (1,); expected an int or (2,)",
    ),
    "attend beyond": (
        "attend",
        (np.ones((2, 2, 4, 4)), np.ones((2, 1, 4, 4)), np.ones((2, 1, 4, 4))),
        {},
        ValueError,
        "entry 0 would hold 5 + 4 tokens; expected at most 8, max_len of the cache",
    ),
    "attend k alone": ("attend", (K, K), {}, ValueError, "v is None; expected k and v together"),
    "attend v alone": ("attend", (K, None, K), {}, ValueError, "k is None; expected k and v together"),
    "attend query": ("attend", (K[..., :3], K, K), {}, ValueError, "query has width 3 but k_cache has 4"),
    "attend option": (
        "attend",
        (K, K, K),
        {"softcap": -1.0},
        ValueError,
        "softcap is -1.0; expected 0, which is none, or a positive number",
    ),
    "truncate": ("truncate", ([5, 3],), {}, ValueError, "lengths[1] is 3; expected at most 2, the tokens of entry 1"),
    "truncate int": ("truncate", (3,), {}, ValueError, "lengths is 3; expected at most 2, the tokens of entry 1"),
    "truncate huge": (
        "truncate",
        (np.array([2, 2**64 - 1], "u8"),),
        {},
        ValueError,
        f"lengths[1] is {2**64 - 1}; expected at most 2, the tokens of entry 1",
    ),
    "lengths huge": (
        "append",
        (K, K),
        {"lengths": 2**70},
        ValueError,
        f"lengths is {2**70}; expected at most the 3 tokens of k",
    ),
    "truncate negative": ("truncate", (-1,), {}, ValueError, "lengths is -1; expected at least 0"),
    "truncate float": ("truncate", ([1.0, 1.0],), {}, TypeError, "lengths has dtype float64; expected integers"),
}


@pytest.mark.parametrize("module", [sequences, reference])
@pytest.mark.parametrize("case", METHODS)
def test_a_refused_method_leaves_the_cache(rng, module, case):
    method, arguments, options, kind, text = METHODS[case]
    cache = module.KVCache(**NEW, dtype="int8")
    cache.append(draw(rng, 2, 1, 5, 4), draw(rng, 2, 1, 5, 4), lengths=[5, 2])
    names = ("k_cache", "v_cache", "k_scale", "v_scale", "seqlens")
    before = [getattr(cache, name).tobytes() for name in names]
    with pytest.raises(kind) as info:
        getattr(cache, method)(*arguments, **options)
    assert str(info.value) == text
    assert [getattr(cache, name).tobytes() for name in names] == before


@pytest.mark.parametrize("option", ["cache_seqlens", "block_table", "k_scale"])
def test_attend_takes_no_option_that_the_cache_gives(option):
    cache = reference.KVCache(**NEW)
    with pytest.raises(TypeError, match=option):
        cache.attend(np.ones((2, 1, 1, 4)), **{option: 0})


def test_signatures():
    """Written out once: a change here is a change for every user."""
    assert str(inspect.signature(reference.attention_with_kvcache)) == (
        "(query, k_cache, v_cache, k=None, v=None, *, cache_seqlens, block_table=None, k_scale=None, v_scale=None, "
        "is_causal=True, scale=None, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None, "
        "rotary_base=None, rotary_dim=None, rotary_interleaved=False, return_lse=False, out=None, num_threads=None)"
    )
    assert str(inspect.signature(reference.KVCache.append)) == "(self, k, v, *, lengths=None)"
    assert str(inspect.signature(reference.KVCache.attend)) == "(self, query, k=None, v=None, **options)"
