"""Packed sequences and merged parts: equal to loops and to whole calls, and every wrong argument."""

import inspect
import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from conftest import DTYPES, STORED, allowed, assert_close, draw, exact, largest, largest_score, rounding, wide

import mha_fast
from mha_fast import reference, sequences

STORED_DTYPES = (*DTYPES, *STORED)
every_dtype = pytest.mark.parametrize("dtype", STORED_DTYPES)
# Lengths of the sequences' queries and keys: equal, fewer queries, more queries, none of either, across tiles.
LENGTHS = [(5, 5), (3, 20), (20, 3), (0, 4), (4, 0), (0, 0), (1, 300), (70, 65)]
SCORES = {
    "window": {"window_size": (3, 1)},
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": np.array([0.5, 0.1, 0.0, 1.0])},
    "slopes of each": {"alibi_slopes": np.linspace(0, 1, 4 * len(LENGTHS)).reshape(-1, 4)},
    "sinks": {"sinks": np.array([0.0, 1.0, -2.0, 5.0])},
}


def computed_in(dtype):
    return "float32" if dtype in STORED else dtype


class Packed:
    """Sequences of `LENGTHS` behind each other, (tokens, heads, width)."""

    def __init__(self, rng, dtype, heads=4, kv_heads=2, width=24, value_width=10, lengths=LENGTHS):
        self.q_ends, self.k_ends = (np.cumsum([0, *column]) for column in zip(*lengths, strict=True))
        self.query = draw(rng, self.q_ends[-1], heads, width, dtype=dtype)
        self.key = draw(rng, self.k_ends[-1], kv_heads, width, dtype=dtype)
        self.value = draw(rng, self.k_ends[-1], kv_heads, value_width, dtype=dtype)
        compute = computed_in(dtype)
        score = largest_score(*(self.bhld(x) for x in (self.query, self.key)))
        bound = allowed(compute, width, score)
        top = largest(wide(self.value))
        self.limits = bound * top + rounding(dtype, top), bound

    @staticmethod
    def bhld(x):
        return wide(x).swapaxes(0, 1)[None]

    def run(self, forms, **options):
        return forms.varlen_attention(
            self.query, self.key, self.value, self.q_ends, self.k_ends, enable_gqa=True, return_lse=True, **options
        )

    def loop(self, **options):
        """Each sequence by itself in float64."""
        outs, lses = [], []
        sequences = zip(itertools.pairwise(self.q_ends), itertools.pairwise(self.k_ends), strict=True)
        for b, ((q, q_end), (k, k_end)) in enumerate(sequences):
            own = {n: x[b] if n == "alibi_slopes" and x.ndim == 2 else x for n, x in options.items()}
            out, lse, _ = exact(
                self.bhld(self.query[q:q_end]),
                self.bhld(self.key[k:k_end]),
                self.bhld(self.value[k:k_end]),
                enable_gqa=True,
                q_offset=(k_end - k) - (q_end - q),
                **own,
            )
            outs.append(out[0].swapaxes(0, 1))
            lses.append(lse[0])
        return np.concatenate(outs), np.concatenate(lses, axis=1)

    def same(self, got, want):
        for name, g, w, limit in zip(("out", "lse"), got, want, self.limits, strict=True):
            assert_close(g, w, limit, name)


# ---------------------------------------------------------------- packed sequences


