"""The benchmark cases at small sizes: mha_fast and its reference agree with the plain NumPy formula on each."""

from dataclasses import replace

import numpy as np
import pytest

import mha_fast
from bench.cases import CASES
from bench.contestants import fast, plain, reference

# Sums of some hundred products of unit variance: far above rounding, far below any wrong key.
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


@pytest.mark.parametrize("contestant", [fast, reference])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_is_right(case, contestant):
    small = case.small()
    expected = plain(small, 1)()
    call = contestant(small, None)
    if call is None:
        pytest.skip(f"level {case.level} is not usable here")
    result = call()
    assert result.shape == expected.shape and result.dtype == expected.dtype
    np.testing.assert_allclose(result, expected, rtol=0, atol=TOLERANCE[case.dtype] * np.abs(expected).max())


def test_level_of_a_case_is_its_own():
    level = mha_fast.show_config()["level"]
    call = fast(replace(CASES[0], level="scalar"), None)
    call()
    assert mha_fast.show_config()["level"] == level


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


def test_flops_count_visible_pairs_only():
    square, causal = (
        next(case for case in CASES if case.name == name) for name in ("prefill-512-d64", "causal-512-d64")
    )
    assert square.flops() == 4 * 8 * 12 * 512 * 512 * 64
    assert causal.flops() == 4 * 8 * 12 * (512 * 513 // 2) * 64


def test_limit_of_a_decode_case_is_reading():
    decode = next(case for case in CASES if case.name == "decode-4096")
    assert decode.limit == "read" and decode.kv_bytes() == 2 * 32 * 4096 * 128 * 4
    assert decode.limit_seconds(fma_gflops=1e6, read_gbs=10) == decode.kv_bytes() / 10e9
    assert next(case for case in CASES if case.name == "layer-bert-8x512").limit == "fma"
    assert next(case for case in CASES if case.name == "tiny-article").limit == "call"
