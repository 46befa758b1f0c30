"""What the benchmark programs make of their numbers. Nothing is timed or counted here."""

import json

import pytest

from bench import callgrind
from bench.__main__ import set_limits
from bench.cases import BY_NAME
from bench.report import share

# ---------------------------------------------------------------- instruction counts


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """A baseline by GCC 12, and as many instructions counted now."""
    counts = {
        level: {case.name: {"core": 1000, "total": 2000} for case in callgrind.CASES} for level in callgrind.LEVELS
    }
    monkeypatch.setattr(callgrind, "BASELINE", tmp_path / "callgrind.json")
    callgrind.BASELINE.write_text(json.dumps({"compiler": "GCC 12", "counts": counts}))
    monkeypatch.setattr(callgrind, "missing", lambda: None)
    monkeypatch.setattr(callgrind, "measure", lambda: counts)
    monkeypatch.setattr(callgrind, "compiler", lambda: "GCC 12")
    return counts


def skipped_with(capsys):
    """The reason that .ci/run finds after a run with exit status 77."""
    with pytest.raises(SystemExit) as stopped:
        callgrind.main([])
    assert stopped.value.code == 77
    return capsys.readouterr().out.splitlines()[-1]


def test_counts_of_another_compiler_are_no_pass(counted, monkeypatch, capsys):
    monkeypatch.setattr(callgrind, "compiler", lambda: "GCC 13")
    assert skipped_with(capsys) == "SKIPPED: not judged: the baseline is of GCC 12, this build of GCC 13"


def test_nothing_counted_is_no_pass(counted, monkeypatch, capsys):
    monkeypatch.setattr(callgrind, "missing", lambda: "valgrind is not installed")
    assert skipped_with(capsys) == "SKIPPED: valgrind is not installed"


def test_counts_as_before_pass(counted):
    assert callgrind.main([]) is None


def test_a_count_that_grew_fails(counted):
    counted["avx2"]["bias"]["core"] = 1031
    with pytest.raises(SystemExit, match=r"more than 3% above the baseline, or not in it: avx2 bias\."):
        callgrind.main([])


# ---------------------------------------------------------------- shares of the limit


def shares(level, **limits):
    """Of calls that take as long as 100 GFLOP/s or 20 GB/s allow, in a run on two threads; limits by row."""
    rows = [{"name": name.replace("_", "-"), "limits": reached} for name, reached in limits.items()]
    for row in rows:
        row["limit"] = BY_NAME[row["name"]].limit
    set_limits(rows, 2, level)
    return {row["name"]: share(row, BY_NAME[row["name"]].limit_seconds(100, 20)) for row in rows}


def test_the_limit_is_the_best_of_all_rows():
    fma = {"prefill_512_d64": [{"fma": 90}, {"fma": 80}], "prefill_512_f64": [{"fma": 200}], "vit_197": [{"fma": 125}]}
    read = {"decode_4096": [{"fma": 90, "read": 16}], "decode_32768_gqa": [{"fma": 90, "read": 25}]}
    got = shares("avx2", **fma, **read)
    assert got == pytest.approx(
        dict.fromkeys(["prefill-512-d64", "prefill-512-f64", "vit-197"], 0.5)
        | dict.fromkeys(["decode-4096", "decode-32768-gqa"], 0.8)
    )


def test_rows_of_other_threads_or_vectors_have_limits_of_their_own():
    limits = {"vit_197": [{"fma": 400}], "one_thread_512_d64": [{"fma": 125}], "avx2_512_d64": [{"fma": 200}]}
    assert shares("avx512", **limits) == pytest.approx(
        {"vit-197": 0.25, "one-thread-512-d64": 0.8, "avx2-512-d64": 0.5}
    )
    assert shares("avx2", **limits) == pytest.approx({"vit-197": 0.25, "one-thread-512-d64": 0.8, "avx2-512-d64": 0.25})


def test_without_a_limit_there_is_no_share():
    limits = {"prefill_512_d64": [], "vit_197": [{"fma": None}], "decode_4096": [{"fma": None, "read": 20}]}
    assert shares("avx2", **limits) == dict.fromkeys(["prefill-512-d64", "vit-197", "decode-4096"])