@every_dtype
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_is_a_loop_over_sequences(rng, forms, dtype, is_causal):
    x = Packed(rng, dtype)
    out, lse = x.run(forms, is_causal=is_causal)
    assert out.dtype == dtype
    assert lse.dtype == computed_in(dtype)
    x.same((out, lse), x.loop(is_causal=is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", SCORES)
def test_every_option_holds_in_each_sequence(rng, forms, case, is_causal):
    x = Packed(rng, "float32")
    x.same(x.run(forms, is_causal=is_causal, **SCORES[case]), x.loop(is_causal=is_causal, **SCORES[case]))


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_is_one_call_under_a_mask_of_blocks(rng, forms, is_causal):
    """Another oracle than the loop: all tokens in one sequence, and a mask that shows each query its own."""
    x = Packed(rng, "float64")
    mask = np.zeros((x.q_ends[-1], x.k_ends[-1]), bool)
    for b, (q_len, k_len) in enumerate(LENGTHS):
        i, j = np.arange(q_len)[:, None], np.arange(k_len)
        block = (j <= i + k_len - q_len) if is_causal else np.ones((q_len, k_len), bool)
        mask[x.q_ends[b] : x.q_ends[b + 1], x.k_ends[b] : x.k_ends[b + 1]] = block
    out, lse, _ = exact(*(x.bhld(a) for a in (x.query, x.key, x.value)), mask, enable_gqa=True)
    x.same(x.run(forms, is_causal=is_causal), (out[0].swapaxes(0, 1), lse[0]))


def test_one_sequence_is_attention(rng, forms):
    x = Packed(rng, "float64", lengths=[(30, 30)])
    out, lse, _ = exact(*(x.bhld(a) for a in (x.query, x.key, x.value)), enable_gqa=True, is_causal=True)
    got = forms.varlen_attention(x.query, x.key, x.value, [0, 30], is_causal=True, enable_gqa=True, return_lse=True)
    x.same(got, (out[0].swapaxes(0, 1), lse[0]))


def test_slices_of_one_fused_array_and_out(rng, forms):
    tokens = draw(rng, 12, 3, 2, 8, dtype="float32")
    query, key, value = (tokens[:, i] for i in range(3))
    ends = np.array([0, 5, 12], np.int32)
    want = forms.varlen_attention(*(x.copy() for x in (query, key, value)), ends)
    room = np.full((12, 2, 16), np.nan, np.float32)
    out = room[:, :, ::2]
    assert forms.varlen_attention(query, key, value, ends, out=out) is out
    assert np.array_equal(out, want)
    assert np.isnan(room[:, :, 1::2]).all()
    reversed_ = forms.varlen_attention(query[::-1], key[::-1], value[::-1], [0, 7, 12])[::-1]
    assert np.allclose(reversed_, want, rtol=0, atol=1e-6)


def test_what_a_sequence_holds_stays_in_it(rng, forms):
    x = Packed(rng, "float32")
    want = x.run(forms)
    x.key[x.k_ends[1] : x.k_ends[2]] = np.nan
    x.value[x.k_ends[1] : x.k_ends[2]] = np.inf
    got = x.run(forms)
    others = np.r_[0 : x.q_ends[1], x.q_ends[2] : x.q_ends[-1]]
    assert np.array_equal(got[0][others], want[0][others])
    assert np.array_equal(got[1][:, others], want[1][:, others])
    assert np.isnan(got[0][x.q_ends[1] : x.q_ends[2]]).all()


def test_queries_without_keys_give_zeros(forms):
    out, lse = forms.varlen_attention(
        np.ones((3, 2, 4)), np.ones((5, 2, 4)), np.ones((5, 2, 4)), [0, 3, 3], [0, 0, 5], return_lse=True
    )
    assert not out.any()
    assert (lse == -np.inf).all()
    # Causal with more queries than keys: the first ones see none.
    out, lse = forms.varlen_attention(
        np.ones((3, 2, 4)), np.ones((1, 2, 4)), np.ones((1, 2, 4)), [0, 3], [0, 1], is_causal=True, return_lse=True
    )
    assert np.array_equal(out[:, 0, 0], [0, 0, 1])
    assert np.array_equal(lse[0] > -np.inf, [False, False, True])


@pytest.mark.parametrize("zeros", range(1, 32))
def test_empty_arrays(forms, zeros):
    tokens_q, tokens_k, heads, width, value_width = (0 if zeros >> bit & 1 else 2 for bit in range(5))
    arrays = (
        np.ones((tokens_q, heads, width)),
        np.ones((tokens_k, heads, width)),
        np.ones((tokens_k, heads, value_width)),
    )
    out, lse = forms.varlen_attention(*arrays, [0, tokens_q], [0, tokens_k], is_causal=True, return_lse=True)
    assert out.shape == (tokens_q, heads, value_width)
    assert lse.shape == (heads, tokens_q)


def test_no_sequences(forms):
    none = np.ones((0, 2, 4))
    assert forms.varlen_attention(none, none, none, np.array([0])).shape == (0, 2, 4)


@pytest.mark.parametrize(
    "dtypes, result",
    [
        (("float16", "float16", "float16"), "float16"),
        (("bfloat16", "bfloat16", "bfloat16"), "bfloat16"),
        (("float16", "bfloat16", "bfloat16"), "float32"),
        (("float32", "bfloat16", "float16"), "float32"),
        (("float16", "float64", "float16"), "float64"),
        (("int8", "float32", "float32"), "float64"),
    ],
)
def test_dtypes_are_promoted(rng, forms, dtypes, result):
    arrays = [draw(rng, 4, 2, 8, dtype=dtype) for dtype in dtypes]
    got = forms.varlen_attention(*arrays, [0, 1, 4])
    assert got.dtype == result
    want = forms.varlen_attention(*(x.astype(np.float64) for x in arrays), [0, 1, 4])
    assert np.allclose(got.astype(np.float64), want, rtol=0, atol=0.02 if result in ("float16", "bfloat16") else 1e-5)


def ones(*shape, dtype="float64"):
    return np.ones(shape, dtype)


def base():
    return {"query": ones(7, 4, 6), "key": ones(9, 2, 6), "value": ones(9, 2, 5), "enable_gqa": True,
            "cu_seqlens_q": np.array([0, 3, 7]), "cu_seqlens_k": np.array([0, 3, 9])}  # fmt: skip


SUPPORTED = "float16, bfloat16, float32 and float64 are supported, bool and integers become float64"
VARLEN = {
    "query rank": (
        {"query": ones(1, 7, 4, 6)},
        ValueError,
        "query has shape (1, 7, 4, 6); expected 3 dimensions: (tokens, heads, width)",
    ),
    "value rank": (
        {"value": ones(9, 2)},
        ValueError,
        "value has shape (9, 2); expected 3 dimensions: (tokens, heads, width)",
    ),
    "width": ({"key": ones(9, 2, 7)}, ValueError, "query has width 6 but key has 7"),
    "tokens": ({"value": ones(8, 2, 5)}, ValueError, "key has 9 tokens but value has 8"),
    "heads": ({"value": ones(9, 4, 5)}, ValueError, "key has 2 heads but value has 4"),
    "no groups": (
        {"enable_gqa": False},
        ValueError,
        "query has 4 heads but key has 2; expected the same, or enable_gqa=True and a multiple",
    ),
    "no multiple": (
        {"query": ones(7, 5, 6)},
        ValueError,
        "query has 5 heads, which is no multiple of the 2 heads of key",
    ),
    "complex": ({"query": ones(7, 4, 6, dtype="c8")}, TypeError, f"query has dtype complex64; {SUPPORTED}"),
    "float8": (
        {"key": ones(9, 2, 6, dtype=ml_dtypes.float8_e4m3fn)},
        TypeError,
        f"key has dtype float8_e4m3fn; {SUPPORTED}",
    ),
    "offsets float": (
        {"cu_seqlens_q": [0.0, 3.0, 7.0]},
        TypeError,
        "cu_seqlens_q has dtype float64; expected int32 or int64",
    ),
    "offsets unsigned": (
        {"cu_seqlens_k": np.array([0, 3, 9], "u8")},
        TypeError,
        "cu_seqlens_k has dtype uint64; expected int32 or int64",
    ),
    "offsets short": (
        {"cu_seqlens_k": np.array([0, 3, 9], "i2")},
        TypeError,
        "cu_seqlens_k has dtype int16; expected int32 or int64",
    ),
    "offsets rank": (
        {"cu_seqlens_q": np.array([[0, 3, 7]])},
        ValueError,
        "cu_seqlens_q has shape (1, 3); expected one dimension: an offset per sequence and the end",
    ),
    "no offsets": (
        {"cu_seqlens_q": np.array([], int)},
        ValueError,
        "cu_seqlens_q has shape (0,); expected one dimension: an offset per sequence and the end",
    ),
    "offsets None": ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q has dtype object; expected int32 or int64"),
    "first offset": ({"cu_seqlens_q": [1, 3, 7]}, ValueError, "cu_seqlens_q[0] is 1; expected 0"),
    "negative offset": ({"cu_seqlens_q": [-1, 3, 7]}, ValueError, "cu_seqlens_q[0] is -1; expected 0"),
    "decreasing": (
        {"cu_seqlens_k": [0, 10, 9]},
        ValueError,
        "cu_seqlens_k[2] is 9 after 10; expected offsets that do not decrease",
    ),
    "decreasing by more than 64 bits hold": (
        {"cu_seqlens_k": np.array([0, 2**63 - 1, -(2**63), 9])},
        ValueError,
        f"cu_seqlens_k[2] is {-(2**63)} after {2**63 - 1}; expected offsets that do not decrease",
    ),
    "beyond the end": (
        {"cu_seqlens_q": [0, 3, 8]},
        ValueError,
        "cu_seqlens_q[2] is 8; expected 7, the number of tokens of query",
    ),
    "before the end": (
        {"cu_seqlens_k": [0, 3, 8]},
        ValueError,
        "cu_seqlens_k[2] is 8; expected 9, the number of tokens of key",
    ),
    "numbers of sequences": (
        {"cu_seqlens_k": [0, 9]},
        ValueError,
        "cu_seqlens_q has 3 offsets but cu_seqlens_k has 2",
    ),
    "keys without offsets": (
        {"cu_seqlens_k": None},
        ValueError,
        "key has 9 tokens but query has 7; expected the same number, or cu_seqlens_k",
    ),
    "is_causal": ({"is_causal": 1}, TypeError, "is_causal is 1; expected True or False"),
    "return_lse": ({"return_lse": None}, TypeError, "return_lse is None; expected True or False"),
    "scale": ({"scale": math.inf}, ValueError, "scale is inf; expected a finite number"),
    "window int": (
        {"window_size": 3},
        TypeError,
        "window_size is 3; expected a pair (left, right): how many keys before and behind its own position a query "
        "sees, -1 for no limit",
    ),
    "window below -1": ({"window_size": (-2, 0)}, ValueError, "window_size[0] is -2; expected at least -1"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap is -1.0; expected 0, which is none, or a positive number"),
    "softcap NaN": ({"softcap": math.nan}, ValueError, "softcap is nan; expected a finite number"),
    "slopes": (
        {"alibi_slopes": ones(3, 4)},
        ValueError,
        "alibi_slopes has shape (3, 4); expected (4,) or (2, 4): a number for each query head",
    ),
    "sinks": ({"sinks": ones(2)}, ValueError, "sinks has shape (2,); expected (4,): a number for each query head"),
    "slopes infinite": (
        {"alibi_slopes": [0.0, math.inf, 0.0, 0.0]},
        ValueError,
        "alibi_slopes holds NaN or infinity; expected finite numbers",
    ),
    "integers beside bfloat16": (
        {"query": ones(7, 4, 6, dtype=int), "value": ones(9, 2, 5, dtype=ml_dtypes.bfloat16)},
        TypeError,
        "query has dtype int64 and value has dtype bfloat16; expected floating numbers beside bfloat16",
    ),
    "sinks dtype": ({"sinks": ["a"] * 4}, TypeError, f"sinks has dtype <U1; {SUPPORTED}"),
    "threads": ({"num_threads": 0}, ValueError, "num_threads is 0; expected at least 1"),
    "out shape": ({"out": ones(7, 4, 6)}, ValueError, "out has shape (7, 4, 6); expected (7, 4, 5)"),
    "out dtype": ({"out": ones(7, 4, 5, dtype="f4")}, TypeError, "out has dtype float32; expected float64"),
}


@pytest.mark.parametrize("module", [sequences, reference])
@pytest.mark.parametrize("case", VARLEN)
def test_varlen_errors(module, case):
    changed, kind, text = VARLEN[case]
    with pytest.raises(kind) as info:
        module.varlen_attention(**(base() | changed))
    assert str(info.value) == text


def test_out_must_not_overlap(forms):
    x = base() | {"value": ones(9, 2, 6)}
    with pytest.raises(ValueError, match="out shares memory with query; expected memory of its own"):
        forms.varlen_attention(**x, out=x["query"])


# ---------------------------------------------------------------- merged parts


def parts(rng, dtype, cuts, keys=600, **options):
    """Attention over pieces of the keys, and over all of them in float64."""
    query, key, value = draw(rng, 2, 4, 5, 16), draw(rng, 2, 2, keys, 16), draw(rng, 2, 2, keys, 8)
    compute = computed_in(dtype)
    query, key, value = (x.astype(dtype).astype(compute) for x in (query, key, value))
    edges = [0, *cuts, keys]
    pieces = [
        mha_fast.scaled_dot_product_attention(
            query, key[:, :, a:b], value[:, :, a:b], enable_gqa=True, return_lse=True, **options
        )
        for a, b in itertools.pairwise(edges)
    ]
    outs, lses = (np.stack(x) for x in zip(*pieces, strict=True))
    bound = 2 * allowed(compute, 16, largest_score(query, key))
    # Parts and result are both rounded to what is stored.
    limits = bound * largest(value) + 2 * rounding(dtype, largest(value)), bound
    return outs.astype(dtype), lses, exact(query, key, value, enable_gqa=True, **options)[:2], limits


@every_dtype
@pytest.mark.parametrize("cuts", [[], [1], [300], [7, 7, 256, 599], [0, 0, 600, 600]])
def test_parts_of_the_keys_merge_to_the_whole(rng, isa, dtype, cuts):
    outs, lses, want, limits = parts(rng, dtype, cuts)
    got = reference.merge_states(outs, lses)
    assert got[0].dtype == dtype
    assert got[1].dtype == computed_in(dtype)
    for name, g, w, limit in zip(("out", "lse"), got, want, limits, strict=True):
        assert_close(g, w, limit, name)


def test_merging_in_any_order_and_by_steps(rng):
    outs, lses, want, limits = parts(rng, "float64", [100, 250, 400])
    order = [2, 0, 3, 1]
    stepwise = outs[0], lses[0]
    for out, lse in zip(outs[1:], lses[1:], strict=True):
        stepwise = reference.merge_states((stepwise[0], out), (stepwise[1], lse))
    for got in (reference.merge_states(outs[order], lses[order]), stepwise):
        for g, w, limit in zip(got, want, limits, strict=True):
            assert_close(g, w, limit)


def test_one_part_keeps_its_bits(rng):
    outs, lses, _, _ = parts(rng, "float32", [])
    out, lse = reference.merge_states(outs, lses)
    assert np.array_equal(out, outs[0])
    assert np.array_equal(lse, lses[0])


@pytest.mark.parametrize("junk", [0.0, 1e30, -7.0, math.nan, math.inf])
def test_an_empty_part_changes_no_bit(rng, junk):
    outs, lses, _, _ = parts(rng, "float32", [200])
    want = reference.merge_states(outs, lses)
    for place in (0, 1, 2):
        more = np.insert(outs, place, np.float32(junk), axis=0), np.insert(lses, place, -np.inf, axis=0)
        assert all(np.array_equal(g, w) for g, w in zip(reference.merge_states(*more), want, strict=True))


def test_parts_that_are_all_empty():
    for n in (0, 1, 3):
        out, lse = reference.merge_states(np.full((n, 2, 4, 3), np.nan), np.full((n, 2, 4), -np.inf))
        assert np.array_equal(out, np.zeros((2, 4, 3)))
        assert np.array_equal(lse, np.full((2, 4), -np.inf))


def test_a_row_is_empty_by_itself():
    out, lse = reference.merge_states([[[1.0], [2.0]], [[3.0], [4.0]]], [[0.0, -np.inf], [-np.inf, -np.inf]])
    assert out.tolist() == [[1.0], [0.0]]
    assert lse.tolist() == [0.0, -np.inf]


def test_nan_spoils_its_own_rows_alone():
    outs, lses = np.ones((2, 3, 4)), np.zeros((2, 3))
    outs[0, 0, 1] = np.nan
    lses[1, 1] = np.nan
    out, lse = reference.merge_states(outs, lses)
    assert np.argwhere(np.isnan(out)).tolist() == [[0, 1], [1, 0], [1, 1], [1, 2], [1, 3]]
    assert np.isnan(lse).tolist() == [False, True, False]


@pytest.mark.parametrize("height", [-1e5, 1e5])
def test_large_sums_do_not_overflow(height):
    out, lse = reference.merge_states(np.array([[[1.0]], [[3.0]]]), np.array([[height], [height]]))
    assert out.item() == 2.0
    assert lse.item() == height + math.log(2)
    out, _ = reference.merge_states(np.array([[[1.0]], [[3.0]]]), np.array([[height], [height - 1e4]]))
    assert out.item() == 1.0


MERGE = {
    "dtype": ((ones(2, 3, 4, dtype="c16"), ones(2, 3)), TypeError, f"outs has dtype complex128; {SUPPORTED}"),
    "lse dtype": (
        (ones(2, 3, 4), ones(2, 3, dtype="f2")),
        TypeError,
        "lses has dtype float16; expected float32 or float64",
    ),
    "lse integers": (
        (ones(2, 3, 4), ones(2, 3, dtype=int)),
        TypeError,
        "lses has dtype int64; expected float32 or float64",
    ),
    "rank": (
        (ones(2, 3), ones(2)),
        ValueError,
        "outs has shape (2, 3); expected at least 3 dimensions: states, queries and width",
    ),
    "shapes": (
        (ones(2, 3, 4), ones(3, 3)),
        ValueError,
        "lses has shape (3, 3); expected (2, 3), that of outs without the width",
    ),
}


@pytest.mark.parametrize("case", MERGE)
def test_merge_errors(case):
    arguments, kind, text = MERGE[case]
    with pytest.raises(kind) as info:
        reference.merge_states(*arguments)
    assert str(info.value) == text


def test_ragged_parts_are_an_error():
    with pytest.raises(ValueError, match="outs cannot be converted to an array"):
        reference.merge_states([ones(3, 4), ones(2, 4)], [ones(3), ones(2)])


# ---------------------------------------------------------------- one interface


@pytest.mark.parametrize("name", sequences.__all__)
def test_both_forms_have_the_same_signatures(name):
    fast, slow = getattr(sequences, name), getattr(reference, name)
    assert str(inspect.signature(fast)) == str(inspect.signature(slow))
    assert fast.__doc__.replace("mha_fast.reference", "mha_fast") == slow.__doc__.replace(
        "mha_fast.reference", "mha_fast"
    )
