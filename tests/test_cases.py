"""The benchmark cases at small sizes: mha_fast and its reference agree with the plain NumPy formula on each."""

import numpy as np
import pytest

from bench.cases import CASES
from bench.contestants import fast, plain, reference

# Sums of some hundred products of unit variance: far above rounding, far below any wrong key.
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


@pytest.mark.parametrize("contestant", [fast, reference])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_is_right(case, contestant):
    small = case.small()
    expected = plain(small, 1)()
    result = contestant(small, None)()
    assert result.shape == expected.shape and result.dtype == expected.dtype
    np.testing.assert_allclose(result, expected, rtol=0, atol=TOLERANCE[case.dtype] * np.abs(expected).max())


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


def test_flops_count_visible_pairs_only():
    square, causal = (
        next(case for case in CASES if case.name == name) for name in ("prefill-512-d64", "causal-512-d64")
    )
    assert square.flops() == 4 * 8 * 12 * 512 * 512 * 64
    assert causal.flops() == 4 * 8 * 12 * (512 * 513 // 2) * 64
