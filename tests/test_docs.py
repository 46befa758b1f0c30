"""Every example in a docstring and in the README runs and shows what it says."""

import doctest
import re
from pathlib import Path

import pytest

NAMES = (
    "_core",
    "attention",
    "reference",
    "_reference_sequences",
    "sequences",
    "_validate",
    "_validate_sequences",
    "_config",
    "_weights",
)
MODULES = ["mha_fast", *(f"mha_fast.{name}" for name in (*NAMES, "plot", "onnx"))]
README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = pytest.importorskip(name, exc_type=ImportError)  # some need a package that is optional
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in finder.find(module, name):
        runner.run(test)
    assert runner.failures == 0


def test_readme():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
