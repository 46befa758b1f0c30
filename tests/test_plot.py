"""Heat maps of weights: what the panels show, their labels, and errors. Figures only, no window and no pyplot."""

import importlib
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import mha_fast
from examples import attention_heatmap as example
from mha_fast.plot import attention_heatmap

HEADS, QUERIES, KEYS = 6, 3, 5
ROWS, COLUMNS = ["a", "b", "c"], ["v", "w", "x", "y", "z"]


@pytest.fixture
def weights(rng):
    weights = rng.random((HEADS, QUERIES, KEYS))
    return weights / weights.sum(-1, keepdims=True)


def panels(figure):
    """The axes with a picture, and that of the colour bar."""
    *panels, bar = figure.axes
    assert all(len(axes.images) == 1 for axes in panels)
    return panels, bar


def drawn(figure):
    """Draws it, so that labels are laid out; the whole picture as numbers."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_one_panel_a_head(weights):
    figure = attention_heatmap(weights)
    assert isinstance(figure, Figure)
    axes, bar = panels(figure)
    assert [panel.get_title() for panel in axes] == [f"head {n}" for n in range(HEADS)]
    for panel, matrix in zip(axes, weights, strict=True):
        assert np.array_equal(panel.images[0].get_array(), matrix)
        assert panel.images[0].get_clim() == (0, weights.max())
    assert bar.get_ylabel() == "weight"
    corners = [panel.get_subplotspec().colspan.start for panel in axes]
    assert corners == [0, 1, 2, 3, 0, 1]
    picture = drawn(figure)
    assert picture.std() > 10


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 2, 3, 5), (1, 3, 5), (3, 5), (1, 1, 1)])
def test_shapes(rng, shape):
    weights = rng.random(shape)
    axes, _ = panels(attention_heatmap(weights))
    three = weights.reshape(-1, *shape[-2:])
    assert len(axes) == len(three)
    assert [panel.get_title() for panel in axes] == (["head 0", "head 1"] if len(three) == 2 else [""])
    assert np.array_equal(axes[-1].images[0].get_array(), three[-1])


def test_weights_of_a_layer(rng):
    layer = mha_fast.MultiHeadAttention(8, 2, rng=0)
    x = rng.random((1, 4, 8))
    layer(x, x, x, is_causal=True, need_weights=True)
    axes, _ = panels(attention_heatmap(layer.attention_weights))
    assert np.array_equal(axes[1].images[0].get_array(), layer.attention_weights[0, 1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "bool", "int64"])
def test_dtypes(dtype):
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    axes, _ = panels(attention_heatmap(np.eye(3).astype(dtype)))
    assert np.array_equal(axes[0].images[0].get_array(), np.eye(3))


def test_chosen_heads_in_their_order(weights):
    axes, _ = panels(attention_heatmap(weights, heads=[4, 1]))
    assert [panel.get_title() for panel in axes] == ["head 4", "head 1"]
    assert np.array_equal(axes[0].images[0].get_array(), weights[4])
    assert axes[0].images[0].get_clim() == (0, weights[[4, 1]].max())


def test_token_labels(weights):
    figure = attention_heatmap(weights, query_tokens=ROWS, key_tokens=tuple(COLUMNS), heads=range(5))
    drawn(figure)
    axes, _ = panels(figure)
    first, lower = axes[0], axes[4]
    assert labels(first.yaxis) == labels(lower.yaxis) == ROWS and labels(lower.xaxis) == COLUMNS
    assert list(lower.get_xticks()) == list(range(KEYS)) and list(first.get_yticks()) == list(range(QUERIES))
    assert all(label.get_rotation() == 90 for label in lower.get_xticklabels())


def test_many_tokens_are_thinned_out(rng):
    tokens = [f"t{n}" for n in range(100)]
    axes, _ = panels(attention_heatmap(rng.random((100, 100)), query_tokens=tokens, key_tokens=tokens))
    for axis, positions in ((axes[0].xaxis, axes[0].get_xticks()), (axes[0].yaxis, axes[0].get_yticks())):
        assert 10 <= len(positions) <= 24
        assert labels(axis) == [f"t{n:.0f}" for n in positions]


def test_tokens_are_no_formulas():
    tokens = ["$", "$x_", "a^$"]
    figure = attention_heatmap(np.eye(3), query_tokens=tokens, key_tokens=tokens, title="$_{")
    drawn(figure)
    axes, _ = panels(figure)
    assert labels(axes[0].xaxis) == tokens and figure.get_suptitle() == "$_{"


def test_without_tokens_whole_numbers(weights):
    figure = attention_heatmap(weights[0])
    drawn(figure)
    axes, _ = panels(figure)
    assert all(tick == int(tick) for tick in axes[0].get_yticks())


def test_zeros_and_what_is_not_finite_can_be_drawn():
    for value in (0, np.nan, np.inf, -np.inf):
        figure = attention_heatmap(np.full((2, 2), value))
        drawn(figure)
        assert panels(figure)[0][0].images[0].get_clim() == (0, 1)


def test_what_is_not_finite_stays_blank():
    weights = np.array([[0.5, np.inf], [-np.inf, np.nan]])
    figure = attention_heatmap(weights)
    drawn(figure)
    (panel,), _ = panels(figure)
    assert panel.images[0].get_array().mask.tolist() == [[False, True], [True, True]]
    assert panel.images[0].get_clim() == (0, 0.5) and np.isposinf(weights[0, 1])


def test_colours_and_a_given_figure(weights):
    own = Figure()
    figure = attention_heatmap(weights, cmap="gray", figure=own)
    assert figure is own
    assert panels(figure)[0][0].images[0].get_cmap().name == "gray"
    left, right = Figure(layout="constrained").subfigures(1, 2)
    assert attention_heatmap(weights, figure=left) is left and not right.axes
    drawn(left.figure)


def test_pyplot_is_not_needed():
    code = "import sys, mha_fast.plot as p; p.attention_heatmap([[1.0]]); print('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_example(tmp_path, capsys, suffix):
    path = tmp_path / f"heatmap.{suffix}"
    example.main([str(path)])
    assert path.stat().st_size > 5000 and str(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    "weights, options, error, text",
    [
        (np.zeros(3), {}, ValueError, "weights has shape (3,); expected (num_heads, L, S)"),
        (np.zeros((2, 1, 3, 3)), {}, ValueError, "of a batch, choose one entry, as weights[0]"),
        (np.zeros((1, 1, 1, 3, 3)), {}, ValueError, "weights has shape (1, 1, 1, 3, 3)"),
        (np.zeros((2, 0, 3)), {}, ValueError, "at least one head, query and key"),
        (np.zeros((2, 2), complex), {}, TypeError, "weights has dtype complex128; expected real numbers"),
        ([["a"]], {}, TypeError, "weights has dtype <U1"),
        (np.eye(2), {"query_tokens": ["a"]}, ValueError, "query_tokens has 1 labels; expected 2"),
        (np.eye(2), {"key_tokens": ["a"] * 3}, ValueError, "key_tokens has 3 labels; expected 2"),
        (np.eye(2), {"key_tokens": "ab"}, TypeError, "key_tokens is a str; expected a sequence of labels"),
        (np.eye(2), {"heads": [1]}, ValueError, "heads is [1]; expected numbers from 0 to 0"),
        (np.eye(2), {"heads": [-1]}, ValueError, "heads is [-1]; expected numbers from 0 to 0"),
        (np.eye(2), {"heads": []}, TypeError, "heads is []; expected a sequence of at least one integer"),
        (np.eye(2), {"heads": 0}, TypeError, "heads is 0; expected a sequence"),
        (np.eye(2), {"heads": [0.5]}, TypeError, "heads is [0.5]; expected a sequence"),
        (np.eye(2), {"heads": [[0], [0, 1]]}, ValueError, "heads cannot be converted to an array"),
        (np.eye(2), {"heads": [10**5000]}, TypeError, "heads is of type list; expected a sequence"),
        (np.eye(2), {"key_tokens": 5}, TypeError, "key_tokens is a int; expected a sequence of labels"),
        (np.eye(2), {"figure": 5}, TypeError, "figure is 5; expected a matplotlib Figure or SubFigure"),
        (np.eye(2), {"cmap": 5}, TypeError, "cmap is 5; expected a name or a matplotlib Colormap"),
        (np.eye(2), {"cmap": "grey?"}, ValueError, "cmap is 'grey?'; expected the name of a colormap"),
    ],
)
def test_refused(weights, options, error, text):
    figure = Figure()
    with pytest.raises(error) as caught:
        attention_heatmap(weights, **({"figure": figure} | options))
    assert text in str(caught.value) and not figure.axes


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "mha_fast.plot")
    with pytest.raises(ImportError, match=r'needs matplotlib: pip install "mha_fast\[plot\]"'):
        importlib.import_module("mha_fast.plot")
