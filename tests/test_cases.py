"""The benchmark cases at small sizes: mha_fast, its reference and the plain NumPy formula agree on each."""

from dataclasses import replace

import numpy as np
import pytest

import mha_fast
from bench.cases import BY_NAME, CASES, TOLERANCE
from bench.contestants import fast, plain, reference


def assert_agree(case, result, expected):
    assert result.shape == expected.shape and result.dtype == expected.dtype
    result, expected = (x.astype(np.float64) for x in (result, expected))
    np.testing.assert_allclose(result, expected, rtol=0, atol=TOLERANCE[case.dtype] * np.abs(expected).max())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_is_right(case):
    if case.dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    small = case.small()
    expected = reference(small, None)()
    if formula := plain(small, 1):
        assert_agree(case, expected, formula())
    call = fast(small, None)
    if call is None:
        pytest.skip(f"level {case.level} is not usable here")
    assert_agree(case, call(), expected)


def test_level_of_a_case_is_its_own():
    level = mha_fast.show_config()["level"]
    call = fast(replace(CASES[0], level="scalar"), None)
    call()
    assert mha_fast.show_config()["level"] == level


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)


def test_flops_count_visible_pairs_only():
    assert BY_NAME["prefill-512-d64"].flops() == 4 * 8 * 12 * 512 * 512 * 64
    assert BY_NAME["causal-512-d64"].flops() == 4 * 8 * 12 * (512 * 513 // 2) * 64


@pytest.mark.parametrize("name", ["causal-512-d64", "ragged-512", "window-256-16384", "chunk-256-of-4096"])
def test_pairs_are_those_of_the_mask(name):
    small = BY_NAME[name].small()
    assert small.pairs() == np.broadcast_to(small.visible({}), (small.batch, 1, small.q_len, small.kv_len)).sum()


def test_packed_sequences_see_themselves_alone():
    case = BY_NAME["varlen-512"]
    assert case.pairs() == (case.lengths() ** 2).sum()


def test_limit_of_a_decode_case_is_reading():
    decode = BY_NAME["decode-4096"]
    assert decode.limit == "read" and decode.kv_bytes() == 2 * 32 * 4096 * 128 * 4
    assert decode.limit_seconds(peak_gflops=1e6, read_gbs=10) == decode.kv_bytes() / 10e9
    assert BY_NAME["cache-int8-32768"].kv_bytes() == 2 * 32 * 32768 * 128
    assert BY_NAME["layer-bert-8x512"].limit == "fma"
    assert BY_NAME["tiny-article"].limit == "call"


def test_only_a_level_with_dot_products_of_bfloat16_is_held_to_their_peak():
    half, single = BY_NAME["prefill-512-bf16"], BY_NAME["prefill-512-d64"]
    peaks = [case.peak(level) for case in (half, single) for level in ("avx512", "avx512_bf16")]
    assert peaks == ["fma", "dot", "fma", "fma"]
