"""Rules that hold between calls, without an oracle: Hypothesis draws sizes and seeds, the same ones in every run."""

import itertools

import numpy as np
import pytest
from conftest import DTYPES, allowed, assert_close, largest, largest_score
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mha_fast import scaled_dot_product_attention as attend

# The fixture `isa` holds for all examples of a test.
fixed = settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
pytestmark = pytest.mark.parametrize("dtype", DTYPES)


@st.composite
def sizes(draw, most_keys=600):
    """(batch, heads, kv heads, queries, keys, width, value width): small ones, and some past a panel or block."""
    queries = draw(st.one_of(st.integers(1, 12), st.integers(1, 110)))
    keys = draw(st.one_of(st.integers(1, 40), st.integers(1, most_keys)))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return (
        draw(st.integers(1, 2)),
        kv_heads * group,
        kv_heads,
        queries,
        keys,
        draw(st.integers(1, 40)),
        draw(st.integers(1, 40)),
    )


seeds = st.integers(0, 2**32 - 1)


class Inputs:
    def __init__(self, sizes, seed, dtype):
        self.batch, heads, kv_heads, self.queries, self.keys, width, value_width = sizes
        self.rng = np.random.default_rng(seed)
        self.heads, self.dtype = heads, dtype
        self.query = self.normal(self.batch, heads, self.queries, width)
        self.key = self.normal(self.batch, kv_heads, self.keys, width)
        self.value = self.normal(self.batch, kv_heads, self.keys, value_width)
        self.mask = self.rng.random((self.queries, self.keys)) < 0.7

    def normal(self, *shape):
        return self.rng.standard_normal(shape).astype(self.dtype)

    def run(self, mask=None, query=None, key=None, value=None, **options):
        query, key, value = (
            own if given is None else given
            for own, given in ((self.query, query), (self.key, key), (self.value, value))
        )
        options = {"enable_gqa": True, "return_lse": True} | options
        return attend(query, key, value, mask, **options)

    def same(self, got, want, bias=0.0):
        """Each of two results is within the bound of the exact one."""
        bound = 2 * allowed(self.dtype, self.query.shape[-1], largest_score(self.query, self.key) + bias)
        for name, size, g, w in zip(("out", "lse"), (largest(self.value), 1.0), got, want, strict=True):
            assert_close(g, w, bound * size, name)


@fixed
@given(sizes=sizes(), seed=seeds)
def test_the_order_of_the_keys_does_not_matter(isa, dtype, sizes, seed):
    x = Inputs(sizes, seed, dtype)
    order = x.rng.permutation(x.keys)
    got = x.run(x.mask[:, order], key=x.key[:, :, order], value=x.value[:, :, order])
    x.same(got, x.run(x.mask))


@fixed
@given(sizes=sizes(), seed=seeds, shift=st.floats(-1000, 1000, width=16))
def test_a_constant_added_to_the_scores_shifts_the_lse_alone(isa, dtype, sizes, seed, shift):
    x = Inputs(sizes, seed, dtype)
    hidden = np.where(x.mask, 0, -np.inf).astype(dtype)
    out, lse = x.run(hidden)
    x.same(x.run(hidden + np.dtype(dtype).type(shift)), (out, lse.astype(np.float64) + shift), abs(shift))


@fixed
@given(sizes=sizes(), seed=seeds, kept=st.integers(1, 110))
def test_the_first_rows_of_a_causal_call_need_the_first_keys_alone(isa, dtype, sizes, seed, kept):
    x = Inputs(sizes, seed, dtype)
    kept = min(kept, x.queries, x.keys)
    whole = x.run(is_causal="upper_left")
    part = x.run(query=x.query[:, :, :kept], key=x.key[:, :, :kept], value=x.value[:, :, :kept], is_causal="upper_left")
    x.same(part, [r[:, :, :kept] for r in whole])


@fixed
@given(sizes=sizes(), seed=seeds, kind=st.sampled_from(["bool", "float", "causal and lengths"]))
def test_hidden_keys_are_as_good_as_removed(isa, dtype, sizes, seed, kind):
    x = Inputs(sizes, seed, dtype)
    keep = x.rng.random(x.keys) < 0.5
    want = x.run(key=x.key[:, :, keep], value=x.value[:, :, keep])
    mask = keep if kind != "float" else np.where(keep, 0, -np.inf).astype(dtype)
    more = {"valid_lens": [x.keys] * x.batch, "is_causal": True, "q_offset": x.keys} if " " in kind else {}
    x.same(x.run(mask, **more), want)


@fixed
@given(sizes=sizes(most_keys=1500), seed=seeds, where=st.floats(0, 1))
def test_two_halves_merge_through_their_lse(isa, dtype, sizes, seed, where):
    x = Inputs(sizes, seed, dtype)
    cut = int(where * x.keys)
    parts = [
        x.run(x.mask[:, part], key=x.key[:, :, part], value=x.value[:, :, part])
        for part in (slice(0, cut), slice(cut, x.keys))
    ]
    (a, a_lse), (b, b_lse) = ([r.astype(np.float64) for r in part] for part in parts)
    lse = np.logaddexp(a_lse, b_lse)
    with np.errstate(invalid="ignore"):
        shares = [np.where(np.isneginf(lse), 0, np.exp(part - lse))[..., None] for part in (a_lse, b_lse)]
    x.same(x.run(x.mask), (a * shares[0] + b * shares[1], lse))


