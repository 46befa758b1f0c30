"""The cases under pytest-benchmark: `python -m pytest bench`, one group a case, one row a contestant."""

import pytest

import mha_fast
from bench.cases import CASES
from bench.contestants import CONTESTANTS

pytest.importorskip("pytest_benchmark")


@pytest.mark.parametrize("contestant", CONTESTANTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(benchmark, case, contestant):
    if case.dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    call = CONTESTANTS[contestant](case, mha_fast.get_num_threads())
    if call is None:
        pytest.skip(f"{contestant} does not offer this case")
    benchmark.group = case.name
    benchmark(call)
