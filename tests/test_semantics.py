"""docs/semantics.md: its examples run, its pictures show what the reference does, and that is what the page says."""

import importlib.util
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import mha_fast

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "semantics.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"

spec = importlib.util.spec_from_file_location("draw_semantics", DOCS / "draw_semantics.py")
pictures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pictures)


def packed(q_starts, k_starts, causal):
    """The rule of packed sequences as a function of query i and key j."""

    def rule(i, j):
        b, c = (np.searchsorted(starts, n, side="right") for starts, n in ((q_starts, i), (k_starts, j)))
        keys, queries = (starts[b] - starts[b - 1] for starts in (k_starts, q_starts))
        return b == c and (not causal or j - k_starts[b - 1] <= i - q_starts[b - 1] + keys - queries)

    return rule


# The rules of the page as functions of query i and key j, in the order of the panels.
RULES = {
    "causal": [
        lambda i, j: j <= i,
        lambda i, j: j <= i + 3,
        lambda i, j: j <= i + 1,
        lambda i, j: j <= i,
        lambda i, j: j <= i - 3,
        lambda i, j: j <= i + 1,
    ],
    "windows": [
        lambda i, j: i - 2 <= j <= i + 1,
        lambda i, j: i - 2 <= j,
        lambda i, j: i == j,
        lambda i, j: i + 1 <= j <= i + 4,
        lambda i, j: i + 1 <= j <= i + 3,
        lambda i, j: i + 3 <= j <= i + 5,
    ],
    "lengths": [
        lambda i, j: j < 5,
        lambda i, j: j < 2,
        lambda i, j: j < (1, 3, 0, 7)[i],
        lambda i, j: j < 5 and j <= i + 1,
        lambda i, j: j < 2 and j <= i - 2,
        lambda i, j: j <= i,
    ],
    "combined": [
        lambda i, j: j <= i + 3,
        lambda i, j: j >= i,
        lambda i, j: j < 6,
        lambda i, j: j != 2,
        lambda i, j: i <= j <= i + 3 and j < 6 and j != 2,
    ],
    "sequences": [
        packed([0, 3, 4, 7], [0, 3, 4, 7], causal=False),
        packed([0, 3, 4, 7], [0, 3, 4, 7], causal=True),
        packed([0, 2, 5], [0, 4, 9], causal=True),
        lambda i, j: j <= i + 5,
        lambda i, j: j <= i + 2,
        lambda i, j: i + 3 <= j <= i + 5,
    ],
}


@pytest.mark.parametrize("module", ["mha_fast", "mha_fast.reference"])
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_example(number, module):
    block = re.sub(r"^from mha_fast import", f"from {module} import", BLOCKS[number], flags=re.MULTILINE)
    exec(compile(block, f"{PAGE.name}, example {number}", "exec"), {})


@pytest.mark.parametrize("name", pictures.SHEETS)
def test_matrices(name):
    panels = pictures.SHEETS[name][0]()
    for panel, rule in zip(panels, RULES[name], strict=True):
        expected = [[bool(rule(i, j)) for j in range(panel.seen.shape[1])] for i in range(panel.seen.shape[0])]
        assert panel.seen.tolist() == expected, panel


def test_written_tokens():
    written = [panel.written for panel in pictures.sequences()[3:]]
    assert [np.flatnonzero(tokens).tolist() for tokens in written] == [[5, 6, 7], [2, 3, 4], [5, 6, 7]]


def test_heads():
    for count in pictures.KV_HEADS:
        assert pictures.head_of(8, count).tolist() == [h // (8 // count) for h in range(8)]


def test_curves():
    scores = np.linspace(-60, 60, 7)
    np.testing.assert_allclose(pictures.one_score(scores, softcap=30.0), 30 * np.tanh(scores / 30))
    slopes, distances = [0.25, 0.0625, 0.015625, 0.00390625], np.arange(-16, 33)
    np.testing.assert_allclose(pictures.bias_by_distance(distances, 4), -np.outer(slopes, np.abs(distances)))
    sinks = np.array([-3.0, 0.0, 2.0])
    np.testing.assert_allclose(pictures.share_of_keys(sinks, 8), 8 / (8 + np.exp(sinks)))


def test_committed_pictures():
    described = pictures.descriptions()
    shown = re.findall(r"\]\(img/(\w+)\.svg\)", PAGE.read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(path.stem for path in (DOCS / "img").iterdir()) == sorted(described)
    for name, text in described.items():
        found = ElementTree.parse(DOCS / "img" / f"{name}.svg").find(f".//{DESCRIPTION}")
        assert json.loads(found.text) == json.loads(text), f"{name}.svg is old: python docs/draw_semantics.py"


def test_drawing(tmp_path):
    pytest.importorskip("matplotlib")
    pictures.draw(tmp_path)
    drawn = {path.stem: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn.keys() == pictures.descriptions().keys()
    assert all(len(picture) < 40_000 for picture in drawn.values())
    pictures.draw(tmp_path)
    assert drawn == {path.stem: path.read_bytes() for path in tmp_path.iterdir()}


def test_every_public_name_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    unnamed = {"PositionWiseFFN", "get_num_threads", "set_num_threads", "show_config"}
    assert [name for name in mha_fast.__all__ if name not in unnamed and name not in text] == []