@fixed
@given(sizes=sizes(), seed=seeds)
def test_lengths_are_slices(isa, dtype, sizes, seed):
    x = Inputs(sizes, seed, dtype)
    lengths = x.rng.integers(0, x.keys + 1, x.batch)
    got = x.run(valid_lens=lengths)
    for b, n in enumerate(lengths):
        want = x.run(query=x.query[b], key=x.key[b, :, :n], value=x.value[b, :, :n])
        x.same([r[b] for r in got], want)


@fixed
@given(sizes=sizes(), seed=seeds, offset=st.integers(-130, 700))
def test_positions_are_lengths_of_each_query(isa, dtype, sizes, seed, offset):
    """j <= i + offset is j < i + offset + 1: one border, two spellings, the same bits; and a mask is the third."""
    x = Inputs(sizes, seed, dtype)
    ends = np.arange(x.queries) + offset + 1
    want = x.run(is_causal=True, q_offset=offset)
    for g, w in zip(x.run(valid_lens=np.tile(ends, (x.batch, 1))), want, strict=True):
        assert np.array_equal(g, w)
    x.same(x.run(np.arange(x.keys) < ends[:, None]), want)


@fixed
@given(sizes=sizes(), seed=seeds)
def test_false_is_minus_infinity_and_zero_is_nothing(isa, dtype, sizes, seed):
    x = Inputs(sizes, seed, dtype)
    x.same(x.run(np.where(x.mask, 0, -np.inf).astype(dtype)), x.run(x.mask))
    x.same(x.run(np.zeros((x.queries, x.keys), dtype)), x.run())


@fixed
@given(sizes=sizes(), seed=seeds)
def test_a_finite_bias_is_one_more_column_of_the_keys(isa, dtype, sizes, seed):
    """q k + b is (q, 1) (k, b)."""
    x = Inputs(sizes, seed, dtype)
    bias = x.normal(x.keys)
    ones = np.ones((*x.query.shape[:-1], 1), dtype)
    column = np.broadcast_to(bias[:, None], (*x.key.shape[:-1], 1))
    wider = x.run(query=np.concatenate([x.query, ones], -1), key=np.concatenate([x.key, column], -1), scale=1.0)
    x.same(wider, x.run(bias, scale=1.0), largest(bias) + 6 * largest_score(x.query, x.key, scale=1.0))


@fixed
@given(sizes=sizes(), seed=seeds)
def test_grouped_heads_are_repeated_heads(isa, dtype, sizes, seed):
    x = Inputs(sizes, seed, dtype)
    group = x.heads // x.key.shape[1]
    repeated = (np.repeat(r, group, axis=1) for r in (x.key, x.value))
    key, value = repeated
    x.same(x.run(x.mask), x.run(x.mask, key=key, value=value, enable_gqa=False))


@fixed
@given(sizes=sizes(), seed=seeds, scale=st.sampled_from([1.0, -1.0, 0.5, -0.25, 2.0]))
def test_the_scale_may_lie_in_the_query(isa, dtype, sizes, seed, scale):
    """A power of two loses nothing: the same bits."""
    x = Inputs(sizes, seed, dtype)
    for g, w in zip(x.run(scale=scale), x.run(query=x.query * np.dtype(dtype).type(scale), scale=1.0), strict=True):
        assert np.array_equal(g, w)


@fixed
@given(sizes=sizes(), seed=seeds)
def test_an_entry_alone_is_that_entry_in_the_batch(isa, dtype, sizes, seed):
    """Every (batch entry, kv head) is a call of its own, to the last bit."""
    x = Inputs(sizes, seed, dtype)
    lengths = x.rng.integers(0, x.keys + 1, (x.batch, x.queries))
    group = x.heads // x.key.shape[1]
    got = x.run(x.mask, valid_lens=lengths)
    for b, h in itertools.product(range(x.batch), range(x.key.shape[1])):
        heads = slice(h * group, (h + 1) * group)
        arrays = {"query": x.query[b, heads], "key": x.key[b, h : h + 1], "value": x.value[b, h : h + 1]}
        for g, w in zip(got, x.run(x.mask, **arrays, valid_lens=lengths[b]), strict=True):
            assert np.array_equal(g[b, heads], w)


@fixed
@given(sizes=sizes(), seed=seeds)
def test_values_enter_linearly(isa, dtype, sizes, seed):
    """Twice the values are twice the result, to the last bit; columns do not meet."""
    x = Inputs(sizes, seed, dtype)
    out, lse = x.run(x.mask)
    for g, w in zip(x.run(x.mask, value=2 * x.value), (2 * out, lse), strict=True):
        assert np.array_equal(g, w)
    first = x.run(x.mask, value=x.value[..., :1])[0]
    assert np.array_equal(first, out[..., :1])


@fixed
@given(sizes=sizes(), seed=seeds)
def test_a_result_lies_between_the_values_it_sees(isa, dtype, sizes, seed):
    x = Inputs(sizes, seed, dtype)
    out, lse = x.run(x.mask)
    seen = np.broadcast_to(x.mask.any(axis=1), lse.shape)
    slack = allowed(dtype, 1, 1) * largest(x.value)
    assert (np.abs(out[seen]) <= largest(x.value) + slack).all()
    assert not out[~seen].any() and np.array_equal(np.isneginf(lse), ~seen)
