"""What the benchmark programs make of their numbers. Nothing is timed or counted here."""

import json

import pytest

from bench import callgrind

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
